"""What docs/slurm.md shows of a terminal is what the code prints there; `tests/slurm` runs such jobs under Slurm."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr
from click.testing import CliRunner

from tests.workflows.batch.test_follow import Story, noted, said
from tilewright.kernels.numbers import counted
from tilewright.workflows.batch import place
from tilewright.workflows.batch.folder import JobFolder, name_of
from tilewright.workflows.batch.slurm import Look
from tilewright.workflows.cli import cli

PAGE = (Path(__file__).parents[3] / "docs" / "slurm.md").read_text(encoding="utf-8")
SHOWN = [block.splitlines() for block in re.findall(r"^```text\n(.*?)^```", PAGE, re.M | re.S)]


def replayed(folder: Path, *steps: object) -> list[str]:
    story = Story(folder, *steps)  # type: ignore[arg-type]
    story.follower.tries = 10
    assert story.follower.follow() == 0
    return story.lines


def test_a_job_from_its_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(place, "is_quiet", lambda: False)
    place.tell(f"submitted as job 7; its files are in {JobFolder(tmp_path / name_of('matmul', 0.0)).path}")
    first, *others = SHOWN[0]
    told = capsys.readouterr().err.strip()
    assert re.sub(r"/\S+/\d+-\d+-", "F", told) == re.sub(r"/\S+/\d+-\d+-", "F", first)
    assert others[:-1] == replayed(
        tmp_path,
        Look("PENDING", "Priority", "2026-11-26T11:00:00"),
        Look("PENDING", "Resources"),
        noted("started", 1),
        Look("RUNNING", "None", "", "c[1-2]"),
        noted("ended", 1, 0),
        Look("RUNNING", "None", "", "c[1-2]"),
    )


def test_a_job_that_goes_on(tmp_path: Path) -> None:
    # What `kept_note` says of a plan of as many tiles.
    going_on = f"an earlier run finished 12 of {counted(64, 'tile')}; it goes on with the rest"
    assert SHOWN[2] == replayed(
        tmp_path,
        noted("started", 1),
        Look("RUNNING", "None", "", "c[1-2]"),
        noted("queued again", 1),
        Look("PENDING", "BeginTime", "2026-11-26T15:02:00"),
        noted("started", 2),
        Look("RUNNING", "None", "", "c[3-4]"),
        said(f"{going_on}\n"),
        noted("ended", 2, 0),
        Look("RUNNING", "None", "", "c[3-4]"),
    )


def test_what_the_command_says_in_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same product here, with as little memory, in numbers that depend on the machine alone."""
    monkeypatch.chdir(tmp_path)
    for name, shape in {"A": (2048, 512), "B": (512, 2048)}.items():
        zarr.create_array(f"{name}.zarr", data=np.ones(shape, np.float32), chunks=(256, 256))
    words = ["--chunks", "256", "--device-memory", "3MiB", "--device", "cpu", "--no-verify"]
    ran = CliRunner().invoke(cli, ["matmul", "A.zarr", "B.zarr", "C.zarr", *words])
    assert ran.exit_code == 0, ran.stderr
    told = next(line for line in ran.stderr.splitlines() if line.startswith("multiplying"))

    def without_numbers(text: str) -> str:
        return re.sub(r"[\d.]+ [KMG]iB", "SIZE", re.sub(r"\d+ (tiles?|workers?)|\d+ × \d+", "N", text))

    assert without_numbers(told) == without_numbers(SHOWN[0][-1])


def test_what_ctrl_c_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Callable[[], str]] = []
    monkeypatch.setattr(place, "on_interrupt", kept.append)
    monkeypatch.setattr(place, "follow", lambda folder, quiet: 0)
    monkeypatch.setattr(place, "is_quiet", lambda: True)
    place.follow_job(JobFolder(tmp_path), "7")
    assert [say() for say in kept] == SHOWN[1]
