"""Arrays of two to five dimensions as matrices: whatever their chunks and codecs, what is read is what NumPy makes of
them by transposing and reshaping."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BytesCodec, Crc32cCodec, TransposeCodec, ZstdCodec

from tests.pipeline.store.stored_arrays import as_remote
from tests.pipeline.store.test_region_uploads import bring
from tests.sampling import examples
from tilewright.pipeline.store import region_read
from tilewright.pipeline.store.arrays import as_stored_matrix, is_plain
from tilewright.pipeline.store.chunks import layout_of
from tilewright.pipeline.store.content import chunks_text
from tilewright.pipeline.store.region import FlatSide, Flattened, chunks_in
from tilewright.pipeline.store.region_read import read_region, read_targets, region_reads

LARGEST = 400
"""Elements of an array that is tried."""


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Of an array: its shape, its chunks, the axes that become rows and those that become columns."""
    ndim = draw(st.integers(2, 5))
    shape: list[int] = []
    for _ in range(ndim):
        shape.append(draw(st.integers(1, min(12, LARGEST // math.prod(shape)))))
    # Along most axes a chunk is one element or all: so most sides are regular.
    chunks = [draw(st.sampled_from([1, length, length, *range(1, length + 3)])) for length in shape]
    axes = draw(st.permutations(range(ndim)) | st.just(list(range(ndim))))
    cut = draw(st.integers(1, ndim - 1))
    return tuple(shape), tuple(chunks), tuple(axes[:cut]), tuple(axes[cut:])


def put(draw: Any, folder: Path, values: np.ndarray, chunks: tuple[int, ...]) -> zarr.Array[Any]:
    """An array stored in one of the ways that there are; some of its chunks were never written, and hold 7."""
    options: dict[str, Any] = {"zarr_format": draw(st.sampled_from([2, 3]), label="format")}
    if options["zarr_format"] == 2:
        options["order"] = draw(st.sampled_from("CF"))
        filters = st.sampled_from([None, None, [numcodecs.Delta(values.dtype.str)]])
        options |= {"compressors": draw(st.sampled_from([None, numcodecs.Zstd()])), "filters": draw(filters)}
    else:
        order = draw(st.permutations(range(values.ndim)) | st.just(None), label="order")
        endian = draw(st.sampled_from(["little", "big"]))
        codecs = [None, [ZstdCodec(checksum=True)], [Crc32cCodec()]]
        options |= {
            "filters": [TransposeCodec(order=order)] if order else None,
            "serializer": BytesCodec(endian=endian),
            "compressors": draw(st.sampled_from(codecs)),
        }
        if draw(st.booleans(), label="sharded"):
            options["shards"] = tuple(side * draw(st.integers(1, 3)) for side in chunks)
    array = zarr.create_array(
        folder, shape=values.shape, chunks=chunks, dtype=values.dtype, fill_value=7, **options
    )
    array[tuple(slice(0, max(1, length - 1)) for length in values.shape)] = values[
        tuple(slice(0, max(1, length - 1)) for length in values.shape)
    ]
    return array


def part_of(draw: Any, length: int) -> slice:
    start = draw(st.integers(0, length - 1))
    return slice(start, draw(st.integers(start + 1, length)))


@settings(deadline=None, max_examples=examples(40))
@given(data=st.data())
def test_a_region_is_what_numpy_makes_of_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    draw = data.draw
    shape, chunks, rows, columns = draw(views())
    values = np.arange(1, math.prod(shape) + 1, dtype="f4").reshape(shape)
    folder = tmp_path_factory.mktemp("array") / "x.zarr"
    array = put(draw, folder, values, chunks)
    whole = (
        array[...]
        .transpose(rows + columns)
        .reshape(math.prod(shape[axis] for axis in rows), math.prod(shape[axis] for axis in columns))
    )
    view = Flattened(array, rows, columns)
    assert view.shape == whole.shape
    region = part_of(draw, whole.shape[0]), part_of(draw, whole.shape[1])
    expected = whole[region]
    wide = np.full((expected.shape[0], expected.shape[1] + draw(st.integers(0, 3))), -1, "f4")
    held = wide[:, : expected.shape[1]]  # rows further apart than their length
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(region_read, "READ_NBYTES", draw(st.sampled_from([1, 30, 10**6])))
        patch.setattr(region_read, "SCRAP_NBYTES", draw(st.sampled_from([1, 30, 10**6])))
        parts = region_reads(view, region, in_loops=draw(st.booleans()))
        assert read_targets(view, region) == [part.target for part in parts]
        times = np.zeros(expected.shape, int)
        for part in parts:
            part.read(held[part.target])
            times[part.target] += 1
    assert (times == 1).all(), "parts overlap, or leave something out"
    np.testing.assert_array_equal(held, expected)
    assert (wide[:, expected.shape[1] :] == -1).all(), "bytes beside the region were written"
    np.testing.assert_array_equal(read_region(Flattened(as_remote(folder), rows, columns), region), expected)
    if array.dtype.isnative:
        brought, _ = bring(view, region, wide.shape[1], 2)
        np.testing.assert_array_equal(brought, expected)


@settings(deadline=None, max_examples=examples(60))
@given(view=views(), plain=st.booleans())
def test_no_chunk_is_cut_at_multiples_of_the_unit(
    tmp_path_factory: pytest.TempPathFactory, view: Any, plain: bool
) -> None:
    """Pieces of the unit's sides touch every chunk once, so that none is decoded for two of them."""
    shape, chunks, rows, columns = view
    array = zarr.create_array({}, shape=shape, chunks=chunks, dtype="u1")
    matrix = Flattened(array, rows, columns)
    whole = tuple(slice(0, side) for side in matrix.shape)
    seen: list[tuple[int, ...]] = []
    for piece in chunks_in(whole, matrix.unit):
        boxes = matrix.boxes(piece.target)
        seen += {part.chunk for box in boxes for part in chunks_in(box.region, chunks)}
    assert len(seen) == len(set(seen)) == array.nchunks


@pytest.mark.parametrize(
    ("lengths", "chunks", "unit", "regular"),
    [
        ((9,), (4,), 4, True),
        ((180, 360), (180, 360), 180 * 360, True),
        ((180, 360), (50, 360), 50 * 360, True),  # the last chunk reaches beyond the array
        ((180, 360), (1, 90), 90, True),
        ((180, 360), (1, 100), 360, False),  # every map row ends inside a chunk
        ((180, 360), (30, 60), 30 * 360, False),
        ((180, 360), (50, 400), 50 * 360, False),
        ((3, 180, 360), (1, 50, 360), 180 * 360, False),
        ((3, 180, 360), (1, 45, 360), 45 * 360, True),
        ((1, 180, 360), (1, 50, 360), 50 * 360, True),
        ((1, 180, 360), (5, 50, 90), 50 * 360, False),
        ((4, 1), (1, 1), 1, True),
    ],
)
def test_what_whole_chunks_make_of_a_side(
    lengths: tuple[int, ...], chunks: tuple[int, ...], unit: int, regular: bool
) -> None:
    side = FlatSide(lengths, chunks)
    assert (side.unit, side.is_regular) == (unit, regular)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(
    ("chunks", "rows", "columns", "rectangles", "plain"),
    [
        ((2, 5, 6), (0,), (1, 2), True, True),  # whole maps
        ((4, 5, 3), (0,), (1, 2), False, True),  # parts of them
        ((1, 1, 6), (0, 1), (2,), True, True),
        ((4, 5, 6), (1,), (0, 2), False, False),  # rows interleave
        ((4, 5, 1), (1,), (2, 0), True, False),  # a chunk is column after column
    ],
)
def test_which_chunks_are_rectangles(
    chunks: Any, rows: Any, columns: Any, rectangles: bool, plain: bool, order: str, tmp_path: Path
) -> None:
    """Those are read as a matrix's own are, by loops too."""
    options: dict[str, Any] = {"zarr_format": 2, "order": order, "compressors": None}
    array = zarr.create_array(tmp_path / "x.zarr", shape=(4, 5, 6), chunks=chunks, dtype="f4", **options)
    view = Flattened(array, rows, columns)
    if order == "C":
        assert (layout_of(view, "x") is not None) == rectangles
        assert is_plain(view) == as_stored_matrix(view).plain == plain
    elif layout_of(view, "x") is None:
        assert not is_plain(view)


def test_changed_parts_are_named_by_the_chunks_of_the_array(tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path / "x.zarr", shape=(4, 5, 6), chunks=(2, 5, 3), dtype="f4")
    view = Flattened(array, (0,), (1, 2))
    assert chunks_text(view, (0, 2, 0, 3)) == "chunk (0, 0, 0)"
    assert chunks_text(view, (1, 4, 0, 30)) == "chunks (0, 0, 0) to (1, 0, 1)"
