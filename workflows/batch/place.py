"""A command whose profile is of kind ``slurm``: before its own work, and in place of it.

Such a command does all that it does before it opens a cluster, so that wrong arguments are told at once and not by a
job that has waited for hours. Then `BatchProfileError` comes out of it, and `run_as_job` takes over."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection
from typing import Any

import click

from tilewright.kernels.words import did_you_mean
from tilewright.pipeline import config
from tilewright.pipeline.cluster.profiles import BatchProfileError, load_profiles
from tilewright.pipeline.errors import ClusterError
from tilewright.workflows.batch import INSIDE, slurm
from tilewright.workflows.batch.folder import (
    INSIDE_PROFILE,
    INSIDE_TRY,
    JobFolder,
    Submitted,
    jobs_folder,
    make_folder,
    name_of,
)
from tilewright.workflows.batch.follow import follow
from tilewright.workflows.batch.profile import BatchProfile, doubts_of, read_profile
from tilewright.workflows.batch.script import job_script, put_aside
from tilewright.workflows.console import is_quiet, on_interrupt


def only_prints_script(params: dict[str, Any], words: list[str], *, detach: bool, dry_run: bool) -> bool:
    """Whether all that was asked for is a job's script, which is then printed.

    Of a command that runs inside a job, the profile becomes that of the job's own cluster, and what earlier tries of
    the job have left is kept.

    params: the command's. words: the command and its arguments, as they were given. detach, dry_run: the options.

    Raises
    ------
    ClusterError
        The profile asks for what Slurm does not have.
    click.UsageError
        One of the options is given, and the profile is not of kind slurm, or the command needs no job.
    """
    if inside := os.environ.get(INSIDE):
        params |= {"cluster": INSIDE_PROFILE, "cluster_file": inside}
        if "no_resume" in params and int(os.environ[INSIDE_TRY]) > 1:
            params["no_resume"] = False
        return False
    if not (detach or dry_run):
        return False
    if params.get("plan_only"):
        option = "--detach" if detach else "--dry-run"
        raise click.UsageError(
            f"{option} is about a batch job, and with --plan-only there is none: the plan of one is made here; leave"
            f" {option} away, or --plan-only"
        )
    name = params["cluster"]
    profiles = {} if "://" in name else load_profiles(params["cluster_file"])
    profile = profiles.get(name)
    if profile is None or profile.options["kind"] != "slurm":
        option = "--detach" if detach else "--dry-run"
        of_slurm = [each for each, known in profiles.items() if known.options["kind"] == "slurm"]
        near = did_you_mean(name, of_slurm) if profile is None else ""
        names = ", ".join(sorted(of_slurm))
        there = f"{' T' if near else '; t'}hose of that kind are {names}" if names else ""
        raise click.UsageError(
            f"{option} is about a batch job, and {name!r} is no profile of kind slurm{near}{there}"
        )
    if dry_run:
        found = read_profile(profile.called(name), profile.options)
        folder = JobFolder(jobs_folder() / name_of(words[0], time.time()))
        aside = _told(profile.called(name), found, unknown=True)
        for variable in sorted(os.environ.keys() - aside.keys()):
            if variable.startswith("SBATCH_"):
                tell(f"{variable}={os.environ[variable]} of the environment counts beside the profile")
        script = job_script(found, folder, words[0], config.get("grace-seconds"), aside)
        click.echo(script, nl=False)
        tell(f"nothing is submitted; {_slurms_word(script, aside)}")
    return dry_run


def _told(called: str, profile: BatchProfile, *, unknown: bool = False) -> dict[str, str]:
    """Tell what may be wrong with a job before sbatch has its script, and which variables of the environment count or
    do not; returns the latter, and why. unknown: as `doubts_of` has it."""
    for doubt in doubts_of(called, profile, unknown=unknown):
        tell(doubt)
    aside = put_aside(profile, os.environ)
    for name, why in aside.items():
        tell(f"{name}={os.environ[name]} of the environment does not count: {why}")
    return aside


def _slurms_word(script: str, aside: Collection[str]) -> str:
    """What Slurm says of a script that it is not given."""
    asked = "whether there are such a partition, account, GPUs, cores and memory Slurm alone knows"
    if not slurm.available():
        return f"{asked}, and there is no sbatch here to ask it"
    try:
        return f"Slurm (sbatch --test-only) says of it now: {slurm.tested(script, aside)}"
    except ClusterError as error:
        return f"{asked}: {error}"


def run_as_job(asked: BatchProfileError, words: list[str], *, detach: bool) -> None:
    """Submit a command as a batch job, and follow it unless it is to be left to itself.

    Raises
    ------
    TilewrightError
        The profile asks for what Slurm does not have, Slurm refuses the job or ends it, or no folder can be made.
    click.exceptions.Exit
        The job has ended, with another exit status than 0.
    """
    profile = read_profile(asked.called, asked.options)
    if not slurm.available():
        raise ClusterError(
            f"{asked.called} is of kind slurm, and there is no sbatch here; log in to a host where Slurm's commands"
            " are, or take another profile (--dry-run prints the job's script)"
        )
    aside = _told(asked.called, profile)
    begun = time.time()
    folder = make_folder(words[0], begun)
    try:
        folder.write_submitted(Submitted(tuple(words), profile, os.getcwd(), begun))
        folder.script.write_text(
            job_script(profile, folder, words[0], config.get("grace-seconds"), aside), encoding="utf-8"
        )
        job = slurm.submit(folder.script, aside)
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    folder.number(job)
    tell(f"submitted as job {job}; its files are in {folder.path}")
    if detach:
        tell(f"tilewright jobs {job} shows it again, and scancel {job} ends it")
        click.echo(job)
        return
    follow_job(folder, job)


def tell(line: str) -> None:
    if not is_quiet():
        click.echo(line, err=True)


def follow_job(folder: JobFolder, job: str) -> None:
    """Follow a job to its end. Raises as `run_as_job`."""
    on_interrupt(
        lambda: (
            f"job {job} goes on without this terminal; tilewright jobs {job} shows it again, and scancel {job} ends it"
        )
    )
    if status := follow(folder, quiet=is_quiet()):
        raise click.exceptions.Exit(status)
