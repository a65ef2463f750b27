"""The listener for a terminal: a bar for each piece of work, removed when the work is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from tilewright.pipeline.events import Event, Listener, Notice, UnitAdvanced, UnitDone, WorkDone, WorkPlanned
from tilewright.workflows.terminal.progress import WorkProgress


@contextmanager
def displaying() -> Iterator[Listener]:
    """A listener that shows what happens on standard error, a terminal, for as long as the block runs."""
    with display(Console(stderr=True, highlight=False)) as progress:
        yield Display(progress)


def display(console: Console) -> Progress:
    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), _Rates()]
    return Progress(*columns, console=console, transient=True)


class _Rates(ProgressColumn):
    """The rates of a task, counted from its events rather than from the display's own clock."""

    def render(self, task: Task) -> Text:
        work: WorkProgress = task.fields["work"]
        return Text(work.rates(time.perf_counter()))


class Display:
    """Shows each piece of work that is under way as a bar of a live display."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._running: dict[str, tuple[WorkProgress, Task]] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, Notice):
            self._progress.console.print(event.message, markup=False, soft_wrap=True)
        elif isinstance(event, WorkPlanned):
            if event.name in self._running:  # begun anew under another plan
                self._progress.remove_task(self._running.pop(event.name)[1].id)
            work = WorkProgress(event, time.perf_counter())
            number = self._progress.add_task(event.name, total=event.total, completed=event.done, work=work)
            self._running[event.name] = work, self._progress.tasks[self._progress.task_ids.index(number)]
        elif isinstance(event, UnitDone) and event.name in self._running:
            work, task = self._running[event.name]
            work.add(event, time.perf_counter())
            self._progress.advance(task.id)
        elif isinstance(event, UnitAdvanced) and event.name in self._running:
            self._running[event.name][0].advance(event, time.perf_counter())
        elif isinstance(event, WorkDone) and event.name in self._running:
            _, task = self._running.pop(event.name)
            self._progress.remove_task(task.id)
