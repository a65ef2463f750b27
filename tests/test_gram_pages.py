"""The worked pages about inputs and Gram matrices run as they stand: every block, in order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from tilewright.workflows.cli import cli

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.mark.parametrize("page", ["tutorial", "climate", "eofs", "genetics", "correlation", "inputs"])
def test_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(python|bash)\n(.*?)^```", text, re.M | re.S)
    assert len(blocks) >= 4
    names: dict[str, object] = {}
    for kind, code in blocks:
        if kind == "python":
            exec(code, names)
            continue
        for line in code.splitlines():
            result = CliRunner().invoke(cli, shlex.split(line)[1:])
            assert result.exit_code == 0, result.stderr
