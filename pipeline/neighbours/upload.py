"""How a GPU gets the items that it compares among themselves: while they are read, part by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from tilewright.kernels.deferred import cuda
from tilewright.kernels.gpu.device_array import address
from tilewright.kernels.gpu.memory import allocating
from tilewright.kernels.gpu.transfer import upload_rectangle, upload_stream
from tilewright.pipeline.gram.options import axis_of
from tilewright.pipeline.neighbours.plan import LANES, spare_elements
from tilewright.pipeline.store.arrays import is_plain
from tilewright.pipeline.store.region import StoredArray
from tilewright.pipeline.store.region_read import RegionRead, region_reads, region_uploads
from tilewright.pipeline.store.waiting import read_while
from tilewright.pipeline.transfer import file_upload
from tilewright.pipeline.transfer.file_rectangles import Rectangle
from tilewright.pipeline.transfer.lane import Lane
from tilewright.pipeline.transfer.lane_blocks import move_nbytes
from tilewright.pipeline.worker.gpu_unit import block_rectangles, lanes_lent
from tilewright.pipeline.worker.panels import shaped


def items_read_and_sent(
    array: StoredArray, of: str, stop: int, *, threads: int, check: Callable[[], None]
) -> tuple[np.ndarray | None, Any]:
    """The first items of a matrix on this thread's GPU, with spare elements of 0; and the same here, as
    `tasks.items_of` reads them, unless that is quickly done once more: of rows that lie plain in files. Until ``check``
    raises."""
    axis = axis_of(of)
    width, dtype = int(array.shape[1 - axis]), array.dtype.newbyteorder("=")
    spare = spare_elements(width, dtype.itemsize)
    sent_dtype = np.dtype(np.uint8) if dtype.kind == "b" else dtype
    with allocating("items", stop * (width + spare) * dtype.itemsize, on_gpu=True):
        on_gpu = cuda.device_array((stop, width + spare), sent_dtype)
    if axis == 0 and not spare and is_plain(array) and file_upload.available():
        _send_from_files(array, stop, on_gpu, threads, check)
        return None, on_gpu
    region = [slice(0, int(side)) for side in array.shape]
    region[axis] = slice(0, stop)
    block = np.empty([part.stop - part.start for part in region], dtype)
    _send(region_reads(array, region), block, axis, on_gpu, threads, check, spare=spare)
    return block if axis == 0 else block.T, on_gpu


def _send_from_files(
    array: StoredArray, stop: int, on_gpu: Any, threads: int, check: Callable[[], None]
) -> None:
    """By loops that do not want the interpreter's lock; what these could not move, in the ordinary way. ``check`` is
    called between the two."""
    region = slice(0, stop), slice(0, int(array.shape[1]))
    parts, others = region_uploads(array, region, address(on_gpu), on_gpu.strides[0])
    rectangles = [part.source for part in parts if isinstance(part.source, Rectangle)]
    assert len(rectangles) == len(parts), "plain chunks are rectangles"
    threads = min(threads, LANES)
    upload = file_upload.Upload(rectangles, move_nbytes(threads, 1), threads)
    with lanes_lent(threads) as lanes:

        def run(number: int) -> None:
            cuda.current_context()  # attaches the thread to the GPU
            lane = lanes.get()
            try:
                upload.run(lane.to_gpu)
            finally:
                lanes.put(lane)

        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(run, range(threads)):
                pass
        upload_stream().synchronize()
    check()
    left = [*others, *(read for number in upload.failed() for read in parts[number].reads())]
    for read in left:
        rows, columns = read.target
        block = np.empty(read.shape, array.dtype.newbyteorder("="))
        moved = replace(read, target=(slice(0, len(block)), slice(0, block.shape[1])))
        _send([moved], block, 0, on_gpu, 1, check, corner=(rows.start, columns.start), spare=0)


def _send(
    parts: Sequence[RegionRead],
    block: np.ndarray,
    axis: int,
    on_gpu: Any,
    threads: int,
    check: Callable[[], None],
    *,
    spare: int,
    corner: tuple[int, int] = (0, 0),
) -> None:
    """Read parts of a block, and send each to the GPU. spare: elements of 0 there behind the block's last. corner: the
    item and the element there that it begins with."""
    items = block if axis == 0 else block.T
    stream, pitch, item = upload_stream(), on_gpu.strides[0], on_gpu.dtype.itemsize
    start = address(on_gpu) + corner[0] * pitch + corner[1] * item

    def send(lane: Lane, rows: slice, elements: slice) -> None:
        source = items[rows, elements].view(on_gpu.dtype)
        wide = source.shape[1] + (spare if elements.stop == items.shape[1] else 0)
        for row, column, (tall, broad) in block_rectangles((len(source), wide), item):
            part = source[row : row + tall, column : column + broad]
            staged = shaped(lane.block().view(on_gpu.dtype), (tall, broad))
            staged[:, : part.shape[1]] = part
            staged[:, part.shape[1] :] = 0
            place = (rows.start + row) * pitch + (elements.start + column) * item
            upload_rectangle(staged, start + place, pitch, stream)
            lane.sent(stream)

    threads = max(1, min(threads, LANES, len(parts)))
    with lanes_lent(threads) as lanes:

        def move(part: RegionRead) -> None:
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
