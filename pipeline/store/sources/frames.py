"""DataFrames and Series of pandas: their numbers, and what their rows and columns are called."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.kernels.arguments import shown
from tilewright.pipeline.errors import DTypeError
from tilewright.pipeline.store.sources.beside import Coordinates

NUMBERS = "biufc"
MOST_NAMED = 5
"""Columns that a message names."""
AXES = ("index", "columns")
"""What pandas calls the axes, which is what those without a name are called."""


def is_frame(source: Any) -> bool:
    """Whether a source is pandas' DataFrame or Series: told by name, so that pandas need not be imported."""
    kind = type(source)
    return kind.__module__.partition(".")[0] == "pandas" and kind.__name__ in ("DataFrame", "Series")


def holds_rows(source: Any) -> bool:
    """Whether it is a Series of objects, such as a column of lists: what NumPy makes of it is looked at."""
    return source.ndim == 1 and source.dtype.kind == "O"


def values(source: Any, role: str, name: str) -> np.ndarray:
    """The numbers; NaN where one is missing (``pandas.NA``). Raises DTypeError for columns that hold none."""
    kinds = source.dtypes.items() if source.ndim == 2 else [(source.name, source.dtype)]
    kinds = [(column, kind) for column, kind in kinds]
    others = [f"{shown(column)} ({kind})" for column, kind in kinds if kind.kind not in NUMBERS]
    if others and source.ndim == 2:
        more = len(others) - MOST_NAMED
        named = ", ".join(others[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        raise DTypeError(
            f"{role}: {name} has columns that hold no numbers: {named}; leave them out, as select_dtypes('number') does"
        )
    extended = any(not isinstance(kind, np.dtype) for _, kind in kinds)
    if extended and not others and bool(np.any(source.isna().to_numpy())):
        return np.asarray(source.to_numpy(dtype=np.float64, na_value=np.nan))
    if extended and not others:
        return np.asarray(
            source.to_numpy(dtype=np.result_type(*(np.dtype(_plain(kind)) for _, kind in kinds)))
        )
    return np.asarray(source)


def _plain(kind: Any) -> Any:
    """NumPy's dtype of numbers of pandas' own dtypes."""
    return kind if isinstance(kind, np.dtype) else kind.type


def labels(source: Any) -> tuple[list[str], dict[str, Coordinates]]:
    """What the axes are called, and the labels of those that have some: not of those that are just numbered, nor of
    several levels."""
    names, found = [], {}
    for number, called in enumerate(AXES[: source.ndim]):
        axis = source.axes[number]
        name = called if axis.name is None else str(axis.name)
        names.append(name if name not in names else called)
        if axis.nlevels == 1 and not _is_numbered(axis):
            found[names[-1]] = Coordinates(np.asarray(axis), {})
    return names, found


def _is_numbered(axis: Any) -> bool:
    return type(axis).__name__ == "RangeIndex" and axis.start == 0 and axis.step == 1
