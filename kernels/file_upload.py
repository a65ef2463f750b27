"""Rectangles of bytes from files to a device, moved by loops that do not hold the interpreter's lock.

Eight threads of the system bring 50 GB/s from the page cache into pinned memory, about what the bus takes; eight of
Python that handle each block themselves 20, since every block costs them 85 µs and turns with the lock. So a thread
gets one call for all of its blocks: it fills one pinned block from a file while the other is on its way to the device,
and takes the next number from a counter that all threads share. The loop calls the system and the driver by address.

What the loop could not move, for whatever reason, it names and does nothing more about: the caller moves that by its
ordinary way, which knows what to say when that fails too.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from tilewright.kernels.host_loops import compiled
from tilewright.kernels.launch import SIMULATOR, driver_library

ANY_LENGTH = -1

LONG_ROW_NBYTES = 64 * 2**10
"""Parts of rows that are shorter are read with what lies between them and picked out: handling each costs more."""
LEAST_USEFUL_SHARE = 1 / 16
"""Below this share of wanted bytes in the rows, even short parts are read one by one."""


class Rectangle(NamedTuple):
    """Rows of bytes in a file, and where they go. Lengths and distances are in bytes."""

    path: str
    offset: int
    """Of the first row in the file."""
    file_nbytes: int
    """What the file must have, or `ANY_LENGTH`."""
    rows: int
    width: int
    stride: int
    """From one row to the next in the file."""
    target: int
    """Address of the first row's place on the device."""
    pitch: int
    """From one row to the next on the device."""


_OFFSET, _FILE_NBYTES, _ROWS, _WIDTH, _STRIDE, _TARGET, _PITCH, _TALL, _WIDE, _SPAN = range(10)
"""Columns of the loop's table: a rectangle, then the rows and bytes of a row that one block takes, and whether it
takes what lies between the rows too."""

_OPEN, _CLOSE, _SEEK, _READ, _CLOCK, _WAIT, _COPY, _COPY_ROWS, _RECORD = range(9)
"""Functions of the system and the driver, by their place in the table of addresses."""
SYSTEM = ("open", "close", "lseek", "pread", "clock_gettime")
DRIVER = ("cuEventSynchronize", "cuMemcpyHtoDAsync_v2", "cuMemcpy2DAsync_v2", "cuEventRecord")

_BLOCK, _EVENT, _STREAM = 0, 2, 4
"""A lane: addresses of two blocks of pinned memory, handles of an event each, handle of the stream."""
LANE_WORDS = 5
_COPY_WORDS = 16
"""The driver's CUDA_MEMCPY2D in words of 64 bits."""
_HOST_MEMORY, _DEVICE_MEMORY = 1, 2
_SEEK_END = 2
_MONOTONIC = 1


def _caller(result_bits: int, count: int) -> Any:
    """The intrinsic ``call(address, *arguments)`` of a C function of ``count`` integers or pointers."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, result = ir.IntType(64), ir.IntType(result_bits)
        kind = ir.FunctionType(result, [word] * count).as_pointer()
        found = builder.call(builder.inttoptr(arguments[0], kind), arguments[1:])
        return found if result_bits == word.width else builder.sext(found, word)

    word = numba.types.int64
    typed = word(numba.types.uint64, *[word] * count)
    typings: dict[int, Callable[..., Any]] = {
        1: lambda context, function, a: (typed, lower),
        2: lambda context, function, a, b: (typed, lower),
        3: lambda context, function, a, b, c: (typed, lower),
        4: lambda context, function, a, b, c, d: (typed, lower),
    }
    return intrinsic(typings[count])


_call1, _call2, _call3, _call4 = (_caller(32, count) for count in (1, 2, 3, 4))
_long_call3, _long_call4 = _caller(64, 3), _caller(64, 4)


@intrinsic
def _take_number(context: Any, place: Any) -> Any:
    """The integer at an address, which is one more afterwards, for this thread alone."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        return builder.atomic_rmw(
            "add", builder.inttoptr(arguments[0], word.as_pointer()), ir.Constant(word, 1), "monotonic"
        )

    return numba.types.int64(numba.types.uint64), lower


def _read_fully(function: Any, descriptor: int, place: int, nbytes: int, offset: int) -> bool:
    done = 0
    while done < nbytes:
        got = _long_call4(function, descriptor, place + done, nbytes - done, offset + done)
        if got <= 0:
            return False
        done += got
    return True


_compiled_read_fully = numba.njit(_read_fully)


def _move(
    functions: Any,
    paths: Any,
    path_starts: Any,
    table: Any,
    first_blocks: Any,
    counter: Any,
    failed: Any,
    lane: Any,
    spent: Any,
) -> None:
    """Move blocks until none is left.

    functions: uint64 addresses. paths: the files' names, uint8, each with a zero behind it; path_starts: where the
    name of each rectangle's file begins. table: int64[rectangles, 10]. first_blocks: int64[rectangles + 1], the
    number of each rectangle's first block, and of all. counter: int64[1], the next block's number. failed:
    uint8[rectangles], set for those that could not be moved. lane: int64[`LANE_WORDS`]. spent: float64[2], takes the
    seconds of reading, and those of waiting for blocks and starting copies.
    """
    copy = np.zeros(_COPY_WORDS, np.int64)
    copy[2], copy[9] = _HOST_MEMORY, _DEVICE_MEMORY
    now = np.zeros(2, np.int64)
    clock, call = functions[_CLOCK], numba.int64(now.ctypes.data)
    here, opened, descriptor, turn = 0, numba.int64(-1), numba.int64(-1), 0
    next_number = numba.uint64(counter.ctypes.data)
    _call2(clock, _MONOTONIC, call)
    mark = now[0] * 1_000_000_000 + now[1]
    reading, moving = 0, 0
    while True:
        number = _take_number(next_number)
        if number >= first_blocks[-1]:
            break
        while first_blocks[here + 1] <= number:
            here += 1
        if failed[here]:
            continue
        rectangle = table[here]
        across = (rectangle[_WIDTH] + rectangle[_WIDE] - 1) // rectangle[_WIDE]
        row = (number - first_blocks[here]) // across * rectangle[_TALL]
        column = (number - first_blocks[here]) % across * rectangle[_WIDE]
        height = min(rectangle[_TALL], rectangle[_ROWS] - row)
        width = min(rectangle[_WIDE], rectangle[_WIDTH] - column)
        stride = rectangle[_STRIDE]
        offset = rectangle[_OFFSET] + row * stride + column

        turn = 1 - turn
        place = lane[_BLOCK + turn]
        bad = _call1(functions[_WAIT], lane[_EVENT + turn]) != 0
        _call2(clock, _MONOTONIC, call)
        ready = now[0] * 1_000_000_000 + now[1]
        moving += ready - mark

        if not bad and (descriptor < 0 or path_starts[opened] != path_starts[here]):
            if descriptor >= 0:
                _call1(functions[_CLOSE], descriptor)
            descriptor = _call2(
                functions[_OPEN],
                numba.int64(paths.ctypes.data) + path_starts[here],
                os.O_RDONLY | os.O_CLOEXEC,
            )
            opened = here
            bad = descriptor < 0
        if not bad and rectangle[_FILE_NBYTES] != ANY_LENGTH:
            bad = _long_call3(functions[_SEEK], descriptor, 0, _SEEK_END) != rectangle[_FILE_NBYTES]
        packed = width
        if not bad:
            if rectangle[_SPAN]:
                packed = stride
                bad = not _compiled_read_fully(
                    functions[_READ], descriptor, place, (height - 1) * stride + width, offset
                )
            else:
                for line in range(height):
                    if not _compiled_read_fully(
                        functions[_READ], descriptor, place + line * width, width, offset + line * stride
                    ):
                        bad = True
                        break
        _call2(clock, _MONOTONIC, call)
        mark = now[0] * 1_000_000_000 + now[1]
        reading += mark - ready

        if not bad:
            target = rectangle[_TARGET] + row * rectangle[_PITCH] + column
            if height == 1 or (packed == width and rectangle[_PITCH] == width):
                bad = _call4(functions[_COPY], target, place, height * width, lane[_STREAM]) != 0
            else:
                copy[3], copy[6] = place, packed
                copy[11], copy[13] = target, rectangle[_PITCH]
                copy[14], copy[15] = width, height
                bad = _call2(functions[_COPY_ROWS], numba.int64(copy.ctypes.data), lane[_STREAM]) != 0
            bad = _call2(functions[_RECORD], lane[_EVENT + turn], lane[_STREAM]) != 0 or bad
        if bad:
            failed[here] = 1
    if descriptor >= 0:
        _call1(functions[_CLOSE], descriptor)
    _call2(clock, _MONOTONIC, call)
    moving += now[0] * 1_000_000_000 + now[1] - mark
    spent[0], spent[1] = reading * 1e-9, moving * 1e-9


@functools.cache
def _loop() -> Any:
    words, integers = numba.uint64[::1], numba.int64[::1]
    table = numba.types.Array(numba.int64, 2, "C")
    bytes_ = numba.uint8[::1]
    return compiled(
        _move, words, bytes_, integers, table, integers, integers, bytes_, integers, numba.float64[::1]
    )


@functools.cache
def _addresses() -> np.ndarray:
    system, driver = ctypes.CDLL(None), driver_library()
    if driver is None:
        raise OSError("no NVIDIA driver")
    found = [getattr(system, name) for name in SYSTEM] + [getattr(driver, name) for name in DRIVER]
    return np.array([ctypes.cast(function, ctypes.c_void_p).value for function in found], np.uint64)


@functools.cache
def available() -> bool:
    """Whether the loop can run: on a real device, under a system whose functions it knows."""
    if SIMULATOR or os.name != "posix":
        return False
    try:
        _addresses()
    except (OSError, AttributeError):
        return False
    return True


def prepare() -> None:
    """Compile the loop, or find it compiled, so that the first upload does not wait for it."""
    _loop()


class Upload:
    """Rectangles that any number of threads move together, each by a `run` of its own; they may come in any order.

    rectangles: none empty. block_nbytes: the size of a lane's block.
    """

    def __init__(
        self, rectangles: Sequence[Rectangle], block_nbytes: int, functions: np.ndarray | None = None
    ) -> None:
        self._functions = _addresses() if functions is None else functions
        starts: dict[str, int] = {}
        names, end = [], 0
        for rectangle in rectangles:
            if rectangle.path not in starts:
                starts[rectangle.path] = end
                names.append(os.fsencode(rectangle.path) + b"\0")
                end += len(names[-1])
        self._paths = np.frombuffer(b"".join(names) or b"\0", np.uint8).copy()
        self._path_starts = np.array([starts[rectangle.path] for rectangle in rectangles], np.int64)
        self._table = np.array([_blocked(r, block_nbytes) for r in rectangles], np.int64).reshape(-1, 10)
        down = -(-self._table[:, _ROWS] // self._table[:, _TALL])
        across = -(-self._table[:, _WIDTH] // self._table[:, _WIDE])
        self._first_blocks = np.concatenate([[0], np.cumsum(down * across)]).astype(np.int64)
        self._counter = np.zeros(1, np.int64)
        self._failed = np.zeros(len(rectangles), np.uint8)

    @property
    def blocks(self) -> int:
        """How many there are to move."""
        return int(self._first_blocks[-1])

    def run(self, lane: np.ndarray) -> tuple[float, float]:
        """Move blocks through a lane until none is left; the last ones are still on their way then.

        lane: int64[`LANE_WORDS`], for the current device, which this thread must be attached to. Returns the seconds
        of reading and of moving.
        """
        spent = np.zeros(2)
        _loop()(
            self._functions,
            self._paths,
            self._path_starts,
            self._table,
            self._first_blocks,
            self._counter,
            self._failed,
            lane,
            spent,
        )
        return float(spent[0]), float(spent[1])

    def failed(self) -> list[int]:
        """The places of rectangles that could not be moved as a whole, once every `run` has returned."""
        return [int(place) for place in np.flatnonzero(self._failed)]


def _blocked(rectangle: Rectangle, block_nbytes: int) -> tuple[int, ...]:
    _, offset, file_nbytes, rows, width, stride, target, pitch = rectangle
    if stride == width == pitch or rows == 1:
        rows, width = 1, rows * width
        stride = pitch = width
    span = stride != width and LEAST_USEFUL_SHARE * stride <= width < LONG_ROW_NBYTES
    wide = min(width, block_nbytes)
    if wide < width:
        tall, span = 1, False
    elif span:
        tall = max(1, (block_nbytes - width) // stride + 1)
    else:
        tall = block_nbytes // width
    return offset, file_nbytes, rows, width, stride, target, pitch, min(tall, rows), wide, int(span)


def lane_words(blocks: Sequence[np.ndarray], events: Sequence[Any], stream: Any) -> np.ndarray:
    """A lane as the loop takes it, of two pinned blocks, two events and a stream, which must all outlive it."""
    addresses = [block.ctypes.data for block in blocks]
    return np.array([*addresses, *(int(event.handle) for event in events), int(stream)], np.int64)
