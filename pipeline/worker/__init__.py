"""One worker's part of a product: `tasks` come in, `stream` takes a tile through the stages: load, compute, write.

`units` is the CPU that multiplies, `gpu_unit` the GPU. Nothing here decides what is computed where.
"""
