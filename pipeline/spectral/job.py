"""The run of eigenpairs and of EOFs: look at the numbers, iterate by streamed products, store what is found."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr

from tilewright.kernels.arguments import shown
from tilewright.kernels.numbers import counted
from tilewright.kernels.passes.moments import Moments
from tilewright.kernels.tolerance import unit_roundoff
from tilewright.pipeline.check.verify import Verification
from tilewright.pipeline.cluster.here.opening import open_executor
from tilewright.pipeline.cluster.watch import workers_held
from tilewright.pipeline.errors import (
    ConvergenceError,
    OptionError,
    OutputError,
    OutputExistsError,
    StoreError,
    VerificationError,
)
from tilewright.pipeline.events import on_waiting
from tilewright.pipeline.gram.job import unchanged
from tilewright.pipeline.gram.options import Matrices, axis_of, in_words
from tilewright.pipeline.gram.statistics import Wanted, find_statistics, likely_missing
from tilewright.pipeline.gram.transforms import (
    check_lines,
    lines_notice,
    not_finite,
    without_values,
)
from tilewright.pipeline.in_memory import read_whole, stored_for_a_moment
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.plan.transform import Transform
from tilewright.pipeline.product.output import partial_path
from tilewright.pipeline.spectral import eof_group
from tilewright.pipeline.spectral.anomalies import Anomalies, check_varies
from tilewright.pipeline.spectral.krylov import (
    AsymmetricError,
    NotFiniteError,
    Pairs,
    leading_pairs,
    orthonormal,
    phases,
)
from tilewright.pipeline.spectral.operators import PassTeller, Streamed
from tilewright.pipeline.spectral.options import (
    GRAM_SIDE,
    EofRequest,
    Search,
    open_hermitian,
    product_dtype,
    variable_weights,
)
from tilewright.pipeline.spectral.passes import Passes, are_kept, digest_of
from tilewright.pipeline.spectral.results import Eigenpairs, EofPlan, EofRun, Eofs
from tilewright.pipeline.store.arrays import Input, name_of
from tilewright.pipeline.store.attributes import FLATTENED, dimension_names
from tilewright.pipeline.store.coordinates import along_side, left_behind, made_with_coordinates, many_along
from tilewright.pipeline.store.region import (
    Flattened,
    Masked,
    Section,
    StoredArray,
    is_beside_mask,
    numbers_dtype,
)
from tilewright.pipeline.store.region_read import read_region
from tilewright.pipeline.store.sources.dasks import any_pending
from tilewright.pipeline.transfer.files import with_remedy

if TYPE_CHECKING:
    from distributed import Client

EIGH, EOFS = "eigh", "eofs"
"""Names of the work in events."""

PASSES = "passes"
"""The folder of what is kept of passes, in that of thin matrices."""

MOST_STEPS = 200
"""Of the iteration with a matrix in memory, which takes no passes."""

AGREEMENT = 16.0
"""Times the residual that is allowed: how far sums of squared scores may be from eigenvalues."""

KEPT_PASSES = "; what these passes found is kept, and the same command with more of them goes on from there"

BLOCK_NBYTES = 2**26
"""Of scores that are read at a time."""


def eigh(g: Input, search: Search) -> Eigenpairs:
    """The leading eigenpairs of a stored Hermitian matrix, as ``tilewright.eigh`` says, and raise as it does."""
    start = time.perf_counter()
    search = search.checked()
    array = open_hermitian(g, search.k)
    side = int(array.shape[0])
    dtype = product_dtype(array.dtype, search.dtype, "G", name_of(array))
    tell = PassTeller(search.listener, EIGH)
    with (
        _executor(search, array) as client,
        workers_held(client, waiting=on_waiting(search.listener, EIGH, "ends it")),
        unchanged(client, {"G": array}, "its eigenvalues were found"),
        _scratch(search) as folder,
    ):
        matrix = Streamed(client, search, array, array, Transform(dtype), folder, tell)

        def product(block: np.ndarray) -> np.ndarray:
            matrix.put("v", block, 1)
            matrix.multiply("w", "v")
            return matrix.get("w")

        try:
            found = leading_pairs(
                product, side, search.aim(side, side, search.passes, dtype), _teller(tell, search)
            )
        except AsymmetricError as error:
            raise OptionError(
                f"G: {name_of(array)} is not {'Hermitian' if dtype.kind == 'c' else 'symmetric'}: of two vectors x and"
                f" y, y·Gx and Gy·x differ by {error.apart:.2g} of the length of Gx, where rounding makes"
                f" {error.allowed:.2g} at most; store (G + Gᵀ) / 2, or find singular vectors with tilewright.eofs"
            ) from error
        except NotFiniteError as error:
            raise _not_finite("G", array) from error
    _check_converged(found, search, matrix.spent.passes, "G")
    return Eigenpairs(
        found.values,
        found.vectors,
        found.residuals,
        matrix.spent.passes,
        time.perf_counter() - start,
        matrix.spent.read_nbytes,
        dtype.name,
        matrix.spent.device,
    )


@dataclass(frozen=True)
class Task:
    """EOFs that are to be found, with all that is known before X is read."""

    request: EofRequest
    matrices: Matrices
    dtype: np.dtype
    """Of the products."""
    weights: np.ndarray | None
    """Of the variables."""
    whole: bool
    """Whether the products of every two samples, or variables, are formed."""

    @classmethod
    def of(cls, request: EofRequest) -> Task:
        """Of a request whose options are checked. Raises as ``tilewright.eofs`` does before X is read."""
        search = request.search
        matrices = request.matrices()
        x = matrices.arrays["X"]
        dtype = product_dtype(numbers_dtype(x), search.dtype, "X", name_of(x))
        weights = None
        if request.weights is not None:
            weights = variable_weights(request.weights, x, matrices.of, request.align)
        whole = request.method == "gram" or (request.method == "auto" and min(x.shape) <= GRAM_SIDE)
        task = cls(request, matrices, dtype, weights, whole)
        if search.passes < task.fewest:
            raise OptionError(
                f"passes={search.passes}: {task.fewest} are the fewest, of which {task.others} find means, variances"
                f"{', EOFs' if task.by_samples else ''} and scores; allow more (passes, --passes)"
            )
        return task

    @property
    def x(self) -> StoredArray:
        return self.matrices.arrays["X"]

    @property
    def variables(self) -> int:
        return int(self.x.shape[axis_of(self.matrices.of)])

    @property
    def by_samples(self) -> bool:
        """Whether it is the samples' side that is decomposed, which is the shorter one."""
        return self.matrices.length < self.variables

    @property
    def others(self) -> int:
        """Passes besides those that find eigenpairs: one finds means and variances; at the end one finds scores, and on
        the samples' side one EOFs before."""
        return 3 if self.by_samples else 2

    @property
    def fewest(self) -> int:
        return self.others + (1 if self.whole else 2)

    @property
    def products(self) -> int | None:
        """The most steps of the iteration; None: there is none over X."""
        return None if self.whole else (self.request.search.passes - self.others) // 2

    @property
    def wanted(self) -> Wanted:
        """What the first pass finds."""
        matrices = self.matrices
        return Wanted(
            (matrices.of,),
            matrices.treatments["X"].missing,
            matrices.of if matrices.weights is not None else None,
            matrices.weights,
        )

    @property
    def source(self) -> Any:
        """X as each product opens it: what is seen as a matrix, or is no array of Zarr, as it is open already."""
        seen = isinstance(self.x, Flattened | Masked | Section)
        named = isinstance(self.request.x, str | os.PathLike | zarr.Array)
        return self.x if seen or not named else self.request.x

    @property
    def digest(self) -> str:
        """As `passes.digest_of`."""
        how = ["gram" if self.whole else "krylov", self.by_samples]
        return digest_of(self.request, self.matrices, self.weights, self.dtype, how)


def plan_only(request: EofRequest) -> EofPlan:
    """How the EOFs would be found; nothing is written but metadata of thin matrices, in the folder for these or the
    system's of temporary files, and no number of X is read. Raises as `eofs`, but for the output, of which a notice
    tells."""
    request = request.checked()
    task, search = Task.of(request), request.search
    tell = PassTeller(search.listener, EOFS)
    try:
        path = eof_group.check_group_place(request.out, task.x, overwrite=request.overwrite)
        thin = partial_path(path) / eof_group.THIN / PASSES
        if request.resume and are_kept(thin, task.digest):
            tell.say("an earlier run left passes, which would not be made again")
    except (StoreError, OutputError, OutputExistsError) as error:
        tell.warn(f"without --plan-only this would be refused: {error}")
    with (
        _executor(search, task.x) as client,
        workers_held(client, waiting=on_waiting(search.listener, EOFS, "ends it")),
    ):
        plans = _plans(task, client, tell)
    x = task.x
    most = task.fewest if task.whole else task.others + 2 * (task.products or 0)
    return EofPlan(
        task.matrices.length,
        task.variables,
        search.k,
        "gram" if task.whole else "krylov",
        "samples" if task.by_samples else "variables",
        task.fewest,
        most,
        math.prod(x.shape) * x.dtype.itemsize,
        (task.matrices.length + task.variables) * search.k * task.dtype.itemsize,
        task.dtype.name,
        plans,
    )


def _plans(task: Task, client: Client, tell: PassTeller) -> dict[str, MatmulPlan]:
    """Of each kind of product that a run makes, by what it is of. Raises as these do where no worker can make one."""
    search, x, variables = task.request.search, task.x, axis_of(task.matrices.of)
    wide = np.dtype(np.complex128 if task.dtype.kind == "c" else np.float64)
    nothing = Moments.of_nothing(task.variables, wide)
    moments = {task.matrices.of: replace(nothing, count=nothing.count + 1, weight=nothing.weight + 1)}
    anomalies = Anomalies.of(task.matrices, moments, task.weights, task.dtype)
    block = search.aim(min(x.shape), max(x.shape), 1, task.dtype).block
    plans: dict[str, MatmulPlan] = {}
    with _scratch(search) as folder:
        matrix = Streamed(client, search, task.source, x, anomalies.transform, folder, tell)
        for width in {block, search.k}:
            for side in (0, 1):
                zarr.create_array(
                    folder / f"{side}-{width}",
                    shape=(x.shape[side], width),
                    dtype=task.dtype,
                    compressors=None,
                )
        own = anomalies.transform, None

        def by(axis: int, width: int) -> MatmulPlan:
            """Of X, or its transpose, by a thin matrix of as many rows as X has along this axis."""
            return matrix.plan(
                str(folder / f"{axis}-{width}"), folder / "out", transpose_a=axis == 0, transforms=own
            )

        if task.whole:
            columns = task.by_samples == (variables == 0)
            both = anomalies.transform, anomalies.transform
            plans["every two " + ("columns" if columns else "rows")] = matrix.plan(
                task.source, folder / "out", transpose_a=columns, transpose_b=not columns, transforms=both
            )
        else:
            plans["a block of columns"] = by(1, block)
            plans["a block of rows"] = by(0, block)
        plans["scores"] = by(variables, search.k)
    return plans


def eofs_in_memory(request: EofRequest) -> Eofs:
    """The leading EOFs of a matrix as arrays. Raises as `eofs`, and OutputError as ``in_memory.array_of``."""
    request = request.checked()
    task = Task.of(request)
    count, item = request.search.k, task.dtype.itemsize
    nbytes = (task.matrices.length + task.variables) * count * item
    what = f"the result, {counted(count, 'EOF')} of {task.variables} variables with {task.matrices.length} scores each,"
    with stored_for_a_moment(nbytes, what) as path:
        run = eofs(replace(request, out=path))
        named = {
            one.name: read_whole(path / one.name)
            for one in fields(Eofs)
            if one.name != "run" and (path / one.name).exists()
        }
    return Eofs(**named, run=replace(run, out=""))


def eofs(request: EofRequest) -> EofRun:
    """Store the leading EOFs of a matrix, as ``tilewright.eofs`` says, and raise as it does."""
    start = time.perf_counter()
    request = request.checked()
    task = Task.of(request)
    search, matrices, x, dtype = request.search, task.matrices, task.x, task.dtype
    path = eof_group.check_group_place(request.out, x, overwrite=request.overwrite)
    tell = PassTeller(search.listener, EOFS)
    with ExitStack() as stack:
        client = stack.enter_context(_executor(search, x))
        stack.enter_context(workers_held(client, waiting=on_waiting(search.listener, EOFS, "ends it")))
        arrays = stack.enter_context(unchanged(client, {"X": x}, "its EOFs were found", search.listener))
        _plans(task, client, PassTeller(lambda event: None, EOFS))  # raises, before X is read
        growing, passes = stack.enter_context(_growing(task, path))
        folder = growing / eof_group.THIN
        if search.scratch is not None:
            folder = stack.enter_context(_kept_scratch(search, path, passes))
        of_variables = passes.moments()
        if of_variables is not None:
            tell.say(
                "an earlier run left passes over X; it goes on with these, and the step that was under way"
            )
        else:
            of_variables = find_statistics(client, arrays["X"], task.wanted, search.listener)[matrices.of]
            passes.keep_moments(of_variables)
        moments = {matrices.of: of_variables}
        missing = matrices.treatments["X"].missing
        _check_finite(matrices, of_variables)
        if told := likely_missing("X", task.x, missing, moments):
            tell.warn(told)
        check_lines(matrices, "X", moments, request.constant)
        if told := lines_notice(matrices, "X", moments, request.constant, "their part of each EOF is"):
            tell.say(told)
        anomalies = Anomalies.of(matrices, moments, task.weights, dtype)
        check_varies(anomalies, matrices, of_variables)
        matrix = Streamed(client, search, task.source, x, anomalies.transform, folder, tell, passes=passes)
        matrix.spent.passes += 1
        if not passes.reused:
            matrix.spent.read_nbytes += math.prod(x.shape) * x.dtype.itemsize
        found = _modes(matrix, matrices, anomalies, task.by_samples, task.products, request.verify)
        _check_converged(found, search, matrix.spent.passes, "X", kept=bool(passes.digest))
        vectors = _vectors(matrix, matrices, anomalies, found) if task.by_samples else found.vectors
        # Scores are of the samples as they are, whatever these count for.
        verification = _scores(matrix, matrices, anomalies, vectors, request.verify)
        scores = matrix.open("scores")
        squares = _variances(scores, matrices)
        rounding = search.aim(min(x.shape), max(x.shape), 1, dtype).rounding
        _check_agree(squares, found.values, search, rounding, x)
        values = squares / anomalies.degrees
        order = np.argsort(-values, kind="stable")
        values, vectors = values[order], vectors[:, order]
        if request.constant == "nan":  # after all products with them
            vectors[without_values(matrices, "X", moments)] = np.nan
        ratios = values / anomalies.total if anomalies.total > 0 else np.zeros(len(values))
        residuals = found.residuals[order] / anomalies.degrees
        names = dimension_names(x)
        summed = axis_of(matrices.summed)
        dimensions = eof_group.Dimensions.of(names[summed], names[1 - summed])
        sides = {
            dimensions.samples: made_with_coordinates(x, summed, many_along(x, summed)),
            dimensions.variables: made_with_coordinates(x, 1 - summed, many_along(x, 1 - summed)),
        }
        for left in left_behind((x, 0), (x, 1)):
            tell.warn(left)
        flattened = {name: made for name, made in sides.items() if made is not None}
        eof_group.write_group(
            growing,
            dimensions,
            {
                "eigenvalues": values,
                "explained_variance": values,
                "explained_variance_ratio": ratios,
                "singular_values": np.sqrt(values * anomalies.degrees),
                "residuals": residuals,
                **anomalies.vectors(matrices),
            },
            vectors.T,
            (block[:, order] for block in _blocks(scores)),
            matrices.length,
            dtype,
            _attributes(request, matrices, matrix, anomalies, "gram" if task.whole else "krylov")
            | ({FLATTENED: flattened} if flattened else {}),
            {
                dimensions.samples: along_side(x, summed),
                dimensions.variables: along_side(x, 1 - summed),
            },
        )
    return EofRun(
        str(request.out),
        values,
        ratios,
        residuals,
        anomalies.total,
        matrices.length,
        task.variables,
        matrix.spent.passes,
        time.perf_counter() - start,
        matrix.spent.read_nbytes,
        dtype.name,
        matrix.spent.device,
        verification,
        passes.reused,
    )


@contextmanager
def _growing(task: Task, path: Path) -> Iterator[tuple[Path, Passes]]:
    """The growing group of EOFs, with the passes that are kept in it: also where the block ends by an error, unless
    that says that nothing of them is of use."""
    digest = task.digest
    goes_on = [task.request.resume]

    def keeps(thin: Path) -> bool:
        return goes_on[0] and are_kept(thin / PASSES, digest)

    with eof_group.growing_group(path, overwrite=task.request.overwrite, keeps=keeps) as growing:
        passes = Passes.begin(growing / eof_group.THIN / PASSES, digest)
        goes_on[0] = True
        try:
            yield growing, passes
        except (OptionError, VerificationError):
            passes.drop()
            raise


def _modes(
    matrix: Streamed,
    matrices: Matrices,
    anomalies: Anomalies,
    by_samples: bool,
    products: int | None,
    verify: bool,
) -> Pairs:
    """The leading eigenpairs of YᴴY, or of YYᴴ where there are fewer samples than variables, for Y of samples ×
    variables: in either case of the smaller side, so that the basis is as short as it can be. The longer thin matrix
    between the two products of a step stays where it is stored.

    products: the most steps; None: YᴴY, or YYᴴ, is formed in one pass, and held here. verify: whether it is checked.
    """
    variables = axis_of(matrices.of)
    samples = 1 - variables
    flipped = samples == 1  # X is stored as variables × samples
    side = int(matrix.array.shape[samples if by_samples else variables])
    terms = int(max(matrix.array.shape))
    passes = matrix.passes
    assert passes is not None, "what EOFs are found with"
    steps = itertools.count()

    def product(block: np.ndarray) -> np.ndarray:
        step = next(steps)
        image = passes.image(step, block, matrix.dtype)
        if image is not None:
            matrix.spent.passes += 2
            return image
        if by_samples:
            matrix.begin("u", anomalies.of_samples(block), samples)
            matrix.multiply("v", "u", transpose=not flipped, conjugate=True)
            matrix.multiply("w", "v", transpose=flipped)
            image = anomalies.of_samples(matrix.get("w"))
        else:
            matrix.begin("v", block, variables)
            matrix.multiply("u", "v", transpose=flipped)
            matrix.multiply("w", "u", transpose=not flipped, conjugate=True)
            image = anomalies.of_variables(matrix.get("w"), block)
        passes.keep_image(step, block, image)
        return image

    aim = matrix.search.aim(side, terms, products or MOST_STEPS, matrix.dtype)
    try:
        if products is not None:
            return leading_pairs(product, side, aim, _teller(matrix.tell, matrix.search))
        matrix.gram("g", columns=by_samples == flipped, verify=verify)
        g = matrix.get("g")
        if flipped:  # X by its conjugate, where it should be the conjugate by X
            g = g.conj()
        g = anomalies.of_pairs_of_samples(g) if by_samples else anomalies.of_variables(g)
        # As near as rounding lets it come, which takes no pass.
        near = replace(aim, tolerance=float(unit_roundoff(np.float64)))
        return replace(leading_pairs(lambda block: g @ block, side, near), tolerance=aim.tolerance)
    except AsymmetricError as error:
        raise VerificationError(
            f"products with {name_of(matrix.array)} and with its transpose contradict each other: of two vectors u and"
            f" v, u·Av and Au·v differ by {error.apart:.2g} of the length of Av, where rounding makes"
            f" {error.allowed:.2g} at most; run it again, and see that memory, device and storage are sound"
        ) from error
    except NotFiniteError as error:
        raise _not_finite("X", matrix.array) from error


def _vectors(matrix: Streamed, matrices: Matrices, anomalies: Anomalies, found: Pairs) -> np.ndarray:
    """The EOFs, n × k, from the samples' eigenvectors u: Yᴴu, of length 1. Where there is no variance left, any vectors
    that are orthogonal to the others."""
    matrix.begin("u", anomalies.of_samples(found.vectors), axis_of(matrices.summed))
    matrix.multiply("v", "u", transpose=matrices.of == "columns", conjugate=True)
    images = matrix.get("v")
    sound = found.values > found.floor
    vectors = np.zeros((images.shape[0], 0), images.dtype)
    if sound.any():
        vectors, upper = np.linalg.qr(images[:, sound])
        vectors = vectors * (np.diag(upper) / np.abs(np.diag(upper)))
    lacking = int((~sound).sum())
    if lacking:
        draw = np.random.default_rng(matrix.search.seed)
        random = draw.standard_normal((images.shape[0], lacking)).astype(images.dtype)
        vectors = np.hstack([vectors, orthonormal(random, vectors)])
    result: np.ndarray = vectors * phases(vectors)
    return result


def _scores(
    matrix: Streamed, matrices: Matrices, anomalies: Anomalies, vectors: np.ndarray, verify: bool
) -> Verification | None:
    """Store the anomalies times the EOFs."""
    matrix.put("eofs", vectors, axis_of(matrices.of))
    return matrix.multiply(
        "scores",
        "eofs",
        transpose=matrices.of == "rows",
        verify=verify,
        transform=anomalies.unweighted(matrices),
        epilogue=anomalies.epilogue(vectors),
        again=True,
    )


def _blocks(scores: zarr.Array[Any]) -> Iterator[np.ndarray]:
    """Rows of scores, in order, in double precision."""
    rows, count = scores.shape
    step = max(1, BLOCK_NBYTES // max(1, count * 16))
    wide = np.complex128 if scores.dtype.kind == "c" else np.float64
    for begin in range(0, rows, step):
        yield read_region(scores, (slice(begin, min(rows, begin + step)), slice(0, count))).astype(wide)


def _variances(scores: zarr.Array[Any], matrices: Matrices) -> np.ndarray:
    """The weighted sums of the squared scores of each EOF."""
    total, row = np.zeros(scores.shape[1]), 0
    for block in _blocks(scores):
        squares = block.real**2 + block.imag**2
        if matrices.weights is not None:
            squares = squares * matrices.weights[row : row + len(block), np.newaxis]
        total += squares.sum(0)
        row += len(block)
    return total


def _check_agree(
    squares: np.ndarray, found: np.ndarray, search: Search, rounded: float, x: StoredArray
) -> None:
    """Raise VerificationError where the sums of squared scores are not the eigenvalues that the iteration found.

    rounded: what rounding makes of them, beside the largest.
    """
    values = np.maximum(found, 0)
    allowed = AGREEMENT * search.tol * values + rounded * values.max(initial=0.0)
    if bad := np.flatnonzero(~(np.abs(squares - values) <= allowed)).tolist():
        raise VerificationError(
            f"EOF {bad[0] + 1} of {name_of(x)} has scores whose squares add up to {squares[bad[0]]:.8g}, and the"
            f" eigenvalue {values[bad[0]]:.8g}; run it again, and see that memory, device and storage are sound"
        )


def _attributes(
    request: EofRequest, matrices: Matrices, matrix: Streamed, anomalies: Anomalies, method: str
) -> dict[str, Any]:
    """Of the group: what it is, and where it is from."""
    from tilewright import __version__

    search = request.search
    given = None if request.missing_given is None else matrices.treatments["X"].missing_given
    options = {
        "k": search.k,
        "of": matrices.of,
        "sum_over": in_words(request.sum_over),
        "center": request.center,
        "scale": request.scale,
        "constant": None if request.constant == "error" else request.constant,
        "missing": "mask" if is_beside_mask(matrix.array) else request.missing if given is None else given,
        "weights": _weights_told(request.weights),
        "sample_weights": _weights_told(request.sample_weights),
        "method": method,
        "tol": search.tol,
        "seed": search.seed,
        "dtype": matrix.dtype.name,
        "precision": search.precision,
    }
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    said = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
    return {
        eof_group.KIND: options,
        "title": f"EOFs of {name_of(matrix.array)}",
        "source": name_of(matrix.array),
        "history": f"{now} tilewright {__version__} eofs: {said}; {matrix.spent.passes} passes",
        "total_variance": anomalies.total,
        "samples": matrices.length,
    }


def _weights_told(weights: Any) -> Any:
    """As `in_words`; of numbers that are listed, which may be many, only that they are given."""
    if isinstance(weights, Mapping):
        return {str(axis): _weights_told(one) for axis, one in weights.items()}
    return "given" if isinstance(weights, tuple | list) else in_words(weights)


def _check_finite(matrices: Matrices, moments: Moments) -> None:
    """Raise OptionError where a variable holds NaN or infinities that are not said to be missing."""
    bad = np.flatnonzero(~(np.isfinite(moments.mean) & np.isfinite(moments.second)))
    if len(bad):
        raise not_finite(matrices, "X", bad, matrices.of)


def _not_finite(role: str, array: StoredArray) -> OptionError:
    return OptionError(
        f"{role}: products with {name_of(array)} are NaN or infinite: it holds such numbers, or some that are too large"
        " for the dtype; take them out, or ask for a wider dtype (dtype='float64')"
    )


def _check_converged(found: Pairs, search: Search, passes: int, role: str, *, kept: bool = False) -> None:
    """Raise ConvergenceError where pairs are not as good as was asked for. kept: whether a run that goes on has what
    the passes found."""
    good = found.good
    if good.all():
        return
    worst = int(np.argmax(found.relative))
    values = ", ".join(f"{value:.6g}" for value in found.values)
    raise ConvergenceError(
        f"after {passes} passes over {role}, {int(good.sum())} of {counted(len(good), 'pair')} are within"
        f" tol={search.tol:g}: the residual of number {worst + 1} is {found.relative[worst]:.2g} of its eigenvalue. The"
        f" eigenvalues are {values} so far; allow more passes (--passes), a larger tol (--tol), or ask for fewer (-k)"
        + (KEPT_PASSES if kept else "")
    )


def _teller(tell: PassTeller, search: Search) -> Callable[[Pairs], None]:
    """Tells how near each step has come."""

    def say(found: Pairs) -> None:
        tell.say(
            f"step {found.products}: {int(found.good.sum())} of {len(found.values)} pairs found; the largest residual"
            f" is {float(found.relative.max(initial=0.0)):.2g} of its eigenvalue (tol={search.tol:g})"
        )

    return say


@contextmanager
def _kept_scratch(search: Search, path: Path, passes: Passes) -> Iterator[Path]:
    """A folder for thin matrices in the one that was given, of this output alone: it stays where passes are kept."""
    if not passes.digest:
        with _scratch(search) as folder:
            yield folder
        return
    name = hashlib.sha256(f"{passes.digest} {path.resolve()}".encode()).hexdigest()[:16]
    folder = Path(search.scratch).absolute() / f"tilewright-{name}"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise _no_scratch(search, error) from error
    try:
        yield folder
    except BaseException:
        if not are_kept(passes.folder, passes.digest):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _executor(search: Search, array: StoredArray) -> AbstractContextManager[Client]:
    """What works on a matrix, and on what is made of it."""
    return open_executor(search.cluster, search.cluster_file, graphs=any_pending([array]))


@contextmanager
def _scratch(search: Search) -> Iterator[Path]:
    """A new folder for thin matrices, in the one that was given, or in the system's; removed at the end."""
    try:
        with tempfile.TemporaryDirectory(
            prefix="tilewright-", dir=search.scratch, ignore_cleanup_errors=True
        ) as folder:
            yield Path(folder).absolute()
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise _no_scratch(search, error) from error


def _no_scratch(search: Search, error: OSError) -> StoreError:
    place = "the temporary folder" if search.scratch is None else f"scratch={shown(str(search.scratch))}"
    return StoreError(
        f"{place} cannot be used: {with_remedy(error)}; name a folder that all workers see (scratch, --scratch)"
    )
