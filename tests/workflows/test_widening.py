"""New variables of X in a Gram matrix that is there: it is that of all of X, and what it held is not computed again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from distributed import Client, LocalCluster
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tests.pipeline.gram import naive
from tests.workflows.products import Stopped, stop_after
from tilewright.pipeline.errors import OptionError, OutputError, ShapeError, TilewrightError
from tilewright.pipeline.events import Event, Notice
from tilewright.pipeline.product.output import partial_path
from tilewright.workflows.cli import cli


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        LocalCluster(n_workers=2, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def grow(path: Path, more: np.ndarray, axis: int = 1) -> None:
    zarr.open_array(path, mode="r+").append(more, axis=axis)


def as_stored(x: np.ndarray, of: str) -> np.ndarray:
    return x if of == "columns" else np.ascontiguousarray(x.T)


def check_case(client: Client, folder: Path, data: st.DataObject) -> None:
    """After any number of additions, of any dtype, chunks and options, of columns or rows, of one matrix or two."""
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(["i1", "i4", "f4", "f8", "c8"]))
    of = draw(st.sampled_from(["columns", "rows"]))
    lines = draw(st.integers(2, 60))
    parts = draw(st.lists(st.integers(1, 70), min_size=2, max_size=4))
    whole = 5 * rng.standard_normal((lines, sum(parts)))
    whole = (whole + 1j * rng.standard_normal(whole.shape) if dtype == "c8" else whole).astype(dtype)
    chunks = draw(st.integers(3, 40)), draw(st.integers(3, 40))
    options: dict[str, Any] = {"of": of}
    plain = draw(st.booleans(), label="plain")
    if not plain:
        options["center"] = draw(st.booleans())
        options["divide"] = draw(st.sampled_from([None, "n-1", 2.5]))
        if draw(st.booleans(), label="a code"):
            whole[rng.random(whole.shape) < 0.2] = 3
            whole[0] = 2  # there are some numbers of each
            options["missing"] = 3
        if draw(st.booleans(), label="weighted"):
            options["weights"] = rng.random(lines) + 0.1
    two = draw(st.booleans(), label="two matrices")
    y = whole[:, : 1 + sum(parts) // 2].copy()
    axis = 1 if of == "columns" else 0
    x, other = folder / "x.zarr", folder / "y.zarr"
    naive.put(other, as_stored(y, of), chunks)
    given_ones = [x, other, folder / "c.zarr"] if two else [x, folder / "c.zarr"]
    done = 0
    for part in parts:
        added = as_stored(whole[:, done : done + part], of)
        if done == 0:
            naive.put(x, added, chunks)
        else:
            grow(x, added, axis)
        before = done
        done += part
        run = tw.gram(
            *given_ones,
            append=True,
            cluster=client,
            device="cpu",
            device_memory=draw(st.sampled_from(["120KiB", "1MiB"])),
            listener=lambda event: None,
            **options,
        )
        assert run.verification is not None
        assert run.verification.passed
        assert run.plan.symmetric == (not two)
        c = zarr.open_array(folder / "c.zarr")
        unit = c.chunks[0]
        if before >= 4 * unit:
            assert run.resumed > 0, "what C held is kept"
    found = c[...]
    expected = naive.gram(as_stored(whole, of), y=as_stored(y, of) if two else None, **options)
    if not two:
        np.testing.assert_array_equal(found, found.conj().T)
    if found.dtype.kind in "iu":
        np.testing.assert_array_equal(found, expected)
    else:
        scale = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(found, expected, rtol=0, atol=500 * np.finfo(found.dtype).eps * scale)
    assert tw.audit(folder / "c.zarr").passed
    assert not partial_path(folder / "c.zarr").exists()


@settings(max_examples=2)
@given(data=st.data())
def test_c_is_that_of_all_variables(
    client: Client, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_case(client, tmp_path_factory.mktemp("wide"), data)


@pytest.mark.slow
@settings(max_examples=150, derandomize=False)
@given(data=st.data())
def test_more_are_those_of_all_variables(
    client: Client, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_case(client, tmp_path_factory.mktemp("wide"), data)


def with_x(
    client: Client, folder: Path, rng: np.random.Generator, columns: int = 160
) -> tuple[Path, np.ndarray, dict[str, Any]]:
    """X of small integers, C of several tiles, and the options of both."""
    x = rng.integers(-9, 9, (60, columns)).astype("i1")
    path = naive.put(folder / "x.zarr", x, (20, 16))
    options: dict[str, Any] = {
        "x": path,
        "out": folder / "c.zarr",
        "append": True,
        "device": "cpu",
        "device_memory": "30KiB",
        "cluster": client,
    }
    run = tw.gram(**options)
    assert run.plan.tile_count > 5
    return path, x, options


def product_of(x: np.ndarray) -> np.ndarray:
    wide = x.astype("i4")
    found: np.ndarray = wide.T @ wide
    return found


def test_only_new_tiles_are_computed(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    path, x, options = with_x(client, tmp_path, rng)
    more = rng.integers(-9, 9, (60, 37)).astype("i1")
    grow(path, more)
    said: list[Event] = []
    run = tw.gram(listener=said.append, **options)
    both = np.concatenate([x, more], axis=1)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "c.zarr")[...], product_of(both))
    new = 197 * 198 - 160 * 161
    assert run.operations <= 1.4 * 60 * new, "little more than what is new"
    assert any(
        isinstance(event, Notice) and "the result, 160 × 160, becomes 197 × 197:" in event.message
        for event in said
    )
    again = tw.gram(**options)
    assert again.operations == again.write_nbytes == 0


@pytest.mark.more
def test_lines_and_variables_by_turns(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    path, x, options = with_x(client, tmp_path, rng)
    for axis, more in ((0, (30, 160)), (1, (90, 50)), (0, (11, 210))):
        added = rng.integers(-9, 9, more).astype("i1")
        grow(path, added, axis)
        x = np.concatenate([x, added], axis=axis)
        assert tw.gram(**options).plan.symmetric
        np.testing.assert_array_equal(zarr.open_array(tmp_path / "c.zarr")[...], product_of(x))
    assert tw.gram(**options).operations == 0


@pytest.mark.more
def test_a_stopped_run_goes_on_and_c_stands_meanwhile(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    path, x, options = with_x(client, tmp_path, rng)
    more = rng.integers(-9, 9, (60, 70)).astype("i1")
    grow(path, more)
    with pytest.raises(Stopped):
        tw.gram(listener=stop_after(2), **options)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "c.zarr")[...], product_of(x))
    assert tw.audit(tmp_path / "c.zarr").passed
    left = tw.gram(**options)
    whole = left.plan.tile_count
    assert left.resumed > 2
    np.testing.assert_array_equal(
        zarr.open_array(tmp_path / "c.zarr")[...], product_of(np.concatenate([x, more], axis=1))
    )
    grow(path, more)
    fresh = tw.gram(**options)
    assert fresh.plan.tile_count - fresh.resumed > whole - left.resumed, "two tiles had been computed before"


@pytest.mark.more
def test_what_is_damaged_of_c_is_computed_again(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    path, x, options = with_x(client, tmp_path, rng)
    more = rng.integers(-9, 9, (60, 20)).astype("i1")
    grow(path, more)
    chunk = tmp_path / "c.zarr" / "c" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[::-1])
    (tmp_path / "c.zarr" / "c" / "2" / "1").unlink()
    tw.gram(**options)
    np.testing.assert_array_equal(
        zarr.open_array(tmp_path / "c.zarr")[...], product_of(np.concatenate([x, more], axis=1))
    )


@pytest.mark.more
def test_covariances_and_correlations_of_more_variables(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Their elements are of two variables alone; over pairs that are both there too."""
    x = rng.standard_normal((50, 120))
    holes = np.where(rng.random(x.shape) < 0.2, np.nan, x)
    naive.put(tmp_path / "x.zarr", x[:, :90], (20, 16))
    naive.put(tmp_path / "h.zarr", holes[:, :90], (20, 16))
    options: dict[str, Any] = {
        "append": True, "device": "cpu", "device_memory": "150KiB", "cluster": client, "listener": lambda event: None
    }  # fmt: skip
    gaps: dict[str, Any] = {"missing": "nan", "missing_as": "pairwise"}
    for _ in range(2):
        cov = tw.cov(tmp_path / "x.zarr", tmp_path / "cov.zarr", **options)
        corr = tw.corr(tmp_path / "x.zarr", tmp_path / "corr.zarr", **options)
        pairs = tw.cov(tmp_path / "h.zarr", tmp_path / "pairs.zarr", **gaps, **options)
        if zarr.open_array(tmp_path / "x.zarr").shape[1] == 90:
            grow(tmp_path / "x.zarr", x[:, 90:])
            grow(tmp_path / "h.zarr", holes[:, 90:])
    for run in (cov, corr, pairs):
        assert run.resumed > 0
    np.testing.assert_allclose(
        zarr.open_array(tmp_path / "cov.zarr")[...], np.cov(x, rowvar=False), atol=1e-12
    )
    found = zarr.open_array(tmp_path / "corr.zarr")[...]
    np.testing.assert_allclose(found, np.corrcoef(x, rowvar=False), atol=1e-12)
    np.testing.assert_array_equal(np.diag(found), np.ones(120))
    there = ~np.isnan(holes)
    filled = np.where(there, holes, 0)
    n = there.T * 1.0 @ there
    expected = (filled.T @ filled - (filled.T @ there) * (there.T @ filled) / n) / (n - 1)
    np.testing.assert_allclose(zarr.open_array(tmp_path / "pairs.zarr")[...], expected, atol=1e-10)
    assert tw.cov(tmp_path / "x.zarr", tmp_path / "cov.zarr", **options).operations == 0


def test_places_of_more_latitudes(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    """Variables of two axes: those along the first come behind the others, those along the second between them."""
    x = rng.standard_normal((30, 12, 8)).astype("f4")
    options: dict[str, Any] = {
        "sum_over": "time", "append": True, "device": "cpu", "device_memory": "40KiB", "cluster": client
    }  # fmt: skip
    array = zarr.create_array(
        tmp_path / "x.zarr",
        shape=(30, 9, 8),
        chunks=(10, 3, 8),
        dtype="f4",
        dimension_names=["time", "lat", "lon"],
    )
    array[...] = x[:, :9]
    tw.cov(tmp_path / "x.zarr", tmp_path / "c.zarr", **options)
    array.append(x[:, 9:], axis=1)
    tw.cov(tmp_path / "x.zarr", tmp_path / "c.zarr", **options)
    c = zarr.open_array(tmp_path / "c.zarr")
    np.testing.assert_allclose(c[...], np.cov(x.reshape(30, -1), rowvar=False), atol=1e-5)
    made: Any = c.attrs["flattened"]
    assert made["lat_lon"]["shape"] == [12, 8]
    array.append(x[:, :, :1], axis=2)
    with pytest.raises(ShapeError, match=r"new ones lie between the others unless the first of these axes"):
        tw.cov(tmp_path / "x.zarr", tmp_path / "c.zarr", **options)


def test_what_does_not_fit_is_refused(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    path, x, options = with_x(client, tmp_path, rng)
    wider = rng.integers(-9, 9, (60, 20)).astype("i1")
    grow(path, wider)
    wrong: list[tuple[dict[str, Any], type[TilewrightError], str]] = [
        ({"divide": 2.5}, OptionError, "was made by other options than these"),
        ({"center": True}, OptionError, "was made by other options than these"),
        (
            {"center": "rows"},
            OptionError,
            r"append=True beside center='rows': means and deviations of the rows",
        ),
        ({"weights": np.ones(60)}, OptionError, "was made by other options than these"),
        ({"window": 3}, OptionError, "append=True beside window"),
        ({"dtype": "int64"}, OptionError, "was made with dtype='int32', and 'int64' is asked for"),
        ({"missing": 3, "missing_as": "pairwise", "counts": "n"}, OptionError, "append=True beside counts"),
    ]
    for more, error, message in wrong:
        with pytest.raises(error, match=message):
            tw.gram(**{**options, **more})
    half = {
        **options,
        "x": naive.put(tmp_path / "f.zarr", x[:, :40].astype("f4"), (20, 16)),
        "out": tmp_path / "f",
    }
    tw.gram(**half)
    grow(half["x"], x[:, 40:].astype("f4"))
    with pytest.raises(OptionError, match="was made with precision='full', and 'tf32' is asked for"):
        tw.gram(precision="tf32", **half)
    both = naive.put(tmp_path / "both.zarr", np.zeros((70, 180), "i1"), (20, 16))
    with pytest.raises(ShapeError, match="has 180 columns and 70 rows; only one of both is added at a time"):
        tw.gram(**{**options, "x": both})
    other = naive.put(tmp_path / "other.zarr", np.concatenate([x + 1, wider], axis=1), (20, 16))
    with pytest.raises(OutputError, match=r"was made of other numbers than .*other[.]zarr holds in rows"):
        tw.gram(**{**options, "x": other})
    tw.matmul(naive.put(tmp_path / "t.zarr", x.T, (16, 20)), path, tmp_path / "plain.zarr", cluster=client)
    with pytest.raises(OutputError, match="has no record of which lines are in it"):
        tw.gram(**{**options, "out": tmp_path / "plain.zarr", "x": both})
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "c.zarr")[...], product_of(x))
    assert not partial_path(tmp_path / "c.zarr").exists()


@pytest.mark.more
def test_a_command_and_its_plan(tmp_path: Path, rng: np.random.Generator) -> None:
    x = rng.standard_normal((40, 60))
    path = naive.put(tmp_path / "x.zarr", x[:, :48], (20, 16))
    words = ["cov", str(path), str(tmp_path / "c.zarr"), "--append", "--device", "cpu"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    grow(path, x[:, 48:])
    planned = CliRunner().invoke(cli, [*words, "--plan-only"])
    assert planned.exit_code == 0, planned.stderr
    assert "the result, 48 × 48, becomes 60 × 60: " in planned.stderr
    assert zarr.open_array(tmp_path / "c.zarr").shape == (48, 48)
    assert not partial_path(tmp_path / "c.zarr").exists()
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.stderr
    for more in ([], ["--plan-only"]):
        again = CliRunner().invoke(cli, [*words, *more])
        assert again.exit_code == 0, again.stderr
        assert "the result has all 40 rows of X in it already: nothing is added" in again.stderr
    np.testing.assert_allclose(zarr.open_array(tmp_path / "c.zarr")[...], np.cov(x, rowvar=False), atol=1e-12)
