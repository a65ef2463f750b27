"""The figures of counting a corpus in docs/performance.md: files to counts on a cluster, the peer, and the floors.

    python benchmarks/corpus.py [FOLDER] [TEXT_FOLDER]      writes corpus.json and corpus.png to FOLDER

16 GiB of text on the GPUs of this machine, 1 GiB on a CPU, plain and compressed by Zstandard. The text stands in
TEXT_FOLDER meanwhile, /dev/shm unless it is given: what is measured is the way from the page cache to the counts.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tilewright.kernels.histogram_tokens import KINDS
from tilewright.kernels.launch import cuda_available
from tilewright.workflows.bench.corpus import describe_floors, run_corpus

GPU_NBYTES = 16 << 30
GPU_PEER_NBYTES = 2 << 30
CPU_NBYTES = 1 << 30
CPU_PEER_NBYTES = 256 << 20


def main(folder: Path, texts: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    on_gpu = cuda_available()
    with tempfile.TemporaryDirectory(dir=texts) as place:
        report, details = run_corpus(
            Path(place),
            nbytes=GPU_NBYTES if on_gpu else CPU_NBYTES,
            kinds=tuple(KINDS),
            cluster="cuda" if on_gpu else "cpu",
            repeats=3,
            peer_repeats=1,
            peer_nbytes=GPU_PEER_NBYTES if on_gpu else CPU_PEER_NBYTES,
            progress=lambda case: print(case, file=sys.stderr, flush=True),
        )
    (folder / "corpus.json").write_text(json.dumps(report.to_json() | {"details": details}, indent=1) + "\n")
    report.plot(folder / "corpus.png")
    print(report)
    print(describe_floors(details), flush=True)


if __name__ == "__main__":
    main(
        Path(sys.argv[1] if len(sys.argv) > 1 else "."),
        Path(sys.argv[2] if len(sys.argv) > 2 else "/dev/shm"),
    )
