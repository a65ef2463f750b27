"""What the tests of a product share beside the clusters."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tilewright.pipeline.worker import stream


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Counts how often each tile was tried."""
    counts: dict[int, int] = {}
    original = stream.TileEngine.multiply

    def counting(engine: stream.TileEngine, tile: Any, **more: Any) -> Any:
        counts[tile.index] = counts.get(tile.index, 0) + 1
        return original(engine, tile, **more)

    monkeypatch.setattr(stream.TileEngine, "multiply", counting)
    return counts


@pytest.fixture
def worker_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What Dask's workers report; their logger keeps it from pytest, and we what tasks of ours fail with."""
    monkeypatch.setattr(logging.getLogger("distributed.worker"), "handlers", [caplog.handler])
    monkeypatch.setattr(logging.getLogger("distributed.worker"), "filters", [])
    return caplog
