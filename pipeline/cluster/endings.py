"""Asking work to end. Whoever handles a signal imports this, at the start of a process, so it imports nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Asked = Callable[[BaseException], bool]
"""Told what the work is to end with; False where it was told that before."""

_listening: list[Asked] = []


@contextmanager
def asked_to_end(asked: Asked) -> Iterator[None]:
    """Call this in this block where `request_end` is called."""
    _listening.append(asked)
    try:
        yield
    finally:
        _listening.remove(asked)


def request_end(ending: BaseException) -> bool:
    """Have all work of this process that can come to an end by itself do so, and raise ``ending`` then. False where
    there is none, or where it was asked before: then it is for the caller to raise it."""
    begun = [asked(ending) for asked in _listening]
    return any(begun)
