"""What loops share that are written in LLVM's terms, for instructions of a CPU that Numba has no name for."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils
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


def prefetch(builder: Any, address: Any, offset: int) -> None:
    """Have the cache line of an address fetched into the nearest cache."""
    byte = ir.IntType(8)
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), (byte.as_pointer(), INT32, INT32, INT32)),
        "llvm.prefetch.p0",
    )
    reading, nearest, data = (ir.Constant(INT32, value) for value in (0, 3, 1))
    builder.call(function, (pointer(builder, address, offset, byte), reading, nearest, data))


class Loop:
    """A loop over ``steps`` >= 1 steps; code is built in its body until `end`. ``places`` are addresses, which move on
    by some bytes a step."""

    def __init__(self, builder: Any, steps: Any, *places: tuple[Any, int]) -> None:
        self._builder, self._before = builder, builder.block
        self._body, self._after = builder.append_basic_block("k"), builder.append_basic_block("k.end")
        builder.branch(self._body)
        builder.position_at_end(self._body)
        self._left = self._starting_with(INT64, steps)
        self._strides = [stride for _, stride in places]
        self.places = [self._starting_with(INT64, place) for place, _ in places]

    def _starting_with(self, kind: Any, value: Any) -> Any:
        phi = self._builder.phi(kind)
        phi.add_incoming(value, self._before)
        return phi

    def sum_of(self, kind: Any) -> Any:
        """What has been added so far, zero at first; made before any other code of the body."""
        return self._starting_with(kind, ir.Constant(kind, None))

    def sum_from(self, value: Any) -> Any:
        """As `sum_of`, but with this value at first."""
        return self._starting_with(value.type, value)

    def carry(self, total: Any, value: Any) -> None:
        """Have a sum be this value in the next step."""
        total.add_incoming(value, self._body)

    def end(self) -> None:
        """Close the body; code is built after it from here on."""
        builder = self._builder
        rest = builder.sub(self._left, ir.Constant(INT64, 1))
        for place, stride in zip(self.places, self._strides, strict=True):
            self.carry(place, builder.add(place, ir.Constant(INT64, stride)))
        self.carry(self._left, rest)
        builder.cbranch(builder.icmp_signed(">", rest, ir.Constant(INT64, 0)), self._body, self._after)
        builder.position_at_end(self._after)
