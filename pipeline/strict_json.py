"""JSON that every reader takes: it has no numbers for NaN and infinities."""

from __future__ import annotations

import math
from typing import Any


def strict(value: Any) -> Any:
    """The same with texts in place of these, ``"nan"``, ``"inf"`` and ``"-inf"``."""
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
