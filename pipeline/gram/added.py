"""Axes of an array that are added up before anything else is made of it, such as the alleles of a dosage: by dask, on
the cluster that does the rest, into memory, as any array of dask is computed."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import zarr

from tilewright.kernels.arguments import shown
from tilewright.kernels.numbers import counted
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.gram.axes import ALLELE_AXES, SHORT, axes_text, axis_named
from tilewright.pipeline.gram.masks import given_masks, laid_along
from tilewright.pipeline.gram.options import ATTRIBUTES
from tilewright.pipeline.store.arrays import Input, name_of, open_array
from tilewright.pipeline.store.attributes import dimension_names
from tilewright.pipeline.store.coordinates import along_axis
from tilewright.pipeline.store.labels.alignment import Align
from tilewright.pipeline.store.sources.dasks import Remarked, lazy_of, open_dask
from tilewright.pipeline.store.sources.parts import open_part
from tilewright.pipeline.store.sources.slices import ALL, Slice, by_axes, sliced_name

PLOIDY, VARIANTS = "ploidy", "variants"
"""What sgkit names the axes of a call's alleles, by their numbers, and of variants."""
UNKNOWN = -1
"""What stands for an allele that is not known, in sgkit's calls."""
LEAST = tuple(int(np.iinfo(name).min) for name in ("i2", "i4", "i8"))
"""What stands for a missing number in sums, and beside a mask in what is added up, which nobody has said."""
MOST_SHOWN = 4
"""How many numbers a message names."""


def added_up(
    source: Input,
    given: Any,
    missing: Any,
    role: str,
    roles: tuple[str, ...] = ("X",),
    align: Align = "labels",
) -> tuple[zarr.Array[Any], Any]:
    """An array without some axes, whose elements along these are added up, and what stands for a sum of which a part is
    missing. given: the axes, one or a list, by name or number.

    Integers are added in a type that holds all sums, whose least number stands for a missing one; floats in float64.
    missing: the number that does so in the array, ``"nan"``, None, or masks of the array, such as sgkit's
    ``call_genotype_mask``, or of what broadcasts to it. roles: of all matrices, of which masks are given.

    Rows and columns of it are those of the matrix that is left, so that some variants are taken of calls before their
    alleles are added up.

    Raises OptionError for axes that the array does not have, fewer than two that would be left, rows or columns where
    more are; as `masks.with_mask`, and as `open_array`. The array that is returned raises it once it is computed,
    before it is multiplied, where alleles are below 0 that are not missing (`add_alleles`).
    """
    import dask.array

    mask = _mask(missing, role, roles)
    array = _opened(source, given, role)
    axes = _axes(array, given)
    wider = _sums(array.dtype, math.prod(array.shape[axis] for axis in axes))
    lazy = lazy_of(array)
    if mask is not None:
        laid, missing = laid_along(array, mask, role, align), _code("nan", wider)
        lazy = dask.array.where(laid, np.nan if missing == "nan" else missing, lazy.astype(wider))
    whole = lazy.rechunk(dict.fromkeys(axes, -1))
    called = f"{role}: {name_of(array)}"
    lines = _lines(array, axes)
    counted_along = lines if _of_ploidy(array, axes) else None
    add, more = (add_alleles, (called, counted_along)) if _of_alleles(array, axes) else (add_block, ())
    summed = whole.map_blocks(
        add, axes, missing, wider, *more, drop_axis=list(axes), dtype=wider, meta=np.empty(0, wider)
    )
    names = dimension_names(array)
    remark = partial(_high_alleles, called, names[lines], array.shape[lines])
    left = [axis for axis in range(array.ndim) if axis not in axes]
    coordinates = {str(names[axis]): found for axis in left if (found := along_axis(array, axis)) is not None}
    summed_name = f"{name_of(array)} added up over {' and '.join(names[axis] or str(axis) for axis in axes)}"
    dimensions = [names[axis] for axis in left] if all(names[axis] for axis in left) else None
    opened = open_dask(summed, role, summed_name, dimensions, None, coordinates, remark, anew=True)
    return opened, _code(missing, wider)


def _opened(source: Input, given: Any, role: str) -> zarr.Array[Any]:
    """What is to be added up along the axes that are given."""
    asked = source if isinstance(source, Slice) else sliced_name(source)
    if asked is None:
        return open_array(source, ndim=2, or_more=True, role=role)
    if asked.by_axis:
        return open_part(asked, role)
    array = open_array(asked.source, ndim=2, or_more=True, role=role)
    axes = _axes(array, given)
    left = [axis for axis in range(array.ndim) if axis not in axes]
    if len(left) != 2:
        raise OptionError(
            f"{role}: {name_of(array)} added up over {axes_text(array, axes)} has {len(left)} axes,"
            f" {axes_text(array, left)}, and rows and columns are taken of two only: {by_axes(array.ndim)}"
        )
    parts = dict(zip(left, asked.parts, strict=True))
    every = tuple(parts.get(axis, ALL) for axis in range(array.ndim))
    return open_part(Slice(array, every, by_axis=True), role)


def _of_alleles(array: zarr.Array[Any], axes: tuple[int, ...]) -> bool:
    """Whether integers are added up that are calls of alleles: by an axis' name, or where it has none as bytes. Other
    integers may well be below 0, such as packed anomalies."""
    names = [dimension_names(array)[axis] for axis in axes]
    named = any(name in ALLELE_AXES for name in names)
    return array.dtype.kind in "iu" and (named or (array.dtype.itemsize == 1 and not all(names)))


def _of_ploidy(array: zarr.Array[Any], axes: tuple[int, ...]) -> bool:
    """Whether these are the numbers of alleles, where numbers along an axis of alleles are counts: by the axis' name,
    or where it has none as it is short."""
    named = [(dimension_names(array)[axis], array.shape[axis]) for axis in axes]
    return any(name == PLOIDY or (not name and side in SHORT) for name, side in named)


def _lines(array: zarr.Array[Any], axes: tuple[int, ...]) -> int:
    """The axis along which a message counts: the variants', by its name, or the first that is left."""
    left = [axis for axis in range(array.ndim) if axis not in axes]
    return next((axis for axis in left if dimension_names(array)[axis] == VARIANTS), left[0])


def _high_alleles(called: str, name: str | None, side: int, found: list[tuple[int, np.ndarray]]) -> str:
    """A sentence about alleles above 1, of what `add_alleles` found in each block."""
    lines = len(np.unique(np.concatenate([places for _, places in found])))
    among = f"{lines} of its {side} {name}" if name else f"{lines} of the {side} lines along its first axis"
    return (
        f"{called} has {counted(sum(count for count, _ in found), 'element')} above 1, in {among}, and each is added up"
        " as the number that it is: where they number the alleles of variants that have several, as sgkit's calls do,"
        " allele 2 counts as two doses. Leave these variants out, or count each alternative allele once, by xarray"
        " calls.where(calls <= 1, 1)"
    )


def _axes(array: zarr.Array[Any], given: Any) -> tuple[int, ...]:
    some = list(given) if isinstance(given, list | tuple) else [given]
    axes = tuple(sorted({axis_named(array, one, "add_up") for one in some}))
    if not axes or array.ndim - len(axes) < 2:
        raise OptionError(
            f"add_up={shown(given)} (--add-up) leaves {array.ndim - len(axes)} of the {array.ndim} axes of"
            f" {name_of(array)}: one at least is added up, and two at least are left; its axes are {axes_text(array)}"
        )
    return axes


def _mask(missing: Any, role: str, roles: tuple[str, ...]) -> Any:
    """The mask of a matrix, as it is given; None where a number, ``"nan"`` or nothing is. Raises OptionError."""
    number = isinstance(missing, int | float | np.integer | np.floating) and not isinstance(missing, bool)
    if missing is None or number or (isinstance(missing, str) and missing.lower() == "nan"):
        return None
    masks = None if isinstance(missing, str) and missing == ATTRIBUTES else given_masks(missing)
    if masks is None:
        raise OptionError(
            f"missing={shown(missing)} beside add_up (--add-up): a sum is missing where a part of it is, which a number"
            " says, or 'nan', or a mask of bool; give one of these"
        )
    return masks.of(roles).get(role)


def _sums(dtype: np.dtype, count: int) -> np.dtype:
    """What so many elements are added in, and kept: of integers the narrowest signed type that no sum reaches the least
    number of, or int64, where a sum may wrap as NumPy's does."""
    if dtype.kind in "biu":
        most = 1 if dtype.kind == "b" else max(-int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
        types = [np.dtype(name) for name in ("i2", "i4", "i8")]
        return next((each for each in types if count * most <= np.iinfo(each).max), types[-1])
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype.newbyteorder("=")


def _code(missing: Any, dtype: np.dtype) -> Any:
    if missing is None:
        return None
    return "nan" if dtype.kind in "fc" else int(np.iinfo(dtype).min)


def add_block(block: np.ndarray, axes: tuple[int, ...], missing: Any, dtype: np.dtype) -> np.ndarray:
    """The sums of a block along some axes, in this dtype; where a part is missing, its least number, or NaN."""
    exact = dtype if dtype.kind in "iu" else np.result_type(dtype, np.float64)
    total = np.asarray(block.sum(axis=axes, dtype=exact)).astype(dtype)
    if missing is None:
        return total
    lacking = block != block
    if not isinstance(missing, str):
        lacking |= block == missing
    code = np.nan if dtype.kind in "fc" else np.iinfo(dtype).min
    return np.where(lacking.any(axis=axes), np.asarray(code, dtype), total)


def add_alleles(
    block: np.ndarray,
    axes: tuple[int, ...],
    missing: Any,
    dtype: np.dtype,
    called: str,
    lines: int | None = None,
    block_info: Any = None,
) -> np.ndarray | Remarked | OptionError:
    """`add_block` of calls of alleles, and where some are above 1 how many, and at which places along an axis. Returns
    an OptionError, which `Pending.compute` raises, where one is below 0 and not missing: the sum would pass for a
    dosage, and of calls that are filled up to one ploidy the first component of samples would be just their ploidy.

    called: the array, for messages. lines: that axis; None: numbers above 1 are nothing to tell of. block_info: where
    the block lies, which dask gives.
    """
    bad = block < 0
    if missing is not None and not isinstance(missing, str):
        bad &= block != missing
    starts = [start for start, _ in block_info[0]["array-location"]] if block_info else [0] * block.ndim
    if not bad.any():
        total = add_block(block, axes, missing, dtype)
        if lines is None or not block.max(initial=0) > 1:
            return total
        high = block > 1
        if missing is not None and not isinstance(missing, str):
            high &= block != missing
        places = np.flatnonzero(high.any(axis=tuple(axis for axis in range(block.ndim) if axis != lines)))
        return Remarked(total, (int(high.sum()), starts[lines] + places)) if len(places) else total
    values, counts = np.unique(block[bad], return_counts=True)
    found = ", ".join(
        f"{value} ({counted(int(count), 'time')})"
        for value, count in zip(values[:MOST_SHOWN], counts[:MOST_SHOWN], strict=True)
    )
    first = tuple(
        int(start + place) for start, place in zip(starts, np.argwhere(bad)[0].tolist(), strict=True)
    )
    stop = tuple(start + side for start, side in zip(starts, block.shape, strict=True))
    region = ", ".join(f"{start}:{end}" for start, end in zip(starts, stop, strict=True))
    return OptionError(
        f"{called} has alleles below 0 that are not missing, of the {block.size} in [{region}]: {found}"
        f"{', ...' if len(values) > MOST_SHOWN else ''}, the first at {list(first)}. {_remedy(values, missing)}"
    )


def _remedy(values: np.ndarray, missing: Any) -> str:
    """What to do about such numbers, found where ``missing`` was said to be missing."""
    others = values[values != UNKNOWN].tolist()
    told = []
    if UNKNOWN in values:
        told.append(
            f"{UNKNOWN} stands for an allele that is not known: say missing={UNKNOWN} (--missing {UNKNOWN})."
        )
    if others or not (missing in (None, UNKNOWN, "nan") or missing in LEAST):
        told.append(
            f"{others[-1] if others else missing} may fill up calls of samples with fewer alleles (mixed ploidy): leave"
            f" these samples out, or have all that is below 0 be missing, by xarray calls.where(calls >= 0, {UNKNOWN})"
            f" with missing={UNKNOWN}."
        )
    return " ".join([*told, "Where they are no alleles, and may be below 0, name the axis otherwise."])
