"""What has to be known of a matrix before it is multiplied: one streamed pass over it, by tasks on the cluster.

`find_statistics` goes over it once, whatever is asked; `thin_product` once more, where the exact sums of integers are
to be centred along the side that is summed over. Both hold no more than a piece of the matrix at a time in each task,
and their bits do not depend on how many workers there are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tilewright.kernels.numbers import ceil_div, counted
from tilewright.kernels.passes.moments import Moments, moments_of
from tilewright.pipeline import config
from tilewright.pipeline.events import Listener
from tilewright.pipeline.gram.options import SIDES, Missing, axis_of
from tilewright.pipeline.reduce import Reduction, end_if_given_up, reduce_pieces
from tilewright.pipeline.store.arrays import name_of, read_unit
from tilewright.pipeline.store.attributes import masks_of, missing_codes
from tilewright.pipeline.store.region import StoredArray, is_beside_mask
from tilewright.pipeline.store.region_read import read_region, reads_parts
from tilewright.pipeline.store.waiting import reading_while

if TYPE_CHECKING:
    from distributed import Client

STATISTICS = "statistics"
THIN = "means"
"""Names of the two passes in events."""


@dataclass(frozen=True)
class Wanted:
    """What a pass finds of a matrix."""

    sides: tuple[str, ...]
    """Of which of `SIDES` it finds the moments of each line."""
    missing: Missing = None
    weighted: str | None = None
    """The side whose lines are means over elements with weights."""
    weights: np.ndarray | None = None
    """One for each of those elements."""

    def weights_of(self, side: str, along: slice) -> np.ndarray | None:
        """Those of the elements at some places of this side's lines."""
        return self.weights[along] if self.weights is not None and side == self.weighted else None


@dataclass(frozen=True)
class _Part:
    """What one task found, and of which lines."""

    region: tuple[slice, slice]
    """Rows and columns."""
    found: dict[str, Moments]


def find_statistics(
    client: Client, array: StoredArray, wanted: Wanted, listener: Listener
) -> dict[str, Moments]:
    """The moments of every line of the sides that are wanted. Raises StoreError where a chunk cannot be read."""
    dtype = array.dtype.newbyteorder("=")

    def nothing() -> dict[str, Moments]:
        return {side: Moments.of_nothing(int(array.shape[axis_of(side)]), dtype) for side in wanted.sides}

    def combined(total: dict[str, Moments], part: _Part) -> dict[str, Moments]:
        for side, found in part.found.items():
            total[side].part(part.region[axis_of(side)]).add(found)
        return total

    reduction: Reduction[_Part, dict[str, Moments]] = Reduction(
        name=STATISTICS,
        chunk=look_at_piece,
        identity=nothing,
        combine=combined,
        commutative=False,  # sums of floats are rounded
        lighter=_lighter(array),
    )
    regions = list(pieces(array, wanted.sides))
    return reduce_pieces(
        client,
        reduction,
        [(array, region, _of_region(wanted, region)) for region in regions],
        [_nbytes(array, region) for region in regions],
        listener,
    )


LIKELY_CODES = (-1, -9, -99, -999, -9999)
"""What stands for a missing number in matrices of counts, dosages or calls of alleles: -1 in sgkit's, -9 in PLINK's."""


FAR = (1e15, 1e20, 9.999e20, 1e30, 1e32, 1e33, 1e34, 1e35, 1e36, 9.96921e36, 9.96920996838687e36, 1e37)
"""What stands for a missing float where no attribute says so: 1e20 in models of the climate, 9.999e20 in GRIB, netCDF's
own default, powers of ten; and the largest of float32."""


def likely_fill(array: StoredArray, missing: Missing, moments: Moments) -> float | None:
    """One of `FAR`, or less than 0 the same, that nobody called missing and that is the largest number, or the least,
    of some lines. None where there is none, and where attributes name it, of which the product tells."""
    if array.dtype.kind != "f" or is_beside_mask(array):
        return None
    narrow, told = array.dtype.newbyteorder("="), masks_of(array)
    with np.errstate(over="ignore"):
        known = {float(np.asarray(value, narrow)): value for value in (*FAR, float(np.finfo(np.float32).max))}
    for ends, sign in ((moments.most, 1), (moments.least, -1)):
        seen = ends[np.isfinite(ends)]
        end = sign * float((sign * seen).max()) if len(seen) else 0.0
        if abs(end) in known and end != missing and (told is None or end not in told.values):
            return sign * known[abs(end)]
    return None


def likely_code(array: StoredArray, missing: Missing, found: Iterable[Moments]) -> int | None:
    """A number that nobody called missing, and that is likely to be: one of `LIKELY_CODES` that is the only number
    below 0, beside some of 1 or more. -1 is, in bytes alone: others hold much else. None where there is none, and where
    attributes name it, of which the product tells.

    found: the moments of all lines of a side, or of both.
    """
    if array.dtype.kind not in "if":
        return None
    for moments in found:
        lines = moments.least < 0
        kinds = {*moments.least[lines].tolist(), *moments.negative[lines].tolist()}
        if len(kinds) != 1 or not moments.most.max() >= 1:
            continue
        (code,) = kinds
        if code not in LIKELY_CODES or (code == LIKELY_CODES[0] and array.dtype.str[1:] != "i1"):
            continue
        return None if missing is None and code in missing_codes(array) else int(code)
    return None


def likely_missing(
    role: str, array: StoredArray, missing: Missing, found: Mapping[str, Moments]
) -> str | None:
    """A sentence about such a number: how many lines have it, as the pass that found them tells by their least
    elements; or about NaN that nobody said to be missing; else None."""
    for side, moments in found.items():
        bounded = np.isfinite(moments.least) & np.isfinite(
            moments.most
        )  # of infinities the mean may be NaN, too
        lines = int((np.isnan(moments.mean) & bounded).sum())
        if lines and missing is None and not is_beside_mask(array):
            return (
                f"{role}: {name_of(array)} holds NaN in {lines} of its {counted(len(moments.mean), side[:-1])}, which"
                " becomes NaN in all that is made of these: where it stands for a missing number, say missing='nan'"
                " (--missing nan)"
            )
        code = likely_code(array, missing, [moments])
        if code is not None:
            lines = int((moments.least == code).sum())
            return (
                f"{role}: {name_of(array)} holds {code} in {lines} of its {counted(len(moments.least), side[:-1])}, and"
                f" no other negative number{_beside(array, missing, moments)}; it counts as a number: where it stands"
                f" for a missing one, {say_missing(array, missing, code)}"
            )
        fill = likely_fill(array, missing, moments)
        if fill is not None:
            ends = moments.most if fill > 0 else moments.least
            lines = int((ends == np.asarray(fill, array.dtype)).sum())
            return (
                f"{role}: {name_of(array)} holds {fill:.6g} in {lines} of its {counted(len(ends), side[:-1])}, which"
                f" many files have for missing numbers; it counts as a number: where it stands for a missing one,"
                f" {say_missing(array, missing, fill)}"
            )
    return None


def say_missing(array: StoredArray, missing: Missing, code: float) -> str:
    """What to do where this code stands for missing numbers, and perhaps another was said to be."""
    if is_beside_mask(array):
        return f"have the mask, or the attributes that name missing numbers, leave out {code} too"
    instead = "" if missing is None else f" in place of {_shown(missing)}; where both do, give a mask"
    return f"say missing={code} (--missing {code}){instead}"


def _beside(array: StoredArray, missing: Missing, moments: Moments) -> str:
    """A clause about what was said to be missing: whether any element is."""
    if missing is None or is_beside_mask(array):
        return ""
    some = bool((moments.count < math.prod(array.shape) // max(1, len(moments.count))).any())
    return f" beside {_shown(missing)}, which is missing" if some else f", and not one {_shown(missing)}"


def _shown(missing: Missing) -> str:
    return f"{missing:g}" if isinstance(missing, int | float) else "NaN"


def look_at_piece(
    array: StoredArray, region: tuple[slice, slice], wanted: Wanted
) -> tuple[_Part, dict[str, float]]:
    """What a task does: read a piece of the matrix, and find the moments of its lines.

    wanted: with the weights of this piece alone.
    """
    begin = time.perf_counter()
    with reading_while(end_if_given_up()):
        block = read_region(array, region)
    read = time.perf_counter()
    found = {}
    for side in wanted.sides:
        axis = 1 - axis_of(side)
        found[side] = moments_of(block, axis, wanted.missing, wanted.weights_of(side, slice(None)))
    return _Part(region, found), {"read": read - begin, "look": time.perf_counter() - read}


def thin_product(
    client: Client, array: StoredArray, side: str, vector: np.ndarray, listener: Listener
) -> np.ndarray:
    """For each line of a side the sum of its elements times a vector's: X v for rows, Xᵀ v for columns, in float64.

    Raises StoreError where a chunk cannot be read.
    """
    axis = axis_of(side)
    length = int(array.shape[axis])

    def combined(total: np.ndarray, part: tuple[slice, np.ndarray]) -> np.ndarray:
        lines, found = part
        total[lines] += found
        return total

    reduction: Reduction[tuple[slice, np.ndarray], np.ndarray] = Reduction(
        name=THIN,
        chunk=multiply_piece,
        identity=lambda: np.zeros(length),
        combine=combined,
        commutative=False,
        lighter=_lighter(array),
    )
    regions = list(pieces(array, (side,)))
    return reduce_pieces(
        client,
        reduction,
        [(array, region, axis, vector[region[1 - axis]]) for region in regions],
        [_nbytes(array, region) for region in regions],
        listener,
    )


def multiply_piece(
    array: StoredArray, region: tuple[slice, slice], axis: int, vector: np.ndarray
) -> tuple[tuple[slice, np.ndarray], dict[str, float]]:
    """What a task does: multiply the lines of a piece by its part of the vector."""
    begin = time.perf_counter()
    with reading_while(end_if_given_up()):
        block = read_region(array, region)
    read = time.perf_counter()
    # Not by BLAS, whose sums depend on how many threads it has.
    found = np.einsum("ij,j->i" if axis == 0 else "ij,i->j", block, vector, dtype=np.float64, casting="safe")
    return (region[axis], found), {"read": read - begin, "multiply": time.perf_counter() - read}


def pieces(array: StoredArray, sides: Sequence[str]) -> Iterator[tuple[slice, slice]]:
    """The matrix in pieces of about the configured size, of whole chunks where a part of one cannot be read alone, in
    row order: long ones along the lines that are looked at, so that few numbers come back of each."""
    rows, columns = (int(side) for side in array.shape)
    if not rows or not columns:
        return
    unit_rows, unit_columns = read_unit(array)
    most = max(1, config.get("piece-nbytes") // array.dtype.itemsize)
    if reads_parts(array):  # a part of a large chunk is a piece
        unit_columns = min(unit_columns, most)
        unit_rows = max(1, min(unit_rows, most // unit_columns))
    height, width = min(unit_rows, rows), min(unit_columns, columns)
    if tuple(sides) == (SIDES[1],):  # of rows alone
        width = min(columns, width * max(1, most // (height * width)))
        height = min(rows, height * max(1, most // (height * width)))
    else:
        height = min(rows, height * max(1, most // (height * width)))
        width = min(columns, width * max(1, most // (height * width)))
    for row in range(ceil_div(rows, height)):
        for column in range(ceil_div(columns, width)):
            yield (
                slice(row * height, min(rows, (row + 1) * height)),
                slice(column * width, min(columns, (column + 1) * width)),
            )


def _of_region(wanted: Wanted, region: tuple[slice, slice]) -> Wanted:
    """The same, with no other weights than a piece needs."""
    if wanted.weighted is None:
        return wanted
    along = region[1 - axis_of(wanted.weighted)]
    return Wanted(wanted.sides, wanted.missing, wanted.weighted, wanted.weights_of(wanted.weighted, along))


def _nbytes(array: StoredArray, region: tuple[slice, slice]) -> int:
    rows, columns = region
    return (rows.stop - rows.start) * (columns.stop - columns.start) * int(array.dtype.itemsize)


def _lighter(array: StoredArray) -> str:
    return (
        f"let tasks take smaller pieces (tilewright.piece-nbytes), store {name_of(array)} in smaller chunks, or run"
        " fewer tasks at once (threads_per_worker, in a profile)"
    )
