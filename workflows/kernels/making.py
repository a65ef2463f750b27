"""The files of `tilewright.kernels.shipped.packs`, made: usual kernels compiled for GPUs that need not be there.

Each process describes one GPU, and asks for its share of what that one needs: Numba compiles one kernel at a time, so
that several processes are what uses several cores.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.kernels.errors import OptionError
from tilewright.kernels.gpu import code_cache
from tilewright.kernels.gpu.code_cache import MachineCode
from tilewright.kernels.numbers import ceil_div
from tilewright.kernels.shipped import abi, packs
from tilewright.kernels.shipped.packs import Capability
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.transfer.files import with_remedy

if TYPE_CHECKING:
    from tilewright.workflows.kernels.usual import Needed

SHARE = 8
"""Kernels that a process compiles, at least, for the two seconds that it takes to begin."""
SHARES = 4
"""Processes, one after the other, for each that runs at a time: kernels take unlike times."""

Compiled = tuple[MachineCode, str]
"""A kernel, and how it takes its arguments."""


def make(
    folder: Path,
    capabilities: Sequence[Capability],
    jobs: Sequence[str] | None,
    processes: int,
    tell: Callable[[str], None],
) -> None:
    """Compile the kernels of jobs, or of all usual ones, for GPUs of these capabilities into files in a folder, of each
    capability the older file's in their place."""
    from tilewright.kernels.gpu import fingerprint

    source = fingerprint.source_hash()
    if (asks := packs.other_code()) is not None:
        raise OptionError(f"{asks}, which launches would not use: unset it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".draft"):
            pass  # before minutes of compiling
    except OSError as error:
        raise StoreError(f"output: cannot write to {folder}: {with_remedy(error)}") from error
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_begin, max_tasks_per_child=1) as pool:
        lists = [
            (capability, number, pool.submit(_keys, capability, number, jobs))
            for capability in capabilities
            for number in range(_count(capability))
        ]
        shares: dict[Capability, list[tuple[int, list[tuple[str, str]]]]] = defaultdict(list)
        known: dict[Capability, set[str]] = defaultdict(set)
        for capability, number, listed in lists:
            new = [(key, job) for key, job in listed.result() if key not in known[capability]]
            known[capability].update(key for key, _ in new)
            step = max(SHARE, ceil_div(len(new), SHARES * processes))
            shares[capability] += [(number, new[first : first + step]) for first in range(0, len(new), step)]
        under_way = {
            capability: [pool.submit(_compiled, capability, number, share) for number, share in each]
            for capability, each in shares.items()
        }
        for capability, futures in under_way.items():
            kernels: dict[str, Compiled] = {}
            seconds = 0.0
            for future in as_completed(futures):
                share, spent = future.result()
                kernels |= share
                seconds += spent
                tell(f"{named(capability)}: {len(kernels)} of {len(known[capability])} kernels compiled")
            if fingerprint.source_hash.__wrapped__() != source:
                raise RuntimeError(
                    "the source of tilewright.kernels changed while it was compiled; compile it again"
                )
            path = folder / packs.file_name(capability)
            packs.write(path, source, linker_version(), kernels)
            tell(f"{path}: {path.stat().st_size / 1e6:.1f} MB, in {seconds:.0f} s of a core")


def named(capability: Capability) -> str:
    """As NVIDIA writes it, ``9.0``."""
    return "{}.{}".format(*capability)


def linker_version() -> tuple[int, int]:
    """Of nvJitLink, which makes machine code."""
    from cuda.bindings import nvjitlink

    major, minor = nvjitlink.version()
    return int(major), int(minor)


def checked(name: str, code: MachineCode, layout: str) -> None:
    """Raise ValueError unless a kernel takes its arguments where a launch packs them."""
    takes, packed = abi.argument_places(code.cubin, code.entry), abi.packed_places(layout)
    if takes != packed:
        raise ValueError(
            f"{name} takes arguments (offset, bytes) at {takes}, and a launch packs them at {packed}: this version of"
            " numba-cuda passes them in another way than `argument_layout` knows"
        )


def _begin() -> None:
    """In a process that compiles: what is made anew is compiled, not copied."""
    os.environ[packs.ENVIRONMENT] = os.environ[code_cache.ENVIRONMENT] = "off"


def _count(capability: Capability) -> int:
    from tilewright.workflows.kernels.usual import gpus_of

    return len(gpus_of(capability))


def _asked(capability: Capability, number: int, jobs: Iterable[str] | None) -> Mapping[str, Needed]:
    """What jobs need on one of the usual GPUs of a capability, in a process that has asked for no other."""
    from tilewright.kernels.shipped.described import describe
    from tilewright.workflows.kernels.usual import gpus_of, kernels_of, usual_jobs

    describe(gpus_of(capability)[number])
    wanted = None if jobs is None else set(jobs)
    return kernels_of(job for job in usual_jobs() if wanted is None or job.name in wanted)


def _keys(capability: Capability, number: int, jobs: Sequence[str] | None) -> list[tuple[str, str]]:
    """What is needed, each kernel with the first job that needs it."""
    return [(key, needed.job) for key, needed in _asked(capability, number, jobs).items()]


def _compiled(
    capability: Capability, number: int, share: Sequence[tuple[str, str]]
) -> tuple[dict[str, Compiled], float]:
    """Kernels, compiled, and the processor time of that, in seconds. Only the jobs that need them are asked."""
    found = _asked(capability, number, {job for _, job in share})
    made: dict[str, Compiled] = {}
    for key, _ in share:
        kernel = found[key].kernel
        code, layout = kernel.machine_code(capability), kernel.layout.format
        checked(kernel.py_func.__qualname__, code, layout)
        made[key] = code, layout
    return made, time.process_time()
