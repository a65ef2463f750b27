"""What the workflow tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from distributed import Client, LocalCluster

from tests.workflows.products import numbers, put
from tilewright.pipeline.events import Event
from tilewright.pipeline.plan import product, tiling


@pytest.fixture(scope="module")
def clusters() -> Iterator[dict[int, Client]]:
    """Workers in this process: 1 to 3 of them, a cluster for each number."""
    with ExitStack() as stack:
        found: dict[int, Client] = {}
        for workers in (1, 2, 3):
            cluster = LocalCluster(n_workers=workers, processes=False, dashboard_address=":0")
            found[workers] = stack.enter_context(Client(stack.enter_context(cluster)))
        yield found


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def factors(tmp_path: Path, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, Path, Path]:
    a, b = numbers(rng, (96, 80), "f4"), numbers(rng, (80, 64), "f4")
    return a, b, put(tmp_path / "a.zarr", a), put(tmp_path / "b.zarr", b)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs in pieces of at most 1 KiB, so that a small product has many tiles and can be stopped in between."""
    monkeypatch.setattr(tiling, "LEAST_CHUNK_NBYTES", 1)
    monkeypatch.setattr(tiling, "SMALL_CHUNK_NBYTES", 1)
    monkeypatch.setattr(tiling, "MOST_CHUNK_NBYTES", 1024)


@pytest.fixture
def cut_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """A C of a few KiB is summed over parts of k, as one too small for its workers is."""
    monkeypatch.setattr(tiling, "SPLIT_NBYTES", 1000)
    monkeypatch.setattr(tiling, "TILE_OPERATIONS", 1000)


@pytest.fixture
def split_k(cut_k: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts are tasks of their own on a single worker too, as they are on several."""
    monkeypatch.setattr(product, "k_tasks", lambda k_parts, workers, *, on_host: k_parts)
