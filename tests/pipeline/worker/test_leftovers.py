"""What a run leaves in memory when it is over: nothing, even before Python's collector of cycles runs, and even while
its errors are kept."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.pipeline.worker.test_engines import ENDS, Held, registry, told_of_closing
from tests.pipeline.worker.test_stream import engine, factors
from tilewright.pipeline.plan.told import Product
from tilewright.pipeline.threads import clear_frames, run_all
from tilewright.pipeline.worker import engines
from tilewright.pipeline.worker.load_stage import LoadsUnderWay
from tilewright.pipeline.worker.survey import free_what_is_over
from tilewright.pipeline.worker.units import HostUnit, Loading

__all__ = ["engine", "factors", "registry"]


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Memory that only the collector of cycles would free stays."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Buffers:
    """The buffers that units allocate from now on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._made: list[weakref.ref[np.ndarray]] = []
        allocate = HostUnit.allocate

        def noted(unit: HostUnit, *arguments: Any) -> np.ndarray:
            flat = allocate(unit, *arguments)
            self._made.append(weakref.ref(flat))
            return flat

        patch.setattr(HostUnit, "allocate", noted)

    def alive(self) -> int:
        assert self._made
        return sum(made() is not None for made in self._made)


@pytest.fixture
def product(engine: Any) -> Product:
    """One whose engine, which is yet to be made, has fewer buffers than there are panels."""
    made: Product = engine(75_000)[0].product
    return made


@pytest.fixture
def buffers(product: Product, monkeypatch: pytest.MonkeyPatch) -> Buffers:
    return Buffers(monkeypatch)


def computed(product: Product) -> list[BaseException]:
    """The errors of all tiles, three of them under way at once, each as the task that waits for it gets it."""

    def task(tile: Any) -> BaseException | None:
        try:
            with engines.engine_for(product, "here") as worker:
                worker.multiply(tile)
        except (OSError, CancelledError) as error:
            return error
        return None

    with ThreadPoolExecutor(3) as pool:
        return [error for error in pool.map(task, product.plan.tiles()) if error is not None]


def fail(patch: pytest.MonkeyPatch, method: str, place: int = 3) -> None:
    """Let a call of a unit's method fail: the one of that place, once."""
    original, calls = getattr(HostUnit, method), iter(range(10**6))

    def failing(*arguments: Any, **options: Any) -> Any:
        if next(calls) == place:
            raise OSError(f"injected: {method} failed")
        return original(*arguments, **options)

    patch.setattr(HostUnit, method, failing)


FAILING = pytest.mark.parametrize("failing", [None, "load", "settle", "multiply", "save"])
"""The method of the unit that fails once."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("keeping", [False, True], ids=["dropped", "kept"])
@FAILING
def test_no_buffer_outlives_its_run(
    failing: str | None,
    keeping: bool,
    product: Product,
    buffers: Buffers,
    registry: None,
    uncollected: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever keeps the error of a tile, as Dask does by a cycle of references of its own."""
    if failing is not None:
        fail(monkeypatch, failing)
    errors = computed(product)
    assert len(errors) == (failing is not None)
    for error in errors:
        assert str(error) == f"injected: {failing} failed"
        assert "failing" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        del error
    if not keeping:
        errors.clear()
    engines.close_engine(product.run)
    assert buffers.alive() > 0, "other workers may still copy from them"
    engines.free_engine(product.run)
    assert buffers.alive() == 0


@pytest.mark.parametrize("held", ["load", "multiply", "save"])
@pytest.mark.parametrize("by", ENDS)
def test_no_buffer_outlives_a_run_whose_tiles_are_abandoned(
    by: str,
    held: str,
    product: Product,
    buffers: Buffers,
    registry: None,
    uncollected: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, closing = Held(monkeypatch, held), told_of_closing(monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        under_way = pool.submit(computed, product)
        try:
            assert begun.begun.wait(10)
            ended = pool.submit(ENDS[by], product)
            assert closing.wait(10)
        finally:
            begun.go_on.set()
        ended.result(10)
        errors = under_way.result(10)
    assert any(isinstance(error, CancelledError) for error in errors)
    engines.free_engine(product.run)
    assert buffers.alive() == 0


def test_no_buffer_outlives_an_idle_engine(
    product: Product,
    buffers: Buffers,
    registry: None,
    uncollected: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client of the run died."""
    fail(monkeypatch, "load")
    errors = computed(product)
    engines.close_idle_engines()
    assert len(errors) == 1
    assert buffers.alive() == 0


@pytest.mark.sample(2)
@FAILING
def test_cycles_are_collected_before_a_survey_only_if_tiles_failed(
    failing: str | None,
    product: Product,
    registry: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that follows another waits tens of milliseconds for it."""
    free_what_is_over("cpu")
    collected: list[bool] = []
    monkeypatch.setattr(engines.gc, "collect", lambda: collected.append(True))
    if failing is not None:
        fail(monkeypatch, failing)
    computed(product)
    free_what_is_over("cpu")
    engines.close_engine(product.run)
    engines.free_engine(product.run)
    for _ in range(2):
        free_what_is_over("cpu")
    assert len(collected) == (failing is not None)


def test_cycles_are_collected_after_an_engine_that_could_not_be_made(
    product: Product, registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_what_is_over("cpu")
    fail(monkeypatch, "tile_slots", 0)
    collected: list[bool] = []
    monkeypatch.setattr(engines.gc, "collect", lambda: collected.append(True))
    assert computed(product)
    free_what_is_over("cpu")
    assert collected == [True]


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


def test_frames_that_have_ended_are_cleared_and_no_others() -> None:
    made: list[weakref.ref[Region]] = []

    def hold(fails: Callable[[], None]) -> None:
        region = Region()
        made.append(weakref.ref(region))
        fails()

    def chained() -> None:
        try:
            hold(Region().fail)
        except OSError as error:
            raise ValueError("of it") from error

    def handled() -> None:
        try:
            hold(Region().fail)
        except OSError:
            hold(chained)

    def suspended(errors: list[BaseException]) -> Iterator[str]:
        try:
            hold(handled)
        except ValueError as error:
            errors.append(error)
        yield "first"
        yield "second"

    errors: list[BaseException] = []
    going_on = suspended(errors)
    assert next(going_on) == "first"
    assert len([region for region in made if region() is not None]) == 4
    names = [frame.name for frame in traceback.extract_tb(errors[0].__traceback__)]
    clear_frames(errors[0])
    assert [region() for region in made] == [None] * 4
    assert [frame.name for frame in traceback.extract_tb(errors[0].__traceback__)] == names
    assert next(going_on) == "second"
    try:
        hold(Region().fail)
    except OSError as error:
        clear_frames(error)
    assert made[-1]() is None
    assert errors, "this frame still runs"
