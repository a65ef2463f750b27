"""What a plan asks of the workers that were found: memory, threads, chunks; nothing is computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import numcodecs
import numpy as np
import pytest
import zarr
from zarr.storage import MemoryStore

from tilewright.kernels.cpu.loops import Allowance
from tilewright.pipeline.plan import tiling, told
from tilewright.pipeline.plan.decoding import DecodingRoom
from tilewright.pipeline.plan.inputs import Geometry, Limits, WorkerFacts
from tilewright.pipeline.plan.product import CODER_NBYTES, MatmulPlan
from tilewright.pipeline.product import ledger
from tilewright.pipeline.product import request as requests
from tilewright.pipeline.product.request import Factors, need_loops_soon, plan_for
from tilewright.pipeline.transfer.lane_blocks import LANE_NBYTES
from tilewright.pipeline.worker import gpu_unit

GIB = 2**30
ZSTD, BLOSC = zarr.codecs.ZstdCodec, zarr.codecs.BloscCodec


@pytest.mark.parametrize(
    ("wanted", "lanes", "facts", "coded"),
    [
        # One worker on a host of 32 cores; one of two, whose process may use half of them; and of four without a mask.
        ((32, 32), 32, [("tcp://10.0.0.1:1", 32, 32, None)], "ac"),
        ((16, 16), 20, [("tcp://10.0.0.1:1", 16, 32, None), ("tcp://10.0.0.1:2", 16, 32, None)], "bc"),
        ((16, 16), 20, [(f"tcp://10.0.0.1:{i}", 64, 64, None) for i in range(4)], "ac"),
        ((24, 24), 24, [("tcp://10.0.0.1:1", 24, 24, None), ("tcp://10.0.0.2:1", 32, 32, None)], "ac"),
        ((32, 32), 32, [("", 32, 32, None)] * 3, "ac"),  # of a plan without a cluster
        # Only what is encoded gets them; and never fewer than there are for anything.
        ((12, 8), 20, [("tcp://10.0.0.1:1", 32, 32, None)], ""),
        ((32, 8), 32, [("tcp://10.0.0.1:1", 32, 32, None)], "b"),
        ((12, 32), 32, [("tcp://10.0.0.1:1", 32, 32, None)], "c"),
        ((12, 8), 20, [("tcp://10.0.0.1:1", 4, 4, None)], "abc"),
        # Chunks of 1 MiB, and of C of 1 MiB: an eighth of the memory holds 2 MiB, a lane and a coder for each thread.
        (
            (20, 20),
            32,
            [("tcp://10.0.0.1:1", 32, 32, 20 * 8 * (2 * 2**20 + LANE_NBYTES + CODER_NBYTES))],
            "ac",
        ),
        ((12, 8), 20, [("tcp://10.0.0.1:1", 32, 32, 2**20)], "ac"),
    ],
)
def test_threads_follow_the_cores_where_chunks_are_encoded(
    wanted: tuple[int, int],
    lanes: int,
    facts: list[tuple[str, int, int, int | None]],
    coded: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrays = [
        zarr.create_array(
            tmp_path / name,
            shape=(1024, 1024),
            chunks=(512, 512),
            dtype="f4",
            compressors="auto" if name in coded else None,
        )
        for name in "abc"
    ]
    found = [
        WorkerFacts("cuda", "GPU", GIB, limit, 1, usable, cores, address)
        for address, usable, cores, limit in facts
    ]
    asked: list[tuple[int, int]] = []
    make = requests.plan_tiles

    def plan_tiles(*arguments: Any, limits: Limits, **options: Any) -> MatmulPlan:
        asked.append((limits.read_threads, limits.write_threads))
        return make(*arguments, limits=replace(limits, host_nbytes=None), **options)

    monkeypatch.setattr(requests, "plan_tiles", plan_tiles)

    def planned(out: Any) -> MatmulPlan:
        return plan_for(Factors(arrays[0], arrays[1], np.dtype("f4"), arrays[0].shape[1]), out, found)

    made = planned(arrays[2])
    assert asked == [wanted]
    assert (made.read_threads, made.write_threads) == wanted
    assert made.lanes == lanes, "of cores, but not fewer than threads for plain chunks"
    assert f"{wanted[0]} threads for reading and {wanted[1]} for writing" in str(made)
    if "a" not in coded:  # a new C is compressed as A is
        assert planned(None).write_threads == 8
    with dask.config.set({"tilewright.read-threads": 3, "tilewright.write-threads": 5}):
        made = planned(arrays[2])
    assert (made.read_threads, made.write_threads, made.lanes) == (3, 5, 8)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("options", "needed"),
    [
        # MiB that are taken besides a chunk of 16 MiB and what becomes of it: libzstd's tables and window, and copies.
        # All are measured.
        ({"compressors": ZSTD(level=0)}, 3.4),
        ({"compressors": ZSTD(level=9)}, 14.7),
        ({"compressors": ZSTD(level=19)}, 89.5),
        ({"compressors": ZSTD(level=22)}, 273.5),
        ({"compressors": BLOSC(cname="zstd", clevel=5)}, 2.5),
        ({"compressors": BLOSC(cname="zstd", clevel=9)}, 16.5),  # level 22, of blocks of a megabyte
        ({"compressors": numcodecs.Zstd(level=22), "zarr_format": 2}, 273.5),
        ({"compressors": numcodecs.Blosc(cname="zstd", clevel=9), "zarr_format": 2}, 16.5),
        # zarr-python encodes the chunks of a shard at the same time, and puts together what they became.
        ({"compressors": ZSTD(level=19), "shards": (4096, 4096)}, 4 * 89.5 + 64),
        ({"compressors": None, "shards": (4096, 4096)}, 64),
        ({"compressors": BLOSC(cname="lz4", clevel=9)}, 0),
        ({"compressors": zarr.codecs.GzipCodec(level=9)}, 16),
        ({"compressors": [BLOSC(cname="lz4"), zarr.codecs.Crc32cCodec()]}, 16),
        ({"compressors": zarr.codecs.Crc32cCodec()}, 0),
        ({"compressors": None}, 0),
    ],
)
def test_encoders_are_counted_by_their_level(
    options: dict[str, Any], needed: float, device: str, tmp_path: Path
) -> None:
    """needed: of one thread."""
    side, mib = 8192, 2**20
    a = zarr.create_array(tmp_path / "a", shape=(side, side), chunks=(1024, 1024), dtype="f4")
    chunks = (2048, 2048)
    c = zarr.create_array(tmp_path / "c", shape=(side, side), chunks=chunks, dtype="f4", **options)
    facts = [WorkerFacts(device, "it", GIB, 64 * GIB, 4, 4, 4)]

    def planned(threads: int) -> MatmulPlan:
        with dask.config.set({"tilewright.write-threads": threads}):
            return plan_for(
                Factors(a, a, np.dtype("f4"), a.shape[1], device_memory=GIB // 4), c, facts, verify=False
            )

    one, two = planned(1), planned(2)
    assert one.geometry == two.geometry
    thread_nbytes = two.host_peak_nbytes - one.host_peak_nbytes
    piece_nbytes = 4 * one.c_unit[0] * one.c_unit[1]
    counted = thread_nbytes - 2 * piece_nbytes - (LANE_NBYTES if device == "cuda" else 0)
    least = CODER_NBYTES / mib if device == "cuda" else 0
    assert max(needed, least) <= counted / mib <= max(1.4 * needed + 12, least)


def test_fewer_threads_encode_where_each_needs_much(tmp_path: Path) -> None:
    facts = [WorkerFacts("cuda", "GPU", GIB, 128 * GIB, 1, 64, 64)]

    def threads(level: int) -> int:
        a, c = (
            zarr.create_array(
                tmp_path / f"{name}{level}",
                shape=(8192, 8192),
                chunks=(2048, 2048),
                dtype="f4",
                compressors=ZSTD(level=level),
            )
            for name in "ac"
        )
        plan = plan_for(Factors(a, a, np.dtype("f4"), a.shape[1]), c, facts)
        assert plan.host_peak_nbytes < 64 * GIB
        return plan.write_threads

    assert [threads(level) for level in (0, 19, 22)] == [64, 64, 52]


def test_a_run_that_goes_on_has_threads_for_the_chunks_it_has_left(tmp_path: Path) -> None:
    """They are larger than a new C's would be in the memory of this run: as many threads as for those would take more
    of the host than there is, and the finished tiles would be given up."""
    a = zarr.create_array(tmp_path / "a", shape=(16384, 16384), chunks=(4096, 4096), dtype="f4")
    limit = 7 * GIB // 2
    facts = [WorkerFacts("cuda", "GPU", GIB, limit, 1, 64, 64)]
    past = ledger.Past(Geometry(4096, 4096, 512, 1, 4096, 4096), (4096, 4096), {0: ledger.Stored()})

    def planned(past: ledger.Past | None) -> MatmulPlan:
        return plan_for(Factors(a, a, np.dtype("f4"), a.shape[1], device_memory="192 MiB"), None, facts, past)

    anew, kept = planned(None), planned(past)
    assert anew.c_unit < kept.c_unit == past.c_unit
    assert kept.geometry == past.geometry
    assert kept.host_peak_nbytes <= limit
    assert kept.write_threads == 8 < anew.write_threads


def test_threads_on_many_cores_leave_a_plan_that_fits_into_little_memory(tmp_path: Path) -> None:
    a, b, c = (
        zarr.create_array(tmp_path / name, shape=(1024, 1024), chunks=(512, 512), dtype="f4")
        for name in "abc"
    )
    facts = [WorkerFacts("cuda", "GPU", GIB, 2 * GIB, 1, 64, 64)]
    made = plan_for(Factors(a, b, np.dtype("f4"), a.shape[1]), c, facts)
    assert made.host_peak_nbytes <= 2 * GIB
    assert made.read_threads > 12, "more than for chunks that are not encoded"


@pytest.mark.parametrize(
    ("device", "cores", "out", "tiles"),
    [
        ("cpu", 1, None, 1),
        ("cpu", 1, "c", 1),
        ("cpu", 1, "opened", 1),
        ("cpu", 1, "memory://c", 2),
        ("cpu", 2, "c", 2),
        ("cuda", 1, "c", 4),
    ],
)
def test_a_single_core_holds_one_tile_that_it_writes_to_files(
    device: str, cores: int, out: str | None, tiles: int, tmp_path: Path
) -> None:
    a, c = (
        zarr.create_array(tmp_path / name, shape=(1024, 1024), chunks=(64, 64), dtype="f4") for name in "ac"
    )
    facts = [WorkerFacts(device, "it", GIB, None, cores, cores, cores)]
    target = c if out == "opened" else tmp_path / out if out and "://" not in out else out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "TILE_OPERATIONS", 2**20)
        made = plan_for(Factors(a, a, np.dtype("f4"), a.shape[1]), target, facts)
    assert made.tile_count >= 4
    assert made.c_buffers == tiles


@pytest.mark.parametrize(
    ("factors", "out", "threads"),
    [
        ("local", "c.zarr", (2, 2)),
        ("local", None, (2, 2)),
        ("local", "s3://bucket/c.zarr", (2, 8)),
        ("remote", "c.zarr", (32, 2)),
    ],
)
def test_a_cpu_has_a_thread_a_core_for_reads_or_writes_of_chunk_files(
    factors: str, out: str | None, threads: tuple[int, int], tmp_path: Path
) -> None:
    store = str(tmp_path / "a") if factors == "local" else MemoryStore()
    a = zarr.create_array(store, shape=(64, 64), chunks=(16, 16), dtype="f4")
    facts = [WorkerFacts("cpu", "CPU", None, 4 * GIB, 2, 2, 2)]
    made = plan_for(Factors(a, a, np.dtype("f4"), a.shape[1]), out, facts)
    assert (made.read_threads, made.write_threads) == threads


def test_loops_move_all_but_the_first_bytes_of_a_gpus_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read and written, together, of a worker's share."""
    a = zarr.create_array(MemoryStore(), shape=(512, 512), chunks=(256, 256), dtype="f4")
    facts = [WorkerFacts("cuda", "GPU", GIB, None, 1, 16, 16)]
    few = plan_for(Factors(a, a, np.dtype("f4"), 512), None, facts)
    room = DecodingRoom(*[1] * 8)

    def in_loops(**changes: Any) -> bool:
        return gpu_unit.in_loops(told.Product(a, a, a, replace(few, **changes), "cuda", "full", ""))

    monkeypatch.setattr(gpu_unit, "_in_python", Allowance(1000))
    assert in_loops(decoded_nbytes=900, write_nbytes=200)
    assert not in_loops(decoded_nbytes=900, write_nbytes=200, workers=2)  # 550
    assert not in_loops(decoded_nbytes=300, write_nbytes=100)
    assert in_loops(decoded_nbytes=0, write_nbytes=0, decoding=room)
    assert in_loops(decoded_nbytes=60, write_nbytes=0), "50 bytes are left"


@pytest.mark.parametrize(
    ("dtype", "side", "verify", "wanted"),
    [
        ("f4", 2048, True, ()),
        ("f4", 3000, True, ("cpu", "cuda")),
        ("f4", 9000, True, ("cuda",)),
        ("f4", 9000, False, ()),
        ("f4", 10000, False, ("cuda",)),
        ("c8", 256, True, ()),
        ("i8", 512, True, ()),
        ("i8", 600, True, ("cpu",)),
    ],
)
def test_numba_is_set_up_early_where_its_loops_are_needed_soon(
    dtype: str, side: int, verify: bool, wanted: tuple[str, ...]
) -> None:
    a = zarr.create_array(MemoryStore(), shape=(side, side), chunks=(side, side), dtype=dtype)
    assert need_loops_soon(Factors(a, a, np.dtype(dtype), side), verify=verify) == wanted
