"""What decompresses Zstandard, by steps or by a loop, against python-zstandard: files, and what it is fed."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.gemm.pipes import pipe_at
from tests.open_files import open_under
from tilewright.pipeline.transfer import zstd, zstd_loop
from tilewright.pipeline.transfer.zstd import Decompress, FrameError, Frames

WINDOW_BITS = 27
WAYS = [zstd.decompress_in_steps, zstd_loop.decompress]
ways = pytest.mark.parametrize("way", WAYS, ids=["steps", "loop"])


def filled(frames: Frames, room: int) -> bytes:
    """What it gives until it has to be fed."""
    target, found = np.empty(room, np.uint8), []
    while count := frames.fill(target):
        found.append(target[:count].tobytes())
    return b"".join(found)


def skippable(nbytes: int) -> bytes:
    return (0x184D2A53).to_bytes(4, "little") + nbytes.to_bytes(4, "little") + bytes(nbytes)


def frame(kind: str, nbytes: int, checksum: bool) -> tuple[bytes, bytes]:
    """A frame, and what it stands for."""
    if kind == "skipped":
        return skippable(nbytes % 50), b""
    rng = np.random.default_rng(nbytes)
    words = {"text": 8, "noise": 256, "zeros": 1}[kind]
    content = rng.integers(0, words, nbytes, np.uint8).tobytes()
    compressor = zstandard.ZstdCompressor(write_checksum=checksum, write_content_size=nbytes % 2 == 0)
    return compressor.compress(content), content


frames_of = st.lists(
    st.tuples(
        st.sampled_from(["text", "noise", "zeros", "skipped"]), st.integers(0, 2**18 + 9), st.booleans()
    ).map(lambda drawn: frame(*drawn)),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("level", [-5, 0, 3, 5, 9, 15, 19, 22])
@pytest.mark.parametrize("nbytes", [1, 2**16, 2**20 + 5, 2**24])
def test_an_encoder_takes_up_what_is_said_beforehand(level: int, nbytes: int) -> None:
    ffi, lib = zstd.library().ffi, zstd.library().lib
    context = ffi.gc(lib.ZSTD_createCCtx(), lib.ZSTD_freeCCtx)
    lib.ZSTD_CCtx_setParameter(context, lib.ZSTD_c_compressionLevel, level)
    lib.ZSTD_CCtx_setPledgedSrcSize(context, nbytes)
    data = ffi.new("char[]", 1), ffi.new("char[]", 100)
    stored = ffi.new("ZSTD_inBuffer *", {"src": data[0], "size": 1, "pos": 0})
    out = ffi.new("ZSTD_outBuffer *", {"dst": data[1], "size": 100, "pos": 0})
    lib.ZSTD_compressStream2(context, out, stored, lib.ZSTD_e_continue)
    taken = lib.ZSTD_sizeof_CCtx(context)
    assert taken <= zstd.encoder_nbytes(level, nbytes) <= 1.5 * taken + 2**20


@given(
    way=st.sampled_from(WAYS),
    made=frames_of,
    step=st.sampled_from([1, 7, 1000, 2**20]),
    room=st.sampled_from([1000, 2**17, 2**20]),
)
def test_what_is_fed_in_any_pieces_is_decompressed(
    way: Decompress, made: list[tuple[bytes, bytes]], step: int, room: int
) -> None:
    """And where frames end is known, of blocks of every kind: compressed, as they are, and of one byte that repeats."""
    stored, content = (b"".join(parts) for parts in zip(*made, strict=True))
    ends = set(np.cumsum([len(one) for one, _ in made]).tolist())
    frames, found, at = Frames(WINDOW_BITS, decompress=way), b"", 0
    while at < len(stored):
        if step == 1 and at > 2000:  # byte by byte takes long, and each kind of header has come
            step = 997
        stop = min(at + step, *(end for end in ends if end > at))
        frames.feed(stored[at:stop])
        found += filled(frames, room)
        at = stop
        assert frames.taken == at
        assert frames.inside == (at not in ends)
        assert frames.whole == (at >= min(ends))
    frames.close()
    assert found == content


@given(
    way=st.sampled_from(WAYS),
    made=frames_of,
    room=st.sampled_from([1000, 2**17, 2**20]),
    memory=st.sampled_from([17, 2**12, 2**20]),
    before=st.sampled_from([0, 1, 5000]),
)
def test_a_file_is_decompressed(
    tmp_path_factory: pytest.TempPathFactory,
    way: Decompress,
    made: list[tuple[bytes, bytes]],
    room: int,
    memory: int,
    before: int,
) -> None:
    """Or a stretch of it, as a chunk lies in a shard."""
    stored, content = (b"".join(parts) for parts in zip(*made, strict=True))
    path = tmp_path_factory.getbasetemp() / "stored.zst"
    path.write_bytes(bytes(before) + stored + b"what was appended since")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zstd, "STORED_NBYTES", memory)
        patch.setattr(zstd, "_spare", [])
        frames = Frames(WINDOW_BITS, str(path), len(stored), before, way)
        assert filled(frames, room) == content
        assert (frames.taken, frames.inside) == (len(stored), False)
        assert frames.ended(len(stored))
        assert not frames.ended(len(stored) + 1)
        frames.close()
        assert frames.fill(np.empty(5, np.uint8)) == 0


@ways
@pytest.mark.parametrize("checksum", [False, True])
def test_all_that_is_fed_comes_out_before_more_is_asked_for(way: Decompress, checksum: bool) -> None:
    """Where what was fed ends with a block, not with the frame: the decoder has taken it all and still has output."""
    compressor = zstandard.ZstdCompressor(write_checksum=checksum).compressobj()
    content = np.random.default_rng(1).integers(0, 8, 10**4, np.uint8).tobytes()
    frames = Frames(WINDOW_BITS, decompress=way)
    for _ in range(3):
        frames.feed(compressor.compress(content) + compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
        assert filled(frames, 1000) == content
        assert frames.inside
    frames.feed(compressor.flush())
    assert filled(frames, 1000) == b""
    assert not frames.inside
    frames.close()


@ways
def test_what_cannot_be_read_has_to_be_fed(way: Decompress, tmp_path: Path) -> None:
    """What is not there, or no file, and a file that ended early: from then on, and no more of the file."""
    stored, content = frame("text", 10**6, True)
    path = tmp_path / "stored.zst"
    with pipe_at(tmp_path / "pipe"):
        for name in (path, tmp_path, tmp_path / "pipe"):
            frames = Frames(WINDOW_BITS, str(name), len(stored), decompress=way)
            assert (filled(frames, 1000), frames.taken) == (b"", 0)
    path.write_bytes(stored[:1234])
    frames = Frames(WINDOW_BITS, str(path), len(stored), decompress=way)
    found = filled(frames, 1000)
    assert (frames.taken, frames.inside) == (1234, True)
    path.write_bytes(stored)
    frames.feed(stored[1234:2000])
    found += filled(frames, 1000)
    assert frames.taken == 2000
    frames.feed(stored[2000:])
    assert found + filled(frames, 1000) == content
    assert not frames.inside


@ways
def test_what_is_no_frame_is_refused(way: Decompress) -> None:
    frames = Frames(WINDOW_BITS, decompress=way)
    frames.feed(b"This was never compressed.")
    with pytest.raises(FrameError, match="Unknown frame descriptor"):
        frames.fill(np.empty(100, np.uint8))
    stored = bytearray(frame("text", 1000, True)[0])
    stored[-1] ^= 1
    frames = Frames(WINDOW_BITS, decompress=way)
    frames.feed(stored)
    with pytest.raises(FrameError, match="checksum"):
        filled(frames, 2000)


@ways
def test_a_decoder_is_used_again_and_forgets_the_file_before(
    way: Decompress, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare: list[zstd.Decoder] = []
    monkeypatch.setattr(zstd, "_spare", spare)
    stored, content = frame("text", 10**5, True)
    first = Frames(WINDOW_BITS, decompress=way)
    first.feed(stored[:5000])  # and no further
    filled(first, 1000)
    assert first.inside
    first.close()
    (kept,) = spare
    second = Frames(WINDOW_BITS, decompress=way)
    assert not spare
    assert second._decoder is kept
    assert not second.inside
    second.feed(stored)
    assert filled(second, 1000) == content
    second.close()
    assert first.fill(np.empty(10, np.uint8)) == 0, "it has nothing to do with the decoder any more"
    first.close()
    assert spare == [kept], "it was given back before"


@ways
def test_windows_are_bounded_and_large_ones_not_kept(
    way: Decompress, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare: list[zstd.Decoder] = []
    monkeypatch.setattr(zstd, "_spare", spare)
    for bits in (20, 25):
        parameters = zstandard.ZstdCompressionParameters(window_log=bits)
        compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        stored = compressor.compress(b"text") + compressor.flush()
        frames = Frames(bits - 1, decompress=way)
        frames.feed(stored)
        with pytest.raises(FrameError, match="too much memory"):
            filled(frames, 10)
        frames = Frames(bits, decompress=way)
        frames.feed(stored)
        assert filled(frames, 10) == b"text"
        frames.close()
        assert len(spare) == (bits == 20)
        spare.clear()


@ways
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux' list of open files")
def test_no_file_stays_open(way: Decompress, tmp_path: Path) -> None:
    stored, content = frame("text", 10**5, True)
    path = tmp_path / "stored.zst"
    path.write_bytes(stored)

    def is_open() -> bool:
        gc.collect()
        return open_under(path) != []

    frames = Frames(WINDOW_BITS, str(path), len(stored), decompress=way)
    assert filled(frames, 10**6) == content
    assert is_open()
    frames.close()
    assert not is_open()
    frames = Frames(WINDOW_BITS, str(path), len(stored), decompress=way)
    assert frames.fill(np.empty(5, np.uint8))
    assert is_open()
    del frames
    assert not is_open()
