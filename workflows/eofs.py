"""The leading eigenpairs and EOFs of stored matrices."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Unpack, overload

import numpy as np

from tilewright.kernels.choices import DeviceName, PrecisionName
from tilewright.pipeline.cluster.profiles import Cluster
from tilewright.pipeline.events import Listener, log_notices
from tilewright.pipeline.gram.added import added_up
from tilewright.pipeline.gram.options import Axes, Constant, GivenMissing, Side, Values
from tilewright.pipeline.options import RunOptions
from tilewright.pipeline.spectral import job
from tilewright.pipeline.spectral.options import EofRequest, Method, Search
from tilewright.pipeline.spectral.results import Eigenpairs, EofPlan, EofRun, Eofs
from tilewright.pipeline.store.arrays import Input, Source
from tilewright.pipeline.store.labels.alignment import Align


def eigh(
    g: Input,
    k: int = 10,
    *,
    tol: float = 1e-4,
    passes: int = 100,
    seed: int = 0,
    dtype: str | np.dtype | None = None,
    precision: PrecisionName = "full",
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    device: DeviceName = "auto",
    device_memory: int | str | None = None,
    scratch: str | os.PathLike[str] | None = None,
    listener: Listener = log_notices,
) -> Eigenpairs:
    """The k largest eigenvalues of a stored symmetric, or Hermitian, matrix, and their eigenvectors.

    G is streamed, once for each pass, and multiplied by a block of 2k columns, or k + 10 if that is more. What the
    passes find is kept in this process: at most 16 such blocks, or less where that would exceed 2 GiB.

    Parameters
    ----------
    g
        A square two-dimensional array: a path, a URL or an open ``zarr.Array``.
    k
        How many pairs, from the largest eigenvalue down: of an indefinite matrix the largest, and not those of the
        largest absolute value.
    tol
        A pair is found where ‖G v - λ v‖ is at most this times abs(λ), or within what rounding in ``dtype`` makes of
        G's largest eigenvalue. So abs(λ) is wrong by at most that share, and usually by about its square.
    passes
        The most that are made over G.
    seed
        Of the random block that is begun with. On one kind of device the same seed gives the same result.
    dtype
        What G is multiplied in: float32, float64, complex64 or complex128. Without it, floats and complex numbers are
        multiplied as they are, float16 and integers of at most 16 bits as float32, other integers as float64.
    precision, cluster, cluster_file, device, device_memory, listener
        As for ``tilewright.matmul``.
    scratch
        A folder that all workers see, for thin matrices, which are removed at the end. Without it, the system's folder
        of temporary files: with workers on other hosts, name one.

    Returns
    -------
    Eigenpairs
        ``values`` (k, descending), ``vectors`` (n × k, orthonormal, each with its largest component positive),
        ``residuals``, ``passes``.

    Raises
    ------
    TilewrightError
        As ``tilewright.matmul``; ShapeError where G is not square; OptionError where k exceeds its side, products show
        that it is not symmetric, or it holds NaN; ConvergenceError where ``passes`` do not do, which says how near they
        came.

    Examples
    --------
    The ten directions in which samples differ most, from their genomic relationship matrix::

        tw.eigh("grm.zarr", k=10).vectors

    >>> import numpy as np
    >>> import tilewright as tw
    >>> tw.eigh(np.diag([3.0, 1.0, 2.0]), k=2).values.round(6)
    array([3., 2.])
    """
    given = dict(locals())
    return job.eigh(given.pop("g"), Search(**given))


class EofOptions(RunOptions, total=False):
    """What `eofs` takes by name."""

    of: Side
    sum_over: Axes
    add_up: Axes
    center: bool
    scale: bool
    constant: Constant
    missing: GivenMissing
    weights: Values | Mapping[str | int, Values] | None
    sample_weights: Values | None
    tol: float
    passes: int
    method: Method
    seed: int
    dtype: str | np.dtype | None
    scratch: str | os.PathLike[str] | None


@overload
def eofs(x: Input, out: Source, k: int = 10, **options: Unpack[EofOptions]) -> EofRun: ...


@overload
def eofs(x: Input, out: None = None, k: int = 10, **options: Unpack[EofOptions]) -> Eofs: ...


def eofs(
    x: Input,
    out: Source | None = None,
    k: int = 10,
    *,
    of: Side = "columns",
    sum_over: Axes = None,
    add_up: Axes = None,
    align: Align = "labels",
    center: bool = True,
    scale: bool = False,
    constant: Constant = "error",
    missing: GivenMissing = None,
    weights: Values | Mapping[str | int, Values] | None = None,
    sample_weights: Values | None = None,
    tol: float = 1e-4,
    passes: int = 100,
    method: Method = "auto",
    seed: int = 0,
    dtype: str | np.dtype | None = None,
    precision: PrecisionName = "full",
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    device: DeviceName = "auto",
    device_memory: int | str | None = None,
    scratch: str | os.PathLike[str] | None = None,
    resume: bool = True,
    verify: bool = True,
    overwrite: bool = False,
    listener: Listener = log_notices,
) -> EofRun | Eofs:
    """Store the k leading EOFs of X, the eigenvectors of its covariance matrix, with scores and explained variance.

    The centred X is never stored, nor, where its shorter side is above 2048, is the covariance matrix: X is streamed,
    twice for each step of the iteration, and centred, scaled and weighted where its panels lie. In this process there
    are thin matrices alone: at most 16 blocks of 2k columns (k + 10 if that is more) of the shorter side of X, or less
    where that would exceed 2 GiB, and one of k columns of the variables. Other thin matrices are stored beside ``out``
    until the end.

    Parameters
    ----------
    x
        A two-dimensional array of samples (such as times) × variables (such as grid points): a path, a URL or an open
        ``zarr.Array``.
    out
        A new Zarr group in a local folder: ``components`` (k × variables), ``scores`` (samples × k), ``eigenvalues``
        and ``explained_variance`` (the same, as sums of squares divided by n - 1), ``explained_variance_ratio`` (of the
        variance of all variables), ``singular_values``, ``residuals``, and ``mean`` and ``factor`` of each variable
        where these were used. xarray opens it; dimensions have the names that X has, and ``mode``. None: nothing is
        stored, and these are returned as arrays of NumPy, by the same names, if this host's memory holds them twice.
    k
        How many, from the largest variance down.
    of, sum_over
        Which side of X has the variables: ``columns`` or ``rows``; or the axes of the samples, by number or by the
        names of their dimensions, of an X of any number of dimensions. As for ``tilewright.gram``.
    add_up
        Axes whose elements are added up first, such as the alleles of a dosage, as for ``tilewright.gram``.
    align
        Whether a mask, and weights of an axis, need X's ``labels``, where both have coordinates, or are taken by
        ``position``, as for ``tilewright.gram``.
    center, scale
        Whether the mean of each variable is subtracted, and whether it is divided by its standard deviation (n - 1).
    constant
        What happens to a variable without variance that is scaled, or without any number, such as a place on land:
        ``error``; ``zero``, by which it counts as 0; or ``nan``, by which it does and its part of each EOF is NaN.
    missing
        What stands for a missing number: a number as it is stored, or ``"nan"``; ``"attributes"``, by which X is taken
        as xarray opens it; or a mask, as for ``tilewright.gram``,
        of which places that it leaves nothing of have 0 in the EOFs. Means and deviations are of those that
        are there, and the others count as the mean.
    weights
        One for each variable, 0 or more, in memory or the path of a stored vector: its squares count so many times in
        the variance. For grid points that is the area they stand for, the cosine of the latitude; X is multiplied by
        the root, which is what xeofs calls its weights. Or those along one or more of the variables' axes, by name or
        number, such as ``{"lat": np.cos(np.deg2rad(latitude))}``, which are multiplied; ``"cos"`` stands for these
        where the latitudes, in degrees, are the coordinates of that axis beside X. Of several axes also an array of
        their lengths, such as areas of latitudes × longitudes.
    sample_weights
        One for each sample: means are weighted, and squares count so many times. n - 1 becomes W - (sum of the squared
        weights) / W, as of ``numpy.cov(aweights=)``. Scores are those of the samples as they are.
    tol
        An EOF is found where ‖C v - λ v‖ is at most this times λ, or within what rounding in ``dtype`` makes of the
        largest; C is the covariance matrix. Then λ is wrong by at most that share, and usually by about its square, and
        v by at most ``tol`` λ beside the distance to the next eigenvalue.
    passes
        The most that are made over X.
    method
        ``krylov`` iterates; ``gram`` has the products of every two columns (or rows, if these are fewer) formed in one
        pass, and finds their eigenvectors in this process, which holds them in double precision; ``auto`` takes that
        where there are at most 2048.
    resume
        Whether the passes of a stopped run are not made again: of one with the same X, and the same options but for
        ``tol``, ``passes`` and where it runs. It loses the pass that was under way, or the last one.
    verify
        Whether the scores, and what ``gram`` forms, are checked by Freivalds' test, which reads X once more for each.
    overwrite
        Whether EOFs that stand at ``out`` are replaced.
    seed, dtype, precision, cluster, cluster_file, device, device_memory, scratch, listener
        As for `eigh`. Without ``scratch``, thin matrices lie beside ``out``. What passes have found does until all is
        done.

    Notes
    -----
    Each EOF has length 1, and its largest component is positive. ``scores @ components.conj()`` are the anomalies of X
    (centred, scaled, times the roots of the weights), as far as k EOFs can give them; ``(x - mean) * factor`` are those
    of new samples. Of complex X a row of ``components`` is an eigenvector of Xᴴ X, as xeofs has it.

    Raises
    ------
    TilewrightError
        As ``tilewright.matmul``, and before anything is written: OptionError for k above the shorter side of X, for NaN
        without ``missing``, for constant variables that are scaled; ShapeError for weights of a wrong length. At the
        end ConvergenceError, where ``passes`` do not do; it says how near they came.

    Examples
    --------
    ::

        tw.eofs("sst.zarr", "eofs.zarr", k=10, missing="nan", weights=np.cos(np.deg2rad(latitude)))
        xarray.open_zarr("eofs.zarr").explained_variance_ratio

    Those of a small field, as arrays:

    >>> import numpy as np
    >>> import tilewright as tw
    >>> field = np.outer([1.0, 2.0, 3.0, 2.0], [1.0, 0.5, -1.0])
    >>> found = tw.eofs(field, k=1)
    >>> np.allclose(found.scores @ found.components, field - field.mean(axis=0))
    True
    """
    request = _request(**locals())
    return job.eofs_in_memory(request) if out is None else job.eofs(request)


def plan_only(x: Input, out: Source, **options: Any) -> EofPlan:
    """How `eofs` would go about it; nothing is written to ``out``. options: as it has them. Raises as that."""
    return job.plan_only(_request(x, out, **options))


def _request(x: Input, out: Source | None, *, add_up: Axes = None, **options: Any) -> EofRequest:
    if add_up is not None:
        options["missing_given"] = options.get("missing")
        x, options["missing"] = added_up(
            x, add_up, options["missing_given"], "X", align=options.get("align", "labels")
        )
    search = {name: options.pop(name) for name in Search.__dataclass_fields__ if name in options}
    return EofRequest(x, out, Search(**search), **options)
