"""How long a GPU's lists of neighbours are, and when rows are compared among themselves once. Pure arithmetic."""

from __future__ import annotations

import math

FEW, GROWTH_OF_FEW, GROWTH = 16, 2, 1
"""Columns of a span for each that was seen before, of rows of which few are kept, and of others: with more, bounds lag
behind and let more through; with fewer, lists are merged more often."""
LEAST_CAPACITY = 256
DEVIATIONS = 12
"""By so many standard deviations a list is longer than what a span is expected to let through."""
WORD_NBYTES = 8
"""Of a place in a list."""
LEAST_MUTUAL_ROWS = 1 << 15
"""With fewer rows the small launches cost more than the other half of the product."""
MOST_MUTUAL_KEPT = 128
"""Of more neighbours nothing was measured. For k = 10, 32, 64 and 100 on an H100 400,000 × 384 rows among themselves
took 185, 228, 290 and 341 ms each pair once, and 270, 339, 425 and 513 with all; 200,000 × 768 rows 77, 103, 128 and
169, and 126, 162, 199 and 232."""
MOST_MUTUAL_NBYTES = 4 * 2**30
"""Of the lists of all rows, which there are at a time where rows are compared among themselves."""


def capacity_of(kept: int) -> tuple[int, int]:
    """Places of a row's list, a power of two, and the growth of spans, for rows of which so many are kept.

    Of columns in no order, a span of g times as many as were seen lets g k through in the mean, in a negative binomial
    distribution with the variance g (g + 1) k.

    >>> capacity_of(10), capacity_of(100)
    ((256, 2), (512, 1))
    """
    growth = GROWTH_OF_FEW if kept <= FEW else GROWTH
    likely = growth * kept + DEVIATIONS * math.sqrt(growth * (growth + 1) * kept)
    return max(LEAST_CAPACITY, 1 << math.ceil(math.log2(likely))), growth


def kept_of(k: int, exclude_self: bool) -> int:
    """Words that are kept of a row of which k neighbours are wanted: a sample of rows may have the row itself, which is
    left out afterwards."""
    return k + int(exclude_self)


def mutual_nbytes(rows: int, kept: int) -> int:
    """What the lists of rows take that are compared among themselves, each pair once; 0 where they are not to be.

    >>> mutual_nbytes(400_000, 10), mutual_nbytes(400_000, 100), mutual_nbytes(20_000, 10)
    (819200000, 1638400000, 0)
    """
    nbytes = WORD_NBYTES * capacity_of(kept)[0] * rows
    pays = rows >= LEAST_MUTUAL_ROWS and kept <= MOST_MUTUAL_KEPT
    return nbytes if pays and nbytes <= MOST_MUTUAL_NBYTES else 0
