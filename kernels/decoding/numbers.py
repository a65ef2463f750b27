"""What the elements of stored chunks consist of, for a GPU that puts them in their places."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Numbers(NamedTuple):
    """What the elements of a matrix consist of."""

    unit: int
    """Bytes of a number: of a complex element's parts."""
    parts: int
    """Numbers of an element: 2 where it is complex."""
    swapped: bool
    """Whether a number's bytes are stored the highest first."""
    shuffled: bool
    """Whether chunks may be shuffled."""

    @classmethod
    def of(cls, dtype: np.dtype, *, shuffled: bool) -> Numbers:
        """Those of a dtype as it is stored."""
        parts = 2 if dtype.kind == "c" else 1
        return cls(dtype.itemsize // parts, parts, not dtype.isnative, shuffled)
