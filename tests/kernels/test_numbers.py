"""Arithmetic on counts and sizes, and numbers as people read them."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels.numbers import (
    ceil_div,
    counted,
    format_count,
    format_nbytes,
    format_seconds,
    power_of_two,
    round_up,
)


@pytest.mark.parametrize(
    ("a", "b", "groups"), [(0, 5, 0), (1, 5, 1), (5, 5, 1), (6, 5, 2), (2**40, 3, 366503875926)]
)
def test_ceil_div(a: int, b: int, groups: int) -> None:
    assert ceil_div(a, b) == groups
    assert ceil_div(np.array([a]), np.array([b])).tolist() == [groups]


@given(st.integers(0, 2**40), st.integers(1, 2**20))
def test_rounding_up_gives_the_next_multiple(length: int, unit: int) -> None:
    rounded = round_up(length, unit)
    assert rounded % unit == 0
    assert length <= rounded < length + unit


def test_powers_of_two_are_not_below_what_is_asked_for() -> None:
    assert [power_of_two(least) for least in (0, 1, 2, 3, 4, 5, 2**40 + 1)] == [1, 1, 2, 4, 4, 8, 2**41]


def test_counts_have_their_noun_in_the_right_number() -> None:
    assert [counted(count, "tile") for count in (0, 1, 8)] == ["0 tiles", "1 tile", "8 tiles"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1023.7, "1 KiB"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (999.4 * 2**10, "999 KiB"),
        (999.6 * 2**10, "1000 KiB"),
        (1020 * 2**20, "1020 MiB"),
        (-1020 * 2**20, "-1020 MiB"),
        (1023.4 * 2**30, "1023 GiB"),
        (1023.6 * 2**30, "1 TiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_bytes_are_written_for_people(nbytes: float, text: str) -> None:
    assert format_nbytes(nbytes) == text


@given(st.integers(-(2**52), 2**52))
def test_bytes_are_never_written_with_an_exponent(nbytes: int) -> None:
    number, unit = format_nbytes(nbytes).split()
    assert re.fullmatch(r"-?\d+(\.\d+)?", number)
    assert float(number) * 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit) == pytest.approx(
        nbytes, 5e-3
    )
    assert abs(float(number)) < 1024 or unit == "TiB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.421, "0.42 s"), (12.3, "12 s"), (59.7, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_rates_read_well() -> None:
    assert [format_count(value) for value in (7.0, 1500.0, 2.5e12)] == ["7 ", "1.5 k", "2.5 T"]
