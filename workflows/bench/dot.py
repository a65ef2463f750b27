"""The dot product on one device beside its peers and reading alone; two dtypes with every way to finish the sum.

On a GPU the peer is the fastest of CUB's reduction of products (where nvcc is installed), CuPy's reduction kernel of
the same, and cuBLAS through CuPy and PyTorch; on a CPU it is NumPy.

Each contestant's answer is checked before it is timed, against sums in double precision or exact integers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from tilewright.kernels import dot
from tilewright.kernels.choices import DEVICES
from tilewright.kernels.dots.host import dot_host
from tilewright.kernels.errors import OptionError
from tilewright.kernels.gpu.device_choice import (
    SIMULATOR,
    capability,
    current_device,
    resolve_device,
)
from tilewright.kernels.gpu.streams import DEFAULT_STREAM
from tilewright.workflows.bench.common import (
    SECONDS,
    BenchReport,
    Contestant,
    ElementType,
    Picture,
    Row,
    Search,
    expect_pictures,
    library,
    machine,
    measure,
    publish,
    search,
    tell,
)
from tilewright.workflows.console import Size

DTYPES = ("float32", "float64", "complex64", "complex128", "float16", "int8", "int32", "int64")
LADDER_DTYPES = ("float32", "int64")
"""The dtypes timed with every way to finish the sum: the ways differ only after the vectors are read, whatever their
dtype."""
DEFAULT_NBYTES = 1 << 30
UNIT_NBYTES = 1 << 24
"""Vectors repeat after this many bytes: making gigabytes on the host takes longer than all that is measured."""
ROUNDOFF = 64
"""How many rounding errors of its sums' type an answer may be off, relative to the sum of absolute products."""
SUMS = {
    "float16": "float", "float32": "float", "float64": "double",
    "int8": "unsigned int", "int32": "unsigned int", "int64": "unsigned long long",
}  # fmt: skip
"""The type in which CuPy's reduction adds up, by dtype; unsigned ones wrap."""
HALF_SPREAD = 4096.0
"""The standard deviation of a float16 product at most: a sixteenth of what the type holds."""


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
    if SIMULATOR:
        raise OptionError("the CUDA simulator proves nothing about speed; unset NUMBA_ENABLE_CUDASIM")
    on_gpu = resolve_device(device) == "cuda"
    rows: list[Row] = []
    searches: list[Search] = []
    for name in dtypes:
        progress(name)
        x, y = _units(np.dtype(name), nbytes)
        length = nbytes // x.itemsize
        work = float(length * (x.itemsize + y.itemsize))
        if on_gpu:
            peers, ours = _gpu(x, y, length, name in LADDER_DTYPES)
            kept, searched = search(name, work, peers, on_gpu=True)
            contestants = kept + ours
            searches.append(searched)
        else:
            contestants = _cpu(x, y, length)
        rows += measure(name, work, contestants, on_gpu=on_gpu, rounds=rounds, seconds=seconds)
    return BenchReport("dot product", "GB/s", 1e9, machine(on_gpu), tuple(rows), tuple(searches))


def _units(dtype: np.dtype, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """What two vectors of ``nbytes`` repeat: random elements, normally distributed, or integers over the whole
    range of the type.

    The product of float16 vectors must not leave the type's range, or infinity would be the right answer and every
    other number forgiven: the longer the vectors, the smaller their elements, by a power of two.
    """
    rng = np.random.default_rng(20261121)
    count = UNIT_NBYTES // dtype.itemsize
    length = nbytes // dtype.itemsize
    units = []
    for _ in range(2):
        if dtype.kind in "iu":
            info = np.iinfo(dtype)
            units.append(rng.integers(info.min, info.max, count, dtype, endpoint=True))
        elif dtype.kind == "c":
            part = np.float32 if dtype == np.complex64 else np.float64
            units.append(rng.standard_normal(2 * count, part).view(dtype))
        else:
            unit = rng.standard_normal(count, np.float32)
            units.append((unit * _spread(length, count) if dtype == np.float16 else unit).astype(dtype))
    return units[0], units[1]


def _repeated(unit: np.ndarray, length: int) -> Any:
    """A vector on the device that repeats ``unit``: copied there once, and from there on twice as much each time."""
    from numba import cuda

    out = cuda.device_array(length, unit.dtype)
    filled = min(length, len(unit))
    out[:filled].copy_to_device(unit[:filled])
    while filled < length:
        more = min(filled, length - filled)
        out[filled : filled + more].copy_to_device(out[:more])
        filled += more
    return out


def _spread(length: int, unit: int) -> np.float32:
    """A standard deviation of elements, a power of two up to 1, for which the sum of ``length`` products that
    repeat after ``unit`` has one of at most `HALF_SPREAD`.
    """
    repeats = max(1.0, length / unit)
    products = repeats * math.sqrt(min(length, unit))
    return np.float32(2.0 ** min(0, math.floor(math.log2(HALF_SPREAD / max(1.0, products)) / 2)))


def _exact(x: np.ndarray, y: np.ndarray, length: int) -> tuple[Any, float]:
    """The product of vectors of ``length`` that repeat x and y, and the sum of absolute products, by which errors are
    measured (0 for integers).

    Products repeat as the vectors do: one unit is multiplied, and what is left over.
    """
    repeats, rest = divmod(length, len(x))
    parts = [(repeats, x, y)] if repeats else []
    if rest:
        parts.append((1, x[:rest], y[:rest]))
    if x.dtype.kind in "iu":
        total = sum(times * int(dot_host(a, b, x.dtype, True)) for times, a, b in parts)
        return np.array([total % (1 << 64)], np.uint64).astype(x.dtype)[0], 0.0
    wide = np.dtype(np.complex128 if x.dtype.kind == "c" else np.float64)
    double = np.dtype(np.float64)
    product = sum(times * dot_host(a.astype(wide), b.astype(wide), wide, True) for times, a, b in parts)
    scale = sum(
        times * dot_host(np.abs(a).astype(double), np.abs(b).astype(double), double, True)
        for times, a, b in parts
    )
    return wide.type(product), float(scale)


def _judge(exact: Any, scale: float, dtype: np.dtype, sums: np.dtype, found: Any) -> str | None:
    """What is wrong with an answer; None if it is as near as sums in the type ``sums`` and one rounding to ``dtype``
    allow."""
    value = np.asarray(found)[()]
    if value.dtype != dtype:
        return f"the answer is {value.dtype}, not {dtype}"
    if dtype.kind in "iu":
        return None if value == exact else f"{value}, not {exact}"
    limit = float(np.finfo(dtype).eps) * abs(exact) + ROUNDOFF * float(np.finfo(sums).eps) * scale
    error = abs(complex(value) - complex(exact))
    return None if error <= limit else f"{value}, not {exact}: {error / limit:.3g} times the tolerance"


def _contestant(
    name: str,
    run: Callable[[], Any],
    judge: Callable[[Any], str | None],
    peer: bool = False,
    caller: str = "",
) -> Contestant:
    def check() -> str | None:
        found = run()
        for method in ("copy_to_host", "get", "cpu"):  # Numba, CuPy, PyTorch
            if hasattr(found, method):
                return judge(getattr(found, method)())
        return judge(found)

    return Contestant(name, run, check, peer, caller=caller)


def _judges(
    x: np.ndarray, y: np.ndarray, length: int
) -> tuple[Callable[[Any], str | None], Callable[[Any], str | None]]:
    """The judges of sums in the elements' own type (float16: in float32), and of sums in double precision."""
    exact = _exact(x, y, length)
    own, wide = np.dtype(np.float32) if x.dtype == np.float16 else x.dtype, np.dtype(np.float64)
    return (
        functools.partial(_judge, *exact, x.dtype, own),
        functools.partial(_judge, *exact, x.dtype, wide),
    )


def _cpu(unit_x: np.ndarray, unit_y: np.ndarray, length: int) -> list[Contestant]:
    judge, _ = _judges(unit_x, unit_y, length)
    x, y = np.resize(unit_x, length), np.resize(unit_y, length)
    found = []
    if x.dtype != np.float16:  # NumPy adds up in half precision, and overflows
        found.append(_contestant("numpy.vdot", functools.partial(np.vdot, x, y), judge, peer=True))
    return [*found, _contestant("tilewright (CPU)", functools.partial(dot, x, y, device="cpu"), judge)]


def _gpu(
    x: np.ndarray, y: np.ndarray, length: int, ladder: bool
) -> tuple[list[Contestant], list[Contestant]]:
    """The settings of peers to search, and ours, on vectors that repeat x and y; ``ladder``: every way to finish."""
    from tilewright.kernels.dots.device import FINISHES, on_device
    from tilewright.kernels.passes.reading import read

    judge_peer, judge = _judges(x, y, length)
    left, right = _repeated(x, length), _repeated(y, length)
    peers = [
        _contestant(name, run, judge_peer, peer=True, caller=caller)
        for caller, name, run in _peers(left, right)
    ]
    found = [_contestant("tilewright", functools.partial(dot, left, right), judge)]
    for finish in FINISHES if ladder else ():
        run = functools.partial(on_device, left, right, x.dtype, True, DEFAULT_STREAM, finish)
        found.append(_contestant(finish, run, judge))

    def both() -> None:
        read(left)
        read(right)

    return peers, [*found, Contestant("reading alone", both, lambda: None)]


def _peers(x: Any, y: Any) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Callers, names and functions; x and y are Numba device arrays."""
    from tilewright.workflows.bench import cub

    current = capability(current_device())
    ready = cub.dot_product(x, y, current) if current else None
    if ready is not None:
        call, result = ready

        def reduce_cub() -> Any:
            call()
            return result

        yield "CUB", "CUB TransformReduce", reduce_cub
    cupy, torch = library("cupy"), library("torch")
    if cupy is not None:
        left, right = cupy.asarray(x), cupy.asarray(y)
        yield "CuPy", "CuPy ReductionKernel", functools.partial(_reduction(cupy, x.dtype), left, right)
        if x.dtype != np.float16:  # it adds up in half precision
            name = "cuBLAS (CuPy)" if x.dtype.kind in "fc" else "cupy.vdot"
            yield "cuBLAS", name, functools.partial(cupy.vdot, left, right)
    if torch is not None and x.dtype.kind in "fc":  # it has none of integers on a GPU
        tensors = [torch.as_tensor(vector, device="cuda") for vector in (x, y)]
        yield "cuBLAS", "cuBLAS (PyTorch)", functools.partial(torch.vdot, *tensors)


def _reduction(cupy: Any, dtype: np.dtype) -> Any:
    """CuPy's kernel that reads both vectors once and adds up their products, as its users write it."""
    if dtype.kind == "c":
        return cupy.ReductionKernel("T x, T y", "T z", "conj(x) * y", "a + b", "z = a", "0", "peer_dot")
    sums = SUMS[dtype.name]
    product = f"({sums})x * ({sums})y"
    return cupy.ReductionKernel(
        "T x, T y", "T z", product, "a + b", "z = a", "0", "peer_dot", reduce_type=sums
    )


@click.command("dot")
@click.option(
    "--dtype",
    "dtypes",
    type=ElementType("iufc"),
    multiple=True,
    default=DTYPES,
    show_default=True,
    help="May be given more than once.",
)
@click.option(
    "--nbytes", type=Size(least=16), default=DEFAULT_NBYTES, show_default=True, help="Bytes of each vector."
)
@click.option("--device", type=click.Choice(DEVICES), default="auto", show_default=True)
@click.option("--seconds", type=SECONDS, default=1.0, show_default=True, help="Time for each contestant.")
@click.option("--plot", type=Picture(), help="Write a bar plot to this PNG file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(plot: Path | None, as_json: bool, **options: Any) -> None:
    """Measure the dot product beside other libraries', after checking every answer."""
    expect_pictures(plot)
    report = run_dot(**options, progress=tell)
    publish(report, (plot, report.plot), as_json=as_json)
