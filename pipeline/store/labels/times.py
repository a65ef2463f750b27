"""Times as CF's conventions have them: what "days since 2001-01-01" of a calendar means, so that two encodings of the
same instants can be compared."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

SECOND = 10**6
DAY = 86400 * SECOND
"""In microseconds, as all instants here."""

UNITS = {
    **dict.fromkeys(("day", "days", "d"), DAY),
    **dict.fromkeys(("hour", "hours", "hr", "hrs", "h"), 3600 * SECOND),
    **dict.fromkeys(("minute", "minutes", "min", "mins"), 60 * SECOND),
    **dict.fromkeys(("second", "seconds", "sec", "secs", "s"), SECOND),
    **dict.fromkeys(("millisecond", "milliseconds", "msec", "msecs", "ms"), 1000),
    **dict.fromkeys(("microsecond", "microseconds", "us"), 1),
}
"""UDUNITS' names of spans of time that are of one length, in microseconds. Months and years are of none."""
NANOSECONDS = ("nanosecond", "nanoseconds", "ns")

STANDARD = "standard"
CALENDARS = {
    **dict.fromkeys(("standard", "gregorian", "proleptic_gregorian", "julian"), STANDARD),
    **dict.fromkeys(("noleap", "365_day"), "noleap"),
    **dict.fromkeys(("all_leap", "366_day"), "all_leap"),
    "360_day": "360_day",
}
"""By CF's names of calendars, those whose instants can be compared: Julian and Gregorian dates are of the same days."""

MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
REFORM = (1582, 10, 15)
"""The first day of the Gregorian calendar, by CF's ``standard``."""
JULIAN_DAY_OF_1970 = 2440588

SINCE = re.compile(
    r"\s*([a-z]+)\s+since\s+([+-]?\d{1,6})-(\d{1,2})-(\d{1,2})"
    r"(?:[t\s]+(\d{1,2}):(\d{1,2})(?::(\d{1,2})(\.\d*)?)?)?"
    r"\s*(z|utc|gmt|([+-])(\d{1,2}):?(\d{2})?)?\s*",
    re.ASCII | re.IGNORECASE,
)


@dataclass(frozen=True)
class Instants:
    """Times that can be compared with others of the same calendar."""

    calendar: str
    """Of the values of `CALENDARS`."""
    values: np.ndarray
    """int64, in microseconds from the calendar's beginning."""
    rounding: int
    """By how many microseconds they may be rounded."""


def instants(values: np.ndarray, attributes: Mapping[str, Any]) -> Instants | None:
    """What coordinates are in time, by their attributes ``units`` and ``calendar``, or as objects that have calendars
    of their own, as those of cftime; None of what is no time, or is counted in months or years."""
    if values.dtype.kind == "O":
        return _of_objects(values)
    found = SINCE.fullmatch(str(attributes.get("units", "")))
    calendar = str(attributes.get("calendar") or STANDARD).lower()
    if found is None or calendar not in CALENDARS or values.dtype.kind not in "iuf":
        return None
    unit, nanoseconds = UNITS.get(found[1].lower()), found[1].lower() in NANOSECONDS
    if unit is None and not nanoseconds:
        return None
    try:
        first = _days(calendar, *(int(found[part]) for part in (2, 3, 4))) * DAY
    except ValueError:
        return None
    hour, minute, second = (int(found[part] or 0) for part in (5, 6, 7))
    first += ((hour * 60 + minute) * 60 + second) * SECOND + round(float(found[8] or 0) * SECOND)
    if found[10]:
        ahead = (int(found[11]) * 60 + int(found[12] or 0)) * 60 * SECOND
        first -= ahead if found[10] == "+" else -ahead
    largest = float(np.abs(values.astype(np.float64)).max(initial=0))
    if not largest * (unit or 1) + abs(first) < np.iinfo(np.int64).max:
        return None  # NaN too
    if values.dtype.kind == "f":
        size = unit or 1e-3
        counted = np.rint(values.astype(np.float64) * size).astype(np.int64)
        rounding = int(float(np.spacing(values.dtype.type(largest))) * size) + 1
    else:
        counted = values.astype(np.int64)
        counted = counted * unit if unit is not None else counted // 1000
        rounding = int(nanoseconds)
    return Instants(CALENDARS[calendar], counted + first, rounding)


def _of_objects(values: np.ndarray) -> Instants | None:
    """Of objects with ``year`` to ``microsecond`` and ``calendar``."""
    found = values.tolist()
    calendars = {str(getattr(one, "calendar", "proleptic_gregorian") or STANDARD).lower() for one in found}
    if len(calendars) != 1 or not calendars <= CALENDARS.keys():
        return None
    (calendar,) = calendars
    try:
        counted = [
            _days(calendar, one.year, one.month, one.day) * DAY
            + ((one.hour * 60 + one.minute) * 60 + one.second) * SECOND
            + one.microsecond
            for one in found
        ]
    except (AttributeError, TypeError, ValueError):
        return None
    return Instants(CALENDARS[calendar], np.array(counted, np.int64), 0)


def _days(calendar: str, year: int, month: int, day: int) -> int:
    """The days from a calendar's beginning, of Julian and Gregorian ones from 1970, to a date. Raises ValueError for
    what is no date.

    >>> _days("standard", 1582, 10, 15) - _days("standard", 1582, 10, 4)
    1
    >>> _days("noleap", 2001, 1, 1) - _days("noleap", 2000, 1, 1)
    365
    """
    if not 1 <= month <= 12 or not 1 <= day <= 31:
        raise ValueError(f"{year}-{month}-{day} is no date")
    if calendar == "360_day":
        return (year * 12 + month - 1) * 30 + day - 1
    if CALENDARS[calendar] != STANDARD:
        leap = int(CALENDARS[calendar] == "all_leap")
        return year * (365 + leap) + sum(MONTH_DAYS[: month - 1]) + leap * (month > 2) + day - 1
    # After Richards' "Mapping time" (1998): years that begin in March, of which those from 4800 BC on are positive.
    late = (14 - month) // 12
    years, months = year + 4800 - late, month + 12 * late - 3
    number = day + (153 * months + 2) // 5 + 365 * years + years // 4
    if calendar == "proleptic_gregorian" or (calendar != "julian" and (year, month, day) >= REFORM):
        return number - years // 100 + years // 400 - 32045 - JULIAN_DAY_OF_1970
    return number - 32083 - JULIAN_DAY_OF_1970


def shown_instant(instant: int) -> str | None:
    """A date of the Gregorian calendar, with the time of day where it has one; None beyond the years 1 to 9999."""
    try:
        found = datetime.datetime(1970, 1, 1) + datetime.timedelta(microseconds=instant)
    except OverflowError:
        return None
    text = found.isoformat(sep=" ")
    return text.removesuffix(" 00:00:00")
