"""Whoever has files read hears how far that is, and nobody else."""

from __future__ import annotations

from tilewright.pipeline import advance
from tilewright.pipeline.advance import advanced, watching


def test_what_is_read_is_told_now_and_then() -> None:
    now, told = [0.0], list[int]()
    with watching({"a": 100, "b": 50}, told.append, lambda: now[0]):
        for path, nbytes, time in (
            ("a", 10, 0.5),
            ("a", 20, 1.0),
            ("c", 9, 2.0),
            ("b", 5, 2.5),
            ("a", 400, 9.0),
        ):
            now[0] = time
            advanced(path, nbytes)
    advanced("a", 1)
    assert told == [30, 35, 150], "every second, and no more than there is"
    assert not advance._watched


def test_tasks_that_read_the_same_file_are_both_told() -> None:
    now, told = [0.0], list[tuple[str, int]]()
    with (
        watching({"a": 100}, lambda nbytes: told.append(("one", nbytes)), lambda: now[0]),
        watching({"a": 100}, lambda nbytes: told.append(("other", nbytes)), lambda: now[0]),
        watching({"a": 100}, None),
    ):
        now[0] = 1.0
        advanced("a", 7)
    assert told == [("one", 7), ("other", 7)]
