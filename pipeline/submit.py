"""Tasks to a cluster: a few more under way than the workers can do at once, results as they finish, errors as ours.

The window keeps a worker that asks from waiting, and a scheduler from ever holding a graph of a million tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from distributed import Client, Future, as_completed
from distributed.comm import CommClosedError
from distributed.scheduler import KilledWorker

from tilewright.kernels.memory import is_out_of_memory
from tilewright.pipeline import config, tasks
from tilewright.pipeline.errors import ClusterError, DeviceMemoryError, TaskError, TilewrightError

Result = TypeVar("Result")

NO_WORKERS = "the cluster has no workers; start some, or wait until they have joined"


def survey(client: Client, device: str) -> list[tasks.WorkerFacts]:
    """What every worker is; waits for none to come.

    Raises
    ------
    ClusterError
        There are no workers, or they would not all use the same kind of device.
    """
    answers: dict[str, tasks.WorkerFacts | TilewrightError] = client.run(tasks.worker_facts, device)
    facts: dict[str, tasks.WorkerFacts] = {}
    for worker, answer in answers.items():
        if isinstance(answer, TilewrightError):
            raise answer
        facts[worker] = answer
    if not facts:
        raise ClusterError(NO_WORKERS)
    kinds = {fact.device for fact in facts.values()}
    if len(kinds) > 1:
        raise ClusterError(
            f"some of the {len(facts)} workers have a GPU and some have none; say --device cpu to use the CPU on"
            " all, or give the work a cluster whose workers are alike"
        )
    return list(facts.values())


def run_bounded(
    client: Client,
    function: Callable[..., Result],
    calls: Iterable[tuple[Any, ...]],
    *,
    key: str,
    window: int,
) -> Generator[tuple[int, Result], None, None]:
    """Submit ``function(*call)`` for every call, at most ``window`` at a time; yield results as they finish.

    It ends only when every call has given its result, once: callers may take what they were given for all there is.
    Leaving early, by an error or by closing the generator, cancels what is outstanding. Callers close it, since
    an exception in the body of their loop does not.

    Raises
    ------
    ClusterError
        The results came to an end before the calls did.
    TilewrightError
        A task failed on every attempt with an error of ours, which is raised as it is.
    DeviceMemoryError
        A worker had too little memory for it on every attempt.
    TaskError
        It failed with any other, or took its workers down with it.
    """
    retries = config.get("retries")
    numbered = enumerate(calls)
    places: dict[Future, int] = {}

    def submit_next(completed: Any) -> None:
        for place, call in numbered:
            future = client.submit(function, *call, key=f"{key}-{place}", pure=False, retries=retries)
            places[future] = place
            completed.add(future)
            return

    completed = as_completed()
    try:
        for _ in range(window):
            submit_next(completed)
        for future in completed:
            place = places.pop(future)
            result = _result_of(future, retries)
            future.release()
            submit_next(completed)
            yield place, result
        _check_all_came(len(places) + sum(1 for _ in numbered), key)
    finally:
        client.cancel(list(places), force=True)


def run_combined(
    client: Client,
    function: Callable[..., Any],
    combine: Callable[..., Result],
    groups: Sequence[tuple[tuple[Any, ...], Sequence[tuple[Any, ...]]]],
    *,
    key: str,
) -> Generator[tuple[int, Result], None, None]:
    """For each group ``(head, calls)``: ``combine(*head, *[function(*call) for call in calls])``, on the workers.

    What the calls give stays on the workers. Yields results of ``combine`` as they finish; all tasks are submitted
    at once, so this is for few. It ends, leaves early and raises as ``run_bounded`` does.
    """
    retries = config.get("retries")
    places: dict[Future, int] = {}
    inner: list[Future] = []
    try:
        for place, (head, calls) in enumerate(groups):
            parts = [
                client.submit(function, *call, key=f"{key}-{place}-{part}", pure=False, retries=retries)
                for part, call in enumerate(calls)
            ]
            inner += parts
            future = client.submit(combine, *head, *parts, key=f"{key}-{place}", pure=False, retries=retries)
            places[future] = place
        for future in as_completed(list(places)):
            yield places.pop(future), _result_of(future, retries)
        _check_all_came(len(places), key)
    finally:
        client.cancel([*places, *inner], force=True)


def _check_all_came(missing: int, key: str) -> None:
    # Whatever the cause: a product with tiles left out, or a sum with parts left out, looks like any other.
    if missing:
        raise ClusterError(
            f"the results of {key} came to an end with {missing} still to come; what is finished is kept, and the same"
            " command goes on there"
        )


def _result_of(future: Future, retries: int) -> Any:
    try:
        return future.result()
    except TilewrightError:
        raise
    except (CancelledError, CommClosedError) as error:
        raise ClusterError(
            f"the scheduler went away, or cancelled task {future.key}: {error}; what is finished is kept, and the same"
            " command goes on there once a cluster is up"
        ) from error
    except KilledWorker as error:
        raise TaskError(
            f"task {future.key} took down every worker that tried it: {error}; look at the workers' logs, and give"
            " them more memory or the plan less (--device-memory)"
        ) from error
    except Exception as error:
        if is_out_of_memory(error):
            raise DeviceMemoryError(
                f"task {future.key} ran out of memory {retries + 1} times, last with {type(error).__name__}: {error};"
                " free memory there, or give the workers more of it or fewer threads"
            ) from error
        raise TaskError(
            f"task {future.key} failed {retries + 1} times, last with {type(error).__name__}: {error}"
        ) from error


def threads_of(client: Client) -> dict[str, int]:
    """Threads of each worker, by its address, as the scheduler has them now.

    Never ``client.scheduler_info()``: that answers from a cache of the client, which the client's own refresh, every
    two seconds and without workers, may have emptied since it was filled for the call.

    Raises
    ------
    ClusterError
        There are no workers, or the scheduler does not answer.
    """
    try:
        threads: dict[str, int] = client.nthreads()
    except OSError as error:
        raise ClusterError(
            f"the scheduler went away: {error}; bring a cluster up and run it again"
        ) from error
    if not threads:
        raise ClusterError(NO_WORKERS)
    return threads


def window_of(client: Client) -> int:
    """Tasks to have under way: what all threads can do at once, and one more for each worker to find waiting.

    Raises ClusterError as ``threads_of`` does.
    """
    return sum(count + 1 for count in threads_of(client).values())
