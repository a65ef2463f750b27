"""What Dask preloads in worker processes that are not to log what tasks of ours fail with."""

from __future__ import annotations

import logging
import re
from typing import Any

NAME = __name__
"""What it is preloaded by."""

WORKERS = "distributed.worker"
"""What Dask's workers log under."""


class FailuresRaised(logging.Filter):
    """Drops what a worker logs of each attempt at a task of ours that fails: pages, about an error that is raised to
    the caller."""

    OURS = re.compile(r" tried\(")
    """In the text of a task: the function that every one of ours calls."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("Compute Failed") or not isinstance(record.args, tuple):
            return True
        return not any(self.OURS.search(str(argument)) for argument in record.args[:3])


def dask_setup(worker: Any) -> None:
    """Have this worker process drop those."""
    logging.getLogger(WORKERS).addFilter(FailuresRaised())
