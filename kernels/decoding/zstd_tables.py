"""The columns of the tables that tell `zstd.py` what to decode; Numba is not imported here."""

from __future__ import annotations

SOURCE, NBYTES, KIND, TREE, LENGTHS, OFFSETS, MATCHES, LITERALS, LITERAL_NBYTES, SEQUENCES, COUNT = range(11)
"""Columns of the table of blocks: where a block's content lies in the stored bytes, and its length; RAW, RUN or
ENCODED; the number of the block that defines its tree, and those that define its tables of literals' lengths, offsets
and matches' lengths, or -1; where its literals go in the memory for those, and how many there are, or what it decodes
to where it is not encoded; where its sequences go, in words, and how many there are."""
BLOCK_WORDS = 11
RAW, RUN, ENCODED = range(3)

FIRST, BLOCKS, TARGET, ROOM = range(4)
"""Columns of the table of frames: its first block, how many it has, where it is decoded to, and what it says it holds,
in bytes."""
FRAME_WORDS = 4

GOOD, BAD = 0, 1

LENGTH_BITS = 18
"""Of a literals' or match's length in a word that holds a sequence; the offset is above both."""
