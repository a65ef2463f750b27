"""The files that results about documents are written to: checked before the corpus is read, whole once they have their
names."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from tilewright.pipeline.text.saved_counts import check_outputs, place_of, suffix_of

Result = TypeVar("Result")


@dataclass(frozen=True)
class Outputs(Generic[Result]):
    """The files that one kind of result is written to."""

    group_kind: str
    """The attribute of a group of Zarr, or of Parquet's metadata, that says what it is."""
    writers: Mapping[str, Callable[[Result, Path | str, bool], None]]
    """By the ending of a file's name: writes a result there, and says whether it may replace what is there."""

    def check_of(
        self, out: str | os.PathLike[str] | None, *, overwrite: bool
    ) -> Callable[[Collection[str]], None] | None:
        """What checks an output against the corpus that it is given, as `saved_counts.check_outputs` does; None where
        there is none."""
        if out is None:
            return None
        endings, kind = tuple(self.writers), self.group_kind
        return partial(
            check_outputs, out=out, plot=None, overwrite=overwrite, out_endings=endings, group_kind=kind
        )

    def save(self, found: Result, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write a result; the file, or what stands at the URL, appears when it is whole, or not at all. That the name
        has one of the endings, `check_of` has said.

        Raises
        ------
        OutputExistsError
            Something stands there and ``overwrite`` is false.
        StoreError
            The file cannot be written.
        """
        place = place_of(path)
        self.writers[suffix_of(place)](found, place, overwrite)
