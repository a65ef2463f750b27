"""Load, compute, write: the way of a tile through one worker, whose stages overlap over buffers allocated once.

A tile's job passes three stages, each with threads of its own and a queue before it:

    jobs -> LoadStage (1 thread) -> loaded -> ComputeStage (1 thread) -> multiplied -> WriteStage (a thread a tile)

So tiles are loaded and multiplied in the order in which they came, and two tiles never wait for each other's buffers.
While tiles are written, the next is multiplied, and the panels of the one after it are read. Loading and writing use
pools of threads that each move one part at a time, on a GPU through a pinned lane. Memory is bounded by the buffers,
which the plan counted: the load stage's for panels, and one slot for each tile that is multiplied or written.

What fails in a stage is kept in the job (`TileJob.error`). The job still takes the rest of its way, on which nothing
more is done for it than to give back the buffers it has; then whoever waits for it gets the error. Other jobs go on.
A run is closed by a None in the first queue: each stage ends when it meets that, behind all jobs, and passes it on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

from tilewright.pipeline.plan.grid import Tile
from tilewright.pipeline.plan.inputs import Sharers
from tilewright.pipeline.plan.told import Product, TileReport
from tilewright.pipeline.threads import clear_frames
from tilewright.pipeline.worker.compute_stage import ComputeStage
from tilewright.pipeline.worker.gpu_unit import CudaUnit
from tilewright.pipeline.worker.load_stage import LoadStage
from tilewright.pipeline.worker.panels import Arrival, PanelKey
from tilewright.pipeline.worker.peers import Peers
from tilewright.pipeline.worker.tile_job import Loaded, TileJob
from tilewright.pipeline.worker.units import DeviceUnit, HostUnit, pool_of
from tilewright.pipeline.worker.write_stage import WriteStage


class TileEngine:
    """The stages of one worker for one run. ``multiply`` may be called from several threads; ``close`` ends it.

    worker: this one's address. peers: the connection to workers that share panels with this one, if any do.
    """

    def __init__(self, product: Product, worker: str, peers: Peers | None = None) -> None:
        self.product = product
        self.failed = False
        """Whether a tile has failed or was abandoned."""
        self._worker = worker
        self._closed = False
        self._entrance = threading.Lock()
        """Held while a job is queued or the queue is closed: a job behind the end marker would never be answered."""
        self._jobs: SimpleQueue[TileJob | None] = SimpleQueue()
        loaded: SimpleQueue[Loaded | None] = SimpleQueue()
        multiplied: SimpleQueue[TileJob | None] = SimpleQueue()
        self.unit: DeviceUnit = CudaUnit(product) if product.device == "cuda" else HostUnit(product)
        try:
            self.load = LoadStage(product, self.unit, worker, peers)
            self.slots = pool_of(self.unit.tile_slots())
            """The buffers for tiles that no job has."""
            compute = ComputeStage(product, self.unit, self.slots, self.load.release)
            self._write = WriteStage(product, self.unit, self.slots, self._answer)
        except BaseException:
            self.unit.close()  # returns its pinned lanes, for the next attempt
            raise
        stages: list[tuple[str, Callable[[], None]]] = [
            ("load", partial(self.load.run, self._jobs, loaded)),
            ("compute", partial(compute.run, loaded, multiplied)),
            # As many threads write as there are tile buffers, so that at the end all tiles are written at once.
            *[("write", partial(self._write.run, multiplied))] * product.plan.c_buffers,
        ]
        self._threads = [
            threading.Thread(target=run, name=f"tilewright-{name}", daemon=True) for name, run in stages
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # no thread left: those that started would wait for ever
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            self.close()
            self.free()
            raise

    def multiply(
        self,
        tile: Tile,
        part: int = 0,
        sharers: Sharers | None = None,
        queued: Callable[[], object] = lambda: None,
    ) -> TileReport:
        """Compute and store one tile, or return its sum over one part of k when the plan has several.

        sharers: workers that need the same panels and may have them already. queued: called once the tile has its place
        behind earlier ones. Returns when the tile is stored. Raises what the failing stage raised.
        """
        job = TileJob(tile, part, sharers or Sharers())
        with self._entrance:
            if self._closed:
                raise CancelledError("this worker's part in the run is over")
            self.load.expect(tile)
            self._jobs.put(job)
        queued()
        try:
            return job.done.result()
        finally:
            del job  # it holds its error, and that this frame

    def _answer(self, job: TileJob) -> None:
        """Answer whoever waits for a job, with its report or its error.

        What the frames of the error hold, buffers among it, is let go of here: nobody knows how long the error lives,
        and Dask ties it up in a cycle of references.
        """
        error, job.error = job.error, None
        if error is None:
            job.done.set_result(job.report(self._worker))
            return
        self.failed = True
        with suppress(Exception):  # a GPU that is lost has no memory to free
            self.unit.attach()
        clear_frames(error)
        job.done.set_exception(error)

    def arrival(self, key: PanelKey) -> Arrival | None:
        """The arrival of a panel here, for another worker; None if it is not, or no longer, here."""
        return self.load.arrival(key)

    def expects(self, key: PanelKey) -> bool:
        """Whether loading a panel is still to begin here, as far as that is known."""
        return self.load.expects(key)

    def close(self, *, abandon: bool = False) -> None:
        """End every stage after the jobs already queued; with ``abandon`` those stop at their next panel, unwritten,
        and wait no longer for what a store has not answered.

        It may be called repeatedly and concurrently: each call returns when all has ended, and one that abandons does
        so for all. The buffers last until `free`, for other workers that still copy from them.
        """
        if abandon:
            self.load.abandon()
        with self._entrance:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self.load.close()
        self._write.close()
        self.unit.close()

    def free(self) -> None:
        """Let go of the buffers of a closed engine; call it from a thread that is attached to the GPU.

        The engine itself may live on, since the error of a tile holds frames that refer to it.
        """
        self.load.free()
        while not self.slots.empty():
            self.slots.get()
