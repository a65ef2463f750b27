"""Large compressed files, decompressed in parts by several threads, give what one thread gives: the same bytes, and the
same errors after them."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import dask
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tests.sampling import examples
from tilewright.kernels.records.block_marks import BLOCK, BYTE_INSIDE, END, find_marks
from tilewright.pipeline.events import Event, Notice
from tilewright.pipeline.text.formats import cuts, decompress, parallel

WINDOW = 2**27


def varint(value: int) -> bytes:
    return bytes([value & 0x7F | (0x80 if value > 0x7F else 0)]) + (
        varint(value >> 7) if value > 0x7F else b""
    )


def xz_of(parts: list[bytes]) -> bytes:
    """A stream with a block for each part, whose header has its lengths, as ``xz -T`` writes them; by the format's
    description, with CRC32 as check."""
    flags = b"\0\1"
    out = b"\xfd7zXZ\0" + flags + struct.pack("<I", zlib.crc32(flags))
    records = b""
    for part in parts:
        stored = lzma.compress(part, lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 1}])
        head = b"\xc0" + varint(len(stored)) + varint(len(part)) + b"\x21\1\x16"
        head += bytes(-(len(head) + 1) % 4)
        head = bytes([(len(head) + 1) // 4]) + head
        head += struct.pack("<I", zlib.crc32(head))
        out += head + stored + bytes(-len(stored) % 4) + struct.pack("<I", zlib.crc32(part))
        records += varint(len(head) + len(stored) + 4) + varint(len(part))
    index = b"\0" + varint(len(parts)) + records
    index += bytes(-len(index) % 4)
    index += struct.pack("<I", zlib.crc32(index))
    tail = struct.pack("<I", len(index) // 4 - 1) + flags
    return out + index + struct.pack("<I", zlib.crc32(tail)) + tail + b"YZ"


def bgzip(part: bytes) -> bytes:
    """A block of bgzip: a member whose header has its length."""
    packer = zlib.compressobj(1, zlib.DEFLATED, -15)
    data = packer.compress(part) + packer.flush()
    head = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\6\0BC\2\0" + struct.pack("<H", len(data) + 25)
    return head + data + struct.pack("<II", zlib.crc32(part), len(part))


WRITERS: dict[str, tuple[str, Callable[[list[bytes]], bytes]]] = {
    "members": ("gzip", lambda parts: b"".join(gzip.compress(part, 1) for part in parts)),
    "bgzip": ("gzip", lambda parts: b"".join(map(bgzip, parts))),
    "frames": ("zstd", lambda parts: b"".join(zstandard.compress(part, 1) for part in parts)),
    "skippable frames": (
        "zstd",
        lambda parts: b"".join(
            b"\x50\x2a\x4d\x18\3\0\0\0abc" + zstandard.ZstdCompressor(write_checksum=True).compress(part)
            for part in parts
        ),
    ),
    "streams": ("bzip2", lambda parts: b"".join(bz2.compress(part, 1) for part in parts)),
    "blocks": ("bzip2", lambda parts: bz2.compress(b"".join(parts), 1)),
    "blocks of xz": ("xz", xz_of),
    "streams of xz": ("xz", lambda parts: b"".join(xz_of([part]) + bytes(4) for part in parts)),
    "xz in one block": ("xz", lambda parts: lzma.compress(b"".join(parts))),
}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "PART_NBYTES", 1500)
    monkeypatch.setattr(parallel, "LARGE_NBYTES", 1)


def blocks_of(data: bytes, nbytes: int = 4000) -> Iterator[bytes]:
    return (data[start : start + nbytes] for start in range(0, len(data), nbytes))


def all_of(fill: decompress.Fill, nbytes: int = 100_000) -> tuple[bytes, str]:
    """What comes out, and the error at its end."""
    out, memory = [], np.empty(nbytes, np.uint8)
    try:
        while got := fill(memory):
            out.append(memory[:got].tobytes())
    except decompress.ERRORS as error:
        return b"".join(out), f"{type(error).__name__}: {error}"
    return b"".join(out), ""


def in_parts(codec: str, data: bytes, threads: int = 2) -> tuple[bytes, str]:
    def serial() -> decompress.Fill:
        return decompress.reader(codec, blocks_of(data), WINDOW)

    return all_of(parallel.reader(codec, lambda: blocks_of(data), serial, threads, WINDOW))


def of_one_thread(codec: str, data: bytes) -> tuple[bytes, str]:
    return all_of(decompress.reader(codec, blocks_of(data), WINDOW))


def contents(seed: int, count: int, nbytes: int) -> list[bytes]:
    chance = random.Random(seed)
    return [
        chance.randbytes(chance.randrange(nbytes)) + b"text " * chance.randrange(200) for _ in range(count)
    ]


@pytest.mark.sample(4)
@pytest.mark.parametrize("how", WRITERS)
def test_parts_are_put_together(how: str, small_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, write = WRITERS[how]
    parts = contents(1, 30, 30_000)
    data = write(parts)
    monkeypatch.setattr(cuts, "BLOCK_NBYTES", 120_000)
    assert in_parts(codec, data) == (b"".join(parts), "")
    told: list[str] = []
    alone = parallel.reader(
        codec,
        lambda: blocks_of(data),
        lambda: decompress.reader(codec, blocks_of(data), WINDOW),
        2,
        WINDOW,
        lambda: told.append(how),
    )
    assert all_of(alone) == (b"".join(parts), "")
    assert alone(np.empty(9, np.uint8)) == 0
    assert told == ([how] if how == "xz in one block" else [])
    if told:
        return

    def never() -> decompress.Fill:
        raise AssertionError("it was left to one thread")

    fill = parallel.reader(codec, lambda: blocks_of(data), never, 2, WINDOW)
    assert all_of(fill, 777) == (b"".join(parts), "")


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_damage_is_told_as_by_one_thread(data: st.DataObject) -> None:
    how = data.draw(st.sampled_from(sorted(WRITERS)))
    codec, write = WRITERS[how]
    stored = bytearray(write(contents(data.draw(st.integers(0, 5)), data.draw(st.integers(1, 8)), 4000)))
    for _ in range(data.draw(st.integers(0, 2))):
        kind, place = data.draw(st.sampled_from("fcjz")), data.draw(st.integers(0, len(stored)))
        if kind == "f" and place < len(stored):
            stored[place] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "c":
            del stored[place:]
        elif kind == "j":
            stored += data.draw(st.binary(max_size=20))
        else:
            stored += bytes(data.draw(st.integers(1, 600)))
    before = cuts.PART_NBYTES
    cuts.PART_NBYTES = data.draw(st.sampled_from([200, 1500, 20_000]))
    try:
        found, error = in_parts(codec, bytes(stored))
    finally:
        cuts.PART_NBYTES = before
    expected, told = of_one_thread(codec, bytes(stored))
    assert error == told
    # How much comes before an error depends on how much a library was given at a time.
    assert found == expected or (told and (expected.startswith(found) or found.startswith(expected)))


def test_what_looks_like_a_member_is_none(small_parts: None) -> None:
    """Stored, not compressed, members hold whole gzip files: cuts in their middles are joined again."""
    inner = b"".join(gzip.compress(part) for part in contents(3, 8, 3000))
    data = gzip.compress(inner, 0) + gzip.compress(b"end")
    assert in_parts("gzip", data) == (inner + b"end", "")


def test_a_part_that_holds_too_much_is_left_to_one_thread(
    small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "MOST_NBYTES", 50_000)
    parts = [b"a" * 20_000, bytes(1_000_000), b"b" * 20_000]
    for how in ("members", "frames", "blocks of xz", "streams"):
        codec, write = WRITERS[how]
        assert in_parts(codec, write(parts)) == (b"".join(parts), "")


@given(
    st.binary(min_size=6, max_size=60),
    st.integers(0, 400),
    st.sampled_from([BLOCK, END]),
    st.integers(0, 480),
)
def test_marks_are_found_at_any_bit(data: bytes, at: int, mark: int, stop: int) -> None:
    bits = "".join(f"{byte:08b}" for byte in data)
    bits = (bits[:at] + f"{mark:048b}" + bits[at:])[: 8 * len(data)]
    wanted = [
        (i, value == END)
        for i in range(len(bits) - 47)
        if (value := int(bits[i : i + 48], 2)) in (BLOCK, END)
    ]
    wanted = [one for one in wanted if one[0] < stop] + [one for one in wanted if one[0] >= stop][:1]
    packed = np.frombuffer(int(bits, 2).to_bytes(len(data), "big"), np.uint8)
    places, ends = np.empty(99, np.int64), np.empty(99, np.bool_)
    count = find_marks(packed, 0, stop, BYTE_INSIDE, places, ends)
    assert list(zip(places[:count].tolist(), ends[:count].tolist(), strict=True)) == wanted


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["bgzip", "frames", "blocks", "blocks of xz"])
def test_a_count_of_a_large_file(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the fingerprints that a state takes of what is stored."""
    monkeypatch.setattr(parallel, "LARGE_NBYTES", 2**16)
    codec, write = WRITERS[how]
    chance = random.Random(2)
    parts = [chance.randbytes(60_000) for _ in range(40)]
    suffix = next(ending for ending, name in decompress.SUFFIXES.items() if name == codec)
    (tmp_path / f"a{suffix}").write_bytes(write(parts))
    (tmp_path / "plain").write_bytes(b"".join(parts))
    expected = tw.histogram(tmp_path / "plain", by="bigram", device="cpu").counts
    for _ in range(2):
        found = tw.histogram(tmp_path / f"a{suffix}", by="bigram", device="cpu", state=tmp_path / "state")
        np.testing.assert_array_equal(found.counts, expected)
    monkeypatch.setattr(parallel, "LARGE_NBYTES", 2**40)

    os.utime(tmp_path / f"a{suffix}")
    again = tw.histogram(tmp_path / f"a{suffix}", by="bigram", device="cpu", state=tmp_path / "state")
    np.testing.assert_array_equal(again.counts, expected)


@pytest.mark.parametrize("split", [False, True])
def test_a_large_file_that_one_thread_decompresses_is_told_of(
    split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a run, with what writes files that all threads decompress; not of one thread that is asked for."""
    monkeypatch.setattr(parallel, "LARGE_NBYTES", 2**10)
    monkeypatch.setattr(cuts, "PART_NBYTES", 1500)
    parts = contents(3, 9, 9000)
    paths = [tmp_path / name for name in ("a.gz", "b.gz")]
    for path in paths:
        path.write_bytes(b"".join(map(gzip.compress, parts)) if split else gzip.compress(b"".join(parts)))
    told: list[str] = []

    def listener(event: Event) -> None:
        told.extend([event.message] if isinstance(event, Notice) and "one thread" in event.message else [])

    for threads in (1, 2):
        with dask.config.set({"tilewright.decompress-threads": threads}):
            found = tw.histogram(paths, device="cpu", listener=listener)
        assert found.nbytes == 2 * len(b"".join(parts))
        if split or threads == 1:
            assert not told
    whole = f"{paths[0]} and 1 other: decompressed by one thread: it is no gzip of parts"
    assert [text.startswith(whole) and text.endswith("as bgzip writes them") for text in told] == (
        [] if split else [True]
    )
