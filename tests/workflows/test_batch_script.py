"""The batch script of docs/cluster.md, run by a shell, with a command in the place of Slurm's ``srun``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import zarr

PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"
INTERRUPTED = Path(__file__).with_name("interrupted.py")
SRUN = """#!/bin/bash
# One task, a worker without a GPU. What srun's manual says of signals: SIGTERM is forwarded as SIGKILL.
[ "$1 $2 $3 $4" = "--cpus-per-task=32 dask cuda worker" ] || exit 2
shift 4
setsid dask worker "$@" --no-dashboard & tasks=$!
trap 'kill -9 -- -$tasks' TERM
wait $tasks
"""
CLIENT = f"""#!/bin/bash
exec {sys.executable} {INTERRUPTED} "$@" --device cpu --json --device-memory 1MiB
"""


def written(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def job(tmp_path: Path, rng: np.random.Generator) -> Path:
    """A folder for the script to run in, where it finds a scheduler's and a worker's command, and arrays."""
    page = PAGE.read_text(encoding="utf-8")
    script = re.search(r"```bash\n(#!/bin/bash\n.*?)```", page, re.S)
    profiles = re.search(r"with, in `cluster.yaml`,\n\n```yaml\n(.*?)```", page, re.S)
    assert script is not None
    assert profiles is not None
    # One node, one worker. A port of its own, since other tests have clusters too.
    text = script[1].replace("/shared/", f"{tmp_path}/").replace("* 4", "* 1")
    written(tmp_path / "job", text.replace("dask scheduler", "dask scheduler --port 0 --no-dashboard"))
    (tmp_path / "cluster.yaml").write_text(profiles[1].replace("/shared/", f"{tmp_path}/"))
    commands = tmp_path / "bin"
    commands.mkdir()
    written(commands / "srun", SRUN)
    written(commands / "tilewright", CLIENT)
    (commands / "dask").symlink_to(Path(sys.executable).with_name("dask"))
    a, b = rng.integers(0, 99, (1024, 64)), rng.integers(0, 99, (64, 1024))
    for name, values, chunks in (("A", a, (128, 64)), ("B", b, (64, 128))):
        array = zarr.create_array(
            tmp_path / f"{name}.zarr", shape=values.shape, chunks=chunks, dtype=values.dtype
        )
        array[...] = values
    return tmp_path


def run(job: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script. This returns only when all processes that it started have closed their outputs."""
    path = f"{job / 'bin'}{os.pathsep}{os.environ['PATH']}"
    slurm = {"SLURM_SUBMIT_DIR": str(job), "SLURM_NNODES": "1"}
    with subprocess.Popen(
        [str(job / "job")],
        cwd=job,
        env=os.environ | slurm | {"PATH": path} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=120)
        finally:
            with suppress(ProcessLookupError):  # it has ended, as it should
                os.killpg(process.pid, signal.SIGKILL)  # a worker ends when its scheduler has
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@pytest.mark.slow
def test_a_job_ends_what_it_started_and_goes_on_where_a_signal_stopped_it(job: Path) -> None:
    stopped = run(job, UNITS_UNTIL_INTERRUPT="3", INTERRUPT_BY="shell")
    assert stopped.returncode == 143, stopped.stderr
    assert stopped.stdout == ""
    told = re.search(r"^terminated: C\.zarr\.partial keeps (\d+) of \d+ tiles;", stopped.stderr, re.M)
    assert told is not None, stopped.stderr

    again = run(job, UNITS_UNTIL_INTERRUPT="0")
    assert again.returncode == 0, again.stderr
    report = json.loads(again.stdout)
    assert 3 <= int(told[1]) <= report["resumed"] < report["plan"]["tile_count"]
    a, b, c = (zarr.open_array(job / f"{name}.zarr", mode="r")[...] for name in "ABC")
    np.testing.assert_array_equal(c, a @ b)


@pytest.mark.more
def test_a_job_has_the_status_of_its_client(job: Path) -> None:
    (job / "C.zarr").mkdir()
    (job / "C.zarr" / "own").touch()
    failed = run(job, UNITS_UNTIL_INTERRUPT="0")
    assert failed.returncode == 1, failed.stderr
    assert re.search("^error: .*C.zarr", failed.stderr, re.M)
