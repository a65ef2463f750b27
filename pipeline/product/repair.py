"""Put right what is damaged in a finished product: the tiles that it lies in are computed again, and no others.

What is undamaged gets a second name, by hard links, in the folder in which an output grows (`output.py`), with a record
that calls its tiles finished. From there on a repair is a run that resumes. So C stands as it was until the repaired
one takes its place in one step, and a repair that is stopped goes on where it stood.

A product that stands finished where it is asked for again is read as a repair of nothing: a later try of a batch job
meets it, whose node failed just after C had its name.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zarr

from tilewright.kernels.arguments import check_flag
from tilewright.kernels.numbers import counted
from tilewright.pipeline import config
from tilewright.pipeline.errors import (
    DamagedProductError,
    OptionError,
    OutputExistsError,
    StoreError,
    VerificationError,
)
from tilewright.pipeline.events import Teller
from tilewright.pipeline.plan.grid import TileGrid
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.plan.told import StoredObject
from tilewright.pipeline.product.audit import (
    Audit,
    audit_by_checksums,
    audit_by_products,
    band_of,
    record_of,
)
from tilewright.pipeline.product.beside import are_whole
from tilewright.pipeline.product.durability import sync_many
from tilewright.pipeline.product.execute import MatmulRun
from tilewright.pipeline.product.in_place import grow_again
from tilewright.pipeline.product.inputs import Fingerprint
from tilewright.pipeline.product.job import Repair, fingerprint_of, multiply
from tilewright.pipeline.product.kept import in_pieces, with_their_groups
from tilewright.pipeline.product.ledger import (
    FILE_NAME,
    REPAIR,
    Past,
    Stored,
    array_facts,
    read_record,
    record_bytes,
    write_record,
)
from tilewright.pipeline.product.output import (
    CHECKSUMS_NAME,
    MARK_NAME,
    exists_error,
    growing_folder,
    is_leftover,
    remove_growing,
)
from tilewright.pipeline.product.request import Factors, Request, may_be_accepted, open_factors, plan_for
from tilewright.pipeline.store.arrays import local_path, name_of, open_array, write_unit
from tilewright.pipeline.store.journal import twin_of
from tilewright.pipeline.store.objects import object_path
from tilewright.pipeline.store.region import StoredArray, chunks_in
from tilewright.pipeline.transfer.checksum import checksum_of_file
from tilewright.pipeline.transfer.files import reason_with_remedy
from tilewright.pipeline.worker.survey import survey

if TYPE_CHECKING:
    from distributed import Client


def repair_by_checksums(request: Request, c: zarr.Array[Any], path: Path, record: Past) -> Audit:
    """Put right what is not as its record says. request: whose ``out`` is C, at ``path``.

    Raises
    ------
    OptionError
        C was computed from other shapes, dtypes or transposes.
    StoreError
        The metadata of C are not what they were, or a file cannot be looked at or written.
    VerificationError
        A and B are not those that C was computed from. C is left as it was.
    TilewrightError
        As ``matmul`` raises.
    """
    start = time.perf_counter()
    request = replace(request, window=band_of(record))
    factors = open_factors(request)
    now = fingerprint_of(factors)
    _check_same_product(c, factors, record.request, now)
    found = audit_by_checksums(c, record, request.listener)
    if found.metadata:
        raise StoreError(
            f"C: the metadata of {name_of(c)} are not what they were when its chunks were written ({found.metadata});"
            " its chunks mean something else by them: put them back, or compute C anew (matmul --overwrite)"
        )
    if not found.bad:
        return found
    grid = TileGrid.of(factors.shape, record.geometry, symmetric=factors.symmetric, band=factors.band)
    bad = _tiles_of(found, grid)
    good = {index: stored for index, stored in record.finished.items() if index not in bad}
    written = {one.place: one for stored in record.finished.values() for one in stored.objects}
    # How A and B looked when these tiles were computed is not kept: a run that goes on with them has to compare.
    past = replace(record, digest=now.digest, request=now.request, inputs=None, finished=good, bad_lines=0)
    return _computed_again(request, c, path, past, grid, found, Repair(written), start)


def repair_by_products(
    client: Client, request: Request, c: zarr.Array[Any], path: Path, a: StoredArray, b: StoredArray
) -> Audit:
    """Put right what is no part of A times B, in a C without a record. a, b: as the client's workers get them. Raises
    as `repair_by_checksums`."""
    start = time.perf_counter()
    factors = open_factors(request)
    now = fingerprint_of(factors)
    _check_same_product(c, factors, {}, now)
    found = audit_by_products(
        client,
        a,
        b,
        c,
        listener=request.listener,
        transpose_a=request.transpose_a,
        transpose_b=request.transpose_b,
        rounds=config.get("verify-rounds"),
        precision=request.precision,
    )
    if not found.conclusive:
        raise VerificationError(
            f"{found}, so that nobody knows what of C is wrong; it is left as it is: compute it anew (matmul"
            " --overwrite)"
        )
    if not found.bad:
        return found
    if len(found.bad) == found.objects:
        raise VerificationError(
            f"no part of C, {name_of(c)}, is a part of A times B; it is left as it is: give the factors that it is"
            " the product of, with their transposes, or compute it anew (matmul --overwrite)"
        )
    writable = zarr.open_array(path, mode="r+")
    plan = plan_for(factors, writable, survey(client, request.device))
    bad = _tiles_of(found, plan.tile_grid)
    past = Past(
        plan.geometry,
        plan.c_unit,
        _stored_tiles(c, plan, bad),
        array_facts(c),
        now.digest,
        now.request,
        inputs=now.inputs,
        recipes=(plan.recipe,),
    )
    return _computed_again(
        replace(request, cluster=client, cluster_file=None),
        c,
        path,
        past,
        plan.tile_grid,
        found,
        Repair({}),
        start,
    )


def _check_same_product(
    c: zarr.Array[Any], factors: Factors, request: Mapping[str, Any], now: Fingerprint
) -> None:
    """Raise OptionError where C cannot be the product of these factors, or is another than it was asked for."""
    parts = ("fused", "sums", "before")
    if any(request.get(name) != now.request.get(name) for name in parts if request):
        raise OptionError(
            f"C, {name_of(c)}, is more than the product of A and B: it was computed with scales, offsets or other"
            " transforms, or added to what it held (alpha, beta), which this repair does not have; compute it anew"
        )
    if c.shape != factors.shape:
        raise OptionError(
            f"C, {name_of(c)}, is {c.shape[0]} × {c.shape[1]}, and op(A) op(B) is {factors.shape[0]} ×"
            f" {factors.shape[1]}: give the factors that it is the product of, with their transposes"
        )
    for name, told in (
        ("transpose", "transposes of A and B"),
        ("symmetric", "B being A"),
        ("dtype", "dtype"),
        ("precision", "precision"),
    ):
        if name in request and request[name] != now.request[name]:
            raise OptionError(
                f"C, {name_of(c)}, was computed with other {told} ({request[name]}) than this repair has"
                f" ({now.request[name]}): give the same"
            )


def _tiles_of(found: Audit, grid: TileGrid) -> set[int]:
    """The tiles to compute again; what lies outside a band belongs to none, and is only left out."""
    return {
        one.tile if one.tile is not None else grid.holding(one.rows[0], one.columns[0])
        for one in found.bad
        if grid.band is None or grid.band.touches((slice(*one.rows), slice(*one.columns)))
    }


def _stored_tiles(c: zarr.Array[Any], plan: MatmulPlan, bad: Collection[int]) -> dict[int, Stored]:
    """What is stored of the other tiles, with its checksums."""

    def look(place: tuple[int, ...]) -> StoredObject:
        try:
            return StoredObject(place, *checksum_of_file(object_path(c, place)))
        except FileNotFoundError:
            return StoredObject(place, 0, 0)
        except OSError as error:
            raise StoreError(
                f"C: cannot read {object_path(c, place)}: {reason_with_remedy(error)}"
            ) from error

    unit = write_unit(c)
    places = [
        (tile.index, piece.chunk)
        for tile in plan.tiles()
        if tile.index not in bad
        for region in plan.regions(tile)
        for piece in chunks_in(region, unit)
    ]
    objects: dict[int, list[StoredObject]] = {index: [] for index, _ in places}
    with ThreadPoolExecutor(config.threads("read-threads"), "tilewright-repair") as pool:
        for (index, _), one in zip(places, pool.map(look, (place for _, place in places)), strict=True):
            objects[index].append(one)
    return {index: Stored(tuple(its)) for index, its in objects.items()}


def _computed_again(
    request: Request,
    c: zarr.Array[Any],
    path: Path,
    past: Past,
    grid: TileGrid,
    found: Audit,
    repair: Repair,
    start: float,
) -> Audit:
    """Compute all but the finished tiles again, and put the repaired C in the place of the damaged one."""
    tell = Teller(request.listener)
    left = grid.count - len(past.finished)
    tell.warn(f"{found}; computing {left} of {counted(grid.count, 'tile')} again")
    begin_again(c, path, past, grid, durable=request.durability == "full")
    try:
        run = multiply(replace(request, out=path, overwrite=True, resume=True, verify=True), repair)
    except (VerificationError, DamagedProductError):
        remove_growing(path)
        raise
    return replace(
        found,
        repaired=run.plan.tile_count - run.resumed,
        as_written=run.verification is None,
        seconds=time.perf_counter() - start,
    )


def begin_again(c: zarr.Array[Any], path: Path, past: Past, grid: TileGrid, *, durable: bool) -> None:
    """Let C grow once more from its finished tiles, and from those that a stopped repair has computed."""
    with growing_folder(path, keeps=lambda growing: read_record(growing / FILE_NAME) is not None) as growing:
        there = read_record(growing / FILE_NAME)
        own: Mapping[int, Stored] = {}
        if there is not None:
            past = _joined(past, grid, there, growing)
            own = _still_stored(c, there, past, growing)
            past = replace(past, finished={**past.finished, **own})
        else:
            for name in other_files(c, path):
                (growing / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path / name, growing / name)
        linked = [
            str(link_object(c, one, growing))
            for index, stored in past.finished.items()
            if index not in own
            for one in stored.objects
            if one.nbytes
        ]
        if durable:
            sync_many(str(growing), linked)
        write_record(growing / FILE_NAME, replace(past, request={**past.request, REPAIR: True}))


def _joined(past: Past, grid: TileGrid, there: Past, growing: Path) -> Past:
    """What is finished of C, in the tiles of what a stopped repair was to replace it by, whose record this is. Raises
    OutputExistsError where another run was to do so, or in other tiles."""
    sides = grid.rows.length, grid.columns.length
    cut = TileGrid.of(sides, there.geometry, symmetric=grid.symmetric, band=grid.band)
    same = there.digest == past.digest and there.c_unit == past.c_unit and cut.refines(grid)
    if not (same and there.request.get(REPAIR)):
        raise OutputExistsError(
            f"output: a run that was to replace C was stopped, and left {growing}: finish that run (matmul"
            " --overwrite), or remove the folder, and repair C then"
        )
    good = past.finished if cut == grid else in_pieces(past.finished, grid, cut, past.c_unit)
    recipes = tuple(dict.fromkeys((*past.recipes, *there.recipes)))
    if recipes[-1] != there.recipes[-1]:
        recipes = (*(recipe for recipe in recipes if recipe != there.recipes[-1]), there.recipes[-1])
    inputs = there.inputs if there.inputs == past.inputs else None
    # Of C it is not kept what was found in its tiles, so the pieces of one need not stay together.
    finished = {index: stored._replace(group=None) for index, stored in good.items()}
    return replace(there, finished=finished, recipes=recipes, inputs=inputs, read=past.read)


def _still_stored(c: zarr.Array[Any], there: Past, past: Past, growing: Path) -> dict[int, Stored]:
    """What a stopped repair leaves of its tiles: of those that are ``past.finished`` in C, what is stored as it was
    written; and all others. What became of these meanwhile nobody has looked at, so the run that goes on compares their
    checksums, as it does where a power cut may have taken something."""

    def is_whole(one: StoredObject) -> bool:
        path = growing / c.metadata.encode_chunk_key(one.place)
        try:
            # C's own objects have just been looked at, and most are the same files.
            if one in of_c and os.path.samefile(path, object_path(c, one.place)):
                return True
            return checksum_of_file(path) == (one.nbytes, one.checksum)
        except FileNotFoundError:
            return not one.nbytes
        except OSError:
            return False

    of_c = {one for stored in past.finished.values() for one in stored.objects}
    with ThreadPoolExecutor(config.threads("read-threads"), "tilewright-repair") as pool:
        looked_at = {
            index: pool.map(is_whole, stored.objects)
            for index, stored in there.finished.items()
            if index in past.finished
        }
        lost = with_their_groups(
            there.finished, [index for index, good in looked_at.items() if not all(good)]
        )
    return {
        index: stored._replace(synced=False)
        for index, stored in there.finished.items()
        if index not in lost or index not in past.finished
    }


def other_files(c: zarr.Array[Any], path: Path) -> Iterator[Path]:
    """What lies in C's folder besides its stored objects: its metadata, and what users have put there."""
    ours = {FILE_NAME, twin_of(Path(FILE_NAME)).name, CHECKSUMS_NAME, MARK_NAME}
    taken = ours | {c.metadata.encode_chunk_key(place) for place in _places(c)}
    for folder, _, names in os.walk(path):
        for name in names:
            below = (Path(folder) / name).relative_to(path)
            # A folder may stand where an object should.
            within = {parent.as_posix() for parent in (below, *below.parents)}
            if within.isdisjoint(taken) and not is_leftover(below):
                yield below


def _places(c: zarr.Array[Any]) -> Iterable[tuple[int, ...]]:
    whole = tuple(slice(0, side) for side in c.shape)
    return (piece.chunk for piece in chunks_in(whole, write_unit(c)))


def link_object(c: zarr.Array[Any], one: StoredObject, growing: Path) -> Path:
    """Give an object of C a second name below the growing folder, or copy it where the file system has no links."""
    source, target = object_path(c, one.place), growing / c.metadata.encode_chunk_key(one.place)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError as error:
        raise StoreError(
            f"C: {source} was there and is gone; let nobody write to C, and repair it again"
        ) from error
    except OSError:
        shutil.copyfile(source, target)
    return target


def multiply_or_accept(request: Request) -> MatmulRun:
    """As `multiply`; but where ``tilewright.accept-finished`` is set and C stands finished in its place, with the
    record of this very product, it is read and checked, and no tile is computed again. At a URL it goes on as a run
    that was stopped after its last tile would, so that tiles prove to be of this A and B, or are computed again.

    Raises
    ------
    OutputExistsError
        What stands there is another product, or one of other numbers.
    """
    out: Any = request.out  # which the check of it refuses where it is None
    if not may_be_accepted(out, overwrite=check_flag("overwrite", request.overwrite)):
        return multiply(request)
    factors = open_factors(request.checked())
    if factors.before is not None:  # C is asked for because it stands there
        return multiply(request)
    c = open_array(out, ndim=2, role="output")
    record, _ = record_of(c)
    if record is None or record.digest != fingerprint_of(factors).digest:
        raise exists_error(name_of(out))
    if factors.counts is not None and not are_whole(factors.counts, record.digest, request.listener):
        raise exists_error(name_of(out))
    Teller(request.listener).say(
        f"{name_of(out)} holds this very product; it is checked, and not computed again"
    )
    if (path := local_path(out)) is None:  # it is marked as unfinished until it has been checked
        grow_again(os.fspath(out), record_bytes(record), CHECKSUMS_NAME)
        return multiply(replace(request, resume=True))
    grid = TileGrid.of(factors.shape, record.geometry, symmetric=factors.symmetric, band=band_of(record))
    begin_again(c, path, replace(record, inputs=None), grid, durable=request.durability == "full")
    try:
        # As a repair of nothing: C stays in its place until it is known to be the product, and other factors change
        # nothing of it.
        return multiply(replace(request, overwrite=True, resume=True), Repair({}))
    except VerificationError as error:
        remove_growing(path)
        raise OutputExistsError(
            f"output: {path} exists, and is not the product that is asked for ({error}); choose another path, or ask"
            " to overwrite it (--overwrite)"
        ) from error
