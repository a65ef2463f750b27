"""The benchmark of a command's start compares products before it times processes."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tilewright.workflows.bench import start
from tilewright.workflows.bench.common import WrongAnswer
from tilewright.workflows.cli import cli


@pytest.mark.more
def test_each_way_to_store_has_the_script_and_both_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "CODECS", {"zstd": "auto"})
    timed, found = start._timed, dict[tuple[str, ...], tuple[float, float]]()

    def timed_once(command: list[str]) -> tuple[float, float]:
        """The second turn takes as long as the first: three processes instead of six."""
        if tuple(command) not in found:
            found[tuple(command)] = timed(command)
        return found[tuple(command)]

    monkeypatch.setattr(start, "_timed", timed_once)
    result = CliRunner().invoke(cli, ["bench", "start", "--side", "5", "--rounds", "1", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["side"], report["rounds"]) == (5, 1)
    assert [(row["storage"], row["verified"]) for row in report["rows"]] == [("zstd", True), ("zstd", False)]
    script = report["script"]["zstd"]
    for row in report["rows"]:
        assert row["cpu_ratio"] == pytest.approx(row["cpu_seconds"] / script["cpu_seconds"])
        assert row["wall_ratio"] == pytest.approx(row["wall_seconds"] / script["wall_seconds"])


def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "SCRIPT", start.SCRIPT.replace("@", "+"))
    with pytest.raises(WrongAnswer, match="plain, script: an element is"):
        start.run_start(4, rounds=1)
