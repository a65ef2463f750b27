"""What a worker has done since it was started, counted: its scheduler learns it with every heartbeat, and Prometheus by
the worker's ``/metrics`` where prometheus_client is installed, as with Dask's own metrics."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

from tilewright.pipeline.cluster.here.worker import HereWorker
from tilewright.pipeline.cluster.identity import address_of

METRIC = "tilewright"
"""Under which name heartbeats have it."""
EVERYWHERE = ("0.0.0.0", "::")
"""All addresses of a host, as a server is bound to them."""


@dataclass
class Meters:
    """Of one worker."""

    tiles: int = 0
    """Stored."""
    pieces: int = 0
    """Of text, counted."""
    read_nbytes: int = 0
    """Of inputs, counted after decoding where they are arrays, and as stored where they are text."""
    write_nbytes: int = 0
    """Of tiles of C, before they are encoded."""
    operations: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Busy, by stage."""
    on_gpu: bool = False
    """Whether the event loop is attached to a GPU."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(
        self,
        stages: Mapping[str, float],
        *,
        tiles: int = 0,
        pieces: int = 0,
        read_nbytes: int = 0,
        write_nbytes: int = 0,
        operations: int = 0,
    ) -> None:
        with self._lock:
            self.tiles += tiles
            self.pieces += pieces
            self.read_nbytes += read_nbytes
            self.write_nbytes += write_nbytes
            self.operations += operations
            for stage, seconds in stages.items():
                self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def told(self) -> dict[str, Any]:
        """All of it, and of the GPU how much memory is there and free; on the event loop."""
        with self._lock:
            found: dict[str, Any] = {
                "tiles": self.tiles,
                "pieces": self.pieces,
                "read_nbytes": self.read_nbytes,
                "write_nbytes": self.write_nbytes,
                "operations": self.operations,
                "seconds": dict(self.seconds),
            }
        if self.on_gpu:
            from numba import cuda

            # A GPU that fails tells its tasks: neither heartbeats nor Dask's own metrics are to end by it.
            with suppress(Exception):
                memory = cuda.current_context().get_memory_info()
                found |= {"device_free_nbytes": int(memory.free), "device_total_nbytes": int(memory.total)}
        return found


_meters: WeakKeyDictionary[Any, Meters] = WeakKeyDictionary()
"""Of the workers in this process: of several, where they are threads of it."""
_making = threading.Lock()


def meters_of(worker: Any) -> Meters:
    """Of a worker of Dask's, which tells them from the first call on."""
    found = _meters.get(worker)
    if found is None:
        with _making:
            found = _meters.get(worker)
            if found is None:
                found = _meters[worker] = Meters()
                told = found.told
                # A new mapping: the event loop may be on its way through the old one.
                worker.metrics = {
                    **worker.metrics,
                    METRIC: lambda known: told() | {"metrics": served_at(known)},
                }
                if not isinstance(worker, HereWorker):  # which serves no `/metrics`
                    _register()
    return found


def served_at(worker: Any) -> str | None:
    """Where a worker serves ``/metrics``, as ``host:port``; None: nowhere. On loopback only its own host gets there."""
    server = getattr(worker, "http_server", None)
    if server is None or not getattr(server, "port", None):
        return None
    host = worker.ip if server.address in EVERYWHERE else server.address
    return f"{host}:{server.port}"


_registered = False


def _register() -> None:
    """Have Prometheus collect what there is, once a process."""
    global _registered
    if _registered or find_spec("prometheus_client") is None:
        return
    import prometheus_client

    prometheus_client.REGISTRY.register(Collector())
    _registered = True


class Collector:
    """What Prometheus collects, for each worker of this process."""

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        told = {address_of(worker): meters.told() for worker, meters in list(_meters.items())}
        for name, key, help_text in (
            ("tiles", "tiles", "Tiles of matrix products that were stored"),
            ("pieces", "pieces", "Pieces of text that were counted"),
            ("read_bytes", "read_nbytes", "Bytes of inputs that were read"),
            ("write_bytes", "write_nbytes", "Bytes of tiles that were written, before they are encoded"),
            ("operations", "operations", "Multiplications and additions"),
        ):
            counter = CounterMetricFamily(f"tilewright_{name}", help_text, labels=["worker"])
            for address, found in told.items():
                counter.add_metric([address], found[key])
            yield counter
        busy = CounterMetricFamily(
            "tilewright_stage_seconds", "Busy seconds by stage", labels=["worker", "stage"]
        )
        for address, found in told.items():
            for stage, seconds in found["seconds"].items():
                busy.add_metric([address, stage], seconds)
        yield busy
        for name, key, help_text in (
            ("device_memory_free_bytes", "device_free_nbytes", "Free memory of the worker's GPU"),
            ("device_memory_total_bytes", "device_total_nbytes", "Memory of the worker's GPU"),
        ):
            gauge = GaugeMetricFamily(f"tilewright_{name}", help_text, labels=["worker"])
            for address, found in told.items():
                if key in found:
                    gauge.add_metric([address], found[key])
            yield gauge
