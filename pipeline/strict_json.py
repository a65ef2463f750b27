"""JSON that every reader takes: it has no numbers for NaN and infinities. And lists of it that are long, in pieces."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

JSON_ROWS = 2**16
"""Elements of a long list that become text at a time."""


def strict(value: Any) -> Any:
    """The same with texts in place of these, ``"nan"``, ``"inf"`` and ``"-inf"``."""
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _as_list(values: Sequence[Any] | np.ndarray) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def list_pieces(
    values: Sequence[Any] | np.ndarray, as_list: Callable[[Any], list[Any]] = _as_list, rows: int = JSON_ROWS
) -> Iterator[str]:
    """The text of ``json.dumps`` of a list in pieces, each of so many values. as_list: makes of some of them what JSON
    knows.

    >>> list(list_pieces(range(3), rows=2))
    ['[', '0, 1', ', 2', ']']
    """
    yield "["
    for start in range(0, len(values), rows):
        text = json.dumps(as_list(values[start : start + rows]))[1:-1]
        yield f", {text}" if start else text
    yield "]"
