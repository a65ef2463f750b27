"""Engines that transform panels and finish tiles: the memory that the plan counts, lines with padding between cells,
k in parts; on the CPU and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tilewright.kernels.cpu import byte_integer
from tilewright.pipeline.plan.inputs import FusedDtypes, Geometry, Limits
from tilewright.pipeline.plan.memory import LINE_NBYTES
from tilewright.pipeline.plan.pairs import PRODUCT, Form, Forms, Pairwise, combined
from tilewright.pipeline.plan.product import MatmulPlan, plan_tiles
from tilewright.pipeline.plan.told import Product
from tilewright.pipeline.plan.transform import Counted, Epilogue, Fused, Transform, finished, transformed
from tilewright.pipeline.store.arrays import as_stored_matrix
from tilewright.pipeline.worker import fusion
from tilewright.pipeline.worker.engines import store_sum
from tilewright.pipeline.worker.fusion import HostFusion
from tilewright.pipeline.worker.gpu_unit import CudaUnit
from tilewright.pipeline.worker.stream import TileEngine
from tilewright.pipeline.worker.units import HostUnit

M, N, K = 113, 97, 71
WHOLE = slice(None)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
F4, F8 = np.dtype("f4"), np.dtype("f8")
SYMMETRIC = ["gram", "complex", "pairs", "bytes"]
KINDS = ["gram", "complex", "two", "exact", "half", "pairs", "pairs of two", "bytes"]
PAIRS = Pairwise(centered=True, scaled=True, own=True)
Made = tuple[Product, np.ndarray, np.ndarray]


def put(path: Path, values: np.ndarray) -> zarr.Array[Any]:
    array = zarr.create_array(path, shape=values.shape, chunks=(20, 20), dtype=values.dtype)
    array[...] = values
    return array


def a_product(
    folder: Path,
    rng: np.random.Generator,
    kind: str,
    device: str,
    *,
    keep: Geometry | None,
    line_nbytes: int = 1,
) -> Made:
    """One of each kind, and C as NumPy has it with the rounding of its sums; keep: its geometry."""
    stored = np.dtype({"exact": "i1", "bytes": "i1", "complex": "c8"}.get(kind, "i2"))
    values = rng.integers(-9, 10, (K, M))
    x = (values + 1j * rng.integers(-9, 10, (K, M)) if stored.kind == "c" else values).astype(stored)
    y = rng.integers(-9, 10, (K, N)).astype(stored)
    gram = kind in SYMMETRIC
    a, b = put(folder / "a", x), None if gram else put(folder / "b", y)
    b = a if b is None else b
    other, n = (x, M) if gram else (y, N)
    operand = {"exact": None, "complex": np.dtype("c8")}.get(kind, F4)
    result = {"exact": F8, "complex": np.dtype("c8"), "half": np.dtype("f2")}.get(kind, F4)
    sums = np.dtype("i4") if kind == "exact" else F4 if kind == "half" else result
    transforms: tuple[Transform | None, Transform | None] = (None, None)
    if operand is not None:
        offsets, factors = rng.integers(-2, 3, M), 2.0 ** rng.integers(-1, 2, M)
        one = Transform(
            operand, column_offsets=offsets.astype(operand), column_factors=factors.astype(operand), missing=3
        )
        if kind == "bytes":
            counted = Counted(int((x == 3).sum()), -9, 9)
            one = Transform(F4, row_offsets=rng.integers(-2, 3, K).astype("f4"), missing=3, counted=counted)
        two = one if gram else Transform(operand, row_offsets=rng.integers(-2, 3, K).astype(operand))
        transforms = (replace(one, conjugate=kind == "complex"), two)
    vector = 2.0 ** rng.integers(-1, 2, M)
    epilogue = Epilogue(
        0.5, vector, vector if gram else None, row_offsets=vector, column_offsets=vector if gram else None
    )
    before, held = None, None
    if not gram:
        held = rng.integers(-9, 10, (M, n)).astype("f4" if kind == "half" else "f8")
        before, epilogue = put(folder / "before", held), replace(epilogue, beta=2.0)
    fused = Fused(transforms, epilogue)
    if kind.startswith("pairs"):
        before = held = None
        fused = Fused(transforms, pairwise=PAIRS if gram else Pairwise(centered=True, ddof=1))
    dtypes = FusedDtypes(
        sums, (operand, operand), None if held is None else held.dtype, True, kind == "complex", fused.nbytes,
        len(fused.forms), as_bytes=kind == "bytes" and device == "cpu" and line_nbytes == 1,
    )  # fmt: skip
    plan = plan_tiles(
        as_stored_matrix(a, transpose=True), as_stored_matrix(b), result, (20, 20),
        Limits(1, 10**6, on_host=device == "cpu" and line_nbytes == 1, line_nbytes=line_nbytes),
        transpose_a=True, symmetric=gram, keep=keep, fused=dtypes,
    )  # fmt: skip
    plan = replace(plan, read_threads=2, write_threads=2)
    c = zarr.create_array(folder / "c", shape=(M, n), chunks=(20, 20), dtype=result, fill_value=7)
    product = Product(a, b, c, plan, device, "full", f"run-{folder.name}", fused=fused, before=before)

    def factors(forms: Forms) -> tuple[np.ndarray, ...]:
        return tuple(
            factor if transform is None else transformed(transform, factor, WHOLE, WHOLE, form)
            for transform, factor, form in zip(transforms, (x, other), forms, strict=True)
        )

    if fused.pairwise is not None:
        each = {forms: (pair := factors(forms))[0].T @ pair[1] for forms in fused.forms}
        return product, combined(fused.pairwise, each, WHOLE, WHOLE, result), x
    left, right = factors(PRODUCT)
    # All sums are whole numbers of quarters, which are exact in any order.
    wanted = finished(epilogue, (left.T.astype(sums) @ right.astype(sums)), WHOLE, WHOLE, result, held)
    return product, wanted, x


def run(product: Product) -> None:
    worker = TileEngine(product, "here")
    try:
        for tile in product.plan.tiles():
            reports = [worker.multiply(tile, part) for part in range(product.plan.k_tasks)]
            if product.plan.k_tasks > 1:
                store_sum(product, tile, [one.partial for one in reports if one.partial is not None])
    finally:
        worker.close()
        worker.free()


@pytest.mark.sample(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k_parts", [1, 2])
@pytest.mark.parametrize("apart", [False, True], ids=["dense", "apart"])
def test_c_is_numpys_to_the_bit(
    apart: bool, k_parts: int, kind: str, device: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Chunks and cells of 20 elements take no whole number of 128 bytes."""
    side = 60
    keep = Geometry(side, side if kind in SYMMETRIC else 40, 20, k_parts, 20, 20)
    product, wanted, _ = a_product(
        tmp_path, rng, kind, device, keep=keep, line_nbytes=LINE_NBYTES if apart else 1
    )
    assert product.plan.geometry == keep
    assert product.plan.layout.c().apart == apart
    run(product)
    np.testing.assert_array_equal(product.c[...], wanted)


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the buffers that units allocate."""
    sizes: list[int] = []
    for unit in (HostUnit, CudaUnit):
        original = unit.allocate

        def noted(self: Any, size: int, dtype: np.dtype, original: Any = original) -> Any:
            sizes.append(size * dtype.itemsize)
            return original(self, size, dtype)

        monkeypatch.setattr(unit, "allocate", noted)
    return sizes


@pytest.mark.sample(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [60, 120])
def test_the_plan_counts_every_buffer(
    tile: int, kind: str, device: str, tmp_path: Path, rng: np.random.Generator, allocated: list[int]
) -> None:
    keep = Geometry(tile, tile, 20, 1, tile, tile)
    product, _, _ = a_product(tmp_path, rng, kind, device, keep=keep)
    run(product)
    plan = product.plan
    uploaded = 0 if plan.on_host else product.fused.nbytes
    if plan.as_bytes and not byte_integer.available():  # then panels of float32 take less than those of bytes
        assert sum(allocated) < plan.device_peak_nbytes
        return
    assert sum(allocated) == plan.device_peak_nbytes - uploaded
    fused = plan_of_none(plan, product)
    assert sum(allocated) > fused.device_peak_nbytes, "what it takes besides panels and tiles"


def plan_of_none(plan: MatmulPlan, product: Product) -> MatmulPlan:
    """The same without transforms and epilogue."""
    limits = Limits(1, 10**6, on_host=plan.on_host)
    a, b = as_stored_matrix(product.a, transpose=True), as_stored_matrix(product.b)
    return plan_tiles(
        a, b, plan.sums, (20, 20), limits, transpose_a=True, symmetric=plan.symmetric, keep=plan.geometry
    )


def test_a_panel_that_was_just_transformed_is_not_transformed_again(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of k in one panel: A's for a whole row of tiles, and where C is symmetric one for both on the
    diagonal."""
    calls = []
    original = HostFusion.transform

    def noted(self: Any, operand: int, panel: Any, region: fusion.Region, form: Form = "values") -> Any:
        calls.append((operand, region[1].start))
        return original(self, operand, panel, region, form)

    monkeypatch.setattr(HostFusion, "transform", noted)
    for kind, wanted in (
        ("gram", [(0, 0), (0, 60), (1, 0)]),
        ("two", [(0, 0), (1, 0), (1, 60), (0, 60), (1, 0)]),
        (
            "pairs",
            [
                *((operand, start) for start in (0, 60) for operand in (0, 1, 0, 0, 1, 1)),  # on the diagonal
                *((0, 60), (1, 0), (1, 0), (0, 60), (0, 60), (1, 0), (1, 0)),
            ],
        ),
    ):
        calls.clear()
        (tmp_path / kind).mkdir()
        product, _, _ = a_product(tmp_path / kind, rng, kind, "cpu", keep=Geometry(60, 60, K, 1, 60, 60))
        run(product)
        assert calls == wanted
