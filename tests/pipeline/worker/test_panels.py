"""The panels that a worker holds, without the engine that takes them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tilewright.pipeline.worker.panels import PanelCache


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
