"""Pipes that nobody writes to, in place of files: whoever opens one as a file waits for ever."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PATIENCE_SECONDS = 10.0


@contextmanager
def pipe_at(path: Path) -> Iterator[None]:
    """A pipe in place of what stands there. Whoever waits at it is let go after a while, and the test fails."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    over, waiting = threading.Event(), []

    def let_go() -> None:
        patience = PATIENCE_SECONDS
        while not over.wait(patience):
            patience = 0.1
            with suppress(OSError):  # nobody has opened it
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                waiting.append(path)

    helper = threading.Thread(target=let_go)
    helper.start()
    try:
        yield
    finally:
        over.set()
        helper.join()
        assert not waiting, f"{path} was waited for"
