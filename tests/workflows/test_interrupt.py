"""Ctrl-C: the exit status, a word on what was kept, nothing half-written, and the same command going on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import dask
import numpy as np
import pytest
import zarr

from tilewright.pipeline.cluster import open_cluster

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


@pytest.mark.parametrize("profile", ["local", "cpu"])
def test_a_product_that_was_stopped_goes_on(tmp_path: Path, rng: np.random.Generator, profile: str) -> None:
    values = rng.integers(0, 99, (2048, 64))
    array = zarr.create_array(
        str(tmp_path / "a.zarr"), shape=values.shape, chunks=(256, 64), dtype=values.dtype
    )
    array[...] = values
    command = ["matmul", "a.zarr", "a.zarr", "c.zarr", "--transpose-b", "--profile", profile]
    command += ["--device-memory", "3MiB", "--json"]
    result = interrupted(*command, cwd=tmp_path)
    assert result.returncode == 130, result.stderr
    assert result.stdout == ""
    assert result.stderr == (
        "interrupted: finished tiles are kept in c.zarr.partial; the same command goes on from them\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zarr", "c.zarr.partial"]
    again = subprocess.run(
        [str(Path(sys.executable).with_name("tilewright")), *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert again.returncode == 0, again.stderr
    report = json.loads(again.stdout)
    assert STOP_AFTER <= report["resumed"] < report["plan"]["tile_count"]
    np.testing.assert_array_equal(zarr.open_array(str(tmp_path / "c.zarr"))[...], values @ values.T)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zarr", "c.zarr"]


def test_a_histogram_that_was_stopped_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"text" * 1000)
    before = sorted(tmp_path.iterdir())
    result = interrupted(
        "histogram",
        "text",
        "--out",
        "f.csv",
        "--plot",
        "f.png",
        cwd=tmp_path,
        DASK_TILEWRIGHT__PIECE_NBYTES="10",
    )
    assert result.returncode == 130, result.stderr
    assert result.stdout == ""
    assert result.stderr == "interrupted: nothing was written\n"
    assert sorted(tmp_path.iterdir()) == before


def test_the_setting_that_cuts_pieces_comes_from_the_environment() -> None:
    """Else the test above would stop a single piece after its end."""
    from tilewright.pipeline import config

    with dask.config.set(dask.config.collect_env({"DASK_TILEWRIGHT__PIECE_NBYTES": "10"})):
        assert config.get("piece-nbytes") == 10


def blocked() -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_worker_processes_are_deaf_to_ctrl_c_from_their_first_moment() -> None:
    """A signal while they start would be told in pages of tracebacks."""
    with open_cluster("cpu") as client:
        assert all(client.run(blocked).values())
    assert not blocked()
