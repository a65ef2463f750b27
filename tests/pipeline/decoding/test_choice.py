"""What a plan sets aside for decoding on a GPU, and what it says of that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import dask
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.store.stored_arrays import encoded
from tilewright.pipeline.decoding.choice import decoding_for
from tilewright.pipeline.decoding.tables import words_for
from tilewright.pipeline.plan.decoding import (
    CHECKED,
    EVERYWHERE,
    MEMORY_SHARE,
    NOWHERE,
    NVCOMP_SLOTS,
    SLOTS,
    CodedInput,
    room_for,
    workspace_for,
)
from tilewright.pipeline.plan.inputs import Limits, StoredMatrix, WorkerFacts
from tilewright.pipeline.plan.product import plan_tiles

GPU = WorkerFacts("cuda", "a GPU", 2**36, None, 8)
WITH_NVCOMP = replace(GPU, no_nvcomp="")
CPU = WorkerFacts("cpu", "CPU", None, None, 8)


@given(
    chunks=st.lists(st.integers(1, 2**28), min_size=1, max_size=2),
    device_nbytes=st.integers(0, 2**37),
    in_blocks=st.booleans(),
    framed=st.booleans(),
    nvcomp=st.sampled_from([NOWHERE, CHECKED, EVERYWHERE]),
)
def test_what_is_set_aside_fits_and_serves(
    chunks: list[int], device_nbytes: int, in_blocks: bool, framed: bool, nvcomp: int
) -> None:
    """A share of the memory at most; a slot holds at least one chunk of either input, as stored and decoded."""
    room = room_for([CodedInput("x", nbytes, in_blocks, framed) for nbytes in chunks], device_nbytes, nvcomp)
    if room is None:
        slots = SLOTS if nvcomp == NOWHERE else NVCOMP_SLOTS
        assert device_nbytes < MEMORY_SHARE * 8 * slots * (max(chunks) + 2**22)
        return
    assert room.nvcomp == nvcomp
    assert room.scratch_nbytes >= room.literals_nbytes + 8 * room.sequences_count
    if framed and nvcomp != NOWHERE:
        assert room.scratch_nbytes >= room.workspace_nbytes >= workspace_for(1, max(chunks))
    else:
        assert room.workspace_nbytes == 0
    assert room.nbytes <= device_nbytes // MEMORY_SHARE
    assert room.decoded_nbytes >= max(chunks)
    assert room.stored_nbytes > room.decoded_nbytes
    assert room.chunks >= 1
    assert (room.literals_nbytes >= room.decoded_nbytes) == framed
    tables = 8 * words_for(room.chunks, room.blocks, room.parts)
    counted = room.stored_nbytes + room.decoded_nbytes + room.scratch_nbytes
    assert room.slots * (counted + tables) <= 1.35 * room.nbytes


def test_a_plan_counts_what_is_set_aside() -> None:
    a = StoredMatrix(4096, 4096, np.dtype("f4"), (512, 512))
    room = room_for([CodedInput("Zstandard", a.unit_nbytes, False, True)], 2**30)
    assert room is not None
    without = plan_tiles(a, a, a.dtype, (512, 512), Limits(1, 2**30 - room.nbytes))
    plan = plan_tiles(a, a, a.dtype, (512, 512), Limits(1, 2**30, decoding=room))
    assert plan.geometry == without.geometry
    assert plan.device_limit_nbytes == 2**30
    assert plan.device_peak_nbytes == without.device_peak_nbytes + room.nbytes
    assert plan.decoding == room


@pytest.mark.parametrize(
    ("codecs", "chosen", "text"),
    [
        ("2 none", False, ""),
        ("2 zstd", True, "Zstandard on the GPU, up to"),
        ("2 blosc", True, "Blosc on the GPU, up to"),
        ("2 gzip", False, "by the cores, as no GPU decodes what"),
    ],
)
def test_it_is_said_what_decodes(tmp_path: Path, codecs: str, chosen: bool, text: str) -> None:
    array = encoded(tmp_path / "a", codecs, np.ones((40, 64), "f4"), (10, 16))
    with dask.config.set({"tilewright.gpu-decoding": True}):
        room, said = decoding_for([array, array], [GPU], 2**30)
        assert (room is not None) == chosen
        assert said.startswith(text)
        assert decoding_for([array], [CPU], 2**30) == (None, "")
        if chosen:
            assert "the part of 1 KiB" in decoding_for([array], [GPU], 2**10)[1]
    if codecs != "2 none":
        assert decoding_for([array], [GPU], 2**30)[1].startswith("by the cores (tilewright.gpu-decoding is")


@pytest.mark.parametrize(
    ("codecs", "facts", "trusted", "may", "text"),
    [
        ("2 zstd", WITH_NVCOMP, False, NOWHERE, "; by nvCOMP none, as no CRC32C says which are sound"),
        ("2 zstd", WITH_NVCOMP, True, EVERYWHERE, "; by nvCOMP, which is told to trust them"),
        ("2 zstd", GPU, True, NOWHERE, "; without nvCOMP: no worker has been asked for it"),
        ("3 zstd, crc32c", WITH_NVCOMP, False, CHECKED, "; by nvCOMP those whose CRC32C is right"),
        (
            "3 lz4, crc32c",
            replace(GPU, no_nvcomp="it is broken"),
            False,
            NOWHERE,
            "; without nvCOMP: it is broken",
        ),
        ("3 crc32c", WITH_NVCOMP, True, NOWHERE, "; nothing is compressed that nvCOMP decodes"),
    ],
)
@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3:UserWarning")
def test_nvcomp_decodes_what_is_known_to_be_sound(
    tmp_path: Path, codecs: str, facts: WorkerFacts, trusted: bool, may: int, text: str
) -> None:
    """One worker that has it not is enough for none to use it: they share one plan."""
    array = encoded(tmp_path / "a", codecs, np.ones((40, 64), "f4"), (10, 16))
    with dask.config.set({"tilewright.gpu-decoding": True, "tilewright.trust-chunks": trusted}):
        room, said = decoding_for([array], [WITH_NVCOMP, facts], 2**34)
    assert room is not None
    assert room.nvcomp == may
    assert text in said
