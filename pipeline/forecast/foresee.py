"""From a plan to what is expected of it, here or on workers that are named: which rates there are, and what the disk
has free."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import zarr

from tilewright.kernels.errors import TilewrightError
from tilewright.pipeline.forecast.forecast import (
    THREADS,
    Disk,
    Forecast,
    Foreseen,
    disk_at,
    forecast_of,
    tell_time,
)
from tilewright.pipeline.forecast.hardware import Hardware
from tilewright.pipeline.forecast.measure import measured_here, measured_search
from tilewright.pipeline.forecast.published import estimate_of
from tilewright.pipeline.forecast.rates import Rates, kind_of, kind_of_search, remembered
from tilewright.pipeline.forecast.workload import Workload
from tilewright.pipeline.neighbours.plan import NeighbourPlan
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.spectral.results import EofPlan
from tilewright.pipeline.store.arrays import local_path
from tilewright.pipeline.store.region import Flattened, StoredArray
from tilewright.pipeline.store.sources.parts import open_matrix

logger = logging.getLogger(__name__)

HERE = ("local", "cpu")
"""Profiles whose workers are this machine's cores."""


def foresee(
    plan: MatmulPlan | NeighbourPlan | EofPlan,
    a: Any,
    out: Any,
    *,
    precision: str,
    cluster: Any = None,
    machines: int = 1,
    hardware: Hardware | None = None,
    verify: bool = True,
) -> Foreseen:
    """What is expected of a plan for A and, where it is known, the output. cluster: the profile that it was made for;
    None: for so many machines like this one. hardware: workers that a user has named. verify: whether the result is
    checked.

    Rates are those of earlier runs of its kind; where these tell nothing, those of this machine, measured now, if it is
    one of CPUs that is planned for. Of a GPU that is named, or a rate, they follow from that alone. Nothing fails for
    want of them: then nothing is said of the time.
    """
    here = cluster is None or cluster in HERE
    if hardware is not None:
        machines = hardware.workers
    asked = _Asked(a, precision, here, machines, hardware, verify, _disk(out))
    if isinstance(plan, EofPlan):
        return Foreseen(plan, _of_passes(plan, asked))
    if isinstance(plan, NeighbourPlan):
        return Foreseen(plan, _of_search(plan, asked))
    return Foreseen(plan, _of_product(plan, asked))


class _Asked(NamedTuple):
    a: Any
    precision: str
    here: bool
    """Whether this machine's cores, or others like them, are what is planned for."""
    machines: int
    hardware: Hardware | None
    verify: bool
    disk: Disk | None


def _of_product(plan: MatmulPlan, asked: _Asked) -> Forecast:
    device = _device(plan.on_host)
    kind = None if device is None else kind_of(plan, device, "full" if plan.on_host else asked.precision)
    work = Workload.of_product(plan, asked.precision, verify=asked.verify)
    return _forecast(work, kind, asked, lambda: measured_here(plan, str(kind), _read_matrix(asked.a)))


def _of_search(plan: NeighbourPlan, asked: _Asked) -> Forecast:
    device = _device(plan.on_host)
    precision = "full" if plan.on_host else asked.precision
    kind = None if device is None else kind_of_search(plan, device, precision)
    work = Workload.of_search(plan, asked.precision, verify=asked.verify)
    return _forecast(work, kind, asked, lambda: measured_search(plan, str(kind), _read_matrix(asked.a)))


def _forecast(
    work: Workload, kind: str | None, asked: _Asked, measure: Callable[[], tuple[Rates, Rates]]
) -> Forecast:
    """kind: of runs with the same rates; None: there is no such device here."""
    named = asked.hardware
    if named is not None and (named.gpu is not None or named.rate is not None):
        estimate = estimate_of(work, named)
        found = forecast_of(work, [], None, asked.disk, estimate=estimate)
        return found if estimate is not None else replace(found, words=_unknown(work))
    earlier, measured = [], None
    if kind is not None:
        earlier = [rates for rates in remembered(kind) if rates.is_like(work.operations)]
        if not tell_time(work, earlier) and work.on_host and asked.here and work.operations:
            try:
                measured = measure()
            except (TilewrightError, OSError, MemoryError, ValueError) as error:
                logger.debug("no rates were measured: %s", error)
    return forecast_of(work, earlier, measured, asked.disk, asked.machines)


def _unknown(work: Workload) -> str:
    """Why nothing follows from a GPU that was named."""
    if work.on_host:
        return (
            "cores do this work, of which a GPU (--gpu) says nothing; how fast each worker is, --rate tells"
        )
    what = work.arithmetic.removeprefix("search ")
    return f"of this work ({what}) no GPU was measured; how fast each worker is, --rate tells"


def _of_passes(plan: EofPlan, asked: _Asked) -> Forecast:
    """Of all passes where it is known how many there are; else of one of them in the mean."""
    products = [_of_product(product, asked._replace(verify=False)) for product in plan.products.values()]
    *steps, scores = products
    if plan.least_passes == plan.most_passes:
        others = plan.least_passes - len(products)
        cheapest = min(products, key=lambda each: each.seconds or 0.0)
        parts, times, units = [*products, *[cheapest] * others], 1.0, f"{plan.least_passes} passes over X"
    else:
        parts, times = steps, 1.0 / len(steps)
        units = f"mean pass over X, of which it takes {plan.least_passes} to {plan.most_passes}"
    mean = _added(parts, times)
    passes = (1, 1) if times == 1.0 else (plan.least_passes, plan.most_passes)
    return replace(
        mean,
        command_seconds=_command_of_passes(plan, asked, mean, passes),
        disk_nbytes=plan.output_nbytes,
        memory_nbytes=max((each.memory_nbytes or 0 for each in products), default=0),
        device_nbytes=max(each.device_nbytes for each in products),
        units=units,
        output="EOFs and scores",
        words=scores.words,
    )


def _command_of_passes(
    plan: EofPlan, asked: _Asked, found: Forecast, passes: tuple[int, int]
) -> tuple[float, float] | None:
    """Between which seconds the whole command takes: at least and at most so many times what was found, one start, and
    the checks; None where nobody knows those. Of the iteration the scores alone are checked."""
    begun = [
        _around(_of_product(product, asked._replace(verify=False))) for product in plan.products.values()
    ]
    checked = list(plan.products.values())[0 if plan.method == "gram" else -1 :] if asked.verify else []
    checks = [_around(_of_product(product, asked)) for product in checked]
    start, ends = begun[-1], (found.least_seconds, found.most_seconds)
    if start is None or None in checks or None in ends:
        return None
    least, most = (
        times * seconds + first + sum(each[end] - first for each in checks if each is not None)
        for end, (times, seconds, first) in enumerate(zip(passes, ends, start, strict=True))
        if seconds is not None
    )
    return least, most


def _around(one: Forecast) -> tuple[float, float] | None:
    """What start and check add to the tiles of a product; None: not known."""
    if one.command_seconds is None or one.least_seconds is None or one.most_seconds is None:
        return None
    return one.command_seconds[0] - one.least_seconds, one.command_seconds[1] - one.most_seconds


def _added(parts: Sequence[Forecast], times: float) -> Forecast:
    """The sum of some forecasts, each so many times."""
    floors: dict[str, float | None] = {}
    for name in THREADS:
        seconds = [part.floors[name] for part in parts]
        floors[name] = _sum(seconds, times)
    known = {name: floor for name, floor in floors.items() if floor is not None}
    one = next((part for part in parts if part.seconds is None), parts[0])
    return replace(
        one,
        least_seconds=_sum([part.least_seconds for part in parts], times),
        most_seconds=_sum([part.most_seconds for part in parts], times),
        runs=min(part.runs for part in parts),
        floors=floors,
        limit=max(known, key=lambda name: known[name]) if known else None,
    )


def _sum(seconds: Sequence[float | None], times: float) -> float | None:
    """None where any of them is not known."""
    known = [each for each in seconds if each is not None]
    return times * sum(known) if len(known) == len(seconds) else None


def _read_matrix(source: Any) -> StoredArray:
    """The input as a matrix that a rate of reading can be measured of: of more dimensions the first are its rows."""
    found = open_matrix(source, "A", or_more=True)
    if found.ndim == 2 or not isinstance(found, zarr.Array):
        return found
    return Flattened(found, (0,), tuple(range(1, found.ndim)))


def _disk(out: Any) -> Disk | None:
    path = local_path(out) if out is not None else None
    return disk_at(path) if path is not None else None


def _device(on_host: bool) -> str | None:
    """What runs call the device that is planned for, if it is one of this host's."""
    if on_host:
        return "CPU"
    from tilewright.kernels.gpu.device import devices

    found = devices()
    return found[0].name if found else None
