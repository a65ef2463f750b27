"""Plans for workers that are elsewhere: what ``--profile``, ``--workers``, ``--gpu`` and ``--rate`` say of them
together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import click

from tilewright.kernels.arguments import shown
from tilewright.kernels.choices import DeviceName
from tilewright.pipeline.cluster.profiles import load_profiles
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.events import Listener, Teller
from tilewright.pipeline.forecast.hardware import Hardware
from tilewright.workflows.batch.planning import PlannedJob, planned_job

HERE = "local"
"""What stands for no cluster, as None does: then the workers are those that the other options name."""
TOGETHER = "leave one of the two away (--profile, or --workers)"


@dataclass(frozen=True)
class Elsewhere:
    """What the options say of the workers of a plan."""

    hardware: Hardware
    """How many, and at which rates they work."""
    cluster: Any = None
    """Whose workers they are; None: those of nobody's."""
    job: PlannedJob | None = None
    """The job whose workers they are, where the cluster is a profile of kind slurm."""

    @contextmanager
    def planning(self, options: dict[str, Any], listener: Listener) -> Iterator[Hardware | None]:
        """The workers to plan for; None: those that are found in the cluster. Of a job its settings hold meanwhile, and
        what else a plan needs, such as a sample of pairs, is had from this process: `options` no longer name it."""
        if self.job is None:
            yield self.hardware if _is_here(self.cluster) else None
            return
        with self.job.settings():
            found = self.job.facts(options["device"], options["device_memory"], Teller(listener).warn)
            options |= {"cluster": "local", "cluster_file": None}
            yield replace(self.hardware, found=tuple(found))


def elsewhere(
    cluster: Any,
    cluster_file: Any,
    device: DeviceName,
    workers: Any = None,
    gpu: Any = None,
    rate: Any = None,
) -> Elsewhere | None:
    """What options say of the workers of a plan; None where they name none that could be elsewhere. Of a job the GPUs
    may be known from its profile. Raises OptionError where they contradict each other, ClusterError for a profile that
    cannot be read."""
    named = Hardware.named(workers, gpu, rate)
    if named is not None:
        named.check(device)
    if _is_here(cluster):
        return None if named is None else Elsewhere(named)
    if workers is not None:
        raise OptionError(
            f"workers={workers} beside a cluster ({shown(cluster)}): a plan is for the workers that are found there, or"
            f" that its job has; {TOGETHER}"
        )
    job = planned_job(cluster, cluster_file, None if named is None else named.gpu)
    if job is not None:
        return Elsewhere(job.hardware(device, rate), cluster, job)
    if named is not None and named.gpu is not None and _has_no_gpu(cluster, cluster_file):
        raise OptionError(
            f"gpu={named.gpu.name!r} beside a cluster ({shown(cluster)}) whose workers are cores: leave one of the two"
            " away (--gpu, --profile), or take a profile with GPUs"
        )
    return None if named is None else Elsewhere(named, cluster)


def _is_here(cluster: Any) -> bool:
    return cluster is None or (isinstance(cluster, str) and cluster == HERE)


def taken(options: dict[str, Any], *, plan_only: bool) -> Elsewhere | None:
    """What ``--workers``, ``--gpu`` and ``--rate`` say, taken out of a command's options, and the profile: of a plan
    alone its job's workers are elsewhere too. None where nothing is. Raises click.UsageError where it is no plan alone,
    and as `elsewhere`."""
    given = {name: options.pop(name, None) for name in ("workers", "gpu", "rate")}
    words = [f"--{name}" for name, value in given.items() if value is not None]
    if words and not plan_only:
        raise click.UsageError(
            f"{' and '.join(words)} without --plan-only: a plan can be made for workers that are elsewhere; give that"
            " too, or leave this away and name a profile (--profile), whose workers do the work"
        )
    if not plan_only:
        return None
    return elsewhere(options["cluster"], options["cluster_file"], options["device"], **given)


def _has_no_gpu(cluster: Any, cluster_file: Any) -> bool:
    """Whether a cluster is a profile that starts workers on cores alone."""
    if not isinstance(cluster, str) or "://" in cluster:
        return False
    profile = load_profiles(cluster_file).get(cluster)
    return profile is not None and profile.options["kind"] == "cpu"
