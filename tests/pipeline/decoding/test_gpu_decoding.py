"""Encoded chunks that a GPU decodes on their way into a panel: every codec, dtype and order; and damaged ones."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.pipeline.store.stored_arrays import CODECS, chunk_file, encoded
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.pipeline.decoding import decoders
from tilewright.pipeline.decoding.choice import inputs_of
from tilewright.pipeline.decoding.coding import BLOSC, RAW
from tilewright.pipeline.decoding.decoders import may_decode
from tilewright.pipeline.decoding.pace import Pace
from tilewright.pipeline.errors import DamagedError
from tilewright.pipeline.plan.decoding import CHECKED, EVERYWHERE, NOWHERE, room_for
from tilewright.pipeline.plan.inputs import Limits
from tilewright.pipeline.plan.memory import Lines
from tilewright.pipeline.plan.product import plan_tiles
from tilewright.pipeline.plan.told import Product
from tilewright.pipeline.store.arrays import as_stored_matrix
from tilewright.pipeline.store.chunks import coding_of
from tilewright.pipeline.store.region_read import read_region
from tilewright.pipeline.worker.load_stage import load_all
from tilewright.pipeline.worker.panels import Placed
from tilewright.pipeline.worker.survey import no_nvcomp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(SIMULATOR, reason="it decodes nothing"),
    pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3:UserWarning"),
]


SUMMED = ["3 zstd, crc32c", "3 lz4, crc32c", "3 blosc, crc32c"]
DECODED_BY_NVCOMP = ["zstd", "lz4", "blosc", "zstd,", "lz4,"]


class GpuAlways(Pace):
    def __init__(self, form: int, nbytes: int, batch: int) -> None:
        super().__init__(form, nbytes, batch)
        self.batch_seconds, self.core_seconds = 0.0, 1e9

    def took(self, *, core: float | None = None, batch: float | None = None) -> None:
        """It stays as it is."""


@contextmanager
def unit_of(array: zarr.Array[Any], nvcomp: int = NOWHERE) -> Iterator[Any]:
    """What loads panels, and has every chunk decoded on the GPU. nvcomp: what it may decode, as a plan has it."""
    from tilewright.pipeline.worker.gpu_unit import CudaUnit

    if nvcomp != NOWHERE and (missing := no_nvcomp()):
        pytest.skip(missing)

    stored = as_stored_matrix(array)
    side = tuple(min(unit, length) for unit, length in zip(stored.unit, array.shape, strict=True))
    room = room_for(inputs_of([array]), 2**34, nvcomp)
    limits = Limits(workers=1, device_nbytes=2**34, read_threads=8, write_threads=1, decoding=room)
    c = np.dtype(np.result_type(array.dtype, np.int64) if array.dtype.kind in "iu" else array.dtype)
    square = as_stored_matrix(array, transpose=True)
    plan = plan_tiles(square, stored, c.newbyteorder("="), (side[1], side[1]), limits, transpose_a=True)
    unit = CudaUnit(Product(array, array, array, plan, "cuda", "full", "test"), GpuAlways)
    unit.wait_for_decoders()
    try:
        yield unit
    finally:
        unit.close()


def loaded(unit: Any, array: zarr.Array[Any], region: tuple[slice, slice]) -> np.ndarray:
    rows, columns = (side.stop - side.start for side in region)
    dtype = array.dtype.newbyteorder("=")
    from numba import cuda

    panel = cuda.to_device(np.zeros(rows * columns, dtype))
    with ThreadPoolExecutor(8) as pool:
        load_all(pool, [unit.loading(array, region, Placed(panel, (rows, columns), Lines(columns, 1)))])
    found: np.ndarray = panel.copy_to_host().reshape(rows, columns)
    return found


def numbers(shape: tuple[int, int], dtype: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    if np.dtype(dtype).kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    values = rng.integers(0, 50, shape).astype(dtype)
    return values + (np.array(3j, dtype) if np.dtype(dtype).kind == "c" else values.dtype.type(0))


@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "i8", "f8", "c8", "c16"])
@pytest.mark.parametrize(("big", "by_columns"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(
    ("codecs", "nvcomp"),
    [(codecs, NOWHERE) for codecs in CODECS]
    + [(codecs, EVERYWHERE) for codecs in CODECS if set(DECODED_BY_NVCOMP) & set(codecs.split(" "))]
    + [(codecs, CHECKED) for codecs in SUMMED],
)
def test_every_codec_comes_to_its_place(
    tmp_path: Path, nvcomp: int, codecs: str, big: bool, by_columns: bool, dtype: str
) -> None:
    data = numbers((700, 900), dtype)
    array = encoded(tmp_path / "a", codecs, data, (200, 256), big=big, by_columns=by_columns)
    region = slice(30, 690), slice(7, 893)
    with unit_of(array, nvcomp) as unit:
        np.testing.assert_array_equal(loaded(unit, array, region), data[region])
        found = coding_of(array)
        if found is not None:
            assert (unit.decoding.on_gpu, unit.decoding.on_cores) == (16, 0)
            expects = may_decode(nvcomp, found[0]) and found[0].form != RAW
            # Blosc stores some chunks as they are.
            assert (unit.decoding.by_nvcomp > 0) == expects or (expects and found[0].form == BLOSC)


@pytest.mark.parametrize("level", [-7, 1, 3, 9, 19])
@pytest.mark.parametrize("dtype", ["f4", "i8", "u1"])
@pytest.mark.parametrize("nvcomp", [NOWHERE, EVERYWHERE])
def test_every_level_and_large_chunks(tmp_path: Path, nvcomp: int, dtype: str, level: int) -> None:
    from zarr.codecs import ZstdCodec

    data = numbers((1000, 3000), dtype)
    data[:300] = data[0]  # runs and long matches
    array = zarr.create_array(
        tmp_path / "a",
        shape=data.shape,
        chunks=(500, 1500),
        dtype=dtype,
        compressors=[ZstdCodec(level=level)],
    )
    array[...] = data
    with unit_of(array, nvcomp) as unit:
        found = loaded(unit, array, (slice(0, 1000), slice(0, 3000)))
        np.testing.assert_array_equal(found, data)
        assert unit.decoding.on_gpu == 4
        assert unit.decoding.by_nvcomp == (4 if nvcomp else 0)


@pytest.mark.parametrize("large", [False, True])
def test_our_kernels_and_nvcomp_share_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """Literals go to the first, sequences to the second, whose workspace lies where the first had theirs."""
    if not large:
        monkeypatch.setattr(decoders, "MOST_LITERAL_NBYTES", 2**10)
    side = 2048 if large else 300
    data = np.random.default_rng(0).standard_normal((2 * side, 3 * side)).astype("f4")
    data[side:] = np.random.default_rng(1).integers(0, 50, (side, 3 * side))
    array = encoded(tmp_path / "a", "2 zstd", data, (side, side))
    region = slice(0, 2 * side), slice(0, 3 * side)
    with unit_of(array, EVERYWHERE) as unit:
        for _ in range(3):
            np.testing.assert_array_equal(loaded(unit, array, region), data)
        assert unit.decoding.on_gpu == 18
        assert unit.decoding.by_nvcomp == 9


@pytest.mark.parametrize("codecs", SUMMED)
@pytest.mark.parametrize("nvcomp", [NOWHERE, CHECKED])
def test_damage_that_a_checksum_shows_never_gives_wrong_numbers(
    tmp_path: Path, codecs: str, nvcomp: int
) -> None:
    """nvCOMP is not even given it."""
    damage_never_gives_wrong_numbers(tmp_path, codecs, nvcomp, 3)


@pytest.mark.parametrize("codecs", ["2 zstd", "3 zstd", "2 lz4", "2 blosc", "3 blosc"])
def test_damage_never_gives_wrong_numbers(tmp_path: Path, codecs: str) -> None:
    damage_never_gives_wrong_numbers(tmp_path, codecs, NOWHERE, 2)


def damage_never_gives_wrong_numbers(tmp_path: Path, codecs: str, nvcomp: int, turns: int) -> None:
    """Of thousands of damaged chunks: what the GPU takes is what a core takes, and what no core takes is an error that
    names the chunk."""
    data = numbers((640, 1024), "i8")
    array = encoded(tmp_path / "a", codecs, data, (16, 32))
    rng = np.random.default_rng(1)
    sound = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    refused = 0
    with unit_of(array, nvcomp) as unit:
        for turn in range(turns):
            for place in range(40 * 32):
                path = chunk_file(array, (place // 32, place % 32))
                path.write_bytes(damaged(sound[path], rng, place + turn))
            for row in range(40):
                region = slice(16 * row, 16 * row + 16), slice(0, 1024)
                try:
                    expected = read_region(array, region)
                except DamagedError:
                    refused += 1
                    with pytest.raises(DamagedError, match="chunk"):
                        loaded(unit, array, region)
                else:
                    np.testing.assert_array_equal(loaded(unit, array, region), expected)
        for path, content in sound.items():
            path.write_bytes(content)
        whole = slice(0, 640), slice(0, 1024)
        np.testing.assert_array_equal(loaded(unit, array, whole), data)
    assert refused


def damaged(stored: bytes, rng: np.random.Generator, how: int) -> bytes:
    data = bytearray(stored)
    place = int(rng.integers(len(data)))
    kind = how % 5
    if kind == 0:
        data[place] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        return bytes(data[:place])
    elif kind == 2:
        data[place : place + 16] = rng.bytes(len(data[place : place + 16]))
    elif kind == 3:
        data += rng.bytes(7)
    return bytes(data)
