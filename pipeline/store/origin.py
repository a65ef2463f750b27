"""Where an input's data come from: what tells it apart from other inputs, and the local files that hold it.

Two runs that name the same origin read the same place, whoever they are there: credentials are no part of it. Nothing
else that an array is opened by may be missing: to take two places for one puts tiles of both into one product, while to
take one for two only computes tiles again.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import zarr
from zarr.storage import FsspecStore, LocalStore, ObjectStore, ZipStore

from tilewright.pipeline.store.arrays import (
    beneath,
    kind_of,
    location,
    name_of,
    names_itself,
    protocols,
)
from tilewright.pipeline.store.region import Flattened, HeldMask, Masked, Section, StoredArray, base_of
from tilewright.pipeline.store.remote.opening import endpoint_of_s3
from tilewright.pipeline.store.remote.patience import AtUrl, unwrapped
from tilewright.pipeline.store.sessions import session_of
from tilewright.pipeline.store.sources.mapped import MappedStore

CREDENTIAL = re.compile(r"(?i)key|secret|token|passw|credential|auth|cookie|signature")
"""What the name of an option, or of a parameter of a URL, holds where its value says who asks, and not for what. Some
are new in every run."""

SIGNED = re.compile(r"(?i)(x-(amz|goog)-)?(signature|sig)")
SIGNING = re.compile(r"(?i)x-(amz|goog)-.*|sig|expires|policy|googleaccessid|s[eprstv]|spr|srt|sk[a-z]+")
"""The parameters of a signed URL of S3, Google, CloudFront or Azure that are new with every signature."""

THIS_PROCESS = uuid.uuid4().hex


@dataclass(frozen=True)
class Origin:
    place: Any
    """For `json.dumps`, with ``default=repr``. No credentials in it."""
    folder: str | None = None
    """The local folder that holds the array and nothing else, or..."""
    file: str | None = None
    """...the local archive that it lies in. Neither: the array is remote."""


def origin_of(array: zarr.Array[Any]) -> Origin:
    """Where a stored array's data come from, by its innermost store."""
    if isinstance(array.store, AtUrl):
        return _of_bucket(name_of(array))
    store = unwrapped(array.store)
    if isinstance(store, LocalStore):
        return _of_folder(str(store.root / array.path))
    if isinstance(store, MappedStore):
        return Origin(store.origin, file=None if store.mapped.digest else store.mapped.path)
    if isinstance(store, ZipStore):
        return _in_archive("zip", array.path, _of_folder(str(store.path)), {})
    if isinstance(store, FsspecStore):
        return _of_file_system(store.fs, f"{store.path}/{array.path}".rstrip("/"))
    if isinstance(store, ObjectStore):
        return _of_object_store(store.store, array)
    session = session_of(array)
    if session is not None and not session.has_uncommitted_changes:
        return Origin(["icechunk", array.path, session.snapshot_id])  # random, and never changed
    if not names_itself(store):  # an address in memory is another store's in another process
        return Origin([kind_of(store), array.path, id(store), THIS_PROCESS])
    return Origin([type(store).__name__, str(array.store_path)])


def is_same_array(one: StoredArray, other: StoredArray) -> bool:
    """Whether two open arrays are the same stored one, by where they are and by their metadata, seen in the same way.

    False also where that cannot be told: of two stores of a kind that we do not know, or of two wrappers, which may
    give other bytes than the store beneath.
    """
    if isinstance(one, Section) or isinstance(other, Section):
        return (
            isinstance(one, Section)
            and isinstance(other, Section)
            and (one.rows, one.columns) == (other.rows, other.columns)
            and is_same_array(one.array, other.array)
        )
    if isinstance(one, Masked) or isinstance(other, Masked):
        return isinstance(one, Masked) and isinstance(other, Masked) and _are_alike(one, other)
    if _axes(one) != _axes(other):
        return False
    one, other = base_of(one), base_of(other)
    if _metadata(one) != _metadata(other):
        return False
    if one.store is other.store:
        return one.path == other.path
    if isinstance(one.store, MappedStore) and isinstance(other.store, MappedStore):
        return one.store == other.store
    if isinstance(one.store, AtUrl) and isinstance(other.store, AtUrl):
        return bool(origin_of(one).place == origin_of(other).place)
    kind = type(one.store)
    if kind is not type(other.store):
        return False
    if kind is LocalStore:
        return location(one) == location(other)
    if kind in (ZipStore, FsspecStore) or session_of(one) is not None:
        return bool(origin_of(one).place == origin_of(other).place)
    return kind is ObjectStore and one.path == other.path and bool(one.store == other.store)


def _are_alike(one: Masked, other: Masked) -> bool:
    if one is other:
        return True
    if isinstance(one.mask, HeldMask) or isinstance(other.mask, HeldMask):
        same = one.mask == other.mask
    else:
        same = is_same_array(one.mask, other.mask)
    same = same and (one.axes, one.codes, one.packing) == (other.axes, other.codes, other.packing)
    return same and is_same_array(one.array, other.array)


def _axes(array: StoredArray) -> tuple[tuple[int, ...], ...] | None:
    return (array.rows, array.columns) if isinstance(array, Flattened) else None


def _metadata(array: zarr.Array[Any]) -> str:
    return json.dumps(array.metadata.to_dict(), sort_keys=True, default=str)


def _of_bucket(url: str) -> Origin:
    """Of a URL of S3, by whatever library it is read: by its bucket and path, and the server."""
    return Origin(["s3", url.partition("://")[2], endpoint_of_s3()])


def _of_folder(path: str) -> Origin:
    # Links are kept: on another host, which goes on with the work, they may lead elsewhere to the same data.
    path = os.path.abspath(path)
    return Origin(["file", path], folder=path)


def _in_archive(protocol: str, path: str, archive: Origin, options: Mapping[str, Any]) -> Origin:
    place = [protocol, path.strip("/"), archive.place, dict(options)]
    return Origin(place, file=archive.file or archive.folder)


def _of_file_system(fs: Any, path: str) -> Origin:
    """Of a path in an fsspec file system, as it was opened: by its class, arguments and, for an archive or a file of
    references, the file that it is in."""
    fs, path = beneath(fs, path)
    protocol = next(iter(protocols(fs)), type(fs).__name__)
    if "file" in protocols(fs):
        return _of_folder(path)
    names = [
        *list(inspect.signature(type(fs).__init__).parameters)[1:],
        *map(str, range(len(fs.storage_args))),
    ]
    options = {**dict(zip(names, fs.storage_args, strict=False)), **fs.storage_options}
    outer = options.pop("fo", None)
    if isinstance(outer, str | os.PathLike):
        from fsspec.core import url_to_fs  # imported here since few use a URL

        target, within = options.pop("target_protocol", None), options.pop("target_options", None)
        where = ({} if target is None else {"protocol": target}) | (within or {})
        found = _of_file_system(*url_to_fs(os.fspath(outer), **where))
        return _in_archive(protocol, path, found, _without_credentials(options))
    if hasattr(outer, "fs") and hasattr(outer, "path"):  # a file that fsspec has opened
        found = _of_file_system(outer.fs, outer.path)
        return _in_archive(protocol, path, found, _without_credentials(options))
    # In a mapping, as references may be, every name and value is data.
    whole = outer if isinstance(outer, Mapping) else _without_credentials(outer)
    return Origin([protocol, _unsigned(path), _without_credentials(options), whole])


def _of_object_store(store: Any, array: zarr.Array[Any]) -> Origin:
    """By names, so that obstore need not be imported: whoever has such a store has it."""
    prefix = getattr(store, "prefix", None)
    if type(store).__name__ == "LocalStore":
        return _of_folder(os.path.join(prefix or "/", array.path))
    facts = {name: getattr(store, name, None) for name in ("url", "prefix", "config")}
    return Origin([type(store).__name__, str(array.store_path), _without_credentials(facts)])


def _without_credentials(value: Any) -> Any:
    """What a file system was opened by, for `json.dumps`."""
    if isinstance(value, Mapping):
        return {
            str(name): _without_credentials(one)
            for name, one in value.items()
            if not CREDENTIAL.search(str(name))
        }
    if isinstance(value, list | tuple):
        return [_without_credentials(one) for one in value]
    if isinstance(value, str | os.PathLike):
        return _unsigned(os.fsdecode(value))
    if value is None or isinstance(value, bool | int | float):
        return value
    if hasattr(value, "storage_options"):  # a file system
        return _of_file_system(value, "").place
    return (
        f"{type(value).__module__}.{type(value).__qualname__}"  # sessions and the like: others in every run
    )


def _unsigned(text: str) -> str:
    """A URL without a password, and without what signs it; anything else as it is."""
    if "://" not in text:
        return text
    try:
        parts = urlsplit(text)
    except ValueError:  # it only looks like one
        return text
    user, at, host = parts.netloc.rpartition("@")
    query = parse_qsl(parts.query, keep_blank_values=True)
    signed = any(SIGNED.fullmatch(name) for name, _ in query)
    kept = [
        (name, value)
        for name, value in query
        if not CREDENTIAL.search(name) and not (signed and SIGNING.fullmatch(name))
    ]
    netloc = f"{user.partition(':')[0]}{at}{host}"
    return urlunsplit(parts._replace(netloc=netloc, query=urlencode(kept)))
