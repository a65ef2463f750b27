"""Which axes of an array are summed over: named by their dimensions or numbered, and what matrix that makes of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import zarr

from tilewright.kernels.arguments import shown
from tilewright.pipeline.errors import OptionError, ShapeError
from tilewright.pipeline.store.arrays import name_of
from tilewright.pipeline.store.attributes import dimension_names
from tilewright.pipeline.store.labels.alignment import Along, ends_told
from tilewright.pipeline.store.region import Flattened, StoredArray

ALLELE_AXES = ("ploidy", "allele", "alleles")
"""What dimensions are named along which the alleles of a call lie."""
SHORT = range(2, 9)
"""Lengths of an axis that may be that of alleles, or of other parts of one number: ploidies are hardly larger."""


def axes_text(array: zarr.Array[Any], some: Collection[int] | None = None) -> str:
    """An array's axes, or some of them, by number and name, for a message."""
    names = enumerate(dimension_names(array))
    return ", ".join(
        f"{axis}" + (f" ({name!r})" if name else "") for axis, name in names if some is None or axis in some
    )


def of_parts(array: zarr.Array[Any]) -> str:
    """A clause about axes along which the parts of one number may lie, such as the alleles of a dosage: by their names,
    or as they are short; else about one of a single place. Empty where there are none."""
    names = dimension_names(array)
    single = [axis for axis, side in enumerate(array.shape) if side == 1]
    axes = [axis for axis, name in enumerate(names) if name in ALLELE_AXES]
    if not axes and len(single) == 1:
        places = ",".join("0" if axis in single else ":" for axis in range(array.ndim))
        return (
            f". Axis {axes_text(array, single)} has one place alone, and is left out by brackets behind the name of the"
            f" array ([{places}])"
        )
    axes = [axis for axis, side in enumerate(array.shape) if axis in axes or side in SHORT]
    if not axes:
        return ""
    told = " or ".join(f"{axis}" + (f" ({names[axis]!r})" if names[axis] else "") for axis in axes)
    example = names[axes[-1]] or axes[-1]
    return (
        f". Where the elements along axis {told} are parts of one number, as the alleles of a dosage are, have them"
        f" added up first (add_up={example!r}, --add-up {example}): summed over, each part is multiplied by itself"
        " alone"
    )


def axis_named(array: zarr.Array[Any], given: Any, option: str) -> int:
    """The axis that a name or a number means, which counts from the end where it is negative, as NumPy's. Raises
    OptionError where there is none, or two have that name."""
    names = dimension_names(array)
    if isinstance(given, str) and given in names:
        if names.count(given) > 1:
            raise OptionError(
                f"{option}={given!r}: {names.count(given)} axes of {name_of(array)} have that name; give a number: the"
                f" axes are {axes_text(array)}"
            )
        return names.index(given)
    numbers = {str(axis): axis % array.ndim for axis in range(-array.ndim, array.ndim)}
    if isinstance(given, str) and given in numbers:
        return numbers[given]
    number = isinstance(given, int | np.integer) and not isinstance(given, bool | np.bool_)
    if number and -array.ndim <= given < array.ndim:
        return int(given) % array.ndim
    raise OptionError(
        f"{option}={shown(given)} is no axis of {name_of(array)}; its axes are {axes_text(array)}"
    )


def summed_axes(array: zarr.Array[Any], sum_over: Any) -> tuple[int, ...]:
    """The axes that are summed over, in the array's order. Raises OptionError unless they are some and not all."""
    given = list(sum_over) if isinstance(sum_over, list | tuple) else [sum_over]
    axes = [axis_named(array, one, "sum_over") for one in given]
    if len(set(axes)) < len(axes):
        raise OptionError(
            f"sum_over={shown(sum_over)} names an axis of {name_of(array)} twice; its axes are {axes_text(array)}"
        )
    if not axes or len(axes) == array.ndim:
        which = "no axis" if not axes else f"all {len(axes)} axes"
        raise OptionError(
            f"sum_over={shown(sum_over)} names {which} of {name_of(array)}: at least one is summed over, and one is"
            f" not; its axes are {axes_text(array)}"
        )
    return tuple(sorted(axes))


def side_left(array: zarr.Array[Any], summed: Sequence[int]) -> str:
    """The side of a matrix that holds what is not summed over, where its columns are the side that has the array's last
    axis: so lines that are contiguous in files are rows."""
    return "rows" if array.ndim - 1 in summed else "columns"


def as_matrix(array: zarr.Array[Any], summed: tuple[int, ...], of: str) -> StoredArray:
    """The array as the matrix whose columns, or rows, are what ``of`` says, and whose other side is summed over."""
    others = tuple(axis for axis in range(array.ndim) if axis not in summed)
    rows, columns = (summed, others) if of == "columns" else (others, summed)
    return array if (rows, columns) == ((0,), (1,)) else Flattened(array, rows, columns)


def check_summed_alike(x: zarr.Array[Any], y: zarr.Array[Any], axes: Sequence[tuple[int, ...]]) -> None:
    """Raise ShapeError where the axes of two arrays that are summed over have other lengths."""
    of_x, of_y = ([array.shape[axis] for axis in some] for array, some in zip((x, y), axes, strict=True))
    if of_x != of_y:
        sides = [Along(role, array, some[0]) for role, array, some in zip("XY", (x, y), axes, strict=True)]
        raise ShapeError(
            f"the axes that are summed over have the lengths {_lengths(of_x)} in {name_of(x)} and {_lengths(of_y)} in"
            f" {name_of(y)}; both must have the same{ends_told(*sides) if len(of_x) == len(of_y) == 1 else ''}"
        )


def _lengths(sides: Sequence[int]) -> str:
    return " × ".join(map(str, sides))


def broadcast_weights(
    array: zarr.Array[Any], summed: tuple[int, ...], weights: Mapping[int, np.ndarray]
) -> np.ndarray:
    """One weight for each place of the axes that are summed over, flattened, from those along some of them: their
    products."""
    shape = [array.shape[axis] for axis in summed]
    whole = np.ones(shape)
    for axis, values in weights.items():
        sides = [len(values) if other == axis else 1 for other in summed]
        whole *= values.reshape(sides)
    return whole.reshape(math.prod(shape))
