"""The panels that a worker holds, without the engine that takes them."""

from __future__ import annotations

import threading

from tilewright.pipeline.panels import PanelCache


def test_the_panel_taken_longest_ago_gives_way() -> None:
    cache = PanelCache(2, list)
    for key, expected in (("x", False), ("y", False), ("x", True), ("z", False), ("x", True), ("y", False)):
        buffer, there = cache.take(key)
        assert there == expected
        cache.let_go(buffer)


def test_a_panel_in_use_stays() -> None:
    cache = PanelCache(1, list)
    assert cache.ready("x")
    first, _ = cache.take("x")
    assert (cache.ready("x"), cache.ready("y")) == (True, False)
    taken = threading.Event()

    def take() -> None:
        cache.take("y")
        taken.set()

    thread = threading.Thread(target=take)
    thread.start()
    assert not taken.wait(0.1)
    cache.let_go(first)
    assert taken.wait(10)
    thread.join()
