"""What ``histogram --plan-only`` says is what a count would do, and nothing is written."""

from __future__ import annotations

import gzip
import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import tilewright as tw
from tilewright.kernels.histograms.token_kinds import TABLE_NBYTES, any_kind_named
from tilewright.pipeline.errors import OptionError, PlanError
from tilewright.pipeline.events import Caution, Event, WorkPlanned
from tilewright.pipeline.forecast.counts import plan_count
from tilewright.pipeline.plan.inputs import WorkerFacts
from tilewright.pipeline.text import totals
from tilewright.pipeline.text.corpus import Corpus, Document, Status
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.workflows.cli import cli


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one file of each kind, in the working directory."""
    monkeypatch.chdir(tmp_path)
    folder = Path("corpus")
    folder.mkdir()
    (folder / "plain.txt").write_bytes(b"some words " * 10_000)
    (folder / "empty.txt").touch()
    (folder / "wide.txt").write_bytes("words".encode("utf-16"))
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a b"}\n' * 9))
    with tarfile.open(folder / "all.tar.bz2", "w:bz2") as archive:
        archive.add(folder / "plain.txt", "plain.txt")
    return folder


def run(*words: str) -> Any:
    result = CliRunner().invoke(cli, ["histogram", *words, "--device", "cpu", "--plan-only"])
    assert result.exit_code == 0, result.stderr
    return result


def test_the_way_each_file_is_read(corpus: Path) -> None:
    plan = tw.plan_histogram(corpus, device="cpu")
    assert {(way.what, way.files) for way in plan.ways} == {
        ("as stored", 2),
        ("decoded from UTF-16", 1),
        ("decompressed by gzip", 1),
        ("members of a tar archive, decompressed by bzip2", 1),
    }
    assert sum(way.nbytes for way in plan.ways) == plan.nbytes
    assert plan.looked_at == plan.files == 5
    fields = tw.plan_histogram(corpus, field="text", exclude="*.txt", device="cpu")
    assert [way.what for way in fields.ways][-1] == "decompressed by gzip, fields of JSON lines"
    assert {way.what for way in tw.plan_histogram(corpus, raw=True, device="cpu").ways} == {"as stored"}


def test_pieces_are_those_of_the_count(corpus: Path) -> None:
    planned: list[Event] = []
    with dask.config.set({"tilewright.piece-nbytes": "32 KiB"}):
        plan = tw.plan_histogram(corpus, by="letter", device="cpu")
        tw.histogram(corpus, by="letter", device="cpu", listener=planned.append)
    (work,) = (event for event in planned if isinstance(event, WorkPlanned))
    assert (plan.pieces, plan.left_nbytes) == (work.total, work.nbytes)
    assert plan.piece_nbytes <= 2**15
    assert plan.counts_nbytes == 26 * 8
    assert json.loads(json.dumps(plan.to_json()))["by"] == "letter"


def test_what_is_kept_is_not_counted_again_and_nothing_is_written(corpus: Path) -> None:
    before = tw.plan_histogram(corpus, by="word", state="kept", device="cpu")
    assert before.kept == 0
    assert not os.path.exists("kept"), "a plan makes no folder"
    tw.histogram(corpus, by="word", state="kept", device="cpu")
    held = Path("kept/tilewright-counts.jsonl").read_bytes()
    plan = tw.plan_histogram(corpus, by="word", state="kept", device="cpu")
    assert (plan.kept, plan.pieces, plan.left_nbytes) == (before.pieces, 0, 0)
    (corpus / "new.txt").write_text("new")
    assert tw.plan_histogram(corpus, by="word", state="kept", device="cpu").left_nbytes == 3
    anew = tw.plan_histogram(corpus, by="word", state="kept", resume=False, device="cpu")
    assert anew.kept == 0
    assert Path("kept/tilewright-counts.jsonl").read_bytes() == held
    assert sorted(os.listdir()) == ["corpus", "kept"]


def test_what_would_be_refused_is_named(corpus: Path) -> None:
    (corpus / "bad.txt.gz").write_bytes(b"no gzip")
    (corpus / "page.pdf").write_bytes(b"%PDF-1.7")
    plan = tw.plan_histogram(corpus, device="cpu")
    assert plan.refused == ((str(corpus / "bad.txt.gz"), "its name says gzip, and its first bytes do not"),)
    assert "1 file would end it" in str(plan)
    with pytest.raises(tw.CorpusError, match=r"bad\.txt\.gz"):
        tw.histogram(corpus, device="cpu")
    found = tw.histogram(corpus, on_error="report", device="cpu")
    assert [name for name, _ in found.bad] == [name for name, _ in plan.refused]
    assert "1 file would be left out" in str(tw.plan_histogram(corpus, on_error="report", device="cpu"))
    fields = tw.plan_histogram(corpus, field="text", device="cpu")
    assert dict(fields.refused)[str(corpus / "page.pdf")] == ("it is like a PDF, of which no field is read")
    assert str(corpus / "plain.txt") not in dict(fields.refused)
    assert any(way.what == "as whole texts, without fields" for way in fields.ways)


def test_a_file_that_may_not_be_read_is_refused(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    can = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: can(path, mode) and not str(path).endswith("plain.txt")
    )
    plan = tw.plan_histogram(corpus, device="cpu")
    assert plan.refused == ((str(corpus / "plain.txt"), "this process may not read it"),)


def test_the_command_says_where_it_would_write_and_what_is_refused_there(corpus: Path) -> None:
    told = run("corpus", "--by", "word", "--out", "h.csv", "--plot", "h.png")
    assert "counts to h.csv, plot to h.png, finished pieces kept in h.csv.pieces" in told.stdout
    assert "it fits the memory" in told.stdout
    for words, why in (
        (("--out", "nowhere/h.csv"), "output: there is no folder nowhere"),
        (("--out", str(corpus / "plain.txt") + "/h.csv"), "output: "),
        (("--state", "corpus"), "state: corpus holds other things"),
        (("--state", "nowhere/kept"), "state: there is no folder nowhere"),
        (("--state", str(corpus / "plain.txt")), f"state: {corpus / 'plain.txt'} is no folder"),
    ):
        assert f"without --plan-only this would be refused: {why}" in run("corpus", *words).stderr
    assert sorted(os.listdir()) == ["corpus"]


def test_a_state_of_other_counts_would_be_refused(corpus: Path) -> None:
    tw.histogram(corpus, by="word", state="kept", device="cpu")
    told: list[Event] = []
    plan = tw.plan_histogram(corpus, by="letter", state="kept", device="cpu", listener=told.append)
    assert plan.kept == 0
    (caution,) = (event.message for event in told if isinstance(event, Caution))
    assert 'by is "word" there and "letter" here' in caution


def test_what_comes_once_is_not_planned_for(corpus: Path) -> None:
    os.mkfifo("pipe")
    for path in ("-", "pipe"):
        with pytest.raises(OptionError, match=f"^{path} can be read once"):
            tw.plan_histogram(path, device="cpu")


def of(*sizes: int, codec: str | None = None) -> Corpus:
    documents = tuple(Document(f"d{place}", f"/d{place}", size, codec) for place, size in enumerate(sizes))
    return Corpus(documents, (), tuple(Status(0, 0) for _ in sizes), 0.0, Reading())


def workers(count: int, threads: int) -> list[WorkerFacts]:
    return [
        WorkerFacts("cpu", "CPU", None, 10**9, 1, threads, threads, f"tcp://h:{place}", None, threads)
        for place in range(count)
    ]


@given(st.lists(st.integers(0, 5 * 2**20), min_size=1, max_size=9), st.integers(1, 3), st.integers(1, 4))
def test_memory_of_a_worker_is_of_the_largest_pieces_it_may_hold(
    sizes: list[int], count: int, threads: int
) -> None:
    plan = plan_count(of(*sizes), any_kind_named("byte"), workers(count, threads), per_document=False)
    assert plan.left_nbytes == sum(sizes)
    assert (plan.workers, plan.tasks) == (count, count * threads)
    counts = 8 * 256
    most = threads * (plan.piece_nbytes + 64 + 2 * counts)
    assert threads * plan.piece_nbytes <= plan.worker_nbytes <= most + 12 * counts


def test_memory_for_what_is_decompressed_is_a_buffer_for_each_thread() -> None:
    small = plan_count(
        of(1000, 7000, codec="gzip"), any_kind_named("word"), workers(1, 3), per_document=False
    )
    assert small.worker_nbytes == 3 * (2**25 + 64)
    assert not small.counts_known


@pytest.mark.parametrize(("by", "tables"), [("byte", 0), ("word", 3 * TABLE_NBYTES)])
def test_memory_of_a_gpu_is_of_texts_and_tables(by: str, tables: int) -> None:
    kind = any_kind_named(by)
    (cpu,) = workers(1, 3)
    gpu = replace(cpu, device="cuda", name="a GPU")
    plan = plan_count(of(2**34), kind, [gpu], per_document=False)
    lane, step = 2 * (2**23 + 64), 2**25
    steps = -(-(plan.piece_nbytes + 2**16) // step) * step
    assert plan.gpu_nbytes == 3 * steps + tables + lane * plan.threads
    assert "of its GPU's" in str(plan)
    assert plan_count(of(2**34), kind, [cpu], per_document=False).gpu_nbytes == 0
    packed = plan_count(of(2**34, codec="gzip"), kind, [gpu], per_document=False)
    assert packed.gpu_nbytes == (0 if tables else lane * packed.threads)


@pytest.mark.parametrize(
    ("sizes", "threads", "chunks", "texts"),
    [
        ((2**34,), 1, (4, 2**27, 2**25 + 2**16 + 2**17), (1, 2**30)),
        ((5 * 2**20, 3 * 2**20), 1, (1, 2**25, 2**25 + 2**12 + 2**17), (1, 2**25)),
        ((5 * 2**20, 3 * 2**20), 2, (2, 2**25, 2**25 + 2**12 + 2**17), (2, 2**25)),
        ((2**21, 2**10), 2, (1, 2**25, 2**24 + 2**10 + 2**17), (1, 2**25)),
        ((2**21 + 1,), 2, (1, 2**25, 2**25 + 2**11 + 2**17), (1, 2**25)),
        ((150 * 2**20,) * 2, 2, (4, 2**27, 2**25 + 2**16 + 2**17), (2, 160 * 2**20)),
        ((2**19,), 1, None, None),
    ],
)
def test_memory_of_a_gpu_is_of_chunks_of_json_lines(
    sizes: tuple[int, ...],
    threads: int,
    chunks: tuple[int, int, int] | None,
    texts: tuple[int, int] | None,
) -> None:
    """How many chunks of how many bytes, in steps of 32 MiB, what says where their lines end, and what is found of each
    file; and of words how many texts, of how many bytes."""
    gpu = replace(workers(1, threads)[0], device="cuda", name="a GPU")
    corpus = replace(of(*sizes, codec="text"), reading=Reading(fields=("text",)))
    byte, lane = any_kind_named("byte"), 2 * (2**23 + 64)
    plan = plan_count(corpus, byte, [gpu], per_document=False)
    words = plan_count(corpus, any_kind_named("word"), [gpu], per_document=False)
    if chunks is None or texts is None:
        assert plan.gpu_nbytes == lane * plan.threads
        assert words.gpu_nbytes == 0
    else:
        count, chunk, lines = chunks
        assert plan.gpu_nbytes == count * (2 * chunk + lines) + lane * plan.threads
        tables = threads * TABLE_NBYTES
        assert (
            words.gpu_nbytes == count * (chunk + lines) + texts[0] * texts[1] + tables + lane * words.threads
        )
    several = replace(corpus, reading=Reading(fields=("text", "id")))
    other = plan_count(several, byte, [gpu], per_document=False)
    assert other.gpu_nbytes == lane * other.threads
    # 32 MiB of rows of 256 bins, and where their documents begin.
    other = plan_count(corpus, byte, [gpu], per_document=True)
    assert other.gpu_nbytes == (lane + 2**25 + 8 * (2**14 + 1)) * other.threads


def test_counts_that_would_not_fit_are_refused() -> None:
    assert totals.most_nbytes(7, 11, per_document=True, allowed=1000) == (7 * 11 * 8, True)
    assert totals.most_nbytes(7, 65536, per_document=True, allowed=1000) == (1000, False)
    assert totals.most_nbytes(1, None, per_document=False, allowed=1000) == (500, False)
    with pytest.raises(PlanError, match="7 documents × 11 bins take 616 B, and 600 B"):
        totals.most_nbytes(7, 11, per_document=True, allowed=600)


def test_json_lines_without_a_field_are_told_of(corpus: Path) -> None:
    """Their keys count as words then, which nobody who has such shards means."""
    told = f"{corpus / 'lines.jsonl.gz'}: JSON lines, counted with all that stands in them: name a field (--field)"
    assert any(note.startswith(told) for note in tw.plan_histogram(corpus, by="word", device="cpu").notes)
    assert not tw.plan_histogram(corpus, field="text", include="*.gz", device="cpu").notes[1:]


def test_of_many_files_names_decide(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.pipeline.text.formats import ways

    looked: list[str] = []

    def head(path: str) -> bytes:
        looked.append(path)
        return Path(path).read_bytes()[:512]

    documents = [
        Document(str(path), str(path.resolve()), path.stat().st_size) for path in sorted(corpus.iterdir())
    ]
    found = ways.ways_of(documents, Reading(), most=2, head=head)
    assert found.looked_at == 2
    assert len(looked) <= 2
    assert sum(way.files for way in found.ways) == len(documents)
