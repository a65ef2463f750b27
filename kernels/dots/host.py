"""The dot product on the CPU, the twin of ``tilewright.kernels.dot``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numba import njit, types

from tilewright.kernels.cpu.loops import cpu_threads, kept
from tilewright.kernels.numbers import ceil_div

PIECE = 8192
"""Elements of a partial sum, and of a BLAS call: few enough that BLAS stays in its caller's thread (its own threads
would make the order of the sum depend on their number), many enough to hide the call."""
PIECES_PER_THREAD = 64
"""Below this many pieces a thread, starting it costs more than it saves."""


@kept
@njit(nogil=True)
def _sum_64(x, y):  # type: ignore[no-untyped-def]
    """Sum of products modulo 2^64: its low bits are the sum in every narrower type. Elements of up to 32 bits take no
    longer than in `_sum_32`."""
    total = np.uint64(0)
    for i in range(x.shape[0]):
        total += np.uint64(x[i]) * np.uint64(y[i])
    return total


@kept
@njit(nogil=True)
def _sum_32(x, y):  # type: ignore[no-untyped-def]
    """The same modulo 2^32: twice the lanes, and a multiplication that the processor has."""
    total = np.uint32(0)
    for i in range(x.shape[0]):
        total += np.uint32(x[i]) * np.uint32(y[i])
    return total


def _real_sums(x: Any, y: Any, partials: Any) -> None:
    """The sum of each `PIECE` products of float32, in float64."""
    for piece in range(partials.shape[0]):
        left, right = x[piece * PIECE : (piece + 1) * PIECE], y[piece * PIECE : (piece + 1) * PIECE]
        total = 0.0
        for i in range(left.shape[0]):
            total += np.float64(left[i]) * np.float64(right[i])
        partials[piece] = total


def _complex_sums(x: Any, y: Any, partials: Any) -> None:
    """The same of complex64, seen as pairs of float32: for each piece, the sums of the products of both real parts,
    both imaginary parts, real and imaginary, imaginary and real."""
    for piece in range(partials.shape[0]):
        left, right = (
            x[2 * piece * PIECE : 2 * (piece + 1) * PIECE],
            y[2 * piece * PIECE : 2 * (piece + 1) * PIECE],
        )
        both_real, both_imaginary, imaginary_right, imaginary_left = 0.0, 0.0, 0.0, 0.0
        for i in range(left.shape[0] // 2):
            a, b = np.float64(left[2 * i]), np.float64(left[2 * i + 1])
            c, d = np.float64(right[2 * i]), np.float64(right[2 * i + 1])
            both_real += a * c
            both_imaginary += b * d
            imaginary_right += a * d
            imaginary_left += b * c
        partials[piece, 0], partials[piece, 1] = both_real, both_imaginary
        partials[piece, 2], partials[piece, 3] = imaginary_right, imaginary_left


@functools.cache
def _loop(function: Callable[..., None], dimensions: int) -> Any:
    """The loop for contiguous vectors, aligned or not; it adds up in vector registers."""
    source = types.Array(types.float32, 1, "C", readonly=True, aligned=False)
    loop = njit(nogil=True, fastmath={"reassoc", "contract", "nsz"})(function)
    return kept(loop, (source, source, types.Array(types.float64, dimensions, "C")))


def _add_floats(x: Any, y: Any, conjugate: bool, partials: Any) -> None:
    """Sums of pieces of contiguous vectors, both float32 or both complex64, into float64 or complex128."""
    if x.dtype == np.float32:
        _loop(_real_sums, 1)(x, y, partials)
        return
    parts = np.empty((len(partials), 4))
    _loop(_complex_sums, 2)(x.view(np.float32), y.view(np.float32), parts)
    sign = 1 if conjugate else -1
    partials.real = parts[:, 0] + sign * parts[:, 1]
    partials.imag = parts[:, 2] - sign * parts[:, 3]


@kept
@njit(nogil=True)
def _extremes(x):  # type: ignore[no-untyped-def]
    low, high = x[0], x[0]
    for i in range(x.shape[0]):
        low, high = min(low, x[i]), max(high, x[i])
    return low, high


def largest_of(x: np.ndarray) -> int:
    """The largest absolute value in a vector of integers; 0 if it is empty. Other threads run meanwhile."""
    if not len(x):
        return 0
    low, high = _extremes(x)
    return max(-int(low), int(high))


def dot_host(x: Any, y: Any, result: np.dtype, conjugate: bool) -> Any:
    """Sum of (conjugated) x[i] * y[i] as a NumPy scalar of dtype ``result``; any strides, equal lengths.

    Floats are added up in double precision, as on a GPU, and rounded once: each piece of `PIECE` elements (of float64
    and complex128 by BLAS), and then the pieces in ascending order: the same bits for any number of threads. Integers
    wrap modulo 2^bits of ``result``, whatever their own bits.
    """
    pieces = ceil_div(len(x), PIECE)
    if result.kind in "iu":
        partials = np.zeros(pieces, np.uint64)
    else:
        partials = np.zeros(pieces, np.complex128 if result.kind == "c" else np.float64)
    # The type of the factors, which may be wider than the result's: it is rounded to at the end alone.
    work = np.result_type(x.dtype, y.dtype, result)
    work = np.dtype(np.float32) if work == np.float16 else work
    if x.dtype == y.dtype and x.dtype.kind == result.kind and x.dtype in (np.float32, np.complex64):
        work = x.dtype  # whose loops multiply in double precision, whatever the result's type
    narrow = work in (np.float32, np.complex64)
    multiply = np.vdot if conjugate else np.dot
    add_integers = _sum_64 if result.itemsize == 8 else _sum_32

    def count(first: int, last: int) -> None:
        together = x.dtype == y.dtype == work
        span = slice(first * PIECE, min(last * PIECE, len(x)))
        if narrow and together and x.flags.c_contiguous and y.flags.c_contiguous:
            with np.errstate(invalid="ignore"):
                _add_floats(x[span], y[span], conjugate, partials[first:last])
            return
        if result.kind == "f" and together and not narrow:
            # Whole pieces as rows: one call for all of them, which spends its time in BLAS and not in Python.
            whole = min(last, len(x) // PIECE)
            span, shape = slice(first * PIECE, whole * PIECE), (whole - first, PIECE)
            left, right = x[span].reshape(shape), y[span].reshape(shape)
            with np.errstate(over="ignore", invalid="ignore"):  # np.vdot does not warn either
                partials[first:whole] = np.matmul(left[:, None, :], right[:, :, None])[:, 0, 0]
            first = whole
        for piece in range(first, last):
            part = slice(piece * PIECE, (piece + 1) * PIECE)
            if result.kind in "iu":
                partials[piece] = add_integers(x[part], y[part])
            elif narrow:
                left, right = (np.ascontiguousarray(vector[part], work) for vector in (x, y))
                with np.errstate(invalid="ignore"):
                    _add_floats(left, right, conjugate, partials[piece : piece + 1])
            else:
                partials[piece] = multiply(x[part].astype(work, copy=False), y[part].astype(work, copy=False))

    if narrow:  # before threads would each compile it
        _loop(*((_real_sums, 1) if result.kind == "f" else (_complex_sums, 2)))
    threads = max(1, min(cpu_threads(), pieces // PIECES_PER_THREAD))
    if threads == 1:
        count(0, pieces)
    else:
        bounds = [pieces * thread // threads for thread in range(threads + 1)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(count, bounds[:-1], bounds[1:]))
    with np.errstate(over="ignore", invalid="ignore"):  # infinity and NaN are answers, as IEEE 754 has them
        return partials.sum(keepdims=True).astype(result)[0]
