"""What chunks of lines take of a GPU, by arithmetic, is what they are cut into."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tilewright.kernels.records.span_numbers import MOST_UNDECIDED, ROW_LENGTH, listed, numbers_nbytes
from tilewright.pipeline.text.corpus import Document, Piece, list_corpus
from tilewright.pipeline.text.gpu import chunks, room
from tilewright.pipeline.text.gpu.room import MOST_SPANS, fields_nbytes, words_nbytes


def piece_of(*sizes: int) -> Piece:
    documents = tuple(Document(f"d{place}", f"/d{place}", size) for place, size in enumerate(sizes))
    return Piece(0, documents, 0, sum(sizes))


LARGE = 2 * 2**27 + 2**25 + 2**16
"""A chunk as stored and decoded, its lines, and how many its tiles have."""
SMALL_NBYTES = 5 * 2**20
SMALL = 2 * 2**25 + 2**25 + 2**12
TINY_NBYTES = 5 * 2**19
TINY = 2 * 2**25 + 2**25 + 2**11
"""Places for lines are given by powers of two."""
STEP_NBYTES = 2**25
STEP = 2 * 2**26 + 2**25 + 2**14
"""What stands beside the files takes a step more."""


@pytest.mark.parametrize(
    ("pieces", "tasks", "chunks", "text", "numbers"),
    [
        ([], 3, 0, 0, 0),
        ([(SMALL_NBYTES,)], 1, 1, SMALL, 2**17),
        ([(TINY_NBYTES,)], 1, 1, TINY, 2**17),
        ([(STEP_NBYTES,)], 1, 1, STEP, 2**17),
        ([(SMALL_NBYTES - 1, 1)], 1, 1, SMALL, 2**18),
        ([(SMALL_NBYTES,), (SMALL_NBYTES,)], 1, 1, SMALL, 2**17),
        ([(SMALL_NBYTES,), (SMALL_NBYTES,)], 2, 2, SMALL, 2**17),
        ([(SMALL_NBYTES - 125, *[1] * 125)], 1, 1, SMALL, 2**23),
        ([(SMALL_NBYTES - 126, *[1] * 126)], 1, 2, SMALL, 2**23),
        ([(SMALL_NBYTES - 500, *[1] * 500)], 1, 4, SMALL, 2**23),
        ([(SMALL_NBYTES - 500, *[1] * 500), (2**21,), (2**21,)], 2, 4, SMALL, 2**23),
        ([(2**31, *[1024] * 2000)], 1, 4, LARGE, 2**23),
        ([(2**31,), (2**30, *[1024] * 2000)], 1, 4, LARGE, 2**23),
    ],
)
def test_memory_of_chunks(
    pieces: list[tuple[int, ...]], tasks: int, chunks: int, text: int, numbers: int
) -> None:
    """A last chunk of two thousand tiny files had 256 MiB of numbers, of which no plan knew."""
    given = [piece_of(*sizes) for sizes in pieces]
    assert fields_nbytes(given, tasks) == chunks * (text + numbers)
    step = {LARGE: 2**27, STEP: 2**26, 0: 0}.get(text, 2**25)
    once = text - step
    texts = 2**30 if text == LARGE else step
    assert words_nbytes(given, tasks) == min(tasks, len(pieces)) * texts + chunks * (once + numbers)


def test_numbers_of_a_chunk_stay_below_a_power_of_two() -> None:
    assert numbers_nbytes(MOST_SPANS) == 2**23
    assert numbers_nbytes(MOST_SPANS + 1) == 2**24
    assert room.LEAST_NBYTES * MOST_SPANS >= room.CHUNK_NBYTES  # files of the least length fill a chunk


@pytest.mark.parametrize("spans", [1, 2, 7])
def test_numbers_of_spans_lie_one_behind_the_other(spans: int) -> None:
    edges = [listed(spans, place) for place in range(spans + 1)]
    assert edges[0] == 1 + 2 * 256 + ROW_LENGTH * spans
    assert {b - a for a, b in itertools.pairwise(edges)} == {2 * MOST_UNDECIDED}
    assert 8 * edges[-1] <= numbers_nbytes(spans) < 16 * edges[-1]


@pytest.mark.parametrize("most", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    "lines",
    [
        (40, 1, 1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 40), (1, 1, 30, 1, 1, 30, 1, 1), (9, 11, 1, 10, 0, 3),
        (1,) * 13, (5,) * 9, (100,), (29, 1, 1),
    ],
)  # fmt: skip
def test_no_more_chunks_than_a_plan_counts(
    most: int, lines: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of two bytes each, so that chunks may end in the midst of files."""
    for number, count in enumerate(lines):
        (tmp_path / f"{number:02}").write_bytes(b"a\n" * count)
    monkeypatch.setattr(room, "CHUNK_NBYTES", 20)
    monkeypatch.setattr(room, "CHUNKS", 1000)
    for module in (room, chunks):
        monkeypatch.setattr(module, "MOST_SPANS", most)
    corpus = list_corpus([tmp_path])
    piece = Piece(0, corpus.documents, 0, corpus.nbytes)
    cut = list(chunks.chunks_of(piece.documents, room.even_nbytes(piece.nbytes)))
    spans = max(map(len, cut))
    assert spans <= min(most, len(lines))
    texts = room.TEXT_STEP_NBYTES
    assert fields_nbytes([piece], 1) >= len(cut) * (2 * texts + 8 * 32 + numbers_nbytes(spans))
