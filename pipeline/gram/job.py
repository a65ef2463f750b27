"""The run of a Gram matrix: open, look at the numbers, make transforms and epilogue of what is found, multiply."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from distributed import Client

from tilewright.pipeline.cluster.answers import ask_all
from tilewright.pipeline.cluster.cluster import open_cluster
from tilewright.pipeline.cluster.watch import workers_held
from tilewright.pipeline.errors import DamagedError, StoreError
from tilewright.pipeline.events import Notice, on_waiting
from tilewright.pipeline.gram.options import GramRequest, Matrices, open_matrices
from tilewright.pipeline.gram.statistics import STATISTICS, find_statistics, thin_product
from tilewright.pipeline.gram.transforms import (
    Form,
    Made,
    Statistics,
    check_lines,
    form_of,
    made_exact,
    made_of_pairs,
    made_transformed,
    result_dtype,
    stays_exact,
    wanted_of,
)
from tilewright.pipeline.product.accept import multiply_or_accept
from tilewright.pipeline.product.execute import MatmulRun
from tilewright.pipeline.product.request import Request, check_output, open_factors
from tilewright.pipeline.store.appearance import appearance_of
from tilewright.pipeline.store.arrays import name_of
from tilewright.pipeline.store.probe import check_read_alike, shared_inputs
from tilewright.pipeline.store.region import StoredArray
from tilewright.pipeline.transfer.files import let_a_tick_pass


def gram(request: GramRequest) -> MatmulRun:
    """Store the Gram matrix that is asked for, as ``tilewright.gram`` says, and raise as it does."""
    request = request.checked()
    matrices = open_matrices(request)
    form = form_of(matrices)
    dtype = result_dtype(matrices, form, request.dtype)
    plain = _plain(request, matrices, dtype)
    # All that can be refused before the numbers are read, which may take as long as the product.
    out: Any = plain.out  # which the check of it refuses where it is None
    check_output(out, open_factors(plain), overwrite=plain.overwrite)
    wanted = {role: want for role in matrices.arrays if (want := wanted_of(matrices, role, form))}
    if not wanted:
        return multiply_or_accept(_with(plain, _made(request, matrices, form, {}, dtype)))
    with (
        open_cluster(request.cluster, request.cluster_file) as client,
        workers_held(client, waiting=on_waiting(request.listener, STATISTICS, "ends it")),
    ):
        with unchanged(client, matrices.arrays, "its means were found") as arrays:
            found = {
                role: find_statistics(client, arrays[role], want, request.listener)
                for role, want in wanted.items()
            }
            for role, of_role in found.items():
                check_lines(matrices, role, of_role, request.constant)
            if form == "exact" and not stays_exact(matrices, found):
                form = "transformed"
                request.listener(
                    Notice(
                        "the integers are too large, or too far from 0 beside their deviations, for sums that are"
                        f" centred afterwards: they are multiplied as {dtype}"
                    )
                )
            made = _made(request, matrices, form, found, dtype, client, arrays)
        return multiply_or_accept(_with(replace(plain, cluster=client, cluster_file=None), made))


def _plain(request: GramRequest, matrices: Matrices, dtype: Any) -> Request:
    """The product alone."""
    columns = matrices.of == "columns"
    return request.product(
        matrices.arrays, transpose_a=columns, transpose_b=not columns, dtype=dtype
    ).checked()


def _with(plain: Request, made: Made) -> Request:
    return replace(plain, transforms=made.transforms, epilogue=made.epilogue, pairwise=made.pairwise)


def _made(
    request: GramRequest,
    matrices: Matrices,
    form: Form,
    found: Mapping[str, Statistics],
    dtype: Any,
    client: Client | None = None,
    arrays: Mapping[str, StoredArray] | None = None,
) -> Made:
    """What the product is asked for besides its factors. client, arrays: where and of what a second pass may be needed,
    which only is so if a first one was."""
    if form == "plain":
        return Made()
    if matrices.counts_pairs:
        return made_of_pairs(matrices, found, np.dtype(dtype), request.constant)
    if form == "transformed":
        return made_transformed(matrices, found, np.dtype(dtype), request.conjugated)

    def thin(role: str, vector: np.ndarray) -> np.ndarray:
        assert client is not None
        assert arrays is not None
        return thin_product(client, arrays[role], matrices.of, vector, request.listener)

    return made_exact(matrices, found, thin)


@contextmanager
def unchanged(
    client: Client, given: Mapping[str, StoredArray], work: str
) -> Iterator[dict[str, StoredArray]]:
    """Matrices, given by their roles, as workers can read them. Raises StoreError where one is not at the end of the
    block what it was at its beginning; that comes in place of an error about a damaged chunk.

    work: what is done in the block, in words.
    """
    arrays = shared_inputs(given)
    check_read_alike(partial(ask_all, client), arrays)
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
