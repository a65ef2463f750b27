"""Dask's sampling profiler, which some versions of Python hang under. This imports nothing heavy: whoever starts
processes of Dask's wants it."""

from __future__ import annotations

import sys

PROFILER_HANGS = (3, 11) <= sys.version_info < (3, 11, 9)
"""Whether this Python may hang for good under Dask's sampling profiler, which asks for the frames of all threads a
hundred times a second: there a collection of garbage can begin under the lock that a new thread waits for while it
holds the interpreter's (CPython's issue 106883). Dask leaves one of its two profilers out of 3.11 for that."""


def profiler_off() -> dict[str, str]:
    """What keeps it off in the environment of a process that runs the same Python, where it may hang."""
    return {"DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False"} if PROFILER_HANGS else {}
