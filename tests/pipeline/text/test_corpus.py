"""The files of a corpus, the pieces they are cut into, and what can go wrong with them."""

from __future__ import annotations

import errno
import gzip
import itertools
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.gemm.pipes import pipe_at
from tilewright.pipeline.errors import CorpusError, DocumentError
from tilewright.pipeline.text import corpus
from tilewright.pipeline.text.corpus import (
    Document,
    check_unchanged,
    cut_pieces,
    list_corpus,
    read_range,
    reader,
)


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_folders_are_searched_in_the_order_of_sorted_paths(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b.txt", "a/z/deep.txt", "a/1.txt", "c/0"):
        write(tmp_path / name, b"x")
    found = [Path(document.name) for document in list_corpus([tmp_path]).documents]
    assert found == sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert len(found) == 5


def test_documents_are_called_as_the_user_called_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "texts" / "one", b"x")
    monkeypatch.chdir(tmp_path)
    (document,) = list_corpus(["texts"]).documents
    assert document.name == os.path.join("texts", "one")
    assert document.path == str(tmp_path / "texts" / "one")
    assert document.nbytes == 1


def test_a_file_named_twice_counts_once(tmp_path: Path) -> None:
    one = write(tmp_path / "one", b"x")
    corpus = list_corpus([one, tmp_path, one])
    assert len(corpus.documents) == 1
    assert corpus.notes == ("2 files named more than once, counted once",)


def test_dots_behind_a_link_lead_where_the_system_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the folder above the one that the link leads to, so that two names of one text each mean two files."""
    write(tmp_path / "one", b"near")
    write(tmp_path / "far" / "one", b"far")
    (tmp_path / "far" / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far" / "folder")
    monkeypatch.chdir(tmp_path)
    corpus = list_corpus(["link/../one", "one", "far/one", "./far/folder/.."])
    assert [Path(document.path).read_bytes() for document in corpus.documents] == [b"far", b"near"]
    assert [document.nbytes for document in corpus.documents] == [3, 4]
    assert all(os.path.isabs(document.path) for document in corpus.documents)
    assert corpus.notes == ("2 files named more than once, counted once",)


class Text(str):
    """A text that is not as it seems."""

    def __str__(self) -> str:
        return "other"

    def split(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError("no")


class Named:
    def __init__(self, path: Any) -> None:
        self.path = path

    def __fspath__(self) -> Any:
        return self.path


KINDS_OF_PATHS: dict[str, Callable[[str], Any]] = {
    "text of NumPy's": np.str_,
    "bytes": os.fsencode,
    "bytes of NumPy's": lambda path: np.bytes_(os.fsencode(path)),
    "subclass": Text,
    "path": Path,
    "path of its own": lambda path: Named(np.str_(path)),
}


@pytest.mark.parametrize("kind", KINDS_OF_PATHS)
def test_paths_of_any_class_give_plain_texts(kind: str, tmp_path: Path) -> None:
    make, folder = KINDS_OF_PATHS[kind], str(tmp_path / "folder")
    files = [str(write(tmp_path / "folder" / name, b"x")) for name in ("one", "two")]
    for texts in ([folder], files, [folder, files[0]]):
        documents = list_corpus([make(text) for text in texts]).documents
        assert documents == list_corpus(texts).documents
        assert {type(text) for one in documents for text in (one.name, one.path)} == {str}


def test_paths_of_bytes_are_paths(tmp_path: Path) -> None:
    """As Python's own functions for files take them: a compressed file is one under such a name too."""
    for name in (b"one.gz", b"\xff"):
        Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name))).write_bytes(b"x")
    for given_path in (os.fsencode(tmp_path), os.fsencode(tmp_path / "one.gz")):
        documents = list_corpus([given_path]).documents
        assert documents == list_corpus([os.fsdecode(given_path)]).documents
        assert documents[0].codec == "gzip"


def test_links_to_files_count_and_links_to_folders_are_told_of(tmp_path: Path) -> None:
    write(tmp_path / "real" / "one", b"x")
    (tmp_path / "again").symlink_to(tmp_path / "real" / "one")
    (tmp_path / "loop").symlink_to(tmp_path)
    corpus = list_corpus([tmp_path])
    assert [Path(document.name).name for document in corpus.documents] == ["again", "one"]
    (note,) = corpus.notes
    assert note.startswith("1 link to folders not followed")


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    list_folder = os.scandir

    def closed(path: str) -> Any:
        if os.path.basename(path) == "closed":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return list_folder(path)

    monkeypatch.setattr(corpus.os, "scandir", closed)
    with pytest.raises(CorpusError, match=r"cannot list the folder .*closed: Permission denied; make it one"):
        list_corpus([tmp_path])


def test_pipes_are_told_of_and_never_opened(tmp_path: Path) -> None:
    write(tmp_path / "one", b"x")
    os.mkfifo(tmp_path / "pipe")
    corpus = list_corpus([tmp_path])
    assert len(corpus.documents) == 1
    assert corpus.notes == ("1 special file (socket, pipe or device) not counted",)
    with pytest.raises(CorpusError, match=r"pipe is neither a file nor a folder"):
        list_corpus([tmp_path / "pipe"])


@pytest.mark.parametrize("below", [False, True])
def test_a_file_that_is_empty_by_its_length_alone_is_refused(below: bool, tmp_path: Path) -> None:
    """Its bytes are made when it is read."""
    (tmp_path / "cmdline").symlink_to("/proc/self/cmdline")
    assert (tmp_path / "cmdline").stat().st_size == 0
    with pytest.raises(CorpusError, match=r"cmdline is said to have no bytes, and has some; copy"):
        list_corpus([tmp_path if below else tmp_path / "cmdline"])


def test_files_that_are_empty_count(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name, b"")
    (tmp_path / "two").chmod(0)
    assert [document.nbytes for document in list_corpus([tmp_path]).documents] == [0, 0]


def test_a_file_that_grows_from_nothing_while_it_is_listed_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As any other file that is written to later; that it changed is noticed when it is counted."""
    path, system_open = write(tmp_path / "log", b""), os.open

    def grown(*arguments: Any) -> int:
        path.write_bytes(b"x")
        return system_open(*arguments)

    monkeypatch.setattr(corpus.os, "open", grown)
    found = list_corpus([path])
    assert [document.nbytes for document in found.documents] == [0]
    with pytest.raises(DocumentError, match=r"log grew from 0 to 1 byte after the corpus was listed"):
        check_unchanged(found)


def test_a_file_that_cannot_be_read_and_is_empty_by_its_length_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of /proc that give whole records alone, or wait for what happens next."""

    def refuse(*_: Any) -> bytes:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(corpus.os, "pread", refuse)
    with pytest.raises(CorpusError, match=r"map is said to have no bytes, and cannot be read: Invalid"):
        list_corpus([write(tmp_path / "map", b"")])


def test_a_file_that_has_fewer_bytes_than_its_length_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of /sys, all of which have 4096 bytes by their length."""
    (document,) = list_corpus([write(tmp_path / "online", b"0-63" + bytes(4092))]).documents
    monkeypatch.setattr(corpus, "read_at", lambda descriptor, target, offset: 4 if offset == 0 else 0)
    with pytest.raises(CorpusError, match=r"online is said to have 4096 bytes, and ended before .*; copy"):
        read_range(document, 0, 4096, np.zeros(4096, np.uint8))


def test_errors_name_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no corpus was given"):
        list_corpus([])
    with pytest.raises(CorpusError, match=r"cannot find .*nowhere: No such file"):
        list_corpus([tmp_path / "nowhere"])
    for name in ("", "a\0b"):
        with pytest.raises(CorpusError, match="cannot find "):
            list_corpus([name])
    with pytest.raises(
        CorpusError, match=r"cannot find .*\*\.gz: .*exist; patterns are the shell's.*--include"
    ):
        list_corpus([tmp_path / "*.gz"])
    (tmp_path / "[1].gz").touch()
    assert list_corpus([tmp_path / "[1].gz"]).nbytes == 0
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorpusError, match=r"no files in .*empty"):
        list_corpus([tmp_path / "empty"])
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    with pytest.raises(CorpusError, match=r"cannot find .*dangling"):
        list_corpus([tmp_path / "dangling"])


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    nbytes=st.integers(1, 50),
    most=st.integers(1, 5),
)
def test_pieces_hold_every_byte_once(lengths: list[int], nbytes: int, most: int) -> None:
    documents = [Document(f"d{i}", f"/d{i}", length) for i, length in enumerate(lengths)]
    seen: dict[int, list[tuple[int, int]]] = {i: [] for i in range(len(documents))}
    for piece in cut_pieces(documents, nbytes, most):
        assert piece.nbytes <= nbytes
        assert len(piece.documents) <= most
        assert piece.documents == tuple(documents[piece.first : piece.first + len(piece.documents)])
        if len(piece.documents) == 1:
            seen[piece.first].append((piece.start, piece.stop))
            assert piece.is_part == (piece.nbytes < documents[piece.first].nbytes)
        else:
            assert not piece.is_part
            for i, document in enumerate(piece.documents):
                seen[piece.first + i].append((0, document.nbytes))
    for i, length in enumerate(lengths):
        ranges = seen[i]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == length
        assert all(before[1] == behind[0] for before, behind in itertools.pairwise(ranges))


def test_many_small_documents_share_a_piece() -> None:
    documents = [Document(f"{i}", f"/{i}", 100) for i in range(10_000)]
    assert len(list(cut_pieces(documents, 2**20))) == 3


def test_a_file_that_shrinks_or_goes_away_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "log", b"0123456789")
    (document,) = list_corpus([path]).documents
    target = np.zeros(10, np.uint8)
    path.write_bytes(b"0123")
    with pytest.raises(DocumentError, match=r"log shrank from 10 to 4 bytes after the corpus was listed"):
        read_range(document, 0, 10, target)
    path.unlink()
    with pytest.raises(
        CorpusError, match=rf"cannot read .*log: No such file.*; make it .* at {path}, or leave"
    ):
        read_range(document, 0, 10, target)


@pytest.mark.parametrize("name", ["log", "log.gz", "log.zst"])
@pytest.mark.parametrize("found", ["a pipe", "a folder"])
def test_what_has_come_in_place_of_a_file_is_named_and_not_waited_for(
    name: str, found: str, tmp_path: Path
) -> None:
    path = write(tmp_path / name, b"0123456789")
    (document,) = list_corpus([path]).documents
    path.unlink()
    if found == "a folder":
        path.mkdir()
    target = np.zeros(10, np.uint8)
    with (
        pipe_at(path) if found == "a pipe" else nullcontext(),
        pytest.raises(CorpusError, match=rf"cannot read .*{name}: it is {found} and no file"),
    ):
        read_range(document, 0, 10, target) if document.codec is None else reader(document)(target)


@pytest.mark.parametrize("name", ["log", "log.gz", "log.zst"])
def test_a_file_with_a_lease_on_it_is_waited_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As file servers and backups take them, and give them up to an open that waits: no other is let in."""
    content = b"text" * 100
    packed = {"log.gz": gzip.compress, "log.zst": zstandard.compress}.get(name, bytes)
    path = write(tmp_path / name, packed(content))
    system_open, waits = os.open, []

    def leased(opened: Any, flags: int, *more: Any, **named: Any) -> int:
        if os.fspath(opened) == str(path):
            waits.append(not flags & os.O_NONBLOCK)
            if not waits[-1]:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return system_open(opened, flags, *more, **named)

    monkeypatch.setattr(os, "open", leased)
    (document,) = list_corpus([path]).documents
    found = np.zeros(len(content), np.uint8)
    if document.codec is None:
        read_range(document, 0, len(content), found)
    else:
        fill, got = reader(document), 0
        while more := fill(found[got:]):
            got += more
    assert found.tobytes() == content
    assert True in waits


def test_a_leased_file_that_is_empty_by_its_length_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cmdline").symlink_to("/proc/self/cmdline")
    system_open = os.open

    def leased(opened: Any, flags: int) -> int:
        if flags & os.O_NONBLOCK:
            raise BlockingIOError
        return system_open(opened, flags)

    monkeypatch.setattr(corpus.os, "open", leased)
    with pytest.raises(CorpusError, match="cmdline is said to have no bytes, and has some"):
        list_corpus([tmp_path / "cmdline"])


def test_a_file_that_grows_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "log", b"0123456789")
    (document,) = list_corpus([path]).documents
    with path.open("ab") as log:
        log.write(b" and more")
    with pytest.raises(
        DocumentError, match=r"log grew from 10 to 19 bytes after .*; count it when nothing writes"
    ):
        read_range(document, 4, 10, np.zeros(6, np.uint8))


def test_broken_links_are_noted_below_a_folder_and_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc")
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    found = list_corpus([tmp_path])
    assert [document.nbytes for document in found.documents] == [3]
    assert found.notes == ("2 links to nowhere not counted",)
    with pytest.raises(CorpusError, match="cannot find"):
        list_corpus([tmp_path / "gone"])
