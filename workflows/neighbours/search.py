"""The nearest neighbours of the rows of stored matrices, and their pairs beyond a threshold."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from tilewright.kernels.choices import DeviceName, PrecisionName
from tilewright.kernels.neighbours.order import MetricName, Neighbours, Pairs
from tilewright.pipeline.cluster.profiles import Cluster
from tilewright.pipeline.events import Listener, log_notices
from tilewright.pipeline.gram.options import Side
from tilewright.pipeline.neighbours import job
from tilewright.pipeline.neighbours.in_memory import neighbours_of, pairs_of
from tilewright.pipeline.neighbours.options import NeighbourRequest
from tilewright.pipeline.neighbours.plan import NeighbourPlan
from tilewright.pipeline.neighbours.results import PairsRun, TopkRun
from tilewright.pipeline.options import RunOptions
from tilewright.pipeline.store.arrays import Input, Source
from tilewright.pipeline.store.labels.alignment import Align


class NeighbourOptions(RunOptions, total=False):
    """What `topk` and `pairs` take by name alone; they say what each is."""

    metric: MetricName
    of: Side


class TopkOptions(NeighbourOptions, total=False):
    """Those of `topk`."""

    exclude_self: bool


class PairsOptions(NeighbourOptions, total=False):
    """Those of `pairs`, but for ``count_only``."""

    above: float | None
    below: float | None


@overload
def topk(
    a: Input, b: Input | None = None, *, out: Source, k: int = 10, **options: Unpack[TopkOptions]
) -> TopkRun: ...


@overload
def topk(a: Input, b: Input | None, out: Source, k: int = 10, **options: Unpack[TopkOptions]) -> TopkRun: ...


@overload
def topk(
    a: Input, b: Input | None = None, out: None = None, k: int = 10, **options: Unpack[TopkOptions]
) -> Neighbours: ...


def topk(
    a: Input,
    b: Input | None = None,
    out: Source | None = None,
    k: int = 10,
    *,
    metric: MetricName = "dot",
    of: Side = "rows",
    align: Align = "labels",
    exclude_self: bool = False,
    precision: PrecisionName = "full",
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    device: DeviceName = "auto",
    device_memory: int | str | None = None,
    resume: bool = True,
    verify: bool = True,
    overwrite: bool = False,
    listener: Listener = log_notices,
) -> TopkRun | Neighbours:
    """Find the k nearest rows of B of each row of A, exactly; the matrix of all products is never stored.

    Each task takes a block of rows of A and goes through B. What it finds is kept, block by block: a run that was
    stopped goes on there. The answer depends neither on blocks nor on workers or memory: sums are formed in one order,
    and of equally near rows that with the smaller index comes first.

    Parameters
    ----------
    a, b
        Two-dimensional arrays, m × d and n × d, of bool, integers or real floats: whatever ``tilewright.matmul`` takes.
        Without ``b``, A is compared with itself.
    out
        A new Zarr group in a local folder: ``indices`` (int64, m × k), rows of B, and ``values`` (m × k). Without it,
        both come back as arrays of NumPy. xarray opens it; the rows have A's name and coordinates where A has these.
    k
        How many neighbours each row gets, up to the rows of B.
    metric
        ``dot``: the largest sums of products are the nearest. ``cosine``: the same, divided by the lengths of both; a
        row of zeros has the cosine 0. ``l2``: the smallest Euclidean distances.
    of
        ``rows``, or ``columns`` where the items are the columns of A and B.
    align
        What pairs the elements of two items. ``labels``: where they lie, and where A and B both have coordinates along
        d these have to be the same; other ones are refused. ``position``: where they lie alone.
    exclude_self
        Whether, where B is A, row i is no neighbour of itself.
    precision, cluster, cluster_file, device, device_memory, listener
        As for ``tilewright.matmul``.
    resume
        Whether the blocks that a stopped run has finished are kept: of one with the same arrays and the same options
        but for where it runs.
    verify
        Whether 64 rows, drawn at random, are compared with all of B once more, in double precision, before the result
        gets its name.
    overwrite
        Whether neighbours that stand at ``out`` are replaced.

    Floats of at most 32 bits are summed, and values are stored, in float32; float64 in float64. Sums of integers are
    exact: their dot products are int64, their cosines and distances float64. A pair whose value is NaN is no neighbour:
    a row with NaN has none, and its indices are -1 and its values NaN. Distances are found from a·a + b·b - 2 a·b, so
    that those of rows that nearly agree are accurate to the root of the dtype's precision, times their length.

    Returns
    -------
    TopkRun, or Neighbours (a tuple of ``indices`` and ``values``) without ``out``.

    Raises
    ------
    TilewrightError
        One of its subclasses, all but the last before anything is written: StoreError, ShapeError and DTypeError for
        matrices that cannot be read, differ in width or hold complex numbers; OptionError for ``k`` above the rows of
        B, an unknown metric, or integers whose sums may exceed 64 bits; OutputExistsError and OutputError for ``out``,
        also where the disk has no room; PlanError where memory does not do; VerificationError.

    Examples
    --------
    The ten documents that are most like each, by their embeddings::

        tw.topk("embeddings.zarr", out="near.zarr", k=10, metric="cosine", exclude_self=True)
        xarray.open_zarr("near.zarr").indices

    Without ``out``, arrays:

    >>> import numpy as np
    >>> import tilewright as tw
    >>> points = np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
    >>> tw.topk(points, k=1, metric="l2", exclude_self=True).indices
    array([[2],
           [2],
           [0]])
    """
    request = NeighbourRequest(**locals())
    return neighbours_of(request) if out is None else job.topk(request)


@overload
def pairs(
    a: Input,
    b: Input | None = None,
    *,
    out: Source,
    count_only: bool = False,
    **options: Unpack[PairsOptions],
) -> PairsRun: ...


@overload
def pairs(
    a: Input,
    b: Input | None,
    out: Source,
    *,
    count_only: bool = False,
    **options: Unpack[PairsOptions],
) -> PairsRun: ...


@overload
def pairs(
    a: Input,
    b: Input | None = None,
    out: None = None,
    *,
    count_only: Literal[True],
    **options: Unpack[PairsOptions],
) -> PairsRun: ...


@overload
def pairs(
    a: Input,
    b: Input | None = None,
    out: None = None,
    *,
    count_only: Literal[False] = False,
    **options: Unpack[PairsOptions],
) -> Pairs: ...


def pairs(
    a: Input,
    b: Input | None = None,
    out: Source | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
    metric: MetricName = "dot",
    of: Side = "rows",
    align: Align = "labels",
    count_only: bool = False,
    precision: PrecisionName = "full",
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    device: DeviceName = "auto",
    device_memory: int | str | None = None,
    resume: bool = True,
    verify: bool = True,
    overwrite: bool = False,
    listener: Listener = log_notices,
) -> PairsRun | Pairs:
    """Find all pairs of a row of A and a row of B whose value is on one side of a threshold, exactly.

    Where B is A, each pair comes once, with the smaller row first, and no row with itself; half of the products are
    computed. There may be any number of pairs: a sample of both matrices says how many to expect, and where the disk
    has no room for them the search is refused.

    Parameters
    ----------
    a, b, metric, of, align, precision, cluster, cluster_file, device, device_memory, resume, overwrite, listener
        As for `topk`.
    out
        A new Zarr group in a local folder, of one entry a pair, in the order of rows, then of columns: ``row`` and
        ``column`` (int64) and ``value``. Without it, they come back as arrays of NumPy.
    above, below
        Pairs whose value is at least ``above``, or at most ``below``: one of both.
    count_only
        Whether pairs are only counted; nothing is stored, nor checked.
    verify
        As for `topk`: the pairs of 64 rows.

    Returns
    -------
    PairsRun, with their ``count``; or Pairs (a tuple of ``row``, ``column`` and ``value``) without ``out``, unless they
    are only counted.

    Raises
    ------
    TilewrightError
        As `topk`; OptionError also for no threshold, two, NaN, or one that no value of the metric can reach, or every
        one does; OutputError where the disk, or memory, has no room
        for the pairs that are to be expected.

    Examples
    --------
    Embeddings that are nearly the same::

        tw.pairs("embeddings.zarr", out="same.zarr", above=0.98, metric="cosine")

    Without ``out``, arrays:

    >>> import numpy as np
    >>> import tilewright as tw
    >>> points = np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
    >>> found = tw.pairs(points, below=2, metric="l2")
    >>> found.row, found.column, found.value
    (array([0]), array([2]), array([1.]))
    """
    request = NeighbourRequest(**locals())
    return pairs_of(request) if out is None and not count_only else job.pairs(request)


def plan_only(a: Input, b: Input | None, out: Source | None, **options: Any) -> NeighbourPlan:
    """How `topk`, with ``k`` among the options, or `pairs` would go about it. Raises as these."""
    return job.plan_only(NeighbourRequest(a, b, out, **options))
