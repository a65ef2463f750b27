"""The parts of the search for duplicates by themselves: bands, clusters, buckets, batches, and texts in any blocks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import xxhash
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampling import examples
from tilewright.pipeline.duplicates import buckets
from tilewright.pipeline.duplicates.bands import RECALL, best_bands, chance
from tilewright.pipeline.duplicates.buckets import Buckets, all_pairs, find_buckets, join_keys, stars
from tilewright.pipeline.duplicates.clusters import connected, first_equal, groups_of
from tilewright.pipeline.duplicates.comparing import batches_of
from tilewright.pipeline.duplicates.fetching import Wanted, read_texts
from tilewright.pipeline.duplicates.signing import TOO_LONG
from tilewright.pipeline.errors import DocumentError, PlanError
from tilewright.pipeline.text.corpus import Piece, list_corpus
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.formats.sources import Found
from tilewright.pipeline.text.whole.texts import texts_of

CHOSEN = {
    (0.01, 64): (64, 1), (0.3, 128): (64, 2), (0.5, 128): (42, 3), (0.8, 1): (1, 1), (0.8, 64): (12, 5),
    (0.8, 128): (21, 6), (0.8, 256): (32, 8), (0.9, 128): (12, 10), (0.95, 128): (8, 16), (1.0, 16): (1, 16),
}  # fmt: skip


@pytest.mark.parametrize(("threshold", "num_perm"), CHOSEN)
def test_bands_find_what_is_just_near(threshold: float, num_perm: int) -> None:
    bands, rows = best_bands(threshold, num_perm)
    assert (bands, rows) == CHOSEN[threshold, num_perm]
    every = [
        (num_perm // r, r)
        for r in range(1, num_perm + 1)
        if 1 - (1 - threshold**r) ** (num_perm // r) >= RECALL
    ]
    assert (bands, rows) == (max(every, key=lambda cut: cut[1]) if every else (num_perm, 1))


def test_the_chance_that_two_documents_agree() -> None:
    assert chance(0.5, 1, 1) == 0.5
    assert chance(0.5, 2, 2) == 1 - (1 - 0.25) ** 2
    assert chance(1.0, 9, 13) == 1


edges = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=12)
    )
)


@given(edges)
def test_clusters_are_what_is_connected(graph: tuple[int, list[tuple[int, int]]]) -> None:
    n, pairs = graph
    reached = np.eye(n, dtype=bool)
    for i, j in pairs:
        reached[i, j] = reached[j, i] = True
    for k in range(n):
        reached |= reached[:, k : k + 1] & reached[k : k + 1]
    table = np.array(pairs, np.int64).reshape(-1, 2)
    found = connected(np.arange(n), table)
    assert found.tolist() == reached.argmax(axis=1).tolist()
    half = connected(np.arange(n), table[: len(table) // 2])
    assert connected(half, table[len(table) // 2 :]).tolist() == found.tolist()
    groups = [group.tolist() for group in groups_of(found)]
    assert groups == [
        [k for k in range(n) if found[k] == first] for first in range(n) if (found == first).sum() > 1
    ]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=20))
def test_the_first_of_equal_rows(rows: list[tuple[int, int]]) -> None:
    found = first_equal(np.array(rows, np.uint64).reshape(-1, 2))
    assert found.tolist() == [rows.index(row) for row in rows]


def naive_buckets(keys: np.ndarray, documents: list[int]) -> set[tuple[int, ...]]:
    found = set()
    for band in keys:
        for key in {int(band[each]) for each in documents}:
            found.add(tuple(each for each in documents if band[each] == key))
    return {each for each in found if len(each) > 1}


def listed(found: Buckets) -> list[tuple[int, ...]]:
    return [tuple(found.members[i:j].tolist()) for i, j in itertools.pairwise(found.edges.tolist())]


@settings(max_examples=examples(15))
@given(st.integers(1, 5), st.integers(0, 30), st.integers(1, 40), st.randoms())
def test_buckets_however_bands_are_cut(client: Client, bands: int, n: int, task_keys: int, random) -> None:  # type: ignore[no-untyped-def]
    keys = np.array([[random.randrange(6) + 2**63 for _ in range(n)] for _ in range(bands)], np.uint64)
    keys = keys.reshape(bands, n)
    compared = [each for each in range(n) if random.random() < 0.8]
    found = find_buckets(client, keys, np.array(compared, np.int64), lambda _: None, task_keys=task_keys)
    expected = naive_buckets(keys, compared)
    assert len(found) == len(expected)
    assert set(listed(found)) == expected
    pairs = {pair for each in expected for pair in itertools.combinations(each, 2)}
    assert all_pairs(found, 10**6).tolist() == [list(pair) for pair in sorted(pairs)]
    assert {tuple(pair) for pair in stars(found).tolist()} == {
        (each[0], other) for each in expected for other in each[1:]
    }
    labels = np.arange(n) // 7
    apart = sorted((i, j) for i, j in pairs if labels[i] != labels[j])
    assert all_pairs(found, 10**6, labels).tolist() == [list(pair) for pair in apart]


def test_more_pairs_than_there_is_memory_for() -> None:
    (found,), _ = join_keys([(np.zeros(100, np.uint64), np.arange(100))])
    assert len(all_pairs(found, 4950)) == 4950
    with pytest.raises(
        PlanError, match=r"more than 4949 pairs .* as many as 100 agree in one band.*pairs='links'"
    ):
        all_pairs(found, 4949)
    two = buckets._different([found, join_keys([(np.zeros(60, np.uint64), np.arange(70, 130))])[0][0]])
    with pytest.raises(PlanError, match="more than 5000 pairs"):
        all_pairs(two, 5000)


def test_batches_hold_every_pair_once_in_their_order() -> None:
    pairs = np.array([(i, j) for i in range(9) for j in range(i + 1, 9)], np.int64)
    nbytes = np.arange(9) * 10
    for most in (1, 100, 10**6):
        found = batches_of(pairs, nbytes, most)
        again = np.concatenate([each.documents[each.pairs] for each in found])
        assert again.tolist() == pairs.tolist()
        for each in found:
            assert each.nbytes == nbytes[each.documents].sum()
            assert each.nbytes <= most or len(each.pairs) == 1
    assert len(batches_of(pairs, nbytes, 10**6)) == 1
    assert batches_of(pairs[:0], nbytes) == []


TEXTS = [b"", b"a", b"one line\n", b"x" * 100, b"", b"y" * 37, b"z" * 200, b"last"]


@pytest.mark.parametrize("block_nbytes", [1, 16, 64, 4096])
@pytest.mark.parametrize("most_nbytes", [36, 150, 10**6])
def test_texts_come_whole_in_blocks_of_any_size(block_nbytes: int, most_nbytes: int, tmp_path: Path) -> None:
    for place, text in enumerate(TEXTS):
        (tmp_path / f"{place}.txt").write_bytes(text)
    documents = list_corpus([tmp_path]).documents
    piece = Piece(0, documents, 0, sum(map(len, TEXTS)))
    found, texts, digests, long = Found(True), [], [], set()
    blocks = texts_of(
        piece,
        Reading(),
        found,
        lambda: None,
        block_nbytes=block_nbytes,
        most_nbytes=most_nbytes,
        too_long=TOO_LONG,
    )
    for block in blocks:
        digests += block.digests.tolist()
        for start, stop in itertools.pairwise(block.edges.tolist()):
            if block.data is None:
                long.add(len(texts))
            texts.append(None if block.data is None else block.data[start:stop].tobytes())
    # Documents that fit in a block are never too long.
    assert long == {k for k, text in enumerate(TEXTS) if len(text) > max(most_nbytes, block_nbytes)}
    assert texts == [None if k in long else text for k, text in enumerate(TEXTS)]
    assert [high << 64 | low for high, low in digests] == [xxhash.xxh3_128_intdigest(each) for each in TEXTS]
    assert found.remarks.get(TOO_LONG, (0, ""))[0] == len(long)
    if long:
        assert found.remarks[TOO_LONG][1] == documents[min(long)].name


def test_a_document_that_changes_between_the_two_looks_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\nthree\n")
    (document,) = list_corpus([path]).documents
    reading = Reading(split_on="line")
    digests = np.concatenate(
        [block.digests for block in texts_of(Piece(0, (document,), 0, 14), reading, Found(), lambda: None)]
    )
    wanted = Wanted(document, np.array([0, 2]), digests[[0, 2]])
    assert read_texts([wanted], reading)[0] == b"onethree"
    for ordinals, known in (([0, 2], [0, 1]), ([1, 3], [1, 2])):
        other = Wanted(document, np.array(ordinals), digests[known])
        with pytest.raises(DocumentError, match=r"a\.txt was written to while duplicates were looked for"):
            read_texts([other], reading)


@pytest.mark.parametrize("block_nbytes", [512, 2**16])
def test_strings_of_json_with_escapes_at_every_place(block_nbytes: int, tmp_path: Path) -> None:
    """64 bytes of a string are looked at together, and copied together where no escape is among them."""
    special = ['"', "\\", "\n", "\x01", "é", "\U0001f600", "\ud800", "\ud83d\\ude00", "/"]
    texts = ["x" * before + each + "y" * (before % 67) for before in range(0, 140, 3) for each in special]
    texts += [each * times for each in special for times in (1, 31, 64, 65)]
    lines = [
        json.dumps({"a": [text], "text": text}, ensure_ascii="\ud800" <= max(text) < "\ue000")
        for text in texts
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    reading = Reading(fields=("text",))
    (document,) = list_corpus([path], reading=reading).documents
    piece = Piece(0, (document,), 0, document.nbytes)
    found: list[bytes] = []
    for block in texts_of(piece, reading, Found(), lambda: None, block_nbytes=block_nbytes):
        assert block.data is not None
        found += [
            block.data[start:stop].tobytes() for start, stop in itertools.pairwise(block.edges.tolist())
        ]
    wanted = [
        json.loads(line)["text"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        for line in lines
    ]
    assert [text.decode() for text in found] == wanted
