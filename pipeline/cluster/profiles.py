"""The files of profiles. Of Dask only the configuration is imported: a command reads them before it knows what it
needs."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import dask.config

from tilewright.kernels.arguments import shown
from tilewright.kernels.words import did_you_mean, nearest
from tilewright.pipeline import config
from tilewright.pipeline.errors import ClusterError
from tilewright.pipeline.yaml_file import YamlError, YamlFile, read_yaml

if TYPE_CHECKING:
    from distributed import Client
    from distributed.deploy import Cluster as DeployCluster

Cluster: TypeAlias = "str | Client | DeployCluster"
"""A profile's name, a scheduler's address, a client, or a cluster that Dask or one of its libraries has started."""

INSTALLED_PROFILES = Path(__file__).parents[1] / "cluster.yaml"
FILE_NAME = "cluster.yaml"
MACHINE_FOLDER = Path("/etc/tilewright")
"""Of files that all users of a machine have."""
SETTING = next(setting for setting in config.SETTINGS if setting.name == "tilewright.cluster-file")
KINDS = ("local", "cpu", "cuda", "existing", "slurm", "class")
PROFILES = "profiles"
"""The one key of a file."""
FREE = "x-"
"""How keys of a file begin that nothing is read from."""
EXTENDS = "extends"
"""The key of a profile that names another, whose keys it has but for those that it says itself."""


@dataclass(frozen=True)
class Profile:
    """What a profile says, and where."""

    options: dict[str, Any]
    """Its keys, ``kind`` among them, with those of the profiles that it extends."""
    file: Path
    extends: tuple[tuple[str, Path], ...] = ()
    """The profiles that it extends, by name and file, the nearest first."""
    whole: bool = False
    """Whether it says that it extends none (``extends: null``)."""

    def called(self, name: str) -> str:
        """What messages call it."""
        built_in = self.file == INSTALLED_PROFILES
        called = f"built-in profile {name!r}" if built_in else f"profile {name!r} of {self.file}"
        return f"{called} (which extends {self.base(name)})" if self.extends else called

    def base(self, name: str) -> str:
        """What this profile of such a name extends, for messages."""
        texts, file = [], self.file
        for other, of in self.extends:
            texts.append(that_of(of) if other == name else other if of == file else f"{other} {of_file(of)}")
            name, file = other, of
        return ", which extends ".join(texts)


@dataclass(frozen=True)
class ProfilesFile:
    """A file of profiles that was read."""

    path: Path
    profiles: dict[str, Profile]


@dataclass(frozen=True)
class FoundProfiles:
    """Every file of profiles that is read here, and those that there might be."""

    files: tuple[ProfilesFile, ...]
    """The built-in ones first; a profile of a later one takes the place of an earlier one's."""
    absent: tuple[Path, ...] = ()
    """Where files were looked for, and are none."""
    only: bool = False
    """Whether one file was named, so that no other place was looked at."""

    @property
    def profiles(self) -> dict[str, Profile]:
        return {name: profile for file in self.files for name, profile in file.profiles.items()}

    def replaced(self, name: str) -> list[Path]:
        """The files whose profile of this name another one's takes the place of, so that nothing of it is left, the
        nearest first."""
        having = [file for file in self.files if name in file.profiles]
        kept = having[-1].profiles[name].extends if having else ()
        return [file.path for file in having[-2::-1] if (name, file.path) not in kept]

    def lost(self, name: str) -> str | None:
        """What a profile that takes the place of another does not say of what that says, where it does not say of
        itself whether it extends that, as a notice; None where nothing is lost."""
        profile = self.profiles.get(name)
        if profile is None or profile.extends or profile.whole or not (hidden := self.replaced(name)):
            return None
        other = next(file.profiles[name] for file in self.files if file.path == hidden[0])
        keys = [
            str(key)
            for key, value in other.options.items()
            if value is not None and key not in profile.options
        ]
        if not keys:
            return None
        return (
            f"{profile.called(name)} takes the place of {that_of(hidden[0])}, whose {', '.join(keys)} it does not"
            f" have; {EXTENDS}: {name} would keep what it does not say, and {EXTENDS}: null says that this is meant"
        )

    def told(self) -> str:
        """The names of all profiles, by the file that each is of, for messages."""
        names: dict[Path, list[str]] = {}
        for name, profile in self.profiles.items():
            names.setdefault(profile.file, []).append(name)
        files = [file.path for file in self.files[::-1] if file.path in names]
        texts = [f"{', '.join(sorted(names[path]))} {of_file(path)}" for path in files]
        if self.only:
            texts.append("and no other file was read, since that one was named")
        elif len(self.files) == 1:
            texts.append(f"and there is no file of others at {', '.join(map(str, self.absent))}")
        return "; ".join(texts)


def of_file(path: Path) -> str:
    """Whose a profile is, for messages."""
    return "(built-in)" if path == INSTALLED_PROFILES else f"of {path}"


def that_of(path: Path) -> str:
    """The profile of the same name there, for messages."""
    return "the built-in one" if path == INSTALLED_PROFILES else f"that of {path}"


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
        ``kind``, alone, or one extends what there is not, or itself; or the file that was named is missing.
    OptionError
        ``path`` is none.
    """
    built_in = _built_in()
    chosen = config.get("cluster-file", path)
    if chosen is not None and (path is not None or not _is_of_dasks_files(chosen)):
        only = Path(chosen if path is not None else config.path_of("cluster-file") or chosen)
        farther = FoundProfiles((built_in,), only=True)
        return FoundProfiles((built_in, _read_profiles(only, farther)), only=True)
    files: list[ProfilesFile] = [built_in]
    absent: list[Path] = []
    for place in places():
        if _is_there(place.path):
            files.append(_read_profiles(place.path, FoundProfiles(tuple(files), tuple(absent))))
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


@cache
def _built_in() -> ProfilesFile:
    """The profiles of the installation, which do not change while a process lasts."""
    return _read_profiles(INSTALLED_PROFILES, FoundProfiles(()))


def _read_profiles(path: Path, farther: FoundProfiles) -> ProfilesFile:
    """A file's profiles, with what those say that they extend, of the file or of the farther ones."""
    try:
        if stat.S_ISFIFO(path.stat().st_mode):  # its opening waits for a writer, and commands read twice
            raise ClusterError(f"cannot read the profiles file {path}: it is a pipe; give a file")
        file = read_yaml(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    except YamlError as error:
        raise ClusterError(str(error)) from error
    said = _profiles_of(file)
    found: dict[str, Profile] = {}
    for name in said:
        chain, beyond = _extended(file, said, name, farther)
        options = {} if beyond is None else beyond[1].options
        for each in reversed(chain):
            own = {key: value for key, value in said[each].items() if key != EXTENDS}
            options = _merged(options, own)
        extends = [(each, path) for each in chain[1:]]
        if beyond is not None:
            extends += [(beyond[0], beyond[1].file), *beyond[1].extends]
        kind = options.get("kind")
        if kind not in KINDS:
            raise ClusterError(f"{file.at(PROFILES, name)}: profile {name!r} {_wrong_kind(said[name], kind)}")
        found[name] = Profile(options, path, tuple(extends), whole=EXTENDS in said[name] and not extends)
    return ProfilesFile(path, found)


def _profiles_of(file: YamlFile) -> dict[str, dict[Any, Any]]:
    """What a file says of each profile, by its name."""
    content = file.content
    for key in content if isinstance(content, dict) else ():
        if key != PROFILES and not str(key).startswith(FREE):
            near = did_you_mean(key, [PROFILES])
            raise ClusterError(
                f"{file.at(key)}: a file of profiles has no key {shown(key)}{near}{' A' if near else '; a'}ll profiles"
                f" stand below {PROFILES!r}, and what is there for its anchors alone below a key that begins with"
                f" {FREE}"
            )
    profiles = content.get(PROFILES) if isinstance(content, dict) else None
    if not isinstance(profiles, dict) or not profiles:
        raise ClusterError(
            f"{file.at(PROFILES)} has no mapping {PROFILES!r}; see {INSTALLED_PROFILES} for the form"
        )
    for name, profile in profiles.items():
        if not isinstance(profile, dict):
            raise ClusterError(
                f"{file.at(PROFILES, name)}: profile {shown(name)} is {shown(profile)}, and no mapping of keys, such as"
                " {kind: cpu}"
            )
    return {str(name): profile for name, profile in profiles.items()}


def _extended(
    file: YamlFile, said: Mapping[str, Mapping[Any, Any]], name: str, farther: FoundProfiles
) -> tuple[list[str], tuple[str, Profile] | None]:
    """A profile and those of its file that it extends, each by the one before; and that of a farther file that the last
    one extends, with its name."""
    chain = [name]
    while (value := said[chain[-1]].get(EXTENDS)) is not None:
        last = chain[-1]
        at = f"{file.at(PROFILES, last, EXTENDS)}: profile {last!r} extends"
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ClusterError(f"{at} {shown(value)}, which is no profile's name; give one, or null for none")
        wanted = str(value)
        if wanted == last or wanted not in said:
            if (profile := farther.profiles.get(wanted)) is None:
                near = did_you_mean(wanted, [*farther.profiles, *(one for one in said if one != last)])
                own = ", ".join(sorted(one for one in said if one != last))
                there = f"{own} of {file.path}; " if own else ""
                raise ClusterError(
                    f"{at} {wanted!r}, and there is no such profile in {_where(file.path, wanted == last)}{near}"
                    f"{' T' if near else '; t'}here are {there}{farther.told()}"
                )
            return chain, (wanted, profile)
        if wanted in chain:
            circle = [*chain[chain.index(wanted) :], wanted]
            raise ClusterError(
                f"{at} {wanted!r}, and so itself: {' extends '.join(circle)}; take extends out of one of them, or give"
                f" it another profile; there are {', '.join(sorted(said))} of {file.path}; {farther.told()}"
            )
        chain.append(wanted)
    return chain, None


def _where(path: Path, of_own_name: bool) -> str:
    return f"a file farther than {path}" if of_own_name else f"{path} or a file farther than it"


def _merged(under: Mapping[Any, Any], over: Mapping[Any, Any]) -> dict[Any, Any]:
    """The keys of both; where both have one that of ``over`` counts, and of two mappings this says the same of their
    keys."""
    found = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = _merged(found[key], value) if both else value
    return found


def _wrong_kind(said: Mapping[Any, Any], kind: Any) -> str:
    allowed = f"t may be {', '.join(KINDS)}"
    if kind is not None:
        hint = did_you_mean(kind, KINDS)
        return f"has kind {shown(kind)}{hint}{' I' if hint else '; i'}{allowed}"
    known = (EXTENDS, "kind")
    meant = [(key, near[0]) for key in map(str, said) if key not in known and (near := nearest(key, known))]
    hint = "".join(f" ({key!r} may be meant for {near!r})" for key, near in meant)
    return f"says no kind{hint}, and extends none that does; i{allowed}"


class BatchProfileError(ClusterError):
    """A profile of kind ``slurm``, of which there is no cluster in this process. A command that meets it has found
    nothing wrong with its arguments, and becomes a batch job."""

    def __init__(self, called: str, options: dict[str, Any]) -> None:
        super().__init__(
            f"{called} is of kind slurm, by which a command becomes a batch job: tilewright matmul ... --profile; from"
            " Python pass a cluster of Dask's, or a profile of kind existing with the address of a scheduler"
        )
        self.called, self.options = called, options
