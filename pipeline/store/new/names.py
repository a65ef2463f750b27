"""Where an output may not go: by a name of another format, since a folder of Zarr's gets it; into a closed folder."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.store.arrays import name_of, zip_mode

OTHER_ENDINGS = {
    **dict.fromkeys((".csv", ".tsv", ".txt"), "a table of text"),
    **dict.fromkeys((".parquet", ".pq"), "a file of Parquet"),
    **dict.fromkeys((".npy", ".npz"), "a file of NumPy"),
    **dict.fromkeys((".nc", ".nc4"), "a file of NetCDF"),
    **dict.fromkeys((".h5", ".hdf5", ".h5ad"), "a file of HDF5"),
    **dict.fromkeys((".feather", ".arrow"), "a file of Arrow"),
    ".json": "a file of JSON",
}
"""Endings of names by which a user asks for another format than Zarr, and what has them, in words."""


def check_zarr_ending(target: str | os.PathLike[str], what: str) -> None:
    """Raise StoreError for a name that ends as files of another format do: what is written is a folder of Zarr's.

    what: is written, in words.
    """
    name = PurePosixPath(os.fspath(target))
    ending = name.suffix.lower()
    if ending in OTHER_ENDINGS:
        raise StoreError(
            f"output: {name_of(target)} ends as {OTHER_ENDINGS[ending]} does, and what is written is {what}; name it"
            f" {name.stem}.zarr, and for {ending} open it by xarray or zarr, and write it from there"
        )


def check_no_zip(target: str | os.PathLike[str]) -> None:
    """Raise StoreError for the name of a ZIP file."""
    if os.fspath(target).rstrip("/").endswith(".zip") and zip_mode(target) is None:
        raise StoreError(
            f"output: {name_of(target)} names a ZIP file, which one writer alone can write to, and each task would be"
            " another; name a folder, such as C.zarr, and pack it once it is whole"
        )


def check_folder_of(path: Path) -> None:
    """Raise StoreError where the folder that a local output lies in, or the nearest that is there, may not be written
    to."""
    folder = next((folder for folder in path.parents if folder.is_dir()), None)
    if folder is not None and not os.access(folder, os.W_OK | os.X_OK):
        raise StoreError(f"output: the folder {folder} is read-only; choose another path")
