"""How chunks are encoded, as far as a GPU may decode them."""

from __future__ import annotations

from typing import NamedTuple

from tilewright.kernels.decoding.numbers import Numbers

RAW, ZSTD, LZ4, BLOSC = range(4)
"""How a chunk is encoded, but for checksums behind it."""
FORMS = {"zstd": ZSTD, "lz4": LZ4, "blosc": BLOSC}
"""By numcodecs' names."""


class Coding(NamedTuple):
    """How all chunks of an array are encoded, where a GPU may decode them."""

    form: int
    """RAW, ZSTD, LZ4 or BLOSC."""
    suffix: bool
    """Whether a CRC32C stands behind the bytes of each."""
    numbers: Numbers
    """What elements consist of."""
    by_columns: bool
    """Whether a chunk's elements lie column by column."""
