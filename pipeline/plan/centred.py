"""Whether a CPU multiplies a centred matrix as bytes, as `kernels/cpu/centred_bytes.py` does."""

from __future__ import annotations

import numpy as np

from tilewright.kernels.cpu.centred_panel import MOST_APART
from tilewright.pipeline.plan.transform import Fused, Transform

MOST_MISSING = 1 / 10
"""The share of elements that are missing up to which bytes pay: each of these takes a multiply-add for each element of
the other side of C, and products of float32 take no notice of them."""


def multiplies_bytes(fused: Fused, stored: np.dtype, summed: int, elements: int, sums: np.dtype) -> bool:
    """Whether the product of a matrix by its own transpose, both transformed alike, is one of bytes.

    That follows from what was found of the whole matrix, so that all tiles of C are computed in one way. stored: of the
    matrix as it is stored. summed: its axis that is summed over. elements: how many it has. sums: what a tile is summed
    in.
    """
    transform = fused.transforms[0]
    if transform is None or transform.counted is None or fused.pairwise is not None:
        return False
    if stored not in (np.int8, np.uint8) or transform.dtype != np.float32 or sums != np.float32:
        return False
    centres = transform.row_offsets, transform.column_offsets
    others = transform.row_factors, transform.column_factors, centres[1 - summed]
    if transform.offset or any(vector is not None for vector in others):
        return False
    return transform.counted.missing <= MOST_MISSING * elements and _near(transform, centres[summed])


def _near(transform: Transform, centres: np.ndarray | None) -> bool:
    """Whether no number is too far from what it is centred by."""
    assert transform.counted is not None
    low, high = (0.0, 0.0) if centres is None or not len(centres) else (centres.min(), centres.max())
    least, most = transform.counted.least, transform.counted.most
    return bool(max(most - np.rint(low), np.rint(high) - least) <= MOST_APART)  # not so of NaN
