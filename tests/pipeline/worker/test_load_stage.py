"""Regions on their way to their places: nothing is on its way any more when whoever waits for it hears of an error."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tilewright.pipeline.worker.load_stage import LoadsUnderWay
from tilewright.pipeline.worker.units import Loading


def test_one_that_cannot_be_waited_for_does_not_keep_the_others_from_it() -> None:
    """The places of all of them go to other panels."""
    settled: list[str] = []

    def settle(name: str, fails: bool) -> Callable[[], None]:
        def call() -> None:
            settled.append(name)
            if fails:
                raise RuntimeError(f"injected: {name}'s copies failed")

        return call

    loadings = [Loading([], settle=settle(name, fails)) for name, fails in (("a", True), ("b", False))]
    for order in (loadings, loadings[::-1]):
        settled.clear()
        with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="a's copies"):
            LoadsUnderWay(pool, order).finish()
        assert sorted(settled) == ["a", "b"]
    both = [Loading([], settle=settle(name, True)) for name in "ab"]
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="a's copies"):
        LoadsUnderWay(pool, both).finish()
