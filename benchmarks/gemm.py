"""The figures of the matrix product in docs/performance.md: every kernel beside the vendor's library.

    python benchmarks/gemm.py [FOLDER]      writes gemm-*.json and gemm-*.png there (by default here)

Squares as large as the peers are usually quoted at, sides that no tile divides, and skinny products. On a
machine without a GPU the sides are smaller, and the peer is NumPy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tilewright.kernels.launch import cuda_available
from tilewright.workflows.bench.gemm import DTYPES, run_gemm

SQUARES = (4096, 8192, 16384)
RAGGED = (4097, (4096, 4096, 4095))
SKINNY = ((64, 16384, 16384), (16384, 64, 16384), (64, 64, 1 << 20), (16384, 16384, 64))
CPU_SQUARES = (1024, 2560)

RUNS = {
    "squares": {"sizes": SQUARES, "dtypes": DTYPES},
    "ragged": {"sizes": RAGGED, "dtypes": DTYPES},
    "skinny": {"sizes": SKINNY, "dtypes": ("float32", "float64")},
    "reduced": {"sizes": SQUARES, "dtypes": ("float32",), "precisions": ("split", "tf32", "bf16", "fp16")},
    "narrow": {"sizes": SQUARES, "dtypes": ("float16", "int8->int32", "int8", "uint8", "int16")},
}
CPU_RUNS = {"cpu": {"sizes": CPU_SQUARES, "dtypes": ("float32", "float64", "int8", "int32", "int64")}}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, options in (RUNS if cuda_available() else CPU_RUNS).items():
        report = run_gemm(**options, small=True, progress=lambda case: print(case, file=sys.stderr))
        (folder / f"gemm-{name}.json").write_text(json.dumps(report.to_json(), indent=1) + "\n")
        report.plot(folder / f"gemm-{name}.png")
        print(report, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
