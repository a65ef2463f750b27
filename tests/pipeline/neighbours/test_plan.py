"""Blocks, panels and memory of a search: arithmetic on sides, against what is counted one by one."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels.neighbours.order import Neighbours
from tilewright.kernels.neighbours.words import neighbours_of_bands
from tilewright.pipeline.errors import PlanError
from tilewright.pipeline.neighbours import plan as neighbours_plan
from tilewright.pipeline.neighbours import tasks
from tilewright.pipeline.neighbours.band_words import BandWords
from tilewright.pipeline.neighbours.plan import (
    BAND_UNIT,
    ITEM_PAIRS,
    LANES,
    LINE_NBYTES,
    Asked,
    NeighbourPlan,
    Otherwise,
    bands_of,
    plan_neighbours,
    spare_elements,
)
from tilewright.pipeline.neighbours.tasks import Work
from tilewright.pipeline.plan.product import CUDA_NBYTES, PROCESS_NBYTES
from tilewright.pipeline.transfer.lane_blocks import LANE_NBYTES

SMALL_NBYTES = 2**20
"""Of what else is made."""
ASKED = Asked(
    m=100_003,
    n=70_001,
    width=384,
    one=False,
    k=10,
    density=0.0,
    stores=True,
    itemsizes=(4, 4),
    sum_itemsize=4,
    value_itemsize=4,
    units=(1009, 1013),
)


def planned(asked: Asked, worker_nbytes: int, workers: int = 2, threads: int = 2) -> NeighbourPlan:
    return plan_neighbours(
        asked, metric="dot", dtype="float32", workers=workers, threads=threads, worker_nbytes=worker_nbytes
    )


@given(
    st.builds(
        replace,
        st.just(ASKED),
        m=st.integers(0, 10**6),
        n=st.integers(1, 10**6),
        width=st.integers(0, 10**6),
        k=st.integers(1, 200),
        units=st.tuples(st.integers(1, 5000), st.integers(1, 5000)),
    ),
    st.integers(10, 36),
    st.integers(1, 4),
)
def test_a_task_takes_no_more_memory_than_it_may(asked: Asked, bits: int, threads: int) -> None:
    try:
        plan = planned(asked, 2**bits, threads=threads)
    except PlanError:
        return
    assert 1 <= plan.block_rows <= max(asked.m, 1)
    assert 1 <= plan.panel_rows <= asked.n
    assert plan.tasks == len(range(0, asked.m, plan.block_rows))
    least = asked.width * 4 * (3 + 4) + asked.k * 24  # type: ignore[operator]
    if plan.depth == plan.width and plan.block_rows > 1:
        assert threads * plan.task_nbytes + plan.held_nbytes <= 2**bits + least
    assert plan.read_nbytes >= plan.least_read_nbytes or plan.tasks == 0


def test_b_is_read_once_by_each_worker_that_can_hold_it() -> None:
    a_nbytes, b_nbytes = 100_003 * 384 * 4, 70_001 * 384 * 4
    held, streamed = planned(ASKED, 2**31), planned(ASKED, 2**27)
    assert held.holds_b
    assert not streamed.holds_b
    assert held.read_nbytes == a_nbytes + 2 * b_nbytes
    assert streamed.read_nbytes == a_nbytes + streamed.tasks * b_nbytes
    assert held.least_read_nbytes == a_nbytes + b_nbytes


def test_items_that_do_not_fit_are_read_in_parts() -> None:
    asked = replace(ASKED, m=300, n=300, width=10**8)
    plan = planned(asked, 2**30)
    assert plan.depth < plan.width
    assert "elements of each at a time" in str(plan)
    assert plan.panel_rows == plan.block_rows == 300  # each number is read once


def test_what_fits_in_no_way_is_refused() -> None:
    with pytest.raises(PlanError, match=r"does not hold one item of A .*--device-memory"):
        planned(replace(ASKED, width=10**6), 100)


def test_pairs_are_expected_by_their_density() -> None:
    pairs = replace(ASKED, k=None, density=0.25, n=1001, m=1001, one=True)
    plan = planned(pairs, 2**30)
    assert plan.expected_pairs == round(0.25 * 1001 * 1000 / 2)
    assert plan.output_nbytes == plan.expected_pairs * 20
    assert plan.triangle
    assert "each pair is computed once" in str(plan)
    assert planned(replace(pairs, stores=False), 2**30).output_nbytes == 0
    # More pairs in a row make blocks smaller.
    dense = replace(pairs, n=10**7, m=10**7, width=2)
    assert planned(dense, 2**31).block_rows < planned(replace(dense, density=0.0), 2**31).block_rows


def test_a_gpu_alone_compares_items_among_themselves_once() -> None:
    asked = replace(ASKED, n=ASKED.m, one=True, on_gpu=True, itemsizes=(2, 2), mutual_nbytes=2**28)
    plan = planned(asked, 2**33, workers=1, threads=1)
    assert plan.triangle
    assert (plan.tasks, plan.block_rows, plan.panel_rows) == (1, asked.m, asked.n)
    assert plan.read_nbytes == plan.least_read_nbytes == asked.m * asked.width * 2
    assert 2**28 < plan.task_nbytes <= plan.worker_nbytes
    # One without the room for all of them goes through them in panels.
    other = planned(asked, 2**29, workers=1, threads=1)
    assert not other.triangle
    assert other.tasks > 1


def test_several_gpus_compare_a_band_each_with_all_items_before_it() -> None:
    asked = replace(ASKED, m=10**6, n=10**6, one=True, on_gpu=True, itemsizes=(2, 2), mutual_nbytes=2**28)
    plan = planned(asked, 2**36, workers=4, threads=1)
    bands = bands_of(plan.m, 4)
    assert plan.triangle
    assert (plan.tasks, plan.block_rows, plan.panel_rows) == (4, bands[0][1], asked.n)
    assert plan.read_nbytes == sum(stop for _, stop in bands) * asked.width * 2
    assert f"4 blocks of at most {bands[0][1]} items of A, of which each pair" in str(plan)


def test_items_that_are_read_whole_are_copied_on_their_way_to_the_gpu() -> None:
    asked = replace(ASKED, n=ASKED.m, one=True, on_gpu=True, mutual_nbytes=2**28)
    asked = replace(asked, m=10**6, n=10**6)
    by_lanes, whole = (
        planned(replace(asked, whole=whole), 2**36, workers=1, threads=1) for whole in (False, True)
    )
    assert by_lanes.triangle
    assert whole.host_peak_nbytes - by_lanes.host_peak_nbytes == (
        asked.m * (asked.width * 4 + LINE_NBYTES) - LANES * LANE_NBYTES
    )


@given(st.integers(1, 2**33), st.integers(1, 64))
def test_bands_hold_all_items_and_take_equally_long(items: int, workers: int) -> None:
    bands = bands_of(items, workers)
    assert 1 <= len(bands) <= workers
    assert [0, *(stop for _, stop in bands)] == [*(first for first, _ in bands), items]
    assert all(first < stop for first, stop in bands)
    assert all(first % BAND_UNIT == 0 for first, _ in bands)
    costs = [(stop * stop - first * first) / 2 + ITEM_PAIRS * stop for first, stop in bands]
    if len(bands) > 1:
        assert max(costs) - min(costs) <= 2 * BAND_UNIT * (items + ITEM_PAIRS)


def test_a_process_holds_what_its_tasks_take_and_itself() -> None:
    """The plan for a GPU said nothing of the memory of its host, of which a job has to ask for some."""
    plan = planned(ASKED, 2**31, threads=3)
    assert plan.holds_b
    assert plan.host_peak_nbytes == PROCESS_NBYTES + 3 * plan.task_nbytes + plan.held_nbytes
    assert "host memory" in str(plan)
    few = planned(replace(ASKED, m=1), 2**31, threads=3)
    assert few.host_peak_nbytes == PROCESS_NBYTES + few.task_nbytes + few.held_nbytes, "it has one task"
    on_gpu = planned(replace(ASKED, on_gpu=True, itemsizes=(2, 4)), 2**31, threads=3)
    block, panel = on_gpu.block_rows, on_gpu.panel_rows
    found = 2 * 10 * (8 + 4)
    assert on_gpu.host_peak_nbytes == (
        PROCESS_NBYTES
        + CUDA_NBYTES
        + 3 * block * (384 * 2 + found)
        + block * (384 * 2 + 16)
        + 2 * panel * (2 * 384 * 4 + 16)
    )
    once = replace(ASKED, n=ASKED.m, one=True, on_gpu=True, mutual_nbytes=2**28)
    mutual = planned(once, 2**33, workers=1, threads=1)
    assert mutual.tasks == 1
    lanes = LANES * LANE_NBYTES
    with_all = planned(replace(once, mutual_nbytes=0), 2**33, workers=1, threads=1).host_peak_nbytes
    among = PROCESS_NBYTES + CUDA_NBYTES + ASKED.m * (384 * 4 + found) + lanes
    assert mutual.host_peak_nbytes == max(among, with_all)


@given(
    st.builds(
        replace,
        st.just(replace(ASKED, one=True, on_gpu=True, mutual_nbytes=2**28, kept=11)),
        m=st.integers(2**15, 10**6),
        width=st.integers(1, 4096),
        k=st.integers(1, 28),
    ),
    st.integers(28, 40),
    st.integers(1, 8),
    st.integers(1, 4),
)
def test_what_is_compared_with_all_after_all_is_planned(
    asked: Asked, bits: int, workers: int, threads: int
) -> None:
    """By the blocks and the panels of a search that compares with all from the beginning, whose memory counts."""
    asked = replace(asked, n=asked.m)
    with_all = replace(asked, mutual_nbytes=0)
    try:
        plan, other = (planned(each, 2**bits, workers, threads) for each in (asked, with_all))
    except PlanError:
        return
    assert other.otherwise is None
    assert not other.words_nbytes
    assert (plan.otherwise is None) == (not plan.triangle)
    if plan.otherwise is None:
        assert plan == other
        return
    assert plan.otherwise == Otherwise(
        other.block_rows, other.panel_rows, other.holds_b, other.task_nbytes, other.held_nbytes
    )
    assert other.depth == other.width
    assert plan.host_peak_nbytes >= other.host_peak_nbytes
    stops = [stop for _, stop in bands_of(plan.m, workers)]
    assert plan.words_nbytes == 8 * 11 * sum(stops) + plan.m * (asked.k or 0) * (8 + 4 + 4)
    assert ("where too many items are equally near: blocks of" in str(plan)) == (plan.tasks > 1)
    assert "in the process that asks" in str(plan)


@pytest.mark.parametrize("shared", [False, True])
def test_the_words_of_bands_take_no_more_than_is_planned(shared: bool, rng: np.random.Generator) -> None:
    """As they are sent, and as they lie in memory that is shared, of which the tests' own does not count."""
    asked = replace(ASKED, m=2**17, n=2**17, one=True, on_gpu=True, mutual_nbytes=1, kept=11)
    plan = planned(asked, 2**33, workers=2, threads=1)
    stops = [stop for _, stop in bands_of(plan.m, 2)]
    assert len(stops) == 2
    bands = [np.sort(rng.integers(1, 2**63, (stop, 11), np.uint64))[:, ::-1].copy() for stop in stops]
    sums = np.dtype(np.float32)
    neighbours_of_bands(bands[0][:9], [9], 10, sums, "dot", 1)  # compiles it
    tracemalloc.start()
    try:
        held = BandWords(stops, 11, shared=shared)
        for band, words in enumerate(bands):
            place = held.place(band)
            target = None if place is None else place.open()
            assert (target is None) == (not shared)
            if target is None:
                held.put(band, words)
            else:
                target[:] = words
        found = neighbours_of_bands(held.words, stops, 10, sums, "dot", 2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.indices) == plan.m
    lying = held.words.nbytes if shared else 0  # which no allocator of Python's knows
    held.close()
    assert plan.words_nbytes // 2 < peak + lying <= plan.words_nbytes + SMALL_NBYTES


@pytest.mark.parametrize("width", [384, 381])
def test_comparing_with_all_takes_no_more_of_the_host_than_is_planned(
    width: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items whose lines are filled up for the GPU, and such whose are not. What is there is not the host's."""

    class Elsewhere:
        def update(self, panel: object, start: int) -> None:
            assert panel is None

        def result(self) -> Neighbours:
            shape = plan.otherwise.block_rows if plan.otherwise is not None else 0, 10
            return Neighbours(np.zeros(shape, np.int64), np.zeros(shape, np.float32))

    def sent(work: Work, items: np.ndarray) -> None:
        spare = spare_elements(items.shape[1], items.dtype.itemsize)
        lines = np.pad(items, ((0, 0), (0, spare))) if spare else np.ascontiguousarray(items)
        assert lines.shape[1] == width + spare

    monkeypatch.setattr(neighbours_plan, "GPU_PANEL_NBYTES", 2**25)
    monkeypatch.setattr(neighbours_plan, "GPU_MOST_BLOCK", 2**12)
    monkeypatch.setattr(neighbours_plan, "LEAST_BAND", 2**13)
    monkeypatch.setattr(tasks, "_placed", sent)
    monkeypatch.setattr(tasks, "_search", lambda *asked: Elsewhere())
    x = rng.random((2**14, width), np.float32)
    store = zarr.storage.MemoryStore()
    array = zarr.create_array(store, data=x, chunks=(2**10, width), compressors=None)
    asked = replace(
        ASKED,
        m=len(x),
        n=len(x),
        width=width,
        one=True,
        on_gpu=True,
        mutual_nbytes=1,
        kept=11,
        units=(2**10, 2**10),
    )
    plan = planned(asked, 2**33, workers=1, threads=1)
    other = plan.otherwise
    assert other is not None
    assert (other.block_rows, other.panel_rows < plan.panel_rows) == (2**12, True)
    work = Work(
        array, array, True, "rows", "dot", 10, None, False, False, True, "full", other.panel_rows, width, False,
        "cuda", 1, "topk-1",
    )  # fmt: skip
    tasks.find_in_block(work, 0, 9)  # whatever is made once
    tracemalloc.start()
    try:
        tasks.find_in_block(work, 0, other.block_rows)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    planned_nbytes = neighbours_plan._beside_gpu(asked, other.block_rows, other.panel_rows, 1)
    assert (other.block_rows + other.panel_rows) * width * 4 < peak <= planned_nbytes
    assert plan.host_peak_nbytes >= PROCESS_NBYTES + CUDA_NBYTES + planned_nbytes
