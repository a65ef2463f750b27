"""Products by ``wgmma``, the tensor-core instruction of compute capability 9.0, fed by the bulk-copy engine.

One main loop and one launcher for all of them; an operand's preparation and an epilogue distinguish the products.
"""
