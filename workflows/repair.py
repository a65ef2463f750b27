"""Compute again what is damaged of a stored product."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import zarr
from zarr.storage import LocalStore

from tilewright.kernels.arguments import check_flag
from tilewright.kernels.choices import DeviceName, PrecisionName
from tilewright.pipeline.check.verify import no_product_of
from tilewright.pipeline.cluster.profiles import Cluster
from tilewright.pipeline.errors import DTypeError, OptionError, OutputError
from tilewright.pipeline.events import Listener, log_notices
from tilewright.pipeline.options import Durability
from tilewright.pipeline.product.audit import Audit, record_of
from tilewright.pipeline.product.ledger import Past
from tilewright.pipeline.product.repair import repair_by_checksums, repair_by_products
from tilewright.pipeline.product.request import Request, open_factors
from tilewright.pipeline.store.arrays import Input, Source, local_path, name_of, open_array
from tilewright.pipeline.store.probe import shared_inputs
from tilewright.pipeline.store.sources.parts import open_matrix
from tilewright.workflows.verify import checking


def repair(
    a: Input,
    b: Input,
    c: Source,
    *,
    transpose_a: bool | None = None,
    transpose_b: bool | None = None,
    precision: PrecisionName | None = None,
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    device: DeviceName = "auto",
    device_memory: int | str | None = None,
    durability: Durability = "full",
    listener: Listener = log_notices,
) -> Audit:
    """Find what is damaged of a product C = op(A) op(B), as ``audit`` does, and compute just that again.

    The tiles in which something is bad are computed again beside C, where its undamaged chunks get second names (hard
    links; copies on file systems without them). Once they hold the bytes that were written when C was made, or all of C
    has passed the check, the repaired C takes C's place in one step. Until then C stands as it was; a repair that is
    stopped goes on where it stood when it is run again. Nothing is written where nothing is bad.

    Parameters
    ----------
    a, b
        The factors that C was computed from, as for ``matmul``.
    c
        The product: a local path, or an open ``zarr.Array`` in one.
    transpose_a, transpose_b, precision
        As C was computed; unset: what its record says, or no transpose and ``full`` where it has none.
    cluster, cluster_file, device, device_memory, durability
        As for ``matmul``. On another kind of device, or with less memory, tiles of floats may differ from the old ones
        in their last bits.

    Returns
    -------
    Audit
        What was bad, in ``bad``; ``repaired`` is the number of tiles that were computed again, None where all was well.

    Raises
    ------
    TilewrightError
        One of its subclasses, and C is left as it was: VerificationError where A and B are not those that C was
        computed from, OptionError where they have other shapes or transposes or C is in no local folder, StoreError
        where its metadata were changed, OutputError where it is not finished, or what ``matmul`` raises.

    Examples
    --------
    >>> tw.repair("A.zarr", "B.zarr", "C.zarr").passed  # doctest: +SKIP
    True
    """
    product = open_array(c, ndim=2, role="C")
    path = _place(c, product)
    record, finished = record_of(product)
    if not finished:
        raise OutputError(
            f"C: {name_of(product)} is not finished: the matmul that began it goes on with it, and computes again what"
            " is damaged"
        )
    of_record = _of_record(record)
    request = Request(
        a,
        b,
        path,
        _given("transpose_a", transpose_a, of_record[0]),
        _given("transpose_b", transpose_b, of_record[1]),
        dtype=product.dtype.newbyteorder("="),
        # checked() refuses others
        precision=cast(PrecisionName, of_record[2]) if precision is None else precision,
        cluster=cluster,
        cluster_file=cluster_file,
        device=device,
        device_memory=device_memory,
        durability=durability,
        listener=listener,
    ).checked()
    for role, given in (("A", request.a), ("B", request.b)):
        factor = open_matrix(given, role)
        if not np.can_cast(factor.dtype, product.dtype, "same_kind"):
            raise DTypeError(no_product_of(role, factor, product))
    if record is not None:
        return repair_by_checksums(request, product, path, record)
    factors = open_factors(request)
    arrays = shared_inputs({**factors.roles, "C": product}, copied=True)
    with checking(arrays, cluster, cluster_file, "repair", listener) as client:
        return repair_by_products(client, request, product, path, arrays["A"], arrays["B"])


def _place(c: Source, product: zarr.Array[Any]) -> Path:
    """Where C lies. Raises OptionError unless it is a local folder."""
    path = local_path(c)
    if path is None and isinstance(c, zarr.Array) and isinstance(c.store, LocalStore):
        path = c.store.root / c.path
    if path is None or not isinstance(product.store, LocalStore):
        raise OptionError(
            f"C: {name_of(product)} is not in a local folder, where a repaired array could take its place: copy it to"
            " one, or compute it anew"
        )
    return path


def _of_record(record: Past | None) -> tuple[bool, bool, str]:
    """Transposes and precision that C was computed with, if its record says that."""
    said = record.request if record is not None else {}
    transpose_a, transpose_b = said.get("transpose", (False, False))
    return bool(transpose_a), bool(transpose_b), str(said.get("precision", "full"))


def _given(name: str, flag: bool | None, default: bool) -> bool:
    return default if flag is None else check_flag(name, flag)
