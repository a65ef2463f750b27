"""What a product is refused with."""

from __future__ import annotations

from typing import Any

import pytest

import tilewright as tw
from tilewright.pipeline.errors import StoreError


def refusal(*arguments: Any, **options: Any) -> str:
    """The one line of the StoreError that a product ends in."""
    with pytest.raises(StoreError) as raised:
        tw.matmul(*arguments, device="cpu", **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)
