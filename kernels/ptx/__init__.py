"""Every GPU instruction that Numba itself does not offer, a module for each subject. No inline PTX stands elsewhere.

Numba's scalar language reaches neither 128-bit accesses nor asynchronous copies nor the tensor cores. Each
function here is an ``@intrinsic``, callable from a ``cuda.jit`` kernel, that lowers to the one instruction its
docstring names, by means of `lowering`. The simulator cannot run them: a module that imports one has a portable
sibling.

Arrays are addressed by element offsets from their first element, whatever their shape and strides: the
caller knows its layout, and one multiply-add is cheaper than a two-dimensional index. Unsigned offsets are
zero-extended, so 32-bit offsets reach 2^32 elements. "Registers" means a ``cuda.local.array`` whose every
index is a compile-time constant: LLVM then keeps it in registers.
"""
