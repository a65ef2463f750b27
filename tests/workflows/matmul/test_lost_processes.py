"""Clients, schedulers and workers that die, outlive each other, or cannot stop."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client, LocalCluster
from distributed.scheduler import KilledWorker

import tilewright as tw
from tests.workflows.products import (
    TIGHT,
    Stopped,
    assert_product,
    put,
    stop_after,
    stop_at,
)
from tilewright.pipeline.cluster import submit
from tilewright.pipeline.errors import (
    ClusterError,
    RunEndedError,
    TaskError,
)
from tilewright.pipeline.events import Caution, Event, UnitDone, WorkPlanned
from tilewright.pipeline.plan.told import Product
from tilewright.pipeline.product import job
from tilewright.pipeline.product import output as outputs
from tilewright.pipeline.store import region_write
from tilewright.pipeline.worker import engines, stream, tasks
from tilewright.pipeline.worker.units import HostUnit, Loading


def test_what_a_dead_client_left_under_way_is_not_written_over_a_new_run(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its workers go on with a tile that they have begun, and the next run may have other inputs for the same C."""
    _, b, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": TIGHT, "verify": False}
    products: list[Product] = []

    def die(client: Client, product: Product, *arguments: Any) -> Any:
        products.append(product)
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr("tilewright.pipeline.product.job.run_tiles", die)
        with pytest.raises(Stopped):
            tw.matmul(a_path, b_path, out, **options)
    (past,) = products
    writing, go_on = threading.Event(), threading.Event()
    save, close = HostUnit.save, stream.TileEngine.close

    def held_save(unit: HostUnit, *arguments: Any) -> Any:
        if unit is engine.unit:
            writing.set()
            assert go_on.wait(30)
        return save(unit, *arguments)

    def told_close(ended: stream.TileEngine, **how: Any) -> None:
        if ended is engine:
            go_on.set()
        close(ended, **how)

    def listener(event: Event) -> None:
        if isinstance(event, UnitDone) and event.index == first.index:
            go_on.set()
            thread.join(30)

    monkeypatch.setattr(HostUnit, "save", held_save)
    monkeypatch.setattr(stream.TileEngine, "close", told_close)
    late: list[BaseException] = []

    def multiply() -> None:
        try:
            engine.multiply(first)
        except BaseException as error:
            late.append(error)

    with engines.engine_for(past, "a worker") as engine:
        first = next(past.plan.tiles())
        thread = threading.Thread(target=multiply)
        thread.start()
        assert writing.wait(30)
        changed = np.full((96, 80), 2, "f4")
        zarr.open_array(a_path, mode="r+")[...] = changed
        tw.matmul(a_path, b_path, out, listener=listener, **options)
        thread.join(30)
    assert [type(error) for error in late] == [RunEndedError]
    assert_product(zarr.open_array(out)[...], changed, b)
    with pytest.raises(CancelledError), engines.engine_for(past, "a worker"):
        pass


@pytest.mark.sample(1)
@pytest.mark.parametrize(("at", "kept"), [("begun", None), ("third tile", "3 of"), ("check", "16 of")])
def test_a_run_whose_scheduler_is_lost_says_what_is_kept(
    at: str,
    kept: str | None,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    tmp_path: Path,
    small_chunks: None,
) -> None:
    *_, a_path, b_path = factors
    tiles = itertools.count(1)
    cluster = LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0")
    with cluster, Client(cluster) as own:

        def lose(event: Event) -> None:
            if isinstance(event, WorkPlanned):
                now = "begun" if event.name == "matmul" else "check"
            else:
                now = "third tile" if isinstance(event, UnitDone) and next(tiles) == 3 else ""
            if now == at:
                own.close()

        options: dict[str, Any] = {"cluster": own, "device": "cpu", "device_memory": TIGHT}
        with pytest.raises(ClusterError, match="run it again") as told:
            tw.matmul(a_path, b_path, tmp_path / "c.zarr", listener=lose, **options)
    said = str(told.value)
    if kept is None:
        assert "kept" not in said
    else:
        assert said.endswith(f"; {kept} 16 tiles are finished and kept, and the same command goes on there")


def test_a_run_says_that_it_has_lost_a_worker(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    processes: Client,
    tmp_path: Path,
    small_chunks: None,
) -> None:
    a, b, *paths = factors
    told: list[str] = []
    tiles = itertools.count(1)
    killed: list[str] = []

    def listener(event: Event) -> None:
        if isinstance(event, Caution):
            told.append(event.message)
        if isinstance(event, UnitDone) and next(tiles) == 3:
            (process,) = processes.run(os.getpid, workers=[event.worker]).values()
            os.kill(process, signal.SIGKILL)
            killed.append(event.worker)
            until = time.monotonic() + 30
            while event.worker in processes.nthreads():
                assert time.monotonic() < until
                time.sleep(0.01)

    run = tw.matmul(
        *paths, tmp_path / "c.zarr", cluster=processes, device="cpu", device_memory=TIGHT, listener=listener
    )
    processes.wait_for_workers(2)  # which others are to find there
    (text,) = told
    what = r"(, with no tile under way there|; \d tiles? that it had under way (is|are) computed again)"
    assert re.fullmatch(f"matmul: worker {killed[0]} was lost{what}", text)
    assert run.workers_lost == 1
    assert run.to_json()["workers_lost"] == 1
    assert "16 tiles; 1 worker lost\n" in str(run)
    assert_product(zarr.open_array(tmp_path / "c.zarr")[...], a, b)


def test_a_tile_that_takes_down_its_workers_says_what_to_change(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def deadly(*_: Any, **options: Any) -> None:
        raise KilledWorker("tile", SimpleNamespace(address="tcp://last:1"), 3)

    monkeypatch.setattr(stream.TileEngine, "multiply", deadly)
    with pytest.raises(TaskError, match=r"took down .*, and give them more memory, or the plan less \(--d"):
        tw.matmul(*factors[2:], tmp_path / "c.zarr", cluster=client, device="cpu")


def test_nothing_is_left_on_the_workers(
    factors: tuple[np.ndarray, np.ndarray, Path, Path], client: Client, tmp_path: Path, small_chunks: None
) -> None:
    _, _, a_path, b_path = factors
    tw.matmul(a_path, b_path, tmp_path / "c", cluster=client, device="cpu", device_memory=TIGHT)
    with pytest.raises(Stopped):
        tw.matmul(
            a_path,
            b_path,
            tmp_path / "d",
            cluster=client,
            device="cpu",
            device_memory=TIGHT,
            listener=stop_after(1),
        )
    import threading

    assert engines._engines == {}
    names = [thread.name for thread in threading.enumerate()]
    stages = (
        "tilewright-read",
        "tilewright-write",
        "tilewright-load",
        "tilewright-compute",
        "tilewright-verify",
    )
    assert not [name for name in names if name.startswith(stages)]


def test_a_worker_that_outlives_its_client_spoils_no_later_run(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    tmp_path: Path,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stands still while its client dies, B is written anew, and the next run begins; then it goes on."""
    a, b, a_path, b_path = factors
    out, locks, ended = tmp_path / "c.zarr", [], threading.Event()
    options: dict[str, Any] = {"device": "cpu", "device_memory": TIGHT, "verify": False}
    real, write = job.create_output, region_write.RegionWrite.write

    def locked(*args: Any, **kwargs: Any) -> outputs.Output:
        output = real(*args, **kwargs)
        locks.append(output.lock)
        return output

    async def unreached(place: str, run: str) -> None:
        """The next run's cluster is another."""

    def next_run() -> None:
        put(b_path, -b, overwrite=True)
        stop_at(2, a_path, b_path, out, **options)
        ended.set()

    def stopped(piece: region_write.RegionWrite, *args: Any) -> Any:
        monkeypatch.setattr(region_write.RegionWrite, "write", write)
        fcntl.flock(locks[0], fcntl.LOCK_UN)  # as the client dies
        thread = threading.Thread(target=next_run)
        thread.start()
        thread.join()
        return piece.write(*args)

    monkeypatch.setattr(job, "create_output", locked)
    monkeypatch.setattr(tasks, "end_past_runs", unreached)
    monkeypatch.setattr(region_write.RegionWrite, "write", stopped)
    with pytest.raises(ClusterError, match="another run has taken it over"):
        tw.matmul(a_path, b_path, out, **options)
    assert ended.is_set()
    assert tw.matmul(a_path, b_path, out, **options).resumed == 2
    assert_product(zarr.open_array(out)[...], a, -b)
    assert sorted(path.name for path in out.iterdir()) == ["c", outputs.CHECKSUMS_NAME, "zarr.json"]


def test_a_tile_that_comes_behind_the_end_is_answered(
    factors: tuple[np.ndarray, np.ndarray, Path, Path], client: Client, tmp_path: Path
) -> None:
    _, _, a_path, b_path = factors
    seen: list[stream.TileEngine] = []
    original = stream.TileEngine.__init__

    def keep(engine: stream.TileEngine, *args: Any) -> None:
        seen.append(engine)
        original(engine, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream.TileEngine, "__init__", keep)
        run = tw.matmul(a_path, b_path, tmp_path / "c", cluster=client, device="cpu")
    with pytest.raises(CancelledError):
        seen[0].multiply(next(run.plan.tiles()))


def test_a_run_that_is_given_up_ends_beside_the_workers_loop(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
    worker_log: pytest.LogCaptureFixture,
) -> None:
    """What its tiles read is waited for, which may take long; heartbeats go on. Its tiles end without a word."""
    _, _, a_path, b_path = factors
    reading, ending, go_on = threading.Event(), threading.Event(), threading.Event()
    answered: list[bool] = []
    loading, close = HostUnit.loading, stream.TileEngine.close

    def held(call: Callable[[], Any]) -> Any:
        reading.set()
        assert go_on.wait(60)
        return call()

    def held_loading(unit: HostUnit, array: Any, region: Any, *where: Any) -> Loading:
        found = loading(unit, array, region, *where)
        side = 0 if array.shape == (96, 80) else 1
        if region[side].start == 0:  # of the first tile
            return found
        return replace(found, calls=[partial(held, call) for call in found.calls])

    def told_close(engine: stream.TileEngine, **how: Any) -> None:
        ending.set()
        close(engine, **how)

    def listener(event: Event) -> None:
        if isinstance(event, UnitDone):
            assert reading.wait(60)
            raise Stopped

    def look() -> None:
        assert ending.wait(60)
        try:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), client.loop.asyncio_loop).result(5)
            answered.append(True)
        finally:
            go_on.set()

    def computing(dask_worker: Any) -> int:
        return len(dask_worker.active_threads)

    # As if the workers were to hear of that later: it goes to the scheduler, and the end to each of them.
    monkeypatch.setattr(submit, "cancel", lambda client, futures: None)
    monkeypatch.setattr(HostUnit, "loading", held_loading)
    monkeypatch.setattr(stream.TileEngine, "close", told_close)
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        with pytest.raises(Stopped):
            tw.matmul(
                a_path,
                b_path,
                tmp_path / "c",
                cluster=client,
                device="cpu",
                device_memory=TIGHT,
                listener=listener,
            )
        looking.result()
    assert answered == [True]
    assert (engines._engines, engines._stopped) == ({}, {})
    until = time.monotonic() + 30
    while any(client.run(computing).values()):
        assert time.monotonic() < until
    assert "Compute Failed" not in worker_log.text


def test_a_worker_that_cannot_stop_keeps_nobody_from_ending(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    a, b, a_path, b_path = factors
    monkeypatch.setattr(
        "tilewright.pipeline.product.job._sharing", lambda facts: frozenset({"tcp://here:1", "tcp://here:2"})
    )
    close = HostUnit.close

    def fail(unit: HostUnit) -> None:
        close(unit)
        raise RuntimeError("injected: the GPU is gone")

    monkeypatch.setattr(HostUnit, "close", fail)
    tw.matmul(a_path, b_path, tmp_path / "c", cluster=client, device="cpu", verify=False)
    assert_product(zarr.open_array(tmp_path / "c")[...], a, b)
    engines.close_idle_engines()  # waits for the run that is ending
    assert (engines._engines, engines._stopped) == ({}, {})
    assert "ending run" in caplog.text
    assert "the GPU is gone" in caplog.text
