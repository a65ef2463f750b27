"""Run as a script with failing_storage.c preloaded, a folder, and names of cases: products whose storage fails at a
call.

In each case a run meets the failure and ends; then the storage works again, and the same run is made once more. Prints
what came of each case, as a line of JSON.
"""

from __future__ import annotations

import ctypes
import errno
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr

import tilewright as tw
from tilewright.pipeline.cluster.cluster import open_cluster
from tilewright.pipeline.events import Event, UnitDone, WorkPlanned
from tilewright.pipeline.plan import tiling

WRITE, SYNC, READ, CREATE, RENAME, FOLDER, OPEN = (1 << bit for bit in range(7))

M, K, N = 32, 16, 32
MEMORY = 3000


class Case(NamedTuple):
    calls: int
    path: str
    """Text in the paths of the files that it befalls."""
    error: int
    spared: int = 0
    """Calls that go well before."""
    resumes: bool = False
    """Whether some tiles are stored before, by a run that was stopped."""


CASES = {
    "chunk: full": Case(WRITE, "tilewright-drafts", errno.ENOSPC, 5),
    "chunk: quota": Case(WRITE, "tilewright-drafts", errno.EDQUOT, 5),
    "chunk: too large": Case(WRITE, "tilewright-drafts", errno.EFBIG, 5),
    "chunk: bad disk": Case(WRITE, "tilewright-drafts", errno.EIO, 5),
    "chunk: no inodes": Case(CREATE, "tilewright-drafts", errno.ENOSPC, 5),
    "chunk: read-only": Case(CREATE, "tilewright-drafts", errno.EROFS, 5),
    "chunk: no name": Case(RENAME, "c.partial/c/", errno.ENOSPC, 5),
    "chunk: no folder": Case(FOLDER, "c.partial/c/", errno.ENOSPC, 2),
    "chunk: not forced to disk": Case(SYNC, "c.partial/c/", errno.EIO, 3),
    "chunk: not read by the check": Case(READ, "c.partial/c/", errno.EIO),
    "ledger: full": Case(WRITE, "tilewright-ledger.jsonl", errno.ENOSPC, 5),
    "ledger: not forced to disk": Case(SYNC, "tilewright-ledger.jsonl", errno.EIO, 1),
    "ledger: full at its begin": Case(WRITE, "tilewright-ledger.draft", errno.ENOSPC),
    "ledger: full at its begin, gone on with": Case(WRITE, "tilewright-ledger.draft", errno.ENOSPC, 0, True),
    "ledger: not read": Case(READ, "tilewright-ledger.jsonl", errno.EIO, 0, True),
    "ledger: not opened": Case(OPEN, "tilewright-ledger.jsonl", errno.EIO, 0, True),
    "metadata: full": Case(WRITE, "c.partial/zarr.", errno.ENOSPC),
    "metadata: no inodes": Case(CREATE, "c.partial/zarr.", errno.ENOSPC),
    "metadata: not read": Case(READ, "c.partial/zarr.json", errno.EIO, 0, True),
    "metadata: not forced to disk at its begin": Case(SYNC, "c.partial/zarr.json", errno.EIO),
    "metadata: not forced to disk": Case(SYNC, "c.partial/zarr.json", errno.EIO, 1),
    "mark: no inodes": Case(CREATE, "tilewright-output", errno.ENOSPC),
    "drafts: no inodes": Case(FOLDER, "tilewright-drafts", errno.ENOSPC),
    "drafts: no inodes, gone on with": Case(FOLDER, "tilewright-drafts", errno.ENOSPC, 0, True),
    "growing folder: no inodes": Case(FOLDER, "c.partial", errno.ENOSPC),
    "checksums: full": Case(WRITE, "tilewright-checksums", errno.ENOSPC),
    "checksums: not forced to disk": Case(SYNC, "tilewright-checksums", errno.EIO),
    "name of C: refused": Case(RENAME, "/c$", errno.EIO),
    "A: not read": Case(READ, "/a/c/", errno.EIO, 1),
    "A: not opened": Case(OPEN, "/a/c/", errno.EIO, 1),
    "B: not read": Case(READ, "/b/c/", errno.EIO),
    "A's metadata: not read": Case(READ, "/a/zarr.json", errno.EIO),
}


class Stopped(Exception):
    pass


def main(folder: Path, names: list[str]) -> None:
    shim = ctypes.CDLL(None)
    shim.fail_storage.argtypes = ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int
    tiling.LEAST_CHUNK_NBYTES = tiling.SMALL_CHUNK_NBYTES = 1  # type: ignore[misc]
    tiling.MOST_CHUNK_NBYTES = 256  # type: ignore[misc]
    rng = np.random.default_rng(20261125)
    factors = {"a": rng.integers(-9, 10, (M, K)), "b": rng.integers(-9, 10, (K, N))}
    with open_cluster("local") as client:
        for name in names:
            case = CASES[name]
            shutil.rmtree(folder)
            folder.mkdir()
            for role, numbers in factors.items():
                zarr.create_array(folder / role, data=numbers.astype("i4"), chunks=(8, 8), compressors=None)

            def run(stop: int | None = None) -> dict[str, Any]:
                done: list[int] = []
                kept: list[int] = []

                def listener(event: Event) -> None:
                    if isinstance(event, WorkPlanned) and event.name == "matmul":
                        kept.append(event.done)
                    if isinstance(event, UnitDone) and event.name == "matmul":
                        done.append(event.index)
                        if len(done) == stop:
                            raise Stopped

                start = time.perf_counter()
                error: BaseException | None = None
                try:
                    tw.matmul(
                        folder / "a",
                        folder / "b",
                        folder / "c",
                        cluster=client,
                        device="cpu",
                        device_memory=MEMORY,
                        listener=listener,
                    )
                except Exception as raised:
                    error = raised
                return {
                    "error": None if error is None else type(error).__name__,
                    "told": None if error is None else str(error),
                    "ours": isinstance(error, tw.TilewrightError),
                    "done": done,
                    "kept": kept[0] if kept else None,
                    "seconds": time.perf_counter() - start,
                }

            before = len(run(stop=2)["done"]) if case.resumes else 0
            shim.fail_storage(case.calls, case.path.encode(), case.error, case.spared)
            failed = run()
            times = shim.fail_storage(0, b"", 0, 0)
            again = run()
            right = (
                np.array_equal(zarr.open_array(folder / "c")[...], factors["a"] @ factors["b"])
                if (folder / "c").exists()
                else None
            )
            print(
                json.dumps(
                    {
                        "case": name,
                        "times": times,
                        "before": before,
                        "failed": failed,
                        "again": again,
                        "right": bool(right),
                        "left": sorted(path.name for path in folder.iterdir()),
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
