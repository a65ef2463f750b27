"""What multiplies, without the engine that feeds it: the bits of C do not depend on how it is cut into tiles."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zarr

from tilewright.kernels.gpu import peer_memory
from tilewright.kernels.passes.contents import HALF_OVERFLOW, UNSOUGHT, Contents, Sought
from tilewright.pipeline.plan.inputs import Limits, StoredMatrix
from tilewright.pipeline.plan.memory import LINE_NBYTES, Lines
from tilewright.pipeline.plan.product import MatmulPlan, plan_tiles
from tilewright.pipeline.plan.told import Product
from tilewright.pipeline.plan.transform import NOT_FUSED
from tilewright.pipeline.store.region_write import region_writes
from tilewright.pipeline.text.gpu import lanes
from tilewright.pipeline.threads import run_all
from tilewright.pipeline.transfer import file_download, file_upload, zstd_chunks
from tilewright.pipeline.transfer import lane as transfer_lane
from tilewright.pipeline.worker import gpu_unit, units
from tilewright.pipeline.worker.gpu_unit import CudaUnit
from tilewright.pipeline.worker.panels import Placed
from tilewright.pipeline.worker.units import HostUnit


@pytest.mark.sample(1)
@pytest.mark.parametrize("transposed", [False, True], ids=["stored", "transposed"])
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8"])
@pytest.mark.parametrize(
    ("device", "sides", "unit", "nbytes"),
    [
        ("cpu", (1501, 301, 1403), (100, 100), 400_000),
        pytest.param("cuda", (9001, 1201, 8403), (100, 100), 7_000_000, marks=pytest.mark.gpu),
        pytest.param("cuda", (9001, 1201, 8403), (99, 101), 10_000_000, marks=pytest.mark.gpu),
    ],
    ids=["cpu", "cuda", "cuda-odd-cells"],
)
def test_c_has_the_same_bits_where_its_grid_follows_the_workers(
    device: str,
    sides: tuple[int, int, int],
    unit: tuple[int, int],
    nbytes: int,
    dtype: str,
    transposed: bool,
    rng: np.random.Generator,
) -> None:
    m, k, n = sides
    a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
    stored = [StoredMatrix(*factor.shape, factor.dtype, unit) for factor in (a, b)]
    plans = {}
    for workers in (1, 2, 3, 4, 8, 16):
        limits = Limits(
            workers,
            nbytes * a.itemsize,
            on_host=device == "cpu",
            line_nbytes=1 if device == "cpu" else LINE_NBYTES,
        )
        plan = plan_tiles(*stored, a.dtype, unit, limits, transpose_a=transposed, transpose_b=transposed)
        plans[plan.geometry] = plan  # each once: many are alike
    assert len({plan.grid for plan in plans.values()}) > 1, "the tiles follow the workers"
    found = [multiplied(plan, device, a, b) for plan in plans.values()]
    assert all(np.array_equal(c, found[0]) for c in found)
    np.testing.assert_allclose(found[0], a @ b, rtol=0, atol=1e-10 if dtype == "f8" else 2e-3)


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize(("m", "n", "unit"), [(3, 200, (1, 3)), (200, 3, (3, 1))], ids=["row", "column"])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_cells_of_one_row_or_column_have_the_same_bits(
    m: int, n: int, unit: tuple[int, int], transpose_a: bool, transpose_b: bool, rng: np.random.Generator
) -> None:
    """BLAS multiplies vectors by other loops, which differ with how far apart elements lie."""
    k = 101  # a few panels: each is multiplied cell by cell, which takes a hundred microseconds a cell
    for dtype in ("f4", "f8", "c8", "c16"):
        a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
        stored = [StoredMatrix(*factor.shape, factor.dtype, (7, 7)) for factor in (a, b)]
        plans = {}
        for workers in (1, 2, 3, 5, 8, 16):
            limits = Limits(workers, 2500 * a.itemsize, on_host=True)
            plan = plan_tiles(
                *stored, a.dtype, unit, limits, transpose_a=transpose_a, transpose_b=transpose_b
            )
            assert 1 in plan.geometry[4:]
            plans[plan.geometry] = plan
        assert len({geometry[:2] for geometry in plans}) > 1, "the tiles follow the workers"
        found = [multiplied(plan, "cpu", a, b) for plan in plans.values()]
        assert all(np.array_equal(c, found[0]) for c in found), dtype


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a unit would ask a GPU for is replaced, but for its lanes."""
    from numba import cuda

    monkeypatch.setattr(cuda, "stream", lambda: None)
    monkeypatch.setattr(gpu_unit, "upload_stream", lambda: None)
    monkeypatch.setattr(gpu_unit, "download_stream", lambda: None)
    monkeypatch.setattr(gpu_unit, "urgent_stream", lambda purpose: None)
    monkeypatch.setattr(peer_memory, "available", lambda: False)
    monkeypatch.setattr(zstd_chunks, "available", lambda: True)
    monkeypatch.setattr(file_upload, "prepare", lambda: None)
    monkeypatch.setattr(file_download, "prepare", lambda: None)
    monkeypatch.setattr(gpu_unit._spare_lanes, "_kept", {})


def with_lanes(count: int) -> Product:
    """A product whose plan has so many lanes."""
    factor = StoredMatrix(100, 100, np.dtype("f4"), (10, 10))
    plan = replace(plan_tiles(factor, factor, np.dtype("f4"), (10, 10), Limits(1, 10**6)), lanes=count)
    return Product(None, None, None, plan, "cuda", "full", "run")  # type: ignore[arg-type]


@pytest.mark.parametrize("failing", ["a lane", "the compiler"])
def test_lanes_that_were_pinned_serve_the_next_attempt(
    failing: str, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = with_lanes(3)
    made: list[object] = []

    class Lane:
        def __init__(self) -> None:
            if failing == "a lane" and len(made) == 2:
                raise RuntimeError("injected: no memory can be pinned")
            made.append(self)

    def prepare() -> None:
        if failing == "the compiler":
            raise RuntimeError("injected: the disk of the compiler's cache is full")

    monkeypatch.setattr(file_upload, "prepare", prepare)
    monkeypatch.setattr(gpu_unit._spare_lanes, "_make", Lane)
    before = [Lane()]
    gpu_unit._spare_lanes.put(*before)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="injected"):
        CudaUnit(product)
    assert set(gpu_unit._spare_lanes.kept()) == set(made) >= set(before)
    failing = ""
    unit = CudaUnit(product)
    assert len(made) == unit._lanes.qsize() == 3
    assert not gpu_unit._spare_lanes.kept()


class PretendedLane:
    """A lane, or a tally, of pinned memory that is pretended."""

    settled = 0
    """How many were waited for."""

    def settle(self) -> None:
        type(self).settled += 1


@pytest.fixture
def pretended(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many lanes there were each time that what Numba has queued was freed."""
    from numba import cuda

    there: list[int] = []
    alive: weakref.WeakSet[PretendedLane] = weakref.WeakSet()

    def lane() -> PretendedLane:
        alive.add(made := PretendedLane())
        return made

    queue = SimpleNamespace(clear=lambda: there.append(len(alive)))
    context = SimpleNamespace(memory_manager=SimpleNamespace(deallocations=queue))
    for driver in (cuda, transfer_lane.cuda):
        monkeypatch.setattr(driver, "current_context", lambda: context)
    monkeypatch.setattr(gpu_unit._spare_lanes, "_make", lane)
    monkeypatch.setattr(PretendedLane, "settled", 0)
    for spares in (lanes._spare_lanes, lanes._spare_tallies):
        monkeypatch.setattr(spares, "_kept", {})
    return there


def test_a_product_frees_the_lanes_of_past_ones_that_it_does_not_use(pretended: list[int]) -> None:
    """Its plan has counted its own."""
    for count in (5, 5, 3, 3, 4):
        CudaUnit(with_lanes(count)).close()
    assert pretended == [3], "jobs of the same kind, and larger ones, find all lanes that there were"
    assert PretendedLane.settled == 2
    assert len(gpu_unit._spare_lanes.kept()) == 4


def test_a_product_frees_the_lanes_of_text(pretended: list[int]) -> None:
    lanes._spare_lanes.put(PretendedLane())  # type: ignore[arg-type]
    for _ in range(2):
        lanes._spare_tallies.put(PretendedLane(), 256)  # type: ignore[arg-type]
    with lanes.borrowed_lane() as taken:
        CudaUnit(with_lanes(1)).close()
    assert lanes._spare_lanes.kept() == [taken], "what a task has in hand stays"
    CudaUnit(with_lanes(1)).close()
    assert lanes._spare_lanes.kept() == lanes._spare_tallies.kept(256) == []
    assert PretendedLane.settled == 3
    assert len(pretended) == 2


@pytest.mark.parametrize("compressors", [None, "auto"])
def test_threads_that_save_a_tile_look_at_each_element_once(
    compressors: str | None, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of float32 for a C of float16, in cells that lie apart, with NaN between them that nobody looks at."""
    monkeypatch.setattr(units, "SAVED_NBYTES", 4 * 30 * 7)
    sums = rng.standard_normal((90, 75)).astype("f4")
    sums[rng.random(sums.shape) < 0.01] = np.nan
    sums[rng.random(sums.shape) < 0.02] = HALF_OVERFLOW
    nan, infinite = int(np.isnan(sums).sum()), int((sums == HALF_OVERFLOW).sum())
    assert min(nan, infinite) > 0
    c = zarr.create_array(
        tmp_path / "c", shape=sums.shape, chunks=(40, 30), dtype="f2", compressors=compressors
    )
    sought = UNSOUGHT, UNSOUGHT, Sought(not_finite=True)
    product: Any = SimpleNamespace(look=sought, plan=SimpleNamespace(c_dtype="f2"), fused=NOT_FUSED)
    unit, tile = HostUnit(product), placed(sums, Lines(30, 32), "cpu")
    look = unit.look(tile.flat)
    look.at_tile(tile)
    pieces = region_writes(c, (slice(0, 90), slice(0, 75)))
    with ThreadPoolExecutor(4) as pool:
        run_all(pool, [partial(unit.save, piece, tile, c.dtype, look) for piece in pieces])
    assert look.found(times=2).c == Contents(nan=2 * nan, infinite=2 * infinite)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(c[...], sums.astype("f2"))


def multiplied(plan: MatmulPlan, device: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product as one worker's unit computes it, tile by tile and panel by panel, without a store."""
    product = Product(None, None, None, plan, device, "full", "run")  # type: ignore[arg-type]
    unit: HostUnit | CudaUnit = HostUnit(product) if device == "cpu" else CudaUnit(product)
    c, layout = np.zeros((plan.m, plan.n), plan.c_dtype), plan.layout
    for tile in plan.tiles():
        rows, columns = tile.region
        target = placed(c[rows, columns] * np.nan, layout.c(), device)
        for place, (start, stop) in enumerate(plan.panels()):
            left, right = a[rows, start:stop], b[start:stop, columns]
            panels = [
                placed(left.T if plan.transpose_a else left, layout.a(), device),
                placed(right.T if plan.transpose_b else right, layout.b(), device),
            ]
            unit.multiply(*panels, target, accumulate=place > 0)
            if wait := unit.passed():
                wait()
        sums = target if device == "cpu" else replace(target, flat=target.flat.copy_to_host())
        for piece in sums.pieces(slice(0, tile.rows), slice(0, tile.columns)):
            c[rows, columns][piece] = sums.cut(*piece)
    unit.close()
    return c


def placed(matrix: np.ndarray, lines: Lines, device: str) -> Placed:
    """A matrix as it lies in a buffer, with NaN between its cells."""
    flat = np.full(matrix.shape[0] * lines.pitch(matrix.shape[1]), np.nan, matrix.dtype)
    found = Placed(flat, (matrix.shape[0], matrix.shape[1]), lines)
    for piece in found.pieces(slice(0, matrix.shape[0]), slice(0, matrix.shape[1])):
        found.cut(*piece)[...] = matrix[piece]
    if device == "cpu":
        return found
    from numba import cuda

    return replace(found, flat=cuda.to_device(flat))
