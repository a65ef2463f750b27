"""Nothing counts as on disk before it has been forced there."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client

import tilewright as tw
from tilewright.pipeline.cluster.heartbeats import heartbeats_of, listened_to
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.product import execute
from tilewright.pipeline.product import output as outputs
from tilewright.pipeline.product.durability import Durability, Settled, sync_many
from tilewright.pipeline.product.ledger import FILE_NAME, Stored
from tilewright.pipeline.transfer import files


@pytest.fixture
def synced(forced_to_disk: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are forced to disk, in order; those of records with the names of the tiles in them."""
    found: list[str] = []
    real = os.fsync

    def noting(descriptor: int) -> None:
        real(descriptor)
        found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if found[-1].endswith(FILE_NAME):
            tiles = Path(found[-1]).read_text().count('{"tile"')
            found[-1] += f" {tiles}"

    monkeypatch.setattr(os, "fsync", noting)
    return found


def multiplied(client: Client, folder: Path, out: Any, **options: Any) -> None:
    rng = np.random.default_rng(3)
    for name in "ab":
        array = zarr.create_array(
            folder / name, shape=(64, 64), chunks=(32, 32), dtype="f4", compressors=None
        )
        array[...] = rng.random((64, 64))
    tw.matmul(folder / "a", folder / "b", out, cluster=client, device="cpu", **options)


def test_chunks_and_folders_are_on_disk_before_tiles_count_and_c_is_named(
    client: Client, tmp_path: Path, synced: list[str]
) -> None:
    out = tmp_path / "new" / "deep" / "c.zarr"
    multiplied(client, tmp_path, out)
    growing = outputs.partial_path(out)
    chunks = [path for path in (out / "c").rglob("*") if path.is_file()]
    assert chunks
    inside = [growing / path.relative_to(out) for path in chunks]
    needed = {
        str(path) for chunk in inside for path in (chunk, *chunk.parents) if path.is_relative_to(growing)
    }
    counted = next(place for place, path in enumerate(synced) if path.endswith(f"{FILE_NAME} 1"))
    assert needed <= set(synced[:counted])
    made = {str(tmp_path), str(tmp_path / "new")}
    assert made <= set(synced[:counted]), "folders that were made for C"
    # Without its metadata, and the growing folder's name, whoever goes on would find no array, and start anew.
    assert {str(growing / "zarr.json"), str(out.parent)} <= set(synced[:counted])
    assert {str(growing / name) for name in ("zarr.json", outputs.CHECKSUMS_NAME)} <= set(synced[counted:])
    assert str(out.parent) in synced[counted:], "its name comes last"


def test_without_durability_no_chunk_is_forced_to_disk(
    client: Client, tmp_path: Path, synced: list[str]
) -> None:
    multiplied(client, tmp_path, tmp_path / "c.zarr", durability="none")
    assert not [path for path in synced if "/c/" in path]
    assert tw.audit(tmp_path / "c.zarr").passed


def test_what_the_disk_does_not_take_does_not_count(tmp_path: Path) -> None:
    settled: list[Any] = []
    lost: list[Any] = []

    def broken(worker: str, paths: Sequence[str]) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Durability(broken, settled.extend, lost.extend) as durability:
        durability.add((1, Stored()), "inproc://here", [str(tmp_path / "chunk")])
        with pytest.raises(
            StoreError, match=r"cannot be forced to disk: .*Input/output error.*--durability none"
        ):
            durability.finish()
    assert settled == []
    assert lost == [(1, Stored())], "the next run would find in memory what is not on the disk"


def test_a_batch_is_all_that_came_while_the_last_was_forced_to_disk() -> None:
    begun, go_on = Event(), Event()
    batches: list[list[int]] = []

    def slow(worker: str, paths: Sequence[str]) -> None:
        begun.set()
        assert go_on.wait(10)

    lost: list[Any] = []

    def settle(tiles: Sequence[Settled]) -> None:
        batches.append([index for index, _ in tiles])

    with Durability(slow, settle, lost.extend) as durability:
        durability.add((0, Stored()), "inproc://here", ["chunk"])
        assert begun.wait(10)
        for index in (1, 2, 3):
            durability.add((index, Stored()), "inproc://here", ["chunk"])
        go_on.set()
        durability.finish()
    assert batches == [[0], [1, 2, 3]]
    assert lost == []


def test_missing_files_are_left_out_and_unreadable_folders_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c").mkdir()
    sync_many(str(tmp_path), [str(tmp_path / "c" / "gone")])
    everything: list[bool] = []
    real = os.open

    def refusing(path: Any, flags: int, *more: Any, **others: Any) -> int:
        if os.fspath(path) == str(tmp_path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, flags, *more, **others)

    monkeypatch.setattr(os, "open", refusing)
    monkeypatch.setattr(os, "sync", lambda: everything.append(True))
    files.sync_folder(tmp_path)
    assert everything == [True]


def test_a_product_in_place_of_another_ends_the_other_s_record(client: Client, tmp_path: Path) -> None:
    """Its checksums would make an audit take the new one for damaged."""
    multiplied(client, tmp_path, tmp_path / "c.zarr")
    assert (tmp_path / "c.zarr" / outputs.CHECKSUMS_NAME).exists()
    (tmp_path / "more").mkdir()
    multiplied(client, tmp_path / "more", zarr.open_array(tmp_path / "c.zarr", mode="r+"), transpose_a=True)
    assert tw.audit(tmp_path / "c.zarr").passed


def test_a_tile_that_may_be_stored_twice_is_forced_to_disk_at_the_end(
    client: Client, tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunk may have taken the place of one that had been forced already."""
    real = execute._tile_results

    def overtaking(
        client: Client, product: Any, tiles: Any, left_behind: dict[str, set[int]], **options: Any
    ) -> Any:
        for index, report in real(client, product, tiles, left_behind, **options):
            if index == 0:
                left_behind["tcp://192.0.2.9:1"] = {index}
            yield index, report

    monkeypatch.setattr(execute, "_tile_results", overtaking)
    out = tmp_path / "c.zarr"
    multiplied(client, tmp_path, out)
    growing = outputs.partial_path(out)
    times = [
        synced.count(str(growing / path.relative_to(out)))
        for path in (out / "c").rglob("*")
        if path.is_file()
    ]
    assert 2 in times


def test_a_silent_scheduler_is_known_where_tiles_are_forced_to_disk(client: Client) -> None:
    """A question from there would else be waited for as long as the scheduler stands still."""
    heard: list[Any] = []

    def sync(worker: str, paths: Sequence[str]) -> None:
        heard.append(heartbeats_of(client))

    with listened_to(client, print) as heartbeats:
        with Durability(sync, lambda tiles: None, lambda tiles: None) as durability:
            durability.add((0, Stored()), "inproc://here", ["a file"])
            durability.finish()
        assert heard == [heartbeats]
