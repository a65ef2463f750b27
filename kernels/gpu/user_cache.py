"""Where this package keeps what makes a user's later processes faster; nothing there is ever needed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

OFF = ("off", "0", "no", "false")


def chosen(environment: str, usual: Callable[[], Path | None]) -> Path | None:
    """The folder that a variable of the environment names, and without it the usual one; None where it says `OFF`."""
    wanted = os.environ.get(environment, "")
    if wanted.lower() in OFF:
        return None
    try:
        return Path(wanted).expanduser() if wanted else usual()
    except RuntimeError:  # it begins with the home of a user who has none
        return None


def folder(name: str) -> Path | None:
    """``$XDG_CACHE_HOME/tilewright/NAME``, by default below ``~/.cache``; None for a user without a home."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # neither the environment nor the list of users says where it is
        return None
    return home / "tilewright" / name
