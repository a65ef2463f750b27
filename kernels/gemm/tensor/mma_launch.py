"""Launching the ``mma.sync`` kernel for lines of bytes, with the same arguments as the Hopper kernel."""

from __future__ import annotations

import functools
from typing import Any

from numba.cuda import types

from tilewright.kernels.gemm.base import Capability, Variant
from tilewright.kernels.gemm.hopper.wgmma_config import OPERAND_NBYTES
from tilewright.kernels.gemm.hopper.wgmma_launch import (
    Launchable,
    Output,
    Planes,
    compile_launchable,
    persistent_grid,
)
from tilewright.kernels.gemm.tensor.mma import (
    ARGUMENTS,
    LARGE_SHARED,
    LARGEST_SHARED,
    SMALL_SHARED,
    Config,
    Tile,
    kernel_function,
)
from tilewright.kernels.gpu.compiled import shared_limit
from tilewright.kernels.gpu.device_choice import current_device
from tilewright.kernels.numbers import ceil_div

AMPERE: Capability = (8, 0)
"""The first compute capability with ``mma.m16n8k32`` of bytes, with bfloat16 and TF32, and with ``cp.async``."""
TILES = (LARGEST_SHARED, LARGE_SHARED, SMALL_SHARED)
"""The first that fits the device's shared memory is taken. On Hopper they reach, in this order, 906, 874 and 834 T
operations a second at n = 8192."""


def fitting_tile(shared_nbytes: int) -> Tile:
    """The tile for a device whose blocks may have so much shared memory."""
    return next(tile for tile in TILES if tile.shared_nbytes <= shared_nbytes or tile is TILES[-1])


@functools.cache
def _tile(device: int) -> Tile:
    return fitting_tile(shared_limit(device))


def config_here(kind_a: str, kind_b: str, c_type: Any, plan_kind: int = -1, **more: Any) -> Config:
    """A configuration with the tile for the current device."""
    return Config(kind_a, kind_b, c_type, plan_kind, _tile(current_device()), **more)


def variant(name: str, config: Config) -> Variant:
    """What a test needs to compile ``config`` without a GPU."""
    return Variant(
        name,
        kernel_function(config),
        types.void(*ARGUMENTS),
        minimum=AMPERE,
        options={"launch_bounds": (config.tile.threads, 1)},
    )


@functools.cache
def compiled(config: Config) -> Launchable:
    return compile_launchable(
        kernel_function(config),
        ARGUMENTS,
        threads=config.tile.threads,
        shared_nbytes=config.tile.shared_nbytes,
    )


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
    """Enqueue C = A B (+ C).

    a: m lines of k, or k lines of m when ``config.m_major_a``; b: n lines of k, or k lines of n when
    ``config.n_major_b``; both ``loadable``. depth: k. plan, workspace: device addresses, for variants that use them.
    """
    tiles = ceil_div(output.rows, config.tile.m) * ceil_div(output.columns, config.tile.n)
    compiled(config).launch(
        persistent_grid(tiles, 1),
        stream,
        a.address,
        a.line_nbytes,
        a.plane_nbytes,
        b.address,
        b.line_nbytes,
        b.plane_nbytes,
        output.address,
        output.row_stride,
        output.column_stride,
        output.rows,
        output.columns,
        depth * OPERAND_NBYTES[config.kind_a],
        int(output.paired),
        int(accumulate),
        plan,
        workspace,
    )
