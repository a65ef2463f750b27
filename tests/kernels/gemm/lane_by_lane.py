"""Runs a kernel that the CUDA simulator cannot: its plain Python, thread by thread, with inline PTX in Python.

Good for kernels of our own whose only intrinsics are those below. It proves indexing, ragged edges, the bookkeeping
of pipelines, and that barriers and waits stand where they must:

- an asynchronous copy arrives either at once or as late as the kernel's waits allow (``late``), so that reading
  too early finds NaN, and overwriting too early destroys what a slower thread has yet to read;
- between two barriers threads run one after another, first to last, so the first is a whole phase ahead;
- lines that ``ldmatrix`` reads at once must lie in different banks.

Registers are NumPy arrays, so it is slow: for tiles of a few warps and a few stages of k. Integer kernels have
stand-ins of their own: their types wrap as the device's do, and their registers hold None until they are written.
"""

from __future__ import annotations

import ctypes
import pkgutil
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import greenlet
import numpy as np

from tilewright.kernels import ptx
from tilewright.kernels.numbers import WARP

POISON = 0x5B
"""What shared memory of integers holds before anything is written to it."""


class _Flat:
    """Memory at an address, as a flat array of a dtype; indices may be anything that is an integer."""

    def __init__(self, address: int, dtype: Any) -> None:
        self._address, self._dtype = int(address), np.dtype(dtype)

    def _place(self, index: Any) -> int:
        return self._address + int(index) * self._dtype.itemsize

    def __getitem__(self, index: Any) -> Any:
        return np.frombuffer(ctypes.string_at(self._place(index), self._dtype.itemsize), self._dtype)[0]

    def __setitem__(self, index: Any, value: Any) -> None:
        ctypes.memmove(self._place(index), np.array(value, self._dtype).tobytes(), self._dtype.itemsize)


class Block:
    """One block's threads, which take turns: each runs until a barrier, a warp's product, or its end.

    They are greenlets, all of one thread of the system's: those of the system took most of the time to take turns.
    """

    def __init__(self, threads: int, shared: np.ndarray, late: bool) -> None:
        self.threads, self.shared, self.late = threads, shared, late
        self.groups: list[list[list[Callable[[], None]]]] = [[[]] for _ in range(threads)]
        self.operands: list[Any] = [None] * threads
        self.products: dict[int, np.ndarray] = {}
        self.readable: list[tuple[int, int]] = []
        """Where global memory may be copied from; empty where that is not checked."""
        self._waiting: dict[int, str] = {}
        self._alive = list(range(threads))

    def pause(self, thread: int, why: str) -> None:
        self._waiting[thread] = why
        greenlet.getcurrent().parent.switch()

    def run(self, body: Callable[[], None], place: tuple[int, int], grid: tuple[int, int] = (1, 1)) -> None:
        """The block at a place of a grid. An error of one thread is raised here, and the others end where they are."""
        _current.block, _current.place, _current.grid = self, place, grid
        threads = [greenlet.greenlet(body) for _ in range(self.threads)]
        ready = deque(range(self.threads))
        while self._alive:
            if not ready:
                ready.extend(self._released())
            thread = ready.popleft()
            self._waiting.pop(thread, None)
            _current.thread = thread
            threads[thread].switch()
            if threads[thread].dead:
                self._alive.remove(thread)

    def _released(self) -> list[int]:
        """The threads that may go on: a warp that meets in a product, or all at a barrier."""
        for first in range(0, self.threads, WARP):
            lanes = range(first, first + WARP)
            if all(self._waiting.get(lane) == "warp" for lane in lanes):
                return list(lanes)
        assert all(self._waiting.get(thread) == "block" for thread in self._alive), (
            f"deadlock: {self._waiting}"
        )
        assert len(self._alive) == self.threads, "some threads ended before a barrier that others wait at"
        return list(self._alive)


_current: Any = SimpleNamespace()
"""The thread that has its turn, its block, and where that is in the grid."""


def _poison(dtype: Any) -> Any:
    return POISON if np.dtype(dtype).kind in "iu" else np.nan


class _Cuda:
    """What stands in for the name ``cuda`` in the kernel's module."""

    def __init__(self, shared_dtype: Any) -> None:
        self.shared = SimpleNamespace(array=lambda shape, dtype, alignment=None: _current.block.shared)
        self.local = SimpleNamespace(
            array=lambda count, dtype: np.full(count, _poison(shared_dtype), shared_dtype)
        )

    threadIdx = property(lambda self: SimpleNamespace(x=_current.thread))
    blockIdx = property(lambda self: SimpleNamespace(x=_current.place[0], y=_current.place[1]))
    gridDim = property(lambda self: SimpleNamespace(x=_current.grid[0], y=_current.grid[1]))

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
                _check_source(_current.block, int(address), nbytes)
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


def _check_source(block: Block, address: int, nbytes: int) -> None:
    inside = any(start <= address and address + nbytes <= end for start, end in block.readable)
    assert inside or not block.readable or nbytes == 0, "a copy from outside the operands"


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
    """The instruction as `warp_mma.mma_f64` describes it: lanes meet, and each takes its part of the product."""

    def mma(c: Any, c0: int, a: Any, a0: int, b: Any, b0: int) -> None:
        block, thread = _current.block, _current.thread
        block.operands[thread] = (a[a0 : a0 + k // 2].copy(), b[b0 : b0 + k // 4].copy())
        block.pause(thread, "warp")
        first = thread // WARP * WARP
        if thread == first:  # the whole product once, for all lanes
            left, right = np.empty((16, k)), np.empty((k, 8))
            for lane in range(WARP):
                g, t = divmod(lane, 4)
                mine_a, mine_b = block.operands[first + lane]
                left[g, t::4], left[g + 8, t::4] = mine_a[::2], mine_a[1::2]
                right[t::4, g] = mine_b
            block.products[first] = left @ right
        block.pause(thread, "warp")  # everyone has read the operands before the next product replaces them
        g, t = divmod(thread % WARP, 4)
        c[c0 : c0 + 4] += block.products[first][[g, g + 8], 2 * t : 2 * t + 2].ravel()

    return mma


class Integer:
    """An integer type: called, it wraps a number; NumPy takes it for a dtype."""

    def __init__(self, name: str) -> None:
        self.dtype = np.dtype(name)
        self._bits = (1 << (8 * self.dtype.itemsize)) - 1
        self._below = self._bits // 2 + 1 if self.dtype.kind == "i" else 0
        """How many of the numbers are negative."""

    def __call__(self, value: Any) -> int:
        return (int(value) + self._below & self._bits) - self._below


class _FlatIntegers(_Flat):
    """The same for integers, which wrap when they are stored."""

    def __init__(self, address: int, kind: Integer) -> None:
        super().__init__(address, kind.dtype)
        self._kind = kind

    def __getitem__(self, index: Any) -> int:
        return int(super().__getitem__(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, self._kind(value))


class _IntegerCuda(_Cuda):
    """Registers of integers hold None until they are written, so that using them too early fails."""

    def __init__(self) -> None:
        super().__init__(np.uint8)
        self.local = SimpleNamespace(array=lambda count, dtype: np.full(count, None, object))

    def jit(self, **options: Any) -> Callable[..., Any]:
        return lambda function: function


def _unroll(function: Callable[..., None], count: int, arguments: tuple[Any, ...]) -> None:
    for i in range(count):
        function(i, *arguments)


def _copy_part(shared: int, address: int, nbytes: int) -> None:
    block = _current.block
    assert shared % 16 == address % 16 == 0, "a copy between addresses that are not aligned to its size"
    assert 0 <= shared <= block.shared.size - 16, "a copy to outside shared memory"
    assert 0 <= nbytes <= 16, nbytes
    assert block.readable, "which memory are the operands'?"
    _check_source(block, address, nbytes)

    def arrive() -> None:
        data = ctypes.string_at(address, nbytes) + bytes(16 - nbytes)
        block.shared[shared : shared + 16] = np.frombuffer(data, np.uint8)

    if block.late:
        block.groups[_current.thread][-1].append(arrive)
    else:
        arrive()


def _lines_of_the_warp(shared: int) -> Iterator[tuple[int, list[int]]]:
    """The number of each of four matrices, and the addresses of its eight lines, which lanes give as they meet. They
    meet once more behind the last."""
    block, thread = _current.block, _current.thread
    assert shared % 16 == 0, "a line that is not aligned to its size"
    block.operands[thread] = shared
    block.pause(thread, "warp")
    lanes = thread // WARP * WARP
    for i in range(4):
        lines = block.operands[lanes + 8 * i : lanes + 8 * i + 8]
        assert len({line // 16 % 8 for line in lines}) == 8, f"a bank conflict: {lines}"
        yield i, lines
    block.pause(thread, "warp")


def _load_matrices(registers: np.ndarray, first: int, shared: int) -> None:
    """``ldmatrix.x4``: each lane takes its words of the lines whose addresses all gave."""
    block, lane = _current.block, _current.thread % WARP
    for i, lines in _lines_of_the_warp(shared):
        place = lines[lane // 4] + 4 * (lane % 4)
        registers[first + i] = int(block.shared[place : place + 4].view(np.uint32)[0])


def _load_turned(registers: np.ndarray, first: int, shared: int) -> None:
    """``ldmatrix.x4.trans``: the same, of which each takes an element of 16 bits of two neighbouring lines."""
    block, lane = _current.block, _current.thread % WARP
    for i, lines in _lines_of_the_warp(shared):
        places = [line + 2 * (lane // 4) for line in lines[2 * (lane % 4) : 2 * (lane % 4) + 2]]
        low, high = (int(block.shared[place : place + 2].view(np.uint16)[0]) for place in places)
        registers[first + i] = high << 16 | low


def _load_shared_word(shared: int) -> int:
    """Lanes meet, since all of a warp read at once: each a word of a bank of its own."""
    block, thread = _current.block, _current.thread
    assert shared % 4 == 0, "a word that is not aligned to its size"
    block.operands[thread] = shared
    block.pause(thread, "warp")
    first = thread // WARP * WARP
    banks = {place // 4 % 32 for place in block.operands[first : first + WARP]}
    assert len(banks) == WARP, f"a bank conflict: {block.operands[first : first + WARP]}"
    word = int(block.shared[shared : shared + 4].view(np.uint32)[0])
    block.pause(thread, "warp")
    return word


MMA_TYPES = {"s8": np.int8, "u8": np.uint8, "f16": np.float16, "tf32": np.float32}


def _mma_lines(kind_a: str, kind_b: str, tiles_m: int, tiles_n: int) -> Callable[..., None]:
    """The instructions as `warp_mma.mma_lines` describes them, of floats without what they cut off."""
    type_a, type_b = (np.dtype(MMA_TYPES[kind]) for kind in (kind_a, kind_b))
    integer = type_a.kind in "iu"

    def rows(words: list[list[int]], halves: int, dtype: np.dtype) -> np.ndarray:
        """Rows of A, or columns of B, of 32 bytes, from a fragment's registers of all lanes."""
        size = dtype.itemsize
        found = np.empty((8 * halves, 32 // size), np.int64 if integer else np.float64)
        for lane, mine in enumerate(words):
            g, t = divmod(lane, 4)
            for register, word in enumerate(mine):
                s, h = divmod(register, halves)
                values = np.array([word], np.uint32).view(dtype)
                at = (16 * s + 4 * t) // size
                found[g + 8 * h, at : at + 4 // size] = values
        return found

    def multiply(sums: np.ndarray, a: np.ndarray, a0: int, b: np.ndarray, b0: int) -> None:
        block, thread = _current.block, _current.thread
        block.operands[thread] = (list(a[a0 : a0 + 4 * tiles_m]), list(b[b0 : b0 + 2 * tiles_n]))
        block.pause(thread, "warp")
        first = thread // WARP * WARP
        if thread == first:  # the whole product once, for all lanes
            given = block.operands[first : first + WARP]
            left = [rows([x[4 * i : 4 * i + 4] for x, _ in given], 2, type_a) for i in range(tiles_m)]
            right = [rows([y[2 * j : 2 * j + 2] for _, y in given], 1, type_b) for j in range(tiles_n)]
            block.products[first] = np.concatenate(left) @ np.concatenate(right).T
        block.pause(thread, "warp")
        g, t = divmod(thread % WARP, 4)
        wrap = INTEGER_TYPES.int32
        for register in range(4 * tiles_m * tiles_n):
            tile, h, r = register // 4, register // 2 % 2, register % 2
            i, j = divmod(tile, tiles_n)
            product = block.products[first][16 * i + g + 8 * h, 8 * j + 2 * t + r]
            sums[register] = wrap(sums[register] + int(product)) if integer else sums[register] + product

    return multiply


def _load_words(registers: np.ndarray, first: int, array: Any, index: int) -> None:
    for lane in range(4):
        registers[first + lane] = array[index + lane]


def _store_words(array: Any, index: int, registers: np.ndarray, first: int) -> None:
    for lane in range(4):
        array[index + lane] = registers[first + lane]


def _load_pair(array: Any, index: int) -> tuple[int, int]:
    assert index % 2 == 0, "a pair that is not aligned to its size"
    return array[index], array[index + 1]


def _store_pair(array: Any, index: int, left: int, right: int) -> None:
    assert index % 2 == 0, "a pair that is not aligned to its size"
    array[index], array[index + 1] = left, right


def _bytes(a: int, b: int) -> list[int]:
    return [(word >> 8 * place) & 0xFF for word in (a, b) for place in range(4)]


def byte_permute(a: int, b: int, selector: int) -> int:
    """``prmt`` without a sign: `integers.byte_permute`."""
    return sum(_bytes(a, b)[(selector >> 4 * place) & 7] << 8 * place for place in range(4))


def byte_rotate(a: int, b: int, n: int) -> int:
    """As the PTX manual's table of ``prmt.b4e`` has it: `integers.byte_rotate`."""
    chosen = {0: (5, 6, 7, 0), 1: (6, 7, 0, 1), 2: (7, 0, 1, 2), 3: (0, 1, 2, 3)}[n & 3]
    return sum(_bytes(a, b)[source] << 8 * (3 - place) for place, source in enumerate(chosen))


def byte_dot(a: int, b: int, c: int) -> int:
    """``dp4a`` of unsigned bytes: `integers.byte_dot`."""
    return c + sum(x * y for x, y in zip(_bytes(a, 0)[:4], _bytes(b, 0)[:4], strict=True))


def funnel_right(low: int, high: int, shift: int) -> int:
    """``shf.r.clamp``: `integers.funnel_right`."""
    return ((high << 32 | low) >> min(shift, 32)) & 0xFFFFFFFF


INTEGER_TYPES = SimpleNamespace(
    **{name: Integer(name) for name in (f"{sign}int{8 << i}" for sign in ("", "u") for i in range(4))},
)

INTEGER_PTX = SimpleNamespace(
    unroll=_unroll,
    shared_address=lambda array: 0,
    copy_async_part=_copy_part,
    commit_copies=_commit,
    wait_copies=_wait,
    load_matrices=_load_matrices,
    load_turned=_load_turned,
    load_shared_word=_load_shared_word,
    mma_lines=_mma_lines,
    load_vector=_load_words,
    store_vector=_store_words,
    load_pair=_load_pair,
    store_pair=_store_pair,
    global_array=lambda address, kind: (_FlatIntegers if isinstance(kind, Integer) else _Flat)(address, kind),
)

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
    readable: tuple[np.ndarray, ...] = (),
) -> None:
    """Run every block of a grid, one after another, over host memory whose addresses are in ``arguments``.

    ``readable``: the arrays that asynchronous copies may read; none: anything, but for ``copy_async_part``.
    """
    spans = [np.lib.array_utils.byte_bounds(array) for array in readable]
    for y in range(grid[1]):
        for x in range(grid[0]):
            shared = np.full(shared_nbytes // np.dtype(dtype).itemsize, _poison(dtype), dtype)
            block = Block(threads, shared, late)
            block.readable = spans

            block.run(lambda: kernel(*arguments), (x, y), grid)


def replace_instructions(monkeypatch: Any, module: Any, instructions: Any) -> None:
    """Put Python in the place of the modules of `ptx` that a kernel's module uses, and of the function `unroll`."""
    for _, name, _ in pkgutil.iter_modules(ptx.__path__):
        if name != "unroll" and hasattr(module, name):
            monkeypatch.setattr(module, name, instructions)
    if hasattr(module, "unroll") and hasattr(instructions, "unroll"):
        monkeypatch.setattr(module, "unroll", instructions.unroll)


def stand_ins(monkeypatch: Any, module: Any, dtype: Any) -> None:
    """Put Python in the place of the device in a kernel's module, until the test ends."""
    monkeypatch.setattr(module, "cuda", _Cuda(dtype))
    replace_instructions(monkeypatch, module, PTX)
    monkeypatch.setattr(module, "types", TYPES)
    monkeypatch.setattr(module, "inlined", lambda function: function)
    if hasattr(module, "libdevice"):
        monkeypatch.setattr(module, "libdevice", LIBDEVICE)
    if hasattr(module, "numba"):
        monkeypatch.setattr(module, "numba", SimpleNamespace(from_dtype=lambda dtype: np.dtype(dtype).type))


def integer_stand_ins(monkeypatch: Any, *modules: Any) -> None:
    """The same for modules of kernels that work on integers, or on the bits of floats."""
    for module in modules:
        monkeypatch.setattr(module, "cuda", _IntegerCuda())
        replace_instructions(monkeypatch, module, INTEGER_PTX)
        monkeypatch.setattr(module, "types", INTEGER_TYPES)
        if hasattr(module, "inlined"):
            monkeypatch.setattr(module, "inlined", lambda function: function)
