"""Every setting of Tilewright, in one place, in Dask's configuration system.

A setting can be given in a Dask YAML file, with ``dask.config.set({"tilewright.retries": 5})``, or in the
environment under the name that the table shows.
"""

from __future__ import annotations

import math
import os
import types
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import dask.config
from dask.utils import parse_bytes

from tilewright.kernels.arguments import as_count, shown
from tilewright.kernels.words import did_you_mean
from tilewright.pipeline.errors import OptionError


@dataclass(frozen=True)
class Setting:
    name: str
    default: Any
    unit: str
    meaning: str
    least: int = 1
    """For sizes in bytes, and for seconds, the least that a user may set. Internal callers, in tests, may use less."""
    most: int | None = None
    """For counts, the most that may be set; None: no limit."""
    argument: str | None = None
    """The argument of our functions that wins over the setting; the option of commands has the same name."""

    @property
    def environment(self) -> str:
        return "DASK_" + self.name.upper().replace(".", "__").replace("-", "_")


MOST_NBYTES = 2**63 - 1
"""The largest size: what an offset in a file or a length in memory may be."""

MOST_ROUNDS = 64
"""With as many, an error that one round misses with a probability of a half escapes once in 2^64 times."""

DEFAULT_TILES = 16
"""The default of ``tilewright.tiles``: a larger number asks for smaller tiles, and so for a stop that costs less."""

# docs/settings.md has the same, which a test compares.
SETTINGS = (
    Setting("tilewright.device-memory", None, "bytes",
            "device memory that a worker may fill; unset: a share of what is free on the GPU, or on a CPU what"
            " host-core-nbytes and host-share say",
            argument="device_memory"),
    Setting("tilewright.device-memory-share", 0.8, "fraction",
            "the share of the free memory of a GPU that a plan may use when device-memory is unset"),
    Setting("tilewright.host-share", 0.25, "fraction",
            "the share of a worker's memory limit that a plan may use when it multiplies on the CPU"),
    Setting("tilewright.host-core-nbytes", "256 MiB", "bytes",
            "what a plan uses for each core of a CPU worker when device-memory is unset: more saves no time there"),
    Setting("tilewright.panel-nbytes", "512 MiB", "bytes",
            "the size that one panel of A and B together is aimed at, where memory is plenty; of elements above four"
            " bytes, as many elements"),
    Setting("tilewright.tiles", DEFAULT_TILES, "tiles",
            "about how many tiles C is cut into, where that is work enough for each and memory holds them; up to this"
            " many workers cut the sums in the same places; of more than 16 it is said why there are fewer"),
    Setting("tilewright.tile-seconds", None, "seconds",
            "how long a worker may compute a tile, by what its device computes at least: C is cut into as many tiles"
            " as that takes; unset: only what tiles says, and 30 in a batch job", least=1),
    Setting("tilewright.read-threads", None, "threads",
            "threads of one worker that read and decode chunks, or on a GPU read text; unset: 12, and for encoded"
            " chunks on a GPU its share of the host's cores, if that is more; up to 32 where chunks below 5 MiB come"
            " from an object store; local files on a CPU: at most its cores"),
    Setting("tilewright.gpu-decoding", False, "true or false",
            "whether a GPU decodes chunks of Zstandard, LZ4 and Blosc itself, beside the cores; it sets memory aside"
            " for that, a twelfth at most"),
    Setting("tilewright.trust-chunks", False, "true or false",
            "whether nvCOMP, which is fast and checks little, may decode all chunks that a GPU decodes, where it is"
            " installed; false: only those with a CRC32C behind them, which is compared first. A damaged chunk may"
            " then end a worker's GPU, or change numbers that are not its own. A CRC32C finds damage, not malice: of"
            " arrays that strangers wrote let no GPU decode chunks where nvCOMP is installed"),
    Setting("tilewright.decompress-threads", None, "threads",
            "threads of one worker that decompress documents; unset: its share of the host's cores"),
    Setting("tilewright.window-nbytes", "128 MiB", "bytes",
            "the largest window of a document compressed by Zstandard, which each thread that decompresses one holds;"
            " zstd --long=31 takes 2 GiB, the most; 1 MiB at least", least=2**20),
    Setting("tilewright.write-threads", None, "threads",
            "threads of one worker that encode and write chunks; unset: 8, or its share of the cores as for"
            " read-threads; local files on a CPU: at most its cores"),
    Setting("tilewright.share-panels", True, "true or false",
            "whether workers of one host, a GPU each, read panels that several want in parts and copy those from each"
            " other's GPU"),
    Setting("tilewright.workers", 1, "workers",
            "workers that have to join a cluster which was started elsewhere before work is planned for it"),
    Setting("tilewright.join-seconds", 300, "seconds",
            "how long such workers are waited for: then it goes on with fewer, and fails where there is none", least=0),
    Setting("tilewright.worker-deadline", 60, "seconds",
            "how long a worker may be silent before it is given up; it is named after 10 s; 5 at least", least=5),
    Setting("tilewright.scheduler-deadline", 20, "seconds",
            "how long the scheduler may be silent before the command ends; it is named after 10 s; 5 at least",
            least=5),
    Setting("tilewright.obstore", True, "true or false",
            "whether URLs of S3 are read and written by obstore, where it is installed, rather than by s3fs"),
    Setting("tilewright.storage-deadline", 120, "seconds",
            "how long an object store that fails, asks for fewer requests or cannot be reached is asked again, with"
            " waits that grow; it is said after 10 s", least=0),
    Setting("tilewright.grace-seconds", 20, "seconds",
            "how long SIGTERM lets a command finish the tiles, or kept pieces, whose results are nearly there",
            least=0),
    Setting("tilewright.retries", 3, "attempts", "times that a failed task is tried again, on any worker"),
    Setting("tilewright.piece-nbytes", "32 MiB", "bytes",
            "the size that text is cut into, and that small files are packed up to, for one task; on a GPU a task"
            " takes 64 times as much, 512 MiB at most, and words, lines and n-grams of plain text on many cores up to"
            " 8 MiB for each thread; 32 KiB at least, or handing out takes all the time",
            least=2**15),
    Setting("tilewright.verify-rounds", 2, "rounds",
            f"independent rounds of the check of a product, at most {MOST_ROUNDS}",
            most=MOST_ROUNDS, argument="rounds"),
    Setting("tilewright.cluster-file", None, "path",
            "the only file of profiles beside the built-in ones; where a file of Dask's names it, one more, beneath the"
            " user's; unset: those of the machine, the installation, the user and the working directory",
            argument="cluster_file"),
    Setting("tilewright.accept-finished", False, "true or false",
            "whether a product that stands finished in its place, with its record, is checked and accepted where the"
            " very same is asked for again, rather than refused as existing; later tries of batch jobs do so"),
    Setting("tilewright.jobs-folder", None, "path",
            "where batch jobs keep their scripts, logs and addresses: a folder that their nodes see too; unset:"
            " tilewright/jobs in $XDG_STATE_HOME, or in ~/.local/state"),
)  # fmt: skip

THREAD_COUNTS = {"read-threads": 12, "write-threads": 8}
"""Defaults for one worker. On one GPU, for data that is not encoded, more are no faster, or slower: what all threads
have in flight must stay in the CPU's cache."""

_REPLACED = dask.config.get("tilewright", None)
"""The configured value of ``tilewright`` before our defaults are added, which would silently replace one that is not a
mapping."""

_BY_NAME = {setting.name: setting for setting in SETTINGS}

dask.config.update_defaults(
    {"tilewright": {name.partition(".")[2]: s.default for name, s in _BY_NAME.items()}}
)


COUNTS = {"tiles": 1, "threads": 1, "workers": 1, "attempts": 0, "rounds": 1}
"""The units that are counts, and the least value of each."""


def get(name: str, override: Any = None) -> Any:
    """The value of ``tilewright.<name>``; ``override``, the value of the setting's ``argument``, wins where given.

    Raises
    ------
    OptionError
        The value is not of the setting's unit, or out of its range. It names the setting, or the argument.
    """
    setting = _BY_NAME[f"tilewright.{name}"]
    value = dask.config.get(setting.name, setting.default) if override is None else override
    where = f"{setting.name} ({setting.environment})"
    if override is not None and setting.argument is not None:
        where = f"{setting.argument} (--{setting.argument.replace('_', '-')})"
    if value is None:
        if setting.default is None:
            return None
        raise OptionError(f"{where}: null is no value; leave it unset for {setting.default}")
    if setting.unit == "bytes":
        return as_nbytes(value, where)
    if value is setting.default:
        return value  # which is good
    if setting.unit in COUNTS:
        least, most = COUNTS[setting.unit], setting.most
        count = as_count(value)
        if count is None or not least <= count <= (most or count):
            allowed = f"from {least} to {most}" if most else f"{least} or more"
            raise OptionError(
                f"{where}: {shown(value)} is not a number of {setting.unit}; it must be {allowed}"
            )
        return count
    if setting.unit == "true or false" and not isinstance(value, bool):
        raise OptionError(f"{where}: {shown(value)} is neither true nor false")
    elif setting.unit == "fraction" and (
        isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1
    ):
        raise OptionError(f"{where}: {shown(value)} is not a fraction; it must be more than 0 and at most 1")
    elif setting.unit == "seconds" and (
        isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf
    ):
        raise OptionError(f"{where}: {shown(value)} is not a number of seconds; it must be 0 or more")
    elif setting.unit == "path" and not path_text(value):
        raise OptionError(f"{where}: {shown(value)} is not a path; name a file, or leave it unset")
    return value


def path_of(name: str) -> str | None:
    """The path that a setting is: with the home in place of ``~``, and variables of the environment replaced, so that
    one file of settings may serve all users of a site. None where it is unset. Raises OptionError as `get`, and where a
    variable is not set."""
    value = get(name)
    if value is None:
        return None
    found = os.path.expanduser(os.path.expandvars(os.fspath(value)))
    if "$" in found and not os.path.exists(found):
        setting = _BY_NAME[f"tilewright.{name}"]
        raise OptionError(
            f"{setting.name} ({setting.environment}): {shown(value)} has a variable that is not set here; set it, or"
            " name another place"
        )
    return found


def threads(name: str) -> int:
    """``read-threads`` or ``write-threads`` for data that is not encoded. Raises as ``get`` does."""
    return int(get(name) or THREAD_COUNTS[name])


def check_all(**arguments: Any) -> None:
    """Check every setting, and those arguments of a call that win over one, so that a wrong value is found before any
    work. Raises OptionError as ``get`` does, and for unknown names: a misspelt one would silently leave the default in
    place."""
    given = dask.config.get("tilewright", None)
    if not isinstance(_REPLACED, dict | types.NoneType):
        given = _REPLACED
    if given is None:  # also where a file has the key with nothing below it
        given = {}
    if not isinstance(given, dict):
        raise OptionError(
            f"tilewright (DASK_TILEWRIGHT): {given!r} holds no settings; give them names, as tilewright.device-memory"
            " (DASK_TILEWRIGHT__DEVICE_MEMORY)"
        )
    known = sorted(name.partition(".")[2] for name in _BY_NAME)
    for key in given:
        name = str(key).replace("_", "-")  # Dask takes either
        if name not in known:
            hint = did_you_mean(name, known, name="tilewright.{}") or f"; there are {', '.join(known)}"
            raise OptionError(f"tilewright.{name}: there is no such setting{hint}")
    for setting in SETTINGS:
        value = get(setting.name.partition(".")[2])
        if setting.unit in ("bytes", "seconds") and value is not None and value < setting.least:
            raise OptionError(
                f"{setting.name} ({setting.environment}): {value} {setting.unit} are too few; it must be"
                f" {setting.least} or more"
            )
        if setting.argument in arguments:
            get(setting.name.partition(".")[2], arguments[setting.argument])


def path_text(value: Any) -> str | None:
    """The text of a path that names something; None for what does not: bytes, an empty text, one that no file's name
    can hold, or anything else."""
    if not isinstance(value, str | os.PathLike):
        return None
    try:
        text = os.fspath(value)
        # Plain text also of a subclass: NumPy's is taken for bytes where folders are listed.
        return str.__str__(text) if isinstance(text, str) and b"\0" not in os.fsencode(text) else None
    except Exception:  # a surrogate that stands for no byte, or whatever a class does in its __fspath__
        return None


def as_nbytes(value: int | float | str, name: str) -> int:
    """Bytes from a number or a text such as ``8GiB``.

    Raises
    ------
    OptionError
        The text is not a size, or the size is not positive, or not a whole number of bytes.
    """
    try:
        if isinstance(value, bool):
            raise TypeError("a truth value")  # which Python counts as a number
        if isinstance(value, str):
            if not any(letter.isdigit() for letter in value):
                raise ValueError("no number")  # Dask reads the empty text as one byte
        elif (count := as_count(value)) is not None:
            value = count  # NumPy's integers, which Dask does not know
        nbytes = int(parse_bytes(value))
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise OptionError(
            f"{name}: {shown(value)} is no size in bytes; write a number, or say 512MiB or 8GiB"
        ) from error
    if nbytes <= 0:
        raise OptionError(f"{name}: {shown(value)} is less than one byte; it must be more than 0 bytes")
    if nbytes > MOST_NBYTES:
        raise OptionError(
            f"{name}: {shown(value)} is more than any machine has; it must be at most {MOST_NBYTES} bytes"
        )
    number = value.strip().upper().removesuffix("B") if isinstance(value, str) else value
    try:
        whole = Fraction(number).denominator == 1
    except ValueError:  # text with a larger unit: a fraction of it may well be a whole number of bytes
        whole = True
    if not whole:
        raise OptionError(
            f"{name}: {value!r} is no whole number of bytes; with a unit, say {str(number).strip()}GiB"
        )
    return nbytes
