"""Open arrays and URLs whose workers' copies are something else: whole jobs refuse them before the first tile, by one
line that names them, and leave nothing behind."""

from __future__ import annotations

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
from tests.pipeline.store.odd_stores import OddStore, scatter
from tilewright.pipeline.errors import OutputError, StoreError
from tilewright.pipeline.events import Caution, Event, UnitDone, WorkPlanned

A = np.arange(16.0).reshape(4, 4)


@pytest.fixture(params=["this process", "worker processes"])
def cluster(request: pytest.FixtureRequest) -> Client:
    name = {"this process": "client", "worker processes": "processes"}[request.param]
    found: Client = request.getfixturevalue(name)
    return found


def odd(folder: Path, fault: str, values: np.ndarray) -> zarr.Array[Any]:
    """An array in a store with that fault, which the store has from here on."""
    store = OddStore(folder, fault)
    array = zarr.create_array(store, shape=values.shape, chunks=(2,) * values.ndim, dtype=values.dtype)
    array[...] = values
    store.arm()
    return array


def stored(path: Path, values: np.ndarray) -> Path:
    zarr.create_array(path, data=values, chunks=(2,) * values.ndim)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "fault", ["emptied", "unloadable", "locked", "drops", "apart", "chunks apart", "closed", "sticky"]
)
def test_a_product_is_not_written_to_what_loses_it(fault: str, cluster: Client, tmp_path: Path) -> None:
    a, out = stored(tmp_path / "a", A), odd(tmp_path / "c", fault, np.full((4, 4), 7.0))
    before, events = contents(tmp_path), list[Event]()
    for verify in (True, False):
        with pytest.raises(
            StoreError, match=r"^output: .*/ in tests\.pipeline\.store\.odd_stores\.OddStore"
        ) as raised:
            tw.matmul(a, a, out, cluster=cluster, device="cpu", verify=verify, listener=events.append)
        assert "\n" not in str(raised.value)
    assert contents(tmp_path) == before
    assert not any(isinstance(event, WorkPlanned | UnitDone) for event in events)


@pytest.mark.sample(4)
@pytest.mark.parametrize("fault", ["emptied", "unloadable", "locked", "other"])
def test_what_workers_would_read_otherwise_is_no_input(fault: str, cluster: Client, tmp_path: Path) -> None:
    a, v = stored(tmp_path / "a", A), stored(tmp_path / "v", np.ones(4))
    c = stored(tmp_path / "c", A @ A)
    bad, vector = odd(tmp_path / "bad", fault, A), odd(tmp_path / "vector", fault, np.ones(4))
    before = contents(tmp_path)
    store = OddStore.__module__.replace(".", r"\.") + r"\.OddStore"
    match = rf": / in {store} (is not what worker|cannot be pickled for the workers)"
    for role, factors in {"A": (bad, a), "B": (a, bad)}.items():
        with pytest.raises(StoreError, match=f"^{role}{match}"):
            tw.matmul(*factors, tmp_path / "new", cluster=cluster, device="cpu")
        with pytest.raises(StoreError, match=f"^{role}{match}"):
            tw.verify(*factors, c, cluster=cluster)
    with pytest.raises(StoreError, match=f"^C{match}"):
        tw.verify(a, a, bad, cluster=cluster)
    for role, vectors in {"X": (vector, v), "Y": (v, vector)}.items():
        with pytest.raises(StoreError, match=f"^{role}{match}"):
            tw.dot(*vectors, cluster=cluster, device="cpu")
    assert contents(tmp_path) == before


@pytest.mark.sample(2)
@pytest.mark.parametrize("fault", ["", "chunks", "keeps"])
def test_a_store_of_the_users_own_that_is_shared_is_filled(
    fault: str, cluster: Client, tmp_path: Path
) -> None:
    a, out = odd(tmp_path / "a", "", A), odd(tmp_path / "c", fault, np.zeros((4, 4)))
    before, events = set(contents(tmp_path / "c")), list[Event]()
    run = tw.matmul(a, a, out, cluster=cluster, device="cpu", listener=events.append)
    assert run.verification is not None
    assert run.verification.passed
    np.testing.assert_array_equal(out[...], A @ A)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "c")[...], A @ A)
    told = [event.message for event in events if isinstance(event, Caution)]
    left = {name for name in contents(tmp_path / "c") if name.startswith("tilewright-probe-")}
    assert len(told) == len(left)
    assert bool(left) == (fault == "keeps")
    assert set(contents(tmp_path / "c")) - left >= before - {"c/0/0"}


def test_an_output_that_is_open_for_reading_is_refused(client: Client, tmp_path: Path) -> None:
    a, store = stored(tmp_path / "a", A), OddStore(tmp_path / "c")
    zarr.create_array(store, shape=(4, 4), chunks=(2, 2), dtype="f8")
    before = contents(tmp_path)
    out = zarr.open_array(tmp_path / "c", mode="r")
    with pytest.raises(OutputError, match=r"output: .*c is open for reading only; open it with mode='r\+'"):
        tw.matmul(a, a, out, cluster=client, device="cpu")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", ["simplecache", "filecache"])
def test_a_product_goes_through_a_cache_to_where_it_belongs(
    kind: str, processes: Client, tmp_path: Path
) -> None:
    """Not into the cache alone, nor is what that has kept of before read in its place.

    The test itself reads one chunk at a time: fsspec's caches lose track of files that several threads fetch at once.
    """
    cache = tmp_path / "cache"
    one_at_a_time = {"async.concurrency": 1}
    files = fsspec.filesystem(kind, fs=LocalFileSystem(auto_mkdir=True), cache_storage=str(cache))
    out = zarr.create_array(
        FsspecStore(AsyncFileSystemWrapper(files, asynchronous=True), path=str(tmp_path / "c")),
        data=np.full((4, 4), 7.0),
        chunks=(2, 2),
    )
    assert isinstance(out, zarr.Array)
    with zarr.config.set(one_at_a_time):
        assert (out[...] == 7).all()
    assert contents(cache)
    a = stored(tmp_path / "a", A)
    run = tw.matmul(a, a, out, cluster=processes, device="cpu")
    assert run.verification is not None
    assert run.verification.passed
    with zarr.config.set(one_at_a_time):
        np.testing.assert_array_equal(out[...], A @ A)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "c")[...], A @ A)
    assert not any("tilewright-probe-" in name for name in contents(tmp_path / "c"))


def test_a_url_of_files_that_each_host_has_for_itself_is_no_output(
    processes: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCATTERED", str(tmp_path / "hosts"))
    processes.run(scatter, str(tmp_path / "hosts"))
    a = stored(tmp_path / "a", A)
    for overwrite in (False, True):
        with pytest.raises(
            StoreError, match=r"^output: what workers write to scattered://c\.zarr.* has nothing"
        ):
            tw.matmul(a, a, "scattered://c.zarr", cluster=processes, device="cpu", overwrite=overwrite)
    assert contents(tmp_path / "hosts") == {}
