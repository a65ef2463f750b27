"""A product in a group of Zarr in an object store is of the group's format, and readers of the group find it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr

import tilewright as tw
from tests.object_stores.proxy import NO_FAULT, Asked, Fault, Proxy
from tests.workflows.products import stop_at
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.events import Event, Notice
from tilewright.pipeline.plan import tiling
from tilewright.pipeline.store.new import far_groups
from tilewright.pipeline.store.objects import Objects, objects_at
from tilewright.pipeline.store.remote.opening import store_at

A, B = np.arange(24.0).reshape(4, 6), np.arange(30.0).reshape(6, 5)


def dataset(url: str, zarr_format: int, consolidated: bool) -> None:
    found = xr.Dataset({"a": (("time", "place"), A), "b": (("place", "kind"), B)}, {"time": np.arange(4)})
    found.to_zarr(store_at(url), zarr_format=zarr_format, consolidated=consolidated)


def opened(url: str) -> Any:
    return xr.open_zarr(store_at(url, True), chunks=None)


@pytest.mark.filterwarnings("ignore:.*onsolidated")
@pytest.mark.sample(2)
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("consolidated", [False, True])
def test_a_product_in_a_group_is_found_there(
    zarr_format: int, consolidated: bool, url: str, library: str, proxy: Proxy
) -> None:
    """Also where it replaces another one, of another shape."""
    dataset(url, zarr_format, consolidated)
    tw.matmul(f"{url}/a", f"{url}/b", f"{url}/c", device="cpu")
    found = opened(url)
    assert found["c"].dims == ("time", "kind")
    np.testing.assert_array_equal(found["c"], A @ B)
    assert set(found.variables) == {"a", "b", "c", "time"}
    tw.gram(f"{url}/a", f"{url}/c", device="cpu", overwrite=True)
    found = opened(url)
    assert found["c"].dims == ("place", "place_2")
    np.testing.assert_array_equal(found["c"], A.T @ A)
    assert zarr.open_array(store_at(f"{url}/c"), mode="r").metadata.zarr_format == zarr_format


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:.*onsolidated")
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_folders_between_become_groups(zarr_format: int, url: str, proxy: Proxy) -> None:
    dataset(url, zarr_format, True)
    tw.matmul(f"{url}/a", f"{url}/b", f"{url}/deep/er/c", device="cpu")
    group = zarr.open_group(store_at(url), mode="r", use_consolidated=True)
    assert [name for name, _ in group["deep"].members(max_depth=None)] == ["er", "er/c"]
    np.testing.assert_array_equal(group["deep/er/c"][...], A @ B)
    listed = zarr.open_group(store_at(url), mode="r", use_consolidated=False)
    assert {"deep", "deep/er", "deep/er/c"} <= {name for name, _ in listed.members(max_depth=None)}


@pytest.mark.filterwarnings("ignore:.*onsolidated")
def test_a_dimension_of_another_length_keeps_the_group_as_it_was(url: str, proxy: Proxy) -> None:
    dataset(url, 3, True)
    x = xr.DataArray(np.ones((3, 2)), dims=["time", "kind"])
    told: list[Event] = []
    tw.matmul(x, np.ones((2, 2)), f"{url}/c", device="cpu", listener=told.append)
    (said,) = [one.message for one in told if isinstance(one, Notice) and "consolidated" in one.message]
    assert said.endswith(
        f"{url}/c is whole, but the consolidated metadata of {url} do not tell of it: time is a dimension of another"
        " length there, and xarray opens no such group; store C elsewhere"
    )
    assert set(opened(url).variables) == {"a", "b", "time"}


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:.*onsolidated")
def test_metadata_that_others_change_meanwhile_keep_theirs(
    url: str, library: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset(url, 3, True)
    put_if, overtaken = Objects.put_if, []

    def late(self: Objects, key: str, data: bytes, before: Any) -> Any:
        if key == "zarr.json" and not overtaken:
            overtaken.append(key)
            theirs = objects_at(url).get("zarr.json")
            assert theirs is not None
            objects_at(url).put(
                "zarr.json", theirs.replace(b'"attributes": {}', b'"attributes": {"late": 1}', 1)
            )
        return put_if(self, key, data, before)

    monkeypatch.setattr(Objects, "put_if", late)
    tw.matmul(f"{url}/a", f"{url}/b", f"{url}/c", device="cpu")
    assert overtaken
    assert "c" in opened(url)
    assert zarr.open_group(store_at(url), mode="r").attrs["late"] == 1


@pytest.mark.more
def test_where_nobody_may_look_above_there_is_no_group(url: str, proxy: Proxy) -> None:
    dataset(url, 3, False)
    zarr.create_array(store_at(f"{url}/own/x"), shape=(2, 2), dtype="f4")[...] = 1
    allowed = url.removeprefix("s3://tests/") + "/own/"

    def closed(asked: Asked) -> Fault:
        return NO_FAULT if asked.key.startswith(allowed) or not asked.key else Fault(status=403)

    proxy.faults = closed
    assert far_groups.group_around(f"{url}/own/c") is None
    tw.matmul(f"{url}/own/x", f"{url}/own/x", f"{url}/own/c", device="cpu")
    assert zarr.open_array(store_at(f"{url}/own/c"), mode="r")[...].tolist() == [[2, 2], [2, 2]]


def test_the_folders_above_a_url_end_at_the_bucket() -> None:
    assert far_groups.above("s3://bucket/a/b.zarr/") == ["s3://bucket/a", "s3://bucket"]
    assert far_groups.above("s3://bucket") == []
    for other in ("memory://a/b", "zip://x::s3://bucket/a/b", "file:///a/b", "/a/b"):
        assert far_groups.above(other) == []


def test_shards_in_a_group_of_format_2_are_refused(url: str, proxy: Proxy) -> None:
    dataset(url, 2, False)
    with pytest.raises(OptionError, match=r"C lies in a group of Zarr's format 2, which has no shards"):
        tw.matmul(f"{url}/a", f"{url}/b", f"{url}/c", shards=4, chunks=2, device="cpu")


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:.*onsolidated")
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_stopped_product_that_goes_on_is_found_too(
    zarr_format: int, url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LEAST_CHUNK_NBYTES", "SMALL_CHUNK_NBYTES"):
        monkeypatch.setattr(tiling, name, 1)
    monkeypatch.setattr(tiling, "MOST_CHUNK_NBYTES", 4096)
    a = np.arange(96.0 * 80).reshape(96, 80) % 7
    found = xr.Dataset({"a": (("time", "place"), a)}, {"time": np.arange(96)})
    found.to_zarr(store_at(url), zarr_format=zarr_format, consolidated=True)
    options: dict[str, Any] = {"device": "cpu", "device_memory": 40_000}
    c = f"{url}/c"
    stop_at(2, f"{url}/a", a.T.copy(), c, **options)  # type: ignore[arg-type]
    assert "c" not in opened(url)
    run = tw.matmul(f"{url}/a", a.T.copy(), c, **options)
    assert run.resumed == 2
    np.testing.assert_array_equal(opened(url)["c"], a @ a.T)
    assert tw.audit(c).passed
