"""Launches recorded once, with the addresses of the arrays left open, and replayed with other addresses.

What a kernel of the ladder does on the host, from choosing tiles to packing arguments, depends on the shapes, strides
and dtypes of its operands, and on where they lie modulo `ALIGNMENT`. So it is done once: a `Recording` stands for the
stream, a `Place` for an address, `Found` for what is looked up by it, and what would have been launched becomes the
steps of a `Plan`. A `Rehearsal` stands for the stream where nothing is to be kept but the kernels themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

ALIGNMENT = 128
"""A recorded launch may depend on an address only modulo this."""
SCRATCH = 3
"""The base of scratch memory; bases 0, 1 and 2 are A, B and C."""


@dataclass(frozen=True)
class Place:
    """An address of which only the remainder by `ALIGNMENT` is known yet."""

    base: int
    """Which of the arrays it lies in."""
    offset: int
    """From the array's first element, in bytes."""
    remainder: int
    """Of the first element's address, by `ALIGNMENT`."""

    def __add__(self, nbytes: int) -> Place:
        return Place(self.base, self.offset + nbytes, self.remainder)

    def __mod__(self, divisor: int) -> int:
        if ALIGNMENT % divisor:
            raise ValueError(f"of an open address only remainders by divisors of {ALIGNMENT} are known")
        return (self.remainder + self.offset) % divisor


@dataclass(frozen=True)
class Found:
    """Values of a launch that are found from addresses when these are known, such as where a description of a matrix
    lies that tells its address."""

    find: Callable[[Sequence[int]], Sequence[int]]
    """From the addresses that were left open, all values of a launch."""
    lock: Any
    """Held from finding them until the kernel is enqueued."""

    def values(self, count: int) -> list[FoundValue]:
        """What stands for the first ``count`` of them in a recorded launch."""
        return [FoundValue(self, number) for number in range(count)]


@dataclass(frozen=True)
class FoundValue:
    """One of them."""

    source: Found
    number: int


@dataclass(frozen=True)
class Step:
    """One launch."""

    name: str
    """Of the kernel, for errors."""
    function: Any
    """The driver's handle."""
    layout: Any
    """`struct.Struct` of the arguments."""
    values: tuple[Any, ...]
    """What is packed; 0 where an address goes."""
    places: tuple[tuple[int, int, int], ...]
    """(index in values, base, offset) of every address."""
    shape: tuple[int, int, int, int, int, int]
    """Grid and block."""
    shared_nbytes: int
    cluster: int
    found: Found | None = None
    """Where some values come from."""
    found_places: tuple[tuple[int, int], ...] = ()
    """(index in values, number) of each."""


@dataclass(frozen=True)
class Plan:
    """Launches in their order, on one stream of one device."""

    steps: tuple[Step, ...]
    scratch_nbytes: int
    """Scratch memory that the launches use one after the other."""


class Recording:
    """Stands in for the stream while a kernel's launches are recorded."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._scratch_nbytes = 0

    def borrow(self, nbytes: int) -> Place:
        self._scratch_nbytes = max(self._scratch_nbytes, nbytes)
        return Place(SCRATCH, 0, 0)

    def add(
        self,
        name: str,
        function: Any,
        layout: Any,
        values: list[Any],
        shape: tuple[int, int, int, int, int, int],
        shared_nbytes: int,
        cluster: int,
    ) -> None:
        places = tuple(
            (index, value.base, value.offset)
            for index, value in enumerate(values)
            if isinstance(value, Place)
        )
        found = [(index, value) for index, value in enumerate(values) if isinstance(value, FoundValue)]
        sources = {id(value.source): value.source for _, value in found}
        if len(sources) > 1:
            raise ValueError("the values that a launch finds must come from one source")
        self._steps.append(
            Step(
                name,
                function,
                layout,
                tuple(0 if isinstance(value, Place | FoundValue) else value for value in values),
                places,
                shape,
                shared_nbytes,
                cluster,
                next(iter(sources.values()), None),
                tuple((index, value.number) for index, value in found),
            )
        )

    def plan(self) -> Plan:
        return Plan(tuple(self._steps), self._scratch_nbytes)


@dataclass(frozen=True)
class Rehearsal:
    """Stands in for a stream while its launches are only prepared: kernels are compiled and loaded, and the stream's
    scratch memory is made, but nothing is launched."""

    stream: Any
