"""The files of profiles. Dask is not imported for them: a command reads them before it knows what it needs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml

from tilewright.kernels.arguments import shown
from tilewright.pipeline import config
from tilewright.pipeline.errors import ClusterError

if TYPE_CHECKING:
    from distributed import Client
    from distributed.deploy import Cluster as DeployCluster

Cluster: TypeAlias = "str | Client | DeployCluster"
"""A profile's name, a scheduler's address, a client, or a cluster that Dask or one of its libraries has started."""

INSTALLED_PROFILES = Path(__file__).parents[1] / "cluster.yaml"
KINDS = ("local", "cpu", "cuda", "existing", "slurm", "class")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, where PyYAML was built with it; a file takes it a tenth of Python's 1.5 ms, at each call."""


@dataclass(frozen=True)
class Profile:
    """What a profile says, and where."""

    options: dict[str, Any]
    """Its keys, ``kind`` among them."""
    file: Path

    def called(self, name: str) -> str:
        """What messages call it."""
        built_in = self.file == INSTALLED_PROFILES
        return f"built-in profile {name!r}" if built_in else f"profile {name!r} of {self.file}"


def load_profiles(path: str | os.PathLike[str] | None = None) -> dict[str, Profile]:
    """The profiles of a file, and the built-in ones that it does not define anew.

    path: the file; unset: the configured one, else ./cluster.yaml where there is one.

    Raises
    ------
    ClusterError
        The file is missing, is no YAML, or does not hold a mapping of profiles with a known ``kind``.
    OptionError
        ``path`` is none.
    """
    own = profiles_file(path)
    return _read_profiles(INSTALLED_PROFILES) | (_read_profiles(own) if own is not None else {})


def profiles_file(path: str | os.PathLike[str] | None) -> Path | None:
    """The file of the user's own profiles, if any."""
    chosen = config.get("cluster-file", path)
    if chosen is not None:
        return Path(chosen)
    here = Path("cluster.yaml")
    return here if here.is_file() else None


def _read_profiles(path: Path) -> dict[str, Profile]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), LOADER)
    except OSError as error:
        raise ClusterError(f"cannot read the profiles file {path}: {error}") from error
    except (
        Exception
    ) as error:  # text that is no UTF-8, and what YAML's types have to say, such as of a date without day
        raise ClusterError(f"{path} is not valid YAML: {error}") from error
    profiles = content.get("profiles") if isinstance(content, dict) else None
    if not isinstance(profiles, dict) or not profiles:
        raise ClusterError(f"{path} has no mapping 'profiles'; see {INSTALLED_PROFILES} for the form")
    for name, profile in profiles.items():
        kind = profile.get("kind") if isinstance(profile, dict) else None
        if kind not in KINDS:
            raise ClusterError(
                f"profile {shown(name)} in {path} has kind {shown(kind)}; it may be {', '.join(KINDS)}"
            )
    return {str(name): Profile(profile, path) for name, profile in profiles.items()}


class BatchProfileError(ClusterError):
    """A profile of kind ``slurm``, of which there is no cluster in this process. A command that meets it has found
    nothing wrong with its arguments, and becomes a batch job."""

    def __init__(self, called: str, options: dict[str, Any]) -> None:
        super().__init__(
            f"{called} is of kind slurm, by which a command becomes a batch job: tilewright matmul ... --profile; from"
            " Python pass a cluster of Dask's, or a profile of kind existing with the address of a scheduler"
        )
        self.called, self.options = called, options
