"""The figures of the whole job in docs/performance.md: Zarr in, Zarr out, on every number of GPUs there is.

    python benchmarks/e2e.py [--compressed] [--n N] [FOLDER [STORE]]

writes e2e.json, e2e.png and e2e-timeline.png to FOLDER. With --compressed chunks go through Zarr's default codec; --n
leaves out the cases of other sides. STORE takes the matrices, by default /dev/shm: on a GPU 64 GiB of them at most at a
time, and C, half as large. On a machine without a GPU the sides are smaller, and the peer runs on
NumPy. The files are written anew after each case.
"""

# Nothing of ours is imported up here: the workers' processes, whose memory is measured, import this script too.

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.pipeline.report.timeline import Timeline
    from tilewright.workflows.bench.common import Row
    from tilewright.workflows.bench.e2e import Case


def base_case() -> Case:
    from tilewright.workflows.bench.e2e import Case

    return Case(
        n=32768,
        dtype="float32",
        chunk=4096,
        workers=1,
        device_memory=None,
        values="small",
        repeats=2,
        peer_repeats=0,
    )


def gpu_cases(gpus: int) -> list[Case]:
    """The cases for so many GPUs, those of one size and dtype next to each other."""
    counts, ends = tuple(dict.fromkeys((1, min(2, gpus), gpus))), tuple(dict.fromkeys((1, gpus)))
    cases: list[Case] = []
    for n, repeats in ((32768, 2), (65536, 1)):
        for dtype in ("float32", "float64", "int64"):
            base = replace(base_case(), n=n, dtype=dtype, repeats=repeats)
            few = ends if n > 32768 and dtype != "float32" else counts
            cases += [replace(base, workers=workers) for workers in few]
            cases += [replace(base, workers=workers, device_memory="4GiB") for workers in ends]
            cases += [replace(base, workers=workers, gram=True) for workers in ends]
    first = replace(base_case(), workers=gpus)
    return [replace(case, peer_repeats=1) if case == first else case for case in cases]


def compressed_cases(workers: int, *, gpu: bool) -> list[Case]:
    """Encoded chunks of three sizes, on one worker and on all. The peer runs on all, on a GPU only with the largest
    chunks: with smaller ones its tasks take minutes there."""
    base = replace(base_case(), n=32768 if gpu else 8192, compressed=True)
    cases = [
        replace(base, chunk=chunk, workers=count, peer_repeats=int(count == workers and not gpu))
        for chunk in (4096, 2048, 1024)
        for count in dict.fromkeys((workers, 1))
    ]
    cases[0] = replace(cases[0], peer_repeats=1)
    return cases


def cpu_cases() -> list[Case]:
    base = replace(base_case(), workers=2)
    return [
        *(replace(base, n=8192, chunk=chunk, repeats=3, peer_repeats=2) for chunk in (1024, 2048, 4096)),
        replace(base, n=2560, chunk=512, dtype="int64", values="full"),
    ]


def main(folder: Path, store: Path, compressed: bool, side: int | None) -> None:
    from tilewright.kernels.gpu.device import devices
    from tilewright.workflows.bench.e2e import report_of, run_e2e
    from tilewright.workflows.bench.timeline import plot_timelines

    folder.mkdir(parents=True, exist_ok=True)
    gpus = len(devices())
    rows: list[Row] = []
    details: list[dict[str, Any]] = []
    timelines: list[tuple[str, Timeline]] = []
    if compressed:
        cases = compressed_cases(gpus or 2, gpu=bool(gpus))
    else:
        cases = gpu_cases(gpus) if gpus else cpu_cases()
    cases = [case for case in cases if side in (None, case.n)]
    if not cases:
        raise SystemExit(f"no case has sides of {side}")
    for found, detail, timeline in run_e2e(cases, store, gpu=bool(gpus)):
        rows += found
        details.append(detail)
        timelines.append((detail["case"], timeline))
        report = report_of(rows, gpu=bool(gpus))
        (folder / "e2e.json").write_text(json.dumps(report.to_json() | {"details": details}, indent=1) + "\n")
        print(
            detail["case"],
            *(f"{row.contestant} {row.seconds:.2f} s" for row in found),
            file=sys.stderr,
            flush=True,
        )
    report.plot(folder / "e2e.png")
    plot_timelines(timelines, folder / "e2e-timeline.png")
    print(report, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path())
    parser.add_argument(
        "store", nargs="?", type=Path, default="/dev/shm" if Path("/dev/shm").is_dir() else None
    )
    parser.add_argument("--compressed", action="store_true")
    parser.add_argument("--n", type=int, metavar="N", help="only cases with these sides")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.store) as matrices:
        main(options.folder, Path(matrices), options.compressed, options.n)
