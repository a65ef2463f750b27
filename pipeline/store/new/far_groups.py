"""The groups of Zarr that an output at a URL lies in: their format, which is that of the output, and their consolidated
metadata, which are told of it, as `groups` does on a local disk."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import zarr
from zarr.buffer import default_buffer_prototype

from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.store.arrays import Source, local_path
from tilewright.pipeline.store.chunks import METADATA_NAMES
from tilewright.pipeline.store.new.groups import (
    CONSOLIDATED_NAME,
    DIMENSIONS,
    GROUP_NAME,
    NEW_GROUP,
    entries_of,
    format_around,
)
from tilewright.pipeline.store.objects import objects_at
from tilewright.pipeline.store.remote.opening import is_at_server, store_at
from tilewright.pipeline.store.sources.mapped import ATTRIBUTES_NAME
from tilewright.pipeline.store.waiting import answer_of

ATTEMPTS = 8
"""How often consolidated metadata are read again, and changed, that somebody else has changed meanwhile."""


class FarGroup(NamedTuple):
    """The nearest group above a URL."""

    url: str
    zarr_format: Literal[2, 3]
    between: tuple[str, ...]
    """URLs of the folders between, which are no groups yet, the outermost first."""


def format_at(target: Source) -> Literal[2, 3] | None:
    """The format of the group that an output would lie in, at a local path or a URL; None where there is none, and for
    an open array, which has its own."""
    if isinstance(target, zarr.Array):
        return None
    path = local_path(target)
    if path is not None:
        return format_around(path)
    found = group_around(os.fspath(target))
    return None if found is None else found.zarr_format


def above(url: str) -> list[str]:
    """URLs of the folders above, the innermost first; of S3 the bucket is the last. None for chains of URLs."""
    protocol, _, path = url.partition("://")
    if not is_at_server(url) or "::" in url:
        return []
    names = path.rstrip("/").split("/")
    return [f"{protocol}://{'/'.join(names[:count])}" for count in range(len(names) - 1, 0, -1)]


def group_around(url: str) -> FarGroup | None:
    """The group that an output would lie in; None where there is none, or nobody may look. All folders above are asked
    at once: the answer takes as long as that of one."""
    folders = above(url)

    async def metadata(folder: str, name: str) -> bytes | None:
        try:
            found = await store_at(folder, True).get(name, default_buffer_prototype())
        except Exception:  # to those who may see a part of a bucket alone, the rest is forbidden
            return None
        return None if found is None else found.to_bytes()

    async def all_of_them() -> list[bytes | None]:
        names = (METADATA_NAMES[3], GROUP_NAME, METADATA_NAMES[2])
        return await asyncio.gather(*(metadata(folder, name) for folder in folders for name in names))

    found = answer_of(all_of_them(), url) if folders else []
    for place, folder in enumerate(folders):
        of_three, of_two, array = found[3 * place : 3 * place + 3]
        between = tuple(reversed(folders[:place]))
        if of_three is not None and (_mapping(of_three) or {}).get("node_type") == "group":
            return FarGroup(folder, 3, between)
        if of_two is not None:
            return FarGroup(folder, 2, between)
        if of_three is not None or array is not None:
            return None
    return None


def settle_at(url: str) -> list[str]:
    """Make a finished output at a URL known to readers of the group that it lies in: folders between become groups, and
    consolidated metadata of the groups around are told of it, unless a dimension of another length has a name that one
    of its own has: then xarray could open the group no more. Returns a sentence for what could not be done."""
    found = group_around(url)
    if found is None:
        return []
    try:
        for folder in found.between:
            name, data = (
                (METADATA_NAMES[3], _new_group()) if found.zarr_format == 3 else (GROUP_NAME, _OF_TWO)
            )
            objects_at(folder).put_if(name, data, None)
        nodes = [url.rstrip("/"), *reversed(found.between)]
        folders = above(url)
        for folder in folders[folders.index(found.url) :]:
            is_group, problem = _renew(folder, nodes, found.zarr_format)
            if problem is not None:
                return [f"{url} is whole, but {problem}"]
            if not is_group:
                break
            nodes.append(folder)
    except (StoreError, ValueError, KeyError, TypeError) as error:
        problem = f"the consolidated metadata of the groups around may not tell of it ({error})"
        return [f"{url} is whole, but {problem}; renew them by zarr.consolidate_metadata"]
    return []


_OF_TWO = b'{"zarr_format": 2}'


def _new_group() -> bytes:
    return json.dumps({name: NEW_GROUP[name] for name in ("attributes", "zarr_format", "node_type")}).encode()


def _mapping(data: bytes) -> dict[str, Any] | None:
    """What JSON holds, if it is a mapping."""
    try:
        found = json.loads(data)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _renew(url: str, nodes: list[str], zarr_format: Literal[2, 3]) -> tuple[bool, str | None]:
    """Put the metadata of what lies below a group into its consolidated ones, if it has any. Returns whether there is a
    group, and what keeps it from that. nodes: URLs, the output's first."""
    group = objects_at(url)
    name = METADATA_NAMES[3] if zarr_format == 3 else CONSOLIDATED_NAME
    for _ in range(ATTEMPTS):
        before = group.tagged(name)
        whole = None if before is None else _mapping(before.data)
        if zarr_format == 3:
            if whole is None or whole.get("node_type") != "group":
                return False, None
            kept = whole.get("consolidated_metadata")
        else:
            if group.get(GROUP_NAME) is None:
                return False, None
            kept = whole
        if not kept:
            return True, None
        entries: dict[str, dict[str, Any]] = {}
        for node in nodes:
            entries |= entries_of(node.removeprefix(url).lstrip("/"), zarr_format, objects_at(node).get)
        key = nodes[0].removeprefix(url).lstrip("/")
        others = {other: one for other, one in kept["metadata"].items() if other not in entries}
        dimension = _at_odds(_lengths(entries, key), others, key)
        if dimension is not None:
            return True, (
                f"the consolidated metadata of {url} do not tell of it: {dimension} is a dimension of another length"
                " there, and xarray opens no such group; store C elsewhere"
            )
        kept["metadata"] |= entries
        if group.put_if(name, json.dumps(whole, indent=2).encode(), before) is not None:
            return True, None
    return True, (
        f"others write to the consolidated metadata of {url} all the time, which do not tell of it; renew them by"
        " zarr.consolidate_metadata"
    )


def _lengths(entries: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, int]:
    """The lengths of an array's dimensions, by their names, from consolidated metadata of either format."""
    facts = entries.get(key) or entries.get(f"{key}/{METADATA_NAMES[2]}") or {}
    names = facts.get("dimension_names") or entries.get(f"{key}/{ATTRIBUTES_NAME}", {}).get(DIMENSIONS) or ()
    return {name: length for name, length in zip(names, facts.get("shape", ()), strict=False) if name}


def _at_odds(own: Mapping[str, int], others: Mapping[str, Mapping[str, Any]], key: str) -> str | None:
    """A dimension that an array in the same group has of another length; None where there is none."""
    folder = key.rpartition("/")[0]
    keys = {other.removesuffix(f"/{METADATA_NAMES[2]}") for other in others}
    for other in sorted(keys):
        if other.rpartition("/")[0] != folder:
            continue
        for name, length in _lengths(others, other).items():
            if own.get(name, length) != length:
                return name
    return None
