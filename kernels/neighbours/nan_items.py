"""Which items hold a NaN: they have no neighbours."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.cpu.loops import blocks

BLOCK_NBYTES = 2**20
"""Of items at a time: what is made of them stays in the cache."""
INFINITIES = {np.dtype(np.float16): 0x7C00, BFLOAT16: 0x7F80}
"""The bits of infinity; those of a NaN are larger, without the sign. NumPy's own look at 16-bit floats takes 2.7 ns a
number."""


def items_with_nan(items: np.ndarray, threads: int = 1) -> np.ndarray:
    """Of each item, whether it holds a NaN: (items,), bool.

    items: (items, elements), of any dtype and layout; only floats, bfloat16 among them, have NaN.
    """
    count, elements = items.shape
    found = np.zeros(count, np.bool_)
    dtype = items.dtype.newbyteorder("=")
    infinity = INFINITIES.get(dtype)
    if not items.size or (infinity is None and dtype.kind != "f"):
        return found

    def look(rows: slice) -> None:
        part = np.asarray(items[rows], dtype)
        if infinity is None:
            np.isnan(part).any(1, out=found[rows])
        else:
            bits = part.view(np.uint16) & np.uint16(0x7FFF)
            np.greater(bits.max(1), infinity, out=found[rows])

    longest = max(1, BLOCK_NBYTES // (elements * dtype.itemsize))
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(look, blocks(count, longest)):
            pass
    return found
