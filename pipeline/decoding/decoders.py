"""Which of a batch's blocks nvCOMP decodes on the GPU, and which our own kernels."""

from __future__ import annotations

import numpy as np

from tilewright.pipeline.decoding.coding import LZ4, ZSTD, Coding
from tilewright.pipeline.plan.decoding import CHECKED, EVERYWHERE

FORMATS = {ZSTD: "zstd", LZ4: "lz4"}
"""What nvCOMP decodes, as `kernels.decoding.nvcomp` calls it, in the order in which a batch's tables have it."""

MOST_LITERAL_NBYTES = 2**23
"""The largest frame of literals alone that nvCOMP decodes. It takes a frame's blocks one after the other, our kernels
all at once: on an H100 it decodes random floats at 39 GB/s in chunks of 4 MiB, and as slowly as ours in those of 16."""
LITERAL_NBYTES = 64
"""Decoded bytes for each sequence from which on a frame counts as one of literals alone. Where there are more, our
kernels, which put a frame's sequences in their places one by one, are the slower at every size."""


def may_decode(nvcomp: int, coding: Coding) -> bool:
    """Whether nvCOMP may decode chunks that are encoded so. nvcomp: as a plan has it."""
    return nvcomp == EVERYWHERE or (nvcomp == CHECKED and coding.suffix)


def by_nvcomp(kinds: np.ndarray, rooms: np.ndarray, sequences: np.ndarray) -> np.ndarray:
    """Which blocks nvCOMP decodes of those that it may. kinds, rooms: of blocks, and the bytes that each decodes to.
    sequences: how many a frame has."""
    literal = sequences * LITERAL_NBYTES <= rooms
    chosen: np.ndarray = (kinds == LZ4) | ((kinds == ZSTD) & ~(literal & (rooms > MOST_LITERAL_NBYTES)))
    return chosen
