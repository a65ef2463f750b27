"""The streams that a process keeps for each of its GPUs, and copies on them."""

from __future__ import annotations

from typing import Any

import pytest

from tilewright.kernels.gpu.transfer import download


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


def test_a_download_waits_for_its_stream_before_the_copy_begins() -> None:
    """Within the copy it would hold up those of other threads."""
    done: list[str] = []

    class Stream:
        def synchronize(self) -> None:
            done.append("waited")

    class Array:
        def copy_to_host(self, stream: Any) -> str:
            done.append("copied")
            return "values"

    found: Any = download(Array(), Stream())
    assert found == "values"
    assert done[:2] == ["waited", "copied"]
