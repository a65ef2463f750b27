"""What the sides of a result are called in the group of Zarr that it lies in, and their coordinates there.

In one group arrays with a dimension of one name share its length and its coordinates. So a side takes a name that
something else has there only where both are the same; else it has one that is free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.errors import BaseZarrError, ContainsArrayError, ContainsGroupError

from tilewright.pipeline.store.attributes import (
    DIMENSIONS,
    FLATTENED,
    SideNames,
    dimension_names,
    distinct_levels,
    product_sides,
    side_name,
    sides_of,
)
from tilewright.pipeline.store.coordinates import (
    COMPRESSED,
    OURS,
    arrays_of_side,
    for_zarr,
    lengths_of_side,
    stored_at,
)
from tilewright.pipeline.store.labels.times import instants
from tilewright.pipeline.store.new.groups import GROWING_ENDING, UNREADABLE, ended, format_around
from tilewright.pipeline.store.region import StoredArray
from tilewright.pipeline.store.sources.beside import Coordinates

CARRIED, CARRIED_OF = OURS, "coordinates_of"
"""The attribute of coordinates that were stored beside results, and what in it names these."""

REPLACED_ENDING = ".replaced"
"""Of what a new result has displaced and that is not removed yet."""


def sides_called(
    finals: Sequence[Path], a: StoredArray, b: StoredArray, transpose_a: bool, transpose_b: bool
) -> tuple[SideNames, SideNames]:
    """What the sides of C = op(A) op(B) are called in its group: as `product_sides` has it where each of these names is
    free there, or is of the same coordinates; else with the first number at which they are, such as ``lat_lon_3`` of
    ``lat_3`` and ``lon_3``.

    finals: the paths of C and of what the same run writes beside it, in one folder. Their own coordinates from before
    are replaced."""
    plain = product_sides(a, b, transpose_a, transpose_b)
    if format_around(finals[0]) is None:
        return plain
    sides = sides_of(a, b, transpose_a, transpose_b)
    lengths = _lengths_around(finals)
    rows = next(
        names for names in _candidates(plain[0], *sides[0]) if _fits(finals, names, *sides[0], lengths)
    )
    columns = next(
        names
        for names in _candidates(plain[1], *sides[1])
        if set(rows.every).isdisjoint(names.every) and _fits(finals, names, *sides[1], lengths)
    )
    return rows, columns


def still_fit(
    finals: Sequence[Path], called: Sequence[SideNames], sides: Sequence[tuple[StoredArray, int]]
) -> bool:
    """Whether the sides of a result that stands in its group can be called so, beside what the group has by now."""
    lengths = _lengths_around(finals)
    return all(_fits(finals, names, *side, lengths) for names, side in zip(called, sides, strict=True))


def _fits(
    finals: Sequence[Path],
    names: SideNames,
    array: StoredArray,
    side: int,
    lengths: Mapping[str, set[int]],
) -> bool:
    """Whether each name of a side is free, or of the same. lengths: of the dimensions of other arrays, by name."""
    own = lengths_of_side(array, side, names)
    return all(
        _is_free(finals, name, coordinates, own[name], lengths.get(name, set()))
        for name, coordinates in arrays_of_side(array, side, names).items()
    )


def _candidates(plain: SideNames, array: StoredArray, side: int) -> Iterator[SideNames]:
    yield plain
    for number in count(2):
        name = f"{side_name(array, side)}_{number}"
        yield SideNames(name, distinct_levels(array, side, {name}, f"_{number}"))


def _is_free(
    finals: Sequence[Path], name: str, coordinates: Coordinates | None, length: int, lengths: set[int]
) -> bool:
    """Whether a dimension of a result may have this name. lengths: of dimensions of other arrays that have it."""
    if not is_file_name(name):
        return not lengths or lengths == {length}
    place = finals[0].with_name(name)
    if place in finals:
        return False  # xarray opens no array of several dimensions that is called as one of them
    if not os.path.lexists(place) or _is_of_these(place, finals):
        # Coordinates would be those of the others too, which have none.
        return not lengths or (coordinates is None and lengths == {length})
    return coordinates is not None and lengths <= {length} and _holds(place, coordinates)


def is_file_name(name: str) -> bool:
    """Whether an array of this name can lie in a local group."""
    return name not in ("", ".", "..") and Path(name).name == name and "\0" not in name


def _lengths_around(finals: Sequence[Path]) -> dict[str, set[int]]:
    """How long the dimensions of the arrays in an output's group are, by their names, but for coordinates that it may
    replace, and for what has no name yet."""
    found: dict[str, set[int]] = {}
    folder = finals[0].parent
    for place in sorted(folder.iterdir()) if folder.is_dir() else ():
        if place in finals or place.suffix in (GROWING_ENDING, REPLACED_ENDING):
            continue
        try:
            array = zarr.open_array(place.absolute(), mode="r")
        except UNREADABLE:
            continue
        if _is_of_these(place, finals):
            continue
        for name, length in zip(dimension_names(array), array.shape, strict=True):
            if name is not None:
                found.setdefault(name, set()).add(length)
    return found


def recorded_sides(final: Path) -> tuple[SideNames, SideNames] | None:
    """What the sides of a stored result are called; None where it cannot be read."""
    try:
        array = zarr.open_array(final.absolute(), mode="r")
        made: Any = array.attrs.asdict().get(FLATTENED, {})
        rows, columns = (
            SideNames(name, tuple(made[name]["levels"]) if name in made else ())
            for name in dimension_names(array)
        )
    except UNREADABLE:
        return None
    return rows, columns


def carry_coordinates(finals: Sequence[Path], found: Mapping[str, Coordinates | None]) -> list[str]:
    """Store the coordinates of a new array's dimensions beside it, in the group that it lies in, so that xarray finds
    them: those that are not there yet, or are there from an earlier result and others. Returns a sentence for what
    could not be done.

    finals: the array's path, and those of what the same run has written beside it, in one folder."""
    final, left = finals[0], []
    zarr_format = format_around(final)
    for name, coordinates in found.items() if zarr_format is not None else []:
        if coordinates is None:
            continue
        if not is_file_name(name):
            left.append(
                f"{final} is whole, but the coordinates of {name!r} are left out: no array of a group can be called so"
            )
            continue
        place = final.with_name(name)
        there = os.path.lexists(place)
        same = there and _holds(place, coordinates)
        if there and not same and not _is_of_these(place, finals):
            left.append(
                f"{final} is whole, but something else stands at {place}, by which xarray labels its dimension {name};"
                " compute it anew (overwrite) to have that called otherwise"
            )
            continue
        named: dict[str, Any] = {"dimension_names": [name]} if zarr_format == 3 else {"fill_value": None}
        own = dict(coordinates.attributes) | {CARRIED: {CARRIED_OF: [one.name for one in finals]}}
        own |= {DIMENSIONS: [name]} if zarr_format == 2 else {}
        create = partial(
            zarr.create_array, place.absolute(), data=for_zarr(coordinates.values), zarr_format=zarr_format,
            attributes=own, overwrite=there, **named,
        )  # fmt: skip
        try:
            if same:
                _note_results(place, finals)
                continue
            with suppress(ContainsArrayError, ContainsGroupError):  # another run was quicker
                ended(create)
        except (OSError, BaseZarrError, ValueError, TypeError) as error:
            left.append(
                f"{final} is whole, but the coordinates of {name} cannot be stored at {place}: {error}"
            )
    return left


def _is_of_these(place: Path, finals: Sequence[Path]) -> bool:
    """Whether coordinates stand in a place that were stored beside these results, and are of no other: a new one may
    replace them."""
    results = _results_of(place)
    return bool(results) and set(results) <= {final.name for final in finals}


def _results_of(place: Path) -> list[str]:
    """The results beside which the coordinates in a place were stored; none of what somebody else stored."""
    try:
        said: Any = zarr.open_array(place.absolute(), mode="r").attrs.get(CARRIED)
    except UNREADABLE:
        return []
    found = said.get(CARRIED_OF) if isinstance(said, Mapping) else None
    return [str(name) for name in found] if isinstance(found, list) else []


def _note_results(place: Path, finals: Sequence[Path]) -> None:
    """Have coordinates in a place that were stored beside another result be of these too."""
    results = _results_of(place)
    new = [final.name for final in finals if final.name not in results]
    if results and new:
        array = zarr.open_array(place.absolute(), mode="r+")
        ended(lambda: array.update_attributes({CARRIED: {CARRIED_OF: [*results, *new]}}))


def _holds(place: Path, coordinates: Coordinates) -> bool:
    """Whether these coordinates stand in a place already."""
    there = stored_at(place)
    return there is not None and _same(there, coordinates)


def _same(one: Coordinates, other: Coordinates) -> bool:
    """Whether two vectors of coordinates label the same: times also where they are counted otherwise."""
    if one.values.shape != other.values.shape or one.attributes.get(COMPRESSED) != other.attributes.get(
        COMPRESSED
    ):
        return False
    if any(one.attributes.get(name) != other.attributes.get(name) for name in ("units", "calendar")):
        left, right = (instants(each.values, each.attributes) for each in (one, other))
        if left is None or right is None or left.calendar != right.calendar:
            return False
        return bool((np.abs(left.values - right.values) <= left.rounding + right.rounding).all())
    kinds = {"T" if each.values.dtype.kind in "UT" else each.values.dtype.kind for each in (one, other)}
    if kinds <= set("fc") or (not kinds.isdisjoint("fc") and kinds <= set("iufc")):
        return bool(np.array_equal(one.values, other.values, equal_nan=True))
    return (kinds == {"T"} or kinds <= set("iub")) and one.values.tolist() == other.values.tolist()
