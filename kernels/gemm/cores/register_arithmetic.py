"""How elements of each dtype are held in a thread's registers, multiplied, added up and stored.

Every function here is a device function over ``cuda.local.array``s whose indices are constants in the end.
The arithmetic is chosen by dtype: one fused multiply-add an element, or four for complex numbers.

64-bit integers take `wide_integer`'s three multiplications an element: of ``total + left * right`` the compiler would
make additions as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numba import cuda

from tilewright.kernels.gemm.cores.warp_tiling import Tiling
from tilewright.kernels.gemm.exact import wide_integer


@dataclass(frozen=True)
class Element:
    """The register type of a dtype, in fragments of A and B and in totals of C."""

    dtype: np.dtype
    register: Any
    parts: int
    """Registers an element: two for a complex number."""
    by_halves: bool = False
    """Whether a 64-bit integer's products of low by high halves are added up separately (`wide_integer`)."""

    @property
    def number(self) -> Any:
        return numba.from_dtype(self.dtype)


def element_of(dtype: np.dtype) -> Element:
    if dtype == np.complex64:
        return Element(dtype, numba.float32, 2)
    return Element(dtype, numba.from_dtype(dtype), 1, dtype == np.uint64)


# Inlined before type inference: local arrays that cross a call would live in memory instead of registers.
inlined = cuda.jit(device=True, inline="always")


def real_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of the numbers that an element consists of: two if it is complex, else one, which is itself."""
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def product_adder(parts: int) -> Any:
    """``add(sums, total, a, left, b, right)``: ``sums[total] += a[left] * b[right]``, one element of ``parts`` numbers.

    Indices are those of an element's first number.
    """

    @inlined
    def add(sums, total, a, left, b, right):  # type: ignore[no-untyped-def]
        sums[total] += a[left] * b[right]
        if parts == 2:
            sums[total] -= a[left + 1] * b[right + 1]
            sums[total + 1] += a[left] * b[right + 1]
            sums[total + 1] += a[left + 1] * b[right]

    return add


def multiply_line(element: Element, tiling: Tiling) -> Any:
    """``multiply(line, total, high, left, right, half)``: the products of a row of a thread's tile, or of a column.

    ``total[i, j] += left[i] * right[j]`` with i (or j) fixed; ``high`` is for `wide_integer` alone. ``half`` says
    which half of the fragment arrays holds this step of k. Lines are walked to and fro: where the walk turns, an
    operand is read again at once, from the register file's reuse cache.
    """
    register, thread_m, thread_n = element.register, tiling.thread_m, tiling.thread_n
    by_columns = tiling.by_columns
    length = thread_m if by_columns else thread_n

    @cuda.jit(device=True, inline="always")
    def multiply(line: Any, total: Any, high: Any, left: Any, right: Any, half: Any) -> None:
        for step in range(length):
            along = step if line % 2 == 0 else length - 1 - step
            i, j = (along, line) if by_columns else (line, along)
            t, x, y = i * thread_n + j, half * thread_m + i, half * thread_n + j
            # Narrowed at once: Numba would widen 32-bit integers to 64.
            total[t] = register(total[t] + left[x] * right[y])

    @cuda.jit(device=True, inline="always")
    def multiply_complex(line: Any, total: Any, high: Any, left: Any, right: Any, half: Any) -> None:
        # Four fused operations an element; Numba's complex product would round in between and take six. The fixed
        # operand's first part is multiplied by the whole line, then its second part on the way back.
        for step in range(length):
            i, j = (step, line) if by_columns else (line, step)
            t, x, y = 2 * (i * thread_n + j), 2 * (half * thread_m + i), 2 * (half * thread_n + j)
            total[t] += left[x] * right[y]
            if by_columns:
                total[t + 1] += left[x + 1] * right[y]
            else:
                total[t + 1] += left[x] * right[y + 1]
        for step in range(length):
            back = length - 1 - step
            i, j = (back, line) if by_columns else (line, back)
            t, x, y = 2 * (i * thread_n + j), 2 * (half * thread_m + i), 2 * (half * thread_n + j)
            total[t] -= left[x + 1] * right[y + 1]
            if by_columns:
                total[t + 1] += left[x] * right[y + 1]
            else:
                total[t + 1] += left[x + 1] * right[y]

    multiply_halves, in_another_register = wide_integer.multiply_add, wide_integer.in_another_register

    @cuda.jit(device=True, inline="always")
    def multiply_wide(line: Any, total: Any, high: Any, left: Any, right: Any, half: Any) -> None:
        x = right[half * thread_n + line] if by_columns else left[half * thread_m + line]
        x0 = in_another_register(x)
        for step in range(length):
            along = step if line % 2 == 0 else length - 1 - step
            i, j = (along, line) if by_columns else (line, along)
            y = left[half * thread_m + i] if by_columns else right[half * thread_n + j]
            multiply_halves(total, high, i * thread_n + j, x, x0, y)

    if element.by_halves:
        return multiply_wide
    return multiply_complex if element.parts == 2 else multiply


def store_element(element: Element) -> Any:
    """``store(c, row, column, total, t, accumulate)``: ``c[row, column] (+)= total[t...]``, one element."""
    number, register = element.number, element.register

    @cuda.jit(device=True, inline="always")
    def store(c: Any, row: Any, column: Any, total: Any, t: Any, accumulate: Any) -> None:
        value = total[t]
        if accumulate:
            value = register(c[row, column] + value)
        c[row, column] = value

    @cuda.jit(device=True, inline="always")
    def store_complex(c: Any, row: Any, column: Any, total: Any, t: Any, accumulate: Any) -> None:
        value = number(complex(total[t], total[t + 1]))
        if accumulate:
            value = number(c[row, column] + value)
        c[row, column] = value

    return store_complex if element.parts == 2 else store
