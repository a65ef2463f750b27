"""The write stage: stores finished tiles, several at once, each piece by piece by the threads of a pool; of a tile that
is finished slab by slab, the first slabs while the last are multiplied."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import zarr

from tilewright.pipeline.plan.pairs import COUNT, COUNT_DTYPE
from tilewright.pipeline.plan.told import Product, StoredObject
from tilewright.pipeline.store.region_write import (
    Bands,
    FillFile,
    RegionWrite,
    gather,
    region_writes,
)
from tilewright.pipeline.store.sessions import changes_in, own_copy
from tilewright.pipeline.threads import results_of, run_all, submitted
from tilewright.pipeline.worker.fusion import accumulators, within
from tilewright.pipeline.worker.load_stage import load_all
from tilewright.pipeline.worker.panels import Placed
from tilewright.pipeline.worker.tile_job import Clock, FinishedSlab, TileJob
from tilewright.pipeline.worker.units import DeviceUnit, Look, Move


class WriteStage:
    """Stores the tiles of jobs that have not failed. `run` is to be called by as many threads as there are slots, so
    that at the end of a run all tiles are written at once.

    slots: where the buffers of tiles go back. answer: called of a job with nothing left to do, stored or failed.
    """

    def __init__(
        self, product: Product, unit: DeviceUnit, slots: SimpleQueue[Any], answer: Callable[[TileJob], None]
    ) -> None:
        self._product, self._plan = product, product.plan
        self._unit = unit
        self._slots = slots
        self._answer = answer
        self._writers = ThreadPoolExecutor(self._plan.write_threads, thread_name_prefix="tilewright-write")

    def run(self, multiplied: SimpleQueue[TileJob | None]) -> None:
        """Store each job's tile, give its buffer back, and answer the job, until None has come."""
        while (job := multiplied.get()) is not None:
            target, look = job.target, job.look
            assert target is not None, "there since the job's first panels came"
            assert look is not None
            try:
                if job.slabs is not None:
                    self._store_slabs(job, job.slabs, target, look)
                elif job.error is None:
                    self._store(job, target, look)
            except BaseException as error:
                job.error = job.error or error
            if job.error is not None:
                with suppress(Exception):  # a GPU that is lost looks at nothing any more
                    look.settle()
            self._slots.put(target.flat)
            job.target = job.look = target = look = None
            self._answer(job)
        multiplied.put(None)  # for the other threads of this stage

    def close(self) -> None:
        """End the pool's threads; to be called once `run` has returned everywhere."""
        self._writers.shutdown()

    def _store(self, job: TileJob, target: Placed, look: Look) -> None:
        """Store a tile, and in a symmetric C its mirror image; or return it, if it is a sum over a part of k."""
        plan, dtype = self._plan, np.dtype(self._plan.c_dtype)
        regions = plan.regions(job.tile)
        c = own_copy(self._product.c)
        with job.clock("write", "download") as moves:
            if plan.k_parts > 1:  # to be added up by another task, which looks at the sum of all parts
                if plan.on_diagonal(job.tile) and plan.accumulators == 1:
                    self._unit.mirror(target, swap=False)
                dtype = plan.sums
                job.partial = np.empty((plan.accumulators, *target.shape), dtype)
                whole = target.pieces(slice(0, job.tile.rows), slice(0, job.tile.columns))
                for sums, out in zip(accumulators(plan, target), job.partial, strict=True):
                    pieces = [RegionWrite(piece, partial(_gathered, out[piece])) for piece in whole]
                    moves += self._saved(pieces, sums, dtype)
                job.found = look.found(times=len(regions))
                return
            looks = look if self._product.look[2] else None
            bring = partial(self._bring_before, job, moves)
            with self._unit.fusion.finishing(target, job.tile.region, bring) as tile:
                if plan.on_diagonal(job.tile):
                    self._unit.mirror(tile, swap=False)
                if plan.band is not None and not plan.band.holds(regions[0]):
                    self._unit.clear_outside(tile, regions[0], plan.band)
                if looks is not None:
                    looks.at_tile(tile)
                written = self._saved(self._pieces(c, regions[0]), tile, dtype, looks)
                job.found = look.found(times=len(regions))
                written += self._save_mirrored(c, regions[1:], tile, dtype)
                moves += written
                if self._product.counts is not None:
                    counted = self._save_counts(self._product.counts, job, target)
                    job.counts = _stored(counted)
                    moves += counted
        job.stored = _stored(written)
        job.changes = changes_in(c)

    def _store_slabs(
        self, job: TileJob, slabs: SimpleQueue[FinishedSlab | None], target: Placed, look: Look
    ) -> None:
        """Store a tile slab by slab, as they are finished, and in a symmetric C the mirror image of each piece."""
        regions, dtype = self._plan.regions(job.tile), np.dtype(self._plan.c_dtype)
        looks = look if self._product.look[2] else None
        c: zarr.Array[Any] | None = None
        saving: list[Future[list[Move]]] = []
        pieces: list[tuple[RegionWrite, RegionWrite | None]] = []
        clock = Clock()
        # To the end, also after an error: until then the tile is still multiplied.
        while (slab := slabs.get()) is not None:
            if job.error is not None:
                continue
            try:
                if slab.wait is not None:
                    slab.wait()
                if c is None:
                    clock, c = Clock(), own_copy(self._product.c)
                    pieces = self._pieces_and_images(c, regions)
                for piece, image in pieces:
                    if slab.rows.start <= piece.source[0].start < slab.rows.stop:
                        save = partial(self._save_square, piece, image, target, dtype, looks)
                        saving.append(submitted(self._writers, save))
            except BaseException as error:
                job.error = job.error or error
        wait(saving)
        moves = [move for found in results_of(saving) for move in found]
        job.count("write", "download", clock, moves)
        if job.error is not None:
            return
        assert c is not None, "a tile has a slab at least"
        if looks is not None:
            looks.at_tile(target)
        job.found = look.found(times=len(regions))
        job.stored = _stored(moves)
        job.changes = changes_in(c)

    def _pieces_and_images(
        self, c: zarr.Array[Any], regions: list[tuple[slice, slice]]
    ) -> list[tuple[RegionWrite, RegionWrite | None]]:
        """The stored pieces of a tile, and in a symmetric C the mirror image of each, both with their place in the
        tile."""
        pieces = self._pieces(c, regions[0])
        if len(regions) == 1:
            return [(piece, None) for piece in pieces]
        images = {
            (columns.start, rows.start): piece
            for piece in self._pieces(c, regions[1])
            for rows, columns in (piece.source,)
        }
        return [
            (piece, replace(images[rows.start, columns.start], source=piece.source))
            for piece in pieces
            for rows, columns in (piece.source,)
        ]

    def _save_square(
        self, piece: RegionWrite, image: RegionWrite | None, tile: Placed, dtype: np.dtype, look: Look | None
    ) -> list[Move]:
        """Store a piece of a tile; and its mirror image, if it is a square that has one, from the same place."""
        moves = [self._unit.save(piece, tile, dtype, look)]
        if image is not None:
            self._unit.mirror(tile, swap=True, square=piece.source)
            moves.append(self._unit.save(image, tile, dtype))
        return moves

    def _save_mirrored(
        self, array: zarr.Array[Any], regions: list[tuple[slice, slice]], tile: Placed, dtype: np.dtype
    ) -> list[Move]:
        """Store a tile's mirror image, if it has one, in its own buffer."""
        moves: list[Move] = []
        for region in regions:
            # The buffer holds a square, whose last rows are nobody's where the tile is cut short by C.
            side = tile.shape[1]
            square = Placed(tile.flat, (side, side), tile.lines)
            self._unit.mirror(square, swap=True)
            moves += self._saved(self._pieces(array, region), square, dtype)
        return moves

    def _save_counts(self, counts: zarr.Array[Any], job: TileJob, target: Placed) -> list[Move]:
        """Store the numbers of pairs of a tile, which has been formed of its sums: these are left as they were, but for
        the first, in whose place it is."""
        plan, regions = self._plan, self._plan.regions(job.tile)
        pairs = accumulators(plan, target)[self._product.fused.forms.index(COUNT)]
        if plan.on_diagonal(job.tile):
            self._unit.mirror(pairs, swap=False)
        if plan.band is not None and not plan.band.holds(regions[0]):
            self._unit.clear_outside(pairs, regions[0], plan.band)
        moves = self._saved(self._pieces(counts, regions[0]), pairs, COUNT_DTYPE)
        return moves + self._save_mirrored(counts, regions[1:], pairs, COUNT_DTYPE)

    def _pieces(self, array: zarr.Array[Any], region: tuple[slice, slice]) -> list[RegionWrite]:
        """The stored pieces of a region of C, or of the numbers of pairs, but for those that a band does not touch."""
        product = self._product
        pieces = region_writes(
            array, region, product.counts_drafts if array is product.counts else product.drafts
        )
        if (band := self._plan.band) is None:
            return pieces
        return [piece for piece in pieces if band.touches(within(region, piece.source))]

    def _bring_before(self, job: TileJob, moves: list[Move], place: Placed) -> None:
        """Read what C held in a job's place."""
        before = self._product.before
        assert before is not None, "a product with beta has it"
        moves += load_all(self._writers, [self._unit.loading(before, job.tile.region, place)])

    def _saved(
        self, pieces: list[RegionWrite], matrix: Placed, dtype: np.dtype, look: Look | None = None
    ) -> list[Move]:
        return run_all(
            self._writers, [partial(self._unit.save, piece, matrix, dtype, look) for piece in pieces]
        )


def _stored(moves: list[Move]) -> tuple[StoredObject, ...]:
    return tuple(move.stored for move in moves if move.stored is not None)


def _gathered(out: np.ndarray, bands: Bands, fill: FillFile | None) -> None:
    """Nothing is stored yet."""
    gather(out, bands)
