"""The plan of a matrix product: arithmetic on shapes, dtypes and byte counts. No I/O, no clock, no device.

`product` is the plan itself, `tiling` finds its geometry, `grid` says where its tiles lie, `memory` counts bytes held
and read, and `told` is what workers are told of it.
"""
