"""The run of a Gram matrix: open, look at the numbers, make transforms and epilogue of what is found, multiply."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr

from tilewright.kernels.passes.moments import Moments
from tilewright.pipeline.cluster.answers import ask_all
from tilewright.pipeline.cluster.here.client import HereClient
from tilewright.pipeline.cluster.here.opening import open_executor
from tilewright.pipeline.cluster.watch import workers_held
from tilewright.pipeline.errors import DamagedError, OptionError, StoreError
from tilewright.pipeline.events import Caution, Listener, Notice, log_notices, on_waiting
from tilewright.pipeline.forecast.hardware import Hardware
from tilewright.pipeline.gram.append import (
    appending,
    check_adds_lines,
    check_can_append,
    check_made_alike,
    has_all,
    held_at,
    not_additive,
    recorded,
)
from tilewright.pipeline.gram.digits import with_rest_of_means
from tilewright.pipeline.gram.options import GramRequest, Matrices, axis_of, empty_caution, open_matrices
from tilewright.pipeline.gram.statistics import STATISTICS, find_statistics, likely_missing, thin_product
from tilewright.pipeline.gram.transforms import (
    NARROW_NBYTES,
    Form,
    Made,
    Statistics,
    check_lines,
    form_of,
    haplotypes_told,
    lines_notice,
    made_exact,
    made_of_pairs,
    made_transformed,
    result_dtype,
    stays_exact,
    wanted_of,
    with_divisor,
    with_nan,
)
from tilewright.pipeline.gram.widening import (
    Widening,
    begin_widened,
    kept_sentence,
    widened,
    widening_of,
)
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.product.execute import MatmulRun
from tilewright.pipeline.product.job import multiply, plan_unplaced
from tilewright.pipeline.product.job import plan_only as plan_product
from tilewright.pipeline.product.repair import multiply_or_accept
from tilewright.pipeline.product.request import Request, check_output, open_factors
from tilewright.pipeline.provenance import OPTIONS
from tilewright.pipeline.report.timeline import Recorder
from tilewright.pipeline.store.appearance import appearance_of
from tilewright.pipeline.store.arrays import local_path, name_of
from tilewright.pipeline.store.probe import check_read_alike, shared_inputs
from tilewright.pipeline.store.region import StoredArray
from tilewright.pipeline.store.sources.dasks import any_pending, computed_on
from tilewright.pipeline.transfer.files import let_a_tick_pass

if TYPE_CHECKING:
    from distributed import Client


def gram(request: GramRequest) -> MatmulRun:
    """Store the Gram matrix that is asked for, as ``tilewright.gram`` says, and raise as it does."""
    request = request.checked()
    request = replace(request, listener=Recorder.of(request.listener))
    matrices = open_matrices(request)
    if told := empty_caution(matrices):
        request.listener(Caution(told))
    form = form_of(matrices)
    dtype = result_dtype(matrices, form, request.dtype)
    plain = _plain(request, matrices, dtype)
    # All that can be refused before the numbers are read, which may take as long as the product.
    out: Any = plain.out  # which the check of it refuses where it is None
    plain = replace(plain, recorded=recorded(request, matrices))
    widening = None
    if request.append:
        check_can_append(request)
        check_output(out, open_factors(plain), overwrite=True)
        c = held_at(out)
        widening = None if c is None else _widening(request, matrices, c)
        _check_keeps_layout(request, widening)
        if widening is None and (c is not None or not_additive(request, matrices) is None):
            return _added(request, matrices, form, plain, c)
        if widening is not None:
            form, dtype = _of_wider(request, matrices, form, widening)
            plain = replace(plain, dtype=dtype, overwrite=True, resume=True)
    else:
        check_output(out, open_factors(plain), overwrite=plain.overwrite)

    def run(product: Request) -> MatmulRun:
        if widening is None:
            return multiply_or_accept(product)
        begin_widened(widening, product, resume=request.resume)
        return multiply(product)

    wanted = {
        role: want for role in matrices.arrays if (want := wanted_of(matrices, role, form, request.constant))
    }
    if not wanted:
        return run(_with(plain, _made(request, matrices, form, {}, dtype)))
    with (
        open_executor(
            request.cluster,
            request.cluster_file,
            graphs=any_pending(matrices.arrays.values()),
        ) as client,
        workers_held(client, waiting=on_waiting(request.listener, STATISTICS, "ends it")),
    ):
        with unchanged(client, matrices.arrays, "its means were found", request.listener) as arrays:
            found = {
                role: find_statistics(client, arrays[role], want, request.listener)
                for role, want in wanted.items()
            }
            for role, of_role in found.items():
                missing = matrices.treatments[role].missing
                if told := likely_missing(role, matrices.arrays[role], missing, of_role):
                    request.listener(Caution(told))
                check_lines(matrices, role, of_role, request.constant)
                if told := lines_notice(matrices, role, of_role, request.constant):
                    request.listener(Notice(told))
            told = haplotypes_told(matrices, found)
            matrices = with_divisor(matrices, found)
            if told is not None:
                request.listener(Caution(told))
            if form == "exact" and not stays_exact(matrices, found):
                form = "transformed"
                request.listener(
                    Notice(
                        "the integers are too large, or too far from 0 beside their deviations, for sums that are"
                        f" centred afterwards: they are multiplied as {dtype}"
                    )
                )

            def thin(role: str, vector: np.ndarray) -> np.ndarray:
                return thin_product(client, arrays[role], matrices.of, vector, request.listener)

            made = _made(request, matrices, form, found, dtype, thin)
        return run(_with(replace(plain, cluster=client, cluster_file=None), made))


def result_of(request: GramRequest) -> tuple[tuple[int, int], np.dtype]:
    """The shape and the dtype of the result that `gram` would store. Raises as that, but for the output."""
    request = request.checked()
    matrices = open_matrices(request)
    factors = open_factors(
        _plain(request, matrices, result_dtype(matrices, form_of(matrices), request.dtype))
    )
    return factors.shape, factors.dtype


def plan_only(request: GramRequest) -> MatmulPlan:
    """The plan that `gram` would follow; nothing is written, and no number of X is read. Raises and tells as
    ``product.job.plan_only``."""
    request = request.checked()
    matrices = open_matrices(request)
    if told := empty_caution(matrices):
        request.listener(Caution(told))
    form = form_of(matrices)
    dtype = result_dtype(matrices, form, request.dtype)
    plain = replace(_plain(request, matrices, dtype), recorded=recorded(request, matrices))
    widening = None
    if request.append:
        check_can_append(request)
        c = held_at(request.out)
        widening = None if c is None else _widening(request, matrices, c)
        _check_keeps_layout(request, widening)
        if _is_whole(request, matrices, c):
            return _nothing_to_add(request, matrices, plain)
        if widening is None and (c is not None or not_additive(request, matrices) is None):
            return plan_product(_appended(request, matrices, form, plain, c))
        if widening is not None:
            form, dtype = _of_wider(request, matrices, form, widening)
            plain = replace(plain, dtype=dtype, overwrite=True)

    def planned(product: Request, *, resume: bool) -> MatmulPlan:
        if widening is None:
            return plan_product(replace(product, resume=resume and product.resume))
        past = widened(widening, product)
        plan = plan_product(replace(product, resume=False), past)
        kept = len(past.finished)
        request.listener(Notice(kept_sentence(widening, (plan.m, plan.n), kept, plan.tile_count)))
        return plan

    wanted = {
        role: want for role in matrices.arrays if (want := wanted_of(matrices, role, form, request.constant))
    }
    if not wanted:
        return planned(_with(plain, _made(request, matrices, form, {}, dtype)), resume=True)
    request.listener(
        Notice(
            "a pass over the matrix comes first, by which means and deviations are found; what a stopped run left is"
            " compared after it"
        )
    )
    # Vectors of the lengths that they will have.
    found = {
        role: {
            side: Moments.of_nothing(
                int(matrices.arrays[role].shape[axis_of(side)]),
                np.dtype(np.complex128 if matrices.arrays[role].dtype.kind == "c" else np.float64),
            )
            for side in want.sides
        }
        for role, want in wanted.items()
    }
    length = {role: int(array.shape[axis_of(matrices.of)]) for role, array in matrices.arrays.items()}
    made = _made(request, matrices, form, found, dtype, thin=lambda role, _: np.zeros(length[role]))
    return planned(_with(plain, made), resume=False)


def _widening(request: GramRequest, matrices: Matrices, c: zarr.Array[Any]) -> Widening | None:
    path = None if request.out is None else local_path(request.out)
    assert path is not None, "what may be appended to is at a local path"
    return widening_of(request, matrices, c, path)


def _check_keeps_layout(request: GramRequest, widening: Widening | None) -> None:
    """Raise OptionError where a C that becomes wider, whose stored chunks stay, is to be stored otherwise."""
    if widening is not None and request.storage:
        raise OptionError(
            f"{', '.join(request.storage.facts())} given with append=True, and the chunks of the result that becomes"
            " wider stay as they are stored; leave these away (--chunks, --shards, --codec), or compute it anew"
            " (overwrite=True without append)"
        )


def _of_wider(request: GramRequest, matrices: Matrices, form: Form, widening: Widening) -> tuple[Form, Any]:
    """How a wider C is formed, and its dtype: as the old one has it."""
    if not_additive(request, matrices) is None:
        form = _without_a_pass(matrices, form)
    return form, result_dtype(matrices, form, widening.dtype)


def _without_a_pass(matrices: Matrices, form: Form) -> Form:
    """Without a pass over all of X nobody knows whether sums of wide integers stay exact."""
    wide = any(array.dtype.itemsize > NARROW_NBYTES for array in matrices.arrays.values())
    return "transformed" if form == "exact" and wide else form


def _appended(
    request: GramRequest, matrices: Matrices, form: Form, plain: Request, c: zarr.Array[Any] | None
) -> Request:
    """The product that adds to C the lines of X that are not in it yet, or that makes C of all of them where there is
    none."""
    check_adds_lines(request, matrices)
    if c is not None:
        check_made_alike(request, matrices, c)
    asked = request.dtype if c is None or form == "plain" else c.dtype.newbyteorder("=")
    form = _without_a_pass(matrices, form)
    made = _made(request, matrices, form, {}, result_dtype(matrices, form, asked))
    return _with(plain, made) if c is None else appending(request, matrices, plain, made, c)


def _added(
    request: GramRequest, matrices: Matrices, form: Form, plain: Request, c: zarr.Array[Any] | None
) -> MatmulRun:
    """Run such a product, unless there is nothing to add."""
    if _is_whole(request, matrices, c):
        return MatmulRun.of_nothing(_nothing_to_add(request, matrices, plain))
    product = _appended(request, matrices, form, plain, c)
    if product.before is None or open_factors(product).k:
        return multiply(product)
    return MatmulRun.of_nothing(_nothing_to_add(request, matrices, product))


def _is_whole(request: GramRequest, matrices: Matrices, c: zarr.Array[Any] | None) -> bool:
    """Whether C, to which no lines could be added, has all of X in it. Sums are known by the lines that they lack."""
    return c is not None and not_additive(request, matrices) is not None and has_all(request, matrices, c)


def _nothing_to_add(request: GramRequest, matrices: Matrices, product: Request) -> MatmulPlan:
    """Say so; returns the plan of the product, of which nothing is computed."""
    lines = f"{matrices.length} {matrices.summed}"
    request.listener(Notice(f"the result has all {lines} of X in it already: nothing is added"))
    return plan_unplaced(replace(product, listener=lambda event: None), Hardware(), None, None)


def _plain(request: GramRequest, matrices: Matrices, dtype: Any) -> Request:
    """The product alone."""
    columns = matrices.of == "columns"
    plain = request.product(matrices.arrays, transpose_a=columns, transpose_b=not columns, dtype=dtype)
    plain = replace(plain, said={OPTIONS: request.told()}).checked()
    if request.constant == "nan" and (held := open_factors(plain).dtype).kind in "iu":
        raise OptionError(
            f"constant='nan': the result holds {held}, which has no NaN; ask for floats (dtype='float64', --dtype), or"
            " leave constant out: sums of integers that are all there have a value everywhere"
        )
    return plain


def _with(plain: Request, made: Made) -> Request:
    return replace(plain, transforms=made.transforms, epilogue=made.epilogue, pairwise=made.pairwise)


def _made(
    request: GramRequest,
    matrices: Matrices,
    form: Form,
    found: Mapping[str, Statistics],
    dtype: Any,
    thin: Callable[[str, np.ndarray], np.ndarray] | None = None,
) -> Made:
    """What the product is asked for besides its factors. thin: makes a second pass, as for `made_exact`, which may be
    needed if a first one was."""
    if form == "plain":
        return Made()
    if matrices.counts_pairs:
        made = made_of_pairs(matrices, found, np.dtype(dtype), request.constant)
        return with_rest_of_means(made, matrices, found)
    if form == "transformed":
        made = made_transformed(matrices, found, np.dtype(dtype), request.conjugated)
        made = with_rest_of_means(made, matrices, found)
    else:
        made = made_exact(matrices, found, thin or _no_pass)
    return with_nan(made, matrices, found) if request.constant == "nan" else made


def _no_pass(role: str, vector: np.ndarray) -> np.ndarray:
    raise AssertionError("a second pass comes after a first one")


@contextmanager
def unchanged(
    client: Client, given: Mapping[str, StoredArray], work: str, listener: Listener = log_notices
) -> Iterator[dict[str, StoredArray]]:
    """Matrices, given by their roles, as workers can read them. Raises StoreError where one is not at the end of the
    block what it was at its beginning; that comes in place of an error about a damaged chunk.

    work: what is done in the block, in words. listener: is told what was found in what had to be computed first.
    """
    arrays = shared_inputs(given)
    check_read_alike(partial(ask_all, client), arrays, here=isinstance(client, HereClient))
    for told in computed_on(client, arrays.values()):
        listener(Caution(told))
    looks = {role: appearance_of(array, status=True) for role, array in arrays.items()}
    let_a_tick_pass(time.monotonic())

    def check() -> None:
        for role, array in arrays.items():
            if appearance_of(array, status=True) != looks[role]:
                raise StoreError(
                    f"{role}, {name_of(array)}, changed while {work}, so that the result may be of neither the old nor"
                    " the new; let nobody write to it until the work is done"
                )

    try:
        yield arrays
    except DamagedError as error:
        try:
            check()
        except StoreError as change:
            raise change from error
        raise
    check()
