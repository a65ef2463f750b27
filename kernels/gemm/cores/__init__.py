"""Products on a GPU's ordinary cores: tiles held in registers by warps, thin sides, vectors.

Nothing here uses a tensor core. `warp_tiled_launch` and `skinny_launch` choose launches, `partial_sums` adds up where
k is cut; the others run on the device.
"""
