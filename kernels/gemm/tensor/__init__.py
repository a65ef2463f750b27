"""Products by ``mma.sync``, the tensor-core instruction that every GPU since compute capability 8.0 has.

What only Hopper has is in `hopper`; what is not a product of its own, such as the planes of wide integers, in `exact`.
"""
