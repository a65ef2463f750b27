"""Who is let in where a profile says ``security``: only who has a certificate of the same authority."""

from __future__ import annotations

import gc
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import yaml
import zarr
from distributed import Client, LocalCluster
from distributed.security import Security

import tilewright as tw
from tilewright.pipeline.cluster.cluster import open_cluster
from tilewright.pipeline.cluster.security import security_of, shared
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


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, str]]:
    """The files of two that do not know each other."""
    folder = tmp_path_factory.mktemp("certificates")
    return signed(folder, "ours"), signed(folder, "others")


@pytest.fixture
def server(authorities: tuple[dict[str, str], dict[str, str]]) -> Iterator[LocalCluster]:
    """One that others have started, with our certificates."""
    security = Security(**shared(authorities[0]), require_encryption=True)
    options = {
        "n_workers": 1,
        "threads_per_worker": 1,
        "processes": False,
        "dashboard_address": "127.0.0.1:0",
    }
    with LocalCluster(protocol="tls://", security=security, **options) as found:
        yield found


def test_only_a_profile_with_certificates_reaches_its_scheduler(
    tmp_path: Path, server: LocalCluster, authorities: tuple[dict[str, str], dict[str, str]]
) -> None:
    ours, others = authorities
    address = server.scheduler_address
    zarr.save_array(str(tmp_path / "x.zarr"), np.arange(8))

    def site(**more: Any) -> Path:
        return profile_file(tmp_path, site={"kind": "existing", "address": address, "timeout": 1} | more)

    x = str(tmp_path / "x.zarr")
    assert tw.dot(x, x, cluster="site", cluster_file=str(site(security=ours)), device="cpu") == 140
    # It trusts the scheduler, but not the other way round.
    unknown = others | {"tls_ca_file": ours["tls_ca_file"]}
    for stranger, said in (
        ({}, "TLS expects .* give a profile its security"),
        (
            {"security": unknown},
            rf"it let nobody in by tls_client_cert, {re.escape(others['tls_client_cert'])}, which",
        ),
        (
            {"security": others},
            (
                f"its certificate is not of the authority that tls_ca_file, {re.escape(others['tls_ca_file'])}, names"
                " .*self-signed certificate in certificate chain"
            ),
        ),
        (
            {"security": ours, "address": address.replace("tls:", "tcp:")},
            "the address of a scheduler with certificates begins with tls://",
        ),
    ):
        where = stranger.get("address", address)
        with (
            pytest.raises(ClusterError, match=rf"cannot reach the scheduler at {where}: .*{said}") as told,
            open_cluster("site", site(**stranger)),
        ):
            pass
        assert "\n" not in str(told.value)
    with pytest.raises(
        ClusterError, match=r"at tcp:.*; a scheduler with certificates does that, whose address begins"
    ):
        tw.dot(x, x, cluster=address.replace("tls:", "tcp:"), device="cpu")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "made"), [("cpu", False), ("local", True), ("local", False)])
def test_a_cluster_of_a_profile_is_encrypted(
    kind: str, made: bool, tmp_path: Path, authorities: tuple[dict[str, str], dict[str, str]]
) -> None:
    """With files of certificates, or with some that are made for it; then nobody else has any."""
    ours, others = authorities
    options = {"kind": kind, "n_workers": 1, "security": True if made else ours}
    zarr.save_array(str(tmp_path / "x.zarr"), np.arange(8))
    with open_cluster("safe", profile_file(tmp_path, safe=options)) as client:
        addresses = [client.scheduler.address, *client.nthreads()]
        assert all(address.startswith("tls://127.0.0.1:") for address in addresses)
        assert tw.dot(str(tmp_path / "x.zarr"), str(tmp_path / "x.zarr"), cluster=client, device="cpu") == 140
        for security in (None, Security(**others, require_encryption=True)):
            with pytest.raises((OSError, TypeError)):
                Client(addresses[0], security=security, timeout=1)
            # Dask's client that was refused ends its loop as it is deleted: in the thread of the next one's loop, while
            # that starts, both wait for each other.
            gc.collect()
        if not made:
            with Client(addresses[0], security=Security(**ours, require_encryption=True), timeout=5) as known:
                assert known.submit(sum, [1, 2]).result() == 3


@pytest.mark.parametrize("kind", ["local", "cpu"])
def test_certificates_that_do_not_know_each_other_start_nothing(
    kind: str, tmp_path: Path, authorities: tuple[dict[str, str], dict[str, str]]
) -> None:
    """Workers would try for minutes."""
    ours, others = authorities
    given = ours | {"tls_worker_cert": others["tls_client_cert"], "tls_worker_key": others["tls_client_key"]}
    both = " and ".join(sorted([ours["tls_client_cert"], others["tls_client_cert"]]))
    said = f"a scheduler and a worker with {both} do not trust each other by tls_ca_file, {ours['tls_ca_file']} ("
    with (
        pytest.raises(ClusterError, match=re.escape(said)),
        open_cluster("odd", profile_file(tmp_path, odd={"kind": kind, "security": given})),
    ):
        pass


@pytest.mark.parametrize("kind", ["existing", "local", "cpu", "cuda"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("yes please", "'yes please' is no mapping"),
        ([1], "[1] is no mapping"),
        ({"tls_ca_fil": "a.pem"}, "has no option 'tls_ca_fil'; did you mean 'tls_ca_file'?"),
        ({"require_encryption": True}, "lacks tls_ca_file and tls_client_cert; give"),
        ({"tls_ca_file": "nope.pem"}, "tls_ca_file: there is no file nope.pem"),
        ({"tls_ca_file": 5}, "tls_ca_file: 5 is no path"),
        ({"tls_ca_file": "empty.pem"}, "lacks tls_client_cert; give"),
        ({"tls_ca_file": "empty.pem", "tls_client_cert": "empty.pem"}, "} cannot be used: "),
        ({"tls_ca_file": "empty.pem", "tls_worker_cert": "empty.pem"}, "} cannot be used: "),
        ({"tls_min_version": 1}, "} cannot be used: tls_min_version=1 is not supported"),
    ],
)
def test_what_is_no_security_is_refused_by_name(
    kind: str, given: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.pem").touch()
    options = {"kind": kind, "security": given}
    if kind == "existing":
        options |= {"address": "tls://127.0.0.1:1", "timeout": 0.2}
    with (
        pytest.raises(ClusterError, match=rf"profile 'site' of .*: security.*{re.escape(said)}"),
        open_cluster("site", profile_file(tmp_path, site=options)),
    ):
        pass


def test_new_certificates_are_none_of_a_running_scheduler(tmp_path: Path) -> None:
    options = {"kind": "existing", "address": "tls://127.0.0.1:1", "timeout": 0.2, "security": True}
    said = "True would make new certificates, which a running scheduler does not know; give"
    with (
        pytest.raises(ClusterError, match=said),
        open_cluster("site", profile_file(tmp_path, site=options)),
    ):
        pass


def test_keys_that_are_given_as_texts_are_not_shown(
    authorities: tuple[dict[str, str], dict[str, str]],
) -> None:
    """Dask takes those too."""
    texts = {name: Path(path).read_text() for name, path in authorities[0].items()}
    assert security_of("p", texts, started=True).require_encryption
    key = texts["tls_client_key"].splitlines()[1]
    others = {name: Path(path).read_text() for name, path in authorities[1].items()}
    for odd in (
        texts | {"tls_client_key": texts["tls_client_key"].replace(key, key[::-1])},
        texts | {"tls_worker_cert": others["tls_client_cert"], "tls_worker_key": others["tls_client_key"]},
    ):
        with pytest.raises(ClusterError, match="given as a text") as told:
            security_of("p", odd, started=True)
        assert key[:16] not in str(told.value)
        assert key[::-1][:16] not in str(told.value)


def test_certificates_that_nothing_can_make_are_told_of(tmp_path: Path) -> None:
    """In a process that has no such library."""
    path = profile_file(tmp_path, safe={"kind": "cpu", "security": True})
    script = (
        "import sys\n"
        "sys.modules['cryptography'] = None\n"
        "import tilewright as tw\n"
        "try:\n    with tw.open_cluster('safe', sys.argv[1]): pass\n"
        "except tw.ClusterError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=60
    )
    assert re.search(
        r"'safe' of .*: security: certificates cannot be made without the library crypto", done.stdout
    )


@pytest.mark.parametrize("given", [False, {}, {"require_encryption": False}])
def test_a_connection_may_be_left_without_encryption(given: Any, tmp_path: Path) -> None:
    with LocalCluster(n_workers=1, processes=False, protocol="tcp://", dashboard_address=":0") as cluster:
        options = {"kind": "existing", "address": cluster.scheduler_address, "security": given}
        with open_cluster("site", profile_file(tmp_path, site=options)) as own:
            assert own.submit(sum, [1, 2]).result() == 3


def test_encryption_that_the_address_does_not_go_with_is_told_of(tmp_path: Path) -> None:
    options = {"kind": "existing", "address": "tcp://127.0.0.1:1"}
    with (
        dask.config.set({"distributed.comm.require-encryption": True}),
        pytest.raises(ClusterError, match=r"tcp://127\.0\.0\.1:1: encryption required"),
        open_cluster("site", profile_file(tmp_path, site=options)),
    ):
        pass


def test_a_role_without_a_certificate_takes_that_of_another() -> None:
    given = {"tls_ca_file": "a", "tls_scheduler_cert": "s", "tls_worker_cert": "w", "tls_worker_key": "k"}
    assert shared(given) == given | {
        "tls_client_cert": "s",  # with its key inside
        "tls_client_key": None,
    }
    assert shared({"tls_ca_file": "a"}) == {"tls_ca_file": "a"}


def test_dask_wants_certificates_of_both_sides(authorities: tuple[dict[str, str], dict[str, str]]) -> None:
    """What `security` promises is Dask's doing: who shows none is not let in."""
    security = security_of("p", authorities[0], started=True)
    for role in ("client", "scheduler", "worker"):
        assert security.get_listen_args(role)["ssl_context"].verify_mode == ssl.CERT_REQUIRED
        assert security.get_connection_args(role)["ssl_context"].verify_mode == ssl.CERT_REQUIRED
