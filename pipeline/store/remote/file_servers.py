"""What answers for files at URLs: each server is asked whether a file is there, what lies below a folder, and for
ranges of bytes.

S3 is asked by the library that `opening.py` chooses, HTTP through fsspec's session, and all else through fsspec's file
systems. Where a server takes a condition (S3, HTTP), a range is asked for under the condition that the file still is as
it was listed.
"""

from __future__ import annotations

import asyncio
import html
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, Protocol, TypeVar
from urllib.parse import urljoin, urlsplit, urlunsplit

from zarr.storage import FsspecStore, ObjectStore

from tilewright.pipeline import config
from tilewright.pipeline.store.remote.conditional import is_conflict
from tilewright.pipeline.store.remote.facts import Facts, same
from tilewright.pipeline.store.remote.opening import (
    CONNECT_SECONDS,
    SILENT_SECONDS,
    WHOLE_SECONDS,
    call_s3,
    is_s3,
    look_at_bucket,
    store_at,
    surroundings,
)
from tilewright.pipeline.store.remote.patience import AtUrl, Patience

AT_ONCE = 32
"""Requests of one listing that are under way at once."""

WHOLE_NBYTES = 2**23
"""The largest file that is read whole again and again for ranges of it, where a server gives no ranges."""

TIME_STEP_NS = 10**9
"""Times are compared by the second: headers of HTTP know no less, listings of the same server may."""

_LINK = re.compile(r"""<a\s[^>]*?href\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""", re.IGNORECASE)

Found = TypeVar("Found")
One = TypeVar("One")


class ChangedError(Exception):
    """The file is not any more what it was listed as."""


class NoRangesError(Exception):
    """A server gives no ranges of a file, or does not say how long it is."""


class Server(Protocol):
    """Answers for the files at the URLs that begin alike. Its methods raise what its library raises."""

    patience: Patience

    async def look(self, url: str) -> Facts | None:
        """What is there; None where there is no file."""

    async def below(self, url: str) -> dict[str, Facts]:
        """The files below a folder, by their URLs, in any order; nothing where there is no folder."""

    async def read(self, url: str, facts: Facts, start: int, stop: int) -> Any:
        """The bytes of a range, which is not empty, as an object with a buffer.

        Raises ChangedError where the server knows that the file is not as ``facts`` say, NoRangesError.
        """


def server_of(url: str) -> Server:
    """Who answers for a URL. Raises whatever the library raises that opens it."""
    if is_s3(url):
        return _s3_server(_bucket_of(url), os.getpid(), config.get("obstore"), surroundings())
    if url.startswith(("http://", "https://")):
        return _http_server(urlunsplit(urlsplit(url)._replace(path="", query="", fragment="")), os.getpid())
    return _fsspec_server(url, os.getpid())


async def together(ask: Callable[[One], Awaitable[Found]], many: Iterable[One]) -> list[Found]:
    """What ``ask`` gives for each, `AT_ONCE` at once. The first error ends the others."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(each: One) -> Found:
        async with gate:
            return await ask(each)

    tasks = [asyncio.ensure_future(one(each)) for each in many]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _check_length(data: Any, nbytes: int) -> Any:
    if len(data) < nbytes:
        raise asyncio.IncompleteReadError(b"", nbytes)  # asked for again
    return data


def _seconds_ns(when: datetime | str | float | None) -> int:
    """A time as `Facts` has it: given as such, as ISO 8601 or HTTP write it, or in seconds since the epoch."""
    if isinstance(when, str):
        when = _parsed(when)
    if isinstance(when, datetime):
        when = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    return int(when) * TIME_STEP_NS if when else 0


def _parsed(text: str) -> datetime | None:
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        with suppress(ValueError):
            return parse(text)
    return None


# ----- S3 -----


def _bucket_of(url: str) -> str:
    protocol, _, rest = url.partition("://")
    return f"{protocol}://{rest.partition('/')[0]}"


@lru_cache(maxsize=64)
def _s3_server(bucket: str, process: int, obstore: bool, surroundings: tuple[tuple[str, str], ...]) -> Server:
    """One for each process and its settings, as `opening` has stores."""
    store = store_at(bucket, True)
    assert isinstance(store, AtUrl)
    inner: Any = store._store
    return (
        _Obstore(bucket, store, inner.store)
        if isinstance(inner, ObjectStore)
        else _S3fs(bucket, store, inner)
    )


class _Obstore:
    def __init__(self, bucket: str, store: AtUrl, inner: Any) -> None:
        self._bucket, self._store, self._inner = bucket, store, inner
        self.patience = Patience(bucket)

    def _key(self, url: str) -> str:
        return url.removeprefix(self._bucket).strip("/")

    async def look(self, url: str) -> Facts | None:
        import obstore  # who has such a store has it

        if not self._key(url):
            return None
        try:
            return _facts_of_meta(await obstore.head_async(self._inner, self._key(url)))
        except FileNotFoundError:
            return None

    async def below(self, url: str) -> dict[str, Facts]:
        import obstore

        top = self._key(url)
        found = await obstore.list_with_delimiter_async(self._inner, prefix=top or None)
        objects = {one["path"]: one for one in found["objects"]}

        async def all_of(prefix: str) -> list[Any]:
            return [one async for some in obstore.list(self._inner, prefix, chunk_size=1000) for one in some]

        for some in await together(all_of, found["common_prefixes"]):
            objects |= {one["path"]: one for one in some}
        return {
            f"{self._bucket}/{path}": _facts_of_meta(one)
            for path, one in objects.items()
            if path.strip("/") != top and not _marks_folder(path, one["size"], objects)
        }

    async def read(self, url: str, facts: Facts, start: int, stop: int) -> Any:
        import obstore

        options: Any = {"range": (start, stop)}
        if facts.tag:
            options["if_match"] = f'"{facts.tag}"'
        try:
            answer = await obstore.get_async(self._inner, self._key(url), options=options)
            return _check_length(await answer.bytes_async(), stop - start)
        except Exception as error:
            raise _changed_or(error, facts) from error


def _marks_folder(path: str, nbytes: int, objects: dict[str, Any]) -> bool:
    """Whether an object stands for a folder, as some tools leave one without bytes at its name."""
    return path.endswith("/") or (not nbytes and any(name.startswith(f"{path}/") for name in objects))


def _facts_of_meta(meta: Any) -> Facts:
    return Facts(meta["size"], _seconds_ns(meta["last_modified"]), (meta["e_tag"] or "").strip('"'))


def _changed_or(error: Exception, facts: Facts) -> Exception:
    """Our error where the condition on a range did not hold, or there is no such range; else the same."""
    text = f"{type(error).__name__} {error}"
    if is_conflict(error) or (facts.tag and ("InvalidRange" in text or "416" in text)):
        return ChangedError()
    return error


class _S3fs:
    def __init__(self, bucket: str, store: AtUrl, inner: FsspecStore) -> None:
        self._bucket, self._store = bucket, store
        self._files: Any = inner.fs
        self.patience = Patience(bucket)

    async def look(self, url: str) -> Facts | None:
        bucket, key, _ = self._files.split_path(url)
        if not key:
            return None
        try:
            return _facts_of_s3(await call_s3(self._files, "head_object", Bucket=bucket, Key=key))
        except FileNotFoundError:
            return None

    async def below(self, url: str) -> dict[str, Facts]:
        bucket, key, _ = self._files.split_path(url)
        top = f"{key.rstrip('/')}/" if key else ""
        found: dict[str, Facts] = {}

        async def pages(prefix: str, **how: str) -> list[str]:
            """Takes the objects, and returns the folders."""
            folders: list[str] = []
            more: dict[str, str] = {}
            while True:
                page = await call_s3(
                    self._files, "list_objects_v2", Bucket=bucket, Prefix=prefix, **how, **more
                )
                for one in page.get("Contents", ()):
                    if not one["Key"].endswith("/"):
                        found[f"{self._bucket}/{one['Key']}"] = _facts_of_s3(one)
                folders += [one["Prefix"] for one in page.get("CommonPrefixes", ())]
                if not page.get("IsTruncated"):
                    return folders
                more = {"ContinuationToken": page["NextContinuationToken"]}

        await together(pages, await pages(top, Delimiter="/"))
        return found

    async def read(self, url: str, facts: Facts, start: int, stop: int) -> Any:
        bucket, key, _ = self._files.split_path(url)
        how = {"IfMatch": f'"{facts.tag}"'} if facts.tag else {}
        try:
            answer = await call_s3(
                self._files, "get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{stop - 1}", **how
            )
            async with answer["Body"] as body:
                return _check_length(await body.read(), stop - start)
        except Exception as error:
            raise _changed_or(error, facts) from error


def _facts_of_s3(answer: Any) -> Facts:
    nbytes = answer["Size"] if "Size" in answer else answer["ContentLength"]
    return Facts(int(nbytes), _seconds_ns(answer.get("LastModified")), answer.get("ETag", "").strip('"'))


async def check_bucket(url: str) -> None:
    """Raise what the server says of a bucket in which nothing was found; nothing of other URLs."""
    if is_s3(url):
        await look_at_bucket(store_at(_bucket_of(url), True))


# ----- HTTP -----


@lru_cache(maxsize=64)
def _http_server(root: str, process: int) -> Server:
    return _Http(root)


class _Http:
    """Files and folders of a server of HTTP: a folder is a page, at a URL that ends in a slash, with links to what is
    below it."""

    def __init__(self, root: str) -> None:
        self._files: Any = FsspecStore.from_url(root).fs
        self.patience = Patience(root)

    @asynccontextmanager
    async def _asked(self, method: str, url: str, **headers: str) -> AsyncIterator[Any]:
        import aiohttp  # fsspec's files at such URLs take it

        session = await self._files.set_session()
        how = dict(self._files.kwargs)
        # Whatever is encoded on the way has another length.
        sent = {**how.pop("headers", {}), "Accept-Encoding": "identity", **headers}
        timeout = aiohttp.ClientTimeout(WHOLE_SECONDS, sock_connect=CONNECT_SECONDS, sock_read=SILENT_SECONDS)
        how = {"timeout": timeout, "allow_redirects": True, **how}
        async with session.request(method, self._files.encode_url(url), headers=sent, **how) as answer:
            yield answer

    async def look(self, url: str) -> Facts | None:
        if urlsplit(url).path.endswith("/"):
            return None
        async with self._asked("HEAD", url) as answer:
            if answer.status in (404, 410) or answer.url.path.endswith("/"):
                return None
            length = answer.headers.get("Content-Length", "")
            if answer.status < 400 and length.isdigit() and "Content-Encoding" not in answer.headers:
                return _facts_of_headers(int(length), answer.headers)
        async with self._asked(
            "GET", url, Range="bytes=0-0"
        ) as answer:  # some refuse HEAD, or say less there
            if answer.status in (404, 410) or answer.url.path.endswith("/"):
                return None
            whole = _whole_length(answer)
            if answer.status != 416:
                answer.raise_for_status()
            if whole is None:
                raise NoRangesError("its server does not say how long it is")
            return _facts_of_headers(whole, answer.headers)

    async def below(self, url: str) -> dict[str, Facts]:
        top = url.rstrip("/") + "/"
        pages, seen, files = [top], {top}, dict[str, None]()
        while pages:
            found = {link for links in await together(self._links, pages) for link in links}
            pages = sorted(link for link in found if link.endswith("/") and link not in seen)
            seen |= set(pages)
            files |= dict.fromkeys(link for link in found if not link.endswith("/"))
        facts = await together(self.look, files)
        return {link: each for link, each in zip(files, facts, strict=True) if each is not None}

    async def _links(self, page: str) -> list[str]:
        """The URLs below a page's that it leads to."""
        async with self._asked("GET", page) as answer:
            if answer.status in (404, 410) or "html" not in answer.headers.get("Content-Type", "html"):
                return []
            answer.raise_for_status()
            text = await answer.text(errors="replace")
        links = (html.unescape("".join(parts)) for parts in _LINK.findall(text))
        found = (urljoin(page, link) for link in links if "?" not in link and "#" not in link)
        return [link for link in found if link.startswith(page) and link != page]

    async def read(self, url: str, facts: Facts, start: int, stop: int) -> Any:
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        if facts.tag and not facts.tag.startswith("W/"):  # a weak tag never fulfils the condition
            headers["If-Match"] = f'"{facts.tag}"'
        async with self._asked("GET", url, **headers) as answer:
            if answer.status in (412, 416):
                raise ChangedError
            answer.raise_for_status()
            whole = _whole_length(answer)
            if whole is not None and not same(facts, _facts_of_headers(whole, answer.headers)):
                raise ChangedError
            if answer.status == 206:
                return _check_length(await answer.read(), stop - start)
            if facts.nbytes > WHOLE_NBYTES:
                raise NoRangesError("its server gives no ranges of it")
            return memoryview(_check_length(await answer.read(), facts.nbytes))[start:stop]


def _facts_of_headers(nbytes: int, headers: Any) -> Facts:
    tag = headers.get("ETag", "")
    return Facts(nbytes, _seconds_ns(headers.get("Last-Modified")), tag.strip('"') if tag[:1] == '"' else tag)


def _whole_length(answer: Any) -> int | None:
    """How long a file is by the answer to a request for a range; None where it does not say."""
    whole = answer.headers.get("Content-Range", "").rpartition("/")[2]
    if whole.isdigit():
        return int(whole)
    length = answer.headers.get("Content-Length", "")
    coded = answer.status == 206 or "Content-Encoding" in answer.headers
    return int(length) if length.isdigit() and not coded and answer.status < 400 else None


# ----- fsspec's others -----

TAGS = ("ETag", "etag", "e_tag", "generation", "md5Hash", "content_md5", "version_id", "blob_id", "checksum")
TIMES = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")
"""What file systems of fsspec call such facts, the more telling ones first."""


@lru_cache(maxsize=256)
def _fsspec_server(url: str, process: int) -> Server:
    return _Fsspec(url)


class _Fsspec:
    def __init__(self, url: str) -> None:
        store = FsspecStore.from_url(url)
        self._files: Any = store.fs
        self._url, self._path = url.rstrip("/"), store.path.rstrip("/")
        protocol, _, rest = url.rpartition("://")
        self.patience = _patience_at(f"{protocol}://{rest.partition('/')[0]}")

    async def look(self, url: str) -> Facts | None:
        try:
            info = await self._files._info(self._path)
        except FileNotFoundError:
            return None
        return _facts_of_info(info) if info["type"] == "file" else None

    async def below(self, url: str) -> dict[str, Facts]:
        self._files.invalidate_cache()
        try:
            found = await self._files._find(self._path, detail=True)
        except FileNotFoundError:
            return {}
        return {
            f"{self._url}/{name.removeprefix(self._path).lstrip('/')}": _facts_of_info(info)
            for name, info in found.items()
            if info["type"] == "file" and name.rstrip("/") != self._path
        }

    async def read(self, url: str, facts: Facts, start: int, stop: int) -> Any:
        data = await self._files._cat_file(self._path, start=start, end=stop)
        return _check_length(data, stop - start)


@lru_cache(maxsize=64)
def _patience_at(root: str) -> Patience:
    """One for all files of a server, or of a bucket."""
    return Patience(root)


def _facts_of_info(info: Any) -> Facts:
    if info.get("size") is None:
        raise NoRangesError("its server does not say how long it is")
    tag = next((str(info[name]) for name in TAGS if info.get(name)), "")
    when = next((info[name] for name in TIMES if info.get(name)), None)
    return Facts(int(info["size"]), _seconds_ns(when), tag.strip('"'))
