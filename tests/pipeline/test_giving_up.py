"""Waiting for a store that does not answer ends with the work, and not before the store has let go of its buffers."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor

import numpy as np
import pytest

from tilewright.pipeline.giving_up import answer_of, read_while, reading_while


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

    assert answer_of(answer(3)) == 3
    with pytest.raises(KeyError, match="of its own"):
        answer_of(fail())


def test_what_is_given_up_has_ended() -> None:
    silence = Silence()
    with reading_while(silence.check), pytest.raises(CancelledError, match="nobody needs it"):
        answer_of(silence())
    assert silence.ended.is_set(), "it may still have written"
    assert answer_of(answer(3)) == 3, "the check was for that block"


def test_what_was_given_up_before_is_not_asked() -> None:
    silence = Silence()
    silence.asked.set()
    with reading_while(silence.check), pytest.raises(CancelledError):
        answer_of(silence())
    assert not silence.ended.is_set()


def test_threads_of_a_pool_wait_no_longer_than_its_work_goes_on() -> None:
    silence = Silence()
    with ThreadPoolExecutor(1, initializer=read_while, initargs=(silence.check,)) as pool:
        assert isinstance(pool.submit(answer_of, silence()).exception(), CancelledError)
    assert silence.ended.is_set()


def test_a_coroutine_that_its_loop_cancels_is_given_up() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(CancelledError):
        answer_of(cancelled())


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
            answer_of(fill(buffer))
        del buffer, raised
        for _ in range(2):  # zarr's loop lets go of what it did last when it does something else
            answer_of(answer(3))
        assert kept() is None
    finally:
        gc.enable()
