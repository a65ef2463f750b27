"""Rectangles of bytes from a device to files, moved by a loop that does not hold the interpreter's lock.

The counterpart of `file_upload.py`. Eight native threads write 18 GB/s from a GPU to new files in the
page cache, and sixteen 29. Eight Python threads that handle each block themselves write 12 to 14, since every block
takes its turn with the lock. So a thread makes one call for a whole file: one pinned block is written while the other
comes from the device.

What could not be moved, whatever the reason, is left to the caller's ordinary way, which raises the right error if it
fails too.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np

from tilewright.kernels.cpu.loops import compiled
from tilewright.pipeline.transfer import calls, lane_copies
from tilewright.pipeline.transfer.calls import call1, long_call3, long_call4, nanoseconds
from tilewright.pipeline.transfer.checksum import loop_checksum

WRITE, CLOCK, WAIT, RECORD, COPY, COPY_ROWS = range(6)
"""Indices of the system's and the driver's functions in the table of addresses."""
SYSTEM = ("pwrite", "clock_gettime")
DRIVER = ("cuEventSynchronize", "cuEventRecord", "cuMemcpyDtoHAsync_v2", "cuMemcpy2DAsync_v2")


def _next_block(
    functions: Any,
    words: Any,
    lane: Any,
    number: int,
    source: int,
    pitch: int,
    rows: int,
    width: int,
    tall: int,
    wide: int,
) -> int:
    """Start fetching block ``number`` of a rectangle, and wait for the one before it, which took the lane's other turn.

    The blocks follow one another along the rows, so their bytes, put together, are the rectangle's. The caller must be
    done with what it was last given. Returns the bytes of the block before, in ``lane[BLOCK + 1 - number % 2]``; 0 if
    ``number`` is the first, -1 if a copy did not work.
    """
    across = (width + wide - 1) // wide
    turn = number % 2
    if number < (rows + tall - 1) // tall * across:
        row, column = number // across * tall, number % across * wide
        if not lane_copies.fetch(
            functions[COPY],
            functions[COPY_ROWS],
            functions[WAIT],
            functions[RECORD],
            words,
            lane,
            turn,
            source + row * pitch + column,
            pitch,
            min(wide, width - column),
            min(tall, rows - row),
        ):
            return -1
    if number == 0:
        return 0
    if call1(functions[WAIT], lane[lane_copies.EVENT + 1 - turn]) != 0:
        return -1
    row, column = (number - 1) // across * tall, (number - 1) % across * wide
    return min(tall, rows - row) * min(wide, width - column)


next_block = numba.njit(_next_block)
"""The same for loops to call."""


def _write_on(write: int, descriptor: int, place: int, nbytes: int, offset: int, checksum: Any) -> bool:
    """Write bytes at an address, one at least, to a file, from an offset in it on, and add them to a checksum, if there
    is one. write: address of pwrite. Returns whether all of them were written."""
    if checksum[0] != 0:
        long_call3(checksum[0], numba.int64(checksum[1]), place, nbytes)
    done = numba.int64(0)
    while done < nbytes:
        put = long_call4(write, descriptor, place + done, nbytes - done, offset + done)
        if put <= 0:
            return False
        done += put
    return True


write_on = numba.njit(_write_on)
"""The same for loops to call."""


def _store(
    functions: Any,
    descriptor: int,
    source: int,
    pitch: int,
    rows: int,
    width: int,
    tall: int,
    wide: int,
    lane: Any,
    checksum: Any,
    spent: Any,
) -> bool:
    """Write ``rows`` of ``width`` bytes, ``pitch`` apart on the device, one after the other from the start of a file.

    functions: uint64 addresses. tall, wide: rows and bytes of a row that one block takes. lane:
    int64[`LANE_WORDS`]. checksum: of the bytes, `LoopChecksum.words`. spent: float64[2], written: the seconds of
    writing, and of waiting for the device. Returns whether all of it was written.
    """
    words = lane_copies.copy_words(False)
    now = np.zeros(2, np.int64)
    clock = functions[CLOCK]
    count = (rows + tall - 1) // tall * ((width + wide - 1) // wide)
    writing, moving, written = 0, 0, 0
    good = True
    mark = nanoseconds(clock, now)
    for number in range(count + 1):
        nbytes = next_block(functions, words, lane, number, source, pitch, rows, width, tall, wide)
        good = nbytes >= 0
        ready = nanoseconds(clock, now)
        moving += ready - mark
        if nbytes > 0:
            place = lane[lane_copies.BLOCK + 1 - number % 2]
            good = write_on(functions[WRITE], descriptor, place, nbytes, written, checksum)
            written += nbytes
        mark = nanoseconds(clock, now)
        writing += mark - ready
        if not good:
            break
    good = lane_copies.settle(functions[WAIT], lane) and good
    spent[0], spent[1] = writing * 1e-9, moving * 1e-9
    return good


@functools.cache
def _loop() -> Any:
    integer = numba.int64
    words = numba.uint64[::1]
    return compiled(_store, words, *(integer,) * 7, numba.int64[::1], words, numba.float64[::1])


def block_sides(rows: int, width: int, block_nbytes: int) -> tuple[int, int]:
    """Of a rectangle: the rows, and the bytes of a row, that one block takes."""
    wide = min(width, block_nbytes)
    return min(rows, block_nbytes // width) if wide == width else 1, wide


def available() -> bool:
    """Whether the loop can run: on a real device, under a system whose functions it knows."""
    return calls.available(SYSTEM, DRIVER)


def prepare() -> None:
    """Compile the loop, or find it compiled, so that the first download does not wait for it."""
    _loop()


def store(
    descriptor: int,
    source: int,
    pitch: int,
    rows: int,
    width: int,
    block_nbytes: int,
    lane: np.ndarray,
    functions: np.ndarray | None = None,
) -> tuple[bool, int | None, float, float]:
    """Write a rectangle of the device's memory to an open file, from its beginning, row after row.

    descriptor: of the file. source: address of the first row. pitch: bytes from one row to the next. rows, width: not
    zero; width in bytes. block_nbytes: the size of a lane's block. lane: int64[`LANE_WORDS`], for the current
    device, which this thread must be attached to.

    Returns whether all of it was written, its checksum (None where the loop cannot tell it), and the seconds of writing
    and of waiting for the device. If not all was written, the file's content is undefined, and doing the same in the
    ordinary way will say why.
    """
    if pitch == width or rows == 1:
        rows, width = 1, rows * width
        pitch = width
    tall, wide = block_sides(rows, width, block_nbytes)
    spent = np.zeros(2)
    table = calls.addresses(SYSTEM, DRIVER) if functions is None else functions
    with loop_checksum() as checksum:
        good = _loop()(table, descriptor, source, pitch, rows, width, tall, wide, lane, checksum.words, spent)
        return bool(good), checksum.value(), float(spent[0]), float(spent[1])
