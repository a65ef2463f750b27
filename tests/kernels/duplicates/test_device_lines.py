"""Newlines found on a GPU are those that Python finds: in the simulator, on a GPU, and as machine code where there is
neither."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.gemm.machine_code import assemble, assert_no_spills
from tests.sampling import examples
from tilewright.kernels.gpu.compiled import compiling_for
from tilewright.kernels.gpu.device_choice import SIMULATOR

pytest_device = pytest.mark.parametrize(
    "device",
    [pytest.param("simulator", marks=pytest.mark.simulator), pytest.param("gpu", marks=pytest.mark.gpu)],
)


def assert_found(data: bytes, behind: bytes = b"\n\r\n\n") -> None:
    from numba import cuda

    from tilewright.kernels.duplicates.device_lines import newlines_of
    from tilewright.kernels.duplicates.device_rooms import Rooms

    padded = data + behind + bytes(-len(data + behind) % 4)
    text = cuda.to_device(np.frombuffer(padded, np.uint8))
    places = [place for place, byte in enumerate(data) if byte == 0x0A]
    found = newlines_of(text, len(data), Rooms(), cuda.stream(), len(places))
    assert found is not None
    assert found.places.tolist() == places
    assert found.returns.tolist() == [place > 0 and data[place - 1] == 0x0D for place in places]


@pytest_device
@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.lists(st.sampled_from(list(b"\n\n\r\x0b\x09\x8a\x80\xff\x00a")), max_size=90).map(bytes))
def test_any_text(device: str, data: bytes) -> None:
    assert_found(data)


@pytest_device
def test_texts_beyond_tiles(device: str, rng: np.random.Generator) -> None:
    from tilewright.kernels.duplicates.device_lines import TILE

    for length in (TILE - 1, TILE, TILE + 1, 3 * TILE + 5):
        data = rng.choice(np.frombuffer(b"\n\ra\x0b\xf5", np.uint8), length).tobytes()
        assert_found(data)
        assert_found(b"\n" * length)
        assert_found(b"a" * length)


@pytest_device
def test_more_than_wanted_take_no_memory(device: str) -> None:
    from numba import cuda

    from tilewright.kernels.duplicates.device_lines import TILE, newlines_of
    from tilewright.kernels.duplicates.device_rooms import Rooms

    rooms, length = Rooms(), 4 * TILE
    text = cuda.to_device(np.full(length, ord("\n"), np.uint8))
    assert newlines_of(text, length, rooms, cuda.stream(), length - 1) is None
    assert rooms.nbytes == 4 * 8, "a number for each tile"
    found = newlines_of(text, length, rooms, cuda.stream(), length)
    assert found is not None
    assert len(found.places) == length
    assert rooms.nbytes == (4 + length) * 8


@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
def test_becomes_machine_code(tmp_path: Path) -> None:
    from numba import cuda

    from tilewright.kernels.duplicates import device_lines

    for variant in device_lines.variants():
        with compiling_for((9, 0)):
            text, _ = cuda.compile_ptx(variant.function, variant.signature, cc=(9, 0))
        report = assemble(text, "sm_90", tmp_path)
        assert_no_spills(report)
        assert ".f64" not in text, "words and numbers with a sign become floats together"
