"""How many numbers a GPU keeps of spans of JSON lines: arithmetic that a plan needs too, where there is no GPU.

In one array, int64: how much of the texts' memory is in use, and how many texts begin and end with each byte; a row of
what is found of each span; and of each span the lines that are left to the cores, where they begin and end.
"""

from __future__ import annotations

from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.numbers import power_of_two

MOST_UNDECIDED = 4 if SIMULATOR else 2**12
"""Lines of a span that are left to the cores and listed; of more, their number is told."""
CURSOR_AND_ENDS = 1 + 2 * 256
ROW_LENGTH = 6


def listed(spans: int, place: int) -> int:
    """Where the lines of one of so many spans that are left to the cores are listed; with ``place`` = ``spans``, how
    many numbers there are."""
    return CURSOR_AND_ENDS + ROW_LENGTH * spans + 2 * MOST_UNDECIDED * place


def numbers_nbytes(spans: int) -> int:
    """Memory for the numbers of so many spans, which `Rooms` gives by powers of two."""
    return 8 * power_of_two(listed(spans, spans))
