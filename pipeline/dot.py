"""The dot product of two stored vectors, as a reduction over stretches of them.

The vectors are cut into blocks of a fixed number of elements, with one partial product each. A task takes many blocks,
the more the larger the chunks are that have to be decoded whole, but the partial products and the order of their sum
depend on the length alone: the same numbers give the same bits however they are stored and distributed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import zarr
from distributed import Client

from tilewright.kernels import dot
from tilewright.kernels.launch import ceil_div
from tilewright.kernels.masked import Masks, count_masked
from tilewright.pipeline import config
from tilewright.pipeline.errors import ShapeError
from tilewright.pipeline.events import Listener
from tilewright.pipeline.giving_up import reading_while
from tilewright.pipeline.reduce import Reduction, end_if_given_up, reduce_pieces
from tilewright.pipeline.region_read import reads_parts, region_reads
from tilewright.pipeline.store import name_of, read_unit
from tilewright.pipeline.thread_buffers import thread_buffer

BLOCK = 2**20
"""Elements in one partial product."""

MOST_CHUNK_NBYTES = 256 * 2**20
"""A task takes whole chunks up to this size, unless parts can be read alone, and parts of larger ones, which are then
decoded more than once."""


def dot_stored(
    client: Client,
    x: zarr.Array[Any],
    y: zarr.Array[Any],
    *,
    device: str,
    listener: Listener,
    masks: Sequence[Masks | None] = (None, None),
) -> tuple[Any, tuple[int, int]]:
    """Sum of conj(x[i]) y[i] over two vectors of n elements, as a NumPy scalar of ``numpy.result_type(x, y)``; and how
    many elements of x and of y are missing by ``masks``, 0 where those of a vector are None.

    Integers wrap modulo 2^bits, as in ``numpy.vdot``. Partial products of floating point are rounded to the result's
    dtype (float16: float32) and then added exactly, with a single rounding at the end (``math.fsum``).

    Raises
    ------
    ShapeError
        The lengths differ.
    StoreError
        A chunk cannot be read.
    """
    (n,), (n_y,) = x.shape, y.shape
    if n != n_y:
        raise ShapeError(
            f"{name_of(x)} has {n} elements and {name_of(y)} has {n_y}; they must have equally many"
        )
    step, lighter = _piece_elements(x, y)
    ranges = [(start, min(start + step, n)) for start in range(0, n, step)]
    itemsize = x.dtype.itemsize + y.dtype.itemsize
    return reduce_pieces(
        client,
        _reduction(np.result_type(x.dtype.newbyteorder("="), y.dtype.newbyteorder("=")), lighter),
        [(x, y, start, stop, device, tuple(masks)) for start, stop in ranges],
        [(stop - start) * itemsize for start, stop in ranges],
        listener,
    )


def _piece_elements(x: zarr.Array[Any], y: zarr.Array[Any]) -> tuple[int, str]:
    """Elements of a task: about the configured size, at least a chunk that has to be decoded whole, in whole blocks;
    and how a user makes that less."""
    itemsize = x.dtype.itemsize + y.dtype.itemsize
    blocks, lighter = max(1, ceil_div(config.get("piece-nbytes") // itemsize, BLOCK)), ""
    if blocks > 1:
        lighter = "let them take smaller pieces (tilewright.piece-nbytes), or "
    for array in (x, y):
        if reads_parts(array):
            continue
        chunk = read_unit(array)[0]
        needed = ceil_div(min(chunk, MOST_CHUNK_NBYTES // array.dtype.itemsize), BLOCK)
        if needed > blocks:
            blocks = needed
            lighter = f"store {name_of(array)} in smaller chunks, now of {chunk} elements, or "
    return BLOCK * blocks, f"{lighter}run fewer of them at once (threads_per_worker, in a profile)"


Part: TypeAlias = tuple[list[Any], tuple[int, int]]
"""The partial products of some blocks, and how many elements of x and of y in them are missing."""


def _reduction(dtype: np.dtype, lighter: str) -> Reduction[Part, Part, tuple[Any, tuple[int, int]]]:
    return Reduction(
        name="dot",
        chunk=multiply_piece,
        identity=_nothing,
        combine=_together,
        finalize=_Sum(dtype),
        commutative=False,  # sums that are not finite are added in order
        lighter=lighter,
    )


def _nothing() -> Part:
    return [], (0, 0)


def _together(one: Part, other: Part) -> Part:
    return one[0] + other[0], (one[1][0] + other[1][0], one[1][1] + other[1][1])


class _Sum:
    """The sum of all partial products, rounded once to ``dtype``; and what was counted in them."""

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype = dtype

    def __call__(self, part: Part) -> tuple[Any, tuple[int, int]]:
        partials, masked = part
        return self._rounded(partials), masked

    def _rounded(self, partials: list[Any]) -> Any:
        if self._dtype.kind in "iu":
            bits = 8 * self._dtype.itemsize
            whole = sum(map(int, partials)) % 2**bits
            return np.array(whole, np.uint64).astype(self._dtype)[()]
        if self._dtype.kind == "c":
            real = _exact_sum([float(value.real) for value in partials])
            imaginary = _exact_sum([float(value.imag) for value in partials])
            value: Any = complex(real, imaginary)
        else:
            value = _exact_sum([float(value) for value in partials])
        with np.errstate(over="ignore"):
            return np.array(value).astype(self._dtype)[()]


def _exact_sum(values: list[float]) -> float:
    """The correctly rounded sum; infinity and NaN as adding one by one gives them."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        with np.errstate(all="ignore"):
            return float(np.add.reduce(np.array(values)))


def multiply_piece(
    x: zarr.Array[Any],
    y: zarr.Array[Any],
    start: int,
    stop: int,
    device: str,
    masks: Sequence[Masks | None] = (None, None),
) -> tuple[Part, dict[str, float]]:
    """What a task does: compute the partial products of the blocks of x[start:stop] and y[start:stop], and count the
    elements of both that are missing by ``masks``."""
    begin = time.perf_counter()
    with reading_while(end_if_given_up()):
        left, right = (_read(array, start, stop, device, role) for array, role in ((x, "x"), (y, "y")))
    read = time.perf_counter()
    partials = []
    for block in range(0, stop - start, BLOCK):
        parts = [array[block : block + BLOCK] for array in (left, right)]
        # A float16 partial product could overflow although the whole product does not.
        parts = [part.astype(np.float32) if part.dtype == np.float16 else part for part in parts]
        partials.append(dot(*parts, device=device))
    in_x, in_y = (_missing(*each) for each in zip((left, right), masks, strict=True))
    return (partials, (in_x, in_y)), {"read": read - begin, "multiply": time.perf_counter() - read}


def _missing(data: np.ndarray, masks: Masks | None) -> int:
    return count_masked(data, masks) if masks is not None else 0


def _read(array: zarr.Array[Any], start: int, stop: int, device: str, role: str) -> np.ndarray:
    dtype = array.dtype.newbyteorder("=")
    data = thread_buffer(role, (stop - start) * dtype.itemsize, pinned=device == "cuda").view(dtype)
    for part in region_reads(array, (slice(start, stop),)):
        part.read(data[part.target])
    return data
