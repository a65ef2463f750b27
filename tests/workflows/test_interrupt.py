"""Ctrl-C and SIGTERM: exit status, a word on what was kept, nothing half-written, and the same command going on."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import zarr
from click.testing import CliRunner, Result
from distributed import Client

from tilewright.pipeline.cluster import local as local_cluster
from tilewright.pipeline.cluster.cluster import open_cluster
from tilewright.pipeline.events import Event, UnitDone
from tilewright.pipeline.product.output import Output, replaced_path
from tilewright.workflows.bench.e2e import cluster_of
from tilewright.workflows.cli import cli
from tilewright.workflows.commands import texts
from tilewright.workflows.console import Interrupted, Outputs, Terminated, Termination, interruptible

SCRIPT = Path(__file__).with_name("interrupted.py")
STOP_AFTER = 3


def interrupted(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command with Ctrl-C after ``STOP_AFTER`` units, in a process group of its own."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=cwd,
        env=os.environ | {"UNITS_UNTIL_INTERRUPT": str(STOP_AFTER)} | environment,
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=120,
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("profile", "by", "word"),
    [
        ("local", "SIGTERM", "terminated"),
        ("cpu", "SIGINT", "interrupted"),  # which comes to the worker processes too, other than SIGTERM
    ],
)
def test_a_product_that_was_stopped_goes_on(
    tmp_path: Path,
    rng: np.random.Generator,
    profile: str,
    by: str,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = rng.integers(0, 99, (1024, 64))
    array = zarr.create_array(
        str(tmp_path / "a.zarr"), shape=values.shape, chunks=(128, 64), dtype=values.dtype
    )
    array[...] = values
    command = ["matmul", "a.zarr", "a.zarr", "c.zarr", "--transpose-b", "--profile", profile]
    command += ["--device-memory", "1MiB", "--json"]
    result = interrupted(*command, cwd=tmp_path, INTERRUPT_BY=by)
    assert result.returncode == 128 + signal.Signals[by], result.stderr
    assert result.stdout == ""
    told = re.fullmatch(
        rf"{word}: c\.zarr\.partial keeps (\d+) of (\d+) tiles; the same command goes on from there\n",
        result.stderr,
    )
    assert told is not None, result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zarr", "c.zarr.partial"]
    monkeypatch.chdir(tmp_path)
    again = CliRunner().invoke(cli, command)
    assert again.exit_code == 0, again.stderr
    report = json.loads(again.stdout)
    assert STOP_AFTER <= int(told[1]) <= report["resumed"] < report["plan"]["tile_count"] == int(told[2])
    np.testing.assert_array_equal(zarr.open_array(str(tmp_path / "c.zarr"))[...], values @ values.T)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zarr", "c.zarr"]


@pytest.mark.slow
def test_a_histogram_without_a_file_to_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"text" * 100_000)
    before = sorted(tmp_path.iterdir())
    result = interrupted("histogram", "text", cwd=tmp_path, DASK_TILEWRIGHT__PIECE_NBYTES="32768")
    assert result.returncode == 130, result.stderr
    assert result.stdout == ""
    assert result.stderr == "interrupted: nothing was written\n"
    assert sorted(tmp_path.iterdir()) == before


def interrupted_here(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> Result:
    """The same in this process, where Ctrl-C is the exception that it makes."""
    seen = itertools.count(1)

    def listener(event: Event) -> None:
        if isinstance(event, UnitDone) and next(seen) == STOP_AFTER:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(texts, "listening", lambda **options: nullcontext(listener))
        return CliRunner().invoke(cli, arguments)


@pytest.mark.parametrize(
    "by", ["here", *(pytest.param(by, marks=pytest.mark.slow) for by in ("SIGTERM", "SIGINT", "SIGKILL"))]
)
@pytest.mark.parametrize("state", [False, True])
def test_a_histogram_that_was_stopped_goes_on(
    tmp_path: Path, rng: np.random.Generator, by: str, state: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rng.integers(0, 256, 400_000, np.uint8)
    data.tofile(tmp_path / "text")
    command = ["histogram", "text", "--out", "f.json", *(["--state", "kept"] if state else [])]
    folder, pieces = "kept" if state else "f.json.pieces", "32768"
    result: Any
    if by == "here":
        monkeypatch.chdir(tmp_path)
        with dask.config.set({"tilewright.piece-nbytes": int(pieces)}):
            result = interrupted_here(*command, monkeypatch=monkeypatch)
        assert result.exit_code == 130, result.stderr
    else:
        result = interrupted(*command, cwd=tmp_path, INTERRUPT_BY=by, DASK_TILEWRIGHT__PIECE_NBYTES=pieces)
        assert result.returncode == (-9 if by == "SIGKILL" else 128 + signal.Signals[by]), result.stderr
    assert result.stdout == ""
    if by != "SIGKILL":
        told = re.search(rf": {folder} keeps (\d+) of (\d+) pieces; the same command goes on", result.stderr)
        assert told is not None, result.stderr
        assert STOP_AFTER <= int(told[1]) < int(told[2])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([folder, "text"])
    monkeypatch.chdir(tmp_path)
    with dask.config.set({"tilewright.piece-nbytes": int(pieces)}):
        again = CliRunner().invoke(cli, command)
    assert again.exit_code == 0, again.stderr
    counts = json.loads((tmp_path / "f.json").read_text())["counts"]
    np.testing.assert_array_equal(counts, np.bincount(data, minlength=256))
    assert (tmp_path / folder).exists() == state
    if state:
        lines = (tmp_path / folder / "tilewright-counts.jsonl").read_bytes().splitlines()
        assert len(lines) == 1 + -(-len(data) // 32768), "no piece was counted twice"


@pytest.mark.slow
def test_what_was_kept_is_forgotten_without_resuming(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"text" * 100_000)
    environment = {"DASK_TILEWRIGHT__PIECE_NBYTES": "32768"}
    assert interrupted("histogram", "text", "--state", "kept", cwd=tmp_path, **environment).returncode == 130
    record = tmp_path / "kept" / "tilewright-counts.jsonl"
    assert len(record.read_bytes().splitlines()) == 1 + STOP_AFTER
    result = interrupted("histogram", "text", "--state", "kept", "--no-resume", cwd=tmp_path, **environment)
    assert "kept keeps 3 of 13 pieces" in result.stderr
    assert len(record.read_bytes().splitlines()) == 1 + STOP_AFTER


ONE_WORKER = "profiles: {one: {kind: cpu, n_workers: 1}}"
"""A profile of a worker process, for what does not depend on how many there are."""
SOURCE = ["matmul", "a.zarr", "a.zarr", "c.zarr", "--profile"]
TEXT = ["histogram", "text", "--by", "letter", "--out", "f.csv", "--plot", "f.png"]


def behind(place: str, *arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command with Ctrl-C as soon as it has come to a place."""
    return interrupted(*arguments, cwd=cwd, UNITS_UNTIL_INTERRUPT="0", INTERRUPT_BEHIND=place, **environment)


NAMED = "interrupted: c.zarr is finished; only the report may be missing\n"


@pytest.mark.parametrize("before", [False, True])
def test_a_product_that_has_its_name_is_told_of(
    tmp_path: Path, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, where Ctrl-C is the exception that it makes."""
    publish = Output.publish

    def interrupting(output: Output, *arguments: Any, **options: Any) -> None:
        publish(output, *arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Output, "publish", interrupting)
    monkeypatch.chdir(tmp_path)
    values = np.arange(64.0).reshape(8, 8)
    zarr.save_array("a.zarr", values)
    if before:
        zarr.save_array("c.zarr", values)
    result = CliRunner().invoke(cli, [*SOURCE, "local", "--overwrite", "--quiet"])
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == NAMED
    np.testing.assert_array_equal(zarr.open_array("c.zarr")[...], values @ values)


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "before"), [("local", False), ("cpu", True)])
def test_a_process_whose_product_has_its_name_tells_of_it(tmp_path: Path, profile: str, before: bool) -> None:
    values = np.arange(64.0).reshape(8, 8)
    zarr.save_array(str(tmp_path / "a.zarr"), values)
    if before:
        zarr.save_array(str(tmp_path / "c.zarr"), values)
    result = behind("publish", *SOURCE, profile, "--overwrite", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == NAMED
    np.testing.assert_array_equal(zarr.open_array(str(tmp_path / "c.zarr"))[...], values @ values)


@pytest.mark.parametrize("name", ["c[1].zarr", "c" * 70 + ".zarr"])
def test_what_a_product_replaced_is_named_while_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ours, table = Path(name), Path("f.csv")
    replaced_path(Path(f"{name}.other")).mkdir()  # of another product, whose only copy it may be
    ours.mkdir()
    outputs = Outputs(ours, table)
    assert outputs.kept() == "nothing was written"
    old = replaced_path(ours)
    ours.rename(old)
    assert outputs.kept() == "nothing was written", "what has gone is not finished"
    ours.mkdir()
    assert outputs.kept() == (
        f"{name} is finished, f.csv is not written; what was replaced is left in {old}: remove it"
    )


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("save", "f.csv is finished, f.png is not written"),
        ("plot", "f.csv and f.png are finished; only the report may be missing"),
        ("print", "f.csv and f.png are finished; only the report may be missing"),
    ],
)
def test_files_of_counts_that_have_their_names_are_told_of(tmp_path: Path, place: str, said: str) -> None:
    (tmp_path / "text").write_bytes(b"text")
    result = behind(place, *TEXT, cwd=tmp_path)
    assert result.returncode == 130
    assert result.stderr == f"interrupted: {said}\n"
    assert (tmp_path / "f.csv").is_file()
    assert (tmp_path / "f.png").is_file() is (place != "save")
    assert {path.name for path in tmp_path.iterdir()} <= {"text", "f.csv", "f.png"}


@pytest.mark.slow
def test_a_benchmarks_plot_that_has_its_name_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(b"an older one")
    words = "bench gemm --size 8 --dtype float32 --device cpu --seconds 0.01 --quiet --plot p.png"
    result = behind("bars", *words.split(), cwd=tmp_path)
    assert result.returncode == 130
    assert result.stderr == "interrupted: p.png is finished; only the report may be missing\n"
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("place", ["exit", "end"])
def test_ctrl_c_behind_the_result_comes_too_late(tmp_path: Path, place: str) -> None:
    zarr.save_array(str(tmp_path / "a.zarr"), np.ones((8, 8)))
    result = behind(place, *SOURCE, "local", cwd=tmp_path)
    assert result.returncode == 0
    assert result.stdout.startswith("8 × 8 float64 in ")
    assert result.stderr == ""


def test_the_setting_that_cuts_pieces_comes_from_the_environment() -> None:
    """Else the test above would stop a single piece after its end."""
    from tilewright.pipeline import config

    with dask.config.set(dask.config.collect_env({"DASK_TILEWRIGHT__PIECE_NBYTES": "32768"})):
        assert config.get("piece-nbytes") == 32768


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize(("by", "word"), [("SIGINT", "interrupted"), ("SIGTERM", "terminated")])
def test_a_signal_while_worker_processes_start_is_one_line(tmp_path: Path, by: str, word: str) -> None:
    """Dask tells of a cluster that is half started by a traceback, when Python ends."""
    zarr.save_array(str(tmp_path / "a.zarr"), np.ones((8, 8)))
    (tmp_path / "cluster.yaml").write_text(ONE_WORKER)
    result = behind("workers", *SOURCE, "one", cwd=tmp_path, INTERRUPT_BY=by)
    assert result.returncode == 128 + signal.Signals[by]
    assert (result.stdout, result.stderr) == ("", f"{word}: nothing was written\n")


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("by", "word"), [("SIGINT", "interrupted"), ("SIGTERM", "terminated")])
def test_a_signal_ends_a_start_that_hangs(tmp_path: Path, by: str, word: str) -> None:
    (tmp_path / "text").write_bytes(b"text")
    (tmp_path / "hang.py").write_text(
        "import os, signal, time\n"
        "open('worker', 'w').write(str(os.getpid()))\n"
        f"os.kill(os.getppid(), signal.{by})\n"
        "time.sleep(1000)\n"
    )
    (tmp_path / "cluster.yaml").write_text(
        f"profiles: {{slow: {{kind: cpu, n_workers: 1, preload: {tmp_path}/hang.py}}}}"
    )
    command = ["histogram", "text", "--profile", "slow", "--quiet"]
    result = interrupted(*command, cwd=tmp_path, UNITS_UNTIL_INTERRUPT="0", START_SECONDS="2")
    assert result.returncode == 128 + signal.Signals[by]
    assert (result.stdout, result.stderr) == ("", f"{word}: nothing was written\n")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "worker").read_text()), 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("by", "word"), [("SIGINT", "interrupted"), ("SIGTERM", "terminated")])
def test_a_signal_ends_a_product_whose_input_does_not_answer(tmp_path: Path, by: str, word: str) -> None:
    zarr.save_array(str(tmp_path / "a.zarr"), np.ones((8, 8)))
    url = f"simplecache::file://{tmp_path}/a.zarr"
    command = ["matmul", url, url, "c.zarr", "--quiet"]
    result = behind("silence", *command, cwd=tmp_path, INTERRUPT_BY=by)
    assert result.returncode == 128 + signal.Signals[by]
    assert result.stderr == (f"{word}: nothing was written\n")


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("by", "word"), [("SIGINT", "interrupted"), ("SIGTERM", "terminated")])
def test_a_signal_ends_a_product_whose_input_is_silent_when_tried(tmp_path: Path, by: str, word: str) -> None:
    zarr.save_array(str(tmp_path / "a.zarr"), np.ones((8, 8)))
    url = f"simplecache::file://{tmp_path}/a.zarr"
    command = ["matmul", url, url, "c.zarr", "--quiet"]
    result = behind("first silence", *command, cwd=tmp_path, INTERRUPT_BY=by)
    assert result.returncode == 128 + signal.Signals[by]
    assert result.stderr == f"{word}: nothing was written\n"
    assert not (tmp_path / "c.zarr.partial").exists()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("command", [["dot", "{x}", "{x}"], ["verify", "{a}", "{a}", "{a}"]], ids=" ".join)
def test_ctrl_c_ends_other_work_whose_input_does_not_answer(command: list[str], tmp_path: Path) -> None:
    zarr.save_array(str(tmp_path / "x.zarr"), np.ones(8))
    zarr.save_array(str(tmp_path / "a.zarr"), np.ones((8, 8)))
    urls = {name: f"simplecache::file://{tmp_path}/{name}.zarr" for name in "ax"}
    result = behind("silence", *(word.format(**urls) for word in command), "--quiet", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (130, "interrupted: nothing was written\n")


@pytest.mark.more
def test_ctrl_c_twice_ends_what_nothing_can_end(tmp_path: Path) -> None:
    """Its threads go on reading; Python's own end would wait for them."""
    zarr.save_array(str(tmp_path / "a.zarr"), np.ones((8, 8)))
    url = f"simplecache::file://{tmp_path}/a.zarr"
    command = ["matmul", url, url, "c.zarr", "--quiet"]
    result = behind("standstill", *command, cwd=tmp_path, INTERRUPTED_SECONDS="1")
    assert result.returncode == 130
    assert result.stderr == "interrupted: nothing was written\n"
    assert not (tmp_path / "c.zarr.partial").exists()


def blocked() -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def runs_profiler(dask_worker: Any) -> bool:
    return "profile" in dask_worker.periodic_callbacks


def one_worker(folder: Path) -> AbstractContextManager[Client]:
    (folder / "cluster.yaml").write_text(ONE_WORKER)
    return open_cluster("one", folder / "cluster.yaml")


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("opened", [one_worker, lambda folder: cluster_of(1, gpu=False)])
def test_worker_processes_are_deaf_to_ctrl_c_from_their_first_moment(
    opened: Callable[[Path], AbstractContextManager[Client]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal while they start would be told in pages of tracebacks."""
    monkeypatch.setattr(local_cluster, "PROFILER_HANGS", True)
    with opened(tmp_path) as client:
        assert all(client.run(blocked).values())
        assert not any(client.run(runs_profiler).values())
    assert not blocked()


@pytest.mark.parametrize("by", ["SIGINT", "SIGTERM"])
def test_a_signal_after_the_result_changes_nothing(by: str) -> None:
    """It comes while Python itself ends."""
    script = (
        "import atexit, os, signal, sys\n"
        f"atexit.register(os.kill, os.getpid(), signal.{by})\n"
        "from tilewright.workflows.cli import main\n"
        "sys.argv = ['tilewright', '--version']\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert "tilewright" in result.stdout.lower()


@pytest.mark.parametrize(("interrupt", "said"), [(KeyboardInterrupt, Interrupted), (Termination, Terminated)])
def test_ctrl_c_while_a_class_is_defined_is_no_other_error(
    interrupt: type[BaseException], said: type[Exception]
) -> None:
    """As while a library is imported. Python 3.11 makes a RuntimeError of it."""

    class Named:
        def __set_name__(self, owner: type, name: str) -> None:
            raise interrupt

    with pytest.raises(said, match="nothing was written"), interruptible():
        type("Owner", (), {"named": Named()})
    with pytest.raises(RuntimeError, match="of its own"), interruptible():
        raise RuntimeError("of its own")


@pytest.mark.slow
@pytest.mark.parametrize("code", ["exec('interrupt()')", "interrupt()"])
def test_ctrl_c_wherever_it_comes_has_its_exit_status_under_python_m(tmp_path: Path, code: str) -> None:
    """Within code that is given as text, as dataclasses are made of, Python remembers it."""
    (tmp_path / "interrupted_module.py").write_text(
        "import os, signal\n"
        "from tilewright.workflows import histogram\n"
        "from tilewright.workflows.cli import main\n"
        "def interrupt():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        f"histogram.histogram = lambda *arguments, **options: {code}\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "main(prog_name='tilewright')\n"
    )
    command = [sys.executable, "-m", "interrupted_module", "histogram", "text"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == "interrupted: nothing was written\n"


@pytest.mark.parametrize(
    ("name", "kept", "before", "later"),
    [
        ("topk", "finished blocks are", "pipeline.neighbours.job.prepare", "pipeline.neighbours.job.complete_group"),
        ("eofs", "what whole passes have found is", "pipeline.spectral.passes.Passes.keep_moments",
         "pipeline.spectral.passes.Passes.keep_image"),
    ],
)  # fmt: skip
def test_what_is_told_to_be_kept_of_a_search_is_there(
    name: str,
    kept: str,
    before: str,
    later: str,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether Ctrl-C comes before anything is finished, or after some of it is."""
    monkeypatch.chdir(tmp_path)
    zarr.save_array("x.zarr", rng.standard_normal((1500, 16)))
    more = ["--metric", "l2"] if name == "topk" else ["--method", "krylov"]
    command = [name, "x.zarr", "o.zarr", "-k", "2", *more, "--device", "cpu"]

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    told = {
        before: "nothing was finished, and nothing is kept",
        later: f"{kept} kept beside o.zarr, and the same command goes on there",
    }
    for place, expected in told.items():
        with monkeypatch.context() as patch:
            patch.setattr(f"tilewright.{place}", interrupt)
            result = CliRunner().invoke(cli, command)
        assert result.exit_code == 130, result.stderr
        assert result.stderr.endswith(f"interrupted: {expected}\n")
