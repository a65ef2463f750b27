"""Each worker gets a share of C of its own: all of C once, evenly, and together they read little twice."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster, get_worker
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.pipeline.cluster import pool, submit, watch
from tilewright.pipeline.errors import ClusterError
from tilewright.pipeline.plan.grid import Tile
from tilewright.pipeline.plan.inputs import Geometry, Limits, StoredMatrix
from tilewright.pipeline.plan.product import MatmulPlan, plan_tiles
from tilewright.pipeline.product.execute import run_placed
from tilewright.pipeline.product.placement import Placement, divide
from tilewright.pipeline.worker.panels import PanelCache

F4 = np.dtype("f4")


def plan_of(
    grid: tuple[int, int], workers: int, nbytes: int = 10**9, edge: tuple[int, int] = (0, 0)
) -> MatmulPlan:
    """A plan of so many tiles of 32 × 32, four panels deep; those at the end lack ``edge`` rows and columns."""
    rows, columns = (32 * side - less for side, less in zip(grid, edge, strict=True))
    a, b = StoredMatrix(rows, 64, F4, (16, 16)), StoredMatrix(64, columns, F4, (16, 16))
    return plan_tiles(a, b, F4, (16, 16), Limits(workers, nbytes), keep=Geometry(32, 32, 16, 1, 32, 32))


class Held:
    """What a worker holds while it walks its tiles, and what it reads."""

    def __init__(self, plan: MatmulPlan) -> None:
        self._plan = plan
        self._a, self._b = PanelCache(plan.a_buffers, object), PanelCache(plan.b_buffers, object)
        self.read_nbytes = 0

    def multiply(self, tile: Tile) -> None:
        for start, stop in self._plan.panels():
            for cache, place, side in ((self._a, tile.i, tile.rows), (self._b, tile.j, tile.columns)):
                buffer, there = cache.take((place, start))
                cache.let_go(buffer)
                self.read_nbytes += 0 if there else side * (stop - start) * F4.itemsize


def read_nbytes(plan: MatmulPlan, shares: Sequence[Sequence[Tile]]) -> int:
    total = 0
    for share in shares:
        held = Held(plan)
        for tile in share:
            held.multiply(tile)
        total += held.read_nbytes
    return total


def test_shares_are_even_where_bands_make_them_so() -> None:
    """Three rows of tiles, the last lower, in two columns: a column each, not a row and a half."""
    plan = plan_of((3, 2), 2, 20_000, edge=(11, 0))
    assert (plan.a_buffers, plan.b_buffers) == (2, 2)
    areas = [sum(tile.rows * tile.columns for tile in share) for share in divide(plan, plan.tiles(), 2)]
    assert areas == [85 * 32, 85 * 32]


def test_tiles_of_a_sum_of_nothing_are_shared_too() -> None:
    """k = 0, and a C of zeros that is larger than the memory."""
    a, b = StoredMatrix(100, 0, F4, (16, 16)), StoredMatrix(0, 100, F4, (16, 16))
    plan = plan_tiles(a, b, F4, (16, 16), Limits(2, 5000))
    assert plan.grid[1] > 1
    shares = divide(plan, plan.tiles(), 2)
    assert sorted(tile.index for share in shares for tile in share) == list(range(plan.tile_count))
    assert all(shares)


grids = st.tuples(st.integers(1, 9), st.integers(1, 9))
edges = st.tuples(st.integers(0, 31), st.integers(0, 31))


@given(grids, edges, st.integers(1, 10), st.sets(st.integers(0, 80)))
def test_every_tile_falls_to_one_worker_and_areas_are_even(
    grid: tuple[int, int], edge: tuple[int, int], workers: int, finished: set[int]
) -> None:
    plan = plan_of(grid, workers, edge=edge)
    tiles = [tile for tile in plan.tiles() if tile.index not in finished]
    shares = divide(plan, tiles, workers)
    assert len(shares) == workers
    assert sorted(tile.index for share in shares for tile in share) == [tile.index for tile in tiles]
    areas = [sum(tile.rows * tile.columns for tile in share) for share in shares]
    assert all(abs(area - sum(areas) / workers) <= 32 * 32 for area in areas)


def divide_one_by_one(plan: MatmulPlan, tiles: Sequence[Tile], workers: int) -> list[list[Tile]]:
    """What `divide` does, tile by tile, as its docstring says it."""
    found: list[tuple[int, list[list[Tile]]]] = []
    for bands in range(1, workers + 1):
        if workers % bands or bands > max(1, plan.grid[1]):
            continue

        def place(tile: Tile, bands: int = bands) -> tuple[int, int, int]:
            band = tile.j * bands // plan.grid[1]
            return band, -tile.i if band % 2 else tile.i, tile.j

        area, done = sum(tile.rows * tile.columns for tile in tiles), 0
        shares: list[list[Tile]] = [[] for _ in range(workers)]
        for tile in sorted(tiles, key=place):
            size = tile.rows * tile.columns
            shares[(2 * done + size) * workers // (2 * area)].append(tile)
            done += size
        read, largest = 0, 0
        for share in shares:
            rows, columns = sorted({tile.i for tile in share}), len({tile.j for tile in share})
            share.sort(key=lambda tile: (tile.i, -tile.j if rows.index(tile.i) % 2 else tile.j))
            held = plan.b_buffers // plan.panel_count
            row_reads = len(rows) if plan.a_buffers >= plan.panel_count else len(share)
            column_reads = columns if held >= columns else len(share) - held * max(0, len(rows) - 1)
            read += row_reads * plan.tile_rows + column_reads * plan.tile_columns
            largest = max(largest, sum(tile.rows * tile.columns for tile in share))
        found.append((largest * read, shares))
    return min(found, key=lambda candidate: candidate[0])[1]


@settings(max_examples=200)
@given(
    grids,
    edges,
    st.integers(1, 24),
    st.sampled_from([7_000, 12_000, 25_000, 50_000, 10**6]),
    st.sets(st.integers(0, 80)),
    st.randoms(use_true_random=False),
)
def test_shares_are_those_of_dealing_tile_by_tile(
    grid: tuple[int, int],
    edge: tuple[int, int],
    workers: int,
    nbytes: int,
    finished: set[int],
    generator: random.Random,
) -> None:
    plan = plan_of(grid, workers, 32 * 32 * 4 + 2 * 16 * 64 * 4 + nbytes, edge)
    tiles = [tile for tile in plan.tiles() if tile.index not in finished]
    generator.shuffle(tiles)  # as what workers left comes back
    assert divide(plan, tiles, workers) == divide_one_by_one(plan, tiles, workers)


def calls_of(work: Callable[[], Any]) -> int:
    """How many functions are called meanwhile, in Python or from it."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("workers", [1, 4, 60])
def test_a_million_tiles_are_not_handled_one_by_one(workers: int) -> None:
    """What is called does not become more with the tiles: a sort's key, or a sum's terms, would be."""
    few, many = (plan_of(grid, workers) for grid in ((60, 60), (150, 150)))
    tiles = {plan: list(plan.tiles()) for plan in (few, many)}
    counts = [calls_of(lambda plan=plan: divide(plan, tiles[plan], workers)) for plan in (few, many)]
    assert counts[1] == counts[0]


@given(grids, edges)
def test_one_worker_walks_the_plan(grid: tuple[int, int], edge: tuple[int, int]) -> None:
    plan = plan_of(grid, 1, edge=edge)
    assert divide(plan, plan.tiles(), 1) == [list(plan.tiles())]


@pytest.mark.parametrize(
    ("grid", "workers", "times_a", "times_b"),
    [
        ((8, 4), 2, 1, 2),  # rows to each, all columns to both
        ((4, 8), 2, 2, 1),
        ((4, 4), 2, 1, 2),
        ((8, 1), 2, 1, 2),
        ((1, 8), 2, 2, 1),
        ((2, 4), 4, 2, 2),  # half of either to each
        ((4, 4), 4, 2, 2),
        ((8, 8), 8, 2, 4),
        ((8, 8), 16, 4, 4),
        ((6, 6), 3, 1, 3),
    ],
)
def test_shares_read_what_a_grid_of_workers_reads(
    grid: tuple[int, int], workers: int, times_a: int, times_b: int
) -> None:
    plan = plan_of(grid, workers)
    strip = 32 * 64 * F4.itemsize
    expected = (grid[0] * times_a + grid[1] * times_b) * strip
    assert read_nbytes(plan, divide(plan, plan.tiles(), workers)) == expected


def test_workers_whose_rows_differ_walk_the_columns_alike() -> None:
    plan = plan_of((6, 5), 3)
    for share in divide(plan, plan.tiles(), 3):
        assert [tile.j for tile in share] == [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]
        assert sorted({tile.i for tile in share}) == [share[0].i, share[0].i + 1]


@given(
    grids,
    edges,
    st.integers(1, 6),
    st.sampled_from([7_000, 12_000, 25_000, 50_000, 10**6]),
    st.integers(0, 10**6),
)
def test_whoever_is_fast_helps_and_reads_stay_within_the_plan(
    grid: tuple[int, int], edge: tuple[int, int], workers: int, nbytes: int, seed: int
) -> None:
    generator = random.Random(seed)
    plan = plan_of(grid, workers, 32 * 32 * 4 + 2 * 16 * 64 * 4 + nbytes, edge)
    names = [f"worker {number}" for number in range(workers)]
    speeds = [generator.choice([1, 3, 20]) for _ in names]
    placement = Placement(plan, plan.tiles())
    placement.share_among(names)
    held = {name: Held(plan) for name in names}
    seen: Counter[int] = Counter()
    while len(placement):
        (worker,) = generator.choices(names, speeds)
        tile = placement.own(worker) or placement.others(worker)
        assert tile is not None, "a worker was sent away while tiles were left"
        seen[tile.index] += 1
        held[worker].multiply(tile)
    assert seen == Counter(range(plan.tile_count))
    assert sum(worker.read_nbytes for worker in held.values()) <= plan.read_nbytes


@given(grids, st.integers(0, 10**6))
def test_what_is_left_is_divided_anew_when_workers_change(grid: tuple[int, int], seed: int) -> None:
    generator = random.Random(seed)
    plan = plan_of(grid, 4)
    placement = Placement(plan, plan.tiles())
    seen: Counter[int] = Counter()
    names = ["a"]
    placement.share_among(names)
    while len(placement):
        before = len(placement)
        if generator.random() < 0.3:
            names = generator.sample("abcdef", generator.randint(1, 6))
            placement.share_among(names)
        assert len(placement) == before
        worker = generator.choice(names)
        tile = placement.own(worker) or placement.others(worker)
        assert tile is not None
        seen[tile.index] += 1
    assert seen == Counter(range(plan.tile_count))
    assert placement.own(names[0]) is placement.others(names[0]) is None


def where(index: int, seconds: float = 0.0) -> str:
    time.sleep(seconds)
    address: str = get_worker().address
    return address


def placed(client: Client, plan: MatmulPlan, function: Callable[..., Any] = where, *arguments: Any) -> Any:
    placement = Placement(plan, plan.tiles())
    return run_placed(
        client, function, placement, lambda tile, _: (tile.index, *arguments), key=f"where-{time.time()}"
    )


SHARED: dict[str, Callable[[str], object]] = {}


def shared_work(index: int) -> str:
    """What a test has workers of this process do: they tell it who they are."""
    address: str = get_worker().address
    SHARED["work"](address)
    return address


@pytest.fixture
def two() -> Any:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield cluster, client


def test_workers_compute_their_own_shares(two: Any) -> None:
    _, client = two
    plan = plan_of((4, 5), 2)
    pace = threading.Barrier(2)

    def in_step(address: str) -> None:
        with suppress(
            threading.BrokenBarrierError
        ):  # the last one, where the one before went to the same worker
            pace.wait(30)

    SHARED["work"] = in_step
    found = dict(placed(client, plan, shared_work))
    workers = list(client.nthreads())
    shares = divide(plan, plan.tiles(), 2)
    expected = {tile.index: worker for worker, share in zip(workers, shares, strict=True) for tile in share}
    assert found.keys() == expected.keys()
    # The last tiles go to whoever is free.
    assert sum(found[index] == worker for index, worker in expected.items()) >= len(expected) - 2


def test_workers_of_one_thread_have_several_tiles_under_way(two: Any) -> None:
    _, client = two
    plan = plan_of((4, 4), 2)
    lock, now, most = threading.Lock(), Counter[str](), Counter[str]()
    eight = threading.Barrier(8)

    def work(address: str) -> None:
        pool.make_room(3)
        with lock:
            now[address] += 1
            most[address] = max(most[address], now[address])
        eight.wait(30)
        with lock:
            now[address] -= 1

    SHARED["work"] = work
    placement = Placement(plan, plan.tiles())
    results = run_placed(
        client, shared_work, placement, lambda tile, _: (tile.index,), key="several", least=3
    )
    assert sorted(index for index, _ in results) == list(range(16))
    assert sorted(most.values()) == [4, 4], "three, and the one that would wait for a thread"


def test_what_is_not_recorded_yet_counts_as_under_way(two: Any) -> None:
    _, client = two
    first, second = client.nthreads()
    given: list[str] = []
    plan = plan_of((4, 4), 2)

    def call(tile: Tile, worker: str) -> tuple[int]:
        given.append(worker)
        return (tile.index,)

    SHARED["work"] = lambda address: None
    unrecorded = Counter({first: 2})  # as many as it has under way at a time
    results = run_placed(
        client, shared_work, Placement(plan, plan.tiles()), call, key="unrecorded", unrecorded=unrecorded
    )
    next(results)
    assert Counter(given) == {first: 2, second: 2}, "at first nothing else would come"
    for _ in range(3):
        next(results)
    assert given.count(first) == 2
    unrecorded.clear()
    assert len(list(results)) == 12
    assert Counter(given).total() == 16


def test_a_tile_that_takes_far_longer_is_given_to_an_idle_worker(
    two: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first result counts, once, and it is known who may still be busy with the tile."""
    _, client = two
    monkeypatch.setattr(submit, "STRAGGLER_SECONDS", 0.1)
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.02)
    slow, _ = client.nthreads()
    let_go, hung = threading.Event(), list[str]()

    def work(address: str) -> None:
        if address == slow and not hung:
            hung.append(address)
            let_go.wait(60)

    SHARED["work"] = work
    plan = plan_of((4, 4), 2)
    left_behind: dict[str, set[int]] = {}
    results = run_placed(
        client,
        shared_work,
        Placement(plan, plan.tiles()),
        lambda tile, _: (tile.index,),
        key="straggler",
        left_behind=left_behind,
    )
    try:
        assert sorted(index for index, _ in results) == list(range(16))
        assert left_behind.keys() == {slow}
        assert left_behind[slow], "and with which tiles"
    finally:
        let_go.set()


def test_a_tile_is_not_given_to_two_while_others_are_left_or_few_are_done(
    two: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = two
    monkeypatch.setattr(submit, "STRAGGLER_SECONDS", 0.0)
    monkeypatch.setattr(submit, "STRAGGLER_TIMES", 0.0)
    monkeypatch.setattr(submit, "STRAGGLER_LIKE", 16)
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.01)
    calls = Counter[str]()
    SHARED["work"] = lambda address: calls.update([address]) or time.sleep(0.02)
    assert sorted(index for index, _ in placed(client, plan_of((4, 4), 2), shared_work)) == list(range(16))
    assert calls.total() == 16


def test_a_slow_worker_is_helped(two: Any) -> None:
    _, client = two
    slow, fast = client.nthreads()
    others_done = threading.Event()

    def work(address: str) -> None:
        if address == slow:
            others_done.wait(30)

    SHARED["work"] = work
    found: dict[int, str] = {}
    for index, worker in placed(client, plan_of((6, 4), 2), shared_work):
        found[index] = worker
        if len(found) == 22:  # it was given one, and one to find waiting
            others_done.set()
    assert len(found) == 24
    assert Counter(found.values())[fast] >= 22


def test_a_worker_that_joins_gets_a_share(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, client = two
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.05)
    found: dict[int, str] = {}
    before = set(client.nthreads())
    joined, helps = threading.Event(), threading.Event()

    def work(address: str) -> None:
        if address not in before:
            helps.set()
        elif joined.is_set():
            helps.wait(30)

    SHARED["work"] = work
    for index, worker in placed(client, plan_of((6, 5), 3), shared_work):
        if not found:
            joined.set()
            cluster.scale(3)
            client.wait_for_workers(3)
        found[index] = worker
    assert len(found) == 30
    assert len(set(found.values()) - before) == 1


def test_the_tiles_of_a_worker_that_leaves_go_to_others(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, client = two
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.05)
    found: dict[int, str] = {}
    leaving: list[str] = []
    gone = threading.Event()

    def work(address: str) -> None:
        if leaving and address not in leaving:
            gone.wait(30)

    def retire() -> None:
        client.retire_workers(leaving)
        gone.set()

    SHARED["work"] = work
    closing = threading.Thread(target=retire)
    for index, worker in placed(client, plan_of((5, 4), 2), shared_work):
        if not found:
            leaving.append(next(name for name in client.nthreads() if name != worker))
            closing.start()
        found[index] = worker
    closing.join()
    assert sorted(found) == list(range(20))


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_all_workers_may_be_lost_at_once(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that were meant for one of them go to those that come in their place, under other names; so do tasks
    whose result was lost before it was asked for."""
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.2)
    found: Counter[int] = Counter()
    with (
        LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        for index, _ in placed(client, plan_of((4, 3), workers), where, 0.1):
            if not found:
                for process in client.run(os.getpid).values():
                    os.kill(process, signal.SIGKILL)
            found[index] += 1
    assert found == Counter(range(12))


def test_a_scheduler_that_goes_away_meanwhile_is_named(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, client = two

    def lost() -> None:
        raise OSError("Timed out trying to connect")

    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.05)
    results = placed(client, plan_of((5, 4), 2), where, 0.1)
    next(results)
    monkeypatch.setattr(client, "nthreads", lost)
    with pytest.raises(ClusterError, match="the scheduler went away: Timed out"):
        list(results)
