"""Integer instructions on words: multiply-adds, and bytes of words."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from tilewright.kernels.ptx.lowering import I32, U32, pure_instruction, scalar_instruction

multiply_add_low = pure_instruction("mad.lo.u32 $0, $1, $2, $3;", "=r,r,r,r", 3)
"""``multiply_add_low(x, y, z)``: x y + z modulo 2**32. The compiler keeps it whole; left to itself, it would first add
two products to each other, and then to a sum."""


@intrinsic
def multiply_add_wide(typingctx, left, right, added):  # type: ignore[no-untyped-def]
    """``multiply_add_wide(x, y, z)``: x y + z modulo 2**64 for x and y of 32 bits, z of 64; kept whole as well."""
    # By halves with a carry, which the assembler fuses into one instruction. Given that one itself, it would first add
    # two products to each other, and then to a sum, with additions of 64 bits.
    text = (
        "{ .reg .u32 low, high; mov.b64 {low, high}, $3; mad.lo.cc.u32 low, $1, $2, low;"
        " madc.hi.u32 high, $1, $2, high; mov.b64 $0, {low, high}; }"
    )

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        function = ir.FunctionType(ir.IntType(64), [value.type for value in values])
        return builder.call(ir.InlineAsm(function, text, "=l,r,r,l", side_effect=False), values)

    return types.uint64(U32, U32, types.uint64), generate


negative = pure_instruction("neg.s32 $0, $1;", "=r,r", 1, I32)
"""``negative(x)``: -x, which the compiler does not see through."""

warp_or = scalar_instruction(
    "redux.sync.or.b32 $0, $1, 0xffffffff;",
    "=r,r",
    (U32,),
    U32,
    description="``warp_or(word)``: the bitwise or of the words of all threads of a warp, which wait for each other.",
)

byte_permute = pure_instruction("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", 3)
"""``byte_permute(a, b, selector)``: four bytes of the eight of a (0-3) and b (4-7), chosen by four hex
digits."""

byte_rotate = pure_instruction("prmt.b32.b4e $0, $1, $2, $3;", "=r,r,r,r", 3)
"""``byte_rotate(a, b, n)``: bytes n, n - 1, n - 2 and n - 3 of the eight of a (0-3) and b (4-7), counted round,
lowest first; only the lowest two bits of n count. ``byte_rotate(1, 0, n)`` is 1 << 8 n."""

signed_half = pure_instruction("bfe.s32 $0, $1, $2, 16;", "=r,r,r", 2)
"""``signed_half(word, first)``: the 16 bits of a word from bit ``first`` on, as a signed number of 32 bits."""

signed_byte_dot = pure_instruction("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", 3)
"""``signed_byte_dot(a, b, c)``: c plus the sum of the products of the four signed bytes of a and of b, modulo 2^32."""

byte_dot = pure_instruction("dp4a.u32.u32 $0, $1, $2, $3;", "=r,r,r,r", 3)
"""``byte_dot(a, b, c)``: c plus the products of the four bytes of a with those of b, all unsigned."""

dot_bytes = scalar_instruction(
    "dp4a.u32.s32 $0, $1, $2, $3;",
    "=r,r,r,r",
    (U32, I32, I32),
    I32,
    description="``dot_bytes(x, y, c)``: c plus the sum of the four unsigned bytes of x times the signed ones of y.",
)

dot_of_bytes = pure_instruction("dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", 3)
"""``dot_bytes`` of words, which the compiler may move."""

funnel_right = pure_instruction("shf.r.clamp.b32 $0, $1, $2, $3;", "=r,r,r,r", 3)
"""``funnel_right(low, high, shift)``: the low word of (high:low) >> shift, for shifts up to 32."""
