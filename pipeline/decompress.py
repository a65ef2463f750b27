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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import zstandard

from tilewright.kernels.deferred import numba
from tilewright.kernels.host_loops import compiled

BLOCK_NBYTES = 2**20
"""Most bytes that are decompressed at a time where the library puts them into memory of its own: a few kilobytes can
stand for gigabytes."""

Stored = bytes | memoryview
"""Compressed bytes; a view may be of memory that the next ones come into."""

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


class DictionaryError(ValueError):
    """Compressed bytes, sound ones for all we know, that refer to a dictionary which is kept somewhere else."""


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


def reader(codec: str, stored: Iterable[Stored]) -> Fill:
    """What gives the bytes that the stored bytes of a file stand for; it may give fewer than there is room for.

    codec: a value of `SUFFIXES`. stored: the file's bytes in any blocks that are not empty, taken as they are needed;
    none is looked at any more when the next is asked for.
    It raises DamagedError where they are malformed, end within a member, or fail a checksum that the format has, and
    TooWideError where they refer further back than `WINDOW_BITS` or `XZ_NBYTES` allow, and DictionaryError where to a
    dictionary of their own; errors of ``stored`` pass through.
    """
    return _Frames(stored).fill if codec == ZSTD else _Members(codec, stored).fill


class _Source:
    """The stored bytes of a file, and how many were taken."""

    def __init__(self, codec: str, stored: Iterable[Stored]) -> None:
        self.codec = codec
        self._stored = iter(stored)
        self.taken = 0

    def next(self) -> Stored:
        """The next block; empty at the end."""
        data = next(self._stored, b"")
        self.taken += len(data)
        return data

    def malformed(self, error: Exception) -> DamagedError | TooWideError | DictionaryError:
        # The libraries have no other way to say it than by these words.
        if "Dictionary mismatch" in str(error):
            return DictionaryError(f"its {self.codec} needs the dictionary that it was compressed with")
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

    def __init__(self, codec: str, stored: Iterable[Stored]) -> None:
        self._how = CODECS[codec]
        self._source = _Source(codec, stored)
        self._data = b""
        self._member: Decompressor | None = None
        self._begun = False

    def fill(self, target: np.ndarray) -> int:
        while len(target):
            member = self._member
            if not self._data and (member is None or member.needs_input):
                self._data = bytes(self._source.next())  # a library may keep some, or leave it
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

    def __init__(self, stored: Iterable[Stored]) -> None:
        self._source = _Source(ZSTD, stored)
        self._ends = _FrameEnds()
        decoder = zstandard.ZstdDecompressor(max_window_size=2**WINDOW_BITS)
        source: Any = self  # of a file the decoder asks for ``read`` alone
        self._reader = decoder.stream_reader(source, read_across_frames=True)

    def read(self, size: int) -> Stored:
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
        self._walk = _walk_loop()
        self._state = np.zeros(_STATE_WORDS, np.int64)

    @property
    def inside(self) -> bool:
        return bool(self._state.any())

    def follow(self, data: Stored) -> None:
        """The bytes behind those before."""
        self._walk(np.frombuffer(data, np.uint8), self._state)


_PHASE, _PASSED, _SEEN, _VALUE, _CHECKSUM = range(5)
"""Of a walk: what comes next, bytes to pass over before it, how many bytes of it were seen, the number that they make
up, the least one first, and whether a checksum follows the frame's blocks."""
_STATE_WORDS = 5
_MAGIC, _SKIPPED_LENGTH, _FLAGS, _BLOCK, _NO_FRAME = range(5)
"""Phases. All of a state is zero between frames, and before the first."""


def _walk(data: Any, state: Any) -> None:
    """Go on over ``data``, uint8[n], from ``state``, int64[5], which becomes that behind them.

    A compiled loop: a thread for each core that takes 3 µs of the interpreter's lock for every header, one in 40
    kilobytes, leaves the others waiting. It keeps that lock for the microseconds that it takes in all.
    """
    at, stop = 0, len(data)
    while at < stop:
        if state[_PASSED] > 0:
            step = min(state[_PASSED], stop - at)
            state[_PASSED] -= step
            at += step
            continue
        phase = state[_PHASE]
        if phase == _NO_FRAME:
            return
        state[_VALUE] |= np.int64(data[at]) << (8 * state[_SEEN])
        state[_SEEN] += 1
        at += 1
        wanted = 4
        if phase == _FLAGS:
            wanted = 1
        elif phase == _BLOCK:
            wanted = 3
        if state[_SEEN] < wanted:
            continue
        value = state[_VALUE]
        state[_SEEN], state[_VALUE] = 0, 0
        if phase == _MAGIC:
            if value >> 4 == 0x184D2A5:
                state[_PHASE] = _SKIPPED_LENGTH
            elif value == 0xFD2FB528:
                state[_PHASE] = _FLAGS
            else:
                state[_PHASE] = _NO_FRAME
        elif phase == _SKIPPED_LENGTH:
            state[_PASSED] = value
            state[_PHASE] = _MAGIC
        elif phase == _FLAGS:
            alone = value >> 5 & 1
            dictionary = (1 << (value & 3)) >> 1  # 0, 1, 2 or 4 bytes name it
            length = (1 << (value >> 6)) if value >> 6 else alone
            state[_CHECKSUM] = value >> 2 & 1
            state[_PASSED] = 1 - alone + dictionary + length
            state[_PHASE] = _BLOCK
        else:
            repeats = value >> 1 & 3 == 1
            state[_PASSED] = 1 if repeats else value >> 3
            if value & 1:
                state[_PASSED] += 4 * state[_CHECKSUM]
                state[_CHECKSUM] = 0
                state[_PHASE] = _MAGIC


def _walk_loop() -> Any:
    data = numba.types.Array(numba.uint8, 1, "C", readonly=True)
    return compiled(_walk, data, numba.int64[::1], nogil=False)
