"""What a server refuses, here or to workers, ends in one line that says what to change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr
from distributed import Client

import tilewright as tw
from tests.object_stores.proxy import NO_FAULT, Asked, Fault, Proxy
from tests.object_stores.refused import refusal
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.product.in_place import create_at_url
from tilewright.pipeline.product.output import CHECKSUMS_NAME
from tilewright.pipeline.store.arrays import open_array
from tilewright.pipeline.store.objects import objects_at
from tilewright.pipeline.store.remote.opening import store_at

ONES = np.ones((16, 16), "f4")


def writes(asked: Asked) -> Fault:
    return NO_FAULT if asked.method in ("GET", "HEAD") else Fault(status=403)


def test_a_bucket_that_may_only_be_read_takes_no_output(
    url: str, library: str, proxy: Proxy, local: Path
) -> None:
    proxy.faults = writes
    told = refusal(local, local, f"{url}/c")
    assert told.startswith(f"output: cannot write to {url}/c: the storage forbids it (")
    assert "see that these credentials, and the bucket's policy, allow to read and list" in told
    proxy.faults = lambda asked: NO_FAULT
    assert objects_at(f"{url}/c").names("") == []


@pytest.mark.more
def test_workers_without_credentials_are_named_with_what_they_lack(
    url: str, library: str, processes: Client, proxy: Proxy, local: Path
) -> None:
    """Those of this process are in its environment, which workers have not."""
    zarr.create_array(store_at(f"{url}/a"), shape=ONES.shape, dtype="f4", chunks=(8, 8))[...] = ONES
    for role, name, told in (
        ("A", "read", refusal(f"{url}/a", local, local.parent / "c", cluster=processes)),
        ("output", "write to", refusal(local, local, f"{url}/c", cluster=processes)),
    ):
        assert told.startswith(f"{role}: worker tcp://")
        assert f" cannot {name} {url}/" in told
        assert "/a (" in told or role == "output"
        assert "is not what worker" not in told
        assert "is lost" not in told
    assert objects_at(f"{url}/c").names("") == []


def test_a_store_that_removes_nothing_is_refused_before_anything_is_written(
    url: str, library: str, proxy: Proxy, local: Path
) -> None:
    """A run removes its record, and what it replaces: an older product stands as it was."""
    keeps = lambda asked: Fault(status=403) if asked.method in ("POST", "DELETE") else NO_FAULT  # noqa: E731
    proxy.faults = keeps
    told = refusal(local, local, f"{url}/c")
    assert told.startswith(
        f"output: cannot remove objects from {url}/c, as a run has to remove its record: the"
    )
    (left,) = objects_at(f"{url}/c").names("")
    assert told.endswith(f"; {left} is left there")
    proxy.faults = lambda asked: NO_FAULT
    tw.matmul(local, local, f"{url}/c", device="cpu")
    assert set(objects_at(f"{url}/c").names("")) == {"c", "zarr.json", CHECKSUMS_NAME}
    proxy.faults = keeps
    refusal(local, local, f"{url}/c", overwrite=True)
    with pytest.raises(StoreError, match="cannot remove"):
        create_at_url(f"{url}/c", zarr.create_array, overwrite=True)
    proxy.faults = lambda asked: NO_FAULT
    np.testing.assert_array_equal(open_array(f"{url}/c", ndim=2, role="C")[...], ONES @ ONES)
