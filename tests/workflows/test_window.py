"""A band of a Gram matrix: what is in it, what is not stored, and what a stop, an audit and a repair make of that."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from tests.pipeline.plan.test_band import mask
from tests.workflows.products import Stopped, stop_after
from tilewright.pipeline.errors import OptionError, OutputError
from tilewright.pipeline.events import Caution, Event, Notice, UnitDone, WorkPlanned
from tilewright.pipeline.plan.band import Band
from tilewright.pipeline.product import banded, findings
from tilewright.workflows.cli import cli


@pytest.fixture
def client(clusters: dict[int, Client]) -> Client:
    return clusters[2]


def numbers(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    values = 10 * rng.standard_normal(shape) + 3
    return (values + 1j * rng.standard_normal(shape) if dtype.startswith("c") else values).astype(dtype)


def stored_chunks(c: zarr.Array[Any]) -> set[tuple[int, int]]:
    """The places of the chunks that there are."""
    store: Any = c.store
    return {
        (int(row.name), int(column.name))
        for row in (store.root / c.path / "c").iterdir()
        for column in row.iterdir()
    }


def check_case(clusters: dict[int, Client], folder: Path, data: st.DataObject) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(["i1", "i4", "f2", "f4", "f8", "c8"]))
    n, k = draw(st.integers(2, 90)), draw(st.integers(8, 40))
    other = draw(st.integers(2, 90)) if draw(st.booleans(), label="two matrices") else None
    even = draw(st.booleans(), label="as far before as behind")
    before = draw(st.integers(0, min(n, other or n) - 1))
    band = Band(before, before if even else draw(st.integers(0, (other or n) - 1)))
    x = numbers(rng, (k, n), dtype)
    y = None if other is None else numbers(rng, (k, other), dtype)
    paths = [naive.put(folder / "x.zarr", x, (9, 13), compressors=draw(st.sampled_from([None, "auto"])))]
    if y is not None:
        paths.append(naive.put(folder / "y.zarr", y, (11, 12)))
    options: dict[str, Any] = draw(
        st.sampled_from(
            [{}, {"center": True, "divide": "n-1"}, {"center": True, "scale": True, "divide": "n"}]
        )
    )
    out: Any = folder / "c.zarr"
    if draw(st.booleans(), label="C of our own"):
        c_dtype = tw.gram(
            *paths, folder / "whole.zarr", cluster=clusters[1], device="cpu", **options
        ).plan.c_dtype
        side = draw(st.sampled_from([5, 16]))
        out = zarr.create_array(out, shape=(n, other or n), chunks=(side, side), dtype=c_dtype, fill_value=0)
    run = tw.gram(
        *paths,
        out,
        window=before if even else tuple(band),
        cluster=clusters[draw(st.sampled_from([1, 2, 3]))],
        device="cpu",
        device_memory=draw(st.sampled_from([None, "60KiB", "200KiB"])),
        listener=lambda event: None,
        **options,
    )
    assert run.verification is not None
    assert run.verification.passed, run.verification
    assert run.plan.window == tuple(band)
    assert run.plan.symmetric == (other is None and band.before == band.after)
    assert run.operations == run.plan.operations
    assert run.write_nbytes == run.plan.write_nbytes
    c = zarr.open_array(folder / "c.zarr")
    found = c[...]
    inside = mask(*found.shape, band)
    assert not found[~inside].any()
    expected = np.where(inside, naive.gram(x, y=y, **options), 0)
    if run.plan.symmetric:
        np.testing.assert_array_equal(found, found.conj().T)
    if found.dtype.kind in "iu":
        np.testing.assert_array_equal(found, expected)
    else:
        scale = np.abs(naive.gram(x, y=y, **{**options, "center": False})).max() + np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=100 * np.finfo(found.dtype).eps * scale)
    side = c.chunks[0]
    touched = {(i // side, j // side) for i, j in np.argwhere(inside).tolist()}
    assert stored_chunks(c) == touched
    assert tw.audit(folder / "c.zarr").passed


@settings(max_examples=4)
@given(data=st.data())
def test_a_band_is_that_of_the_whole_matrix(
    clusters: dict[int, Client], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_case(clusters, tmp_path_factory.mktemp("band"), data)


@pytest.mark.slow
@settings(max_examples=300, derandomize=False)
@given(data=st.data())
def test_more_bands_are_those_of_the_whole_matrix(
    clusters: dict[int, Client], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_case(clusters, tmp_path_factory.mktemp("band"), data)


@pytest.mark.sample(1)
@pytest.mark.parametrize("window", [4, (0, 11)])
def test_linkage_over_pairs_that_are_both_there_is_pandas(
    client: Client, tmp_path: Path, rng: np.random.Generator, window: Any
) -> None:
    """Correlations of dosages with gaps: as linkage disequilibrium, r, of variants near each other."""
    x = rng.binomial(2, 0.4, (60, 80)).astype("i1")
    gone = rng.random(x.shape) < 0.1
    path = naive.put(tmp_path / "x.zarr", np.where(gone, -1, x).astype("i1"), (30, 16))
    out = zarr.create_array(tmp_path / "r.zarr", shape=(80, 80), chunks=(8, 8), dtype="f4", fill_value=0)
    run = tw.corr(
        path, out, missing=-1, missing_as="pairwise", window=window, cluster=client, device="cpu",
        device_memory="60KiB",
    )  # fmt: skip
    inside = mask(80, 80, Band(*banded.as_window(window)))
    expected = pd.DataFrame(np.where(gone, np.nan, x)).corr().to_numpy()
    np.testing.assert_allclose(out[...], np.where(inside, expected, 0), atol=1e-5)
    assert run.verification is not None
    assert run.verification.passed
    assert run.plan.tile_count > 3


def test_room_and_shares_are_of_the_band_alone(
    client: Client, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were of the square: a disk seemed too small for what is not stored, and NaN rarer than they are."""
    x = rng.binomial(2, 0.4, (60, 80)).astype("i1")
    x[:, 7] = -1
    x[0, 7] = 1  # constant: NaN throughout its row and column
    path = naive.put(tmp_path / "x.zarr", x, (30, 16))
    options: dict[str, Any] = {
        "missing": -1,
        "missing_as": "pairwise",
        "window": 4,
        "constant": "nan",
        "chunks": (8, 8),
        "cluster": client,
        "device": "cpu",
    }
    out = tmp_path / "r.zarr"
    stored = Band(4, 4).area((slice(0, 80), slice(0, 80)), (8, 8)) * 4
    assert stored < 80 * 80 * 4 / 3
    monkeypatch.setattr(findings.shutil, "disk_usage", lambda path: SimpleNamespace(free=stored))
    said: list[Any] = []
    run = tw.corr(path, out, listener=said.append, **options)
    told = [event.message for event in said if isinstance(event, Caution)]
    elements = 80 * 9 - 2 * (1 + 2 + 3 + 4)
    share = f"{17 / elements:.2%} of the result's {elements} elements in the band are not finite (17 NaN)"
    assert [one.startswith(share) for one in told] == [True], told
    assert f"{17 / elements:.3g} of C's elements in the band are not finite" in str(run)
    monkeypatch.setattr(findings.shutil, "disk_usage", lambda path: SimpleNamespace(free=stored - 1))
    said.clear()
    tw.corr(path, out, overwrite=True, listener=said.append, **options)
    assert any("are free on the disk" in event.message for event in said if isinstance(event, Notice))


def with_x(folder: Path, rng: np.random.Generator) -> tuple[Path, np.ndarray, dict[str, Any]]:
    x = rng.integers(-9, 9, (40, 96)).astype("i1")
    path = naive.put(folder / "x.zarr", x, (20, 16), compressors=None)
    options: dict[str, Any] = {"window": 10, "device": "cpu", "device_memory": "25KiB"}
    return path, np.where(mask(96, 96, Band(10, 10)), x.T.astype("i4") @ x, 0), options


def out_of(folder: Path) -> zarr.Array[Any]:
    return zarr.create_array(folder / "c.zarr", shape=(96, 96), chunks=(8, 8), dtype="i4", fill_value=0)


@pytest.mark.more
def test_a_stopped_band_goes_on_where_it_stood(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """With the same memory, and with so little that its tiles are cut into smaller ones; a C of another band is begun
    anew."""
    path, _, options = with_x(tmp_path, rng)
    x = zarr.open_array(path)[...].astype("i4")
    expected = np.where(mask(96, 96, Band(12, 12)), x.T @ x, 0)
    options |= {"cluster": client, "window": 12, "device_memory": 4096}
    for memory, side in ((4096, 16), (1500, 8)):
        out = out_of(tmp_path)
        with pytest.raises(Stopped):
            tw.gram(path, out, listener=stop_after(3), **options)
        done: list[Event] = []
        run = tw.gram(path, out, listener=done.append, **{**options, "device_memory": memory})
        assert run.resumed >= 3
        tiles = [one for one in done if isinstance(one, UnitDone) and one.name == "matmul"]
        assert len(tiles) == run.plan.tile_count - run.resumed
        assert run.plan.tile_rows == side
        np.testing.assert_array_equal(out[...], expected)
        assert tw.audit(out).passed
        shutil.rmtree(tmp_path / "c.zarr")
    out = out_of(tmp_path)
    with pytest.raises(Stopped):
        tw.gram(path, out, listener=stop_after(3), **options)
    assert tw.gram(path, out, **{**options, "window": 13}).resumed == 0


def test_what_is_missing_outside_a_band_is_no_damage(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """And what is there is; what is missing inside is too, and a repair puts both right."""
    path, expected, options = with_x(tmp_path, rng)
    tw.gram(path, tmp_path / "c.zarr", cluster=client, **options)
    c = zarr.open_array(tmp_path / "c.zarr", mode="r+")
    side = c.chunks[0]
    assert side < 96
    inside, outside = tmp_path / "c.zarr/c/0/0", tmp_path / f"c.zarr/c/0/{95 // side}"
    assert not outside.exists()
    was = inside.read_bytes()
    c[0, 95] = 5
    inside.unlink()
    found = tw.audit(tmp_path / "c.zarr")
    assert [(one.file, one.reason) for one in found.bad] == [
        ("c/0/0", "it is missing"),
        (f"c/0/{95 // side}", "it lies outside the band, where nothing was written"),
    ]
    mended = tw.repair(path, path, tmp_path / "c.zarr", transpose_a=True, cluster=client, device="cpu")
    assert mended.passed
    assert mended.repaired == 1
    assert inside.read_bytes() == was
    assert not outside.exists()
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "c.zarr")[...], expected)


def test_a_tile_that_proves_wrong_is_computed_again(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Damage between the last tile and the check, of an element of the band and of one beside it."""
    path, expected, options = with_x(tmp_path, rng)

    def run_with_damage(*places: tuple[int, int]) -> tw.MatmulRun:
        left = [*places]

        def damage(event: Event) -> None:
            if isinstance(event, WorkPlanned) and event.name == "verify" and left:
                zarr.open_array(tmp_path / "c.zarr.partial", mode="r+")[left.pop()] = 10**6

        out = tmp_path / "c.zarr"
        run = tw.gram(path, out, listener=damage, cluster=client, overwrite=True, **options)
        assert not left
        return run

    for place in ((40, 45), (3, 15)):
        run = run_with_damage(place)
        assert run.verification is not None
        assert run.verification.passed
        np.testing.assert_array_equal(zarr.open_array(tmp_path / "c.zarr")[...], expected)


def test_what_cannot_take_a_band_is_refused(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    path, _, options = with_x(tmp_path, rng)
    options |= {"cluster": client}
    for window, told in (
        (96, "window=96: the result is 96 × 96"),
        ((3, 100), r"window=\(3, 100\): the result is 96 × 96"),
    ):
        with pytest.raises(OptionError, match=told):
            tw.gram(path, tmp_path / "c.zarr", **{**options, "window": window})
    given = zarr.create_array(
        tmp_path / "nan.zarr", shape=(96, 96), chunks=(8, 8), dtype="f4", fill_value=np.nan
    )
    with pytest.raises(OutputError, match="has the fill value nan, and what lies outside the band is 0"):
        tw.cov(path, given, dtype="f4", **options)
    held = out_of(tmp_path)
    held[0, 90] = 1
    with pytest.raises(OutputError, match="holds c/0/11, which lies outside the band"):
        tw.gram(path, held, **options)


@pytest.mark.parametrize(("given", "window"), [("5", (5, 5)), ("0,9", (0, 9))])
def test_a_band_is_asked_for_by_a_command(
    tmp_path: Path, rng: np.random.Generator, given: str, window: tuple[int, int]
) -> None:
    path, _, _ = with_x(tmp_path, rng)
    done = CliRunner().invoke(
        cli, ["corr", str(path), str(tmp_path / "r.zarr"), "--window", given, "--device", "cpu", "--quiet"]
    )
    assert done.exit_code == 0, done.output
    expected = np.where(mask(96, 96, Band(*window)), np.corrcoef(zarr.open_array(path)[:], rowvar=False), 0)
    np.testing.assert_allclose(zarr.open_array(tmp_path / "r.zarr")[...], expected, atol=1e-6)
    wrong = CliRunner().invoke(cli, ["corr", str(path), str(tmp_path / "r.zarr"), "--window", "1,x"])
    assert wrong.exit_code == 1
    assert "--window 1,x: give how many variables" in wrong.output
