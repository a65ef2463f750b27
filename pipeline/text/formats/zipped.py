"""The members of a zip archive: found by its directory, read one by one, each compared with its length and checksum.

Members may be stored, or compressed by Deflate, bzip2, LZMA, xz or Zstandard. What is held does not grow with them.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Iterator
from functools import partial

import numpy as np
from isal.isal_zlib import crc32

from tilewright.kernels.words import in_one_line
from tilewright.pipeline.text.corpus import Document, read_range
from tilewright.pipeline.text.formats import decompress
from tilewright.pipeline.text.formats.decompress import Fill
from tilewright.pipeline.text.formats.sources import ContentError

RESTORE = "restore the file, or count its bytes as they are stored (--raw)"

STORED = 0
LZMA = 14
METHODS = {8: "deflate", 12: "bzip2", LZMA: "lzma", 93: decompress.ZSTD, 95: "xz"}
"""The codecs of the methods that are read."""

ENCRYPTED = 1
_LOCAL = struct.Struct("<4s5H3L2H")
"""The header in front of a member's bytes; the last two are the lengths of a name and of more that follow it."""
STEP_NBYTES = 2**20


class _Stored:
    """A document's bytes as a file that can be read anywhere, as `zipfile` and pyarrow ask for."""

    def __init__(self, document: Document) -> None:
        self._document, self._place = document, 0
        self.closed = False
        self.mode = "rb"

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = (0, self._place, self._document.nbytes)[whence]
        if base + offset < 0:
            raise OSError(22, "a place before the beginning")
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def size(self) -> int:
        return self._document.nbytes

    def read(self, nbytes: int = -1) -> bytes:
        left = max(0, self._document.nbytes - self._place)
        nbytes = left if nbytes is None or nbytes < 0 else min(nbytes, left)
        data = np.empty(nbytes, np.uint8)
        read_range(self._document, self._place, self._place + nbytes, data)
        self._place += nbytes
        return data.tobytes()

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


stored_file = _Stored


def members(document: Document) -> Iterator[tuple[str, Fill]]:
    """The name and the text of each file in an archive, in the order of their bytes.

    Raises ContentError for a damaged archive, or one that holds what cannot be read.
    """
    try:
        found = zipfile.ZipFile(_Stored(document), "r").infolist()
    except OSError:
        raise
    except Exception as error:  # of malformed directories, more than BadZipFile comes out of it
        raise ContentError(f"its directory is malformed: {_in_words(error)}", RESTORE) from error
    listed = sorted(found, key=lambda member: member.header_offset)
    behind = 0
    for member in listed:
        if member.header_offset < behind:
            raise ContentError(
                "members lie over one another, as in an archive made to unpack to more than any disk holds",
                "leave the file out",
                f":{member.filename}",
            )
        behind = member.header_offset + _LOCAL.size + member.compress_size
    for member in listed:
        if member.filename.endswith("/"):  # not is_dir, which fails of an empty name before Python 3.11.8
            continue
        try:
            start = _start(document, member)
            yield member.filename, _Member(document, member, start).fill
        except ContentError as error:
            if not error.where:
                error.within(member.filename)
            raise


def _in_words(error: Exception) -> str:
    return in_one_line(str(error)) or type(error).__name__


def _start(document: Document, member: zipfile.ZipInfo) -> int:
    """Where the member's bytes begin."""
    if member.flag_bits & ENCRYPTED:
        raise ContentError("it is encrypted", "unpack the archive, or leave it out")
    if member.compress_type != STORED and member.compress_type not in METHODS:
        raise ContentError(
            f"its method of compression, {member.compress_type}, is not read here",
            "unpack the archive, or make it anew with Deflate",
        )
    header = np.empty(_LOCAL.size, np.uint8)
    inside = member.header_offset >= 0 and member.header_offset + _LOCAL.size <= document.nbytes
    if inside:
        read_range(document, member.header_offset, member.header_offset + _LOCAL.size, header)
    mark, *_, name_length, more_length = _LOCAL.unpack(header.tobytes())
    start = member.header_offset + _LOCAL.size + name_length + more_length
    if not inside or mark != b"PK\3\4" or start + member.compress_size > document.nbytes:
        raise ContentError("it does not lie where the archive's directory says", RESTORE)
    return int(start)


class _Member:
    """The text of one member."""

    def __init__(self, document: Document, member: zipfile.ZipInfo, start: int) -> None:
        self._member = member
        self._checksum = self._nbytes = 0
        stop = start + member.compress_size
        if member.compress_type == STORED:
            self._fill: Fill = _Range(document, start, stop).fill
            return
        blocks: Iterator[decompress.Stored] = _blocks(document, start, stop)
        if member.compress_type == LZMA:
            blocks = _as_lzma(blocks, member.file_size)
        self._fill = decompress.reader(METHODS[member.compress_type], blocks)

    def fill(self, target: np.ndarray) -> int:
        if not len(target):
            return 0
        member = self._member
        if self._nbytes == member.file_size and member.compress_type == LZMA:
            got = 0  # its end is not always marked
        else:
            got = self._fill(target)
        self._checksum = crc32(target[:got], self._checksum)
        self._nbytes += got
        if self._nbytes > member.file_size or (not got and self._nbytes < member.file_size):
            raise ContentError(
                f"it has {'more' if got else 'fewer'} bytes than the {member.file_size} that the archive says",
                RESTORE,
            )
        if not got and self._checksum != member.CRC:
            raise ContentError(
                f"its checksum is {self._checksum:08x}, and the archive says {member.CRC:08x}", RESTORE
            )
        return got


class _Range:
    """A range of a document's bytes, as a text."""

    def __init__(self, document: Document, start: int, stop: int) -> None:
        self._document, self._start, self._stop = document, start, stop

    def fill(self, target: np.ndarray) -> int:
        step = min(len(target), self._stop - self._start)
        read_range(self._document, self._start, self._start + step, target[:step])
        self._start += step
        return step


def _blocks(document: Document, start: int, stop: int) -> Iterator[bytes]:
    memory = np.empty(min(STEP_NBYTES, stop - start), np.uint8)
    fill = partial(_Range(document, start, stop).fill, memory)
    while got := fill():
        yield memory[:got].tobytes()


def _as_lzma(blocks: Iterator[decompress.Stored], nbytes: int) -> Iterator[decompress.Stored]:
    """The member as a file of LZMA's own, which has the length in its header."""
    first = bytes(next(blocks, b""))
    if len(first) < 9 or first[2:4] != b"\5\0":
        raise decompress.MalformedError("lzma finds no properties of its own")
    yield first[4:9] + nbytes.to_bytes(8, "little") + first[9:]
    yield from blocks
