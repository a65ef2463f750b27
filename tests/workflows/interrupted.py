"""Run as a script: ``tilewright`` with the arguments given, and Ctrl-C when so many units are done.

The signal goes to the whole process group, as a terminal sends it, and from the listener, so that it is known
how far the work has come: no test sleeps and hopes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from tilewright.pipeline.events import Event, Listener, UnitDone
from tilewright.workflows import progress
from tilewright.workflows.cli import main

units = int(os.environ.get("UNITS_UNTIL_INTERRUPT", "0"))


def listener(event: Event) -> None:
    global units
    if isinstance(event, UnitDone):
        units -= 1
        if units == 0:
            os.killpg(0, signal.SIGINT)


@contextmanager
def listening(*, quiet: bool = False) -> Iterator[Listener]:
    yield listener


if __name__ == "__main__":  # worker processes import this file too
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background commands begin deaf to it
    progress.listening = listening
    main()
