"""The figures of the matrix product in docs/performance.md: every kernel beside the vendor's library.

    python benchmarks/gemm.py [FOLDER [RUN ...]] [--seconds S]

Writes gemm-*.json and gemm-*.png to FOLDER. All runs, or those named: several GPUs can share them out, a process on
each. On a large GPU ``ladder`` takes about two minutes, since every kernel is compiled for it, and the others half a
minute to a minute each: making and judging matrices on the host takes longer than timing their products, and the
search for the strongest setting of the peers takes some seconds a case.

Squares as large as the peers are usually quoted at, sides that no tile divides, and skinny products. On a
machine without a GPU the sides are smaller, and the peer is NumPy.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from tilewright.kernels.float8 import NAMES
from tilewright.kernels.gpu.device_choice import cuda_available
from tilewright.workflows.bench.gemm import DTYPES, run_gemm

SKINNY = ((64, 16384, 16384), (16384, 64, 16384), (64, 64, 1 << 20), (16384, 16384, 64))
REDUCED = ("split", "tf32", "bf16", "fp16")
NARROW = ("float16", "bfloat16", "int8->int32", "int8")
SECONDS = 0.5
"""Time for each contestant, about; three samples at least."""

RUNS: dict[str, dict[str, Any]] = {
    "ladder": {"sizes": (4096,), "dtypes": DTYPES, "small": True},
    "large": {"sizes": (8192,), "dtypes": DTYPES, "small": True},
    "largest": {"sizes": (16384,), "dtypes": ("float32", "float64", "int64"), "small": True},
    "ragged": {"sizes": (4097,), "dtypes": DTYPES, "whole_ladder": False},
    "skinny": {"sizes": SKINNY, "dtypes": ("float32", "float64"), "whole_ladder": False},
    "reduced": {"sizes": (4096, 8192), "dtypes": ("float32",), "precisions": REDUCED, "whole_ladder": False},
    "float8": {"sizes": (4096, 8192, 16384), "dtypes": NAMES, "whole_ladder": False},
    "narrow": {"sizes": (4096, 8192, 16384), "dtypes": NARROW, "whole_ladder": False},
}
CPU_RUNS: dict[str, dict[str, Any]] = {
    "cpu": {"sizes": (1024, 2560), "dtypes": ("float32", "float64", "int8", "int32", "int64")}
}


def main() -> None:
    runs = RUNS if cuda_available() else CPU_RUNS
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("."))
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"of {', '.join(runs)}; all of them")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"for each contestant, about; {SECONDS}"
    )
    options = parser.parse_args()
    unknown = set(options.runs) - set(runs)
    if unknown:
        parser.error(f"there is no run {', '.join(sorted(unknown))}; the runs are {', '.join(runs)}")
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    for name in options.runs or runs:
        report = run_gemm(
            **runs[name],
            seconds=options.seconds,
            progress=lambda case: print(
                f"{time.perf_counter() - began:5.1f} s: {case}", file=sys.stderr, flush=True
            ),
        )
        (folder / f"gemm-{name}.json").write_text(json.dumps(report.to_json(), indent=1) + "\n")
        report.plot(folder / f"gemm-{name}.png")
        print(report, flush=True)


if __name__ == "__main__":
    main()
