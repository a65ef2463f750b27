"""``tw.signals`` and ``tilewright signals``: what they take, print and write."""

from __future__ import annotations

import csv
import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from distributed import Client

import tilewright as tw
from tests.kernels.signals.test_signals import prose
from tests.pipeline.signals.test_job import same
from tilewright.kernels.signals.definitions import COUNTS, NAMES
from tilewright.pipeline.text.corpus import list_corpus
from tilewright.workflows.cli import cli


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for place in range(3):
        (folder / f"{place}.txt").write_bytes(prose(place, 40))
    (folder / "e").write_bytes(b"")
    return folder


def run(*words: str, client: Client, expected: int = 0) -> Result:
    profile = ["--profile", client.scheduler.address]
    result = CliRunner().invoke(cli, ["signals", *words, *profile])
    assert result.exit_code == expected, result.output
    return result


def test_signals_are_the_same_for_any_number_of_workers(
    corpus: Path, tmp_path: Path, clusters: dict[int, Client]
) -> None:
    (tmp_path / "more.txt").write_bytes(b"\n\n".join(prose(place, 30) for place in range(40)))
    paths = [corpus, tmp_path / "more.txt"]
    first, *others = [tw.signals(paths, cluster=each, split_on="paragraph") for each in clusters.values()]
    assert len(first) > 40
    assert all(same(first, other) for other in others)


def test_the_command_prints_what_the_function_finds(corpus: Path, client: Client) -> None:
    found = tw.signals(corpus, cluster=client, stop_words=["of", "слово"])
    words = "--stop-word", "of", "--stop-word", "слово"
    printed = json.loads(run(str(corpus), *words, "--json", client=client).stdout)
    assert printed | {"seconds": 0} == found.to_json() | {"seconds": 0}
    assert printed["options"]["stop_words"] == ["of", "слово"]
    lines = run(str(corpus), "--quiet", client=client).stdout.splitlines()
    assert " in 4 documents in " in lines[0]
    assert [line.split()[0] for line in lines[2:]] == list(NAMES)
    (row,) = (line.split() for line in lines if line.startswith("word_count"))
    counts = np.sort(found["word_count"])
    assert row[1:] == [str(counts[k]) for k in (0, 0, 1, 3, 3)]


def test_what_is_written_reads_back(corpus: Path, tmp_path: Path, client: Client) -> None:
    pyarrow = pytest.importorskip("pyarrow.parquet")
    xarray = pytest.importorskip("xarray")
    outs = {ending: tmp_path / f"s.{ending}" for ending in ("csv", "json", "zarr", "parquet")}
    for out in outs.values():
        found = tw.signals(corpus, cluster=client, out=out)
    stored = json.loads(outs["json"].read_text())
    assert stored | {"seconds": 0} == found.to_json() | {"seconds": 0}
    with xarray.open_zarr(outs["zarr"], consolidated=False) as group:
        assert group["document"].values.tolist() == list(found.documents)
        for name in NAMES:
            np.testing.assert_array_equal(group[name], found[name])
            assert group[name].dtype == found[name].dtype
        assert group.attrs["options"] == found.options
    table = pyarrow.read_table(outs["parquet"])
    assert table.column_names == ["document", *NAMES]
    assert table["document"].to_pylist() == list(found.documents)
    for name in NAMES:
        assert table[name].to_pylist() == found[name].tolist()
    assert json.loads(table.schema.metadata[b"tilewright_signals"])["nbytes"] == found.nbytes
    with open(outs["csv"], newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["document"] for row in rows] == list(found.documents)
    for name in NAMES:
        kind = int if name in COUNTS else float
        assert [kind(row[name]) for row in rows] == found[name].tolist()
    for out in outs.values():
        with pytest.raises(tw.OutputExistsError, match="exists"):
            tw.signals(corpus, cluster=client, out=out)
        tw.signals(corpus, cluster=client, out=out, overwrite=True)


def test_ids_are_kept(tmp_path: Path, client: Client) -> None:
    pyarrow = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.jsonl"
    lines = [{"text": "x", "id": "first"}, {"text": "x"}, {"text": "y", "id": "third"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given: dict[str, Any] = {"cluster": client, "field": "text", "id_field": "id"}
    for ending in ("parquet", "zarr", "csv"):
        found = tw.signals(path, out=tmp_path / f"s.{ending}", **given)
    assert found.ids is not None
    assert list(found.ids) == ["first", None, "third"]
    assert pyarrow.read_table(tmp_path / "s.parquet")["id"].to_pylist() == list(found.ids)
    with open(tmp_path / "s.csv", newline="") as file:
        assert [row["id"] for row in csv.DictReader(file)] == ["first", "", "third"]
    assert found.to_json()["ids"] == list(found.ids)


def test_earlier_outputs_are_not_looked_at(corpus: Path, client: Client) -> None:
    pytest.importorskip("pyarrow")
    names = ("s.csv", "s.json", "s.zarr", "s.parquet")
    for name in names:
        tw.signals([corpus / "0.txt"], cluster=client, out=corpus / name)
    listed = list_corpus([corpus])
    assert [os.path.basename(each.name) for each in listed.documents] == ["0.txt", "1.txt", "2.txt", "e"]
    assert "4 earlier outputs of Tilewright not counted; name one to count it" in listed.notes


def test_tables_of_pandas(corpus: Path, client: Client) -> None:
    pytest.importorskip("pandas")
    found = tw.signals(corpus, cluster=client)
    table = found.to_pandas()
    assert table.index.tolist() == list(found.documents)
    assert table.columns.tolist() == list(NAMES)
    assert table[table["word_count"] > 0].index.tolist() == list(found.documents)[:3]


def test_files_that_are_left_out(corpus: Path, client: Client) -> None:
    (corpus / "b.gz").write_bytes(gzip.compress(b"bad")[:-4])
    assert "b.gz" in run(str(corpus), client=client, expected=1).stderr
    result = run(str(corpus), "--on-error", "report", "-q", client=client, expected=3)
    assert f"left out: {corpus}/b.gz" in result.stderr
    assert " in 4 documents in " in result.stdout


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"stop_words": ["two words"]}, r"stop_words: 'two words' is no word, a text without white space"),
    ({"stop_words": [""]}, r"stop_words: '' is no word"),
    ({"stop_words": [5]}, r"stop_words: 5 is no word"),
    ({"stop_words": 5}, r"stop_words=5 is no list of words, nor a word"),
    ({"stop_words": ["\ud800"]}, r"holds half of a surrogate pair"),
    ({"stop_words": [f"w{k}" for k in range(10_001)]}, r"10001 words were given, and 10000 are the most"),
    (
        {"out": "s.npz"},
        r"ends in '.npz'; the ending says the format and is .csv or .json or .parquet or .zarr",
    ),
    ({"out": 5}, r"out=5 is no path"),
    ({"on_error": "skip"}, r"on_error='skip'"),
)


@pytest.mark.parametrize(("given", "why"), WRONG)
def test_what_means_nothing_is_refused(corpus: Path, client: Client, given: dict[str, Any], why: str) -> None:
    with pytest.raises(tw.OptionError, match=why):
        tw.signals(corpus, cluster=client, **given)


def test_an_unknown_signal_is_named(corpus: Path, client: Client) -> None:
    found = tw.signals(corpus / "0.txt", cluster=client, stop_words="of")
    assert found.options["stop_words"] == ["of"]
    with pytest.raises(tw.OptionError, match=r"'word_counts' is no signal.*did you mean 'word_count'\?"):
        found["word_counts"]
