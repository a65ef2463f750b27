"""Whether what workers write to an array is there for the caller, and what they read is what the caller has.

Arrays are pickled on their way to any worker, even one in this process, and a store is free in what its copy is: the
same storage, a copy of what it held, or nothing. So each worker is asked, before the first tile, to read and to write a
few bytes by such a copy. Nothing of that is left.

A `zarr.storage.LocalStore` needs none of it: its copy is its path, and with each chunk a worker looks whether it sees
the array there (`store.check_in_sight`).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import zarr
from zarr.abc.buffer import Buffer
from zarr.abc.store import RangeByteRequest, Store
from zarr.buffer import default_buffer_prototype
from zarr.storage import FsspecStore, LocalStore, ObjectStore

from tilewright.pipeline import pickling as pickle
from tilewright.pipeline.cluster.identity import address_of
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.store.arrays import (
    Source,
    check_shared,
    in_memory,
    in_one_line,
    in_store,
    kind_of,
    local_path,
    metadata_name,
    name_of,
    names_itself,
)
from tilewright.pipeline.store.region import (
    Flattened,
    HeldMask,
    Masked,
    Section,
    StoredArray,
    base_of,
    stored_masks,
)
from tilewright.pipeline.store.remote.opening import store_at
from tilewright.pipeline.store.remote.patience import AtUrl, unwrapped
from tilewright.pipeline.store.remote.trouble import Kind, trouble_of
from tilewright.pipeline.store.sessions import (
    Gathered,
    changes_in,
    forked,
    forked_output,
    is_fork,
    session_of,
)
from tilewright.pipeline.store.sources.mapped import MappedStore
from tilewright.pipeline.store.waiting import answer_of

Answer = TypeVar("Answer")
Given = TypeVar("Given", bound="StoredArray")

KEY_START = "tilewright-probe-"
"""How the keys begin that are written below an array's path and removed again."""

HEAD_NBYTES = 64
"""So much of an array's first chunk is compared."""

INLINE_NBYTES = 512
"""Up to this size icechunk keeps a chunk in the session, by default."""

REMOVERS = 8
"""Threads that remove what workers wrote."""

REMEDY = (
    "give a path or a URL of storage that all workers share, or an array in a store whose pickled copies are the same"
    " storage, such as zarr.storage.LocalStore"
)


class Ask(Protocol):
    """Calls a function on each worker, or on those that are named; gives what it returns, by their addresses."""

    def __call__(
        self, function: Callable[..., Any], *arguments: Any, workers: list[str] | None = None
    ) -> dict[str, Any]: ...


@dataclass(frozen=True)
class _Unusable:
    """What a worker answers that cannot use its copy of a store, or one key of it."""

    why: str
    trouble: str | None = None
    """What the storage said and what to do about it, where its errors are known."""

    @classmethod
    def of(cls, error: Exception) -> _Unusable:
        found = trouble_of(error)
        known = None if found.kind is Kind.OTHER else str(found)
        return cls(f"it cannot be used there ({in_one_line(error)})", known)


def _refused(store: Store, found: object) -> str | None:
    """What the server of a store says to a worker that it refuses; None where it is no server, or nothing is known."""
    at_server = isinstance(unwrapped(store), FsspecStore | ObjectStore)
    return found.trouble if at_server and isinstance(found, _Unusable) else None


def _who(worker: str) -> str:
    """A worker at the beginning of what it cannot do; nothing where it is this process."""
    return "cannot" if worker.startswith("inproc://") else f"worker {worker} cannot"


def shared_inputs(arrays: Mapping[str, Given], *, copied: bool = False) -> dict[str, Given]:
    """Arrays, given by their roles, as tasks can read them: themselves, or, where a writable session of icechunk has
    them, as a fork of that does.

    copied: a copy along with every task will do, as for ``check_shared``. Raises StoreError for an array that tasks
    cannot share with the caller, or that cannot be pickled.
    """
    shared: dict[str, Given] = {}
    forks: dict[int, Store] = {}  # by the identity of the given store: an array that is given twice stays one

    def as_shared(role: str, array: Any) -> Any:
        if isinstance(array, Section):
            return replace(array, array=as_shared(role, array.array))
        if isinstance(array, Masked):
            held = isinstance(array.mask, HeldMask)
            mask = array.mask if held else as_shared(f"{role}'s mask", array.mask)
            return replace(array, array=as_shared(role, array.array), mask=mask)
        check_shared(array, role, copied=copied)
        session, given = session_of(array), base_of(array)
        if session is not None and not session.read_only and not is_fork(session):
            fork = forks.get(id(given.store)) or forked(given, role).store
            forks[id(given.store)] = fork
            given = in_store(given, fork)
        _pickled(given, given.store, role, name_of(array))
        return replace(array, array=given) if isinstance(array, Flattened) else given

    masked: dict[int, Any] = {}  # as forks
    for role, array in arrays.items():
        if isinstance(array, Masked | Section):
            masked[id(array)] = masked.get(id(array)) or as_shared(role, array)
            shared[role] = cast(Any, masked[id(array)])
        else:
            shared[role] = as_shared(role, array)
    return shared


def check_shared_output(out: Source) -> None:
    """Raise StoreError for an output that tasks cannot share with the caller, or that cannot be pickled, as far as that
    can be told without writing anything."""
    check_shared(out, "output", written=True)
    if isinstance(out, zarr.Array):
        array = out if session_of(out) is None else forked_output(out, "output")
        _pickled(array, array.store, "output", name_of(out))


def check_read_alike(ask: Ask, arrays: Mapping[str, StoredArray], *, here: bool = False) -> None:
    """Raise StoreError where a worker does not find in its copy of an input, given by its role, what the caller finds
    there: its metadata, and whether there is a first chunk and how that begins. here: this process is the only worker,
    where a copy of a map is the same map, and that of the store at a URL of S3 the same store: it would take four
    requests, one after the other, to compare it with itself."""
    every = {role: base_of(given) for role, given in arrays.items()} | stored_masks(arrays)
    for role, array in every.items():
        if not (_is_known(array) or (here and isinstance(array.store, MappedStore | AtUrl))):
            pickled = _pickled(array, array.store, role, name_of(array))
            _check_look(ask, pickled, array.store, _keys_of(array), role, name_of(array))


def check_written_alike(ask: Ask, out: Source) -> list[str]:
    """Raise StoreError where the caller would not find in an output what a worker writes to its copy of it.

    Each worker writes an object of its own below the array's path, twice, and the caller reads it each time: a store
    may keep what it has read once. In a store that takes only chunks, the first one is written instead, by one worker
    after the other, and then put back.

    Returns a sentence for each object that is left because the store does not remove it.
    """
    if not isinstance(out, zarr.Array):
        return [] if local_path(out) is not None else _Probe(ask, _store_at(out), "", name_of(out)).run()
    if _is_known(out):
        return []
    if session_of(out) is not None:
        _check_session(ask, out)
        return []
    return _Probe(ask, out.store, out.path, name_of(out), out).run()


def _named(name: str, store: Store) -> str:
    """An array's name, with the kind of its store."""
    return f"{name}, in a {kind_of(store)}," if names_itself(store) else name


def _is_known(array: zarr.Array[Any]) -> bool:
    """Whether it is known what a copy of the array's store is: the same folder, or the same numbers in memory."""
    return type(array.store) is LocalStore or in_memory(array)


def _store_at(url: str | os.PathLike[str]) -> Store:
    """The store of a URL, as its array would be opened."""
    try:
        return store_at(os.fspath(url))
    except Exception as error:
        raise StoreError(f"output: cannot open {name_of(url)}: {in_one_line(error)}") from error


def _pickled(what: zarr.Array[Any] | Store, store: Store, role: str, name: str) -> bytes:
    try:
        pickled: bytes = pickle.dumps(what)
    except Exception as error:
        raise StoreError(
            f"{role}: {_named(name, store)} cannot be pickled for the workers ({in_one_line(error)}); {REMEDY}"
        ) from error
    return pickled


def _keys_of(array: zarr.Array[Any]) -> list[str]:
    """The keys of an array's metadata and, where it has an element, of its first chunk, or shard."""
    names = [metadata_name(array)]
    if array.size:
        names.append(array.metadata.encode_chunk_key((0,) * array.ndim))
    return [_below(array.path, name) for name in names]


def _below(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _check_look(
    ask: Ask, pickled: bytes, store: Store, keys: Sequence[str], role: str, name: str
) -> list[str]:
    """Raise StoreError where a worker's copy of a store does not hold at these keys what the store does. Returns the
    workers that were asked."""
    here = _look(store, keys)
    answers = ask(look_by_copy, pickled, keys)
    for worker, there in answers.items():
        if isinstance(there, _Unusable):
            found = there.why
        else:
            # What cannot be read here, the run will meet, and tell more of.
            differing = [
                key for key in keys if not isinstance(here[key], _Unusable) and here[key] != there[key]
            ]
            if not differing:
                continue
            key = differing[0]
            if (refused := _refused(store, there[key])) is not None:
                raise StoreError(f"{role}: {_who(worker)} read {name} ({key}): {refused}")
            has = "what it cannot read" if isinstance(there[key], _Unusable) else there[key]
            found = f"at {key} it has {has}, and this process {here[key]}"
        raise StoreError(
            f"{role}: {_named(name, store)} is not what worker {worker} has of it: {found}; {REMEDY}"
        )
    return list(answers)


def _look(store: Store, keys: Sequence[str]) -> dict[str, str | _Unusable]:
    """What these keys hold, of which the first is the metadata's: a hash, or that there is nothing; or why that cannot
    be read."""
    found: dict[str, str | _Unusable] = {}
    for key in keys:
        try:
            got = _get(store, key, None if key == keys[0] else HEAD_NBYTES)
        except Exception as error:
            found[key] = _Unusable.of(error)
        else:
            found[key] = "nothing" if got is None else hashlib.sha256(got).hexdigest()[:16]
    return found


def _get(store: Store, key: str, nbytes: int | None = None) -> bytes | None:
    """The value of a key, or what it begins with; None where there is none."""
    where = None if nbytes is None else RangeByteRequest(0, nbytes)
    found = answer_of(store.get(key, default_buffer_prototype(), where), key)
    return None if found is None else found.to_bytes()[:nbytes]


def _set(store: Store, key: str, value: bytes) -> None:
    answer_of(store.set(key, default_buffer_prototype().buffer.from_bytes(value)), key)


async def look_by_copy(pickled: bytes, keys: Sequence[str]) -> dict[str, str | _Unusable] | _Unusable:
    """What these keys hold in a worker's copy of a store, as for `_look`."""
    return await asyncio.to_thread(_by_copy, pickled, partial(_look, keys=keys))


async def write_by_copy(
    pickled: bytes, key: str, own: bool, value: bytes, dask_worker: Any
) -> _Unusable | None:
    """Write a value by a worker's copy of a store. own: under a key of this worker's that begins so."""
    key = _own_key(key, address_of(dask_worker)) if own else key
    return await asyncio.to_thread(_by_copy, pickled, partial(_set, key=key, value=value))


async def remove_by_copy(pickled: bytes, key: str, dask_worker: Any) -> None:
    """Remove what `write_by_copy` wrote under a key of its own."""
    own = _own_key(key, address_of(dask_worker))
    await asyncio.to_thread(_by_copy, pickled, lambda store: answer_of(store.delete(own), own))


def _by_copy(pickled: bytes, use: Callable[[Store], Answer]) -> Answer | _Unusable:
    try:
        copy = pickle.loads(pickled)
    except Exception as error:
        return _Unusable(f"it cannot be unpickled there ({in_one_line(error)})")
    try:
        return use(copy.store if isinstance(copy, zarr.Array) else copy)
    except Exception as error:
        return _Unusable.of(error)


def _own_key(start: str, worker: str) -> str:
    return f"{start}-{hashlib.sha256(worker.encode()).hexdigest()[:16]}"


class _Probe:
    """Has each worker write to its copy of a store, and looks for that here."""

    def __init__(
        self, ask: Ask, store: Store, path: str, name: str, array: zarr.Array[Any] | None = None
    ) -> None:
        """path: where the output is, or will be, in the store. array: None where there is none yet."""
        self._ask, self._store, self._path, self._name = ask, store, path, name
        self._keys = [] if array is None else _keys_of(array)
        self._pickled = _pickled(store if array is None else array, store, "output", name)
        self._left: list[str] = []
        self._refusal: str | None = None
        """What a server says to a worker that it lets write nothing."""
        self._kept: str | None = None
        """What it says where it removes nothing."""

    def run(self) -> list[str]:
        """As `check_written_alike`."""
        # A worker whose copy is elsewhere is found out before it makes folders there.
        pickled, store, keys = self._pickled, self._store, self._keys
        workers = _check_look(self._ask, pickled, store, keys, "output", self._name)
        problem = self._by_own_keys(workers)
        if problem is not None and len(keys) > 1:
            self._refusal = None
            problem = self._by_chunk(keys[1], workers)
        if problem is not None:
            told = f"what workers write to {_named(self._name, store)} is lost: {problem}; {REMEDY}"
            told = f"output: {self._refusal or told}"
            raise StoreError("; ".join([told, *self._left]))
        if self._kept is not None:
            raise StoreError(f"output: {self._kept}")
        return self._left

    def _by_own_keys(self, workers: list[str]) -> str | None:
        """Why what workers write under keys of their own is not found here; None if it is."""
        start = _below(self._path, f"{KEY_START}{uuid.uuid4().hex}")
        try:
            problem = self._problem({worker: _own_key(start, worker) for worker in workers}, start, own=True)
        finally:
            with ThreadPoolExecutor(REMOVERS, "tilewright-probe") as threads:
                list(
                    threads.map(
                        partial(self._put_back, before=None), (_own_key(start, worker) for worker in workers)
                    )
                )
        if problem is not None:  # what was written elsewhere is there still
            self._ask(remove_by_copy, self._pickled, start, workers=workers)
        return problem

    def _by_chunk(self, key: str, workers: list[str]) -> str | None:
        """The same of a chunk."""
        try:
            before = _get(self._store, key)
        except Exception as error:
            return f"{key} cannot be read here ({in_one_line(error)})"
        try:
            problems = (self._problem({worker: key}, key, own=False) for worker in workers)
            return next((problem for problem in problems if problem is not None), None)
        finally:
            self._put_back(key, before)

    def _problem(self, keys: Mapping[str, str], key: str, *, own: bool) -> str | None:
        """Why what these workers write at their keys is not found here; None if it is."""
        for value in (uuid.uuid4().bytes, uuid.uuid4().bytes):
            answers = self._ask(write_by_copy, self._pickled, key, own, value, workers=list(keys))
            for worker, cannot in answers.items():
                if (refused := _refused(self._store, cannot)) is not None:
                    self._refusal = f"{_who(worker)} write to {self._name}: {refused}"
                if cannot is not None:
                    return f"worker {worker} writes nothing: {cannot.why}"
            for worker, found in zip(answers, self._read([keys[worker] for worker in answers]), strict=True):
                if isinstance(found, BaseException):
                    return f"what worker {worker} wrote cannot be read here ({in_one_line(found)})"
                if found is None or found.to_bytes() != value:
                    state = "has nothing" if found is None else "still has what was there before"
                    return f"worker {worker} wrote to its copy, and this process {state}"
        return None

    def _read(self, keys: list[str]) -> list[Buffer | BaseException | None]:
        """What these keys hold, or what reading them raised. All at once: there may be hundreds of workers."""

        async def read() -> list[Buffer | BaseException | None]:
            asked = (self._store.get(key, default_buffer_prototype()) for key in keys)
            return await asyncio.gather(*asked, return_exceptions=True)

        return answer_of(read(), self._name)

    def _put_back(self, key: str, before: bytes | None) -> None:
        """Give a key the value that it had; None: it was not there."""
        try:
            if before is None:
                answer_of(self._store.delete(key), key)
            else:
                _set(self._store, key, before)
        except Exception as error:
            with suppress(Exception):
                if _get(self._store, key) == before:  # nothing was written there
                    return
            self._left.append(
                f"{key} in {self._name}, by which it was tried whether workers can write there, cannot be"
                f" {'removed' if before is None else 'put back'} ({in_one_line(error)})"
            )
            if (refused := _refused(self._store, _Unusable.of(error))) is not None:
                self._kept = (
                    f"cannot remove objects from {self._name}, as a run has to remove its record: {refused}; {key} is"
                    " left there"
                )


def _check_session(ask: Ask, array: zarr.Array[Any]) -> None:
    """Raise StoreError where what a worker writes to a fork of an array's session does not come back with it."""
    gathered = Gathered(array)
    name = name_of(array)
    pickled = _pickled(gathered.empty, array.store, "output", name)
    keys = _keys_of(array)
    _check_look(ask, pickled, gathered.empty.store, keys, "output", name)
    value = uuid.uuid4().bytes
    limit = session_of(array).config.inline_chunk_threshold_bytes  # type: ignore[union-attr]
    if len(keys) == 1 or (INLINE_NBYTES if limit is None else limit) < len(value):
        return  # there is no chunk, or it would leave an object in the repository's storage
    for worker, changes in ask(write_in_fork, pickled, keys[1], value).items():
        if isinstance(changes, _Unusable):
            problem = changes.why
        else:
            gathered.keep(changes)
            if _get(gathered.whole.store, keys[1]) == value:
                continue
            problem = "it is not in the changes that come back"
        raise StoreError(
            f"output: what worker {worker} writes to {name} is lost: {problem}; install the same version"
            " of icechunk there and here"
        )


async def write_in_fork(pickled: bytes, key: str, value: bytes) -> bytes | _Unusable | None:
    """Write a chunk to a worker's copy of an array in a fork, and give what has changed."""
    return await asyncio.to_thread(_write_in_fork, pickled, key, value)


def _write_in_fork(pickled: bytes, key: str, value: bytes) -> bytes | _Unusable | None:
    try:
        array = pickle.loads(pickled)
        _set(array.store, key, value)
        return changes_in(array)
    except Exception as error:
        return _Unusable(in_one_line(error))
