"""A Zarr matrix between files and a buffer in memory, or on a GPU: ours beside what could replace it, in turns.

The same stored matrix, the same number of threads, uncompressed chunks, chunks compressed by Zstandard, and shards.
Beside ours stand zarr-python, and zarrs, TensorStore and KvikIO where they are installed.
A warm case finds the files in the page cache; before each run of a cold one the system is asked to drop them. What
each contestant has read, or written, is compared with the matrix before it is timed. Rates are of the matrix's
bytes, compressed or not; written bytes go to the page cache, as they would for a user.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numcodecs
import numpy as np
import zarr
from zarr.buffer import default_buffer_prototype
from zarr.codecs import BloscCodec, ZstdCodec
from zarr.storage import MemoryStore

from tilewright.kernels.errors import DTypeError, OptionError
from tilewright.kernels.gpu.device_choice import resolve_device
from tilewright.kernels.numbers import ceil_div, counted
from tilewright.pipeline.decoding.choice import inputs_of
from tilewright.pipeline.decoding.pace import Choice, Pace
from tilewright.pipeline.plan.decoding import EVERYWHERE, NOWHERE, room_for
from tilewright.pipeline.plan.inputs import Limits
from tilewright.pipeline.plan.memory import Lines
from tilewright.pipeline.plan.product import plan_tiles
from tilewright.pipeline.plan.told import Product
from tilewright.pipeline.store.arrays import as_stored_matrix
from tilewright.pipeline.store.region_read import region_reads
from tilewright.pipeline.store.region_write import region_writes
from tilewright.pipeline.threads import run_all
from tilewright.pipeline.worker.gpu_unit import CudaUnit
from tilewright.pipeline.worker.load_stage import load_all
from tilewright.pipeline.worker.panels import Placed
from tilewright.pipeline.worker.survey import no_nvcomp
from tilewright.pipeline.worker.units import DeviceUnit
from tilewright.workflows.bench.common import (
    SECONDS,
    BenchReport,
    Contestant,
    Picture,
    Row,
    expect_pictures,
    forget_pages,
    library,
    machine,
    measure,
    publish,
    tell,
)
from tilewright.workflows.console import Size

LAYOUTS = ("plain", "zstd", "shards")
"""Uncompressed chunks; chunks compressed by Zstandard; uncompressed inner chunks, SHARD × SHARD to a file."""
OTHER_LAYOUTS = ("lz4", "blosc")
"""Chunks compressed by LZ4; by Blosc with LZ4, their bytes shuffled. Only on the way to a GPU, and where asked for."""
SHARD = 4
DIRECTIONS = ("read", "write", "decode", "device")
"""Files to memory; memory to files; compressed chunks in memory to memory (Zstandard only); files to a GPU."""
DEVICE_LAYOUTS = ("plain", "zstd", *OTHER_LAYOUTS)
DEVICE_THREADS = (8, 16)
"""What reads towards a GPU use where nothing else is asked for: a worker's threads, and twice as many."""
KVIKIO_TASKS = {None: "", 1 << 20: ", tasks of 1 MiB", 16 << 20: ", tasks of 16 MiB"}
"""How many bytes each of KvikIO's threads reads at a time, and how that is told; by default 4 MiB."""
CACHES = ("warm", "cold")
VALUES: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "whole": lambda rng, shape: rng.integers(0, 4096, shape),
    "small": lambda rng, shape: rng.integers(0, 100, shape),
    "normal": lambda rng, shape: rng.standard_normal(shape, np.float32),
}
"""What elements are: random integers, which Zstandard compresses to about half as float32, and those below 100 to a
tenth as int64; random floats, of which it saves a twelfth."""


@dataclass(frozen=True)
class Case:
    """One way of storing, moved in one direction by so many threads."""

    direction: str
    layout: str
    cache: str
    threads: int

    def __str__(self) -> str:
        cache = f", {self.cache}" if self.direction in ("read", "device") else ""
        return f"{self.direction} {self.layout}{cache}, {counted(self.threads, 'thread')}"


def default_threads() -> tuple[int, ...]:
    """One, and as many as there are cores."""
    return tuple(dict.fromkeys((1, len(os.sched_getaffinity(0)))))


def run_io(
    nbytes: int,
    folder: Path,
    *,
    chunk: int = 1024,
    dtype: str = "float32",
    layouts: Sequence[str] = LAYOUTS,
    directions: Sequence[str] = (),
    caches: Sequence[str] = CACHES,
    threads: Sequence[int] | None = None,
    device: str = "auto",
    values: str = "whole",
    seconds: float = 0.5,
    progress: Callable[[str], None] = lambda text: None,
) -> BenchReport:
    """Time every layout in every direction; ``folder`` takes some copies of the matrix and is left empty.

    nbytes: of a square matrix, about. chunk: side of a stored chunk. directions: by default all, ``device`` only where
    a GPU can be used and ``device`` is not ``cpu``. caches: only matter to reads. threads: how many each contestant may
    use, by default one and all cores, and DEVICE_THREADS towards a GPU. values: one of VALUES. seconds: for each
    contestant of a case, about. Raises DTypeError for a dtype without numbers, DeviceUnavailableError for a GPU that
    was asked for and is not there, OptionError where no case is left or values are no numbers of the dtype, and
    WrongAnswer where a contestant moved something else.
    """
    kind = _number(dtype)
    if values == "normal" and kind.kind in "iu":
        raise OptionError(
            f"--values normal are no whole numbers, and --dtype {dtype} has no others; say float32"
        )
    if "device" in directions and device == "cpu":
        raise OptionError(
            "--direction device reads to a GPU, and --device cpu leaves it out; leave one of them away"
        )
    on_gpu = resolve_device("cuda" if "device" in directions else device) == "cuda"
    wanted = directions or [name for name in DIRECTIONS if on_gpu or name != "device"]
    cases = [case for layout in layouts for case in _cases(layout, wanted, caches, threads)]
    if not cases:
        raise OptionError(
            f"nothing is left to measure: {', '.join(wanted)} of {', '.join(layouts)}; decoding takes the layout zstd,"
            f" and reading towards a GPU {' or '.join(DEVICE_LAYOUTS)}"
        )
    side = max(1, int((nbytes / kind.itemsize) ** 0.5))
    matrix = VALUES[values](np.random.default_rng(side), (side, side)).astype(kind)
    title = f"Zarr, files to memory and back: {kind} {side}×{side}, {values}, chunks of {chunk}×{chunk}"
    rows: list[Row] = []
    for case in cases:
        progress(str(case))
        with tempfile.TemporaryDirectory(dir=folder) as place, ExitStack() as stack:
            make = partial(_create, Path(place), matrix, chunk, case.layout)
            contestants = list(CONTESTANTS[case.direction](matrix, make, case, stack))
            rows += measure(str(case), matrix.nbytes, contestants, on_gpu=False, seconds=seconds)
    return BenchReport(title, "GB/s", 1e9, machine("device" in wanted), tuple(rows))


def _number(dtype: str) -> np.dtype:
    try:
        kind = np.dtype(dtype)
    except TypeError:
        raise DTypeError(
            f"--dtype {dtype}: NumPy knows no such dtype; say float32, int64 or the like"
        ) from None
    if kind.kind not in "iufc":
        raise DTypeError(f"--dtype {dtype}: only integers, floats and complex numbers can be measured")
    return kind


def _cases(
    layout: str, directions: Sequence[str], caches: Sequence[str], threads: Sequence[int] | None
) -> Iterator[Case]:
    for direction in directions:
        if direction == "decode" and layout != "zstd":
            continue
        if direction == "device" and layout not in DEVICE_LAYOUTS:
            continue
        if direction != "device" and layout in OTHER_LAYOUTS:
            continue
        counts = threads or (DEVICE_THREADS if direction == "device" else default_threads())
        for cache in caches if direction in ("read", "device") else ("warm",):
            for count in counts:
                yield Case(direction, layout, cache, count)


Make = Callable[[str], Path]
"""Creates an array without data under a name, and says where."""


COMPRESSORS: dict[str, Callable[[], Any]] = {
    "zstd": ZstdCodec,
    "lz4": numcodecs.LZ4,
    "blosc": partial(BloscCodec, cname="lz4", shuffle="shuffle"),
}


def _create(folder: Path, matrix: np.ndarray, chunk: int, layout: str, name: str) -> Path:
    zarr.create_array(
        folder / name,
        shape=matrix.shape,
        dtype=matrix.dtype,
        chunks=(chunk, chunk),
        shards=(SHARD * chunk, SHARD * chunk) if layout == "shards" else None,
        compressors=COMPRESSORS[layout]() if layout in COMPRESSORS else None,
        zarr_format=2 if layout == "lz4" else 3,  # format 3 has no LZ4 of its own
    )
    return folder / name


def _stored(matrix: np.ndarray, make: Make) -> Path:
    path = make("matrix.zarr")
    with zarr.config.set({"array.write_empty_chunks": True}):  # every chunk has a file, whatever it holds
        zarr.open_array(path)[...] = matrix
    return path


def _readers(matrix: np.ndarray, make: Make, case: Case, stack: ExitStack) -> Iterator[Contestant]:
    path = _stored(matrix, make)
    out = np.empty_like(matrix)

    def contestant(name: str, read: Callable[[], Any], peer: bool = True) -> Contestant:
        def check() -> str | None:
            np.invert(matrix.view(np.uint8), out=out.view(np.uint8))  # what is not read shows
            found = read()
            return _difference(matrix, out if found is None else found)

        prepare = partial(forget_pages, path) if case.cache == "cold" else None
        return Contestant(name, read, check, peer, prepare=prepare)

    for name, settings in _zarr_pipelines(case.threads):
        yield contestant(name, partial(read_by_zarr, path, out, settings))
    tensorstore = library("tensorstore")
    if tensorstore is not None:
        source = _open_tensorstore(tensorstore, path, case.threads)
        yield contestant("tensorstore", lambda: source.read().result())
    pool = stack.enter_context(ThreadPoolExecutor(case.threads))
    yield contestant("tilewright", partial(_read_by_ours, path, out, pool), peer=False)


def _writers(matrix: np.ndarray, make: Make, case: Case, stack: ExitStack) -> Iterator[Contestant]:
    def contestant(name: str, path: Path, write: Callable[[], Any], peer: bool = True) -> Contestant:
        def check() -> str | None:
            write()
            return _difference(matrix, np.asarray(zarr.open_array(path, mode="r")[...]))

        return Contestant(name, write, check, peer)

    for name, settings in _zarr_pipelines(case.threads):
        path = make(f"{name}.zarr")
        yield contestant(name, path, partial(_write_by_zarr, path, matrix, settings))
    tensorstore = library("tensorstore")
    if tensorstore is not None:
        path = make("tensorstore.zarr")
        target = _open_tensorstore(tensorstore, path, case.threads)
        yield contestant("tensorstore", path, lambda: target.write(matrix).result())
    pool = stack.enter_context(ThreadPoolExecutor(case.threads))
    path = make("tilewright.zarr")
    yield contestant("tilewright", path, partial(_write_by_ours, path, matrix, pool), peer=False)


def _decoders(matrix: np.ndarray, make: Make, case: Case, stack: ExitStack) -> Iterator[Contestant]:
    """Contestants that decode compressed chunks, from memory if they can: zarrs and ours read files, from the page
    cache."""
    path = _stored(matrix, make)
    array = zarr.open_array(path, mode="r")
    out = np.empty_like(matrix)
    store = MemoryStore()
    inner = zarr.create_array(
        store, shape=matrix.shape, dtype=matrix.dtype, chunks=array.chunks, compressors=ZstdCodec()
    )
    with zarr.config.set({"array.write_empty_chunks": True}):
        inner[...] = matrix

    def contestant(name: str, decode: Callable[[], None], found: Callable[[], np.ndarray]) -> Contestant:
        def check() -> str | None:
            np.invert(matrix.view(np.uint8), out=out.view(np.uint8))
            decode()
            return _difference(matrix, found())

        return Contestant(name, decode, check, peer=name != "tilewright")

    for name, settings in _zarr_pipelines(case.threads):
        # zarrs knows local files and no store in memory.
        source, note = (path, ", from files") if name == "zarrs" else (inner, "")
        yield contestant(name + note, partial(read_by_zarr, source, out, settings), lambda: out)
    pool = stack.enter_context(ThreadPoolExecutor(case.threads))
    numcodecs = library("numcodecs.zstd")
    if numcodecs is not None:
        grid = _Grid(matrix.shape, array.chunks, matrix.dtype)
        codec = numcodecs.Zstd()
        places = grid.buffer(np.empty)
        frames = [file.read_bytes() for file in grid.files(path, array)]
        calls = [partial(codec.decode, frame, places[i]) for i, frame in enumerate(frames)]
        yield contestant(
            "numcodecs, into given buffers",
            lambda: _run(pool, calls),
            lambda: grid.matrix(places.view(np.uint8)),
        )
    parts = region_reads(array, _everything(matrix))
    reads = [partial(part.read, out[part.target]) for part in parts]
    yield contestant("tilewright", lambda: _run(pool, reads), lambda: out)


def _device_readers(matrix: np.ndarray, make: Make, case: Case, stack: ExitStack) -> Iterator[Contestant]:
    """Contestants that bring chunks from files to a GPU: ours through pinned lanes to their place in the matrix, KvikIO
    file by file to one place after another (less work: chunks are not put side by side), and the rest by way of a
    matrix on the host that is then copied."""
    path = _stored(matrix, make)
    array = zarr.open_array(path, mode="r")
    prepare = partial(forget_pages, path) if case.cache == "cold" else None

    def contestant(
        name: str,
        read: Callable[[], Any],
        there: Any,
        arrange: Callable[[np.ndarray], np.ndarray],
        peer: bool = True,
    ) -> Contestant:
        def check() -> str | None:
            _fill_on_gpu(there, 0xA5)
            read()
            return _difference(matrix, arrange(_from_gpu(there)))

        return Contestant(name, read, check, peer, prepare=prepare)

    def whole(found: np.ndarray) -> np.ndarray:
        return found.view(matrix.dtype).reshape(matrix.shape)

    kvikio = library("kvikio") if case.layout == "plain" else None
    defaults = library("kvikio.defaults")  # its package does not import it
    if kvikio is not None and defaults is not None:
        settings = {"num_threads": case.threads, "compat_mode": kvikio.CompatMode.ON}
        stack.enter_context(defaults.set(settings))
        grid = _Grid(matrix.shape, array.chunks, matrix.dtype)
        places = grid.buffer(lambda shape, dtype: _on_gpu(shape[0] * shape[1], dtype))
        views = [places[i * grid.chunk_nbytes : (i + 1) * grid.chunk_nbytes] for i in range(len(grid))]
        files = list(grid.files(path, array))
        for task_nbytes, note in KVIKIO_TASKS.items():
            read = partial(_read_by_kvikio, kvikio, files, views, task_nbytes)
            yield contestant(f"kvikio (compatibility mode{note})", read, places, grid.matrix)
    there = _on_gpu(matrix.nbytes, np.dtype(np.uint8))
    out = _pinned(matrix)  # from pageable memory the copy would take five times as long
    for name, options in _zarr_pipelines(case.threads):

        def read_and_copy(options: dict[str, Any] = options) -> None:
            read_by_zarr(path, out, options)
            _to_gpu(out, there)

        yield contestant(f"{name}, then copied", read_and_copy, there, whole)
    pool = stack.enter_context(ThreadPoolExecutor(case.threads))
    panel = _on_gpu(matrix.size, matrix.dtype)
    for name, nvcomp, pace in _decoding_ways(case.layout):
        unit = _device_unit(path, case.threads, nvcomp, pace)
        stack.callback(unit.close)
        read = partial(_load_by_ours, unit, array, panel, matrix.shape, pool)
        yield contestant(name, read, panel, lambda found: whole(found.view(np.uint8)), peer=False)


def _decoding_ways(layout: str) -> Iterator[tuple[str, int | None, Callable[[int, int, int], Pace]]]:
    """Who decodes: names, what nvCOMP decodes on the GPU (None: nothing is decoded there), and the pace."""
    yield "tilewright", None, Pace
    if layout == "plain":
        return
    yield "tilewright, decoded on the GPU alone", NOWHERE, OnGpu
    yield "tilewright, decoded on the GPU too", NOWHERE, Pace
    if not no_nvcomp():
        yield "tilewright, decoded by nvCOMP alone", EVERYWHERE, OnGpu
        yield "tilewright, decoded by nvCOMP too", EVERYWHERE, Pace


class OnGpu(Pace):
    """Leaves everything to the GPU."""

    def choice(self, left: int, at_once: int, threads: int, *, room: bool) -> Choice:
        return Choice.GPU if room else Choice.WAIT


CONTESTANTS: dict[str, Callable[[np.ndarray, Make, Case, ExitStack], Iterator[Contestant]]] = {
    "read": _readers,
    "write": _writers,
    "decode": _decoders,
    "device": _device_readers,
}


class _Grid:
    """The chunks of a matrix one after another, each whole, as they lie in files: those at the edge are padded."""

    def __init__(self, shape: tuple[int, ...], chunks: tuple[int, ...], dtype: np.dtype) -> None:
        self._shape, self._chunks, self._dtype = shape, chunks, dtype
        self._counts = ceil_div(shape[0], chunks[0]), ceil_div(shape[1], chunks[1])
        self.chunk_nbytes = chunks[0] * chunks[1] * dtype.itemsize

    def __len__(self) -> int:
        return self._counts[0] * self._counts[1]

    def buffer(self, allocate: Callable[[tuple[int, int], np.dtype], Any]) -> Any:
        """Room for all chunks, from what allocates arrays of a shape and a dtype: uint8, a row a chunk."""
        return allocate((len(self), self.chunk_nbytes), np.dtype(np.uint8))

    def files(self, path: Path, array: zarr.Array[Any]) -> Iterator[Path]:
        """The chunks' files, in order."""
        for i in range(self._counts[0]):
            for j in range(self._counts[1]):
                yield path / array.metadata.encode_chunk_key((i, j))

    def matrix(self, data: np.ndarray) -> np.ndarray:
        """The matrix that the chunks' bytes make up: a copy."""
        tall, wide = self._chunks
        tiles = data.reshape(-1).view(self._dtype).reshape(*self._counts, tall, wide)
        joined = tiles.swapaxes(1, 2).reshape(self._counts[0] * tall, self._counts[1] * wide)
        return joined[: self._shape[0], : self._shape[1]]


def _run(pool: Executor, calls: Sequence[Callable[[], Any]]) -> None:
    run_all(pool, calls)


def _device_unit(
    path: Path, threads: int, nvcomp: int | None, pace: Callable[[int, int, int], Pace]
) -> DeviceUnit:
    """What a worker of ours loads panels with, as for a product of the matrix with itself. nvcomp: what it decodes on
    the GPU, as a plan has it; None: nothing is decoded there."""
    array = zarr.open_array(path, mode="r")
    stored = as_stored_matrix(array)
    unit = (min(stored.unit[0], stored.rows), min(stored.unit[1], stored.columns))
    room = None if nvcomp is None else room_for(inputs_of([array]), 2**36, nvcomp)
    limits = Limits(
        workers=1,
        device_nbytes=64 * stored.nbytes + 2**30 + (0 if room is None else room.nbytes),
        read_threads=threads,
        write_threads=1,
        decoding=room,
    )
    plan = plan_tiles(stored, stored, stored.dtype, unit, limits)
    made = CudaUnit(Product(array, array, array, plan, "cuda", "full", "bench io"), pace)
    made.wait_for_decoders()
    return made


def _load_by_ours(
    unit: DeviceUnit, array: zarr.Array[Any], panel: Any, shape: tuple[int, int], pool: ThreadPoolExecutor
) -> None:
    """As a worker loads a panel, from an array opened before: KvikIO is given the files, and opens those alone."""
    whole = (slice(0, shape[0]), slice(0, shape[1]))
    load_all(pool, [unit.loading(array, whole, Placed(panel, shape, Lines(shape[1], 1)))])
    _synchronize()


def _read_by_kvikio(
    kvikio: Any, files: Sequence[Path], places: Sequence[Any], task_nbytes: int | None = None
) -> None:
    with ExitStack() as stack:
        reads = [
            stack.enter_context(kvikio.CuFile(file, "r")).pread(place, task_size=task_nbytes)
            for file, place in zip(files, places, strict=True)
        ]
        for read in reads:
            read.get()
    _synchronize()


def _on_gpu(size: int, dtype: np.dtype) -> Any:
    from numba import cuda

    return cuda.device_array(size, dtype)


def _pinned(like: np.ndarray) -> np.ndarray:
    from numba import cuda

    out: np.ndarray = cuda.pinned_array(like.shape, like.dtype)
    return out


def _to_gpu(source: np.ndarray, there: Any) -> None:
    there.copy_to_device(source.reshape(-1).view(np.uint8))
    _synchronize()


def _from_gpu(there: Any) -> np.ndarray:
    found: np.ndarray = there.copy_to_host()
    return found


def _fill_on_gpu(there: Any, byte: int) -> None:
    """What is not read shows."""
    there.copy_to_device(np.full(there.size * there.dtype.itemsize, byte, np.uint8).view(there.dtype))


def _synchronize() -> None:
    from numba import cuda

    cuda.synchronize()


def _zarr_pipelines(threads: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The codec pipelines that zarr-python can use, as its settings, with as many chunks at once as threads."""
    settings = {"async.concurrency": threads, "threading.max_workers": threads}
    yield "zarr-python", settings
    if library("zarrs") is not None:
        yield "zarrs", settings | {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}


def fastest_pipeline(threads: int) -> dict[str, Any]:
    """Settings of zarr-python for the fastest codec pipeline that is installed: zarrs, else its own."""
    *_, (_, settings) = _zarr_pipelines(threads)
    return settings


def read_by_zarr(source: Path | zarr.Array[Any], out: np.ndarray, settings: dict[str, Any]) -> None:
    """Read a whole array into ``out`` by zarr-python under these settings."""
    with zarr.config.set(settings):
        wrapped: Any = out
        target = default_buffer_prototype().nd_buffer.from_ndarray_like(wrapped)
        array = source if isinstance(source, zarr.Array) else zarr.open_array(source, mode="r")
        array.get_basic_selection(..., out=target)


def _write_by_zarr(path: Path, matrix: np.ndarray, settings: dict[str, Any]) -> None:
    with zarr.config.set(settings):
        zarr.open_array(path, mode="r+")[...] = matrix


def _read_by_ours(path: Path, out: np.ndarray, pool: Executor) -> None:
    parts = region_reads(zarr.open_array(path, mode="r"), _everything(out))
    run_all(pool, [partial(part.read, out[part.target]) for part in parts])


def _write_by_ours(path: Path, matrix: np.ndarray, pool: Executor) -> None:
    parts = region_writes(zarr.open_array(path, mode="r+"), _everything(matrix))
    run_all(pool, [partial(part.write, [matrix[part.source]]) for part in parts])


def _everything(matrix: np.ndarray) -> tuple[slice, slice]:
    return slice(0, matrix.shape[0]), slice(0, matrix.shape[1])


def _open_tensorstore(tensorstore: Any, path: Path, threads: int) -> Any:
    """Opened once, as its users do. Its threads are limited, it caches no chunks, and like all others it leaves
    it to the system when files reach the disk."""
    limit = {"limit": threads}
    return tensorstore.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str(path)},
            "context": {
                "data_copy_concurrency": limit,
                "file_io_concurrency": limit,
                "file_io_sync": False,
            },
        },
        open=True,
    ).result()


def _difference(expected: np.ndarray, found: np.ndarray) -> str | None:
    """None where all elements are the same, else the first that is not."""
    wrong = np.argwhere(expected != found)
    if not len(wrong):
        return None
    row, column = wrong[0].tolist()
    return f"element ({row}, {column}) is {found[row, column]}, not {expected[row, column]}"


@click.command("io")
@click.option("--nbytes", type=Size(), default="256MiB", show_default=True, help="Size of the matrix, about.")
@click.option("--dtype", default="float32", show_default=True, help="What is stored.")
@click.option(
    "--values",
    type=click.Choice(tuple(VALUES)),
    default="whole",
    show_default=True,
    help="Elements: whole numbers below 4096, small ones below 100, normal floats.",
)
@click.option(
    "--chunk", type=click.IntRange(min=1), default=1024, show_default=True, help="Sides of the stored chunks."
)
@click.option(
    "--layout",
    "layouts",
    multiple=True,
    type=click.Choice((*LAYOUTS, *OTHER_LAYOUTS)),
    default=LAYOUTS,
    show_default=True,
    help="How chunks are stored; may be given more than once.",
)
@click.option(
    "--direction",
    "directions",
    multiple=True,
    type=click.Choice(DIRECTIONS),
    help="May be given more than once; default: all, device where there is a GPU.",
)
@click.option(
    "--cache",
    "caches",
    multiple=True,
    type=click.Choice(CACHES),
    default=CACHES,
    show_default=True,
    help="Whether files are in the page cache before each read.",
)
@click.option(
    "--threads",
    multiple=True,
    type=click.IntRange(min=1),
    help="May be given more than once; default: one, and all cores; towards a GPU 8 and 16.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default="auto",
    show_default=True,
    help="Whether files are also read to a GPU.",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, exists=True, writable=True, path_type=Path),
    help="Where matrices go; default: a temporary folder.",
)
@click.option(
    "--seconds", type=SECONDS, default=0.5, show_default=True, help="Time for each contestant, about."
)
@click.option("--plot", type=Picture(), help="Write a bar plot to this PNG file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(nbytes: int, folder: Path | None, plot: Path | None, as_json: bool, **options: Any) -> None:
    """Measure reading and writing Zarr matrices beside other libraries, after checking every answer."""
    expect_pictures(plot)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        report = run_io(
            nbytes,
            Path(place),
            **options,
            progress=tell,
        )
    publish(report, (plot, report.plot), as_json=as_json)
