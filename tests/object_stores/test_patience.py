"""How long a server that fails is asked again, and what is said of it."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.abc.store import RangeByteRequest
from zarr.buffer import default_buffer_prototype
from zarr.codecs.numcodecs import LZMA
from zarr.storage import MemoryStore

from tilewright.pipeline.store.region_read import read_region
from tilewright.pipeline.store.remote import patience
from tilewright.pipeline.store.remote.opening import store_at
from tilewright.pipeline.store.remote.patience import AtUrl
from tilewright.pipeline.store.remote.trouble import Kind, trouble_of


class Clock:
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def wait(self, seconds: float) -> None:
        self.now += seconds


class Failing(MemoryStore):
    """A store that raises so many of an error before it answers."""

    def __init__(self, errors: list[Exception]) -> None:
        super().__init__()
        self.errors = errors

    async def get(self, *arguments: Any, **options: Any) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        return await super().get(*arguments, **options)


class SlowDownError(OSError):
    """As botocore has it."""

    response = {"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 503}}  # noqa: RUF012


def asked(errors: list[Exception], clock: Clock) -> Any:
    store = AtUrl(Failing(errors), "s3://x/y", store_at, clock.wait, clock)
    return asyncio.run(store.get("k", default_buffer_prototype()))


def test_what_may_pass_is_tried_again_and_said_after_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patience._Told, "at", None)
    clock = Clock()
    assert asked([SlowDownError() for _ in range(5)], clock) is None
    assert clock.now < 10
    assert caplog.messages == []
    assert asked([SlowDownError() for _ in range(10)], clock) is None
    assert caplog.messages
    assert (
        "s3://x/y/k: the storage asks for fewer requests (SlowDown, status 503), for 1" in caplog.messages[0]
    )
    assert "(tilewright.storage-deadline)" in caplog.messages[0]


class FailingParts(Failing):
    """It fails where a part of an object is asked for."""

    async def get(self, *arguments: Any, **options: Any) -> Any:
        if any(isinstance(one, RangeByteRequest) for one in (*arguments, *options.values())):
            return await super().get(*arguments, **options)
        return await MemoryStore.get(self, *arguments, **options)


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")
def test_the_parts_of_a_shard_are_asked_for_again_whatever_zarr_asks_by() -> None:
    clock, inner = Clock(), FailingParts([])
    options: dict[str, Any] = {"chunks": (4, 4), "shards": (8, 8), "compressors": [LZMA()]}
    zarr.create_array(inner, data=np.ones((8, 8)), **options)
    array = zarr.open_array(AtUrl(inner, "s3://x/y", store_at, clock.wait, clock), mode="r+")
    inner.errors = [SlowDownError() for _ in range(3)]
    np.testing.assert_array_equal(read_region(array, (slice(0, 4), slice(0, 8))), np.ones((4, 8)))
    assert inner.errors == []
    assert clock.now > 0


def test_it_is_given_up_after_the_deadline() -> None:
    clock = Clock()
    with pytest.raises(SlowDownError):
        asked([SlowDownError() for _ in range(1000)], clock)
    assert 100 < clock.now <= 120


def test_a_server_that_was_never_reached_is_given_up_soon() -> None:
    clock = Clock()
    with pytest.raises(ConnectionRefusedError):
        asked([ConnectionRefusedError() for _ in range(1000)], clock)
    assert clock.now <= 5
    asked([SlowDownError(), *(ConnectionRefusedError() for _ in range(10))], clock)
    assert clock.now > 10, "it may come back"


@pytest.mark.parametrize("error", [PermissionError("Forbidden"), ValueError("what"), KeyError("k")])
def test_what_will_not_pass_is_raised_at_once(error: Exception) -> None:
    clock = Clock()
    with pytest.raises(type(error)):
        asked([error], clock)
    assert clock.now == 0


def test_a_translated_error_is_known_by_what_the_server_said() -> None:
    translated = FileNotFoundError("nothing")
    translated.__cause__ = SlowDownError()
    assert trouble_of(translated).kind is Kind.SLOW_DOWN


def test_no_credentials_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKIATESTS",
        "AWS_SECRET_ACCESS_KEY": "verysecret",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    store = store_at("s3://bucket/path")
    pickled = pickle.dumps(store)
    assert b"verysecret" not in pickled
    assert b"AKIATESTS" not in pickled
    assert pickle.loads(pickled) == store
    assert str(store) == "s3://bucket/path"
