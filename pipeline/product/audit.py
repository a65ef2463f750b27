"""Whether what is stored of a product is what was written: by checksums, object by object, or where there are none by
Freivalds' check, block by block."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import zarr

from tilewright.kernels.numbers import counted, format_nbytes
from tilewright.pipeline import config
from tilewright.pipeline.check.locate import wrong_blocks
from tilewright.pipeline.check.verify import find_damaged
from tilewright.pipeline.errors import DamagedProductError, OptionError, StoreError
from tilewright.pipeline.events import Caution, Listener, UnitDone, WorkDone, WorkPlanned
from tilewright.pipeline.plan.band import Band
from tilewright.pipeline.plan.told import StoredObject
from tilewright.pipeline.plan.transform import Epilogue
from tilewright.pipeline.product.banded import WINDOW, piece_region, stored_outside
from tilewright.pipeline.product.kept import with_their_groups
from tilewright.pipeline.product.ledger import (
    FILE_NAME,
    Past,
    Stored,
    array_facts,
    parsed,
    read_journal,
    read_record,
)
from tilewright.pipeline.product.output import CHECKSUMS_NAME
from tilewright.pipeline.store.arrays import name_of, write_unit
from tilewright.pipeline.store.journal import journal_in
from tilewright.pipeline.store.objects import fault_of, folder_of, objects_of
from tilewright.pipeline.store.region import StoredArray, chunks_in

if TYPE_CHECKING:
    from distributed import Client

GRAM = "gram"
"""What the record of a Gram matrix calls what is in it."""

MORE_THAN_PRODUCT = ("fused", "before")
"""What the record of a product calls the transforms of its factors and sums, and the C that these were added to."""

LINES_ADDED = ["", "", Epilogue(beta=1).digest()]
"""What ``fused`` is of a Gram matrix to which plain sums over more lines were added, and nothing else was made of
them."""

UNDECODABLE = "it cannot be decoded"
"""What is wrong with a chunk that nothing can be compared with, whatever C should hold."""

MOST_TOLD = 20
"""Bad objects that a text names."""


@dataclass(frozen=True)
class BadObject:
    """A stored object that is not what it should be."""

    file: str
    """Its name below the array."""
    rows: tuple[int, int]
    """First and last + 1 row of C in it."""
    columns: tuple[int, int]
    reason: str
    tile: int | None = None
    """The tile of the recorded plan that it belongs to; None where there is no record."""

    def __str__(self) -> str:
        (top, bottom), (left, right) = self.rows, self.columns
        return f"{self.file} (rows {top} to {bottom - 1}, columns {left} to {right - 1}): {self.reason}"


@dataclass(frozen=True)
class Audit:
    """What an audit found of a stored product."""

    name: str
    """Of the array."""
    by: str
    """``checksums``, or ``products`` where C was compared with A times B."""
    objects: int
    """Stored objects that were looked at: shards where C is sharded, else chunks."""
    nbytes: int
    """Bytes of C that were read for it: as stored by checksums, else decoded."""
    bad: tuple[BadObject, ...]
    seconds: float
    conclusive: bool = True
    """Whether anything could be compared. With ``products``, what meets infinity or may overflow cannot be."""
    metadata: str = ""
    """What is not as it was in the array's metadata; empty where all is."""

    repaired: int | None = None
    """Tiles that were computed again, by which all that was bad is right; None where C was only looked at."""
    as_written: bool = False
    """Whether these tiles hold the very bytes that were written when C was made; else C was checked as a whole."""

    @property
    def passed(self) -> bool:
        """Whether C is as it was written, or is A times B; after a repair, whether it is now."""
        return (not self.bad or self.repaired is not None) and self.conclusive and not self.metadata

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "passed": self.passed}

    def __str__(self) -> str:
        count = counted(self.objects, "stored object")
        how = f"{count} of {self.name} by {self.by} in {self.seconds:.2f} s, {format_nbytes(self.nbytes)}"
        if not self.conclusive:
            return f"audit could compare nothing: {how}"
        if self.repaired is not None:
            proof = "all bytes are those that were written" if self.as_written else "all of C was checked"
            return (
                f"repaired {self.name} in {self.seconds:.2f} s: {counted(self.repaired, 'tile')} computed again for"
                f" {len(self.bad)} bad of {count}; {proof}"
            )
        lines = []
        if self.metadata:
            lines.append(f"audit failed: the metadata of {self.name} are not what they were: {self.metadata}")
        if not self.bad and not lines:
            return f"audited {how}: all are as they should be"
        if self.bad:
            lines.append(f"audit failed: bad are {len(self.bad)} of {how}")
            lines += [f"  {one}" for one in self.bad[:MOST_TOLD]]
            if len(self.bad) > MOST_TOLD:
                lines.append(f"  and {len(self.bad) - MOST_TOLD} more")
        return "\n".join(lines)


def record_of(array: zarr.Array[Any]) -> tuple[Past | None, bool]:
    """The record that lies beside a product's chunks, and whether that is finished; None where there is none. Raises
    StoreError where it cannot be read now."""
    growing = journal_in(array, FILE_NAME)
    if growing is not None and (record := read_journal(growing)) is not None:
        return record, False
    folder = folder_of(array)
    if folder is not None:
        return read_record(folder / CHECKSUMS_NAME), True
    objects = objects_of(array)
    data = objects.get(CHECKSUMS_NAME) if objects is not None else None
    return None if data is None else parsed(data), True


def record_to_compare(array: zarr.Array[Any], listener: Listener) -> Past | None:
    """The record of a C that is compared with its factors, which needs none; None also where it cannot be read, of
    which the listener is told."""
    try:
        return record_of(array)[0]
    except StoreError as error:
        why = error.__cause__ or error
        told = (
            why.strerror if isinstance(why, OSError) and why.strerror else str(why).removeprefix("output: ")
        )
        listener(
            Caution(
                f"the record beside C, {name_of(array)}, cannot be read ({told}): C is compared as the whole product of"
                " A and B; were it a band of that, or more than it, only the record would say so, and a right C may be"
                " called wrong"
            )
        )
        return None


def changed_metadata(array: zarr.Array[Any], record: Past) -> str:
    """What of C's metadata is not as it was when its record was begun; empty where all is."""
    return changed_facts(array, record.array)


def changed_facts(array: zarr.Array[Any], facts: Any) -> str:
    """As `changed_metadata`. facts: what `array_facts` said of the array before."""
    found = array_facts(array)
    before = facts if isinstance(facts, dict) else {}
    names = [name for name in sorted({*found, *before}) if found.get(name) != before.get(name)]
    return ", ".join(f"{name} is {found.get(name)} and was {before.get(name)}" for name in names)


def audit_by_checksums(
    array: zarr.Array[Any], record: Past, listener: Listener, *, finished: bool = True
) -> Audit:
    """Compare all that is stored of C with the checksums of its record. finished: whether all of C must be there; else
    what a run that goes on counts on is compared.

    Raises StoreError where a file cannot be looked at, which says nothing of what it holds.
    """
    start = time.perf_counter()
    metadata = changed_metadata(array, record)
    band = band_of(record)
    unit = write_unit(array)
    lost = with_their_groups(record.finished, ())
    tiles = {index: stored for index, stored in record.finished.items() if index not in lost}
    bad: list[BadObject] = []
    if not metadata:
        bad = [
            _bad(array, unit, stored.place, reason, tile)
            for tile, stored, reason in faults(array, tiles, listener, whole=True)
        ]
        if finished:
            known = {one.place for stored in tiles.values() for one in stored.objects}
            bad += [
                _bad(array, unit, place, "the record has no checksum of it")
                for place in _wanted(array, unit, band)
                if place not in known
            ]
        if band is not None:  # what is missing there is as it should be
            bad += [
                _bad(array, unit, place, "it lies outside the band, where nothing was written")
                for place in stored_outside(array, band)
            ]
    objects = [one for stored in tiles.values() for one in stored.objects]
    return Audit(
        name_of(array),
        "checksums",
        len(objects),
        sum(one.nbytes for one in objects),
        tuple(sorted(bad, key=lambda one: (one.rows, one.columns))),
        time.perf_counter() - start,
        metadata=metadata,
    )


def band_of(record: Past) -> Band | None:
    """The band that alone was computed of a product, by its record."""
    window = record.request.get(WINDOW)
    return None if window is None else Band(*window)


def check_is_product(array: zarr.Array[Any], record: Past | None, remedy: str) -> None:
    """Raise OptionError where C, which is not the product of two matrices, is more than that by its record: then that
    says nothing of what it should hold. Plain sums of `gram` to which later lines were added are the product all the
    same.

    remedy: what to do then, in words.
    """
    if record is None or _has_lines_added(record):
        return
    if any(record.request.get(name) for name in MORE_THAN_PRODUCT):
        raise OptionError(
            f"C, {name_of(array)}, is more than the product of A and B: it was computed with means, weights, scales,"
            f" offsets or other transforms, or added to what it held, and checked with these then; {remedy}"
        )


def _has_lines_added(record: Past) -> bool:
    """Whether C is a Gram matrix of plain sums, to which those over more lines were added. All lines were made alike:
    `gram` adds none to a C that was made by other options."""
    known = record.request.get(GRAM) or {}
    return bool(known.get("sums")) and record.request.get("fused") == LINES_ADDED


def _wanted(array: zarr.Array[Any], unit: tuple[int, ...], band: Band | None) -> Iterator[tuple[int, ...]]:
    """The places of all objects that C should have."""
    whole = tuple(slice(0, side) for side in array.shape)
    for piece in chunks_in(whole, unit):
        if band is None or band.touches(piece_region(piece.chunk, unit, array.shape)):
            yield piece.chunk


def _bad(
    array: zarr.Array[Any],
    unit: tuple[int, ...],
    place: tuple[int, ...],
    reason: str,
    tile: int | None = None,
) -> BadObject:
    rows, columns = piece_region(place, unit, array.shape)
    name = array.metadata.encode_chunk_key(place)
    return BadObject(name, (rows.start, rows.stop), (columns.start, columns.stop), reason, tile)


def faults(
    array: zarr.Array[Any], tiles: Mapping[int, Stored], listener: Listener, *, whole: bool
) -> list[tuple[int, StoredObject, str]]:
    """The tile, the stored object and what is wrong with it, for each that is not as it was written.

    whole: whether bytes are read and compared with their checksums; else only lengths are. Raises StoreError where a
    file cannot be looked at.
    """
    owned = [(tile, one) for tile, stored in tiles.items() for one in stored.objects]
    found = faults_of([(array, one) for _, one in owned], listener, whole=whole)
    return [(*owned[number], reason) for number, reason in found]


def faults_of(
    objects: Sequence[tuple[zarr.Array[Any], StoredObject]], listener: Listener, *, whole: bool = True
) -> list[tuple[int, str]]:
    """The number in the list, and what is wrong with it, of each stored object that is not as it was written. Raises as
    `faults`."""
    nbytes = sum(one.nbytes for _, one in objects)
    start = time.perf_counter()
    listener(WorkPlanned("audit", len(objects), 0, "objects", nbytes, 0))
    owners = {(id(array), one.checksum): one.place for array, one in objects}

    def look(number: int) -> str | None:
        array, stored = objects[number]
        fault = fault_of(array, stored, whole=whole)
        if fault is None:
            return None
        reason, checksum = fault
        if checksum is not None and (owner := owners.get((id(array), checksum))) not in (None, stored.place):
            reason += f"; they are those of {array.metadata.encode_chunk_key(owner)}"
        return reason

    found = []
    with ThreadPoolExecutor(config.threads("read-threads"), "tilewright-audit") as pool:
        for number, reason in enumerate(pool.map(look, range(len(objects)))):
            if reason is not None:
                found.append((number, reason))
            listener(UnitDone("audit", number, "", 0.0, objects[number][1].nbytes, 0, {}))
    listener(WorkDone("audit", time.perf_counter() - start))
    return found


def audit_by_products(
    client: Client,
    a: StoredArray,
    b: StoredArray,
    c: zarr.Array[Any],
    *,
    listener: Listener,
    **options: Any,
) -> Audit:
    """Compare C with A times B, in blocks as C is stored. options: as `wrong_blocks` has them. Raises as it does."""
    start = time.perf_counter()
    unit = write_unit(c)
    whole = tuple(slice(0, side) for side in c.shape)
    pieces = [piece.chunk for piece in chunks_in(whole, unit)]
    nbytes = c.shape[0] * c.shape[1] * c.dtype.itemsize
    done = Audit(name_of(c), "products", len(pieces), nbytes, (), 0.0)
    if not pieces:
        return replace(done, seconds=time.perf_counter() - start)
    try:
        found = wrong_blocks(client, a, b, c, (unit[0], unit[1]), listener=listener, **options)
    except DamagedProductError:
        # What cannot be decoded cannot be compared: name all such chunks first.
        regions = [piece_region(place, unit, c.shape) for place in pieces]
        bad = [
            _bad(c, unit, pieces[place], UNDECODABLE)
            for place in find_damaged(client, c, regions, listener=listener)
        ]
        if not bad:
            raise
        return replace(done, bad=tuple(bad), seconds=time.perf_counter() - start)
    bad = [
        _bad(c, unit, (top // unit[0], left // unit[1]), "its numbers are not those of A times B")
        for top, _, left, _ in found.wrong
    ]
    return replace(done, bad=tuple(bad), seconds=time.perf_counter() - start, conclusive=found.conclusive)
