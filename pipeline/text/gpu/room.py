"""How large chunks of lines are, and which pieces may come by them: arithmetic that a plan needs too, where there is no
GPU."""

from __future__ import annotations

from tilewright.pipeline.text.corpus import Piece
from tilewright.pipeline.text.formats.listing import TEXT

TEXT_STEP_NBYTES = 32 * 2**20
"""Memory for texts is allocated in multiples of this, so that a piece can reuse the memory of one of nearly the same
size."""
LEAST_NBYTES = 2**20
"""Of files that are shorter on average, opening them one by one to look at their first bytes would take longest."""
MOST_LINE_NBYTES = 2**22
"""A longer line would take longer than all others of its chunk: one thread or a few go through it byte after byte."""
CHUNK_NBYTES = 2**27 - MOST_LINE_NBYTES - 2**16
"""Text that is brought and worked on at once. On an H100 it takes 3 ms to come: of smaller ones the interpreter would
have too many to deal with. What they take of the device's memory grows by powers of two, so they stay below one, though
they end behind a line, and some bytes stand between files and behind all."""
CHUNKS = 6
"""Chunks under way at the same time, of which some are brought while others are worked on: where one waits for what it
has to ask of the GPU, another keeps it at work."""
MOST_LINES = 2**22
"""Lines of a chunk: each takes eight bytes of the device's memory at least, and a chunk of newlines alone has 2**27."""


def are_large(piece: Piece) -> bool:
    """Whether the documents of a piece are large files on a disk that are not known to be anything but texts."""
    return (
        piece.is_local
        and 0 < LEAST_NBYTES * len(piece.documents) <= piece.nbytes
        and all(document.codec in (None, TEXT) for document in piece.documents)
    )
