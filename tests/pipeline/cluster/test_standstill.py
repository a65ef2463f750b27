"""Processes that stand still, and that none outlives the one that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import dask
import pytest

from tilewright.pipeline.cluster import lifeline
from tilewright.pipeline.cluster.cluster import _preloads, open_cluster
from tilewright.pipeline.cluster.standstill import STEP_SECONDS, Standstill, facts_of, is_stopped
from tilewright.pipeline.errors import ClusterError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")

END_SECONDS = 20


def wait_until(there, seconds: float = END_SECONDS) -> None:
    until = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < until
        time.sleep(0.002)


def test_a_process_that_takes_no_processor_time_stands_still() -> None:
    now = [0.0]
    with (
        subprocess.Popen(["sleep", "60"]) as idle,
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy,
    ):
        try:
            standstill = Standstill(lambda: now[0])
            assert standstill.look([idle.pid, busy.pid]) == {idle.pid: 0, busy.pid: 0}
            time.sleep(0.2)  # ticks are 10 ms
            for passed in (1.0, 1.5):
                now[0] += passed
                before = facts_of(busy.pid)[11]
                wait_until(lambda before=before: facts_of(busy.pid)[11] != before)
                quiet = standstill.look([idle.pid, busy.pid])
                assert quiet[busy.pid] == 0
            assert quiet[idle.pid] == 2.5
            now[0] += 1000  # this process was stopped itself
            assert standstill.look([idle.pid])[idle.pid] == 2.5 + STEP_SECONDS
            os.kill(busy.pid, signal.SIGSTOP)
            wait_until(lambda: is_stopped(busy.pid))
            assert not is_stopped(idle.pid)
        finally:
            idle.kill(), busy.kill()
    assert standstill.look([idle.pid, busy.pid]) == {}


def test_a_stopped_worker_process_ends_with_the_one_that_started_it() -> None:
    """A child that stops itself cannot hear that its parent is gone."""
    script = (
        "import os, signal, time; from tilewright.pipeline.cluster import lifeline\n"
        "child = os.fork()\n"
        "if not child: {watched}os.kill(os.getpid(), signal.SIGSTOP)\n"
        "print(child, flush=True); time.sleep(60)"
    )
    for watched in (True, False):
        code = script.format(watched="lifeline.dask_setup(None); " if watched else "")
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            wait_until(lambda child=child: is_stopped(child))
            parent.kill()
        if watched:
            wait_until(lambda child=child: facts_of(child)[:1] in ([], ["Z"]))
        else:  # else this test would prove nothing
            assert is_stopped(child)
            os.kill(child, signal.SIGKILL)


STOPS = """
import os, signal
from pathlib import Path
folder = Path({folder!r})
(folder / str(os.getpid())).touch()
if len(list(folder.iterdir())) <= {times}:
    os.kill(os.getpid(), signal.SIGSTOP)
"""
"""What a worker preloads that stands still as it starts, as often as is said."""


SLOW = pytest.mark.slow


@pytest.mark.more
@pytest.mark.parametrize(
    ("workers", "times"), [(1, 1), pytest.param(2, 1, marks=SLOW), pytest.param(2, 99, marks=SLOW)]
)
def test_a_worker_that_stands_still_as_it_starts_is_given_up(
    workers: int, times: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Dask would wait for it for good."""
    began = tmp_path / "began"
    began.mkdir()
    (tmp_path / "stops.py").write_text(STOPS.format(folder=str(began), times=times))
    (tmp_path / "cluster.yaml").write_text(
        f"profiles: {{few: {{kind: cpu, n_workers: {workers}, threads_per_worker: 1, preload: {tmp_path}/stops.py}}}}"
    )
    with dask.config.set({"tilewright.worker-deadline": 3}):
        if times == 1:
            with open_cluster("few", tmp_path / "cluster.yaml") as client:
                assert len(client.nthreads()) == workers
        else:
            with (
                pytest.raises(
                    ClusterError, match=r"worker process \d+, \d+ stood still for \d s as it started"
                ),
                open_cluster("few", tmp_path / "cluster.yaml"),
            ):
                pass
    assert len(list(began.iterdir())) == 2 * workers
    told = [record.getMessage() for record in caplog.records if record.name.startswith("tilewright")]
    named = [line for line in told if "stands still as it starts" in line]
    assert len(named) == (1 if times == 1 else 4), told
    assert "it is given up after 3 s (tilewright.worker-deadline)" in named[0]
    assert sum("the workers are started anew, once" in line for line in told) == 1
    for pid in map(int, (path.name for path in began.iterdir())):
        wait_until(lambda pid=pid: facts_of(pid)[:1] in ([], ["Z"]))


def test_what_a_profile_preloads_is_kept() -> None:
    assert _preloads({})["preload"][0] == lifeline.NAME
    assert _preloads({"preload": "theirs.py"})["preload"][-1] == "theirs.py"
    found = _preloads({"preload": ["one", "two"], "preload_argv": [["--a"], []]})
    assert found["preload"][-2:] == ["one", "two"]
    assert len(found["preload"]) == len(found["preload_argv"])
    assert found["preload_argv"][-2:] == [["--a"], []]
    assert _preloads({"preload": "one", "preload_argv": ["--a"]})["preload_argv"] == ["--a"]
    with dask.config.set({"distributed.worker.preload": ["configured"]}):
        assert _preloads({})["preload"][-1] == "configured"
