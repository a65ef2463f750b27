"""How a corpus is counted: how a cluster is given its pieces, and what a task does with one.

`count_corpus` runs where the corpus was listed, `count_piece` on workers. `corpus.py` finds the files and cuts them
into pieces, `blocks.py` reads a piece in blocks, the kernels count a block, `lanes.py` carries blocks to a GPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
from distributed import Client
from distributed.system import MEMORY_LIMIT

from tilewright.kernels.cpu.loops import share_of_cores, usable_cores
from tilewright.kernels.gpu.memory import is_out_of_memory
from tilewright.kernels.histograms.tokens import Kind
from tilewright.kernels.numbers import ceil_div, format_nbytes
from tilewright.pipeline import config
from tilewright.pipeline.errors import PlanError
from tilewright.pipeline.events import Listener
from tilewright.pipeline.plan.facts import WorkerFacts
from tilewright.pipeline.reduce import Reduction, end_if_given_up, reduce_pieces
from tilewright.pipeline.text.blocks import (
    EXTRA_NBYTES,
    SEPARATOR,
    Block,
    has_small_files,
    read_at_once,
    stream,
    turn_to_read,
)
from tilewright.pipeline.text.corpus import (
    MOST_DOCUMENTS,
    Corpus,
    Piece,
    check_as_listed,
    check_unchanged,
    cut_pieces,
    share_out,
)
from tilewright.pipeline.text.histogram import Histogram
from tilewright.pipeline.thread_buffers import thread_buffer
from tilewright.pipeline.threads import run_all
from tilewright.pipeline.transfer import file_upload
from tilewright.pipeline.transfer.files import let_a_tick_pass
from tilewright.pipeline.transfer.lane_blocks import LANE_NBYTES, most_neighbours

if TYPE_CHECKING:
    from tilewright.pipeline.text.lanes import Tally

logger = logging.getLogger(__name__)

TASK_BLOCKS = 64
"""Lane blocks, 8 MiB each, that a task on a GPU counts: a task costs Dask and a dozen threads some milliseconds, and
counting 512 MiB takes eleven. A worker holds the text of as many tasks in device memory as it has threads."""

ROWS_NBYTES = 32 * 2**20
"""The most per-document counts of one task: with many bins a piece holds fewer documents."""

MOST_BLOCK_NBYTES = 2**30
"""The most of a compressed document that a thread holds at a time, whatever the setting says."""

LEAST_PIECE_NBYTES = 2**20
"""A small corpus is cut finer, so that all workers get some of it, but not finer than this."""

STAGES = ("read", "count")
LEAST_STREAM_NBYTES = 2**18
"""The least stored bytes that a thread decompresses, if the piece has them: each thread costs counts of its own."""


@dataclass(frozen=True)
class Counts:
    """The nonzero counts of one piece."""

    cells: np.ndarray
    """int64: row × bins + bin, each once; the row is the document's place in the corpus, or 0."""
    values: np.ndarray
    """int64, more than 0."""
    nbytes: int
    """The piece's length, decompressed."""


@dataclass(eq=False)
class Sum:
    """What has been counted so far."""

    counts: np.ndarray
    """int64[(rows, bins)]."""
    nbytes: int


def count_corpus(
    client: Client,
    corpus: Corpus,
    kind: Kind,
    workers: Sequence[WorkerFacts],
    *,
    per_document: bool,
    listener: Listener,
) -> Histogram:
    """Count every document of the corpus on the client's workers, on the kind of device that all of them have.

    Raises
    ------
    PlanError
        The counts, one row for each document, would not fit this process's memory.
    CorpusError
        A file cannot be read or decompressed, or is not what it was when the corpus was listed.
    """
    rows = len(corpus.documents) if per_document else 1
    needed, allowed = rows * kind.bins * np.dtype(np.int64).itemsize, MEMORY_LIMIT // 2
    if needed > allowed:
        raise PlanError(
            f"{rows} documents × {kind.bins} bins take {format_nbytes(needed)}, and {format_nbytes(allowed)}"
            " (half of this process's memory) are allowed; count fewer documents, a kind with fewer bins, or"
            " not per document"
        )
    device, plain = workers[0].device, all(document.codec is None for document in corpus.documents)
    nbytes, readers = config.get("piece-nbytes"), config.threads("read-threads")
    # One that counts plain text on its CPU reads on the task's own thread, however many share the host.
    neighbours = 1 if plain and device == "cpu" else most_neighbours(worker.address for worker in workers)
    decompressors = 1 if plain else _decompressors(workers, neighbours)
    pieces = _pieces(workers, corpus, kind, nbytes, per_document, decompressors)
    threads = [readers if piece.is_plain else decompressors for piece in pieces]
    let_a_tick_pass(corpus.listed)
    start = time.perf_counter()
    total = reduce_pieces(
        client,
        _reduction(kind, rows),
        [
            (piece, kind, device, per_document, nbytes, most, neighbours)
            for piece, most in zip(pieces, threads, strict=True)
        ],
        [piece.nbytes for piece in pieces],
        listener,
    )
    seconds = time.perf_counter() - start
    check_unchanged(corpus)
    return Histogram(
        by=kind.name,
        counts=total.counts if per_document else total.counts[0],
        documents=tuple(document.name for document in corpus.documents),
        skipped=kind.skipped(int(total.counts.sum()), total.nbytes),
        nbytes=total.nbytes,
        device=workers[0].name,
        seconds=seconds,
    )


def _decompressors(workers: Sequence[WorkerFacts], neighbours: int) -> int:
    """Threads of each worker that decompress: what the setting says, else its share of its host's cores."""
    wanted: int | None = config.get("decompress-threads")
    return wanted or max(
        share_of_cores(worker.usable_cores, worker.host_cores, neighbours) for worker in workers
    )


def _pieces(
    workers: Sequence[WorkerFacts],
    corpus: Corpus,
    kind: Kind,
    block: int,
    per_document: bool,
    decompressors: int,
) -> list[Piece]:
    """What each task counts: for a GPU `TASK_BLOCKS` blocks of plain text at a time, if the corpus has as much for each
    thread.

    block: what the setting says of a piece, in bytes.
    """
    share = max(LEAST_PIECE_NBYTES, ceil_div(corpus.nbytes, 2 * sum(worker.threads for worker in workers)))
    compressed = sum(document.codec is not None for document in corpus.documents)
    # Compressed documents are work for the cores, on a GPU's worker too: small tasks share them out evenly.
    nbytes = min(block, share)
    plain_nbytes = nbytes if workers[0].device == "cpu" else min(TASK_BLOCKS * min(block, LANE_NBYTES), share)
    documents = max(1, ROWS_NBYTES // (kind.bins * 8)) if per_document else MOST_DOCUMENTS
    # One task decompresses several documents at once, since a worker has fewer tasks under way than cores.
    streams = min(decompressors, ceil_div(compressed, 2 * len(workers)))
    pieces = list(
        cut_pieces(
            corpus.documents, nbytes, min(documents, MOST_DOCUMENTS), streams, plain_nbytes=plain_nbytes
        )
    )
    # Large compressed documents take longest: begun first, none keeps a single worker busy at the end.
    return sorted(
        pieces, key=lambda piece: -piece.nbytes if piece.nbytes > nbytes and not piece.is_plain else 0
    )


def _reduction(kind: Kind, rows: int) -> Reduction[Counts, Sum]:
    return Reduction(
        name="histogram",
        chunk=count_piece,
        identity=partial(_nothing, rows, kind.bins),
        combine=_add,
        commutative=True,  # additions of integers
        lighter="let them take smaller pieces (tilewright.piece-nbytes), or decompress on fewer threads"
        " (tilewright.decompress-threads)",
    )


def _nothing(rows: int, bins: int) -> Sum:
    return Sum(np.zeros((rows, bins), np.int64), 0)


def _add(total: Sum, part: Counts) -> Sum:
    total.counts.reshape(-1)[part.cells] += part.values
    total.nbytes += part.nbytes
    return total


def count_piece(
    piece: Piece,
    kind: Kind,
    device: str,
    per_document: bool,
    block_nbytes: int,
    threads: int,
    neighbours: int = 1,
) -> tuple[Counts, dict[str, float]]:
    """Read and count one piece; what a task does.

    block_nbytes: how much of a compressed document (on a GPU: of any) each thread counts at a time and, with margins,
    holds in memory; at most `LANE_NBYTES` on a GPU, `MOST_BLOCK_NBYTES` on a CPU.
    threads: how many of this process read or decompress, for all its tasks together; no more than it has cores
    decompress.
    neighbours: workers on this one's host, itself included.
    """
    if not piece.is_plain:
        threads = min(threads, usable_cores())  # more only take turns: on two cores, 8 are 0.7 × as fast as 2
    shares = _shares(piece, device, block_nbytes, threads)
    rows = len(piece.documents) if per_document else 1
    gap = 1 if kind.after and not per_document else 0
    check = end_if_given_up()  # a compressed document is one share however long it is
    if device == "cpu":
        parts = _run(
            [partial(_on_host, share, kind, gap, per_document, block_nbytes) for share in shares],
            threads,
            check,
        )
        return _nonzero(_sum_rows(shares, parts, rows, kind), piece, per_document, kind, parts)
    from tilewright.pipeline.text.lanes import borrowed_tally, prepare

    prepare(kind)
    if rows > 1:
        parts = _run([partial(_rows_on_gpu, share, kind, block_nbytes) for share in shares], threads, check)
        return _nonzero(_sum_rows(shares, parts, rows, kind), piece, per_document, kind, parts)
    with borrowed_tally(kind.bins) as tally:
        if file_upload.available() and piece.is_plain and not has_small_files(piece):
            part = _text_on_gpu(piece, kind, tally, threads, neighbours)
            if part is not None:
                return _nonzero(part.counts, piece, per_document, kind, [part])
        calls = [partial(_tally_on_gpu, share, kind, gap, block_nbytes, tally) for share in shares]
        parts = _run(calls, threads, check)
        counts = tally.read()
        np.subtract.at(counts, np.concatenate([part.counts for part in parts]), 1)
        return _nonzero(counts, piece, per_document, kind, parts)


@dataclass(frozen=True, eq=False)
class _Part:
    """What one thread has counted."""

    counts: np.ndarray
    """int64[(documents or 1, bins)]; with a tally, the bins that separators took part in, each entry one count too
    many."""
    nbytes: int
    """The documents' length, decompressed."""
    stages: dict[str, float]
    """Busy seconds."""


def _shares(piece: Piece, device: str, block_nbytes: int, threads: int) -> list[Piece]:
    """What each thread reads; ``first`` counts from the piece's first document."""
    if not piece.is_plain:
        return list(cut_pieces(piece.documents, max(LEAST_STREAM_NBYTES, ceil_div(piece.nbytes, threads))))
    if device == "cpu" or has_small_files(piece):
        return [Piece(0, piece.documents, piece.start, piece.stop)]
    return list(share_out(piece, max(min(block_nbytes, LANE_NBYTES), ceil_div(piece.nbytes, threads))))


def _run(
    calls: Sequence[Callable[[Callable[[], None]], _Part]], threads: int, check: Callable[[], None]
) -> list[_Part]:
    """Make the calls, one a share, on threads. ``check`` may end all of them, and one that fails ends the others: the
    rest of a compressed document may take hours."""
    if len(calls) == 1:
        return [calls[0](check)]
    failed: list[Exception] = []

    def check_all() -> None:
        check()
        if failed:
            raise failed[0]

    def run(call: Callable[[Callable[[], None]], _Part]) -> _Part:
        try:
            return call(check_all)
        except Exception as error:
            failed.append(error)
            raise

    try:
        return run_all(_pool(threads), [partial(run, call) for call in calls])
    finally:
        failed.clear()  # an error in a cycle with its own traceback would keep files open


@lru_cache(maxsize=2)
def _pool(threads: int) -> ThreadPoolExecutor:
    """Kept by a worker's process, so that its threads keep their buffers: one pool for plain and one for compressed
    pieces. The threads of a pool that is dropped end once nobody uses it."""
    return ThreadPoolExecutor(threads, thread_name_prefix="tilewright-text")


def _sum_rows(shares: list[Piece], parts: list[_Part], rows: int, kind: Kind) -> np.ndarray:
    """The counts of all shares, int64[(rows, bins)]."""
    if len(parts) == 1:
        return parts[0].counts
    counts = np.zeros((rows, kind.bins), np.int64)
    for share, part in zip(shares, parts, strict=True):
        first = share.first if rows > 1 else 0
        counts[first : first + len(part.counts)] += part.counts
    return counts


def _nonzero(
    counts: np.ndarray, piece: Piece, per_document: bool, kind: Kind, parts: list[_Part]
) -> tuple[Counts, dict[str, float]]:
    flat = counts.reshape(-1)
    cells = np.flatnonzero(flat)
    values = flat[cells]
    if per_document:
        cells += piece.first * kind.bins
    stages = {name: sum(part.stages[name] for part in parts) for name in STAGES}
    return Counts(cells, values, sum(part.nbytes for part in parts)), stages


def _on_host(
    piece: Piece, kind: Kind, gap: int, per_document: bool, block_nbytes: int, check: Callable[[], None]
) -> _Part:
    """Count a share on the CPU. ``check``, which is called for each block, may end it."""
    rows = len(piece.documents) if per_document else 1
    counts: np.ndarray | None = None
    nbytes, stages = 0, dict.fromkeys(STAGES, 0.0)
    clock = time.perf_counter()
    for block in _host_blocks(piece, kind, gap, block_nbytes):
        check()
        read = time.perf_counter()
        found = _count_block(block, kind, gap, per_document)
        if counts is None:
            # Most pieces are one block, whose counts are the piece's.
            counts = found if len(found) == rows else np.zeros((rows, kind.bins), np.int64)
        if counts is not found:
            first = block.first if per_document else 0
            counts[first : first + len(found)] += found
        nbytes += block.nbytes - gap * block.documents
        stages["read"] += read - clock
        clock = time.perf_counter()
        stages["count"] += clock - read
    assert counts is not None  # a piece has a document, and each makes a block
    return _Part(counts, nbytes, stages)


def _host_blocks(piece: Piece, kind: Kind, gap: int, block_nbytes: int) -> Iterable[Block]:
    """Plain documents in one block, compressed ones in a buffer that is filled again and again."""
    if piece.is_plain:
        return [read_at_once(piece, kind, gap, partial(thread_buffer, "text", pinned=False))]
    nbytes = min(block_nbytes, MOST_BLOCK_NBYTES)
    return stream(
        piece, kind, gap, nbytes, partial(thread_buffer, "text", nbytes + EXTRA_NBYTES, pinned=False)
    )


def _count_block(block: Block, kind: Kind, gap: int, per_document: bool) -> np.ndarray:
    """Counts, int64[(documents, bins)] if each of them has a row, else int64[(1, bins)]."""
    from tilewright.kernels.histograms.host import count_host  # needs Numba, which a client has no use for

    edges = block.edges if per_document and block.edges is not None else np.array([0, len(block.data)])
    counts = count_host(block.data, kind, edges, block.start, block.stop)
    if gap and block.edges is not None:
        np.subtract.at(counts[0], _of_separators(block.data, block.edges, kind), 1)
    return counts


def _tally_on_gpu(
    piece: Piece, kind: Kind, gap: int, block_nbytes: int, tally: Tally, check: Callable[[], None]
) -> _Part:
    """Add the counts of a share, all documents together, to the tally; returns when its last block is under way."""
    from tilewright.pipeline.text.lanes import borrowed_lane

    separators = [np.empty(0, np.int64)]
    nbytes, counting = 0, 0.0
    start = time.perf_counter()
    with borrowed_lane() as lane, turn_to_read(piece):
        try:
            for block in stream(piece, kind, gap, min(block_nbytes, LANE_NBYTES), lane.buffer):
                check()
                clock = time.perf_counter()
                lane.add(block, kind, tally)
                if gap and block.edges is not None:
                    separators.append(_of_separators(block.data, block.edges, kind))
                nbytes += block.nbytes - gap * block.documents
                counting += time.perf_counter() - clock
        finally:
            tally.follow(lane)
        counting += lane.waited
    stages = {"read": time.perf_counter() - start - counting, "count": counting}
    return _Part(np.concatenate(separators), nbytes, stages)


def _text_on_gpu(piece: Piece, kind: Kind, tally: Tally, threads: int, neighbours: int) -> _Part | None:
    """Count a piece of large plain documents in one go: all of it is brought to the GPU, then counted.

    Returns None, with nothing added to the tally, where not all could be read or the GPU has no room for it. Counting
    it block by block then says what is wrong, or works and takes longer.
    """
    from tilewright.pipeline.text.lanes import borrowed_lane, borrowed_text

    def move() -> tuple[float, float]:
        with borrowed_lane() as lane:
            return lane.move(upload)

    with ExitStack() as stack:
        try:
            text = stack.enter_context(borrowed_text(piece, kind))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.warning(
                "the GPU has no room for %s of text: it is counted block by block",
                format_nbytes(piece.nbytes),
            )
            return None
        try:
            upload = text.upload(threads, neighbours)
            try:
                moves = run_all(_pool(threads), [move] * min(threads, upload.blocks))
            finally:
                tally.follow_uploads()
            clock = time.perf_counter()
            if upload.failed():
                return None
            nbytes = text.count(tally)
            # While the GPU counts. The loop that read the files does not look at their times.
            check_as_listed(piece.documents)
            counts = tally.read()[None].copy()
            stages = {
                "read": sum(reading for reading, _ in moves),
                "count": sum(waiting for _, waiting in moves) + time.perf_counter() - clock,
            }
        finally:
            tally.settle()  # no copy to the text's memory is under way when another takes it
    return _Part(counts, nbytes, stages)


def _rows_on_gpu(piece: Piece, kind: Kind, block_nbytes: int, check: Callable[[], None]) -> _Part:
    """Counts of a share with a row for each document."""
    from tilewright.pipeline.text.lanes import borrowed_lane

    counts = np.zeros((len(piece.documents), kind.bins), np.int64)
    nbytes, counting = 0, 0.0
    start = time.perf_counter()
    with borrowed_lane() as lane, turn_to_read(piece):
        for block in stream(piece, kind, 0, min(block_nbytes, LANE_NBYTES), lane.buffer):
            check()
            clock = time.perf_counter()
            found = lane.rows(block, kind)
            counts[block.first : block.first + len(found)] += found
            nbytes += block.nbytes
            counting += time.perf_counter() - clock
        counting += lane.waited
    return _Part(counts, nbytes, {"read": time.perf_counter() - start - counting, "count": counting})


def _of_separators(data: np.ndarray, edges: np.ndarray, kind: Kind) -> np.ndarray:
    """The bins, int64, of all tokens in ``data`` that contain a separator, an entry for each token."""
    separators = edges[1:] - 1
    if kind.name == "codepoint":
        return np.full(len(separators), SEPARATOR, np.int64)
    begins = np.unique(np.concatenate([separators - 1, separators]))
    begins = begins[(begins >= 0) & (begins < len(data) - 1)]
    pairs: np.ndarray = data[begins].astype(np.int64) << 8 | data[begins + 1]
    return pairs
