"""The whole job beside its peers: Zarr in, Zarr out, the same stored matrices, in turns.

One peer is dask.array, on a cluster of the same kind. Where one worker is timed there is another: one process that
reads A and B whole, by the fastest codec pipeline that is installed, multiplies them and writes C. It needs all three
in memory, and checks and resumes nothing.

The floors stand beside the total: the time that the bytes need from storage and over the bus, and the arithmetic in the
kernel, each measured in the same run. Every product is checked (`tilewright.verify`) before it is timed.
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import zarr
from distributed import Client, LocalCluster

from tilewright.kernels.cpu.loops import usable_cores
from tilewright.kernels.gpu.memory import peak_nbytes
from tilewright.kernels.numbers import ceil_div, counted, format_nbytes
from tilewright.pipeline.cluster.here.checks import allow_open_files
from tilewright.pipeline.cluster.local import client_of, quiet, start
from tilewright.pipeline.errors import DeviceUnavailableError
from tilewright.pipeline.product.execute import MatmulRun
from tilewright.pipeline.report.timeline import Timeline
from tilewright.pipeline.store.chunks import layout_of
from tilewright.pipeline.threads import run_all
from tilewright.workflows.bench.common import (
    COUNT,
    BenchReport,
    DetailedReport,
    ElementType,
    Picture,
    Row,
    WrongAnswer,
    expect_pictures,
    forget_pages,
    machine,
    publish,
)
from tilewright.workflows.bench.timeline import plot_timelines
from tilewright.workflows.console import Size
from tilewright.workflows.matmul import matmul
from tilewright.workflows.verify import verify


class SizeText(Size):
    """A size as it was written, by which cases are named."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        super().convert(value, param, ctx)  # before large matrices are written
        return value


@dataclass(frozen=True)
class Case:
    """One product to time: what is stored, and what it may use."""

    n: int
    dtype: str
    chunk: int
    workers: int
    """GPUs, or processes on a machine without one."""
    device_memory: str | None
    values: str
    """``small`` integers fit into eight bits, ``full`` ones fill their dtype; floats are normal either way."""
    repeats: int = 3
    """Timed runs of ours, after one that warms up and is checked."""
    peer_repeats: int = 2
    """The same of dask.array; 0 leaves it out."""
    compressed: bool = False
    """Whether chunks of A, B and C go through Zarr's default codec, Zstandard."""
    gram: bool = False
    """Whether C = AᵀA, and there is no B."""

    @property
    def inputs(self) -> str:
        """Names the stored matrices: cases that differ in the rest share them."""
        return f"{self.dtype}-{self.values}-{self.n}-{self.chunk}" + "-zstd" * self.compressed

    @property
    def operations(self) -> int:
        """Multiplications and additions; where C is symmetric, of its elements on and below the diagonal."""
        return self.n**2 * (self.n + 1) if self.gram else 2 * self.n**3

    def factors(self, inputs: Path) -> tuple[Path, Path]:
        """Where A and B are."""
        return inputs / "a.zarr", inputs / ("a.zarr" if self.gram else "b.zarr")

    @property
    def name(self) -> str:
        memory = f", {self.device_memory} a worker" if self.device_memory else ""
        kind = f" ({self.values} values)" if np.dtype(self.dtype).kind in "iu" else ""
        sides = f"n = {self.n} in {self.chunk}²" + " (zstd)" * self.compressed
        product = "AᵀA, " * self.gram
        return f"{product}{self.dtype}{kind} {sides}, {counted(self.workers, 'worker')}{memory}"


@dataclass
class _Timing:
    seconds: list[float] = field(default_factory=list)
    run: MatmulRun | None = None
    memory_nbytes: int = 0
    """The most host memory that a worker's process held up to the end of its first run, its libraries included."""


def run_e2e(
    cases: list[Case],
    folder: Path,
    *,
    gpu: bool,
    cold: bool = False,
) -> Iterator[tuple[tuple[Row, ...], dict[str, Any], Timeline]]:
    """Time every case, with its peer, and give for each, as soon as it is done: the rows of ours and the peer's; the
    stages and floors in seconds, and the most memory that a worker held, in bytes; the timeline of our last run.

    ``folder`` takes the matrices (a file system in memory shows the pipeline, a disk the disk) and is left empty.

    Raises
    ------
    DeviceUnavailableError
        ``gpu`` was asked for and there are fewer GPUs than a case wants.
    WrongAnswer
        A product failed its check: its time would mean nothing.
    """
    inputs: Path | None = None
    try:
        for case in cases:
            if inputs != folder / case.inputs:
                if inputs is not None:
                    shutil.rmtree(inputs)  # one set of matrices at a time: they are large
                inputs = folder / case.inputs
                write_inputs(inputs, case)
            # The peer has processes of its own, so that what they hold is not counted as ours.
            with ExitStack() as stack:
                client = stack.enter_context(cluster_of(case.workers, gpu))
                peer = stack.enter_context(cluster_of(case.workers, gpu)) if case.peer_repeats else None
                script = None
                if case.peer_repeats and case.workers == 1:
                    context = multiprocessing.get_context("spawn")
                    script = stack.enter_context(ProcessPoolExecutor(1, context))
                yield _run_case(client, peer, script, case, inputs, folder / "c.zarr", gpu=gpu, cold=cold)
    finally:
        if inputs is not None:
            shutil.rmtree(inputs)


def report_of(rows: Iterable[Row], *, gpu: bool) -> BenchReport:
    """The table of some cases' rows."""
    return BenchReport("Zarr × Zarr = Zarr, whole job", "Top/s", 1e12, machine(gpu), tuple(rows))


def _run_case(
    client: Client,
    peer: Client | None,
    script: Executor | None,
    case: Case,
    inputs: Path,
    out: Path,
    *,
    gpu: bool,
    cold: bool,
) -> tuple[tuple[Row, ...], dict[str, Any], Timeline]:
    ours, theirs, alone = _Timing(), _Timing(), _Timing()
    # The first turn warms up and is checked.
    for turn in range(1 + max(case.repeats, case.peer_repeats)):
        if turn <= case.repeats:
            _time_ours(client, inputs, out, case, ours, cold=cold, check=turn == 0, gpu=gpu)
        if peer is not None and turn <= case.peer_repeats:
            _time_peer(peer, inputs, out, case, theirs, cold=cold, check=turn == 0, gpu=gpu)
        if script is not None and turn <= case.peer_repeats:
            if cold:
                forget_pages(inputs)
            seconds = script.submit(multiply_alone, inputs, out, case, gpu).result()
            _finish(client, inputs, out, case, alone, seconds, turn == 0)
    work = case.operations
    rows = [_row(case.name, "tilewright", False, work, ours.seconds)]
    details = _details(client, inputs, case, ours, gpu=gpu)
    if peer is not None:
        name = "dask.array" + (" + CuPy" if gpu else " + NumPy")
        rows.append(_row(case.name, name, True, work, theirs.seconds))
        details["peer_memory_nbytes"] = theirs.memory_nbytes
    if script is not None:
        rows.append(
            _row(case.name, "one process, " + ("CuPy" if gpu else "NumPy"), True, work, alone.seconds)
        )
    assert ours.run is not None
    assert ours.run.timeline is not None
    return tuple(rows), details, ours.run.timeline


def write_inputs(folder: Path, case: Case) -> None:
    """Store two random matrices, by many threads."""
    dtype, chunk = np.dtype(case.dtype), case.chunk

    def write(array: zarr.Array[Any], seed: int, i: int, j: int) -> None:
        generator = np.random.default_rng([seed, i, j])
        shape = (min(chunk, case.n - i), min(chunk, case.n - j))
        if dtype.kind in "iu":
            limits = np.iinfo(np.int8 if case.values == "small" else dtype)
            data = generator.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)
        else:
            data = generator.standard_normal(shape, dtype=np.float32).astype(dtype)
        array[i : i + shape[0], j : j + shape[1]] = data

    for seed, name in enumerate("ab"):
        array = zarr.create_array(
            folder / f"{name}.zarr",
            shape=(case.n, case.n),
            chunks=(chunk, chunk),
            dtype=dtype,
            compressors="auto" if case.compressed else None,
        )
        starts = range(0, case.n, chunk)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(
                lambda at, array=array, seed=seed: write(array, seed, *at),
                [(i, j) for i in starts for j in starts],
            ):
                pass


@contextmanager
def cluster_of(workers: int, gpu: bool) -> Iterator[Client]:
    """So many workers on this host, each with a GPU of its own or all without; those left over stay idle.

    Raises DeviceUnavailableError where there are fewer GPUs.
    """
    threads = 4 if gpu else 2  # as the profiles have it
    allow_open_files(workers)
    options = {"n_workers": workers, "threads_per_worker": threads, "dashboard_address": ":0"}
    kind: type[LocalCluster] = LocalCluster
    if gpu:
        from tilewright.kernels.gpu.device import devices

        if len(devices()) < workers:
            raise DeviceUnavailableError(
                f"{workers} GPUs were asked for and {len(devices())} can be used here"
            )
        from dask_cuda import LocalCUDACluster

        kind = LocalCUDACluster
    with quiet(options) as options, client_of(start(kind, options)) as client:
        yield client


def _time_ours(
    client: Client,
    inputs: Path,
    out: Path,
    case: Case,
    timing: _Timing,
    *,
    cold: bool,
    check: bool,
    gpu: bool,
) -> None:
    if cold:
        forget_pages(inputs)
    start = time.perf_counter()
    run = matmul(
        *case.factors(inputs),
        out,
        transpose_a=case.gram,
        dtype=case.dtype,  # as the peer has it
        cluster=client,
        device="cuda" if gpu else "cpu",
        device_memory=case.device_memory,
        resume=False,
        verify=False,
        overwrite=True,
        listener=lambda event: None,
    )
    seconds = time.perf_counter() - start
    timing.run = run
    _finish(client, inputs, out, case, timing, seconds, check)


def _time_peer(
    client: Client,
    inputs: Path,
    out: Path,
    case: Case,
    timing: _Timing,
    *,
    cold: bool,
    check: bool,
    gpu: bool,
) -> None:
    import dask.array as da

    shutil.rmtree(out, ignore_errors=True)
    if cold:
        forget_pages(inputs)
    start = time.perf_counter()
    a, b = (da.from_zarr(str(path)) for path in case.factors(inputs))
    if gpu:
        import cupy

        a, b = a.map_blocks(cupy.asarray), b.map_blocks(cupy.asarray)
    product = (a.T if case.gram else a) @ b
    if gpu:
        product = product.map_blocks(cupy.asnumpy)
    target = zarr.create_array(
        out,
        shape=product.shape,
        chunks=product.chunksize,
        dtype=product.dtype,
        compressors="auto" if case.compressed else None,
    )
    da.to_zarr(product, target)
    seconds = time.perf_counter() - start
    _finish(client, inputs, out, case, timing, seconds, check)


def multiply_alone(inputs: Path, out: Path, case: Case, gpu: bool) -> float:
    """Seconds that this process takes to read A and B, multiply them and write C, as a script of Zarr's and CuPy's, or
    NumPy's, users would at its best: chunks by all cores, through zarrs where it is installed, by pinned memory."""
    from tilewright.workflows.bench.io import fastest_pipeline

    settings = fastest_pipeline(usable_cores())
    start = time.perf_counter()
    sides, paths = (case.n, case.n), list(dict.fromkeys(case.factors(inputs)))
    if not gpu:
        left, *right = (_read_whole(path, np.empty(sides, case.dtype), settings) for path in paths)
        product = left @ right[0] if right else left.T @ left  # half of it, as NumPy sees
    else:
        cupy, cupyx = importlib.import_module("cupy"), importlib.import_module("cupyx")
        host = cupyx.empty_pinned(sides, case.dtype)
        on_gpu = [cupy.asarray(_read_whole(path, host, settings), blocking=True) for path in paths]
        product = (cupy.matmul(*on_gpu) if len(on_gpu) == 2 else _syrk(cupy, on_gpu[0])).get(out=host)
        del on_gpu
    with zarr.config.set(settings):
        target = zarr.create_array(
            out,
            shape=sides,
            chunks=(case.chunk, case.chunk),
            dtype=case.dtype,
            compressors="auto" if case.compressed else None,
        )
        target[...] = product
    seconds = time.perf_counter() - start
    if gpu:
        cupy.get_default_memory_pool().free_all_blocks()  # ours has its turn on the same GPU
    return seconds


def _syrk(cupy: Any, x: Any) -> Any:
    """XᵀX on the GPU: half of it by cuBLAS and mirrored, where cuBLAS has that."""
    if x.dtype.kind not in "fc" or x.dtype.itemsize < 4:
        return x.T @ x
    lower = importlib.import_module("cupy.cublas").syrk("N", x.T, lower=True)  # x.T lies by columns
    return cupy.tril(lower) + cupy.tril(lower, -1).T


def _read_whole(path: Path, into: np.ndarray, settings: dict[str, Any]) -> np.ndarray:
    from tilewright.workflows.bench.io import read_by_zarr

    read_by_zarr(path, into, settings)
    return into


def _finish(
    client: Client, inputs: Path, out: Path, case: Case, timing: _Timing, seconds: float, check: bool
) -> None:
    if check:
        timing.memory_nbytes = max(client.run(peak_nbytes).values())
        outcome = verify(*case.factors(inputs), out, transpose_a=case.gram, cluster=client)
        if not outcome.passed:
            raise WrongAnswer(str(outcome))
    else:
        timing.seconds.append(seconds)
    shutil.rmtree(out)


def _row(case: str, name: str, peer: bool, work: float, seconds: list[float]) -> Row:
    low, median, high = (float(value) for value in np.quantile(seconds, (0.25, 0.5, 0.75)))
    return Row(case, name, peer, work, median, low, high, len(seconds))


def _details(client: Client, inputs: Path, case: Case, timing: _Timing, *, gpu: bool) -> dict[str, Any]:
    """Where a run's time went, and the least it could take: each floor from a rate measured here and now."""
    run = timing.run
    assert run is not None
    plan = run.plan
    written = plan.write_nbytes / run.read_nbytes
    threads = plan.workers * plan.read_threads, plan.workers * plan.write_threads
    storage = _storage_rate(inputs, inputs, written, *threads)
    a = zarr.open_array(inputs / "a.zarr", mode="r")
    stored = a.nbytes_stored() / a.nbytes  # random numbers: B and C shrink as A does
    floors = {
        # What a worker took from another's GPU comes from no file, and not over the bus from the host.
        "storage": stored * (run.read_nbytes + plan.write_nbytes) / storage,
        "arithmetic": run.stages["compute"] / plan.workers,
    }
    if case.compressed:
        decoding, encoding = codec_rates(inputs / "a.zarr")
        floors["codec"] = run.read_nbytes / decoding + plan.write_nbytes / encoding
    if gpu:
        bus = client.submit(bus_rate, pure=False).result()
        floors["bus"] = (run.read_nbytes + plan.write_nbytes) / bus / plan.workers
    median = statistics.median(timing.seconds)
    return {
        "case": case.name,
        "seconds": timing.seconds,
        "kernel": run.kernel,
        "plan": plan.to_json(),
        "read_nbytes": run.read_nbytes,
        "shared_nbytes": run.shared_nbytes,
        "stages_per_worker": {name: seconds / plan.workers for name, seconds in run.stages.items()},
        "floors": floors,
        "over_largest_floor": median / max(floors.values()),
        "read_ratio": run.read_nbytes / plan.bound_nbytes,
        "memory_nbytes": timing.memory_nbytes,
    }


STORAGE_BLOCK_NBYTES = 2**20
"""A thread's block, read into, or written from, again and again: those of all threads stay in the CPU's cache."""
STORAGE_CALL_BLOCKS = 16
"""Blocks in one system call, not just one: the threads of all workers, here in one interpreter, share its lock."""
STORAGE_NBYTES = 4 * 2**30
"""Bytes of a stored matrix that are read for the floor, at most."""


def _storage_rate(inputs: Path, place: Path, written: float, readers: int, writers: int) -> float:
    """Bytes a second between files and memory, best of three: so many threads as the workers have together read the
    chunks of A, as they are stored, stretch by stretch, and as many as write for them write ``written`` times as much
    to new files.
    """
    files = sorted(
        path for path in (inputs / "a.zarr").rglob("*") if path.is_file() and path.suffix != ".json"
    )
    sizes = [path.stat().st_size for path in files]
    while sum(sizes) > STORAGE_NBYTES and len(files) > 1:
        del files[-1], sizes[-1]
    step = STORAGE_CALL_BLOCKS * STORAGE_BLOCK_NBYTES
    stretches = [
        (path, start) for path, size in zip(files, sizes, strict=True) for start in range(0, size, step)
    ]
    share = math.ceil(written * sum(sizes) / writers)

    def read(first: int) -> int:
        buffers = [bytearray(STORAGE_BLOCK_NBYTES)] * STORAGE_CALL_BLOCKS
        done = 0
        for path, start in stretches[first::readers]:
            with open(path, "rb", buffering=0) as file:
                done += os.preadv(file.fileno(), buffers, start)
        return done

    def write(number: int) -> int:
        block = memoryview(bytes(STORAGE_BLOCK_NBYTES))
        left = share
        with open(place / f"floor-{number}", "wb", buffering=0) as file:
            while left:
                whole = min(left // len(block), STORAGE_CALL_BLOCKS)
                left -= os.writev(file.fileno(), [block] * whole or [block[:left]])
        return share

    best = 0.0
    with ThreadPoolExecutor(readers + writers) as pool:
        for _ in range(3):
            calls: list[Callable[[], int]] = [partial(read, i) for i in range(readers)]
            start = time.perf_counter()
            moved = sum(run_all(pool, calls + [partial(write, i) for i in range(writers)]))
            best = max(best, moved / (time.perf_counter() - start))
            for i in range(writers):
                (place / f"floor-{i}").unlink()
    return best


CODED_NBYTES = 2**26
"""What each core decodes, and encodes, at least for the floor."""


def codec_rates(path: Path) -> tuple[float, float]:
    """Bytes of elements a second that all cores decode, and encode, with the array's codec from memory to memory, doing
    nothing else: a thread each, best of three."""
    array = zarr.open_array(path, mode="r")
    layout = layout_of(array, str(path))
    assert layout is not None
    (codec,) = layout.codecs
    cores = usable_cores()
    rows, columns = array.chunks
    chunk = np.resize(np.asarray(array[:rows, :columns]), (rows, columns))
    stored = codec.encode(chunk)
    repeats = ceil_div(CODED_NBYTES, chunk.nbytes)

    def decode(room: np.ndarray) -> None:
        for _ in range(repeats):
            codec.decode(stored, out=room)

    def encode(room: np.ndarray) -> None:
        for _ in range(repeats):
            codec.encode(chunk)

    rooms = [np.empty(chunk.nbytes, np.uint8) for _ in range(cores)]
    rates = []
    with ThreadPoolExecutor(cores) as pool:
        for work in (decode, encode):
            best = 0.0
            for _ in range(3):
                start = time.perf_counter()
                run_all(pool, [partial(work, room) for room in rooms])
                seconds = time.perf_counter() - start
                best = max(best, cores * repeats * chunk.nbytes / seconds)
            rates.append(best)
    return rates[0], rates[1]


def bus_rate(nbytes: int = 2**28) -> float:
    """Bytes a second from pinned memory to this process's GPU, best of three."""
    from numba import cuda

    host, device = cuda.pinned_array(nbytes, np.uint8), cuda.device_array(nbytes, np.uint8)
    stream = cuda.stream()
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        device.copy_to_device(host, stream=stream)
        stream.synchronize()
        best = max(best, nbytes / (time.perf_counter() - start))
    return best


def describe_stages(detail: dict[str, Any]) -> str:
    """A line for a case: where its time went, the least it could take, and what it read and held."""
    stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in detail["stages_per_worker"].items())
    floors = ", ".join(f"{name} {seconds:.2f}" for name, seconds in detail["floors"].items())
    reads = f"{format_nbytes(detail['read_nbytes'])}, {detail['read_ratio']:.2f} × the bound"
    if detail["shared_nbytes"]:
        reads += f", and takes {format_nbytes(detail['shared_nbytes'])} from other GPUs"
    memory = f"{format_nbytes(detail['memory_nbytes'])} a worker"
    if "peer_memory_nbytes" in detail:
        memory += f", the peer's {format_nbytes(detail['peer_memory_nbytes'])}"
    over = f"{detail['over_largest_floor']:.2f} × the largest"
    return f"{detail['case']}: stages {stages} s; floors {floors} s; {over}; reads {reads}; memory {memory}"


@click.command("e2e")
@click.option(
    "--n",
    "sides",
    multiple=True,
    type=COUNT,
    default=(8192,),
    show_default=True,
    help="Sides of the matrices.",
)
@click.option(
    "--dtype",
    "dtypes",
    type=ElementType("iuf"),
    multiple=True,
    default=("float32",),
    show_default=True,
    help="What is stored.",
)
@click.option("--chunk", type=COUNT, default=4096, show_default=True, help="Sides of the stored chunks.")
@click.option(
    "--workers", multiple=True, type=COUNT, default=(1,), show_default=True, help="GPUs, or CPU processes."
)
@click.option(
    "--device-memory",
    type=SizeText(),
    metavar="SIZE",
    help="What tiles and panels may take on each worker, such as 4GiB.",
)
@click.option(
    "--values", type=click.Choice(["small", "full"]), default="full", show_default=True, help="Of integers."
)
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, exists=True, writable=True, path_type=Path),
    help="Where matrices go; default: a temporary folder.",
)
@click.option("--gram", is_flag=True, help="Multiply AᵀA, half of which is computed, rather than A B.")
@click.option("--compressed", is_flag=True, help="Store chunks through Zarr's default codec.")
@click.option("--repeats", type=COUNT, default=3, show_default=True, help="Timed runs of ours.")
@click.option("--no-peer", is_flag=True, help="Leave dask.array out.")
@click.option("--cold", is_flag=True, help="Drop the inputs from the page cache before each run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--plot", type=Picture(), help="Draw the rates as bars.")
@click.option(
    "--timeline",
    type=Picture(),
    help="Draw when each stage of each worker was busy, in the last run of ours, and write a PNG.",
)
def command(
    sides: tuple[int, ...],
    dtypes: tuple[str, ...],
    chunk: int,
    workers: tuple[int, ...],
    device_memory: str | None,
    values: str,
    device: str,
    folder: Path | None,
    gram: bool,
    compressed: bool,
    repeats: int,
    no_peer: bool,
    cold: bool,
    as_json: bool,
    plot: Path | None,
    timeline: Path | None,
) -> None:
    """The whole job, Zarr to Zarr, beside dask.array on the same cluster."""
    import tempfile

    from tilewright.kernels.gpu.device_choice import resolve_device

    if plot is not None and timeline is not None and plot.resolve() == timeline.resolve():
        raise click.UsageError("--plot and --timeline name the same file: give each its own")
    expect_pictures(plot, timeline)
    gpu = resolve_device(device) == "cuda"
    cases = [
        Case(
            n,
            dtype,
            chunk,
            count,
            device_memory,
            values,
            repeats,
            peer_repeats=0 if no_peer else min(2, repeats),
            compressed=compressed,
            gram=gram,
        )
        for n in sides
        for dtype in dtypes
        for count in workers
    ]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        done = list(run_e2e(cases, Path(place), gpu=gpu, cold=cold))
    report = report_of((row for rows, _, _ in done for row in rows), gpu=gpu)
    details = [detail for _, detail, _ in done]
    publish(
        DetailedReport(report, details, "\n".join(map(describe_stages, details))),
        (plot, report.plot),
        (
            timeline,
            partial(plot_timelines, [(detail["case"], found) for _, detail, found in done]),
        ),
        as_json=as_json,
    )
