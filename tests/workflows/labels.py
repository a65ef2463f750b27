"""Coordinates that tests draw for axes of arrays, and those of another array along such an axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.pipeline.gram import naive

Draw = Callable[..., Any]

KINDS = ("latitudes", "radians", "times", "numbers")
OTHERS = ("the same", "the same in another way", "none", "one differs", "reversed")
POLES = 8
"""Axes of so many places reach from pole to pole: the weights of shorter ones would be 0."""


@dataclass(frozen=True)
class Labels:
    """Coordinates of an axis, and what their array says of them."""

    values: np.ndarray
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cosines(self) -> np.ndarray:
        """Of latitudes."""
        values = self.values.astype("f8")
        angles = values if self.attributes.get("units") == "radians" else np.deg2rad(values)
        return np.maximum(np.cos(angles), 0)


def drawn_labels(draw: Draw, length: int, kinds: Sequence[str] = KINDS) -> Labels:
    """Of which no two are the same."""
    kind = draw(st.sampled_from(kinds), label="coordinates")
    if kind == "times":
        return Labels(31 * np.arange(length), {"units": "days since 2000-01-01"})
    if kind == "numbers":
        return Labels(7 * np.arange(length, dtype=draw(st.sampled_from(["i4", "f4", "f8"]))) - 2)
    degrees = np.linspace(-90, 90, length) if length >= POLES else np.linspace(-80, 75, length)
    if kind == "radians":
        return Labels(np.deg2rad(degrees).astype(draw(st.sampled_from(["f4", "f8"]))), {"units": "radians"})
    units = draw(st.sampled_from([None, "degrees_north", "degrees"]), label="units")
    dtype = draw(st.sampled_from(["i2", "f4", "f8"]), label="dtype of coordinates")
    return Labels(degrees.astype(dtype), {} if units is None else {"units": units})


def others_along(draw: Draw, labels: Labels) -> tuple[Labels | None, bool]:
    """What another array has along the same axis, and whether its elements may be paired with those by their labels."""
    how = draw(st.sampled_from(OTHERS), label="coordinates of the other")
    values = labels.values
    if how == "none":
        return None, True
    if how == "reversed":
        return Labels(values[::-1].copy(), labels.attributes), len(values) == 1
    if how == "one differs":
        values = values.copy()
        values[draw(st.integers(0, len(values) - 1))] += 1
        return Labels(values, labels.attributes), False
    if how == "the same":
        return labels, True
    if "since" in str(labels.attributes.get("units")):
        return Labels(24.0 * values, {"units": "hours since 2000-01-01"}), True
    return Labels(values.astype("f8" if values.dtype.kind == "i" else "f4"), labels.attributes), True


def put_labelled(
    folder: Path,
    array: np.ndarray,
    chunks: tuple[int, ...],
    names: Sequence[str],
    along: Mapping[int, Any],
    **options: Any,
) -> Path:
    """Store an array with the names of its axes, and the coordinates of some, by their numbers, beside it."""
    folder.mkdir()
    for axis, labels in along.items():
        if labels is not None:
            naive.put(
                folder / names[axis], labels.values, attributes=dict(labels.attributes), dimension_names=[names[axis]]
            )  # fmt: skip
    return naive.put(folder / "v", array, chunks, dimension_names=list(names), **options)
