"""Duplicates of corpora are those that a comparison of every two documents finds among pairs that agree in a band,
wherever a corpus is cut."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client

from tests.kernels.duplicates import naive_shingles as naive
from tests.pipeline.text.test_counting import cpu_workers
from tilewright.pipeline.duplicates.job import find_duplicates
from tilewright.pipeline.duplicates.options import options_of
from tilewright.pipeline.duplicates.result import Duplicates
from tilewright.pipeline.errors import CorpusError, PlanError
from tilewright.pipeline.events import Event, Notice
from tilewright.pipeline.text.corpus import list_corpus
from tilewright.pipeline.text.formats.reading import reading_of

DEFAULTS: dict[str, Any] = {
    "threshold": 0.5,
    "shingle": "word",
    "ngram": 2,
    "casefold": False,
    "normalise": None,
    "num_perm": 32,
    "bands": 16,
    "rows": 2,
    "seed": 1,
    "hash": "sha1",
    "scheme": "affine32",
    "pairs": "all",
    "signatures": True,
}


def find(
    client: Client, paths: list[Path], reading: dict[str, Any] | None = None, **given: Any
) -> Duplicates:
    tasks = {name: given.pop(name) for name in ("most_pairs", "task_keys", "batch_nbytes") if name in given}
    listener = given.pop("listener", lambda _: None)
    on_error = given.pop("on_error", "stop")
    return find_duplicates(
        client,
        list_corpus(paths, reading=reading_of(**(reading or {}))),
        options_of(**(DEFAULTS | given)),
        cpu_workers(client),
        listener=listener,
        on_error=on_error,
        **tasks,
    )


def expected(texts: list[bytes], **given: Any) -> tuple[list[int], list[int], dict[tuple[int, int], float]]:
    """For each document the first that is the same, and the first of its cluster; and the pairs."""
    options = DEFAULTS | given
    about = [options[name] for name in ("shingle", "ngram", "casefold", "normalise")]
    sets = [naive.shingles(text, *about) for text in texts]
    minima = [
        naive.signature(
            [naive.hash_of(each, options["hash"]) for each in shingles],
            options["scheme"],
            options["num_perm"],
            options["seed"],
        )
        for shingles in sets
    ]
    exact = [texts.index(text) for text in texts]
    rows, pairs = options["rows"], {}
    for i, j in itertools.combinations(range(len(texts)), 2):
        if exact[i] != i or exact[j] != j or not sets[i] or not sets[j]:
            continue
        bands = [slice(rows * band, rows * (band + 1)) for band in range(options["bands"])]
        near = naive.jaccard(sets[i], sets[j])
        if any(minima[i][band] == minima[j][band] for band in bands) and near >= options["threshold"]:
            pairs[i, j] = near
    cluster = list(exact)
    for _ in texts:
        for i, j in pairs:
            first = min(cluster[i], cluster[j])
            cluster = [first if each in (cluster[i], cluster[j]) else each for each in cluster]
    return exact, cluster, pairs


def check(found: Duplicates, texts: list[bytes], **given: Any) -> None:
    exact, cluster, pairs = expected(texts, **given)
    assert found.exact.tolist() == exact
    assert found.cluster.tolist() == cluster
    assert dict(zip(map(tuple, found.pairs.tolist()), found.jaccard.tolist(), strict=True)) == pairs
    assert found.pairs.tolist() == sorted(found.pairs.tolist())
    assert found.nbytes == sum(map(len, texts))


def texts_alike(count: int, seed: int) -> list[bytes]:
    """Texts of which many are like an earlier one, or the same, and some hold nothing."""
    chance = random.Random(seed)
    vocabulary = ["Straße", "und", "the", "of", "好", "e\u0301t", *(f"w{k}" for k in range(50))]
    texts: list[list[str]] = []
    for _ in range(count):
        kind = chance.random()
        if texts and kind < 0.5:
            text = list(chance.choice(texts))
            for _ in range(chance.randrange(4)):
                if text:
                    text[chance.randrange(len(text))] = chance.choice(vocabulary)
            texts.append(text)
        else:
            texts.append(chance.choices(vocabulary, k=chance.choice([0, 1, 2, 12, 30])))
    return [" ".join(text).encode() for text in texts]


VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"shingle": "character", "ngram": 5, "threshold": 0.4, "scheme": "legacy"},
    {"hash": "xxh32", "threshold": 0.8, "bands": 4, "rows": 3, "seed": 7, "casefold": True},
    {"ngram": 9, "threshold": 1.0, "normalise": "NFC", "num_perm": 40},
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("given", VARIANTS)
def test_duplicates_are_those_of_a_comparison_of_every_two(
    without_dask: Client, tmp_path: Path, given: dict[str, Any]
) -> None:
    texts = texts_alike(60, seed=len(given))
    for place, text in enumerate(texts):
        (tmp_path / f"{place:02}.txt").write_bytes(text)
    found = find(without_dask, [tmp_path], **given)
    check(found, texts, **given)
    assert len(found.clusters) > 1
    assert found.documents == tuple(str(tmp_path / f"{place:02}.txt") for place in range(60))
    assert found.candidates >= len(found.pairs)
    assert found.signatures is not None
    options = DEFAULTS | given
    about = [options[name] for name in ("shingle", "ngram", "casefold", "normalise")]
    for text, signature in zip(texts, found.signatures.tolist(), strict=True):
        hashes = [naive.hash_of(each, options["hash"]) for each in naive.shingles(text, *about)]
        assert signature == naive.signature(hashes, options["scheme"], options["num_perm"], options["seed"])


def same(one: Duplicates, other: Duplicates) -> bool:
    return one.to_json() | {"seconds": 0} == other.to_json() | {"seconds": 0}


READING = {"field": "text", "id_field": "id"}


def put_shards(folder: Path) -> list[bytes]:
    """Write texts to four files, and return them."""
    texts = texts_alike(80, seed=5)
    lines = [{"text": text.decode(), "id": str(k)} for k, text in enumerate(texts)]
    for shard in range(4):
        with gzip.open(folder / f"{shard}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines[20 * shard : 20 * shard + 20])
    return texts


def test_the_answer_does_not_depend_on_how_the_corpus_is_cut(
    without_dask: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = put_shards(tmp_path)
    found = find(without_dask, [tmp_path], READING)
    check(found, texts)
    assert found.ids == tuple(map(str, range(80)))
    assert found.documents[21] == f"{tmp_path}/1.jsonl.gz:2"
    assert same(found, find(without_dask, [tmp_path], READING, task_keys=7, batch_nbytes=300))
    monkeypatch.setattr("tilewright.pipeline.duplicates.fetching.TASK_NBYTES", 100)
    monkeypatch.setattr("tilewright.pipeline.duplicates.comparing.BATCH_NBYTES", 100)
    assert same(found, find(without_dask, [tmp_path], READING, batch_nbytes=300))


@pytest.mark.slow  # processes import all of it, and load its loops
def test_the_answer_of_other_processes_is_the_same(
    without_dask: Client, processes: Client, tmp_path: Path
) -> None:
    put_shards(tmp_path)
    one, other = (find(each, [tmp_path], READING, task_keys=7) for each in (without_dask, processes))
    assert same(one, other)


def test_large_plain_files_are_not_cut(without_dask: Client, tmp_path: Path) -> None:
    words = np.random.default_rng(0).integers(0, 10**6, 60_000)
    text = " ".join(map(str, words.tolist())).encode()
    texts = [text, text[:-1], b"small", text]
    for place, each in enumerate(texts):
        (tmp_path / str(place)).write_bytes(each)
    with dask.config.set({"tilewright.piece-nbytes": 2**15}):
        found = find(without_dask, [tmp_path], num_perm=4, bands=2, rows=2)
    assert found.exact.tolist() == [0, 1, 2, 0]
    assert found.clusters == ((0, 1, 3),)
    assert found.pairs.tolist() == [[0, 1]]
    assert found.jaccard.tolist() == [
        naive.jaccard(naive.shingles(text, "word", 2), naive.shingles(text[:-1], "word", 2))
    ]


def test_links_find_the_same_clusters_with_fewer_comparisons(without_dask: Client, tmp_path: Path) -> None:
    texts = texts_alike(40, seed=3) + [b"a b c d e f g h i j k l %d" % k for k in range(40)]
    (tmp_path / "all.txt").write_bytes(b"\n".join(texts) + b"\n")
    every = find(without_dask, [tmp_path], {"split_on": "line"})
    links = find(without_dask, [tmp_path], {"split_on": "line"}, pairs="links")
    assert links.cluster.tolist() == every.cluster.tolist()
    assert links.candidates < every.candidates / 3
    known = dict(zip(map(tuple, every.pairs.tolist()), every.jaccard.tolist(), strict=True))
    for pair, near in zip(links.pairs.tolist(), links.jaccard.tolist(), strict=True):
        assert known[tuple(pair)] == near
    with pytest.raises(PlanError, match="pairs='links'"):
        find(without_dask, [tmp_path], {"split_on": "line"}, most_pairs=500)


def test_documents_without_shingles_are_only_exact_duplicates(without_dask: Client, tmp_path: Path) -> None:
    texts = [b"", b"!!!", b"", b"???", b"!!!", b"one", b"one.", b"One"]
    for place, text in enumerate(texts):
        (tmp_path / str(place)).write_bytes(text)
    found = find(without_dask, [tmp_path])
    check(found, texts)
    assert found.exact_groups == ((0, 2), (1, 4))
    assert found.clusters == ((0, 2), (1, 4), (5, 6))
    assert found.dropped == tuple(str(tmp_path / each) for each in ("2", "4", "6"))
    assert find(without_dask, [tmp_path / "0"]).clusters == ()


def test_bad_files_are_left_out_where_that_is_asked_for(without_dask: Client, tmp_path: Path) -> None:
    for name, text in (("a", b"one two three"), ("c", b"one two three"), ("d", b"x")):
        (tmp_path / name).write_bytes(text)
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"one two three")[:-4])
    with pytest.raises(CorpusError, match=r"b\.gz cannot be decompressed"):
        find(without_dask, [tmp_path])
    found = find(without_dask, [tmp_path], on_error="report")
    assert found.documents == tuple(str(tmp_path / name) for name in "acd")
    assert found.clusters == ((0, 1),)
    assert [name for name, _ in found.bad] == [str(tmp_path / "b.gz")]


def test_remarks_are_told(without_dask: Client, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{}\n')
    seen: list[Event] = []
    find(without_dask, [tmp_path], {"field": "text"}, listener=seen.append)
    told = f"{tmp_path}/a.jsonl: 1 record without a field 'text', counted as empty"
    assert told in [each.message for each in seen if isinstance(each, Notice)]
