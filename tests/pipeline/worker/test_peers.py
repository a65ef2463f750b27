"""Panels from other workers, without GPUs: whatever the others do, C is right, and what can be had is not read."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence, Set
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client, LocalCluster
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.product.test_placement import plan_of
from tests.pipeline.worker.held_contents import assert_contents
from tests.pipeline.worker.test_stream import fail_one_load
from tilewright.pipeline.plan.grid import Tile
from tilewright.pipeline.plan.inputs import Geometry, Limits, Sharers
from tilewright.pipeline.plan.memory import LINE_NBYTES
from tilewright.pipeline.plan.product import MatmulPlan, plan_tiles
from tilewright.pipeline.plan.told import Product, TileReport
from tilewright.pipeline.product.placement import Placement
from tilewright.pipeline.store.arrays import as_stored_matrix
from tilewright.pipeline.worker import engines, load_stage, panels, peers, tasks
from tilewright.pipeline.worker.panels import Arrival, PanelCache, PanelPart, Placed
from tilewright.pipeline.worker.peers import (
    Exchange,
    RemotePart,
    WorkerPeers,
    answer_peers,
    begun,
    holds,
    offer,
    parts_of,
)
from tilewright.pipeline.worker.stream import TileEngine
from tilewright.pipeline.worker.units import HostUnit

M, K, N = 160, 180, 90
WORKERS = ["tcp://here:1", "tcp://here:2"]


@given(
    starts=st.tuples(st.integers(0, 50), st.integers(0, 50)),
    shape=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    unit=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    count=st.integers(1, 8),
)
def test_parts_are_the_region_cut_between_chunks(
    starts: tuple[int, int], shape: tuple[int, int], unit: tuple[int, int], count: int
) -> None:
    region = [slice(start, start + side) for start, side in zip(starts, shape, strict=True)]
    parts = parts_of(region, unit, count)
    assert len(parts) == count
    covered = np.zeros(shape, int)
    for part in parts:
        if part is not None:
            top, bottom, left, right = part
            covered[top:bottom, left:right] += 1
            for edge, start, side, step in zip(
                ((top, bottom), (left, right)), starts, shape, unit, strict=True
            ):
                assert all(at in (0, side) or (start + at) % step == 0 for at in edge)
    assert (covered == 1).all()


def test_parts_are_about_as_large_each() -> None:
    assert parts_of((slice(0, 4096), slice(0, 16384)), (1, 4096), 4) == [
        (0, 1024, 0, 16384),
        (1024, 2048, 0, 16384),
        (2048, 3072, 0, 16384),
        (3072, 4096, 0, 16384),
    ]
    assert parts_of((slice(4096, 8192), slice(0, 16384)), (4096, 4096), 2) == [
        (0, 4096, 0, 8192),
        (0, 4096, 8192, 16384),
    ]
    assert parts_of((slice(0, 10), slice(0, 10)), (10, 10), 2) == [(0, 10, 0, 10), None]


class DirectPeers:
    """Engines of this process that ask each other, on a loop of their own as Dask's workers do."""

    def __init__(self) -> None:
        self.engines: dict[str, TileEngine] = {}
        self.asked: list[tuple[str, str]] = []
        self.before_still: Callable[[str], None] = lambda peer: None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def ask(self, peer: str, question: str, run: str, key: panels.PanelKey, what: Any) -> Future[Any]:
        self.asked.append((peer, question))

        async def call() -> Any:
            if peer not in self.engines:
                raise OSError(f"no route to {peer}")
            if question == "offer":
                engine = self.engines[peer]
                find, expects = partial(engine.arrival, key), partial(engine.expects, key)
                part, patience = what
                return await offer(await begun(find, expects, patience), part)
            if question == "holds":
                return holds(self.engines[peer].arrival(key))
            self.before_still(peer)
            arrival = self.engines[peer].arrival(key)
            return arrival is not None and arrival.number == what

        return self.run(call())

    def run(self, call: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class HostSharedMemory:
    """Of engines in one process."""

    def __init__(self) -> None:
        self._memory: dict[bytes, np.ndarray] = {}

    def export(self, flat: np.ndarray) -> bytes:
        self._memory[str(id(flat)).encode()] = flat
        return str(id(flat)).encode()

    def copy(self, exported: bytes, peer: str, part: PanelPart, panel: Placed) -> None:
        top, bottom, left, right = part
        source = replace(panel, flat=self._memory[exported])
        for piece in panel.pieces(slice(top, bottom), slice(left, right)):
            panel.cut(*piece)[...] = source.cut(*piece)

    def close(self, keep: Set[str] = frozenset()) -> None:
        """Nothing has to be opened."""


class Job:
    """One product and its engines, one for each worker."""

    def __init__(
        self,
        folder: Path,
        rng: np.random.Generator,
        nbytes: int,
        compressors: Any = None,
        cell: int = 40,
        *,
        symmetric: bool = False,
    ) -> None:
        """Cells of 20, two to a line of panels of B, and to one of a tile, lie apart. ``symmetric``: A by its own
        transpose."""
        self.factors: list[zarr.Array[Any]] = []
        for name, shape in (("a", (M, K)), ("b", (K, N))):
            array = zarr.create_array(
                folder / name, shape=shape, chunks=(20, 20), dtype="f8", compressors=compressors
            )
            array[...] = rng.standard_normal(shape)
            self.factors.append(array)
        if symmetric:
            self.factors[1] = self.factors[0]
        self.symmetric = symmetric
        sides = M, M if symmetric else N
        self.c = zarr.create_array(folder / "c", shape=sides, chunks=(20, 20), dtype="f8", fill_value=7)
        stored = [
            as_stored_matrix(array, transpose=transpose)
            for array, transpose in zip(self.factors, (False, symmetric), strict=True)
        ]
        self.plan: MatmulPlan = plan_tiles(
            stored[0],
            stored[1],
            np.dtype("f8"),
            (20, 20),
            Limits(2, nbytes, line_nbytes=LINE_NBYTES if cell < 40 else 1),
            transpose_b=symmetric,
            symmetric=symmetric,
            keep=Geometry(40, 40, 20, 1, cell, cell),
        )
        self.told: list[tuple[Tile, TileReport]] = []
        """What workers said of each tile."""
        self.peers = DirectPeers()
        self.placement = Placement(self.plan, self.plan.tiles())
        self.placement.share_among(WORKERS)

    def start(self, worker: str) -> TileEngine:
        plan = replace(self.plan, read_threads=2, write_threads=1)
        product = Product(*self.factors, self.c, plan, "cpu", "full", f"run of {worker}")
        engine = self.peers.engines[worker] = TileEngine(product, worker, self.peers)
        return engine

    def walk(self, worker: str, ahead: int = 1) -> list[TileReport]:
        """A worker's share, so many tiles of it under way at once."""
        engine = self.peers.engines[worker]
        tiles = list(iter(lambda: self.placement.own(worker), None))

        def multiply(tile: Any) -> TileReport:
            sharers = self.placement.sharers(tile, worker, frozenset(self.peers.engines))
            report = engine.multiply(tile, sharers=sharers)
            self.told.append((tile, report))
            return report

        with ThreadPoolExecutor(ahead) as pool:
            return list(pool.map(multiply, tiles))

    def assert_product(self) -> None:
        a, b = (np.asarray(array[...]) for array in self.factors)
        c = np.asarray(self.c[...])
        np.testing.assert_allclose(c, a @ (b.T if self.symmetric else b), rtol=1e-12, atol=1e-12)
        assert_contents(self.told, self.plan, self.factors)
        assert not self.symmetric or np.array_equal(c, c.T)

    def assert_stored(self, reports: Sequence[TileReport]) -> None:
        """The tiles of these reports, of a product that is not finished."""
        tiles = list(self.plan.tiles())
        for rows, columns in (tiles[report.index].region for report in reports):
            a, b = np.asarray(self.factors[0][rows, :]), np.asarray(self.factors[1][:, columns])
            np.testing.assert_allclose(np.asarray(self.c[rows, columns]), a @ b, rtol=1e-12, atol=1e-12)

    def close(self) -> None:
        for engine in self.peers.engines.values():
            engine.close()
        self.peers.close()


@pytest.fixture
def job(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes jobs whose engines give each other host memory, as GPUs do theirs."""
    monkeypatch.setattr(HostUnit, "shared", HostSharedMemory())
    made: list[Job] = []

    def make(nbytes: int = 10**7, compressors: Any = None, cell: int = 40, symmetric: bool = False) -> Job:
        made.append(Job(tmp_path / str(len(made)), rng, nbytes, compressors, cell, symmetric=symmetric))
        return made[-1]

    yield make
    for one in made:
        one.close()


def shared(reports: Sequence[TileReport]) -> tuple[int, int]:
    return sum(report.read_nbytes for report in reports), sum(report.shared_nbytes for report in reports)


@pytest.mark.sample(1)
@pytest.mark.parametrize("compressors", [None, "auto"])
def test_who_comes_second_reads_next_to_nothing(compressors: Any, job: Any) -> None:
    work = job(compressors=compressors)
    for worker in WORKERS:
        work.start(worker)
    first, second = shared(work.walk(WORKERS[0])), shared(work.walk(WORKERS[1]))
    work.assert_product()
    b = 8 * K * N
    assert first[1] == 0, "nobody had anything"
    assert first[0] > b, "a share of A and all of B"
    assert sum(second) + first[0] == 8 * M * K + 2 * b
    # Its own parts, of those begun before it was known that the other had them all.
    assert b - peers.OF_A_TILE * load_stage.PANELS_COMING * 8 * 20 * 40 <= second[1] < b


def test_two_workers_read_a_symmetric_factor_once(job: Any) -> None:
    """Also where one comes to rows of tiles, whose panels serve both sides, that the other has long had."""
    work = job(symmetric=True)
    for worker in WORKERS:
        work.start(worker)
    walks = [shared(work.walk(worker, 4)) for worker in WORKERS]
    work.assert_product()
    assert len({place for tile in work.plan.tiles() for place in (tile.i, tile.j)}) == 4
    # All but the last of four rows by one worker, and that one by the other, which has the rest from the first, but for
    # halves of panels begun before it knew that.
    read = [read for read, _ in walks]
    assert read[0] == 8 * M * K * 3 // 4
    unknown = peers.OF_A_TILE * load_stage.PANELS_COMING
    assert 8 * M * K // 4 <= read[1] <= 8 * M * K // 4 + unknown * 8 * 20 * 20


def test_workers_that_begin_at_different_moments_come_together(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first does not read for itself what the other would read too: together they read everything once."""
    monkeypatch.setattr(peers, "BEGIN_SECONDS", SOON_SECONDS)
    monkeypatch.setattr(peers, "HUNGRY_SECONDS", SOON_SECONDS)
    monkeypatch.setattr(peers, "PATIENCE_SECONDS", SOON_SECONDS)
    work = job()
    for worker in WORKERS:
        work.start(worker)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(work.walk, WORKERS[0], 3)
        until_met(lambda: (WORKERS[1], "offer") in work.peers.asked)
        second = pool.submit(work.walk, WORKERS[1], 3)
        walks = first.result(SOON_SECONDS), second.result(SOON_SECONDS)
    work.assert_product()
    read, taken = (sum(pair) for pair in zip(*map(shared, walks), strict=True))
    assert (read, taken) == (8 * M * K + 8 * K * N, 8 * K * N)


def test_what_is_not_expected_is_not_waited_for() -> None:
    arrival = Arrival()

    async def look(expected: Iterator[bool]) -> Arrival | None:
        return await begun(lambda: arrival, lambda: next(expected))

    assert asyncio.run(look(iter([True, False]))) is arrival, "the other has gone on without it"
    arrival.exported = b"handle"
    assert asyncio.run(look(iter(()))) is arrival, "begun, and so nothing more is asked"


class Silent:
    """Workers that never have anything; notes how long they were to wait."""

    def __init__(self, asked: list[float]) -> None:
        self.asked = asked

    def ask(self, peer: str, question: str, run: str, key: panels.PanelKey, what: Any) -> Future[Any]:
        self.asked.append(what and what[1])
        answer: Future[Any] = Future()
        answer.set_result(None)
        return answer


def test_a_worker_with_nothing_to_multiply_waits_less_for_another() -> None:
    asked: list[float] = []
    part = RemotePart(WORKERS[1], ("a", 0, 0), (0, 1, 0, 1), 8, lambda exported, peer: None)
    for reading in (0.0, 0.05, 3.0, None):
        assert Exchange(Silent(asked), "run").take([part], reading) == [part]
    assert asked == [peers.HUNGRY_SECONDS, 0.05, peers.BEGIN_SECONDS, peers.BEGIN_SECONDS]


@pytest.mark.parametrize("soon", [1, 100])
def test_a_worker_expects_what_is_ahead_of_it(soon: int, job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_stage, "PANELS_SOON", soon)
    work = job()
    engine = work.start(WORKERS[0])
    tile, later = list(work.plan.tiles())[:2]
    starts = [start for start, _ in work.plan.panels()]
    assert engine.expects(("a", tile.i, 0)), "no tile has come yet: this may be its first"
    here, go_on = threading.Event(), threading.Event()
    begin = load_stage.LoadStage._begin

    def slowly(stage: Any, job: Any, start: int, *rest: int) -> Any:
        if start == starts[2]:
            here.set()
            go_on.wait(SOON_SECONDS)
        return begin(stage, job, start, *rest)

    monkeypatch.setattr(load_stage.LoadStage, "_begin", slowly)
    with ThreadPoolExecutor(2) as pool:
        done = pool.submit(engine.multiply, tile)
        assert here.wait(SOON_SECONDS)
        for operand, place in (("a", tile.i), ("b", tile.j)):
            assert [engine.expects((operand, place, start)) for start in starts[:4]] == [
                False,
                False,
                True,
                soon > 1,
            ]
        assert not engine.expects(("b", later.j, starts[3])), "of that tile it knows nothing"
        after = pool.submit(engine.multiply, later)
        if soon > 1:
            until_met(lambda: engine.expects(("b", later.j, 0)))
        go_on.set()
        done.result(SOON_SECONDS)
        after.result(SOON_SECONDS)
    assert not engine.expects(("a", tile.i, 0)), "the tiles that it knew are done"


@pytest.mark.sample(1)
@pytest.mark.parametrize("nbytes", [75_000, 110_000, 10**7])
@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize(("symmetric", "cell"), [(False, 40), (True, 40), (True, 20)])
def test_side_by_side(symmetric: bool, cell: int, ahead: int, nbytes: int, job: Any) -> None:
    for _ in range(2):
        work = job(nbytes, cell=cell, symmetric=symmetric)
        for worker in WORKERS:
            work.start(worker)
        with ThreadPoolExecutor(2) as pool:
            walks = list(pool.map(lambda worker, work=work: work.walk(worker, ahead), WORKERS))
        work.assert_product()
        read, taken = (sum(pair) for pair in zip(*map(shared, walks), strict=True))
        assert read <= work.plan.read_nbytes
        alone = sum(work.plan.tile_read_nbytes(tile) for tile in work.plan.tiles())
        assert read + taken <= alone


def test_a_row_of_tiles_is_shared_as_a_column_is(job: Any) -> None:
    work = job()
    for worker in WORKERS:
        work.start(worker)
    tiles = list(work.plan.tiles())
    for tile in tiles:
        for worker in WORKERS:  # both compute all of it
            work.peers.engines[worker].multiply(tile, sharers=Sharers(tuple(WORKERS), tuple(WORKERS)))
    work.assert_product()
    panels = {("a", tile.i, start) for tile in tiles for start, _ in work.plan.panels()}
    panels |= {("b", tile.j, start) for tile in tiles for start, _ in work.plan.panels()}
    # The second worker asks for all panels of A and of B.
    assert work.peers.asked.count((WORKERS[0], "still")) == len(panels)


def test_who_finds_nothing_asks_less_and_less_often(job: Any) -> None:
    work = job()
    engine = work.start(WORKERS[0])
    work.start(WORKERS[1])
    tiles, panels = list(work.plan.tiles()), work.plan.panel_count
    sharers = Sharers((), tuple(WORKERS))
    for tile in tiles[:3]:
        engine.multiply(tile, sharers=sharers)
    asked = work.peers.asked.count((WORKERS[1], "offer"))
    assert 3 * panels == 27
    assert 2 <= asked <= 12, "a few at a time, that are under way, and then longer and longer none"


def test_who_begins_other_lines_asks_for_them_at_once() -> None:
    """Another may have loaded all of them, whatever nobody had of the lines before."""
    exchange = Exchange(Silent([]), "run")

    def asked(key: panels.PanelKey) -> bool:
        assert exchange.ahead(key, WORKERS[1:]) is None
        return exchange.asks(key)

    def found_nothing(key: panels.PanelKey) -> None:
        part = RemotePart(WORKERS[1], key, (0, 1, 0, 1), 8, lambda exported, peer: None)
        assert exchange.take([part]) == [part]

    for start in range(4):
        if asked(("a", 0, start)):
            found_nothing(("a", 0, start))
    assert not asked(("a", 0, 4))
    assert asked(("a", 1, 0))
    found_nothing(("a", 0, 3))  # an answer that is late
    assert asked(("a", 1, 1))
    found_nothing(("a", 1, 1))
    assert not asked(("a", 1, 2))


def test_both_sides_of_a_symmetric_product_are_asked_for_less_and_less_often() -> None:
    """Whose panels are all of A, of two rows of tiles by turns."""
    told: list[Any] = []
    exchange = Exchange(Silent(told), "run")
    asked = 0
    for start in range(100):
        for place in (3, 0):
            key = ("a", place, start)
            assert exchange.ahead(key, WORKERS[1:]) is None
            if exchange.asks(key):
                asked += 1
                exchange.take([RemotePart(WORKERS[1], key, (0, 1, 0, 1), 8, lambda exported, peer: None)])
    assert asked <= 2 * 10
    assert len(told) == asked, "at the start nobody is asked who is ahead"


def test_the_first_to_say_that_it_is_ahead_is_not_kept_waiting() -> None:
    silent: Future[Any] = Future()

    class Peers:
        def ask(self, peer: str, question: str, run: str, key: panels.PanelKey, what: Any) -> Future[Any]:
            if peer == "silent":
                return silent
            answer: Future[Any] = Future()
            if peer == "gone":
                answer.set_exception(OSError("no route"))
            else:
                answer.set_result(question == "holds")
            return answer

    exchange = Exchange(Peers(), "run")
    names = ["silent", "gone", "ahead"]
    for place in range(peers.OF_A_TILE):
        assert exchange.ahead(("a", place, 0), names) is None
    assert exchange.ahead(("a", 7, 0), names) == "ahead"
    assert exchange.lost <= {"gone"}
    assert exchange.ahead(("a", 8, 0), names[:2]) is None
    assert exchange.lost == {"gone"}


def test_what_one_has_not_begun_comes_from_another_that_has_it_all(job: Any) -> None:
    work = job()
    ahead, behind = "tcp://here:1", "tcp://here:2"
    names = (ahead, behind, "tcp://here:3")
    for name in names:
        work.start(name)
    tiles = list(work.plan.tiles())[:2]
    for tile in tiles:
        work.peers.engines[ahead].multiply(tile, sharers=Sharers((), names))
    work.peers.asked.clear()
    reports = [work.peers.engines[names[2]].multiply(tile, sharers=Sharers((), names)) for tile in tiles]
    # Of each panel begun before it was known who had it, a third is read here, between rows: at most 7 of 20.
    everything = sum(8 * 20 * tile.columns * work.plan.panel_count for tile in tiles)
    unknown = peers.OF_A_TILE * load_stage.PANELS_COMING
    assert everything - unknown * 8 * 7 * 40 <= shared(reports)[1] < everything
    assert work.peers.asked.count((behind, "offer")) <= unknown
    assert (behind, "still") not in work.peers.asked


def test_a_worker_that_is_ahead_no_longer_is_left_alone(job: Any) -> None:
    work = job()
    for worker in WORKERS:
        work.start(worker)
    first, second = (work.peers.engines[worker] for worker in WORKERS)
    tiles = list(work.plan.tiles())[:3]
    sharers = Sharers((), tuple(WORKERS))
    for tile in tiles[:2]:
        first.multiply(tile, sharers=sharers)
    find = first.arrival
    first.arrival = lambda key: find(key) if key[2] < 100 else None  # it lets go of the later ones
    reports = [second.multiply(tile, sharers=sharers) for tile in tiles]
    work.assert_stored(reports)
    held = sum(8 * 100 * tile.columns for tile in tiles[:2])
    assert held - peers.OF_A_TILE * load_stage.PANELS_COMING * 8 * 20 * 40 <= shared(reports)[1] <= held


def test_a_panel_that_was_replaced_while_it_was_copied_is_read(job: Any) -> None:
    work = job()
    for worker in WORKERS:
        work.start(worker)
    replaced = []

    def replace_it(peer: str) -> None:
        """The other worker goes on to other panels, into the same places."""
        cache = work.peers.engines[peer].load.sources[1].cache
        for buffer in cache._held.values():
            buffer.flat[:] = np.nan
            buffer.arrival = Arrival()
            replaced.append(True)

    work.peers.before_still = replace_it
    first = list(iter(lambda: work.placement.own(WORKERS[0]), None))
    sharers = work.placement.sharers(first[0], WORKERS[0], frozenset(WORKERS))
    work.peers.engines[WORKERS[0]].multiply(first[0], sharers=sharers)
    (tile, *_) = (tile for tile in work.plan.tiles() if tile.j == first[0].j and tile.i > first[-1].i)
    report = work.peers.engines[WORKERS[1]].multiply(tile, sharers=sharers)
    assert replaced
    assert report.shared_nbytes == 0
    rows, columns = tile.region
    wanted = work.factors[0][rows, :] @ work.factors[1][:, columns]
    np.testing.assert_allclose(work.c[rows, columns], wanted, rtol=1e-12, atol=1e-12)


def test_a_worker_that_is_lost_is_not_asked_again(job: Any) -> None:
    work = job()
    work.start(WORKERS[0])
    engine = work.start(WORKERS[1])
    gone = work.peers.engines.pop(WORKERS[0])
    try:
        for tile in work.plan.tiles():
            report = engine.multiply(tile, sharers=Sharers((), tuple(WORKERS)))
            assert report.shared_nbytes == 0
    finally:
        gone.close()
    work.assert_product()
    assert set(work.peers.asked) == {(WORKERS[0], "offer")}
    assert len(work.peers.asked) <= load_stage.PANELS_TAKEN, "no more than were asked at once"


def test_memory_that_cannot_be_reached_is_read_instead(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    work = job()
    for worker in WORKERS:
        work.start(worker)
    work.walk(WORKERS[0])

    def copy(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("injected: this GPU cannot reach that one")

    monkeypatch.setattr(HostSharedMemory, "copy", copy)
    assert shared(work.walk(WORKERS[1]))[1] == 0
    work.assert_product()
    assert 1 <= work.peers.asked.count((WORKERS[0], "offer")) <= load_stage.PANELS_TAKEN


def test_memory_that_cannot_be_given_is_read_by_all(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def export(unit: Any, flat: np.ndarray) -> bytes:
        raise RuntimeError("injected: the driver does not support it")

    work = job()
    monkeypatch.setattr(HostSharedMemory, "export", export)
    for worker in WORKERS:
        work.start(worker)
        assert shared(work.walk(worker))[1] == 0
    work.assert_product()
    assert work.peers.asked == []


def test_silent_workers_are_waited_for_at_once(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    work = job()
    engine = work.start(WORKERS[0])
    silent = [f"tcp://here:{number}" for number in range(2, 8)]
    answers: list[Future[Any]] = []
    now = [1000.0]

    class Silent(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            assert timeout is not None
            now[0] += timeout
            raise TimeoutError

    def ask(*arguments: Any) -> Future[Any]:
        answers.append(Silent())
        return answers[-1]

    monkeypatch.setattr(work.peers, "ask", ask)
    monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    engine.multiply(next(work.plan.tiles()), sharers=Sharers((), (WORKERS[0], *silent)))
    assert now[0] - 1000 == 2 * peers.PATIENCE_SECONDS
    assert len(answers) > 1
    assert all(answer.cancelled() for answer in answers), "nobody goes on asking"


def test_memory_that_cannot_be_let_go_of_fails_one_tile_alone(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = job()
    failing = iter([RuntimeError("injected: the GPU does not answer")])

    def close(memory: HostSharedMemory, keep: Set[str] = frozenset()) -> None:
        if (error := next(failing, None)) is not None:
            raise error

    monkeypatch.setattr(HostSharedMemory, "close", close)
    engine, tiles = one.start("w0"), list(one.plan.tiles())
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(RuntimeError, match="does not answer"):
            pool.submit(engine.multiply, tiles[0]).result(30)
        for tile in tiles:
            assert pool.submit(engine.multiply, tile).result(30).index == tile.index
    one.assert_product()


def test_a_worker_of_another_host_asks_nobody() -> None:
    sharers = Sharers(("tcp://h1:1",), ("tcp://h1:1", "tcp://h1:2"))
    assert sharers.reached_from("tcp://h1:3") == sharers
    assert sharers.reached_from("tcp://h2:1") == Sharers()
    assert Sharers().reached_from("tcp://h2:1") == Sharers()


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_c_is_right(seed: int, job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several workers in any order, who do not agree on who they are; places too few, faults, copies that take long."""
    draw = random.Random(seed)
    monkeypatch.setattr(peers, "PATIENCE_SECONDS", 0.1)
    take, copy, load = PanelCache.take, HostSharedMemory.copy, HostUnit.load

    def poisoned(cache: Any, key: Any) -> Any:
        buffer, there = take(cache, key)
        if not there:
            buffer.flat[:] = np.nan
        return buffer, there

    def in_halves(unit: Any, exported: bytes, peer: str, part: PanelPart, panel: Placed) -> None:
        top, bottom, left, right = part
        middle = (top + bottom) // 2
        copy(unit, exported, peer, (top, middle, left, right), panel)
        time.sleep(draw.random() * 0.01)
        copy(unit, exported, peer, (middle, bottom, left, right), panel)
        if draw.random() < 0.002:
            raise RuntimeError("injected: the link is down")

    def now_and_then(unit: Any, part: Any, panel: Placed) -> Any:
        time.sleep(draw.random() * 0.002)
        if seed % 2 and draw.random() < 0.002:
            raise OSError("injected: the disk had a moment")
        return load(unit, part, panel)

    monkeypatch.setattr(PanelCache, "take", poisoned)
    monkeypatch.setattr(HostSharedMemory, "copy", in_halves)
    monkeypatch.setattr(HostUnit, "load", now_and_then)
    work = job(draw.choice([75_000, 110_000, 10**7]), draw.choice([None, "auto"]), draw.choice([20, 40]))
    names = [f"tcp://here:{number}" for number in range(draw.choice([2, 3, 4]))]
    for name in names:
        work.start(name)

    def walk(name: str) -> None:
        own = random.Random(name)
        tiles = list(work.plan.tiles())
        own.shuffle(tiles)

        def some() -> tuple[str, ...]:
            return (
                tuple(own.sample(names, own.randint(1, len(names)))) if own.random() < 0.3 else tuple(names)
            )

        def multiply(tile: Any) -> None:
            for _ in range(30):
                with suppress(OSError):
                    work.peers.engines[name].multiply(tile, sharers=Sharers(some(), some()))
                    return
            raise AssertionError("the disk never worked")

        with ThreadPoolExecutor(own.choice([1, 3])) as pool:
            list(pool.map(multiply, tiles))

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(walk, names))
    work.assert_product()
    for engine in work.peers.engines.values():
        for source in engine.load.sources:
            assert all(buffer.users == 0 for buffer in source.cache._held.values())
        assert engine.slots.qsize() == work.plan.c_buffers


@pytest.mark.sample(1)
@pytest.mark.parametrize("failing", [0, 5, 11])
def test_a_part_that_could_not_be_read_is_not_given(
    failing: int, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = job()
    for worker in WORKERS:
        work.start(worker)
    fail_one_load(monkeypatch, failing)
    sharers = Sharers((), tuple(WORKERS))
    with ThreadPoolExecutor(2) as pool:
        walks = []
        for place, worker in enumerate(WORKERS):
            own = [tile for tile in work.plan.tiles() if tile.i % 2 == place]

            def walk(worker: str = worker, own: Any = own) -> list[Any]:
                failed = []
                for tile in own:
                    try:
                        work.peers.engines[worker].multiply(tile, sharers=sharers)
                    except OSError:
                        failed.append(tile)
                return failed

            walks.append(pool.submit(walk))
        failed = [
            (worker, tile) for worker, done in zip(WORKERS, walks, strict=True) for tile in done.result()
        ]
    assert len(failed) == 1, "the worker that reads it, and no other"
    for worker, tile in failed:
        work.peers.engines[worker].multiply(tile, sharers=sharers)
    work.assert_product()


@pytest.mark.sample(1)
@pytest.mark.parametrize("refused", ["tilewright-take_0", "tilewright-take_1", "tilewright-read_1"])
def test_without_threads_nothing_comes_into_a_place_that_was_given_back(
    refused: str, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool keeps what it could start no thread for, and would do it later."""
    work = job()
    work.start(WORKERS[0])
    work.walk(WORKERS[0])
    engine = work.start(WORKERS[1])
    take, discard = PanelCache.take, PanelCache.discard
    start, copy, load = threading.Thread.start, HostSharedMemory.copy, HostUnit.load
    free: set[int] = set()
    late: list[int] = []
    refusals = []

    def refuse(thread: threading.Thread) -> None:
        if thread.name == refused and len(refusals) < 3:
            refusals.append(refused)
            raise RuntimeError("injected: can't start new thread")
        start(thread)

    def taken(cache: Any, key: Any) -> Any:
        buffer, there = take(cache, key)
        free.discard(buffer.flat.ctypes.data)
        return buffer, there

    def discarded(cache: Any, key: Any) -> None:
        free.add(cache._held[key].flat.ctypes.data)
        discard(cache, key)

    def written(panel: Placed) -> None:
        time.sleep(0.005)  # so that a thread is still busy when the next is wanted
        late.extend(free & {panel.flat.ctypes.data})

    def slow_copy(unit: Any, exported: bytes, peer: str, part: PanelPart, panel: Placed) -> None:
        written(panel)
        copy(unit, exported, peer, part, panel)

    def slow_load(unit: Any, part: Any, panel: Placed) -> Any:
        written(panel)
        return load(unit, part, panel)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(PanelCache, "take", taken)
    monkeypatch.setattr(PanelCache, "discard", discarded)
    monkeypatch.setattr(HostSharedMemory, "copy", slow_copy)
    monkeypatch.setattr(HostUnit, "load", slow_load)
    sharers, failed = Sharers(tuple(WORKERS), tuple(WORKERS)), 0
    for tile in [*list(work.plan.tiles())[:3]] * 2:
        try:
            engine.multiply(tile, sharers=sharers)
        except RuntimeError:
            failed += 1
    engine.close()
    assert refusals
    assert not late
    assert failed == (len(refusals) if "read" in refused else 0), "who takes from others can do without"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for another in vain does so for longer than `SOON_SECONDS`."""
    monkeypatch.setattr(peers, "PATIENCE_SECONDS", 4 * SOON_SECONDS)


SOON_SECONDS = 30.0
"""What waits for nothing is done by then, however busy the machine is."""


def until_met(condition: Callable[[], bool]) -> None:
    """Wait for what comes by itself, and fail where it does not."""
    until = time.monotonic() + SOON_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.usefixtures("patient")
def test_two_that_want_the_same_panels_the_other_way_round(job: Any) -> None:
    work = job()
    for worker in WORKERS:
        work.start(worker)
    sharers = Sharers((), tuple(WORKERS))
    rows = [[tile for tile in work.plan.tiles() if tile.i % 2 == place] for place in (0, 1)]
    rows[1].sort(key=lambda tile: (tile.i, -tile.j))

    def walk(place: int) -> None:
        with ThreadPoolExecutor(3) as pool:
            engine = work.peers.engines[WORKERS[place]]
            list(pool.map(lambda tile: engine.multiply(tile, sharers=sharers), rows[place]))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(walk, (0, 1), timeout=SOON_SECONDS))
    work.assert_product()


@pytest.mark.usefixtures("patient")
def test_what_one_reads_alone_is_given_before_what_it_takes_has_come(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One asks for B alone and the other for A alone: each has read what the other waits for."""
    work = job()
    asked = {
        work.start(worker).load.sharing.exchange: operand
        for worker, operand in zip(WORKERS, "ab", strict=True)
    }
    monkeypatch.setattr(peers.Exchange, "asks", lambda exchange, operand: asked[exchange] == operand)
    tile, sharers = next(work.plan.tiles()), Sharers(tuple(WORKERS), tuple(WORKERS))

    def multiply(worker: str) -> None:
        work.peers.engines[worker].multiply(tile, sharers=sharers)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(multiply, WORKERS, timeout=SOON_SECONDS))


@pytest.mark.usefixtures("patient")
def test_what_one_reads_alone_does_not_wait_for_panels_before_it(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = job()
    engine = work.start(WORKERS[0])
    asks = iter([True])
    monkeypatch.setattr(peers.Exchange, "asks", lambda exchange, operand: next(asks, False))
    silent: Future[Any] = Future()
    monkeypatch.setattr(work.peers, "ask", lambda *arguments: silent)
    (start, _), (after, _), *_ = work.plan.panels()
    tile = next(work.plan.tiles())
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(engine.multiply, tile, sharers=Sharers((), tuple(WORKERS)))
        try:
            until_met(lambda: engine.arrival(("b", tile.j, after)) is not None)
            arrival = engine.arrival(("b", tile.j, after))
            assert arrival.own_there.result(SOON_SECONDS)
            assert not engine.arrival(("b", tile.j, start)).whole.done(), "nobody has answered yet"
        finally:
            silent.set_result(None)
        done.result(30)


def hold_back(patch: pytest.MonkeyPatch, engine: TileEngine) -> threading.Event:
    """Lets an engine read nothing until the event is set."""
    gate = threading.Event()
    original = HostUnit.load

    def load(unit: Any, part: Any, panel: Placed) -> Any:
        if unit is engine.unit:
            assert gate.wait(30)
        return original(unit, part, panel)

    patch.setattr(HostUnit, "load", load)
    return gate


def test_a_part_that_does_not_come_is_read(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PATIENCE_SECONDS", 0.05)
    work = job()
    slow, quick = (work.start(worker) for worker in WORKERS)
    sharers = Sharers((), tuple(WORKERS))
    gate = hold_back(monkeypatch, slow)
    tiles = list(work.plan.tiles())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(slow.multiply, tiles[0], sharers=sharers)
        try:
            until_met(lambda: slow.arrival(("b", 0, 0)) is not None)
            for tile in tiles[1:]:
                quick.multiply(tile, sharers=sharers)
        finally:
            gate.set()
        waiting.result(30)
    work.assert_product()


@pytest.mark.usefixtures("patient")
def test_a_worker_stops_while_it_waits_for_another(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told to by its own loop, which has to carry the answer that it waits for."""
    work = job()
    slow, waiting = (work.start(worker) for worker in WORKERS)
    gate = hold_back(monkeypatch, slow)
    monkeypatch.setitem(engines._engines, "stopping", waiting)
    sharers = Sharers((), tuple(WORKERS))
    first = next(work.plan.tiles())
    with ThreadPoolExecutor(2) as pool:
        tiles = [pool.submit(slow.multiply, first, sharers=sharers)]
        try:
            until_met(lambda: slow.arrival(("b", 0, 0)) is not None)
            tiles.append(pool.submit(waiting.multiply, first, sharers=sharers))
            until_met(lambda: (WORKERS[0], "offer") in work.peers.asked)
            stopped = work.peers.run(tasks.stop_run("stopping", True))
            until_met(lambda: waiting._closed)
        finally:
            gate.set()
        stopped.result(SOON_SECONDS)
        with pytest.raises(CancelledError):
            tiles[1].result(SOON_SECONDS)
        tiles[0].result(SOON_SECONDS)
    assert engines._stopped.pop("stopping") is waiting


async def offered(arrival: Arrival, part: PanelPart) -> Any:
    return await offer(arrival, part)


def test_what_is_offered() -> None:
    own, other = (0, 5, 0, 9), (5, 10, 0, 9)
    arrival = Arrival()
    assert asyncio.run(offered(arrival, own)) is None, "its place is not to be had"
    arrival.own, arrival.exported = own, b"handle"
    assert asyncio.run(offered(arrival, other)) is None, "it comes from somebody who may wait for us"

    async def later() -> Any:
        asyncio.get_running_loop().call_later(0.05, panels.tell, arrival.own_there, True)
        return await offer(arrival, own)

    assert asyncio.run(later()) == (b"handle", arrival.number, None)
    assert asyncio.run(offered(arrival, (1, 4, 0, 9))) == (b"handle", arrival.number, None)
    assert asyncio.run(offered(arrival, other)) is None
    assert not holds(arrival)
    arrival.all_there()
    panels.tell(arrival.whole, False)  # the first word counts
    exported, number, held = asyncio.run(offered(arrival, other))
    assert (exported, number) == (b"handle", arrival.number)
    arrival.all_there()
    assert asyncio.run(offered(arrival, other))[2] > held > 0, "since the first word"
    assert holds(arrival)
    assert not holds(None)
    failed = Arrival(own, b"handle")
    panels.tell(failed.own_there, False)
    assert asyncio.run(offered(failed, own)) is None


def test_workers_ask_each_other_over_dask() -> None:
    arrival = Arrival((0, 5, 0, 9), b"\x00handle\xff")
    arrival.all_there()
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster),
    ):
        asking, answering = cluster.workers.values()
        answer_peers(
            answering,
            lambda run, key: arrival if (run, key) == ("run", ("b", 3, 40)) else None,
            lambda run, key: False,
        )

        def ask(question: str, run: str, what: Any) -> Any:
            way = WorkerPeers(asking)
            return way.ask(answering.address, question, run, ("b", 3, 40), what).result(30)

        exported, number, held_seconds = ask("offer", "run", ((0, 2, 0, 9), 0.0))
        assert (exported, number) == (b"\x00handle\xff", arrival.number)
        assert held_seconds > 0
        assert ask("offer", "another", ((0, 2, 0, 9), 0.0)) is None
        assert ask("still", "run", number) is True
        assert ask("still", "run", number + 1) is False
        assert ask("still", "another", number) is False
        assert ask("holds", "run", None) is True
        assert ask("holds", "another", None) is False
        lost = WorkerPeers(asking).ask("tcp://127.0.0.1:1", "offer", "run", ("b", 3, 40), ())
        with pytest.raises(
            TimeoutError
        ):  # Dask tries to connect for half a minute; an exchange does not wait for it
            lost.result(0.2)
        assert lost.cancel()


def test_sharers_are_of_one_host_and_known() -> None:
    plan = plan_of((4, 2), 4)
    workers = ["tcp://h1:1", "tcp://h1:2", "tcp://h2:1", "tcp://h2:2"]
    placement = Placement(plan, plan.tiles())
    placement.share_among(workers)
    among = frozenset(workers)
    for worker in workers:
        while (tile := placement.own(worker)) is not None:
            sharers = placement.sharers(tile, worker, among)
            assert worker in sharers.a
            assert worker in sharers.b
            assert {other.rpartition(":")[0] for other in sharers.a + sharers.b} == {
                worker.rpartition(":")[0]
            }
            assert placement.sharers(tile, worker, among - {worker}) == Sharers()
            for other in workers:
                if other.rpartition(":")[0] == worker.rpartition(":")[0]:
                    alike = placement.sharers(tile, other, among)
                    assert (alike.a, alike.b) == (sharers.a, sharers.b), "all cut the panel in the same way"
