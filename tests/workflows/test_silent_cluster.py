"""A command whose scheduler or workers, processes of their own, are stopped or killed for good: it ends, or goes on, in
time, and keeps what is finished."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

BIN = Path(sys.executable).parent
DEADLINE = 5
COMMAND = ["matmul", "a.zarr", "a.zarr", "c.zarr", "--transpose-b", "--device-memory", "1MiB", "--json"]
ENVIRONMENT = {
    "DASK_TILEWRIGHT__WORKER_DEADLINE": str(DEADLINE),
    "DASK_TILEWRIGHT__WORKERS": "2",
    "DASK_LOGGING__DISTRIBUTED": "critical",
}


class Site:
    """A scheduler and two workers of one thread, and arrays whose product takes them a while."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | ENVIRONMENT
        self.values = np.random.default_rng(32).integers(0, 99, (2048, 512))
        array = zarr.create_array(
            folder / "a.zarr", shape=self.values.shape, chunks=(128, 512), dtype=self.values.dtype
        )
        array[...] = self.values
        options = {
            "cwd": folder,
            "env": self.environment,
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
        }
        file = ["--scheduler-file", "scheduler.json", "--no-dashboard"]
        here = ["--host", "127.0.0.1"]

        def started(*command: str) -> Any:
            return subprocess.Popen([BIN / "dask", *command, *file, *here], **options)

        self.scheduler = started("scheduler", "--port", "0")
        self.until(lambda: (folder / "scheduler.json").exists())
        self.workers = [started("worker", "--nthreads", "1", "--no-nanny") for _ in range(2)]
        (folder / "cluster.yaml").write_text(
            "profiles: {site: {kind: existing, scheduler_file: scheduler.json}}"
        )

    def until(self, met: Any) -> None:
        until = time.monotonic() + 60
        while not met():
            assert time.monotonic() < until
            time.sleep(0.02)

    def begun(self) -> subprocess.Popen[str]:
        """The command, some of whose tiles are done."""
        command = [BIN / "tilewright", *COMMAND, "--profile", "site"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, cwd=self.folder, env=self.environment, **pipes)
        ledger = self.folder / "c.zarr.partial" / "tilewright-ledger.jsonl"
        self.until(lambda: ledger.exists() and ledger.read_text().count("\n") > 5)
        return process

    def goes_on(self) -> int:
        """Have the same command finish in one process; returns how many tiles it found finished."""
        done = subprocess.run(
            [BIN / "tilewright", *COMMAND], cwd=self.folder, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        np.testing.assert_array_equal(
            zarr.open_array(self.folder / "c.zarr")[...], self.values @ self.values.T
        )
        return int(json.loads(done.stdout)["resumed"])

    def end(self) -> None:
        for process in (self.scheduler, *self.workers):
            process.kill()
            process.wait()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.end()


KEPT = r"; (\d+) of \d+ tiles are finished and kept, and the same command goes on there\n$"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "how", "named", "said", "most"),
    [
        (
            "scheduler",
            "STOP",
            r"the scheduler at tcp://\S+ has not answered for",
            "the scheduler at .* not answered",
            30,
        ),
        ("scheduler", "KILL", "", "the connection to the scheduler at .* was lost", 30),
        (
            "workers",
            "STOP",
            r"worker tcp://\S+ has not been heard from for",
            "no worker of the cluster at .* is heard",
            40,
        ),
    ],
)
def test_a_command_ends_with_one_line_and_keeps_its_tiles(
    who: str, how: str, named: str, said: str, most: float, site: Site
) -> None:
    command = site.begun()
    begun = time.monotonic()
    for process in [site.scheduler] if who == "scheduler" else site.workers:
        process.send_signal(signal.Signals[f"SIG{how}"])
    output, errors = command.communicate(timeout=120)
    assert time.monotonic() - begun < most
    assert command.returncode == 1, errors
    assert output == ""
    assert re.search(rf"(?m)^matmul: {named}", errors) if named else "has not" not in errors, errors
    told = re.search(rf"(?m)^error: {said}.*{KEPT}", errors)
    assert told is not None, errors
    assert site.goes_on() >= int(told[1]) > 0


@pytest.mark.slow
def test_a_worker_that_comes_back_when_a_run_has_ended_changes_nothing(site: Site) -> None:
    command = site.begun()
    site.workers[0].send_signal(signal.SIGSTOP)
    _, errors = command.communicate(timeout=120)
    assert command.returncode == 0, errors
    site.workers[0].send_signal(signal.SIGCONT)
    c = zarr.open_array(site.folder / "c.zarr")
    until = time.monotonic() + 3
    while time.monotonic() < until:
        np.testing.assert_array_equal(c[...], site.values @ site.values.T)
        time.sleep(0.2)
    assert {path.name for path in site.folder.iterdir()} >= {"a.zarr", "c.zarr"}
    assert not list(site.folder.glob("c.zarr/tilewright-drafts-*"))


@pytest.mark.slow
def test_sigterm_finishes_what_is_nearly_done_on_any_cluster(site: Site) -> None:
    command = site.begun()
    command.terminate()
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 143, errors
    told = re.search(
        r"(?m)^terminated: c\.zarr\.partial keeps (\d+) of (\d+) tiles; the same command goes", errors
    )
    assert told is not None, errors
    assert site.goes_on() >= int(told[1]) > 0
