"""Options that several commands have, as decorators in groups, and each option's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from tilewright.kernels.choices import DEVICES, GPUS, PRECISIONS
from tilewright.workflows.commands.reporting import report_option
from tilewright.workflows.console import (
    SIDES,
    Number,
    Rate,
    Size,
    as_axes,
    as_number,
    as_weights,
    as_window,
    range_options,
)

DURABILITIES = ("full", "none")
MISSING_AS = ("mean", "pairwise")
CONSTANTS = ("error", "zero", "nan")
ALIGNS = ("labels", "position")


def as_stored(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """What follows --chunks, --shards or --codec, found good."""
    if value is None or parameter.name is None:
        return None
    from tilewright.pipeline.errors import OptionError
    from tilewright.pipeline.store.new.storage import as_storage

    try:
        as_storage(**{parameter.name: value})
    except OptionError as error:
        raise click.BadParameter(str(error), ctx, parameter) from None
    return value


Function = TypeVar("Function", bound=Callable[..., Any])


def options(*decorators: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Several option decorators as one, in reading order."""

    def decorate(function: Function) -> Function:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


cluster_file_option = click.option(
    "--cluster-file",
    metavar="FILE",
    help="The only file of profiles beside the built-in ones; default: all that tilewright profiles lists.",
)
cluster_options = options(
    click.option("--profile", "cluster", default="local", show_default=True, metavar="NAME",
                 help="Where to run: a profile (local, cpu, cuda, existing, slurm), or a scheduler's address."),
    cluster_file_option,
)  # fmt: skip
device_option = click.option("--device", type=click.Choice(DEVICES), default="auto", show_default=True,
                             help="auto takes a GPU where there is one.")  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
factor_options = options(
    click.option("--transpose-a", is_flag=True, help="Multiply by the transpose of A."),
    click.option("--transpose-b", is_flag=True, help="Multiply by the transpose of B."),
)
precision_option = click.option("--precision", type=click.Choice(PRECISIONS), default="full",
                                show_default=True, help="split keeps the accuracy of float32, float64 and complex"
                                " numbers on tensor cores; tf32, bf16 and fp16 trade float32's for speed.")  # fmt: skip
dtype_option = click.option(
    "--dtype",
    help="dtype of C, wider or narrower; A and B are cast to it. Without it, integers get the smallest of int32,"
    " uint32, int64 and uint64 in which no sum can wrap, and where none is large enough NumPy's widened to 64 bits; all"
    " else gets numpy.matmul's. Unsigned integers may become any type, signed ones any but unsigned, floats any floats"
    " or complex numbers, complex numbers complex ones.",
)
sum_dtype_option = click.option(
    "--dtype",
    help="dtype of the sum, wider or narrower. Unsigned integers may become any type, signed ones any but unsigned,"
    " floats any floats or complex numbers, complex numbers complex ones.",
)
memory_option = click.option("--device-memory", type=Size(), metavar="SIZE",
                             help="What tiles and panels may take on each worker, such as 8GiB.")  # fmt: skip
durability_option = click.option("--durability", type=click.Choice(DURABILITIES), default="full", show_default=True,
                                 help="Whether C is forced to disk, so that a power cut leaves it whole.")  # fmt: skip
epilogue_options = options(
    click.option("--alpha", type=Number(), default="1", show_default=True, metavar="X",
                 help="Multiply A B by this."),
    click.option("--beta", type=Number(), default="0", show_default=True, metavar="X",
                 help="Multiply what C holds by this and add it; C is replaced once the sum is whole."),
    click.option("--row-scale", metavar="PATH", help="Multiply each row by its number in this Zarr array."),
    click.option("--column-scale", metavar="PATH", help="Multiply each column by its number in this Zarr array."),
    click.option("--row-offset", metavar="PATH", help="Add its number in this Zarr array to each row."),
    click.option("--column-offset", metavar="PATH", help="Add its number in this Zarr array to each column."),
)  # fmt: skip
plan_only_option = click.option(
    "--plan-only",
    is_flag=True,
    help="Print the plan that would be followed, what would be kept or refused, and what would be warned of;"
    " write nothing, and submit no job.",
)
named_options = options(
    click.option("--gpu", type=click.Choice(GPUS), help="Plan for workers with such a GPU each, which need not be here:"
                 " its memory, and its time by the vendor's published rates; with --profile of kind slurm, for those of"
                 " its job, which is not submitted."),
    click.option("--rate", type=Rate(), metavar="RATE", help="Plan with so many operations a second of each worker,"
                 " such as 50T."),
)  # fmt: skip
ELSEWHERE = ("workers", "gpu", "rate")
"""What a plan alone may be for, by `elsewhere_options`."""
elsewhere_options = options(
    plan_only_option,
    click.option("--workers", type=click.IntRange(min=1), help="With --plan-only: for so many workers, in"
                 " place of those of a profile, which is left out then."),
    named_options,
)  # fmt: skip
storage_options = options(
    click.option("--chunks", metavar="ROWSxCOLUMNS", callback=as_stored,
                 help="Sides of the output's chunks, such as 1024x1024, or one number for both; default: what suits the"
                 " inputs."),
    click.option("--shards", metavar="ROWSxCOLUMNS", callback=as_stored,
                 help="Sides of the shards that hold several chunks in a file or object, multiples of the chunks';"
                 " default: none. In a group of Zarr 2 there are none."),
    click.option("--codec", metavar="NAME[:LEVEL]", callback=as_stored,
                 help="What chunks are compressed by: none, zstd, lz4, gzip, or blosc- and one of zstd, lz4, lz4hc,"
                 " zlib, blosclz; most with a level, such as zstd:3. Default: Zarr's own where the first input is"
                 " compressed, else none."),
)  # fmt: skip
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace an output that exists.")
outcome_options = options(
    click.option("--no-verify", is_flag=True, help="Do not check the product."),
    click.option(
        "--no-resume", is_flag=True, help="Compute every tile, also those that a stopped run has left."
    ),
    durability_option,
    click.option(
        "--same-bits",
        is_flag=True,
        help="Do not go on with tiles that a stopped run has rounded otherwise, with other memory or on another kind of"
        " device.",
    ),
    report_option,
    overwrite_option,
    json_option,
)

align_option = click.option("--align", type=click.Choice(ALIGNS), default="labels", show_default=True,
                            help="What pairs elements that are multiplied: where they lie, and labels that have to be"
                            " the same where both sides have coordinates; or their position alone.")  # fmt: skip
add_up_option = click.option(
    "--add-up",
    metavar="AXES",
    callback=as_axes,
    help="Axes whose elements are added up first, by their dimensions' names or by numbers, with commas between them:"
    " --add-up ploidy makes dosages of alleles. A sum of which a part is --missing is missing.",
)
variables_options = options(
    range_options("rows of X", "columns of X"),
    click.option("--of", type=click.Choice(SIDES), default="columns", show_default=True,
                 help="What the variables of the result are; the other side is summed over."),
    click.option("--sum-over", metavar="AXES", callback=as_axes,
                 help="The axes that are summed over, by their dimensions' names or by numbers, with commas between"
                 " them, in place of --of. Of arrays of more than two dimensions they have to be said."),
    add_up_option,
    align_option,
    click.option("--missing", metavar="CODE", callback=as_number,
                 help="The number that stands for a missing one, such as -1, or nan; attributes: what _FillValue and"
                 " missing_value name, and packed numbers are unpacked; or a stored mask of bool."),
    click.option("--missing-as", type=click.Choice(MISSING_AS), default="mean", show_default=True,
                 help="What a missing number counts as; pairwise: nothing, elements are those over their pairs."),
    click.option("--weights", metavar="[AXIS=]ARRAY", callback=as_weights,
                 help="A stored vector of weights, one for each line of the side that is summed over, or an array of"
                 " the axes that are; or, as lat=ARRAY, for each place of one of these, and lat=cos for the cosines of"
                 " latitudes in degrees, the coordinates beside X."),
    click.option("--append", is_flag=True,
                 help="Add to OUT what came to X since it was made, rows to sums or new variables, and nothing twice."),
    click.option("--counts", metavar="ARRAY",
                 help="Where the numbers of pairs are stored too, as int64, with --missing-as pairwise, or --divide"
                 " pairs."),
    click.option("--window", metavar="W[,W]", callback=as_window,
                 help="Only the elements up to so many columns from the diagonal, or so many before and behind it."),
)  # fmt: skip
constant_option = click.option("--constant", type=click.Choice(CONSTANTS), default="error", show_default=True,
                               help="What becomes of constant columns, or rows, that are scaled, and of"
                               " those without any number, such as places on land; zero: they count as 0; nan: what"
                               " is formed of them is NaN.")  # fmt: skip
divide_help = (
    "What the sums are divided by: a number, n, n-1, or pairs, each its own number of those there; 2pq: the sum of"
    " 2p(1 - p), by dosages whose means, 2p, are subtracted."
)
gram_dtype_option = click.option(
    "--dtype",
    help="dtype of the result. Without it, floats and complex numbers keep theirs, and integers get float64, or float32"
    " where numbers of at most 16 bits are missing or weighted.",
)

search_options = options(
    click.option("-k", type=int, default=10, show_default=True, help="How many, from the largest down."),
    click.option("--tol", type=float, default=1e-4, show_default=True,
                 help="The most that a residual may be beside its eigenvalue."),
    click.option("--passes", type=int, default=100, show_default=True, help="The most passes over the matrix."),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True,
                 help="Of the random block that is begun with."),
    click.option("--dtype", help="What the matrix is multiplied in: float32, float64, complex64 or complex128."),
    precision_option,
    click.option("--scratch", metavar="FOLDER", help="A folder that all workers see, for thin matrices."),
)  # fmt: skip
