"""The profiles that commands know here, and the files that they are of."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import click

from tilewright.pipeline.cluster.profiles import INSTALLED_PROFILES, FoundProfiles, find_profiles, that_of
from tilewright.pipeline.errors import ClusterError, OptionError
from tilewright.workflows.console import is_quiet


@dataclass(frozen=True)
class Profiles:
    """Every profile, with the file that it is of. What it says stays there, since it may hold secrets."""

    found: FoundProfiles

    def to_json(self) -> dict[str, Any]:
        return {
            "profiles": [
                {
                    "name": name,
                    "kind": profile.options["kind"],
                    "file": str(profile.file),
                    "replaces": [str(path) for path in self.found.replaced(name)],
                    "extends": [{"name": other, "file": str(path)} for other, path in profile.extends],
                }
                for name, profile in self.found.profiles.items()
            ],
            "read": [str(file.path) for file in self.found.files],
            "absent": [str(path) for path in self.found.absent],
        }

    def __str__(self) -> str:
        profiles = self.found.profiles
        width = max(map(len, profiles))
        lines = []
        for name, profile in profiles.items():
            replaced = self.found.replaced(name)
            more = f", extends {profile.base(name)}" if profile.extends else ""
            if replaced:
                more += f", in place of {' and '.join(map(that_of, replaced))}"
            lines.append(f"{name:<{width}}  {profile.options['kind']:<8}  {_named(profile.file)}{more}")
        read = [_named(file.path) for file in self.found.files]
        lines += ["", f"read, the nearest last: {', '.join(read)}"]
        if self.found.only:
            lines.append("no other place was looked at, since a file was named")
        elif self.found.absent:
            lines.append(f"not there: {', '.join(map(str, self.found.absent))}")
        return "\n".join(lines)


def profiles(cluster_file: str | None = None) -> Profiles:
    """All profiles that a command would know here with this ``--cluster-file``. Raises ClusterError and OptionError as
    `find_profiles`."""
    return Profiles(find_profiles(cluster_file))


def tell_lost(cluster: Any, cluster_file: Any) -> None:
    """Print a notice where the profile that a command was given hides another, and what that says. What is wrong with
    the files is told where they are used."""
    if not isinstance(cluster, str) or "://" in cluster or is_quiet():
        return
    with suppress(ClusterError, OptionError):
        if (notice := find_profiles(cluster_file).lost(cluster)) is not None:
            click.echo(notice, err=True)


def _named(path: Any) -> str:
    return "built-in" if path == INSTALLED_PROFILES else str(path)
