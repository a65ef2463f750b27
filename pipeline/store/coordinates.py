"""Coordinates of arrays: where they are, as Zarr stores them, and which ones the sides of a matrix have."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.errors import BaseZarrError
from zarr.storage import LocalStore

from tilewright.kernels.arguments import shown
from tilewright.pipeline.store.arrays import UNREADABLE, name_of, place_of
from tilewright.pipeline.store.attributes import (
    DIMENSIONS,
    FLATTENED,
    MASKS,
    SideNames,
    dimension_names,
    flattened_sides,
    made_of,
    product_sides,
    sides_of,
)
from tilewright.pipeline.store.region import Flattened, Section, StoredArray, base_of, unmasked
from tilewright.pipeline.store.sources.beside import Coordinates, coordinates_with
from tilewright.pipeline.store.sources.mapped import as_json
from tilewright.pipeline.strict_json import strict

COMPRESSED = "compress"
"""The attribute of CF's conventions for a dimension that several are gathered into: their names. The array of that
dimension's name has the number of each place among all of theirs, the last one fastest."""

OURS = "tilewright"
"""The attribute that a result has, and that coordinates have which are stored beside it."""

LEFT_BEHIND = (
    DIMENSIONS,
    *MASKS,
    "scale_factor",
    "add_offset",
    "bounds",
    "climatology",
    "coordinates",
    "dtype",
    COMPRESSED,
    OURS,
)
"""Attributes that do not go along: those by which stored numbers are decoded, which is done here, and those that name
other arrays."""

EPOCH = "1970-01-01"
STEPS = {"days": "D", "hours": "h", "minutes": "m", "seconds": "s", "milliseconds": "ms", "microseconds": "us",
         "nanoseconds": "ns"}  # fmt: skip
"""By CF's names of units of time, the longest first, NumPy's."""
FINEST = "nanoseconds"


def along_axis(array: zarr.Array[Any], axis: int) -> Coordinates | None:
    """The coordinates of an axis of a stored array, one for each place: those that it has brought along, else the
    vector of the dimension's name and length in its group, in local files. None where there are none."""
    found, length = known_along(array, axis), int(array.shape[axis])
    if found is None or len(found.values) == length:
        return found
    return Coordinates(_padded(found.values, found.first, length), found.attributes)


def known_along(array: zarr.Array[Any], axis: int) -> Coordinates | None:
    """As `along_axis`, but of an array of which some places are read those of these places alone, and where they
    begin."""
    name, length = dimension_names(array)[axis], int(array.shape[axis])
    if name is None:
        return None
    carried = coordinates_with(array)
    found = _beside(array, name) if carried is None else carried.get(name)
    if found is None:
        return None
    values, attributes = _as_zarr_has(*found[:2])
    fits = values.ndim == 1 and found.first + len(values) <= length
    if not fits or (len(values) < length and carried is None):
        return None
    return Coordinates(values, attributes, found.first)


def _padded(values: np.ndarray, first: int, length: int) -> np.ndarray:
    """Coordinates of some places of an axis as those of all, where others are never looked at."""
    whole = np.zeros(length, values.dtype)
    whole[first : first + len(values)] = values
    return whole


def _beside(array: zarr.Array[Any], name: str) -> Coordinates | None:
    if not isinstance(array.store, LocalStore) or Path(place_of(array)).name == name:
        return None  # a coordinate has itself for its labels
    try:
        found = zarr.open_array(Path(place_of(array)).parent / name, mode="r")
        return Coordinates(np.asarray(found[:]), found.attrs.asdict()) if found.ndim == 1 else None
    except (OSError, BaseZarrError, *UNREADABLE):
        return None


def _as_zarr_has(values: np.ndarray, attributes: Mapping[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
    """Coordinates as numbers or text, and what is said of them, for JSON: packed ones unpacked, times counted from a
    date in CF's words. Other objects stay what they are, which Zarr does not store."""
    values = np.asarray(values)
    scale, offset = (attributes.get(name) for name in ("scale_factor", "add_offset"))
    if values.dtype.kind in "iuf" and (scale is not None or offset is not None):
        with suppress(TypeError, ValueError):  # what should be numbers is none
            values = values * float(1 if scale is None else scale) + float(0 if offset is None else offset)
    said = {
        str(name): strict(json.loads(json.dumps(one, default=as_json)))
        for name, one in attributes.items()
        if name not in LEFT_BEHIND and not (isinstance(one, float | np.floating) and one != one)
    }
    if values.dtype.kind in "mM":
        values, times = _counted(values)
        said |= times
    elif values.dtype.kind in "STO":
        values = _as_text(values)
    elif values.dtype.kind in "iufc":
        values = values.astype(values.dtype.newbyteorder("="), copy=False)
    return values, said


def _counted(values: np.ndarray) -> tuple[np.ndarray, dict[str, str]]:
    """Times, or spans of time, in the longest unit of which all are whole numbers; those with one that is not a time
    stay what they are."""
    if np.isnat(values).any():
        return values.astype(object), {}
    kind = values.dtype.kind
    unit = next(
        unit for unit, step in STEPS.items()
        if unit == FINEST or (values.astype(f"{kind}8[{step}]") == values).all()
    )  # fmt: skip
    counts = values.astype(f"{kind}8[{STEPS[unit]}]").astype(np.int64)
    if kind == "m":
        return counts, {"units": unit}
    return counts, {"units": f"{unit} since {EPOCH}", "calendar": "proleptic_gregorian"}


def _as_text(values: np.ndarray) -> np.ndarray:
    """Text of any kind of NumPy's as its own of a fixed width; other objects as they are."""
    found = values.tolist()
    try:
        texts = [one.decode() if isinstance(one, bytes) else one for one in found]
    except UnicodeDecodeError:
        return values
    if values.ndim != 1 or not all(isinstance(one, str) for one in texts):
        return values.astype(object)
    return np.array(texts, dtype=np.str_)


def is_stored(values: np.ndarray) -> bool:
    """Whether Zarr stores such coordinates."""
    return values.dtype.kind != "O"


def for_zarr(values: np.ndarray) -> np.ndarray:
    """Coordinates as they are given to Zarr: text in NumPy's strings of variable width, where it has these, since
    format 3 does not define those of a fixed width."""
    if values.dtype.kind == "U" and hasattr(np.dtypes, "StringDType"):
        return values.astype(np.dtypes.StringDType())
    return values


def of_sides(array: StoredArray, side: int) -> dict[str, Coordinates]:
    """By name, the coordinates of each axis that a side of a matrix is made of, one for each place of the axis."""
    base = base_of(array)
    names = dimension_names(base)
    if set(names) == {None}:
        return {}
    return {
        str(names[axis]): found
        for axis in axes_of(array, side)
        if (found := along_axis(base, axis)) is not None
    }


def axes_of(array: StoredArray, side: int) -> tuple[int, ...]:
    """The axes of the stored array that a side of a matrix is made of."""
    view = unmasked(array)
    return (view.rows, view.columns)[side] if isinstance(view, Flattened) else (side,)


def along_side(array: StoredArray, side: int) -> dict[str, Coordinates]:
    """By name, the coordinates of each axis that a side of a matrix is made of, as many as the side is long: those that
    Zarr stores."""
    base, axes = base_of(array), axes_of(array, side)
    names, shape = dimension_names(base), tuple(base.shape[axis] for axis in axes)
    first, last = span_of(array, side, int(np.prod(shape, dtype=int)))
    found = {}
    for number, axis in enumerate(axes):
        one = along_axis(base, axis)
        if one is None or not is_stored(one.values):
            continue
        ahead, behind = (int(np.prod(some, dtype=int)) for some in (shape[:number], shape[number + 1 :]))
        along = np.tile(np.repeat(one.values, behind), ahead)
        found[str(names[axis])] = Coordinates(along[first:last], one.attributes)
    return found


def of_side(array: StoredArray, side: int) -> Coordinates | None:
    """The coordinates of a side that is one axis of a stored array, and that Zarr stores; None where there are none."""
    axes = axes_of(array, side)
    found = along_axis(base_of(array), axes[0]) if len(axes) == 1 else None
    if found is None or not is_stored(found.values):
        return None
    first, last = span_of(array, side, len(found.values))
    return Coordinates(found.values[first:last], found.attributes)


def span_of(array: StoredArray, side: int, length: int) -> tuple[int, int]:
    return (array.rows, array.columns)[side] if isinstance(array, Section) else (0, length)


MOST_LISTED = 4096
"""Coordinates of an axis that are listed in an attribute, which everything that opens the array reads as a whole."""


def is_long(found: Coordinates) -> bool:
    """Whether there are more than an attribute is to list."""
    return len(found.values) > MOST_LISTED


def made_with_coordinates(
    array: StoredArray, side: int, apart: Collection[str] = (), levels: Sequence[str] | None = None
) -> dict[str, Any] | None:
    """As `attributes.made_of`, with the coordinates of each axis, by its name, their dtypes, and what is said of them.

    Numbers that JSON has not are texts, such as ``"nan"``. levels: what the axes are called in C, where it has levels.
    apart: those whose coordinates are arrays of the group, which are named in place of a list."""
    made = made_of(array, side)
    if made is None:
        return None
    named = dict(zip(made["dimensions"], levels or made["dimensions"], strict=True))
    found = {name: one for name, one in of_sides(array, side).items() if is_stored(one.values)}
    listed = {name: one for name, one in found.items() if named[name] not in apart}
    return (
        made
        | ({} if levels is None else {"levels": list(levels)})
        | {"coordinates": {name: _listed(one.values) for name, one in listed.items()}}
        | {"dtypes": {name: _dtype_named(one.values) for name, one in listed.items()}}
        | {"attributes": {name: dict(one.attributes) for name, one in listed.items() if one.attributes}}
        | (
            {"arrays": [named[name] for name in found if name not in listed]}
            if len(listed) < len(found)
            else {}
        )
    )


def _dtype_named(values: np.ndarray) -> str:
    """The dtype that a list of coordinates is read back as: of text NumPy's, since its width follows from that."""
    return "str" if values.dtype.kind in "UT" else values.dtype.name


def _listed(values: np.ndarray) -> Any:
    """Coordinates for JSON: complex ones, which it has not, as texts."""
    return strict(values.astype(str).tolist() if values.dtype.kind == "c" else values.tolist())


def many_along(array: StoredArray, side: int) -> dict[str, Coordinates]:
    """By name, the coordinates of the axes that a side is flattened from which are too many for an attribute."""
    if made_of(array, side) is None:
        return {}
    found = of_sides(array, side)
    return {name: one for name, one in found.items() if is_stored(one.values) and is_long(one)}


def flattened_with_coordinates(
    a: StoredArray,
    b: StoredArray,
    transpose_a: bool,
    transpose_b: bool,
    apart: Collection[str] = (),
    called: Sequence[SideNames] | None = None,
) -> dict[str, Any] | None:
    """As `attributes.flattened_sides`, with the coordinates of the axes. apart: as for `made_with_coordinates`."""
    made = flattened_sides(a, b, transpose_a, transpose_b, called)
    if made is None:
        return None
    sides = zip(
        called or product_sides(a, b, transpose_a, transpose_b),
        sides_of(a, b, transpose_a, transpose_b),
        strict=True,
    )
    return {
        FLATTENED: {
            names.name: made_with_coordinates(*one, apart, names.levels)
            for names, one in sides
            if names.name in made[FLATTENED]
        }
    }


def arrays_of_side(array: StoredArray, side: int, called: SideNames) -> dict[str, Coordinates | None]:
    """By each name that a side has in C, the coordinates which are stored under it in C's group; None where there are
    none, or Zarr does not store them. A flattened side has where each of its elements lies among all places of its
    axes, as CF has it, if each axis has coordinates."""
    if called.name is None:
        return {}
    if not called.levels:
        return {called.name: of_side(array, side)}
    base = base_of(array)
    along = [along_axis(base, axis) for axis in axes_of(array, side)]
    kept = [one if one is not None and is_stored(one.values) else None for one in along]
    first, last = span_of(array, side, math.prod(base.shape[axis] for axis in axes_of(array, side)))
    places = Coordinates(np.arange(first, last), {COMPRESSED: " ".join(called.levels)})
    return dict(zip(called.levels, kept, strict=True)) | {called.name: None if None in kept else places}


def lengths_of_side(array: StoredArray, side: int, called: SideNames) -> dict[str, int]:
    """By each name that a side has in C, how long that dimension is."""
    base = base_of(array)
    levels = [int(base.shape[axis]) for axis in axes_of(array, side)]
    whole = {} if called.name is None else {called.name: int(array.shape[side])}
    return dict(zip(called.levels, levels, strict=False)) | whole


def stored_at(place: Path) -> Coordinates | None:
    """What xarray takes for the coordinates of the dimension of that name, as it stands in a local group, but with the
    attribute by which CF gathers dimensions; None where there is no such array."""
    try:
        array = zarr.open_array(place.absolute(), mode="r")
        if dimension_names(array) != (place.name,):
            return None
        about = array.attrs.asdict()
        values, said = _as_zarr_has(np.asarray(array[:]), about)
    except (OSError, BaseZarrError, *UNREADABLE):
        return None
    return Coordinates(values, said | ({COMPRESSED: about[COMPRESSED]} if COMPRESSED in about else {}))


SIDES = "side_coordinates"
"""The attribute of a C outside of any group that has the coordinates of its sides, those of one axis."""


def listed_sides(
    a: StoredArray,
    b: StoredArray,
    transpose_a: bool,
    transpose_b: bool,
    called: Sequence[SideNames] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """What `SIDES` says of C = op(A) op(B): by the name of each dimension of one axis, as far as it has coordinates
    that Zarr stores, ``values``, ``dtype`` and ``attributes``. And a sentence for those that are too many. called: as
    for `attributes.flattened_sides`."""
    called = called or product_sides(a, b, transpose_a, transpose_b)
    found, told = {}, []
    for (name, _), (array, side) in zip(called, sides_of(a, b, transpose_a, transpose_b), strict=True):
        one = None if name is None else of_side(array, side)
        if one is None:
            continue
        if is_long(one):
            told.append(
                f"the coordinates {name}, {len(one.values)} of them, are left out: an attribute lists {MOST_LISTED} at"
                " most; in a group, such as C.zarr/result, they are stored beside the result"
            )
            continue
        found[str(name)] = {
            "values": _listed(one.values),
            "dtype": _dtype_named(one.values),
            "attributes": dict(one.attributes),
        }
    return found, told


def left_behind(*sides: tuple[StoredArray, int]) -> list[str]:
    """A sentence for each vector of coordinates along these sides that Zarr does not store."""
    told = {}
    for array, side in sides:
        for name, one in of_sides(array, side).items():
            if not is_stored(one.values):
                odd = next((each for each in one.values.tolist() if not isinstance(each, str)), None)
                instead = (
                    f"they are of several axes that xarray has stacked: give the array unstacked (.unstack({name!r})),"
                    " and say what is summed over (sum_over): axes are flattened here, and come back by"
                    " tilewright.open_xarray(..., unstack=True)"
                    if isinstance(odd, tuple)
                    else "give others (assign_coords) to have them there"
                )
                told[name_of(array), name] = (
                    f"the coordinates {name} of {name_of(array)} hold {shown(odd)}, which is neither a number, a time"
                    f" nor a text, and are left out of the result; {instead}"
                )
    return list(told.values())
