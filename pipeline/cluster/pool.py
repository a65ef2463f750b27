"""Places in a worker's thread pool: a task that only waits gives up its own, so that others can work meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from tilewright.pipeline.cluster.here.worker import HereWorker, current_worker
from tilewright.pipeline.cluster.identity import address_of
from tilewright.pipeline.errors import ClusterError


def make_room(least: int) -> None:
    """Leave this thread's place, by Dask's word secede, if the worker has fewer than ``least`` threads, so that it
    starts its next task while this one waits. If the system has no thread left for that, the next task waits."""
    worker = current_worker()
    if worker.state.nthreads >= least:
        return
    if isinstance(worker, HereWorker):
        with suppress(RuntimeError):
            worker.leave_place()
    else:
        from distributed import secede

        try:
            secede()
        except RuntimeError:
            if not _stay():
                raise


def _stay() -> bool:
    """Undo `secede`: return this thread to Dask's pool. The pool counts the thread that could not be started and would
    otherwise never start another. False, with nothing done, if Dask's pool does not keep its threads as expected."""
    from distributed.threadpoolexecutor import thread_state, threads_lock

    with threads_lock:
        threads = getattr(getattr(thread_state, "executor", None), "_threads", None)
        if not isinstance(threads, set) or not hasattr(thread_state, "proceed"):
            return False
        threads.difference_update([thread for thread in list(threads) if thread.ident is None])
        threads.add(threading.current_thread())
        thread_state.proceed = True
        return True


@contextmanager
def out_of_the_pool(workers_there: Callable[[], Collection[str]]) -> Iterator[None]:
    """Where this thread runs a task of one of these workers, leave the worker's pool in this block, as Dask's
    `worker_client` does: else tasks that the block waits for may wait for the place that it takes up.

    workers_there: gives the addresses of the workers of the cluster that the block gives tasks to.

    A thread that has left its pool already stays out of it; one that is none of Dask's has none to leave.

    Raises
    ------
    ClusterError
        This is the event loop of such a worker, which would do nothing else meanwhile; or the system has no thread left
        that could take the place of this one.
    """
    try:
        worker = current_worker()
    except ValueError:  # no task
        yield
        return
    if address_of(worker) not in workers_there():
        yield
        return
    where = f"a task of worker {address_of(worker)} gives work to its own cluster"
    if worker.loop.asyncio_loop is _running_loop():
        raise ClusterError(
            f"{where} on the worker's event loop, which could then do none of it; make the task a function that is not"
            " async"
        )
    from distributed import rejoin, secede
    from distributed.threadpoolexecutor import thread_state

    if not getattr(thread_state, "proceed", False):
        yield
        return
    try:
        secede()
    except RuntimeError as error:
        if not _stay():
            raise
        raise ClusterError(
            f"{where}, and no thread could be started that would do it meanwhile ({error}); allow more threads there"
            ' (ulimit -u), or give the work a cluster of its own (cluster="local")'
        ) from error
    try:
        yield
    finally:
        with suppress(RuntimeError):  # the worker is closing, and its pool takes nothing any more
            rejoin()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
