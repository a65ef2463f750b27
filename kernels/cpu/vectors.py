"""Memory by its address, and 64 bytes of it at a time in LLVM's vector types: those are lowered to the vector
instructions of the processor that a loop is compiled for, and to scalar ones where there are none.

Each function is an ``@intrinsic`` of an int64, an address that may be any multiple of a byte, and checks no bounds.
Numba counts references to arrays at every call between compiled functions, which takes longer than a look into a table
does. Loops whose small functions share tables therefore hand addresses around, and whoever calls such a loop keeps the
arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 64
_BYTES = ir.VectorType(ir.IntType(8), LANES)


def _place(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _loader(bits: int, kind: Any) -> Any:
    """An intrinsic that reads a number of so many bits, extended with zeros to ``kind``."""

    def load(typing: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = builder.load(_place(builder, arguments[0], ir.IntType(bits)))
            value.align = 1
            return value if bits == 64 else builder.zext(value, ir.IntType(64))

        return kind(types.int64), build

    return intrinsic(load)


def _storer(bits: int, kind: Any) -> Any:
    """An intrinsic that writes the lowest bits of a ``kind``."""

    def store(typing: Any, address: Any, value: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = arguments[1] if bits == 64 else builder.trunc(arguments[1], ir.IntType(bits))
            builder.store(value, _place(builder, arguments[0], ir.IntType(bits)), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, kind), build

    return intrinsic(store)


load_byte = _loader(8, types.int64)
load_half = _loader(32, types.uint64)
"""Four bytes, on a little-endian host the first byte lowest."""
load_word = _loader(64, types.uint64)
"""Eight bytes, on a little-endian host the first byte lowest."""
load_int = _loader(64, types.int64)
store_byte = _storer(8, types.int64)
store_half = _storer(32, types.int64)
store_word = _storer(64, types.uint64)
store_int = _storer(64, types.int64)


def _splat(value: int) -> Any:
    return ir.Constant(_BYTES, [value] * LANES)


def _mask(compare: Callable[[Any, Any], Any]) -> Any:
    """An intrinsic that gives a uint64: bit k is what ``compare`` says of byte k of the 64 at an address."""

    def mask(typing: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            lanes = builder.load(_place(builder, arguments[0], _BYTES))
            lanes.align = 1
            return builder.bitcast(compare(builder, lanes), ir.IntType(64))

        return types.uint64(types.int64), build

    return intrinsic(mask)


def _between(first: int, last: int) -> Any:
    """`_mask` of the bytes from ``first`` to ``last``."""

    def compare(builder: Any, lanes: Any) -> Any:
        return builder.icmp_unsigned("<=", builder.sub(lanes, _splat(first)), _splat(last - first))

    return _mask(compare)


def _is_high(builder: Any, lanes: Any) -> Any:
    return builder.icmp_signed("<", lanes, _splat(0))


def _is_word(builder: Any, lanes: Any) -> Any:
    folded = builder.or_(lanes, _splat(0x20))
    letters = builder.icmp_unsigned("<", builder.sub(folded, _splat(ord("a"))), _splat(26))
    digits = builder.icmp_unsigned("<", builder.sub(lanes, _splat(ord("0"))), _splat(10))
    underscores = builder.icmp_unsigned("==", lanes, _splat(ord("_")))
    return builder.or_(builder.or_(letters, digits), underscores)


def _is_break(builder: Any, lanes: Any) -> Any:
    feeds = builder.icmp_unsigned("==", lanes, _splat(ord("\n")))
    return builder.or_(feeds, builder.icmp_unsigned("==", lanes, _splat(ord("\r"))))


def _stops_string(builder: Any, lanes: Any) -> Any:
    quotes = builder.icmp_unsigned("==", lanes, _splat(ord('"')))
    backslashes = builder.icmp_unsigned("==", lanes, _splat(ord("\\")))
    controls = builder.icmp_unsigned("<", lanes, _splat(0x20))
    return builder.or_(builder.or_(quotes, backslashes), controls)


high_mask = _mask(_is_high)
"""Which bytes are 128 or more."""
word_mask = _mask(_is_word)
"""Which bytes are ASCII letters, digits or the underscore."""
break_mask = _mask(_is_break)
"""Which bytes are line feeds or carriage returns."""
line_feed_mask = _between(0x0A, 0x0A)
"""Which bytes are line feeds."""
string_stop_mask = _mask(_stops_string)
"""Which bytes do not stand for themselves in a string of JSON, or must not stand there: quotation marks, backslashes
and control characters."""
continuation_mask = _between(0x80, 0xBF)
lead_2_mask = _between(0xC2, 0xDF)
lead_3_mask = _between(0xE0, 0xEF)
lead_4_mask = _between(0xF0, 0xF4)
"""Which bytes continue a character of UTF-8, or begin one of two, three or four bytes."""
e0_mask, ed_mask, ef_mask = (_between(lead, lead) for lead in (0xE0, 0xED, 0xEF))
f0_mask, f4_mask = _between(0xF0, 0xF0), _between(0xF4, 0xF4)
below_a0_mask, below_90_mask = _between(0x80, 0x9F), _between(0x80, 0x8F)
"""What decides on the second byte of characters that begin with these."""


def _copier(nbytes: int) -> Any:
    """An intrinsic that copies so many bytes from one address to another."""
    kind = ir.VectorType(ir.IntType(8), nbytes)

    def copy(typing: Any, to: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            lanes = builder.load(_place(builder, arguments[1], kind))
            lanes.align = 1
            builder.store(lanes, _place(builder, arguments[0], kind), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), build

    return intrinsic(copy)


copy_16 = _copier(16)
copy_lanes = _copier(LANES)
"""To the first address from the second."""


@intrinsic
def trailing_zeros(typing: Any, mask: Any) -> Any:
    """The place of the lowest bit that is set, int64, of a uint64 other than 0."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), build


@intrinsic
def memcpy(typing: Any, target: Any, source: Any, nbytes: Any) -> Any:
    """Copy so many bytes between two addresses, whose ranges do not meet."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8)
        places = [_place(builder, each, byte) for each in arguments[:2]]
        kinds = [place.type for place in places]
        kind = ir.FunctionType(ir.VoidType(), [*kinds, ir.IntType(64), ir.IntType(1)])
        copy = builder.module.declare_intrinsic("llvm.memcpy", [*kinds, ir.IntType(64)], kind)
        builder.call(copy, [*places, arguments[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), build


@intrinsic
def swapped(typing: Any, word: Any) -> Any:
    """Eight bytes, uint64, in the opposite order."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bswap(arguments[0])

    return types.uint64(types.uint64), build


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Have the line of the cache at an address fetched, which may be any: a hint, so that nothing waits or fails."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(builder, arguments[0], ir.IntType(8))
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
        hint = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        # To be written, kept in all levels, data.
        builder.call(hint, [place, *(ir.Constant(number, value) for value in (1, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.int64), build
