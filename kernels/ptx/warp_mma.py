"""A warp's tensor cores (``mma.sync``): products of float64 and of bytes, and matrices to and from shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from tilewright.kernels.ptx.lowering import U32, are_arrays, element_pointer, scalar_instruction


def _multiply_native(k: int) -> Callable[..., list[Any]]:
    """``mma.sync.m16n8k{k}`` for float64, new in compute capability 9.0."""
    double = ir.DoubleType()
    inputs = [f"${4 + i}" for i in range(3 * k // 4)]
    sums = "{$0, $1, $2, $3}"
    text = (
        f"mma.sync.aligned.m16n8k{k}.row.col.f64.f64.f64.f64 {sums}, "
        f"{{{', '.join(inputs[: k // 2])}}}, {{{', '.join(inputs[k // 2 :])}}}, {sums};"
    )
    constraints = ",".join(["=d"] * 4 + ["d"] * len(inputs) + ["0", "1", "2", "3"])
    function = ir.FunctionType(ir.LiteralStructType([double] * 4), [double] * (len(inputs) + 4))
    instruction = ir.InlineAsm(function, text, constraints)

    def emit(builder: Any, c: list[Any], a: list[Any], b: list[Any]) -> list[Any]:
        result = builder.call(instruction, [*a, *b, *c])
        return [builder.extract_value(result, i) for i in range(4)]

    return emit


def _multiply_8x8x4(k: int) -> Callable[..., list[Any]]:
    """The same product from ``mma.sync.m8n8k4``, the one float64 shape of compute capability 8.0.

    The larger shape's fragments are made of the smaller one's: A's register 2 j + h holds half h of the rows
    at step j of four k, B's register j the same k, and C's registers 2 h and 2 h + 1 half h of the rows.
    """
    double = ir.DoubleType()
    text = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {$0, $1}, {$2}, {$3}, {$0, $1};"
    function = ir.FunctionType(ir.LiteralStructType([double] * 2), [double] * 4)
    instruction = ir.InlineAsm(function, text, "=d,=d,d,d,0,1")

    def emit(builder: Any, c: list[Any], a: list[Any], b: list[Any]) -> list[Any]:
        sums = list(c)
        for j in range(k // 4):
            for half in range(2):
                low, high = 2 * half, 2 * half + 1
                result = builder.call(instruction, [a[2 * j + half], b[j], sums[low], sums[high]])
                sums[low], sums[high] = (builder.extract_value(result, i) for i in range(2))
        return sums

    return emit


def mma_f64(k: int, *, native: bool) -> Callable[..., Any]:
    """``mma(c, c0, a, a0, b, b0)``: a warp adds its 16 × 8 product over ``k`` (4, 8, 16) to registers ``c``.

    The three are float64 register arrays. With g = lane / 4 and t = lane % 4 (PTX ISA, the fragments of
    m16n8k{4,8,16} for float64):

    - ``a[a0 + 2 s + h]`` is A at row g + 8 h, column t + 4 s, for h < 2 and s < k / 4;
    - ``b[b0 + s]`` is B at row t + 4 s, column g;
    - ``c[c0 + 2 h + r]`` is C at row g + 8 h, column 2 t + r, for r < 2.

    ``native`` asks for the instruction of that very shape (compute capability 9.0); without it the product is
    put together from m8n8k4 (8.0).
    """
    multiply = (_multiply_native if native else _multiply_8x8x4)(k)

    @intrinsic
    def mma(typingctx, c, c0, a, a0, b, b0):  # type: ignore[no-untyped-def]
        if not are_arrays(c, a, b):
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def registers(position: int, count: int) -> list[Any]:
                first = element_pointer(
                    context,
                    builder,
                    signature.args[position],
                    arguments[position],
                    signature.args[position + 1],
                    arguments[position + 1],
                )
                return [builder.gep(first, [ir.Constant(ir.IntType(64), i)]) for i in range(count)]

            sums = registers(0, 4)
            operands = [
                [builder.load(register) for register in registers(position, count)]
                for position, count in ((2, k // 2), (4, k // 4))
            ]
            result = multiply(builder, [builder.load(register) for register in sums], *operands)
            for value, register in zip(result, sums, strict=True):
                builder.store(value, register)
            return context.get_dummy_value()

        return types.void(c, c0, a, a0, b, b0), generate

    return mma


MMA_SHAPES = {"s8": "k32", "u8": "k32", "f16": "k16", "bf16": "k16", "tf32": "k8"}
"""Of 32 bytes of k each."""


def mma_lines(kind_a: str, kind_b: str, tiles_m: int, tiles_n: int) -> Callable[..., Any]:
    """``multiply(sums, a, a0, b, b0)``: a warp adds a product of lines 32 bytes deep to its ``sums``.

    ``tiles_m`` × ``tiles_n`` times ``mma.sync.m16n8``, whose operands are ``s8`` or ``u8`` (sums int32), or ``f16``,
    ``bf16`` or ``tf32`` (sums float32). With g = lane / 4 and t = lane % 4 (PTX ISA, the fragments of m16n8k32 for
    8-bit integers, m16n8k16 for 16-bit floats and m16n8k8 for TF32, which are the same bytes), four bytes of a line in
    a uint32:

    - ``a[a0 + 4 i + 2 s + h]`` is A at row 16 i + g + 8 h, bytes 4 t + 16 s to + 3, for h, s < 2;
    - ``b[b0 + 2 j + s]`` is B at column 8 j + g, bytes 4 t + 16 s to + 3;
    - ``sums[4 (tiles_n i + j) + 2 h + r]`` is C at row 16 i + g + 8 h, column 8 j + 2 t + r, for r < 2.

    Sums of integers wrap modulo 2**32; those of floats are truncated.
    """
    word, floats = ir.IntType(32), kind_a not in ("s8", "u8")
    sum_kind, held = ("f32", "f") if floats else ("s32", "r")
    sum_type = ir.FloatType() if floats else word
    text = (
        f"mma.sync.aligned.m16n8{MMA_SHAPES[kind_a]}.row.col.{sum_kind}.{kind_a}.{kind_b}.{sum_kind} "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$0, $1, $2, $3};"
    )
    function = ir.FunctionType(ir.LiteralStructType([sum_type] * 4), [word] * 6 + [sum_type] * 4)
    instruction = ir.InlineAsm(function, text, ",".join([f"={held}"] * 4 + ["r"] * 6 + ["0", "1", "2", "3"]))

    @intrinsic
    def multiply(typingctx, sums, a, a0, b, b0):  # type: ignore[no-untyped-def]
        """Issue the products; see ``mma_lines``."""
        if not are_arrays(sums, a, b):
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def registers(position: int, count: int) -> list[Any]:
                array, kind = arguments[position], signature.args[position]
                index, index_kind = arguments[position + 1], signature.args[position + 1]
                first = element_pointer(context, builder, kind, array, index_kind, index)
                return [builder.gep(first, [ir.Constant(ir.IntType(64), i)]) for i in range(count)]

            left = [builder.load(place) for place in registers(1, 4 * tiles_m)]
            right = [builder.load(place) for place in registers(3, 2 * tiles_n)]
            data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
            for tile in range(tiles_m * tiles_n):
                i, j = divmod(tile, tiles_n)
                places = [builder.gep(data, [ir.Constant(word, 4 * tile + x)]) for x in range(4)]
                operands = [*left[4 * i : 4 * i + 4], *right[2 * j : 2 * j + 2]]
                result = builder.call(instruction, [*operands, *(builder.load(place) for place in places)])
                for x, place in enumerate(places):
                    builder.store(builder.extract_value(result, x), place)
            return context.get_dummy_value()

        return types.void(sums, a, a0, b, b0), generate

    return multiply


def _matrix_load(turned: str) -> Callable[..., Any]:
    """``ldmatrix.x4``, perhaps with ``.trans``."""

    def load(typingctx, registers, first, shared):  # type: ignore[no-untyped-def]
        if not are_arrays(registers) or registers.dtype != types.uint32:
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word = ir.IntType(32)
            address = context.cast(builder, arguments[2], signature.args[2], types.uint32)
            function = ir.FunctionType(ir.LiteralStructType([word] * 4), [word])
            text = f"ldmatrix.sync.aligned.m8n8.x4{turned}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
            assembly = ir.InlineAsm(function, text, "=r,=r,=r,=r,r,~{memory}", side_effect=True)
            loaded = builder.call(assembly, [address])
            target = element_pointer(
                context, builder, signature.args[0], arguments[0], signature.args[1], arguments[1]
            )
            for i in range(4):
                builder.store(builder.extract_value(loaded, i), builder.gep(target, [ir.Constant(word, i)]))
            return context.get_dummy_value()

        return types.void(registers, first, shared), generate

    return intrinsic(load)


load_matrices = _matrix_load("")
"""``load_matrices(registers, first, shared)``, ``ldmatrix.x4``: four matrices of 8 lines × 16 bytes from shared memory
to ``registers[first...]``.

``shared`` is a shared address (uint32), a multiple of 16: lane 8 i + j gives that of line j of matrix i. ``registers``
are uint32; ``registers[first + i]`` becomes bytes 4 (lane mod 4) to + 3 of line lane / 4 of matrix i.
"""

load_turned = _matrix_load(".trans")
"""The same of 8 × 8 elements of 16 bits, turned: ``registers[first + i]`` becomes element lane / 4 of the lines
2 (lane mod 4) and + 1 of matrix i."""

store_matrices = scalar_instruction(
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
    "r,r,r,r,r",
    (U32, U32, U32, U32, U32),
    description="``store_matrices(address, w0, w1, w2, w3)``: a warp's four 8 × 8 matrices of 16 bits to shared "
    "memory. Lane l holds two neighbours of row l / 4 of each, and the address of row l % 8 of matrix l / 8.",
)
