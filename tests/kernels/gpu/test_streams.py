"""What streams are asked to wait for, and what is kept until they have passed."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import pytest

from tilewright.kernels.gpu import streams
from tilewright.kernels.gpu.streams import keep_until_passed


class _Event:
    """An event that passes when its stream is told to."""

    def __init__(self, passed: set[int]) -> None:
        self._passed = passed

    def record(self, stream: int) -> None:
        self._stream = stream

    def query(self) -> bool:
        return self._stream in self._passed


class _Array:
    """Something that can be referred to weakly."""


def test_memory_is_kept_until_its_stream_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: set[int] = set()
    monkeypatch.setattr(streams.cuda, "event", lambda **options: _Event(passed))
    monkeypatch.setattr(streams, "SIMULATOR", False)
    monkeypatch.setattr(streams, "_kept", deque())

    def lend(stream: int) -> Any:
        array = _Array()
        keep_until_passed(stream, array)
        return weakref.ref(array)

    first, second = lend(11), lend(12)
    assert first() is not None
    assert second() is not None
    passed.add(11)
    third = lend(13)
    assert first() is None
    assert second() is not None
    passed.update((12, 13))
    fourth = lend(14)
    assert [each() is None for each in (second, third, fourth)] == [True, True, False]
