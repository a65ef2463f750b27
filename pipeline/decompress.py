"""Compressed bytes to plain ones, as a stream: gzip, bzip2, xz and Zstandard, in memory that does not grow.

A compressed file may hold several members (gzip), streams (bzip2, xz) or frames (Zstandard), one behind the other:
their contents are one document. All four libraries release the interpreter lock while they work.
"""

from __future__ import annotations

import bz2
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from backports import zstd

BLOCK_NBYTES = 2**18
"""Most bytes that are decompressed at a time: a few kilobytes can stand for gigabytes."""

WINDOW_BITS = 27
"""How far back, 128 MiB, Zstandard data may refer, which takes as much memory; ``zstd --long=31`` writes more."""
XZ_NBYTES = 2**28
"""Memory that one xz stream may take for its dictionary; ``xz -9`` needs 65 MiB."""
GZIP_WBITS = 16 + zlib.MAX_WBITS
"""zlib's way to say: gzip's header and checksum, and no others."""


class DamagedError(ValueError):
    """Compressed bytes that stand for no document."""


class Decompressor(Protocol):
    """One member's state, as `bz2`, `lzma` and `zstd` have it."""

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


def _unzstd() -> Any:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: WINDOW_BITS})


CODECS = {
    "gzip": _Codec(_Gunzip, (zlib.error,), padded=True),
    "bzip2": _Codec(bz2.BZ2Decompressor, (OSError, ValueError), padded=False),
    "xz": _Codec(_unxz, (lzma.LZMAError,), padded=True),
    "zstd": _Codec(_unzstd, (zstd.ZstdError,), padded=False),
}

SUFFIXES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
"""The end of a file's name, in either case, and the codec that it stands for."""


def codec_of(name: str) -> str | None:
    """The codec that the end of a file's name stands for, if any: a name of `CODECS`."""
    return SUFFIXES.get(os.path.splitext(name)[1].lower())


def blocks(codec: str, stored: Iterable[bytes]) -> Iterator[bytes]:
    """What the stored bytes of a file stand for, in blocks of 1 to `BLOCK_NBYTES` bytes.

    codec: a name of `CODECS`. stored: the file's bytes in any blocks that are not empty, taken as they are needed.
    Raises DamagedError where they are malformed, end within a member, or fail a checksum that the format has;
    errors of ``stored`` pass through.
    """
    how = CODECS[codec]
    member: Decompressor | None = None
    begun = False
    taken = 0
    for data in stored:
        taken += len(data)
        while data or (member is not None and not member.needs_input):
            if member is None:
                data = data.lstrip(b"\0") if begun and how.padded else data
                if not data:
                    break
                member, begun = how.begin(), True
            try:
                block = member.decompress(data, BLOCK_NBYTES)
            except how.errors as error:
                raise DamagedError(f"{codec} finds within its first {taken} bytes: {error}") from error
            data = b""
            if member.eof:
                data, member = member.unused_data, None
            if block:
                yield block
    if not begun:
        raise DamagedError(f"it is empty, and even {codec} of nothing has some bytes")
    if member is not None:
        raise DamagedError(f"it was cut short: its {taken} bytes end where {codec} needs more")
