"""The search for neighbours, or for pairs: open, plan, find block by block, check a sample, store."""

from __future__ import annotations

import shutil
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.kernels.choices import DeviceKind
from tilewright.kernels.cpu.loops import usable_cores
from tilewright.kernels.neighbours.capacity import kept_of, mutual_nbytes
from tilewright.kernels.neighbours.forms import compares_once, finds_on_gpu
from tilewright.kernels.neighbours.order import Bound
from tilewright.kernels.numbers import counted, format_nbytes
from tilewright.pipeline import config
from tilewright.pipeline.cluster.answers import ask_all
from tilewright.pipeline.cluster.here.client import HereClient
from tilewright.pipeline.cluster.here.opening import open_executor
from tilewright.pipeline.cluster.here.worker import memory_limit
from tilewright.pipeline.cluster.watch import workers_held
from tilewright.pipeline.errors import (
    ClusterError,
    DeviceUnavailableError,
    OptionError,
    OutputError,
    OutputExistsError,
    PlanError,
    StoreError,
    VerificationError,
)
from tilewright.pipeline.events import Listener, Notice, Teller, on_waiting
from tilewright.pipeline.forecast.rates import remember_search
from tilewright.pipeline.gram.job import unchanged
from tilewright.pipeline.gram.options import axis_of
from tilewright.pipeline.neighbours.band_words import BandWords
from tilewright.pipeline.neighbours.check import (
    NeighbourCheck,
    Reported,
    check_reported,
    drawn_items,
    reported_in,
)
from tilewright.pipeline.neighbours.early_check import (
    begins_early,
    check_early,
    find_and_sample,
    nearest_of,
)
from tilewright.pipeline.neighbours.estimate import expected_density
from tilewright.pipeline.neighbours.group import KINDS, complete_group, write_arrays
from tilewright.pipeline.neighbours.options import NeighbourRequest, Sides, bound_of, open_sides
from tilewright.pipeline.neighbours.pieces import FOLDER, Piece, Pieces, are_kept, digest_of
from tilewright.pipeline.neighbours.plan import Asked, NeighbourPlan, bands_of, plan_neighbours
from tilewright.pipeline.neighbours.results import PairsRun, TopkRun
from tilewright.pipeline.neighbours.tasks import (
    AFTER_ALL,
    WORDS,
    Candidates,
    Found,
    Work,
    find_in_band,
    find_in_block,
    free_held,
    is_read_whole,
    of_neighbours,
)
from tilewright.pipeline.plan.inputs import WorkerFacts, share_of_each
from tilewright.pipeline.plan.product import BARE_PROCESS_NBYTES, PROCESS_NBYTES
from tilewright.pipeline.product.output import partial_path
from tilewright.pipeline.product.output_group import check_local_place, output_group
from tilewright.pipeline.reduce import reduce_pieces, taken_as_they_arrive
from tilewright.pipeline.store.arrays import name_of
from tilewright.pipeline.store.attributes import codecs_notice, packing_notice
from tilewright.pipeline.store.coordinates import left_behind
from tilewright.pipeline.store.sources.dasks import any_pending
from tilewright.pipeline.worker.survey import survey

if TYPE_CHECKING:
    from distributed import Client

SHARE = 2
"""A worker may take its memory divided by this, where nobody says how much."""
GPU_SHARE = 0.8
"""Of a GPU's free memory."""
LISTS_NBYTES = 2**30
"""What it needs there besides the items: lists of what is near, and products."""
STORED_TIMES = 2
"""How often what is found lies on the disk, while it is put into the output."""
QUICK_SECONDS = 10.0
"""A search that took no longer is not kept before its result is written: both together take longer than to search once
more, should the process be killed just then."""

LIGHTER = "give tasks less memory (--device-memory), or run fewer at once (threads_per_worker, in a profile)"


def topk(request: NeighbourRequest) -> TopkRun:
    """Store the nearest neighbours, as ``tilewright.topk`` says, and raise as it does."""
    searched = _searched(request)
    return TopkRun(**searched.common, incomplete_rows=searched.incomplete)


def pairs(request: NeighbourRequest) -> PairsRun:
    """Store, or count, the pairs, as ``tilewright.pairs`` says, and raise as it does."""
    searched = _searched(request)
    return PairsRun(**searched.common, count=searched.total.count)


def plan_only(request: NeighbourRequest) -> NeighbourPlan:
    """The plan that a search would follow; nothing is written, and of the numbers, for pairs, a sample is read. Raises
    as a search, but for the output, of which a caution tells."""
    request = request.checked()
    sides = open_sides(request)
    tell = Teller(request.listener)
    path = None
    if not request.count_only and request.out is not None:
        try:
            path = _place(request, sides)
        except (StoreError, OutputError, OutputExistsError) as error:
            tell.warn(f"without --plan-only this would be refused: {error}")
    with (
        searching(request, sides, request.work) as client,
        unchanged(client, sides.arrays, "a plan was made") as arrays,
    ):
        prepared = prepare(client, request, replace(sides, arrays=arrays), tell)
        if path is not None:
            try:
                check_room(path, request, prepared.plan)
            except OutputError as error:
                tell.warn(f"without --plan-only this would be refused: {error}")
            digest = digest_of(request, sides, prepared.work.device)
            if request.resume and are_kept(partial_path(path) / FOLDER, digest):
                tell.say("an earlier run left finished blocks, which would not be computed again")
        return prepared.plan


@dataclass
class _Total:
    """What all blocks have found together."""

    count: int = 0
    nan_rows: int = 0
    read_nbytes: int = 0
    resumed: int = 0
    stages: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    """Until the last block was found."""
    candidates: Candidates | None = None
    """Of the items that are drawn for the check, where tasks found some."""
    words: BandWords | None = None
    """Of bands, which are needed no more."""


@dataclass
class _Searched:
    plan: NeighbourPlan
    total: _Total
    common: dict[str, Any]
    incomplete: int


@dataclass(frozen=True)
class _Prepared:
    work: Work
    plan: NeighbourPlan
    device: str
    """Its name."""


@contextmanager
def searching(request: NeighbourRequest, sides: Sides, name: str) -> Iterator[Client]:
    """A client for some work with these sides. name: of the work, for what is said while it waits."""
    graphs = any_pending(sides.arrays.values())
    with (
        open_executor(request.cluster, request.cluster_file, graphs=graphs) as client,
        workers_held(client, waiting=on_waiting(request.listener, name, "ends it")),
    ):
        yield client


def _place(request: NeighbourRequest, sides: Sides) -> Path:
    what = "pairs" if request.k is None else "neighbours"
    return check_local_place(
        request.out, sides.arrays, KINDS[request.work], what, overwrite=request.overwrite
    )


def _searched(request: NeighbourRequest) -> _Searched:
    start = time.perf_counter()
    request = request.checked()
    sides = open_sides(request)
    path = None if request.count_only else _place(request, sides)
    tell = Teller(request.listener)
    total, check, incomplete = _Total(), None, 0
    with ExitStack() as stack:
        client = stack.enter_context(searching(request, sides, request.work))
        arrays = stack.enter_context(unchanged(client, sides.arrays, "neighbours were looked for"))
        sides = replace(sides, arrays=arrays)
        prepared = prepare(client, request, sides, tell)
        work, plan = prepared.work, prepared.plan
        if request.verify and begins_early(work):
            work = replace(work, sampled=tuple(drawn_items(plan.m).tolist()))
        stack.callback(free, client, work)
        stack.callback(lambda: total.words.close() if total.words is not None else None)
        if path is None:
            _find(client, work, plan, None, total, request.listener)
        else:
            check_room(path, request, plan)
            growing, pieces = stack.enter_context(
                _growing(request, path, digest_of(request, sides, work.device))
            )
            finished = _find(client, work, plan, pieces, total, request.listener)
            with ThreadPoolExecutor(2, "tilewright-arrays") as writer:
                written = writer.submit(write_arrays, growing, request, sides, pieces, finished)
                if total.words is not None:  # giving memory back takes as long as merging what is there
                    writer.submit(total.words.close)
                if request.verify:
                    check = _checked(client, request, work, plan, pieces, finished, total.candidates)
                if request.k is not None and total.count < plan.m * request.k:
                    incomplete = sum(
                        int((block[:, -1] < 0).sum()) for block in pieces.each(finished, "indices")
                    )
                written.result()
            pieces.settle()
            facts = {"seconds": time.perf_counter() - start, "dtype": plan.dtype, "device": prepared.device}
            complete_group(growing, request, sides, facts, check)
            if request.k is not None:
                for left in left_behind((sides.a, axis_of(sides.of))):
                    tell.warn(left)
    if not total.resumed:
        precision = "full" if plan.on_host else request.precision
        remember_search(plan, prepared.device, precision, total.stages, total.seconds)
    common = {
        "plan": plan,
        "out": None if path is None else str(request.out),
        "device": prepared.device,
        "seconds": time.perf_counter() - start,
        "stages": total.stages,
        "read_nbytes": total.read_nbytes,
        "nan_rows": total.nan_rows,
        "resumed": total.resumed,
        "verification": check,
    }
    return _Searched(plan, total, common, incomplete)


def prepare(client: Client, request: NeighbourRequest, sides: Sides, tell: Teller) -> _Prepared:
    """What the workers are told, and the plan."""
    tell.warn_once(
        note
        for role, array in sides.arrays.items()
        for note in (packing_notice(role, array), codecs_notice(role, array))
        if note is not None
    )
    if request.hardware is None:
        facts = survey(client, request.device)
    else:
        facts = request.hardware.facts(request.device, None, request.device_memory)
    kind, name = device_for(facts, request, sides, tell)
    if kind == "cpu" and request.precision != "full":
        tell.warn(
            f"precision={request.precision!r} is for tensor cores: on a CPU neighbours are found in full precision"
        )
    work, plan = planned_on(
        kind,
        facts,
        request,
        sides,
        lambda work: expected_density(client, work, sides.m, request.listener),
    )
    least = plan.host_peak_nbytes - (PROCESS_NBYTES - BARE_PROCESS_NBYTES)
    if plan.host_limit_nbytes is not None and least > plan.host_limit_nbytes:
        tell.warn(
            f"a worker's process comes to {format_nbytes(least)} or more, and {format_nbytes(plan.host_limit_nbytes)}"
            f" are allowed; {LIGHTER}, or give workers more"
        )
    if plan.words_nbytes > memory_limit():
        tell.warn(
            f"what blocks find comes to {format_nbytes(plan.words_nbytes)} in the process that asks, and"
            f" {format_nbytes(memory_limit())} are there; ask for fewer neighbours (k, -k), or run it where there is"
            " more memory"
        )
    return _Prepared(work, plan, name)


def planned_on(
    kind: DeviceKind,
    facts: Sequence[WorkerFacts],
    request: NeighbourRequest,
    sides: Sides,
    density_of: Callable[[Work], float],
) -> tuple[Work, NeighbourPlan]:
    """What the workers are told, and the plan, on one kind of device. density_of: of pairs, the share that is wanted.
    Raises PlanError where memory does not do."""
    threads = max(fact.threads for fact in facts)
    # Dask gives a GPU's process one core for its products, which are not computed there.
    cores = share_of_each(facts) if kind == "cuda" else min(fact.cores for fact in facts)
    limits = [fact.host_limit_nbytes for fact in facts if fact.host_limit_nbytes is not None]
    bound = None if request.k is not None else bound_of(request, sides) or _nothing(sides)
    work = Work(
        a=sides.a,
        b=sides.b,
        one=sides.is_one,
        of=sides.of,
        metric=sides.metric,
        k=request.k,
        bound=bound,
        exclude_self=request.exclude_self,
        once=request.k is None and sides.is_one,
        keep=not request.count_only,
        precision=request.precision,
        panel_rows=max(1, sides.n),
        depth=max(1, sides.width),
        holds_b=False,
        device=kind,
        threads=max(1, cores // threads),
        key=f"{request.work}-{uuid.uuid4().hex}",
    )
    density = 0.0 if request.k is not None else density_of(work)
    items = [sides.unit(array)[0] for array in (sides.a, sides.b)]
    plan = plan_neighbours(
        Asked(
            m=sides.m,
            n=sides.n,
            width=sides.width,
            one=sides.is_one,
            k=request.k,
            density=density,
            stores=not request.count_only,
            itemsizes=(sides.a.dtype.itemsize, sides.b.dtype.itemsize),
            sum_itemsize=sides.sums.itemsize,
            value_itemsize=sides.values.itemsize,
            units=(items[0], items[1]),
            on_gpu=kind == "cuda",
            mutual_nbytes=_mutual_nbytes(request, sides, kind),
            whole=is_read_whole(request.metric, sides.a.dtype, sides.sums),
            kept=0 if request.k is None else kept_of(request.k, request.exclude_self),
        ),
        metric=sides.metric,
        dtype=sides.sums.name,
        workers=len(facts),
        threads=threads,
        worker_nbytes=_worker_nbytes(facts, request, kind),
        items_dtype=sides.a.dtype.name,
        host_limit_nbytes=min(limits, default=None),
    )
    if kind == "cuda" and plan.depth < plan.width:
        raise PlanError(
            f"a GPU's {format_nbytes(plan.worker_nbytes)} do not hold a block of whole items with what is made of them,"
            " and in parts no GPU compares them; give it more memory (--device-memory, device_memory), or say"
            " device='cpu' (--device cpu)"
        )
    work = replace(work, panel_rows=plan.panel_rows, depth=max(1, plan.depth), holds_b=plan.holds_b)
    if plan.triangle and plan.k is not None:  # a worker has one task
        work = replace(work, mutual=True, threads=max(1, cores))
    return work, plan


def _mutual_nbytes(request: NeighbourRequest, sides: Sides, kind: DeviceKind) -> int:
    if kind != "cuda" or request.k is None or not sides.is_one:
        return 0
    return mutual_nbytes(sides.m, kept_of(request.k, request.exclude_self))


def _nothing(sides: Sides) -> Bound:
    """A bound that no key reaches."""
    return Bound(np.inf if sides.sums.kind == "f" else np.iinfo(np.int64).max, farther=False)


def device_for(
    facts: Sequence[WorkerFacts], request: NeighbourRequest, sides: Sides, tell: Teller
) -> tuple[DeviceKind, str]:
    """The kind of device that finds neighbours, and its name. Raises DeviceUnavailableError where that is to be a GPU,
    and none does."""
    dtypes = sides.a.dtype.newbyteorder("="), sides.b.dtype.newbyteorder("=")
    if facts[0].device == "cpu" or finds_on_gpu(*dtypes, sides.width, sides.metric, sides.n, request.k):
        return facts[0].device, facts[0].name
    names = " and ".join(dict.fromkeys(str(dtype) for dtype in dtypes))
    what = f"metric={sides.metric!r}, rows of {counted(sides.width, 'number')} of {names}"
    what += "" if request.k is None else f", k={request.k}"
    if request.device == "cuda":
        raise DeviceUnavailableError(
            f"device='cuda': no GPU finds these neighbours ({what}); say device='cpu' (--device cpu)"
        )
    tell.say(f"no GPU finds these neighbours ({what}): the workers' cores do")
    return "cpu", "CPU"


def _worker_nbytes(facts: Sequence[WorkerFacts], request: NeighbourRequest, kind: DeviceKind) -> int:
    asked: int | None = config.get("device-memory", request.device_memory)
    if asked is not None:
        return asked
    if kind == "cuda":
        free = min(fact.device_free_nbytes or 0 for fact in facts)
        return max(0, int(free * GPU_SHARE) - LISTS_NBYTES)
    return min(fact.host_limit_nbytes or memory_limit() for fact in facts) // SHARE


def check_room(path: Path, request: NeighbourRequest, plan: NeighbourPlan) -> None:
    """Raise OutputError where the disk has no room for what is going to be found."""
    try:
        place = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
        free = shutil.disk_usage(place).free
    except (OSError, ValueError, StopIteration):  # whoever writes there says so
        return
    needed = STORED_TIMES * plan.output_nbytes
    if needed <= free:
        return
    if request.k is None:
        name = "above" if request.above is not None else "below"
        what = f"about {counted(plan.expected_pairs or 0, 'pair')}, by a sample,"
        change = f"a stricter threshold ({name}), or --count-only (count_only), which stores none"
    else:
        what, change = f"{plan.m} × {plan.k} neighbours", "fewer neighbours (k, -k)"
    raise OutputError(
        f"output: {what} take {format_nbytes(needed)} while they are put into {path}, and {format_nbytes(free)} are"
        f" free on its disk; make room, choose another path, or ask for {change}"
    )


@contextmanager
def _growing(request: NeighbourRequest, path: Path, digest: str) -> Iterator[tuple[Path, Pieces]]:
    """The growing group, with the finished blocks that are kept in it: also where the block ends by an error, unless
    that says that nothing of them is of use."""
    goes_on = [request.resume]

    def keeps(growing: Path) -> bool:
        return goes_on[0] and are_kept(growing / FOLDER, digest)

    with output_group(path, KINDS[request.work], overwrite=request.overwrite, keeps=keeps) as growing:
        pieces = Pieces.begin(growing / FOLDER, digest)
        goes_on[0] = True
        try:
            yield growing, pieces
        except (OptionError, VerificationError):
            pieces.drop()
            raise
        except BaseException:
            pieces.save_last()
            pieces.close()
            if not pieces.are_any():
                pieces.drop()
            raise
        finally:
            pieces.close()
        shutil.rmtree(pieces.folder)


def _find(
    client: Client, work: Work, plan: NeighbourPlan, pieces: Pieces | None, total: _Total, listener: Listener
) -> list[Piece]:
    """Have all blocks searched that are not finished; returns all, in order."""
    start = time.perf_counter()
    finished = [] if pieces is None else pieces.finished()
    for piece in finished:
        total.count += piece.found
        total.nan_rows += piece.nan_rows
    total.resumed = len(finished)
    if finished:
        listener(Notice(f"{counted(len(finished), 'block')} of earlier runs not computed again"))

    def keep(first: int, stop: int, found: Found) -> Found:
        piece = Piece(first, stop, found.count, found.nan_rows)
        finished.append(piece)
        if pieces is not None:
            whole = sum(each.stop - each.first for each in finished) == plan.m
            quick = time.perf_counter() - start < QUICK_SECONDS
            pieces.keep(piece, found.arrays, last=whole and quick)
        total.count += found.count
        total.nan_rows += found.nan_rows
        total.read_nbytes += found.read_nbytes
        total.candidates = found.candidates
        return replace(found, arrays={}, candidates=None)

    stages = _Stages(listener, total)
    step = plan.block_rows
    once = plan.tasks == 1 or compares_once(work.a.dtype.newbyteorder("="), work.precision)
    if work.mutual and once and not finished:
        among = _found_by_bands(client, work, plan, total, stages)
        if among is not None:
            keep(0, plan.m, among)
            total.seconds = time.perf_counter() - start
            return finished
        listener(Notice("too many items are equally near: each is compared with all"))
    if work.mutual:  # what is left is compared with all
        assert plan.otherwise is not None
        other, step = plan.otherwise, plan.otherwise.block_rows
        work = replace(
            work,
            mutual=False,
            holds_b=other.holds_b,
            panel_rows=other.panel_rows,
            threads=max(1, work.threads * plan.workers // plan.threads),
            key=f"{work.key}{AFTER_ALL}",
        )
    ranges = list(_gaps(finished, plan.m, step))
    _search(
        client,
        work,
        find_in_block,
        ranges,
        stages,
        lambda place, found: keep(*ranges[place], found),
        pieces,
        total.resumed,
    )
    total.seconds = time.perf_counter() - start
    return sorted(finished)


def _search(
    client: Client,
    work: Work,
    find: Callable[..., tuple[Found, dict[str, float]]],
    calls: Sequence[tuple[Any, ...]],
    listener: Listener,
    arrived: Callable[[int, Found], Found],
    pieces: Pieces | None = None,
    done: int = 0,
) -> None:
    """Have ranges of items searched, each by a task. calls: of ``find``, behind the work: first and last item, and what
    else it takes."""

    def nbytes(first: int, stop: int, *others: Any) -> int:
        rows = stop if work.mutual else stop - first
        if not (work.holds_b or work.mutual):
            rows += work.n - (first if work.once else 0)
        return rows * work.width * int(work.a.dtype.itemsize)

    reduce_pieces(
        client,
        taken_as_they_arrive("pairs" if work.k is None else "topk", find, LIGHTER),
        [(work, *call) for call in calls],
        [nbytes(*call) for call in calls],
        listener,
        arrived=arrived,
        done=done,
        kept=pieces is not None and bool(pieces.digest),
    )


def _found_by_bands(
    client: Client, work: Work, plan: NeighbourPlan, total: _Total, listener: Listener
) -> Found | None:
    """The neighbours of all items, of which each worker has compared a band with all before them; None where one could
    not."""
    from tilewright.kernels.neighbours.words import neighbours_of_bands

    assert work.k is not None
    bands = bands_of(plan.m, plan.workers)
    stops = [stop for _, stop in bands]
    nan_rows, read_nbytes, could = 0, 0, True
    candidates: list[Candidates] = []
    every: Found | None = None

    def arrived(band: int, found: Found) -> Found:
        nonlocal nan_rows, read_nbytes, could, every
        nan_rows += found.nan_rows
        read_nbytes += found.read_nbytes
        candidates.extend([found.candidates] if found.candidates is not None else [])
        if "indices" in found.arrays:
            every = found
        elif WORDS in found.arrays:
            held.put(band, found.arrays[WORDS])
        elif not found.placed:
            could = False
        return replace(found, arrays={}, candidates=None)

    held = BandWords(stops, kept_of(work.k, work.exclude_self), shared=not isinstance(client, HereClient))
    if held.sent:
        listener(
            Notice(
                f"what blocks find is sent through the cluster, more slowly: {held.sent}; ask for fewer neighbours"
                " (k, -k), or run where there is more memory"
            )
        )
    try:
        find = find_and_sample if work.sampled else find_in_band
        calls = [(*band, held.place(number)) for number, band in enumerate(bands)]
        _search(client, work, find, calls, listener, arrived)
        if not could:
            held.close()
            return None
        if every is None:
            cores = usable_cores()
            near = neighbours_of_bands(held.words, stops, work.k, work.sums, work.metric, cores)
            every = of_neighbours(near, nan_rows, read_nbytes)
        total.words = held
    except BaseException:
        held.close()
        raise
    return replace(every, candidates=nearest_of(candidates) if candidates else None)


class _Stages:
    """A listener that adds up what the stages took."""

    def __init__(self, listener: Listener, total: _Total) -> None:
        self._listener, self._total = listener, total

    def __call__(self, event: Any) -> None:
        for stage, seconds in getattr(event, "stages", {}).items():
            self._total.stages[stage] = self._total.stages.get(stage, 0.0) + seconds
        self._listener(event)


def _gaps(finished: Sequence[Piece], m: int, length: int) -> Iterator[tuple[int, int]]:
    """The stretches of items that no finished block has, cut into blocks."""
    done = 0
    for first, stop in [*((piece.first, piece.stop) for piece in finished), (m, m)]:
        yield from ((start, min(start + length, first)) for start in range(done, first, length))
        done = stop


def _checked(
    client: Client,
    request: NeighbourRequest,
    work: Work,
    plan: NeighbourPlan,
    pieces: Pieces,
    finished: list[Piece],
    candidates: Candidates | None,
) -> NeighbourCheck:
    """Raise VerificationError where the sample shows a fault. candidates: of the items that are drawn, if the search
    found all of them."""
    # Where tasks have drawn items at hand already, it is those: also if not all of them were compared.
    items = np.array(work.sampled, np.int64) if work.sampled else drawn_items(plan.m)
    reported = list(_reported(pieces, finished, items))
    check = None if candidates is None else check_early(work, reported, candidates)
    if check is None:
        pieces.save_last()
        each = (
            replace(work, threads=max(1, work.threads * plan.workers // plan.threads))
            if work.mutual
            else work
        )
        check = check_reported(client, each, reported, plan.threads, request.listener)
    if not check.passed:
        raise VerificationError(
            f"output: {request.work} of {name_of(work.a)} failed the check: {check.cause}; run it again, and see that"
            " memory, device and storage are sound"
        )
    return check


def _reported(pieces: Pieces, finished: list[Piece], items: np.ndarray) -> Iterator[Reported]:
    firsts = [piece.first for piece in finished]
    held: tuple[int, dict[str, np.ndarray]] = (-1, {})
    for item in items.tolist():
        place = bisect_right(firsts, item) - 1
        if held[0] != place:
            held = place, pieces.arrays(finished[place])
        yield reported_in(held[1], finished[place].first, item)


def free(client: Client, work: Work) -> None:
    """Have the workers forget what they hold of it."""
    with suppress(ClusterError):
        ask_all(client, free_held, work.key)
