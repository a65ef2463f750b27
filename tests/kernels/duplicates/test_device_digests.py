"""XXH3 with 128 bits of many texts, formed on a GPU, equals that of libxxhash, at every length where it takes another
way: in the simulator, on a GPU, and as machine code where there is neither."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash

from tests.kernels.gemm.machine_code import assemble, assert_no_spills
from tilewright.kernels.gpu.compiled import compiling_for
from tilewright.kernels.gpu.device_choice import SIMULATOR

EVERY = (
    *range(18),
    31,
    32,
    33,
    64,
    65,
    96,
    97,
    127,
    128,
    129,
    160,
    191,
    192,
    223,
    239,
    240,
    241,
    255,
    256,
    257,
)
LONG = (319, 320, 321, 1023, 1024, 1025, 1088, 1089, 2048, 2049)
LONGER = (*range(18, 300), 4096, 10_001, 100_000, 1_000_003)


def hashed(texts: list[bytes], gap: int = 0) -> list[list[int]]:
    """gap: bytes between two texts that are of none."""
    from numba import cuda

    from tilewright.kernels.duplicates import device_digests

    joined = b"\n" * gap + b"".join(text + b"\n" * gap for text in texts)
    starts = gap + np.cumsum([0, *(len(text) + gap for text in texts)])[:-1].astype(np.int64)
    ends = starts + [len(text) for text in texts]
    padded = np.frombuffer(joined + b"\xee" * (device_digests.SLACK + -len(joined) % 4), np.uint32)
    found = cuda.device_array(2 * len(texts), np.uint64)
    secret = cuda.to_device(device_digests.constants())
    stream = cuda.stream()
    device_digests.hash_texts(
        cuda.to_device(padded),
        cuda.to_device(starts),
        cuda.to_device(ends),
        len(texts),
        secret,
        found,
        stream,
    )
    stream.synchronize()
    rows: list[list[int]] = found.copy_to_host().reshape(-1, 2).tolist()
    return rows


def expected(texts: list[bytes]) -> list[list[int]]:
    return [
        [int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")]
        for digest in map(xxhash.xxh3_128_digest, texts)
    ]


@pytest.mark.parametrize("gap", [0, 1, 3])
@pytest.mark.parametrize(
    "device",
    [pytest.param("simulator", marks=pytest.mark.simulator), pytest.param("gpu", marks=pytest.mark.gpu)],
)
def test_equals_libxxhash(device: str, gap: int, rng: np.random.Generator) -> None:
    lengths = (*EVERY, *LONG) if device == "simulator" else (*EVERY, *LONG, *LONGER)
    if device == "simulator" and gap:
        lengths = (3, 9, 16, 17, 150, 240, 241, 1089)
    texts = [rng.integers(0, 256, length, np.uint8).tobytes() for length in lengths]
    assert hashed(texts, gap) == expected(texts)
    ones = [b"\xff" * length for length in (1, 8, 16, 129, 300)]
    assert hashed(ones, gap) == expected(ones)


@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
def test_becomes_machine_code(tmp_path: Path) -> None:
    from numba import cuda

    from tilewright.kernels.duplicates import device_digests

    for variant in device_digests.variants():
        with compiling_for((9, 0)):
            text, _ = cuda.compile_ptx(variant.function, variant.signature, cc=(9, 0))
        report = assemble(text, "sm_90", tmp_path)
        assert_no_spills(report)
        assert ".f64" not in text, "words and numbers with a sign become floats together"
