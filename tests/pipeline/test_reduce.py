"""A reduction is what its parts say, in whatever order the parts come."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client, Status
from distributed.scheduler import KilledWorker

import tilewright as tw
from tilewright.pipeline import dot as dotting
from tilewright.pipeline import reduce
from tilewright.pipeline.errors import TaskError
from tilewright.pipeline.events import Event, UnitDone, WorkDone, WorkPlanned
from tilewright.pipeline.reduce import (
    Reduction,
    _Outcome,
    _parts,
    end_if_given_up,
    reduce_pieces,
)
from tilewright.pipeline.threads import thread_buffer
from tilewright.pipeline.worker import tasks
from tilewright.pipeline.worker.survey import free_what_is_over, survey


def chunk(letter: str) -> tuple[str, dict[str, float]]:
    return letter, {"read": 1.0}


def broken(letter: str) -> tuple[str, dict[str, float]]:
    raise ZeroDivisionError(f"at {letter}")


def joined(commutative: bool) -> Reduction[str, str]:
    return Reduction("letters", chunk, str, str.__add__, commutative, "cut them smaller")


def test_parts_of_an_ordered_reduction_come_in_order_whoever_is_first() -> None:
    for order in itertools.permutations(range(4)):
        outcomes: Iterator[tuple[int, _Outcome[str]]] = (
            (place, _Outcome("abcd"[place], "worker", 0.0, {})) for place in order
        )
        assert "".join(_parts(outcomes, joined(False), [1] * 4, lambda _: None)) == "abcd"


def test_parts_of_a_commutative_reduction_are_not_held_back() -> None:
    outcomes = iter([(3, _Outcome("d", "worker", 0.0, {}))])
    assert list(_parts(outcomes, joined(True), [1] * 4, lambda _: None)) == ["d"]


def test_every_piece_is_reduced_and_reported(client: Client) -> None:
    seen: list[Event] = []
    letters = [chr(ord("a") + i) for i in range(20)]
    sizes = list(range(20))
    result = reduce_pieces(client, joined(False), [(letter,) for letter in letters], sizes, seen.append)
    assert result == "".join(letters)
    assert seen[0] == WorkPlanned("letters", 20, 0, "pieces", sum(sizes), 0)
    units = [event for event in seen if isinstance(event, UnitDone)]
    assert sorted(unit.index for unit in units) == list(range(20))
    assert all(unit.nbytes == sizes[unit.index] and unit.stages == {"read": 1.0} for unit in units)
    assert isinstance(seen[-1], WorkDone)


def test_no_pieces_give_the_identity(client: Client) -> None:
    assert reduce_pieces(client, joined(False), [], [], lambda _: None) == ""


def test_a_piece_that_fails_fails_the_reduction(client: Client) -> None:
    reduction = Reduction("letters", broken, str, str.__add__, False, "cut them smaller")
    with pytest.raises(TaskError, match="ZeroDivisionError: at a"):
        reduce_pieces(client, reduction, [("a",)], [1], lambda _: None)


def deadly(letter: str) -> tuple[str, dict[str, float]]:
    """Ends as the scheduler lets a task end that took down its workers."""
    raise KilledWorker("deadly", SimpleNamespace(address="tcp://last:1"), 3)


def test_a_piece_that_takes_down_its_workers_says_what_to_change(client: Client) -> None:
    with pytest.raises(TaskError, match=r"took down every worker .*, and give them more memory, or cut them"):
        reduce_pieces(client, replace(joined(True), chunk=deadly), [("x",)], [1], lambda event: None)


def test_scratch_is_kept_and_grows() -> None:
    first = thread_buffer("test", 100, pinned=False)
    again = thread_buffer("test", 50, pinned=False)
    assert again.ctypes.data == first.ctypes.data
    assert len(again) == 50
    assert len(thread_buffer("test", 1000, pinned=False)) == 1000
    assert (
        thread_buffer("other", 10, pinned=False).ctypes.data
        != thread_buffer("test", 10, pinned=False).ctypes.data
    )


@pytest.mark.parametrize(
    "free", [partial(free_what_is_over, "cpu"), tasks.release_memory], ids=["survey", "release"]
)
def test_what_threads_kept_for_their_next_task_is_freed_for_the_next_job(free: Callable[[], None]) -> None:
    """Whose plan does not count it; what a task is using stays."""

    def keep() -> weakref.ref[np.ndarray]:
        base: np.ndarray | None = thread_buffer("test", 100, pinned=False).base
        assert base is not None
        return weakref.ref(base)

    with ThreadPoolExecutor(1) as pool:
        kept = pool.submit(keep).result()
        used = thread_buffer("test", 100, pinned=False)
        used[:] = 7
        assert kept() is not None
        free()
        assert kept() is None
        other = thread_buffer("test", 100, pinned=False)
        other[:] = 8
        assert (used == 7).all()
        assert pool.submit(keep).result()() is not None


def test_a_survey_frees_the_vectors_of_a_dot_product(client: Client, tmp_path: Path) -> None:
    made: list[weakref.ref[np.ndarray]] = []
    ones = zarr.create_array(tmp_path / "x", shape=(100,), dtype="f8", fill_value=1)

    def noted(*arguments: Any, **options: Any) -> np.ndarray:
        buffer = thread_buffer(*arguments, **options)
        assert buffer.base is not None
        made.append(weakref.ref(buffer.base))
        return buffer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dotting, "thread_buffer", noted)
        assert tw.dot(ones, ones, cluster=client, device="cpu") == 100
    assert len(made) == 2
    survey(client, "cpu")
    assert [buffer() for buffer in made] == [None, None]


WANTED, ENDED = threading.Event(), threading.Event()
"""Of the worker's thread, which is one of this process."""


def until_given_up() -> None:
    check = end_if_given_up()
    try:
        for checks in itertools.count():
            check()
            if checks == 10:
                WANTED.set()
            time.sleep(0.01)
    except CancelledError:
        ENDED.set()


def test_a_task_that_is_given_up_is_told(client: Client) -> None:
    future = client.submit(until_given_up, pure=False)
    assert WANTED.wait(30)
    assert not ENDED.is_set()
    future.cancel()
    assert ENDED.wait(30)


@pytest.mark.parametrize(
    ("status", "ends"),
    [("running", False), ("paused", False), ("closing_gracefully", False), ("closing", True)],
)
def test_a_worker_that_retires_finishes_its_task(
    status: str, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = SimpleNamespace(
        get_current_task=lambda: "key",
        state=SimpleNamespace(tasks={"key": SimpleNamespace(state="executing")}),
        status=Status[status],
    )
    monkeypatch.setattr(reduce, "current_worker", lambda: worker)
    now = [100.0]
    check = end_if_given_up(lambda: now[0])
    check()
    now[0] += reduce.CLOSING_SECONDS / 2
    check()  # one that closes has not cancelled its tasks yet
    now[0] += reduce.CLOSING_SECONDS
    with pytest.raises(CancelledError) if ends else nullcontext():
        check()


def test_a_task_that_a_closing_worker_cancels_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    task = SimpleNamespace(state="executing")
    worker = SimpleNamespace(
        get_current_task=lambda: "key", state=SimpleNamespace(tasks={"key": task}), status=Status.closing
    )
    monkeypatch.setattr(reduce, "current_worker", lambda: worker)
    check = end_if_given_up()
    check()
    task.state = "cancelled"
    with pytest.raises(CancelledError):
        check()


def test_nobody_gives_up_what_is_no_task() -> None:
    end_if_given_up()()
