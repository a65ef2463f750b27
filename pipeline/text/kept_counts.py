"""Counts of pieces that earlier runs finished, as a folder keeps them, and what of a corpus they leave to count.

An entry of the record (`pipeline/records.py`) is a piece: its documents' names, sizes and times, its range, its counts,
and the fingerprints of what was read. It holds whatever the settings were, and however later runs cut the rest: ranges
that no kept piece covers are cut anew. Nothing is taken out of a record. What is of documents that went away, or that
changed, is passed over, and of several entries about the same bytes the last counts.
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tilewright.kernels.histograms.token_kinds import TokenKind
from tilewright.kernels.histograms.token_lists import Tokens
from tilewright.kernels.histograms.tokens import Kind
from tilewright.kernels.numbers import counted
from tilewright.pipeline.errors import OptionError, OutputExistsError, StoreError
from tilewright.pipeline.events import Listener, Notice
from tilewright.pipeline.records import (
    Line,
    Record,
    open_record,
    packed,
    packed_bytes,
    remove_record,
    unpacked,
    unpacked_bytes,
)
from tilewright.pipeline.text.blocks import with_margins
from tilewright.pipeline.text.corpus import Corpus, Document, Piece
from tilewright.pipeline.text.documents import Counts, facts_from
from tilewright.pipeline.text.fingerprints import covers
from tilewright.pipeline.text.formats.listing import names_of
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.formats.recognition import named_for_objects, said_by, without_codec

FILE_NAME = "tilewright-counts.jsonl"


@dataclass(frozen=True)
class State:
    """Where finished pieces are kept."""

    folder: Path
    resume: bool = True
    """Whether to go on from what it holds."""
    temporary: bool = False
    """Whether it belongs to an output: then pieces of another kind are left by a run that was to write other counts
    there, and are forgotten, and the folder is removed where nothing is worth keeping."""

    @property
    def path(self) -> Path:
        return self.folder / FILE_NAME

    @property
    def apart(self) -> Path | None:
        """The folder, to be left out where it lies in the corpus, if it is one of ours by now."""
        return self.folder if os.path.exists(self.path) else None

    def remove(self) -> None:
        """Delete what was kept, unless another run goes on from it by now."""
        remove_record(self.path)
        try:
            self.folder.rmdir()
        except OSError:  # something else is in it
            return


def state_of_output(out: Path, *, resume: bool = True) -> State:
    """Where a count keeps its pieces until ``out`` is written."""
    return State(out.with_name(out.name + ".pieces"), resume, temporary=True)


@contextmanager
def open_counts(
    state: State | None, kind: Kind | TokenKind, *, per_document: bool, reading: Reading, listener: Listener
) -> Iterator[Record | None]:
    """The record of a count, for as long as the block runs; None where none is to be kept. The listener is told what a
    count that fails leaves there.

    Raises
    ------
    OptionError
        The folder keeps counts of another kind, or the place is no folder of ours.
    OutputExistsError
        Another run has it open.
    StoreError
        It cannot be made, read or written.
    """
    if state is None:
        yield None
        return
    head = _head(kind, per_document, reading)
    _make(state)
    _check_patterns(state, head)
    resume = state.resume
    if resume and state.temporary:
        try:
            with open_record(state.path, head):
                pass
        except OptionError:
            resume = False
        except StoreError as error:
            if isinstance(error, OutputExistsError):
                raise
            resume = False  # damaged
    try:
        with open_record(state.path, head, resume=resume) as record:
            try:
                yield record
            except Exception:
                if _has_entries(state.path):
                    listener(
                        Notice(
                            f"what was counted is kept in {state.folder}; the same count goes on from there"
                        )
                    )
                raise
    finally:
        if state.temporary and not _has_entries(state.path):
            state.remove()


@contextmanager
def kept_counts(
    state: State | None, kind: Kind | TokenKind, *, per_document: bool, reading: Reading
) -> Iterator[Record | None]:
    """The record that `open_counts` would go on from, for a plan: nothing is made, and nothing forgotten. None where
    there would be a new one. Raises as that."""
    if state is None:
        yield None
        return
    if not os.path.lexists(state.folder):
        if not state.folder.parent.is_dir():
            raise _no_folder_for(state)
        if not os.access(state.folder.parent, os.W_OK):
            raise StoreError(
                f"state: the folder {state.folder.parent} is read-only; choose another place, or make it writable"
            )
        yield None
        return
    _check_is_ours(state)
    if not state.resume or not _has_lines(state.path):
        yield None
        return
    _check_patterns(state, _head(kind, per_document, reading))
    with ExitStack() as stack:
        try:
            opened = open_record(state.path, _head(kind, per_document, reading))
            record = stack.enter_context(opened)
        except (OptionError, StoreError) as error:
            if not state.temporary or isinstance(error, OutputExistsError):
                raise
            yield None  # of other counts, or damaged: it is forgotten
            return
        yield record


def _head(kind: Kind | TokenKind, per_document: bool, reading: Reading) -> dict[str, Any]:
    """What a record says that it is of."""
    head: dict[str, Any] = {
        "work": "histogram",
        "by": kind.name,
        "per_document": per_document,
        "raw": reading.raw,
        "reading": reading.facts(),
    }
    return head | kind.options if isinstance(kind, TokenKind) else head


def _check_patterns(state: State, head: dict[str, Any]) -> None:
    """Raise OptionError where a state is of the same counts but for include and exclude, which the user takes for a
    choice of files: it is one of an archive's members, too, whose counts are kept together."""
    if not state.resume or state.temporary:
        return
    try:
        with state.path.open("rb") as file:
            kept = json.loads(file.readline())
        there, here = dict(kept["reading"]), dict(head["reading"])
    except (OSError, ValueError, TypeError, KeyError):
        return  # who opens the record says what is wrong with it
    patterns = {name: (there.pop(name, []), here.pop(name, [])) for name in ("include", "exclude")}
    differ = [name for name, (before, now) in patterns.items() if before != now]
    if differ and there == here and all(kept.get(name) == head[name] for name in head if name != "reading"):
        said = ", ".join(
            f"{name} was {' '.join(before) or 'not given'} and is {' '.join(now) or 'not given'}"
            for name, (before, now) in patterns.items()
            if name in differ
        )
        raise OptionError(
            f"state: {state.folder} keeps counts by other patterns: {said}. They also choose members of archives, of"
            " which one count is kept, so that it would hold others; give the same patterns, and name other files or"
            " folders instead (what is not named is left out, and its counts are kept), or give another folder"
        )


def _has_lines(path: Path) -> bool:
    """Whether a record has a whole line; a run that was killed before it had is begun anew."""
    try:
        with path.open("rb") as file:
            return file.readline().endswith(b"\n")
    except OSError:
        return False


def _has_entries(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.readline()
            return bool(file.read(1))
    except OSError:
        return False


def _make(state: State) -> None:
    try:
        state.folder.mkdir(exist_ok=True)
    except FileNotFoundError as error:
        raise _no_folder_for(state) from error
    except FileExistsError as error:
        raise _no_folder(state) from error
    except (OSError, ValueError) as error:
        raise _cannot_make(state, error) from error
    _check_is_ours(state)


def _check_is_ours(state: State) -> None:
    """Raise OptionError where the place of a state is taken by something else."""
    try:
        others = not state.path.exists() and any(state.folder.iterdir())
    except (NotADirectoryError, FileNotFoundError) as error:  # a file, or a link to nowhere
        raise _no_folder(state) from error
    except (OSError, ValueError) as error:
        raise _cannot_make(state, error) from error
    if others:
        raise OptionError(
            f"state: {state.folder} holds other things, and no counts; give a new folder, or an empty one"
        )


def _no_folder_for(state: State) -> StoreError:
    return StoreError(f"state: there is no folder {state.folder.parent}; create it, or choose another place")


def _no_folder(state: State) -> OptionError:
    return OptionError(
        f"state: {state.folder} is no folder; finished pieces are kept in one, so give another"
    )


def _cannot_make(state: State, error: Exception) -> StoreError:
    reason = error.strerror if isinstance(error, OSError) else error
    return StoreError(f"state: cannot make the folder {state.folder}: {reason}; choose another place")


class Kept(NamedTuple):
    """A piece of an earlier run, but for its counts, which stay in the file."""

    line: Line
    names: list[str]
    paths: list[str]
    codecs: list[str | None]
    facts: np.ndarray
    """int64[(documents, 3)]: size, time of the last modification, and of the last change of status."""
    start: int
    stop: int
    prints: np.ndarray
    leaves_out: bool
    """Whether lines that cannot be read were left out of it."""

    @property
    def is_part(self) -> bool:
        return len(self.names) == 1 and self.stop - self.start < int(self.facts[0, 0])


def entry_of(
    piece: Piece,
    changed_ns: Sequence[int],
    part: Counts,
) -> dict[str, Any]:
    """The entry of a finished piece. changed_ns: when the status of each of its documents last changed."""
    documents = piece.documents
    facts = np.array(
        [
            (each.nbytes, each.modified_ns, changed)
            for each, changed in zip(documents, changed_ns, strict=True)
        ],
        np.int64,
    )
    entry = {
        "documents": len(documents),
        "names": _packed_texts([document.name for document in documents]),
        "paths": _packed_texts([document.path for document in documents]),
        "codecs": _packed_texts([document.codec or "" for document in documents]),
        "facts": packed(facts.T.reshape(-1)),
        "start": piece.start,
        "stop": piece.stop,
        "nbytes": part.nbytes,
        "cells": packed(np.diff(part.cells, prepend=0)),
        "values": packed(part.values),
        "prints": packed(part.prints.T.reshape(-1)),
        **part.facts(),
    }
    if part.tokens is not None:
        entry |= {
            "tokens": packed_bytes(part.tokens.data.tobytes()),
            "lengths": packed(np.diff(part.tokens.offsets)),
        }
    return entry


def counts_in(entry: dict[str, Any], prints: np.ndarray) -> Counts:
    """What `entry_of` was given. prints: `Kept.prints`."""
    tokens = None
    if "tokens" in entry:
        lengths = unpacked(entry["lengths"])
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        tokens = Tokens(np.frombuffer(unpacked_bytes(entry["tokens"]), np.uint8), offsets)
    return Counts(
        np.cumsum(unpacked(entry["cells"]), dtype=np.int64),
        unpacked(entry["values"]).astype(np.int64),
        entry["nbytes"],
        prints,
        tokens=tokens,
        **facts_from(entry, entry["documents"]),
    )


def _kept(line: Line, entry: dict[str, Any]) -> Kept:
    count = entry["documents"]
    return Kept(
        line,
        _texts(entry["names"]),
        _texts(entry["paths"]),
        [codec or None for codec in _texts(entry["codecs"])],
        unpacked(entry["facts"]).astype(np.int64).reshape(3, count).T,
        entry["start"],
        entry["stop"],
        unpacked(entry["prints"]).astype(np.int64).reshape(4, -1).T,
        "left_out" in entry,
    )


def _packed_texts(texts: Sequence[str]) -> str:
    # No name of a file holds a zero; it may hold bytes that are no UTF-8.
    return packed_bytes("\0".join(texts).encode("utf-8", "surrogateescape"))


def _texts(packed_text: str) -> list[str]:
    return unpacked_bytes(packed_text).decode("utf-8", "surrogateescape").split("\0")


class Again(NamedTuple):
    """A kept piece, and where its documents stand in the corpus now."""

    places: tuple[int, ...]
    kept: Kept
    moved: bool = False
    """Whether one of them is a file of another name, which by its length may be the same."""


@dataclass
class Left:
    """What earlier runs leave to count, and what of theirs counts."""

    done: list[Again] = field(default_factory=list)
    """Pieces that are as they were."""
    doubtful: list[Again] = field(default_factory=list)
    """Pieces of documents that may have changed, whose contents have to be compared."""
    whole: list[int] = field(default_factory=list)
    """The places in the corpus of documents of which all is to be counted."""
    ranges: list[tuple[int, int, int]] = field(default_factory=list)
    """Place, start and stop of what is to be counted of others."""
    notes: list[str] = field(default_factory=list)
    """What is to be said of that."""


def everything(corpus: Corpus) -> Left:
    """What is left of a corpus of which nothing was counted."""
    return Left(whole=list(range(len(corpus.documents))))


def what_is_left(record: Record, corpus: Corpus, kind: Kind | TokenKind) -> Left:
    """Compare a corpus with what the record holds, by the documents' names, sizes and times. What has another name than
    before is found by these."""
    every = (_kept(line, entry) for line, entry in record.entries())
    # Who wants an error for such lines gets it from what reads them.
    found = [kept for kept in every if corpus.reading.leaves_out or not kept.leaves_out]
    if not found:
        return everything(corpus)
    homes, left, cover = _Homes(corpus, found), Left(), _Cover()
    known: set[int] = set()
    gone: dict[str, None] = {}
    doubtful: list[Again] = []
    for kept in reversed(found):
        places, moved = homes.of(kept)
        known.update(place for place in places if place is not None)
        gone |= {name: None for name, place in zip(kept.names, places, strict=True) if place is None}
        if None in places:
            continue
        again = Again(tuple(place for place in places if place is not None), kept, moved)
        if not moved and _looks_as_before(again, corpus):
            if cover.takes(again):
                left.done.append(again)
        elif _can_be_compared(again, corpus, kind):
            doubtful.append(again)
    # What is left of a file that grew or shrank is doubted most: another may have its name.
    doubtful.sort(key=lambda again: not _has_its_lengths(again, corpus))
    left.doubtful = [again for again in doubtful if cover.takes(again)]
    for place, document in enumerate(corpus.documents):
        if place in cover.whole:
            continue
        if place not in cover.parts:
            left.whole.append(place)
        else:
            left.ranges += [(place, *gap) for gap in cover.gaps(place, document.nbytes)]
    left.notes = _notes(corpus, left, known, list(gone))
    return left


_Look = tuple[int, str | None, tuple[str | None, str | None], bool, int | None]
"""By what a file that has another name may be taken for one that was counted."""


def _look_of(name: str, nbytes: int, codec: str | None, modified_ns: int | None, reading: Reading) -> _Look:
    objects = bool(reading.fields) and named_for_objects(without_codec(name))
    return nbytes, codec, said_by(name), objects, modified_ns


class _Homes:
    """Where documents of kept pieces are in the corpus: under their names, or, of files that were renamed or moved,
    under others. Which file that may be, its length says, and of several the time of its last modification; whether it
    is, its contents have to."""

    def __init__(self, corpus: Corpus, found: Sequence[Kept]) -> None:
        self._corpus = corpus
        self._by_path = {document.path: place for place, document in enumerate(corpus.documents)}
        self._by_name = {document.name: place for place, document in enumerate(corpus.documents)}
        self._moved: dict[tuple[str, int, int], int | None] = {}
        self._taken_places: set[int] = set()
        at_home: set[int] = set()
        for kept in found:
            for path, name, facts in zip(kept.paths, kept.names, kept.facts.tolist(), strict=True):
                place = self._named(path, name)
                if place is not None and facts[:2] == self._facts(place):
                    at_home.add(place)
        self._free: dict[_Look, list[int]] = {}
        """Files that are not what was counted under their names, if anything was, by what else they may be; the first
        in the corpus stands last."""
        for place in reversed(range(len(corpus.documents))):
            if place not in at_home:
                document = corpus.documents[place]
                for modified_ns in (document.modified_ns, None):
                    look = _look_of(
                        document.name, document.nbytes, document.codec, modified_ns, corpus.reading
                    )
                    self._free.setdefault(look, []).append(place)

    def _named(self, path: str, name: str) -> int | None:
        return self._by_path.get(path, self._by_name.get(name))

    def _facts(self, place: int) -> list[int]:
        document = self._corpus.documents[place]
        return [document.nbytes, document.modified_ns]

    def of(self, kept: Kept) -> tuple[list[int | None], bool]:
        """The places of a piece's documents, None of those that are nowhere; and whether any has another name."""
        places: list[int | None] = []
        moved = False
        rows = zip(kept.paths, kept.names, kept.codecs, kept.facts.tolist(), strict=True)
        for path, name, codec, (nbytes, modified_ns, _) in rows:
            place = self._named(path, name)
            if place is None or self._corpus.documents[place].nbytes != nbytes:
                key = path, nbytes, modified_ns
                if key not in self._moved:
                    self._moved[key] = self._taken(name, nbytes, codec, modified_ns, gone=place is None)
                if self._moved[key] is not None:
                    place, moved = self._moved[key], True
            places.append(place)
        return places, moved

    def _taken(
        self, name: str, nbytes: int, codec: str | None, modified_ns: int, *, gone: bool
    ) -> int | None:
        """A file that may be the one that was counted as ``name``, taken for no other from here on. gone: whether none
        of that name is there; if one is, only one of the same time is looked for."""
        for time in (modified_ns, None) if gone else (modified_ns,):
            free = self._free.get(_look_of(name, nbytes, codec, time, self._corpus.reading), [])
            while free:
                place = free.pop()
                if place not in self._taken_places:
                    self._taken_places.add(place)
                    return place
        return None


def _looks_as_before(again: Again, corpus: Corpus) -> bool:
    documents = [corpus.documents[place] for place in again.places]
    return [document.codec for document in documents] == again.kept.codecs and bool(
        np.array_equal(_facts_of(again.places, corpus), again.kept.facts)
    )


def _has_its_lengths(again: Again, corpus: Corpus) -> bool:
    lengths = [corpus.documents[place].nbytes for place in again.places]
    return bool(np.array_equal(lengths, again.kept.facts[:, 0]))


def _facts_of(places: Sequence[int], corpus: Corpus) -> np.ndarray:
    return np.array(
        [
            (
                corpus.documents[place].nbytes,
                corpus.documents[place].modified_ns,
                corpus.status[place].changed_ns,
            )
            for place in places
        ],
        np.int64,
    )


def _can_be_compared(again: Again, corpus: Corpus, kind: Kind | TokenKind) -> bool:
    """Whether the fingerprints of a piece decide whether its documents hold what they did: they are of the same length
    and all their bytes; or, of one that became longer or shorter, of a part that is still there."""
    kept, documents = again.kept, [corpus.documents[place] for place in again.places]
    if [document.codec for document in documents] != kept.codecs:
        return False
    nbytes = np.array([document.nbytes for document in documents])
    if not kept.is_part:
        return _has_its_lengths(again, corpus) and covers(kept.prints, np.zeros_like(nbytes), nbytes)
    (document,), before = documents, int(kept.facts[0, 0])
    start, stop = with_margins(piece_again(again, corpus), kind)
    # At the end of a document tokens end, too: what follows it now would make other ones.
    inside = kept.stop + kind.after <= min(document.nbytes, before)
    if isinstance(kind, TokenKind):
        # How far tokens reached is how far the piece was read; those that reached the end may go on now.
        inside = int(kept.prints[:, 2].max(initial=before)) < min(document.nbytes, before)
    if document.nbytes != before and not inside:
        return False
    return covers(kept.prints, np.array([start]), np.array([stop]))


def piece_again(again: Again, corpus: Corpus, first: int = 0) -> Piece:
    """A kept piece, of the documents as they are now. first: `Piece.first`."""
    documents: tuple[Document, ...] = tuple(corpus.documents[place] for place in again.places)
    return Piece(first, documents, again.kept.start, again.kept.stop)


class _Cover:
    """Which bytes of a corpus are counted by kept pieces."""

    def __init__(self) -> None:
        self.whole: set[int] = set()
        self.parts: dict[int, list[tuple[int, int]]] = {}

    def takes(self, again: Again) -> bool:
        """Add a piece, unless another counts some of its bytes."""
        if not again.kept.is_part:
            if len(set(again.places)) < len(again.places) or any(
                place in self.whole or place in self.parts for place in again.places
            ):
                return False
            self.whole.update(again.places)
            return True
        (place,) = again.places
        if place in self.whole:
            return False
        parts = self.parts.setdefault(place, [])
        part = again.kept.start, again.kept.stop
        at = bisect.bisect(parts, part)
        free = (not at or parts[at - 1][1] <= part[0]) and (at == len(parts) or part[1] <= parts[at][0])
        if free:
            parts.insert(at, part)
        return free

    def gaps(self, place: int, nbytes: int) -> Iterator[tuple[int, int]]:
        done = 0
        for start, stop in [*self.parts[place], (nbytes, nbytes)]:
            if done < start:
                yield done, start
            done = stop


def _notes(corpus: Corpus, left: Left, known: set[int], gone: list[str]) -> list[str]:
    doubtful = {place for again in left.doubtful for place in again.places}
    moved = {place for again in left.doubtful if again.moved for place in again.places}
    uncounted = {*left.whole, *(place for place, _, _ in left.ranges)}
    as_before = {place for again in left.done for place in again.places}
    changed = sorted(known & uncounted - doubtful - as_before)

    def named(places: Sequence[int]) -> str:
        return names_of([corpus.documents[place].name for place in places])

    kept = len(left.done)
    notes = [f"{counted(kept, 'piece')} of earlier runs {'is' if kept == 1 else 'are'} not counted again"]
    if changed:
        notes.append(f"{named(changed)} changed since, or came in a piece with some that did: counted anew")
    if doubtful - moved:
        notes.append(
            f"{named(sorted(doubtful - moved))} got other times since: compared with what was counted"
        )
    if moved:
        notes.append(
            f"{named(sorted(moved))} moved since, or came in a piece with some that did: compared with what was counted"
        )
    if gone:
        notes.append(f"{names_of(sorted(gone))} left out, with what was counted: no more in the corpus")
    return notes
