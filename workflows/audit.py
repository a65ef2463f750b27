"""Look whether what is stored of a product, of EOFs, or of a search for neighbours, is what was written."""

from __future__ import annotations

import os
from pathlib import Path

from tilewright.kernels.arguments import check_callable, check_choice, check_flag
from tilewright.kernels.choices import PRECISIONS, PrecisionName
from tilewright.pipeline import config
from tilewright.pipeline.cluster.profiles import Cluster
from tilewright.pipeline.errors import OptionError, StoreError
from tilewright.pipeline.events import Listener, log_notices
from tilewright.pipeline.neighbours.audit import audit_neighbours
from tilewright.pipeline.neighbours.group import description_at
from tilewright.pipeline.product.audit import (
    UNDECODABLE,
    Audit,
    audit_by_checksums,
    audit_by_products,
    band_of,
    check_is_product,
    record_of,
    record_to_compare,
)
from tilewright.pipeline.product.output_group import is_group_of
from tilewright.pipeline.spectral.audit import audit_eofs
from tilewright.pipeline.spectral.eof_group import ALWAYS
from tilewright.pipeline.spectral.eof_group import KIND as EOFS
from tilewright.pipeline.store.arrays import (
    Input,
    Source,
    check_source,
    local_path,
    name_of,
    open_array,
)
from tilewright.pipeline.store.probe import shared_inputs
from tilewright.pipeline.store.region import base_of
from tilewright.pipeline.store.sources.parts import open_matrix
from tilewright.workflows.verify import checking


def audit(
    c: Source,
    a: Input | None = None,
    b: Input | None = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    precision: PrecisionName = "full",
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    listener: Listener = log_notices,
) -> Audit:
    """Look at every stored object of a product C, and name each that is missing, short, changed or in another's place.

    A C that ``matmul`` stored at a path, at a URL or in an open array has a record of checksums (XXH3, 64 bits, of the
    bytes as they are stored) beside its chunks, also while it grows. With it C is read once, by threads of this
    process, and A and B are not needed. A C without one is compared with ``a`` times ``b`` by Freivalds' check, in
    blocks as C is stored, on the cluster's workers.

    EOFs that ``eofs`` stored in a local folder have such records too, one beside the chunks of each array, and are
    compared with them alike.

    Of a group that ``topk`` or ``pairs`` stored in a local folder, all is read once, block by block: whether every
    chunk can be decoded, indices are of items of B, and neighbours or pairs are in order. Then 64 items, drawn at
    random, are compared with all of B anew, in double precision, by the check that a search ends with.

    Parameters
    ----------
    c
        A two-dimensional array: a path, a URL or an open ``zarr.Array``. Or the path of a group of neighbours, of
        pairs or of EOFs.
    a, b
        The factors, as for ``verify``: both or none. With them C is compared with their product, whether or not there
        are checksums. Of neighbours and pairs what they were made of; without, what the group names is opened. Of EOFs
        neither.
    transpose_a, transpose_b, precision, cluster, cluster_file
        As for ``verify``; they mean nothing without ``a`` and ``b``. Of neighbours and pairs only the last two: the
        group itself says how it was made. Of EOFs none.

    Returns
    -------
    Audit
        ``passed`` says the outcome, ``bad`` holds each bad object with its rows and columns of C and what is wrong with
        it. Damage is an answer here, not an error. Of neighbours and pairs a ``NeighbourAudit``, which also has the
        outcome of the ``check``.

    Raises
    ------
    TilewrightError
        One of its subclasses: there is no such array, it has no checksums and no factors were given, a file cannot be
        looked at, which says nothing of what it holds, or neighbours are of other matrices.

    Examples
    --------
    >>> import numpy as np
    >>> import tilewright as tw
    >>> run = tw.matmul(np.ones((4, 3)), np.ones((3, 5)), "product.zarr")
    >>> tw.audit("product.zarr").passed
    True
    """
    config.check_all(cluster_file=cluster_file)
    transpose_a, transpose_b = check_flag("transpose_a", transpose_a), check_flag("transpose_b", transpose_b)
    check_choice("precision", precision, PRECISIONS)
    check_callable("listener", listener)
    path = _local(c)
    description = None if path is None else description_at(path)
    if path is not None and description is not None:
        options = {"transpose_a": transpose_a, "transpose_b": transpose_b, "precision": precision != "full"}
        for option, given_one in options.items():
            if given_one:
                raise OptionError(
                    f"{option}: {name_of(c)} holds neighbours or pairs, and says itself how it was made; leave"
                    f" {option} out"
                )
        return audit_neighbours(
            path, name_of(c), description, a, b, cluster=cluster, cluster_file=cluster_file, listener=listener
        )
    if path is not None and is_group_of(path, EOFS):
        of_others = {
            "a": a is not None,
            "b": b is not None,
            "transpose_a": transpose_a,
            "transpose_b": transpose_b,
            "precision": precision != "full",
        }
        for option, is_given in of_others.items():
            if is_given:
                raise OptionError(
                    f"{option}: {name_of(c)} holds EOFs, which are compared with their checksums alone; leave {option}"
                    " out"
                )
        return audit_eofs(path, name_of(c), ALWAYS, listener)
    if (a is None) != (b is None):
        given, missing = ("a", "b") if b is None else ("b", "a")
        raise OptionError(
            f"{given} is given without {missing}: C is compared with the product of both; give both, or none"
        )
    product = open_array(c, ndim=2, role="C", growing=True)
    if a is None or b is None:
        record, finished = record_of(product)
        if record is None:
            raise StoreError(
                f"C: {name_of(product)} has no record of checksums (matmul keeps one, if the store has a place for"
                " it): give A and B (--a, --b), and it is compared with their product"
            )
        return audit_by_checksums(product, record, listener, finished=finished)
    without = "audit it without A and B, by its checksums"
    record = record_to_compare(product, listener)
    if record is not None and band_of(record) is not None:
        raise OptionError(
            f"C: {name_of(product)} is a band of the product of A and B, by its record, and 0 beside it; {without}, or"
            " ask verify, which knows bands"
        )
    left, right = open_matrix(a, "A"), open_matrix(b, "B")
    arrays = shared_inputs({"A": left, "B": right, "C": product}, copied=True)
    with checking(arrays, cluster, cluster_file, "audit", listener) as client:
        found = audit_by_products(
            client,
            arrays["A"],
            arrays["B"],
            base_of(arrays["C"]),
            listener=listener,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            rounds=config.get("verify-rounds"),
            precision=precision,
        )
    undecodable = any(one.reason == UNDECODABLE for one in found.bad)
    if not found.passed and not undecodable:  # that is damage, whatever C should hold
        check_is_product(product, record, without)
    return found


def _local(c: Source) -> Path | None:
    """Its local path; None where it is open, or at a URL. Raises StoreError for what is no name."""
    if not isinstance(c, str | os.PathLike):
        return None
    check_source(c, "C")
    return local_path(c)
