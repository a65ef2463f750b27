"""What past runs have left on a worker, freed before work is planned there. Modules that hold such things say how, when
they are imported: where none is, nothing of them is there."""

from __future__ import annotations

from collections.abc import Callable

_frees: list[Callable[[], None]] = []


def frees(function: Callable[[], None]) -> Callable[[], None]:
    """A decorator of what frees something that no run uses any more."""
    _frees.append(function)
    return function


def free_leftovers() -> None:
    """Free all of it, in the order in which it was said how."""
    for function in tuple(_frees):
        function()
