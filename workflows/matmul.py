"""The matrix product of two stored matrices: open, survey, plan, run, verify, publish."""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import zarr
from distributed import Client
from distributed.comm import get_address_host

from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.gemm import check
from tilewright.kernels.gemm.workspace import Parent, workspace_nbytes
from tilewright.kernels.host_loops import share_of_cores, usable_cores
from tilewright.kernels.memory import format_nbytes
from tilewright.pipeline import config, store, tasks
from tilewright.pipeline.cluster import Cluster, open_cluster
from tilewright.pipeline.errors import (
    DeviceMemoryError,
    DTypeError,
    OptionError,
    OutputError,
    PlanError,
    ShapeError,
    StoreError,
    VerificationError,
)
from tilewright.pipeline.events import Listener, Notice, counted, ignore, on_waiting
from tilewright.pipeline.execute import MatmulRun, on_all, run_tiles
from tilewright.pipeline.layout import LINE_NBYTES
from tilewright.pipeline.ledger import FILE_NAME, Ledger, Past, fingerprint, read_past
from tilewright.pipeline.output import (
    Output,
    check_given_output,
    check_output_free,
    create_output,
    output_chunks,
    partial_path,
    resume_output,
)
from tilewright.pipeline.plan import CODER_NBYTES, LANE_NBYTES, MatmulPlan, fitting_unit
from tilewright.pipeline.plan import plan_matmul as plan_tiles
from tilewright.pipeline.product import Product
from tilewright.pipeline.region_write import encoders_nbytes, stored_nbytes
from tilewright.pipeline.store import Source
from tilewright.pipeline.submit import await_workers, survey
from tilewright.pipeline.tasks import WorkerFacts, cores_here
from tilewright.pipeline.terms import TILE_BUFFERS, Geometry, Limits, no_workspace
from tilewright.pipeline.verify import check_rounds, verify_product

SMALL_PRODUCTS = 2**36
"""Multiplications that two cores have done in a second: of a product of fewer, the time counts and not the memory."""

CODING_SHARE = 1 / 8
"""Of a worker's memory, what threads that decode may hold, and those that encode as much, before they are fewer than
there are cores."""

MOST_WORKERS = 10**6
"""That a plan is asked for: each is an entry in a list, and far beyond every cluster they would only fill memory."""


def matmul(
    a: Source,
    b: Source,
    out: Source,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    dtype: str | np.dtype | None = None,
    precision: str = "full",
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    device: str = "auto",
    device_memory: int | str | None = None,
    resume: bool = True,
    verify: bool = True,
    overwrite: bool = False,
    listener: Listener = ignore,
) -> MatmulRun:
    """Store C = op(A) op(B), with A, B and C in Zarr and op the identity or the transpose.

    Parameters
    ----------
    a, b
        Two-dimensional arrays of numbers: paths, URLs or open ``zarr.Array``s. op(A) is m × k, op(B) is k × n.
    out
        Where C (m × n) goes. A path gets its array only when C is whole (it grows under ``<out>.partial``);
        a URL or an open array is written in place.
    transpose_a, transpose_b
        Take the transpose of A or B; nothing is stored transposed.
    dtype
        C's dtype where it shall be wider than ``numpy.matmul`` would make it (int64 for int32 factors, say). Not
        bfloat16, which zarr-python does not store; `tilewright.kernels.matmul` multiplies arrays of it.
    precision
        ``full`` multiplies every dtype as itself; ``split``, ``tf32``, ``bf16`` and ``fp16`` use tensor cores, where
        ``fp16`` takes operands of at most 65504.
    cluster
        A profile of ``cluster_file``, a scheduler's address, or a ``distributed.Client``.
    device
        ``auto`` (the GPU if there is one), ``cuda`` or ``cpu``.
    device_memory
        The most that tiles and panels may take on each worker, in bytes or as ``"8GiB"``.
    resume
        Keep the finished tiles of an earlier run of the same product that was stopped.
    verify
        Check C against A and B before it gets its name (see ``tilewright.verify``).
    overwrite
        Replace what stands at ``out``, once the new C is whole.
    listener
        Is called with every event (``tilewright.pipeline.events``).

    Raises
    ------
    TilewrightError
        One of its subclasses, for everything a caller can cause; nothing half-written stands at ``out`` then.
    DeviceMemoryError
        A worker ran out of memory under the plan, and under a smaller one that was made in its place; or half of C
        was finished already, which no plan of other tiles could have kept.
    """
    config.check_all()
    left, right, c_dtype = _open_factors(a, b, transpose_a, transpose_b, dtype, precision)
    check_output_free(out, overwrite=overwrite)
    _check_distinct(out, left, right)
    _check_shareable([left, right, out])
    if verify:
        check_rounds(config.get("verify-rounds"))  # before the work that the check would come after
    job = _Job(
        left,
        right,
        out,
        c_dtype,
        transpose_a,
        transpose_b,
        precision,
        device_memory,
        verify,
        overwrite,
        listener,
    )
    # On a CPU floating point is BLAS's, and Numba, which the check needs, comes behind the product; unless that is
    # over so soon that the check would wait for it.
    loops = c_dtype.kind in "iu" or left.size * right.shape[int(not transpose_b)] < SMALL_PRODUCTS
    with open_cluster(cluster, cluster_file, loops=loops) as client:
        await_workers(client, waiting=on_waiting(listener, "matmul", "ends it"))
        facts = survey(client, device, loops=loops)
        request = {
            "transpose": [transpose_a, transpose_b],
            "dtype": str(c_dtype),
            "precision": precision,
            "device": facts[0].device,
        }
        digest = fingerprint(left, right, request)
        try:
            return _attempt(client, job, facts, digest, resume)
        except _TooLarge as failed:
            first = failed
        done, count = _recorded(out, digest), first.plan.tile_count
        if 2 * done >= count:
            raise _out_of_memory(
                first,
                f"a smaller one would have to give up its {done} finished tiles of {count}; they are kept, and the"
                " same command goes on with them",
            ) from first.error
        on_all(client, tasks.release_memory)
        facts = survey(client, device, loops=loops)  # what is free has changed, or it would have fitted
        try:
            return _attempt(client, job, facts, digest, resume=False, failed=first.plan)
        except PlanError as error:
            raise _out_of_memory(first, f"no plan of half of that fits: {error}") from error
        except _TooLarge as second:
            raise _out_of_memory(second, f"the plan before it took {_peak(first.plan)}") from second.error


@dataclass(frozen=True)
class _Job:
    """A product as it was asked for, and checked: what every attempt at it has in common."""

    a: zarr.Array[Any]
    b: zarr.Array[Any]
    out: Source
    dtype: np.dtype
    transpose_a: bool
    transpose_b: bool
    precision: str
    device_memory: int | str | None
    verify: bool
    overwrite: bool
    listener: Listener


class _TooLarge(Exception):
    """A worker ran out of memory under a plan."""

    def __init__(self, plan: MatmulPlan, error: DeviceMemoryError) -> None:
        super().__init__(plan, error)
        self.plan = plan
        self.error = error


def _out_of_memory(failed: _TooLarge, before: str) -> DeviceMemoryError:
    return DeviceMemoryError(
        f"{failed.error}; the plan took {_peak(failed.plan)} a worker, and {before}; free memory there, or set"
        " --device-memory (tilewright.device-memory) to what the workers really have"
    )


def _peak(plan: MatmulPlan) -> str:
    return format_nbytes(plan.device_peak_nbytes)


def _attempt(
    client: Client,
    job: _Job,
    facts: list[WorkerFacts],
    digest: str,
    resume: bool,
    failed: MatmulPlan | None = None,
) -> MatmulRun:
    """Plan, run, verify and publish once.

    ``failed`` is the plan under which a worker ran out of memory before: this one takes half of its memory at most,
    so its tiles are others, and the finished ones of the failed plan are given up with the array that holds them.

    Raises
    ------
    _TooLarge
        A worker ran out of memory. The workers hold nothing of the run, and the growing output and its record stand
        as after any other error.
    """
    listener = job.listener
    most_nbytes = failed.device_peak_nbytes // 2 if failed is not None else None
    past = _find_past(job.out, digest) if resume and failed is None else None
    plan = _plan(
        job.a,
        job.b,
        job.out,
        job.dtype,
        job.transpose_a,
        job.transpose_b,
        facts,
        job.device_memory,
        past,
        job.precision,
        most_nbytes,
    )
    if failed is not None:
        place = "the GPU" if facts[0].device == "cuda" else "a worker"
        given_up = _recorded(job.out, digest)
        lost = f"; the {given_up} tiles that were finished are given up" if given_up else ""
        listener(
            Notice(
                f"{place} ran out of memory under a plan of {_peak(failed)} a worker; it goes on with one of"
                f" {_peak(plan)}{lost}"
            )
        )
    if past is not None and not _goes_on(plan, past):
        listener(Notice("an earlier run left tiles that do not fit the memory of this one; it starts anew"))
        past = None
    elif past is None and resume and failed is None and _holds_record(job.out):
        listener(
            Notice(
                "an earlier run left tiles of other inputs, of another request, or of another version of Tilewright;"
                " they are replaced, and it starts anew"
            )
        )
    listener(Notice(_choice(facts, plan)))
    # What stands at a URL, where arrays are written in place, is what the failed plan left: ours to replace.
    overwrite = job.overwrite or (failed is not None and store.local_path(job.out) is None)
    output, recorded = _open_output(job.out, job.a, plan, digest, past, job.dtype, overwrite)
    ledger = None
    try:
        finished = _still_stored(output, plan, recorded)
        if len(finished) < len(recorded):
            lost = counted(len(recorded) - len(finished), "tile")
            listener(
                Notice(
                    f"{lost} of an earlier run lost stored pieces in {output.partial}, or parts of them, and will be"
                    " computed again"
                )
            )
        product = Product(
            a=job.a,
            b=job.b,
            c=output.array,
            plan=plan,
            device=facts[0].device,
            precision=job.precision,
            read_threads=plan.read_threads,
            write_threads=plan.write_threads,
            run=uuid.uuid4().hex[:12],
            sharing=_sharing(facts),
        )
        if output.partial is not None:
            # The lock says that no other client lives which writes there; its workers may not know that yet.
            on_all(client, tasks.end_past_runs, store.place_of(output.array), product.run)
            ledger = Ledger(output.partial, digest, plan, finished)
        try:
            done = run_tiles(
                client, product, finished, listener, ledger.record if ledger is not None else _forget
            )
        except DeviceMemoryError as error:
            raise _TooLarge(plan, error) from None
        verification = None
        if job.verify:
            verification = verify_product(
                client,
                job.a,
                job.b,
                output.array,
                transpose_a=job.transpose_a,
                transpose_b=job.transpose_b,
                rounds=config.get("verify-rounds"),
                precision=job.precision,
                listener=listener,
            )
            if not verification.conclusive:
                listener(Notice(f"{verification}; the product is kept unverified"))
            elif not verification.passed:
                if ledger is not None and output.partial is not None:
                    ledger.remove(output.partial)  # its tiles are not to be trusted by a run that resumes
                raise VerificationError(
                    f"{verification}; the product is kept at {store.name_of(output.array)} for inspection,"
                    " and the next run computes it anew"
                )
        # The record goes once C has its name, so that a crash before loses nothing; then what C replaces.
        for left in output.publish(ledger.remove) if ledger is not None else output.publish():
            listener(Notice(left))
    finally:
        try:
            if ledger is not None:
                ledger.close()
        finally:
            output.release()
    return MatmulRun(
        plan=plan,
        device=facts[0].name,
        kernel=done.kernel,
        seconds=done.seconds,
        stages=done.stages,
        read_nbytes=done.read_nbytes,
        shared_nbytes=done.shared_nbytes,
        write_nbytes=done.write_nbytes,
        operations=done.operations,
        workers=done.workers,
        resumed=len(finished),
        verification=verification,
    )


def plan_matmul(
    a: Source,
    b: Source,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    dtype: str | np.dtype | None = None,
    precision: str = "full",
    workers: int = 1,
    device: str = "auto",
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    cluster: Cluster | None = None,
    cluster_file: str | None = None,
) -> MatmulPlan:
    """The plan that ``matmul`` would follow, from nothing but metadata.

    It is for ``workers`` workers, each with all the memory and cores of this machine (or a GPU like its first), whose
    processes may hold ``host_memory`` each; or, where a ``cluster`` is named, for the workers that are found there and
    what they have (a profile's own cluster is started for that).

    Raises as ``matmul`` does for factors that cannot be multiplied, PlanError where no tile fits, and OptionError
    for fewer workers than one, more than `MOST_WORKERS`, workers or their memory beside a cluster, or a wrong setting.
    """
    config.check_all()
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise OptionError(f"workers={workers!r}: a product needs a whole number of workers, one or more")
    if workers > MOST_WORKERS:
        raise OptionError(f"workers={workers}: a plan is for {MOST_WORKERS} workers at most")
    if cluster is not None and (workers != 1 or host_memory is not None):
        named = f"workers={workers}" if workers != 1 else f"host_memory={host_memory!r}"
        raise OptionError(
            f"{named} beside a cluster: a plan is for the workers that are found there, and what they have; leave one"
            " of the two away"
        )
    left, right, c_dtype = _open_factors(a, b, transpose_a, transpose_b, dtype, precision)
    if cluster is None:
        facts = [_facts_here(device, host_memory)] * workers
    else:
        with open_cluster(cluster, cluster_file) as client:
            await_workers(client, waiting=on_waiting(ignore, "plan", "ends it"))
            facts = survey(client, device, loops=False)
    return _plan(left, right, None, c_dtype, transpose_a, transpose_b, facts, device_memory, None, precision)


def _open_factors(
    a: Source, b: Source, transpose_a: bool, transpose_b: bool, dtype: str | np.dtype | None, precision: str
) -> tuple[zarr.Array[Any], zarr.Array[Any], np.dtype]:
    left = store.open_array(a, ndim=2, role="A")
    right = store.open_array(b, ndim=2, role="B")
    inner_left, inner_right = left.shape[0 if transpose_a else 1], right.shape[1 if transpose_b else 0]
    if inner_left != inner_right:
        hint = ""
        if left.shape[0 if not transpose_a else 1] == inner_right:
            hint = "; transposing A would make them agree"
        elif right.shape[1 if not transpose_b else 0] == inner_left:
            hint = "; transposing B would make them agree"
        raise ShapeError(
            f"inner sides differ: op(A) from {store.name_of(left)} has {inner_left} columns and op(B) from"
            f" {store.name_of(right)} has {inner_right} rows; they must be equal{hint}"
        )
    names = f"A: {store.name_of(left)}", f"B: {store.name_of(right)}"
    c_dtype = check.result_dtype(_native(left), _native(right), dtype, names)
    if c_dtype == BFLOAT16:
        raise DTypeError("dtype=bfloat16 cannot be stored: zarr-python has no such type; use dtype='float32'")
    check.precision(precision, c_dtype)
    return left, right, c_dtype


def _native(array: zarr.Array[Any]) -> np.dtype:
    return np.dtype(array.dtype).newbyteorder("=")


def _check_distinct(out: Source, left: zarr.Array[Any], right: zarr.Array[Any]) -> None:
    """The output replaces or fills its place, so it must not be where a factor is read from."""
    path = store.local_path(store.name_of(out))
    for role, factor in (("A", left), ("B", right)):
        same = store.name_of(out) == store.name_of(factor)
        factor_path = store.local_path(store.name_of(factor))
        if path is not None and factor_path is not None:
            ours, theirs = path.resolve(), factor_path.resolve()
            same = ours == theirs
            if not same and (ours in theirs.parents or theirs in ours.parents):
                raise OutputError(
                    f"output: {path} and {role}, {factor_path}, lie one inside the other; give C a place of its own"
                )
            growing = partial_path(path).resolve()
            if not isinstance(out, zarr.Array) and (growing == theirs or growing in theirs.parents):
                raise OutputError(
                    f"output: {path} would grow at {partial_path(path)}, where {role} lies; give C another name"
                )
        if same:
            raise OutputError(f"output: {store.name_of(out)} is also {role}; C needs a place of its own")


def _check_shareable(arrays: list[Source]) -> None:
    """Tasks are pickled on their way to any worker, also to one in this process, and memory is not shared by that."""
    for array in arrays:
        if store.in_memory(array):
            raise StoreError(
                f"{store.name_of(array)} lies in this process's memory, where no worker can reach it; store it in a"
                " file (zarr.storage.LocalStore; /dev/shm is as fast), or use tilewright.kernels.matmul on NumPy arrays"
            )


def _facts_here(device: str, host_memory: int | str | None) -> WorkerFacts:
    """This machine in place of a worker, for a plan without a cluster."""
    from distributed.system import MEMORY_LIMIT

    from tilewright.kernels.device import devices
    from tilewright.kernels.launch import resolve_device

    kind = resolve_device(device)
    cores = cores_here(), usable_cores(), os.cpu_count() or 1
    limit = (
        config.as_nbytes(host_memory, "host_memory (--host-memory)")
        if host_memory is not None
        else MEMORY_LIMIT
    )
    if kind == "cpu":
        return WorkerFacts("cpu", "CPU", None, limit, *cores)
    first = devices()[0]
    return WorkerFacts("cuda", first.name, first.memory_free or first.memory_total, limit, *cores)


def _plan(
    left: zarr.Array[Any],
    right: zarr.Array[Any],
    out: Source | None,
    c_dtype: np.dtype,
    transpose_a: bool,
    transpose_b: bool,
    facts: list[WorkerFacts],
    device_memory: int | str | None,
    past: Past | None,
    precision: str,
    most_nbytes: int | None = None,
) -> MatmulPlan:
    """``most_nbytes`` bounds the memory of tiles and panels whatever the workers and the caller allow."""
    a = store.as_stored_matrix(left, transpose=transpose_a)
    b = store.as_stored_matrix(right, transpose=transpose_b)
    parent = Parent(a.rows, b.columns, a.columns, transpose_a, transpose_b)
    limits = _limits(facts, device_memory, c_dtype, precision, parent)
    if most_nbytes is not None:
        limits = replace(limits, device_nbytes=min(limits.device_nbytes, most_nbytes))
    if isinstance(out, zarr.Array):
        check_given_output(out, (a.rows, b.columns), c_dtype)
        unit = store.write_unit(out)
        c_unit = (unit[0], unit[1])
    else:
        c_unit = output_chunks(a, b, c_dtype.itemsize, limits.device_nbytes)
        if fitting_unit(a, b, c_dtype, c_unit, limits, (transpose_a, transpose_b)) != c_unit:
            c_unit = output_chunks(a, b, c_dtype.itemsize, limits.device_nbytes, small=True)
    given = out if isinstance(out, zarr.Array) else None
    coded = not store.as_stored_matrix(given).plain if given is not None else store.is_compressed(left)
    limits = replace(
        limits,
        read_threads=_threads(
            "read-threads", facts, (left, right), [op.unit_nbytes for op in (a, b) if not op.plain]
        ),
        tile_buffers=_tile_buffers(facts, out),
        lanes=_lanes(facts),
    )

    def make(c_unit: tuple[int, int], keep: Geometry | None = None) -> MatmulPlan:
        piece = c_unit[0] * c_unit[1] * c_dtype.itemsize
        encoders = partial(encoders_nbytes, given, piece) if coded or given is not None else _no_encoders
        threads = _threads("write-threads", facts, (left, right), [piece] if coded else [], encoders)
        return plan_tiles(
            a,
            b,
            c_dtype,
            c_unit,
            limits=replace(limits, write_threads=threads, encoders_nbytes=encoders(threads)),
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            keep=keep,
        )

    if past is not None:
        # C stays chunked as it was begun, for another memory too; where that is too large for this one, it starts anew.
        with suppress(PlanError):
            kept = make(past.c_unit, past.geometry)
            if kept.geometry == past.geometry:
                return kept
    return make(c_unit)


def _limits(
    facts: list[WorkerFacts],
    device_memory: int | str | None,
    dtype: np.dtype,
    precision: str,
    parent: Parent,
) -> Limits:
    """What every worker can hold: the smallest of them sets it, since any tile may come to any worker."""
    on_host = facts[0].device == "cpu"
    host_limits = [fact.host_limit_nbytes for fact in facts if fact.host_limit_nbytes is not None]
    host = min(host_limits) if host_limits else None
    asked = config.get("device-memory", device_memory)
    if on_host:
        cap = config.get("host-core-nbytes") * min(fact.cores for fact in facts)
        nbytes = asked or (cap if host is None else min(cap, int(host * config.get("host-share"))))
    else:
        free = min(fact.device_free_nbytes for fact in facts if fact.device_free_nbytes is not None)
        nbytes = min(asked, free) if asked else int(free * config.get("device-memory-share"))
    workspace = (
        no_workspace if on_host else partial(_workspace, dtype=dtype, precision=precision, parent=parent)
    )
    return Limits(
        workers=len(facts),
        device_nbytes=nbytes,
        host_nbytes=host,
        on_host=on_host,
        panel_nbytes=config.get("panel-nbytes"),
        tiles=config.get("tiles"),
        workspace_nbytes=workspace,
        line_nbytes=1 if on_host else LINE_NBYTES,
    )


def _no_encoders(threads: int) -> int:
    """What encoders take up where nothing is encoded."""
    return 0


def _threads(
    name: str,
    facts: list[WorkerFacts],
    inputs: Sequence[zarr.Array[Any]],
    coded: Sequence[int],
    encoders: Callable[[int], int] = _no_encoders,
) -> int:
    """Threads of each worker that read chunks (``read-threads``), or write them (``write-threads``).

    coded: bytes of stored pieces that have to be decoded, or encoded, if any. encoders: what encoders take up where so
    many threads write, in bytes.

    Where the CPU multiplies and the chunks are in local files, more of them than cores only hold more memory; elsewhere
    they wait for the bus, or for another host. For a GPU decoding and encoding are all that the cores have to do; but
    what threads hold meanwhile, their lanes and coders, and pieces as they are stored and as they are in memory, may
    take `CODING_SHARE` of the worker's memory.
    """
    count = config.threads(name)
    local = all(store.is_local(array) for array in inputs)
    if facts[0].device == "cpu":
        return min(count, min(fact.cores for fact in facts)) if local else count
    if config.get(name) is not None or not (coded and local):
        return count
    share = _share_of_cores(facts)
    limits = [fact.host_limit_nbytes for fact in facts if fact.host_limit_nbytes is not None]
    if limits:
        coder_nbytes = max(CODER_NBYTES, encoders(share) // share)
        held_nbytes = LANE_NBYTES + coder_nbytes + 2 * max(coded)
        share = min(share, int(min(limits) * CODING_SHARE) // held_nbytes)
    return max(count, share)


def _lanes(facts: list[WorkerFacts]) -> int | None:
    """How many of a worker's threads read or write at once, or None for all of them.

    As many as read and write plain chunks, which wait for the bus; or as many as it has cores. Of more that decode and
    encode, one that holds the interpreter's lock may have to wait for a core, and all others wait with it: those too
    that start the GPU's work.
    """
    if facts[0].device == "cpu":
        return None
    return max(sum(config.threads(name) for name in config.THREADS), _share_of_cores(facts))


def _tile_buffers(facts: list[WorkerFacts], out: Source | None) -> int:
    """Tiles that a worker holds at most: a single core has no time to multiply while it writes to files."""
    to_files = store.is_local(out) if isinstance(out, zarr.Array) else out is None or store.local_path(out)
    single = facts[0].device == "cpu" and min(fact.cores for fact in facts) == 1
    return 1 if single and to_files else TILE_BUFFERS


def _share_of_cores(facts: list[WorkerFacts]) -> int:
    """The cores that each worker has at least, by how many there are on its host; without an address it is alone."""
    hosts = [get_address_host(fact.address) if fact.address else None for fact in facts]
    neighbours = {**Counter(hosts), None: 1}
    return min(
        share_of_cores(fact.usable_cores, fact.host_cores, neighbours[host])
        for fact, host in zip(facts, hosts, strict=True)
    )


def _workspace(
    rows: int, columns: int, depth: int, *, dtype: np.dtype, precision: str, parent: Parent
) -> int:
    return workspace_nbytes(rows, columns, depth, dtype, precision, parent)


def _recorded(out: Source, digest: str) -> int:
    """How many finished tiles the growing output holds."""
    past = _find_past(out, digest)
    return len(past.finished) if past is not None else 0


def _find_past(out: Source, digest: str) -> Past | None:
    path = store.local_path(out)
    return read_past(partial_path(path), digest) if path is not None else None


def _holds_record(out: Source) -> bool:
    """Whether the growing output has a record of finished tiles, whatever they are of."""
    path = store.local_path(out)
    return path is not None and (partial_path(path) / FILE_NAME).is_file()


def _goes_on(plan: MatmulPlan, past: Past) -> bool:
    """Whether the tiles that an earlier run finished are tiles of the plan."""
    return plan.geometry == past.geometry and max(past.finished, default=0) < plan.tile_count


def _open_output(
    out: Source,
    left: zarr.Array[Any],
    plan: MatmulPlan,
    digest: str,
    past: Past | None,
    dtype: np.dtype,
    overwrite: bool,
) -> tuple[Output, Mapping[int, int]]:
    """The output to write to, and the tiles that it holds already with their bytes."""
    path = store.local_path(out)
    if past is not None and path is not None:
        output = resume_output(path, overwrite)
        if output is not None:
            # Until it was locked, another run may have gone on from there, or begun something else in its place.
            past = _find_past(out, digest)
            fits = store.write_unit(output.array) == plan.c_unit and output.array.shape == (plan.m, plan.n)
            if fits and past is not None and _goes_on(plan, past):
                return output, past.finished
            output.release()
    output = create_output(
        out,
        (plan.m, plan.n),
        dtype,
        plan.c_unit,
        compressed=store.is_compressed(left),
        overwrite=overwrite,
    )
    return output, {}


def _still_stored(output: Output, plan: MatmulPlan, recorded: Mapping[int, int]) -> dict[int, int]:
    """The recorded tiles whose chunks are as long as they were: a missing one reads as zeros, a short one never."""
    tiles = {tile.index: tile for tile in plan.tiles()} if recorded else {}

    def found(index: int) -> int | None:
        tile = tiles[index]
        return stored_nbytes(output.array, tile.region)

    return {index: nbytes for index, nbytes in recorded.items() if found(index) == nbytes}


def _sharing(facts: list[WorkerFacts]) -> frozenset[str]:
    """Workers that may give each other panels: processes with a GPU each."""
    addresses = {
        fact.address
        for fact in facts
        if fact.device == "cuda" and not fact.address.startswith("inproc://")  # there all are one process
    }
    return frozenset(addresses if len(addresses) > 1 and config.get("share-panels") else ())


def _choice(facts: list[WorkerFacts], plan: MatmulPlan) -> str:
    """One sentence about where the work runs."""
    workers, tiles = counted(len(facts), "worker"), counted(plan.tile_count, "tile")
    return (
        f"multiplying on {facts[0].name} with {workers}: {tiles} of {plan.tile_rows} × {plan.tile_columns},"
        f" {format_nbytes(plan.device_peak_nbytes)} a worker"
    )


def _forget(index: int, nbytes: int) -> None:
    """In-place outputs keep no record: nothing beside them is ours to write to."""
