"""What the workflow tests share: among others the clusters, with those of the pipeline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.pipeline.conftest import client, processes
from tests.workflows.products import numbers, put
from tilewright.pipeline.events import Event
from tilewright.pipeline.plan import tiling

__all__ = ["client", "processes"]


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
def split_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """A C of a few KiB is summed over parts of k, as one too small for its workers is."""
    monkeypatch.setattr(tiling, "SPLIT_NBYTES", 1000)
    monkeypatch.setattr(tiling, "TILE_OPERATIONS", 1000)
