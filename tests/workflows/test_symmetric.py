"""One array by its own transpose: C is symmetric to the bit, from half of the tiles, whoever computes and stores it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import zarr
from distributed import Client, LocalCluster
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tests.pipeline.store.stored_arrays import as_remote
from tests.sampling import examples
from tests.workflows.products import (
    DTYPES,
    numbers,
    order_by_sides,
    put,
    stop_after,
    stop_at,
    stored_somehow,
)
from tilewright.pipeline.errors import PlanError, StoreError
from tilewright.pipeline.events import Event, UnitDone, WorkPlanned
from tilewright.pipeline.plan import tiling
from tilewright.pipeline.product import output as outputs
from tilewright.pipeline.store.arrays import write_unit
from tilewright.pipeline.worker import units, write_stage

TIGHT = 14_000
"""Device memory that cuts a C of 100 × 100 float32 into ten tiles of a few panels each."""
WORKERS = 1, 3


def assert_symmetric_product(c: np.ndarray, x: np.ndarray) -> None:
    """C is X Xᵀ within rounding, and its own transpose to the last bit, those of NaN too."""
    assert np.ascontiguousarray(c.T).tobytes() == c.tobytes()
    if c.dtype.kind in "iu":
        np.testing.assert_array_equal(c, np.matmul(x.astype(c.dtype), x.T.astype(c.dtype)))
        return
    wide = np.complex128 if c.dtype.kind == "c" else np.float64
    exact = np.matmul(x.astype(wide), x.T.astype(wide))
    scale = np.matmul(np.abs(x.astype(wide)), np.abs(x.T.astype(wide)))
    eps = np.finfo(np.float32 if c.dtype == np.float16 else c.dtype).eps
    bound = (x.shape[1] + 2) * eps * scale
    if c.dtype == np.float16:
        bound = bound + np.finfo(np.float16).eps * np.abs(exact) + 1e-7
    assert (np.abs(c - exact) <= bound).all()


@pytest.fixture(scope="module")
def clusters() -> Iterator[dict[int, Client]]:
    """Workers in this process, a cluster for each number of them that products are compared by."""
    with ExitStack() as stack:
        found: dict[int, Client] = {}
        for workers in WORKERS:
            cluster = LocalCluster(n_workers=workers, processes=False, dashboard_address=":0")
            found[workers] = stack.enter_context(Client(stack.enter_context(cluster)))
        yield found


@contextmanager
def in_parts_of_k() -> Iterator[None]:
    """Has a C of 100 × 100 float32 and k = 900 summed in three parts of k, each tile in cells where memory is tight."""
    with pytest.MonkeyPatch.context() as patched, dask.config.set({"tilewright.tiles": 30}):
        for name, value in (
            ("MOST_CHUNK_NBYTES", 4096),
            ("LEAST_CHUNK_NBYTES", 1),
            ("SMALL_CHUNK_NBYTES", 1),
            ("TILE_OPERATIONS", 1000),
            ("MOST_TILES_TO_COMPARE", 30),  # 30 are as few here as 16 are of a large C
            ("SPLIT_NBYTES", 200),
        ):
            patched.setattr(tiling, name, value)
        yield


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")
@settings(max_examples=examples(12))
@given(data=st.data())
def test_c_is_symmetric_to_the_bit(
    clusters: dict[int, Client], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Of any dtype, chunks and codecs, tiny and plenty of memory, k in parts or not, and any number of workers."""
    draw = data.draw
    n, k = draw(st.integers(1, 40), label="n"), draw(st.integers(1, 40), label="k")
    dtype = draw(st.sampled_from(DTYPES))
    by_rows = draw(st.booleans(), label="X Xᵀ")
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    folder = tmp_path_factory.mktemp("product")
    values = numbers(rng, (n, k) if by_rows else (k, n), dtype)
    x = stored_somehow(draw, folder / "x", values, 25)
    before = np.full((n, n), 7, dtype)
    out: Any = folder / "c"
    own = draw(st.booleans(), label="C of our own")
    if not own:
        out = stored_somehow(draw, folder / "c", before, 12)
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        if draw(st.booleans(), label="as if it were large"):  # then so small a product has tiles, and k parts
            patched.setattr(tiling, "TILE_OPERATIONS", 5000)
            patched.setattr(tiling, "SPLIT_NBYTES", 500)
        options: dict[str, Any] = {
            "transpose_a": not by_rows,
            "transpose_b": by_rows,
            "dtype": dtype,
            "cluster": clusters[draw(st.sampled_from(WORKERS), label="workers")],
            "device": "cpu",
            "device_memory": draw(st.sampled_from([24_000, 60_000, 10**7])),
        }
        run = None
        with np.errstate(over="ignore"):
            try:
                run = tw.matmul(folder / "x", x, out, **options)
            except (
                PlanError
            ):  # of a C whose pieces are larger than all memory, or have no small square in common
                plan = None
            else:
                plan = run.plan
    unit = max(1, min(n, math.lcm(*write_unit(out)))) if not own else 1
    if plan is None or run is None:
        item = np.dtype(dtype).itemsize
        assert unit * (unit + 4) * max(4, item) > options["device_memory"], "the smallest tile fits"
        return
    assert plan.tile_rows % unit == 0 or plan.tile_rows == n
    c = zarr.open_array(folder / "c")[...].astype(dtype)
    with np.errstate(over="ignore"):
        assert_symmetric_product(c, values if by_rows else values.T)
    assert plan.symmetric
    assert plan.tile_count == plan.grid[0] * (plan.grid[0] + 1) // 2
    assert run.operations == plan.operations == n * (n + 1) * k
    assert run.write_nbytes == n * n * np.dtype(dtype).itemsize
    assert run.verification is not None
    assert run.verification.passed


@pytest.mark.parametrize(
    "dtype",
    ["f4", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("i1", "f2", "f8", "c8", "c16", "i8"))],
)
@pytest.mark.parametrize("elements", [6000, pytest.param(2500, marks=pytest.mark.slow)])
def test_workers_do_not_change_a_bit(
    elements: int,
    dtype: str,
    clusters: dict[int, Client],
    tmp_path: Path,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither with BLAS nor where every product sums in an order of its own."""
    rng = np.random.default_rng(3)
    x = numbers(rng, (90, 130), dtype)
    path = put(tmp_path / "x", x, (11, 13))
    kernels: list[Callable[..., Any]] = [units.matmul]
    if dtype in ("f4", "f8"):  # in float16 it would round every sum
        kernels.append(order_by_sides)
    memory = elements * np.dtype(dtype).itemsize
    for which, kernel in enumerate(kernels):
        monkeypatch.setattr(units, "matmul", kernel)
        found = set()
        for workers, client in clusters.items():
            out = tmp_path / f"c{workers}-{which}"
            with np.errstate(all="ignore"):
                run = tw.matmul(
                    path, path, out, transpose_a=True, dtype=dtype, cluster=client, device="cpu",
                    device_memory=memory, verify=False,
                )  # fmt: skip
                c = zarr.open_array(out)[...]
                assert run.plan.workers == workers
                assert run.plan.tile_count > 3
                assert_symmetric_product(c, x.T)
            found.add(c.tobytes())
        assert len(found) == 1


@pytest.mark.more
@pytest.mark.parametrize("memory", [24_000, pytest.param(60_000, marks=pytest.mark.slow)])
def test_workers_do_not_change_a_bit_where_k_is_in_parts(
    memory: int, clusters: dict[int, Client], tmp_path: Path, rng: np.random.Generator
) -> None:
    x = numbers(rng, (100, 900), "f4")
    path = put(tmp_path / "x", x, (32, 20))
    found = set()
    with in_parts_of_k():
        for workers, client in clusters.items():
            run = tw.matmul(
                path, path, tmp_path / f"c{workers}", transpose_b=True, cluster=client, device="cpu",
                device_memory=memory,
            )  # fmt: skip
            assert (run.plan.k_parts, run.plan.tile_count) == (3, 10)
            assert (run.plan.cell_rows < run.plan.tile_rows) == (memory == 24_000)
            assert run.verification is not None
            assert run.verification.passed
            c = zarr.open_array(tmp_path / f"c{workers}")[...]
            assert_symmetric_product(c, x)
            found.add(c.tobytes())
    assert len(found) == 1


def test_half_of_the_tiles_are_computed_and_diagonal_panels_read_once(
    client: Client, tmp_path: Path, small_chunks: None, rng: np.random.Generator
) -> None:
    x = numbers(rng, (96, 80), "f4")
    path, twin = put(tmp_path / "x", x), put(tmp_path / "y", x)
    events: list[Event] = []
    options: dict[str, Any] = {
        "transpose_b": True,
        "cluster": client,
        "device": "cpu",
        "device_memory": TIGHT * 2 // 3,
    }
    run = tw.matmul(path, path, tmp_path / "c", listener=events.append, **options)
    units_done = [event for event in events if isinstance(event, UnitDone) and event.name == "matmul"]
    planned = next(event for event in events if isinstance(event, WorkPlanned))
    grid = run.plan.grid[0]
    assert grid > 3
    assert len(units_done) == planned.total == grid * (grid + 1) // 2
    assert sum(event.operations for event in units_done) == planned.operations == 96 * 97 * 80
    assert sum(event.nbytes for event in units_done) == planned.nbytes == grid * x.nbytes
    assert run.read_nbytes <= planned.nbytes
    # By another array with the same elements, nobody knows that C is symmetric, nor need it be.
    other = tw.matmul(path, twin, tmp_path / "d", **options)
    assert not other.plan.symmetric
    assert other.operations == 2 * 96 * 96 * 80
    np.testing.assert_allclose(
        zarr.open_array(tmp_path / "d")[...], zarr.open_array(tmp_path / "c")[...], rtol=1e-4, atol=1e-4
    )
    for transposed in ({}, {"transpose_a": True, "transpose_b": True}):
        square = put(tmp_path / f"square{len(transposed)}", x[:80])
        plan = tw.plan_matmul(square, square, device="cpu", **transposed)
        assert not plan.symmetric, "X X, and its transpose, are not"


def test_one_tile_reads_x_once(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    x = numbers(rng, (3000, 40), "f4")
    path = put(tmp_path / "x", x, (500, 20))
    run = tw.matmul(path, path, tmp_path / "c", transpose_a=True, cluster=client, device="cpu")
    assert run.plan.tile_count == 1
    assert run.read_nbytes == run.plan.read_nbytes == run.plan.bound_nbytes == x.nbytes
    assert_symmetric_product(zarr.open_array(tmp_path / "c")[...], x.T)


def test_the_same_array_is_recognised_however_it_is_named(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path / "x", numbers(rng, (30, 20), "f4"))
    (tmp_path / "link").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    names: list[Any] = [
        path,
        "x",
        "./link",
        f"file://{path}",
        zarr.open_array(path, mode="r"),
        zarr.open_array(path),
    ]
    for a, b in itertools.product(names, names):
        assert tw.plan_matmul(a, b, transpose_a=True, device="cpu").symmetric
    assert tw.plan_matmul(as_remote(path), as_remote(path), transpose_a=True, device="cpu").symmetric
    other = put(tmp_path / "other", numbers(rng, (30, 20), "f4"))
    assert not tw.plan_matmul(path, other, transpose_a=True, device="cpu").symmetric


@pytest.mark.parametrize("special", ["nan", pytest.param("infinity", marks=pytest.mark.slow)])
def test_nan_and_infinity_are_mirrored(
    special: str, client: Client, tmp_path: Path, small_chunks: None, rng: np.random.Generator
) -> None:
    x = numbers(rng, (50, 60), "f4")
    x[7, 3] = np.nan if special == "nan" else np.inf
    x[40, 3] = -np.inf  # which makes infinities in either case
    path = put(tmp_path / "x", x)
    with np.errstate(all="ignore"):
        tw.matmul(
            path, path, tmp_path / "c", transpose_b=True, cluster=client, device="cpu", device_memory=TIGHT
        )
        c, expected = zarr.open_array(tmp_path / "c")[...], x @ x.T
    assert np.ascontiguousarray(c.T).tobytes() == c.tobytes()
    np.testing.assert_allclose(c, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("k", [0, 5])
@pytest.mark.parametrize("n", [0, 1, 4])
def test_empty_sides(n: int, k: int, client: Client, tmp_path: Path) -> None:
    path = put(tmp_path / "x", np.ones((k, n), "f4"))
    run = tw.matmul(path, path, tmp_path / "c", transpose_a=True, cluster=client, device="cpu")
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "c")[...], np.full((n, n), k, "f4"))
    assert run.verification is not None
    assert run.verification.passed


@pytest.mark.sample(1)
@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("after", [1, 2, 5, 9])
def test_a_stopped_run_goes_on_where_it_stood(
    after: int, parts: bool, client: Client, tmp_path: Path, small_chunks: None, rng: np.random.Generator
) -> None:
    """A recorded tile has both its regions."""
    x = numbers(rng, (100, 900 if parts else 160), "f4")
    path, out = put(tmp_path / "x", x, (32, 20)), tmp_path / "c.zarr"
    options: dict[str, Any] = {
        "transpose_b": True,
        "device": "cpu",
        "device_memory": 24_000 if parts else TIGHT,
    }
    with in_parts_of_k() if parts else nullcontext():
        plan = tw.plan_matmul(path, path, **options)
        assert (plan.k_parts > 1) == parts
        assert plan.tile_count > 9
        stop_at(after, path, path, out, cluster=client, **options)
        growing = zarr.open_array(outputs.partial_path(out), mode="r")
        run = tw.matmul(path, path, out, cluster=client, **options)
    assert run.resumed == after
    assert run.write_nbytes < growing.nbytes == run.plan.write_nbytes
    assert_symmetric_product(zarr.open_array(out)[...], x)


@pytest.mark.sample(1)
@pytest.mark.parametrize("damage", ["gone", "short", "zeros"])
@pytest.mark.parametrize("mirrored", [False, True])
def test_a_tile_that_lost_either_of_its_regions_is_computed_again(
    mirrored: bool,
    damage: str,
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    rng: np.random.Generator,
) -> None:
    x = numbers(rng, (100, 60), "f4")
    path = put(tmp_path / "x", x, compressors=zarr.codecs.ZstdCodec())
    out = tmp_path / "c.zarr"
    options: dict[str, Any] = {
        "transpose_b": True,
        "cluster": client,
        "device": "cpu",
        "device_memory": TIGHT,
    }
    plan = tw.plan_matmul(path, path, transpose_b=True, device="cpu", device_memory=TIGHT)
    count = plan.tile_count
    with pytest.raises(KeyboardInterrupt):
        tw.matmul(path, path, out, listener=stop_after(count), **options)
    below, above = plan.regions(next(tile for tile in plan.tiles() if tile.i != tile.j))
    rows, columns = above if mirrored else below
    unit = plan.c_unit[0]
    chunk = outputs.partial_path(out) / "c" / str(rows.start // unit) / str(columns.start // unit)
    data = chunk.read_bytes()
    if damage == "gone":
        chunk.unlink()
    else:
        chunk.write_bytes(data[:-1] if damage == "short" else bytes(len(data)))
    run = tw.matmul(path, path, out, **options)
    assert run.resumed == count - 1
    assert_symmetric_product(zarr.open_array(out)[...], x)


def test_tiles_of_a_product_not_known_to_be_symmetric_are_not_kept(
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = numbers(rng, (100, 60), "f4")
    path, out = put(tmp_path / "x", x), tmp_path / "c.zarr"
    options: dict[str, Any] = {
        "transpose_b": True,
        "cluster": client,
        "device": "cpu",
        "device_memory": TIGHT,
    }
    with monkeypatch.context() as patched:
        patched.setattr("tilewright.pipeline.product.request.is_same_array", lambda a, b: False)
        stop_at(3, path, path, out, **options)
    run = tw.matmul(path, path, out, **options)
    assert run.resumed == 0
    assert_symmetric_product(zarr.open_array(out)[...], x)


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("which", ["own", "mirrored"])
def test_a_tile_of_which_one_region_cannot_be_stored_is_not_recorded(
    which: str,
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = numbers(rng, (100, 60), "f4")
    path, out = put(tmp_path / "x", x), tmp_path / "c.zarr"
    options: dict[str, Any] = {
        "transpose_b": True,
        "cluster": client,
        "device": "cpu",
        "device_memory": TIGHT,
    }
    original = write_stage.region_writes

    def failing(array: Any, region: tuple[slice, slice], drafts: str | None = None) -> Any:
        rows, columns = region
        if (rows.start < columns.start) if which == "mirrored" else (rows.start > columns.start):
            raise StoreError("this half of the disk is full")
        return original(array, region, drafts)

    with monkeypatch.context() as patched:
        patched.setattr(write_stage, "region_writes", failing)
        with pytest.raises(StoreError, match="half of the disk"):
            tw.matmul(path, path, out, **options)
    run = tw.matmul(path, path, out, **options)
    assert run.resumed <= run.plan.grid[0], "tiles on the diagonal alone"
    assert_symmetric_product(zarr.open_array(out)[...], x)


def test_an_open_c_of_odd_chunks_is_symmetric_or_refused(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    x = numbers(rng, (100, 60), "f4")
    path = put(tmp_path / "x", x)
    options: dict[str, Any] = {"transpose_b": True, "cluster": client, "device": "cpu"}
    c = zarr.create_array(tmp_path / "c", shape=(100, 100), chunks=(14, 10), dtype="f4", fill_value=9)
    run = tw.matmul(path, path, c, device_memory=40_000, **options)
    assert (run.plan.tile_rows, run.plan.grid) == (70, (2, 2))
    assert_symmetric_product(c[...], x)
    c[...] = 9
    with pytest.raises(
        PlanError, match=r"70 × 70 \(square, since C is symmetric, .* 35 × 35 and smaller ones fit"
    ):
        tw.matmul(path, path, c, device_memory=15_000, **options)
    assert (c[...] == 9).all()
    d = zarr.create_array(tmp_path / "d", shape=(100, 100), chunks=(35, 35), dtype="f4")
    tw.matmul(path, path, d, device_memory=15_000, **options)
    assert_symmetric_product(d[...], x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["i1", "i4", "i8", "f2", "f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize(
    ("chunks", "compressors"), [((100, 100), None), ((60, 40), "auto"), ((128, 128), "auto")]
)
def test_c_is_symmetric_on_a_gpu(
    chunks: tuple[int, int],
    compressors: Any,
    by_rows: bool,
    dtype: str,
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    n, k = 1030, 700
    x = numbers(rng, (n, k), dtype)
    path = put(tmp_path / "x", x if by_rows else x.T, (200, 130), compressors=compressors)
    out = zarr.create_array(
        tmp_path / "c", shape=(n, n), chunks=chunks, dtype=dtype, fill_value=99, compressors=compressors
    )
    for memory in (1_200_000, 2_500_000):  # cut into cells; and into one tile, or a few
        with np.errstate(over="ignore", invalid="ignore"):
            run = tw.matmul(
                path, path, out, transpose_a=not by_rows, transpose_b=by_rows, dtype=dtype, device="cuda",
                device_memory=memory * np.dtype(dtype).itemsize // 4 + 600_000,
            )  # fmt: skip
            assert run.plan.symmetric
            assert run.device != "CPU"
            assert_symmetric_product(out[...], x)
        # A GPU has several tiles under way, whose order is not the plan's for certain (`test_stream.py` shows what
        # another order reads). In any order a tile reads no more than its own panels.
        assert run.read_nbytes <= sum(map(run.plan.tile_read_nbytes, run.plan.tiles()))
        assert run.verification is not None
        assert run.verification.passed


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["full", "split", "tf32", "bf16"])
def test_every_precision_is_symmetric_on_a_gpu(
    precision: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    x = numbers(rng, (1500, 900), "f4")
    path = put(tmp_path / "x", x, (256, 256))
    run = tw.matmul(
        path, path, tmp_path / "c", transpose_a=True, precision=precision, device="cuda", device_memory="6MiB"
    )
    assert run.plan.tile_count > 1
    c = zarr.open_array(tmp_path / "c")[...]
    assert np.ascontiguousarray(c.T).tobytes() == c.tobytes()
    assert run.verification is not None
    assert run.verification.passed


@pytest.mark.gpu
def test_parts_of_k_are_symmetric_on_a_gpu(tmp_path: Path, rng: np.random.Generator) -> None:
    x = numbers(rng, (100, 900), "f4")
    path = put(tmp_path / "x", x, (32, 20))
    with in_parts_of_k():
        run = tw.matmul(path, path, tmp_path / "c", transpose_b=True, device="cuda", device_memory=10**6)
    assert run.plan.k_parts > 1
    assert run.plan.tile_count > 1
    assert_symmetric_product(zarr.open_array(tmp_path / "c")[...], x)


@pytest.mark.multigpu
@pytest.mark.parametrize("share", [False, True])
def test_two_gpus_give_the_bits_of_one(share: bool, tmp_path: Path, rng: np.random.Generator) -> None:
    from dask_cuda import LocalCUDACluster

    x = numbers(rng, (3001, 5003), "f4")
    path = put(tmp_path / "x", x, (499, 501))
    results = []
    for visible in ("0", "0,1"):
        with (
            LocalCUDACluster(
                CUDA_VISIBLE_DEVICES=visible, threads_per_worker=2, dashboard_address=":0"
            ) as cluster,
            Client(cluster) as client,
            dask.config.set({"tilewright.share-panels": share, "tilewright.panel-nbytes": "16MiB"}),
        ):
            out = tmp_path / f"c{len(visible)}"
            run = tw.matmul(
                path, path, out, transpose_a=True, cluster=client, device="cuda", device_memory="104MB"
            )
        assert run.plan.workers == (len(visible) + 1) // 2
        assert run.plan.tile_count > 4
        results.append(zarr.open_array(out)[...])
        assert_symmetric_product(results[-1], x.T)
    assert results[0].tobytes() == results[1].tobytes()
