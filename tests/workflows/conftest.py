"""What the workflow tests share: among others the clusters, with those of the pipeline."""

from __future__ import annotations

import pytest

from tests.pipeline.conftest import client, processes
from tilewright.pipeline.events import Event
from tilewright.pipeline.plan import tiling

__all__ = ["client", "processes"]


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs in pieces of at most 1 KiB, so that a small product has many tiles and can be stopped in between."""
    monkeypatch.setattr(tiling, "LEAST_CHUNK_NBYTES", 1)
    monkeypatch.setattr(tiling, "SMALL_CHUNK_NBYTES", 1)
    monkeypatch.setattr(tiling, "MOST_CHUNK_NBYTES", 1024)
