"""The figures of counting a corpus in docs/performance.md: files to counts on a cluster, the peer, and the floors.

    python benchmarks/corpus.py [FOLDER] [TEXT_FOLDER]      writes corpus.json and a plot of each storage to
    FOLDER

On the GPUs of this machine 16 GiB of plain text by every kind, and 4 GiB compressed by Zstandard by byte; on a CPU
1 GiB and 512 MiB. The text stands in TEXT_FOLDER meanwhile, /dev/shm unless it is given: what is measured is the way
from the page cache to the counts.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tilewright.kernels.histogram_tokens import KINDS
from tilewright.kernels.launch import cuda_available
from tilewright.workflows.bench.corpus import describe_floors, run_corpus

GPU_NBYTES = {"plain": 16 << 30, "zstd": 4 << 30}
CPU_NBYTES = {"plain": 1 << 30, "zstd": 512 << 20}
GPU_PEER_NBYTES = 2 << 30
CPU_PEER_NBYTES = 256 << 20
KINDS_OF = {"plain": tuple(KINDS), "zstd": ("byte",)}
"""The kind makes no difference where decompression takes the time."""


def main(folder: Path, texts: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    on_gpu = cuda_available()
    found: dict[str, dict[str, Any]] = {}
    for storage, nbytes in (GPU_NBYTES if on_gpu else CPU_NBYTES).items():
        with tempfile.TemporaryDirectory(dir=texts) as place:
            report, details = run_corpus(
                Path(place),
                nbytes=nbytes,
                kinds=KINDS_OF[storage],
                storages=(storage,),
                cluster="cuda" if on_gpu else "cpu",
                peer_repeats=1,
                peer_nbytes=GPU_PEER_NBYTES if on_gpu else CPU_PEER_NBYTES,
                progress=lambda case: print(case, file=sys.stderr, flush=True),
            )
        found[storage] = report.to_json() | {"details": details}
        (folder / "corpus.json").write_text(json.dumps(found, indent=1) + "\n")
        report.plot(folder / f"corpus-{storage}.png")
        print(report)
        print(describe_floors(details), flush=True)


if __name__ == "__main__":
    main(
        Path(sys.argv[1] if len(sys.argv) > 1 else "."),
        Path(sys.argv[2] if len(sys.argv) > 2 else "/dev/shm"),
    )
