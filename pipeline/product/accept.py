"""A product that stands finished where it is asked for again: a later try of a batch job meets it, whose node failed
just after C had its name."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from tilewright.pipeline.errors import OutputExistsError, VerificationError
from tilewright.pipeline.events import Teller
from tilewright.pipeline.plan.grid import TileGrid
from tilewright.pipeline.product.audit import band_of, record_of
from tilewright.pipeline.product.execute import MatmulRun
from tilewright.pipeline.product.in_place import grow_again
from tilewright.pipeline.product.job import Repair, fingerprint_of, multiply
from tilewright.pipeline.product.ledger import record_bytes
from tilewright.pipeline.product.output import CHECKSUMS_NAME, exists_error, remove_growing
from tilewright.pipeline.product.repair import begin_again
from tilewright.pipeline.product.request import Request, may_be_accepted, open_factors
from tilewright.pipeline.store.arrays import local_path, name_of, open_array


def multiply_or_accept(request: Request) -> MatmulRun:
    """As `multiply`; but where ``tilewright.accept-finished`` is set and C stands finished in its place, with the
    record of this very product, it is read and checked, and no tile is computed again. At a URL it goes on as a run
    that was stopped after its last tile would, so that tiles prove to be of this A and B, or are computed again.

    Raises
    ------
    OutputExistsError
        What stands there is another product, or one of other numbers.
    """
    out: Any = request.out  # which the check of it refuses where it is None
    if not may_be_accepted(out, overwrite=request.overwrite):
        return multiply(request)
    factors = open_factors(request.checked())
    if factors.before is not None:  # C is asked for because it stands there
        return multiply(request)
    c = open_array(out, ndim=2, role="output")
    record, _ = record_of(c)
    if record is None or record.digest != fingerprint_of(factors).digest:
        raise exists_error(name_of(out))
    Teller(request.listener).say(
        f"{name_of(out)} holds this very product; it is checked, and not computed again"
    )
    if (path := local_path(out)) is None:  # it is marked as unfinished until it has been checked
        grow_again(os.fspath(out), record_bytes(record), CHECKSUMS_NAME)
        return multiply(replace(request, resume=True))
    grid = TileGrid.of(factors.shape, record.geometry, symmetric=factors.symmetric, band=band_of(record))
    begin_again(c, path, replace(record, inputs=None), grid, durable=request.durability == "full")
    try:
        # As a repair of nothing: C stays in its place until it is known to be the product, and other factors change
        # nothing of it.
        return multiply(replace(request, overwrite=True, resume=True), Repair({}))
    except VerificationError as error:
        remove_growing(path)
        raise OutputExistsError(
            f"output: {path} exists, and is not the product that is asked for ({error}); choose another path, or ask"
            " to overwrite it (--overwrite)"
        ) from error
