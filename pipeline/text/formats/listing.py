"""What of a folder is to be counted, and how a file that is listed is opened."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

from tilewright.kernels.numbers import counted
from tilewright.pipeline import config
from tilewright.pipeline.errors import CorpusError
from tilewright.pipeline.store.remote import files as remote_files
from tilewright.pipeline.store.remote.facts import Facts
from tilewright.pipeline.store.remote.files import RemoteFile
from tilewright.pipeline.text.formats.outputs import (
    ENDINGS,
    ENDINGS_AT_URLS,
    METADATA_NBYTES,
    OUR_MARKS,
    is_our_array,
    is_our_file,
    nbytes_of_head,
)
from tilewright.pipeline.text.formats.reading import Reading, is_hidden, relative_name
from tilewright.pipeline.text.formats.recognition import (
    CONTAINERS,
    HEAD_NBYTES,
    JSON_LINES,
    TAR,
    WARC,
    ZIP,
    codec_named,
    recognised,
    unopened,
    without_codec,
)
from tilewright.pipeline.transfer.files import open_anything

TEXT = "text"
"""The codec of a document that is not compressed, as far as is known, and not counted as it is."""

SNIFFED_NBYTES = 2**18
"""Files of so many bytes are opened when they are listed, since what they are decides how they are cut. Smaller ones
are looked at when they are read."""

ITS_TEXTS = ": name a field (--field) to count its texts"
COLUMN_TEXTS = ": name a column (--field) to count its texts"
"""How the notices end of files that have fields, of which none was named."""
NAMED = 3
"""The most documents that a notice names."""

HeadOf = Callable[[str, int], bytes]
"""Gives so many of the first bytes of a file, by its name."""


@dataclass
class LeftOut:
    """How much below the folders of a corpus is not counted."""

    hidden: int = 0
    outputs: int = 0
    unwanted: int = 0
    unwanted_folders: int = 0
    broken: int = 0
    """Links to nowhere."""
    gone: int = 0
    """Files that a folder no longer had when they were looked at."""
    unlisted: list[tuple[str, str]] = field(default_factory=list)
    """Folders that could not be listed and files that could not be looked at, and why."""

    def passes(self, name: str, error: Exception, reading: Reading) -> bool:
        """Whether the rest is counted without a file found below a folder that could not be looked at: a link to
        nowhere, one that is gone, as a program's temporary files are, or any where bad files are left out."""
        if os.path.islink(name):
            self.broken += 1
        elif isinstance(error, FileNotFoundError):
            self.gone += 1
        elif reading.leaves_out:
            self.unlisted.append(
                (name, f"cannot look at {name}: {getattr(error, 'strerror', None) or error}")
            )
        else:
            return False
        return True

    def choose(
        self,
        here: str,
        folders: list[str],
        files: list[str],
        top: str,
        reading: Reading,
        head: HeadOf | None = None,
    ) -> None:
        """Take out of the names of a folder what is not to be counted. top: the folder that the user named. head: for
        files that are no local ones."""
        is_local, head = head is None, head or head_of
        if here != top and any(mark in files for mark in OUR_MARKS):
            self.outputs += 1
            folders.clear()
            files.clear()
            return
        kept = [name for name in folders if not is_hidden(name)]
        self.hidden += len(folders) - len(kept)
        if reading.exclude:
            wanted = [
                name
                for name in kept
                if not reading.takes_none_of(relative_name(os.path.join(here, name), top))
            ]
            self.unwanted_folders += len(kept) - len(wanted)
            kept = wanted
        outputs = [
            name
            for name in kept
            if name.endswith(".zarr")
            and is_our_array(head(os.path.join(here, name, "zarr.json"), METADATA_NBYTES))
        ]
        self.outputs += len(outputs)
        folders[:] = [name for name in kept if name not in outputs]
        kept = [name for name in files if not is_hidden(name)]
        self.hidden += len(files) - len(kept)
        if reading.include or reading.exclude:
            wanted = [name for name in kept if reading.takes(relative_name(os.path.join(here, name), top))]
            self.unwanted += len(kept) - len(wanted)
            kept = wanted
        outputs = [
            name
            for name in kept
            if name.endswith(ENDINGS) and is_our_file(os.path.join(here, name), head, is_local=is_local)
        ]
        self.outputs += len(outputs)
        files[:] = [name for name in kept if name not in outputs] if outputs else kept

    def notes(self) -> list[str]:
        return [
            f"{count} {one if count == 1 else several} {what}"
            for count, one, several, what in (
                (
                    self.hidden,
                    "hidden file or folder",
                    "hidden files or folders",
                    "not counted; name one to count it",
                ),
                (
                    self.outputs,
                    "earlier output",
                    "earlier outputs",
                    "of Tilewright not counted; name one to count it",
                ),
                (self.unwanted, "file", "files", "left out by include and exclude"),
                (self.gone, "file", "files", "gone again when their folder had been listed"),
                (self.unwanted_folders, "folder", "folders", "left out by exclude"),
            )
            if count
        ]


def codec_of(
    name: str,
    nbytes: int,
    reading: Reading,
    told: dict[str, list[str]],
    looked_at: int,
    head_at: HeadOf | None = None,
) -> str | None:
    """`Document.codec` of a file. told: gets the names of files that are counted as they are stored although they look
    like something else. looked_at: `least_looked_at`. head_at: for a file that is no local one."""
    codec = codec_named(name)
    if _has_json_lines(name) and not (reading.fields or reading.split_on):
        told.setdefault(f"JSON lines, counted with all that stands in them{ITS_TEXTS}", []).append(name)
    if nbytes >= looked_at and codec is None:
        head = (head_at or head_of)(name, HEAD_NBYTES)
        form = recognised(head, name)
        # Without a field, tables are bytes like any others, and may be cut.
        if form is not None and (reading.fields or form not in CONTAINERS or form in (TAR, WARC, ZIP)):
            codec = form
        else:
            what = CONTAINERS[form] if form is not None else unopened(head)
            if what is not None and reading.as_stored:
                column = COLUMN_TEXTS if form is not None else ""
                told.setdefault(f"like {what}, counted as stored bytes{column}", []).append(name)
    return codec if codec is not None or reading.as_stored else TEXT


def _has_json_lines(name: str) -> bool:
    """Whether a name says that; a look at most names is short, since there may be a million."""
    return "json" in name and without_codec(name).lower().endswith(JSON_LINES)


def least_looked_at() -> int:
    """Of how many bytes the files are at least whose first bytes are looked at when they are listed, unless their names
    say what they are."""
    return min(SNIFFED_NBYTES, config.get("piece-nbytes"))


def listed_at(
    url: str, reading: Reading, left_out: LeftOut, told: dict[str, list[str]]
) -> tuple[bool, list[tuple[str, Facts, str | None]]]:
    """Whether a URL names a folder; and the URL, the facts and the `Document.codec` of the file there, or of each that
    is to be counted below it, in the order in which files below a local folder are listed. Raises UrlError."""
    is_folder, found = remote_files.find(url)
    heads: dict[str, bytes] = {}

    def look(names: Iterable[str], nbytes_of: Callable[[str], int] = lambda name: HEAD_NBYTES) -> None:
        """Ask for several at once."""
        new = [RemoteFile(name, found[name]) for name in names if name not in heads]
        for nbytes, some in groupby(
            sorted(new, key=lambda file: nbytes_of(file.url)), lambda file: nbytes_of(file.url)
        ):
            alike = list(some)
            heads.update(zip((file.url for file in alike), remote_files.heads(alike, nbytes), strict=True))

    def head(name: str, nbytes: int) -> bytes:
        if name not in found:
            return b""
        if name not in heads or len(heads[name]) < min(nbytes, found[name].nbytes):
            (heads[name],) = remote_files.heads([RemoteFile(name, found[name])], nbytes)
        return heads[name]

    if is_folder:
        top = url.rstrip("/")
        look(
            (
                name
                for name in found
                if name.endswith(ENDINGS_AT_URLS) and reading.takes(relative_name(name, top))
            ),
            nbytes_of_head,
        )
        names = _chosen_below(top, list(found), reading, left_out, head)
    else:
        names = list(found) if reading.takes(url, named=True) else []
        left_out.unwanted += not names
    looked_at = least_looked_at()
    if not reading.raw:
        look(name for name in names if found[name].nbytes >= looked_at and codec_named(name) is None)
    return is_folder, [
        (
            name,
            found[name],
            None if reading.raw else codec_of(name, found[name].nbytes, reading, told, looked_at, head),
        )
        for name in names
    ]


def _chosen_below(
    top: str, names: Sequence[str], reading: Reading, left_out: LeftOut, head: HeadOf
) -> list[str]:
    """Those of the URLs below a folder that are to be counted, folder by folder as `os.walk` goes."""
    folders: dict[str, dict[str, None]] = {top: {}}
    inside: dict[str, list[str]] = {top: []}
    for name in names:
        *above, last = name.removeprefix(top + "/").split("/")
        here = top
        for part in above:
            folders[here][part] = None
            here = f"{here}/{part}"
            folders.setdefault(here, {})
            inside.setdefault(here, [])
        inside[here].append(last)
    found: list[str] = []
    waiting = [top]
    while waiting:
        here = waiting.pop()
        below, here_files = list(folders[here]), inside[here]
        left_out.choose(here, below, here_files, top, reading, head)
        found += [f"{here}/{name}" for name in here_files]
        waiting += [f"{here}/{name}" for name in below]
    return sorted(found, key=lambda name: name.split("/"))


def head_of(path: str, nbytes: int = HEAD_NBYTES) -> bytes:
    """A file's first bytes; none of one that cannot be read, which is told of when it is counted."""
    try:
        descriptor = open_anything(path)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, nbytes, 0)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def with_separator(folder: str) -> str:
    """What the names of a folder's entries stand behind."""
    return folder if not folder or folder.endswith(os.sep) else folder + os.sep


def below(folder: str, reading: Reading, left_out: LeftOut) -> Iterator[tuple[str, Sequence[str], int]]:
    """What is to be counted below a folder, sorted by path: folders, names there that follow one another, and how many
    links to folders the folder has, once. No more is held than the entries of the folders that are under way."""

    def entries(here: str) -> tuple[list[list[str] | str], int]:
        """Names of files that follow one another, and the folders to go into, the last first; and how many links to
        folders there are."""
        folders: list[str] = []
        files: list[str] = []
        linked: set[str] = set()
        try:
            with os.scandir(here) as found:
                for entry in found:
                    if not _is_folder(entry):
                        files.append(entry.name)
                        continue
                    folders.append(entry.name)
                    if entry.is_symlink():
                        linked.add(entry.name)
        except OSError as error:
            why = (
                f"cannot list the folder {error.filename}: {error.strerror}; make it one that this process can list, or"
                " leave it out (--exclude FOLDER/, --on-error report)"
            )
            if not reading.leaves_out:
                raise CorpusError(why) from error
            left_out.unlisted.append((here, why))
            return [], 0
        left_out.choose(here, folders, files, folder, reading)
        below = {name for name in folders if name not in linked}
        runs: list[list[str] | str] = []
        for is_below, run in groupby(sorted([*files, *below]), below.__contains__):
            names = list(run)
            runs += names if is_below else [names]
        return runs[::-1], len(folders) - len(below)

    runs, links = entries(folder)
    yield folder, [], links
    under_way = [(folder, runs)]
    while under_way:
        here, runs = under_way[-1]
        if not runs:
            under_way.pop()
        elif isinstance(run := runs.pop(), str):
            below = os.path.join(here, run)
            runs, links = entries(below)
            yield below, [], links
            under_way.append((below, runs))
        else:
            yield here, run, 0


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


@contextmanager
def without_collections() -> Iterator[None]:
    """Have Python not look for cycles of objects: while a million documents are made, none of which is in one, it would
    look through all of them again and again, for half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def names_of(names: Sequence[str]) -> str:
    """Some names, and how many others there are."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {counted(more, 'other')}" if more > 0 else "")


def of_pattern(name: str) -> str:
    """What to do where nothing is found by a name that looks like a pattern; empty for others."""
    if not re.search(r"[*?\[]", name):
        return ""
    if "://" in name:
        return "in URLs there are no patterns: name the folder, and the pattern by include (--include)"
    return (
        "patterns are the shell's, which found no such file, or was kept from it by quotation marks: leave these out,"
        " or name the folder, and the pattern by include (--include)"
    )
