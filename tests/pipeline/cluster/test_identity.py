"""No worker that runs another Tilewright than the client gets work, however it joins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import dask
import pytest
import zarr
from distributed import Client, LocalCluster

import tilewright as tw
from tests.pipeline.cluster.test_submit import every_kind_of_work
from tilewright.pipeline.cluster import answers, identity, watch
from tilewright.pipeline.cluster.submit import run_bounded, run_combined, run_sent
from tilewright.pipeline.errors import ClusterError
from tilewright.pipeline.events import Event, UnitDone

PACKAGE = Path(tw.__file__).parent
ROOT = Path(__file__).parents[3]
QUICK_SECONDS = 20
"""Far more than an error takes to be told, and far less than a run that hangs."""
OURS = re.escape(str(identity.code_here()))


def changed(package: Path, file: str, old: str, new: str) -> None:
    path = package / file
    text = path.read_text(encoding="utf-8")
    assert re.search(old, text)
    path.write_text(re.sub(old, new, text), encoding="utf-8")


def of_another_version(package: Path) -> None:
    changed(package, "__init__.py", re.escape(tw.__version__), "0.0.9")


def of_other_sources(package: Path) -> None:
    changed(package, "kernels/gpu/launch.py", r"\Z", "# edited\n")


def without_a_function(package: Path) -> None:
    """A task that names it would be waited for without end: Dask ends a worker that cannot unpickle its task."""
    changed(package, "pipeline/worker/tasks.py", r"def multiply_tile\b", "def multiply_one_tile")


def of_before_the_question(package: Path) -> None:
    changed(package, "pipeline/cluster/identity.py", r"\bCode\b", "Former")


def none_at_all(package: Path) -> None:
    (package / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'tilewright'\")")


def differs(version: str) -> str:
    theirs = rf"{re.escape(version)} \(sources \w+\)"
    return rf"^worker tcp://\S+ runs Tilewright {theirs}, and this process {OURS}; .*start anew"


def unasked(why: str) -> str:
    return rf"^worker tcp://\S+ cannot be asked for \w+: .*{why}.*; it needs the same version of Tilewright, {OURS}"


STRANGERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "version": (of_another_version, differs("0.0.9")),
    "sources": (of_other_sources, differs(tw.__version__)),
    "function": (without_a_function, differs(tw.__version__)),
    "question": (of_before_the_question, unasked("Can't get attribute 'Code'")),
    "nothing": (none_at_all, unasked("No module named 'tilewright'")),
}


@contextmanager
def joining(scheduler: str, folder: Path, edit: Callable[[Path], None], *options: str) -> Iterator[None]:
    """A worker that runs an edited copy of Tilewright joins, and ends with this block."""
    copytree(PACKAGE, folder / "tilewright", ignore=ignore_patterns("__pycache__"))
    edit(folder / "tilewright")
    command = [sys.executable, "-m", "distributed.cli.dask_worker", scheduler, "--nthreads", "1"]
    worker = subprocess.Popen(
        [*command, "--no-dashboard", "--local-directory", str(folder), *options],
        cwd=folder,  # which is where it looks for modules first
        env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},  # behind it the tests' own functions
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        worker.terminate()
        worker.wait(60)


@contextmanager
def cluster_of(workers: int) -> Iterator[tuple[LocalCluster, Client]]:
    options = {"threads_per_worker": 1, "processes": False, "protocol": "tcp://", "dashboard_address": ":0"}
    with LocalCluster(n_workers=workers, **options) as cluster, Client(cluster) as own:
        yield cluster, own


@pytest.mark.sample(1)
@pytest.mark.parametrize("stranger", list(STRANGERS))
def test_no_work_begins_with_a_worker_that_runs_another_tilewright(stranger: str, tmp_path: Path) -> None:
    edit, expected = STRANGERS[stranger]
    (tmp_path / "data").mkdir()
    work = every_kind_of_work(tmp_path / "data")
    work["plan"] = partial(tw.plan_matmul, tmp_path / "data" / "a", tmp_path / "data" / "a")
    before = sorted(tmp_path.joinpath("data").rglob("*"))
    with cluster_of(0) as (cluster, own), joining(cluster.scheduler_address, tmp_path, edit, "--no-nanny"):
        own.wait_for_workers(1, timeout=60)
        for run in work.values():
            begun = time.monotonic()
            with pytest.raises(ClusterError, match=expected):
                run(cluster=own)
            assert time.monotonic() - begun < QUICK_SECONDS
        assert len(own.nthreads()) == 1, "it was asked, and got no task that it cannot unpickle"
    assert sorted(tmp_path.joinpath("data").rglob("*")) == before


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("stranger", ["version", "sources"])
def test_a_worker_of_another_tilewright_takes_no_part_in_a_product(stranger: str, tmp_path: Path) -> None:
    """It joins when some tiles are done, and the others go."""
    edit, expected = STRANGERS[stranger]
    ones = zarr.create_array(tmp_path / "a", shape=(64, 64), chunks=(8, 8), dtype="i8", fill_value=1)
    done: list[str] = []
    with cluster_of(1) as (cluster, own):
        (ours,) = own.nthreads()
        joined = joining(cluster.scheduler_address, tmp_path, edit, "--no-nanny")

        def listener(event: Event) -> None:
            if not isinstance(event, UnitDone):
                return
            if not done:
                joined.__enter__()
                own.wait_for_workers(2, timeout=60)
                cluster.scale(0)
            done.append(event.worker)

        try:
            with dask.config.set({"tilewright.tiles": 64}), pytest.raises(ClusterError, match=expected):
                tw.matmul(ones, ones, tmp_path / "c", cluster=own, device="cpu", listener=listener)
        finally:
            joined.__exit__(None, None, None)
    assert 0 < len(done) < 64
    assert set(done) == {ours}
    assert not (tmp_path / "c").exists()
    run = tw.matmul(ones, ones, tmp_path / "c", device="cpu")
    assert run.resumed >= len(done), "what was finished is kept"
    assert (zarr.open_array(tmp_path / "c")[...] == 64).all()


HELD = threading.Event()


def held(number: int, *values: int) -> int:
    """Does not end before a test lets it."""
    HELD.wait(60)
    return number


def added(*numbers: int) -> int:
    return sum(numbers)


CALLS = [(number,) for number in range(9)]
GROUPS = [((), [call]) for call in CALLS]
RUNS: dict[str, Callable[[Client], Generator[Any, None, None]]] = {
    "bounded": lambda own: run_bounded(own, held, CALLS, key="held"),
    "sent": lambda own: run_sent(own, held, CALLS, (1,), key="held"),
    "combined": lambda own: run_combined(own, held, added, GROUPS, window=3, key="held"),
    "single": lambda own: run_bounded(own, held, CALLS, key="held"),
    "group": lambda own: run_combined(own, held, added, GROUPS, window=1, key="held"),
}


def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps `run_bounded` from submitting more than one task at a time, however many workers there are."""
    monkeypatch.setattr(watch.Workers, "threads", lambda workers: {"a worker": 0})


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "stranger"),
    [
        *((kind, "version") for kind in RUNS),
        # It gets no task, which Dask would end it for: there would be nobody to ask.
        *((kind, stranger) for kind in ("single", "group") for stranger in ("question", "nothing")),
    ],
)
def test_a_worker_that_joins_and_runs_another_tilewright_ends_the_run(
    kind: str, stranger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.2)
    if kind == "single":
        one_at_a_time(monkeypatch)
    edit, expected = STRANGERS[stranger]
    HELD.clear()
    results: list[Any] = []
    with (
        cluster_of(1) as (cluster, own),
        joining(cluster.scheduler_address, tmp_path, edit, "--no-nanny"),
    ):
        try:
            begun = time.monotonic()
            with pytest.raises(ClusterError, match=expected), closing(RUNS[kind](own)) as run:
                results.extend(run)
            assert time.monotonic() - begun < QUICK_SECONDS
        finally:
            HELD.set()
    assert not results


@pytest.mark.more
def test_a_worker_that_does_not_answer_holds_up_no_run(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(watch, "ASKED_SECONDS", 0.01)
    one_at_a_time(monkeypatch)
    asked = threading.Event()
    run = client.run

    def silent(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if function is not identity.answer:
            return run(function, *arguments, **options)
        asked.set()
        return client.submit(HELD.wait, 60, asynchronous=True)._result()

    monkeypatch.setattr(client, "run", silent)
    HELD.clear()
    try:
        numbers = [(i,) for i in range(200)]
        assert len(list(run_bounded(client, added, numbers, key="silent"))) == 200
        assert asked.is_set()
    finally:
        HELD.set()


def test_a_message_names_a_few_workers() -> None:
    other = identity.Code("0.0.9", "0" * 16)
    found = [identity.Differs(f"tcp://host:{number}", other) for number in range(5)]
    text = str(answers._other_code(found))
    assert text.count("tcp://") == 3
    assert ", 2 other workers another one, and this process " in text
    assert "checkout" not in text
    other = identity.Code(tw.__version__, "0" * 16)
    text = str(answers._other_code([identity.Differs("tcp://host:1", other)]))
    assert "other worker" not in text
    assert "(from a checkout: the same files in kernels and pipeline)" in text


def test_what_a_process_runs_is_known_by_its_modules_alone(tmp_path: Path) -> None:
    assert identity.code_here().tilewright == (tw.__version__, identity.hash_of_sources(PACKAGE))
    package = tmp_path / "tilewright"
    copytree(PACKAGE, package, ignore=ignore_patterns("__pycache__"))
    assert identity.hash_of_sources(package) == identity.code_here().sources
    (package / "kernels" / ".#launch.py").symlink_to("nowhere")  # an editor's
    (package / "kernels" / "notes.txt").write_text("of no matter")
    (package / "workflows" / "cli.py").write_text("")
    (package / "pipeline" / "__pycache__").mkdir()
    (package / "pipeline" / "__pycache__" / "plan.py").write_text("")
    assert identity.hash_of_sources(package) == identity.code_here().sources
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
        for path in package.rglob("*.py"):
            if path.exists():
                archive.write(path, path.relative_to(tmp_path))
    assert (
        identity.hash_of_sources(zipfile.Path(tmp_path / "package.zip") / "tilewright")
        == identity.code_here().sources
    )
    (package / "kernels" / "gemm" / "one_more.py").touch()
    assert identity.hash_of_sources(package) != identity.code_here().sources


def test_sources_that_cannot_be_read_are_no_failed_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(package: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(identity, "hash_of_sources", unreadable)
    assert identity.code_here.__wrapped__().tilewright == (
        tw.__version__,
        "that cannot be read: [Errno 13] Permission denied",
    )


def test_other_libraries_are_named_with_both_versions() -> None:
    pickles = dict(identity.code_here().pickles) | {"zarr": "2.18", "Python": "3.10"}
    whole = dict(identity.code_here().installed) | {"zarr": "2.18.7", "Python": "3.10.2"}
    other = replace(identity.code_here(), pickles=tuple(pickles.items()), installed=tuple(whole.items()))
    assert other != identity.code_here()
    ours = dict(identity.code_here().installed)
    text = str(answers._other_code([identity.Differs("tcp://host:1", other)]))
    assert text.startswith("worker tcp://host:1 has Python 3.10.2 and zarr 2.18.7, and this process")
    assert f"Python {ours['Python']} and zarr {ours['zarr']}; what passes between them is pickled" in text
    more = [identity.Differs(f"tcp://host:{number}", other) for number in range(5)]
    assert ", 2 other workers other versions, too, and this process " in str(answers._other_code(more))


def test_versions_that_pickle_alike_are_no_difference() -> None:
    assert {name for name, _ in identity.code_here().pickles} == {"Python", *identity.COMPARED}
    whole = dict(identity.code_here().installed) | {
        "zarr": dict(identity.code_here().pickles)["zarr"] + ".999"
    }
    assert replace(identity.code_here(), installed=tuple(whole.items())) == identity.code_here()
    assert identity._installed("tilewright-that-nobody-has") == identity.MISSING


class Secret:
    """An object that workers cannot unpickle."""

    def __reduce__(self) -> Any:
        return unlocked, ()


def unlocked() -> None:
    raise ImportError("no module that has it")


@pytest.mark.parametrize("kind", ["bounded", "sent", "combined"])
def test_a_worker_that_cannot_unpickle_its_work_says_so_by_name(client: Client, kind: str) -> None:
    (worker, *_) = client.nthreads()
    secret = Secret()
    runs: dict[str, Callable[[], Generator[Any, None, None]]] = {
        "bounded": lambda: run_bounded(client, added, [(secret,)], key="secret"),
        "sent": lambda: run_sent(client, added, [(secret,)], (1,), key="secret"),
        "combined": lambda: run_combined(client, added, added, [((), [(secret,)])], window=1, key="secret"),
    }
    found = (
        rf"^worker {re.escape(worker.partition(':')[0])}\S+ cannot unpickle its work: ImportError: no module"
    )
    with pytest.raises(ClusterError, match=found), closing(runs[kind]()) as run:
        list(run)
