"""Tokens of a corpus counted by the workers of a GPU, whole path, equal those that cores count."""

from __future__ import annotations

import gzip
from pathlib import Path

import dask
import numpy as np
import pytest

import tilewright as tw

pytestmark = pytest.mark.gpu

KINDS = ["word", "line", "ngram:3:byte", "ngram:3:character", "ngram:5:character", "ngram:3"]


def corpus(folder: Path, rng: np.random.Generator) -> Path:
    """Large plain files, that are cut within words, lines and characters; and what the cores count of them."""
    folder.mkdir()
    words = [f"wörd{number:x}" for number in range(20_000)] + ["the", "of", "漢字", "हिन्दी"] * 5_000
    text = " ".join(words[k] for k in rng.integers(0, len(words), 600_000).tolist()).encode()
    (folder / "a.txt").write_bytes(text)
    (folder / "b.txt").write_bytes(text[:1_500_000].replace(b" ", b"\r\n") + b"x" * 300_000)
    edges = bytes.fromhex("0a0d20417f808f909fa0bfc0c1c2dfe0e1ecedeeeff0f1f3f4f5ff")
    (folder / "c.bin").write_bytes(bytes(rng.choice(np.frombuffer(edges, np.uint8), 1_000_000)))
    return folder


@pytest.mark.parametrize("by", KINDS)
@pytest.mark.parametrize("piece_nbytes", [1 << 20, 1 << 25])
def test_counts_are_those_of_the_cores(
    by: str, piece_nbytes: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    folder, folded = corpus(tmp_path / "texts", rng), by == "word"
    with dask.config.set({"tilewright.piece-nbytes": piece_nbytes}):
        found = tw.histogram(folder, by=by, device="cuda", casefold=folded)
        wanted = tw.histogram(folder, by=by, device="cpu", casefold=folded)
    assert found.device != "CPU"
    assert found.tokens is not None
    assert wanted.tokens is not None
    assert list(found.tokens) == list(wanted.tokens)
    np.testing.assert_array_equal(found.counts, wanted.counts)
    assert found.undecodable == wanted.undecodable
    assert (found.nbytes, found.document_count) == (wanted.nbytes, wanted.document_count)


def test_what_is_not_plain_is_counted_beside_it(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = corpus(tmp_path / "texts", rng)
    (folder / "d.gz").write_bytes(gzip.compress((folder / "a.txt").read_bytes()))
    for number in range(50):
        (folder / f"small-{number}.txt").write_bytes(b"a few words of a small file\n" * number)
    found = tw.histogram(folder, by="word", device="cuda", state=tmp_path / "state")
    wanted = tw.histogram(folder, by="word", device="cpu")
    again = tw.histogram(folder, by="word", device="cuda", state=tmp_path / "state")
    for each in (found, again):
        assert each.tokens is not None
        assert wanted.tokens is not None
        assert list(each.tokens) == list(wanted.tokens)
        np.testing.assert_array_equal(each.counts, wanted.counts)
