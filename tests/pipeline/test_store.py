"""Whatever way an array is stored, a region of it is what NumPy slices out of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.storage import MemoryStore

from tilewright.pipeline import store
from tilewright.pipeline.errors import DTypeError, OutputError, OutputExistsError, ShapeError, StoreError
from tilewright.pipeline.plan import StoredMatrix

KINDS: dict[str, dict[str, Any]] = {
    "v3-plain": {"zarr_format": 3, "compressors": None},
    "v3-zstd": {"zarr_format": 3},
    "v3-big-endian": {"zarr_format": 3, "compressors": None, "dtype": ">f4"},
    "v3-sharded": {"zarr_format": 3, "compressors": None, "sharded": True},
    "v2-plain": {"zarr_format": 2, "compressors": None, "order": "C"},
    "v2-fortran": {"zarr_format": 2, "compressors": None, "order": "F"},
    "v2-compressed": {"zarr_format": 2},
}


def stored(kind: str, target: Any, data: np.ndarray, chunks: tuple[int, ...]) -> zarr.Array[Any]:
    options = dict(KINDS[kind])
    dtype = options.pop("dtype", data.dtype)
    if options.pop("sharded", False):
        options["shards"] = tuple(2 * side for side in chunks)
    array = zarr.create_array(target, shape=data.shape, chunks=chunks, dtype=dtype, fill_value=7, **options)
    array[...] = data
    return array


@pytest.mark.parametrize("kind", sorted(KINDS))
@given(data=st.data())
def test_a_region_is_what_numpy_slices(
    kind: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    rows, columns = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30))
    chunks = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    row = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
    column = sorted(data.draw(st.tuples(st.integers(0, columns), st.integers(0, columns))))
    full = np.arange(rows * columns, dtype="f4").reshape(rows, columns)
    array = stored(kind, tmp_path_factory.mktemp("store") / "x.zarr", full, chunks)
    region = (slice(*row), slice(*column))
    wide = np.full(
        (row[1] - row[0], column[1] - column[0] + 3), -1, "f4"
    )  # rows further apart than their length
    with ThreadPoolExecutor(2) as pool:
        parts = store.region_reads(array, region, most_nbytes=data.draw(st.sampled_from([1, 100, 10**6])))
        store.run_all(
            pool, [partial(part.read, wide[:, : column[1] - column[0]][part.target]) for part in parts]
        )
    np.testing.assert_array_equal(wide[:, : column[1] - column[0]], full[region])
    assert (wide[:, column[1] - column[0] :] == -1).all(), "bytes beside the region were written"
    np.testing.assert_array_equal(store.read_region(array, region), full[region])


@pytest.mark.parametrize("kind", ["v3-plain", "v2-plain"])
def test_plain_local_chunks_are_read_without_zarr(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = np.arange(200, dtype="f4").reshape(10, 20)
    array = stored(kind, tmp_path / "x.zarr", full, (4, 6))

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("zarr was asked although the chunks lie plain")

    monkeypatch.setattr(zarr.Array, "get_basic_selection", forbidden)
    np.testing.assert_array_equal(store.read_region(array, (slice(1, 9), slice(3, 20))), full[1:9, 3:20])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_chunks_never_written_hold_the_fill_value(kind: str, tmp_path: Path) -> None:
    options = dict(KINDS[kind])
    dtype = options.pop("dtype", "f4")
    if options.pop("sharded", False):
        options["shards"] = (8, 8)
    array = zarr.create_array(
        tmp_path / "x.zarr", shape=(9, 9), chunks=(4, 4), dtype=dtype, fill_value=7, **options
    )
    np.testing.assert_array_equal(
        store.read_region(array, (slice(1, 9), slice(0, 5))), np.full((8, 5), 7, "f4")
    )


@pytest.mark.parametrize("columns", [slice(0, 300), slice(1, 300), slice(20, 30), slice(299, 300)])
@pytest.mark.parametrize("long_row", [1, 10**6])
@pytest.mark.parametrize("scrap", [1, 5000, 10**6])
def test_every_way_to_read_part_of_a_chunk(
    columns: slice, long_row: int, scrap: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LONG_ROW_NBYTES", long_row)
    monkeypatch.setattr(store, "SCRAP_NBYTES", scrap)
    full = np.arange(50 * 300, dtype="i2").reshape(50, 300)
    array = stored("v3-plain", tmp_path / "x.zarr", full, (50, 300))
    out = np.full((43, 304), -1, "i2")[:, : columns.stop - columns.start]
    for part in store.region_reads(array, (slice(3, 46), columns)):
        part.read(out[part.target])
    np.testing.assert_array_equal(out, full[3:46, columns])


def test_vectors_are_read_too(tmp_path: Path) -> None:
    full = np.arange(100, dtype="f8")
    array = stored("v3-plain", tmp_path / "x.zarr", full, (7,))
    np.testing.assert_array_equal(store.read_region(array, (slice(3, 95),)), full[3:95])


@pytest.mark.parametrize("kind", sorted(KINDS))
@given(data=st.data())
def test_what_is_written_in_bands_is_what_numpy_holds(
    kind: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    rows, columns = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30))
    chunks = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    full = np.arange(1, rows * columns + 1, dtype="f4").reshape(rows, columns)
    array = stored(kind, tmp_path_factory.mktemp("store") / "x.zarr", np.zeros_like(full), chunks)
    unit = store.write_unit(array)
    cut = (
        min(rows, unit[0] * data.draw(st.integers(0, 3))),
        min(columns, unit[1] * data.draw(st.integers(0, 3))),
    )
    step = data.draw(st.integers(1, 5))
    for region in [
        (slice(*row), slice(*column))
        for row in ((0, cut[0]), (cut[0], rows))
        for column in ((0, cut[1]), (cut[1], columns))
    ]:
        part = full[region]
        for piece in store.region_writes(array, region):
            source = part[piece.source]
            piece.write(source[row : row + step] for row in range(0, source.shape[0], step))
    np.testing.assert_array_equal(array[...], full)  # as zarr reads it, not as we do
    names = [path.name for path in Path(str(array.store.root)).rglob("*")]
    assert not [name for name in names if name.endswith(".partial")]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    array = stored("v3-plain", tmp_path / "x.zarr", np.ones((4, 4), "f4"), (4, 4))

    def broken() -> Any:
        yield np.zeros((2, 4), "f4")
        raise OSError(28, "No space left on device")

    (piece,) = store.region_writes(array, (slice(0, 4), slice(0, 4)))
    with pytest.raises(StoreError, match=r"cannot write chunk \(0, 0\).*No space left"):
        piece.write(broken())
    assert (array[...] == 1).all(), "the old chunk stands until the new one is whole"
    assert [path.name for path in (tmp_path / "x.zarr" / "c" / "0").iterdir()] == ["0"]


def test_a_damaged_chunk_is_named(tmp_path: Path) -> None:
    array = stored("v3-plain", tmp_path / "x.zarr", np.ones((8, 8), "f4"), (4, 4))
    victim = tmp_path / "x.zarr" / "c" / "1" / "0"
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"chunk \(1, 0\) of .*x\.zarr.* 63 bytes .* 64"):
        store.read_region(array, (slice(0, 8), slice(0, 8)))


@pytest.mark.parametrize("kind", ["v3-zstd", "v2-compressed"])
def test_a_chunk_that_does_not_decode_is_named(kind: str, tmp_path: Path) -> None:
    array = stored(kind, tmp_path / "x.zarr", np.ones((8, 8), "f4"), (4, 4))
    victim = tmp_path / "x.zarr" / array.metadata.encode_chunk_key((1, 0))
    victim.write_bytes(b"\x00garbage")
    with pytest.raises(StoreError, match=r"chunk \(1, 0\) of .*x\.zarr"):
        store.read_region(array, (slice(0, 8), slice(0, 8)))


def test_open_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"A: there is no Zarr array at .*nope"):
        store.open_array(tmp_path / "nope", ndim=2, role="A")
    zarr.open_group(tmp_path / "group", mode="w")
    with pytest.raises(StoreError, match=r"B: .*group is not a Zarr array"):
        store.open_array(tmp_path / "group", ndim=2, role="B")
    (tmp_path / "file").write_text("no array")
    with pytest.raises(StoreError, match=r"file"):
        store.open_array(tmp_path / "file", ndim=2, role="A")
    zarr.create_array(tmp_path / "cube", shape=(2, 2, 2), chunks=(1, 1, 1), dtype="f4")
    with pytest.raises(ShapeError, match=r"shape \(2, 2, 2\).*2 dimensions"):
        store.open_array(tmp_path / "cube", ndim=2, role="A")
    zarr.create_array(tmp_path / "dates", shape=(2, 2), chunks=(1, 1), dtype="M8[s]", zarr_format=2)
    with pytest.raises(DTypeError, match=r"datetime64"):
        store.open_array(tmp_path / "dates", ndim=2, role="A")


def test_an_output_has_its_name_only_when_published(tmp_path: Path) -> None:
    final = tmp_path / "c.zarr"
    output = store.create_output(final, (4, 4), np.dtype("f4"), (2, 2), compressed=False, overwrite=False)
    store.write_region(output.array, (slice(0, 4), slice(0, 4)), np.ones((4, 4), "f4"))
    assert not final.exists()
    output.publish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.zarr"]
    with pytest.raises(OutputExistsError, match="exists"):
        store.check_output_free(final, overwrite=False)
    store.check_output_free(final, overwrite=True)
    again = store.create_output(final, (2, 2), np.dtype("f4"), (2, 2), compressed=True, overwrite=True)
    assert zarr.open_array(final).shape == (4, 4), "the old product stands until the new one is whole"
    again.publish()
    assert zarr.open_array(final).shape == (2, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.zarr"]


def test_a_given_output_is_checked(tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path / "c.zarr", shape=(4, 4), chunks=(2, 2), dtype="f4")
    store.check_given_output(array, (4, 4), np.dtype("f4"))
    with pytest.raises(OutputError, match="shape"):
        store.check_given_output(array, (4, 5), np.dtype("f4"))
    with pytest.raises(OutputError, match="float32"):
        store.check_given_output(array, (4, 4), np.dtype("f8"))
    with pytest.raises(OutputError, match="reading only"):
        store.check_given_output(zarr.open_array(tmp_path / "c.zarr", mode="r"), (4, 4), np.dtype("f4"))


def test_memory_stores_are_known() -> None:
    array = zarr.create_array(MemoryStore(), shape=(2, 2), chunks=(1, 1), dtype="f4")
    assert store.in_memory(array)


@given(units=st.tuples(*[st.integers(1, 5000)] * 4), itemsize=st.sampled_from([1, 2, 4, 8, 16]))
def test_chunks_of_an_output_are_neither_tiny_nor_huge(
    units: tuple[int, int, int, int], itemsize: int
) -> None:
    dtype = np.dtype(f"V{itemsize}")
    a, b = StoredMatrix(5000, 9, dtype, units[:2]), StoredMatrix(9, 4000, dtype, units[2:])
    for memory in (2**20, 2**25, 2**40):
        rows, columns = store.output_chunks(a, b, itemsize, memory)
        assert 1 <= rows <= 5000
        assert 1 <= columns <= 4000
        most = max(store.LEAST_CHUNK_NBYTES, min(store.MOST_CHUNK_NBYTES, memory // 8))
        assert rows * columns * itemsize >= store.LEAST_CHUNK_NBYTES // 2
        assert rows * columns * itemsize <= most
