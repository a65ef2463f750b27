"""The side of the tiles of which a band of C is made: square ones, as `band.py` says why.

Narrow tiles follow the band closely, wide ones read less. Of a band of w elements a row, tiles of side t have about
w/t + 1 in a row of tiles: w + t products are formed for the w that are wanted of each row, and each tile reads 2t lines
for t² products. What is compared is the bytes that are read, times the square of the area that is multiplied: the sides
that come out are about half the band's width, where little is read and half as much again is multiplied as is wanted.
Neither sides nor cells depend on the number of workers: a band has tiles enough for all.
"""

from __future__ import annotations

from tilewright.kernels.numbers import ceil_div
from tilewright.pipeline.plan.band import Band
from tilewright.pipeline.plan.grid import TileGrid, nest
from tilewright.pipeline.plan.inputs import Geometry, Limits, StoredMatrix
from tilewright.pipeline.plan.memory import Memory
from tilewright.pipeline.plan.tiling import TILE_OPERATIONS

LEAST_CHUNK_SIDE = 256
"""Chunks of a new C are about as wide as the band, but not narrower than this for it: then there would be very many."""

STEPS = 4
"""Sides are tried at so many steps between one and twice that."""


def band_chunks(unit: tuple[int, int], band: Band) -> tuple[int, int]:
    """The sides of the chunks of a new C, no larger than ``unit``, which suits all of it.

    >>> band_chunks((2000, 2000), Band(300, 300))
    (500, 500)
    """
    side = min(unit)
    while side > max(LEAST_CHUNK_SIDE, band.width):
        side = ceil_div(side, 2)
    return side, side


def band_geometry(
    a: StoredMatrix, b: StoredMatrix, unit: int, memory: Memory, limits: Limits
) -> Geometry | None:
    """The geometry of tiles for ``memory.band``, whose sides are multiples of ``unit``; None where none fits.

    Where it can be, there are ``limits.tiles`` of them or more, if they are worth it.
    """
    assert memory.band is not None, "what this is asked of"
    longest = max(a.rows, b.columns, 1)
    whole = slice(0, a.rows), slice(0, b.columns)
    operations = 2 * memory.band.area(whole, (1, 1)) * a.columns * memory.fused.sums
    wanted = min(limits.tiles, operations // TILE_OPERATIONS)
    best: tuple[tuple[bool, float, int], int] | None = None
    for units in _candidates(ceil_div(longest, unit)):
        side = min(units * unit, longest)
        geometry = _of_side(side, memory)
        if memory.nbytes(geometry.tile_rows, geometry.tile_columns, 1) > limits.device_nbytes:
            break
        count = TileGrid.of(memory.sides, geometry, symmetric=memory.symmetric, band=memory.band).count
        key = (count < wanted, _cost(a, b, side, count), side)
        if best is None or key < best[0]:
            best = key, side
    return None if best is None else _of_side(best[1], memory)


def _candidates(most: int) -> list[int]:
    """Numbers of units from 1 to ``most``, ever further apart."""
    found, step = {1, most}, 1
    while step < most:
        found |= {min(most, step * (STEPS + part) // STEPS) for part in range(STEPS)}
        step *= 2
    return sorted(found - {0})


def _of_side(side: int, memory: Memory) -> Geometry:
    """Squares of this side, cut short where C is shorter: it is cut alike along both sides all the same."""
    rows, columns = (min(side, max(1, whole)) for whole in memory.sides)
    return Geometry(rows, columns, memory.depth, 1, rows, columns)


def _cost(a: StoredMatrix, b: StoredMatrix, side: int, tiles: int) -> float:
    """What so many tiles of this side decode, times the square of their area."""
    of_a = a.dtype.itemsize * a.touched(0, side) / max(1, a.rows)
    of_b = b.dtype.itemsize * b.touched(1, side) / max(1, b.columns)
    return tiles * side * (of_a + of_b) * (float(tiles) * side * side) ** 2


def finer_band_geometry(
    unit: int, memory: Memory, limits: Limits, keep: Geometry, alone: Geometry | None
) -> Geometry | None:
    """The sides of the squares that those of an earlier run are cut into where these do not fit any more; None: nothing
    fits. alone: what `band_geometry` has, which does where one earlier tile was all of C."""
    side = max(keep.tile_rows, keep.tile_columns)
    if side >= max(memory.sides):
        return alone
    if alone is None:
        return None
    for parts in range(2, side // unit + 1):
        length = side // parts
        if side // unit % parts or memory.nbytes(length, length, 1) > limits.device_nbytes:
            continue
        within = nest(memory.sides, (*keep.within, keep[:2]), (length, length))
        return _of_side(length, memory)._replace(within=within)
    return None
