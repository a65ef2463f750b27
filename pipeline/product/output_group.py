"""Groups of Zarr as outputs: one grows beside its place and gets its name when it is whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tilewright.pipeline.product.output import (
    MARK_NAME,
    check_place_free,
    growing_folder,
    partial_path,
    remove_growing,
    replaced_path,
)
from tilewright.pipeline.store.groups import make_groups, metadata_in
from tilewright.pipeline.transfer.files import sync_files, sync_folder


def is_group_of(path: Path, kind: str) -> bool:
    """Whether a group with this attribute stands there, which says what it is: nothing else is replaced."""
    found = metadata_in(path)
    attributes = found.get("attributes")
    return (
        found.get("node_type") == "group"
        and not path.is_symlink()
        and isinstance(attributes, Mapping)
        and kind in attributes
    )


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
    try:
        with growing_folder(path, keeps) as growing:
            yield growing.absolute()
            sync_files([each for each in growing.rglob("*") if each.is_file()], growing)
            if not (overwrite and is_group_of(path, kind)):
                check_place_free(path, overwrite=overwrite)
            make_groups(path)
            displaced = None
            if path.exists():
                displaced = replaced_path(path)
                path.rename(displaced)
            growing.rename(path)
            (path / MARK_NAME).unlink()
            sync_folder(path.parent)
            if displaced is not None:
                shutil.rmtree(displaced)
    except BaseException:
        if not keeps(partial_path(path)):
            remove_growing(path)
        raise
