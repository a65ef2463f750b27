"""Plans of `duplicates` and `signals`: what would be read, by whom, and what would be refused; nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tilewright.pipeline.forecast.documents import USUAL
from tilewright.pipeline.forecast.rates import LEAST_RUN_SECONDS
from tilewright.pipeline.signals import job as signals_job
from tilewright.workflows.cli import cli


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "some words"}\n' * 100)
    (folder / "b.txt").write_text("plain")
    (folder / "c.csv").write_text("text\nplain\n")
    return folder


def run(*words: str, status: int = 0) -> Result:
    made = CliRunner().invoke(cli, list(words))
    assert made.exit_code == status, made.output
    return made


@pytest.mark.parametrize(("command", "per_document"), [("duplicates", 16 + 48 + 8 * 21), ("signals", 264)])
def test_a_plan_says_what_a_run_would_take(corpus: Path, command: str, per_document: int) -> None:
    words = [command, "corpus", "--field", "text", "--plan-only", "--out", "out.json"]
    found = json.loads(run(*words, "-q", "--json").stdout)
    assert (found["work"], found["files"], found["document_nbytes"]) == (command, 3, per_document)
    assert [way["what"] for way in found["ways"]] == [
        "fields of JSON lines",
        "as whole texts, without fields",
    ]
    assert [(Path(name).name, why.split(",")[0]) for name, why in found["refused"]] == [
        ("c.csv", "it is CSV by its name")
    ]
    slow, fast = USUAL[command]
    nbytes = found["nbytes"]
    at_once = min(found["tasks"], found["pieces"])
    assert found["forecast"]["source"] == "usual"
    assert found["forecast"]["most_seconds"] == pytest.approx(nbytes / slow / at_once)
    assert found["forecast"]["least_seconds"] == pytest.approx(nbytes / fast / at_once)
    told = run(*words, "-q").stdout
    assert "written         the result to out.json" in told
    assert "1 file would end it: name them by --exclude, or say --on-error report" in told
    assert not Path("out.json").exists()
    Path("out.json").write_text("something")
    assert "without --plan-only this would be refused" in run(*words).stderr
    assert "--report tells of a run" in run(*words, "--report", "r.html", status=2).stderr
    assert "- can be read once" in run(command, "-", "--plan-only", status=1).stderr


def test_a_run_leaves_its_time(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals_job, "remember_count", lambda *given: kept.append(given))
    kept: list[tuple[object, ...]] = []
    run("signals", "corpus", "--exclude", "*.csv", "-q")
    ((kind, nbytes, workers, seconds),) = kept
    assert "signals of each document; plain" in str(kind)
    assert (nbytes, workers) == (2305, 1)
    assert isinstance(seconds, float)
    assert seconds < 100 * LEAST_RUN_SECONDS
