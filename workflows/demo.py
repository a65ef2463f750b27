"""The whole pipeline on real input that every machine has: the source files of Python's own standard library.

Count pairs of letters in every module, store the counts as a documents × pairs matrix, multiply it by its own
transpose, verify the product. Its entries are the scalar products of every module with every other, so the
cosine of two modules, a measure of how alike they are, is an entry divided by the root of two on the
diagonal.

Pairs of letters, because they tell vocabularies apart: by single bytes any two modules are 99 % alike.
"""

from __future__ import annotations

import os
import sysconfig
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.kernels.histograms.tokens import LETTERS
from tilewright.pipeline.cluster.here.opening import open_executor
from tilewright.pipeline.cluster.profiles import Cluster
from tilewright.pipeline.errors import CorpusError, OutputExistsError, StoreError, TilewrightError
from tilewright.pipeline.events import Listener, log_notices
from tilewright.pipeline.product.execute import MatmulRun
from tilewright.pipeline.store.arrays import open_array
from tilewright.pipeline.store.region_read import read_region
from tilewright.pipeline.text.histogram import Histogram, bars
from tilewright.pipeline.text.saved_counts import store_counts
from tilewright.pipeline.text.sparse_counts import SparseCounts, added_up
from tilewright.pipeline.transfer.files import reason_with_remedy
from tilewright.workflows.histogram import histogram
from tilewright.workflows.matmul import matmul
from tilewright.workflows.plots import plot_histogram

PAIRS = LETTERS * LETTERS
LEAST_PAIRS = 3000
"""Modules with fewer pairs of letters are counted but not compared: too short to have a vocabulary."""
MOST_SIMILAR = 10
MADE_BY = {"made_by": "tilewright demo"}
"""An attribute of the demo's counts, which tells the next run that it may replace them."""
PASSED_OVER = ("test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__")
"""Folders that are not read: tests, tables of character sets (all alike), and what is not Python's own."""


@dataclass(frozen=True)
class SimilarPair:
    first: str
    second: str
    cosine: float


@dataclass(frozen=True)
class DemoRun:
    """What the demo found, and how long each stage of it took."""

    device: str
    modules: int
    compared: int
    """Modules that are long enough and not copies of another."""
    similar: tuple[SimilarPair, ...]
    """The most similar first."""
    letters: Histogram
    run: MatmulRun
    seconds: dict[str, float]
    """By stage, in the order in which they ran; of the plot what it took longer than the product."""
    files: dict[str, str]
    """What was written: ``counts``, ``product`` and ``plot``."""

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "modules": self.modules,
            "compared": self.compared,
            "similar": [asdict(pair) for pair in self.similar],
            "letters": np.asarray(self.letters.counts).tolist(),
            "run": self.run.to_json(),
            "seconds": self.seconds,
            "files": self.files,
        }

    def __str__(self) -> str:
        width = max((len(pair.first) for pair in self.similar), default=0)
        lines = [
            f"The letters of {self.modules} modules of the standard library:",
            *bars(self.letters),
            "",
            f"The most similar of {self.compared} modules by their pairs of letters",
            f"(left out: tests, character sets, modules of fewer than {LEAST_PAIRS} pairs, exact copies):",
            *(f"{pair.cosine:.4f}  {pair.first:<{width}}  {pair.second}" for pair in self.similar),
            "",
            *(f"{name:<18}{seconds:7.2f} s" for name, seconds in self.seconds.items()),
            f"{'together':<18}{sum(self.seconds.values()):7.2f} s  on {self.device}",
            "",
            f"The product of {self.run.plan.m} × {self.run.plan.k} counts by their transpose:",
            str(self.run.verification),
            *(f"{name:<8} {path}" for name, path in self.files.items()),
        ]
        return "\n".join(lines)


def demo(
    output: str | os.PathLike[str] = "demo-output",
    *,
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    device: str = "auto",
    listener: Listener = log_notices,
) -> DemoRun:
    """Run the demo and write its matrix, product and plot into the folder ``output``, replacing its earlier
    ones.

    The other parameters are ``histogram``'s and ``matmul``'s.

    Raises
    ------
    TilewrightError
        One of its subclasses: no source files beside this Python, a folder that cannot be written or that holds files
        of these names that no demo wrote, and whatever ``histogram`` and ``matmul`` raise.
    """
    if not os.fspath(output):
        raise StoreError("output: found an empty name; it must be the path of a folder")
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"output: cannot create the folder {folder}: {reason_with_remedy(error)}") from error
    counts_path, product_path, plot_path = (
        folder / "counts.zarr",
        folder / "product.zarr",
        folder / "letters.png",
    )
    _check_replaceable(counts_path, product_path, plot_path)
    seconds: dict[str, float] = {}
    root, modules = list_modules()
    with ExitStack() as stack:
        with _stage(seconds, "start"):
            client = stack.enter_context(open_executor(cluster, cluster_file, loops=device == "cpu"))
        work: dict[str, Any] = {"cluster": client, "device": device, "listener": listener}
        with _stage(seconds, "count letters"):
            letters = histogram(modules, by="letter", **work)
        # Drawn while the device works: matplotlib alone takes longer to import than the product does.
        drawing = stack.enter_context(ThreadPoolExecutor(1, "tilewright-plot")).submit(
            plot_histogram, letters, plot_path, bars="percent", overwrite=True
        )
        with _stage(seconds, "count pairs"):
            bigrams = histogram(modules, by="bigram", per_document=True, **work)
            assert isinstance(bigrams.counts, SparseCounts), "documents have few of so many bins"
            counts = letter_pairs(bigrams.counts)
        with _stage(seconds, "store"):
            store_counts(
                counts, counts_path, MADE_BY | {"documents": list(bigrams.documents)}, overwrite=True
            )
        with _stage(seconds, "multiply"):
            work |= {"transpose_b": True, "resume": False, "overwrite": True}
            run = matmul(counts_path, counts_path, product_path, **work)
        with _stage(seconds, "plot"):
            drawing.result()
    assert run.verification is not None
    seconds["multiply"] -= run.verification.seconds
    seconds["verify"] = run.verification.seconds
    with _stage(seconds, "compare"):
        stored = open_array(product_path, ndim=2, role="product")
        gram = read_region(stored, [slice(0, side) for side in stored.shape])
        chosen = comparable(counts)
        names = [str(Path(name).relative_to(root)) for name in bigrams.documents]
        similar = most_similar(gram, chosen, names)
    return DemoRun(
        device=letters.device,
        modules=len(modules),
        compared=len(chosen),
        similar=similar,
        letters=letters,
        run=run,
        seconds=seconds,
        files={"counts": str(counts_path), "product": str(product_path), "plot": str(plot_path)},
    )


def _check_replaceable(counts_path: Path, *others: Path) -> None:
    """Raise OutputExistsError where something that no demo has written stands at a path. The counts, which a demo
    stores first, tell for all three."""
    standing = [path for path in (counts_path, *others) if os.path.lexists(path)]
    if not standing:
        return
    try:
        attributes = open_array(counts_path, ndim=2, role="counts").attrs
        ours = MADE_BY.items() <= attributes.asdict().items()
    except TilewrightError:
        ours = False
    if not ours:
        raise OutputExistsError(
            f"output: {standing[0]} exists and is of no earlier demo; remove it, or choose another folder by --output"
        )


@contextmanager
def _stage(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


def list_modules() -> tuple[Path, list[Path]]:
    """The folder of the standard library, and its source files without those of ``PASSED_OVER``."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = [
        path
        for path in sorted(root.rglob("*.py"))
        if not set(PASSED_OVER) & set(path.relative_to(root).parts)
    ]
    if not modules:
        raise CorpusError(f"this Python has no source files in {root}; run the demo with one that has")
    return root, modules


def letter_pairs(bigrams: SparseCounts) -> np.ndarray:
    """Counts of pairs of letters, case folded, int64[(documents, 676)], from those of pairs of bytes."""
    letter = np.full(256, -1)
    for first in "Aa":
        letter[ord(first) : ord(first) + LETTERS] = np.arange(LETTERS)
    first, second = letter[bigrams.indices >> 8], letter[bigrams.indices & 255]
    chosen = (first >= 0) & (second >= 0)
    cells = bigrams.rows() * PAIRS + first * LETTERS + second
    counts = added_up(cells[chosen], bigrams.values[chosen], len(bigrams) * PAIRS)
    return counts.reshape(-1, PAIRS)


def comparable(counts: np.ndarray) -> np.ndarray:
    """Rows that are long enough, and of equal ones the first."""
    _, firsts = np.unique(counts, axis=0, return_index=True)
    chosen = np.sort(firsts)
    return chosen[counts[chosen].sum(axis=1) >= LEAST_PAIRS]


def most_similar(gram: np.ndarray, chosen: np.ndarray, names: Sequence[str]) -> tuple[SimilarPair, ...]:
    """The ``MOST_SIMILAR`` pairs of chosen rows with the largest cosine, from the products of all rows."""
    lengths = np.sqrt(np.diagonal(gram)[chosen].astype(np.float64))
    cosines = gram[np.ix_(chosen, chosen)] / np.outer(lengths, lengths)
    first, second = np.triu_indices(len(chosen), 1)
    order = np.argsort(-cosines[first, second], kind="stable")[:MOST_SIMILAR]
    return tuple(
        SimilarPair(names[chosen[i]], names[chosen[j]], float(cosines[i, j]))
        for i, j in zip(first[order], second[order], strict=True)
    )
