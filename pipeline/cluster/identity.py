"""How a worker answers a question, and what it is told apart by from one that runs another Tilewright. This module can
be imported whatever else cannot.

Clients and workers of different versions find each other out by the names in it, so those stay as they are. A worker of
a version that lacks one of them cannot unpickle what it is asked, which the client is told.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from importlib.resources import files
from importlib.resources.abc import Traversable
from inspect import isawaitable, signature
from typing import Any

from tilewright import __version__
from tilewright.pipeline import pickling as pickle

LAYERS = ("kernels", "pipeline")
"""Those that run on workers."""


COMPARED = {"zarr": 2, "numcodecs": 2, "numpy": 1, "dask": 3, "distributed": 3}
"""Libraries whose objects travel pickled, and how many parts of their versions have to be the same: NumPy's arrays are
pickled alike since 2.0, and Dask promises nothing from one release to the next. Python itself pickles by minor version:
what is pickled by value holds its byte code."""

MISSING = "none"
"""The version of a library that is not installed."""


@dataclass(frozen=True)
class Code:
    """What Tilewright a process runs, and by which libraries it pickles.

    Numba, and NumPy's minor version, are not compared: any that works with Tilewright gives the same integers, and
    floats that differ by their rounding, as those of another processor do; one that it does not work with fails by
    itself.
    """

    version: str
    sources: str
    """A hash of its `LAYERS`, by which checkouts of the same version differ; or why there is none."""
    pickles: tuple[tuple[str, str], ...] = ()
    """Python and the libraries of `COMPARED`, and as much of their versions as has to be the same."""
    installed: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """The whole versions of these."""

    @property
    def tilewright(self) -> tuple[str, str]:
        return self.version, self.sources

    def others(self, than: Code) -> list[str]:
        """What it has other versions of, with these, as `zarr 3.1.6`."""
        theirs, whole = dict(than.pickles), dict(self.installed)
        return [f"{name} {whole.get(name, part)}" for name, part in self.pickles if theirs.get(name) != part]

    def __str__(self) -> str:
        return f"{self.version} (sources {self.sources})"


@dataclass(frozen=True)
class Differs:
    """What comes from a worker that runs another Tilewright than its client, in place of any answer or result."""

    worker: str
    """Where other workers reach it."""
    code: Code


@dataclass(frozen=True)
class Unreadable:
    """What comes from a worker that runs the same, and cannot unpickle what it is to do."""

    worker: str
    code: Code
    error: str
    """What it failed with."""


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


@cache
def code_here() -> Code:
    """What this process runs. Whoever may use Dask asks as soon as this is imported (`cluster.py`; a worker, when it is
    first asked), when the other modules are as old: a checkout that is edited later does not change what runs here."""
    installed = {"Python": platform.python_version()} | {name: _installed(name) for name in COMPARED}
    parts = {"Python": 2} | COMPARED
    pickles = tuple((name, ".".join(of.split(".")[: parts[name]])) for name, of in installed.items())
    try:
        sources = hash_of_sources(files("tilewright"))
    except OSError as error:  # raised here, it would be taken for a failed connection
        sources = f"that cannot be read: {error}"
    return Code(__version__, sources, pickles, tuple(installed.items()))


def _installed(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return MISSING


def address_of(worker: Any) -> str:
    """The address that the scheduler and other workers know a worker by, which may be another than it listens at."""
    address: str = worker.contact_address or worker.address
    return address


async def answer(ours: Code | None, question: bytes, dask_worker: Any) -> Any:
    """The result of ``function(*arguments)`` here; ``question`` is the pickled pair. Dask fills in ``dask_worker``.

    A worker that does not run ``ours``, the code of the client, does not look at the question. None: it is the client's
    own process.

    Callers take an OSError for a failed connection to this worker. So one that the question itself raises, or the
    import of what it needs (a device that may not be opened, a library that cannot be loaded), becomes a NoAnswerError.
    """
    if ours is not None and ours != code_here():
        return Differs(address_of(dask_worker), code_here())
    try:
        function, arguments = pickle.loads(question)
        worker = {"dask_worker": dask_worker} if "dask_worker" in signature(function).parameters else {}
        found = function(*arguments, **worker)
        return await found if isawaitable(found) else found
    except OSError as error:
        raise NoAnswerError(f"{type(error).__name__}: {error}") from error
