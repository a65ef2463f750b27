"""The unit of a GPU: pinned lanes to and from it, and memory that other workers copy from.

Nothing of CUDA is imported until a unit is made, so that CPU-only processes can import this module too.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.kernels.cpu.loops import Allowance
from tilewright.kernels.gpu import peer_memory
from tilewright.kernels.gpu.device_array import Memory, address, as_device_array
from tilewright.kernels.gpu.memory import allocating
from tilewright.kernels.gpu.transfer import (
    device_memory,
    download_rectangle,
    download_stream,
    pinned_bytes,
    upload_rectangle,
    upload_stream,
    urgent_stream,
)
from tilewright.kernels.passes.contents import overflow_of
from tilewright.pipeline.decoding.coding import ZSTD, Coding
from tilewright.pipeline.decoding.pace import Pace
from tilewright.pipeline.plan.band import Band
from tilewright.pipeline.plan.told import IN_LOOPS_NBYTES, NOTHING_FOUND, Found, Product
from tilewright.pipeline.store.chunks import coding_of
from tilewright.pipeline.store.region import StoredArray
from tilewright.pipeline.store.region_read import FilePart, RegionRead, region_reads, region_uploads
from tilewright.pipeline.store.region_write import RegionWrite
from tilewright.pipeline.transfer.file_rectangles import Rectangle, StoredChunk
from tilewright.pipeline.transfer.lane import Lane, Spares, free_pinned
from tilewright.pipeline.transfer.lane_blocks import LANE_NBYTES, move_nbytes
from tilewright.pipeline.worker.fusion import Fusion, NoFusion, Region
from tilewright.pipeline.worker.panels import PanelPart, Placed, shaped
from tilewright.pipeline.worker.units import (
    BLOCK_NBYTES,
    Loading,
    Look,
    Move,
    SharedMemory,
    band_rows,
    mirrored_pieces,
    moved,
    multiply,
    pieces_of,
    pool_of,
    prepare_job,
    rounded,
    tile_slots,
    whole_lines,
)

if TYPE_CHECKING:
    from tilewright.kernels.passes.xxh3_device import Table
    from tilewright.pipeline.decoding.upload import CodedUpload, Decoding
    from tilewright.pipeline.store.chunks import Zstd
    from tilewright.pipeline.transfer.file_upload import Upload
    from tilewright.pipeline.transfer.zstd_chunks import ChunkUpload
    from tilewright.pipeline.worker.gpu_fusion import GpuFusion

LOOP_BLOCK_NBYTES = 2**20
"""`BLOCK_NBYTES` for loops outside the interpreter that write, or that decode and encode with a thread for each core.
Larger blocks are no faster there, and take CPU cache from the threads that read (`lane_blocks`)."""


def _lane() -> Lane:
    with allocating("pinned memory for one thread that reads or writes", LANE_NBYTES, on_gpu=False):
        memory = pinned_bytes(LANE_NBYTES)
    return Lane((memory[:BLOCK_NBYTES], memory[BLOCK_NBYTES : 2 * BLOCK_NBYTES]))


_spare_lanes = Spares(_lane)
"""Lanes of past runs."""


def _lanes(count: int) -> list[Lane]:
    """``count`` lanes, spare ones first. If one cannot be made, those there are stay spare."""
    free_pinned(_spare_lanes, count)
    taken: list[Lane] = []
    try:
        while len(taken) < count:
            taken.append(_spare_lanes.take())
    except BaseException:
        for lane in taken:
            _spare_lanes.put(lane)
        raise
    return taken


@contextmanager
def lanes_lent(count: int) -> Iterator[queue.SimpleQueue[Lane]]:
    """``count`` lanes for threads that move bytes otherwise than a unit does; the device is done with them after the
    block. Call it from a thread that is attached to the GPU."""
    lanes = _lanes(count)
    try:
        yield pool_of(lanes)
    finally:
        for lane in lanes:
            lane.settle()
            _spare_lanes.put(lane)


class GpuSharedMemory:
    """Shared memory of this process's GPU and of other processes' GPUs."""

    def __init__(self) -> None:
        from numba import cuda

        self._cuda = cuda
        self._imported, self._lock = peer_memory.ImportedMemory(), threading.Lock()
        self._stream = cuda.stream()

    def export(self, flat: Any) -> bytes:
        return peer_memory.export(flat)

    def copy(self, exported: bytes, peer: str, part: PanelPart, panel: Placed) -> None:
        top, bottom, left, right = part
        item = panel.dtype.itemsize
        corner = panel.place(top, left) * item
        # The gaps between the cells of a line are copied too: the layout is the same there.
        width = (panel.place(top, right - 1) + 1) * item - corner if left < right else 0
        self._cuda.current_context()  # attaches the thread to the GPU
        with self._lock:  # so that nobody closes it meanwhile
            source, target = self._imported.address(peer, exported) + corner, address(panel.flat) + corner
            peer_memory.copy_rectangle(source, target, panel.pitch * item, bottom - top, width, self._stream)
            self._stream.synchronize()

    def close(self, keep: Set[str] = frozenset()) -> None:
        self._cuda.current_context()
        with self._lock:
            self._imported.close(keep)


class _Looks:
    """Memory for what is found in the tiles under way: words on the GPU, and their copies in pinned memory.

    All of it is allocated once: freeing device memory waits for the GPU.
    """

    def __init__(self, product: Product, stream: Any) -> None:
        from numba import cuda

        from tilewright.kernels.passes import contents_device

        self._cuda, self.kernels = cuda, contents_device
        self.panel_stream, self.tile_stream = stream, urgent_stream("looks")
        plan, self.sought = product.plan, product.look
        result = np.dtype(plan.c_dtype)
        self.dtypes = np.dtype(plan.a_dtype), np.dtype(plan.b_dtype), plan.stored
        self.overflows = math.inf, math.inf, overflow_of(result)
        shape = plan.c_buffers, len(self.dtypes), contents_device.WORDS
        self._words, self._copies = cuda.device_array(shape, np.int64), cuda.pinned_array(shape, np.int64)
        self._empty = cuda.pinned_array(shape[1:], np.int64)
        for place, dtype in enumerate(self.dtypes):
            self._empty[place] = contents_device.empty_words(dtype)
        self.masks = [
            tuple(map(cuda.to_device, contents_device.mask_arrays(dtype, sought.masks))) if sought else ()
            for dtype, sought in zip(self.dtypes, self.sought, strict=True)
        ]

    def prepare(self) -> None:
        """Compile and load the kernels that will be launched."""
        for dtype, sought in zip(self.dtypes, self.sought, strict=True):
            if sought:
                self.kernels.KERNELS.prepare(dtype)

    def words(self, slot: int, matrix: int = 0) -> int:
        """The address of a tile's words for A (0), B (1) or C (2)."""
        return address(self._words) + (slot * len(self.dtypes) + matrix) * self._empty.strides[0]

    def begin(self, slot: int, stream: Any) -> None:
        upload_rectangle(self._empty, self.words(slot), self._empty.strides[0], stream)

    def settle(self) -> None:
        self._cuda.current_context()  # attaches the thread to the GPU
        self.tile_stream.synchronize()

    def fetched(self, slot: int) -> np.ndarray:
        """A tile's words, once its panels were multiplied and its tile was looked at."""
        self._cuda.current_context()  # attaches the thread to the GPU
        download_rectangle(self.words(slot), self._empty.strides[0], self._copies[slot], self.tile_stream)
        arrived = self._cuda.event(timing=False)
        arrived.record(self.tile_stream)
        arrived.synchronize()
        return self._copies[slot]


class _Look:
    """A look at what one job multiplies, on the stream that multiplies it, and at its tile, on one of its own: that of
    the products may be busy with the next tile."""

    def __init__(self, looks: _Looks, slot: int) -> None:
        self._looks, self._slot = looks, slot
        self._begun = False

    def at_panel(self, operand: int, panel: Placed) -> None:
        self._at(operand, panel, self._looks.panel_stream)

    def at_tile(self, tile: Placed) -> None:
        from numba import cuda

        cuda.current_context()  # attaches the thread to the GPU
        self._at(2, tile, self._looks.tile_stream)

    def at_rows(self, rows: np.ndarray) -> None:
        """Nothing is left to look at: `at_tile` has launched it."""

    def _at(self, matrix: int, placed: Placed, stream: Any) -> None:
        looks = self._looks
        if not self._begun:
            looks.begin(self._slot, stream)
            self._begun = True
        words, dtype = looks.words(self._slot, matrix), looks.dtypes[matrix]
        extent = Memory(words, (2,), (8,), looks.kernels.wide_dtype(dtype), stream, False)
        counts = Memory(words + extent.size * 8, (3,), (8,), np.dtype(np.int64), stream, False)
        for rows, columns in whole_lines(placed):
            shape = rows.stop - rows.start, columns.stop - columns.start
            strides = placed.pitch * dtype.itemsize, dtype.itemsize
            block = Memory(placed.address(rows.start, columns.start), shape, strides, dtype, stream, False)
            looks.kernels.add_contents(
                block, *looks.masks[matrix], looks.overflows[matrix], extent, counts, stream
            )

    def found(self, times: int = 1) -> Found:
        if not self._begun:
            return NOTHING_FOUND
        looks = self._looks
        words = looks.fetched(self._slot)
        a, b, c = (
            looks.kernels.contents_from(words[place], dtype, sought)
            for place, (dtype, sought) in enumerate(zip(looks.dtypes, looks.sought, strict=True))
        )
        return Found(a, b, c.times(times))

    def settle(self) -> None:
        # The next job of this slot begins on the stream of the panels, which does not wait for that of the tiles.
        self._looks.settle()


class _Hashes:
    """Hashes of panels under way, on a stream of their own: beside the products, whose panels they read.

    Where parts lie, and their hashes, are in pinned memory, which the GPU reads and writes itself. It is kept for later
    panels. For one thread.
    """

    def __init__(self) -> None:
        from numba import cuda

        from tilewright.kernels.passes import xxh3_device

        self._cuda, self._kernels = cuda, xxh3_device
        self._stream = urgent_stream("hashes")
        self._spare: list[np.ndarray] = []

    def prepare(self, panel: Placed, parts: Sequence[PanelPart]) -> None:
        """Compile and load the kernel that will be launched for a panel like this one."""
        self._kernels.KERNELS.prepare(self._table(panel, parts).unit)

    def begin(self, panel: Placed, parts: Sequence[PanelPart]) -> Callable[[], list[int]]:
        self._cuda.current_context()  # attaches the thread to the GPU
        table, stream = self._table(panel, parts), self._stream
        memory = self._memory(table.parts.nbytes + table.words * 8)
        places = memory[: table.parts.nbytes].view(np.uint64).reshape(table.parts.shape)
        results = memory[table.parts.nbytes :].view(np.uint64)
        places[...] = table.parts
        each = table.dtype.itemsize
        count = panel.flat.size * panel.dtype.itemsize // each
        flat = Memory(address(panel.flat), (count,), (each,), table.dtype, stream, True)
        told, found, few = map(device_memory, (places, results, results.view(table.dtype)))
        self._kernels.enqueue_hashes(flat, table, told, found, few, stream)
        done = self._cuda.event(timing=False)
        done.record(stream)

        def hashes() -> list[int]:
            self._cuda.current_context()  # attaches the thread to the GPU
            done.synchronize()
            found = self._kernels.hashes_from(table, results)
            self._spare.append(memory)
            return found

        return hashes

    def _table(self, panel: Placed, parts: Sequence[PanelPart]) -> Table:
        item = panel.dtype.itemsize
        rectangles = [
            (panel.place(top, left) * item, bottom - top, (right - left) * item)
            for top, bottom, left, right in parts
        ]
        return self._kernels.table_of(address(panel.flat), panel.pitch * item, rectangles)

    def _memory(self, nbytes: int) -> np.ndarray:
        for place, memory in enumerate(self._spare):
            if len(memory) >= nbytes:
                return self._spare.pop(place)
        nbytes = 1 << max(12, (nbytes - 1).bit_length())
        with allocating("pinned memory for the hashes of a panel", nbytes, on_gpu=False):
            return pinned_bytes(nbytes)


_in_python = Allowance(IN_LOOPS_NBYTES)


def in_loops(product: Product) -> bool:
    """Whether compiled loops are to move what a worker moves of a product: Python's threads move the first few bytes of
    a process, but none that the GPU decodes."""
    return product.plan.decoding is not None or not _in_python.takes(product.moved_nbytes)


class CudaUnit:
    """One GPU. Threads move bytes through pinned lanes, and wait for a free one."""

    def __init__(self, product: Product, pace: Callable[[int, int, int], Pace] = Pace) -> None:
        """pace: says who decodes chunks, the GPU or a core."""
        from numba import cuda

        from tilewright.pipeline.transfer import file_download, file_upload, zstd_chunks

        self._product = product
        self._cuda, self._upload, self._download = cuda, file_upload, file_download
        self._chunks = zstd_chunks
        self._compute_stream = cuda.stream()
        self._upload_stream, self._download_stream = upload_stream(), download_stream()
        self._mirror_stream = urgent_stream("mirrors")
        self._upload_nbytes = move_nbytes(product.plan.read_threads, product.neighbours)
        self.shared: SharedMemory | None = GpuSharedMemory() if peer_memory.available() else None
        self._in_loops = zstd_chunks.available() and in_loops(product)
        """Whether threads move bytes without the interpreter's lock."""
        if self._in_loops:
            file_upload.prepare()
            file_download.prepare()
        self._looks: _Looks | None = None
        self._hashes: _Hashes | None = None
        self._slots: dict[int, int] = {}
        self._gpu_fusion: GpuFusion | None = None
        if product.fused:
            from tilewright.pipeline.worker.gpu_fusion import GpuFusion

            self._gpu_fusion = GpuFusion(product, self.allocate, self._compute_stream)
        self.fusion: Fusion = NoFusion() if self._gpu_fusion is None else self._gpu_fusion
        self._decoding = self._decoder(pace) if self._in_loops else None
        """What decodes chunks on the GPU; None where the cores decode them all."""
        self._lanes = pool_of(_lanes(product.plan.lanes))

    def _decoder(self, pace: Callable[[int, int, int], Pace]) -> Decoding | None:
        room = self._product.plan.decoding
        if room is None:
            return None
        from tilewright.pipeline.decoding import headers
        from tilewright.pipeline.decoding.slots import Compiling, GpuSlot
        from tilewright.pipeline.decoding.upload import Decoding

        headers.prepare()
        self._compiling = Compiling()
        return Decoding([GpuSlot(room) for _ in range(room.slots)], pace, self._compiling.done)

    def attach(self) -> None:
        self._cuda.current_context()

    def allocate(self, size: int, dtype: np.dtype) -> Any:
        with allocating("a buffer for a panel or a tile", size * dtype.itemsize, on_gpu=True):
            return self._cuda.device_array(max(size, 1), dtype)

    def tile_slots(self) -> list[Any]:
        slots = tile_slots(self._product.plan, self.allocate)
        self._looks = _Looks(self._product, self._compute_stream)
        self._hashes = _Hashes()
        self._slots = {id(slot): number for number, slot in enumerate(slots)}
        return slots

    @contextmanager
    def _lane(self) -> Iterator[Lane]:
        self._cuda.current_context()  # attaches the thread to the GPU: pool threads are not attached
        lane = self._lanes.get()
        try:
            yield lane
        finally:
            self._lanes.put(lane)

    def loading(
        self,
        array: StoredArray,
        region: tuple[slice, slice],
        panel: Placed,
        corner: tuple[int, int] = (0, 0),
    ) -> Loading:
        def ordinary(parts: list[RegionRead], place: tuple[int, int]) -> list[Callable[[], Move]]:
            return [partial(self.load, part, panel) for part in moved(parts, place)]

        pieces = pieces_of(region, panel, corner)
        if not self._in_loops:
            reads = [call for piece, place in pieces for call in ordinary(region_reads(array, piece), place)]
            return Loading(reads, settle=self._settle)
        pitch = panel.pitch * panel.dtype.itemsize
        found: list[tuple[FilePart, tuple[int, int]]] = []
        others: list[Callable[[], Move]] = []
        coding = self._coding_of(array)
        for piece, place in pieces:
            parts, left = region_uploads(array, piece, panel.address(*place), pitch, coded=coding is not None)
            found += [(part, place) for part in parts]
            others += ordinary(left, place)
        if coding is not None and found:
            coded = self._coded_upload(found, coding, panel)
            threads = min(self._product.plan.read_threads, coded.blocks)
            calls = [partial(self._run_coded, coded) for _ in range(threads)]
            return Loading(
                calls + others, partial(self._rest, coded, found, ordinary), partial(self._settle, coded)
            )
        upload = self._upload_of([part.source for part, _ in found])
        threads = min(self._product.plan.read_threads, upload.blocks)
        calls = [partial(self._run_loop, upload) for _ in range(threads)]
        return Loading(calls + others, partial(self._rest, upload, found, ordinary), self._settle)

    def _rest(
        self,
        upload: Upload | ChunkUpload | CodedUpload,
        found: Sequence[tuple[FilePart, tuple[int, int]]],
        ordinary: Callable[[list[RegionRead], tuple[int, int]], list[Callable[[], Move]]],
    ) -> list[Callable[[], Move]]:
        """Calls for what an upload could not move: chunks never written, and those for which an ordinary read reports
        what is wrong."""
        self._cuda.current_context()  # attaches the thread to the GPU
        failed = [found[number] for number in upload.failed()]
        return [call for part, place in failed for call in ordinary(part.reads(), place)]

    def _coding_of(self, array: StoredArray) -> Coding | None:
        """How chunks are encoded that the GPU decodes; None where it decodes none of an array."""
        found = None if self._decoding is None else coding_of(array)
        if self._decoding is None or found is None or not self._decoding.batch(found[1]):
            return None
        return found[0]

    @property
    def decoding(self) -> Decoding | None:
        """What decodes on the GPU, for those who look on; None where the cores decode everything."""
        return self._decoding

    def wait_for_decoders(self) -> None:
        """Wait until what decodes on the GPU is compiled, if anything does."""
        if self._decoding is not None:
            self._compiling.wait()

    def _coded_upload(
        self, found: Sequence[tuple[FilePart, tuple[int, int]]], coding: Coding, panel: Placed
    ) -> CodedUpload:
        """The upload of encoded chunks that the GPU and the cores decode together."""
        from tilewright.pipeline.decoding.upload import CodedUpload

        assert self._decoding is not None, "else nothing has a coding"
        chunks = [part.source for part, _ in found if isinstance(part.source, StoredChunk)]
        in_loops = (
            coding.form == ZSTD and not coding.suffix and not coding.by_columns and not coding.numbers.swapped
        )

        def on_core(number: int, lane: Lane) -> tuple[float, float]:
            if in_loops:
                loop = self._chunks.ChunkUpload(chunks[number : number + 1], LOOP_BLOCK_NBYTES)
                spent = loop.run(lane.to_gpu)
                if loop.failed():
                    upload.fail(number)
                return spent
            part, place = found[number]
            moves = [self._load(lane, read, panel) for read in moved(part.reads(), place)]
            return sum(move.store_seconds for move in moves), sum(move.device_seconds for move in moves)

        def bring(rectangles: Sequence[Rectangle]) -> Upload:
            return self._upload.Upload(rectangles, self._upload_nbytes, threads)

        threads = min(self._product.plan.read_threads, len(chunks))
        matrix = address(panel.flat)
        upload = CodedUpload(chunks, coding, matrix, self._decoding, bring, on_core, threads)
        return upload  # which `on_core` tells what no core could decode

    def _run_coded(self, upload: CodedUpload) -> Move:
        with self._lane() as lane:
            return Move(*upload.run(lane, lane.to_gpu))

    def _upload_of(self, sources: Sequence[Rectangle | StoredChunk]) -> Upload | ChunkUpload:
        """The upload of these parts, which are all plain or all compressed."""
        chunks = [source for source in sources if isinstance(source, StoredChunk)]
        if chunks:
            return self._chunks.ChunkUpload(chunks, LOOP_BLOCK_NBYTES)
        rectangles = [source for source in sources if isinstance(source, Rectangle)]
        return self._upload.Upload(rectangles, self._upload_nbytes, self._product.plan.read_threads)

    def _run_loop(self, upload: Upload | ChunkUpload) -> Move:
        with self._lane() as lane:
            return Move(*upload.run(lane.to_gpu))

    def load(self, part: RegionRead, panel: Placed) -> Move:
        with self._lane() as lane:
            return self._load(lane, part, panel)

    def _load(self, lane: Lane, part: RegionRead, panel: Placed) -> Move:
        rows, columns = part.shape
        item = panel.dtype.itemsize
        pitch, start = panel.pitch * item, panel.address(part.target[0].start, part.target[1].start)
        reading = 0.0
        begun = time.perf_counter()
        whole = None
        if rows * columns * item > BLOCK_NBYTES:  # a chunk decoded as a whole is sent in bands
            whole = np.empty((rows, columns), panel.dtype)
            clock = time.perf_counter()
            part.read(whole)
            reading += time.perf_counter() - clock
        bands = ((0, 0, (rows, columns)),) if whole is None else block_rectangles((rows, columns), item)
        for row, column, extent in bands:
            staged = shaped(lane.block().view(panel.dtype), extent)
            clock = time.perf_counter()
            if whole is None:
                part.read(staged)
            else:
                staged[...] = whole[row : row + extent[0], column : column + extent[1]]
            reading += time.perf_counter() - clock
            upload_rectangle(staged, start + row * pitch + column * item, pitch, self._upload_stream)
            lane.sent(self._upload_stream)
        return Move(reading, time.perf_counter() - begun - reading)

    def _settle(self, coded: CodedUpload | None = None) -> None:
        self._cuda.current_context()
        if coded is not None:
            coded.settle()
        self._upload_stream.synchronize()  # also waits for what was sent for other panels by now

    def prepare(
        self, a: Placed, b: Placed, tile: Placed, diagonal: bool = False, slabs: Sequence[slice] = ()
    ) -> None:
        prepare_job(self._product, a, b, tile, self._compute_stream, diagonal, slabs)
        if self._gpu_fusion is not None:
            self._gpu_fusion.prepare()
        if self._looks is not None:
            self._looks.prepare()

    def prepare_hashes(self, panel: Placed, parts: Sequence[PanelPart]) -> None:
        assert self._hashes is not None, "made with the slots"
        self._hashes.prepare(panel, parts)

    def hashed(self, panel: Placed, parts: Sequence[PanelPart]) -> Callable[[], list[int]]:
        assert self._hashes is not None, "made with the slots"
        return self._hashes.begin(panel, parts)

    def multiply(
        self,
        a: Placed,
        b: Placed,
        tile: Placed,
        accumulate: bool,
        diagonal: bool = False,
        slab: slice | None = None,
    ) -> frozenset[str]:
        return multiply(self._product, a, b, tile, accumulate, self._compute_stream, diagonal, slab)

    def passed(self) -> Callable[[], None]:
        event = self._cuda.event(timing=False)
        event.record(self._compute_stream)

        def wait() -> None:
            self._cuda.current_context()  # attaches the thread to the GPU
            event.synchronize()

        return wait

    def clear(self, tile: Placed) -> None:
        tile.flat.copy_to_device(np.zeros(tile.flat.size, tile.dtype))

    def look(self, slot: Any) -> _Look:
        assert self._looks is not None, "made with the slots"
        return _Look(self._looks, self._slots[id(slot)])

    def mirror(self, tile: Placed, *, swap: bool, square: Region | None = None) -> None:
        from tilewright.kernels.passes.transpose_device import transpose

        self._cuda.current_context()  # attaches the thread to the GPU
        for below, above in mirrored_pieces(tile, self._product.plan.cell_rows, square):
            lower, upper = (as_device_array(tile.cut(*piece)) for piece in (below, above))
            options = {"swap": swap, "same": below == above, "conjugate": self._product.plan.hermitian}
            transpose(lower, upper, self._mirror_stream, **options)
        self._mirror_stream.synchronize()

    def clear_outside(self, tile: Placed, region: tuple[slice, slice], band: Band) -> None:
        from tilewright.kernels.passes.band_device import clear_outside

        self._cuda.current_context()  # attaches the thread to the GPU
        for rows, columns in whole_lines(tile):
            below = region[0].start + rows.start - region[1].start - columns.start
            matrix = as_device_array(tile.cut(rows, columns))
            clear_outside(matrix, below - band.before, below + band.after, self._mirror_stream)
        self._mirror_stream.synchronize()

    def save(self, piece: RegionWrite, tile: Placed, dtype: np.dtype, look: Look | None = None) -> Move:
        item = tile.dtype.itemsize
        pitch = tile.pitch * item
        rows, columns = piece.source
        height, width = rows.stop - rows.start, columns.stop - columns.start
        corner = tile.address(rows.start, columns.start)
        moving = [0.0]

        def start(lane: Lane, row: int, column: int, extent: tuple[int, int]) -> tuple[np.ndarray, Any]:
            """Start copying a rectangle into the lane's next block; returns the block and the event of its arrival."""
            staged = shaped(lane.block().view(tile.dtype), extent)
            source = corner + row * pitch + column * item
            download_rectangle(source, pitch, staged, self._download_stream)
            return staged, lane.sent(self._download_stream)

        def bands(lane: Lane) -> Iterator[np.ndarray]:
            # While one band is written, the next is copied into the other block, whose band has been written already.
            parts = list(block_rectangles((height, width), item))
            row = np.empty((1, width), tile.dtype) if parts[0][2][1] < width else None
            clock = time.perf_counter()
            coming = start(lane, *parts[0])
            for place, (_, column, extent) in enumerate(parts):
                staged, arrived = coming
                if place + 1 < len(parts):
                    coming = start(lane, *parts[place + 1])
                arrived.synchronize()
                moving[0] += time.perf_counter() - clock
                if row is None:
                    yield rounded(staged, dtype)
                else:  # a single row is longer than a block
                    row[:, column : column + extent[1]] = staged
                    if column + extent[1] == width:
                        yield rounded(row, dtype)
                clock = time.perf_counter()

        def fill(lane: Lane, descriptor: int, zstd: Zstd | None) -> tuple[bool, int | None]:
            rectangle = corner, pitch, height, width * item
            if zstd is None:
                good, checksum, _, waiting = self._download.store(
                    descriptor, *rectangle, LOOP_BLOCK_NBYTES, lane.from_gpu
                )
            else:
                good, checksum, _, waiting = self._chunks.store_chunk(
                    descriptor, *rectangle, *zstd, LOOP_BLOCK_NBYTES, lane.from_gpu
                )
            moving[0] += waiting
            return good, checksum

        direct = self._in_loops and dtype == tile.dtype
        with self._lane() as lane:
            clock = time.perf_counter()
            stored = piece.write(bands(lane), partial(fill, lane) if direct else None)
        return Move(time.perf_counter() - clock - moving[0], moving[0], stored)

    def close(self) -> None:
        self._cuda.current_context()
        if self.shared is not None:
            self.shared.close()
        self.fusion.close()
        if self._decoding is not None:
            self._decoding.close()
            self._decoding = None  # its memory is another run's
        while not self._lanes.empty():
            _spare_lanes.put(self._lanes.get())


def block_rectangles(shape: tuple[int, int], itemsize: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Rectangles of a matrix that fit into a block: first row, first column and shape of each."""
    wide = max(1, min(shape[1], BLOCK_NBYTES // itemsize))
    tall = band_rows(wide, itemsize)
    for row in range(0, shape[0], tall):
        for column in range(0, shape[1], wide):
            yield row, column, (min(tall, shape[0] - row), min(wide, shape[1] - column))
