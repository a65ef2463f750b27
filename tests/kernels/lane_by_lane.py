"""Runs a kernel that the CUDA simulator cannot: its plain Python, thread by thread, with inline PTX in Python.

Good for kernels of our own whose only intrinsics are those below. It proves indexing, ragged edges, the bookkeeping
of pipelines, and that barriers and waits stand where they must:

- an asynchronous copy arrives either at once or as late as the kernel's waits allow (``late``), so that reading
  too early finds NaN, and overwriting too early destroys what a slower thread has yet to read;
- between two barriers threads run one after another, first to last, so the first is a whole phase ahead.

Registers are NumPy arrays, so it is slow: for tiles of a few warps and a few stages of k.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

WARP = 32


class _Flat:
    """Memory at an address, as a flat array of a dtype; indices may be anything that is an integer."""

    def __init__(self, address: int, dtype: Any) -> None:
        self._address, self._dtype = int(address), np.dtype(dtype)

    def _at(self, index: Any) -> Any:
        place = self._address + int(index) * self._dtype.itemsize
        return np.ctypeslib.as_array((ctypes.c_char * self._dtype.itemsize).from_address(place)).view(
            self._dtype
        )

    def __getitem__(self, index: Any) -> Any:
        return self._at(index)[0]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._at(index)[0] = value


class Block:
    """One block's threads, which take turns: each runs until a barrier, a warp's product, or its end."""

    def __init__(self, threads: int, shared: np.ndarray, late: bool) -> None:
        self.threads, self.shared, self.late = threads, shared, late
        self.groups: list[list[list[Callable[[], None]]]] = [[[]] for _ in range(threads)]
        self.operands: list[Any] = [None] * threads
        self._turn = [threading.Semaphore(0) for _ in range(threads)]
        self._waiting: dict[int, str] = {}
        self._alive = list(range(threads))
        self._control = threading.Semaphore(0)
        self._error: BaseException | None = None

    def pause(self, thread: int, why: str) -> None:
        self._waiting[thread] = why
        self._control.release()
        self._turn[thread].acquire()
        if self._error:
            raise SystemExit

    def run(self, body: Callable[[int], None]) -> None:
        def start(thread: int) -> None:
            self._turn[thread].acquire()
            try:
                if not self._error:
                    body(thread)
            except SystemExit:
                pass
            except BaseException as error:
                self._error = error
            self._alive.remove(thread)
            self._waiting.pop(thread, None)
            self._control.release()

        workers = [
            threading.Thread(target=start, args=(thread,), daemon=True) for thread in range(self.threads)
        ]
        for worker in workers:
            worker.start()
        ready = list(range(self.threads))
        while ready:
            for thread in ready:
                self._waiting.pop(thread, None)
                self._turn[thread].release()
                self._control.acquire()
                if self._error:
                    self._stop(workers)
            ready = self._released()
        for worker in workers:
            worker.join()

    def _released(self) -> list[int]:
        """The threads that may go on: a warp that meets in a product, or all at a barrier."""
        for first in range(0, self.threads, WARP):
            lanes = range(first, first + WARP)
            if all(self._waiting.get(lane) == "warp" for lane in lanes):
                return list(lanes)
        if self._alive and all(self._waiting.get(thread) == "block" for thread in self._alive):
            assert len(self._alive) == self.threads, "some threads ended before a barrier that others wait at"
            return list(self._alive)
        assert not self._alive, f"deadlock: {self._waiting}"
        return []

    def _stop(self, workers: list[threading.Thread]) -> None:
        for thread in list(self._alive):
            self._turn[thread].release()
        for worker in workers:
            worker.join()
        assert self._error is not None
        raise self._error


_current = threading.local()


class _Cuda:
    """What stands in for the name ``cuda`` in the kernel's module."""

    def __init__(self, shared_dtype: Any) -> None:
        self.shared = SimpleNamespace(array=lambda shape, dtype, alignment=None: _current.block.shared)
        self.local = SimpleNamespace(array=lambda count, dtype: np.full(count, np.nan, shared_dtype))

    threadIdx = property(lambda self: SimpleNamespace(x=_current.thread))
    blockIdx = property(lambda self: SimpleNamespace(x=_current.place[0], y=_current.place[1]))

    def syncthreads(self) -> None:
        _current.block.pause(_current.thread, "block")

    def shfl_xor_sync(self, mask: int, value: Any, distance: int) -> Any:
        """The value of the lane whose number differs by the bits of ``distance``; all lanes of a warp meet."""
        assert mask == 0xFFFFFFFF, "only whole warps meet here"
        block, thread = _current.block, _current.thread
        block.operands[thread] = value
        block.pause(thread, "warp")
        found = block.operands[thread ^ distance]
        block.pause(thread, "warp")  # everyone has read the values before the next ones replace them
        return found


def _copy(nbytes: int) -> Callable[..., None]:
    def copy_or_zero(shared: np.ndarray, index: int, address: Any, wanted: bool) -> None:
        count = nbytes // shared.itemsize
        assert index * shared.itemsize % nbytes == 0, "a copy to an address that is not aligned to its size"
        assert 0 <= index <= shared.size - count, "a copy to outside shared memory"

        def arrive() -> None:
            if wanted:
                assert int(address) % nbytes == 0, "a copy from an address that is not aligned to its size"
                shared[index : index + count] = np.frombuffer(
                    ctypes.string_at(int(address), nbytes), shared.dtype
                )
            else:
                shared[index : index + count] = 0

        if _current.block.late:
            _current.block.groups[_current.thread][-1].append(arrive)
        else:
            arrive()

    return copy_or_zero


def _commit() -> None:
    _current.block.groups[_current.thread].append([])


def _wait(pending: int) -> None:
    groups = _current.block.groups[_current.thread]
    for group in groups[: len(groups) - 1 - pending]:  # the last, open one is not committed yet
        for arrive in group:
            arrive()
        group.clear()


def _load_vector(registers: np.ndarray, first: int, array: Any, index: Any) -> None:
    for lane in range(16 // registers.itemsize):
        registers[first + lane] = array[int(index) + lane]


def _store_vector(array: Any, index: Any, registers: np.ndarray, first: int) -> None:
    for lane in range(16 // registers.itemsize):
        array[int(index) + lane] = registers[first + lane]


def _mma_f64(k: int, *, native: bool) -> Callable[..., None]:
    """The instruction as `ptx.mma_f64` describes it: lanes meet, and each takes its part of the product."""

    def mma(c: Any, c0: int, a: Any, a0: int, b: Any, b0: int) -> None:
        block, thread = _current.block, _current.thread
        block.operands[thread] = (a[a0 : a0 + k // 2].copy(), b[b0 : b0 + k // 4].copy())
        block.pause(thread, "warp")
        left, right = np.empty((16, k)), np.empty((k, 8))
        first = thread // WARP * WARP
        for lane in range(WARP):
            g, t = divmod(lane, 4)
            mine_a, mine_b = block.operands[first + lane]
            for s in range(k // 4):
                left[g, t + 4 * s], left[g + 8, t + 4 * s] = mine_a[2 * s], mine_a[2 * s + 1]
                right[t + 4 * s, g] = mine_b[s]
        block.pause(thread, "warp")  # everyone has read the operands before the next product replaces them
        g, t = divmod(thread % WARP, 4)
        product = left[[g, g + 8]] @ right[:, [2 * t, 2 * t + 1]]
        c[c0 : c0 + 4] += product.ravel()

    return mma


PTX = SimpleNamespace(
    copy_async_4_or_zero=_copy(4),
    copy_async_8_or_zero=_copy(8),
    copy_async_16_or_zero=_copy(16),
    commit_copies=_commit,
    wait_copies=_wait,
    load_vector=_load_vector,
    store_vector=_store_vector,
    global_array=_Flat,
    mma_f64=_mma_f64,
)

LIBDEVICE = SimpleNamespace(
    double_as_longlong=lambda x: int(np.float64(x).view(np.int64)),
    longlong_as_double=lambda x: np.int64(x).view(np.float64),
)

TYPES = SimpleNamespace(int32=int, int64=int, uint64=int, float64=np.float64, float32=np.float32)


def run(
    kernel: Callable[..., None],
    grid: tuple[int, int],
    threads: int,
    shared_nbytes: int,
    dtype: Any,
    arguments: tuple[Any, ...],
    late: bool,
) -> None:
    """Run every block of a grid, one after another, over host memory whose addresses are in ``arguments``."""
    for y in range(grid[1]):
        for x in range(grid[0]):
            shared = np.full(shared_nbytes // np.dtype(dtype).itemsize, np.nan, dtype)
            block = Block(threads, shared, late)

            def body(thread: int, block: Block = block, place: tuple[int, int] = (x, y)) -> None:
                _current.block, _current.thread, _current.place = block, thread, place
                kernel(*arguments)

            block.run(body)


def stand_ins(monkeypatch: Any, module: Any, dtype: Any) -> None:
    """Put Python in the place of the device in a kernel's module, until the test ends."""
    monkeypatch.setattr(module, "cuda", _Cuda(dtype))
    monkeypatch.setattr(module, "ptx", PTX)
    monkeypatch.setattr(module, "types", TYPES)
    monkeypatch.setattr(module, "inlined", lambda function: function)
    if hasattr(module, "libdevice"):
        monkeypatch.setattr(module, "libdevice", LIBDEVICE)
    if hasattr(module, "numba"):
        monkeypatch.setattr(module, "numba", SimpleNamespace(from_dtype=lambda dtype: np.dtype(dtype).type))
