"""What this process had to compile, since neither came with the installation nor was kept on disk."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Compilation(NamedTuple):
    """A kernel that this process compiled."""

    kernel: str
    """The name of its function."""
    seconds: float
    beyond: Path | None
    """The file of shipped kernels for such GPUs, which has not got it; None where none is in use."""


_compilations: list[Compilation] = []


def add(compilation: Compilation) -> None:
    """Any thread may."""
    _compilations.append(compilation)


def compilations() -> tuple[Compilation, ...]:
    """What this process has compiled so far, in its order."""
    return tuple(_compilations)
