"""The figures of histograms in docs/performance.md: every kind and text, the ladder, and the peers.

    python benchmarks/histogram.py [FOLDER]      writes histogram.json, histogram.png and histogram-sweep.png
    there

Two gigabytes of each text on a GPU, 64 MiB on a CPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tilewright.kernels.launch import cuda_available
from tilewright.workflows.bench.histogram import run_histogram, run_sweep

GPU_NBYTES = 2 << 30
CPU_NBYTES = 64 << 20


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    on_gpu = cuda_available()
    report = run_histogram(
        nbytes=GPU_NBYTES if on_gpu else CPU_NBYTES, progress=lambda case: print(case, file=sys.stderr)
    )
    (folder / "histogram.json").write_text(json.dumps(report.to_json(), indent=1) + "\n")
    report.plot(folder / "histogram.png")
    print(report, flush=True)
    if on_gpu:
        sweep = run_sweep(GPU_NBYTES)
        sweep.plot(folder / "histogram-sweep.png")
        print(sweep)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
