"""From factors and workers, as they are found, to the plan of a matrix product."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import dask
import numpy as np
import zarr
from distributed.comm import get_address_host

from tilewright.kernels.arguments import as_count, check_choice, check_flag, shown
from tilewright.kernels.bfloat16 import is_bfloat16
from tilewright.kernels.cpu.loops import share_of_cores, usable_cores
from tilewright.kernels.gemm import check
from tilewright.kernels.gemm.base import NUMPY_ELEMENTS, PRECISIONS
from tilewright.kernels.gemm.workspace import Parent, workspace_nbytes
from tilewright.kernels.gpu.device_choice import DEVICES
from tilewright.kernels.numbers import format_nbytes
from tilewright.pipeline import config
from tilewright.pipeline.cluster.cluster import Cluster, open_cluster
from tilewright.pipeline.cluster.watch import workers_held
from tilewright.pipeline.errors import DeviceUnavailableError, DTypeError, OptionError, PlanError, ShapeError
from tilewright.pipeline.events import Caution, Listener, log_notices, on_waiting
from tilewright.pipeline.plan.facts import WorkerFacts, cores_here, pause_nbytes
from tilewright.pipeline.plan.inputs import (
    TILE_BUFFERS,
    Geometry,
    Limits,
    StoredMatrix,
    accumulator_dtype,
    no_workspace,
)
from tilewright.pipeline.plan.layout import LINE_NBYTES
from tilewright.pipeline.plan.product import CODER_NBYTES, MatmulPlan, plan_tiles
from tilewright.pipeline.plan.sums import planned_wrap
from tilewright.pipeline.plan.tiling import output_chunks
from tilewright.pipeline.product.ledger import Past
from tilewright.pipeline.product.output import check_given_output, group_note, partial_path
from tilewright.pipeline.product.sides import check_nbytes
from tilewright.pipeline.store import arrays as store
from tilewright.pipeline.store.arrays import Source
from tilewright.pipeline.store.attributes import packing_notice
from tilewright.pipeline.store.origin import is_same_array
from tilewright.pipeline.store.region_write import encoders_nbytes
from tilewright.pipeline.transfer.lane_blocks import LANE_NBYTES
from tilewright.pipeline.worker.survey import survey

CODING_SHARE = 1 / 8
"""The share of a worker's memory that decoding threads may hold, and encoding ones as much; to keep to it they are
fewer than the cores."""

MOST_WORKERS = 10**6
"""The most workers that a plan may be asked for: each is an entry in a list, and more than any cluster has would only
fill memory."""


@dataclass(frozen=True)
class Wanted:
    """A product as it was asked for, and checked."""

    a: zarr.Array[Any]
    b: zarr.Array[Any]
    dtype: np.dtype
    """Of C."""
    transpose_a: bool = False
    transpose_b: bool = False
    precision: str = "full"
    device_memory: int | str | None = None
    """The most that tiles and panels may take on each worker; None: what the configuration says."""

    @property
    def symmetric(self) -> bool:
        """Whether it is one array by its own transpose."""
        return self.transpose_a != self.transpose_b and is_same_array(self.a, self.b)


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
    listener: Listener = log_notices,
) -> MatmulPlan:
    """The plan that ``matmul`` would follow, from nothing but metadata. The listener gets the cautions that ``matmul``
    would have for the factors and the workers, and is told where sums of integers could wrap in C's dtype.

    It is for ``workers`` workers, each with all the memory and cores of this machine (or a GPU like its first), whose
    processes may hold ``host_memory`` each; or, where a ``cluster`` is named, for the workers found there and what they
    have (a profile's own cluster is started for that). With ``device="cuda"`` and ``device_memory`` no GPU need be
    here: a plan for GPUs with so much memory free can be made anywhere.

    Raises as ``matmul`` does for factors that cannot be multiplied, PlanError where no tile fits or there would be too
    many, and OptionError for fewer workers than one, more than `MOST_WORKERS`, workers or their memory given beside a
    cluster, a file of profiles without one, or a wrong setting.
    """
    config.check_all(device_memory=device_memory, cluster_file=cluster_file)
    check_choice("device", device, DEVICES)
    count = as_count(workers)
    if count is None or count < 1:
        raise OptionError(f"workers={shown(workers)}: a product needs a whole number of workers, one or more")
    if count > MOST_WORKERS:
        raise OptionError(f"workers={shown(workers)}: a plan is for {MOST_WORKERS} workers at most")
    if cluster is not None and (count != 1 or host_memory is not None):
        named = f"workers={count}" if count != 1 else f"host_memory={shown(host_memory)}"
        raise OptionError(
            f"{named} beside a cluster: a plan is for the workers that are found there, and what they have; leave one"
            " of the two away"
        )
    if cluster is None and cluster_file is not None:
        raise OptionError(
            f"cluster_file={shown(cluster_file)} without a cluster: the plan would be for this machine; name one of its"
            " profiles (cluster), or leave it away"
        )
    if host_memory is not None:
        host_memory = config.as_nbytes(host_memory, "host_memory (--host-memory)")
    wanted = open_factors(a, b, transpose_a, transpose_b, dtype, precision, device_memory)
    told: set[str] = set()
    tell_once(listener, cautions(wanted, None, precision), told)
    if note := wrap_note(wanted):
        listener(Caution(note))
    if cluster is None:
        facts = [_facts_here(device, host_memory, wanted.device_memory)] * count
    else:
        with (
            open_cluster(cluster, cluster_file) as client,
            workers_held(client, waiting=on_waiting(listener, "plan", "ends it")),
        ):
            facts = survey(client, device, loops=False)
    plan = plan_for(wanted, None, facts)
    tell_once(listener, cautions(wanted, None, precision, facts, plan), told)
    return plan


def cautions(
    wanted: Wanted,
    out: Source | None,
    precision: str,
    facts: Sequence[WorkerFacts] = (),
    plan: MatmulPlan | None = None,
    finished: Collection[int] = (),
    *,
    replaced: bool = False,
) -> list[str]:
    """All that ``matmul`` warns of before its first tile: for it, and for whoever plans what it would do.

    What the arrays say is known before there are workers and a plan. So callers ask twice, first without these, and
    tell each sentence once (`tell_once`): nobody should wait for a cluster to hear of a packed array.

    out: where C goes, None where nobody said. precision: what was asked for. finished: the tiles of the plan that an
    earlier run finished, by index. replaced: what an earlier run left is still there, and goes before the first tile.
    """
    found = [packing_notice("A", wanted.a), packing_notice("B", wanted.b)]
    if isinstance(out, zarr.Array):
        found.append(packing_notice("output", out, written=True))
    path = store.local_path(out) if out is not None else None
    if path is not None:
        found.append(group_note(path))
    if facts and facts[0].device == "cpu" and precision != "full":
        found.append(
            f"precision={precision!r} is for tensor cores: on a CPU the product is computed, and checked, in full"
        )
    if path is not None and plan is not None:
        found.append(_note_on_space(path, plan, finished, replaced))
    return [sentence for sentence in found if sentence]


def tell_once(listener: Listener, sentences: Iterable[str], told: set[str]) -> None:
    """Tell the listener, as cautions, those sentences that are not in ``told``, and add them to it."""
    for sentence in sentences:
        if sentence not in told:
            told.add(sentence)
            listener(Caution(sentence))


def _note_on_space(path: Path, plan: MatmulPlan, finished: Collection[int], replaced: bool) -> str | None:
    """One sentence where a disk has less room than the tiles that are left would take up uncompressed."""
    left = plan.m * plan.n * np.dtype(plan.c_dtype).itemsize
    if finished:
        left -= sum(plan.tile_write_nbytes(tile) for tile in plan.tiles() if tile.index in finished)
    try:
        growing = partial_path(path)
        place = next(folder for folder in (growing, *growing.absolute().parents) if folder.is_dir())
        free = shutil.disk_usage(place).free
        if free < left and replaced:
            free += _stored_nbytes(growing)
    except (OSError, ValueError, StopIteration):  # no place to write to: whoever checks the output says so
        return None
    if free >= left:
        return None
    return (
        f"{format_nbytes(free)} are free on the disk of {growing}, and C takes {format_nbytes(left)} more uncompressed:"
        " unless it compresses to that, make room, or choose another path; tiles that are finished by then are kept"
    )


def _stored_nbytes(folder: Path) -> int:
    """Bytes that the files below a folder take up on its disk."""
    files = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
    total = 0
    for file in files:
        with suppress(OSError):  # it went away while we looked
            total += os.lstat(file).st_blocks * 512
    return total


def open_factors(
    a: Source,
    b: Source,
    transpose_a: bool,
    transpose_b: bool,
    dtype: str | np.dtype | None,
    precision: str,
    device_memory: int | str | None,
) -> Wanted:
    """Open the factors, and check that they can be multiplied so. Raises as ``matmul`` does."""
    transpose_a, transpose_b = check_flag("transpose_a", transpose_a), check_flag("transpose_b", transpose_b)
    check_choice("precision", precision, PRECISIONS)
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
    if is_bfloat16(dtype):
        raise DTypeError("dtype=bfloat16 cannot be stored: zarr-python has no such type; use dtype='float32'")
    c_dtype = check.result_dtype(_native(left), _native(right), dtype, names, NUMPY_ELEMENTS, k=inner_left)
    check.precision(precision, c_dtype)
    return Wanted(left, right, c_dtype, transpose_a, transpose_b, precision, device_memory)


def _native(array: zarr.Array[Any]) -> np.dtype:
    return np.dtype(array.dtype).newbyteorder("=")


def wrap_note(wanted: Wanted) -> str | None:
    """One sentence where the dtypes of the factors and k allow sums that wrap in C's, before any element is read."""
    k = wanted.a.shape[0 if wanted.transpose_a else 1]
    return planned_wrap("C", wanted.dtype, _native(wanted.a), _native(wanted.b), k)


def plan_for(
    wanted: Wanted,
    out: Source | None,
    facts: list[WorkerFacts],
    past: Past | None = None,
    most_nbytes: int | None = None,
    *,
    verify: bool = True,
) -> MatmulPlan:
    """The plan of a product for workers such as these.

    ``out`` is where C goes, None where nobody said. ``past`` is what an earlier run left: its geometry is kept where
    it fits. ``most_nbytes`` bounds the memory of tiles and panels whatever the workers and the caller allow.
    ``verify`` is whether C is checked.

    Raises
    ------
    PlanError
        No tile fits, or there would be too many, or the host's memory does not hold what a worker needs.
    OutputError
        ``out`` is an open array that cannot take C.
    """
    left, right, c_dtype = wanted.a, wanted.b, wanted.dtype
    transpose_a, transpose_b, symmetric = wanted.transpose_a, wanted.transpose_b, wanted.symmetric
    a = store.as_stored_matrix(left, transpose=transpose_a)
    b = store.as_stored_matrix(right, transpose=transpose_b)
    parent = Parent(a.rows, b.columns, a.columns, transpose_a, transpose_b)
    limits = _limits(facts, wanted, parent)
    if most_nbytes is not None:
        limits = replace(limits, device_nbytes=min(limits.device_nbytes, most_nbytes))
    if isinstance(out, zarr.Array):
        check_given_output(out, (a.rows, b.columns), c_dtype)
        unit = store.write_unit(out)
        c_unit = (unit[0], unit[1])
    else:
        c_unit = output_chunks(a, b, c_dtype.itemsize, limits.device_nbytes, square=symmetric)
    given = out if isinstance(out, zarr.Array) else None
    coded = not store.as_stored_matrix(given).plain if given is not None else store.is_compressed(left)
    limits = replace(
        limits,
        read_threads=_threads(
            "read-threads",
            facts,
            all(store.is_local(array) for array in (left, right)),
            [op.unit_nbytes for op in (a, b) if not op.plain],
        ),
        tile_buffers=_tile_buffers(facts, out),
        lanes=_lanes(facts),
    )

    def make(c_unit: tuple[int, int], keep: Geometry | None = None) -> MatmulPlan:
        piece = c_unit[0] * c_unit[1] * c_dtype.itemsize
        encoders = partial(encoders_nbytes, given, piece) if coded or given is not None else _no_encoders
        threads = _threads("write-threads", facts, _is_local(out), [piece] if coded else [], encoders)
        c = (
            StoredMatrix(a.rows, b.columns, c_dtype, c_unit, not coded)
            if given is None
            else store.as_stored_matrix(given)
        )
        return plan_tiles(
            a,
            b,
            c_dtype,
            c_unit,
            limits=replace(
                limits,
                write_threads=threads,
                encoders_nbytes=encoders(threads),
                check_nbytes=_check_nbytes(facts, wanted, out, c) if verify else 0,
            ),
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            symmetric=symmetric,
            keep=keep,
        )

    if past is not None:
        # C stays chunked as it was begun, under another memory limit too; where that plan does not fit, it starts anew.
        with suppress(PlanError):
            kept = make(past.c_unit, past.geometry)
            if kept.geometry == past.geometry:
                return kept
    return make(c_unit)


def _facts_here(device: str, host_memory: int | None, device_memory: int | str | None) -> WorkerFacts:
    """This machine in place of a worker, for a plan without a cluster."""
    from distributed.system import MEMORY_LIMIT

    from tilewright.kernels.gpu.device import devices
    from tilewright.kernels.gpu.device_choice import cuda_available, resolve_device

    asked = config.get("device-memory", device_memory)
    elsewhere = device == "cuda" and asked is not None and not cuda_available()
    try:
        kind = "cuda" if elsewhere else resolve_device(device)
    except DeviceUnavailableError as error:
        raise DeviceUnavailableError(
            f"{error}; to plan for GPUs elsewhere, give the memory they have free (device_memory, --device-memory)"
        ) from None
    cores = cores_here(), usable_cores(), os.cpu_count() or 1
    limit = MEMORY_LIMIT if host_memory is None else host_memory
    name, free = "CPU", None
    if elsewhere:
        name, free = "GPU", asked
    elif kind == "cuda":
        first = devices()[0]
        name, free = first.name, first.memory_free or first.memory_total
    pause = pause_nbytes(limit, dask.config.get("distributed.worker.memory.pause"))
    return WorkerFacts(kind, name, free, limit, *cores, pause_nbytes=pause)


def _limits(facts: list[WorkerFacts], wanted: Wanted, parent: Parent) -> Limits:
    """What every worker can hold: the smallest of them sets it, since any tile may come to any worker."""
    on_host = facts[0].device == "cpu"
    host = _least(fact.host_limit_nbytes for fact in facts)
    asked = config.get("device-memory", wanted.device_memory)
    if on_host:
        cap = config.get("host-core-nbytes") * min(fact.cores for fact in facts)
        nbytes = asked or (cap if host is None else min(cap, int(host * config.get("host-share"))))
    else:
        free = min(fact.device_free_nbytes for fact in facts if fact.device_free_nbytes is not None)
        nbytes = min(asked, free) if asked else int(free * config.get("device-memory-share"))
    workspace = (
        no_workspace
        if on_host
        else partial(
            workspace_nbytes,
            dtype=accumulator_dtype(wanted.dtype),
            precision=wanted.precision,
            parent=parent,
            operands=(_native(wanted.a), _native(wanted.b)),
        )
    )
    return Limits(
        workers=len(facts),
        device_nbytes=nbytes,
        host_nbytes=host,
        pause_nbytes=_least(fact.pause_nbytes for fact in facts),
        on_host=on_host,
        panel_nbytes=config.get("panel-nbytes"),
        tiles=config.get("tiles"),
        workspace_nbytes=workspace,
        line_nbytes=1 if on_host else LINE_NBYTES,
    )


def _least(limits: Iterable[int | None]) -> int | None:
    """The smallest of some workers' limits, in bytes; None where none has one."""
    return min((limit for limit in limits if limit is not None), default=None)


def _check_nbytes(facts: list[WorkerFacts], wanted: Wanted, out: Source | None, c: StoredMatrix) -> int:
    """What the check of C takes of a worker's process."""
    a = store.as_stored_matrix(wanted.a, transpose=wanted.transpose_a)
    b = store.as_stored_matrix(wanted.b, transpose=wanted.transpose_b)
    threads = config.threads("read-threads")
    if _is_local(out) and all(store.is_local(array) for array in (wanted.a, wanted.b)):
        threads = min(threads, max(fact.usable_cores for fact in facts))
    host = _least(fact.host_limit_nbytes for fact in facts)
    tasks = max(fact.threads for fact in facts)
    return check_nbytes(a, b, c, config.get("verify-rounds"), threads, host, tasks)


def _no_encoders(threads: int) -> int:
    """Memory of encoders where nothing is encoded."""
    return 0


def _threads(
    name: str,
    facts: list[WorkerFacts],
    local: bool,
    coded: Sequence[int],
    encoders: Callable[[int], int] = _no_encoders,
) -> int:
    """Threads of each worker that read chunks (``read-threads``), or write them (``write-threads``).

    local: whether these are in local files. coded: bytes of a chunk of each array that has to be decoded, or encoded.
    encoders: from a number of writing threads to the bytes that their encoders take up.

    Where the CPU multiplies and the chunks are in local files, more threads than cores only hold more memory; elsewhere
    threads wait for the bus, or for another host. With a GPU, decoding and encoding are all that the cores have to do;
    but what the threads hold meanwhile (lanes, coders, pieces as stored and as in memory) may take only `CODING_SHARE`
    of the worker's memory.
    """
    count = config.threads(name)
    if facts[0].device == "cpu":
        return min(count, min(fact.cores for fact in facts)) if local else count
    if config.get(name) is not None or not (coded and local):
        return count
    share = _share_of_cores(facts)
    host = _least(fact.host_limit_nbytes for fact in facts)
    if host is not None:
        coder_nbytes = max(CODER_NBYTES, encoders(share) // share)
        held_nbytes = LANE_NBYTES + coder_nbytes + 2 * max(coded)
        share = min(share, int(host * CODING_SHARE) // held_nbytes)
    return max(count, share)


def _lanes(facts: list[WorkerFacts]) -> int | None:
    """How many of a worker's threads read or write at once, or None for all of them.

    As many as read and write plain chunks, which wait for the bus, or as many as it has cores, if that is more. If more
    threads decoded and encoded, the one that holds the interpreter's lock might have to wait for a core, and all others
    with it, even those that start the GPU's work.
    """
    if facts[0].device == "cpu":
        return None
    return max(sum(config.threads(name) for name in config.THREAD_COUNTS), _share_of_cores(facts))


def _tile_buffers(facts: list[WorkerFacts], out: Source | None) -> int:
    """Tiles that a worker holds at most: a single core has no time to multiply while it writes to files."""
    single = facts[0].device == "cpu" and min(fact.cores for fact in facts) == 1
    return 1 if single and _is_local(out) else TILE_BUFFERS


def _is_local(out: Source | None) -> bool:
    """Whether an output goes to files of this host; where none is named, it does."""
    if isinstance(out, zarr.Array):
        return store.is_local(out)
    return out is None or store.local_path(out) is not None


def _share_of_cores(facts: list[WorkerFacts]) -> int:
    """The fewest cores that a worker has as its share of its host; one without an address is alone there."""
    hosts = [get_address_host(fact.address) if fact.address else None for fact in facts]
    neighbours = {**Counter(hosts), None: 1}
    return min(
        share_of_cores(fact.usable_cores, fact.host_cores, neighbours[host])
        for fact, host in zip(facts, hosts, strict=True)
    )
