"""How a corpus is counted: how a cluster is given its pieces, and what a task does with one.

`count_corpus` runs where the corpus was listed, `count_piece` on workers. `corpus.py` finds the files and cuts them
into pieces, `blocks.py` reads a piece in blocks, the kernels count a block, `lanes.py` carries blocks to a GPU.
`kept_counts.py` keeps what is finished, and knows what a corpus leaves to count.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from distributed import Client
from distributed.system import MEMORY_LIMIT

from tilewright.kernels.cpu.loops import share_of_cores, usable_cores
from tilewright.kernels.gpu.memory import is_out_of_memory
from tilewright.kernels.histograms.token_kinds import TokenKind
from tilewright.kernels.histograms.token_lists import Tokens, joined
from tilewright.kernels.histograms.tokens import Kind
from tilewright.kernels.numbers import ceil_div, format_nbytes
from tilewright.pipeline import config
from tilewright.pipeline.events import Listener, Notice
from tilewright.pipeline.plan.inputs import WorkerFacts
from tilewright.pipeline.records import Record
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
from tilewright.pipeline.text.fingerprints import NONE, Fingerprints, is_as_before
from tilewright.pipeline.text.histogram import Histogram
from tilewright.pipeline.text.kept_counts import (
    Again,
    Left,
    counts_in,
    entry_of,
    everything,
    names_of,
    piece_again,
    what_is_left,
)
from tilewright.pipeline.text.totals import MOST_BINS_OF_ARRAYS, Total, total_for
from tilewright.pipeline.threads import run_all, thread_buffer
from tilewright.pipeline.transfer import file_upload
from tilewright.pipeline.transfer.files import let_a_tick_pass
from tilewright.pipeline.transfer.lane_blocks import LANE_NBYTES, most_neighbours

if TYPE_CHECKING:
    from tilewright.pipeline.text.lanes import Tally
    from tilewright.pipeline.text.sparse_pieces import Entries

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

CORES = "cores"
"""The device of what no GPU counts, on the workers of GPUs: each counts on its share of its host's cores."""

Found = TypeVar("Found")
LEAST_STREAM_NBYTES = 2**18
"""The least stored bytes that a thread decompresses, if the piece has them: each thread costs counts of its own."""


@dataclass(frozen=True)
class Counts:
    """The nonzero counts of one piece."""

    cells: np.ndarray
    """int64: row × width + column, each once; the row is the document's place in the piece, or 0."""
    values: np.ndarray
    """int64, more than 0."""
    nbytes: int
    """The piece's length, decompressed."""
    prints: np.ndarray = field(default_factory=lambda: NONE)
    """The fingerprints of what was read, where they were wanted (`Fingerprints.rows`)."""
    tokens: Tokens | None = None
    """Where they are not known beforehand, what the columns are places in."""
    first: int = 0
    """`Piece.first`: what row 0 is of."""

    def entries(self, kind: Kind | TokenKind) -> tuple[np.ndarray, np.ndarray]:
        """The rows and the columns, int64, of the cells."""
        rows, columns = np.divmod(self.cells, width_of(kind, self.tokens))
        return rows, columns


def width_of(kind: Kind | TokenKind, tokens: Tokens | None) -> int:
    """Columns of a piece's counts."""
    return kind.bins if isinstance(kind, Kind) else max(1, len(tokens or ()))


@dataclass(eq=False)
class Sum:
    """What has been counted so far."""

    total: Total
    nbytes: int = 0
    counted: int = 0
    """Tokens in all."""


def count_corpus(
    client: Client,
    corpus: Corpus,
    kind: Kind | TokenKind,
    workers: Sequence[WorkerFacts],
    *,
    per_document: bool,
    listener: Listener,
    record: Record | None = None,
) -> Histogram:
    """Count every document of the corpus on the client's workers, on the kind of device that all of them have.

    ``record`` gets each finished piece, and what it holds of an earlier run is not counted again.

    Raises
    ------
    PlanError
        The counts, one row for each document, would not fit this process's memory.
    CorpusError
        A file cannot be read or decompressed, or is not what it was when the corpus was listed.
    StoreError
        The record cannot be written.
    """
    rows = len(corpus.documents) if per_document else 1
    bins = kind.bins if isinstance(kind, Kind) else None
    total = Sum(total_for(rows, bins, per_document=per_document, allowed=MEMORY_LIMIT // 2))
    plain = all(document.codec is None for document in corpus.documents)
    device: str = workers[0].device
    if device == "cuda" and isinstance(kind, TokenKind):
        device = CORES
        listener(Notice(f"by {kind.name} is counted on the cores of the GPUs' workers: no GPU counts it yet"))
    nbytes, readers = config.get("piece-nbytes"), config.threads("read-threads")
    # One that counts plain text on its CPU reads on the task's own thread, however many share the host.
    neighbours = 1 if plain and device == "cpu" else most_neighbours(worker.address for worker in workers)
    decompressors = 1 if plain else _decompressors(workers, neighbours)
    left = everything(corpus) if record is None else what_is_left(record, corpus, kind)
    for note in left.notes:
        listener(Notice(note))
    work = _work(workers, corpus, left, kind, nbytes, per_document, decompressors)
    plain_threads = decompressors if device == CORES else readers
    threads = [plain_threads if piece.is_plain else decompressors for piece in work.pieces]
    let_a_tick_pass(corpus.listed)
    start = time.perf_counter()
    if record is not None:
        for again in left.done:
            _add(total, _counts_again(record, again), kind, np.array(again.places), per_document)
    keeping = None if record is None else _Keeping(record, corpus, work)
    total = reduce_pieces(
        client,
        _reduction(total, kind, work.rows, per_document),
        [
            (
                work.prints.get(place),
                piece,
                kind,
                device,
                per_document,
                nbytes,
                most,
                neighbours,
                bool(record),
            )
            for place, (piece, most) in enumerate(zip(work.pieces, threads, strict=True))
        ],
        [piece.nbytes for piece in work.pieces],
        listener,
        arrived=keeping or (lambda place, part: _counted(part)),
        done=len(left.done),
        kept=keeping is not None,
    )
    seconds = time.perf_counter() - start
    check_unchanged(corpus)
    if keeping is not None and keeping.different:
        names = names_of(list(keeping.different))
        listener(Notice(f"{names} changed, or came in a piece with some that did: counted anew there"))
    counts, tokens = total.total.result()
    return Histogram(
        by=kind.name,
        counts=counts,
        documents=tuple(document.name for document in corpus.documents),
        skipped=kind.skipped(total.counted, total.nbytes),
        nbytes=total.nbytes,
        device="CPU" if device == CORES else workers[0].name,
        seconds=seconds,
        tokens=tokens,
        options=kind.options if isinstance(kind, TokenKind) else {},
    )


def _decompressors(workers: Sequence[WorkerFacts], neighbours: int) -> int:
    """Threads of each worker that decompress: what the setting says, else its share of its host's cores."""
    wanted: int | None = config.get("decompress-threads")
    return wanted or max(
        share_of_cores(worker.usable_cores, worker.host_cores, neighbours) for worker in workers
    )


@dataclass(frozen=True)
class _Work:
    """What tasks are to do."""

    pieces: list[Piece]
    """What each task counts; ``first`` is a place in ``rows``."""
    rows: np.ndarray
    """int64: the places in the corpus of the documents that pieces consist of."""
    prints: dict[int, np.ndarray]
    """By the places of some pieces: fingerprints that they had when they were counted before."""
    again: dict[int, Again]
    """The same pieces, as they were kept."""


def _work(
    workers: Sequence[WorkerFacts],
    corpus: Corpus,
    left: Left,
    kind: Kind | TokenKind,
    block: int,
    per_document: bool,
    decompressors: int,
) -> _Work:
    """What each task counts: for a GPU `TASK_BLOCKS` blocks of plain text at a time, if the corpus has as much for each
    thread. What was counted before and may have changed keeps its pieces.

    block: what the setting says of a piece, in bytes.
    """
    documents = [corpus.documents[place] for place in left.whole]
    whole = sum(document.nbytes for document in documents) + sum(
        stop - start for _, start, stop in left.ranges
    )
    share = max(LEAST_PIECE_NBYTES, ceil_div(whole, 2 * sum(worker.threads for worker in workers)))
    compressed = sum(document.codec is not None for document in documents)
    # Compressed documents are work for the cores, on a GPU's worker too: small tasks share them out evenly.
    nbytes = min(block, share)
    on_gpu = workers[0].device == "cuda" and isinstance(kind, Kind)
    plain_nbytes = nbytes if not on_gpu else min(TASK_BLOCKS * min(block, LANE_NBYTES), share)
    most = MOST_DOCUMENTS
    if per_document and isinstance(kind, Kind) and (on_gpu or kind.bins <= MOST_BINS_OF_ARRAYS):
        most = max(1, ROWS_NBYTES // (kind.bins * 8))
    # One task decompresses several documents at once, since a worker has fewer tasks under way than cores.
    streams = min(decompressors, ceil_div(compressed, 2 * len(workers)))
    pieces = list(
        cut_pieces(documents, nbytes, min(most, MOST_DOCUMENTS), streams, plain_nbytes=plain_nbytes)
    )
    # Large compressed documents take longest: begun first, none keeps a single worker busy at the end.
    pieces.sort(key=lambda piece: -piece.nbytes if piece.nbytes > nbytes and not piece.is_plain else 0)
    rows = list(left.whole)
    for place, start, stop in left.ranges:
        rest = Piece(len(rows), (corpus.documents[place],), start, stop)
        pieces += [replace(part, first=rest.first) for part in share_out(rest, plain_nbytes)]
        rows.append(place)
    prints, before = {}, {}
    for again in left.doubtful:
        prints[len(pieces)], before[len(pieces)] = again.kept.prints, again
        pieces.append(piece_again(again, corpus, first=len(rows)))
        rows += again.places
    return _Work(pieces, np.array(rows, np.int64), prints, before)


def _reduction(
    before: Sum, kind: Kind | TokenKind, rows: np.ndarray, per_document: bool
) -> Reduction[Counts | None, Sum]:
    """before: what is added to. rows: the places in the corpus of the documents that pieces consist of."""
    return Reduction(
        name="histogram",
        chunk=count_unless_as_before,
        identity=lambda: before,
        combine=lambda total, part: _add(total, _counted(part), kind, rows, per_document),
        commutative=True,  # additions of integers
        lighter="let them take smaller pieces (tilewright.piece-nbytes), or decompress on fewer threads"
        " (tilewright.decompress-threads)",
    )


def _counted(part: Counts | None) -> Counts:
    assert part is not None  # only what was counted before is not counted, and then its counts are kept
    return part


def _add(total: Sum, part: Counts, kind: Kind | TokenKind, places: np.ndarray, per_document: bool) -> Sum:
    """Add a part. places: those in the corpus of the documents that its rows are of."""
    rows, columns = part.entries(kind)
    total.total.add(places[part.first + rows] if per_document else rows, columns, part.values, part.tokens)
    total.nbytes += part.nbytes
    total.counted += int(part.values.sum())
    return total


def _counts_again(record: Record, again: Again) -> Counts:
    """The counts of a kept piece."""
    cells, values, nbytes, tokens = counts_in(record.entry(again.kept.line))
    return Counts(cells, values, nbytes, again.kept.prints, tokens)


class _Keeping:
    """Has a record keep each piece that comes back from a task."""

    def __init__(self, record: Record, corpus: Corpus, work: _Work) -> None:
        self._record, self._corpus, self._work = record, corpus, work
        self.different: dict[str, None] = {}
        """The names of documents whose contents were not what they had been."""

    def __call__(self, place: int, part: Counts | None) -> Counts:
        piece, again = self._work.pieces[place], self._work.again.get(place)
        if part is None:
            assert again is not None
            part = replace(_counts_again(self._record, again), first=piece.first)
        elif again is not None:
            self.different |= dict.fromkeys(document.name for document in piece.documents)
        corpus_places = self._work.rows[piece.first : piece.first + len(piece.documents)].tolist()
        changed_ns = [self._corpus.status[here].changed_ns for here in corpus_places]
        self._record.append(
            entry_of(piece, changed_ns, part.cells, part.values, part.nbytes, part.prints, part.tokens)
        )
        return part


def count_unless_as_before(
    before: np.ndarray | None, piece: Piece, *arguments: Any
) -> tuple[Counts | None, dict[str, float]]:
    """What a task does: `count_piece`, unless the piece still has the fingerprints that it had ``before``."""
    start = time.perf_counter()
    if before is not None and is_as_before(piece, before, end_if_given_up()):
        return None, {"read": time.perf_counter() - start, "count": 0.0}
    return count_piece(piece, *arguments)


def count_piece(
    piece: Piece,
    kind: Kind | TokenKind,
    device: str,
    per_document: bool,
    block_nbytes: int,
    threads: int,
    neighbours: int = 1,
    fingerprints: bool = False,
) -> tuple[Counts, dict[str, float]]:
    """Read and count one piece.

    block_nbytes: how much of a compressed document (on a GPU: of any) each thread counts at a time and, with margins,
    holds in memory; at most `LANE_NBYTES` on a GPU, `MOST_BLOCK_NBYTES` on a CPU.
    threads: how many of this process read or decompress, for all its tasks together; no more than it has cores
    decompress.
    neighbours: workers on this one's host, itself included.
    fingerprints: whether those of what is read are wanted. There are none of large plain documents on a GPU.
    """
    if not piece.is_plain:
        threads = min(threads, usable_cores())  # more only take turns: on two cores, 8 are 0.7 × as fast as 2
    shares = _shares(piece, device, block_nbytes, threads)
    wide = isinstance(kind, TokenKind) or (per_document and kind.bins > MOST_BINS_OF_ARRAYS)
    rows = len(piece.documents) if per_document else 1
    gap = 1 if kind.after and not per_document else 0
    check = end_if_given_up()  # a compressed document is one share however long it is
    if wide and device != "cuda":
        return _sparse(
            piece,
            kind,
            per_document,
            shares,
            _run(
                [
                    partial(_sparse_on_host, share, kind, per_document, block_nbytes, fingerprints)
                    for share in shares
                ],
                threads,
                check,
            ),
        )
    assert isinstance(kind, Kind)
    if device == "cpu":
        parts = _run(
            [
                partial(_on_host, share, kind, gap, per_document, block_nbytes, fingerprints)
                for share in shares
            ],
            threads,
            check,
        )
        return _nonzero(_sum_rows(shares, parts, rows, kind), piece, per_document, kind, parts)
    from tilewright.pipeline.text.lanes import borrowed_tally, prepare

    prepare(kind)
    if rows > 1:
        calls = [partial(_rows_on_gpu, share, kind, block_nbytes, fingerprints) for share in shares]
        parts = _run(calls, threads, check)
        return _nonzero(_sum_rows(shares, parts, rows, kind), piece, per_document, kind, parts)
    with borrowed_tally(kind.bins) as tally:
        if file_upload.available() and piece.is_plain and not has_small_files(piece):
            part = _text_on_gpu(piece, kind, tally, threads, neighbours)
            if part is not None:
                return _nonzero(part.counts, piece, per_document, kind, [part])
        calls = [
            partial(_tally_on_gpu, share, kind, gap, block_nbytes, tally, fingerprints) for share in shares
        ]
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
    prints: np.ndarray
    """`Counts.prints`."""


def _shares(piece: Piece, device: str, block_nbytes: int, threads: int) -> list[Piece]:
    """What each thread reads; ``first`` counts from the piece's first document."""
    if not piece.is_plain:
        return list(cut_pieces(piece.documents, max(LEAST_STREAM_NBYTES, ceil_div(piece.nbytes, threads))))
    if device == CORES:
        return list(share_out(piece, max(LEAST_STREAM_NBYTES, ceil_div(piece.nbytes, threads))))
    if device == "cpu" or has_small_files(piece):
        return [Piece(0, piece.documents, piece.start, piece.stop)]
    return list(share_out(piece, max(min(block_nbytes, LANE_NBYTES), ceil_div(piece.nbytes, threads))))


def _run(
    calls: Sequence[Callable[[Callable[[], None]], Found]], threads: int, check: Callable[[], None]
) -> list[Found]:
    """Make the calls, one a share, on threads. ``check`` may end all of them, and one that fails ends the others: the
    rest of a compressed document may take hours."""
    if len(calls) == 1:
        return [calls[0](check)]
    failed: list[Exception] = []

    def check_all() -> None:
        check()
        if failed:
            raise failed[0]

    def run(call: Callable[[Callable[[], None]], Found]) -> Found:
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
    stages = {name: sum(part.stages[name] for part in parts) for name in STAGES}
    prints = np.concatenate([part.prints for part in parts])
    nbytes = sum(part.nbytes for part in parts)
    return Counts(cells, values, nbytes, prints, first=piece.first if per_document else 0), stages


def _sparse_on_host(
    piece: Piece,
    kind: Kind | TokenKind,
    per_document: bool,
    block_nbytes: int,
    fingerprints: bool,
    check: Callable[[], None],
) -> tuple[Entries, np.ndarray]:
    """The counts of a share that are not zero, and its fingerprints."""
    from tilewright.pipeline.text.sparse_pieces import count_tokens, count_wide_rows

    prints = Fingerprints(piece.first) if fingerprints else None
    blocks = _host_blocks(piece, kind, 0, block_nbytes, prints)
    if isinstance(kind, Kind):
        found = count_wide_rows(kind, len(piece.documents), blocks, check)
    else:
        found = count_tokens(piece, kind, per_document, blocks, prints, check)
    return found, _rows_of(prints)


def _sparse(
    piece: Piece,
    kind: Kind | TokenKind,
    per_document: bool,
    shares: list[Piece],
    found: list[tuple[Entries, np.ndarray]],
) -> tuple[Counts, dict[str, float]]:
    """The counts of all shares; those of one document, or of all, may have several entries for the same tokens."""
    entries = [each for each, _ in found]
    rows = np.concatenate(
        [
            each.rows + (share.first if per_document else 0)
            for each, share in zip(entries, shares, strict=True)
        ]
    )
    tokens = None
    columns = [each.columns for each in entries]
    if isinstance(kind, TokenKind):
        lists = [each.tokens for each in entries if each.tokens is not None]
        tokens = joined(lists)
        before = np.cumsum([0, *(len(each) for each in lists)])
        columns = [each + skip for each, skip in zip(columns, before, strict=False)]
    cells = rows * width_of(kind, tokens) + np.concatenate(columns)
    counts = Counts(
        cells,
        np.concatenate([each.values for each in entries]),
        sum(each.nbytes for each in entries),
        np.concatenate([prints for _, prints in found]),
        tokens,
        piece.first if per_document else 0,
    )
    return counts, {
        "read": sum(each.read_seconds for each in entries),
        "count": sum(each.count_seconds for each in entries),
    }


def _on_host(
    piece: Piece,
    kind: Kind,
    gap: int,
    per_document: bool,
    block_nbytes: int,
    fingerprints: bool,
    check: Callable[[], None],
) -> _Part:
    """Count a share on the CPU. ``check``, which is called for each block, may end it."""
    rows = len(piece.documents) if per_document else 1
    counts: np.ndarray | None = None
    prints = Fingerprints(piece.first) if fingerprints else None
    nbytes, stages = 0, dict.fromkeys(STAGES, 0.0)
    clock = time.perf_counter()
    for block in _host_blocks(piece, kind, gap, block_nbytes, prints):
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
    return _Part(counts, nbytes, stages, _rows_of(prints))


def _rows_of(prints: Fingerprints | None) -> np.ndarray:
    return NONE if prints is None else prints.rows()


def _host_blocks(
    piece: Piece, kind: Kind | TokenKind, gap: int, block_nbytes: int, prints: Fingerprints | None
) -> Iterable[Block]:
    """Plain documents in one block, compressed ones in a buffer that is filled again and again."""
    if piece.is_plain:
        return [read_at_once(piece, kind, gap, partial(thread_buffer, "text", pinned=False), prints)]
    nbytes = min(block_nbytes, MOST_BLOCK_NBYTES)
    memory = partial(thread_buffer, "text", nbytes + EXTRA_NBYTES, pinned=False)
    return stream(piece, kind, gap, nbytes, memory, prints)


def _count_block(block: Block, kind: Kind, gap: int, per_document: bool) -> np.ndarray:
    """Counts, int64[(documents, bins)] if each of them has a row, else int64[(1, bins)]."""
    from tilewright.kernels.histograms.host import count_host  # needs Numba, which a client has no use for

    edges = block.edges if per_document and block.edges is not None else np.array([0, len(block.data)])
    counts = count_host(block.data, kind, edges, block.start, block.stop)
    if gap and block.edges is not None:
        np.subtract.at(counts[0], _of_separators(block.data, block.edges, kind), 1)
    return counts


def _tally_on_gpu(
    piece: Piece,
    kind: Kind,
    gap: int,
    block_nbytes: int,
    tally: Tally,
    fingerprints: bool,
    check: Callable[[], None],
) -> _Part:
    """Add the counts of a share, all documents together, to the tally; returns when its last block is under way."""
    from tilewright.pipeline.text.lanes import borrowed_lane

    separators = [np.empty(0, np.int64)]
    prints = Fingerprints(piece.first) if fingerprints else None
    nbytes, counting = 0, 0.0
    start = time.perf_counter()
    with borrowed_lane() as lane, turn_to_read(piece):
        try:
            for block in stream(piece, kind, gap, min(block_nbytes, LANE_NBYTES), lane.buffer, prints):
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
    return _Part(np.concatenate(separators), nbytes, stages, _rows_of(prints))


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
    return _Part(counts, nbytes, stages, NONE)


def _rows_on_gpu(
    piece: Piece, kind: Kind, block_nbytes: int, fingerprints: bool, check: Callable[[], None]
) -> _Part:
    """Counts of a share with a row for each document."""
    from tilewright.pipeline.text.lanes import borrowed_lane

    counts = np.zeros((len(piece.documents), kind.bins), np.int64)
    prints = Fingerprints(piece.first) if fingerprints else None
    nbytes, counting = 0, 0.0
    start = time.perf_counter()
    with borrowed_lane() as lane, turn_to_read(piece):
        for block in stream(piece, kind, 0, min(block_nbytes, LANE_NBYTES), lane.buffer, prints):
            check()
            clock = time.perf_counter()
            found = lane.rows(block, kind)
            counts[block.first : block.first + len(found)] += found
            nbytes += block.nbytes
            counting += time.perf_counter() - clock
        counting += lane.waited
    stages = {"read": time.perf_counter() - start - counting, "count": counting}
    return _Part(counts, nbytes, stages, _rows_of(prints))


def _of_separators(data: np.ndarray, edges: np.ndarray, kind: Kind) -> np.ndarray:
    """The bins, int64, of all tokens in ``data`` that contain a separator, an entry for each token."""
    separators = edges[1:] - 1
    if kind.name == "codepoint":
        return np.full(len(separators), SEPARATOR, np.int64)
    begins = np.unique(np.concatenate([separators - 1, separators]))
    begins = begins[(begins >= 0) & (begins < len(data) - 1)]
    pairs: np.ndarray = data[begins].astype(np.int64) << 8 | data[begins + 1]
    return pairs
