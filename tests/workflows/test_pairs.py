"""Covariances, correlations and Gram matrices over the pairs of numbers that are both there: against pandas, and their
definition, on any chunks and number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask
import numpy as np
import pandas as pd
import pytest
import zarr
from click.testing import CliRunner
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tests.pipeline.gram import naive
from tests.workflows.products import Stopped, stop_after
from tilewright.pipeline.gram.job import gram
from tilewright.pipeline.gram.options import GramRequest
from tilewright.pipeline.product.output import partial_path
from tilewright.workflows.cli import cli

DTYPES = ("i1", "u1", "i4", "f2", "f4", "f8")
TIGHT = 40_000
"""Device memory that cuts a small C into several tiles."""


@pytest.fixture
def client(clusters: dict[int, Client]) -> Client:
    return clusters[2]


def with_gaps(
    rng: np.random.Generator, shape: tuple[int, int], dtype: str, share: float
) -> tuple[np.ndarray, np.ndarray, Any]:
    """A matrix of which this share is missing, the same as pandas has it, and what stands for what is missing."""
    kind = np.dtype(dtype)
    values = 5 * rng.standard_normal(shape) + rng.uniform(-30, 30, shape[1])
    values = np.abs(values).astype(kind) if kind.kind == "u" else values.astype(kind)
    code: Any = 7 if kind.kind in "iu" else np.nan
    gone = rng.random(shape) < share
    values = np.where(gone, code, np.where(values == code, 8, values)).astype(kind)
    wide = values.astype(np.float64)
    return values, np.where(gone, np.nan, wide), 7 if code == 7 else "nan"


def by_definition(
    x: np.ndarray, y: np.ndarray, *, center: bool = True, scale: bool = False, ddof: int = 0
) -> np.ndarray:
    """Of columns with NaN where an element is missing; NaN where no number is right."""
    result = np.full((x.shape[1], y.shape[1]), np.nan)
    for i, one in enumerate(x.T):
        for j, other in enumerate(y.T):
            both = ~np.isnan(one) & ~np.isnan(other)
            n, left, right = int(both.sum()), one[both], other[both]
            if n == 0:
                continue
            if center:
                left, right = left - left.mean(), right - right.mean()
            spread = np.sqrt((left @ left) * (right @ right)) if scale else n - ddof
            if spread > 0:
                result[i, j] = left @ right / spread
    return result


def tolerance_of(dtype: np.dtype) -> float:
    return {2: 2e-3, 4: 1e-4, 8: 1e-10}[dtype.itemsize]


def check_like(found: np.ndarray, wanted: np.ndarray, *, scale: float) -> None:
    """To the rounding of C's dtype, relative to about how large the elements are."""
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    np.testing.assert_allclose(
        found, wanted, rtol=tolerance_of(found.dtype), atol=tolerance_of(found.dtype) * scale
    )


def check_case(clusters: dict[int, Client], folder: Path, data: st.DataObject) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = draw(st.integers(4, 50)), draw(st.integers(1, 40))
    chunks = draw(st.integers(4, 60)), draw(st.integers(4, 60))
    dtype, share = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([0.0, 0.2, 0.5]))
    x, frame, code = with_gaps(rng, shape, dtype, share)
    there = ~np.isnan(frame)
    x, frame = x[:, there.any(axis=0)], frame[:, there.any(axis=0)]  # of others no mean is known
    of = draw(st.sampled_from(["columns", "rows"]))
    stored = x if of == "columns" else np.ascontiguousarray(x.T)
    path = naive.put(folder / "x.zarr", stored, chunks)
    options: dict[str, Any] = {
        "of": of, "missing": code, "missing_as": "pairwise", "device": "cpu", "overwrite": True, "resume": False,
        "cluster": clusters[draw(st.sampled_from([1, 2, 3]))],
        "device_memory": draw(st.sampled_from([None, TIGHT])),
    }  # fmt: skip
    out = folder / "c.zarr"
    run = tw.cov(path, out, **options)
    found = zarr.open_array(out)[...]
    largest = float(np.nanvar(frame, axis=0).max(initial=0.0))
    check_like(found, pd.DataFrame(frame).cov().to_numpy(), scale=largest)
    np.testing.assert_array_equal(found, found.T)
    assert run.verification is not None
    assert run.verification.passed
    tw.corr(path, out, constant="zero", **options)
    found = zarr.open_array(out)[...]
    wanted = pd.DataFrame(frame).corr().to_numpy()
    expected = np.where(
        np.isnan(wanted) & ((there.T * 1.0) @ there > 0)[np.ix_(*[there.any(axis=0)] * 2)], 0, wanted
    )
    check_like(found, expected, scale=10)  # deviations over few pairs may be small
    np.testing.assert_array_equal(found, found.T)
    assert set(np.unique(np.diag(found))) <= {0.0, 1.0}
    tw.gram(path, out, **options)
    found = zarr.open_array(out)[...]
    largest = float(np.nanmax(frame**2, initial=0.0))
    check_like(found, by_definition(frame, frame, center=False), scale=largest)


@settings(max_examples=3)
@given(st.data())
def test_elements_are_those_over_their_pairs(
    clusters: dict[int, Client], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_case(clusters, tmp_path_factory.mktemp("pairs"), data)


@pytest.mark.slow
@settings(max_examples=400)
@given(st.data())
def test_elements_are_those_over_their_pairs_thoroughly(
    clusters: dict[int, Client], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_case(clusters, tmp_path_factory.mktemp("pairs"), data)


def test_two_matrices(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    (x, left, _), (y, right, _) = (with_gaps(rng, (40, columns), "f4", 0.3) for columns in (7, 12))
    one, other = naive.put(tmp_path / "x.zarr", x, (16, 5)), naive.put(tmp_path / "y.zarr", y, (9, 6))
    options: dict[str, Any] = {
        "missing": "nan", "missing_as": "pairwise", "device": "cpu", "cluster": client, "dtype": "float64"
    }  # fmt: skip
    tw.cov(one, other, tmp_path / "cov.zarr", **options)
    wanted = by_definition(left, right, ddof=1)
    np.testing.assert_allclose(zarr.open_array(tmp_path / "cov.zarr")[...], wanted, atol=1e-10)
    tw.corr(one, other, tmp_path / "corr.zarr", **options)
    wanted = by_definition(left, right, scale=True)
    np.testing.assert_allclose(zarr.open_array(tmp_path / "corr.zarr")[...], wanted, atol=1e-10)


def test_a_relationship_matrix_over_the_variants_that_both_have(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Centred, and scaled, by columns that are summed over; missing as the mean, and not."""
    x = rng.integers(0, 3, (21, 50)).astype("i1")
    x[rng.random(x.shape) < 0.2] = -1
    frame = np.where(x < 0, np.nan, x.astype(np.float64))
    path = naive.put(tmp_path / "x.zarr", x, (8, 16))
    options: dict[str, Any] = {
        "of": "rows", "missing": -1, "center": "columns", "device": "cpu", "cluster": client, "overwrite": True
    }  # fmt: skip
    centred = frame - np.nanmean(frame, axis=0)
    scaled = centred / np.nanstd(frame, axis=0)
    for more, rows in (
        ({"missing_as": "pairwise"}, centred),
        ({"divide": "pairs"}, centred),
        ({"missing_as": "pairwise", "scale": "columns", "divide": "n"}, scaled),
    ):
        tw.gram(path, tmp_path / "g.zarr", **options, **more)
        wanted = by_definition(rows.T, rows.T, center=False)
        np.testing.assert_allclose(zarr.open_array(tmp_path / "g.zarr")[...], wanted, atol=2e-6)


def test_means_may_be_over_all_and_divisors_over_pairs(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """As ``numpy.ma.cov`` has it."""
    x, frame, _ = with_gaps(rng, (40, 9), "f8", 0.3)
    path = naive.put(tmp_path / "x.zarr", x, (16, 5))
    tw.gram(
        path, tmp_path / "c.zarr", center=True, missing="nan", divide="pairs", device="cpu", cluster=client
    )
    wanted = np.ma.cov(np.ma.masked_invalid(frame), rowvar=False, bias=True).data
    np.testing.assert_allclose(zarr.open_array(tmp_path / "c.zarr")[...], wanted)


def test_small_integers_are_exact(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    """Whatever their mean: sums of whole numbers, and one division of each element."""
    small = rng.integers(0, 3, (200, 12))
    gone = rng.random(small.shape) < 0.3
    x = np.where(gone, -1, small + 10**6).astype("i4")
    path = naive.put(tmp_path / "x.zarr", x, (64, 5))
    options: dict[str, Any] = {"missing": -1, "missing_as": "pairwise", "device": "cpu", "cluster": client}
    tw.cov(path, tmp_path / "c.zarr", **options)
    held, there = np.where(gone, 0, small), (~gone).astype(int)
    n = there.T @ there
    sums = n * (held.T @ held) - (held.T @ there) * (there.T @ held)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "c.zarr")[...], sums / (n * (n - 1)))


def test_what_is_constant_over_its_pairs(client: Client, tmp_path: Path) -> None:
    gap = np.nan
    x = np.array([[1, 2, gap], [1, 4, gap], [2, gap, 5], [3, gap, 9], [gap, 3, 2.0]])
    path = naive.put(tmp_path / "x.zarr", x)
    options: dict[str, Any] = {
        "missing": "nan", "missing_as": "pairwise", "device": "cpu", "cluster": client, "overwrite": True
    }  # fmt: skip
    for constant, there in (("error", gap), ("zero", 0.0)):
        tw.corr(path, tmp_path / "c.zarr", constant=constant, **options)
        expected = [[1, there, 1], [there, 1, there], [1, there, 1]]
        np.testing.assert_allclose(zarr.open_array(tmp_path / "c.zarr")[...], expected)


@pytest.mark.more
def test_bits_do_not_depend_on_workers_nor_on_a_stop(
    clusters: dict[int, Client], tmp_path: Path, rng: np.random.Generator
) -> None:
    x, _, _ = with_gaps(rng, (120, 90), "f4", 0.3)
    path = naive.put(tmp_path / "x.zarr", x, (30, 16))
    found = []
    for workers, client in clusters.items():
        out = tmp_path / f"{workers}.zarr"
        options: dict[str, Any] = {
            "missing": "nan", "missing_as": "pairwise", "device": "cpu", "cluster": client, "device_memory": TIGHT
        }  # fmt: skip
        if workers == 2:
            with pytest.raises(Stopped):
                tw.corr(path, out, listener=stop_after(2), **options)
            assert partial_path(out).exists()
        run = tw.corr(path, out, **options)
        assert run.plan.tile_count > 3
        assert (run.resumed > 0) == (workers == 2)
        found.append(zarr.open_array(out)[...])
    for other in found[1:]:
        np.testing.assert_array_equal(other.view("u4"), found[0].view("u4"))


def test_k_in_parts(clusters: dict[int, Client], tmp_path: Path, rng: np.random.Generator) -> None:
    """Where C is small, several workers add up parts of the sums."""
    x, frame, _ = with_gaps(rng, (4000, 6), "f8", 0.3)
    path = naive.put(tmp_path / "x.zarr", x, (500, 6))
    with pytest.MonkeyPatch.context() as patched:
        for name in ("SPLIT_NBYTES", "TILE_OPERATIONS"):
            patched.setattr(f"tilewright.pipeline.plan.tiling.{name}", 100)
        run = tw.corr(
            path, tmp_path / "c.zarr", missing="nan", missing_as="pairwise", device="cpu", cluster=clusters[3],
            device_memory="200kB",
        )  # fmt: skip
    assert run.plan.k_parts > 1
    np.testing.assert_allclose(
        zarr.open_array(tmp_path / "c.zarr")[...], pd.DataFrame(frame).corr(), atol=1e-12
    )


def test_a_tile_that_is_wrong_is_found_and_computed_once_more(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Its rows are many, of which one is drawn; a record that no longer says what was written hides that it changed."""
    x, frame, _ = with_gaps(rng, (60, 90), "f8", 0.3)
    path = naive.put(tmp_path / "x.zarr", x, (30, 16))
    changed = []

    def spoil(event: Any) -> None:
        if not changed and getattr(event, "name", "") == "verify" and hasattr(event, "total"):
            growing = zarr.open_array(partial_path(tmp_path / "c.zarr"))
            growing[0:16, 64:80] = growing[0:16, 64:80] * 1.01 + 0.1
            changed.append(True)

    run = tw.cov(
        path, tmp_path / "c.zarr", missing="nan", missing_as="pairwise", device="cpu", cluster=client,
        device_memory=TIGHT, listener=spoil,
    )  # fmt: skip
    assert changed
    assert run.verification is not None
    assert run.verification.passed
    np.testing.assert_allclose(
        zarr.open_array(tmp_path / "c.zarr")[...], pd.DataFrame(frame).cov(), atol=1e-10
    )


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"missing": None}, "missing_as='pairwise': nobody said what stands for a missing number"),
    ({"missing": None, "missing_as": "mean", "divide": "pairs"}, "divide='pairs': nobody said"),
    ({"weights": np.ones(6)}, "missing_as='pairwise': pairs are counted and have no weights"),
    ({"divide": 3}, "divides each element by its own number of pairs, not by 3.0; divide may be"),
    ({"center": "both"}, "beside center='both': a pair of columns has no means of rows"),
    ({"scale": True}, "beside scale=True: deviations over pairs are from .*centre the columns too"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = naive.put(tmp_path / "x.zarr", np.arange(24.0).reshape(6, 4))
    given_ones = {"missing": "nan", "missing_as": "pairwise", **options}
    with pytest.raises(tw.OptionError, match=message):
        gram(GramRequest(path, tmp_path / "c.zarr", **given_ones))
    assert not (tmp_path / "c.zarr").exists()


def test_complex_numbers_are_refused(tmp_path: Path) -> None:
    path = naive.put(tmp_path / "x.zarr", np.ones((6, 4), "c8"))
    with pytest.raises(tw.DTypeError, match="pairs that are both there are formed of real numbers alone"):
        tw.cov(path, tmp_path / "c.zarr", missing="nan", missing_as="pairwise")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.chdir(tmp_path)
    x, frame, _ = with_gaps(rng, (40, 9), "f8", 0.3)
    naive.put(Path("x.zarr"), x, (16, 5))
    words = "corr x.zarr c.zarr --missing nan --missing-as pairwise --device cpu"
    with dask.config.set({"tilewright.tiles": 1}):
        result = CliRunner().invoke(cli, words.split())
    assert result.exit_code == 0, result.stderr
    assert "every element was computed anew" in result.output
    np.testing.assert_allclose(zarr.open_array("c.zarr")[...], pd.DataFrame(frame).corr(), atol=1e-12)
