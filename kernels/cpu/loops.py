"""What the CPU's compiled loops share: how they are compiled, cut into rows and run on threads."""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.kernels.deferred import numba
from tilewright.kernels.numbers import ceil_div

PIECES = 4
"""Pieces of a loop for each thread: BLAS's threads spin on for a while, and delay any thread that shares their core."""


def usable_cores() -> int:
    """Processors that the system lets this process use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_threads() -> int:
    """Processors this process may use: fewer than there are where OMP_NUM_THREADS says so, as for BLAS.

    Dask sets it to 1 in every worker process, and in the process that starts them.
    """
    count = usable_cores()
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(count, int(wanted)) if wanted.isdigit() and int(wanted) > 0 else count


def blocks(length: int, longest: int) -> Iterator[slice]:
    """Even pieces of a side, none longer than ``longest``."""
    pieces = ceil_div(length, longest)
    edges = [length * i // pieces for i in range(pieces + 1)]
    return (slice(start, stop) for start, stop in itertools.pairwise(edges))


def on_threads(pool: ThreadPoolExecutor, work: Callable[..., Any], rows: int, *arguments: Any) -> list[Any]:
    """``work(*arguments, start, stop)`` over even ranges of rows, on threads; their results in order."""
    jobs = [
        pool.submit(work, *arguments, piece.start, piece.stop)
        for piece in blocks(rows, ceil_div(rows, PIECES * cpu_threads()))
    ]
    return [job.result() for job in jobs]


def by_memory(array: np.ndarray) -> np.ndarray:
    """The array or its transpose, whichever has neighbours in memory next to each other in its rows."""
    return array.T if abs(array.strides[0]) < abs(array.strides[1]) else array


def read_only(array: np.ndarray) -> np.ndarray:
    """The same elements, not to be written to. A loop that only reads takes them so, since Numba would compile it once
    more for memory that may be written to."""
    view = array.view()
    view.flags.writeable = False
    return view


def source_type(dtype: np.dtype) -> Any:
    """The Numba type that every matrix of a dtype converts to: any strides, read-only, even unaligned."""
    return numba.types.Array(numba.from_dtype(dtype), 2, "A", readonly=True, aligned=False)


def target_type(dtype: np.dtype) -> Any:
    return numba.types.Array(numba.from_dtype(dtype), 2, "A", aligned=False)


class Allowance:
    """How much of some work this process still does without a loop that it would have to load, or to compile. Any
    thread may ask.

    Examples
    --------
    >>> few = Allowance(100)
    >>> few.takes(60), few.takes(60), few.takes(40)
    (True, False, True)
    """

    def __init__(self, amount: int) -> None:
        self._left = amount
        self._lock = threading.Lock()

    def takes(self, amount: int) -> bool:
        with self._lock:
            if amount > self._left:
                return False
            self._left -= amount
            return True


@functools.cache
def _disk_cache() -> Any:
    """The class of Numba's cache on disk, as `kept` uses it. Numba offers no public way; tests fail where this one
    ends."""
    from numba.core.caching import FunctionCache

    from tilewright.kernels.gpu import fingerprint

    class DiskCache(FunctionCache):
        def __init__(self, function: Any) -> None:
            super().__init__(function)
            # In place of what tells of the function's file alone.
            self._cache_file._source_stamp = fingerprint.source_hash(
                Path(function.__code__.co_filename).parent
            )

        def load_overload(self, *asked: Any) -> Any:
            with suppress(OSError):
                return super().load_overload(*asked)
            return None

        def save_overload(self, *found: Any) -> None:
            try:
                super().save_overload(*found)
            except OSError:  # a full disk; the index may by now call the code of an earlier source current
                with suppress(OSError):
                    os.unlink(self._cache_file._index_path)

    return DiskCache


def kept(loop: Any, arguments: tuple[Any, ...] | None = None) -> Any:
    """What `numba.njit` made of a function, with its machine code kept on disk from one process to the next.

    arguments: the types that it is compiled for, now, and no others.

    Numba's own cache knows a loop by the file it is in. But the code holds constants and functions of other modules as
    well, so here it is used for as long as no module of this package changes. It lies beside the loop's file or in the
    user's cache folder; where neither can be written, every process compiles anew.
    """
    from numba.core import config

    if config.DISABLE_JIT:
        return loop  # it is the plain function
    try:
        loop._cache = _disk_cache()(loop.py_func)
    except RuntimeError as error:
        if "no locator available" not in str(error):  # Numba's words for having found no place
            raise
    if arguments is not None:
        loop.compile(arguments)
        loop.disable_compile()
    return loop


@functools.cache
def compiled(function: Callable[..., Any], *arguments: Any, nogil: bool = True) -> Any:
    """``function`` for these argument types only, so that it is compiled once per dtype, not once per layout.

    nogil: whether it releases the interpreter's lock. That pays where it runs longer than getting the lock back takes,
    some 50 µs among dozens of threads.
    """
    return kept(numba.njit(nogil=nogil)(function), arguments)


def _same(value: Any) -> Any:
    return value


def _compile_something() -> None:
    with suppress(Exception):  # it is raised again where a loop is needed, by a caller who reports it
        from numba import int64, njit

        kept(njit(nogil=True)(_same), (int64,))


@functools.cache
def start_compiler() -> threading.Thread:
    """Start Numba's set-up for the CPU on a thread of its own, so that the first loop does not wait for it. It takes
    0.25 s in every process; then a loop is loaded from Numba's disk cache in 4 ms.

    A caller that needs a loop earlier waits for the rest.
    """
    thread = threading.Thread(target=_compile_something, name="tilewright-start-compiler", daemon=True)
    thread.start()
    return thread
