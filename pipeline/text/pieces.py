"""How a task counts a piece: its shares are read and counted by threads, on the CPU or on a GPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from tilewright.kernels.cpu.loops import usable_cores
from tilewright.kernels.histograms.token_kinds import TokenKind
from tilewright.kernels.histograms.token_lists import Tokens
from tilewright.kernels.histograms.token_lists import joined as all_tokens
from tilewright.kernels.histograms.tokens import Kind
from tilewright.kernels.numbers import ceil_div, counted
from tilewright.pipeline.cluster.here.worker import tasks_at_once
from tilewright.pipeline.errors import CorpusError, DocumentError
from tilewright.pipeline.reduce import end_if_given_up
from tilewright.pipeline.store.remote.files import REQUEST_NBYTES
from tilewright.pipeline.store.waiting import reading_while
from tilewright.pipeline.text.arrival import without
from tilewright.pipeline.text.blocks import (
    EXTRA_NBYTES,
    SEPARATOR,
    USUAL,
    Block,
    has_small_files,
    read_at_once,
    stream,
    turn_to_read,
    with_margins,
)
from tilewright.pipeline.text.blocks import MOST_DOCUMENTS as MOST_OF_A_BLOCK
from tilewright.pipeline.text.corpus import Piece, cut_pieces, reading_ahead, share_out
from tilewright.pipeline.text.documents import Counts, Rows, are_files, joined, rows_of, width_of
from tilewright.pipeline.text.fingerprints import NONE, Fingerprints
from tilewright.pipeline.text.formats.listing import SNIFFED_NBYTES, head_of
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.formats.recognition import container_named, may_be_known, recognised
from tilewright.pipeline.text.formats.sources import Found, LeftOut, Remarks, add_remarks, all_found
from tilewright.pipeline.text.gpu.room import may_be_fields
from tilewright.pipeline.text.sparse_counts import narrowest
from tilewright.pipeline.text.sparse_pieces import with_one_list
from tilewright.pipeline.threads import run_all, thread_buffer
from tilewright.pipeline.transfer import file_upload
from tilewright.pipeline.transfer.lane_blocks import LANE_NBYTES

if TYPE_CHECKING:
    from tilewright.pipeline.text.gpu.lanes import Tally
    from tilewright.pipeline.text.sparse_pieces import Entries

Result = TypeVar("Result")

ROWS_NBYTES = 32 * 2**20
"""The most per-document counts of one task: with many bins a piece holds fewer documents."""

MOST_BLOCK_NBYTES = 2**30
"""The most of a compressed document that a thread holds at a time, whatever the setting says."""

CORES = "cores"
"""The device of what no GPU counts, on the workers of GPUs: each counts on its share of its host's cores."""

LEAST_STREAM_NBYTES = 2**18
"""The least stored bytes that a thread decompresses, if the piece has them: each thread costs counts of its own."""

NO_CELLS = np.empty(0, np.int64)

MOST_LISTED = 20
"""Bad files whose errors are put into one."""

STAGES = ("read", "count")


def rows_of_a_block(kind: Kind) -> int:
    """The most documents that are counted at once, each by itself."""
    return max(1, ROWS_NBYTES // (8 * kind.bins))


def count_piece(
    piece: Piece,
    kind: Kind | TokenKind,
    device: str,
    per_document: bool,
    block_nbytes: int,
    threads: int,
    neighbours: int = 1,
    fingerprints: bool = False,
    reading: Reading = USUAL,
    on_error: str = "stop",
) -> tuple[Counts, dict[str, float]]:
    """Read and count one piece.

    block_nbytes: how much of a compressed document (on a GPU: of any) each thread counts at a time and, with margins,
    holds in memory; at most `LANE_NBYTES` on a GPU, `MOST_BLOCK_NBYTES` on a CPU.
    threads: how many of this process read or decompress, for all its tasks together; no more than it has cores
    decompress.
    neighbours: workers on this one's host, itself included.
    fingerprints: whether those of what is read are wanted. There are none of large plain files on a GPU, as texts or by
    a field.
    on_error: "report" leaves out the files that cannot be counted, and says which (`Counts.bad`); "stop" raises, and
    names what else is bad among the piece's files, as far as a block of them reaches.
    """

    def count(left: Piece) -> tuple[Counts, dict[str, float]]:
        if not left.documents:
            rows = joined([]) if per_document else None
            return Counts(NO_CELLS, NO_CELLS, 0, lost=0, rows=rows), dict.fromkeys(STAGES, 0.0)
        return _count(
            left, kind, device, per_document, block_nbytes, threads, neighbours, fingerprints, reading
        )

    counted_part, bad = without_bad_files(piece, count, kind, reading, on_error, block_nbytes)
    if counted_part is None:
        return Counts(NO_CELLS, NO_CELLS, 0, lost=0, bad=bad), dict.fromkeys(STAGES, 0.0)
    counts, stages = counted_part
    return replace(counts, bad=bad), stages


def without_bad_files(
    piece: Piece,
    read: Callable[[Piece], Result],
    kind: Kind | TokenKind,
    reading: Reading,
    on_error: str,
    most_nbytes: int,
) -> tuple[Result | None, dict[int, str]]:
    """What ``read`` makes of a piece; where ``on_error`` is "report", without the files that cannot be read, which may
    leave no documents: by their places, why. None of a part of such a file.

    most_nbytes: how much of a piece's other files is read, decoded, to name what else is bad where ``on_error`` is
    "stop".
    """
    left, bad = piece, dict[int, str]()
    for attempt in itertools.count():
        try:
            return read(left), bad
        except CorpusError as error:
            if on_error != "report":
                if isinstance(error, DocumentError) and len(piece.documents) > 1:
                    raise _with_others(error, _bad_files(piece, kind, reading, most=most_nbytes)) from error
                raise
            if left.is_part:
                return None, {0: str(error)}
            found = _bad_files(piece, kind, reading, bad)
            if not found and attempt:
                raise  # it can be read by itself, and twice not with others
            bad |= found
            left = without(piece, bad)
    raise AssertionError


def _bad_files(
    piece: Piece,
    kind: Kind | TokenKind,
    reading: Reading,
    known: Collection[int] = (),
    most: int | None = None,
) -> dict[int, str]:
    """The files of a piece that cannot be read to their ends, but for those that are known, by place, and why.

    most: how many bytes, decoded, are read at most.
    """
    check, bad, read = end_if_given_up(), dict[int, str](), 0
    memory = partial(thread_buffer, "text", LANE_NBYTES + EXTRA_NBYTES, pinned=False)
    for place, document in enumerate(piece.documents):
        if place in known:
            continue
        try:
            alone = Piece(0, (document,), 0, document.nbytes)
            with reading_while(check), reading_ahead(alone):
                for block in stream(alone, kind, 0, LANE_NBYTES, memory, reading=reading):
                    check()
                    read += block.nbytes
                    if most is not None and read > most:
                        return bad
        except CorpusError as error:
            bad[place] = str(error)
    return bad


def _with_others(error: DocumentError, bad: dict[int, str]) -> DocumentError:
    """The same error, with what is wrong with other files."""
    others = [why for why in bad.values() if why != str(error)]
    if not others:
        return error
    more = "; ".join(others[:MOST_LISTED]) + (
        f"; and {len(others) - MOST_LISTED} more" if len(others) > MOST_LISTED else ""
    )
    too = f"{counted(len(others), 'other file')} beside it {'is' if len(others) == 1 else 'are'} bad too"
    return type(error)(f"{error}. {too} (--on-error report leaves bad files out, and lists them): {more}")


def _count(
    piece: Piece,
    kind: Kind | TokenKind,
    device: str,
    per_document: bool,
    block_nbytes: int,
    threads: int,
    neighbours: int,
    fingerprints: bool,
    reading: Reading,
) -> tuple[Counts, dict[str, float]]:
    """As `count_piece`, where every file can be counted."""
    left: Remarks = {}
    if not piece.is_plain:
        threads = min(threads, usable_cores())  # more only take turns: on two cores, 8 are 0.7 × as fast as 2
    if device == "cuda" and isinstance(kind, TokenKind):
        if not per_document and _is_brought_whole(piece, reading):
            from tilewright.pipeline.text.gpu.texts import count_tokens

            run = partial(run_all, text_threads(threads))
            found = count_tokens(piece, kind, run, threads, neighbours, left)
            if found is not None:
                part = _part_of(found, None, all_found(len(piece.documents)))
                return _counts_of(piece, [replace(piece, first=0)], [part], per_document, kind)
        words = None if per_document else _words_on_gpu(piece, kind, reading, threads, neighbours, left)
        if words is not None:
            words = with_one_list(words, partial(run_all, text_threads(threads)))
            return _counts_of(piece, [replace(piece, first=0)] * len(words), words, per_document, kind)
        device, threads = CORES, min(threads, usable_cores())
    shares = _shares(piece, kind, device, block_nbytes, threads)
    if not piece.is_plain:
        reading = replace(reading, threads=max(1, threads // len(shares)))
    if device == "cuda":
        # In large steps: between two of them the many threads that read take turns at the interpreter.
        reading = replace(reading, buffer_nbytes=LANE_NBYTES)
    task = _Task(kind, per_document, block_nbytes, fingerprints, reading, end_if_given_up())
    if device != "cuda" and task.is_sparse:
        parts = _run(_calls(_sparse_on_host, shares), threads, task)
        parts = with_one_list(parts, partial(run_all, text_threads(threads)))
        add_remarks(parts[0].found.remarks, left)
        return _counts_of(piece, shares, parts, per_document, kind)
    assert isinstance(kind, Kind)
    if device == "cpu":
        parts = _run(_calls(_on_host, shares), threads, task)
        return _counts_of(piece, shares, parts, per_document, kind)
    from tilewright.pipeline.text.gpu.lanes import borrowed_tally, prepare
    from tilewright.pipeline.text.gpu.texts import count_text

    prepare(kind)
    if per_document and not _is_one_text(piece, reading):
        parts = _run(_calls(_rows_on_gpu, shares), threads, task)
        return _counts_of(piece, shares, parts, per_document, kind)
    with borrowed_tally(kind.bins) as tally:
        if _is_brought_whole(piece, reading):
            run = partial(run_all, text_threads(threads))
            counts = count_text(piece, kind, tally, run, threads, neighbours, left)
            if counts is not None:
                part = _part_of(counts, None, all_found(len(piece.documents)))
                return _counts_of(piece, [replace(piece, first=0)], [part], per_document, kind)
        field = _field_on_gpu(piece, kind, tally, task, threads, left)
        if field is not None:
            return _counts_of(piece, [replace(piece, first=0)], [field], per_document, kind)
        parts = _run(_calls(partial(_tally_on_gpu, tally), shares), threads, task)
        add_remarks(parts[0].found.remarks, left)
        tallied = tally.read()
        for part in parts:
            assert part.columns is not None
            np.subtract.at(tallied, part.columns, 1)
        bins = np.flatnonzero(tallied)
        first = replace(parts[0], rows=np.zeros_like(bins), columns=bins, values=tallied[bins])
        return _counts_of(
            piece,
            shares,
            [first, *(replace(part, rows=NO_CELLS, columns=NO_CELLS) for part in parts[1:])],
            per_document,
            kind,
        )


@dataclass(frozen=True)
class _Task:
    """What all shares of a piece have in common."""

    kind: Kind | TokenKind
    per_document: bool
    block_nbytes: int
    fingerprints: bool
    reading: Reading
    check: Callable[[], None]
    """Is called for each block, and may end what counts it."""

    @property
    def gap(self) -> int:
        """1 where documents are counted as one text and tokens span several bytes, else 0."""
        return 1 if self.kind.after and not self.per_document else 0

    @property
    def is_sparse(self) -> bool:
        """Whether a CPU counts it into what is not zero alone."""
        return isinstance(self.kind, TokenKind) or self.per_document

    def most(self, sparse: bool = False) -> int:
        """The most documents of a block."""
        if sparse or not self.per_document or isinstance(self.kind, TokenKind):
            return MOST_OF_A_BLOCK
        return rows_of_a_block(self.kind)

    def prints(self, share: Piece) -> Fingerprints | None:
        return Fingerprints(share.first) if self.fingerprints else None


@dataclass(frozen=True, eq=False)
class _Part:
    """What one thread has counted."""

    rows: np.ndarray | None
    columns: np.ndarray | None
    values: np.ndarray
    """int64: rows of the share, bins or places in ``tokens``, and counts; None as of `Entries`. With a tally columns
    are bins that separators took part in, each entry one count too many, and there are no rows and values."""
    nbytes: int
    """The documents' length, decoded."""
    stages: dict[str, float]
    """Busy seconds."""
    prints: np.ndarray
    """`Counts.prints`."""
    found: Found
    lost: dict[int, int] | None
    """By rows, U+FFFD for malformed bytes that counting found; None where it does not tell."""
    tokens: Tokens | None = None


class _Cells:
    """The nonzero counts of a share, block by block."""

    def __init__(self, kind: Kind) -> None:
        self._bins = kind.bins
        self._cells, self._values = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        self._open: tuple[int, np.ndarray] | None = None
        """The row whose document is counted in stretches, and its counts so far."""

    def add(self, first: int, found: np.ndarray, stretch: bool) -> None:
        """Add counts, int64[(rows, bins)], of rows from ``first`` on; memory that is used again may be given."""
        if self._open is not None and self._open[0] == first:
            self._open[1][:] += found[0]
            return
        self._close()
        if stretch:
            self._open = first, found[0].copy()
        else:
            self._append(first, found)

    def _append(self, first: int, found: np.ndarray) -> None:
        flat = found.reshape(-1)
        cells = np.flatnonzero(flat)
        self._values.append(flat[cells])
        self._cells.append(cells + first * self._bins)

    def _close(self) -> None:
        if self._open is not None:
            first, found = self._open
            self._open = None
            self._append(first, found[None])

    def all(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, columns and values."""
        self._close()
        rows, columns = np.divmod(np.concatenate(self._cells), self._bins)
        return rows, columns, np.concatenate(self._values)


def _shares(
    piece: Piece, kind: Kind | TokenKind, device: str, block_nbytes: int, threads: int
) -> list[Piece]:
    """What each thread reads; ``first`` counts from the piece's first document."""
    if not piece.is_plain:
        return list(cut_pieces(piece.documents, max(LEAST_STREAM_NBYTES, ceil_div(piece.nbytes, threads))))
    # Loops that count by bins share out a block by themselves; of tokens each thread counts a share.
    if device == CORES or isinstance(kind, TokenKind):
        each = threads if device == CORES else ceil_div(threads, tasks_at_once())
        return list(share_out(piece, max(LEAST_STREAM_NBYTES, ceil_div(piece.nbytes, each))))
    if device == "cpu" or has_small_files(piece):
        return [Piece(0, piece.documents, piece.start, piece.stop)]
    return list(share_out(piece, max(min(block_nbytes, LANE_NBYTES), ceil_div(piece.nbytes, threads))))


def _calls(count: Callable[[Piece, _Task], _Part], shares: Sequence[Piece]) -> list[Callable[[_Task], _Part]]:
    """Calls that count a share each, and have what is at URLs asked for ahead."""

    def call(share: Piece, task: _Task) -> _Part:
        if share.is_local:
            return count(share, task)
        part = with_margins(share, task.kind) if share.is_part else (None, None)
        with reading_while(task.check), reading_ahead(share, *part):
            return count(share, task)

    return [partial(call, share) for share in shares]


def _run(calls: Sequence[Callable[[_Task], _Part]], threads: int, task: _Task) -> list[_Part]:
    """Make the calls of the task, one a share, on threads."""
    checked = [lambda check, call=call: call(replace(task, check=check)) for call in calls]
    return run_shares(checked, threads, task.check)


def run_shares(
    calls: Sequence[Callable[[Callable[[], None]], Result]], threads: int, check: Callable[[], None]
) -> list[Result]:
    """Make calls on the process's threads for texts, each with what it is to call now and then, and which may end it.
    One that fails ends the others: the rest of a compressed document may take hours."""
    if len(calls) == 1:
        return [calls[0](check)]
    failed: list[Exception] = []

    def check_all() -> None:
        check()
        if failed:
            raise failed[0]

    def run(call: Callable[[Callable[[], None]], Result]) -> Result:
        try:
            return call(check_all)
        except Exception as error:
            failed.append(error)
            raise

    try:
        return run_all(text_threads(threads), [partial(run, call) for call in calls])
    finally:
        failed.clear()  # an error in a cycle with its own traceback would keep files open


@lru_cache(maxsize=2)
def text_threads(threads: int) -> ThreadPoolExecutor:
    """Kept by a worker's process, so that its threads keep their buffers: one pool for plain and one for compressed
    pieces. The threads of a pool that is dropped end once nobody uses it."""
    return ThreadPoolExecutor(threads, thread_name_prefix="tilewright-text")


def _counts_of(
    piece: Piece, shares: Sequence[Piece], parts: Sequence[_Part], per_document: bool, kind: Kind | TokenKind
) -> tuple[Counts, dict[str, float]]:
    """The counts of a piece from those of its shares."""
    remarks: Remarks = {}
    left_out: dict[int, LeftOut] = {}
    for share, part in zip(shares, parts, strict=True):
        add_remarks(remarks, part.found.remarks)
        left_out |= {share.first + place: each for place, each in part.found.left_out.items()}
    lost = None
    if all(part.lost is not None for part in parts):
        lost = sum(part.found.lost + sum((part.lost or {}).values()) for part in parts)
    found = _Rows(per_document)
    for share, part in zip(shares, parts, strict=True):
        found.add(share, part)
    documents = found.documents
    if piece.is_part:
        documents = int(piece.stop == piece.documents[0].nbytes)
    begins = found.begins if per_document else [0] * len(parts)
    tokens = None
    if isinstance(kind, TokenKind):
        tokens = all_tokens([part.tokens for part in parts if part.tokens is not None])
    entries: np.ndarray | None
    if parts[0].columns is None:
        entries, values = None, parts[0].values
    else:
        entries, values = _entries(parts, begins, width_of(kind, tokens))
    if len(parts) > 1 and tokens is None:
        assert entries is not None
        entries, values = _added(entries, values)
    rows = None
    if per_document:
        together = joined(found.rows)
        rows = None if are_files(together, len(piece.documents)) else together
    stages = {name: sum(part.stages[name] for part in parts) for name in STAGES}
    prints = np.concatenate([part.prints for part in parts])
    nbytes = sum(part.nbytes for part in parts)
    values = values.astype(narrowest(values))  # millions of them travel
    counts = Counts(entries, values, nbytes, prints, documents, lost, rows, remarks, left_out, tokens=tokens)
    return counts, stages


def _entries(parts: Sequence[_Part], begins: Sequence[int], width: int) -> tuple[np.ndarray, np.ndarray]:
    """The cells of a piece, int64, and their values. begins: the first row of each part; width: of the piece's rows."""
    cells, skip = [], 0
    for part, begin in zip(parts, begins, strict=True):
        columns = np.arange(len(part.values)) if part.columns is None else part.columns
        row = begin if part.rows is None else part.rows + begin
        cells.append(row * width + skip + columns)
        skip += 0 if part.tokens is None else len(part.tokens)
    return np.concatenate(cells), np.concatenate([part.values for part in parts])


class _Rows:
    """The rows of the documents of all shares, of which several may be parts of one document."""

    def __init__(self, per_document: bool) -> None:
        """per_document: whether there are rows at all."""
        self._per_document = per_document
        self.rows: list[Rows] = []
        self.begins: list[int] = []
        """The first row of each share."""
        self.documents = self._count = 0
        self._cut: int | None = None

    def add(self, share: Piece, part: _Part) -> None:
        if share.is_part and self._cut == share.first:
            self.begins.append(max(0, self._count - 1))
            if not self._per_document:
                return
            for row, lost in (part.lost or {}).items():
                self.rows[-1].lost[row] += lost
            return
        self._cut = share.first if share.is_part else None
        self.begins.append(self._count)
        self.documents += part.found.documents
        if not self._per_document:
            return
        self.rows.append(rows_of(part.found, share.first, part.lost or {}))
        self._count += len(self.rows[-1])


def _added(cells: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts of the same cells, added up."""
    found, places = np.unique(cells, return_inverse=True)
    total = np.zeros(len(found), np.int64)
    np.add.at(total, places.reshape(-1), values)
    return found, total


def _sparse_on_host(share: Piece, task: _Task) -> _Part:
    """Count a share on the CPU, where most counts would be zero."""
    from tilewright.pipeline.text.sparse_pieces import count_rows_of, count_tokens

    prints, found = task.prints(share), Found(task.per_document)
    blocks = _host_blocks(share, task, prints, found, sparse=True)
    if isinstance(task.kind, Kind):
        counts = count_rows_of(task.kind, blocks, task.check)
    else:
        counts = count_tokens(share, task.kind, task.per_document, blocks, prints, task.check)
    return _part_of(counts, prints, found)


def _part_of(counts: Entries, prints: Fingerprints | None, found: Found) -> _Part:
    stages = {"read": counts.read_seconds, "count": counts.count_seconds}
    return _Part(
        counts.rows, counts.columns, counts.values, counts.nbytes, stages, _rows_of(prints), found,
        counts.lost, counts.tokens,
    )  # fmt: skip


def _on_host(share: Piece, task: _Task) -> _Part:
    """Count a share on the CPU, all documents together."""
    from tilewright.kernels.histograms.replaced import undecoded  # needs Numba, which a client has no use for

    kind, gap = _array_kind(task), task.gap
    cells, counts = _Cells(kind), None
    prints, found = task.prints(share), Found(task.per_document)
    lost = nbytes = 0
    stages = dict.fromkeys(STAGES, 0.0)
    clock = time.perf_counter()
    for block in _host_blocks(share, task, prints, found):
        task.check()
        read = time.perf_counter()
        edges = np.array([0, len(block.data)])
        new = _count_block(block, kind, gap, edges)
        malformed = undecoded(new, kind, block.data, edges, block.start, block.stop)
        lost += int(malformed[0])
        if counts is None:
            counts = new
        else:
            counts += new
        nbytes += block.nbytes - gap * block.documents
        stages["read"] += read - clock
        clock = time.perf_counter()
        stages["count"] += clock - read
    if counts is not None:
        cells.add(0, counts, False)
    told = {0: lost} if lost else {}
    return _Part(*cells.all(), nbytes, stages, _rows_of(prints), found, told)


def _array_kind(task: _Task) -> Kind:
    assert isinstance(task.kind, Kind)
    return task.kind


def _rows_of(prints: Fingerprints | None) -> np.ndarray:
    return NONE if prints is None else prints.rows()


def _host_blocks(
    share: Piece, task: _Task, prints: Fingerprints | None, found: Found, *, sparse: bool = False
) -> Iterable[Block]:
    """Plain documents on a disk in one block, others in a buffer that is filled again and again: what is at URLs is
    counted while more of it is under way."""
    if share.is_plain and share.is_local:
        first = prints if prints is None else task.prints(share)
        block = read_at_once(share, task.kind, task.gap, partial(thread_buffer, "text", pinned=False), first)
        known = (
            not task.reading.raw
            and block.edges is not None
            and may_be_known(block.data, block.edges, [document.name for document in share.documents])
        )
        if not known:
            if prints is not None and first is not None:
                prints.take(first)
            for place in range(len(share.documents)):
                found.place = place
                found.ended("")
            return [block]
    nbytes = min(task.block_nbytes, MOST_BLOCK_NBYTES if share.is_local else REQUEST_NBYTES)
    memory = partial(thread_buffer, "text", nbytes + EXTRA_NBYTES, pinned=False)
    return _stream(share, task, nbytes, memory, prints, found, sparse=sparse)


def _stream(
    share: Piece,
    task: _Task,
    nbytes: int,
    buffer: Callable[[], np.ndarray],
    prints: Fingerprints | None,
    found: Found,
    *,
    sparse: bool = False,
) -> Iterator[Block]:
    return stream(
        share,
        task.kind,
        task.gap,
        nbytes,
        buffer,
        prints,
        reading=task.reading,
        found=found,
        most=task.most(sparse),
    )


def _count_block(block: Block, kind: Kind, gap: int, edges: np.ndarray) -> np.ndarray:
    """Counts, int64[(documents, bins)], of documents that begin and end at ``edges``."""
    from tilewright.kernels.histograms.host import count_host  # needs Numba, which a client has no use for

    counts = count_host(block.data, kind, edges, block.start, block.stop)
    if gap and block.edges is not None:
        np.subtract.at(counts[0], _of_separators(block.data, block.edges, kind), 1)
    return counts


def _is_brought_whole(piece: Piece, reading: Reading) -> bool:
    """Whether a piece is brought to a GPU as one text."""
    return (
        file_upload.serves(piece.nbytes)
        and piece.is_plain
        and piece.is_local
        and not has_small_files(piece)
        and _are_plain(piece, reading)
    )


def _is_one_text(piece: Piece, reading: Reading) -> bool:
    """Whether a piece is known to be one document, or part of one, before it is read."""
    return piece.is_part or (
        len(piece.documents) == 1 and piece.is_plain and (reading.raw or piece.nbytes >= SNIFFED_NBYTES)
    )


def _are_plain(piece: Piece, reading: Reading) -> bool:
    """Whether a piece's documents are counted as they are stored, by a look at those that nobody has looked at yet."""
    return reading.raw or not any(
        recognised(head_of(document.path), document.name) or container_named(document.name)
        for document in piece.documents
        if document.nbytes < SNIFFED_NBYTES and not piece.is_part
    )


def _tally_on_gpu(tally: Tally, share: Piece, task: _Task) -> _Part:
    """Add the counts of a share, all documents together, to the tally; returns when its last block is under way."""
    from tilewright.pipeline.text.gpu.lanes import borrowed_lane
    from tilewright.pipeline.text.gpu.texts import unknown

    kind, gap = _array_kind(task), task.gap
    separators = [np.empty(0, np.int64)]
    prints, found = task.prints(share), Found(task.per_document)
    nbytes, counting = 0, 0.0
    start = time.perf_counter()
    with borrowed_lane() as lane, turn_to_read(share):
        try:
            blocks = _stream(share, task, min(task.block_nbytes, LANE_NBYTES), lane.buffer, prints, found)
            for block in blocks:
                task.check()
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
    none = NO_CELLS
    return _Part(
        none, np.concatenate(separators), none, nbytes, stages, _rows_of(prints), found, unknown(kind)
    )


def _field_on_gpu(
    piece: Piece, kind: Kind, tally: Tally, task: _Task, threads: int, left: Remarks
) -> _Part | None:
    """What is counted of a field of large plain files of JSON lines; None of any other piece, and where the cores have
    to read it, of which ``left`` gets what is to be told."""
    from tilewright.pipeline.text.gpu.fields import count_fields, fit
    from tilewright.pipeline.text.gpu.texts import unknown

    if task.per_document or not fit(piece, task.reading):
        return None
    (field,) = task.reading.fields
    readers = text_threads(threads)
    counts = count_fields(piece, field, kind, task.gap, tally, readers, threads, task.check, left)
    if counts is None:
        return None
    start = time.perf_counter()
    tallied = tally.read()
    np.subtract.at(tallied, counts.of_separators[:, 0], counts.of_separators[:, 1])
    for block in counts.blocks:
        tallied += _count_block(block, kind, task.gap, np.array([0, len(block.data)]))[0]
    bins = np.flatnonzero(tallied)
    stages = {"read": counts.reading, "count": counts.counting + time.perf_counter() - start}
    return _Part(
        np.zeros_like(bins), bins, tallied[bins], counts.nbytes, stages, NONE, counts.found, unknown(kind)
    )


def _words_on_gpu(
    piece: Piece, kind: TokenKind, reading: Reading, threads: int, neighbours: int, left: Remarks
) -> list[_Part] | None:
    """As `_field_on_gpu`, of words: what the GPU has counted, and what the cores have where it did not decide."""
    if kind.name != "word" or not may_be_fields(piece, reading):
        return None
    from tilewright.pipeline.text.gpu.fields import count_field_words, fit
    from tilewright.pipeline.text.sparse_pieces import Entries, count_tokens

    if not fit(piece, reading):
        return None
    (field,) = reading.fields
    check, readers = end_if_given_up(), text_threads(threads)
    found = count_field_words(piece, field, kind, readers, threads, neighbours, check, left)
    if found is None:
        return None
    fields, words, lost = found
    told = {0: lost} if lost else {}
    seconds = fields.reading, fields.counting
    entries = [Entries(None, None, words.counts, words.tokens, fields.nbytes, *seconds, told)]
    finds = [fields.found]
    if fields.blocks:
        share = replace(piece, first=0)
        rest = count_tokens(share, kind, per_document=False, blocks=fields.blocks, prints=None, check=check)
        entries.append(replace(rest, nbytes=0))  # counted among the others
        finds.append(Found())
    return [_part_of(each, None, its) for each, its in zip(entries, finds, strict=True)]


def _rows_on_gpu(share: Piece, task: _Task) -> _Part:
    """Counts of a share with a row for each document."""
    from tilewright.pipeline.text.gpu.lanes import borrowed_lane
    from tilewright.pipeline.text.gpu.texts import unknown

    kind = _array_kind(task)
    cells = _Cells(kind)
    prints, found = task.prints(share), Found(True)
    nbytes, counting = 0, 0.0
    start = time.perf_counter()
    with borrowed_lane() as lane, turn_to_read(share):
        blocks = _stream(share, task, min(task.block_nbytes, LANE_NBYTES), lane.buffer, prints, found)
        for block in blocks:
            task.check()
            clock = time.perf_counter()
            cells.add(block.first, lane.rows(block, kind), block.edges is None)
            nbytes += block.nbytes
            counting += time.perf_counter() - clock
        counting += lane.waited
    stages = {"read": time.perf_counter() - start - counting, "count": counting}
    return _Part(*cells.all(), nbytes, stages, _rows_of(prints), found, unknown(kind))


def _of_separators(data: np.ndarray, edges: np.ndarray, kind: Kind) -> np.ndarray:
    """The bins, int64, of all tokens in ``data`` that contain a separator, an entry for each token."""
    separators = edges[1:] - 1
    if kind.name == "codepoint":
        return np.full(len(separators), SEPARATOR, np.int64)
    begins = np.unique(np.concatenate([separators - 1, separators]))
    begins = begins[(begins >= 0) & (begins < len(data) - 1)]
    pairs: np.ndarray = data[begins].astype(np.int64) << 8 | data[begins + 1]
    return pairs
