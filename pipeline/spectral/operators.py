"""A stored matrix times thin ones, each product computed as any other is: planned, streamed, and transformed while
panels are made. The thin matrices lie in a folder that all workers see."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from distributed import Client

from tilewright.pipeline.check.verify import Verification
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.events import Caution, Event, Listener, Notice, UnitDone, WorkDone, WorkPlanned
from tilewright.pipeline.plan.transform import Transform
from tilewright.pipeline.product.execute import MatmulRun
from tilewright.pipeline.product.job import multiply
from tilewright.pipeline.product.request import Request
from tilewright.pipeline.spectral.options import Search, without_effect
from tilewright.pipeline.store.arrays import Source, open_array, read_unit
from tilewright.pipeline.store.groups import ended
from tilewright.pipeline.store.region_read import read_region
from tilewright.pipeline.transfer.files import with_remedy

PRODUCTS = "matmul"
"""The name of a product in its events."""


@dataclass
class Spent:
    """What products have cost so far."""

    passes: int = 0
    """Over the large matrix, from its begin to its end."""
    read_nbytes: int = 0
    operations: int = 0
    device: str = ""
    workers: int = 0

    def add(self, run: MatmulRun) -> None:
        self.passes += 1
        self.read_nbytes += run.read_nbytes
        self.operations += run.operations
        self.device, self.workers = run.device, run.plan.workers


@dataclass(frozen=True)
class Streamed:
    """A stored matrix M with what is made of its numbers, and where thin matrices go.

    Thin matrices have names, which stand for files in ``folder``; one replaces another of its name.
    """

    client: Client
    search: Search
    source: Source
    array: zarr.Array[Any]
    transform: Transform
    folder: Path
    tell: PassTeller
    spent: Spent = field(default_factory=Spent)

    @property
    def dtype(self) -> np.dtype:
        """Of the products."""
        return self.transform.dtype

    def put(self, name: str, block: np.ndarray, axis: int) -> None:
        """Store a thin matrix by whose rows the matrix is multiplied along an axis."""
        unit = max(1, min(read_unit(self.array)[axis], block.shape[0]))
        path = self.folder / name

        def create() -> zarr.Array[Any]:
            array = zarr.create_array(
                path,
                shape=block.shape,
                chunks=(unit, block.shape[1]),
                dtype=self.dtype,
                compressors=None,
                overwrite=True,
            )
            array[...] = block.astype(self.dtype)
            return array

        try:
            ended(create)
        except OSError as error:
            raise StoreError(
                f"scratch: cannot write {path}: {with_remedy(error)}; choose another folder"
            ) from error

    def get(self, name: str) -> np.ndarray:
        """A thin matrix, in double precision."""
        array = self.open(name)
        region = tuple(slice(0, side) for side in array.shape)
        return read_region(array, region).astype(np.complex128 if self.dtype.kind == "c" else np.float64)

    def open(self, name: str) -> zarr.Array[Any]:
        return open_array(self.folder / name, ndim=2, role=name)

    def multiply(
        self,
        name: str,
        by: str,
        *,
        transpose: bool = False,
        conjugate: bool = False,
        verify: bool = False,
        transform: Transform | None = None,
    ) -> Verification | None:
        """Store M, its transpose or the conjugate of either, times a thin matrix.

        transform: another than the matrix's own.
        """
        own = self._made(transform or self.transform, conjugate)
        return self._store(
            name, str(self.folder / by), transpose_a=transpose, verify=verify, transforms=(own, None)
        )

    def gram(self, name: str, *, columns: bool, verify: bool) -> Verification | None:
        """Store the sums of products of every two columns of M, or rows: of the one by the conjugate of the other."""
        transforms = self._made(self.transform, columns), self._made(self.transform, not columns)
        return self._store(
            name,
            self.source,
            transpose_a=columns,
            transpose_b=not columns,
            verify=verify,
            transforms=transforms,
        )

    def _made(self, transform: Transform, conjugate: bool) -> Transform | None:
        made = replace(transform, conjugate=conjugate and self.dtype.kind == "c")
        return None if without_effect(made, self.array.dtype) else made

    def _store(self, name: str, by: Source, **options: Any) -> Verification | None:
        run = multiply(
            Request(
                self.source,
                by,
                str(self.folder / name),
                dtype=self.dtype,
                precision=self.search.precision,
                cluster=self.client,
                device=self.search.device,
                device_memory=self.search.device_memory,
                resume=False,
                overwrite=True,
                durability="none",
                listener=self.tell.of_pass(self.spent.passes + 1),
                **options,
            )
        )
        self.spent.add(run)
        return run.verification


class PassTeller:
    """Tells a listener of the products of a larger work: how far each has come, under a name of its own, and once what
    is to be known of all of them."""

    def __init__(self, listener: Listener, what: str) -> None:
        self.listener = listener
        self._what = what
        self._said: set[str] = set()

    def say(self, message: str) -> None:
        self.listener(Notice(message))

    def warn(self, message: str) -> None:
        self.listener(Caution(message))

    def of_pass(self, number: int) -> Listener:
        """The listener of one product."""
        name = f"{self._what}, pass {number}"
        return lambda event: self.hear(event, name)

    def hear(self, event: Event, name: str) -> None:
        if isinstance(event, WorkPlanned | UnitDone | WorkDone):
            self.listener(replace(event, name=name if event.name == PRODUCTS else f"{name}: {event.name}"))
        elif isinstance(event, Caution):
            if event.message not in self._said:
                self._said.add(event.message)
                self.listener(event)
        elif type(event) is not Notice:  # of choices that every product makes alike
            self.listener(event)
