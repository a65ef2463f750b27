"""A Zarr matrix between files and a buffer in memory: ours beside zarr-python, zarrs and TensorStore, in turns.

The same stored matrix, the same number of threads, uncompressed chunks, chunks compressed by Zstandard, and shards.
A warm case finds the files in the page cache; before each run of a cold one the system is asked to drop them. What
each contestant has read, or written, is compared with the matrix before it is timed. Rates are of the matrix's
bytes, compressed or not; written bytes go to the page cache, as they would for a user.
"""

from __future__ import annotations

import importlib
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
import numpy as np
import zarr
from zarr.codecs import ZstdCodec
from zarr.core.buffer import default_buffer_prototype

from tilewright.kernels.errors import DTypeError
from tilewright.pipeline import config
from tilewright.pipeline.store import region_reads, region_writes, run_all
from tilewright.workflows.bench.common import BenchReport, Contestant, Row, forget_pages, machine, measure

LAYOUTS = ("plain", "zstd", "shards")
"""Uncompressed chunks; chunks compressed by Zstandard; uncompressed inner chunks, SHARD × SHARD to a file."""
SHARD = 4
DIRECTIONS = ("read", "write")
CACHES = ("warm", "cold")
VALUES = 4096
"""Elements are random integers below this: Zstandard makes about half of them as float32."""


@dataclass(frozen=True)
class Case:
    """One way of storing, moved in one direction by so many threads."""

    direction: str
    layout: str
    cache: str
    threads: int

    def __str__(self) -> str:
        cache = f", {self.cache}" if self.direction == "read" else ""
        return f"{self.direction} {self.layout}{cache}, {self.threads} thread{'s' * (self.threads != 1)}"


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
    directions: Sequence[str] = DIRECTIONS,
    caches: Sequence[str] = CACHES,
    threads: Sequence[int] | None = None,
    seconds: float = 0.5,
    progress: Callable[[str], None] = lambda text: None,
) -> BenchReport:
    """Time every layout in every direction; ``folder`` takes some copies of the matrix and is left empty.

    nbytes: of a square matrix, about. chunk: side of a stored chunk. caches: only tell reads apart. threads: how
    many each contestant may use, by default one and all cores. seconds: for each contestant of a case, about.
    Raises DTypeError for a dtype without numbers, and WrongAnswer where a contestant moved something else.
    """
    kind = _number(dtype)
    side = max(1, int((nbytes / kind.itemsize) ** 0.5))
    matrix = np.random.default_rng(side).integers(0, VALUES, (side, side)).astype(kind)
    title = f"Zarr, files to memory and back: {kind} {side}×{side}, chunks of {chunk}×{chunk}"
    rows: list[Row] = []
    for layout in layouts:
        for case in _cases(layout, directions, caches, threads or default_threads()):
            progress(str(case))
            with tempfile.TemporaryDirectory(dir=folder) as place, ExitStack() as stack:
                make = partial(_create, Path(place), matrix, chunk, layout)
                find = _readers if case.direction == "read" else _writers
                contestants = list(find(matrix, make, case, stack))
                rows += measure(str(case), matrix.nbytes, contestants, on_gpu=False, seconds=seconds)
    return BenchReport(title, "GB/s", 1e9, machine(False), tuple(rows))


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
    layout: str, directions: Sequence[str], caches: Sequence[str], threads: Sequence[int]
) -> Iterator[Case]:
    for direction in directions:
        for cache in caches if direction == "read" else ("warm",):
            for count in threads:
                yield Case(direction, layout, cache, count)


Make = Callable[[str], Path]
"""Creates an array without data under a name, and says where."""


def _create(folder: Path, matrix: np.ndarray, chunk: int, layout: str, name: str) -> Path:
    zarr.create_array(
        folder / name,
        shape=matrix.shape,
        dtype=matrix.dtype,
        chunks=(chunk, chunk),
        shards=(SHARD * chunk, SHARD * chunk) if layout == "shards" else None,
        compressors=ZstdCodec() if layout == "zstd" else None,
    )
    return folder / name


def _readers(matrix: np.ndarray, make: Make, case: Case, stack: ExitStack) -> Iterator[Contestant]:
    path = make("matrix.zarr")
    zarr.open_array(path)[...] = matrix
    out = np.empty_like(matrix)

    def contestant(name: str, read: Callable[[], Any], peer: bool = True) -> Contestant:
        def check() -> str | None:
            np.invert(matrix.view(np.uint8), out=out.view(np.uint8))  # what is not read shows
            found = read()
            return _difference(matrix, out if found is None else found)

        prepare = partial(forget_pages, path) if case.cache == "cold" else None
        return Contestant(name, read, check, peer, prepare=prepare)

    for name, settings in _zarr_pipelines(case.threads):
        yield contestant(name, partial(_read_by_zarr, path, out, settings))
    tensorstore = _library("tensorstore")
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
    tensorstore = _library("tensorstore")
    if tensorstore is not None:
        path = make("tensorstore.zarr")
        target = _open_tensorstore(tensorstore, path, case.threads)
        yield contestant("tensorstore", path, lambda: target.write(matrix).result())
    pool = stack.enter_context(ThreadPoolExecutor(case.threads))
    path = make("tilewright.zarr")
    yield contestant("tilewright", path, partial(_write_by_ours, path, matrix, pool), peer=False)


def _zarr_pipelines(threads: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What zarr-python can be told to decode with, as settings of its own; as many chunks at once as threads."""
    settings = {"async.concurrency": threads, "threading.max_workers": threads}
    yield "zarr-python", settings
    if _library("zarrs") is not None:
        yield "zarrs", settings | {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}


def _read_by_zarr(path: Path, out: np.ndarray, settings: dict[str, Any]) -> None:
    with zarr.config.set(settings):
        wrapped: Any = out
        target = default_buffer_prototype().nd_buffer.from_ndarray_like(wrapped)
        zarr.open_array(path, mode="r").get_basic_selection(..., out=target)


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


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


@click.command("io")
@click.option("--nbytes", default="256MiB", show_default=True, help="Size of the matrix, about.")
@click.option("--dtype", default="float32", show_default=True, help="What is stored.")
@click.option(
    "--chunk", type=click.IntRange(min=1), default=1024, show_default=True, help="Sides of the stored chunks."
)
@click.option(
    "--layout",
    "layouts",
    multiple=True,
    type=click.Choice(LAYOUTS),
    default=LAYOUTS,
    show_default=True,
    help="How chunks are stored; may be given more than once.",
)
@click.option(
    "--direction",
    "directions",
    multiple=True,
    type=click.Choice(DIRECTIONS),
    default=DIRECTIONS,
    show_default=True,
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
    help="May be given more than once; default: one, and all cores.",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Where matrices go; default: a temporary folder.",
)
@click.option(
    "--seconds", type=float, default=0.5, show_default=True, help="Time for each contestant, about."
)
@click.option("--plot", type=click.Path(dir_okay=False), help="Write a bar plot to this PNG file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(nbytes: str, folder: Path | None, plot: str | None, as_json: bool, **options: Any) -> None:
    """Measure reading and writing Zarr matrices beside other libraries, after checking every answer."""
    from tilewright.workflows.console import is_quiet, print_result

    with tempfile.TemporaryDirectory(dir=folder) as place:
        report = run_io(
            config.as_nbytes(nbytes, "--nbytes"),
            Path(place),
            **options,
            progress=lambda text: None if is_quiet() else click.echo(text, err=True),
        )
    if plot is not None:
        report.plot(plot)
    print_result(report, as_json=as_json)
