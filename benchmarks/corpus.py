"""The figures of counting a corpus in docs/performance.md: files to counts on a cluster, the peer, and the floors.

    python benchmarks/corpus.py [FOLDER [TEXT_FOLDER]] [--workers N] [--storage S] [--kind K ...] [--repeats R]

Writes corpus.json and a plot of each storage to FOLDER. On the GPUs of this machine, or on so many of them, 16 GiB of
plain text by every kind, and 8 GiB compressed by Zstandard by byte; on a CPU 1 GiB and 256 MiB. The text stands in
TEXT_FOLDER meanwhile, /dev/shm unless it is given: what is measured is the way from the page cache to the counts.

On a large GPU about 90 s for plain text, of which each kind takes some ten to compile in every worker and in the peer,
and 20 s for compressed text.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tilewright.kernels.cpu.loops import usable_cores
from tilewright.kernels.gpu.device import devices
from tilewright.kernels.histograms.tokens import KINDS
from tilewright.workflows.bench.corpus import STORAGES, describe_floors, run_corpus
from tilewright.workflows.bench.e2e import cluster_of

GPU_NBYTES = {"plain": 16 << 30, "zstd": 8 << 30}
CPU_NBYTES = {"plain": 1 << 30, "zstd": 256 << 20}
GPU_PEER_NBYTES = {"plain": 2 << 30, "zstd": 512 << 20}
CPU_PEER_NBYTES = {"plain": 256 << 20, "zstd": 64 << 20}
KINDS_OF = {"plain": tuple(KINDS), "zstd": ("byte",)}
"""The kind makes no difference where decompression takes the time."""
REPEATS = 3


def main() -> None:
    gpus = len(devices())
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("."))
    parser.add_argument("texts", nargs="?", type=Path, default=Path("/dev/shm"), metavar="text_folder")
    parser.add_argument(
        "--workers", type=int, default=gpus or usable_cores(), help="GPUs, or CPU processes; all"
    )
    parser.add_argument("--storage", action="append", choices=STORAGES, help="may be repeated; both")
    parser.add_argument(
        "--kind", action="append", choices=tuple(KINDS), help="may be repeated; plain: all, zstd: byte"
    )
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"timed runs of ours; {REPEATS}")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    found: dict[str, dict[str, Any]] = {}
    with cluster_of(options.workers, bool(gpus)) as client:
        for storage in options.storage or STORAGES:
            with tempfile.TemporaryDirectory(dir=options.texts) as place:
                report, details = run_corpus(
                    Path(place),
                    nbytes=(GPU_NBYTES if gpus else CPU_NBYTES)[storage],
                    kinds=options.kind or KINDS_OF[storage],
                    storages=(storage,),
                    cluster=client,
                    device="cuda" if gpus else "cpu",
                    repeats=options.repeats,
                    peer_repeats=1,
                    peer_nbytes=(GPU_PEER_NBYTES if gpus else CPU_PEER_NBYTES)[storage],
                    progress=lambda case: print(
                        f"{time.perf_counter() - began:5.1f} s: {case}", file=sys.stderr, flush=True
                    ),
                )
            found[storage] = report.to_json() | {"details": details}
            (options.folder / "corpus.json").write_text(json.dumps(found, indent=1) + "\n")
            report.plot(options.folder / f"corpus-{storage}.png")
            print(report)
            print(describe_floors(details), flush=True)
    print(f"{time.perf_counter() - began:5.1f} s in all", file=sys.stderr)


if __name__ == "__main__":
    main()
