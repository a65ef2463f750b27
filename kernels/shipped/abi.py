"""How a kernel takes its arguments, as its own machine code says: what a launch packs must lie there.

A cubin is an ELF file. Its section ``.nv.info.KERNEL`` is a list of attributes, one of them for each argument. NVIDIA
does not document it; the numbers are those that ``cuobjdump -elf`` prints as EIATTR_KPARAM_INFO.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

SECTIONS_AT, SECTION_COUNT_AT = 40, 60
"""Where an ELF file's header says where its table of sections begins, and how many there are and which one holds their
names."""
SECTION = struct.Struct("<IIQQQQIIQQ")
ATTRIBUTE = struct.Struct("<BBH")
WITH_BYTES = 4
"""The form of an attribute that so many bytes follow as its value says; every other is its value."""
ARGUMENT = 0x17
ARGUMENT_FIELDS = struct.Struct("<IHHI")
SIZE_SHIFT = 18
"""Above these bits of the last field is the size."""


def argument_places(cubin: bytes, entry: str) -> list[tuple[int, int]]:
    """The offset and the size, in bytes, of each argument of a kernel, in their order."""
    found = {}
    for attribute, value in _attributes(_section(cubin, f".nv.info.{entry}")):
        if attribute == ARGUMENT:
            _, number, offset, size = ARGUMENT_FIELDS.unpack(value)
            found[number] = (offset, size >> SIZE_SHIFT)
    return [place for _, place in sorted(found.items())]


def packed_places(layout: str) -> list[tuple[int, int]]:
    """The same of arguments as `struct` packs them by a format of one letter each."""
    return [
        (struct.calcsize(layout[: place + 1]) - struct.calcsize(letter), struct.calcsize(letter))
        for place, letter in enumerate(layout)
    ]


def _section(cubin: bytes, wanted: str) -> bytes:
    (start,) = struct.unpack_from("<Q", cubin, SECTIONS_AT)
    count, names = struct.unpack_from("<HH", cubin, SECTION_COUNT_AT)
    sections = [SECTION.unpack_from(cubin, start + SECTION.size * place) for place in range(count)]
    names_at = sections[names][4]
    for section in sections:
        name_at = names_at + section[0]
        if cubin[name_at : cubin.index(b"\0", name_at)] == wanted.encode():
            return cubin[section[4] : section[4] + section[5]]
    raise ValueError(f"the machine code has no section {wanted}, which says where arguments lie")


def _attributes(section: bytes) -> Iterator[tuple[int, bytes]]:
    place = 0
    while place < len(section):
        form, attribute, value = ATTRIBUTE.unpack_from(section, place)
        place += ATTRIBUTE.size
        nbytes = value if form == WITH_BYTES else 0
        yield attribute, section[place : place + nbytes]
        place += nbytes
