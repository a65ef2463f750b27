"""The engines of a process: which of them are freed or ended, and what is written when one is."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.pipeline.test_stream import engine, factors
from tilewright.pipeline import engines
from tilewright.pipeline.engines import store_sum
from tilewright.pipeline.region_write import RegionWrite
from tilewright.pipeline.store import place_of
from tilewright.pipeline.stream import Engine

__all__ = ["engine", "factors"]


def test_an_engine_that_is_being_made_is_not_idle(
    engine: Any, factors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run looks at this worker meanwhile, and frees what nobody uses."""
    product = engine(10**6)[0]._product
    monkeypatch.setattr(engines, "_engines", {})
    making, go_on = threading.Event(), threading.Event()
    original = Engine.__init__

    def slowly(self: Engine, *arguments: Any) -> None:
        original(self, *arguments)
        making.set()
        assert go_on.wait(10)

    monkeypatch.setattr(Engine, "__init__", slowly)
    with ThreadPoolExecutor(2) as pool:
        made = pool.submit(engines.engine_for, product, "here")
        assert making.wait(10)
        freed = pool.submit(engines.close_idle_engines)
        go_on.set()
        freed.result()
        worker = made.result()
    try:
        for tile in product.plan.tiles():
            worker.multiply(tile)
        np.testing.assert_allclose(product.c[...], factors[0][...] @ factors[1][...], rtol=1e-12, atol=1e-12)
        engines.close_idle_engines()
        assert not engines._engines
    finally:
        worker.close()


def test_an_array_is_the_same_by_any_name(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engines, "_engines", {})
    for place in ("c0", f"{tmp_path}/link/c1", f"{tmp_path}/c2"):
        product = engine(10**6)[0]._product
        engines.engine_for(product, "here")
        engines.close_engines_writing(place, product.run)
        assert product.run in engines._engines, "its own run goes on"
        engines.close_engines_writing(f"{place}0", "another")
        assert product.run in engines._engines, "it writes elsewhere"
        engines.close_engines_writing(place, "another")
        assert not engines._engines


@pytest.mark.parametrize("by", ["its run", "the next run of the same array"])
def test_no_sum_is_written_once_its_run_has_ended(
    by: str, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The piece under way is waited for, those behind it are left out, and no later sum begins."""
    monkeypatch.setattr(engines, "_ended", deque())
    product = engine(10**6)[0]._product
    tile = next(iter(product.plan.tiles()))
    parts = [np.ones((tile.rows, tile.columns))]
    before = product.c[...]
    begun, go_on = threading.Event(), threading.Event()
    write = RegionWrite.write

    def slowly(piece: RegionWrite, rounded: Any) -> None:
        begun.set()
        assert go_on.wait(10)
        write(piece, rounded)

    monkeypatch.setattr(RegionWrite, "write", slowly)
    with ThreadPoolExecutor(2) as pool:
        storing = pool.submit(store_sum, product, tile, parts)
        assert begun.wait(10)
        if by == "its run":
            ended = pool.submit(engines.close_engine, product.run, abandon=True)
        else:
            ended = pool.submit(engines.close_engines_writing, place_of(product.c), "another")
        with pytest.raises(TimeoutError):
            ended.result(0.2)
        go_on.set()
        ended.result(10)
        assert storing.exception(10) is None or isinstance(storing.exception(), CancelledError)
    assert not engines._sums
    after = product.c[...]
    written = int((after != before).sum())
    assert 0 < written < tile.rows * tile.columns, "the first piece, and no other"
    with pytest.raises(CancelledError):
        store_sum(product, tile, parts)
    np.testing.assert_array_equal(product.c[...], after)
