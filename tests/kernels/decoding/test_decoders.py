"""The device code that decodes Zstandard and LZ4, compiled for the CPU with every access checked, against libzstd and
LZ4: frames of every kind, and damaged ones, of which none may be taken for sound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numcodecs.lz4
import numpy as np
import pytest
import zstandard

from tilewright.kernels.decoding import lz4, zstd_host
from tilewright.kernels.decoding import zstd_tables as columns
from tilewright.kernels.decoding.numbers import Numbers
from tilewright.pipeline.decoding import coding, headers
from tilewright.pipeline.decoding.coding import Coding
from tilewright.pipeline.decoding.tables import Areas, tables_of, words_for
from tilewright.pipeline.transfer.file_rectangles import StoredChunk

TEXT = Path(__file__).read_bytes()
LEVELS = (-7, 1, 3, 9, 19)


def contents(rng: np.random.Generator, nbytes: int) -> list[bytes]:
    """What real chunks hold: floats, small integers, text, sums, few values, nothing."""
    text = TEXT * (nbytes // len(TEXT) + 1)
    return [
        rng.standard_normal(nbytes // 4).astype("f4").tobytes(),
        rng.integers(0, 100, nbytes // 8).tobytes(),
        text[:nbytes],
        np.cumsum(rng.integers(-3, 4, nbytes // 4)).astype("i4").tobytes(),
        rng.integers(0, 4096, nbytes // 4).astype("f4").tobytes(),
        bytes(nbytes),
        rng.bytes(nbytes),
    ]


def decoded(stored: Sequence[bytes], nbytes: int, form: int, folder: Path) -> list[bytes | None]:
    """What becomes of encoded chunks of so many bytes; None for those that are refused."""
    memory = np.frombuffer(b"".join(stored) + bytes(16 + -sum(map(len, stored)) % 4), np.uint8)
    path = folder / "chunks"
    path.write_bytes(memory.tobytes())
    begins = np.cumsum([0, *map(len, stored)])
    chunks = [
        StoredChunk(str(path), int(begin), len(data), 1, nbytes, 0, 0, 1, nbytes, 0, nbytes)
        for begin, data in zip(begins, stored, strict=False)
    ]
    most = len(stored) * (4 + nbytes // 256)
    found = headers.look_at(chunks, form, suffix=False, most_blocks=most, most_parts=most)
    many = 2**40
    areas = Areas(0, many, 0, many, 0, many, 0, many, 0, words_for(len(stored), most, most))
    words = np.zeros(areas.words_count, np.int64)
    given = Coding(form, False, Numbers(1, 1, False, False), False)
    tables = tables_of(range(len(stored)), chunks, found, given, areas, 0, words)
    # As `Upload` brings them, side by side in the order of the batch.
    memory = np.zeros(sum(r.width for r in tables.rectangles) // 8 * 8 + 32, np.uint8)
    for rectangle in tables.rectangles:
        data = path.read_bytes()[rectangle.offset : rectangle.offset + rectangle.width]
        memory[rectangle.target : rectangle.target + rectangle.width] = np.frombuffer(data, np.uint8)
    step = -(-nbytes // 256) * 256
    out = np.full(len(tables.numbers) * step + 64, 0xA5, np.uint8)
    sections = tables.sections
    if form == coding.ZSTD:
        parts = sections.parts.of(words)
        literals = int(parts[:, columns.LITERAL_NBYTES][parts[:, columns.KIND] == columns.ENCODED].sum())
        count = int(parts[:, columns.COUNT].sum())
        good = zstd_host.decode_frames(memory, parts, sections.frames.of(words), literals, count, out)
    else:
        good = zstd_host.decode_lz4(memory, sections.lz4.of(words), out)
    assert (out[-64:] == 0xA5).all()
    results: list[bytes | None] = [None] * len(stored)
    for place, (number, fine) in enumerate(zip(tables.numbers, good, strict=True)):
        if fine:
            results[number] = out[place * step : place * step + nbytes].tobytes()
    return results


@pytest.mark.sample(2)
@pytest.mark.parametrize("nbytes", [8, 1000, 2**16 + 8, 300_000])
def test_frames_of_every_level_are_decoded(tmp_path: Path, nbytes: int) -> None:
    """Of one block and of several, with trees and tables that stay in force, and with none."""
    raw = [data for data in contents(np.random.default_rng(nbytes), nbytes) if len(data) == nbytes]
    raw = [data for data in raw for _ in LEVELS]
    stored = [
        zstandard.ZstdCompressor(LEVELS[place % len(LEVELS)]).compress(data) for place, data in enumerate(raw)
    ]
    assert decoded(stored, nbytes, coding.ZSTD, tmp_path) == raw


@pytest.mark.parametrize("nbytes", [8, 1000, 70_000])
def test_blocks_of_lz4_are_decoded(tmp_path: Path, nbytes: int) -> None:
    raw = [data for data in contents(np.random.default_rng(nbytes), nbytes) if len(data) == nbytes]
    assert decoded([bytes(numcodecs.LZ4().encode(data)) for data in raw], nbytes, coding.LZ4, tmp_path) == raw


def damaged(data: bytes, rng: np.random.Generator, how: int) -> bytes:
    changed, place = bytearray(data), int(rng.integers(len(data)))
    if how == 0:
        changed[place] ^= 1 << int(rng.integers(8))
    elif how == 1:
        for _ in range(8):
            changed[int(rng.integers(len(data)))] = int(rng.integers(256))
    elif how == 2:
        return data[: max(5, place)]
    elif how == 3:
        changed[min(place, int(rng.integers(60)))] ^= int(rng.integers(1, 256))
    else:
        changed[place : place + 32] = rng.bytes(len(data[place : place + 32]))
    return bytes(changed)


def by_libzstd(data: bytes, nbytes: int) -> bytes | None:
    try:
        found = zstandard.ZstdDecompressor().decompress(data, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError:
        return None
    return found if len(found) == nbytes else None


def by_lz4(data: bytes, nbytes: int) -> bytes | None:
    try:
        found = bytes(numcodecs.lz4.decompress(data))
    except RuntimeError:
        return None
    return found if len(found) == nbytes else None


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ["zstd", "lz4"])
def test_damage_is_never_taken_for_sound(tmp_path: Path, form: str, count: int) -> None:
    """Flipped, cut, overwritten: what is decoded is what the library decodes, what the library refuses is refused, and
    nothing is read or written outside of its memory."""
    nbytes, rng = 4096, np.random.default_rng(count)
    raw = contents(rng, nbytes)
    if form == "zstd":
        sound = [zstandard.ZstdCompressor(level).compress(data) for data in raw for level in LEVELS]
    else:
        sound = [bytes(numcodecs.LZ4().encode(data)) for data in raw]
    stored = [damaged(sound[place % len(sound)], rng, place // len(sound) % 5) for place in range(count)]
    found = decoded(stored, nbytes, coding.FORMS[form], tmp_path)
    library = by_libzstd if form == "zstd" else by_lz4
    taken = 0
    for place, (data, ours) in enumerate(zip(stored, found, strict=True)):
        if ours is not None:
            taken += 1
            assert ours == library(data, nbytes), f"chunk {place}"
    assert 0 < taken < count


def test_a_table_of_lz4_names_what_it_says() -> None:
    assert tuple(range(lz4.WORDS)) == (lz4.SOURCE, lz4.NBYTES, lz4.TARGET, lz4.ROOM)
