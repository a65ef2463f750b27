"""The figures of histograms in docs/performance.md: every kind and text, the ladder, and the peers.

    python benchmarks/histogram.py [FOLDER] [--seconds S] [--text T ...] [--by KIND ...] [--no-documents] [--no-sweep]

Writes histogram.json, histogram.png and histogram-sweep.png to FOLDER. Two gigabytes of each text on a GPU, 64 MiB on
a CPU. On a large GPU with 16 cores all of it takes about a minute and a half: each text some 4 s to make, each kind of
it 1 s to count on the CPU and 1 s to time, each contestant of bytes half a second more; the documents 10 s, the sweep
15 s.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tilewright.kernels.gpu.device_choice import cuda_available
from tilewright.kernels.histograms.tokens import KINDS
from tilewright.workflows.bench.histogram import TEXTS, run_histogram, run_sweep

GPU_NBYTES = 2 << 30
CPU_NBYTES = 64 << 20
SECONDS = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("."))
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"for each contestant, about; {SECONDS}"
    )
    parser.add_argument("--text", action="append", choices=TEXTS, help="may be repeated; all")
    parser.add_argument("--by", action="append", choices=tuple(KINDS), help="may be repeated; all")
    parser.add_argument("--no-documents", action="store_true", help="leave many small documents out")
    parser.add_argument("--no-sweep", action="store_true", help="leave the byte kernel's launch shapes out")
    options = parser.parse_args()
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    on_gpu = cuda_available()
    began = time.perf_counter()
    report = run_histogram(
        options.text or TEXTS,
        options.by or tuple(KINDS),
        nbytes=GPU_NBYTES if on_gpu else CPU_NBYTES,
        documents=not options.no_documents,
        seconds=options.seconds,
        progress=lambda case: print(
            f"{time.perf_counter() - began:5.1f} s: {case}", file=sys.stderr, flush=True
        ),
    )
    (folder / "histogram.json").write_text(json.dumps(report.to_json(), indent=1) + "\n")
    report.plot(folder / "histogram.png")
    print(report, flush=True)
    if on_gpu and not options.no_sweep:
        sweep = run_sweep(GPU_NBYTES)
        sweep.plot(folder / "histogram-sweep.png")
        print(sweep)


if __name__ == "__main__":
    main()
