"""The members of a tar archive, read in order, whatever the archive came through.

Formats: POSIX.1-1988 (ustar) and 2001 (pax), GNU's long names and large sizes, and the seventh edition's. A member is a
regular file; what it is called is never the name of anything here.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilewright.pipeline.text.formats.decompress import Fill
from tilewright.pipeline.text.formats.recognition import tar_checksum_fits
from tilewright.pipeline.text.formats.sources import ContentError, Exactly, Found, Part

BLOCK_NBYTES = 512
MOST_HEADER_NBYTES = 2**20
"""The longest name, or set of a member's attributes, that is read."""

RESTORE = "restore the file, or count its bytes as they are stored (--raw)"

REGULAR = (b"0", b"\0", b"7")
LINKS = {b"1": "links", b"2": "links"}
SPARSE = b"S"
WITHOUT_CONTENTS = (b"1", b"2", b"3", b"4", b"5", b"6")
"""Links, devices, folders and pipes."""


def members(fill: Fill, found: Found, name: str) -> Iterator[tuple[str, Fill]]:
    """The name and the text of each regular file in an archive; a text is to be read before the next.

    Raises ContentError for what is no archive, or ends within one.
    """
    archive = Exactly(fill)
    common: dict[str, str] = {}
    while True:
        own = dict(common)
        while True:  # the headers in front of a member's own
            header = archive.bytes(BLOCK_NBYTES)
            if len(header) < BLOCK_NBYTES:
                # Python's reader, too, takes an end between two members for the archive's.
                if header or own != common:
                    raise _cut_short(name)
                return
            if not any(header):
                if archive.drain():
                    found.remark("archives with other bytes behind their ends, not counted", name)
                return
            if not tar_checksum_fits(header):
                raise ContentError(
                    "no header of a tar archive stands where one should: its checksum is another", RESTORE
                )
            kind, size = header[156:157], _number(header[124:136])
            if kind not in b"xgLK":
                break
            if size > MOST_HEADER_NBYTES:
                raise ContentError(f"a member's header is {size} bytes long, and no archive's is", RESTORE)
            data = archive.bytes(size)
            if len(data) < size or archive.skip(-size % BLOCK_NBYTES) < -size % BLOCK_NBYTES:
                raise _cut_short(name)
            if kind == b"L":
                own["path"] = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
            elif kind in b"xg":
                attributes = _attributes(data)
                own |= attributes
                if kind == b"g":
                    common |= attributes
        path = own.get("path") or _path(header)
        if "size" in own:
            if not own["size"].isascii() or not own["size"].isdigit():
                raise ContentError(f"a member's size is {own['size'][:40]!r}", RESTORE, f":{path}")
            size = int(own["size"])
        if kind == SPARSE or any(key.startswith("GNU.sparse.") for key in own):
            raise ContentError(
                "it is stored with holes (sparse), which are not read here",
                "unpack the archive, or make it anew without --sparse",
                f":{path}",
            )
        if kind in REGULAR and not path.endswith("/"):
            part = Part(archive._fill, size, lambda: _cut_short(name))
            yield path, part.fill
            size_left = part.left
        else:
            if kind in LINKS:
                found.remark("links in archives not counted", f"{name}:{path}")
            # These have no contents, whatever their size says; unknown kinds have.
            size_left = size = 0 if kind in WITHOUT_CONTENTS else size
        padding = -size % BLOCK_NBYTES
        if archive.skip(size_left) < size_left or archive.skip(padding) < padding:
            raise _cut_short(name)


def _cut_short(name: str) -> ContentError:
    return ContentError("the archive was cut short: it ends within a member or a header", RESTORE)


def _number(field: bytes) -> int:
    """A number of a header: octal digits, or GNU's base 256."""
    if field[0] & 0x80:
        value = int.from_bytes(field, "big") & ~(0x80 << 8 * (len(field) - 1))
        if field[0] == 0xFF or value >= 2**63:
            raise ContentError("a member's size is below 0, or larger than any file's", RESTORE)
        return value
    digits = field.split(b"\0")[0].strip()
    try:
        value = int(digits or b"0", 8)
    except ValueError:
        value = -1
    if value < 0:
        raise ContentError(f"a member's size is no number: {digits[:20]!r}", RESTORE)
    return value


def _path(header: bytes) -> str:
    path, prefix = header[:100].split(b"\0")[0], b""
    if header[257:263] == b"ustar\0":
        prefix = header[345:500].split(b"\0")[0]
    return (prefix + b"/" + path if prefix else path).decode("utf-8", "surrogateescape")


def _attributes(data: bytes) -> dict[str, str]:
    """The records of a pax header: a length, a blank, a key, an equals sign, a value, and a newline."""
    found: dict[str, str] = {}
    while data and data[:1] != b"\0":
        digits, blank, _ = data[:20].partition(b" ")
        if not (blank and digits.isdigit() and 3 + len(digits) <= int(digits) <= len(data)):
            raise ContentError("a member's pax header is malformed", RESTORE)
        record, data = data[len(digits) + 1 : int(digits)], data[int(digits) :]
        key, equals, value = record.partition(b"=")
        if not equals or not value.endswith(b"\n"):
            raise ContentError("a member's pax header is malformed", RESTORE)
        found[key.decode("utf-8", "surrogateescape")] = value[:-1].decode("utf-8", "surrogateescape")
    return found
