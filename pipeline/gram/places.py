"""Where in a matrix something lies that is refused: by its row and column, and by the coordinates of these."""

from __future__ import annotations

import numpy as np

from tilewright.kernels.numbers import ceil_div
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.gram.options import Missing, axis_of, other
from tilewright.pipeline.store.arrays import read_unit
from tilewright.pipeline.store.labels.alignment import Along, labels_at
from tilewright.pipeline.store.region import StoredArray, base_of
from tilewright.pipeline.store.region_read import read_region
from tilewright.pipeline.store.sources.dasks import pending_of

MOST_READ_NBYTES = 2**30
"""Of the chunks that are decoded to find an element of a line: beyond that nobody waits for a message."""


def line_told(array: StoredArray, side: str, line: int) -> str:
    """One of the rows, or columns, with its coordinates."""
    found = labels_at(Along("", array, axis_of(side)), line)
    return f"{side[:-1]} {line}" + (f" ({found})" if found else "")


def element_told(array: StoredArray, side: str, line: int, missing: Missing) -> str:
    """A clause about the first element of a line that is not finite, and not missing; empty where there is none, or it
    would take long to find."""
    axis = axis_of(side)
    length, unit = int(array.shape[1 - axis]), read_unit(array)
    step = max(1, min(unit[1 - axis], length))
    decoded = ceil_div(length, step) * step * unit[axis] * array.dtype.itemsize
    if decoded > MOST_READ_NBYTES or pending_of(base_of(array)) is not None:
        return ""
    for start in range(0, length, step):
        across = slice(start, min(start + step, length))
        region = (across, slice(line, line + 1)) if axis else (slice(line, line + 1), across)
        try:
            numbers = read_region(array, region).ravel()
        except (StoreError, OSError):
            return ""
        bad = ~np.isfinite(numbers)
        if missing == "nan":
            bad &= ~np.isnan(numbers)
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            number = "NaN" if np.isnan(numbers[at]) else str(numbers[at])
            return f", with {number} in {line_told(array, other(side), start + at)}"
    return ""
