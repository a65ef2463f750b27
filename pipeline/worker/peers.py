"""Panels from the GPU of another worker of the host: where several need the same one, each reads a part of it from
files.

Workers whose tiles lie in the same row of C need the same panels of A, and in the same column those of B. Such a panel
is cut into a part for each of them. A worker reads its own part, then asks the others for theirs: what another has, or
is reading just now, is copied from GPU to GPU; the rest is read from files. What another is about to begin is waited
for a little, so that workers which begin at different moments come together. So no worker waits long for one that may
be waiting for it.

A worker may be behind another. That shows where the other had all of a panel before loading it began here, or where the
other has the first panel of a row or column (its *lines*, below) when loading that begins here. Then whole panels of
these lines come from the other, and this worker reads nothing of them, until the other lacks one that is asked for.

Nothing is lent. A panel's buffer may be refilled while another worker copies from it; so that worker asks again after
the copy, and discards what it copied if the panel has changed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from tilewright.kernels.numbers import ceil_div
from tilewright.pipeline.plan.inputs import Sharers
from tilewright.pipeline.worker.panels import Arrival, PanelKey, PanelPart, Placed, part_nbytes
from tilewright.pipeline.worker.units import SharedMemory

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 2.0
"""How long a worker waits for a part that another is reading before it reads the part itself."""

BEGIN_SECONDS = 0.1
"""How long a worker lets another wait for a panel that it is about to load, until it begins. Workers of a host do not
begin at the same moment; who reads all of its panels meanwhile reads twice, and stays ahead."""

HUNGRY_SECONDS = 0.02
"""The least for one whose GPU will soon have nothing to multiply, which waits no longer than reading would take."""

LOOK_SECONDS = 0.002

HOLDS_SECONDS = 0.02
"""How long a worker waits to hear whether others have panels of lines that it begins: several times what that takes."""

OF_A_TILE = 2
"""Lines that a tile's panels are of: a row of A and a column of B."""

LINES_KEPT = 2 * OF_A_TILE
"""Lines of which it is remembered what others have: of the tile whose panels are loaded, and of the one before."""

MOST_PANELS_UNASKED = 16
"""The most panels that a worker reads in a row without asking others, after they have had nothing for long."""


def parts_of(region: Sequence[slice], unit: Sequence[int], count: int) -> list[PanelPart | None]:
    """Cut a stored region into about equal parts for ``count`` workers; None for those that get none.

    unit: rows and columns of what is read as one piece, which is not cut. The cut is along the axis with more pieces.
    """
    shape = [side.stop - side.start for side in region]
    pieces = [ceil_div(side.stop, step) - side.start // step for side, step in zip(region, unit, strict=True)]
    axis = 0 if pieces[0] >= pieces[1] else 1
    start, step = region[axis].start, unit[axis]
    edges = [
        (start + shape[axis] * place // count + step // 2) // step * step - start for place in range(count)
    ]
    edges = [0, *(min(max(0, edge), shape[axis]) for edge in edges[1:]), shape[axis]]
    found: list[PanelPart | None] = []
    for low, high in itertools.pairwise(edges):
        part = (low, high, 0, shape[1]) if axis == 0 else (0, shape[0], low, high)
        found.append(part if low < high else None)
    return found


async def offer(arrival: Arrival | None, part: PanelPart) -> tuple[bytes, int, float | None] | None:
    """A panel's handle, its number, and for how many seconds all of it has been there (None where it is not), once
    ``part`` is there; None where it will not be.

    Does not wait for a part that this worker has not begun or gets from yet another worker.
    """
    if arrival is None or arrival.exported is None:
        return None
    if arrival.whole.done():
        there = arrival.whole
    elif arrival.own is not None and _covers(arrival.own, part):
        there = arrival.own_there
    else:
        return None
    done, _ = await asyncio.wait([asyncio.wrap_future(there)], timeout=PATIENCE_SECONDS)
    if not any(future.result() for future in done):
        return None
    return arrival.exported, arrival.number, arrival.held_seconds()


async def begun(
    find: Callable[[], Arrival | None], expects: Callable[[], bool], patience: float = BEGIN_SECONDS
) -> Arrival | None:
    """The arrival that ``find`` gives, if need be once loading the panel has begun: that is waited for, but not for
    longer than ``patience`` seconds, while this worker ``expects`` to load it. None where it has not begun."""
    loop = asyncio.get_running_loop()
    until = loop.time() + patience
    while (arrival := find()) is None or (arrival.exported is None and not arrival.whole.done()):
        if loop.time() > until or not expects():
            break
        await asyncio.sleep(LOOK_SECONDS)
    return arrival


def holds(arrival: Arrival | None) -> bool:
    """Whether all of a panel is there, and can be copied."""
    return arrival is not None and arrival.exported is not None and arrival.held_seconds() is not None


def _covers(part: PanelPart, other: PanelPart) -> bool:
    top, bottom, left, right = part
    return top <= other[0] and other[1] <= bottom and left <= other[2] and other[3] <= right


class Peers(Protocol):
    """A connection to other workers."""

    def ask(self, peer: str, question: str, run: str, key: PanelKey, what: Any) -> Future[Any]:
        """Ask a worker ``offer`` (what: a part, and how many seconds to wait until loading it begins), ``still`` (what:
        a number) or ``holds`` (what: nothing) about a panel of a run."""


class WorkerPeers:
    """A Dask worker's way to other workers, over the connections that it keeps to them anyway."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def ask(self, peer: str, question: str, run: str, key: PanelKey, what: Any) -> Future[Any]:
        async def call() -> Any:
            return await getattr(self._worker.rpc(peer), f"tilewright_{question}")(
                run=run, key=key, what=what
            )

        return asyncio.run_coroutine_threadsafe(call(), self._worker.loop.asyncio_loop)


def answer_peers(
    worker: Worker,
    arrival_of: Callable[[str, PanelKey], Arrival | None],
    expects: Callable[[str, PanelKey], bool],
) -> None:
    """Have a Dask worker answer the questions that other workers ask by `WorkerPeers` about panels in its process.

    Both functions are of a run and a panel: its arrival, and whether it is still to be loaded.
    """

    async def answer_offer(
        run: str, key: Sequence[Any], what: tuple[Sequence[int], float]
    ) -> tuple[bytes, int, float | None] | None:
        (top, bottom, left, right), patience = what
        wanted = run, _key(key)
        arrival = await begun(partial(arrival_of, *wanted), partial(expects, *wanted), patience)
        return await offer(arrival, (top, bottom, left, right))

    async def answer_still(run: str, key: Sequence[Any], what: int) -> bool:
        arrival = arrival_of(run, _key(key))
        return arrival is not None and arrival.number == what

    async def answer_holds(run: str, key: Sequence[Any], what: None) -> bool:
        return holds(arrival_of(run, _key(key)))

    worker.handlers.update(
        tilewright_offer=answer_offer, tilewright_still=answer_still, tilewright_holds=answer_holds
    )


def _key(parts: Sequence[Any]) -> PanelKey:
    operand, place, start = parts  # a list, where it has crossed the wire
    return operand, place, start


@dataclass(frozen=True)
class RemotePart:
    """A part of a panel that another worker reads, and the way to copy it here."""

    peer: str
    key: PanelKey
    part: PanelPart
    nbytes: int
    copy: Callable[[bytes, str], None]
    """Copies the part, given the handle and address of a worker that has it; returns when it is here."""


@dataclass
class _Lines:
    """Of a row of A, or a column of B, of tiles: what is known of other workers there."""

    ahead: str | None = None
    """The worker that had a panel of theirs before it was begun here: it is asked for whole panels."""
    pause: int = 0
    """What ``unasked`` was last set to: doubled each time nobody had anything, 0 once somebody had."""
    unasked: int = 0
    """How many panels to read before asking again."""


class Exchange:
    """What one worker copies from others in one run. Several threads may use it, each for its own panels."""

    def __init__(self, peers: Peers, run: str) -> None:
        self._peers, self._run = peers, run
        self._lock = threading.Lock()
        self.lost: frozenset[str] = frozenset()
        """Workers that did not answer or could not be copied from: not asked again in this run."""
        self._lines: OrderedDict[tuple[str, int], _Lines] = OrderedDict()
        """Of A and of B those that panels were last begun of, by operand and place in the grid. Of a matrix by its own
        transpose both sides of a tile are lines of A."""
        self._begun = 0
        """How many lines were begun."""

    def ahead(self, key: PanelKey, peers: Sequence[str]) -> str | None:
        """The worker among ``peers`` that is ahead with the lines of this panel, which is begun next: all of the panel
        is to be taken from there. None where none is known to be."""
        line = key[:2]
        with self._lock:
            if (lines := self._lines.get(line)) is not None:
                self._lines.move_to_end(line)
                return lines.ahead
            lines = self._lines[line] = _Lines()
            self._begun += 1
            if len(self._lines) > LINES_KEPT:
                self._lines.popitem(last=False)
        if self._begun > OF_A_TILE:  # at the start of a run nobody is ahead
            lines.ahead = self._holder(key, peers)
        return lines.ahead

    def asks(self, key: PanelKey) -> bool:
        """Whether to ask others for their parts of a panel, after `ahead`. Where they are elsewhere in k each question
        only costs time, so it is asked less and less often until somebody has something again."""
        with self._lock:
            lines = self._lines[key[:2]]
            if lines.unasked:
                lines.unasked -= 1
                return False
            return True

    def _holder(self, key: PanelKey, peers: Sequence[str]) -> str | None:
        """The first of these workers to answer that it has a panel. Who does not answer in time may have it or not:
        that shows when it is asked for its part."""
        asked = {
            answer: peer for peer in peers if (answer := self._ask(peer, "holds", key, None)) is not None
        }
        with suppress(TimeoutError):
            for answer in as_completed(asked, HOLDS_SECONDS):
                try:
                    if answer.result():
                        return asked[answer]
                except Exception as error:  # whatever went wrong, the files have the same bytes
                    self._lose(asked[answer], error)
        return None

    def take(
        self, wanted: Sequence[RemotePart], reading: float | None = None, begun: float = -math.inf
    ) -> list[RemotePart]:
        """Copy here what other workers have now, or begin to load soon; returns what has to be read instead. reading:
        seconds that this would take, about, where nothing else waits here to be multiplied. begun: when loading these
        panels began here, by `time.perf_counter`: who had all of one by then is ahead."""
        patience = BEGIN_SECONDS if reading is None else min(max(reading, HUNGRY_SECONDS), BEGIN_SECONDS)
        asked = [(one, self._ask(one.peer, "offer", one.key, (one.part, patience))) for one in wanted]
        copied: list[tuple[RemotePart, str, Future[Any] | None]] = []
        left: list[RemotePart] = []
        whole: dict[PanelKey, tuple[str, bytes, int]] = {}
        ahead: dict[tuple[str, int], str] = {}
        until = time.monotonic() + 2 * PATIENCE_SECONDS  # for all of them: they were asked at once

        def copy(one: RemotePart, peer: str, exported: bytes, number: int) -> None:
            if self._copied(one, peer, exported):
                copied.append((one, peer, self._ask(peer, "still", one.key, number)))
            else:
                left.append(one)

        missed: list[RemotePart] = []
        for one, answer in asked:
            offered = self._answer(one.peer, answer, until)
            if offered is None:
                missed.append(one)
                continue
            exported, number, held_seconds = offered
            if held_seconds is not None:
                whole[one.key] = one.peer, exported, number
                if held_seconds > time.perf_counter() - begun:
                    ahead[one.key[:2]] = one.peer
            copy(one, one.peer, exported, number)
        for one in missed:
            # The worker whose part this is has fallen behind, but another of those asked may have the whole panel.
            if one.key in whole and whole[one.key][0] not in self.lost:
                copy(one, *whole[one.key])
            else:
                left.append(one)
        until = time.monotonic() + PATIENCE_SECONDS
        left += [one for one, peer, answer in copied if not self._answer(peer, answer, until)]
        with self._lock:
            for line in {one.key[:2] for one in wanted}:
                if (lines := self._lines.get(line)) is None:  # long left behind
                    continue
                had = any(one.key[:2] == line and one not in left for one in wanted)
                if had or lines.ahead is None:
                    lines.pause = 0 if had else min(MOST_PANELS_UNASKED, 2 * lines.pause or 1)
                    lines.unasked = lines.pause
                    lines.ahead = ahead.get(line, lines.ahead)
                else:
                    lines.ahead = None  # it has let go of its panels, or been caught up with
        return left

    def _ask(self, peer: str, question: str, key: PanelKey, what: Any) -> Future[Any] | None:
        if peer in self.lost:
            return None
        try:
            return self._peers.ask(peer, question, self._run, key, what)
        except Exception as error:  # this worker itself is shutting down
            self._lose(peer, error)
            return None

    def _answer(self, peer: str, answer: Future[Any] | None, until: float) -> Any:
        if answer is None:
            return None
        if peer in self.lost:
            answer.cancel()
            return None
        try:
            return answer.result(max(0.0, until - time.monotonic()))
        except Exception as error:  # whatever went wrong, the files have the same bytes
            answer.cancel()
            self._lose(peer, error)
            return None

    def _copied(self, one: RemotePart, peer: str, exported: bytes) -> bool:
        try:
            one.copy(exported, peer)
        except Exception as error:
            self._lose(peer, error)
            return False
        return True

    def _lose(self, peer: str, error: Exception) -> None:
        with self._lock:
            if peer in self.lost:
                return
            self.lost |= {peer}
        expected = isinstance(error, (OSError, TimeoutError))  # the worker has gone
        logger.log(
            logging.INFO if expected else logging.WARNING,
            "panels that %s has are read from files for the rest of this run: %s: %s",
            peer,
            type(error).__name__,
            error,
        )


class PanelSharing:
    """A worker's part in a run whose workers share panels: what of a panel it reads, and what it takes from others."""

    def __init__(self, exchange: Exchange, memory: SharedMemory, worker: str) -> None:
        """``worker`` is this one's address."""
        self.exchange = exchange
        self._memory = memory
        self._worker = worker
        self._handles: dict[int, bytes | None] = {}

    def split(
        self,
        key: PanelKey,
        region: tuple[slice, slice],
        unit: tuple[int, int],
        panel: Placed,
        arrival: Arrival,
        sharers: Sequence[str],
    ) -> tuple[PanelPart | None, list[RemotePart]]:
        """The part of a panel that this worker reads, if any, and the parts that it asks other workers for.

        region: what the panel is of its stored operand; unit: as in `parts_of`.
        """
        whole = (0, panel.shape[0], 0, panel.shape[1])
        peers = [peer for peer in sharers if peer != self._worker]
        if not peers:
            return whole, []
        exported = self._exported(panel.flat)
        if exported is None:
            return whole, []
        parts: Iterable[tuple[str, PanelPart | None]]
        if (ahead := self.exchange.ahead(key, peers)) in peers:
            parts = [(ahead, whole)]
        elif self.exchange.asks(key):
            parts = zip(sharers, parts_of(region, unit, len(sharers)), strict=True)
        else:
            parts = [(self._worker, whole)]
        own: PanelPart | None = None
        others: list[RemotePart] = []
        for peer, part in parts:
            if part is not None and peer == self._worker:
                own = part
            elif part is not None:
                copy = partial(self._memory.copy, part=part, panel=panel)
                others.append(RemotePart(peer, key, part, part_nbytes(part, panel.dtype), copy))
        arrival.own = own
        arrival.exported = exported  # last: from here on others may copy it
        return own, others

    def close_unreached(self, sharers: Sharers) -> None:
        """Close other workers' memory, except that of these sharers of a tile which are not lost. A lost worker's GPU
        memory becomes free for its successor only when nobody has it open."""
        self._memory.close(keep=frozenset((*sharers.a, *sharers.b)) - self.exchange.lost)

    def _exported(self, flat: Any) -> bytes | None:
        """The handle by which other workers open a buffer, or None. Cached, since it takes a call to the driver."""
        if id(flat) not in self._handles:
            try:
                self._handles[id(flat)] = self._memory.export(flat)
            except Exception as error:  # others can read the same bytes from the files
                logger.warning("panels cannot be given to other workers: %s: %s", type(error).__name__, error)
                self._handles[id(flat)] = None
        return self._handles[id(flat)]
