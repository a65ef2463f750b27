"""What a task of neighbours reads on threads of its own ends with the task."""

from __future__ import annotations

from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tilewright.pipeline.cluster.here.client import HereClient
from tilewright.pipeline.cluster.here.worker import current_worker
from tilewright.pipeline.neighbours import check, tasks
from tilewright.pipeline.store import waiting


def test_panels_are_waited_for_as_long_as_their_task_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read by another thread than the one that runs the task."""
    checks: list[Any] = []

    def read(array: np.ndarray, region: tuple[slice, ...]) -> np.ndarray:
        checks.append(waiting._of_thread.check)
        return array[region]

    monkeypatch.setattr(tasks, "read_region", read)
    work = SimpleNamespace(
        b=np.ones((5, 3)), of="rows", n=5, panel_rows=2, holds_b=False, threads=1, device="cpu", metric="dot"
    )

    def go() -> list[int]:
        starts = [start for start, _ in tasks._Panels(cast(tasks.Work, work), 0)]
        current_worker().state.tasks["task"].state = "cancelled"
        for given_up in checks:
            with pytest.raises(CancelledError):
                given_up()
        return starts

    with HereClient(1) as client:
        assert client.submit(go, key="task").result() == [0, 2, 4]
    assert len(checks) == 3


@pytest.mark.parametrize("depth", [3, 2])
def test_the_check_waits_as_long_as_its_task_is_needed(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    checks: list[Any] = []

    def items_of(*arguments: Any, check: Any = None) -> np.ndarray:
        checks.append(check)
        raise OSError("it does not answer")

    monkeypatch.setattr(check, "items_of", items_of)
    monkeypatch.setattr(check, "sample_of", lambda work, items: np.ones((1, 3)))
    monkeypatch.setattr(check, "keys_of", lambda work, sampled, some, count: some(slice(0, 2)))
    work = SimpleNamespace(b=np.ones((5, 3)), of="rows", depth=depth, width=3, threads=1)

    def go() -> None:
        with pytest.raises(OSError, match="does not answer"):
            check.recompute(cast(tasks.Work, work), [(0, np.zeros(1, np.int64))], 0, 5)
        current_worker().state.tasks["task"].state = "cancelled"
        with pytest.raises(CancelledError):
            checks[0]()

    with HereClient(1) as client:
        client.submit(go, key="task").result()
