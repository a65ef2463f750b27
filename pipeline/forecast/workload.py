"""What a plan comes to, whatever it is a plan of: operations, bytes, and who shares them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.pipeline.neighbours.plan import NeighbourPlan
from tilewright.pipeline.plan.product import MatmulPlan

ASKED = ("float32", "float64", "complex64", "complex128")
"""What a precision can be asked for."""
FEW = 16
"""Neighbours of each item up to which a GPU finds them at nearly its full rate."""


@dataclass(frozen=True)
class Workload:
    """The amounts of a plan."""

    arithmetic: str
    """What is computed, as `published.py` calls it: dtype, precision and, of a search, which rows meet which."""
    operations: int
    read_nbytes: int
    """As it is decoded: whole chunks."""
    once_nbytes: int
    """Of what has to be read at least, whoever reads it."""
    write_nbytes: int
    sharing: int
    """Workers, or of a search on CPUs tasks, that work at once."""
    workers: int
    on_host: bool
    host_nbytes: int | None
    """Of a worker's process; None: not known."""
    device_nbytes: int
    """Of its GPU; 0 on a CPU."""
    disk_nbytes: int
    check_nbytes: int
    """What is gone through once more to check the result; 0: it is not checked."""
    check_itemsize: int = 8
    """Bytes of a real number of the factors."""
    encoded: bool = False
    """Whether chunks have to be decoded, and C's encoded, by the hosts' cores."""
    units: str = "tiles"
    """What it is cut into."""
    output: str = "C"
    """What is stored."""

    @property
    def is_search(self) -> bool:
        return self.arithmetic.startswith("search ")

    @classmethod
    def of_product(cls, plan: MatmulPlan, precision: str = "full", *, verify: bool = True) -> Workload:
        a, b = (np.dtype(name).itemsize for name in (plan.a_dtype, plan.b_dtype))
        factors = plan.m * plan.k * a + plan.k * plan.n * b  # of one array both are read
        whole = decoded_share(plan)
        return cls(
            arithmetic=arithmetic_of(plan.operands, plan.sums, "full" if plan.on_host else precision),
            operations=plan.operations,
            read_nbytes=int(whole * plan.read_nbytes),
            once_nbytes=int(whole * plan.bound_nbytes),
            write_nbytes=plan.write_nbytes,
            sharing=max(1, min(plan.workers, plan.tile_count * plan.k_tasks)),
            workers=plan.workers,
            on_host=plan.on_host,
            host_nbytes=plan.host_peak_nbytes,
            device_nbytes=0 if plan.on_host else plan.device_peak_nbytes,
            disk_nbytes=plan.write_nbytes,
            check_nbytes=factors + plan.write_nbytes if verify else 0,
            check_itemsize=max(_real_nbytes(name) for name in (plan.a_dtype, plan.b_dtype)),
            encoded=bool(plan.decoded_by),
        )

    @classmethod
    def of_count(cls, nbytes: int, pieces: int, workers: int, *, on_host: bool, disk_nbytes: int) -> Workload:
        """Of a corpus of so many stored bytes, which are all that is known of how long it takes."""
        return cls(
            arithmetic="count",
            operations=nbytes,
            read_nbytes=nbytes,
            once_nbytes=nbytes,
            write_nbytes=0,
            sharing=max(1, min(workers, pieces)),
            workers=workers,
            on_host=on_host,
            host_nbytes=None,
            device_nbytes=0,
            disk_nbytes=disk_nbytes,
            check_nbytes=0,
            units="pieces",
            output="the counts",
        )

    @classmethod
    def of_search(cls, plan: NeighbourPlan, precision: str = "full", *, verify: bool = True) -> Workload:
        dtype = np.dtype(plan.items_dtype)
        taken = plan.task_nbytes * (plan.threads // plan.workers if plan.on_host else 1) + plan.held_nbytes
        if plan.k is None:
            kind = "pairs"
        else:
            kind = "few" if plan.k <= FEW else "many"
        rows = "once" if plan.triangle else "all"
        name = arithmetic_of((dtype, dtype), np.dtype(plan.dtype), "full" if plan.on_host else precision)
        return cls(
            arithmetic=f"search {name} {kind} {rows}",
            operations=plan.operations,
            read_nbytes=plan.read_nbytes,
            once_nbytes=plan.least_read_nbytes,
            write_nbytes=plan.output_nbytes,
            sharing=plan.sharing,
            workers=plan.workers,
            on_host=plan.on_host,
            host_nbytes=plan.host_peak_nbytes,
            device_nbytes=0 if plan.on_host else taken,
            disk_nbytes=plan.output_nbytes,
            check_nbytes=plan.n * plan.width if verify and plan.output_nbytes else 0,
            units="blocks",
            output="the pairs" if plan.k is None else "the neighbours",
        )


def _real_nbytes(name: str) -> int:
    """Bytes of an element, or of the real part of a complex one."""
    dtype = np.dtype(name)
    return dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize


def decoded_share(plan: MatmulPlan) -> float:
    """How many bytes are decoded for each that is used: reading takes as long as that, and more than 1 where chunks do
    not line up with panels."""
    return max(1.0, plan.decoded_nbytes / plan.read_nbytes) if plan.read_nbytes else 1.0


def arithmetic_of(operands: tuple[np.dtype, np.dtype], sums: np.dtype, precision: str) -> str:
    """What is multiplied: a dtype, or the width of integers that are multiplied exactly; and the precision."""
    if all(dtype.kind in "biu" for dtype in operands):
        widest = max(dtype.itemsize for dtype in operands)
        return "int8" if widest == 1 else "int32" if widest <= 4 else "int64"
    name = operands[0].name if operands[0] == operands[1] else sums.name
    return name if precision == "full" or name not in ASKED else f"{name} {precision}"
