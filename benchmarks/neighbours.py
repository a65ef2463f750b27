"""The figures of the whole job of nearest neighbours: Zarr in, Zarr out, on one GPU, on two and on all there are.

    python benchmarks/neighbours.py [-n ROWS] [--width ELEMENTS] [-k K ...] [FOLDER [STORE]]

writes neighbours.json to FOLDER. float16 rows, normally distributed, are compared with each other by their dot product.
STORE takes them, by default /dev/shm. The cluster is up. Of each case one verified job, as `tilewright topk` does it by
itself, makes the kernels warm; then verified ones and others take turns. All answers are compared, those of other
counts of GPUs too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import zarr

REPEATS = 3


def write_rows(path: Path, rows: int, width: int) -> None:
    stored = zarr.create_array(
        path, shape=(rows, width), chunks=(min(rows, 65536), width), dtype="float16", compressors=None
    )
    generator = np.random.default_rng(39)
    for start in range(0, rows, 65536):
        count = min(65536, rows - start)
        stored[start : start + count] = generator.standard_normal((count, width), np.float32)


def main(options: argparse.Namespace, place: Path) -> None:
    from tilewright import topk
    from tilewright.kernels.gpu.device import devices
    from tilewright.workflows.bench.e2e import cluster_of

    gpus = len(devices())
    x, out = place / "x.zarr", place / "near.zarr"
    write_rows(x, options.rows, options.width)
    found: list[dict[str, Any]] = []
    answers: dict[int, np.ndarray] = {}
    for workers in dict.fromkeys((1, min(2, gpus), gpus) if gpus else (1, 2)):
        with cluster_of(workers, bool(gpus)) as client:
            for k in options.k:
                seconds: dict[bool, list[float]] = {True: [], False: []}
                for verify in (True, *(True, False) * REPEATS):
                    start = time.perf_counter()
                    run = topk(x, out=out, k=k, cluster=client, verify=verify, listener=lambda event: None)
                    seconds[verify].append(time.perf_counter() - start)
                    assert (run.verification is not None) == verify
                    indices = np.asarray(zarr.open_array(out / "indices", mode="r")[:])
                    nbytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
                    shutil.rmtree(out)
                    if not np.array_equal(indices, answers.setdefault(k, indices)):
                        raise SystemExit(f"{workers} workers give other neighbours than fewer do, k = {k}")
                first, *verified = seconds[True]
                row = {
                    "workers": workers,
                    "k": k,
                    "first_verified": first,
                    "verified": verified,
                    "verified_median": statistics.median(verified),
                    "seconds": seconds[False],
                    "median": statistics.median(seconds[False]),
                    "output_nbytes": nbytes,
                }
                found.append(row)
                print(row, file=sys.stderr, flush=True)
                (options.folder / "neighbours.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path())
    parser.add_argument(
        "store", nargs="?", type=Path, default="/dev/shm" if Path("/dev/shm").is_dir() else None
    )
    parser.add_argument("-n", "--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("-k", type=int, nargs="+", default=[10, 100])
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=chosen.store) as place:
        main(chosen, Path(place))
