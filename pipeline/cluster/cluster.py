"""From a profile's name, a client, or a scheduler's address to a client that is ready to work."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import dask
import distributed
from dask.system import CPU_COUNT
from dask.utils import parse_timedelta
from distributed import Client, LocalCluster, Nanny, Worker
from distributed.core import Server
from distributed.deploy import Cluster as DeployCluster
from distributed.worker_memory import parse_memory_limit

from tilewright.kernels.arguments import shown
from tilewright.kernels.cpu.loops import start_compiler
from tilewright.kernels.gpu.device_choice import cuda_available
from tilewright.kernels.words import did_you_mean
from tilewright.pipeline.cluster import hush, identity, lifeline
from tilewright.pipeline.cluster.classes import start_of_class
from tilewright.pipeline.cluster.here.checks import (
    UNGUARDED,
    allow_open_files,
    check_folder,
    check_not_forked,
    check_not_started_by_workers,
)
from tilewright.pipeline.cluster.local import (
    LoopbackWorker,
    client_of,
    details_wanted,
    quiet,
    root_of,
    start,
)
from tilewright.pipeline.cluster.node.places import PORTS, on_loopback
from tilewright.pipeline.cluster.node.workers import options_on_this_host
from tilewright.pipeline.cluster.profiles import (
    FILE_NAME,
    BatchProfileError,
    Cluster,
    FoundProfiles,
    find_profiles,
)
from tilewright.pipeline.cluster.security import cause, security_of
from tilewright.pipeline.errors import ClusterError, DeviceUnavailableError, TilewrightError

logger = logging.getLogger(__name__)

identity.code_here()  # now, when the modules are as they were imported

CONNECT_SECONDS = 20
ANSWER_SECONDS = 5
"""How long a scheduler may take to answer before somebody is told that it is waited for."""
LEAST_WORKER_NBYTES = 192 * 2**20
"""What a worker process takes up by itself, 134 MiB with the loops that it has compiled, and a few pieces of text. Dask
ends one that is above its limit, starts another, and so on."""
LEAST_DEATH_SECONDS = 10
"""A worker process takes a second or two to join, more with many of them or on a busy host. Dask hangs for good where
one is given up while it starts."""
STDIN_SCRIPT = "<stdin>"
"""What Python calls the file of a script that it reads from standard input."""


def _keys_of(*takers: type) -> frozenset[str]:
    return frozenset(name for taker in takers for name in inspect.signature(taker).parameters)


CLUSTER_KEYS = _keys_of(LocalCluster, Nanny, Worker, Server) - {"loop", "scheduler_file"} | {*PORTS}
"""What a profile may say of a cluster on this host: the class hands on what it does not take itself. Not a scheduler's
file, which its workers would wait for."""

ALONE = {"n_workers": 1, "processes": False}
"""What makes a cluster of kind local one worker in this process."""

DASK_CLIENT = "dask.distributed"
"""What Dask's setting ``scheduler`` says while its collections compute by a client."""

COUNTS = ("n_workers", "threads_per_worker")
"""Keys of a cluster on this host that are numbers of something."""

TIMES = (
    "timeout",
    "death_timeout",
    "lifetime",
    "lifetime_stagger",
    "heartbeat_interval",
    "profile_cycle_interval",
    "scheduler_sync_interval",
)
"""Keys of a cluster or of a client that are times."""

CLIENT_KEYS = _keys_of(Client) - {"loop", "asynchronous", "kwargs"}
"""What a profile may say of the way to a running scheduler."""


def _no_profile(name: str, found: FoundProfiles) -> ClusterError:
    own = found.files[-1].path if found.only else FILE_NAME
    return ClusterError(
        f"there is no profile {name!r}{did_you_mean(name, found.profiles)}; the profiles are {found.told()}: choose"
        f" one, or define it in {own} (a scheduler's address starts with tcp://, ucx:// or tls://)"
    )


@contextmanager
def open_cluster(
    cluster: Cluster = "local", config: str | os.PathLike[str] | None = None, *, loops: bool = True
) -> Iterator[Client]:
    """A client of the cluster that a profile, an address or a client names; what was started here is ended here.

    Parameters
    ----------
    cluster
        The name of a profile in ``config``; or a scheduler's address (anything with ``://``); or a
        ``distributed.Client``, which is yielded as it is and left open; or one of Dask's clusters, such as a
        ``distributed.LocalCluster``, which is left open too: only the client of it that is yielded is closed.
    config
        The only file of profiles beside the built-in ones; without it all that there are, as ``tilewright profiles``
        lists them.
    loops
        Whether Numba had better set itself up meanwhile, where workers of this process will run on the CPU.

    Raises
    ------
    ClusterError
        The profile is not known, the scheduler does not answer, a cluster class refused its arguments, or worker
        processes did not start; a client that is closed, or whose event loop this is called on; a process that was
        forked from one that had used Dask.
    DeviceUnavailableError
        A ``cuda`` profile on a machine without a usable GPU.

    Examples
    --------
    >>> import numpy as np
    >>> import tilewright as tw
    >>> a = np.eye(3)
    >>> with tw.open_cluster("local") as client:
    ...     first = tw.matmul(a, a, cluster=client)
    ...     second = tw.matmul(first, a, cluster=client)
    >>> bool((second == a).all())
    True
    """
    check_not_forked()
    if isinstance(cluster, Client):
        _check_usable(cluster)
        yield cluster
        return
    if not isinstance(cluster, str):
        # Like Dask's own client: some libraries have clusters that are not of Dask's class.
        if not isinstance(getattr(cluster, "scheduler_address", None), str):
            hint = ""
            if isinstance(cluster, AbstractContextManager):
                hint = "; pass what its `with` gives: with tilewright.open_cluster('cpu') as client"
            raise ClusterError(
                f"cluster={shown(cluster)}: it must be a profile's name, a scheduler's address, a distributed.Client,"
                f" or a cluster of Dask's, such as distributed.LocalCluster{hint}"
            )
        with _default_put_back, _client_of_theirs(cluster) as client:
            yield client
        return
    if "://" in cluster:
        called, profile = cluster, dict[str, Any](kind="existing", address=cluster)
    else:
        found = find_profiles(config)
        if cluster not in found.profiles:
            raise _no_profile(cluster, found)
        named = found.profiles[cluster]
        called, profile = named.called(cluster), dict(named.options)
    with _default_put_back, ExitStack() as stack:
        yield _start(stack, called, profile, loops)


class _DefaultPutBack:
    """Where Dask's collections compute is, behind the last client that is opened in such blocks, what it was before the
    first.

    Each of Dask's clients sets it, and the last to end puts back what it found. That may be a client which was there
    before and has ended first, as where two threads work at a time: then nothing could compute any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._found: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._found = dask.config.get("scheduler", None)
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users or dask.config.get("scheduler", None) != DASK_CLIENT or self._found == DASK_CLIENT:
                return
            with suppress(ValueError):
                if distributed.default_client().status == "running":
                    return  # it is somebody else's
            dask.config.set(scheduler=self._found)


_default_put_back = _DefaultPutBack()


def _client_of_theirs(cluster: DeployCluster) -> Client:
    """A client of a cluster that the caller has started."""
    what = type(cluster).__name__
    if cluster.asynchronous:
        raise ClusterError(
            f"cluster: the {what} is asynchronous, and this call waits for results; make it in another thread"
            " (asyncio.to_thread), or give the scheduler's address in its place"
        )
    try:
        return _connected(cluster, timeout=CONNECT_SECONDS)
    except (
        Exception
    ) as error:  # some libraries' clusters are not of Dask's class, and may lack what Dask asks of one
        raise ClusterError(f"cluster: cannot connect to the {what}: {error}; start one anew") from error


def _connected(*arguments: Any, limit_seconds: float | None = None, **options: Any) -> Client:
    """``distributed.Client``, of which nothing is left where it cannot connect. Dask leaves its event loop running
    then, and a client that Python's collector closes at some time, in whatever thread, where it may wait for itself.

    limit_seconds: of a client with an event loop of its own, how long it may try before it is made to end. Dask's own
    timeout does not end it where the scheduler stops between two of their first messages. Raises TimeoutError then.
    """
    client, ended = Client.__new__(Client), threading.Event()
    late = threading.Timer(limit_seconds or 0, _end_connecting, (client, ended))
    late.daemon = True
    if limit_seconds is not None:
        late.start()
    try:
        client.__init__(*arguments, **options)
    except BaseException as error:
        late.cancel()
        with suppress(Exception, asyncio.CancelledError):
            client.close(timeout=ANSWER_SECONDS)
        with suppress(Exception, asyncio.CancelledError):
            client._loop_runner.stop()
        client.status = "closed"  # or it would be closed once more when it is collected, without its loop
        if ended.is_set():  # what Dask makes of a start that was cancelled says nothing
            raise TimeoutError from error
        raise
    late.cancel()
    return client


def _end_connecting(client: Client, ended: threading.Event) -> None:
    """Cancel all that a client's own event loop is at, and say so before."""

    def cancel() -> None:
        for task in asyncio.all_tasks(loop):
            task.cancel()

    with suppress(AttributeError, RuntimeError):  # it has not come so far, or has just ended
        loop = client.loop.asyncio_loop
        ended.set()
        loop.call_soon_threadsafe(cancel)


def _check_usable(client: Client) -> None:
    # On its own loop nothing can be waited for: a client gives coroutines there.
    if client.asynchronous:
        raise ClusterError(
            "cluster: the client is asynchronous, and this call waits for results; make it in another thread"
            " (asyncio.to_thread), or give the scheduler's address in place of the client"
        )
    if client.status in ("closing", "closed"):
        raise ClusterError(f"cluster: the client is {client.status}; connect to a cluster anew")


def _start(stack: ExitStack, called: str, profile: dict[str, Any], loops: bool) -> Client:
    kind = profile.pop("kind")
    if kind == "existing":
        return _connect(stack, called, profile)
    if kind == "slurm":
        raise BatchProfileError(called, profile)
    if kind == "class":
        if isinstance(profile.get("security"), dict):
            profile["security"] = security_of(called, profile["security"], started=True)
        return start_of_class(stack, called, profile, _client_of_theirs)
    for key in ("processes", "env", *COUNTS):
        if profile.get(key, True) is None:
            del profile[key]  # nothing said: each kind has its own
    check_not_started_by_workers(called)
    try:
        if profile.get("security") is not None:
            profile["security"] = security_of(called, profile["security"], started=True)
        _check_counts(called, profile)
        _check_keys(called, kind, profile)
        _check_times(called, profile)
        _check_environment(called, profile)
        check_folder(called)
        if kind != "local":
            _check_script(called)
            _check_memory_limit(called, profile)
            _check_death_timeout(called, profile)
        if kind == "local":
            allow_open_files(0)
            if loops and not cuda_available():
                start_compiler()  # for the CPU's loops, while the cluster starts
            options = ALONE | options_on_this_host(called, kind, profile, 1)
            options |= _dashboard(options)
            server = start(LocalCluster, stack.enter_context(quiet(options)))
        elif kind == "cpu":
            # Workers that see a GPU would take it: on this profile they must not.
            environment = {"CUDA_VISIBLE_DEVICES": ""} | profile.pop("env", {})
            profile = options_on_this_host(called, kind, profile, profile.get("n_workers", CPU_COUNT))
            options = {"processes": True, "n_workers": CPU_COUNT} | profile | {"env": environment}
            options |= _dashboard(options) | _preloads(options)
            allow_open_files(options["n_workers"])
            server = start(LocalCluster, stack.enter_context(quiet(options)))
        else:
            cuda_cluster, gpus = _cuda_cluster()
            allow_open_files(profile.get("n_workers", gpus))
            profile = options_on_this_host(called, kind, profile, profile.get("n_workers", gpus))
            options = profile | _dashboard(profile, wanted=True) | _preloads(profile)
            server = start(cuda_cluster, stack.enter_context(quiet(options)))
    except TilewrightError:
        raise
    except (
        TypeError,
        ValueError,
        LookupError,
        ArithmeticError,
        AttributeError,
        OSError,
        ImportError,
    ) as error:
        raise _refused(called, profile, error) from error
    except RuntimeError as error:
        if isinstance(error.__cause__, (TypeError, ValueError)):  # a worker refused them
            raise _refused(called, profile, error.__cause__) from error
        root = root_of(error)
        why = str(error) if str(root) in str(error) else f"{error} {type(root).__name__}: {root}"
        if kind == "local":  # it has no processes
            raise ClusterError(f"{called}: its worker did not start ({why})") from error
        hint = f"; {UNGUARDED}" if _started_by_a_script() else ""
        raise ClusterError(f"{called}: its worker processes did not start ({why}){hint}") from error
    return stack.enter_context(client_of(server))


def _dashboard(profile: dict[str, Any], *, wanted: bool = False) -> dict[str, Any]:
    """Where a cluster has its dashboard, on loopback unless the profile names a host; none where it says nothing,
    unless one is ``wanted``: the import of Bokeh takes longer than all else of a start. What the scheduler still serves
    gets a port that no other run can have taken."""
    given = profile.get("dashboard_address")
    found: dict[str, Any] = {"dashboard_address": on_loopback(":0" if given is None else given)}
    if given is None and not wanted:
        found["scheduler_kwargs"] = {"dashboard": False} | (profile.get("scheduler_kwargs") or {})
    own = profile.get("worker_dashboard_address"), profile.get("worker_class")
    if own == (None, None) and not profile.get("processes", True):
        found["worker_class"] = LoopbackWorker
    return found


def _preloads(profile: dict[str, Any]) -> dict[str, Any]:
    """What worker processes preload: what the profile says, or else Dask's configuration, and what we have them do. A
    plugin of the client's would wait for good for a worker that is stopped as it is registered."""
    hushed = bool(profile.get("silence_logs", True)) and not details_wanted()
    ours = [lifeline.NAME, *([hush.NAME] if hushed else [])]
    found: dict[str, Any] = {}
    for key in ("preload", "preload_argv"):
        given = profile.get(key)
        given = dask.config.get(f"distributed.worker.{key.replace('_', '-')}") if given is None else given
        found[key] = [given] if isinstance(given, str) else list(given)
    found["preload"][:0] = ours
    if found["preload_argv"] and not isinstance(found["preload_argv"][0], str):  # else all get the same
        found["preload_argv"][:0] = [[]] * len(ours)
    return found


def _check_counts(called: str, options: dict[str, Any]) -> None:
    """Raise ClusterError for a number of workers or threads that is none. Dask starts a cluster of no workers, which
    would be waited for, and takes no threads for as many as there are cores."""
    for key in COUNTS:
        given = options.get(key, 1)
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise ClusterError(
                f"{called}: {key}: {given!r} is no whole number of 1 or more; give it one, or leave it out"
            )


def _check_times(called: str, options: dict[str, Any]) -> None:
    """Raise ClusterError for a time that is none."""
    for key in TIMES:
        given = options.get(key)
        try:
            parse_timedelta(given)
        except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
            raise ClusterError(f"{called}: {key}: {given!r} is no time, such as 30 or 1 minute") from error


def _check_death_timeout(called: str, options: dict[str, Any]) -> None:
    """Raise ClusterError for a time in which worker processes may not have started."""
    given = options.get("death_timeout")
    if given is not None and parse_timedelta(given) < LEAST_DEATH_SECONDS:
        raise ClusterError(
            f"{called}: death_timeout: {given!r} is less than worker processes may take to start; give it"
            f" {LEAST_DEATH_SECONDS} s or more, or leave it out"
        )


def _check_script(called: str) -> None:
    """Raise ClusterError where worker processes could not import the script that starts them: each of them would end in
    a FileNotFoundError, or find a pipe empty."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    # As multiprocessing does: with a spec they import a module by its name, and without a file nothing.
    if getattr(main, "__spec__", None) is not None or file is None:
        return
    began_in = getattr(
        multiprocessing.process, "ORIGINAL_DIR", None
    )  # the script may have changed to another
    if os.path.isfile(os.path.join(began_in or "", file)):
        return
    what = "a script read from standard input" if file == STDIN_SCRIPT else f"{file}, which is no file,"
    raise ClusterError(
        f"{called}: worker processes import the script that starts them, so {what} cannot start any; save it to a file,"
        " or use python -c, or cluster='local', which is one worker in this process"
    )


def _check_environment(called: str, options: dict[str, Any]) -> None:
    """Raise ClusterError for what are no variables of the environment."""
    given = options.get("env", {})
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise ClusterError(
            f"{called}: env: {given!r} is no mapping of variables' names to their values, such as"
            " {OMP_NUM_THREADS: 4}; give it one, or leave it out"
        )


def _check_memory_limit(called: str, options: dict[str, Any]) -> None:
    """Raise ClusterError for a limit under which no worker process could work."""
    given = options.get("memory_limit", "auto")
    limit = None if given == "auto" else parse_memory_limit(given, 1, 1, logger=logger)
    if limit is not None and limit < LEAST_WORKER_NBYTES:  # none: no limit
        # A number may be a share of the host's memory, so that it is not the bytes.
        what = (
            f"is {limit} bytes for a worker, fewer than its process takes by itself"
            if limit >= 0
            else "is less than nothing"
        )
        raise ClusterError(
            f"{called}: memory_limit: {given!r} {what}; give it {LEAST_WORKER_NBYTES // 2**20} MiB or more (512 MiB for"
            " matrix products), or leave it out"
        )


def _check_keys(called: str, kind: str, options: dict[str, Any]) -> None:
    """Raise ClusterError for a key that neither the cluster's class takes nor those that it hands it on to, and for
    what would make another kind of cluster of it. Of an unknown key each worker process would tell by a traceback."""
    known = CLUSTER_KEYS
    if kind == "cuda":
        from dask_cuda import LocalCUDACluster

        known |= _keys_of(LocalCUDACluster)
    if "worker_class" not in options:
        _check_known(f"{called}: the cluster", known, options)
    if options.get("asynchronous"):
        raise ClusterError(
            f"{called}: asynchronous: {options['asynchronous']!r} would have nobody wait for the cluster; leave it out"
        )
    if not isinstance(options.get("processes", True), bool):  # 0 equals False, and Dask tells them apart
        raise ClusterError(
            f"{called}: processes: {shown(options['processes'])} is neither true nor false; say one, or leave it out"
        )
    if kind == "local":
        for key, only in ALONE.items():
            if options.get(key, only) != only:
                raise ClusterError(
                    f"{called}: {key}: {options[key]!r} does not go with kind local, which is one worker in this"
                    " process; leave it out, or take kind cpu, or cuda, whose workers are processes"
                )
    elif not options.get("processes", True):
        raise ClusterError(
            f"{called}: processes: {options['processes']!r} does not go with kind {kind}, whose workers are processes;"
            " leave it out, or take kind local, which is a worker in this process"
        )


def _check_known(whose: str, known: Set[str], options: Iterable[Any]) -> None:
    unknown = sorted(str(key) for key in options if key not in known)
    if unknown:
        named = sorted(one for one in known if one.islower())  # others are classes, which no file can give
        raise ClusterError(f"{whose} has no option {unknown[0]!r}{did_you_mean(unknown[0], named)}")


def _started_by_a_script() -> bool:
    """Whether this process runs a user's script, which its worker processes import, and not the command."""
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    ours = spec is not None and spec.name.startswith("tilewright.")
    return file is not None and not ours and Path(file).stem not in ("tilewright", "dask")


def _refused(called: str, profile: dict[str, Any], error: BaseException) -> ClusterError:
    return ClusterError(f"{called}: the cluster refused its options {profile}: {error}")


def _cuda_cluster() -> tuple[type[LocalCluster], int]:
    """Dask's class, and how many workers it starts unless it is told."""
    from tilewright.kernels.gpu.device import devices, why_no_gpu

    gpus = len(devices())
    if not gpus:
        why = why_no_gpu().removeprefix("No GPU: ").removesuffix(".")
        raise DeviceUnavailableError(f"the cuda profile needs a GPU: {why}; use --profile local or cpu")
    from dask_cuda import LocalCUDACluster

    return cast(type[LocalCluster], LocalCUDACluster), gpus


def _connect(stack: ExitStack, called: str, options: dict[str, Any]) -> Client:
    options = {key: value for key, value in options.items() if value is not None}
    _check_known(f"{called}: a client", CLIENT_KEYS, options)
    if options.get("address") and options.get("scheduler_file"):
        raise ClusterError(
            f"{called} says address, {options['address']}, and scheduler_file, {options['scheduler_file']}; leave one"
            " away"
        )
    if not options.get("address") and not options.get("scheduler_file"):
        options["address"] = dask.config.get("scheduler-address", None)  # where Dask's own clients look, too
    if not options.get("address") and not options.get("scheduler_file"):
        raise ClusterError(
            f"{called} says neither address nor scheduler_file; set one in your cluster.yaml, or Dask's"
            " scheduler-address (DASK_SCHEDULER_ADDRESS), or pass the scheduler's address in place of a profile"
        )
    _check_times(called, options)
    for key in ("address", "scheduler_file"):
        given = options.pop(key, None)
        if given:  # Dask waits for good for a file without a name
            if not isinstance(given, str):
                what = (
                    "path" if key == "scheduler_file" else "scheduler's address, such as tcp://scheduler:8786"
                )
                raise ClusterError(f"{called}: {key}: {shown(given)} is no {what}; give it one")
            options[key] = given
    scheduler_file = options.get("scheduler_file")
    if scheduler_file and not Path(scheduler_file).is_file():
        raise ClusterError(f"{called}: there is no scheduler file at {scheduler_file}; is the scheduler up?")
    if "security" in options:
        options["security"] = security_of(called, options["security"], started=False)
    options = {"timeout": CONNECT_SECONDS} | options
    seconds = parse_timedelta(options["timeout"])
    try:
        with _telling_who_is_waited_for(options.get("address") or scheduler_file, seconds):
            return stack.enter_context(_connected(limit_seconds=seconds + ANSWER_SECONDS, **options))
    except (AssertionError, KeyError) as error:
        # What Dask does about a file without JSON, or without an address.
        raise ClusterError(
            f"{called}: {scheduler_file} names no address, so no scheduler has written it, or not all of it; start the"
            " scheduler anew"
        ) from error
    except (OSError, TimeoutError, ValueError, TypeError, RuntimeError) as error:
        where = options.get("address") or scheduler_file
        secured = f" (with what {called} says of security)" if "security" in options else ""
        why = str(error) or f"it did not answer within {seconds:g} s (timeout, in a profile)"
        if reason := cause(error, _address_of(str(where)), options.get("security")):
            secured = f"; {reason}{secured}"
        raise ClusterError(f"cannot reach the scheduler at {where}: {why}{secured}") from error


def _address_of(where: str) -> str:
    """The address itself, or that which a scheduler has written to a file."""
    if "://" in where:
        return where
    try:
        return str(json.loads(Path(where).read_text(encoding="utf-8"))["address"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


@contextmanager
def _telling_who_is_waited_for(where: Any, seconds: float) -> Iterator[None]:
    """Say once that the scheduler there has not answered, if this block lasts so long. seconds: when it is given up."""
    end = f"gives up after {seconds:g} s (timeout, in a profile)"
    timer = threading.Timer(
        ANSWER_SECONDS,
        logger.warning,
        (
            "no scheduler answers at %s yet, after %g s; it goes on when one does, and %s",
            where,
            ANSWER_SECONDS,
            end,
        ),
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
