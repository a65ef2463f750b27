"""Listeners for people, on standard error: a live display on a terminal, a few plain lines anywhere else."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

from tilewright.pipeline.events import (
    Event,
    Listener,
    Notice,
    UnitDone,
    WorkDone,
    WorkPlanned,
)
from tilewright.workflows.tally import Tally, in_all

LINE_SECONDS = 10.0
"""Where there is no terminal: the least time between two lines about the same work."""


@contextmanager
def listening(*, quiet: bool = False) -> Iterator[Listener]:
    """A listener that shows what happens on standard error for as long as the block runs."""
    if quiet or sys.stderr is None:  # None: closed by whoever started this process
        yield _quiet
    elif sys.stderr.isatty():
        from tilewright.workflows.display import displaying

        with displaying() as listener:
            yield listener
    else:
        yield Lines()


def _quiet(event: Event) -> None:
    """Ignores all events: `events.log_notices` would log some, and Python prints what is logged where no handler takes
    it."""


class Counting:
    """Counts the finished units of one piece of work, for the message when it was stopped."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._planned: WorkPlanned | None = None
        self._done = 0

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[Listener]:
        """A listener that counts, and hands everything on."""

        def counting(event: Event) -> None:
            if isinstance(event, WorkPlanned) and event.name == self._name:
                self._planned, self._done = event, event.done
            elif isinstance(event, UnitDone) and event.name == self._name:
                self._done += 1
            listener(event)

        yield counting

    def __str__(self) -> str:
        if self._planned is None:
            return "what earlier runs have finished, if any"
        return f"{self._done} of {in_all(self._planned)}"


class Lines:
    """Notices as they come, and how far the work has come every `LINE_SECONDS`."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[Tally, float]] = {}

    def __call__(self, event: Event) -> None:
        now = time.perf_counter()
        if isinstance(event, Notice):
            _print(event.message)
        elif isinstance(event, WorkPlanned):
            self._running[event.name] = Tally(event, now), now
        elif isinstance(event, UnitDone) and event.name in self._running:
            tally, last = self._running[event.name]
            tally.add(event)
            if now - last >= LINE_SECONDS:
                _print(f"{event.name}: {tally.rates(now)}")
                self._running[event.name] = tally, now
        elif isinstance(event, WorkDone):
            self._running.pop(event.name, None)


def _print(line: str) -> None:
    try:
        click.echo(line, err=True)
    except OSError as error:
        # A log on a full disk is no reason to end the work; a pipe whose reader is gone ends it, as everywhere.
        if error.errno == errno.EPIPE:
            raise
