"""How many requests it takes to read arrays in an object store, and how many bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import zarr

import tilewright as tw
from tests.object_stores.proxy import Proxy
from tilewright.pipeline.neighbours import estimate
from tilewright.pipeline.store.arrays import open_array
from tilewright.pipeline.store.region_read import read_region
from tilewright.pipeline.store.remote.opening import store_at

SIDE = 512
EVERYTHING = (slice(0, SIDE), slice(0, SIDE))


@pytest.fixture
def stored(url: str, rng: np.random.Generator, proxy: Proxy) -> Callable[..., tuple[str, np.ndarray]]:
    """Stores 512 × 512 doubles, and says where, and what they are."""

    def store(**how: Any) -> tuple[str, np.ndarray]:
        data = rng.integers(0, 100, (SIDE, SIDE)).astype("f8")
        zarr.create_array(store_at(url), shape=data.shape, dtype="f8", **how)[...] = data
        return url, data

    return store


def read(url: str, proxy: Proxy, region: tuple[slice, slice]) -> np.ndarray:
    """A region of an array; only the requests for its chunks are counted."""
    array = open_array(url, ndim=2, role="A")
    proxy.forget()
    return read_region(array, region)


SHARDED = {"shards": (128, 256), "chunks": (16, 32)}
"""8 shards of 64 chunks of 4 KiB."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("compressors", [None, "auto"])
def test_shards_that_are_wanted_whole_take_a_request_each(
    compressors: str | None, stored: Callable[..., Any], library: str, proxy: Proxy
) -> None:
    url, data = stored(compressors=compressors, **SHARDED)
    np.testing.assert_array_equal(read(url, proxy, EVERYTHING), data)
    assert len(proxy.asked) == proxy.count("GET") == 8
    if compressors is None:
        assert proxy.sent_nbytes == data.nbytes + 8 * (16 * 64 + 4)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("region", "requests"),
    [
        ((slice(0, 8), slice(0, SIDE)), 2),
        ((slice(0, SIDE), slice(0, 8)), 4),
        ((slice(120, 136), slice(250, 260)), 4),
    ],
)
def test_small_shards_are_read_whole_for_a_thin_panel(
    region: tuple[slice, slice], requests: int, stored: Callable[..., Any], proxy: Proxy
) -> None:
    """A shard of 256 KiB takes no longer than its index, and then a part of it."""
    url, data = stored(compressors=None, **SHARDED)
    np.testing.assert_array_equal(read(url, proxy, region), data[region])
    assert len(proxy.asked) == proxy.count("GET") == requests


def test_of_a_large_shard_its_index_and_what_is_wanted_are_read(
    stored: Callable[..., Any], proxy: Proxy
) -> None:
    url, data = stored(compressors=None, shards=(SIDE, SIDE), chunks=(64, 64))
    region = (slice(0, 128), slice(0, 128))
    np.testing.assert_array_equal(read(url, proxy, region), data[region])
    assert [one.byte_range for one in proxy.asked] == ["bytes=-1028", f"bytes=0-{4 * 64 * 64 * 8 - 1}"]
    np.testing.assert_array_equal(read(url, proxy, (slice(0, 64), slice(0, SIDE))), data[:64])
    assert len(proxy.asked) <= 3, "chunks that lie nearly next to each other are read by one request"


@pytest.mark.parametrize("compressors", [None, "auto"])
def test_each_chunk_takes_a_request(
    compressors: str | None, stored: Callable[..., Any], library: str, proxy: Proxy
) -> None:
    url, data = stored(compressors=compressors, chunks=(128, 256))
    np.testing.assert_array_equal(read(url, proxy, EVERYTHING), data)
    assert len(proxy.asked) == proxy.count("GET") == 8
    np.testing.assert_array_equal(read(url, proxy, (slice(0, 8), slice(0, SIDE))), data[:8])
    assert len(proxy.asked) == 2
    if compressors is None:
        assert proxy.sent_nbytes == 8 * SIDE * 8


def test_chunks_that_are_missing_take_a_request_each_and_one_for_the_array(url: str, proxy: Proxy) -> None:
    zarr.create_array(store_at(url), shape=(64, 64), dtype="f8", chunks=(32, 64), fill_value=7)
    np.testing.assert_array_equal(read(url, proxy, (slice(0, 64), slice(0, 64))), 7)
    assert proxy.count("GET", "/c/") == 2
    assert len(proxy.asked) <= 4


def test_zeros_that_are_stored_take_no_more_requests_than_other_numbers(url: str, proxy: Proxy) -> None:
    array = zarr.create_array(
        store_at(url), shape=(64, 64), dtype="f8", chunks=(32, 64), config={"write_empty_chunks": True}
    )
    array[...] = 0
    np.testing.assert_array_equal(read(url, proxy, (slice(0, 64), slice(0, 64))), 0)
    assert len(proxy.asked) == 2


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"chunks": (64, 64)}, marks=pytest.mark.slow),
        {"chunks": (32, 32), "shards": (128, 128)},
        pytest.param({"chunks": (32, 32), "shards": (96, 160)}, marks=pytest.mark.slow),
    ],
)
def test_a_product_takes_the_requests_that_its_plan_says(
    how: dict[str, Any], stored: Callable[..., Any], tmp_path: Path, proxy: Proxy
) -> None:
    url, data = stored(**how)
    options: dict[str, Any] = {"device": "cpu", "device_memory": 2_000_000, "verify": False}
    with dask.config.set({"tilewright.tiles": 4}):
        b = zarr.create_array(tmp_path / "b", data=data, chunks=(64, 64))
        proxy.forget()
        run = tw.matmul(url, tmp_path / "b", tmp_path / "c", **options)
    assert run.plan.tile_count > 1
    assert run.plan.panel_count > 1
    # The only worker is this process: what it sees of the first chunk is not compared with itself.
    assert proxy.count("GET", "/c/") == run.plan.read_requests > 8
    assert f"about {run.plan.read_requests}, for chunks" in str(run.plan)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "c")[...], data @ b[...])


@pytest.mark.more
def test_an_estimate_of_pairs_reads_its_sample_of_b_once(
    stored: Callable[..., Any], tmp_path: Path, proxy: Proxy
) -> None:
    """Each of its tasks compares some items of A, which lie in a chunk, with the same of B."""
    url, data = stored(chunks=(128, SIDE))
    proxy.forget()
    run = tw.pairs(url, None, tmp_path / "p", above=0, verify=False, device="cpu")
    products = np.triu(data @ data.T, 1)
    assert run.count == np.count_nonzero(products > 0)
    blocks, chunks, stretches = run.read_nbytes // data.nbytes, SIDE // 128, SIDE // estimate.ROWS
    assert proxy.count("GET", "/c/") == stretches + chunks + blocks * chunks
