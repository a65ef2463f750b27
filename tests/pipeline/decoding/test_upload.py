"""Encoded chunks decoded in batches and by the cores at once, with a device that is host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import ZstdCodec

from tests.kernels.gpu.pretended_driver import BLOCK, Driver, lanes
from tests.pipeline.decoding.pretended_slot import PretendedSlot
from tests.pipeline.store.stored_arrays import CODECS, chunk_file, encoded
from tilewright.kernels.decoding.nvcomp import HARMLESS
from tilewright.kernels.gpu.driver_error import DriverError
from tilewright.pipeline.decoding import decoders
from tilewright.pipeline.decoding import upload as upload_module
from tilewright.pipeline.decoding.coding import RAW, ZSTD
from tilewright.pipeline.decoding.headers import look_at
from tilewright.pipeline.decoding.pace import Choice, Pace
from tilewright.pipeline.decoding.upload import CodedUpload, Decoding
from tilewright.pipeline.plan.decoding import CHECKED, EVERYWHERE, workspace_for
from tilewright.pipeline.store.chunks import coding_of, layout_of
from tilewright.pipeline.store.region import Flattened, HeldMask, Masked, Section
from tilewright.pipeline.store.region_read import FilePart, region_uploads
from tilewright.pipeline.transfer.file_upload import Upload

pytestmark = pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3:UserWarning")

SUMMED = ["3 zstd, crc32c", "3 lz4, crc32c", "3 blosc, crc32c"]
DECODED = ["3 zstd", "3 blosc", "3 lz4", "3 crc32c", "2 zstd", "2 blosc", "2 lz4", *SUMMED]

LZ4S = ["3 lz4", "2 lz4", "3 blosc", "2 blosc", "3 lz4, crc32c"]
"""Those whose blocks are LZ4's."""


class Outcome:
    """A region loaded through slots of pretence: what is there, what was left over, and what the cores decoded."""

    def __init__(
        self,
        array: Any,
        region: tuple[slice, slice],
        slots: list[PretendedSlot],
        threads: int = 3,
        cores: Callable[[Pace], None] = lambda pace: None,
        ready: bool = True,
    ) -> None:
        rows, columns = (side.stop - side.start for side in region)
        self.device = np.full((rows, columns + 3), 0, array.dtype.newbyteorder("="))
        place, pitch = self.device.ctypes.data, self.device.strides[0]
        self.parts, self.others = region_uploads(array, region, place, pitch, coded=True)
        driver, self.by_cores = Driver(), list[int]()
        found = coding_of(array)
        assert found is not None
        coding, nbytes = found
        decoding = Decoding(slots, ready=lambda: ready)
        cores(decoding.pace(coding, nbytes))
        sources: Any = [part.source for part in self.parts]
        bring = partial(self._bring, driver.functions, threads)
        self.upload = CodedUpload(sources, coding, place, decoding, bring, self._on_core, threads)
        self.decoding = decoding

        self.errors: list[BaseException] = []
        made = list(lanes(threads))  # whose memory has to last
        workers = [threading.Thread(target=self._run, args=(words,)) for words, _ in made]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        self.failed = self.upload.failed()

    @staticmethod
    def _bring(functions: np.ndarray, threads: int, rectangles: Any) -> Upload:
        return Upload(rectangles, BLOCK, threads, functions)

    def _run(self, words: np.ndarray) -> None:
        try:
            spent = self.upload.run(None, words)
            assert min(spent) >= 0
        except BaseException as error:
            self.errors.append(error)

    def _on_core(self, number: int, lane: Any) -> tuple[float, float]:
        self.by_cores.append(number)
        self.read(self.parts[number])
        return 0.0, 0.0

    def read(self, part: FilePart) -> None:
        for read in part.reads():
            read.read(self.device[:, : self.device.shape[1] - 3][read.target])

    def rest(self) -> None:
        for number in self.failed:
            self.read(self.parts[number])
        for read in self.others:
            read.read(self.device[:, : self.device.shape[1] - 3][read.target])

    @property
    def found(self) -> np.ndarray:
        return self.device[:, : self.device.shape[1] - 3]


def gpu_is_sooner(pace: Pace) -> None:
    pace.batch_seconds, pace.core_seconds = 1e-9, 1e3


def cores_are_sooner(pace: Pace) -> None:
    pace.batch_seconds, pace.core_seconds = 1e3, 1e-9


def numbers(shape: tuple[int, int], dtype: str) -> np.ndarray:
    values = np.random.default_rng(0).integers(0, 50, shape)
    return values.astype(dtype) + (np.array(1j, dtype) * 3 if np.dtype(dtype).kind == "c" else 0)


@pytest.mark.sample(36)
@pytest.mark.parametrize("dtype", ["u1", "f4", "i8", "c8"])
@pytest.mark.parametrize(("big", "by_columns"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("codecs", [*DECODED, "3 none", "2 none"])
def test_every_codec_is_decoded_in_batches(
    tmp_path: Path, codecs: str, big: bool, by_columns: bool, dtype: str
) -> None:
    data = numbers((41, 53), dtype)
    array = encoded(tmp_path / "a", codecs, data, (10, 16), big=big, by_columns=by_columns)
    layout = layout_of(array, "a")
    assert layout is not None
    if layout.plain:
        assert layout.coding is None
        return
    slots = [PretendedSlot(4, 4 * 10 * 16 * 16) for _ in range(2)]
    outcome = Outcome(array, (slice(3, 40), slice(5, 53)), slots, cores=gpu_is_sooner)
    assert outcome.errors == outcome.failed == outcome.by_cores == []
    assert sum(len(batch) for slot in slots for batch in slot.batches) == 16 == outcome.decoding.on_gpu
    np.testing.assert_array_equal(outcome.found, data[3:40, 5:53])
    assert (outcome.device[:, -3:] == 0).all(), "what lies beside the region stays"


@pytest.mark.parametrize("codecs", ["3 zstd", "3 blosc"])
def test_shards_and_missing_chunks(tmp_path: Path, codecs: str) -> None:
    """Chunks of a shard lie in one file; those that were never written are left to the ordinary way."""
    data = numbers((40, 64), "f4")
    data[:20, :32] = 7  # the fill value: not stored
    array = encoded(tmp_path / "a", codecs, data, (10, 16), shards=(20, 32))
    outcome = Outcome(array, (slice(0, 40), slice(0, 64)), [PretendedSlot(5, 2**16)], cores=gpu_is_sooner)
    assert outcome.errors == outcome.failed == []
    outcome.rest()
    np.testing.assert_array_equal(outcome.found, data)


def test_chunks_without_a_file_are_left_over(tmp_path: Path) -> None:
    data = numbers((40, 64), "f4")
    data[:10, :16] = 7
    array = encoded(tmp_path / "a", "3 lz4", data, (10, 16))
    assert not chunk_file(array, (0, 0)).exists()
    outcome = Outcome(array, (slice(0, 40), slice(0, 64)), [PretendedSlot(5, 2**16)], cores=gpu_is_sooner)
    assert outcome.failed == [0]
    outcome.rest()
    np.testing.assert_array_equal(outcome.found, data)


@pytest.mark.parametrize("codecs", [name for name in DECODED if name != "3 crc32c"])
@pytest.mark.parametrize("nvcomp", [CHECKED, EVERYWHERE])
def test_nvcomp_decodes_what_it_may(tmp_path: Path, codecs: str, nvcomp: int) -> None:
    data = numbers((41, 53), "f4")
    array = encoded(tmp_path / "a", codecs, data, (10, 16))
    slots = [PretendedSlot(4, 4 * 10 * 16 * 16, nvcomp=nvcomp) for _ in range(2)]
    outcome = Outcome(array, (slice(3, 40), slice(5, 53)), slots, cores=gpu_is_sooner)
    assert outcome.errors == outcome.failed == outcome.by_cores == []
    np.testing.assert_array_equal(outcome.found, data[3:40, 5:53])
    given = [form for slot in slots for form, _, _ in slot.by_nvcomp]
    if nvcomp == EVERYWHERE or codecs in SUMMED:
        assert len(given) >= 16
        assert set(given) == {"lz4" if codecs in LZ4S else "zstd"}
    else:
        assert given == []


@pytest.mark.parametrize("codecs", SUMMED)
def test_nvcomp_is_given_no_damaged_block_that_a_checksum_shows(tmp_path: Path, codecs: str) -> None:
    """It would access memory that is not its own."""
    data = numbers((80, 160), "f4")
    array = encoded(tmp_path / "a", codecs, data, (8, 16))
    rng = np.random.default_rng(0)
    for place in range(0, 100, 2):
        path = chunk_file(array, divmod(place, 10))
        path.write_bytes(damaged(path.read_bytes(), rng, place // 2 % 5))
    slot = PretendedSlot(100, 2**16, nvcomp=CHECKED)
    outcome = Outcome(array, (slice(0, 80), slice(0, 160)), [slot], cores=gpu_is_sooner)
    assert slot.sound
    assert all(slot.sound)
    kept = [data for form, data, _ in slot.by_nvcomp if data == HARMLESS[form]]
    assert kept, "in the place of those whose headers are as they should be"
    failed = set(outcome.failed)
    # A header that was exchanged for the same one is no damage.
    assert 40 <= len(failed) <= 50
    assert all(number % 2 == 0 for number in failed)
    for number, part in enumerate(outcome.parts):
        (read,) = part.reads()
        if number not in failed:
            np.testing.assert_array_equal(
                outcome.found[read.target], data[: outcome.found.shape[0], :160][read.target]
            )


@pytest.mark.parametrize("codecs", ["2 zstd", "2 lz4", "2 blosc", *SUMMED])
@pytest.mark.parametrize(
    "fails",
    [
        lambda nbytes: (nbytes - 1, 0),
        lambda nbytes: (nbytes, 12),
        lambda nbytes: (nbytes + 1, 0),
        lambda nbytes: (-1, -1),
    ],
    ids=["too short", "a status", "too long", "not written"],
)
def test_what_nvcomp_says_is_looked_at(
    tmp_path: Path, codecs: str, fails: Callable[[int], tuple[int, int]]
) -> None:
    data = numbers((40, 64), "f4")
    array = encoded(tmp_path / "a", codecs, data, (10, 16))
    slot = PretendedSlot(32, 2**18, nvcomp=EVERYWHERE)
    slot.nvcomp_fails = fails
    outcome = Outcome(array, (slice(0, 40), slice(0, 64)), [slot], cores=gpu_is_sooner)
    assert outcome.failed == list(range(16))
    outcome.rest()
    np.testing.assert_array_equal(outcome.found, data)


def test_large_frames_of_literals_are_left_to_our_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They decode all blocks of such a frame at once, but sequences one by one."""
    monkeypatch.setattr(decoders, "MOST_LITERAL_NBYTES", 2**15)
    data = np.zeros((300, 200), "f4")
    data[:100, :100] = np.random.default_rng(0).standard_normal((100, 100))
    data[100:200] = np.arange(200) % 7 + np.random.default_rng(1).integers(0, 3, (100, 200))
    array = encoded(tmp_path / "a", "2 zstd", data, (100, 100))
    slot = PretendedSlot(6, 2**20, nvcomp=EVERYWHERE)
    outcome = Outcome(array, (slice(0, 300), slice(0, 200)), [slot], cores=gpu_is_sooner)
    assert outcome.failed == []
    np.testing.assert_array_equal(outcome.found, data)
    assert [form for form, _, _ in slot.by_nvcomp] == ["zstd"] * 2, "those with sequences"


def test_workspace_limits_what_nvcomp_is_given(tmp_path: Path) -> None:
    """What finds no room there is told of, and read in the ordinary way."""
    data = numbers((40, 64), "f4")
    array = encoded(tmp_path / "a", "2 zstd", data, (10, 16))
    slot = PretendedSlot(32, 2**18, nvcomp=EVERYWHERE)
    slot.areas = slot.areas._replace(workspace_nbytes=5 * workspace_for(1, 640))
    outcome = Outcome(array, (slice(0, 40), slice(0, 64)), [slot], cores=gpu_is_sooner)
    assert len(slot.by_nvcomp) == 5
    assert len(outcome.failed) == 11


@pytest.mark.parametrize("codecs", [name for name in DECODED if name != "3 crc32c"])
def test_what_the_gpu_gets_wrong_is_left_over(tmp_path: Path, codecs: str) -> None:
    data = numbers((40, 64), "f4")
    array = encoded(tmp_path / "a", codecs, data, (10, 16))
    slot = PretendedSlot(32, 2**18)
    slot.wrong = (0, 5)
    outcome = Outcome(array, (slice(0, 40), slice(0, 64)), [slot], cores=gpu_is_sooner)
    assert 0 < len(outcome.failed) <= 2
    outcome.rest()
    np.testing.assert_array_equal(outcome.found, data)


@pytest.mark.parametrize("codecs", DECODED)
def test_of_damaged_chunks_none_is_taken_that_no_core_takes(tmp_path: Path, codecs: str) -> None:
    """And those that a core takes, since nothing shows that they are damaged, are the same here."""
    data = numbers((80, 160), "f4")
    array = encoded(tmp_path / "a", codecs, data, (8, 16))
    rng = np.random.default_rng(0)
    for place in range(100):
        path = chunk_file(array, divmod(place, 10))
        path.write_bytes(damaged(path.read_bytes(), rng, place % 5))
    slot = PretendedSlot(100, 2**16)
    outcome = Outcome(array, (slice(0, 80), slice(0, 160)), [slot], cores=gpu_is_sooner)
    failed = set(outcome.failed)
    for number, part in enumerate(outcome.parts):
        (read,) = part.reads()
        found = np.empty(read.shape, np.float32)
        if number not in failed:
            read.read(found)
            assert outcome.found[read.target].tobytes() == found.tobytes()
    assert 25 < len(failed) < 100


@pytest.mark.parametrize("next_one", ["encoded", "as it is"])
@pytest.mark.parametrize("block", [1, 3, 6])
def test_a_later_block_that_is_refused_takes_no_other_chunk_with_it(
    tmp_path: Path, block: int, next_one: str
) -> None:
    """Of a chunk of Blosc, blocks have been listed by then; the next chunk's may be frames of Zstandard, or none."""
    data = numbers((40, 160), "f4")
    if next_one == "as it is":
        data[10:20] = np.random.default_rng(0).random((10, 160))
    codec = numcodecs.Blosc("zstd", 5, numcodecs.Blosc.NOSHUFFLE, 1024)
    array = zarr.create_array(
        tmp_path / "a", shape=data.shape, chunks=(10, 160), dtype="f4", zarr_format=2, compressors=codec
    )
    array[:] = data
    path = chunk_file(array, (0, 0))
    stored = bytearray(path.read_bytes())
    begins = np.frombuffer(bytes(stored[16 : 16 + 4 * 7]), np.uint32)
    stored[begins[block] + 4] ^= 1  # of the frame's magic number
    path.write_bytes(stored)
    slot = PretendedSlot(4, 2**16)
    outcome = Outcome(array, (slice(0, 40), slice(0, 160)), [slot], threads=1, cores=gpu_is_sooner)
    assert outcome.errors == []
    assert outcome.failed == [0]
    np.testing.assert_array_equal(outcome.found[10:], data[10:])


def damaged(stored: bytes, rng: np.random.Generator, how: int) -> bytes:
    data = bytearray(stored)
    place = int(rng.integers(len(data)))
    if how == 0:
        data[place] ^= 1 << int(rng.integers(8))
    elif how == 1:
        return bytes(data[:place])
    elif how == 2:
        data[place : place + 16] = rng.bytes(len(data[place : place + 16]))
    elif how == 3:
        data[int(rng.integers(min(16, len(data))))] ^= int(rng.integers(1, 256))  # in the header
    return bytes(data)


def test_views_are_decoded_as_what_is_stored(tmp_path: Path) -> None:
    """Maps seen as a matrix, a map a chunk, and a section of that."""
    maps = np.random.default_rng(0).integers(0, 50, (12, 10, 8)).astype("f4")
    array = zarr.create_array(tmp_path / "a", data=maps, chunks=(2, 10, 8), compressors=[ZstdCodec()])
    view = Flattened(array, (0,), (1, 2))
    whole = slice(0, 12), slice(0, 80)
    outcome = Outcome(view, whole, [PretendedSlot(5, 2**16)], cores=gpu_is_sooner)
    assert outcome.decoding.on_gpu == 6
    np.testing.assert_array_equal(outcome.found, maps.reshape(12, 80))
    section = Section(view, (3, 9), (5, 77))
    part = slice(0, 6), slice(0, 72)
    outcome = Outcome(section, part, [PretendedSlot(5, 2**16)], cores=gpu_is_sooner)
    assert outcome.decoding.on_gpu == 4
    np.testing.assert_array_equal(outcome.found, maps.reshape(12, 80)[3:9, 5:77])
    mask = np.zeros((12, 80), bool)
    assert coding_of(Masked(view, HeldMask.of(mask), (0, 1))) is None


def test_both_sides_decode_at_once(tmp_path: Path) -> None:
    """With no slot free, threads decode; each chunk once."""
    data = numbers((200, 160), "f4")
    array = encoded(tmp_path / "a", "2 zstd", data, (10, 10))

    def alike(pace: Pace) -> None:
        pace.batch_seconds, pace.core_seconds = 1e-3, 1e-3

    slot = PretendedSlot(20, 2**16, busy=50)
    outcome = Outcome(array, (slice(0, 200), slice(0, 160)), [slot], threads=2, cores=alike)
    batched = [number for batch in slot.batches for number in batch]
    assert outcome.failed == []
    assert sorted(batched + outcome.by_cores) == list(range(320))
    assert min(len(batched), len(outcome.by_cores)) > 0
    np.testing.assert_array_equal(outcome.found, data)


def test_cores_that_are_sooner_decode_everything(tmp_path: Path) -> None:
    data = numbers((40, 64), "f4")
    array = encoded(tmp_path / "a", "2 blosc", data, (10, 16))
    slot = PretendedSlot(20, 2**16)
    outcome = Outcome(array, (slice(0, 40), slice(0, 64)), [slot], cores=cores_are_sooner)
    assert slot.batches == []
    assert sorted(outcome.by_cores) == list(range(16))
    np.testing.assert_array_equal(outcome.found, data)


def test_cores_decode_until_the_gpu_can(tmp_path: Path) -> None:
    data = numbers((40, 64), "f4")
    array = encoded(tmp_path / "a", "2 zstd", data, (10, 16))
    slot = PretendedSlot(20, 2**16)
    whole = slice(0, 40), slice(0, 64)
    outcome = Outcome(array, whole, [slot], cores=gpu_is_sooner, ready=False)
    assert slot.batches == []
    np.testing.assert_array_equal(outcome.found, data)


def test_a_gpu_that_refuses_is_an_error(tmp_path: Path) -> None:
    """And its chunks are not counted as decoded."""
    data = numbers((40, 64), "f4")
    array = encoded(tmp_path / "a", "3 lz4", data, (10, 16))
    slots = [PretendedSlot(32, 2**18, refuse=True)]
    outcome = Outcome(array, (slice(0, 40), slice(0, 64)), slots, cores=gpu_is_sooner)
    assert [type(error) for error in outcome.errors] == [DriverError]
    assert outcome.failed == list(range(16))
    assert outcome.decoding.take() is slots[0]


def uploads_of(path: Path, slots: list[PretendedSlot], bring: Callable[[Any], Any]) -> CodedUpload:
    """An upload of sixteen chunks in batches of no more than eight."""
    array = encoded(path, "3 lz4", numbers((40, 64), "f4"), (10, 16))
    device = np.zeros((40, 64), np.float32)
    for slot in slots:  # they write there, so that it has to last as long
        slot.device = device
    parts, _ = region_uploads(array, (slice(0, 40), slice(0, 64)), device.ctypes.data, 256, coded=True)
    found = coding_of(array)
    assert found is not None
    decoding = Decoding(slots)
    gpu_is_sooner(decoding.pace(*found))
    sources: Any = [part.source for part in parts]
    return CodedUpload(sources, found[0], device.ctypes.data, decoding, bring, lambda *_: (0.0, 0.0), 2)


class Brought:
    """Stored bytes that come, after a while, or not."""

    def __init__(self, come: Callable[[], None] = lambda: None, count: int = 8) -> None:
        self._come, self._count = come, count

    def run(self, lane: Any) -> tuple[float, float]:
        self._come()
        return 0.0, 0.0

    def failed(self) -> list[int]:
        return list(range(self._count))


def begin_next(upload: CodedUpload) -> None:
    _, taken, slot = upload._take(helps=False)
    assert slot is not None
    upload._begin(taken, slot)


def run_by(upload: CodedUpload, count: int) -> None:
    threads = [threading.Thread(target=upload.run, args=(None, None)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_one_thread_at_a_time_looks_at_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several would take turns with the interpreter's lock, and all of their batches be late."""
    looking: list[None] = []
    most: list[int] = []

    def look(*arguments: Any, **options: Any) -> Any:
        looking.append(None)
        most.append(len(looking))
        time.sleep(0.01)
        found = look_at(*arguments, **options)
        looking.pop()
        return found

    monkeypatch.setattr(upload_module, "look_at", look)
    upload = uploads_of(
        tmp_path / "a", [PretendedSlot(4, 2**16) for _ in range(4)], lambda _: Brought(count=4)
    )
    run_by(upload, 4)
    assert most == [1, 1, 1, 1]
    assert upload.failed() == list(range(16))


def test_nobody_leaves_while_the_last_batch_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is to be brought: also not who saw that none was begun, just before."""
    left = threading.Event()

    def look(*arguments: Any, **options: Any) -> Any:
        left.wait(0.2)
        return look_at(*arguments, **options)

    def run() -> None:
        upload.run(None, None)
        left.set()

    monkeypatch.setattr(upload_module, "look_at", look)
    upload = uploads_of(tmp_path / "a", [PretendedSlot(16, 2**16)], lambda _: Brought(count=16))
    begun, take = threading.Barrier(2), upload._take

    def taken(*, helps: bool) -> Any:
        with suppress(threading.BrokenBarrierError):
            begun.wait(1)  # both have seen that nobody begins one
        return take(helps=helps)

    upload._take = taken  # type: ignore[method-assign]
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert not left.wait(0.15)
    begun.abort()
    for thread in threads:
        thread.join(10)
    assert upload.failed() == list(range(16))


def test_the_next_batch_is_begun_while_one_is_brought(tmp_path: Path) -> None:
    """By one of the threads; what is brought waits for it here."""
    opened: list[Any] = []
    second = threading.Event()

    def bring(rectangles: Any) -> Brought:
        opened.append(rectangles)
        if len(opened) == 2:
            second.set()
        return Brought(lambda: waited.append(second.wait(10)))

    waited: list[bool] = []
    upload = uploads_of(tmp_path / "a", [PretendedSlot(8, 2**16) for _ in range(2)], bring)
    run_by(upload, 2)
    assert waited
    assert all(waited)
    assert upload.failed() == list(range(16))


def test_a_thread_without_work_helps_to_bring_what_opens_meanwhile(tmp_path: Path) -> None:
    """Though the GPU is not done with an earlier batch: a thread that waited for that would help with nothing else."""
    finished = threading.Event()
    brought = [threading.Event(), threading.Event()]
    order = iter(brought)

    class Busy(PretendedSlot):
        def done(self) -> bool:
            return finished.is_set()

        def wait(self) -> None:
            assert finished.wait(10)

    upload = uploads_of(tmp_path / "a", [Busy(8, 2**16)], lambda _: Brought(next(order).set))
    idle, wait = threading.Event(), upload._wait

    def waits() -> None:
        idle.set()
        wait()

    upload._wait = waits  # type: ignore[method-assign]
    begin_next(upload)
    helper = threading.Thread(target=upload.run, args=(None, None))
    helper.start()
    assert brought[0].wait(10)
    assert idle.wait(10)
    upload._begin(range(8, 16), Busy(8, 2**16))
    upload._next = 16  # not before: a thread for which nothing is left leaves
    assert brought[1].wait(10), "while the first is still decoded"
    helper.join(10)
    assert not helper.is_alive()
    finished.set()
    upload.settle()


def test_what_nobody_brings_any_more_is_left_over(tmp_path: Path) -> None:
    """A thread that began a batch, and failed with another that it helped to bring, leaves it behind: it is not waited
    for, and the error is seen."""

    def refuse() -> None:
        raise DriverError("the driver is not there", 999)

    slots = [PretendedSlot(8, 2**16) for _ in range(2)]
    upload = uploads_of(tmp_path / "a", slots, lambda _: Brought(refuse))
    for _ in slots:
        begin_next(upload)
    with pytest.raises(DriverError):
        upload.run(None, None)
    settling = threading.Thread(target=upload.settle, daemon=True)
    settling.start()
    settling.join(10)
    assert not settling.is_alive()
    assert upload.failed() == list(range(16))
    assert [upload._decoding.take() for _ in range(3)].count(None) == 1


def test_a_batch_whose_results_do_not_come_is_left_over(tmp_path: Path) -> None:
    """Whoever asks for them gets the error, which may be a thread that loads something else."""

    class Lost(PretendedSlot):
        def wait(self) -> None:
            raise DriverError("the driver is not there", 999)

    upload = uploads_of(tmp_path / "a", [Lost(16, 2**16)], lambda _: Brought())
    upload.run(None, None)
    with pytest.raises(DriverError):
        upload._decoding.take()
    assert upload.failed() == list(range(16))


def test_too_little_memory_leaves_chunks_over(tmp_path: Path) -> None:
    """What does not compress takes more room than a slot has for stored bytes."""
    data = np.random.default_rng(0).integers(0, 2**32, (40, 64)).astype(np.uint32)
    array = encoded(tmp_path / "a", "2 lz4", data, (10, 16))
    slot = PretendedSlot(16, 16 * 768)
    slot.areas = slot.areas._replace(stored_nbytes=3000)
    outcome = Outcome(array, (slice(0, 40), slice(0, 64)), [slot], cores=gpu_is_sooner)
    assert len(outcome.failed) == 12
    outcome.rest()
    np.testing.assert_array_equal(outcome.found, data)


@pytest.mark.parametrize(
    ("left", "room", "batch", "core", "expected"),
    [
        (100, True, 10.0, 1.0, Choice.GPU),  # the cores would take 25
        (39, True, 10.0, 1.0, Choice.GPU),
        (36, True, 10.0, 1.0, Choice.CORE),
        (100, False, 10.0, 1.0, Choice.CORE),
        (8, False, 10.0, 21.0, Choice.WAIT),  # the GPU is back after 20
        (8, False, 10.0, 20.0, Choice.CORE),
    ],
)
def test_whoever_is_sooner_takes_the_next(
    left: int, room: bool, batch: float, core: float, expected: Choice
) -> None:
    pace = Pace(ZSTD, 2**20, 64)
    pace.batch_seconds, pace.core_seconds = batch, core
    assert pace.choice(left, 8, 4, room=room) is expected


def test_a_pace_follows_what_was_measured() -> None:
    pace = Pace(RAW, 2**20, 64)
    for _ in range(60):
        pace.took(core=2.0)
        pace.took(batch=3.0)
    assert (pace.core_seconds, pace.batch_seconds) == pytest.approx((2, 3))


@pytest.mark.parametrize("codecs", CODECS)
def test_only_what_is_decoded_has_a_coding(tmp_path: Path, codecs: str) -> None:
    array = encoded(tmp_path / "a", codecs, numbers((20, 32), "f4"), (10, 16))
    found = coding_of(array)
    assert (found is not None) == (codecs in DECODED)
    if found is not None:
        assert found[0].suffix == ("crc32c" in codecs)
        assert found[1] == 640
