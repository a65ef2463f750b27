"""The groups of Zarr that an output lies in: what readers of theirs find of it, and the folders between that are made
groups."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import zarr
from zarr.errors import BaseZarrError, ContainsArrayError, ContainsGroupError

from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.store.chunks import METADATA_NAMES
from tilewright.pipeline.transfer.files import read_file

Created = TypeVar("Created", bound="zarr.Array[Any] | zarr.Group")


def group_note(path: Path) -> str | None:
    """One sentence about a local output that readers of the Zarr groups it lies in will not find there by themselves;
    None if they will."""
    try:
        folder, found, between = _group_around(absolute(path))
    except StoreError:  # so it is no output: whoever checks it says so
        return None
    if found == 2:
        below = "" if not between else ", in groups that are made of the folders between"
        return (
            f"output: {path} lies in a group of Zarr format 2, {folder}, and is written in format 3{below}: readers of"
            " that group may not list it. Choose a path outside of it, or create the array in the group and give it,"
            " open, from Python"
        )
    while found == 3 and (group := _group_metadata(folder)) is not None:
        if group.get("consolidated_metadata"):
            return (
                f"output: {folder} has consolidated metadata, which do not tell of {path}: once it is whole, renew them"
                f" by zarr.consolidate_metadata({str(folder)!r})"
            )
        folder = folder.parent
    return None


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
        if os.path.exists(folder / METADATA_NAMES[3]):
            return folder, 3 if _group_metadata(folder) is not None else None, between
        if os.path.exists(folder / ".zgroup"):
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
