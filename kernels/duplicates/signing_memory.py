"""How a GPU cuts the documents that it signs, and what it keeps of them: arithmetic that a plan needs too, where there
is no GPU."""

from __future__ import annotations

from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.numbers import ceil_div, power_of_two

THREADS = 4 if SIMULATOR else 256
SPAN = 8 if SIMULATOR else 32
"""Bytes of the documents that a thread takes."""
TILE = THREADS * SPAN
SLACK = 96
"""Bytes behind the last shingle that may be read: two words, and those of a block of SHA-1 that only pads."""
TABLES_NBYTES = 2**22
"""What the tables take by which letters are known and characters folded, with the permutations, at most."""
WORD_NBYTES, NUMBER_NBYTES = 4, 8


def signer_nbytes(
    nbytes: int, documents: int, *, unit: str, num_perm: int, bands: int, with_ends: bool = False
) -> int:
    """Memory of a `DeviceSigner` that signs so many documents, of so many bytes together, at a time, at most; beside
    that of the texts themselves. Of texts with malformed bytes, and of those that are longer once they are folded, it
    may take more.

    unit: ``word`` or ``character``. with_ends: whether it is told where each document ends.
    """
    tiles = ceil_div(nbytes, TILE)
    # A word has a byte behind it, or the document's end: a blank takes its place.
    text, units = (
        (nbytes + documents, ceil_div(nbytes + documents, 2)) if unit == "word" else (nbytes, nbytes)
    )
    numbers = (documents + 1, documents if with_ends else 0, documents + 1, documents * bands, tiles + 1)
    words = (documents * num_perm, tiles * THREADS, ceil_div(text + SLACK, WORD_NBYTES), units + 1)
    return (
        TABLES_NBYTES
        + power_of_two(documents)
        + NUMBER_NBYTES * sum(power_of_two(each) for each in numbers if each)
        + WORD_NBYTES * sum(power_of_two(each) for each in words)
    )
