"""Histograms of corpora equal ``collections.Counter`` over each document, wherever pieces are cut."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dask
import numpy as np
import pytest
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampling import examples
from tilewright.kernels.histograms import host
from tilewright.kernels.histograms.tokens import KINDS
from tilewright.pipeline.errors import CorpusError, PlanError
from tilewright.pipeline.events import Event, UnitDone, WorkDone, WorkPlanned
from tilewright.pipeline.plan.inputs import WorkerFacts
from tilewright.pipeline.text import counting, pieces, sparse_pieces
from tilewright.pipeline.text.blocks import Block
from tilewright.pipeline.text.corpus import list_corpus
from tilewright.pipeline.text.counting import count_corpus
from tilewright.pipeline.text.histogram import Histogram, label
from tilewright.pipeline.text.sparse_pieces import count_rows_of
from tilewright.pipeline.threads import run_all


def naive_counts(data: bytes, by: str) -> Counter[int]:
    """What one document holds, counted by Python."""
    if by == "byte":
        return Counter(data)
    if by == "ascii":
        return Counter(value for value in data if value < 128)
    if by == "letter":
        return Counter(ord(chr(v).upper()) - ord("A") for v in data if v < 128 and chr(v).isalpha())
    if by == "bigram":
        return Counter(first * 256 + second for first, second in itertools.pairwise(data))
    return Counter(map(ord, data.decode("utf-8", errors="replace")))


def dense(counter: Counter[int], bins: int) -> np.ndarray:
    counts = np.zeros(bins, np.int64)
    counts[list(counter)] = list(counter.values())
    return counts


def cpu_workers(client: Client) -> list[WorkerFacts]:
    """The client's workers, as they would describe themselves on a CPU, without asking them."""
    return [
        WorkerFacts("cpu", "CPU", None, None, 1, address=address, threads=threads)
        for address, threads in client.nthreads().items()
    ]


def count(
    client: Client, paths: list[Path], by: str, *, per_document: bool = False, listener=lambda _: None
) -> Histogram:  # type: ignore[no-untyped-def]
    return count_corpus(
        client,
        list_corpus(paths),
        KINDS[by],
        cpu_workers(client),
        per_document=per_document,
        listener=listener,
    )


# Whole and broken UTF-8, so that pieces and documents are cut within characters.
fragments = st.one_of(
    st.binary(max_size=6),
    st.text(max_size=4).map(lambda text: text.encode("utf-8", errors="surrogatepass")),
    st.sampled_from([b"\xf0\x9f\x92", b"\xe2\x82", b"\x80\x80\x80", b"\xed\xa0\x80", b"Zz aA\x00"]),
)
KNOWN = (
    b"\x1f\x8b",
    b"BZ",
    b"\xfd7",
    b"(\xb5",
    b'\x04"',
    b"PK",
    b"PAR1",
    b"ARR",
    b"WARC",
    b"\xff\xfe",
    b"\xfe\xff",
    b"]\0\0",
)
"""How files of known forms begin."""
documents = st.lists(fragments, max_size=8).map(b"".join).filter(lambda data: not data.startswith(KNOWN))


@pytest.mark.sample(1)
@pytest.mark.parametrize("by", list(KINDS))
@pytest.mark.parametrize("per_document", [False, True])
@settings(max_examples=examples(15))  # for each of ten variants
@given(corpus=st.lists(documents, min_size=1, max_size=5), nbytes=st.integers(1, 30))
def test_equals_counter(
    client: Client, by: str, per_document: bool, corpus: list[bytes], nbytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, dask.config.set({"tilewright.piece-nbytes": nbytes}):
        paths = [Path(folder, f"{i:03}") for i in range(len(corpus))]
        for path, data in zip(paths, corpus, strict=True):
            path.write_bytes(data)
        result = count(client, paths, by, per_document=per_document)
    bins = KINDS[by].bins
    expected = [dense(naive_counts(data, by), bins) for data in corpus]
    assert result.counts.dtype == np.int64
    if per_document:
        np.testing.assert_array_equal(result.counts, np.stack(expected))
    else:
        np.testing.assert_array_equal(result.counts, np.sum(expected, axis=0))
    nbytes_all = sum(map(len, corpus))
    assert result.nbytes == nbytes_all
    skipped = nbytes_all - int(np.sum(expected)) if by in ("ascii", "letter") else 0
    assert result.skipped == skipped
    assert result.documents == tuple(map(str, paths))


@pytest.mark.parametrize("by", KINDS)
@pytest.mark.parametrize("long", [0, 2**40])
@pytest.mark.parametrize("entries", [1, 300, 2**18])
def test_rows_of_documents_in_blocks(
    by: str, long: int, entries: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by all cores together, or by one loop, whose rows have room for some documents or for one; and one that
    comes in stretches."""
    monkeypatch.setattr(sparse_pieces, "LONG_NBYTES", long)
    monkeypatch.setattr(host, "ROWS_ENTRIES", entries)
    documents = [b"", b"To be", "Grüße 漢\ufffd".encode(), b"\xff\xe4\xbd"]
    documents += [rng.integers(60, 130, length, np.uint8).tobytes() for length in (1, 40, 300, 3000)] + [b""]
    data, edges = (
        np.frombuffer(b"..." + b"".join(documents), np.uint8),
        3 + np.cumsum([0, *map(len, documents)]),
    )
    kind, cut = KINDS[by], b"some text"
    parts = [
        Block(np.frombuffer(cut[: 4 + kind.after], np.uint8), 0, None, 0, 4),
        Block(np.frombuffer(cut[4 - kind.before :], np.uint8), 0, None, kind.before, kind.before + 5),
    ]
    whole = Block(data[: edges[-1]], 1, edges, 0, int(edges[-1]))
    found = count_rows_of(kind, [*parts, whole], lambda: None)
    assert found.rows is not None
    assert found.columns is not None
    expected = [naive_counts(document, by) for document in (cut, *documents)]
    wanted = [(row, bin_, n) for row, each in enumerate(expected) for bin_, n in sorted(each.items())]
    assert (
        list(zip(found.rows.tolist(), found.columns.tolist(), found.values.tolist(), strict=True)) == wanted
    )
    replaced = {
        row: number
        for row, each in enumerate([cut, *documents])
        if (number := each.decode(errors="replace").count("\ufffd") - each.count("\ufffd".encode()))
    }
    assert found.lost == (replaced if by == "codepoint" else {})


def test_many_small_files_make_few_tasks(client: Client, tmp_path: Path) -> None:
    for i in range(3000):
        (tmp_path / f"{i}").write_bytes(b"ab" * (i % 7))
    seen: list[Event] = []
    result = count(client, [tmp_path], "bigram", listener=seen.append)
    total = sum((i % 7) * 2 for i in range(3000))
    assert result.counts[ord("a") * 256 + ord("b")] == total // 2
    assert result.counts.sum() == total - sum(1 for i in range(3000) if i % 7)
    assert isinstance(seen[0], WorkPlanned)
    assert isinstance(seen[-1], WorkDone)
    units = [event for event in seen if isinstance(event, UnitDone)]
    assert len(units) == seen[0].total <= 4
    assert sum(unit.nbytes for unit in units) == seen[0].nbytes == total
    assert set(units[0].stages) == {"read", "count"}


def test_a_large_file_is_cut_for_all_workers(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    data = rng.integers(0, 256, 5 * 2**20 + 3, np.uint8)
    (tmp_path / "large").write_bytes(data.tobytes())
    seen: list[Event] = []
    result = count(client, [tmp_path / "large"], "bigram", listener=seen.append)
    assert isinstance(seen[0], WorkPlanned)
    assert seen[0].total >= 4
    pairs = data[:-1] * np.intp(256) + data[1:]  # Python's own counting takes a second for so many
    np.testing.assert_array_equal(result.counts, np.bincount(pairs, minlength=65536))


def test_a_file_that_goes_away_is_named(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.write_bytes(b"abc")
    corpus = list_corpus([path])
    path.unlink()
    with pytest.raises(CorpusError, match=r"cannot read .*there"):
        count_corpus(
            client,
            corpus,
            KINDS["byte"],
            cpu_workers(client),
            per_document=False,
            listener=lambda _: None,
        )


def test_counts_that_would_not_fit_are_refused(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(3):
        (tmp_path / f"{i}").write_bytes(b"abc")
    monkeypatch.setattr(counting, "memory_limit", lambda: 2**12)
    with pytest.raises(PlanError, match=r"3 documents × 256 bins take 6 KiB, and 2 KiB"):
        count(client, [tmp_path], "byte", per_document=True)


def test_labels_name_every_bin_once() -> None:
    for by, kind in KINDS.items():
        if by != "codepoint":
            assert len({label(by, place) for place in range(kind.bins)}) == kind.bins, by
    assert label("letter", 25) == "Z"
    assert label("byte", 0xE9) == r"\xe9"
    assert label("ascii", ord("\n")) == r"\x0a"
    assert label("bigram", ord("t") * 256 + ord("h")) == "th"
    assert label("codepoint", 0x20AC) == "€"
    assert label("codepoint", 0xD800) == "U+D800"


def test_a_histogram_prints_its_shares(client: Client, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"aAab!")
    text = str(count(client, [tmp_path], "letter"))
    first, *rest = text.splitlines()
    assert first.startswith("5 B in 1 document by letter")
    assert first.endswith("4 counted, 1 skipped")
    assert rest[0].split()[:3] == ["A", "3", "75.00%"]
    assert rest[1].split()[:3] == ["B", "1", "25.00%"]
    assert len(rest) == 2


def test_an_empty_document_counts_nothing(client: Client, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"")
    result = count(client, [tmp_path], "codepoint", per_document=True)
    assert result.counts.shape == (1, 0x110000)
    assert not result.counts.any()
    assert os.linesep not in str(result)


def test_the_threads_of_other_settings_end_and_those_in_use_do_not() -> None:
    """Each holds buffers as large as its blocks."""

    def threads_of(pool: ThreadPoolExecutor) -> list[threading.Thread]:
        return run_all(pool, [threading.current_thread] * 3)

    try:
        idle, used = threads_of(pieces.text_threads(2)), pieces.text_threads(3)
        kept = [threads_of(pieces.text_threads(count)) for count in (4, 5)]
        for thread in idle:
            thread.join(60)
            assert not thread.is_alive()
        assert all(thread.is_alive() for thread in threads_of(used)), "a run that goes on beside others"
        assert all(thread.is_alive() for thread in itertools.chain(*kept))
        last = threads_of(used)
        del used
        for thread in last:
            thread.join(60)
            assert not thread.is_alive()
    finally:
        pieces.text_threads.cache_clear()
