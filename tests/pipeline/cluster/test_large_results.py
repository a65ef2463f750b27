"""Results that may be large come from the workers themselves, where all of them are on this host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster

from tilewright.pipeline.cluster import answers
from tilewright.pipeline.reduce import reduce_pieces, taken_as_they_arrive


@pytest.fixture(scope="module")
def near() -> Iterator[Client]:
    options: dict[str, Any] = {"protocol": "tcp", "host": "127.0.0.1", "dashboard_address": ":0"}
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, **options) as cluster,
        Client(cluster) as client,
    ):
        yield client


def piece(number: int) -> tuple[np.ndarray, dict[str, float]]:
    return np.full(1000, number), {}


def found(client: Client) -> list[int]:
    parts: list[int] = []
    work = taken_as_they_arrive("pieces", piece, "take less")
    reduce_pieces(
        client,
        work,
        [(number,) for number in range(5)],
        [1] * 5,
        lambda event: None,
        arrived=lambda place, part: parts.append(int(part.sum())),
    )
    return sorted(parts)


@pytest.fixture
def gathered(near: Client, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The keys that the scheduler was asked to gather."""
    scheduler: Any = near.cluster.scheduler
    real, asked = scheduler.handlers["gather"], []

    async def gather(*arguments: Any, keys: list[str], **options: Any) -> Any:
        asked.append(keys)
        return await real(*arguments, keys=keys, **options)

    monkeypatch.setitem(scheduler.handlers, "gather", gather)
    return asked


def test_parts_do_not_pass_through_the_scheduler(near: Client, gathered: list[list[str]]) -> None:
    assert found(near) == [0, 1000, 2000, 3000, 4000]
    assert not gathered


def test_the_scheduler_is_asked_where_a_worker_cannot_be_reached(
    near: Client, gathered: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nowhere:
        def __call__(self, address: str) -> Any:
            raise OSError(f"cannot reach {address}")

        async def connect(self, address: str) -> Any:
            raise OSError(f"cannot reach {address}")

    monkeypatch.setattr(near, "rpc", Nowhere())
    assert found(near) == [0, 1000, 2000, 3000, 4000]
    assert gathered


def test_workers_that_may_be_elsewhere_are_asked_as_the_client_was_told(
    near: Client, gathered: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(answers._here, near, False)
    assert found(near) == [0, 1000, 2000, 3000, 4000]
    assert gathered


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("tcp://127.0.0.1:8786", True),
        ("tls://[::1]:8786", True),
        ("tcp://localhost:8786", True),
        ("tcp://10.0.0.7:8786", False),
        ("tcp://gpu-7:8786", False),
        ("inproc://10.0.0.7/3120/1", False),
    ],
)
def test_addresses_of_this_host_alone_are_told_apart(address: str, here: bool) -> None:
    assert answers._on_loopback(address) == here
