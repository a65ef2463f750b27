"""How much memory a call takes that only the system can see: what libraries allocate, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import ParamSpec, TypeVar

from tilewright.kernels.gpu.memory import peak_nbytes

P = ParamSpec("P")
R = TypeVar("R")


def in_new_process(function: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """What a function returns that is called in a new process, which holds nothing of ours."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments, **options).result()


def grown_by(call: Callable[[], object]) -> int:
    """How far a call lets this process's memory grow at most, in bytes; what it had before and gave back, it may use
    again."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew at what is in memory now
    before = peak_nbytes()
    call()
    return peak_nbytes() - before
