"""Transforming a panel on the CPU, before it is multiplied: the twin of `transform_device.py`.

One pass over memory, on many threads, without the interpreter's lock. Each operation is rounded by itself, in the order
of `pipeline/plan/transform.py`: Numba compiles without fast mathematics, so nothing is contracted or reordered.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from tilewright.kernels.cpu.loops import compiled, on_threads
from tilewright.kernels.deferred import numba

HALF_NBYTES = 2**18
"""float16, which Numba's loops do not know, becomes float32 in pieces of so many bytes, which stay in a cache."""

_loop_lock = threading.Lock()
"""Without it, threads that start together would each compile, or load, a loop of their own."""

EVERY, BUT_EQUAL, BUT_NAN = 0, 1, 2
"""Which elements are there: all, all but those that equal a number, all but NaN."""

VALUES, SQUARES, PRESENCE = 0, 1, 2
"""What is written of real numbers: themselves, their squares, or 1."""


class Changes(NamedTuple):
    """What becomes of a block: ``(x - row_offsets[i] - column_offsets[j] - offset) * (row_factors[i] *
    column_factors[j])``, or 0 where an element is missing. Vectors are of the target's dtype, as long as the block's
    sides; None: left out."""

    row_offsets: np.ndarray | None
    column_offsets: np.ndarray | None
    offset: float
    row_factors: np.ndarray | None
    column_factors: np.ndarray | None
    there: int
    """`EVERY`, `BUT_EQUAL` or `BUT_NAN`."""
    missing: Any
    """Of the source's dtype: what is missing, with `BUT_EQUAL`."""
    conjugate: bool
    form: int = VALUES
    """`VALUES`; of real numbers also `SQUARES` or `PRESENCE`. What is missing is 0 in all of them."""


def transform(
    source: np.ndarray, target: np.ndarray, changes: Changes, pool: ThreadPoolExecutor | None = None
) -> None:
    """Write what becomes of a block, on the threads of a pool, or on this one.

    source: rows × columns, C-contiguous, any dtype. target: the same of float32, float64, complex64 or complex128,
    written; they do not overlap. An empty side does nothing.
    """
    rows, columns = source.shape
    if not rows or not columns:
        return
    dtype = target.dtype
    zeros, ones = np.zeros(max(rows, columns), dtype), np.ones(max(rows, columns), dtype)
    # x - 0 and x * 1 are x to the bit, so real numbers need no loops of their own for what is left out. Of complex ones
    # a product with 1 is formed of parts, and would not be.
    down, across = (zeros[:rows], ones[:rows]), (zeros[:columns], ones[:columns])
    if dtype.kind == "c":
        function: Any = _transform_complex
        factors = 1 * (changes.row_factors is not None) + 2 * (changes.column_factors is not None)
        last: tuple[Any, ...] = (factors, changes.conjugate)
    else:
        function, last = _transform_real, (changes.form,)
    read = np.dtype(np.float32) if source.dtype == np.float16 else source.dtype
    with _loop_lock:
        loop = compiled(function, *_types(read, dtype))
    missing = read.type(changes.missing if changes.there == BUT_EQUAL else 0)

    def work(start: int, stop: int) -> None:
        step = max(1, HALF_NBYTES // (columns * source.itemsize)) if read != source.dtype else stop - start
        for first in range(start, stop, step):
            part = slice(first, min(first + step, stop))
            loop(
                source[part].astype(read, copy=False),
                _or(changes.row_offsets, down[0])[part],
                _or(changes.column_offsets, across[0]),
                dtype.type(changes.offset),
                _or(changes.row_factors, down[1])[part],
                _or(changes.column_factors, across[1]),
                changes.there,
                missing,
                *last,
                target[part],
            )

    if pool is None:
        work(0, rows)
    else:
        on_threads(pool, work, rows)


def _or(vector: np.ndarray | None, neutral: np.ndarray) -> np.ndarray:
    return neutral if vector is None else vector


def _types(read: np.dtype, dtype: np.dtype) -> tuple[Any, ...]:
    types = numba.types
    element = numba.from_dtype(dtype)
    vector = types.Array(element, 1, "C", readonly=True)
    return (
        types.Array(numba.from_dtype(read), 2, "C", readonly=True),
        vector,
        vector,
        element,
        vector,
        vector,
        types.int64,
        numba.from_dtype(read),
        *((types.int64, types.boolean) if dtype.kind == "c" else (types.int64,)),
        types.Array(element, 2, "C"),
    )


def _transform_real(
    source: Any,
    row_offsets: Any,
    column_offsets: Any,
    offset: Any,
    row_factors: Any,
    column_factors: Any,
    there: Any,
    missing: Any,
    form: Any,
    target: Any,
) -> None:
    number = target.dtype.type
    zero, one = number(0), number(1)
    for i in range(source.shape[0]):
        row_offset, row_factor = row_offsets[i], row_factors[i]
        if form == 2:
            for j in range(source.shape[1]):
                element = source[i, j]
                gone = (there == 1 and element == missing) or (there == 2 and element != element)
                target[i, j] = zero if gone else one
        elif there == 0:
            for j in range(source.shape[1]):
                value = ((number(source[i, j]) - row_offset) - column_offsets[j]) - offset
                target[i, j] = value * (row_factor * column_factors[j])
        elif there == 1:
            for j in range(source.shape[1]):
                value = ((number(source[i, j]) - row_offset) - column_offsets[j]) - offset
                value = value * (row_factor * column_factors[j])
                target[i, j] = zero if source[i, j] == missing else value
        else:
            for j in range(source.shape[1]):
                value = ((number(source[i, j]) - row_offset) - column_offsets[j]) - offset
                value = value * (row_factor * column_factors[j])
                target[i, j] = zero if source[i, j] != source[i, j] else value
        if form == 1:  # of a line that is in a cache
            for j in range(source.shape[1]):
                target[i, j] = target[i, j] * target[i, j]


def _transform_complex(
    source: Any,
    row_offsets: Any,
    column_offsets: Any,
    offset: Any,
    row_factors: Any,
    column_factors: Any,
    there: Any,
    missing: Any,
    factors: Any,
    conjugate: Any,
    target: Any,
) -> None:
    number = target.dtype.type
    zero = number(0)
    for i in range(source.shape[0]):
        down, scale_down = row_offsets[i], row_factors[i]
        for j in range(source.shape[1]):
            element = source[i, j]
            value, across = number(element), column_offsets[j]
            real = ((value.real - down.real) - across.real) - offset.real
            imaginary = ((value.imag - down.imag) - across.imag) - offset.imag
            if factors != 0:
                scale = column_factors[j]
                if factors == 3:
                    scale = complex(
                        scale_down.real * scale.real - scale_down.imag * scale.imag,
                        scale_down.real * scale.imag + scale_down.imag * scale.real,
                    )
                elif factors == 1:
                    scale = scale_down
                real, imaginary = (
                    real * scale.real - imaginary * scale.imag,
                    real * scale.imag + imaginary * scale.real,
                )
            if (there == 1 and element == missing) or (there == 2 and element != element):
                real, imaginary = zero.real, zero.imag
            if conjugate:
                imaginary = -imaginary
            target[i, j] = complex(real, imaginary)
