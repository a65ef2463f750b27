"""Checksums of what is stored of EOFs, one record beside the chunks of each array, and the audit by them.

A record is in no folder of a group but in those of its arrays: zarr-python warns of what it does not know among a
group's members, and looks at nothing beside chunks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zarr

from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.events import Listener
from tilewright.pipeline.plan.told import NOTHING_CHECKSUM, StoredObject
from tilewright.pipeline.product.audit import Audit, BadObject, changed_facts, faults_of
from tilewright.pipeline.product.ledger import array_facts, listed_objects, told_objects
from tilewright.pipeline.product.output import CHECKSUMS_NAME
from tilewright.pipeline.sealed_lines import sealed, unsealed
from tilewright.pipeline.store.arrays import open_array, write_unit
from tilewright.pipeline.store.new.groups import metadata_in
from tilewright.pipeline.store.objects import NotingStore
from tilewright.pipeline.store.region import chunks_in

VERSION = "eofs-1"
"""A record of another version cannot be read."""


@dataclass(frozen=True)
class BadElements(BadObject):
    """A stored object of an array of one dimension: its rows are places in that."""

    def __str__(self) -> str:
        return f"{self.file} (elements {self.rows[0]} to {self.rows[1] - 1}): {self.reason}"


def write_records(growing: Path, arrays: Iterable[zarr.Array[Any]], noting: NotingStore) -> None:
    """Put a record beside the chunks of each array of a growing group. noting: the store through which all of them were
    written. Raises OSError."""
    for array in arrays:
        objects = []
        for piece in _pieces(array):
            key = f"{array.path}/{array.metadata.encode_chunk_key(piece)}"
            objects.append(StoredObject(piece, *noting.noted.get(key, (0, NOTHING_CHECKSUM))))
        entry = {"version": VERSION, "array": array_facts(array), "objects": listed_objects(objects)}
        (growing / array.path / CHECKSUMS_NAME).write_text(sealed(entry) + "\n")


def audit_eofs(path: Path, name: str, names: Iterable[str], listener: Listener) -> Audit:
    """Compare all that is stored of EOFs in a local folder with the checksums of their records. names: of the arrays
    that a group of EOFs always has; others are looked at where they have a record.

    Raises
    ------
    StoreError
        An array has no record, or one that cannot be read; or a file cannot be looked at, which says nothing of what it
        holds.
    """
    start = time.perf_counter()
    changes: list[str] = []
    objects: list[tuple[zarr.Array[Any], StoredObject]] = []
    always = list(names)
    for each in sorted({*always, *_named_in(path)}):
        if not metadata_in(path / each):
            changes.append(f"those of {each} are missing")
            continue
        if each not in always and not (path / each / CHECKSUMS_NAME).exists():
            continue  # somebody added it
        array = open_array(path / each, ndim=0, role=each, or_more=True)
        facts, stored = _record(path / each, name)
        changed = changed_facts(array, facts)
        if changed:
            changes.append(f"of {each} {changed}")
        else:
            objects += [(array, one) for one in stored]
    bad = [_bad(*objects[number], reason) for number, reason in faults_of(objects, listener)]
    return Audit(
        name,
        "checksums",
        len(objects),
        sum(one.nbytes for _, one in objects),
        tuple(sorted(bad, key=lambda one: one.file)),
        time.perf_counter() - start,
        metadata="; ".join(changes),
    )


def _named_in(path: Path) -> set[str]:
    """The arrays with a record, and those that the group's consolidated metadata name."""
    metadata = metadata_in(path)
    consolidated = metadata.get("consolidated_metadata")
    named = consolidated.get("metadata") if isinstance(consolidated, dict) else None
    try:
        recorded = {record.parent.name for record in path.glob(f"*/{CHECKSUMS_NAME}")}
    except OSError as error:
        raise StoreError(f"C: cannot list {path}: {error.strerror or error}") from error
    return recorded | (set(named) if isinstance(named, dict) else set())


def _record(folder: Path, name: str) -> tuple[Any, tuple[StoredObject, ...]]:
    """What the array's metadata said, and its objects. Raises StoreError where no record says that."""
    try:
        entry = unsealed((folder / CHECKSUMS_NAME).read_text(errors="replace").removesuffix("\n"))
    except FileNotFoundError as error:
        raise StoreError(
            f"C: {folder.name} of {name} has no record of checksums, as those of earlier versions have none, and those"
            " whose record was removed; store the EOFs again (overwrite=True, --overwrite)"
        ) from error
    except OSError as error:
        raise StoreError(f"C: cannot read {folder / CHECKSUMS_NAME}: {error.strerror or error}") from error
    try:
        if entry is not None and entry["version"] == VERSION:
            return entry["array"], told_objects(entry["objects"])
    except (KeyError, TypeError, ValueError):
        pass  # told below
    raise StoreError(
        f"C: the record of checksums of {folder.name}, {folder / CHECKSUMS_NAME}, is damaged, or of another version of"
        f" Tilewright, so that nothing can be said of {name}; store the EOFs again (overwrite=True, --overwrite)"
    )


def _pieces(array: zarr.Array[Any]) -> list[tuple[int, ...]]:
    whole = tuple(slice(0, side) for side in array.shape)
    return [piece.chunk for piece in chunks_in(whole, write_unit(array))]


def _bad(array: zarr.Array[Any], stored: StoredObject, reason: str) -> BadObject:
    spans = [
        (index * side, min((index + 1) * side, length))
        for index, side, length in zip(stored.place, write_unit(array), array.shape, strict=True)
    ]
    file = f"{array_name(array)}/{array.metadata.encode_chunk_key(stored.place)}"
    if len(spans) == 2:
        return BadObject(file, spans[0], spans[1], reason)
    return BadElements(file, spans[0] if spans else (0, 1), (0, 1), reason)


def array_name(array: zarr.Array[Any]) -> str:
    """Its name in its group, also where it is opened by its own path."""
    return array.basename or Path(str(array.store_path).removeprefix("file://")).name
