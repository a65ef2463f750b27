"""The columns of the tables that tell kernels what to do to decoded chunks; nothing of CUDA is imported here."""

from __future__ import annotations

FROM, TO, NBYTES = range(3)
"""Columns of the table of blocks that are moved: offsets in the arrays, and the length, in bytes."""
COPY_WORDS = 3

(
    SOURCE,
    CHUNK_NBYTES,
    TOP,
    LEFT,
    HEIGHT,
    WIDTH,
    ROW_STEP,
    COLUMN_STEP,
    TARGET,
    PITCH,
    SHUFFLE,
    ELEMENT,
    BLOCK_NBYTES,
) = range(13)
"""Columns of the table of places: where a decoded chunk begins, in bytes, and its length; the wanted rectangle, in
elements; from one row to the next in the chunk, and from one column to the next, in elements; where the rectangle goes,
and from one row to the next there, in numbers of the matrix; and how Blosc shuffled it."""
PLACE_WORDS = 13

NO_SHUFFLE, BYTES, BITS = range(3)

BEGIN, LENGTH = range(2)
"""Columns of the table of stretches that have checksums: where each begins, a multiple of 8, and its length, in
bytes."""
SUM_WORDS = 2
