"""Which files of a folder this process holds open."""

from __future__ import annotations

import os
from pathlib import Path


def open_under(folder: Path) -> list[str]:
    """The paths in or at `folder` that descriptors of this process name, once a descriptor.

    A count of all descriptors would also see those that other tests' clusters and pools, still
    winding down on their own threads, open and close meanwhile.
    """
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the list's own, or one closed since
            continue
        if path.startswith(str(folder)):
            found.append(path)
    return found
