"""Zstandard chunks, moved from files to a device and back by loops that do not hold the interpreter's lock.

The counterpart of `file_upload.py` and `file_download.py` for compressed chunks. In Python, a thread reads
a chunk's bytes, decodes them to memory of their own and copies that to pinned memory block by block. Memory as large as
the chunk is returned to the system and got anew, page by page, and every block takes its turn with the interpreter's
lock. On 32 cores that yields 4.5 GB/s, where libzstd alone decodes 25. Here a chunk goes through pinned blocks of a
megabyte, straight from the decoder or to the encoder, and is never in memory as a whole.

What a loop could not do, whatever the reason, is left to the caller's ordinary way, which raises the right error if it
fails too.

Method: the streaming interface of libzstd (zstd.h, `ZSTD_decompressStream` and `ZSTD_compressStream2`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numba
import numpy as np

from tilewright.kernels.cpu.loops import compiled
from tilewright.pipeline.transfer import calls, file_download, file_upload, lane_copies
from tilewright.pipeline.transfer.calls import (
    SEEK_END,
    call1,
    call2,
    long_call2,
    long_call3,
    long_call4,
    nanoseconds,
    take_numbers,
)
from tilewright.pipeline.transfer.checksum import loop_checksum
from tilewright.pipeline.transfer.file_rectangles import ANY_LENGTH, StoredChunk, name_table
from tilewright.pipeline.transfer.files import READ_FLAGS
from tilewright.pipeline.transfer.zstd import (
    ADDRESS,
    IN,
    LARGEST_SPARE_NBYTES,
    OUT,
    POSITION,
    RESULT,
    SIZE,
    STOP,
    USED,
    WINDOW_BITS,
    WORDS,
    give_back,
    library,
    take_decoder,
)
from tilewright.pipeline.transfer.zstd_loop import compiled_decompress, compiled_read_on

WRITTEN_NBYTES = 2**20
"""Compressed bytes that are gathered before they are written."""

_OFFSET, _NBYTES, _ROWS, _STRIDE, _TOP, _LEFT, _HEIGHT, _WIDTH, _TARGET, _PITCH, _TALL, _WIDE = range(12)
"""Columns of the upload's table: a `StoredChunk`, then the rows and bytes of a row that one block takes."""

_OPEN, _CLOSE, _SEEK, _READ, _CLOCK, _WAIT, _COPY, _COPY_ROWS, _RECORD, _RESET, _STEP = range(11)
"""Indices of functions in the upload's table of addresses: those of `file_upload`, then libzstd's."""
UPLOAD_ZSTD = ("ZSTD_DCtx_reset", "ZSTD_decompressStream")

_COMPRESS = 6
"""Index in the download's table, after those of `file_download`."""
DOWNLOAD_ZSTD = ("ZSTD_compressStream2",)

_SESSION_ONLY = 1
_CONTINUE, _END = 0, 2
"""libzstd's ZSTD_reset_session_only, ZSTD_e_continue and ZSTD_e_end."""


def _end_frame(step: Any, read: Any, context: int, descriptor: int, memory: Any, words: Any) -> bool:
    """Have the decoder take what follows the last byte, such as a checksum; whether frame and input ended there."""
    here = numba.int64(words.ctypes.data)
    words[OUT + SIZE] = words[OUT + USED] = 0
    while words[RESULT] > 0:
        if words[IN + USED] == words[IN + SIZE] and not compiled_read_on(read, descriptor, memory, words):
            return False
        before = words[IN + USED]
        words[RESULT] = long_call3(step, context, here + 8 * OUT, here + 8 * IN)
        if words[RESULT] > 0 and words[IN + USED] == before:
            return False  # the frame holds more than a chunk
    return words[RESULT] == 0 and words[IN + USED] == words[IN + SIZE] and words[POSITION] == words[STOP]


_compiled_end_frame = numba.njit(_end_frame)


def _upload(
    functions: Any,
    paths: Any,
    path_starts: Any,
    table: Any,
    counter: Any,
    failed: Any,
    lane: Any,
    context: int,
    memory: Any,
    spent: Any,
) -> None:
    """Decompress chunks and move the wanted parts of them until none is left.

    functions: uint64 addresses. paths: zero-terminated file names, uint8; path_starts: where the name of each chunk's
    file begins. table: int64[chunks, 12]. counter: int64[1], the next chunk's number. failed: uint8[chunks], set for
    those that could not be moved. lane: int64[`LANE_WORDS`]. context: a decoder's address. memory: uint8, for
    stored bytes. spent: float64[2], written: the seconds of reading and decompressing, and of waiting for blocks and
    starting copies.
    """
    words = np.zeros(WORDS, np.int64)
    copy = lane_copies.copy_words(True)
    now = np.zeros(2, np.int64)
    clock = functions[_CLOCK]
    turn = 0
    next_number = numba.uint64(counter.ctypes.data)
    mark = nanoseconds(clock, now)
    reading, moving = 0, 0
    while True:
        here = take_numbers(next_number, 1)
        if here >= len(table):
            break
        chunk = table[here]
        name = numba.int64(paths.ctypes.data) + path_starts[here]
        descriptor = call2(functions[_OPEN], name, READ_FLAGS)
        bad = descriptor < 0
        if not bad:
            length = long_call3(functions[_SEEK], descriptor, 0, SEEK_END)
            stop = length if chunk[_NBYTES] == ANY_LENGTH else chunk[_OFFSET] + chunk[_NBYTES]
            long_call2(functions[_RESET], context, _SESSION_ONLY)
            words[:] = 0
            words[POSITION], words[STOP] = chunk[_OFFSET], stop
            bad = stop > length
        across = (chunk[_STRIDE] + chunk[_WIDE] - 1) // chunk[_WIDE]
        down = (chunk[_ROWS] + chunk[_TALL] - 1) // chunk[_TALL]
        for number in range(down * across):
            if bad:
                break
            row, column = number // across * chunk[_TALL], number % across * chunk[_WIDE]
            height = min(chunk[_TALL], chunk[_ROWS] - row)
            width = min(chunk[_WIDE], chunk[_STRIDE] - column)
            turn = 1 - turn
            place = lane[lane_copies.BLOCK + turn]
            bad = call1(functions[_WAIT], lane[lane_copies.EVENT + turn]) != 0
            ready = nanoseconds(clock, now)
            moving += ready - mark

            if not bad:  # else a copy may still read the block
                compiled_decompress(
                    functions[_STEP],
                    functions[_READ],
                    context,
                    descriptor,
                    memory,
                    words,
                    place,
                    height * width,
                )
                bad = words[RESULT] < 0 or words[OUT + USED] < height * width
            mark = nanoseconds(clock, now)
            reading += mark - ready

            first, last = max(row, chunk[_TOP]), min(row + height, chunk[_TOP] + chunk[_HEIGHT])
            begin, end = max(column, chunk[_LEFT]), min(column + width, chunk[_LEFT] + chunk[_WIDTH])
            if bad or first >= last or begin >= end:
                continue
            bad = not lane_copies.send(
                functions[_COPY],
                functions[_COPY_ROWS],
                functions[_RECORD],
                copy,
                lane,
                turn,
                place + (first - row) * width + begin - column,
                width,
                chunk[_TARGET] + (first - chunk[_TOP]) * chunk[_PITCH] + begin - chunk[_LEFT],
                chunk[_PITCH],
                end - begin,
                last - first,
            )
        if bad or not _compiled_end_frame(
            functions[_STEP], functions[_READ], context, descriptor, memory, words
        ):
            failed[here] = 1
        if descriptor >= 0:
            call1(functions[_CLOSE], descriptor)
    moving += nanoseconds(clock, now) - mark
    spent[0], spent[1] = reading * 1e-9, moving * 1e-9


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
    context: int,
    memory: Any,
    total: Any,
    spent: Any,
) -> bool:
    """Compress ``rows`` of ``width`` bytes, ``pitch`` apart on the device, into one frame, written from a file's start.

    functions: uint64 addresses. tall, wide: rows and bytes of a row that one block takes. lane:
    int64[`LANE_WORDS`]. context: the address of an encoder that was told the total length. memory: uint8, for
    compressed bytes. total: the checksum of these, `LoopChecksum.words`. spent: float64[2], written: the seconds of
    compressing and writing, and of waiting for the device. Returns whether all of it was written.
    """
    words = np.zeros(WORDS, np.int64)
    here = numba.int64(words.ctypes.data)
    words[OUT + ADDRESS], words[OUT + SIZE] = memory.ctypes.data, len(memory)
    copy = lane_copies.copy_words(False)
    now = np.zeros(2, np.int64)
    clock = functions[file_download.CLOCK]
    count = (rows + tall - 1) // tall * ((width + wide - 1) // wide)
    working, moving, written = 0, 0, 0
    good = True
    mark = nanoseconds(clock, now)
    for number in range(count + 1):
        nbytes = file_download.next_block(
            functions, copy, lane, number, source, pitch, rows, width, tall, wide
        )
        good = nbytes >= 0
        ready = nanoseconds(clock, now)
        moving += ready - mark
        words[IN + ADDRESS], words[IN + SIZE] = lane[lane_copies.BLOCK + 1 - number % 2], nbytes
        words[IN + USED] = 0
        order = _END if number == count else _CONTINUE
        left = nbytes  # input bytes to compress, or at the end output bytes to flush
        while good and left:
            result = long_call4(functions[_COMPRESS], context, here + 8 * OUT, here + 8 * IN, order)
            if result < 0:  # libzstd's errors are the largest size_t values
                good = False
            left = result if order == _END else words[IN + SIZE] - words[IN + USED]
            if words[OUT + USED] < words[OUT + SIZE] and (left or order != _END):
                continue
            if good and words[OUT + USED] > 0:
                good = file_download.write_on(
                    functions[file_download.WRITE],
                    descriptor,
                    words[OUT + ADDRESS],
                    words[OUT + USED],
                    written,
                    total,
                )
                written += words[OUT + USED]
            words[OUT + USED] = 0
        mark = nanoseconds(clock, now)
        working += mark - ready
        if not good:
            break
    good = lane_copies.settle(functions[file_download.WAIT], lane) and good
    spent[0], spent[1] = working * 1e-9, moving * 1e-9
    return good


@functools.cache
def _compiled_upload() -> Any:
    words, integers, bytes_ = numba.uint64[::1], numba.int64[::1], numba.uint8[::1]
    table = numba.types.Array(numba.int64, 2, "C")
    return compiled(
        _upload,
        words,
        bytes_,
        integers,
        table,
        integers,
        bytes_,
        integers,
        numba.int64,
        bytes_,
        numba.float64[::1],
    )


@functools.cache
def _compiled_store() -> Any:
    integer = numba.int64
    return compiled(
        _store,
        numba.uint64[::1],
        *(integer,) * 7,
        numba.int64[::1],
        integer,
        numba.uint8[::1],
        numba.uint64[::1],
        numba.float64[::1],
    )


_compiling = threading.Lock()
"""Without it, threads that start together would each compile, or load, a loop of their own."""


def available() -> bool:
    """Whether the loops can run: on a real device, under a system whose functions they know."""
    return file_upload.available() and file_download.available()


def with_libzstd(functions: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """A loop's table of addresses: those of the system and the driver, then libzstd's."""
    ffi, lib = library().ffi, library().lib
    found = [int(ffi.cast("uintptr_t", ffi.addressof(lib, name))) for name in names]
    return np.concatenate([functions, np.array(found, np.uint64)])


@functools.cache
def _upload_functions() -> np.ndarray:
    return with_libzstd(calls.addresses(file_upload.SYSTEM, file_upload.DRIVER), UPLOAD_ZSTD)


@functools.cache
def _download_functions() -> np.ndarray:
    return with_libzstd(calls.addresses(file_download.SYSTEM, file_download.DRIVER), DOWNLOAD_ZSTD)


class _Encoder:
    """An encoder, and memory for compressed bytes; used for one chunk at a time."""

    def __init__(self) -> None:
        ffi, lib = library().ffi, library().lib
        context = lib.ZSTD_createCCtx()
        if context == ffi.NULL:
            raise MemoryError("no memory for an encoder of Zstandard")
        self.context = ffi.gc(context, lib.ZSTD_freeCCtx)
        self.memory = np.empty(WRITTEN_NBYTES, np.uint8)

    def begin(self, level: int, checksum: bool, nbytes: int) -> int:
        """Prepare for one frame of ``nbytes`` bytes; returns the encoder's address."""
        ffi, lib = library().ffi, library().lib
        lib.ZSTD_CCtx_reset(self.context, lib.ZSTD_reset_session_and_parameters)
        lib.ZSTD_CCtx_setParameter(self.context, lib.ZSTD_c_compressionLevel, level)
        lib.ZSTD_CCtx_setParameter(self.context, lib.ZSTD_c_checksumFlag, int(checksum))
        lib.ZSTD_CCtx_setPledgedSrcSize(self.context, nbytes)
        return int(ffi.cast("uintptr_t", self.context))

    @property
    def nbytes(self) -> int:
        return int(library().lib.ZSTD_sizeof_CCtx(self.context))


_spare: list[_Encoder] = []


@contextmanager
def _borrowed_encoder() -> Iterator[_Encoder]:
    """An encoder for the caller alone, which is kept for the next unless a high level made it large."""
    encoder = None
    with suppress(IndexError):
        encoder = _spare.pop()
    encoder = _Encoder() if encoder is None else encoder
    yield encoder
    if encoder.nbytes <= LARGEST_SPARE_NBYTES:
        _spare.append(encoder)


class ChunkUpload:
    """Chunks that any number of threads decompress together, each by its own call of `run`.

    chunks: none empty, in any order. block_nbytes: the size of a lane's block.
    """

    def __init__(
        self, chunks: Sequence[StoredChunk], block_nbytes: int, functions: np.ndarray | None = None
    ) -> None:
        self._functions = _upload_functions() if functions is None else functions
        self._paths, self._path_starts = name_table(chunk.path for chunk in chunks)
        self._table = np.array(
            [
                (*chunk[1:], *file_download.block_sides(chunk.rows, chunk.stride, block_nbytes))
                for chunk in chunks
            ],
            np.int64,
        ).reshape(-1, 12)
        self._counter = np.zeros(1, np.int64)
        self._failed = np.zeros(len(chunks), np.uint8)

    @property
    def blocks(self) -> int:
        """How many threads can share the work."""
        return len(self._table)

    def run(self, lane: np.ndarray) -> tuple[float, float]:
        """Move chunks through a lane until none is left; copies of the last blocks may still be under way on return.

        lane: int64[`LANE_WORDS`], for the current device, which this thread must be attached to. Returns the
        seconds of reading and decompressing, and of moving.
        """
        spent = np.zeros(2)
        with _compiling:
            loop = _compiled_upload()
        decoder = take_decoder()
        loop(
            self._functions,
            self._paths,
            self._path_starts,
            self._table,
            self._counter,
            self._failed,
            lane,
            decoder.begin(WINDOW_BITS),
            decoder.memory,
            spent,
        )
        give_back(decoder)
        return float(spent[0]), float(spent[1])

    def failed(self) -> list[int]:
        """The indices of chunks that could not be moved whole, once every `run` has returned."""
        return [int(place) for place in np.flatnonzero(self._failed)]


def store_chunk(
    descriptor: int,
    source: int,
    pitch: int,
    rows: int,
    width: int,
    level: int,
    checksum: bool,
    block_nbytes: int,
    lane: np.ndarray,
    functions: np.ndarray | None = None,
) -> tuple[bool, int | None, float, float]:
    """Compress a rectangle of the device's memory, row after row, into one frame at the beginning of an open file.

    descriptor: of the file. source: address of the first row. pitch: bytes from one row to the next. rows, width: not
    zero; width in bytes. level, checksum: as libzstd takes them. block_nbytes: the size of a lane's block. lane:
    int64[`LANE_WORDS`], for the current device, which this thread must be attached to.

    Returns whether all of it was written, the file's checksum (None where the loop cannot tell it), and the seconds of
    compressing and writing and of waiting for the device. If not all was written, the file's content is undefined,
    and doing the same in the ordinary way will say why. Raises MemoryError.
    """
    tall, wide = file_download.block_sides(rows, width, block_nbytes)
    spent = np.zeros(2)
    table = _download_functions() if functions is None else functions
    with _compiling:
        loop = _compiled_store()
    with _borrowed_encoder() as encoder, loop_checksum() as total:
        context = encoder.begin(level, checksum, rows * width)
        sides = rows, width, tall, wide
        good = loop(
            table, descriptor, source, pitch, *sides, lane, context, encoder.memory, total.words, spent
        )
        return bool(good), total.value(), float(spent[0]), float(spent[1])
