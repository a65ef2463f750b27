"""Outputs that are written in place go on where a stopped run left them: open arrays in folders and in other stores,
and URLs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zarr
from distributed import Client
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.local import LocalFileSystem
from zarr.storage import FsspecStore

import tilewright as tw
from tests.workflows.products import SIX_TILES, assert_product, intercept_writes, numbers, put, stop_at
from tilewright.pipeline.errors import OutputExistsError, VerificationError
from tilewright.pipeline.events import Event, Notice, UnitDone
from tilewright.pipeline.product import in_place, job, ledger
from tilewright.pipeline.product import output as outputs
from tilewright.pipeline.product.request import Request
from tilewright.pipeline.store import journal, locks, objects

DONE = 3


class Bucket(LocalFileSystem):  # type: ignore[misc]
    """A server's bucket, as far as anybody but this class can see."""

    protocol = "bucket"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"auto_mkdir": True})

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return LocalFileSystem._strip_protocol(os.fspath(path).removeprefix("bucket://"))

    def unstrip_protocol(self, name: str) -> str:
        return f"bucket://{name}"


fsspec.register_implementation("bucket", Bucket, clobber=True)
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
    return {"cluster": client, "device": "cpu", "device_memory": SIX_TILES}


def computed(events: list[Event]) -> int:
    return sum(isinstance(event, UnitDone) and event.name == "matmul" for event in events)


def told(events: list[Event]) -> str:
    return "\n".join(event.message for event in events if isinstance(event, Notice))


def names_beside(folder: Path) -> set[str]:
    return {path.name for path in (folder / "c").iterdir()} - {"c", "zarr.json"}


@pytest.mark.sample(1)
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


@pytest.mark.sample(1)
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


@pytest.mark.more
@pytest.mark.sample(1)
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


@pytest.mark.more
@pytest.mark.sample(1)
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


def test_a_url_goes_on_where_a_run_stopped(
    factors: Factors, tmp_path: Path, options: dict[str, Any], events: list[Event]
) -> None:
    """Without --overwrite: what stands there is no finished product. Once it is one, it is not replaced."""
    a, b, a_path, b_path = factors
    url = f"bucket://{tmp_path}/c"
    stop_at(DONE, a_path, b_path, url, **options)  # type: ignore[arg-type]
    assert in_place.UNFINISHED_NAME in names_beside(tmp_path)
    job.plan_only(Request(a_path, b_path, url, listener=events.append, **options))
    assert f"an earlier run finished {DONE} of" in told(events)
    assert "refused" not in told(events)
    events.clear()
    run = tw.matmul(a_path, b_path, url, listener=events.append, **options)
    assert (run.resumed, computed(events)) == (DONE, run.plan.tile_count - DONE)
    assert_product(zarr.open_array(url, mode="r")[...], a, b)
    assert names_beside(tmp_path) <= {outputs.CHECKSUMS_NAME, journal.SEGMENTS_NAME}
    assert tw.audit(url).passed
    with pytest.raises(OutputExistsError, match="exists; choose another path"):
        tw.matmul(a_path, b_path, url, **options)
    assert tw.matmul(a_path, b_path, url, overwrite=True, **options).resumed == 0
    assert tw.audit(url).passed


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["another request", "no resume", "other metadata"])
def test_an_unfinished_product_at_a_url_is_replaced_where_it_is_another(
    how: str, factors: Factors, tmp_path: Path, options: dict[str, Any]
) -> None:
    a, b, a_path, b_path = factors
    url = f"bucket://{tmp_path}/c"
    stop_at(DONE, a_path, b_path, url, **options)  # type: ignore[arg-type]
    more: dict[str, Any] = {}
    if how == "another request":
        more["dtype"] = "f8"
    elif how == "no resume":
        more["resume"] = False
    else:
        alter_metadata(tmp_path / "c" / "zarr.json", fill_value=5.0)
    assert tw.matmul(a_path, b_path, url, **options, **more).resumed == 0
    found = zarr.open_array(url, mode="r")
    assert (found.dtype, found.fill_value) == (more.get("dtype", "f4"), 0)
    np.testing.assert_allclose(found[...], a.astype("f8") @ b, rtol=1e-4, atol=1e-4)


def alter_metadata(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.more
def test_a_killed_run_at_a_url_loses_only_lines_of_the_last_seconds(
    factors: Factors, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kill leaves it: nobody closes the record, gives up the lease, or removes the mark."""
    a, b, a_path, b_path = factors
    url = f"bucket://{tmp_path}/c"
    monkeypatch.setattr(journal, "SEGMENT_SECONDS", 0.0)
    real = journal.ObjectJournal.append

    def at_once(self: journal.ObjectJournal, data: bytes, *, sync: bool) -> None:
        real(self, data, sync=True)

    with monkeypatch.context() as patch:
        patch.setattr(journal.ObjectJournal, "append", at_once)
        patch.setattr(journal.ObjectJournal, "close", journal.ObjectJournal._end)
        patch.setattr(locks.Lease, "release", abandoned)
        stop_at(DONE, a_path, b_path, url, **options)  # type: ignore[arg-type]
    segments = os.listdir(tmp_path / "c" / journal.SEGMENTS_NAME)
    assert len(segments) > DONE
    assert tw.matmul(a_path, b_path, url, **options).resumed == DONE
    assert_product(zarr.open_array(url, mode="r")[...], a, b)


def abandoned(held: locks.Lease) -> None:
    """As its process ends."""
    held._ended.set()
    held._thread.join()
    locks._held.discard(held._token)


@pytest.mark.more
def test_two_runs_do_not_write_to_one_url(factors: Factors, tmp_path: Path, options: dict[str, Any]) -> None:
    _, _, a_path, b_path = factors
    url = f"bucket://{tmp_path}/c"

    def begin_another(event: Event) -> None:
        if isinstance(event, UnitDone):
            tw.matmul(a_path, b_path, url, **options)

    with pytest.raises(OutputExistsError, match=rf"another run is writing {url} \(process {os.getpid()} on"):
        tw.matmul(a_path, b_path, url, listener=begin_another, **options)
    assert tw.matmul(a_path, b_path, url, **options).resumed


@pytest.mark.parametrize("alive", [True, False])
def test_a_run_of_another_host_is_waited_for_by_a_beat(alive: bool, tmp_path: Path) -> None:
    there = objects.objects_at(f"bucket://{tmp_path}/c")
    beat = {"host": "elsewhere", "machine": "another", "pid": 1, "token": "t"}
    there.put(locks.LEASE_NAME, json.dumps(beat | {"beat": 1}).encode())
    said = list[str]()

    def wait(seconds: float) -> None:
        assert seconds > locks.BEAT_SECONDS
        if alive:
            there.put(locks.LEASE_NAME, json.dumps(beat | {"beat": 2}).encode())

    if alive:
        with pytest.raises(OutputExistsError, match=r"another run is writing .*process 1 on elsewhere"):
            locks.take_lease(there, said.append, wait)
    else:
        locks.take_lease(there, said.append, wait).release()
        assert there.get(locks.LEASE_NAME) is None
    assert "waiting 25 s to see whether" in said[0]
