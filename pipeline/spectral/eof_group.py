"""The group of Zarr that EOFs are stored in, as xarray and others read it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.storage import LocalStore

from tilewright.pipeline.product.output import MARK_NAME
from tilewright.pipeline.product.output_group import check_local_place, output_group
from tilewright.pipeline.spectral.audit import write_records
from tilewright.pipeline.store.arrays import Source
from tilewright.pipeline.store.coordinates import for_zarr
from tilewright.pipeline.store.new.groups import consolidated, ended, remove_all, writing
from tilewright.pipeline.store.objects import NotingStore
from tilewright.pipeline.store.region import StoredArray
from tilewright.pipeline.store.sources.beside import Coordinates

KIND = "tilewright_eofs"
"""The attribute of the group that says what it is: nothing else is replaced."""
THIN = "thin"
"""The folder of thin matrices, below a growing group."""
MODE = "mode"
"""The dimension of the EOFs, numbered from 1, as xeofs has it."""
CHUNK_NBYTES = 2**24


@dataclass(frozen=True)
class Dimensions:
    """Names of X's two sides."""

    samples: str
    variables: str

    @classmethod
    def of(cls, samples: str | None, variables: str | None) -> Dimensions:
        """X's own names where it has them; no two alike, nor like that of the EOFs."""
        first = samples or "sample"
        second = variables or "variable"
        first = f"{first}_" if first == MODE else first
        second = f"{second}_" if second == MODE else second
        return cls(first, f"{second}_2" if first == second else second)


def check_group_place(out: Source | None, x: StoredArray, *, overwrite: bool) -> Path:
    """As `output_group.check_local_place`, of EOFs of X."""
    return check_local_place(out, {"X": x}, KIND, "EOFs", overwrite=overwrite)


@contextmanager
def growing_group(
    path: Path, *, overwrite: bool, keeps: Callable[[Path], bool] = lambda thin: False
) -> Iterator[Path]:
    """As `output_group`, with a folder for thin matrices in it, which is removed at the end.

    keeps: whether that folder, of a stopped run, is gone on with.
    """
    with output_group(
        path, KIND, overwrite=overwrite, keeps=lambda growing: keeps(growing / THIN)
    ) as growing:
        # A group that was being written.
        remove_all(entry for entry in growing.iterdir() if entry.name not in (THIN, MARK_NAME))
        (growing / THIN).mkdir(exist_ok=True)
        yield growing
        shutil.rmtree(growing / THIN)
        ended(lambda: consolidated(zarr.open_group(growing, mode="r+", zarr_format=3)))


def write_group(
    growing: Path,
    dims: Dimensions,
    vectors: Mapping[str, np.ndarray],
    components: np.ndarray,
    scores: Iterator[np.ndarray],
    samples: int,
    dtype: np.dtype,
    attributes: Mapping[str, Any],
    coordinates: Mapping[str, Mapping[str, Coordinates]],
) -> None:
    """Fill a growing group.

    vectors: by name, one number an EOF, or a variable. components: k × variables. scores: blocks of rows, in order.
    coordinates: by dimension, then by name.
    Raises StoreError where the place cannot be written.
    """
    count = components.shape[0]
    item = dtype.itemsize

    def write() -> zarr.Group:
        noting = NotingStore(LocalStore(growing))
        arrays: list[zarr.Array[Any]] = []
        group = zarr.create_group(noting, zarr_format=3, attributes=dict(attributes))

        def array(name: str, shape: tuple[int, ...], kind: Any, names: tuple[str, ...], **about: Any) -> Any:
            row = max(1, item * (shape[1] if len(shape) > 1 else 1))
            chunks = tuple(max(1, min(side, CHUNK_NBYTES // row)) for side in shape)
            if name == "components":
                chunks = 1, max(1, min(shape[1], CHUNK_NBYTES // item))
            elif name == "scores":
                chunks = chunks[0], max(1, shape[1])
            arrays.append(
                group.create_array(
                    name, shape=shape, dtype=kind, chunks=chunks, dimension_names=names, attributes=about
                )
            )
            return arrays[-1]

        array(MODE, (count,), np.int64, (MODE,))[...] = np.arange(1, count + 1)
        for name, vector in vectors.items():
            of_modes = len(vector) == count and name not in OF_VARIABLES
            names = (MODE,) if of_modes else (dims.variables,)
            array(name, vector.shape, vector.dtype, names, long_name=LONG_NAMES[name])[...] = vector
        stored = array(
            "components", components.shape, dtype, (MODE, dims.variables), long_name=LONG_NAMES["components"]
        )
        stored[...] = components.astype(dtype)
        places = array(
            "scores", (samples, count), dtype, (dims.samples, MODE), long_name=LONG_NAMES["scores"]
        )
        row = 0
        for block in scores:
            places[row : row + len(block)] = block.astype(dtype)
            row += len(block)
        others = []
        for dimension, named in coordinates.items():
            for name, one in named.items():
                if name in group:
                    continue
                vector = for_zarr(one.values)
                array(name, vector.shape, vector.dtype, (dimension,), **one.attributes)[...] = vector
                others += [name] * (name != dimension)
        if others:  # xarray takes these for coordinates too
            group.update_attributes({"coordinates": " ".join(others)})
        write_records(growing, arrays, noting)
        return group

    with writing(growing):
        ended(write)


ALWAYS = (
    MODE,
    "eigenvalues",
    "explained_variance",
    "explained_variance_ratio",
    "singular_values",
    "residuals",
    "components",
    "scores",
)
"""Arrays of each group."""
OF_VARIABLES = ("mean", "factor")
LONG_NAMES = {
    "eigenvalues": "eigenvalues of the covariance matrix",
    "explained_variance": "variance that each EOF explains (its eigenvalue)",
    "explained_variance_ratio": "share of the total variance that each EOF explains",
    "singular_values": "singular values of the anomalies",
    "residuals": "norm of C v - lambda v, C being the covariance matrix",
    "mean": "mean of each variable, which was subtracted",
    "factor": "what each variable was multiplied by once its mean was subtracted",
    "components": "EOFs: eigenvectors of the covariance matrix, of length 1",
    "scores": "principal components: the anomalies projected onto the EOFs",
}
