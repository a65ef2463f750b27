"""Types of options that click does not have. They import what they need when a value is given: ``--help`` waits for
none of it, but that of a histogram, which lists the kinds, for NumPy."""

from __future__ import annotations

from functools import cached_property
from pathlib import PurePath
from typing import Any

import click

from tilewright.workflows.console import import_dask


class Size(click.ParamType):
    """Bytes, as a number or with a unit."""

    name = "size"

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        import_dask()
        from tilewright.pipeline.config import as_nbytes
        from tilewright.pipeline.errors import OptionError

        try:
            nbytes = as_nbytes(value, self.name)
        except OptionError as error:
            self.fail(str(error).removeprefix(f"{self.name}: "), param, ctx)
        if nbytes < self.least:
            self.fail(f"{value!r} is {nbytes} bytes; it must be {self.least} or more", param, ctx)
        return nbytes


class FileName(click.ParamType):
    """The name of a file whose ending says its format."""

    name = "file"

    def __init__(self, *endings: str) -> None:
        self.endings = endings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        suffix = PurePath(value).suffix
        if suffix not in self.endings:
            found = f"ends in {suffix!r}" if suffix else "has no ending"
            allowed = " or ".join(self.endings)
            self.fail(f"{value!r} {found}; the ending says the format and is {allowed}", param, ctx)
        return str(value)


class Kinds(click.Choice):
    """The kinds of histogram, as the kernels list them."""

    def __init__(self) -> None:
        self.case_sensitive = True

    @cached_property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]
        from tilewright.kernels.histograms.tokens import KINDS

        return tuple(KINDS)
