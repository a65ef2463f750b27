"""``tw.duplicates`` and ``tilewright duplicates``: what they take, print and write."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from distributed import Client

import tilewright as tw
from tests.pipeline.duplicates.test_job import same, texts_alike
from tilewright.pipeline.text.corpus import list_corpus
from tilewright.workflows.cli import cli

TEXTS = {
    "a": "one two three four five six seven eight nine ten",
    "b": "One two three four five six seven eight nine ten!",
    "c": "something else",
    "d": "something else",
    "e": "ONE two three four five six seven eight nine eleven",
}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


def run(*words: str, client: Client, expected: int = 0) -> Result:
    profile = ["--profile", client.scheduler.address]
    result = CliRunner().invoke(cli, ["duplicates", *words, *profile])
    assert result.exit_code == expected, result.output
    return result


FOLDED = {"casefold": True, "ngram": 2, "threshold": 0.6, "bands": 64, "rows": 2}
AS_OPTIONS = ["--casefold", "--ngram", "2", "--threshold", "0.6", "--bands", "64", "--rows", "2"]


def test_the_answer_is_the_same_for_any_number_of_workers(
    corpus: Path, tmp_path: Path, clusters: dict[int, Client]
) -> None:
    (tmp_path / "more.txt").write_bytes(b"\n\n".join(texts_alike(50, seed=11)))
    paths = [corpus, tmp_path / "more.txt"]
    first, *others = [
        tw.duplicates(paths, cluster=client, split_on="paragraph", **FOLDED) for client in clusters.values()
    ]
    assert len(first.pairs)
    assert all(same(first, other) for other in others)


def test_the_command_prints_what_the_function_finds(corpus: Path, client: Client) -> None:
    found = tw.duplicates(corpus, cluster=client, **FOLDED)
    assert found.clusters == ((0, 1, 4), (2, 3))
    assert found.exact_groups == ((2, 3),)
    assert found.pairs.tolist() == [[0, 1], [0, 4], [1, 4]]
    assert found.jaccard.tolist() == [1.0, 8 / 10, 8 / 10]
    printed = json.loads(run(str(corpus), *AS_OPTIONS, "--json", client=client).stdout)
    assert printed | {"seconds": 0} == found.to_json() | {"seconds": 0}
    text = run(str(corpus), *AS_OPTIONS, "--quiet", client=client).stdout
    assert (
        "1 the same as an earlier one; 3 pairs with a Jaccard index of 0.6 or more, of 3 that 64 bands"
        in text
    )
    assert "2 clusters; without 3 of their documents, 2 are left" in text
    assert f"  {corpus}/a, {corpus}/b, {corpus}/e\n" in text
    lines = run(str(corpus), *AS_OPTIONS, "--list", "-q", client=client).stdout
    assert lines == "".join(f"{corpus}/{name}\n" for name in "bde")
    assert lines.split() == list(found.dropped)


def test_names_are_listed_as_the_bytes_that_they_are(tmp_path: Path, client: Client) -> None:
    for name in (b"a", b"\xff"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text("x")
    result = run(str(tmp_path), "--list", "-q", client=client)
    assert result.stdout_bytes == os.fsencode(tmp_path) + b"/\xff\n"


def test_names_with_line_breaks_are_listed_by_nuls_alone(tmp_path: Path, client: Client) -> None:
    for name in ("a", "b", "c\nd", "e\rf"):
        (tmp_path / name).write_text("x")
    result = run(str(tmp_path), "--list", "--null", "-q", client=client)
    named = b"".join(os.fsencode(tmp_path / name) + b"\0" for name in ("b", "c\nd", "e\rf"))
    assert result.stdout_bytes == named
    assert run(str(tmp_path), "--list", "-0", "-q", client=client).stdout_bytes == named
    refused = run(str(tmp_path), "--list", "-q", client=client, expected=1)
    assert refused.stdout == ""
    assert f"a name has a line break in it, {str(tmp_path / 'c')!r}"[:-1] + r"\nd'" in refused.stderr
    assert "give --null (-0), which ends each by a NUL" in refused.stderr
    assert "--null says how listed names end: add --list" in run("x", "-0", client=client, expected=2).stderr


def test_documents_are_listed_after_their_ids(tmp_path: Path, client: Client) -> None:
    """Where there are any: also one that is no text, or of two lines, stays in a line of its own."""
    rows = ['{"text": "x", "id": "first"}', '{"text": "x", "id": "url 2"}', '{"text": "x"}']
    rows += ['{"text": "x", "id": "\\ud83d"}', '{"text": "x", "id": "a\\nb\\tc"}']
    (tmp_path / "s.jsonl").write_text("".join(f"{row}\n" for row in rows))
    options = str(tmp_path), "--field", "text", "--id-field", "id"
    lines = run(*options, "--list", "-q", client=client).stdout.splitlines()
    names = [f"{tmp_path}/s.jsonl:{number}" for number in (2, 3, 4, 5)]
    assert [line.split("\t") for line in lines] == [
        ["url 2", names[0]],
        ["", names[1]],
        ["\ufffd", names[2]],
        [r"a\nb\tc", names[3]],
    ]
    text = run(*options, "-q", client=client).stdout
    assert f"  {tmp_path}/s.jsonl:1 (first), {names[0]} (url 2), {names[1]}, " in text


def test_one_thing_is_printed(corpus: Path, client: Client) -> None:
    result = run(str(corpus), "--list", "--json", client=client, expected=2)
    assert "--list and --json both say what is printed" in result.stderr


def test_what_is_written_reads_back(corpus: Path, tmp_path: Path, client: Client) -> None:
    pyarrow = pytest.importorskip("pyarrow.parquet")
    xarray = pytest.importorskip("xarray")
    outs = {ending: tmp_path / f"d.{ending}" for ending in ("json", "zarr", "parquet")}
    for out in outs.values():
        found = tw.duplicates(corpus, cluster=client, signatures=True, out=out, **FOLDED)
    stored = json.loads(outs["json"].read_text())
    assert stored | {"seconds": 0} == found.to_json() | {"seconds": 0}
    with xarray.open_zarr(outs["zarr"], consolidated=False) as group:
        assert group["document"].values.tolist() == list(found.documents)
        np.testing.assert_array_equal(group["cluster"], found.cluster)
        np.testing.assert_array_equal(group["exact"], found.exact)
        np.testing.assert_array_equal(np.stack([group["left"], group["right"]], axis=1), found.pairs)
        np.testing.assert_array_equal(group["jaccard"], found.jaccard)
        np.testing.assert_array_equal(group["signatures"], found.signatures)
        assert group.attrs["options"] == found.options
    table = pyarrow.read_table(outs["parquet"])
    assert table["document"].to_pylist() == list(found.documents)
    assert table["cluster"].to_pylist() == found.cluster.tolist()
    assert table["exact"].to_pylist() == found.exact.tolist()
    assert table["keep"].to_pylist() == [True, False, True, False, False]
    for out in outs.values():
        with pytest.raises(tw.OutputExistsError, match="exists"):
            tw.duplicates(corpus, cluster=client, out=out)
        tw.duplicates(corpus, cluster=client, out=out, overwrite=True)


def test_ids_are_kept(tmp_path: Path, client: Client) -> None:
    pyarrow = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.jsonl"
    lines = [{"text": "x", "id": "first"}, {"text": "x"}, {"text": "y", "id": "third"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given: dict[str, Any] = {"cluster": client, "field": "text", "id_field": "id"}
    found = tw.duplicates(path, out=tmp_path / "d.parquet", **given)
    assert found.ids == ("first", None, "third")
    assert pyarrow.read_table(tmp_path / "d.parquet")["id"].to_pylist() == list(found.ids)
    tw.duplicates(path, out=tmp_path / "d.zarr", **given)


def test_earlier_outputs_are_not_compared(corpus: Path, client: Client) -> None:
    pytest.importorskip("pyarrow")
    for name in ("d.json", "d.zarr", "d.parquet"):
        tw.duplicates([corpus / "a"], cluster=client, out=corpus / name)
    for out in ("h.json", "w.json"):
        by = ["--by", "word"] if out == "w.json" else []
        result = CliRunner().invoke(
            cli,
            [
                *("histogram", str(corpus / "a"), *by, "--out", str(corpus / out)),
                *("--device", "cpu", "--profile", client.scheduler.address),
            ],
        )
        assert result.exit_code == 0, result.output
    listed = list_corpus([corpus])
    assert [os.path.basename(each.name) for each in listed.documents] == list(TEXTS)
    assert "5 earlier outputs of Tilewright not counted; name one to count it" in listed.notes


def test_tables_hold_names_that_are_no_utf8(tmp_path: Path, client: Client) -> None:
    pytest.importorskip("pandas")
    names = [f"{tmp_path}/{name}" for name in ("a", "b\udcff", "c")]
    for name, text in zip(names, ("one two three", "one two three", "two three one two three"), strict=True):
        Path(name).write_text(text)
    found = tw.duplicates(tmp_path, ngram=2, threshold=0.5, cluster=client)
    table = found.to_pandas()
    assert table.index.tolist() == names
    assert table["exact"].tolist() == [names[0], names[0], names[2]]
    table = tw.duplicates(names[1:], ngram=2, threshold=0.5, cluster=client).pairs_to_pandas()
    assert table.values.tolist() == [[names[1], names[2], 2 / 3]]


def test_tables_of_pandas(corpus: Path, client: Client) -> None:
    pytest.importorskip("pandas")
    found = tw.duplicates(corpus, cluster=client, **FOLDED)
    table = found.to_pandas()
    assert table.index.tolist() == list(found.documents)
    assert table["cluster"].tolist() == [found.documents[place] for place in found.cluster]
    assert table["exact"].tolist() == [found.documents[place] for place in found.exact]
    assert table[~table["keep"]].index.tolist() == list(found.dropped)
    assert "id" not in table
    pairs = found.pairs_to_pandas()
    assert pairs["left"].tolist() == [found.documents[place] for place in found.pairs[:, 0]]
    assert pairs["right"].tolist() == [found.documents[place] for place in found.pairs[:, 1]]
    assert pairs["jaccard"].tolist() == found.jaccard.tolist()


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"threshold": 0}, r"threshold=0 is no Jaccard index above 0 and up to 1"),
    ({"threshold": 1.01}, r"threshold=1.01 is no Jaccard index"),
    ({"threshold": float("nan")}, r"threshold=nan is no Jaccard index"),
    ({"threshold": True}, r"threshold=True is no Jaccard index"),
    ({"num_perm": 0}, r"num_perm=0 is no whole number of numbers of a signature from 1 to 4096"),
    ({"ngram": 0}, r"ngram=0 is no whole number of units of a shingle from 1 to 1000"),
    ({"shingle": "byte"}, r"shingle='byte' is no unit of shingles; it may be 'word', 'character'"),
    ({"hash": "md5"}, r"hash='md5' is no hash of shingles"),
    ({"scheme": "affine64"}, r"scheme='affine64' is no scheme of permutations"),
    ({"pairs": "some"}, r"pairs='some' is no choice of pairs"),
    ({"seed": -1}, r"seed=-1 is no whole number of seeds"),
    ({"bands": 4}, r"bands=4 and rows=None: give both, or neither"),
    ({"bands": 20, "rows": 7}, r"bands=20 of rows=7 take 140 numbers, and a signature has num_perm=128"),
    ({"out": "d.csv"}, r"ends in '.csv'; the ending says the format and is .json or .parquet or .zarr"),
    ({"out": 5}, r"out=5 is no path"),
    ({"split_on": "word"}, r"split_on='word' is no passage of a text"),
    ({"on_error": "ignore"}, r"on_error='ignore' is no way with bad files"),
)


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_what_means_nothing_is_refused_before_anything_is_read(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(b"nothing that could be read")
    with pytest.raises(tw.OptionError, match=message):
        tw.duplicates(path, cluster="there is no such cluster", **given)


def test_bad_files_are_listed_and_the_status_says_so(corpus: Path, client: Client) -> None:
    (corpus / "f.gz").write_bytes(b"\x1f\x8b\x08 nothing")
    result = run(str(corpus), "--on-error", "report", "--json", client=client, expected=3)
    assert "left out: " in result.stderr
    assert "f.gz cannot be decompressed" in result.stderr
    (bad,) = json.loads(result.stdout)["bad"]
    assert bad[0] == str(corpus / "f.gz")
    assert "f.gz" in run(str(corpus), client=client, expected=1).stderr


def test_a_corpus_at_a_url(corpus: Path, client: Client) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(corpus), "/test_duplicates", recursive=True)
    try:
        url = "memory://test_duplicates"
        found, local = (tw.duplicates(each, cluster=client, **FOLDED) for each in (url, corpus))
        assert found.documents == tuple(each.replace(str(corpus), url) for each in local.documents)
        assert found.cluster.tolist() == local.cluster.tolist()
        assert found.pairs.tolist() == local.pairs.tolist()
    finally:
        memory.rm("/test_duplicates", recursive=True)
