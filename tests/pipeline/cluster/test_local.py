"""How clusters on this host start and end, beyond what their profiles say."""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tilewright.pipeline.cluster import local as local_cluster
from tilewright.pipeline.cluster.cluster import open_cluster
from tilewright.pipeline.cluster.here.checks import FILES_A_WORKER, OTHER_FILES, allow_open_files

COUNTS_TEXT = """
import os, resource, sys
import tilewright as tw
from tilewright.pipeline.cluster.here.checks import FILES_A_WORKER

if __name__ == "__main__":
    soft, hard = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with tw.open_cluster("two") as client:
        assert tw.histogram(["text"], cluster=client).counts.sum() == 4
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        print(len(os.listdir("/dev/fd")) + FILES_A_WORKER <= limit, limit)
"""


def write_profile(folder: Path) -> None:
    (folder / "cluster.yaml").write_text(
        "profiles: {two: {kind: cpu, n_workers: 2, threads_per_worker: 1, dashboard_address: ':0'}}"
    )


def counted_with(soft: int, hard: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """A script that counts text on two worker processes, with so many open files."""
    (folder / "text").write_bytes(b"text")
    write_profile(folder)
    (folder / "script.py").write_text(COUNTS_TEXT)
    return subprocess.run(
        [sys.executable, "script.py", str(soft), str(hard)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slow
def test_worker_processes_have_the_open_files_that_they_take(tmp_path: Path) -> None:
    """Without them Dask hangs."""
    result = counted_with(24, 200, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    enough, limit = result.stdout.split()
    assert enough == "True", "those that are open leave some of what was reckoned"
    assert OTHER_FILES + 2 * FILES_A_WORKER < int(limit) < 200, (
        "the limit is raised no further than it must be"
    )


def test_workers_that_the_open_files_are_too_few_for_are_refused(tmp_path: Path) -> None:
    """Two processes, and one in this process: libraries that could not be imported would be reported as faulty."""
    write_profile(tmp_path)
    script = (
        "import resource, tilewright as tw\n"
        "for limit, profile in ((24, 'two'), (20, 'local')):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))\n"
        "    try:\n        with tw.open_cluster(profile): pass\n"
        "    except tw.ClusterError as error: print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    of_processes, of_this_process = result.stdout.splitlines()
    assert of_processes.startswith("2 worker processes would need about ")
    assert of_processes.endswith(
        " open files, and the system allows 24; raise that (ulimit -Hn), or set n_workers, in a profile, to fewer"
    )
    assert re.fullmatch(
        r"a worker in this process would need about \d\d open files, and the system allows 20; raise that"
        r" \(ulimit -Hn\)",
        of_this_process,
    )


@pytest.mark.parametrize("limits", [(1024, 4096), (1024, resource.RLIM_INFINITY)])
def test_a_limit_is_raised_as_far_as_needed(limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: set_to.append(limits))
    allow_open_files(16)
    assert not set_to
    allow_open_files(108)
    ((soft, hard),) = set_to
    assert 108 * FILES_A_WORKER < soft <= 108 * FILES_A_WORKER + OTHER_FILES + len(os.listdir("/dev/fd"))
    assert hard == limits[1]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Handler]:
    """What writes Dask's logs, where no cluster is open yet: other tests keep theirs."""
    monkeypatch.setattr(local_cluster, "_quiet", local_cluster._Quiet())
    own = logging.StreamHandler()
    own.setLevel(logging.INFO)
    logging.getLogger("distributed").addHandler(own)
    yield own
    logging.getLogger("distributed").removeHandler(own)


def test_clusters_stay_quiet_while_others_end(terminal: logging.Handler) -> None:
    """As those of several threads do. Dask's own put back what they found: what the first has found is not quiet."""
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(open_cluster("local"))
        second.enter_context(open_cluster("local"))
        first.close()
        assert terminal.level == logging.WARNING
        first.enter_context(open_cluster("local"))
        second.close()
        assert terminal.level == logging.WARNING
    assert terminal.level == logging.INFO, "it is as it was"
    with open_cluster("local"):
        terminal.setLevel(logging.ERROR)
    assert terminal.level == logging.ERROR, "somebody has changed it since"


def test_a_profile_may_have_dask_log(tmp_path: Path, terminal: logging.Handler) -> None:
    (tmp_path / "profiles.yaml").write_text("profiles: {loud: {kind: local, silence_logs: false}}")
    with open_cluster("loud", tmp_path / "profiles.yaml"):
        assert terminal.level == logging.INFO


FAILING_TASKS = """
import contextlib, sys
import tilewright as tw
from tilewright.pipeline.cluster.submit import run_bounded

def fail(number):
    raise ValueError("of a task of ours") if number else ValueError("of a task of another")

if __name__ == "__main__":
    with tw.open_cluster(sys.argv[1], "profiles.yaml") as client:
        try:
            with contextlib.closing(run_bounded(client, fail, [(1,)], key="ours")) as results:
                list(results)
        except tw.TaskError as error:
            print(error)
        print(repr(client.submit(fail, 0).exception()))
"""


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("profile", "logged"), [("local", 1), ("one", 1), ("loud", 5)])
def test_what_tasks_of_ours_fail_with_is_raised_and_not_logged(
    profile: str, logged: int, tmp_path: Path
) -> None:
    """Dask logs every attempt, by pages."""
    (tmp_path / "script.py").write_text(FAILING_TASKS)
    (tmp_path / "profiles.yaml").write_text(
        "profiles:\n"
        "  one: {kind: cpu, n_workers: 1, dashboard_address: ':0'}\n"
        "  loud: {kind: local, silence_logs: false}\n"
    )
    command = [sys.executable, "script.py", profile]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.stdout.splitlines() == [
        "task ours-0 failed 4 times, last with ValueError: of a task of ours",
        "ValueError('of a task of another')",
    ]
    assert result.stderr.count("Compute Failed") == logged
    assert result.stderr.count("Key:       ours-0") == logged - 1


def test_signals_that_come_to_a_start_are_delivered_once_behind_it() -> None:
    inherited = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs ignore it
    before = signal.getsignal(signal.SIGINT)
    seen: list[int] = []

    def start() -> None:
        with local_cluster._signals_noted() as noted:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            seen.extend(noted)

    try:
        with pytest.raises(KeyboardInterrupt):
            start()
        assert seen == [signal.SIGINT, signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, inherited)


def test_a_start_begins_again_behind_a_signal_that_its_handler_only_notes() -> None:
    begun: list[Any] = []
    closed: list[Any] = []

    class Cluster:
        def __init__(self, **options: Any) -> None:
            begun.append(self)
            if len(begun) == 1:
                signal.raise_signal(signal.SIGTERM)

        def close(self, timeout: float) -> None:
            closed.append(self)

    noted: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    kind: Any = Cluster
    try:
        server = local_cluster.start(kind, {"processes": False})
    finally:
        signal.signal(signal.SIGTERM, before)
    assert noted == [signal.SIGTERM]
    assert len(begun) == 2
    assert closed == begun[:1], "what was given up, and not what is to be used"
    assert server is begun[1]


@pytest.mark.parametrize("level", [logging.WARNING, logging.CRITICAL])
def test_what_dask_says_of_a_start_is_noted_even_where_it_is_not_shown(level: int) -> None:
    """The command has Dask log nothing below critical errors."""
    theirs = logging.getLogger("distributed")
    shown: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = shown.append  # type: ignore[method-assign]
    before = theirs.level
    theirs.addHandler(handler)
    theirs.setLevel(level)
    try:
        with local_cluster._errors_noted() as noted:
            logging.getLogger("distributed.nanny").error("it does not start")
            logging.getLogger("distributed.nanny").warning("it is late")
        assert noted == ["it does not start"]
        assert len(shown) == (2 if level == logging.WARNING else 0)
        assert (theirs.level, handler.level) == (level, logging.NOTSET)
    finally:
        theirs.removeHandler(handler)
        theirs.setLevel(before)
