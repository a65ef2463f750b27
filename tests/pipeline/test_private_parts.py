"""What is used of other libraries that they do not promise to keep: each is as the code that uses it takes it to be."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zarr
from distributed.threadpoolexecutor import ThreadPoolExecutor, secede, thread_state
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from zarr.core.sync import sync
from zarr.storage import LocalStore, LoggingStore, MemoryStore, StorePath, ZipStore

from tilewright.pipeline.worker import tasks


def pool_of_dask(folder: Path) -> bool:
    """A thread leaves it by being taken out of its set, and ends once it is not to proceed; one that cannot be started
    is in the set by then."""

    def look() -> bool:
        threads = thread_state.executor._threads
        return isinstance(threads, set) and len(threads) == 1 and thread_state.proceed is True

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(look).result(60)
    source = inspect.getsource(ThreadPoolExecutor._adjust_thread_count)
    leaving = inspect.getsource(secede)
    return (
        found
        and source.index("_threads.add(t)") < source.index("t.start()")
        and leaving.index("proceed = False") < leaving.index("_threads.remove(")
    )


def array_of_zarr(folder: Path) -> bool:
    """An array is made of an asynchronous one, whose copy may be given another place."""
    array = zarr.create_array(MemoryStore(), name="a", shape=(3,), dtype="i4")
    other = LocalStore(folder)
    inner = copy.copy(array._async_array)
    object.__setattr__(inner, "store_path", StorePath(other, "b"))
    moved: zarr.Array[Any] = zarr.Array(inner)
    return (
        moved.store is other
        and moved.path == "b"
        and moved.shape == (3,)
        and isinstance(array.store, MemoryStore)
    )


def loop_of_zarr(folder: Path) -> bool:
    return sync(MemoryStore().exists("a")) is False


def zip_of_zarr(folder: Path) -> bool:
    return [ZipStore(folder / "a.zip", mode=mode)._zmode for mode in ("w", "r", "a")] == ["w", "r", "a"]


def wrapper_of_zarr(folder: Path) -> bool:
    store = MemoryStore()
    return LoggingStore(store)._store is store


def folder_of_fsspec(folder: Path) -> bool:
    return DirFileSystem("/top", LocalFileSystem())._join("a/b") == "/top/a/b"


@pytest.mark.parametrize(
    ("part", "looks", "user"),
    [
        ("distributed's ThreadPoolExecutor._threads, thread_state.proceed", pool_of_dask, "tasks._stay"),
        ("zarr.Array._async_array, and its store_path", array_of_zarr, "store.in_store"),
        ("zarr.core.sync.sync", loop_of_zarr, "region_read._check_not_missed"),
        ("zarr's ZipStore._zmode", zip_of_zarr, "store.zip_mode"),
        ("zarr's WrapperStore._store", wrapper_of_zarr, "store.unwrapped"),
        ("fsspec's DirFileSystem._join", folder_of_fsspec, "store.beneath"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_what_libraries_do_not_promise_is_still_there(
    part: str, looks: Callable[[Path], bool], user: str, tmp_path: Path
) -> None:
    try:
        found: Any = looks(tmp_path)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    assert found is True, (
        f"{part}: not as before ({found}); look at pipeline/{user} before this version of it is taken"
    )


@pytest.mark.parametrize("state", [SimpleNamespace(), SimpleNamespace(executor=SimpleNamespace())])
def test_where_dasks_pool_is_another_one_the_error_is_that_there_is_no_thread(
    state: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(tasks, "secede", refuse)
    monkeypatch.setattr(tasks, "thread_state", state)
    monkeypatch.setattr(tasks, "get_worker", lambda: SimpleNamespace(state=SimpleNamespace(nthreads=1)))
    with pytest.raises(RuntimeError, match="can't start"):
        tasks.make_room(4)
