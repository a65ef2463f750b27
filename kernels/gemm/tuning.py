"""Which kernel was fastest on this GPU, remembered between runs: an aid to `select`, never needed.

One JSON file a GPU model in the user's cache directory, from a problem's bucket to a kernel's name. A file
that is missing or damaged, and names of kernels that are gone, count as nothing remembered.
"""

from __future__ import annotations

import functools
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tilewright.kernels.bfloat16 import dtype_name
from tilewright.kernels.device_choice import SIMULATOR
from tilewright.kernels.gemm.base import Problem

generation = 0
"""How often this process has measured; when it changes, decisions are made anew."""


def directory() -> Path:
    """Where figures are kept: ``$XDG_CACHE_HOME/tilewright/gemm``, by default below ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "tilewright" / "gemm"


def _side(length: int) -> int:
    """Lengths of the same power of two, rounded up, share a bucket."""
    return max(length - 1, 0).bit_length()


def bucket(
    m: int, n: int, k: int, dtypes: tuple[np.dtype, np.dtype, np.dtype], precision: str, accumulate: bool
) -> str:
    """The name of all problems that one measurement covers."""
    kinds = "-".join(dtype_name(dtype) for dtype in dtypes)
    sides = "-".join(str(_side(length)) for length in (m, n, k))
    return f"{kinds} {precision}{' accumulate' if accumulate else ''} {sides}"


def _file() -> Path | None:
    """The file of the GPU at hand."""
    if SIMULATOR:
        return None
    from numba import cuda

    name = cuda.get_current_device().name
    text = name.decode() if isinstance(name, bytes) else str(name)
    return directory() / (re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-") + ".json")


@functools.cache
def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def preferred(problem: Problem) -> str | None:
    """The name of the kernel that was measured fastest for such problems, if any was."""
    path = _file()
    if path is None:
        return None
    dtypes = (problem.a.dtype, problem.b.dtype, problem.c.dtype)
    return _read(path).get(
        bucket(problem.m, problem.n, problem.k, dtypes, problem.precision, problem.accumulate)
    )


def remember(fastest: Mapping[str, str]) -> Path | None:
    """Add measurements to the file of the GPU at hand, replacing it in one step; returns where that is."""
    path = _file()
    if path is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json", delete=False) as draft:
        json.dump(_read(path) | dict(fastest), draft, indent=1, sort_keys=True)
    os.replace(draft.name, path)
    global generation
    _read.cache_clear()
    generation += 1
    return path
