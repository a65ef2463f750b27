"""How the documents of a corpus would be looked at, for duplicates or quality signals: what is read, by whom, in which
memory, and how long that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from tilewright.kernels.numbers import counted, format_nbytes
from tilewright.pipeline.cluster.here.worker import memory_limit
from tilewright.pipeline.forecast.counts import MOST_LISTED, count_forecast
from tilewright.pipeline.forecast.forecast import Forecast
from tilewright.pipeline.forecast.rates import kind_of_count, remembered
from tilewright.pipeline.forecast.workload import Workload
from tilewright.pipeline.plan.inputs import WorkerFacts
from tilewright.pipeline.text.corpus import Corpus
from tilewright.pipeline.text.formats.ways import Way, ways_of
from tilewright.pipeline.text.whole.documents import whole_pieces
from tilewright.pipeline.text.whole.texts import BLOCK_NBYTES, MOST_NBYTES

USUAL = {"duplicates": (4e6, 150e6), "signals": (2e6, 60e6)}
"""Stored bytes a second of one core, at worst and at best, compressed or not."""
TIMES = 16
"""How many times the length of a text a worker takes that looks at it, of prose."""


@dataclass(frozen=True)
class DocumentsPlan:
    """How a corpus would be gone through."""

    work: str
    """``duplicates`` or ``signals``."""
    files: int
    nbytes: int
    """Of all files, as stored."""
    ways: tuple[Way, ...]
    """How they are read; those that would be refused are in none."""
    looked_at: int
    """Files whose first bytes were looked at for that; of the others, names decided."""
    pieces: int
    """A task each, of whole files."""
    piece_nbytes: int
    """Stored bytes of the largest."""
    workers: int
    tasks: int
    """Of all workers at a time."""
    worker_nbytes: int
    """Memory of a worker for documents of a few MiB; a longer one takes `TIMES` its length."""
    worker_limit_nbytes: int | None
    """What its process may take; None: no limit is set."""
    document_nbytes: int
    """Memory of the process that collects, for each document, without its name."""
    driver_limit_nbytes: int
    """What that process may take."""
    reports: bool
    """Whether files that cannot be read are left out; else the first ends the run."""
    refused: tuple[tuple[str, str], ...]
    """Files that could not be read, and why, as far as their first bytes tell."""
    notes: tuple[str, ...]
    """What was passed over when the corpus was listed, and what is read otherwise than it may be meant."""
    forecast: Forecast
    """How long one pass takes, by earlier runs or usual rates."""
    outputs: dict[str, str] = field(default_factory=dict)
    """Where the ``result`` would be written."""

    def to_json(self) -> dict[str, object]:
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return own | {"ways": [asdict(way) for way in self.ways], "forecast": self.forecast.to_json()}

    def __str__(self) -> str:
        fits = self.driver_limit_nbytes // self.document_nbytes
        of = f", of {format_nbytes(self.worker_limit_nbytes)}" if self.worker_limit_nbytes is not None else ""
        memory = (
            f"about {format_nbytes(self.worker_nbytes)} a worker{of}; a document of more than"
            f" {format_nbytes(BLOCK_NBYTES)} takes {TIMES} times its length, and one of more than"
            f" {format_nbytes(MOST_NBYTES)} is not held"
        )
        collected = (
            f"{self.document_nbytes} bytes a document and its name, in this process, of"
            f" {format_nbytes(self.driver_limit_nbytes)}: at most {fits / 1e6:.3g} million documents"
        )
        rows = [
            ("time", self.forecast.time()),
            ("work", self.work),
            ("files", f"{counted(self.files, 'file')}, {format_nbytes(self.nbytes)} as stored"),
            *[
                (
                    "" if place else "reading",
                    f"{counted(way.files, 'file')}, {format_nbytes(way.nbytes)}: {way.what}",
                )
                for place, way in enumerate(self.ways)
            ],
            (
                "pieces",
                f"{counted(self.pieces, 'piece')} of whole files, at most {format_nbytes(self.piece_nbytes)} each",
            ),
            ("workers", f"{self.workers} × CPU, {counted(self.tasks, 'piece')} at a time"),
            ("memory", memory),
            ("collected", collected),
            (
                "written",
                ", ".join(f"the {name} to {place}" for name, place in self.outputs.items()) or "nothing",
            ),
            *[("note", note) for note in self.notes],
            *[
                ("" if place else "refused", f"{name}: {why}")
                for place, (name, why) in enumerate(self.refused[:MOST_LISTED])
            ],
            *(
                [("", f"and {counted(len(self.refused) - MOST_LISTED, 'other')}")]
                if len(self.refused) > MOST_LISTED
                else []
            ),
            ("verdict", self._verdict()),
        ]
        return "\n".join(f"{name:<16}{text}" for name, text in rows)

    def _verdict(self) -> str:
        limit = self.worker_limit_nbytes
        said = "it fits the memory, but for long or many documents, as said above"
        if limit is not None and self.worker_nbytes > limit:
            said = "it may not fit the workers' memory; give them fewer threads"
        if self.refused:
            said += f"; {counted(len(self.refused), 'file')} would"
            said += (
                " be left out"
                if self.reports
                else " end it: name them by --exclude, or say --on-error report"
            )
        return said


def kind_of_documents(work: str, corpus: Corpus, workers: int) -> str:
    """What runs have in common whose times are compared."""
    plain = all(document.codec is None for document in corpus.documents)
    return kind_of_count(work, "CPU", workers, per_document=True, plain=plain)


def plan_documents(
    work: str,
    corpus: Corpus,
    workers: Sequence[WorkerFacts],
    *,
    document_nbytes: int,
    on_error: str = "stop",
) -> DocumentsPlan:
    """The plan that a run would follow. Of the corpus only first bytes are read. document_nbytes: what the process
    holds of each document."""
    pieces = whole_pieces(corpus, workers)
    ways = ways_of(corpus.documents, corpus.reading)
    tasks = sum(worker.threads for worker in workers)
    limits = [worker.host_limit_nbytes for worker in workers if worker.host_limit_nbytes is not None]
    load = Workload.of_count(corpus.nbytes, len(pieces), len(workers), on_host=True, disk_nbytes=0)
    earlier = remembered(kind_of_documents(work, corpus, len(workers)))
    at_once = max(1, min(len(pieces), tasks))
    return DocumentsPlan(
        work=work,
        files=len(corpus.documents),
        nbytes=corpus.nbytes,
        ways=ways.ways,
        looked_at=ways.looked_at,
        pieces=len(pieces),
        piece_nbytes=max((piece.nbytes for piece in pieces), default=0),
        workers=len(workers),
        tasks=tasks,
        worker_nbytes=TIMES * BLOCK_NBYTES * max(worker.threads for worker in workers),
        worker_limit_nbytes=min(limits, default=None),
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
