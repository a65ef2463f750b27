"""Pickles as Dask makes them, which also holds what only cloudpickle can pickle, without Dask's ``distributed`` where
Python's own pickles do."""

from __future__ import annotations

import pickle
import sys
from typing import Any

MAIN = b"\x8c\x08__main__"
"""How a pickle names that module, of which other processes have another; paths may have its name in theirs."""


def dumps(what: Any) -> bytes:
    """What ``distributed.protocol.pickle.dumps`` gives, or another pickle of the same."""
    if not _by_value():
        try:
            found = pickle.dumps(what, protocol=pickle.HIGHEST_PROTOCOL)
            if MAIN not in found:
                return found
        except Exception:  # by value it may be possible, and if not Dask says so
            pass
    from distributed.protocol import pickle as of_dask

    pickled: bytes = of_dask.dumps(what)
    return pickled


def _by_value() -> bool:
    """Whether somebody has named modules whose objects are to be pickled by value."""
    try:
        return bool(sys.modules["cloudpickle"].list_registry_pickle_by_value())
    except KeyError:  # nobody could
        return False


def loads(pickled: bytes) -> Any:
    return pickle.loads(pickled)
