"""The figures of Gram matrices and EOFs in docs/performance.md: ours beside NumPy, dask.array, cubed, sgkit and xeofs,
on a CPU.

    python benchmarks/gram.py [--case grm|xtx|eofs|all] [--repeats N] [--scale S] [--python PEER=PATH ...] [FOLDER]

writes gram.json to FOLDER. Three cases:

    grm     VanRaden's relationship matrix of 30000 variants × 1500 samples, int8 dosages with 2 % missing, which count
            as the mean of their variant; the peer is sgkit, given the allele frequencies and means in their place.
            With skipna it leaves them out, in two products, and divides each element by another number.
    xtx     XᵀX of 200000 × 3000 float32; the peers are NumPy, of X in memory, dask.array and cubed.
    eofs    Ten EOFs of 100000 × 2000 float32, of 200 patterns whose variances fall as one over their number, and noise,
            with a tenth of X as device memory; the peer is xeofs, of X in memory, as it is by itself and with 16
            iterations, by which its EOFs are the true ones. Compared are EOFs times the roots of their variances.

Each contestant runs in a process of its own, one after the other in turns, so that a machine that slows down slows all.
What is measured begins behind the imports: seconds, and CPU seconds by resource usage, of the process and of all that
it started. Each computes twice: the first time also starts what is kept (of ours a cluster of one, and modules that
are imported as they are used), the second has it; ratios are of the second, and of the first as well. A peer that
needs other packages runs in another interpreter: --python sgkit=PATH, for one. Matrices are stored in Zarr format 2,
which all of them read. The load of the machine stands beside each figure.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CONTESTANTS = {
    "grm": ("tilewright", "product", "sgkit", "sgkit_skipna"),
    "xtx": ("tilewright", "numpy", "dask", "cubed"),
    "eofs": ("tilewright", "xeofs", "xeofs_iterated"),
}
"""``product`` is our plain product of the same side and depth, without anything that is made of numbers."""
SIDES = {"grm": (30000, 1500), "xtx": (200000, 3000), "eofs": (100000, 2000)}
CHUNKS = {"grm": (5000, 1500), "xtx": (10000, 1500), "eofs": (4000, 2000)}
EOFS, PATTERNS, ITERATIONS = 10, 200, 16
FIGURES = ("seconds", "cpu", "first_seconds", "first_cpu", "load")
TOLERANCE = {"grm": 1e-5, "xtx": 2e-5, "eofs": 1e-4}
"""The most that two results may differ by, beside the largest element."""


def cpu_seconds() -> float:
    """Of this process and all children that have ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in usage)


def make_data(case: str, folder: Path, scale: float) -> None:
    """Store the matrix of a case, and what contestants are told of it."""
    import zarr

    rng = np.random.default_rng(33)
    rows, columns = (max(8, int(side * scale)) for side in SIDES[case])
    chunks = tuple(min(chunk, side) for chunk, side in zip(CHUNKS[case], (rows, columns), strict=True))
    dtype = np.dtype("i1" if case == "grm" else "f4")
    x = zarr.create_array(
        folder / "x.zarr", shape=(rows, columns), chunks=chunks, dtype=dtype, zarr_format=2, compressors=None
    )
    frequency = np.zeros(rows)
    count = min(PATTERNS, columns)
    patterns = (
        np.linalg.qr(rng.standard_normal((columns, count)))[0].T
        / np.sqrt(np.arange(1, count + 1))[:, np.newaxis]
    )
    for begin in range(0, rows, chunks[0]):
        stop = min(rows, begin + chunks[0])
        if case == "eofs":
            block = rng.standard_normal((stop - begin, count), np.float32) @ patterns.astype("f4")
            x[begin:stop] = block + np.float32(0.01) * rng.standard_normal(block.shape, np.float32)
            continue
        if case == "xtx":
            x[begin:stop] = rng.standard_normal((stop - begin, columns), np.float32)
            continue
        block = rng.binomial(2, rng.uniform(0.05, 0.5, (stop - begin, 1)), (stop - begin, columns)).astype(
            dtype
        )
        block[rng.random(block.shape) < 0.02] = -1
        frequency[begin:stop] = np.where(block < 0, 0, block).sum(1) / (block >= 0).sum(1) / 2
        x[begin:stop] = block
    np.save(folder / "frequency.npy", frequency)


def tilewright(case: str, folder: Path) -> Callable[[], np.ndarray]:
    import zarr

    import tilewright as tw

    def run() -> np.ndarray:
        options: dict[str, Any] = {"device": "cpu", "overwrite": True, "listener": lambda event: None}
        if case == "eofs":
            x = zarr.open_array(folder / "x.zarr")
            tw.eofs(x, str(folder / "c.zarr"), EOFS, device_memory=x.nbytes // 10, **options)
            group = zarr.open_group(folder / "c.zarr", mode="r")
            return turned(np.asarray(group["components"][...]), np.asarray(group["explained_variance"][...]))
        if case == "grm":
            p = np.load(folder / "frequency.npy")
            options |= {"center": "rows", "missing": -1, "divide": float(2 * (p * (1 - p)).sum())}
        tw.gram(str(folder / "x.zarr"), str(folder / "c.zarr"), **options)
        return np.asarray(zarr.open_array(folder / "c.zarr")[...])

    return run


def product(case: str, folder: Path) -> Callable[[], np.ndarray]:
    import zarr

    import tilewright as tw

    def run() -> np.ndarray:
        x, out = str(folder / "x.zarr"), str(folder / "p.zarr")
        tw.gram(x, out, device="cpu", overwrite=True, listener=lambda event: None)
        return np.asarray(zarr.open_array(out)[...])

    return run


def numpy(case: str, folder: Path) -> Callable[[], np.ndarray]:
    import zarr

    x = np.asarray(zarr.open_array(folder / "x.zarr")[...])
    return lambda: x.T @ x


def dask(case: str, folder: Path) -> Callable[[], np.ndarray]:
    import dask.array

    def run() -> np.ndarray:
        x = dask.array.from_zarr(str(folder / "x.zarr"))
        return np.asarray((x.T @ x).compute())

    return run


def cubed(case: str, folder: Path) -> Callable[[], np.ndarray]:
    import cubed
    import cubed.array_api as xp

    def run() -> np.ndarray:
        spec = cubed.Spec(work_dir=str(folder / "cubed"), allowed_mem="4GB")
        x = cubed.from_zarr(str(folder / "x.zarr"), spec=spec)
        return np.asarray(xp.matmul(xp.permute_dims(x, (1, 0)), x).compute())

    return run


def sgkit_skipna(case: str, folder: Path) -> Callable[[], np.ndarray]:
    return sgkit(case, folder, skipna=True)


def sgkit(case: str, folder: Path, *, skipna: bool = False) -> Callable[[], np.ndarray]:
    import dask.array
    import sgkit
    import xarray

    def run() -> np.ndarray:
        p = np.load(folder / "frequency.npy")
        x = dask.array.from_zarr(str(folder / "x.zarr"))
        mean = dask.array.from_array(2 * p.astype("f4"), chunks=x.chunks[0][0])[:, np.newaxis]
        dosage = dask.array.where(x < 0, np.float32("nan") if skipna else mean, x.astype("f4"))
        data = xarray.Dataset(
            {"call_dosage": (("variants", "samples"), dosage), "frequency": ("variants", p.astype("f4"))}
        )
        found = sgkit.genomic_relationship(
            data, estimator="VanRaden", ancestral_frequency="frequency", ploidy=2, skipna=skipna, merge=False
        )
        return np.asarray(found["stat_genomic_relationship"].compute())

    return run


def turned(components: np.ndarray, variances: np.ndarray) -> np.ndarray:
    """EOFs times the roots of their variances, each so that its largest element is positive."""
    largest = np.take_along_axis(components, np.abs(components).argmax(1)[:, np.newaxis], 1)
    return np.asarray(components * np.sign(largest) * np.sqrt(variances)[:, np.newaxis])


def xeofs_iterated(case: str, folder: Path) -> Callable[[], np.ndarray]:
    return xeofs(case, folder, solver="randomized", solver_kwargs={"n_iter": ITERATIONS})


def xeofs(case: str, folder: Path, **options: Any) -> Callable[[], np.ndarray]:
    import xarray
    import xeofs
    import zarr

    x = np.asarray(zarr.open_array(folder / "x.zarr")[...])

    def run() -> np.ndarray:
        model = xeofs.single.EOF(n_modes=EOFS, **options)
        places = {dim: np.arange(side) for dim, side in zip(("time", "place"), x.shape, strict=True)}
        model.fit(xarray.DataArray(x, places), dim="time")
        components = model.components().transpose("mode", "place").values
        return turned(components, model.explained_variance().values)

    return run


def contest(case: str, name: str, folder: Path) -> None:
    """What a contestant's process does: prints its figures, and stores its result."""
    run = globals()[name](case, folder)
    figures = {}
    for when in ("first_", ""):
        cpu, start = cpu_seconds(), time.perf_counter()
        result = run()
        figures |= {f"{when}seconds": time.perf_counter() - start, f"{when}cpu": cpu_seconds() - cpu}
    np.save(folder / f"{name}.npy", result)
    print(json.dumps(figures))


def compare(case: str, names: list[str], folder: Path) -> dict[str, float]:
    """By how much each result differs from ours, beside the largest element."""
    ours = np.load(folder / "tilewright.npy").astype("f8")
    found = {}
    for name in names:
        if name not in ("tilewright", "product", "sgkit_skipna"):  # which answer another question
            theirs = np.load(folder / f"{name}.npy")
            found[name] = float(np.abs(ours - theirs).max() / np.abs(ours).max())
    return found


def run_case(case: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    interpreters = dict(given.split("=", 1) for given in options.python)
    make_data(case, folder, options.scale)
    figures: dict[str, list[dict[str, float]]] = {}
    missing: dict[str, str] = {}
    for _ in range(options.repeats):
        for name in CONTESTANTS[case]:
            if name in missing:
                continue
            command = [interpreters.get(name.split("_")[0], sys.executable), __file__, "--contestant", name]
            load = os.getloadavg()[0]
            done = subprocess.run(
                [*command, "--case", case, str(folder)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                missing[name] = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
                print(f"{case} {name}: {missing[name]}", file=sys.stderr, flush=True)
                continue
            figure = json.loads(done.stdout.splitlines()[-1]) | {"load": load}
            figures.setdefault(name, []).append(figure)
            told = (
                f"{figure['seconds']:.2f} s, {figure['cpu']:.2f} s of CPU (first {figure['first_cpu']:.2f})"
            )
            print(f"{case} {name}: {told}, load {load:.1f}", file=sys.stderr, flush=True)
    middle = {
        name: {key: statistics.median(one[key] for one in each) for key in FIGURES}
        for name, each in figures.items()
    }
    apart = compare(case, list(figures), folder) if "tilewright" in figures else {}
    return {
        "case": case,
        "sides": [max(8, int(side * options.scale)) for side in SIDES[case]],
        "figures": figures,
        "median": middle,
        "ratios": {
            name: {key: middle["tilewright"][key] / one[key] for key in FIGURES[:-1]}
            for name, one in middle.items()
            if name != "tilewright" and "tilewright" in middle
        },
        "differences": apart,
        # By itself xeofs iterates less than its EOFs take.
        "equal": all(one <= TOLERANCE[case] for name, one in apart.items() if name != "xeofs"),
        "missing": missing,
    }


def main(options: argparse.Namespace) -> int:
    options.folder.mkdir(parents=True, exist_ok=True)
    found = []
    for case in CONTESTANTS if options.case == "all" else [options.case]:
        with tempfile.TemporaryDirectory(dir=options.store) as matrices:
            found.append(run_case(case, Path(matrices), options))
    text = json.dumps({"cores": os.cpu_count(), "cases": found}, indent=1)
    (options.folder / "gram.json").write_text(text + "\n")
    for one in found:
        print(
            f"{one['case']} {one['sides'][0]} × {one['sides'][1]}, equal: {one['equal']} {one['differences']}"
        )
        for name, middle in one["median"].items():
            ratio = one["ratios"].get(name)
            beside = (
                f", ours {ratio['seconds']:.2f} of its time, {ratio['cpu']:.2f} of its CPU"
                f" (first {ratio['first_seconds']:.2f}, {ratio['first_cpu']:.2f})"
                if ratio
                else ""
            )
            print(
                f"  {name}: {middle['seconds']:.2f} s, {middle['cpu']:.2f} s of CPU (first"
                f" {middle['first_seconds']:.2f}, {middle['first_cpu']:.2f}){beside}"
            )
    return 0 if all(one["equal"] for one in found) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path())
    parser.add_argument("--case", choices=(*CONTESTANTS, "all"), default="all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of both sides")
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH")
    parser.add_argument("--store", type=Path, help="where matrices lie; by default a temporary folder")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contestant:
        contest(given.case, given.contestant, given.folder)
    else:
        sys.exit(main(given))
