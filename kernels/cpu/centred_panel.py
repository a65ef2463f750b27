"""What a panel of centred bytes takes (`centred_bytes.py`): sizes alone, which a plan has without Numba."""

from __future__ import annotations

from tilewright.kernels.numbers import ceil_div, round_up

SIDE = 48
"""Lines of a block: the columns of a tile of the product of bytes."""
GROUP = 4
"""Steps of k that an instruction multiplies and adds."""
PIECE = 2560
"""The longest k that is multiplied at once: blocks stay in a cache, no 32-bit sum wraps, and places along k fit 16
bits."""
ALIGNMENT = 64
"""Of each part of a panel: a cache line."""

ELEMENT_NBYTES = 5
"""The least that an element takes, in whole bytes."""

MOST_APART = 127
"""What a number may differ by from the integer that is nearest to what it is centred by: then it is a signed byte."""


def pieces_of(k: int) -> list[slice]:
    """The steps of each piece: about as many in all of them.

    >>> pieces_of(5001)
    [slice(0, 2500, None), slice(2500, 5001, None)]
    """
    count = ceil_div(k, PIECE)
    return [slice(k * i // count, k * (i + 1) // count) for i in range(count)]


def parts_nbytes(lines: int, k: int) -> tuple[int, ...]:
    """Bytes of each part of a piece of k steps: ``left``, ``right``, ``values``, ``masks`` and ``gone`` of
    `centred_bytes.Packed`."""
    elements = round_up(lines, SIDE) * round_up(k, GROUP)
    return elements, elements, elements, 8 * elements // SIDE, 2 * elements


def packed_nbytes(lines: int, k: int) -> int:
    """What packing a panel takes, besides a few numbers a line and step.

    >>> packed_nbytes(48, 4)
    1088
    """
    parts = (size for steps in pieces_of(k) for size in parts_nbytes(lines, steps.stop - steps.start))
    return ALIGNMENT + sum(round_up(size, ALIGNMENT) for size in parts)
