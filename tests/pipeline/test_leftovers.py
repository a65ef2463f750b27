"""What failed work leaves in memory: nothing, even before Python's collector of cycles runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tilewright.pipeline.loading import Loading, LoadsUnderWay
from tilewright.pipeline.threads import run_all


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Memory that only the collector of cycles would free stays."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Region:
    """What a call works on."""

    def fail(self) -> None:
        raise OSError("injected")


def run_both(pool: ThreadPoolExecutor, calls: list[Callable[[], Any]]) -> None:
    run_all(pool, calls)


def load_both(pool: ThreadPoolExecutor, calls: list[Callable[[], Any]]) -> None:
    LoadsUnderWay(pool, [Loading(calls)]).finish()


def load_rest(pool: ThreadPoolExecutor, calls: list[Callable[[], Any]]) -> None:
    LoadsUnderWay(pool, [Loading([], lambda: calls)]).finish()


@pytest.mark.parametrize("make", [run_both, load_both, load_rest])
def test_what_failed_calls_work_on_goes_with_their_error(
    make: Callable[[ThreadPoolExecutor, list[Callable[[], Any]]], None], uncollected: None
) -> None:
    def attempt(pool: ThreadPoolExecutor) -> list[weakref.ref[Region]]:
        regions = [Region(), Region()]
        with pytest.raises(OSError, match="injected"):
            make(pool, [region.fail for region in regions])
        return [weakref.ref(region) for region in regions]

    with ThreadPoolExecutor(2) as pool:
        regions = attempt(pool)
    assert [region() for region in regions] == [None, None]
