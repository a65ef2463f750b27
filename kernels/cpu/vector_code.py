"""What loops share that are written in LLVM's terms, for instructions of a CPU that Numba has no name for."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core.registry import cpu_target

CACHE_LINE = 64

INT32, INT64 = ir.IntType(32), ir.IntType(64)


def has_features(*names: str) -> bool:
    """Whether Numba compiles for a CPU that has these instruction sets, by LLVM's names."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return {f"+{name}" for name in names} <= set(features.split(","))


def pointer(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    return builder.inttoptr(builder.add(address, ir.Constant(INT64, offset)), kind.as_pointer())


def load(builder: Any, address: Any, offset: int, kind: Any, alignment: int) -> Any:
    value = builder.load(pointer(builder, address, offset, kind))
    value.align = alignment
    return value


def broadcast(builder: Any, value: Any, kind: Any) -> Any:
    nothing, first = ir.Constant(kind, ir.Undefined), ir.Constant(INT32, 0)
    lanes = ir.Constant(ir.VectorType(INT32, kind.count), None)
    return builder.shuffle_vector(builder.insert_element(nothing, value, first), nothing, lanes)
