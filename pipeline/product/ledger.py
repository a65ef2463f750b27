"""The record of finished tiles, with which a run that was stopped resumes where it stood.

A file beside the growing output holds one line of JSON for what is being computed, one for each stored tile, and one
for each stored tile that proved damaged. Only the submitting process appends to it, after a tile's task has returned,
so a crash of a process never leaves a line ahead of the data; it loses at most the line of a tile that is stored
already, which is then computed again with the same bytes. A crash of the machine that stores C can leave a line ahead
of the data: lines are forced to disk, chunks are not. So a line holds the bytes that its tile's chunks took up, by
which chunks that are missing, truncated or empty are noticed, as most are after a power cut. Damage that keeps the
length goes unnoticed until somebody reads the chunk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import zarr

from tilewright import __version__
from tilewright.kernels.passes.contents import NOTHING, Contents
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.plan.inputs import Geometry
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.plan.told import NOTHING_FOUND, Found
from tilewright.pipeline.store.origin import origin_of

FILE_NAME = "tilewright-ledger.jsonl"
VERSION = 5
"""A record of another version is ignored: the run starts anew."""


class Stored(NamedTuple):
    """What the record says of a finished tile."""

    nbytes: int
    """Of its chunks."""
    found: Found = NOTHING_FOUND


@dataclass(frozen=True)
class Past:
    """What an earlier run left."""

    geometry: Geometry
    """What a plan must keep to resume."""
    c_unit: tuple[int, int]
    """Sides of the stored pieces of C, of which each tile holds whole ones."""
    finished: Mapping[int, Stored]
    """By each finished tile's index."""


@dataclass(frozen=True)
class Fingerprint:
    """What two runs of the same product have in common."""

    digest: str
    """Of what tiles of one C must share: the inputs as stored, the request, which names the kind of device, and the
    version of Tilewright, whose releases may sum in other orders. The plan's geometry is compared beside it.

    Sums of floats may differ in their last bits by what is not in it: the model of GPU, the threads and the build of
    BLAS, the versions of the driver and of other packages. A run may go on elsewhere, and its result is no less right.
    """
    inputs: tuple[str, str]
    """Digests of A and of B as stored."""


def fingerprint(a: zarr.Array[Any], b: zarr.Array[Any], plan_facts: dict[str, Any]) -> Fingerprint:
    """The fingerprint of a product: of both inputs, as `input_lines` gives them, of the request, and of the
    version of Tilewright.

    Raises
    ------
    StoreError
        A file or folder of an input cannot be inspected.
    """
    digest = hashlib.sha256(json.dumps([__version__, plan_facts], sort_keys=True).encode())
    inputs = []
    for array in (a, b):
        alone = hashlib.sha256()
        for line in input_lines(array):
            digest.update(line)
            alone.update(line)
        inputs.append(alone.hexdigest())
    return Fingerprint(digest.hexdigest(), (inputs[0], inputs[1]))


def changed_inputs(before: Fingerprint, a: zarr.Array[Any], b: zarr.Array[Any]) -> list[str]:
    """``A``, ``B``, both or none: the inputs that are not as they were. Raises as `fingerprint`."""
    after = fingerprint(a, b, {}).inputs
    return [role for role, old, new in zip("AB", before.inputs, after, strict=True) if old != new]


def input_digest(array: zarr.Array[Any]) -> str:
    """What tells an input that was written to during a run that keeps nothing: of `input_lines` with the times of the
    files' status. Raises as `fingerprint`."""
    digest = hashlib.sha256()
    for line in input_lines(array, status=True):
        digest.update(line)
    return digest.hexdigest()


def input_lines(array: zarr.Array[Any], *, status: bool = False) -> Iterator[bytes]:
    """What says that an input is what it was.

    That is where it comes from (`origin.py`) and its metadata; for local arrays, however they were opened, also the
    name, size and time of every stored file, or the size and time of the archive that they lie in. Of remote ones no
    more, since listing them can take longer than the product. ``status``: also the time at which each file's status
    last changed, which tells a rewrite after which the other time was put back (`transfer/files.py`).
    """
    origin = origin_of(array)
    yield json.dumps(origin.place, sort_keys=True, default=repr).encode()
    yield json.dumps(array.metadata.to_dict(), sort_keys=True, default=str).encode()
    if origin.folder is not None:
        for line in _stored_files(origin.folder, status):
            yield os.fsencode(line)  # file names may hold bytes that are not UTF-8
    elif origin.file is not None:
        try:
            facts = os.stat(origin.file)
        except OSError as error:
            raise _not_looked_at(origin.file, error) from error
        yield _size_and_times(facts, status).encode()


def _size_and_times(facts: os.stat_result, status: bool) -> str:
    return f"{facts.st_size} {facts.st_mtime_ns}" + (f" {facts.st_ctime_ns}" if status else "")


def _stored_files(root: str, status: bool = False) -> Iterator[str]:
    """A line for everything below ``root``, in a fixed order: name, size and nanoseconds since the epoch of each file,
    or what else is there. Links are followed.

    A replaced file is recognised by its modification time, even an older one; so are files that swap names. Inode
    numbers would add little, and on some network file systems they differ between hosts or change after a restart; the
    time of the last status change changes with a backup that makes hard links. Either would discard finished tiles for
    nothing. Where there are none, ``status`` adds that time.

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
            try:
                if entry.is_dir():
                    # A folder that links lead to is listed once: links may form a cycle.
                    first = (
                        followed.setdefault(os.path.realpath(entry.path), name)
                        if entry.is_symlink()
                        else name
                    )
                    yield f"{name}\0folder {first}\n"
                    if first == name:
                        waiting.append(name)
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


class Ledger:
    """The open record of one run; ``record`` is durable when it returns."""

    def __init__(
        self, folder: Path, digest: str, plan: MatmulPlan, finished: Mapping[int, Stored] | None = None
    ) -> None:
        """Begin the record in the output's folder, with the tiles that an earlier run finished, as in ``Past``.

        The whole record is rewritten and put in place in one step: a line appended after one that a crash tore would be
        lost with it.
        """
        self._path = folder / FILE_NAME
        head = {
            "version": VERSION,
            "fingerprint": digest,
            "tile": [plan.tile_rows, plan.tile_columns],
            "panel_depth": plan.panel_depth,
            "k_parts": plan.k_parts,
            "cell": [plan.cell_rows, plan.cell_columns],
            "c_unit": list(plan.c_unit),
        }
        lines = [
            json.dumps(head),
            *(_line(index, stored) for index, stored in sorted((finished or {}).items())),
        ]
        draft = self._path.with_suffix(".draft")
        with self._writing():
            draft.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            draft.replace(self._path)
            # Unbuffered, so that a line which could not be written leaves nothing for closing to write.
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 -- lives as long as the run; see close

    def record(self, index: int, nbytes: int, found: Found = NOTHING_FOUND) -> None:
        """Note that the tile of this index is stored, in chunks of ``nbytes`` together, and what was found on the way.
        Raises StoreError if the disk is full or refuses the write."""
        self._append(_line(index, Stored(nbytes, found)))

    def withdraw(self, index: int) -> None:
        """Note that what is stored of this tile is invalid, so that a resumed run computes it again. Raises as
        ``record``."""
        self._append(json.dumps({"withdrawn": index}))

    def _append(self, text: str) -> None:
        line = f"{text}\n".encode()
        with self._writing():
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"output: cannot write the record of finished tiles, {self._path}: {error}"
            ) from error

    def close(self) -> None:
        self._file.close()

    def remove(self, folder: Path) -> None:
        """Delete the record, which is no longer needed or not to be trusted; ``folder`` is where the output is by
        now."""
        self.close()
        (folder / FILE_NAME).unlink(missing_ok=True)


def _line(index: int, stored: Stored) -> str:
    line: dict[str, Any] = {"tile": index, "nbytes": stored.nbytes}
    if stored.found != NOTHING_FOUND:
        line["found"] = [
            list(astuple(contents)) for contents in (stored.found.a, stored.found.b, stored.found.c)
        ]
    return json.dumps(line)


def _stored(entry: dict[str, Any]) -> Stored:
    """What a line says of its tile. Raises TypeError or ValueError for what no line says."""
    told = [Contents(*contents) for contents in entry.get("found", ())] or [NOTHING] * 3
    for contents in told:
        extent = contents.least, contents.most
        counts = contents.nan, contents.infinite, contents.masked
        if not all(number is None or _is_whole(number) for number in extent) or not all(
            map(_is_count, counts)
        ):
            raise ValueError(f"{contents} is no record of what a tile holds")
    if not _is_count(entry["nbytes"]):
        raise ValueError(f"{entry['nbytes']!r} is no number of bytes")
    return Stored(entry["nbytes"], Found(*told))


def _is_whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def _is_count(number: Any) -> bool:
    return _is_whole(number) and number >= 0


def read_past(folder: Path, digest: str) -> Past | None:
    """What the record in ``folder`` says, if it is about the same product; None otherwise, or if it is damaged.

    A torn last line, left by a crash in the middle of a write, is ignored: its tile is computed again. So is a line
    without its tile's bytes, since the stored chunks could not be compared with it.

    Raises
    ------
    StoreError
        There is a record, or may be one, and it cannot be read now: for None all tiles would be removed.
    """
    path = folder / FILE_NAME
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return None
    except OSError as error:
        raise StoreError(
            f"output: cannot read the record of finished tiles, {path}: {error.strerror or error}; nothing was removed:"
            " let this process read it and run it again, or start over with --no-resume (resume=False)"
        ) from error
    entries = []
    for line in lines:
        try:
            entries.append(json.loads(line))
        except (ValueError, RecursionError):  # not JSON; or more digits or brackets than Python reads
            break
    try:
        head, *rest = entries
        if head["version"] != VERSION or head["fingerprint"] != digest:
            return None
        (rows, columns), (unit_rows, unit_columns), (cell_rows, cell_columns) = (
            head[name] for name in ("tile", "c_unit", "cell")
        )
        finished: dict[int, Stored] = {}
        for entry in rest:
            if "withdrawn" in entry:
                finished.pop(entry["withdrawn"], None)
            elif "nbytes" in entry or "tile" not in entry:
                finished[entry["tile"]] = _stored(entry)
        past = Past(
            Geometry(rows, columns, head["panel_depth"], head["k_parts"], cell_rows, cell_columns),
            (unit_rows, unit_columns),
            finished,
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    positive = all(isinstance(number, int) and number > 0 for number in past.geometry + past.c_unit)
    return past if positive and all(map(_is_count, past.finished)) else None
