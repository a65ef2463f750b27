"""Regions read and written past zarr-python: what it wrote is read, and it reads what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.store.stored_arrays import CODECS, chunk_file, encoded
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.store import region_read, region_write
from tilewright.pipeline.store.chunks import layout_of
from tilewright.pipeline.store.region import SCRAP_NBYTES


@pytest.mark.sample(5)
@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")
@pytest.mark.parametrize("codecs", CODECS)
@settings(max_examples=8)  # for each of fourteen chains
@given(data=st.data())
def test_known_codecs_are_read_and_written_as_zarr_does(
    codecs: str,
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        nbytes = data.draw(st.sampled_from([1, 100, SCRAP_NBYTES]))
        patch.setattr(region_read, "SCRAP_NBYTES", nbytes)
        patch.setattr(region_write, "SCRAP_NBYTES", nbytes)
        check_codecs(codecs, tmp_path_factory, data)


def check_codecs(codecs: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30))
    width = data.draw(
        st.one_of(st.just(columns), st.integers(1, 12))
    )  # chunks as wide as the array: in place
    chunks = data.draw(st.integers(1, 12)), width
    row = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
    column = sorted(data.draw(st.tuples(st.integers(0, columns), st.integers(0, columns))))
    dtype = data.draw(st.sampled_from(["f4", "i2", "c16", "u1"]))
    counts = data.draw(st.one_of(st.none(), st.tuples(st.integers(1, 3), st.integers(1, 3))))
    forms: dict[str, Any] = {"big": data.draw(st.booleans()), "by_columns": data.draw(st.booleans())}
    if counts is not None and codecs.startswith("3"):
        forms["shards"] = counts[0] * chunks[0], counts[1] * chunks[1]
    full = np.arange(1, rows * columns + 1).reshape(rows, columns).astype(dtype)
    folder = tmp_path_factory.mktemp("store")
    array = encoded(folder / "x.zarr", codecs, full, chunks, **forms)
    assert layout_of(array, "x") is not None
    np.testing.assert_array_equal(region_read.read_region(array, (slice(0, rows), slice(0, columns))), full)
    region = (slice(*row), slice(*column))
    wide = np.full((row[1] - row[0], column[1] - column[0] + 3), 99, dtype)
    for part in region_read.region_reads(array, region, in_loops=data.draw(st.booleans())):
        part.read(wide[:, : column[1] - column[0]][part.target])
    np.testing.assert_array_equal(wide[:, : column[1] - column[0]], full[region])
    assert (wide[:, column[1] - column[0] :] == 99).all(), "bytes beside the region were written"

    victim = data.draw(
        st.sampled_from(sorted(p for p in array.store.root.rglob("*") if p.name[-1].isdigit()))
    )
    if victim.is_file():
        victim.unlink()  # as if it had never been written
    np.testing.assert_array_equal(
        region_read.read_region(array, (slice(0, rows), slice(0, columns))), np.asarray(array[...])
    )

    ours = encoded(folder / "y.zarr", codecs, np.zeros_like(full), chunks, **forms)
    for piece in region_write.region_writes(ours, (slice(0, rows), slice(0, columns))):
        source = full[piece.source]
        piece.write(source[start : start + 2] for start in range(0, source.shape[0], 2))
    np.testing.assert_array_equal(ours[...], full)  # as zarr reads it, not as we do


@pytest.mark.parametrize("in_loops", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_zstandard_never_lies_in_memory_as_a_whole(
    sharded: bool, in_loops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is no sound chunk of the array is told as in the ordinary way."""
    full = np.random.default_rng(0).standard_normal((8, 12))
    array = encoded(tmp_path / "x.zarr", "3 zstd", full, (4, 6), **({"shards": (4, 6)} if sharded else {}))
    monkeypatch.setattr(region_read, "SCRAP_NBYTES", 100)
    monkeypatch.setattr(region_write, "SCRAP_NBYTES", 100)
    decoded: list[tuple[slice, ...]] = []
    decode = region_read._decode_part

    def counting(layout: Any, data: bytes, wanted: region_read.Wanted) -> None:
        decoded.extend(inside for inside, _ in wanted)
        decode(layout, data, wanted)

    monkeypatch.setattr(region_read, "_decode_part", counting)

    def read(region: tuple[slice, slice]) -> None:
        for part in region_read.region_reads(array, region, in_loops=in_loops):
            block = np.full(part.shape, 99.0)
            part.read(block)
            np.testing.assert_array_equal(block, full[region][part.target])

    read((slice(0, 8), slice(0, 12)))
    read((slice(0, 4), slice(1, 12)))
    read((slice(3, 6), slice(2, 3)))
    assert decoded == []
    if sharded:
        return
    file = chunk_file(array, (1, 1))
    good = file.read_bytes()
    for region in ((slice(4, 8), slice(6, 12)), (slice(4, 5), slice(7, 8))):
        for bad in (good[:-1], good[:-1] + bytes([good[-1] ^ 1]), good + b"x", b"", b"no frame"):
            file.write_bytes(bad)
            with pytest.raises(StoreError, match=r"chunk \(1, 1\) of .* cannot be read"):
                read(region)
        file.write_bytes(zstandard.compress(bytes(4 * 6 * 8 + 1)))
        with pytest.raises(StoreError, match="decodes to 193 bytes and a chunk has 192"):
            read(region)
    assert len(decoded) == 12
    file.unlink()
    full[4:, 6:] = 7  # the fill value
    read((slice(0, 8), slice(0, 12)))

    def encode(*_: Any) -> None:
        raise AssertionError("as a whole")

    monkeypatch.setattr(region_write, "encode", encode)
    for piece in region_write.region_writes(array, (slice(0, 8), slice(0, 12))):
        source = -full[piece.source]
        piece.write(source[start : start + 3] for start in range(0, source.shape[0], 3))
    np.testing.assert_array_equal(array[...], -full)
    assert zstandard.get_frame_parameters(file.read_bytes()).content_size == 4 * 6 * 8


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")
@pytest.mark.parametrize("codecs", CODECS)
def test_local_chunks_are_read_and_written_without_zarr(
    codecs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = np.arange(200, dtype="f4").reshape(10, 20)
    array = encoded(tmp_path / "x.zarr", codecs, full, (4, 6))

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("zarr was asked although the chunks lie plain")

    monkeypatch.setattr(zarr.Array, "get_basic_selection", forbidden)
    monkeypatch.setattr(zarr.Array, "__setitem__", forbidden)
    np.testing.assert_array_equal(
        region_read.read_region(array, (slice(1, 9), slice(3, 20))), full[1:9, 3:20]
    )
    (piece,) = region_write.region_writes(array, (slice(4, 8), slice(6, 12)))
    piece.write([np.full((4, 6), -1, "f4")])
    assert (region_read.read_region(array, (slice(4, 8), slice(6, 12))) == -1).all()
