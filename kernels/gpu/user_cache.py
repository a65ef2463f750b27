"""Where this package keeps what makes a user's later processes faster; nothing there is ever needed."""

from __future__ import annotations

import os
from pathlib import Path


def folder(name: str) -> Path | None:
    """``$XDG_CACHE_HOME/tilewright/NAME``, by default below ``~/.cache``; None for a user without a home."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # neither the environment nor the list of users says where it is
        return None
    return home / "tilewright" / name
