"""cuBLAS called directly, with what its wrappers leave out: layouts, a workspace, algorithms, and cublasLt's choices.

CuPy and PyTorch call it with whatever suits them (PyTorch's ``_int_mm`` without a workspace, for one). A peer is what
the library itself can do, so here it is called through ctypes. Numbers of enumerations and layouts of structures are
those of ``cublas_api.h``, ``cublasLt.h`` and ``library_types.h`` of CUDA 12 and 13.

A matrix by rows is, to cuBLAS, its transpose by columns: C = A B is asked for as Cᵀ = Bᵀ Aᵀ. In the name of a layout
the first letter therefore stands for B and the second for A, and ``TN``, in which k is contiguous in both, means B by
columns and A by rows.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from ctypes import c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.float8 import E4M3, E5M2

WORKSPACE_NBYTES = 32 << 20
"""What NVIDIA recommends for Hopper; PyTorch's ``_int_mm`` gives none."""
LT_CANDIDATES = 8
"""How many of the algorithms that cublasLt's heuristics propose for one layout are tried."""

OP_N, OP_T = 0, 1
UPPER = 1
"""``cublasFillMode_t``: of a matrix by rows it is the half below the diagonal."""
SYRK_LETTERS = {
    np.dtype(code): letter for code, letter in zip(("f4", "f8", "c8", "c16"), "SDCZ", strict=True)
}
GEMM_DEFAULT, GEMM_DEFAULT_TENSOR_OP, GEMM_AUTOTUNE = -1, 99, 999
ALGORITHMS = {"": GEMM_DEFAULT, ", tensor op": GEMM_DEFAULT_TENSOR_OP, ", autotune": GEMM_AUTOTUNE}
"""What `cublasGemmEx` takes. The numbered algorithms between do the same as the default from compute capability 8.0
on; autotune, which times algorithms in its first call, is new in CUDA 13."""
COMPUTE_32F, COMPUTE_32F_PEDANTIC, COMPUTE_64F, COMPUTE_64F_PEDANTIC, COMPUTE_32I = 68, 69, 70, 71, 72
COMPUTE_64F_EMULATED_FIXEDPOINT = 79
COMPUTE_32F_FAST_16F, COMPUTE_32F_FAST_16BF, COMPUTE_32F_FAST_TF32, COMPUTE_32F_EMULATED_16BFX9 = (
    74,
    75,
    77,
    78,
)
MATMUL_DESC_TRANSA, MATMUL_DESC_TRANSB, MATMUL_DESC_FAST_ACCUM = 3, 4, 25
MATMUL_PREF_MAX_WORKSPACE_BYTES = 1
STATUSES = {
    0: "CUBLAS_STATUS_SUCCESS",
    1: "CUBLAS_STATUS_NOT_INITIALIZED",
    3: "CUBLAS_STATUS_ALLOC_FAILED",
    7: "CUBLAS_STATUS_INVALID_VALUE",
    8: "CUBLAS_STATUS_ARCH_MISMATCH",
    11: "CUBLAS_STATUS_MAPPING_ERROR",
    13: "CUBLAS_STATUS_EXECUTION_FAILED",
    14: "CUBLAS_STATUS_INTERNAL_ERROR",
    15: "CUBLAS_STATUS_NOT_SUPPORTED",
    16: "CUBLAS_STATUS_LICENSE_ERROR",
}
DATA_TYPES = {
    np.dtype(np.float32): 0,
    np.dtype(np.float64): 1,
    np.dtype(np.float16): 2,
    np.dtype(np.int8): 3,
    np.dtype(np.complex64): 4,
    np.dtype(np.complex128): 5,
    np.dtype(np.int32): 10,
    BFLOAT16: 14,
    E4M3: 28,
    E5M2: 29,
}
"""``cudaDataType_t`` of elements."""
LAYOUTS = {"NN": (False, False), "TN": (True, False), "NT": (False, True), "TT": (True, True)}
"""Whether B, and whether A, lies by columns."""

Call = Callable[[], None]


class CublasError(RuntimeError):
    """A function of cuBLAS answered with another status than success."""

    def __init__(self, function: str, status: int) -> None:
        super().__init__(f"{function}: {STATUSES.get(status, f'status {status}')}")
        self.status = status


class MatmulAlgorithm(ctypes.Structure):
    """``cublasLtMatmulAlgo_t``"""

    _fields_ = (("data", c_uint64 * 8),)


class MatmulHeuristicResult(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``"""

    _fields_ = (
        ("algorithm", MatmulAlgorithm),
        ("workspace_nbytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass(frozen=True)
class Arithmetic:
    """Element types of A and B, and of C, and the ``cublasComputeType_t`` of products and sums."""

    operands: np.dtype
    result: np.dtype
    compute: int
    name: str = ""
    """What tells it from the others of a case."""
    fast_sums: bool = False
    """Whether float8 products are added up by the tensor cores alone, which keep few bits of the sum."""

    @property
    def scale(self) -> np.dtype:
        """The type of alpha and beta."""
        if self.compute == COMPUTE_32I:
            return np.dtype(np.int32)
        double = self.compute in (COMPUTE_64F, COMPUTE_64F_PEDANTIC)
        if self.result.kind == "c":
            return np.dtype(np.complex128 if double else np.complex64)
        return np.dtype(np.float64 if double else np.float32)


@dataclass(frozen=True)
class Stored:
    """A matrix as cuBLAS reads it: where it begins, elements from column to column, and whether it is transposed."""

    pointer: int
    leading: int
    transposed: bool

    @property
    def operation(self) -> int:
        return OP_T if self.transposed else OP_N


@dataclass(frozen=True)
class Sides:
    """m × k by k × n, all in C's order."""

    m: int
    n: int
    k: int


_GEMM_EX = (
    *(c_void_p, c_int, c_int, c_int, c_int, c_int, c_void_p),  # handle, operations, sides, alpha
    *(c_void_p, c_int, c_int, c_void_p, c_int, c_int, c_void_p),  # A, type, leading; B, type, leading; beta
    *(c_void_p, c_int, c_int, c_int, c_int),  # C, type, leading; compute type, algorithm
)
_GEMM_3M = (
    *(c_void_p, c_int, c_int, c_int, c_int, c_int, c_void_p),
    *(
        c_void_p,
        c_int,
        c_void_p,
        c_int,
        c_void_p,
        c_void_p,
        c_int,
    ),  # A, leading; B, leading; beta; C, leading
)
_SYRK = (
    *(c_void_p, c_int, c_int, c_int, c_int, c_void_p),  # handle, which half, operation, sides, alpha
    *(c_void_p, c_int, c_void_p, c_void_p, c_int),  # A, leading; beta; C, leading
)
_BLAS = {
    "cublasCreate_v2": (c_void_p,),
    "cublasDestroy_v2": (c_void_p,),
    "cublasGetVersion_v2": (c_void_p, c_void_p),
    "cublasSetWorkspace_v2": (c_void_p, c_void_p, c_size_t),
    "cublasGemmEx": _GEMM_EX,
    "cublasCgemm3m": _GEMM_3M,
    "cublasZgemm3m": _GEMM_3M,
    **{f"cublas{letter}syrk_v2": _SYRK for letter in "SDCZ"},
}
_LT = {
    "cublasLtCreate": (c_void_p,),
    "cublasLtDestroy": (c_void_p,),
    "cublasLtMatmulDescCreate": (c_void_p, c_int, c_int),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulDescDestroy": (c_void_p,),
    "cublasLtMatrixLayoutCreate": (c_void_p, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatrixLayoutDestroy": (c_void_p,),
    "cublasLtMatmulPreferenceCreate": (c_void_p,),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulPreferenceDestroy": (c_void_p,),
    "cublasLtMatmulAlgoGetHeuristic": (*(c_void_p,) * 7, c_int, c_void_p, c_void_p),
    "cublasLtMatmul": (
        *(c_void_p, c_void_p, c_void_p),  # handle, operation, alpha
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),  # A, layout; B, layout; beta
        *(c_void_p, c_void_p, c_void_p, c_void_p),  # C, layout; D, layout
        *(c_void_p, c_void_p, c_size_t, c_void_p),  # algorithm, workspace and its bytes, stream
    ),
}


class _Library:
    """Functions of a library, which raise CublasError where they fail."""

    def __init__(self, library: Any, signatures: dict[str, tuple[Any, ...]]) -> None:
        self._functions = {}
        for name, types in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, c_int
            self._functions[name] = function

    def prepared(self, name: str, *arguments: Any) -> Call:
        """A call with these arguments, which the caller keeps alive."""
        function = self._functions[name]

        def call() -> None:
            status = function(*arguments)
            if status:
                raise CublasError(name, status)

        return call

    def call(self, name: str, *arguments: Any) -> None:
        self.prepared(name, *arguments)()

    def made(self, name: str, *arguments: Any) -> c_void_p:
        """What a function writes to where its first argument points."""
        handle = c_void_p()
        self.call(name, ctypes.byref(handle), *arguments)
        return handle


class Cublas:
    """A handle of cuBLAS and one of cublasLt on the current device's default stream, and a workspace of theirs."""

    def __init__(self, blas: Any, lt: Any, workspace: int, workspace_nbytes: int) -> None:
        """blas, lt: the libraries, as ctypes loads them. workspace: an address in device memory that outlives this."""
        self._stack = contextlib.ExitStack()
        self._blas, self._lt = _Library(blas, _BLAS), _Library(lt, _LT)
        self._workspace, self._workspace_nbytes = workspace, workspace_nbytes
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._stack)
            self._handle = self._made(self._blas, "cublasCreate_v2", "cublasDestroy_v2")
            self._lt_handle = self._made(self._lt, "cublasLtCreate", "cublasLtDestroy")
            self._blas.call("cublasSetWorkspace_v2", self._handle, workspace, workspace_nbytes)
            undo.pop_all()

    def _made(self, library: _Library, create: str, destroy: str, *arguments: Any) -> c_void_p:
        handle = library.made(create, *arguments)
        self._stack.callback(library.call, destroy, handle)
        return handle

    def close(self) -> None:
        """Destroy all that was made here. The device must have finished with it."""
        self._stack.close()

    @property
    def version(self) -> str:
        """Such as 13.0.2."""
        found = c_int()
        self._blas.call("cublasGetVersion_v2", self._handle, ctypes.byref(found))
        major, rest = divmod(found.value, 10000)
        return f"{major}.{rest // 100}.{rest % 100}"

    def gemm_ex(
        self,
        arithmetic: Arithmetic,
        algorithm: int,
        sides: Sides,
        b: Stored,
        a: Stored,
        out: int,
        out_leading: int,
    ) -> Call:
        """`cublasGemmEx` for rows and columns of C at the address ``out``; raises CublasError when called where cuBLAS
        does not take the combination."""
        one, zero = np.ones(1, arithmetic.scale), np.zeros(1, arithmetic.scale)
        kind = DATA_TYPES[arithmetic.operands]
        call = self._blas.prepared(
            "cublasGemmEx",
            *(self._handle, b.operation, a.operation, sides.n, sides.m, sides.k, one.ctypes.data),
            *(b.pointer, kind, b.leading, a.pointer, kind, a.leading, zero.ctypes.data),
            *(out, DATA_TYPES[arithmetic.result], out_leading, arithmetic.compute, algorithm),
        )
        return keeping(call, one, zero)

    def gemm_3m(self, result: np.dtype, sides: Sides, b: Stored, a: Stored, out: int) -> Call:
        """A complex product by three real ones instead of four: fewer operations, and a weaker bound on its errors."""
        one, zero = np.ones(1, result), np.zeros(1, result)
        call = self._blas.prepared(
            "cublasCgemm3m" if result == np.complex64 else "cublasZgemm3m",
            *(self._handle, b.operation, a.operation, sides.n, sides.m, sides.k, one.ctypes.data),
            *(b.pointer, b.leading, a.pointer, a.leading, zero.ctypes.data, out, sides.n),
        )
        return keeping(call, one, zero)

    def syrk(self, dtype: np.dtype, half: int, side: int, k: int, x: Stored, out: int) -> Call:
        """One half of XᵀX (side × side), X being k × side by rows if ``x`` is not transposed, else by columns."""
        one, zero = np.ones(1, dtype), np.zeros(1, dtype)
        call = self._blas.prepared(
            f"cublas{SYRK_LETTERS[dtype]}syrk_v2",
            *(self._handle, half, x.operation, side, k, one.ctypes.data),
            *(x.pointer, x.leading, zero.ctypes.data, out, side),
        )
        return keeping(call, one, zero)

    def lt_matmuls(
        self, arithmetic: Arithmetic, sides: Sides, b: Stored, a: Stored, out: int, most: int = LT_CANDIDATES
    ) -> list[Call]:
        """`cublasLtMatmul` by each of the algorithms that its heuristics propose, the most promising first.

        Raises CublasError where it has none.
        """
        operands, result = DATA_TYPES[arithmetic.operands], DATA_TYPES[arithmetic.result]
        operation = self._made(
            self._lt,
            "cublasLtMatmulDescCreate",
            "cublasLtMatmulDescDestroy",
            arithmetic.compute,
            DATA_TYPES[arithmetic.scale],
        )
        for attribute, matrix in ((MATMUL_DESC_TRANSA, b), (MATMUL_DESC_TRANSB, a)):
            value = ctypes.c_int32(matrix.operation)
            size = ctypes.sizeof(value)
            self._lt.call("cublasLtMatmulDescSetAttribute", operation, attribute, ctypes.byref(value), size)
        if arithmetic.fast_sums:
            yes = ctypes.c_int8(1)
            self._lt.call(
                "cublasLtMatmulDescSetAttribute",
                *(operation, MATMUL_DESC_FAST_ACCUM, ctypes.byref(yes), ctypes.sizeof(yes)),
            )
        b_layout = self._layout(operands, sides.n, sides.k, b)
        a_layout = self._layout(operands, sides.k, sides.m, a)
        c_layout = self._layout(result, sides.n, sides.m, Stored(out, sides.n, False))
        preference = self._made(self._lt, "cublasLtMatmulPreferenceCreate", "cublasLtMatmulPreferenceDestroy")
        limit = c_uint64(self._workspace_nbytes)
        self._lt.call(
            "cublasLtMatmulPreferenceSetAttribute",
            *(preference, MATMUL_PREF_MAX_WORKSPACE_BYTES, ctypes.byref(limit), ctypes.sizeof(limit)),
        )
        found, count = (MatmulHeuristicResult * most)(), c_int()
        self._lt.call(
            "cublasLtMatmulAlgoGetHeuristic",
            *(self._lt_handle, operation, b_layout, a_layout, c_layout, c_layout, preference),
            *(most, ctypes.byref(found), ctypes.byref(count)),
        )
        one, zero = np.ones(1, arithmetic.scale), np.zeros(1, arithmetic.scale)
        calls = []
        for heuristic in found[: count.value]:
            if heuristic.state:
                continue
            call = self._lt.prepared(
                "cublasLtMatmul",
                *(self._lt_handle, operation, one.ctypes.data),
                *(b.pointer, b_layout, a.pointer, a_layout, zero.ctypes.data),
                *(out, c_layout, out, c_layout),
                *(ctypes.addressof(heuristic.algorithm), self._workspace, self._workspace_nbytes, None),
            )
            calls.append(keeping(call, one, zero, found))
        return calls

    def _layout(self, kind: int, rows: int, columns: int, matrix: Stored) -> c_void_p:
        """The description of a matrix that is rows × columns once ``matrix.operation`` is applied."""
        stored = (columns, rows) if matrix.transposed else (rows, columns)
        return self._made(
            self._lt,
            "cublasLtMatrixLayoutCreate",
            "cublasLtMatrixLayoutDestroy",
            *(kind, *stored, matrix.leading),
        )


def keeping(call: Call, *kept: Any) -> Call:
    """The same call, which keeps what its arguments point to alive, besides what it keeps already."""
    call.__dict__["kept"] = (*call.__dict__.get("kept", ()), *kept)
    return call


@contextlib.contextmanager
def opened() -> Iterator[Cublas]:
    """cuBLAS as CuPy or PyTorch have loaded it, else as it is installed; raises OSError where it is nowhere."""
    from numba import cuda

    from tilewright.kernels.gpu.device_array import address

    blas, lt = (ctypes.CDLL(library_path(name)) for name in ("cublas", "cublasLt"))
    workspace = cuda.device_array(WORKSPACE_NBYTES, np.uint8)
    found = Cublas(blas, lt, address(workspace), WORKSPACE_NBYTES)
    try:
        yield found
    finally:
        cuda.synchronize()
        found.close()


def library_path(name: str, maps: Path = Path("/proc/self/maps")) -> str:
    """Where a library of CUDA lies, ``cublas`` for one: the one in this process, the newest of several, else the one
    that is installed; raises OSError where there is none."""
    prefix = f"lib{name}.so"
    loaded = {line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines() if prefix in line}
    loaded = {path for path in loaded if Path(path).name.partition(".so")[0] + ".so" == prefix}
    if loaded:
        return max(loaded, key=_release)
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        found = load_nvidia_dynamic_lib(name).abs_path
    except Exception as error:  # it has a kind of its own for each way not to find a library
        raise OSError(f"{prefix} is neither loaded nor found ({error})") from None
    if found is None:
        raise OSError(f"{prefix} is neither loaded nor found")
    return str(found)


def _release(path: str) -> tuple[int, ...]:
    return tuple(int(part) for part in Path(path).name.partition(".so")[2].split(".") if part.isdigit())
