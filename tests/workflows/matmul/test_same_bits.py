"""The same bits whatever the tiles, the panels, the workers and the memory are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client, LocalCluster

import tilewright as tw
from tests.workflows.products import (
    TIGHT,
    assert_product,
    numbers,
    order_by_sides,
    put,
)
from tilewright.pipeline.worker import units

KERNELS = pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(order_by_sides, id="order by sides"),
        pytest.param(units.matmul, id="BLAS", marks=pytest.mark.slow),  # which need not have such an order
    ],
)


@KERNELS
def test_tiles_panels_and_workers_do_not_change_a_bit(
    kernel: Callable[..., Any],
    tmp_path: Path,
    rng: np.random.Generator,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the same tiles for any number of workers; with others for some; with others for each of 1, 2 and 4."""
    monkeypatch.setattr(units, "matmul", kernel)
    products = []
    for (m, k, n), chunk, memory, grids, least in [
        ((96, 80, 64), 16, TIGHT, 1, 4),
        ((96, 48, 80), 8, 12_000, 2, 6),
        ((96, 80, 64), 16, 60_000, 3, 1),
    ]:
        a, b = (numbers(rng, shape, "f4") for shape in ((m, k), (k, n)))
        paths = [
            put(tmp_path / f"{name}{grids}", data, (chunk, chunk)) for name, data in (("a", a), ("b", b))
        ]
        plans = [
            tw.plan_matmul(*paths, device="cpu", device_memory=memory, workers=workers)
            for workers in (1, 2, 4)
        ]
        assert len({plan.grid for plan in plans}) >= grids
        assert min(plan.tile_count for plan in plans) >= least
        assert min(plan.panel_count for plan in plans) > 1
        cells = {(plan.cell_rows, plan.cell_columns) for plan in plans}
        assert len(cells) == 1
        if grids > 1:
            assert (plans[0].tile_rows, plans[0].tile_columns) not in cells
        products.append((grids, a, b, paths, memory))
    results: dict[int, set[bytes]] = {}
    for workers in (1, 2, 4):
        with (
            LocalCluster(n_workers=workers, processes=False, dashboard_address=":0") as cluster,
            Client(cluster) as own,
        ):
            for grids, a, b, paths, memory in products:
                out = tmp_path / f"c{workers}{grids}"
                run = tw.matmul(*paths, out, cluster=own, device="cpu", device_memory=memory, verify=False)
                assert run.plan.workers == workers
                c = zarr.open_array(out)[...]
                assert_product(c, a, b)
                results.setdefault(grids, set()).add(c.tobytes())
    assert {grids: len(found) for grids, found in results.items()} == {1: 1, 2: 1, 3: 1}


@pytest.mark.more
@KERNELS
def test_memory_that_gives_the_same_panels_does_not_change_a_bit(
    kernel: Callable[..., Any],
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the same cells, where tiles are made of them: then other tiles do not matter."""
    monkeypatch.setattr(units, "matmul", kernel)
    a, b, *paths = factors
    alike: dict[tuple[int, ...], dict[tuple[int, int], int]] = {}
    for memory in (12_000, 16_000, 24_000, 32_000, 60_000):
        plan = tw.plan_matmul(*paths, device="cpu", device_memory=memory)
        same = plan.panel_depth, plan.k_parts, plan.cell_rows, plan.cell_columns
        alike.setdefault(same, {})[plan.grid] = memory
    memories = max(alike.values(), key=len)
    assert len(memories) >= 2, "the memory should change the tiles, and nothing else"
    results = set()
    for grid, memory in memories.items():
        run = tw.matmul(*paths, tmp_path / f"c{memory}", cluster=client, device="cpu", device_memory=memory)
        assert run.plan.grid == grid
        c = zarr.open_array(tmp_path / f"c{memory}")[...]
        assert_product(c, a, b)
        results.add(c.tobytes())
    assert len(results) == 1
