"""The commands that count and compare texts. They import what they need when they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from tilewright.kernels.choices import FORMS, SHINGLES
from tilewright.workflows.commands.completion import Text
from tilewright.workflows.commands.job import JobCommand
from tilewright.workflows.commands.options import (
    cluster_options,
    device_option,
    json_option,
    options,
    overwrite_option,
    plan_only_option,
)
from tilewright.workflows.commands.reporting import Reporting, check_report, report_option
from tilewright.workflows.console import (
    Command,
    FileName,
    Kinds,
    Outputs,
    check_plot_options,
    is_quiet,
    listening,
    minhash_options,
    on_interrupt,
    plot_options,
    print_names,
    print_result,
    reading_options,
)

OUT_ENDINGS = (".csv", ".json", ".npz", ".parquet", ".zarr")
DUPLICATES_ENDINGS = (".json", ".parquet", ".zarr")
SIGNALS_ENDINGS = (".csv", ".json", ".parquet", ".zarr")
null_option = click.option(
    "--null", "-0", is_flag=True, help="End what is listed by a NUL, not a line break, which names may have."
)
RULE_SETS = ("gopher", "gopher-quality", "gopher-repetition")


@click.command(cls=JobCommand)
@click.argument("corpus", nargs=-1, required=True)
@click.option(
    "--by",
    type=Kinds(),
    default="byte",
    show_default=True,
    help="What is counted: letters are A to Z, in either case; bigrams pairs of bytes; codepoints characters of UTF-8;"
    " words runs of Unicode's word characters; n-grams 2 to 5 words, characters or bytes.",
)
@click.option("--casefold", is_flag=True, help="Count words without regard to case, by str.casefold.")
@click.option("--normalise", type=click.Choice(FORMS), help="Count words in this form of Unicode's.")
@click.option("--per-document", is_flag=True, help="One row of counts for each document.")
@options(*reading_options)
@click.option(
    "--out",
    type=FileName(*OUT_ENDINGS),
    metavar="FILE",
    help="Write the counts to F.csv, F.json, F.npz, F.parquet or F.zarr.",
)
@options(*plot_options)
@click.option("--top", type=click.IntRange(1), metavar="N",
              help="Print the N most frequent, and no more; default: 26.")  # fmt: skip
@click.option(
    "--state",
    metavar="DIR",
    help="Keep finished pieces in this folder, and go on from there, also with a corpus that has grown. Without it,"
    " --out keeps them beside FILE until that is written.",
)
@click.option("--no-resume", is_flag=True, help="Count every piece, also those that a stopped run has left.")
@options(cluster_options, device_option, plan_only_option)
@options(report_option, overwrite_option, json_option)
def histogram(
    corpus: tuple[str, ...],
    out: str | None,
    plot: str | None,
    bars: str,
    log: bool,
    heat_map: str | None,
    top: int | None,
    state: str | None,
    no_resume: bool,
    plan_only: bool,
    report: str | None,
    overwrite: bool,
    as_json: bool,
    **shared: Any,
) -> None:
    """Count the bytes, letters, pairs, characters, words, lines or n-grams of files, and of all files below folders."""
    from tilewright.pipeline.records import place_of as folder_of
    from tilewright.pipeline.text.kept_counts import State, state_of_output
    from tilewright.workflows import histogram as workflow
    from tilewright.workflows.terminal.progress import Counting

    if out is not None or plot is not None:  # it imports zarr
        from tilewright.pipeline.text.saved_counts import check_outputs, makes_array, place_of

    if top is not None and as_json:
        raise click.UsageError("--top says what is printed for people, and --json has all: give one of them")

    def words(result: Any) -> str | None:
        return None if top is None else result.words(top)

    check_plot_options(plot, heat_map, per_document=shared["per_document"])
    stored = [each for each in corpus if each != "-"]
    places = [out, plot, state]
    check_report(
        report, *places, plan_only=plan_only, overwrite=overwrite, corpus=stored, what="what is counted"
    )
    keeping = None
    if state is not None:
        keeping = State(folder_of(state), resume=not no_resume)
    elif out is not None and isinstance(place := place_of(out), Path):
        keeping = state_of_output(place, resume=not no_resume)
    elif no_resume:
        raise click.UsageError("--no-resume is about what --state or --out has kept: give one of them too")
    if plan_only:
        with listening(quiet=is_quiet()) as listener:
            planned = workflow.plan_only(
                corpus, out=out, plot=plot, state=keeping, overwrite=overwrite, listener=listener, **shared
            )
        print_result(planned, as_json=as_json)
        return
    if out is not None or plot is not None:
        arrays = makes_array(shared["by"], per_document=shared["per_document"])
        check_outputs(stored, out, plot, overwrite=overwrite, arrays=arrays)
    # What is written at a URL is there whole or not at all: only of local files there is something to tell.
    files = [place for path in (out, plot) if path is not None and isinstance(place := place_of(path), Path)]
    outputs, pieces = Outputs(*files), Counting("histogram")

    def kept() -> str:
        if keeping is not None and not outputs.finished() and keeping.apart is not None:
            return f"{keeping.folder} keeps {pieces}; the same command goes on from there"
        return outputs.kept()

    on_interrupt(kept)
    reporting = Reporting("histogram", corpus, report, overwrite=overwrite)
    with listening(quiet=is_quiet()) as told, pieces.listening(told) as listener:
        result = workflow.histogram(corpus, state=keeping, listener=reporting.recording(listener), **shared)
    try:
        if out is not None:
            from tilewright.pipeline.text.saved_counts import save_histogram

            try:
                save_histogram(result, out, overwrite=overwrite)
            finally:
                if keeping is not None and keeping.temporary and place_of(out) in outputs.finished():
                    keeping.remove()
        if plot is not None:
            from tilewright.workflows.plots import plot_histogram

            plot_histogram(result, plot, bars=bars, log=log, heat_map=heat_map, overwrite=overwrite)
        reporting.write(result, result.short_facts())
    except Exception:
        if keeping is not None and keeping.apart is not None and not is_quiet():
            click.echo(f"what was counted is kept in {keeping.folder}; the same command writes it", err=True)
        print_result(result, as_json=as_json, words=words(result))  # counting may have taken hours
        raise
    print_result(result, as_json=as_json, words=words(result))
    if result.bad:
        for _, why in result.bad:
            click.echo(f"left out: {why}", err=True)
        raise click.exceptions.Exit(3)


@click.command(cls=JobCommand)
@click.argument("corpus", nargs=-1, required=True)
@click.option("--threshold", type=click.FloatRange(0, 1, min_open=True), default=0.8, show_default=True,
              help="The least Jaccard index of near-duplicates.")  # fmt: skip
@click.option("--shingle", type=click.Choice(SHINGLES), default="word", show_default=True,
              help="What shingles consist of.")  # fmt: skip
@click.option("--ngram", type=click.IntRange(1, 1000), default=5, show_default=True,
              help="Words or characters of a shingle.")  # fmt: skip
@click.option("--casefold", is_flag=True, help="Compare without regard to case, by str.casefold.")
@click.option("--normalise", type=click.Choice(FORMS), help="Compare in this form of Unicode's.")
@options(*minhash_options, *reading_options)
@click.option("--out", type=FileName(*DUPLICATES_ENDINGS), metavar="FILE",
              help="Write the result to F.json, F.parquet or F.zarr.")  # fmt: skip
@click.option("--list", "lists", is_flag=True, help="Print the names of all documents but the first of each cluster:"
              " those to drop, one a line, with --id-field each after its id and a tab.")  # fmt: skip
@null_option
@options(cluster_options, device_option, plan_only_option, report_option, overwrite_option, json_option)
def duplicates(
    corpus: tuple[str, ...],
    out: str | None,
    lists: bool,
    null: bool,
    plan_only: bool,
    report: str | None,
    as_json: bool,
    **shared: Any,
) -> None:
    """Find documents that are the same, or whose sets of shingles nearly are, in files and all files below folders."""
    from tilewright.workflows.documents import duplicates as workflow

    if lists and as_json:
        raise click.UsageError("--list and --json both say what is printed: give one of them")
    if null and not lists:
        raise click.UsageError("--null says how listed names end: add --list, or leave --null out")
    names_of = (lambda found: found.dropped_lines) if lists else None
    _of_documents(
        workflow, "duplicates", corpus, out, plan_only, report, as_json, names_of, null=null, **shared
    )


def _of_documents(
    workflow: Any,
    name: str,
    corpus: tuple[str, ...],
    out: str | None,
    plan_only: bool,
    report: str | None,
    as_json: bool,
    names_of: Callable[[Any], Callable[[], Iterable[str]]] | None,
    *,
    null: bool,
    **asked: Any,
) -> None:
    """Run a workflow about each document, or plan it, and print what it found; with ``names_of`` only these names."""
    from tilewright.pipeline.text.saved_counts import place_of

    overwrite = asked["overwrite"]
    stored = [each for each in corpus if each != "-"]
    check_report(report, out, plan_only=plan_only, overwrite=overwrite, corpus=stored, what="the result")
    if plan_only:
        with listening(quiet=is_quiet()) as listener:
            planned = workflow.plan_only(corpus, out=out, listener=listener, **asked)
        print_result(planned, as_json=as_json)
        return
    if out is not None and isinstance(place := place_of(out), Path):
        on_interrupt(Outputs(place).kept)
    reporting = Reporting(name, corpus, report, overwrite=overwrite)
    with listening(quiet=is_quiet()) as listener:
        found = getattr(workflow, name)(corpus, out=out, listener=reporting.recording(listener), **asked)
    try:
        reporting.write(found, found.facts())
    finally:
        if names_of is not None:
            print_names(names_of(found), null=null)
        else:
            print_result(found, as_json=as_json)
    if found.bad:
        for _, why in found.bad:
            click.echo(f"left out: {why}", err=True)
        raise click.exceptions.Exit(3)


@click.command(cls=JobCommand)
@click.argument("corpus", nargs=-1, required=True)
@click.option("--stop-word", "stop_words", multiple=True, metavar="WORD",
              help="Count this word as a stop word; may be repeated. Default: Gopher's eight, of English.")  # fmt: skip
@click.option("--rules", multiple=True, type=Text(*RULE_SETS, paths="file"), metavar="SET|FILE",
              help="Keep documents by these rules, and drop others: gopher, gopher-quality, gopher-repetition, or a"
              " .yaml or .json file of bounds; of several a later one overrides what it names.")  # fmt: skip
@click.option("--list", "lists", is_flag=True, help="Print the documents that --rules drop, one a line, with"
              " --id-field each after its id and a tab, and a tab and the reasons behind it.")  # fmt: skip
@click.option("--list-kept", is_flag=True, help="Print those that --rules keep, without reasons.")
@null_option
@options(*reading_options)
@click.option("--out", type=FileName(*SIGNALS_ENDINGS), metavar="FILE",
              help="Write a row for each document to F.csv, F.json, F.parquet or F.zarr.")  # fmt: skip
@options(cluster_options, plan_only_option, report_option, overwrite_option, json_option)
def signals(
    corpus: tuple[str, ...],
    stop_words: tuple[str, ...],
    rules: tuple[str, ...],
    lists: bool,
    list_kept: bool,
    null: bool,
    out: str | None,
    plan_only: bool,
    report: str | None,
    as_json: bool,
    **shared: Any,
) -> None:
    """Find quality signals of each document in files and all files below folders, and filter documents by rules."""
    from tilewright.workflows.documents import signals as workflow

    if lists + list_kept + as_json > 1:
        raise click.UsageError("--list, --list-kept and --json all say what is printed: give one of them")
    if (lists or list_kept) and not rules:
        raise click.UsageError(
            "--list and --list-kept are about what rules drop and keep: add --rules gopher"
        )
    if null and not (lists or list_kept):
        raise click.UsageError(
            "--null says how listed names end: add --list or --list-kept, or leave --null out"
        )
    shared.update(stop_words=stop_words or None, rules=rules or None)
    names_of = None
    if lists or list_kept:
        names_of = (lambda found: found.dropped_lines) if lists else (lambda found: found.kept_lines)
    _of_documents(workflow, "signals", corpus, out, plan_only, report, as_json, names_of, null=null, **shared)


@click.command(cls=Command)
@click.argument("counts", nargs=-1, required=True)
@click.option(
    "--out",
    type=FileName(*OUT_ENDINGS),
    required=True,
    metavar="FILE",
    help="Write the sum to F.csv, F.json, F.npz, F.parquet or F.zarr.",
)
@click.option("--subtract", multiple=True, metavar="COUNTS",
              help="Take out the documents of this histogram, such as removed ones; may be repeated.")  # fmt: skip
@options(overwrite_option, json_option)
def merge(
    counts: tuple[str, ...], out: str, subtract: tuple[str, ...], overwrite: bool, as_json: bool
) -> None:
    """Add up histograms of different documents, from files that they were written to, but for .csv."""
    from tilewright.workflows.merge import merge as workflow

    on_interrupt(Outputs(Path(out)).kept)
    print_result(workflow(counts, out, subtract=subtract, overwrite=overwrite), as_json=as_json)
