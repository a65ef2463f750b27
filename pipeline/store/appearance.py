"""How an input looks from outside: a quick look that says whether it may have changed, without reading its numbers.

What looks as it did is taken to be what it was. What looks otherwise may still hold the same numbers, as a copy, a
moved folder or a file with a new time does; `content.py` tells that.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import zarr
from zarr.storage import FsspecStore, ObjectStore

from tilewright.kernels.numbers import ceil_div
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.store.arrays import metadata_name, name_of, write_unit
from tilewright.pipeline.store.origin import origin_of
from tilewright.pipeline.store.region import HeldMask, Masked, StoredArray, base_of, whole_of
from tilewright.pipeline.store.remote.patience import unwrapped
from tilewright.pipeline.store.sources.mapped import MappedStore
from tilewright.pipeline.store.waiting import answer_of

CHUNK_KEY = re.compile(r"(c[/.])?\d+([/.]\d+)*")
CHUNK_FOLDER = re.compile(r"c|(c/)?\d+(/\d+)*")
"""The names of chunks below an array, and of folders that chunks lie in, in all of Zarr's own encodings. Whatever else
lies there, such as `.nfs` files, drafts of editors or `.DS_Store`, no reader of the array opens."""

TAGS = ("etag", "versionid", "version", "generation", "contentmd5")
"""What servers call that which is new whenever an object is written, in lower case and without separators."""

MOST_LISTED = 10_000
"""Objects of a remote array that are listed for their tags, which servers give by the thousand. Of arrays with more,
only the metadata's tag is asked for."""


class Appearance(NamedTuple):
    """Digests of what can be seen of an array without reading it."""

    place: str
    """Where it comes from (`origin.py`)."""
    metadata: str
    """Its metadata but for attributes, which change no stored number."""
    files: str
    """Names, sizes and times of its stored files; of a remote array the tags that its server gives."""

    def differs_in(self, other: Appearance) -> list[str]:
        """What another look of the same input shows, for a message."""
        texts = {
            "place": "it lies elsewhere",
            "metadata": "its metadata are others",
            "files": "its files have other names, sizes or times",
        }
        return [texts[name] for name in self._fields if getattr(self, name) != getattr(other, name)]

    @property
    def shows_files(self) -> bool:
        """Whether anything is known of the files, by which a change would be seen."""
        return self.files != _digest([])


def appearance_of(array: StoredArray, *, status: bool = False) -> Appearance:
    """How an array looks now.

    Of local arrays, however they were opened, its files are the name, size and time of every chunk, or the size and
    time of the archive that they lie in. Of remote ones they are what the server says of the metadata, and where there
    are at most `MOST_LISTED` objects, of each; nothing where it says nothing, since asking for every chunk can take
    longer than the product. ``status``: also the time at which each file's status last changed, which tells a rewrite
    after which the other time was put back (`transfer/files.py`).

    Raises StoreError where a file or folder cannot be inspected.
    """
    array = whole_of(array)
    if isinstance(array, Masked):
        return _of_both(appearance_of(array.array, status=status), array, status)
    array = base_of(array)
    origin = origin_of(array)
    if origin.folder is not None:
        metadata = _stored_metadata(origin.folder, metadata_name(array))
        every = CHUNK_KEY.fullmatch(array.metadata.encode_chunk_key((0,) * array.ndim)) is None
        files = _stored_files(origin.folder, status, every=every)
    else:
        metadata = _without_attributes(array.metadata.to_dict())
        files = iter([_archive(origin.file, status)] if origin.file is not None else _tags(array))
    place = json.dumps(origin.place, sort_keys=True, default=repr).encode()
    return Appearance(_digest([place]), _digest([metadata]), _digest(map(os.fsencode, files)))


def _of_both(numbers: Appearance, array: Masked, status: bool) -> Appearance:
    """How an array looks together with its mask, given how it looks itself."""
    along = json.dumps(array.axes) + (f" {array.codes}" if array.codes else "")
    along += f" {array.packing}" if array.packing is not None else ""
    if isinstance(array.mask, HeldMask):
        held = hashlib.sha256(array.mask.bits).hexdigest()
        mask = Appearance("", json.dumps(array.mask.shape), held)
    else:
        mask = appearance_of(array.mask, status=status)
    mask = mask._replace(metadata=mask.metadata + along)
    return Appearance(
        *(_digest([one.encode(), other.encode()]) for one, other in zip(numbers, mask, strict=True))
    )


def _digest(lines: Any) -> str:
    """lines: bytes; file names among them may be no UTF-8."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line)
    return digest.hexdigest()


def _stored_metadata(folder: str, name: str) -> bytes:
    """What an array's metadata say now: an open array has those of when it was opened."""
    path = os.path.join(folder, name)
    try:
        with open(path, "rb") as file:
            data = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return b"missing"
    except OSError as error:
        raise _not_looked_at(path, error) from error
    try:
        return _without_attributes(json.loads(data))
    except (ValueError, RecursionError, AttributeError):  # it is being written, or no array's
        return data


def _without_attributes(metadata: dict[str, Any]) -> bytes:
    kept = {name: value for name, value in metadata.items() if name != "attributes"}
    return json.dumps(kept, sort_keys=True, default=str).encode()


def _archive(path: str, status: bool) -> str:
    try:
        return _size_and_times(os.stat(path), status)
    except OSError as error:
        raise _not_looked_at(path, error) from error


def _size_and_times(facts: os.stat_result, status: bool) -> str:
    return f"{facts.st_size} {facts.st_mtime_ns}" + (f" {facts.st_ctime_ns}" if status else "")


def _stored_files(root: str, status: bool, *, every: bool) -> Iterator[str]:
    """A line for every chunk below ``root``, in a fixed order: name, size and nanoseconds since the epoch. Links are
    followed. every: whatever its name, since nobody knows what chunks of this encoding are called.

    A replaced file is recognised by its modification time, even an older one; so are files that swap names. Inode
    numbers would add little, and on some network file systems they differ between hosts or change after a restart; the
    time of the last status change changes with a backup that makes hard links. Either would be a cause to read the
    input for nothing. Where no tiles are kept, ``status`` adds that time.

    Raises StoreError.
    """
    followed = {os.path.realpath(root): ""}
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(os.path.join(root, folder)) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):  # it went away while we looked
            yield f"{folder}\0missing\n"
            continue
        except OSError as error:
            raise _not_looked_at(os.path.join(root, folder), error) from error
        for entry in entries:
            name = os.path.join(folder, entry.name)
            if not (every or CHUNK_KEY.fullmatch(name) or CHUNK_FOLDER.fullmatch(name)):
                continue
            try:
                if entry.is_dir():
                    # A folder that links lead to is listed once: links may form a cycle.
                    first = (
                        followed.setdefault(os.path.realpath(entry.path), name)
                        if entry.is_symlink()
                        else name
                    )
                    if first == name:
                        waiting.append(name)
                    else:
                        yield f"{name}\0folder {first}\n"
                    continue
                facts = entry.stat()
                yield f"{name}\0{_size_and_times(facts, status)}\n"
            except FileNotFoundError:  # a dangling link, or gone by now: reads as a chunk never written
                yield f"{name}\0missing\n"
            except OSError as error:
                raise _not_looked_at(entry.path, error) from error


def _not_looked_at(path: str, error: OSError) -> StoreError:
    return StoreError(
        f"cannot look at {path}: {error.strerror}; a run compares its inputs with what they were: let this process read"
        " every folder of them, and mend links that lead to themselves"
    )


def _tags(array: zarr.Array[Any]) -> list[str]:
    """A line for each object of a remote array whose server gives it a tag, or a version, in a fixed order; none where
    the store says none, or refuses to: then content alone tells whether the array has changed."""
    store, metadata = unwrapped(array.store), metadata_name(array)
    objects = math.prod(
        ceil_div(side, unit) for side, unit in zip(array.shape, write_unit(array), strict=True)
    )
    name = f"{array.path}/{metadata}".lstrip("/")
    if isinstance(store, MappedStore):
        return [store.mapped.digest]  # of numbers in memory
    if isinstance(store, FsspecStore):
        asking = _tags_by_fsspec(store, name, objects <= MOST_LISTED)
    elif isinstance(store, ObjectStore):
        asking = _tags_by_obstore(store.store, name, objects <= MOST_LISTED)
    else:
        return []
    try:
        return sorted(answer_of(asking, f"{name_of(array)}/{metadata}"))
    except Exception:  # whatever a server's library raises: a quick look is not worth a run
        return []


async def _tags_by_fsspec(store: FsspecStore, metadata: str, listed: bool) -> list[str]:
    fs, path = store.fs, f"{store.path}/{metadata}".lstrip("/") if store.path else metadata
    folder = path.rpartition("/")[0]
    fs.invalidate_cache(folder)  # of listings, which would be those of the first look
    first = _tag_line(metadata, await fs._info(path))
    if first is None:
        return []
    if not listed or "http" in fs.protocol:  # which has no listings but web pages
        return [first]
    found = await fs._find(folder, detail=True)
    lines = ((_below(name, folder), facts) for name, facts in found.items())
    return [
        first,
        *(line for key, facts in lines if CHUNK_KEY.fullmatch(key) and (line := _tag_line(key, facts))),
    ]


async def _tags_by_obstore(store: Any, metadata: str, listed: bool) -> list[str]:
    import obstore  # who has such a store has it

    first = _tag_line(metadata, dict(await obstore.head_async(store, metadata)))
    if first is None or not listed:
        return [] if first is None else [first]
    folder = metadata.rpartition("/")[0]
    lines = [first]
    async for batch in obstore.list(store, folder or None):
        for facts in batch:
            key = _below(str(facts["path"]), folder)
            if CHUNK_KEY.fullmatch(key) and (line := _tag_line(key, dict(facts))):
                lines.append(line)
    return lines


def _below(name: str, folder: str) -> str:
    """The name of an object within a folder; servers' libraries differ in whether names begin with a slash."""
    return name.strip("/").removeprefix(folder.strip("/")).lstrip("/")


def _tag_line(name: str, facts: dict[str, Any]) -> str | None:
    """A line about an object from what its server says of it; None where that has no tag."""
    plain = {re.sub("[-_ ]", "", str(key).lower()): value for key, value in facts.items()}
    tags = {tag: str(plain[tag]) for tag in TAGS if plain.get(tag)}
    return f"{name}\0{plain.get('size')} {json.dumps(tags, sort_keys=True)}\n" if tags else None
