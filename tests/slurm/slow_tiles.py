"""A preload of Dask's workers: each tile takes `TILE_SECONDS` longer, so that stops find some under way on any host."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from tilewright.pipeline.worker.stream import TileEngine


def slowed(multiply: Callable[..., Any]) -> Callable[..., Any]:
    def slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(float(os.environ.get("TILE_SECONDS", "0")))
        return multiply(*arguments, **options)

    return slowly


if TileEngine.multiply.__name__ == "multiply":  # Dask loads this twice
    TileEngine.multiply = slowed(TileEngine.multiply)  # type: ignore[method-assign]
