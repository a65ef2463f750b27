"""A worker that runs out of memory gets a smaller plan, once; what the failed one left is never taken for its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zarr
from distributed import Client
from fsspec import register_implementation
from fsspec.implementations.local import LocalFileSystem
from numba.cuda.cudadrv.driver import CudaAPIError

import tilewright as tw
from tests.peak_memory import grown_by, in_new_process
from tests.pipeline.worker.test_leftovers import Buffers, uncollected
from tests.workflows.products import (
    TIGHT,
    Stopped,
    assert_product,
    intercept_writes,
    numbers,
    put,
    stop_after,
)
from tilewright.kernels.gpu import memory
from tilewright.kernels.gpu.memory import peak_nbytes
from tilewright.kernels.numbers import format_nbytes
from tilewright.pipeline.errors import DeviceMemoryError, TaskError
from tilewright.pipeline.events import Event, Notice, WorkPlanned
from tilewright.pipeline.plan.product import PROCESS_NBYTES, MatmulPlan
from tilewright.pipeline.plan.told import Product
from tilewright.pipeline.product import ledger
from tilewright.pipeline.product import output as outputs
from tilewright.pipeline.store import arrays as store
from tilewright.pipeline.worker import engines, stream
from tilewright.pipeline.worker.units import HostUnit

__all__ = ["uncollected"]

Factors = tuple[np.ndarray, np.ndarray, Path, Path]


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Projected peaks of the plans for which an engine was made, in order."""
    peaks: list[int] = []
    original = stream.TileEngine.__init__

    def noting(engine: stream.TileEngine, product: Product, *others: Any) -> None:
        peaks.append(product.plan.device_peak_nbytes)
        original(engine, product, *others)

    monkeypatch.setattr(stream.TileEngine, "__init__", noting)
    return peaks


def refuse_buffers(patch: pytest.MonkeyPatch, when: Callable[[Product], bool]) -> None:
    """Let the host have no memory for the tiles of some plans; panels are there already."""
    original = HostUnit.tile_slots

    def tile_slots(unit: HostUnit) -> Any:
        if when(unit._product):
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(np, "empty", fail)
                return original(unit)
        return original(unit)

    def fail(*args: Any) -> None:
        raise MemoryError

    patch.setattr(HostUnit, "tile_slots", tile_slots)


def refuse_products(patch: pytest.MonkeyPatch, when: Callable[[Product, int], bool]) -> None:
    """Let the kernel have no memory for some plans, from the given count of panels on; as the driver would say it."""
    original = HostUnit.multiply
    count = iter(range(10**6))

    def multiply(unit: HostUnit, *args: Any, **options: Any) -> str:
        if when(unit._product, next(count)):
            raise CudaAPIError(2, "Call to cuLaunchKernel results in CUDA_ERROR_OUT_OF_MEMORY")
        return original(unit, *args, **options)

    patch.setattr(HostUnit, "multiply", multiply)


def notices(events: list[Event]) -> list[str]:
    return [event.message for event in events if isinstance(event, Notice)]


def test_a_smaller_plan_takes_over(
    factors: Factors,
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    events: list[Event],
    tried: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b, a_path, b_path = factors
    first = tw.plan_matmul(a_path, b_path, device="cpu", device_memory=60_000)
    refuse_buffers(monkeypatch, lambda product: product.plan.device_peak_nbytes > 40_000)
    before = set(threading.enumerate())
    run = tw.matmul(
        a_path,
        b_path,
        tmp_path / "c",
        cluster=client,
        device="cpu",
        device_memory=60_000,
        listener=events.append,
    )
    assert run.plan.device_peak_nbytes <= first.device_peak_nbytes // 2
    assert run.plan.geometry != first.geometry
    assert set(tried) == {first.device_peak_nbytes, run.plan.device_peak_nbytes}
    # Every task that was under way may have tried once; none was tried again.
    assert tried.count(first.device_peak_nbytes) <= sum(client.nthreads().values()) + len(client.nthreads())
    assert_product(zarr.open_array(tmp_path / "c")[...], a, b)
    assert run.verification is not None
    assert run.verification.passed
    (said,) = [text for text in notices(events) if "ran out of memory" in text]
    assert format_nbytes(first.device_peak_nbytes) in said
    assert said.endswith(f"it goes on with one of {format_nbytes(run.plan.device_peak_nbytes)}")
    assert run.resumed == 0
    assert not outputs.partial_path(tmp_path / "c").exists()
    assert not list((tmp_path / "c").rglob(ledger.FILE_NAME))
    assert engines._engines == {}
    names = [thread.name for thread in set(threading.enumerate()) - before]
    assert not [name for name in names if name.startswith("tilewright-")], "the engines' threads have ended"


@pytest.mark.sample(1)
@pytest.mark.parametrize("most", [3, 14], ids=["few finished", "most finished"])
def test_the_next_plan_goes_on_with_the_tiles_of_the_failed_one(
    most: int,
    factors: Factors,
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    events: list[Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In smaller tiles that those are made of: no stored piece of C is written twice, but for those of tiles that were
    under way when it failed, on two threads."""
    a, b, a_path, b_path = factors
    first = tw.plan_matmul(a_path, b_path, device="cpu", device_memory=TIGHT)
    assert first.tile_count == 16
    written: list[tuple[int, int]] = []

    def note(top: int, left: int, data: np.ndarray) -> np.ndarray:
        written.append((top, left))
        return data

    def refuse(product: Product, count: int) -> bool:
        return (
            product.plan.device_peak_nbytes == first.device_peak_nbytes and count >= most * first.panel_count
        )

    intercept_writes(monkeypatch, note)
    refuse_products(monkeypatch, refuse)
    run = tw.matmul(
        a_path,
        b_path,
        tmp_path / "c",
        cluster=client,
        device="cpu",
        device_memory=TIGHT,
        listener=events.append,
    )
    begun, went_on = [event for event in events if isinstance(event, WorkPlanned) and event.name == "matmul"]
    assert (begun.done, begun.total) == (0, first.tile_count)
    assert went_on.done == run.resumed >= 1, "the failed plan had finished some"
    assert run.plan.device_peak_nbytes <= first.device_peak_nbytes // 2
    unit_rows, unit_columns = run.plan.c_unit
    assert len(set(written)) == (96 // unit_rows) * (64 // unit_columns)
    of_a_tile = (first.tile_rows // unit_rows) * (first.tile_columns // unit_columns)
    assert len(written) - len(set(written)) <= 2 * of_a_tile
    said = notices(events)
    assert any("a worker ran out of memory under a plan of" in text for text in said)
    assert any("which computes the rest in smaller ones of" in text for text in said)
    assert_product(zarr.open_array(tmp_path / "c")[...], a, b)


def test_no_smaller_plan_goes_on_where_its_bits_would_be_others(
    factors: Factors, client: Client, tmp_path: Path, small_chunks: None
) -> None:
    a, b, a_path, b_path = factors
    out = tmp_path / "c"
    first = tw.plan_matmul(a_path, b_path, device="cpu", device_memory=TIGHT)
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "same_bits": True, "device_memory": TIGHT}
    with pytest.MonkeyPatch.context() as patch:
        refuse_products(patch, lambda product, count: count >= 3 * first.panel_count)
        with pytest.raises(DeviceMemoryError, match=r"same_bits \(--same-bits\): an earlier run finished"):
            tw.matmul(a_path, b_path, out, **options)
    assert not out.exists()
    run = tw.matmul(a_path, b_path, out, **options)
    assert run.resumed >= 1
    assert run.plan.geometry == first.geometry
    assert_product(zarr.open_array(out)[...], a, b)


def test_a_second_failure_is_a_clear_error_and_leaves_nothing(
    factors: Factors,
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    events: list[Event],
    tried: list[int],
) -> None:
    a, b, a_path, b_path = factors
    out = tmp_path / "c"
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": 60_000}
    with pytest.MonkeyPatch.context() as patch:
        refuse_buffers(patch, lambda product: True)
        with pytest.raises(DeviceMemoryError) as caught:
            tw.matmul(a_path, b_path, out, listener=events.append, **options)
    says = str(caught.value)
    first, second = max(tried), min(tried)
    assert set(tried) == {first, second}, "two plans were tried, not three"
    assert second <= first // 2
    assert "KiB of host memory and" in says
    assert "are free" in says
    assert f"the plan took {format_nbytes(second)}" in says
    assert f"the plan before it took {format_nbytes(first)}" in says
    assert "--device-memory" in says
    assert not out.exists()
    assert not outputs.partial_path(out).exists(), "no tile was finished"
    assert engines._engines == {}
    tw.matmul(a_path, b_path, out, **options)
    assert_product(zarr.open_array(out)[...], a, b)


def test_under_a_limit_on_addresses_the_error_asks_to_raise_it(
    client: Client, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less memory for the plan would not help, and the host has enough."""
    path = put(tmp_path / "a", numbers(rng, (16, 16), "f8"))
    monkeypatch.setattr(memory, "allowed_nbytes", lambda: 2**20)
    refuse_buffers(monkeypatch, lambda product: True)
    with pytest.raises(
        DeviceMemoryError, match=r"\(ulimit -v\), and has 0 B of those left: raise that"
    ) as caught:
        tw.matmul(path, path, tmp_path / "c", cluster=client, device="cpu")
    assert "--device-memory" not in str(caught.value)


def test_where_half_is_too_little_the_first_failure_is_the_error(
    client: Client, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path / "a", numbers(rng, (16, 16), "f8"))
    out = zarr.create_array(tmp_path / "c", shape=(16, 16), chunks=(16, 16), dtype="f8", fill_value=7)
    refuse_buffers(monkeypatch, lambda product: True)
    with pytest.raises(
        DeviceMemoryError, match=r"no plan of half of that will do: no tile fits.*--device-memory"
    ):
        tw.matmul(path, path, out, cluster=client, device="cpu", device_memory=3000)
    assert (out[...] == 7).all()


@pytest.mark.more
def test_an_array_that_is_written_in_place_is_written_again(
    factors: Factors, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, a_path, b_path = factors
    out = zarr.create_array(tmp_path / "c", shape=(96, 64), chunks=(16, 16), dtype="f4", fill_value=99)
    refuse_products(
        monkeypatch, lambda product, count: count >= 2 and product.plan.device_peak_nbytes > TIGHT // 2
    )
    run = tw.matmul(a_path, b_path, out, cluster=client, device="cpu", device_memory=TIGHT)
    assert run.plan.device_peak_nbytes <= TIGHT // 2
    assert_product(out[...], a, b)


class Remote(LocalFileSystem):  # type: ignore[misc]
    """Local files by URLs that nobody takes for local ones."""

    protocol = "tilewright-remote"

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return super()._strip_protocol(path.removeprefix(f"{cls.protocol}://"))


def test_a_url_that_the_failed_plan_began_is_replaced(
    factors: Factors, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_implementation(Remote.protocol, Remote, clobber=True)
    monkeypatch.setitem(fsspec.config.conf, Remote.protocol, {"auto_mkdir": True})
    a, b, a_path, b_path = factors
    refuse_buffers(monkeypatch, lambda product: product.plan.device_peak_nbytes > 100_000)
    url = f"{Remote.protocol}://{tmp_path / 'c.zarr'}"
    assert store.local_path(url) is None
    run = tw.matmul(a_path, b_path, url, cluster=client, device="cpu", device_memory=200_000)
    assert run.plan.device_peak_nbytes <= 100_000
    assert_product(zarr.open_array(tmp_path / "c.zarr")[...], a, b)


def test_parts_of_k_that_run_out_of_memory(
    client: Client,
    tmp_path: Path,
    rng: np.random.Generator,
    split_k: None,
    monkeypatch: pytest.MonkeyPatch,
    tried: list[int],
) -> None:
    a, b = numbers(rng, (20, 3000), "f4"), numbers(rng, (3000, 30), "f4")
    paths = put(tmp_path / "a", a, (20, 50)), put(tmp_path / "b", b, (50, 30))
    first = tw.plan_matmul(*paths, device="cpu", device_memory=400_000)
    assert first.k_parts > 1
    refuse_products(monkeypatch, lambda product, count: count > 1 and product.plan.geometry == first.geometry)
    run = tw.matmul(*paths, tmp_path / "c", cluster=client, device="cpu", device_memory=400_000)
    assert run.plan.device_peak_nbytes <= first.device_peak_nbytes // 2
    assert len(set(tried)) == 2
    assert_product(zarr.open_array(tmp_path / "c")[...], a, b)


def _refuse_in_this_process(dask_worker: Any) -> None:
    """What the first plan takes, of one tile where the process has one core, and of two."""
    dask_worker.refusing = pytest.MonkeyPatch()
    refuse_buffers(dask_worker.refusing, lambda product: product.plan.device_peak_nbytes > 40_000)


def _refuse_no_longer(dask_worker: Any) -> None:
    dask_worker.refusing.undo()


@pytest.mark.more
def test_the_error_crosses_from_a_worker_process(
    factors: Factors, processes: Client, tmp_path: Path, events: list[Event]
) -> None:
    a, b, a_path, b_path = factors
    processes.run(_refuse_in_this_process)
    try:
        run = tw.matmul(
            a_path,
            b_path,
            tmp_path / "c",
            cluster=processes,
            device="cpu",
            device_memory=200_000,
            listener=events.append,
        )
    finally:
        processes.run(_refuse_no_longer)
    assert any("ran out of memory" in text for text in notices(events))
    assert run.plan.device_peak_nbytes <= 40_000
    assert_product(zarr.open_array(tmp_path / "c")[...], a, b)


@pytest.mark.sample(2)
@pytest.mark.parametrize("failing", ["load", "multiply", "save", None])
def test_a_run_that_ends_early_leaves_no_buffer(
    failing: str | None,
    factors: Factors,
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    uncollected: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the next run is planned for what memory is free; where nothing fails, it is stopped."""
    _, _, a_path, b_path = factors
    buffers = Buffers(monkeypatch)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError("injected: the disk is gone")

    if failing is not None:
        monkeypatch.setattr(HostUnit, failing, refuse)
    with pytest.raises(TaskError if failing else Stopped) as caught:
        tw.matmul(
            a_path,
            b_path,
            tmp_path / "c",
            cluster=client,
            device="cpu",
            device_memory=TIGHT,
            listener=stop_after(2),
        )
    assert buffers.alive() == 0
    assert caught.value


def multiplied_in(folder: Path, device_memory: int) -> tuple[MatmulPlan, int, int]:
    """Multiply what is stored in a folder, in this process; the plan, how far the process grew, and its peak."""
    small = put(folder / "small", np.ones((600, 600), "f4"), (300, 300))
    runs: list[tw.MatmulRun] = []
    with tw.open_cluster("local") as client:
        options: dict[str, Any] = {"cluster": client, "device": "cpu"}
        tw.matmul(small, small, folder / "d", **options)  # starts the libraries, and BLAS on all cores

        def run() -> None:
            paths = folder / "a", folder / "b", folder / "c"
            runs.append(tw.matmul(*paths, device_memory=device_memory, **options))

        nbytes = grown_by(run)
    return runs[0].plan, nbytes, peak_nbytes()


@pytest.mark.more
def test_a_worker_s_process_stays_within_the_plan(tmp_path: Path, rng: np.random.Generator) -> None:
    """Compressed chunks, so that what decodes and encodes them counts too; and no room for errors as large as the
    process itself: it had its libraries before."""
    sides = {"a": (4000, 300), "b": (300, 4000)}
    for name, shape in sides.items():
        put(
            tmp_path / name,
            rng.integers(0, 9, shape).astype("f4"),
            (1000, 300) if name == "a" else (300, 1000),
        )
    plan, nbytes, peak = in_new_process(multiplied_in, tmp_path, 100 * 2**20)
    buffers = plan.host_peak_nbytes - PROCESS_NBYTES
    assert 75 * 2**20 < buffers < 200 * 2**20
    assert plan.device_peak_nbytes / 2 < nbytes < buffers
    assert peak <= plan.host_peak_nbytes


def test_a_reduction_that_runs_out_of_memory_says_so(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilewright.pipeline import dot

    def refuse(*args: Any, **options: Any) -> None:
        raise CudaAPIError(2, "Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY")

    vector = zarr.create_array(tmp_path / "x", shape=(100,), chunks=(10,), dtype="f8", fill_value=1)
    monkeypatch.setattr(dot, "dot", refuse)
    with pytest.raises(DeviceMemoryError, match=r"ran out of memory 4 times.*cuMemAlloc"):
        tw.dot(vector, vector, cluster=client, device="cpu")
