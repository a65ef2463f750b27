"""The histogram of a corpus: as a reduction over its pieces, and as the result that comes out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
from distributed import Client
from distributed.system import MEMORY_LIMIT

from tilewright.kernels import histogram as count
from tilewright.kernels.histogram import kind_named, piece_counts, skipped_count
from tilewright.kernels.histogram_tokens import Kind
from tilewright.kernels.host_loops import cpu_threads
from tilewright.kernels.launch import ceil_div
from tilewright.pipeline import config
from tilewright.pipeline.corpus import MOST_DOCUMENTS, Corpus, Piece, cut_pieces, read_blocks, read_range
from tilewright.pipeline.errors import PlanError
from tilewright.pipeline.events import Listener
from tilewright.pipeline.plan import format_nbytes
from tilewright.pipeline.reduce import Reduction, reduce_pieces, scratch
from tilewright.pipeline.store import run_all

SEPARATOR = 0
"""The byte between documents that are counted as one text, where tokens reach over edges: NUL ends any UTF-8
sequence as the end of the text would, and what it adds itself is taken off again."""

ROWS_NBYTES = 32 * 2**20
"""Counts of one task, per document: with many bins a piece holds fewer documents."""

LEAST_PIECE_NBYTES = 2**20
"""A small corpus is cut finer, so that all workers get some of it, but not finer than this."""

FEW_BINS = 256
"""Up to so many bins are listed with every bin and its label; of more, those that occur."""

SMALL_FILE_NBYTES = 2**18
"""Files below this size on average are read by one thread of a process at a time: in calls so short, two threads
spend four times as long handing the interpreter lock to and fro. Others count meanwhile, without that lock."""
_small_files = threading.Lock()

STAGES = ("read", "count")
LEAST_STREAM_NBYTES = 2**18
"""Stored bytes, if a piece has them, that a thread decompresses at least: it makes counts of its own."""

BAR_WIDTH = 40
MOST_BARS = 26


@dataclass(frozen=True, eq=False)
class Histogram:
    """How often every bin occurs in a corpus."""

    by: str
    """``byte``, ``ascii``, ``letter``, ``bigram`` or ``codepoint``."""
    counts: np.ndarray
    """int64[bins]; per document int64[(documents, bins)], rows in the order of ``documents``."""
    documents: tuple[str, ...]
    skipped: int
    """Bytes that have no bin: above 127 for ``ascii``, all but letters for ``letter``."""
    nbytes: int
    """Length of the whole corpus, of compressed documents decompressed."""
    device: str
    """Name of the GPU, or ``CPU``."""
    seconds: float
    """From the first piece handed out to the last one counted."""

    @property
    def bins(self) -> int:
        return int(self.counts.shape[-1])

    @property
    def totals(self) -> np.ndarray:
        """int64[bins]: the counts of the whole corpus."""
        return self.counts if self.counts.ndim == 1 else self.counts.sum(axis=0)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """What to call each bin, made on first use (1.1 million of them by code point)."""
        return tuple(label(self.by, place) for place in range(self.bins))

    def to_json(self) -> dict[str, Any]:
        """Every field as JSON types; ``labels`` is null for kinds of more than 256 bins.

        A bin's place in ``counts`` is its byte, letter, pair or code point.
        """
        return {
            "by": self.by,
            "bins": self.bins,
            "counts": self.counts.tolist(),
            "documents": list(self.documents),
            "labels": list(self.labels) if self.bins <= FEW_BINS else None,
            "skipped": self.skipped,
            "nbytes": self.nbytes,
            "device": self.device,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        rate = self.nbytes / self.seconds if self.seconds > 0 else 0.0
        totals = self.totals
        count_of = len(self.documents)
        head = (
            f"{format_nbytes(self.nbytes)} in {count_of} document{'s' if count_of != 1 else ''} by {self.by}"
            f" in {self.seconds:.2f} s on {self.device} ({rate / 1e9:.3g} GB/s): {int(totals.sum())} counted,"
            f" {self.skipped} skipped"
        )
        return "\n".join([head, *bars(self)])


def label(by: str, place: int) -> str:
    """The name of one bin: the character where it can be printed, else its number in hexadecimal."""
    if by == "letter":
        return chr(ord("A") + place)
    if by == "bigram":
        return _byte_label(place >> 8) + _byte_label(place & 0xFF)
    if by == "codepoint":
        return chr(place) if chr(place).isprintable() and place != 0x20 else f"U+{place:04X}"
    return _byte_label(place)


def _byte_label(value: int) -> str:
    return chr(value) if 0x20 < value < 0x7F else f"\\x{value:02x}"


def bars(histogram: Histogram, most: int = MOST_BARS) -> list[str]:
    """Lines of label, count, share and a bar, for the ``most`` frequent bins in the order of the bins."""
    totals = histogram.totals
    occupied = np.flatnonzero(totals)
    shown = np.sort(occupied[np.argsort(-totals[occupied], kind="stable")[:most]])
    if not len(shown):
        return []
    names = [label(histogram.by, int(place)) for place in shown]
    whole, largest = int(totals.sum()), int(totals.max())
    width, digits = max(map(len, names)), len(str(largest))
    lines = [
        f"{name:<{width}}  {totals[place]:>{digits}}  {totals[place] / whole:>7.2%}"
        f"  {'█' * max(1, round(BAR_WIDTH * int(totals[place]) / largest))}"
        for name, place in zip(names, shown, strict=True)
    ]
    if len(occupied) > most:
        lines.append(f"and {len(occupied) - most} more bins")
    return lines


@dataclass(frozen=True)
class Counts:
    """Counts of one piece that are not zero."""

    cells: np.ndarray
    """int64: row × bins + bin, each once; the row is the document's place in the corpus, or 0."""
    values: np.ndarray
    """int64, more than 0."""
    nbytes: int
    """What the piece's documents are long, decompressed."""


@dataclass(eq=False)
class Sum:
    """What has been counted so far."""

    counts: np.ndarray
    """int64[(rows, bins)]."""
    nbytes: int


def count_corpus(
    client: Client,
    corpus: Corpus,
    *,
    by: str,
    device: str,
    device_name: str,
    per_document: bool,
    listener: Listener,
) -> Histogram:
    """Count every document of the corpus on the client's workers, on ``device`` (``cuda`` or ``cpu``).

    Raises
    ------
    OptionError
        There is no such kind.
    PlanError
        The counts, one row for each document, would not fit this process's memory.
    CorpusError
        A file cannot be read or decompressed, or became shorter.
    """
    kind = kind_named(by)
    rows = len(corpus.documents) if per_document else 1
    needed, allowed = rows * kind.bins * np.dtype(np.int64).itemsize, MEMORY_LIMIT // 2
    if needed > allowed:
        raise PlanError(
            f"{rows} documents × {kind.bins} bins take {format_nbytes(needed)}, and {format_nbytes(allowed)}"
            " (half of this process's memory) are allowed; count fewer documents, a kind with fewer bins, or"
            " not per document"
        )
    pieces = _pieces(client, corpus, kind, per_document)
    nbytes, threads = config.get("piece-nbytes"), config.get("read-threads")
    start = time.perf_counter()
    total = reduce_pieces(
        client,
        _reduction(kind, rows),
        [(piece, kind.name, device, per_document, nbytes, threads) for piece in pieces],
        [piece.nbytes for piece in pieces],
        listener,
    )
    return Histogram(
        by=kind.name,
        counts=total.counts if per_document else total.counts[0],
        documents=tuple(document.name for document in corpus.documents),
        skipped=skipped_count(total.counts, kind.name, total.nbytes),
        nbytes=total.nbytes,
        device=device_name,
        seconds=time.perf_counter() - start,
    )


def _pieces(client: Client, corpus: Corpus, kind: Kind, per_document: bool) -> list[Piece]:
    threads = sum(client.nthreads().values())
    share = ceil_div(corpus.nbytes, 2 * max(1, threads))
    nbytes = min(config.get("piece-nbytes"), max(LEAST_PIECE_NBYTES, share))
    most = max(1, ROWS_NBYTES // (kind.bins * 8)) if per_document else MOST_DOCUMENTS
    # One task decompresses several documents at once, since a worker has fewer tasks under way than cores.
    compressed = sum(document.codec is not None for document in corpus.documents)
    streams = min(config.get("read-threads"), ceil_div(compressed, 2 * max(1, len(client.nthreads()))))
    pieces = list(cut_pieces(corpus.documents, nbytes, min(most, MOST_DOCUMENTS), streams))
    # Large compressed documents take longest: begun first, none is left for the end with one worker at it.
    return sorted(pieces, key=lambda piece: -piece.nbytes if piece.nbytes > nbytes else 0)


def _reduction(kind: Kind, rows: int) -> Reduction[Counts, Sum, Sum]:
    return Reduction(
        name="histogram",
        chunk=count_piece,
        identity=partial(_nothing, rows, kind.bins),
        combine=_add,
        finalize=_same,
        commutative=True,  # additions of integers
    )


def _nothing(rows: int, bins: int) -> Sum:
    return Sum(np.zeros((rows, bins), np.int64), 0)


def _add(total: Sum, part: Counts) -> Sum:
    total.counts.reshape(-1)[part.cells] += part.values
    total.nbytes += part.nbytes
    return total


def _same(total: Sum) -> Sum:
    return total


def count_piece(
    piece: Piece, by: str, device: str, per_document: bool, block_nbytes: int, threads: int
) -> tuple[Counts, dict[str, float]]:
    """Read and count one piece; what a task does.

    block_nbytes: how much of compressed documents each thread counts at a time, and with its margins has in memory.
    threads: how many of this process decompress documents at once, those of all its tasks together; no more than
        it has cores.
    """
    kind = kind_named(by)
    threads = min(
        threads, cpu_threads()
    )  # more than cores only take turns: on two cores, 8 are 0.7 × as fast as 2
    share_nbytes = max(LEAST_STREAM_NBYTES, ceil_div(piece.nbytes, threads))
    shares = [piece] if piece.is_plain else list(cut_pieces(piece.documents, share_nbytes))
    calls = [partial(_count_share, share, kind, device, per_document, block_nbytes) for share in shares]
    if len(calls) == 1:
        counts, nbytes, stages = calls[0]()
    else:
        counts = np.zeros((len(piece.documents) if per_document else 1, kind.bins), np.int64)
        nbytes, stages = 0, dict.fromkeys(STAGES, 0.0)
        for share, (found, length, clocks) in zip(shares, run_all(_pool(threads), calls), strict=True):
            first = share.first if per_document else 0
            counts[first : first + len(found)] += found
            nbytes += length
            stages = {name: stages[name] + clocks[name] for name in STAGES}
    flat = counts.reshape(-1)
    cells = np.flatnonzero(flat)
    values = flat[cells]
    if per_document:
        cells += piece.first * kind.bins
    return Counts(cells, values, nbytes), stages


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Kept by a worker's process, so that its threads keep their buffers."""
    return ThreadPoolExecutor(threads, thread_name_prefix="tilewright-decompress")


def _count_share(
    piece: Piece, kind: Kind, device: str, per_document: bool, block_nbytes: int
) -> tuple[np.ndarray, int, dict[str, float]]:
    """What one thread counts: int64[(documents or 1, bins)], the documents' length, and busy seconds."""
    gap = 1 if kind.after and not per_document else 0
    if piece.is_part:
        blocks = _read_part(piece, kind, device)
    elif piece.is_plain:
        blocks = _read_documents(piece, gap, device)
    else:
        blocks = _decompress(piece, kind, gap, block_nbytes, device)
    rows = len(piece.documents) if per_document else 1
    counts: np.ndarray | None = None
    nbytes, stages = 0, dict.fromkeys(STAGES, 0.0)
    clock = time.perf_counter()
    for block in blocks:
        read = time.perf_counter()
        found = _count_block(block, kind, gap, per_document, device)
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
    return counts, nbytes, stages


@dataclass(frozen=True, eq=False)
class _Block:
    """What is counted in one go: whole documents, or a stretch of one with its margins."""

    data: np.ndarray
    """uint8. Whole documents lie one behind the other, a separator behind each where there is a gap."""
    first: int
    """Place in the piece of the first document."""
    edges: np.ndarray | None
    """Where each whole document begins and the last ends; None for a stretch."""
    start: int
    stop: int
    """What is counted of ``data``; the rest is margins."""

    @property
    def documents(self) -> int:
        """How many whole ones."""
        return 0 if self.edges is None else len(self.edges) - 1

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def _whole(data: np.ndarray, first: int, edges: np.ndarray) -> _Block:
    return _Block(data[: edges[-1]], first, edges, 0, int(edges[-1]))


def _count_block(block: _Block, kind: Kind, gap: int, per_document: bool, device: str) -> np.ndarray:
    """Counts, int64[(documents, bins)] if each of them has a row, else int64[(1, bins)]."""
    if block.edges is None:
        stretch = piece_counts(block.data, by=kind.name, start=block.start, stop=block.stop, device=device)
        return np.asarray(stretch)[None]
    if per_document:
        return np.asarray(count(block.data, by=kind.name, offsets=block.edges, device=device))
    return _count_together(block.data, block.edges, gap, kind, device)[None]


def _read_part(piece: Piece, kind: Kind, device: str) -> Iterator[_Block]:
    """A part of one document, with what its edge tokens reach to."""
    (document,) = piece.documents
    start, stop = max(0, piece.start - kind.before), min(document.nbytes, piece.stop + kind.after)
    data = scratch("text", stop - start, pinned=device == "cuda")
    read_range(document, start, stop, data)
    yield _Block(data, 0, None, piece.start - start, piece.stop - start)


def _read_documents(piece: Piece, gap: int, device: str) -> Iterator[_Block]:
    """Whole documents, all in one block.

    Where they are counted as one text and tokens reach over edges, a separator follows each document: gap is 1.
    """
    lengths = np.fromiter((document.nbytes for document in piece.documents), np.int64, len(piece.documents))
    edges = np.concatenate([[0], np.cumsum(lengths + gap)])
    data = scratch("text", int(edges[-1]), pinned=device == "cuda")
    with _small_files if piece.nbytes < SMALL_FILE_NBYTES * len(piece.documents) else nullcontext():
        for document, begin in zip(piece.documents, edges.tolist(), strict=False):
            read_range(document, 0, document.nbytes, data[begin : begin + document.nbytes])
    if gap:
        data[edges[1:] - 1] = SEPARATOR
    yield _whole(data, 0, edges)


def _decompress(piece: Piece, kind: Kind, gap: int, nbytes: int, device: str) -> Iterator[_Block]:
    """Whole documents of any length, decompressed into one buffer that is handed out each time it is full.

    A block holds the documents that ended in it. The beginning of the next one moves to the front of the buffer;
    when that one alone fills it, stretches of it are handed out, and the margins move to the front.
    """
    full = nbytes + kind.before + kind.after
    data = scratch("text", full + gap * len(piece.documents), pinned=device == "cuda")
    first, edges, filled = 0, [0], 0
    for place, document in enumerate(piece.documents):
        margin, stretched = 0, False
        for block in read_blocks(document):
            left = np.frombuffer(block, np.uint8)
            while len(left):
                if filled >= full:
                    if len(edges) > 1:
                        yield _whole(data, first, np.array(edges))
                        keep = filled - edges[-1]
                    else:
                        yield _Block(data[:filled], place, None, margin, filled - kind.after)
                        keep = min(filled, kind.before + kind.after)
                        margin, stretched = keep - kind.after, True
                    data[:keep] = data[filled - keep : filled]
                    first, edges, filled = place, [0], keep
                    continue
                step = min(len(left), full - filled)
                data[filled : filled + step] = left[:step]
                filled, left = filled + step, left[step:]
        if stretched:
            yield _Block(data[:filled], place, None, margin, filled)
            first, edges, filled = place + 1, [0], 0
            continue
        if gap:
            data[filled] = SEPARATOR
        filled += gap
        edges.append(filled)
    if len(edges) > 1:
        yield _whole(data, first, np.array(edges))


def _count_together(data: np.ndarray, edges: np.ndarray, gap: int, kind: Kind, device: str) -> np.ndarray:
    """Counts of all documents in ``data`` together, without those that the separators took part in."""
    counts = np.asarray(count(data, by=kind.name, device=device))
    if not gap:
        return counts
    separators = edges[1:] - 1
    if kind.name == "codepoint":
        counts[SEPARATOR] -= len(separators)
        return counts
    begins = np.unique(np.concatenate([separators - 1, separators]))
    begins = begins[(begins >= 0) & (begins < len(data) - 1)]
    pairs = data[begins].astype(np.int64) << 8 | data[begins + 1]
    np.subtract.at(counts, pairs, 1)
    return counts
