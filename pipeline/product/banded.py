"""A band of C: what may be asked for, and which arrays can take it."""

from __future__ import annotations

from typing import Any

import numpy as np
import zarr

from tilewright.kernels.arguments import shown
from tilewright.pipeline.errors import OptionError, OutputError, StoreError
from tilewright.pipeline.plan.band import Band
from tilewright.pipeline.store.arrays import name_of, write_unit
from tilewright.pipeline.store.waiting import answer_of

WINDOW = "window"
"""What the record of a product calls its band."""


def as_window(value: Any) -> tuple[int, int] | None:
    """A band as a caller gives it, as columns before the diagonal and behind it. Raises OptionError.

    >>> as_window(5), as_window((0, 3))
    ((5, 5), (0, 3))
    """
    if value is None:
        return None
    both = list(value) if isinstance(value, tuple | list) else [value, value]
    if len(both) != 2 or not all(
        isinstance(one, int | np.integer) and not isinstance(one, bool | np.bool_) and one >= 0
        for one in both
    ):
        raise OptionError(
            f"window={shown(value)}: give how many variables before and behind each are wanted, as one whole number of"
            " 0 or more for both, or as two, such as window=(3, 5)"
        )
    return int(both[0]), int(both[1])


def checked_band(window: tuple[int, int], shape: tuple[int, int]) -> Band:
    """The band of a C of this shape. Raises OptionError where it reaches beyond C."""
    band = Band(*window)
    rows, columns = shape
    if band.before > max(0, rows - 1) or band.after > max(0, columns - 1):
        asked = band.before if band.before == band.after else tuple(band)
        raise OptionError(
            f"window={asked}: the result is {rows} × {columns}, so that a band reaches from at most"
            f" {max(0, rows - 1)} columns before the diagonal to {max(0, columns - 1)} behind it; give a narrower one,"
            " or leave window (--window) out, and all of it is computed"
        )
    return band


def check_given_band(array: zarr.Array[Any], band: Band) -> None:
    """Raise OutputError unless an open array has the fill value 0 and holds nothing where a band leaves nothing: what
    is not in the band is 0, and is not written."""
    if array.fill_value not in (None, 0):
        raise OutputError(
            f"output: {name_of(array)} has the fill value {array.fill_value}, and what lies outside the band is 0: give"
            " an array with fill_value=0"
        )
    outside = stored_outside(array, band)
    if outside:
        name = array.metadata.encode_chunk_key(outside[0])
        raise OutputError(
            f"output: {name_of(array)} holds {name}, which lies outside the band and would stay; give an array"
            " that holds nothing there"
        )


def stored_outside(array: zarr.Array[Any], band: Band, role: str = "output") -> list[tuple[int, int]]:
    """The places of an array's stored objects that a band does not touch, in row order. role: what it is, for errors.
    Raises StoreError."""
    unit = write_unit(array)
    start = f"{array.path}/" if array.path else ""

    async def names() -> list[str]:
        return [name async for name in array.store.list_prefix(start)]

    try:
        found = answer_of(names(), name_of(array))
    except Exception as error:  # a server's library may raise anything
        raise StoreError(f"{role}: cannot list what {name_of(array)} holds: {error}") from error
    places = {_place_of(array, name.removeprefix(start)) for name in found} - {None}
    return sorted(
        place
        for place in places
        if place is not None and not band.touches(piece_region(place, unit, array.shape))
    )


def piece_region(
    place: tuple[int, ...], unit: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[slice, slice]:
    """The rows and columns of C that a stored piece has."""
    rows, columns = (
        slice(index * side, min((index + 1) * side, length))
        for index, side, length in zip(place, unit, shape, strict=True)
    )
    return rows, columns


def _place_of(array: zarr.Array[Any], key: str) -> tuple[int, int] | None:
    """The indices of a stored object by its name; None for what is none."""
    numbers = [part for part in key.replace(".", "/").split("/") if part.isdecimal()]
    if len(numbers) != 2:
        return None
    place = int(numbers[0]), int(numbers[1])
    return place if array.metadata.encode_chunk_key(place) == key else None
