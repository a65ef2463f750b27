"""The plan of a matrix product: arithmetic on shapes, dtypes and byte counts. No I/O, no clock, no device.

`product` is the plan itself, `tiling` finds its geometry, `grid` says where its tiles lie, `memory` counts bytes held
and read, and `told` is what workers are told of it.
"""

from tilewright.pipeline.plan.grid import Tile
from tilewright.pipeline.plan.product import CODER_NBYTES, PROCESS_NBYTES, MatmulPlan, plan_tiles
from tilewright.pipeline.transfer.lane_blocks import LANE_NBYTES

__all__ = ["CODER_NBYTES", "LANE_NBYTES", "PROCESS_NBYTES", "MatmulPlan", "Tile", "plan_tiles"]
