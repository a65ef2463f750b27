"""The figures of the whole job in docs/performance.md: Zarr in, Zarr out, on every number of GPUs there is.

    python benchmarks/e2e.py [FOLDER [STORE]]      writes e2e.json, e2e.png and e2e-timeline.png to FOLDER

STORE takes the matrices, by default /dev/shm: 32 GiB of them on a GPU at a time, and C beside them. On a machine
without a GPU the sides are smaller, and the peer runs on NumPy.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewright.kernels.device import devices
from tilewright.workflows.bench.common import BenchReport
from tilewright.workflows.bench.e2e import Case, run_e2e

BASE = Case(n=32768, dtype="float32", chunk=4096, workers=1, device_memory=None, values="small")


def gpu_cases(gpus: int) -> list[tuple[Case, bool]]:
    """What is timed on so many GPUs, and beside dask.array or not: those of one size and dtype side by side."""
    every = dict.fromkeys((1, min(2, gpus), gpus))
    cases = [(replace(BASE, workers=workers), workers == gpus) for workers in every]
    cases += [(replace(BASE, workers=gpus, device_memory="4GiB"), False)]
    for dtype in ("float64", "int64"):
        cases += [
            (replace(BASE, dtype=dtype, workers=workers), False) for workers in dict.fromkeys((1, gpus))
        ]
    large = replace(BASE, n=65536)
    cases += [(replace(large, workers=workers), False) for workers in dict.fromkeys((1, gpus))]
    cases += [(replace(large, workers=gpus, device_memory="4GiB"), False)]
    return cases


CPU_CASES = [
    (replace(BASE, n=8192, chunk=1024, workers=2), True),
    (replace(BASE, n=2560, chunk=512, dtype="int64", values="full", workers=2), False),
]


def main(folder: Path, store: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    gpus = len(devices())
    rows: list[Any] = []
    details: list[dict[str, Any]] = []
    report: BenchReport | None = None
    for case, peer in gpu_cases(gpus) if gpus else CPU_CASES:
        print(case.name, file=sys.stderr, flush=True)
        report, found = run_e2e([case], store, gpu=bool(gpus), repeats=2, peer=peer, peer_repeats=1)
        rows += report.rows
        details += found
        report = replace(report, rows=tuple(rows))
        (folder / "e2e.json").write_text(json.dumps(report.to_json() | {"details": details}, indent=1) + "\n")
    assert report is not None
    report.plot(folder / "e2e.png")
    print(report, flush=True)


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    place = sys.argv[2] if len(sys.argv) > 2 else "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as matrices:
        main(target, Path(matrices))
