"""Small runs of every kernel under CUDA's compute-sanitizer: accesses out of bounds, and races in shared memory.

    python -m tests.kernels.gemm.sanitized [--seconds S] [--jobs N] [--logs FOLDER] [TARGET ...]

``make sanitize`` runs all of them. A target is ``histogram``, ``documents``, ``dot``, ``mutex`` or ``matmul``, or one
part of it such as ``dot:int8`` or ``matmul:skinny``; or one of `TESTED`, whose cases are tests. Each part runs in a
process of its own under each tool, as many at once as there are cores and as the GPU has memory for, and prints one
line: tool, part, exit code, seconds, and how many cases it ran. With ``--logs`` each also writes what it says to a file
there as it goes, so that a run that is cut short shows how far it came. The exit code is the highest of all. It needs a
GPU and ``compute-sanitizer``, from the CUDA toolkit or ``pip install 'cuda-toolkit[sanitizer]'``.

Most of the time goes into compiling: a variant takes the compiler seconds, and the tool as long again. So cases come
in the order of what they add, and `--seconds` cuts them off: first one ragged product of every dtype, then the other
shapes, then other layouts.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kernels import naive
from tilewright.kernels.gpu.streams import DEFAULT_STREAM
from tilewright.kernels.histograms.tokens import KINDS

TOOLS = ("memcheck", "racecheck")
DOT_DTYPES = ("float32", "float64", "complex64", "complex128", "float16", "int8", "int32", "int64")
LENGTHS = (0, 1, 15, 17, 1000, 40_001)
SHIFTS = (0, 1, 13)
PRODUCTS = (
    (213, 270, 602),
    (212, 268, 644),
    (300, 1, 2100),
    (7, 260, 240),
    (256, 5, 300),
    (1, 300, 700),
    (130, 132, 3),
    (65, 67, 1),
)
"""Sides m, n, k of products: ragged in odd and in aligned rows, vectors, flat, upright, and with k far below what any
kernel copies at a time. The first two are larger than any kernel's tile, and k deeper than the stages under way: a
tool slows kernels tens of times, so none is much larger."""
LARGE_PRODUCT = (330, 410, 2010)
"""For kernels that refuse small products."""
LIES = (
    ("rows", "rows"),
    ("columns", "columns"),
    ("padded rows", "padded columns"),
    ("strided", "offset"),
)
TESTED = {
    "decoding": ("tests/kernels/decoding/test_placing.py", "tests/pipeline/decoding/test_gpu_decoding.py"),
    "neighbours": ("tests/kernels/neighbours/test_device.py",),
    "passes": ("tests/kernels/passes",),
    "records": ("tests/kernels/records/test_device_json.py",),
    "signatures": ("tests/kernels/duplicates",),
    "tokens": ("tests/kernels/histograms/test_device_tokens.py",),
}
"""Targets whose cases are tests, and where these are."""
EXIT = 9
"""What the sanitizer exits with where it found something; a target that fails by itself exits with 1."""
OPTIONS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ()}
"""Of each tool. Calls of the driver that fail are left to those that make them: NVIDIA's bindings, when they are
imported, ask it for every function they know, of which an older driver lacks some thirty."""
PART_NBYTES = 16 * 2**30
"""Of the GPU's memory, that a part may take with its tool."""


def parts(target: str) -> list[str]:
    """The parts of a target that run apart, in one process each."""
    name, _, part = target.partition(":")
    if part:
        return [target]
    if name == "histogram":
        return [f"{name}:{kind}" for kind in KINDS]
    if name == "dot":
        return [f"{name}:{dtype}" for dtype in DOT_DTYPES]
    if name == "matmul":
        from tilewright.kernels.gemm.select import ladder

        # The lower rungs, which compile in a second, before those that take minutes.
        return [f"{name}:{kernel.name}" for kernel in reversed(ladder())]
    return [target]


def histogram_cases(by: str) -> Iterator[str]:
    """Every length and alignment through the public function, pieces, and the portable kernels."""
    from numba import cuda

    from tilewright.kernels.histograms.api import histogram, piece_counts
    from tilewright.kernels.histograms.host import count_host
    from tilewright.kernels.histograms.portable import KERNELS, launch_portable

    kind = KINDS[by]
    rng = np.random.default_rng(1)
    data = rng.choice(np.frombuffer("Aa zZ\x00[é天😀".encode() + b"\xff\x80", np.uint8), 40_100)
    held = cuda.to_device(data)
    for length, shift in itertools.product(LENGTHS, SHIFTS):
        found = histogram(held[shift : shift + length], by=by).copy_to_host()
        part = data[shift : shift + length]
        np.testing.assert_array_equal(found, count_host(part, kind, np.array([0, length]), 0, length)[0])
        yield f"{length} bytes, {shift} from the beginning"
    piece_counts(held, by=by, start=5, stop=30_001).copy_to_host()
    yield "a piece"
    for name in KERNELS if kind.bins <= 256 else ["global-atomic"]:
        counts = cuda.to_device(np.zeros((1, kind.bins), np.int64))
        offsets = cuda.to_device(np.array([0, 5003]))
        launch_portable(name, held[:5003], offsets, 0, 5003, kind, counts, 0)
        cuda.synchronize()
        yield name


def documents_cases() -> Iterator[str]:
    """Empty, tiny, unaligned and large documents together, with and without kept offsets."""
    from numba import cuda

    from tilewright.kernels import DocumentOffsets, histogram
    from tilewright.kernels.histograms.documents import LARGE
    from tilewright.kernels.histograms.host import count_host

    rng = np.random.default_rng(1)
    lengths = [0, 1, 15, 16, 17, 4096, 4096, 4095, 6144, LARGE, LARGE + 1, 0, 3 * LARGE, *[37] * 300, 0]
    offsets = np.cumsum([5, *lengths])
    data = rng.integers(0, 256, int(offsets[-1]) + 3, np.uint8)
    held, kept = cuda.to_device(data), DocumentOffsets(offsets)
    for by in ("byte", "ascii", "letter", "bigram"):
        want = count_host(data, KINDS[by], offsets, int(offsets[0]), int(offsets[-1]))
        np.testing.assert_array_equal(histogram(held, by=by, offsets=offsets).copy_to_host(), want)
        yield by
        out = cuda.device_array(want.shape, np.int64)
        histogram(held, by=by, offsets=kept, out=out, stream=cuda.stream())
        cuda.synchronize()
        np.testing.assert_array_equal(out.copy_to_host(), want)
        yield f"{by}, offsets and counts kept"


def dot_cases(name: str) -> Iterator[str]:
    """Vectors of every length by the second pass; one of them by the other ways; strided; from the host."""
    from numba import cuda

    from tilewright.kernels import dot
    from tilewright.kernels.dots.device import FINISHES, on_device

    dtype = np.dtype(name)
    rng = np.random.default_rng(1)
    x, y = (naive.numbers(rng, (1, 70_001), dtype)[0] for _ in range(2))
    left, right = cuda.to_device(x), cuda.to_device(y)

    def check(found: Any, x: np.ndarray, y: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            want = dot(x, y, device="cpu")
        if dtype.kind in "iu":
            assert found == want
        else:
            assert abs(complex(found) - complex(want)) <= 1e-2 * (1 + len(x)) ** 0.5, (len(x), found, want)

    for length in (0, 1, 17, 1000, 70_001):
        check(dot(left[:length], right[:length]).copy_to_host(), x[:length], y[:length])
        yield f"{length} elements"
    check(dot(left[1::2], right[:-1:2]).copy_to_host(), x[1::2], y[:-1:2])
    yield "every second element"
    check(dot(x, y, device="cuda"), x, y)
    yield "from the host"
    for finish in FINISHES[1:]:
        found = np.asarray(on_device(left, right, dtype, True, DEFAULT_STREAM, finish).copy_to_host())
        check(found[()], x, y)
        yield finish


def mutex_cases() -> Iterator[str]:
    from numba import cuda

    from tests.kernels.test_mutex import deposit

    for accounts, blocks in ((1, 50), (7, 300)):
        mutexes = cuda.to_device(np.zeros(accounts, np.int32))
        sums = cuda.to_device(np.zeros((accounts, 2), np.int64))
        deposit[blocks, 32](mutexes, sums, 3)
        assert sums.copy_to_host()[:, 0].sum() == 3 * blocks
        assert not mutexes.copy_to_host().any()
        yield f"{accounts} accounts, {blocks} blocks"


def matmul_cases(name: str) -> Iterator[str]:
    """A kernel of the ladder, also where another is preferred, on all that it accepts of `PRODUCTS`."""
    from numba import cuda

    from tilewright.kernels.choices import PRECISIONS
    from tilewright.kernels.gemm.product import describe
    from tilewright.kernels.gemm.select import ladder

    (kernel,) = (kernel for kernel in ladder() if kernel.name == name)
    rng = np.random.default_rng(1)
    ran = 0

    def launched(sides: tuple[int, int, int], dtype: str, lies: tuple[str, str], accumulate: bool) -> bool:
        m, n, k = sides
        a, b, c = (naive.numbers(rng, shape, dtype) for shape in ((m, k), (k, n), (m, n)))
        placed = (naive.LAYOUTS[lies[0]](a), naive.LAYOUTS[lies[1]](b), naive.LAYOUTS["rows"](c))
        on_a, on_b, on_c = (naive.device_twin(array)[0] for array in placed)
        for precision in PRECISIONS:  # a kernel does the same whatever else is allowed
            if kernel.supports(describe(on_a, on_b, on_c, accumulate=accumulate, precision=precision)):
                kernel.launch(on_a, on_b, on_c, accumulate, 0)
                cuda.synchronize()
                return True
        return False

    for lies, accumulate in itertools.product(LIES, (False, True)):
        taken = set()
        for sides, dtype in itertools.product(PRODUCTS, naive.DTYPES):  # each dtype before any comes again
            if launched(sides, dtype, lies, accumulate):
                taken.add(dtype)
                yield f"{dtype} {sides}, {' by '.join(lies)}{', added' if accumulate else ''}"
        for dtype in naive.DTYPES:
            if dtype not in taken and launched(LARGE_PRODUCT, dtype, lies, accumulate):
                taken.add(dtype)
                yield f"{dtype} {LARGE_PRODUCT}, {' by '.join(lies)}{', added' if accumulate else ''}"
        ran += len(taken)
    assert ran, f"{name} accepted nothing that is tried here"


CASES: dict[str, Callable[..., Iterator[str]]] = {
    "histogram": histogram_cases,
    "documents": documents_cases,
    "dot": dot_cases,
    "mutex": mutex_cases,
    "matmul": matmul_cases,
}


class Until:
    """A plugin of pytest's that says which tests have passed, and begins none once the time is up."""

    def __init__(self, session_seconds: float) -> None:
        self._began, self._seconds = time.monotonic(), session_seconds
        self.ran = 0
        self.is_up = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.ran += 1
            print(f"{time.monotonic() - self._began:5.1f} s: {report.nodeid}", flush=True)

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if time.monotonic() - self._began > self._seconds:
            self.is_up = True
            item.session.shouldstop = "the time is up"


def run_tests(paths: Sequence[str], seconds: float) -> None:
    """Run the tests of one GPU in files until they are through or the time is up; the first that fails is the last."""
    until = Until(seconds)
    options = ["-x", "-m", "gpu and not multigpu", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins are imported by now
    code = pytest.main([*options, *paths], plugins=[until])
    if code != pytest.ExitCode.OK and not (until.is_up and code == pytest.ExitCode.INTERRUPTED):
        raise SystemExit(1)
    assert until.ran, f"no test of {', '.join(paths)} ran"
    print(f"ran {until.ran} cases{', and no more for want of time' if until.is_up else ''}", flush=True)


def run_inside(target: str, seconds: float) -> None:
    """Run a part's cases until they are through or the time is up; say each one's name, and how many there were."""
    name, _, part = target.partition(":")
    if name in TESTED:
        run_tests(TESTED[name], seconds)
        return
    began = time.monotonic()
    ran, all_of_them = 0, True
    for case in CASES[name](*([part] if part else [])):
        ran += 1
        print(f"{time.monotonic() - began:5.1f} s: {case}", flush=True)
        if time.monotonic() - began > seconds:
            all_of_them = False
            break
    print(f"ran {ran} cases{'' if all_of_them else ', and no more for want of time'}", flush=True)


def sanitizer() -> str:
    from cuda import pathfinder

    find = getattr(pathfinder, "find_nvidia_binary_utility", None)
    found = (find("compute-sanitizer") if find is not None else None) or shutil.which("compute-sanitizer")
    if found is None:
        raise SystemExit(
            "compute-sanitizer is not on PATH; install the CUDA toolkit, or pip install 'cuda-toolkit[sanitizer]'"
        )
    return str(found)


def at_once() -> int:
    """How many parts may run at once on this machine."""
    from numba import cuda

    room = cuda.current_context().get_memory_info().free // PART_NBYTES
    return max(1, min(len(os.sched_getaffinity(0)), room))


def run_under(tool: str, target: str, seconds: float, logs: Path | None) -> int:
    """Run a part under a tool, and print one line about it, and what the tool said where it found something.

    What both say goes to a file TOOL-PART.log in ``logs`` as it comes. Returns the exit code, for a process ended by a
    signal as a shell gives it.
    """
    command = [sanitizer(), "--tool", tool, *OPTIONS[tool], "--error-exitcode", str(EXIT)]
    command += [
        "--target-processes",
        "all",
        "--print-limit",
        "20",
        sys.executable,
        "-m",
        "tests.kernels.gemm.sanitized",
    ]
    command += ["--inside", target, "--seconds", str(seconds)]
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        if logs is None:
            said = stack.enter_context(tempfile.TemporaryFile("w+"))
        else:
            said = stack.enter_context((logs / f"{tool}-{target.replace(':', '-')}.log").open("w+"))
        code = subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, check=False).returncode
        said.seek(0)
        text = said.read()
    ran = re.findall(r"^ran .*$", text, re.MULTILINE)
    code = 128 - code if code < 0 else code or (0 if ran else 1)
    took = time.monotonic() - began
    print(
        f"{tool} {target}: exit code {code}, {took:.0f} s, {ran[-1] if ran else 'did not finish'}", flush=True
    )
    if code:
        print("\n".join(text.splitlines()[-60:]), flush=True)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="*", default=[*CASES, *TESTED], metavar="TARGET")
    parser.add_argument("--seconds", type=float, default=600.0, help="for the cases of one part; 600")
    parser.add_argument(
        "--jobs", type=int, help="at once; as many as there are cores, and as the GPU has memory for"
    )
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="for a file of each part's output")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="may be repeated; both")
    parser.add_argument("--inside", action="store_true", help="run the cases themselves, under no tool")
    options = parser.parse_args()
    wanted = [part for target in options.targets for part in parts(target)]
    unknown = [part for part in wanted if part.partition(":")[0] not in CASES and part not in TESTED]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join([*CASES, *TESTED])}")
    if options.inside:
        for part in wanted:
            run_inside(part, options.seconds)
        return 0
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
    jobs = [(tool, part, options.seconds, options.logs) for part in wanted for tool in options.tool or TOOLS]
    with ThreadPoolExecutor(options.jobs or at_once()) as pool:
        codes = list(pool.map(run_under, *zip(*jobs, strict=True)))
    print(f"{len(codes) - sum(map(bool, codes))} of {len(codes)} found nothing", flush=True)
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
