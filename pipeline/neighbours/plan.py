"""How neighbours are found: blocks of rows of A, one a task, and panels of rows of B, which each task goes through.

Pure arithmetic, from sides, dtypes, chunks and bytes of memory; nothing here reads files or clocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from tilewright.kernels.neighbours.capacity import LEAST_MUTUAL_ROWS, WORD_NBYTES
from tilewright.kernels.neighbours.order import MetricName
from tilewright.kernels.numbers import ceil_div, counted, format_nbytes
from tilewright.pipeline.errors import PlanError
from tilewright.pipeline.plan.product import CUDA_NBYTES, PROCESS_NBYTES
from tilewright.pipeline.transfer.lane_blocks import LANE_NBYTES

PANEL_NBYTES = 2**26
"""What a panel of B takes at most, with what is made of it: more makes nothing faster."""
LEAST_PANEL = 1024
"""Rows of a panel where memory has room for them: a panel is packed and handed to threads as a whole."""
MOST_BLOCK = 16384
"""Rows of a block, with which a task reads all of B: by then a core multiplies longer than any disk reads."""
LEAST_BLOCK = 512
"""Rows of a block where A has more: fewer would read, convert and pack B for too little work."""
GPU_PANEL_NBYTES, GPU_MOST_BLOCK = 2**30, 2**17
"""The same on a GPU, which is busy with less for too short a time."""
BLOCKS_A_THREAD = 4
"""So many blocks at least, where A has the rows: the last ones end together, and a stopped run loses little."""

INDEX_NBYTES, BITS_NBYTES = 8, 4
PAIR_NBYTES = 24
"""Of a pair: row, column and value."""
COPIES = 3
"""Of a pair while a task sorts and sends those it found."""
LINE_NBYTES = 16
"""Rows begin at multiples of it on a GPU, whose copy engine takes no others; what is filled up with zeros has the same
products and distances."""
LANES = 16
"""Threads that read items which are compared among themselves, and send them to a GPU; by then the bus is as busy as it
can be."""
DEPTH_NBYTES = 2**26
"""What the parts of both panels take where rows are cut, with what is made of them."""


@dataclass(frozen=True)
class Asked:
    """What a plan has to know of the matrices and of what is wanted."""

    m: int
    n: int
    width: int
    """Elements of an item."""
    one: bool
    """Whether B is A."""
    k: int | None
    """None: pairs."""
    density: float
    """Of pairs: the share that is expected to be wanted; 0 for the k nearest."""
    stores: bool
    """Whether what is found is stored, and not only counted."""
    itemsizes: tuple[int, int]
    """Of stored elements of A, and of B."""
    sum_itemsize: int
    value_itemsize: int
    units: tuple[int, int]
    """Items of A, and of B, that are read as one piece."""
    on_gpu: bool = False
    """Whether a GPU compares them: then only one task of a worker does at a time, in the GPU's memory."""
    mutual_nbytes: int = 0
    """What a GPU needs beside the items to compare them among themselves, each pair once; 0 where it does not."""
    whole: bool = False
    """Whether items are read whole before they are sent to it: those whose cosines may have to be scaled."""
    kept: int = 0
    """Words of an item that the comparison of a band finds."""


LEAST_BAND = 2 * LEAST_MUTUAL_ROWS
"""Items for each band at least: with fewer one worker is done as soon."""
BAND_UNIT = 256
"""Bands begin at multiples of it: a GPU begins with a whole tile."""
HALVINGS = 60
"""Until it is known what each band takes, to a double's last bits."""
ITEM_PAIRS = 45_000
"""To read an item, bring it to a GPU and compare it with a sample takes as long as to compare it with so many, of any
length: on an H100 with its host's cores 0.1 µs for 384 float16, and 2.2 ps for each pair."""


@dataclass(frozen=True)
class Otherwise:
    """How items of one matrix are compared with all where each pair is not computed once after all: too many of them
    are equally near, no tensor core takes them, or a part of them was found by an earlier run."""

    block_rows: int
    """Items of A that a task takes."""
    panel_rows: int
    """Items of B that it reads at a time."""
    holds_b: bool
    """Whether each worker keeps B in memory once it has read it."""
    task_nbytes: int
    """Memory of a task."""
    held_nbytes: int
    """Of B, where it is kept."""


@dataclass(frozen=True)
class NeighbourPlan:
    """How neighbours, or pairs, are found."""

    m: int
    """Items of A."""
    n: int
    """Items of B."""
    width: int
    """Elements of an item."""
    metric: MetricName
    dtype: str
    """Of sums."""
    k: int | None
    """Neighbours of each item; None: pairs."""
    expected_pairs: int | None
    """By a sample; None where neighbours are looked for."""
    block_rows: int
    """Items of A that a task takes."""
    panel_rows: int
    """Items of B that it reads at a time."""
    depth: int
    """Elements of an item that are read at a time: all, unless no two whole items fit."""
    holds_b: bool
    """Whether each worker keeps B in memory once it has read it."""
    tasks: int
    workers: int
    threads: int
    """Tasks of all workers at a time."""
    triangle: bool
    """Whether each pair is computed once, since B is A."""
    read_nbytes: int
    """From files, if each worker has equally many tasks."""
    least_read_nbytes: int
    """Of A and B once."""
    task_nbytes: int
    """Memory of a task."""
    held_nbytes: int
    """Of B, where it is kept."""
    worker_nbytes: int
    """What a worker may take."""
    output_nbytes: int
    """Before compression."""
    on_host: bool = True
    """Whether CPUs compare them."""
    items_dtype: str = "float32"
    """Of A, as it is stored."""
    host_peak_nbytes: int = 0
    """Projected peak of a worker's process: on a CPU all that its tasks take, on a GPU what is read for it and found by
    it, and in either case the process itself."""
    host_limit_nbytes: int | None = None
    """What the process may take; None: nobody says."""
    words_nbytes: int = 0
    """Memory of the process that asks, shared with the workers of its host: what is found of items that are compared
    among themselves, and the neighbours that it says."""
    otherwise: Otherwise | None = None
    """What is done where items are not compared among themselves after all; None where they are not to be."""

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.width // (2 if self.triangle else 1)

    @property
    def sharing(self) -> int:
        """Tasks that are done at once: of a GPU one."""
        return max(1, min(self.tasks, self.threads if self.on_host else self.workers))

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        wanted = "pairs" if self.k is None else f"the {self.k} nearest"
        head = (
            f"{wanted} of {self.m} × {self.n} items of {self.width} elements, {self.metric} in {self.dtype}"
        )
        triangle = ", of which each pair is computed once" if self.triangle else ""
        most = "at most " if self.triangle and self.k is not None and self.tasks > 1 else ""
        blocks = f"{counted(self.tasks, 'block')} of {most}{self.block_rows} items of A{triangle}"
        panels = f"panels of {self.panel_rows} items of B"
        if self.depth < self.width:
            panels += f", {self.depth} elements of each at a time"
        kept = ", kept by each worker" if self.holds_b else ", read anew for each block"
        if self.tasks <= self.workers:
            kept = ""
        lines = [
            head,
            f"{blocks}; {panels}{kept}; {counted(self.workers, 'worker')}",
            f"read {format_nbytes(self.read_nbytes)} (at least {format_nbytes(self.least_read_nbytes)})",
            f"memory of a task {format_nbytes(self.task_nbytes)}"
            + (f", of B {format_nbytes(self.held_nbytes)}" if self.holds_b else "")
            + f", of {format_nbytes(self.worker_nbytes)} a worker",
            f"host memory {format_nbytes(self.host_peak_nbytes)} a worker"
            + (", these included" if self.on_host else "")
            + (f", of {format_nbytes(self.host_limit_nbytes)}" if self.host_limit_nbytes is not None else ""),
            f"output {format_nbytes(self.output_nbytes)}",
        ]
        if self.words_nbytes:
            lines.insert(-1, f"what blocks find {format_nbytes(self.words_nbytes)}, in the process that asks")
        if self.otherwise is not None and self.tasks > 1:  # a single task has all of them at hand
            other = self.otherwise
            lines.insert(
                2,
                f"where too many items are equally near: blocks of {other.block_rows}, panels of {other.panel_rows},"
                f" memory of a task {format_nbytes(other.task_nbytes)}"
                + (f", of B {format_nbytes(other.held_nbytes)}" if other.holds_b else ""),
            )
        if self.expected_pairs is not None:
            lines[-1] += f"; about {counted(self.expected_pairs, 'pair')}, by a sample"
        return "\n".join(lines)


def plan_neighbours(
    asked: Asked,
    *,
    metric: MetricName,
    dtype: str,
    workers: int,
    threads: int,
    worker_nbytes: int,
    items_dtype: str = "float32",
    host_limit_nbytes: int | None = None,
) -> NeighbourPlan:
    """The plan for workers with so many bytes each; threads: tasks that one runs at a time. host_limit_nbytes: what
    their processes may take.

    Raises PlanError where not even one item of A and one of B, in parts, fit.
    """
    other: NeighbourPlan | None = None
    item_a, item_b = asked.itemsizes
    # As it is stored, as numbers of the sums, and packed.
    a_nbytes = asked.width * (item_a + 2 * asked.sum_itemsize)
    # One panel is read while another is multiplied.
    b_nbytes = asked.width * (2 * item_b + 2 * asked.sum_itemsize)
    found_nbytes = _found_nbytes(asked)
    stored_b = asked.n * asked.width * item_b
    holds = stored_b <= worker_nbytes // 2
    at_once = 1 if asked.on_gpu else threads
    panel_nbytes, most_block = (
        (GPU_PANEL_NBYTES, GPU_MOST_BLOCK) if asked.on_gpu else (PANEL_NBYTES, MOST_BLOCK)
    )
    share = (worker_nbytes - (stored_b if holds else 0)) // at_once
    depth = asked.width
    panel = min(asked.n, max(LEAST_PANEL, panel_nbytes // max(1, b_nbytes)))
    panel = max(1, min(panel, share // 3 // max(1, b_nbytes)))
    most = (share - panel * b_nbytes) // max(1, a_nbytes + found_nbytes)
    # Each worker compares a band of items with all before them, in one task: of each pair both items' lists change.
    mutual = (
        asked.mutual_nbytes > 0 and asked.m * (a_nbytes + found_nbytes) + asked.mutual_nbytes <= worker_nbytes
    )
    if mutual:
        bands = bands_of(asked.m, workers)
        other = plan_neighbours(
            replace(asked, mutual_nbytes=0),
            metric=metric,
            dtype=dtype,
            workers=workers,
            threads=threads,
            worker_nbytes=worker_nbytes,
        )
        holds, block, panel = False, max(stop - first for first, stop in bands), asked.n
    elif most < min(asked.m, LEAST_BLOCK // 8) and asked.width > 1:
        holds, share = False, worker_nbytes // at_once
        panel, most, depth = _cut_rows(asked, share, found_nbytes, a_nbytes + b_nbytes)
        block = min(most, max(1, asked.m))
    else:
        wanted = max(LEAST_BLOCK, min(most_block, ceil_div(asked.m, BLOCKS_A_THREAD * workers * at_once)))
        block = max(1, min(most, wanted, max(1, asked.m)))
    if block < asked.m and not mutual:
        block = _aligned(block, asked.units[0])
    panel = _aligned(panel, asked.units[1]) if panel < asked.n else max(1, panel)
    tasks = len(bands) if mutual else ceil_div(asked.m, block)
    triangle = mutual or (asked.one and asked.k is None)
    stored_a = asked.m * asked.width * item_a
    if depth < asked.width:
        read = stored_b * tasks + stored_a * ceil_div(asked.n, panel)
    elif mutual:
        read = sum(stop for _, stop in bands) * asked.width * item_a
    elif holds:
        read = stored_a + stored_b * min(workers, tasks)
    else:
        read = stored_a + stored_b * tasks
    if triangle and not mutual:
        read = (read + stored_a) // 2 if not holds else read
    task_nbytes = (
        asked.mutual_nbytes + asked.m * (a_nbytes + found_nbytes)
        if mutual
        else (
            depth
            * (block * (item_a + 2 * asked.sum_itemsize) + panel * (2 * item_b + 2 * asked.sum_itemsize))
            + block * found_nbytes
            + (block * panel * asked.sum_itemsize if depth < asked.width else 0)
        )
    )
    held = stored_b if holds else 0
    at_a_time = min(threads, ceil_div(tasks, workers)) if tasks else 0
    host = PROCESS_NBYTES + (
        CUDA_NBYTES + (_beside_bands(asked) if mutual else _beside_gpu(asked, block, panel, at_a_time))
        if asked.on_gpu
        else at_a_time * task_nbytes + held
    )
    if other is not None:
        host = max(host, other.host_peak_nbytes)
    pairs = None if asked.k is not None else round(asked.density * _all_pairs(asked))
    entries = asked.m * (asked.k or 0) * (INDEX_NBYTES + asked.value_itemsize)
    if pairs is not None:
        entries = pairs * (2 * INDEX_NBYTES + asked.value_itemsize)
    return NeighbourPlan(
        m=asked.m,
        n=asked.n,
        width=asked.width,
        metric=metric,
        dtype=dtype,
        k=asked.k,
        expected_pairs=pairs,
        block_rows=block,
        panel_rows=panel,
        depth=depth,
        holds_b=holds,
        tasks=tasks,
        workers=workers,
        threads=workers * threads,
        triangle=triangle,
        read_nbytes=read,
        least_read_nbytes=stored_a if asked.one else stored_a + stored_b,
        task_nbytes=task_nbytes,
        held_nbytes=held,
        worker_nbytes=worker_nbytes,
        output_nbytes=entries if asked.stores else 0,
        on_host=not asked.on_gpu,
        items_dtype=items_dtype,
        host_peak_nbytes=host,
        host_limit_nbytes=host_limit_nbytes,
        words_nbytes=_words_nbytes(asked, [stop for _, stop in bands]) if mutual else 0,
        otherwise=(
            None
            if other is None
            else Otherwise(
                other.block_rows, other.panel_rows, other.holds_b, other.task_nbytes, other.held_nbytes
            )
        ),
    )


def bands_of(items: int, workers: int) -> list[tuple[int, int]]:
    """A band of items for each worker, or fewer, of which each is compared with all before them: so that all take
    equally long, and none is so short that it does not pay. They begin within stored pieces, too: each worker reads all
    that is before its band in any case.

    >>> bands_of(1_000_000, 2)
    [(0, 716032), (716032, 1000000)]
    >>> bands_of(40_000, 8)
    [(0, 40000)]
    """
    count = max(1, min(workers, items // LEAST_BAND))

    def stops(pairs: float) -> list[float]:
        # Where first to stop is the cost of stop² / 2 - first² / 2 pairs and of the items up to stop.
        found = [0.0]
        for _ in range(count):
            found.append(math.sqrt(ITEM_PAIRS**2 + 2 * pairs + found[-1] ** 2) - ITEM_PAIRS)
        return found

    low, high = 0.0, items * (items / 2 + ITEM_PAIRS)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if stops(middle)[-1] < items else (low, middle)
    edges = [int(stop) // BAND_UNIT * BAND_UNIT for stop in stops(high)[:-1]] + [items]
    return [(first, stop) for first, stop in itertools.pairwise(edges) if first < stop]


def spare_elements(width: int, itemsize: int) -> int:
    """Elements of 0 that an item of so many gets on a GPU.

    >>> spare_elements(384, 2), spare_elements(385, 2)
    (0, 7)
    """
    return -width % max(1, LINE_NBYTES // itemsize)


def _all_pairs(asked: Asked) -> int:
    return asked.m * (asked.m - 1) // 2 if asked.one else asked.m * asked.n


def _beside_gpu(asked: Asked, block: int, panel: int, tasks: int) -> int:
    """Bytes of host memory that so many tasks of a worker with a GPU take: each has read its block and what it finds,
    one at a time has a copy of that, in lines, on its way to the GPU, and of two panels, of which one is read ahead."""
    item_a, item_b = (asked.width * itemsize for itemsize in asked.itemsizes)
    reading = tasks * block * (item_a + _found_nbytes(asked))
    return reading + block * (item_a + LINE_NBYTES) + 2 * panel * (2 * item_b + LINE_NBYTES)


def _beside_bands(asked: Asked) -> int:
    """Bytes of host memory that the task of a worker takes whose GPU compares items among themselves: it has all of
    them, for the check, and what it finds, and sends them through lanes, or as a copy in lines."""
    item_a = asked.width * asked.itemsizes[0]
    sent = asked.m * (item_a + LINE_NBYTES) if asked.whole else LANES * LANE_NBYTES
    return asked.m * (item_a + _found_nbytes(asked)) + sent


def _words_nbytes(asked: Asked, stops: Sequence[int]) -> int:
    """Bytes of the process that asks: the words of all bands, and of each item the columns, the bits and the values of
    its neighbours."""
    assert asked.k is not None
    words = sum(stops) * asked.kept * WORD_NBYTES
    return words + asked.m * asked.k * (INDEX_NBYTES + BITS_NBYTES + asked.value_itemsize)


def _found_nbytes(asked: Asked) -> int:
    """What a task keeps of each item of A: heaps and their sorted copy, or the pairs that are expected."""
    if asked.k is not None:
        return 2 * asked.k * (INDEX_NBYTES + max(asked.value_itemsize, asked.sum_itemsize))
    return int(asked.density * asked.n * PAIR_NBYTES * COPIES) + 1 if asked.stores else 1


def _cut_rows(asked: Asked, share: int, found_nbytes: int, least_nbytes: int) -> tuple[int, int, int]:
    """Items of a panel and of a block whose sums fit into half the memory, and elements of each that are read at a
    time into a quarter. Raises PlanError."""
    sums = share // 2 // asked.sum_itemsize
    block = max(1, min(asked.m, int(sums**0.5)))
    panel = max(1, min(asked.n, sums // block))
    block = max(1, min(asked.m, sums // panel, share // 4 // max(1, found_nbytes)))
    element = (block * (asked.itemsizes[0] + 2 * asked.sum_itemsize)) + panel * (
        2 * asked.itemsizes[1] + 2 * asked.sum_itemsize
    )
    depth = min(share // 4, DEPTH_NBYTES) // element
    if depth < 1:
        raise PlanError(
            f"a task may take {format_nbytes(share)}, which does not hold one item of A and one of B with what is made"
            f" of them ({format_nbytes(least_nbytes)}), nor a part of {block} and {panel}; give workers more memory"
            " (--device-memory, device_memory), or let each run fewer tasks (threads_per_worker, in a profile)"
        )
    return panel, block, min(depth, asked.width)


def _aligned(length: int, unit: int) -> int:
    """Whole pieces that are stored, where it holds one."""
    return length // unit * unit or length
