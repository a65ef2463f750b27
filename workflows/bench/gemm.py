"""The matrix product on one device: every kernel of the ladder beside cuBLAS, or the CPU twin beside NumPy.

The peer is the fastest of all settings that could be (`gemm_peers`); times are those of the device, and by the host's
clock those of single calls beside calls in a row.

Each contestant's answer is checked before it is timed, against sums in float64 or exact integers, on bands of
rows that the plain tiled kernel (on a CPU: NumPy) computes. Operands are random over the whole range of
integers, and normally distributed otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from tilewright.kernels import matmul
from tilewright.kernels.bfloat16 import BFLOAT16, dtype_name
from tilewright.kernels.choices import DEVICES, PRECISIONS, DeviceName, PrecisionName
from tilewright.kernels.errors import OptionError
from tilewright.kernels.float8 import FLOAT8, NAMES, to_float32
from tilewright.kernels.gemm import tuning
from tilewright.kernels.gemm.base import FACTORS
from tilewright.kernels.gemm.check import SPLIT, result_dtype
from tilewright.kernels.gemm.ladder.tiled import TILED
from tilewright.kernels.gemm.product import describe, kernel_name
from tilewright.kernels.gemm.select import ladder
from tilewright.kernels.gpu.device_array import to_device
from tilewright.kernels.gpu.device_choice import SIMULATOR, current_device, model, resolve_device
from tilewright.kernels.gpu.streams import DEFAULT_STREAM
from tilewright.kernels.tolerance import tolerance
from tilewright.workflows.bench import gemm_peers
from tilewright.workflows.bench.common import (
    SECONDS,
    BenchReport,
    CallRow,
    CallsReport,
    Contestant,
    Picture,
    Row,
    Search,
    expect_pictures,
    library,
    machine,
    measure,
    measure_calls,
    publish,
    search,
    shown,
    taken,
    tell,
)
from tilewright.workflows.bench.cublas import CublasError, Sides, opened

DTYPES = ("float32", "float64", "complex64", "complex128", "int32", "int64")
CHOSEN = "tilewright: "
"""Stands before the name of the kernel that `matmul` chooses, which is measured through `matmul`."""
BANDS = 8
"""How many bands of rows are checked, the first and the last rows among them."""
BAND_ROWS = 32
NUMPY_INTEGER_ROWS = 64
"""NumPy takes minutes for an integer product of some thousand rows; its rate shows in this many."""
PORTABLE_OPERATIONS = 1e12
"""The portable kernels, a tenth as fast as the others, are left out of larger cases: minutes each."""
PERIOD = 4_194_301
"""A prime: larger matrices repeat so many random elements, in another place of every row."""
SMALL = 127
"""The largest absolute value of ``small`` integers: those that one 8-bit digit holds."""
FLOAT8_SHARE = 2.0**-3
"""Of the standard deviation of an element of a product of random matrices: what an element of a float8 product may be
off. The bound of its errors is that of the worst numbers, and is more than the elements themselves where k is large."""
CALL_SECONDS = 0.5
"""For the calls of each contestant, about."""
CALL_SIZES = (64, 256, 1024, 2048, 4096, 8192)
CALL_KINDS: tuple[tuple[str, PrecisionName, bool], ...] = (
    ("float32", "full", False),
    ("float16", "full", False),
    ("float32", "tf32", False),
    ("int8->int32", "full", False),
    ("int64", "full", True),
    ("float32", "split", False),
)
"""Dtypes, precisions, and whether integers are small: the sides and kinds of which single calls are always told."""


FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
"""Those of which products of small whole numbers are formed by bytes."""


@dataclass(frozen=True)
class Case:
    """C = A B of given sides; integers over their whole range, or small ones; floats, or small whole ones."""

    m: int
    n: int
    k: int
    dtype: np.dtype
    result: np.dtype
    precision: PrecisionName = "full"
    small: bool = False
    gram: bool = False
    """Whether A is B transposed."""

    @property
    def operations(self) -> float:
        """Multiplications and additions, of a symmetric product those of the elements on and below the diagonal; of a
        complex one four times as many."""
        each = 4.0 if self.result.kind == "c" else 1.0
        return each * (self.n * (self.n + 1) if self.gram else 2 * self.m * self.n) * self.k

    def __str__(self) -> str:
        sides = f"{self.m}" if self.m == self.n == self.k else f"{self.m}×{self.n}×{self.k}"
        kind = dtype_name(self.dtype)
        if self.dtype != self.result:
            kind += f"->{dtype_name(self.result)}"
        extras = [self.precision] * (self.precision != "full") + ["small"] * self.small
        return " ".join(["BᵀB"] * self.gram + [kind, *extras, sides])

    def operands(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(self.m + self.n + self.k)
        a, b = _random(rng, (self.m, self.k), self), _random(rng, (self.k, self.n), self)
        return (b.T, b) if self.gram else (a, b)


def _random(rng: np.random.Generator, shape: tuple[int, int], case: Case) -> np.ndarray:
    if shape[0] * shape[1] > PERIOD:
        return np.resize(_random(rng, (1, PERIOD), case), shape)
    dtype = case.dtype
    if case.small and dtype in FLOATS:
        return rng.integers(-SMALL, SMALL, shape, np.int8, endpoint=True).astype(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        low, high = (max(info.min, -SMALL), SMALL) if case.small else (info.min, info.max)
        return rng.integers(low, high, shape, dtype, endpoint=True)
    part = np.float64 if dtype in (np.float64, np.complex128) else np.float32
    if dtype.kind == "c":
        return rng.standard_normal((*shape, 2), part).view(dtype)[..., 0]
    return rng.standard_normal(shape, part).astype(dtype, copy=False)


def cases(
    sizes: Sequence[int | tuple[int, int, int]],
    dtypes: Sequence[str],
    precisions: Sequence[PrecisionName],
    small: bool,
    gram: bool = False,
) -> Iterator[Case]:
    """Every size with every dtype; float32 with every precision, float64 and complex numbers with full and split;
    integers, float32 and float64 also of small whole numbers, if asked.

    A size is the side of square matrices, or (m, n, k); ``int8->int32`` is a dtype and that of its result.
    """
    for text in dtypes:
        dtype, result = _types(text)
        for size in sizes:
            m, n, k = (size,) * 3 if isinstance(size, int) else size
            for precision in _precisions_of(dtype, result, precisions):
                for tiny in (False, True) if small and (dtype.kind in "iu" or dtype in FLOATS) else (False,):
                    yield Case(m, n, k, dtype, result, precision, tiny, gram)


def _precisions_of(
    dtype: np.dtype, result: np.dtype, asked: Sequence[PrecisionName]
) -> Sequence[PrecisionName]:
    """Those of the precisions that a product has; full, where it has none of them."""
    if dtype == result and dtype in SPLIT and dtype != np.float32:
        return [precision for precision in asked if precision in ("full", "split")] or ("full",)
    return asked if dtype == result == np.float32 else ("full",)


def _types(text: str) -> tuple[np.dtype, np.dtype]:
    """The dtypes of operands and result from a name such as ``float32`` or ``int8->int32``."""
    stored, _, wanted = text.partition("->")
    try:
        dtype = np.dtype(stored)
    except TypeError:
        if stored in ("bfloat16", *NAMES):
            raise OptionError(
                f"dtype {stored!r} is NumPy's only with the package ml_dtypes; install it"
            ) from None
        raise OptionError(
            f"dtype {text!r} is unknown; it may be {', '.join(map(dtype_name, FACTORS))}, or like int8->int32"
        ) from None
    return dtype, result_dtype(dtype, dtype, wanted or None)


def call_cases() -> Iterator[Case]:
    """Small and middle sides of the kinds of which single calls are always told."""
    for text, precision, small in CALL_KINDS:
        for side in CALL_SIZES:
            yield Case(side, side, side, *_types(text), precision, small)


@dataclass(frozen=True)
class GemmReport:
    """What each contestant reached, and how calls fare one at a time."""

    report: BenchReport
    calls: CallsReport

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.report.rows

    def to_json(self) -> dict[str, Any]:
        return self.report.to_json() | {"calls": self.calls.to_json()}

    def __str__(self) -> str:
        return "\n".join([str(self.report), *([shown(self.calls.table())] if self.calls.rows else [])])

    def plot(self, path: str | Path) -> None:
        """`BenchReport.plot`"""
        self.report.plot(path)


def run_gemm(
    sizes: Sequence[int | tuple[int, int, int]] = (4096,),
    dtypes: Sequence[str] = DTYPES,
    *,
    precisions: Sequence[PrecisionName] = ("full",),
    small: bool = False,
    gram: bool = False,
    device: DeviceName = "auto",
    whole_ladder: bool = True,
    tune: bool = False,
    calls: bool = False,
    rounds: int = 15,
    seconds: float = 2.0,
    progress: Callable[[str], None] = lambda text: None,
) -> GemmReport:
    """Measure products of random matrices, and return what each contestant reached.

    sizes, dtypes, precisions, small: see `cases`.
    gram: measure products of a matrix by its own transpose instead (m = n).
    whole_ladder: every kernel that takes the problem, not only the chosen one (GPU); the portable ones up to
        `PORTABLE_OPERATIONS`.
    tune: remember the fastest kernel of each case in the user's cache directory, for `matmul` to choose (GPU).
    calls: time single and queued calls also of `call_cases` (GPU); of the cases asked for they are timed anyway.
    rounds, seconds: at most so many samples a contestant, and about so long.

    Raises WrongAnswer where a contestant's product is wrong, and what `matmul` raises.
    """
    for precision in precisions:
        if precision not in PRECISIONS:
            raise OptionError(f"precision={precision!r} is unknown; it may be {', '.join(PRECISIONS)}")
    if gram and any(size[0] != size[1] for size in sizes if not isinstance(size, int)):
        raise OptionError(
            "a product of a matrix by its own transpose is square; give sizes such as 4096x4096x64"
        )
    if gram and tune:
        raise OptionError("what is tuned is products of two matrices; leave tune or gram out")
    if SIMULATOR:
        raise OptionError("the CUDA simulator proves nothing about speed; unset NUMBA_ENABLE_CUDASIM")
    on_gpu = resolve_device(device) == "cuda"
    if tune and not on_gpu:
        raise OptionError("tuning measures a GPU's kernels, and this runs on the CPU; leave tune out")
    if tune and tuning.directory() is None:
        raise OptionError(
            "tuning keeps its results in the user's cache folder, and this user has no home; set XDG_CACHE_HOME to a"
            " folder that can be written, or leave tune out"
        )
    if calls and not on_gpu:
        raise OptionError(
            "single calls are compared with queued ones on a GPU, and this runs on the CPU; leave it out"
        )
    rows: list[Row] = []
    call_rows: list[CallRow] = []
    searches: list[Search] = []
    best: dict[str, str] = {}
    timing: dict[str, Any] = {"on_gpu": on_gpu, "rounds": rounds, "seconds": seconds}
    told = list(cases(sizes, dtypes, precisions, small, gram))
    for case in told:
        progress(str(case))
        if not on_gpu:
            rows += measure(str(case), case.operations, _cpu(case), **timing)
            continue
        with contextlib.ExitStack() as stack:
            field = _gpu(case, whole_ladder or tune, stack)
            beside = field.peers + field.ours
            found = measure(str(case), case.operations, beside + field.ladder, **timing)
            call_rows += _calls(case, beside)
        rows += found
        searches.append(field.search)
        if tune:
            best[_bucket(case)] = _fastest_kernel(found)
    for case in call_cases() if calls else ():
        if case in told:
            continue
        progress(f"{case}, calls")
        with contextlib.ExitStack() as stack:
            field = _gpu(case, False, stack)
            call_rows += _calls(case, field.peers + field.ours)
        searches.append(field.search)
    if tune:
        tuning.remember(model(current_device()), best)
    report = BenchReport(
        "matrix product",
        "Tflop/s",
        1e12,
        machine(on_gpu) | _cublas_version(on_gpu),
        tuple(rows),
        tuple(searches),
    )
    return GemmReport(report, CallsReport("Tflop/s", 1e12, tuple(call_rows)))


def _calls(case: Case, contestants: Sequence[Contestant]) -> list[CallRow]:
    return measure_calls(
        str(case), case.operations, contestants, synchronize=_synchronize, seconds=CALL_SECONDS
    )


def _synchronize() -> None:
    from numba import cuda

    cuda.synchronize()


def _fastest_kernel(rows: Sequence[Row]) -> str:
    """The fastest of the kernels of the ladder, each on B by rows."""
    names = {kernel.name for kernel in ladder()}
    kernels = [row for row in rows if not row.peer and row.contestant.removeprefix(CHOSEN) in names]
    return min(kernels, key=lambda row: row.seconds).contestant.removeprefix(CHOSEN)


def _cublas_version(on_gpu: bool) -> dict[str, str]:
    if not on_gpu:
        return {}
    try:
        with opened() as blas:
            return {"cublas": blas.version}
    except (OSError, AttributeError, CublasError) as error:
        return {"cublas": f"not called directly ({error})"}


def _bucket(case: Case) -> str:
    return tuning.bucket(
        case.m, case.n, case.k, (case.dtype, case.dtype, case.result), case.precision, accumulate=False
    )


def _bands(m: int) -> list[slice]:
    """Rows to check: bands spread evenly over the matrix, its first and its last rows included."""
    rows = min(BAND_ROWS, m)
    starts = {(m - rows) * band // (BANDS - 1) for band in range(BANDS)}
    return [slice(start, start + rows) for start in sorted(starts)]


def _judge(
    case: Case, a: np.ndarray, b: np.ndarray, bands: list[slice], expected: list[np.ndarray]
) -> Callable[[list[np.ndarray]], str | None]:
    """A function that takes bands of a product, the first few or all, and says what is wrong with them."""
    limits: list[Any] = [0.0] * len(bands)
    if case.result.kind not in "iu":
        # |a|·|b| <= ‖a‖ ‖b‖ (Cauchy-Schwarz) bounds the scale of an element without another product, and √k ‖a‖ a
        # sum of absolute values; twice,
        # since the reference of the widest types is no more exact than what it judges.
        columns = _norms(b, axis=0)
        limits = [
            FLOAT8_SHARE * np.outer(rows, columns) / math.sqrt(case.k)
            if case.dtype in FLOAT8
            else 2
            * tolerance(
                case.k,
                case.result,
                np.outer(rows, columns),
                case.precision,
                math.sqrt(case.k) * np.add.outer(rows, columns),
            )
            for rows in (_norms(a[band], axis=1) for band in bands)
        ]

    def judge(found: list[np.ndarray]) -> str | None:
        for band, mine, exact, limit in zip(bands, found, expected, limits, strict=False):
            if case.result.kind in "iu":
                right = mine == exact
            else:
                right = np.abs(mine.astype(exact.dtype) - exact) <= limit  # False for NaN
            if not right.all():
                row, column = np.argwhere(~right)[0]
                return (
                    f"element ({band.start + row}, {column}) is {mine[row, column]}, not {exact[row, column]}"
                )
        return None

    return judge


def _widest(dtype: np.dtype) -> np.dtype:
    """The type that references are computed in: integers are exact in their own."""
    return dtype if dtype.kind in "iu" else np.dtype(np.complex128 if dtype.kind == "c" else np.float64)


def _norms(matrix: np.ndarray, axis: int) -> np.ndarray:
    """Euclidean lengths of rows or columns, in float64 a block of rows at a time."""
    blocks = np.array_split(matrix, max(1, matrix.size >> 22))
    parts = [np.square(np.abs(_numpys(block)), dtype=np.float64).sum(axis) for block in blocks]
    return np.sqrt(np.sum(parts, axis=0) if axis == 0 else np.concatenate(parts))


def _numpys(matrix: np.ndarray) -> np.ndarray:
    """The matrix, of float8 in a type that NumPy computes in."""
    return to_float32(matrix) if matrix.dtype in FLOAT8 else matrix


def _cpu(case: Case) -> list[Contestant]:
    a, b = case.operands()
    out, theirs = np.empty((case.m, case.n), case.result), np.empty((case.m, case.n), case.result)
    integer = case.result.kind in "iu"
    # NumPy's integer product is slow: one row of each band, and a few rows for its rate.
    bands = [slice(band.start, band.start + 1) if integer else band for band in _bands(case.m)]
    part = slice(0, NUMPY_INTEGER_ROWS if integer else case.m)
    share = min(part.stop, case.m) / case.m
    wide = _widest(case.result)
    right = b.astype(wide)
    judge = _judge(case, a, b, bands, [a[band].astype(wide) @ right for band in bands])

    def ours() -> None:
        matmul(a, b, out, dtype=case.result, precision=case.precision, device="cpu")

    def numpy_product() -> None:
        dtype = None if case.result == BFLOAT16 else case.result
        np.matmul(_numpys(a[part]), _numpys(b), out=theirs[part], dtype=dtype)

    peers = [("numpy.matmul", numpy_product)]
    if integer and case.small and case.k * SMALL**2 < 2**53:
        left64, right64 = (matrix.astype(np.float64) for matrix in (a[part], b))

        def double_product() -> None:
            # Operands known to be small, and converted beforehand, which the peer is given for free.
            theirs[part] = left64 @ right64

        peers.append(("numpy.matmul in float64, operands known to be small", double_product))
    torch = library("torch")
    if torch is not None and case.dtype == case.result and case.dtype != BFLOAT16:
        left, right_tensor, product = (torch.from_numpy(matrix) for matrix in (a[part], b, theirs[part]))
        peers.append(("torch.mm", functools.partial(torch.mm, left, right_tensor, out=product)))

    def check(run: Callable[[], None], product: np.ndarray, seen: list[slice]) -> str | None:
        run()
        return judge([product[band] for band in seen])

    return [
        *(
            Contestant(
                name + (f" ({NUMPY_INTEGER_ROWS} rows)" if share < 1 else ""),
                run,
                functools.partial(check, run, theirs, bands[:1] if share < 1 else bands),
                peer=True,
                work=case.operations * share,
            )
            for name, run in peers
        ),
        Contestant("tilewright (CPU)", ours, functools.partial(check, ours, out, bands)),
    ]


@dataclass(frozen=True)
class _Field:
    """Who takes part in a case on a GPU."""

    peers: list[Contestant]
    ours: list[Contestant]
    """What `matmul` chooses first."""
    ladder: list[Contestant]
    """The other kernels that take the problem."""
    search: Search


def _gpu(case: Case, whole_ladder: bool, stack: contextlib.ExitStack) -> _Field:
    from numba import cuda

    from tilewright.kernels.gemm.cores.repitch import as_bits
    from tilewright.kernels.passes.transpose_device import transpose

    host_a, host_b = case.operands()
    a, b = to_device(np.ascontiguousarray(host_a)), to_device(host_b)
    out = cuda.device_array((case.m, case.n), case.result)
    bands, expected = _bands(case.m), []
    wide = _widest(case.result)
    for band in bands:
        exact = cuda.device_array((band.stop - band.start, case.n), wide)
        TILED.launch(a[band], b, exact, False, DEFAULT_STREAM)
        expected.append(exact.copy_to_host())
    judge = _judge(case, host_a, host_b, bands, expected)

    def check(run: Callable[[], Any]) -> str | None:
        out.gpu_data.memset(0xFF)  # NaN, or -1: what is not written shows
        run()
        return judge([out[band].copy_to_host() for band in bands])

    def check_half(run: Callable[[], Any]) -> str | None:
        def mirrored() -> None:
            run()
            transpose(as_bits(out), as_bits(out), DEFAULT_STREAM, swap=False, same=True)

        return check(mirrored)

    def contestant(
        name: str, run: Callable[[], Any], check: Callable[[Callable[[], Any]], str | None] = check
    ) -> Contestant:
        return Contestant(name, run, functools.partial(check, run))

    problem = gemm_peers.Problem(
        Sides(case.m, case.n, case.k),
        case.dtype,
        case.result,
        case.precision,
        SMALL if case.small else None,
        (host_a, host_b),
        a,
        b,
        out,
        check,
        check_half if case.gram else None,
    )
    peers = gemm_peers.gpu_peers(problem, stack)
    kept, searched = search(str(case), case.operations, peers.candidates, on_gpu=True)
    others, refused = taken(peers.others)
    searched = dataclasses.replace(searched, refused=(*searched.refused, *refused, *peers.refused))
    kept += others

    def chosen(right: Any = b, transpose_b: bool = False) -> None:
        matmul(a, right, out, transpose_b=transpose_b, dtype=case.result, precision=case.precision)

    name = kernel_name(a, b, out, dtype=case.result, precision=case.precision)
    ours, rest = [contestant(CHOSEN + name, chosen)], []
    if case.gram:

        def symmetric(*, lower: bool) -> None:
            matmul(b, b, out, transpose_a=True, dtype=case.result, precision=case.precision, lower=lower)

        both, half = (functools.partial(symmetric, lower=lower) for lower in (False, True))
        ours = [
            contestant(f"{CHOSEN}{name}, mirrored", both),
            contestant(f"{CHOSEN}{name}, lower half", half, check_half),
            contestant(f"{CHOSEN}{name}, as two matrices", chosen),
        ]
    elif case.dtype.itemsize <= 2:
        # Narrow peers are fastest with B by columns, which they are given for free: so ours is shown that way too.
        columns = gemm_peers.turned(b)
        by_columns = functools.partial(chosen, columns, transpose_b=True)
        ours.append(contestant(f"{CHOSEN}{name}, B by columns", by_columns))
        searched = dataclasses.replace(searched, turning_seconds=gemm_peers.turning_seconds(problem))
    if whole_ladder:
        described = describe(a, b, out, precision=case.precision)
        rest = [
            contestant(kernel.name, functools.partial(kernel.launch, a, b, out, False, DEFAULT_STREAM))
            for kernel in ladder()
            if kernel.supports(described)
            and kernel.name != name
            and not (kernel.portable and case.operations > PORTABLE_OPERATIONS)
        ]
    return _Field(kept, ours, rest, searched)


def _sizes(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> list[Any]:
    found: list[Any] = []
    for text in texts:
        try:
            sides = tuple(int(side) for side in text.lower().replace("×", "x").split("x"))
        except ValueError:
            sides = ()
        if len(sides) not in (1, 3) or min(sides) < 1:
            raise click.BadParameter(f"{text!r} is neither a side, like 4096, nor three, like 64x4096x4096")
        found.append(sides[0] if len(sides) == 1 else sides)
    return found


@click.command("gemm")
@click.option(
    "--size",
    "sizes",
    multiple=True,
    callback=_sizes,
    help="A side, or MxNxK; may be given more than once.  [default: 4096]",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    help=f"May be given more than once; int8->int32 names a wider result.  [default: {', '.join(DTYPES)}]",
)
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice(PRECISIONS),
    help="Of float32, and split of float64 and complex numbers; may be given more than once.  [default: full]",
)
@click.option("--small", is_flag=True, help="Whole numbers of absolute value up to 127 too.")
@click.option("--gram", is_flag=True, help="Multiply a matrix by its own transpose, beside cuBLAS's syrk.")
@click.option("--device", type=click.Choice(DEVICES), default="auto", show_default=True)
@click.option("--chosen-only", is_flag=True, help="Leave out the kernels that matmul would not choose.")
@click.option("--tune", is_flag=True, help="Remember the fastest kernel of each case for matmul to choose.")
@click.option(
    "--calls/--no-calls",
    default=None,
    help="Also time single calls beside calls in a row at sides of 64 to 8192.  [default: on a GPU, where no case is"
    " named and nothing is tuned]",
)
@click.option(
    "--seconds", type=SECONDS, default=2.0, show_default=True, help="Time for each contestant, about."
)
@click.option("--plot", type=Picture(), help="Write a bar plot to this PNG file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    plot: Path | None,
    as_json: bool,
    chosen_only: bool,
    sizes: list[Any],
    dtypes: tuple[str, ...],
    precisions: tuple[PrecisionName, ...],
    calls: bool | None,
    **options: Any,
) -> None:
    """Measure the matrix product beside the vendor's library, after checking every answer.

    The peer is the fastest of all settings of it that were searched, which the report names.
    """
    expect_pictures(plot)
    if calls is None:
        named = sizes or dtypes or precisions or options["tune"] or options["small"] or options["gram"]
        calls = not named and not SIMULATOR and resolve_device(options["device"]) == "cuda"
    report = run_gemm(
        **options,
        sizes=sizes or (4096,),
        dtypes=dtypes or DTYPES,
        precisions=precisions or ("full",),
        calls=calls,
        whole_ladder=not chosen_only,
        progress=tell,
    )
    publish(report, (plot, report.plot), as_json=as_json)
