"""What the headers of encoded chunks say of where their blocks lie and what those hold, before a GPU decodes them.

A GPU decodes all blocks of a frame at once, and so has to know beforehand where each begins. So a loop that does not
hold the interpreter's lock looks at each chunk in its file first. It follows the chain of blocks from header to header,
some bytes each, and refuses what does not lie where it says, states another length than a chunk has, or is of a kind
that is rare: several frames, dictionaries. What it refuses is left to the caller's ordinary way, which decodes it on a
core or says what is wrong.

Formats: Zstandard, RFC 8878; LZ4 blocks behind their length, as numcodecs stores them; Blosc 1, README_CHUNK_FORMAT of
c-blosc.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np

from tilewright.kernels.cpu.loops import compiled
from tilewright.pipeline.decoding.coding import BLOSC, LZ4, RAW, ZSTD
from tilewright.pipeline.transfer.calls import SEEK_END, call1, call2, long_call3, long_call4
from tilewright.pipeline.transfer.file_rectangles import ANY_LENGTH, StoredChunk, name_table
from tilewright.pipeline.transfer.files import READ_FLAGS

NO_SHUFFLE, BYTES, BITS = range(3)
"""How Blosc has shuffled a chunk's elements."""

CHUNK, OFFSET, NBYTES, TARGET, ROOM, KIND, FIRST_PART, PARTS = range(8)
"""Columns of the table of blocks: the chunk's number, where the block lies in its stored bytes, its length, where it
goes in the chunk, how many bytes it decodes to, and how it is encoded: RAW, ZSTD or LZ4; of a frame of Zstandard, its
first part, and how many it has."""
BLOCK_WORDS = 8

(
    PART_OFFSET,
    PART_NBYTES,
    PART_KIND,
    PART_LITERALS,
    PART_COUNT,
    PART_TREE,
    PART_LENGTHS,
    PART_OFFSETS,
    PART_MATCHES,
) = range(9)
"""Columns of the table of the blocks that frames of Zstandard consist of, its *parts*: where one lies in the chunk's
stored bytes, its length there, its kind (0 as it is, 1 a byte repeated, 2 encoded); the bytes of its literals, or what
it decodes to where it is not encoded; its sequences; and the parts that define its tree, and its tables, or -1."""
PART_WORDS = 9
MADE_HERE, AS_BEFORE = 1, 2

STORED, STORED_NBYTES, FIRST, COUNT, SUM, SUM_VALUE, SUFFIX, SHUFFLE, ELEMENT, BLOCK_NBYTES = range(10)
"""Columns of the table of chunks: where a chunk lies in its file, and its length there, without a CRC32C behind it, or
`REFUSED`; the number of its first block, and how many it has; which checksum of its decoded bytes there is, and its
value; the CRC32C behind it, or -1; and how Blosc shuffled it: what it calls an element's bytes, in blocks of so
many bytes."""
CHUNK_WORDS = 10
REFUSED = -1

NO_SUM, XXH64 = range(2)
"""Checksums of decoded bytes: of Zstandard, the lower half."""

_ZSTD_MAGIC = 0xFD2FB528
MOST_BLOCK_NBYTES = 2**17
"""Of a block of Zstandard, encoded or decoded."""
_BLOSC_HEADER_NBYTES = 16
_BLOSC_CODEC_VERSION = 1
"""Of its LZ4 and its Zstandard."""

_OPEN, _CLOSE, _SEEK, _READ = range(4)
SYSTEM = ("open", "close", "lseek", "pread")

_READER, _FILE, _BEGIN, _END = range(4)
"""What `_peek` knows of a file."""

SCRATCH_NBYTES = 32
WINDOW_NBYTES = 64
"""Read at once: a call of the system costs more than some bytes."""
LEAST_NBYTES = 8
"""Of a chunk as it is stored: a CRC32C is made of four bytes at least."""


def _number(memory: Any, at: int, count: int) -> int:
    """An integer of ``count`` bytes, the lowest first."""
    found = numba.int64(0)
    for place in range(count):
        found |= numba.int64(memory[at + place]) << numba.int64(8 * place)
    return found


_compiled_number = numba.njit(_number)


def _peek(source: Any, at: int, count: int, stop: int, memory: Any) -> bool:
    """Put bytes of a file into the scratch; whether they lie before ``stop`` and all came.

    source: int64[4], the function that reads, the file's descriptor, and from where to where the bytes are in the
    scratch's window that were read last. Headers lie side by side often: of a block of literals alone, the last one is
    next to the first of the block behind it.
    """
    if at + count > stop:
        return False
    if at < source[_BEGIN] or at + count > source[_END]:
        place = numba.int64(memory.ctypes.data) + SCRATCH_NBYTES
        got = long_call4(
            numba.uint64(source[_READER]), source[_FILE], place, min(WINDOW_NBYTES, stop - at), at
        )
        source[_BEGIN], source[_END] = at, at + max(got, 0)
        if got < count:
            return False
    first = SCRATCH_NBYTES + at - source[_BEGIN]
    for place in range(count):
        memory[place] = memory[first + place]
    return True


_compiled_peek = numba.njit(_peek)


def _zstd_frame(
    source: Any,
    at: int,
    stop: int,
    nbytes: int,
    memory: Any,
    parts: Any,
    part: int,
    begin: int,
) -> tuple[int, int]:
    """List the blocks of the one frame that fills a stretch of a file and says that it holds ``nbytes`` bytes; returns
    -1 if there is none, 0, or 1 if its checksum is in the scratch, and the number of the next part.

    parts: int64[·, PART_WORDS], written from ``part`` on. begin: of the chunk in its file.
    """
    count = min(18, stop - at)
    if count < 6 or not _compiled_peek(source, at, count, stop, memory):
        return -1, part
    if _compiled_number(memory, 0, 4) != _ZSTD_MAGIC:
        return -1, part
    head = numba.int64(memory[4])
    single, size_flag = (head >> 5) & 1, head >> 6
    if head & 0b1011:  # a reserved bit, or a dictionary
        return -1, part
    place = 5 if single else 6
    size_bytes = 1 << size_flag
    if size_flag == 0:
        size_bytes = single
    if size_bytes == 0 or place + size_bytes > count:
        return -1, part
    stated = _compiled_number(memory, place, size_bytes)
    if size_bytes == 2:
        stated += 256
    if stated != nbytes:
        return -1, part
    most = numba.int64(MOST_BLOCK_NBYTES)
    if single:
        most = min(most, nbytes)
    else:
        window = numba.int64(memory[5])
        base = numba.int64(1) << min(numba.int64(10) + (window >> 3), numba.int64(41))
        most = min(most, base + base // 8 * (window & 7))
    at += place + size_bytes
    known = numba.int64(0)
    tree, lengths, offsets, matches = (
        numba.int64(-1),
        numba.int64(-1),
        numba.int64(-1),
        numba.int64(-1),
    )
    last = False
    while not last:
        if part >= len(parts) or not _compiled_peek(source, at, 3, stop, memory):
            return -1, part
        block = _compiled_number(memory, 0, 3)
        last = (block & 1) == 1
        kind, size = (block >> 1) & 3, block >> 3
        at += 3
        if kind == 3 or size > most:
            return -1, part
        stored = numba.int64(1) if kind == 1 else size
        if at + stored > stop:
            return -1, part
        row = parts[part]
        row[:] = 0
        row[PART_OFFSET], row[PART_NBYTES], row[PART_KIND] = at - begin, stored, kind
        if kind < 2:
            row[PART_LITERALS] = size
        elif not _compiled_encoded(source, at, size, stop, most, memory, row):
            return -1, part
        else:
            # A tree or a table that stays in force is that of the last block that has defined one.
            if row[PART_TREE] == MADE_HERE:
                tree = numba.int64(part)
            elif row[PART_TREE] == AS_BEFORE and tree < 0:
                return -1, part
            row[PART_TREE] = tree
            if row[PART_COUNT] > 0:
                modes = row[PART_LENGTHS]
                if (modes >> 6) & 3 != 3:
                    lengths = numba.int64(part)
                if (modes >> 4) & 3 != 3:
                    offsets = numba.int64(part)
                if (modes >> 2) & 3 != 3:
                    matches = numba.int64(part)
                if lengths < 0 or offsets < 0 or matches < 0:
                    return -1, part
            row[PART_LENGTHS], row[PART_OFFSETS], row[PART_MATCHES] = lengths, offsets, matches
        known += row[PART_LITERALS]
        if known > nbytes:
            return -1, part
        part += 1
        at += stored
    if head & 0b100:
        if at + 4 != stop or not _compiled_peek(source, at, 4, stop, memory):
            return -1, part
        return 1, part
    return (0 if at == stop else -1), part


def _encoded(source: Any, at: int, size: int, stop: int, most: int, memory: Any, row: Any) -> bool:
    """Whether the lengths in the headers of a block's literals and sequences are no larger than the block, or than it
    may decode to; fills its row: ``PART_LENGTHS`` has the modes of the tables of its sequences."""
    count = min(numba.int64(5), size)
    if count < 1 or not _compiled_peek(source, at, count, stop, memory):
        return False
    kind, form = numba.int64(memory[0]) & 3, (numba.int64(memory[0]) >> 2) & 3
    if kind < 2:
        head = 1 if form & 1 == 0 else (2 if form == 1 else 3)
        if head > count:
            return False
        held = _compiled_number(memory, 0, head) >> (3 if head == 1 else 4)
        stored = held if kind == 0 else numba.int64(1)
    else:
        head = 3 if form < 2 else form + 2
        bits = 10 if form < 2 else (14 if form == 2 else 18)
        if head > count:
            return False
        sizes = _compiled_number(memory, 0, head) >> 4
        held = sizes & ((numba.int64(1) << bits) - 1)
        stored = sizes >> bits
        streams = 1 if form == 0 else 4
        if stored < streams or (streams == 4 and (stored < 10 or held < 6)):
            return False
        row[PART_TREE] = MADE_HERE if kind == 2 else AS_BEFORE
    if held > most or head + stored >= size:
        return False
    row[PART_LITERALS] = held
    at += head + stored
    count = min(numba.int64(4), size - head - stored)
    if not _compiled_peek(source, at, count, stop, memory):
        return False
    first = numba.int64(memory[0])
    if first == 0:
        return count == 1
    head = 1 if first < 128 else (2 if first < 255 else 3)
    if head + 1 > count:
        return False
    found = first
    if head == 2:
        found = ((first - 128) << 8) + numba.int64(memory[1])
    elif head == 3:
        found = _compiled_number(memory, 1, 2) + 0x7F00
    row[PART_COUNT], row[PART_LENGTHS] = found, numba.int64(memory[head])
    return found > 0 and row[PART_LENGTHS] & 3 == 0


_compiled_encoded = numba.njit(_encoded)
_compiled_zstd_frame = numba.njit(_zstd_frame)


def _add_block(
    blocks: Any, place: int, chunk: int, offset: int, nbytes: int, target: int, room: int, kind: int
) -> int:
    blocks[place, CHUNK], blocks[place, OFFSET], blocks[place, NBYTES] = chunk, offset, nbytes
    blocks[place, TARGET], blocks[place, ROOM], blocks[place, KIND] = target, room, kind
    if kind != ZSTD:  # a chunk that was refused may have been listed here before
        blocks[place, FIRST_PART] = blocks[place, PARTS] = 0
    return place + 1


_compiled_add_block = numba.njit(_add_block)


def _blosc_chunk(
    source: Any,
    at: int,
    stop: int,
    nbytes: int,
    memory: Any,
    row: Any,
    number: int,
    blocks: Any,
    place: int,
    parts: Any,
    used: Any,
) -> int:
    """List the blocks of a chunk of Blosc; returns the number of the next, or -1 for what is refused."""
    length = stop - at
    if not _compiled_peek(source, at, _BLOSC_HEADER_NBYTES, stop, memory):
        return -1
    version, flags, element = numba.int64(memory[0]), numba.int64(memory[2]), numba.int64(memory[3])
    held = _compiled_number(memory, 4, 4)
    block_nbytes = _compiled_number(memory, 8, 4)
    if version != 2 or held != nbytes or _compiled_number(memory, 12, 4) != length or element == 0:
        return -1
    if flags & 0b1000:
        return -1  # reserved
    row[ELEMENT], row[BLOCK_NBYTES] = element, block_nbytes
    if flags & 0b10:  # stored as it is, whatever the other flags say
        if length != nbytes + _BLOSC_HEADER_NBYTES:
            return -1
        row[SHUFFLE] = NO_SHUFFLE
        return _compiled_add_block(
            blocks, place, number, numba.int64(_BLOSC_HEADER_NBYTES), nbytes, numba.int64(0), nbytes, RAW
        )
    row[SHUFFLE] = BYTES if flags & 1 and element > 1 else (BITS if flags & 0b100 else NO_SHUFFLE)
    codec = flags >> 5
    kind = LZ4 if codec == 1 else (ZSTD if codec == 4 else -1)
    if kind < 0 or memory[1] != _BLOSC_CODEC_VERSION or block_nbytes <= 0 or block_nbytes > nbytes:
        return -1
    count = (nbytes + block_nbytes - 1) // block_nbytes
    table_stop = numba.int64(_BLOSC_HEADER_NBYTES) + 4 * count
    if table_stop > length:
        return -1
    for block in range(count):
        left = nbytes - block * block_nbytes
        whole = left >= block_nbytes
        held = block_nbytes if whole else left
        streams = element if whole and not flags & 0b10000 else numba.int64(1)
        if held % streams:
            return -1
        if not _compiled_peek(source, at + _BLOSC_HEADER_NBYTES + 4 * block, 4, stop, memory):
            return -1
        here = _compiled_number(memory, 0, 4)
        if here < table_stop:
            return -1
        room = held // streams
        for stream in range(streams):
            if place >= len(blocks) or here + 4 > length:
                return -1
            if not _compiled_peek(source, at + here, 4, stop, memory):
                return -1
            size = _compiled_number(memory, 0, 4)
            here += 4
            if size <= 0 or size > room or here + size > length:
                return -1
            target = block * block_nbytes + stream * room
            encoded = RAW if size == room else kind
            if encoded == ZSTD:
                # With a checksum it is left to the cores: only those of whole chunks are compared.
                first = used[0]
                found, part = _compiled_zstd_frame(
                    source, at + here, at + here + size, room, memory, parts, numba.int64(first), at
                )
                if found != 0:
                    return -1
                used[0] = part
                blocks[place, FIRST_PART], blocks[place, PARTS] = first, part - first
            place = _compiled_add_block(blocks, place, number, here, size, target, room, encoded)
            here += size
    return place


_compiled_blosc_chunk = numba.njit(_blosc_chunk)


def _look_at(
    source: Any,
    at: int,
    stop: int,
    form: int,
    nbytes: int,
    memory: Any,
    row: Any,
    number: int,
    blocks: Any,
    place: int,
    parts: Any,
    used: Any,
) -> int:
    """As `_blosc_chunk`, of a chunk in any form; fills the chunk's row."""
    length = stop - at
    zero = numba.int64(0)
    if form == BLOSC:
        return _compiled_blosc_chunk(
            source, at, stop, nbytes, memory, row, number, blocks, place, parts, used
        )
    if place >= len(blocks):
        return -1
    if form == RAW:
        if length != nbytes:
            return -1
        return _compiled_add_block(blocks, place, number, zero, length, zero, nbytes, RAW)
    if form == ZSTD:
        first = used[0]
        found, part = _compiled_zstd_frame(source, at, stop, nbytes, memory, parts, numba.int64(first), at)
        if found < 0:
            return -1
        used[0] = part
        blocks[place, FIRST_PART], blocks[place, PARTS] = first, part - first
        if found == 1:
            row[SUM], row[SUM_VALUE] = XXH64, _compiled_number(memory, 0, 4)
        return _compiled_add_block(blocks, place, number, zero, length, zero, nbytes, ZSTD)
    if form == LZ4:
        if length < 5 or not _compiled_peek(source, at, 4, stop, memory):
            return -1
        if _compiled_number(memory, 0, 4) != nbytes:
            return -1
        return _compiled_add_block(blocks, place, number, numba.int64(4), length - 4, zero, nbytes, LZ4)
    return -1


_compiled_look_at = numba.njit(_look_at)


def _look(
    functions: Any,
    paths: Any,
    path_starts: Any,
    table: Any,
    form: int,
    suffix: bool,
    memory: Any,
    chunks: Any,
    blocks: Any,
    parts: Any,
    used: Any,
) -> int:
    """Look at chunks, and list the blocks of those that can be decoded; returns how many blocks.

    functions: uint64 addresses. paths, path_starts: as `name_table` makes them. table: int64[chunks, 3]: where each
    lies in its file, its length there (or `ANY_LENGTH`), and what it decodes to. form: of all of them. suffix: whether
    a CRC32C stands behind each. memory: uint8, scratch. chunks: int64[chunks, CHUNK_WORDS], written; blocks:
    int64[·, BLOCK_WORDS], written, and parts: int64[·, PART_WORDS], written: where there are more of them, chunks are
    refused. used: int64[1], zero; written: how many parts.
    """
    place = numba.int64(0)
    source = np.zeros(4, np.int64)
    source[_READER] = numba.int64(functions[_READ])
    for number in range(len(table)):
        row = chunks[number]
        row[:] = 0
        row[SUFFIX], row[FIRST] = -1, place
        row[STORED_NBYTES] = REFUSED
        descriptor = call2(functions[_OPEN], numba.int64(paths.ctypes.data) + path_starts[number], READ_FLAGS)
        if descriptor < 0:
            continue
        source[_FILE], source[_BEGIN], source[_END] = descriptor, 0, 0
        end = long_call3(functions[_SEEK], descriptor, 0, SEEK_END)
        at = table[number, 0]
        stop = end if table[number, 1] == ANY_LENGTH else at + table[number, 1]
        good = at >= 0 and stop <= end and stop - at >= LEAST_NBYTES
        if good and suffix:
            good = _compiled_peek(source, stop - 4, 4, stop, memory)
            stop -= 4
            row[SUFFIX] = _compiled_number(memory, 0, 4)
        if good:
            before = used[0]
            found = _compiled_look_at(
                source,
                at,
                stop,
                form,
                table[number, 2],
                memory,
                row,
                numba.int64(number),
                blocks,
                place,
                parts,
                used,
            )
            if found > 0:
                row[STORED], row[STORED_NBYTES], row[COUNT] = at, stop - at, found - place
                place = found
            else:
                used[0] = before  # of a chunk that is refused, the first blocks may have been listed
        call1(functions[_CLOSE], descriptor)
    return place


@functools.cache
def _loop() -> Any:
    words, integers, bytes_ = numba.uint64[::1], numba.int64[::1], numba.uint8[::1]
    table = numba.types.Array(numba.int64, 2, "C")
    return compiled(
        _look,
        words,
        bytes_,
        integers,
        table,
        numba.int64,
        numba.types.boolean,
        bytes_,
        table,
        table,
        table,
        integers,
    )


@functools.cache
def _functions() -> np.ndarray:
    library = ctypes.CDLL(None)
    found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in SYSTEM]
    return np.array(found, np.uint64)


def prepare() -> None:
    """Compile the loop, or find it compiled."""
    _loop()


class Headers(NamedTuple):
    """What was found of some chunks."""

    chunks: np.ndarray
    """int64[chunks, CHUNK_WORDS]."""
    blocks: np.ndarray
    """int64[blocks, BLOCK_WORDS], those of a chunk side by side."""
    parts: np.ndarray
    """int64[parts, PART_WORDS], those of a block side by side."""


def look_at(
    chunks: Sequence[StoredChunk], form: int, *, suffix: bool, most_blocks: int, most_parts: int
) -> Headers:
    """Look at the headers of chunks in their files. suffix: whether a CRC32C stands behind each."""
    paths, starts = name_table(chunk.path for chunk in chunks)
    table = np.array([(c.offset, c.nbytes, c.rows * c.stride) for c in chunks], np.int64).reshape(-1, 3)
    rows = np.empty((len(chunks), CHUNK_WORDS), np.int64)
    blocks = np.zeros((most_blocks, BLOCK_WORDS), np.int64)
    memory = np.empty(SCRATCH_NBYTES + WINDOW_NBYTES, np.uint8)
    parts, used = np.empty((most_parts, PART_WORDS), np.int64), np.zeros(1, np.int64)
    count = _loop()(_functions(), paths, starts, table, form, suffix, memory, rows, blocks, parts, used)
    return Headers(rows, blocks[:count], parts[: used[0]])
