"""Compressed documents are their decompressed bytes, however they were written, and damage is never passed over."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import zstandard
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.peak_memory import grown_by, in_new_process
from tests.pipeline.text.test_counting import count, cpu_workers, dense, documents, naive_counts
from tests.sampling import examples
from tilewright.kernels.histograms.tokens import KINDS
from tilewright.pipeline.errors import CompressedError, CorpusError, DocumentError
from tilewright.pipeline.plan.inputs import WorkerFacts
from tilewright.pipeline.text import corpus, counting
from tilewright.pipeline.text import pieces as counting_pieces
from tilewright.pipeline.text.corpus import Corpus, Document, Look, Piece, cut_pieces, list_corpus, reader
from tilewright.pipeline.text.counting import count_corpus
from tilewright.pipeline.text.formats import decompress, opening
from tilewright.pipeline.text.formats.decompress import Fill
from tilewright.pipeline.text.formats.reading import reading_of
from tilewright.pipeline.text.kept_counts import everything
from tilewright.pipeline.text.pieces import count_piece
from tilewright.pipeline.transfer import zstd
from tilewright.pipeline.transfer.lane_blocks import LANE_NBYTES

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}
SUFFIXES = list(COMPRESS)
CHECKED = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data),
}
"""With a checksum of the contents, which Zstandard alone leaves out unless it is asked for."""


def document(path: Path) -> Document:
    (found,) = list_corpus([path]).documents
    return found


def filled(fill: Fill, room: int = 2**20) -> Iterator[bytes]:
    """What it gives until it gives nothing more."""
    target = np.empty(room, np.uint8)
    while count := fill(target):
        yield target[:count].tobytes()


def content(path: Path) -> bytes:
    found = document(path)
    return path.read_bytes() if found.codec is None else b"".join(filled(reader(found)))


def text(rng: np.random.Generator, nbytes: int) -> bytes:
    return rng.choice(np.frombuffer(b"etaoin shrdlu\n", np.uint8), nbytes).tobytes()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("by", "per_document"),
    [
        # Kinds of one byte are alike, and so are all documents together and each for itself: some in every run.
        pytest.param(by, each, marks=() if each == (by not in ("byte", "bigram")) else pytest.mark.slow)
        for by in KINDS
        for each in (False, True)
    ],
)
@settings(max_examples=examples(10))  # for each of ten variants
@given(
    texts=st.lists(st.tuples(documents, documents, st.sampled_from(["", *SUFFIXES])), min_size=1, max_size=6),
    nbytes=st.integers(1, 20),
)
def test_equals_counter(
    without_dask: Client, by: str, per_document: bool, texts: list[tuple[bytes, bytes, str]], nbytes: int
) -> None:
    """Plain and compressed documents in any order, each of two members, in blocks of a few bytes."""
    with tempfile.TemporaryDirectory() as folder, dask.config.set({"tilewright.piece-nbytes": nbytes}):
        paths = []
        for i, (head, tail, suffix) in enumerate(texts):
            compress = COMPRESS.get(suffix, bytes)
            paths.append(Path(folder, f"{i:03}{suffix}"))
            paths[-1].write_bytes(compress(head) + compress(tail))
        result = count(without_dask, paths, by, per_document=per_document)
    expected = [dense(naive_counts(head + tail, by), KINDS[by].bins) for head, tail, _ in texts]
    if per_document:
        np.testing.assert_array_equal(result.counts, np.stack(expected))
    else:
        np.testing.assert_array_equal(result.counts, np.sum(expected, axis=0))
    assert result.nbytes == sum(len(head) + len(tail) for head, tail, _ in texts)
    assert result.skipped == (result.nbytes - np.sum(expected) if by in ("ascii", "letter") else 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("by", list(KINDS))
@pytest.mark.parametrize("per_document", [False, True])
@settings(max_examples=examples(20))  # for each of ten variants
@given(
    texts=st.lists(st.tuples(documents, st.sampled_from(["", *SUFFIXES])), min_size=1, max_size=6),
    nbytes=st.integers(1, 40),
    threads=st.sampled_from([1, 3]),
)
def test_one_piece_is_counted_in_blocks_of_any_size(
    by: str, per_document: bool, texts: list[tuple[bytes, str]], nbytes: int, threads: int
) -> None:
    """All documents in one task, so that blocks end within one, between two, and after empty ones."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{i:03}{suffix}") for i, (_, suffix) in enumerate(texts)]
        for path, (data, suffix) in zip(paths, texts, strict=True):
            path.write_bytes(COMPRESS.get(suffix, bytes)(data))
        found = list_corpus(paths)
        piece = Piece(0, found.documents, 0, found.nbytes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(counting_pieces, "LEAST_STREAM_NBYTES", 1)
            patch.setattr(counting_pieces, "usable_cores", lambda: 3)
            part, _ = count_piece(piece, KINDS[by], "cpu", per_document, nbytes, threads)
    bins = KINDS[by].bins
    counts = np.zeros((len(texts) if per_document else 1, bins), np.int64)
    counts.reshape(-1)[part.cells] = part.values
    expected = np.stack([dense(naive_counts(data, by), bins) for data, _ in texts])
    np.testing.assert_array_equal(counts, expected if per_document else expected.sum(axis=0, keepdims=True))
    assert part.nbytes == sum(len(data) for data, _ in texts)


@pytest.mark.parametrize("suffix", SUFFIXES)
@given(data=st.data())
def test_blocks_of_any_size_give_the_same_bytes(suffix: str, data: st.DataObject) -> None:
    members = data.draw(st.lists(st.binary(max_size=300), min_size=1, max_size=4))
    stored = b"".join(map(COMPRESS[suffix], members))
    step, most, room = (data.draw(st.integers(1, 50)) for _ in range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decompress, "BLOCK_NBYTES", most)
        fill = decompress.reader(
            decompress.SUFFIXES[suffix], [stored[i : i + step] for i in range(0, len(stored), step)]
        )
        found = []
        target = np.empty(room, np.uint8)
        while count := fill(target):
            found.append(target[:count].tobytes())
            for _ in range(20):
                assert fill(target[:0]) == 0  # and nothing is lost
    assert b"".join(found) == b"".join(members)
    assert fill(np.empty(1, np.uint8)) == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_document_of_many_blocks(
    tmp_path: Path, rng: np.random.Generator, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "STORED_NBYTES", 2**16)
    monkeypatch.setattr(decompress, "BLOCK_NBYTES", 2**18)
    data = text(rng, 3 * decompress.BLOCK_NBYTES + 5)
    path = tmp_path / f"text{suffix}"
    path.write_bytes(
        COMPRESS[suffix](data[:100_000]) + COMPRESS[suffix](b"") + COMPRESS[suffix](data[100_000:])
    )
    assert path.stat().st_size > 3 * corpus.STORED_NBYTES
    assert content(path) == data


def test_the_suffix_of_a_small_file_says_how_it_is_cut(tmp_path: Path) -> None:
    names = {
        "a.gz": "gzip",
        "b.TXT.GZ": "gzip",
        "c.tar.bz2": "bzip2",
        "d.xz": "xz",
        "e.zst": "zstd",
        "f.lz4": "lz4",
    }
    plain = ["f", "g.txt", "gz", "h.gz.txt", "i.zip"]
    for name in [*names, *plain, ".hidden.gz"]:
        (tmp_path / name).write_bytes(b"x")
    found = {Path(d.name).name: d.codec for d in list_corpus([tmp_path]).documents}
    assert found == names | dict.fromkeys(plain)
    assert all(d.codec is None for d in list_corpus([tmp_path], raw=True).documents)


def test_raw_counts_what_is_stored(without_dask: Client, tmp_path: Path) -> None:
    stored = gzip.compress(b"aaaa" * 1000)
    path = tmp_path / "a.gz"
    path.write_bytes(stored)
    result = count_corpus(
        without_dask,
        list_corpus([path], raw=True),
        KINDS["byte"],
        cpu_workers(without_dask),
        per_document=False,
        listener=lambda _: None,
    )
    np.testing.assert_array_equal(result.counts, dense(naive_counts(stored, "byte"), 256))
    assert result.nbytes == len(stored)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=12),
    nbytes=st.integers(1, 50),
    most=st.integers(1, 5),
    streams=st.integers(1, 3),
    plain_nbytes=st.none() | st.integers(1, 80),
)
def test_compressed_documents_are_packed_and_never_cut(
    lengths: list[tuple[int, bool]], nbytes: int, most: int, streams: int, plain_nbytes: int | None
) -> None:
    given_documents = [
        Document(f"d{i}", f"/d{i}", length, "gzip" if packed else None)
        for i, (length, packed) in enumerate(lengths)
    ]
    pieces = list(cut_pieces(given_documents, nbytes, most, streams, plain_nbytes=plain_nbytes))
    seen = [place for piece in pieces for place in range(piece.first, piece.first + len(piece.documents))]
    assert list(dict.fromkeys(seen)) == list(range(len(lengths)))
    for piece in pieces:
        assert piece.documents == tuple(given_documents[piece.first : piece.first + len(piece.documents)])
        if piece.is_plain:
            assert piece.nbytes <= (plain_nbytes or nbytes)
        else:
            assert piece.nbytes == sum(document.nbytes for document in piece.documents)
            assert seen.count(piece.first) == 1
            assert piece.nbytes <= nbytes or len(piece.documents) <= min(streams, most)


def test_a_task_decompresses_several_documents_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of three large documents waits for the others to have begun."""
    together = threading.Barrier(3, timeout=60)

    def met(document: Document, look: Look | None, codec: str, *how: Any) -> Fill:
        together.wait()
        return reader(document, look)

    monkeypatch.setattr(opening, "reader", met)
    monkeypatch.setattr(counting_pieces, "LEAST_STREAM_NBYTES", 1)
    monkeypatch.setattr(counting_pieces, "usable_cores", lambda: 3)
    for i in range(3):
        (tmp_path / f"{i}.gz").write_bytes(gzip.compress(bytes([i]) * 100))
    found = list_corpus([tmp_path])
    (piece,) = cut_pieces(found.documents, 1, streams=3)
    part, stages = count_piece(piece, KINDS["byte"], "cpu", True, 1000, 3)
    assert part.cells.tolist() == [0, 257, 514]
    assert part.values.tolist() == [100, 100, 100]
    assert part.nbytes == 300
    assert stages["read"] > 0


def test_a_block_is_never_larger_than_anybody_has_memory(tmp_path: Path) -> None:
    (tmp_path / "a.zst").write_bytes(zstandard.compress(b"text"))
    (piece,) = cut_pieces(list_corpus([tmp_path]).documents, 10**30)
    part, _ = count_piece(piece, KINDS["byte"], "cpu", False, 10**30, 1)
    assert part.values.tolist() == [1, 2, 1]


@pytest.mark.parametrize("per_document", [False, True])
def test_a_document_that_nobody_waits_for_is_not_read_to_its_end(
    per_document: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []

    def give_up() -> None:
        looked.append(True)
        if len(looked) == 3:
            raise CancelledError

    monkeypatch.setattr(counting_pieces, "end_if_given_up", lambda: give_up)
    (tmp_path / "long.zst").write_bytes(zstandard.compress(bytes(10**6)))
    (piece,) = cut_pieces(list_corpus([tmp_path]).documents, 1)
    with pytest.raises(CancelledError):
        count_piece(piece, KINDS["byte"], "cpu", per_document, 1000, 1)
    assert len(looked) == 3


def test_a_document_that_fails_ends_those_read_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have hours to go."""
    begun, blocks, filled_blocks = threading.Event(), 100_000, []

    def damaged(target: np.ndarray) -> int:
        assert begun.wait(60)
        raise CompressedError("damaged")

    def long(target: np.ndarray) -> int:
        begun.set()
        if len(filled_blocks) == blocks:
            return 0
        filled_blocks.append(len(target))
        return len(target)

    for name in ("damaged.gz", "long.gz"):
        (tmp_path / name).write_bytes(b"x")
    monkeypatch.setattr(
        opening, "reader", lambda document, *how: long if "long" in document.name else damaged
    )
    monkeypatch.setattr(counting_pieces, "LEAST_STREAM_NBYTES", 1)
    monkeypatch.setattr(counting_pieces, "usable_cores", lambda: 2)
    (piece,) = cut_pieces(list_corpus([tmp_path]).documents, 2)
    with pytest.raises(CompressedError, match="damaged"):
        count_piece(piece, KINDS["byte"], "cpu", False, 1000, 2)
    assert 0 < len(filled_blocks) < blocks


@pytest.mark.parametrize(("workers", "at_once"), [(1, 32), (2, 16), (32, 1)])
def test_a_host_decompresses_on_all_its_cores(workers: int, at_once: int) -> None:
    """Dask sets OMP_NUM_THREADS to 1 in its workers, also in one that has the host for itself."""
    facts = [
        WorkerFacts("cuda", "a GPU", 2**34, None, cores=1, usable_cores=32, host_cores=32, threads=2)
        for _ in range(workers)
    ]
    files = tuple(Document(f"{i}.zst", f"/{i}.zst", 2**26, "zstd") for i in range(32))
    decompressors = counting.decompressors_of(facts, workers)
    assert decompressors == at_once
    listed = Corpus(files, ())
    work = counting._work(facts, listed, everything(listed), KINDS["byte"], 2**25, False, decompressors, True)
    pieces = work.pieces
    for begun in (
        pieces[place : place + 2] for place in range(0, len(pieces), 2)
    ):  # by a worker's two threads
        shares = [
            counting_pieces._shares(piece, KINDS["byte"], "cuda", 2**23, decompressors) for piece in begun
        ]
        assert sum(map(len, shares)) >= at_once


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_compressed_file_does_not_cut_plain_ones_smaller(device: str, place: int) -> None:
    """On a GPU a task counts as much plain text as without it; large compressed ones are begun first."""
    texts = [Document(f"{i}.txt", f"/{i}.txt", 2**32, None) for i in range(2)]
    packed = Document("dump.gz", "/dump.gz", 2**26, "gzip")
    corpus = Corpus((*texts[:place], packed, *texts[place:]), ())
    worker = WorkerFacts(device, "a device", None, None, 1, threads=2)
    on_gpus = device == "cuda"
    pieces = counting._work(
        [worker], corpus, everything(corpus), KINDS["byte"], 2**25, False, 2, on_gpus
    ).pieces
    assert pieces[0] == Piece(place, (packed,), 0, 2**26)
    nbytes = 2**25 if device == "cpu" else counting.TASK_BLOCKS * LANE_NBYTES
    assert {piece.nbytes for piece in pieces[1:]} == {nbytes}
    assert len(pieces) == 1 + 2**33 // nbytes


def test_small_files_of_both_kinds_share_pieces() -> None:
    """What goes with compressed documents is counted as they are, so there is little of it."""
    mixed = [Document(f"{i}", f"/{i}", 100, "gzip" if i % 2 else None) for i in range(1000)]
    pieces = list(cut_pieces(mixed, 10_000, plain_nbytes=50_000))
    assert [piece.nbytes for piece in pieces] == [10_000] * 10
    long = Document("long", "/long", 50_000, None)
    pieces = list(cut_pieces([long, *mixed[1:100]], 10_000, streams=4, plain_nbytes=50_000))
    assert [piece.nbytes for piece in pieces] == [50_000, 9_900]


def test_many_small_compressed_files_share_a_piece() -> None:
    small = [Document(f"{i}.gz", f"/{i}.gz", 100, "gzip") for i in range(10_000)]
    assert len(list(cut_pieces(small, 2**20))) == 3


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_truncation_is_noticed(tmp_path: Path, suffix: str) -> None:
    stored = COMPRESS[suffix](b"a tale of two cities " * 20)
    path = tmp_path / f"tale{suffix}"
    for length in range(len(stored)):
        path.write_bytes(stored[:length])
        says = "it is empty" if length == 0 else "it was cut short"
        with pytest.raises(CorpusError, match=rf"tale{suffix} cannot be decompressed: {says}"):
            content(path)
    path.write_bytes(stored)
    assert content(path) == b"a tale of two cities " * 20


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_truncated_second_member_is_noticed(tmp_path: Path, suffix: str) -> None:
    member = COMPRESS[suffix](b"whole")
    path = tmp_path / f"two{suffix}"
    for length in range(1, len(member)):
        path.write_bytes(member + member[:length])
        with pytest.raises(CorpusError, match="cut short, or other bytes follow its last whole member: its"):
            content(path)
    path.write_bytes(member[:-1])
    with pytest.raises(CorpusError, match=f"cut short: its {len(member) - 1} bytes end where"):
        content(path)


@pytest.mark.sample(2)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_flipped_byte_is_noticed_or_of_no_meaning(
    tmp_path: Path, rng: np.random.Generator, suffix: str
) -> None:
    data = text(rng, 200)
    stored = CHECKED[suffix](data)
    path = tmp_path / f"flipped{suffix}"
    caught = 0
    for at in range(len(stored)):
        path.write_bytes(stored[:at] + bytes([stored[at] ^ 0xFF]) + stored[at + 1 :])
        with suppress(CorpusError):
            assert content(path) == data, f"byte {at} changed what was read"
            continue
        caught += 1
    # gzip's header has a time, a system and a level, which say nothing about the contents.
    assert caught >= len(stored) - 8


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("garbage", [b"x", b"garbage behind the archive"])
def test_other_bytes_behind_the_last_member_are_noticed(tmp_path: Path, suffix: str, garbage: bytes) -> None:
    path = tmp_path / f"more{suffix}"
    path.write_bytes(COMPRESS[suffix](b"text") + garbage)
    with pytest.raises(CorpusError, match=rf"more{suffix} cannot be decompressed") as told:
        content(path)
    assert "or other bytes follow its last whole member" in str(told.value)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_with_a_wrong_suffix_is_named(without_dask: Client, tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"text{suffix}").write_bytes(b"This was never compressed. " * 10)
    with pytest.raises(CorpusError, match=rf"text{suffix} cannot be decompressed: .*--raw"):
        count(without_dask, [tmp_path], "byte")


def test_damage_is_looked_for_once(
    without_dask: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is as far into the document at every attempt, which may be hours."""
    read = []

    def counted(document: Document, look: Look | None, codec: str, *how: Any) -> Fill:
        read.append(document.name)
        return reader(document, look, codec)

    monkeypatch.setattr(opening, "reader", counted)
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes(1000))[:-1])
    with pytest.raises(CompressedError, match=r"a\.gz cannot be decompressed: it was cut short"):
        count(without_dask, [tmp_path], "byte")
    assert read == [str(tmp_path / "a.gz")]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("change", ["gone", "shorter", "a folder"])
def test_what_became_of_a_document_is_looked_for_once(
    without_dask: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, change: str
) -> None:
    """Raised, it would be tried again, and reported by Dask each time."""
    path, tries = tmp_path / f"a{suffix}", []

    def changed(piece: Piece, *how: Any) -> list[Piece]:
        tries.append(piece)
        if change == "shorter":
            os.truncate(path, 5)
        else:
            path.unlink(missing_ok=True)
        if change == "a folder":
            path.mkdir(exist_ok=True)
        return shares(piece, *how)

    shares = counting_pieces._shares
    path.write_bytes(COMPRESS.get(suffix, bytes)(b"text that goes away"))
    monkeypatch.setattr(counting_pieces, "_shares", changed)
    said = {"gone": "No such file", "shorter": "shrank from .* to 5 bytes", "a folder": "it is a folder"}[
        change
    ]
    with pytest.raises(DocumentError, match=said):
        count(without_dask, [tmp_path], "byte")
    assert len(tries) == 1


@pytest.mark.parametrize("suffix", [".bz2", ".zst"])
def test_zeros_behind_a_member_are_noticed_where_no_writer_leaves_them(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"tape{suffix}"
    for zeros in (1, 4, 512, corpus.STORED_NBYTES + 512):
        path.write_bytes(COMPRESS[suffix](b"one") + bytes(zeros))
        with pytest.raises(CorpusError, match="or other bytes follow its last whole member"):
            content(path)


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_zeros_behind_a_member_are_padding(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"tape{suffix}"
    zeros = bytes(corpus.STORED_NBYTES + 512)
    path.write_bytes(COMPRESS[suffix](b"one") + bytes(512) + COMPRESS[suffix](b"two") + zeros)
    assert content(path) == b"onetwo"


def test_skippable_frames_and_frames_without_a_length(tmp_path: Path) -> None:
    skipped = (0x184D2A50).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc"
    empty = skipped[:4] + bytes(4)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(b"two")
    path = tmp_path / "frames.zst"
    path.write_bytes(skipped + zstandard.compress(b"one") + empty + skipped + unsized + skipped)
    assert content(path) == b"onetwo"


def wide_zstd() -> bytes:
    wide = zstandard.ZstdCompressionParameters(window_log=decompress.WINDOW_BITS + 1)
    compressor = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    return compressor.compress(b"text") + compressor.flush()


def wide_xz() -> bytes:
    narrow = bytearray(lzma.compress(b"text"))
    narrow[16] = 36  # the dictionary's size in the block's header: 1 GiB, with a checksum of its own
    narrow[20:24] = zlib.crc32(narrow[12:20]).to_bytes(4, "little")
    return bytes(narrow)


@pytest.mark.parametrize(("suffix", "stored"), [(".zst", wide_zstd()), (".xz", wide_xz())])
def test_a_window_that_takes_too_much_memory_is_refused(tmp_path: Path, suffix: str, stored: bytes) -> None:
    """It is sound, so nobody is told to restore it."""
    path = tmp_path / f"wide{suffix}"
    path.write_bytes(stored)
    most = {".zst": 128, ".xz": 256}[suffix]
    with pytest.raises(CorpusError, match=rf"takes more than the {most} MiB allowed.*smaller one") as raised:
        content(path)
    assert "restore" not in str(raised.value)


def test_wide_windows_are_a_setting(without_dask: Client, tmp_path: Path) -> None:
    (tmp_path / "wide.zst").write_bytes(wide_zstd())
    with dask.config.set({"tilewright.window-nbytes": "2 GiB"}):
        found = count_corpus(
            without_dask,
            list_corpus([tmp_path], reading=reading_of()),
            KINDS["byte"],
            cpu_workers(without_dask),
            per_document=False,
            listener=lambda _: None,
        )
    assert found.nbytes == 4


def test_a_dictionary_that_is_needed_is_named(tmp_path: Path) -> None:
    samples = [f"line {i} of many that look alike, {i * 7}\n".encode() for i in range(2000)]
    trained = zstandard.train_dictionary(4096, samples)
    path = tmp_path / "a.zst"
    path.write_bytes(zstandard.ZstdCompressor(dict_data=trained).compress(samples[0]))
    with pytest.raises(CorpusError, match=r"a\.zst .* needs the dictionary .* compress it anew without one"):
        content(path)


@pytest.mark.parametrize("stored_nbytes", [corpus.STORED_NBYTES, 100], ids=["one read", "many reads"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_shrank_or_grew(
    tmp_path: Path,
    rng: np.random.Generator,
    suffix: str,
    stored_nbytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (corpus, zstd):
        monkeypatch.setattr(module, "STORED_NBYTES", stored_nbytes)
    monkeypatch.setattr(zstd, "_spare", [])  # decoders with memory for longer reads
    data = text(rng, 1000)
    stored = COMPRESS[suffix](data)
    path = tmp_path / f"log{suffix}"
    path.write_bytes(stored)
    listed = document(path)
    assert b"".join(filled(reader(listed))) == data
    path.write_bytes(stored + COMPRESS[suffix](b"later"))
    with pytest.raises(DocumentError, match=rf"log{suffix} grew from {len(stored)} to "):
        list(filled(reader(listed)))
    path.write_bytes(stored[:50])
    with pytest.raises(DocumentError, match=rf"log{suffix} shrank from {len(stored)} to 50 bytes"):
        list(filled(reader(listed)))


def memory_to_count_in(paths: list[str], nbytes: int, block: int) -> list[int]:
    """Count the pairs of bytes in compressed files of so many zeros each; by how much this process grows for each."""
    grown = []
    for path in paths:
        found = document(Path(path))
        piece = Piece(0, (found,), 0, found.nbytes)
        count_piece(
            piece, KINDS["byte"], "cpu", False, block, 1
        )  # compiles, and takes the block that the thread keeps
        counts: list[Any] = []

        def bigrams(piece: Piece = piece, counts: list[Any] = counts) -> None:
            counts.append(count_piece(piece, KINDS["bigram"], "cpu", False, block, 1))

        grown.append(grown_by(bigrams))
        ((part, stages),) = counts
        assert part.cells.tolist() == [0]
        assert part.values.tolist() == [nbytes - 1]
        assert part.nbytes == nbytes
        assert stages["read"] > 0 < stages["count"]
    return grown


@pytest.mark.slow
def test_memory_does_not_grow_with_what_is_decompressed(tmp_path: Path) -> None:
    """64 MiB of zeros from a few kilobytes, counted in blocks of 1 MiB. A process is measured as a whole: libzstd, lzma
    and bz2 allocate memory that Python does not know of."""
    paths, zeros, members = [], bytes(2**24), 4
    for suffix, compress in COMPRESS.items():
        paths.append(tmp_path / f"zeros{suffix}")
        paths[-1].write_bytes(compress(zeros) * members)
    grown = in_new_process(memory_to_count_in, list(map(str, paths)), members * len(zeros), 2**20)
    assert {
        suffix: nbytes for suffix, nbytes in zip(COMPRESS, grown, strict=True) if nbytes >= 16 * 2**20
    } == {}
