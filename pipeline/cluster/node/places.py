"""What a profile may fix on each node that its processes run on: the ports that they listen at, for which a firewall is
open, and the folder that workers keep temporary files in. Nothing of Dask is imported: jobs read profiles without."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from tilewright.kernels.arguments import shown
from tilewright.kernels.numbers import counted
from tilewright.pipeline.errors import ClusterError

LOOPBACK = "127.0.0.1"
"""Where clusters that are started here listen: whoever reaches a scheduler can run code by it."""
PORTS = ("scheduler_port", "worker_port", "nanny_port", "metrics_port")
"""Keys of a profile that are ports, or ranges of them."""
LEAST_PORT, MOST_PORT = 1024, 65535
"""Ports below are the system's own."""


@dataclass(frozen=True)
class Wanted:
    """What processes of a node listen at some ports of a profile's key."""

    key: str
    ports: range
    count: int
    """How many processes, each at a port of its own."""
    who: str
    """They are, in words, such as ``the 4 workers of a node``."""


def ports_of(called: str, key: str, given: Any) -> range:
    """The ports that a profile's key says: one, or the first and the last with a colon between them.

    Raises
    ------
    ClusterError
        It says none.
    """
    parts = [given] if isinstance(given, int) and not isinstance(given, bool) else str(given).split(":")
    numbers = [int(part) for part in parts if isinstance(part, int) or part.strip().isdecimal()]
    if (
        isinstance(given, int | str)
        and len(numbers) == len(parts) <= 2
        and LEAST_PORT <= numbers[0] <= numbers[-1] <= MOST_PORT
    ):
        return range(numbers[0], numbers[-1] + 1)
    raise ClusterError(
        f"{called}: {key}: {shown(given)} is neither a port nor a range of ports, such as 40000 or"
        f' "40000:40063" in quotes, from {LEAST_PORT} to {MOST_PORT}'
    )


def ports_text(ports: range) -> str:
    """As a profile has them, and Dask takes them."""
    return str(ports[0]) if len(ports) == 1 else f"{ports[0]}:{ports[-1]}"


def check_ports(called: str, wanted: Sequence[Wanted]) -> None:
    """Raise ClusterError where ports do not suffice for all that listen on one node: by themselves, or, where ranges of
    several keys have ports in common, together."""
    for size in range(1, len(wanted) + 1):
        for some in combinations(wanted, size):
            there = {port for one in some for port in one.ports}
            needed = sum(one.count for one in some)
            if len(there) >= needed:
                continue
            if size == 1:
                [one] = some
                first = min(one.ports[0], MOST_PORT + 1 - needed)
                enough = ports_text(range(first, first + needed))
                raise ClusterError(
                    f"{called}: {one.key}: {ports_text(one.ports)} has {counted(len(one.ports), 'port')}, and"
                    f" {one.who} need {needed}; give it {needed} or more, such as {enough!r}"
                )
            named = " and ".join(f"{one.key}: {ports_text(one.ports)}" for one in some)
            raise ClusterError(
                f"{called}: {named} have {counted(len(there), 'port')} together, and"
                f" {' and '.join(one.who for one in some)} need {needed} on one node; give each ports of its own"
            )


def is_free(port: int, host: str = "") -> bool:
    """Whether nobody listens at a port of this host: of all its addresses, or of that of ``host``."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_ports(called: str, wanted: Wanted, host: str = "") -> list[int]:
    """The first of some ports that nobody listens at, one for each that wants one. Raises ClusterError where others
    have left too few."""
    found: list[int] = []
    for port in wanted.ports:
        if is_free(port, host):
            found.append(port)
        if len(found) == wanted.count:
            return found
    raise ClusterError(
        f"{called}: {wanted.key}: {ports_text(wanted.ports)}: others listen at all but {len(found)} of these ports on"
        f" {socket.gethostname()}, and {wanted.who} need {wanted.count}; give it more, or others"
    )


def on_loopback(address: Any) -> Any:
    """A dashboard's address, or several with commas between; those that are ports alone, which Dask takes for ports of
    all networks, with the host added. What is no address is left to Dask."""
    if isinstance(address, bool) or not isinstance(address, int | str):
        return address
    ports = (one.strip().removeprefix(":") for one in str(address).split(","))
    return ",".join(f"{LOOPBACK}:{port}" if port.isdecimal() else port for port in ports)


def folder_here(called: str, given: Any) -> str:
    """The folder that a profile's ``local_directory`` means on this host, made where it is not there. Variables of the
    environment are replaced, and ``~`` is the home.

    Raises
    ------
    ClusterError
        It is no path, a variable is not set here, or nothing can be written there. Dask would take another folder.
    """
    key = f"{called}: local_directory: {shown(given)}"
    if not isinstance(given, str) or not given.strip() or not given.isprintable():
        raise ClusterError(f"{key} is no path; give it one, such as /local/$USER, or leave it out")
    path = os.path.expanduser(os.path.expandvars(given))
    if "$" in path:
        raise ClusterError(
            f"{key} means {path} on {socket.gethostname()}, where that variable is not set; set it there, or name"
            " another folder"
        )
    path = os.path.abspath(path)
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ClusterError(
            f"{key}: nothing can be written to {path} on {socket.gethostname()} ({error.strerror}); name another folder"
        ) from error
    return path
