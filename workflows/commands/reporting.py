"""What commands have of ``--report``. The report itself is imported when one is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from tilewright.workflows.console import FileName, print_result

if TYPE_CHECKING:
    from tilewright.pipeline.events import Listener

report_option = click.option(
    "--report",
    type=FileName(".html", ".json"),
    metavar="FILE",
    help="Write a page about the run into F.html, or its data into F.json.",
)


def check_report(
    report: str | None,
    *outs: str | None,
    plan_only: bool = False,
    overwrite: bool,
    corpus: Sequence[str] = (),
    what: str = "C",
) -> None:
    """Fail before any work where the report could not be written. what: what goes to ``outs``."""
    if report is not None:
        if plan_only:
            raise click.UsageError(
                "--report tells of a run, and --plan-only makes none: leave one of them out"
            )
        from tilewright.workflows.report import check_report as check

        check(report, *outs, overwrite=overwrite, corpus=corpus, what=what)


class Reporting:
    """The report on work that is no single product, if one is asked for."""

    def __init__(self, work: str, inputs: Sequence[str], path: str | None, *, overwrite: bool) -> None:
        self._work, self._inputs, self._path, self._overwrite = work, inputs, path, overwrite
        self._recorder: Any = None

    def recording(self, listener: Listener) -> Listener:
        """The listener, behind one that records what it hears."""
        if self._path is None:
            return listener
        from tilewright.pipeline.report.works import WorkRecorder

        self._recorder = WorkRecorder(listener)
        recorder: Listener = self._recorder
        return recorder

    def write(self, result: Any, facts: dict[str, Any] | None = None) -> None:
        """Write the report on a result, which is finished. facts: what its data have of it, in place of
        ``to_json()``."""
        if self._path is None:
            return
        from tilewright.pipeline.report.work_page import WorkReport
        from tilewright.workflows.report import write_report

        verification = getattr(result, "verification", None)
        report = WorkReport(
            self._work,
            self._inputs,
            result.to_json() if facts is None else facts,
            str(result),
            self._recorder,
            passed=None if verification is None else verification.passed,
        )
        write_report(report, self._path, overwrite=self._overwrite, what="the work is")


def print_run(run: Any, report: str | None, *, overwrite: bool, as_json: bool) -> None:
    """Print the result of a product, and write the report on it, if one is asked for."""
    try:
        if report is not None:
            from tilewright.workflows.report import write_report

            write_report(run.report(), report, overwrite=overwrite)
    finally:
        print_result(run, as_json=as_json)  # C has its name
