"""What the passes of a run over X have found, kept beside its output until that is whole: a run that is stopped goes
on from there, and loses the pass that was under way.

Kept are the moments of the first pass, of each step of the iteration the block and its image, and of a step that was
not done the thin matrices in between. The iteration itself is cheap, and is gone through again: it asks for the same
blocks, to rounding, and gets the images that are there. A block that differs by more was asked for by another run: its
image, and those behind it, are computed anew.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from tilewright.kernels.passes.moments import Moments
from tilewright.kernels.tolerance import unit_roundoff
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.gram.options import Matrices
from tilewright.pipeline.product.audit import audit_by_checksums, record_of
from tilewright.pipeline.spectral.options import EofRequest
from tilewright.pipeline.store.appearance import appearance_of
from tilewright.pipeline.store.attributes import masks_of
from tilewright.pipeline.store.journal import write_whole
from tilewright.pipeline.transfer.files import with_remedy

VERSION = 1
REQUEST_NAME = "request.json"
"""Says of what the passes are."""
MOMENTS, UNDER_WAY = "moments.npz", "under-way.json"

UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)
"""What a file that a crash tore may raise."""

SAME = 8.0
"""Times the unit roundoff of the products: how far two blocks may be apart that are the same."""


def digest_of(
    request: EofRequest, matrices: Matrices, weights: np.ndarray | None, dtype: np.dtype, how: Any
) -> str:
    """Equal for runs whose passes find the same; empty where nobody can tell whether X is what it was.

    weights: of the variables. how: the method, and the side that it runs on. Tolerance and number of passes are not
    part of it: with others, a run may go on for longer.
    """
    x, search = matrices.arrays["X"], request.search
    look = appearance_of(x)
    if not look.shows_files:
        return ""
    vectors = [each for each in (weights, matrices.weights) if each is not None]
    said = [
        VERSION,
        look,
        repr(masks_of(x)),
        [matrices.of, [int(side) for side in x.shape], request.center, request.scale, request.constant],
        [weights is None, matrices.weights is None],
        [hashlib.sha256(np.ascontiguousarray(each).tobytes()).hexdigest() for each in vectors],
        repr(matrices.treatments["X"].missing),
        [search.k, search.seed, dtype.str, search.precision],
        how,
    ]
    return hashlib.sha256(json.dumps(said, default=str).encode()).hexdigest()


def are_kept(folder: Path, digest: str) -> bool:
    """Whether passes of such a run are kept in a folder, at least the first."""
    try:
        found = json.loads((folder / REQUEST_NAME).read_text())
    except UNREADABLE:
        return False
    ours = bool(digest) and isinstance(found, dict) and found.get("digest") == digest
    return ours and (folder / MOMENTS).is_file()


@dataclass
class Passes:
    """The passes of one run, in a folder of their own."""

    folder: Path
    digest: str
    """As `digest_of`; empty: nothing is kept."""
    _under_way: dict[str, str] = field(default_factory=dict)
    """Of the step that is not done: names of thin matrices that are, by their pass."""
    reused: int = 0
    """Passes that were not made, since an earlier run had made them."""

    @classmethod
    def begin(cls, folder: Path, digest: str) -> Passes:
        """Go on with those that are kept there of such a run, or begin anew. Raises StoreError."""
        passes = cls(folder, digest)
        if are_kept(folder, digest):
            try:
                found = json.loads((folder / UNDER_WAY).read_text())
                passes._under_way = {str(int(number)): str(name) for number, name in found.items()}
            except (*UNREADABLE, AttributeError):
                passes._under_way = {}
            return passes
        shutil.rmtree(folder, ignore_errors=True)
        if digest:
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                raise passes._cannot(error) from error
            passes._write(REQUEST_NAME, json.dumps({"digest": digest}).encode())
        return passes

    def moments(self) -> Moments | None:
        """Of the variables, if they are known."""
        found = self._read(MOMENTS)
        if found is None or {*found} != {each.name for each in fields(Moments)}:
            return None
        self.reused += 1
        return Moments(**found)

    def keep_moments(self, moments: Moments) -> None:
        self._write_arrays(MOMENTS, {each.name: getattr(moments, each.name) for each in fields(moments)})

    def image(self, step: int, block: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
        """The image of a block, if this step was done with the same one. dtype: of the products."""
        found = self._read(_of_step(step))
        if found is None or {*found} != {"block", "image"} or found["image"].shape != block.shape:
            return None
        if not is_same_block(found["block"], block, dtype):
            return None
        self.reused += 2
        return found["image"]

    def keep_image(self, step: int, block: np.ndarray, image: np.ndarray) -> None:
        """A step is done: what it was made of is needed no more."""
        self._write_arrays(_of_step(step), {"block": block, "image": image})
        self.forget_under_way()

    def is_done(self, number: int, name: str, array: zarr.Array[Any] | None) -> bool:
        """Whether the thin matrix of this pass is there, with the bytes that were written."""
        if array is None or self._under_way.get(str(number)) != name:
            return False
        try:
            record, finished = record_of(array)
            sound = record is not None and finished
            sound = sound and audit_by_checksums(array, record, lambda event: None).passed  # type: ignore[arg-type]
        except StoreError:
            return False
        self.reused += sound
        return sound

    def keep_under_way(self, number: int, name: str) -> None:
        """A pass has stored a thin matrix under a name; others of that name are gone."""
        held = {other: its for other, its in self._under_way.items() if its != name}
        self._under_way = {**held, str(number): name}
        self._write(UNDER_WAY, json.dumps(self._under_way).encode())

    def forget_under_way(self, first: int = 0) -> None:
        """From this pass on nothing is there any more."""
        left = {number: name for number, name in self._under_way.items() if int(number) < first}
        if left != self._under_way:
            self._under_way = left
            self._write(UNDER_WAY, json.dumps(left).encode())

    def drop(self) -> None:
        """Keep nothing."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.digest = ""

    def _read(self, name: str) -> dict[str, np.ndarray] | None:
        if not self.digest:
            return None
        try:
            data = io.BytesIO((self.folder / name).read_bytes())
            with np.load(data, allow_pickle=False) as held:
                return dict(held)
        except UNREADABLE:
            return None

    def _write_arrays(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        if not self.digest:
            return
        data = io.BytesIO()
        np.savez(data, **arrays)  # type: ignore[arg-type]
        self._write(name, data.getvalue())

    def _write(self, name: str, data: bytes) -> None:
        if not self.digest:
            return
        try:
            write_whole(self.folder / name, data)
        except OSError as error:
            raise self._cannot(error) from error

    def _cannot(self, error: OSError) -> StoreError:
        return StoreError(f"output: cannot keep what passes found, in {self.folder}: {with_remedy(error)}")


def _of_step(step: int) -> str:
    return f"step-{step:06d}.npz"


def is_same_block(one: np.ndarray, other: np.ndarray, dtype: np.dtype) -> bool:
    """Whether two thin matrices are the same to the rounding of products of a dtype."""
    if one.shape != other.shape:
        return False
    size = float(np.abs(other).max(initial=0.0))
    apart = float(np.abs(one - other).max(initial=0.0))
    return bool(apart <= SAME * unit_roundoff(dtype) * size)
