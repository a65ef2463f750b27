"""What servers say of files."""

from __future__ import annotations

from typing import NamedTuple


class Facts(NamedTuple):
    """What a server says of a file."""

    nbytes: int
    modified_ns: int
    """When it was last written to, in nanoseconds since the epoch, to the second; 0 where the server does not say."""
    tag: str
    """What changes with its contents: an ETag without quotation marks, a version or a generation; empty where the
    server gives none."""


def same(one: Facts, other: Facts) -> bool:
    """Whether a file is as it was, as far as its server can tell."""
    if one.nbytes != other.nbytes:
        return False
    if one.tag and other.tag:
        return one.tag == other.tag
    return not (one.modified_ns and other.modified_ns) or one.modified_ns == other.modified_ns
