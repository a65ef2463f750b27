"""The figures of the dot product in docs/performance.md: every dtype, the ways to finish, and the peers.

    python benchmarks/dot.py [FOLDER] [--seconds S] [--rounds N]      writes dot.json and dot.png there

Two vectors of two gigabytes on a GPU, of 64 MiB on a CPU. On a large GPU each dtype compiles for a second or two, and,
where nvcc is installed, CUB's peer of it for ten more; each contestant is timed in nine samples of at least 20 ms.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tilewright.kernels.gpu.device_choice import cuda_available
from tilewright.workflows.bench.dot import run_dot

GPU_NBYTES = 2 << 30
CPU_NBYTES = 64 << 20
ROUNDS = 9
SECONDS = 0.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("."))
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"for each contestant, about; {SECONDS}"
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"samples of each contestant at most; {ROUNDS}"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    report = run_dot(
        nbytes=GPU_NBYTES if cuda_available() else CPU_NBYTES,
        rounds=options.rounds,
        seconds=options.seconds,
        progress=lambda case: print(case, file=sys.stderr, flush=True),
    )
    (options.folder / "dot.json").write_text(json.dumps(report.to_json(), indent=1) + "\n")
    report.plot(options.folder / "dot.png")
    print(report, flush=True)


if __name__ == "__main__":
    main()
