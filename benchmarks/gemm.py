"""The figures of the matrix product in docs/performance.md: every kernel beside the vendor's library.

    python benchmarks/gemm.py [FOLDER [RUN ...]]      writes gemm-*.json and gemm-*.png there (by default here)

All runs, or those named: several GPUs can share them out, a process on each.

Squares as large as the peers are usually quoted at, sides that no tile divides, and skinny products. On a
machine without a GPU the sides are smaller, and the peer is NumPy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tilewright.kernels.launch import cuda_available
from tilewright.workflows.bench.gemm import DTYPES, run_gemm

SKINNY = ((64, 16384, 16384), (16384, 64, 16384), (64, 64, 1 << 20), (16384, 16384, 64))
REDUCED = ("split", "tf32", "bf16", "fp16")
NARROW = ("float16", "bfloat16", "int8->int32", "int8")
SECONDS = 0.5
"""Time for each contestant, about: the whole script then takes some minutes on a large GPU."""

RUNS: dict[str, dict[str, Any]] = {
    "ladder": {"sizes": (4096,), "dtypes": DTYPES, "small": True},
    "large": {"sizes": (8192,), "dtypes": DTYPES},
    "largest": {"sizes": (16384,), "dtypes": ("float32", "float64", "int64")},
    "ragged": {"sizes": (4097,), "dtypes": DTYPES, "whole_ladder": False},
    "skinny": {"sizes": SKINNY, "dtypes": ("float32", "float64"), "whole_ladder": False},
    "reduced": {"sizes": (4096, 8192), "dtypes": ("float32",), "precisions": REDUCED, "whole_ladder": False},
    "narrow": {"sizes": (4096, 8192), "dtypes": NARROW, "whole_ladder": False},
}
CPU_RUNS: dict[str, dict[str, Any]] = {
    "cpu": {"sizes": (1024, 2560), "dtypes": ("float32", "float64", "int8", "int32", "int64")}
}


def main(folder: Path, names: list[str]) -> None:
    runs = RUNS if cuda_available() else CPU_RUNS
    unknown = set(names) - set(runs)
    if unknown:
        sys.exit(f"there is no run {', '.join(sorted(unknown))}; the runs are {', '.join(runs)}")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or runs:
        options = runs[name]
        report = run_gemm(**options, seconds=SECONDS, progress=lambda case: print(case, file=sys.stderr))
        (folder / f"gemm-{name}.json").write_text(json.dumps(report.to_json(), indent=1) + "\n")
        report.plot(folder / f"gemm-{name}.png")
        print(report, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."), sys.argv[2:])
