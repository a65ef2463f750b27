"""Who can reach a cluster that is started here: nobody from outside."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tilewright.pipeline.cluster import cluster as cluster_module
from tilewright.pipeline.cluster.cluster import open_cluster
from tilewright.pipeline.errors import ClusterError


def profile_file(folder: Path, **profiles: object) -> Path:
    path = folder / "profiles.yaml"
    path.write_text(yaml.safe_dump({"profiles": profiles}))
    return path


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["cpu", "local"])
@pytest.mark.parametrize("asked", [{}, {"dashboard_address": ":0"}, {"dashboard_address": 0}])
def test_what_a_profile_starts_listens_on_loopback_alone(
    kind: str, asked: dict[str, Any], tmp_path: Path
) -> None:
    """Whoever reaches a scheduler or a worker can run code there."""
    options = {"kind": kind, "n_workers": 1, **asked}
    before = {connection.laddr for connection in psutil.Process().net_connections()}
    with open_cluster("one", profile_file(tmp_path, one=options)):
        this = psutil.Process()
        processes = [this, *this.children(recursive=True)] if kind == "cpu" else [this]
        found = {
            connection.laddr
            for process in processes
            for connection in process.net_connections()
            if connection.status == psutil.CONN_LISTEN and connection.laddr not in before
        }
    assert len(found) >= (5 if kind == "cpu" else 2)
    assert {address.ip for address in found} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("given", "where"),
    [
        (":8787", "127.0.0.1:8787"),
        (8787, "127.0.0.1:8787"),
        ("8787", "127.0.0.1:8787"),
        ("0.0.0.0:8787", "0.0.0.0:8787"),
        (":8787, host:1", "127.0.0.1:8787,host:1"),
        ([8787], [8787]),
    ],
)
def test_a_dashboard_of_a_port_alone_is_on_loopback(given: Any, where: Any) -> None:
    assert cluster_module._dashboard({"dashboard_address": given})["dashboard_address"] == where


def test_a_scheduler_that_is_stopped_before_it_answers_is_given_up(tmp_path: Path) -> None:
    """As its socket is then: connections are made, and nobody reads them. Dask's own timeout does not end that."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"tcp://127.0.0.1:{deaf.getsockname()[1]}"
        profiles = tmp_path / "cluster.yaml"
        profiles.write_text(f"profiles:\n  there: {{kind: existing, address: '{address}', timeout: 0.5}}\n")
        begun = time.monotonic()
        with (
            pytest.raises(ClusterError, match=r"it did not answer within 0\.5 s \(timeout, in a profile\)"),
            open_cluster("there", profiles),
        ):
            pass
        assert time.monotonic() - begun < 30
