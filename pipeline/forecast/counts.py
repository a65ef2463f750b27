"""How a corpus would be counted: what it consists of, how it is shared out, and what memory that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tilewright.kernels.histograms.token_kinds import TABLE_NBYTES, TokenKind
from tilewright.kernels.histograms.tokens import Kind
from tilewright.kernels.numbers import ceil_div, counted, format_nbytes
from tilewright.pipeline.cluster.here.worker import memory_limit
from tilewright.pipeline.forecast.corpus import CorpusPlan, table
from tilewright.pipeline.forecast.forecast import (
    LONG_RUN_SECONDS,
    MOST_START_SECONDS,
    Forecast,
    disk_at,
    forecast_of,
    is_far,
)
from tilewright.pipeline.forecast.rates import Rates, remembered
from tilewright.pipeline.forecast.workload import Workload
from tilewright.pipeline.plan.inputs import WorkerFacts
from tilewright.pipeline.records import Record
from tilewright.pipeline.store.remote.files import is_url, without_local_protocol
from tilewright.pipeline.text.blocks import EXTRA_NBYTES
from tilewright.pipeline.text.corpus import Corpus
from tilewright.pipeline.text.counting import Division, divided, kind_of_corpus
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.formats.ways import ways_of
from tilewright.pipeline.text.gpu.room import fields_nbytes, may_be_fields, whole_nbytes, words_nbytes
from tilewright.pipeline.text.pieces import MOST_BLOCK_NBYTES, rows_of_a_block
from tilewright.pipeline.text.totals import most_nbytes
from tilewright.pipeline.transfer.lane_blocks import LANE_NBYTES


@dataclass(frozen=True, kw_only=True)
class CountPlan(CorpusPlan):
    """How a corpus would be counted."""

    by: str
    per_document: bool
    left_nbytes: int
    """Stored bytes of all pieces that are left to count."""
    kept: int
    """Pieces of earlier runs that count."""
    compared: int
    """Pieces of earlier runs, among those left, that count if their files hold what they did."""
    device: str
    """The GPU's name, or ``CPU``."""
    threads: int
    """Of one worker that read, or decompress, for all its tasks together."""
    gpu_nbytes: int
    """Memory of a worker's GPU for texts, rows of documents, and chunks of lines, that lie there at a time, and tables
    of tokens; 0 where cores count."""
    counts_nbytes: int
    """Memory of the process that adds up, at most; what is more goes to files in Dask's ``temporary-directory``."""
    counts_known: bool
    """Whether it is that, and not only at most."""
    forecast: Forecast | None = None
    """How long it takes, by earlier runs, and how much disk."""

    def to_json(self) -> dict[str, object]:
        return super().to_json() | {"forecast": None if self.forecast is None else self.forecast.to_json()}

    def written_to(self, outputs: dict[str, str]) -> CountPlan:
        """The same, once it is known where what is counted goes."""
        counts = outputs.get("counts")
        path = None if counts is None or is_url(counts) else Path(without_local_protocol(counts))
        forecast = self.forecast
        if forecast is not None and path is not None:
            forecast = replace(forecast, disk_nbytes=self.counts_nbytes, disk=disk_at(path))
        return replace(self, outputs=outputs, forecast=forecast)

    def __str__(self) -> str:
        return table(
            [
                *([] if self.forecast is None else [("time", self.forecast.time())]),
                ("count", f"{self.by}{', a row for each document' if self.per_document else ''}"),
                self._files(),
                *self._reading(),
                ("pieces", self._pieces()),
                ("workers", self._workers()),
                ("memory", self._memory()),
                ("counts", self._counts()),
                self._written(
                    {"counts": "counts to", "plot": "plot to", "pieces": "finished pieces kept in"}
                ),
                *([("disk", f"at most {disk}")] if (disk := self._disk()) else []),
                *self._notes(),
                *self._refused(),
                self._verdict(
                    "it fits the memory",
                    "it may not fit the workers' memory; let them take smaller pieces (tilewright.piece-nbytes), or"
                    " decompress on fewer threads (tilewright.decompress-threads)",
                ),
            ]
        )

    def _pieces(self) -> str:
        said = f"{counted(self.pieces, 'piece')} to count, {format_nbytes(self.left_nbytes)}"
        if self.pieces > 1:
            said += f", at most {format_nbytes(self.piece_nbytes)} each"
        if self.kept:
            said += f"; {counted(self.kept, 'piece')} of earlier runs not again"
        if self.compared:
            said += f"; {counted(self.compared, 'piece')} compared with what was counted"
        return said

    def _workers(self) -> str:
        return (
            f"{self.workers} × {self.device}, {counted(self.tasks, 'piece')} at a time,"
            f" {counted(self.threads, 'thread')} a worker that read"
        )

    def _memory(self) -> str:
        more = "" if self.counts_known else ", and what the different tokens take"
        gpu = f"; {format_nbytes(self.gpu_nbytes)} of its GPU's" if self.gpu_nbytes else ""
        return f"about {format_nbytes(self.worker_nbytes)} a worker for texts{more}{self._of_limit()}{gpu}"

    def _counts(self) -> str:
        most = "" if self.counts_known else "at most "
        more = "" if self.counts_known else "; what is more goes to files"
        within = ", and as much for each document within a file" if self.per_document else ""
        if not self.counts_known:
            within = ""
        return (
            f"{most}{format_nbytes(self.counts_nbytes)} in the process that adds up, of"
            f" {format_nbytes(self.driver_limit_nbytes)}{within}{more}"
        )

    def _disk(self) -> str:
        """Of counts that are written, where it is known how many there may be."""
        known = self.forecast is not None and self.forecast.disk is not None and self.counts_known
        return self.forecast.disk_words() if known and self.forecast is not None else ""


def plan_count(
    corpus: Corpus,
    kind: Kind | TokenKind,
    workers: Sequence[WorkerFacts],
    *,
    per_document: bool,
    record: Record | None = None,
    on_error: str = "stop",
) -> CountPlan:
    """The plan that `count_corpus` would follow. Of the corpus only first bytes are read. Raises PlanError where the
    counts would not fit this process's memory."""
    rows = len(corpus.documents) if per_document else 1
    bins = kind.bins if isinstance(kind, Kind) else None
    allowed = memory_limit() // 2
    counts, known = most_nbytes(rows, bins, per_document=per_document, allowed=allowed)
    division = divided(corpus, kind, workers, per_document=per_document, record=record)
    pieces = division.work.pieces
    ways = ways_of(corpus.documents, corpus.reading)
    tasks = max(worker.threads for worker in workers)
    limits = [worker.host_limit_nbytes for worker in workers if worker.host_limit_nbytes is not None]
    name = workers[0].name if division.device == "cuda" else "CPU"
    left = sum(piece.nbytes for piece in pieces)
    work = Workload.of_count(left, len(pieces), len(workers), on_host=name == "CPU", disk_nbytes=0)
    earlier = remembered(kind_of_corpus(corpus, kind, name, len(workers), per_document=per_document))
    at_once = max(1, min(len(pieces), sum(worker.threads for worker in workers)))
    forecast = count_forecast(work, earlier, USUAL["bytes" if isinstance(kind, Kind) else "tokens"], at_once)
    return CountPlan(
        forecast=forecast,
        by=kind.name,
        per_document=per_document,
        files=len(corpus.documents),
        nbytes=corpus.nbytes,
        ways=ways.ways,
        looked_at=ways.looked_at,
        pieces=len(pieces),
        piece_nbytes=max((piece.nbytes for piece in pieces), default=0),
        left_nbytes=left,
        kept=len(division.left.done),
        compared=len(division.left.doubtful),
        device=name,
        workers=len(workers),
        tasks=sum(worker.threads for worker in workers),
        threads=max(_readers(division, tasks), 1),
        worker_nbytes=_worker_nbytes(division, tasks, bins if not per_document else None),
        worker_limit_nbytes=min(limits, default=None),
        gpu_nbytes=_gpu_nbytes(division, tasks, corpus.reading, kind, per_document=per_document),
        counts_nbytes=counts,
        counts_known=known,
        driver_limit_nbytes=2 * allowed,
        reports=on_error == "report",
        refused=ways.refused,
        notes=(
            *corpus.notes,
            *corpus.cautions,
            *division.left.notes,
            *([division.note] if division.note else []),
        ),
    )


USUAL = {"bytes": (20e6, 500e6), "tokens": (4e6, 80e6)}
"""Stored bytes a second of one core, at worst and at best, compressed or not: of kinds with bins that are known, and of
words, lines and n-grams. They are for who has no run to go by: hosts, texts and compressors differ by that much."""


def count_forecast(
    work: Workload, earlier: Sequence[Rates], usual: tuple[float, float], at_once: int
) -> Forecast:
    """How long a count takes: by earlier ones that were more than their start, or that were larger and short; else by
    usual rates. usual: such as `USUAL` has. at_once: pieces that are counted at a time."""
    # A short run is mostly compiling and starting, and says nothing of a larger one.
    beyond = [
        rates
        for rates in earlier
        if rates.ratio is None or (_seconds(rates) >= MOST_START_SECONDS and not is_far(work, rates))
    ]
    # Of one that took long the rate is that of a larger count, too, however much larger.
    larger = [
        replace(rates, work=work.operations)
        if rates.ratio is not None and work.operations > (rates.work or 0)
        else rates
        for rates in beyond
    ]
    found = replace(forecast_of(work, larger, None, None), checks=False, alike="what is counted")
    if found.seconds is not None or not work.on_host:
        return found
    slow, fast = usual
    words = (
        f"by usual rates, of {slow / 1e6:g} to {fast / 1e6:g} MB a second of a core, since no run of its"
        f" kind here took {MOST_START_SECONDS:g} s or more, or of far less work {LONG_RUN_SECONDS:g} s; the start of"
        f" the workers comes on top, of a first run up to {MOST_START_SECONDS:g} s"
    )
    return replace(
        found,
        least_seconds=work.operations / fast / at_once,
        most_seconds=work.operations / slow / at_once,
        source="usual",
        words=words,
    )


def _seconds(rates: Rates) -> float:
    return rates.seconds or 0.0


def _readers(division: Division, tasks: int) -> int:
    """Threads of a worker that read at a time: a task's own of plain texts on a CPU, but for those by shares."""
    plain = [piece.is_plain for piece in division.work.pieces]
    by_tasks = division.device == "cpu" and not division.by_shares
    own = tasks if any(plain) and by_tasks else 0
    pooled = [
        threads
        for threads, is_plain in zip(division.threads, plain, strict=True)
        if not (is_plain and by_tasks)
    ]
    return max(own, max(pooled, default=0))


def _worker_nbytes(division: Division, tasks: int, bins: int | None) -> int:
    """Memory of a worker for texts, and counts of known bins. tasks: of a worker at a time.

    A task on a CPU reads a plain piece at once, or each thread its share of one, and keeps its buffer; all else passes
    through a buffer of each thread.
    On a GPU the threads' buffers are pinned, two of a lane each.
    """
    whole = stream = 0
    for piece, threads in zip(division.work.pieces, division.threads, strict=True):
        if division.device == "cpu" and piece.is_plain and piece.is_local:
            if division.by_shares:
                share = ceil_div(piece.nbytes, ceil_div(threads, tasks))
                stream = max(stream, threads * (share + EXTRA_NBYTES))
            else:
                whole = max(whole, piece.nbytes + EXTRA_NBYTES)
        else:
            block = (
                2 * LANE_NBYTES
                if division.device == "cuda"
                else min(division.block_nbytes, MOST_BLOCK_NBYTES)
            )
            stream = max(stream, threads * (block + EXTRA_NBYTES))
    counts = 8 * (bins or 0)
    return tasks * (whole + counts) + stream + (tasks + max(division.threads, default=0)) * counts


def _gpu_nbytes(
    division: Division, tasks: int, reading: Reading, kind: Kind | TokenKind, *, per_document: bool
) -> int:
    """Memory of a worker's GPU. tasks: of a worker at a time.

    Each task's plain text lies there as a whole, if its files are not small ones, chunks of what may be JSON lines of
    which a field is counted, and blocks of what is read otherwise, per document with the rows of one and where its
    documents begin; and for each task that counts tokens a table.
    """
    if division.device != "cuda":
        return 0
    pieces, tables = division.work.pieces, isinstance(kind, TokenKind)
    text = whole_nbytes(
        max((piece.nbytes for piece in pieces if piece.is_plain and piece.is_local), default=0)
    )
    rows = 0
    if per_document and isinstance(kind, Kind):
        documents = rows_of_a_block(kind)
        rows = 8 * (documents * kind.bins + documents + 1)
    blocks = (2 * (LANE_NBYTES + EXTRA_NBYTES) + rows) * max(division.threads, default=0)
    by_field = [
        piece
        for piece in pieces
        if may_be_fields(piece, reading) and not per_document and (not tables or kind.name == "word")
    ]
    chunks = words_nbytes(by_field, tasks) if tables else fields_nbytes(by_field, tasks)
    return blocks + tasks * (text + (TABLE_NBYTES if tables and (text or by_field) else 0)) + chunks
