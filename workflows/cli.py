"""The command line: parses, calls a function of ``tilewright.workflows`` or the pipeline, prints.

Each command imports what it needs when it runs, so that ``--help`` does not wait for Numba or Dask.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from tilewright.kernels.choices import FORMS, PRECISIONS, SHINGLES
from tilewright.workflows.commands.completion import JOB, SETTING
from tilewright.workflows.commands.options import (
    EPILOGUE,
    cluster_options,
    constant_option,
    device_option,
    divide_help,
    dtype_option,
    durability_option,
    epilogue_options,
    factor_options,
    gram_dtype_option,
    json_option,
    memory_option,
    options,
    outcome_options,
    overwrite_option,
    plan_only_option,
    precision_option,
    search_options,
    storage_options,
    sum_dtype_option,
    variables_options,
)
from tilewright.workflows.commands.watching import top
from tilewright.workflows.console import (
    SIDES,
    VARIABLES,
    Benches,
    Command,
    FileName,
    Group,
    Kinds,
    Outputs,
    Size,
    as_axes,
    as_number,
    as_sides,
    as_weights,
    check_plot_options,
    check_report,
    is_quiet,
    listening,
    minhash_options,
    on_interrupt,
    plot_options,
    print_names,
    print_plan,
    print_result,
    print_run,
    printing,
    range_options,
    reading_options,
    taken,
    taken_of_product,
    to_json_text,
)
from tilewright.workflows.terminal.ending import ended_at_once
from tilewright.workflows.terminal.starting import hide_what_is_unused

METHODS = ("auto", "krylov", "gram")
METRICS = ("dot", "cosine", "l2")
OUT_ENDINGS = (".csv", ".json", ".npz", ".parquet", ".zarr")
DUPLICATES_ENDINGS = (".json", ".parquet", ".zarr")
MOST_ROUNDS = 64
Function = TypeVar("Function", bound=Callable[..., Any])


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
            batch = asked
        from tilewright.workflows.batch.place import run_as_job

        return run_as_job(batch, words, detach=detach)


_WORDS = "tilewright.words"


def _wished(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    ctx.meta[f"{_WORDS}.{parameter.name}"] = value


@contextmanager
def storing(c: str) -> Iterator[Any]:
    """A listener for a product that is stored at ``c``: Ctrl-C tells what is kept of it."""
    from tilewright.pipeline.product.output import partial_path
    from tilewright.pipeline.store.arrays import local_path
    from tilewright.workflows.terminal.progress import Counting

    path = local_path(c)
    outputs = Outputs(*filter(None, [path]))
    tiles = Counting("matmul")

    def kept() -> str:
        if path is None:
            return f"{c} holds {tiles}"
        if not outputs.finished() and partial_path(path).exists():
            return f"{partial_path(path)} keeps {tiles}; the same command goes on from there"
        return outputs.kept()

    on_interrupt(kept)
    with listening(quiet=is_quiet()) as shown, tiles.listening(shown) as listener:
        yield listener


@click.group(name="tilewright", cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tilewright", prog_name="tilewright")
def cli() -> None:
    """Multiply Zarr matrices larger than a GPU, and count text corpora, on one GPU or on many."""


@cli.command(cls=JobCommand)
@click.argument("a")
@click.argument("b")
@click.argument("c")
@options(factor_options, range_options("rows of C", "columns of C"), epilogue_options, dtype_option)
@options(precision_option, cluster_options, device_option, memory_option)
@options(plan_only_option, storage_options, outcome_options)
def matmul(
    a: str,
    b: str,
    c: str,
    plan_only: bool,
    no_verify: bool,
    no_resume: bool,
    overwrite: bool,
    as_json: bool,
    report: str | None,
    rows: Any,
    columns: Any,
    **shared: Any,
) -> None:
    """Store C = A B, all three Zarr arrays. C gets its name when it is whole and has been checked.

    With scales and offsets, C = alpha * (row scale) * (column scale) * A B + (row offset) + (column offset) + beta * C.
    """
    from tilewright.pipeline.product import job
    from tilewright.pipeline.product.request import Request
    from tilewright.pipeline.store.new.storage import as_storage
    from tilewright.workflows import matmul as workflow

    shared |= {"resume": not no_resume, "verify": not no_verify, "overwrite": overwrite}
    check_report(report, c, plan_only=plan_only, overwrite=overwrite)
    turned = {name: shared[name] for name in ("transpose_a", "transpose_b")}
    left, right = taken_of_product(a, b, rows, columns, **turned)
    if plan_only:
        with listening(quiet=is_quiet()) as listener:
            asked = {name: shared.pop(name) for name in EPILOGUE}
            shared["storage"] = as_storage(*(shared.pop(name) for name in ("chunks", "shards", "codec")))
            request = Request(left, right, c, listener=listener, **shared).with_epilogue(**asked)
            planned = job.plan_only(request)
        print_plan(planned, left, c, as_json=as_json, **shared)
        return
    with storing(c) as listener:
        run = workflow.matmul(left, right, c, listener=listener, **shared)
    print_run(run, report, overwrite=overwrite, as_json=as_json)


def _run_gram(name: str, arrays: tuple[Any, ...], as_json: bool, **shared: Any) -> None:
    """Run one of the functions of ``workflows.gram``."""
    if not 2 <= len(arrays) <= 3:
        raise click.UsageError(
            f"found {len(arrays)} array names; give X [Y] OUT, and behind them --center and --scale, which else take"
            " the next word for their values"
        )
    from tilewright.workflows import gram as workflow

    report, overwrite = shared.pop("report"), shared["overwrite"]
    check_report(report, arrays[-1], plan_only=shared["plan_only"], overwrite=overwrite)
    arrays = (taken(arrays[0], shared.pop("rows"), shared.pop("columns")), *arrays[1:])
    for option in ("resume", "verify"):
        shared[option] = not shared.pop(f"no_{option}")
    if shared.pop("plan_only"):
        with listening(quiet=is_quiet()) as listener:
            planned = workflow.plan_only(name, arrays, listener=listener, **shared)
        print_plan(planned, arrays[0], arrays[-1], as_json=as_json, **shared)
        return
    with storing(arrays[-1]) as listener:
        run = getattr(workflow, name)(*arrays, listener=listener, **shared)
    print_run(run, report, overwrite=overwrite, as_json=as_json)


@cli.command(cls=JobCommand)
@click.argument("arrays", nargs=-1, metavar="X [Y] OUT")
@options(variables_options)
@click.option(
    "--center",
    is_flag=False,
    flag_value=VARIABLES,
    metavar="[SIDE|ARRAY]",
    callback=as_sides,
    help="Subtract the mean of each variable; columns, rows or both: theirs; or a stored vector's numbers.",
)
@click.option(
    "--scale",
    is_flag=False,
    flag_value=VARIABLES,
    metavar="[SIDE|ARRAY]",
    callback=as_sides,
    help="Divide by the deviation of each variable; columns or rows: theirs; or multiply by a stored"
    " vector's numbers.",
)
@click.option("--divide", metavar="N", callback=as_number, help=divide_help)
@options(constant_option, gram_dtype_option, precision_option, cluster_options, device_option, memory_option)
@options(plan_only_option, storage_options, outcome_options)
def gram(arrays: tuple[str, ...], as_json: bool, **shared: Any) -> None:
    """Store the sums of products of every two columns of X: the Gram matrix, XᵀX. With Y, of X and Y.

    Options centre, scale, weight and divide them; X is read where it lies, and never stored again. --center and
    --scale may be followed by a side, columns or rows, by the name of a stored vector, or by SIDE=NAME.
    """
    _run_gram("gram", arrays, as_json, **shared)


@cli.command(cls=JobCommand)
@click.argument("arrays", nargs=-1, metavar="X [Y] OUT")
@options(variables_options)
@click.option("--divide", metavar="N", default="n-1", show_default=True, callback=as_number, help=divide_help)
@options(gram_dtype_option, precision_option, cluster_options, device_option, memory_option)
@options(plan_only_option, storage_options, outcome_options)
def cov(arrays: tuple[str, ...], as_json: bool, **shared: Any) -> None:
    """Store the covariances of the columns of X, or of those of X with those of Y."""
    _run_gram("cov", arrays, as_json, **shared)


@cli.command(cls=JobCommand)
@click.argument("arrays", nargs=-1, metavar="X [Y] OUT")
@options(variables_options, constant_option, gram_dtype_option, precision_option, cluster_options)
@options(device_option, memory_option, plan_only_option, storage_options, outcome_options)
def corr(arrays: tuple[str, ...], as_json: bool, **shared: Any) -> None:
    """Store the correlations of the columns of X, or of those of X with those of Y."""
    _run_gram("corr", arrays, as_json, **shared)


@cli.command(cls=JobCommand)
@click.argument("x")
@click.argument("out")
@options(search_options, range_options("rows of X", "columns of X"))
@click.option(
    "--of",
    type=click.Choice(SIDES),
    default="columns",
    show_default=True,
    help="What the variables are, such as grid points; the other side are samples, such as times.",
)
@click.option(
    "--sum-over",
    metavar="AXES",
    callback=as_axes,
    help="The axes of the samples, by their dimensions' names or by numbers, with commas between them, in place of"
    " --of.",
)
@click.option("--no-center", is_flag=True, help="Subtract no means.")
@click.option("--scale", is_flag=True, help="Divide each variable by its standard deviation.")
@click.option(
    "--missing",
    metavar="CODE",
    callback=as_number,
    help="The number that stands for a missing one, such as -1, or nan, or a stored mask; it counts as the mean.",
)
@click.option(
    "--weights",
    metavar="[AXIS=]ARRAY",
    callback=as_weights,
    help="A stored vector of one weight for each variable, such as its area; or, as lat=ARRAY, for each place of one of"
    " the variables' axes (the cosine of the latitude).",
)
@click.option("--sample-weights", metavar="ARRAY", help="A stored vector of one weight for each sample.")
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default="auto",
    show_default=True,
    help="krylov iterates; gram forms the covariance of the shorter side in one pass; auto: that up to 2048.",
)
@click.option("--no-verify", is_flag=True, help="Do not check the scores.")
@click.option("--no-resume", is_flag=True, help="Make every pass, also those that a stopped run has made.")
@options(constant_option, cluster_options, device_option, memory_option, plan_only_option, overwrite_option)
@options(json_option)
def eofs(x: str, out: str, plan_only: bool, as_json: bool, **shared: Any) -> None:
    """Store the leading EOFs of X: the eigenvectors of its covariance matrix, with scores and explained variance.

    Neither that matrix nor the centred X is stored: X is streamed, twice for each step. OUT is a Zarr group that xarray
    opens.
    """
    from tilewright.workflows import eofs as workflow

    given = taken(x, shared.pop("rows"), shared.pop("columns"))
    for option in ("center", "verify", "resume"):
        shared[option] = not shared.pop(f"no_{option}")
    if plan_only:
        with listening(quiet=is_quiet()) as listener:
            planned = workflow.plan_only(given, out, listener=listener, **shared)
        print_result(planned, as_json=as_json)
        return
    on_interrupt(
        lambda: f"what whole passes have found is kept beside {out}, and the same command goes on there"
    )
    with listening(quiet=is_quiet()) as listener:
        run = workflow.eofs(given, out, listener=listener, **shared)
    print_result(run, as_json=as_json)


neighbour_options = options(
    click.option("--metric", type=click.Choice(METRICS), default="dot", show_default=True,
                 help="What a pair's value is: the sum of products, that divided by both lengths, or the distance."),
    click.option("--columns", is_flag=True, help="The items are the columns of A and B, not their rows."),
    precision_option, cluster_options, device_option, memory_option,
    plan_only_option,
    click.option("--no-verify", is_flag=True, help="Do not compare a sample of the items with all of B anew."),
    click.option("--no-resume", is_flag=True, help="Search every block, also those that a stopped run has finished."),
    overwrite_option, json_option,
)  # fmt: skip


def _run_neighbours(
    name: str, inputs: tuple[str, ...], out: str | None, as_json: bool, **shared: Any
) -> None:
    """Run one of the functions of ``workflows.neighbours``."""
    if not 1 <= len(inputs) <= 2:
        raise click.UsageError("give A.zarr [B.zarr] OUT.zarr; pairs that are only counted have no OUT.zarr")
    from tilewright.workflows.neighbours import search

    given = inputs[0], inputs[1] if len(inputs) > 1 else None, out
    shared["of"] = "columns" if shared.pop("columns") else "rows"
    for option in ("resume", "verify"):
        shared[option] = not shared.pop(f"no_{option}")
    if shared.pop("plan_only"):
        with listening(quiet=is_quiet()) as listener:
            planned = search.plan_only(*given, listener=listener, **shared)
        print_result(planned, as_json=as_json)
        return
    if out is not None:
        on_interrupt(lambda: f"finished blocks are kept beside {out}, and the same command goes on there")
    with listening(quiet=is_quiet()) as listener:
        run = getattr(search, name)(*given, listener=listener, **shared)
    print_result(run, as_json=as_json)


@cli.command(cls=JobCommand)
@click.argument("arrays", nargs=-1, metavar="A [B] OUT")
@click.option("-k", type=int, default=10, show_default=True, help="How many neighbours each item gets.")
@click.option("--exclude-self", is_flag=True, help="Where B is A: no item is its own neighbour.")
@neighbour_options
def topk(arrays: tuple[str, ...], as_json: bool, **shared: Any) -> None:
    """Store the k nearest rows of B of each row of A, exactly; without B, of A itself.

    OUT is a Zarr group that xarray opens: indices and values, rows x k.
    """
    _run_neighbours("topk", arrays[:-1], arrays[-1] if arrays else None, as_json, **shared)


@cli.command(cls=JobCommand)
@click.argument("arrays", nargs=-1, metavar="A [B] OUT")
@click.option("--above", type=float, metavar="T", help="Pairs whose value is at least T.")
@click.option("--below", type=float, metavar="T", help="Pairs whose value is at most T.")
@click.option("--count-only", is_flag=True, help="Count them, and store none; there is no OUT.")
@neighbour_options
def pairs(arrays: tuple[str, ...], count_only: bool, as_json: bool, **shared: Any) -> None:
    """Store all pairs of rows of A and B on one side of a threshold, exactly; without B, each pair of A once.

    OUT is a Zarr group that xarray opens: row, column and value of each pair, in order.
    """
    inputs, out = (arrays, None) if count_only or not arrays else (arrays[:-1], arrays[-1])
    _run_neighbours("pairs", inputs, out, as_json, count_only=count_only, **shared)


@cli.command()
@click.argument("a")
@click.argument("b")
@options(factor_options, dtype_option, precision_option, device_option, memory_option)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many workers share the work, each with all the memory and cores of this machine, or a GPU like its"
    " first. For the workers of a profile: matmul --plan-only.",
)
@click.option(
    "--host-memory",
    type=Size(),
    metavar="SIZE",
    help="Memory of a worker's process; default: this machine's.",
)
@json_option
def plan(a: str, b: str, as_json: bool, **shared: Any) -> None:
    """Print how A B would be computed: tiles, panels, memory, bytes read and the least that could be read."""
    from tilewright.workflows.matmul import plan_matmul

    with listening(quiet=is_quiet()) as listener:
        planned = plan_matmul(a, b, listener=listener, **shared)
    print_plan(planned, a, None, as_json=as_json, **shared)


@cli.command(cls=JobCommand)
@click.argument("a")
@click.argument("b")
@click.argument("c")
@options(factor_options, precision_option, cluster_options)
@click.option("--rounds", type=click.IntRange(1, MOST_ROUNDS),
              help="Independent rounds; default: the setting tilewright.verify-rounds (2).")  # fmt: skip
@json_option
def verify(a: str, b: str, c: str, as_json: bool, **shared: Any) -> None:
    """Check that C = A B without computing it again. Exit status 1 where it does not, or nothing could be compared."""
    from tilewright.workflows.verify import verify as check

    with listening(quiet=is_quiet()) as listener:
        outcome = check(a, b, c, listener=listener, **shared)
    print_result(outcome, as_json=as_json)
    if not outcome.passed:
        raise click.exceptions.Exit(1)


@cli.command(cls=JobCommand)
@click.argument("c")
@click.option(
    "--a",
    metavar="A",
    help="Compare C with the product of this and B, not with its checksums.",
)
@click.option("--b", metavar="B", help="The right factor of what C is compared with.")
@options(factor_options, precision_option, cluster_options, json_option)
def audit(c: str, as_json: bool, **shared: Any) -> None:
    """Name every stored chunk of a product that is not what was written. Exit status 1 where there is one."""
    from tilewright.workflows.audit import audit as look

    with listening(quiet=is_quiet()) as listener:
        outcome = look(c, listener=listener, **shared)
    print_result(outcome, as_json=as_json)
    if not outcome.passed:
        raise click.exceptions.Exit(1)


@cli.command(cls=JobCommand)
@click.argument("a")
@click.argument("b")
@click.argument("c")
@options(factor_options)
@click.option("--precision", type=click.Choice(PRECISIONS),
              help="What C was computed with. Like transposes, its record says that where it has one.")  # fmt: skip
@options(cluster_options, device_option, memory_option, durability_option, json_option)
def repair(
    a: str, b: str, c: str, as_json: bool, transpose_a: bool, transpose_b: bool, **shared: Any
) -> None:
    """Compute again the tiles of C in which audit finds something bad, and no others.

    C stands as it was until the repaired one takes its place.
    """
    from tilewright.workflows.repair import repair as put_right

    on_interrupt(lambda: f"{c} is as it was; the same command goes on with what is repaired")
    with listening(quiet=is_quiet()) as listener:
        outcome = put_right(
            a,
            b,
            c,
            transpose_a=transpose_a or None,
            transpose_b=transpose_b or None,
            listener=listener,
            **shared,
        )
    print_result(outcome, as_json=as_json)


@cli.command(cls=JobCommand)
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
@click.option(
    "--state",
    metavar="DIR",
    help="Keep finished pieces in this folder, and go on from there, also with a corpus that has grown. Without it,"
    " --out keeps them beside FILE until that is written.",
)
@click.option("--no-resume", is_flag=True, help="Count every piece, also those that a stopped run has left.")
@options(cluster_options, device_option, overwrite_option, json_option)
def histogram(
    corpus: tuple[str, ...],
    out: str | None,
    plot: str | None,
    bars: str,
    log: bool,
    heat_map: str | None,
    state: str | None,
    no_resume: bool,
    overwrite: bool,
    as_json: bool,
    **shared: Any,
) -> None:
    """Count the bytes, letters, pairs, characters, words, lines or n-grams of files, and of all files below folders."""
    from tilewright.pipeline.records import place_of as folder_of
    from tilewright.pipeline.text.kept_counts import State, state_of_output
    from tilewright.pipeline.text.saved_counts import check_outputs, place_of
    from tilewright.workflows import histogram as workflow
    from tilewright.workflows.terminal.progress import Counting

    check_plot_options(plot, heat_map, per_document=shared["per_document"])
    if out is not None or plot is not None:
        check_outputs([each for each in corpus if each != "-"], out, plot, overwrite=overwrite)
    keeping = None
    # What is written at a URL is there whole or not at all: only of local files there is something to tell.
    files = [place for path in (out, plot) if path is not None and isinstance(place := place_of(path), Path)]
    if state is not None:
        keeping = State(folder_of(state), resume=not no_resume)
    elif out is not None and isinstance(place := place_of(out), Path):
        keeping = state_of_output(place, resume=not no_resume)
    elif no_resume:
        raise click.UsageError("--no-resume is about what --state or --out has kept: give one of them too")
    outputs, pieces = Outputs(*files), Counting("histogram")

    def kept() -> str:
        if keeping is not None and not outputs.finished() and keeping.apart is not None:
            return f"{keeping.folder} keeps {pieces}; the same command goes on from there"
        return outputs.kept()

    on_interrupt(kept)
    with listening(quiet=is_quiet()) as told, pieces.listening(told) as listener:
        result = workflow.histogram(corpus, state=keeping, listener=listener, **shared)
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
    except Exception:
        if keeping is not None and keeping.apart is not None and not is_quiet():
            click.echo(f"what was counted is kept in {keeping.folder}; the same command writes it", err=True)
        print_result(result, as_json=as_json)  # counting may have taken hours
        raise
    print_result(result, as_json=as_json)
    if result.bad:
        for _, why in result.bad:
            click.echo(f"left out: {why}", err=True)
        raise click.exceptions.Exit(3)


@cli.command(cls=JobCommand)
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
              " those to drop, one a line.")  # fmt: skip
@options(cluster_options, overwrite_option, json_option)
def duplicates(corpus: tuple[str, ...], out: str | None, lists: bool, as_json: bool, **shared: Any) -> None:
    """Find documents that are the same, or whose sets of shingles nearly are, in files and all files below folders."""
    from tilewright.pipeline.text.saved_counts import place_of
    from tilewright.workflows import duplicates as workflow

    if lists and as_json:
        raise click.UsageError("--list and --json both say what is printed: give one of them")
    if out is not None and isinstance(place := place_of(out), Path):
        on_interrupt(Outputs(place).kept)
    with listening(quiet=is_quiet()) as listener:
        found = workflow.duplicates(corpus, out=out, listener=listener, **shared)
    if lists:
        print_names(found.dropped)
    else:
        print_result(found, as_json=as_json)
    if found.bad:
        for _, why in found.bad:
            click.echo(f"left out: {why}", err=True)
        raise click.exceptions.Exit(3)


@cli.command()
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


@cli.command(cls=JobCommand)
@click.argument("x")
@click.argument("y")
@click.option("--state", metavar="FILE", help="Keep finished pieces in this file, and go on from there.")
@click.option(
    "--no-resume", is_flag=True, help="Multiply every piece, also those that a stopped run has left."
)
@options(cluster_options, device_option, sum_dtype_option, json_option)
def dot(x: str, y: str, state: str | None, no_resume: bool, as_json: bool, **shared: Any) -> None:
    """Print the sum of conj(x) y over two one-dimensional Zarr arrays.

    Without --dtype the sum of integers has the smallest of int32, uint32, int64 and uint64 in which it cannot wrap, and
    where none is large enough NumPy's type widened to 64 bits; all else has numpy.vdot's dtype.
    """
    from tilewright.workflows.dot import timed_dot
    from tilewright.workflows.terminal.progress import Counting

    if no_resume and state is None:
        raise click.UsageError("--no-resume is about what --state has kept: give that too")
    pieces = Counting("dot")
    if state is not None:
        on_interrupt(lambda: f"{state} keeps {pieces}; the same command goes on from there")
    with listening(quiet=is_quiet()) as told, pieces.listening(told) as listener:
        run = timed_dot(x, y, state=state, resume=not no_resume, listener=listener, **shared)
    print_result(run, as_json=as_json)


@cli.command()
@click.argument("job", required=False, type=JOB)
@json_option
def jobs(job: str | None, as_json: bool) -> None:
    """List the batch jobs that profiles of kind slurm have made; or follow one, by its number."""
    from tilewright.workflows.batch.listing import folder_of
    from tilewright.workflows.batch.listing import jobs as all_jobs

    if job is None:
        print_result(all_jobs(), as_json=as_json)
        return
    from tilewright.workflows.batch.place import follow_job

    follow_job(folder_of(job), job)


cli.add_command(top)


@cli.command()
@json_option
def devices(as_json: bool) -> None:
    """Describe every GPU that can be used here."""
    from tilewright.workflows import devices as workflow

    found = workflow.devices()
    with printing():
        if as_json:
            reason = workflow.why_no_gpu() or None
            click.echo(to_json_text({"devices": [device.to_json() for device in found], "why_none": reason}))
        elif not found:
            click.echo(workflow.why_no_gpu())
        else:
            from rich.console import Console

            Console().print(workflow.device_table(found))


@cli.command()
@click.argument("names", nargs=-1, metavar="[NAME]...", type=SETTING)
@json_option
def settings(names: tuple[str, ...], as_json: bool) -> None:
    """List what can be set beside the options, how, and what it stands at here; or only settings of these names."""
    from tilewright.workflows.settings import settings as settings_here

    print_result(settings_here(names), as_json=as_json)


@cli.command(cls=JobCommand)
@click.option(
    "--output", metavar="FOLDER", default="demo-output", show_default=True, help="Where results go."
)
@options(cluster_options, device_option, json_option)
def demo(output: str, as_json: bool, **shared: Any) -> None:
    """Count Python's own standard library, multiply the counts, verify, and find its most similar modules."""
    from tilewright.workflows.demo import demo as run_demo

    on_interrupt(lambda: f"what was finished is in {output}; the next run replaces it")
    with listening(quiet=is_quiet()) as listener:
        run = run_demo(output, listener=listener, **shared)
    print_result(run, as_json=as_json)


@cli.group(cls=Benches)
def bench() -> None:
    """Measure this installation, and what others do, in the same run."""


def main(prog_name: str | None = None, words: list[str] | None = None) -> None:
    """The ``tilewright`` command, with these arguments, or those that the process was given. Ctrl-C or SIGTERM after it
    has reported success is too late to change that."""
    hide_what_is_unused()
    try:
        with ended_at_once():
            cli(words, prog_name=prog_name)
    except SystemExit as ended:
        if not ended.code:
            # While Python shuts down, a signal would kill the process, or print a traceback though nothing failed.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        # Under ``python -m``, Python would end itself by SIGINT in place of this status where Ctrl-C came within code
        # that was given as text, as dataclasses have it, caught or not. It forgets when it runs such code once more.
        eval("None")
        raise
