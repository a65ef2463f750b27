"""SHA-1's function of a block (FIPS 180-4), written out: 80 rounds on LLVM's numbers of 32 bits, or vectors of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

STATE_WORDS, BLOCK_WORDS = 5, 16
_ROUND = (0x5A827999, 0x6ED9EBA1, 0x8F1BBCDC, 0xCA62C1D6)


def after_block(
    builder: ir.IRBuilder, before: Sequence[Any], words: Sequence[Any], constant: Callable[[int], Any]
) -> list[Any]:
    """The state after a block, of the five values before it and the sixteen of the block. constant: makes a value of
    their type."""

    def rotated(value: Any, bits: int) -> Any:
        high = builder.shl(value, constant(bits))
        return builder.or_(high, builder.lshr(value, constant(32 - bits)))

    every = list(words)
    a, b, c, d, e = before
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
        added = builder.add(builder.add(e, every[t]), builder.add(f, constant(_ROUND[t // 20])))
        a, b, c, d, e = builder.add(rotated(a, 5), added), a, rotated(b, 30), c, d
    return [builder.add(old, new) for old, new in zip(before, (a, b, c, d, e), strict=True)]
