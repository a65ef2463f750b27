"""The figures of reading and writing Zarr matrices in docs/performance.md: ours beside the libraries installed.

    python benchmarks/io.py [FOLDER [read] [write] [decode] [device]]      writes io.json and io.png there

A matrix of two gigabytes, in chunks of 64 MiB and their shards, under FOLDER: what is measured is its file system
and the page cache. All directions, or those that are named; ``device``, from files to a GPU, where there is one.
zarrs, tensorstore and KvikIO are compared with where they are installed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tilewright.workflows.bench.io import run_io

NBYTES = 2 << 30
CHUNK = 4096
SECONDS = 3.0
"""Time for each contestant, about."""


def main(folder: Path, directions: tuple[str, ...] = ()) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        report = run_io(
            NBYTES,
            Path(place),
            chunk=CHUNK,
            directions=directions,
            seconds=SECONDS,
            progress=lambda case: print(case, file=sys.stderr),
        )
    (folder / "io.json").write_text(json.dumps(report.to_json(), indent=1) + "\n")
    report.plot(folder / "io.png")
    print(report, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."), tuple(sys.argv[2:]))
