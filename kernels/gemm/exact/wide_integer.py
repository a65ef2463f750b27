"""64-bit integers by three multiply-adds for each product of two elements, and no separate additions.

With x = x1 2^32 + x0 and y = y1 2^32 + y0, modulo 2^64 a product is x0 y0 + 2^32 (x0 y1 + x1 y0): one multiply-add with
a result of 64 bits, two of 32. The middle terms are added up over all of k in a register of their own, and join the
rest at the end.

On Hopper one unit of a multiprocessor multiplies integers, 64 a clock, and a result of 64 bits counts twice: four
turns an element, at most 16 elements a clock. Left to itself the compiler adds two products of 64 bits to each other
first, and then to a sum, by additions that cost as much again; `integers.multiply_add_wide` keeps it from that.

Winograd's inner product ("A new algorithm for inner product", 1968) does without one of the multiplications:
sum(x0 y1 + x1 y0) = sum((x0 + y0) (x1 + y1)) - sum(x0 x1) - sum(y0 y1). It is no faster: its two additions run on
another unit, but registers cannot be read and written fast enough for the five instructions (docs/experiments.md).
"""

from __future__ import annotations

from typing import Any

import numba
from numba import cuda

from tilewright.kernels.ptx import integers


@cuda.jit(device=True, inline="always")
def in_another_register(x: Any) -> Any:
    """The low half of x (uint64) in a register of the compiler's choice.

    Low halves come from memory in even registers, sums of 64 bits begin at even ones, and of each kind, even and odd,
    an instruction reads two registers at a time: without this, every wide multiply-add would wait a cycle. A zero that
    the compiler cannot know is added, or it would leave the number where it is.
    """
    zero = numba.uint32(cuda.blockIdx.y)  # the grid has no second axis
    return numba.uint32(numba.uint32(x) + zero)


@cuda.jit(device=True, inline="always")
def multiply_add(total: Any, high: Any, t: Any, x: Any, x0: Any, y: Any) -> None:
    """``total[t] += x0 y0`` (uint64), ``high[t] += x0 y1 + x1 y0`` (uint32).

    ``x0`` is a copy of x's low half, `in_another_register`; one copy serves a line of products.
    """
    y0, y1 = numba.uint32(y), numba.uint32(y >> numba.uint64(32))
    total[t] = integers.multiply_add_wide(x0, y0, total[t])
    high[t] = integers.multiply_add_low(numba.uint32(x >> numba.uint64(32)), y0, high[t])
    high[t] = integers.multiply_add_low(x0, y1, high[t])


@cuda.jit(device=True, inline="always")
def join(total: Any, high: Any, count: Any) -> None:
    """``total[t] += 2^32 high[t]`` for the first ``count``."""
    for t in range(count):
        total[t] = numba.uint64(total[t] + (numba.uint64(high[t]) << numba.uint64(32)))
