"""One worker's engine without a cluster: panels that it holds are not read again, and are never wrong ones."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zarr

from tests.pipeline.worker.held_contents import assert_contents
from tilewright.kernels.choices import DeviceKind
from tilewright.pipeline.plan.grid import Tile
from tilewright.pipeline.plan.inputs import Geometry, Limits, WorkerFacts
from tilewright.pipeline.plan.memory import LINE_NBYTES
from tilewright.pipeline.plan.product import MatmulPlan, plan_tiles
from tilewright.pipeline.plan.told import Product, TileReport
from tilewright.pipeline.report.timeline import covered
from tilewright.pipeline.store.arrays import as_stored_matrix
from tilewright.pipeline.worker import load_stage, stream, units, write_stage
from tilewright.pipeline.worker.engines import store_sum
from tilewright.pipeline.worker.gpu_unit import CudaUnit
from tilewright.pipeline.worker.panels import Placed
from tilewright.pipeline.worker.stream import TileEngine
from tilewright.pipeline.worker.survey import worker_facts
from tilewright.pipeline.worker.units import HostUnit, Move

M, K, N = 150, 100, 90


@pytest.fixture
def factors(tmp_path: Path, rng: np.random.Generator) -> tuple[zarr.Array[Any], zarr.Array[Any]]:
    stored = []
    for name, shape in (("a", (M, K)), ("b", (K, N))):
        array = zarr.create_array(tmp_path / name, shape=shape, chunks=(20, 20), dtype="f8")
        array[...] = rng.standard_normal(shape)
        stored.append(array)
    return stored[0], stored[1]


@pytest.fixture
def engine(factors: tuple[zarr.Array[Any], zarr.Array[Any]], tmp_path: Path) -> Iterator[Any]:
    """Makes engines that multiply on the CPU under a plan made for a GPU with so much memory."""
    made = []

    def make(nbytes: int, depth: int = 20) -> tuple[TileEngine, MatmulPlan, zarr.Array[Any]]:
        a, b = factors
        c = zarr.create_array(
            tmp_path / f"c{len(made)}", shape=(M, N), chunks=(20, 20), dtype="f8", fill_value=7
        )
        stored = as_stored_matrix(a), as_stored_matrix(b)
        plan = plan_tiles(
            *stored, np.dtype("f8"), (20, 20), Limits(1, nbytes), keep=Geometry(40, 40, depth, 1, 40, 40)
        )
        plan = replace(plan, read_threads=2, write_threads=1)
        product = Product(a, b, c, plan, "cpu", "full", f"run-{len(made)}")
        made.append(TileEngine(product, "here"))
        return made[-1], plan, c

    yield make
    for one in made:
        one.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("compressors", [None, "auto"])
@pytest.mark.parametrize("k_parts", [1, 2])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_cells_that_lie_apart(
    device: str,
    k_parts: int,
    compressors: Any,
    transpose_b: bool,
    transpose_a: bool,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks and cells of 20 float64 take 160 bytes of a line that is cut at multiples of 128."""
    a, b = rng.standard_normal((M, K)), rng.standard_normal((K, N))
    arrays = []
    for name, factor, turned in (("a", a, transpose_a), ("b", b, transpose_b)):
        array = zarr.create_array(
            tmp_path / name,
            shape=factor.shape[::-1] if turned else factor.shape,
            chunks=(20, 20),
            dtype="f8",
            compressors=compressors,
        )
        array[...] = factor.T if turned else factor
        arrays.append(array)
    c = zarr.create_array(tmp_path / "c", shape=(M, N), chunks=(20, 20), dtype="f8", fill_value=7)
    plan = plan_tiles(
        as_stored_matrix(arrays[0], transpose=transpose_a),
        as_stored_matrix(arrays[1], transpose=transpose_b),
        np.dtype("f8"),
        (20, 20),
        Limits(1, 10**6, line_nbytes=LINE_NBYTES),
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        keep=Geometry(60, 40, 20, k_parts, 20, 20),
    )
    assert plan.tile_rows == 60
    assert plan.layout.c().apart
    unit = HostUnit if device == "cpu" else CudaUnit
    monkeypatch.setattr(unit, "allocate", lambda unit, size, dtype: poisoned(size, dtype, device))
    plan = replace(plan, read_threads=2, write_threads=1)
    product = Product(*arrays, c, plan, device, "full", "apart")
    worker = TileEngine(product, "here")
    told: list[tuple[Tile, TileReport]] = []
    try:
        for tile in plan.tiles():
            reports = [worker.multiply(tile, part) for part in range(k_parts)]
            told += [(tile, report) for report in reports]
            if k_parts > 1:
                sums = [report.partial for report in reports if report.partial is not None]
                store_sum(product, tile, sums)
    finally:
        worker.close()
    np.testing.assert_allclose(c[...], a @ b, rtol=1e-12, atol=1e-12)
    assert_contents(told, plan, arrays)


@pytest.mark.sample(2)
@pytest.mark.parametrize("transposed", ["a", "b"])
@pytest.mark.parametrize("compressors", [None, "auto"])
@pytest.mark.parametrize("k_parts", [1, 2])
@pytest.mark.parametrize("cell", [20, 60])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c16"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tiles_of_a_symmetric_product_are_stored_twice(
    device: str,
    dtype: str,
    cell: int,
    k_parts: int,
    compressors: Any,
    transposed: str,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tiles of 60 × 60 of a side of 150, so of two and a half; cells of 20 lie apart in memory."""
    x = rng.standard_normal((M, K)).astype(dtype)
    if dtype == "c16":
        x += 1j * rng.standard_normal((M, K))
    stored = zarr.create_array(
        tmp_path / "x",
        shape=(M, K) if transposed == "b" else (K, M),
        chunks=(20, 20),
        dtype=dtype,
        compressors=compressors,
    )
    stored[...] = x if transposed == "b" else x.T
    c = zarr.create_array(
        tmp_path / "c", shape=(M, M), chunks=(20, 10), dtype=dtype, fill_value=7, compressors=compressors
    )
    plan = plan_tiles(
        as_stored_matrix(stored, transpose=transposed == "a"),
        as_stored_matrix(stored, transpose=transposed == "b"),
        np.dtype(dtype),
        (20, 10),
        Limits(1, 10**6, line_nbytes=LINE_NBYTES),
        transpose_a=transposed == "a",
        transpose_b=transposed == "b",
        symmetric=True,
        keep=Geometry(60, 60, 20, k_parts, cell, cell),
    )
    assert (plan.tile_rows, plan.cell_rows, plan.grid, plan.tile_count) == (60, cell, (3, 3), 6)
    unit = HostUnit if device == "cpu" else CudaUnit
    monkeypatch.setattr(unit, "allocate", lambda unit, size, dtype: poisoned(size, dtype, device))
    plan = replace(plan, read_threads=2, write_threads=2)
    product = Product(stored, stored, c, plan, device, "full", "mirrored")
    worker = TileEngine(product, "here")
    stored_nbytes = read_nbytes = 0
    told: list[tuple[Tile, TileReport]] = []
    try:
        for tile in plan.tiles():
            reports = [worker.multiply(tile, part) for part in range(k_parts)]
            told += [(tile, report) for report in reports]
            read_nbytes += sum(report.read_nbytes for report in reports)
            if k_parts > 1:
                sums = [report.partial for report in reports if report.partial is not None]
                assert all(np.isfinite(part).all() for part in sums)
                stored_nbytes += sum(one.nbytes for one in store_sum(product, tile, sums)[0])
            else:
                stored_nbytes += sum(one.nbytes for one in reports[0].stored)
    finally:
        worker.close()
    found = c[...]
    assert np.array_equal(found, found.T)
    exact = x.astype("c16") @ x.T.astype("c16")
    tolerance = {"f2": 1e-3, "f4": 1e-5, "f8": 1e-12, "c16": 1e-12}[dtype]
    np.testing.assert_allclose(found, exact, rtol=tolerance, atol=100 * tolerance)
    assert read_nbytes == plan.read_nbytes
    assert_contents(told, plan, (stored, stored))
    files = [path for path in (tmp_path / "c" / "c").rglob("*") if path.is_file()]
    assert stored_nbytes == sum(path.stat().st_size for path in files)
    assert len(files) == 8 * 15


def test_what_is_read_depends_on_the_order_of_tiles(tmp_path: Path, rng: np.random.Generator) -> None:
    """The bytes of a plan are those of its own order; tiles that overtake each other read more, and give the same C."""
    x = rng.standard_normal((M, K))
    stored = zarr.create_array(tmp_path / "x", data=x, chunks=(20, 20))
    c = zarr.create_array(tmp_path / "c", shape=(M, M), chunks=(20, 20), dtype="f8")
    plan = plan_tiles(
        as_stored_matrix(stored),
        as_stored_matrix(stored, transpose=True),
        np.dtype("f8"),
        (20, 20),
        Limits(1, 100_000),
        transpose_b=True,
        symmetric=True,
        keep=Geometry(40, 40, 20, 1, 40, 40),
    )
    plan = replace(plan, read_threads=2, write_threads=1)
    tiles = list(plan.tiles())
    read, found = [], set()
    for name, order in (("planned", tiles), ("swapped", [*tiles[1::2], *tiles[::2]])):
        worker = TileEngine(Product(stored, stored, c, plan, "cpu", "full", name), "here")
        try:
            read.append(sum(worker.multiply(tile).read_nbytes for tile in order))
        finally:
            worker.close()
        found.add(c[...].tobytes())
    assert read[0] == plan.read_nbytes < read[1] <= sum(map(plan.tile_read_nbytes, tiles))
    assert len(found) == 1


def poisoned(size: int, dtype: np.dtype, device: str) -> Any:
    flat = np.full(size, np.nan, dtype)
    if device == "cpu":
        return flat
    from numba import cuda

    return cuda.to_device(flat)


@pytest.mark.sample(2)
@pytest.mark.parametrize("nbytes", [40_000, 75_000, 110_000, 1_000_000])
def test_what_is_read_is_what_the_plan_says(nbytes: int, engine: Any, factors: Any) -> None:
    worker, plan, c = engine(nbytes)
    reports = [worker.multiply(tile) for tile in plan.tiles()]
    np.testing.assert_allclose(c[...], factors[0][...] @ factors[1][...], rtol=1e-12, atol=1e-12)
    assert sum(report.read_nbytes for report in reports) == plan.read_nbytes
    if nbytes == 1_000_000:
        assert plan.read_nbytes == 8 * (M * K + K * N)


def failing_tiles(worker: Any, plan: Any, under_way: Sequence[Any] = ()) -> list[Any]:
    """Those of all tiles, computed in their order, that the disk failed; nothing may be under way behind a failure."""
    failed = []
    for tile in plan.tiles():
        try:
            worker.multiply(tile)
        except OSError:
            failed.append(tile)
            assert not under_way
    return failed


def fail_one_load(patch: pytest.MonkeyPatch, failing: int) -> None:
    """Let the disk fail the load of this number, once, with the panel spoilt."""
    original, calls = HostUnit.load, iter(range(10**6))

    def load(unit: Any, part: Any, panel: Placed) -> Any:
        if next(calls) == failing:
            panel.flat[...] = np.nan
            raise OSError("injected: the disk had a moment")
        return original(unit, part, panel)

    patch.setattr(HostUnit, "load", load)


@pytest.mark.sample(2)
@pytest.mark.parametrize("nbytes", [75_000, 1_000_000])
@pytest.mark.parametrize("failing", range(0, 40, 7))
def test_a_panel_that_could_not_be_read_is_read_again(
    failing: int, nbytes: int, engine: Any, factors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, plan, c = engine(nbytes)
    fail_one_load(monkeypatch, failing)
    (failed,) = failing_tiles(worker, plan)
    worker.multiply(failed)
    np.testing.assert_allclose(c[...], factors[0][...] @ factors[1][...], rtol=1e-12, atol=1e-12)


@pytest.mark.sample(2)
@pytest.mark.parametrize("failing", range(1, 40, 7))
def test_what_is_under_way_to_a_panel_that_failed_does_not_reach_the_next(
    failing: int, engine: Any, factors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of several lanes arrive in any order until they are waited for: here the first to be sent last."""
    worker, plan, c = engine(75_000)
    calls, under_way, lock = iter(range(10**6)), [], threading.Lock()

    def load(unit: Any, part: Any, panel: Placed) -> Any:
        if next(calls) == failing:
            raise OSError("injected: the disk had a moment")
        data = np.empty(part.shape, panel.dtype)
        part.read(data)
        with lock:
            under_way.append((data, panel.cut(*part.target)))
        return Move(0.0, 0.0)

    def settle(unit: Any) -> None:
        while under_way:
            data, place = under_way.pop()
            place[...] = data

    monkeypatch.setattr(HostUnit, "load", load)
    monkeypatch.setattr(HostUnit, "settle", settle)
    (failed,) = failing_tiles(worker, plan, under_way)
    worker.multiply(failed)
    np.testing.assert_allclose(c[...], factors[0][...] @ factors[1][...], rtol=1e-12, atol=1e-12)


class Gate:
    """Calls that wait for one another until so many have come; after a while they go on, and have not ``met``."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)
        self.met = False

    def arrive(self) -> None:
        with suppress(threading.BrokenBarrierError):
            self._barrier.wait(5)
            self.met = True


def in_parallel(worker: TileEngine, plan: MatmulPlan) -> list[Any]:
    with ThreadPoolExecutor(plan.tile_count) as pool:
        return [future.result() for future in [pool.submit(worker.multiply, tile) for tile in plan.tiles()]]


def test_the_next_panel_is_begun_while_one_is_still_coming(
    engine: Any, factors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, plan, c = engine(1_000_000)
    original, gate, lock, first = HostUnit.load, Gate(2), threading.Lock(), []

    def load(unit: Any, part: Any, panel: Placed) -> Any:
        # One part of the first panel of A that is read, and one of the second, must meet.
        if panel.shape[1] == 20:
            key = panel.flat.ctypes.data
            with lock:
                new = key not in first and len(first) < 2
                first.extend([key] * new)
            if new:
                gate.arrive()
        return original(unit, part, panel)

    monkeypatch.setattr(HostUnit, "load", load)
    in_parallel(worker, plan)
    assert gate.met
    np.testing.assert_allclose(c[...], factors[0][...] @ factors[1][...], rtol=1e-12, atol=1e-12)


def test_kernels_are_made_ready_while_the_first_panels_are_read(
    engine: Any, factors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling takes seconds. So reading here goes on only when preparing has begun, and that ends last."""
    worker, plan, c = engine(75_000)
    order: list[str] = []
    preparing, loaded = threading.Event(), threading.Event()
    original_load, original_multiply = HostUnit.load, HostUnit.multiply

    def prepare(unit: Any, a: Placed, b: Placed, tile: Placed, *rest: Any) -> None:
        assert (a.shape[0], b.shape[1]) == tile.shape
        preparing.set()
        order.append("prepared" if loaded.wait(30) else "nothing was read meanwhile")

    def load(unit: Any, part: Any, panel: Placed) -> Any:
        if not preparing.wait(30):
            order.append("read before preparing")
        loaded.set()
        return original_load(unit, part, panel)

    def multiply(unit: Any, *panels: Any, **options: Any) -> Any:
        order.append("multiplied")
        return original_multiply(unit, *panels, **options)

    for name, stand_in in (("prepare", prepare), ("load", load), ("multiply", multiply)):
        monkeypatch.setattr(HostUnit, name, stand_in)
    in_parallel(worker, plan)
    assert order[0] == "prepared"
    assert set(order[1:]) == {"multiplied"}, "once is enough"
    np.testing.assert_allclose(c[...], factors[0][...] @ factors[1][...], rtol=1e-12, atol=1e-12)


def test_kernels_that_cannot_be_made_ready_fail_the_first_tile_alone(
    engine: Any, factors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(unit: Any, a: Placed, b: Placed, tile: Placed, *rest: Any) -> None:
        raise OSError("injected: the compiler is missing")

    monkeypatch.setattr(HostUnit, "prepare", prepare)
    worker, plan, c = engine(75_000)
    first, *others = plan.tiles()
    with pytest.raises(OSError, match="the compiler is missing"):
        worker.multiply(first)
    assert (c[first.region] == 7).all(), "not written"
    for tile in (*others, first):
        worker.multiply(tile)
    np.testing.assert_allclose(c[...], factors[0][...] @ factors[1][...], rtol=1e-12, atol=1e-12)


@pytest.mark.sample(3)
@pytest.mark.parametrize("depth", [20, K])
@pytest.mark.parametrize("failing", range(0, 40, 5))
def test_whoever_waits_for_a_panel_that_failed_reads_it_again(
    failing: int, depth: int, engine: Any, factors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tiles under way: one fails, and none of the others takes what it was to have read."""
    worker, plan, c = engine(1_000_000, depth)
    fail_one_load(monkeypatch, failing)
    tiles = list(plan.tiles())
    with ThreadPoolExecutor(len(tiles)) as pool:
        under_way = [pool.submit(worker.multiply, tile) for tile in tiles]
        failed = [tile for tile, future in zip(tiles, under_way, strict=True) if future.exception()]
    (tile,) = failed
    worker.multiply(tile)
    np.testing.assert_allclose(c[...], factors[0][...] @ factors[1][...], rtol=1e-12, atol=1e-12)


def test_several_tiles_are_written_at_once(
    engine: Any, factors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, plan, c = engine(1_000_000)
    assert plan.c_buffers == 4
    worker = TileEngine(replace(other.product, plan=replace(plan, write_threads=8), run="writing"), "here")
    original, gate, lock, seen = HostUnit.save, Gate(3), threading.Lock(), []

    def save(unit: Any, piece: Any, tile: Placed, *how: Any) -> Any:
        place = tile.flat.ctypes.data
        with lock:
            new = place not in seen and len(seen) < 3
            seen.extend([place] * new)
        if new:
            gate.arrive()
        return original(unit, piece, tile, *how)

    monkeypatch.setattr(HostUnit, "save", save)
    try:
        reports = in_parallel(worker, plan)
    finally:
        worker.close()
    assert gate.met
    assert {report.index for report in reports} == set(range(plan.tile_count))
    np.testing.assert_allclose(c[...], factors[0][...] @ factors[1][...], rtol=1e-12, atol=1e-12)


def test_time_that_two_spend_together_counts_once() -> None:
    assert covered([(5.0, 6.0), (0.0, 7.0), (8.0, 9.0), (8.5, 10.0)]) == 9.0
    assert covered([]) == 0.0


def test_more_buffers_than_a_plan_needs_change_nothing(engine: Any, factors: Any) -> None:
    worker, plan, c = engine(75_000)
    more = replace(plan, a_buffers=100, b_buffers=100)
    other = TileEngine(replace(worker.product, plan=more, run="more"), "here")
    try:
        read = sum(other.multiply(tile).read_nbytes for tile in more.tiles())
    finally:
        other.close()
    assert read == 8 * (M * K + K * N)
    np.testing.assert_allclose(c[...], factors[0][...] @ factors[1][...], rtol=1e-12, atol=1e-12)


class Queue:
    """Lets panels be multiplied as a GPU's stream does: in order, some time after they were enqueued."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.last: Any = None
        self.failing: set[int] = set()
        self.waiting = self.most_waiting = 0
        self._calls = iter(range(10**6))
        original = HostUnit.multiply

        def work(number: int, *args: Any, **options: Any) -> None:
            time.sleep(0.005)
            self.waiting -= 1
            if number in self.failing:
                raise OSError("injected: the GPU fell off the bus")
            original(*args, **options)

        def multiply(*args: Any, **options: Any) -> frozenset[str]:
            self.waiting += 1
            self.most_waiting = max(self.most_waiting, self.waiting)
            self.last = self.pool.submit(work, next(self._calls), *args, **options)
            return frozenset(["later"])

        patch.setattr(HostUnit, "multiply", multiply)
        patch.setattr(HostUnit, "passed", lambda unit: self.last.result)


@pytest.mark.parametrize(
    ("module", "failing"),
    [
        (load_stage, "as_stored_matrix"),
        (load_stage, "PanelCache"),
        (load_stage, "ThreadPoolExecutor"),
        (write_stage, "ThreadPoolExecutor"),
        (stream, "pool_of"),
    ],
)
def test_an_engine_that_cannot_be_made_leaves_no_unit(
    module: ModuleType, failing: str, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = engine(10**6)[0].product
    closed = []
    monkeypatch.setattr(HostUnit, "close", lambda unit: closed.append(unit))

    def fail(*args: Any, **options: Any) -> None:
        raise OSError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(module, failing, fail)
        with pytest.raises(OSError, match="injected"):
            TileEngine(product, "here")
    assert len(closed) == 1, "its pinned lanes serve the next attempt"


@pytest.mark.parametrize("started", [0, 1, 2, 3])
def test_an_engine_that_gets_too_few_threads_leaves_none(
    started: int, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = engine(10**6)[0].product
    assert product.plan.c_buffers == 4
    closed = []
    monkeypatch.setattr(HostUnit, "close", lambda unit: closed.append(unit))
    before = set(threading.enumerate())
    original, left = threading.Thread.start, iter(range(started))

    def start(thread: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        original(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            TileEngine(product, "here")
    assert len(closed) == 1, "its pinned lanes serve the next attempt"
    assert set(threading.enumerate()) <= before


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    queue = Queue(monkeypatch)
    yield queue
    queue.pool.shutdown()


@pytest.mark.sample(1)
@pytest.mark.parametrize("nbytes", [40_000, 75_000, 110_000, 1_000_000])
def test_panels_and_tiles_are_let_go_of_when_the_gpu_is_done_with_them(
    nbytes: int, engine: Any, factors: Any, queued: Queue
) -> None:
    worker, plan, c = engine(nbytes)
    with ThreadPoolExecutor(3) as pool:
        reports = list(pool.map(worker.multiply, plan.tiles()))
    np.testing.assert_allclose(c[...], factors[0][...] @ factors[1][...], rtol=1e-12, atol=1e-12)
    assert queued.most_waiting <= 2, "one is multiplied, and the next waits"
    if nbytes == 1_000_000:  # nothing to read for the tiles at the end
        assert queued.most_waiting == 2
    spans = sorted(
        (span.begin, span.end) for report in reports for span in report.spans if span.stage == "compute"
    )
    assert len(spans) == len(reports) * plan.panel_count + 1, "the first prepares"
    assert all(end <= begin + 1e-3 for (_, end), (begin, _) in pairwise(spans)), "no time counts twice"


@pytest.mark.sample(2)
@pytest.mark.parametrize("nbytes", [40_000, 110_000])
@pytest.mark.parametrize("abandon", [True, False])
@pytest.mark.parametrize("delay", [0.0, 0.03, 0.08])
def test_an_engine_that_is_closed_while_the_gpu_multiplies(
    nbytes: int, abandon: bool, delay: float, engine: Any, factors: Any, queued: Queue
) -> None:
    worker, plan, c = engine(nbytes)
    product = factors[0][...] @ factors[1][...]

    def multiply(tile: Tile) -> bool:
        try:
            worker.multiply(tile)
        except CancelledError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        tiles = list(plan.tiles())
        under_way = [pool.submit(multiply, tile) for tile in tiles]
        time.sleep(delay)
        worker.close(abandon=abandon)
        done = [one.result(20) for one in under_way]
    for tile, finished in zip(tiles, done, strict=True):
        place = tile.region
        np.testing.assert_allclose(c[place], product[place] if finished else 7, rtol=1e-12, atol=1e-12)


def failing_at_once(worker: TileEngine, plan: MatmulPlan, under_way: int) -> list[Tile]:
    """Those of all tiles, so many of them under way at once, that failed."""

    def fails(tile: Tile) -> bool:
        try:
            worker.multiply(tile)
        except OSError:
            return True
        return False

    tiles = list(plan.tiles())
    with ThreadPoolExecutor(under_way) as pool:
        return [tile for tile, failed in zip(tiles, pool.map(fails, tiles), strict=True) if failed]


def test_one_place_for_tiles_and_faults(
    engine: Any, factors: Any, queued: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = units.tile_slots
    monkeypatch.setattr(units, "tile_slots", lambda plan, allocate: slots(plan, allocate)[:1])
    queued.failing |= {3, 11}
    worker, plan, c = engine(1_000_000)
    failed = failing_at_once(worker, plan, 8)
    assert len(failed) == 2
    for tile in failed:
        worker.multiply(tile)
    np.testing.assert_allclose(c[...], factors[0][...] @ factors[1][...], rtol=1e-12, atol=1e-12)
    assert worker.slots.qsize() == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("failing", [0, 4, 7, 9])
def test_a_product_that_fails_on_the_gpu_fails_its_tile_alone(
    failing: int, engine: Any, factors: Any, queued: Queue
) -> None:
    worker, plan, c = engine(110_000)
    queued.failing.add(failing)
    failed = failing_at_once(worker, plan, 3)
    (tile,) = failed
    assert (c[tile.row_start : tile.row_stop, tile.column_start : tile.column_stop] == 7).all(), "not written"
    worker.multiply(tile)
    np.testing.assert_allclose(c[...], factors[0][...] @ factors[1][...], rtol=1e-12, atol=1e-12)


class FakeWorker(SimpleNamespace):
    __hash__ = object.__hash__


def test_a_worker_on_the_cpu_starts_the_compiler_when_it_is_surveyed(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr("tilewright.pipeline.worker.survey.start_compiler", lambda: started.append(True))
    worker = FakeWorker(
        contact_address="here",
        metrics={},
        memory_manager=SimpleNamespace(memory_limit=2**30, memory_pause_fraction=0.75),
        state=SimpleNamespace(nthreads=3),
    )
    loops: tuple[DeviceKind, ...]
    for loops in ((), ("cuda",), ("cuda", "cpu")):
        facts = asyncio.run(worker_facts("cpu", loops, False, worker))
        assert isinstance(facts, WorkerFacts)
        assert (facts.device, facts.host_limit_nbytes) == ("cpu", 2**30)
        assert (facts.pause_nbytes, facts.threads) == (3 * 2**28, 3)
    assert started == [True]


@pytest.mark.gpu
def test_a_worker_on_a_gpu_starts_the_compiler_when_it_is_surveyed(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr("tilewright.pipeline.worker.survey.start_compiler", lambda: started.append(True))
    monkeypatch.setattr("tilewright.pipeline.worker.peers.answer_peers", lambda *of_a_worker: None)
    worker = FakeWorker(
        contact_address="here",
        metrics={},
        memory_manager=SimpleNamespace(memory_limit=2**30, memory_pause_fraction=0.8),
        state=SimpleNamespace(nthreads=1),
    )
    loops: tuple[DeviceKind, ...]
    for loops in ((), ("cpu",), ("cuda", "cpu")):
        facts = asyncio.run(worker_facts("cuda", loops, False, worker))
        assert isinstance(facts, WorkerFacts)
        assert facts.device == "cuda"
    assert started == [True]
