"""Outputs that are written in place go on where a stopped run left them: open arrays in folders and in other stores,
and URLs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.local import LocalFileSystem
from zarr.storage import FsspecStore

import tilewright as tw
from tests.workflows.test_matmul import TIGHT, assert_product, intercept_writes, numbers, put, stop_at
from tilewright.pipeline.errors import OutputExistsError, VerificationError
from tilewright.pipeline.events import Event, Notice, UnitDone
from tilewright.pipeline.product import job, ledger
from tilewright.pipeline.product import output as outputs
from tilewright.pipeline.product.request import Request
from tilewright.pipeline.store import journal

DONE = 3
SHAPE = (96, 64)
CHUNKS: dict[str, Any] = {
    "plain": {"chunks": (16, 16), "compressors": None},
    "compressed": {"chunks": (16, 16)},
    "sharded": {"chunks": (8, 8), "shards": (16, 16)},
}


def server_at(folder: Path) -> FsspecStore:
    """A store that is no folder to zarr-python, and that worker threads share."""
    files = AsyncFileSystemWrapper(LocalFileSystem(auto_mkdir=True), asynchronous=True)
    return FsspecStore(files, path=str(folder))


def opened(place: str, folder: Path, stored: str = "plain", **options: Any) -> zarr.Array[Any]:
    """An open array for C, below a group, which holds other numbers."""
    target = server_at(folder) if place == "objects" else folder
    zarr.open_group(target, mode="a")
    array = zarr.create_array(
        target, name="c", shape=SHAPE, dtype="f4", fill_value=99, **CHUNKS[stored] | options
    )
    array[...] = 7
    return array


def again(place: str, folder: Path) -> zarr.Array[Any]:
    target = server_at(folder) if place == "objects" else folder
    return zarr.open_array(target, path="c", mode="r+")


@pytest.fixture
def factors(tmp_path: Path, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, Path, Path]:
    a, b = numbers(rng, (96, 80), "f4"), numbers(rng, (80, 64), "f4")
    return a, b, put(tmp_path / "a.zarr", a), put(tmp_path / "b.zarr", b)


Factors = tuple[np.ndarray, np.ndarray, Path, Path]


@pytest.fixture
def options(client: Client, small_chunks: None) -> dict[str, Any]:
    return {"cluster": client, "device": "cpu", "device_memory": TIGHT}


def computed(events: list[Event]) -> int:
    return sum(isinstance(event, UnitDone) and event.name == "matmul" for event in events)


def told(events: list[Event]) -> str:
    return "\n".join(event.message for event in events if isinstance(event, Notice))


def names_beside(folder: Path) -> set[str]:
    return {path.name for path in (folder / "c").iterdir()} - {"c", "zarr.json"}


@pytest.mark.parametrize("stored", CHUNKS)
@pytest.mark.parametrize("place", ["folder", "objects"])
def test_an_open_array_goes_on_where_a_run_stopped(
    place: str,
    stored: str,
    factors: Factors,
    tmp_path: Path,
    options: dict[str, Any],
    events: list[Event],
) -> None:
    a, b, a_path, b_path = factors
    folder = tmp_path / "g"
    stop_at(DONE, a_path, b_path, opened(place, folder, stored), **options)
    run = tw.matmul(a_path, b_path, again(place, folder), listener=events.append, **options)
    assert (run.resumed, computed(events)) == (DONE, run.plan.tile_count - DONE)
    assert f"an earlier run finished {DONE} of {run.plan.tile_count} tiles; it goes on" in told(events)
    assert_product(again(place, folder)[...], a, b)
    assert names_beside(folder) <= {outputs.CHECKSUMS_NAME, journal.SEGMENTS_NAME}
    assert not list(folder.rglob(f"{journal.SEGMENTS_NAME}/*")), (
        "the record has no business in a finished product"
    )
    assert not (folder / "c" / ledger.FILE_NAME).exists()
    assert tw.audit(again(place, folder)).passed
    assert tw.matmul(a_path, b_path, again(place, folder), **options).resumed == 0, "it was finished"


@pytest.mark.parametrize("place", ["folder", "objects"])
def test_a_tile_that_somebody_wrote_to_meanwhile_is_computed_again(
    place: str, factors: Factors, tmp_path: Path, options: dict[str, Any], events: list[Event]
) -> None:
    """Nobody but us writes to C.zarr.partial; an open array is the caller's."""
    a, b, a_path, b_path = factors
    folder = tmp_path / "g"
    array = opened(place, folder)
    stop_at(DONE, a_path, b_path, array, **options)
    past = ledger.read_journal(journal.journal_in(array, ledger.FILE_NAME))  # type: ignore[arg-type]
    assert past is not None
    one = next(iter(past.finished.values())).objects[0]
    array[one.place[0] * 16 : one.place[0] * 16 + 4, one.place[1] * 16 : one.place[1] * 16 + 4] = 5
    run = tw.matmul(a_path, b_path, array, listener=events.append, **options)
    assert run.resumed == DONE - 1
    assert "1 tile of an earlier run lost stored pieces" in told(events)
    assert_product(array[...], a, b)


@pytest.mark.parametrize("place", ["folder", "objects"])
def test_what_is_recorded_of_another_product_is_not_kept(
    place: str, factors: Factors, tmp_path: Path, options: dict[str, Any], events: list[Event]
) -> None:
    a, b, a_path, b_path = factors
    array = opened(place, tmp_path / "g")
    stop_at(DONE, a_path, b_path, array, **options)
    twice = put(tmp_path / "twice.zarr", 2 * b)
    job.plan_only(Request(a_path, b_path, array, listener=events.append, **options))
    assert f"an earlier run finished {DONE} of" in told(events)
    events.clear()
    assert tw.matmul(a_path, twice, array, listener=events.append, **options).resumed == 0
    assert f"{DONE} of {DONE} finished tiles are computed again" in told(events)
    assert_product(array[...], a, 2 * b)
    stop_at(DONE, a_path, b_path, array, **options)
    assert tw.matmul(a_path, b_path, array, resume=False, **options).resumed == 0
    assert_product(array[...], a, b)


@pytest.mark.parametrize("place", ["folder", "objects"])
def test_a_product_that_fails_its_check_is_not_gone_on_with(
    place: str,
    factors: Factors,
    tmp_path: Path,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its bad tiles are computed once more; where they are bad again, the record goes."""
    a, b, a_path, b_path = factors
    array = opened(place, tmp_path / "g")
    with monkeypatch.context() as patch:
        intercept_writes(patch, lambda top, left, data: data + 1 if (top, left) == (0, 0) else data)
        with pytest.raises(VerificationError, match="bad tile had been computed a second time"):
            tw.matmul(a_path, b_path, array, **options)
    assert tw.matmul(a_path, b_path, array, **options).resumed == 0
    assert_product(array[...], a, b)


def test_two_runs_do_not_write_to_one_folder(
    factors: Factors, tmp_path: Path, options: dict[str, Any]
) -> None:
    _, _, a_path, b_path = factors
    array = opened("folder", tmp_path / "g")
    os.symlink(tmp_path / "g" / "c", tmp_path / "link")

    def begin_another(event: Event) -> None:
        if isinstance(event, UnitDone):
            tw.matmul(a_path, b_path, zarr.open_array(tmp_path / "link", mode="r+"), **options)

    with pytest.raises(OutputExistsError, match="another run is writing"):
        tw.matmul(a_path, b_path, array, listener=begin_another, **options)
    assert tw.matmul(a_path, b_path, array, **options).resumed
