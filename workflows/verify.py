"""Check a stored product against its factors without computing it again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from tilewright.kernels.arguments import check_callable, check_choice, check_flag
from tilewright.kernels.choices import PRECISIONS, PrecisionName
from tilewright.kernels.cpu.thin import NUMPY_ELEMENTS
from tilewright.pipeline import config
from tilewright.pipeline.check.band import verify_band, verify_outside
from tilewright.pipeline.check.sides import StoredSide
from tilewright.pipeline.check.verify import (
    Verification,
    can_verify,
    check_plain,
    check_shapes,
    verify_product,
)
from tilewright.pipeline.cluster.answers import ask_all
from tilewright.pipeline.cluster.here.client import HereClient
from tilewright.pipeline.cluster.here.opening import open_executor
from tilewright.pipeline.cluster.profiles import Cluster
from tilewright.pipeline.cluster.watch import workers_held
from tilewright.pipeline.events import Caution, Listener, log_notices, on_waiting
from tilewright.pipeline.product.audit import band_of, check_is_product, record_to_compare
from tilewright.pipeline.product.banded import piece_region, stored_outside
from tilewright.pipeline.store.arrays import Input, open_array, write_unit
from tilewright.pipeline.store.attributes import packing_notice
from tilewright.pipeline.store.probe import check_read_alike, shared_inputs
from tilewright.pipeline.store.region import StoredArray, base_of
from tilewright.pipeline.store.sources.dasks import any_pending, computed_on
from tilewright.pipeline.store.sources.parts import open_matrix

if TYPE_CHECKING:
    from distributed import Client


@contextmanager
def checking(
    arrays: Mapping[str, StoredArray],
    cluster: Cluster,
    cluster_file: str | None,
    name: str,
    listener: Listener,
) -> Iterator[Client]:
    """A client whose workers can check these arrays, by their roles, and find them as they are here. name: of the work,
    for what is said while it waits. Raises as `verify`."""
    loops = sum(array.size for array in arrays.values()) > NUMPY_ELEMENTS
    with (
        open_executor(cluster, cluster_file, loops=loops, graphs=any_pending(arrays.values())) as client,
        workers_held(client, waiting=on_waiting(listener, name, "ends it")),
    ):
        # A worker that cannot import a task's function is ended by Dask, and the task waits for others for good.
        ask_all(client, can_verify)
        check_read_alike(partial(ask_all, client), arrays, here=isinstance(client, HereClient))
        computed_on(client, arrays.values())
        yield client


def verify(
    a: Input,
    b: Input,
    c: Input,
    *,
    rounds: int | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    precision: PrecisionName = "full",
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    listener: Listener = log_notices,
) -> Verification:
    """Check that C (m × n) = op(A) (m × k) op(B) (k × n) by Freivalds' test.

    Of a C of which only a band was computed, as its record says, the band is checked, and that 0 stands beside it. A
    record that cannot be read is told of, and C is checked as a whole product.

    Each task reads rows of an array, so A and C are read once, and B once, or partly twice where it holds NaN or
    infinity. But a chunk whose rows are those of several tasks is decoded for each of them: A's may be, where C's
    chunks have other rows, and all that have more rows than one task has memory for.

    Parameters
    ----------
    a, b, c
        Two-dimensional arrays of numbers: paths, URLs or open arrays of zarr-python.
    rounds
        Independent rounds, at least 1; unset: the setting ``tilewright.verify-rounds`` (2).
    transpose_a, transpose_b
        Whether C was made with the transpose of A or B.
    precision
        What C was made with: it sets the tolerance for rounding errors.
    cluster
        A profile of ``cluster_file``, a scheduler's address, a ``distributed.Client``, or a cluster of Dask's,
        such as a ``distributed.LocalCluster``, which is left open. The check runs on the workers' CPUs.

    Returns
    -------
    Verification
        ``passed`` says the outcome: a product that is wrong is an answer here, not an error. The docstring of
        ``Verification`` says what the check does not see: which infinity, or NaN, an element is that meets infinity,
        sums that may rightly overflow, and floats that are wrong by about a rounding error.

    Raises
    ------
    TilewrightError
        One of its subclasses: an array that is not there, sides that do not match, ``rounds`` below 1 or above 64.
        OptionError also for a C that is not the product, and more than that by its record, such as covariances:
        ``audit`` compares these with their checksums.

    Examples
    --------
    >>> import numpy as np
    >>> import tilewright as tw
    >>> a = np.arange(6.0).reshape(2, 3)
    >>> tw.verify(a, a.T, a @ a.T).passed, tw.verify(a, a.T, a @ a.T + 1).passed
    (True, False)
    """
    config.check_all(rounds=rounds, cluster_file=cluster_file)
    transpose_a, transpose_b = check_flag("transpose_a", transpose_a), check_flag("transpose_b", transpose_b)
    check_choice("precision", precision, PRECISIONS)
    check_callable("listener", listener)
    left, right = open_matrix(a, "A"), open_matrix(b, "B")
    product = open_array(c, ndim=2, role="C")
    record = record_to_compare(product, listener)
    band = None if record is None else band_of(record)
    arrays = shared_inputs({"A": left, "B": right, "C": product}, copied=True)
    for role, array in arrays.items():
        if note := packing_notice(role, array):
            listener(Caution(note))
    options: dict[str, Any] = {
        "rounds": config.get("verify-rounds", rounds),
        "precision": precision,
        "listener": listener,
    }
    with checking(arrays, cluster, cluster_file, "verify", listener) as client:
        given = arrays["A"], arrays["B"], base_of(arrays["C"])
        if band is None:
            found = verify_product(
                client, *given, transpose_a=transpose_a, transpose_b=transpose_b, **options
            )
        else:
            transposed = transpose_a, transpose_b
            sides = (StoredSide(one, turned).shape for one, turned in zip(given[:2], transposed, strict=True))
            check_shapes(given[2], *sides)
            check_plain(*given, precision)
            found = verify_band(client, *given, band, transposed=transposed, **options)
            whole, unit = given[2], write_unit(given[2])
            outside = {
                whole.metadata.encode_chunk_key(place): piece_region(place, unit, whole.shape)
                for place in stored_outside(whole, band, "C")
            }
            found = verify_outside(client, whole, found, outside, listener=listener)
    if not found.passed:
        remedy = "compare it with its checksums (tilewright audit), or compute it anew, which checks it"
        check_is_product(product, record, remedy)
    return found
