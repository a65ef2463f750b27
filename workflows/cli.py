"""The command line: parses, calls a function of ``tilewright.workflows`` or the pipeline, prints.

Each command imports what it needs when it runs, so that ``--help`` does not wait for Numba or Dask.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from tilewright.kernels.choices import PRECISIONS
from tilewright.workflows.commands.completion import JOB, SETTING
from tilewright.workflows.commands.job import JobCommand
from tilewright.workflows.commands.options import (
    ELSEWHERE,
    add_up_option,
    align_option,
    cluster_file_option,
    cluster_options,
    constant_option,
    device_option,
    divide_help,
    dtype_option,
    durability_option,
    elsewhere_options,
    epilogue_options,
    factor_options,
    gram_dtype_option,
    json_option,
    memory_option,
    named_options,
    options,
    outcome_options,
    overwrite_option,
    precision_option,
    search_options,
    storage_options,
    sum_dtype_option,
    variables_options,
)
from tilewright.workflows.commands.reporting import Reporting, check_report, print_run, report_option
from tilewright.workflows.commands.texts import duplicates, histogram, merge, signals
from tilewright.workflows.commands.watching import top
from tilewright.workflows.console import (
    SIDES,
    VARIABLES,
    Benches,
    Group,
    Outputs,
    Size,
    as_axes,
    as_number,
    as_sides,
    as_weights,
    is_quiet,
    listening,
    on_interrupt,
    print_plan,
    print_result,
    printing,
    range_options,
    taken,
    taken_of_product,
    to_json_text,
)
from tilewright.workflows.terminal.ending import ended_at_once
from tilewright.workflows.terminal.methods import write_methods_later
from tilewright.workflows.terminal.starting import hide_what_is_unused, put_off_collector

METHODS = ("auto", "krylov", "gram")
METRICS = ("dot", "cosine", "l2")
MOST_ROUNDS = 64
Function = TypeVar("Function", bound=Callable[..., Any])


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


def _beside(out: str, place: tuple[str, ...], kept: str) -> Callable[[], str]:
    """What Ctrl-C is to say of a command that keeps what it has finished in a folder of ``OUT.partial``, beside the
    words of what was asked for, which is all that lies there where nothing is finished."""
    from tilewright.pipeline.neighbours.pieces import REQUEST_NAME
    from tilewright.pipeline.product.output import partial_path
    from tilewright.pipeline.store.arrays import local_path

    path = local_path(out)
    outputs = Outputs(*filter(None, [path]))

    def said() -> str:
        folder = None if path is None else partial_path(path).joinpath(*place)
        if folder is None or outputs.finished():
            return outputs.kept()
        found = [entry for entry in folder.iterdir() if entry.name != REQUEST_NAME] if folder.is_dir() else []
        if not found:
            return "nothing was finished, and nothing is kept"
        return f"{kept} kept beside {out}, and the same command goes on there"

    return said


def taken_workers(options: dict[str, Any], *, plan_only: bool) -> Any:
    """As `elsewhere.taken`, which is imported only where one of its options is given, or a plan is for a profile."""
    by_profile = plan_only and options["cluster"] != "local"
    if not by_profile and all(options[name] is None for name in ELSEWHERE):
        for name in ELSEWHERE:
            del options[name]
        return None
    from tilewright.workflows.batch.elsewhere import taken as taken_elsewhere

    return taken_elsewhere(options, plan_only=plan_only)


@contextmanager
def planning(named: Any, options: dict[str, Any]) -> Iterator[Any]:
    """A listener for a plan alone, and the workers that it is for, as `taken_workers` has them; None: the cluster's."""
    with listening(quiet=is_quiet()) as listener:
        if named is None:
            yield listener, None
            return
        with named.planning(options, listener) as workers:
            yield listener, workers


@click.group(name="tilewright", cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tilewright", prog_name="tilewright")
def cli() -> None:
    """Multiply Zarr matrices larger than a GPU, and count text corpora, on one GPU or on many."""


@cli.command(cls=JobCommand)
@click.argument("a")
@click.argument("b")
@click.argument("c")
@options(factor_options, align_option, range_options("rows of C", "columns of C"), epilogue_options)
@options(dtype_option, precision_option, cluster_options, device_option, memory_option)
@options(elsewhere_options, storage_options, outcome_options)
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
    from tilewright.workflows import matmul as workflow

    shared |= {"resume": not no_resume, "verify": not no_verify, "overwrite": overwrite}
    check_report(report, c, plan_only=plan_only, overwrite=overwrite)
    turned = {name: shared[name] for name in ("transpose_a", "transpose_b")}
    left, right = taken_of_product(a, b, rows, columns, **turned)
    named = taken_workers(shared, plan_only=plan_only)
    if plan_only:
        with planning(named, shared) as (listener, workers):
            request = workflow.request_of(
                a=left, b=right, out=c, listener=listener, hardware=workers, **shared
            )
            planned = job.plan_only(request)
        print_plan(planned, left, c, as_json=as_json, named=named, **shared)
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
    named = taken_workers(shared, plan_only=shared["plan_only"])
    if shared.pop("plan_only"):
        with planning(named, shared) as (listener, workers):
            planned = workflow.plan_only(name, arrays, listener=listener, hardware=workers, **shared)
        print_plan(planned, arrays[0], arrays[-1], as_json=as_json, named=named, **shared)
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
@options(elsewhere_options, storage_options, outcome_options)
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
@options(constant_option, gram_dtype_option, precision_option, cluster_options, device_option, memory_option)
@options(elsewhere_options, storage_options, outcome_options)
def cov(arrays: tuple[str, ...], as_json: bool, **shared: Any) -> None:
    """Store the covariances of the columns of X, or of those of X with those of Y."""
    _run_gram("cov", arrays, as_json, **shared)


@cli.command(cls=JobCommand)
@click.argument("arrays", nargs=-1, metavar="X [Y] OUT")
@options(variables_options, constant_option, gram_dtype_option, precision_option, cluster_options)
@options(device_option, memory_option, elsewhere_options, storage_options, outcome_options)
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
@options(add_up_option, align_option)
@click.option("--no-center", is_flag=True, help="Subtract no means.")
@click.option("--scale", is_flag=True, help="Divide each variable by its standard deviation.")
@click.option(
    "--missing",
    metavar="CODE",
    callback=as_number,
    help="The number that stands for a missing one, such as -1, or nan; attributes: what _FillValue and missing_value"
    " name, and packed numbers are unpacked; or a stored mask. It counts as the mean.",
)
@click.option(
    "--weights",
    metavar="[AXIS=]ARRAY",
    callback=as_weights,
    help="A stored vector of one weight for each variable, such as its area, or an array of the variables' axes; or, as"
    " lat=ARRAY, for each place of one of these, and lat=cos for the cosines of latitudes in degrees, the coordinates"
    " beside X.",
)
@click.option(
    "--sample-weights",
    metavar="[AXIS=]ARRAY",
    callback=as_weights,
    help="A stored vector of one weight for each sample; or, as lat=ARRAY or lat=cos, for each place of an axis.",
)
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default="auto",
    show_default=True,
    help="krylov iterates; gram forms the covariance of the shorter side in one pass; auto: that up to 2048.",
)
@click.option("--no-verify", is_flag=True, help="Do not check the scores.")
@click.option("--no-resume", is_flag=True, help="Make every pass, also those that a stopped run has made.")
@options(constant_option, cluster_options, device_option, memory_option, elsewhere_options)
@options(report_option, overwrite_option, json_option)
def eofs(x: str, out: str, plan_only: bool, report: str | None, as_json: bool, **shared: Any) -> None:
    """Store the leading EOFs of X: the eigenvectors of its covariance matrix, with scores and explained variance.

    Neither that matrix nor the centred X is stored: X is streamed, twice for each step. OUT is a Zarr group that xarray
    opens.
    """
    from tilewright.workflows import eofs as workflow

    overwrite = shared["overwrite"]
    check_report(report, out, plan_only=plan_only, overwrite=overwrite, what="the group of EOFs")
    given = taken(x, shared.pop("rows"), shared.pop("columns"))
    for option in ("center", "verify", "resume"):
        shared[option] = not shared.pop(f"no_{option}")
    named = taken_workers(shared, plan_only=plan_only)
    if plan_only:
        with planning(named, shared) as (listener, workers):
            planned = workflow.plan_only(given, out, listener=listener, hardware=workers, **shared)
        print_plan(planned, given, out, as_json=as_json, named=named, **shared)
        return
    on_interrupt(_beside(out, ("thin", "passes"), "what whole passes have found is"))
    reporting = Reporting("eofs", [x], report, overwrite=overwrite)
    with listening(quiet=is_quiet()) as listener:
        run = workflow.eofs(given, out, listener=reporting.recording(listener), **shared)
    try:
        reporting.write(run)
    finally:
        print_result(run, as_json=as_json)


neighbour_options = options(
    click.option("--metric", type=click.Choice(METRICS), default="dot", show_default=True,
                 help="What a pair's value is: the sum of products, that divided by both lengths, or the distance."),
    click.option("--columns", is_flag=True, help="The items are the columns of A and B, not their rows."),
    align_option, precision_option, cluster_options, device_option, memory_option,
    elsewhere_options,
    click.option("--no-verify", is_flag=True, help="Do not compare a sample of the items with all of B anew."),
    click.option("--no-resume", is_flag=True, help="Search every block, also those that a stopped run has finished."),
    report_option, overwrite_option, json_option,
)  # fmt: skip


def _run_neighbours(
    name: str, inputs: tuple[str, ...], out: str | None, as_json: bool, **shared: Any
) -> None:
    """Run one of the functions of ``workflows.neighbours``."""
    if not 1 <= len(inputs) <= 2:
        counted = "; pairs that are only counted have no OUT.zarr" if name == "pairs" else ""
        raise click.UsageError(f"give A.zarr [B.zarr] OUT.zarr{counted}")
    from tilewright.workflows.neighbours import search

    given = inputs[0], inputs[1] if len(inputs) > 1 else None, out
    report, overwrite = shared.pop("report"), shared["overwrite"]
    check_report(report, out, plan_only=shared["plan_only"], overwrite=overwrite, what="what is found")
    shared["of"] = "columns" if shared.pop("columns") else "rows"
    for option in ("resume", "verify"):
        shared[option] = not shared.pop(f"no_{option}")
    named = taken_workers(shared, plan_only=shared["plan_only"])
    if shared.pop("plan_only"):
        with planning(named, shared) as (listener, workers):
            planned = search.plan_only(*given, listener=listener, hardware=workers, **shared)
        print_plan(planned, given[0], out, as_json=as_json, named=named, **shared)
        return
    if out is not None:
        on_interrupt(_beside(out, ("pieces",), "finished blocks are"))
    reporting = Reporting(name, inputs, report, overwrite=overwrite)
    with listening(quiet=is_quiet()) as listener:
        run = getattr(search, name)(*given, listener=reporting.recording(listener), **shared)
    try:
        reporting.write(run)
    finally:
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
@options(factor_options, align_option, dtype_option, precision_option, device_option, memory_option)
@click.option("--profile", "cluster", metavar="NAME",
              help="Plan for the workers of a profile: of kind slurm for those of its job, which is not submitted; of"
              " others for those that are found there. Default: this machine.")  # fmt: skip
@cluster_file_option
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many workers share the work, each with all the memory and cores of this machine, or a GPU like its"
    " first; without --profile.",
)
@click.option(
    "--host-memory",
    type=Size(),
    metavar="SIZE",
    help="Memory of a worker's process; default: this machine's.",
)
@options(named_options, storage_options, json_option)
def plan(a: str, b: str, as_json: bool, **shared: Any) -> None:
    """Print how A B would be computed: tiles, panels, memory, bytes read and the least that could be read."""
    from tilewright.workflows.batch.elsewhere import elsewhere
    from tilewright.workflows.matmul import plan_matmul
    from tilewright.workflows.profiles import tell_lost

    tell_lost(shared["cluster"], shared["cluster_file"])
    rate = shared.pop("rate")  # which says how long it takes, not how it is done
    place = shared["cluster"], shared["cluster_file"], shared["device"]
    count = shared["workers"] if shared["workers"] != 1 else None
    named = elsewhere(*place, count, shared["gpu"], rate)
    with listening(quiet=is_quiet()) as listener:
        planned = plan_matmul(a, b, listener=listener, **shared)
    print_plan(planned, a, None, as_json=as_json, named=named, **shared)


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
@click.argument("left", required=False, metavar="[A]")
@click.argument("right", required=False, metavar="[B]")
@click.option(
    "--a",
    metavar="A",
    help="Compare C with the product of this and B, not with its checksums.",
)
@click.option("--b", metavar="B", help="The right factor of what C is compared with.")
@options(factor_options, precision_option, cluster_options, json_option)
def audit(
    c: str, left: str | None, right: str | None, a: str | None, b: str | None, as_json: bool, **shared: Any
) -> None:
    """Name every stored chunk of a product that is not what was written. Exit status 1 where there is one.

    Of a group that topk or pairs stored, look at all for its form, and compare 64 items, drawn at random, with all of B
    anew. A and B are what it names, or what is given. Of EOFs, all that is stored is compared with its checksums.
    """
    from tilewright.workflows.audit import audit as look

    if (left and a) or (right and b):
        raise click.UsageError("A or B is given twice, behind C and by an option: give each once")
    with listening(quiet=is_quiet()) as listener:
        outcome = look(c, left or a, right or b, listener=listener, **shared)
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


for command in (histogram, duplicates, signals, merge):
    cli.add_command(command)


@cli.command(cls=JobCommand)
@click.argument("x")
@click.argument("y")
@click.option("--state", metavar="FILE", help="Keep finished pieces in this file, and go on from there.")
@click.option(
    "--no-resume", is_flag=True, help="Multiply every piece, also those that a stopped run has left."
)
@options(align_option, cluster_options, device_option, sum_dtype_option, json_option)
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
@options(cluster_file_option, json_option)
def profiles(cluster_file: str | None, as_json: bool) -> None:
    """List the profiles that --profile takes here, the file that each is of, and which files were read."""
    from tilewright.workflows.profiles import profiles as profiles_here

    print_result(profiles_here(cluster_file), as_json=as_json)


@cli.command()
@click.option("--into", metavar="FOLDER", help="Compile kernels into this folder.")
@click.option(
    "--capability",
    multiple=True,
    metavar="VERSION",
    help="With --into: for GPUs of this compute capability, such as 9.0, or of all usual ones; may be repeated.",
)
@click.option(
    "--job", multiple=True, metavar="NAME", help="With --into: of this usual job alone; may be repeated."
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    help="With --into: how many compile at once; default: as many as there are cores.",
)
@json_option
def kernels(
    into: str | None, capability: tuple[str, ...], job: tuple[str, ...], processes: int | None, as_json: bool
) -> None:
    """List the compiled GPU kernels that this installation has, or compile those of usual jobs.

    Compiling takes no GPU, but the extra cu12 or cu13. Where TILEWRIGHT_SHIPPED_KERNELS names the folder, kernels are
    taken from there, and only what is not among them is compiled when it is first used.
    """
    from tilewright.workflows.kernels.report import compile_kernels, compiled_kernels

    def tell(line: str) -> None:
        if not is_quiet():
            click.echo(line, err=True)

    if into is None and (capability or job or processes):
        raise click.UsageError(
            "--capability, --job and --processes say what is compiled; say into which folder by --into"
        )
    found = compiled_kernels() if into is None else compile_kernels(into, capability, job, processes, tell)
    print_result(found, as_json=as_json)


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
    put_off_collector()
    write_methods_later()
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
