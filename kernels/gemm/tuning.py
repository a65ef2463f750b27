"""Which kernel was fastest on this GPU, remembered between runs: an aid to `select`, never needed.

One JSON file a GPU model in the user's cache directory, from a problem's bucket to a kernel's name. A file
that is missing or damaged, and names of kernels that are gone, count as nothing remembered.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tilewright.kernels.bfloat16 import dtype_name
from tilewright.kernels.gemm.base import Problem
from tilewright.kernels.gpu import user_cache

generation = 0
"""How often this process has measured; when it changes, decisions are made anew."""


def directory() -> Path | None:
    """Where figures are kept: ``gemm`` in the user's cache folder; None where there is none."""
    return user_cache.folder("gemm")


def _side(length: int) -> int:
    """Lengths of the same power of two, rounded up, share a bucket."""
    return max(length - 1, 0).bit_length()


def bucket(
    m: int, n: int, k: int, dtypes: tuple[np.dtype, np.dtype, np.dtype], precision: str, accumulate: bool
) -> str:
    """The name of all problems that one measurement covers."""
    kinds = "-".join(dtype_name(dtype) for dtype in dtypes)
    sides = "-".join(str(_side(length)) for length in (m, n, k))
    return f"{kinds} {precision}{' accumulate' if accumulate else ''} {sides}"


def _file(model: str | None) -> Path | None:
    """The file of a GPU model; None where nothing can be kept."""
    folder = directory()
    if model is None or folder is None:
        return None
    return folder / (re.sub(r"[^A-Za-z0-9]+", "-", model).strip("-") + ".json")


def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


_known = functools.cache(_read)
"""What this process goes by, read once: a file that another process writes counts from the next process on."""


def preferred(problem: Problem) -> str | None:
    """The name of the kernel that was measured fastest for such problems on such a GPU, if any was."""
    path = _file(problem.model)
    if path is None:
        return None
    dtypes = (problem.a.dtype, problem.b.dtype, problem.c.dtype)
    return _known(path).get(
        bucket(problem.m, problem.n, problem.k, dtypes, problem.precision, problem.accumulate)
    )


def remember(model: str | None, fastest: Mapping[str, str]) -> Path | None:
    """Add measurements to what the file of a GPU model holds by now, replacing it in one step; returns where it is.

    None where nothing can be kept: `directory` says so beforehand.
    """
    path = _file(model)
    if path is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        # From reading to replacing, so that processes that end together keep each other's results.
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json", delete=False) as draft:
            json.dump(_read(path) | dict(fastest), draft, indent=1, sort_keys=True)
        os.replace(draft.name, path)
    global generation
    _known.cache_clear()
    generation += 1
    return path
