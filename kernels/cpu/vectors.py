"""What the CPU's loops ask of text 64 bytes at a time, in LLVM's vector types: it lowers them to the vector
instructions of the processor that a loop is compiled for, and to scalar ones where there are none.

Each function is an ``@intrinsic`` over uint8[n], C-contiguous, and checks no bounds: what it reads lies between ``i``
and ``i + 64``, or ``i + 8``. It may begin at any byte.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 64
_BYTES = ir.VectorType(ir.IntType(8), LANES)


def _address(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """The address of ``data[i]``."""
    data = cgutils.create_struct_proxy(signature.args[0])(context, builder, arguments[0]).data
    return builder.gep(data, [arguments[1]])


def _splat(value: int) -> Any:
    return ir.Constant(_BYTES, [value] * LANES)


def _lanes(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """``data[i:i + 64]`` as a vector."""
    place = builder.bitcast(_address(context, builder, signature, arguments), _BYTES.as_pointer())
    lanes = builder.load(place)
    lanes.align = 1
    return lanes


def _bits(builder: Any, lanes: Any) -> Any:
    """uint64: bit k is lane k of a comparison."""
    return builder.bitcast(lanes, ir.IntType(64))


@intrinsic
def load_word(typing: Any, data: Any, i: Any) -> Any:
    """``data[i:i + 8]`` as a uint64, on a little-endian host the first byte lowest."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.bitcast(
            _address(context, builder, signature, arguments), ir.IntType(64).as_pointer()
        )
        word = builder.load(place)
        word.align = 1
        return word

    return types.uint64(data, i), build


@intrinsic
def high_mask(typing: Any, data: Any, i: Any) -> Any:
    """uint64: bit k says whether ``data[i + k]`` is 128 or more."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = _lanes(context, builder, signature, arguments)
        return _bits(builder, builder.icmp_signed("<", lanes, _splat(0)))

    return types.uint64(data, i), build


@intrinsic
def word_mask(typing: Any, data: Any, i: Any) -> Any:
    """uint64: bit k says whether ``data[i + k]`` is an ASCII letter, a digit or the underscore."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = _lanes(context, builder, signature, arguments)
        folded = builder.or_(lanes, _splat(0x20))
        letters = builder.icmp_unsigned("<", builder.sub(folded, _splat(ord("a"))), _splat(26))
        digits = builder.icmp_unsigned("<", builder.sub(lanes, _splat(ord("0"))), _splat(10))
        underscores = builder.icmp_unsigned("==", lanes, _splat(ord("_")))
        return _bits(builder, builder.or_(builder.or_(letters, digits), underscores))

    return types.uint64(data, i), build


@intrinsic
def break_mask(typing: Any, data: Any, i: Any) -> Any:
    """uint64: bit k says whether ``data[i + k]`` is a line feed or a carriage return."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = _lanes(context, builder, signature, arguments)
        feeds = builder.icmp_unsigned("==", lanes, _splat(ord("\n")))
        returns = builder.icmp_unsigned("==", lanes, _splat(ord("\r")))
        return _bits(builder, builder.or_(feeds, returns))

    return types.uint64(data, i), build


@intrinsic
def trailing_zeros(typing: Any, mask: Any) -> Any:
    """The place of the lowest bit that is set, of a uint64 other than 0."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), build
