"""Regions on their way to their places: nothing is on its way any more when whoever waits for it hears of an error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as futures_wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tilewright.pipeline.plan.band import Band
from tilewright.pipeline.plan.inputs import Geometry, Limits, Sharers
from tilewright.pipeline.plan.product import plan_tiles
from tilewright.pipeline.plan.told import Product
from tilewright.pipeline.store.arrays import as_stored_matrix
from tilewright.pipeline.worker.load_stage import LoadsUnderWay
from tilewright.pipeline.worker.stream import TileEngine
from tilewright.pipeline.worker.tile_job import TileJob
from tilewright.pipeline.worker.units import Loading


def test_one_that_cannot_be_waited_for_does_not_keep_the_others_from_it() -> None:
    """The places of all of them go to other panels."""
    settled: list[str] = []

    def settle(name: str, fails: bool) -> Callable[[], None]:
        def call() -> None:
            settled.append(name)
            if fails:
                raise RuntimeError(f"injected: {name}'s copies failed")

        return call

    loadings = [Loading([], settle=settle(name, fails)) for name, fails in (("a", True), ("b", False))]
    for order in (loadings, loadings[::-1]):
        settled.clear()
        with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="a's copies"):
            LoadsUnderWay(pool, order).finish()
        assert sorted(settled) == ["a", "b"]
    both = [Loading([], settle=settle(name, True)) for name in "ab"]
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="a's copies"):
        LoadsUnderWay(pool, both).finish()


def test_a_pair_is_begun_only_where_both_its_panels_have_a_place(
    tmp_path: Path,
) -> None:
    """Of a band's one cache a panel may lie in the only place that is free for the other: the thread that loads would
    wait for a pair that it alone can hand on."""
    x = zarr.create_array(tmp_path / "x", shape=(200, 20), chunks=(20, 20), dtype="f8")
    x[...] = np.arange(4000.0).reshape(200, 20)
    c = zarr.create_array(tmp_path / "c", shape=(200, 200), chunks=(20, 20), dtype="f8")
    plan = plan_tiles(
        as_stored_matrix(x),
        as_stored_matrix(x, transpose=True),
        np.dtype("f8"),
        (20, 20),
        Limits(4, 10**6),
        transpose_b=True,
        symmetric=True,
        band=Band(10, 10),
        keep=Geometry(20, 20, 20, 1, 20, 20),
    )
    plan = replace(plan, read_threads=4, write_threads=1)
    assert plan.shares_panels
    assert (plan.panel_count, plan.a_buffers) == (1, 4)
    tiles = {(tile.i, tile.j): tile for tile in plan.tiles()}
    engine = TileEngine(Product(x, x, c, plan, "cpu", "full", "run"), "here")
    engine.multiply(tiles[4, 4])
    loading = engine.unit.loading

    def slow(*arguments: Any) -> Loading:
        found = loading(*arguments)

        def later(call: Callable[[], Any]) -> Callable[[], Any]:
            def read() -> Any:
                time.sleep(0.2)
                return call()

            return read

        return replace(found, calls=[later(call) for call in found.calls])

    engine.unit.loading = slow  # type: ignore[assignment, method-assign]
    # As of tasks that begin together: the loading thread finds all three.
    jobs = [TileJob(tiles[place], 0, Sharers()) for place in ((2, 1), (8, 8), (5, 4))]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1)
    try:
        for job in jobs:
            engine.load.expect(job.tile)
            engine._jobs.put(job)
    finally:
        sys.setswitchinterval(interval)
    done, left = futures_wait([job.done for job in jobs], 60)
    assert not left, "the loading thread waits for itself"
    assert not any(job.exception() for job in done)
    engine.close()
    product = np.asarray(x[40:60]) @ np.asarray(x[20:40]).T
    np.testing.assert_array_equal(c[40:60, 20:40], np.triu(product, 10))
