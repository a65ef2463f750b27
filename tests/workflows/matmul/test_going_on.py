"""A stopped run goes on: with which tiles it does, and after what it starts anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import zarr
from distributed import Client

import tilewright as tw
from tests.workflows.products import (
    TIGHT,
    Stopped,
    assert_product,
    numbers,
    put,
    stop_after,
    stop_at,
    zipped,
)
from tilewright.pipeline.errors import (
    OutputExistsError,
)
from tilewright.pipeline.events import Event, Notice, UnitDone, WorkPlanned
from tilewright.pipeline.product import job, ledger
from tilewright.pipeline.product import output as outputs
from tilewright.pipeline.sealed_lines import sealed
from tilewright.pipeline.worker.survey import survey


def test_a_stopped_run_goes_on_where_it_stood(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    small_chunks: None,
    events: list[Event],
) -> None:
    a, b, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    stop_at(3, a_path, b_path, out, cluster=without_dask, device="cpu", device_memory=TIGHT)
    assert not out.exists()
    assert outputs.partial_path(out).exists()
    run = tw.matmul(
        a_path, b_path, out, cluster=without_dask, device="cpu", device_memory=TIGHT, listener=events.append
    )
    assert run.resumed == 3
    computed = [event for event in events if isinstance(event, UnitDone) and event.name == "matmul"]
    assert len(computed) == run.plan.tile_count - 3
    planned = next(event for event in events if isinstance(event, WorkPlanned))
    assert (planned.done, planned.total) == (3, run.plan.tile_count)
    assert_product(zarr.open_array(out)[...], a, b)
    assert not outputs.partial_path(out).exists()
    assert not list(out.rglob(ledger.FILE_NAME)), "the record has no business in the finished product"


def test_a_finished_product_is_accepted_where_that_is_asked_for(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    small_chunks: None,
    events: list[Event],
) -> None:
    """As a later try of a batch job meets it, whose node failed just after C had its name."""
    a, _, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    asked = {"cluster": without_dask, "device": "cpu", "device_memory": TIGHT}
    tw.matmul(a_path, b_path, out, **asked)
    before = {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
    with pytest.raises(OutputExistsError, match="exists"):
        tw.matmul(a_path, b_path, out, **asked)
    with dask.config.set({"tilewright.accept-finished": True}):
        run = tw.matmul(a_path, b_path, out, **asked, listener=events.append)
        assert run.resumed == run.plan.tile_count
        assert run.verification is not None
        assert run.verification.passed
        assert any("this very product" in event.message for event in events if isinstance(event, Notice))
        other = put(tmp_path / "other.zarr", a + 1, (17, 13))
        with pytest.raises(OutputExistsError, match="exists"):
            tw.matmul(other, b_path, out, **asked)
    assert {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()} == before
    assert not outputs.partial_path(out).exists()


@pytest.mark.parametrize("verify", [True, False])
def test_where_an_earlier_run_finished_every_tile_no_rest_is_spoken_of(
    verify: bool,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    events: list[Event],
) -> None:
    _, _, a, b = factors
    more: dict[str, Any] = {"cluster": without_dask, "device": "cpu", "verify": verify}
    stop_at(1, a, b, tmp_path / "c", **more)
    assert tw.matmul(a, b, tmp_path / "c", listener=events.append, **more).resumed == 1
    left = "only the check is left" if verify else "none is left to compute"
    assert Notice(f"an earlier run finished 1 of 1 tile; {left}") in events


def test_a_growing_array_of_another_dtype_is_not_gone_on_with(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    small_chunks: None,
    events: list[Event],
) -> None:
    a, b, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    stop_at(3, a_path, b_path, out, cluster=without_dask, device="cpu", device_memory=TIGHT)
    metadata = outputs.partial_path(out) / "zarr.json"
    metadata.write_text(metadata.read_text().replace('"float32"', '"float64"'))
    run = tw.matmul(
        a_path, b_path, out, cluster=without_dask, device="cpu", device_memory=TIGHT, listener=events.append
    )
    assert run.resumed == 0
    assert_product(zarr.open_array(out)[...], a, b)
    assert any("no more what it was; it starts anew" in e.message for e in events if isinstance(e, Notice))


def test_a_record_of_tiles_outside_the_plan_is_not_gone_on_with(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    small_chunks: None,
    events: list[Event],
) -> None:
    a, b, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    options: dict[str, Any] = {"cluster": without_dask, "device": "cpu", "device_memory": TIGHT}
    stop_at(3, a_path, b_path, out, **options)
    tile_count = tw.plan_matmul(a_path, b_path, device="cpu", device_memory=TIGHT).tile_count
    with (outputs.partial_path(out) / ledger.FILE_NAME).open("a") as record:
        record.write(sealed({"tile": tile_count, "objects": []}) + "\n")
    run = tw.matmul(a_path, b_path, out, listener=events.append, **options)
    assert (run.resumed, run.plan.tile_count) == (0, tile_count)
    assert any("it starts anew" in event.message for event in events if isinstance(event, Notice))
    assert_product(zarr.open_array(out)[...], a, b)


@pytest.mark.sample(1)
@pytest.mark.parametrize("other", ["went on", "began anew", "finished"])
def test_what_counts_is_the_record_once_the_output_is_locked(
    other: str,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between reading the record and locking the output another run may have come and gone."""
    a, b, a_path, b_path = factors
    out, twice = tmp_path / "c.zarr", put(tmp_path / "twice.zarr", 2 * b)
    options: dict[str, Any] = {
        "cluster": without_dask,
        "device": "cpu",
        "device_memory": TIGHT,
        "verify": False,
    }
    stop_at(3, a_path, b_path, out, **options)
    real = outputs.resume_output

    def late(path: Path, overwrite: bool) -> outputs.Output | None:
        monkeypatch.setattr(job, "resume_output", real)
        stop_at(5, a_path, b_path if other == "went on" else twice, out, **options)
        return real(path, overwrite)

    def last(path: Path, overwrite: bool) -> outputs.Output | None:
        monkeypatch.setattr(job, "resume_output", real)
        tw.matmul(a_path, b_path, out, **options)
        return real(path, overwrite)

    monkeypatch.setattr(job, "resume_output", last if other == "finished" else late)
    if other == "finished":
        with pytest.raises(OutputExistsError, match=r"c\.zarr exists; choose another path"):
            tw.matmul(a_path, b_path, out, **options)
    else:
        run = tw.matmul(a_path, b_path, out, **options)
        assert run.resumed == (8 if other == "went on" else 0)
    assert_product(zarr.open_array(out)[...], a, b)
    assert not outputs.partial_path(out).exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("memory", "pieces"), [(10**6, 1), (2_000, 3)], ids=["more", "less"])
def test_a_stopped_run_goes_on_with_other_memory(
    memory: int,
    pieces: int,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    small_chunks: None,
) -> None:
    a, b, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    stop_at(3, a_path, b_path, out, cluster=without_dask, device="cpu", device_memory=TIGHT)
    begun = zarr.open_array(outputs.partial_path(out)).chunks
    anew = tw.matmul(
        a_path, b_path, tmp_path / "d.zarr", cluster=without_dask, device="cpu", device_memory=memory
    )
    assert anew.plan.c_unit != begun, "a C begun with this memory has other chunks"
    run = tw.matmul(a_path, b_path, out, cluster=without_dask, device="cpu", device_memory=memory)
    assert run.resumed == 3 * pieces
    assert zarr.open_array(out).chunks == begun
    assert all(
        tile % unit == 0 for tile, unit in zip(run.plan.geometry, zarr.open_array(out).chunks, strict=False)
    ), "no chunk has two writers"
    assert_product(zarr.open_array(out)[...], a, b)


def test_a_changed_input_starts_anew(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    small_chunks: None,
    events: list[Event],
) -> None:
    _, b, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    stop_at(3, a_path, b_path, out, cluster=without_dask, device="cpu", device_memory=TIGHT)
    changed = np.full((96, 80), 2, "f4")
    zarr.open_array(a_path, mode="r+")[...] = changed
    run = tw.matmul(
        a_path, b_path, out, cluster=without_dask, device="cpu", device_memory=TIGHT, listener=events.append
    )
    assert run.resumed == 0
    told = [event.message for event in events if isinstance(event, Notice)]
    assert any("A holds other numbers in" in text and "3 of 3 finished tiles" in text for text in told)
    assert_product(zarr.open_array(out)[...], changed, b)


@pytest.mark.sample(1)
@pytest.mark.parametrize("transposed", ["transpose_a", "transpose_b"])
def test_a_stopped_product_is_not_gone_on_with_as_that_of_a_transpose(
    transposed: str, without_dask: Client, tmp_path: Path, small_chunks: None, rng: np.random.Generator
) -> None:
    """Of square factors all else is the same: the files, the plan and the growing array."""
    a, b = numbers(rng, (64, 64), "f4"), numbers(rng, (64, 64), "f4")
    a_path, b_path, out = put(tmp_path / "a", a), put(tmp_path / "b", b), tmp_path / "c"
    options: dict[str, Any] = {
        "cluster": without_dask,
        "device": "cpu",
        "device_memory": TIGHT,
        "verify": False,
    }
    stop_at(3, a_path, b_path, out, **options)
    run = tw.matmul(a_path, b_path, out, **options | {transposed: True})
    assert run.resumed == 0
    expected = (a.T, b) if transposed == "transpose_a" else (a, b.T)
    assert_product(zarr.open_array(out)[...], *expected)


def test_what_is_asked_for_decides_whether_a_run_goes_on(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Precision and dtype, and not the device: a CPU goes on with a GPU's tiles, whatever precision was asked for."""
    *_, a_path, b_path = factors
    (facts,) = survey(without_dask, "cpu")[:1]
    digests: list[str] = []

    def stop(stopped: job.Job, *_: Any, **__: Any) -> Any:
        digests.append(stopped.inputs.digest)
        raise Stopped

    monkeypatch.setattr(job, "_attempt", stop)

    def digest(device: str, **options: Any) -> str:
        monkeypatch.setattr(job, "survey", lambda *_, **__: [replace(facts, device=device)])
        with pytest.raises(Stopped):
            tw.matmul(a_path, b_path, tmp_path / "c.zarr", cluster=without_dask, **options)
        return digests.pop()

    requests: list[dict[str, Any]] = [{}, {"precision": "tf32"}, {"precision": "split"}, {"dtype": "f8"}]
    on_gpu = [digest("cuda", **request) for request in requests]
    assert on_gpu == [digest("cuda", **request) for request in requests]
    assert len({*on_gpu}) == len(requests)
    assert on_gpu == [digest("cpu", **request) for request in requests]


@pytest.mark.more
def test_tiles_of_another_archive_are_replaced(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    small_chunks: None,
    events: list[Event],
) -> None:
    a, b, _, b_path = factors
    first, second = zipped(tmp_path / "1.zip", a), zipped(tmp_path / "2.zip", -a)
    out = tmp_path / "c.zarr"
    options: dict[str, Any] = {
        "cluster": without_dask,
        "device": "cpu",
        "device_memory": TIGHT,
        "verify": False,
    }
    with pytest.raises(Stopped):
        tw.matmul(first, b_path, out, listener=stop_after(3), **options)
    run = tw.matmul(second, b_path, out, listener=events.append, **options)
    assert run.resumed == 0
    told = [event.message for event in events if isinstance(event, Notice)]
    assert any("it lies elsewhere" in text for text in told)
    assert any("A holds other numbers in" in text for text in told)
    assert_product(zarr.open_array(out)[...], -a, b)


def test_no_resume_computes_every_tile(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    small_chunks: None,
    events: list[Event],
) -> None:
    """In a new array: what the tiles of the run before held is wrong, and as long as it should be."""
    a, b, a_path, b_path = factors
    a_path = put(tmp_path / "plain.zarr", a, compressors=None)
    out = tmp_path / "c.zarr"
    options: dict[str, Any] = {
        "cluster": without_dask,
        "device": "cpu",
        "device_memory": TIGHT,
        "verify": False,
    }
    stop_at(3, a_path, b_path, out, **options)
    chunks = [path for path in (outputs.partial_path(out) / "c").rglob("*") if path.is_file()]
    for chunk in chunks:
        chunk.write_bytes(np.full(chunk.stat().st_size // 4, 77, "f4").tobytes())
    run = tw.matmul(a_path, b_path, out, resume=False, listener=events.append, **options)
    assert run.resumed == 0
    computed = [event for event in events if isinstance(event, UnitDone) and event.name == "matmul"]
    assert len(computed) == run.plan.tile_count
    assert len(chunks) >= 3
    assert_product(zarr.open_array(out)[...], a, b)
