"""A cluster on this host: what holds while its parts are started, and how they are ended."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Set
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from multiprocessing import active_children, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

import dask
from dask.utils import parse_timedelta
from distributed import Client, LocalCluster, Worker
from distributed.core import Status
from distributed.utils import LoopRunner, sync

from tilewright.kernels.numbers import counted
from tilewright.pipeline import config
from tilewright.pipeline.cluster.heartbeats import SETTING, SILENT_SECONDS
from tilewright.pipeline.cluster.hush import WORKERS, FailuresRaised
from tilewright.pipeline.cluster.node.places import LOOPBACK
from tilewright.pipeline.cluster.profiler import PROFILER_HANGS
from tilewright.pipeline.cluster.standstill import Standstill, is_stopped

logger = logging.getLogger(__name__)


class LoopbackWorker(Worker):
    """A worker in this process. It listens to no address whose host its HTTP server could take, and would be reached
    from everywhere; and it has no dashboard, for which Bokeh would be imported."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options | {"dashboard": False, "dashboard_address": f"{LOOPBACK}:0"})


CLOSE_SECONDS = 30
"""How long the end of a cluster that was started here is waited for: it takes its workers a few seconds."""
INTERRUPTED_SECONDS = 5
"""How long it is waited for behind Ctrl-C: workers that were told to give up what they do end within a second or two,
and others may never."""
HEARTBEAT_SECONDS = 5
"""How long workers that are to end are waited for to have ended their heartbeats: it takes them milliseconds."""
START_SECONDS = 10
"""How long a start that was given up is waited for. Cut short, it leaves more to be ended, and a worker process that
has just begun may print a traceback. It takes a second or two, more with many workers or on a busy host; one that
hangs never ends."""
LOOK_SECONDS = 0.05
"""How often it is looked whether a signal has come to a start."""
WAIT_SECONDS = 10
"""After how long it is said of a start that it is still waited for."""
JOIN_SECONDS = 120
"""How long worker processes may take in which no further one joins, unless ``death_timeout`` says how long they are to
try. They take seconds; where all that they import comes from a slow disk, a minute. Dask hangs for good where one of
them cannot be started, and where one is not there in its ``death_timeout``."""
STANDSTILL_LOOK_SECONDS = 1
"""How often it is looked whether worker processes stand still that are being started."""
FAILED = "Failed to start process: "
"""What Dask's nannies log, before an error, where a process cannot be started."""
FAILED_SECONDS = 0.5
"""How long a start is waited for in which that has happened, and its end: Dask may end it, and hangs in most cases."""
GIVE_UP_SECONDS = 3
"""How long it is then waited for without its worker processes: that takes a tenth of a second."""
STOPPED_SECONDS = 0.5
"""How long the end of a cluster is waited for before its processes that are stopped are killed: its nannies, which wait
for them for four seconds, know by then that they are to end."""
WORKER_PROCESS = "Dask Worker process"
"""How the names of Dask's worker processes begin."""
SETTLE_SECONDS = 0.02
"""Dask's connections wait up to 10 ms between two messages. Where the loop stops meanwhile Python tells, now and then,
of a timeout that nobody took notice of."""

ENDING = (Status.closing_gracefully, Status.closing, Status.closed, Status.failed)
"""States of a worker, or of the nanny that restarts one, which nothing follows but its end."""
LOST_TOPIC = "worker-fail-hard"
"""Under what Dask's workers tell the scheduler of errors that they end because of."""

_started: dict[int, frozenset[Any]] = {}
"""Clusters that were started here and are open, by `id`, and the names of their workers. To Dask, clusters of one name
are equal."""


@contextmanager
def client_of(server: LocalCluster) -> Iterator[Client]:
    """A client of a cluster that was just started here; at the end both are ended.

    Dask ends its parts while messages between them are under way, and tells of each that it then misses: so workers
    send no heartbeats any more when they are told to end, and the event loop goes on until nobody on it waits to send.
    """
    loop = LoopRunner(loop=server.loop)  # whose last user stops it
    loop.start()
    seconds = CLOSE_SECONDS
    _started[id(server)] = frozenset(server.worker_spec)
    try:
        try:
            with Client(server) as client:
                try:
                    yield client
                except KeyboardInterrupt:
                    seconds = INTERRUPTED_SECONDS
                    raise
                finally:
                    _end_heartbeats(client)
        finally:
            _close(server, seconds)
        sync(server.loop, asyncio.sleep, SETTLE_SECONDS)
    finally:
        del _started[id(server)]
        loop.stop()


def why_none_comes_back(client: Client) -> str:
    """Why no worker will join a cluster without workers; empty where one may.

    None joins a cluster that was started here, once its workers have ended for good: nobody else knows of it. A worker
    that died is started again by its nanny. If the nanny gave up, or was told that the worker ends, it ends too; one
    that takes longer than Dask waits (15 seconds) is ended and forgotten by the cluster.
    """
    server = client.cluster
    started = _started.get(id(server))
    if started is None or frozenset(server.worker_spec) != started:  # else somebody scales it
        return ""
    workers = dict(server.workers)
    if any(worker.status not in ENDING for worker in workers.values()):
        return ""
    last = ""
    try:
        if told := client.get_events(LOST_TOPIC):
            last = f"; the last error was {told[-1][1]['exception_text']}"
    except Exception as error:  # whatever it is, the workers are gone
        logger.debug("why workers ended is not known: %s: %s", type(error).__name__, error)
    return (
        f"{counted(len(started), 'worker')} started for it, and none is left{last}; see what they wrote to"
        " standard error; if they ran out of memory, give them more, or start fewer (n_workers, in a profile)"
    )


def _end_heartbeats(client: Client) -> None:
    """Have all workers end theirs; those that cannot be asked are gone, or go on."""
    if client.status != "running":
        return
    stopped = _stopped_processes(client.cluster)
    options = {"on_error": "return", "callback_timeout": HEARTBEAT_SECONDS}
    if stopped:
        options["workers"] = [worker for worker in client.nthreads() if worker not in stopped]
    try:
        client.sync(client.run, end_heartbeats, **options)
    except Exception as error:  # whatever it is, the cluster is about to end
        logger.debug("heartbeats go on: %s: %s", type(error).__name__, error)


async def end_heartbeats(dask_worker: Worker) -> None:
    """Send no heartbeat from this worker any more; returns when none is under way."""
    regular = dask_worker.periodic_callbacks.get("heartbeat")
    if regular is not None:
        regular.stop()
        await dask_worker.heartbeat()  # answered behind what was sent before


def _close(server: LocalCluster, seconds: float) -> None:
    """End a cluster. Dask fails at that, or waits for good, where a worker has just died and is being restarted:
    what the work has given by then, or the error that it ended with, is worth more."""
    closed: Future[None] = Future()

    def close() -> None:
        try:
            server.close(timeout=CLOSE_SECONDS)
        except BaseException as error:
            closed.set_exception(error)
        else:
            closed.set_result(None)

    # On a thread of its own: where Ctrl-C comes to the one that waits, Dask leaves the cluster half closed, and
    # Python's end waits ten seconds for the other half. A daemon, as in `start`.
    threading.Thread(target=close, name="end of a cluster", daemon=True).start()
    try:
        wait([closed], STOPPED_SECONDS)
        for pid in {} if closed.done() else _stopped_processes(server).values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait([closed], seconds)
    except KeyboardInterrupt:
        wait([closed], INTERRUPTED_SECONDS)
        raise
    finally:
        if not closed.done():
            server.shutdown_on_close = False  # else Dask tries to once more, when Python ends, and waits
    if closed.done() and not isinstance(closed.exception(), TimeoutError):
        closed.result()
    elif seconds == CLOSE_SECONDS:
        logger.warning(
            "the worker processes that were started did not end in time; they end with this process"
        )


def _stopped_processes(server: LocalCluster) -> dict[str, int]:
    """The addresses of the workers of a cluster whose processes are stopped, as by SIGSTOP, and those processes."""
    found = {}
    for nanny in list(server.workers.values()):
        pid, address = getattr(nanny, "pid", None), getattr(nanny, "worker_address", None)
        if pid is not None and address is not None and is_stopped(pid):
            found[address] = pid
    return found


def details_wanted() -> bool:
    """Whether Tilewright's own logs are wanted in every detail, as with ``--debug``."""
    return logging.getLogger("tilewright").isEnabledFor(logging.DEBUG)


class _Quiet:
    """Keeps what Dask logs below a level off the terminal while any cluster that was started here is open, and what its
    workers log of tasks that fail.

    Each of Dask's clusters does that too. But it puts back what it found when it ends, with others open beside it, and
    leaves alone what already is as it wants it.
    """

    LOGGERS = ("distributed", "bokeh")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: list[tuple[logging.Handler, int]] = []
        self._level = logging.NOTSET
        self._failures = FailuresRaised()

    @contextmanager
    def at(self, level: int) -> Iterator[None]:
        """In this block; of several at a time the first one's level holds, until all have ended."""
        with self._lock:
            if not self._users:
                self._hold(level)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._let_go()

    def _hold(self, level: int) -> None:
        handlers = [handler for name in self.LOGGERS for handler in logging.getLogger(name).handlers]
        streams = [handler for handler in handlers if isinstance(handler, logging.StreamHandler)]
        if not details_wanted():
            logging.getLogger(WORKERS).addFilter(self._failures)
        self._level = level
        self._before = [(handler, handler.level) for handler in streams if handler.level < level]
        for handler, _ in self._before:
            handler.setLevel(level)

    def _let_go(self) -> None:
        logging.getLogger(WORKERS).removeFilter(self._failures)
        for handler, level in self._before:
            if handler.level == self._level:  # else somebody wants it otherwise by now
                handler.setLevel(level)


_quiet = _Quiet()


@contextmanager
def quiet(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Keep a cluster of these options, which is open in this block, from logging more than they say, or warnings; gives
    the options, with what its worker processes are to log among them.

    Where less than warnings is logged in this process, it is no more there: worker processes set themselves up anew.
    """
    least = max(logging.WARNING, logging.getLogger("distributed").getEffectiveLevel())
    options = {"silence_logs": least} | options
    level = options["silence_logs"]
    with _quiet.at(level) if isinstance(level, int) and level else nullcontext():
        yield options


def start(kind: type[LocalCluster], options: dict[str, Any], *, patient: bool = True) -> LocalCluster:
    """A cluster that is ready. Ctrl-C, SIGTERM or another exception that comes to this thread meanwhile gives it up.

    Dask does not end a cluster that an exception has left half started, and tells so by a traceback when Python ends.
    So it starts on a thread that no signal's exception comes to. What has begun is waited for, a while, and ended. It
    is started again where a signal's handler only takes a note, and raises nothing.

    patient: whether it is started once more where a worker process stands still, which Dask would wait for.

    Raises
    ------
    RuntimeError
        Its workers do not join, or one of them stands still.
    Exception
        Whatever ``kind`` raises.
    """
    alone = options.get("processes") is False
    server: LocalCluster = object.__new__(kind)  # to have it in hand before it is ready
    started: Future[None] = Future()

    def begin() -> None:
        try:
            with nullcontext() if alone else _interrupts_kept_from_workers():
                server.__init__(**options)
        except BaseException as error:
            started.set_exception(error)
        else:
            started.set_result(None)

    others = _worker_processes()
    given_up = late = False
    try:
        with _no_profiler(), _signals_noted() as noted, _errors_noted() as errors:
            joining = _Joining(server, options, others)
            # A daemon: where it stands for good, Python does not wait for it at its end.
            threading.Thread(target=begin, name="start of a cluster", daemon=True).start()
            while not started.done() and not noted and joining.may_go_on() and not _process_error(errors):
                wait([started], LOOK_SECONDS)
            if _process_error(errors) and not noted:
                wait([started], FAILED_SECONDS)
            late = not started.done() and not noted
            if noted or late:
                given_up = True
                most = FAILED_SECONDS if _process_error(errors) else GIVE_UP_SECONDS
                _give_up(server, started, others, 0 if late else START_SECONDS, most)
        if late and patient and joining.given_up:
            logger.warning("%s; the workers are started anew, once", joining.told(errors))
            return start(kind, options, patient=False)
        if late:
            raise RuntimeError(joining.told(errors))
        if given_up:
            return start(kind, options)
        started.result()
    except BaseException:
        if not given_up and (not started.done() or started.exception() is None):
            _give_up(server, started, others)
        elif not given_up:
            _end_refused(server)
        raise
    return server


def _end_refused(server: LocalCluster) -> None:
    """End what an error of its options has left of a cluster. Dask ends one whose worker does not start, but none whose
    worker cannot be made, and warns of one that never began."""
    status = getattr(server, "status", Status.closed)
    if status not in (None, Status.closed):
        with suppress(Exception):
            server.close(timeout=CLOSE_SECONDS)
    server.status = Status.closed


def root_of(error: BaseException) -> BaseException:
    """What an error was raised because of, at the beginning."""
    passed = {id(error)}
    while (cause := error.__cause__ or error.__context__) is not None and id(cause) not in passed:
        error = cause
        passed.add(id(error))
    return error


def _process_error(errors: list[str]) -> str:
    """Why a worker process could not be started, if Dask has said so among these errors: it waits for it for good."""
    return next((error.removeprefix(FAILED) for error in errors if error.startswith(FAILED)), "")


class _Joining:
    """How the workers of a cluster that is being started come to it: says once that they are waited for, and which of
    them stand still."""

    def __init__(
        self, server: LocalCluster, options: dict[str, Any], others: Set[BaseProcess] = frozenset()
    ) -> None:
        """others: worker processes that were there before."""
        self._server, self._others = server, others
        self._alone = options.get("processes") is False
        self._what = "the worker has" if options.get("processes") is False else "worker processes have"
        death = parse_timedelta(options.get("death_timeout"))
        # All are started at once, so that each has been given up by then, and the others' end waited for.
        self._seconds = JOIN_SECONDS if death is None else death + START_SECONDS
        self._joined = 0
        self._begun = self._last = self._looked = time.monotonic()
        self._told = False
        self._standstill = Standstill(lambda: time.monotonic())
        self._deadline: float = config.get("worker-deadline")
        self._named: set[int] = set()
        self.given_up: dict[int, float] = {}
        """Worker processes that stood still for too long, and for how many seconds."""

    def may_go_on(self) -> bool:
        """Whether one has joined lately, or has time to, and none stands still for good; to be asked again and
        again."""
        now = time.monotonic()
        if not self._alone and now - self._looked >= STANDSTILL_LOOK_SECONDS:
            self._looked = now
            self._look_at_processes()
        scheduler = getattr(self._server, "scheduler", None)  # half started, it lacks this or that
        joined = len(getattr(scheduler, "workers", None) or ())
        if joined > self._joined:  # one that dies and comes back is no further one
            self._joined, self._last = joined, now
        if now - self._begun >= WAIT_SECONDS and not self._told:
            self._told = True
            logger.warning(
                "%s not started yet after %.0f s (%d there); it goes on when all are, and gives up when no further one"
                " joins within %.0f s",
                *(self._what, now - self._begun, joined, self._seconds),
            )
        return now - self._last < self._seconds and not self.given_up

    def _look_at_processes(self) -> None:
        """Name those that stand still, and give them up behind the deadline. Those that have joined are among them:
        Dask waits for the word of each that it has."""
        pids = [process.pid for process in _worker_processes() - self._others if process.pid is not None]
        quiet = self._standstill.look(pids)
        for pid, seconds in quiet.items():
            if seconds >= min(SILENT_SECONDS, self._deadline / 2) and pid not in self._named:
                self._named.add(pid)
                logger.warning(
                    "worker process %d stands still as it starts, for %.0f s now: it is stopped, or waits for a disk;"
                    " it is given up after %g s (%s)",
                    *(pid, seconds, self._deadline, SETTING),
                )
        self.given_up = {pid: seconds for pid, seconds in quiet.items() if seconds >= self._deadline}

    def told(self, errors: list[str]) -> str:
        """Why it does not go on; ``errors``: what Dask has said meanwhile."""
        if self.given_up:
            named = ", ".join(map(str, sorted(self.given_up)))
            return (
                f"worker process {named} stood still for {max(self.given_up.values()):.0f} s as it started, and is"
                f" given up ({SETTING}); see what stops it, or whether the disk answers that it imports from"
            )
        if failure := _process_error(errors):
            room = (
                "; free room in /dev/shm, where each takes some"
                if os.strerror(errno.ENOSPC) in failure
                else ""
            )
            return f"{self._joined} joined, and one could not be started: {failure}{room}"
        why = f"; Dask says: {errors[0]}" if errors else ""
        return (
            f"{self._joined} joined, and no further one within {self._seconds:g} s{why}; see what they say with"
            " --debug, or from Python with silence_logs: false in a profile, and give them longer with death_timeout:"
            " 10 minutes"
        )


@contextmanager
def _errors_noted() -> Iterator[list[str]]:
    """What Dask logs as an error in this block, where it is logged or not."""
    noted: list[str] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info else None
            error = None if error is None else root_of(error)
            why = "" if error is None else f": {type(error).__name__}: {error}"
            noted.append(f"{record.getMessage()}{why}")

    theirs = logging.getLogger("distributed")
    handler = Noting(logging.ERROR)
    with ExitStack() as stack:
        if theirs.level > logging.ERROR:  # the command has it so: what nobody was to see stays unseen
            for one in theirs.handlers:
                stack.callback(one.setLevel, one.level)
                one.setLevel(max(one.level, theirs.level))
            stack.callback(theirs.setLevel, theirs.level)
            stack.callback(setattr, theirs, "propagate", theirs.propagate)
            theirs.propagate = False
            theirs.setLevel(logging.ERROR)
        theirs.addHandler(handler)
        stack.callback(theirs.removeHandler, handler)
        yield noted


@contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM that come in this block, in order. The first is delivered again at its end, and no more come
    out of it: a second one, that cut the end of a start short, would leave processes that print tracebacks."""
    noted: list[int] = []
    before = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler):  # else it ends the process, or is ignored
                    before[number] = handler
                    signal.signal(number, lambda number, frame: noted.append(number))
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if noted:
            signal.raise_signal(noted[0])


def _give_up(
    server: LocalCluster,
    started: Future[None],
    others: set[BaseProcess],
    seconds: float = START_SECONDS,
    most: float | None = None,
) -> None:
    """End a cluster that was to start, however far it has come; ``seconds``: it may take as long to do that. most: how
    long it is then waited for without its worker processes, `GIVE_UP_SECONDS` by default."""
    try:
        wait([started], seconds)
        deadline = time.monotonic() + (GIVE_UP_SECONDS if most is None else most)
        while not started.done() and time.monotonic() < deadline:
            # Without its workers Dask ends the rest by itself; it may be that some are yet to be started.
            for process in _worker_processes() - others:
                process.kill()
            wait([started], 0.05)
        if started.done() and started.exception() is None:
            _close(server, INTERRUPTED_SECONDS)
    finally:
        server.shutdown_on_close = False  # else Dask tries to once more, when Python ends, and waits


def _worker_processes() -> set[BaseProcess]:
    """Those that Dask has started from this process."""
    return {process for process in active_children() if process.name.startswith(WORKER_PROCESS)}


def _no_profiler() -> AbstractContextManager[Any]:
    """Workers that are started in this block do not run Dask's profiler, where it can make this Python hang.

    They read that when they start; worker processes get the configuration of this one.
    """
    return dask.config.set({"distributed.worker.profile.enabled": False}) if PROFILER_HANGS else nullcontext()


@contextmanager
def _interrupts_kept_from_workers() -> Iterator[None]:
    """Worker processes that are started in this block leave Ctrl-C to the process that started them.

    A terminal sends it to all of them at once, and a worker that obeyed it would die in the middle of closing. A
    blocked signal stays blocked in what a thread starts, threads and processes; other threads of this process take it.
    """
    # Starting the tracker unblocks the signal again in the thread that does it; so it is started first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
