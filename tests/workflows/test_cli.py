"""The command line from end to end: results, streams, exit statuses, and that bad input leaves nothing."""

from __future__ import annotations

import contextlib
import csv
import errno
import itertools
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import click
import dask
import numpy as np
import pytest
import zarr
from click.testing import CliRunner, Result
from distributed import LocalCluster
from zarr.storage import LocalStore

from tilewright.kernels.histograms.tokens import KINDS
from tilewright.pipeline import config
from tilewright.pipeline.events import UnitDone
from tilewright.pipeline.gram import options as gram_options
from tilewright.pipeline.plan import tiling
from tilewright.pipeline.spectral import options as spectral_options
from tilewright.pipeline.text import saved_counts
from tilewright.pipeline.text.histogram import Histogram
from tilewright.workflows import cli, console, histogram, plots
from tilewright.workflows.commands import options, texts
from tilewright.workflows.terminal import progress

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _leave_the_libraries_as_they_were() -> Iterator[None]:
    """The command line silences logs for its whole process; here other tests follow in the same one."""
    levels = {name: logging.getLogger(name).level for name in console.NOISY_LOGGERS}
    environment = dict(os.environ)
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of the test's own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(here: Path) -> Run:
    """Runs ``tilewright ...`` in this process."""

    def call(*arguments: str) -> Result:
        return CliRunner().invoke(cli.cli, list(arguments))

    return call


def store(path: str, values: np.ndarray, chunks: tuple[int, ...] | None = None) -> np.ndarray:
    # Format 2, because format 3 has no settled names for text and dates and warns.
    stored = {"shape": values.shape, "chunks": chunks or values.shape, "dtype": values.dtype}
    array = zarr.create_array(path, zarr_format=2 if values.dtype.kind in "UM" else 3, **stored)
    array[...] = values
    return values


def everything(folder: Path) -> dict[str, bytes | None]:
    """All files below a folder with what they hold."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def tool(name: str) -> str:
    """A command installed beside this Python."""
    return str(Path(sys.executable).with_name(name))


# Results ------------------------------------------------------------------------------------------------


def test_matmul_stores_the_product_and_says_so(run: Run, here: Path, rng: np.random.Generator) -> None:
    a = store("a.zarr", rng.integers(-99, 99, (70, 50)), (16, 16))
    b = store("b.zarr", rng.integers(-99, 99, (70, 30)), (20, 20))
    result = run("matmul", "a.zarr", "b.zarr", "c.zarr", "--transpose-a")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("50 × 30 int64 in ")
    assert "verified in 2 rounds" in result.stdout
    assert result.stderr.startswith("multiplying on CPU with 1 worker")
    np.testing.assert_array_equal(zarr.open_array("c.zarr")[...], a.T @ b)
    assert sorted(path.name for path in here.iterdir()) == ["a.zarr", "b.zarr", "c.zarr"]


def test_outputs_may_be_called_by_a_tilde_in_this_folder(run: Run, here: Path) -> None:
    """Where a path, which keeps no ``./``, is one that only shells know."""
    a = store("a.zarr", np.ones((4, 4)))
    for expected, more in ((a @ a, ()), (a.T @ a, ("--overwrite",))):
        result = run("matmul", "-q", "a.zarr", "a.zarr", "./~", *more)
        assert result.exit_code == 0, result.stderr
        np.testing.assert_array_equal(zarr.open_array("./~")[...], expected)
    (here / "~").rename(here / "other")
    (here / "~").mkdir()
    (here / "one.txt").write_bytes(b"aab")
    for name in ("./~/f.zarr", "./~/f.csv"):
        result = run("histogram", "one.txt", "--by", "letter", "--out", name)
        assert result.exit_code == 0, result.stderr
    before = everything(here)
    for more in ((), ("--overwrite",)):
        for arguments in (("matmul", "a.zarr", "a.zarr", "~"), ("histogram", "one.txt", "--out", "~/f.csv")):
            result = run(*arguments, *more)
            assert result.exit_code == 1
            assert "begins with a tilde" in result.stderr
    assert everything(here) == before


def test_json_is_one_object_and_quiet_is_quiet(run: Run, rng: np.random.Generator) -> None:
    store("a.zarr", rng.random((20, 20), np.float32))
    result = run("matmul", "a.zarr", "a.zarr", "c.zarr", "--json", "--quiet")
    assert result.exit_code == 0
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert report["plan"]["m"] == 20
    assert report["verification"]["passed"] is True
    unverified = run("matmul", "a.zarr", "a.zarr", "c.zarr", "--json", "--no-verify", "--overwrite")
    assert json.loads(unverified.stdout)["verification"] is None


def test_plans_are_printed_and_nothing_is_written(run: Run, here: Path, rng: np.random.Generator) -> None:
    store("a.zarr", rng.random((20, 30)))
    before = everything(here)
    for arguments in (["plan", "a.zarr", "a.zarr"], ["matmul", "a.zarr", "a.zarr", "c.zarr", "--plan-only"]):
        text = run(*arguments, "--transpose-b")
        assert text.exit_code == 0, text.stderr
        assert "20 × 20 float64" in text.stdout
        plan = json.loads(run(*arguments, "--transpose-b", "--json").stdout)
        assert (plan["m"], plan["n"], plan["k"]) == (20, 20, 30)
    with LocalCluster(
        n_workers=3, threads_per_worker=1, processes=False, protocol="tcp://", dashboard_address=":0"
    ) as cluster:
        profile = f"profiles: {{three: {{kind: existing, address: '{cluster.scheduler_address}'}}}}"
        (here / "three.yaml").write_text(profile)
        there = run(
            *arguments, "--transpose-b", "--json", "--profile", "three", "--cluster-file", "three.yaml"
        )
    assert json.loads(there.stdout)["workers"] == 3
    (here / "three.yaml").unlink()
    assert everything(here) == before
    assert (
        json.loads(run("plan", "a.zarr", "a.zarr", "--transpose-b", "--workers", "3", "--json").stdout)[
            "workers"
        ]
        == 3
    )


@pytest.mark.more
def test_a_plan_for_an_output_that_is_there_says_what_would_become_of_it(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LEAST_CHUNK_NBYTES", "SMALL_CHUNK_NBYTES", "MOST_CHUNK_NBYTES"):
        monkeypatch.setattr(tiling, name, 512)  # so that the product has several tiles
    store("a.zarr", np.ones((32, 32)), (8, 8))
    plan = ("matmul", "a.zarr", "a.zarr", "c.zarr", "--device-memory", "8000", "--plan-only")
    assert run(*plan).stderr == ""
    seen = iter(range(10**6))

    def stop(self: progress.Lines, event: object) -> None:
        if isinstance(event, UnitDone) and next(seen) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(progress.Lines, "__call__", stop)
        assert run(*plan[:-1]).exit_code == 130
    before = everything(here)
    tiles = json.loads(run(*plan, "--json").stdout)["tile_count"]
    assert run(*plan).stderr == f"an earlier run finished 3 of {tiles} tiles, which would be kept\n"
    assert run(*plan, "--no-resume").stderr == ""
    other = run(*plan, "--transpose-a").stderr
    assert other == (
        "an earlier run left tiles that do not fit this product or its plan; they would be replaced\n"
    )
    assert everything(here) == before
    assert run(*plan[:-1]).exit_code == 0
    there = run(*plan)
    assert there.exit_code == 0
    assert (
        "without --plan-only this would be refused: output: c.zarr exists; choose another path"
        in there.stderr
    )
    assert "--overwrite" in there.stderr
    assert run(*plan, "--overwrite").stderr == ""
    assert run(*plan, "--quiet").stderr == ""


@pytest.mark.parametrize("name", ["", "/", ".", 255 * "x"])
def test_a_plan_is_printed_beside_why_the_name_of_c_is_refused(run: Run, here: Path, name: str) -> None:
    store("a.zarr", np.ones((4, 4)))
    result = run("matmul", "a.zarr", "a.zarr", name, "--plan-only")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("time")
    assert result.stderr.startswith("without --plan-only this would be refused: output: ")


def test_verify_says_whether_a_product_holds(run: Run, rng: np.random.Generator) -> None:
    a = store("a.zarr", rng.integers(0, 9, (20, 20)))
    store("c.zarr", a @ a)
    good = run("verify", "a.zarr", "a.zarr", "c.zarr")
    assert good.exit_code == 0, good.stderr
    assert good.stdout.startswith("verified in 2 rounds")
    bad = run("verify", "a.zarr", "a.zarr", "a.zarr", "--rounds", "3", "--json")
    assert bad.exit_code == 1
    outcome = json.loads(bad.stdout)
    assert outcome["passed"] is False
    assert outcome["rounds"] == 3


def test_matmul_says_which_type_small_integers_were_summed_in(run: Run, rng: np.random.Generator) -> None:
    x = store("x.zarr", rng.integers(0, 3, (4000, 30)).astype("i1"))
    result = run("matmul", "x.zarr", "x.zarr", "g.zarr", "--transpose-a")
    assert result.exit_code == 0, result.stderr
    found = zarr.open_array("g.zarr")[...]
    np.testing.assert_array_equal(found, x.T.astype(int) @ x)
    assert found.dtype == np.int32
    why = (
        "int32: 4000 products of int8 by int8 reach 65536000 at most, and numpy.matmul's int8 holds up to 127"
    )
    assert f"C is {why}" in result.stdout.splitlines()
    assert "0 sums differ modulo 2^32" in result.stdout
    plan = run("plan", "x.zarr", "x.zarr", "--transpose-a")
    assert f"{'dtype of C':<16}{why}" in plan.stdout.splitlines()
    assert plan.stderr == ""
    assert (
        json.loads(run("plan", "x.zarr", "x.zarr", "--transpose-a", "--json").stdout)["c_dtype_reason"] == why
    )
    store("f.zarr", np.ones((4, 4)))
    assert "C is" not in run("matmul", "f.zarr", "f.zarr", "h.zarr").stdout
    assert "dtype of C" not in run("plan", "f.zarr", "f.zarr").stdout


@pytest.mark.parametrize(("command", "more"), [("plan", ()), ("matmul", ("g.zarr", "--plan-only"))])
def test_plans_say_where_sums_could_wrap(run: Run, command: str, more: tuple[str, ...]) -> None:
    store("x.zarr", np.ones((20, 20), "i1"))
    store("y.zarr", np.ones((20, 20), "i8"))
    small, large = (command, "x.zarr", "x.zarr", *more), (command, "y.zarr", "y.zarr", *more)
    assert "wrap" not in run(*small).stderr
    result = run(*small, "--dtype", "int8")
    assert result.exit_code == 0, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("C could wrap modulo 2^8: 20 products of int8 by int8 reach 327680 at most")
    assert "the run looks at the true ranges; --dtype int32" in line
    result = run(*large)
    assert "C could wrap modulo 2^64" in result.stderr
    assert "no integer type is safe" in result.stderr


def test_dot_sums_small_integers_in_a_type_that_holds_them(run: Run, rng: np.random.Generator) -> None:
    x = store("x.zarr", rng.integers(-128, 128, 5000).astype("i1"), (64,))
    exact = int(x.astype(int) @ x)
    result = run("dot", "x.zarr", "x.zarr")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{exact}\n"
    why = "int32: 5000 products of int8 by int8 reach 81920000 at most, and numpy.vdot's int8 holds up to 127"
    assert f"the sum is {why}" in result.stderr.splitlines()
    report = json.loads(run("dot", "x.zarr", "x.zarr", "--json").stdout)
    assert (report["value"], report["dtype"], report["wraps"]) == (exact, "int32", "no")
    assert report["dtype_reason"] == why

    wrapped = run("dot", "x.zarr", "x.zarr", "--dtype", "int8", "--json")
    report = json.loads(wrapped.stdout)
    assert (report["dtype"], report["wraps"]) == ("int8", "possible")
    assert (report["value"] - exact) % 256 == 0
    assert "the sum may have wrapped modulo 2^8" in wrapped.stderr
    wide = json.loads(run("dot", "x.zarr", "x.zarr", "--dtype", "float64", "--json").stdout)
    assert (wide["value"], wide["dtype"], wide["wraps"]) == (exact, "float64", "no")
    refused = run("dot", "x.zarr", "x.zarr", "--dtype", "uint8")
    assert refused.exit_code == 1
    assert "X: x.zarr holds int8, which does not cast to --dtype uint8" in refused.stderr
    assert "leave --dtype out for int32" in refused.stderr


def test_dot_prints_the_product_alone(run: Run, rng: np.random.Generator) -> None:
    x = store("x.zarr", rng.integers(0, 99, 1000), (64,))
    result = run("dot", "x.zarr", "x.zarr")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{x @ x}\n"
    z = store("z.zarr", (rng.random(10) + 1j).astype(np.complex64))
    report = json.loads(run("dot", "z.zarr", "z.zarr", "--json").stdout)
    assert report["value"]["real"] == pytest.approx(np.vdot(z, z).real, rel=1e-5)
    assert report["dtype"] == "complex64"
    assert report["elements"] == 10
    store("nan.zarr", np.array([np.nan]))
    assert json.loads(run("dot", "nan.zarr", "nan.zarr", "--json").stdout)["value"] == "nan"


@pytest.mark.parametrize("by", list(KINDS))
def test_histogram_counts_a_folder(run: Run, here: Path, by: str) -> None:
    (here / "corpus" / "sub").mkdir(parents=True)
    texts = {"corpus/one.txt": "Straße — Zürich".encode(), "corpus/sub/two.txt": b"\xffabc\x00ABC"}
    for name, text in texts.items():
        (here / name).write_bytes(text)
    result = run("histogram", "corpus", "--by", by, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    if by == "codepoint":
        expected = Counter(ord(c) for text in texts.values() for c in text.decode(errors="replace"))
    elif by == "bigram":
        expected = Counter(256 * p + q for t in texts.values() for p, q in itertools.pairwise(t))
    elif by == "letter":
        expected = Counter(v - 65 for t in texts.values() for v in t.upper() if 65 <= v < 91)
    else:
        expected = Counter(v for t in texts.values() for v in t if by == "byte" or v < 128)
    assert {place: n for place, n in enumerate(report["counts"]) if n} == expected
    assert report["documents"] == ["corpus/one.txt", "corpus/sub/two.txt"]
    assert len(report["counts"]) == KINDS[by].bins
    assert report["labels"] is None if KINDS[by].bins > 256 else len(report["labels"]) == KINDS[by].bins


def test_histogram_files_hold_what_was_counted(run: Run, here: Path) -> None:
    (here / "one.txt").write_bytes(b"aab")
    (here / "two.txt").write_bytes(b"Z")
    corpus = ["histogram", "one.txt", "two.txt", "--by", "letter"]
    result = run(*corpus, "--out", "f.csv", "--plot", "f.png", "--bars", "probability")
    assert result.exit_code == 0, result.stderr
    rows = list(csv.DictReader((here / "f.csv").open()))
    assert len(rows) == 26
    assert [rows[i] for i in (0, 1, 25)] == [
        {"bin": "0", "label": "A", "count": "2"},
        {"bin": "1", "label": "B", "count": "1"},
        {"bin": "25", "label": "Z", "count": "1"},
    ]
    assert (here / "f.png").read_bytes().startswith(b"\x89PNG")
    assert run(*corpus, "--per-document", "--out", "f.csv", "--overwrite").exit_code == 0
    assert (
        here / "f.csv"
    ).read_text() == "document,bin,label,count\none.txt,0,A,2\none.txt,1,B,1\ntwo.txt,25,Z,1\n"
    assert run(*corpus, "--per-document", "--out", "f.json").exit_code == 0
    report = json.loads((here / "f.json").read_text())
    assert np.array(report["counts"]).shape == (2, 26)
    for _ in range(2):
        assert run(*corpus, "--per-document", "--out", "f.zarr", "--overwrite").exit_code == 0
    array = zarr.open_array("f.zarr", mode="r")
    assert array.dtype == np.int64
    np.testing.assert_array_equal(array[...], report["counts"])
    assert array.attrs["documents"] == ["one.txt", "two.txt"]
    assert array.attrs["by"] == "letter"
    assert sorted(path.name for path in here.iterdir()) == [
        "f.csv", "f.json", "f.png", "f.zarr", "one.txt", "two.txt"
    ]  # fmt: skip


@pytest.mark.parametrize("per_document", [["--per-document"], []])
def test_a_table_that_the_disk_has_no_room_for_leaves_nothing(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, per_document: list[str]
) -> None:
    monkeypatch.setattr("tilewright.pipeline.text.saved_counts.CHUNK_NBYTES", 1)  # a chunk for each document
    for name in ("one.txt", "two.txt", "three.txt"):
        (here / name).write_bytes(b"text")
    before = everything(here)
    refused = []

    def full(*arguments: object) -> None:
        refused.append(arguments)
        raise OSError(errno.ENOSPC, "No space left on device")

    def put(store: LocalStore, key: str, *arguments: Any, **options: Any) -> Any:
        return full(key) if key.startswith("c/") else put_for_real(store, key, *arguments, **options)

    put_for_real = LocalStore.set
    monkeypatch.setattr(LocalStore, "set", put)
    monkeypatch.setattr("tilewright.pipeline.store.region_write._write_fully", full)
    result = run(
        "histogram", "one.txt", "two.txt", "three.txt", "--by", "letter", "--out", "f.zarr", *per_document
    )
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: cannot write")
    assert "No space left on device" in result.stderr
    assert len(refused) == 1, "nothing is written behind the first failure"
    assert "12 counted" in result.stdout, "what was counted is printed all the same"
    kept = "f.zarr.pieces"
    assert f"what was counted is kept in {kept}; the same command writes it" in result.stderr
    assert {name for name in everything(here) if not name.startswith(kept)} == set(before)
    monkeypatch.undo()
    monkeypatch.chdir(here)
    again = run(
        "histogram", "one.txt", "two.txt", "three.txt", "--by", "letter", "--out", "f.zarr", *per_document
    )
    assert "1 piece of earlier runs is not counted again" in again.stderr
    assert zarr.open_array("f.zarr")[...].sum() == 12
    assert not (here / kept).exists()


@pytest.mark.sample(2)
@pytest.mark.parametrize("option", ["--out", "--plot"])
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_counts_that_cannot_be_saved_are_printed(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, option: str, as_json: list[str]
) -> None:
    (here / "one.txt").write_bytes(b"aab")
    corpus = ["histogram", "one.txt", "--by", "letter", *as_json]
    printed = run(*corpus).stdout

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("tilewright.pipeline.text.saved_counts.os.link", full)
        name = "f.csv" if option == "--out" else "f.png"
        result = run(*corpus, option, name)
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"error: output: cannot write {name}: No space left on device; free room there")
    if as_json:
        assert json.loads(result.stdout)["counts"] == json.loads(printed)["counts"]
    else:
        assert result.stdout.splitlines()[1:] == printed.splitlines()[1:]
    kept = ["f.csv.pieces"] if option == "--out" else []
    assert sorted(path.name for path in here.iterdir()) == [*kept, "one.txt"]
    assert ("the same command writes it" in result.stderr) == bool(kept)


@pytest.mark.sample(2)
@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize("name", ["f.csv", "f.json", "f.zarr", "f.png"])
def test_what_appears_at_an_output_while_it_counts_is_kept_unless_asked(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, name: str, overwrite: list[str]
) -> None:
    (here / "one.txt").write_bytes(b"aab")
    count = histogram.histogram

    def beside_another(*arguments: Any, **options: Any) -> Histogram:
        if name == "f.zarr":
            store(name, np.arange(3))
        else:
            (here / name).write_text("mine")
        before.update(everything(here))
        return count(*arguments, **options)

    before: dict[str, bytes | None] = {}
    monkeypatch.setattr("tilewright.workflows.histogram.histogram", beside_another)
    option = "--plot" if name == "f.png" else "--out"
    result = run("histogram", "one.txt", "--by", "letter", option, name, *overwrite)
    assert "3 counted" in result.stdout, "counting may have taken hours"
    if overwrite:
        assert result.exit_code == 0
        assert before.keys() >= {"one.txt", name}
        assert everything(here) != before
        return
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        f"error: output: {name} exists; choose another path, or ask to overwrite it (--overwrite)"
    )
    assert everything(here) == before


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize("name", ["f.csv", "f.json", "f.zarr", "f.png"])
def test_a_name_that_its_draft_is_too_long_for_is_refused_before_counting(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, name: str, overwrite: list[str]
) -> None:
    def counted(*arguments: object, **options: object) -> None:
        raise AssertionError("it was counted")

    monkeypatch.setattr("tilewright.workflows.histogram.histogram", counted)
    (here / "one.txt").write_bytes(b"aab")
    longest = "x" * (os.pathconf(here, "PC_NAME_MAX") - len(".partial") - len(name) + 1) + name
    before = everything(here)
    for path in (longest, "x" * 20 + longest):
        result = run("histogram", "one.txt", "--plot" if name == "f.png" else "--out", path, *overwrite)
        assert result.exit_code == 1
        assert result.stderr.startswith("error: output: ")
        assert "too long" in result.stderr
        assert "it was counted" not in result.stderr
    assert everything(here) == before


@pytest.mark.parametrize("target", ["table", "folder", "nowhere", "one.txt"])
@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize("name", ["f.csv", "f.json", "f.zarr", "f.png"])
def test_a_link_in_place_of_an_output_is_refused_before_counting(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, name: str, overwrite: list[str], target: str
) -> None:
    def counted(*arguments: object, **options: object) -> None:
        raise AssertionError("it was counted")

    monkeypatch.setattr("tilewright.workflows.histogram.histogram", counted)
    (here / "one.txt").write_bytes(b"aab")
    (here / "table").write_text("mine")
    (here / "folder").mkdir()
    (here / name).symlink_to(target)
    before = everything(here)
    result = run("histogram", "one.txt", "--plot" if name == "f.png" else "--out", name, *overwrite)
    assert result.exit_code == 1
    assert result.stderr == (
        f"error: output: {name} is a link to {target}; name what it leads to, or choose another path\n"
    )
    assert os.readlink(here / name) == target
    assert everything(here) == before


def test_the_longest_name_that_is_accepted_is_written(run: Run, here: Path) -> None:
    (here / "one.txt").write_bytes(b"aab")
    room = os.pathconf(here, "PC_NAME_MAX") - len(f"..{os.getpid()}.partial.csv")
    longest = "x" * room + ".csv"
    for _ in range(2):
        assert run("histogram", "one.txt", "--out", longest, "--overwrite").exit_code == 0
    result = run("histogram", "one.txt", "--out", f"x{longest}", "--overwrite")
    assert f"it needs {len(f'..{os.getpid()}.partial')} bytes more" in result.stderr
    assert sorted(path.name for path in here.iterdir()) == ["one.txt", longest]


# Bad input ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is copied for each test."""
    folder, rng = tmp_path_factory.mktemp("arrays"), np.random.default_rng(20261127)
    with contextlib.chdir(folder):
        store("a.zarr", rng.random((8, 6)))
        store("b.zarr", rng.random((6, 4)))
        store("i.zarr", rng.integers(0, 9, (8, 6)))
        store("cube.zarr", rng.random((2, 2, 2)))
        store("x.zarr", rng.random(5))
        store("y.zarr", rng.random(6))
        store("words.zarr", np.full((6, 4), "word", "U4"))
        store("dates.zarr", np.zeros((6, 4), "M8[s]"))
        zarr.create_group("group.zarr")
    (folder / "file.zarr").write_text("no array")
    (folder / "empty").mkdir()
    (folder / "text.txt").write_text("text")
    (folder / "dangling").mkdir()
    (folder / "dangling" / "link").symlink_to("nowhere")
    (folder / "broken.yaml").write_text("profiles: [")
    return folder


@pytest.fixture
def arrays(here: Path, made_once: Path) -> Path:
    return Path(shutil.copytree(made_once, here, symlinks=True, dirs_exist_ok=True))


BAD = [
    (["matmul", "none.zarr", "b.zarr", "c.zarr"], ["A: there is no Zarr array at none.zarr"]),
    (["matmul", "a.zarr", "none.zarr", "c.zarr"], ["B: there is no Zarr array at none.zarr"]),
    (["matmul", "a.zarr", "group.zarr", "c.zarr"], ["B: ", "group.zarr"]),
    (["matmul", "file.zarr", "b.zarr", "c.zarr"], ["A: ", "file.zarr"]),
    (["matmul", "a.zarr", "cube.zarr", "c.zarr"], ["(2, 2, 2)", "2 dimensions"]),
    (["matmul", "a.zarr", "a.zarr", "c.zarr"], ["6 columns", "8 rows", "transposing A"]),
    (["matmul", "a.zarr", "words.zarr", "c.zarr"], ["words.zarr holds <U4", "only bool, integers, floats"]),
    (["matmul", "a.zarr", "dates.zarr", "c.zarr"], ["dates.zarr holds datetime64[s]"]),
    (["matmul", "a.zarr", "b.zarr", "x.zarr"], ["x.zarr exists", "overwrite"]),
    (["matmul", "a.zarr", "b.zarr", "text.txt"], ["text.txt exists"]),
    (["matmul", "a.zarr", "b.zarr", "a.zarr", "--overwrite"], ["a.zarr is also A"]),
    (["matmul", "a.zarr", "b.zarr", "c.zarr", "--profile", "moon"], ["'moon'", "cpu, cuda, existing, local"]),
    (["matmul", "a.zarr", "b.zarr", "c.zarr", "--profile", "existing"], ["address", "scheduler_file"]),
    (["matmul", "a.zarr", "b.zarr", "c.zarr", "--cluster-file", "none.yaml"], ["none.yaml"]),
    (["matmul", "a.zarr", "b.zarr", "c.zarr", "--cluster-file", "broken.yaml"], ["broken.yaml", "YAML"]),
    (["matmul", "a.zarr", "b.zarr", "c.zarr", "--device-memory", "9"], ["9 B", "needs "]),
    (["matmul", "a.zarr", "b.zarr", "c.zarr", "--dtype", "float16", "--precision", "tf32"], ["tf32"]),
    (
        ["matmul", "a.zarr", "b.zarr", "c.zarr", "--dtype", "int64"],
        ["A: a.zarr holds float64, which does not cast to --dtype int64", "or convert it first"],
    ),
    (
        ["matmul", "i.zarr", "b.zarr", "c.zarr", "--dtype", "int64"],
        ["B: b.zarr holds float64, which does not cast"],
    ),
    (["matmul", "a.zarr", "b.zarr", "c.zarr", "--dtype", "word"], ["--dtype word is not an element type"]),
    (["plan", "a.zarr", "a.zarr"], ["6 columns", "8 rows"]),
    (["verify", "a.zarr", "b.zarr", "a.zarr"], ["8 × 6", "8 × 4"]),
    (["verify", "a.zarr", "b.zarr", "none.zarr"], ["C: there is no Zarr array at none.zarr"]),
    (["dot", "x.zarr", "y.zarr"], ["x.zarr has 5 elements", "y.zarr has 6"]),
    (["dot", "x.zarr", "a.zarr"], ["Y: ", "(8, 6)", "1 dimension"]),
    (["histogram", "nowhere"], ["cannot find nowhere"]),
    (["histogram", "empty"], ["no files in empty"]),
    (["histogram", "dangling/link"], ["cannot find dangling/link"]),
    (["histogram", "text.txt", "--profile", "moon"], ["'moon'"]),
    (
        ["histogram", "text.txt", "--out", "file.zarr"],
        ["file.zarr exists, and is nothing that would be replaced"],
    ),
    (["histogram", "text.txt", "--out", "none/f.csv"], ["there is no folder none"]),
    (["histogram", "text.txt", "--out", "file.zarr", "--overwrite"], ["file.zarr", "not a Zarr array"]),
    (["matmul", "a.zarr", "b.zarr", "empty", "--overwrite"], ["empty", "not a Zarr array"]),
    (["cov", "a.zarr", "c.zarr", "--rows", "5:5"], ["X (a.zarr", "has 0 rows; at least 2", "--divide)"]),
    (["corr", "a.zarr", "c.zarr", "--rows", "5:6"], ["has 1 row; at least 2 are needed\n"]),
    (["eofs", "a.zarr", "c.zarr", "--rows", "5:5"], ["has 0 rows; at least 2 are needed\n"]),
]


@pytest.mark.parametrize("place", [".", "/dev/null", "group.zarr", "text.txt", "x.zarr"])
def test_overwriting_is_named_where_it_would_help(run: Run, arrays: Path, place: str) -> None:
    product = ["matmul", "a.zarr", "b.zarr", place]
    refused = run(*product)
    assert refused.exit_code == 1
    assert f"output: {place} {'ends in no name' if place == '.' else 'exists'}" in refused.stderr
    assert ("--overwrite" in refused.stderr) == (place == "x.zarr")
    (arrays / "f.csv").write_text("mine")
    (arrays / "folder.csv").mkdir()
    for name, helps in {"f.csv": True, "folder.csv": False}.items():
        refused = run("histogram", "text.txt", "--out", name)
        assert refused.exit_code == 1
        assert ("--overwrite" in refused.stderr) == helps


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input_is_one_line_and_leaves_nothing(
    run: Run, arrays: Path, arguments: list[str], said: list[str]
) -> None:
    before = everything(arrays)
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[-1].startswith("error: ")
    assert "not foreseen" not in lines[-1]
    assert not any(line.startswith(("error", "Traceback", " ")) for line in lines[:-1])
    for part in said:
        assert part in f"{lines[-1]}\n"
    assert everything(arrays) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["matmul", "a.zarr"],
        ["matmul", "a.zarr", "b.zarr", "c.zarr", "--device", "tpu"],
        ["matmul", "a.zarr", "b.zarr", "c.zarr", "--precision", "half"],
        ["histogram"],
        ["histogram", "text.txt", "--by", "sentence"],
        ["verify", "a.zarr", "b.zarr", "c.zarr", "--rounds", "0"],
        ["plan", "a.zarr", "b.zarr", "--workers", "0"],
        ["nonsense"],
        ["bench", "nonsense"],
        ["bench", "gemm", "--seconds", "-1"],
        ["bench", "gemm", "--plot", "f.pdf"],
        ["bench", "io", "--plot", "none/f.png"],
        ["bench", "e2e", "--n", "0"],
        ["bench", "e2e", "--chunk", "0"],
        ["bench", "e2e", "--workers", "0"],
        ["bench", "e2e", "--repeats", "0"],
        ["bench", "e2e", "--dtype", "potato"],
        ["bench", "e2e", "--dtype", "complex64"],
        ["bench", "e2e", "--timeline", "f.pdf"],
        ["bench", "dot", "--dtype", "U4"],
        ["bench", "dot", "--nbytes", "3"],
        ["bench", "histogram", "--nbytes", "0"],
        ["bench", "histogram", "--nbytes", "8 potatoes"],
        ["bench", "corpus", "--repeats", "0"],
        ["--nonsense"],
        ["histogram", "corpus", "--bars", "percent"],
    ],
    ids=" ".join,
)
def test_a_usage_error_is_told_from_a_failure(run: Run, arrays: Path, arguments: list[str]) -> None:
    before = everything(arrays)
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage: " in result.stderr
    assert everything(arrays) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["matmul", "a.zarr", "b.zarr", "c.zarr"],
        ["plan", "a.zarr", "b.zarr"],
        ["verify", "a.zarr", "b.zarr", "b.zarr"],
        ["histogram", "text.txt"],
        ["dot", "x.zarr", "x.zarr"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_misspelt_setting_is_told_by_every_command(run: Run, arrays: Path, arguments: list[str]) -> None:
    with dask.config.set({"tilewright.retrys": 5}):
        result = run(*arguments)
    assert result.exit_code == 1
    assert "tilewright.retrys: there is no such setting; did you mean tilewright.retries?" in result.stderr


def test_the_memory_that_an_error_asks_for_is_enough(run: Run, arrays: Path) -> None:
    command = ["matmul", "a.zarr", "b.zarr", "c.zarr", "--device-memory"]
    told = re.search(r"needs (\d+) B", run(*command, "9").stderr)
    assert told is not None
    needed = int(told.group(1))
    assert run(*command, str(needed - 1)).exit_code == 1
    assert run(*command, str(needed)).exit_code == 0


def test_a_chunk_that_cannot_be_read_fails_the_product(run: Run, arrays: Path) -> None:
    (chunk,) = (path for path in (arrays / "a.zarr").rglob("0") if path.is_file())
    chunk.write_bytes(b"damaged")
    before = everything(arrays)
    result = run("matmul", "a.zarr", "b.zarr", "c.zarr")
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert "a.zarr" in last
    assert not (arrays / "c.zarr").exists()
    assert {name: data for name, data in everything(arrays).items() if "c.zarr.partial" not in name} == before


def test_a_bug_is_one_line_too_unless_asked_for(
    run: Run, arrays: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("two\n  lines,  and  blanks\n")

    monkeypatch.setattr("tilewright.workflows.dot.timed_dot", broken)
    result = run("dot", "x.zarr", "x.zarr")
    assert result.exit_code == 1
    assert (
        result.stderr
        == "error: ZeroDivisionError: two lines,  and  blanks (not foreseen; --debug shows where)\n"
    )
    assert isinstance(run("dot", "x.zarr", "x.zarr", "--debug").exception, ZeroDivisionError)


# The commands as they are installed ---------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "command", [["tilewright"], ["dask", "tilewright"], ["python", "-m", "tilewright"]], ids=" ".join
)
@pytest.mark.parametrize("misused", [False, True])
def test_all_entry_points_fail_alike(here: Path, command: list[str], misused: bool) -> None:
    words = [tool(command[0]), *command[1:], "histogram", *([] if misused else ["nowhere"])]
    failed = subprocess.run(words, capture_output=True, text=True, cwd=here)
    assert failed.stdout == ""
    if misused:
        assert failed.returncode == 2
        return
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: cannot find nowhere")
    assert failed.stderr.count("\n") == 1


@pytest.mark.more
def test_a_profile_of_processes_prints_nothing_but_the_result(here: Path, rng: np.random.Generator) -> None:
    """Worker processes and their shutdown are where the libraries would talk, and of one as of several."""
    a = store("a.zarr", rng.random((300, 200)), (100, 100))
    (here / "cluster.yaml").write_text("profiles: {one: {kind: cpu, n_workers: 1}}")
    command = [
        tool("tilewright"),
        "matmul",
        "a.zarr",
        "a.zarr",
        "c.zarr",
        "--transpose-b",
        "--profile",
        "one",
    ]
    result = subprocess.run([*command, "--json"], capture_output=True, text=True, cwd=here)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["verification"]["passed"] is True
    (line,) = result.stderr.splitlines()
    assert line.startswith("multiplying on CPU with")
    np.testing.assert_allclose(zarr.open_array(str(here / "c.zarr"))[...], a @ a.T)


@pytest.mark.more
def test_cuda_without_a_gpu_is_an_error(here: Path, rng: np.random.Generator) -> None:
    store("a.zarr", rng.random((8, 8)))
    script = (
        "import json\nfrom click.testing import CliRunner\nfrom tilewright.workflows.cli import cli\n"
        "for options in (['--device', 'cuda'], ['--profile', 'cuda']):\n"
        "    done = CliRunner().invoke(cli, ['matmul', 'a.zarr', 'a.zarr', 'c.zarr', *options])\n"
        "    print(json.dumps([done.exit_code, done.stdout, done.stderr]))\n"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=here, env=environment
    )
    outcomes = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(outcomes) == 2, result.stderr
    for status, out, error in outcomes:
        assert (status, out) == (1, "")
        assert "GPU" in error
        assert error.count("\n") == 1
    assert [path.name for path in here.iterdir()] == ["a.zarr"]


def test_devices_without_a_gpu_says_so_in_a_sentence(here: Path) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    words = [tool("tilewright"), "devices"]
    text = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert text.returncode == 0
    assert text.stdout.startswith("No GPU: ")
    report = json.loads(
        subprocess.run([*words, "--json"], capture_output=True, text=True, env=environment).stdout
    )
    assert report["devices"] == []
    assert report["why_none"] == text.stdout.strip()


def test_settings_shows_what_each_stands_at(here: Path) -> None:
    words = [tool("tilewright"), "settings"]
    environment = os.environ | {"DASK_TILEWRIGHT__TILES": "8", "DASK_TILEWRIGHT__SHARE_PANELS": "false"}
    text = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert text.returncode == 0, text.stderr
    heads = [line for line in text.stdout.splitlines() if not line.startswith(" ")]
    assert [line.partition(" = ")[0] for line in heads] == [setting.name for setting in config.SETTINGS]
    assert "tilewright.tiles = 8 (default: 16)" in heads
    assert "tilewright.share-panels = false (default: true)" in heads
    assert "tilewright.device-memory = unset" in heads
    report = json.loads(
        subprocess.run([*words, "--json"], capture_output=True, text=True, env=environment).stdout
    )
    values = {entry["name"]: (entry["value"], entry["default"]) for entry in report["settings"]}
    assert values["tilewright.tiles"] == (8, 16)
    assert values["tilewright.retries"] == (3, 3)


def test_settings_refuses_one_that_is_not_valid(here: Path) -> None:
    done = subprocess.run(
        [tool("tilewright"), "settings"],
        capture_output=True,
        text=True,
        env=os.environ | {"DASK_TILEWRIGHT__TILES": "0"},
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "error: tilewright.tiles (DASK_TILEWRIGHT__TILES): 0 is not a number of tiles"
    )


@pytest.mark.parametrize(
    ("arguments", "allowed"), [(["--help"], []), (["histogram", "--help"], ["numpy"])], ids=str
)
def test_help_is_quick_because_little_is_imported(arguments: list[str], allowed: list[str]) -> None:
    heavy = {"numba", "dask", "zarr", "matplotlib", "numpy", "rich"} - set(allowed)
    script = (
        "import sys\nfrom click.testing import CliRunner\nfrom tilewright.workflows.cli import cli\n"
        f"result = CliRunner().invoke(cli, {arguments})\nassert result.exit_code == 0\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr


@pytest.mark.more
def test_the_cpu_imports_no_cuda_and_no_display_without_a_terminal(here: Path) -> None:
    store("a.zarr", np.arange(30).reshape(5, 6))
    store("x.zarr", np.arange(30.0))
    (here / "text").write_bytes(b"abc")
    commands = [
        ["matmul", "a.zarr", "a.zarr", "c.zarr", "--transpose-b"],
        ["dot", "x.zarr", "x.zarr"],
        ["histogram", "text"],
    ]
    script = (
        "import sys\nfrom click.testing import CliRunner\nfrom tilewright.workflows.cli import cli\n"
        f"for command in {commands}:\n"
        "    result = CliRunner().invoke(cli, [*command, '--device', 'cpu'])\n"
        "    assert result.exit_code == 0, result.output\n"
        "print([name for name in sys.modules if name.startswith(('numba.cuda', 'cuda.', 'rich'))])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=here)
    assert result.stdout == "[]\n", result.stderr


@pytest.mark.slow
def test_floating_point_on_the_cpu_is_multiplied_without_numba(here: Path) -> None:
    store("a.zarr", np.arange(30.0).reshape(5, 6))
    script = (
        "import sys\nimport tilewright\n"
        "from tilewright.pipeline.product import job\nfrom tilewright.workflows import matmul\n"
        "product = lambda out, **how: matmul.matmul('a.zarr', 'a.zarr', out, transpose_b=True, device='cpu', **how)\n"
        "job.SMALL_PRODUCTS = 0\n"
        "product('c.zarr', verify=False)\nprint('numba' in sys.modules)\n"
        "assert product('d.zarr').verification.passed\nprint('numba' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=here)
    assert result.stdout == "False\nFalse\n", result.stderr


@pytest.mark.parametrize("name", sorted(cli.cli.commands))
def test_every_command_explains_itself(run: Run, name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: ")


def test_choices_are_those_of_the_layers_below() -> None:
    (by,) = (option for option in cli.histogram.params if option.name == "by")
    context = click.Context(cli.histogram)
    for kind in (*KINDS, "word", "line", "ngram:3", "ngram:2:byte"):
        assert by.type.convert(kind, by, context) == kind
    assert all(kind in by.type.get_metavar(by, context) for kind in (*KINDS, "word", "line", "ngram:N"))
    assert cli.METHODS == spectral_options.METHODS
    assert set(console.BARS) == set(plots.BARS)
    assert console.MAPS == plots.MAPS
    assert console.PLOT_ENDINGS == saved_counts.PLOT_ENDINGS
    assert set(texts.OUT_ENDINGS) == set(saved_counts.WRITERS)
    assert cli.MOST_ROUNDS == config.MOST_ROUNDS
    of_gram = (gram_options.SIDES, gram_options.MISSING_AS, gram_options.CONSTANTS)
    assert of_gram == (console.SIDES, options.MISSING_AS, options.CONSTANTS)


# What the process was started with ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_an_output_without_bytes_for_a_character_gets_another(here: Path, encoding: str) -> None:
    name = b"no UTF-8 \xff.txt"
    (here / os.fsdecode(name)).write_bytes(b"aab")
    script = (
        "import sys; from tilewright.workflows.console import print_result\n"
        "from tilewright.workflows.histogram import histogram\n"
        "class Named(str):\n"
        "    def to_json(self): return {}\n"
        "print_result(Named(str(histogram('.', by='letter')) + sys.argv[1]), as_json=False)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, name],
        env=os.environ | {"PYTHONIOENCODING": f"{encoding}:strict"},
        capture_output=True,
        cwd=here,
    )
    assert done.returncode == 0, done.stderr
    assert b"A  2" in done.stdout


RESULTS = pytest.mark.parametrize(
    "arguments",
    [
        ["devices"],
        ["histogram", "one.txt", "--quiet"],
        ["devices", "--json"],
        ["--help"],
        ["plan", "--help"],
        ["bench", "gemm", "--size", "8", "--dtype", "float32", "--device", "cpu", "--quiet"],
        ["bench", "corpus", "--nbytes", "9", "--storage", "plain", "--repeats", "1", "--no-peer"],
    ],
    ids=" ".join,
)


@pytest.mark.sample(1)
@RESULTS
def test_a_result_that_cannot_be_written_is_told_of(here: Path, arguments: list[str]) -> None:
    (here / "one.txt").write_bytes(b"aab")
    with open("/dev/full", "w") as full:
        done = subprocess.run([tool("tilewright"), *arguments], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == b"error: cannot write the result to standard output: No space left on device\n"


@pytest.mark.sample(3)
@RESULTS
def test_a_result_for_a_standard_output_that_is_closed_is_told_of(here: Path, arguments: list[str]) -> None:
    """Python has none then, and whatever prints to it says nothing."""
    (here / "one.txt").write_bytes(b"aab")
    command = ["sh", "-c", '"$@" >&-', "sh", tool("tilewright"), *arguments]
    done = subprocess.run(command, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == b"error: cannot write the result to standard output: it is closed\n"


@pytest.mark.slow
def test_a_plot_where_there_is_no_home_is_drawn_without_a_word(here: Path) -> None:
    """matplotlib tells where it keeps its list of fonts instead."""
    (here / "one.txt").write_bytes(b"aab")
    command = [tool("tilewright"), "histogram", "one.txt", "--quiet", "--plot", "plot.png"]
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    environment["HOME"] = "/dev/null/none"
    done = subprocess.run(command, capture_output=True, text=True, cwd=here, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert (here / "plot.png").is_file()


@pytest.mark.slow
def test_what_keeps_worker_processes_from_starting_is_one_line(here: Path) -> None:
    (here / "one.txt").write_bytes(b"aab")
    (here / "cluster.yaml").write_text("profiles: {bad: {kind: cpu, n_workers: 1, preload: nosuchmodule_x}}")
    command = [tool("tilewright"), "histogram", "one.txt", "--profile", "bad"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=here)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: profile 'bad' of cluster.yaml: its worker processes did not start (Nanny failed to start."
        " ModuleNotFoundError: No module named 'nosuchmodule_x')\n"
    )


@pytest.mark.parametrize("more", [[], ["--device-memory", "8GiB"]])
def test_a_configuration_of_dask_that_cannot_be_read_is_told_of(more: list[str], here: Path) -> None:
    (here / "dask.yaml").write_text("tilewright: [\n")
    environment = os.environ | {"DASK_CONFIG": str(here)}
    done = subprocess.run(
        [tool("tilewright"), "plan", "a", "b", *more], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert str(here / "dask.yaml") in line


@pytest.mark.parametrize("out", ["one.csv", "texts/two.csv", "texts/../texts/two.csv", "texts/c.zarr"])
def test_an_output_that_is_a_document_is_refused(out: str, run: Run, here: Path) -> None:
    (here / "texts").mkdir()
    for name in ("one.csv", "texts/two.csv"):
        (here / name).write_text("abc")
    store("texts/c.zarr", np.ones(3))
    before = everything(here)
    result = run("histogram", "one.csv", "texts", "--out", out, "--overwrite")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: output: {out} is there")
    assert "belongs to the corpus" in result.stderr
    assert everything(here) == before
    assert run("histogram", "one.csv", "--out", "texts/two.csv", "--overwrite").exit_code == 0


@pytest.mark.parametrize("out", ["one.csv", "c.zarr"])
def test_an_output_that_a_link_in_the_corpus_leads_to_is_refused(out: str, run: Run, here: Path) -> None:
    store("c.zarr", np.ones(3))
    (here / "one.csv").write_text("abc")
    (here / "texts").mkdir()
    (here / "texts" / "link").symlink_to(here / ("c.zarr/zarr.json" if out == "c.zarr" else out))
    before = everything(here)
    result = run("histogram", "texts", "--out", out, "--overwrite")
    assert result.exit_code == 1
    assert f"output: {out} is there and belongs to the corpus, texts/link, so" in result.stderr
    assert everything(here) == before


@pytest.mark.parametrize("name", ["e2e", "io", "corpus"])
def test_a_benchmarks_folder_is_looked_at_first(
    name: str, run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = run("bench", name, "--folder", "none")
    assert missing.exit_code == 2
    assert "'none' does not exist" in missing.stderr
    (here / "closed").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    closed = run("bench", name, "--folder", "closed")
    assert closed.exit_code == 2
    assert "'closed' is not writable" in closed.stderr


PRODUCT = ["matmul", "a.zarr", "b.zarr", "c.zarr"]


@pytest.mark.parametrize(
    ("arguments", "option", "said"),
    [
        (
            [*PRODUCT, "--device-memory", "lots"],
            "--device-memory",
            "'lots' is no size in bytes; write a number, or say",
        ),
        ([*PRODUCT, "--device-memory", "1e400"], "--device-memory", "'1e400' is no size in bytes"),
        (
            [*PRODUCT, "--device-memory", "1.5"],
            "--device-memory",
            "'1.5' is no whole number of bytes; with a unit, say 1.5GiB",
        ),
        ([*PRODUCT, "--device-memory", "0"], "--device-memory", "'0' is less than one byte"),
        (
            ["plan", "a.zarr", "b.zarr", "--host-memory", "10XB"],
            "--host-memory",
            "'10XB' is no size in bytes",
        ),
        (["bench", "e2e", "--device-memory", "10XB"], "--device-memory", "'10XB' is no size in bytes"),
        (
            ["verify", "a.zarr", "b.zarr", "b.zarr", "--rounds", "65"],
            "--rounds",
            "65 is not in the range 1<=x<=64",
        ),
        (
            ["histogram", "text.txt", "--out", "a.feather"],
            "--out",
            "ends in '.feather'; the ending says the format and is .csv or .json or .npz or .parquet or .zarr",
        ),
        (["histogram", "text.txt", "--out", "text"], "--out", "'text' has no ending"),
        (
            ["histogram", "text.txt", "--plot", "f.csv"],
            "--plot",
            "ends in '.csv'; the ending says the format and is .png or .svg or .pdf",
        ),
    ],
)
def test_an_option_of_a_wrong_value_is_named_in_a_usage_error(
    arguments: list[str], option: str, said: str, run: Run, arrays: Path
) -> None:
    before = everything(arrays)
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: ")
    line = result.stderr.splitlines()[-1]
    assert line.startswith(f"Error: Invalid value for '{option}': ")
    assert said in line
    assert "tilewright." not in line
    assert everything(arrays) == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gemm", "--size", "8", "--seconds", "nan"], "'nan' is no number of seconds"),
        (["dot", "--nbytes", "16", "--seconds", "inf"], "'inf' is no number of seconds"),
        (["corpus", "--nbytes", "1.5B"], "'--nbytes': '1.5B' is no whole number of bytes"),
        (["corpus", "--peer-nbytes", "0"], "'--peer-nbytes': '0' is less than one byte"),
        (["e2e", "--plot", "p.png", "--timeline", "../here/p.png"], "name the same file"),
    ],
)
def test_a_benchmark_refuses_what_it_cannot_measure_before_it_begins(
    arguments: list[str], says: str, run: Run, here: Path
) -> None:
    arguments = [argument.replace("here", here.name) for argument in arguments]
    result = run("bench", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
    assert not list(here.iterdir())


@pytest.mark.slow
def test_python_m_is_the_command(here: Path) -> None:
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tilewright", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    assert call("--version").stdout == "tilewright, version 0.1.0\n"
    failed = call("plan", "none.zarr", "none.zarr")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("error: A: there is no Zarr array at none.zarr")
    assert "Usage: tilewright plan" in call("plan").stderr


def test_ctrl_c_before_the_command_has_begun_is_an_interrupt(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> Any:
        raise KeyboardInterrupt

    for place in ("get_command", "parse_args"):
        with monkeypatch.context() as patch:
            patch.setattr(cli.Group, place, interrupt)
            result = run("plan", "a.zarr", "a.zarr")
        assert result.exit_code == 130
        assert result.stderr == "interrupted: nothing was written\n"


def test_an_interrupted_demo_names_its_folder(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("tilewright.workflows.demo.demo", interrupt)
    result = run("demo", "--output", "there")
    assert result.exit_code == 130
    assert result.stderr == "interrupted: what was finished is in there; the next run replaces it\n"


@pytest.mark.slow
def test_libraries_with_levels_of_their_own_are_silent_too() -> None:
    script = (
        "import logging; from tilewright.workflows.console import silence_libraries; silence_libraries()\n"
        "import distributed\n"
        "print([logging.getLogger(f'{name}').isEnabledFor(logging.ERROR) for name in"
        " ('distributed', 'distributed.client', 'distributed.worker', 'tornado.application')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == f"{[False] * 4}\n", done.stderr


def test_bad_rounds_are_told_before_the_product_is_computed(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    store("a.zarr", rng.random((4, 4)))
    before = everything(here)
    for value in (65, "x"):
        with dask.config.set({"tilewright.verify-rounds": value}):
            result = run("matmul", "a.zarr", "a.zarr", "c.zarr")
        assert result.exit_code == 1
        assert "rounds" in result.stderr
        assert everything(here) == before


@pytest.mark.parametrize("arguments", [["--out", "f.csv"], ["--out", "f.zarr"], ["--plot", "f.png"]])
@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_an_output_in_a_working_directory_that_was_removed_is_refused(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], overwrite: list[str]
) -> None:
    (here / "one.txt").write_bytes(b"aab")
    (here / "gone").mkdir()
    monkeypatch.chdir(here / "gone")
    (here / "gone").rmdir()
    result = run("histogram", str(here / "one.txt"), *arguments, *overwrite)
    assert result.exit_code == 1
    assert result.stderr == (
        f"error: output: {arguments[1]} would stand in the working directory, which is not there any more; choose a"
        " path from the root, or change to another directory\n"
    )


@pytest.mark.parametrize("more", [[], ["--overwrite"], ["--plan-only"]])
def test_a_product_in_a_working_directory_that_was_removed_is_refused(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    store("a.zarr", np.ones((4, 4)))
    (here / "gone").mkdir()
    monkeypatch.chdir(here / "gone")
    (here / "gone").rmdir()
    a = str(here / "a.zarr")
    result = run("matmul", a, a, "c.zarr", *more)
    assert result.exit_code == 1
    assert (
        "output: c.zarr would stand in the working directory, which is not there any more;" in result.stderr
    )
    assert result.stderr.count("\n") == 1 + ("--plan-only" in more)
    elsewhere = run("matmul", a, a, str(here / "c.zarr"), *more)
    assert elsewhere.exit_code == 1
    assert re.fullmatch(
        "error: .* its workers cannot start in the working directory, .*; change to another .*\n",
        elsewhere.stderr,
    )
    assert sorted(path.name for path in here.iterdir()) == ["a.zarr"]


def test_a_corpus_named_from_a_removed_working_directory_is_refused(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "one.txt").write_bytes(b"aab")
    (here / "gone").mkdir()
    monkeypatch.chdir(here / "gone")
    (here / "gone").rmdir()
    result = run("histogram", "../one.txt")
    assert result.exit_code == 1
    assert result.stderr == (
        "error: ../one.txt is named from the working directory, which is not there any more; name it from the root, or"
        " change to another directory\n"
    )


def test_white_space_of_names_stays_in_messages(run: Run, here: Path) -> None:
    for name in ("weird/  lead.txt", " two  blanks"):
        assert f"cannot find {name}" in run("histogram", name).stderr
    assert "--rules 'my  rules'" in run("signals", "x", "--rules", "my  rules").stderr


def test_a_folder_that_cannot_be_written_to_is_told_before_counting(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "one.txt").write_bytes(b"aab")
    monkeypatch.setattr(
        os, "access", lambda path, mode: False
    )  # root may write to any folder but a read-only disk's
    result = run("histogram", "one.txt", "--out", "f.csv")
    assert result.exit_code == 1
    assert result.stderr == "error: output: the folder . is read-only; choose another path\n"


@pytest.mark.parametrize(
    "command",
    [
        ["matmul", "a.zarr", "b.zarr", "c.zarr"],
        ["gram", "a.zarr", "none/c.zarr"],
        ["eofs", "a.zarr", "c.zarr", "-k", "2"],
        ["topk", "a.zarr", "a.zarr", "c.zarr", "-k", "2"],
        ["matmul", "a.zarr", "b.zarr", "x.zarr", "--overwrite"],
        ["matmul", "a.zarr", "b.zarr", "c.zarr", "--report", "c.html"],
    ],
    ids=" ".join,
)
def test_a_folder_that_cannot_be_written_to_is_told_before_multiplying(
    run: Run, arrays: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    before, access = everything(arrays), os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))
    result = run(*command)
    assert result.exit_code == 1
    what = "--report" if "--report" in command else "output"
    assert result.stderr == f"error: {what}: the folder . is read-only; choose another path\n"
    assert everything(arrays) == before


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_what_may_not_be_opened_is_told_with_what_to_do(
    run: Run, arrays: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As in folders that change while a run begins, or whose permissions `os.access` does not know."""

    def refuse(path: Any, *arguments: Any, **options: Any) -> NoReturn:
        raise OSError(number, os.strerror(number), os.fspath(path))

    remedy = "give this process that permission, or choose another path"
    with monkeypatch.context() as closed:
        closed.setattr(Path, "mkdir", refuse)
        for command in (["matmul", "a.zarr", "b.zarr", "c.zarr"], ["eofs", "a.zarr", "c.zarr", "-k", "2"]):
            result = run(*command)
            assert result.exit_code == 1
            assert re.search(rf"error: .* cannot (create c\.zarr|be used): .*; {remedy}", result.stderr)
        result = run("demo", "--output", "place")
        assert result.stderr == (
            f"error: --output: cannot create the folder place: {os.strerror(number)}; {remedy}\n"
        )
    with monkeypatch.context() as closed:
        closed.setattr(os, "replace", lambda draft, path: refuse(path))
        result = run("histogram", "text.txt", "--out", "f.csv", "--overwrite")
        assert f"output: cannot write f.csv: {os.strerror(number)}; {remedy}\n" in result.stderr


NEVER_FOR_SHORT_WORK = (
    "distributed",
    "tornado",
    "numba",
    "llvmlite",
    "pandas",
    "xarray",
    "matplotlib",
    "rich",
    "cupy",
    "numpy.ma",
)
"""What each takes longer to import than a small product takes to compute."""


def test_short_commands_on_the_cpu_import_neither_distributed_nor_numba(here: Path) -> None:
    """One after the other in one process, which the last ends as it ends the process of a command."""
    store("a.zarr", np.arange(36, dtype=np.float32).reshape(6, 6))
    commands = [
        ["--help"],
        ["plan", "a.zarr", "a.zarr"],
        ["gram", "a.zarr", "gram.zarr"],
        ["matmul", "a.zarr", "a.zarr", "unverified.zarr", "--no-verify"],
    ]
    script = (
        "import atexit, sys\nfrom click.testing import CliRunner\nfrom tilewright.workflows.cli import cli, main\n"
        f"imported = lambda: [name for name in {NEVER_FOR_SHORT_WORK} if name in sys.modules]\n"
        "atexit.register(lambda: print(imported(), file=sys.stderr))\n"
        f"for command in {commands}:\n"
        "    result = CliRunner().invoke(cli, command)\n"
        "    assert result.exit_code == 0, result.output\n"
        "    assert not imported(), (command, imported())\n"
        "main('tilewright', ['matmul', 'a.zarr', 'a.zarr', 'verified.zarr'])\n"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[-1] == "[]"
    a = np.arange(36, dtype=np.float64).reshape(6, 6)
    for name, expected in (("gram", a.T @ a), ("unverified", a @ a), ("verified", a @ a)):
        found = zarr.open_array(f"{name}.zarr", mode="r")[:]
        np.testing.assert_array_equal(found, expected.astype(np.float32))


def test_text_on_the_cpu_is_counted_without_what_matrices_are_stored_by(here: Path) -> None:
    (here / "text").write_bytes(b"abc")
    script = (
        "import sys\nfrom click.testing import CliRunner\nfrom tilewright.workflows.cli import cli\n"
        "for kind in ('byte', 'codepoint', 'word'):\n"
        "    result = CliRunner().invoke(cli, ['histogram', 'text', '--by', kind, '--state', kind])\n"
        "    assert result.exit_code == 0, result.output\n"
        "print([name for name in ('zarr', 'numcodecs', 'fsspec', 'distributed', 'pandas') if name in sys.modules])"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert result.stdout == "[]\n", result.stderr


@pytest.mark.parametrize(
    ("words", "status"),
    [(["--version"], 0), (["no-such-command"], 2), (["plan", "a", "b"], 1)],
)
def test_the_process_of_a_command_ends_by_its_status_with_all_that_it_printed(
    here: Path, words: list[str], status: int
) -> None:
    """Nobody takes Python apart: what was printed through a pipe, whose buffer is flushed late, is there all the same,
    and what libraries have registered for the end is called."""
    result = subprocess.run([sys.executable, "-m", "tilewright", *words], capture_output=True, text=True)
    assert result.returncode == status
    assert (result.stdout if not status else result.stderr).endswith("\n")


def test_a_process_that_is_more_than_the_command_ends_by_itself(here: Path) -> None:
    script = (
        "import atexit, sys\natexit.register(lambda: print('the end'))\n"
        "from tilewright.workflows.cli import main\n"
        "try:\n    main('tilewright', ['--version'])\nexcept SystemExit:\n    pass\nsys.exit(7)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 7
    assert result.stdout.endswith("the end\n")


def test_a_plan_of_too_little_host_memory_names_that_option(run: Run, arrays: Path) -> None:
    refused = run("plan", "a.zarr", "b.zarr", "--device", "cpu", "--host-memory", "1KiB")
    assert refused.exit_code == 1
    assert "--host-memory" in refused.stderr


def test_an_unreachable_server_is_not_taken_for_s3(run: Run, arrays: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    refused = run("matmul", f"http://127.0.0.1:{port}/a.zarr", "b.zarr", "c.zarr")
    assert refused.exit_code == 1
    assert "the network is up, and that the URL is right" in refused.stderr
