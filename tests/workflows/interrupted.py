"""Run as a script: ``tilewright`` with the arguments given, and Ctrl-C when so many units are done, or at a place.

The signal goes to the whole process group, as a terminal sends it, or is SIGTERM or SIGKILL to the process alone, or
SIGTERM to the shell that started it and is to pass it on. It comes from
the listener, or right after the function that does the last thing before it, so that it is known how far the work has
come: no test sleeps and hopes.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from distributed import Client, Nanny
from zarr.abc.store import RangeByteRequest
from zarr.storage import FsspecStore

from tilewright.pipeline.cluster import local as local_cluster
from tilewright.pipeline.cluster.here import client as here
from tilewright.pipeline.events import Event, Listener, UnitDone
from tilewright.pipeline.product import execute
from tilewright.pipeline.product.output import Output
from tilewright.pipeline.store.arrays import UNFINISHED_NAME
from tilewright.pipeline.store.probe import HEAD_NBYTES
from tilewright.pipeline.text import saved_counts
from tilewright.pipeline.worker import tasks
from tilewright.workflows import cli, plots
from tilewright.workflows.bench.common import BenchReport
from tilewright.workflows.cli import main
from tilewright.workflows.commands import reporting, texts

units = int(os.environ.get("UNITS_UNTIL_INTERRUPT", "0"))
place = os.environ.get("INTERRUPT_BEHIND", "")
by = os.environ.get("INTERRUPT_BY")


def interrupt() -> None:
    if by == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    elif by == "shell":
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)  # which the signal ends
    elif by == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        os.killpg(0, signal.SIGINT)


def interrupting(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, and Ctrl-C after it."""

    def call(*arguments: Any, **options: Any) -> None:
        function(*arguments, **options)
        interrupt()

    return call


get, on_all = FsspecStore.get, execute.on_all


def is_answered(key: str, arguments: tuple[Any, ...]) -> bool:
    """Whether this is asked before the first tile: for metadata, for the mark of what is not finished, or for what
    tells whether workers read the same."""
    asked_first = "zarr.json" in key or key.startswith(".") or UNFINISHED_NAME in key
    return asked_first or RangeByteRequest(0, HEAD_NBYTES) in arguments


async def silent(store: FsspecStore, key: str, *arguments: Any, **options: Any) -> Any:
    """What a store gives, up to the first tile's chunk: it never answers for that, and Ctrl-C comes then."""
    if is_answered(key, arguments) and not (place == "first silence" and "zarr.json" not in key):
        return await get(store, key, *arguments, **options)
    interrupt()
    await asyncio.Event().wait()


async def standing_still(store: FsspecStore, key: str, *arguments: Any, **options: Any) -> Any:
    """The same of a store that leaves the event loop to nobody else, so that nothing can be cancelled."""
    if is_answered(key, arguments):
        return await get(store, key, *arguments, **options)
    interrupt()
    threading.Event().wait()


def waiting_for_all(client: Client, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Ctrl-C once more, where the end of the workers' part is waited for."""
    if function is tasks.end_run:
        interrupt()
    on_all(client, function, *arguments, **options)


class Last:
    """Python deletes it after it has restored the signal handlers."""

    def __del__(self, kill: Callable[[int, int], None] = os.killpg, number: int = signal.SIGINT) -> None:
        kill(0, number)


def listener(event: Event) -> None:
    global units
    if isinstance(event, UnitDone):
        units -= 1
        if units == 0:
            interrupt()


@contextmanager
def listening(*, quiet: bool = False) -> Iterator[Listener]:
    yield listener


if __name__ == "__main__":  # worker processes import this file too
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background commands of a shell ignore it
    cli.listening = texts.listening = listening
    local_cluster.START_SECONDS = float(os.environ.get("START_SECONDS", local_cluster.START_SECONDS))  # type: ignore[misc]
    waited = os.environ.get("INTERRUPTED_SECONDS", local_cluster.INTERRUPTED_SECONDS)
    local_cluster.INTERRUPTED_SECONDS = float(waited)  # type: ignore[misc]
    here.INTERRUPTED_SECONDS = float(waited)
    if place == "publish":
        Output.publish = interrupting(Output.publish)  # type: ignore[method-assign]
    elif place == "workers":
        Nanny.__init__ = interrupting(Nanny.__init__)  # type: ignore[method-assign]
    elif place == "save":
        saved_counts.save_histogram = interrupting(saved_counts.save_histogram)
    elif place == "plot":
        plots.plot_histogram = interrupting(plots.plot_histogram)
    elif place == "bars":
        BenchReport.plot = interrupting(BenchReport.plot)  # type: ignore[method-assign]
    elif place == "print":
        texts.print_result = interrupting(texts.print_result)
        cli.print_result = reporting.print_result = texts.print_result
    elif place == "exit":
        atexit.register(interrupt)
    elif place in ("silence", "first silence"):
        FsspecStore.get = silent  # type: ignore[method-assign]
    elif place == "standstill":
        FsspecStore.get = standing_still  # type: ignore[method-assign]
        execute.on_all = waiting_for_all
    elif place == "end":
        sys.last_of_all = Last()  # type: ignore[attr-defined]
    main()
