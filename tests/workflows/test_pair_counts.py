"""Numbers of pairs stored beside C: exact, of any shape and chunks, kept and checked with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
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
from tests.workflows.products import Stopped, stop_after
from tilewright.pipeline.errors import OptionError, OutputError, OutputExistsError
from tilewright.pipeline.product.ledger import FILE_NAME, Stored, read_record, write_record
from tilewright.pipeline.product.output import CHECKSUMS_NAME, MARK_NAME, partial_path
from tilewright.workflows.cli import cli

PAIRS: dict[str, Any] = {"missing": "nan", "missing_as": "pairwise", "device": "cpu"}
TIGHT = 40_000
"""Device memory that cuts a small C into several tiles."""


@pytest.fixture
def client(clusters: dict[int, Client]) -> Client:
    return clusters[2]


def gappy(rng: np.random.Generator, shape: tuple[int, int], dtype: str = "f4") -> np.ndarray:
    x = rng.standard_normal(shape).astype(dtype)
    x[rng.random(shape) < 0.3] = np.nan
    return x


def counted(x: np.ndarray, y: np.ndarray | None = None) -> np.ndarray:
    """The pairs that are both there, of every two columns."""
    left, right = (~np.isnan(one).T for one in (x, x if y is None else y))
    found: np.ndarray = left.astype(int) @ right.T.astype(int)
    return found


def check_case(clusters: dict[int, Client], folder: Path, data: st.DataObject) -> None:
    """Of one matrix or two, columns or rows, whole or a band, on any chunks, of 1 to 3 workers."""
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    k, m, n = draw(st.integers(3, 60)), draw(st.integers(2, 50)), draw(st.integers(2, 50))
    of = draw(st.sampled_from(["columns", "rows"]))
    dtype = draw(st.sampled_from(["f2", "f4", "f8"]))
    x, y = gappy(rng, (k, m), dtype), gappy(rng, (k, n), dtype)
    paths = []
    for name, values in (("x", x), ("y", y)):
        stored = values if of == "columns" else np.ascontiguousarray(values.T)
        chunks = draw(st.integers(4, 60)), draw(st.integers(4, 60))
        paths.append(naive.put(folder / f"{name}.zarr", stored, chunks))
    two = draw(st.booleans(), label="two matrices")
    expected = counted(x, y) if two else counted(x)
    options = PAIRS | {
        "of": of,
        "cluster": clusters[draw(st.sampled_from([1, 2, 3]))],
        "device_memory": draw(st.sampled_from([None, TIGHT])),
        "counts": folder / "n.zarr",
        "constant": "zero",  # of a variable without any number nothing is known
    }
    if draw(st.booleans(), label="a band"):
        before, after = (
            draw(st.integers(0, expected.shape[0] - 1)),
            draw(st.integers(0, expected.shape[1] - 1)),
        )
        options["window"] = before, after
        apart = np.arange(expected.shape[1]) - np.arange(expected.shape[0])[:, np.newaxis]
        expected = np.where((apart >= -before) & (apart <= after), expected, 0)
    center = draw(st.sampled_from([False, True]))
    run = tw.gram(*paths[: 1 + two], folder / "c.zarr", center=center, **options)
    assert run.verification is not None
    assert run.verification.passed
    c, found = zarr.open_array(folder / "c.zarr"), zarr.open_array(folder / "n.zarr")
    assert (found.dtype, found.shape, found.chunks) == (np.int64, c.shape, c.chunks)
    np.testing.assert_array_equal(found[...], expected)
    assert tw.audit(folder / "n.zarr").passed
    assert not partial_path(folder / "n.zarr").exists()


@settings(max_examples=3)
@given(st.data())
def test_pairs_are_counted(
    clusters: dict[int, Client], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_case(clusters, tmp_path_factory.mktemp("counts"), data)


@pytest.mark.slow
@settings(max_examples=200, derandomize=False)
@given(st.data())
def test_pairs_are_counted_thoroughly(
    clusters: dict[int, Client], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_case(clusters, tmp_path_factory.mktemp("counts"), data)


def test_as_pandas_leaves_out_elements_of_few_pairs(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    x = gappy(rng, (20, 9), "f8")
    path = naive.put(tmp_path / "x.zarr", x, (8, 5))
    tw.corr(path, tmp_path / "c.zarr", counts=tmp_path / "n.zarr", cluster=client, **PAIRS)
    c, n = (zarr.open_array(tmp_path / f"{name}.zarr")[...] for name in "cn")
    fewest = int(np.median(n))
    wanted = pd.DataFrame(x).corr(min_periods=fewest).to_numpy()
    np.testing.assert_allclose(np.where(n >= fewest, c, np.nan), wanted, atol=1e-12)


def test_integers_over_their_pairs(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    """Where only the divisor counts pairs."""
    x = rng.integers(-1, 3, (50, 21)).astype("i1")
    path = naive.put(tmp_path / "x.zarr", x, (16, 8))
    tw.gram(
        path, tmp_path / "g.zarr", missing=-1, divide="pairs", counts=tmp_path / "n.zarr", device="cpu",
        cluster=client,
    )  # fmt: skip
    np.testing.assert_array_equal(
        zarr.open_array(tmp_path / "n.zarr")[...], counted(np.where(x < 0, np.nan, x.astype("f4")))
    )


@pytest.mark.more
def test_an_open_array_gives_c_its_chunks(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    x = gappy(rng, (60, 50))
    path = naive.put(tmp_path / "x.zarr", x, (30, 16))
    counts = zarr.create_array(tmp_path / "n.zarr", shape=(50, 50), chunks=(7, 7), dtype="i8", fill_value=0)
    tw.corr(path, tmp_path / "c.zarr", counts=counts, cluster=client, **PAIRS)
    assert zarr.open_array(tmp_path / "c.zarr").chunks == (7, 7)
    np.testing.assert_array_equal(counts[...], counted(x))


@pytest.mark.more
def test_a_url(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    x = gappy(rng, (60, 50))
    path = naive.put(tmp_path / "x.zarr", x, (30, 16))
    url = f"file://{tmp_path}/n.zarr"
    options = PAIRS | {"cluster": client, "counts": url, "device_memory": TIGHT}
    with pytest.raises(Stopped):
        tw.corr(path, tmp_path / "c.zarr", listener=stop_after(2), **options)
    assert tw.corr(path, tmp_path / "c.zarr", **options).resumed >= 2
    np.testing.assert_array_equal(zarr.open_array(url)[...], counted(x))
    assert tw.audit(url).passed


def test_k_in_parts(clusters: dict[int, Client], tmp_path: Path, rng: np.random.Generator) -> None:
    x = gappy(rng, (4000, 6), "f8")
    path = naive.put(tmp_path / "x.zarr", x, (500, 6))
    with pytest.MonkeyPatch.context() as patched:
        for name in ("SPLIT_NBYTES", "TILE_OPERATIONS"):
            patched.setattr(f"tilewright.pipeline.plan.tiling.{name}", 100)
        run = tw.corr(
            path, tmp_path / "c.zarr", counts=tmp_path / "n.zarr", cluster=clusters[3], device_memory="200kB",
            **PAIRS,
        )  # fmt: skip
    assert run.plan.k_parts > 1
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "n.zarr")[...], counted(x))
    np.testing.assert_allclose(zarr.open_array(tmp_path / "c.zarr")[...], pd.DataFrame(x).corr(), atol=1e-12)


def stopped(client: Client, folder: Path, rng: np.random.Generator) -> tuple[np.ndarray, dict[str, Any]]:
    """A run of several tiles that was stopped after three."""
    x = gappy(rng, (120, 90))
    naive.put(folder / "x.zarr", x, (30, 16))
    options = PAIRS | {
        "x": folder / "x.zarr",
        "out": folder / "c.zarr",
        "counts": folder / "n.zarr",
        "constant": "zero",  # of a variable without any number nothing is known
        "cluster": client,
        "device_memory": TIGHT,
    }
    with pytest.raises(Stopped):
        tw.corr(listener=stop_after(3), **options)
    assert not (folder / "c.zarr").exists()
    assert not (folder / "n.zarr").exists()
    return x, options


def check_whole(folder: Path, x: np.ndarray) -> None:
    np.testing.assert_array_equal(zarr.open_array(folder / "n.zarr")[...], counted(x))
    np.testing.assert_allclose(zarr.open_array(folder / "c.zarr")[...], pd.DataFrame(x).corr(), atol=1e-4)
    for name in "cn":
        assert tw.audit(folder / f"{name}.zarr").passed
        assert not partial_path(folder / f"{name}.zarr").exists()


def test_a_stopped_run_goes_on(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    x, options = stopped(client, tmp_path, rng)
    assert tw.corr(**options).resumed >= 3
    check_whole(tmp_path, x)


def chunks_of(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "c").rglob("*") if path.is_file())


@pytest.mark.sample(1)
@pytest.mark.parametrize("lost", ["a byte", "a chunk", "all", "its metadata"])
def test_tiles_whose_counts_are_lost_are_computed_again(
    client: Client, tmp_path: Path, rng: np.random.Generator, lost: str
) -> None:
    x, options = stopped(client, tmp_path, rng)
    growing = partial_path(tmp_path / "n.zarr")
    chunk = chunks_of(growing)[0]
    if lost == "a chunk":
        chunk.unlink()
    elif lost == "a byte":
        # Of what is on disk for sure a run looks at lengths alone.
        chunk.write_bytes(chunk.read_bytes()[:-1])
    elif lost == "all":
        shutil.rmtree(growing)
    else:
        said = json.loads((growing / "zarr.json").read_text())
        said["fill_value"] = 7
        (growing / "zarr.json").write_text(json.dumps(said))
    run = tw.corr(**options)
    assert run.resumed < run.plan.tile_count
    assert (run.resumed == 0) == (lost in ("all", "its metadata"))
    check_whole(tmp_path, x)


@pytest.mark.more
def test_a_run_that_was_killed_between_the_two_names(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """The numbers of pairs get theirs first, with their record, and are not taken for somebody else's then."""
    x, options = stopped(client, tmp_path, rng)
    growing = partial_path(tmp_path / "n.zarr")
    record = read_record(partial_path(tmp_path / "c.zarr") / FILE_NAME)
    assert record is not None
    of_counts = {index: Stored(stored.counts) for index, stored in record.finished.items()}
    past = type(record)(**{**vars(record), "finished": of_counts, "array": record.beside, "beside": None})
    write_record(growing / CHECKSUMS_NAME, past)
    for folder in growing.glob("*drafts*"):
        shutil.rmtree(folder)
    (growing / MARK_NAME).unlink()
    growing.rename(tmp_path / "n.zarr")
    assert tw.corr(**options).resumed >= 3
    check_whole(tmp_path, x)


def test_wrong_counts_are_found_and_their_tile_computed_once_more(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    x = gappy(rng, (60, 90))
    path = naive.put(tmp_path / "x.zarr", x, (30, 16))
    changed = []

    def spoil(event: Any) -> None:
        if not changed and getattr(event, "name", "") == "verify" and hasattr(event, "total"):
            growing = zarr.open_array(partial_path(tmp_path / "n.zarr"))
            growing[0:16, 64:80] = growing[0:16, 64:80] + 1
            changed.append(True)

    run = tw.corr(
        path, tmp_path / "c.zarr", counts=tmp_path / "n.zarr", cluster=client, device_memory=TIGHT,
        listener=spoil, **PAIRS,
    )  # fmt: skip
    assert changed
    assert run.verification is not None
    assert run.verification.passed
    check_whole(tmp_path, x)


def test_what_is_damaged_later_an_audit_names(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = naive.put(tmp_path / "x.zarr", gappy(rng, (60, 50)), (30, 16))
    tw.cov(path, tmp_path / "c.zarr", counts=tmp_path / "n.zarr", cluster=client, **PAIRS)
    chunk = chunks_of(tmp_path / "n.zarr")[0]
    chunk.write_bytes(chunk.read_bytes()[::-1])
    audit = tw.audit(tmp_path / "n.zarr")
    assert [one.file for one in audit.bad] == ["c/0/0"]
    assert tw.audit(tmp_path / "c.zarr").passed


def test_both_are_replaced_where_that_is_asked(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    x = gappy(rng, (60, 50))
    path = naive.put(tmp_path / "x.zarr", x, (30, 16))
    naive.put(tmp_path / "n.zarr", np.zeros((3, 3)))
    options = PAIRS | {"cluster": client, "counts": tmp_path / "n.zarr"}
    with pytest.raises(OutputExistsError, match=r"counts: .*n\.zarr exists; choose another path, or ask"):
        tw.corr(path, tmp_path / "c.zarr", **options)
    assert not partial_path(tmp_path / "c.zarr").exists()
    tw.corr(path, tmp_path / "c.zarr", overwrite=True, **options)
    check_whole(tmp_path, x)


REFUSED: list[tuple[dict[str, Any], type[tw.TilewrightError], str]] = [
    ({"missing_as": "mean"}, OptionError, "numbers of pairs are counted only where elements are formed of"),
    ({"counts": "c.zarr"}, OutputError, "is also the result; the numbers of pairs need a place of their own"),
    ({"counts": "x.zarr"}, OutputError, "is also X; the numbers of pairs need a place of their own"),
    ({"counts": "c.zarr/n"}, OutputError, "counts: .*lie one inside the other; the numbers of pairs need"),
    ({"counts": "c.zarr.partial"}, OutputError, "counts: .*lies where C, c.zarr, grows"),
    ({"counts": np.zeros((4, 4), "i4")}, OutputError, "holds int32, and numbers of pairs are int64; give an"),
    ({"counts": np.zeros((4, 5), "i8")}, OutputError, r"has shape \(4, 5\); the result has \(4, 4\)"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_what_is_refused(
    options: dict[str, Any],
    error: type[tw.TilewrightError],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    naive.put(Path("x.zarr"), np.arange(24.0).reshape(6, 4))
    counts: Any = options.get("counts", "n.zarr")
    if isinstance(counts, np.ndarray):
        counts = zarr.create_array(tmp_path / "n.zarr", shape=counts.shape, dtype=counts.dtype)
    with pytest.raises(error, match=message):
        tw.cov("x.zarr", "c.zarr", **(PAIRS | options | {"counts": counts}))
    assert not Path("c.zarr").exists()
    assert not Path("c.zarr.partial").exists()


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.chdir(tmp_path)
    x = gappy(rng, (40, 9), "f8")
    naive.put(Path("x.zarr"), x, (16, 5))
    words = "corr x.zarr c.zarr --missing nan --missing-as pairwise --counts n.zarr --device cpu"
    result = CliRunner().invoke(cli, [*words.split(), "--plan-only"])
    assert result.exit_code == 0, result.stderr
    assert not Path("n.zarr").exists()
    result = CliRunner().invoke(cli, words.split())
    assert result.exit_code == 0, result.stderr
    np.testing.assert_array_equal(zarr.open_array("n.zarr")[...], counted(x))
