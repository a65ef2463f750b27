"""float16, bfloat16 and float32 matrices on the tensor cores that every GPU since 8.0 has, by ``mma.sync``.

The rungs of `hopper.half_tensor_core` and `hopper.split_float` once more, on another main loop (`mma`): the same
operands, passes and pieces. Operands of 16 bits, and of 32 as TF32, are multiplied as they lie, either way round. The
six products of the parts of float32 numbers are two launches. The first sums up the five small ones, from the least on,
in the tensor cores, which truncate: these sums are below 2**-7 of the product, and so is what is lost of them. In the
second, which is added to it, what the tensor cores have summed over a stage is added up in ordinary float32, which
rounds.

float8 goes through the pass that widens it to float16, exactly, and is multiplied as that: products are exact too, and
sums those of float16. Tensor cores have products of float8 from 8.9 on, but the sums of those keep few bits there, as
on Hopper.

Hopper runs these too, and prefers its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from numba.cuda import types

from tilewright.kernels.bfloat16 import BFLOAT16, dtype_name
from tilewright.kernels.float8 import PTX_KINDS
from tilewright.kernels.gemm.base import GemmKernel, Problem, Variant
from tilewright.kernels.gemm.hopper import float_planes, split_float
from tilewright.kernels.gemm.hopper.float_operand import RESIDENT_BLOCKS, TURN_RESIDENT_BLOCKS
from tilewright.kernels.gemm.hopper.float_planes import NONFINITE
from tilewright.kernels.gemm.hopper.half_tensor_core import (
    C_TYPES,
    FLOAT16,
    FLOAT32,
    KINDS,
    Engine,
    launcher,
    supports_asked,
    supports_float8,
    supports_stored,
)
from tilewright.kernels.gemm.hopper.rounded_sums import variants as rounding_variants
from tilewright.kernels.gemm.hopper.wgmma_launch import Output, Planes, pass_variant
from tilewright.kernels.gemm.tensor import mma_launch
from tilewright.kernels.gemm.tensor.mma import SMALL_SHARED, SPLIT_SHARED, Config, Tile
from tilewright.kernels.gemm.tensor.mma_launch import AMPERE, config_here, launch_product, variant

SMALL_PRODUCTS = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1))
"""Which parts of A and of B are multiplied besides the largest, which are number 0."""


def is_capable(problem: Problem) -> bool:
    """Whether the GPU has these tensor cores."""
    return problem.capability is not None and problem.capability >= AMPERE


def _options(c_type: Any, k_major_a: bool, k_major_b: bool) -> dict[str, Any]:
    return {
        "bfloat16_c": c_type == C_TYPES[BFLOAT16],
        "m_major_a": not k_major_a,
        "n_major_b": not k_major_b,
    }


def _config(kind: str, c_type: Any, k_major_a: bool, k_major_b: bool, c_by_columns: bool) -> Config:
    options = _options(c_type, k_major_a, k_major_b)
    if kind == "tf32" and not k_major_a and not k_major_b:
        # Words of both operands are read one by one: with deeper stages their addresses do not fit the registers.
        return Config(kind, kind, c_type, tile=SMALL_SHARED, **options)
    return config_here(kind, kind, c_type, **options)


def _split_config(form: str, m_major_a: bool, n_major_b: bool) -> Config:
    options = _options(types.float32, not m_major_a, not n_major_b)
    if form == "split":
        return Config("bf16", "bf16", types.float32, tile=SPLIT_SHARED, promoted=True, **options)
    return config_here("bf16", "bf16", types.float32, NONFINITE, flagged_only=True, **options)


def _largest(planes: Planes) -> Planes:
    """The first of several planes."""
    return replace(planes, planes=1)


def _launch_parts(
    config: Config,
    a: Planes,
    b: Planes,
    output: Output,
    depth: int,
    accumulate: bool,
    stream: Any,
    **settings: int,
) -> None:
    """Enqueue the products of all parts of operands that are split, or one of operands that are not."""
    if a.planes == 3:
        majors = not config.m_major_a, not config.n_major_b
        small = config_here(
            "bf16", "bf16", types.float32, parts=SMALL_PRODUCTS, **_options(types.float32, *majors)
        )
        launch_product(small, a, b, output, depth, accumulate, stream, **settings)
        a, b, accumulate = _largest(a), _largest(b), True
    launch_product(config, a, b, output, depth, accumulate, stream, **settings)


MMA = Engine(_config, lambda *given: launch_product(*given), lambda: False, either_way=True)
SPLIT_MMA_ENGINE = split_float.Engine(_split_config, _launch_parts)


def launch_split(a: Any, b: Any, c: Any, accumulate: bool, stream: Any) -> None:
    """See ``GemmKernel.launch``."""
    split_float.multiply(SPLIT_MMA_ENGINE, a, b, c, accumulate, stream)


def _variants(
    kinds: Iterable[tuple[str, Any, bool, bool]], tile: Tile = SMALL_SHARED, **more: Any
) -> Iterable[Variant]:
    for kind, c_type, k_major_a, k_major_b in kinds:
        layout = f"{'k' if k_major_a else 'm'}-major by {'k' if k_major_b else 'n'}-major"
        config = Config(kind, kind, c_type, tile=tile, **_options(c_type, k_major_a, k_major_b), **more)
        parts = ", parts" if config.parts else ""
        yield variant(f"{kind} to {c_type}, {layout}, {tile.shared_nbytes >> 10} KiB{parts}", config)


def _pass(form: str, *, turn: bool = False) -> Variant:
    function = float_planes.turn_function() if turn else float_planes.pass_function(form)
    blocks = TURN_RESIDENT_BLOCKS if turn else RESIDENT_BLOCKS
    name = f"to {form}{', turned' if turn else ''}"
    return pass_variant(name, function, float_planes.ARGUMENTS, float_planes.THREADS, blocks, AMPERE)


def _stored_variants(kind: str, dtype: Any) -> Callable[[], Iterable[Variant]]:
    def variants() -> Iterable[Variant]:
        majors = list(itertools.product((True, False), repeat=2))
        yield from _variants((kind, C_TYPES[c], *major) for major in majors for c in (dtype, FLOAT32))
        for tile in mma_launch.TILES[:-1]:
            yield from _variants([(kind, C_TYPES[dtype], False, False)], tile)
        yield from rounding_variants(dtype)
        yield _pass("copy")

    return variants


def _asked_variants(kind: str) -> Callable[[], Iterable[Variant]]:
    def variants() -> Iterable[Variant]:
        majors = itertools.product((True, False), repeat=2)
        yield from _variants((kind, types.float32, *major) for major in majors)
        yield _pass(kind)
        if kind == "tf32":
            yield _pass(kind, turn=True)

    return variants


def _float8_variants() -> Iterable[Variant]:
    first, last = PTX_KINDS.values()
    yield _pass(first)
    majors = itertools.product((True, False), repeat=2)
    yield from _variants(("f16", types.float32, *major) for major in majors)
    yield _pass(last)


def _split_variants() -> Iterable[Variant]:
    majors = itertools.product((True, False), repeat=2)
    kinds = [("bf16", types.float32, *major) for major in majors]
    yield from _variants(kinds, SPLIT_SHARED, promoted=True)
    yield from _variants(kinds, parts=SMALL_PRODUCTS)
    yield from _variants(kinds[:1], plan_kind=NONFINITE, flagged_only=True)
    for form in ("split", "signs"):
        yield _pass(form)


HALF_MMA, BFLOAT_MMA = (
    GemmKernel(
        name=f"{dtype_name(dtype)}-mma",
        summary=f"{dtype_name(dtype)} on the tensor cores of every GPU since 8.0, sums in float32",
        supports=supports_stored(dtype, is_capable),
        launch=launcher(kind, MMA),
        recordable=True,
        variants=_stored_variants(kind, dtype),
    )
    for dtype, kind in ((FLOAT16, "f16"), (BFLOAT16, "bf16"))
)
ASKED_MMA = tuple(
    GemmKernel(
        name=f"{precision}-mma",
        summary=f"float32 operands as {kind} on the tensor cores of every GPU since 8.0, because "
        f"precision={precision!r} allows it",
        supports=supports_asked(precision, is_capable),
        launch=launcher(kind, MMA),
        recordable=True,
        variants=_asked_variants(kind),
    )
    for precision, kind in KINDS.items()
)
FLOAT8_MMA = GemmKernel(
    name="float8-mma",
    summary="float8 widened to float16, on the tensor cores of every GPU since 8.0, sums in float32",
    supports=supports_float8(is_capable),
    launch=launcher("f16", MMA),
    recordable=True,
    variants=_float8_variants,
)
SPLIT_MMA = GemmKernel(
    name="split-float32-mma",
    summary="float32 as three bfloat16 parts on the tensor cores of every GPU since 8.0, as accurate as float32",
    supports=lambda problem: is_capable(problem) and split_float.is_asked(problem),
    launch=launch_split,
    recordable=True,
    variants=_split_variants,
)
