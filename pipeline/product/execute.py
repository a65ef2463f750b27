"""Walk a plan on a cluster: hand out its tiles, report what happens, keep what is finished. The plan is never changed
here; `MatmulRun` is the result, and its text what is printed at the end."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tilewright.kernels.numbers import counted, format_nbytes
from tilewright.pipeline.check.verify import SENT_NBYTES, Verification
from tilewright.pipeline.cluster.answers import NotHeardError, Result, WorkersKilledError, run_on_all
from tilewright.pipeline.cluster.drain import Drain, draining
from tilewright.pipeline.cluster.here.client import HereClient
from tilewright.pipeline.cluster.submit import TasksUnderWay, run_combined, with_sent
from tilewright.pipeline.cluster.watch import Lost, Tell, Workers, log_loss, threads_of
from tilewright.pipeline.errors import ClusterError, DeviceMemoryError, TaskError
from tilewright.pipeline.events import (
    Listener,
    UnitDone,
    Waiting,
    WorkDone,
    WorkPlanned,
    on_lost,
    on_waiting,
)
from tilewright.pipeline.forecast.rates import remember
from tilewright.pipeline.plan.grid import Tile
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.plan.told import (
    NOTHING_FOUND,
    THREADS,
    Corners,
    Found,
    PanelContent,
    Product,
    TileReport,
)
from tilewright.pipeline.plan.transform import NOT_FUSED
from tilewright.pipeline.product.placement import Placement
from tilewright.pipeline.report.figures import busy_sentence, limit_sentence
from tilewright.pipeline.report.page import RunReport
from tilewright.pipeline.report.timeline import Recorder, Timeline
from tilewright.pipeline.worker import tasks

if TYPE_CHECKING:
    from distributed import Client, Future

logger = logging.getLogger(__name__)

TileTask = Callable[..., TileReport | DeviceMemoryError]
"""What a worker does for a tile, with the arguments of `tasks.multiply_tile`."""

UNTOLD_SECONDS = 5
"""The longest that a tile is not recorded for want of what its panels held."""

NOTHING_UNRECORDED: Mapping[str, int] = MappingProxyType({})


def _tile_results(
    client: Client,
    product: Product,
    tiles: list[Tile],
    left_behind: dict[str, set[int]],
    *,
    task: TileTask,
    waiting: Tell,
    lost: Lost,
    drain: Drain,
    unrecorded: Mapping[str, int],
) -> Generator[tuple[int, TileReport | DeviceMemoryError], None, None]:
    """Yield a number and a report for each tile as it is stored. A tile takes one task; where k is cut, one for each
    part and one that adds them up. ``left_behind`` is as in `run_placed`."""
    key = f"tile-{product.run}"
    results_with = partial(
        _results_with, task=task, waiting=waiting, lost=lost, drain=drain, unrecorded=unrecorded
    )
    if product.fused.nbytes <= SENT_NBYTES:
        yield from results_with(client, product, tiles, left_behind, (), key)
        return
    # Long vectors go to each worker once, not along with each task.
    left = {tile.index: tile for tile in tiles}
    bare = replace(product, fused=NOT_FUSED)

    def run(
        held: list[Future], key: str
    ) -> Generator[tuple[int, TileReport | DeviceMemoryError], None, None]:
        ordered = list(left.values())
        with closing(results_with(client, bare, ordered, left_behind, held, key)) as results:
            for number, report in results:
                index = number if product.plan.k_tasks == 1 else ordered[number].index
                del left[index]
                yield number, report

    yield from with_sent(client, (product.fused,), run, key=key, waiting=waiting)


def _results_with(
    client: Client,
    product: Product,
    tiles: list[Tile],
    left_behind: dict[str, set[int]],
    held: Sequence[Future],
    key: str,
    *,
    task: TileTask,
    waiting: Tell,
    lost: Lost,
    drain: Drain,
    unrecorded: Mapping[str, int],
) -> Generator[tuple[int, TileReport | DeviceMemoryError], None, None]:
    """As `_tile_results`, by tasks that get what the product lacks as ``held`` on the workers."""
    parts = range(product.plan.k_tasks)
    if len(parts) == 1:
        placement, given = Placement(product.plan, tiles), Counter[str]()

        def call(tile: Tile, worker: str) -> tuple[Any, ...]:
            given[worker] += 1
            sharers = placement.sharers(tile, worker, product.sharing)
            return product, tile, sharers, given[worker], *held

        least = tasks.TILES_UNDER_WAY if product.device == "cuda" else 1
        return run_placed(
            client,
            task,
            placement,
            call,
            key=key,
            least=least,
            left_behind=left_behind,
            waiting=waiting,
            lost=lost,
            drain=drain,
            unrecorded=unrecorded,
        )

    def left(worker: str, place: int) -> None:
        left_behind.setdefault(worker, set()).add(tiles[place].index)

    groups = [
        ((product, tile, *(held or (None,))), [(product, tile, part, *held) for part in parts])
        for tile in tiles
    ]
    window = product.plan.sums_under_way
    return run_combined(
        client,
        tasks.multiply_part,
        tasks.add_parts,
        groups,
        window=window,
        key=key,
        left=left,
        waiting=waiting,
        lost=lost,
        drain=drain,
    )


def run_placed(
    client: Client,
    function: Callable[..., Result],
    placement: Placement,
    call: Callable[[Tile, str], tuple[Any, ...]],
    *,
    key: str,
    least: int = 1,
    left_behind: dict[str, set[int]] | None = None,
    waiting: Tell = logger.warning,
    lost: Lost = log_loss,
    drain: Drain | None = None,
    unrecorded: Mapping[str, int] = NOTHING_UNRECORDED,
) -> Generator[tuple[int, Result], None, None]:
    """Submit ``function(*call(tile, worker))`` for every tile of ``placement`` and the worker that it is meant for;
    yield the tile's index and the result as it finishes.

    Each worker has as many tiles under way as it has threads, or ``least`` if that is more (a function that waits
    rather than computes may make room for the next, see `pool.make_room`), and one more of its own share to find
    waiting. When its share is handed out, it gets tiles of others'. A task whose worker is lost goes to any other, or
    waits for one. When workers come or go, or fall silent, the tiles left are divided anew. A tile that takes far
    longer than others did is given to a worker that has nothing left to do too, and the first result counts;
    ``left_behind`` gets the workers that may then still be busy with it, and which tiles these are. ``unrecorded`` says
    how many results of each worker the caller holds that are not recorded yet, and so count as under way. In all else,
    errors too, this is as ``run_bounded``.
    """
    workers = Workers(client, threads_of(client, waiting=waiting))
    threads = workers.threads()
    placement.share_among(list(threads))
    run: TasksUnderWay[Result] = TasksUnderWay(client, function, key, waiting, lost, drain)
    if left_behind is not None:
        run.left_behind = left_behind

    def heard() -> dict[str, int]:
        """Threads of the workers that are not silent; of those that were not, where all are."""
        there = workers.threads()
        return {worker: there[worker] for worker in run.heard(there)} or threads

    def feed(under_way: Counter[str | None]) -> Iterator[tuple[int, tuple[Any, ...], str | None]]:
        nonlocal threads
        if not len(placement):
            return
        anything = under_way.total() > 0  # else nothing would come any more that what is held waits for
        before, threads = threads, heard()
        if threads.keys() != before.keys():
            placement.share_among(list(threads))
        for take, more in ((placement.own, 1), (placement.others, 0)):
            taking = list(threads)
            while taking:  # in turns, one each, so that the last worker begins no later than it must
                for worker in tuple(taking):
                    waiting_here = unrecorded.get(worker, 0) if anything else 0
                    room = under_way[worker] + waiting_here < max(threads[worker], least) + more
                    if room and (tile := take(worker)) is not None:
                        under_way[worker] += 1
                        yield tile.index, call(tile, worker), worker
                    else:
                        taking.remove(worker)

    yield from run.results(feed, lambda: len(placement))


def on_all(
    client: Client, function: Callable[..., Any], *arguments: Any, unawaited: Collection[str] = ()
) -> None:
    """Call a function on every worker; failures are only logged, since a worker that is gone holds nothing any more.
    One that is silent, or of ``unawaited``, is not waited for: it does that when it goes on."""
    try:
        answers = run_on_all(client, function, *arguments, unawaited=unawaited)
    except ClusterError as error:  # the scheduler is gone, or silent: whatever is asked next says so
        logger.debug("%s: %s", function.__name__, error)
        return
    for worker, answer in answers.items():
        if isinstance(answer, NotHeardError):
            logger.debug("%s on %s: %s", function.__name__, worker, answer)
        elif isinstance(answer, BaseException):
            logger.warning("%s on %s: %s: %s", function.__name__, worker, type(answer).__name__, answer)


def _added(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in one | other}


@dataclass(frozen=True)
class MatmulRun:
    """A finished matrix product: the plan, what computed it, how long it took, and the result of its verification."""

    plan: MatmulPlan
    device: str
    """Name of the GPU, or ``CPU``."""
    kernel: str
    """The kernel that multiplied, as it is named in `tilewright bench gemm`."""
    seconds: float
    """From the first tile handed out to the last one stored."""
    stages: dict[str, float]
    """Busy seconds by stage, summed over workers. Stages overlap, so they can add up to more than ``seconds``. Time in
    which a stage moves several panels or tiles at once counts once."""
    read_nbytes: int
    """Bytes of A and B that were read, counted after decoding: what the plan says, more where tiles overtake
    each other, and less where panels came from other workers."""
    shared_nbytes: int
    """Bytes of A and B that workers copied from each other's GPUs rather than read."""
    write_nbytes: int
    """Bytes of C that were written: those of the tiles that this run computed."""
    operations: int
    """Multiplications and additions of those tiles."""
    workers: dict[str, dict[str, float]]
    """For each worker that did any work, the seconds in which it was busy with ``load``, ``compute``, ``write``."""
    resumed: int
    """Tiles that an earlier run had finished."""
    verification: Verification | None
    """None where no verification was asked for."""
    workers_lost: int = 0
    """Workers that were lost while tiles were computed; what they had under way was computed again."""
    wraps: str = "no"
    """``possible`` where k times the largest absolute values of A and B exceeds C's integers, so that sums may have
    wrapped; else ``no``."""
    masked: dict[str, int] = field(default_factory=dict)
    """For ``A`` and ``B``, where their attributes name numbers that stand for missing ones: how many of those there are
    in all of the array. They were multiplied as they are stored."""
    not_finite: int = 0
    """Elements of C that are NaN or infinite."""
    names: dict[str, str] = field(default_factory=dict)
    """Where ``A``, ``B`` and ``C`` are."""
    not_finite_expected: bool = False
    """Whether those that are not finite are NaN that was asked for, of variables without values or variance."""
    timeline: Timeline | None = field(default=None, compare=False, repr=False)
    """When what was done, from the request until C had its name; None where nobody recorded that."""

    @classmethod
    def of_nothing(cls, plan: MatmulPlan) -> MatmulRun:
        """A run that found all done."""
        return cls(plan, "none", "none", 0.0, {}, 0, 0, 0, 0, {}, plan.tile_count, None)

    def followed_by(self, other: MatmulRun) -> MatmulRun:
        """This run and another one of the same product right after it, which computed more of its tiles."""
        summed = ("seconds", "read_nbytes", "shared_nbytes", "write_nbytes", "operations", "workers_lost")
        kernels = {name for run in (self, other) for name in run.kernel.split(" and ")} - {"none"}
        return replace(
            self,
            kernel=" and ".join(sorted(kernels)) or "none",
            stages=_added(self.stages, other.stages),
            workers={
                worker: _added(self.workers.get(worker, {}), other.workers.get(worker, {}))
                for worker in self.workers | other.workers
            },
            **{name: getattr(self, name) + getattr(other, name) for name in summed},
        )

    def to_json(self) -> dict[str, object]:
        return asdict(replace(self, timeline=None)) | {
            "plan": self.plan.to_json(),
            "verification": self.verification.to_json() if self.verification is not None else None,
            "timeline": self.timeline.to_json() if self.timeline is not None else None,
        }

    def report(self) -> RunReport:
        """The run in words, figures and pictures: its page, and the same as JSON."""
        return RunReport(self)

    def to_html(self) -> str:
        """The page that ``--report`` writes: one file that needs no other, and no network."""
        return self.report().to_html()

    def _repr_html_(self) -> str:
        """The same as a notebook shows it."""
        return self.report().to_fragment()

    def __str__(self) -> str:
        plan = self.plan
        how = f"kernel {self.kernel}"
        if self.operations and self.seconds > 0:
            how = f"{self.operations / self.seconds / 1e9:.4g} Gop/s, {how}"
        lines = [
            f"{plan.m} × {plan.n} {plan.c_dtype} in {self.seconds:.2f} s on {self.device} × {plan.workers} ({how})",
            *([f"C is {plan.c_dtype_reason}"] if plan.c_dtype_reason else []),
            self._busy(),
            f"read {format_nbytes(self.read_nbytes)},"
            + (f" took {format_nbytes(self.shared_nbytes)} from other GPUs," if self.shared_nbytes else "")
            + f" wrote {format_nbytes(self.write_nbytes)}, {counted(plan.tile_count, 'tile')}"
            + (f", {self.resumed} of them from an earlier run" if self.resumed else "")
            + (f"; {counted(self.workers_lost, 'worker')} lost" if self.workers_lost else ""),
        ]
        if self.verification is not None:
            lines.append(str(self.verification))
        if doubts := self._doubts():
            lines.append(f"but {', and '.join(doubts)}")
        return "\n".join(lines)

    def _doubts(self) -> list[str]:
        """Why numbers that are right may not be what the user means."""
        found = []
        if self.wraps != "no":
            found.append(f"sums may have wrapped in {self.plan.c_dtype}")
        if missing := [f"{count} of {role}" for role, count in self.masked.items() if count]:
            found.append(f"elements that stand for missing ones were multiplied ({', '.join(missing)})")
        if self.not_finite and not self.not_finite_expected:
            band, shape = self.plan.band, (self.plan.m, self.plan.n)
            share = self.not_finite / (math.prod(shape) if band is None else band.size(shape))
            where = "" if band is None else " in the band"
            found.append(f"{share:.3g} of C's elements{where} are not finite")
        return found

    def _busy(self) -> str:
        """One line: the share of the time each thread of a worker was busy, and which of them the others wait for."""
        if not self.workers or self.seconds <= 0:
            return "busy: nothing was left to do"
        return f"{busy_sentence(self)}; {limit_sentence(self)}"


def told_first(
    reports: Iterable[TileReport | DeviceMemoryError],
    see: Callable[[int, Sequence[PanelContent]], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    unrecorded: Counter[str] | None = None,
) -> Iterator[TileReport | DeviceMemoryError]:
    """Reports in the order in which they come, but each after ``see`` was given what all its panels held: no tile may
    be recorded before that is, and the report of a worker that tells it may come later than one that relies on that.
    After `UNTOLD_SECONDS` it is not waited for: its worker may be lost, or another's result have come first.

    ``unrecorded`` is kept at how many reports of each worker wait here.
    """
    unrecorded = Counter() if unrecorded is None else unrecorded
    told: set[tuple[str, Corners, int]] = set()
    held: list[tuple[float, TileReport]] = []
    for report in reports:
        if isinstance(report, DeviceMemoryError):
            yield report
            continue
        if see is not None:
            see(report.index, report.contents)
        told |= {_known_as(panel) for panel in report.contents if panel.parts is not None}
        now = clock()
        held.append((now, report))
        unrecorded[report.worker] += 1
        waiting = []
        for since, one in held:
            if now - since < UNTOLD_SECONDS and not told.issuperset(map(_known_as, one.contents)):
                waiting.append((since, one))
            else:
                yield one  # recorded when the next is asked for
                unrecorded[one.worker] -= 1
        held = waiting
    yield from (one for _, one in held)


def _known_as(panel: PanelContent) -> tuple[str, Corners, int]:
    return panel.role, panel.corners, panel.digest


def run_tiles(
    client: Client,
    product: Product,
    device_name: str,
    finished: Collection[int],
    listener: Listener,
    record: Callable[[TileReport], None],
    keep: Callable[[bytes], None] | None = None,
    see: Callable[[int, Sequence[PanelContent]], None] | None = None,
    task: TileTask = tasks.multiply_tile,
) -> tuple[MatmulRun, Found]:
    """Compute every tile of the plan that is not finished yet. Returns the run, of which only the check and what is
    found in C are still to be told, and what these tiles found.

    ``record`` is called with each tile's report, once it is stored; before that ``see``, with what its panels held, and
    ``keep``, where C is in a session's fork, with what the tile has changed there. ``task`` computes a tile where k is
    not cut; a benchmark of all the rest gives one that computes nothing. When this ends, by success, error or
    Ctrl-C, nothing of the run is written any more, and its memory is free for whatever is planned next.

    Raises
    ------
    DeviceMemoryError
        A worker has less memory than the plan needs. Not retried: the plan is too large.
    TilewrightError
        As ``run_placed`` and ``run_combined`` raise.
    """
    plan = product.plan
    listener = recorder = Recorder.of(listener)
    busy_before = recorder.busy()
    todo = {tile.index: tile for tile in plan.tiles() if tile.index not in finished}
    read = sum(plan.tile_read_nbytes(tile) for tile in todo.values())
    operations = sum(map(plan.tile_operations, todo.values()))
    listener(WorkPlanned("matmul", plan.tile_count, len(finished), "tiles", read, operations))
    stages: dict[str, float] = {}
    kernels: set[str] = set()
    read_nbytes = shared_nbytes = 0
    losses: list[str] = []
    found = NOTHING_FOUND
    tell_loss = on_lost(listener, "matmul", "tile")

    def lost(worker: str, tiles: int | None) -> None:
        losses.append(worker)
        tell_loss(worker, tiles)

    start = time.perf_counter()
    ended = False
    left_behind: dict[str, set[int]] = {}
    overtaken: list[TileReport] = []
    unrecorded = Counter[str]()
    waiting = on_waiting(listener, "matmul", "keeps what is finished")
    try:
        with ExitStack() as stack:
            drain = stack.enter_context(draining(lambda wait: listener(Waiting(f"matmul: {wait}")), "tile"))
            results = _tile_results(
                client,
                product,
                list(todo.values()),
                left_behind,
                task=task,
                waiting=waiting,
                lost=lost,
                drain=drain,
                unrecorded=unrecorded,
            )
            stack.enter_context(
                closing(results)
            )  # cancels outstanding tasks before the workers are told to end
            for report in told_first((report for _, report in results), see, unrecorded=unrecorded):
                if isinstance(report, DeviceMemoryError):
                    raise report
                drain.took(report.seconds)
                if keep is not None and report.changes is not None:
                    keep(report.changes)
                record(report)
                if any(report.index in tiles for tiles in left_behind.values()):
                    overtaken.append(report)
                found = found.merged(report.found)
                kernels |= report.kernels
                read_nbytes += report.read_nbytes
                shared_nbytes += report.shared_nbytes
                for stage, seconds in report.stages.items():
                    stages[stage] = stages.get(stage, 0.0) + seconds
                tile = todo[report.index]
                listener(
                    UnitDone(
                        "matmul",
                        report.index,
                        report.worker,
                        report.seconds,
                        plan.tile_read_nbytes(tile),
                        plan.tile_operations(tile),
                        report.stages,
                        report.spans,
                    )
                )
        ended = True
    except WorkersKilledError as error:
        raise TaskError(f"{error}, or the plan less (--device-memory, tilewright.device-memory)") from error
    finally:
        if client.status == "running":  # else the scheduler is gone, which raises its own error
            # What workers still do then nobody needs. Where it could be stored later, it is waited for.
            abandon = not ended or bool(left_behind)
            # What is freed here the caller may want at once.
            if not abandon and not isinstance(client, HereClient):
                on_all(client, tasks.let_run_end, product.run)
            else:
                unawaited = left_behind if product.drafts is not None else ()
                if product.sharing:  # no worker frees what another may still copy from
                    on_all(client, tasks.stop_run, product.run, abandon, unawaited=unawaited)
                on_all(client, tasks.end_run, product.run, abandon, unawaited=unawaited)
    for report in overtaken:
        # By now the worker that was slower has ended. It may have put its chunk, with the same bytes, in the place of
        # one that had been forced to disk.
        record(report)
    seconds = time.perf_counter() - start
    listener(WorkDone("matmul", seconds))
    kernel = " and ".join(sorted(kernels)) or "none"
    workers = {
        worker: {name: busy.get(name, 0.0) - busy_before.get(worker, {}).get(name, 0.0) for name in THREADS}
        for worker, busy in recorder.busy().items()
    }
    workers = {worker: busy for worker, busy in workers.items() if any(busy.values())}
    for name, parts in THREADS.items():
        # Several panels load, and several tiles are written, at once, so stage seconds overlap: scale them to the time
        # in which the threads were busy.
        total = sum(stages.get(stage, 0.0) for stage in parts)
        share = sum(busy[name] for busy in workers.values()) / total if total > 0 else 1.0
        stages |= {stage: share * stages[stage] for stage in parts if stage in stages}
    written = sum(map(plan.tile_write_nbytes, todo.values()))
    made = MatmulRun(
        plan=plan,
        device=device_name,
        kernel=kernel,
        seconds=seconds,
        stages=stages,
        read_nbytes=read_nbytes,
        shared_nbytes=shared_nbytes,
        write_nbytes=written,
        operations=operations,
        workers=workers,
        resumed=len(finished),
        verification=None,
        workers_lost=len(losses),
        timeline=recorder.timeline(),
    )
    if task is tasks.multiply_tile:  # else what is timed is something else
        remember(made, product.precision)
    return made, found
