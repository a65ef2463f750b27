"""The run of a product, from a request to a published C: open, survey, plan, run, verify, publish.

`plan_for` in `request` has the plan made, by `pipeline/plan/`; `execute` runs its tiles.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zarr

from tilewright.kernels.gpu.memory import is_address_limit
from tilewright.kernels.numbers import counted, format_nbytes
from tilewright.pipeline import config
from tilewright.pipeline.check.verify import Verification
from tilewright.pipeline.cluster.answers import ask_all
from tilewright.pipeline.cluster.heartbeats import told_of
from tilewright.pipeline.cluster.here.client import HereClient
from tilewright.pipeline.cluster.here.opening import open_executor
from tilewright.pipeline.cluster.profiles import Cluster
from tilewright.pipeline.cluster.watch import workers_held
from tilewright.pipeline.errors import (
    DamagedError,
    DeviceMemoryError,
    OutputError,
    PlanError,
    StoreError,
    VerificationError,
)
from tilewright.pipeline.events import Teller, on_waiting
from tilewright.pipeline.forecast.hardware import Hardware
from tilewright.pipeline.plan.inputs import WorkerFacts, most_neighbours
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.plan.told import Found, Product, StoredObject, TileReport
from tilewright.pipeline.product.audit import changed_metadata
from tilewright.pipeline.product.banded import WINDOW
from tilewright.pipeline.product.beside import (
    arrays_of,
    created_with_counts,
    finals_of,
    growing_counts,
    names_of,
    resumed_with_counts,
    with_finals,
)
from tilewright.pipeline.product.durability import Durability, Keeping, sync_begun, sync_on_hosts
from tilewright.pipeline.product.execute import MatmulRun, TileTask, on_all, run_tiles
from tilewright.pipeline.product.findings import (
    cautions,
    few_tiles_note,
    findings_of,
    found_of,
    not_finite_caution,
    sought_in,
    telling_of_wrapped_sums,
    wrap_note,
)
from tilewright.pipeline.product.fusing import check_not_added
from tilewright.pipeline.product.in_place import growing_in_place
from tilewright.pipeline.product.inputs import Fingerprint, InputChangedError, InputWatch, fingerprint
from tilewright.pipeline.product.kept import (
    NONE_KEPT,
    Kept,
    check_same_bits,
    count_earlier,
    goes_on,
    keeping_what_is_finished,
    kept_note,
    kept_tiles,
    telling_what_is_kept,
    with_their_groups,
    would_keep_note,
)
from tilewright.pipeline.product.ledger import REPAIR, Ledger, Past, journal_at, read_journal
from tilewright.pipeline.product.mend import Check, mended
from tilewright.pipeline.product.output import (
    FILE_NAME,
    MARK_NAME,
    Output,
    create_output,
    holds_tiles,
    lacks_mark,
    open_growing,
    partial_path,
    resume_output,
    resume_output_in_place,
)
from tilewright.pipeline.product.output_group import missing_folders
from tilewright.pipeline.product.request import (
    Factors,
    Request,
    check_output,
    need_loops_soon,
    open_factors,
    plan_for,
)
from tilewright.pipeline.provenance import first_attributes, record_provenance, record_sides, settle_in_group
from tilewright.pipeline.report.timeline import Recorder
from tilewright.pipeline.store import arrays as store
from tilewright.pipeline.store.appearance import Appearance, appearance_of
from tilewright.pipeline.store.arrays import Source
from tilewright.pipeline.store.attributes import masks_of, product_names, sides_of
from tilewright.pipeline.store.coordinates import left_behind
from tilewright.pipeline.store.journal import journal_in
from tilewright.pipeline.store.objects import folder_of
from tilewright.pipeline.store.probe import check_read_alike, check_written_alike, shared_inputs
from tilewright.pipeline.store.region import StoredArray, base_of
from tilewright.pipeline.store.sources.dasks import any_pending, computed_on
from tilewright.pipeline.worker import tasks
from tilewright.pipeline.worker.survey import survey

if TYPE_CHECKING:
    from distributed import Client


@dataclass(frozen=True)
class Repair:
    """That a run only puts right what is damaged in a finished C. Its undamaged tiles lie in the growing output."""

    written: Mapping[tuple[int, ...], StoredObject]
    """All objects of C as they were written, by their places; empty where no record says that."""


@dataclass(frozen=True)
class Job:
    """What all attempts at a product share."""

    client: Client
    request: Request
    out: Source
    path: Path | None
    """Where C is to lie on a local disk; None: elsewhere."""
    factors: Factors
    """As the workers multiply them."""
    inputs: Fingerprint
    """Of the factors before the first tile."""
    tell: Teller
    repair: Repair | None = None
    task: TileTask = tasks.multiply_tile


def multiply(
    request: Request, repair: Repair | None = None, *, task: TileTask = tasks.multiply_tile
) -> MatmulRun:
    """Store the product that is asked for, as ``tilewright.matmul`` says, and raise as it does.

    repair: it is computed only to replace what is damaged in C (`repair.py`), or to check a C that is
    finished. Then no other tile is computed again:
    VerificationError says that A and B are not those that C was computed from. What is computed needs no check where it
    has the very bytes that were written. task: as in `run_tiles`.
    """
    request = request.checked()
    request = replace(request, listener=(recorder := Recorder.of(request.listener)))
    out: Any = request.out  # which the check of it refuses where it is None
    factors = open_factors(request)
    check_output(out, factors, overwrite=request.overwrite)
    factors, shared = _shared(factors)
    path = store.local_path(out)
    inputs = None if factors.before is None else fingerprint_of(factors)
    if inputs is not None and path is not None:
        check_not_added(path, inputs.inputs, lambda before: fingerprint_of(factors, before).digest)
    tell = Teller(request.listener)
    tell.warn_once(cautions(factors, out, request.precision))
    loops = need_loops_soon(factors, verify=request.verify)
    at_once = "cpu" in loops and (request.device == "cpu" or "cuda" in loops)
    where, graphs = (request.cluster, request.cluster_file), any_pending(shared.values())
    with (
        open_executor(*where, loops=at_once, graphs=graphs) as client,
        workers_held(client, waiting=on_waiting(request.listener, "matmul", "ends it")),
        told_of(client, recorder.heard),
    ):
        facts = survey(client, request.device, loops=loops)
        ask = partial(ask_all, client)
        check_read_alike(ask, shared, here=isinstance(client, HereClient))
        tell.warn_once(computed_on(client, shared.values()))
        for place in filter(None, [out, factors.counts]):
            for note in check_written_alike(ask, place):
                tell.warn(note)
        if inputs is None:
            inputs = fingerprint_of(factors)  # as late as can be: nobody waits for a cluster any more
        job = Job(client, request, out, path, _as_computed(factors, facts), inputs, tell, repair, task)
        try:
            return _attempt(job, facts)
        except _TooLarge as failed:
            first = failed
        on_all(client, tasks.release_memory)
        # What is free has changed, or it would have fitted.
        facts = survey(client, request.device, loops=loops)
        try:
            return _attempt(job, facts, failed=first.plan)
        except PlanError as error:
            raise _out_of_memory(first, f"no plan of half of that will do: {error}") from error
        except _TooLarge as second:
            raise _out_of_memory(second, f"the plan before it took {_peak(first.plan)}") from second.error


def plan_only(request: Request, begun: Past | None = None) -> MatmulPlan:
    """The plan that `multiply` would follow; nothing is written. begun: the record with which C would be begun, where
    that is not without any tile.

    Notices tell what `multiply` would warn of before its first tile, what it would refuse C for, what it would keep of
    a run that was stopped, and where sums of integers could wrap in C's dtype. Raises as ``tilewright.matmul`` does for
    factors and clusters, and PlanError where no tile fits or there would be too many.
    """
    request = request.checked()
    out: Any = request.out
    factors, _ = _shared(open_factors(request))
    if not isinstance(out, zarr.Array) and config.path_text(out) is None:
        store.check_source(out, "output")  # raises; names that are only refused are planned for
    tell = Teller(request.listener)
    tell.warn_once(cautions(factors, out, request.precision))
    try:
        check_output(out, factors, overwrite=request.overwrite)
    except (StoreError, OutputError) as error:
        tell.warn(f"without --plan-only this would be refused: {error}")
    if note := wrap_note(factors):
        tell.warn(note)
    facts = _survey_for_plan(request, request.cluster)
    past, kept = None, None
    # A digest takes a look at every file of A and B, so it is made only where there is something to compare it with.
    found = request.resume and _holds_record(out)
    looks = None
    if found:
        now = fingerprint_of(factors)
        looks = now.inputs
        try:
            past = _find_past(out, now.digest)
        except StoreError as error:
            found = False
            tell.warn(f"without --plan-only this would be refused: {error}")
    factors = _as_computed(factors, facts)
    plan = plan_for(factors, out, facts, past or begun, verify=request.verify)
    if past is not None and goes_on(plan, past):
        try:
            if request.same_bits:
                check_same_bits(plan, past)
            kept = _kept(out, factors, plan, past)
        except (PlanError, StoreError) as error:
            found = False
            tell.warn(f"without --plan-only this would be refused: {error}")
    if past is not None and kept is not None and kept.finished:
        condition = (
            ""
            if past.inputs == looks
            else "; if A and B, which look otherwise now, prove to hold what it read of them"
        )
        tell.say(would_keep_note(plan, past, kept) + condition)
    elif found and kept is None:
        tell.say("an earlier run left tiles that do not fit this product or its plan; they would be replaced")
    if note := few_tiles_note(plan, past):
        tell.say(note)
    finished = kept.finished if kept is not None else ()
    tell.warn_once(cautions(factors, out, request.precision, facts, plan, finished, replaced=kept is None))
    return plan


def plan_unplaced(
    request: Request, hardware: Hardware, host: int | None, cluster: Cluster | None
) -> MatmulPlan:
    """The plan of a product that goes nobody knows where: for the workers of a cluster, or without one for those of
    some hardware, each with ``host`` bytes. Raises as ``tilewright.plan_matmul``."""
    factors = open_factors(request)
    factors.storage.check(None, factors.dtype)
    tell = Teller(request.listener)
    note = wrap_note(factors)
    tell.warn_once([*cautions(factors, None, request.precision), *([note] if note else [])])
    if cluster is None:
        facts = hardware.facts(request.device, host, request.device_memory)
    else:
        facts = _survey_for_plan(request, cluster)
    plan = plan_for(factors, None, facts)
    tell.warn_once(cautions(factors, None, request.precision, facts, plan))
    return plan


def _survey_for_plan(request: Request, cluster: Cluster) -> list[WorkerFacts]:
    if (named := request.hardware) is not None:
        return named.facts(request.device, None, request.device_memory)
    with (
        open_executor(cluster, request.cluster_file, loops=False) as client,
        workers_held(client, waiting=on_waiting(request.listener, "plan", "ends it")),
    ):
        return survey(client, request.device, loops=())


def _shared(factors: Factors) -> tuple[Factors, dict[str, StoredArray]]:
    """The factors as workers get them, and by their roles. Raises StoreError where workers cannot reach one."""
    before: dict[str, StoredArray] = {} if factors.before is None else {"output": factors.before}
    shared = shared_inputs(factors.roles | before)
    now = base_of(shared["output"]) if before else None
    return replace(factors, a=shared["A"], b=shared["B"], before=now), shared


def _as_computed(factors: Factors, facts: list[WorkerFacts]) -> Factors:
    """The product as such workers compute it: a CPU has no tensor cores."""
    return replace(factors, precision="full") if facts[0].device == "cpu" else factors


def fingerprint_of(factors: Factors, before: list[str] | None = None) -> Fingerprint:
    """What the record of a product's finished tiles is compared by, of factors as they are asked for: where a CPU
    computes in full what is asked of tensor cores, it goes on with their tiles, and they with its.

    before: how what C held looked, where that is added to it, if not as now."""
    request = {
        "transpose": list(factors.transposed),
        "symmetric": factors.symmetric,
        "dtype": str(factors.dtype),
        "precision": factors.precision,
        # Of the attributes, only what is stored with C or counted in its factors.
        "names": product_names(factors.a, factors.b, *factors.transposed),
        "masks": [repr(masks_of(array)) for array in (factors.a, factors.b)],
    }
    if factors.band is not None:
        request[WINDOW] = list(factors.band)
    request |= factors.recorded
    if factors.fused:
        request |= {"fused": factors.fused.digests(), "sums": str(factors.sums)}
    if factors.counts is not None:
        request["counts"] = True
    if factors.storage:
        request["storage"] = factors.storage.facts()
    if factors.before is None:
        return fingerprint(factors.a, factors.b, request)
    # No tile goes on that something else was added to.
    now = list(appearance_of(factors.before)) if before is None else before
    return fingerprint(factors.a, factors.b, request | {"before": now})


def _check_before(job: Job) -> None:
    """Raise InputChangedError where what C held has changed since it was first looked at."""
    before = job.factors.before
    if before is not None and list(appearance_of(before)) != job.inputs.request["before"]:
        raise InputChangedError(
            f"C, {store.name_of(before)}, changed while the product was computed that is added to it, so that the sum"
            " may be of neither the old nor the new; it is left as it is, and the next run computes the sum anew: let"
            " nobody write to it until that is done"
        )


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


def _attempt(job: Job, facts: list[WorkerFacts], failed: MatmulPlan | None = None) -> MatmulRun:
    """Plan, run, verify and publish once.

    ``failed`` is the plan under which a worker ran out of memory before: this one takes at most half of its memory, and
    goes on with the finished tiles of the failed plan, as with those of any earlier run.

    Raises
    ------
    _TooLarge
        A worker ran out of memory. The workers hold nothing of the run, and the growing output and its record are left
        as after any other error.
    """
    request, out, tell = job.request, job.out, job.tell
    most_nbytes = (failed.device_peak_nbytes - failed.ahead_nbytes) // 2 if failed is not None else None
    resume = request.resume or failed is not None
    past = _find_past(out, job.inputs.digest) if resume else None
    plan = plan_for(job.factors, out, facts, past, most_nbytes, verify=request.verify)
    if failed is not None:
        tell.say(_goes_on_smaller(facts, failed, plan))
    if past is not None and not goes_on(plan, past):
        if past.finished:
            tell.say("an earlier run left a record of tiles that C cannot have; it starts anew")
        past = None
    elif past is None and resume and (why := _why_nothing_is_kept(job)):
        tell.say(f"an earlier run left {why}; its tiles are replaced, and it starts anew")
    if past is not None and past.fault:
        tell.say(past.fault)
    if past is not None and job.path is not None and lacks_mark(job.path):
        tell.say(f"{partial_path(job.path)} has lost its mark, {MARK_NAME}, which is put back")
    tell.say(_choice(facts, plan))
    if note := few_tiles_note(plan, past):
        tell.say(note)
    altered = _altered(job.path, past) if job.path is not None and past is not None else ""
    folders = missing_folders(job.path)
    output, found = _open_output(job, plan, past, request.overwrite)
    if past is not None and past.finished and (found is None or not found.finished):
        tell.say(f"an earlier run left an array that is no more what it was; it starts anew{altered}")
    with keeping_what_is_finished(output, folders):
        if job.repair is not None and found is None:
            output.remove()
            raise StoreError(
                f"{output.partial}, in which {output.final} was to be repaired, is no more what it was; let only one"
                " run write there at a time, and repair it again"
            )
        return _fill(job, facts, plan, output, found)


def _fill(
    job: Job, facts: list[WorkerFacts], plan: MatmulPlan, output: Output, past: Past | None
) -> MatmulRun:
    """Compute the tiles that the output lacks, verify and publish. past: what is recorded of those that it has. Raises
    as `_attempt`."""
    client, request, factors, tell = job.client, job.request, job.factors, job.tell
    if past is not None and request.same_bits:
        check_same_bits(plan, past)
    # A repair has just read what it keeps.
    whole = job.repair is None
    arrays = arrays_of(output)
    counts = arrays.get("counts")
    kept = NONE_KEPT
    if past is not None:
        kept = kept_tiles(output.array, plan, past, whole=whole, beside=counts)
    finished = dict(kept.finished)
    if past is not None and kept.earlier < len(past.finished):
        lost = counted(len(past.finished) - kept.earlier, "tile")
        tell.say(
            f"{lost} of an earlier run lost stored pieces in {store.name_of(output.array)}, or they are damaged, and"
            " will be computed again"
        )
    read = past.read if past is not None else {}
    watch = InputWatch(
        client,
        factors.roles,
        plan,
        job.inputs,
        tell,
        finished,
        read,
        _whereabouts(output),
        with_their_groups,
        names=factors.names,
        repairing=job.repair is not None,
    )
    looks: tuple[Appearance, Appearance] | None = job.inputs.inputs
    other_panels = past is not None and past.recipes != (plan.recipe,)
    if past is not None and job.repair is not None:
        looks = past.inputs  # not those that the undamaged tiles were computed from
        watch.compare_repaired(other_panels=other_panels)
    elif past is not None:
        watch.compare_past(past.inputs, other_panels=other_panels)
    if past is not None and finished:
        kept = Kept(count_earlier(plan, past, finished), finished)
        if job.repair is None:
            tell.say(kept_note(plan, past, kept, verify=request.verify))
    earlier = past.recipes if past is not None and finished else ()
    tell.warn_once(cautions(factors, job.out, request.precision, facts, plan, finished))
    product = product_of(factors, facts, plan, output)
    with ExitStack() as stack:
        ledger = None
        lease = None if output.in_place is None else output.in_place.lease
        journal = journal_in(output.array, FILE_NAME, None if lease is None else lease.check)
        if journal is not None:
            # The lock says that no other client writes there any more; its workers may not know that yet.
            for array in arrays.values():
                on_all(client, tasks.end_past_runs, store.place_of(array), product.run)
            ledger = Ledger(
                journal,
                job.inputs.digest,
                plan,
                finished,
                output.array,
                earlier=earlier,
                request=job.inputs.request | ({REPAIR: True} if job.repair is not None else {}),
                inputs=looks,
                read=watch.hashes(),
                beside=counts,
            )
            watch.record = stack.enter_context(closing(ledger))
            stack.enter_context(telling_what_is_kept(plan.tile_count, ledger))
        keeping = Keeping(ledger, output.array, beside=counts)
        roots = [root.absolute() for array in arrays.values() if (root := folder_of(array)) is not None]
        if ledger is not None and roots and request.durability == "full":
            for root in roots:
                sync_begun(root)
            keeping.durability = stack.enter_context(
                Durability(sync_on_hosts(client, *map(str, roots)), ledger.settle, ledger.lose)
            )
            keeping.settle({index: stored for index, stored in finished.items() if not stored.synced})
        keep = output.gathered.keep if output.gathered is not None else None

        # A GPU's tiles may be less precise than what a CPU goes on with.
        precise = all(recipe.on_host for recipe in (*earlier, plan.recipe))
        checked = job if precise else replace(job, factors=replace(factors, precision=request.precision))
        computed: list[tuple[MatmulRun, Found]] = []

        def compute() -> None:
            # On the workers an earlier run of it is over.
            again = replace(product, run=uuid.uuid4().hex[:12])
            try:
                computed.append(_run_all(job, again, facts[0].name, watch, keeping.record, keep))
            except DeviceMemoryError as error:
                raise _TooLarge(plan, error) from None
            except DamagedError:
                # An input that is being rewritten cannot be decoded either, and the tiles may be of both.
                watch.check_stayed()
                raise

        compute()
        verification = None
        if request.verify and not _as_written(job, ledger, kept):
            with telling_of_wrapped_sums(factors, lambda: [found for _, found in computed]):
                verification = _verified(checked, plan, output, ledger, watch, compute)
        watch.check_stayed()
        _check_before(job)
        run = reduce(MatmulRun.followed_by, (one for one, _ in computed))
        found = found_of(factors, [computed[0][1]] if ledger is None else ledger.found)
        findings = findings_of(factors, found)
        for caution in findings.cautions:
            tell.warn(caution)
        if told := not_finite_caution(factors, found, (plan.m, plan.n), verification):
            tell.warn(told)
        keeping.finish()
        if output.final is not None and job.repair is None:
            made = factors.made(checked.factors.precision, product.device)
            record_provenance(output.array, factors.roles, factors.transposed, made, verification)
            record_sides(with_finals(output), factors.roles, factors.transposed)
        if ledger is not None and request.durability == "none":
            tell.say(
                "C was not forced to disk (--durability none): until the system does so, a power cut may take parts of"
                " it, which tilewright audit finds"
            )
        # The record goes once C has its name, so that a crash before loses nothing; then what C replaces.
        for left in output.publish(keeping.removed, durable=request.durability == "full"):
            tell.say(left)
        for left in settle_in_group(finals_of(output), factors.a, factors.b, *factors.transposed):
            tell.say(left)
        if finals_of(output):
            for left in left_behind(*sides_of(factors.a, factors.b, *factors.transposed)):
                tell.warn(left)
    return replace(
        run,
        timeline=Recorder.of(request.listener).timeline(),
        resumed=len(finished),
        verification=verification,
        wraps=findings.wraps,
        masked=findings.masked,
        not_finite=found.c.not_finite,
        not_finite_expected=not told,
        names=names_of(factors.roles, output),
    )


def product_of(factors: Factors, facts: list[WorkerFacts], plan: MatmulPlan, output: Output) -> Product:
    """What workers are told to multiply."""
    return Product(
        a=factors.a,
        b=factors.b,
        c=output.array,
        plan=plan,
        device=facts[0].device,
        precision=factors.precision,
        run=uuid.uuid4().hex[:12],
        drafts=output.drafts,
        neighbours=most_neighbours(fact.address for fact in facts) if facts[0].device == "cuda" else 1,
        sharing=_sharing(facts),
        look=sought_in(factors),
        fused=factors.fused,
        before=factors.before,
        counts=None if output.beside is None else output.beside.array,
        counts_drafts=None if output.beside is None else output.beside.drafts,
    )


def _run_all(
    job: Job,
    product: Product,
    device_name: str,
    watch: InputWatch,
    record: Callable[[TileReport], None],
    keep: Callable[[bytes], None] | None,
) -> tuple[MatmulRun, Found]:
    """Compute every tile that is not finished, and then those that were, until an input proved to be another one than
    they were computed from. Raises as `run_tiles`, and StoreError where an input changes meanwhile."""

    def compute(product: Product) -> tuple[MatmulRun, Found]:
        finished, listener = watch.finished, job.request.listener
        return run_tiles(
            job.client, product, device_name, finished, listener, record, keep, watch.see, job.task
        )

    run, found = compute(product)
    while len(watch.finished) < product.plan.tile_count:
        more, also = compute(
            replace(product, run=uuid.uuid4().hex[:12])
        )  # on the workers the other one is over
        run, found = run.followed_by(more), found.merged(also)
    return run, found


def _verified(
    job: Job,
    plan: MatmulPlan,
    output: Output,
    ledger: Ledger | None,
    watch: InputWatch,
    compute: Callable[[], object],
) -> Verification:
    """Check the product before it gets its name, and mend it once where that can help. Raises VerificationError where
    it is wrong for good: it is kept, but not its record, since no later run may trust its tiles."""

    def again(bad: Collection[int]) -> None:
        watch.withdraw(bad)
        compute()

    counts = arrays_of(output).get("counts")
    check = Check(job.client, job.factors, plan, output.whole, job.request.listener, counts)
    if ledger is None or job.repair is not None:
        verification = check.run()
    else:
        verification = mended(check, ledger, again, watch.check_stayed, job.tell)
    if job.repair is not None and not verification.passed:
        raise VerificationError(
            f"{verification}; {output.final} is left as it is: give the A and B that it was computed from, or compute"
            " it anew (matmul --overwrite)"
        )
    if not verification.conclusive:
        job.tell.warn(f"{verification}; the product is kept unverified")
    elif not verification.passed:
        watch.check_stayed()
        if ledger is not None:
            ledger.remove()
        raise VerificationError(
            f"{verification}; the product is {_whereabouts(output)}, and the next run computes it anew"
        )
    return verification


def _as_written(job: Job, ledger: Ledger | None, kept: Kept) -> bool:
    """Whether all that a repair has computed holds the very bytes that were written when C was made."""
    if job.repair is None or ledger is None:
        return False
    again = [stored for index, stored in ledger.tiles.items() if index not in kept.finished]
    written = job.repair.written
    return bool(written) and all(written.get(one.place) == one for stored in again for one in stored.objects)


def _whereabouts(output: Output) -> str:
    """Where a product is that is not to be trusted."""
    name = store.name_of(output.array)
    return (
        f"kept at {name} for inspection"
        if output.gathered is None
        else f"not merged into the session of {name}"
    )


def _goes_on_smaller(facts: list[WorkerFacts], failed: MatmulPlan, plan: MatmulPlan) -> str:
    """One sentence about a plan that replaces one that was too large."""
    place = "the GPU" if facts[0].device == "cuda" else "a worker"
    return f"{place} ran out of memory under a plan of {_peak(failed)} a worker; it goes on with one of {_peak(plan)}"


def _find_past(out: Source, digest: str) -> Past | None:
    """What earlier runs left of the same product. Raises StoreError where that cannot be read now."""
    journal, array = journal_at(out)
    past = read_journal(journal) if journal is not None else None
    if past is None or past.digest != digest:
        return None
    # The plan is made for the array that is there, so what is recorded of another one is of no use.
    return None if array is not None and changed_metadata(array, past) else past


def _why_nothing_is_kept(job: Job) -> str:
    """What an earlier run left that is of no use to a product, in words; empty where it left nothing."""
    try:
        journal, array = journal_at(job.out)
        past = read_journal(journal) if journal is not None else None
        if past is None and journal is not None and journal.exists():
            return "a record of finished tiles that is damaged, or of another version of Tilewright"
        if past is None:
            if job.path is not None and holds_tiles(job.path):
                return f"{partial_path(job.path)} without a record of finished tiles"
            grown = array is not None and not isinstance(job.out, zarr.Array)
            return f"{store.name_of(job.out)} without a record of finished tiles" if grown else ""
        if past.digest == job.inputs.digest and array is not None:
            changed = changed_metadata(array, past)
            # If nothing was, another run has begun it since we looked; its lease will say so.
            return f"an array whose metadata were changed ({changed})" if changed else ""
    except (OSError, ValueError):  # one that can have no such name
        return ""
    return "tiles of other inputs, of another request, or of another version of Tilewright"


def _holds_record(out: Source) -> bool:
    """Whether the growing output has a record of finished tiles, whatever they are of; one that can have no such name
    has none."""
    try:
        journal, _ = journal_at(out)
        return journal is not None and journal.exists()
    except (OSError, ValueError):
        return False


def _open_output(
    job: Job, plan: MatmulPlan, past: Past | None, overwrite: bool
) -> tuple[Output, Past | None]:
    """The output to write to, and what is recorded of the tiles that it already holds; None where it is new."""
    out, path, factors = job.out, job.path, job.factors
    counts = None if job.repair is not None else factors.counts  # those that stand there are right
    if past is not None:
        output = resume_output(path, overwrite) if path is not None else resume_output_in_place(out)
        if output is not None:
            # Before we locked it, another run may have gone on with it, or begun something else in its place.
            try:
                past = _find_past(out, job.inputs.digest)
            except StoreError:
                output.release()
                raise
            if past is not None and _fits(output.array, factors, plan, past) and goes_on(plan, past):
                if (both := resumed_with_counts(output, counts, past, overwrite=overwrite)) is not None:
                    return both, past
            else:
                output.release()
    options: dict[str, Any] = {
        "storage": factors.storage,
        "compressed": store.is_compressed(factors.a),
        "dimension_names": job.inputs.request["names"],
        "attributes": first_attributes(path, factors.a, factors.b, *factors.transposed),
    }
    output = create_output(out, (plan.m, plan.n), factors.dtype, plan.c_unit, overwrite=overwrite, **options)
    return created_with_counts(output, counts, plan.c_unit, overwrite=overwrite, **options), None


def _altered(path: Path, past: Past) -> str:
    """What of the metadata of a growing array was changed, in brackets; empty where all is as it was, or cannot be
    read."""
    with suppress(StoreError):
        array = open_growing(path, mode="r")
        if array is not None and (changes := changed_metadata(array, past)):
            return f" ({changes})"
    return ""


def _fits(array: zarr.Array[Any], factors: Factors, plan: MatmulPlan, past: Past) -> bool:
    """Whether a growing array is still the one that an earlier run began, and can take the tiles of a plan. The names
    of its dimensions are covered by the digest of that run."""
    found = store.write_unit(array), array.shape, array.dtype
    return found == (plan.c_unit, (plan.m, plan.n), factors.dtype) and not changed_metadata(array, past)


def _kept(out: Source, factors: Factors, plan: MatmulPlan, past: Past) -> Kept | None:
    """The tiles of an earlier run that a run would keep; None where it would begin anew. Raises StoreError where it
    could not go on."""
    path = store.local_path(out)
    array = open_growing(path, mode="r") if path is not None else growing_in_place(out)
    if array is None or not _fits(array, factors, plan, past):
        return None
    beside = None
    if factors.counts is not None and (beside := growing_counts(factors.counts, past)) is None:
        return None
    return kept_tiles(array, plan, past, whole=path is None, beside=beside)


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
