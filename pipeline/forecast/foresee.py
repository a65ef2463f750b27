"""From a plan to what is expected of it, here: which rates there are, and what the disk has free."""

from __future__ import annotations

import logging
from typing import Any

from tilewright.kernels.errors import TilewrightError
from tilewright.pipeline.forecast.forecast import Foreseen, disk_at, forecast_of
from tilewright.pipeline.forecast.measure import measured_here
from tilewright.pipeline.forecast.rates import kind_of, remembered
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.store.arrays import local_path, open_matrix

logger = logging.getLogger(__name__)

HERE = ("local", "cpu")
"""Profiles whose workers are this machine's cores."""


def foresee(
    plan: MatmulPlan, a: Any, out: Any, *, precision: str, cluster: Any = None, machines: int = 1
) -> Foreseen:
    """What is expected of a plan for A and, where it is known, C. cluster: the profile that it was made for; None: for
    so many machines like this one.

    Rates are those of earlier runs of its kind; where there are none, those of this machine if it is one of CPUs that
    is planned for, measured now. Nothing fails for want of them: then nothing is said of the time.
    """
    device = _device(plan)
    earlier, measured = [], None
    if device is not None:
        kind = kind_of(plan, device, "full" if plan.on_host else precision)
        earlier = [rates for rates in remembered(kind) if rates.is_like(plan)]
        if not earlier and plan.on_host and (cluster is None or cluster in HERE) and plan.operations:
            try:
                measured = measured_here(plan, kind, open_matrix(a, "A"))
            except (TilewrightError, OSError, MemoryError, ValueError) as error:
                logger.debug("no rates were measured: %s", error)
    path = local_path(out) if out is not None else None
    disk = disk_at(path) if path is not None else None
    return Foreseen(plan, forecast_of(plan, earlier, measured, disk, machines))


def _device(plan: MatmulPlan) -> str | None:
    """What runs call the device that is planned for, if it is one of this host's."""
    if plan.on_host:
        return "CPU"
    from tilewright.kernels.gpu.device import devices

    found = devices()
    return found[0].name if found else None
