"""One in-process cluster for all pipeline tests: starting one costs more than most of them. And one of processes, for
what is other there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed import Client, LocalCluster

from tilewright.pipeline.cluster.cluster import open_cluster
from tilewright.pipeline.cluster.here.opening import open_executor


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    with open_cluster("local") as client:
        yield client


@pytest.fixture(scope="session")
def without_dask() -> Iterator[Client]:
    """Threads of this process by themselves, which take two thirds of the time of Dask's cluster: for tests to which it
    does not matter who hands out the work."""
    with open_executor("local") as client:
        yield client


@pytest.fixture(scope="session")
def processes() -> Iterator[Client]:
    """A client whose two workers are processes, of a thread each. Who ends one waits for the next in its place."""
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        yield client
