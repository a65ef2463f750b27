"""The page, or the JSON, that ``--report`` writes of a run."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tilewright.pipeline.errors import OptionError, OutputError, OutputExistsError, StoreError
from tilewright.pipeline.product.output import is_array_folder
from tilewright.pipeline.report.page import Report
from tilewright.pipeline.text.saved_counts import check_outputs, place_of, suffix_of, write_whole

REPORT_ENDINGS = (".html", ".json")


def check_report(
    path: str, *outs: str | None, overwrite: bool, corpus: Collection[str] = (), what: str = "C"
) -> None:
    """Fail before any work where the report on what is stored at ``outs`` could not be written at its end. what: what
    goes there. Raises as `check_outputs`, and OptionError where both have one place."""
    try:
        check_outputs(corpus, path, None, overwrite=overwrite, out_endings=REPORT_ENDINGS)
    except (StoreError, OutputError) as error:
        raise type(error)(f"--report: {str(error).removeprefix('output: ')}") from error
    report = place_of(path)
    for out in outs:
        if out is None:
            continue
        stored = place_of(out)
        if report == stored or (
            isinstance(report, Path) and isinstance(stored, Path) and stored.absolute() == report.absolute()
        ):
            raise OptionError(f"--report {path} is where {what} goes: give the report another name")
    if isinstance(report, Path):
        for folder in report.absolute().parents:
            if is_array_folder(folder):
                raise OptionError(
                    f"--report {path} lies in the array {folder}: give the report a place outside it"
                )


def write_report(report: Report, path: str, *, overwrite: bool, what: str = "the product is") -> None:
    """Write a report, as its ending says, at a path or URL; it appears when it is whole, or not at all. what: what is
    finished by then.

    Raises
    ------
    OutputExistsError
        Something stands there by now and ``overwrite`` is false.
    StoreError
        The file cannot be written.
    """
    place = place_of(path)
    text = report.to_text() if suffix_of(place) == ".json" else report.to_html()

    def write(draft: Path) -> None:
        draft.write_text(text, encoding="utf-8")

    try:
        write_whole(place, write, overwrite=overwrite)
    except (OutputExistsError, StoreError) as error:
        told = str(error).removeprefix("output: ")
        raise type(error)(f"--report: {told}; {what} finished, and only its report is missing") from error
