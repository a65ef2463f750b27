"""How a worker answers a question. This module can be imported whatever else cannot."""

from __future__ import annotations

from inspect import isawaitable, signature
from typing import Any

from distributed.protocol import pickle


class NoAnswerError(Exception):
    """The worker itself failed to answer, not the connection to it."""


async def answer(question: bytes, dask_worker: Any) -> Any:
    """The result of ``function(*arguments)`` here; ``question`` is the pickled pair. Dask fills in ``dask_worker``.

    Callers take an OSError for a failed connection to this worker. So one that the question itself raises, or the
    import of what it needs (a device that may not be opened, a library that cannot be loaded), becomes a NoAnswerError.
    """
    try:
        function, arguments = pickle.loads(question)
        worker = {"dask_worker": dask_worker} if "dask_worker" in signature(function).parameters else {}
        found = function(*arguments, **worker)
        return await found if isawaitable(found) else found
    except OSError as error:
        raise NoAnswerError(f"{type(error).__name__}: {error}") from error
