"""Bytes that cannot be decoded are told of by every kind that decodes, wherever documents and pieces end."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import dask
import numpy as np
import pytest
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.text.test_counting import cpu_workers, fragments
from tilewright.kernels.histograms.replaced import MalformedText, malformed_of_documents
from tilewright.kernels.histograms.token_kinds import any_kind_named
from tilewright.pipeline.text.corpus import list_corpus
from tilewright.pipeline.text.counting import count_corpus
from tilewright.pipeline.text.documents import facts_from
from tilewright.pipeline.text.histogram import Histogram
from tilewright.pipeline.text.kept_counts import State, open_counts

WRITTEN = "\ufffd".encode()
TEXTS = [
    "Grüße, naïve \ufffd words\n".encode("latin-1", "replace") * 9,
    "हिन्दी \ufffd".encode() * 20 + b"\xe0\xa4",
    b"\x80\xf0\x9f\x92",
    b"",
    "日本".encode()[1:] + b"\xff end" + "日本語 text ".encode() * 30,
]


def malformed(text: bytes) -> int:
    return text.decode("utf-8", "replace").count("\ufffd") - text.count(WRITTEN)


pieces = st.one_of(fragments, st.just(WRITTEN), st.just(b"plain " * 20), st.just("日本語".encode() * 20))


@given(text=st.lists(pieces, max_size=9).map(b"".join), cuts=st.lists(st.integers(0, 200), max_size=5))
def test_a_text_in_stretches(text: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    data = np.frombuffer(text, np.uint8)
    counter = MalformedText()
    whole = sum(counter.stretch(data[a:b]) for a, b in itertools.pairwise(edges))
    assert whole + counter.end(data[:0]) == malformed(text)
    parts = 0
    for a, b in itertools.pairwise(edges):
        margin = max(0, a - 3)
        parts += (each := MalformedText()).stretch(data[margin:b], a - margin)
        parts += each.end(data[b : b + 3])
    assert parts == malformed(text)
    found = malformed_of_documents(data, np.array(edges), 7)
    expected = {7 + d: malformed(text[a:b]) for d, (a, b) in enumerate(itertools.pairwise(edges))}
    assert found == {row: count for row, count in expected.items() if count}


def counted(
    client: Client, folder: Path, by: str, *, state: Path | None = None, per_document: bool = False
) -> Histogram:
    kind, corpus = any_kind_named(by), list_corpus([folder])
    keeping = None if state is None else State(state)
    with open_counts(
        keeping, kind, per_document=per_document, reading=corpus.reading, listener=lambda _: None
    ) as record:
        return count_corpus(
            client,
            corpus,
            kind,
            cpu_workers(client),
            per_document=per_document,
            listener=lambda _: None,
            record=record,
        )


@pytest.mark.sample(6)
@pytest.mark.parametrize("per_document", [False, True])
@pytest.mark.parametrize("nbytes", [31, 2**20])
@pytest.mark.parametrize("by", ["word", "line", "ngram:3:character", "codepoint"])
def test_every_kind_that_decodes_tells(
    without_dask: Client, tmp_path: Path, by: str, nbytes: int, per_document: bool
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for place, text in enumerate(TEXTS):
        (folder / f"{place}").write_bytes(text)
        (folder / f"{place}.gz").write_bytes(gzip.compress(text))
    expected = 2 * sum(map(malformed, TEXTS))
    assert expected > 40
    with dask.config.set({"tilewright.piece-nbytes": nbytes}):
        found = counted(without_dask, folder, by, state=tmp_path / "state", per_document=per_document)
        again = counted(without_dask, folder, by, state=tmp_path / "state", per_document=per_document)
    assert found.undecodable == again.undecodable == expected
    assert f" skipped, {expected} undecodable" in str(found).splitlines()[0]
    assert json.loads(json.dumps(found.facts()))["undecodable"] == expected


def test_kinds_of_bytes_do_not_tell(without_dask: Client, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(TEXTS[0])
    for by in ("byte", "bigram", "ngram:2:byte"):
        assert counted(without_dask, tmp_path, by).undecodable is None


def test_tokens_that_an_earlier_release_kept_do_not_say() -> None:
    assert facts_from({"tokens": "", "lost": 0}, 1)["lost"] is None
    assert facts_from({"lost": 3}, 1)["lost"] == 3
    assert facts_from({"tokens": "", "lost": 3, "tells": True}, 1)["lost"] == 3
