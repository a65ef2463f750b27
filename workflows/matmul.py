"""The matrix product of two stored matrices: open, survey, plan, run, verify, publish."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import numpy as np
import zarr
from distributed import Client

from tilewright.kernels.arguments import check_callable, check_choice, check_flag
from tilewright.kernels.gpu.device_choice import DEVICES
from tilewright.kernels.gpu.memory import is_address_limit
from tilewright.kernels.numbers import counted, format_nbytes
from tilewright.pipeline import config
from tilewright.pipeline.cluster.answers import ask_all
from tilewright.pipeline.cluster.cluster import Cluster, open_cluster
from tilewright.pipeline.cluster.watch import workers_held
from tilewright.pipeline.errors import (
    ClusterError,
    DamagedError,
    DamagedProductError,
    DeviceMemoryError,
    OutputError,
    PlanError,
    StoreError,
    VerificationError,
)
from tilewright.pipeline.events import Caution, Listener, Notice, log_notices, on_waiting
from tilewright.pipeline.plan.facts import WorkerFacts
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.plan.told import Found, Product
from tilewright.pipeline.product.execute import on_all, run_tiles
from tilewright.pipeline.product.findings import Factors, findings_of, not_finite_caution, sought_in
from tilewright.pipeline.product.ledger import (
    FILE_NAME,
    Fingerprint,
    Ledger,
    Past,
    Stored,
    changed_inputs,
    fingerprint,
    read_past,
)
from tilewright.pipeline.product.output import (
    Output,
    check_given_output,
    check_growing_place,
    check_output_free,
    create_output,
    open_growing,
    partial_path,
    resume_output,
)
from tilewright.pipeline.product.run import MatmulRun
from tilewright.pipeline.product.verify import Verification, find_damaged, verify_product
from tilewright.pipeline.store import arrays as store
from tilewright.pipeline.store.arrays import Source
from tilewright.pipeline.store.attributes import product_names
from tilewright.pipeline.store.origin import is_same_array
from tilewright.pipeline.store.probe import (
    check_read_alike,
    check_shared_output,
    check_written_alike,
    shared_inputs,
)
from tilewright.pipeline.store.region_write import stored_nbytes_of
from tilewright.pipeline.transfer.lane_blocks import most_neighbours
from tilewright.pipeline.worker import tasks
from tilewright.pipeline.worker.survey import survey
from tilewright.workflows.planning import Wanted, cautions, open_factors, plan_for, tell_once, wrap_note

SMALL_PRODUCTS = 2**36
"""Multiplications that two cores do in a second: in a product of fewer, time counts and not memory."""


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
    listener: Listener = log_notices,
) -> MatmulRun:
    """Store C = op(A) op(B), with A, B and C in Zarr and op the identity or the transpose.

    Parameters
    ----------
    a, b
        Two-dimensional arrays of numbers: paths, URLs or open ``zarr.Array``s. op(A) is m × k, op(B) is k × n.
    out
        Where C (m × n) goes. A path gets its array only when C is whole (it grows under ``<out>.partial``);
        a URL or an open array is written in place, and what an open array holds is replaced. One that is open in a
        writable session of icechunk gets C by its session once C is verified; committing that is up to the caller.
    transpose_a, transpose_b
        Take the transpose of A or B; nothing is stored transposed. One array by its own transpose gives a C that is
        symmetric to the bit: its tiles on and below the diagonal are computed, and each is stored twice.
    dtype
        C's dtype. Without it, that of ``numpy.matmul``, but for integers the smallest of int32, uint32, int64 and
        uint64 that holds k times the largest product of the two dtypes, and is no narrower than NumPy's; where none
        does, NumPy's type widened to 64 bits. It follows from the dtypes and k alone: int32 for int8 factors up to
        k = 131071. A and B are cast to it as NumPy casts ``same_kind``, also to fewer bits, where integers wrap and
        floats are rounded or overflow (for float16 to float32, which its sums are formed in). Unsigned integers may
        become any type, signed ones any but unsigned, floats any floats or complex numbers, complex numbers complex
        ones. Not bfloat16, which zarr-python does not store; `tilewright.kernels.matmul` multiplies arrays of it.
    precision
        ``full`` multiplies every dtype as itself; ``split``, ``tf32``, ``bf16`` and ``fp16`` use tensor cores, where
        ``fp16`` takes operands of at most 65504, and rounds those below 6.1e-5 to multiples of 6e-8. On a CPU all of
        them mean ``full``.
    cluster
        A profile of ``cluster_file``, a scheduler's address, a ``distributed.Client``, or a cluster of Dask's,
        such as a ``distributed.LocalCluster``, which is left open.
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
        One of its subclasses, for everything a caller can cause; at a path ``out`` nothing half-written stands then.
    DeviceMemoryError
        A worker ran out of memory under the plan, and under a smaller one that was made in its place; or half of C was
        finished already, which a plan with other tiles would have given up.
    """
    resume, verify, overwrite = _checked_options(
        device, device_memory, cluster_file, resume, verify, overwrite, listener
    )
    wanted = open_factors(a, b, transpose_a, transpose_b, dtype, precision, device_memory)
    _check_output(out, wanted, overwrite=overwrite)
    shared = shared_inputs({"A": wanted.a, "B": wanted.b})
    wanted = replace(wanted, a=shared["A"], b=shared["B"])
    left, right, c_dtype = wanted.a, wanted.b, wanted.dtype
    job = _Job(wanted, out, verify, overwrite, listener, precision)
    job.warn_of_plan()
    # On a CPU BLAS multiplies floats, and Numba, which the check needs, is started after the product, unless that is
    # over so soon that the check would wait for it.
    loops = c_dtype.kind in "iu" or left.size * right.shape[int(not transpose_b)] < SMALL_PRODUCTS
    with (
        open_cluster(cluster, cluster_file, loops=loops) as client,
        workers_held(client, waiting=on_waiting(listener, "matmul", "ends it")),
    ):
        facts = survey(client, device, loops=loops)
        job = replace(job, wanted=_as_computed(wanted, facts))
        ask = partial(ask_all, client)
        check_read_alike(ask, shared)
        for note in check_written_alike(ask, out):
            job.warn(note)
        found = _fingerprint(job.wanted, facts)
        job, digest = replace(job, found=found), found.digest
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


def plan_run(
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
    listener: Listener = log_notices,
) -> MatmulPlan:
    """The plan that ``matmul`` would follow with the same arguments; nothing is written.

    Notices tell what ``matmul`` would warn of before its first tile, what it would refuse C for, what it would keep of
    a run that was stopped, and where sums of integers could wrap in C's dtype. Raises as ``matmul`` does for factors
    and clusters, and PlanError where no tile fits or there would be too many.
    """
    resume, verify, overwrite = _checked_options(
        device, device_memory, cluster_file, resume, verify, overwrite, listener
    )
    wanted = open_factors(a, b, transpose_a, transpose_b, dtype, precision, device_memory)
    shared = shared_inputs({"A": wanted.a, "B": wanted.b})
    wanted = replace(wanted, a=shared["A"], b=shared["B"])
    if not isinstance(out, zarr.Array) and config.path_text(out) is None:
        store.check_source(out, "output")  # raises; names that are only refused are planned for
    job = _Job(wanted, out, verify, overwrite, listener, precision)
    job.warn_of_plan()
    try:
        _check_output(out, wanted, overwrite=overwrite)
    except (StoreError, OutputError) as error:
        job.warn(f"without --plan-only this would be refused: {error}")
    if note := wrap_note(wanted):
        job.warn(note)
    with (
        open_cluster(cluster, cluster_file, loops=False) as client,
        workers_held(client, waiting=on_waiting(listener, "plan", "ends it")),
    ):
        facts = survey(client, device, loops=False)
    wanted = _as_computed(wanted, facts)
    past, kept = None, None
    # A digest takes a look at every file of A and B, so it is made only where there is something to compare it with.
    found = resume and _holds_record(out)
    if found:
        digest = _fingerprint(wanted, facts).digest
        try:
            past = _find_past(out, digest)
        except StoreError as error:
            found = False
            job.warn(f"without --plan-only this would be refused: {error}")
    plan = plan_for(wanted, out, facts, past, verify=verify)
    if past is not None and _goes_on(plan, past):
        try:
            kept = _kept(out, wanted, plan, past)
        except StoreError as error:
            found = False
            job.warn(f"without --plan-only this would be refused: {error}")
    if kept:
        tiles = counted(plan.tile_count, "tile")
        job.say(f"an earlier run finished {len(kept)} of {tiles}, which would be kept")
    elif found and kept is None:
        job.say("an earlier run left tiles that do not fit this product or its plan; they would be replaced")
    job.warn_of_plan(facts, plan, kept or (), replaced=kept is None)
    return plan


def _checked_options(
    device: str,
    device_memory: int | str | None,
    cluster_file: str | None,
    resume: bool,
    verify: bool,
    overwrite: bool,
    listener: Listener,
) -> tuple[bool, bool, bool]:
    """``resume``, ``verify`` and ``overwrite``, once these and the other options of a product, but for those of
    `open_factors`, are found good."""
    config.check_all(device_memory=device_memory, cluster_file=cluster_file)
    check_choice("device", device, DEVICES)
    check_callable("listener", listener)
    return check_flag("resume", resume), check_flag("verify", verify), check_flag("overwrite", overwrite)


def _check_output(out: Source, wanted: Wanted, *, overwrite: bool) -> None:
    """Refuse, before any work, an output that could not be written or would replace what is not to be replaced."""
    check_output_free(out, overwrite=overwrite)
    _check_distinct(out, wanted.a, wanted.b)
    if (path := store.local_path(out)) is not None:
        check_growing_place(path)
    if isinstance(out, zarr.Array):
        check_given_output(out, _shape_of(wanted), wanted.dtype)
    check_shared_output(out)


def _shape_of(wanted: Wanted) -> tuple[int, int]:
    """Of C."""
    return wanted.a.shape[int(wanted.transpose_a)], wanted.b.shape[int(not wanted.transpose_b)]


def _as_computed(wanted: Wanted, facts: list[WorkerFacts]) -> Wanted:
    """The product as such workers compute it: a CPU has no tensor cores."""
    return replace(wanted, precision="full") if facts[0].device == "cpu" else wanted


def _fingerprint(wanted: Wanted, facts: list[WorkerFacts]) -> Fingerprint:
    """What the record of a product's finished tiles is compared by."""
    request = {
        "transpose": [wanted.transpose_a, wanted.transpose_b],
        "symmetric": wanted.symmetric,
        "dtype": str(wanted.dtype),
        "precision": wanted.precision,
        "device": facts[0].device,
    }
    return fingerprint(wanted.a, wanted.b, request)


@dataclass(frozen=True)
class _Job:
    """What all attempts at a product share."""

    wanted: Wanted
    out: Source
    verify: bool
    overwrite: bool
    listener: Listener
    precision: str
    """What was asked for."""
    found: Fingerprint | None = None
    """The inputs as they were before the first tile."""
    told: set[str] = field(default_factory=set, compare=False)
    """The cautions that the user has been told by `warn_of_plan`."""

    def say(self, message: str) -> None:
        """Tell the user."""
        self.listener(Notice(message))

    def warn(self, message: str) -> None:
        """Tell the user what may not be as it seems."""
        self.listener(Caution(message))

    def warn_of_plan(
        self,
        facts: list[WorkerFacts] | None = None,
        plan: MatmulPlan | None = None,
        finished: Collection[int] = (),
        *,
        replaced: bool = False,
    ) -> None:
        """Tell the user, once, of what may not be as it seems before the first tile; see `cautions`."""
        found = cautions(
            self.wanted, self.out, self.precision, facts or (), plan, finished, replaced=replaced
        )
        tell_once(self.listener, found, self.told)


class _TooLarge(Exception):
    """A worker ran out of memory under a plan."""

    def __init__(self, plan: MatmulPlan, error: DeviceMemoryError) -> None:
        super().__init__(plan, error)
        self.plan = plan
        self.error = error


def _out_of_memory(failed: _TooLarge, before: str) -> DeviceMemoryError:
    remedy = "; free memory there, or set --device-memory (tilewright.device-memory) to what the workers really have"
    if is_address_limit(failed.error):
        remedy = ""
    return DeviceMemoryError(
        f"{failed.error}; the plan took {_peak(failed.plan)} a worker, and {before}{remedy}"
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

    ``failed`` is the plan under which a worker ran out of memory before: this one takes at most half of its memory, so
    its tiles are others, and the finished ones of the failed plan are given up with their array.

    Raises
    ------
    _TooLarge
        A worker ran out of memory. The workers hold nothing of the run, and the growing output and its record are left
        as after any other error.
    """
    wanted = job.wanted
    most_nbytes = failed.device_peak_nbytes // 2 if failed is not None else None
    past = _find_past(job.out, digest) if resume and failed is None else None
    plan = plan_for(wanted, job.out, facts, past, most_nbytes, verify=job.verify)
    if failed is not None:
        job.say(_goes_on_smaller(facts, failed, plan, _recorded(job.out, digest)))
    elif past is not None and not _goes_on(plan, past):
        job.say("an earlier run left tiles that do not fit the memory of this one; it starts anew")
        past = None
    elif past is None and resume and _holds_record(job.out):
        job.say(
            "an earlier run left tiles of other inputs, of another request, or of another version of Tilewright;"
            " they are replaced, and it starts anew"
        )
    job.say(_choice(facts, plan))
    # What stands at a URL, where arrays are written in place, is what the failed plan left: ours to replace.
    overwrite = job.overwrite or (failed is not None and store.local_path(job.out) is None)
    output, recorded = _open_output(job.out, wanted, plan, digest, past, overwrite)
    if past is not None and past.finished and not recorded:
        job.say("an earlier run left an array that is no more what it was; it starts anew")
    try:
        return _fill(client, job, facts, plan, digest, output, recorded)
    finally:
        output.release()


def _fill(
    client: Client,
    job: _Job,
    facts: list[WorkerFacts],
    plan: MatmulPlan,
    digest: str,
    output: Output,
    recorded: Mapping[int, Stored],
) -> MatmulRun:
    """Compute the tiles that the output lacks, verify and publish. Raises as `_attempt`."""
    wanted = job.wanted
    finished = _still_stored(output.array, plan, recorded)
    if len(finished) < len(recorded):
        lost = counted(len(recorded) - len(finished), "tile")
        job.say(
            f"{lost} of an earlier run lost stored pieces in {output.partial}, or parts of them, and will be"
            " computed again"
        )
    if finished:
        rest = "it goes on with the rest"
        if len(finished) == plan.tile_count:
            rest = "only the check is left" if job.verify else "none is left to compute"
        job.say(f"an earlier run finished {len(finished)} of {counted(plan.tile_count, 'tile')}; {rest}")
    job.warn_of_plan(facts, plan, finished)
    transposed = wanted.transpose_a, wanted.transpose_b
    factors = Factors(wanted.a, wanted.b, wanted.dtype, plan.k, transposed, plan.symmetric)
    product = Product(
        a=wanted.a,
        b=wanted.b,
        c=output.array,
        plan=plan,
        device=facts[0].device,
        precision=wanted.precision,
        run=uuid.uuid4().hex[:12],
        drafts=output.drafts,
        neighbours=most_neighbours(fact.address for fact in facts),
        sharing=_sharing(facts),
        look=sought_in(factors),
    )
    with ExitStack() as stack:
        ledger = None
        if output.partial is not None:
            # The lock says that no other client writes there any more; its workers may not know that yet.
            on_all(client, tasks.end_past_runs, store.place_of(output.array), product.run)
            ledger = stack.enter_context(closing(Ledger(output.partial, digest, plan, finished)))
            stack.enter_context(_telling_what_is_kept(job, plan, digest))
        record = ledger.record if ledger is not None else _forget
        try:
            keep = output.gathered.keep if output.gathered is not None else None
            done = run_tiles(client, product, finished, job.listener, record, keep)
        except DeviceMemoryError as error:
            raise _TooLarge(plan, error) from None
        except DamagedError:
            # An input that is being rewritten cannot be decoded either, and the tiles may be of both.
            _check_inputs_stayed(job, output, ledger)
            raise
        found = reduce(Found.merged, (stored.found for stored in finished.values()), done.found)
        if plan.symmetric:  # nobody looked at B, which is A
            found = replace(found, b=found.a)
        findings = findings_of(factors, found)
        for caution in findings.cautions:
            job.warn(caution)
        try:
            verification = _verified(client, job, output, ledger) if job.verify else None
            _check_inputs_stayed(job, output, ledger)
        except DamagedProductError as error:
            if ledger is None or not (count := _withdraw_damaged(client, job, plan, output, ledger)):
                raise  # if all chunks can be read by now, somebody restored them
            tiles = counted(count, "tile")
            raise DamagedError(
                f"{error}; the same command computes {tiles} of it again, and keeps the rest"
            ) from error
        if told := not_finite_caution(factors, found, (plan.m, plan.n), verification):
            job.warn(told)
        # The record goes once C has its name, so that a crash before loses nothing; then what C replaces.
        for left in output.publish(ledger.remove) if ledger is not None else output.publish():
            job.say(left)
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
        workers_lost=done.workers_lost,
        wraps=findings.wraps,
        masked=findings.masked,
        not_finite=found.c.not_finite,
    )


@contextmanager
def _telling_what_is_kept(job: _Job, plan: MatmulPlan, digest: str) -> Iterator[None]:
    """Add to the error of a lost cluster what the next run need not do again."""
    try:
        yield
    except ClusterError as error:
        try:
            done = _recorded(job.out, digest)
        except StoreError:  # what ended the run is more to know than that
            raise error from None
        if not done:
            raise
        tiles = counted(plan.tile_count, "tile")
        raise type(error)(
            f"{error}; {done} of {tiles} are finished and kept, and the same command goes on there"
        ) from error


def _verified(client: Client, job: _Job, output: Output, ledger: Ledger | None) -> Verification:
    """Check the product before it gets its name. Raises VerificationError where it is wrong: it is kept, but not its
    record, since no later run may trust its tiles."""
    wanted = job.wanted
    verification = verify_product(
        client,
        wanted.a,
        wanted.b,
        output.whole,
        transpose_a=wanted.transpose_a,
        transpose_b=wanted.transpose_b,
        rounds=config.get("verify-rounds"),
        precision=wanted.precision,
        listener=job.listener,
    )
    if not verification.conclusive:
        job.warn(f"{verification}; the product is kept unverified")
    elif not verification.passed:
        _check_inputs_stayed(job, output, ledger)
        if ledger is not None and output.partial is not None:
            ledger.remove(output.partial)
        raise VerificationError(
            f"{verification}; the product is {_whereabouts(output)}, and the next run computes it anew"
        )
    return verification


def _whereabouts(output: Output) -> str:
    """Where a product is that is not to be trusted."""
    name = store.name_of(output.array)
    return (
        f"kept at {name} for inspection"
        if output.gathered is None
        else f"not merged into the session of {name}"
    )


def _check_inputs_stayed(job: _Job, output: Output, ledger: Ledger | None) -> None:
    """Raise StoreError where an input has changed since the work began: a product of both would get its name. Its
    record is removed, since the input may yet become what it was."""
    wanted = job.wanted
    if job.found is None or not (changed := changed_inputs(job.found, wanted.a, wanted.b)):
        return
    if ledger is not None and output.partial is not None:
        ledger.remove(output.partial)
    factors = {"A": wanted.a, "B": wanted.b}
    names = " and ".join(f"{role}, {store.name_of(factors[role])}," for role in changed)
    raise StoreError(
        f"{names} changed while C was computed, so that C may be of neither the old nor the new; it is"
        f" {_whereabouts(output)}, and the next run computes it anew: let nobody write to the inputs until that is done"
    )


def _withdraw_damaged(client: Client, job: _Job, plan: MatmulPlan, output: Output, ledger: Ledger) -> int:
    """Remove the tiles of C that cannot be read from the record: with them every later run would end in the same error.
    Returns how many. All of C is read, or each of them would take a run to find."""
    job.say("a chunk of C cannot be read; looking for all tiles with such ones")
    of_tiles = [(tile.index, region) for tile in plan.tiles() for region in plan.regions(tile)]
    places = find_damaged(client, output.array, (region for _, region in of_tiles), listener=job.listener)
    damaged = {of_tiles[place][0] for place in places}
    for index in sorted(damaged):
        ledger.withdraw(index)
    return len(damaged)


def _goes_on_smaller(facts: list[WorkerFacts], failed: MatmulPlan, plan: MatmulPlan, given_up: int) -> str:
    """One sentence about a plan that replaces one that was too large, and the tiles that it gives up."""
    place = "the GPU" if facts[0].device == "cuda" else "a worker"
    lost = f"; the {given_up} tiles that were finished are given up" if given_up else ""
    return (
        f"{place} ran out of memory under a plan of {_peak(failed)} a worker; it goes on with one of"
        f" {_peak(plan)}{lost}"
    )


def _check_distinct(out: Source, left: zarr.Array[Any], right: zarr.Array[Any]) -> None:
    """Refuse an output in the place of a factor: it replaces or fills what stands there."""
    path, name = store.local_path(out), store.name_of(out)
    kind, ours = store.location(out)
    for role, factor in (("A", left), ("B", right)):
        if isinstance(out, zarr.Array) and is_same_array(out, factor):
            raise OutputError(f"output: {name} is also {role}; C needs a place of its own")
        factor_kind, theirs = store.location(factor)
        if kind != factor_kind:
            continue
        if ours == theirs:
            raise OutputError(f"output: {name} is also {role}; C needs a place of its own")
        if ours in theirs.parents or theirs in ours.parents:
            raise OutputError(
                f"output: {name} and {role}, {store.name_of(factor)}, lie one inside the other; give C a place of its"
                " own"
            )
        if path is None:
            continue
        growing = partial_path(path).resolve()
        if growing == theirs or growing in theirs.parents:
            raise OutputError(
                f"output: {name} would grow at {partial_path(path)}, where {role} lies; give C another name"
            )


def _recorded(out: Source, digest: str) -> int:
    """How many finished tiles the growing output holds."""
    past = _find_past(out, digest)
    return len(past.finished) if past is not None else 0


def _find_past(out: Source, digest: str) -> Past | None:
    path = store.local_path(out)
    return read_past(partial_path(path), digest) if path is not None else None


def _holds_record(out: Source) -> bool:
    """Whether the growing output has a record of finished tiles, whatever they are of; one that can have no such name
    has none."""
    path = store.local_path(out)
    try:
        return path is not None and (partial_path(path) / FILE_NAME).is_file()
    except (OSError, ValueError):
        return False


def _goes_on(plan: MatmulPlan, past: Past) -> bool:
    """Whether the tiles that an earlier run finished are tiles of the plan."""
    return plan.geometry == past.geometry and max(past.finished, default=0) < plan.tile_count


def _open_output(
    out: Source,
    wanted: Wanted,
    plan: MatmulPlan,
    digest: str,
    past: Past | None,
    overwrite: bool,
) -> tuple[Output, Mapping[int, Stored]]:
    """The output to write to, and the tiles that it already holds, with their stored bytes."""
    path = store.local_path(out)
    if past is not None and path is not None:
        output = resume_output(path, overwrite)
        if output is not None:
            # Before we locked it, another run may have gone on with it, or begun something else in its place.
            try:
                past = _find_past(out, digest)
            except StoreError:
                output.release()
                raise
            if past is not None and _fits(output.array, wanted, plan) and _goes_on(plan, past):
                return output, past.finished
            output.release()
    output = create_output(
        out,
        (plan.m, plan.n),
        wanted.dtype,
        plan.c_unit,
        compressed=store.is_compressed(wanted.a),
        overwrite=overwrite,
        dimension_names=product_names(wanted.a, wanted.b, wanted.transpose_a, wanted.transpose_b),
    )
    return output, {}


def _fits(array: zarr.Array[Any], wanted: Wanted, plan: MatmulPlan) -> bool:
    """Whether a growing array can take the tiles of a plan. The names of its dimensions follow from the metadata of A
    and B, which the digest of an earlier run covers."""
    found = store.write_unit(array), array.shape, array.dtype
    return found == (plan.c_unit, (plan.m, plan.n), wanted.dtype)


def _kept(out: Source, wanted: Wanted, plan: MatmulPlan, past: Past) -> Collection[int] | None:
    """The tiles of an earlier run that a run would keep, by index; None where it would begin anew. Raises StoreError
    where it could not go on."""
    path = store.local_path(out)
    array = open_growing(path, mode="r") if path is not None else None
    if array is None or not _fits(array, wanted, plan):
        return None
    return _still_stored(array, plan, past.finished)


def _still_stored(
    array: zarr.Array[Any], plan: MatmulPlan, recorded: Mapping[int, Stored]
) -> dict[int, Stored]:
    """The recorded tiles whose chunks are as long as they were: a missing one would read as zeros, a short one not at
    all."""
    tiles = {tile.index: tile for tile in plan.tiles()} if recorded else {}

    def found(index: int) -> int | None:
        return stored_nbytes_of(array, plan.regions(tiles[index]))

    return {index: stored for index, stored in recorded.items() if found(index) == stored.nbytes}


def _sharing(facts: list[WorkerFacts]) -> frozenset[str]:
    """Workers that may share panels: processes with a GPU each."""
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


def _forget(index: int, nbytes: int, found: Found) -> None:
    """In-place outputs keep no record: nothing beside them is ours to write to."""
