"""The manual page has what the commands say of themselves, and `man` finds it where a wheel puts it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import click
import pytest

import tilewright
from tilewright.workflows.cli import cli
from tilewright.workflows.commands.manual import manual

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/tilewright.1"


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == manual(cli, tilewright.__version__), "make man writes it anew"


def test_every_command_and_option_is_in_it() -> None:
    page = PAGE.read_text(encoding="utf-8").replace("\\-", "-")
    assert re.findall(r"^\.SS (\w+)", page, re.M) == list(cli.commands)
    for part in page.split("\n.SS ")[1:]:
        command = cli.commands[part.split()[0]]
        for one in command.params if not isinstance(command, click.Group) else ():
            assert not isinstance(one, click.Option) or f"\\fB{one.opts[0]}\\fR" in part


@pytest.mark.skipif(
    shutil.which("groff") is None, reason="there is no groff here; Debian's package groff has it"
)
def test_groff_has_nothing_to_say_of_it() -> None:
    ran = subprocess.run(
        ["groff", "-man", "-Tutf8", "-k", "-ww", "-z", PAGE], capture_output=True, text=True, check=True
    )
    assert ran.stderr == ""


@pytest.mark.skipif(
    shutil.which("man") is None, reason="there is no man here; Debian's package man-db has it"
)
def test_man_finds_it_beside_an_environments_commands(tmp_path: Path) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    ((place, files),) = settings["tool"]["setuptools"]["data-files"].items()
    assert files == ["docs/tilewright.1"]
    (tmp_path / "bin").mkdir()
    (tmp_path / place).mkdir(parents=True)
    shutil.copy(PAGE, tmp_path / place)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    environment.pop("MANPATH", None)
    ran = subprocess.run(
        ["man", "-w", "tilewright"], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.stdout.strip() == str(tmp_path / place / "tilewright.1"), ran.stderr
