"""Building blocks of the intrinsics: pointers to elements, and intrinsics that are one inline assembly of scalars."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

SHARED_SPACE = 3
"""LLVM's number for shared memory."""
U32, U64, I32 = types.uint32, types.uint64, types.int32


def element_pointer(
    context: Any, builder: Any, array_type: Any, array: Any, index_type: Any, index: Any
) -> Any:
    """Pointer to element ``index`` of ``array`` counted from its first, strides ignored."""
    data = context.make_array(array_type)(context, builder, value=array).data
    wide = ir.IntType(64)
    if index.type.width < 64:
        index = builder.sext(index, wide) if index_type.signed else builder.zext(index, wide)
    return builder.gep(data, [index])


def are_arrays(*array_types: Any) -> bool:
    return all(isinstance(array_type, types.Array) for array_type in array_types)


def _intrinsic(declare: Callable[..., Any], arguments: int) -> Callable[..., Any]:
    """The ``@intrinsic`` of a declaration that takes any number of arguments, for this number of them."""
    # Numba binds a call's arguments by name, so the signature must show one name for each.
    names = ["typingctx", *(f"argument_{i}" for i in range(arguments))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    declare.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return intrinsic(declare)


def scalar_instruction(
    text: str,
    constraints: str,
    arguments: tuple[Any, ...],
    result: Any = types.void,
    description: str = "",
) -> Callable[..., Any]:
    """An ``@intrinsic`` of scalars that is one inline assembly: ``$0`` is the result if there is one."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        returned = ir.VoidType() if result is types.void else context.get_value_type(result)
        function = ir.FunctionType(returned, [value.type for value in values])
        clobbered = ",".join(part for part in (constraints, "~{memory}") if part)
        value = builder.call(ir.InlineAsm(function, text, clobbered, side_effect=True), values)
        return context.get_dummy_value() if result is types.void else value

    def declare(typingctx, *given):  # type: ignore[no-untyped-def]
        return (result(*arguments), generate) if len(given) == len(arguments) else None

    declare.__doc__ = description
    return _intrinsic(declare, len(arguments))


def external_function(
    name: str, arguments: tuple[Any, ...], result: Any = types.void, description: str = ""
) -> Callable[..., Any]:
    """An ``@intrinsic`` of scalars that calls a C function of a library which the kernel is linked with."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        returned = ir.VoidType() if result is types.void else context.get_value_type(result)
        function = builder.module.globals.get(name) or ir.Function(
            builder.module, ir.FunctionType(returned, [value.type for value in values]), name
        )
        value = builder.call(function, values)
        return context.get_dummy_value() if result is types.void else value

    def declare(typingctx, *given):  # type: ignore[no-untyped-def]
        return (result(*arguments), generate) if len(given) == len(arguments) else None

    declare.__doc__ = description
    return _intrinsic(declare, len(arguments))


def pure_instruction(
    text: str, constraints: str, arguments: int, scalar: Any = U32, result: Any = None
) -> Callable[..., Any]:
    """An ``@intrinsic`` of scalars of one type without side effects, which the compiler may move, merge or drop.
    result: the type of what it gives; None: theirs."""
    given_back = scalar if result is None else result

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        function = ir.FunctionType(context.get_value_type(given_back), [value.type for value in values])
        return builder.call(ir.InlineAsm(function, text, constraints, side_effect=False), values)

    def declare(typingctx, *given):  # type: ignore[no-untyped-def]
        return (given_back(*[scalar] * arguments), generate) if len(given) == arguments else None

    return _intrinsic(declare, arguments)
