"""What a GPU does to panels before they are multiplied, and to tiles before they are stored: the twin of `HostFusion`.

Imported once a GPU is found. The vectors of transforms and epilogue are uploaded once, with the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from numba import cuda

from tilewright.kernels.gpu.device_array import Memory
from tilewright.kernels.gpu.memory import allocating
from tilewright.kernels.gpu.transfer import urgent_stream
from tilewright.kernels.passes import pairs_device
from tilewright.kernels.passes import transform_device as kernels
from tilewright.pipeline.plan.pairs import (
    CONSTANT_MARGIN,
    COUNT,
    LEFT,
    LEFT_SQUARES,
    PRODUCT,
    RIGHT,
    RIGHT_SQUARES,
    Form,
    Pairwise,
    unit_of,
)
from tilewright.pipeline.plan.told import Product
from tilewright.pipeline.plan.transform import (
    Epilogue,
    Transform,
    as_number,
    missing_element,
    number_dtype,
    wide_dtype,
)
from tilewright.pipeline.worker.fusion import Buffers, Fill, Region, accumulators, pieces_of_all, within
from tilewright.pipeline.worker.panels import Placed

FORM_FLAGS: dict[Form, int] = {"values": 0, "squares": kernels.SQUARES, "presence": kernels.PRESENCE}


class _Transform:
    """One operand's transform, with its vectors on the GPU."""

    def __init__(self, transform: Transform, stored: np.dtype) -> None:
        self.dtypes = stored, transform.dtype
        self.offset = float(transform.offset)
        vectors = (
            (transform.row_offsets, kernels.ROW_OFFSETS),
            (transform.column_offsets, kernels.COLUMN_OFFSETS),
            (transform.row_factors, kernels.ROW_FACTORS),
            (transform.column_factors, kernels.COLUMN_FACTORS),
        )
        nothing = np.zeros(1, transform.dtype)
        self.vectors = [_uploaded(nothing if vector is None else vector) for vector, _ in vectors]
        self.flags = sum(flag for vector, flag in vectors if vector is not None)
        missing = missing_element(transform, stored)
        self.missing = _uploaded(np.array([0 if missing is None else missing], stored))
        for is_so, flag in (
            (transform.offset != 0, kernels.OFFSET),
            (transform.missing == "nan", kernels.BUT_NAN),
            (missing is not None, kernels.BUT_EQUAL),
            (transform.conjugate, kernels.CONJUGATE),
        ):
            self.flags |= flag if is_so else 0

    def enqueue(self, source: Memory, target: Memory, region: Region, form: Form, stream: Any) -> None:
        rows, columns = region
        parts = [
            _part(vector, side)
            for vector, side in zip(self.vectors, (rows, columns, rows, columns), strict=True)
        ]
        kernels.transform(
            source, target, (parts[0], parts[1]), self.offset, (parts[2], parts[3]), self.missing,
            self.flags | FORM_FLAGS[form], stream,
        )  # fmt: skip


class _Epilogue:
    """The epilogue, with its vectors on the GPU."""

    def __init__(self, epilogue: Epilogue, sums: np.dtype, stored: np.dtype, before: np.dtype) -> None:
        self.beta = bool(epilogue.beta)
        self.wide = wide_dtype(stored, sums)
        self.dtypes = sums, self.wide, stored, before
        number = number_dtype(self.wide)
        pairs = epilogue.has_pairs
        vectors = (
            (epilogue.row_pairs if pairs else None, kernels.PAIRS),
            (epilogue.column_pairs if pairs else None, kernels.PAIRS),
            (epilogue.row_factors, kernels.ROW_FACTORS),
            (epilogue.column_factors, kernels.COLUMN_FACTORS),
            (epilogue.row_offsets, kernels.ROW_OFFSETS),
            (epilogue.column_offsets, kernels.COLUMN_OFFSETS),
        )
        nothing = np.zeros(1, number)
        self.vectors = [
            _uploaded(nothing if vector is None else vector.astype(number, copy=False))
            for vector, _ in vectors
        ]
        numbers = epilogue.alpha, epilogue.pair_weight, epilogue.offset, epilogue.beta
        # As `transform.put_diagonal` rounds it.
        self.diagonal = None if epilogue.diagonal is None else _uploaded(epilogue.diagonal.astype(stored))
        self.numbers = _uploaded(np.array([as_number(value, number) for value in numbers], number))
        self.flags = 0
        for is_so, flag in (
            *((vector is not None, flag) for vector, flag in vectors),
            (epilogue.alpha != 1, kernels.ALPHA),
            (epilogue.offset != 0, kernels.OFFSET),
            (self.beta, kernels.BETA),
        ):
            self.flags |= flag if is_so else 0

    def enqueue(self, sums: Memory, target: Memory, before: Memory, region: Region, stream: Any) -> None:
        parts = [_part(vector, region[place % 2]) for place, vector in enumerate(self.vectors)]
        vectors = parts[0], parts[1], parts[2], parts[3], parts[4], parts[5]
        kernels.finish(sums, target, before, vectors, self.numbers, self.wide, self.flags, stream)
        if self.diagonal is not None:
            rows, columns = region
            top = max(rows.start, columns.start)
            bottom = max(top, min(rows.stop, columns.stop))
            kernels.put_diagonal(
                target, self.diagonal[top:bottom], top - rows.start, top - columns.start, stream
            )


class _Pairs:
    """What is formed of several sums over the pairs that are both there."""

    def __init__(self, pairwise: Pairwise, sums: np.dtype, stored: np.dtype) -> None:
        self._forms, self._ddof, self._unit = pairwise.forms, pairwise.ddof, unit_of(sums)
        self.dtypes = sums, stored
        self._flags = 0
        for is_so, flag in (
            (pairwise.centered or pairwise.scaled, pairs_device.CENTERED),
            (pairwise.scaled, pairs_device.SCALED),
            (pairwise.own, pairs_device.OWN),
            (pairwise.constant_is_zero, pairs_device.CONSTANT_IS_ZERO),
        ):
            self._flags |= flag if is_so else 0

    def enqueue(self, sums: list[Memory], target: Memory, region: Region, stream: Any) -> None:
        held = dict(zip(self._forms, sums, strict=True))
        rows, columns = region
        pairs_device.combine(
            (
                held[PRODUCT],
                held[COUNT],
                held.get(LEFT, sums[0]),
                held.get(RIGHT, sums[0]),
                held.get(LEFT_SQUARES, sums[0]),
                held.get(RIGHT_SQUARES, sums[0]),
            ),
            target,
            self._unit,
            CONSTANT_MARGIN,
            self._ddof,
            columns.start - rows.start,
            self._flags,
            stream,
        )


class GpuFusion:
    """Transforms on the stream of the products, and finishes tiles on one of its own."""

    def __init__(self, product: Product, allocate: Callable[[int, np.dtype], Any], stream: Any) -> None:
        plan, fused = product.plan, product.fused
        self._buffers = Buffers(plan, allocate)
        self._stream, self._finish_stream = stream, urgent_stream("finishing")
        stored = np.dtype(plan.a_dtype), np.dtype(plan.b_dtype)
        with allocating("the vectors of a transform", fused.nbytes, on_gpu=True):
            made: dict[int, _Transform] = {}
            self._transforms: list[_Transform | None] = []
            for transform, dtype in zip(fused.transforms, stored, strict=True):
                if transform is not None and id(transform) not in made:
                    made[id(transform)] = _Transform(transform, dtype)
                self._transforms.append(None if transform is None else made[id(transform)])
            before = np.dtype(plan.before_dtype) if plan.before_dtype else plan.stored
            self._pairs = None if fused.pairwise is None else _Pairs(fused.pairwise, plan.sums, plan.stored)
            self._epilogue = (
                None if fused.epilogue is None else _Epilogue(fused.epilogue, plan.sums, plan.stored, before)
            )

    def prepare(self) -> None:
        """Compile and load the kernels that will be launched."""
        for transform in self._transforms:
            if transform is not None:
                kernels.TRANSFORM.prepare(*transform.dtypes)
        if self._epilogue is not None:
            kernels.FINISH.prepare(*self._epilogue.dtypes)
            if self._epilogue.diagonal is not None:
                kernels.DIAGONAL.prepare(self._epilogue.dtypes[2])
        if self._pairs is not None:
            pairs_device.COMBINE.prepare(*self._pairs.dtypes)

    def scratch(self, operand: int, panel: Placed) -> Placed:
        return self._buffers.operand(operand, panel) if self._transforms[operand] is not None else panel

    def transform(self, operand: int, panel: Placed, region: Region, form: Form = "values") -> Placed:
        transform = self._transforms[operand]
        if transform is None:
            return panel
        place = self._buffers.operand(operand, panel)
        for piece in pieces_of_all(panel, place):
            source, target = _memory(panel, *piece), _memory(place, *piece)
            transform.enqueue(source, target, within(region, piece), form, self._stream)
        return place

    @contextmanager
    def finishing(self, tile: Placed, region: Region, before: Fill) -> Iterator[Placed]:
        epilogue, pairs = self._epilogue, self._pairs
        if pairs is not None:
            cuda.current_context()  # attaches the thread to the GPU
            planes, target = accumulators(self._buffers.plan, tile), self._buffers.tile(tile)
            for piece in pieces_of_all(*planes, target):
                each = [_memory(plane, *piece) for plane in planes]
                pairs.enqueue(each, _memory(target, *piece), within(region, piece), self._finish_stream)
            self._finish_stream.synchronize()
            yield target
            return
        if epilogue is None:
            yield tile
            return
        with self._buffers.finishing if self._buffers.apart else nullcontext():
            cuda.current_context()  # attaches the thread to the GPU
            target = held = self._buffers.tile(tile)
            if epilogue.beta:
                held = self._buffers.before(tile)
                before(held)
            for piece in pieces_of_all(tile, target, held):
                sums, stored, was = (_memory(one, *piece) for one in (tile, target, held))
                epilogue.enqueue(sums, stored, was, within(region, piece), self._finish_stream)
            self._finish_stream.synchronize()
            yield target

    def close(self) -> None:
        self._buffers.free()
        self._transforms, self._epilogue, self._pairs = [None, None], None, None


def _uploaded(vector: np.ndarray) -> Any:
    return cuda.to_device(np.ascontiguousarray(vector))


def _part(vector: Any, side: slice) -> Any:
    """A part of a vector on the GPU; all of one that stands for none."""
    return vector if vector.size == 1 else vector[side]


def _memory(placed: Placed, rows: slice, columns: slice) -> Memory:
    shape = rows.stop - rows.start, columns.stop - columns.start
    strides = placed.pitch * placed.dtype.itemsize, placed.dtype.itemsize
    return Memory(placed.address(rows.start, columns.start), shape, strides, placed.dtype, 0, False)
