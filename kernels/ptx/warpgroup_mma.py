"""Hopper's tensor cores of a warpgroup (``wgmma``): operands in shared memory or registers, sums in registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from tilewright.kernels.ptx.lowering import are_arrays, scalar_instruction

_WGMMA_STEP_NBYTES = 32
"""Bytes of k that one ``wgmma`` consumes, whatever the element type."""

wgmma_fence = scalar_instruction(
    "wgmma.fence.sync.aligned;",
    "",
    (),
    description="Orders the registers' earlier accesses before the products that follow.",
)
wgmma_commit = scalar_instruction(
    "wgmma.commit_group.sync.aligned;", "", (), description="The products issued so far become one group."
)


def wgmma_wait(pending: int) -> Callable[..., Any]:
    """Wait until at most ``pending`` groups of products are under way."""
    return scalar_instruction(f"wgmma.wait_group.sync.aligned {pending};", "", ())


def shared_tile(address: int, leading_nbytes: int, stride_nbytes: int) -> int:
    """What a ``wgmma`` descriptor holds besides the address: 128-byte swizzle and two strides (PTX ISA
    9.7.15.5)."""
    return (1 << 62) | ((stride_nbytes >> 4) << 32) | ((leading_nbytes >> 4) << 16) | (address >> 4)


def wgmma(
    n: int,
    kind: str,
    steps: int,
    *,
    advance_a: int = 32,
    advance_b: int = 32,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> Callable[..., Any]:
    """``multiply(sums, a, b, keep)``: ``steps`` products ``m64n{n}`` of the calling warpgroup.

    ``kind`` is the PTX type string, such as ``s32.s8.s8`` or ``f32.e4m3.e5m2``. ``sums`` is a register array
    of n / 2 int32 or float32; ``a`` and ``b`` are descriptors of tiles in shared memory, moved by
    ``advance_a`` and ``advance_b`` bytes a step. ``keep`` = 0 starts from zero, else the products are added
    to ``sums``.
    """
    registers = n // 2
    itemsizes = {"s8": 1, "u8": 1, "e4m3": 1, "e5m2": 1, "bf16": 2, "f16": 2, "tf32": 4}
    k = _WGMMA_STEP_NBYTES // itemsizes[kind.split(".")[1]]
    integer = kind.startswith("s32")
    outputs = "{" + ", ".join(f"${i}" for i in range(registers)) + "}"
    a, b, keep = (f"${registers + i}" for i in range(3))
    modes = "" if integer else ", 1, 1"
    if kind.split(".")[1] in ("bf16", "f16"):
        modes += f", {int(transpose_a)}, {int(transpose_b)}"
    lines = ["{ .reg .pred p, always; .reg .b64 da, db;"]
    lines.append(f"setp.ne.b32 p, {keep}, 0; setp.eq.b32 always, 0, 0;")
    for step in range(steps):
        lines.append(f"add.s64 da, {a}, {step * advance_a >> 4}; add.s64 db, {b}, {step * advance_b >> 4};")
        scale = "p" if step == 0 else "always"
        lines.append(f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{kind} {outputs}, da, db, {scale}{modes};")
    text = "\n".join([*lines, "}"])
    letter = "r" if integer else "f"
    constraints = ",".join(
        [f"={letter}"] * registers + ["l", "l", "r"] + [str(i) for i in range(registers)] + ["~{memory}"]
    )
    machine = ir.IntType(32) if integer else ir.FloatType()

    @intrinsic
    def multiply(typingctx, sums, a, b, keep):  # type: ignore[no-untyped-def]
        """Issue the products; see ``wgmma``."""
        if not are_arrays(sums):
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
            places = [builder.gep(data, [ir.Constant(ir.IntType(32), i)]) for i in range(registers)]
            values = [builder.load(place) for place in places]
            function = ir.FunctionType(
                ir.LiteralStructType([machine] * registers),
                [ir.IntType(64), ir.IntType(64), ir.IntType(32)] + [machine] * registers,
            )
            assembly = ir.InlineAsm(function, text, constraints, side_effect=True)
            results = builder.call(assembly, [*arguments[1:], *values])
            for i, place in enumerate(places):
                builder.store(builder.extract_value(results, i), place)
            return context.get_dummy_value()

        return types.void(sums, types.uint64, types.uint64, types.int32), generate

    return multiply


def wgmma_registers(n: int, steps: int) -> Callable[..., Any]:
    """``multiply(sums, fragments, b, keep)``: as ``wgmma`` of TF32, but A's 64 rows come from registers.

    ``fragments`` are 4 ``steps`` uint32 that hold float32 numbers; their low 13 bits are ignored. With g = lane / 4,
    t = lane % 4 and w the warp of the warpgroup, ``fragments[4 s + 2 x + h]`` is A at row 16 w + g + 8 h and column
    8 s + t + 4 x (PTX ISA, the register fragments of ``wgmma``). Nothing may be written to them before the products
    have been waited for.
    """
    registers, words = n // 2, 4 * steps
    instruction = f"wgmma.mma_async.sync.aligned.m64n{n}k{_WGMMA_STEP_NBYTES // 4}.f32.tf32.tf32"
    outputs = "{" + ", ".join(f"${i}" for i in range(registers)) + "}"
    b, keep = f"${registers + words}", f"${registers + words + 1}"
    lines = ["{ .reg .pred p, always; .reg .b64 db;"]
    lines.append(f"setp.ne.b32 p, {keep}, 0; setp.eq.b32 always, 0, 0;")
    for step in range(steps):
        a = "{" + ", ".join(f"${registers + 4 * step + i}" for i in range(4)) + "}"
        scale = "p" if step == 0 else "always"
        lines.append(f"add.s64 db, {b}, {step * _WGMMA_STEP_NBYTES >> 4};")
        lines.append(f"{instruction} {outputs}, {a}, db, {scale}, 1, 1;")
    text = "\n".join([*lines, "}"])
    constraints = ",".join(
        ["=f"] * registers + ["r"] * words + ["l", "r"] + [str(i) for i in range(registers)] + ["~{memory}"]
    )
    word, machine = ir.IntType(32), ir.FloatType()

    @intrinsic
    def multiply(typingctx, sums, fragments, b, keep):  # type: ignore[no-untyped-def]
        """Issue the products; see ``wgmma_registers``."""
        if not are_arrays(sums, fragments) or fragments.dtype != types.uint32:
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def places(position: int, count: int) -> list[Any]:
                array = context.make_array(signature.args[position])
                data = array(context, builder, value=arguments[position]).data
                return [builder.gep(data, [ir.Constant(word, i)]) for i in range(count)]

            totals = places(0, registers)
            values = [builder.load(place) for place in (*places(1, words), *totals)]
            function = ir.FunctionType(
                ir.LiteralStructType([machine] * registers),
                [word] * words + [ir.IntType(64), word] + [machine] * registers,
            )
            assembly = ir.InlineAsm(function, text, constraints, side_effect=True)
            results = builder.call(assembly, [*values[:words], *arguments[2:], *values[words:]])
            for i, place in enumerate(totals):
                builder.store(builder.extract_value(results, i), place)
            return context.get_dummy_value()

        return types.void(sums, fragments, types.uint64, types.int32), generate

    return multiply


def register_budget(count: int, *, grow: bool) -> Callable[..., Any]:
    """``setmaxnreg`` for the calling warpgroup: producers give registers up, consumers take them."""
    direction = "inc" if grow else "dec"
    return scalar_instruction(f"setmaxnreg.{direction}.sync.aligned.u32 {count};", "", ())
