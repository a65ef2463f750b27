"""Ports and folders that a profile fixes."""

from __future__ import annotations

import os
import re
import socket
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tilewright.pipeline.cluster.cluster import open_cluster
from tilewright.pipeline.cluster.node.places import (
    Wanted,
    check_ports,
    folder_here,
    free_ports,
    is_free,
    on_loopback,
    ports_of,
    ports_text,
)
from tilewright.pipeline.errors import ClusterError


@pytest.fixture
def ports() -> range:
    """Twelve in a row that nobody listens at."""
    first = 30000 + os.getpid() % 10000
    while not all(is_free(port) for port in range(first, first + 12)):
        first += 12
    return range(first, first + 12)


@pytest.mark.parametrize(
    ("given", "ports"),
    [(40000, range(40000, 40001)), ("40000", range(40000, 40001)), ("40000:40063", range(40000, 40064))],
)
def test_ports_are_one_or_a_range(given: int | str, ports: range) -> None:
    assert ports_of("p", "worker_port", given) == ports
    assert ports_of("p", "worker_port", ports_text(ports)) == ports


@pytest.mark.parametrize(
    "given", [0, 80, 65536, True, 4e4, "40001:40000", "a:b", "1:2:3", "40000:", "-40000", [40000], ""]
)
def test_what_are_no_ports_is_refused(given: Any) -> None:
    said = re.escape(f"p: worker_port: {given!r} is neither a port nor a range of ports, such as 40000 or")
    with pytest.raises(ClusterError, match=said):
        ports_of("p", "worker_port", given)


def wanted(key: str, ports: range, count: int) -> Wanted:
    return Wanted(key, ports, count, f"{count} {key}s")


def test_each_range_has_to_suffice_by_itself() -> None:
    check_ports("p", [wanted("w", range(40000, 40004), 4), wanted("n", range(40004, 40008), 4)])
    said = "p: w: 65534:65535 has 2 ports, and 4 ws need 4; give it 4 or more, such as '65532:65535'"
    with pytest.raises(ClusterError, match=re.escape(said)):
        check_ports("p", [wanted("w", range(65534, 65536), 4)])


def test_ranges_with_ports_in_common_have_to_suffice_together() -> None:
    """Each pair of these has enough, and the three have not."""
    three = [wanted(key, range(40000, 40005), 2) for key in "abc"]
    check_ports("p", three[:2])
    said = "a: 40000:40004 and b: 40000:40004 and c: 40000:40004 have 5 ports together, and 2 as and 2 bs and 2 cs n"
    with pytest.raises(ClusterError, match=re.escape(said)):
        check_ports("p", three)


def test_ports_that_others_listen_at_are_passed_over(ports: range) -> None:
    with ExitStack() as stack:
        for port in (ports[0], ports[2]):
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        assert free_ports("p", wanted("w", ports, 3)) == [ports[1], ports[3], ports[4]]
        said = f"w: {ports[0]}:{ports[2]}: others listen at all but 1 of these ports on .*, and 2 ws need 2"
        with pytest.raises(ClusterError, match=said):
            free_ports("p", wanted("w", ports[:3], 2))


@pytest.mark.parametrize(
    ("given", "address"),
    [
        (":8787", "127.0.0.1:8787"),
        (8787, "127.0.0.1:8787"),
        ("0.0.0.0:8787", "0.0.0.0:8787"),
        (":1,h:2", "127.0.0.1:1,h:2"),
    ],
)
def test_a_dashboard_is_on_loopback_unless_a_host_is_named(given: Any, address: str) -> None:
    assert on_loopback(given) == address


def test_a_folder_is_that_of_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH_OF_JOB", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert folder_here("p", "$SCRATCH_OF_JOB/a/b") == f"{tmp_path}/a/b"
    assert folder_here("p", "${SCRATCH_OF_JOB}") == str(tmp_path)
    assert folder_here("p", "~/x") == f"{tmp_path}/home/x"
    assert (tmp_path / "a" / "b").stat().st_mode & 0o77 == 0, "nobody else's"
    assert not list((tmp_path / "a" / "b").iterdir())
    (tmp_path / "file").touch()
    for given, said in (
        ("$NO_SUCH/x", "means $NO_SUCH/x on "),
        (f"{tmp_path}/file/x", f"nothing can be written to {tmp_path}/file/x on "),
        (5, "5 is no path"),
        ("", "'' is no path"),
    ):
        with pytest.raises(ClusterError, match=re.escape(said)):
            folder_here("p", given)


def profile(folder: Path, **options: Any) -> Path:
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump({"profiles": {"own": {"kind": "cpu", "threads_per_worker": 1} | options}}))
    return path


# Tornado leaves a socket to Python's collector where the port is taken that it was to listen at.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in.*<socket.socket:pytest.PytestUnraisableExceptionWarning"
)
def test_a_cluster_on_this_host_keeps_to_its_ports(
    ports: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH_OF_JOB", str(tmp_path))
    keys = {
        "scheduler_port": ports[:2],
        "worker_port": ports[2:5],
        "nanny_port": ports[5:8],
        "metrics_port": ports[8:12],
    }
    own = profile(
        tmp_path,
        n_workers=2,
        local_directory="$SCRATCH_OF_JOB/scratch",
        **{key: ports_text(of) for key, of in keys.items()},
    )
    with socket.create_server(("127.0.0.1", ports[8])), open_cluster("own", own) as client:
        assert int(client.scheduler.address.rpartition(":")[2]) == ports[0]
        by_address = client.scheduler_info()["workers"]
        workers = by_address.values()
        found = {
            "worker_port": {int(address.rpartition(":")[2]) for address in by_address},
            "nanny_port": {int(worker["nanny"].rpartition(":")[2]) for worker in workers},
            "metrics_port": {worker["services"]["dashboard"] for worker in workers},
        }
        for key, used in found.items():
            assert len(used) == 2
            assert used <= set(keys[key]), key
        assert ports[8] not in found["metrics_port"], "somebody else listens there"
        for port in found["metrics_port"]:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
                assert answer.status == 200
        assert all(worker["local_directory"].startswith(f"{tmp_path}/scratch/") for worker in workers)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"worker_port": 40000}, "worker_port: 40000 has 1 port, and 2 workers need 2; give it 2 or more, such as '40"),
        ({"nanny_port": "40000:40001", "worker_port": "40000:40001"}, "have 2 ports together, and 2 workers and the "),
        ({"metrics_port": "20000:20001", "worker_class": "distributed.Nanny"}, "says metrics_port and worker_class"),
        ({"kind": "local", "n_workers": 1, "metrics_port": 40000}, "does not go with kind local, whose worker"),
        ({"local_directory": "$NO_SUCH"}, "local_directory: '$NO_SUCH' means $NO_SUCH on "),
    ],
)  # fmt: skip
def test_what_no_cluster_could_keep_to_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    own = profile(tmp_path, **({"n_workers": 2} | options))
    with pytest.raises(ClusterError, match=re.escape(said)), open_cluster("own", own):
        pass
