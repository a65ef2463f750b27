"""The figures of the dot product in docs/performance.md: every dtype, every way to finish, and the peers.

    python benchmarks/dot.py [FOLDER]      writes dot.json and dot.png there

Two vectors of two gigabytes on a GPU, of 64 MiB on a CPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tilewright.kernels.launch import cuda_available
from tilewright.workflows.bench.dot import run_dot

GPU_NBYTES = 2 << 30
CPU_NBYTES = 64 << 20


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    report = run_dot(
        nbytes=GPU_NBYTES if cuda_available() else CPU_NBYTES,
        progress=lambda case: print(case, file=sys.stderr),
    )
    (folder / "dot.json").write_text(json.dumps(report.to_json(), indent=1) + "\n")
    report.plot(folder / "dot.png")
    print(report, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
