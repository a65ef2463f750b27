"""The worked pages run as they stand, every cell in order, as ``make docs`` runs them for the site."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tilewright.workflows.cli import cli

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTEBOOK = "---\nfile_format: mystnb\n"
SHELL = "%%bash\n"
PICTURED = {"climate", "eofs", "genetics", "correlation", "neighbours", "corpora", "duplicates"}
"""Pages that draw something."""
QUICK = {"inputs"}
"""Run in every run, since it is no notebook; all others ``make docs`` runs too, also in CI."""


def pages() -> list[str]:
    """Those that are notebooks, and that on inputs, whose blocks are run by this test alone."""
    found = [path.stem for path in DOCS.glob("*.md") if path.read_text(encoding="utf-8").startswith(NOTEBOOK)]
    return sorted([*found, "inputs"])


def cells(page: str) -> list[str]:
    """The code that is run of a page: of a notebook its cells. Those of commands begin with the magic that has
    them run by a shell."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    if page != "inputs":
        found = re.findall(r"^```\{code-cell\} ipython3\n(.*?)^```", text, re.M | re.S)
        return [re.sub(r"^:.*\n", "", code, flags=re.M) for code in found]
    blocks = re.findall(r"^```(python|bash)\n(.*?)^```", text, re.M | re.S)
    return [code if kind == "python" else SHELL + code for kind, code in blocks]


@pytest.fixture
def without_windows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pictures are drawn, and shown nowhere."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


@pytest.mark.usefixtures("without_windows")
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if page in QUICK else pytest.mark.slow) for page in pages()]
)
def test_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    executed = cells(page)
    assert executed
    names: dict[str, object] = {}
    for cell in executed:
        if not cell.startswith(SHELL):
            exec(compile(cell, f"{page}.md", "exec"), names)
            continue
        for line in cell.removeprefix(SHELL).replace("\\\n", " ").splitlines():
            arguments = shlex.split(line, comments=True)
            assert arguments[0] == "tilewright"
            result = CliRunner().invoke(cli, arguments[1:])
            assert result.exit_code == 0, result.stderr


def test_worked_problems_have_pictures() -> None:
    assert set(pages()) >= PICTURED | QUICK
    for page in PICTURED:
        assert "plt.subplots(" in (DOCS / f"{page}.md").read_text(encoding="utf-8"), page
