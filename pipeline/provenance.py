"""What a stored product says of itself to who opens it: what it was made of, how, and whether that was checked; and the
coordinates of its sides."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from tilewright import __version__
from tilewright.kernels.numbers import counted
from tilewright.pipeline.check.verify import Verification
from tilewright.pipeline.store.arrays import name_of
from tilewright.pipeline.store.attributes import flattened_sides, product_names
from tilewright.pipeline.store.chunks import METADATA_NAMES
from tilewright.pipeline.store.coordinates import (
    OURS,
    SIDES,
    Gathered,
    flattened_with_coordinates,
    for_zarr,
    gathered_sides,
    is_long,
    left_behind,
    listed_sides,
    of_side,
)
from tilewright.pipeline.store.journal import write_whole
from tilewright.pipeline.store.new.groups import (
    carry_coordinates,
    ended,
    format_around,
    holds_values,
    is_of_alone,
    lengths_around,
    renew_consolidated,
)
from tilewright.pipeline.store.objects import folder_of
from tilewright.pipeline.store.region import Section, StoredArray
from tilewright.pipeline.store.sources.beside import Coordinates
from tilewright.pipeline.store.sources.mapped import ATTRIBUTES_NAME
from tilewright.pipeline.strict_json import strict

PROVENANCE = OURS
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
    """Write the coordinates of sides into the attributes of finished arrays that have no name yet, but for those that
    `settle_in_group` stores alone. Not before: an array's attributes go along with every task. final: what the name
    will be. Raises what zarr does."""
    a, b = factors["A"], factors["B"]
    many = [
        name
        for side in gathered_sides(a, b, *transposed)
        for name, one in _apart(final, side).items()
        if is_long(one)
    ]
    found = flattened_with_coordinates(a, b, *transposed, many) or {}
    if format_around(final) is None and (listed := listed_sides(a, b, *transposed)[0]):
        found = found | {SIDES: listed}
    for array in arrays if found else ():
        _add_attributes(array, found)


def first_attributes(
    path: Path | None, a: StoredArray, b: StoredArray, transpose_a: bool, transpose_b: bool
) -> dict[str, Any] | None:
    """Those of a new array for C, of its sides. path: where it is on a local disk: there `record_sides` adds the
    coordinates at the end; others have no name to wait for, and get them at once."""
    if path is not None:
        return flattened_sides(a, b, transpose_a, transpose_b)
    found = flattened_with_coordinates(a, b, transpose_a, transpose_b) or {}
    listed, _ = listed_sides(a, b, transpose_a, transpose_b)
    return found | ({SIDES: listed} if listed else {}) or None


def _apart(final: Path, side: Gathered) -> dict[str, Coordinates]:
    """The coordinates of flattened axes that are arrays of the group that a product lies in, by their names: those for
    which there is room. Nothing else may have the name there, or be as long along a dimension that is called so, since
    xarray opens no group in which one dimension has two lengths."""
    if format_around(final) is None:
        return {}
    lengths = lengths_around(final)
    return {
        name: one
        for name, one in side.levels.items()
        if lengths.get(name, {len(one.values)}) == {len(one.values)} and _is_free_or_holds(final, name, one)
    }


def _is_free_or_holds(final: Path, name: str, found: Coordinates) -> bool:
    """Whether nothing stands beside a product under this name but its own coordinates from before, or these do, as
    where X lies in that group."""
    place = final.with_name(name)
    return not os.path.lexists(place) or is_of_alone(place, final) or holds_values(place, found.values)


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
    finals: Sequence[Path], a: StoredArray, b: StoredArray, transpose_a: bool, transpose_b: bool
) -> list[str]:
    """Make a product that has its name by now, in a group of Zarr, complete for readers of that: the coordinates of its
    sides, as far as A and B have them, and consolidated metadata. Nothing where it is in no group. Returns a sentence
    for what could not be done, and for coordinates that are lost in any case.

    finals: its path, and those of what the same run has written beside it, which may be in other groups."""
    if not finals:
        return []
    final, *others = finals
    told = left_behind((a, int(transpose_a)), (b, int(not transpose_b)))
    told += [sentence for other in others for sentence in renew_consolidated(other)]
    if format_around(final) is None:
        return told + listed_sides(a, b, transpose_a, transpose_b)[1]
    values: dict[str, np.ndarray] = {}
    attributes: dict[str, Mapping[str, Any]] = {}
    names = product_names(a, b, transpose_a, transpose_b) or ()
    for name, (factor, side) in zip(names, ((a, int(transpose_a)), (b, int(not transpose_b))), strict=False):
        found = None if name is None else of_side(factor, side)
        if name is not None and found is not None:
            values[name], attributes[name] = for_zarr(found.values), found.attributes
    for flat in gathered_sides(a, b, transpose_a, transpose_b):
        levels = _apart(final, flat)
        every = flat.whole and len(levels) == len(flat.levels)
        index = {flat.name: flat.places} if every else {}
        for level, one in (levels | index).items():
            values[level], attributes[level] = for_zarr(one.values), one.attributes
    return told + carry_coordinates(final, values, attributes) + renew_consolidated(final, values)
