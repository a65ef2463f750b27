"""What a process keeps from one task to the next is taken, put back and freed; the blocks of a lane take turns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tilewright.pipeline.transfer import lane as module
from tilewright.pipeline.transfer.lane import (
    Lane,
    Spares,
    forgotten_with_memory,
    free_device_memory,
    free_pinned,
)


class Thing:
    """Pinned memory that is pretended."""

    def __init__(self, *of: int) -> None:
        self.of, self.settled = of, 0

    def settle(self) -> None:
        self.settled += 1


@pytest.fixture(autouse=True)
def cleared(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Nothing is kept but by the test; once for each time that what Numba has queued was freed."""
    times: list[None] = []

    class Context:
        memory_manager: Any = None
        deallocations: Any = None

        def clear(self) -> None:
            times.append(None)

    context = Context()
    context.memory_manager = context.deallocations = context
    monkeypatch.setattr(module, "_of_this_process", [])
    monkeypatch.setattr(module, "_forgetting", [])
    monkeypatch.setattr(module.cuda, "current_context", lambda: context, raising=False)
    return times


def test_what_was_put_back_is_taken_again_by_what_it_is_made_from() -> None:
    spares = Spares(Thing)
    one, other = spares.take(1), spares.take(2)
    assert (one.of, other.of) == ((1,), (2,))
    spares.put(one, 1)
    assert spares.kept(1) == [one]
    assert spares.take(2) is not one
    assert spares.take(1) is one
    assert spares.kept(1) == []


def test_a_product_frees_all_pinned_memory_but_its_own(cleared: list[None]) -> None:
    own, others, texts = Spares(Thing), Spares(Thing), Spares(lambda: "text", pinned=False)
    kept, beyond, foreign = Thing(), Thing(), Thing(8)
    own.put(kept)
    own.put(beyond)
    others.put(foreign, 8)
    texts.put("text")
    free_pinned(own, 1)
    assert own.kept() == [kept]
    assert others.kept(8) == []
    assert [thing.settled for thing in (kept, beyond, foreign)] == [0, 1, 1], (
        "no copy is under way in what is freed"
    )
    assert texts.kept() == ["text"], "a plan is made from what is free on the device, which others look after"
    assert len(cleared) == 1
    free_pinned(own, 1)
    assert len(cleared) == 1, "nothing was freed"


def test_another_job_frees_what_is_spare_on_the_device() -> None:
    pinned, texts = Spares(Thing), Spares(lambda: "text", pinned=False)
    pinned.put(Thing())
    texts.put("text")
    free_device_memory()
    assert texts.kept() == []
    assert len(pinned.kept()) == 1


def test_another_job_forgets_what_was_found_out_of_that_memory() -> None:
    texts, kept = Spares(lambda: "text", pinned=False), []
    texts.put("text")
    forgotten_with_memory(lambda: kept.append(texts.kept()))
    texts.free()
    assert kept == [], "it is this job that frees"
    free_device_memory()
    assert kept == [[]]


class Event:
    def __init__(self) -> None:
        self.calls: list[object] = []

    def synchronize(self) -> None:
        self.calls.append("waited for")

    def record(self, stream: object) -> None:
        self.calls.append(stream)


def test_a_block_is_waited_for_before_it_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [Event(), Event()]
    made = iter(events)
    monkeypatch.setattr(module, "untimed_event", lambda: next(made))
    blocks = np.zeros(4, np.uint8), np.zeros(4, np.uint8)
    lane = Lane(blocks)
    assert lane.block() is blocks[1]
    assert lane.sent("a stream") is events[1]
    assert lane.block() is blocks[0]
    assert lane.sent("a stream") is events[0]
    assert lane.block() is blocks[1]
    assert events[1].calls == ["waited for", "a stream", "waited for"]
    lane.settle()
    assert events[0].calls == ["waited for", "a stream", "waited for"]
