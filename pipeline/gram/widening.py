"""New variables of X added to a Gram matrix that is there: C grows, its old elements are kept, and only tiles with new
ones are computed.

The stored pieces of the old C get a second name, by hard links, in the folder in which the wider one grows, with a
record that calls the tiles finished that consist of them, as for a repair. From there on it is a run that goes on. So C
stands as it was until the wider one takes its place in one step. A piece at C's old edge that was not full is not
linked: the tile that has it now writes it anew.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import zarr

from tilewright.kernels.numbers import ceil_div, counted
from tilewright.pipeline import config
from tilewright.pipeline.errors import OptionError, OutputError, ShapeError
from tilewright.pipeline.events import Notice
from tilewright.pipeline.gram.append import (
    check_lines_alike,
    check_made_alike,
    check_same_numbers,
    names_of,
    record_of_gram,
)
from tilewright.pipeline.gram.options import GramRequest, Matrices, axis_of
from tilewright.pipeline.plan.grid import TileGrid, square_unit
from tilewright.pipeline.plan.inputs import Geometry
from tilewright.pipeline.plan.told import StoredObject
from tilewright.pipeline.product.durability import sync_many
from tilewright.pipeline.product.job import fingerprint_of
from tilewright.pipeline.product.ledger import (
    FILE_NAME,
    Past,
    Stored,
    array_facts,
    read_record,
    write_record,
)
from tilewright.pipeline.product.output import growing_folder
from tilewright.pipeline.product.repair import link_object, other_files
from tilewright.pipeline.product.request import Factors, Request, open_factors
from tilewright.pipeline.store.arrays import name_of, write_unit
from tilewright.pipeline.store.attributes import FLATTENED, flattened_sides
from tilewright.pipeline.store.objects import fault_of
from tilewright.pipeline.store.region import chunks_in


@dataclass(frozen=True)
class Widening:
    """A C that is there, and becomes wider."""

    c: zarr.Array[Any]
    path: Path
    past: Past
    """What its record says."""
    first: int
    """The line at which the record's hashes of X begin."""

    @property
    def dtype(self) -> Any:
        return self.c.dtype.newbyteorder("=")


def widening_of(request: GramRequest, matrices: Matrices, c: zarr.Array[Any], path: Path) -> Widening | None:
    """What C is to be widened from; None where it has as many variables as X, or other lines, so that nothing but lines
    might be added.

    Raises
    ------
    OutputError
        C has no record of what is in it, or not of this X.
    OptionError
        C was made by other options, or by such as make every element depend on all variables.
    ShapeError
        X has new lines too, or fewer variables; or its new variables lie between those that are in C.
    """
    axis = axis_of(matrices.summed)
    variables = tuple(int(array.shape[1 - axis]) for array, _ in matrices.sides)
    if c.shape == variables or any(now < then for now, then in zip(variables, c.shape, strict=True)):
        return None
    name = name_of(c)
    past, known = record_of_gram(c, name)
    lines, length = int(known["lines"]), matrices.length
    if length != lines:
        found = " and ".join(f"{count} {matrices.of}" for count in dict.fromkeys(variables))
        raise ShapeError(
            f"append=True: {name} is {c.shape[0]} × {c.shape[1]}, over {counted(lines, matrices.summed[:-1])}, and"
            f" {names_of(matrices)} has {found} and {length} {matrices.summed}; only one of both is added at a time:"
            f" new {matrices.of} of the same {matrices.summed}, or new {matrices.summed} of the same {matrices.of}"
        )
    _check_apart(request, matrices)
    check_made_alike(request, matrices, c)
    check_lines_alike(matrices, known, name)
    for option, asked, held in (
        ("dtype", request.dtype, str(c.dtype.newbyteorder("="))),
        ("precision", request.precision, past.request.get("precision")),
    ):
        if asked is not None and str(asked) != str(held) and not (option == "dtype" and c.dtype == asked):
            raise OptionError(
                f"append=True: {name} was made with {option}={held!r}, and {asked!r} is asked for; give the same, or"
                " another output"
            )
    _check_order(matrices, c)
    check_same_numbers(matrices, past, known, name)
    return Widening(c, path, past, int(known["first"]))


def _check_apart(request: GramRequest, matrices: Matrices) -> None:
    """Raise OptionError where each element depends on all variables, or what lies beside C would have to grow too."""
    for each in matrices.treatments.values():
        for option, sides in (("center", each.centered), ("scale", (each.scaled,))):
            if matrices.summed in sides:
                raise OptionError(
                    f"append=True beside {option}={getattr(request, option)!r}: means and deviations of the"
                    f" {matrices.summed} change with every one of the {matrices.of} that comes, and with them all of"
                    f" the result; give them as numbers, {option}={{{matrices.summed!r}: values}}, or compute it anew"
                    " (overwrite=True without append)"
                )
    if request.counts is not None:
        raise OptionError(
            "append=True beside counts: only the result is widened, not the numbers of pairs; leave one of them out"
        )


def _check_order(matrices: Matrices, c: zarr.Array[Any]) -> None:
    """Raise ShapeError where variables that are made of several axes grew along another than the first: then new ones
    lie between the others."""
    before: Any = c.attrs.get(FLATTENED)
    held = list(before.values()) if isinstance(before, Mapping) else []
    (left, _), (right, _) = matrices.sides
    columns = matrices.of == "columns"
    now = flattened_sides(left, right, columns, not columns)
    for old, new in zip(held, (now or {}).get(FLATTENED, {}).values(), strict=False):
        if list(old["shape"])[1:] != list(new["shape"])[1:]:
            raise ShapeError(
                f"append=True: the {matrices.of} of {names_of(matrices)} are {' × '.join(map(str, new['shape']))}"
                f" ({', '.join(map(str, new['dimensions']))}), and those in {name_of(c)}"
                f" {' × '.join(map(str, old['shape']))}: new ones lie between the others unless the first of these axes"
                " alone grew; compute it anew (overwrite=True without append)"
            )


def widened(widening: Widening, product: Request) -> Past:
    """The record of a C of the product's sides, of which the tiles are finished that consist of whole pieces of the old
    one. product: as it is run."""
    factors = open_factors(product)
    now = fingerprint_of(factors)
    if bool(widening.past.request.get("symmetric")) != factors.symmetric:
        raise OutputError(
            f"append=True: {name_of(widening.c)} was computed {'' if not factors.symmetric else 'not '}as a symmetric"
            " product, and this one is another; compute it anew (overwrite=True without append)"
        )
    past, c = widening.past, widening.c
    unit = write_unit(c)
    c_unit = unit[0], unit[1]
    geometry, limits = _geometry(past.geometry, c, factors, c_unit)
    grid = TileGrid.of(factors.shape, geometry, symmetric=factors.symmetric)
    objects = {one.place: one for stored in past.finished.values() for one in stored.objects}
    finished = {}
    for tile in grid.tiles():
        if tile.row_stop > limits[0] or tile.column_stop > limits[1]:
            continue
        places = [piece.chunk for region in grid.regions(tile) for piece in chunks_in(region, c_unit)]
        if all(place in objects for place in places):
            finished[tile.index] = Stored(tuple(objects[place] for place in places))
    last = past.recipes[-1]._replace(cell_rows=geometry.cell_rows, cell_columns=geometry.cell_columns)
    return replace(
        past,
        geometry=geometry,
        c_unit=c_unit,
        finished=finished,
        array=None,
        digest=now.digest,
        request=now.request,
        # Some parts have just been compared; what is read for new tiles is compared with the others.
        inputs=now.inputs,
        read={role: _shifted(hashes, widening.first, product) for role, hashes in past.read.items()},
        recipes=(*(recipe for recipe in past.recipes if recipe != last), last),
        bad_lines=0,
        fault="",
    )


def _geometry(
    before: Geometry, c: zarr.Array[Any], factors: Factors, c_unit: tuple[int, int]
) -> tuple[Geometry, tuple[int, int]]:
    """Tiles about as large as those of the old C, at whose whole pieces their edges lie; and up to which row and column
    of C those pieces are."""
    unit = (square_unit(c_unit, max(factors.shape)),) * 2 if factors.symmetric else c_unit
    sides = before.tile_rows, before.tile_columns
    tile, limits = [], []
    for old, new, side, step in zip(c.shape, factors.shape, sides, unit, strict=True):
        whole = old // step
        if old == new or not whole:
            tile.append(side if side >= new or side % step == 0 else ceil_div(side, step) * step)
            limits.append(old if old == new else 0)
            continue
        # As few tiles as before: of w pieces, less than √w are left over, and computed anew.
        tile.append(max(1, whole // ceil_div(whole, max(1, side // step))) * step)
        limits.append(whole * step)
    cells = [min(cell, side) for cell, side in zip(before[4:6], tile, strict=True)]
    cells = [
        cell if cell % step == 0 or cell >= new else side
        for cell, step, new, side in zip(cells, unit, factors.shape, tile, strict=True)
    ]
    geometry = Geometry(tile[0], tile[1], before.panel_depth, before.k_parts, cells[0], cells[1])
    return geometry, (limits[0], limits[1])


def _shifted(hashes: Mapping[Any, int], first: int, product: Request) -> dict[Any, int]:
    """Hashes of parts of X by where they lie in all of its lines."""
    along = 0 if product.transpose_a else 2
    moved = {}
    for corners, value in hashes.items():
        place = list(corners)
        place[along] += first
        place[along + 1] += first
        moved[tuple(place)] = value
    return moved


def begin_widened(widening: Widening, product: Request, *, resume: bool) -> None:
    """Let a wider C grow from the old one's pieces, as far as these are what was written; a run that goes on with it
    computes the rest. What a stopped run of the same has left stays, if that is asked for."""
    past = widened(widening, product)
    factors = open_factors(product)

    def is_ours(growing: Path) -> bool:
        there = read_record(growing / FILE_NAME) if resume else None
        return there is not None and there.digest == past.digest

    with growing_folder(widening.path, keeps=is_ours) as growing:
        if is_ours(growing):
            return
        for name in other_files(widening.c, widening.path):
            (growing / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(widening.path / name, growing / name)
        array = zarr.open_array(growing.absolute(), mode="r+")
        array.resize(factors.shape)
        if made := flattened_sides(factors.a, factors.b, *factors.transposed):
            array.attrs.update(made)
        finished = _whole(widening.c, past.finished)
        linked = [
            str(link_object(widening.c, one, growing))
            for stored in finished.values()
            for one in stored.objects
            if one.nbytes
        ]
        if product.durability == "full":
            sync_many(str(growing), linked)
        facts = array_facts(zarr.open_array(growing.absolute(), mode="r"))
        write_record(growing / FILE_NAME, replace(past, finished=finished, array=facts))
    grid = TileGrid.of(factors.shape, past.geometry, symmetric=factors.symmetric)
    product.listener(Notice(kept_sentence(widening, factors.shape, len(finished), grid.count)))


def kept_sentence(widening: Widening, shape: Sequence[int], kept: int, count: int) -> str:
    """What becomes of the old C, in a sentence."""
    old, new = (" × ".join(map(str, sides)) for sides in (widening.c.shape, shape))
    tiles = f"{kept} of {counted(count, 'tile')}"
    return f"the result, {old}, becomes {new}: {tiles} consist of what it holds, and are kept"


def _whole(c: zarr.Array[Any], finished: Mapping[int, Stored]) -> dict[int, Stored]:
    """The tiles of which every stored object holds the bytes that were written."""

    def look(one: StoredObject) -> bool:
        return fault_of(c, one, whole=True) is None

    objects = [(index, one) for index, stored in finished.items() for one in stored.objects]
    with ThreadPoolExecutor(config.threads("read-threads"), "tilewright-look") as pool:
        good = pool.map(look, (one for _, one in objects))
        bad = {index for (index, _), sound in zip(objects, good, strict=True) if not sound}
    return {index: stored for index, stored in finished.items() if index not in bad}
