"""A preload of Dask's workers: each tile takes as many seconds longer as the file `TILE_PACE` says, so that stops find
some under way on any host. The file may change while a tile waits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewright.pipeline.worker.stream import TileEngine


def slowed(multiply: Callable[..., Any]) -> Callable[..., Any]:
    pace = Path(os.environ["TILE_PACE"])

    def slowly(*arguments: Any, queued: Callable[[], object], **options: Any) -> Any:
        queued()  # the next tile is not to wait for this one
        begun = time.monotonic()
        while time.monotonic() - begun < float(pace.read_text()):
            time.sleep(0.05)
        return multiply(*arguments, **options)

    return slowly


if TileEngine.multiply.__name__ == "multiply":  # Dask loads this twice
    TileEngine.multiply = slowed(TileEngine.multiply)  # type: ignore[method-assign]
