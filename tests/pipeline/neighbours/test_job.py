"""Which items a search on several GPUs compares once each pair."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zarr

from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.pipeline.events import Event, Notice
from tilewright.pipeline.neighbours import job
from tilewright.pipeline.neighbours.options import NeighbourRequest, open_sides
from tilewright.pipeline.neighbours.plan import Otherwise
from tilewright.pipeline.neighbours.tasks import Found, Work
from tilewright.pipeline.plan.inputs import WorkerFacts


def work_of(dtype: Any, precision: Any) -> Work:
    items = np.zeros((100_000, 8), dtype)
    return Work(
        a=items,  # type: ignore[arg-type]
        b=items,  # type: ignore[arg-type]
        one=True,
        of="rows",
        metric="dot",
        k=3,
        bound=None,
        exclude_self=True,
        once=False,
        keep=True,
        precision=precision,
        panel_rows=100_000,
        depth=8,
        holds_b=False,
        device="cuda",
        threads=1,
        key="topk-1",
        mutual=True,
    )


@pytest.mark.parametrize(
    ("dtype", "precision", "once"),
    [
        (np.float16, "full", True),
        (BFLOAT16, "full", True),
        (np.int8, "full", True),
        (np.float32, "tf32", True),
        (np.float32, "full", False),
        (np.float32, "split", False),
    ],
)
def test_items_that_no_tensor_core_takes_are_not_read_in_bands(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, precision: Any, once: bool
) -> None:
    """No band of them would be compared, and nothing is said of items that are equally near."""
    searched: list[tuple[bool, tuple[int, int]]] = []
    said: list[Event] = []

    def search(
        client: Any, work: Work, find: Any, calls: Any, listener: Any, arrived: Any, *others: Any
    ) -> None:
        searched.extend((work.mutual, call[:2]) for call in calls)
        if not work.mutual:
            assert (work.panel_rows, work.holds_b, work.threads) == (20_000, True, 4)
        for place in range(len(calls)):
            arrived(place, Found({}, 0, 0, 0))

    monkeypatch.setattr(job, "_search", search)
    monkeypatch.setattr(job, "bands_of", lambda *asked: [(0, 70_000), (70_000, 100_000)])
    other = Otherwise(block_rows=50_000, panel_rows=20_000, holds_b=True, task_nbytes=0, held_nbytes=0)
    plan: Any = SimpleNamespace(m=100_000, tasks=2, workers=2, threads=4, block_rows=60_000, otherwise=other)
    client: Any = None
    finished = job._find(
        client, replace(work_of(dtype, precision), threads=8), plan, None, job._Total(), said.append
    )
    bands = [(True, (0, 70_000)), (True, (70_000, 100_000))] if once else []
    assert searched == [*bands, (False, (0, 50_000)), (False, (50_000, 100_000))]
    assert len([event for event in said if isinstance(event, Notice)]) == int(once)
    assert [piece[:2] for piece in finished] == [(0, 50_000), (50_000, 100_000)]


@pytest.mark.parametrize(
    ("kind", "rows", "mutual", "threads"),
    [("cuda", 200_000, True, 16), ("cuda", 200, False, 4), ("cpu", 200, False, 1)],
)
def test_tasks_of_a_gpus_worker_have_its_cores_where_dask_says_one(
    kind: Any, rows: int, mutual: bool, threads: int, tmp_path: Path
) -> None:
    zarr.create_array(tmp_path / "x.zarr", shape=(rows, 8), dtype=np.float16)
    request = NeighbourRequest(tmp_path / "x.zarr", k=3).checked()
    facts = [
        WorkerFacts(
            kind,
            "any",
            2**34,
            None,
            cores=1,
            usable_cores=64,
            host_cores=64,
            address=f"tcp://10.0.0.1:{port}",
            threads=4,
        )
        for port in range(4)
    ]
    work, _ = job.planned_on(kind, facts, request, open_sides(request), lambda work: 0.0)
    assert (work.mutual, work.threads) == (mutual, threads)
