"""What tells inputs apart, however they are opened; and what does not."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
import zarr
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.implementations.zip import ZipFileSystem
from zarr.storage import FsspecStore, LoggingStore, ObjectStore, StorePath, ZipStore

from tilewright.pipeline.store.appearance import appearance_of
from tilewright.pipeline.store.arrays import open_array
from tilewright.pipeline.store.origin import Origin, is_same_array, origin_of


def pack(path: Path, value: float = 1) -> Path:
    with ZipStore(path, mode="w") as file:
        zarr.create_array(file, shape=(4, 4), chunks=(2, 2), dtype="f4")[...] = value
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


NAMES = ["zip://::{}.zip", "zip://::file://{here}/{}.zip", "zip://::simplecache::file://{here}/{}.zip"]


@pytest.mark.parametrize("name", NAMES)
def test_two_archives_are_told_apart_and_each_is_known_again(name: str, here: Path) -> None:
    """zarr gives both the same name."""
    one, other = (
        origin_of(open_array(name.format(pack(here / f"{stem}.zip").stem, here=here), ndim=2, role="A"))
        for stem in ("one", "other")
    )
    assert one.place != other.place
    assert (one.file, one.folder) == (str(here / "one.zip"), None)
    again = origin_of(open_array("zip://::one.zip", ndim=2, role="A"))
    assert again == one
    with ZipStore(here / "one.zip", mode="r") as file:
        assert origin_of(zarr.open_array(file, mode="r")).file == one.file


@pytest.mark.parametrize("name", [*NAMES, "file://{here}/{}", "{}"])
def test_the_same_array_is_known_by_its_place_and_metadata(name: str, here: Path) -> None:
    def opened(stem: str) -> zarr.Array[Any]:
        if "zip" in name:
            pack(here / f"{stem}.zip")
        else:
            zarr.create_array(here / stem, shape=(4, 4), chunks=(2, 2), dtype="f4", overwrite=True)
        return open_array(name.format(stem, here=here), ndim=2, role="A")

    one, other = opened("one"), opened("other")
    assert is_same_array(one, opened("one"))
    assert is_same_array(one, one)
    assert not is_same_array(one, other)


def test_other_metadata_in_the_same_place_are_another_array(here: Path) -> None:
    def made(**options: Any) -> zarr.Array[Any]:
        options = {"shape": (4, 4), "chunks": (2, 2), "dtype": "f4", "overwrite": True} | options
        return zarr.create_array(here / "x", **options)

    one = made(fill_value=float("nan"))
    assert is_same_array(one, made(fill_value=float("nan")))
    for options in ({"shape": (6, 4)}, {"dtype": "f8"}, {"chunks": (4, 2)}, {"fill_value": 1.0}):
        assert not is_same_array(one, made(**options))


def test_arrays_by_two_wrappers_may_differ(here: Path) -> None:
    """Who knows what a wrapper does to the bytes; one and the same gives the same."""
    one = zarr.create_array(here / "x", shape=(4, 4), chunks=(2, 2), dtype="f4")
    wrapped = [zarr.open_array(LoggingStore(one.store), path=one.path) for _ in range(2)]
    assert is_same_array(wrapped[0], zarr.open_array(wrapped[0].store, path=one.path))
    assert not is_same_array(*wrapped)
    assert not is_same_array(one, wrapped[0])


def test_two_arrays_of_one_store_differ(here: Path) -> None:
    group = zarr.create_group(here / "g")
    one, other = (group.create_array(name, shape=(4, 4), chunks=(2, 2), dtype="f4") for name in "ab")
    assert is_same_array(one, group["a"])
    assert not is_same_array(one, other)


@pytest.mark.parametrize("name", [*NAMES, "an open file"])
def test_an_archive_that_is_written_again_is_a_changed_input(name: str, here: Path) -> None:
    path = pack(here / "one.zip")

    def opened() -> zarr.Array[Any]:
        if name != "an open file":
            return open_array(name.format("one", here=here), ndim=2, role="A")
        archive = ZipFileSystem(fsspec.open(str(path)))
        return zarr.open_array(FsspecStore(AsyncFileSystemWrapper(archive, asynchronous=True)), mode="r")

    array = opened()
    before = appearance_of(array)
    assert appearance_of(opened()) == before
    pack(path, 2)
    os.utime(path, ns=(10**18, 10**18))
    assert appearance_of(array) != before


@pytest.mark.parametrize("how", ["by fsspec", "logged"])
def test_local_files_are_seen_however_they_are_opened(how: str, tmp_path: Path) -> None:
    made = zarr.create_array(tmp_path / "a", shape=(4, 4), chunks=(2, 2), dtype="f4")
    made[...] = 1
    store: Any = LoggingStore(made.store)
    if how == "by fsspec":
        store = FsspecStore(
            AsyncFileSystemWrapper(LocalFileSystem(), asynchronous=True), path=str(tmp_path / "a")
        )
    array = zarr.open_array(store, mode="r")
    assert origin_of(array) == origin_of(made)
    before = appearance_of(array), appearance_of(made)
    os.utime(tmp_path / "a" / "c" / "0" / "0", ns=(10**18, 10**18))
    assert appearance_of(array) != before[0]
    assert appearance_of(made) != before[1]


class Server(MemoryFileSystem):
    """Such as of S3: its options say which server, and who asks."""

    protocol = "server"

    def __init__(self, endpoint_url: str | None = None, **options: Any) -> None:
        super().__init__(**options)


def of_server(*arguments: Any, path: str = "/bucket/a", **options: Any) -> Origin:
    server = AsyncFileSystemWrapper(Server(*arguments, **options), asynchronous=True)
    store = FsspecStore(server, path=path)
    return origin_of(zarr.create_array(store, shape=(2, 2), chunks=(1, 1), dtype="f4", overwrite=True))


ONE = "https://one.example"
TWO = "https://two.example"


def test_two_servers_are_told_apart() -> None:
    origins = [
        of_server(),
        of_server(path="/bucket/b"),
        of_server(ONE),
        of_server(TWO),
        of_server(client_kwargs={"endpoint_url": ONE}),
        of_server(client_kwargs={"endpoint_url": TWO}),
        of_server(url="https://one.example/get?file=a"),
        of_server(url="https://one.example/get?file=b"),
    ]
    assert len({json.dumps(origin.place) for origin in origins}) == len(origins)
    assert of_server(ONE) == of_server(endpoint_url=ONE)
    assert all((origin.file, origin.folder) == (None, None) for origin in origins)


AZURE = "https://one.example/a?{}sv=2025&st=1&se={}&sp=r&sig={}"
AMAZON = "https://one.example/a?{}X-Amz-Date={}&X-Amz-Security-Token=hush&X-Amz-Signature={}"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"key": "hush1", "secret": "hush2"}, {"key": "hush3", "secret": "hush4"}),
        ({"token": "hush1"}, {"token": "hush2"}),
        (
            {"client_kwargs": {"aws_session_token": "hush1"}},
            {"client_kwargs": {"aws_session_token": "hush2"}},
        ),
        ({"headers": {"Authorization": "hush1"}}, {"headers": {"Authorization": "hush2"}}),
        ({"username": "u", "password": "hush1"}, {"username": "u", "password": "hush2"}),
        ({"session": object()}, {"session": object()}),
        ({"url": "ftp://u:hush1@one.example/a"}, {"url": "ftp://u:hush2@one.example/a"}),
        ({"url": AZURE.format("", 1, "hush1")}, {"url": AZURE.format("", 2, "hush2")}),
        ({"url": AMAZON.format("", 1, "hush1")}, {"url": AMAZON.format("", 2, "hush2")}),
    ],
    ids=lambda options: next(iter(options)),
)
def test_credentials_are_new_in_every_run_and_tell_nothing_apart(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    origin = of_server(ONE, **first)
    assert origin == of_server(ONE, **second)
    assert origin != of_server(TWO, **first)
    assert "hush" not in json.dumps(origin.place)


def test_a_signed_url_still_names_its_file() -> None:
    for form in (AZURE, AMAZON):
        one, other = (of_server(url=form.format(name, 1, "hush")) for name in ("file=a&", "file=b&"))
        assert one != other


def test_archives_on_two_servers_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("server", Server, clobber=True)
    Server().pipe("/a.zip", pack(tmp_path / "a.zip").read_bytes())

    def opened(**options: Any) -> Origin:
        archive = ZipFileSystem("/a.zip", target_protocol="server", target_options=options)
        store = FsspecStore(AsyncFileSystemWrapper(archive, asynchronous=True))
        return origin_of(zarr.open_array(store, mode="r"))

    one = opened(endpoint_url=ONE, secret="hush1")
    assert one == opened(endpoint_url=ONE, secret="hush2") != opened(endpoint_url=TWO, secret="hush1")
    assert (one.file, one.folder) == (None, None)
    assert "hush" not in json.dumps(one.place)


def of_object_store(name: str, **facts: Any) -> Origin:
    """As zarr opens one of obstore's stores, which need not be installed."""
    kind = type(name, (), {"__module__": "obstore.store", "__repr__": lambda self: name})
    keeper = kind()
    for fact, value in facts.items():
        setattr(keeper, fact, value)
    store = object.__new__(ObjectStore)
    store.store = keeper
    inner = copy.copy(zarr.create_array({}, shape=(2, 2), chunks=(1, 1), dtype="f4")._async_array)
    object.__setattr__(inner, "store_path", StorePath(store, "a"))
    return origin_of(zarr.Array(inner))


def test_object_stores_are_told_apart(tmp_path: Path) -> None:
    one = of_object_store("S3Store", config={"endpoint": ONE, "secret_access_key": "hush1"})
    assert one == of_object_store("S3Store", config={"endpoint": ONE, "secret_access_key": "hush2"})
    assert one != of_object_store("S3Store", config={"endpoint": TWO, "secret_access_key": "hush1"})
    assert "hush" not in json.dumps(one.place)
    assert of_object_store("LocalStore", prefix=str(tmp_path)).folder == str(tmp_path / "a")


def test_references_are_told_apart() -> None:
    """By fsspec's reference file system, what an array holds stands in a mapping."""
    metadata = {
        "zarr.json": json.dumps(
            zarr.create_array(
                {}, shape=(1, 2), chunks=(1, 2), dtype="u1", compressors=None
            ).metadata.to_dict()
        )
    }
    places = []
    for chunk in ("ab", "cd", "ab"):
        fs = fsspec.filesystem("reference", fo=metadata | {"token/c/0/0": chunk}, asynchronous=True)
        places.append(json.dumps(origin_of(zarr.open_array(FsspecStore(fs), mode="r")).place, default=repr))
    assert places[0] == places[2] != places[1]
