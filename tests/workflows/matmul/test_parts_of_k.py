"""A small C, summed over parts of k: in order, tried again, gone on with."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client, LocalCluster

import tilewright as tw
from tests.workflows.products import (
    assert_product,
    intercept_writes,
    numbers,
    put,
    stop_before_the_check,
)
from tilewright.pipeline.errors import (
    DamagedError,
    StoreError,
)
from tilewright.pipeline.events import Event, UnitDone
from tilewright.pipeline.plan import product
from tilewright.pipeline.plan.told import Product
from tilewright.pipeline.worker import engines, stream, tasks


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "dtype", "memory", "tiles"),
    [
        ("two", "f4", 400_000, 1),
        ("two", "f4", 40_000, 5),
        ("two", "i8", 400_000, 1),
        ("two", "f2", 40_000, 3),
        ("gram", "f4", 80_000, 6),
        ("gram", "f2", 400_000, 1),
        ("gram", "c16", 400_000, 1),
        ("mean", "f4", 400_000, 1),
        ("mean", "c16", 400_000, 6),
    ],
)
def test_a_cpu_alone_sums_all_parts_in_one_task_to_the_same_bits(
    kind: str,
    dtype: str,
    memory: int,
    tiles: int,
    tmp_path: Path,
    rng: np.random.Generator,
    cut_k: None,
    clusters: dict[int, Client],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two factors, and of one array by its own transpose, without and with transforms and an epilogue."""
    x = put(tmp_path / "x", numbers(rng, (3000, 90), dtype), (50, 20))
    y = put(tmp_path / "y", numbers(rng, (3000, 50), dtype), (50, 20))

    def compute(workers: int, name: str) -> tuple[Any, bytes]:
        out = tmp_path / name
        options: dict[str, Any] = {"cluster": clusters[workers], "device": "cpu", "device_memory": memory}
        if kind == "mean":
            run = tw.gram(x, out, center=True, divide="n", **options)
        else:
            run = tw.matmul(x, x if kind == "gram" else y, out, transpose_a=True, **options)
        return run.plan, zarr.open_array(out)[...].tobytes()

    plan, found = compute(1, "in turn")
    assert (plan.tile_count, plan.symmetric, plan.k_tasks) == (tiles, kind != "two", 1)
    assert plan.k_parts > 2
    shared, by_two = compute(2, "by two")
    assert shared.k_tasks == shared.k_parts == plan.k_parts
    monkeypatch.setattr(product, "k_tasks", lambda k_parts, workers, *, on_host: k_parts)
    alone, as_tasks = compute(1, "as tasks")
    assert (alone.k_tasks, alone.geometry) == (plan.k_parts, plan.geometry)
    assert found == by_two == as_tasks


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["f4", "i8", "f2", "c16"])
def test_a_small_c_is_summed_over_parts_of_k_in_order(
    dtype: str,
    tmp_path: Path,
    rng: np.random.Generator,
    split_k: None,
    monkeypatch: pytest.MonkeyPatch,
    events: list[Event],
) -> None:
    """In whatever order the parts come: the first first, the last first, and as it happens."""
    a, b = numbers(rng, (20, 3000), dtype), numbers(rng, (3000, 30), dtype)
    paths = put(tmp_path / "a", a, (20, 50)), put(tmp_path / "b", b, (50, 30))
    plan = tw.plan_matmul(*paths, device="cpu", device_memory=400_000)
    assert plan.k_parts > 2
    turn, came, sums = threading.Condition(), list[int](), dict[int, np.ndarray]()
    multiply = stream.TileEngine.multiply

    def in_turn(engine: stream.TileEngine, tile: Any, part: int, wanted: list[int], **more: Any) -> Any:
        report = multiply(engine, tile, part, **more)
        assert report.partial is not None
        with turn:
            if wanted:
                assert turn.wait_for(lambda: wanted[len(came)] == part, 60)
            came.append(part)
            sums[part] = report.partial.copy()
            turn.notify_all()
        return report

    results = set()
    orders = [list(range(plan.k_parts)), list(range(plan.k_parts))[::-1], []]
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=plan.k_parts, processes=False, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as own,
    ):
        for number, wanted in enumerate(orders):
            came.clear()
            monkeypatch.setattr(stream.TileEngine, "multiply", partialmethod(in_turn, wanted=wanted))
            run = tw.matmul(
                *paths,
                tmp_path / f"c{number}",
                cluster=own,
                device="cpu",
                device_memory=400_000,
                listener=events.append,
            )
            assert run.plan.geometry == plan.geometry
            assert run.plan.read_nbytes == a.nbytes + b.nbytes
            assert came == (wanted or came)
            c = zarr.open_array(tmp_path / f"c{number}")[...]
            assert_product(c, a, b)
            results.add(c.tobytes())
    in_order, backwards = (
        functools.reduce(np.add, [sums[part] for part in order]).astype(c.dtype) for order in orders[:2]
    )
    assert results == {in_order.tobytes()}
    # Of float16 the sums are float32: rounded, they hardly differ.
    assert dtype in ("i8", "f2") or in_order.tobytes() != backwards.tobytes()
    done = [event for event in events if isinstance(event, UnitDone) and event.name == "matmul"]
    assert len(done) == len(orders), "one tile a run, however many parts it has"


def test_a_failing_part_of_k_ends_the_run(
    client: Client,
    tmp_path: Path,
    rng: np.random.Generator,
    split_k: None,
    worker_log: pytest.LogCaptureFixture,
) -> None:
    a = numbers(rng, (20, 3000), "f4")
    path = put(tmp_path / "a", a, (20, 50), compressors=None)
    victim = tmp_path / "a" / "c" / "0" / "40"
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(DamagedError, match=r"chunk \(0, 40\)"):
        tw.matmul(
            path, path, tmp_path / "c", transpose_b=True, cluster=client, device="cpu", device_memory=400_000
        )
    assert "Compute Failed" not in worker_log.text, "it came back through the sum that needs it"
    assert not (tmp_path / "c").exists()
    assert engines._engines == {}


@pytest.fixture
def cut_along_k(
    tmp_path: Path, rng: np.random.Generator, split_k: None
) -> tuple[np.ndarray, Path, dict[str, Any]]:
    """A, its path and the options of a product A Aᵀ whose only tile is summed over many parts of k."""
    a = numbers(rng, (20, 3000), "f4")
    path = put(tmp_path / "a", a, (20, 50), compressors=None)
    return a, path, {"transpose_b": True, "device": "cpu", "device_memory": 400_000}


@pytest.mark.sample(1)
@pytest.mark.parametrize("failing", ["part", "sum"])
def test_a_failing_part_or_sum_of_parts_is_tried_again_to_the_same_bits(
    failing: str,
    cut_along_k: tuple[np.ndarray, Path, dict[str, Any]],
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parts are kept until the sum is stored: a second sum begins with what the first began with."""
    a, path, options = cut_along_k
    undisturbed = tw.matmul(path, path, tmp_path / "c", cluster=client, **options)
    multiply, store_sum = stream.TileEngine.multiply, engines.store_sum
    tries: Counter[str] = Counter()

    def counted(engine: stream.TileEngine, tile: Any, part: int, **more: Any) -> Any:
        tries[f"part {part}"] += 1
        if failing == "part" and tries["part 1"] == part == 1:
            raise StoreError("injected: the disk had a moment")
        return multiply(engine, tile, part, **more)

    def counted_sum(of: Product, tile: Any, parts: Any) -> int:
        tries["sum"] += 1
        return store_sum(of, tile, parts)

    def failing_write(top: int, left: int, data: np.ndarray) -> np.ndarray:
        if failing == "sum" and tries["sum"] == 1:
            raise StoreError("injected: the disk had a moment")
        return data

    monkeypatch.setattr(stream.TileEngine, "multiply", counted)
    monkeypatch.setattr(tasks, "store_sum", counted_sum)
    intercept_writes(monkeypatch, failing_write)
    run = tw.matmul(path, path, tmp_path / "d", cluster=client, **options)
    assert run.plan.k_parts == undisturbed.plan.k_parts > 1
    again = "part 1" if failing == "part" else "sum"
    assert tries == {again: 2} | {
        name: 1 for name in ("sum", *(f"part {part}" for part in range(run.plan.k_parts))) if name != again
    }
    found = zarr.open_array(tmp_path / "d")[...]
    assert_product(found, a, a.T)
    assert found.tobytes() == zarr.open_array(tmp_path / "c")[...].tobytes()


def test_a_finished_sum_of_parts_is_kept_by_a_run_that_goes_on(
    cut_along_k: tuple[np.ndarray, Path, dict[str, Any]],
    client: Client,
    tmp_path: Path,
    events: list[Event],
) -> None:
    """By its stored bytes: they are recorded with it as with any tile."""
    a, path, options = cut_along_k
    stop_before_the_check(path, path, tmp_path / "c", cluster=client, **options)
    run = tw.matmul(path, path, tmp_path / "c", cluster=client, listener=events.append, **options)
    assert run.plan.k_parts > 1
    assert run.resumed == run.plan.tile_count == 1
    assert not any(isinstance(event, UnitDone) and event.name == "matmul" for event in events)
    assert_product(zarr.open_array(tmp_path / "c")[...], a, a.T)


def test_parts_of_k_keep_the_spans_of_who_computed_them(
    client: Client,
    tmp_path: Path,
    rng: np.random.Generator,
    split_k: None,
    events: list[Event],
) -> None:
    a = numbers(rng, (20, 3000), "f4")
    path = put(tmp_path / "a", a, (20, 50))
    run = tw.matmul(
        path, path, tmp_path / "c", transpose_b=True, cluster=client, device="cpu", device_memory=400_000,
        listener=events.append,
    )  # fmt: skip
    assert run.plan.k_parts > 1
    (done,) = [event for event in events if isinstance(event, UnitDone) and event.name == "matmul"]
    names = [span.stage for span in done.spans]
    assert names.count("load") == names.count("compute") - 1 == run.plan.panel_count
    assert names.count("write") == run.plan.k_parts + 1, "each part's sum, and the tile"
