"""What a profile of kind ``slurm`` says, under Slurm's own names, and what follows for the workers of its job."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tilewright.kernels.arguments import as_count, shown
from tilewright.kernels.numbers import counted
from tilewright.kernels.words import did_you_mean
from tilewright.pipeline import config
from tilewright.pipeline.cluster.node.places import (
    LEAST_PORT,
    LOOPBACK,
    MOST_PORT,
    PORTS,
    Wanted,
    check_ports,
    on_loopback,
    ports_of,
    ports_text,
)
from tilewright.pipeline.cluster.profiles import EXTENDS
from tilewright.pipeline.errors import ClusterError
from tilewright.workflows.batch.gpu_names import check_gpus, doubts

CPUS_A_GPU = 8
"""Cores for each GPU where the profile does not say: a GPU's worker reads and decodes with a dozen threads. Slurm's own
default is often one core for the whole node."""
CPUS_A_TASK = 4
GPU_THREADS, CPU_THREADS = 4, 2
"""Threads of a worker, as in the profiles ``cuda`` and ``cpu``."""
TRIES = 10
TILES_A_WORKER = 8
"""A stop costs the tiles that are under way, so that a job has several for each worker, unless the setting
tilewright.tiles says otherwise."""
TILE_SECONDS = 30
"""Nor may one be the work of an hour: a worker loses the tile that it computes, and one that it has not written yet."""
HOST = re.compile(r"[\w.-]*")
OTHERS_MIB = 512
"""What the job's scheduler and the command take on its first node; left free on all, so that workers are alike."""
LEAST_WORKER_MIB = 512
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
UNLIMITED = ("unlimited", "infinite")
MEMORY = re.compile(r"(?P<number>\d+)(?P<unit>[KMGT]?)B?", re.IGNORECASE)
MIB = {"": 1.0, "K": 2.0**-10, "M": 1.0, "G": 2.0**10, "T": 2.0**20}
"""Slurm's units of memory; a number without is MiB."""
GPUS = re.compile(r"(?:(?P<type>[\w.-]+):)?(?P<count>\d+)")
CHOICE = re.compile(r"[|\[*!~]")
"""In what nodes have to have: that some of it will do, or is wanted on some of them."""
FEATURE = re.compile(r"[\w.:-]+")
OURS = {
    "array": "one command is one job",
    "chdir": "the command runs where it was given",
    "error": "the job's files lie in its folder",
    "no-requeue": "the job queues itself again; tries: 1 has it never do that",
    "ntasks": "there is one task on a node, or ntasks_per_node of them",
    "open-mode": "a job that is queued again goes on with its log",
    "output": "the job's files lie in its folder",
    "requeue": "the job queues itself again, up to tries",
    "signal": "tilewright.grace-seconds says how long a stopped job may take",
    "test-only": "--dry-run prints the script, and submits nothing",
    "wait": "the command follows its job by itself",
    "wrap": "the job's script is Tilewright's",
}
"""What ``extra`` may not say, and why."""
MEANT = {
    "gpus": "gpus_per_node",
    "gpus-per-socket": "gpus_per_node",
    "gpus-per-task": "gpus_per_node",
    "mem-per-cpu": "mem",
    "mem-per-gpu": "mem",
    "ntasks-per-core": "ntasks_per_node",
    "ntasks-per-gpu": "ntasks_per_node",
    "ntasks-per-socket": "ntasks_per_node",
}
"""Options of sbatch's that ask in another way for what a key asks for, by which workers are started."""
OF_ANYTHING = ("gres", "tres-per-job", "tres-per-node", "tres-per-socket", "tres-per-task")
"""Options that may ask for GPUs, or for other things that a node has some of."""
OF_GPUS = re.compile(r"(?:^|,)(?:gres[:/])?gpu(?=[:=,]|$)")
SHORT = {
    "A": "account",
    "C": "constraint",
    "D": "chdir",
    "G": "gpus",
    "N": "nodes",
    "W": "wait",
    "a": "array",
    "c": "cpus-per-task",
    "e": "error",
    "n": "ntasks",
    "o": "output",
    "p": "partition",
    "q": "qos",
    "t": "time",
}
"""Those of one letter that mean one of these."""


@dataclass(frozen=True)
class BatchProfile:
    """What is asked of Slurm, for one job. Texts are as Slurm takes them."""

    nodes: int = 1
    gpus_per_node: str | None = None
    """A number, or a type and a number: ``h100:4``."""
    ntasks_per_node: int = 1
    """Worker processes of a node that multiplies on its CPU. Beside GPUs there is one for each."""
    cpus_per_gpu: int = CPUS_A_GPU
    cpus_per_task: int = CPUS_A_TASK
    """Cores of each worker without a GPU."""
    mem: str | None = None
    """Memory of a node."""
    time: str | None = None
    """How long one try may take."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    interface: str | None = None
    """The network that scheduler and workers talk over, such as ``ib0``. Without one it is that of the host's name, or
    loopback where all of the job is on one node."""
    threads_per_worker: int | None = None
    activate: str | None = None
    """The line of the script that makes ``python`` that of an environment with Tilewright; without it the script names
    the interpreter that submits."""
    tries: int = TRIES
    """How often the job may start, the first time included."""
    local_directory: str | None = None
    """The folder of each node in which workers keep temporary files. Variables of the environment in it are those of
    the node."""
    scheduler_port: str | None = None
    """A port of the first node, or a range of which one is taken: ``40000:40009``. So are the others, of each node."""
    worker_port: str | None = None
    nanny_port: str | None = None
    metrics_port: str | None = None
    """At which workers serve what Prometheus asks for; without one, on loopback alone."""
    dashboard_address: str | None = None
    """Of Dask's dashboard on the first node; without one there is none."""
    security: bool | dict[str, str] = True
    """Files of certificates, by absolute paths under their names in Dask's ``Security``; or True, for certificates that
    each try of the job makes for itself; or False, for connections without encryption."""
    extra: tuple[str, ...] = ()
    """Further options of sbatch, each with its dashes."""

    @property
    def gpus(self) -> int:
        """GPUs of a node."""
        found = GPUS.fullmatch(self.gpus_per_node) if self.gpus_per_node is not None else None
        return int(found["count"]) if found is not None else 0

    @property
    def gpu_names(self) -> tuple[tuple[str, str], ...]:
        """What the profile calls its GPUs, and the key that says so: their type, and what the nodes have to have, where
        that is one thing or all of several and no choice."""
        found = GPUS.fullmatch(self.gpus_per_node) if self.gpus_per_node is not None else None
        names = [("gpus_per_node", found["type"])] if found is not None and found["type"] else []
        if self.constraint is not None and not CHOICE.search(self.constraint):
            names += [("constraint", word) for word in FEATURE.findall(self.constraint)]
        return tuple(names)

    @property
    def tasks(self) -> int:
        """Tasks that ``srun`` starts on a node. Beside GPUs it is one, with a worker for each GPU: tasks that are bound
        to a GPU each could not copy panels from each other's."""
        return 1 if self.gpus else self.ntasks_per_node

    @property
    def cpus(self) -> int:
        """Cores of such a task."""
        return self.gpus * self.cpus_per_gpu if self.gpus else self.cpus_per_task

    @property
    def workers(self) -> int:
        """Workers of the whole job."""
        return self.nodes * (self.gpus or self.ntasks_per_node)

    @property
    def host(self) -> str | None:
        """What all of the job's processes listen at, where one address is enough for them."""
        return LOOPBACK if self.nodes == 1 and self.interface is None else None

    @property
    def threads(self) -> int:
        return self.threads_per_worker or (GPU_THREADS if self.gpus else CPU_THREADS)

    def memory_limit(self) -> int | float:
        """What each worker may hold: bytes, or where the profile says no ``mem`` a share of what its process sees.
        That is the job's own memory where Slurm confines jobs."""
        workers = self.gpus or self.ntasks_per_node
        if self.mem is None or not (mib := memory_mib(self.mem)):
            return 0.9 / workers
        return int((mib - OTHERS_MIB) / workers * 2**20)


def job_settings(profile: BatchProfile) -> dict[str, int]:
    """Settings of a job's command, by their names, which nobody has set otherwise."""
    ours = {
        "workers": (profile.workers, 1),
        "tiles": (max(config.DEFAULT_TILES, profile.workers * TILES_A_WORKER), config.DEFAULT_TILES),
        "tile-seconds": (TILE_SECONDS, None),
    }
    return {name: value for name, (value, default) in ours.items() if config.get(name) == default}


def memory_mib(text: str) -> float:
    """Slurm's ``--mem`` in MiB; 0, as for Slurm, is all that a node has. Raises ValueError for what is none."""
    found = MEMORY.fullmatch(text)
    if found is None:
        raise ValueError(text)
    return int(found["number"]) * MIB[found["unit"].upper()]


def time_seconds(text: str) -> float | None:
    """Slurm's ``--time`` in seconds: minutes, minutes:seconds, hours:minutes:seconds, or days-hours and smaller parts;
    None for no limit. Raises ValueError for what is none."""
    if text.lower() in UNLIMITED:
        return None
    found = TIME.fullmatch(text)
    if found is None:
        raise ValueError(text)
    parts = [int(part) for part in found["parts"].split(":")]
    if found["days"] is not None:  # they begin with hours
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        hours += 24 * int(found["days"])
    elif len(parts) < 3:  # they begin with minutes
        hours, minutes, seconds = 0, *(*parts, 0)[:2]
    else:
        hours, minutes, seconds = parts
    return 3600.0 * hours + 60 * minutes + seconds


KEYS = tuple(field.name for field in fields(BatchProfile))
COUNTS = ("nodes", "ntasks_per_node", "cpus_per_gpu", "cpus_per_task", "threads_per_worker", "tries")
WORDS = ("partition", "account", "qos", "constraint", "interface")


def read_profile(called: str, options: Mapping[str, Any]) -> BatchProfile:
    """A profile of kind ``slurm``, checked.

    called: what messages call it. options: its keys, with or without ``kind``; those that are null say nothing.

    Raises
    ------
    ClusterError
        A key is not known, or its value is none of its kind.
    """
    given = {str(key): value for key, value in options.items() if key != "kind" and value is not None}
    for key in given:
        if key not in KEYS:
            near = did_you_mean(key, (*KEYS, EXTENDS))
            raise ClusterError(
                f"{called}: a job of Slurm's has no key {key!r}{near}{' T' if near else '; t'}here are"
                f" {', '.join(KEYS)}; other options of sbatch go below extra"
            )
    for key in COUNTS:
        count = as_count(given.get(key, 1))
        if count is None or count < 1:
            raise ClusterError(f"{called}: {key}: {shown(given[key])} is no whole number of 1 or more")
    for key in WORDS:
        _check_line(called, key, given, "a name")
    _check_line(called, "activate", given, "a line of the shell, such as source ~/env/bin/activate")
    found = {key: value for key, value in given.items() if key != "extra"}
    found |= _gpus(called, given) | _memory(called, given) | _time(called, given) | _security(called, given)
    found |= _node(called, given)
    profile = BatchProfile(**found, extra=_extra(called, given))
    if profile.gpus:
        check_gpus(called, profile.gpu_names)
    if profile.gpus and "ntasks_per_node" in given:
        raise ClusterError(
            f"{called}: ntasks_per_node: {profile.ntasks_per_node} beside gpus_per_node, which has a worker for each"
            " GPU; leave one of them out"
        )
    unused = "cpus_per_task" if profile.gpus else "cpus_per_gpu"
    if unused in given:
        other = "cpus_per_gpu" if profile.gpus else "cpus_per_task"
        raise ClusterError(
            f"{called}: {unused}: {given[unused]} says nothing of workers {'with' if profile.gpus else 'without'} a"
            f" GPU; say {other}"
        )
    _check_memory(called, profile)
    check_ports(called, ports_wanted(called, profile))
    return profile


def doubts_of(called: str, profile: BatchProfile, *, unknown: bool = False) -> list[str]:
    """What may be wrong with a profile, as far as it is seen without Slurm, for people; ``unknown`` is as `doubts` has
    it."""
    return doubts(called, profile.gpu_names, unknown=unknown) if profile.gpus else []


def ports_wanted(called: str, profile: BatchProfile) -> list[Wanted]:
    """Which ports the processes of the job's first node take, where the profile says; those of another take all of
    these but the scheduler's."""
    workers = profile.gpus or profile.ntasks_per_node
    whose = f"the {counted(workers, 'worker')} of a node"
    asked = {
        "scheduler_port": (1, "the scheduler"),
        "worker_port": (workers, whose),
        "nanny_port": (workers, f"the nannies of {whose}"),
        "metrics_port": (workers, f"the metrics of {whose}"),
    }
    found = []
    for key, (count, who) in asked.items():
        if (given := getattr(profile, key)) is not None:
            found.append(Wanted(key, ports_of(called, key, given), count, who))
    if profile.dashboard_address is not None:
        port = int(profile.dashboard_address.rpartition(":")[2])
        found.append(Wanted("dashboard_address", range(port, port + 1), 1, "the dashboard"))
    return found


def _node(called: str, given: Mapping[str, Any]) -> dict[str, str]:
    """What the profile fixes on nodes, as texts."""
    found = {key: ports_text(ports_of(called, key, given[key])) for key in PORTS if key in given}
    if (folder := given.get("local_directory")) is not None:
        if not isinstance(folder, str) or not folder.isprintable() or folder[:1] not in ("/", "$", "~"):
            raise ClusterError(
                f"{called}: local_directory: {shown(folder)} is no folder of a node: it begins with /, with a variable"
                " of the environment there, or with ~, such as /local/$USER or $SLURM_TMPDIR"
            )
        found["local_directory"] = folder
    if (address := given.get("dashboard_address")) is not None:
        host, _, port = str(address).rpartition(":")
        wrong = isinstance(address, bool) or not isinstance(address, int | str) or not port.isdecimal()
        if wrong or not HOST.fullmatch(host) or not LEAST_PORT <= int(port) <= MOST_PORT:
            raise ClusterError(
                f'{called}: dashboard_address: {shown(address)} is no address such as ":8787", on {LOOPBACK} of the'
                f' first node, or "0.0.0.0:8787", with a port from {LEAST_PORT} to {MOST_PORT}'
            )
        found["dashboard_address"] = on_loopback(address)
    return found


def _check_line(called: str, key: str, given: Mapping[str, Any], what: str) -> None:
    value = given.get(key)
    if value is not None and (
        not isinstance(value, str) or not value.strip() or not value.isprintable() or value.startswith("-")
    ):
        raise ClusterError(f"{called}: {key}: {shown(value)} is not {what}; give it one, or leave it out")


def _gpus(called: str, given: Mapping[str, Any]) -> dict[str, str | None]:
    value = given.get("gpus_per_node", 0)
    text = str(value)
    found = GPUS.fullmatch(text) if isinstance(value, int | str) and not isinstance(value, bool) else None
    if found is None:
        raise ClusterError(
            f"{called}: gpus_per_node: {shown(value)} is no number of GPUs, nor a type and a number, such as h100:4"
        )
    return {"gpus_per_node": text if int(found["count"]) else None}


def _memory(called: str, given: Mapping[str, Any]) -> dict[str, str]:
    if "mem" not in given:
        return {}
    value = given["mem"]
    try:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(value)
        memory_mib(str(value))
    except ValueError as error:
        raise ClusterError(
            f"{called}: mem: {shown(value)} is no memory as Slurm writes it: a whole number with K, M, G or T, such as"
            " 64G, of a node"
        ) from error
    return {"mem": str(value).upper().removesuffix("B")}


def _check_memory(called: str, profile: BatchProfile) -> None:
    workers = profile.gpus or profile.ntasks_per_node
    least = OTHERS_MIB + workers * LEAST_WORKER_MIB
    if profile.mem is not None and 0 < memory_mib(profile.mem) < least:
        raise ClusterError(
            f"{called}: mem: {profile.mem} of a node is too little for {workers} worker{'s' * (workers > 1)}; give it"
            f" {least}M or more (a number without a unit is MiB)"
        )


def _time(called: str, given: Mapping[str, Any]) -> dict[str, str]:
    if "time" not in given:
        return {}
    value = given["time"]
    if isinstance(value, int) and not isinstance(value, bool):
        raise ClusterError(
            f"{called}: time: YAML reads a number, {value}, of what may be minutes, or hours and minutes; put it in"
            ' quotes: time: "1:30:00"'
        )
    try:
        seconds = time_seconds(value) if isinstance(value, str) else 0.0
    except ValueError:
        seconds = 0.0
    if seconds is not None and seconds < 60:
        raise ClusterError(
            f"{called}: time: {shown(value)} is no time of a minute or more as Slurm writes it: minutes,"
            " hours:minutes:seconds, or days-hours, in quotes"
        )
    return {"time": value}


def _security(called: str, given: Mapping[str, Any]) -> dict[str, bool | dict[str, str]]:
    value = given.get("security", True)
    if isinstance(value, bool):
        return {"security": value}
    # Not at the top, since it imports Dask, which the launcher of a job's workers does without.
    from tilewright.pipeline.cluster.security import EXAMPLE, FILES, security_of, shared

    security_of(called, value, started=True)
    for name, path in value.items():
        if name not in FILES or "\n" in str(path):
            what = "is no file" if name not in FILES else "is a text and no file"
            raise ClusterError(
                f"{called}: security: {name} {what}, which is all that a job hands on to its nodes; give files,"
                f" {EXAMPLE}, or true for certificates of the job's own, or false for no encryption"
            )
    files = {name: str(Path(path).absolute()) for name, path in shared(value).items() if path is not None}
    if not files:
        raise ClusterError(
            f"{called}: security: {value!r} names no file; give some, {EXAMPLE}, or say true or false"
        )
    return {"security": files}


def _extra(called: str, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Options of sbatch's, in one text or several."""
    value = given.get("extra", ())
    texts = [value] if isinstance(value, str) else value
    allowed = "a list of options of sbatch, such as [--exclusive, --reservation=night]"
    if not isinstance(texts, list | tuple) or not all(
        isinstance(text, str) and re.match(r"--?\w", text) and text.isprintable() for text in texts
    ):
        raise ClusterError(f"{called}: extra: {shown(value)} is not {allowed}")
    for text in texts:
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ClusterError(f"{called}: extra: {shown(text)}: {error}; it is not {allowed}") from error
        for word, following in zip(words, [*words[1:], ""], strict=True):
            if re.match(r"--?\w", word):
                _check_option(called, given, word, following)
    return tuple(texts)


def _check_option(called: str, given: Mapping[str, Any], word: str, following: str) -> None:
    """Raise ClusterError for an option of sbatch's that the job needs, or that asks for what a key asks for: of two
    options in a script the last one counts, so that the key would say nothing, or workers be started for another job.

    following: the next word, which may be the option's value."""
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        value = value if equals else following
    else:
        name, value = SHORT.get(word[1], word[1]), word[2:].removeprefix("=") or following
    said = f"{word} {value}" if value and value == following and not value.startswith("-") else word
    refused = [*OURS, *MEANT, *OF_ANYTHING, *(key.replace("_", "-") for key in KEYS)]
    # sbatch takes the beginning of an option's name for it.
    whole = [f"--{each}" for each in sorted(refused) if each.startswith(name)] if len(name) > 1 else []
    if whole and name not in refused:
        raise ClusterError(f"{called}: extra: {said} may be short for {', '.join(whole)}; write it out")
    if name in OURS:
        raise ClusterError(f"{called}: extra: {said} cannot be chosen: {OURS[name]}; leave it out")
    key = MEANT.get(name, name.replace("-", "_"))
    if name in OF_ANYTHING and OF_GPUS.search(value):
        key = "gpus_per_node"
    if key not in KEYS:
        return
    if key in given:
        raise ClusterError(
            f"{called}: extra: {said} asks for what {key}: {given[key]} asks for; keep {key} alone,"
            " by which the job and its workers are made"
        )
    raise ClusterError(f"{called}: extra: {said} has a key of its own; say {key} in the profile")
