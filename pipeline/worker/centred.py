"""The panels of a product that a CPU multiplies as bytes, centred: its scratch panels are packed ones.

It is imported where a plan has that alone, since the loops need Numba at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.kernels.cpu import centred_bytes
from tilewright.kernels.cpu.centred_panel import packed_nbytes
from tilewright.pipeline.plan.pairs import Form
from tilewright.pipeline.plan.told import Product
from tilewright.pipeline.plan.transform import missing_element
from tilewright.pipeline.worker.fusion import HostFusion, PackedPanel, Region, Scratch
from tilewright.pipeline.worker.panels import Placed

KERNEL = "products of bytes, centred"
"""What reports call it."""


class CentredFusion(HostFusion):
    """Packs panels in the place of transforming them, and multiplies packed ones."""

    def __init__(self, product: Product, allocate: Callable[[int, np.dtype], Any]) -> None:
        super().__init__(product, allocate)
        self._packed: list[PackedPanel | None] = [None, None]

    def scratch(self, operand: int, panel: Placed) -> Scratch:
        """What is packed of an operand; before anything is, the panel itself."""
        return self._packed[operand] or panel

    def transform(self, operand: int, panel: Placed, region: Region, form: Form = "values") -> PackedPanel:
        transform, plan = self._product.fused.transforms[operand], self._plan
        assert transform is not None, "`plan.centred` has looked"
        block = panel.cut(*(slice(0, side) for side in panel.shape))
        centres, along = transform.row_offsets, region[0]
        if plan.transpose_b if operand else not plan.transpose_a:  # each line lies along k
            block, centres, along = block.T, transform.column_offsets, region[1]
        lines = plan.tile_columns if operand else plan.tile_rows
        size = packed_nbytes(lines, min(plan.panel_depth, plan.k))
        missing = missing_element(transform, panel.dtype)
        packed = PackedPanel(
            centred_bytes.pack(
                block,
                None if centres is None else centres[along],
                None if missing is None else int(missing),
                self._buffers.packed(operand, size),
                self._pool,
            )
        )
        self._packed[operand] = packed
        return packed

    def multiply(
        self, a: PackedPanel, b: PackedPanel, out: np.ndarray, *, accumulate: bool, lower: bool
    ) -> None:
        """``out (+)=`` the product of two packed panels; ``lower``: only its half below the diagonal is wanted."""
        centred_bytes.multiply(a.pieces, b.pieces, out, self._pool, accumulate=accumulate, lower=lower)

    def close(self) -> None:
        super().close()
        self._packed = [None, None]
