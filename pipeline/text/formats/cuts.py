"""Where compressed files can be cut: members of gzip, frames of Zstandard, blocks of bzip2 and xz.

Formats: RFC 1952 (gzip), RFC 8878 (Zstandard), "The .xz File Format" 1.2; of bzip2, the marks of its blocks and what
follows them, as its program writes them. bgzip's blocks are members of gzip.
"""

from __future__ import annotations

import bz2
import lzma
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from tilewright.pipeline.text.formats import decompress
from tilewright.pipeline.text.formats.decompress import Stored

PART_NBYTES = 2**20
"""Stored bytes of a part, at least."""
MOST_STORED_NBYTES = 2**25
"""The most stored bytes of one: where nothing ends before, one thread does it."""
EXPANSION = 4
"""By how much contents are taken to be longer than stored bytes, where these do not say so."""
MOST_NBYTES = 2**28
"""The most bytes that one may hold, decompressed: a few kilobytes can expand to gigabytes."""


class Unfit(Exception):
    """What was to be decompressed by several threads is not fit for that."""


@dataclass(frozen=True)
class Part:
    start: int
    """Where it stands in the file."""
    data: bytes
    own: int
    """Bytes of it that belong to it; others follow, into which its last block may reach."""
    final: bool = False
    """Whether its bytes are the file's last."""
    contents: int = -1
    """How many bytes it holds, decompressed, where that is known."""

    @property
    def held_nbytes(self) -> int:
        """About how many bytes it takes once it is decompressed."""
        return len(self.data) + (EXPANSION * self.own if self.contents < 0 else self.contents)


class Decoded(NamedTuple):
    blocks: list[bytes]
    first: int = 0
    """Of bzip2: the bit of the first mark in it, -1 without any; where the next one has to stand, -1 for none; and the
    checksums of blocks, in order, with that of the stream, negative and less 1, where one ends."""
    next: int = 0
    checksums: tuple[int, ...] = ()


class Cutter(Protocol):
    """Cuts one file. `parts` is called by one thread, `decode` by many, the others in order, by one."""

    may_join: bool
    """Whether a part that cannot be decompressed may be one with the next."""

    def parts(self, buffer: Buffer) -> Iterator[Part]:
        """The parts of a file. Raises Unfit."""

    def decode(self, part: Part) -> Decoded:
        """What a part holds. Raises Unfit."""

    def accepts(self, found: Decoded) -> bool:
        """Whether it follows what came before."""

    def check_end(self) -> None:
        """Raise Unfit where something is missing behind the last part."""


class Buffer:
    """The bytes of a file that were read and not used yet."""

    def __init__(self, stored: Iterator[Stored]) -> None:
        self._stored = stored
        """The rest of the file."""
        self._block_nbytes = 1
        self.data = bytearray()
        self.start = 0
        """Where they stand in the file."""

    def has(self, nbytes: int) -> bool:
        """Whether there are so many; reads on."""
        while len(self.data) < nbytes:
            block = next(self._stored, None)
            if block is None:
                return False
            self._block_nbytes = max(self._block_nbytes, len(block))
            self.data += block
        return True

    def everything(self) -> Iterator[Stored]:
        """What is here, in the blocks in which it came, and what follows."""
        for start in range(0, len(self.data), self._block_nbytes):
            yield bytes(self.data[start : start + self._block_nbytes])
        yield from self._stored

    def take(self, nbytes: int) -> Part:
        part = Part(self.start, bytes(self.data[:nbytes]), nbytes)
        self.drop(nbytes)
        return part

    def drop(self, nbytes: int) -> None:
        del self.data[:nbytes]
        self.start += nbytes


class _Whole:
    """Of formats whose parts are files of their own."""

    may_join = True

    def __init__(self, codec: str, window_nbytes: int) -> None:
        self._codec, self._window_nbytes = codec, window_nbytes

    def decode(self, part: Part) -> Decoded:
        fill = decompress.reader(self._codec, iter([part.data]), self._window_nbytes)
        blocks, total = [], 0
        memory = np.empty(decompress.BLOCK_NBYTES, np.uint8)
        try:
            while got := fill(memory):
                total += got
                if total > MOST_NBYTES:
                    raise Unfit
                blocks.append(memory[:got].tobytes())
        except decompress.ERRORS as error:
            raise Unfit from error
        return Decoded(blocks)

    def accepts(self, found: Decoded) -> bool:
        return True

    def check_end(self) -> None:
        pass


_MEMBER = re.compile(rb"\x1f\x8b\x08[\x00-\x1f].{4}[\x00\x02\x04][\x00-\x0d\xff]", re.DOTALL)
"""How a member of gzip begins: its mark, no flag that is reserved, a time, how hard was tried, and a system."""


class _Gzip(_Whole):
    """Where a member seems to begin, the file is cut; where that was wrong, two parts are one."""

    def parts(self, buffer: Buffer) -> Iterator[Part]:
        looked = PART_NBYTES
        while buffer.has(looked + 10):
            found = _MEMBER.search(buffer.data, looked)
            if found is not None:
                yield buffer.take(found.start())
                looked = PART_NBYTES
                continue
            looked = len(buffer.data) - 9
            if looked > MOST_STORED_NBYTES:
                raise Unfit
        if not buffer.start:
            raise Unfit
        yield buffer.take(len(buffer.data))


ZSTD_MAGIC, SKIPPABLE_MAGIC = 0xFD2FB528, 0x184D2A5


class _Zstd(_Whole):
    """Frames, of which headers say how long each block is."""

    may_join = False

    def parts(self, buffer: Buffer) -> Iterator[Part]:
        length = 0
        while buffer.has(length + 1):
            length = self._end_of_frame(buffer, length)
            if length >= PART_NBYTES:
                yield buffer.take(length)
                length = 0
        if not buffer.start:
            raise Unfit
        if length:
            yield buffer.take(length)

    def _end_of_frame(self, buffer: Buffer, at: int) -> int:
        begin, magic = at, _number(buffer, at, 4)
        if magic >> 4 == SKIPPABLE_MAGIC:
            at += 8 + _number(buffer, at + 4, 4)
        elif magic == ZSTD_MAGIC:
            how = _number(buffer, at + 4, 1)
            single = how >> 5 & 1
            contents = (single, 2, 4, 8)[how >> 6]
            at += 5 + (1 - single) + (0, 1, 2, 4)[how & 3] + contents
            last = 0
            while not last:
                block = _number(buffer, at, 3)
                last, kind, nbytes = block & 1, block >> 1 & 3, block >> 3
                at += 3 + (1 if kind == 1 else nbytes)
                if at - begin > MOST_STORED_NBYTES:
                    raise Unfit
            at += 4 * (how >> 2 & 1)
        else:
            raise Unfit
        if at - begin > MOST_STORED_NBYTES or not buffer.has(at):
            raise Unfit
        return at


def _number(buffer: Buffer, at: int, nbytes: int) -> int:
    """A number of the format's. Raises Unfit where the file ends before."""
    if not buffer.has(at + nbytes):
        raise Unfit
    return int.from_bytes(buffer.data[at : at + nbytes], "little")


# ----- bzip2 -----

BLOCK_NBYTES = 2**20
"""More than a block of bzip2 takes, stored, however badly it is compressed."""
MOST_MARKS = 2**16
STREAM_BITS, CHECKSUM_BITS = 32, 32
"""A stream begins with ``BZh`` and a digit; after each mark comes a checksum."""


class _Bzip2:
    """Parts of fixed length: each begins with the first block that begins in it, found by its mark."""

    may_join = False

    def __init__(self, window_nbytes: int) -> None:
        self._next = STREAM_BITS
        self._combined = 0

    def parts(self, buffer: Buffer) -> Iterator[Part]:
        if not buffer.has(4) or not _begins_stream(buffer.data, 0):
            raise Unfit
        while True:
            whole = buffer.has(PART_NBYTES + 2 * BLOCK_NBYTES)
            own = PART_NBYTES if whole else len(buffer.data)
            data = bytes(buffer.data[: PART_NBYTES + 2 * BLOCK_NBYTES] if whole else buffer.data)
            yield Part(buffer.start, data, own, final=not whole)
            if not whole:
                return
            buffer.drop(own)

    def decode(self, part: Part) -> Decoded:
        from tilewright.kernels.records.block_marks import BYTE_INSIDE, MARK_BITS, find_marks

        data = np.frombuffer(part.data, np.uint8)
        places, ends = np.empty(MOST_MARKS, np.int64), np.empty(MOST_MARKS, np.bool_)
        count = find_marks(data, 0, 8 * part.own, BYTE_INSIDE, places, ends)
        if count == MOST_MARKS:
            raise Unfit
        marks = [(int(place), bool(end)) for place, end in zip(places[:count], ends[:count], strict=True)]
        own = [mark for mark in marks if mark[0] < 8 * part.own]
        blocks: list[bytes] = []
        checksums: list[int] = []
        total, following = 0, -1
        for i, (place, end) in enumerate(own):
            following = marks[i + 1][0] if i + 1 < len(marks) else -1
            checksum = _bits(data, place + MARK_BITS, CHECKSUM_BITS)
            if end:
                checksums.append(-1 - checksum)
                behind = -(-(place + MARK_BITS + CHECKSUM_BITS) // 8)
                if part.final and behind == len(part.data):
                    following = -1
                elif not _begins_stream(part.data, behind) or following != 8 * behind + STREAM_BITS:
                    raise Unfit
                continue
            if following < 0:
                raise Unfit
            checksums.append(checksum)
            blocks.append(_block_of_bzip2(data, place, following, checksum))
            total += len(blocks[-1])
            if total > MOST_NBYTES:
                raise Unfit
        start = 8 * part.start
        first = own[0][0] + start if own else -1
        return Decoded(blocks, first, following + start if following >= 0 else -1, tuple(checksums))

    def accepts(self, found: Decoded) -> bool:
        if found.first < 0:
            return True
        if found.first != self._next:
            return False
        self._next = found.next
        for checksum in found.checksums:
            if checksum >= 0:
                self._combined = (self._combined << 1 | self._combined >> 31) & 0xFFFFFFFF ^ checksum
            elif self._combined != -1 - checksum:
                return False
            else:
                self._combined = 0
        return True

    def check_end(self) -> None:
        if self._next >= 0:
            raise Unfit


def _begins_stream(data: bytes | bytearray, at: int) -> bool:
    return data[at : at + 3] == b"BZh" and data[at + 3 : at + 4].isdigit() and data[at + 3] != ord("0")


def _bits(data: np.ndarray, at: int, count: int) -> int:
    """Some bits as a number. Raises Unfit where there are not as many."""
    if at + count > 8 * len(data):
        raise Unfit
    stop = -(-(at + count) // 8)
    value = int.from_bytes(data[at // 8 : stop].tobytes(), "big")
    return value >> 8 * stop - at - count & (1 << count) - 1


def _block_of_bzip2(data: np.ndarray, start: int, stop: int, checksum: int) -> bytes:
    """The contents of a block from one bit to another, as a stream of its own: behind it stand the mark of an end, and
    the checksum of that stream, which is the block's."""
    from tilewright.kernels.records.block_marks import END, MARK_BITS

    here = data[start // 8 : -(-stop // 8)]
    shift = start % 8
    if shift:
        moved = here << shift
        moved[:-1] |= here[1:] >> 8 - shift
        here = moved
    whole, left = divmod(stop - start, 8)
    tail = _bits(here, 8 * whole, left) if left else 0
    tail = (tail << MARK_BITS | END) << CHECKSUM_BITS | checksum
    bits = left + MARK_BITS + CHECKSUM_BITS
    end = (tail << -bits % 8).to_bytes(-(-bits // 8), "big")
    decompressor = bz2.BZ2Decompressor()
    try:
        block = decompressor.decompress(b"BZh9" + here[:whole].tobytes() + end, MOST_NBYTES)
    except (OSError, ValueError) as error:
        raise Unfit from error
    if not decompressor.eof or decompressor.unused_data:
        raise Unfit
    return block


# ----- xz -----

XZ_HEADER, XZ_FOOTER = b"\xfd7zXZ\0", b"YZ"
XZ_EDGE = 12
"""Bytes of a stream's header, and of its footer."""
XZ_CHECKS = {0: 0, 1: 4, 4: 8, 10: 32}
"""The lengths of checks, by their numbers: none, CRC32, CRC64, SHA-256."""


class _Xz:
    """Blocks, if their headers say how long they are, as those of ``xz -T`` do. Each is decompressed as a stream of its
    own."""

    may_join = False

    def __init__(self, window_nbytes: int) -> None:
        pass

    def parts(self, buffer: Buffer) -> Iterator[Part]:
        streams = 0
        while buffer.has(4 if streams else 1):
            if streams and not any(buffer.data[:4]):
                buffer.drop(4)  # padding
                continue
            yield from self._stream(buffer)
            streams += 1
        if buffer.data or not streams:
            raise Unfit

    def _stream(self, buffer: Buffer) -> Iterator[Part]:
        if not buffer.has(XZ_EDGE + 1) or buffer.data[:6] != XZ_HEADER or buffer.data[7] not in XZ_CHECKS:
            raise Unfit
        header, check = bytes(buffer.data[:XZ_EDGE]), XZ_CHECKS[buffer.data[7]]
        buffer.drop(XZ_EDGE)
        records = bytearray()
        count = 0
        while buffer.has(1) and buffer.data[0]:
            length = 4 * (buffer.data[0] + 1)
            if not buffer.has(length):
                raise Unfit
            flags = buffer.data[1]
            if flags & 0xC0 != 0xC0:
                raise Unfit
            stored_nbytes, at = _varint(buffer.data, 2)
            nbytes, _ = _varint(buffer.data, at)
            unpadded = length + stored_nbytes + check
            if (
                unpadded > MOST_STORED_NBYTES
                or nbytes > MOST_NBYTES
                or not buffer.has(unpadded + -unpadded % 4)
            ):
                raise Unfit
            record = _as_varint(unpadded) + _as_varint(nbytes)
            records += record
            count += 1
            block = buffer.take(unpadded + -unpadded % 4)
            index = _index(1, record)
            footer = _footer(header, len(index))
            yield Part(block.start, header + block.data + index + footer, len(block.data), contents=nbytes)
        index = _index(count, bytes(records))
        end = index + _footer(header, len(index))
        if not buffer.has(len(end)) or buffer.data[: len(end)] != end:
            raise Unfit
        buffer.drop(len(end))

    def decode(self, part: Part) -> Decoded:
        decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=decompress.XZ_NBYTES)
        try:
            block = decompressor.decompress(part.data, part.contents + 1)
        except lzma.LZMAError as error:
            raise Unfit from error
        if not decompressor.eof or decompressor.unused_data or len(block) != part.contents:
            raise Unfit
        return Decoded([block])

    def accepts(self, found: Decoded) -> bool:
        return True

    def check_end(self) -> None:
        pass


def _varint(data: bytearray, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where it ends. Raises Unfit."""
    value = 0
    for place in range(9):
        if at + place >= len(data):
            raise Unfit
        value |= (data[at + place] & 0x7F) << 7 * place
        if data[at + place] < 0x80:
            return value, at + place + 1
    raise Unfit


def _as_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _index(count: int, records: bytes) -> bytes:
    data = b"\0" + _as_varint(count) + records
    data += bytes(-len(data) % 4)
    return data + struct.pack("<I", zlib.crc32(data))


def _footer(header: bytes, index_nbytes: int) -> bytes:
    data = struct.pack("<I", index_nbytes // 4 - 1) + header[6:8]
    return struct.pack("<I", zlib.crc32(data)) + data + XZ_FOOTER


CUTTERS: dict[str, Callable[[int], Cutter]] = {
    "gzip": lambda window_nbytes: _Gzip("gzip", window_nbytes),
    decompress.ZSTD: lambda window_nbytes: _Zstd(decompress.ZSTD, window_nbytes),
    "bzip2": _Bzip2,
    "xz": _Xz,
}
