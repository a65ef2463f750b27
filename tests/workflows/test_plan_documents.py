"""Plans of `duplicates` and `signals`: what would be read, by whom, and what would be refused; nothing is written."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tilewright.kernels.numbers import format_nbytes
from tilewright.pipeline.duplicates.options import options_of
from tilewright.pipeline.forecast.documents import USUAL, plan_documents
from tilewright.pipeline.forecast.rates import LEAST_RUN_SECONDS
from tilewright.pipeline.plan.inputs import WorkerFacts
from tilewright.pipeline.signals import job as signals_job
from tilewright.pipeline.text.corpus import Corpus, Document, Status
from tilewright.pipeline.text.formats.reading import Reading
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


LANE, STEP, CHUNK = 2 * (2**24 + 64), 2**25, 2**27
SIGNER = 2**22 + 2**16 + 8 * (2 * 2**17 + 2**21 + 2**12) + 4 * (2**23 + 2**19)
"""Tables, what each document has beside its numbers, edges, units, keys and tiles of 16 MiB; signatures, and sums."""


@pytest.mark.parametrize(
    ("sizes", "codec", "split_on", "unit", "nbytes"),
    [
        # A thread for each file, which has two blocks and a signer: words and where they begin.
        ([2**30] * 3, "gzip", None, "word", 2 * (LANE + SIGNER + 4 * (2**23 + 2**24))),
        ([2**30], "gzip", None, "character", LANE + SIGNER + 4 * (2**23 + 2**25)),
        ([0], None, None, "word", LANE + 2**22 + 1 + 8 * (2 + 2 + 2**5 + 1) + 4 * (2**7 + 1 + 2**5 + 2)),
        # Four chunks: their texts, newlines, edges, ends and digests of lines, and a signer of some of them.
        (
            [2**33],
            None,
            "line",
            "character",
            2 * 2 * (2**23 + 64)
            + 4 * (CHUNK + 8 * (2**22 + 2**13) + 8 * (2 * 2**22 + 2**23))
            + 4 * (2**22 + 2**18 + 8 * (2 * 2**19 + 2**18 + 2**23 + 2**14))
            + 4 * 4 * (2**25 + 2**22 + 2**25 + 2**27),
        ),
    ],
)
def test_memory_of_a_gpu_is_of_blocks_and_chunks(
    sizes: list[int], codec: str | None, split_on: str | None, unit: str, nbytes: int
) -> None:
    documents = tuple(Document(f"d{place}", f"/d{place}", size, codec) for place, size in enumerate(sizes))
    corpus = Corpus(documents, (), tuple(Status(0, 0) for _ in sizes), 0.0, Reading(split_on=split_on))
    cpu = WorkerFacts("cpu", "CPU", None, None, 2, 2, 2, "tcp://h:1", None, 2)
    gpu = replace(cpu, device="cuda", name="a GPU", device_free_nbytes=2**36)
    options = options_of(
        threshold=0.8, shingle=unit, ngram=5, casefold=False, normalise=None, num_perm=128, bands=21, rows=6,
        seed=1, hash="sha1", scheme="affine32", pairs="all", signatures=False,
    )  # fmt: skip
    planned = partial(plan_documents, corpus=corpus, document_nbytes=8)
    plan = planned("duplicates", workers=[gpu], options=options)
    assert plan.gpu_nbytes == nbytes
    assert f"at most {format_nbytes(nbytes)} of its GPU's, but for documents of more than 16 MiB" in str(plan)
    for other in (
        planned("duplicates", workers=[cpu], options=options),
        planned("signals", workers=[gpu]),
    ):
        assert other.gpu_nbytes == 0
        assert "GPU's" not in str(other)


def test_a_run_leaves_its_time(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals_job, "remember_count", lambda *given: kept.append(given))
    kept: list[tuple[object, ...]] = []
    run("signals", "corpus", "--exclude", "*.csv", "-q")
    ((kind, nbytes, workers, seconds),) = kept
    assert "signals of each document; plain" in str(kind)
    assert (nbytes, workers) == (2305, 1)
    assert isinstance(seconds, float)
    assert seconds < 100 * LEAST_RUN_SECONDS
