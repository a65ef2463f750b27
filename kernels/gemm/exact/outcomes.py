"""How a product was multiplied whose numbers decide that, and why, in words: for whoever reports on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_listening = threading.local()


@contextmanager
def noted() -> Iterator[list[str]]:
    """What products that this thread enqueues within the block come to, one after the other."""
    words: list[str] = []
    lists: list[list[str]] = _listening.__dict__.setdefault("lists", [])
    lists.append(words)
    try:
        yield words
    finally:
        lists[:] = [each for each in lists if each is not words]


def note(words: str) -> None:
    for each in _listening.__dict__.get("lists", ()):
        each.append(words)
