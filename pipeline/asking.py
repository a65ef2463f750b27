"""What a worker does that is asked a question: it can be imported whatever else cannot be there."""

from __future__ import annotations

from inspect import isawaitable, signature
from typing import Any

from distributed.protocol import pickle


class NoAnswerError(Exception):
    """A worker's own failure to answer."""


async def answer(question: bytes, dask_worker: Any) -> Any:
    """What ``function(*arguments)`` gives here, of which ``question`` is made; Dask fills in ``dask_worker``.

    A caller takes an OSError for a failure of the way to this worker. So where the question itself, or the import of
    what it needs, meets one (a device that may not be opened, a library that cannot be loaded), that is no longer one.
    """
    try:
        function, arguments = pickle.loads(question)
        worker = {"dask_worker": dask_worker} if "dask_worker" in signature(function).parameters else {}
        found = function(*arguments, **worker)
        return await found if isawaitable(found) else found
    except OSError as error:
        raise NoAnswerError(f"{type(error).__name__}: {error}") from error
