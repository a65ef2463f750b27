"""Axes of an array that are added up before anything else is made of it, such as the alleles of a dosage: by dask, on
the cluster that does the rest, into memory, as any array of dask is computed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import zarr

from tilewright.kernels.arguments import shown
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.gram.axes import axes_text, axis_named
from tilewright.pipeline.store.arrays import Input, name_of, open_array, sliced_name
from tilewright.pipeline.store.attributes import dimension_names
from tilewright.pipeline.store.coordinates import along_axis
from tilewright.pipeline.store.sources.dasks import open_dask, pending_of
from tilewright.pipeline.store.sources.slices import Slice


def added_up(source: Input, given: Any, missing: Any, role: str) -> tuple[zarr.Array[Any], Any]:
    """An array without some axes, whose elements along these are added up, and what stands for a sum of which a part is
    missing. given: the axes, one or a list, by name or number.

    Integers are added in a type that holds all sums, whose least number stands for a missing one; floats in float64.
    missing: the number that does so in the array, ``"nan"``, or None.

    Raises OptionError for axes that the array does not have, fewer than two that would be left, rows or columns of an
    array, and a mask; else as `open_array`.
    """
    import dask.array

    _check_missing(missing)
    if isinstance(source, Slice) or sliced_name(source) is not None:
        raise OptionError(
            f"add_up={shown(given)} (--add-up) of some rows or columns of {name_of(source)}: give the whole array, or"
            " add up by xarray what is wanted of it"
        )
    array = open_array(source, ndim=2, or_more=True, role=role)
    axes = _axes(array, given)
    wider = _sums(array.dtype, math.prod(array.shape[axis] for axis in axes))
    # The memory of an array of dask holds zeros until its own graph is computed, so that the sums go on from that.
    pending = pending_of(array)
    lazy = dask.array.from_zarr(array) if pending is None or pending.is_computed else pending.graph
    whole = lazy.rechunk(dict.fromkeys(axes, -1))
    summed = whole.map_blocks(
        add_block, axes, missing, wider, drop_axis=list(axes), dtype=wider, meta=np.empty(0, wider)
    )
    names = dimension_names(array)
    left = [axis for axis in range(array.ndim) if axis not in axes]
    coordinates = {str(names[axis]): found for axis in left if (found := along_axis(array, axis)) is not None}
    called = f"{name_of(source)} added up over {' and '.join(names[axis] or str(axis) for axis in axes)}"
    dimensions = [names[axis] for axis in left] if all(names[axis] for axis in left) else None
    return open_dask(summed, role, called, dimensions, None, coordinates), _code(missing, wider)


def _axes(array: zarr.Array[Any], given: Any) -> tuple[int, ...]:
    some = list(given) if isinstance(given, list | tuple) else [given]
    axes = tuple(sorted({axis_named(array, one, "add_up") for one in some}))
    if not axes or array.ndim - len(axes) < 2:
        raise OptionError(
            f"add_up={shown(given)} (--add-up) leaves {array.ndim - len(axes)} of the {array.ndim} axes of"
            f" {name_of(array)}: one at least is added up, and two at least are left; its axes are {axes_text(array)}"
        )
    return axes


def _check_missing(missing: Any) -> None:
    number = isinstance(missing, int | float | np.integer | np.floating) and not isinstance(missing, bool)
    if missing is not None and not number and not (isinstance(missing, str) and missing.lower() == "nan"):
        raise OptionError(
            f"missing={shown(missing)} beside add_up (--add-up): a sum is missing where a part of it is, which a number"
            " says, or 'nan'; give one of these, or add up by xarray what is not masked"
        )


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
