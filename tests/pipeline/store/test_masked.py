"""Arrays beside masks: what is read of them is what NumPy makes of both, whatever their shapes and chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from tilewright.pipeline.store import region as regions
from tilewright.pipeline.store.appearance import appearance_of
from tilewright.pipeline.store.arrays import as_stored_matrix, name_of
from tilewright.pipeline.store.origin import is_same_array
from tilewright.pipeline.store.region import Flattened, HeldMask, Masked
from tilewright.pipeline.store.region_read import read_region, read_targets, region_reads

DTYPES = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8")


def as_seen(x: np.ndarray, rows: tuple[int, ...], columns: tuple[int, ...]) -> np.ndarray:
    sides = [int(np.prod([x.shape[axis] for axis in axes])) for axes in (rows, columns)]
    return x.transpose(rows + columns).reshape(sides)


@given(st.data())
def test_a_region_beside_a_mask_is_numpys(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    draw = data.draw
    ndim = draw(st.integers(2, 4))
    shape = tuple(draw(st.integers(1, 7)) for _ in range(ndim))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    x = rng.integers(0, 100, shape).astype(dtype)
    folder = tmp_path_factory.mktemp("masked")
    stored: Any = zarr.create_array(
        folder / "x",
        data=x,
        chunks=tuple(draw(st.integers(1, side)) for side in shape),
        compressors=draw(st.sampled_from([None, "auto"])),
    )
    axes = tuple(draw(st.permutations(range(ndim)))[: draw(st.integers(1, ndim))])
    sides = tuple(1 if draw(st.integers(0, 3)) == 0 else shape[axis] for axis in axes)
    gone = rng.random(sides) < 0.4
    mask: Any = HeldMask.of(gone)
    if draw(st.booleans(), label="stored mask"):
        chunks = tuple(draw(st.integers(1, side)) for side in sides)
        mask = zarr.create_array(
            folder / "mask", data=gone, chunks=chunks, compressors=draw(st.sampled_from([None, "auto"]))
        )
    seen, order = x, draw(st.permutations(range(ndim)))
    cut = draw(st.integers(1, ndim - 1))
    if ndim > 2 or draw(st.booleans(), label="flattened"):
        rows, columns = tuple(sorted(order[:cut])), tuple(sorted(order[cut:]))
        stored, seen = Flattened(stored, rows, columns), as_seen(x, rows, columns)
    else:
        rows, columns = (0,), (1,)
    masked = Masked(stored, mask, axes)
    along = np.transpose(gone, np.argsort(axes)).reshape(
        [dict(zip(axes, sides, strict=True)).get(axis, 1) for axis in range(ndim)]
    )
    where = as_seen(np.broadcast_to(along, shape), rows, columns)
    expected = seen.astype(masked.dtype)
    expected[where] = np.nan if masked.missing == "nan" else masked.missing
    assert masked.shape == seen.shape
    top, left = (draw(st.integers(0, side - 1)) for side in seen.shape)
    region = (
        slice(top, draw(st.integers(top + 1, seen.shape[0]))),
        slice(left, draw(st.integers(left + 1, seen.shape[1]))),
    )
    np.testing.assert_array_equal(read_region(masked, region), expected[region])
    assert [part.target for part in region_reads(masked, region)] == read_targets(masked, region)
    assert as_stored_matrix(masked).unit == as_stored_matrix(stored).unit
    # No number of the array is taken for a missing one.
    assert masked.missing == "nan" or not np.any(x.astype(masked.dtype) == masked.missing)


def test_a_mask_is_part_of_what_an_array_is(tmp_path: Path) -> None:
    x = zarr.create_array(tmp_path / "x", data=np.ones((4, 5), "f4"))
    one, other = np.zeros(5, bool), np.ones(5, bool)
    masked = [Masked(x, HeldMask.of(gone), (1,)) for gone in (one, one.copy(), other)]
    assert is_same_array(masked[0], masked[1])
    assert not is_same_array(masked[0], masked[2])
    assert not is_same_array(masked[0], x)
    looks = [appearance_of(array) for array in masked]
    assert looks[0] == looks[1]
    assert looks[0] != looks[2]
    assert appearance_of(x) not in looks
    assert name_of(masked[0]) == name_of(x)
    stored = zarr.create_array(tmp_path / "mask", data=one)
    beside = Masked(x, stored, (1,))
    assert is_same_array(beside, Masked(x, zarr.open_array(tmp_path / "mask"), (1,)))
    before = appearance_of(beside)
    stored[0] = True
    assert appearance_of(beside) != before


def test_a_held_mask_is_unpacked_once() -> None:
    mask = HeldMask.of(np.arange(27).reshape(3, 9) % 2 == 0)
    np.testing.assert_array_equal(mask.whole(), np.arange(27).reshape(3, 9) % 2 == 0)
    assert mask.whole() is mask.whole()
    assert len(mask.bits) == 4
    assert set(regions.WIDER) == {"i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"}
