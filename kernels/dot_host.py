"""The dot product on the CPU, the twin of ``tilewright.kernels.dot``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numba import njit

from tilewright.kernels.host_loops import cpu_threads, kept
from tilewright.kernels.launch import ceil_div

PIECE = 8192
"""Elements multiplied by one BLAS call: few enough that BLAS stays in its caller's thread (its own threads
would make the order of the sum depend on their number), many enough to hide the call."""
PIECES_PER_THREAD = 64
"""Below this many pieces a thread, starting it costs more than it saves."""


@kept
@njit(nogil=True)
def _sum_64(x, y):  # type: ignore[no-untyped-def]
    """Sum of products modulo 2^64: its low bits are the sum in every narrower type."""
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


def dot_host(x: Any, y: Any, result: np.dtype, conjugate: bool) -> Any:
    """Sum of (conjugated) x[i] * y[i] as a NumPy scalar of dtype ``result``; any strides, equal lengths.

    Each piece of `PIECE` elements is summed by BLAS in the result's type (float16: in float32), and the
    pieces in double precision in ascending order: the same bits for any number of threads. Integers wrap.
    """
    pieces = ceil_div(len(x), PIECE)
    if result.kind in "iu":
        partials = np.zeros(pieces, np.uint64)
    else:
        partials = np.zeros(pieces, np.complex128 if result.kind == "c" else np.float64)
    work = np.dtype(np.float32) if result == np.float16 else result
    multiply = np.vdot if conjugate else np.dot
    add_integers = _sum_64 if result.itemsize == 8 else _sum_32

    def count(first: int, last: int) -> None:
        if result.kind == "f" and x.dtype == y.dtype == work:
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
            else:
                partials[piece] = multiply(x[part].astype(work, copy=False), y[part].astype(work, copy=False))

    threads = max(1, min(cpu_threads(), pieces // PIECES_PER_THREAD))
    if threads == 1:
        count(0, pieces)
    else:
        bounds = [pieces * thread // threads for thread in range(threads + 1)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(count, bounds[:-1], bounds[1:]))
    with np.errstate(over="ignore", invalid="ignore"):  # infinity and NaN are answers, as IEEE 754 has them
        return partials.sum(keepdims=True).astype(result)[0]
