"""Finished tiles that are lost, damaged or cannot be read when a run goes on or is checked."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client

import tilewright as tw
from tests.workflows.products import (
    TIGHT,
    assert_product,
    intercept_writes,
    put,
    stop_at,
    stop_before_the_check,
)
from tilewright.pipeline.check import verify as check
from tilewright.pipeline.errors import (
    DamagedError,
    StoreError,
    VerificationError,
)
from tilewright.pipeline.events import Event, Notice, WorkPlanned
from tilewright.pipeline.product import job
from tilewright.pipeline.product import output as outputs
from tilewright.pipeline.product.request import Request
from tilewright.pipeline.transfer import checksum


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", ["record", "metadata", "chunk"])
def test_one_failed_read_loses_no_finished_tile(
    what: str,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
    events: list[Event],
) -> None:
    a, b, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    growing = outputs.partial_path(out)
    options: dict[str, Any] = {"cluster": without_dask, "device": "cpu", "device_memory": TIGHT}
    stop_at(3, a_path, b_path, out, **options)
    real = {
        "read_bytes": Path.read_bytes,
        "open_array": zarr.open_array,
        "open_file": checksum.open_file,
    }

    def failing(name: str, path: Any, *arguments: Any, **more: Any) -> Any:
        if str(path).startswith(str(growing)):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real[name](path, *arguments, **more)

    with monkeypatch.context() as patch:
        owner, name = {
            "record": (Path, "read_bytes"),
            "metadata": (zarr, "open_array"),
            "chunk": (checksum, "open_file"),
        }[what]
        patch.setattr(owner, name, lambda *arguments, **more: failing(name, *arguments, **more))
        with pytest.raises(StoreError, match=r"c\.zarr\.partial.*Stale file handle; .*--no-resume"):
            tw.matmul(a_path, b_path, out, **options)
        if what == "record":
            job.plan_only(Request(a_path, b_path, out, listener=events.append, **options))
            assert any("this would be refused: output: cannot read" in str(event) for event in events)
    assert tw.matmul(a_path, b_path, out, **options).resumed == 3
    assert_product(zarr.open_array(out)[...], a, b)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("damage", "compressed", "verify"),
    [  # every pair of any two
        (damage, compressed, bool(place % 2) == compressed)
        for place, damage in enumerate(["gone", "short", "empty", "half"])
        for compressed in (False, True)
    ],
)
def test_a_finished_tile_whose_chunk_is_lost_is_computed_again(
    damage: str,
    compressed: bool,
    verify: bool,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    small_chunks: None,
    events: list[Event],
) -> None:
    """Read as it is it would be zeros, which only a verification notices, or keep every later run from its end."""
    a, b, a_path, b_path = factors
    compressors = zarr.codecs.ZstdCodec() if compressed else None  # as A is, so is C
    zarr.create_array(
        a_path, shape=a.shape, chunks=(16, 16), dtype=a.dtype, compressors=compressors, overwrite=True
    )[...] = a
    out = tmp_path / "c.zarr"
    options: dict[str, Any] = {
        "cluster": without_dask,
        "device": "cpu",
        "device_memory": TIGHT,
        "verify": False,
    }
    stop_at(3, a_path, b_path, out, **options)
    chunk = next(path for path in sorted((outputs.partial_path(out) / "c").rglob("*")) if path.is_file())
    data = chunk.read_bytes()
    if damage == "gone":
        chunk.unlink()
    else:
        chunk.write_bytes(data[: {"short": -1, "empty": 0, "half": len(data) // 2}[damage]])
    run = tw.matmul(a_path, b_path, out, listener=events.append, **options | {"verify": verify})
    assert run.resumed == 2
    assert any(isinstance(event, Notice) and "1 tile of an earlier run" in event.message for event in events)
    assert_product(zarr.open_array(out)[...], a, b)


def test_a_changed_bit_that_no_check_would_notice_is_put_right(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    small_chunks: None,
) -> None:
    """The least one of a float: an error far below what rounding may add up to."""
    *_, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    options: dict[str, Any] = {"cluster": without_dask, "device": "cpu", "device_memory": TIGHT}
    stop_at(3, a_path, b_path, out, **options)
    chunk = next(path for path in sorted((outputs.partial_path(out) / "c").rglob("*")) if path.is_file())
    data = chunk.read_bytes()
    chunk.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    run = tw.matmul(a_path, b_path, out, **options)
    assert run.resumed == 2
    assert (out / chunk.relative_to(outputs.partial_path(out))).read_bytes() == data
    assert tw.audit(out).passed


@pytest.mark.sample(1)
@pytest.mark.parametrize("vectors", ["along", "sent"])
def test_finished_tiles_that_cannot_be_read_are_computed_again(
    vectors: str,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
    events: list[Event],
) -> None:
    """They are damaged behind the look that a run has at what it keeps."""
    if vectors == "sent":
        monkeypatch.setattr(check, "SENT_NBYTES", 0)
    a, b, a_path, b_path = factors
    a_path, out = put(tmp_path / "coded.zarr", a, compressors=zarr.codecs.ZstdCodec()), tmp_path / "c.zarr"
    options: dict[str, Any] = {"cluster": without_dask, "device": "cpu", "device_memory": TIGHT}
    chunks = stop_before_the_check(a_path, b_path, out, **options)

    def damage(event: Event) -> None:
        events.append(event)
        if [one.name for one in events if isinstance(one, WorkPlanned)] == ["matmul", "verify"]:
            for chunk in (chunks[0], chunks[-1]):
                chunk.write_bytes(bytes(chunk.stat().st_size))

    run = tw.matmul(a_path, b_path, out, listener=damage, **options)
    told = [event.message for event in events if isinstance(event, Notice)]
    assert any("2 of 16 tiles are bad" in text and "are computed once more" in text for text in told)
    assert run.resumed == run.plan.tile_count - 2
    tiles = list(run.plan.tiles())
    assert run.write_nbytes == sum(run.plan.tile_write_nbytes(tile) for tile in (tiles[0], tiles[-1]))
    assert_product(zarr.open_array(out)[...], a, b)


@pytest.mark.sample(1)
@pytest.mark.parametrize("vectors", ["along", "sent"])
@pytest.mark.parametrize("role", "ab")
def test_a_factor_the_check_cannot_read_is_named_and_tiles_are_kept(
    role: str,
    vectors: str,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B is read for what is sent along with the rest of the check, A by that."""
    if vectors == "sent":
        monkeypatch.setattr(check, "SENT_NBYTES", 0)
    a, b, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    options: dict[str, Any] = {"cluster": without_dask, "device": "cpu", "device_memory": TIGHT}
    folder = {"a": a_path, "b": b_path}[role]
    victim = max((path for path in (folder / "c").rglob("*") if path.is_file()), key=str)
    good, times = victim.read_bytes(), victim.stat()

    def damage_before_the_check(event: Event) -> None:
        if isinstance(event, WorkPlanned) and event.name == "verify":
            victim.write_bytes(good[:-1])

    with pytest.raises(DamagedError, match=rf"chunk \(.* of .*{folder.name} cannot be read") as raised:
        tw.matmul(a_path, b_path, out, listener=damage_before_the_check, **options)
    assert raised.type is DamagedError
    victim.write_bytes(good)
    os.utime(victim, ns=(times.st_atime_ns, times.st_mtime_ns))  # a factor that was written since is another
    run = tw.matmul(a_path, b_path, out, **options)
    assert run.resumed == run.plan.tile_count
    assert_product(zarr.open_array(out)[...], a, b)


def test_a_chunk_restored_during_the_search_is_told_by_its_first_error(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    small_chunks: None,
) -> None:
    a, b, a_path, b_path = factors
    a_path, out = put(tmp_path / "coded.zarr", a, compressors=zarr.codecs.ZstdCodec()), tmp_path / "c.zarr"
    options: dict[str, Any] = {"cluster": without_dask, "device": "cpu", "device_memory": TIGHT}
    chunk, *_ = stop_before_the_check(a_path, b_path, out, **options)
    data = chunk.read_bytes()

    def restore(event: Event) -> None:
        if isinstance(event, WorkPlanned) and event.name in ("verify", "audit"):
            chunk.write_bytes(bytes(len(data)) if event.name == "verify" else data)

    with pytest.raises(DamagedError, match="cannot be read") as caught:
        tw.matmul(a_path, b_path, out, listener=restore, **options)
    assert "second time" not in str(caught.value)
    assert caught.value.__cause__ is not caught.value, "who goes to the root of it would never arrive"
    run = tw.matmul(a_path, b_path, out, **options)
    assert run.resumed == run.plan.tile_count
    assert_product(zarr.open_array(out)[...], a, b)


def test_a_wrong_product_is_never_published(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, _, a_path, b_path = factors

    def lying(top: int, left: int, data: np.ndarray) -> np.ndarray:
        if top == 32 and left == 16:
            data = data.copy()
            data[3, 5] += 1
        return data

    with monkeypatch.context() as patch:
        intercept_writes(patch, lying)
        with pytest.raises(VerificationError, match=r"row 35, columns"):
            tw.matmul(a_path, b_path, tmp_path / "c", cluster=without_dask, device="cpu", device_memory=TIGHT)
    assert not (tmp_path / "c").exists()
    run = tw.matmul(a_path, b_path, tmp_path / "c", cluster=without_dask, device="cpu", device_memory=TIGHT)
    assert run.resumed == 0, "tiles of a product that failed its check are not taken over"
