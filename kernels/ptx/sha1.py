"""SHA-1's function of a block on words in registers, written out: 80 rounds of a thread's own."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

STATE_WORDS, BLOCK_WORDS = 5, 16
_ROUND = (0x5A827999, 0x6ED9EBA1, 0x8F1BBCDC, 0xCA62C1D6)


@intrinsic
def sha1_block(typingctx, state, words):  # type: ignore[no-untyped-def]
    """``sha1_block(state, words)``: the state, five words of 32 bits, after a block of sixteen; both are tuples."""
    before, block = types.UniTuple(types.uint32, STATE_WORDS), types.UniTuple(types.uint32, BLOCK_WORDS)
    word = ir.IntType(32)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        def rotated(value: Any, bits: int) -> Any:
            high = builder.shl(value, ir.Constant(word, bits))
            return builder.or_(high, builder.lshr(value, ir.Constant(word, 32 - bits)))

        first = [builder.extract_value(values[0], i) for i in range(STATE_WORDS)]
        every = [builder.extract_value(values[1], i) for i in range(BLOCK_WORDS)]
        a, b, c, d, e = first
        for t in range(80):
            if t >= BLOCK_WORDS:
                mixed = builder.xor(
                    builder.xor(every[t - 3], every[t - 8]), builder.xor(every[t - 14], every[t - 16])
                )
                every.append(rotated(mixed, 1))
            if t < 20:
                f = builder.xor(d, builder.and_(b, builder.xor(c, d)))
            elif 40 <= t < 60:
                f = builder.or_(builder.and_(b, c), builder.and_(d, builder.or_(b, c)))
            else:
                f = builder.xor(builder.xor(b, c), d)
            constant = ir.Constant(word, _ROUND[t // 20])
            added = builder.add(builder.add(e, builder.add(every[t], constant)), f)
            a, b, c, d, e = builder.add(rotated(a, 5), added), a, rotated(b, 30), c, d
        after = [builder.add(old, new) for old, new in zip(first, (a, b, c, d, e), strict=True)]
        return context.make_tuple(builder, signature.return_type, after)

    return before(before, block), generate
