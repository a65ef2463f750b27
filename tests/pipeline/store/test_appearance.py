"""How inputs look from outside: what a change of their numbers leaves behind is seen, and what is none is not."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.memory import MemoryFileSystem
from zarr.storage import FsspecStore, MemoryStore, ZipStore

from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.product.inputs import Fingerprint, fingerprint
from tilewright.pipeline.store import appearance
from tilewright.pipeline.store.appearance import appearance_of


def test_the_fingerprint_sees_a_zip_file_that_was_written_again(tmp_path: Path) -> None:
    """Its metadata are the same, and tiles of both would make up one product."""
    path = tmp_path / "a.zip"

    def seen(value: int) -> Fingerprint:
        with ZipStore(path, mode="w") as file:
            zarr.create_array(file, shape=(4, 4), chunks=(2, 2), dtype="f4")[...] = value
        os.utime(path, ns=(value, value))
        with ZipStore(path, mode="r") as file:
            array = zarr.open_array(file, mode="r")
            assert fingerprint(array, array, {}) == fingerprint(array, array, {})
            return fingerprint(array, array, {})

    assert seen(1) != seen(2)
    with ZipStore(path, mode="r") as file:
        array = zarr.open_array(file, mode="r")
        path.unlink()
        with pytest.raises(StoreError, match=r"cannot look at .*a\.zip"):
            fingerprint(array, array, {})


def test_the_fingerprint_sees_what_decides_the_bytes(tmp_path: Path) -> None:
    def array(name: str, **options: Any) -> zarr.Array[Any]:
        made = zarr.create_array(
            tmp_path / name, shape=(4, 4), chunks=(2, 2), dtype="f4", overwrite=True, **options
        )
        made[...] = 1
        return made

    a, b = array("a"), array("b")
    base = fingerprint(a, b, {"precision": "full"})
    assert fingerprint(a, b, {"precision": "full"}) == base
    assert fingerprint(a, b, {"precision": "tf32"}) != base
    assert fingerprint(b, a, {"precision": "full"}) != base
    a[0, 0] = 5
    assert fingerprint(a, b, {"precision": "full"}) != base
    odd = array("no UTF-8: \udcff")
    assert fingerprint(odd, b, {}) != fingerprint(array("no UTF-8: \udcfe"), b, {})


def test_the_input_that_changed_is_known(tmp_path: Path) -> None:
    arrays = [
        zarr.create_array(tmp_path / name, shape=(4, 4), chunks=(2, 2), dtype="f4", fill_value=1)
        for name in "ab"
    ]
    a, b = fingerprint(*arrays, {"precision": "full"}).inputs
    assert fingerprint(*arrays, {"precision": "full"}).inputs == (a, b)
    arrays[1][0, 0] = 5
    left, right = fingerprint(*arrays, {"precision": "full"}).inputs
    assert left == a
    assert right != b
    arrays[0][0, 0] = 5
    assert fingerprint(*arrays, {"precision": "full"}).inputs[0] != a


def test_tiles_of_two_releases_do_not_meet_in_one_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their kernels may sum in other orders."""
    a = zarr.create_array(tmp_path / "a", shape=(4, 4), chunks=(2, 2), dtype="f4")
    base = fingerprint(a, a, {})
    monkeypatch.setattr("tilewright.pipeline.product.inputs.__version__", "0.0.1")
    assert fingerprint(a, a, {}).digest != base.digest
    assert fingerprint(a, a, {}).inputs == base.inputs, "the inputs are what they were"


@pytest.fixture
def chunked(tmp_path: Path) -> zarr.Array[Any]:
    array = zarr.create_array(tmp_path / "a", shape=(4, 4), chunks=(2, 2), dtype="f4", compressors=None)
    array[...] = np.arange(16).reshape(4, 4)
    return zarr.open_array(tmp_path / "a", mode="r")


def test_the_fingerprint_sees_a_chunk_that_an_older_one_replaced(
    chunked: zarr.Array[Any], tmp_path: Path
) -> None:
    """Neither the number of files, nor their bytes, nor the newest time changes by that."""
    base, folder = fingerprint(chunked, chunked, {}), tmp_path / "a" / "c"
    old = tmp_path / "old"
    old.write_bytes(bytes(16))
    os.utime(old, ns=(10**18, 10**18))
    shutil.copy2(old, folder / "0" / "1")
    replaced = fingerprint(chunked, chunked, {})
    assert replaced != base
    (folder / "0" / "1").rename(tmp_path / "x")
    (folder / "1" / "1").rename(folder / "0" / "1")
    (tmp_path / "x").rename(folder / "1" / "1")
    assert fingerprint(chunked, chunked, {}) not in (base, replaced), "two chunks changed places"


@pytest.mark.parametrize("linked", ["c", "c/1", "c/1/0"])
def test_the_fingerprint_sees_what_links_lead_to(
    linked: str, chunked: zarr.Array[Any], tmp_path: Path
) -> None:
    inside, outside = tmp_path / "a" / linked, tmp_path / "other disk"
    inside.rename(outside)
    inside.symlink_to(outside)
    base = fingerprint(chunked, chunked, {})
    assert fingerprint(chunked, chunked, {}) == base
    os.utime(tmp_path / "a" / "c" / "1" / "0", ns=(10**18, 10**18))
    assert fingerprint(chunked, chunked, {}) != base


def test_the_fingerprint_of_links_in_a_circle_has_an_end(chunked: zarr.Array[Any], tmp_path: Path) -> None:
    folder = tmp_path / "a" / "c"
    for number in range(8):  # paths that go through all of them would be too many
        (folder / "0" / f"up{number}").symlink_to(folder)
        (folder / "1" / f"over{number}").symlink_to("../0")
    base = fingerprint(chunked, chunked, {})
    assert fingerprint(chunked, chunked, {}) == base
    os.utime(folder / "1" / "1", ns=(10**18, 10**18))
    assert fingerprint(chunked, chunked, {}) != base


@pytest.mark.parametrize("lost", ["link", "file", "folder"])
def test_what_vanishes_from_an_input_changes_its_fingerprint(
    lost: str, chunked: zarr.Array[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that leads nowhere, and what goes away while it is looked at, are as good as chunks never written."""
    base, folder = fingerprint(chunked, chunked, {}), tmp_path / "a" / "c"
    if lost == "link":
        (folder / "1" / "0").unlink()
        (folder / "1" / "0").symlink_to("nowhere")
        dangling = fingerprint(chunked, chunked, {})
        assert dangling == fingerprint(chunked, chunked, {}) != base
        return
    scandir = os.scandir

    def vanishing(path: str) -> Any:
        with scandir(path) as listing:
            entries = list(listing)
        if lost == "file" and str(path).endswith("c/1"):
            (folder / "1" / "0").unlink(missing_ok=True)
        if lost == "folder" and str(path).endswith("/a/c"):
            shutil.rmtree(folder / "1", ignore_errors=True)
        return nullcontext(entries)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert fingerprint(chunked, chunked, {}) != base


def test_an_input_that_cannot_be_looked_at_is_named(chunked: zarr.Array[Any], tmp_path: Path) -> None:
    victim = tmp_path / "a" / "c" / "1" / "0"
    victim.unlink()
    victim.symlink_to("0")  # to itself
    with pytest.raises(StoreError, match=r"cannot look at .*a/c/1/0: Too many levels.*read every folder"):
        fingerprint(chunked, chunked, {})


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_attributes_and_strays_do_not_change_how_an_array_looks(zarr_format: Any, tmp_path: Path) -> None:
    array = zarr.create_array(
        tmp_path / "a", shape=(4, 4), chunks=(2, 2), dtype="f4", zarr_format=zarr_format, fill_value=3
    )
    array[...] = 1
    base = appearance_of(array)
    folder = next(
        path for path in (tmp_path / "a").rglob("*") if path.is_file() and path.name[0] == "0"
    ).parent
    for name in (".nfs00001", "0~", "0.0.bak", ".0.swp", "zarr.json.draft"):
        (tmp_path / "a" / name).write_text("x")
        (folder / name).write_text("x")
    (folder / ".snapshot").mkdir()
    (folder / ".snapshot" / "0").write_text("x")
    array.attrs["units"] = "m"
    os.utime(next((tmp_path / "a").glob("*zarr*")), ns=(10**18, 10**18))
    assert appearance_of(array) == appearance_of(zarr.open_array(tmp_path / "a", mode="r")) == base
    document = tmp_path / "a" / ("zarr.json" if zarr_format == 3 else ".zarray")
    document.write_text(document.read_text().replace('"fill_value": 3', '"fill_value": 4'))
    now = appearance_of(array)
    assert base.differs_in(now) == ["its metadata are others"], "though it was opened before"
    document.write_text("{")
    assert appearance_of(array).metadata not in (base.metadata, now.metadata)
    document.unlink()
    assert appearance_of(array).metadata not in (base.metadata, now.metadata)


def test_chunks_of_a_separator_of_their_own_are_seen(tmp_path: Path) -> None:
    for number, encoding in enumerate(
        [
            {"name": "default", "separator": "."},
            {"name": "default", "separator": "/"},
            {"name": "v2", "separator": "."},
            {"name": "v2", "separator": "/"},
        ]
    ):
        array: zarr.Array[Any] = zarr.create_array(
            tmp_path / str(number), shape=(4, 4), chunks=(2, 2), dtype="f4", chunk_key_encoding=encoding
        )
        array[...] = 1
        base = appearance_of(array)
        chunk = max(path for path in (tmp_path / str(number)).rglob("*1") if path.is_file())
        os.utime(chunk, ns=(10**18, 10**18))
        assert base.differs_in(appearance_of(array)) == ["its files have other names, sizes or times"], (
            encoding
        )


class TaggedFiles(MemoryFileSystem):
    """A server as of S3, which gives every object a tag."""

    protocol = "tagged"
    store: dict[str, Any] = {}  # noqa: RUF012 -- fsspec's own way: one for all of the class
    listings = 0
    fails = False

    def info(self, path: str, **options: Any) -> Any:
        facts = super().info(path, **options)
        if facts["type"] == "file":
            facts["ETag"] = str(hash(bytes(self.store[self._strip_protocol(path)].getbuffer())))
        return facts

    def find(
        self, path: str, maxdepth: Any = None, withdirs: bool = False, detail: bool = False, **_: Any
    ) -> Any:
        if TaggedFiles.fails:
            raise PermissionError("no lists for you")
        TaggedFiles.listings += 1
        return {name: self.info(name) for name in super().find(path, maxdepth, withdirs)}


@pytest.fixture
def tagged(monkeypatch: pytest.MonkeyPatch) -> zarr.Array[Any]:
    monkeypatch.setattr(TaggedFiles, "store", {})
    monkeypatch.setattr(TaggedFiles, "pseudo_dirs", [""])
    monkeypatch.setattr(TaggedFiles, "listings", 0)
    monkeypatch.setattr(TaggedFiles, "fails", False)
    store = FsspecStore(AsyncFileSystemWrapper(TaggedFiles(), asynchronous=True), path="/bucket")
    array = zarr.create_array(store, name="a", shape=(4, 4), chunks=(2, 2), dtype="f4", compressors=None)
    array[...] = 1
    return array


def test_a_remote_array_is_known_by_the_tags_of_its_objects(tagged: zarr.Array[Any]) -> None:
    base = appearance_of(tagged)
    tagged[...] = 1
    assert appearance_of(tagged) == base, "the same bytes have the same tags"
    TaggedFiles().pipe_file("/bucket/a/c/notes.txt", b"x")
    assert appearance_of(tagged) == base
    tagged[3, 3] = 2
    assert base.differs_in(appearance_of(tagged)) == ["its files have other names, sizes or times"]
    assert TaggedFiles.listings == 4


def test_of_a_large_remote_array_only_the_metadata_s_tag_is_asked_for(
    tagged: zarr.Array[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appearance, "MOST_LISTED", 3)
    base = appearance_of(tagged)
    tagged[3, 3] = 2
    assert appearance_of(tagged) == base
    assert TaggedFiles.listings == 0
    tagged.attrs["written"] = "again"
    assert base.differs_in(appearance_of(tagged)) == ["its files have other names, sizes or times"]


def test_a_server_without_tags_or_lists_gives_no_look(
    tagged: zarr.Array[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    without = appearance_of(zarr.create_array(MemoryStore(), shape=(4, 4), chunks=(2, 2), dtype="f4"))
    monkeypatch.setattr(TaggedFiles, "fails", True)
    assert appearance_of(tagged).files == without.files
    monkeypatch.setattr(TaggedFiles, "info", MemoryFileSystem.info)
    assert appearance_of(tagged).files == without.files
