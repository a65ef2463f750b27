"""Which kernel counts on a GPU: the fast ones, or in the simulator, which runs no PTX, the portable ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from tilewright.kernels.histogram_portable import launch_portable
from tilewright.kernels.histogram_tokens import BIGRAM, Kind


def launch_histogram(
    data: Any, offsets: np.ndarray, start: int, stop: int, kind: Kind, counts: Any, queue: Any
) -> None:
    """Add the tokens that begin in ``data[start:stop]`` to ``counts``, both on the current GPU, on a
    stream."""
    places = cuda.to_device(offsets, stream=queue)
    single = len(offsets) == 2
    name = "per-warp" if single and kind.code < BIGRAM else "global-atomic"
    launch_portable(name, data, places, start, stop, kind, counts, queue)
