"""The files of compiled kernels that there are here, or that were just made, for people."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.kernels.errors import OptionError
from tilewright.kernels.shipped import packs
from tilewright.kernels.shipped.packs import Capability
from tilewright.workflows.kernels import usual
from tilewright.workflows.kernels.making import make, named

ALL = "all"


@dataclass(frozen=True)
class PackFile:
    """One file, of one compute capability."""

    path: Path
    capability: Capability
    kernels: int
    nbytes: int
    useless: str
    """Why nothing of it is used here; empty where it is."""

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "compute_capability": list(self.capability),
            "kernels": self.kernels,
            "nbytes": self.nbytes,
            "useless": self.useless or None,
        }

    def __str__(self) -> str:
        told = (
            f"{named(self.capability):<5} {self.kernels:>4} kernels  {self.nbytes / 1e6:5.1f} MB  {self.path}"
        )
        return told + (f"\n      not used: {self.useless}" if self.useless else "")


@dataclass(frozen=True)
class Packs:
    """The files of a folder."""

    folder: Path | None
    files: tuple[PackFile, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": None if self.folder is None else str(self.folder),
            "files": [file.to_json() for file in self.files],
        }

    def __str__(self) -> str:
        if self.folder is None:
            return f"none: {packs.ENVIRONMENT} is off, so kernels are compiled when they are first used"
        if not self.files:
            return f"none in {self.folder}: kernels are compiled when they are first used"
        return "\n".join(map(str, self.files))


def compiled_kernels() -> Packs:
    """What this installation has, or the folder that the environment names."""
    return _packs_of(packs.directory())


def compile_kernels(
    folder: str | Path,
    capabilities: Sequence[str],
    jobs: Sequence[str] = (),
    processes: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Packs:
    """Compile the kernels of usual jobs into a folder. No GPU is needed.

    capabilities: as ``9.0``, or ``all`` that usual GPUs have. jobs: names of `usual.usual_jobs`; all of them where none
    is given. processes: as many as there are cores where it is not given.
    """
    known = {named(capability): capability for capability in usual.GPUS}
    for text in capabilities:
        if text not in known and text != ALL:
            raise OptionError(f"compute capability {text!r} is none of {', '.join(known)}, and not {ALL!r}")
    if not capabilities:
        raise OptionError(
            f"kernels are compiled for GPUs of a compute capability: say which of {', '.join(known)}, or {ALL}"
        )
    wanted = (
        list(known.values()) if ALL in capabilities else [known[text] for text in dict.fromkeys(capabilities)]
    )
    names = [job.name for job in usual.usual_jobs()]
    for job in jobs:
        if job not in names:
            raise OptionError(f"no usual job is called {job!r}; there are {', '.join(names)}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    make(Path(folder), wanted, list(jobs) or None, processes or cores, tell)
    return _packs_of(Path(folder))


def _packs_of(folder: Path | None) -> Packs:
    files = []
    for capability in usual.GPUS if folder is not None else ():
        assert folder is not None
        pack = packs.opened(folder, capability)
        path = folder / packs.file_name(capability)
        if pack is None and path.is_file():
            damaged = "it is damaged, or of another version; make it again"
            files.append(PackFile(path, capability, 0, path.stat().st_size, damaged))
        if pack is not None:
            nbytes = pack.path.stat().st_size
            useless = packs.why_not(pack.head) or ""
            files.append(PackFile(pack.path, capability, len(pack.head.kernels), nbytes, useless))
    return Packs(folder, tuple(files))
