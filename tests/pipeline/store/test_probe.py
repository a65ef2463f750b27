"""Stores are tried before they are trusted: by pickled copies, on workers of this process and of others."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.local import LocalFileSystem
from zarr.storage import FsspecStore, LocalStore, LoggingStore, MemoryStore, WrapperStore

from tests.pipeline.store.odd_stores import ElsewhereStore, OddStore, scatter
from tilewright.pipeline.cluster.answers import ask_all, can_work
from tilewright.pipeline.errors import ClusterError, StoreError
from tilewright.pipeline.store import probe as store_probe
from tilewright.pipeline.store.probe import (
    KEY_START,
    Ask,
    check_read_alike,
    check_shared_output,
    check_written_alike,
    shared_inputs,
)

VALUES = np.arange(12.0).reshape(3, 4)


@pytest.fixture(params=["this process", "worker processes"])
def ask(request: pytest.FixtureRequest) -> Ask:
    name = {"this process": "client", "worker processes": "processes"}[request.param]
    return partial(ask_all, request.getfixturevalue(name))


def array_in(store: Any, path: str = "x") -> zarr.Array[Any]:
    array = zarr.create_array(store, name=path or None, shape=(3, 4), chunks=(2, 2), dtype="f8")
    array[:2] = VALUES[:2]
    return array


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def odd(folder: Path, fault: str, path: str = "x") -> zarr.Array[Any]:
    store = OddStore(folder, fault)
    array = array_in(store, path)
    store.arm()
    return array


def refusal(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises(StoreError) as raised:
        call(*arguments, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


LOST = {
    "emptied": "is not what worker .* has of it: at {}/zarr.json it has nothing, and this process [0-9a-f]+;",
    "unloadable": r"is not what worker .*: it cannot be unpickled there \(ImportError: no module named nobody\)",
    "drops": "is lost: worker .* wrote to its copy, and this process still has what was there before",
    "apart": "is lost: worker .* wrote to its copy, and this process still has what was there before",
    "chunks apart": "is lost: worker .* wrote to its copy, and this process still has what was there before",
    "closed": r"is lost: worker .* writes nothing: it cannot be used there \(PermissionError: 403 for [^ ]*\)",
    "sticky": "is lost: worker .* wrote to its copy, and this process still has what was there before",
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("fault", LOST)
@pytest.mark.parametrize("path", ["x", "group/x"])
def test_an_output_whose_writes_are_lost_is_refused_and_left_as_it_was(
    fault: str, path: str, ask: Ask, tmp_path: Path
) -> None:
    array = odd(tmp_path, fault, path)
    before = contents(tmp_path)
    told = refusal(check_written_alike, ask, array)
    assert told.startswith("output: ")
    assert f"/{path} in tests.pipeline.store.odd_stores.OddStore, in a tests" not in told, "it is named once"
    assert f"/{path} in tests.pipeline.store.odd_stores.OddStore" in told
    assert (
        "; give a path or a URL of storage that all workers share, or an array in a store whose pickled"
        in told
    )
    assert re.search(LOST[fault].format(path), told), told
    assert contents(tmp_path) == before


def test_an_output_that_takes_only_chunks_is_tried_by_one_put_back(ask: Ask, tmp_path: Path) -> None:
    array = odd(tmp_path / "a", "chunks")
    before = contents(tmp_path)
    assert check_written_alike(ask, array) == []
    assert contents(tmp_path) == before
    none = zarr.create_array(OddStore(tmp_path / "b", "chunks"), shape=(3, 4), chunks=(2, 2), dtype="f8")
    none.store.arm()  # type: ignore[attr-defined]
    assert check_written_alike(ask, none) == []
    assert set(contents(tmp_path / "b")) == {"zarr.json"}


STORES: dict[str, Callable[[Path], Any]] = {
    "its own": OddStore,
    "wrapped": lambda path: WrapperStore(LocalStore(path)),
    "logged": lambda path: LoggingStore(LocalStore(path), log_level="ERROR"),
    "fsspec's": lambda path: FsspecStore(
        AsyncFileSystemWrapper(LocalFileSystem(auto_mkdir=True), asynchronous=True), path=str(path)
    ),
}


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("path", ["", "group/x"])
def test_stores_that_share_pass_and_keep_nothing(kind: str, path: str, ask: Ask, tmp_path: Path) -> None:
    array = array_in(STORES[kind](tmp_path), path)
    before = contents(tmp_path)
    seen = []

    def watched(function: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        answers = ask(function, *arguments, **options)
        seen.append({name for name in contents(tmp_path) if KEY_START in name})
        return answers

    assert check_written_alike(watched, array) == []
    workers = len(ask(can_work))
    assert [len(names) for names in seen] == [0, workers, workers], "each worker has written, twice"
    assert all(name.startswith(path) for name in seen[1])
    assert contents(tmp_path) == before
    check_read_alike(ask, shared_inputs({"A": array}))


def test_a_local_path_needs_no_worker(tmp_path: Path) -> None:
    """However it is given: what is known of it costs nothing."""

    def nobody(*arguments: Any, **options: Any) -> dict[str, Any]:
        raise AssertionError("a worker was asked")

    array = array_in(LocalStore(tmp_path))
    assert check_written_alike(nobody, array) == []
    assert check_written_alike(nobody, tmp_path / "new") == []
    assert check_written_alike(nobody, f"file://{tmp_path}/new") == []
    check_read_alike(nobody, {"A": array, "X": array_in(MemoryStore())})


def test_a_local_store_whose_copy_is_another_folder_is_refused(ask: Ask, tmp_path: Path) -> None:
    array = array_in(ElsewhereStore(tmp_path))
    before = contents(tmp_path)
    match = f"{tmp_path}/x, in a tests.pipeline.store.odd_stores.ElsewhereStore, is not what worker"
    assert match in refusal(check_written_alike, ask, array)
    assert f"A: {match}" in refusal(check_read_alike, ask, {"A": array})
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ("emptied", "is not what worker .* has of it: at x/zarr.json it has nothing, and this process"),
        ("unloadable", "is not what worker .* has of it: it cannot be unpickled there"),
        ("other", "is not what worker .* has of it: at x/c/0/0 it has [0-9a-f]+, and this process [0-9a-f]+"),
    ],
)
def test_an_input_that_workers_do_not_have_is_refused(
    fault: str, match: str, ask: Ask, tmp_path: Path
) -> None:
    array = odd(tmp_path, fault)
    before = contents(tmp_path)
    told = refusal(check_read_alike, ask, {"A": array})
    assert told.startswith("A: /x in tests.pipeline.store.odd_stores.OddStore")
    assert re.search(match, told), told
    assert contents(tmp_path) == before


def test_what_cannot_be_pickled_is_refused_by_its_role(tmp_path: Path) -> None:
    array = odd(tmp_path, "locked")
    store = OddStore.__module__.replace(".", r"\.")
    match = rf"/x in {store}\.OddStore cannot be pickled for the workers \(TypeError: cannot pickle"
    assert re.match(f"B: {match}", refusal(shared_inputs, {"B": array}))
    assert re.match(f"output: {match}", refusal(check_shared_output, array))


def test_what_a_store_does_not_remove_is_told(ask: Ask, tmp_path: Path) -> None:
    left = check_written_alike(ask, odd(tmp_path, "keeps"))
    names = sorted(name for name in contents(tmp_path) if KEY_START in name)
    assert len(names) == len(left) == len(ask(can_work)) > 0
    for name, sentence in zip(names, sorted(left), strict=True):
        assert sentence.startswith(f"{name} in /x in tests.pipeline.store.odd_stores.OddStore")
        assert "PermissionError: this key may not delete" in sentence


@pytest.mark.parametrize("error", [ClusterError("the scheduler went away"), KeyboardInterrupt()])
def test_nothing_is_left_where_the_cluster_goes_away_meanwhile(
    error: BaseException, ask: Ask, tmp_path: Path
) -> None:
    array = array_in(STORES["wrapped"](tmp_path))
    before = contents(tmp_path)

    def failing(function: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        answers = ask(function, *arguments, **options)
        if function is store_probe.write_by_copy:
            assert contents(tmp_path) != before
            raise error
        return answers

    with pytest.raises(type(error)):
        check_written_alike(failing, array)
    assert contents(tmp_path) == before


def test_a_url_is_tried_before_anything_is_there(
    processes: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process has files of its own, as hosts have."""
    monkeypatch.setenv("SCATTERED", str(tmp_path))
    processes.run(scatter, str(tmp_path))
    told = refusal(check_written_alike, partial(ask_all, processes), "scattered://c.zarr")
    assert told.startswith(
        "output: what workers write to scattered://c.zarr, in a zarr.storage._fsspec.FsspecStore"
    )
    assert re.search("is lost: worker .* wrote to its copy, and this process has nothing", told), told
    assert contents(tmp_path) == {}
    told = refusal(check_written_alike, partial(ask_all, processes), "nobody-knows-this://c.zarr")
    assert told.startswith("output: cannot open nobody-knows-this://c.zarr: ")


def test_an_empty_array_has_no_chunk_to_be_tried_by(ask: Ask, tmp_path: Path) -> None:
    store = OddStore(tmp_path, "")
    array = zarr.create_array(store, shape=(0, 4), chunks=(2, 2), dtype="f8")
    store.arm()
    assert check_written_alike(ask, array) == []
    check_read_alike(ask, {"A": array})
