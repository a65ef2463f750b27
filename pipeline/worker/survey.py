"""What the workers of a cluster have, asked before work is planned for them: the question, and what a worker does to
answer it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dask.system import CPU_COUNT

from tilewright.kernels.choices import DeviceKind
from tilewright.kernels.cpu.loops import start_compiler, usable_cores
from tilewright.kernels.gemm import scratch
from tilewright.pipeline import config
from tilewright.pipeline.cluster.answers import ask_all
from tilewright.pipeline.cluster.here.worker import memory_limit, pause_share
from tilewright.pipeline.cluster.identity import address_of
from tilewright.pipeline.errors import ClusterError, DeviceUnavailableError, TilewrightError
from tilewright.pipeline.plan.decoding import workspace_for
from tilewright.pipeline.plan.inputs import NVCOMP_UNKNOWN, WorkerFacts
from tilewright.pipeline.threads import free_thread_buffers
from tilewright.pipeline.transfer.lane import free_device_memory
from tilewright.pipeline.worker.leftovers import free_leftovers
from tilewright.pipeline.worker.meters import meters_of

if TYPE_CHECKING:
    from distributed import Client

KINDS: tuple[DeviceKind, ...] = "cpu", "cuda"


def survey(client: Client, device: str, *, loops: Sequence[DeviceKind] = KINDS) -> list[WorkerFacts]:
    """The facts about every worker that is there; unlike `await_workers` it waits for none.

    loops: on which kind of device the work will soon need Numba's compiled loops, so that it is set up meanwhile.

    Raises
    ------
    ClusterError
        There are no workers, they would not all use the same kind of device, one of them cannot be asked or runs
        another Tilewright than this process, or the scheduler does not answer.
    """
    facts: dict[str, WorkerFacts] = {}
    for worker, answer in ask_all(client, worker_facts, device, loops, config.get("gpu-decoding")).items():
        if isinstance(answer, TilewrightError):
            raise answer
        facts[worker] = answer
    if not facts:
        raise ClusterError("the cluster has no workers; start some, or wait until they have joined")
    kinds = {fact.device for fact in facts.values()}
    if len(kinds) > 1:
        raise ClusterError(
            f"some of the {len(facts)} workers have a GPU and some have none; say --device cpu to use the CPU on"
            " all, or give the work a cluster whose workers are alike"
        )
    return list(facts.values())


def facts_here(device: str, host_memory: int | None, device_memory: int | str | None) -> WorkerFacts:
    """This machine in place of a worker, for a plan without a cluster."""
    from tilewright.kernels.gpu.device import devices
    from tilewright.kernels.gpu.device_choice import cuda_available, resolve_device

    asked = config.get("device-memory", device_memory)
    elsewhere = device == "cuda" and asked is not None and not cuda_available()
    try:
        kind = "cuda" if elsewhere else resolve_device(device)
    except DeviceUnavailableError as error:
        raise DeviceUnavailableError(
            f"{error}; to plan for GPUs elsewhere, give the memory they have free (device_memory, --device-memory), or"
            " name them (gpu, --gpu)"
        ) from None
    cores = cores_here(), usable_cores(), os.cpu_count() or 1
    limit = memory_limit() if host_memory is None else host_memory
    name, free = "CPU", None
    if elsewhere:
        name, free = "GPU", asked
    elif kind == "cuda":
        first = devices()[0]
        name, free = first.name, first.memory_free or first.memory_total
    pause = pause_nbytes(limit, pause_share())
    asks = kind == "cuda" and not elsewhere and config.get("gpu-decoding")
    missing = no_nvcomp() if asks else NVCOMP_UNKNOWN
    return WorkerFacts(kind, name, free, limit, *cores, pause_nbytes=pause, no_nvcomp=missing)


async def worker_facts(
    device: str, loops: Sequence[DeviceKind], decoders: bool, dask_worker: Any
) -> WorkerFacts | TilewrightError:
    """Describe this worker and resolve ``device`` (``auto``, ``cuda`` or ``cpu``) on it.

    loops: on which kind of device work will need compiled loops, so that Numba should start now: a GPU's bytes may be
    moved by loops on the CPU, whatever it computes. decoders: whether to look for what decodes on a GPU.
    ``dask_worker`` is filled in by `identity.answer`, which calls this on the worker's event loop. What may take long
    runs in threads: the first look for a GPU; then `free_what_is_over`, which on a GPU's worker is the first to import
    numba.cuda and makes the context that the loop is attached to afterwards.

    A TilewrightError (``cuda`` was asked for and this worker has no usable GPU) is returned, not raised: the worker
    would log a raised one at length.
    """
    from tilewright.kernels.gpu.device_choice import resolve_device

    limit = dask_worker.memory_manager.memory_limit
    pause = pause_nbytes(limit, dask_worker.memory_manager.memory_pause_fraction)
    try:
        found = await asyncio.to_thread(resolve_device, device)
    except TilewrightError as error:
        return error
    if found in loops:
        start_compiler()  # while the job is planned and its first bytes are read
    await asyncio.to_thread(free_what_is_over, found)
    name, free = "CPU", None
    if found == "cuda":
        from numba import cuda

        from tilewright.pipeline.worker.engines import arrival_of, expects
        from tilewright.pipeline.worker.peers import answer_peers

        answer_peers(dask_worker, arrival_of, expects)
        context = cuda.current_context()  # attaches the event loop to the GPU too, for `end_run`
        context.memory_manager.deallocations.clear()  # frees what Numba has queued for deallocation
        free = int(context.get_memory_info().free)
        name = cuda.get_current_device().name
        name = name.decode() if isinstance(name, bytes) else str(name)
    cores = cores_here(), usable_cores(), os.cpu_count() or 1
    threads = dask_worker.state.nthreads
    meters_of(dask_worker).on_gpu |= found == "cuda"
    missing = await asyncio.to_thread(no_nvcomp) if decoders and found == "cuda" else NVCOMP_UNKNOWN
    return WorkerFacts(
        found, name, free, limit or None, *cores, address_of(dask_worker), pause, threads, missing
    )


def no_nvcomp() -> str:
    """Why nvCOMP cannot decode on this thread's GPU; empty: it can."""
    from numba import cuda

    from tilewright.kernels.decoding import nvcomp

    cuda.current_context()  # attaches the thread to the GPU, whose memory for decoding is asked for
    try:
        nvcomp.usable(workspace_for)
    except nvcomp.NvcompError as error:
        return str(error)
    return ""


def pause_nbytes(limit_nbytes: int | None, fraction: float | bool | None) -> int | None:
    """From how many bytes on Dask gives a worker no more tasks. fraction: of its limit, as Dask's setting gives it."""
    return int(limit_nbytes * fraction) if limit_nbytes and fraction else None


def cores_here() -> int:
    """Cores that BLAS uses in this process. Dask starts several processes of one host with OMP_NUM_THREADS=1."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdigit() and int(threads) > 0 else CPU_COUNT


def free_what_is_over(device: str) -> None:
    """Free what no run uses here any more; waits for ending threads and for the GPU's pending work."""
    if device == "cuda":
        from numba import cuda

        cuda.current_context()  # attaches this thread to the GPU before device memory is freed
    free_leftovers()
    free_thread_buffers()
    if device == "cuda":
        scratch.release()  # workspace of past runs' streams; this run's stream gets its own
        free_device_memory()
