"""What a tile's report says of its panels, against the numbers of the arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import zarr

from tilewright.pipeline.plan.grid import Tile
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.plan.told import Corners, TileReport
from tilewright.pipeline.product.inputs import needs, overlaps
from tilewright.pipeline.store.content import content_hash, panel_content


def assert_contents(
    reports: Sequence[tuple[Tile, TileReport]], plan: MatmulPlan, arrays: Sequence[zarr.Array[Any]]
) -> None:
    """Each report names panels that make up all that its tile is computed from, and the parts of all panels, with the
    hashes of their numbers, are told once each worker and panel. reports: with k in parts, several of a tile."""
    data: Mapping[str, np.ndarray] = {
        role: np.asarray(array[...]) for role, array in zip("AB", arrays, strict=True)
    }
    of_tile: dict[Tile, dict[str, list[Corners]]] = {}
    hashed: dict[str, list[Corners]] = {"A": [], "B": []}
    for tile, report in reports:
        for panel in report.contents:
            of_tile.setdefault(tile, {"A": [], "B": []})[panel.role].append(panel.corners)
            if panel.parts is None:
                continue
            assert panel == panel_content(panel.role, panel.corners, panel.parts)
            assert overlaps([panel.corners], [corners for corners, _ in panel.parts])[panel.corners] == (
                True,
                True,
            )
            for corners, value in panel.parts:
                top, bottom, left, right = corners
                assert value == content_hash(data[panel.role][top:bottom, left:right]), (panel.role, corners)
                hashed[panel.role].append(corners)
    for tile, panels in of_tile.items():
        for role, corners in needs(plan, tile):
            assert overlaps([corners], panels[role])[corners] == (True, True)
            assert overlaps([corners], hashed[role])[corners] == (True, True)
    assert of_tile.keys() == {tile for tile, _ in reports}
