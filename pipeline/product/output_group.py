"""Groups of Zarr as outputs: one grows beside its place and gets its name when it is whole."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import dask

from tilewright.pipeline.errors import OutputError, OutputExistsError, StoreError
from tilewright.pipeline.product.in_place import clear_marked
from tilewright.pipeline.product.output import (
    MARK_NAME,
    check_growing_place,
    check_no_link,
    check_place_free,
    exists_error,
    growing_folder,
    is_array_folder,
    partial_path,
    remove_growing,
    replaced_path,
)
from tilewright.pipeline.store.arrays import (
    UNFINISHED,
    UNFINISHED_NAME,
    Source,
    check_source,
    local_path,
    location,
    name_of,
)
from tilewright.pipeline.store.chunks import METADATA_NAMES
from tilewright.pipeline.store.locks import LEASE_NAME, take_lease
from tilewright.pipeline.store.new.groups import (
    GROUP_NAME,
    format_around,
    make_groups,
    metadata_in,
    renew_consolidated,
)
from tilewright.pipeline.store.new.names import check_folder_of, check_zarr_ending
from tilewright.pipeline.store.objects import Objects, objects_at
from tilewright.pipeline.store.probe import KEY_START
from tilewright.pipeline.store.region import StoredArray
from tilewright.pipeline.transfer.files import sync_files, sync_folder


def is_group_of(path: Path, kind: str) -> bool:
    """Whether a group with this attribute stands there, which says what it is: nothing else is replaced."""
    return not path.is_symlink() and is_of_kind(metadata_in(path), kind)


def is_of_kind(metadata: Any, kind: str) -> bool:
    """Whether these are the metadata of a group with this attribute."""
    attributes = metadata.get("attributes") if isinstance(metadata, Mapping) else None
    return isinstance(attributes, Mapping) and metadata.get("node_type") == "group" and kind in attributes


def check_local_place(
    out: Source | None, inputs: Mapping[str, StoredArray], kind: str, what: str, *, overwrite: bool
) -> Path:
    """The path of a group that can be written in a local folder, before any work.

    inputs: by role. kind: as for `is_group_of`. what: is stored, in words.

    Raises
    ------
    OutputExistsError
        Something stands there and ``overwrite`` is false, or it is no group of this kind.
    OutputError
        It is an input, or one of both lies in the other.
    StoreError
        It is no local path, or cannot be looked at.
    """
    check_source(out, "output")
    assert out is not None
    path = local_path(out)
    if path is None:
        raise StoreError(
            f"output: {name_of(out)} is no local path, and {what} are stored in local folders alone; choose one, and"
            " copy it from there"
        )
    check_group_free(path, kind, overwrite=overwrite)
    check_zarr_ending(path, "a Zarr group")
    check_no_link(path)
    if format_around(path) == 2:
        raise StoreError(
            f"output: {path} lies in a group of Zarr's format 2, and {what} are stored in format 3, which is not seen"
            " from there; choose a path outside that group"
        )
    check_growing_place(path)
    ours = path.resolve()
    for role, array in inputs.items():
        protocol, theirs = location(array)
        if protocol == "" and (ours == theirs or ours in theirs.parents or theirs in ours.parents):
            raise OutputError(
                f"output: {path} and {role}, {name_of(array)}, are the same or lie one inside the other; choose another"
                " path"
            )
    return path


def check_group_free(path: Path, kind: str, *, overwrite: bool) -> None:
    """Fail where something stands there that is not to be replaced: with ``overwrite`` anything but a group of this
    kind, an array too, which may be an input whose output was forgotten."""
    of_kind = is_group_of(path, kind)
    if of_kind and overwrite:
        check_folder_of(path)
        return
    try:
        check_place_free(path, overwrite=False)
    except OutputExistsError:
        if path.is_symlink():
            raise
        raise exists_error(str(path), replaceable=of_kind, found=_told_of(path)) from None


def _told_of(path: Path) -> str:
    """What stands at a local path, for an error."""
    if not path.is_dir():
        return "a file"
    if is_array_folder(path):
        return "an array, where a group is to be written"
    is_group = any((path / name).is_file() for name in (GROUP_NAME, METADATA_NAMES[3]))
    return "a group of something else" if is_group else "a folder of something else"


def missing_folders(path: Path | None) -> list[Path]:
    """The folders that would be made for an output at a local path, the innermost first."""
    return [] if path is None else [folder for folder in path.absolute().parents if not folder.exists()]


def remove_folders(folders: Sequence[Path]) -> None:
    """Remove folders that were made for an output, unless somebody else writes there by now."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def output_group(
    path: Path, kind: str, *, overwrite: bool, keeps: Callable[[Path], bool] = lambda growing: False
) -> Iterator[Path]:
    """A folder beside the output's path, ours and locked, that gets its name when the block has ended well.

    keeps: whether what a stopped run has left in the folder is gone on with, and so stays where the block ends by an
    error.

    Raises
    ------
    OutputExistsError
        Another run writes there, or something came to stand under the output's name.
    StoreError
        The place cannot be written.
    """
    folders = missing_folders(path)
    try:
        with growing_folder(path, keeps) as growing:
            yield growing.absolute()
            sync_files([each for each in growing.rglob("*") if each.is_file()], growing)
            check_group_free(path, kind, overwrite=overwrite)
            make_groups(path)
            displaced = None
            if path.exists():
                displaced = replaced_path(path)
                path.rename(displaced)
            growing.rename(path)
            (path / MARK_NAME).unlink()
            sync_folder(path.parent)
            renew_consolidated(path, within=[each.name for each in path.iterdir() if each.is_dir()])
            if displaced is not None:
                shutil.rmtree(displaced)
    except BaseException:
        if not keeps(partial_path(path)):
            remove_growing(path)
            remove_folders(folders)
        raise


def has_group_of(url: str, kind: str) -> bool:
    """As `is_group_of`, of what stands at a URL. Raises StoreError."""
    data = objects_at(url, "counts").get(METADATA_NAMES[3])
    try:
        return data is not None and is_of_kind(json.loads(data), kind)
    except ValueError:
        return False


def check_group_at_url(objects: Objects, kind: str, *, overwrite: bool) -> None:
    """Raise OutputExistsError where something stands at a URL that a group is not to replace: an array, or a group of
    this kind, without ``overwrite``, and whatever else, lest a typo delete a bucket."""
    if objects.get(UNFINISHED_NAME) == UNFINISHED:
        return
    data = objects.get(METADATA_NAMES[3])
    if data is None:
        others = [name for name in objects.names("") if name != LEASE_NAME and not name.startswith(KEY_START)]
        if not others:
            return
        raise OutputExistsError(
            f"output: {objects.name} holds {others[0]}, and no counts, so it is not replaced; choose another path"
        )
    try:
        metadata = json.loads(data)
    except ValueError:
        metadata = None
    ours = is_of_kind(metadata, kind) or (
        isinstance(metadata, Mapping) and metadata.get("node_type") == "array"
    )
    if not (overwrite and ours):
        ask = ", or ask to overwrite it (--overwrite)" if ours else ""
        raise OutputExistsError(f"output: {objects.name} exists; choose another path{ask}")


@contextmanager
def group_at_url(url: str, kind: str, *, overwrite: bool) -> Iterator[Path]:
    """A local folder whose files become the objects of a group at a URL when the block has ended well: its own metadata
    last, and until then with the mark of what is unfinished.

    Raises
    ------
    OutputExistsError
        Another run writes there, or something stands there that is not to be replaced.
    StoreError
        The place cannot be written.
    """
    objects = objects_at(url)
    lease = take_lease(objects)
    try:
        check_group_at_url(objects, kind, overwrite=overwrite)
        with tempfile.TemporaryDirectory(
            prefix="tilewright-group-", dir=dask.config.get("temporary-directory")
        ) as folder:
            yield Path(folder)
            objects.put(UNFINISHED_NAME, UNFINISHED)
            clear_marked(objects)
            names = [str(each.relative_to(folder)) for each in Path(folder).rglob("*") if each.is_file()]
            for name in sorted(names, key=lambda name: (name == METADATA_NAMES[3], name)):
                objects.put(name, (Path(folder) / name).read_bytes())
            objects.drop(UNFINISHED_NAME)
    finally:
        lease.release()
