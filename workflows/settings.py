"""The settings and their values here."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

import dask.config

from tilewright.pipeline import config
from tilewright.pipeline.config import Setting

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


def settings() -> Settings:
    """The values of all settings, from Dask's files, the environment and `dask.config.set`. Raises OptionError for an
    invalid or unknown one, as everything does that would use it."""
    config.check_all()
    return Settings(tuple((s, dask.config.get(s.name, s.default)) for s in config.SETTINGS))


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
