"""What workers are told to multiply, and what they report for each tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from tilewright.kernels.numbers import ceil_div
from tilewright.kernels.passes.contents import NOTHING, UNSOUGHT, Contents, Sought
from tilewright.pipeline.events import Span
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.plan.transform import NOT_FUSED, Fused

if TYPE_CHECKING:
    import zarr

    from tilewright.pipeline.store.region import StoredArray

STAGES = ("read", "upload", "compute", "download", "write")
THREADS = {"load": ("read", "upload"), "compute": ("compute",), "write": ("download", "write")}
"""The threads that a tile passes through, and the stages whose time each of them counts."""

IN_LOOPS_NBYTES = 1 << 30
"""What a worker's process has moved to and from its GPU before compiled loops do it. Python moves so much in a tenth of
a second more (20 GB/s in place of 46, and 13 in place of 20, on 16 cores); loading the loops takes a third of a second,
and compiling them, where they are not kept on disk yet, two to four more."""


@dataclass(frozen=True)
class Found:
    """What was found in A, B and C while tiles were computed.

    A tile of the first column of tiles looks at its panels of A, one of the first row at its panels of B: together the
    tiles of a plan look at every element once, however often it is read.
    """

    a: Contents = NOTHING
    b: Contents = NOTHING
    c: Contents = NOTHING

    def merged(self, other: Found) -> Found:
        return Found(self.a.merged(other.a), self.b.merged(other.b), self.c.merged(other.c))


NOTHING_FOUND = Found()


@dataclass(frozen=True)
class Product:
    """What to multiply and how; the same for every tile, so one engine serves them all."""

    a: StoredArray
    b: StoredArray
    c: zarr.Array[Any]
    plan: MatmulPlan
    device: str
    """``cuda`` or ``cpu``: decided before the first task, never by one."""
    precision: str
    run: str
    """The name of the run, unique among all that a worker may serve."""
    drafts: str | None = None
    """The run's folder of unfinished chunks below C, as in ``Output.drafts``."""
    neighbours: int = 1
    """Of GPUs: workers on the host that has most of them."""
    sharing: frozenset[str] = frozenset()
    """Addresses of workers that may copy panels from each other, where they are on one host."""
    look: tuple[Sought, Sought, Sought] = (UNSOUGHT, UNSOUGHT, UNSOUGHT)
    """What is looked for in A, in B and in C."""
    fused: Fused = NOT_FUSED
    before: zarr.Array[Any] | None = None
    """What C held, where the epilogue adds that."""
    counts: zarr.Array[Any] | None = None
    """Where the numbers of pairs of C's elements go, in int64 and C's chunks; None where they are not stored."""
    counts_drafts: str | None = None
    """As ``drafts``, below that."""

    @property
    def moved_nbytes(self) -> int:
        """What each worker reads and writes, about."""
        return ceil_div(self.plan.decoded_nbytes + self.plan.write_nbytes, max(1, self.plan.workers))


Corners: TypeAlias = tuple[int, int, int, int]
"""A rectangle of an array as stored: first row, row after the last, first column, column after the last."""


@dataclass(frozen=True)
class PanelContent:
    """What a panel held when it was read."""

    role: str
    """``A`` or ``B``: the input that it was read from. ``A`` for both where C is symmetric."""
    corners: Corners
    """Of the panel, in the array."""
    digest: int
    """Of the corners and hashes of its parts."""
    parts: tuple[tuple[Corners, int], ...] | None = None
    """Each part that was read as one piece, in the array, and its `store.content.content_hash`. None where an earlier
    report of the same worker has told them."""


class StoredObject(NamedTuple):
    """One stored object, as it was written."""

    place: tuple[int, ...]
    """Its indices in the grid of such objects."""
    nbytes: int
    """As stored; 0 where zarr-python stores none, since it would hold only the fill value."""
    checksum: int
    """XXH3, 64 bits, of these bytes."""


NOTHING_CHECKSUM = 0x2D06800538D394C2
"""XXH3 of no bytes."""


@dataclass(frozen=True)
class TileReport:
    """The report of one finished tile, or part of one. Matrix data cross the wire only where k is cut: ``partial``."""

    index: int
    worker: str
    seconds: float
    stages: dict[str, float]
    """Busy seconds of each stage for this tile."""
    kernels: frozenset[str]
    """Names of the kernels that multiplied; empty where there was nothing to add up."""
    read_nbytes: int
    """Bytes of A and B that were read for it, without what the worker already held."""
    shared_nbytes: int = 0
    """Bytes of A and B that were copied for it from other workers' GPUs."""
    partial: np.ndarray | None = None
    """The tile's sums over one part of k, accumulators × rows × columns, where the plan cuts k into parts; else the
    tile is stored. What is above the diagonal of a tile there is not to be used where it has several accumulators."""
    spans: tuple[Span, ...] = ()
    """When threads were busy with the tile: one span for each panel loaded, each panel multiplied, and the write. For a
    worker's first tile there is one more, of the time in which its kernels were made ready."""
    found: Found = NOTHING_FOUND
    """What it holds, and the panels that it looks at."""
    stored: tuple[StoredObject, ...] = ()
    """Its chunks, or shards, as stored; none where the tile is not stored, or not in files."""
    changes: bytes | None = None
    """What was written to its own fork of C's session, as `sessions.changes_in` gives it; None where the tile is in
    C's store already."""
    contents: tuple[PanelContent, ...] = ()
    """What the panels held that it was multiplied from."""
    counts: tuple[StoredObject, ...] = ()
    """Of its numbers of pairs, as ``stored``."""
