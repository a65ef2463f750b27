"""The k nearest rows of each row beside NumPy, faiss and PyTorch: first whether the answers are right, then the time.

Peers on a CPU are NumPy (products of blocks, then ``argpartition``) and faiss's exact index, where it is installed; on
a GPU PyTorch's ``matmul`` and ``topk`` by blocks. Beside them, on a CPU, BLAS's time for the products alone. The last
case is the whole job, from Zarr to Zarr.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
import zarr

from tilewright.kernels.choices import DEVICES, DeviceKind
from tilewright.kernels.deferred import cuda
from tilewright.kernels.errors import OptionError
from tilewright.kernels.gpu.device_choice import SIMULATOR, resolve_device
from tilewright.kernels.neighbours.forms import nearest_for
from tilewright.workflows.bench.common import (
    COUNT,
    SECONDS,
    BenchReport,
    Contestant,
    Picture,
    Row,
    expect_pictures,
    library,
    machine,
    measure,
    publish,
    tell,
)

BLOCK_NBYTES = 2**28
"""Products that NumPy and PyTorch form at a time."""
LEAST_RECALL = 0.999
"""Of the neighbours that sums in double precision give: rounding may order two that are nearly as near otherwise."""
HALF_RECALL = 0.97
"""The same of peers whose products are rounded to 16 bits."""
GPU_BLOCK_ROWS, GPU_BLOCK_NBYTES = 8192, 8 * 2**30
"""Rows whose products are formed at a time on a GPU, and what they take at most."""
CHECKED = 256
"""Rows that answers are compared in."""

Metric = Literal["dot", "cosine"]


def run_neighbours(
    n: int = 20_000,
    width: int = 384,
    k: int = 10,
    *,
    dtype: str = "float32",
    metric: Metric = "dot",
    device: str = "auto",
    rounds: int = 7,
    seconds: float = 10.0,
    progress: Callable[[str], None] = lambda text: None,
) -> BenchReport:
    """Measure on random rows, normally distributed; a rate counts 2 n² width operations.

    Raises WrongAnswer where a contestant's neighbours are wrong.
    """
    if SIMULATOR:
        raise OptionError("the CUDA simulator proves nothing about speed; unset NUMBA_ENABLE_CUDASIM")
    if not 1 <= k <= n:
        raise OptionError(f"k={k}: there are {n} rows; ask for 1 to {n} neighbours (-k)")
    kind = resolve_device(device)
    x = np.random.default_rng(20261126).standard_normal((n, width), np.float32)
    if metric == "cosine":
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    x = x.astype(dtype)
    judge = Judge(x, k)
    work = 2.0 * n * n * width
    options: dict[str, Any] = {"rounds": rounds, "seconds": seconds}
    rows: list[Row] = []
    progress("arrays in memory")
    contestants = list(_in_memory(x, k, metric, kind, judge))
    rows += measure(f"{n} × {width} {dtype}, k = {k}", work, contestants, on_gpu=kind == "cuda", **options)
    progress("from Zarr to Zarr")
    with tempfile.TemporaryDirectory(prefix="tilewright-bench-") as folder:
        jobs = _jobs(Path(folder), x, k, metric, kind, judge)
        rows += measure("the job, Zarr to Zarr", work, jobs, on_gpu=False, **options)
    return BenchReport("nearest neighbours", "Gop/s", 1e9, machine(kind == "cuda"), tuple(rows))


class Judge:
    """Compares answers with those of some rows in double precision."""

    def __init__(self, x: np.ndarray, k: int) -> None:
        self._rows = np.linspace(0, len(x) - 1, min(CHECKED, len(x))).astype(int)
        wide = x.astype(np.float64)
        products = wide[self._rows] @ wide.T
        self._found = np.argpartition(-products, k - 1, axis=1)[:, :k]

    def __call__(self, indices: np.ndarray, least: float = LEAST_RECALL) -> str | None:
        """What is wrong with the neighbours of all rows; None where nothing is."""
        if indices.shape != (indices.shape[0], self._found.shape[1]):
            return f"there are neighbours of shape {indices.shape}"
        same = [
            len(np.intersect1d(ours, theirs))
            for ours, theirs in zip(indices[self._rows], self._found, strict=True)
        ]
        recall = sum(same) / self._found.size
        return None if recall >= least else f"the recall is {recall:.4f}"


def _contestant(
    name: str, find: Callable[[], Any], judge: Callable[[np.ndarray], str | None], *, peer: bool = False
) -> Contestant:
    return Contestant(name, find, lambda: judge(np.asarray(find())), peer)


def _in_memory(x: np.ndarray, k: int, metric: Metric, kind: DeviceKind, judge: Judge) -> Iterator[Contestant]:
    if kind == "cuda":
        yield from _on_gpu(x, k, metric, judge)
        return
    yield _contestant("NumPy, argpartition", functools.partial(_by_numpy, x, k), judge, peer=True)
    faiss = library("faiss")
    if faiss is not None:
        index = faiss.IndexFlatIP(x.shape[1])
        numbers = x.astype(np.float32)
        index.add(numbers)
        yield _contestant("faiss IndexFlatIP", lambda: index.search(numbers, k)[1], judge, peer=True)
    yield _contestant("tilewright (CPU)", functools.partial(_ours, x, k, metric, kind), judge)
    block = _block(x)
    out = np.empty((block, len(x)), np.float32)
    numbers = x.astype(np.float32)

    def product() -> None:
        for start in range(0, len(x), block):
            part = numbers[start : start + block]
            np.matmul(part, numbers.T, out=out[: len(part)])

    yield Contestant("BLAS, products alone", product, lambda: None)


def _on_gpu(x: np.ndarray, k: int, metric: Metric, judge: Judge) -> Iterator[Contestant]:
    """Of an array that is on the GPU; neighbours come to the host."""
    from tilewright.kernels.gemm.product import matmul
    from tilewright.kernels.gpu.device_array import to_device, transposed
    from tilewright.kernels.neighbours.device import Nearest
    from tilewright.kernels.neighbours.mutual import nearest_of_itself

    torch = library("torch")
    block = max(1, min(GPU_BLOCK_ROWS, GPU_BLOCK_NBYTES // (x.itemsize * len(x))))
    if torch is not None:
        tensor = torch.as_tensor(x, device="cuda")
        starts = range(0, len(x), block)

        def multiply() -> None:
            for start in starts:
                tensor[start : start + block] @ tensor.T

        def find() -> Any:
            parts = [(tensor[start : start + block] @ tensor.T).topk(k, dim=1).indices for start in starts]
            return torch.cat(parts).cpu()

        # Its products are rounded to the elements' type before they are compared.
        lenient = functools.partial(judge, least=HALF_RECALL if x.itemsize == 2 else LEAST_RECALL)
        yield _contestant("torch.matmul, topk", find, lenient, peer=True)
        yield Contestant("torch.matmul alone", multiply, lambda: None)
    on_gpu = to_device(x)
    rows = min(block, len(x))
    out = cuda.device_array((rows, len(x)), x.dtype)

    def products() -> None:
        for start in range(0, len(x), block):
            part = on_gpu[start : start + block]
            matmul(part, transposed(on_gpu), out[: part.shape[0]])

    def all_pairs() -> np.ndarray:
        search = Nearest(on_gpu, k, metric=metric)
        search.update(on_gpu, 0)
        found: np.ndarray = search.result().indices
        return found

    def each_pair_once() -> np.ndarray:
        found: np.ndarray = nearest_of_itself(on_gpu, k, metric=metric).indices
        return found

    yield Contestant("tilewright matmul alone", products, lambda: None)
    yield _contestant("tilewright, each row with all", all_pairs, judge)
    yield _contestant("tilewright, each pair once", each_pair_once, judge)


def _block(x: np.ndarray) -> int:
    return max(1, min(len(x), BLOCK_NBYTES // (4 * len(x))))


def _by_numpy(x: np.ndarray, k: int) -> np.ndarray:
    """As users write it; the k nearest in their order."""
    numbers, found = x.astype(np.float32, copy=False), np.empty((len(x), k), np.int64)
    block = _block(x)
    for start in range(0, len(x), block):
        products = numbers[start : start + block] @ numbers.T
        nearest = np.argpartition(products, len(x) - k, axis=1)[:, len(x) - k :]
        order = np.argsort(-np.take_along_axis(products, nearest, 1), axis=1)
        found[start : start + block] = np.take_along_axis(nearest, order, 1)
    return found


def _ours(x: np.ndarray, k: int, metric: Metric, kind: DeviceKind) -> np.ndarray:
    search = nearest_for(kind)(x, k, metric=metric)
    search.update(x, 0)
    found: np.ndarray = search.result().indices
    return found


def _jobs(
    folder: Path, x: np.ndarray, k: int, metric: Metric, kind: DeviceKind, judge: Judge
) -> list[Contestant]:
    from tilewright.workflows.neighbours.search import topk

    zarr.create_array(folder / "x.zarr", data=x, chunks=(min(len(x), 4096), x.shape[1]), compressors=None)
    out = folder / "near.zarr"

    def find(*, verify: bool) -> np.ndarray:
        topk(folder / "x.zarr", out=out, k=k, metric=metric, device=kind, verify=verify)
        return np.asarray(zarr.open_array(out / "indices", mode="r")[:])

    def gone() -> None:
        shutil.rmtree(out, ignore_errors=True)

    def contestant(name: str, *, verify: bool) -> Contestant:
        def check() -> str | None:
            gone()
            return judge(find(verify=verify))

        return Contestant(name, functools.partial(find, verify=verify), check, prepare=gone)

    return [contestant("tilewright, verified", verify=True), contestant("tilewright", verify=False)]


@click.command("neighbours")
@click.option("-n", "n", type=COUNT, default=20_000, show_default=True, help="Rows.")
@click.option("--width", type=COUNT, default=384, show_default=True, help="Elements of each.")
@click.option("-k", "k", type=COUNT, default=10, show_default=True, help="Neighbours of each.")
@click.option("--dtype", type=click.Choice(("float16", "float32")), default="float32", show_default=True)
@click.option("--metric", type=click.Choice(("dot", "cosine")), default="dot", show_default=True)
@click.option("--device", type=click.Choice(DEVICES), default="auto", show_default=True)
@click.option("--seconds", type=SECONDS, default=10.0, show_default=True, help="Time for each contestant.")
@click.option("--plot", type=Picture(), help="Write a bar plot to this PNG file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(plot: Path | None, as_json: bool, **options: Any) -> None:
    """Measure nearest neighbours beside other libraries', after checking every answer."""
    expect_pictures(plot)
    report = run_neighbours(**options, progress=tell)
    publish(report, (plot, report.plot), as_json=as_json)
