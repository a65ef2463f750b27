"""What workers answer to a question, and what tasks give back: the worker's end of both, and the client's, where errors
become ours."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError
from concurrent.futures import Future as ConcurrentFuture
from concurrent.futures import wait as futures_wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from tilewright.kernels.gpu.memory import is_out_of_memory
from tilewright.kernels.numbers import counted
from tilewright.pipeline import pickling as pickle
from tilewright.pipeline.cluster import identity
from tilewright.pipeline.cluster.heartbeats import Heartbeats, heartbeats_of
from tilewright.pipeline.cluster.here.client import HereClient, HereFuture
from tilewright.pipeline.cluster.here.worker import current_worker, dask_is_there
from tilewright.pipeline.errors import (
    ClusterError,
    DamagedError,
    DeviceMemoryError,
    DocumentError,
    RunEndedError,
    TaskError,
    TilewrightError,
)

if TYPE_CHECKING:
    from distributed import Client, Future

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Answer = TypeVar("Answer")

MOST_NAMED = 3
"""Workers that a message names."""

LOOK_SECONDS = 1.0
"""How often it is looked, while an answer is waited for, who is silent."""

CONNECTION_LOST = "scheduler-connection-lost"
"""The reason that Dask gives for all tasks that it cancels then."""

LASTING = (DamagedError, DocumentError, RunEndedError)
"""Errors that a retry cannot help: they are about what is stored, or nobody waits for the answer any more."""


class WorkersKilledError(TaskError):
    """A task took down every worker that tried it. Callers add how to make such a task smaller."""


class OtherCodeError(ClusterError):
    """There are workers that run another Tilewright than this process."""


class ResultLateError(Exception):
    """A result has not come in time: its worker was lost with it, or it is large."""


class NotHeardError(OSError):
    """A worker has not answered, and was not waited for."""


def answer_of(client: Client, ask: Callable[[], Answer]) -> Answer:
    """What the scheduler answers; ClusterError where it does not, or where the client was closed meanwhile.

    ``ask`` is called where the client gives coroutines, on its event loop, if the cluster is listened to
    (`heartbeats.listened_to`): then nothing is waited for once the connection is lost, and who is silent is named, and
    no longer waited for behind the deadline.
    """
    with cluster_errors(client):
        return unchanged_answer_of(client, ask)


def unchanged_answer_of(client: Client, ask: Callable[[], Answer]) -> Answer:
    """As ``answer_of``, but what Dask raises is raised as it is."""
    check_connected(client)
    if (heartbeats := _listening_to(client)) is None:
        return ask()
    answer: ConcurrentFuture[Answer] = begin(client, _asked(ask))
    try:
        while not answer.done():
            futures_wait([answer], LOOK_SECONDS)
            if not answer.done():
                check_connected(client)
                heartbeats.look()
        return answer.result()
    finally:
        answer.cancel()  # where nobody waits for it any more


def _listening_to(client: Client) -> Heartbeats | None:
    """What listens to a client's cluster, if anything does in this thread: nothing to this process itself."""
    return None if isinstance(client, HereClient) else heartbeats_of(client)


def check_connected(client: Client) -> None:
    """Raise ClusterError where the client has no scheduler any more. Dask would try to reach it for half a minute, and
    again for each question; it has cancelled all tasks by then."""
    if client.status != "running":
        raise _closed(client)


async def _asked(ask: Callable[[], Any]) -> Any:
    found = ask()
    return await found if asyncio.iscoroutine(found) else found


@contextmanager
def cluster_errors(client: Client) -> Iterator[None]:
    """ClusterError for what Dask raises in this block where the scheduler has gone, or the client was closed."""
    try:
        yield
    except TilewrightError:
        raise
    except Exception as error:
        from distributed.comm import CommClosedError

        # Dask raises CommClosedError for a connection that breaks, and a plain OSError for one that cannot be made.
        # Subclasses of OSError, such as TimeoutError, are answers of a scheduler that is there.
        if isinstance(error, CommClosedError) or type(error) is OSError:
            raise ClusterError(
                f"the scheduler went away: {error}; bring a cluster up and run it again"
            ) from error
        # The error of a client without a scheduler depends on how far it has come with closing.
        if client.status == "running":
            raise
        raise _closed(client) from error


def _lost(client: Client) -> ClusterError:
    where = client.scheduler.address
    return ClusterError(
        f"the connection to the scheduler at {where} was lost; bring a cluster up and run it again"
    )


def _closed(client: Client) -> ClusterError:
    if client.status == "connecting":  # Dask's word for a connection that was lost
        return _lost(client)
    return ClusterError(
        f"the client is {client.status}: its scheduler went away, or somebody closed it; connect to a cluster anew and"
        " run it again"
    )


def cancel(client: Client, futures: list[Future]) -> None:
    """Cancel what is outstanding. Where the scheduler or the client is gone, so are the tasks, and the error that says
    so is being raised already: none is raised in its place."""
    try:
        answer_of(client, partial(client.cancel, futures, force=True))
    except ClusterError as error:
        logger.debug("%d tasks need not be cancelled: %s", len(futures), error)


def run_on_all(
    client: Client, function: Callable[..., Any], *arguments: Any, unawaited: Collection[str] = ()
) -> dict[str, Any]:
    """The function's result on each worker, by address, or the error that it, or the connection, failed with. Where the
    cluster is listened to, a worker that is silent, or one of ``unawaited``, is asked too, and not waited for: a
    NotHeardError stands in for its answer.

    Raises ClusterError where the scheduler does not answer.
    """
    heartbeats = _listening_to(client)
    if heartbeats is None:
        answers: dict[str, Any] = answer_of(
            client, partial(client.run, function, *arguments, on_error="return")
        )
        return answers

    async def ask(worker: str) -> Any:
        found = await client.run(function, *arguments, workers=[worker], on_error="return")
        return found[worker]

    with cluster_errors(client):
        workers = answer_of(client, client.nthreads)
        asked = {worker: begin(client, ask(worker)) for worker in workers}
        while left := {worker for worker, answer in asked.items() if not answer.done()}:
            if not left - heartbeats.silent().keys() - set(unawaited):
                break
            futures_wait([asked[worker] for worker in left], LOOK_SECONDS, FIRST_COMPLETED)
            check_connected(client)
            heartbeats.look()
    return {worker: _answer_or_error(answer) for worker, answer in asked.items()}


def _answer_or_error(answer: ConcurrentFuture[Any]) -> Any:
    if not answer.done():
        return NotHeardError("it has not answered; it does when it goes on")
    return answer.exception() or answer.result()


def ask_all(
    client: Client, function: Callable[..., Any], *arguments: Any, workers: list[str] | None = None
) -> dict[str, Any]:
    """The function's result on each worker, or on those that are named, by address; workers lost meanwhile are left
    out.

    Raises
    ------
    ClusterError
        The scheduler does not answer, a worker runs another Tilewright than this process, or the function fails on one.
    """
    question = pickle.dumps((function, arguments))
    options = {"workers": workers, "on_error": "return"}
    ask = partial(client.run, identity.answer, code_asked_by(client), question, **options)
    return answers_of(function, answer_of(client, ask))


def answers_of(function: Callable[..., Any], answered: dict[str, Any]) -> dict[str, Any]:
    """What workers have answered, without those that were lost. Raises as ``ask_all`` does."""
    answers, others = {}, []
    for worker, answer in answered.items():
        if isinstance(answer, identity.Differs):
            others.append(answer)
        elif isinstance(answer, OSError):
            logger.warning("worker %s does not answer: %s: %s", worker, type(answer).__name__, answer)
        elif isinstance(answer, identity.NoAnswerError):
            raise ClusterError(
                f"worker {worker} cannot say {function.__name__}: {answer}; look at its log, and mend that there, or"
                " give the work a cluster without that worker"
            ) from answer
        elif isinstance(answer, BaseException) and not isinstance(answer, TilewrightError):
            raise OtherCodeError(
                f"worker {worker} cannot be asked for {function.__name__}: {type(answer).__name__}: {answer}; it needs"
                f" the same version of Tilewright, {identity.code_here()}, and of what that imports, as this"
                " process: install them there, and start the worker anew"
            ) from answer
        else:
            answers[worker] = answer
    if others:
        raise _other_code(others)
    return answers


def _other_code(found: Sequence[identity.Differs]) -> OtherCodeError:
    """The error about workers that run another Tilewright than this process, or other versions of what both pickle
    by."""
    ours = identity.code_here()
    libraries = [one for one in found if one.code.tilewright == ours.tilewright]
    if len(libraries) == len(found):
        named = [f"worker {one.worker} has {_and(one.code.others(ours))}" for one in found[:MOST_NAMED]]
        if len(found) > MOST_NAMED:
            named.append(f"{counted(len(found) - MOST_NAMED, 'other worker')} other versions, too")
        here = dict.fromkeys(text for one in found for text in ours.others(one.code))
        return OtherCodeError(
            f"{', '.join(named)}, and this process {_and(here)}; what passes between them is pickled by these, so"
            " install the same on all workers and here, and start anew what was running before"
        )
    named = [f"worker {one.worker} runs Tilewright {one.code}" for one in found[:MOST_NAMED]]
    if len(found) > MOST_NAMED:
        named.append(f"{counted(len(found) - MOST_NAMED, 'other worker')} another one")
    checkout = ""
    if any(one.code.version == ours.version for one in found):
        checkout = f" (from a checkout: the same files in {' and '.join(identity.LAYERS)})"
    return OtherCodeError(
        f"{', '.join(named)}, and this process {ours}; their results could differ, so install the same"
        f" version{checkout} on all workers and here, and start anew what was running before"
    )


def _and(words: Iterable[str]) -> str:
    return " and ".join(words)


def _unreadable(worker: str, error: str) -> OtherCodeError:
    return OtherCodeError(
        f"worker {worker} cannot unpickle its work: {error}; it lacks a library that this process has, or has another"
        " version of it: install the same there, and start the worker anew"
    )


def code_asked_by(client: Client) -> identity.Code | None:
    """What a worker of this client compares with what it runs; None where it is this process that works."""
    return None if isinstance(client, HereClient) else identity.code_here()


def can_work() -> bool:
    """Whether a worker can run tasks: one that can import this can import what they call."""
    return True


@dataclass(frozen=True)
class _Failed:
    """The result of a task that failed with one of `LASTING`."""

    kind: type[TilewrightError]
    message: str


class Packer:
    """Pickles calls: a function, and its arguments as far as the first future. What is the same object as in the call
    before is not pickled again.

    Neither Dask nor its scheduler then looks into what a call is about: the scheduler would unpickle it all, and pickle
    it for the worker. And where a worker cannot unpickle it, that is noticed by code of ours, see `tried`.
    """

    def __init__(self) -> None:
        self._last: list[tuple[Any, bytes]] = []

    def __call__(
        self, function: Callable[..., Any], arguments: Sequence[Any]
    ) -> tuple[tuple[bytes, ...], Sequence[Any]]:
        """What `tried` takes: the pickled part, and the other arguments as they are."""
        futures = _future_types()
        first = (place for place, one in enumerate(arguments) if isinstance(one, futures))
        count = next(first, len(arguments))
        before, self._last = self._last, []
        for place, part in enumerate((function, *arguments[:count])):
            same = place < len(before) and before[place][0] is part
            self._last.append(before[place] if same else (part, pickle.dumps(part)))
        return tuple(data for _, data in self._last), arguments[count:]


def _future_types() -> tuple[type, ...]:
    if not dask_is_there():
        return (HereFuture,)
    from distributed import Future

    return HereFuture, Future


def tried(
    ours: identity.Code | None, packed: tuple[bytes, ...], *arguments: Any
) -> Any | _Failed | identity.Differs | identity.Unreadable:
    """What every task does: call the function that is packed, with the arguments that are packed with it (`Packer`),
    and these.

    Not on a worker that does not run ``ours``, the code of the client, or cannot unpickle the call: it has joined since
    the others were asked, or was started anew. It returns a `identity.Differs`, or a `identity.Unreadable`.

    An error of `LASTING` is returned as a `_Failed`, not raised: Dask would retry the task, and log each attempt. Nor
    does a `_Failed` keep the error's frames, which hold buffers. A task that gets one as an argument returns it, and so
    the others.
    """
    if ours is not None and ours != identity.code_here():
        return identity.Differs(identity.address_of(current_worker()), identity.code_here())
    for argument in arguments:
        if isinstance(argument, _Failed | identity.Differs | identity.Unreadable):
            return argument
    try:
        function, *unpacked = map(pickle.loads, packed)
    except MemoryError:
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        return identity.Unreadable(identity.address_of(current_worker()), identity.code_here(), told)
    try:
        return function(*unpacked, *arguments)
    except LASTING as error:
        return _Failed(type(error), str(error))
    except Exception as error:
        _make_portable(error)
        raise


def _make_portable(error: Exception) -> None:
    """Put text in place of what an error came from, if that cannot be sent to the client: libraries of servers raise
    such errors, and Dask would send the text of the whole in place of our error."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        origin = error.__cause__ or error.__context__
        error.__context__ = None
        error.__cause__ = None if origin is None else RuntimeError(f"{type(origin).__name__}: {origin}")


def begin(client: Client, work: Coroutine[Any, Any, Result]) -> ConcurrentFuture[Result]:
    """Start this on the client's loop."""
    try:
        return asyncio.run_coroutine_threadsafe(work, client.loop.asyncio_loop)
    except BaseException:
        work.close()
        raise


def fetch_of(client: Client, future: Future) -> ConcurrentFuture[Any]:
    """Start to fetch the result of a task. The fetch is never cancelled, even when nobody waits for it any more: Dask
    fetches the results of several waits in one call, and cancelling that for one cancels it for all, later ones
    included."""

    if isinstance(future, HereFuture):
        return future.value

    async def result() -> Any:
        (found,) = await client.gather([future], asynchronous=True)
        return found

    return begin(client, result())


def fetch_large_of(client: Client, future: Future) -> ConcurrentFuture[Any]:
    """As `fetch_of`, for results that may be large: from the worker itself, where all of them are on this host. By way
    of the scheduler each byte would be sent twice, and unpickled and pickled by a thread that has else to do."""
    if isinstance(future, HereFuture):
        return future.value

    async def result() -> Any:
        # None: as the client was told to. Where a worker does not answer, Dask asks the scheduler after all.
        (found,) = await client.gather([future], asynchronous=True, direct=await _are_here(client) or None)
        return found

    return begin(client, result())


_here: WeakKeyDictionary[Client, bool] = WeakKeyDictionary()
"""Of each client, what `_are_here` found."""


async def _are_here(client: Client) -> bool:
    """Whether the scheduler and all workers listen on loopback: then nobody from elsewhere can join them."""
    if client not in _here:
        found = await client.scheduler.identity(n_workers=-1)
        _here[client] = all(map(_on_loopback, (client.scheduler.address, *found["workers"])))
    return _here[client]


def _on_loopback(address: str) -> bool:
    host = urlsplit(address).hostname
    try:
        return host is not None and ip_address(host).is_loopback
    except ValueError:  # a name, or no host's address
        return host == "localhost"


def result_of(
    future: Future, retries: int, fetch: ConcurrentFuture[Any] | None = None, seconds: float | None = None
) -> Any:
    """The result of a task that is done, errors as ours; waits for ``fetch``, if given, at most ``seconds``."""
    try:
        result = future.result() if fetch is None or future.status == "error" else fetch.result(seconds)
        if isinstance(result, _Failed):
            raise result.kind(result.message)
        if isinstance(result, identity.Differs):
            raise _other_code([result])
        if isinstance(result, identity.Unreadable):
            raise _unreadable(result.worker, result.error)
        return result
    except TilewrightError:
        raise
    except _lost_errors() as error:
        if future.client.status in ("closing", "closed"):  # which cancels all that it holds
            raise _closed(future.client) from error
        if CONNECTION_LOST in str(error):  # its text is long, and the same for every task
            raise _lost(future.client) from error
        if isinstance(error, CancelledError) and future.status == "finished":
            raise _not_fetched(future, error) from error
        raise ClusterError(
            f"the scheduler went away, or cancelled task {future.key}: {error}; bring a cluster up and run it again"
        ) from error
    except _killed_errors() as error:
        raise WorkersKilledError(
            f"task {future.key} took down every worker that tried it: {error}; look at the workers' logs, and give"
            " them more memory"
        ) from error
    except Exception as error:
        if isinstance(error, TimeoutError) and future.status != "error":
            raise ResultLateError from error
        if future.status != "error":  # the fetch failed, not the task
            if future.client.status in ("closing", "closed"):
                raise _closed(future.client) from error
            raise _not_fetched(future, error) from error
        if is_out_of_memory(error):
            raise DeviceMemoryError(
                f"task {future.key} ran out of memory {retries + 1} times, last with {type(error).__name__}: {error};"
                " free memory there, or give the workers more of it or fewer threads"
            ) from error
        raise TaskError(
            f"task {future.key} failed {retries + 1} times, last with {type(error).__name__}: {error}"
        ) from error


def _lost_errors() -> tuple[type[Exception], ...]:
    """What Dask raises where the scheduler is gone, or has cancelled a task."""
    from distributed.comm import CommClosedError

    return CancelledError, CommClosedError


def _killed_errors() -> type[Exception]:
    from distributed.scheduler import KilledWorker

    return KilledWorker


def _not_fetched(future: Future, error: BaseException) -> ClusterError:
    return ClusterError(
        f"the result of task {future.key} cannot be fetched: {type(error).__name__}: {error}; run it again, with a new"
        " client if that was interrupted before"
    )
