"""Files that cannot be counted: left out whole and listed where that is asked for, and counted once they are mended."""

from __future__ import annotations

import errno
import gzip
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from click.testing import CliRunner
from distributed import Client

import tilewright as tw
from tests.pipeline.text.formats.test_layers import tarred
from tests.pipeline.text.test_counting import cpu_workers, dense, naive_counts
from tilewright.kernels.histograms.token_kinds import any_kind_named
from tilewright.pipeline.errors import CompressedError, CorpusError
from tilewright.pipeline.text import blocks, corpus
from tilewright.pipeline.text.corpus import Document, Look, list_corpus
from tilewright.pipeline.text.counting import count_corpus
from tilewright.pipeline.text.formats import listing
from tilewright.pipeline.text.formats.reading import reading_of
from tilewright.pipeline.text.histogram import Histogram
from tilewright.pipeline.text.kept_counts import State, open_counts
from tilewright.workflows.cli import cli

GOOD = {f"{i:02}.txt.gz": b"good %d\n" % i * 100 for i in range(12)}
BAD = {
    "03bad.gz": gzip.compress(b"bad" * 1000)[:-4],
    "07bad.gz": b"no gzip",
    "09bad.tar": tarred([("a", b"x" * 3000)])[:2000],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "corpus"
    place.mkdir()
    for name, text in GOOD.items():
        (place / name).write_bytes(gzip.compress(text))
    for name, data in BAD.items():
        (place / name).write_bytes(data)
    return place


def counted(
    client: Client,
    folder: Path,
    by: str,
    *,
    per_document: bool = False,
    state: Path | None = None,
    on_error: str = "report",
    **options: object,
) -> Histogram:
    reading = reading_of(on_error=on_error, **options)  # type: ignore[arg-type]
    kind = any_kind_named(by)
    keeping = None if state is None else State(state)
    with open_counts(
        keeping, kind, per_document=per_document, reading=reading, listener=lambda _: None
    ) as record:
        return count_corpus(
            client,
            list_corpus([folder], reading=reading),
            kind,
            cpu_workers(client),
            per_document=per_document,
            listener=lambda _: None,
            record=record,
            on_error=on_error,
        )


@pytest.mark.sample(1)
@pytest.mark.parametrize("by", ["byte", "codepoint", "word"])
@pytest.mark.parametrize("per_document", [False, True])
@pytest.mark.parametrize("nbytes", [60, 2**25])
def test_bad_files_are_left_out_and_listed(
    without_dask: Client, folder: Path, by: str, per_document: bool, nbytes: int
) -> None:
    with dask.config.set({"tilewright.piece-nbytes": nbytes}):
        found = counted(without_dask, folder, by, per_document=per_document)
    assert [Path(name).name for name, _ in found.bad] == list(BAD)
    assert all(Path(name).name in why for name, why in found.bad)
    assert [Path(name).name for name in found.documents] == list(GOOD)
    assert found.document_count == len(GOOD)
    assert found.nbytes == sum(map(len, GOOD.values()))
    if by != "word":
        table = np.stack([dense(naive_counts(text, by), found.bins) for text in GOOD.values()])
        np.testing.assert_array_equal(np.asarray(found.counts), table if per_document else table.sum(axis=0))
    else:
        words = sum((Counter(text.split()) for text in GOOD.values()), Counter())
        assert found.tokens is not None
        assert dict(zip(found.tokens, found.totals.tolist(), strict=True)) == words


def test_the_first_bad_file_ends_a_count_and_names_those_beside_it(
    without_dask: Client, folder: Path
) -> None:
    with pytest.raises(
        CompressedError,
        match=r"03bad\.gz cannot .*other file.? beside it .* bad too .--on-error report.*: .*07bad\.gz",
    ) as told:
        counted(without_dask, folder, "byte", on_error="stop")
    assert "09bad.tar:a: the archive was cut short" in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("per_document", [False, True])
def test_a_file_of_which_one_part_is_bad_counts_nowhere(
    without_dask: Client, tmp_path: Path, per_document: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that were counted before are let go again."""
    (tmp_path / "large").write_bytes(b"abcdefgh" * 500)
    (tmp_path / "other").write_bytes(b"z" * 50)
    real = blocks.read_range

    def read(document: Document, start: int, stop: int, target: np.ndarray, look: Look | None = None) -> None:
        if document.name.endswith("large") and start <= 2500 < stop:
            raise CorpusError(f"cannot read {document.name}: a bad sector; leave it out")
        real(document, start, stop, target, look)

    monkeypatch.setattr(blocks, "read_range", read)
    with dask.config.set({"tilewright.piece-nbytes": 300}):
        found = counted(without_dask, tmp_path, "byte", per_document=per_document)
    assert [Path(name).name for name, _ in found.bad] == ["large"]
    assert [Path(name).name for name in found.documents] == ["other"]
    assert int(found.totals.sum()) == int(found.totals[ord("z")]) == found.nbytes == 50


@pytest.mark.parametrize("per_document", [False, True])
@pytest.mark.parametrize("nbytes", [60, 2**25])
def test_a_state_goes_on_with_files_that_were_mended(
    without_dask: Client, folder: Path, tmp_path: Path, per_document: bool, nbytes: int
) -> None:
    lines = b"".join(json.dumps({"text": f"t{i}"}).encode() + b"\n" for i in range(5))
    for name in [*GOOD, *BAD]:
        (folder / name).unlink()
    for i in range(4):
        (folder / f"{i}.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "2.jsonl.gz").write_bytes(gzip.compress(lines)[:-5])
    with dask.config.set({"tilewright.piece-nbytes": nbytes}):
        first = counted(
            without_dask, folder, "byte", per_document=per_document, state=tmp_path / "s", field="text"
        )
        assert len(first.bad) == 1
        assert first.document_count == 15
        (folder / "2.jsonl.gz").write_bytes(gzip.compress(lines))
        again = counted(
            without_dask, folder, "byte", per_document=per_document, state=tmp_path / "s", field="text"
        )
        whole = counted(without_dask, folder, "byte", per_document=per_document, field="text")
    assert not again.bad
    assert again.document_count == 20
    assert again.documents == whole.documents
    np.testing.assert_array_equal(again.counts, whole.counts)


def test_the_command_lists_them_and_exits_with_three(folder: Path) -> None:
    result = CliRunner().invoke(
        cli, ["histogram", str(folder), "--device", "cpu", "--json", "--on-error", "report"]
    )
    assert result.exit_code == 3
    assert len([line for line in result.stderr.splitlines() if line.startswith("left out: ")]) == 3
    assert [Path(name).name for name, _ in json.loads(result.stdout)["bad"]] == list(BAD)


@pytest.fixture
def closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder below the corpus that nobody can list."""
    inside = folder / "05closed" / "deep"
    inside.mkdir(parents=True)
    (inside / "lost").write_text("lost")
    list_folder = os.scandir

    def scandir(path: str) -> Any:
        if os.fspath(path).endswith("05closed"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return list_folder(path)

    monkeypatch.setattr(listing.os, "scandir", scandir)
    return inside.parent


def test_folders_that_cannot_be_listed_are_left_out_and_listed(
    client: Client, folder: Path, closed: Path
) -> None:
    with pytest.raises(CorpusError, match=r"cannot list .*05closed: Permission denied; .*--on-error report"):
        tw.histogram(folder, cluster=client)
    told = f"cannot list the folder {closed}: Permission denied"
    found = tw.histogram(folder, cluster=client, on_error="report", by="line")
    assert [Path(name).name for name, _ in found.bad] == ["05closed", *BAD]
    assert found.bad[0][1].startswith(told)
    assert found.document_count == len(GOOD)
    assert tw.signals(folder, cluster=client, on_error="report").bad == found.bad
    assert tw.duplicates(folder, cluster=client, on_error="report").bad == found.bad
    with pytest.raises(CorpusError, match=f"no files in {closed}; .* at least: {told}"):
        tw.histogram(closed, cluster=client, on_error="report")


def test_a_file_that_is_gone_when_it_is_looked_at_is_none_of_the_corpus(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a program's temporary files are, where the corpus grows while it is counted."""
    kept = len(list_corpus([folder]).documents)
    (folder / "03passing.tmp").write_text("gone")
    below = corpus.below

    def removed_then(*given: Any) -> Any:
        for found in below(*given):
            (folder / "03passing.tmp").unlink(missing_ok=True)
            yield found

    monkeypatch.setattr(corpus, "below", removed_then)
    found = list_corpus([folder])
    assert len(found.documents) == kept
    assert "1 file gone again when their folder had been listed" in found.notes
    with pytest.raises(CorpusError, match=r"cannot find .*03passing.tmp: No such file"):
        list_corpus([folder, folder / "03passing.tmp"])


def test_a_file_that_cannot_be_looked_at_is_left_out_where_that_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system of which a part does not answer."""
    look = os.stat

    def stat(path: Any, *given: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("03lost"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return look(path, *given, **options)

    (folder / "03lost").write_text("lost")
    monkeypatch.setattr(corpus.os, "stat", stat)
    with pytest.raises(CorpusError, match=r"03lost: Input/output error"):
        list_corpus([folder])
    found = list_corpus([folder], reading=reading_of(on_error="report"))
    assert [(Path(name).name, why.partition(": ")[2]) for name, why in found.unlisted] == [
        ("03lost", "Input/output error")
    ]


@pytest.mark.parametrize("pattern", ["05closed/", "05*/", "05closed/**", "05c**"])
def test_folders_that_are_left_out_are_not_looked_into(folder: Path, closed: Path, pattern: str) -> None:
    found = list_corpus([folder], reading=reading_of(exclude=pattern))
    assert len(found.documents) == len(GOOD) + len(BAD)
    assert "1 folder left out by exclude" in found.notes


def test_what_only_names_in_a_folder_are_left_out_of_is_looked_into(folder: Path) -> None:
    (folder / "in" / "in").mkdir(parents=True)
    (folder / "in" / "a.txt").write_text("a")
    (folder / "in" / "in" / "b.txt").write_text("b")
    for exclude, left in (("in/*", ["b.txt"]), ("a.txt", ["b.txt"]), ("in", ["a.txt", "b.txt"])):
        found = list_corpus([folder], reading=reading_of(exclude=exclude, include="*.txt"))
        assert [Path(each.name).name for each in found.documents] == left
    assert not any("folder left out" in note for note in found.notes)
