"""What is written to a region is what zarr reads there, and all of a stored piece or nothing."""

from __future__ import annotations

import io
import itertools
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import xxhash
import zarr
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import ZstdCodec

from tests.pipeline.store.stored_arrays import KINDS, OUT_OF_SIGHT, any_way, chunk_file, encoded, stored
from tilewright.kernels.numbers import ceil_div
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.plan.told import NOTHING_CHECKSUM, StoredObject
from tilewright.pipeline.store import region_write
from tilewright.pipeline.store.arrays import write_unit
from tilewright.pipeline.store.chunks import Zstd
from tilewright.pipeline.store.objects import object_path
from tilewright.pipeline.store.region_write import region_writes


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", sorted(KINDS))
@given(data=st.data())
def test_what_is_written_in_bands_is_what_numpy_holds(
    kind: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    rows, columns = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30))
    # Of small arrays also single elements, but no hundreds of files.
    chunks = ceil_div(rows, data.draw(st.integers(1, 5))), ceil_div(columns, data.draw(st.integers(1, 5)))
    full = np.arange(1, rows * columns + 1, dtype="f4").reshape(rows, columns)
    array = stored(kind, tmp_path_factory.mktemp("store") / "x.zarr", np.zeros_like(full), chunks)
    unit = write_unit(array)
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
        for piece in region_writes(array, region):
            source = part[piece.source]
            piece.write(source[row : row + step] for row in range(0, source.shape[0], step))
    np.testing.assert_array_equal(array[...], full)  # as zarr reads it, not as we do
    names = [path.name for path in Path(str(array.store.root)).rglob("*")]
    assert not [name for name in names if name.endswith(".partial")]


def assert_stored_in(array: zarr.Array[Any], stored: StoredObject | None) -> None:
    """What a write returns is what lies there."""
    assert stored is not None
    data = object_path(array, stored.place).read_bytes()
    assert (stored.nbytes, stored.checksum) == (len(data), xxhash.xxh3_64_intdigest(data))


def test_what_is_not_stored_since_it_would_be_all_fill_has_no_bytes(tmp_path: Path) -> None:
    array = stored("v3-sharded", tmp_path / "x.zarr", np.ones((8, 6), "f4"), (4, 3))
    (piece,) = region_writes(array, (slice(0, 8), slice(0, 6)))
    assert_stored_in(array, piece.write([np.ones((8, 6), "f4")]))
    empty = piece.write([np.full((8, 6), array.fill_value, "f4")])
    assert empty == StoredObject((0, 0), 0, NOTHING_CHECKSUM)
    assert xxhash.xxh3_64_intdigest(b"") == NOTHING_CHECKSUM
    assert not object_path(array, (0, 0)).exists()


def test_a_shard_is_written_in_one_piece(tmp_path: Path) -> None:
    """Each writer of a shard writes all of it: of two, one would undo what the other did."""
    array = stored("v3-sharded", tmp_path / "x.zarr", np.zeros((20, 18), "f4"), (4, 3))
    assert write_unit(array) == array.shards == (8, 6)
    pieces = region_writes(array, (slice(8, 20), slice(6, 18)))
    assert [piece.source for piece in pieces] == [
        (slice(top, min(top + 8, 12)), slice(left, left + 6)) for top in (0, 8) for left in (0, 6)
    ]


@pytest.mark.parametrize("level", [-100, 0, 22, 23, 100])
def test_every_level_that_numcodecs_takes_is_written_in_bands_too(
    level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes those above libzstd's highest for the highest, and format 2 keeps them as they were given."""
    monkeypatch.setattr(region_write, "SCRAP_NBYTES", 100)
    full = np.arange(10 * 9, dtype="f4").reshape(10, 9)
    array = zarr.create_array(
        str(tmp_path / "x.zarr"),
        shape=full.shape,
        chunks=(10, 9),
        dtype=full.dtype,
        zarr_format=2,
        compressors=numcodecs.Zstd(level=level),
    )
    (piece,) = region_writes(array, (slice(0, 10), slice(0, 9)))
    piece.write([full[:4], full[4:]])
    np.testing.assert_array_equal(array[...], full)


@pytest.mark.parametrize("codecs", ["3 none", "2 none", "3 zstd", "2 zstd", "3 blosc", "2 filtered"])
@pytest.mark.parametrize(("able", "summed"), [(True, True), (True, False), (False, True)])
def test_whole_chunks_are_written_by_another_where_it_can(
    codecs: str, able: bool, summed: bool, tmp_path: Path
) -> None:
    """All rows of plain ones, and of those at the lower edge those that there are."""
    full = np.arange(1, 1 + 10 * 9, dtype="f4").reshape(10, 9)
    empty, plain, zstd = np.zeros_like(full), codecs.endswith("none"), codecs.endswith("zstd")
    if codecs == "2 filtered":
        array = stored("v2-filtered", tmp_path / "x.zarr", empty, (4, 6))
    else:
        array = encoded(tmp_path / "x.zarr", codecs, empty, (4, 6))
    filled = []
    for piece in region_writes(array, (slice(0, 10), slice(0, 9))):
        rows = full[piece.source]

        def fill(descriptor: int, how: Zstd | None, rows: np.ndarray = rows) -> tuple[bool, int | None]:
            filled.append(rows.shape)
            data = rows.tobytes() if able else b"half of it, and then the disk was full" * 100
            if zstd:
                assert how is not None
                data = zstandard.compress(data, how.level)
            else:
                assert how is None
            assert os.pwrite(descriptor, data, 0) == len(data)
            return able, xxhash.xxh3_64_intdigest(data) if summed else None

        bands = (row[None] for row in rows)
        assert_stored_in(array, piece.write(bands, fill))
        if rows.shape in filled and able:
            assert next(bands) is not None, "what another wrote is not written again"
    np.testing.assert_array_equal(array[...], full)
    wanted = [(2, 6), (4, 6), (4, 6)] if plain else [(4, 6), (4, 6)] if zstd else []
    assert sorted(filled) == wanted
    if plain:
        files = [path for path in (tmp_path / "x.zarr").rglob("*") if path.is_file()]
        assert {path.stat().st_size for path in files if path.name[0].isdigit()} == {4 * 6 * 4}


@pytest.mark.parametrize("scrap", [100, region_write.SCRAP_NBYTES])
@pytest.mark.parametrize("codecs", ["3 none", "3 zstd", "3 gzip"])
def test_writes_that_take_less_than_given_are_gone_on_with(
    codecs: str, scrap: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a disk that is nearly full does, or a signal."""
    full = np.random.default_rng(1).random((16, 16))
    array = encoded(tmp_path / "x.zarr", codecs, np.zeros_like(full), (8, 8))
    lengths = []

    class ShortFile(io.FileIO):
        def write(self, data: Any) -> int:
            lengths.append(super().write(memoryview(data)[:100]))
            return lengths[-1]

    monkeypatch.setattr(region_write, "SCRAP_NBYTES", scrap)
    monkeypatch.setattr(
        region_write, "open", lambda path, mode, buffering: ShortFile(path, mode), raising=False
    )
    for piece in region_writes(array, (slice(0, 16), slice(0, 16))):
        piece.write([full[piece.source]])
    np.testing.assert_array_equal(array[...], full)
    assert max(lengths) == 100
    assert len(lengths) > 4 * 3, "no chunk took fewer than four writes"


@pytest.mark.parametrize("level", [1, 9])
@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("scrap", [100, region_write.SCRAP_NBYTES])
def test_chunks_have_zstandards_checksum_where_the_array_says_so(
    scrap: int, checksum: bool, level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they are compressed as a whole or as their rows come."""
    monkeypatch.setattr(region_write, "SCRAP_NBYTES", scrap)
    full = np.arange(16 * 16, dtype="f8").reshape(16, 16)
    array = zarr.create_array(
        tmp_path / "x.zarr",
        shape=full.shape,
        chunks=(8, 8),
        dtype=full.dtype,
        compressors=ZstdCodec(level=level, checksum=checksum),
    )
    for piece in region_writes(array, (slice(0, 16), slice(0, 16))):
        piece.write(row[None] for row in full[piece.source])
    for chunk in itertools.product(range(2), repeat=2):
        stored_chunk = chunk_file(array, chunk).read_bytes()
        assert zstandard.get_frame_parameters(stored_chunk).has_checksum is checksum
    np.testing.assert_array_equal(array[...], full)


@pytest.mark.parametrize("by_another", [False, True])
@pytest.mark.parametrize("kind", ["3 none", "3 zstd", "3 gzip", "2 none", "2 zlib", "3 sharded"])
def test_behind_the_edge_of_an_array_its_fill_value_is_stored(
    kind: str, by_another: bool, tmp_path: Path
) -> None:
    """It shows where somebody makes the array larger."""
    full = np.arange(10, 10 + 10 * 9, dtype="f4").reshape(10, 9)
    array = any_way(kind, tmp_path / "x.zarr", np.zeros_like(full), (4, 6))

    def write(rows: np.ndarray, descriptor: int, how: Zstd | None) -> tuple[bool, int]:
        data = rows.tobytes() if how is None else zstandard.compress(rows.tobytes(), how.level)
        return os.pwrite(descriptor, data, 0) == len(data), xxhash.xxh3_64_intdigest(data)

    for piece in region_writes(array, (slice(0, 10), slice(0, 9))):
        rows = full[piece.source]
        fill = partial(write, rows) if by_another else None
        assert_stored_in(array, piece.write((row[None] for row in rows), fill))
    array.resize((17, 20))
    expected = np.full((17, 20), 7, "f4")
    expected[:10, :9] = full
    np.testing.assert_array_equal(array[...], expected)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device"), r"cannot write chunk \(0, 0\).*No space left"),
        (RuntimeError("the device is lost"), "^the device is lost$"),
        (MemoryError("no room for a band"), "^no room for a band$"),
    ],
)
def test_a_failed_write_leaves_nothing(error: Exception, told: str, tmp_path: Path) -> None:
    array = stored("v3-plain", tmp_path / "x.zarr", np.ones((4, 4), "f4"), (4, 4))

    def broken() -> Any:
        yield np.zeros((2, 4), "f4")
        raise error

    (piece,) = region_writes(array, (slice(0, 4), slice(0, 4)))
    with pytest.raises(StoreError if isinstance(error, OSError) else type(error), match=told):
        piece.write(broken())
    assert (array[...] == 1).all(), "the old chunk stands until the new one is whole"
    assert [path.name for path in (tmp_path / "x.zarr" / "c" / "0").iterdir()] == ["0"]


@pytest.mark.parametrize("codecs", ["3 none", "3 zstd"])
def test_a_chunk_whose_folder_has_become_a_file_is_named(codecs: str, tmp_path: Path) -> None:
    """There a draft can neither be made nor removed."""
    array = encoded(tmp_path / "x.zarr", codecs, np.ones((4, 4), "f4"), (4, 4))
    shutil.rmtree(tmp_path / "x.zarr" / "c")
    (tmp_path / "x.zarr" / "c").touch()
    (piece,) = region_writes(array, (slice(0, 4), slice(0, 4)))
    with pytest.raises(
        StoreError, match=r"cannot write chunk \(0, 0\) of .*x\.zarr to .*x\.zarr/c/0/0: .*irectory"
    ):
        piece.write([np.ones((4, 4), "f4")])


@pytest.mark.parametrize("kind", OUT_OF_SIGHT)
def test_an_array_that_is_out_of_sight_is_not_written(kind: str, tmp_path: Path) -> None:
    array = any_way(kind, tmp_path / "x.zarr", np.ones((8, 8), "f4"), (4, 4))
    (tmp_path / "x.zarr").rename(tmp_path / "elsewhere")
    piece = region_writes(array, (slice(0, 8), slice(0, 8)))[0]
    with pytest.raises(StoreError, match="there is no Zarr array at"):
        piece.write([np.ones([part.stop - part.start for part in piece.source], "f4")])
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
