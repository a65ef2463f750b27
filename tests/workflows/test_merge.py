"""Histograms load back as they were written, and those of different documents add up."""

from __future__ import annotations

import itertools
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from click.testing import CliRunner, Result
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st

import tilewright as tw
from tests.pipeline.text.test_counting import count
from tilewright.kernels.histograms.token_lists import Tokens
from tilewright.kernels.histograms.tokens import KINDS
from tilewright.pipeline.errors import OptionError, OutputExistsError, StoreError
from tilewright.pipeline.text.corpus import list_corpus
from tilewright.pipeline.text.histogram import Histogram, added
from tilewright.pipeline.text.saved_counts import save_histogram
from tilewright.pipeline.text.sparse_counts import SparseCounts
from tilewright.workflows.cli import cli
from tilewright.workflows.merge import merge


def made(by: str, names: list[str], per_document: bool = False, seed: int = 0) -> Histogram:
    rng = np.random.default_rng(seed)
    bins = KINDS[by].bins
    shape = (len(names), bins) if per_document else (bins,)
    counts = np.where(rng.random(shape) < 0.1, rng.integers(0, 2**40, shape), 0)
    return Histogram(by, counts, tuple(names), 3 + seed, 100 + seed, "CPU", 0.5 + seed)


def assert_same(one: Histogram, other: Histogram) -> None:
    np.testing.assert_array_equal(one.counts, other.counts)
    assert one.counts.dtype == other.counts.dtype == np.int64
    assert one.facts() == other.facts()


@pytest.mark.sample(8)
@pytest.mark.parametrize("ending", [".json", ".npz", ".parquet", ".zarr"])
@pytest.mark.parametrize("per_document", [False, True])
@pytest.mark.parametrize("by", ["codepoint", "word", "ngram:2:byte"])
def test_documents_within_files_load_back(
    client: Client, tmp_path: Path, by: str, per_document: bool, ending: str
) -> None:
    lines = [{"id": "a", "text": "Grüße an alle"}, {"text": ""}, {"id": "c", "text": "alle Wörter"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = tw.histogram(
        tmp_path / "a.jsonl",
        by=by,
        per_document=per_document,
        field="text",
        id_field="id" if per_document else None,
        cluster=client,
    )
    save_histogram(found, tmp_path / f"f{ending}")
    again = tw.Histogram.load(tmp_path / f"f{ending}")
    assert again.facts() == found.facts()
    np.testing.assert_array_equal(np.asarray(again.counts), np.asarray(found.counts))
    assert again.ids == (("a", None, "c") if per_document else None)
    assert tuple(again.documents) == found.documents
    assert list_corpus([tmp_path]).documents[0].name.endswith("a.jsonl")
    assert len(list_corpus([tmp_path]).documents) == 1, "an output is left out"


@pytest.mark.parametrize("ending", [".json", ".parquet", ".zarr"])
@pytest.mark.parametrize("per_document", [False, True])
@pytest.mark.parametrize("by", ["letter", "bigram"])
def test_what_was_written_loads_back(tmp_path: Path, by: str, per_document: bool, ending: str) -> None:
    found = made(by, ["a", "b\udcff", "ü"], per_document)
    path = tmp_path / f"f{ending}"
    save_histogram(found, path)
    assert_same(tw.Histogram.load(path), found)
    assert_same(Histogram.load(str(path)), found)


@pytest.mark.parametrize("ending", [".json", ".npz", ".parquet", ".zarr"])
@pytest.mark.parametrize("per_document", [False, True])
@pytest.mark.parametrize("by", ["letter", "codepoint", "word"])
def test_counts_of_nothing_load_back_and_add_up(
    client: Client, tmp_path: Path, by: str, per_document: bool, ending: str
) -> None:
    """As of one task of many whose shard is empty: an archive has no documents, an empty file no tokens."""
    with tarfile.open(tmp_path / "none.tar", "w"):
        pass
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("Tilewright")
    some = tw.histogram(tmp_path / "text", by=by, per_document=per_document, cluster=client)
    for nothing in (
        tw.histogram(tmp_path / "none.tar", by=by, per_document=per_document, cluster=client),
        tw.histogram(tmp_path / "empty", by=by, per_document=per_document, cluster=client),
        some - some,
    ):
        save_histogram(nothing, tmp_path / f"f{ending}", overwrite=True)
        again = tw.Histogram.load(tmp_path / f"f{ending}")
        assert again.facts() == nothing.facts()
        assert again.per_document == per_document
        assert again.counts.shape == nothing.counts.shape
        assert type(again.counts) is type(nothing.counts)
        both = again + some
        assert both.top() == some.top()
        assert both.document_count == nothing.document_count + some.document_count


def test_counts_of_nothing_load_back_from_earlier_releases(tmp_path: Path) -> None:
    for documents, shape in ((["a"], (0,)), ([], (0, 0))):
        counts: np.ndarray | SparseCounts = np.zeros(0, np.int64)
        if not documents:
            counts = SparseCounts(np.zeros(1, np.int64), counts, counts, 0)
        found = Histogram("word", counts, documents, 0, 0, "CPU", 1.0, Tokens.of([]))
        facts = {name: fact for name, fact in found.to_json().items() if name != "per_document"}
        (tmp_path / "f.json").write_text(json.dumps(facts))
        assert Histogram.load(tmp_path / "f.json").counts.shape == shape


def test_what_was_printed_loads_back(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"text")
    result = CliRunner().invoke(cli, ["histogram", str(tmp_path / "text"), "--json", "-q"])
    (tmp_path / "f.json").write_text(result.stdout)
    assert json.loads(result.stdout) == Histogram.load(tmp_path / "f.json").to_json()


@pytest.mark.parametrize("per_document", [False, True])
def test_parts_of_a_corpus_add_up_to_its_counts(client: Client, tmp_path: Path, per_document: bool) -> None:
    paths = [tmp_path / name for name in "abcde"]
    for number, path in enumerate(paths):
        path.write_bytes(bytes(range(60 * number % 256)) * number)
    parts = [count(client, part, "letter", per_document=per_document) for part in (paths[:2], paths[2:])]
    whole = count(client, paths, "letter", per_document=per_document)
    for total in (parts[0] + parts[1], sum(parts), added(parts)):
        assert isinstance(total, Histogram)
        np.testing.assert_array_equal(total.counts, whole.counts)
        assert (total.documents, total.nbytes, total.skipped) == (
            whole.documents,
            whole.nbytes,
            whole.skipped,
        )
        assert (total.device, total.seconds) == ("CPU", parts[0].seconds + parts[1].seconds)


@given(cuts=st.lists(st.integers(0, 12), max_size=4), per_document=st.booleans())
def test_sums_do_not_depend_on_how_they_are_taken(cuts: list[int], per_document: bool) -> None:
    all_of = [made("ascii", [str(number)], per_document, number) for number in range(12)]
    edges = [0, *sorted(cuts), 12]
    groups = [all_of[start:stop] for start, stop in itertools.pairwise(edges) if start < stop]
    assert_same(added([added(group) for group in groups]), added(all_of))


@pytest.mark.sample(1)
@pytest.mark.parametrize("by", ["letter", "word", "codepoint"])
@pytest.mark.parametrize("per_document", [False, True])
def test_what_was_added_is_subtracted(client: Client, tmp_path: Path, by: str, per_document: bool) -> None:
    words = ["Tilewright", "zählt", "Wörter", "und", "Zeichen", "jedes"]
    paths = [tmp_path / name for name in "abcde"]
    for number, path in enumerate(paths):
        path.write_text(" ".join(words[number : number + 2] * (number + 1)))
    whole, gone, rest = (
        tw.histogram(part, by=by, per_document=per_document, cluster=client)
        for part in (paths, paths[1:3], [paths[0], *paths[3:]])
    )
    found = whole - gone
    np.testing.assert_array_equal(found.counts, rest.counts)
    assert (found.documents, found.labels) == (rest.documents, rest.labels)
    for name in ("nbytes", "skipped", "document_count", "undecodable"):
        assert getattr(found, name) == getattr(rest, name)
    assert not (whole - whole).counts.any()
    with pytest.raises(
        OptionError, match=f"2 documents to be subtracted are not among those counted, {paths[1]}"
    ):
        rest - gone
    paths[1].write_text("zz" * 400)
    with pytest.raises(OptionError, match="a document had other contents then"):
        whole - tw.histogram(paths[1:3], by=by, per_document=per_document, cluster=client)


def test_what_does_not_add_up_is_told() -> None:
    one = made("byte", ["a", "b"])
    with pytest.raises(OptionError, match="counts by byte and by letter do not add up"):
        one + made("letter", ["c"])
    with pytest.raises(OptionError, match="a row of counts for each document, and another one for all"):
        one + made("byte", ["c"], per_document=True)
    with pytest.raises(
        OptionError, match=r"1 document would count twice, b first: .*paths that tell them apart"
    ):
        one + made("byte", ["b", "c"])
    with pytest.raises(OptionError, match="no histograms"):
        added([])
    other: Any = 3
    with pytest.raises(TypeError):
        one + other
    with pytest.raises(TypeError):
        other + one


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(cli, arguments)


def test_the_command_writes_the_sum(run: Callable[..., Result]) -> None:
    parts = [made("byte", ["a"]), made("byte", ["b", "c"], seed=1), made("byte", ["d"], seed=2)]
    for part, name in zip(parts, ("1.json", "2.zarr", "3.json"), strict=True):
        save_histogram(part, name)
    result = run("merge", "1.json", "2.zarr", "--out", "12.zarr")
    assert result.exit_code == 0, result.output
    assert "in 3 documents by byte" in result.stdout
    result = run("merge", "12.zarr", "3.json", "--out", "all.json", "--json")
    assert json.loads(result.stdout) == Histogram.load("all.json").to_json()
    assert_same(Histogram.load("all.json"), added(parts))
    again = run("merge", "12.zarr", "--out", "all.json")
    assert again.exit_code == 1
    assert "all.json exists" in again.stderr
    assert run("merge", "all.json", "--out", "all.json", "--overwrite").exit_code == 0
    assert_same(Histogram.load("all.json"), added(parts))
    assert (
        run("merge", "all.json", "--subtract", "1.json", "--subtract", "3.json", "--out", "2.json").exit_code
        == 0
    )
    np.testing.assert_array_equal(Histogram.load("2.json").counts, parts[1].counts)
    assert Histogram.load("2.json").documents == ("b", "c")
    assert run("merge", "1.json", "--out", "sum.csv").exit_code == 0
    assert Path("sum.csv").read_text().startswith("bin,label,count")


def test_the_command_refuses_before_it_reads(run: Callable[..., Result]) -> None:
    Path("there.json").touch()
    with pytest.raises(OutputExistsError, match=r"there\.json exists"):
        merge(["none.json"], "there.json")
    with pytest.raises(StoreError, match="there is no folder none"):
        merge(["none.json"], "none/f.json")
    assert run("merge", "--out", "f.json").exit_code == 2
    assert run("merge", "f.json", "--out", "f.txt").exit_code == 2


GOOD = made("byte", ["a"]).to_json()
ROWS = made("byte", ["a"], per_document=True).to_json()
BAD = {
    "no JSON": "{",
    "no object": "[]",
    "no counts": "{}",
    "ragged": GOOD | {"counts": [[1], [1, 2]]},
    "too large": GOOD | {"counts": [2**70] * 256},
    "negative": GOOD | {"counts": [-1] * 256},
    "fractions": GOOD | {"counts": [0.5] * 256},
    "too few": GOOD | {"counts": [1] * 255},
    "rows": GOOD | {"counts": [[1] * 256] * 2},
    "another kind": GOOD | {"by": "word"},
    "kind of kinds": GOOD | {"by": ["byte"]},
    "a name": GOOD | {"documents": "a"},
    "no name": GOOD | {"documents": [""]},
    "not per document": GOOD | {"per_document": True},
    "numbers": GOOD | {"documents": [1]},
    "no skipped": {name: value for name, value in GOOD.items() if name != "skipped"},
    "true": GOOD | {"nbytes": True},
    "no device": GOOD | {"device": None},
    "no seconds": GOOD | {"seconds": "1"},
    "endless": GOOD | {"seconds": float("inf")},
    "no time": GOOD | {"seconds": float("nan")},
    "no number of documents": GOOD | {"document_count": "1"},
    "fewer than none": GOOD | {"undecodable": -1},
    "options without values": GOOD | {"options": ["casefold"]},
    "left out without reasons": GOOD | {"bad": [["a"]]},
    "numbers left out": GOOD | {"bad": 1},
    "ids of no rows": GOOD | {"ids": ["a"]},
    "more ids than rows": ROWS | {"ids": ["a", "b"]},
    "ids that are numbers": ROWS | {"ids": [1]},
}


@pytest.mark.parametrize("what", list(BAD))
def test_files_that_hold_no_histogram_are_told(tmp_path: Path, what: str) -> None:
    path, bad = tmp_path / "bad.json", BAD[what]
    path.write_text(bad if isinstance(bad, str) else json.dumps(bad))
    with pytest.raises(StoreError, match=r"bad\.json .*count the corpus again, or give a file that"):
        Histogram.load(path)


@pytest.mark.parametrize("per_document", [False, True])
def test_groups_that_lack_a_part_are_told(client: Client, tmp_path: Path, per_document: bool) -> None:
    """Zarr takes a chunk that is not there for one of zeros, or of texts without a character."""
    (tmp_path / "text").write_text("one two two")
    found = tw.histogram(tmp_path / "text", by="word", per_document=per_document, cluster=client)
    save_histogram(found, tmp_path / "f.zarr")
    parts = sorted(path for path in (tmp_path / "f.zarr").rglob("*") if path.is_file())
    assert len(parts) == (11 if per_document else 7)
    for part in parts:
        data = part.read_bytes()
        part.unlink()
        with pytest.raises((StoreError, OptionError), match=r"f\.zarr"):
            Histogram.load(tmp_path / "f.zarr")
        if part.suffix != ".json":
            part.write_bytes(data[: len(data) // 2])
            with pytest.raises(StoreError, match=r"f\.zarr"):
                Histogram.load(tmp_path / "f.zarr")
        part.write_bytes(data)
    assert_same(Histogram.load(tmp_path / "f.zarr"), found)


def test_other_files_are_told(tmp_path: Path) -> None:
    save_histogram(made("byte", ["a"]), tmp_path / "f.csv")
    zarr.save_array(str(tmp_path / "other.zarr"), np.arange(256))
    zarr.save_array(str(tmp_path / "deep.zarr"), np.zeros((2, 2, 2)))
    wrong: list[tuple[Any, type[Exception], str]] = [
        (tmp_path / "f.csv", OptionError, r"\.csv says neither all documents nor what was skipped"),
        (
            tmp_path / "f.feather",
            OptionError,
            r"ends in '\.feather'; counts are read from \.json, \.npz, \.parquet and \.zarr",
        ),
        (tmp_path / "f", OptionError, "has no ending"),
        (tmp_path / "none.json", StoreError, r"cannot read .*none\.json: No such file"),
        (tmp_path / "none.zarr", StoreError, r"none\.zarr"),
        (tmp_path / "other.zarr", StoreError, "it does not say what it counts"),
        (tmp_path / "deep.zarr", tw.ShapeError, "deep"),
        (3, OptionError, "3 is no path"),
    ]
    for path, error, message in wrong:
        with pytest.raises(error, match=message):
            Histogram.load(path)


@pytest.mark.parametrize("per_document", [False, True])
def test_what_was_bad_and_is_counted_is_bad_no_more(
    client: Client, tmp_path: Path, per_document: bool
) -> None:
    for name, data in {"a.jsonl": b'{"text": "a"}\n', "b.jsonl": b"{", "c.jsonl": b"{"}.items():
        (tmp_path / name).write_bytes(data)
    given: dict[str, Any] = {"field": "text", "by": "letter", "cluster": client, "per_document": per_document}
    first = tw.histogram(tmp_path, on_error="report", **given)
    assert [Path(name).name for name, _ in first.bad] == ["b.jsonl", "c.jsonl"]
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "b"}\n')
    again = tw.histogram([tmp_path / "b.jsonl", tmp_path / "c.jsonl"], on_error="report", **given)
    for parts in ([first, again], [again, first]):
        both = added(parts)
        assert [Path(name).name for name, _ in both.bad] == ["c.jsonl"]
        assert both.totals.sum() == 2


def test_a_file_with_a_colon_in_its_name_is_no_part_of_another(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``a:1`` was taken for the first document of ``a``, which then was bad no more."""
    monkeypatch.chdir(tmp_path)
    Path("a").write_bytes(b'{"')
    Path("a:1").write_bytes(b'{"text": "x"}\n')
    given: dict[str, Any] = {"field": "text", "by": "letter", "cluster": client}
    bad = tw.histogram(["a"], on_error="report", **given)
    assert [name for name, _ in bad.bad] == ["a"]
    other = replace(tw.histogram(["a:1"], **given), documents=("a:1",))
    assert [name for name, _ in added([bad, other]).bad] == ["a"]
    Path("a:1").unlink()
    assert not added([bad, other]).bad, "then it is a part of the restored file"
