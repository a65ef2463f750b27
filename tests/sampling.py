"""Which cases of a test run every time, where all of them take longer than they teach, and how many examples."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from hypothesis import settings

from tilewright.kernels.numbers import ceil_div

THOROUGH_EXAMPLES, EXAMPLES = 40, 10
"""Of Hypothesis, for a test that does not say how many: in `make test-slow` and `make gpu-test`, and else."""


T = TypeVar("T")


def examples(thorough: int) -> int:
    """As many of Hypothesis in `make test-slow` and `make gpu-test`, and a quarter of them else."""
    return ceil_div(thorough * settings.default.max_examples, THOROUGH_EXAMPLES)


def with_others(always: Sequence[T], others: Sequence[T]) -> list[T]:
    """What a test draws from: in `make test-slow` and `make gpu-test` the others as well, such as dtypes for which
    loops would be compiled once more that do the same for those of every run."""
    return [*always, *(others if settings.default.max_examples >= THOROUGH_EXAMPLES else ())]


def sample(cases: Sequence[Mapping[str, Hashable]], size: int | None) -> set[int]:
    """The numbers of ``size`` of the cases, the same in every run; of None, as few as have all values of parameters.

    Each takes the case that has most values of parameters that none before it has ("each choice" coverage: Ammann and
    Offutt, "Introduction to Software Testing", 2nd ed., 2016, section 6.3); the others are spread evenly.
    """
    chosen: list[int] = []
    # Of each case that is left, the values that none of the chosen has, and how far the nearest of these is.
    new = {number: set(case.items()) for number, case in enumerate(cases)}
    distances = dict.fromkeys(new, len(cases))
    while new and (size is None or len(chosen) < size):
        best = max(new, key=lambda number: (len(new[number]), distances[number], -number))
        if size is None and not new[best]:
            break
        chosen.append(best)
        covered = new.pop(best)
        for number, values in new.items():
            values -= covered
            distances[number] = min(distances[number], abs(number - best))
    return set(chosen)
