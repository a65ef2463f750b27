"""The whole job on real GPUs: the local and the cuda profile, memory within the plan, the same bits on any number."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import zarr
from distributed import Client, LocalCluster

import tilewright as tw
from tests.kernels import naive
from tests.workflows.products import assert_product, numbers, put, stop_at
from tests.workflows.test_inputs_by_content import (
    change_a_number,
    computed,
    copy_without_times,
    move,
    told,
    touch,
)
from tilewright.kernels.gpu.memory import peak_nbytes
from tilewright.kernels.numbers import format_nbytes
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.events import Event, Notice, UnitDone, WorkPlanned
from tilewright.pipeline.plan.transform import Epilogue, Transform, finished, transformed
from tilewright.pipeline.product.job import multiply
from tilewright.pipeline.product.request import Request
from tilewright.pipeline.worker.units import BLOCK_NBYTES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["i1", "i4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"])
@pytest.mark.parametrize(
    ("transpose_a", "transpose_b"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_the_stored_product_is_numpys(
    dtype: str, transpose_a: bool, transpose_b: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    a, b = numbers(rng, (515, 700), dtype), numbers(rng, (700, 390), dtype)
    out = zarr.create_array(
        tmp_path / "c",
        shape=(515, 390),
        chunks=(128, 100),
        dtype=naive.stored_dtype(dtype, dtype, 700),
        fill_value=99,
    )
    run = tw.matmul(
        put(tmp_path / "a", a.T if transpose_a else a, (200, 130)),
        put(tmp_path / "b", b.T if transpose_b else b, (150, 170)),
        out,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        cluster="local",
        device="cuda",
        device_memory=600_000 if dtype == "i1" else 250_000 * out.dtype.itemsize,
    )
    assert run.plan.tile_count > 1
    assert run.device != "CPU"
    with np.errstate(over="ignore", invalid="ignore"):
        assert_product(out[...], a, b)
    assert run.verification is not None
    assert run.verification.passed


@pytest.mark.parametrize("memory", [400_000, 10**8])
@pytest.mark.parametrize("kind", ["gram", "hermitian", "exact", "added"])
def test_factors_are_transformed_and_sums_finished(
    kind: str, memory: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    """From Zarr to Zarr, with memory for few panels and for all."""
    x = rng.integers(-3, 4, (700, 515)).astype("c8" if kind == "hermitian" else "i1")
    if kind == "hermitian":
        x += 1j * rng.integers(-3, 4, x.shape).astype("f4")
    paths = [put(tmp_path / "x", x, (150, 130))] * 2
    dtype = np.dtype("c8" if kind == "hermitian" else "f4")
    vector = rng.standard_normal(515)
    transform = Transform(dtype, column_offsets=vector.astype(dtype), missing=3)
    transforms: Any = (
        (replace(transform, conjugate=True), transform) if kind == "hermitian" else (transform,) * 2
    )
    epilogue, before, held = Epilogue(alpha=1 / 699, row_factors=vector, column_factors=vector), None, 0.0
    if kind in ("exact", "added"):
        transforms = None, None
        epilogue = replace(epilogue, row_offsets=vector)
    if kind == "added":
        held = rng.standard_normal((515, 515)).astype("f4")
        before, epilogue = put(tmp_path / "before", held, (100, 90)), replace(epilogue, beta=0.5)
    request = Request(
        *paths, tmp_path / "c", transpose_a=True, device="cuda", device_memory=memory, transforms=transforms,
        epilogue=epilogue, before=before,
    )  # fmt: skip
    run = multiply(request)
    assert run.device != "CPU"
    assert run.verification is not None
    assert run.verification.passed
    wide = np.dtype("c16" if kind == "hermitian" else "f8")
    left, right = (
        (x if one is None else transformed(one, x, slice(None), slice(None))).astype(wide)
        for one in transforms
    )
    wanted = finished(epilogue, left.T @ right, slice(None), slice(None), wide, held if before else None)
    c = zarr.open_array(tmp_path / "c")[...]
    assert run.plan.sum_dtype == ("int32" if kind in ("exact", "added") else dtype)
    np.testing.assert_allclose(c, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    if kind in ("gram", "hermitian"):
        np.testing.assert_array_equal(c, c.T.conj())


@pytest.mark.parametrize(
    ("a_dtype", "b_dtype", "c_dtype"),
    [
        ("i1", "i1", "int32"),
        ("u1", "u1", "int32"),
        ("u1", "i1", "int32"),
        ("i1", "i2", "int64"),
        ("i2", "i2", "int64"),
        ("u2", "u2", "int64"),
        ("i4", "i1", "int64"),
        ("u4", "u4", "uint64"),
    ],
)
def test_sums_of_small_integers_do_not_wrap(
    a_dtype: str, b_dtype: str, c_dtype: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """On the tensor cores, from factors that came to the GPU as they are stored."""
    a, b = numbers(rng, (700, 1500), a_dtype), numbers(rng, (1500, 600), b_dtype)
    a[0], b[:, 0] = np.iinfo(a_dtype).min, np.iinfo(b_dtype).min
    a[1], b[:, 1] = np.iinfo(a_dtype).max, np.iinfo(b_dtype).max
    paths = put(tmp_path / "a", a, (256, 256)), put(tmp_path / "b", b, (256, 256))
    run = tw.matmul(*paths, tmp_path / "c", device="cuda")
    tw.matmul(*paths, tmp_path / "cpu", device="cpu")
    found = zarr.open_array(tmp_path / "c")[...]
    assert found.dtype == c_dtype
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, a.astype(c_dtype) @ b.astype(c_dtype))
    np.testing.assert_array_equal(found, zarr.open_array(tmp_path / "cpu")[...])
    assert "exact-integer" in run.kernel
    assert run.verification is not None
    assert run.verification.passed


@pytest.mark.parametrize(("m", "k", "n"), [(4, 0, 5), (0, 3, 4), (4, 3, 0), (1, 1, 1), (1, 5000, 1)])
def test_odd_sides(m: int, k: int, n: int, tmp_path: Path) -> None:
    a, b = np.ones((m, k), "f4"), np.ones((k, n), "f4")
    tw.matmul(put(tmp_path / "a", a), put(tmp_path / "b", b), tmp_path / "c", device="cuda")
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "c")[...], a @ b)


@pytest.mark.parametrize("compressors", [None, "auto"])
def test_rows_longer_than_a_lane_s_block(compressors: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    columns = 2 * BLOCK_NBYTES // 4 + 1001  # of float32: two blocks and a bit
    a, b = rng.standard_normal((3, 2), dtype="f4"), rng.standard_normal((2, columns), dtype="f4")
    out = zarr.create_array(
        tmp_path / "c", shape=(3, columns), chunks=(2, columns), dtype="f4", compressors=compressors
    )
    options = {"compressors": compressors}
    tw.matmul(
        put(tmp_path / "a", a, **options), put(tmp_path / "b", b, (2, columns), **options), out, device="cuda"
    )
    np.testing.assert_allclose(out[...], a @ b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compressors", [None, "auto"])
@pytest.mark.parametrize("shards", [None, (600, 600)])
def test_chunks_that_were_never_written(
    shards: tuple[int, int] | None, compressors: Any, tmp_path: Path, rng: np.random.Generator
) -> None:
    """They come to the GPU by another way than those beside them."""
    a = zarr.create_array(
        tmp_path / "a", shape=(900, 900), chunks=(300, 300), shards=shards, dtype="f8", fill_value=2,
        compressors=compressors,
    )  # fmt: skip
    a[300:600, 300:900] = rng.standard_normal((300, 600))
    b = rng.standard_normal((900, 400))
    b_path = put(tmp_path / "b", b, (300, 170), compressors=compressors)
    tw.matmul(a, b_path, tmp_path / "c", device="cuda")
    assert_product(zarr.open_array(tmp_path / "c")[...], a[...], b)


@pytest.mark.parametrize(("compressors", "found"), [(None, "719992 bytes"), ("auto", "cannot be read")])
def test_a_chunk_that_is_damaged_is_named(
    compressors: Any, found: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    a = rng.standard_normal((600, 600))
    path, b_path = (put(tmp_path / name, a, (300, 300), compressors=compressors) for name in "ab")
    chunk = Path(path) / "c" / "1" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-8])
    with pytest.raises(StoreError, match=rf"chunk \(1, 0\) of .*{found}"):
        tw.matmul(path, b_path, tmp_path / "c", device="cuda")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("profile", ["local", "cuda"])
def test_large_matrices_on_every_profile(profile: str, tmp_path: Path, rng: np.random.Generator) -> None:
    n = 8192
    a, b = (rng.standard_normal((n, n), dtype="f4") for _ in range(2))
    a_path = put(tmp_path / "a", a, (1024, 1024), compressors=None)
    b_path = put(tmp_path / "b", b, (1024, 1024), compressors=None)
    run = tw.matmul(a_path, b_path, tmp_path / "c", cluster=profile, device="cuda")
    print(run)
    c = zarr.open_array(tmp_path / "c")
    for rows in (slice(0, 3), slice(4090, 4100), slice(n - 2, n)):
        exact = a[rows].astype("f8") @ b.astype("f8")
        scale = np.abs(a[rows]).astype("f8") @ np.abs(b).astype("f8")
        assert (np.abs(c[rows] - exact) <= 2 * np.sqrt(n) * np.finfo("f4").eps * scale).all()


def test_device_memory_stays_within_the_plan(tmp_path: Path, rng: np.random.Generator) -> None:
    from numba import cuda

    a = numbers(rng, (4096, 4096), "f4")
    path = put(tmp_path / "a", a, (512, 512), compressors=None)
    limit = 48 * 2**20
    tw.matmul(
        path, path, tmp_path / "warm", device="cuda", device_memory=limit
    )  # kernels loaded, contexts made

    def taken(out: Path) -> int:
        """How much less was free than before, beyond what the plan says. Other processes' memory is in it."""
        free = [cuda.current_context().get_memory_info().free]

        def watch(event: Any) -> None:
            free.append(cuda.current_context().get_memory_info().free)

        run = tw.matmul(path, path, out, device="cuda", device_memory=limit, listener=watch)
        assert run.plan.tile_count > 4
        return free[0] - min(free) - run.plan.device_peak_nbytes

    # Where other tests share the GPU, one of a few runs must find it undisturbed.
    assert any(taken(tmp_path / f"c{i}") <= 32 * 2**20 for i in range(5))  # the driver hands out whole blocks


@pytest.mark.whole_gpu
def test_memory_that_goes_after_the_plan_was_made(tmp_path: Path, rng: np.random.Generator) -> None:
    from numba import cuda

    n = 8192
    a = numbers(rng, (n, n), "f4")
    path = put(tmp_path / "a", a, (1024, 1024), compressors=None)
    options: dict[str, Any] = {"device": "cuda", "device_memory": 512 * 2**20}
    first = tw.matmul(path, path, tmp_path / "warm", **options)  # kernels loaded, contexts made
    left = first.plan.device_peak_nbytes * 3 // 4
    taken: list[Any] = []
    said: list[str] = []

    def take(event: Event) -> None:
        if isinstance(event, WorkPlanned) and not taken:
            free = cuda.current_context().get_memory_info().free
            taken.append(cuda.device_array(free - left, np.uint8))
        if isinstance(event, Notice):
            said.append(event.message)

    run = tw.matmul(path, path, tmp_path / "c", listener=take, **options)
    taken.clear()
    assert run.plan.device_peak_nbytes <= first.plan.device_peak_nbytes // 2
    assert any(text.startswith("the GPU ran out of memory under a plan of") for text in said)
    assert run.verification is not None
    assert run.verification.passed
    cuda.current_context().memory_manager.deallocations.clear()
    assert cuda.current_context().get_memory_info().free > 2 * left, "nothing of the failed plan is held"


STOPPED = 5
"""Tiles that are finished, at least, of a product that is stopped: some four more are under way then."""


def in_many_tiles(folder: Path, rng: np.random.Generator, compressors: Any) -> tuple[Path, Path]:
    """Factors of 64 MiB, to be multiplied by a GPU that has a quarter of that."""
    return (
        put(folder / "a.zarr", numbers(rng, (4096, 4096), "f4"), (512, 512), compressors=compressors),
        put(folder / "b.zarr", numbers(rng, (4096, 4096), "f4"), (512, 512), compressors=compressors),
    )


def store_otherwise(a: Path) -> Path:
    """With other chunks, codec and order of bytes, so that it is compared by parts that lie in several chunks."""
    data = zarr.open_array(a)[...]
    shutil.rmtree(a)
    return put(a, data.astype(">f4"), (700, 900))


LITTLE: dict[str, Any] = {"device": "cuda", "device_memory": 16 * 2**20}


@pytest.mark.parametrize("compressors", [None, "auto"])
@pytest.mark.parametrize("change", [touch, copy_without_times, move, store_otherwise])
def test_what_changes_no_number_costs_no_tile(
    change: Callable[[Path], Path],
    compressors: Any,
    tmp_path: Path,
    rng: np.random.Generator,
    events: list[Event],
) -> None:
    a_path, b_path = in_many_tiles(tmp_path, rng, compressors)
    a, b = zarr.open_array(a_path)[...], zarr.open_array(b_path)[...]
    out = tmp_path / "c"
    stop_at(STOPPED, a_path, b_path, out, **LITTLE)
    run = tw.matmul(change(a_path), b_path, out, listener=events.append, **LITTLE)
    assert run.plan.tile_count >= 2 * STOPPED
    assert "all of it is the same, and every tile is kept" in told(events)
    assert run.resumed >= STOPPED
    assert computed(events) == run.plan.tile_count - run.resumed
    assert_product(zarr.open_array(out)[...], a, b)


@pytest.mark.parametrize("touched", [False, True])
def test_a_number_that_changed_with_its_time_kept_is_seen(
    touched: bool, tmp_path: Path, rng: np.random.Generator, events: list[Event]
) -> None:
    """The tiles that are left need all of B; with a new time of another file it is seen before they are computed."""
    a_path, b_path = in_many_tiles(tmp_path, rng, None)
    out = tmp_path / "c"
    stop_at(STOPPED, a_path, b_path, out, **LITTLE)
    change_a_number(b_path, 700, 5)
    if touched:
        os.utime(b_path / "c" / "0" / "0")
    run = tw.matmul(a_path, b_path, out, listener=events.append, **LITTLE)
    assert_product(zarr.open_array(out)[...], zarr.open_array(a_path)[...], zarr.open_array(b_path)[...])
    text = told(events)
    assert "B holds other numbers in chunk (1, 0) (rows " in text
    again = r"\d+ of \d+ finished tiles are" if touched else r"\d+ finished tiles? of that run (is|are)"
    assert re.search(f"{again} computed again", text)
    assert 0 < run.resumed < run.plan.tile_count
    assert computed(events) == run.plan.tile_count - run.resumed


@pytest.mark.parametrize("compressors", [None])
def test_workers_that_share_panels_say_what_those_hold(
    two_processes: Client, factors: tuple[Path, Path], tmp_path: Path, events: list[Event]
) -> None:
    """All of A and B is known, though each worker read a part of it: A is touched, and compared at the end."""
    touched = False

    def listener(event: Event) -> None:
        nonlocal touched
        events.append(event)
        if isinstance(event, UnitDone) and event.name == "matmul" and not touched:
            touch(factors[0])
            touched = True

    with dask.config.set({"tilewright.share-panels": True, "tilewright.panel-nbytes": "16MiB"}):
        _, run = product_of(two_processes, factors, tmp_path / "c", listener=listener)
    assert run.shared_nbytes > 0
    assert computed(events) == run.plan.tile_count
    nbytes = format_nbytes(8 * 4200 * 4000)
    assert f"{nbytes} of A were compared" in told(events)


def product_of(
    client: Client, factors: tuple[Path, Path], out: Path, **more: Any
) -> tuple[bytes, tw.MatmulRun]:
    """The bytes of a product that fits into the memory of the GPUs, in many tiles."""
    shutil.rmtree(out, ignore_errors=True)
    run = tw.matmul(*factors, out, cluster=client, device="cuda", device_memory="1GB", **more)
    return zarr.open_array(out)[...].tobytes(), run


@pytest.fixture
def two_processes() -> Iterator[Client]:
    """Workers in processes of their own, on the same GPU where there is one only."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=2, processes=True, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def factors(tmp_path: Path, rng: np.random.Generator, compressors: Any) -> tuple[Path, Path]:
    paths = tmp_path / "a", tmp_path / "b"
    for path, shape in zip(paths, ((4200, 4000), (4000, 4352)), strict=True):
        array = zarr.create_array(path, shape=shape, chunks=(512, 512), dtype="f8", compressors=compressors)
        array[...] = rng.standard_normal(shape)
    return paths


@pytest.mark.parametrize("compressors", [None, "auto"])
def test_workers_take_panels_from_each_other(
    two_processes: Client, factors: tuple[Path, Path], tmp_path: Path
) -> None:
    results = []
    for share in (True, False):
        with dask.config.set({"tilewright.share-panels": share, "tilewright.panel-nbytes": "16MiB"}):
            results.append(product_of(two_processes, factors, tmp_path / "c"))
    (shared_bits, shared), (read_bits, read) = results
    assert shared_bits == read_bits
    assert (shared.shared_nbytes > 0, read.shared_nbytes) == (True, 0)
    for run in (shared, read):
        assert run.read_nbytes <= run.plan.read_nbytes
        assert run.verification is not None
        assert run.verification.passed
    assert "from other GPUs" in str(shared)


@pytest.mark.parametrize("compressors", [None, "auto"])
def test_host_memory_stays_within_the_plan(
    two_processes: Client, factors: tuple[Path, Path], tmp_path: Path
) -> None:
    """Of processes that compile, or load, their first kernel; with chunks small enough to make no difference."""
    with dask.config.set({"tilewright.read-threads": 24, "tilewright.write-threads": 24}):
        run = tw.matmul(*factors, tmp_path / "c", cluster=two_processes, device="cuda", verify=False)
    assert max(two_processes.run(peak_nbytes).values()) <= run.plan.host_peak_nbytes


@pytest.mark.parametrize("compressors", [None])
@pytest.mark.filterwarnings("ignore")
def test_a_worker_that_is_killed_is_done_without(
    two_processes: Client, factors: tuple[Path, Path], tmp_path: Path
) -> None:
    pids = list(two_processes.run(os.getpid).values())

    def kill(event: Event) -> None:
        if isinstance(event, UnitDone) and pids:
            os.kill(pids.pop(), signal.SIGKILL)
            pids.clear()

    with dask.config.set({"tilewright.panel-nbytes": "16MiB"}):
        bits, _ = product_of(two_processes, factors, tmp_path / "c", listener=kill)
        assert not pids
        two_processes.wait_for_workers(2, timeout=60)
        assert bits == product_of(two_processes, factors, tmp_path / "c")[0]


@pytest.mark.multigpu
def test_the_same_bits_on_any_number_of_gpus(tmp_path: Path, rng: np.random.Generator) -> None:
    """Tiles follow the number of workers here, and cells that are not aligned begin in other places of them."""
    from dask_cuda import LocalCUDACluster

    a, b = numbers(rng, (5001, 3001), "f4"), numbers(rng, (3001, 4103), "f4")
    a_path, b_path = put(tmp_path / "a", a, (501, 499)), put(tmp_path / "b", b, (501, 499))
    results, grids = [], []
    for visible in ("0", "0,1"):
        with (
            LocalCUDACluster(CUDA_VISIBLE_DEVICES=visible, dashboard_address=":0") as cluster,
            Client(cluster) as client,
        ):
            out = tmp_path / f"c{len(visible)}"
            run = tw.matmul(a_path, b_path, out, cluster=client, device="cuda", device_memory="104MB")
        assert run.plan.workers == (len(visible) + 1) // 2
        grids.append(run.plan.grid)
        results.append(zarr.open_array(out)[...].tobytes())
    assert grids[0] != grids[1]
    assert results[0] == results[1]


@pytest.mark.multigpu
@pytest.mark.parametrize("compressors", [None, "auto"])
def test_gpus_take_panels_from_each_other(factors: tuple[Path, Path], tmp_path: Path) -> None:
    from dask_cuda import LocalCUDACluster

    results = []
    with (
        LocalCUDACluster(threads_per_worker=2, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        dask.config.set({"tilewright.panel-nbytes": "16MiB"}),
    ):
        for share in (True, False):
            with dask.config.set({"tilewright.share-panels": share}):
                results.append(product_of(client, factors, tmp_path / "c"))
    (shared_bits, shared), (read_bits, read) = results
    assert shared_bits == read_bits
    assert (shared.shared_nbytes > 0, read.shared_nbytes) == (True, 0)
