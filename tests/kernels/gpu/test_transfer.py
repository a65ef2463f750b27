"""The streams that a process keeps for each of its GPUs."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.gpu
def test_kernels_of_an_urgent_stream_come_before_others() -> None:
    from cuda.bindings import driver
    from numba import cuda

    from tilewright.kernels.gpu.driver_error import checked
    from tilewright.kernels.gpu.transfer import upload_stream, urgent_stream

    def priority(stream: Any) -> int:
        return int(checked("cuStreamGetPriority", driver.cuStreamGetPriority(int(stream))))

    cuda.current_context()
    urgent = urgent_stream("looks")
    assert priority(urgent) < priority(upload_stream())  # the smaller, the sooner
    assert urgent_stream("looks") is urgent
    assert urgent_stream("hashes") is not urgent
