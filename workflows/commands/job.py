"""The class of commands that take a profile: by one of kind slurm they are run as batch jobs."""

from __future__ import annotations

import os
from typing import Any

import click

from tilewright.workflows.console import Command

_WORDS = "tilewright.words"


class JobCommand(Command):
    """A command that takes a profile. By one of kind slurm it is run as a batch job, and followed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.params += [
            click.Option(["--detach"], is_flag=True, expose_value=False, callback=_wished,
                         help="With a profile of kind slurm: submit the job, print its number, and end."),
            click.Option(["--dry-run"], is_flag=True, expose_value=False, callback=_wished,
                         help="With a profile of kind slurm: print the job's script, and submit nothing."),
        ]  # fmt: skip

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = [self.name, *args]
        return super().parse_args(ctx, args)

    def work(self, ctx: click.Context) -> Any:
        from tilewright.pipeline.cluster.profiles import BatchProfileError
        from tilewright.workflows.batch import INSIDE

        words = ctx.meta[_WORDS]
        detach, dry_run = (ctx.meta.get(f"{_WORDS}.{name}", False) for name in ("detach", "dry_run"))
        if INSIDE not in os.environ:
            from tilewright.workflows.profiles import tell_lost

            tell_lost(ctx.params["cluster"], ctx.params["cluster_file"])
        if detach or dry_run or INSIDE in os.environ:
            from tilewright.workflows.batch.place import only_prints_script

            if only_prints_script(ctx.params, words, detach=detach, dry_run=dry_run):
                return None
        if "device" in ctx.params:
            from tilewright.pipeline.cluster.here.opening import start_device

            start_device(*(ctx.params[name] for name in ("device", "cluster", "cluster_file")))
        try:
            return super().work(ctx)
        except BatchProfileError as asked:
            if ctx.params.get("plan_only"):  # which is made here, and never becomes a job
                raise
            batch = asked
        from tilewright.workflows.batch.place import run_as_job

        return run_as_job(batch, words, detach=detach)


def _wished(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    ctx.meta[f"{_WORDS}.{parameter.name}"] = value
