"""What a stored product says of itself to who opens it: what it was made of, how, and whether that was checked; and the
coordinates of its sides."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import zarr

from tilewright import __version__
from tilewright.kernels.numbers import counted
from tilewright.pipeline.check.verify import Verification
from tilewright.pipeline.store.arrays import name_of
from tilewright.pipeline.store.attributes import (
    DIMENSIONS,
    FLATTENED,
    SideNames,
    dimension_names,
    flattened_sides,
    product_sides,
    sides_of,
)
from tilewright.pipeline.store.chunks import METADATA_NAMES
from tilewright.pipeline.store.coordinates import (
    OURS,
    SIDES,
    arrays_of_side,
    flattened_with_coordinates,
    is_long,
    listed_sides,
)
from tilewright.pipeline.store.journal import write_whole
from tilewright.pipeline.store.locks import in_turn
from tilewright.pipeline.store.new.groups import absolute, ended, format_around, in_names, renew_consolidated
from tilewright.pipeline.store.new.sides import (
    carry_coordinates,
    is_file_name,
    recorded_sides,
    sides_called,
    still_fit,
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
    arrays: Sequence[tuple[zarr.Array[Any], Path | None]],
    factors: Mapping[str, StoredArray],
    transposed: tuple[bool, bool],
) -> None:
    """Give the sides of finished arrays that have no name yet their names in the groups that these are for, and write
    the coordinates of sides into their attributes, but for those that `settle_in_group` stores alone. Not before: an
    array's attributes go along with every task, and only now it is known what else the group has.

    arrays: each with the path of its name, None where that is elsewhere. Raises what zarr does."""
    a, b = factors["A"], factors["B"]
    finals = [absolute(final) for _, final in arrays if final is not None]
    for array, final in arrays:
        called = product_sides(a, b, *transposed)
        apart: list[str] = []
        listed: dict[str, Any] = {}
        if final is None or format_around(final) is None:
            listed, _ = listed_sides(a, b, *transposed, called)
        else:
            called = sides_called(_in_one_folder(absolute(final), finals), a, b, *transposed)
            apart = [
                name
                for names, one in zip(called, sides_of(a, b, *transposed), strict=True)
                for name, coordinates in arrays_of_side(*one, names).items()
                if name in names.levels and coordinates is not None and is_long(coordinates)
            ]
        found = flattened_with_coordinates(a, b, *transposed, apart, called) or {}
        found |= {SIDES: listed} if listed else {}
        _add_attributes(array, found, [names.name for names in called])


def _in_one_folder(final: Path, finals: Iterable[Path]) -> list[Path]:
    """A path, and those of others that lie in the same folder."""
    return [final, *(other for other in finals if other != final and other.parent == final.parent)]


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


def _said(verification: Verification | None) -> str:
    return "not verified" if verification is None else f"verified in {counted(verification.rounds, 'round')}"


def _add_attributes(
    array: zarr.Array[Any], found: Mapping[str, Any], names: Sequence[str | None] = ()
) -> None:
    """Write attributes in one step, durably, if there are any: a growing array without metadata could not go on. names:
    of the array's dimensions, if they are others now; all None as if there were none."""
    folder = folder_of(array)
    renamed = any(name is not None for name in names) and tuple(names) != dimension_names(array)
    if not found and not renamed:
        return
    if folder is None:
        ended(lambda: array.update_attributes(dict(found)))
        return
    if array.metadata.zarr_format == 3:
        path = folder / METADATA_NAMES[3]
        whole = json.loads(path.read_bytes())
        whole["attributes"] = {**whole.get("attributes", {}), **found}
        if renamed:
            whole["dimension_names"] = list(names)
    else:
        path = folder / ATTRIBUTES_NAME
        whole = {**(json.loads(path.read_bytes()) if path.exists() else {}), **found}
        if renamed:
            whole[DIMENSIONS] = in_names(names)
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
    for what could not be done.

    finals: its path, and those of what the same run has written beside it, which may be in other groups."""
    if not finals:
        return []
    final = finals[0]
    told: list[str] = []
    if format_around(final) is None:
        told += listed_sides(a, b, transpose_a, transpose_b)[1]
    every = [absolute(one) for one in finals]
    for one in every:
        if format_around(one) is not None:
            found, stored = _settle_sides(_in_one_folder(one, every), a, b, transpose_a, transpose_b)
            told += found + renew_consolidated(one, stored)
    return told


def _settle_sides(
    finals: Sequence[Path], a: StoredArray, b: StoredArray, transpose_a: bool, transpose_b: bool
) -> tuple[list[str], list[str]]:
    """Store the coordinates of the sides of the first of these results beside it. Where another has come to stand there
    meanwhile under one of their names, the side is called otherwise. Returns sentences, and the names of what is
    stored."""
    final, (rows, columns) = finals[0], sides_of(a, b, transpose_a, transpose_b)
    found: dict[str, Coordinates | None] = {}
    with ExitStack() as turn:
        # Of two runs that end at once one would store its coordinates where the other has just found nothing.
        with suppress(OSError):
            turn.enter_context(in_turn(final.parent))
        called = recorded_sides(final)
        if called is None:
            return [], []
        if not still_fit(finals, called, (rows, columns)):
            before, called = called, sides_called(finals, a, b, transpose_a, transpose_b)
            _rename_sides(zarr.open_array(final, mode="r+"), before, called)
        for names, side in zip(called, (rows, columns), strict=True):
            found |= arrays_of_side(*side, names)
        told = carry_coordinates(finals, found)
    told += [
        f"a side of {final} is called {names.name}, since {usual.name}, or an axis of it, is something else in"
        f" {final.parent}, of other coordinates or another length"
        for names, usual in zip(called, product_sides(a, b, transpose_a, transpose_b), strict=True)
        if names.name != usual.name
    ]
    return told, [name for name, held in found.items() if held is not None and is_file_name(name)]


def _rename_sides(array: zarr.Array[Any], before: Sequence[SideNames], called: Sequence[SideNames]) -> None:
    """Call the sides of a stored result otherwise."""
    made: Any = array.attrs.asdict().get(FLATTENED, {})
    renamed = {}
    for old, new in zip(before, called, strict=True):
        if new.name is None or old.name not in made:
            continue
        levels = dict(zip(old.levels, new.levels, strict=True))
        one = made[old.name] | {"levels": list(new.levels)}
        if "arrays" in one:
            one["arrays"] = [levels.get(name, name) for name in one["arrays"]]
        renamed[new.name] = one
    _add_attributes(array, {FLATTENED: renamed} if renamed else {}, [names.name for names in called])
