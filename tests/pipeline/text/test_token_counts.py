"""Words, lines and n-grams of a corpus, and sparse counts per document: counted, kept, stored, added, looked at."""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.histograms.counting import counts_of
from tests.kernels.histograms.naive_tokens import naive_tokens
from tests.pipeline.text.test_counting import count, cpu_workers, dense, naive_counts
from tests.sampling import examples
from tilewright.kernels.histograms.token_kinds import TokenKind, any_kind_named
from tilewright.kernels.histograms.token_lists import Tokens
from tilewright.kernels.histograms.tokens import KINDS
from tilewright.pipeline.errors import OptionError, StoreError
from tilewright.pipeline.events import Event, UnitDone
from tilewright.pipeline.plan.inputs import WorkerFacts
from tilewright.pipeline.room import Room
from tilewright.pipeline.text import counting, pieces, totals
from tilewright.pipeline.text.corpus import Corpus, Document, cut_pieces, list_corpus
from tilewright.pipeline.text.counting import SHARES_OF_HOST, count_corpus, divided
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.histogram import Histogram, added
from tilewright.pipeline.text.kept_counts import State, open_counts
from tilewright.pipeline.text.pieces import CORES
from tilewright.pipeline.text.saved_counts import save_histogram
from tilewright.pipeline.text.sparse_counts import SparseCounts
from tilewright.pipeline.text.sparse_pieces import as_one_list
from tilewright.pipeline.text.totals import MOST_RUNS, RowTotal, TokenTotal

BY = ["word", "line", "ngram:2", "ngram:3:character", "ngram:4:byte"]
TEXTS = [
    "The cat, the dog\r\nand the naïve हिन्दी\n\n".encode() * 3,
    b"",
    b"no end of a line \xf0\x9f\x92 the cat",
    "日本語 text ".encode() * 9,
    b"x" * 200 + b" " + b"the",
]


def kind_of(by: str) -> TokenKind:
    kind = any_kind_named(by)
    assert isinstance(kind, TokenKind)
    return kind


def counted_by(
    client: Client, folder: Path, by: str, *, per_document: bool = False, **more: object
) -> Histogram:
    return count_corpus(
        client,
        list_corpus([folder]),
        any_kind_named(by),
        cpu_workers(client),
        per_document=per_document,
        listener=lambda _: None,
        **more,  # type: ignore[arg-type]
    )


def as_counter(histogram: Histogram) -> Counter[bytes]:
    assert histogram.tokens is not None
    assert list(histogram.tokens) == sorted(set(histogram.tokens))
    return Counter(dict(zip(histogram.tokens, histogram.totals.tolist(), strict=True)))


def row_counter(histogram: Histogram, row: int) -> Counter[bytes]:
    assert histogram.tokens is not None
    assert isinstance(histogram.counts, SparseCounts)
    places, values = histogram.counts.row(row)
    assert (np.diff(places.astype(int)) > 0).all()
    return Counter({histogram.tokens[i]: n for i, n in zip(places.tolist(), values.tolist(), strict=True)})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for place, text in enumerate(TEXTS):
        (folder / f"{place}").write_bytes(text)
    (folder / "5.gz").write_bytes(gzip.compress(TEXTS[0] * 20))
    return folder


ALL = [*TEXTS, TEXTS[0] * 20]


@pytest.mark.sample(3)
@pytest.mark.parametrize("by", BY)
def test_equals_counter(without_dask: Client, corpus: Path, by: str) -> None:
    expected = [naive_tokens(text, kind_of(by)) for text in ALL]
    with dask.config.set({"tilewright.piece-nbytes": 31}):
        whole = counted_by(without_dask, corpus, by)
        rows = counted_by(without_dask, corpus, by, per_document=True)
    assert as_counter(whole) == sum(expected, Counter())
    assert [row_counter(rows, place) for place in range(len(ALL))] == expected
    assert rows.tokens is not None
    assert list(rows.tokens) == list(whole.tokens or ())
    assert whole.nbytes == sum(map(len, ALL))


@pytest.mark.parametrize("by", ["bigram", "codepoint"])
def test_rows_of_many_bins_are_sparse(without_dask: Client, corpus: Path, by: str) -> None:
    with dask.config.set({"tilewright.piece-nbytes": 2000}):
        found = count(without_dask, [corpus], by, per_document=True)
    assert isinstance(found.counts, SparseCounts)
    assert found.counts.shape == (len(ALL), KINDS[by].bins)
    for place, text in enumerate(ALL):
        expected = dense(naive_counts(text, by), KINDS[by].bins)
        np.testing.assert_array_equal(found.counts[place], expected)
        assert int(found.counts.sum(axis=1)[place]) == expected.sum()
    np.testing.assert_array_equal(found.counts.sum(axis=0), found.totals)


def test_a_large_document_has_one_sparse_row(
    without_dask: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Its pieces are counted by different tasks, and in a dense way."""
    data = rng.integers(0, 256, 300_000, np.uint8).tobytes()
    (tmp_path / "large").write_bytes(data)
    (tmp_path / "small").write_bytes(b"ab")
    with dask.config.set({"tilewright.piece-nbytes": 100_000}):
        found = count(without_dask, [tmp_path], "bigram", per_document=True)
    np.testing.assert_array_equal(found.counts[0], dense(naive_counts(data, "bigram"), 65536))
    assert found.top(1)[0][1] == found.totals.max()


@pytest.mark.parametrize("per_document", [False, True])
@pytest.mark.parametrize("by", ["word", "ngram:4:byte", "bigram"])
@pytest.mark.parametrize("ending", ["json", "npz", "zarr"])
def test_stored_counts_are_read_back(
    without_dask: Client, corpus: Path, tmp_path: Path, by: str, per_document: bool, ending: str
) -> None:
    found = counted_by(without_dask, corpus, by, per_document=per_document)
    for _ in range(2):
        save_histogram(found, tmp_path / f"f.{ending}", overwrite=True)
    again = Histogram.load(tmp_path / f"f.{ending}")
    np.testing.assert_array_equal(np.asarray(again.counts), np.asarray(found.counts))
    assert (again.documents, again.options, again.nbytes) == (found.documents, found.options, found.nbytes)
    assert list(again.tokens or ()) == list(found.tokens or ())


@pytest.mark.more
def test_a_group_is_read_by_xarray(without_dask: Client, corpus: Path, tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    found = counted_by(without_dask, corpus, "word")
    save_histogram(found, tmp_path / "f.zarr")
    with xarray.open_zarr(tmp_path / "f.zarr", consolidated=False) as data:
        assert int(data.counts.sel(token="the")) == as_counter(found)[b"the"]
        assert tuple(data.document.values) == found.documents


def test_a_damaged_file_of_tokens_is_refused(without_dask: Client, corpus: Path, tmp_path: Path) -> None:
    found = counted_by(without_dask, corpus, "word")
    save_histogram(found, tmp_path / "f.json")
    text = (tmp_path / "f.json").read_text()
    (tmp_path / "g.json").write_text(text.replace('"The", ', '"zz", ', 1))
    with pytest.raises(StoreError, match="not in the order of their bytes"):
        Histogram.load(tmp_path / "g.json")
    (tmp_path / "h.json").write_text(text.replace('"tokens"', '"others"', 1))
    with pytest.raises(StoreError, match="lack tokens"):
        Histogram.load(tmp_path / "h.json")


@pytest.mark.parametrize("per_document", [False, True])
@pytest.mark.parametrize("by", ["word", "bigram"])
def test_histograms_add_up(without_dask: Client, corpus: Path, by: str, per_document: bool) -> None:
    whole = counted_by(without_dask, corpus, by, per_document=per_document)
    parts = [
        count_corpus(
            without_dask,
            list_corpus([corpus / name]),
            any_kind_named(by),
            cpu_workers(without_dask),
            per_document=per_document,
            listener=lambda _: None,
        )
        for name in ("0", "1", "2", "3", "4", "5.gz")
    ]
    total = sum(parts)
    assert isinstance(total, Histogram)
    np.testing.assert_array_equal(np.asarray(total.counts), np.asarray(whole.counts))
    assert list(total.tokens or ()) == list(whole.tokens or ())
    assert total.documents == whole.documents


def test_words_of_other_options_do_not_add_up() -> None:
    one = Histogram("word", np.array([1]), ("a",), 0, 1, "CPU", 1.0, Tokens.of([b"a"]), {"casefold": False})
    two = Histogram("word", np.array([1]), ("b",), 0, 1, "CPU", 1.0, Tokens.of([b"a"]), {"casefold": True})
    with pytest.raises(OptionError, match="words of casefold=False and True do not add up"):
        added([one, two])


@pytest.mark.sample(3)
@pytest.mark.parametrize("per_document", [False, True])
@pytest.mark.parametrize("by", ["word", "line", "ngram:2"])
def test_a_stopped_count_goes_on(without_dask: Client, tmp_path: Path, by: str, per_document: bool) -> None:
    """Also after the corpus has grown: tokens at the old end may have become others."""
    folder, kind = tmp_path / "corpus", kind_of(by)
    folder.mkdir()
    data = b" ".join(b"w%d" % (i % 97) + b"\n" * (i % 7 == 0) for i in range(4000))
    (folder / "large").write_bytes(data)
    (folder / "small").write_bytes(b"a small one")

    class StoppedError(Exception):
        pass

    def run(stop_after: int | None) -> tuple[Histogram | None, int]:
        units = 0

        def listener(event: Event) -> None:
            nonlocal units
            units += isinstance(event, UnitDone)
            if units == stop_after:
                raise StoppedError

        state = State(tmp_path / "state")
        with (
            dask.config.set({"tilewright.piece-nbytes": 3000}),
            open_counts(
                state, kind, per_document=per_document, reading=Reading(), listener=listener
            ) as record,
        ):
            try:
                found = count_corpus(
                    without_dask,
                    list_corpus([folder]),
                    kind,
                    cpu_workers(without_dask),
                    per_document=per_document,
                    listener=listener,
                    record=record,
                )
            except StoppedError:
                return None, units
        return found, units

    assert run(3) == (None, 3)
    found, units = run(None)
    assert found is not None
    assert units < 8
    expected = [naive_tokens(text, kind) for text in (data, b"a small one")]
    assert as_counter(found) == expected[0] + expected[1]
    with (folder / "large").open("ab") as file:
        file.write(b"9 w1\nw2 more")
    found, units = run(None)
    assert found is not None
    expected[0] = naive_tokens(data + b"9 w1\nw2 more", kind)
    assert as_counter(found) == expected[0] + expected[1]
    assert units <= 7
    if per_document:
        assert [row_counter(found, place) for place in (0, 1)] == expected


@pytest.mark.parametrize("cores", [1, 4])
def test_lists_that_do_not_fit_lie_in_files(
    cores: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged by one thread, or by several."""
    monkeypatch.setattr(totals, "usable_cores", lambda: cores)
    monkeypatch.setattr(totals, "LEAST_PART", 1000)
    expected: Counter[bytes] = Counter()
    room = Room(1000)
    total = TokenTotal(200_000, room)
    for _ in range(6):
        texts = [b"token %d" % number for number in np.unique(rng.integers(0, 20_000, 5000)).tolist()]
        tokens = Tokens.of(texts)
        values = rng.integers(1, 9, len(texts))
        total.add(np.zeros(len(texts), np.int64), np.arange(len(texts)), values, tokens)
        expected.update(dict(zip(texts, values.tolist(), strict=True)))
    counts, found = total.result()
    assert room.spilled > 0
    assert found is not None
    assert list(found) == sorted(expected)
    assert dict(zip(found, counts.tolist(), strict=True)) == expected  # type: ignore[union-attr]


@pytest.mark.parametrize("runs", [1, 5, MOST_RUNS + 3])
def test_lists_are_added_in_any_order(runs: int, rng: np.random.Generator) -> None:
    """One behind the other, as a worker's threads give them, or mixed, as older states kept them."""
    expected: Counter[bytes] = Counter()
    total = TokenTotal(1 << 20)
    for _ in range(3):
        texts = [
            b"%d" % number for _ in range(runs) for number in sorted(rng.integers(0, 99, 9).tolist(), key=str)
        ]
        texts += [b"", b"x" * 9]
        values = rng.integers(1, 9, len(texts))
        total.add(np.zeros(len(texts), np.int64), np.arange(len(texts)), values, Tokens.of(texts))
        for text, value in zip(texts, values.tolist(), strict=True):
            expected[text] += value
    counts, found = total.result()
    assert found is not None
    assert list(found) == sorted(expected)
    assert dict(zip(found, counts.tolist(), strict=True)) == expected  # type: ignore[union-attr]


def test_sparse_rows_that_do_not_fit_lie_in_files(rng: np.random.Generator) -> None:
    table = rng.poisson(0.1, (200, 300)) * rng.integers(1, 1000, (200, 300))
    total = RowTotal(200, 300, 4000)
    for rows in np.array_split(rng.permutation(200), 7):
        rows = np.sort(rows)
        places, columns = np.nonzero(table[rows])
        total.add(rows[places], columns, table[rows][places, columns], None)
    counts, _ = total.result()
    assert isinstance(counts, SparseCounts)
    assert counts.values.dtype == np.uint16
    np.testing.assert_array_equal(np.asarray(counts), table)


def test_the_most_frequent_are_as_many_as_asked_for() -> None:
    found = Histogram("word", np.array([1, 3, 2]), ("a",), 0, 1, "CPU", 1.0, Tokens.of([b"a", b"b", b"c"]))
    assert [found.top(k) for k in (0, np.int64(2), 10**30)] == [
        [],
        [("b", 3), ("c", 2)],
        [("b", 3), ("c", 2), ("a", 1)],
    ]
    wrong: list[Any] = [-1, True, 2.0, None, "2"]
    for k in wrong:
        with pytest.raises(OptionError, match="is no number of bins; give a whole number of 0 or more"):
            found.top(k)


@pytest.mark.parametrize("by", ["letter", "word"])
def test_frames_hold_names_that_are_no_utf8(without_dask: Client, tmp_path: Path, by: str) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("xarray")
    names = [f"{tmp_path}/{name}" for name in ("a", "b\udcff", "ü")]
    for name in names:
        Path(name).write_bytes(b"xx x")
    rows = counted_by(without_dask, tmp_path, by, per_document=True)
    frame = rows.to_pandas()
    assert [name for name in names if frame.loc[name].sum() == 3 - (by == "word")] == names
    assert rows.to_xarray().document.values.tolist() == names


def test_frames_and_html_say_what_is_counted(without_dask: Client, corpus: Path) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("xarray")
    words, rows = (
        counted_by(without_dask, corpus, "word"),
        counted_by(without_dask, corpus, "word", per_document=True),
    )
    expected = as_counter(words)
    series = words.to_pandas()
    assert series["the"] == expected[b"the"]
    assert len(series) == len(expected)
    frame = rows.to_pandas()
    assert frame[(str(corpus / "2"), "cat")] == 1
    assert frame.groupby(level=1).sum()["the"] == expected[b"the"]
    letters = count(without_dask, [corpus], "letter", per_document=True)
    assert letters.to_pandas().loc[str(corpus / "4"), "X"] == 200
    assert int(words.to_xarray().sel(bin="the")) == expected[b"the"]
    assert int(letters.to_xarray().sel(document=str(corpus / "4"), bin="X")) == 200
    assert int(rows.to_xarray().counts.sum()) == sum(expected.values())
    assert f"<td>{max(expected.values()):,}</td>" in words._repr_html_()
    assert words.top(1) == [(expected.most_common(1)[0][0].decode(), expected.most_common(1)[0][1])]
    assert (
        "<b>"
        not in Histogram("line", np.array([1]), ("a",), 0, 1, "CPU", 1.0, Tokens.of([b"<b>"]))._repr_html_()
    )


@pytest.mark.parametrize(
    ("by", "names", "per_document", "device", "said"),
    [
        ("word", ["a", "b"], False, "cuda", ""),
        ("ngram:3:byte", ["a"], False, "cuda", ""),
        ("line", ["a", "b.gz"], False, "cuda", "where files are not plain ones: 1 file"),
        ("word", ["a.gz"], False, CORES, "GPUs count it of plain files alone"),
        ("word", ["a"], True, CORES, "document by document"),
        ("ngram:2", ["a"], False, "cuda", ""),
    ],
)
def test_what_the_workers_of_gpus_count_on_their_cores(
    by: str, names: list[str], per_document: bool, device: str, said: str
) -> None:
    """All of their cores, of plain files as well, and what of large files their GPUs count by larger pieces."""
    corpus = Corpus(
        tuple(Document(name, f"/{name}", 2**34, "gzip" if "." in name else None) for name in names), ()
    )
    worker = WorkerFacts("cuda", "a GPU", 2**34, None, cores=1, usable_cores=16, host_cores=16, threads=2)
    division = divided(corpus, kind_of(by), [worker], per_document=per_document)
    assert division.device == device
    assert division.note.endswith(said)
    assert (division.note == "") == (said == "")
    if device == CORES:
        assert set(division.threads) == {16}
    else:
        blocks = max(piece.nbytes for piece in division.work.pieces if piece.is_plain) / 2**23
        assert 31 < blocks <= 32 if by == "ngram:2" else 128 < blocks <= 192


@pytest.mark.parametrize("per_document", [False, True])
def test_all_cores_of_a_worker_without_a_gpu_count_tokens(per_document: bool) -> None:
    """Each a share of 8 MiB at a time: of two tasks eight each. Bins are counted by a task's own
    threads, all of a piece."""
    worker = WorkerFacts("cpu", "a CPU", None, None, cores=16, usable_cores=16, host_cores=16, threads=2)
    corpus = Corpus((Document("a", "/a", 2**34, None),), ())
    division = divided(corpus, kind_of("word"), [worker], per_document=per_document)
    assert (division.device, set(division.threads)) == ("cpu", {16})
    assert {piece.nbytes for piece in division.work.pieces} == {8 * 2**23}
    others = divided(corpus, KINDS["byte"], [worker], per_document=per_document)
    assert set(others.threads) != {16}
    assert {piece.nbytes for piece in others.work.pieces} == {2**25}


@pytest.mark.parametrize(("limit", "expected"), [(2**36, 2**26), (2**32 * 5 // 4, 5 * 2**23), (2**30, 2**25)])
def test_shares_of_tokens_are_no_larger_than_memory_allows(limit: int, expected: int) -> None:
    """Of eight threads a task; and where memory is short, a piece is what the setting says."""
    worker = WorkerFacts("cpu", "a CPU", None, limit, cores=16, usable_cores=16, host_cores=16, threads=2)
    corpus = Corpus((Document("a", "/a", 2**34, None),), ())
    division = divided(corpus, kind_of("word"), [worker], per_document=False)
    assert max(piece.nbytes for piece in division.work.pieces) <= expected
    assert max(piece.nbytes for piece in division.work.pieces) > expected * 0.99


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("by", ["ngram:5:byte", "line", "ngram:3"])
def test_a_share_takes_no_more_memory_than_is_set_aside_for_it(by: str) -> None:
    """In a process of its own, of text of which nearly all tokens come once."""
    script = f"""
import resource, sys
import numpy as np
from tilewright.kernels.histograms.token_counting import TokenCounter
from tilewright.kernels.histograms.token_kinds import any_kind_named as kind_of
from tilewright.pipeline.text.counting import SHARE_NBYTES
rng = np.random.default_rng(1)
kind = kind_of("{by}")
def count(nbytes):
    data = rng.integers(0, 256, nbytes).astype(np.uint8)
    if kind.unit != "byte":
        data = (97 + data % 26).astype(np.uint8)
        data[7::8] = ord(" ") if kind.unit == "word" else 10
    counter = TokenCounter(kind)
    counter.begin()
    counter.part(data, 0, more=lambda nbytes: np.empty(0, np.uint8))
    return len(counter.take().counts)
count(1000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert count(SHARE_NBYTES) > SHARE_NBYTES // 20
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / SHARE_NBYTES)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < SHARES_OF_HOST


@pytest.mark.parametrize("per_document", [False, True])
@pytest.mark.parametrize(("tasks", "shares"), [(1, 6), (2, 3), (5, 2)])
def test_a_task_counts_tokens_by_shares(
    per_document: bool,
    tasks: int,
    shares: int,
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = [b"".join(TEXTS), b"the cat " * 300, TEXTS[0]]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text)
    asked = []

    def run_shares(calls: Sequence[Any], threads: int, check: Any) -> list[Any]:
        asked.append((len(calls), threads))
        return [call(check) for call in calls]

    monkeypatch.setattr(pieces, "LEAST_STREAM_NBYTES", 100)
    monkeypatch.setattr(pieces, "tasks_at_once", lambda: tasks)
    monkeypatch.setattr(pieces, "usable_cores", lambda: 6)
    monkeypatch.setattr(pieces, "run_shares", run_shares)
    with dask.config.set({"tilewright.decompress-threads": 6}):
        found = counted_by(client, tmp_path, "ngram:2", per_document=per_document)
    ((count, threads),) = asked
    assert threads == 6
    assert shares <= count < shares + len(texts)  # a share is of one file, or of whole ones
    rows = found.counts if per_document else [found.counts]
    for row, text in zip(rows, texts if per_document else [texts], strict=True):
        expected = Counter[bytes]()
        for document in [text] if per_document else texts:
            expected += naive_tokens(document, kind_of("ngram:2"))
        assert found.tokens is not None
        assert {token: count for token, count in zip(found.tokens, row, strict=True) if count} == expected


@settings(max_examples=examples(20))
@given(
    documents=st.lists(
        st.lists(st.sampled_from([b"a", b"b", b"ab", b"\xff", b""]), max_size=6), min_size=1, max_size=9
    ),
    turned=st.booleans(),
)
def test_lists_of_shares_become_one(documents: list[list[bytes]], turned: bool) -> None:
    lists = [
        counts_of([np.frombuffer(b" ".join(each), np.uint8)], kind_of("ngram:2:byte")) for each in documents
    ]

    def run(calls: Sequence[Any]) -> list[Any]:
        found = {number: calls[number]() for number in range(len(calls))[:: -1 if turned else 1]}
        return [found[number] for number in range(len(calls))]

    tokens, counts = as_one_list([(each.tokens, each.counts) for each in lists], run)
    expected = Counter[bytes]()
    for each in documents:
        expected += naive_tokens(b" ".join(each), kind_of("ngram:2:byte"))
    assert list(tokens) == sorted(expected)
    assert dict(zip(tokens, counts.tolist(), strict=True)) == expected


@pytest.mark.parametrize(
    ("by", "codecs", "fields", "device", "said"),
    [
        ("word", ["text"], ["text"], "cuda", ""),
        ("word", ["text", "gzip"], ["text"], "cuda", "where files are not plain ones: 1 file"),
        (
            "word",
            ["gzip"],
            ["text"],
            CORES,
            "GPUs count it of plain files alone, or of one field of JSON lines",
        ),
        ("word", ["text"], ["text", "id"], CORES, "of plain files alone, or of one field of JSON lines"),
        ("line", ["text"], ["text"], CORES, "GPUs count it of plain files alone"),
    ],
)
def test_what_the_workers_of_gpus_count_on_their_cores_of_a_field(
    by: str, codecs: list[str], fields: list[str], device: str, said: str
) -> None:
    files = tuple(Document(f"{n}", f"/{n}", 2**34, codec) for n, codec in enumerate(codecs))
    worker = WorkerFacts("cuda", "a GPU", 2**34, None, cores=1, usable_cores=16, host_cores=16, threads=2)
    corpus = Corpus(files, (), reading=Reading(fields=tuple(fields)))
    division = divided(corpus, kind_of(by), [worker], per_document=False)
    assert division.device == device
    assert division.note.endswith(said)
    assert (division.note == "") == (said == "")
    assert set(division.threads) == {16}


@pytest.mark.parametrize(
    ("by", "limit", "blocks"),
    [
        ("word", 2**33, 192),
        ("ngram:5:byte", None, 192),
        ("ngram:5:byte", 2**37, 128),
        ("ngram:5:byte", 2**33, 8),
        ("ngram:2", 2**37, 32),
        ("ngram:4:character", 2**20, 1),
    ],
)
def test_lists_of_new_tokens_fit_a_workers_memory(by: str, limit: int | None, blocks: int) -> None:
    worker = WorkerFacts("cuda", "a GPU", 2**34, limit, cores=1, usable_cores=16, host_cores=16, threads=2)
    assert counting._task_blocks(kind_of(by), [worker]) == blocks


@pytest.mark.parametrize("no_room", [False, True])
def test_what_no_gpu_counts_the_cores_count(
    no_room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small and compressed files, parts of files, and all that a GPU has no room for."""
    from tilewright.pipeline.text import pieces
    from tilewright.pipeline.text.gpu import texts

    def no_table(*_: object) -> None:
        raise MemoryError

    if no_room:
        monkeypatch.setattr(pieces, "_is_brought_whole", lambda *_: True)
        monkeypatch.setattr(texts, "prepare", lambda kind: None)
        monkeypatch.setattr(texts, "borrowed_table", no_table)
    data = TEXTS[0] * 300
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "b.gz").write_bytes(gzip.compress(data))
    found: Counter[bytes] = Counter()
    for piece in cut_pieces(list_corpus([tmp_path]).documents, 10_000):
        if piece.is_plain or not no_room:
            part, _ = pieces.count_piece(piece, kind_of("word"), "cuda", False, 2**20, 2)
            assert part.tokens is not None
            assert part.remarks == ({texts.CORES_NO_ROOM: (1, piece.documents[0].name, 0)} if no_room else {})
            for cell, value in zip(part.cells.tolist(), part.values.tolist(), strict=True):
                found[part.tokens[cell]] += value
    once = naive_tokens(data, kind_of("word"))
    assert found == (once if no_room else once + once)
