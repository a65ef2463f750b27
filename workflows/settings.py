"""The settings and their values here."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import dask.config

from tilewright.kernels.words import did_you_mean
from tilewright.pipeline import config
from tilewright.pipeline.config import Setting
from tilewright.pipeline.errors import OptionError

WIDTH = 100


@dataclass(frozen=True)
class Settings:
    """Every setting with its value in this process, as it was written."""

    values: tuple[tuple[Setting, Any], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "settings": [
                {
                    "name": setting.name,
                    "value": _plain(value),
                    "default": setting.default,
                    "unit": setting.unit,
                    "environment": setting.environment,
                    "meaning": setting.meaning,
                }
                for setting, value in self.values
            ]
        }

    def __str__(self) -> str:
        return "\n".join(_entry(setting, value) for setting, value in self.values)


def settings(names: Sequence[str] = ()) -> Settings:
    """The values of all settings, or of those that are named, from Dask's files, the environment and `dask.config.set`.

    Raises OptionError for an invalid or unknown one that is set, as everything does that would use it, and for a name
    of none.
    """
    config.check_all()
    known = {setting.name: setting for setting in config.SETTINGS}
    chosen = [known[_full(name, known)] for name in names] or config.SETTINGS
    return Settings(tuple((s, dask.config.get(s.name, s.default)) for s in chosen))


def _full(name: str, known: Iterable[str]) -> str:
    """The whole name of a setting, which may be given without ``tilewright.``."""
    bare = name.removeprefix("tilewright.").replace("_", "-")
    whole = f"tilewright.{bare}"
    if whole not in known:
        names = [one.removeprefix("tilewright.") for one in known]
        hint = did_you_mean(bare, names, name="tilewright.{}") or "; tilewright settings lists all"
        raise OptionError(f"{name}: there is no such setting{hint}")
    return whole


def _plain(value: Any) -> Any:
    """As JSON has it: a path, given from Python, as text."""
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _entry(setting: Setting, value: Any) -> str:
    changed = "" if value == setting.default else f" (default: {_said(setting.default)})"
    what = textwrap.fill(
        setting.meaning, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
    )
    return f"{setting.name} = {_said(value)}{changed}\n    {setting.environment}, {setting.unit}\n{what}"


def _said(value: Any) -> str:
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)
