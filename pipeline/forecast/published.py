"""How long work takes on GPUs that are elsewhere: the peaks of data sheets, times the shares that were reached of them.

The shares are those of `docs/performance.md`, on H100s and H200s (SXM): the least and the most that whole jobs, or
kernels where no job was timed, reached of the peak named. Other architectures were never measured: `NOT_MEASURED`
widens theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.kernels.numbers import ceil_div
from tilewright.pipeline.forecast.hardware import GB, GPU_CORES, Gpu, Hardware, model_called
from tilewright.pipeline.forecast.rates import Rates
from tilewright.pipeline.forecast.workload import Workload

PRODUCTS: dict[str, tuple[str, float, float]] = {
    # "The whole job": 44.5 to 51.2 T op/s of 67; kernels 50.7 to 52.5.
    "float32": ("float32", 0.66, 0.79),
    # "Matrix product": 343 and 348 of 494; a job reaches less.
    "float32 tf32": ("tf32", 0.55, 0.71),
    # 0.76 to 0.91 of 660 to 690.
    "float32 bf16": ("float16", 0.48, 0.64),
    "float32 fp16": ("float16", 0.48, 0.64),
    # In three parts 100 to 111, in two 170 to 220, of 989.
    "float32 split": ("float16", 0.095, 0.22),
    # 645 to 692, and 831 with C in float16, of 989.
    "float16": ("float16", 0.60, 0.85),
    "bfloat16": ("float16", 0.60, 0.71),
    # "The whole job": 49 to 59.1 of 67; kernels 55.2 to 58.1.
    "float64": ("float64", 0.73, 0.90),
    # "Floats by residues": 77.1 to 85.8, by products of int8; a job reaches less.
    "float64 split": ("int8", 0.035, 0.043),
    # 185 to 209, and 71.8 to 82.2, of the real operations, of which a complex one has four.
    "complex64 split": ("float16", 0.042, 0.053),
    "complex128 split": ("int8", 0.0085, 0.0104),
    # Kernels do 52 T of the real operations, of which a complex one has four.
    "complex64": ("float32", 0.17, 0.20),
    "complex128": ("float64", 0.18, 0.20),
    # 1010 to 1490 of 1979.
    "int8": ("int8", 0.50, 0.76),
    # As many products of int8 as the numbers are wide: full range 95 to 105, small values 688 to 1122.
    "int32": ("int8", 0.047, 0.57),
    # Full range 55.2 to 58.8, small values 576 to 1247.
    "int64": ("int8", 0.027, 0.63),
}
"""By `Workload.arithmetic`: which peak, and the least and the most that was reached of it."""

SEARCHES: dict[str, tuple[str, float, float]] = {
    # "Nearest neighbours", ten of each, 400,000 × 384 and 200,000 × 768, and 10^6 × 384, each pair once: 261, 298, 349.
    "float16 few once": ("float16", 0.25, 0.36),
    # Each row with all: 431 and 432.
    "float16 few all": ("float16", 0.42, 0.45),
    # A hundred of each, 101 and 106; each row with all, 319 and 366.
    "float16 many once": ("float16", 0.10, 0.25),
    "float16 many all": ("float16", 0.32, 0.42),
    # Pairs above a threshold that one in 10^6 reaches, 366 and 458; where nothing reaches it, 656.
    "float16 pairs once": ("float16", 0.36, 0.47),
    "float16 pairs all": ("float16", 0.36, 0.67),
    # Ten of each of 100,000 × 384, each pair once or twice (not recorded): 37, 215 and 21 ms. More take longer.
    "float32 tf32": ("tf32", 0.10, 0.43),
    "float32 few": ("float32", 0.26, 0.54),
    "float32 many": ("float32", 0.10, 0.54),
    "float32 pairs": ("float32", 0.26, 0.67),
    "int8": ("int8", 0.05, 0.19),
}
"""The same of searches, by what `Workload.arithmetic` begins with behind ``search``; bfloat16 is as float16."""

NOT_MEASURED = (0.5, 1.2)
"""What the least and the most shares are multiplied by on an architecture that was not measured. On Hopper the kernels
that other GPUs have reach 0.54 to 1.24 of Hopper's own ("The same on tensor cores of every GPU")."""
MOST_SHARE = 0.95
"""Of a peak that any kernel reaches."""

BUS_SHARE = (0.63, 0.85)
"""Of the published bus: plain chunks from the page cache came at 40.4 to 46.2 GB/s, copies alone at 54.5, of 64."""
HOST_RATE = (38 * GB, 55 * GB)
"""At which a host's storage, in memory, read and wrote for one GPU ("The whole job": 42 to 55, and 38)."""
HOST_RATE_OF_SEVERAL = (50 * GB, 95 * GB)
"""The same for two and four GPUs together, by twice as many threads and more (61 to 95; on the slower host 54)."""
ENCODED_HOST_RATE = (6.9 * GB, 16 * GB)
"""The same where cores decode and encode ("Compressed chunks": 12.9 GB in 0.82 to 1.86 s)."""
SEARCH_RATE = (0.8 * GB, 1.2 * GB)
"""Bytes of A and B over what searches on one GPU took besides comparing: 0.31 GB in 0.33 and in 0.27 s, 0.77 in 0.9."""
SHARED_READS = 1.7
"""Times the lower bound of one worker that GPUs of a host read together from files, since they get panels from one
another: at most 1.68 ("The whole job")."""

START_SECONDS = (1.5, 2.6)
"""From the command to the first tile: "a second and a half" of a search, 2.5 of a product. Where no kernel has been
compiled on a machine yet, ten more."""
CLUSTER_START_SECONDS = (1.5, 4.5)
"""What processes of their own for the workers add to that: 3 s once ("The command": 4.1 and 7.1 s)."""
CHECK_RATE = {
    1: (3.5 * GB, 5.4 * GB),
    2: (1.9 * GB, 3.4 * GB),
    4: (3.7 * GB, 6.4 * GB),
    8: (4.8 * GB, 9.9 * GB),
}
"""Of A, B and C on one host, by the bytes of a real number of A and B. "The check" has 1.6 GB of int8 in 0.30 to 0.31
s, 1.6 of float16 in 0.47 to 0.55, 3.2 of float32 in 0.50 to 0.58 and 6.4 of int64 in 0.85 to 0.89; on a CPU float64
takes 1.3 times as long as float32, and complex64 2.2 times. Some hosts are a third slower."""
CHECK_SHARED = 0.5
"""What of another worker's rate each further worker adds to the check at least. Its tasks go to all workers, whichever
of them is free; that was not timed on several GPUs."""
SEARCH_CHECK_RATE = (0.40e9, 0.48e9)
"""Elements of B that a search's check goes through a second: 384 × 10^6 in 0.9 s, 154 × 10^6 in 0.32 and in 0.36."""
BESIDE = (0.2, 1.0)
"""Of a product on GPUs, whose first panels come before anything is multiplied, and whose last tile is written after."""
ENDS_SECONDS = (0.03, 0.15)
"""What a product on GPUs takes before the first panel and after the last tile ("The whole job" of what falls short)."""
JOB_OVER_FLOOR = 1.56
"""The most that a whole job took of its largest floor ("The whole job", "Compressed chunks")."""


@dataclass(frozen=True)
class Estimate:
    """What is expected of workers that are elsewhere."""

    slow: Rates
    fast: Rates
    read_nbytes: tuple[int, int]
    """What the slow ones read, and the fast ones."""
    ratio: tuple[float, float] | None
    """Between which multiples of the largest floor the work takes; None: between that floor and the sum of all."""
    beside: tuple[float, float]
    """Which shares of what the other stages take come on top of the longest, at least and at most: 1 where stages were
    measured one after the other."""
    ends_seconds: tuple[float, float]
    """What comes before the first stage and after the last, at least and at most."""
    around_seconds: tuple[float, float] | None
    """What start and check of the command add; None: not known."""
    source: str
    """``published``, or ``given`` where the user gave the rate."""
    words: str
    """What it is made from, for people."""


def estimate_of(work: Workload, hardware: Hardware) -> Estimate | None:
    """None where neither a rate is given nor one known for this arithmetic, or cores do it, of which a GPU's peak says
    nothing."""
    gpu = None if work.on_host else hardware.gpu
    share = None if gpu is None else _share(work.arithmetic, gpu)
    if hardware.rate is not None:
        operations = (hardware.rate, hardware.rate)
        words = "by the rate that was given"
        source = "given"
    elif share is not None and gpu is not None:
        peak, least, most = share
        operations = (least * getattr(gpu, peak), most * getattr(gpu, peak))
        words = (
            f"an estimate, from the published peak of {gpu.name} ({getattr(gpu, peak) / 1e12:g} T op/s) and the"
            f" {least:.0%} to {most:.0%} of it that are to be expected"
            + ("" if gpu.measured else "; none of its kind was measured")
        )
        source = "published"
    else:
        return None
    queue = "; the job's wait in the queue comes before" if hardware.queued else ""
    around = None if work.on_host else _around(work, hardware)
    if work.on_host:
        slow, fast = (Rates(each, None, None) for each in operations)
        reads = work.read_nbytes, work.read_nbytes
        return Estimate(
            slow, fast, reads, (1.0, JOB_OVER_FLOOR), BESIDE, (0.0, 0.0), None, source, words + queue
        )
    if work.is_search:
        slow, fast = (Rates(*rates, None) for rates in zip(operations, SEARCH_RATE, strict=True))
        # How much faster several are was not timed: at worst each is as busy with it as one alone.
        reads = max(work.read_nbytes, work.sharing * work.once_nbytes), work.read_nbytes
        return Estimate(slow, fast, reads, None, (1.0, 1.0), (0.0, 0.0), around, source, words + queue)
    hosts = ceil_div(work.sharing, hardware.on_host)
    together = ceil_div(work.sharing, hosts)
    host = HOST_RATE if together == 1 else HOST_RATE_OF_SEVERAL
    if work.encoded:
        host = ENCODED_HOST_RATE
    each = [rate / together for rate in (host[0] * _fewer_cores(hardware), host[1])]
    if gpu is not None:
        each = [min(rate, share * gpu.bus_rate) for rate, share in zip(each, BUS_SHARE, strict=True)]
    slow, fast = (Rates(multiplied, rate, rate) for multiplied, rate in zip(operations, each, strict=True))
    most = work.read_nbytes
    if work.sharing > 1:
        most = min(most, max(int(SHARED_READS * work.once_nbytes) * hosts, most // work.sharing))
    least = min(most, max(work.once_nbytes, work.read_nbytes // work.sharing))
    words += ", and files that the hosts hold in memory: from slower storage reading takes longer"
    return Estimate(slow, fast, (most, least), None, BESIDE, ENDS_SECONDS, around, source, words + queue)


def least_rate(arithmetic: str, name: str) -> float | None:
    """The operations that a GPU that is called so does a second at least in products; None where nobody knows."""
    gpu = model_called(name)
    share = None if gpu is None else _share(arithmetic, gpu)
    return None if share is None else share[1] * getattr(gpu, share[0])


def _share(arithmetic: str, gpu: Gpu) -> tuple[str, float, float] | None:
    """Which peak, and what of it is to be expected."""
    if arithmetic.startswith("search "):
        name = arithmetic.removeprefix("search ").replace("bfloat16", "float16")
        found = next((share for start, share in SEARCHES.items() if name.startswith(start)), None)
    else:
        found = PRODUCTS.get(arithmetic)
    if found is None or gpu.measured:
        return found
    peak, least, most = found
    return peak, NOT_MEASURED[0] * least, min(MOST_SHARE, NOT_MEASURED[1] * most)


def _fewer_cores(hardware: Hardware) -> float:
    """What share of the least rate is to be expected of hosts with fewer cores for each worker than those that were
    measured; the most may be what it was, where memory and not the cores limited it."""
    return min(1.0, hardware.cores / GPU_CORES)


def _around(work: Workload, hardware: Hardware) -> tuple[float, float]:
    """Seconds that start and check add: where several workers check, they share that."""
    start = START_SECONDS
    if work.workers > 1:
        start = start[0] + CLUSTER_START_SECONDS[0], start[1] + CLUSTER_START_SECONDS[1]
    if work.is_search:
        slow, fast = SEARCH_CHECK_RATE
        least_help = 1.0
    else:
        slow, fast = CHECK_RATE[work.check_itemsize]
        if work.encoded:  # which has to be decoded first
            slow, fast = (
                1 / (1 / each + 1 / host) for each, host in zip((slow, fast), ENCODED_HOST_RATE, strict=True)
            )
        least_help = 1 + CHECK_SHARED * (work.sharing - 1)
    slow *= _fewer_cores(hardware)
    return start[0] + work.check_nbytes / fast / work.sharing, start[
        1
    ] + work.check_nbytes / slow / least_help
