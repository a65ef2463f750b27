"""What a GPU's worker counts through its lanes equals what Python counts: in the simulator, one thread at a time."""

from __future__ import annotations

import itertools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.gpu.pretended_driver import BLOCK, Driver, run
from tests.kernels.histograms.naive_tokens import naive_tokens
from tests.pipeline.text.test_counting import dense, documents, naive_counts
from tests.sampling import examples
from tilewright.kernels.duplicates.line_tiles import newlines_nbytes
from tilewright.kernels.histograms.token_kinds import TokenKind, any_kind_named
from tilewright.kernels.histograms.tokens import CODE_MASK, KINDS, character_at
from tilewright.pipeline.advance import watching
from tilewright.pipeline.duplicates import signing
from tilewright.pipeline.duplicates.options import Options, options_of
from tilewright.pipeline.errors import CorpusError
from tilewright.pipeline.text import pieces
from tilewright.pipeline.text.blocks import EXTRA_NBYTES, Block, stream
from tilewright.pipeline.text.corpus import Piece, cut_pieces, list_corpus, share_out
from tilewright.pipeline.text.documents import Counts
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.formats.sources import Remarks, add_remarks, remarks_of
from tilewright.pipeline.text.pieces import _of_separators, count_piece
from tilewright.pipeline.text.whole import documents as whole_documents
from tilewright.pipeline.transfer.file_upload import Upload
from tilewright.pipeline.transfer.lane import Spares, free_device_memory


def written(folder: Path, texts: list[tuple[bytes, bool]]) -> Piece:
    """The texts as files, some of them compressed, in one piece."""
    for i, (data, packed) in enumerate(texts):
        path = folder / f"{i:03}{'.zst' if packed else ''}"
        path.write_bytes(zstandard.compress(data) if packed else data)
    corpus = list_corpus([folder])
    return Piece(0, corpus.documents, 0, corpus.nbytes)


class Buffers:
    """Two buffers in turns, each overwritten as soon as it is handed out: no block may need an older one's bytes."""

    def __init__(self, nbytes: int) -> None:
        self._both = [np.empty(nbytes + EXTRA_NBYTES, np.uint8) for _ in range(2)]
        self._turn = 0

    def __call__(self) -> np.ndarray:
        self._turn ^= 1
        self._both[self._turn][:] = 0xEE
        return self._both[self._turn]


class GivesUp:
    """What a task asks whether it is still needed: not from a time on."""

    def __init__(self, at: int) -> None:
        self.at, self.asked = at, 0

    def __call__(self) -> None:
        self.asked += 1
        if self.asked == self.at:
            raise CancelledError("for the test")


def counted(block: Block, by: str, gap: int) -> Counter[int]:
    """Counts of a block as one text."""
    data, kind = block.data.tobytes(), KINDS[by]
    if block.edges is None and by == "codepoint":  # Python's decoder cannot begin in the middle
        steps = (character_at(data, i, 0, len(data)) for i in range(block.start, block.stop))
        return Counter(step & CODE_MASK for step in steps if step)
    if block.edges is None:
        found = naive_counts(data[: block.stop + kind.after], by)
        found.subtract(naive_counts(data[: block.start + kind.after], by))
        return found
    found = naive_counts(data, by)
    if gap:
        found.subtract(_of_separators(block.data, block.edges, kind).tolist())
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("by", ["byte", "letter", "bigram", "codepoint"])
@settings(max_examples=examples(60))
@given(
    texts=st.lists(st.tuples(documents, st.booleans()), min_size=1, max_size=6),
    nbytes=st.integers(1, 25),
    share=st.integers(1, 40),
)
def test_two_buffers_in_turns_hold_every_token(
    tmp_path_factory: pytest.TempPathFactory,
    by: str,
    texts: list[tuple[bytes, bool]],
    nbytes: int,
    share: int,
) -> None:
    piece = written(tmp_path_factory.mktemp("texts"), texts)
    kind = KINDS[by]
    gap = 1 if kind.after else 0
    shares = list(share_out(piece, share)) if piece.is_plain else [piece]
    if len(shares) == 1 and shares[0].is_part:
        shares = list(share_out(shares[0], 3))  # parts of a part
    total: Counter[int] = Counter()
    length = 0
    for part in shares:
        for block in stream(part, kind, gap, nbytes, Buffers(nbytes)):
            assert len(block.data) <= nbytes + EXTRA_NBYTES
            length += block.nbytes - gap * block.documents
            total.update(counted(block, by, gap))
    assert length == sum(len(data) for data, _ in texts), "margins belong to other parts"
    assert total == sum((naive_counts(data, by) for data, _ in texts), Counter())


@pytest.mark.sample(2)
@pytest.mark.parametrize("by", ["bigram", "codepoint"])
@pytest.mark.parametrize("nbytes", [1, 5, 12, 25])
def test_characters_at_the_cuts_of_a_large_file_are_counted_once(
    by: str, nbytes: int, tmp_path: Path
) -> None:
    """Every cut within a character of each length, in parts of one block and of several."""
    text = ("aé\u20ac\U0001f4a9" * 9).encode()
    (tmp_path / "large").write_bytes(text)
    (document,) = list_corpus([tmp_path]).documents
    for cut in range(1, len(text)):
        total: Counter[int] = Counter()
        for part in (Piece(0, (document,), 0, cut), Piece(0, (document,), cut, len(text))):
            assert part.is_part
            blocks = list(
                stream(part, KINDS[by], 1, nbytes, lambda: np.empty(nbytes + EXTRA_NBYTES, np.uint8))
            )
            assert sum(block.nbytes for block in blocks) == part.nbytes
            for block in blocks:
                total.update(counted(block, by, 1))
        assert total == naive_counts(text, by), cut


def test_shares_of_a_part_hold_its_bytes_once(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(1000))
    (document,) = list_corpus([tmp_path]).documents
    part = Piece(7, (document,), 301, 877)
    shares = list(share_out(part, 100))
    assert [share.first for share in shares] == [0] * 6
    assert shares[0].start == 301
    assert shares[-1].stop == 877
    assert all(0 < share.nbytes <= 100 and share.is_part for share in shares)
    assert all(a.stop == b.start for a, b in itertools.pairwise(shares))


@pytest.mark.sample(3)
@pytest.mark.simulator
@pytest.mark.parametrize(
    "by", [by if by != "ascii" else pytest.param(by, marks=pytest.mark.slow) for by in KINDS]
)
@pytest.mark.parametrize("per_document", [False, True])
@settings(max_examples=examples(6))
@given(
    texts=st.lists(st.tuples(documents, st.booleans()), min_size=1, max_size=4),
    nbytes=st.integers(1, 25),
)
def test_lanes_count_in_the_simulator(
    tmp_path_factory: pytest.TempPathFactory,
    by: str,
    per_document: bool,
    texts: list[tuple[bytes, bool]],
    nbytes: int,
) -> None:
    piece = written(tmp_path_factory.mktemp("texts"), texts)
    part, stages = count_piece(piece, KINDS[by], "cuda", per_document, nbytes, 1)
    bins = KINDS[by].bins
    counts = np.zeros((len(texts) if per_document else 1, bins), np.int64)
    counts.reshape(-1)[part.cells] = part.values
    expected = np.stack([dense(naive_counts(data, by), bins) for data, _ in texts])
    np.testing.assert_array_equal(counts, expected if per_document else expected.sum(axis=0, keepdims=True))
    assert part.nbytes == sum(len(data) for data, _ in texts)
    assert set(stages) == {"read", "count"}


@pytest.mark.simulator
def test_a_failure_leaves_lanes_and_tallies_to_the_next_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilewright.pipeline.text.gpu import lanes

    (tmp_path / "packed").mkdir()
    packed = written(tmp_path / "packed", [(b"a compressed document, " * 30, True), (b"and another", True)])

    for name in "ab":
        (tmp_path / name).write_bytes(b"text" * 50)
    corpus = list_corpus([tmp_path / "a", tmp_path / "b"])
    piece = Piece(0, corpus.documents, 0, corpus.nbytes)
    os.truncate(tmp_path / "b", 30)
    with pytest.raises(CorpusError, match="b shrank from 200 to 30 bytes"):
        count_piece(piece, KINDS["byte"], "cuda", False, 64, 1)
    made = lanes._spare_lanes.kept(), lanes._spare_tallies.kept(256)
    assert len(made[0]) == len(made[1]) == 1
    for per_document in (False, True):
        give_up = GivesUp(at=3)
        with monkeypatch.context() as patch:
            patch.setattr(pieces, "end_if_given_up", lambda give_up=give_up: give_up)
            with pytest.raises(CancelledError):
                count_piece(packed, KINDS["byte"], "cuda", per_document, 64, 1)
        assert give_up.asked == 3
    (tmp_path / "b").write_bytes(b"TEXT" * 50)
    os.utime(tmp_path / "b", ns=(0, corpus.documents[1].modified_ns))  # as it was when it was listed
    part, _ = count_piece(piece, KINDS["byte"], "cuda", False, 64, 1)
    assert dict(zip(part.cells.tolist(), part.values.tolist(), strict=True)) == naive_counts(
        b"textTEXT" * 50, "byte"
    )
    assert (lanes._spare_lanes.kept(), lanes._spare_tallies.kept(256)) == made


@pytest.mark.simulator
def test_lanes_and_tallies_that_were_freed_are_made_again(tmp_path: Path) -> None:
    from tilewright.pipeline.text.gpu import lanes

    piece = written(tmp_path, [(b"a compressed document, " * 30, True)])
    counts = []
    for _ in range(2):
        counts.append(count_piece(piece, KINDS["byte"], "cuda", False, 64, 1)[0].values.tolist())
        for spares, of in ((lanes._spare_lanes, ()), (lanes._spare_tallies, (256,))):
            assert spares.kept(*of)
            assert spares.free() >= 1
            assert not spares.kept(*of)
    assert counts[0] == counts[1]


@pytest.mark.simulator
@pytest.mark.parametrize("by", ["word", "line", "ngram:3:character", "ngram:2:byte"])
@settings(max_examples=examples(6), deadline=None)
@given(
    texts=st.lists(documents, min_size=1, max_size=3), nbytes=st.integers(3, 60), longest=st.integers(12, 20)
)
def test_parts_of_texts_hold_every_token(
    tmp_path_factory: pytest.TempPathFactory, by: str, texts: list[bytes], nbytes: int, longest: int
) -> None:
    """Pieces of whole documents and parts of one, brought to the device by the loops; with tokens that are longer than
    what lies there behind a part."""
    from tilewright.kernels.histograms import device_token_counting
    from tilewright.pipeline.text.gpu import lanes

    kind = any_kind_named(by)
    assert isinstance(kind, TokenKind)
    driver, found = Driver(), Counter[bytes]()
    piece = written(tmp_path_factory.mktemp("texts"), [(data, False) for data in texts])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "address", lambda memory: memory._ary.ctypes.data)
        patch.setattr(
            lanes, "Upload", lambda wanted, _, threads: Upload(wanted, BLOCK, threads, driver.functions)
        )
        patch.setattr(lanes, "AFTER", longest + 32)
        patch.setattr(lanes, "DeviceCounter", partial(device_token_counting.DeviceCounter, longest=longest))
        tally = lanes.TokenTally(kind)
        counted_nbytes = 0
        for part in cut_pieces(piece.documents, nbytes):
            begin, end, place = lanes._spans(part, kind)[-1]
            text = lanes.Text(
                part, kind, lanes.cuda.to_device(np.full(place + end - begin + 1, 97, np.uint8))
            )
            upload = text.upload(2, 1)
            run(upload, 2)
            assert upload.failed() == []
            counted_nbytes += text.count_tokens(tally)
        counts = tally.counter.take()
    for token, count in zip(counts.tokens, counts.counts.tolist(), strict=True):
        found[token] += count
    assert counted_nbytes == sum(map(len, texts))
    assert found == sum((naive_tokens(data, kind) for data in texts), Counter())


@pytest.mark.simulator
@pytest.mark.parametrize("lane_nbytes", [64, 2**10])
@pytest.mark.parametrize("threads", [1, 3])
def test_documents_are_signed_through_lanes_as_by_cores(
    lane_nbytes: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and lines, plain and compressed, some longer than a block and some that no table folds."""
    from tilewright.pipeline.duplicates import on_gpu
    from tilewright.pipeline.text.gpu import lanes

    texts = [
        (b"One two three four five six seven\nTWO three four\n\n" * 3, False),
        ("e\u0301n deux trois\n".encode() + b"x" * 200 + b" y z\n", True),
        (b"", False),
        (b"a b c d e f g", True),
    ]
    piece = written(tmp_path, texts)
    for module in (on_gpu, signing):
        monkeypatch.setattr(module, "LARGE_BLOCK_NBYTES", lane_nbytes)
    monkeypatch.setattr(lanes, "_spare_lanes", Spares(lanes.CountingLane))
    pool = ThreadPoolExecutor(1)
    monkeypatch.setattr(pieces, "text_threads", lambda threads: pool)
    monkeypatch.setattr(whole_documents, "LEAST_SHARE_NBYTES", 1)
    for split_on in (None, "line"):
        reading = Reading(split_on=split_on)
        asked = options_of(
            threshold=0.8, shingle="word", ngram=2, casefold=True, normalise="NFC", num_perm=6, bands=2, rows=3,
            seed=1, hash="xxh32", scheme="affine32", pairs="all", signatures=True,
        )  # fmt: skip
        found, _ = signing.sign_piece(piece, asked, reading, "stop", "cuda", threads)
        wanted, _ = signing.sign_piece(piece, asked, reading, "stop")
        for name in ("digests", "nbytes", "shingled", "keys", "signatures"):
            np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), name)
        assert (found.rows is None) == (wanted.rows is None)
        if found.rows is not None and wanted.rows is not None:
            assert found.rows.to_json() == wanted.rows.to_json()
        assert (found.others, wanted.others) == (1, 0)
    pool.shutdown()


LINES_OF_FILES = (
    b"One two three four five six seven\r\nTWO three four\n\n" * 3,
    b"no newline, and a return\r",
    b"\nwhich is not of this line\r\r\n",
    b"",
    "e\u0301n deux trois\n".encode() + b"x" * 200 + b" y z\n\r\n",
    b"\n",
    b"a b c d e f g",
)


@dataclass(eq=False)
class Chunks:
    """What is seen of lines that are signed, or of which a field is counted, by chunks."""

    taken: list[object] = field(default_factory=list)
    """What `sign_lines` and `count_fields` have returned."""
    brought: list[int] = field(default_factory=list)
    """The blocks of each chunk that was brought."""
    cleared: list[list[object]] = field(default_factory=list)
    """Which of ``signers`` still lived, each time that Numba was to free what it had queued."""
    signers: list[weakref.ref[Any]] = field(default_factory=list)
    """That the test has put here."""

    def kept(self, asked: Options) -> tuple[int, int]:
        """How many signers and texts are spare."""
        from tilewright.pipeline.duplicates import lines_on_gpu
        from tilewright.pipeline.text.gpu import lanes

        return len(lines_on_gpu._spare_signers.kept(asked.signing)), len(lanes._spare_texts.kept())


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Chunks]:
    """Lines go by chunks, one at a time, to memory that a pretended driver copies to."""
    from tilewright.pipeline.duplicates import lines_on_gpu
    from tilewright.pipeline.text.gpu import chunks as gpu_chunks
    from tilewright.pipeline.text.gpu import fields, lanes, room

    driver, seen, sign_lines = Driver(), Chunks(), lines_on_gpu.sign_lines

    def moved(upload: Upload, run_on_threads: object, threads: int) -> float:
        run(upload, 2)
        seen.brought.append(upload.blocks)
        return 0.0

    def signed(*given: Any, **named: Any) -> Any:
        seen.taken.append(sign_lines(*given, **named))
        return seen.taken[-1]

    def seeing(count: Callable[..., Any]) -> Callable[..., Any]:
        def counted_fields(*given: Any) -> Any:
            seen.taken.append(count(*given))
            return seen.taken[-1]

        return counted_fields

    def clear() -> None:
        seen.cleared.append([each for each in seen.signers if each() is not None])

    memory = SimpleNamespace(deallocations=SimpleNamespace(clear=clear))
    monkeypatch.setattr(type(lanes.cuda.current_context()), "memory_manager", memory, raising=False)
    monkeypatch.setattr(lanes._spare_texts, "_kept", {})
    monkeypatch.setattr(lines_on_gpu._spare_signers, "_kept", {})
    monkeypatch.setattr(fields._spare_finders, "_kept", {})
    monkeypatch.setattr(gpu_chunks.file_upload, "available", lambda: True)
    monkeypatch.setattr(lines_on_gpu, "sign_lines", signed)
    monkeypatch.setattr(fields, "count_fields", seeing(fields.count_fields))
    monkeypatch.setattr(fields, "count_field_words", seeing(fields.count_field_words))
    monkeypatch.setattr(gpu_chunks, "_moved", moved)
    monkeypatch.setattr(
        gpu_chunks, "Upload", lambda wanted, _, threads: Upload(wanted, BLOCK, threads, driver.functions)
    )
    monkeypatch.setattr(gpu_chunks, "CHUNKS", 1)
    monkeypatch.setattr(room, "LEAST_NBYTES", 1)
    monkeypatch.setattr(lines_on_gpu, "MOST_SIGNED", 4)
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(gpu_chunks, "pool", lambda: pool)
        yield seen
    gpu_chunks.no_room.clear()


def by_lines(shingle: str = "word") -> Options:
    return options_of(
        threshold=0.8, shingle=shingle, ngram=2, casefold=True, normalise="NFC", num_perm=6, bands=2, rows=3,
        seed=1, hash="xxh32", scheme="affine32", pairs="all", signatures=True,
    )  # fmt: skip


@pytest.mark.simulator
@pytest.mark.parametrize("shingle", ["word", "character"])
@pytest.mark.parametrize(("chunk_nbytes", "look_nbytes"), [(1, 3), (50, 7), (2**20, 2**16)])
def test_lines_of_large_files_are_signed_as_by_cores(
    shingle: str,
    chunk_nbytes: int,
    look_nbytes: int,
    tmp_path: Path,
    chunks: Chunks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files that are cut behind lines, some in chunks with others; batches of few lines; what no table folds."""
    from tilewright.pipeline.duplicates import lines_on_gpu
    from tilewright.pipeline.text.gpu import chunks as gpu_chunks

    piece = written(tmp_path, [(data, False) for data in LINES_OF_FILES])
    monkeypatch.setattr(gpu_chunks, "CHUNK_NBYTES", chunk_nbytes)
    monkeypatch.setattr(gpu_chunks, "LOOK_NBYTES", look_nbytes)
    asked = by_lines(shingle)
    reading = Reading(split_on="line")
    found, stages = signing.sign_piece(piece, asked, reading, "stop", "cuda", 2)
    wanted, _ = signing.sign_piece(piece, asked, reading, "stop")
    assert chunks.brought
    assert set(stages) == {"read", "sign"}
    for name in ("digests", "nbytes", "shingled", "keys", "signatures"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), name)
    assert found.rows is not None
    assert wanted.rows is not None
    assert found.rows.to_json() == wanted.rows.to_json()
    assert (found.others, wanted.others) == (1, 0)
    # A line that is too long, and a file that cannot be read any more, are for those who read block by block.
    assert chunks.taken.pop() is not None
    monkeypatch.setattr(gpu_chunks, "MOST_LINE_NBYTES", 100)
    again, _ = signing.sign_piece(piece, asked, reading, "stop", "cuda", 1)
    assert chunks.taken == [None]
    assert chunks.kept(asked) == (0, 0)
    assert len(chunks.cleared) == 1
    np.testing.assert_array_equal(again.digests, wanted.digests)
    np.testing.assert_array_equal(again.keys, wanted.keys)
    assert (found.remarks, wanted.remarks) == ({}, {})
    long = [
        document.name
        for document, data in zip(piece.documents, LINES_OF_FILES, strict=True)
        if any(len(line) > 100 for line in data.split(b"\n"))
    ]
    (told,) = again.remarks.items()
    assert told == (lines_on_gpu.by_blocks(gpu_chunks.TooLongError.why), (1, long[0], 0))
    sentence = (
        f"{long[0]}: read block by block for the GPU, more slowly, with all that came in a piece with it"
    )
    assert remarks_of(again.remarks)[0].startswith(f"{sentence}: a line of more than 4 MiB")
    monkeypatch.setattr(gpu_chunks, "MOST_LINE_NBYTES", 2**22)
    os.truncate(tmp_path / "000", 10)
    with pytest.raises(CorpusError, match="000 shrank"):
        signing.sign_piece(piece, asked, reading, "stop", "cuda", 1)


@pytest.mark.simulator
@pytest.mark.parametrize(("most", "refused"), [(4, False), (3, True), (1, True)])
def test_chunks_of_too_many_lines_are_read_block_by_block(
    most: int, refused: bool, tmp_path: Path, chunks: Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two newlines, and a line that needs none. Of both files, the longest is named."""
    from tilewright.pipeline.duplicates.lines_on_gpu import by_blocks
    from tilewright.pipeline.text.gpu import chunks as gpu_chunks
    from tilewright.pipeline.text.gpu import room

    monkeypatch.setattr(room, "MOST_LINES", most)
    piece = written(tmp_path, [(b"a", False), (b"one two\n\nfive six", False)])
    asked, reading = by_lines(), Reading(split_on="line")
    found, _ = signing.sign_piece(piece, asked, reading, "stop", "cuda", 1)
    wanted, _ = signing.sign_piece(piece, asked, reading, "stop")
    assert [each is None for each in chunks.taken] == [refused]
    told = {by_blocks(gpu_chunks.TooManyError.why): (1, piece.documents[1].name, 0)}
    assert found.remarks == (told if refused else {})
    assert not wanted.remarks
    assert chunks.kept(asked) == ((0, 0) if refused else (1, 1))
    np.testing.assert_array_equal(found.digests, wanted.digests)
    np.testing.assert_array_equal(found.signatures, wanted.signatures)


@pytest.mark.simulator
def test_lines_of_a_task_that_is_given_up_leave_their_memory_to_the_next(
    tmp_path: Path, chunks: Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before its second chunk, and nothing is read block by block."""
    from tilewright.pipeline.text.gpu import chunks as gpu_chunks

    give_up = GivesUp(at=2)
    monkeypatch.setattr(gpu_chunks, "CHUNK_NBYTES", 1)
    piece = written(tmp_path, [(b"one two\nthree four\nfive six\n", False)])
    asked, reading = by_lines(), Reading(split_on="line")
    with monkeypatch.context() as patch:
        patch.setattr(signing, "end_if_given_up", lambda: give_up)
        with pytest.raises(CancelledError, match="for the test"):
            signing.sign_piece(piece, asked, reading, "stop", "cuda", 1)
    assert (give_up.asked, len(chunks.brought)) == (2, 1)
    assert chunks.taken == []
    assert chunks.kept(asked) == (1, 1)
    assert chunks.cleared == []
    found, _ = signing.sign_piece(piece, asked, reading, "stop", "cuda", 1)
    wanted, _ = signing.sign_piece(piece, asked, reading, "stop")
    np.testing.assert_array_equal(found.digests, wanted.digests)
    np.testing.assert_array_equal(found.signatures, wanted.signatures)
    assert len(chunks.taken) == 1
    assert chunks.taken[0] is not None
    assert chunks.kept(asked) == (1, 1)


@pytest.mark.simulator
def test_lines_for_which_there_is_no_room_leave_none_of_it_taken(
    tmp_path: Path, chunks: Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who read block by block find it free, and it is said once in a job."""
    from tilewright.pipeline.duplicates import lines_on_gpu

    def no_room(signer: object, text: object, lines: object) -> None:
        chunks.signers.append(weakref.ref(signer))
        raise MemoryError("no room\nfor digests")

    piece, asked, reading = (
        written(tmp_path, [(b"one two\nthree four\n", False)]),
        by_lines(),
        Reading(split_on="line"),
    )
    wanted, _ = signing.sign_piece(piece, asked, reading, "stop")
    signing.sign_piece(piece, asked, reading, "stop", "cuda", 1)
    assert chunks.kept(asked) == (1, 1)
    told: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(lines_on_gpu._ChunkSigner, "digests", no_room)
        for turn in range(2):
            found, _ = signing.sign_piece(piece, asked, reading, "stop", "cuda", 1)
            assert len(found.remarks) == (turn == 0)
            told += remarks_of(found.remarks)
            np.testing.assert_array_equal(found.signatures, wanted.signatures)
            np.testing.assert_array_equal(found.digests, wanted.digests)
            assert chunks.kept(asked) == (0, 0)
    assert chunks.taken[1:] == [None, None]
    assert len(chunks.signers) == 1, "the second piece has not tried"
    assert chunks.cleared == [[]], "nothing held the memory of the chunk any more"
    (sentence,) = told
    assert sentence.startswith(
        f"{piece.documents[0].name}: read block by block for the GPU, more slowly, with all pieces"
    )
    assert "in the memory of the host (no room for digests)" in sentence
    free_device_memory()  # another job
    signing.sign_piece(piece, asked, reading, "stop", "cuda", 1)
    assert chunks.taken[-1] is not None


DEEP = b'{"a": ' + b"[" * 70 + b"]" * 70 + b', "text": "deep"}\n'
FIELDS_OF_FILES = (
    b'\xef\xbb\xbf{"text": "with a mark\\n", "n": 1}\r\n\r\n{"n": {"text": "deeper"}}\n{"text": null}\n',
    b'{"text": "no newline \\ud83d\\ude00 \\ud83d \\u0000"}',
    b'\n \t\n{"text": "", "text": "twice \xff\xe4\xbd"}\n' + DEEP,
    b"",
    b'{"te\\u0078t": "by another key"}\n{"text": "\xe4\xbd", "text": ""}\n{"text": "\xa0"}\n{"text":"B"}',
    b"\n",
    b'{"a": [{"text": "x"}, "\\"", -1.5e3], "text": "' + b"long " * 30 + b'"}\n',
)
BY_DEVICE: dict[str, Any] = {"block_nbytes": 1000, "threads": 2, "reading": Reading(fields=("text",))}


def json_lines(folder: Path, files: tuple[bytes, ...]) -> Piece:
    for number, data in enumerate(files):
        (folder / f"{number}.jsonl").write_bytes(data)
    corpus = list_corpus([folder], reading=Reading(fields=("text",)))
    return Piece(0, corpus.documents, 0, corpus.nbytes)


@pytest.mark.simulator
@pytest.mark.parametrize("by", KINDS)
@pytest.mark.parametrize(("chunk_nbytes", "look_nbytes"), [(1, 3), (50, 7), (2**20, 2**16)])
def test_a_field_of_large_files_is_counted_as_by_cores(
    by: str,
    chunk_nbytes: int,
    look_nbytes: int,
    tmp_path: Path,
    chunks: Chunks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files that are cut behind lines, some in chunks with others, and lines that no GPU decides."""
    from tilewright.pipeline.text.gpu import chunks as gpu_chunks
    from tilewright.pipeline.text.gpu import room
    from tilewright.pipeline.text.gpu.fields import BY_CORES

    piece, kind = json_lines(tmp_path, FIELDS_OF_FILES), KINDS[by]
    monkeypatch.setattr(room, "CHUNK_NBYTES", chunk_nbytes)
    monkeypatch.setattr(gpu_chunks, "LOOK_NBYTES", look_nbytes)
    told: list[int] = []
    lengths = {document.path: document.nbytes for document in piece.documents}
    with watching(lengths, told.append, clock=map(float, itertools.count(step=2)).__next__):
        found, stages = count_piece(piece, kind, "cuda", per_document=False, **BY_DEVICE)
    assert piece.nbytes - len(b"\xef\xbb\xbf") <= told[-1] <= piece.nbytes
    wanted, _ = count_piece(piece, kind, "cpu", per_document=False, **BY_DEVICE)
    assert chunks.taken.pop() is not None
    assert len(chunks.brought) == (1 if chunk_nbytes > 1000 else len(chunks.brought))
    assert set(stages) == {"read", "count"}
    np.testing.assert_array_equal(found.cells, wanted.cells)
    np.testing.assert_array_equal(found.values, wanted.values)
    assert (found.nbytes, found.documents) == (wanted.nbytes, wanted.documents)
    assert found.lost == (None if by == "codepoint" else wanted.lost)
    assert found.remarks.pop(BY_CORES).records == 2
    assert found.remarks == wanted.remarks
    assert len(wanted.remarks) == 3


@pytest.mark.simulator
@pytest.mark.parametrize(("chunk_nbytes", "most_nbytes"), [(1, 2**30), (50, 100), (2**20, 2**30)])
@pytest.mark.parametrize("folded", [False, True])
def test_words_of_a_field_of_large_files_are_counted_as_by_cores(
    chunk_nbytes: int,
    most_nbytes: int,
    folded: bool,
    tmp_path: Path,
    chunks: Chunks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Texts of several chunks are counted together; some do not fit with others; some words are long ones."""
    from tilewright.kernels.histograms import device_token_counting
    from tilewright.pipeline.text.gpu import fields, lanes, room
    from tilewright.pipeline.text.gpu.fields import BY_CORES

    files = (
        *FIELDS_OF_FILES,
        b'{"text": "Stra\xc3\x9fe a"}\n{"text": "b \\u0000c"}\n{"text": "'
        + b"long" * 10
        + b'"}\n{"text": "d"}',
        b'{"text": "na\\u00efve"}\n{"text": "\xe4\xbd"}\n{"text": "\xa0 A"}',
    )
    piece, kind = json_lines(tmp_path, files), any_kind_named("word", casefold=folded)
    monkeypatch.setattr(room, "CHUNK_NBYTES", chunk_nbytes)
    monkeypatch.setattr(fields, "MOST_WORDS_NBYTES", most_nbytes)
    counter = partial(device_token_counting.DeviceCounter, longest=12)
    monkeypatch.setattr(lanes, "DeviceCounter", counter)
    found, stages = count_piece(piece, kind, "cuda", per_document=False, **BY_DEVICE)
    wanted, _ = count_piece(piece, kind, "cpu", per_document=False, **BY_DEVICE)
    assert chunks.taken.pop() is not None
    assert set(stages) == {"read", "count"}
    assert words_in(found) == words_in(wanted)
    assert {b"deep", b"long" * 10} <= set(words_in(found))
    for name in ("nbytes", "documents", "lost"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert found.remarks.pop(BY_CORES).records == 2
    assert found.remarks == wanted.remarks


def words_in(counts: Counts) -> Counter[bytes]:
    words: Counter[bytes] = Counter()
    assert counts.tokens is not None
    for cell, value in zip(counts.cells.tolist(), counts.values.tolist(), strict=True):
        words[counts.tokens[cell]] += value
    return words


@pytest.mark.simulator
@pytest.mark.parametrize(
    "line",
    [
        b'{"text": 1}', b'{"text": ["a"]}', b'{"text": "a"', b'{"text": "\\x"}', b"1", b'{"text": "\t"}',
        b'{"text": "a"} {}', b'{"te\\u0078t": 1}', DEEP.replace(b"]", b"}").strip(), b'{"a": "b"}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("on_error", ["stop", "report"])
def test_what_is_wrong_with_a_line_the_cores_say(
    line: bytes, on_error: str, tmp_path: Path, chunks: Chunks
) -> None:
    """Also where the lines before were counted already, and where such lines are left out."""
    from tilewright.pipeline.text.gpu import fields

    alone = line == b'{"a": "b"}'  # no record of a file has the field
    files = (b'{"text": "a good one"}\n' * 3, line if alone else b'{"text": "one"}\n\n' + line + b"\n{}")
    piece = json_lines(tmp_path, files)
    reading = Reading(fields=("text",), leaves_out=on_error == "report")
    options = BY_DEVICE | {"reading": reading, "on_error": on_error}
    if on_error == "stop":
        with pytest.raises(CorpusError) as wanted:
            count_piece(piece, KINDS["bigram"], "cpu", per_document=False, **options)
        with pytest.raises(CorpusError) as found:
            count_piece(piece, KINDS["bigram"], "cuda", per_document=False, **options)
        assert str(found.value) == str(wanted.value)
    else:
        left, _ = count_piece(piece, KINDS["bigram"], "cpu", per_document=False, **options)
        again, _ = count_piece(piece, KINDS["bigram"], "cuda", per_document=False, **options)
        np.testing.assert_array_equal(again.cells, left.cells)
        np.testing.assert_array_equal(again.values, left.values)
        told = again.remarks.pop(fields.left_to_cores(fields.FAULT), None)
        assert (told is None) == bool(left.bad)
        assert told is None or told == (1, piece.documents[1].name, 0)
        for name in ("nbytes", "documents", "lost", "remarks", "left_out", "bad"):
            assert getattr(again, name) == getattr(left, name), name
        assert left.left_out or left.bad
    assert chunks.taken[0] is None


@pytest.mark.simulator
@pytest.mark.parametrize("lines", [0, 1, 33, 64, 65, 1025])
def test_chunks_of_nothing_but_newlines_take_no_more_than_is_planned(
    lines: int, tmp_path: Path, chunks: Chunks
) -> None:
    """Of the device's memory, in which there are places for twice as many lines as there were bytes in a plan."""
    from tilewright.kernels.records.span_numbers import numbers_nbytes
    from tilewright.pipeline.text.gpu import fields, lanes, room

    record = b'{"text": "a"}'
    piece = json_lines(tmp_path, (record + b"\n" * lines,))
    found, _ = count_piece(piece, KINDS["byte"], "cuda", per_document=False, **BY_DEVICE)
    assert found.nbytes == 1
    assert chunks.taken.pop() is not None
    (finder,) = fields._spare_finders.kept("text")
    texts = sum(each.size for each in lanes._spare_texts.kept())
    newlines = finder._rooms.nbytes - numbers_nbytes(1)
    assert newlines >= 8 * lines
    assert newlines <= newlines_nbytes(piece.nbytes, room.MOST_LINES)
    assert texts + finder._rooms.nbytes <= room.fields_nbytes([piece], 1)
    lanes._spare_texts.free()
    with lanes.borrowed_text(piece, KINDS["bigram"]):
        pass
    (text,) = lanes._spare_texts.kept()
    assert piece.nbytes <= text.size <= room.whole_nbytes(piece.nbytes)


@pytest.mark.simulator
@pytest.mark.parametrize("by", ["byte", "word"])
def test_fields_that_no_gpu_decides_are_read_by_the_cores(
    by: str,
    tmp_path: Path,
    chunks: Chunks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More lines than are listed; lines that are too long, or too many; what is not read; and where there is no room.
    It is told of the file for which they read all."""
    from tilewright.kernels.records.device_json import TextFinder
    from tilewright.pipeline.text.gpu import chunks as gpu_chunks
    from tilewright.pipeline.text.gpu import fields, room

    files = (b'{"text": "b"}\n', b'{"te\\u0078t": "a"}\n' * 5)
    piece, kind = json_lines(tmp_path, files), any_kind_named(by)
    wanted, _ = count_piece(piece, kind, "cpu", per_document=False, **BY_DEVICE)
    assert not wanted.remarks

    remarks: list[Remarks] = []

    def count(*why: str, of: int = 1) -> None:
        found, _ = count_piece(piece, kind, "cuda", per_document=False, **BY_DEVICE)
        told = map(fields.left_to_cores, why)
        assert found.remarks == dict.fromkeys(told, (1, piece.documents[of].name, 0))
        remarks.append(found.remarks)
        np.testing.assert_array_equal(found.values, wanted.values)
        np.testing.assert_array_equal(found.cells, wanted.cells)
        assert chunks.taken.pop() is None

    def no_room(*given: object, **named: object) -> None:
        raise MemoryError("no room\nfor texts")

    count(fields.UNUSUAL)
    count(fields.UNUSUAL)
    add_remarks(*remarks)
    assert remarks_of(remarks[0]) == [
        f"{piece.documents[1].name} and 1 other: {fields.left_to_cores(fields.UNUSUAL)}"
    ]
    monkeypatch.setattr(fields, "MOST_LINES", 4)
    monkeypatch.setattr(gpu_chunks, "MOST_LINE_NBYTES", 15)
    monkeypatch.setattr(gpu_chunks, "LOOK_NBYTES", 1)
    monkeypatch.setattr(room, "CHUNK_NBYTES", 1)
    count(gpu_chunks.TooLongError.why)
    monkeypatch.setattr(room, "CHUNK_NBYTES", 2**20)
    count(gpu_chunks.TooManyError.why)
    with monkeypatch.context() as patch:
        patch.setattr(Upload, "failed", lambda upload: [0])
        count(gpu_chunks.NotReadError.why, of=0)
    monkeypatch.setattr(TextFinder, "find", no_room)
    found, _ = count_piece(piece, kind, "cuda", per_document=False, **BY_DEVICE)
    (told,) = remarks_of(found.remarks)
    assert told.startswith(
        f"{piece.documents[0].name}: left to the cores of the GPU's worker, with all pieces"
    )
    assert "no room for chunks of 124 MiB in the memory of the host (no room for texts)" in told
    assert chunks.taken.pop() is None
    assert gpu_chunks.no_room.is_set()
    count()


@pytest.mark.simulator
@pytest.mark.parametrize(
    ("reading", "by"),
    [
        (Reading(fields=("text", "n")), "byte"),
        (Reading(fields=("text",), id_field="n"), "byte"),
        (Reading(fields=("text",), encoding="latin-1"), "byte"),
        (Reading(fields=("text",)), "line"),
        (Reading(fields=("text",)), "ngram:2"),
    ],
)
def test_what_else_is_read_by_the_cores(reading: Reading, by: str, tmp_path: Path, chunks: Chunks) -> None:
    piece = json_lines(tmp_path, (b'{"text": "a", "n": "b"}\n',))
    found, _ = count_piece(
        piece, any_kind_named(by), "cuda", per_document=False, **BY_DEVICE | {"reading": reading}
    )
    wanted, _ = count_piece(
        piece, any_kind_named(by), "cpu", per_document=False, **BY_DEVICE | {"reading": reading}
    )
    np.testing.assert_array_equal(found.values, wanted.values)
    assert chunks.taken == []


@pytest.mark.simulator
def test_documents_for_which_a_gpu_has_no_room_are_signed_by_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told of the first file of a share, once, however many blocks there are."""
    from tilewright.kernels.duplicates.device_signing import DeviceSigner
    from tilewright.pipeline.duplicates.on_gpu import NO_ROOM

    def no_room(*given: object, **named: object) -> None:
        raise MemoryError

    piece = written(tmp_path, [(b"one two three", False), (b"four five", True)])
    asked = options_of(
        threshold=0.8, shingle="word", ngram=2, casefold=False, normalise=None, num_perm=6, bands=2, rows=3,
        seed=1, hash="sha1", scheme="affine32", pairs="all", signatures=True,
    )  # fmt: skip
    wanted, _ = signing.sign_piece(piece, asked, Reading(), "stop")
    monkeypatch.setattr(DeviceSigner, "_sign", no_room)
    found, _ = signing.sign_piece(piece, asked, Reading(), "stop", "cuda", 1)
    np.testing.assert_array_equal(found.signatures, wanted.signatures)
    assert found.remarks == {NO_ROOM: (1, piece.documents[0].name, 0)}
    assert not wanted.remarks
