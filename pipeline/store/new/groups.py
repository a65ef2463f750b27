"""The groups of Zarr that an output lies in: what readers of theirs find of it, and the folders between that are made
groups."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import zarr
from zarr.errors import BaseZarrError, ContainsArrayError, ContainsGroupError

from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.store.chunks import METADATA_NAMES
from tilewright.pipeline.store.locks import in_turn
from tilewright.pipeline.transfer.files import read_file, sync_files

GROUP_NAME = ".zgroup"
CONSOLIDATED_NAME = ".zmetadata"
GROWING_ENDING = ".partial"
DIMENSIONS = "_ARRAY_DIMENSIONS"
"""The attribute in which xarray keeps the names of dimensions in format 2."""

Created = TypeVar("Created", bound="zarr.Array[Any] | zarr.Group")


def format_around(final: Path) -> Literal[2, 3] | None:
    """The format of the group that a local output would lie in; None where there is none. Raises StoreError."""
    return _group_around(absolute(final))[1]


def in_format(
    zarr_format: int | None, dimension_names: Sequence[str | None] | None, attributes: dict[str, Any] | None
) -> dict[str, Any]:
    """What is different in the format of the group that a new array lies in. In format 2 names of dimensions are an
    attribute, and xarray takes a fill value for a missing number, so there is none; what is not stored is 0 all the
    same."""
    if zarr_format != 2:
        return {"fill_value": 0, "dimension_names": dimension_names, "attributes": attributes}
    named = {}
    if dimension_names is not None:
        named[DIMENSIONS] = [name or f"dim_{axis}" for axis, name in enumerate(dimension_names)]
    return {"fill_value": None, "zarr_format": 2, "attributes": named | (attributes or {})}


def carry_coordinates(
    final: Path, sides: Mapping[str, np.ndarray], attributes: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Store the coordinates of a new array's dimensions beside it, in the group that it lies in, so that xarray finds
    them: those that are not there yet.

    sides: a vector for each name of a dimension. attributes: of each of these, by its name. Returns a sentence for what
    could not be done.
    """
    _, zarr_format, _ = _group_around(absolute(final))
    left = []
    for name, values in sides.items() if zarr_format is not None else []:
        place = final.with_name(name)
        if os.path.lexists(place):
            continue
        named: dict[str, Any] = {"dimension_names": [name]} if zarr_format == 3 else {"fill_value": None}
        own = dict(attributes.get(name, {})) | ({DIMENSIONS: [name]} if zarr_format == 2 else {})
        create = partial(
            zarr.create_array, place.absolute(), data=values, zarr_format=zarr_format, attributes=own,
            **named,
        )  # fmt: skip
        try:
            with suppress(ContainsArrayError, ContainsGroupError):  # another run was quicker
                ended(create)
        except (OSError, BaseZarrError, ValueError, TypeError) as error:
            left.append(
                f"{final} is whole, but the coordinates of {name} cannot be stored at {place}: {error}"
            )
    return left


def renew_consolidated(final: Path, beside: Iterable[str] = ()) -> list[str]:
    """Tell consolidated metadata of the groups around a new output of it, and of arrays that were stored beside it.

    Only what is new is put in: nothing else in the group is looked at, and other outputs may be growing there. Returns
    a sentence for what could not be done.
    """
    final = Path(os.path.realpath(absolute(final)))
    nodes = [final, *(final.with_name(name) for name in beside)]
    for folder in final.parents:
        try:
            if _group_metadata(folder) is None and not (folder / GROUP_NAME).exists():
                break
            with in_turn(folder):  # else of two runs that end at once one's entry may be lost
                _renew(folder, nodes)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = (
                f"{final} is whole, but the consolidated metadata of {folder} do not tell of it ({error}); renew them"
                f" by zarr.consolidate_metadata({str(folder)!r})"
            )
            return [problem]
        nodes.append(folder)
    return []


def _renew(folder: Path, nodes: Sequence[Path]) -> None:
    """Put the metadata of arrays and groups below a group into its consolidated ones, if it has any. Raises OSError,
    and what comes of metadata that are none."""
    old, group = folder / CONSOLIDATED_NAME, _group_metadata(folder)
    if group is not None:
        target, whole = folder / METADATA_NAMES[3], group
        kept = group.get("consolidated_metadata")
    elif old.exists():
        target, whole = old, json.loads(read_file(old))
        kept = whole
    else:
        return
    if not kept:
        return
    for node in nodes:
        key = node.relative_to(folder).as_posix()
        for name in (METADATA_NAMES[3],) if group is not None else (METADATA_NAMES[2], GROUP_NAME, ".zattrs"):
            if not (node / name).exists():
                continue
            found = json.loads(read_file(node / name))
            if group is not None:
                found.pop("consolidated_metadata", None)
            kept["metadata"][key if group is not None else f"{key}/{name}"] = found
    draft = target.with_name(f"{target.name}.{uuid.uuid4().hex}.partial")
    draft.write_text(json.dumps(whole, indent=2))
    sync_files([draft], folder)  # a power cut must not take what the group had
    draft.replace(target)


def make_groups(final: Path) -> list[str]:
    """Make groups of the folders between an output and the group that it lies in, as zarr does where it creates an
    array there: a folder without metadata hides what is below it from whoever lists the group.

    Returns a sentence for what could not be done.
    """
    around, zarr_format, between = _group_around(absolute(final))
    for folder in between if zarr_format is not None else []:
        create = partial(zarr.create_group, folder, zarr_format=zarr_format)
        try:
            with suppress(ContainsGroupError, ContainsArrayError):  # another process was quicker
                ended(create)
        except (OSError, BaseZarrError, ValueError) as error:
            problem = (
                f"{final} is whole, but readers of the group {around} do not list it: {folder} cannot be made a group:"
                f" {error}; once nothing is in the way of that, zarr.create_group({str(folder)!r},"
                f" zarr_format={zarr_format}) does"
            )
            return [problem]
    return []


def _group_around(final: Path) -> tuple[Path, Literal[2, 3] | None, list[Path]]:
    """The group of Zarr that an output would lie in, however deep; its format, None where there is none; and the
    folders between the two, the group's own first. They need not be there yet, and are no groups themselves."""
    if ".." in final.parts:  # what is above a path is not what it names before then
        final = Path(os.path.realpath(final))
    between: list[Path] = []
    for folder in final.parents:
        if folder.suffix == GROWING_ENDING:
            break  # what lies in an output that grows is not the group's until that has its name
        if os.path.exists(folder / METADATA_NAMES[3]):
            return folder, 3 if _group_metadata(folder) is not None else None, between
        if os.path.exists(folder / GROUP_NAME):
            return folder, 2, between
        if os.path.exists(folder / METADATA_NAMES[2]):
            break  # an array
        between.insert(0, folder)
    return final.parent, None, []


def _group_metadata(folder: Path) -> dict[str, Any] | None:
    """The metadata of a local group of format 3; None for anything else."""
    found = metadata_in(folder)
    return found if found.get("node_type") == "group" else None


def metadata_in(folder: Path) -> dict[str, Any]:
    """What the metadata of format 3 in a local folder say; nothing where there are none, or they cannot be read."""
    try:
        found = json.loads(read_file(folder / METADATA_NAMES[3]))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def absolute(path: Path) -> Path:
    """A local output's path from the root. Raises StoreError for a relative one where there is no working directory."""
    try:
        return path.absolute()
    except OSError as error:
        raise StoreError(
            f"output: {path} would stand in the working directory, which is not there any more; choose a path from the"
            " root, or change to another directory"
        ) from error


def ended(create: Callable[[], Created]) -> Created:
    """Create an array or a group; nothing of it is under way any more when this returns, or raises because of Ctrl-C.

    zarr-python writes on threads of its own. If Ctrl-C interrupts the thread that waits for them they go on, and could
    write into a folder that another run has locked by then. So a thread that gets no signals waits for them.
    """
    with ThreadPoolExecutor(1, "tilewright-create") as creating:
        return creating.submit(create).result()
