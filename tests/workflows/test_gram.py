"""Gram matrices from Zarr to Zarr, against NumPy: the usual ones, their commands, and what is refused before the first
tile. Every option beside every other one is in `test_gram_options.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import xarray
import zarr
from click.testing import CliRunner
from distributed import Client

import tilewright as tw
from tests.pipeline.gram import naive
from tests.workflows.products import Stopped, stop_after
from tilewright.pipeline.events import Caution, Event, Notice, UnitDone, WorkPlanned
from tilewright.pipeline.gram.statistics import STATISTICS
from tilewright.pipeline.product.output import partial_path
from tilewright.workflows.cli import cli
from tilewright.workflows.gram import plan_only

TIGHT = 9_000
"""Device memory that cuts a small C into several tiles."""


def numbers(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    kind = np.dtype(dtype)
    values = 20 * rng.standard_normal(shape) + 15
    if kind.kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    return (np.abs(values) if kind.kind == "u" else values).astype(kind)


def with_missing(rng: np.random.Generator, x: np.ndarray) -> tuple[np.ndarray, Any]:
    """The matrix with a fifth of its elements missing, but none of its first two lines; and what stands for them."""
    there = rng.random(x.shape) < 0.8
    there[:2] = there[:, :2] = True
    code: Any = np.nan if x.dtype.kind in "fc" else 3
    return np.where(there, np.where(x == code, 4, x), code).astype(x.dtype), "nan" if code != code else code


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["i1", "f4", "f8", "c16"])
def test_covariances_and_correlations_are_numpys(
    client: Client, tmp_path: Path, rng: np.random.Generator, dtype: str
) -> None:
    x, y = numbers(rng, (40, 30), dtype), numbers(rng, (40, 9), dtype)
    here = {"cluster": client, "device": "cpu"}
    paths = naive.put(tmp_path / "x.zarr", x, (16, 16)), naive.put(tmp_path / "y.zarr", y, (16, 16))
    by_rows = naive.put(tmp_path / "rows.zarr", x.T, (16, 16))
    weights = rng.random(40)

    def stored(name: str, *sources: Path, **options: Any) -> np.ndarray:
        getattr(tw, name)(*sources, tmp_path / "c.zarr", overwrite=True, **here, **options)
        return np.asarray(zarr.open_array(tmp_path / "c.zarr")[...])

    def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
        eps = np.finfo(found.dtype).eps
        np.testing.assert_allclose(found, expected, rtol=0, atol=100 * eps * np.abs(expected).max())

    both = np.cov(x, y, rowvar=False)
    assert_close(stored("cov", paths[0]), both[:30, :30])
    assert_close(stored("cov", *paths), both[:30, 30:])
    assert_close(stored("cov", by_rows, of="rows", weights=weights), np.cov(x.T, aweights=weights))
    both = np.corrcoef(x, y, rowvar=False)
    correlations = stored("corr", paths[0])
    assert_close(correlations, both[:30, :30])
    assert (np.diag(correlations) == 1).all()
    assert_close(stored("corr", *paths), both[:30, 30:])
    hermitian = stored("gram", paths[0], center=True, divide="n-1")
    np.testing.assert_array_equal(hermitian, hermitian.conj().T)
    assert_close(hermitian.conj(), np.cov(x, rowvar=False))


def test_missing_numbers_make_masked_covariances(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """np.ma.cov divides each element by its own number of pairs, here all by what no number is missing of."""
    x, _ = with_missing(rng, numbers(rng, (50, 20), "f8"))
    path = naive.put(tmp_path / "x.zarr", x, (16, 16))
    tw.cov(path, tmp_path / "c.zarr", missing="nan", cluster=client, device="cpu")
    masked = np.ma.masked_invalid(x)
    there = (~np.ma.getmaskarray(masked)).astype(float)
    expected = np.ma.cov(masked, rowvar=False) * (there.T @ there - 1) / (len(x) - 1)
    np.testing.assert_allclose(zarr.open_array(tmp_path / "c.zarr")[...], expected, rtol=1e-11, atol=1e-11)


def test_a_relationship_matrix_is_one_command(tmp_path: Path, rng: np.random.Generator) -> None:
    frequency = rng.uniform(0.05, 0.5, 300)
    x = rng.binomial(2, frequency, (70, 300)).astype(np.int8)
    x[rng.random(x.shape) < 0.05] = -1
    path = naive.put(tmp_path / "x.zarr", x, (32, 100), attributes={"missing_value": -1})
    p = np.ma.masked_equal(x, -1).mean(axis=0).data / 2
    divisor = float(2 * (p * (1 - p)).sum())
    words = ["--of", "rows", "--center", "columns", "--missing", "-1", "--divide", repr(divisor)]
    command = ["gram", str(path), str(tmp_path / "g.zarr"), *words, "--device", "cpu", "--json"]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["verification"]["passed"]
    assert "stand for missing numbers" not in result.stderr  # they were not multiplied as numbers
    found = zarr.open_array(tmp_path / "g.zarr")[...]
    centred = np.where(x == -1, 0, x - 2 * p)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, centred @ centred.T / divisor, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found, found.T)


@pytest.mark.more
@pytest.mark.parametrize("dtype", ["f4", pytest.param("i1", marks=pytest.mark.slow)])
def test_bits_do_not_depend_on_the_number_of_workers(
    clusters: dict[int, Client], tmp_path: Path, rng: np.random.Generator, dtype: str
) -> None:
    path = naive.put(tmp_path / "x.zarr", numbers(rng, (300, 90), dtype), (32, 32))
    results = set()
    with dask.config.set({"tilewright.piece-nbytes": 2**15}):
        for workers, client in clusters.items():
            out = tmp_path / f"{workers}.zarr"
            tw.corr(path, out, cluster=client, device="cpu", device_memory="200KiB")
            results.add(zarr.open_array(out)[...].tobytes())
    assert len(results) == 1


def test_a_stopped_gram_goes_on_where_it_stood(
    client: Client, tmp_path: Path, rng: np.random.Generator, small_chunks: None, events: list[Event]
) -> None:
    x, code = with_missing(rng, numbers(rng, (50, 64), "f4"))
    path, out = naive.put(tmp_path / "x.zarr", x, (16, 16)), tmp_path / "c.zarr"
    options: dict[str, Any] = {"missing": code, "cluster": client, "device": "cpu", "device_memory": TIGHT}
    with pytest.raises(Stopped):
        tw.cov(path, out, listener=stop_after(3), **options)
    assert partial_path(out).exists()
    run = tw.cov(path, out, listener=events.append, **options)
    assert run.resumed == 3
    assert run.plan.tile_count > 3
    np.testing.assert_allclose(
        zarr.open_array(out)[...],
        naive.gram(x, center=True, divide="n-1", missing=code),
        rtol=1e-4,
        atol=1e-3,
    )
    # Tiles of other means are of no use.
    with pytest.raises(Stopped):
        tw.cov(path, out, listener=stop_after(3), overwrite=True, **options)
    run = tw.gram(path, out, center=False, divide="n-1", overwrite=True, **options)
    assert run.resumed == 0


class TestRefusals:
    """Nothing is written, and what can be told without the numbers is told before they are read."""

    @pytest.fixture
    def x(self, tmp_path: Path, rng: np.random.Generator) -> np.ndarray:
        x = numbers(rng, (20, 12), "f4")
        x[:, [3, 5]] = 2
        naive.put(tmp_path / "x.zarr", x, (8, 8))
        return x

    def check(
        self, folder: Path, client: Client, error: type[Exception], message: str, read: bool, **options: Any
    ) -> None:
        told: list[Event] = []
        before = sorted(folder.rglob("*"))
        with pytest.raises(error, match=message):
            tw.gram(
                folder / "x.zarr",
                folder / "c.zarr",
                cluster=client,
                device="cpu",
                listener=told.append,
                **options,
            )
        assert sorted(folder.rglob("*")) == before
        begun = {event.name for event in told if isinstance(event, WorkPlanned)}
        assert begun == ({STATISTICS} if read else set())

    def test_constant_columns(self, client: Client, tmp_path: Path, x: np.ndarray) -> None:
        match = r"scale: 2 columns \(3, 5\) of .*x.zarr are constant"
        self.check(tmp_path, client, tw.OptionError, match, True, scale=True, divide="n-1")
        out = tmp_path / "c.zarr"
        tw.corr(tmp_path / "x.zarr", out, constant="zero", cluster=client, device="cpu")
        found = zarr.open_array(out)[...]
        assert not found[[3, 5]].any()
        assert (np.delete(np.diag(found), [3, 5]) == 1).all()

    def test_columns_whose_squares_underflow(self, client: Client, tmp_path: Path, x: np.ndarray) -> None:
        tiny = 1e-300 * x.astype("f8")
        naive.put(tmp_path / "x.zarr", tiny, (8, 8), overwrite=True)
        match = (
            "^scale: the squares of 10 columns .* are below double precision; multiply X by a large number"
        )
        for constant in ("error", "zero"):
            asked: dict[str, Any] = {"scale": True, "center": True, "constant": constant}
            self.check(tmp_path, client, tw.OptionError, match, True, **asked)

    def test_weights_of_any_size(self, client: Client, tmp_path: Path, x: np.ndarray) -> None:
        path = tmp_path / "x.zarr"
        plain = tw.cov(path, out=None, cluster=client, device="cpu")
        for weight in (1e-200, 1e200):
            found = tw.cov(path, weights=np.full(20, weight), dtype="f8", cluster=client, device="cpu")
            np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-4)
        match = "weights: they add up to .*, which is below double precision; multiply them by a number"
        self.check(tmp_path, client, tw.OptionError, match, False, weights=np.full(20, 1e-320), divide="n")

    def test_lines_without_a_number(self, client: Client, tmp_path: Path, x: np.ndarray) -> None:
        match = r"missing=2\.0: 2 columns \(3, 5\) of .*x.zarr have no element that is present"
        self.check(tmp_path, client, tw.OptionError, match, True, center=True, missing=2)

    def test_an_output_that_is_there(self, client: Client, tmp_path: Path, x: np.ndarray) -> None:
        naive.put(tmp_path / "c.zarr", np.ones((2, 2)))
        self.check(tmp_path, client, tw.OutputExistsError, "c.zarr", False, center=True)

    def test_weights_of_another_length(self, client: Client, tmp_path: Path, x: np.ndarray) -> None:
        self.check(tmp_path, client, tw.ShapeError, "weights: found 3 numbers", False, weights=[1, 2, 3])

    def test_a_precision_that_does_not_fit(self, client: Client, tmp_path: Path, x: np.ndarray) -> None:
        self.check(
            tmp_path, client, tw.OptionError, "precision", False, precision="tf32", dtype="f8", center=True
        )

    def test_no_place_to_append_to(self, tmp_path: Path, x: np.ndarray) -> None:
        for function in (tw.gram, tw.cov, tw.corr):
            with pytest.raises(tw.OptionError, match="append=True without out: there is nothing to add to"):
                function(tmp_path / "x.zarr", append=True)


def test_a_matrix_that_changes_while_its_means_are_found_is_refused(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = naive.put(tmp_path / "x.zarr", numbers(rng, (4096, 8), "f4"), (512, 8))

    def rewrite(event: Event) -> None:
        if isinstance(event, UnitDone) and event.name == STATISTICS and event.index == 0:
            zarr.open_array(path)[:512] = 1

    with (
        dask.config.set({"tilewright.piece-nbytes": 2**15}),
        pytest.raises(tw.StoreError, match="changed while its means were found"),
    ):
        tw.cov(path, tmp_path / "c.zarr", cluster=client, device="cpu", listener=rewrite)
    assert not (tmp_path / "c.zarr").exists()


def test_integers_that_cannot_be_centred_afterwards_are_told_of(
    client: Client, tmp_path: Path, events: list[Event]
) -> None:
    x = 2**40 + np.arange(30).reshape(10, 3) ** 2
    path = naive.put(tmp_path / "x.zarr", x, (4, 3))
    tw.cov(path, tmp_path / "c.zarr", cluster=client, device="cpu", listener=events.append)
    np.testing.assert_allclose(zarr.open_array(tmp_path / "c.zarr")[...], np.cov(x - 2**40, rowvar=False))
    assert any("the integers are too large" in str(event) for event in events)
    assert not any(isinstance(event, Caution) for event in events)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_mean_that_is_large_beside_the_deviations_costs_no_digits(
    weighted: bool, client: Client, rng: np.random.Generator
) -> None:
    """A million times as large: float32 has 0.06 as the next number, and the mean is none of its numbers."""
    x, y = ((1e6 + rng.standard_normal((400, width))).astype("f4") for width in (12, 7))
    weights = rng.random(400) if weighted else None
    options: dict[str, Any] = {"weights": weights, "cluster": client, "device": "cpu"}
    both = np.cov(np.hstack([x, y]).astype("f8"), rowvar=False, aweights=weights)
    deviations = np.sqrt(np.diag(both))
    correlations = both / np.outer(deviations, deviations)
    sums = np.cov(x.astype("f8"), rowvar=False, aweights=weights, ddof=0)
    sums *= 400 if weights is None else weights.sum()
    for found, expected in (
        (tw.cov(x, **options), both[:12, :12]),
        (tw.cov(x, y, **options), both[:12, 12:]),
        (tw.corr(x, missing="nan", **options), correlations[:12, :12]),
        (tw.corr(x, y, **options), correlations[:12, 12:]),
        (tw.gram(x, center=True, **options), sums),
    ):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6 * np.abs(expected).max())
    x[rng.random(x.shape) < 0.1] = np.nan
    with pytest.raises(
        tw.OptionError, match=r"^scale: means of .* are so large .* in float32, .*dtype='float64'"
    ):
        tw.corr(x, missing="nan", **options)
    # The squares of float64 have the digits that its deviations are 1 by, which the check insists on.
    wide = tw.corr(x, missing="nan", dtype="float64", **options)
    asked = naive.Asked(center=True, scale=True, divide="n-1", missing="nan", weights=weights)
    np.testing.assert_allclose(wide, naive.gram_and_size(x, None, asked)[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["integers", "far integers", "floats", "weighted"])
def test_a_mean_that_double_precision_rounds_costs_no_digits(
    kind: str, client: Client, rng: np.random.Generator
) -> None:
    """The numbers are double precision's own, and less a whole number near their mean they are what NumPy is given."""
    near, far = {"integers": (2, 40), "far integers": (2, 52), "floats": (3, 40), "weighted": (5, 46)}[kind]
    apart = rng.integers(0, near, (400, 12))
    if kind == "floats":
        apart = np.rint(rng.standard_normal((400, 12)) * 2**10) / 2**10
    x = 2.0**far + apart if kind == "floats" else 2**far + apart
    weights = rng.integers(1, 9, 400) / 8 if kind == "weighted" else None
    expected = np.cov(apart, rowvar=False, aweights=weights)
    deviations = np.sqrt(np.diag(expected))
    options: dict[str, Any] = {"weights": weights, "cluster": client, "device": "cpu"}
    for found, right in (
        (tw.cov(x, **options), expected),
        (tw.cov(x, x[:, :5].copy(), **options), expected[:, :5]),
        (tw.corr(x, **options), expected / np.outer(deviations, deviations)),
    ):
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-13)


class TestDigitsThatAreLost:
    """Where centring loses digits that nobody can give back it is refused, and what is asked for then is right."""

    def check(
        self,
        client: Client,
        x: np.ndarray,
        expected: np.ndarray,
        match: str,
        function: Any = tw.cov,
        **options: Any,
    ) -> None:
        options |= {"cluster": client, "device": "cpu"}
        with pytest.raises(tw.OptionError, match=match):
            function(x, **options)
        wide = "complex128" if x.dtype.kind == "c" else "float64"
        found = function(x, **options | {"dtype": wide})
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9 * np.abs(expected).max())

    @pytest.mark.parametrize("kind", ["i8", "i4", "f8"])
    @pytest.mark.parametrize("missing", [None, 7])
    def test_numbers_that_the_dtype_does_not_hold(
        self, kind: str, missing: int | None, client: Client, rng: np.random.Generator
    ) -> None:
        """Of 2**40 the next number of float32 is 2**17 away: all deviations were 0, and what the mean lost was taken
        from the sums of their squares, which were negative."""
        apart = rng.integers(0, 3, (300, 8))
        x = (apart + {"i8": 2**40, "i4": 2**24, "f8": 10**5}[kind]).astype(kind)
        if kind == "f8":
            apart = np.rint(rng.standard_normal((300, 8)) * 2**10) / 2**20
            x = 10**5 + apart
        covariances = np.cov(apart, rowvar=False)
        deviations = np.sqrt(np.diag(covariances))
        correlations = covariances / np.outer(deviations, deviations)
        match = r"means of .* in float32, .* in column \d of mean [\d.e+]+ and deviation [\d.e-]+; .*dtype='float64'"
        weights = np.full(300, 0.5)
        for function, right, start, options in (
            (tw.cov, covariances, "center", {}),
            (tw.corr, correlations, "scale", {}),
            (tw.corr, correlations, "scale", {"weights": weights}),
            (tw.cov, covariances, "center", {"missing_as": "pairwise"} if missing else {}),
        ):
            asked = {"dtype": "float32", "missing": missing, **options}
            self.check(client, x, right, f"^{start}: {match}", function, **asked)

    def test_a_correlation_whose_numbers_lose_what_the_check_finds(
        self, client: Client, rng: np.random.Generator
    ) -> None:
        apart = np.rint(rng.standard_normal((300, 8)) * 2**30) / 2**30
        self.check(
            client,
            1e5 + apart,
            np.corrcoef(apart, rowvar=False),
            "^scale: means of",
            tw.corr,
            dtype="float32",
        )

    def test_less_is_no_loss(self, client: Client, rng: np.random.Generator) -> None:
        x = 200 + rng.standard_normal((300, 8))
        for function, right in ((tw.cov, np.cov), (tw.corr, np.corrcoef)):
            found = function(x, dtype="float32", cluster=client, device="cpu")
            np.testing.assert_allclose(found, right(x, rowvar=False), rtol=0, atol=1e-5)

    @pytest.mark.parametrize("mean", [1e7, 2**19], ids=["squares", "products"])
    def test_missing_numbers(self, mean: float, client: Client, rng: np.random.Generator) -> None:
        """Of 2**19 the squares lose less than 0.1 %, and the products of columns that lack others' lines more."""
        apart = np.rint(rng.standard_normal((300, 8)) * 3)
        apart[rng.random(apart.shape) < 0.1] = np.nan
        x = (mean + apart).astype("f4")
        asked = naive.Asked(center=True, divide="n-1", missing="nan")
        right = naive.gram_and_size(apart, None, asked)[0]
        self.check(client, x, right, "^center: means of .* in float32", missing="nan")

    @pytest.mark.parametrize("of", ["columns", "rows"])
    @pytest.mark.parametrize("code", ["f4", "c8"])
    def test_both_sides(self, of: str, code: str, client: Client, rng: np.random.Generator) -> None:
        apart = np.rint(rng.standard_normal((300, 8)) * 3)
        x = (1e7 + apart).astype(code)
        if (
            of == "rows"
        ):  # whose means are subtracted first, and those of columns then: here they are far apart
            apart = apart.T
            x = np.ascontiguousarray(x.T)
            x[:, ::2] -= 2**23
        both = apart - apart.mean(0) - apart.mean(1)[:, None] + apart.mean()
        right = both.T @ both if of == "columns" else both @ both.T
        if of == "rows":
            assert (x[:, ::2].real == 1e7 - 2**23 + apart[:, ::2]).all()
        self.check(client, x, right, "^center: means of", tw.gram, center="both", of=of)

    def test_digits_that_no_dtype_has(self, client: Client, rng: np.random.Generator) -> None:
        x = 2**60 + 2**5 * rng.integers(0, 9, (300, 8))
        match = "^scale: .* in float64, .* no wider dtype helps: subtract a number near the mean"
        with pytest.raises(tw.OptionError, match=match):
            tw.corr(x, cluster=client, device="cpu")


@pytest.mark.parametrize("dtype", ["i8", "u8"])
@pytest.mark.parametrize("divide", ["n", 7.5])
def test_sums_of_integers_that_would_wrap_are_of_floats(
    dtype: str, divide: Any, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    x = rng.integers(2**60, 2**62, (12, 5)).astype(dtype)
    told: list[Event] = []
    run = tw.gram(
        naive.put(tmp_path / "x", x),
        tmp_path / "g",
        divide=divide,
        cluster=client,
        device="cpu",
        listener=told.append,
    )
    assert run.wraps == "no"
    exact = x.T.astype("f8") @ x.astype("f8") / (12 if divide == "n" else divide)
    np.testing.assert_allclose(zarr.open_array(tmp_path / "g")[...], exact, rtol=1e-14)
    assert any(
        "they are multiplied as float64" in event.message for event in told if isinstance(event, Notice)
    )


class TestCommands:
    @pytest.fixture
    def here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> np.ndarray:
        monkeypatch.chdir(tmp_path)
        x = numbers(rng, (12, 7), "f8")
        naive.put(Path("x.zarr"), x)
        naive.put(Path("y.zarr"), x[:, :3])
        naive.put(Path("v.zarr"), np.arange(12.0))
        return x

    @pytest.mark.sample(5)
    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            ("gram x.zarr c.zarr", lambda x: x.T @ x),
            ("gram x.zarr c.zarr --center", lambda x: np.cov(x, rowvar=False) * 11),
            ("gram x.zarr c.zarr --center --divide n-1", lambda x: np.cov(x, rowvar=False)),
            (
                "gram x.zarr c.zarr --divide n --center columns --scale",
                lambda x: np.corrcoef(x, rowvar=False),
            ),
            ("gram x.zarr c.zarr --center rows=v.zarr", lambda x: (y := x - np.arange(12)[:, None]).T @ y),
            ("gram x.zarr c.zarr --scale v.zarr", lambda x: (y := x * np.arange(12)[:, None]).T @ y),
            ("gram x.zarr y.zarr c.zarr", lambda x: x.T @ x[:, :3]),
            ("gram x.zarr c.zarr --sum-over 1", lambda x: x @ x.T),
            ("cov x.zarr c.zarr --of rows", lambda x: np.cov(x)),
            ("cov x.zarr c.zarr --divide n", lambda x: np.cov(x, rowvar=False, bias=True)),
            ("cov x.zarr c.zarr --weights v.zarr", lambda x: np.cov(x, rowvar=False, aweights=np.arange(12))),
            ("corr x.zarr c.zarr --dtype float32", lambda x: np.corrcoef(x, rowvar=False)),
        ],
    )
    def test_options(self, here: np.ndarray, words: str, expected: Any) -> None:
        result = CliRunner().invoke(cli, [*words.split(), "--device", "cpu", "-q"])
        assert result.exit_code == 0, result.stderr
        np.testing.assert_allclose(zarr.open_array("c.zarr")[...], expected(here), rtol=1e-5)

    def test_wrong_words(self, here: np.ndarray) -> None:
        for words, status, said in (
            ("gram x.zarr", 2, "found 1 array names; give X [Y] OUT, and behind them --center"),
            ("gram --center x.zarr c.zarr", 2, "found 1 array names"),
            ("cov x.zarr c.zarr --of lines", 2, "lines"),
            ("gram x.zarr c.zarr --window 7", 1, "--window 7: the result is 7 × 7, so that a band reaches"),
            ("gram x.zarr c.zarr --missing none", 1, "--missing none is neither a number"),
            ("corr x.zarr c.zarr --missing-as pairwise", 1, "--missing-as pairwise: nobody said"),
        ):
            result = CliRunner().invoke(cli, words.split())
            assert result.exit_code == status, result.output
            assert said in result.stderr
        assert not Path("c.zarr").exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize("holes", [False, True])
def test_a_relationship_matrix_finds_its_own_divisor(
    holes: bool, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """VanRaden's, of dosages: without missing ones the sums are of integers, and exact."""
    dosages = rng.binomial(2, rng.uniform(0.05, 0.6, 50), (20, 50)).astype("i1")
    if holes:
        dosages[rng.random(dosages.shape) < 0.1] = -1
    asked: dict[str, Any] = {"of": "rows", "center": "columns", "cluster": client, "device": "cpu"}
    missing = {"missing": -1} if holes else {}
    out = tmp_path / "g"
    tw.gram(naive.put(tmp_path / "x", dosages), out, divide="2pq", **missing, **asked)
    said = zarr.open_array(out).attrs
    assert said["tilewright"]["options"] == {"of": "rows", "center": "columns", **missing, "divide": "2pq"}
    assert "(of='rows', center='columns'" in said["history"]
    there = dosages >= 0
    p = np.where(there, dosages, 0).sum(axis=0) / there.sum(axis=0) / 2
    centred = np.where(there, dosages - 2 * p, 0)
    np.testing.assert_allclose(
        zarr.open_array(out)[:], centred @ centred.T / (2 * p * (1 - p)).sum(), rtol=0, atol=1e-5
    )
    # As README and the page on genetics have the words, of dosages that are stored the other way round too.
    for name, x, names in (("sv", dosages, "samples variants"), ("vs", dosages.T, "variants samples")):
        stored = zarr.create_array(tmp_path / name, shape=x.shape, dtype="i1", dimension_names=names.split())
        stored[...] = x
    for name, words in (
        ("sv", "--of rows --center columns"),
        ("vs", "--center rows"),
        ("sv", "--sum-over variants --center columns"),
        ("vs", "--sum-over variants --center rows"),
    ):
        words += " --missing -1" if holes else ""
        given = ["gram", str(tmp_path / name), str(tmp_path / "again"), *words.split()]
        result = CliRunner().invoke(cli, [*given, "--divide", "2pq", "--device", "cpu", "--overwrite", "-q"])
        assert result.exit_code == 0, result.output
        same = zarr.open_array(tmp_path / "again")[:]
        np.testing.assert_allclose(same, zarr.open_array(out)[:], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"of": "rows", "center": "rows"},
            r"the sum of 2p\(1 - p\) over the columns of X, .*--center columns",
        ),
        ({"of": "rows"}, "centre those alone"),
        ({"of": "rows", "center": "columns", "weights": [1.0] * 5}, "without weights"),
        (
            {"of": "rows", "center": "columns", "missing": 0, "missing_as": "pairwise"},
            "leave one of them out",
        ),
        ({"of": "rows", "center": "columns"}, r"2 columns \(1, 3\) of .* means that are not from 0 to 2"),
        (
            {"of": "rows", "center": "columns", "missing": 0, "constant": "zero"},
            r"2 columns \(1, 3\) of .* means that are not from 0 to 2",
        ),
    ],
)
def test_a_divisor_of_alleles_is_refused_where_there_are_none(
    options: dict[str, Any], message: str, tmp_path: Path, client: Client
) -> None:
    x = np.ones((4, 5), "i1")
    x[:, [1, 3]] = 7
    x[:, 0] = 0  # where 0 is missing, nothing is left of it
    with pytest.raises(tw.OptionError, match=message):
        tw.gram(
            naive.put(tmp_path / "x", x),
            tmp_path / "g",
            divide="2pq",
            cluster=client,
            device="cpu",
            **options,
        )
    assert not (tmp_path / "g").exists()
    x[:] = 1
    x[2, [0, 4]] = -1, 3  # a missing one that nobody told of: the means are those of dosages
    with pytest.raises(
        tw.OptionError, match=r"2 columns \(0, 4\) of .* numbers that are not from 0 to 2, .*--missing"
    ):
        tw.gram(x, of="rows", center="columns", divide="2pq", cluster=client, device="cpu")
    x[:] = 2
    with pytest.raises(tw.OptionError, match=r"no dosage of .* varies"):
        tw.gram(x, of="rows", center="columns", divide="2pq", cluster=client, device="cpu")


def test_a_divisor_of_alleles_is_refused_for_alleles_that_nobody_added_up(client: Client) -> None:
    """Summed over ploidy, too, products are of alleles, and not of dosages."""
    calls = np.random.default_rng(0).integers(0, 2, (20, 6, 2)).astype("i1")
    asked: dict[str, Any] = {"divide": "2pq", "cluster": client, "device": "cpu"}
    named = xarray.DataArray(calls, dims=("variants", "samples", "ploidy"))
    with pytest.raises(
        tw.OptionError,
        match=r"no number of .* exceeds 1: along the axes 0 and 2,.*--add-up ploidy",
    ):
        tw.gram(calls, sum_over=[0, 2], center="columns", **asked)
    with pytest.raises(
        tw.OptionError, match=r"exceeds 1: along the axes 1 and 2, which the columns are made of"
    ):
        tw.gram(calls, sum_over=0, center="rows", **asked)
    for call in (tw.gram, lambda x, cluster, **options: plan_only("gram", [x, None], **options)):
        for over, side in (("variants", "rows"), (["variants", "ploidy"], "columns")):
            with pytest.raises(
                tw.OptionError, match=r"has an axis 'ploidy', .* sum of p\(1 - p\)\. Add .*--add-up ploidy"
            ):
                call(named, sum_over=over, center=side, **asked)
    dosages = named.sum("ploidy")
    p = dosages.values.mean(1, keepdims=True) / 2
    centred = dosages.values - 2 * p
    found = tw.gram(dosages, of="columns", center="rows", **asked)
    np.testing.assert_allclose(found, centred.T @ centred / (2 * (p * (1 - p)).sum()), rtol=1e-6, atol=1e-6)
    for matrix, expected in ((dosages.values, False), (calls.reshape(20, 12), True)):
        said: list[Any] = []
        tw.gram(matrix, of="columns", center="rows", listener=said.append, **asked)
        told = [event.message for event in said if isinstance(event, Caution)]
        assert any("the alleles of haplotypes, whose means are p," in one for one in told) == expected


def test_covariances_of_places_without_numbers_are_zero(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    x = rng.standard_normal((12, 5))
    x[:, 2] = np.nan
    asked: dict[str, Any] = {"missing": "nan", "cluster": client, "device": "cpu"}
    with pytest.raises(tw.OptionError, match=r"1 column \(2\) .* \(--constant zero\)"):
        tw.cov(x, **asked)
    found = tw.cov(x, constant="zero", **asked)
    there = np.array([0, 1, 3, 4])
    np.testing.assert_allclose(found[np.ix_(there, there)], np.cov(x[:, there], rowvar=False), atol=1e-12)
    assert not found[2].any()
    assert not found[:, 2].any()
