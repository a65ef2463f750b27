"""cuBLAS and cublasLt as Python functions that multiply matrices in host memory: what a call asks for is what it gets.

They read arguments as the headers declare the functions, by columns, and refuse what a library might: other types than
those of `ALLOWED`, bytes that are not k-major or whose leading dimension is no multiple of 4, and `AUTOTUNE`.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

HANDLE, LT_HANDLE = 0x7FFF_1234_5678, 0x7FFF_8765_4321
NOT_INITIALIZED, INVALID_VALUE, NOT_SUPPORTED = 1, 7, 15
AUTOTUNE = 999
WORKSPACE_NBYTES = 32 << 20
TYPES = {
    0: np.float32,
    1: np.float64,
    2: np.float16,
    3: np.int8,
    4: np.complex64,
    5: np.complex128,
    10: np.int32,
    28: ml_dtypes.float8_e4m3fn,
}
ALLOWED = {
    (0, 0, 68): np.float32,
    (0, 0, 69): np.float32,
    (0, 0, 77): np.float32,
    (1, 1, 70): np.float64,
    (1, 1, 71): np.float64,
    (2, 2, 68): np.float32,
    (2, 0, 68): np.float32,
    (3, 10, 72): np.int32,
    (4, 4, 68): np.complex64,
    (4, 4, 69): np.complex64,
    (28, 0, 68): np.float32,
}
"""By the numbers of operands' and C's type and of the compute type: the type of sums, alpha and beta."""
PROPOSALS = 3


def value(argument: Any) -> Any:
    """A number that was passed as it is, or as a ctypes object."""
    return getattr(argument, "value", argument)


def at(pointer: Any, kind: Any) -> Any:
    return np.ctypeslib.as_array((ctypes.c_char * np.dtype(kind).itemsize).from_address(value(pointer))).view(
        kind
    )[0]


def matrix(pointer: Any, kind: Any, rows: int, columns: int, leading: int) -> np.ndarray:
    """A matrix by columns at an address."""
    itemsize = np.dtype(kind).itemsize
    memory = (ctypes.c_char * ((leading * (columns - 1) + rows) * itemsize)).from_address(value(pointer))
    return np.ndarray((rows, columns), kind, memory, strides=(itemsize, leading * itemsize))


def fake(*, wrong: tuple[int, int] = (-1, -1)) -> tuple[Any, list[str]]:
    """A library with all functions, and the names of those that were called. ``wrong``: transpositions of a call of
    `cublasGemmEx` that computes something else."""
    called: list[str] = []
    made: dict[int, Any] = {}

    def product(
        ops: tuple[int, int],
        sides: tuple[int, int, int],
        alpha: Any,
        a: Any,
        b: Any,
        beta: Any,
        c: Any,
        compute: int,
    ) -> int:
        """a, b, c: address, type, leading dimension."""
        sums = ALLOWED.get((a[1], c[1], compute)) if a[1] == b[1] else None
        if sums is None:
            return NOT_SUPPORTED
        if a[1] in (3, 28) and (ops != (1, 0) or a[2] % 4 or b[2] % 4):
            return NOT_SUPPORTED
        m, n, k = sides
        if a[2] < (k if ops[0] else m) or b[2] < (n if ops[1] else k) or c[2] < m:
            return INVALID_VALUE
        assert at(alpha, sums) == 1
        assert at(beta, sums) == 0
        left = matrix(a[0], TYPES[a[1]], *((k, m) if ops[0] else (m, k)), a[2])
        right = matrix(b[0], TYPES[b[1]], *((n, k) if ops[1] else (k, n)), b[2])
        left, right = (left.T if ops[0] else left), (right.T if ops[1] else right)
        matrix(c[0], TYPES[c[1]], m, n, c[2])[...] = left.astype(sums) @ right.astype(sums)
        return 0

    def create(handle: int) -> Any:
        def function(target: Any) -> int:
            target._obj.value = handle
            return 0

        return function

    def take(handle: int) -> Any:
        return lambda given: 0 if value(given) == handle else NOT_INITIALIZED

    def new(target: Any, thing: Any) -> int:
        target._obj.value = len(made) + 1
        made[len(made) + 1] = thing
        return 0

    def gone(given: Any) -> int:
        del made[value(given)]
        return 0

    def version(handle: Any, target: Any) -> int:
        target._obj.value = 130002
        return 0

    def set_workspace(handle: Any, workspace: Any, nbytes: Any) -> int:
        return 0 if value(handle) == HANDLE and value(nbytes) == WORKSPACE_NBYTES else INVALID_VALUE

    def gemm_ex(
        handle: Any, op_a: int, op_b: int, m: int, n: int, k: int, alpha: Any,
        a: int, a_type: int, lda: int, b: int, b_type: int, ldb: int, beta: Any,
        c: int, c_type: int, ldc: int, compute: int, algorithm: int,
    ) -> int:  # fmt: skip
        if value(handle) != HANDLE:
            return NOT_INITIALIZED
        if algorithm == AUTOTUNE:
            return INVALID_VALUE
        status = product(
            (op_a, op_b),
            (m, n, k),
            alpha,
            (a, a_type, lda),
            (b, b_type, ldb),
            beta,
            (c, c_type, ldc),
            compute,
        )
        if not status and (op_a, op_b) == wrong:
            matrix(c, TYPES[c_type], m, n, ldc)[-1, -1] += 1
        return status

    def gemm_3m(
        handle: Any, op_a: int, op_b: int, m: int, n: int, k: int, alpha: Any,
        a: int, lda: int, b: int, ldb: int, beta: Any, c: int, ldc: int,
    ) -> int:  # fmt: skip
        return product((op_a, op_b), (m, n, k), alpha, (a, 4, lda), (b, 4, ldb), beta, (c, 4, ldc), 68)

    def syrk(kind: str) -> Any:
        def half(
            handle: Any, which: int, op: int, n: int, k: int, alpha: Any, a: int, lda: int, beta: Any, c: int, ldc: int
        ) -> int:  # fmt: skip
            if lda < (k if op else n) or ldc < n or which not in (0, 1):
                return INVALID_VALUE
            assert at(alpha, kind) == 1
            assert at(beta, kind) == 0
            x = matrix(a, kind, *((k, n) if op else (n, k)), lda)
            x = x.T if op else x
            out = matrix(c, kind, n, n, ldc)
            wanted = np.triu(np.ones((n, n), bool)) if which else np.tril(np.ones((n, n), bool))
            out[wanted] = (x @ x.T)[wanted]
            return 0

        return half

    def describe(target: Any, compute: int, scale: int) -> int:
        return new(target, {"compute": compute, "scale": scale, 3: 0, 4: 0})

    def set_attribute(description: Any, attribute: int, given: Any, nbytes: int) -> int:
        if (attribute, nbytes) == (25, 1):
            called.append("fast sums")
            return 0
        if attribute not in (3, 4) or nbytes != 4:
            return INVALID_VALUE
        made[value(description)][attribute] = given._obj.value
        return 0

    def layout(target: Any, kind: int, rows: int, columns: int, leading: int) -> int:
        return new(target, (kind, rows, columns, leading)) if leading >= rows else INVALID_VALUE

    def prefer(preference: Any, attribute: int, given: Any, nbytes: int) -> int:
        right = attribute == 1 and nbytes == 8 and given._obj.value == WORKSPACE_NBYTES
        return 0 if right else INVALID_VALUE

    def propose(
        handle: Any,
        operation: Any,
        a: Any,
        b: Any,
        c: Any,
        d: Any,
        preference: Any,
        most: int,
        found: Any,
        count: Any,
    ) -> int:
        described = made[value(operation)]
        kinds = made[value(a)][0], made[value(c)][0], described["compute"]
        sums = ALLOWED.get(kinds)
        if value(handle) != LT_HANDLE or sums is None or TYPES[described["scale"]] != sums:
            return NOT_SUPPORTED
        for place in range(PROPOSALS):  # by bytes, as the header lays them out
            memory = (ctypes.c_char * 96).from_address(ctypes.addressof(found._obj) + 96 * place)
            memory[0:8] = (100 + place).to_bytes(8, "little")
            memory[72:76] = (NOT_SUPPORTED if place == 1 else 0).to_bytes(4, "little")
        count._obj.value = PROPOSALS
        return 0

    def matmul(
        handle: Any, operation: Any, alpha: Any, a: int, a_layout: Any, b: int, b_layout: Any, beta: Any,
        c: int, c_layout: Any, d: int, d_layout: Any, algorithm: int, workspace: int, nbytes: int, stream: Any,
    ) -> int:  # fmt: skip
        chosen = at(algorithm, np.uint64)
        if (
            value(handle) != LT_HANDLE
            or chosen not in (100, 102)
            or nbytes != WORKSPACE_NBYTES
            or c != d
            or stream
        ):
            return INVALID_VALUE
        described = made[value(operation)]
        (a_type, *a_shape, lda), (b_type, *b_shape, ldb), (c_type, *c_shape, ldc) = (
            made[value(given)] for given in (a_layout, b_layout, c_layout)
        )
        m, k = reversed(a_shape) if described[3] else a_shape
        deep, n = reversed(b_shape) if described[4] else b_shape
        if deep != k or c_shape != [m, n]:
            return INVALID_VALUE
        ops = described[3], described[4]
        return product(
            ops,
            (m, n, k),
            alpha,
            (a, a_type, lda),
            (b, b_type, ldb),
            beta,
            (d, c_type, ldc),
            described["compute"],
        )

    functions = {
        "cublasCreate_v2": create(HANDLE),
        "cublasDestroy_v2": take(HANDLE),
        "cublasGetVersion_v2": version,
        "cublasSetWorkspace_v2": set_workspace,
        "cublasGemmEx": gemm_ex,
        "cublasCgemm3m": gemm_3m,
        "cublasZgemm3m": lambda *arguments: NOT_SUPPORTED,
        **{
            f"cublas{letter}syrk_v2": syrk(code)
            for letter, code in zip("SDCZ", ("f4", "f8", "c8", "c16"), strict=True)
        },
        "cublasLtCreate": create(LT_HANDLE),
        "cublasLtDestroy": take(LT_HANDLE),
        "cublasLtMatmulDescCreate": describe,
        "cublasLtMatmulDescSetAttribute": set_attribute,
        "cublasLtMatmulDescDestroy": gone,
        "cublasLtMatrixLayoutCreate": layout,
        "cublasLtMatrixLayoutDestroy": gone,
        "cublasLtMatmulPreferenceCreate": lambda target: new(target, "preference"),
        "cublasLtMatmulPreferenceSetAttribute": prefer,
        "cublasLtMatmulPreferenceDestroy": gone,
        "cublasLtMatmulAlgoGetHeuristic": propose,
        "cublasLtMatmul": matmul,
    }

    def recorded(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> int:
            assert len(arguments) == len(call.argtypes), f"{name}: {len(arguments)} arguments"  # type: ignore[attr-defined]
            called.append(name)
            status: int = function(*arguments)
            return status

        return call

    return SimpleNamespace(**{name: recorded(name, function) for name, function in functions.items()}), called
