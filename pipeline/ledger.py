"""The record of finished tiles: what lets a run that was stopped go on where it stood.

A file beside the growing output holds one line of JSON for what is being computed and one for each stored tile. The
submitting process alone appends to it, after a tile's task has returned, so a line is never ahead of the data; a
crash loses at most the line of a tile that is stored already, which is then computed once more with the same bytes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zarr
from zarr.storage import LocalStore

from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.plan import Geometry, MatmulPlan

FILE_NAME = "tilewright-ledger.jsonl"
VERSION = 2


@dataclass(frozen=True)
class Past:
    """What an earlier run left."""

    geometry: Geometry
    """What a plan has to keep to go on."""
    c_unit: tuple[int, int]
    """Sides of the stored pieces of C that its tiles are whole ones of."""
    finished: frozenset[int]


def fingerprint(a: zarr.Array[Any], b: zarr.Array[Any], plan_facts: dict[str, Any]) -> str:
    """A digest of everything that decides the bytes of the result: the inputs as they lie stored, and the request.

    Of local arrays it takes the metadata and the number, sizes and times of the stored files; of others the
    metadata alone, since listing a remote store can take longer than the product.
    """
    digest = hashlib.sha256(json.dumps(plan_facts, sort_keys=True).encode())
    for array in (a, b):
        digest.update(os.fsencode(str(array.store_path)))  # file names may hold bytes that are no UTF-8
        digest.update(json.dumps(array.metadata.to_dict(), sort_keys=True, default=str).encode())
        if isinstance(array.store, LocalStore):
            digest.update(repr(_stored_files(array.store.root / array.path)).encode())
    return digest.hexdigest()


def _stored_files(root: Path) -> tuple[int, int, int]:
    """Number of files below ``root``, their bytes, and the newest modification time in nanoseconds."""
    count = nbytes = newest = 0
    for folder, _, names in os.walk(root):
        for name in names:
            facts = os.stat(os.path.join(folder, name))
            count, nbytes, newest = count + 1, nbytes + facts.st_size, max(newest, facts.st_mtime_ns)
    return count, nbytes, newest


class Ledger:
    """The open record of one run; ``record`` is durable when it returns."""

    def __init__(
        self, folder: Path, digest: str, plan: MatmulPlan, finished: frozenset[int] = frozenset()
    ) -> None:
        """Begin the record in the output's folder, with the tiles that an earlier run finished.

        The whole record is written anew and put in place in one step: appending behind a line that a crash tore
        would make that line swallow the next.
        """
        self._path = folder / FILE_NAME
        head = {
            "version": VERSION,
            "fingerprint": digest,
            "tile": [plan.tile_rows, plan.tile_columns],
            "panel_depth": plan.panel_depth,
            "k_parts": plan.k_parts,
            "cell": [plan.cell_rows, plan.cell_columns],
            "c_unit": list(plan.c_unit),
        }
        lines = [json.dumps(head), *(json.dumps({"tile": index}) for index in sorted(finished))]
        draft = self._path.with_suffix(".draft")
        with self._writing():
            draft.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            draft.replace(self._path)
            # Unbuffered: of a line that was refused, nothing is left for closing to stumble over.
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 -- lives as long as the run; see close

    def record(self, index: int) -> None:
        """Note that the tile of this index is stored. Raises StoreError where the disk takes no more."""
        line = f"{json.dumps({'tile': index})}\n".encode()
        with self._writing():
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"output: cannot write the record of finished tiles, {self._path}: {error}"
            ) from error

    def close(self) -> None:
        self._file.close()

    def remove(self, folder: Path) -> None:
        """The record has served, or is not to be trusted; ``folder`` is where the output stands by now."""
        self.close()
        (folder / FILE_NAME).unlink(missing_ok=True)


def read_past(folder: Path, digest: str) -> Past | None:
    """What the record in ``folder`` says, if it speaks of the same product; None otherwise, or where it is damaged.

    A torn last line, left by a crash in the middle of a write, is passed over: its tile is computed again.
    """
    try:
        lines = (folder / FILE_NAME).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    entries = []
    for line in lines:
        try:
            entries.append(json.loads(line))
        except (ValueError, RecursionError):  # no JSON; digits, or brackets, past what Python reads
            break
    try:
        head, *rest = entries
        if head["version"] != VERSION or head["fingerprint"] != digest:
            return None
        (rows, columns), (unit_rows, unit_columns), (cell_rows, cell_columns) = (
            head[name] for name in ("tile", "c_unit", "cell")
        )
        past = Past(
            Geometry(rows, columns, head["panel_depth"], head["k_parts"], cell_rows, cell_columns),
            (unit_rows, unit_columns),
            frozenset(entry["tile"] for entry in rest),
        )
    except (KeyError, TypeError, ValueError):
        return None
    positive = all(isinstance(number, int) and number > 0 for number in past.geometry + past.c_unit)
    return past if positive and all(isinstance(tile, int) and tile >= 0 for tile in past.finished) else None
