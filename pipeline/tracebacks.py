"""What errors keep alive: their tracebacks hold the frames they went through, and these every local variable."""

from __future__ import annotations

import inspect
import traceback
from contextlib import suppress

SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of code whose frames may wait to go on; clearing such a frame would end it."""


def clear_frames(error: BaseException) -> None:
    """Drop the local variables of an error's frames that have ended, and of the errors it came from.

    The traceback still names files and lines, so that logs say where the error came from.
    """
    errors: list[BaseException | None] = [error]
    seen: set[int] = set()
    while errors:
        one = errors.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if not frame.f_code.co_flags & SUSPENDABLE:
                with suppress(RuntimeError):  # it still runs
                    frame.clear()
        errors += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            errors += one.exceptions
