"""Which kernel counts on a GPU: the fast ones, or in the simulator, which runs no PTX, the portable ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from tilewright.kernels.histogram_portable import launch_portable
from tilewright.kernels.histogram_tokens import BIGRAM, Kind
from tilewright.kernels.launch import SIMULATOR

ALONE_NBYTES = 1 << 20
"""A document of this many bytes occupies the GPU by itself, so its pairs or characters get a launch of its
own."""


def count_on_device(data: Any, offsets: np.ndarray, start: int, stop: int, kind: Kind, queue: Any) -> Any:
    """Counts, a device array int64[(documents, bins)], of the tokens that begin in ``data[start:stop]``.

    ``data`` lies on the current GPU, ``offsets`` on the host; with several documents, ``start`` and ``stop``
    are where the first begins and the last ends.
    """
    documents = len(offsets) - 1
    if documents > 1 and kind.code < BIGRAM and not SIMULATOR:
        from tilewright.kernels.histogram_documents import launch_documents

        counts = cuda.device_array((documents, kind.bins), np.int64, stream=queue)
        launch_documents(data, offsets, kind, counts, queue)
        return counts
    counts = zeros((documents, kind.bins), queue)
    if stop <= start or not documents:
        return counts
    if SIMULATOR:
        name = "per-warp" if documents == 1 and kind.code < BIGRAM else "global-atomic"
        launch_portable(name, data, cuda.to_device(offsets), start, stop, kind, counts, queue)
    elif kind.code < BIGRAM:
        from tilewright.kernels.histogram_bytes import launch_bytes

        launch_bytes(data, start, stop, kind, counts.reshape(kind.bins), queue)
    else:
        _count_wide(data, offsets, start, stop, kind, counts, queue)
    return counts


def _count_wide(
    data: Any, offsets: np.ndarray, start: int, stop: int, kind: Kind, counts: Any, queue: Any
) -> None:
    """Pairs and characters: large documents one by one, the runs of small ones between them in a launch each.

    The rows of small documents are sparse, so nothing is gained by counting them anywhere but in their rows.
    """
    from tilewright.kernels.histogram_wide import launch_wide

    places = None
    previous = 0
    large = np.flatnonzero(np.diff(offsets) >= ALONE_NBYTES) if len(offsets) > 2 else np.array([0])
    for document in [*large.tolist(), len(offsets) - 1]:
        if previous < document:
            places = cuda.to_device(offsets, stream=queue) if places is None else places
            begin, end = int(offsets[previous]), int(offsets[document])
            launch_portable("global-atomic", data, places, begin, end, kind, counts, queue)
        if document < len(offsets) - 1:
            lo, hi = int(offsets[document]), int(offsets[document + 1])
            launch_wide(data, max(lo, start), min(hi, stop), lo, hi, kind, counts[document], queue)
        previous = document + 1


def zeros(shape: tuple[int, int], queue: Any) -> Any:
    """A device array of int64 zeros."""
    if SIMULATOR:
        return cuda.to_device(np.zeros(shape, np.int64))
    array = cuda.device_array(shape, np.int64, stream=queue)
    if array.size:
        from numba.cuda.cudadrv.driver import device_memset

        device_memset(array, 0, array.nbytes, queue)
    return array
