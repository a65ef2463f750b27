"""Gram matrices, covariances and correlations of stored matrices."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack, overload

import numpy as np
import zarr

from tilewright.kernels.arguments import shown
from tilewright.kernels.choices import DeviceName, Divisor, PrecisionName
from tilewright.pipeline.cluster.profiles import Cluster
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.events import Listener, log_notices
from tilewright.pipeline.gram import job
from tilewright.pipeline.gram.added import added_up
from tilewright.pipeline.gram.options import (
    Axes,
    Centering,
    Constant,
    GivenMissing,
    GramRequest,
    MissingAs,
    Side,
    Values,
    Window,
)
from tilewright.pipeline.in_memory import array_of
from tilewright.pipeline.options import Durability, StorageOptions
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.product.execute import MatmulRun
from tilewright.pipeline.store.arrays import Input, Source
from tilewright.pipeline.store.labels.alignment import Align
from tilewright.pipeline.store.new.storage import Sides, as_storage
from tilewright.pipeline.store.sources.opening import InMemory
from tilewright.pipeline.store.sources.slices import Slice


class _Options(StorageOptions, total=False):
    of: Side
    missing: GivenMissing
    missing_as: MissingAs
    weights: Values | Mapping[str | int, Values] | None
    window: Window
    append: bool
    counts: Source | None
    sum_over: Axes
    add_up: Axes
    constant: Constant
    dtype: str | np.dtype | None


class CovOptions(_Options, total=False):
    """What `cov` takes by name."""

    divide: float | Divisor | None


class CorrOptions(_Options, total=False):
    """What `corr` takes by name."""


class GramOptions(CovOptions, total=False):
    """What `gram` takes by name."""

    center: Centering
    scale: Centering


@overload
def gram(x: Input, y: Source, out: None = None, **options: Unpack[GramOptions]) -> MatmulRun: ...


@overload
def gram(x: Input, y: Input | None = None, *, out: Source, **options: Unpack[GramOptions]) -> MatmulRun: ...


@overload
def gram(x: Input, y: Input | None, out: Source, **options: Unpack[GramOptions]) -> MatmulRun: ...


@overload
def gram(
    x: Input, y: InMemory | Slice | None = None, out: None = None, **options: Unpack[GramOptions]
) -> np.ndarray: ...


def gram(
    x: Input,
    y: Input | None = None,
    out: Source | None = None,
    *,
    of: Side = "columns",
    center: Centering = False,
    scale: Centering = False,
    missing: GivenMissing = None,
    missing_as: MissingAs = "mean",
    divide: float | Divisor | None = None,
    weights: Values | Mapping[str | int, Values] | None = None,
    window: Window = None,
    append: bool = False,
    counts: Source | None = None,
    sum_over: Axes = None,
    add_up: Axes = None,
    align: Align = "labels",
    constant: Constant = "error",
    dtype: str | np.dtype | None = None,
    precision: PrecisionName = "full",
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    device: DeviceName = "auto",
    device_memory: int | str | None = None,
    resume: bool = True,
    verify: bool = True,
    overwrite: bool = False,
    durability: Durability = "full",
    same_bits: bool = False,
    chunks: Sides | None = None,
    shards: Sides | None = None,
    codec: str | None = None,
    listener: Listener = log_notices,
) -> MatmulRun | np.ndarray:
    """Store the Gram matrix of X: the sums of products of every two of its columns, or rows.

    ``gram(x, out)`` is XᵀX, or with ``of="rows"`` X Xᵀ; ``gram(x, y, out)`` multiplies the columns, or rows, of two
    matrices. Of complex numbers the left factor is conjugated: each element is ``numpy.vdot`` of two columns. X is not
    stored again, whatever is made of its numbers, and of one matrix only the tiles on and below C's diagonal are
    computed.

    Parameters
    ----------
    x, y
        Two-dimensional arrays of numbers: paths, URLs or open arrays of zarr-python. Their columns (rows) are the
        variables of the result, their rows (columns) are summed over. Arrays of more dimensions with ``sum_over``.
    out
        Where C goes, as for ``tilewright.matmul``. With two arguments it is the second.
    of
        The variables: ``columns`` or ``rows``.
    center
        What is subtracted before anything else: True the mean of each variable; ``columns`` or ``rows`` the mean of
        each column, or row (a genomic relationship matrix centres columns and multiplies rows); ``both`` these two, and
        the mean of all numbers is added back. Or one number a column or a row: an array, a list, or the path of a
        stored vector; where X has as many columns as rows, ``{"columns": values}`` or ``{"rows": values}``.
    scale
        What is multiplied by afterwards: True divides each variable by its standard deviation, whose divisor is that of
        ``divide``; ``columns`` or ``rows`` each column, or row. Or factors, given as for ``center``.
    missing
        What stands for a missing number: a number as it is stored, or ``"nan"``; or ``"attributes"``, the numbers that
        X's ``_FillValue`` and ``missing_value`` name, and NaN, and X is unpacked by its ``scale_factor`` and
        ``add_offset``, to float64, as where xarray opens it. Beside a number, or a mask, what the first two
        name is missing too. Or a mask, an array of bool or the path of a stored one, which is True where
        a number is missing: of X's shape, or one that broadcasts to it along its last axes, or along those that its
        dimensions' names are of, such as a (lat, lon) mask of land. Of two matrices ``{"X": mask, "Y": mask}``. Beside
        a mask NaN is missing too; lines of which a mask leaves nothing count as 0, or with ``constant="nan"`` as NaN.
        Means and deviations are of numbers that are there.
    missing_as
        ``mean``: a missing number is taken for the mean that is subtracted, so it counts as 0 once it is centred, and
        without ``center`` as 0. ``pairwise``: each element is formed of the pairs of numbers that are both there, and
        n is how many they are; ``center=True`` and ``scale=True`` are about means and deviations over just these.
        Elements without pairs are NaN, and so are correlations with what is constant over its pairs, unless
        ``constant`` is ``zero``. Not for complex numbers and weights, nor, with ``center=True``, for factors of the
        side that is summed over.
    divide
        What the sums are divided by: a number; ``n``, the length of the side that is summed over; ``n-1``. With weights
        n is their sum W, and n - 1 is W - (sum of the squared weights) / W, as of ``numpy.cov(aweights=...)``.
        ``pairs``: each element by its own number of pairs that are both there, which with ``pairwise`` is n and what
        None stands for. ``2pq``: for dosages of alleles from 0 to 2, of which the means are subtracted: those are 2p,
        and the sum of 2p(1 - p) is the divisor of VanRaden's relationship matrix.
    weights
        One a row (column), of the side that is summed over, 0 or more: in memory, or the path of a stored vector. Each
        product is multiplied by its weight, and the variables' means and deviations are weighted. Or those along one or
        more of the axes that are summed over, by name or number, such as ``{"lat": cosines}``, which are multiplied;
        ``"cos"`` stands for these where the latitudes, in degrees, are the coordinates of that axis beside X. Of
        several axes also an array of their lengths, such as areas of latitudes × longitudes.
    window
        Only a band of C is computed and stored: the elements whose column is at most so many before or behind their
        row, as one number for both or ``(before, after)``; all else is 0. Tiles that do not touch the band are not
        computed, and chunks that do not are not stored, so C is as large as the band. Only a band that reaches as far
        before as behind is symmetric, and takes half the work.
    append
        Whether C is brought up to an X that grew since it was made, and nothing else is computed; C is made of all of X
        where there is none. New rows (columns) are added to it, of sums alone: ``center`` and ``scale`` may be numbers
        that are given, ``divide`` a number. With new variables C becomes wider: what it holds stays, and only tiles
        with new elements are computed, whatever the options but means or deviations of the side that is summed over.
        C's record says what is in it, and a run that finds all of X in it adds nothing.
    counts
        Where the number of pairs of each element of C is stored too, with ``missing_as="pairwise"`` or
        ``divide="pairs"``: a path or URL of a new array of int64 in C's shape and chunks, or an open array that has
        these. It is written, kept by a run that goes on, and checked along with C, and takes no more products.
    sum_over
        The axes that are summed over, one or a list, by the names of their dimensions or by number, in place of ``of``.
        X may then have any number of dimensions, such as (time, lat, lon) or (variants, samples, ploidy): the axes that
        are summed over and the others are flattened, each in X's order and the last one fastest, into the sides of a
        matrix, which is not stored. Its columns are the side that has X's last axis, its rows the other; ``center`` and
        ``scale`` name them so. C's sides have names such as ``lat_lon``, and its attribute ``flattened`` says what they
        are made of. Y's axes have the same names or numbers.
    add_up
        Axes whose elements are added up first, one or a list, such as the two alleles of a dosage along ``ploidy``; X
        is what is left, in a type that holds all sums, in memory that the host's workers share. A sum with a part that
        is ``missing``, a number or ``"nan"``, is missing. Without it products are of single elements.
    align
        What pairs the elements of X and Y along what is summed over, those of X and a mask, and a place of an axis and
        its weight. ``labels``: they are paired by where they lie, and have to have the same coordinates there, where
        both have any; other ones are refused. ``position``: by where they lie, whatever their coordinates say.
    constant
        What happens where a variable without variance is to be divided by its deviation, or one without any number has
        a mean to be subtracted: ``error``; ``zero``, by which it counts as 0; or ``nan``, by which its row and its
        column of C are NaN, also where a mask leaves nothing of it and where nothing is subtracted.
    dtype
        C's dtype, a float or a complex one unless nothing is made of the numbers. Without it: float64 for integers,
        but where numbers of at most 16 bits are missing or weighted float32; the dtype of X for floats and complex
        numbers, float32 for float16. Numbers are cast to it before anything is subtracted.
    precision, cluster, cluster_file, device, device_memory, listener
        As for ``tilewright.matmul``.
    resume, verify, overwrite, durability, same_bits, chunks, shards, codec
        As for ``tilewright.matmul``. A run that goes on finds means and deviations once more.

    Notes
    -----
    Integers without missing numbers and weights are multiplied as integers, exactly, and their sums are centred and
    scaled in float64, as long as the sums are below 2^53 and centring leaves enough of their digits. All else is
    centred in C's dtype, by means in float64, before it is multiplied: so a mean that is large beside the deviations
    costs no digits.

    Raises
    ------
    TilewrightError
        As ``tilewright.matmul``, and before the first tile: OptionError for constant variables that are scaled, for
        lines without any number where a mean is needed, for means so large beside deviations that squares of these
        might be wrong by more than 0.1 %, and for coordinates of X and Y that differ; ShapeError for weights, factors
        or means of a wrong length.

    Examples
    --------
    >>> import numpy as np
    >>> import tilewright as tw
    >>> x = np.array([[1, 2], [3, 4], [5, 7]])
    >>> tw.gram(x)
    array([[35, 49],
           [49, 69]])
    >>> tw.gram(x, of="rows", center="columns").round(2)
    array([[ 9.44,  0.78, -10.22],
           [ 0.78,  0.11,  -0.89],
           [-10.22, -0.89,  11.11]])

    What the maps of a field (times × places) have in common, each place counted by its area::

        tw.gram("sst.zarr", "times.zarr", of="rows", center="columns", weights=np.cos(latitude), divide=times - 1)

    The same of (time, lat, lon)::

        tw.gram("sst.zarr", "times.zarr", sum_over=["lat", "lon"], center="columns", weights={"lat": np.cos(latitude)})

    VanRaden's genomic relationship matrix of samples × variants, with dosages of 0, 1 and 2 and -1 where there is
    none, and the same of (variants, samples, ploidy)::

        tw.gram("dosages.zarr", "grm.zarr", of="rows", center="columns", missing=-1, divide="2pq")
        tw.gram("calls.zarr", "grm.zarr", add_up="ploidy", center="rows", missing=-1, divide="2pq")
    """
    return _run(**locals())


@overload
def cov(x: Input, y: Source, out: None = None, **options: Unpack[CovOptions]) -> MatmulRun: ...


@overload
def cov(x: Input, y: Input | None = None, *, out: Source, **options: Unpack[CovOptions]) -> MatmulRun: ...


@overload
def cov(x: Input, y: Input | None, out: Source, **options: Unpack[CovOptions]) -> MatmulRun: ...


@overload
def cov(
    x: Input, y: InMemory | Slice | None = None, out: None = None, **options: Unpack[CovOptions]
) -> np.ndarray: ...


def cov(
    x: Input,
    y: Input | None = None,
    out: Source | None = None,
    *,
    of: Side = "columns",
    missing: GivenMissing = None,
    missing_as: MissingAs = "mean",
    divide: float | Divisor | None = "n-1",
    weights: Values | Mapping[str | int, Values] | None = None,
    window: Window = None,
    append: bool = False,
    counts: Source | None = None,
    sum_over: Axes = None,
    add_up: Axes = None,
    align: Align = "labels",
    constant: Constant = "error",
    dtype: str | np.dtype | None = None,
    precision: PrecisionName = "full",
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    device: DeviceName = "auto",
    device_memory: int | str | None = None,
    resume: bool = True,
    verify: bool = True,
    overwrite: bool = False,
    durability: Durability = "full",
    same_bits: bool = False,
    chunks: Sides | None = None,
    shards: Sides | None = None,
    codec: str | None = None,
    listener: Listener = log_notices,
) -> MatmulRun | np.ndarray:
    """Store the covariances of the columns of X, or of its rows: `gram` with ``center=True`` and ``divide="n-1"``.

    ``cov(x, out)`` equals ``numpy.cov(x, rowvar=False)``, with ``of="rows"`` ``numpy.cov(x)``, and with ``weights``
    ``numpy.cov(..., aweights=weights)``. ``cov(x, y, out)`` has the covariances of each column of X with each of Y
    alone, which is the upper right block of NumPy's. As there, of complex numbers the right factor is conjugated, so
    that the result is the conjugate of `gram`'s. With ``missing`` it equals ``numpy.cov`` of an array that has means in
    place of what is missing, and with ``missing_as="pairwise"`` pandas' ``DataFrame.cov()``.

    All arguments are as for `gram`.

    Raises
    ------
    TilewrightError
        As `gram`.

    Examples
    --------
    >>> import numpy as np
    >>> import tilewright as tw
    >>> x = np.array([[1.0, 2.0], [2.0, 1.0], [3.0, 6.0]])
    >>> np.allclose(tw.cov(x), np.cov(x, rowvar=False))
    True
    """
    return _run(**ASKED["cov"], **locals())


@overload
def corr(x: Input, y: Source, out: None = None, **options: Unpack[CorrOptions]) -> MatmulRun: ...


@overload
def corr(x: Input, y: Input | None = None, *, out: Source, **options: Unpack[CorrOptions]) -> MatmulRun: ...


@overload
def corr(x: Input, y: Input | None, out: Source, **options: Unpack[CorrOptions]) -> MatmulRun: ...


@overload
def corr(
    x: Input, y: InMemory | Slice | None = None, out: None = None, **options: Unpack[CorrOptions]
) -> np.ndarray: ...


def corr(
    x: Input,
    y: Input | None = None,
    out: Source | None = None,
    *,
    of: Side = "columns",
    missing: GivenMissing = None,
    missing_as: MissingAs = "mean",
    weights: Values | Mapping[str | int, Values] | None = None,
    window: Window = None,
    append: bool = False,
    counts: Source | None = None,
    sum_over: Axes = None,
    add_up: Axes = None,
    align: Align = "labels",
    constant: Constant = "error",
    dtype: str | np.dtype | None = None,
    precision: PrecisionName = "full",
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    device: DeviceName = "auto",
    device_memory: int | str | None = None,
    resume: bool = True,
    verify: bool = True,
    overwrite: bool = False,
    durability: Durability = "full",
    same_bits: bool = False,
    chunks: Sides | None = None,
    shards: Sides | None = None,
    codec: str | None = None,
    listener: Listener = log_notices,
) -> MatmulRun | np.ndarray:
    """Store the correlations of the columns of X, or of its rows: `cov` with ``scale=True``.

    ``corr(x, out)`` equals ``numpy.corrcoef(x, rowvar=False)``, and with ``of="rows"`` ``numpy.corrcoef(x)``;
    ``corr(x, y, out)`` is the upper right block of NumPy's. Constant columns have no correlation: they are refused, or
    with ``constant="zero"`` have 0 with all others and themselves, with ``constant="nan"`` NaN. With
    ``missing_as="pairwise"`` it equals pandas' ``DataFrame.corr()``.

    All arguments are as for `gram`.

    Raises
    ------
    TilewrightError
        As `gram`.

    Examples
    --------
    >>> import numpy as np
    >>> import tilewright as tw
    >>> x = np.array([[1.0, 2.0], [2.0, 1.0], [3.0, 6.0]])
    >>> tw.corr(x).round(3)
    array([[1.   , 0.756],
           [0.756, 1.   ]])
    """
    return _run(**ASKED["corr"], **locals())


ASKED: dict[str, dict[str, Any]] = {
    "gram": {},
    "cov": {"conjugated": "right", "center": True},
    "corr": {
        "conjugated": "right",
        "center": True,
        "scale": True,
        "divide": "n-1",
        "divisor_is_asked": False,
    },
}
"""What each command asks of a Gram matrix."""


def plan_only(name: str, arrays: Sequence[Any], **options: Any) -> MatmulPlan:
    """The plan that a command of `ASKED` would follow for these matrices and this output; nothing is written. options:
    as its function has them. Raises as that."""
    x, *between, out = arrays
    y = between[0] if between else None
    return job.plan_only(_request(x, out, y, options | ASKED[name]))


def _request(x: Input, out: Source | None, y: Input | None, options: dict[str, Any]) -> GramRequest:
    stored = {name: options.pop(name) for name in ("chunks", "shards", "codec") if name in options}
    add_up, missing = options.pop("add_up", None), options.get("missing")
    if add_up is not None:
        options["missing_given"] = missing
        asked = add_up, missing
        roles, align = ("X",) if y is None else ("X", "Y"), options.get("align", "labels")
        x, options["missing"] = added_up(x, *asked, "X", roles, align)
        if y is not None:
            y, of_y = added_up(y, *asked, "Y", roles, align)
            if of_y != options["missing"]:
                raise OptionError(
                    f"add_up={shown(add_up)}: what is missing would be {options['missing']} in X and {of_y} in Y, whose"
                    " dtypes differ; give both in one"
                )
    return GramRequest(x, out, y, storage=as_storage(**stored), **options)


def _run(x: Input, y: Input | None, out: Source | None, **options: Any) -> MatmulRun | np.ndarray:
    """Of two arrays the second is the output, if it can be one."""
    other: Input | None = y
    if out is None and isinstance(y, str | os.PathLike | zarr.Array):
        other, out = None, y
    request = _request(x, out, other, options)
    if out is not None:
        return job.gram(request)
    if options["append"]:
        raise OptionError(
            "append=True without out: there is nothing to add to; give out, where the result is stored"
        )
    shape, dtype = job.result_of(request)
    return array_of(shape, dtype, lambda path: job.gram(replace(request, out=path)), "the result")
