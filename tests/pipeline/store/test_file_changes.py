"""A corpus that changes while it is counted ends the run with an error that names the file, whatever and whenever."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import numpy as np
import pytest
import zstandard
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.gpu.pretended_driver import BLOCK, Driver, run
from tests.pipeline.text.test_counting import count, cpu_workers, dense, naive_counts
from tests.pipeline.text.test_lanes_text import HostTally
from tests.pipeline.text.test_lanes_text import count as count_on_host
from tilewright.kernels.histograms.tokens import KINDS
from tilewright.pipeline.errors import DocumentError
from tilewright.pipeline.events import Event, UnitDone, WorkDone, WorkPlanned
from tilewright.pipeline.text import corpus as listing
from tilewright.pipeline.text import counting
from tilewright.pipeline.text.corpus import (
    Document,
    Piece,
    check_unchanged,
    cut_pieces,
    list_corpus,
    read_range,
    reader,
)
from tilewright.pipeline.text.formats.decompress import Fill
from tilewright.pipeline.text.gpu import lanes, texts
from tilewright.pipeline.transfer import zstd
from tilewright.pipeline.transfer.file_upload import Upload
from tilewright.pipeline.transfer.files import TICK_SECONDS, TIME_STEPS_NS, let_a_tick_pass, same_time

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": partial(gzip.compress, mtime=0),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}
SUFFIXES = list(COMPRESS)
LONG_AGO = 10**18
"""A time of modification, in nanoseconds, that no write of a test gives again."""

OLD, NEW = b"the old text, " * 60, b"the new text, " * 60


def contents(suffix: str) -> tuple[bytes, bytes]:
    """A file's bytes, and others of the same length that are as sound."""
    compress = COMPRESS[suffix]
    old = compress(OLD)
    others = (
        compress(OLD.translate(bytes.maketrans(b"old", word))) for word in (b"NEW", b"new", b"xyz", b"abc")
    )
    return old, next(other for other in others if len(other) == len(old))


def append(path: Path, _: bytes) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def truncate(path: Path, _: bytes) -> None:
    os.truncate(path, path.stat().st_size - 1)


def rewrite(path: Path, new: bytes) -> None:
    with path.open("r+b") as file:
        file.write(new)


def put_another_there(path: Path, new: bytes) -> None:
    beside = path.with_name("beside")
    beside.write_bytes(new)
    beside.replace(path)


def remove(path: Path, _: bytes) -> None:
    path.unlink()


def with_its_time(change: Callable[[Path, bytes], None], path: Path, new: bytes) -> None:
    before = path.stat()
    change(path, new)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def another_with_its_time(path: Path, new: bytes) -> None:
    """As a backup puts it back."""
    before, beside = path.stat(), path.with_name("beside")
    beside.write_bytes(new)
    os.utime(beside, ns=(before.st_atime_ns, before.st_mtime_ns))
    beside.replace(path)
    assert path.stat().st_mtime_ns == before.st_mtime_ns


CHANGES: dict[str, tuple[Callable[[Path, bytes], None], str]] = {
    "appended to": (append, r"grew from \d+ to \d+ bytes"),
    "truncated": (truncate, r"shrank from \d+ to \d+ bytes"),
    "rewritten": (rewrite, "was rewritten"),
    "rewritten, time put back": (partial(with_its_time, rewrite), "was written to, moved"),
    "replaced": (put_another_there, "was replaced by another file|was rewritten"),
    "replaced, time put back": (another_with_its_time, "was replaced by another file"),
    "removed": (remove, "was removed|No such file"),
}
MOMENTS: dict[str, Callable[[Event], bool]] = {
    "before it is read": lambda event: isinstance(event, WorkPlanned),
    "after it was read": lambda event: isinstance(event, UnitDone) and event.index == 0,
    "when all are read": lambda event: isinstance(event, WorkDone),
}


class At:
    """A listener that makes a change at the first event of a kind."""

    def __init__(self, moment: Callable[[Event], bool], change: Callable[[], object]) -> None:
        self._moment, self._change = moment, change
        self.done = False
        self.units_after = 0

    def __call__(self, event: Event) -> None:
        self.units_after += self.done and isinstance(event, UnitDone)
        if not self.done and self._moment(event):
            self.done = True
            self._change()


def fails(client: Client, folder: Path, listener: At, said: str, **options: Any) -> None:
    with pytest.raises(DocumentError, match=said) as told:
        count(client, [folder], "byte", listener=listener, **options)
    assert listener.done
    assert "\n" not in str(told.value)
    assert len(list(folder.iterdir())) <= FILES + 1, "nothing is left"


FILES = 6


@pytest.mark.sample(9)
@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("moment", list(MOMENTS))
@pytest.mark.parametrize("per_document", [False, True], ids=["together", "one by one"])
def test_a_file_that_changes_is_named(
    client: Client, tmp_path: Path, per_document: bool, moment: str, suffix: str, change: str
) -> None:
    """The first of six, each a piece of its own."""
    old, new = contents(suffix)
    make, says = CHANGES[change]
    paths = [tmp_path / f"{n}{suffix}" for n in range(FILES)]
    for path in paths:
        path.write_bytes(old)
    listener = At(MOMENTS[moment], partial(make, paths[0], new))
    pieces = {"tilewright.piece-nbytes": len(old), "tilewright.decompress-threads": 1}
    with dask.config.set(pieces):
        said = rf"^(cannot read )?{paths[0]}:? ({says})"
        fails(client, tmp_path, listener, said, per_document=per_document)


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_file_that_changes_between_its_pieces_is_named(client: Client, tmp_path: Path, change: str) -> None:
    path = tmp_path / "large"
    path.write_bytes(OLD)
    make, says = CHANGES[change]
    if change == "rewritten, time put back":  # another piece may be read between the two
        says += "|was rewritten"
    listener = At(MOMENTS["after it was read"], partial(make, path, NEW))
    with dask.config.set({"tilewright.piece-nbytes": 100}):
        fails(client, tmp_path, listener, rf"{path}:? ({says})")


def test_all_files_that_changed_are_counted_and_one_is_named(client: Client, tmp_path: Path) -> None:
    for name in "abcde":
        (tmp_path / name).write_bytes(OLD)

    def change() -> None:
        append(tmp_path / "b", b"")
        truncate(tmp_path / "c", b"")
        remove(tmp_path / "e", b"")

    said = rf"^{tmp_path / 'b'} grew from 840 to 844 bytes after .* listed, and 2 other files of it changed too; count"
    fails(client, tmp_path, At(MOMENTS["when all are read"], change), said)


def loop_at(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def folder_at(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (folder_at, "became a folder"),
        (loop_at, r"could not be looked at again \(Too many levels of symbolic links\)"),
        (lambda path: path.chmod(0o600), "was written to, moved, linked, or given another mode or owner"),
        (lambda path: path.with_name("b").hardlink_to(path), "was written to, moved, linked, or given"),
        (lambda path: path.write_bytes(b"x"), "grew from 0 to 1 byte"),
    ],
)
def test_what_became_of_a_file_that_need_not_be_read_is_said(
    client: Client, tmp_path: Path, change: Callable[[Path], object], says: str
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"")
    path.chmod(0o644)
    at = At(MOMENTS["when all are read"], partial(change, path))
    fails(client, tmp_path, at, rf"^{path} {says}")


def test_a_corpus_that_others_read_and_add_to_is_counted(client: Client, tmp_path: Path) -> None:
    """Links, files named twice and files that come to stand beside them; a corpus is what was listed."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "b").write_bytes(NEW)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_bytes(OLD)
    (folder / "link").symlink_to(tmp_path / "real" / "b")
    (tmp_path / "by-link").symlink_to(tmp_path / "real")

    def look() -> None:
        assert (folder / "a").read_bytes() == OLD
        (folder / "later").write_bytes(b"not counted")

    paths = [folder, folder / "a", tmp_path / "by-link" / "b", tmp_path / "by-link" / "b"]
    for moment in MOMENTS.values():
        listener = At(moment, look)
        with dask.config.set({"tilewright.piece-nbytes": len(OLD) // 2}):
            found = count(client, paths, "byte", listener=listener)
        assert listener.done
        (folder / "later").unlink()
        np.testing.assert_array_equal(found.counts, dense(naive_counts(OLD + 2 * NEW, "byte"), 256))


def old(path: Path, content: bytes) -> Document:
    """A file whose time no later write gives it again, listed."""
    path.write_bytes(content)
    os.utime(path, ns=(LONG_AGO, LONG_AGO))
    (document,) = list_corpus([path]).documents
    assert document.modified_ns == LONG_AGO
    return document


def read_whole(document: Document) -> None:
    if document.codec is None:
        read_range(document, 0, document.nbytes, np.empty(document.nbytes, np.uint8))
    else:
        read_to_the_end(reader(document))


def read_to_the_end(fill: Fill) -> None:
    target = np.empty(100, np.uint8)
    while fill(target):
        pass


@pytest.mark.parametrize("change", ["appended to", "truncated", "rewritten"])
@pytest.mark.parametrize("suffix", SUFFIXES[1:])
def test_a_worker_notices_a_compressed_file_that_changes_while_it_is_read(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, suffix: str, change: str
) -> None:
    """What is half one file and half another is not called damaged."""
    for module in (listing, zstd):
        monkeypatch.setattr(module, "STORED_NBYTES", 500)
    monkeypatch.setattr(zstd, "_spare", [])  # decoders with memory for longer reads
    # Two members, so that the first fill leaves much of the file to be read.
    members = [COMPRESS[suffix](rng.integers(0, 256, 3000, np.uint8).tobytes()) for _ in range(4)]
    path = tmp_path / f"log{suffix}"
    document = old(path, members[0] + members[1])
    fill = reader(document)
    assert fill(np.empty(100, np.uint8))
    CHANGES[change][0](path, members[2] + members[3])
    with pytest.raises(DocumentError, match=rf"^{path} ({CHANGES[change][1]}) .*after the corpus was listed"):
        read_to_the_end(fill)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_file_that_was_opened_is_the_one_that_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """Another, of the same length, stands in its place while a worker opens it, and is gone when it has been read."""
    path, aside, other = (tmp_path / f"{name}{suffix}" for name in ("log", "aside", "other"))
    content, new = contents(suffix)
    document = old(path, content)
    other.write_bytes(new)
    path.replace(aside)
    other.replace(path)
    system_open = os.open

    def opened(*arguments: Any, **more: Any) -> int:
        descriptor = system_open(*arguments, **more)
        if aside.exists():
            aside.replace(path)
        return descriptor

    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(DocumentError, match=rf"^{path} was rewritten"):
        read_whole(document)
    assert path.read_bytes() == content


def test_hosts_compare_times_as_far_as_their_file_systems_keep_them(tmp_path: Path) -> None:
    written = LONG_AGO + 1_234_567_890
    document = old(tmp_path / "a", OLD)
    os.utime(tmp_path / "a", ns=(written, written))
    target = np.empty(len(OLD), np.uint8)
    for step in (1, *TIME_STEPS_NS):
        read_range(document._replace(modified_ns=written // step * step), 0, len(OLD), target)
    said = (
        r"a was rewritten \(it is of 2001-09-09T01:46:41.234567 UTC, and was of 2001-09-09T01:46:40.000000\) after .*;"
        r" count it when nothing writes to it, and give copies on other hosts its times \(cp -p\)"
    )
    os.utime(tmp_path / "a", ns=(written, written))
    with pytest.raises(DocumentError, match=said):
        read_range(document._replace(modified_ns=LONG_AGO + 2), 0, len(OLD), target)


@given(time=st.integers(0, 2**62), later=st.integers(1, 2**62), step=st.sampled_from(TIME_STEPS_NS))
def test_times_are_the_same_if_one_is_the_other_rounded_down(time: int, later: int, step: int) -> None:
    assert same_time(time, time)
    assert same_time(time, time // step * step)
    assert same_time(time // step * step, time)
    if time % TIME_STEPS_NS[0]:  # rounded by nobody
        assert not same_time(time, time + later)


def test_reading_begins_when_a_write_would_be_seen() -> None:
    slept: list[float] = []
    for passed in (0, TICK_SECONDS / 4, TICK_SECONDS, 5.0):
        let_a_tick_pass(100.0, clock=lambda now=100.0 + passed: now, sleep=slept.append)
    assert slept == pytest.approx([TICK_SECONDS, 0.75 * TICK_SECONDS])


def test_a_new_corpus_is_not_read_before_a_write_would_be_seen(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(counting, "let_a_tick_pass", waited.append)
    (tmp_path / "a").write_bytes(OLD)
    found = list_corpus([tmp_path])
    counting.count_corpus(
        client,
        found,
        KINDS["byte"],
        cpu_workers(client),
        per_document=False,
        listener=lambda _: None,
    )
    assert waited == [found.listed]


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """To whose memory, the host's, text is brought by the loop that reads files without the interpreter's lock."""
    driver = Driver()

    @contextmanager
    def lane() -> Iterator[Any]:
        yield SimpleNamespace(move=lambda upload: run(upload, 2) or (0.0, 0.0))

    @contextmanager
    def text(piece: Piece, kind: Any) -> Iterator[lanes.Text]:
        begin, end, place = lanes._spans(piece, kind)[-1]
        yield lanes.Text(piece, kind, np.zeros(place + end - begin, np.uint8))

    monkeypatch.setattr(texts, "borrowed_lane", lane)
    monkeypatch.setattr(texts, "borrowed_text", text)
    monkeypatch.setattr(lanes, "address", lambda memory: memory.ctypes.data)
    monkeypatch.setattr(
        lanes, "Upload", lambda wanted, _, threads: Upload(wanted, BLOCK, threads, driver.functions)
    )
    monkeypatch.setattr(lanes, "add_counts", count_on_host)


class Tally(HostTally):
    """A tally that is told when all text was read."""

    def __init__(self, when_read: Callable[[], object]) -> None:
        super().__init__(256)
        self.follow_uploads = when_read

    def read(self) -> np.ndarray:
        return self.counts

    def settle(self) -> None:
        pass


def in_turn(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    return [call() for call in calls]


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("change", [None, "appended to", "truncated", "rewritten", "replaced", "removed"])
def test_text_that_a_gpu_is_given_is_compared_too(tmp_path: Path, change: str | None) -> None:
    for moment in ("before", "after"):
        (tmp_path / moment).mkdir()
        paths = [tmp_path / moment / name for name in "abc"]
        for path in paths:
            old(path, OLD)
        (piece,) = cut_pieces(list_corpus(paths).documents, 2**20)
        make, says = CHANGES[change] if change else (lambda path, new: None, "")
        make = partial(make, paths[1], NEW)
        if moment == "before":
            make()
        tally: Any = Tally(make if moment == "after" else lambda: None)
        counted = partial(texts.count_text, piece, KINDS["byte"], tally, in_turn, 1, 1, {})
        if not change:
            part = counted()
            assert part is not None
            assert dict(zip(part.columns.tolist(), part.values.tolist(), strict=True)) == naive_counts(
                3 * OLD, "byte"
            )
        elif moment == "before" and change in ("truncated", "removed"):
            assert counted() is None, "what reads it block by block says why"
        else:
            with pytest.raises(DocumentError, match=rf"{paths[1]}:? ({says})"):
                counted()


def test_the_order_of_status_is_that_of_documents(tmp_path: Path) -> None:
    """Also where files are named twice, are none, or lead nowhere."""
    for name in "cab":
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    found = list_corpus([tmp_path / "b", tmp_path, tmp_path / "c"])
    assert [Path(document.name).name for document in found.documents] == ["b", "a", "c"]
    facts = [os.stat(document.path) for document in found.documents]
    assert [tuple(status) for status in found.status] == [(fact.st_ctime_ns, fact.st_ino) for fact in facts]
    assert [document.modified_ns for document in found.documents] == [fact.st_mtime_ns for fact in facts]
    check_unchanged(found)
    assert re.search("1 special file", " ".join(found.notes))
