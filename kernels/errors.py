"""Errors that a caller can cause. Each message says what was found, what is allowed and what to change.

They live in the lowest layer so that every layer can raise them; ``tilewright.pipeline.errors`` adds those
that speak of stores, plans and clusters.
"""

from __future__ import annotations

import re

LINE_BREAKS = re.compile(r"\s*[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]\s*")
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class TilewrightError(Exception):
    """The base of every error that Tilewright raises on purpose.

    Its text is one line, without control characters, whatever names of files and words of other libraries it quotes:
    logs and terminals get it as it is.
    """

    def __str__(self) -> str:
        line = LINE_BREAKS.sub(" ", super().__str__()).strip()
        return CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", line)


class ShapeError(TilewrightError, ValueError):
    """Sides that do not match, or an array with the wrong number of dimensions."""


class DTypeError(TilewrightError, TypeError):
    """An element type that the operation does not take."""


class OptionError(TilewrightError, ValueError):
    """An argument outside the values it may have."""


class OutputError(TilewrightError, ValueError):
    """An output array of the wrong shape, dtype or device, or one that overlaps an input."""


class DeviceUnavailableError(TilewrightError, RuntimeError):
    """The device that was asked for is not there, or cannot be used."""


class DeviceMemoryError(MemoryError, TilewrightError):
    """The device, or the host that computes in its place, has less memory than was asked for.

    ``MemoryError`` comes first: it has a ``__new__`` of its own, and tblib, with which Dask unpickles errors sent
    between processes, calls the first ``__new__`` that it finds.
    """
