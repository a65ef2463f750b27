"""Filters of elements are undone, and done, without zarr-python, wherever it would make the same numbers of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BytesCodec, TransposeCodec, ZstdCodec
from zarr.codecs import numcodecs as of_three

import tilewright as tw
from tests.pipeline.store.stored_arrays import as_remote, chunk_file
from tilewright.pipeline.errors import DamagedError
from tilewright.pipeline.store.arrays import open_array
from tilewright.pipeline.store.chunks import ELEMENTWISE, layout_of
from tilewright.pipeline.store.region_read import read_region
from tilewright.pipeline.store.region_write import region_writes

pytestmark = pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")

SHAPE = (11, 14)
VALUES = np.random.default_rng(5).integers(-9, 9, SHAPE)
WHOLE, PART = (slice(0, 11), slice(0, 14)), (slice(3, 9), slice(2, 13))

FILTERS: dict[str, tuple[str, Callable[[str], list[Any]], Callable[[], list[Any]]]] = {
    "delta": ("i4", lambda d: [numcodecs.Delta(d)], lambda: [of_three.Delta(dtype="<i4")]),
    "delta of bytes": (
        "i8",
        lambda d: [numcodecs.Delta(d, astype="i1")],
        lambda: [of_three.Delta(dtype="<i8", astype="<i1")],
    ),
    "fixedscaleoffset": (
        "f8",
        lambda d: [numcodecs.FixedScaleOffset(3, 2, d, "i2")],
        lambda: [of_three.FixedScaleOffset(offset=3, scale=2, dtype="<f8", astype="<i2")],
    ),
    "astype": (
        "f4",
        lambda d: [numcodecs.AsType("i2", d)],
        lambda: [of_three.AsType(encode_dtype="<i2", decode_dtype="<f4")],
    ),
    "quantize": (
        "f4",
        lambda d: [numcodecs.Quantize(3, d)],
        lambda: [of_three.Quantize(digits=3, dtype="<f4")],
    ),
    "bitround": ("f4", lambda d: [numcodecs.BitRound(10)], lambda: [of_three.BitRound(keepbits=10)]),
    "two": (
        "i4",
        lambda d: [numcodecs.AsType("i2", d), numcodecs.Delta("i2"), numcodecs.Shuffle(2)],
        lambda: [
            of_three.AsType(encode_dtype="<i2", decode_dtype="<i4"),
            of_three.Delta(dtype="<i2"),
        ],
    ),
}
"""For format 2, of the dtype as stored, and for format 3."""


def stored(folder: Path, name: str, zarr_format: int, **how: Any) -> tuple[zarr.Array[Any], np.ndarray]:
    dtype, of_two, three = FILTERS[name]
    form = how.pop("byte_order", "<") + dtype
    chain = of_two(form) if zarr_format == 2 else three()
    how = {"shape": SHAPE, "chunks": (4, 5), "fill_value": 7, **how}
    array = zarr.create_array(folder, dtype=form, zarr_format=zarr_format, filters=chain, **how)
    array[...] = VALUES
    return array, VALUES.astype(dtype)


WAYS: list[tuple[int, dict[str, Any]]] = [
    (2, {"compressors": None}),
    (2, {"compressors": numcodecs.Blosc(), "order": "F"}),
    (2, {"compressors": numcodecs.Zstd(), "byte_order": ">"}),
    (3, {"compressors": [ZstdCodec()]}),
    (3, {"compressors": None, "shards": (8, 10)}),
]


def test_every_filter_is_tried() -> None:
    tried = {codec.codec_id for dtype, of_two, _ in FILTERS.values() for codec in of_two(dtype)}
    assert tried | {"packbits"} >= set(ELEMENTWISE)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize(("zarr_format", "how"), WAYS, ids=str)
def test_a_filter_is_undone_and_done_as_zarr_does(
    name: str, zarr_format: int, how: dict[str, Any], tmp_path: Path
) -> None:
    array, values = stored(tmp_path / "x", name, zarr_format, **how)
    assert layout_of(array, "x") is not None
    np.testing.assert_array_equal(array[...], values)
    for seen in (array, as_remote(tmp_path / "x")):
        np.testing.assert_array_equal(read_region(seen, WHOLE), values)
        np.testing.assert_array_equal(read_region(seen, PART), values[PART])
    other, _ = stored(tmp_path / "y", name, zarr_format, **how)
    other[...] = 0
    for piece in region_writes(other, WHOLE):
        piece.write(iter([values[piece.source]]))
    np.testing.assert_array_equal(other[...], values)
    if "shards" not in how:
        chunk_file(array, (1, 1)).unlink()
        np.testing.assert_array_equal(read_region(array, WHOLE), array[...])
        data = chunk_file(array, (0, 0)).read_bytes()
        chunk_file(array, (0, 0)).write_bytes(data[:-1])
        with pytest.raises(DamagedError, match=r"chunk \(0, 0\) of .*x.*restore the chunk"):
            read_region(array, WHOLE)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_bits_are_read_as_bool(zarr_format: int, tmp_path: Path) -> None:
    """Also of format 3, whose codec refuses the bytes that an array of bool is opened as."""
    chain = [numcodecs.PackBits()] if zarr_format == 2 else [of_three.PackBits()]
    bits = VALUES > 0
    array = zarr.create_array(
        tmp_path / "x", shape=SHAPE, dtype=bool, chunks=(4, 5), filters=chain, zarr_format=zarr_format
    )
    array[...] = bits
    opened = open_array(tmp_path / "x", ndim=2, role="A")
    assert layout_of(opened, "x") is not None
    np.testing.assert_array_equal(read_region(opened, WHOLE), bits)
    c = tw.matmul(tmp_path / "x", VALUES.T, device="cpu")
    np.testing.assert_array_equal(c, bits @ VALUES.T)


@pytest.mark.parametrize(
    "how",
    [
        lambda: {"filters": [TransposeCodec(order=(1, 0)), of_three.Delta(dtype="<i4")]},
        lambda: {"filters": [of_three.Delta(dtype="<i4")], "serializer": BytesCodec(endian="big")},
        lambda: {"filters": [of_three.Delta(dtype=">i4")]},
        lambda: {"filters": [of_three.Delta(dtype="<u4")]},
    ],
    ids=["another order", "big end first", "filter of big ends", "filter of another dtype"],
)
def test_what_zarr_may_understand_otherwise_is_left_to_it(
    how: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    array = zarr.create_array(tmp_path / "x", shape=SHAPE, dtype="i4", chunks=(4, 5), **how())
    array[...] = VALUES
    assert layout_of(array, "x") is None
    np.testing.assert_array_equal(read_region(array, WHOLE), array[...])
