"""Rectangles of bytes from files to a device, moved by loops that do not hold the interpreter's lock.

Eight native threads read 50 GB/s from the page cache into pinned memory, about what the bus takes. Eight Python threads
that handle each block themselves read 20, since every block costs them 85 µs and turns with the lock. So a thread makes
one call for all of its blocks. The loop fills one pinned block from a file while the other is on its way to the device,
and takes block numbers from a counter that all threads share, a few at a time: a disk is faster when read in sequence.
It calls the system and the driver by address.

The loop only names what it could not move, whatever the reason. The caller then moves that in its ordinary way, which
raises the right error if it fails too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np

from tilewright.kernels.cpu.loops import compiled
from tilewright.kernels.numbers import ceil_div
from tilewright.pipeline.transfer import calls, file_rectangles, lane_copies
from tilewright.pipeline.transfer.calls import (
    SEEK_END,
    call1,
    call2,
    long_call3,
    long_call4,
    nanoseconds,
    take_numbers,
)
from tilewright.pipeline.transfer.file_rectangles import (
    ANY_LENGTH,
    LEAST_USEFUL_SHARE,
    LONG_ROW_NBYTES,
    Rectangle,
    name_table,
)
from tilewright.pipeline.transfer.files import READ_FLAGS

_OFFSET, _FILE_NBYTES, _ROWS, _WIDTH, _STRIDE, _TARGET, _PITCH, _TALL, _WIDE, _SPAN = range(10)
"""Columns of the loop's table: a `Rectangle`, then the rows and bytes of a row that one block takes, and whether it
also takes the bytes between the rows."""

_OPEN, _CLOSE, _SEEK, _READ, _CLOCK, _WAIT, _COPY, _COPY_ROWS, _RECORD = range(9)
"""Indices of the system's and the driver's functions in the table of addresses."""
SYSTEM = ("open", "close", "lseek", "pread", "clock_gettime")
DRIVER = ("cuEventSynchronize", "cuMemcpyHtoDAsync_v2", "cuMemcpy2DAsync_v2", "cuEventRecord")

LONGEST_RUN = 8
"""Consecutive blocks that a thread takes at once: the system reads ahead of a sequential reader. With blocks of 1 MiB
from a cold disk, 16 threads read 1.95 GB/s in place of 1.67 with single blocks (medians; no less in any of seven
turns), and no more with longer runs."""


def _run_length(left: int, threads: int) -> int:
    """How many of the blocks left a thread takes: fewer towards the end, so that all threads finish together."""
    return max(1, min(LONGEST_RUN, left // (2 * threads)))


_compiled_run_length = numba.njit(_run_length)


def _read_fully(function: Any, descriptor: int, place: int, nbytes: int, offset: int) -> bool:
    done = 0
    while done < nbytes:
        got = long_call4(function, descriptor, place + done, nbytes - done, offset + done)
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
    threads: int,
    failed: Any,
    lane: Any,
    spent: Any,
) -> None:
    """Move blocks until none is left.

    functions: uint64 addresses. paths: zero-terminated file names, uint8; path_starts: where the name of each
    rectangle's file begins. table: int64[rectangles, 10]. first_blocks: int64[rectangles + 1], the number of each
    rectangle's first block, then the total. counter: int64[1], the next block's number. threads: how many run this
    loop. failed: uint8[rectangles], set for those that could not be moved. lane: int64[`LANE_WORDS`]. spent:
    float64[2], written: the seconds of reading, and of waiting for blocks and starting copies.
    """
    words = lane_copies.copy_words(True)
    now = np.zeros(2, np.int64)
    clock = functions[_CLOCK]
    here, opened, descriptor, turn = 0, numba.int64(-1), numba.int64(-1), 0
    next_number = numba.uint64(counter.ctypes.data)
    number, stop = numba.int64(-1), numba.int64(0)
    mark = nanoseconds(clock, now)
    reading, moving = 0, 0
    while True:
        number += 1
        if number == stop:
            run = _compiled_run_length(
                first_blocks[-1] - counter[0], threads
            )  # others may take some meanwhile
            number = take_numbers(next_number, run)
            stop = number + run
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
        place = lane[lane_copies.BLOCK + turn]
        bad = call1(functions[_WAIT], lane[lane_copies.EVENT + turn]) != 0
        ready = nanoseconds(clock, now)
        moving += ready - mark

        if not bad and (descriptor < 0 or path_starts[opened] != path_starts[here]):
            if descriptor >= 0:
                call1(functions[_CLOSE], descriptor)
            descriptor = call2(
                functions[_OPEN],
                numba.int64(paths.ctypes.data) + path_starts[here],
                READ_FLAGS,
            )
            opened = here
            bad = descriptor < 0
        if not bad and rectangle[_FILE_NBYTES] != ANY_LENGTH:
            bad = long_call3(functions[_SEEK], descriptor, 0, SEEK_END) != rectangle[_FILE_NBYTES]
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
        mark = nanoseconds(clock, now)
        reading += mark - ready

        if not bad:
            bad = not lane_copies.send(
                functions[_COPY],
                functions[_COPY_ROWS],
                functions[_RECORD],
                words,
                lane,
                turn,
                place,
                packed,
                rectangle[_TARGET] + row * rectangle[_PITCH] + column,
                rectangle[_PITCH],
                width,
                height,
            )
        if bad:
            failed[here] = 1
    if descriptor >= 0:
        call1(functions[_CLOSE], descriptor)
    moving += nanoseconds(clock, now) - mark
    spent[0], spent[1] = reading * 1e-9, moving * 1e-9


@functools.cache
def _loop() -> Any:
    words, integers = numba.uint64[::1], numba.int64[::1]
    table = numba.types.Array(numba.int64, 2, "C")
    bytes_ = numba.uint8[::1]
    return compiled(
        _move,
        words,
        bytes_,
        integers,
        table,
        integers,
        integers,
        numba.int64,
        bytes_,
        integers,
        numba.float64[::1],
    )


def available() -> bool:
    """Whether the loop can run: on a real device, under a system whose functions it knows."""
    return calls.available(SYSTEM, DRIVER)


def serves(nbytes: int) -> bool:
    """Whether the loop is what brings a text of so many bytes to the device."""
    return available() and (nbytes >= file_rectangles.FEW_NBYTES or _loop.cache_info().currsize > 0)


_preparing = threading.Lock()


def prepare() -> None:
    """Compile the loop, or find it compiled, so that the first upload does not wait for it; one thread does."""
    with _preparing:
        _loop()


class Upload:
    """Rectangles that any number of threads move together, each by its own call of `run`.

    rectangles: none empty, in any order. block_nbytes: the size of a lane's block. threads: how many will move them.
    """

    def __init__(
        self,
        rectangles: Sequence[Rectangle],
        block_nbytes: int,
        threads: int,
        functions: np.ndarray | None = None,
    ) -> None:
        self._threads = threads
        self._functions = calls.addresses(SYSTEM, DRIVER) if functions is None else functions
        self._paths, self._path_starts = name_table(rectangle.path for rectangle in rectangles)
        self._table = np.array([_blocked(r, block_nbytes) for r in rectangles], np.int64).reshape(-1, 10)
        down = ceil_div(self._table[:, _ROWS], self._table[:, _TALL])
        across = ceil_div(self._table[:, _WIDTH], self._table[:, _WIDE])
        self._first_blocks = np.concatenate([[0], np.cumsum(down * across)]).astype(np.int64)
        self._counter = np.zeros(1, np.int64)
        self._failed = np.zeros(len(rectangles), np.uint8)

    @property
    def blocks(self) -> int:
        """How many blocks there are to move."""
        return int(self._first_blocks[-1])

    def run(self, lane: np.ndarray) -> tuple[float, float]:
        """Move blocks through a lane until none is left; copies of the last ones may still be under way on return.

        lane: int64[`LANE_WORDS`], for the current device, which this thread must be attached to. Returns the
        seconds of reading and of moving.
        """
        spent = np.zeros(2)
        _loop()(
            self._functions,
            self._paths,
            self._path_starts,
            self._table,
            self._first_blocks,
            self._counter,
            self._threads,
            self._failed,
            lane,
            spent,
        )
        return float(spent[0]), float(spent[1])

    def failed(self) -> list[int]:
        """The indices of rectangles that could not be moved whole, once every `run` has returned."""
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
