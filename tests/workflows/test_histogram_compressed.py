"""``tilewright histogram`` decompresses by suffix, unless it is told not to."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from click.testing import CliRunner, Result

from tilewright.workflows.cli import cli


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["histogram", *words, "--device", "cpu", "--json"])


def test_raw_is_an_option(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"a" * 1000))
    found = json.loads(run(str(path)).stdout)
    assert found["nbytes"] == found["counts"][ord("a")] == sum(found["counts"]) == 1000
    raw = json.loads(run(str(path), "--raw").stdout)
    assert raw["nbytes"] == sum(raw["counts"]) == path.stat().st_size


def test_damage_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"a" * 1000)[:-1])
    result = run(str(tmp_path))
    assert result.exit_code == 1
    assert not result.stdout
    (line,) = [line for line in result.stderr.splitlines() if "a.gz" in line]
    assert "a.gz cannot be decompressed: it was cut short" in line
