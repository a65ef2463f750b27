"""Servers that are asked again where they fail for a while, and say so: `Patience`; and a store at a URL with it.

Libraries try again too, in silence, each in its own way. So here that is left to one place: with waits that grow, for
`tilewright.storage-deadline` seconds, with one line in the log once it has gone on for `TOLD_SECONDS`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Self, TypeVar

from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, Store
from zarr.storage import ObjectStore, WrapperStore

from tilewright.pipeline import config
from tilewright.pipeline.store.remote.trouble import Kind, Trouble, trouble_of

logger = logging.getLogger(__name__)

Found = TypeVar("Found")

FIRST_WAIT, MOST_WAIT = 0.1, 5.0
"""Seconds before the first repetition, and at most; each is twice the one before, and a random part of it is waited, so
that many threads do not come back at once."""
TOLD_SECONDS = 10.0
"""How long a server fails before that is logged, and how long until it is logged again."""
STRANGE_SECONDS = 5.0
"""How long one is tried that cannot be reached and never has been: its name may be wrong."""


class _Told:
    """When trouble was last logged, by whichever thread or task of this process."""

    at: float | None = None


class Patience:
    """Asks a server until it answers, or `storage-deadline` is over."""

    def __init__(
        self,
        url: str,
        wait: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """url: what is asked, for the log. wait: returns after so many seconds. clock: says seconds."""
        self.url = url
        self.wait, self.clock = wait, clock
        self._reached = False

    async def asked(self, ask: Callable[[], Awaitable[Found]], key: str) -> Found:
        """What ``ask`` returns; it is called again where what it raises may pass. key: for the log.

        Raises what it raised last.
        """
        begun, wait = self.clock(), FIRST_WAIT
        while True:
            try:
                found = await ask()
            except Exception as error:
                trouble = trouble_of(error)
                if trouble.kind is not Kind.UNREACHABLE:
                    self._reached = True
                seconds = self.clock() - begun
                if not trouble.passing or seconds + wait > self._deadline(trouble):
                    raise
                if seconds >= TOLD_SECONDS:
                    self._tell(key, trouble, seconds)
            else:
                self._reached = True
                return found
            await self.wait(wait * random.uniform(0.5, 1))
            wait = min(2 * wait, MOST_WAIT)

    def _deadline(self, trouble: Trouble) -> float:
        """Seconds that may pass with this trouble."""
        most = float(config.get("storage-deadline"))
        strange = trouble.kind is Kind.UNREACHABLE and not self._reached
        return min(most, STRANGE_SECONDS) if strange else most

    def _tell(self, key: str, trouble: Trouble, seconds: float) -> None:
        now = self.clock()
        if _Told.at is not None and now - _Told.at < TOLD_SECONDS:
            return
        _Told.at = now
        logger.warning(
            "%s/%s: %s, for %.0f s by now; it is asked again until %.0f s are over (tilewright.storage-deadline)",
            self.url,
            key,
            trouble.cause,
            seconds,
            self._deadline(trouble),
        )


async def _names_in(store: Store, prefix: str) -> AsyncIterator[str]:
    """The names in a folder. Some servers list the folder itself, as an object without a name, or its empty place once
    all is gone from it."""
    if not isinstance(store, ObjectStore):
        async for name in store.list_dir(prefix):
            if name:
                yield name
        return
    import obstore  # who has such a store has it

    start = prefix.rstrip("/")
    found = await obstore.list_with_delimiter_async(store.store, prefix=start or None)
    for path in [*found["common_prefixes"], *(one["path"] for one in found["objects"])]:
        name = path.strip("/").removeprefix(start).strip("/")
        if name and path.strip("/") != start:
            yield name


def unwrapped(store: Any, kept: type | tuple[()] = ()) -> Any:
    """The store beneath all wrappers but those of one kind, if one is to be kept."""
    while isinstance(store, WrapperStore) and not isinstance(store, kept):
        store = store._store
    return store


class AtUrl(WrapperStore[Store]):
    """The store at a URL, whose objects are asked for until they are had, or `storage-deadline` is over."""

    def __init__(
        self,
        store: Store,
        url: str,
        reopen: Callable[[str, bool], Store],
        wait: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """reopen: gives the same of a URL in another process; it says whether for reading only. wait: returns after so
        many seconds. clock: says seconds."""
        super().__init__(store)
        self.url = url
        self._reopen, self._patience = reopen, Patience(url, wait, clock)

    def _with_store(self, store: Store) -> Self:
        return type(self)(store, self.url, self._reopen, self._patience.wait, self._patience.clock)

    def __reduce__(self) -> Any:
        """As its URL: each process opens it by what is installed there, with its own credentials."""
        return self._reopen, (self.url, self.read_only)

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"AtUrl({self.url!r})"

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        return await self.asked(lambda: self._store.get(key, prototype, byte_range), key)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        wanted = list(key_ranges)
        return await self.asked(lambda: self._store.get_partial_values(prototype, wanted), "")

    def get_ranges(self, key: str, *arguments: Any, **options: Any) -> Any:
        """Stretches of an object, as zarr from 3.3 on asks for the chunks of a shard: by `get`, where `WrapperStore`
        would leave them to the store beneath, and so ask once."""
        asking: Any = Store
        return asking.get_ranges(self, key, *arguments, **options)

    async def exists(self, key: str) -> bool:
        return await self.asked(lambda: self._store.exists(key), key)

    async def set(self, key: str, value: Buffer) -> None:
        await self.asked(lambda: self._store.set(key, value), key)

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        await self.asked(lambda: self._store.set_if_not_exists(key, value), key)

    async def delete(self, key: str) -> None:
        await self.asked(lambda: self._store.delete(key), key)

    async def delete_dir(self, prefix: str) -> None:
        await self.asked(lambda: self._store.delete_dir(prefix), prefix)

    async def getsize(self, key: str) -> int:
        return await self.asked(lambda: self._store.getsize(key), key)

    def list(self) -> AsyncIterator[str]:
        return self._listed(self._store.list, "")

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        return self._listed(lambda: self._store.list_prefix(prefix), prefix)

    def list_dir(self, prefix: str) -> AsyncIterator[str]:
        return self._listed(lambda: _names_in(self._store, prefix), prefix)

    async def _listed(self, listing: Callable[[], AsyncIterator[str]], prefix: str) -> AsyncIterator[str]:
        async def names() -> list[str]:
            return [name async for name in listing()]

        for name in await self.asked(names, prefix):
            yield name

    async def asked(self, ask: Callable[[], Awaitable[Found]], key: str) -> Found:
        """As `Patience.asked`."""
        return await self._patience.asked(ask, key)
