"""Eigenpairs and EOFs of stored matrices, from the public functions, compared with NumPy's on whole arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray
import zarr
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tests.pipeline.gram import naive
from tests.pipeline.gram.naive import put
from tilewright.pipeline.events import Caution, Event, Notice, WorkPlanned

RANK = 5


def field(
    rng: np.random.Generator, samples: int, variables: int, dtype: Any, noise: float = 0.02
) -> np.ndarray:
    """Some patterns of falling variance, a mean and noise."""
    rank = min(RANK, samples, variables)
    patterns = np.linalg.qr(rng.standard_normal((variables, rank)))[0]
    x = rng.standard_normal((samples, rank)) * 2.0 ** -np.arange(rank) @ patterns.T
    x += noise * rng.standard_normal((samples, variables)) / np.sqrt(variables) + rng.standard_normal(
        variables
    )
    if np.dtype(dtype).kind == "c":
        x = x + 1j * np.roll(x, 1, axis=1)[::-1]
    if np.dtype(dtype).kind in "iu":
        x = np.rint(100 * x)
    return x.astype(dtype)


def anomalies(
    x: np.ndarray,
    *,
    center: bool = True,
    scale: bool = False,
    missing: Any = None,
    weights: np.ndarray | None = None,
    sample_weights: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Samples × variables as they are decomposed, without the weights of the samples, those, and the divisor."""
    there = naive.present(x, missing)
    heavy = np.ones(len(x)) if sample_weights is None else sample_weights
    wide = np.where(there, x, 0).astype(np.complex128 if x.dtype.kind == "c" else np.float64)
    mass = there * heavy[:, np.newaxis]
    mean = (wide * mass).sum(0) / mass.sum(0)
    degrees = heavy.sum() - (heavy**2).sum() / heavy.sum()
    apart = np.where(there, wide - mean, 0)
    deviation = np.sqrt((np.abs(apart) ** 2 * mass).sum(0) / degrees)
    y = apart if center else wide
    y = y / deviation if scale else y
    y = y if weights is None else y * np.sqrt(weights)
    return y, heavy, degrees


def check(run: tw.EofRun, x: np.ndarray, k: int, rtol: float = 1e-4, **options: Any) -> dict[str, np.ndarray]:
    """Compare a run, and what it stored, with NumPy's; returns what is stored. x: samples × variables."""
    y, heavy, degrees = anomalies(x, **options)
    heavier = np.sqrt(heavy)[:, np.newaxis] * y
    _, sizes, right = np.linalg.svd(heavier, full_matrices=False)
    values = sizes**2 / degrees
    group = zarr.open_group(run.out, mode="r")
    stored = {name: array[:] for name, array in group.arrays()}
    floor = rtol * values[0] * 0.01
    np.testing.assert_allclose(run.values, values[:k], rtol=rtol, atol=floor)
    np.testing.assert_array_equal(stored["eigenvalues"], run.values)
    np.testing.assert_array_equal(stored["explained_variance"], run.values)
    np.testing.assert_allclose(run.total_variance, values.sum(), rtol=1e-5)
    np.testing.assert_allclose(stored["explained_variance_ratio"], run.values / values.sum(), rtol=1e-5)
    np.testing.assert_allclose(stored["singular_values"], np.sqrt(run.values * degrees))
    np.testing.assert_array_equal(stored["mode"], np.arange(1, k + 1))
    components, scores = stored["components"], stored["scores"]
    assert (components.shape, scores.shape) == ((k, x.shape[1]), (x.shape[0], k))
    np.testing.assert_allclose(components.conj() @ components.T, np.eye(k), atol=1e-5)
    largest = components[np.arange(k), np.abs(components).argmax(1)]
    assert (largest.real > 0).all()
    np.testing.assert_allclose(largest.imag, 0, atol=1e-6)
    scale = np.sqrt(values[0] * degrees)
    np.testing.assert_allclose(scores, y @ components.T, atol=1e-5 * scale)
    apart = -np.diff(values)
    for i in range(k):
        gap = min(apart[max(0, i - 1) : i + 1], default=0.0)
        if gap > 0.05 * values[i] and values[i] > 0.01 * values[0]:  # a vector of its own
            assert abs(np.vdot(right[i].conj(), components[i])) > 1 - 1e-6
    return stored


@settings(max_examples=3)
@given(data=st.data())
def test_eofs_are_those_of_numpy(
    clusters: dict[int, Client], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_any(clusters, tmp_path_factory, data)


@pytest.mark.slow
@settings(max_examples=100)
@given(data=st.data())
def test_more_eofs_are_those_of_numpy(
    clusters: dict[int, Client], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_any(clusters, tmp_path_factory, data)


def check_any(
    clusters: dict[int, Client], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """One case of shape, dtype, chunks and options, by either method."""
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = draw(st.integers(6, 60)), draw(st.integers(6, 60))
    dtype = draw(st.sampled_from(["f4", "f8", "c8", "c16", "i2"]))
    x = field(rng, *shape, dtype)
    options: dict[str, Any] = {"center": draw(st.booleans()), "scale": draw(st.booleans())}
    of = draw(st.sampled_from(["columns", "rows"]))
    given_options: dict[str, Any] = {}
    if draw(st.booleans(), label="gaps"):
        gone = rng.random(shape) < 0.1
        if draw(st.booleans(), label="by a mask"):
            options["missing"] = gone
            given_options["missing"] = gone if of == "columns" else gone.T
        else:
            options["missing"] = given_options["missing"] = 7 if dtype == "i2" else "nan"
            x[gone] = 7 if dtype == "i2" else np.nan
    if draw(st.booleans(), label="weights"):
        options["weights"] = rng.random(shape[1])
    if draw(st.booleans(), label="weights of samples"):
        options["sample_weights"] = rng.integers(0, 4, shape[0]) + (np.arange(shape[0]) < 4.0)
    stored = x if of == "columns" else np.ascontiguousarray(x.T)
    chunks = draw(st.integers(5, 70)), draw(st.integers(5, 70))
    k = draw(st.integers(1, 6))
    folder = tmp_path_factory.mktemp("x")
    path = put(folder / "x.zarr", stored, chunks, compressors=draw(st.sampled_from([None, "auto"])))
    options_of_run = {"verify": draw(st.booleans()), "method": draw(st.sampled_from(["gram", "krylov"]))}
    client = clusters[draw(st.sampled_from([1, 2, 3]), label="workers")]
    run = tw.eofs(
        path, folder / "out.zarr", k, of=of, cluster=client, **options_of_run, **options | given_options
    )
    check(run, x, k, **options)
    if options_of_run["method"] == "gram":
        assert run.passes == (4 if shape[0] < shape[1] else 3)
    assert [each.name for each in folder.iterdir()] in (["x.zarr", "out.zarr"], ["out.zarr", "x.zarr"])


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("shape", [(90, 400), (400, 90)])
def test_a_slow_spectrum(
    client: Client, tmp_path: Path, rng: np.random.Generator, dtype: str, shape: tuple[int, int]
) -> None:
    values = (1 + np.arange(90)) ** -0.25
    left, right = (np.linalg.qr(rng.standard_normal((side, 90)))[0] for side in shape)
    x = ((left * values) @ right.T).astype(dtype)
    path = put(tmp_path / "x.zarr", x, (64, 64))
    run = tw.eofs(path, tmp_path / "out.zarr", 10, center=False, method="krylov", cluster=client)
    check(run, x, 10, center=False)
    assert run.passes < 30


def check_eigenpairs(clusters: dict[int, Client], folder: Path, draw: Any) -> None:
    """Of a matrix of any side, rank, dtype, chunks, shift and number of workers."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32), label="seed"))
    dtype = draw(st.sampled_from(["f4", "f8", "c8", "c16", "i1", "i4", "f2"]), label="dtype")
    n = draw(st.integers(1, 90), label="side")
    rank = draw(st.integers(1, n + 20), label="terms")
    wide = rng.standard_normal((rank, n)) + (1j * rng.standard_normal((rank, n)) if dtype[0] == "c" else 0)
    g = wide.conj().T @ wide - draw(st.sampled_from([0, 30]), label="less") * np.eye(n)
    if dtype == "i1":
        g = g * 100 / np.abs(g).max()
    g = np.rint(g.real).astype(dtype) if dtype[0] == "i" else g.astype(dtype)
    g = np.triu(g) + np.triu(g, 1).conj().T
    k = draw(st.integers(1, min(n, 6)), label="k")
    chunks = draw(st.integers(3 + n // 8, n + 9)), draw(st.integers(3 + n // 8, n + 9))
    run = tw.eigh(
        put(folder / "g.zarr", g, chunks, compressors=draw(st.sampled_from([None, "auto"]))),
        k,
        tol=1e-6,
        cluster=clusters[draw(st.sampled_from([1, 2, 3]), label="workers")],
        device="cpu",
    )
    exact = g.astype("c16" if dtype[0] == "c" else "f8")
    values, vectors = np.linalg.eigh(exact)
    largest = np.abs(values).max()
    rounding = 100 * np.finfo(run.dtype).eps * largest
    np.testing.assert_allclose(run.values, values[::-1][:k], rtol=1e-5, atol=rounding)
    np.testing.assert_allclose(run.vectors.conj().T @ run.vectors, np.eye(k), atol=1e-5)
    sizes = np.linalg.norm(exact @ run.vectors - run.vectors * run.values, axis=0)
    assert (sizes <= 2e-6 * np.abs(run.values) + rounding).all()
    np.testing.assert_allclose(run.residuals, sizes, atol=1e-5 * largest)
    for i in range(k):
        gap = np.abs(np.delete(values, n - 1 - i) - values[n - 1 - i]).min(initial=np.inf)
        if gap > 0.05 * largest:  # a vector of its own
            assert abs(np.vdot(vectors[:, n - 1 - i], run.vectors[:, i])) > 1 - 1e-5
    assert run.dtype == {"i1": "float32", "i4": "float64", "f2": "float32"}.get(dtype, np.dtype(dtype).name)


@settings(max_examples=4)
@given(data=st.data())
def test_eigenpairs_are_those_of_numpy(
    clusters: dict[int, Client], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_eigenpairs(clusters, tmp_path_factory.mktemp("g"), data.draw)


@pytest.mark.slow
@settings(max_examples=150, derandomize=False)
@given(data=st.data())
def test_more_eigenpairs_are_those_of_numpy(
    clusters: dict[int, Client], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_eigenpairs(clusters, tmp_path_factory.mktemp("g"), data.draw)


@pytest.mark.parametrize(("dtype", "size"), [("f4", 1e-30), ("f8", 1e-300)])
def test_squares_that_underflow_are_told_of(
    dtype: str, size: float, client: Client, rng: np.random.Generator
) -> None:
    """In place of an eigenvalue of 0, or of what nothing varies in."""
    x = (size * rng.standard_normal((12, 5))).astype(dtype)
    with pytest.raises(
        tw.OptionError, match=f"squares of what varies in .* below what {np.dtype(dtype)} tells from 0"
    ):
        tw.eofs(x, k=2, cluster=client, device="cpu")
    if dtype == "f4":
        values = tw.eofs(x, k=2, dtype="f8", cluster=client, device="cpu").eigenvalues
        expected = np.linalg.eigvalsh(np.cov(x.astype("f8"), rowvar=False))[:-3:-1]
        np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_fewer_directions_than_eofs(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    x = rng.standard_normal((6, 40)).astype("f4")  # of rank 5 once it is centred
    run = tw.eofs(put(tmp_path / "x.zarr", x, (4, 16)), tmp_path / "out.zarr", 6, cluster=client)
    check(run, x, 6)
    assert run.values[5] < 1e-6 * run.values[0]
    zeros = put(tmp_path / "zeros.zarr", np.zeros((9, 7), "f4"))
    with pytest.raises(
        tw.OptionError, match=r"nothing varies in .*zeros\.zarr: the total variance of its 7 variables is 0"
    ):
        tw.eofs(zeros, tmp_path / "none.zarr", 3, cluster=client)
    ones = put(tmp_path / "ones.zarr", np.ones((9, 7), "f4"))
    with pytest.raises(tw.OptionError, match=r"give other data, or center=False \(--no-center\) for EOFs"):
        tw.eofs(ones, tmp_path / "none.zarr", 3, cluster=client)
    with pytest.raises(
        tw.ShapeError, match=r"X \(.*\) has 9 rows and 0 columns; at least 2 samples and 1 var"
    ):
        tw.eofs(tw.slice(ones, columns=(2, 2)), tmp_path / "none.zarr", 3, cluster=client)
    assert not (tmp_path / "none.zarr").exists()


def test_a_large_mean_costs_no_digits(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    x = (field(rng, 3000, 40, "f8") + 300).astype("f4")
    run = tw.eofs(put(tmp_path / "x.zarr", x, (500, 40)), tmp_path / "out.zarr", 4, cluster=client)
    check(run, x, 4)


@pytest.mark.more
def test_what_xarray_makes_of_it(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    xarray = pytest.importorskip("xarray")
    x = field(rng, 40, 16, "f4")
    path = put(tmp_path / "x.zarr", x, (20, 16), dimension_names=("time", "cell"))
    run = tw.eofs(path, tmp_path / "out.zarr", 3, sum_over="time", weights=np.ones(16), cluster=client)
    found = xarray.open_zarr(run.out, consolidated=False)
    assert found.components.dims == ("mode", "cell")
    assert found.scores.dims == ("time", "mode")
    assert found.explained_variance_ratio.dims == found.eigenvalues.dims == ("mode",)
    assert found["mean"].dims == found["factor"].dims == ("cell",)
    assert found.mode.values.tolist() == [1, 2, 3]
    assert "tilewright" in found.attrs["history"]
    assert found.attrs["source"] == str(path)
    back = (found.scores @ found.components).values
    np.testing.assert_allclose(back, (x - found["mean"].values) * found["factor"].values, atol=1)
    # In a group, which what grows in it is no part of yet.
    zarr.create_group(tmp_path / "group.zarr")
    for method in ("gram", "krylov"):
        run = tw.eofs(path, tmp_path / "group.zarr" / method, 3, method=method, cluster=client)
        assert xarray.open_zarr(run.out, consolidated=False).components.shape == (3, 16)
    unnamed = tw.eofs(put(tmp_path / "y.zarr", x), tmp_path / "named.zarr", 2, cluster=client)
    assert xarray.open_zarr(unnamed.out, consolidated=False).scores.dims == ("sample", "mode")


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
def test_coordinates_of_flattened_axes_go_with_the_eofs(
    kind: str, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """So that xarray makes maps of them at once, and knows the time of scores."""
    coordinates = {
        "time": np.arange("2000-01", "2002-01", dtype="M8[M]").astype("M8[ns]"),
        "lat": [-30.0, 0.0, 30.0],
    }
    data = xarray.DataArray(
        rng.random((24, 3, 4)).astype("f4"), coordinates, ("time", "lat", "lon"), name="sst"
    )
    if kind == "zarr":
        data.to_dataset().to_zarr(tmp_path / "x.zarr", zarr_format=3, consolidated=False)
        x = str(tmp_path / "x.zarr" / "sst")
    else:
        data.to_netcdf(tmp_path / "x.nc", engine="h5netcdf")
        x = f"{tmp_path / 'x.nc'}::sst"
    tw.eofs(x, tmp_path / "e.zarr", k=2, sum_over="time", cluster=client, device="cpu")
    found = xarray.open_zarr(tmp_path / "e.zarr")
    assert set(found.coords) == {"mode", "time", "lat"}, "lon has none"
    np.testing.assert_array_equal(found.time, data.time)
    np.testing.assert_array_equal(found.lat, np.repeat([-30.0, 0.0, 30.0], 4))
    assert found.lat.dims == ("lat_lon",)


def test_the_same_seed_gives_the_same_bits(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    path = put(tmp_path / "x.zarr", field(rng, 40, 20, "f4"), (32, 32))
    options = {"method": "krylov", "cluster": client}
    runs = [tw.eofs(path, tmp_path / f"{n}.zarr", 3, seed=n // 2, **options) for n in range(3)]
    stored = [zarr.open_group(run.out)["components"][:] for run in runs]
    assert stored[0].tobytes() == stored[1].tobytes()
    np.testing.assert_allclose(stored[0], stored[2], atol=1e-3)
    assert runs[0].values.tobytes() == runs[1].values.tobytes()


@pytest.mark.more
def test_workers_change_no_bit(
    client: Client, processes: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = put(tmp_path / "x.zarr", field(rng, 90, 50, "f4"), (32, 32))
    one, two = (
        tw.eofs(path, tmp_path / f"{n}.zarr", 3, method="krylov", cluster=cluster)
        for n, cluster in enumerate((client, processes))
    )
    assert one.values.tobytes() == two.values.tobytes()
    first, second = (zarr.open_group(run.out)["scores"][:] for run in (one, two))
    assert first.tobytes() == second.tobytes()


def test_x_is_larger_than_the_memory_for_it(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    x = field(rng, 1500, 60, "f4")
    path = put(tmp_path / "x.zarr", x, (100, 60), compressors=None)
    told: list[Event] = []
    place = {"device_memory": x.nbytes // 10, "cluster": client, "listener": told.append}
    run = tw.eofs(path, tmp_path / "out.zarr", 4, method="krylov", **place)
    check(run, x, 4)
    names = {event.name for event in told if isinstance(event, WorkPlanned)}
    assert {"statistics", "eofs, pass 2", f"eofs, pass {run.passes}"} <= names
    assert any("step 1" in event.message for event in told if isinstance(event, Notice))


def test_passes_that_do_not_do(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    x = rng.standard_normal((120, 80))
    path = put(tmp_path / "x.zarr", x, (100, 100))
    with pytest.raises(
        tw.ConvergenceError, match=r"after 5 passes over X, . of 5 pairs are within tol=1e-06"
    ):
        tw.eofs(path, tmp_path / "out.zarr", 5, passes=6, tol=1e-6, method="krylov", cluster=client)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.zarr.partial", "x.zarr"]
    more = tw.eofs(path, tmp_path / "out.zarr", 5, passes=100, tol=1e-6, method="krylov", cluster=client)
    assert more.resumed == 5
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.zarr", "x.zarr"]
    g = put(tmp_path / "g.zarr", x.T @ x)
    with pytest.raises(tw.ConvergenceError, match=r"after 2 passes over G"):
        tw.eigh(g, 5, passes=2, tol=1e-6, cluster=client)


def test_bad_input_is_refused(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    x = field(rng, 30, 20, "f4")
    path = put(tmp_path / "x.zarr", x)
    for text, options in {
        "k=21: .* has 30 rows and 20 columns": {"k": 21},
        "k=0: it must be how many": {"k": 0},
        "k=True": {"k": True},
        "tol=2": {"tol": 2},
        "seed=-1: it must be a whole number from 0": {"seed": -1},
        "seed='now'": {"seed": "now"},
        "passes=3: 4 are the fewest": {"passes": 3, "method": "krylov"},
        "passes=2: 3 are the fewest": {"passes": 2},
        "method='svd' is unknown": {"method": "svd"},
        "center='columns' is neither true nor false": {"center": "columns"},
        "weights: number|weights: found -1.0 as number 3": {"weights": [1.0, 1, 1, -1] + 16 * [1.0]},
        "weights: all are 0": {"weights": np.zeros(20)},
        "of='diagonals' is unknown": {"of": "diagonals"},
        "sum_over='time' is no axis": {"sum_over": "time"},
        "scratch=''": {"scratch": ""},
    }.items():
        with pytest.raises(tw.OptionError, match=text):
            tw.eofs(path, tmp_path / "out.zarr", cluster=client, **({"k": 2} | options))
    with pytest.raises(tw.ShapeError, match=r"weights: found 30 numbers; .* needs 20, one for each variable"):
        tw.eofs(path, tmp_path / "out.zarr", 2, weights=np.ones(30), cluster=client)
    with pytest.raises(tw.ShapeError, match=r"^sample_weights: found 20 numbers; .* needs 30"):
        tw.eofs(path, tmp_path / "out.zarr", 2, sample_weights=np.ones(20), cluster=client)
    with pytest.raises(
        tw.DTypeError, match=r"dtype='float16': X, .* is multiplied as one of float32, float64"
    ):
        tw.eofs(path, tmp_path / "out.zarr", 2, dtype="float16", cluster=client)
    with pytest.raises(tw.StoreError, match=r"s3://bucket/out.zarr is no local path"):
        tw.eofs(path, "s3://bucket/out.zarr", 2, cluster=client)
    with pytest.raises(tw.OutputError, match="the same or lie one inside the other"):
        tw.eofs(path, path / "out.zarr", 2, cluster=client)
    with pytest.raises(tw.OutputExistsError):
        tw.eofs(path, path, 2, cluster=client)
    holes = x.copy()
    holes[3, 5] = np.nan
    with pytest.raises(
        tw.OptionError, match=r"holds NaN, .*first in column 5, with NaN in row 3 \(1 column in all\)"
    ):
        tw.eofs(put(tmp_path / "holes.zarr", holes), tmp_path / "out.zarr", 2, cluster=client)
    flat = x.copy()
    flat[:, 7] = 1
    flat = put(tmp_path / "flat.zarr", flat)
    with pytest.raises(tw.OptionError, match=r"1 column \(7\) of .* constant"):
        tw.eofs(flat, tmp_path / "out.zarr", 2, scale=True, cluster=client)
    with pytest.raises(tw.OptionError, match=r"^X \(.*one.zarr\) has 1 row; at least 2 are needed$"):
        tw.eofs(put(tmp_path / "one.zarr", x[:1]), tmp_path / "out.zarr", 1, cluster=client)
    with pytest.raises(tw.ShapeError, match=r"30 rows and 20 columns; only a square matrix"):
        tw.eigh(path, 2, cluster=client)
    square = put(tmp_path / "square.zarr", x[:20])
    with pytest.raises(tw.OptionError, match="is not symmetric: of two vectors x and y"):
        tw.eigh(square, 2, cluster=client)
    with pytest.raises(tw.OptionError, match=r"k=21: .* has 20 rows"):
        tw.eigh(square, 21, cluster=client)
    with pytest.raises(tw.OptionError, match="are NaN or infinite"):
        tw.eigh(put(tmp_path / "nan.zarr", np.full((9, 9), np.nan)), 2, cluster=client)
    assert not [each for each in tmp_path.iterdir() if each.name.startswith("out")]
    run = tw.eofs(flat, tmp_path / "out.zarr", 2, scale=True, constant="zero", cluster=client)
    assert run.total_variance == pytest.approx(19)


@pytest.mark.parametrize("method", ["gram", "krylov"])
def test_what_no_worker_can_do_leaves_nothing(method: Any, client: Client, tmp_path: Path) -> None:
    x = put(tmp_path / "x.zarr", np.arange(40 * 30.0).reshape(40, 30) ** 1.5)
    with pytest.raises(tw.PlanError, match="no tile fits into 1 B"):
        tw.eofs(x, tmp_path / "out.zarr", k=2, method=method, cluster=client, device_memory=1)
    assert [path.name for path in tmp_path.iterdir()] == ["x.zarr"]


def test_only_eofs_are_replaced(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    path = put(tmp_path / "x.zarr", field(rng, 30, 20, "f4"))
    out = tmp_path / "out.zarr"
    first = tw.eofs(path, out, 2, cluster=client)
    with pytest.raises(tw.OutputExistsError, match=r"out.zarr exists"):
        tw.eofs(path, out, 3, cluster=client)
    again = tw.eofs(path, out, 3, overwrite=True, cluster=client)
    np.testing.assert_allclose(again.values[:2], first.values, rtol=1e-4)
    assert zarr.open_group(out)["components"].shape == (3, 20)
    zarr.create_group(tmp_path / "mine.zarr")
    with pytest.raises(
        tw.OutputExistsError, match=r"mine\.zarr exists, and is nothing that would be replaced"
    ):
        tw.eofs(path, tmp_path / "mine.zarr", 2, overwrite=True, cluster=client)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["mine.zarr", "out.zarr", "x.zarr"]


def test_results_print_and_go_to_json(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    x = field(rng, 40, 30, "f4")
    run = tw.eofs(put(tmp_path / "x.zarr", x), tmp_path / "out.zarr", 3, cluster=client)
    text = str(run)
    assert "3 EOFs of 40 samples × 30 variables" in text
    assert f"passes over X: {run.passes}" in text
    assert len(text.splitlines()) == 7
    assert run.to_json()["values"] == run.values.tolist()
    assert run.to_json()["verification"]["passed"]
    pairs = tw.eigh(put(tmp_path / "g.zarr", x.T @ x), 3, cluster=client, scratch=tmp_path)
    assert "3 eigenpairs of 30 × 30" in str(pairs)
    assert pairs.to_json()["side"] == 30
    assert len(list(tmp_path.iterdir())) == 3


def test_weights_of_an_axis_are_those_of_its_places(client: Client, tmp_path: Path) -> None:
    """Of (time, lat, lon): a number for each latitude serves all places there."""
    rng = np.random.default_rng(4)
    field = rng.standard_normal((30, 5, 6))
    zarr.create_array(
        tmp_path / "x.zarr", data=field, chunks=(10, 5, 6), dimension_names=["time", "lat", "lon"]
    )
    area = rng.random(5) + 0.1
    options: dict[str, Any] = {"k": 3, "sum_over": "time", "cluster": client, "device": "cpu"}
    by_axis = tw.eofs(tmp_path / "x.zarr", tmp_path / "a.zarr", weights={"lat": area}, **options)
    by_place = tw.eofs(tmp_path / "x.zarr", tmp_path / "b.zarr", weights=np.repeat(area, 6), **options)
    np.testing.assert_array_equal(by_axis.values, by_place.values)
    for weights, message in (
        ({"time": np.ones(30)}, "axis 'time' of .* is not of the variables; its axes are"),
        ({"lat": np.ones(4)}, r"weights\['lat'\]: found 4 numbers; that axis of .* has 5 places"),
    ):
        with pytest.raises((tw.OptionError, tw.ShapeError), match=message):
            tw.eofs(tmp_path / "x.zarr", tmp_path / "c.zarr", weights=weights, **options)


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("given", ["stored", "array"])
def test_without_a_path_eofs_are_returned(
    given: str, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    x = field(rng, 40, 30, "f4")
    source: Any = x if given == "array" else put(tmp_path / "x", x)
    options: dict[str, Any] = {"scale": True, "constant": "zero", "cluster": client, "device": "cpu"}
    run = tw.eofs(put(tmp_path / "again", x), tmp_path / "e", k=3, **options)
    found = tw.eofs(source, k=3, **options)
    stored = check(run, x, 3, scale=True)
    for name in set(stored) - {"mode", "explained_variance"}:
        np.testing.assert_array_equal(getattr(found, name), stored[name], err_msg=name)
    assert (found.run.out, found.run.samples, found.run.variables) == ("", 40, 30)
    assert found.to_json() == found.run.to_json()
    assert str(found).startswith("3 EOFs of 40 samples × 30 variables")
    bare = tw.eofs(x, k=2, center=False, cluster=client, device="cpu")
    assert bare.mean is None
    assert bare.factor is None


def test_eofs_that_memory_does_not_hold_twice_are_refused(tmp_path: Path, client: Client) -> None:
    array = zarr.create_array(tmp_path / "x", shape=(10**8, 10**7), chunks=(10**4, 10**4), dtype="f4")
    with pytest.raises(
        tw.OutputError, match=r"100 EOFs of 10000000 variables .* held twice while .* give out"
    ):
        tw.eofs(array, k=100, cluster=client, device="cpu")


def a_file(path: Path, rng: np.random.Generator, fill: float | None) -> tuple[np.ndarray, xarray.DataArray]:
    """A field of (time, lat, lon) with land and gaps, in a NetCDF file; and as it is stored."""
    values = field(rng, 20, 24, "f4", noise=0.5).reshape(20, 6, 4)
    values[:, 2:4, 1] = np.nan
    values[rng.random(values.shape) < 0.02] = np.nan
    made = xarray.DataArray(
        values, {"lat": np.linspace(-75, 75, 6), "lon": np.arange(4.0)}, ["time", "lat", "lon"], name="sst"
    )
    encoding = {"sst": {"_FillValue": fill}}
    made.to_dataset().to_netcdf(path, engine="h5netcdf", encoding=encoding)
    return values.reshape(20, 24), made


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("fill", [-999.0, None])
def test_a_file_with_land_is_one_command(
    fill: float | None, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    values, made = a_file(tmp_path / "sst.nc", rng, fill)
    told: list[Event] = []
    asked: dict[str, Any] = {
        "k": 3,
        "sum_over": "time",
        "constant": "zero",
        "cluster": client,
        "device": "cpu",
    }
    code = "nan" if fill is None else fill
    run = tw.eofs(
        f"{tmp_path / 'sst.nc'}::sst",
        tmp_path / "e",
        missing=code,
        weights={"lat": "cos"},
        listener=told.append,
        **asked,
    )
    history = zarr.open_group(tmp_path / "e", mode="r").attrs["history"]
    assert "sum_over=time, " in history
    assert "constant=zero, " in history
    assert "weights={'lat': 'cos'}, " in history
    gone = np.isnan(values)
    sea = ~gone.all(axis=0)
    area = np.repeat(np.cos(np.deg2rad(made.lat.values)), 4)
    mean = np.where(sea, np.nansum(values, axis=0) / np.maximum((~gone).sum(axis=0), 1), 0)
    sizes = np.linalg.svd(np.where(gone, 0, values - mean) * np.sqrt(area), compute_uv=False)
    np.testing.assert_allclose(run.values, sizes[:3] ** 2 / 19, rtol=1e-4)
    components = zarr.open_array(tmp_path / "e" / "components")[:]
    assert not components[:, ~sea].any()
    assert not [event for event in told if isinstance(event, Caution)], "the file says what was asked for"
    # In memory, with weights of xarray.
    again = tw.eofs(made, missing="nan", weights={"lat": np.cos(np.deg2rad(made.lat))}, **asked)
    np.testing.assert_allclose(again.eigenvalues, run.values, rtol=1e-5)


def test_what_a_file_says_is_missing_is_missing(
    tmp_path: Path, rng: np.random.Generator, client: Client
) -> None:
    a_file(tmp_path / "sst.nc", rng, -999.0)
    source, shared = f"{tmp_path / 'sst.nc'}::sst", {"sum_over": "time", "cluster": client, "device": "cpu"}
    found = [
        tw.cov(source, missing=missing, constant="zero", **shared)  # type: ignore[call-overload]
        for missing in (-999, "nan", "attributes")
    ]
    np.testing.assert_array_equal(found[0], found[1], "what the file says is missing beside NaN")
    np.testing.assert_array_equal(found[0], found[2])
    with pytest.raises(
        tw.OptionError, match=r"have them count as 0 with constant='zero' \(--constant zero\)"
    ):
        tw.eofs(source, tmp_path / "e", missing=-999, **shared)  # type: ignore[call-overload]


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["gram", "krylov"])
def test_infinite_numbers_are_refused_with_advice_that_helps(
    tmp_path: Path, rng: np.random.Generator, client: Client, method: str
) -> None:
    x = rng.standard_normal((20, 12))
    x[3, 4] = np.inf
    put(tmp_path / "x", x)
    words = {"k": 1, "method": method, "device": "cpu", "cluster": client}
    with pytest.raises(tw.OptionError, match="NaN and infinities together need a mask"):
        tw.eofs(tmp_path / "x", **words)  # type: ignore[call-overload]
    with pytest.raises(
        tw.OptionError, match=r"NaN is missing here .*, so there are infinities .*: store NaN in their place"
    ):
        tw.eofs(tmp_path / "x", missing="nan", **words)  # type: ignore[call-overload]
    tw.eofs(tmp_path / "x", missing=np.isinf(x), **words)  # type: ignore[call-overload]
    tw.eofs(tmp_path / "x", missing=np.inf, **words)  # type: ignore[call-overload]
    x[3, 4] = np.nan
    put(tmp_path / "y", x)
    tw.eofs(tmp_path / "y", missing="nan", **words)  # type: ignore[call-overload]


def test_cosines_are_of_latitudes_that_are_there(
    tmp_path: Path, rng: np.random.Generator, client: Client
) -> None:
    put(tmp_path / "x", rng.standard_normal((5, 4, 3)))
    for source, axis, message in (
        (tmp_path / "x", 1, "which has no name by which they would be found"),
        (f"{tmp_path / 'n.nc'}::sst", "time", "no coordinates time of that length"),
        (f"{tmp_path / 'n.nc'}::sst", "lon", "are not all from -90 to 90 degrees"),
    ):
        made = xarray.DataArray(
            np.ones((5, 4, 3)), {"lon": [0.0, 90, 180]}, ["time", "lat", "lon"], name="sst"
        )
        made.to_dataset().to_netcdf(tmp_path / "n.nc", engine="h5netcdf")
        over = 0 if axis != "time" else 1
        with pytest.raises(tw.OptionError, match=message):
            tw.eofs(source, k=1, sum_over=over, weights={axis: "cos"}, cluster=client)
    made = made.assign_coords(lat=[0.0, np.nan, 20, 30])
    made.to_dataset().to_netcdf(tmp_path / "n.nc", engine="h5netcdf")
    with pytest.raises(tw.OptionError, match=r"coordinates lat hold NaN, first at place 1 \(1 of 4\)"):
        tw.eofs(f"{tmp_path / 'n.nc'}::sst", k=1, sum_over=0, weights={"lat": "cos"}, cluster=client)


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", ["gram", "krylov"])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("mask", r"the mask leaves 0 of 360 numbers.*invert it \(~mask\)"),
        ("constant", r"each variable is one number throughout"),
        ("zeros", r"all numbers are 0"),
        ("code", r"0 of 360 numbers are not missing"),
    ],
)
def test_what_does_not_vary_has_no_eofs(
    how: str, message: str, method: str, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    x = {
        "mask": field(rng, 30, 12, "f4"),
        "constant": np.full((30, 12), 0.1, "f4") * np.arange(1, 13, dtype="f4"),
        "zeros": np.zeros((30, 12), "f4"),
        "code": np.full((30, 12), -999, "f4"),
    }[how]
    options: dict[str, Any] = {
        "mask": {"missing": np.ones((30, 12), bool)},
        "constant": {},
        "zeros": {"center": False},
        "code": {"missing": -999, "constant": "zero"},
    }[how]
    with pytest.raises(tw.OptionError, match=message):
        tw.eofs(
            put(tmp_path / "x", x), tmp_path / "e", k=2, method=method, cluster=client, device="cpu",
            **options,
        )  # fmt: skip
    assert not (tmp_path / "e").exists()
