"""How the documents of a corpus would be looked at, for duplicates or quality signals: what is read, by whom, in which
memory, and how long that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright.kernels.numbers import counted, format_nbytes
from tilewright.pipeline.cluster.here.worker import memory_limit
from tilewright.pipeline.duplicates.options import Options
from tilewright.pipeline.duplicates.room import signing_nbytes
from tilewright.pipeline.forecast.corpus import CorpusPlan, table
from tilewright.pipeline.forecast.counts import count_forecast
from tilewright.pipeline.forecast.forecast import Forecast
from tilewright.pipeline.forecast.rates import kind_of_count, remembered
from tilewright.pipeline.forecast.workload import Workload
from tilewright.pipeline.plan.inputs import WorkerFacts, most_neighbours
from tilewright.pipeline.text.corpus import Corpus, Piece
from tilewright.pipeline.text.counting import decompressors_of
from tilewright.pipeline.text.formats.ways import ways_of
from tilewright.pipeline.text.whole.documents import whole_pieces
from tilewright.pipeline.text.whole.texts import BLOCK_NBYTES, LARGE_BLOCK_NBYTES, MOST_NBYTES

USUAL = {"duplicates": (4e6, 150e6), "signals": (2e6, 60e6)}
"""Stored bytes a second of one core, at worst and at best, compressed or not."""
TIMES = 16
"""How many times the length of a text a worker takes that looks at it, of prose."""


@dataclass(frozen=True, kw_only=True)
class DocumentsPlan(CorpusPlan):
    """How the documents of a corpus would be looked at; a piece is of whole files. A document of more than a few MiB
    takes a worker `TIMES` its length."""

    work: str
    """``duplicates`` or ``signals``."""
    device: str
    """The name of the GPU, or ``CPU``."""
    gpu_nbytes: int
    """Memory of a worker's GPU for documents that are signed at a time, but for those of more than 16 MiB, at most; 0
    where cores sign them."""
    document_nbytes: int
    """Memory of the process that collects, for each document, without its name."""
    forecast: Forecast
    """How long one pass takes, by earlier runs or usual rates."""

    def to_json(self) -> dict[str, object]:
        return super().to_json() | {"forecast": self.forecast.to_json()}

    def __str__(self) -> str:
        fits = self.driver_limit_nbytes // self.document_nbytes
        pieces = counted(self.pieces, "piece")
        memory = (
            f"about {format_nbytes(self.worker_nbytes)} a worker{self._of_limit()}; a document of more than"
            f" {format_nbytes(BLOCK_NBYTES)} takes {TIMES} times its length, and one of more than"
            f" {format_nbytes(MOST_NBYTES)} is not held"
        )
        if self.gpu_nbytes:
            memory += (
                f"; at most {format_nbytes(self.gpu_nbytes)} of its GPU's, but for documents of more than"
                f" {format_nbytes(LARGE_BLOCK_NBYTES)}: those for which it has no room the cores sign"
            )
        collected = (
            f"{self.document_nbytes} bytes a document and its name, in this process, of"
            f" {format_nbytes(self.driver_limit_nbytes)}: at most {fits / 1e6:.3g} million documents"
        )
        return table(
            [
                ("time", self.forecast.time()),
                ("work", self.work),
                self._files(),
                *self._reading(),
                ("pieces", f"{pieces} of whole files, at most {format_nbytes(self.piece_nbytes)} each"),
                ("workers", f"{self.workers} × {self.device}, {counted(self.tasks, 'piece')} at a time"),
                ("memory", memory),
                ("collected", collected),
                self._written({"result": "the result to"}),
                *self._notes(),
                *self._refused(),
                self._verdict(
                    "it fits the memory, but for long or many documents, as said above",
                    "it may not fit the workers' memory; give them fewer threads",
                ),
            ]
        )


def kind_of_documents(work: str, corpus: Corpus, workers: Sequence[WorkerFacts]) -> str:
    """What runs have in common whose times are compared."""
    plain = all(document.codec is None for document in corpus.documents)
    return kind_of_count(work, _device(workers), len(workers), per_document=True, plain=plain)


def _device(workers: Sequence[WorkerFacts]) -> str:
    return workers[0].name if workers[0].device == "cuda" else "CPU"


def plan_documents(
    work: str,
    corpus: Corpus,
    workers: Sequence[WorkerFacts],
    *,
    document_nbytes: int,
    options: Options | None = None,
    on_error: str = "stop",
) -> DocumentsPlan:
    """The plan that a run would follow. Of the corpus only first bytes are read. document_nbytes: what the process
    holds of each document. options: how documents are signed, if they are."""
    pieces = whole_pieces(corpus, workers)
    ways = ways_of(corpus.documents, corpus.reading)
    tasks = sum(worker.threads for worker in workers)
    limits = [worker.host_limit_nbytes for worker in workers if worker.host_limit_nbytes is not None]
    load = Workload.of_count(
        corpus.nbytes, len(pieces), len(workers), on_host=workers[0].device != "cuda", disk_nbytes=0
    )
    earlier = remembered(kind_of_documents(work, corpus, workers))
    at_once = max(1, min(len(pieces), tasks))
    return DocumentsPlan(
        work=work,
        device=_device(workers),
        files=len(corpus.documents),
        nbytes=corpus.nbytes,
        ways=ways.ways,
        looked_at=ways.looked_at,
        pieces=len(pieces),
        piece_nbytes=max((piece.nbytes for piece in pieces), default=0),
        workers=len(workers),
        tasks=tasks,
        worker_nbytes=_worker_nbytes(workers),
        worker_limit_nbytes=min(limits, default=None),
        gpu_nbytes=0 if options is None else _gpu_nbytes(pieces, corpus, options, workers),
        document_nbytes=document_nbytes,
        driver_limit_nbytes=memory_limit(),
        reports=on_error == "report",
        refused=ways.refused,
        notes=(*corpus.notes, *corpus.cautions),
        forecast=replace(
            count_forecast(load, earlier, USUAL[work], at_once),
            alike=f"{work} of as plain or compressed files",
        ),
    )


def _gpu_nbytes(
    pieces: Sequence[Piece], corpus: Corpus, options: Options, workers: Sequence[WorkerFacts]
) -> int:
    if workers[0].device != "cuda":
        return 0
    threads = decompressors_of(workers, most_neighbours(worker.address for worker in workers))
    tasks = max(worker.threads for worker in workers)
    return signing_nbytes(pieces, corpus.reading, options, threads=threads, tasks=tasks)


def _worker_nbytes(workers: Sequence[WorkerFacts]) -> int:
    """What a worker holds of short documents at a time: on a GPU's, for each thread that reads two blocks, and what
    they are read from."""
    if workers[0].device == "cuda":
        neighbours = most_neighbours(worker.address for worker in workers)
        return 3 * LARGE_BLOCK_NBYTES * decompressors_of(workers, neighbours)
    return TIMES * BLOCK_NBYTES * max(worker.threads for worker in workers)
