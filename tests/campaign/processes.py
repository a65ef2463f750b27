"""Processes of a case, forked from one that has imported all they need, so that none pays for the imports."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path

import dask.config

from tests.campaign import changes

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 120
"""A command that takes longer hangs."""
WARM_SECONDS = 600
"""The same of all commands one after the other, which import and compile what they need."""
LOOK_SECONDS = 0.005

COMMANDS = ("distributed.cli.dask_scheduler", "distributed.cli.dask_worker", "distributed.nanny")
"""What is started beside ``tilewright``."""


def warm(first: Callable[[], object], folder: Path) -> list[str]:
    """Import what a function imports, which is called in a process of its own: it may start threads, and what has some
    must not fork. Returns the modules' names."""
    names = folder / "modules"

    def tell() -> None:
        for name in COMMANDS:
            importlib.import_module(name)
        first()
        names.write_text("\n".join(sys.modules))

    log = folder / "warm.log"
    if wait(fork(tell, log), WARM_SECONDS) != 0:
        raise RuntimeError(f"what a campaign runs fails by itself:\n{log.read_text()}")
    found = []
    for name in names.read_text().split():
        with contextlib.suppress(ImportError):  # a module that others make up
            importlib.import_module(name)
            found.append(name)
    return found


def ensure_fork_server(orders: Path, modules: Sequence[str]) -> bool:
    """Have a fork server run, whose processes heed the orders as workers. Dask's nannies start theirs by it (`fork`),
    also those in forked processes. Returns whether one was started: a server ends with an error where whoever asks it
    for a process is killed before its request is whole, and takes a moment to do so."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    before, found = server._forkserver_pid, os.environ.get("PYTHONPATH")
    if before is not None and not _serves():
        send(before, signal.SIGKILL)
        wait_until_gone([before])
    os.environ[changes.ORDERS_VARIABLE] = str(orders)
    # It looks for what it is to import first without this process's paths, and leaves out what it does not find.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([found] if found else [])])
    try:
        multiprocessing.get_context("forkserver").set_forkserver_preload([*modules, "tests.campaign.changes"])
        forkserver.ForkServer.ensure_running(server)
    finally:
        del os.environ[changes.ORDERS_VARIABLE], os.environ["PYTHONPATH"]
        if found is not None:
            os.environ["PYTHONPATH"] = found
    # It looks whether its server, of which only this process is the parent, still runs.
    server.ensure_running = lambda: None
    return bool(server._forkserver_pid != before)


def _serves() -> bool:
    """Whether the fork server starts a process."""
    main = sys.modules["__main__"]
    spec, file = main.__spec__, main.__dict__.pop("__file__", None)  # which it would import anew
    main.__spec__ = None
    try:
        asked = multiprocessing.get_context("forkserver").Process(target=os.getpid)
        asked.start()
    except (OSError, EOFError):
        return False
    finally:
        main.__spec__ = spec
        if file is not None:
            main.__file__ = file
    asked.join()
    return asked.exitcode == 0


def fork(
    function: Callable[[], object],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    orders: Path | None = None,
    role: int = 0,
) -> int:
    """Call a function in a new process, in a session of its own; returns the process's id.

    log: what its standard error goes to; standard output goes to the same name with ``.out``.
    """
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        for descriptor, path, flags in (
            (0, os.devnull, os.O_RDONLY),
            (1, log.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
            (2, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        ):
            os.dup2(os.open(path, flags), descriptor)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        os.environ.update(environment or {})
        dask.config.refresh()
        dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
        # Processes of a fork server import the main module anew, which is the campaign's, or pytest's.
        main = sys.modules["__main__"]
        main.__spec__ = None
        main.__dict__.pop("__file__", None)
        if orders is not None:
            changes.install(orders, role)
        function()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def call_command(argv: list[str]) -> Callable[[], None]:
    """The command ``tilewright`` with these arguments, as a function."""

    def call() -> None:
        from tilewright.workflows.cli import main

        sys.argv = ["tilewright", *argv]
        main()

    return call


def ended(pid: int) -> int | None:
    """The exit status of a child, negative for a signal; None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def wait(pid: int, seconds: float = LIMIT_SECONDS) -> int | None:
    """The exit status of a child once it has ended; None where it has not in time."""
    for _ in looks(seconds):
        if (status := ended(pid)) is not None:
            return status
    return None


def looks(seconds: float) -> Iterator[None]:
    """Yields until the time is over."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield
        time.sleep(LOOK_SECONDS)


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def end(pid: int) -> None:
    """Kill a child and wait for its end."""
    _send_and_wait(pid, signal.SIGKILL)


def finish(pid: int) -> None:
    """Ask a child to end, and wait for that."""
    _send_and_wait(pid, signal.SIGTERM)


def _send_and_wait(pid: int, number: int) -> None:
    with contextlib.suppress(
        ChildProcessError
    ):  # it was waited for before: the number may be another's by now
        if ended(pid) is None:
            send(pid, number)
            os.waitpid(pid, 0)


def facts_of(pid: int) -> list[str]:
    """State, parent and so on of a process, as ``/proc`` has them behind its name; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    return facts_of(pid)[:1] not in ([], ["Z"], ["X"])


def wait_until_stopped(pid: int) -> None:
    for _ in looks(LIMIT_SECONDS):
        if facts_of(pid)[:1] in ([], ["T"], ["Z"]):
            return


def wait_until_gone(pids: Sequence[int]) -> None:
    for _ in looks(LIMIT_SECONDS):
        if not any(map(is_alive, pids)):
            return


def children_of(pid: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and facts_of(int(entry))[1:2] == [str(pid)] and is_alive(int(entry)):
            found.append(int(entry))
    return sorted(found)


def pipes_of(pid: int) -> set[str]:
    """The pipes that a process has an end of."""
    ends: set[str] = set()
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:  # or it has ended
        for entry in entries:
            with contextlib.suppress(OSError):  # it has just closed this one
                ends.add(os.readlink(entry.path))
    return {end for end in ends if end.startswith("pipe:")}


def fork_server_pid() -> int:
    return forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined,no-any-return]
