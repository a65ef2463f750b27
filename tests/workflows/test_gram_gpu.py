"""Gram matrices, and products with an epilogue, on a GPU: the CPU's answer, and NumPy's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import tilewright as tw
from tests.pipeline.gram import naive
from tests.pipeline.plan.test_band import mask
from tests.workflows.products import put
from tilewright.pipeline.plan.band import Band
from tilewright.pipeline.product.banded import as_window

pytestmark = pytest.mark.gpu


def values(dtype: str, shape: tuple[int, int] = (700, 300)) -> np.ndarray:
    rng = np.random.default_rng(33)
    found = (2 if dtype == "f2" else 20) * rng.standard_normal(
        shape
    ) + 1.5  # sums of squares that float16 holds
    return (found + 1j * rng.standard_normal(shape) if dtype.startswith("c") else found).astype(dtype)


CASES: list[dict[str, Any]] = [
    {},
    {"center": True, "divide": "n-1"},
    {"center": True, "scale": True, "divide": "n-1"},
    {"of": "rows", "center": "columns", "divide": 7.5},
    {"center": "both"},
    {"center": True, "weights": np.linspace(0.1, 1, 700), "divide": "n"},
]


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("options", CASES, ids=lambda options: "-".join(map(str, options)) or "plain")
@pytest.mark.parametrize("memory", [None, "400KiB"])
def test_a_gram_matrix_on_a_gpu_is_that_of_the_definition(
    tmp_path: Path, dtype: str, options: dict[str, Any], memory: str | None
) -> None:
    x = values(dtype)
    if memory is not None and np.dtype(dtype).itemsize > 8:
        memory = "800KiB"
    path = naive.put(tmp_path / "x.zarr", x, (64, 64))
    run = tw.gram(path, tmp_path / "c.zarr", device="cuda", device_memory=memory, **options)
    assert run.verification is not None
    assert run.verification.passed
    found = zarr.open_array(tmp_path / "c.zarr")[...]
    np.testing.assert_array_equal(found, found.conj().T)
    expected = naive.gram(x, **options)
    if found.dtype.kind in "iu":
        np.testing.assert_array_equal(found, expected)
        return
    scale = np.abs(expected).max() + np.abs(naive.gram(x, **{**options, "center": False})).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=100 * np.finfo(found.dtype).eps * scale)


@pytest.mark.parametrize("dtype", ["i1", "f4", "f8", "c8"])
@pytest.mark.parametrize("window", [30, (0, 130)])
@pytest.mark.parametrize("memory", [None, "400KiB"])
def test_a_band_on_a_gpu_is_that_of_the_definition(
    tmp_path: Path, dtype: str, window: Any, memory: str | None
) -> None:
    x = values(dtype)
    path = naive.put(tmp_path / "x.zarr", x, (64, 64))
    options: dict[str, Any] = {"center": True, "divide": "n-1"}
    run = tw.gram(path, tmp_path / "c.zarr", window=window, device="cuda", device_memory=memory, **options)
    assert run.verification is not None
    assert run.verification.passed
    # Several tiles are under way, whose order is not the plan's for certain; in any order one reads its own panels.
    assert run.read_nbytes <= sum(map(run.plan.tile_read_nbytes, run.plan.tiles()))
    found = zarr.open_array(tmp_path / "c.zarr")[...]
    expected = np.where(mask(300, 300, Band(*as_window(window))), naive.gram(x, **options), 0)
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=100 * np.finfo(found.dtype).eps * np.abs(naive.gram(x)).max() / 700
    )


@pytest.mark.parametrize("dtype", ["i1", "f4", "f8"])
def test_missing_numbers_on_a_gpu_are_as_the_mean(tmp_path: Path, dtype: str) -> None:
    x = values(dtype)
    code: Any = np.nan if dtype.startswith("f") else 3
    x[np.random.default_rng(1).random(x.shape) < 0.1] = code
    path = naive.put(tmp_path / "x.zarr", x, (64, 64))
    missing = "nan" if code != code else code
    tw.cov(path, tmp_path / "c.zarr", missing=missing, device="cuda")
    tw.cov(path, tmp_path / "d.zarr", missing=missing, device="cpu")
    found, by_cpu = (zarr.open_array(tmp_path / name)[...] for name in ("c.zarr", "d.zarr"))
    np.testing.assert_allclose(found, by_cpu, rtol=0, atol=1e-4 * np.abs(by_cpu).max())


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_a_large_mean_costs_no_digits_on_a_gpu(tmp_path: Path, dtype: str) -> None:
    x = (1e6 + np.random.default_rng(5).standard_normal((700, 300))).astype(dtype)
    path = naive.put(tmp_path / "x.zarr", x, (64, 64))
    tw.corr(path, tmp_path / "c.zarr", device="cuda")
    expected = np.corrcoef(x.astype("f8"), rowvar=False)
    np.testing.assert_allclose(
        zarr.open_array(tmp_path / "c.zarr")[...], expected, rtol=0, atol=1e-5 if dtype == "f4" else 1e-9
    )


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("window", [None, (7, 90)])
@pytest.mark.parametrize("memory", [None, "800KiB"])
def test_pairs_are_counted_on_a_gpu(tmp_path: Path, dtype: str, window: Any, memory: str | None) -> None:
    x = values(dtype)
    x[np.random.default_rng(1).random(x.shape) < 0.1] = np.nan
    path = naive.put(tmp_path / "x.zarr", x, (64, 64))
    options: dict[str, Any] = {"missing": "nan", "missing_as": "pairwise", "window": window}
    run = tw.cov(
        path, tmp_path / "c.zarr", counts=tmp_path / "n.zarr", device="cuda", device_memory=memory, **options
    )
    assert run.verification is not None
    assert run.verification.passed
    tw.cov(path, tmp_path / "d.zarr", device="cpu", **options)
    there = (~np.isnan(x)).astype(int)
    inside = mask(300, 300, Band(*as_window(window))) if window else True
    found, by_cpu, counts = (zarr.open_array(tmp_path / f"{name}.zarr")[...] for name in "cdn")
    np.testing.assert_array_equal(counts, np.where(inside, there.T @ there, 0))
    np.testing.assert_allclose(found, by_cpu, rtol=0, atol=1e-4 * np.abs(by_cpu).max())


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8"])
def test_a_product_on_a_gpu_is_scaled_offset_and_added(tmp_path: Path, dtype: str) -> None:
    a, b = values(dtype, (300, 200)), values(dtype, (200, 180))
    before = values(dtype, (300, 180))
    rng = np.random.default_rng(2)
    rows, columns = rng.random(300), rng.random(180)
    for name, data in (("a", a), ("b", b), ("c", before)):
        put(tmp_path / f"{name}.zarr", data, (64, 64))
    paths = [tmp_path / f"{name}.zarr" for name in "abc"]
    tw.matmul(*paths, alpha=0.5, beta=2, row_scale=rows, column_offset=columns, device="cuda")
    expected = 0.5 * rows[:, np.newaxis] * (a @ b) + columns + 2 * before
    np.testing.assert_allclose(
        zarr.open_array(paths[2])[...], expected, rtol=0, atol=1e-3 * np.abs(expected).max()
    )
