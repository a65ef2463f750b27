"""The command that watches a running cluster. It imports what it needs when it runs."""

from __future__ import annotations

import sys

import click

from tilewright.workflows.commands.completion import CLUSTER
from tilewright.workflows.commands.options import cluster_file_option, json_option
from tilewright.workflows.console import Command, Termination, printing, to_json_text


@click.command(cls=Command)
@click.argument("where", type=CLUSTER)
@cluster_file_option
@click.option("--interval", type=click.FloatRange(0.1, 3600), default=2.0, show_default=True, metavar="SECONDS",
              help="Time between two looks.")  # fmt: skip
@click.option("--once", is_flag=True, help="Look twice, print what was done in between, and end.")
@json_option
def top(where: str, cluster_file: str | None, interval: float, once: bool, as_json: bool) -> None:
    """Show what the workers of a running cluster do: tiles, rates, busy stages, memory. Ctrl-C ends it.

    WHERE is a scheduler's address, a batch job's number or folder, or a profile of kind existing.
    """
    from tilewright.workflows.terminal.top import ClusterLook, cluster_at, watch

    def line(look: ClusterLook) -> None:
        with printing():
            click.echo(to_json_text(look.to_json()) if as_json else str(look))

    with cluster_at(where, cluster_file) as client:
        try:
            if once or as_json or not sys.stdout.isatty():
                watch(client, interval, line, once=once)
                return
            from rich.live import Live

            with Live(auto_refresh=False, screen=True) as live:
                watch(client, interval, lambda look: live.update(look.table(), refresh=True), once=False)
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt, Termination):
                raise
