"""A stored matrix times thin ones, each product computed as any other is: planned, streamed, and transformed while
panels are made. The thin matrices lie in a folder that all workers see."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr

from tilewright.pipeline.check.verify import Verification
from tilewright.pipeline.errors import DamagedError, StoreError
from tilewright.pipeline.events import Caution, Event, Listener, Notice, UnitDone, WorkDone, WorkPlanned
from tilewright.pipeline.plan.called import Names
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.plan.transform import Epilogue, Transform
from tilewright.pipeline.product.execute import MatmulRun
from tilewright.pipeline.product.job import multiply, plan_only
from tilewright.pipeline.product.request import Request
from tilewright.pipeline.spectral.options import Search, without_effect
from tilewright.pipeline.spectral.passes import Passes, is_same_block
from tilewright.pipeline.store.arrays import Given, open_array, read_unit
from tilewright.pipeline.store.new.groups import ended
from tilewright.pipeline.store.region import StoredArray
from tilewright.pipeline.store.region_read import read_region
from tilewright.pipeline.transfer.files import with_remedy

if TYPE_CHECKING:
    from distributed import Client

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
    source: Given
    array: StoredArray
    transform: Transform
    folder: Path
    tell: PassTeller
    spent: Spent = field(default_factory=Spent)
    passes: Passes | None = None
    """What of the products is kept for a run that goes on."""

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

    def begin(self, name: str, block: np.ndarray, axis: int) -> None:
        """`put`, for products of which an earlier run may have made some, with the same block: then that stays."""
        if self.passes is not None and self._holds(name, block):
            return
        if self.passes is not None:
            self.passes.forget_under_way(self.spent.passes + 1)
        self.put(name, block, axis)

    def _holds(self, name: str, block: np.ndarray) -> bool:
        """Whether a thin matrix is there, whole, and is this one."""
        try:
            return self._held(name) is not None and is_same_block(self.get(name), block, self.dtype)
        except (StoreError, DamagedError):
            return False

    def _held(self, name: str) -> zarr.Array[Any] | None:
        try:
            return self.open(name)
        except StoreError:
            return None

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
        epilogue: Epilogue | None = None,
        again: bool = False,
    ) -> Verification | None:
        """Store M, its transpose or the conjugate of either, times a thin matrix.

        transform: another than the matrix's own. epilogue: of the product. again: as in `_store`.
        """
        own = self._made(transform or self.transform, conjugate)
        return self._store(
            name,
            str(self.folder / by),
            again=again,
            transpose_a=transpose,
            verify=verify,
            transforms=(own, None),
            epilogue=epilogue,
        )

    def gram(self, name: str, *, columns: bool, verify: bool) -> Verification | None:
        """Store the sums of products of every two columns of M, or rows: of the one by the conjugate of the other."""
        transforms = self._made(self.transform, columns), self._made(self.transform, not columns)
        return self._store(
            name,
            self.source,
            again=False,
            transpose_a=columns,
            transpose_b=not columns,
            verify=verify,
            transforms=transforms,
        )

    def _made(self, transform: Transform, conjugate: bool) -> Transform | None:
        made = replace(transform, conjugate=conjugate and self.dtype.kind == "c")
        return None if without_effect(made, self.array.dtype) else made

    def plan(self, by: Given, out: Path, **options: Any) -> MatmulPlan:
        """Of a product of M, or its transpose, by a stored matrix; nothing is computed."""
        return plan_only(replace(self._request(by, out, self.tell.listener), **options))

    def _request(self, by: Given, out: Path, listener: Listener) -> Request:
        """For a product of M, where it does not matter how M is multiplied."""
        return Request(
            self.source,
            by,
            str(out),
            dtype=self.dtype,
            precision=self.search.precision,
            cluster=self.client,
            device=self.search.device,
            device_memory=self.search.device_memory,
            resume=False,
            overwrite=True,
            durability="none",
            listener=listener,
            hardware=self.search.hardware,
            names=Names("X", "X" if by is self.source else "the thin matrix", "the product"),
        )

    def _store(self, name: str, by: Given, *, again: bool = True, **options: Any) -> Verification | None:
        """again: whether a run that goes on has to make this product once more."""
        number = self.spent.passes + 1
        if self.passes is not None and not again and self.passes.is_done(number, name, self._held(name)):
            self.spent.passes += 1
            return None
        request = self._request(by, self.folder / name, self.tell.of_pass(number))
        run = multiply(replace(request, **options))
        self.spent.add(run)
        if self.passes is not None and not again:
            self.passes.keep_under_way(number, name)
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
        if message not in self._said:  # as a product may have
            self._said.add(message)
            self.listener(Caution(message))

    def of_pass(self, number: int) -> Listener:
        """The listener of one product."""
        name = f"{self._what}, pass {number}"
        return lambda event: self.hear(event, name)

    def hear(self, event: Event, name: str) -> None:
        if isinstance(event, WorkPlanned | UnitDone | WorkDone):
            self.listener(replace(event, name=name if event.name == PRODUCTS else f"{name}: {event.name}"))
        elif isinstance(event, Caution):
            self.warn(event.message)
        elif type(event) is not Notice:  # of choices that every product makes alike
            self.listener(event)
