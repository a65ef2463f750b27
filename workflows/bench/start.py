"""A short command from the start of its process to the end, beside a script of zarr and NumPy that multiplies the same.

Processes are started in turn, so that what else the machine does comes to all alike: the figures to compare are the
processor time, user and system, and the ratio to the script of the same turn. Each product is compared with NumPy's
before anything is timed.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from tilewright.pipeline.errors import TaskError
from tilewright.workflows.bench.common import WrongAnswer, machine, publish, shown, tell

SCRIPT = """\
import sys, numpy, zarr
a, b = (zarr.open_array(path, mode="r") for path in sys.argv[1:3])
c = zarr.create_array(sys.argv[3], shape=(a.shape[0], b.shape[1]), chunks=a.chunks, dtype=a.dtype,
                      compressors=a.compressors, overwrite=True)
c[:] = a[:] @ b[:]
"""
DEFAULT_SIDE = 256
CODECS: dict[str, Any] = {"plain": None, "zstd": "auto"}
"""How chunks are stored, by zarr-python's words; its own default is Zstandard."""
RELATIVE_ERROR = 1e-4
"""How far elements may be from NumPy's, of the largest; float32 sums of thousands of products keep far nearer."""


@dataclass(frozen=True)
class StartRow:
    """One command beside the script."""

    storage: str
    verified: bool
    cpu_seconds: float
    """Processor time, user and system, of the process and those that it waited for: median over the turns."""
    wall_seconds: float
    cpu_ratio: float
    """To the script of the same turn: median."""
    wall_ratio: float


@dataclass(frozen=True)
class StartReport:
    side: int
    rounds: int
    machine: dict[str, str]
    rows: tuple[StartRow, ...]
    script: dict[str, dict[str, float]]
    """Of each way to store: the script's medians, ``cpu_seconds`` and ``wall_seconds``."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        from rich.table import Table

        title = f"float32, {self.side} × {self.side}, whole processes, medians of {self.rounds} turns"
        table = Table("chunks", "what", "CPU s", "to the script", "wall s", "to the script", title=title)
        for storage, times in self.script.items():
            table.add_row(
                storage, "script", f"{times['cpu_seconds']:.3f}", "", f"{times['wall_seconds']:.3f}", ""
            )
            for row in self.rows:
                if row.storage == storage:
                    what = "matmul, verified" if row.verified else "matmul --no-verify"
                    figures = f"{row.cpu_seconds:.3f}", f"{row.cpu_ratio:.2f}", f"{row.wall_seconds:.3f}"
                    table.add_row(storage, what, *figures, f"{row.wall_ratio:.2f}")
        return shown(table, ", ".join(f"{name} {value}" for name, value in self.machine.items()))


def run_start(
    side: int = DEFAULT_SIDE, *, rounds: int = 7, progress: Callable[[str], None] = lambda text: None
) -> StartReport:
    """Measure products of two float32 matrices of side × side, in four chunks each, on the CPU.

    rounds: turns that count, behind one that does not. Raises WrongAnswer where a product is wrong, and TaskError where
    a process fails.
    """
    rows: list[StartRow] = []
    scripts: dict[str, dict[str, float]] = {}
    folder = Path(tempfile.mkdtemp(prefix="tilewright-bench-start-"))
    try:
        for storage, codec in CODECS.items():
            progress(storage)
            a, b, product = _factors(folder / storage, side, codec)
            script = [sys.executable, "-c", SCRIPT, a, b]
            ours = [sys.executable, "-m", "tilewright", "matmul", "--quiet", "--device", "cpu", "--overwrite"]
            commands = {"script": script, "True": [*ours, a, b], "False": [*ours, "--no-verify", a, b]}
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
            for turn in range(rounds + 1):
                for name, command in commands.items():
                    out = folder / storage / f"c-{name}.zarr"
                    seconds = _timed([*command, str(out)])
                    if turn:
                        found[name].append(seconds)
                    else:
                        _check(out, product, f"{storage}, {name}")
            scripts[storage] = dict(
                zip(("cpu_seconds", "wall_seconds"), _medians(found["script"]), strict=True)
            )
            for name in ("True", "False"):
                ratios = [
                    (cpu / cpu_script, wall / wall_script)
                    for (cpu, wall), (cpu_script, wall_script) in zip(
                        found[name], found["script"], strict=True
                    )
                ]
                rows.append(StartRow(storage, name == "True", *_medians(found[name]), *_medians(ratios)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return StartReport(side, rounds, machine(False), tuple(rows), scripts)


def _factors(folder: Path, side: int, codec: Any) -> tuple[str, str, np.ndarray]:
    """Two stored matrices, normally distributed, and their product."""
    import zarr

    rng = np.random.default_rng(20261126)
    factors = []
    for name in ("a", "b"):
        values = rng.standard_normal((side, side), np.float32)
        chunk = max(1, -(-side // 2))
        path = folder / f"{name}.zarr"
        stored = zarr.create_array(
            path, shape=values.shape, chunks=(chunk, chunk), dtype=values.dtype, compressors=codec
        )
        stored[:] = values
        factors.append((str(path), values))
    (a, left), (b, right) = factors
    return a, b, left @ right


def _timed(command: list[str]) -> tuple[float, float]:
    """The processor time and the time that a process takes from start to end. Raises TaskError where it fails."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise TaskError(f"{' '.join(command[:4])} ... failed with {done.returncode}: {done.stderr.strip()}")
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, wall


def _check(path: Path, product: np.ndarray, what: str) -> None:
    import zarr

    found: Any = zarr.open_array(path, mode="r")[:]
    error = float(np.abs(found - product).max(initial=0.0))
    if not error <= RELATIVE_ERROR * float(np.abs(product).max(initial=0.0)):
        raise WrongAnswer(f"{what}: an element is {error} from NumPy's")


def _medians(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    first, second = zip(*pairs, strict=True)
    return statistics.median(first), statistics.median(second)


@click.command("start")
@click.option(
    "--side", type=click.IntRange(1), default=DEFAULT_SIDE, show_default=True, help="Side of all matrices."
)
@click.option(
    "--rounds", type=click.IntRange(1), default=7, show_default=True, help="Turns; one more is not counted."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(side: int, rounds: int, as_json: bool) -> None:
    """Measure a short product as a whole process, beside a script of zarr and NumPy."""
    publish(run_start(side, rounds=rounds, progress=tell), as_json=as_json)
