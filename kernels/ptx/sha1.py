"""SHA-1's function of a block on words in registers, of a thread's own."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from tilewright.kernels.sha1 import BLOCK_WORDS, STATE_WORDS, after_block


@intrinsic
def sha1_block(typingctx, state, words):  # type: ignore[no-untyped-def]
    """``sha1_block(state, words)``: the state, five words of 32 bits, after a block of sixteen; both are tuples."""
    before, block = types.UniTuple(types.uint32, STATE_WORDS), types.UniTuple(types.uint32, BLOCK_WORDS)
    word = ir.IntType(32)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        state, block = (
            [builder.extract_value(one, i) for i in range(count)]
            for one, count in zip(values, (STATE_WORDS, BLOCK_WORDS), strict=True)
        )
        after = after_block(builder, state, block, lambda value: ir.Constant(word, value))
        return context.make_tuple(builder, signature.return_type, after)

    return before(before, block), generate
