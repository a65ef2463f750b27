"""The panels that a worker holds, without the engine that takes them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tilewright.pipeline.plan.grid import Tile
from tilewright.pipeline.plan.inputs import Sharers
from tilewright.pipeline.store.content import panel_content
from tilewright.pipeline.worker.panels import PanelCache, ReadContent
from tilewright.pipeline.worker.tile_job import TileJob


def test_the_panel_taken_longest_ago_gives_way() -> None:
    cache = PanelCache(2, list)
    for key, expected in (("x", False), ("y", False), ("x", True), ("z", False), ("x", True), ("y", False)):
        buffer, there = cache.take(key)
        assert there == expected
        cache.let_go(buffer)


def test_a_panel_in_use_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PanelCache(1, list)
    assert cache.ready("x")
    first, _ = cache.take("x")
    assert (cache.ready("x"), cache.ready("y")) == (True, False)
    waiting, taken, wait_for = threading.Event(), threading.Event(), cache._let_go.wait_for

    def told(predicate: Callable[[], bool]) -> bool:
        if not predicate():
            waiting.set()
        return wait_for(predicate)

    monkeypatch.setattr(cache._let_go, "wait_for", told)

    def take() -> None:
        cache.take("y")
        taken.set()

    thread = threading.Thread(target=take)
    thread.start()
    assert waiting.wait(10)
    assert not taken.is_set()
    cache.let_go(first)
    assert taken.wait(10)
    thread.join()


def test_panels_of_a_pair_are_ready_together() -> None:
    """Where one cache has both, one of them may be held in the place that the other would get."""
    cache = PanelCache(3, list)
    held = {key: cache.take(key)[0] for key in "xyz"}
    cache.let_go(held["x"])
    assert cache.ready("x", "y")
    assert cache.ready("new")
    assert not cache.ready("new", "x"), "x is held in the only place that is free, and y in use is the next"
    assert not cache.ready("new", "newer")
    cache.let_go(held["y"])
    assert cache.ready("new", "x")
    assert cache.ready("new", "newer")
    assert not cache.ready("new", "newer", "newest")


def test_the_first_report_tells_what_a_panel_held() -> None:
    """Whichever tile it was read for: a run that is stopped between two tiles knows that of both."""
    content = panel_content("A", (0, 8, 0, 4), [((0, 8, 0, 2), 1), ((0, 8, 2, 4), 2)])
    held = ReadContent(content)
    jobs = [
        TileJob(Tile(index, 0, index, 0, 8, left, left + 4), 0, Sharers(), contents=[held])
        for index, left in enumerate((0, 4))
    ]
    first, second = [job.report("worker").contents[0] for job in reversed(jobs)]
    assert first == content
    assert (second.digest, second.parts) == (content.digest, None)
