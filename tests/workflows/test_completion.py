"""What Tab completes: asked of click as a shell asks it, and in real shells, in a terminal."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from tilewright.kernels.choices import CODECS, KINDS_OF_HISTOGRAM, PRECISIONS
from tilewright.pipeline import config
from tilewright.workflows.cli import cli

PAGE = (Path(__file__).resolve().parents[2] / "docs/reference.md").read_text(encoding="utf-8")
PATIENCE_SECONDS = 20
"""How long a shell may take to show what it completes on a machine with much else to do."""


def completed(line: str) -> list[tuple[str, str]]:
    """What stands behind a line whose last word is not finished: type and value of each item."""
    *words, incomplete = line.split(" ")
    found = ShellComplete(cli, {}, "tilewright", "_TILEWRIGHT_COMPLETE").get_completions(words, incomplete)
    return [(item.type, item.value) for item in found]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with profiles."""
    monkeypatch.chdir(tmp_path)
    for name, own in (("cluster.yaml", "my_laptop"), ("other.yaml", "my_gpus")):
        Path(name).write_text(f"profiles:\n  {own}:\n    kind: cpu\n")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("matm", {"matmul"}),
        ("matmul --transp", {"--transpose-a", "--transpose-b"}),
        ("matmul --precision ", set(PRECISIONS)),
        ("matmul --codec ", set(CODECS)),
        ("matmul --dtype comp", {"complex64", "complex128"}),
        ("histogram --by ", set(KINDS_OF_HISTOGRAM)),
        ("matmul --profile my", {"my_laptop"}),
        ("matmul --cluster-file other.yaml --profile my", {"my_gpus"}),
        ("matmul --cluster-file nowhere.yaml --profile my", set()),
        ("settings tilewright.panel", {"tilewright.panel-nbytes"}),
        ("settings tilewright.tiles ", {setting.name for setting in config.SETTINGS}),
        ("bench ge", {"gemm"}),
        ("histogram --field  --enco", {"--encoding"}),  # whose name is empty as yet
        ("jobs ", set()),
    ],
)
def test_words_are_completed(line: str, values: set[str], here: Path) -> None:
    found = completed(line)
    assert {kind for kind, _ in found} <= {"plain"}
    assert {value for _, value in found} >= values
    assert len(found) >= 1 or not values
    if line.rpartition(" ")[2] or not values:
        assert {value for _, value in found} == values


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("matmul a", "file"),
        ("matmul A.zarr b", "file"),
        ("gram x", "file"),
        ("gram --weights x", "file"),
        ("histogram c", "file"),
        ("histogram --out c", "file"),
        ("histogram --state c", "dir"),
        ("eofs --scratch c", "dir"),
        ("merge --subtract c", "file"),
        ("matmul --cluster-file c", "file"),
        ("matmul --row-scale c", "file"),
    ],
)
def test_paths_are_left_to_the_shell(line: str, kind: str, here: Path) -> None:
    assert completed(line) == [(kind, line.rpartition(" ")[2])]


def test_a_side_or_a_path_is_completed() -> None:
    assert completed("gram --center ro") == [("file", "ro"), ("plain", "rows")], (
        "a path first: Bash forgets else"
    )


FREE = {
    *("rows", "columns", "chunks", "shards", "sum_over", "add_up", "window"),
    *("field", "id_field", "include", "exclude", "stop_words"),
}
"""Options whose text nobody knows beforehand."""


def test_every_text_of_a_command_is_completed_or_known_to_be_free() -> None:
    plain = {
        f"{command.name} {parameter.name}"
        for command in cli.commands.values()
        for parameter in command.params
        if parameter.type is click.STRING and parameter.name not in FREE
    }
    assert plain == set()


# In a terminal ------------------------------------------------------------------------------------------


@dataclass
class Terminal:
    """A shell in a terminal of tmux's."""

    socket: str

    def tmux(self, *words: str) -> str:
        command = ["tmux", "-L", self.socket, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    def types(self, text: str, *keys: str) -> None:
        self.tmux("send-keys", "-l", text)
        for key in keys:
            self.tmux("send-keys", key)

    def shows(self, text: str) -> bool:
        """Whether a line of the screen ends in a text, before long."""
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            if any(line.rstrip().endswith(text) for line in self.screen().splitlines()):
                return True
            time.sleep(0.05)
        return False

    def screen(self) -> str:
        return self.tmux("capture-pane", "-p", "-J")


SHELLS = {
    "bash": ("--norc", "--noprofile"),
    "zsh": ("-f",),
    "fish": ("--no-config",),
}


@pytest.fixture(params=SHELLS)
def terminal(request: pytest.FixtureRequest, here: Path) -> Iterator[Terminal]:
    """A shell with the line of the page about it, in a folder with a few things to name."""
    shell = request.param
    for program in ("tmux", shell):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} here; Debian has it in the package of that name")
    command = shutil.which("tilewright", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("the command tilewright is not installed beside this Python")
    (here / "bin").mkdir()
    # Of this checkout, whatever the command beside Python is of.
    root = Path(__file__).resolve().parents[2]
    script = f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(root))} exec {shlex.quote(command)} "$@"\n'
    (here / "bin/tilewright").write_text(script)
    (here / "bin/tilewright").chmod(0o755)
    (here / "measured data.zarr").mkdir()
    (here / "kept_counts").mkdir()
    (here / "kept_file").touch()
    environment = {
        "PATH": f"{here / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(here),
        "LC_ALL": "C.UTF-8",
        "TERM": "xterm-256color",
        "SHELL": "/bin/sh",
    }
    terminal = Terminal(f"tilewright-{os.getpid()}")
    program = ["env", *(f"{name}={value}" for name, value in environment.items()), shell, *SHELLS[shell]]
    size = ["-x", "150", "-y", "40"]
    # The path of a socket may have some hundred characters.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="tmux-") as sockets:
        patch.setenv("TMUX_TMPDIR", sockets)
        terminal.tmux("-f", os.devnull, "new-session", "-d", *size, *program)
        try:
            if shell == "zsh":
                terminal.types("autoload -Uz compinit; compinit -u -D", "Enter")
            if shell != "fish":
                terminal.types("PS1='$ '", "Enter")
            (line,) = re.findall(rf"^\| {shell.title()}[^|]*\| `(.*?)` \| `", PAGE, re.M)
            terminal.types(line.replace(r"\|", "|"), "Enter")
            terminal.types("echo rea''dy", "Enter")
            assert terminal.shows("ready"), terminal.screen()
            yield terminal
        finally:
            terminal.tmux("kill-server")


@pytest.mark.timeout(600)
def test_tab_completes_in_a_shell(terminal: Terminal) -> None:
    for typed, shown in (
        ("tilewright matm", "tilewright matmul"),
        ("tilewright matmul meas", r"measured\ data.zarr/"),
        ("tilewright matmul --device-m", "matmul --device-memory"),
        ("tilewright matmul --precision sp", "--precision split"),
        ("tilewright matmul --profile my_l", "--profile my_laptop"),
        ("tilewright settings tilewright.pan", "settings tilewright.panel-nbytes"),
        ("tilewright histogram --state kept", "--state kept_counts/"),
        ("tilewright gram --center row", "--center rows"),
    ):
        terminal.types(typed, "Tab")
        assert terminal.shows(shown), f"{typed}: {terminal.screen()}"
        terminal.tmux("send-keys", "C-u")
        terminal.tmux("clear-history")
