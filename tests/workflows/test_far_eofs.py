"""EOFs of data whose means are far larger than their deviations, compared with NumPy's of extended precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client

import tilewright as tw
from tests.pipeline.gram.naive import put
from tilewright.pipeline.errors import OptionError

pytestmark = pytest.mark.skipif(
    bool(np.finfo(np.longdouble).eps >= np.finfo(np.float64).eps),
    reason="no extended precision on this machine",
)

TALL, WIDE = (60, 9), (9, 60)
MODES = 3


def far(rng: np.random.Generator, shape: tuple[int, int], dtype: Any, mean: float) -> np.ndarray:
    """A few patterns and noise of deviation about 1, about means of either sign."""
    samples, variables = shape
    patterns = np.linalg.qr(rng.standard_normal((variables, MODES)))[0] * variables**0.5
    x = rng.standard_normal((samples, MODES)) * (1.0, 0.6, 0.3) @ patterns.T
    x += 0.05 * rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        x = x * np.exp(1j * np.arange(variables))
    if np.dtype(dtype).kind in "iu":
        x = np.rint(1000 * x)
    return (x + mean * np.resize([1.0, -0.7, 0.4], variables)).astype(dtype)


def stored_array(out: Path, name: str) -> np.ndarray:
    return np.asarray(zarr.open_array(out / name, mode="r")[...])


def check(
    out: Path,
    x: np.ndarray,
    tolerance: float,
    weights: np.ndarray | None = None,
    scale: bool = False,
) -> None:
    """EOFs of samples × variables and their scores, by the anomalies in extended precision; variables that are NaN
    throughout have none."""
    kind = np.clongdouble if x.dtype.kind == "c" else np.longdouble
    wide = (x - x[0] if x.dtype.kind == "i" else x.astype(kind) - x[0]).astype(
        kind
    )  # so near 0 that means are exact
    there = ~np.isnan(wide).all(0)
    wide = wide[:, there]
    heavy = np.ones(len(x)) if weights is None else weights
    apart = wide - (wide * heavy[:, np.newaxis]).sum(0) / heavy.sum()
    degrees = float(heavy.sum() - (heavy**2).sum() / heavy.sum())
    if scale:
        apart /= np.sqrt((np.abs(apart) ** 2 * heavy[:, np.newaxis]).sum(0) / degrees)
    roots = np.sqrt(heavy)[:, np.newaxis]
    values = np.linalg.svd((apart * roots).astype(np.complex128), compute_uv=False)[:MODES] ** 2 / degrees
    np.testing.assert_allclose(stored_array(out, "eigenvalues"), values, rtol=tolerance)
    components = stored_array(out, "components")
    assert np.isnan(components[:, ~there]).all()
    found, vectors = stored_array(out, "scores"), components[:, there].T
    expected = np.asarray(apart @ vectors.astype(apart.dtype))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * float(np.abs(expected).max()))


@pytest.mark.sample(6)
@pytest.mark.parametrize("method", ["krylov", "gram"])
@pytest.mark.parametrize("shape", [TALL, WIDE], ids=["tall", "wide"])
@pytest.mark.parametrize("of", ["columns", "rows"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("dtype", "mean", "tolerance"),
    [
        ("f4", 1e3, 2e-6),
        ("f4", 1e6, 2e-6),
        ("f8", 1e9, 1e-11),
        ("f8", 1e12, 1e-7),
        ("c8", 1e5, 3e-6),
        ("i8", 2**50, 1e-11),
    ],
)
def test_far_means_cost_no_digits(
    method: Any,
    shape: tuple[int, int],
    of: Any,
    weighted: bool,
    dtype: str,
    mean: float,
    tolerance: float,
    client: Client,
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    x = far(rng, shape, dtype, mean)
    weights = np.arange(len(x)) % 3 + 0.5 if weighted else None
    stored = put(tmp_path / "x.zarr", x if of == "columns" else x.T.copy(), (7, 5))
    tw.eofs(
        *(stored, tmp_path / "out.zarr", MODES),
        of=of,
        method=method,
        sample_weights=weights,
        scale=weighted,
        tol=1e-6 if dtype in ("f4", "c8") else 1e-12,
        cluster=client,
        device="cpu",
    )
    check(tmp_path / "out.zarr", x, tolerance, weights, weighted)


def test_variables_that_are_missing_throughout_cost_none(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    x = far(rng, TALL, "f4", 1e6)
    x[:, 4] = np.nan
    stored = put(tmp_path / "x.zarr", x, (20, 4))
    tw.eofs(stored, tmp_path / "out.zarr", MODES, missing="nan", constant="nan", tol=1e-6, cluster=client)
    check(tmp_path / "out.zarr", x, 2e-6)


def test_what_is_lost_beside_missing_numbers_is_refused_and_the_remedy_helps(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    x = far(rng, TALL, "f4", 1e7)
    x[3, 4] = np.nan
    stored, out = put(tmp_path / "x.zarr", x, (20, 4)), tmp_path / "out.zarr"
    with pytest.raises(OptionError, match=r"center: means of .* in float32, .*dtype='float64'"):
        tw.eofs(stored, out, MODES, missing="nan", cluster=client)
    assert [path.name for path in tmp_path.iterdir()] == ["x.zarr"]
    tw.eofs(stored, out, MODES, missing="nan", dtype="float64", cluster=client)
    wide = x.astype(np.longdouble)
    apart = np.nan_to_num(wide - np.nanmean(wide, 0)).astype(np.float64)
    values = np.linalg.svd(apart, compute_uv=False)[:MODES] ** 2 / (len(x) - 1)
    np.testing.assert_allclose(stored_array(out, "eigenvalues"), values, rtol=1e-8)


def test_numbers_that_the_dtype_asked_for_does_not_hold_are_refused(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    x = far(rng, TALL, "f8", 1e6)
    stored = put(tmp_path / "x.zarr", x, (20, 4))
    with pytest.raises(OptionError, match=r"center: means of .* in float32, .*dtype='float64'"):
        tw.eofs(stored, tmp_path / "out.zarr", MODES, dtype="float32", cluster=client)
    tw.eofs(stored, tmp_path / "out.zarr", MODES, dtype="float64", cluster=client)
    check(tmp_path / "out.zarr", x, 1e-9)
