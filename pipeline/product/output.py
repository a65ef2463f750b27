"""The life of a new array: it is created under a name of its own, locked for one run, and gets its final name once it
is whole. What stood there before is set aside and then removed; what a stopped run leaves, the next goes on from, or
replaces."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import zarr
from zarr.errors import BaseZarrError, ContainsArrayError

from tilewright.pipeline.errors import OutputExistsError, StoreError
from tilewright.pipeline.product.in_place import (
    UNFINISHED_NAME,
    InPlace,
    check_given_output,
    create_at_url,
    given_in_place,
    is_unfinished,
    resume_in_place,
)
from tilewright.pipeline.store.arrays import (
    UNREADABLE,
    Source,
    anchored,
    check_bucket,
    check_source,
    is_bare_chain,
    local_path,
    metadata_name,
    name_of,
)
from tilewright.pipeline.store.attributes import Names
from tilewright.pipeline.store.chunks import (
    DRAFT_NAME,
    DRAFTS_NAME,
    METADATA_NAMES,
    new_drafts_name,
)
from tilewright.pipeline.store.journal import twin_of
from tilewright.pipeline.store.locks import (
    is_locked_by,
    lock_folder,
    not_ours,
    stands_at,
    unlock_folder,
)
from tilewright.pipeline.store.new.far_groups import format_at
from tilewright.pipeline.store.new.groups import (
    absolute,
    ended,
    in_format,
    make_groups,
    metadata_in,
    remove_all,
)
from tilewright.pipeline.store.new.names import check_folder_of, check_no_zip, check_zarr_ending
from tilewright.pipeline.store.new.storage import AS_IT_COMES, Storage, quietly
from tilewright.pipeline.store.objects import folder_of, objects_of
from tilewright.pipeline.store.remote.opening import store_at
from tilewright.pipeline.store.remote.trouble import told_of
from tilewright.pipeline.store.sessions import Gathered, session_of
from tilewright.pipeline.transfer.files import exchange, sync_files, sync_folder, with_remedy

FILE_NAME = "tilewright-ledger.jsonl"
"""The record of finished tiles (`ledger.py`), in the folder of a growing array."""
CHECKSUMS_NAME = "tilewright-checksums.jsonl"
"""The record of a finished product (`ledger.py`), in its folder."""

MARK_NAME = "tilewright-output"
"""An empty file in the folder of a growing array, which says that it is ours: a user's own array is not replaced."""

ENDED = ".ended"
"""How the name of a folder of unfinished chunks ends while it is being removed; see `DRAFTS_NAME`."""
REMOVALS = 3
"""How often that is tried."""
NFS_REMOVED = ".nfs"
"""How NFS names a removed file that is still open."""

REPLACED_START_NBYTES = 64
"""Bytes of an output's name that begin the name under which what it replaces is set aside: 42 bytes follow, and a name
may have 255, on some file systems 143."""


@dataclass(frozen=True)
class Output:
    """Where a product goes while it is computed, and where it stands once it is whole.

    A new array on a local disk grows beside its final place, under the name with ``.partial`` appended, and is
    renamed at the end: what stands under the final name is always a finished product.
    """

    array: zarr.Array[Any]
    """What tiles are written to."""
    final: Path | None
    """The local path that the finished array gets; None when it is written in place (a URL, an open array)."""
    overwrite: bool = False
    lock: int | None = None
    """Descriptor of the growing folder, locked: no other run may write to it."""
    in_place: InPlace | None = None
    """What keeps other runs out of an array that is written in place."""
    drafts: str | None = None
    """The folder, below the growing one, in which this run alone writes chunks before they get their names. Whoever
    takes the output over removes it first: workers that a dead run left behind can neither begin nor end a chunk there,
    wherever they are and whenever they come back. None where the array is written in place."""
    gathered: Gathered | None = None
    """What tiles write where the caller's array is open in a session of icechunk, which gets it by `publish`."""
    beside: Output | None = None
    """What is written beside it, tile by tile: it is published first, and removed and released with it."""

    @property
    def whole(self) -> zarr.Array[Any]:
        """The array to read finished tiles from."""
        return self.array if self.gathered is None else self.gathered.whole

    @property
    def partial(self) -> Path | None:
        return partial_path(self.final) if self.final is not None else None

    def publish(
        self, then: Callable[[Path | None], None] = lambda final: None, *, durable: bool = True
    ) -> list[str]:
        """Put the finished array under its final name. An older one there is set aside and then removed: in one step
        where the system can, so that one of both always stands there, and else by two renames.

        ``durable`` forces its metadata and its names to disk: of its chunks the caller has done so.

        With ``overwrite``, so is what killed runs had set aside when they replaced this output. ``then`` is called with
        the final path once the new array stands there, before anything is removed.

        An array of a session gets its tiles by it. One that was written in place has its name, and ``then`` gets none.

        Returns a sentence for each thing that is left for the caller to do, such as to remove what should be gone: the
        product stands all the same.

        Raises
        ------
        OutputExistsError
            Something came to stand there in the meantime, and replacing it was not asked for; or a run of another host,
            which does not see our lock, has taken the growing array over.
        StoreError
            The folder cannot be renamed; what stood there stands there again, or the error says where it is. Or the
            array's session takes nothing any more.
        """
        if self.gathered is not None:
            return [*self._publish_beside(durable), self.gathered.publish()]
        if self.final is None or self.partial is None:
            return self._publish_beside(durable) + self._end_in_place(then, durable)
        # Listed before the growing folder is renamed: while we hold its lock, no living run is between its two renames
        # and may want back what it has set aside.
        aside = set_aside(self.final)
        check_place_free(self.final, overwrite=self.overwrite)
        if self.drafts is not None and not os.path.isdir(self.partial / self.drafts):
            raise OutputExistsError(
                f"output: another run has taken {self.partial} over, which does not see the lock of this one; let only"
                " one write there at a time"
            )
        left = []
        try:
            left += [
                f"{self.final} is whole, but holds {name}, which no reader looks at: a process of this host has a file"
                " open there"
                for name in end_drafts(self.partial)
            ]
        except OSError as error:
            left.append(f"{self.final} is whole, but half-written chunks in it cannot be removed: {error}")
        remove_drafts(self.partial)
        left += make_groups(self.final) + self._publish_beside(durable)
        if durable:
            names = (*METADATA_NAMES.values(), ".zattrs", CHECKSUMS_NAME)
            try:
                sync_files([self.partial / name for name in names], self.partial)
            except OSError as error:
                raise StoreError(
                    f"output: {self.partial} holds all of C, but cannot be forced to disk: {with_remedy(error)}"
                ) from error
        displaced = None
        try:
            if self.final.exists():
                displaced = replaced_path(self.final)
                _replace(self.partial, self.final, displaced)
            else:
                self.partial.rename(self.final)
        except BaseException as error:  # Ctrl-C between the two renames, too: nothing would stand there
            lost = ""
            if displaced is not None and not self.final.exists():
                try:
                    displaced.rename(self.final)
                except OSError as second:
                    lost = f"; what stood there is at {displaced}, and cannot be renamed back: {second}"
            if not isinstance(error, OSError):
                if lost:
                    error.add_note(lost.removeprefix("; "))
                raise
            raise StoreError(
                f"output: cannot rename {self.partial} to {self.final}: {with_remedy(error)}{lost}"
            ) from error
        if durable:
            try:
                sync_folder(self.final.parent)
            except OSError as error:
                raise StoreError(
                    f"output: {self.final} is whole, but its name cannot be forced to disk: {error}; a power cut may"
                    " take it: see that the disk is whole"
                ) from error
        try:
            (self.final / MARK_NAME).unlink(missing_ok=True)
            then(self.final)
            if durable:
                sync_folder(self.final)
        except OSError as error:
            left.append(f"{self.final} is whole, but what the run kept there cannot be removed: {error}")
        if not self.overwrite:
            return left + [
                f"{path} is an older product that a stopped run was to replace by {self.final}; it is kept: remove it"
                " once nobody needs it"
                for path in aside
            ]
        for path in [displaced, *aside]:
            if path is not None and (problem := _cannot_be_removed(path)):
                left.append(
                    f"{self.final} is replaced, but what stood there before is left at {path}: {problem}; once nothing"
                    " is in the way of that, remove it, or replace the product again, which does"
                )
        return left

    def _publish_beside(self, durable: bool) -> list[str]:
        return [] if self.beside is None else self.beside.publish(durable=durable)

    def _end_in_place(self, then: Callable[[Path | None], None], durable: bool) -> list[str]:
        """`publish` for what stands in its place already."""
        folder = folder_of(self.array)
        try:
            if durable and folder is not None:
                sync_files([folder / metadata_name(self.array)], folder)
        except OSError as error:
            raise StoreError(
                f"output: the metadata in {folder} cannot be forced to disk: {error}; see that the disk is whole"
            ) from error
        try:
            then(None)
            if (objects := objects_of(self.array)) is not None:
                objects.drop(UNFINISHED_NAME)
        except OSError as error:
            return [f"{name_of(self.array)} is whole, but what the run kept there cannot be removed: {error}"]
        return [] if self.in_place is None else self.in_place.settle()

    def remove(self) -> None:
        """Remove the growing array, unless it has its final name by now."""
        if self.lock is not None and self.partial is not None and is_locked_by(self.lock, self.partial):
            _empty(self.partial)
            self.partial.rmdir()
        if self.beside is not None:
            self.beside.remove()

    def release(self) -> None:
        """Let other runs write here again."""
        if self.lock is not None:
            unlock_folder(self.lock)
        if self.in_place is not None:
            self.in_place.release()
        if self.beside is not None:
            self.beside.release()


def partial_path(final: Path) -> Path:
    return final.with_name(final.name + ".partial")


def replaced_path(final: Path) -> Path:
    """A new name, beside an output, for what it replaces: no longer than a file's name may be, and of this output
    alone, since it holds a digest of the output's whole name."""
    return final.with_name(f"{_replaced_start(final)}{uuid.uuid4().hex[:16]}.replaced")


def set_aside(final: Path) -> list[Path]:
    """What runs that replaced this output set aside and did not remove: they were killed, or could not."""
    ours = re.compile(re.escape(_replaced_start(final)) + r"[0-9a-f]{16}\.replaced")
    try:
        with os.scandir(final.parent) as listing:
            found = [
                entry.name
                for entry in listing
                if ours.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:  # a folder that may be written and not listed
        return []
    return [final.with_name(name) for name in sorted(found)]


def _replace(growing: Path, final: Path, displaced: Path) -> None:
    """Give a finished array the name of an older one, which gets another. Raises OSError."""
    with _held(final):  # or another run might begin where it lies between the exchange and its own renaming
        mark = final / MARK_NAME
        with suppress(OSError):  # for a run that finds it under the growing name, since this one was killed
            mark.touch()
        if exchange(growing, final):
            try:
                growing.rename(displaced)
            except OSError:
                with suppress(OSError):  # what is left, the next run replaces
                    _empty(growing)
            return
        with suppress(OSError):
            mark.unlink()
    final.rename(displaced)
    growing.rename(final)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder, if none is there and it can be locked."""
    lock = None
    with suppress(OSError):  # a run that has it keeps others out as well
        lock = lock_folder(folder)
    try:
        yield
    finally:
        if lock is not None:
            unlock_folder(lock)


def _cannot_be_removed(folder: Path) -> str:
    """Remove a folder; returns why it is still there, or an empty string."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        return str(error) if os.path.lexists(folder) else ""  # else another run was quicker
    return ""


def _replaced_start(final: Path) -> str:
    name = os.fsencode(final.name)
    # For people to recognise; cut at a whole character.
    start = name[:REPLACED_START_NBYTES].decode("utf-8", "ignore")
    return f"{start}.{hashlib.blake2b(name, digest_size=8).hexdigest()}"


def is_array_folder(path: Path) -> bool:
    """Whether a local folder is a Zarr array, of format 2 or 3; a group is not one."""
    if (path / ".zarray").is_file():
        return True
    return metadata_in(path).get("node_type") == "array"


def _is_ours(names: Sequence[str]) -> bool:
    """Whether a folder with these entries is one that a run has begun. Somebody may have removed the mark."""
    return not names or not {MARK_NAME, FILE_NAME, twin_of(Path(FILE_NAME)).name}.isdisjoint(names)


def check_growing_place(final: Path) -> None:
    """Raise OutputExistsError, before any work, where something that is not ours stands where an output would grow."""
    partial = partial_path(final)
    for _ in range(2):  # an ending run removes its mark last: a listing taken meanwhile is repeated
        if partial.is_symlink():
            break
        try:
            if _is_ours(os.listdir(partial)):
                return
        except FileNotFoundError:
            return
        except OSError:
            break
    raise not_ours(partial)


def _empty(partial: Path) -> None:
    """Remove what an earlier run left in a locked folder. The folder stays: the lock is on it.

    The record of finished tiles goes first, and the mark that says the folder is ours goes last: a run that is stopped
    in between leaves nothing to go on from, and a folder that the next one knows as ours.

    Raises
    ------
    OutputExistsError
        What stands there is not ours.
    """
    if not _is_ours(os.listdir(partial)):
        raise not_ours(partial)
    end_drafts(partial)  # first: from here on, what is removed does not come back
    entries = [entry for entry in partial.iterdir() if not DRAFTS_NAME.fullmatch(entry.name)]

    def turn(entry: Path) -> tuple[bool, bool, bool]:
        return entry.name == MARK_NAME, entry.name in METADATA_NAMES.values(), entry.is_dir()

    remove_all(sorted(entries, key=turn))


def _begin_drafts(partial: Path) -> str:
    """Make a new run's folder for unfinished chunks, in a locked folder where those of all others have been ended."""
    name = new_drafts_name()
    (partial / name).mkdir()
    return name


def end_drafts(partial: Path) -> list[str]:
    """Take from all runs that wrote to a locked folder their folders of unfinished chunks. When this returns, no worker
    of theirs, on whatever host, gives a chunk its name any more.

    Each folder gets another name, so that nothing new begins in it, and then loses its files, so that nothing begun
    earlier is renamed out of it; not even by a call under way, which may have found the folder under its old name.

    Returns the names of folders that stay: NFS keeps a file that a process of this host has open, under another name.

    Raises OSError.
    """
    with os.scandir(partial) as listing:
        found = [entry.name for entry in listing if DRAFTS_NAME.fullmatch(entry.name)]
    stay = []
    for name in found:
        folder = partial / name
        if not name.endswith(ENDED):
            folder = partial / f"{name}{ENDED}"
            os.rename(partial / name, folder)
        for _ in range(REMOVALS):  # a call under way may still add a file that nobody will find
            for draft in folder.iterdir():
                if not draft.name.startswith(NFS_REMOVED):
                    draft.unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()
                break
        else:
            stay.append(folder.name)
    return stay


def remove_drafts(folder: Path) -> None:
    """Remove half-written chunks that a killed run or worker left behind; what cannot be removed stays, and no reader
    takes it for a chunk."""
    for place, _, names in os.walk(folder):  # lists each folder once; Path.rglob does it twice
        for name in names:
            if DRAFT_NAME.search(name):
                with suppress(OSError):
                    os.unlink(os.path.join(place, name))


def check_output_free(target: Source, *, overwrite: bool) -> None:
    """Fail early when the output is there already.

    Raises
    ------
    OutputExistsError
        Something stands at the target and ``overwrite`` is false; or what stands there is not ours to remove (see
        `check_place_free`).
    StoreError
        The target cannot be looked at, or names nothing.
    """
    check_source(target, "output")
    if isinstance(target, zarr.Array):
        return
    check_no_zip(target)
    if is_bare_chain(target):
        raise StoreError(
            f"output: {name_of(target)} has `::`, which is read as a chain of URLs; choose a local path without it, or"
            " give the URLs with their protocols (://)"
        )
    path = local_path(target)
    if path is not None:
        check_place_free(path, overwrite=overwrite)
    check_zarr_ending(target, "a Zarr array")
    if path is not None or overwrite:
        return
    try:
        found = zarr.open(store_at(os.fspath(target)), mode="r")
    except (FileNotFoundError, BaseZarrError):
        return check_bucket(target, "output")
    except Exception as error:  # a file system of fsspec's may raise anything
        raise StoreError(f"output: cannot open {name_of(target)}: {told_of(error)}") from error
    if not isinstance(found, zarr.Array) or not is_unfinished(objects_of(found)):
        raise exists_error(name_of(target))


def check_place_free(path: Path, *, overwrite: bool, replaces_files: bool = False) -> None:
    """Fail when something stands where a local output goes. The name as the user gave it was checked before: a Path has
    kept only the tilde of ``./~``.

    ``replaces_files``: the output is a file, which with ``overwrite`` replaces any; it is not asked about here then.

    Raises
    ------
    OutputExistsError
        Something stands there and ``overwrite`` is false; or it is true and what stands there is not ours to remove:
        anything but a Zarr array, lest a typo delete it. A link is always refused, wherever it leads: a folder cannot
        be renamed to it, and what it leads to is left alone.
    StoreError
        It cannot be looked at or written: its folder is closed to us or gone, its name is too long, or none.
    """
    absolute(path)  # raises; the checks below would take the place of a folder that is gone for free
    if path.name in ("", ".."):
        raise StoreError(
            f"output: {path} ends in no name of its own, beside which the output could grow; give the folder's name, as"
            " in ../C.zarr"
        )
    found = None
    try:
        with suppress(FileNotFoundError):
            found = path.lstat()
        if found is None:
            with suppress(FileNotFoundError):
                partial_path(path).lstat()  # it has a longer name
    except (OSError, ValueError) as error:
        raise StoreError(f"output: cannot look at {path}: {error}; choose another path") from error
    _check_parents(path)
    if found is None:
        return check_folder_of(path)
    check_no_link(path)
    if not overwrite:
        of_ours = replaces_files or is_array_folder(path)
        raise exists_error(str(path), replaceable=of_ours and path.name not in ("", ".."))
    if not is_array_folder(path):
        if not stands_at(path, found):  # another run is just replacing it
            return check_place_free(path, overwrite=overwrite)
        told = f"output: {path} is not a Zarr array, so it is not replaced; choose another path"
        raise OutputExistsError(told)
    check_folder_of(path)


def check_no_link(path: Path) -> None:
    """Raise OutputExistsError where a local output's path is a link, wherever it leads."""
    if path.is_symlink():
        raise OutputExistsError(
            f"output: {path} is a link to {path.readlink()}; name what it leads to, or choose another path"
        )


def exists_error(name: str, *, replaceable: bool = True, found: str = "") -> OutputExistsError:
    """What to raise where something stands in an output's place and is not to be replaced; replaceable: whether it
    would be if that were asked for. found: what it is, where that is known."""
    if replaceable:
        return OutputExistsError(
            f"output: {name} exists; choose another path, or ask to overwrite it (--overwrite)"
        )
    told = f", being {found}" if found else ""
    return OutputExistsError(
        f"output: {name} exists, and is nothing that would be replaced{told}; choose another path"
    )


def _check_parents(path: Path) -> None:
    """Raise StoreError where a folder that a path lies in is a link that leads nowhere: it can neither be made nor
    used."""
    for folder in path.parents:
        if folder.is_dir():
            return
        if folder.is_symlink():
            raise StoreError(
                f"output: {folder} is a link to {folder.readlink()}, and there is no such folder; create that, or"
                " choose another path"
            )


def create_output(
    target: Source,
    shape: tuple[int, ...],
    dtype: np.dtype,
    chunks: tuple[int, ...],
    *,
    compressed: bool,
    overwrite: bool,
    storage: Storage = AS_IT_COMES,
    dimension_names: Names | None = None,
    attributes: dict[str, Any] | None = None,
) -> Output:
    """Create the array that a product is written to, or check the open one that was given.

    ``compressed`` asks for Zarr's default compressor; otherwise chunks are stored plain, ready for direct reads.
    ``storage`` says otherwise, and which parts ``chunks``, the pieces that are written as one, consist of.
    ``dimension_names`` and ``attributes`` are for a new array.

    Raises
    ------
    OutputExistsError
        Another run writes there, also to an open array in a local folder; or it has finished meanwhile and replacing it
        was not asked for.
    StoreError
        The place cannot be written, also that of an open array on a local path; or an open array's session cannot be
        forked for workers.
    OutputError
        An open array of another shape or dtype, or one that is read-only.
    """
    if isinstance(target, zarr.Array):
        check_given_output(target, shape, dtype)
        if session_of(target) is not None:
            gathered = Gathered(target)
            return Output(gathered.empty, None, gathered=gathered)
        return _in_place(given_in_place(target))
    path = local_path(target)
    zarr_format = format_at(target)
    create: Callable[..., zarr.Array[Any]] = partial(
        zarr.create_array,
        shape=shape,
        dtype=dtype,
        **storage.options(chunks, dtype.itemsize, zarr_format, compressed=compressed),
        **in_format(zarr_format, dimension_names, attributes),
    )
    if path is None:
        return _in_place(create_at_url(os.fspath(target), create, overwrite))
    try:
        growing = partial_path(path)
        lock = lock_folder(growing, create=True)
        try:
            check_place_free(path, overwrite=overwrite)  # another run may have finished it since we looked
            _empty(growing)
            (growing / MARK_NAME).touch()
            array = ended(lambda: quietly(lambda: create(growing.absolute())))
            drafts = _begin_drafts(growing)
            return Output(anchored(array, str(growing)), path, overwrite, lock, drafts=drafts)
        except BaseException as error:
            with suppress(OSError):
                # After Ctrl-C the mark stays: after two of them zarr-python may still write, and without the mark no
                # run would know what it finds.
                if isinstance(error, Exception) and os.listdir(growing) == [MARK_NAME]:
                    (growing / MARK_NAME).unlink()
                growing.rmdir()  # only where it is empty
            unlock_folder(lock)
            raise
    except StoreError:
        raise
    except ContainsArrayError as error:  # it has come since the folder was emptied, under our lock
        told = f"output: another run has taken {growing} in this moment; let only one write there at a time"
        raise OutputExistsError(told) from error
    except (OSError, BaseZarrError, ValueError, ImportError) as error:
        told = with_remedy(error) if isinstance(error, OSError) else str(error)
        raise StoreError(f"output: cannot create {name_of(target)}: {told}") from error


@contextmanager
def growing_folder(final: Path, keeps: Callable[[Path], bool]) -> Iterator[Path]:
    """The folder beside an output's path in which a product grows, ours and locked. What stopped runs left in it is
    removed unless ``keeps`` says of the folder that it is to stay; unfinished chunks are in either case.

    Raises
    ------
    OutputExistsError
        A run writes there, or what stands there is not ours.
    StoreError
        The place cannot be written.
    """
    growing = partial_path(final)
    try:
        lock = lock_folder(growing, create=True)
        try:
            if not _is_ours(os.listdir(growing)):
                raise not_ours(growing)
            if keeps(growing):
                end_drafts(growing)
                remove_drafts(growing)
            else:
                _empty(growing)
                (growing / MARK_NAME).touch()
            yield growing
        finally:
            unlock_folder(lock)
    except (StoreError, OutputExistsError):
        raise
    except OSError as error:
        raise StoreError(f"output: cannot write to {growing}: {with_remedy(error)}") from error


def remove_growing(final: Path) -> None:
    """Remove what grows beside an output's path, of which nothing is to be kept; what cannot be removed stays, for the
    next run to replace."""
    growing = partial_path(final)
    with suppress(OSError, OutputExistsError):
        lock = lock_folder(growing)
        try:
            _empty(growing)
            growing.rmdir()
        finally:
            unlock_folder(lock)


def is_leftover(below: Path) -> bool:
    """Whether a file, by its path below an output's folder, is what a stopped run or a removal left there."""
    return (
        DRAFTS_NAME.fullmatch(below.parts[0]) is not None
        or DRAFT_NAME.search(below.name) is not None
        or below.name.startswith(NFS_REMOVED)
    )


def resume_output(path: Path, overwrite: bool) -> Output | None:
    """The growing array of a stopped run, cleared of half-written chunks; None where it is gone, or is no array.

    Raises
    ------
    OutputExistsError
        A run still writes there.
    StoreError
        The place cannot be read now, or not be written: for None what is finished there would be removed.
    """
    partial = partial_path(path)
    try:
        lock = lock_folder(partial)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except StoreError:
        raise
    except OSError as error:
        raise _cannot_go_on(partial, error) from error
    try:
        array = open_growing(path, mode="r+")
        if array is not None:
            try:
                (partial / MARK_NAME).touch()
                end_drafts(partial)
                drafts = _begin_drafts(partial)
            except OSError as error:
                raise _cannot_go_on(partial, error) from error
            remove_drafts(partial)
            return Output(array, path, overwrite, lock, drafts=drafts)
    except BaseException:  # Ctrl-C too: this process may live on, and would keep the lock
        unlock_folder(lock)
        raise
    unlock_folder(lock)
    return None


def open_growing(path: Path, *, mode: Literal["r", "r+"]) -> zarr.Array[Any] | None:
    """The array of a stopped run that grows beside a local output's path; None where it is gone, or is no array.

    Raises StoreError where the place cannot be read now.
    """
    partial = partial_path(path)
    try:
        return anchored(zarr.open_array(partial.absolute(), mode=mode), str(partial))
    except (FileNotFoundError, NotADirectoryError, *UNREADABLE):
        return None
    except OSError as error:
        raise _cannot_go_on(partial, error) from error


def lacks_mark(final: Path) -> bool:
    """Whether somebody has removed the mark of a growing array."""
    partial = partial_path(final)
    return partial.is_dir() and not (partial / MARK_NAME).exists()


def holds_tiles(final: Path) -> bool:
    """Whether there is anything in the folder of a growing array but what a run begins it with."""
    own = {MARK_NAME, CHECKSUMS_NAME, *METADATA_NAMES.values(), ".zattrs"}
    try:
        names = os.listdir(partial_path(final))
    except OSError:
        return False
    return any(name not in own and not DRAFTS_NAME.fullmatch(name) for name in names)


def _cannot_go_on(partial: Path, error: OSError) -> StoreError:
    return StoreError(
        f"output: cannot go on at {partial}: {error}; its finished tiles are kept: let this process read and write"
        " there and run it again, or start over with --no-resume (resume=False)"
    )


def resume_output_in_place(target: Source) -> Output | None:
    """The array of a stopped run that was written in place; None where it is gone. Raises as `create_output`."""
    found = resume_in_place(target)
    return None if found is None else _in_place(found)


def _in_place(found: InPlace) -> Output:
    """What is left of an older product there is no more to be read. Raises StoreError."""
    output = Output(found.array, None, in_place=found)
    try:
        _end_record(found.array)
    except BaseException:
        output.release()
        raise
    return output


def _end_record(array: zarr.Array[Any]) -> None:
    """Remove the checksums of a product whose open array is about to be written in place. Raises StoreError."""
    folder = folder_of(array)
    if folder is None:
        if (objects := objects_of(array)) is not None:
            objects.delete(CHECKSUMS_NAME)
        return
    path = folder / CHECKSUMS_NAME
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"output: {path}, with the checksums of what stands there, cannot be removed: {error}; an audit would take"
            " the new C for damaged: give C an array that this process may write to"
        ) from error
