"""Histograms on one device: every rung of the ladder beside CUB, CuPy, PyTorch and NumPy, and reading alone.

Four texts: noise, one letter, letters as frequent as in English but in random order, and Python's own
standard library. Every answer is checked against the CPU twin's before it is timed, and that against NumPy's
for bytes.
"""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from tilewright.kernels import DocumentOffsets, histogram
from tilewright.kernels.choices import DEVICES, DeviceName
from tilewright.kernels.errors import OptionError
from tilewright.kernels.gpu import launch
from tilewright.kernels.gpu.device_array import address
from tilewright.kernels.gpu.device_choice import (
    SIMULATOR,
    capability,
    current_device,
    resolve_device,
)
from tilewright.kernels.gpu.streams import DEFAULT_STREAM
from tilewright.kernels.histograms.host import count_host
from tilewright.kernels.histograms.tokens import KINDS, Kind, kind_named
from tilewright.workflows.bench.common import (
    SECONDS,
    BenchReport,
    Contestant,
    Picture,
    Row,
    Search,
    expect_pictures,
    library,
    machine,
    measure,
    publish,
    search,
    tell,
)
from tilewright.workflows.console import Size

TEXTS = ("uniform", "english", "one-letter", "real")
DEFAULT_NBYTES = 1 << 30
UNIT_NBYTES = 1 << 24
"""Texts repeat after this many bytes: more than any kernel could notice, little enough to make quickly."""
SLOW_NBYTES = 1 << 26
"""How much of the text slow contestants count, which would need seconds for all of it; rates are per byte."""
DOCUMENTS = 100_000
DOCUMENT_NBYTES = 4096
ENGLISH = {
    " ": 18.3, "e": 10.4, "t": 7.4, "a": 6.5, "o": 6.2, "n": 5.7, "i": 5.7, "s": 5.3, "r": 5.0, "h": 5.0,
    "l": 3.3, "d": 3.3, "u": 2.3, "c": 2.2, "m": 2.0, "f": 2.0, "w": 1.7, "g": 1.6, "p": 1.5, "y": 1.4,
    "b": 1.3, "v": 0.8, "k": 0.6, "x": 0.1, "j": 0.1, "q": 0.1, "z": 0.1,
}  # fmt: skip
"""Per cent of each character in English prose, blanks counted."""


def make_text(name: str, nbytes: int) -> np.ndarray:
    """A text of ``TEXTS`` by name, uint8[nbytes]."""
    rng = np.random.default_rng(20261121)
    if name == "uniform":
        unit = rng.integers(0, 256, UNIT_NBYTES, np.uint8)
    elif name == "english":
        weights = np.array(list(ENGLISH.values()))
        letters = np.frombuffer("".join(ENGLISH).encode(), np.uint8)
        unit = letters[rng.choice(len(letters), UNIT_NBYTES, p=weights / weights.sum())]
    elif name == "one-letter":
        unit = np.full(UNIT_NBYTES, ord("e"), np.uint8)
    elif name == "real":
        unit = _standard_library()
    else:
        raise OptionError(f"text {name!r} is unknown; it may be {', '.join(map(repr, TEXTS))}")
    return np.resize(unit, nbytes)


@functools.cache
def _standard_library() -> np.ndarray:
    """The source files of Python's standard library, as many as fill a unit."""
    parts, total = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if total >= UNIT_NBYTES:
            break
        if "site-packages" not in path.parts:
            parts.append(path.read_bytes())
            total += len(parts[-1])
    return np.frombuffer(b"".join(parts), np.uint8)


def run_histogram(
    texts: Sequence[str] = TEXTS,
    kinds: Sequence[str] = tuple(KINDS),
    *,
    nbytes: int = DEFAULT_NBYTES,
    documents: bool = True,
    device: DeviceName = "auto",
    rounds: int = 15,
    seconds: float = 1.0,
    progress: Callable[[str], None] = lambda text: None,
) -> BenchReport:
    """Measure histograms of texts that lie on the device, and return what each contestant reached.

    texts, kinds: of `TEXTS` and `KINDS`. documents: also one launch over many small documents. rounds,
    seconds: at most so many samples a contestant, and about so long. Raises WrongAnswer where a contestant
    miscounts.
    """
    if SIMULATOR:
        raise OptionError("the CUDA simulator proves nothing about speed; unset NUMBA_ENABLE_CUDASIM")
    on_gpu = resolve_device(device) == "cuda"
    rows: list[Row] = []
    searches: list[Search] = []
    timing: dict[str, Any] = {"on_gpu": on_gpu, "rounds": rounds, "seconds": seconds}
    for name in texts:
        data = make_text(name, nbytes)
        held = _to_device(data) if on_gpu else data
        for by in kinds:
            kind = kind_named(by)
            progress(f"{by} of {name}")
            case = Case(data, held, kind)
            contestants = _gpu(case) if on_gpu else _cpu(case)
            if on_gpu and by == "byte":
                kept, searched = search(f"{by}, {name}", float(nbytes), _peers(case), on_gpu=True)
                contestants = kept + contestants
                searches.append(searched)
            rows += measure(f"{by}, {name}", float(nbytes), contestants, **timing)
    if documents:
        progress("documents")
        rows += _documents(on_gpu, timing)
    return BenchReport("histogram", "GB/s", 1e9, machine(on_gpu), tuple(rows), tuple(searches))


@dataclass(frozen=True)
class Case:
    """A text on the host and where it is counted."""

    data: np.ndarray
    held: Any
    kind: Kind
    known: dict[int, np.ndarray] = field(default_factory=dict)
    """Counts by length: taking them on the CPU takes longer than most contestants do."""

    def expected(self, length: int) -> np.ndarray:
        """Counts of the first ``length`` bytes as one document."""
        if length not in self.known:
            counts = count_host(self.data, self.kind, np.array([0, length]), 0, length)[0]
            self.known[length] = np.asarray(counts)
        return self.known[length]

    def check(self, counts: Callable[[], Any], length: int) -> str | None:
        found, wanted = np.asarray(counts()), self.expected(length)
        if np.array_equal(found, wanted):
            return None
        bin_ = int(np.flatnonzero(found != wanted)[0])
        return f"bin {bin_} holds {found[bin_]}, not {wanted[bin_]}"

    def contestant(
        self,
        name: str,
        count: Callable[[Any], Any],
        *,
        slow: bool = False,
        peer: bool = False,
        caller: str = "",
    ) -> Contestant:
        """``count(data)`` returns counts that ``numpy.asarray`` takes, or a device array."""
        length = min(SLOW_NBYTES, len(self.data)) if slow else len(self.data)
        part = self.held[:length]
        return Contestant(
            name,
            functools.partial(count, part),
            functools.partial(self.check, lambda: _to_host(count(part)), length),
            peer=peer,
            work=float(length),
            caller=caller,
        )


def _to_device(data: np.ndarray) -> Any:
    from numba import cuda

    return cuda.to_device(data)


def _to_host(counts: Any) -> Any:
    for name in ("copy_to_host", "get", "cpu"):  # Numba, CuPy, PyTorch
        if hasattr(counts, name):
            return getattr(counts, name)()
    return counts


def _cpu(case: Case) -> list[Contestant]:
    found = []
    if case.kind.name == "byte":
        found.append(
            case.contestant(
                "numpy.bincount", lambda data: np.bincount(data, minlength=256), slow=True, peer=True
            )
        )
    ours = functools.partial(histogram, by=case.kind.name, device="cpu")
    return [*found, case.contestant("tilewright (CPU)", ours)]


def _gpu(case: Case) -> list[Contestant]:
    ours = functools.partial(histogram, by=case.kind.name)
    found = [case.contestant("tilewright", ours)]
    if case.kind.name == "byte":
        found += [case.contestant(name, rung, slow=True) for name, rung in _rungs(case.kind).items()]
        found.append(reading(case.held))
    return found


def _rungs(kind: Kind) -> dict[str, Callable[[Any], Any]]:
    """The lower rungs of the ladder as functions of a device array."""
    from tilewright.kernels.histograms.portable import KERNELS, launch_portable
    from tilewright.kernels.histograms.select import zeros

    def count(name: str, data: Any) -> Any:
        counts = zeros((1, kind.bins), DEFAULT_STREAM)
        offsets = _to_device(np.array([0, data.size]))
        launch_portable(name, data, offsets, 0, data.size, kind, counts, DEFAULT_STREAM)
        return counts.reshape(kind.bins)

    return {name: functools.partial(count, name) for name in KERNELS}


def reading(held: Any) -> Contestant:
    """Reading every byte once and doing nothing with it: the floor of every kernel here."""
    from tilewright.kernels.passes.reading import read

    return Contestant("reading alone", functools.partial(read, held), lambda: None)


def _peers(case: Case) -> list[Contestant]:
    """The settings to search: CUB's, where nvcc is installed, and what CuPy and PyTorch offer."""
    from tilewright.workflows.bench import cub

    found = []
    current = capability(current_device())
    for name, (call, counts) in (cub.byte_histograms(case.held, current) if current else {}).items():

        def count_cub(_: Any, call: Callable[[], None] = call, counts: Any = counts) -> Any:
            call()
            return counts

        found.append(case.contestant(name, count_cub, peer=True, caller="CUB"))
    cupy, torch = library("cupy"), library("torch")
    if cupy is not None:
        edges = cupy.arange(257)
        offers = {
            "cupy.bincount": lambda data: cupy.bincount(cupy.asarray(data), minlength=256),
            "cupy.histogram": lambda data: cupy.histogram(cupy.asarray(data), bins=edges)[0],
        }
        found += [
            case.contestant(name, count, slow=True, peer=True, caller="CuPy")
            for name, count in offers.items()
        ]
    if torch is not None:
        found.append(
            case.contestant(
                "torch.bincount",
                lambda data: torch.bincount(torch.as_tensor(data, device="cuda"), minlength=256),
                slow=True,
                peer=True,
                caller="PyTorch",
            )
        )
    return found


def _documents(on_gpu: bool, timing: dict[str, Any]) -> list[Row]:
    """One buffer as one document, and as `DOCUMENTS` of `DOCUMENT_NBYTES`: the price of a row for each."""
    count = DOCUMENTS if on_gpu else DOCUMENTS // 10
    nbytes = count * DOCUMENT_NBYTES
    data = make_text("english", nbytes)
    offsets = np.arange(0, nbytes + 1, DOCUMENT_NBYTES)
    expected = count_host(data, KINDS["byte"], offsets, 0, nbytes)
    held = _to_device(data) if on_gpu else data
    device: DeviceName = "cuda" if on_gpu else "cpu"

    def check(run: Callable[[], Any], wanted: np.ndarray) -> str | None:
        found = _to_host(run())
        return None if np.array_equal(found, wanted) else "counts differ"

    def contestant(name: str, run: Callable[[], Any], wanted: np.ndarray, peer: bool = False) -> Contestant:
        return Contestant(name, run, functools.partial(check, run, wanted), peer)

    whole = functools.partial(histogram, held, device=device)
    parts = functools.partial(histogram, held, offsets=offsets, device=device)
    found = [
        contestant("one document", whole, expected.sum(axis=0), peer=True),
        contestant(f"{count} documents", parts, expected),
    ]
    if on_gpu:
        kept, out = DocumentOffsets(offsets), _prepared_counts(count)
        again = functools.partial(histogram, held, offsets=kept, out=out)
        found.append(contestant("offsets and counts kept", again, expected))
        found.append(contestant("the launch alone", _prepared(held, offsets), expected))
    return measure(f"{count} × {DOCUMENT_NBYTES} bytes", float(nbytes), found, **timing)


def _prepared_counts(documents: int) -> Any:
    from numba import cuda

    return cuda.device_array((documents, KINDS["byte"].bins), np.int64)


def _prepared(held: Any, offsets: np.ndarray) -> Callable[[], Any]:
    """The documents' launch with offsets and counts already on the device."""
    from tilewright.kernels.histograms.documents import launch_slices

    kind = KINDS["byte"]
    counts = _prepared_counts(len(offsets) - 1)
    places = _to_device(offsets)
    total = int(offsets[-1] - offsets[0])

    def run() -> Any:
        launch_slices(held, places, total, kind, counts, DEFAULT_STREAM)
        return counts

    return run


def run_sweep(nbytes: int = DEFAULT_NBYTES) -> Any:
    """Time the byte kernel over numbers of blocks and of threads, on English-like text; a `Sweep`."""
    from numba import cuda

    from tilewright.kernels.gpu.compiled import multiprocessors
    from tilewright.kernels.gpu.sweep import sweep
    from tilewright.kernels.histograms import bytes as histogram_bytes

    if resolve_device("cuda") != "cuda":
        raise OptionError("a sweep needs a GPU")
    held = _to_device(make_text("english", nbytes))
    counts = cuda.to_device(np.zeros(256, np.int64))
    units = multiprocessors(current_device())

    def run(blocks: int, threads: int) -> None:
        kernel = histogram_bytes.kernel(threads, histogram_bytes.UNROLL)
        launch.enqueue(kernel, blocks, threads, 0, 0, address(held), 0, nbytes, 0, counts)

    title = f"byte histogram of {nbytes} bytes"
    return sweep(run, [units * each for each in (1, 2, 3, 4, 6)], [256, 512, 1024], title=title)


@click.command("histogram")
@click.option(
    "--text", "texts", multiple=True, default=TEXTS, type=click.Choice(TEXTS), help="May be repeated; all."
)
@click.option(
    "--by",
    "kinds",
    multiple=True,
    default=tuple(KINDS),
    type=click.Choice(tuple(KINDS)),
    help="May be repeated.",
)
@click.option("--nbytes", type=Size(), default=DEFAULT_NBYTES, show_default=True, help="Bytes of each text.")
@click.option("--device", type=click.Choice(DEVICES), default="auto", show_default=True)
@click.option("--seconds", type=SECONDS, default=1.0, show_default=True, help="Time for each contestant.")
@click.option("--sweep", is_flag=True, help="Time the byte kernel over launch shapes instead.")
@click.option("--plot", type=Picture(), help="Write a plot to this PNG file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(sweep: bool, plot: Path | None, as_json: bool, nbytes: int, **options: Any) -> None:
    """Measure histograms beside other libraries', after checking every answer."""
    expect_pictures(plot)
    report = run_sweep(nbytes) if sweep else run_histogram(**options, nbytes=nbytes, progress=tell)
    publish(report, (plot, report.plot), as_json=as_json)
