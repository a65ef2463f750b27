"""What passes through the stages of a worker: the job of a tile, and the pairs of panels that are multiplied for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeAlias

import numpy as np

from tilewright.pipeline.events import Span
from tilewright.pipeline.plan.grid import Tile
from tilewright.pipeline.plan.inputs import Sharers
from tilewright.pipeline.plan.told import (
    NOTHING_FOUND,
    STAGES,
    THREADS,
    Corners,
    Found,
    StoredObject,
    TileReport,
)
from tilewright.pipeline.worker.panels import PanelBuffer, PanelPart, Placed, ReadContent
from tilewright.pipeline.worker.units import Look, Move


@dataclass(frozen=True)
class Clock:
    """When something began."""

    begin: float = field(default_factory=time.time)
    """In seconds since the epoch."""
    start: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class FinishedSlab:
    """Rows of a tile whose last panels are multiplied, or enqueued."""

    rows: slice
    wait: Callable[[], None] | None
    """Waits until they are multiplied; None where nothing is pending."""


@dataclass
class TileJob:
    """One tile, or one part of k of a tile, on its way: what a stage finds out of it is kept here for its report.

    One stage at a time works on it, except that its later panels are loaded while the first ones are multiplied.
    """

    tile: Tile
    part: int
    sharers: Sharers
    done: Future[TileReport] = field(default_factory=Future)
    """The answer to whoever waits for the tile."""
    started: float = field(default_factory=time.perf_counter)
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    """A thread of ``THREADS``, and the begin and end of a time it was busy, in seconds since the epoch."""
    error: BaseException | None = None
    """What failed, in whatever stage: the later ones do nothing more for the tile than give back what it holds."""
    target: Placed | None = None
    """The tile of C on the device, from its first panels until it is stored."""
    look: Look | None = None
    """At what it multiplies, as long as it has a tile."""
    panels: int = 0
    """Panels multiplied so far."""
    kernels: frozenset[str] = frozenset()
    """Names of the kernels that multiplied them."""
    partial: np.ndarray | None = None
    read_nbytes: int = 0
    shared_nbytes: int = 0
    stored: tuple[StoredObject, ...] = ()
    found: Found = NOTHING_FOUND
    changes: bytes | None = None
    contents: list[ReadContent] = field(default_factory=list)
    """Of the panels that it was multiplied from."""
    slabs: SimpleQueue[FinishedSlab | None] | None = None
    """Of a tile that is stored slab by slab: those finished, then None, also where multiplying them has failed."""
    counts: tuple[StoredObject, ...] = ()

    @contextmanager
    def clock(self, store_stage: str, device_stage: str) -> Iterator[list[Move]]:
        """Count the block's time for two stages, in proportion to what its threads spent in each."""
        moves: list[Move] = []
        clock = Clock()
        try:
            yield moves
        finally:
            self.count(store_stage, device_stage, clock, moves)

    def count(self, store_stage: str, device_stage: str, clock: Clock, moves: Sequence[Move] = ()) -> None:
        """The same for the time since the clock was started."""
        seconds = time.perf_counter() - clock.start
        stored, moved = sum(m.store_seconds for m in moves), sum(m.device_seconds for m in moves)
        share = stored / (stored + moved) if stored + moved > 0 else 1.0
        self.busy[store_stage] += share * seconds
        self.busy[device_stage] += (1 - share) * seconds
        thread = next(name for name, stages in THREADS.items() if store_stage in stages)
        self.spans.append((thread, clock.begin, clock.begin + seconds))

    def report(self, worker: str) -> TileReport:
        return TileReport(
            self.tile.index,
            worker,
            time.perf_counter() - self.started,
            dict(self.busy),
            self.kernels,
            self.read_nbytes,
            self.shared_nbytes,
            self.partial,
            tuple(Span(worker, *span) for span in self.spans),
            self.found,
            self.stored,
            self.changes,
            tuple(one.tell() for one in self.contents),
            self.counts,
        )


@dataclass(frozen=True)
class ReadPanel:
    """A panel that was read, or copied from another worker, for a pair of panels."""

    buffer: PanelBuffer
    role: str
    """The input that it is of, as in ``PanelContent``."""
    corners: Corners
    """Of it in the array."""
    parts: tuple[PanelPart, ...]
    """What is hashed of it once it is there; none where its parts were hashed as they were read."""


@dataclass(frozen=True)
class PanelPair:
    """A panel of A and one of B, to be multiplied for a job; on the diagonal of a symmetric C both are the same."""

    job: TileJob
    a: PanelBuffer
    b: PanelBuffer
    read: tuple[ReadPanel, ...] = ()
    """Those of the two that an earlier pair did not leave here."""
    behind: int = 0
    """How many pairs of the job come after this one."""


@dataclass(frozen=True)
class FirstPair:
    """A worker's first panels, which are still being read: what will multiply them can be made ready."""

    pair: PanelPair

    @property
    def job(self) -> TileJob:
        return self.pair.job


@dataclass(frozen=True)
class JobEnd:
    """Behind the last panels of a job."""

    job: TileJob


Loaded: TypeAlias = FirstPair | PanelPair | JobEnd
"""What comes from the load stage: the first pair once more, ahead of all; then pairs, each whole, in the order of k."""
