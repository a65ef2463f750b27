"""Conversions between floating-point formats, and to and from bits; and operations that are each rounded by itself."""

from __future__ import annotations

from numba.cuda import types

from tilewright.kernels.ptx.lowering import U32, pure_instruction, scalar_instruction

float_bits = scalar_instruction(
    "mov.b32 $0, $1;", "=r,f", (types.float32,), U32, description="The 32 bits of a float32."
)
bits_float = scalar_instruction(
    "mov.b32 $0, $1;", "=f,r", (U32,), types.float32, description="The float32 of 32 bits."
)
negative = pure_instruction("neg.f32 $0, $1;", "=f,f", 1, types.float32)
"""``negative(x)``: -x, which the compiler does not see through."""
half_bits = scalar_instruction(
    "cvt.rn.f16.f32 $0, $1;",
    "=h,f",
    (types.float32,),
    types.uint16,
    description="The 16 bits of the nearest float16, ties to even.",
)
half_value = scalar_instruction(
    "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }",
    "=f,r",
    (U32,),
    types.float32,
    description="The float32 equal to the float16 in the lower half of a word.",
)
half_pair = scalar_instruction(
    "cvt.rn.f16x2.f32 $0, $2, $1;",
    "=r,f,f",
    (types.float32, types.float32),
    U32,
    description="``half_pair(low, high)``: the nearest float16 of both in one word.",
)
bfloat_bits = scalar_instruction(
    "cvt.rn.bf16.f32 $0, $1;",
    "=h,f",
    (types.float32,),
    types.uint16,
    description="The 16 bits of the nearest bfloat16, ties to even.",
)
bfloat_pair = scalar_instruction(
    "cvt.rn.bf16x2.f32 $0, $2, $1;",
    "=r,f,f",
    (types.float32, types.float32),
    U32,
    description="``bfloat_pair(low, high)``: the nearest bfloat16 of both in one word.",
)
tf32_bits = scalar_instruction(
    "cvt.rna.tf32.f32 $0, $1;",
    "=r,f",
    (types.float32,),
    U32,
    description="The 32 bits of the nearest TF32 number, ties away from zero.",
)
tf32_operand = scalar_instruction(
    "{ .reg .pred finite; .reg .f32 size; mov.b32 size, $1; abs.f32 size, size;"
    " setp.lt.f32 finite, size, 0f7F800000; mov.b32 $0, $1; @finite add.u32 $0, $0, 0x1000; }",
    "=r,r",
    (U32,),
    U32,
    description="A float32's bits so that the tensor cores, which ignore the low 13, take the number that "
    "``tf32_bits`` gives: two instructions in its place of three.",
)

add32, subtract32, multiply32 = (
    pure_instruction(f"{name}.rn.f32 $0, $1, $2;", "=f,f,f", 2, types.float32)
    for name in ("add", "sub", "mul")
)
"""With the rounding named, no multiplication and addition become one (PTX ISA, `add` and `mul`), as the compiler else
makes of them."""
add64, subtract64, multiply64 = (
    pure_instruction(f"{name}.rn.f64 $0, $1, $2;", "=d,d,d", 2, types.float64)
    for name in ("add", "sub", "mul")
)
word_float = pure_instruction("mov.b32 $0, $1;", "=f,r", 1, U32, types.float32)
"""``bits_float``, which the compiler may move."""
float_word = pure_instruction("mov.b32 $0, $1;", "=r,f", 1, types.float32, U32)
"""``float_bits``, which the compiler may move."""
nearest_wide = pure_instruction("cvt.rni.s64.f64 $0, $1;", "=l,d", 1, types.float64, types.int64)
"""The nearest integer of 64 bits, ties to even."""
double_bits = pure_instruction("mov.b64 $0, $1;", "=l,d", 1, types.float64, types.int64)
"""The 64 bits of a float64."""
bits_double = pure_instruction("mov.b64 $0, $1;", "=d,l", 1, types.int64, types.float64)
"""The float64 of 64 bits."""
root64 = pure_instruction("sqrt.rn.f64 $0, $1;", "=d,d", 1, types.float64)
