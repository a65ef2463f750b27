"""Decoded chunks put in their places, and checksums of them, in the simulator and on a GPU, against NumPy, c-blosc,
libxxhash and google-crc32c; and the kernels as machine code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs
import numpy as np
import pytest
import xxhash

from tests.kernels.gemm.machine_code import assemble, assert_no_spills, sampled
from tilewright.kernels.decoding import placing, tables
from tilewright.kernels.decoding.numbers import Numbers
from tilewright.kernels.gpu.compiled import compiling_for
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.pipeline.decoding import coding
from tilewright.pipeline.decoding import headers as frame_headers
from tilewright.pipeline.transfer.file_rectangles import ANY_LENGTH, StoredChunk

on_gpu = pytest.mark.simulator if SIMULATOR else pytest.mark.gpu


def bits(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    dtype = np.dtype(dtype)
    rng = np.random.default_rng([seed, *shape])
    few = rng.integers(0, 3, (*shape, dtype.itemsize), np.uint8)  # so that LZ4 finds something
    return few.view(dtype)[..., 0]


def placed(
    numbers: Numbers, decoded: np.ndarray, row: dict[int, int], rows: int, pitch: int, dtype: Any
) -> np.ndarray:
    """What one chunk's place holds after the kernel, of a matrix that was full of another number."""
    from numba import cuda

    dtype = np.dtype(dtype)
    table = np.zeros((1, tables.PLACE_WORDS), np.int64)
    for column, value in row.items():
        table[0, column] = value
    word = placing.word_dtype(numbers.unit)
    matrix = cuda.to_device(np.full(rows * pitch * dtype.itemsize, 0xA5, np.uint8).view(word))
    source = cuda.to_device(decoded if numbers.shuffled else decoded.view(word))
    most = row[tables.HEIGHT] * row[tables.WIDTH]
    placing.place(numbers, source, matrix, cuda.to_device(table), 1, most, 0)
    return matrix.copy_to_host().view(dtype).reshape(rows, pitch)


@pytest.mark.sample(8)
@on_gpu
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize(
    ("dtype", "parts"), [("i1", 1), ("u2", 1), ("f4", 1), ("i8", 1), ("c8", 2), ("c16", 2)]
)
def test_any_part_of_a_chunk_comes_to_its_place(
    dtype: str, parts: int, by_columns: bool, swapped: bool
) -> None:
    unit = np.dtype(dtype).itemsize // parts
    chunk = bits((7, 11), dtype, 1)
    stored = chunk.astype(chunk.dtype.newbyteorder(">" if swapped else "<"))
    decoded = np.frombuffer(stored.tobytes(order="F" if by_columns else "C"), np.uint8).copy()
    decoded = np.concatenate([np.zeros(256, np.uint8), decoded])
    row = {
        tables.SOURCE: 256,
        tables.CHUNK_NBYTES: chunk.nbytes,
        tables.TOP: 2,
        tables.LEFT: 3,
        tables.HEIGHT: 4,
        tables.WIDTH: 6,
        tables.ROW_STEP: 1 if by_columns else 11,
        tables.COLUMN_STEP: 7 if by_columns else 1,
        tables.TARGET: (13 + 2) * parts,
        tables.PITCH: 13 * parts,
    }
    found = placed(Numbers(unit, parts, swapped, False), decoded, row, 6, 13, dtype)
    assert found[1:5, 2:8].tobytes() == np.ascontiguousarray(chunk[2:6, 3:9]).tobytes()
    assert (np.delete(found.view(np.uint8).reshape(6, 13, -1)[[0, 5]], [], 0) == 0xA5).all()


def shuffled(chunk: np.ndarray, codec: Any, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """A chunk as Blosc has it before its blocks are encoded, and the row that `frame_headers` has of it."""
    stored = bytes(codec.encode(chunk))
    path = folder / "chunk"
    path.write_bytes(stored)
    given = StoredChunk(str(path), 0, ANY_LENGTH, 1, chunk.nbytes, 0, 0, 1, chunk.nbytes, 0, 0)
    found = frame_headers.look_at([given], coding.BLOSC, suffix=False, most_blocks=10_000, most_parts=10_000)
    out = np.zeros(chunk.nbytes, np.uint8)
    for _, offset, nbytes, target, room, kind, *_ in found.blocks.tolist():
        block = stored[offset : offset + nbytes]
        if kind == coding.LZ4:
            block = bytes(numcodecs.LZ4().decode(room.to_bytes(4, "little") + block))
        elif kind == coding.ZSTD:
            block = bytes(numcodecs.Zstd().decode(block))
        out[target : target + room] = np.frombuffer(block, np.uint8)
    return out, found.chunks[0]


@pytest.mark.sample(4)
@on_gpu
@pytest.mark.parametrize("shuffle", [0, 1, 2])
@pytest.mark.parametrize(
    ("dtype", "parts", "columns"), [("i1", 1, 121), ("f4", 1, 33), ("i8", 1, 17), ("c8", 2, 15)]
)
def test_shuffling_is_undone(tmp_path: Path, dtype: str, parts: int, columns: int, shuffle: int) -> None:
    chunk = bits((9, columns), dtype, 2)
    codec = numcodecs.Blosc(cname="lz4", clevel=5, shuffle=shuffle, blocksize=512)
    decoded, row = shuffled(chunk, codec, tmp_path)
    assert row[frame_headers.STORED_NBYTES] > 0
    place = {
        tables.CHUNK_NBYTES: chunk.nbytes,
        tables.HEIGHT: 9,
        tables.WIDTH: columns,
        tables.ROW_STEP: columns,
        tables.COLUMN_STEP: 1,
        tables.PITCH: columns * parts,
        tables.SHUFFLE: int(row[frame_headers.SHUFFLE]),
        tables.ELEMENT: int(row[frame_headers.ELEMENT]),
        tables.BLOCK_NBYTES: int(row[frame_headers.BLOCK_NBYTES]),
    }
    unit = chunk.itemsize // parts
    found = placed(Numbers(unit, parts, False, True), decoded, place, 9, columns, dtype)
    assert found.tobytes() == chunk.tobytes()


@on_gpu
def test_blocks_are_moved() -> None:
    from numba import cuda

    source = np.random.default_rng(0).integers(0, 256, 4000, np.uint8)
    table = np.array([(3, 100, 2500), (2600, 0, 7), (0, 50, 0)], np.int64)
    target = cuda.to_device(np.zeros(3000, np.uint8))
    placing.copy(cuda.to_device(source), target, cuda.to_device(table), 3, 2500, 0)
    expected = np.zeros(3000, np.uint8)
    expected[100:2600], expected[:7] = source[3:2503], source[2600:2607]
    np.testing.assert_array_equal(target.copy_to_host(), expected)


@on_gpu
@pytest.mark.parametrize("kind", ["xxh64", "crc32c"])
def test_checksums_are_those_of_the_libraries(kind: str) -> None:
    from numba import cuda

    from tilewright.kernels.decoding import checksums

    data = np.random.default_rng(1).integers(0, 256, 4096, np.uint8)
    lengths = [4, 5, 7, 8, 31, 32, 33, 63, 64, 71, 300, 1025, *([] if SIMULATOR else [1023, 2048, 3000])]
    table = np.array([(8 * place, length) for place, length in enumerate(lengths)], np.int64)
    bytes_, sums = cuda.to_device(data), cuda.to_device(np.zeros(len(lengths), np.uint64))
    if kind == "xxh64":
        words = cuda.to_device(data.view(np.uint64))
        checksums.xxh64(words, bytes_, cuda.to_device(table), sums, len(lengths), 0)
    else:
        tables_of_crc = cuda.to_device(checksums.crc_tables())
        checksums.crc32c(bytes_, cuda.to_device(table), tables_of_crc, sums, len(lengths), 0)
    stretches = [data[begin : begin + length].tobytes() for begin, length in table.tolist()]
    known = {"xxh64": xxhash.xxh64_intdigest, "crc32c": google_crc32c.value}[kind]
    assert sums.copy_to_host().tolist() == [known(stretch) for stretch in stretches]


def compiled_variants() -> list[Any]:
    if SIMULATOR:
        return []
    from tilewright.kernels.decoding import checksums, guarding, launching

    kernels = [*placing.variants(), *checksums.variants(), *guarding.variants(), *launching.variants()]
    return sampled(kernels, 14)


@pytest.mark.sample(2)
@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("variant", compiled_variants())
def test_kernels_compile_without_spills(variant: Any, tmp_path: Path) -> None:
    from numba import cuda

    with compiling_for((9, 0)):
        text, _ = cuda.compile_ptx(variant.function, variant.signature, cc=(9, 0))
    assert_no_spills(assemble(text, "sm_90a", tmp_path))
