"""The end of the command's process, once all is done: without taking Python apart module by module, which takes as long
as a small product."""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

COMMAND = "tilewright"

TOOLS = re.compile("injection|sanitizer|cupti|nsys", re.IGNORECASE)
"""In the names of libraries that Nsight's tools and compute-sanitizer load into a process."""


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Where this process is the command and nothing else, it ends by the status that comes out of this block as soon as
    Python has waited for its threads and called all that was registered for its end behind this."""
    if not is_the_command():
        yield
        return
    ending = _Ending()
    atexit.register(ending)  # called last of all that is registered from here on
    try:
        yield
    except SystemExit as error:
        ending.status = error.code if isinstance(error.code, int) else None if error.code else 0
        raise
    else:
        ending.status = 0


class _Ending:
    """What is called at the end of Python."""

    status: int | None = None
    """None: not known, so that Python ends by itself."""

    def __call__(self) -> None:
        if self.status is None or _is_looked_into():
            return
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):  # closed: Python says so by its status
            return
        logging.shutdown()
        os._exit(self.status)


def is_the_command() -> bool:
    """Whether this process is the command and nothing else."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return bool(spec.name == f"{COMMAND}.__main__")
    return os.path.basename(getattr(main, "__file__", None) or "") == COMMAND


def _is_looked_into() -> bool:
    """Whether a profiler or a checker of GPUs is in this process, whose own end comes with that of Python."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            return any(TOOLS.search(line) for line in maps)
    except OSError:
        return True
