"""Walk a plan on a cluster: hand out its tiles, report what happens, keep what is finished. It decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from distributed import Client

from tilewright.pipeline import tasks
from tilewright.pipeline.events import Listener, UnitDone, WorkDone, WorkPlanned
from tilewright.pipeline.plan import MatmulPlan, Tile, format_nbytes
from tilewright.pipeline.stream import Product, TileReport
from tilewright.pipeline.submit import run_bounded, run_combined, window_of
from tilewright.pipeline.verify import Verification


@dataclass(frozen=True)
class MatmulRun:
    """A finished matrix product: what was planned, what did it, how long it took, and whether it proved right."""

    plan: MatmulPlan
    device: str
    """Name of the GPU, or ``CPU``."""
    kernel: str
    """The kernel that multiplied, as it is named in `tilewright bench gemm`."""
    seconds: float
    """From the first tile handed out to the last one stored."""
    stages: dict[str, float]
    """Busy seconds by stage, summed over workers; stages overlap, so they can add up to more than the time."""
    read_nbytes: int
    """Bytes of A and B that were read, as they are once decoded: no more than the plan says."""
    resumed: int
    """Tiles that an earlier run had finished."""
    verification: Verification | None
    """None where no verification was asked for."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "plan": self.plan.to_json(),
            "verification": self.verification.to_json() if self.verification is not None else None,
        }

    def __str__(self) -> str:
        plan = self.plan
        rate = plan.operations / self.seconds if self.seconds > 0 else 0.0
        busiest = (
            max(self.stages, key=lambda stage: self.stages[stage]) if any(self.stages.values()) else "none"
        )
        stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.stages.items() if seconds > 0)
        lines = [
            (
                f"{plan.m} × {plan.n} {plan.c_dtype} in {self.seconds:.2f} s on {self.device} × {plan.workers}"
                f" ({rate / 1e9:.4g} Gop/s, kernel {self.kernel})"
            ),
            f"busy: {stages or 'nothing'}; the busiest stage is {busiest}",
            f"read {format_nbytes(self.read_nbytes)}, wrote {format_nbytes(plan.write_nbytes)},"
            f" {plan.tile_count} tiles"
            + (f", {self.resumed} of them from an earlier run" if self.resumed else ""),
        ]
        if self.verification is not None:
            lines.append(str(self.verification))
        return "\n".join(lines)


def _tile_results(
    client: Client, product: Product, tiles: list[Tile]
) -> Generator[tuple[int, TileReport], None, None]:
    """Place and report of every tile as it is stored, each by one task, or by one for each part of k."""
    key = f"tile-{product.run}"
    parts = range(product.plan.k_parts)
    if len(parts) == 1:
        calls = ((product, tile) for tile in tiles)
        return run_bounded(client, tasks.multiply_tile, calls, key=key, window=window_of(client))
    groups = [((product, tile), [(product, tile, part) for part in parts]) for tile in tiles]
    return run_combined(client, tasks.multiply_part, tasks.add_parts, groups, key=key)


@dataclass(frozen=True)
class TilesDone:
    """What running a plan's tiles took."""

    seconds: float
    stages: dict[str, float]
    """Busy seconds by stage, summed over workers."""
    kernel: str
    """The kernel, or kernels, that multiplied; ``none`` where nothing was left to do."""
    read_nbytes: int
    """Bytes of A and B that were read."""


def run_tiles(
    client: Client,
    product: Product,
    finished: frozenset[int],
    listener: Listener,
    record: Callable[[int], None],
) -> TilesDone:
    """Compute every tile of the plan that is not finished yet.

    ``record`` is called with a tile's index once it is stored. When this ends, by success, error or Ctrl-C, the
    workers hold nothing of the run any more.
    """
    plan = product.plan
    todo: list[Tile] = [tile for tile in plan.tiles() if tile.index not in finished]
    read = sum(plan.tile_read_nbytes(tile) for tile in todo)
    operations = sum(2 * tile.rows * tile.columns * plan.k for tile in todo)
    listener(WorkPlanned("matmul", plan.tile_count, len(finished), "tiles", read, operations))
    stages: dict[str, float] = {}
    kernels: set[str] = set()
    read_nbytes = 0
    start = time.perf_counter()
    ended = False
    try:
        results = _tile_results(client, product, todo)
        with closing(results):  # so that what is outstanding is cancelled before the workers are told to end
            for place, report in results:
                record(report.index)
                kernels.add(report.kernel)
                read_nbytes += report.read_nbytes
                for stage, seconds in report.stages.items():
                    stages[stage] = stages.get(stage, 0.0) + seconds
                tile = todo[place]
                listener(
                    UnitDone(
                        "matmul",
                        report.index,
                        report.worker,
                        report.seconds,
                        plan.tile_read_nbytes(tile),
                        2 * tile.rows * tile.columns * plan.k,
                        report.stages,
                    )
                )
        ended = True
    finally:
        if client.status == "running":  # else the scheduler is gone, and its error is on its way
            client.run(tasks.end_run, product.run, not ended)
    seconds = time.perf_counter() - start
    listener(WorkDone("matmul", seconds))
    return TilesDone(seconds, stages, " and ".join(sorted(kernels)) or "none", read_nbytes)
