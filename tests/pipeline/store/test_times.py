"""Instants of CF's times: two encodings of the same ones are equal, whatever their units, dtypes and calendars."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tilewright.pipeline.store.labels.times import DAY, instants, shown_instant


def of(values: object, units: str, calendar: str | None = None) -> list[int]:
    said = {"units": units} if calendar is None else {"units": units, "calendar": calendar}
    found = instants(np.asarray(values), said)
    assert found is not None
    return found.values.tolist()


@pytest.mark.parametrize(
    ("values", "units", "calendar"),
    [
        ([11323, 11354], "days since 1970-01-01", None),
        ([271752, 272496], "Hours since 1970-1-1 00:00:00", "gregorian"),
        ([271752.0, 272496.0], "hours since 1970-01-01T00:00Z", "proleptic_gregorian"),
        ([0, 31], "days since 2001-01-01 02:00:00 +02:00", "standard"),
        ([np.int32(0), np.int32(44640)], "minutes since 2001-01-01", "Standard"),
        ([0, 31 * 86400 * 10**9], "nanoseconds since 2001-01-01 00:00:00.000000", None),
        (np.array([0, 31], "f4"), "days since 2001-01-01", None),
        ([730487, 730518], "days since 0001-01-01", "standard"),  # two days before the proleptic one
        ([730485, 730516], "days since 0001-01-01", "proleptic_gregorian"),
        ([11336, 11367], "days since 1969-12-19", "julian"),  # 1 January 1970, by the other calendar
    ],
)
def test_encodings_of_one_instant_are_equal(values: object, units: str, calendar: str | None) -> None:
    assert of(values, units, calendar) == [11323 * DAY, 11354 * DAY] or calendar == "julian"
    if calendar == "julian":
        assert of(values, units, calendar)[0] == 11336 * DAY
    else:
        assert shown_instant(of(values, units, calendar)[0]) == "2001-01-01"


def test_calendars_of_models() -> None:
    assert of([59], "days since 2000-01-01", "noleap") == of([0], "days since 2000-03-01", "365_day")
    assert of([60], "days since 2001-01-01", "all_leap") == of([0], "days since 2001-03-01", "366_day")
    assert of([60], "days since 2001-01-01", "360_day") == of([0], "days since 2001-03-01", "360_day")
    found = instants(np.array([1]), {"units": "days since 2001-01-01", "calendar": "noleap"})
    assert found is not None
    assert found.calendar == "noleap"


@dataclass
class Date:
    year: int
    month: int
    day: int
    calendar: str
    hour: int = 0
    minute: int = 0
    second: int = 0
    microsecond: int = 0


def test_objects_with_a_calendar_are_times() -> None:
    dates = np.array([Date(2001, 1, 1, "noleap"), Date(2001, 1, 2, "noleap", 12)], object)
    found = instants(dates, {})
    assert found is not None
    assert (found.calendar, found.values.tolist()) == (
        "noleap",
        of([0, 1.5], "days since 2001-01-01", "noleap"),
    )
    assert instants(np.array([Date(2001, 1, 1, "noleap"), "no"], object), {}) is None
    assert instants(np.array([Date(2001, 13, 1, "noleap")], object), {}) is None


@pytest.mark.parametrize(
    ("values", "units", "calendar"),
    [
        ([0], "months since 2001-01-01", None),
        ([0], "days since yesterday", None),
        ([0], "days since 2001-13-01", None),
        ([0], "days since 2001-01-01", "lunar"),
        ([np.nan], "days since 2001-01-01", None),
        ([10**18], "days since 2001-01-01", None),
        ([0], "degrees_north", None),
        (["a"], "days since 2001-01-01", None),
    ],
)
def test_what_is_no_instant(values: object, units: str, calendar: str | None) -> None:
    assert instants(np.asarray(values), {"units": units, "calendar": calendar}) is None
