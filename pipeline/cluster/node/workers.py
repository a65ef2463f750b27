"""What a profile fixes of a node, for Dask: workers that listen at such ports, and the options of a cluster
on this host."""

from __future__ import annotations

import logging
import warnings
from importlib.util import find_spec
from typing import Any

from distributed import Nanny, Worker
from distributed.utils import get_ip_interface

from tilewright.kernels.numbers import counted
from tilewright.pipeline.cluster.node.places import (
    LOOPBACK,
    PORTS,
    Wanted,
    check_ports,
    folder_here,
    free_ports,
    is_free,
    ports_of,
    ports_text,
)
from tilewright.pipeline.errors import ClusterError

logger = logging.getLogger(__name__)


class NodeWorker(Worker):
    """A worker that takes one of some ports, and serves what Prometheus asks for at one of others: the first that is
    free, since the other workers of its node, and those of another job there, have the same to choose from."""

    def __init__(
        self,
        *arguments: Any,
        listen_at: str | None = None,
        metrics_at: tuple[str, str] | None = None,
        **options: Any,
    ) -> None:
        """listen_at: a port, or a range of ports. metrics_at: a host's address, and such ports; None: one on
        loopback."""
        if listen_at is not None:
            options["port"] = listen_at
        self._metrics_at = metrics_at
        super().__init__(*arguments, **options)

    def start_http_server(self, routes: Any, dashboard_address: Any, *arguments: Any, **options: Any) -> None:
        if self._metrics_at is None:
            super().start_http_server(routes, dashboard_address, *arguments, **options)
            return
        if find_spec("prometheus_client") is None:
            logger.warning(
                "metrics_port: prometheus_client is not installed, so that there are no metrics to serve"
            )
        host, given = self._metrics_at
        ports = ports_of("a worker", "metrics_port", given)
        for port in ports:
            if not is_free(port, host):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that another port was taken, which is seen below
                super().start_http_server(routes, f"{host}:{port}", *arguments, **options)
            if self.http_server.port == port:
                return
            self.http_server.stop()  # somebody was faster, and Dask took any port
        logger.warning(
            "metrics_port: %s: none of them is free for %s, which serves metrics on %s alone; give the profile more",
            *(ports_text(ports), self.name, LOOPBACK),
        )
        super().start_http_server(routes, f"{LOOPBACK}:0", *arguments, **options)


class NodeNanny(Nanny):
    """Of such a worker."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, worker_class=NodeWorker, **options)


def options_on_this_host(called: str, kind: str, profile: dict[str, Any], workers: int) -> dict[str, Any]:
    """The options of a cluster of ``workers`` on this host, with its ports and its folder as Dask takes them.

    Raises
    ------
    ClusterError
        Ports are none, or too few for so many workers, or mean nothing for the kind; or the folder cannot be used.
    """
    found = dict(profile)
    if found.get("local_directory") is not None:
        found["local_directory"] = folder_here(called, found["local_directory"])
    ports = {key: ports_of(called, key, found[key]) for key in PORTS if found.get(key) not in (None, 0)}
    if kind == "local" and (odd := [key for key in ports if key != "scheduler_port"]):
        raise ClusterError(
            f"{called}: {odd[0]}: {found[odd[0]]!r} does not go with kind local, whose worker is in this process; leave"
            " it out, or take kind cpu, or cuda, whose workers are processes"
        )
    whose = counted(workers, "worker")
    who = {
        "scheduler_port": "the scheduler",
        "worker_port": whose,
        "nanny_port": f"the nannies of {whose}",
        "metrics_port": f"the metrics of {whose}",
    }
    counts = dict.fromkeys(PORTS, workers) | {"scheduler_port": 1}
    wanted = {key: Wanted(key, of, counts[key], who[key]) for key, of in ports.items()}
    check_ports(called, list(wanted.values()))
    network = found.get("interface")
    host = "" if network or found.get("host") else LOOPBACK
    free = {key: free_ports(called, one, host) for key, one in wanted.items()}
    if "scheduler_port" in ports:
        [found["scheduler_port"]] = free["scheduler_port"]
    if "worker_port" in ports:
        found["worker_port"] = ports_text(ports["worker_port"])
    if "nanny_port" in ports:
        found["port"] = ports_text(ports["nanny_port"])
    if "metrics_port" in ports:
        if found.get("worker_class") is not None:
            raise ClusterError(f"{called} says metrics_port and worker_class; leave one away")
        at = get_ip_interface(network) if network else LOOPBACK
        found |= {"worker_class": NodeNanny, "metrics_at": (at, ports_text(ports["metrics_port"]))}
    return {key: value for key, value in found.items() if key not in ("nanny_port", "metrics_port")}
