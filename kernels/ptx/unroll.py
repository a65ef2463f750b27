"""Loops of kernels, unrolled at compile time."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic


@intrinsic
def unroll(typingctx, function, count, arguments):  # type: ignore[no-untyped-def]
    """Call ``function(i, *arguments)`` for i = 0, 1, ... ``count`` - 1, written out at compile time.

    ``count`` is a constant and ``function`` a device function that returns nothing; in each call ``i`` is a
    constant, so arrays indexed by it may live in registers. LLVM unrolls short loops by itself, but not one whose body
    holds hundreds of multiply-adds.
    """
    if not isinstance(count, types.IntegerLiteral) or not isinstance(arguments, types.BaseTuple):
        return None
    call = types.void(types.int32, *arguments.types)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        # Compiled as part of the caller: a device function of its own would ask for a GPU to compile for.
        body = context.compile_subroutine(builder, function.dispatcher.py_func, call)
        unpacked = [builder.extract_value(values[2], i) for i in range(len(arguments.types))]
        for i in range(count.literal_value):
            step = [ir.Constant(ir.IntType(32), i), *unpacked]
            context.call_internal(builder, body.fndesc, call, step)
        return context.get_dummy_value()

    return types.void(function, count, arguments), generate
