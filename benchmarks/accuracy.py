"""How far float products are from the exact ones, by residues (``precision="split"``) and in full, and of float8.

    python benchmarks/accuracy.py [--dtype float64] [--depth 1024 --depth 16384] [--side 1536]

On a GPU: `tilewright.kernels.matmul` in both precisions, and cuBLAS where CuPy is there. Without one: the twin of the
kernels, and a chain of multiply-adds, beside NumPy. Largest and root-mean-square error over some rows and columns, in
units of eps |A| |B|, and how many moduli the numbers were found to need. docs/accuracy.md explains all of it.

Of float8 (``--dtype float8_e4m3fn``), in units of |A| |B|: `tilewright.kernels.matmul`, on a GPU as it is there, and
what Hopper's tensor cores make of sums, by their twin: of 128 products, as the kernel has them, of 512, of all of k.
"""

from __future__ import annotations

from collections.abc import Callable

import click
import numpy as np

from tilewright.kernels import matmul
from tilewright.kernels.float8 import FLOAT8, NAMES, to_float32
from tilewright.kernels.gemm.exact import scaled_residues
from tilewright.kernels.gemm.hopper import float8_sums
from tilewright.kernels.gpu.device_choice import resolve_device

SOME = 32
"""Rows and columns that are compared."""
LARGEST = 448
"""Of float8_e4m3fn: what is larger is scaled down."""
Pair = tuple[np.ndarray, np.ndarray]


def of(draw: Callable[[np.random.Generator, tuple[int, int]], np.ndarray]) -> Callable[..., Pair]:
    """Both factors of numbers that are drawn alike."""

    def pair(rng: np.random.Generator, side: int, k: int) -> Pair:
        return draw(rng, (side, k)), draw(rng, (k, side))

    return pair


def lognormal(sigma: float) -> Callable[..., Pair]:
    return of(lambda rng, shape: rng.lognormal(0, sigma, shape) * rng.choice([-1.0, 1.0], shape))


normal = of(lambda rng, shape: rng.standard_normal(shape))


def graded(rng: np.random.Generator, side: int, k: int) -> Pair:
    """Columns of A fall by eight decimal places along k."""
    a, b = normal(rng, side, k)
    return a * 10.0 ** np.linspace(0, -8, k), b


def graded_both(rng: np.random.Generator, side: int, k: int) -> Pair:
    """And rows of B rise by as many."""
    a, b = graded(rng, side, k)
    return a, b * 10.0 ** np.linspace(-8, 0, k)[:, None]


def cancelling(rng: np.random.Generator, side: int, k: int) -> Pair:
    """The second half of each sum is the first with the other sign, but for one part in 10^9."""
    a, b = normal(rng, side, k)
    half = k // 2
    a[:, half : 2 * half] = -a[:, :half] * (1 + 1e-9 * rng.standard_normal((side, half)))
    b[half : 2 * half] = b[:half]
    return a, b


def outlier(size: float) -> Callable[..., Pair]:
    def pair(rng: np.random.Generator, side: int, k: int) -> Pair:
        a, b = normal(rng, side, k)
        a[0, k // 2] = size
        return a, b

    return pair


def hilbert(rng: np.random.Generator, side: int, k: int) -> Pair:
    a = 1 / (np.arange(side)[:, None] + np.arange(k)[None, :] + 1.0)
    return a, a.T.copy()


KINDS: dict[str, Callable[..., Pair]] = {
    "normal": normal,
    "uniform": of(lambda rng, shape: rng.random(shape)),
    **{f"lognormal {sigma:g}": lognormal(sigma) for sigma in (0.5, 1, 2, 3, 4)},
    "graded": graded,
    "graded both ways": graded_both,
    "cancelling": cancelling,
    "one outlier, 100": outlier(1e2),
    "one outlier, 10^8": outlier(1e8),
    "Hilbert-like": hilbert,
}


def chain(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product as a chain of multiplications and additions forms it."""
    c = np.zeros((len(a), b.shape[1]), a.dtype)
    for left, right in zip(a.T, b, strict=True):
        c += np.outer(left, right)
    return c


def errors(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> str:
    unit = 1.0 if a.dtype in FLOAT8 else np.finfo(a.dtype).eps
    if a.dtype in FLOAT8:
        a, b = to_float32(a), to_float32(b)
    exact = a.astype(np.longdouble) @ b.astype(np.longdouble)
    sizes = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64))
    off = np.abs((c - exact).astype(np.float64))
    found = np.divide(off, unit * sizes, out=np.zeros_like(off), where=sizes > 0)
    return f"{found.max():9.3g} {np.sqrt(np.mean(found**2)):9.3g}"


def on_gpu(a: np.ndarray, b: np.ndarray) -> tuple[dict[str, np.ndarray], str]:
    from tilewright.kernels.gemm.exact.outcomes import noted

    with noted() as words:
        products = {"split": matmul(a, b, precision="split", device="cuda")}
    products["full"] = matmul(a, b, device="cuda")
    try:
        import cupy
    except ImportError:
        pass
    else:
        products["cuBLAS"] = cupy.asnumpy(cupy.asarray(a) @ cupy.asarray(b))
    return products, ", ".join(dict.fromkeys(words)) or "too small"


def on_cpu(a: np.ndarray, b: np.ndarray) -> tuple[dict[str, np.ndarray], str]:
    count = scaled_residues.choose(a, b)
    ours = a @ b if count is None else scaled_residues.multiply(a, b, count)
    said = "too different sizes" if count is None else f"{count} moduli"
    return {"split": ours, "chain": chain(a, b), "NumPy": a @ b}, said


def of_float8(a: np.ndarray, b: np.ndarray) -> tuple[dict[str, np.ndarray], str]:
    products = {"matmul": matmul(a, b)}
    a, b = a[:SOME], b[:, :SOME]
    for name, interval in (("by 128", 128), ("by 512", 512), ("all of k", a.shape[1])):
        products[name] = float8_sums.multiply(a, b, -(-interval // 32) * 32)
    return products, ""


@click.command()
@click.option(
    "--dtype", type=click.Choice(["float32", "float64", *NAMES]), default="float64", show_default=True
)
@click.option("--depth", "depths", multiple=True, type=int, help="k; may be given more than once.")
@click.option("--side", type=int, help="Rows of A, and columns of B.  [default: 1536 on a GPU, else 32]")
def main(dtype: str, depths: tuple[int, ...], side: int | None) -> None:
    gpu = resolve_device("auto") == "cuda"
    side = side or (1536 if gpu else SOME)
    rng = np.random.default_rng(1)
    for k in depths or ((1, 64, 1024, 16384, 2**17) if gpu else (1024, 8192)):
        for name, pair in KINDS.items():
            a, b = pair(rng, side, k)
            if dtype in NAMES:
                a, b = (factor * min(1, LARGEST / np.abs(factor).max()) for factor in (a, b))
            a, b = a.astype(dtype), b.astype(dtype)
            products, said = (of_float8 if dtype in NAMES else on_gpu if gpu else on_cpu)(a, b)
            some = {key: errors(c[:SOME, :SOME], a[:SOME], b[:, :SOME]) for key, c in products.items()}
            print(f"k = {k:6}  {name:18}", *(f"{key} {text}" for key, text in some.items()), said, flush=True)


if __name__ == "__main__":
    main()
