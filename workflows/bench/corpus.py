"""A corpus on a cluster: files to counts, ours beside dask.delayed with NumPy's, or on a GPU CuPy's, bincount; there
KvikIO reads the files of a second peer, where it is installed.

The same files, the same cluster, in turns. The floors stand beside the total: the time that the bytes need from the
file system into pinned memory, over the bus, and in the kernel; or that decompressing needs on the cores. Each is
measured in the same run, by the workers with as many threads as they use, or by a process for each core. Counts are
compared with those of one file, taken on the CPU, before anything is timed.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np
import zstandard
from distributed import Client

from tilewright.kernels.choices import DeviceName, KindName
from tilewright.kernels.cpu.loops import usable_cores
from tilewright.kernels.histograms.host import count_host
from tilewright.kernels.histograms.tokens import BIGRAM, KINDS, Kind, folded_bin, kind_named
from tilewright.kernels.numbers import ceil_div, counted, format_nbytes
from tilewright.pipeline import config
from tilewright.pipeline.cluster.cluster import Cluster, open_cluster
from tilewright.pipeline.cluster.watch import workers_held
from tilewright.pipeline.events import Event, UnitDone
from tilewright.pipeline.text.corpus import Document, list_corpus, read_range, reader
from tilewright.pipeline.threads import run_all
from tilewright.pipeline.transfer.lane_blocks import LANE_NBYTES
from tilewright.pipeline.worker.survey import survey
from tilewright.workflows.bench.common import (
    COUNT,
    BenchReport,
    DetailedReport,
    Picture,
    Row,
    WrongAnswer,
    expect_pictures,
    machine,
    publish,
)
from tilewright.workflows.bench.e2e import bus_rate
from tilewright.workflows.console import Size
from tilewright.workflows.histogram import histogram

STORAGES = ("plain", "zstd")
KVIKIO = " + KvikIO"
FILE_NBYTES = 64 << 20
UNIT_NBYTES = 16 << 20
"""Text repeats after this many bytes: further back than Zstandard looks at its usual level."""
WORDS = 20_000
WORD_LENGTHS = (3.0, 1.6)
"""Shape and scale of a word's length, a gamma distribution: five letters on average."""
FLOOR_NBYTES = 2 << 30
"""What a floor is measured on, at most."""
KERNEL_NBYTES = 4 * LANE_NBYTES
"""What the kernel's rate is measured on: more than one block of a lane, so that its launch hardly shows."""
READING_NBYTES = LANE_NBYTES // 2
"""What a thread reads at a time for the floor of reading: larger blocks leave the cache and are slower."""
FLOOR_TURNS = 3
STARTING_SECONDS = 120
"""What processes that measure a floor may take to start, all together."""
BLOCK_TURNS = 20
"""Launches of the kernel that are timed together."""


def make_text(nbytes: int) -> bytes:
    """English-like text: words of common letters, frequent as in prose (Zipf), with blanks and lines."""
    from tilewright.workflows.bench.histogram import ENGLISH

    rng = np.random.default_rng(20261121)
    letters = "".join(ENGLISH).replace(" ", "")
    shares = np.array([ENGLISH[letter] for letter in letters])
    lengths = np.clip(rng.gamma(*WORD_LENGTHS, WORDS).round().astype(int), 1, 16)
    drawn = rng.choice(list(letters), int(lengths.sum()), p=shares / shares.sum())
    cuts = np.cumsum(lengths)[:-1]
    words = ["".join(word) for word in np.split(drawn, cuts)]
    words = [word.capitalize() if i % 9 == 0 else word for i, word in enumerate(words)]
    words = [word + ("\n" if i % 13 == 0 else " ") for i, word in enumerate(words)]
    frequency = 1 / np.arange(1, WORDS + 1)
    unit_nbytes = min(nbytes, UNIT_NBYTES)
    needed = ceil_div(unit_nbytes, 2)  # a word and a blank are two bytes at least
    picked = rng.choice(WORDS, needed, p=frequency / frequency.sum()).tolist()
    unit = "".join([words[i] for i in picked[: ceil_div(needed, 2)]]).encode()
    unit = (unit * ceil_div(unit_nbytes, len(unit)))[:unit_nbytes]
    return (unit * ceil_div(nbytes, len(unit)))[:nbytes]


def write_corpus(folder: Path, text: bytes, files: int, storage: str) -> None:
    """``files`` files of the same text, written by many threads, so that each has pages of its own."""
    stored = zstandard.compress(text) if storage == "zstd" else text
    suffix = ".txt.zst" if storage == "zstd" else ".txt"
    folder.mkdir()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda i: (folder / f"{i:05}{suffix}").write_bytes(stored), range(files)):
            pass


def run_corpus(
    folder: Path,
    *,
    nbytes: int,
    kinds: Sequence[KindName] = ("byte",),
    storages: Sequence[str] = STORAGES,
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    device: DeviceName = "auto",
    file_nbytes: int = FILE_NBYTES,
    repeats: int = 3,
    peer: bool = True,
    peer_repeats: int = 2,
    peer_nbytes: int | None = None,
    progress: Callable[[str], None] = lambda case: None,
) -> tuple[BenchReport, list[dict[str, Any]]]:
    """Time every kind on every storage; returns the report, and for each case the stages and floors in seconds.

    folder: takes the text (a file system in memory shows the pipeline, a disk the disk) and is left empty.
    nbytes: of text, in files of ``file_nbytes`` before they are compressed; the peer counts ``peer_nbytes`` of it at
    most, and all rates are of text.

    Raises
    ------
    WrongAnswer
        A contestant's counts differ from the CPU's: its time would mean nothing.
    """
    text = make_text(min(nbytes, file_nbytes))
    files = ceil_div(nbytes, len(text))
    peer_files = min(files, ceil_div(peer_nbytes, len(text))) if peer_nbytes else files
    data = np.frombuffer(text, np.uint8)
    rows: list[Row] = []
    details: list[dict[str, Any]] = []
    with (
        open_cluster(cluster, cluster_file) as client,
        workers_held(client, waiting=progress),
    ):
        facts = survey(client, device)
        gpu = facts[0].device == "cuda"
        for storage in storages:
            place = folder / storage
            write_corpus(place, text, files, storage)
            documents = list_corpus([place]).documents
            rates = floor_rates(client, documents, storage, gpu=gpu)
            for by in kinds:
                kind = kind_named(by)
                case = f"{by}, {storage}, {counted(len(facts), 'worker')}"
                progress(case)
                one = count_host(data, kind, np.array([0, len(data)]), 0, len(data))[0]
                ours: list[float] = []
                names = peer_names(storage, by, gpu=gpu) if peer else []
                theirs: dict[str, list[float]] = {name: [] for name in names}
                stages: dict[str, float] = {}
                paths = sorted(map(str, place.iterdir()))
                turns = 1 + max(repeats, peer_repeats if peer else 0)  # the first warms and is checked
                for turn in range(turns):
                    if turn <= repeats:
                        start = time.perf_counter()
                        counts, stages = _ours(client, place, by, facts[0].device)
                        took = time.perf_counter() - start
                        _take(ours, turn, took, counts, one * files, f"{case}, tilewright")
                    for name, seconds in theirs.items() if turn <= peer_repeats else ():
                        start = time.perf_counter()
                        counts = _peer(paths[:peer_files], kind, gpu=gpu, direct=name.endswith(KVIKIO))
                        took = time.perf_counter() - start
                        _take(seconds, turn, took, counts, one * peer_files, f"{case}, {name}")
                total = files * len(text)
                rows.append(_row(case, "tilewright", False, total, ours))
                rows += [
                    _row(case, name, True, peer_files * len(text), seconds)
                    for name, seconds in theirs.items()
                ]
                found = {"count": _rate(client, partial(counting_rate, documents[0], by, gpu))}
                floors = {name: total / rate for name, rate in (rates | found).items()}
                details.append(
                    {
                        "case": case,
                        "nbytes": total,
                        "stored_nbytes": sum(path.stat().st_size for path in place.iterdir()),
                        "seconds": ours,
                        "stages_per_worker": {stage: busy / len(facts) for stage, busy in stages.items()},
                        "floors": floors,
                        "floor_rates": {name: rate / 1e9 for name, rate in (rates | found).items()},
                        "over_largest_floor": statistics.median(ours) / max(floors.values()),
                    }
                )
            shutil.rmtree(place)
    title = f"{format_nbytes(files * len(text))} of text in {counted(files, 'file')}, whole job"
    return BenchReport(title, "GB/s", 1e9, machine(gpu), tuple(rows)), details


def _take(
    seconds: list[float], turn: int, took: float, counts: np.ndarray, expected: np.ndarray, who: str
) -> None:
    """Keep what a turn took; of the first, which only warms up, check the counts. Raises WrongAnswer."""
    if turn:
        seconds.append(took)
    elif not np.array_equal(counts, expected):
        at = int(np.argmax(counts != expected))
        raise WrongAnswer(f"{who} is wrong: bin {at} is {counts[at]}, not {expected[at]}")


def _ours(
    client: Client, place: Path, by: KindName, device: DeviceName
) -> tuple[np.ndarray, dict[str, float]]:
    stages: dict[str, float] = {}

    def listener(event: Event) -> None:
        if isinstance(event, UnitDone):
            for stage, seconds in event.stages.items():
                stages[stage] = stages.get(stage, 0.0) + seconds

    found = histogram(place, by=by, cluster=client, device=device, listener=listener)
    return np.asarray(found.counts), stages


def peer_names(storage: str, by: str, *, gpu: bool) -> list[str]:
    """The peers of a case: dask.delayed with the library that counts, and on a GPU, for what need not be decompressed
    or decoded first, with KvikIO to read it there too."""
    name = "dask.delayed + " + ("CuPy" if gpu else "NumPy")
    direct = gpu and storage == "plain" and by != "codepoint" and find_spec("kvikio") is not None
    return [name, name + KVIKIO] if direct else [name]


def _peer(paths: Sequence[str], kind: Kind, *, gpu: bool, direct: bool = False) -> np.ndarray:
    """Every file a task: read whole, decompressed whole, counted by bincount; the counts are added here."""
    import dask

    tasks = [dask.delayed(peer_counts, pure=False)(path, kind.name, gpu, direct) for path in paths]
    counts: np.ndarray = np.sum(dask.compute(*tasks), axis=0)
    return counts


def peer_counts(path: str, by: str, gpu: bool, direct: bool = False) -> np.ndarray:
    """Counts of one file, int64[bins], as a user of NumPy or CuPy would take them; ``direct``: read to the GPU by
    KvikIO."""
    kind = kind_named(by)
    data: Any
    if direct:
        kvikio = importlib.import_module("kvikio")
        data = importlib.import_module("cupy").empty(os.path.getsize(path), np.uint8)
        with kvikio.CuFile(path, "r") as file:
            file.read(data)
    elif path.endswith(".zst"):
        data = np.frombuffer(zstandard.decompress(Path(path).read_bytes()), np.uint8)
    else:
        data = np.fromfile(path, np.uint8)
    if by == "codepoint":
        text = data.tobytes().decode("utf-8", errors="replace")
        data = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)
    library: Any = np
    if gpu:
        import cupy

        library = cupy
        data = cupy.asarray(data)
    if by == "bigram":
        found = library.bincount(data[:-1].astype(np.uint16) << 8 | data[1:], minlength=kind.bins)
    else:
        found = library.bincount(data, minlength=kind.bins)
    counts = found.get() if gpu else found
    if kind.code >= BIGRAM:
        return np.asarray(counts, np.int64)
    folded = np.zeros(kind.bins, np.int64)
    for value, times in enumerate(counts.tolist()):
        if (place := folded_bin(value, kind.code)) >= 0:
            folded[place] += times
    return folded


def floor_rates(
    client: Client, documents: Sequence[Document], storage: str, *, gpu: bool
) -> dict[str, float]:
    """Bytes of text a second that all workers together read and copy to their GPUs, or this host's cores
    decompress."""
    if storage == "zstd":
        return {"decompress": decompressing_rate(documents, usable_cores())}
    rates = {"read": _rate(client, partial(reading_rate, documents, config.threads("read-threads"), gpu))}
    if gpu:
        rates["bus"] = _rate(client, bus_rate)
    return rates


def _rate(client: Client, measure: Callable[[], float]) -> float:
    """The sum of what all workers reach at the same time."""
    futures = [client.submit(measure, workers=[worker], pure=False) for worker in client.nthreads()]
    return sum(client.gather(futures))


def reading_rate(documents: Sequence[Document], threads: int, pinned: bool) -> float:
    """Bytes a second that so many threads read from files, each into a block of its own; best of some turns."""
    from tilewright.kernels.gpu.transfer import pinned_bytes

    documents = _some(documents, threads)
    blocks = [
        pinned_bytes(READING_NBYTES) if pinned else np.ones(READING_NBYTES, np.uint8) for _ in range(threads)
    ]

    def read(place: int) -> int:
        done = 0
        for document in documents[place::threads]:
            for start in range(0, document.nbytes, READING_NBYTES):
                stop = min(start + READING_NBYTES, document.nbytes)
                read_range(document, start, stop, blocks[place][: stop - start])
                done += stop - start
        return done

    return _best(read, threads)


def decompressing_rate(documents: Sequence[Document], processes: int) -> float:
    """Bytes of text a second that so many processes decompress and throw away; best of some turns.

    Processes, not threads: they share no interpreter, so this is what the cores can do.
    """
    documents = _some(documents, processes)
    shares = [documents[place::processes] for place in range(processes)]
    with started_processes(processes) as pool:
        list(pool.map(decompressed_nbytes, shares))
        best = 0.0
        for _ in range(FLOOR_TURNS):
            start = time.perf_counter()
            done = sum(pool.map(decompressed_nbytes, shares))
            best = max(best, done / (time.perf_counter() - start))
    return best


@contextmanager
def started_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """So many processes that have all finished their imports: else the first would do the work of the others, beside
    their imports."""
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(count)
    with ProcessPoolExecutor(count, context, initializer=_meet, initargs=(together,)) as pool:
        list(pool.map(_nothing, range(count)))
        yield pool


def _meet(together: Any) -> None:
    """Wait for the other processes; this module is imported by now."""
    together.wait(STARTING_SECONDS)


def _nothing(_: int) -> None:
    """No work: done as soon as there is a process for it."""


def decompressed_nbytes(documents: Sequence[Document]) -> int:
    """How long the documents are."""
    block = np.empty(LANE_NBYTES, np.uint8)
    return sum(step for document in documents for step in iter(partial(reader(document), block), 0))


def _some(documents: Sequence[Document], threads: int) -> Sequence[Document]:
    """Documents of about `FLOOR_NBYTES`, the same number for each thread."""
    most = max(1, FLOOR_NBYTES // max(1, documents[0].nbytes) // threads) * threads
    return documents[: min(most, max(1, len(documents) // threads) * threads)]


def _best(work: Callable[[int], int], threads: int) -> float:
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(FLOOR_TURNS):
            start = time.perf_counter()
            done = run_all(pool, [partial(work, place) for place in range(threads)])
            best = max(best, sum(done) / (time.perf_counter() - start))
    return best


def counting_rate(document: Document, by: str, gpu: bool) -> float:
    """Bytes a second that this process counts where they lie: on its GPU by the kernel, else on its cores."""
    data, kind = _beginning(document, KERNEL_NBYTES), kind_named(by)
    if not gpu:

        def count(_: int) -> int:
            count_host(data, kind, [0, len(data)], 0, len(data))
            return len(data)

        return _best(count, 1)
    from numba import cuda

    from tilewright.kernels.gpu.launch import CUDATimer
    from tilewright.kernels.histograms.select import add_counts

    held, counts = cuda.to_device(data), cuda.to_device(np.zeros(kind.bins, np.int64))
    best = 0.0
    for _ in range(FLOOR_TURNS):
        with CUDATimer() as timer:
            for _ in range(BLOCK_TURNS):
                add_counts(held, 0, len(data), 0, len(data), kind, counts, 0)
        best = max(best, BLOCK_TURNS * len(data) / timer.seconds)
    return best


def _beginning(document: Document, nbytes: int) -> np.ndarray:
    """So many bytes of a document, or all where it has fewer."""
    if document.codec is None:
        data = np.empty(min(nbytes, document.nbytes), np.uint8)
        read_range(document, 0, len(data), data)
        return data
    data, filled, fill = np.empty(nbytes, np.uint8), 0, reader(document)
    while filled < nbytes and (step := fill(data[filled:])):
        filled += step
    return data[:filled]


def _row(case: str, name: str, peer: bool, work: float, seconds: list[float]) -> Row:
    ordered = sorted(seconds)
    return Row(case, name, peer, work, statistics.median(ordered), ordered[0], ordered[-1], len(ordered))


def describe_floors(details: Sequence[dict[str, Any]]) -> str:
    """A line for each case: where its time went, and the least it could take."""
    lines = []
    for detail in details:
        stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in detail["stages_per_worker"].items())
        floors = ", ".join(
            f"{name} {seconds:.3f} ({detail['floor_rates'][name]:.3g} GB/s)"
            for name, seconds in detail["floors"].items()
        )
        over = f"{detail['over_largest_floor']:.2f} × the largest"
        lines.append(f"{detail['case']}: stages {stages} s; floors {floors} s; {over}")
    return "\n".join(lines)


@click.command("corpus")
@click.option("--nbytes", type=Size(), default="1GiB", show_default=True, help="How much text.")
@click.option("--file-nbytes", type=Size(), default="64MiB", show_default=True, help="Length of each file.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(KINDS)), default=("byte",),
              show_default=True, help="What is counted.")  # fmt: skip
@click.option("--storage", "storages", multiple=True, type=click.Choice(STORAGES), default=STORAGES,
              show_default=True, help="Plain text, or compressed by Zstandard.")  # fmt: skip
@click.option("--profile", "cluster", default="local", show_default=True, metavar="NAME",
              help="Where to run: a profile, or a scheduler's address.")  # fmt: skip
@click.option("--cluster-file", metavar="FILE", help="The file of profiles.")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True)
@click.option("--folder", type=click.Path(file_okay=False, exists=True, writable=True, path_type=Path),
              help="Where the text goes, such as /dev/shm; default: a temporary folder.")  # fmt: skip
@click.option("--repeats", type=COUNT, default=3, show_default=True, help="Timed runs of ours.")
@click.option("--no-peer", is_flag=True, help="Leave dask.delayed out.")
@click.option("--peer-nbytes", type=Size(), help="What the peer counts at most; default: everything.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--plot", type=Picture(), help="Draw the rates as bars.")
def command(folder: Path | None, no_peer: bool, as_json: bool, plot: Path | None, **options: Any) -> None:
    """Text files to counts on a cluster, beside dask.delayed with bincount."""
    expect_pictures(plot)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        report, details = run_corpus(Path(place), peer=not no_peer, **options)
    detailed = DetailedReport(report, details, describe_floors(details))
    publish(detailed, (plot, report.plot), as_json=as_json)
