"""The report of a finished matrix product."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tilewright.kernels.numbers import counted, format_nbytes
from tilewright.pipeline.events import LEAST_BUSY_SHARE
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.plan.told import THREADS
from tilewright.pipeline.product.verify import Verification

LIMITING_SHARE = 0.8
"""A thread that is busy for at least this share of the time limits a run; below it, threads wait for one another."""


@dataclass(frozen=True)
class MatmulRun:
    """A finished matrix product: the plan, what computed it, how long it took, and the result of its verification."""

    plan: MatmulPlan
    device: str
    """Name of the GPU, or ``CPU``."""
    kernel: str
    """The kernel that multiplied, as it is named in `tilewright bench gemm`."""
    seconds: float
    """From the first tile handed out to the last one stored."""
    stages: dict[str, float]
    """Busy seconds by stage, summed over workers. Stages overlap, so they can add up to more than ``seconds``. Time in
    which a stage moves several panels or tiles at once counts once."""
    read_nbytes: int
    """Bytes of A and B that were read, counted after decoding: what the plan says, more where tiles overtake
    each other, and less where panels came from other workers."""
    shared_nbytes: int
    """Bytes of A and B that workers copied from each other's GPUs rather than read."""
    write_nbytes: int
    """Bytes of C that were written: those of the tiles that this run computed."""
    operations: int
    """Multiplications and additions of those tiles."""
    workers: dict[str, dict[str, float]]
    """For each worker that did any work, the seconds in which it was busy with ``load``, ``compute``, ``write``."""
    resumed: int
    """Tiles that an earlier run had finished."""
    verification: Verification | None
    """None where no verification was asked for."""
    workers_lost: int = 0
    """Workers that were lost while tiles were computed; what they had under way was computed again."""
    wraps: str = "no"
    """``possible`` where k times the largest absolute values of A and B exceeds C's integers, so that sums may have
    wrapped; else ``no``."""
    masked: dict[str, int] = field(default_factory=dict)
    """For ``A`` and ``B``, where their attributes name numbers that stand for missing ones: how many of those there are
    in all of the array. They were multiplied as they are stored."""
    not_finite: int = 0
    """Elements of C that are NaN or infinite."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "plan": self.plan.to_json(),
            "verification": self.verification.to_json() if self.verification is not None else None,
        }

    def __str__(self) -> str:
        plan = self.plan
        how = f"kernel {self.kernel}"
        if self.operations and self.seconds > 0:
            how = f"{self.operations / self.seconds / 1e9:.4g} Gop/s, {how}"
        lines = [
            f"{plan.m} × {plan.n} {plan.c_dtype} in {self.seconds:.2f} s on {self.device} × {plan.workers} ({how})",
            *([f"C is {plan.c_dtype_reason}"] if plan.c_dtype_reason else []),
            self._busy(),
            f"read {format_nbytes(self.read_nbytes)},"
            + (f" took {format_nbytes(self.shared_nbytes)} from other GPUs," if self.shared_nbytes else "")
            + f" wrote {format_nbytes(self.write_nbytes)}, {counted(plan.tile_count, 'tile')}"
            + (f", {self.resumed} of them from an earlier run" if self.resumed else "")
            + (f"; {counted(self.workers_lost, 'worker')} lost" if self.workers_lost else ""),
        ]
        if self.verification is not None:
            lines.append(str(self.verification))
        if doubts := self._doubts():
            lines.append(f"but {', and '.join(doubts)}")
        return "\n".join(lines)

    def _doubts(self) -> list[str]:
        """Why numbers that are right may not be what the user means."""
        found = []
        if self.wraps != "no":
            found.append(f"sums may have wrapped in {self.plan.c_dtype}")
        if missing := [f"{count} of {role}" for role, count in self.masked.items() if count]:
            found.append(f"elements that stand for missing ones were multiplied ({', '.join(missing)})")
        if self.not_finite:
            share = self.not_finite / (self.plan.m * self.plan.n)
            found.append(f"{share:.3g} of C's elements are not finite")
        return found

    def _busy(self) -> str:
        """One line: the share of the time each thread of a worker was busy, and which of them the others wait for."""
        if not self.workers or self.seconds <= 0:
            return "busy: nothing was left to do"
        count = max(self.plan.workers, len(self.workers))
        shares = {
            stage: seconds / (self.seconds * count) for stage, seconds in self.stages.items() if seconds > 0
        }
        threads = {name: sum(shares.get(stage, 0.0) for stage in stages) for name, stages in THREADS.items()}
        texts = []
        for name, stages in THREADS.items():
            inner = ", ".join(f"{stage} {shares[stage]:.0%}" for stage in stages if stage in shares)
            texts.append(f"{name} {threads[name]:.0%}" + (f" ({inner})" if "," in inner else ""))
        busy = f"busy share of the time: {', '.join(texts)}"
        limit = max(threads, key=lambda name: threads[name])
        if threads[limit] < LEAST_BUSY_SHARE:
            return f"{busy}; nearly all of it went elsewhere, as to other tasks of the workers"
        if threads[limit] >= LIMITING_SHARE:
            verdict = f"{limit} limits it and the others wait for it"
        else:
            verdict = (
                f"{limit} is busiest, and waits for the others too: at the start and the end, or by turns"
            )
        if count > 1:
            each = [busy[limit] / self.seconds for busy in self.workers.values()]
            each += [0.0] * (count - len(each))
            verdict += f" ({min(each):.0%} to {max(each):.0%} on each of {count} workers)"
        return f"{busy}; {verdict}"
