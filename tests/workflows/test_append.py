"""Rows added to a Gram matrix that is there: the sums over all of X, its halves, and nothing twice."""

from __future__ import annotations

import shutil
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
from tilewright.pipeline.errors import DTypeError, OptionError, OutputError, ShapeError
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


def grow(path: Path, more: np.ndarray, axis: int = 0) -> None:
    """Lines behind those that are there, as a producer of data stores them."""
    array = zarr.open_array(path, mode="r+")
    array.append(more, axis=axis)


def check_case(client: Client, folder: Path, data: st.DataObject) -> None:
    """After any number of additions, of any dtype and chunks, of rows or columns, of one matrix or two, with masks,
    codes, weights, and numbers that are subtracted and multiplied by."""
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(["i1", "i4", "f4", "f8", "c8"]))
    of = draw(st.sampled_from(["columns", "rows"]))
    summed = "rows" if of == "columns" else "columns"
    parts = draw(st.lists(st.integers(1, 40), min_size=2, max_size=4))
    lines = sum(parts)
    sides = [draw(st.integers(1, 50))] + (
        [draw(st.integers(1, 30))] if draw(st.booleans(), label="two") else []
    )
    matrices = []
    for variables in sides:
        whole = 5 * rng.standard_normal((lines, variables))
        whole = whole + 1j * rng.standard_normal(whole.shape) if dtype == "c8" else whole
        matrices.append(whole.astype(dtype))
    chunks = draw(st.integers(3, 40)), draw(st.integers(3, 40))
    axis = 0 if of == "columns" else 1
    options: dict[str, Any] = {"of": of}
    gone = None
    gaps = draw(st.sampled_from([None, "a code", "a mask"]), label="gaps")
    if gaps == "a code":
        for whole in matrices:
            whole[rng.random(whole.shape) < 0.2] = 3
        options["missing"] = 3
    elif gaps == "a mask":
        gone = {role: rng.random(whole.shape) < 0.2 for role, whole in zip("XY", matrices, strict=False)}
    if draw(st.booleans(), label="divided"):
        options["divide"] = 2.5
    given_values = {
        name: {side: 0.5 + rng.random(lines if side == summed else sides[0])}
        for name in ("center", "scale")
        if draw(st.booleans(), label=name)
        for side in [summed if len(sides) == 2 else draw(st.sampled_from(["columns", "rows"]), label="of")]
    }
    weights = rng.random(lines) + 0.1 if draw(st.booleans(), label="weighted") else None

    def laid(whole: np.ndarray, first: int, stop: int) -> np.ndarray:
        return whole[first:stop] if axis == 0 else np.ascontiguousarray(whole[first:stop].T)

    def of_lines(stop: int) -> dict[str, Any]:
        """The options beside so many lines."""
        found: dict[str, Any] = {
            name: {side: vector[:stop] if side == summed else vector for side, vector in given.items()}
            for name, given in given_values.items()
        }
        if weights is not None:
            found["weights"] = weights[:stop]
        if gone is not None:
            found["missing"] = {role: laid(one, 0, stop) for role, one in gone.items()}
        return found

    paths = [folder / name for name in ("x.zarr", "y.zarr")[: len(sides)]]
    done = 0
    for part in parts:
        for path, whole in zip(paths, matrices, strict=True):
            more = laid(whole, done, done + part)
            if done == 0:
                naive.put(path, more, chunks)
            else:
                grow(path, more, axis)
        done += part
        run = tw.gram(
            *paths,
            folder / "c.zarr",
            append=True,
            cluster=client,
            device="cpu",
            device_memory="40KiB",
            listener=lambda event: None,
            **options | of_lines(done),
        )
        assert run.verification is not None
        assert run.verification.passed
        assert run.plan.symmetric == (len(sides) == 1)
        assert run.plan.k == part
    found = zarr.open_array(folder / "c.zarr")[...]
    x, *others = (laid(whole, 0, lines) for whole in matrices)
    asked = naive.Asked(**options | of_lines(lines))
    expected, size = naive.gram_and_size(x, others[0] if others else None, asked)
    if len(sides) == 1:
        np.testing.assert_array_equal(found, found.conj().T)
    if found.dtype.kind in "iu":
        np.testing.assert_array_equal(found, expected)
    else:
        assert (np.abs(found - expected) <= (lines + 20) * np.finfo(found.dtype).eps * size).all()
    assert tw.audit(folder / "c.zarr").passed


@settings(max_examples=2)
@given(data=st.data())
def test_c_is_that_of_all_lines(
    client: Client, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_case(client, tmp_path_factory.mktemp("append"), data)


@pytest.mark.slow
@settings(max_examples=100, derandomize=False)
@given(data=st.data())
def test_more_are_those_of_all_lines(
    client: Client, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_case(client, tmp_path_factory.mktemp("append"), data)


def with_x(
    folder: Path, rng: np.random.Generator, lines: int = 60
) -> tuple[Path, np.ndarray, dict[str, Any]]:
    x = rng.integers(-9, 9, (lines, 50)).astype("i1")
    path = naive.put(folder / "x.zarr", x, (20, 16))
    return path, x, {"append": True, "device": "cpu", "device_memory": "9KiB"}


def test_nothing_is_added_twice(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    """Not by the same command again, nor by one that goes on after a stop, at whatever moment that came."""
    path, x, options = with_x(tmp_path, rng)
    options |= {"cluster": client}
    out = tmp_path / "c.zarr"
    tw.gram(path, out, **options)
    said: list[Event] = []
    again = tw.gram(path, out, listener=said.append, **options)
    assert again.operations == again.write_nbytes == 0
    assert any(
        isinstance(event, Notice) and "all 60 rows of X in it already" in event.message for event in said
    )
    more = rng.integers(-9, 9, (30, 50)).astype("i1")
    grow(path, more)
    both = np.concatenate([x, more]).astype("i4")
    with pytest.raises(Stopped):
        tw.gram(path, out, listener=stop_after(2), **options)
    np.testing.assert_array_equal(zarr.open_array(out)[...], x.T.astype("i4") @ x, "C stands as it was")
    run = tw.gram(path, out, **options)
    assert run.resumed >= 2
    np.testing.assert_array_equal(zarr.open_array(out)[...], both.T @ both)
    assert tw.gram(path, out, **options).operations == 0
    np.testing.assert_array_equal(zarr.open_array(out)[...], both.T @ both)
    assert not partial_path(out).exists()


def test_lines_are_added_only_to_what_was_made_of_the_others(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    path, x, options = with_x(tmp_path, rng)
    options |= {"cluster": client}
    out = tmp_path / "c.zarr"
    tw.gram(path, out, **options)
    grow(path, x[:7])
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        (
            {"center": True},
            OptionError,
            "append=True beside centring by means of X itself, which changes with every line",
        ),
        ({"scale": True}, OptionError, "append=True beside scaling by deviations of X itself"),
        ({"divide": "n"}, OptionError, "append=True beside divide='n'"),
        ({"missing": 3, "missing_as": "pairwise"}, OptionError, "append=True beside missing_as='pairwise'"),
        ({"window": 3}, OptionError, "append=True beside window"),
        ({"missing": 3}, OptionError, "was made by other options than these"),
        ({"weights": np.ones(67)}, OptionError, "was made by other options"),
        ({"append": 1}, OptionError, "append"),
    ]
    for more, error, message in wrong:
        with pytest.raises(error, match=message):
            tw.gram(path, out, **{**options, **more})
    with pytest.raises(OutputError, match=r"adds to what is stored, and .* would be written in place"):
        tw.gram(path, zarr.create_array(tmp_path / "given.zarr", shape=(50, 50), dtype="i4"), **options)
    other = naive.put(tmp_path / "other.zarr", np.concatenate([x[:, :40], x[:7, :40]]), (20, 16))
    with pytest.raises(ShapeError, match="of other variables than the 40 columns"):
        tw.gram(other, out, **options)
    short = naive.put(tmp_path / "short.zarr", x[:50], (20, 16))
    with pytest.raises(OutputError, match=r"has 60 rows in it, and .*short[.]zarr 50"):
        tw.gram(short, out, **options)
    changed = naive.put(tmp_path / "changed.zarr", np.concatenate([x + 1, x[:7]]).astype("i1"), (20, 16))
    with pytest.raises(
        OutputError, match=r"was made of other numbers than .*changed[.]zarr holds in rows 0 to 19"
    ):
        tw.gram(changed, out, **options)
    tw.cov(path, tmp_path / "cov.zarr", cluster=client, device="cpu")
    with pytest.raises(OutputError, match="has no record of which lines are in it"):
        tw.gram(path, tmp_path / "cov.zarr", **options)
    moved = tmp_path / "moved.zarr"
    shutil.copytree(path, moved)
    assert tw.gram(moved, out, **options).plan.k == 7, "it is known by its numbers"


def test_integers_that_would_not_hold_the_sums_are_refused(client: Client, tmp_path: Path) -> None:
    x = np.full((20, 3), 30000, "i4")
    path = naive.put(tmp_path / "x.zarr", x, (20, 3))
    out = tmp_path / "c.zarr"
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "append": True}
    tw.gram(path, out, dtype="i4", listener=lambda event: None, **options)
    grow(path, x)
    with pytest.raises(DTypeError, match="holds int32, and sums over 40 rows need int64: compute it anew"):
        tw.gram(path, out, **options)
    tw.gram(path, out, dtype="i4", listener=lambda event: None, **options)
    with np.errstate(over="ignore"):
        twice = np.concatenate([x, x]).astype("i4")
        np.testing.assert_array_equal(zarr.open_array(out)[...], twice.T @ twice)


def test_a_command_adds_what_came(tmp_path: Path, rng: np.random.Generator) -> None:
    path, x, _ = with_x(tmp_path, rng)
    out = tmp_path / "c.zarr"
    for rows in (60, 77):
        done = CliRunner().invoke(
            cli, ["gram", str(path), str(out), "--append", "--device", "cpu", "--quiet"]
        )
        assert done.exit_code == 0, done.output
        held = zarr.open_array(path)[...].astype("i4")
        assert len(held) == rows
        np.testing.assert_array_equal(zarr.open_array(out)[...], held.T @ held)
        grow(path, x[:17])
