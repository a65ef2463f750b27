"""Reads and writes that fail: what is tried again, what ends the run, and what it keeps."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client
from numcodecs import Delta, Zstd
from zarr.codecs import Crc32cCodec

import tilewright as tw
from tests.workflows.products import (
    TIGHT,
    assert_product,
    intercept_writes,
    put,
)
from tilewright.pipeline.errors import (
    DamagedError,
    StoreError,
    TaskError,
)
from tilewright.pipeline.events import Event, Notice, WorkPlanned
from tilewright.pipeline.product import output as outputs
from tilewright.pipeline.store import region_read, region_write
from tilewright.pipeline.worker import engines, units


@pytest.mark.parametrize("failures", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_failing_write_is_tried_again(
    failures: int,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    attempts: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b, a_path, b_path = factors
    left = iter(range(failures))

    def failing(top: int, start: int, data: np.ndarray) -> np.ndarray:
        if top == 16 and start == 0 and next(left, None) is not None:
            raise StoreError("injected: the disk had a moment")
        return data

    intercept_writes(monkeypatch, failing)
    tw.matmul(a_path, b_path, tmp_path / "c", cluster=client, device="cpu", device_memory=TIGHT)
    assert sorted(attempts.values())[-2:] == [1, failures + 1], (
        "one tile was tried again, as often as it failed"
    )
    assert_product(zarr.open_array(tmp_path / "c")[...], a, b)


@pytest.mark.sample(1)
@pytest.mark.parametrize("error", [StoreError("injected: gone"), RuntimeError("injected: a bug")])
def test_a_read_that_never_works_ends_the_run_and_keeps_what_was_done(
    error: Exception,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    attempts: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b, a_path, b_path = factors
    out = tmp_path / "c"
    original = region_read.region_reads

    def failing(array: Any, region: Any) -> Any:
        if array.shape == (96, 80) and region[0].stop == 96:
            raise error
        return original(array, region)

    with monkeypatch.context() as patch:
        patch.setattr(units, "region_reads", failing)
        expected = StoreError if isinstance(error, StoreError) else TaskError
        with pytest.raises(expected, match="injected"):
            tw.matmul(a_path, b_path, out, cluster=client, device="cpu", device_memory=TIGHT)
    assert max(attempts.values()) == 4, "the first try and three retries"
    assert not out.exists()
    attempts.clear()
    run = tw.matmul(a_path, b_path, out, cluster=client, device="cpu", device_memory=TIGHT)
    assert run.resumed > 0
    assert len(attempts) == run.plan.tile_count - run.resumed
    assert_product(zarr.open_array(out)[...], a, b)


@pytest.mark.sample(1)
@pytest.mark.parametrize("compressed", [False, True])
def test_a_disk_that_is_full_ends_the_run_and_keeps_what_was_done(
    compressed: bool,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    attempts: dict[int, int],
    events: list[Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks that no room is left for fail however often they are tried, after the first bytes of them were written."""
    a, b, _, b_path = factors
    a_path = put(tmp_path / "coded", a, compressors=zarr.codecs.ZstdCodec() if compressed else None)
    out = tmp_path / "c"
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": TIGHT}
    left, lock, write = [6_000], threading.Lock(), region_write._write_fully

    def filling(file: Any, data: memoryview) -> None:
        with lock:
            room = left[0]
            left[0] -= data.nbytes
        if room < data.nbytes:
            write(file, data[: max(0, room)])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(region_write, "_write_fully", filling)
        with pytest.raises(StoreError, match=r"cannot write chunk .* of .*c\.partial.*No space left") as told:
            tw.matmul(a_path, b_path, out, **options)
    assert not isinstance(told.value, DamagedError)
    assert max(attempts.values()) == 4, "the first try and three retries"
    assert not out.exists()
    growing = outputs.partial_path(out)
    assert not list(growing.rglob("*.partial")), "halves of chunks would take up room for nothing"
    attempts.clear()
    run = tw.matmul(a_path, b_path, out, listener=events.append, **options)
    assert 0 < run.resumed < run.plan.tile_count
    assert len(attempts) == run.plan.tile_count - run.resumed
    assert not any("lost stored pieces" in event.message for event in events if isinstance(event, Notice))
    assert_product(zarr.open_array(out)[...], a, b)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "damage", "found"),
    [
        ({"compressors": None}, "cut", "it has 1023 bytes"),
        ({"compressors": Crc32cCodec()}, "bit", "checksum"),
        ({}, "cut", "Zstd"),
        ({"compressors": Crc32cCodec(), "shards": (32, 80)}, "bit", r"in shard .*checksum"),
        ({"filters": [Delta(dtype="f4")], "compressors": None, "zarr_format": 2}, "cut", "ValueError"),
        ({"filters": [Delta(dtype="f4")], "compressors": Zstd(), "zarr_format": 2}, "cut", "RuntimeError"),
    ],
)
def test_a_damaged_chunk_is_read_once_and_ends_the_run_keeping_tiles(
    options: dict[str, Any],
    damage: str,
    found: str,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    attempts: dict[int, int],
    worker_log: pytest.LogCaptureFixture,
    events: list[Event],
) -> None:
    a, _, _, b_path = factors
    a_path, out = put(tmp_path / "damaged", a, **options), tmp_path / "c"
    victim = max((path for path in a_path.rglob("*[0-9]") if path.is_file()), key=str)  # of the last rows
    good = victim.read_bytes()
    victim.write_bytes(good[:-1] if damage == "cut" else good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    for _ in range(2):
        attempts.clear()
        with pytest.raises(DamagedError, match=rf"(?s)chunk \([45], .*damaged cannot be read \(.*{found}"):
            tw.matmul(
                a_path,
                b_path,
                out,
                cluster=client,
                device="cpu",
                device_memory=TIGHT,
                listener=events.append,
            )
        assert max(attempts.values()) == 1
    assert "Compute Failed" not in worker_log.text
    assert engines._engines == {}
    first, second = (event for event in events if isinstance(event, WorkPlanned))
    assert first.done == 0 < second.done


@pytest.mark.parametrize("work", ["verify", "dot"])
def test_other_work_reads_a_damaged_chunk_once_too(
    work: str,
    client: Client,
    tmp_path: Path,
    worker_log: pytest.LogCaptureFixture,
) -> None:
    side = {"verify": (32, 32), "dot": (32,)}[work]
    array = zarr.create_array(tmp_path / "a", shape=side, chunks=(8,) * len(side), dtype="f8")
    array[...] = 1
    victim = max((path for path in (tmp_path / "a" / "c").rglob("*") if path.is_file()), key=str)
    victim.write_bytes(victim.read_bytes()[:-1])
    function: Callable[..., Any] = getattr(tw, work)
    with pytest.raises(DamagedError, match=r"chunk \(3.* of .*a cannot be read"):
        function(*[array] * (len(side) + 1), cluster=client)
    assert "Compute Failed" not in worker_log.text


def test_what_cannot_be_read_for_a_moment_is_read_again(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    attempts: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b, a_path, b_path = factors
    left, original = iter(range(2)), region_read.read_bytes

    def failing(descriptor: int, offset: int, nbytes: int) -> bytes:
        if next(left, None) is not None:
            raise OSError(errno.EIO, "injected: the network had a moment")
        return original(descriptor, offset, nbytes)

    monkeypatch.setattr(region_read, "read_bytes", failing)
    tw.matmul(a_path, b_path, tmp_path / "c", cluster=client, device="cpu", device_memory=TIGHT)
    assert max(attempts.values()) in (2, 3), "one tile failed twice, or two of them once"
    assert_product(zarr.open_array(tmp_path / "c")[...], a, b)
