"""The groups of Zarr that neighbours and pairs are stored in, as xarray and others read them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec

from tilewright import __version__
from tilewright.kernels.cpu.loops import usable_cores
from tilewright.pipeline.gram.options import axis_of
from tilewright.pipeline.neighbours.check import NeighbourCheck
from tilewright.pipeline.neighbours.options import NeighbourRequest, Sides
from tilewright.pipeline.neighbours.pieces import Piece, Pieces
from tilewright.pipeline.product.output import MARK_NAME
from tilewright.pipeline.product.output_group import is_of_kind
from tilewright.pipeline.provenance import PROVENANCE, named
from tilewright.pipeline.store.arrays import name_of
from tilewright.pipeline.store.coordinates import for_zarr, made_with_coordinates, of_side
from tilewright.pipeline.store.new.groups import consolidated, ended, metadata_in, remove_all, writing
from tilewright.pipeline.store.region_write import region_writes, write_region

KINDS = {"topk": "tilewright_neighbours", "pairs": "tilewright_pairs"}
"""By the work, the attribute of the group that says what it is: nothing else is replaced."""
ROW, NEIGHBOUR, PAIR = "row", "neighbour", "pair"
"""Names of dimensions; that of A's items is its own, where it has one."""
CHUNK_NBYTES = 2**22
CODEC: dict[str, Any] = {"cname": "lz4", "clevel": 5, "shuffle": "shuffle"}
"""Blosc, which puts the same bytes of numbers side by side: those of 10^6 items with ten neighbours take 0.08 s of a
core and 60 MB, by zarr's own choice, Zstandard without that, 0.4 s and 65 MB."""
MOST_WRITERS = 32
"""Threads that compress and write chunks; of 10^6 items with ten neighbours there are 30."""
CHUNKS_AT_ONCE = 64
"""Of an array, which are handed to threads together: each is compressed and written by one."""
STRETCHES = 2
"""So many times as many are in memory at a time."""

LONG_NAMES = {
    "indices": "items of B, the nearest first; -1 where an item of A has no further neighbour",
    "values": "value of each item of A and its neighbour, by the metric",
    "row": "item of A",
    "column": "item of B",
    "value": "value of the pair, by the metric",
}


def description_at(path: Path) -> tuple[str, Mapping[str, Any]] | None:
    """``topk`` or ``pairs``, and the attributes, where a finished group of either stands at a local path."""
    metadata = metadata_in(path)
    works = (work for work, kind in KINDS.items() if is_of_kind(metadata, kind))
    return next(((work, metadata["attributes"]) for work in works), None)


def write_arrays(
    growing: Path, request: NeighbourRequest, sides: Sides, pieces: Pieces, finished: list[Piece]
) -> None:
    """Fill a growing group with what the finished blocks have found. Raises StoreError where the place cannot be
    written."""

    def write() -> zarr.Group:
        group = zarr.create_group(growing, zarr_format=3, overwrite=False)
        if request.k is None:
            _write_pairs(group, sides, pieces, finished)
        else:
            _write_neighbours(group, request, sides, pieces, finished)
        return group

    with writing(growing):
        # What a run wrote that was stopped while it did.
        kept = pieces.folder.name, MARK_NAME
        remove_all(entry for entry in growing.iterdir() if entry.name not in kept)
        ended(write)


def complete_group(
    growing: Path,
    request: NeighbourRequest,
    sides: Sides,
    facts: Mapping[str, Any],
    check: NeighbourCheck | None,
) -> None:
    """Have a group say what its arrays are. facts: what else it says of itself. Raises StoreError where the place
    cannot be written."""

    def write() -> zarr.Group:
        group = zarr.open_group(growing, mode="r+", zarr_format=3)
        group.attrs.put(_attributes(request, sides, facts, check))
        return consolidated(group)

    with writing(growing):
        ended(write)


def _write_neighbours(
    group: zarr.Group, request: NeighbourRequest, sides: Sides, pieces: Pieces, finished: list[Piece]
) -> None:
    rows = sides.item_name or ROW
    names = (rows, NEIGHBOUR if rows != NEIGHBOUR else f"{NEIGHBOUR}_2")
    arrays = [
        _array(group, name, (sides.m, int(request.k)), dtype, names, missing=name == "indices")
        for name, dtype in (("indices", np.dtype(np.int64)), ("values", sides.values))
    ]
    _fill(arrays, pieces, finished)
    _carry_coordinates(group, sides, rows)


def _carry_coordinates(group: zarr.Group, sides: Sides, name: str) -> None:
    """Those of A's items, where they lie beside A, or what its items are made of."""
    found = of_side(sides.a, axis_of(sides.of))
    if found is None or name in group:
        return
    group.create_array(
        name, data=for_zarr(found.values), dimension_names=[name], attributes=dict(found.attributes)
    )


def _write_pairs(group: zarr.Group, sides: Sides, pieces: Pieces, finished: list[Piece]) -> None:
    count = sum(piece.found for piece in finished)
    named = (("row", np.dtype(np.int64)), ("column", np.dtype(np.int64)), ("value", sides.values))
    _fill([_array(group, name, (count,), dtype, (PAIR,)) for name, dtype in named], pieces, finished)


def _array(
    group: zarr.Group,
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    names: tuple[str, ...],
    *,
    missing: bool = False,
) -> zarr.Array[Any]:
    row_nbytes = dtype.itemsize * max(1, int(np.prod(shape[1:])))
    chunks = (max(1, min(shape[0], CHUNK_NBYTES // row_nbytes)), *(max(1, side) for side in shape[1:]))
    about: dict[str, Any] = {"long_name": LONG_NAMES[name]} | ({"missing_index": -1} if missing else {})
    return group.create_array(
        name,
        shape=shape,
        dtype=dtype,
        chunks=chunks,
        compressors=BloscCodec(**CODEC),
        dimension_names=names,
        attributes=about,
    )


def _fill(arrays: Sequence[zarr.Array[Any]], pieces: Pieces, finished: list[Piece]) -> None:
    """Write the blocks of each array one behind the other, each chunk once, and chunks of all arrays at the same
    time."""
    under_way: deque[list[Future[object]]] = deque()
    with ThreadPoolExecutor(min(MOST_WRITERS, usable_cores()), "tilewright-write") as pool:
        for array in arrays:
            row = 0
            for block in _regrouped(pieces.each(finished, array.basename), CHUNKS_AT_ONCE * array.chunks[0]):
                under_way.append([pool.submit(write) for write in _writes(array, row, block)])
                row += len(block)
                while len(under_way) > STRETCHES:
                    _wait(under_way.popleft())
        for written in under_way:
            _wait(written)


def _wait(written: list[Future[object]]) -> None:
    for each in written:
        each.result()


def _writes(array: zarr.Array[Any], row: int, block: np.ndarray) -> list[Callable[[], object]]:
    """What stores a block of rows, which begin at a chunk's edge, chunk by chunk."""
    if array.ndim == 2:
        region = slice(row, row + len(block)), slice(0, array.shape[1])
        return [partial(piece.write, [block[piece.source]]) for piece in region_writes(array, region)]
    step = array.chunks[0]
    parts = [slice(first, min(first + step, len(block))) for first in range(0, len(block), step)]
    return [
        partial(write_region, array, [slice(row + part.start, row + part.stop)], block[part])
        for part in parts
    ]


def _regrouped(blocks: Iterable[np.ndarray], length: int) -> Iterator[np.ndarray]:
    """The same rows in blocks of so many."""
    held: list[np.ndarray] = []
    count = 0
    for block in blocks:
        while len(block):
            part = block[: length - count]
            held.append(part)
            count += len(part)
            block = block[len(part) :]
            if count == length:
                yield _joined(held)
                held, count = [], 0
    if held:
        yield _joined(held)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _attributes(
    request: NeighbourRequest, sides: Sides, facts: Mapping[str, Any], check: NeighbourCheck | None
) -> dict[str, Any]:
    """Of the group: what it is, what it was made of and how, and whether that was checked."""
    options = {
        "metric": request.metric,
        "of": request.of,
        "k": request.k,
        "above": request.above,
        "below": request.below,
        "exclude_self": request.exclude_self if request.k is not None else None,
        "precision": request.precision,
    }
    said = {name: value for name, value in options.items() if value is not None}
    names = {role: named(array) for role, array in sides.arrays.items()}
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    told = ", ".join(f"{role} = {name}" for role, name in names.items())
    checked = "not verified" if check is None else f"verified by {check.rows} items"
    made = made_with_coordinates(sides.a, axis_of(sides.of))
    return {
        KINDS[request.work]: said,
        PROVENANCE: {
            "version": __version__,
            "operation": request.work,
            "inputs": names,
            "shapes": {role: list(array.shape) for role, array in sides.arrays.items()},
            **facts,
            "verification": None if check is None else check.to_json(),
        },
        "title": ("nearest neighbours" if request.k is not None else "pairs") + f" of {name_of(sides.a)}",
        "history": f"{now} tilewright {__version__}: {request.work} of {told}"
        f" ({', '.join(f'{name}={value}' for name, value in said.items())}); {checked}",
    } | ({"flattened": {sides.item_name or ROW: made}} if made is not None else {})
