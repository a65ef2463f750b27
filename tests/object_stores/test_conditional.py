"""Writing an object only where nobody else has, also where the store knows no such conditions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from obstore.exceptions import NotSupportedError
from obstore.store import MemoryStore as ObstoreMemory
from zarr.buffer import default_buffer_prototype
from zarr.storage import MemoryStore, ObjectStore

from tilewright.pipeline.store import locks
from tilewright.pipeline.store.objects import Objects
from tilewright.pipeline.store.remote import conditional
from tilewright.pipeline.store.remote.conditional import ConflictError, Tagged, put_if


class Overtaken(MemoryStore):
    """Another process writes just after each write."""

    async def set(self, key: str, value: Any, byte_range: Any = None) -> None:
        await super().set(key, default_buffer_prototype().buffer.from_bytes(b"theirs"), byte_range)


def test_a_store_that_knows_conditions_keeps_the_first() -> None:
    store = ObjectStore(ObstoreMemory())

    async def both() -> None:
        mine = await put_if(store, "lock", b"mine", None)
        assert mine.data == b"mine"
        with pytest.raises(ConflictError):
            await put_if(store, "lock", b"theirs", None)
        with pytest.raises(ConflictError):
            await put_if(store, "lock", b"theirs", Tagged(b"older", '"0-0-0"'))
        assert (await put_if(store, "lock", b"mine again", mine)).data == b"mine again"

    asyncio.run(both())


@pytest.mark.parametrize("refusing", [False, True])
def test_one_that_knows_none_is_written_and_read_back(
    refusing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whatever it says that: it has no such requests, or refuses them as not supported."""

    async def put(*arguments: Any) -> str:
        raise NotSupportedError("PutMode::Create")

    if refusing:
        monkeypatch.setattr(conditional, "_put_by_obstore", put)
    alone = ObjectStore(ObstoreMemory()) if refusing else MemoryStore()
    assert asyncio.run(put_if(alone, "lock", b"mine", None)).data == b"mine"
    with pytest.raises(ConflictError):
        asyncio.run(put_if(Overtaken(), "lock", b"mine", None))


def test_a_run_says_where_another_one_is_not_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    locks.take_lease(Objects(ObjectStore(ObstoreMemory()), "", "C"), said.append).release()
    locks.take_lease(Objects(MemoryStore(), "", "C"), said.append).release()
    assert said == []

    async def put(*arguments: Any) -> str:
        raise NotSupportedError("PutMode::Create")

    monkeypatch.setattr(conditional, "_put_by_obstore", put)
    locks.take_lease(Objects(ObjectStore(ObstoreMemory()), "", "C"), said.append).release()
    (line,) = said
    assert line.startswith("C: its storage knows no conditional writes, ")
