"""Lines of records that are added to while work goes on: JSON, whose last value is a checksum of what is before it, so
that a line that was torn or damaged is told."""

from __future__ import annotations

import json
from typing import Any

from tilewright.pipeline.transfer.checksum import new_checksum

SEAL = ', "check": "'
"""What comes between the rest of a line and its checksum."""


def sealed(entry: dict[str, Any]) -> str:
    """A line of a record, without its end.

    >>> unsealed(sealed({"tile": 3}))["tile"], unsealed(sealed({"tile": 3}).replace("3", "4", 1))
    (3, None)
    """
    text = json.dumps(entry)[:-1]
    return f'{text}{SEAL}{_seal(text)}"}}'


def _seal(text: str) -> str:
    found = new_checksum()
    found.update(text.encode())
    return str(found.hexdigest())


def unsealed(line: str) -> dict[str, Any] | None:
    """What a line of the record says; None where it is torn or damaged."""
    text, seal, check = line.rpartition(SEAL)
    if not seal or check != f'{_seal(text)}"}}':
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):  # not JSON; or more digits or brackets than Python reads
        return None
    return entry if isinstance(entry, dict) else None
