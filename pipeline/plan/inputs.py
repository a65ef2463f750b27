"""What a plan and its placement are made from (stored matrices; what workers have, and which share a host) and what it
decides (a geometry)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tilewright.kernels.choices import DeviceKind
from tilewright.kernels.cpu.centred_panel import ELEMENT_NBYTES
from tilewright.kernels.numbers import share_of_cores
from tilewright.pipeline.plan.decoding import DecodingRoom

TILE_BUFFERS = 4
"""The most tiles of C that a GPU holds: one being multiplied, the others being written, so that no thread waits for the
last piece of a tile."""

LEAST_PART_NBYTES = 4096
"""A plain chunk is read in stretches of a row of at least this length: a page, the least a disk delivers."""


@dataclass(frozen=True)
class StoredMatrix:
    """One stored matrix as the planner sees it, with op applied: a transposed operand has its sides swapped."""

    rows: int
    columns: int
    dtype: np.dtype
    unit: tuple[int, int]
    """Rows × columns of what is read or written as one piece: a chunk for reading, a shard for writing."""
    plain: bool = False
    """Whether part of a chunk can be read without the rest, since there is nothing to decode."""
    part: tuple[int, int] | None = None
    """Of a matrix that is in no local files, rows × columns of what a thread reads at once: a chunk, or several of a
    shard."""
    shard: tuple[int, int] | None = None
    """Rows × columns of its shards, where it has some and is in no local files."""

    @property
    def transposed(self) -> StoredMatrix:
        part, shard = (None if sides is None else sides[::-1] for sides in (self.part, self.shard))
        return replace(
            self, rows=self.columns, columns=self.rows, unit=self.unit[::-1], part=part, shard=shard
        )

    def step(self, axis: int) -> int:
        """The shortest stretch along an axis that can be read without waste."""
        side = self.unit[axis]
        while self.plain and side % 2 == 0 and side // 2 * self.dtype.itemsize >= LEAST_PART_NBYTES:
            side //= 2
        return side

    def touched(self, axis: int, stride: int) -> int:
        """Elements read along an axis for consecutive stretches of ``stride``: more than the axis has where stretches
        end inside a piece that is read as a whole, since both neighbours then read it."""
        side, step = (self.rows, self.columns)[axis], self.step(axis)
        if side == 0:
            return 0
        inner = (side - 1) // stride
        cut = inner - (side - 1) // math.lcm(stride, step)
        last = side // step * step  # the last piece is cut short by the matrix
        in_last = inner - last // stride if last < side else 0
        return side + (cut - in_last) * step + in_last * (side - last)

    @property
    def nbytes(self) -> int:
        return self.rows * self.columns * self.dtype.itemsize

    @property
    def unit_nbytes(self) -> int:
        return self.unit[0] * self.unit[1] * self.dtype.itemsize

    @property
    def part_nbytes(self) -> int:
        """Of what a thread reads at once."""
        rows, columns = self.part or self.unit
        return rows * columns * self.dtype.itemsize


NVCOMP_UNKNOWN = "no worker has been asked for it"


@dataclass(frozen=True)
class WorkerFacts:
    """What a plan has to know about a worker."""

    device: DeviceKind
    """``cuda`` or ``cpu``: what ``auto`` means there."""
    name: str
    """The GPU's name, or ``CPU``."""
    device_free_nbytes: int | None
    """Free memory of its GPU; None on a CPU."""
    host_limit_nbytes: int | None
    """The worker's memory limit; None: it has none."""
    cores: int
    """Cores that a product on its CPU uses: OMP_NUM_THREADS where that is set (as Dask does for several processes of a
    host), else all."""
    usable_cores: int = 1
    """Cores that its process may use, regardless of OMP_NUM_THREADS."""
    host_cores: int = 1
    """All cores of its host."""
    address: str = ""
    """Where other workers reach it."""
    pause_nbytes: int | None = None
    """From so many bytes of its process on Dask gives it no more tasks; None: it always does."""
    threads: int = 1
    """Dask's, each of which runs a task."""
    no_nvcomp: str = NVCOMP_UNKNOWN
    """Why nvCOMP cannot decode there; empty: it can."""


@dataclass(frozen=True)
class Sharers:
    """Workers of one host that need the same panels of A, and of B, as a tile does, its own worker included."""

    a: tuple[str, ...] = ()
    b: tuple[str, ...] = ()

    def reached_from(self, worker: str) -> Sharers:
        """These for a worker of the same host; none for a worker of another, to which Dask gave the tile instead."""
        here = all(host_of(other) == host_of(worker) for other in self.a + self.b)
        return self if here else Sharers()


def host_of(address: str) -> str:
    """The part of a worker's address that it shares with other workers of its host."""
    return address.rpartition(":")[0]


def share_of_each(facts: Sequence[WorkerFacts]) -> int:
    """The fewest cores that a worker has as its share of its host, whatever OMP_NUM_THREADS says, which Dask sets to 1;
    one without an address is alone there."""
    hosts = [host_of(fact.address) if fact.address else None for fact in facts]
    neighbours = {**Counter(hosts), None: 1}
    return min(
        share_of_cores(fact.usable_cores, fact.host_cores, neighbours[host])
        for fact, host in zip(facts, hosts, strict=True)
    )


def most_neighbours(addresses: Iterable[str]) -> int:
    """The largest number of these workers on one host; 1 if there are none."""
    return max(Counter(map(host_of, addresses)).values(), default=1)


@dataclass(frozen=True)
class Limits:
    """The limits that a plan has to keep, for each worker."""

    workers: int
    device_nbytes: int
    """Memory for tiles and panels: the GPU's, or the host's where the CPU multiplies."""
    host_nbytes: int | None = None
    """All the host memory that a worker's process may hold; None: unlimited."""
    pause_nbytes: int | None = None
    """From how much on Dask gives the worker no more tasks; None: it always does."""
    on_host: bool = False
    """Whether the CPU multiplies, so that panels need no copy in a second memory."""
    panel_nbytes: int = 2**29
    """Target size of a panel of A and one of B together; for elements wider than four bytes, the same number of
    elements."""
    tile_buffers: int = TILE_BUFFERS
    """The most tiles of C that a worker holds; 1 where it could not write and multiply at once."""
    tiles: int = 16
    """About how many tiles C is cut into, so that one is written while the next is computed, and workers share."""
    read_threads: int = 12
    write_threads: int = 8
    lanes: int | None = None
    """Pinned lanes: how many of these threads can work at once on a GPU; None: all."""
    encoders_nbytes: int = 0
    """Bytes of all write threads' encoders besides pieces of C: tables and windows, by the level of C's codec."""
    check_nbytes: int = 0
    """What the check of C needs in a worker's process, after the product; 0 where C is not checked."""
    workspace_nbytes: Callable[[int, int, int], int] | None = None
    """Workspace bytes the kernel needs to add a panel of this depth into a tile or cell of these rows and columns;
    None: it never needs any."""
    decoding: DecodingRoom | None = None
    """What of the GPU's memory is set aside for decoding; None: nothing is."""
    line_nbytes: int = 1
    """Alignment in memory of the lines of cells, so that a kernel treats all cells alike: `LINE_NBYTES` on a GPU. CPU
    libraries do not depend on addresses."""


@dataclass(frozen=True)
class FusedDtypes:
    """What a plan has to know of what a product does besides multiplying (`transform.Fused`)."""

    sums: np.dtype
    """Of a tile while its panels are summed: where C holds floats and A and B integers, an integer dtype."""
    operands: tuple[np.dtype | None, np.dtype | None] = (None, None)
    """Of the transformed panels of A, and of B; None where they are multiplied as they are stored."""
    before: np.dtype | None = None
    """Of what C held before, where that is added."""
    finished: bool = False
    """Whether the sums have an epilogue."""
    hermitian: bool = False
    """Of a symmetric product: whether A, or B, is conjugated, so that C's mirror image is its conjugate."""
    vectors_nbytes: int = 0
    accumulators: int = 1
    """How many sums a tile is made of (`pairs.py`)."""
    beside_nbytes: int = 0
    """Of an element of what is stored beside C."""
    as_bytes: bool = False
    """Whether panels are packed, and multiplied as bytes (`centred.py`)."""

    def nbytes(self, c_dtype: np.dtype) -> FusedNbytes:
        """What it takes besides panels and tiles, for a C of this dtype."""
        a, b = (0 if dtype is None else dtype.itemsize for dtype in self.operands)
        if self.as_bytes:
            a = b = ELEMENT_NBYTES
        finished = accumulator_dtype(c_dtype).itemsize
        tiles = 0 if finished == self.sums.itemsize else finished
        before = 0 if self.before is None else self.before.itemsize
        both = self.hermitian or self.accumulators > 1
        return FusedNbytes(a, b, tiles, before, both, self.accumulators, self.as_bytes)


class FusedNbytes(NamedTuple):
    """Bytes of an element of each buffer that a worker needs for it: one panel of A and one of B, as they are
    multiplied, and for a tile as it is stored and for what C held in its place. 0: there is no such buffer."""

    a: int = 0
    b: int = 0
    tile: int = 0
    before: int = 0
    both: bool = False
    """Whether a tile on the diagonal of a symmetric C needs one of A and one of B."""
    sums: int = 1
    """Accumulators of a tile."""
    packed: bool = False
    """Whether these panels are packed ones, of which an element takes a little more (`packed_nbytes`)."""


NO_FUSED_NBYTES = FusedNbytes()


class Geometry(NamedTuple):
    """What decides the bytes of every tile of a product, and where each tile lies."""

    tile_rows: int
    tile_columns: int
    panel_depth: int
    k_parts: int
    cell_rows: int
    cell_columns: int
    within: tuple[tuple[int, int], ...] = ()
    """Sides of the larger tiles of earlier runs, from the largest on, that these tiles are cut from: each from its own
    start, so that the last of them may be smaller (`grid.py`)."""


class Recipe(NamedTuple):
    """What decides the bits of sums that are rounded, as far as a plan does: the same whichever tiles consist of the
    same cells."""

    panel_depth: int
    k_parts: int
    cell_rows: int
    cell_columns: int
    on_host: bool
    """Whether the CPU multiplies."""


class Columns(NamedTuple):
    """Adjacent columns of tiles that are read equally often. There may be millions, so none is counted by itself."""

    number: int
    reads: int


def accumulator_dtype(c_dtype: np.dtype) -> np.dtype:
    """The dtype in which a tile's panels are summed: float16 would be rounded again with every panel."""
    return np.dtype(np.float32) if c_dtype == np.float16 else c_dtype
