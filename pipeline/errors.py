"""Errors about stores, plans, clusters and runs, on top of those of the kernels."""

from __future__ import annotations

from tilewright.kernels.errors import (
    DeviceMemoryError,
    DeviceUnavailableError,
    DTypeError,
    OptionError,
    OutputError,
    ShapeError,
    TilewrightError,
)

__all__ = [
    "ClusterError",
    "CompressedError",
    "ConvergenceError",
    "CorpusError",
    "DTypeError",
    "DamagedError",
    "DamagedProductError",
    "DeviceMemoryError",
    "DeviceUnavailableError",
    "DocumentError",
    "MalformedDocumentError",
    "OptionError",
    "OutputError",
    "OutputExistsError",
    "PlanError",
    "RunEndedError",
    "ShapeError",
    "StoreError",
    "TaskError",
    "TilewrightError",
    "VerificationError",
]


class StoreError(TilewrightError, OSError):
    """A path that is not there, is no Zarr array, cannot be read, or cannot be written."""


class DamagedError(StoreError):
    """A chunk whose stored bytes cannot be decoded, or have the wrong length, however often they are read."""


class DamagedProductError(DamagedError):
    """A damaged chunk of the product that is being checked."""


class OutputExistsError(StoreError):
    """The output is there already and ``overwrite`` was not asked for."""


class CorpusError(TilewrightError, OSError):
    """A corpus without files, or a file of it that cannot be read."""


class DocumentError(CorpusError):
    """A document that no retry can read here: it is gone, has changed since the corpus was listed, or is not
    a file."""


class CompressedError(DocumentError):
    """A compressed document that cannot be decompressed here."""


class MalformedDocumentError(DocumentError):
    """A document whose contents are not what its form (tar, zip, WARC, JSON lines, Parquet, Arrow) asks for."""


class PlanError(TilewrightError, ValueError):
    """No plan fits the memory that was given."""


class ClusterError(TilewrightError, RuntimeError):
    """A profile that is not known or not valid, or a cluster that cannot be reached, has no workers, or has some
    that run another version of Tilewright."""


class RunEndedError(ClusterError):
    """A run was ended on a worker, where a retry of its tasks would only end the same way."""


class TaskError(TilewrightError, RuntimeError):
    """A task failed on every attempt; the message carries the worker's own error."""


class VerificationError(TilewrightError, ArithmeticError):
    """A product that failed its own check."""


class ConvergenceError(TilewrightError, ArithmeticError):
    """An iteration that did not get as near to its result as was asked for, in as many passes as it was given."""
