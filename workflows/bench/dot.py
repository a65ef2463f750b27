"""The dot product on one device: every way to finish it beside cuBLAS or NumPy, and reading alone.

Each contestant's answer is checked before it is timed, against sums in double precision or exact integers.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import click
import numpy as np

from tilewright.kernels import dot, launch
from tilewright.kernels.dot_host import dot_host
from tilewright.kernels.errors import OptionError
from tilewright.workflows.bench.common import BenchReport, Contestant, Row, machine, measure

DTYPES = ("float32", "float64", "complex64", "complex128", "float16", "int8", "int32", "int64")
DEFAULT_NBYTES = 1 << 30
UNIT_NBYTES = 1 << 24
"""Vectors repeat after this many bytes."""
ROUNDOFF = 64
"""How many roundings, relative to the sum of absolute products, an answer may be off."""


def run_dot(
    dtypes: Sequence[str] = DTYPES,
    *,
    nbytes: int = DEFAULT_NBYTES,
    device: str = "auto",
    rounds: int = 15,
    seconds: float = 1.0,
    progress: Callable[[str], None] = lambda text: None,
) -> BenchReport:
    """Measure products of two vectors of ``nbytes`` each that lie on the device; rates count both vectors'
    bytes.

    rounds, seconds: at most so many samples a contestant, and about so long. Raises WrongAnswer where a
    contestant's product is wrong, and what `dot` raises.
    """
    if launch.SIMULATOR:
        raise OptionError("the CUDA simulator proves nothing about speed; unset NUMBA_ENABLE_CUDASIM")
    on_gpu = launch.resolve_device(device) == "cuda"
    rows: list[Row] = []
    for name in dtypes:
        progress(name)
        x, y = _vectors(np.dtype(name), nbytes)
        judge = functools.partial(_judge, *_exact(x, y), np.dtype(name))
        contestants = _gpu(x, y, judge) if on_gpu else _cpu(x, y, judge)
        rows += measure(
            name, float(x.nbytes + y.nbytes), contestants, on_gpu=on_gpu, rounds=rounds, seconds=seconds
        )
    return BenchReport("dot product", "GB/s", 1e9, machine(on_gpu), tuple(rows))


def _vectors(dtype: np.dtype, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Two vectors of random elements: normally distributed, or integers over the whole range of the type."""
    rng = np.random.default_rng(20261121)
    count = UNIT_NBYTES // dtype.itemsize
    units = []
    for _ in range(2):
        if dtype.kind in "iu":
            info = np.iinfo(dtype)
            units.append(rng.integers(info.min, info.max, count, dtype, endpoint=True))
        elif dtype.kind == "c":
            part = np.float32 if dtype == np.complex64 else np.float64
            units.append(rng.standard_normal(2 * count, part).view(dtype))
        else:
            units.append(rng.standard_normal(count, np.float32).astype(dtype))
    length = nbytes // dtype.itemsize
    return np.resize(units[0], length), np.resize(units[1], length)


def _exact(x: np.ndarray, y: np.ndarray) -> tuple[Any, float]:
    """The product, and the sum of absolute products, by which errors are measured (0 for integers)."""
    if x.dtype.kind in "iu":
        return dot_host(x, y, x.dtype, True), 0.0
    wide = np.dtype(np.complex128 if x.dtype.kind == "c" else np.float64)
    scale = dot_host(np.abs(x).astype(np.float64), np.abs(y).astype(np.float64), np.dtype(np.float64), False)
    return dot_host(x.astype(wide), y.astype(wide), wide, True), float(scale)


def _judge(exact: Any, scale: float, dtype: np.dtype, found: Any) -> str | None:
    value = np.asarray(found)[()]
    if dtype.kind in "iu":
        return None if value == exact else f"{value}, not {exact}"
    error, limit = abs(complex(value) - complex(exact)), ROUNDOFF * float(np.finfo(dtype).eps) * scale
    return None if error <= limit else f"{value}, not {exact}: {error / limit:.3g} times the tolerance"


def _contestant(
    name: str, run: Callable[[], Any], judge: Callable[[Any], str | None], peer: bool = False
) -> Contestant:
    def check() -> str | None:
        found = run()
        for method in ("copy_to_host", "get", "cpu"):  # Numba, CuPy, PyTorch
            if hasattr(found, method):
                return judge(getattr(found, method)())
        return judge(found)

    return Contestant(name, run, check, peer)


def _cpu(x: np.ndarray, y: np.ndarray, judge: Callable[[Any], str | None]) -> list[Contestant]:
    found = []
    if x.dtype != np.float16:  # NumPy adds up in half precision, and overflows
        found.append(_contestant("numpy.vdot", functools.partial(np.vdot, x, y), judge, peer=True))
    return [*found, _contestant("tilewright (CPU)", functools.partial(dot, x, y, device="cpu"), judge)]


def _gpu(x: np.ndarray, y: np.ndarray, judge: Callable[[Any], str | None]) -> list[Contestant]:
    from numba import cuda

    from tilewright.kernels.dot import FINISHES, _on_device
    from tilewright.kernels.reading import read

    left, right = cuda.to_device(x), cuda.to_device(y)
    found = []
    cupy = _library("cupy")
    if cupy is not None and x.dtype != np.float16:
        theirs = cupy.asarray(left), cupy.asarray(right)
        name = "cuBLAS (CuPy)" if x.dtype.kind in "fc" else "cupy.vdot"
        found.append(_contestant(name, functools.partial(cupy.vdot, *theirs), judge, peer=True))
    found.append(_contestant("tilewright", functools.partial(dot, left, right), judge))
    for finish in FINISHES:
        run = functools.partial(_on_device, left, right, x.dtype, True, launch.DEFAULT_STREAM, finish)
        found.append(_contestant(finish, run, judge))

    def both() -> None:
        read(left)
        read(right)

    return [*found, Contestant("reading alone", both, lambda: None)]


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


@click.command("dot")
@click.option(
    "--dtype", "dtypes", multiple=True, default=DTYPES, show_default=True, help="May be given more than once."
)
@click.option("--nbytes", type=int, default=DEFAULT_NBYTES, show_default=True, help="Bytes of each vector.")
@click.option("--device", type=click.Choice(launch.DEVICES), default="auto", show_default=True)
@click.option("--seconds", type=float, default=1.0, show_default=True, help="Time for each contestant.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Write a bar plot to this PNG file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(plot: str | None, as_json: bool, **options: Any) -> None:
    """Measure the dot product beside other libraries', after checking every answer."""
    from tilewright.workflows.console import is_quiet, print_result

    report = run_dot(**options, progress=lambda text: None if is_quiet() else click.echo(text, err=True))
    if plot is not None:
        report.plot(plot)
    print_result(report, as_json=as_json)
