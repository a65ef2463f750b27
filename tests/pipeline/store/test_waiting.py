"""Waiting for a store that does not answer ends with the work, and not before the store has let go of its buffers."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import time
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import FsspecStore

import tilewright as tw
from tests.pipeline.store.stored_arrays import as_remote
from tilewright.pipeline.store import waiting
from tilewright.pipeline.store.waiting import answer_of, read_while, reading_while


async def answer(value: int) -> int:
    return value


class Silence:
    """Something that is asked and never answers; it takes a while to end when it is cancelled."""

    def __init__(self) -> None:
        self.asked, self.ended = threading.Event(), threading.Event()

    async def __call__(self) -> None:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            self.ended.set()

    def check(self) -> None:
        if self.asked.is_set():
            raise CancelledError("nobody needs it any more")


def test_answers_and_errors_are_those_of_the_coroutine() -> None:
    async def fail() -> None:
        raise KeyError("of its own")

    assert answer_of(answer(3), "x") == 3
    with pytest.raises(KeyError, match="of its own"):
        answer_of(fail(), "x")


def test_what_is_given_up_has_ended() -> None:
    silence = Silence()
    with reading_while(silence.check), pytest.raises(CancelledError, match="nobody needs it"):
        answer_of(silence(), "x")
    assert silence.ended.is_set(), "it may still have written"
    assert answer_of(answer(3), "x") == 3, "the check was for that block"


def test_what_was_given_up_before_is_not_asked() -> None:
    silence = Silence()
    silence.asked.set()
    with reading_while(silence.check), pytest.raises(CancelledError):
        answer_of(silence(), "x")
    assert not silence.ended.is_set()


def test_threads_of_a_pool_wait_no_longer_than_its_work_goes_on() -> None:
    silence = Silence()
    with ThreadPoolExecutor(1, initializer=read_while, initargs=(silence.check,)) as pool:
        assert isinstance(pool.submit(answer_of, silence(), "x").exception(), CancelledError)
    assert silence.ended.is_set()


def test_a_long_wait_is_logged_once_for_all_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(waiting, "LATE_SECONDS", 0.1)
    monkeypatch.setattr(waiting, "_patience", waiting._Patience())

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records]

    async def answer_when_told(many: int) -> int:
        while len(lines()) < many:
            await asyncio.sleep(0.01)
        return many

    began = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(answer_of, answer_when_told(2), f"chunk {n} of a.zarr") for n in range(4)]
        assert [each.result(60) for each in asked] == [2] * 4
    assert re.fullmatch(
        r"chunk \d of a\.zarr has not come for \d+ s: its storage does not answer; waiting on", lines()[0]
    )
    assert len(lines()) == 2
    assert time.monotonic() - began >= 0.2, "once, and again after as long"


def test_the_object_that_is_waited_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    zarr.create_array(tmp_path / "shards", data=np.ones((4, 4)), chunks=(2, 2), shards=(4, 4))
    zarr.create_array(tmp_path / "chunks", data=np.ones((4, 4)))
    get = FsspecStore.get

    async def late(store: FsspecStore, key: str, *arguments: Any, **options: Any) -> Any:
        if "/c/" in f"/{key}":
            await asyncio.sleep(0.05)
        return await get(store, key, *arguments, **options)

    monkeypatch.setattr(FsspecStore, "get", late)
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(waiting, "LATE_SECONDS", 0.0)
    names = "shards", "chunks"
    tw.matmul(*(as_remote(tmp_path / name) for name in names), tmp_path / "c", device="cpu", verify=False)
    told = {record.getMessage().partition(" has not come")[0] for record in caplog.records}
    shards, chunks = (f"file://{tmp_path}/{name}" for name in names)
    assert {f"{shards}/c/0/0", f"{chunks}/c/0/0"} <= told


def test_a_coroutine_that_its_loop_cancels_is_given_up() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(CancelledError):
        answer_of(cancelled(), "x")


def test_an_error_keeps_buffers_in_no_cycle() -> None:
    class Buffer(np.ndarray):
        pass

    async def fill(buffer: np.ndarray) -> None:
        raise OSError("no answer")

    buffer = np.zeros(3).view(Buffer)
    kept = weakref.ref(buffer)
    gc.disable()
    try:
        with pytest.raises(OSError, match="no answer") as raised:
            answer_of(fill(buffer), "x")
        del buffer, raised
        for _ in range(2):  # zarr's loop lets go of what it did last when it does something else
            answer_of(answer(3), "x")
        assert kept() is None
    finally:
        gc.enable()
