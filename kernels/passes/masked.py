"""Counting stored numbers that stand for missing ones, on the CPU, in one pass and without a copy of the block.

The matrix and the dot product multiply such numbers as they are; what they say of them afterwards is counted while
panels stream past, on each of many threads. Comparisons of whole arrays would make a boolean for every element; these
loops take pieces that stay in the first-level cache, and release the interpreter's lock.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.kernels.cpu.loops import by_memory, compiled, source_type
from tilewright.kernels.deferred import numba

PIECE = 4096
"""Elements compared with one value after the other while they are in the first-level cache: 32 KiB at most, but for
complex128."""

CONVERTED = 2**18
"""Elements that are brought into a type that the loops know at once: few enough to stay in a cache, enough that a loop
over them takes longer than the interpreter's lock does to come back."""


@dataclass(frozen=True)
class Masks:
    """The numbers of an array that its readers take for missing: those equal to one of ``values``, and those outside
    the range from ``least`` to ``most``. NaN is none of them: it is missing without being looked up."""

    values: tuple[Any, ...] = ()
    """Python numbers, each exactly one of the array's dtype, none of them twice, none NaN, and none outside the
    range."""
    least: Any = None
    """The smallest valid number, of the array's dtype; None where all that are small enough for ``most`` are valid.
    None for complex arrays, as ``most``."""
    most: Any = None
    """The largest valid number. It is below ``least`` only where signed numbers are read as unsigned (CF's
    ``_Unsigned``, and the other way about): there the valid range begins at ``least``, goes up to the largest number of
    the dtype, on from its smallest, and ends at ``most``. Missing are those above ``most`` and below ``least``."""
    names: str = ""
    """For messages: the attributes that say so, with their values."""
    largest: float = field(default=0.0, compare=False)
    """The largest absolute value of all that is named as missing, also outside the range; not of what the range alone
    excludes."""


def count_masked(block: np.ndarray, masks: Masks) -> int:
    """How many elements of a block are missing, each counted once.

    block: of the dtype that the masks are of, any shape (also empty), any strides, any byte order. float16 and other
        orders of bytes than the processor's are converted a piece of `CONVERTED` elements at a time; no more memory is
        taken. Many threads may call at once.
    """
    if not masks.values and masks.least is None and masks.most is None:
        return 0
    dtype = block.dtype.newbyteorder("=")
    if dtype == np.float16:  # which Numba's loops do not know; all its numbers are also float32's
        dtype = np.dtype(np.float32)
    values = np.array(masks.values, dtype)
    arguments: tuple[Any, ...] = (values,)
    if dtype.kind != "c":
        lowest, highest = _ends(dtype)
        bounded = masks.least is not None or masks.most is not None
        least = dtype.type(lowest if masks.least is None else masks.least)
        most = dtype.type(highest if masks.most is None else masks.most)
        arguments = values, least, most, bounded
    flat = block.flags.c_contiguous or block.flags.f_contiguous
    if block.dtype == dtype and (flat or block.ndim in (1, 2)):
        rows = block.ravel(order="K") if flat else block
        rows = rows[None, :] if rows.ndim == 1 else by_memory(rows)
        return int(_loop(dtype, flat)(rows, *arguments))
    pieces = np.nditer(
        [block],
        flags=["external_loop", "buffered", "zerosize_ok"],
        op_dtypes=[dtype],
        order="K",
        buffersize=CONVERTED,
    )
    return sum(int(_loop(dtype, True)(_row(piece), *arguments)) for piece in pieces)


def _row(piece: Any) -> np.ndarray:
    return np.ascontiguousarray(piece)[None, :]  # a copy where nothing was converted


def _ends(dtype: np.dtype) -> tuple[Any, Any]:
    """Numbers that none of the dtype is below, and above."""
    if dtype.kind == "f":
        return -np.inf, np.inf
    return np.iinfo(dtype).min, np.iinfo(dtype).max


_loop_lock = threading.Lock()
"""Without it, threads that start together would each compile, or load, a loop of their own."""


def _loop(dtype: np.dtype, contiguous: bool) -> Any:
    with _loop_lock:
        return _compiled_loop(dtype, contiguous)


@functools.cache
def _compiled_loop(dtype: np.dtype, contiguous: bool) -> Any:
    """The loop over blocks of a dtype: of one contiguous row, which it reads in vector registers, or of any strides."""
    scalar = numba.from_dtype(dtype)
    block = source_type(dtype)
    if contiguous:
        block = numba.types.Array(scalar, 2, "C", readonly=True, aligned=False)
    values = numba.types.Array(scalar, 1, "C")
    if dtype.kind == "c":
        return compiled(_count_equal, block, values)
    return compiled(_count, block, values, scalar, scalar, numba.types.boolean)


def _count(block: Any, values: Any, least: Any, most: Any, bounded: Any) -> Any:
    """Elements outside the range, where it is ``bounded``, and those that equal one of the values, none of which is
    outside it. Pieces are counted in 32 bits: two to four times as many elements fit a register."""
    total = np.int64(0)
    for row in range(block.shape[0]):
        for left in range(0, block.shape[1], PIECE):
            piece = block[row, left : left + PIECE]
            found = np.int32(0)
            if bounded and least <= most:
                for i in range(piece.shape[0]):
                    found = np.int32(found + np.int32((piece[i] < least) | (piece[i] > most)))
            elif bounded:
                for i in range(piece.shape[0]):
                    found = np.int32(found + np.int32((piece[i] < least) & (piece[i] > most)))
            for v in range(values.shape[0]):
                value = values[v]
                for i in range(piece.shape[0]):
                    found = np.int32(found + np.int32(piece[i] == value))
            total += found
    return total


def _count_equal(block: Any, values: Any) -> Any:
    """The same of complex numbers, which have no order."""
    total = np.int64(0)
    for row in range(block.shape[0]):
        for left in range(0, block.shape[1], PIECE):
            piece = block[row, left : left + PIECE]
            for v in range(values.shape[0]):
                value = values[v]
                found = np.int32(0)
                for i in range(piece.shape[0]):
                    found = np.int32(found + np.int32(piece[i] == value))
                total += found
    return total
