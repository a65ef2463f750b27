"""Arrays in stores that keep what is written in a session until that is committed: icechunk's.

A session's own store cannot be pickled, and what is written to a pickled copy of its fork stays in that copy. So each
tile is written to a fork of its own, which comes back with the tile's report, and a worker that is lost loses only the
tiles that it has not reported. The client merges the forks into one, which the check reads, and that into the caller's
session once C is found right. Nothing here commits.

icechunk need not be installed: whoever has such a store has it.
"""

from __future__ import annotations

import pickle
from typing import Any

import zarr

from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.store.arrays import in_one_line, in_store, name_of
from tilewright.pipeline.store.region import StoredArray


def session_of(array: StoredArray) -> Any | None:
    """The icechunk session that an array's store writes to and reads from; None for any other store, also for one that
    wraps an icechunk store, and would be lost with another session."""
    store: Any = array.store
    return store.session if type(store).__module__.partition(".")[0] == "icechunk" else None


def is_fork(session: Any) -> bool:
    return type(session).__name__ == "ForkSession"


def forked(array: zarr.Array[Any], role: str) -> zarr.Array[Any]:
    """An array of a writable session as its fork has it, which can be pickled.

    Raises StoreError for a session that has no forks: one with uncommitted changes, before icechunk 2.
    """
    session = session_of(array)
    assert session is not None
    try:
        return in_store(array, session.fork().store)
    except Exception as error:
        raise StoreError(
            f"{role}: {name_of(array)} is open in a session that cannot be forked for the workers"
            f" ({in_one_line(error)}); commit that (session.commit(message)), open the array in a new session"
            f" (repository.writable_session({session.branch!r})), and give that one"
        ) from error


def forked_output(array: zarr.Array[Any], role: str) -> zarr.Array[Any]:
    """As `forked`, for an array that is written to. Raises StoreError for any session that would not get what workers
    write."""
    session = session_of(array)
    assert session is not None
    if session.read_only:
        raise StoreError(
            f"{role}: {name_of(array)} is open in a session that only reads, or that was committed; open the array in a"
            " new one (repository.writable_session(branch)), and give that one"
        )
    if is_fork(session):
        raise StoreError(
            f"{role}: {name_of(array)} is open in a fork of a session, and its pickled copies, which workers write to,"
            " do not share their writes with it; give the array as the session itself has it, which is forked for the"
            " workers and gets their writes"
        )
    return forked(array, role)


def own_copy(array: zarr.Array[Any]) -> zarr.Array[Any]:
    """The array for one tile to be written to: that of a fork gets a fork of its own, any other is shared by all."""
    session = session_of(array)
    return array if session is None else in_store(array, pickle.loads(pickle.dumps(session)).store)


def changes_in(array: zarr.Array[Any]) -> bytes | None:
    """What was written to a fork's array, to be merged by the client; None where the store itself has it.

    About 30 bytes for each chunk, and chunks of at most 512 bytes (by default) as a whole.
    """
    session = session_of(array)
    return None if session is None else pickle.dumps(session)


def changes_nbytes(array: StoredArray) -> int:
    """Bytes that travel with every copy of an array beside its metadata."""
    session = session_of(array)
    return 0 if session is None or session.read_only else len(pickle.dumps(session))


class Gathered:
    """What workers write to an array of the caller's session, until it is merged there."""

    def __init__(self, array: zarr.Array[Any], role: str = "output") -> None:
        """Raises StoreError as `forked_output`."""
        self._given = array
        self.empty = forked_output(array, role)
        """The array that tiles are given, each to be written to a fork of its own."""
        self.whole = own_copy(self.empty)
        """The array with all that was kept so far."""

    def keep(self, changes: bytes) -> None:
        """Take what `changes_in` gave for a tile. Of a tile that was written twice the later one counts."""
        self._merge(session_of(self.whole), pickle.loads(changes))

    def publish(self) -> str:
        """Merge all of it into the caller's session. Returns what the caller has to do.

        Raises StoreError where the session takes nothing any more, as when it was committed meanwhile.
        """
        session = session_of(self._given)
        assert session is not None
        self._merge(session, session_of(self.whole))
        return (
            f"C is in the session of branch {session.branch!r} that it was given in, and is not committed yet:"
            " session.commit(message) does that"
        )

    def _merge(self, session: Any, fork: Any) -> None:
        try:
            session.merge(fork)
        except Exception as error:
            raise StoreError(
                f"output: what was written to {name_of(self._given)} cannot be merged into its session"
                f" ({in_one_line(error)}); leave that session alone, uncommitted, until the work is done"
            ) from error
