"""Compressed bytes to plain ones, as a stream: gzip, bzip2, xz, LZMA, LZ4 and Zstandard, in memory that does not grow.

A compressed file may hold several members (gzip), streams (bzip2, xz) or frames (LZ4, Zstandard), one behind the other:
their contents are one document. All of the libraries release the interpreter lock while they work. Each call gets a
large amount: dozens of threads that ask for the lock after every quarter of a megabyte get little else done. Zstandard,
by far the fastest, is read and decompressed by a loop of its own, which takes the lock once a block."""

from __future__ import annotations

import bz2
import lzma
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from isal.igzip_lib import DECOMP_DEFLATE, DECOMP_GZIP, IgzipDecompressor, IsalError

from tilewright.pipeline.transfer import zstd_loop
from tilewright.pipeline.transfer.zstd import WINDOW_BITS, FrameError, Frames

BLOCK_NBYTES = 2**20
"""The most bytes that are decompressed at a time where the library allocates the output: a few kilobytes can expand to
gigabytes."""

Stored = bytes | memoryview
"""Compressed bytes; a view may be of memory that the next block overwrites."""


@dataclass(frozen=True)
class StoredFile:
    """Compressed bytes that lie in a file."""

    path: str
    nbytes: int
    """How many bytes to read."""
    blocks: Callable[[int], Iterator[Stored]]
    """The bytes from an offset on, block by block; its errors say what is wrong with the file, also after the last."""
    check: Callable[[int], None]
    """Is called with the descriptor of a file that was read without ``blocks``, after that; its errors say the same."""
    taken: Callable[[int], None] | None = None
    """Is called, after some were read without ``blocks``, with how many bytes were read so far."""


Fill = Callable[[np.ndarray], int]
"""Fills memory, uint8, with the next bytes of a document, and returns how many: 0 without room, and at the end."""

XZ_NBYTES = 2**28
"""Memory that one xz stream may take for its dictionary; ``xz -9`` needs 65 MiB."""


class MalformedError(ValueError):
    """Compressed bytes that are malformed."""


class TooWideError(ValueError):
    """Valid compressed bytes that need more memory to decompress than is allowed."""


class DictionaryError(ValueError):
    """Compressed bytes, presumably valid, that need a dictionary which is stored elsewhere."""


class MissingPackageError(ValueError):
    """What decompresses such bytes is not installed."""


ERRORS = (MalformedError, TooWideError, DictionaryError, MissingPackageError)


class Decompressor(Protocol):
    """A decompressor of one member, with the interface of `bz2` and `lzma`."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


@dataclass(frozen=True)
class _Codec:
    begin: Callable[[], Decompressor]
    """A decompressor for one member."""
    errors: tuple[type[Exception], ...]
    padded: bool
    """Whether zeros may follow a member, as tapes and some writers leave them."""


_ISAL_ERROR: Any = IsalError
"""A class; the package's types say that it is an instance."""


def _gunzip() -> Any:
    return IgzipDecompressor(flag=DECOMP_GZIP)  # which compares checksum and length, too


def _inflate() -> Any:
    return IgzipDecompressor(flag=DECOMP_DEFLATE)


def _unxz() -> Any:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_NBYTES)


def _unlzma() -> Any:
    return lzma.LZMADecompressor(lzma.FORMAT_ALONE, memlimit=XZ_NBYTES)


class _Unlz4:
    """The lz4 package's decompressor of one frame."""

    def __init__(self) -> None:
        try:
            from lz4.frame import LZ4FrameDecompressor
        except ImportError as error:
            raise MissingPackageError(
                "LZ4 is decompressed by the package lz4, which is not installed here"
            ) from error
        self._frame = LZ4FrameDecompressor()

    @property
    def eof(self) -> bool:
        return bool(self._frame.eof)

    @property
    def needs_input(self) -> bool:
        return bool(self._frame.needs_input)

    @property
    def unused_data(self) -> bytes:
        return self._frame.unused_data or b""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        block: bytes = self._frame.decompress(data, max_length)
        return block


CODECS = {
    "gzip": _Codec(_gunzip, (_ISAL_ERROR,), padded=True),
    "bzip2": _Codec(bz2.BZ2Decompressor, (OSError, ValueError), padded=False),
    "xz": _Codec(_unxz, (lzma.LZMAError,), padded=True),
    "lzma": _Codec(_unlzma, (lzma.LZMAError,), padded=False),
    "lz4": _Codec(_Unlz4, (RuntimeError, ValueError), padded=False),
    "deflate": _Codec(_inflate, (_ISAL_ERROR,), padded=False),
}
"""``deflate`` is of members of zip archives, and of no file: without header and checksum. It and gzip are decompressed
by Intel's ISA-L, in less than half of the time that zlib takes."""
ZSTD = "zstd"

SUFFIXES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": ZSTD, ".lzma": "lzma", ".lz4": "lz4"}
"""File name suffixes, in either case, and their codecs."""
CODEC_NAMES = frozenset(SUFFIXES.values())


def reader(codec: str, stored: Iterable[Stored] | StoredFile, window_nbytes: int = 2**WINDOW_BITS) -> Fill:
    """A `Fill` of the decompressed bytes of a file; it may give fewer bytes than there is room for.

    codec: a key of `CODECS`, or `ZSTD`. stored: the file, or its bytes in blocks of any size but 0, taken as they are
    needed; a block is not used any more once the next is asked for. The function raises MalformedError where the bytes
    are malformed, end within a member, or fail a checksum of the format; TooWideError where they refer further back
    than ``window_nbytes`` or `XZ_NBYTES` allow; DictionaryError where they need a dictionary; MissingPackageError.
    Errors of ``stored`` pass through."""
    return _Frames(stored, window_nbytes).fill if codec == ZSTD else _Members(codec, stored).fill


class _Source:
    """The stored bytes of a file, block by block, and the errors about them."""

    def __init__(
        self, codec: str, stored: Iterable[Stored] | StoredFile, most_nbytes: int = XZ_NBYTES
    ) -> None:
        self.codec, self._most = codec, most_nbytes
        self._stored = stored
        self._blocks: Iterator[Stored] | None = None

    def next(self, taken: int) -> Stored:
        """The next block, after ``taken`` bytes; empty at the end."""
        if self._blocks is None:
            stored = self._stored
            self._blocks = stored.blocks(taken) if isinstance(stored, StoredFile) else iter(stored)
        return next(self._blocks, b"")

    def malformed(
        self, error: Exception, taken: int, whole: bool
    ) -> MalformedError | TooWideError | DictionaryError:
        """Our error for a library's error on the bytes so far. whole: whether a member has ended before."""
        # The libraries tell these cases apart only by their messages.
        if "Dictionary mismatch" in str(error):
            return DictionaryError(f"its {self.codec} needs the dictionary that it was compressed with")
        if "too much memory" in str(error) or "Memory usage limit" in str(error):
            said = "; tilewright.window-nbytes may allow more" if self.codec == ZSTD else ""
            return TooWideError(
                f"its {self.codec} takes more than the {self._most >> 20} MiB allowed for its window{said}"
            )
        others = "; or other bytes follow its last whole member" if whole else ""
        return MalformedError(f"{self.codec} finds within its first {taken} bytes: {error}{others}")

    def check_end(self, taken: int, inside: bool, whole: bool) -> None:
        """Raise MalformedError if there are no bytes, or if they end inside a member.

        whole: whether a member has ended before. What follows it is then a truncated member or no member at all: a few
        bytes do not tell which.
        """
        if not taken:
            raise MalformedError(f"it is empty, and even {self.codec} of nothing has some bytes")
        if inside:
            others = ", or other bytes follow its last whole member" if whole else ""
            raise MalformedError(
                f"it was cut short{others}: its {taken} bytes end where {self.codec} needs more"
            )


class _Members:
    """Consecutive members, or streams, for libraries that allocate their own output."""

    def __init__(self, codec: str, stored: Iterable[Stored] | StoredFile) -> None:
        self._how = CODECS[codec]
        self._source = _Source(codec, stored)
        self._taken = 0
        self._data = b""
        self._member: Decompressor | None = None
        self._begun = False
        self._whole = False

    def fill(self, target: np.ndarray) -> int:
        while len(target):
            member = self._member
            if not self._data and (member is None or member.needs_input):
                self._data = bytes(self._source.next(self._taken))  # a library may keep or leave some
                self._taken += len(self._data)
                if not self._data:
                    self._source.check_end(self._taken, member is not None, self._whole)
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
                raise self._source.malformed(error, self._taken, self._whole) from error
            self._data = b""
            if member.eof:
                self._data, self._member, self._whole = member.unused_data, None, True
            if block:
                target[: len(block)] = np.frombuffer(block, np.uint8)
                return len(block)
        return 0


class _Frames:
    """Consecutive Zstandard frames, decompressed straight to their destination."""

    def __init__(self, stored: Iterable[Stored] | StoredFile, window_nbytes: int) -> None:
        # libzstd takes powers of two, of which 2 GiB is the largest.
        bits = min(window_nbytes.bit_length() - 1, 31)
        self._source = _Source(ZSTD, stored, 2**bits)
        self._file = stored if isinstance(stored, StoredFile) else None
        path, nbytes = (stored.path, stored.nbytes) if isinstance(stored, StoredFile) else (None, 0)
        self._frames = Frames(bits, path, nbytes, decompress=zstd_loop.decompress)
        self._ended = False

    def fill(self, target: np.ndarray) -> int:
        while len(target) and not self._ended:
            try:
                count = self._frames.fill(target)
            except FrameError as error:
                raise self._source.malformed(error, self._frames.taken, self._frames.whole) from error
            if self._file is not None and self._file.taken is not None:
                self._file.taken(self._frames.taken)
            if count:
                return count
            if self._file is not None and self._frames.descriptor >= 0:
                self._file.check(self._frames.descriptor)
            data = self._source.next(self._frames.taken)
            if data:
                self._frames.feed(data)
                continue
            self._source.check_end(self._frames.taken, self._frames.inside, self._frames.whole)
            self._frames.close()
            self._ended = True
        return 0
