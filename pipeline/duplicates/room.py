"""What documents that are signed take of a GPU: arithmetic that a plan needs too, where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.kernels.duplicates.line_tiles import newlines_nbytes
from tilewright.kernels.duplicates.signing_memory import NUMBER_NBYTES, signer_nbytes
from tilewright.kernels.numbers import power_of_two
from tilewright.pipeline.duplicates.options import Options
from tilewright.pipeline.text.blocks import EXTRA_NBYTES
from tilewright.pipeline.text.blocks import MOST_DOCUMENTS as MOST_OF_A_BLOCK
from tilewright.pipeline.text.corpus import Piece
from tilewright.pipeline.text.formats.listing import TEXT
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.gpu.room import MOST_LINES, are_large, chunk_text_nbytes, most_chunks
from tilewright.pipeline.text.whole.texts import LARGE_BLOCK_NBYTES
from tilewright.pipeline.transfer.lane_blocks import LANE_NBYTES

MOST_SIGNED = 2**18
"""Lines that are signed at once: of each its signature takes memory, however short the line is."""


def may_be_lines(piece: Piece, reading: Reading) -> bool:
    """Whether the documents of a piece may be lines that a GPU finds: what its files are is not known before their
    first bytes are looked at."""
    return (
        reading.split_on == "line"
        and not (reading.fields or reading.encoding or reading.raw)
        and are_large(piece)
    )


def signing_nbytes(
    pieces: Sequence[Piece], reading: Reading, options: Options, *, threads: int, tasks: int
) -> int:
    """Memory of a worker's GPU, at most, for documents of up to `LARGE_BLOCK_NBYTES`, as of `signer_nbytes`.

    threads: of the worker that read. tasks: pieces that it has at a time. Each thread has two blocks, and a signer of
    one of them; of what may be lines of large files there are chunks, with a signer each, and blocks by which they
    come.
    """
    lines = [piece for piece in pieces if may_be_lines(piece, reading)]
    others = [piece for piece in pieces if not may_be_lines(piece, reading)]
    return _blocks_nbytes(others, options, threads, tasks) + _chunks_nbytes(lines, options, threads, tasks)


def _blocks_nbytes(pieces: Sequence[Piece], options: Options, threads: int, tasks: int) -> int:
    most = sorted((len(piece.documents) for piece in pieces), reverse=True)
    readers = min(threads, sum(most[:tasks]))  # each has whole files
    nbytes = LARGE_BLOCK_NBYTES
    if all(document.codec in (None, TEXT) for piece in pieces for document in piece.documents):
        # In no encoding has a character half as many bytes as in UTF-8.
        nbytes = min(nbytes, 2 * max((piece.nbytes for piece in pieces), default=0))
    signer = signer_nbytes(
        nbytes,
        min(MOST_OF_A_BLOCK, nbytes + 1),
        unit=options.kind.unit,
        num_perm=options.num_perm,
        bands=options.bands,
    )
    return readers * (2 * (LARGE_BLOCK_NBYTES + EXTRA_NBYTES) + signer)


def _chunks_nbytes(pieces: Sequence[Piece], options: Options, threads: int, tasks: int) -> int:
    if not pieces:
        return 0
    chunks, nbytes = most_chunks(pieces, tasks)
    lines = min(nbytes, MOST_LINES)
    signer = signer_nbytes(
        nbytes,
        min(lines, MOST_SIGNED),
        unit=options.kind.unit,
        num_perm=options.num_perm,
        bands=options.bands,
        with_ends=True,
    )
    # Of each line where it begins and ends, and its digest, two numbers.
    found = NUMBER_NBYTES * (2 * power_of_two(lines) + power_of_two(2 * lines))
    chunk = chunk_text_nbytes(nbytes) + newlines_nbytes(nbytes, MOST_LINES) + found + signer
    return 2 * threads * (LANE_NBYTES + EXTRA_NBYTES) + chunks * chunk
