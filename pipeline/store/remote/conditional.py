"""Objects that are written only if nobody else has written them: by the conditions ``If-None-Match`` and ``If-Match``,
which S3 and most servers like it know.

An answer to such a request may be lost on its way, and the request repeated: then the server refuses it, since the
first one has come. So who is refused looks at what is there, and may find its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from zarr.abc.store import Store
from zarr.buffer import default_buffer_prototype
from zarr.storage import FsspecStore, MemoryStore, ObjectStore

from tilewright.pipeline.store.remote.opening import call_s3
from tilewright.pipeline.store.remote.patience import AtUrl, unwrapped
from tilewright.pipeline.store.remote.trouble import Kind, trouble_of

CONFLICTS = {"AlreadyExistsError", "PreconditionError", "FileExistsError"}
"""Classes of obstore, s3fs and Python that say that the condition does not hold, by name."""
CONFLICT_CODES = {"PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey"}
UNKNOWN_CODES = {"NotImplemented"}


class Tagged(NamedTuple):
    """What an object holds, and the server's tag of it; None where the store gives none."""

    data: bytes
    tag: str | None
    unconditional: bool = False
    """It was written without a condition, which the store does not know, although others may write there."""


class ConflictError(Exception):
    """Somebody else has written the object."""


async def tagged(store: Store, key: str) -> Tagged | None:
    """What an object holds now; None where there is none. Raises what the store raises."""
    inner = unwrapped(store)

    async def read() -> Tagged | None:
        try:
            if isinstance(inner, ObjectStore):
                import obstore  # who has such a store has it

                answer = await obstore.get_async(inner.store, key)
                tag = answer.meta["e_tag"]
                return Tagged(bytes(await answer.bytes_async()), tag)
            if _is_s3fs(inner):
                bucket, name, _ = inner.fs.split_path(f"{inner.path}/{key}")
                answer = await call_s3(inner.fs, "get_object", Bucket=bucket, Key=name)
                async with answer["Body"] as body:
                    return Tagged(await body.read(), answer.get("ETag"))
            found = await inner.get(key, default_buffer_prototype())
            return None if found is None else Tagged(found.to_bytes(), None)
        except Exception as error:
            if trouble_of(error).kind is Kind.MISSING:
                return None
            raise

    return await _asked(store, read, key)


async def put_if(store: Store, key: str, data: bytes, before: Tagged | None) -> Tagged:
    """Write an object if it still is as it was seen, ``before``; None: if there is none. Where the store knows no
    conditions it is written in any case, and read back.

    Returns what is there then. Raises ConflictError where that is somebody else's, else what the store raises.
    """
    inner, unconditional = unwrapped(store), False

    async def write() -> str | None:
        nonlocal unconditional
        try:
            if isinstance(inner, ObjectStore):
                return await _put_by_obstore(inner.store, key, data, before)
            if _is_s3fs(inner):
                return await _put_by_s3fs(inner, key, data, before)
        except Exception as error:
            if is_conflict(error):
                raise ConflictError from error
            if not _is_unknown(error):
                raise
        unconditional = not _is_ours_alone(inner)
        await inner.set(key, default_buffer_prototype().buffer.from_bytes(data))
        return None

    try:
        tag = await _asked(store, write, key)
    except ConflictError:
        tag = None
    if tag is not None:
        return Tagged(data, tag)
    found = await tagged(store, key)
    if found is None or found.data != data:
        raise ConflictError(key)
    return found._replace(unconditional=unconditional)


async def _put_by_obstore(inner: Any, key: str, data: bytes, before: Tagged | None) -> str | None:
    import obstore

    mode: Any = "create" if before is None else "overwrite" if before.tag is None else {"e_tag": before.tag}
    answer = await obstore.put_async(inner, key, data, mode=mode)
    return answer["e_tag"]


async def _put_by_s3fs(inner: Any, key: str, data: bytes, before: Tagged | None) -> str | None:
    how: dict[str, Any] = {} if before is None or before.tag is None else {"IfMatch": before.tag}
    if before is None:
        how["IfNoneMatch"] = "*"
    bucket, name, _ = inner.fs.split_path(f"{inner.path}/{key}")
    answer = await call_s3(inner.fs, "put_object", Bucket=bucket, Key=name, Body=data, **how)
    tag = answer.get("ETag")
    return None if tag is None else str(tag)


async def _asked(store: Store, ask: Callable[[], Awaitable[Any]], key: str) -> Any:
    store = unwrapped(store, AtUrl)
    return await (store.asked(ask, key) if isinstance(store, AtUrl) else ask())


def _is_s3fs(store: Any) -> bool:
    return isinstance(store, FsspecStore) and hasattr(store.fs, "call_s3")


def _is_ours_alone(store: Any) -> bool:
    """Whether it is in the memory of this process."""
    return isinstance(store, MemoryStore) or "memory" in getattr(getattr(store, "fs", None), "protocol", ())


def is_conflict(error: BaseException) -> bool:
    names = {one.__name__ for one in type(error).__mro__}
    return not names.isdisjoint(CONFLICTS) or _code_of(error) in CONFLICT_CODES


def _is_unknown(error: BaseException) -> bool:
    """Whether the store knows no such conditions."""
    return (
        type(error).__name__ in ("NotSupportedError", "NotImplementedError")
        or _code_of(error) in UNKNOWN_CODES
    )


def _code_of(error: BaseException) -> str:
    """The server's own word, also of an error that s3fs has translated."""
    answer = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    return str(answer["Error"].get("Code", "")) if isinstance(answer, dict) and "Error" in answer else ""
