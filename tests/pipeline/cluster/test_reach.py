"""Who can reach a cluster: nobody from outside what is started here, and with certificates only who has one of them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
import zarr
from distributed import LocalCluster
from distributed.security import Security

import tilewright as tw
from tilewright.pipeline.cluster import cluster as cluster_module
from tilewright.pipeline.cluster.cluster import open_cluster
from tilewright.pipeline.errors import ClusterError


def profile_file(folder: Path, **profiles: object) -> Path:
    path = folder / "profiles.yaml"
    path.write_text(yaml.safe_dump({"profiles": profiles}))
    return path


def signed(folder: Path, authority: str) -> dict[str, str]:
    """The files of a new authority and of a certificate that it has signed, under their names in Dask's `Security`."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    name = ["-subj", f"/CN={authority}"]
    openssl(
        "req", "-x509", *key, "-keyout", f"{authority}.key", "-out", f"{authority}.pem", "-days", "2", *name
    )
    openssl("req", *key, "-keyout", f"{authority}-own.key", "-out", "own.csr", "-subj", "/CN=own")
    by = ["-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial", "-days", "2"]
    openssl("x509", "-req", "-in", "own.csr", *by, "-out", f"{authority}-own.pem")
    files = {
        "ca_file": f"{authority}.pem",
        "client_cert": f"{authority}-own.pem",
        "client_key": f"{authority}-own.key",
    }
    return {f"tls_{role}": str(folder / file) for role, file in files.items()}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, which makes the certificates")
def test_only_a_profile_with_certificates_reaches_its_scheduler(tmp_path: Path) -> None:
    ours, others = signed(tmp_path, "ours"), signed(tmp_path, "others")
    theirs = {
        f"tls_{who}_{what}": ours[f"tls_client_{what}"]
        for who in ("scheduler", "worker")
        for what in ("cert", "key")
    }
    zarr.save_array(str(tmp_path / "x.zarr"), np.arange(8))
    options = {
        "n_workers": 1,
        "threads_per_worker": 1,
        "processes": False,
        "dashboard_address": "127.0.0.1:0",
    }
    security = Security(**ours, **theirs, require_encryption=True)
    with LocalCluster(protocol="tls://", security=security, **options) as server:
        address = server.scheduler_address
        assert address.startswith("tls://127.0.0.1:")

        def site(**more: Any) -> Path:
            return profile_file(tmp_path, site={"kind": "existing", "address": address, "timeout": 1} | more)

        x = str(tmp_path / "x.zarr")
        assert tw.dot(x, x, cluster="site", cluster_file=str(site(security=ours)), device="cpu") == 140
        unknown = others | {
            "tls_ca_file": ours["tls_ca_file"]
        }  # it trusts the scheduler, but not the other way round
        for stranger, said in (
            ({}, "TLS expects .* give a profile its security"),
            ({"security": unknown}, "in <TLS"),  # which says so, or is just closed
            ({"security": others}, "TLS certificate does not match"),
        ):
            with (
                pytest.raises(ClusterError, match=rf"cannot reach the scheduler at {address}: .*{said}"),
                open_cluster("site", site(**stranger)),
            ):
                pass
        with pytest.raises(ClusterError, match="cannot reach the scheduler at tcp:"):
            tw.dot(x, x, cluster=address.replace("tls:", "tcp:"), device="cpu")


@pytest.mark.sample(2)
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
