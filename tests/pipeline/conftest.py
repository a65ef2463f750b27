"""One in-process cluster for all pipeline tests: starting one costs more than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed import Client

from tilewright.pipeline.cluster import open_cluster


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    with open_cluster("local") as client:
        yield client
