"""Launching kernels that Numba's launcher cannot: with clusters, 200 KB of shared memory and tensor maps.

A kernel is compiled by Numba (scalar arguments only) and launched through ``cuLaunchKernelEx``. Tensor
maps, which tell the copy engine how a matrix lies in memory, are kept in device memory and made once for
each layout.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from tilewright.kernels.gemm.base import Capability, Variant
from tilewright.kernels.gemm.exact.residues import RESIDUES
from tilewright.kernels.gemm.hopper.selection import NO_COLUMN
from tilewright.kernels.gemm.hopper.wgmma import ARGUMENTS, kernel_function, lower_tiles
from tilewright.kernels.gemm.hopper.wgmma_config import Config
from tilewright.kernels.gpu.compiled import compile_kernel, multiprocessors
from tilewright.kernels.gpu.device_array import address
from tilewright.kernels.gpu.device_choice import current_device
from tilewright.kernels.gpu.driver_error import checked
from tilewright.kernels.gpu.launch import enqueue
from tilewright.kernels.gpu.recording import Found, Recording
from tilewright.kernels.gpu.streams import DEFAULT_STREAM
from tilewright.kernels.numbers import ceil_div
from tilewright.kernels.shipped.described import ADDRESS, described

HOPPER = (9, 0)
TENSOR_MAP_NBYTES = 128
TENSOR_MAPS_KEPT = 1024
"""Tensor maps in device memory at a time; when all are taken, the host waits for the device and they are made anew."""


RECORDED_MAPS_KEPT = 64
"""Addresses for which a recorded launch knows at once where their maps lie."""


@dataclass(frozen=True)
class Launchable:
    """A kernel of scalars and how it is launched."""

    kernel: Any
    threads: int
    shared_nbytes: int
    cluster: int

    def launch(self, grid: int | tuple[int, int], stream: Any, *arguments: int) -> None:
        """Enqueue ``grid`` blocks (a multiple of the cluster) on ``stream``."""
        enqueue(self.kernel, grid, self.threads, stream, self.shared_nbytes, *arguments, cluster=self.cluster)


def compile_launchable(
    function: Callable[..., Any],
    argument_types: tuple[Any, ...],
    *,
    threads: int,
    shared_nbytes: int = 0,
    cluster: int = 1,
    blocks_per_multiprocessor: int = 1,
) -> Launchable:
    """``function`` of scalars, compiled for a GPU by its first launch there, or together with others."""
    kernel = compile_kernel(
        function,
        types.void(*argument_types),
        launch_bounds=(threads, blocks_per_multiprocessor),
        shared_nbytes=shared_nbytes,
    )
    return Launchable(kernel, threads, shared_nbytes, cluster)


def read_plan(plan: int, length: int, stream: Any) -> np.ndarray:
    """The first ``length`` int64 of device memory at an address, once all that was enqueued on the stream is done."""
    from cuda.bindings import driver

    found = np.zeros(length, np.int64)
    handle = int(stream) if stream else DEFAULT_STREAM
    copied = driver.cuMemcpyDtoHAsync(found.ctypes.data, plan, found.nbytes, handle)
    checked("copying a plan from the GPU", copied)
    checked("waiting for a plan", driver.cuStreamSynchronize(handle))
    return found


@dataclass(frozen=True)
class Planes:
    """Matrices of one shape, one after the other, as the copy engine sees them: lines of contiguous elements."""

    address: int
    """Of the first element; a multiple of 16."""
    width: int
    """Elements of a line, contiguous."""
    lines: int
    planes: int
    line_nbytes: int
    """From line to line; a multiple of 16."""
    plane_nbytes: int
    kind: str
    """PTX operand type: s8, u8, e4m3, e5m2, bf16, f16 or tf32; of what is only stored u16 or u32."""

    @property
    def loadable(self) -> bool:
        """Whether the copy engine takes it: alignment of 16 bytes everywhere."""
        return self.address % 16 == 0 and self.line_nbytes % 16 == 0 and 0 < self.line_nbytes < 1 << 40


class MapStore:
    """Where the tensor maps of one device lie.

    base: the address of memory for `TENSOR_MAPS_KEPT` of them. write: puts the map of planes with boxes at an address.
    settle: waits until no kernel under way reads any.
    """

    def __init__(
        self, base: int, write: Callable[[int, Planes, tuple[int, int]], None], settle: Callable[[], None]
    ) -> None:
        self.places: dict[tuple[Planes, tuple[int, int]], int] = {}
        self.made_anew = 0
        """How often all places were given up."""
        self._base, self._write, self._settle = base, write, settle

    def addresses(self, wanted: tuple[tuple[Planes, tuple[int, int]], ...]) -> list[int]:
        """The device addresses of tensor maps of planes with boxes of (width, lines)."""
        # A matrix by its own transpose asks for one map twice.
        missing = [key for key in dict.fromkeys(wanted) if key not in self.places]
        if len(self.places) + len(missing) > TENSOR_MAPS_KEPT:
            self._settle()  # kernels under way may still read maps that are about to be overwritten
            self.places.clear()
            self.made_anew += 1
            missing = list(dict.fromkeys(wanted))
        for key in missing:
            place = self._base + len(self.places) * TENSOR_MAP_NBYTES
            self._write(place, *key)
            self.places[key] = place
        return [self.places[key] for key in wanted]


class OpenMaps:
    """The tensor maps of a launch that was recorded, for planes whose addresses are open; see `Found.find`."""

    def __init__(self, store: MapStore, maps: Sequence[tuple[Planes, tuple[int, int]]]) -> None:
        """The address of each of the planes is a `Place`."""
        self._store, self._maps = store, maps
        places: list[Any] = [planes.address for planes, _ in maps]
        self._places = [(place.base, place.offset) for place in places]
        self._known: dict[tuple[int, ...], tuple[int, list[int]]] = {}

    def __call__(self, bases: Sequence[int]) -> list[int]:
        given = tuple([bases[base] + offset for base, offset in self._places])
        known = self._known.get(given)
        if known is None or known[0] != self._store.made_anew:
            maps = zip(given, self._maps, strict=True)
            found = self._store.addresses(
                tuple((replace(planes, address=place), box) for place, (planes, box) in maps)
            )
            if len(self._known) >= RECORDED_MAPS_KEPT:
                self._known.clear()
            known = self._known[given] = self._store.made_anew, found
        return known[1]


def _write_map(stream: Any, address: int, planes: Planes, box: tuple[int, int]) -> None:
    from cuda.bindings import driver

    cuda.current_context()  # a thread that has not touched the GPU yet gets its context
    encoded = encode_tensor_map(planes, box)
    copied = driver.cuMemcpyHtoDAsync(address, encoded.ctypes.data, TENSOR_MAP_NBYTES, stream)
    checked("copying a tensor map to the GPU", copied)
    # Any stream may use it from now on.
    checked("waiting for a tensor map", driver.cuStreamSynchronize(stream))


def _own_stream() -> Any:
    """A stream of the driver's that does not wait for the default stream, as Numba's do: waiting for it would then be
    waiting for all that was enqueued there."""
    from cuda.bindings import driver

    flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    return checked("making a stream", driver.cuStreamCreate(int(flags)))


@functools.cache
def _map_store(device: int) -> MapStore:
    if described() is not None:
        return MapStore(ADDRESS, lambda *_: None, lambda: None)
    memory = cuda.device_array(TENSOR_MAP_NBYTES * TENSOR_MAPS_KEPT, np.uint8)
    _map_memory.append(memory)
    return MapStore(address(memory), functools.partial(_write_map, _own_stream()), cuda.synchronize)


_map_memory: list[Any] = []
"""Of all devices, for as long as this process lasts."""


_maps_lock = threading.Lock()
"""Held from looking up tensor maps until the kernel that reads them is enqueued, so that none is overwritten."""


def encode_tensor_map(planes: Planes, box: tuple[int, int]) -> np.ndarray:
    """The 128 bytes of a tensor map: three dimensions, 128-byte swizzle, zeros outside."""
    from cuda.bindings import driver

    kind = driver.CUtensorMapDataType
    element = {
        "u16": kind.CU_TENSOR_MAP_DATA_TYPE_UINT16,
        "u32": kind.CU_TENSOR_MAP_DATA_TYPE_UINT32,
        "s8": kind.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        "u8": kind.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        "e4m3": kind.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        "e5m2": kind.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        "bf16": kind.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "f16": kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "tf32": kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }[planes.kind]
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    encoded = checked(
        "encoding a tensor map",
        driver.cuTensorMapEncodeTiled(
            element,
            3,
            planes.address,
            [wide(planes.width), wide(planes.lines), wide(planes.planes)],
            [wide(planes.line_nbytes), wide(planes.plane_nbytes)],
            [narrow(box[0]), narrow(box[1]), narrow(1)],
            [narrow(1)] * 3,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
    )
    return np.array([int(word) for word in encoded.opaque], np.uint64).view(np.uint8)


ROUNDS = 4
"""Cluster tiles that each cluster multiplies by residues in one launch. They take a dozen and more products one after
the other each, and drift apart: what several read at one time, they read at several then, and the second-level cache no
longer holds it. A launch begins when the one before has ended."""


def persistent_grid(tiles: int, cluster: int) -> int:
    """Blocks for ``tiles`` cluster tiles: one a multiprocessor, whole clusters, none without work."""
    clusters = multiprocessors(current_device()) // cluster
    return cluster * max(1, min(tiles, clusters))


def variant(name: str, config: Config) -> Variant:
    """What a test needs to compile ``config`` without a GPU."""
    return Variant(
        name,
        kernel_function(config),
        types.void(*ARGUMENTS),
        minimum=HOPPER,
        options={"launch_bounds": (config.threads, 1)},
    )


def pass_variant(
    name: str,
    function: Any,
    arguments: tuple[Any, ...],
    threads: int,
    blocks: int,
    minimum: Capability = HOPPER,
) -> Variant:
    """The same for a pass over an operand."""
    signature = types.void(*arguments)
    return Variant(name, function, signature, minimum=minimum, options={"launch_bounds": (threads, blocks)})


@functools.cache
def compiled(config: Config) -> Launchable:
    return compile_launchable(
        kernel_function(config),
        ARGUMENTS,
        threads=config.threads,
        shared_nbytes=config.shared_nbytes,
        cluster=config.cluster,
    )


@dataclass(frozen=True)
class Output:
    """C as the kernel writes it, perhaps transposed, so that rows are contiguous."""

    address: int
    rows: int
    columns: int
    row_stride: int
    """In elements, as column_stride."""
    column_stride: int
    c_type: Any
    """Numba scalar type of the elements."""
    transposed: bool
    diagonal: int | None = None
    """Only elements in columns up to their row + this are wanted; None: all are."""

    @property
    def flipped(self) -> Output:
        """The transpose of the same memory."""
        return replace(
            self,
            rows=self.columns,
            columns=self.rows,
            row_stride=self.column_stride,
            column_stride=self.row_stride,
            transposed=not self.transposed,
            diagonal=None,  # it would be the upper half: all are computed
        )

    def part(self, row: int, rows: int, column: int, columns: int) -> Output:
        """``rows`` rows from ``row`` on, and ``columns`` columns from ``column`` on."""
        offset = (row * self.row_stride + column * self.column_stride) * self.c_type.bitwidth // 8
        diagonal = None if self.diagonal is None else self.diagonal + row - column
        return replace(self, address=self.address + offset, rows=rows, columns=columns, diagonal=diagonal)

    @property
    def paired(self) -> bool:
        """Whether two neighbours of a row can be written at once."""
        pair_nbytes = 2 * self.c_type.bitwidth // 8
        return self.column_stride == 1 and self.row_stride % 2 == 0 and self.address % pair_nbytes == 0

    @property
    def planes(self) -> Planes | None:
        """C of 16- or 32-bit elements for the copy engine, if it takes it. It writes 16 bytes at a time, whatever the
        map says of where a row ends, so that rows must end with such, or what lies behind them would be written over
        (seen here for each number of bytes, and in Triton's issue 11583)."""
        itemsize = self.c_type.bitwidth // 8
        line = itemsize * self.row_stride
        kind = STORED_KINDS[self.c_type.bitwidth]
        planes = Planes(self.address, self.columns, self.rows, 1, line, line * self.rows, kind)
        in_words = self.columns * itemsize % 16 == 0
        aligned = self.column_stride == 1 and self.row_stride >= self.columns and in_words
        return planes if aligned and planes.loadable else None


STORED_KINDS = {16: "u16", 32: "u32"}
"""A tensor map's element type for any elements of so many bits, which are stored as they are."""


def output_of(c: Any, c_type: Any, *, lower: bool = False) -> Output:
    """A device array as an output of ``c_type``; transposed if it is column-major. lower: as ``GemmKernel`` says."""
    itemsize = c.dtype.itemsize
    row_stride, column_stride = (stride // itemsize for stride in c.strides)
    rows, columns = c.shape
    transposed = row_stride == 1 and column_stride != 1
    if transposed:
        rows, columns, row_stride, column_stride = columns, rows, column_stride, row_stride
    diagonal = 0 if lower and not transposed else None
    return Output(address(c), rows, columns, row_stride, column_stride, c_type, transposed, diagonal)


def launch_product(
    config: Config,
    a: Planes,
    b: Planes,
    output: Output,
    depth: int,
    accumulate: bool,
    stream: Any,
    *,
    plan: int = 0,
    workspace: int = 0,
) -> None:
    """Enqueue C = A B (+ C) on Hopper's tensor cores.

    a: m lines of k, or k lines of m when ``config.m_major_a``; b: n lines of k, or k lines of n when
    ``config.n_major_b``; depth: k. plan, workspace: device addresses, for the variants that use them.
    """
    planes_c = output.planes if config.boxes and not accumulate else None
    paired = output.flipped.paired if config.c_by_columns else output.paired
    _launch(
        config,
        [(a, config.box_a), (b, config.box_b), *([(planes_c, config.box_c)] if planes_c else ())],
        (output.address, output.row_stride, output.column_stride),
        (output.rows, output.columns, depth, output.diagonal),
        (int(paired), int(accumulate), plan, workspace),
        stream,
    )


@dataclass(frozen=True)
class Kept:
    """Where the elements of C that are kept go: see `tilewright.kernels.gemm.hopper.selection`."""

    words: int
    """Address of the lists."""
    capacity: int
    """Places of each."""
    lists: bool
    """Whether each row has a list of its own."""
    bounds: int
    """Address of the rows' bounds, factors and counters."""
    factors: int
    """Address of the columns' factors; 0 where the metric needs none."""
    first_column: int
    """The number of the first column, below 2^32."""
    left_out: int
    """Column - row of elements that are left out, or `selection.NO_COLUMN`; of a ``mutual`` selection the number of the
    first row."""
    rows: int = 0
    """Of a ``mutual`` selection, those of the matrix."""
    names: int = 0
    """Of another, the address of the numbers by which words name columns, or 0: by those that they have."""


def launch_selection(
    config: Config, a: Planes, b: Planes, kept: Kept, depth: int, stream: Any, *, diagonal: int | None = None
) -> None:
    """Enqueue the product of `launch_product` for a ``config`` that selects. diagonal: only columns up to the row + it
    are wanted."""
    shift = kept.left_out if config.mutual or -b.lines < -kept.left_out < a.lines else NO_COLUMN
    _launch(
        config,
        [(a, config.box_a), (b, config.box_b)],
        (kept.words, kept.capacity if kept.lists else 0, kept.first_column),
        (a.lines, b.lines, depth, diagonal),
        (kept.capacity, shift, kept.bounds, kept.factors),
        stream,
        rows=kept.rows if config.mutual else kept.names,
    )


def _launch(
    config: Config,
    maps: list[tuple[Planes, tuple[int, int]]],
    out: tuple[int, int, int],
    sides: tuple[int, int, int, int | None],
    settings: tuple[int, int, int, int],
    stream: Any,
    *,
    rows: int = 0,
) -> None:
    """Enqueue a kernel.

    maps: A's, B's and perhaps C's; without C's, ``rows`` in its place, or where names lie. out: address, row_stride and
    column_stride. sides: m, n, k, and the diagonal beyond which nothing is wanted. settings: paired, accumulate, plan
    and workspace.
    """
    m, n, depth, wanted = sides
    cluster_m, tile_n = config.tile_m * config.cluster, config.tile_n
    down, across = ceil_div(m, cluster_m), ceil_div(n, tile_n)
    tiles, steps, diagonal = down * across, 0, wanted or 0
    if wanted is not None and diagonal < n:
        tiles = steps = lower_tiles(down, across, config.group, cluster_m, tile_n, diagonal)
        if not steps:
            return
    kernel = compiled(config)
    grid = persistent_grid(tiles, config.cluster)
    at_once = ROUNDS * grid // config.cluster if config.plan_kind == RESIDUES else tiles
    with _maps_lock:
        store = _map_store(current_device())
        if isinstance(stream, Recording):
            found: Sequence[Any] = Found(OpenMaps(store, maps), _maps_lock).values(len(maps))
        else:
            found = store.addresses(tuple(maps))
        map_a, map_b, *map_c = found
        for first in range(0, tiles, at_once):
            kernel.launch(
                min(grid, config.cluster * (tiles - first)),
                stream,
                map_a,
                map_b,
                *out,
                m,
                n,
                ceil_div(depth, config.depth),
                *settings,
                *(map_c or (rows,)),
                steps,
                diagonal,
                first,
                first + at_once,
            )
