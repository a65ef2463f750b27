"""What chunks of lines take of a GPU, and which pieces may be counted by them: arithmetic that a plan needs too, where
there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.kernels.duplicates.line_tiles import newlines_nbytes
from tilewright.kernels.numbers import ceil_div, round_up
from tilewright.kernels.records.span_numbers import numbers_nbytes
from tilewright.pipeline.text.corpus import Piece
from tilewright.pipeline.text.formats.listing import TEXT
from tilewright.pipeline.text.formats.reading import Reading

TEXT_STEP_NBYTES = 32 * 2**20
"""Memory for texts is allocated in multiples of this, so that a piece can reuse the memory of one of nearly the same
size."""
LEAST_NBYTES = 2**20
"""Of files that are shorter on average, opening them one by one to look at their first bytes would take longest."""
MOST_LINE_NBYTES = 2**22
"""A longer line would take longer than all others of its chunk: one thread or a few go through it byte after byte."""
BESIDE_NBYTES = 2**16
"""What stands between the files of a chunk or a piece, before them and behind them, at most: some bytes for each."""
CHUNK_NBYTES = 2**27 - MOST_LINE_NBYTES - BESIDE_NBYTES
"""Text that is brought and worked on at once. On an H100 it takes 3 ms to come: of smaller ones the interpreter would
have too many to deal with. What they take of the device's memory grows by powers of two, so they stay below one, though
they end behind a line, with what stands beside their files."""
CHUNKS = 4
"""Chunks under way at the same time, of which some are brought while others are worked on: where one waits for what it
has to ask of the GPU, another keeps it at work. With six a field was counted at 15 to 16 GB/s, with four at 19 to 20,
on 16 cores and on 32: each has four threads that read."""
MOST_LINES = 2**22
"""Lines of a chunk: each takes eight bytes of the device's memory at least, and a chunk of newlines alone has 2**27."""
MOST_SPANS = 2**7 - 1
"""Files of a chunk, or parts of some: of each, `span_numbers` has 64 KiB, so that those of one more would take 16 MiB
in place of 8. Of files of `LEAST_NBYTES` a chunk has no more, but tiny ones may lie beside a large one."""
MOST_WORDS_NBYTES = 2**30
"""Texts of a field whose words are counted together: a count ends with a list, and takes a table of its own."""


def are_large(piece: Piece) -> bool:
    """Whether the documents of a piece are large files on a disk that are not known to be anything but texts."""
    return (
        piece.is_local
        and 0 < LEAST_NBYTES * len(piece.documents) <= piece.nbytes
        and all(document.codec in (None, TEXT) for document in piece.documents)
    )


def may_be_fields(piece: Piece, reading: Reading) -> bool:
    """Whether the documents of a piece may be the texts of one field that a GPU finds: what its files are is not known
    before their first bytes are looked at."""
    return (
        len(reading.fields) == 1
        and not (reading.id_field or reading.encoding or reading.raw)
        and are_large(piece)
    )


def whole_nbytes(nbytes: int) -> int:
    """Memory of a GPU for a text of so many bytes that is brought as a whole; 0 for none."""
    return round_up(nbytes + BESIDE_NBYTES, TEXT_STEP_NBYTES) if nbytes else 0


def even_nbytes(nbytes: int) -> int:
    """How large chunks of so many bytes are, of which none is much smaller than others: each takes as many calls."""
    return ceil_div(nbytes, max(1, ceil_div(nbytes, CHUNK_NBYTES)))


def fields_nbytes(pieces: Sequence[Piece], tasks: int) -> int:
    """Memory of a GPU for pieces of which so many are counted at a time by a field, at most: of each chunk the bytes as
    they are stored, as much for the texts, what says where lines end, and what is found of each file."""
    return _chunks_nbytes(pieces, tasks, 2)


def words_nbytes(pieces: Sequence[Piece], tasks: int) -> int:
    """The same where words are counted, without the tables of the tasks: their texts lie together."""
    texts = max((min(piece.nbytes + BESIDE_NBYTES, MOST_WORDS_NBYTES) for piece in pieces), default=0)
    return min(tasks, len(pieces)) * round_up(texts, TEXT_STEP_NBYTES) + _chunks_nbytes(pieces, tasks, 1)


def _chunks_nbytes(pieces: Sequence[Piece], tasks: int, times: int) -> int:
    """Memory for chunks at a time, with so many times their lengths."""
    if not pieces:
        return 0
    chunks, nbytes = most_chunks(pieces, tasks)
    spans = min(MOST_SPANS, max(len(piece.documents) for piece in pieces))
    text = chunk_text_nbytes(nbytes)
    return chunks * (times * text + newlines_nbytes(nbytes, MOST_LINES) + numbers_nbytes(spans))


def most_chunks(pieces: Sequence[Piece], tasks: int) -> tuple[int, int]:
    """How many chunks there may be at a time of pieces of which so many are worked on, and the bytes of the longest."""
    # A chunk that is full of spans ends as many files, any other but a piece's last has as many bytes as it may.
    most = sorted(
        (ceil_div(piece.nbytes, CHUNK_NBYTES) + len(piece.documents) // MOST_SPANS for piece in pieces),
        reverse=True,
    )
    chunks = min(CHUNKS, sum(most[:tasks]))
    return chunks, min(CHUNK_NBYTES + MOST_LINE_NBYTES, max(piece.nbytes for piece in pieces))


def chunk_text_nbytes(nbytes: int) -> int:
    """Memory for the text of a chunk of so many bytes."""
    return round_up(nbytes + BESIDE_NBYTES, TEXT_STEP_NBYTES)
