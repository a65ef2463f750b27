"""What a run keeps of an earlier run of the same product: its finished tiles, in the tiles of a new plan; and what it
leaves to a later one where it fails.

A plan with other tiles than C was begun with has tiles that those are made of (`plan/grid.py`). What the record says of
a finished tile is handed on to its pieces.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr

from tilewright.kernels.numbers import counted
from tilewright.pipeline import config
from tilewright.pipeline.errors import (
    ClusterError,
    DamagedProductError,
    OutputExistsError,
    PlanError,
    StoreError,
    TaskError,
    VerificationError,
)
from tilewright.pipeline.plan.grid import TileGrid
from tilewright.pipeline.plan.inputs import Recipe
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.plan.told import NOTHING_FOUND, StoredObject
from tilewright.pipeline.product.inputs import InputChangedError
from tilewright.pipeline.product.ledger import Group, Ledger, Past, Stored, read_journal
from tilewright.pipeline.product.output import (
    CHECKSUMS_NAME,
    ENDED,
    FILE_NAME,
    MARK_NAME,
    Output,
    replaced_path,
)
from tilewright.pipeline.product.output_group import remove_folders
from tilewright.pipeline.store.chunks import METADATA_NAMES
from tilewright.pipeline.store.journal import FileJournal, twin_of
from tilewright.pipeline.store.locks import is_locked_by
from tilewright.pipeline.store.objects import fault_of

BARE = frozenset(
    {MARK_NAME, FILE_NAME, twin_of(Path(FILE_NAME)).name, CHECKSUMS_NAME, ".zattrs", *METADATA_NAMES.values()}
)
"""What is in the folder of a growing array before its first tile, besides a folder of drafts."""


class Kept(NamedTuple):
    """The finished tiles that are still stored."""

    earlier: int
    """How many they are of the earlier run's tiles."""
    finished: Mapping[int, Stored]
    """What the record says of the plan's tiles that they make up, by index."""


NONE_KEPT = Kept(0, {})


def grid_of(plan: MatmulPlan, past: Past) -> TileGrid:
    """The tiles of the earlier run."""
    return TileGrid.of((plan.m, plan.n), past.geometry, symmetric=plan.symmetric, band=plan.band)


def goes_on(plan: MatmulPlan, past: Past) -> bool:
    """Whether the tiles that an earlier run finished consist of whole tiles of the plan."""
    earlier = grid_of(plan, past)
    return (
        plan.c_unit == past.c_unit
        and plan.tile_grid.refines(earlier)
        and max(past.finished, default=-1) < earlier.count
    )


def kept_tiles(
    array: zarr.Array[Any],
    plan: MatmulPlan,
    past: Past,
    *,
    whole: bool,
    beside: zarr.Array[Any] | None = None,
) -> Kept:
    """The recorded tiles whose stored objects are what was written, for a plan that `goes_on`: a missing one would read
    as zeros, and what is wrong in a float's last bits no check of the product tells from rounding.

    whole: whether all of them are read and compared with their checksums; else of those that are on disk for sure only
    lengths are. beside: the array of the numbers of pairs, of which a tile has to be whole too.
    """

    def is_whole(stored: Stored) -> bool:
        every = [(array, one) for one in stored.objects]
        if beside is not None:
            every += [(beside, one) for one in stored.counts]
        return all(fault_of(held, one, whole=whole or not stored.synced) is None for held, one in every)

    with ThreadPoolExecutor(config.threads("read-threads"), "tilewright-look") as pool:
        looked_at = zip(past.finished, pool.map(is_whole, past.finished.values()), strict=True)
        lost = with_their_groups(past.finished, [index for index, good in looked_at if not good])
    left = {index: stored for index, stored in past.finished.items() if index not in lost}
    grid, earlier = plan.tile_grid, grid_of(plan, past)
    return Kept(len(left), left if grid == earlier else in_pieces(left, earlier, grid, past.c_unit))


def in_pieces(
    finished: Mapping[int, Stored], earlier: TileGrid, grid: TileGrid, c_unit: tuple[int, int]
) -> dict[int, Stored]:
    """What the record says of finished tiles, in the tiles of a grid that they are made of. ``c_unit`` is the sides of
    a stored object of C."""
    pieces = {tile.index: grid.inside(tile) for tile in earlier.tiles(finished)}
    firsts = {index: stored.group.first if stored.group else index for index, stored in finished.items()}
    counts = Counter[int]()
    for index, first in firsts.items():
        counts[first] += len(pieces[index])
    made: dict[int, Stored] = {}
    for index, stored in finished.items():
        first = firsts[index]
        group = Group(pieces[first][0], counts[first]) if counts[first] > 1 else None
        objects, pairs = (
            _dealt(every, pieces[index], grid, c_unit) for every in (stored.objects, stored.counts)
        )
        for piece, its in objects.items():
            found = stored.found if piece == pieces[index][0] else NOTHING_FOUND
            made[piece] = Stored(tuple(its), found, stored.synced, group, tuple(pairs[piece]))
    return made


def _dealt(
    objects: Iterable[StoredObject], pieces: Iterable[int], grid: TileGrid, c_unit: tuple[int, int]
) -> dict[int, list[StoredObject]]:
    """The stored objects of a tile by the tiles that it is made of."""
    dealt: dict[int, list[StoredObject]] = {piece: [] for piece in pieces}
    for one in objects:
        dealt[grid.holding(one.place[0] * c_unit[0], one.place[1] * c_unit[1])].append(one)
    return dealt


def with_their_groups(finished: Mapping[int, Stored], lost: Iterable[int]) -> set[int]:
    """Finished tiles that cannot be kept, and with each all pieces of the larger tile that it was cut from: nobody
    knows which of them holds what was found in that. So it is too where the record has lost a piece."""
    lost = set(lost)
    counts = Counter(stored.group for stored in finished.values() if stored.group is not None)
    torn = {group for group, count in counts.items() if count != group.size}
    torn |= {group for index in lost if index in finished and (group := finished[index].group) is not None}
    return lost | {index for index, stored in finished.items() if stored.group in torn}


def check_same_bits(plan: MatmulPlan, past: Past) -> None:
    """Raise PlanError where C would not get the bits that one plan gives: some of its tiles were computed by another.

    Integers are exact, so they have the same bits by any plan.
    """
    recipes = list(dict.fromkeys((*past.recipes, plan.recipe)))
    if np.dtype(plan.c_dtype).kind in "iub" or not past.finished or len(recipes) == 1:
        return
    done = counted(len(past.finished), "tile")
    if len(past.recipes) > 1:
        raise PlanError(
            f"same_bits (--same-bits): the {done} that earlier runs finished are already of several plans"
            f" ({'; '.join(map(told, past.recipes))}): leave it away to go on with them, or start over with --no-resume"
            " (resume=False)"
        )
    found, asked = recipes
    remedies = []
    if found.on_host != asked.on_host:
        remedies.append(f"use {'the CPU' if found.on_host else 'GPUs'} as then (--device)")
    if found[:4] != asked[:4]:
        remedies.append("give this run at least the memory of the earlier one (--device-memory)")
    raise PlanError(
        f"same_bits (--same-bits): an earlier run finished {done} ({told(found)}), and the rest would be rounded"
        f" otherwise ({told(asked)}): {', and '.join(remedies)}, leave it away, or start over with --no-resume"
        " (resume=False)"
    )


def told(recipe: Recipe) -> str:
    """What decides the bits of some tiles, in words."""
    return (
        f"{recipe.cell_rows} × {recipe.cell_columns} at once, by panels of depth {recipe.panel_depth}"
        + (f", with k in {recipe.k_parts} parts" if recipe.k_parts > 1 else "")
        + f", on a {'CPU' if recipe.on_host else 'GPU'}"
    )


def kept_note(plan: MatmulPlan, past: Past, kept: Kept, *, verify: bool) -> str:
    """One sentence about the tiles that a run keeps, and how it computes the rest."""
    count = grid_of(plan, past).count
    left = plan.tile_count - len(kept.finished)
    rest = "it goes on with the rest"
    if not left:
        rest = "only the check is left" if verify else "none is left to compute"
    elif count != plan.tile_count:
        rest = (
            "they are kept, and do not fit the memory of this one, which computes the rest in smaller ones of"
            f" {plan.tile_rows} × {plan.tile_columns}: {left} are left"
        )
    note = f"an earlier run finished {kept.earlier} of {counted(count, 'tile')}; {rest}"
    return note + (_other_bits(plan, past) if left else "")


def would_keep_note(plan: MatmulPlan, past: Past, kept: Kept) -> str:
    """The same of a run that is only planned."""
    count = grid_of(plan, past).count
    note = f"an earlier run finished {kept.earlier} of {counted(count, 'tile')}, which would be kept"
    if count != plan.tile_count:
        note += f", and the rest computed in smaller ones of {plan.tile_rows} × {plan.tile_columns}"
    return note + (_other_bits(plan, past) if len(kept.finished) < plan.tile_count else "")


def count_earlier(plan: MatmulPlan, past: Past, finished: Mapping[int, Stored]) -> int:
    """How many of the earlier run's tiles a plan's finished ones make up."""
    grid, earlier = plan.tile_grid, grid_of(plan, past)
    if grid == earlier:
        return len(finished)
    return sum(grid.inside(tile)[0] in finished for tile in earlier.tiles(past.finished))


def _other_bits(plan: MatmulPlan, past: Past) -> str:
    """A clause about tiles that were computed by other plans, if that is to be seen in C."""
    others = [recipe for recipe in dict.fromkeys(past.recipes) if recipe != plan.recipe]
    if not others or np.dtype(plan.c_dtype).kind in "iub":
        return ""
    return (
        f"; some of C is computed otherwise ({'; '.join(map(told, others))}) than the rest ({told(plan.recipe)}), and"
        " may differ from it in the last bits (--same-bits refuses that)"
    )


@contextmanager
def keeping_what_is_finished(output: Output, folders: Sequence[Path]) -> Iterator[None]:
    """Let other runs write to the output when the block ends. Where it ends by an error before any tile was finished,
    there is nothing to go on from, and nothing stays, nor the folders that were made for it. A product that failed its
    check is there to be inspected.
    """
    try:
        yield
    except VerificationError:
        raise
    except BaseException:
        if output.beside is not None and _remove_bare(output.beside):
            output = replace(output, beside=None)
        if output.beside is None and _remove_bare(output):
            remove_folders(folders)
        raise
    finally:
        output.release()


def _remove_bare(output: Output) -> bool:
    """Remove a growing array without tiles. Returns whether it is gone: it stays where another run, which does not see
    our lock, has taken it over."""
    partial, final, drafts = output.partial, output.final, output.drafts
    if output.lock is None or partial is None or final is None or drafts is None:
        return False
    try:
        if not is_locked_by(output.lock, partial) or set(os.listdir(partial)) - {*BARE, drafts}:
            return False
        past = read_journal(FileJournal(partial / FILE_NAME))
        if past is not None and past.finished:  # of which nothing is stored, as of zeros
            return False
        # A run that takes it over renames this, too, before anything else: one of both succeeds.
        os.rename(partial / drafts, partial / f"{drafts}{ENDED}")
        aside = replaced_path(final)
        partial.rename(aside)
        if set(os.listdir(aside)) - {*BARE, f"{drafts}{ENDED}"}:  # another run has begun in this moment
            aside.rename(partial)
            return False
        shutil.rmtree(aside)
    except OSError:
        return False
    return True


@contextmanager
def telling_what_is_kept(count: int, ledger: Ledger) -> Iterator[None]:
    """Add to the error of a lost cluster, of storage or of a task that fails, what the next run need not do again.
    count: all tiles."""
    try:
        yield
    except (InputChangedError, OutputExistsError, DamagedProductError):
        raise  # which say what becomes of the tiles
    except (ClusterError, StoreError, TaskError) as error:
        done = len(ledger.tiles)
        if not done:
            raise
        raise type(error)(
            f"{error}; {done} of {counted(count, 'tile')} are finished and kept, and the same command goes on there"
        ) from error
