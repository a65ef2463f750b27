"""Compressed bytes to plain ones, as a stream: gzip, bzip2, xz and Zstandard, in memory that does not grow.

A compressed file may hold several members (gzip), streams (bzip2, xz) or frames (Zstandard), one behind the other:
their contents are one document. All four libraries release the interpreter lock while they work. What they are given
at a time is large: dozens of threads that ask for the lock after every quarter of a megabyte get little else done.
"""

from __future__ import annotations

import bz2
import lzma
import os
import zlib
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import zstandard

BLOCK_NBYTES = 2**20
"""Most bytes that are decompressed at a time where the library puts them into memory of its own: a few kilobytes can
stand for gigabytes."""

Fill = Callable[[np.ndarray], int]
"""Fills memory, uint8, with the next bytes of a document, and returns how many: 0 without room, and at the end."""

WINDOW_BITS = 27
"""How far back, 128 MiB, Zstandard data may refer, which takes as much memory; ``zstd --long=31`` writes more."""
XZ_NBYTES = 2**28
"""Memory that one xz stream may take for its dictionary; ``xz -9`` needs 65 MiB."""
GZIP_WBITS = 16 + zlib.MAX_WBITS
"""zlib's way to say: gzip's header and checksum, and no others."""


class DamagedError(ValueError):
    """Compressed bytes that stand for no document."""


class TooWideError(ValueError):
    """Compressed bytes, sound ones, that take more memory to decompress than is allowed."""


class Decompressor(Protocol):
    """One member's state, as `bz2` and `lzma` have it."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Gunzip:
    """zlib's object with the interface of the others: it keeps the input that it was given and did not use."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(GZIP_WBITS)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._member.eof

    @property
    def unused_data(self) -> bytes:
        return self._member.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        block = self._member.decompress(self._member.unconsumed_tail + data, max_length)
        # A full block may have left more to say even when all input went in.
        self.needs_input = not self._member.unconsumed_tail and len(block) < max_length
        return block


@dataclass(frozen=True)
class _Codec:
    begin: Callable[[], Decompressor]
    """A decompressor for one member."""
    errors: tuple[type[Exception], ...]
    padded: bool
    """Whether zeros may follow a member, as tapes and some writers leave them."""


def _unxz() -> Any:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_NBYTES)


CODECS = {
    "gzip": _Codec(_Gunzip, (zlib.error,), padded=True),
    "bzip2": _Codec(bz2.BZ2Decompressor, (OSError, ValueError), padded=False),
    "xz": _Codec(_unxz, (lzma.LZMAError,), padded=True),
}
ZSTD = "zstd"

SUFFIXES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": ZSTD}
"""The end of a file's name, in either case, and the codec that it stands for."""


def codec_of(name: str) -> str | None:
    """The codec that the end of a file's name stands for, if any: a value of `SUFFIXES`."""
    return SUFFIXES.get(os.path.splitext(name)[1].lower())


def reader(codec: str, stored: Iterable[bytes]) -> Fill:
    """What gives the bytes that the stored bytes of a file stand for; it may give fewer than there is room for.

    codec: a value of `SUFFIXES`. stored: the file's bytes in any blocks that are not empty, taken as they are needed.
    It raises DamagedError where they are malformed, end within a member, or fail a checksum that the format has, and
    TooWideError where they refer further back than `WINDOW_BITS` or `XZ_NBYTES` allow; errors of ``stored`` pass
    through.
    """
    return _Frames(stored).fill if codec == ZSTD else _Members(codec, stored).fill


class _Source:
    """The stored bytes of a file, and how many were taken."""

    def __init__(self, codec: str, stored: Iterable[bytes]) -> None:
        self.codec = codec
        self._stored = iter(stored)
        self.taken = 0

    def next(self) -> bytes:
        """The next block; empty at the end."""
        data = next(self._stored, b"")
        self.taken += len(data)
        return data

    def malformed(self, error: Exception) -> DamagedError | TooWideError:
        # The libraries have no other way to say it than by these words.
        if "too much memory" in str(error) or "Memory usage limit" in str(error):
            most = 2**WINDOW_BITS if self.codec == ZSTD else XZ_NBYTES
            return TooWideError(
                f"its {self.codec} takes more than the {most >> 20} MiB allowed for its window"
            )
        return DamagedError(f"{self.codec} finds within its first {self.taken} bytes: {error}")

    def check_end(self, inside: bool) -> None:
        """Raise DamagedError where the bytes end inside of a member, or before any."""
        if not self.taken:
            raise DamagedError(f"it is empty, and even {self.codec} of nothing has some bytes")
        if inside:
            raise DamagedError(f"it was cut short: its {self.taken} bytes end where {self.codec} needs more")


class _Members:
    """Members, or streams, one behind the other, by libraries that decompress into memory of their own."""

    def __init__(self, codec: str, stored: Iterable[bytes]) -> None:
        self._how = CODECS[codec]
        self._source = _Source(codec, stored)
        self._data = b""
        self._member: Decompressor | None = None
        self._begun = False

    def fill(self, target: np.ndarray) -> int:
        while len(target):
            member = self._member
            if not self._data and (member is None or member.needs_input):
                self._data = self._source.next()
                if not self._data:
                    self._source.check_end(member is not None)
                    return 0
            if member is None:
                if self._begun and self._how.padded:
                    self._data = self._data.lstrip(b"\0")
                    if not self._data:
                        continue
                member = self._member = self._how.begin()
                self._begun = True
            try:
                block = member.decompress(self._data, min(len(target), BLOCK_NBYTES))
            except self._how.errors as error:
                raise self._source.malformed(error) from error
            self._data = b""
            if member.eof:
                self._data, self._member = member.unused_data, None
            if block:
                target[: len(block)] = np.frombuffer(block, np.uint8)
                return len(block)
        return 0


class _Frames:
    """Zstandard's frames one behind the other, decompressed straight to where they are wanted."""

    def __init__(self, stored: Iterable[bytes]) -> None:
        self._source = _Source(ZSTD, stored)
        self._ends = _FrameEnds()
        decoder = zstandard.ZstdDecompressor(max_window_size=2**WINDOW_BITS)
        source: Any = self  # of a file the decoder asks for ``read`` alone
        self._reader = decoder.stream_reader(source, read_across_frames=True)

    def read(self, size: int) -> bytes:
        """For the decoder: the next stored bytes; any number, and none at the end."""
        data = self._source.next()
        self._ends.follow(data)
        return data

    def fill(self, target: np.ndarray) -> int:
        if not len(target):
            return 0  # the decoder calls it an error to have no room
        try:
            count: int = self._reader.readinto(target)
        except zstandard.ZstdError as error:
            raise self._source.malformed(error) from error
        if not count:
            self._source.check_end(self._ends.inside)
        return count


class _FrameEnds:
    """Whether stored bytes end between Zstandard's frames: the decoder takes what is cut short for all there is.

    Frames and blocks say in their headers how long they are (RFC 8878, section 3.1); what is in them is for the
    decoder to judge, and so is what is no frame at all.
    """

    def __init__(self) -> None:
        self._seen = bytearray()
        self._between = False
        self._steps = self._walk()
        self._wanted = next(self._steps)
        """Bytes to see next; below zero, bytes to pass over; 0 behind what is no frame."""

    @property
    def inside(self) -> bool:
        return not self._between or bool(self._seen)

    def follow(self, data: bytes) -> None:
        """The bytes behind those before."""
        at = 0
        while at < len(data) and self._wanted:
            if self._wanted < 0:
                step = min(-self._wanted, len(data) - at)
                self._wanted += step
                if not self._wanted:
                    self._step(b"")
            else:
                step = min(self._wanted - len(self._seen), len(data) - at)
                self._seen += data[at : at + step]
                if len(self._seen) == self._wanted:
                    seen, self._seen = bytes(self._seen), bytearray()
                    self._step(seen)
            at += step

    def _step(self, seen: bytes) -> None:
        try:
            self._wanted = self._steps.send(seen)
        except StopIteration:
            self._wanted = 0

    def _walk(self) -> Generator[int, bytes, None]:
        while True:
            self._between = True
            magic = int.from_bytes((yield 4), "little")
            self._between = False
            if magic >> 4 == 0x184D2A5:  # a frame to skip
                nbytes = int.from_bytes((yield 4), "little")
                if nbytes:
                    yield -nbytes
                continue
            if magic != 0xFD2FB528:
                return
            (flags,) = yield 1
            alone, has_checksum = bool(flags & 32), bool(flags & 4)
            dictionary, length = (0, 1, 2, 4)[flags & 3], (int(alone), 2, 4, 8)[flags >> 6]
            yield -((not alone) + dictionary + length)
            last = False
            while not last:
                header = int.from_bytes((yield 3), "little")
                last, repeats, nbytes = bool(header & 1), header >> 1 & 3 == 1, header >> 3
                if repeats or nbytes:
                    yield -(1 if repeats else nbytes)
            if has_checksum:
                yield -4
