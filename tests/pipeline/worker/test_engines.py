"""The engines of a process: which of them are freed or ended, and what is written when one is."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.pipeline.worker.test_stream import FakeWorker, engine, factors
from tilewright.kernels.gpu import device_choice
from tilewright.pipeline.plan.grid import Tile
from tilewright.pipeline.plan.told import Product
from tilewright.pipeline.store.arrays import place_of
from tilewright.pipeline.store.region_write import RegionWrite
from tilewright.pipeline.worker import engines
from tilewright.pipeline.worker.engines import store_sum
from tilewright.pipeline.worker.load_stage import LoadStage
from tilewright.pipeline.worker.stream import TileEngine
from tilewright.pipeline.worker.survey import worker_facts
from tilewright.pipeline.worker.units import HostUnit

__all__ = ["engine", "factors"]


class Held:
    """Calls of a method of the unit that wait for ``go_on``; the first of them has ``begun`` then."""

    def __init__(self, patch: pytest.MonkeyPatch, method: str) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        original = getattr(HostUnit, method)

        def held(*arguments: Any, **options: Any) -> Any:
            self.begun.set()
            assert self.go_on.wait(30)
            return original(*arguments, **options)

        patch.setattr(HostUnit, method, held)


ENDS: dict[str, Callable[[Product], object]] = {
    "its run": lambda product: engines.close_engine(product.run, abandon=True),
    "the next run of the same array": lambda product: engines.close_engines_writing(
        place_of(product.c), "another"
    ),
}
"""Who ends a run, abandoning the tiles under way."""


class Making:
    """Engines of one run, of which the first waits for ``go_on`` when it has ``begun``, and may fail then."""

    def __init__(self, patch: pytest.MonkeyPatch, run: str, error: Exception | None = None) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.count = 0
        original = TileEngine.__init__

        def held(worker: TileEngine, product: Product, *arguments: Any) -> None:
            if product.run == run:
                self.count += 1
                if self.count == 1:
                    self.begun.set()
                    assert self.go_on.wait(30)
                    if error is not None:
                        raise error
            original(worker, product, *arguments)

        patch.setattr(TileEngine, "__init__", held)


def told_of_waiting(patch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released by each who is about to wait for a change in the registry, which nobody makes before he does."""
    waiting, wait_for = threading.Semaphore(0), engines._changed.wait_for

    def told(predicate: Callable[[], bool]) -> bool:
        if not predicate():
            waiting.release()
        return wait_for(predicate)

    patch.setattr(engines._changed, "wait_for", told)
    return waiting


def told_of_closing(patch: pytest.MonkeyPatch) -> threading.Event:
    """Set when an engine is being closed."""
    closing, close = threading.Event(), TileEngine.close

    def told_close(worker: TileEngine, **how: Any) -> None:
        closing.set()
        close(worker, **how)

    patch.setattr(TileEngine, "close", told_close)
    return closing


def told_of_joining(patch: pytest.MonkeyPatch, worker: TileEngine) -> queue.SimpleQueue[int]:
    """Gets the identifier of each thread that begins to wait for the engine's, once."""
    joining, seen = queue.SimpleQueue[int](), set[int]()

    def told(thread: threading.Thread, join: Callable[..., None]) -> None:
        caller = threading.get_ident()
        if thread.is_alive() and caller not in seen:
            seen.add(caller)
            joining.put(caller)
        join()

    for thread in worker._threads:
        patch.setattr(thread, "join", partial(told, thread, thread.join))
    return joining


def made(product: Product) -> TileEngine:
    """The engine of a product's run, which no task has in hand."""
    with engines.engine_for(product, "here") as worker:
        return worker


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this test alone: no engine, and no run that has ended."""
    for name in ("_engines", "_making", "_closing", "_stopped", "_turns"):
        monkeypatch.setattr(engines, name, {})
    monkeypatch.setattr(engines, "_ended", deque())
    monkeypatch.setattr(engines, "_users", Counter())


def test_a_run_that_is_ended_several_times_is_remembered_once(registry: None) -> None:
    """Else it would take the places of others, whose tasks may still be on their way."""
    for _ in range(3):
        engines.close_engine("run")
    assert list(engines._ended) == ["run"]


def test_an_engine_is_not_idle_while_a_task_has_it(engine: Any, factors: Any, registry: None) -> None:
    """Also before the task has begun its tile, which may not be the first. Another run looks at this worker meanwhile,
    and frees what nobody uses."""
    product = engine(10**6)[0].product
    with engines.engine_for(product, "here") as worker:
        for tile in product.plan.tiles():
            engines.close_idle_engines()
            with engines.engine_for(product, "here") as same:
                assert same is worker
                same.multiply(tile)
    np.testing.assert_allclose(product.c[...], factors[0][...] @ factors[1][...], rtol=1e-12, atol=1e-12)
    assert set(engines._engines) == {product.run}
    engines.close_idle_engines()
    assert not engines._engines
    assert not any(thread.is_alive() for thread in worker._threads)


def test_while_an_engine_is_made_only_its_own_run_waits_for_it(
    engine: Any, registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    product, other = (engine(10**6)[0].product for _ in range(2))
    making, waiting = Making(monkeypatch, product.run), told_of_waiting(monkeypatch)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(made, product)
        try:
            assert making.begun.wait(10)
            second = pool.submit(made, product)
            assert waiting.acquire(timeout=10)

            def ask() -> None:
                assert made(other).multiply(next(other.plan.tiles())).index == 0
                assert not engines.is_over(product.run)
                assert engines.arrival_of(product.run, ("a", 0, 0)) is None
                engines.close_idle_engines()
                engines.close_engine(other.run)
                engines.free_engine(other.run)

            pool.submit(ask).result(10)
            assert not second.done()
        finally:
            making.go_on.set()
        assert first.result(10) is second.result(10)
    assert making.count == 1
    assert not engines._making
    engines.close_engine(product.run)


@pytest.mark.parametrize("numbered", [False, True], ids=["as they came", "as they were given"])
def test_tiles_are_queued_in_the_order_of_their_tasks(
    numbered: bool, engine: Any, registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever thread is first when the engine is made, and although one of them fails."""
    product = engine(10**6)[0].product
    tiles = list(product.plan.tiles())
    assert len(tiles) > 4
    waiting, order = told_of_waiting(monkeypatch), []
    making = Making(monkeypatch, product.run)

    def task(tile: Tile, turn: engines.Turn) -> None:
        def queued() -> None:
            order.append(tile.index)
            turn.end()

        with turn:
            if tile.index == 1:
                raise RuntimeError("injected: a tile that is never queued")
            with engines.engine_for(product, "here", turn=turn) as worker:
                worker.multiply(tile, queued=queued)

    if numbered:  # the last comes first
        turns = [engines.Turn(product.run, number) for number in reversed(range(len(tiles)))][::-1]
    else:
        turns = [engines.Turn(product.run) for _ in tiles]
    with ThreadPoolExecutor(len(tiles)) as pool:
        done = []
        for tile in reversed(tiles):  # and makes the engine
            done.append(pool.submit(task, tile, turns[tile.index]))
            if tile is tiles[-1]:
                assert making.begun.wait(10)
            else:
                assert tile.index == 1 or waiting.acquire(timeout=10)
        making.go_on.set()
        failed = [one for one in done if one.exception(10) is not None]
    assert len(failed) == 1
    assert order == [tile.index for tile in tiles if tile.index != 1]
    assert not engines._turns
    engines.close_engine(product.run)


def test_an_engine_that_could_not_be_made_is_made_by_the_next_task(
    engine: Any, registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one that waits for it already, if there is one."""
    product = engine(10**6)[0].product
    error = RuntimeError("injected: no memory can be pinned")
    making, waiting = Making(monkeypatch, product.run, error), told_of_waiting(monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(made, product)
        try:
            assert making.begun.wait(10)
            second = pool.submit(made, product)
            assert waiting.acquire(timeout=10)
        finally:
            making.go_on.set()
        assert first.exception(10) is error
        worker = second.result(10)
    assert (making.count, engines._making, engines._users) == (2, {}, {})
    assert made(product) is worker
    engines.close_engine(product.run)


def test_an_engine_that_cannot_be_made_leaves_nothing(
    engine: Any, registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = engine(10**6)[0].product
    making = Making(monkeypatch, product.run, RuntimeError("injected: no memory can be pinned"))
    making.go_on.set()
    with pytest.raises(RuntimeError, match="injected"):
        made(product)
    assert (engines._engines, engines._making, engines._users) == ({}, {}, {})


@pytest.mark.parametrize("by", ENDS)
def test_an_engine_whose_run_ends_while_it_is_made_is_closed(
    by: str, engine: Any, registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = engine(10**6)[0].product
    making, waiting = Making(monkeypatch, product.run), told_of_waiting(monkeypatch)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(made, product)
        try:
            assert making.begun.wait(10)
            second = pool.submit(made, product)
            assert waiting.acquire(timeout=10)
            ended = pool.submit(ENDS[by], product)
            assert waiting.acquire(timeout=10)
            with pytest.raises(CancelledError):  # it has nothing to wait for any more
                second.result(10)
            assert not ended.done()
        finally:
            making.go_on.set()
        with pytest.raises(CancelledError):
            first.result(10)
        ended.result(10)
    assert (engines._engines, engines._making, engines._users) == ({}, {}, {})
    (worker,) = engines._stopped.values()
    assert not any(thread.is_alive() for thread in worker._threads)


def surveyed() -> Coroutine[Any, Any, Any]:
    worker = FakeWorker(
        contact_address="here",
        metrics={},
        memory_manager=SimpleNamespace(memory_limit=2**30, memory_pause_fraction=False),
        state=SimpleNamespace(nthreads=1),
    )
    return worker_facts("cpu", (), False, worker)


def test_a_worker_can_be_surveyed_while_an_engine_is_made(
    engine: Any, registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = engine(10**6)[0].product
    making = Making(monkeypatch, product.run)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(made, product)
        try:
            assert making.begun.wait(10)
            facts = asyncio.run(asyncio.wait_for(surveyed(), 10))
        finally:
            making.go_on.set()
        first.result(10)
    assert facts.host_limit_nbytes == 2**30
    engines.close_engine(product.run)


def test_a_workers_loop_goes_on_while_idle_engines_are_closed(
    engine: Any, registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It carries heartbeats, and answers that others wait for."""
    made(engine(10**6)[0].product)
    closing = Held(monkeypatch, "close")

    async def survey() -> Any:
        facts = asyncio.create_task(surveyed())
        assert await asyncio.to_thread(closing.begun.wait, 10)
        closing.go_on.set()  # as only a loop that goes on can
        return await asyncio.wait_for(facts, 10)

    assert asyncio.run(survey()).host_limit_nbytes == 2**30
    assert not engines._engines


def test_a_workers_loop_goes_on_while_its_device_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look for a GPU starts its driver."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(device: str) -> str:
        begun.set()
        assert go_on.wait(10), "the loop stood still"
        return "cpu"

    async def survey() -> Any:
        facts = asyncio.create_task(surveyed())
        assert await asyncio.to_thread(begun.wait, 10)
        go_on.set()
        return await facts

    monkeypatch.setattr(device_choice, "resolve_device", slow)
    assert asyncio.run(survey()).device == "cpu"


def test_an_array_is_the_same_by_any_name(
    engine: Any, tmp_path: Path, registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    for place in ("c0", f"{tmp_path}/link/c1", f"{tmp_path}/c2"):
        product = engine(10**6)[0].product
        made(product)
        engines.close_engines_writing(place, product.run)
        assert product.run in engines._engines, "its own run goes on"
        engines.close_engines_writing(f"{place}0", "another")
        assert product.run in engines._engines, "it writes elsewhere"
        assert engines.close_engines_writing(place, "another") == [product.run]
        assert not engines._engines


def test_where_ending_one_fails_the_others_are_ended(
    engine: Any, registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (engine(10**6)[0].product for _ in range(2))
    workers = [made(product) for product in (first, replace(second, c=first.c))]
    close = HostUnit.close

    def fail(unit: HostUnit) -> None:
        close(unit)
        raise RuntimeError("injected: the GPU is gone")

    with monkeypatch.context() as patch:
        patch.setattr(HostUnit, "close", fail)
        with pytest.raises(RuntimeError, match="injected"):
            engines.close_engines_writing(place_of(first.c), "another")
    for worker in workers:
        with pytest.raises(CancelledError):
            worker.multiply(next(first.plan.tiles()))
    assert (engines._engines, engines._closing) == ({}, {})


@pytest.mark.parametrize("by", ENDS)
def test_who_ends_what_is_being_ended_already_waits_as_well(
    by: str, engine: Any, factors: Any, registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that died had its workers stop, and they wait for storage; nothing may be written behind the next."""
    product = engine(10**6)[0].product
    worker = made(product)
    tile = next(product.plan.tiles())
    saving, closing = Held(monkeypatch, "save"), told_of_closing(monkeypatch)
    joining = told_of_joining(monkeypatch, worker)

    def end() -> bool:
        ENDS[by](product)
        return saving.go_on.is_set()

    with ThreadPoolExecutor(3) as pool:
        under_way = pool.submit(worker.multiply, tile)
        assert saving.begun.wait(10)
        first = pool.submit(engines.close_engine, product.run)
        assert closing.wait(10)
        engines.close_idle_engines()  # another client looks at this worker
        second = pool.submit(end)
        try:
            assert [joining.get(timeout=10), joining.get(timeout=10)]
            assert not second.done()
        finally:
            saving.go_on.set()
        assert second.result(10), "it waited as well"
        assert not any(thread.is_alive() for thread in worker._threads)
        first.result(10)
        under_way.result(10)
    assert not engines._closing
    np.testing.assert_allclose(
        product.c[tile.region], (factors[0][...] @ factors[1][...])[tile.region], rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("by", ENDS)
def test_tiles_can_be_abandoned_while_they_are_waited_for(
    by: str, engine: Any, registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = engine(40_000)[0].product
    worker = made(product)
    before = product.c[...]
    loading, closing = Held(monkeypatch, "load"), told_of_closing(monkeypatch)
    abandoned, abandon = threading.Event(), LoadStage.abandon

    def told_abandon(stage: LoadStage) -> None:
        abandon(stage)
        abandoned.set()

    monkeypatch.setattr(LoadStage, "abandon", told_abandon)
    with ThreadPoolExecutor(3) as pool:
        under_way = pool.submit(worker.multiply, next(product.plan.tiles()))
        try:
            assert loading.begun.wait(10)
            first = pool.submit(engines.close_engine, product.run)
            assert closing.wait(10)
            second = pool.submit(ENDS[by], product)
            assert abandoned.wait(10)
        finally:
            loading.go_on.set()
        for ended in (first, second):
            ended.result(10)
        assert isinstance(under_way.exception(10), CancelledError)
    np.testing.assert_array_equal(product.c[...], before)


def test_an_engine_that_cannot_be_closed_is_not_closed_for_ever(
    engine: Any, registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = engine(10**6)[0].product
    made(product)

    def fail(unit: HostUnit) -> None:
        raise RuntimeError("injected: the GPU is gone")

    with monkeypatch.context() as patch:
        patch.setattr(HostUnit, "close", fail)
        with pytest.raises(RuntimeError, match="injected"):
            engines.close_engine(product.run)
    assert (engines._engines, engines._closing) == ({}, {})
    with ThreadPoolExecutor(1) as pool:
        pool.submit(engines.close_engine, product.run).result(10)
    engines.free_engine(product.run)
    assert not engines._stopped


def test_who_looks_what_is_free_waits_for_a_run_that_is_ending(
    engine: Any, registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = engine(10**6)[0].product
    made(product)
    end, waiting = engines.ending(product.run), told_of_waiting(monkeypatch)
    assert end is not None
    assert engines.is_over(product.run), "its late tasks begin nothing"
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(engines.close_idle_engines)
        try:
            assert waiting.acquire(timeout=10)
            assert product.run in engines._engines
        finally:
            end()
        looking.result(10)
    assert (engines._engines, engines._closing, engines._stopped) == ({}, {}, {})


def test_a_run_of_which_something_is_done_is_ended_by_who_waits_for_that(engine: Any, registry: None) -> None:
    product = engine(10**6)[0].product
    with engines.engine_for(product, "here"):
        assert engines.ending(product.run) is None
        assert engines.is_over(product.run)
    engines.close_engine(product.run)
    engines.free_engine(product.run)


@pytest.mark.parametrize("by", ENDS)
def test_no_sum_is_written_once_its_run_has_ended(
    by: str, engine: Any, registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The piece under way is waited for, those behind it are left out, and no later sum begins."""
    product = engine(10**6)[0].product
    tile = next(iter(product.plan.tiles()))
    parts = [np.ones((1, tile.rows, tile.columns))]
    before = product.c[...]
    begun, go_on, waiting = threading.Event(), threading.Event(), told_of_waiting(monkeypatch)
    write = RegionWrite.write

    def slowly(piece: RegionWrite, rounded: Any) -> Any:
        begun.set()
        assert go_on.wait(10)
        return write(piece, rounded)

    monkeypatch.setattr(RegionWrite, "write", slowly)
    with ThreadPoolExecutor(2) as pool:
        storing = pool.submit(store_sum, product, tile, parts)
        assert begun.wait(10)
        ended = pool.submit(ENDS[by], product)
        try:
            assert waiting.acquire(timeout=10)
            assert not ended.done()
        finally:
            go_on.set()
        ended.result(10)
        assert storing.exception(10) is None or isinstance(storing.exception(), CancelledError)
    assert not engines._sums
    after = product.c[...]
    written = int((after != before).sum())
    assert 0 < written < tile.rows * tile.columns, "the first piece, and no other"
    with pytest.raises(CancelledError):
        store_sum(product, tile, parts)
    np.testing.assert_array_equal(product.c[...], after)
