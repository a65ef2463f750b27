"""How a worker answers a question, and what it is told apart by from one that runs another Tilewright. This module can
be imported whatever else cannot.

Clients and workers of different versions find each other out by the names in it, so those stay as they are. A worker of
a version that lacks one of them cannot unpickle what it is asked, which the client is told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from inspect import isawaitable, signature
from typing import Any

from distributed.protocol import pickle

from tilewright import __version__

LAYERS = ("kernels", "pipeline")
"""Those that run on workers."""


@dataclass(frozen=True)
class Code:
    """What Tilewright a process runs.

    Of Tilewright alone: any NumPy or Numba that it works with gives the same integers, and floats that differ by their
    rounding, as those of another processor do; one that it does not work with fails by itself.
    """

    version: str
    sources: str
    """A hash of its `LAYERS`, by which checkouts of the same version differ; or why there is none."""

    def __str__(self) -> str:
        return f"{self.version} (sources {self.sources})"


@dataclass(frozen=True)
class Differs:
    """What comes from a worker that runs another Tilewright than its client, in place of any answer or result."""

    worker: str
    """Where other workers reach it."""
    code: Code


class NoAnswerError(Exception):
    """The worker itself failed to answer, not the connection to it."""


def hash_of_sources(package: Traversable) -> str:
    """A hash, 16 hexadecimal digits, of the modules of `LAYERS` in this folder, or ZIP file."""
    digest = hashlib.sha256()
    for layer in LAYERS:
        for name, content in _modules(package / layer, layer):
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()[:16]


def _modules(folder: Traversable, below: str) -> Iterator[tuple[str, bytes]]:
    """Name and content of each, always in the same order; no file that could not be imported, such as an editor's."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        name, place = entry.name, f"{below}/{entry.name}"
        if name.endswith(".py"):
            if name.removesuffix(".py").isidentifier():
                yield place, entry.read_bytes()
        elif name.isidentifier() and name != "__pycache__" and entry.is_dir():
            yield from _modules(entry, place)


def _code_here() -> Code:
    try:
        return Code(__version__, hash_of_sources(files("tilewright")))
    except OSError as error:  # raised here, it would be taken for a failed connection
        return Code(__version__, f"that cannot be read: {error}")


HERE = _code_here()
"""What this process runs. Made at import, when the other modules are as old: a checkout that is edited later does not
change what runs here."""


def address_of(worker: Any) -> str:
    """The address that the scheduler and other workers know a worker by, which may be another than it listens at."""
    address: str = worker.contact_address or worker.address
    return address


async def answer(ours: Code, question: bytes, dask_worker: Any) -> Any:
    """The result of ``function(*arguments)`` here; ``question`` is the pickled pair. Dask fills in ``dask_worker``.

    A worker that does not run ``ours``, the code of the client, does not look at the question.

    Callers take an OSError for a failed connection to this worker. So one that the question itself raises, or the
    import of what it needs (a device that may not be opened, a library that cannot be loaded), becomes a NoAnswerError.
    """
    if ours != HERE:
        return Differs(address_of(dask_worker), HERE)
    try:
        function, arguments = pickle.loads(question)
        worker = {"dask_worker": dask_worker} if "dask_worker" in signature(function).parameters else {}
        found = function(*arguments, **worker)
        return await found if isawaitable(found) else found
    except OSError as error:
        raise NoAnswerError(f"{type(error).__name__}: {error}") from error
