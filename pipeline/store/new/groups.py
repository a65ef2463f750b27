"""The groups of Zarr that an output lies in: what readers of theirs find of it, and the folders between that are made
groups."""

from __future__ import annotations

import json
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import zarr
from zarr.errors import BaseZarrError, ContainsArrayError, ContainsGroupError

from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.store.chunks import METADATA_NAMES
from tilewright.pipeline.store.locks import in_turn
from tilewright.pipeline.store.sources.mapped import ATTRIBUTES_NAME
from tilewright.pipeline.transfer.files import read_file, sync_files, with_remedy

GROUP_NAME = ".zgroup"
CONSOLIDATED_NAME = ".zmetadata"
DIMENSIONS = "_ARRAY_DIMENSIONS"
"""The attribute in which xarray keeps the names of dimensions in format 2."""

UNREADABLE = (OSError, BaseZarrError, ValueError, TypeError, KeyError, AttributeError)
"""What opening something may raise that is no array."""
GROUP_ENDING, GROWING_ENDING = ".zarr", ".partial"
NEW_GROUP: Mapping[str, Any] = {
    "attributes": {},
    "zarr_format": 3,
    "node_type": "group",
    "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": {}},
}

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
    named = {} if dimension_names is None else {DIMENSIONS: in_names(dimension_names)}
    return {"fill_value": None, "zarr_format": 2, "attributes": named | (attributes or {})}


def in_names(dimension_names: Sequence[str | None]) -> list[str]:
    """Names of dimensions as format 2 has them, where each needs one."""
    return [name or f"dim_{axis}" for axis, name in enumerate(dimension_names)]


def renew_consolidated(final: Path, beside: Iterable[str] = (), within: Iterable[str] = ()) -> list[str]:
    """Tell consolidated metadata of the groups around a new output of it, and of arrays that were stored beside it, or
    within it where it is a group.

    Only what is new is put in: nothing else in the group is looked at, and other outputs may be growing there. Returns
    a sentence for what could not be done.
    """
    final = Path(os.path.realpath(absolute(final)))
    nodes = [final, *(final.with_name(name) for name in beside), *(final / name for name in within)]
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

        def read(name: str, node: Path = node) -> bytes | None:
            return read_file(node / name) if (node / name).exists() else None

        key = node.relative_to(folder).as_posix()
        kept["metadata"] |= entries_of(key, 2 if group is None else 3, read)
    _write_metadata(target, whole)


def entries_of(
    key: str, zarr_format: Literal[2, 3], read: Callable[[str], bytes | None]
) -> dict[str, dict[str, Any]]:
    """What consolidated metadata of a group in a format hold of an array, or a group, below it. key: its path from
    there. read: gives a file of its metadata; None where it has none of that name."""
    found = {}
    for name in (
        (METADATA_NAMES[3],) if zarr_format == 3 else (METADATA_NAMES[2], GROUP_NAME, ATTRIBUTES_NAME)
    ):
        data = read(name)
        if data is None:
            continue
        entry = json.loads(data)
        if zarr_format == 3:
            entry.pop("consolidated_metadata", None)
        found[key if zarr_format == 3 else f"{key}/{name}"] = entry
    return found


def _write_metadata(target: Path, whole: Mapping[str, Any]) -> None:
    """Write metadata in one step, durably: a power cut must not take what a group had."""
    draft = target.with_name(f"{target.name}.{uuid.uuid4().hex}.partial")
    draft.write_text(json.dumps(whole, indent=2))
    sync_files([draft], target.parent)
    draft.replace(target)


def make_groups(final: Path) -> list[str]:
    """Make groups of the folders between an output and the group that it lies in, as zarr does where it creates an
    array there: a folder without metadata hides what is below it from whoever lists the group. A group that is not
    there itself yet gets consolidated metadata too, by which xarray opens it without a warning.

    Returns a sentence for what could not be done.
    """
    around, zarr_format, between = _group_around(absolute(final))
    for folder in between if zarr_format is not None else []:
        create = partial(zarr.create_group, folder, zarr_format=zarr_format)
        try:
            if folder == around:
                _begin_group(folder)
                continue
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


def _begin_group(folder: Path) -> None:
    """Make a group of format 3 of a folder, with consolidated metadata that know of nothing yet."""
    folder.mkdir(parents=True, exist_ok=True)
    with in_turn(folder):
        if not (folder / METADATA_NAMES[3]).exists():
            _write_metadata(folder / METADATA_NAMES[3], NEW_GROUP)


def _group_around(final: Path) -> tuple[Path, Literal[2, 3] | None, list[Path]]:
    """The group of Zarr that an output would lie in, however deep; its format, None where there is none; and the
    folders between the two, the group's own first. They need not be there yet, and are no groups themselves.

    A folder with a name such as ``stats.zarr`` that is not there yet, or that has nothing in it but what came there by
    such outputs, is meant as a group: it becomes one, of format 3, along with the folders between."""
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
    else:
        for number, folder in enumerate(between):
            if folder.suffix == GROUP_ENDING and _may_become_group(folder, final):
                return folder, 3, between[number:]
    return final.parent, None, []


def _may_become_group(folder: Path, final: Path) -> bool:
    """Whether a folder holds nothing but arrays and groups of format 3, and outputs that grow or are set aside there.
    final: an output below it."""
    try:
        entries = list(folder.iterdir())
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return all(
        entry in final.parents
        or entry.suffix in (GROWING_ENDING, ".replaced")
        or (entry / METADATA_NAMES[3]).exists()
        for entry in entries
    )


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


@contextmanager
def writing(place: Path | str) -> Iterator[None]:
    """Raise StoreError where an output cannot be written."""
    try:
        yield
    except StoreError:
        raise
    except (OSError, BaseZarrError, ValueError) as error:
        told = with_remedy(error) if isinstance(error, OSError) else str(error)
        raise StoreError(f"output: cannot write {place}: {told}") from error


def consolidated(group: zarr.Group) -> zarr.Group:
    """A group of format 3 with consolidated metadata, by which xarray opens it without looking at each array."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that format 3 does not define them yet
        return zarr.consolidate_metadata(group.store)


def remove_all(entries: Iterable[Path]) -> None:
    """Remove files and folders, one after the other; of links, the links alone."""
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
