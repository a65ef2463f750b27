"""Which items hold a NaN: they have no neighbours."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.cpu.loops import blocks, compiled, read_only
from tilewright.kernels.deferred import numba

BLOCK_NBYTES = 2**23
"""Of items at a time, of which a thread looks at each in a loop outside the interpreter."""
INFINITIES = {
    np.dtype(np.float16): 0x7C00,
    BFLOAT16: 0x7F80,
    np.dtype(np.float32): 0x7F800000,
    np.dtype(np.float64): 0x7FF0000000000000,
}
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
    if not items.size or infinity is None:
        return found
    word = np.dtype(f"u{dtype.itemsize}")
    look = compiled(_look, *_types(word))

    def over(rows: slice) -> None:
        bits = np.ascontiguousarray(items[rows], dtype).view(word)
        look(read_only(bits), infinity, found[rows])

    longest = max(1, BLOCK_NBYTES // (elements * dtype.itemsize))
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(over, blocks(count, longest)):
            pass
    return found


def _types(word: np.dtype) -> tuple[Any, ...]:
    element = numba.from_dtype(word)
    bits = numba.types.Array(element, 2, "C", readonly=True)
    return bits, numba.types.int64, numba.types.Array(numba.types.boolean, 1, "C")


def _look(bits, infinity, found):  # type: ignore[no-untyped-def]
    """found: (rows,), whether a row of words has a NaN."""
    one, bound = bits.dtype.type(1), bits.dtype.type(infinity)  # of mixed signs Numba would compare floats
    for row in range(bits.shape[0]):
        largest = one - one
        for element in range(bits.shape[1]):
            # Without its sign, which is the first bit.
            largest = max(largest, bits.dtype.type(bits[row, element] << one))
        found[row] = largest >> one > bound
