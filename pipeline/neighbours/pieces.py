"""What finished blocks have found, kept beside the output until that is whole: a run that is stopped goes on there.

A file a block, named by its first item and the one behind its last. Its format, NumPy's, has checksums, so that what a
crash tore is not taken for a result: that block is computed again. Whatever sizes the blocks of an earlier run had, its
files count.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from tilewright import __version__
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.neighbours.options import NeighbourRequest, Sides
from tilewright.pipeline.spectral.passes import UNREADABLE
from tilewright.pipeline.store.appearance import appearance_of
from tilewright.pipeline.store.journal import write_whole
from tilewright.pipeline.transfer.files import with_remedy

FOLDER = "pieces"
"""In the folder of a growing output."""
REQUEST_NAME = "request.json"
"""Says of what the pieces are."""
MEANING = 2
"""To be raised whenever blocks of the same rows come out otherwise than by earlier code of the same release: 2, cosines
of rows that are very short or long."""
PIECE_NAME = re.compile(r"(\d+)-(\d+)\.npz")
HELD_NBYTES = 2**30
FACTS = "facts"
"""The array of a piece with its numbers: neighbours or pairs, and items with NaN."""


class Piece(NamedTuple):
    """A finished block of items."""

    first: int
    stop: int
    found: int
    """Neighbours, or pairs."""
    nan_rows: int


def _name_of(piece: Piece) -> str:
    return f"{piece.first}-{piece.stop}.npz"


def digest_of(request: NeighbourRequest, sides: Sides, device: str) -> str:
    """Equal for runs whose blocks find the same; empty where nobody can tell whether A or B is what it was."""
    looks = [appearance_of(array) for array in sides.arrays.values()]
    if not all(look.shows_files for look in looks):
        return ""
    said = [
        __version__,  # releases may sum in other orders
        MEANING,
        looks,
        [[int(side) for side in array.shape] for array in sides.arrays.values()],
        [str(array.dtype) for array in sides.arrays.values()],
        [request.work, request.k, request.above, request.below, request.count_only],
        [request.metric, request.of, request.exclude_self, request.precision, device],
        repr([getattr(array, "rows", None) for array in sides.arrays.values()]),
        repr([getattr(array, "columns", None) for array in sides.arrays.values()]),
    ]
    return hashlib.sha256(json.dumps(said, default=str).encode()).hexdigest()


def are_kept(folder: Path, digest: str) -> bool:
    """Whether blocks of such a run are kept in a folder."""
    try:
        found = json.loads((folder / REQUEST_NAME).read_text())
    except UNREADABLE:
        return False
    return bool(digest) and isinstance(found, dict) and found.get("digest") == digest


@dataclass
class Pieces:
    """The finished blocks of one run, in a folder of their own. They are written while others are looked for; until
    `settle` the last may be missing there.

    The last is put into the output at once, and is written only where that fails, or something else is to be done
    first (`save_last`): writing both takes twice as long as one."""

    folder: Path
    digest: str
    held_nbytes: int = HELD_NBYTES
    """What blocks have found is also held in memory, up to so much: it is put into the output soon."""
    _held: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "tilewright-pieces"))
    _written: Future[None] | None = None
    _last: tuple[str, Piece, dict[str, np.ndarray]] | None = None
    """That is held alone."""

    @classmethod
    def begin(cls, folder: Path, digest: str) -> Pieces:
        """Go on with those that are kept there of such a run, or begin anew. Raises StoreError."""
        pieces = cls(folder, digest)
        if are_kept(folder, digest):
            return pieces
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise pieces._cannot(error) from error
        pieces._write(REQUEST_NAME, json.dumps({"digest": digest}).encode())
        return pieces

    def finished(self) -> list[Piece]:
        """Those that are there and whole, in order; none overlaps another."""
        found: list[Piece] = []
        names = sorted(self._names(), key=lambda name: tuple(map(int, PIECE_NAME.fullmatch(name).groups())))  # type: ignore[union-attr]
        done = 0
        for name in names:
            first, stop = (int(number) for number in PIECE_NAME.fullmatch(name).groups())  # type: ignore[union-attr]
            arrays = self._read(name)
            if first < done or arrays is None or FACTS not in arrays:
                (self.folder / name).unlink(missing_ok=True)
                continue
            count, nan_rows = arrays[FACTS].tolist()
            found.append(Piece(first, stop, count, nan_rows))
            done = stop
        return found

    def keep(self, piece: Piece, arrays: Mapping[str, np.ndarray], *, last: bool = False) -> None:
        """A block is finished. last: none is left to be looked for, and this one is quickly found once more. Raises
        StoreError where it, or the one before, cannot be written."""
        self.settle()
        name, known = _name_of(piece), dict(arrays)
        if self.held_nbytes >= (nbytes := sum(array.nbytes for array in arrays.values())):
            self.held_nbytes -= nbytes
            self._held[name] = known
            if last:
                self._last = name, piece, known
                return
        self._written = self._writer.submit(self._save, name, piece, known)

    def save_last(self) -> None:
        """Begin to write the last block, if it is held alone, and a later run can make use of it."""
        if self._last is not None and self.digest:
            self._written = self._writer.submit(self._save, *self._last)
        self._last = None

    def _save(self, name: str, piece: Piece, arrays: dict[str, np.ndarray]) -> None:
        facts = {FACTS: np.array([piece.found, piece.nan_rows])}
        # To the file, not by way of memory: that would hold the interpreter's lock, which the output's writers need.
        self._write(name, lambda file: np.savez(file, **facts, **arrays))  # type: ignore[arg-type]

    def settle(self) -> None:
        """Wait until all finished blocks are written. Raises StoreError where one cannot be."""
        written = self._written  # which stays: another thread may wait for it, too
        if written is not None:
            written.result()

    def arrays(self, piece: Piece) -> dict[str, np.ndarray]:
        """What a block has found. Raises StoreError where it changed since, or cannot be written."""
        name = _name_of(piece)
        if (held := self._held.get(name)) is not None:
            return held
        self.settle()
        found = self._read(name)
        if found is None:
            raise StoreError(
                f"output: {self.folder} was written to, or damaged, while it was in use; see that the disk is whole,"
                " and run it again"
            )
        return found

    def each(self, pieces: list[Piece], name: str) -> Iterator[np.ndarray]:
        """One array of all of them, in order."""
        for piece in pieces:
            yield self.arrays(piece)[name]

    def close(self) -> None:
        """Write what is still to be written, or fail to; its error counts no more."""
        self._writer.shutdown()
        self._written = None
        self._held.clear()

    def drop(self) -> None:
        """Keep nothing."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.digest = ""

    def are_any(self) -> bool:
        """Whether a block is finished and written."""
        return bool(self._names())

    def _names(self) -> list[str]:
        return [entry.name for entry in self.folder.iterdir() if PIECE_NAME.fullmatch(entry.name)]

    def _read(self, name: str) -> dict[str, np.ndarray] | None:
        try:
            with np.load(self.folder / name, allow_pickle=False) as held:
                return dict(held)
        except UNREADABLE:
            return None

    def _write(self, name: str, data: bytes | Callable[[BinaryIO], None]) -> None:
        try:
            write_whole(self.folder / name, data)
        except OSError as error:
            raise self._cannot(error) from error

    def _cannot(self, error: OSError) -> StoreError:
        return StoreError(
            f"output: cannot keep what blocks have found, in {self.folder}: {with_remedy(error)}"
        )
