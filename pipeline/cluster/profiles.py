"""The files of profiles. Of Dask only the configuration is imported: a command reads them before it knows what it
needs."""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import dask.config

from tilewright.kernels.arguments import shown
from tilewright.pipeline import config, strict_yaml
from tilewright.pipeline.errors import ClusterError
from tilewright.pipeline.strict_yaml import RepeatedKeyError

if TYPE_CHECKING:
    from distributed import Client
    from distributed.deploy import Cluster as DeployCluster

Cluster: TypeAlias = "str | Client | DeployCluster"
"""A profile's name, a scheduler's address, a client, or a cluster that Dask or one of its libraries has started."""

INSTALLED_PROFILES = Path(__file__).parents[1] / "cluster.yaml"
FILE_NAME = "cluster.yaml"
KINDS = ("local", "cpu", "cuda", "existing", "slurm", "class")
MACHINE_FOLDER = Path("/etc/tilewright")
"""Of files that all users of a machine have."""
SETTING = next(setting for setting in config.SETTINGS if setting.name == "tilewright.cluster-file")


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


@dataclass(frozen=True)
class ProfilesFile:
    """A file of profiles that was read."""

    path: Path
    profiles: dict[str, Profile]


@dataclass(frozen=True)
class FoundProfiles:
    """Every file of profiles that is read here, and those that there might be."""

    files: tuple[ProfilesFile, ...]
    """The built-in ones first; a profile of a later one takes the place of an earlier one's, whole."""
    absent: tuple[Path, ...] = ()
    """Where files were looked for, and are none."""
    only: bool = False
    """Whether one file was named, so that no other place was looked at."""

    @property
    def profiles(self) -> dict[str, Profile]:
        return {name: profile for file in self.files for name, profile in file.profiles.items()}

    def replaced(self, name: str) -> list[Path]:
        """The files whose profile of this name another one's takes the place of, the nearest first."""
        having = [file.path for file in self.files if name in file.profiles]
        return having[-2::-1]

    def told(self) -> str:
        """The names of all profiles, by the file that each is of, for messages."""
        names: dict[Path, list[str]] = {}
        for name, profile in self.profiles.items():
            names.setdefault(profile.file, []).append(name)
        files = [file.path for file in self.files[::-1] if file.path in names]
        texts = [
            f"{', '.join(sorted(names[path]))} {'(built-in)' if path == INSTALLED_PROFILES else f'of {path}'}"
            for path in files
        ]
        if self.only:
            texts.append("and no other file was read, since that one was named")
        elif len(self.files) == 1:
            texts.append(f"and there is no file of others at {', '.join(map(str, self.absent))}")
        return "; ".join(texts)


def load_profiles(path: str | os.PathLike[str] | None = None) -> dict[str, Profile]:
    """The profiles of all files that `find_profiles` finds, by their names. Raises as it does."""
    return find_profiles(path).profiles


def find_profiles(path: str | os.PathLike[str] | None = None) -> FoundProfiles:
    """The built-in profiles and those of the files here.

    path: the only file besides; unset: that which the environment or Python sets as ``tilewright.cluster-file``, else
    all that there are of `places`.

    Raises
    ------
    ClusterError
        A file cannot be read, is no YAML, says a key twice, or does not hold a mapping of profiles with a known
        ``kind``; or the one that was named is missing.
    OptionError
        ``path`` is none.
    """
    built_in = ProfilesFile(INSTALLED_PROFILES, _read_profiles(INSTALLED_PROFILES))
    chosen = config.get("cluster-file", path)
    if chosen is not None and (path is not None or not _is_of_dasks_files(chosen)):
        only = Path(chosen if path is not None else config.path_of("cluster-file") or chosen)
        return FoundProfiles((built_in, ProfilesFile(only, _read_profiles(only))), only=True)
    files, absent = [built_in], []
    for place in places():
        if _is_there(place.path):
            files.append(ProfilesFile(place.path, _read_profiles(place.path)))
        elif place.named_in is not None:
            raise ClusterError(
                f"there is no profiles file {place.path}, which tilewright.cluster-file names in {place.named_in}; mend"
                " it there, or name another file (--cluster-file), which is then the only one"
            )
        else:
            absent.append(place.path)
    return FoundProfiles(tuple(files), tuple(absent))


@dataclass(frozen=True)
class Place:
    """Where a file of profiles may be."""

    path: Path
    named_in: Path | None = None
    """The file of Dask's configuration that says so."""


def places() -> list[Place]:
    """Where files of profiles are looked for, the farthest first: those of the machine, of the installation and of the
    user, with files that Dask's configuration names between them, and that of the working directory."""
    own = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    found = [
        Place(MACHINE_FOLDER / FILE_NAME),
        Place(Path(sys.prefix, "etc", "tilewright", FILE_NAME)),
        *(
            Place(Path(os.path.expanduser(os.path.expandvars(named))), file)
            for file, named in _named_by_dask()
        ),
        Place(Path(own, "tilewright", FILE_NAME)),
        Place(Path(FILE_NAME)),
    ]
    last = {_real(place.path): place for place in found}  # one file may be meant twice
    return [place for place in found if last[_real(place.path)] is place]


def _real(path: Path) -> str:
    try:
        return os.path.realpath(path)
    except FileNotFoundError:  # the working directory was removed, and has no file of profiles
        return str(path)


def _is_of_dasks_files(chosen: Any) -> bool:
    """Whether a value of ``tilewright.cluster-file`` is what Dask's files say: these only add a place, since a file of
    the machine's would hide those of all its users."""
    if SETTING.environment in os.environ:
        return False
    named = [value for _, value in _named_by_dask()]
    return bool(named) and named[-1] == chosen


def _named_by_dask() -> list[tuple[Path, Any]]:
    """What files of Dask's configuration name as files of profiles, the farthest first."""
    if dask.config.get(SETTING.name, None) is None or SETTING.environment in os.environ:
        return []
    found = []
    for file, content in dask.config.collect_yaml(dask.config.paths, return_paths=True):
        value = dask.config.get(SETTING.name, None, config=content)
        if value is not None and config.path_text(value):
            found.append((file, value))  # as it stands there: `places` replaces its variables
    return found


def _is_there(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ClusterError:
    return ClusterError(
        f"cannot read the profiles file {path}: {error}; mend that, or name a file that you can read (--cluster-file)"
    )


def _read_profiles(path: Path) -> dict[str, Profile]:
    try:
        if stat.S_ISFIFO(path.stat().st_mode):  # its opening waits for a writer, and commands read twice
            raise ClusterError(f"cannot read the profiles file {path}: it is a pipe; give a file")
        content = strict_yaml.load(path.read_text(encoding="utf-8"))
    except ClusterError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from error
    except RepeatedKeyError as error:
        raise ClusterError(f"{path}: {error}; keep one of them") from error
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
