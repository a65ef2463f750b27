"""nvCOMP's library, without a GPU and with one; where it is not installed; and what is kept from it."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zstandard

from tilewright.kernels.decoding import guarding, nvcomp
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.pipeline.plan.decoding import workspace_for

on_gpu = pytest.mark.simulator if SIMULATOR else pytest.mark.gpu


@pytest.fixture
def library() -> nvcomp.Library:
    """It belongs to the tests' packages: where it is missing, or does not load, they fail."""
    return nvcomp.library()


def test_its_structures_are_those_of_its_headers() -> None:
    """Options are passed by value: another length would shift every argument behind them."""
    assert ctypes.sizeof(nvcomp.Options) == 64
    assert nvcomp.Options.backend.offset == 0
    assert bytes(nvcomp.Options(nvcomp.BY_KERNELS)) == b"\2" + bytes(63)
    assert ctypes.sizeof(nvcomp.Properties) == 8


class Alignments(ctypes.Structure):
    """What addresses have to be multiples of."""

    _fields_ = (("input", ctypes.c_size_t), ("output", ctypes.c_size_t), ("temp", ctypes.c_size_t))


def test_a_library_that_is_there_is_what_is_expected(library: nvcomp.Library) -> None:
    assert library.version[0] == nvcomp.MAJOR
    assert library.cuda_major in (12, 13)
    functions, found = ctypes.CDLL(str(nvcomp.path())), Alignments()
    for name in nvcomp.DECODERS.values():
        ask = functions[f"nvcompBatched{name}DecompressGetRequiredAlignments"]
        assert ask(nvcomp.Options(nvcomp.BY_KERNELS), ctypes.byref(found)) == nvcomp.SUCCESS
        # Blocks of Blosc lie anywhere, and so do chunks side by side; the workspace begins at a multiple of 256.
        assert (found.input, found.output) == (1, 1)
        assert 256 % found.temp == 0


@pytest.mark.parametrize("count", [1, 7, 300, 17_000])
@pytest.mark.parametrize("nbytes", [1, 640, 2**15, 3 * 10**6, 2**24])
def test_no_more_workspace_is_needed_than_is_set_aside(
    library: nvcomp.Library, count: int, nbytes: int
) -> None:
    for total in (nbytes + count - 1, count * nbytes // 2 + nbytes, count * nbytes):
        needed = library.workspace_nbytes("zstd", count, nbytes, total)
        assert 0 < needed <= workspace_for(count, total)
        assert library.workspace_nbytes("lz4", count, nbytes, total) == 0


def test_what_is_refused_is_an_error(library: nvcomp.Library) -> None:
    with pytest.raises(nvcomp.NvcompError, match=r"nvcompBatchedZstdDecompressAsync: \d+, "):
        library.decode("zstd", 1, nvcomp.Blocks(0, 0, 0, 0, 0, 0), 0, 0, 0)


def test_what_cannot_be_used_is_told_of(library: nvcomp.Library) -> None:
    assert nvcomp.usable(workspace_for, lambda: library.cuda_major) is library
    with pytest.raises(nvcomp.NvcompError, match=r"and the driver supports 11; install the extra cu11"):
        nvcomp.usable(workspace_for, lambda: 11)
    with pytest.raises(
        nvcomp.NvcompError, match=r"nvCOMP wants \d+ bytes to decode 1024 frames of 65536, more"
    ):
        nvcomp.usable(lambda count, nbytes: 2**20, lambda: library.cuda_major)


def test_a_library_that_is_not_there_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvcomp, "PACKAGE", "no_such_package.within")
    with pytest.raises(
        nvcomp.NvcompError, match=r"there is no no_such_package\.within with .*the extras cu12"
    ):
        nvcomp.path()


def test_a_library_that_does_not_load_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "broken_nvcomp" / "lib64"
    folder.mkdir(parents=True)
    (folder / "libnvcomp.so.6").write_bytes(b"no library")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(nvcomp, "PACKAGE", "broken_nvcomp")
    found = nvcomp.path()
    assert found.parent == folder
    with pytest.raises(nvcomp.NvcompError, match=r"libnvcomp\.so\.6 does not load: "):
        nvcomp.Library(found)
    sys.modules.pop("broken_nvcomp", None)


def test_what_stands_in_for_other_blocks_is_sound() -> None:
    assert zstandard.ZstdDecompressor().decompress(nvcomp.HARMLESS["zstd"]) == b"x"
    assert numcodecs.LZ4().decode((1).to_bytes(4, "little") + nvcomp.HARMLESS["lz4"]) == b"x"
    memory = nvcomp.harmless().tobytes()
    for form, data in nvcomp.HARMLESS.items():
        place = nvcomp.HARMLESS_PLACES[form]
        assert memory[place : place + len(data)] == data


@on_gpu
@pytest.mark.parametrize("count", [1, 5, 300])
def test_blocks_of_other_sums_are_exchanged(count: int) -> None:
    from numba import cuda

    rng = np.random.default_rng(count)
    expected = rng.integers(0, 2**32, 40)
    sums = expected.astype(np.uint64)
    wrong = rng.random(40) < 0.3
    sums[wrong] ^= np.uint64(1) << rng.integers(0, 32, wrong.sum()).astype(np.uint64)
    owners = rng.integers(0, 40, count)
    sources, nbytes = rng.integers(1, 2**62, count), rng.integers(1, 2**31, count)
    there: list[Any] = [cuda.to_device(table) for table in (sums, expected, owners, sources, nbytes)]
    guarding.guard(*there, 12345, 10, 0)
    exchanged = wrong[owners]
    np.testing.assert_array_equal(there[3].copy_to_host(), np.where(exchanged, 12345, sources))
    np.testing.assert_array_equal(there[4].copy_to_host(), np.where(exchanged, 10, nbytes))


def contents(nbytes: int) -> list[bytes]:
    rng = np.random.default_rng(nbytes)
    return [
        rng.standard_normal(nbytes // 4 + 1).astype("f4").tobytes()[:nbytes],
        rng.integers(0, 100, nbytes // 8 + 1).tobytes()[:nbytes],
        bytes(nbytes),
        rng.bytes(nbytes),
    ]


@pytest.mark.gpu
@pytest.mark.skipif(SIMULATOR, reason="it decodes nothing")
@pytest.mark.parametrize("form", nvcomp.DECODERS)
@pytest.mark.parametrize("nbytes", [1, 100, 2**16, 10**6, 2**23])
def test_batches_are_decoded(library: nvcomp.Library, form: str, nbytes: int) -> None:
    """And of blocks that stand in for others, that they are shorter."""
    from numba import cuda

    from tilewright.kernels.gpu.device_array import address

    raw = contents(nbytes)
    if form == "zstd":
        levels = -5, 1, 3, 9
        stored = [
            zstandard.ZstdCompressor(level).compress(data) for data, level in zip(raw, levels, strict=True)
        ]
    else:
        stored = [bytes(numcodecs.LZ4().encode(data))[4:] for data in raw]  # behind their length
    stored.append(nvcomp.HARMLESS[form])
    begins = np.cumsum([0, *map(len, stored)])[:-1]
    source = cuda.to_device(np.frombuffer(b"".join(stored) + bytes(16), np.uint8))
    room = nbytes + 3
    target = cuda.to_device(np.full(room * len(stored), 0xA5, np.uint8))
    sizes = np.array([len(data) for data in stored], np.int64)
    steps = np.arange(len(stored)) * room
    tables = [
        cuda.to_device(np.ascontiguousarray(table, dtype))
        for table, dtype in (
            (begins + address(source), np.int64),
            (sizes, np.int64),
            (np.full(len(stored), nbytes), np.int64),
            (steps + address(target), np.int64),
            (np.full(len(stored), -1), np.int64),
            (np.full(len(stored), -1), np.int32),
        )
    ]
    needed = workspace_for(len(stored), nbytes * len(stored))
    workspace = cuda.device_array(needed, np.uint8)
    stream = cuda.stream()
    cuda.synchronize()
    library.decode(
        form,
        len(stored),
        nvcomp.Blocks(*map(address, tables)),
        address(workspace),
        needed,
        int(stream),
    )
    stream.synchronize()
    assert tables[5].copy_to_host().tolist() == [nvcomp.SUCCESS] * len(stored)
    assert tables[4].copy_to_host().tolist() == [nbytes] * len(raw) + [1]
    found = target.copy_to_host().reshape(len(stored), room)
    assert [row[:nbytes].tobytes() for row in found[: len(raw)]] == raw
    assert (found[: len(raw), nbytes:] == 0xA5).all()
