"""What a stored product says of itself to who opens it: what it was made of, how, and whether that was checked; and the
coordinates of its sides."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.errors import BaseZarrError

from tilewright import __version__
from tilewright.kernels.numbers import counted
from tilewright.pipeline.check.verify import Verification
from tilewright.pipeline.store.arrays import UNREADABLE, name_of
from tilewright.pipeline.store.attributes import flattened_sides, product_names
from tilewright.pipeline.store.chunks import METADATA_NAMES
from tilewright.pipeline.store.coordinates import (
    flattened_with_coordinates,
    for_zarr,
    left_behind,
    many_along,
    of_side,
)
from tilewright.pipeline.store.journal import write_whole
from tilewright.pipeline.store.new.groups import (
    carry_coordinates,
    ended,
    format_around,
    renew_consolidated,
)
from tilewright.pipeline.store.objects import folder_of
from tilewright.pipeline.store.region import Section, StoredArray
from tilewright.pipeline.store.sources.beside import Coordinates
from tilewright.pipeline.store.sources.mapped import ATTRIBUTES_NAME
from tilewright.pipeline.strict_json import strict

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


def record_sides(
    arrays: Iterable[zarr.Array[Any]],
    factors: Mapping[str, StoredArray],
    transposed: tuple[bool, bool],
    final: Path,
) -> None:
    """Write the coordinates of flattened sides into the attributes of finished arrays that have no name yet, but for
    those that `settle_in_group` stores. Not before: an array's attributes go along with every task. final: what the
    name will be. Raises what zarr does."""
    a, b = factors["A"], factors["B"]
    found = flattened_with_coordinates(a, b, *transposed, _stored_apart(final, a, b, *transposed))
    for array in arrays if found is not None else ():
        _add_attributes(array, found or {})


def first_attributes(
    path: Path | None, a: StoredArray, b: StoredArray, transpose_a: bool, transpose_b: bool
) -> dict[str, Any] | None:
    """Those of a new array for C, of its flattened sides. path: where it is on a local disk: there `record_sides` adds
    the coordinates at the end; others have no name to wait for, and get them at once."""
    made = flattened_with_coordinates if path is None else flattened_sides
    return made(a, b, transpose_a, transpose_b)


def _stored_apart(
    final: Path, a: StoredArray, b: StoredArray, transpose_a: bool, transpose_b: bool
) -> dict[str, Coordinates]:
    """The coordinates of flattened axes that are arrays of the group that a product lies in, by their names: many, and
    nothing else has that name there."""
    if format_around(final) is None:
        return {}
    every = many_along(a, int(transpose_a)) | many_along(b, int(not transpose_b))
    return {name: one for name, one in every.items() if _is_free_or_holds(final.with_name(name), one)}


def _is_free_or_holds(place: Path, found: Coordinates) -> bool:
    """Whether nothing stands in a place, or these coordinates do, as where X lies in that group."""
    if not os.path.lexists(place):
        return True
    try:
        there = zarr.open_array(place.absolute(), mode="r")
        return there.shape == found.values.shape and bool(np.array_equal(there[:], found.values))
    except (OSError, BaseZarrError, *UNREADABLE):
        return False


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
    write_whole(path, json.dumps(strict(whole), indent=2, allow_nan=False).encode())


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
    sides, as far as A and B have them, and consolidated metadata. Nothing where it is in no group. Returns a sentence
    for what could not be done, and for coordinates that are lost in any case."""
    told = left_behind((a, int(transpose_a)), (b, int(not transpose_b)))
    if format_around(final) is None:
        return told if flattened_sides(a, b, transpose_a, transpose_b) else []
    values: dict[str, np.ndarray] = {}
    attributes: dict[str, Mapping[str, Any]] = {}
    names = product_names(a, b, transpose_a, transpose_b) or ()
    for name, (factor, side) in zip(names, ((a, int(transpose_a)), (b, int(not transpose_b))), strict=False):
        found = None if name is None else of_side(factor, side)
        if name is not None and found is not None:
            values[name], attributes[name] = for_zarr(found.values), found.attributes
    for name, many in _stored_apart(final, a, b, transpose_a, transpose_b).items():
        values[name], attributes[name] = for_zarr(many.values), many.attributes
    return told + carry_coordinates(final, values, attributes) + renew_consolidated(final, values)
