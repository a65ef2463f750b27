"""The store at a URL: by which library it is asked, and with which credentials.

S3 is read by obstore where that is installed, which takes a third of s3fs' time of a core for each request, and so
fills faster links (docs/object-stores.md has figures); else by s3fs. Both get the same settings: those of the AWS tools
(environment and ``~/.aws``, found by botocore), and of fsspec's configuration for ``s3``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

from zarr.abc.store import Store
from zarr.storage import FsspecStore, ObjectStore

from tilewright.pipeline import config
from tilewright.pipeline.store.remote.patience import AtUrl
from tilewright.pipeline.store.remote.trouble import SettingsError

HTTP_PROTOCOLS = ("http://", "https://")
S3_PROTOCOLS = ("s3://", "s3a://")

CONNECTIONS = 64
"""Requests that s3fs has under way at once; botocore's default of 10 would bound what is read at once."""

CONNECT_SECONDS, SILENT_SECONDS = 5, 30
"""After so many seconds without a connection, or without a byte of an answer, a request is given up, and repeated."""
WHOLE_SECONDS = 600
"""The most that an answer may take in all: many may share a slow link."""

REFRESHED_SECONDS = 300
"""How often credentials are looked up again that end."""

KNOWN_OPTIONS = {
    "key",
    "secret",
    "token",
    "endpoint_url",
    "anon",
    "requester_pays",
    "client_kwargs",
    "profile",
}
KNOWN_CLIENT_OPTIONS = {"endpoint_url", "region_name"}
"""The settings of fsspec's configuration for S3 that obstore is given too. With any other, s3fs is used."""


def is_s3(url: str) -> bool:
    """Whether a URL names an object in S3, and nothing around it."""
    return url.startswith(S3_PROTOCOLS) and "::" not in url


def is_at_server(name: str) -> bool:
    """Whether an array's name is a URL of a server, as far as that can be seen from it."""
    return "://" in name and not name.startswith(("file://", "local://", "memory://"))


def endpoint_of_s3() -> str | None:
    """The server that URLs of S3 lead to; None: AWS' own."""
    settings = _Settings.found()
    return settings.endpoint if settings is not None else _Settings(_configured(), None).endpoint


def store_at(url: str, read_only: bool = False) -> Store:
    """The store at a URL of S3, or at one of fsspec's. Raises whatever the library raises that opens it."""
    if not is_s3(url):
        found = FsspecStore.from_url(*_apart_from_query(url))
        return found.with_read_only(True) if read_only else found
    inner = _opened(url.rstrip("/"), os.getpid(), config.get("obstore"), surroundings())
    return AtUrl(inner.with_read_only(read_only), url.rstrip("/"), store_at)


def _apart_from_query(url: str) -> tuple[str, dict[str, Any]]:
    """A URL without a query, and the options by which each request for something below it carries that, such as a
    signature for all of a folder: behind the folder's own name it would be part of what every key begins with."""
    place, mark, query = url.partition("?")
    if not mark or "::" in url or not url.startswith(HTTP_PROTOCOLS):
        return url, {}
    return place, {"params": parse_qsl(query, keep_blank_values=True)}


async def call_s3(files: Any, operation: str, **arguments: Any) -> Any:
    """The answer to a request of S3's own by an s3fs file system; its public method would block the loop."""
    return await files._call_s3(operation, **arguments)


async def look_at_bucket(store: Store) -> None:
    """Raise what the server says to a listing, of a store of `store_at` for S3."""
    assert isinstance(store, AtUrl)
    inner: Any = store._store

    async def listed() -> None:
        if isinstance(inner, FsspecStore):  # its own listings do not tell an empty bucket from none
            await call_s3(inner.fs, "list_objects_v2", Bucket=inner.fs.split_path(inner.path)[0], MaxKeys=1)
            return
        async for _ in inner.list_prefix(""):
            return

    await store.asked(listed, "")


def surroundings() -> tuple[tuple[str, str], ...]:
    """What of the environment decides how S3 is reached."""
    return tuple(
        sorted((name, value) for name, value in os.environ.items() if name.startswith(("AWS_", "FSSPEC_")))
    )


@lru_cache(maxsize=256)
def _opened(url: str, process: int, obstore: bool, surroundings: tuple[tuple[str, str], ...]) -> Store:
    """One for each process and its settings: with it go the connections."""
    _check_environment()
    settings = _Settings.found()
    if settings is not None:
        _check_endpoint(settings)
    if settings is not None and settings.fits_obstore() and obstore:
        return _by_obstore(url, settings)
    if importlib.util.find_spec("s3fs") is not None:
        found = FsspecStore.from_url(url, storage_options=_s3fs_options(settings))
        found.fs.retries = 1  # patience is ours
        return found
    if importlib.util.find_spec("obstore") is not None:
        return _by_obstore(url, settings or _Settings({}, None))
    raise ImportError(
        "URLs of S3 are read by obstore or s3fs, and neither is installed: pip install 'tilewright[s3]'"
    )


def _s3fs_options(settings: _Settings | None) -> dict[str, Any]:
    given = dict(_configured().get("config_kwargs", {}))
    # With more at once for each object it would ask for an object's size before it reads it.
    given = {"max_pool_connections": CONNECTIONS, "retries": {"max_attempts": 0}, **given}
    options = {"config_kwargs": given, "max_concurrency": 1}
    # Named though it would be found, since fsspec keeps one file system for all that are opened by the same options.
    return (
        options
        if settings is None or settings.endpoint is None
        else {**options, "endpoint_url": settings.endpoint}
    )


def _check_environment() -> None:
    """Raise SettingsError for what fsspec leaves out of its configuration with a warning that nobody sees."""
    text = os.environ.get("FSSPEC_S3")
    if text is None:
        return
    try:
        found = json.loads(text)
    except ValueError as error:
        raise SettingsError(
            f"FSSPEC_S3 in the environment is no JSON ({error}), and says nothing so; mend it, such as"
            """ FSSPEC_S3='{"endpoint_url": "https://minio.example"}'"""
        ) from error
    if not isinstance(found, dict):
        raise SettingsError(
            f"FSSPEC_S3 in the environment is {text}, and says nothing so; it must be a mapping in JSON, such as"
            """ '{"endpoint_url": "https://minio.example"}'"""
        )


def _check_endpoint(settings: _Settings) -> None:
    """Raise SettingsError for a server's address that no library takes: obstore would end in a panic."""
    if settings.endpoint is not None and not re.match(r"https?://[^/]", settings.endpoint):
        raise SettingsError(
            f"the server of S3 is given as {settings.endpoint}, without http:// or https:// before it; say which, in"
            " AWS_ENDPOINT_URL or in fsspec's configuration"
        )


def _configured() -> dict[str, Any]:
    """fsspec's configuration for S3."""
    from fsspec.config import conf  # imported here since few use a URL

    return dict(conf.get("s3", {}))


class _Settings:
    """What S3 is reached by."""

    def __init__(self, options: dict[str, Any], session: Any) -> None:
        """options: fsspec's. session: botocore's, where it is installed."""
        client = options.get("client_kwargs", {})
        self.options, self.session = options, session
        self.endpoint: str | None = (
            options.get("endpoint_url") or client.get("endpoint_url") or _endpoint(session)
        )
        self.region: str | None = client.get("region_name") or _region(session)

    @classmethod
    def found(cls) -> _Settings | None:
        """None where they can be used by s3fs alone."""
        options = _configured()
        client = options.get("client_kwargs", {})
        if not (set(options) <= KNOWN_OPTIONS and set(client) <= KNOWN_CLIENT_OPTIONS):
            return None
        session = None
        if importlib.util.find_spec("botocore") is not None:
            from botocore.session import Session

            session = Session(profile=options.get("profile"))
        return cls(options, session)

    def fits_obstore(self) -> bool:
        """Whether obstore is there, and knows the bucket's server: where no region is named, s3fs finds it out."""
        known = self.endpoint is not None or self.region is not None
        return known and importlib.util.find_spec("obstore") is not None

    def credentials(self) -> Callable[[], dict[str, Any]] | None:
        """What gives the credentials that are used now; None where obstore finds them itself, or none are used."""
        if self.options.get("key"):
            given = {
                "access_key_id": self.options["key"],
                "secret_access_key": self.options.get("secret"),
                "token": self.options.get("token"),
                "expires_at": None,
            }
            return lambda: given
        if self.session is None:
            return None
        self.session.get_scoped_config()  # a profile that there is not ends in one error here, not in each request
        return self._by_botocore

    def _by_botocore(self) -> dict[str, Any]:
        found = self.session.get_credentials()
        if found is None:
            from botocore.exceptions import NoCredentialsError

            raise NoCredentialsError
        now = found.get_frozen_credentials()
        ends = hasattr(found, "refresh_needed")
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=REFRESHED_SECONDS) if ends else None,
        }


def _endpoint(session: Any) -> str | None:
    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if named or session is None or os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS") == "true":
        return named or None
    return session.get_scoped_config().get("endpoint_url")


def _region(session: Any) -> str | None:
    named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return named or (session.get_config_variable("region") if session is not None else None)


def _by_obstore(url: str, settings: _Settings) -> Store:
    from obstore.store import S3Store

    bucket, _, prefix = url.partition("://")[2].partition("/")
    how: dict[str, Any] = {"region": settings.region or "us-east-1"}
    if settings.endpoint is not None:
        how["endpoint"] = settings.endpoint
    if settings.options.get("requester_pays"):
        how["request_payer"] = True
    anonymous = settings.options.get("anon") or os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in (
        "true",
        "1",
    )
    if anonymous:
        how["skip_signature"] = True
    else:
        how["credential_provider"] = settings.credentials()
    client = {
        "allow_http": (settings.endpoint or "").startswith("http://"),
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
        "read_timeout": timedelta(seconds=SILENT_SECONDS),
        "timeout": timedelta(seconds=WHOLE_SECONDS),
    }
    store = S3Store(
        bucket,
        prefix=prefix or None,
        client_options=client,
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=WHOLE_SECONDS)},
        **{name: value for name, value in how.items() if value is not None},
    )
    return ObjectStore(store)
