"""A thread's asynchronous copies from global to shared memory (``cp.async``), and waiting for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from tilewright.kernels.ptx.lowering import (
    I32,
    SHARED_SPACE,
    U32,
    U64,
    are_arrays,
    element_pointer,
    scalar_instruction,
)
from tilewright.kernels.ptx.memory import VECTOR_NBYTES


def _copy_async(nbytes: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two forms of ``cp.async`` of ``nbytes`` (4, 8 or 16): unconditional, and copy-or-zero.

    16-byte copies go past the first-level cache (``.cg``); smaller ones may not (``.ca``).
    """
    cache = "cg" if nbytes == VECTOR_NBYTES else "ca"

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type, index_type = signature.args[:2]
        target = element_pointer(context, builder, array_type, arguments[0], index_type, arguments[1])
        target = builder.addrspacecast(target, ir.PointerType(target.type.pointee, SHARED_SPACE))
        operands = [builder.ptrtoint(target, ir.IntType(32)), arguments[2]]
        text = f"cp.async.{cache}.shared.global [$0], [$1], {nbytes}"
        if len(arguments) == 4:
            wanted = builder.icmp_signed("!=", arguments[3], ir.Constant(arguments[3].type, 0))
            whole, nothing = ir.Constant(ir.IntType(32), nbytes), ir.Constant(ir.IntType(32), 0)
            operands.append(builder.select(wanted, whole, nothing))
            text += ", $2"
        constraints = ",".join(["r", "l", "r"][: len(operands)]) + ",~{memory}"
        function = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
        builder.call(ir.InlineAsm(function, text + ";", constraints, side_effect=True), operands)
        return context.get_dummy_value()

    @intrinsic
    def copy(typingctx, shared, index, address):  # type: ignore[no-untyped-def]
        if not are_arrays(shared) or address != types.uint64:
            return None
        return types.void(shared, index, address), emit

    @intrinsic
    def copy_or_zero(typingctx, shared, index, address, wanted):  # type: ignore[no-untyped-def]
        if not are_arrays(shared) or address != types.uint64:
            return None
        return types.void(shared, index, address, types.boolean), emit

    return copy, copy_or_zero


# ``copy_async_N(shared, index, address)`` starts copying N bytes from a global address (uint64) to
# ``shared[index...]``; both must be multiples of N bytes. ``copy_async_N_or_zero`` takes one more argument, ``wanted``:
# where it is false nothing is read and the bytes in shared memory become zero. A copy is complete for its thread after
# ``wait_copies``, and for the block after a barrier that follows.
copy_async_4, copy_async_4_or_zero = _copy_async(4)
copy_async_8, copy_async_8_or_zero = _copy_async(8)
copy_async_16, copy_async_16_or_zero = _copy_async(16)

copy_async_part = scalar_instruction(
    "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;",
    "r,l,r",
    (U32, U64, I32),
    description="``copy_async_part(shared, address, nbytes)``: start copying the first ``nbytes`` (0 to 16) of the 16 "
    "at a global address to a shared address, both multiples of 16, zeros behind them; see ``commit_copies``.",
)

copy_async_word = scalar_instruction(
    "cp.async.ca.shared.global [$0], [$1], 4;",
    "r,l",
    (U32, U64),
    description="``copy_async_word(shared, address)``: start copying four bytes; see ``commit_copies``.",
)


@intrinsic
def commit_copies(typingctx):  # type: ignore[no-untyped-def]
    """``cp.async.commit_group``: everything this thread copied since the last commit becomes one group."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [])
        builder.call(ir.InlineAsm(function, "cp.async.commit_group;", "~{memory}", side_effect=True), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def wait_copies(typingctx, pending):  # type: ignore[no-untyped-def]
    """``cp.async.wait_group``: wait until this thread has at most ``pending`` (a constant) groups under
    way."""
    if not isinstance(pending, types.IntegerLiteral):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        count = signature.args[0].literal_value
        function = ir.FunctionType(ir.VoidType(), [])
        text = f"cp.async.wait_group {count};"
        builder.call(ir.InlineAsm(function, text, "~{memory}", side_effect=True), [])
        return context.get_dummy_value()

    return types.void(pending), generate
