"""How a GPU gets the items that it compares among themselves: while they are read, part by part."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tilewright.kernels.deferred import cuda
from tilewright.kernels.gpu.device_array import address
from tilewright.kernels.gpu.memory import allocating
from tilewright.kernels.gpu.transfer import upload_rectangle, upload_stream
from tilewright.pipeline.gram.options import axis_of
from tilewright.pipeline.neighbours.plan import LANES, spare_elements
from tilewright.pipeline.store.region import StoredArray
from tilewright.pipeline.store.region_read import region_reads
from tilewright.pipeline.store.waiting import read_while
from tilewright.pipeline.transfer.lane import Lane
from tilewright.pipeline.worker.gpu_unit import block_rectangles, lanes_lent
from tilewright.pipeline.worker.panels import shaped


def items_read_and_sent(
    array: StoredArray, of: str, stop: int, *, threads: int, check: Callable[[], None]
) -> tuple[np.ndarray, Any]:
    """The first items of a matrix, as `tasks.items_of` reads them, and the same on this thread's GPU, there with spare
    elements. Until ``check`` raises."""
    axis = axis_of(of)
    width = int(array.shape[1 - axis])
    dtype = array.dtype.newbyteorder("=")
    region = [slice(0, int(side)) for side in array.shape]
    region[axis] = slice(0, stop)
    block = np.empty([part.stop - part.start for part in region], dtype)
    items = block if axis == 0 else block.T
    sent_dtype = np.dtype(np.uint8) if dtype.kind == "b" else dtype
    spare = spare_elements(width, dtype.itemsize)
    with allocating("items", stop * (width + spare) * dtype.itemsize, on_gpu=True):
        on_gpu = cuda.device_array((stop, width + spare), sent_dtype)
    stream, start, pitch = upload_stream(), address(on_gpu), (width + spare) * dtype.itemsize

    def send(lane: Lane, rows: slice, elements: slice) -> None:
        source = items[rows, elements].view(sent_dtype)
        wide = source.shape[1] + (spare if elements.stop == width else 0)
        for row, column, (tall, broad) in block_rectangles((len(source), wide), dtype.itemsize):
            part = source[row : row + tall, column : column + broad]
            staged = shaped(lane.block().view(sent_dtype), (tall, broad))
            staged[:, : part.shape[1]] = part
            staged[:, part.shape[1] :] = 0
            place = (rows.start + row) * pitch + (elements.start + column) * dtype.itemsize
            upload_rectangle(staged, start + place, pitch, stream)
            lane.sent(stream)

    parts = region_reads(array, region)
    threads = max(1, min(threads, LANES, len(parts)))
    with lanes_lent(threads) as lanes:

        def move(part: Any) -> None:
            cuda.current_context()  # attaches the thread to the GPU
            part.read(block[part.target])
            rows, elements = part.target if axis == 0 else part.target[::-1]
            lane = lanes.get()
            try:
                send(lane, rows, elements)
            finally:
                lanes.put(lane)

        with ThreadPoolExecutor(threads, initializer=read_while, initargs=(check,)) as pool:
            for _ in pool.map(move, parts):
                pass
    return items, on_gpu
