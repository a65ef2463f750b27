"""The compute stage: multiplies pairs of panels, as they come, into the tiles of their jobs.

A tile's last panels, where all of them are there, are multiplied slab by slab: first all of them into its first rows,
then into the next. So the tile's first rows are written while its last ones are multiplied.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from tilewright.pipeline.plan.pairs import PRODUCT, Form, Forms
from tilewright.pipeline.plan.slabs import SLAB_PANELS, cuts_of, slabs_of
from tilewright.pipeline.plan.told import Product
from tilewright.pipeline.store.content import panel_content
from tilewright.pipeline.worker.fusion import accumulators
from tilewright.pipeline.worker.panels import PanelBuffer, Placed, ReadContent
from tilewright.pipeline.worker.tile_job import (
    Clock,
    FinishedSlab,
    FirstPair,
    Loaded,
    PanelPair,
    ReadPanel,
    TileJob,
)
from tilewright.pipeline.worker.units import DeviceUnit


@dataclass
class _Running:
    """Pairs of panels of one job being multiplied, or enqueued behind those before."""

    pairs: Sequence[PanelPair]
    clock: Clock
    wait: Callable[[], None] | None
    """Waits until they are multiplied; None where nothing is pending."""
    hashing: Sequence[tuple[ReadPanel, Callable[[], list[int]]]]
    """Those of them that are being hashed, and what waits for the hashes of their parts."""
    ends: bool = False
    """Whether they are the last of their job."""


class ComputeStage:
    """Multiplies on one thread, and on a GPU keeps one product enqueued behind the one that runs.

    slots: buffers for tiles; a job gets one with its first panels. release: called of a pair once it is multiplied, or
    will not be.
    """

    def __init__(
        self,
        product: Product,
        unit: DeviceUnit,
        slots: SimpleQueue[Any],
        release: Callable[[PanelPair], None],
    ) -> None:
        self._plan, self._look = product.plan, product.look
        self._unit = unit
        self._slots = slots
        self._release = release
        self._lines = product.plan.layout.c()
        self._hermitian = product.plan.hermitian
        self._transforms, self._forms = product.fused.transforms, product.fused.forms
        self._transformed: list[tuple[PanelBuffer, tuple[slice, slice], Form] | None] = [None, None]
        """What the scratch panels of A and of B hold."""
        self._earlier: Any = None
        """The buffer for sums over the parts of k before the one that is summed."""
        self._running: _Running | None = None
        self._ahead: deque[Loaded | None] = deque()
        """What has come, and is not begun."""
        self._multiplied = 0.0
        """When the last panels were multiplied."""

    def run(self, loaded: SimpleQueue[Loaded | None], multiplied: SimpleQueue[TileJob | None]) -> None:
        """Multiply what is loaded, and pass each job on when its last panels are multiplied, until None has come; pass
        that on too."""
        # The next panels are enqueued while those before are multiplied, so that a GPU does not wait for this thread,
        # which must reacquire the interpreter's lock whenever it has slept.
        while True:
            if not self._ahead and loaded.empty():
                self._finish(multiplied)
            if (item := self._ahead.popleft() if self._ahead else loaded.get()) is None:
                break
            job = item.job
            if job.target is None:
                if self._slots.empty():
                    self._finish(multiplied)  # the slot may have to come from the tile of these panels
                # No local variable: errors hold the frames of their callers, and those would hold the slot.
                job.target = Placed(self._slots.get(), (job.tile.rows, job.tile.columns), self._lines)
                job.look = self._unit.look(job.target.flat)
            if isinstance(item, FirstPair):
                self._prepare(item.pair, job.target)
            elif isinstance(item, PanelPair):
                pairs = self._with_the_last(item, loaded)
                enqueued = self._enqueue(pairs, job.target, multiplied)
                self._finish(multiplied)
                self._running = enqueued
                if enqueued.wait is None:
                    self._finish(multiplied)
            else:
                self._end(job, job.target, multiplied)
        self._finish(multiplied)
        multiplied.put(None)

    def _prepare(self, pair: PanelPair, target: Placed) -> None:
        """Get the kernels ready while the first panels are read: compiling takes seconds, loading tens of ms."""
        job, clock = pair.job, Clock()
        try:
            a = self._unit.fusion.scratch(0, pair.a.placed)
            one = all(self._is_one(pair, forms) for forms in self._forms)
            b = a if one else self._unit.fusion.scratch(1, pair.b.placed)
            cuts = cuts_of(self._plan, job.tile.rows)
            self._unit.prepare(a, b, target, pair.a is pair.b, cuts if len(cuts) > 1 else ())
            for panel in pair.read:
                if panel.parts:
                    self._unit.prepare_hashes(panel.buffer.placed, panel.parts)
        except BaseException as error:
            job.error = job.error or error
        job.count("compute", "compute", clock)
        self._multiplied = time.perf_counter()

    def _is_one(self, pair: PanelPair, forms: Forms = PRODUCT) -> bool:
        """Whether one panel is multiplied by itself, as it is or transformed once."""
        return pair.a is pair.b and not self._hermitian and forms[0] == forms[1]

    def _operand(self, operand: int, buffer: PanelBuffer, form: Form) -> Placed:
        """A panel as it is multiplied, transformed unless its scratch panel holds that from the product before."""
        if self._transforms[operand] is None:
            return buffer.placed
        assert buffer.region is not None, "set by who loads it"
        what = buffer, buffer.region, form
        if self._transformed[operand] == what:
            return self._unit.fusion.scratch(operand, buffer.placed)
        self._transformed[operand] = None  # if this fails
        place = self._unit.fusion.transform(operand, buffer.placed, buffer.region, form)
        self._transformed[operand] = what
        return place

    def _with_the_last(self, pair: PanelPair, loaded: SimpleQueue[Loaded | None]) -> list[PanelPair]:
        """A pair, and where it is one of its job's last few and all after it have come, those too."""
        if not 0 < pair.behind < SLAB_PANELS or len(slabs_of(self._plan, pair.job.tile)) == 1:
            return [pair]
        with suppress(Empty):
            while True:
                self._ahead.append(loaded.get_nowait())
        last = [item for item, _ in zip(self._ahead, range(pair.behind), strict=False)]
        pairs = [item for item in last if isinstance(item, PanelPair) and item.job is pair.job]
        if len(pairs) < pair.behind:
            return [pair]
        for _ in pairs:
            self._ahead.popleft()
        return [pair, *pairs]

    def _enqueue(
        self, pairs: Sequence[PanelPair], target: Placed, multiplied: SimpleQueue[TileJob | None]
    ) -> _Running:
        """Enqueue the products of a job's panels of A and of B, unless it has failed, and the hashing of what was read
        of them: also of a failed job, since others find its panels here. Pass the job on already if its tile is
        finished by that, slab by slab."""
        job, clock = pairs[0].job, Clock()
        wait = None
        hashing: list[tuple[ReadPanel, Callable[[], list[int]]]] = []
        if job.error is None:
            try:
                try:
                    self._multiply(pairs, target, multiplied)
                finally:
                    wait = self._unit.passed()  # what was enqueued before an error still reads the panels
            except BaseException as error:
                job.error = error
        try:
            for panel in (panel for pair in pairs for panel in pair.read):
                if panel.parts:
                    hashing.append((panel, self._unit.hashed(panel.buffer.placed, panel.parts)))
        except BaseException as error:
            job.error = job.error or error
        return _Running(pairs, clock, wait, hashing)

    def _multiply(
        self, pairs: Sequence[PanelPair], target: Placed, multiplied: SimpleQueue[TileJob | None]
    ) -> None:
        job = pairs[0].job
        begins_part = pairs[0].begins_part  # of a tile without slabs, whose pairs come one by one
        if begins_part:
            target = self._set_aside(job, target)
        cuts = cuts_of(self._plan, job.tile.rows) if pairs[0].behind < SLAB_PANELS else ()
        ends = len(cuts) > 1 and pairs[-1].behind == 0 and len(slabs_of(self._plan, job.tile)) > 1
        for rows in cuts if len(cuts) > 1 else (None,):
            for place, pair in enumerate(pairs):
                for sums, forms in zip(accumulators(self._plan, target), self._forms, strict=True):
                    left = self._operand(0, pair.a, forms[0])
                    right = left if self._is_one(pair, forms) else self._operand(1, pair.b, forms[1])
                    accumulate = job.panels + place > 0 and not begins_part
                    diagonal = pair.a is pair.b
                    job.kernels |= self._unit.multiply(left, right, sums, accumulate, diagonal, rows)
            if rows is not None and ends:
                if job.slabs is None:
                    job.slabs = SimpleQueue()
                    multiplied.put(job)
                job.slabs.put(FinishedSlab(rows, self._unit.passed()))
        job.panels += len(pairs)
        for pair in pairs:
            # Those of the panels that this tile looks at for all tiles.
            for operand, looks in enumerate(self._plan.looks(job.tile)):
                if looks and self._look[operand] and job.look is not None:
                    job.look.at_panel(operand, (pair.a, pair.b)[operand].placed)

    def _set_aside(self, job: TileJob, target: Placed) -> Placed:
        """Add what a tile holds, the sum over a part of k, to those of the parts before; returns the tile in which the
        next part is summed. On a CPU alone (`MatmulPlan.k_tasks`), where what was multiplied is there."""
        if self._earlier is None:
            self._earlier = self._unit.allocate(len(target.flat), target.dtype)
        if job.has_earlier:
            _add(target.flat, self._earlier)
            return target
        job.has_earlier = True
        job.target = replace(target, flat=self._earlier)
        self._earlier = target.flat
        return job.target

    def _finish(self, multiplied: SimpleQueue[TileJob | None]) -> None:
        """Wait until the panels that are running, if any, are multiplied; release them, and pass the job on if they
        were its last."""
        running, self._running = self._running, None
        if running is None:
            return
        job = running.pairs[0].job
        try:
            if running.wait is not None:
                running.wait()
        except BaseException as error:
            job.error = job.error or error
        self._take_in_contents(running)
        late = max(0.0, self._multiplied - running.clock.start)  # the panels before ran until then
        job.count("compute", "compute", Clock(running.clock.begin + late, running.clock.start + late))
        self._multiplied = time.perf_counter()
        for pair in running.pairs:
            self._release(pair)
        if running.ends:
            self._pass_on(job, multiplied)

    @staticmethod
    def _take_in_contents(running: _Running) -> None:
        """Note for the job what its panels hold; wait for those that are being hashed."""
        job = running.pairs[0].job
        for panel, hashes in running.hashing:
            try:
                (top, _, left, _), parts = panel.corners, panel.parts
                places = [(part[0] + top, part[1] + top, part[2] + left, part[3] + left) for part in parts]
                found = list(zip(places, hashes(), strict=True))
                panel.buffer.content = ReadContent(panel_content(panel.role, panel.corners, found))
            except BaseException as error:
                job.error = job.error or error
        for buffer in dict.fromkeys(buffer for pair in running.pairs for buffer in (pair.a, pair.b)):
            if buffer.content is not None:
                job.contents.append(buffer.content)

    def _end(self, job: TileJob, target: Placed, multiplied: SimpleQueue[TileJob | None]) -> None:
        """Pass a job on whose panels have all come, at once or when the last of them are multiplied."""
        if job.panels == 0 and job.error is None:  # k = 0: the empty sum
            try:
                self._unit.clear(target)
            except BaseException as error:
                job.error = error
        if job.has_earlier and job.error is None:
            _add(self._earlier, target.flat)
        if self._running is not None and self._running.pairs[0].job is job:
            self._running.ends = True
        else:
            self._pass_on(job, multiplied)

    @staticmethod
    def _pass_on(job: TileJob, multiplied: SimpleQueue[TileJob | None]) -> None:
        """Say that a job's tile is multiplied, or never will be."""
        if job.slabs is None:
            multiplied.put(job)
        else:
            job.slabs.put(None)


def _add(sums: np.ndarray, total: np.ndarray) -> None:
    """Add a tile's buffer to another, what was never written included."""
    with np.errstate(all="ignore"):  # as on a device
        total += sums
