"""A reduction as a value: what is done to a piece, and how parts are combined.

After flox's aggregations (chunk, combine, identity). The parts come from tasks that finish in any order; a
commutative reduction takes them as they come, any other gets them in the order of the pieces. Either way the result
depends neither on the number of workers nor on their speed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from tilewright.pipeline.cluster.answers import WorkersKilledError
from tilewright.pipeline.cluster.drain import Drain, draining
from tilewright.pipeline.cluster.here.worker import current_worker
from tilewright.pipeline.cluster.identity import address_of
from tilewright.pipeline.cluster.submit import run_bounded
from tilewright.pipeline.errors import TaskError
from tilewright.pipeline.events import (
    Event,
    Listener,
    Span,
    UnitAdvanced,
    UnitDone,
    Waiting,
    WorkDone,
    WorkPlanned,
    on_lost,
    on_waiting,
)

if TYPE_CHECKING:
    from distributed import Client

Part = TypeVar("Part")
Total = TypeVar("Total")

CLOSING_SECONDS = 0.5
"""How long a task goes on in a closing worker. A worker first tells its nanny and then cancels its tasks; a task that
ended before would count as failed, not as cancelled."""


ENDING = ("closing", "closed", "failed")
"""States of a worker that waits for its tasks no longer. Dask's are an enumeration with these names."""


class Calls(Protocol):
    """The arguments of tasks. A list, or what makes them when each is handed out."""

    def __len__(self) -> int: ...
    def __getitem__(self, place: int, /) -> tuple[Any, ...]: ...


@dataclass(frozen=True)
class Reduction(Generic[Part, Total]):
    """The functions of a reduction."""

    name: str
    """Its name in events, such as ``histogram`` or ``dot``."""
    chunk: Callable[..., tuple[Part, dict[str, float]]]
    """Runs on a worker: returns one piece's part and the busy seconds of its stages. Must be importable there."""
    identity: Callable[[], Total]
    """The total of no pieces."""
    combine: Callable[[Total, Part], Total]
    """Adds one part to the total; may write into the total it is given."""
    commutative: bool
    """Whether combining parts in any order gives the same bits."""
    lighter: str
    """How a user gives its tasks less to hold."""


def taken_as_they_arrive(
    name: str, chunk: Callable[..., tuple[Part, dict[str, float]]], lighter: str
) -> Reduction[Part, None]:
    """A reduction without a total: ``arrived`` of `reduce_pieces` takes the parts."""
    return Reduction(name, chunk, lambda: None, lambda total, part: None, commutative=True, lighter=lighter)


@dataclass(frozen=True)
class _Outcome(Generic[Part]):
    """What comes back from a worker."""

    part: Part
    worker: str
    seconds: float
    stages: dict[str, float]
    begin: float = 0.0
    """Seconds since the epoch."""

    @property
    def span(self) -> Span:
        return Span(self.worker, "piece", self.begin, self.begin + self.seconds)


def reduce_pieces(
    client: Client,
    reduction: Reduction[Part, Total],
    calls: Calls,
    nbytes: Sequence[int],
    listener: Listener,
    *,
    known: Mapping[int, Part] | None = None,
    arrived: Callable[[int, Part], Part] = lambda place, part: part,
    done: int = 0,
    kept: bool = False,
    tells: bool = False,
) -> Total:
    """Run ``reduction.chunk(*call)`` on the workers for every call, and combine the parts in this process.

    ``nbytes`` says how much each call reads. Raises what the tasks raise (see ``run_bounded``).

    known: parts that need no task, by the places of their calls. arrived: is given each other part with its place as it
    arrives, before the listener hears of it, and returns what is combined: whoever keeps finished pieces keeps them
    there. done: pieces that have no call, since an earlier run finished them. kept: whether ``arrived`` keeps pieces
    for a later run; if so, where the command is asked to end, those that are nearly done are finished first. tells:
    whether tasks tell how far they have come (`teller`), of which the listener hears.
    """
    start = time.perf_counter()
    listener = _one_at_a_time(listener)
    known = known or {}
    places = [place for place in range(len(calls)) if place not in known]
    left = sum(nbytes[place] for place in places)
    listener(WorkPlanned(reduction.name, len(calls) + done, len(known) + done, "pieces", left, 0))
    key = f"{reduction.name}-{time.time_ns():x}"
    total = reduction.identity()
    try:
        with ExitStack() as stack:
            drain = stack.enter_context(_draining(listener, reduction.name)) if kept else None
            if tells:
                stack.enter_context(_hearing(client, key, reduction.name, listener))
            outcomes = run_bounded(
                client,
                _run_chunk,
                ((reduction.chunk, calls[place], key if tells else None, place) for place in places),
                key=key,
                waiting=on_waiting(listener, reduction.name, "ends it"),
                lost=on_lost(listener, reduction.name, "piece"),
                drain=drain,
                large=True,
            )
            # Cancels outstanding tasks now, not when an error's traceback is freed.
            stack.enter_context(closing(outcomes))
            placed = ((places[number], outcome) for number, outcome in _timed(outcomes, drain))
            for part in _parts(placed, reduction, nbytes, listener, known, arrived):
                total = reduction.combine(total, part)
    except WorkersKilledError as error:
        raise TaskError(f"{error}, or {reduction.lighter}") from error
    listener(WorkDone(reduction.name, time.perf_counter() - start))
    return total


def _one_at_a_time(listener: Listener) -> Listener:
    lock = threading.RLock()  # a listener may do what tells it of something else

    def tell(event: Event) -> None:
        with lock:
            listener(event)

    return tell


@contextmanager
def _hearing(client: Client, topic: str, name: str, listener: Listener) -> Iterator[None]:
    """In this block the listener hears how far tasks have come."""

    def hear(event: tuple[float, tuple[int, int]]) -> None:
        _, (place, nbytes) = event
        listener(UnitAdvanced(name, place, nbytes))

    client.subscribe_topic(topic, hear)
    try:
        yield
    finally:
        with suppress(ValueError):  # the client has been closed
            client.unsubscribe_topic(topic)


def _draining(listener: Listener, name: str) -> AbstractContextManager[Drain]:
    return draining(lambda wait: listener(Waiting(f"{name}: {wait}")), "piece")


def _timed(
    outcomes: Iterable[tuple[int, _Outcome[Part]]], drain: Drain | None
) -> Iterator[tuple[int, _Outcome[Part]]]:
    """The same, of which ``drain`` is told how long each took."""
    for number, outcome in outcomes:
        if drain is not None:
            drain.took(outcome.seconds)
        yield number, outcome


def _parts(
    outcomes: Iterable[tuple[int, _Outcome[Part]]],
    reduction: Reduction[Part, Total],
    nbytes: Sequence[int],
    listener: Listener,
    known: Mapping[int, Part] = MappingProxyType({}),
    arrived: Callable[[int, Part], Part] = lambda place, part: part,
) -> Iterator[Part]:
    """Yield the parts, those known among them, in an order that the reduction allows; tell the listener of each other
    one as it arrives."""
    early: dict[int, Part] = dict(known)
    due = 0
    if reduction.commutative:
        yield from known.values()
    for place, outcome in outcomes:
        part = arrived(place, outcome.part)
        listener(
            UnitDone(
                reduction.name,
                place,
                outcome.worker,
                outcome.seconds,
                nbytes[place],
                0,
                outcome.stages,
                (outcome.span,),
            )
        )
        if reduction.commutative:
            yield part
            continue
        early[place] = part
        while due in early:
            yield early.pop(due)
            due += 1
    while not reduction.commutative and due in early:  # no task was needed
        yield early.pop(due)
        due += 1


_of_thread = threading.local()
"""The topic and the place of the task that each thread runs."""


def _run_chunk(
    chunk: Callable[..., tuple[Part, dict[str, float]]], call: tuple[Any, ...], topic: str | None, place: int
) -> _Outcome[Part]:
    begin, start = time.time(), time.perf_counter()
    _of_thread.task = None if topic is None else (topic, place)
    try:
        part, stages = chunk(*call)
    finally:
        _of_thread.task = None
    return _Outcome(part, address_of(current_worker()), time.perf_counter() - start, stages, begin)


def teller() -> Callable[[int], None] | None:
    """A function by which the task that this thread runs tells how many bytes it has read, which any thread may call;
    None where nobody wants to know."""
    task = getattr(_of_thread, "task", None)
    if task is None:
        return None
    topic, place = task
    worker = current_worker()
    return lambda nbytes: worker.log_event(topic, (place, nbytes))


def end_if_given_up(clock: Callable[[], float] = time.monotonic) -> Callable[[], None]:
    """A function that ends the task this thread runs once nobody needs it any more: its client has released it, or its
    worker is closing and waits for it, by the seconds of ``clock``. Any thread may call it, now and then. Outside a
    task it does nothing.

    It raises CancelledError.
    """
    try:
        worker = current_worker()
        key = worker.get_current_task()
    except (ValueError, KeyError):
        return lambda: None

    seen: float | None = None

    def check() -> None:
        nonlocal seen
        task = worker.state.tasks.get(key)
        # A worker that retires has another status and lets its tasks finish.
        if seen is None and getattr(worker.status, "name", worker.status) in ENDING:
            seen = clock()
        if (
            task is None
            or task.state == "cancelled"
            or (seen is not None and clock() - seen > CLOSING_SECONDS)
        ):
            raise CancelledError(f"task {key} was given up")

    return check
