"""What a product on a GPU is compared with: all settings of the vendor's library that could be the fastest.

cuBLAS is called directly (`cublas`), with 32 MiB of workspace, in every layout of A and B, which the peer is given for
free, by each algorithm that `cublasGemmEx` takes and those that cublasLt's heuristics propose, and large products in
pieces too; then through CuPy and PyTorch. `common.search` finds the fastest of these. Where the library has no product
of a type, CuPy's own kernel stands there, and for small integers cuBLAS on operands converted beforehand.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.float8 import FLOAT8, NAMES
from tilewright.kernels.gpu.device_array import address, strided_view, to_device
from tilewright.workflows.bench import cublas
from tilewright.workflows.bench.common import Contestant, library
from tilewright.workflows.bench.cublas import Arithmetic, Call, Cublas, CublasError, Sides, Stored

PIECE = 8192
"""Products with a longer side are also tried in pieces of this many rows or columns of C."""
FLOAT16, FLOAT32, FLOAT64 = (np.dtype(name) for name in ("float16", "float32", "float64"))
INT8, INT32 = np.dtype(np.int8), np.dtype(np.int32)
SMALLEST_EXACT = {INT32: 31, FLOAT64: 53}
"""Bits that a sum of small integers may have in the type in which cuBLAS adds them up."""
BITS: dict[int, np.dtype] = {
    1: np.dtype(np.int8),
    2: np.dtype(np.int16),
    4: np.dtype(np.int32),
    8: np.dtype(np.int64),
}
"""Integers by the bytes of an element: matrices are turned as these, which every library knows."""

Check = Callable[[Callable[[], Any]], str | None]
"""Runs a product and says what is wrong with the matrix C of the case, None if nothing is."""


@dataclass(frozen=True)
class Problem:
    """One product on the device, by rows, and the same matrices on the host."""

    sides: Sides
    dtype: np.dtype
    result: np.dtype
    precision: str
    largest: int | None
    """The largest absolute value of small integers; None of all others."""
    host: tuple[np.ndarray, np.ndarray]
    a: Any
    b: Any
    out: Any
    check: Check
    check_half: Check | None = None
    """The same of the half of C below the diagonal, where A is B transposed; else None."""

    @property
    def key(self) -> tuple[np.dtype, np.dtype, str]:
        return self.dtype, self.result, self.precision

    def exact_in(self, dtype: np.dtype) -> bool:
        """Whether sums of products of small integers, or of bytes, are exact in a type."""
        largest = 128 if self.largest is None and self.dtype == INT8 else self.largest
        return largest is not None and self.sides.k * largest**2 < 1 << SMALLEST_EXACT[dtype]


def arithmetics() -> dict[tuple[np.dtype, np.dtype, str], tuple[Arithmetic, ...]]:
    """By element type, type of C and precision: what cuBLAS can do on these very operands, no less exact than asked."""
    single = Arithmetic(FLOAT32, FLOAT32, cublas.COMPUTE_32F)
    pedantic = Arithmetic(FLOAT32, FLOAT32, cublas.COMPUTE_32F_PEDANTIC, "pedantic")
    emulated = Arithmetic(FLOAT32, FLOAT32, cublas.COMPUTE_32F_EMULATED_16BFX9, "by nine bfloat16 products")
    found: dict[tuple[np.dtype, np.dtype, str], tuple[Arithmetic, ...]] = {
        (FLOAT32, FLOAT32, "full"): (single, pedantic),
        (FLOAT32, FLOAT32, "split"): (single, pedantic, emulated),
        (INT8, INT32, "full"): (Arithmetic(INT8, INT32, cublas.COMPUTE_32I),),
    }
    for precision, compute in (
        ("tf32", cublas.COMPUTE_32F_FAST_TF32),
        ("bf16", cublas.COMPUTE_32F_FAST_16BF),
        ("fp16", cublas.COMPUTE_32F_FAST_16F),
    ):
        found[FLOAT32, FLOAT32, precision] = (Arithmetic(FLOAT32, FLOAT32, compute, precision),)
    for half in (FLOAT16, BFLOAT16):
        for result in (half, FLOAT32):
            found[half, result, "full"] = (Arithmetic(half, result, cublas.COMPUTE_32F),)
    for kind, compute, strict in (
        (np.dtype(np.complex64), cublas.COMPUTE_32F, cublas.COMPUTE_32F_PEDANTIC),
        (FLOAT64, cublas.COMPUTE_64F, cublas.COMPUTE_64F_PEDANTIC),
        (np.dtype(np.complex128), cublas.COMPUTE_64F, cublas.COMPUTE_64F_PEDANTIC),
    ):
        found[kind, kind, "full"] = (
            Arithmetic(kind, kind, compute),
            Arithmetic(kind, kind, strict, "pedantic"),
        )
    for kind in (np.dtype(np.complex64), np.dtype(np.complex128)):
        found[kind, kind, "split"] = found[kind, kind, "full"]
    fixed = Arithmetic(FLOAT64, FLOAT64, cublas.COMPUTE_64F_EMULATED_FIXEDPOINT, "by fixed-point products")
    found[FLOAT64, FLOAT64, "split"] = (*found[FLOAT64, FLOAT64, "full"], fixed)
    return found


@dataclass(frozen=True)
class Peers:
    """Who a product is compared with."""

    candidates: list[Contestant]
    """The settings that are searched for the strongest."""
    others: list[Contestant]
    """What is timed beside them and is no peer, since its errors have a weaker bound."""
    refused: list[tuple[str, str]]
    """What is not among them, with the reason: cuBLAS's own calls without its library, a caller that failed."""


def gpu_peers(problem: Problem, stack: contextlib.ExitStack) -> Peers:
    """All of a problem; ``stack`` undoes what they change, and frees what they hold once they have run."""
    found: list[Contestant] = []
    others: list[Contestant] = []
    refused: list[tuple[str, str]] = []
    for name in (
        "cupy_backends.cuda.libs.cublas",
        "torch",
    ):  # so that theirs is the cuBLAS that is found loaded
        library(name)
    try:
        blas = stack.enter_context(cublas.opened())
    except (OSError, AttributeError, CublasError) as error:  # no library, one without a function, no handle
        refused.append(("cublasGemmEx, cublasLtMatmul", str(error)))
    else:
        found += _direct(problem, blas)
        if problem.result.kind == "c":
            others.append(_by_three_products(problem, blas))
        if problem.dtype in FLOAT8:
            found += _float8(problem, blas, fast_sums=False)
            others += _float8(problem, blas, fast_sums=True)
        if (
            problem.check_half is not None
            and problem.dtype in cublas.SYRK_LETTERS
            and problem.precision == "full"
        ):
            found += _halves(problem, blas)
    for caller, offers in (("CuPy", _cupy), ("PyTorch", _torch)):
        try:
            found += [_contestant(problem, name, run, caller) for name, run in offers(problem, stack)]
        except (
            Exception
        ) as error:  # of kinds of their own, where a release does not take such an array or option
            refused.append((caller, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))
    return Peers(found, others, refused)


def _float8(problem: Problem, blas: Cublas, *, fast_sums: bool) -> Iterator[Contestant]:
    """cublasLt's float8 product, which it has for k contiguous in both factors. fast_sums: with sums that the tensor
    cores add up over all of k, whose errors have a weaker bound."""
    operands = Operands(problem.a, problem.b)
    ((layout, b, a),) = _layouts(operands, ("TN",))
    kind = Arithmetic(problem.dtype, problem.result, cublas.COMPUTE_32F, fast_sums=fast_sums)
    name = f"cublasLt {layout}" + ", fast sums, weaker error bound" * fast_sums

    def contestant(name: str, product: Call) -> Contestant:
        run = functools.partial(_in_order, product, None, operands)
        return _contestant(problem, name, run, "" if fast_sums else "cuBLAS", peer=not fast_sums)

    return _proposed(contestant, blas, kind, problem.sides, b, a, address(problem.out), name)


def _by_three_products(problem: Problem, blas: Cublas) -> Contestant:
    """cuBLAS's complex product by three real ones."""
    operands = Operands(problem.a, problem.b)
    ((_, b, a),) = _layouts(operands, ("NN",))
    product = blas.gemm_3m(problem.result, problem.sides, b, a, address(problem.out))
    run = functools.partial(_in_order, product, None, operands)
    return _contestant(problem, "cuBLAS gemm3m, weaker error bound", run, "", peer=False)


def _halves(problem: Problem, blas: Cublas) -> Iterator[Contestant]:
    """The half of C below the diagonal by cuBLAS's syrk, of B by rows and by columns."""
    sides, check = problem.sides, problem.check_half
    assert check is not None
    columns = turned(problem.b)  # n × k by rows
    for layout, x in (
        ("by rows", Stored(address(problem.b), sides.n, False)),
        ("by columns", Stored(address(columns), sides.k, True)),
    ):
        call = blas.syrk(problem.dtype, cublas.UPPER, sides.n, sides.k, x, address(problem.out))
        run = cublas.keeping(call, columns)
        yield Contestant(f"syrk {layout}", run, functools.partial(check, run), True, caller="cuBLAS")


def _contestant(
    problem: Problem, name: str, run: Callable[[], Any], caller: str, *, peer: bool = True
) -> Contestant:
    return Contestant(name, run, functools.partial(problem.check, run), peer, caller=caller)


class Operands:
    """A and B by rows as they are, and by columns where a layout asks for it: copies, made once."""

    def __init__(self, a: Any, b: Any) -> None:
        """a: m × k, b: k × n, Numba device arrays by rows."""
        self.a, self.b = a, b
        self._turned: dict[str, Any] = {}

    def stored(self, name: str, by_columns: bool) -> Stored:
        """The matrix ``a`` or ``b`` for cuBLAS, to which one by rows is its transpose."""
        matrix = getattr(self, name)
        if not by_columns:
            return Stored(address(matrix), matrix.shape[1], False)
        if name not in self._turned:
            self._turned[name] = turned(matrix)
        return Stored(address(self._turned[name]), matrix.shape[0], True)


def _layouts(operands: Operands, names: tuple[str, ...]) -> Iterator[tuple[str, Stored, Stored]]:
    for name in names:
        b_by_columns, a_by_columns = cublas.LAYOUTS[name]
        yield name, operands.stored("b", b_by_columns), operands.stored("a", a_by_columns)


def turned(matrix: Any) -> Any:
    """The transpose of a device matrix by rows, itself by rows: a copy."""
    rows, columns = matrix.shape
    kind = BITS.get(matrix.dtype.itemsize, matrix.dtype)
    bits = strided_view(matrix, matrix.shape, matrix.strides, kind)
    copy = strided_copy(bits)
    return strided_view(copy, (columns, rows), (rows * kind.itemsize, kind.itemsize), matrix.dtype)


def strided_copy(bits: Any) -> Any:
    """A Numba device array, by rows, of the transpose of one: by whichever library is there."""
    from numba import cuda

    cupy, torch = library("cupy"), library("torch")
    if cupy is not None:
        copy = cupy.ascontiguousarray(cupy.asarray(bits).T)
    elif torch is not None:
        copy = torch.as_tensor(bits, device="cuda").t().contiguous()
    else:
        return to_device(np.ascontiguousarray(bits.copy_to_host().T))
    return cuda.as_cuda_array(copy)


def _direct(problem: Problem, blas: Cublas) -> list[Contestant]:
    """`cublasGemmEx` and `cublasLtMatmul` on the operands as they are, and on converted ones where that is a peer."""
    found: list[Contestant] = []
    by_key = arithmetics()
    if problem.key in by_key:
        operands = Operands(problem.a, problem.b)
        found += _settings(problem, blas, operands, by_key[problem.key], address(problem.out), "", None)
    if problem.precision in ("bf16", "fp16"):
        half = BFLOAT16 if problem.precision == "bf16" else FLOAT16
        converted = _converted(problem, half)
        if converted is not None:
            exact = by_key[half, FLOAT32, "full"]
            out = address(problem.out)
            found += _settings(problem, blas, converted, exact, out, ", operands converted beforehand", None)
    if problem.result.kind in "iu" and problem.key not in by_key:
        found += _integers(problem, blas)
    return found


def _integers(problem: Problem, blas: Cublas) -> Iterator[Contestant]:
    """Products of integers that are known to be small, or of bytes, by types that cuBLAS has: exact, and converted to
    the type of C in the same run where that is another."""
    cupy = library("cupy")
    for sums, narrow, compute in (
        (INT32, INT8, cublas.COMPUTE_32I),
        (FLOAT64, FLOAT64, cublas.COMPUTE_64F),
    ):
        if not problem.exact_in(sums) or (sums != problem.result and cupy is None):
            continue
        operands = _converted(problem, narrow)
        if operands is None:
            continue
        out, finish = problem.out, None
        if sums != problem.result:
            from numba import cuda

            out = cuda.device_array(problem.out.shape, sums)
            source, target = cupy.asarray(out), cupy.asarray(problem.out)
            finish = functools.partial(cupy.copyto, target, source, casting="unsafe")
        note = (
            ""
            if narrow == problem.dtype
            else f", operands known to be small, converted to {narrow} beforehand"
        )
        yield from _settings(
            problem, blas, operands, (Arithmetic(narrow, sums, compute),), address(out), note, finish, out
        )


def _converted(problem: Problem, dtype: np.dtype) -> Operands | None:
    """The operands in another type; None where NumPy has no such conversion (bfloat16 without ml_dtypes)."""
    if dtype == problem.dtype:
        return Operands(problem.a, problem.b)
    if dtype.names is not None:
        return None
    return Operands(*(to_device(matrix.astype(dtype)) for matrix in problem.host))


def _settings(
    problem: Problem,
    blas: Cublas,
    operands: Operands,
    kinds: tuple[Arithmetic, ...],
    out: int,
    note: str,
    finish: Callable[[], Any] | None,
    *kept: Any,
) -> Iterator[Contestant]:
    """Every setting of the direct calls; ``finish`` follows each product, ``kept`` is kept alive by them."""
    sides = problem.sides

    def contestant(name: str, product: Call) -> Contestant:
        run = functools.partial(_in_order, product, finish, operands, *kept)
        return _contestant(problem, name + note, run, "cuBLAS")

    for kind in kinds:
        label = f" {kind.name}" * bool(kind.name)
        for layout, b, a in _layouts(operands, tuple(cublas.LAYOUTS)):
            name = f"cublasGemmEx{label} {layout}"
            for suffix, algorithm in cublas.ALGORITHMS.items():
                if algorithm == cublas.GEMM_DEFAULT or layout in ("NN", "TN"):
                    call = blas.gemm_ex(kind, algorithm, sides, b, a, out, sides.n)
                    yield contestant(name + suffix, call)
            if layout not in ("NN", "TN"):
                continue
            for along in ("n", "m"):
                if getattr(sides, along) > PIECE:
                    pieces = list(_pieces(blas, kind, sides, b, a, out, along))
                    run = functools.partial(_all, pieces)
                    yield contestant(f"{name}, {along} in pieces of {PIECE}", run)
            yield from _proposed(contestant, blas, kind, sides, b, a, out, f"cublasLt{label} {layout}")


def _proposed(
    contestant: Callable[[str, Call], Contestant],
    blas: Cublas,
    kind: Arithmetic,
    sides: Sides,
    b: Stored,
    a: Stored,
    out: int,
    name: str,
) -> Iterator[Contestant]:
    try:
        calls = blas.lt_matmuls(kind, sides, b, a, out)
    except CublasError as error:
        yield contestant(name, functools.partial(_refuse, error))
        return
    for place, call in enumerate(calls, 1):
        yield contestant(f"{name}, proposal {place} of {len(calls)}", call)


def _refuse(error: CublasError) -> None:
    raise error


def _pieces(
    blas: Cublas, kind: Arithmetic, sides: Sides, b: Stored, a: Stored, out: int, along: str
) -> Iterator[Call]:
    """Products of `PIECE` columns, or rows, of C each."""
    itemsize, c_itemsize = kind.operands.itemsize, kind.result.itemsize
    whole = getattr(sides, along)
    for start in range(0, whole, PIECE):
        count = min(PIECE, whole - start)
        if along == "n":
            step = b.leading if b.transposed else 1
            part = Stored(b.pointer + start * step * itemsize, b.leading, b.transposed)
            at = out + start * c_itemsize
            yield blas.gemm_ex(
                kind, cublas.GEMM_DEFAULT, Sides(sides.m, count, sides.k), part, a, at, sides.n
            )
        else:
            step = 1 if a.transposed else a.leading
            part = Stored(a.pointer + start * step * itemsize, a.leading, a.transposed)
            at = out + start * sides.n * c_itemsize
            yield blas.gemm_ex(
                kind, cublas.GEMM_DEFAULT, Sides(count, sides.n, sides.k), b, part, at, sides.n
            )


def _in_order(product: Call, finish: Callable[[], Any] | None, *_: Any) -> None:
    product()
    if finish is not None:
        finish()


def _all(calls: list[Call]) -> None:
    for call in calls:
        call()


def _cupy(problem: Problem, stack: contextlib.ExitStack) -> Iterator[tuple[str, Callable[[], Any]]]:
    cupy = library("cupy")
    if (
        cupy is None
        or problem.dtype != problem.result
        or problem.result == BFLOAT16
        or problem.precision not in ("full", "split", "tf32")
    ):
        return
    left, right, product = (cupy.asarray(array) for array in (problem.a, problem.b, problem.out))
    name = "cupy.matmul" if problem.result.kind in "iu" else "cuBLAS (CuPy)"
    if problem.precision == "tf32":
        linalg = cupy._core._routines_linalg
        before = linalg.get_compute_type(np.float32)
        stack.callback(linalg.set_compute_type, np.float32, before)
        linalg.set_compute_type(np.float32, linalg.COMPUTE_TYPE_TF32)
        name = "cuBLAS TF32 (CuPy)"
    yield name, functools.partial(cupy.matmul, left, right, out=product)


def _torch(problem: Problem, stack: contextlib.ExitStack) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Products by PyTorch, each with B by rows and by columns: operands and layouts are made beforehand, for free."""
    torch = library("torch")
    if torch is None:
        return
    narrow = {"bf16": "bfloat16", "fp16": "float16"}.get(problem.precision)
    options: dict[str, Any] = {}
    multiply, name = torch.mm, "PyTorch"
    if (problem.dtype, problem.result) == (INT8, INT32):
        multiply, name = torch._int_mm, "PyTorch _int_mm"
    elif problem.result.kind in "iu":
        return  # it multiplies no other integers on a GPU
    elif narrow is not None:
        options, name = {"out_dtype": torch.float32}, f"PyTorch, {narrow} operands"
    elif problem.dtype in FLOAT8:
        yield from _torch_float8(torch, problem)
        return
    elif problem.dtype != problem.result:
        options = {"out_dtype": torch.float32}
    before = torch.get_float32_matmul_precision()
    stack.callback(torch.set_float32_matmul_precision, before)
    torch.set_float32_matmul_precision("high" if problem.precision == "tf32" else "highest")
    left, right, product = (_tensor(torch, array) for array in (problem.a, problem.b, problem.out))
    if narrow is not None:
        left, right = (tensor.to(getattr(torch, narrow)) for tensor in (left, right))
    yield name, functools.partial(multiply, left, right, out=product, **options)
    columns = right.t().contiguous().t()
    yield f"{name}, B by columns", functools.partial(multiply, left, columns, out=product, **options)


def _torch_float8(torch: Any, problem: Problem) -> Iterator[tuple[str, Callable[[], Any]]]:
    """PyTorch's product of float8, scaled by 1: with B by columns, which it takes no other way."""
    left, right = _tensor(torch, problem.a), _tensor(torch, turned(problem.b)).t()
    product, one = _tensor(torch, problem.out), torch.ones((), device="cuda")
    yield (
        "PyTorch _scaled_mm, B by columns",
        functools.partial(
            torch._scaled_mm, left, right, scale_a=one, scale_b=one, out_dtype=torch.float32, out=product
        ),
    )


def _tensor(torch: Any, array: Any) -> Any:
    """The same memory for PyTorch, which takes bfloat16 and float8 by the array interface only as integers."""
    if array.dtype in FLOAT8:
        kind = getattr(torch, NAMES[FLOAT8.index(array.dtype)])
        bits = strided_view(array, array.shape, array.strides, np.dtype(np.uint8))
        return torch.as_tensor(bits, device="cuda").view(kind)
    if array.dtype != BFLOAT16:
        return torch.as_tensor(array, device="cuda")
    bits = strided_view(array, array.shape, array.strides, np.dtype(np.int16))
    return torch.as_tensor(bits, device="cuda").view(torch.bfloat16)


def turning_seconds(problem: Problem) -> float | None:
    """How long CuPy takes to turn B from rows to columns, the median of five; None without it."""
    import statistics

    from tilewright.kernels.gpu.launch import CUDATimer

    cupy = library("cupy")
    if cupy is None:
        return None
    kind = BITS.get(problem.dtype.itemsize, problem.dtype)
    source = cupy.asarray(strided_view(problem.b, problem.b.shape, problem.b.strides, kind)).T
    target = cupy.empty(source.shape, kind)
    times = []
    for _ in range(6):
        with CUDATimer() as timer:
            cupy.copyto(target, source)
        times.append(timer.seconds)
    return statistics.median(times[1:])
