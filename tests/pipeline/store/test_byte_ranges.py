"""Of chunks in stores that are not local no more is asked for than a region needs, and a region is what it is."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BytesCodec
from zarr.storage import FsspecStore

from tests.pipeline.store.stored_arrays import CODECS, KINDS, as_remote, chunk_file, encoded, stored
from tests.sampling import examples
from tilewright.pipeline.errors import DamagedError, StoreError
from tilewright.pipeline.store.byte_ranges import (
    JOINED_NBYTES,
    REQUEST_NBYTES,
    block_of,
    byte_ranges_of,
    joined,
)
from tilewright.pipeline.store.chunks import ChunkLayout, Shards
from tilewright.pipeline.store.region_read import read_region
from tilewright.pipeline.store.waiting import read_while

REGIONS = [
    (slice(0, 20), slice(0, 30)),
    (slice(0, 20), slice(7, 8)),
    (slice(3, 4), slice(0, 30)),
    (slice(5, 17), slice(9, 26)),
    (slice(9, 9), slice(0, 4)),
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every request for chunks: the key, and the bytes it gave."""
    requests: list[tuple[str, int]] = []
    get = FsspecStore.get

    async def counted(store: FsspecStore, key: str, *arguments: Any, **options: Any) -> Any:
        found = await get(store, key, *arguments, **options)
        if key.startswith("c/"):
            requests.append((key, 0 if found is None else len(found)))
        return found

    monkeypatch.setattr(FsspecStore, "get", counted)
    return requests


def remote(array: zarr.Array[Any]) -> zarr.Array[Any]:
    return as_remote(array.store.root)


@pytest.mark.sample(9)
@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")
@pytest.mark.parametrize(
    ("codecs", "sharded"),
    [(name, False) for name in CODECS] + [(name, True) for name in CODECS if CODECS[name][0] == 3],
)
@pytest.mark.parametrize(("by_columns", "big"), [(False, False), (True, True)])
def test_a_region_is_what_numpy_slices(
    codecs: str, sharded: bool, by_columns: bool, big: bool, tmp_path: Path
) -> None:
    full = np.arange(600, dtype="f4").reshape(20, 30)
    shards = (12, 16) if sharded else None
    array = encoded(tmp_path / "x", codecs, full, (6, 8), big=big, by_columns=by_columns, shards=shards)
    for region in REGIONS:
        np.testing.assert_array_equal(read_region(remote(array), region), full[region])


@pytest.mark.parametrize("kind", KINDS)
def test_a_vectors_region_is_what_numpy_slices(kind: str, tmp_path: Path) -> None:
    full = np.arange(50, dtype="f4")
    array = remote(stored(kind, tmp_path / "x", full, (8,)))
    for region in (slice(0, 50), slice(3, 5), slice(7, 33), slice(48, 50)):
        np.testing.assert_array_equal(read_region(array, (region,)), full[region])


@pytest.mark.parametrize("index", ["start", "end"])
def test_chunks_that_were_never_written_hold_the_fill_value(index: str, tmp_path: Path) -> None:
    chain = zarr.codecs.ShardingCodec(
        chunk_shape=(2, 4),
        codecs=[BytesCodec()],
        index_location=index,  # type: ignore[arg-type]
    )
    array = zarr.create_array(
        tmp_path / "x",
        shape=(8, 8),
        chunks=(4, 8),
        dtype="i4",
        fill_value=7,
        serializer=chain,
        compressors=None,
    )
    array[:2, :4] = 1
    expected = np.full((8, 8), 7, "i4")
    expected[:2, :4] = 1
    np.testing.assert_array_equal(read_region(remote(array), (slice(0, 8), slice(0, 8))), expected)
    plain = stored("v3-plain", tmp_path / "y", np.ones((8, 8), "i4"), (4, 4))
    chunk_file(plain, (0, 1)).unlink()
    np.testing.assert_array_equal(read_region(remote(plain), (slice(0, 2), slice(2, 6))), [[1, 1, 7, 7]] * 2)


@pytest.mark.parametrize(
    ("by_columns", "region", "nbytes"),
    [
        (False, (slice(3, 5), slice(0, 64)), 2 * 64 * 8),
        (False, (slice(3, 5), slice(8, 16)), 2 * 64 * 8),
        (False, (slice(3, 4), slice(8, 16)), 8 * 8),
        (True, (slice(0, 64), slice(3, 5)), 2 * 64 * 8),
        (True, (slice(8, 16), slice(3, 4)), 8 * 8),
        (False, (slice(0, 64), slice(3, 5)), 64 * 64 * 8),
    ],
)
def test_of_a_plain_chunk_the_lines_that_are_needed_are_asked_for(
    by_columns: bool, region: Any, nbytes: int, tmp_path: Path, asked: list[tuple[str, int]]
) -> None:
    full = np.arange(64 * 64, dtype="f8").reshape(64, 64)
    array = remote(encoded(tmp_path / "x", "3 none", full, (64, 64), by_columns=by_columns))
    np.testing.assert_array_equal(read_region(array, region), full[region])
    assert asked == [("c/0/0", nbytes)]


@pytest.mark.parametrize("codecs", ["3 none", "3 zstd"])
def test_the_index_of_a_shard_is_asked_for_once(
    codecs: str, tmp_path: Path, asked: list[tuple[str, int]]
) -> None:
    """Of shards that are too large to be read whole for it."""
    full = np.arange(1024 * 1024, dtype="f8").reshape(1024, 1024)
    array = remote(encoded(tmp_path / "x", codecs, full, (64, 64), shards=(512, 1024)))
    region = (slice(0, 1024), slice(0, 256))
    np.testing.assert_array_equal(read_region(array, region), full[region])
    index_nbytes = 16 * 8 * 16 + 4
    assert asked.count(("c/0/0", index_nbytes)) == asked.count(("c/1/0", index_nbytes)) == 1
    assert len(asked) == 4
    if codecs == "3 none":
        del asked[:]
        read_region(array, (slice(3, 4), slice(0, 16)))
        assert asked == [("c/0/0", index_nbytes), ("c/0/0", 16 * 8)]


def test_small_shards_are_asked_for_whole(tmp_path: Path, asked: list[tuple[str, int]]) -> None:
    full = np.arange(64 * 64, dtype="f8").reshape(64, 64)
    array = remote(encoded(tmp_path / "x", "3 none", full, (16, 16), shards=(32, 64)))
    np.testing.assert_array_equal(read_region(array, (slice(0, 64), slice(0, 48))), full[:, :48])
    assert sorted(asked) == [("c/0/0", 32 * 64 * 8 + 16 * 8 + 4), ("c/1/0", 32 * 64 * 8 + 16 * 8 + 4)]


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.integers(0, 8 * REQUEST_NBYTES), st.integers(1, REQUEST_NBYTES)), max_size=12))
def test_stretches_hold_all_extents_and_lie_far_apart(extents: list[tuple[int, int]]) -> None:
    stretches = joined(extents)
    for offset, nbytes in extents:
        assert sum(one.start <= offset and offset + nbytes <= one.stop for one in stretches) == 1
    for one, other in itertools.pairwise(stretches):
        assert other.start - one.stop > REQUEST_NBYTES
    for one in stretches:
        assert one.start in {offset for offset, _ in extents}
        assert one.stop in {offset + nbytes for offset, nbytes in extents}


@settings(max_examples=examples(60))
@given(st.tuples(st.integers(1, 64), st.integers(1, 64)), st.integers(1, 2 * JOINED_NBYTES))
def test_blocks_divide_a_shard_and_are_not_too_large(counts: tuple[int, int], nbytes: int) -> None:
    layout = ChunkLayout(
        "x", Path(), "zarr.json", str, (1, nbytes), np.dtype("u1"), 0, shards=Shards(counts, False, ())
    )
    rows, columns = block_of(layout)
    assert counts[0] % rows == 0 == counts[1] * nbytes % columns
    assert columns % nbytes == 0
    assert rows * columns <= max(JOINED_NBYTES, nbytes)


@pytest.fixture
def index(tmp_path: Path) -> Callable[[], Any]:
    """Gets the index of an array's only shard, as threads do that read a region together."""
    array = remote(encoded(tmp_path / "x", "3 none", np.ones((8, 8)), (4, 4), shards=(8, 8)))
    ranges = byte_ranges_of(array, "x")
    assert ranges is not None
    return partial(ranges._index, "c/0/0")


def test_a_failed_index_answers_all_who_wait_and_is_forgotten(
    index: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, get = 12, FsspecStore.get
    waiting: set[int] = set()
    asked: list[str] = []

    async def failing(store: FsspecStore, key: str, *arguments: Any, **options: Any) -> Any:
        asked.append(key)
        until = time.monotonic() + 5
        while len(waiting) < threads and time.monotonic() < until:
            await asyncio.sleep(0.01)
        raise OSError("out of reach")

    monkeypatch.setattr(FsspecStore, "get", failing)

    def check() -> None:
        waiting.add(threading.get_ident())

    with ThreadPoolExecutor(threads, initializer=read_while, initargs=(check,)) as pool:
        errors = [answer.exception() for answer in [pool.submit(index) for _ in range(threads)]]
    assert [str(error) for error in errors] == ["out of reach"] * threads
    assert asked == ["c/0/0"]
    monkeypatch.setattr(FsspecStore, "get", get)
    assert index() is not None


def test_an_index_that_one_thread_gave_up_is_asked_for_by_the_next(
    index: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    get, asked, waits = FsspecStore.get, threading.Event(), threading.Event()

    async def silent(store: FsspecStore, key: str, *arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(FsspecStore, "get", get)
        asked.set()
        await asyncio.Event().wait()

    def give_up() -> None:
        if waits.is_set():
            raise CancelledError("nobody needs it any more")

    monkeypatch.setattr(FsspecStore, "get", silent)
    with (
        ThreadPoolExecutor(1, initializer=read_while, initargs=(give_up,)) as one,
        ThreadPoolExecutor(1, initializer=read_while, initargs=(waits.set,)) as other,
    ):
        first = one.submit(index)
        assert asked.wait(30)
        try:
            assert other.submit(index).result(10) is not None
        finally:
            waits.set()
        assert isinstance(first.exception(), CancelledError)


def test_an_error_of_an_index_is_in_no_cycle(
    index: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep the buffers of all frames that it went through."""

    class OutOfReachError(OSError):
        pass

    async def failing(store: FsspecStore, key: str, *arguments: Any, **options: Any) -> Any:
        raise OutOfReachError

    monkeypatch.setattr(FsspecStore, "get", failing)
    gc.collect()
    gc.disable()
    try:
        errors = []
        for _ in range(2):
            try:
                index()
            except OutOfReachError as error:
                errors.append(weakref.ref(error))
        assert len(errors) == 2
        assert [error() for error in errors] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("sharded", [False, True])
def test_a_server_that_knows_no_ranges_gives_all_it_has(
    sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = FsspecStore.get

    async def whole(store: FsspecStore, key: str, prototype: Any, byte_range: Any = None) -> Any:
        return await get(store, key, prototype)

    monkeypatch.setattr(FsspecStore, "get", whole)
    full = np.arange(600, dtype="f4").reshape(20, 30)
    array = stored("v3-sharded" if sharded else "v3-plain", tmp_path / "x", full, (6, 8))
    for region in REGIONS:
        np.testing.assert_array_equal(read_region(remote(array), region), full[region])


@pytest.mark.parametrize("sharded", [False, True])
def test_a_chunk_that_was_cut_short_is_told_of(sharded: bool, tmp_path: Path) -> None:
    array = stored("v3-sharded" if sharded else "v3-plain", tmp_path / "x", np.ones((8, 8)), (4, 4))
    file = chunk_file(array, (0, 0))
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(StoreError, match=r"^chunk \(0, 0\) of .*/c/0/0\): .*; restore the chunk") as raised:
        read_region(remote(array), (slice(1, 4), slice(0, 4)))
    assert not isinstance(raised.value, DamagedError)
