"""What a stored product says of itself to who opens it: what it was made of, how, and whether that was checked; and the
coordinates of its sides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.errors import BaseZarrError

from tilewright import __version__
from tilewright.kernels.numbers import counted
from tilewright.pipeline.check.verify import Verification
from tilewright.pipeline.errors import TilewrightError
from tilewright.pipeline.store.arrays import UNREADABLE, name_of, open_array
from tilewright.pipeline.store.attributes import (
    coordinates_beside,
    dimension_names,
    place_of_coordinates,
    product_names,
)
from tilewright.pipeline.store.chunks import METADATA_NAMES
from tilewright.pipeline.store.journal import write_whole
from tilewright.pipeline.store.new.groups import (
    carry_coordinates,
    ended,
    format_around,
    renew_consolidated,
)
from tilewright.pipeline.store.objects import folder_of
from tilewright.pipeline.store.region import Flattened, Section, StoredArray, base_of, unmasked
from tilewright.pipeline.store.sources.mapped import ATTRIBUTES_NAME

PROVENANCE = "tilewright"
"""The attribute of C that says what it is."""
OPTIONS = "options"
"""Of that, what was asked for beside the product: of a Gram matrix."""


def record_provenance(
    array: zarr.Array[Any],
    factors: Mapping[str, StoredArray],
    transposed: tuple[bool, bool],
    made: Mapping[str, Any],
    verification: Verification | None,
    now: datetime | None = None,
) -> None:
    """Write the attributes `PROVENANCE` and ``history``, as CF's conventions have that, of a finished array that has no
    name yet. made: what else to say of it, for JSON. Raises what zarr does."""
    when = (now or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")
    names = {role: named(one) for role, one in factors.items()}
    operation = " ".join(role + "ᵀ" * turned for role, turned in zip("AB", transposed, strict=True))
    checked = None
    if verification is not None:
        checked = {
            "rounds": verification.rounds,
            "largest_error": verification.largest_error,
            "tolerance": verification.tolerance,
        }
    facts = {
        "version": __version__,
        "operation": operation,
        "inputs": names,
        **json.loads(json.dumps(dict(made), default=str)),
        "verification": checked,
    }
    told = ", ".join(f"{role} = {name}" for role, name in names.items())
    options = ", ".join(f"{name}={value!r}" for name, value in made.get(OPTIONS, {}).items())
    how = f" ({options})" if options else ""
    history = f"{when} tilewright {__version__}: {operation} of {told}{how}; {_said(verification)}"
    _add_attributes(array, {PROVENANCE: facts, "history": history})


def _said(verification: Verification | None) -> str:
    return "not verified" if verification is None else f"verified in {counted(verification.rounds, 'round')}"


def _add_attributes(array: zarr.Array[Any], found: Mapping[str, Any]) -> None:
    """Write attributes in one step, durably: a growing array without metadata could not go on."""
    folder = folder_of(array)
    if folder is None:
        ended(lambda: array.update_attributes(dict(found)))
        return
    if array.metadata.zarr_format == 3:
        path = folder / METADATA_NAMES[3]
        whole = json.loads(path.read_bytes())
        whole["attributes"] = {**whole.get("attributes", {}), **found}
    else:
        path = folder / ATTRIBUTES_NAME
        whole = {**(json.loads(path.read_bytes()) if path.exists() else {}), **found}
    write_whole(path, json.dumps(whole, indent=2).encode())


def named(array: StoredArray) -> str:
    """The name of a matrix, with its rows and columns where it is a part of one: `open_matrix` opens that."""
    if not isinstance(array, Section):
        return name_of(array)
    (top, bottom), (left, right) = array.rows, array.columns
    return f"{name_of(array)}[{top}:{bottom},{left}:{right}]"


def settle_in_group(
    final: Path, a: StoredArray, b: StoredArray, transpose_a: bool, transpose_b: bool
) -> list[str]:
    """Make a product that has its name by now, in a group of Zarr, complete for readers of that: the coordinates of its
    sides, as far as they lie beside A and B, and consolidated metadata. Nothing where it is in no group. Returns a
    sentence for what could not be done."""
    if format_around(final) is None:
        return []
    values: dict[str, np.ndarray] = {}
    attributes: dict[str, Any] = {}
    names = product_names(a, b, transpose_a, transpose_b) or ()
    for name, (factor, side) in zip(names, ((a, int(transpose_a)), (b, int(not transpose_b))), strict=False):
        found = None if name is None else coordinates_of(factor, side)
        if name is not None and found is not None:
            values[name], attributes[name] = found
    return carry_coordinates(final, values, attributes) + renew_consolidated(final, values)


def coordinates_of(array: StoredArray, side: int) -> tuple[np.ndarray, dict[str, Any]] | None:
    """The coordinates of a side that is one axis of a stored array, and their attributes; None where there are none."""
    name, view, base = dimension_names(array)[side], unmasked(array), base_of(array)
    axis = side
    if isinstance(view, Flattened):
        axes = (view.rows, view.columns)[side]
        if len(axes) > 1:
            return None
        axis = axes[0]
    place = None if name is None else coordinates_beside(base, name, base.shape[axis])
    if place is None:
        return None
    try:
        found = zarr.open_array(place, mode="r")
        values, attributes = np.asarray(found[:]), found.attrs.asdict()
    except (OSError, BaseZarrError, *UNREADABLE):
        return None
    first, last = (array.rows, array.columns)[side] if isinstance(array, Section) else (0, len(values))
    return values[first:last], {name: one for name, one in attributes.items() if name != "_ARRAY_DIMENSIONS"}


SAID_OF_COORDINATES = ("units", "calendar", "long_name", "standard_name", "axis", "positive")
"""Attributes of coordinates that go with them."""


def coordinates_along(array: StoredArray, side: int) -> dict[str, tuple[np.ndarray, dict[str, Any]]]:
    """By name, the coordinates of each axis that a side of a matrix is made of, as many as the side is long, and what
    is said of them: as far as they lie beside the array, in its group or its file."""
    view, base = unmasked(array), base_of(array)
    axes = (view.rows, view.columns)[side] if isinstance(view, Flattened) else (side,)
    names, shape = dimension_names(base), tuple(base.shape[axis] for axis in axes)
    first, last = (
        (array.rows, array.columns)[side]
        if isinstance(array, Section)
        else (0, int(np.prod(shape, dtype=int)))
    )
    found: dict[str, tuple[np.ndarray, dict[str, Any]]] = {}
    for number, axis in enumerate(axes):
        name, place = names[axis], place_of_coordinates(base, axis)
        if name is None or place is None:
            continue
        try:
            stored = open_array(place, ndim=1, role=name)
            values, attributes = np.asarray(stored[:]), stored.attrs.asdict()
        except (OSError, BaseZarrError, TilewrightError, *UNREADABLE):
            continue
        if values.shape != (base.shape[axis],):
            continue
        along = np.broadcast_to(values.reshape([-1 if at == number else 1 for at in range(len(axes))]), shape)
        said = {key: attributes[key] for key in SAID_OF_COORDINATES if isinstance(attributes.get(key), str)}
        found[name] = along.reshape(-1)[first:last], said
    return found
