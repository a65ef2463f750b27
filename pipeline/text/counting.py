"""How a corpus is counted: how a cluster is given its pieces, and what their counts add up to.

`count_corpus` runs where the corpus was listed. `corpus.py` finds the files and cuts them into pieces, `pieces.py` has
a task count one on a worker, and `arrival.py` takes what comes back. `kept_counts.py` keeps what is finished, and knows
what a corpus leaves to count."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.kernels.histograms.token_kinds import TokenKind
from tilewright.kernels.histograms.tokens import Kind
from tilewright.kernels.numbers import ceil_div, counted, share_of_cores
from tilewright.pipeline import config
from tilewright.pipeline.advance import watching
from tilewright.pipeline.cluster.here.worker import current_worker, memory_limit
from tilewright.pipeline.errors import CorpusError
from tilewright.pipeline.events import Listener, Notice
from tilewright.pipeline.forecast.rates import kind_of_count, remember_count
from tilewright.pipeline.plan.inputs import WorkerFacts, most_neighbours
from tilewright.pipeline.records import Record
from tilewright.pipeline.reduce import Reduction, end_if_given_up, reduce_pieces, teller
from tilewright.pipeline.text.arrival import Arrival, Work, counts_again
from tilewright.pipeline.text.corpus import (
    MOST_DOCUMENTS,
    Corpus,
    Document,
    Piece,
    check_unchanged,
    cut_pieces,
    share_out,
)
from tilewright.pipeline.text.documents import Counts, all_bad
from tilewright.pipeline.text.fingerprints import is_as_before
from tilewright.pipeline.text.formats.listing import names_of
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.formats.sources import remarks_of
from tilewright.pipeline.text.gpu.room import may_be_fields
from tilewright.pipeline.text.histogram import Histogram
from tilewright.pipeline.text.kept_counts import (
    Left,
    everything,
    piece_again,
    what_is_left,
)
from tilewright.pipeline.text.names import notes_on_ids
from tilewright.pipeline.text.pieces import CORES, ROWS_NBYTES, count_piece
from tilewright.pipeline.text.totals import MOST_BINS_OF_ARRAYS, Total, total_for
from tilewright.pipeline.transfer.files import let_a_tick_pass
from tilewright.pipeline.transfer.lane_blocks import LANE_NBYTES
from tilewright.pipeline.worker.meters import meters_of

if TYPE_CHECKING:
    from distributed import Client

TASK_BLOCKS = 64
"""Lane blocks, 8 MiB each, that a task on a GPU counts: a task costs Dask and a dozen threads some milliseconds, and
counting 512 MiB takes eleven. A worker holds the text of as many tasks in device memory as it has threads."""
TASK_BLOCKS_OF_TOKENS = 192
"""The same where tokens are counted. Their lists are merged, which takes as long for a task of any length: so they are
fewer, of 1.5 GiB, as far as tokens' keys say where they stand."""
TASK_BLOCKS_OF_NEW_TOKENS = 32
"""The same of n-grams of words, of which half are new ones: 256 MiB of natural text have as many as a table holds."""
NEW_TOKENS_NBYTES = 64
"""Of a worker's memory, for a byte of text of which every n-gram is a new one: with its count, in a list, and in what
that is sorted from."""

TOLD_NBYTES = 2**22
"""Of a file of so many bytes that is not cut, it is told how far it has been read."""

SHARE_NBYTES = 2**23
"""Plain text of which a thread counts the tokens at a time, where there is memory for it. Its table grows from nothing,
and its list is merged with others': shares of 2 MiB of text take more than twice as long."""
SHARES_OF_HOST = 64
"""A worker's memory is at least so many times that of all its threads. Of random bytes n-grams take 45 times as much
until they are merged, lines of which none comes again 23 times, n-grams of words 10."""

LEAST_PIECE_NBYTES = 2**20
"""A small corpus is cut finer, so that all workers get some of it, but not finer than this."""


def count_corpus(
    client: Client,
    corpus: Corpus,
    kind: Kind | TokenKind,
    workers: Sequence[WorkerFacts],
    *,
    per_document: bool,
    listener: Listener,
    record: Record | None = None,
    on_error: str = "stop",
) -> Histogram:
    """Count every document of the corpus on the client's workers, on the kind of device that all of them have.

    ``record`` gets each finished piece, and what it holds of an earlier run is not counted again. With ``on_error``
    "report", files that cannot be counted are left out and listed; with "stop", the first ends the count.

    Raises
    ------
    PlanError
        The counts, one row for each document, would not fit this process's memory.
    CorpusError
        A file cannot be read or decompressed, or is not what it was when the corpus was listed.
    StoreError
        The record cannot be written.
    """
    total = total_of(corpus, kind, per_document=per_document)
    division = divided(corpus, kind, workers, per_document=per_document, record=record)
    left, work, threads = division.left, division.work, division.threads
    if division.note:
        listener(Notice(division.note))
    for note in left.notes:
        listener(Notice(note))
    let_a_tick_pass(corpus.listed)
    start = time.perf_counter()
    arrival = Arrival(
        total, kind, record, corpus, work, per_document=per_document, reports=on_error == "report"
    )
    if record is not None:
        for again in left.done:
            kept, places = counts_again(record, again), np.array(again.places, np.int64)
            arrival.add(kept, piece_again(again, corpus), places)
    reduce_pieces(
        client,
        _reduction(total),
        [
            (
                work.prints.get(place),
                piece,
                kind,
                division.device,
                per_document,
                division.block_nbytes,
                most,
                division.neighbours,
                bool(record),
                corpus.reading,
                on_error,
            )
            for place, (piece, most) in enumerate(zip(work.pieces, threads, strict=True))
        ],
        [piece.nbytes for piece in work.pieces],
        listener,
        arrived=arrival,
        done=len(left.done),
        kept=record is not None,
        tells=True,
    )
    seconds = time.perf_counter() - start
    device = "CPU" if division.device == CORES else workers[0].name
    if not (left.done or left.doubtful or arrival.bad):
        kept_as = kind_of_corpus(corpus, kind, device, len(workers), per_document=per_document)
        remember_count(kept_as, corpus.nbytes, len(workers), seconds)
    check_unchanged(corpus, set(arrival.bad))
    if arrival.different:
        changed = names_of(list(arrival.different))
        listener(Notice(f"{changed} changed, or came in a piece with some that did: counted anew there"))
    for remark in remarks_of(arrival.remarks):
        listener(Notice(remark))
    names: Sequence[str] = tuple(document.name for document in corpus.documents)
    order, ids = None, None
    if per_document:
        order, names, ids = arrival.listing.in_order(names, arrival.bad)
        for note in notes_on_ids(names, ids, corpus.reading):
            listener(Notice(note))
    elif arrival.bad:
        names = tuple(name for place, name in enumerate(names) if place not in arrival.bad)
    counts, tokens = total.result(order)
    return Histogram(
        by=kind.name,
        counts=counts,
        documents=names,
        skipped=kind.skipped(arrival.counted, arrival.nbytes),
        nbytes=arrival.nbytes,
        device=device,
        seconds=seconds,
        tokens=tokens,
        options=kind.options if isinstance(kind, TokenKind) else {},
        document_count=arrival.documents,
        undecodable=arrival.lost if kind.decodes else None,
        ids=ids if corpus.reading.id_field else None,
        bad=(
            *corpus.unlisted,
            *all_bad([document.name for document in corpus.documents], arrival.bad, arrival.left_out),
        ),
    )


def kind_of_corpus(
    corpus: Corpus, kind: Kind | TokenKind, device: str, workers: int, *, per_document: bool
) -> str:
    """What counts have in common whose times are compared."""
    plain = all(document.codec is None for document in corpus.documents)
    return kind_of_count(kind.name, device, workers, per_document=per_document, plain=plain)


def total_of(corpus: Corpus, kind: Kind | TokenKind, *, per_document: bool) -> Total:
    """What the parts of a count are added to. Raises PlanError where that would not fit this process's memory."""
    rows = len(corpus.documents) if per_document else 1
    bins = kind.bins if isinstance(kind, Kind) else None
    return total_for(rows, bins, per_document=per_document, allowed=memory_limit() // 2)


@dataclass(frozen=True)
class Division:
    """How a corpus is shared out among workers."""

    device: str
    """``cuda``, ``cpu`` or `CORES`."""
    left: Left
    """What is to be counted, and what earlier runs have."""
    work: Work
    threads: list[int]
    """Of each piece, by how many threads a worker reads it, for all its tasks together."""
    block_nbytes: int
    """Of a document that is not read at once, how much a thread holds."""
    neighbours: int
    """Workers of one host that read at the same time."""
    note: str = ""
    """What is to be said of the device."""
    by_shares: bool = False
    """Whether threads of a CPU count a share each of a plain piece."""


def divided(
    corpus: Corpus,
    kind: Kind | TokenKind,
    workers: Sequence[WorkerFacts],
    *,
    per_document: bool,
    record: Record | None = None,
) -> Division:
    """Cut what the record leaves to count into pieces for these workers. Nothing of the corpus is read."""
    plain = all(document.codec is None for document in corpus.documents)
    device: str = workers[0].device
    note = ""
    if device == "cuda" and isinstance(kind, TokenKind):
        device, note = _device_of_tokens(corpus, kind, per_document=per_document)
    nbytes, readers = config.get("piece-nbytes"), config.threads("read-threads")
    by_shares = device == CORES or (device == "cpu" and isinstance(kind, TokenKind))
    # One that counts plain text by bins on its CPU reads on the task's own thread, however many share the host.
    neighbours = (
        1
        if plain and device == "cpu" and not by_shares
        else most_neighbours(worker.address for worker in workers)
    )
    decompressors = decompressors_of(workers, neighbours) if by_shares or not plain else 1
    left = everything(corpus) if record is None else what_is_left(record, corpus, kind)
    on_gpus = device == "cuda"
    tasks = 1 if device == CORES else max(worker.threads for worker in workers)
    shares = ceil_div(decompressors, tasks) if by_shares else 0
    work = _work(workers, corpus, left, kind, nbytes, per_document, decompressors, on_gpus, shares)
    plain_threads = decompressors if by_shares else readers
    threads = [plain_threads if piece.is_plain else decompressors for piece in work.pieces]
    return Division(device, left, work, threads, nbytes, neighbours, note, by_shares)


def _device_of_tokens(corpus: Corpus, kind: TokenKind, *, per_document: bool) -> tuple[str, str]:
    """On which device the workers of GPUs count tokens, and what is to be said of it."""
    cores = "the cores of the GPUs' workers"
    by = f"by {kind.name}"
    if per_document:
        return CORES, f"{by} is counted on {cores}: no GPU counts it document by document"
    others = sum(not _is_for_gpus(document, kind, corpus.reading) for document in corpus.documents)
    if others == len(corpus.documents):
        more = ", or of one field of JSON lines" if kind.name == "word" and corpus.reading.fields else ""
        return CORES, f"{by} is counted on {cores}: GPUs count it of plain files alone{more}"
    if others:
        return "cuda", f"{by} is counted on {cores} where files are not plain ones: {counted(others, 'file')}"
    return "cuda", ""


def _is_for_gpus(document: Document, kind: TokenKind, reading: Reading) -> bool:
    """Whether a GPU may count the tokens of a file, as far as is known before it is looked at."""
    if document.codec is None and document.tag is None:
        return True
    return kind.name == "word" and may_be_fields(Piece(0, (document,), 0, document.nbytes), reading)


def decompressors_of(workers: Sequence[WorkerFacts], neighbours: int) -> int:
    """Threads of each worker that decompress: what the setting says, else its share of its host's cores."""
    wanted: int | None = config.get("decompress-threads")
    return wanted or max(
        share_of_cores(worker.usable_cores, worker.host_cores, neighbours) for worker in workers
    )


def _work(
    workers: Sequence[WorkerFacts],
    corpus: Corpus,
    left: Left,
    kind: Kind | TokenKind,
    block: int,
    per_document: bool,
    decompressors: int,
    on_gpus: bool,
    shares: int = 0,
) -> Work:
    """What each task counts: of plain text `_task_blocks` at a time for a GPU, and for cores a share for each of a
    task's, if the corpus has as much for each thread. What was counted before and may have changed keeps its pieces.

    block: what the setting says of a piece, in bytes. shares: of a plain piece, each counted by a thread; 0 where it is
    not counted so.
    """
    documents = [corpus.documents[place] for place in left.whole]
    whole = sum(document.nbytes for document in documents) + sum(
        stop - start for _, start, stop in left.ranges
    )
    share = max(LEAST_PIECE_NBYTES, ceil_div(whole, 2 * sum(worker.threads for worker in workers)))
    compressed = sum(document.codec is not None for document in documents)
    # Compressed documents are work for the cores, on a GPU's worker too: small tasks share them out evenly.
    nbytes = min(block, share)
    plain_nbytes = nbytes
    if on_gpus:
        plain_nbytes = min(_task_blocks(kind, workers) * min(block, LANE_NBYTES), share)
    elif shares:
        plain_nbytes = min(max(block, shares * min(block, _share_nbytes(workers, decompressors))), share)
    most = MOST_DOCUMENTS
    if per_document and isinstance(kind, Kind) and (on_gpus or kind.bins <= MOST_BINS_OF_ARRAYS):
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
    return Work(pieces, np.array(rows, np.int64), prints, before)


def _task_blocks(kind: Kind | TokenKind, workers: Sequence[WorkerFacts]) -> int:
    """Lane blocks of plain text that a task on a GPU counts."""
    if isinstance(kind, Kind):
        return TASK_BLOCKS
    if not kind.grows:
        return TASK_BLOCKS_OF_TOKENS
    most = TASK_BLOCKS_OF_NEW_TOKENS if kind.unit == "word" else TASK_BLOCKS_OF_TOKENS
    shares = [
        worker.host_limit_nbytes // worker.threads // NEW_TOKENS_NBYTES
        for worker in workers
        if worker.host_limit_nbytes is not None
    ]
    return max(1, min(most, min(shares, default=most * LANE_NBYTES) // LANE_NBYTES))


def _share_nbytes(workers: Sequence[WorkerFacts], threads: int) -> int:
    """Plain text of which each of a worker's threads counts the tokens at a time."""
    limits = [worker.host_limit_nbytes for worker in workers if worker.host_limit_nbytes is not None]
    return min([SHARE_NBYTES, *(limit // (SHARES_OF_HOST * threads) for limit in limits)])


def _reduction(before: Total) -> Reduction[Counts | None, Total]:
    """before: what is added to."""
    return Reduction(
        name="histogram",
        chunk=count_unless_as_before,
        identity=lambda: before,
        combine=lambda total, part: total,  # each was added as it arrived, by whoever knows its place
        commutative=True,  # additions of integers
        lighter="let them take smaller pieces (tilewright.piece-nbytes), or decompress on fewer threads"
        " (tilewright.decompress-threads)",
    )


def count_unless_as_before(
    before: np.ndarray | None, piece: Piece, *arguments: Any
) -> tuple[Counts | None, dict[str, float]]:
    """What a task does: `count_piece`, unless the piece still has the fingerprints that it had ``before``."""
    start = time.perf_counter()
    with suppress(CorpusError):  # whoever counts it says what is wrong
        if before is not None and is_as_before(piece, before, end_if_given_up()):
            return None, {"read": time.perf_counter() - start, "count": 0.0}
    lengths = {
        document.path: document.nbytes for document in piece.documents if document.nbytes >= TOLD_NBYTES
    }
    with watching(lengths, teller() if lengths and not piece.is_part else None):
        counts, stages = count_piece(piece, *arguments)
    meters_of(current_worker()).count(stages, pieces=1, read_nbytes=piece.nbytes)
    return counts, stages
