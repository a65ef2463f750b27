"""What a file is, by its first bytes; its name decides where they do not tell."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import numpy as np

from tilewright.pipeline.text.formats import decompress

HEAD_NBYTES = 512
"""First bytes that are looked at: a header of a tar."""

TAR, ZIP, WARC, PARQUET, ARROW, ARROW_STREAM = "tar", "zip", "warc", "parquet", "arrow", "arrow stream"
CONTAINERS = {
    TAR: "a tar archive",
    ZIP: "a zip archive",
    WARC: "a WARC file",
    PARQUET: "a Parquet file",
    ARROW: "an Arrow file",
    ARROW_STREAM: "an Arrow stream",
}
"""Forms that hold documents, and what people call them."""

READ_FROM_END = (ZIP, PARQUET, ARROW)
"""Forms with a directory at their ends, by which their parts are found."""

ENCODINGS = {"utf-16": "UTF-16", "utf-32": "UTF-32"}
"""Forms that are encodings, by Python's names for those that begin with a byte order mark."""

_MAGIC = (
    (b"\x1f\x8b\x08", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\0", "xz"),
    (b"\x28\xb5\x2f\xfd", decompress.ZSTD),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"PK\3\4", ZIP),
    (b"PK\5\6", ZIP),  # an empty one
    (b"PAR1", PARQUET),
    (b"ARROW1\0\0", ARROW),
    (b"WARC/", WARC),
    (b"\xff\xfe\0\0", "utf-32"),
    (b"\0\0\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)

_OTHERS = (
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!\x1a\x07", "a RAR archive"),
    (b"\x1f\x9d", "compressed by compress (.Z)"),
    (b"LZIP", "compressed by lzip"),
    (b"\x89LZO\0\r\n\x1a\n", "compressed by lzop"),
    (b"%PDF-", "a PDF"),
    (b"SQLite format 3\0", "an SQLite database"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"Obj\1", "an Avro file"),
    (b"ORC", "an ORC file"),
)
"""What cannot be opened: counted as it is stored, and told of."""

_FIRST = np.zeros(256, bool)
_FIRST[[magic[0] for magic, _ in (*_MAGIC, *_OTHERS)]] = True
_FIRST[0x5D] = True  # LZMA
_FIRST[0x50:0x60] = True  # a skippable frame

_NAMED = {
    ".tar": TAR,
    ".zip": ZIP,
    ".warc": WARC,
    ".wet": WARC,
    ".parquet": PARQUET,
    ".arrow": ARROW,
    ".feather": ARROW,
}
_ENDINGS = tuple(_NAMED)
JSON_LINES = (".jsonl", ".ndjson")
"""How names of JSON lines end, but for what compresses them."""
_OF_OBJECTS = (*JSON_LINES, ".json")
"""How names end of what has to be JSON lines where a field is asked for."""
_UNREAD_TABLES = {".csv": "CSV", ".tsv": "TSV"}
"""Names of what has fields that nothing here reads."""
_OBJECT = re.compile(rb"(?:\xef\xbb\xbf)?\s*\{\s*[\"}]")
_SHORT = {".tgz": ".tar.gz", ".tbz": ".tar.bz2", ".tbz2": ".tar.bz2", ".txz": ".tar.xz", ".tzst": ".tar.zst"}
_CODECS = decompress.SUFFIXES | {
    short: decompress.SUFFIXES[os.path.splitext(long)[1]] for short, long in _SHORT.items()
}


def recognised(head: bytes, name: str = "") -> str | None:
    """What a text is that begins so: a codec of `decompress`, a form of `CONTAINERS` or `ENCODINGS`, or None for text
    of no known form. It takes `HEAD_NBYTES`, or all that the text has."""
    ending = _ending(name)
    if head[:1] and _FIRST[head[0]]:
        for magic, form in _MAGIC:
            if head.startswith(magic) and (form != "bzip2" or _begins_bzip2(head)):
                return form
        if head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F:  # LZ4 has the same ones
            return "lz4" if ending == ".lz4" else decompress.ZSTD
        if _begins_lzma(head):
            return "lzma"
        if ending in (".arrow", ".arrows") and head.startswith(b"\xff\xff\xff\xff"):
            return ARROW_STREAM
    if len(head) >= HEAD_NBYTES:
        by_name = _NAMED.get(ending) == TAR
        if (head[257:262] == b"ustar" or by_name) and tar_checksum_fits(head):
            return TAR
        if by_name and not any(head[:HEAD_NBYTES]):  # no member stands before its end
            return TAR
    return None


def unopened(head: bytes) -> str | None:
    """What a text is that begins so and that nothing here opens, in words; None for none that is known."""
    return next((what for magic, what in _OTHERS if head.startswith(magic)), None)


def codec_named(name: str) -> str | None:
    """The codec that the ending of a name says, or None."""
    return _CODECS.get(_ending(name))


def container_named(name: str) -> str | None:
    """The container that the ending of a name says, or None."""
    return _NAMED.get(_ending(name))


def without_codec(name: str) -> str:
    """A name without the ending of its codec, if it has one."""
    name = _long(name)
    stem, ending = os.path.splitext(name)
    return stem if ending.lower() in decompress.SUFFIXES else name


def said_by(name: str) -> tuple[str | None, str | None]:
    """What the end of a name says: two files of which it says the same are the same if their bytes are."""
    ending = _ending(without_codec(name))
    return codec_named(name), ending if ending in (*_ENDINGS, ".arrows") else None


def named_for_objects(name: str) -> bool:
    """Whether a name, without the ending of a codec, says that a text is JSON lines."""
    return name.lower().endswith(_OF_OBJECTS)


def holds_objects(head: bytes, name: str) -> bool:
    """Whether a text is to be read as JSON lines where a field is asked for, and is not a plain text: its name says so,
    or it begins as an object does. ``{{`` and ``{\\`` begin texts. name: without the ending of a codec."""
    # Of UTF-16 that nobody has decoded, the error says more than a plain text of every second byte would.
    return named_for_objects(name) or _OBJECT.match(head.replace(b"\0", b"")) is not None


def unread_table_named(name: str) -> str | None:
    """What a name says of a table whose fields nothing here reads; None for any other. name: without the ending of a
    codec."""
    return _UNREAD_TABLES.get(_ending(name))


def may_be_known(data: np.ndarray, edges: np.ndarray, names: Sequence[str]) -> bool:
    """Whether any of the texts that lie in ``data``, uint8, from edges[i] to edges[i + 1], begins as a known form does,
    or has the name of a container; a look at all texts at once, which may say so of one that is nothing."""
    if any(name.lower().endswith(_ENDINGS) for name in names):
        return True
    starts, lengths = edges[:-1], np.diff(edges)
    starts = starts[lengths >= 2]
    if _FIRST[data[starts]].any():
        for start in starts[_FIRST[data[starts]]].tolist():
            head = data[start : start + 16].tobytes()
            if (
                any(head.startswith(magic) for magic, _ in (*_MAGIC, *_OTHERS))
                or head[1:4] == b"\x2a\x4d\x18"
            ):
                return True
            if head[0] == 0x5D and head[1:3] == b"\0\0":
                return True
    long = edges[:-1][lengths >= 512]
    return bool((data[long + 257] == ord("u")).any() and any(
        data[start + 257 : start + 262].tobytes() == b"ustar" for start in long[data[long + 257] == ord("u")].tolist()
    ))  # fmt: skip


def _long(name: str) -> str:
    stem, ending = os.path.splitext(name)
    return stem + _SHORT.get(ending.lower(), ending)


def _ending(name: str) -> str:
    dot = name.rfind(".")
    if dot > 0 and name[dot - 1] not in "./" and name.find("/", dot) < 0:
        return name[dot:].lower()  # what the call below gives, in a third of the time
    return os.path.splitext(name)[1].lower()


def _begins_bzip2(head: bytes) -> bool:
    # The first block's mark, or that of the end where there is no block.
    return head[3:4] in b"123456789" and (
        len(head) < 10 or head[4:10] in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")
    )


def _begins_lzma(head: bytes) -> bool:
    """By what the tools of XZ ask of the format that has no mark: usual properties, a usual size of the dictionary, and
    a length that is below 256 GiB, or unknown. Bytes behind the header begin with 0."""
    if len(head) < 14 or head[0] != 0x5D or head[13]:
        return False
    dictionary = int.from_bytes(head[1:5], "little")
    usual = dictionary == 2**32 - 1 or (
        dictionary >= 2**12 and (dictionary & (dictionary - 1) == 0 or dictionary.bit_count() == 2)
    )
    length = int.from_bytes(head[5:13], "little")
    return usual and (length == 2**64 - 1 or length < 2**38)


def tar_checksum_fits(header: bytes) -> bool:
    """Whether the checksum of a tar's header is that of its bytes, signed or not, with blanks for itself."""
    try:
        said = int(header[148:156].split(b"\0")[0].strip(b" \0") or b"-1", 8)
    except ValueError:
        return False
    unsigned = sum(header[:148]) + 8 * 0x20 + sum(header[156:512])
    if said == unsigned:
        return True
    signed = unsigned - 256 * sum(byte > 127 for byte in header[:148] + header[156:512])
    return said == signed
