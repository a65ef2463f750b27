"""Bands of items, each of which one worker compares with all before it: where their words go, how the items reach a
GPU, and the whole search, with NumPy in the place of each GPU."""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client
from numpy.testing import assert_array_equal

import tilewright as tw
from tests.kernels.gpu.pretended_driver import BLOCK, Driver, lanes
from tests.kernels.neighbours import naive
from tilewright.kernels.neighbours import order
from tilewright.kernels.neighbours.words import orders
from tilewright.pipeline.events import Notice
from tilewright.pipeline.neighbours import band_words, job, pieces, plan, tasks, upload
from tilewright.pipeline.neighbours.band_words import BandWords, WordsPlace
from tilewright.pipeline.transfer import file_upload

ITEMS, WIDTH, K = 300, 8, 5


def filled(place: WordsPlace, value: int) -> bool:
    """What a worker does; whether it could."""
    memory = place.open()
    if memory is None:
        return False
    assert (memory == 0).all()
    memory[:] = value
    return True


def test_workers_put_words_where_they_are_read(processes: Client) -> None:
    """Bands begin at any byte of a page."""
    held = BandWords([700, 1300, 1], 3, shared=True)
    places = [held.place(band) for band in range(3)]
    assert processes.gather(processes.map(filled, places, [7, 8, 9], pure=False)) == [True] * 3
    assert_array_equal(held.words, np.repeat([7, 8, 9], [700, 1300, 1])[:, None] * np.ones((1, 3), int))
    again = places[0]
    held.close()
    assert again is not None
    assert processes.submit(filled, again, 7, pure=False).result() is False


def test_words_that_lie_elsewhere_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    held = BandWords([2, 3], 1, shared=True)
    place = held.place(0)
    assert place is not None
    boot, device, number = place.sight
    assert replace(place, sight=(f"not {boot}", device, number)).open() is None
    held.put(1, np.full((3, 1), 5, np.uint64))
    held.put(0, np.full((2, 1), 4, np.uint64))
    assert held.words.tolist() == [[4], [4], [5], [5], [5]]
    alone = BandWords([2], 1, shared=False)
    assert alone.place(0) is None
    alone.put(0, held.words[:2])
    assert alone.words.tolist() == [[4], [4]]

    assert (held.sent, alone.sent) == ("", "")

    def fails(*arguments: Any) -> Any:
        raise OSError("none is there")

    monkeypatch.setattr(band_words, "NamelessFile", fails)
    without = BandWords([2, 3], 1, shared=True)
    assert without.place(1) is None
    assert without.sent == "no memory is shared here: none is there"
    without.put(1, np.full((3, 1), 5, np.uint64))
    without.put(0, np.full((2, 1), 4, np.uint64))
    assert without.words.tolist() == held.words.tolist()
    monkeypatch.undo()
    for name, nbytes in (
        ("free_nbytes", 39),
        ("memory_limit", 39 * 4),
    ):  # what a container has is not the host's
        with monkeypatch.context() as patch:
            patch.setattr(band_words, name, lambda nbytes=nbytes: nbytes)
            short = BandWords([2, 3], 1, shared=True)
            assert short.place(0) is None
            assert short.sent == "they come to 40 B, and 39 B may be shared here"


class HostLane:
    """A lane to memory of this process, which is the GPU's."""

    def block(self) -> np.ndarray:
        return np.full(2**23, 255, np.uint8)

    def sent(self, stream: Any) -> None:
        assert stream == "stream"


class Stream(str):
    """Of which all is done."""

    def synchronize(self) -> None:
        pass


@pytest.fixture
def host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent to a GPU stays here."""

    @contextmanager
    def lent(count: int) -> Iterator[Any]:
        pool: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(count):
            pool.put(HostLane())
        yield pool

    def rectangle(source: np.ndarray, target: int, pitch: int, stream: Any) -> None:
        for row, line in enumerate(np.ascontiguousarray(source)):
            ctypes.memmove(target + row * pitch, line.ctypes.data, line.nbytes)

    def memory(shape: Any, dtype: Any) -> np.ndarray:
        return np.full(np.prod(shape) * dtype.itemsize, 255, np.uint8).view(dtype).reshape(shape)

    monkeypatch.setattr(upload, "lanes_lent", lent)
    monkeypatch.setattr(upload, "upload_rectangle", rectangle)
    monkeypatch.setattr(upload, "upload_stream", lambda: "stream")
    monkeypatch.setattr(upload, "address", lambda array: array.ctypes.data)
    gpu = SimpleNamespace(device_array=memory, current_context=lambda: None)
    monkeypatch.setattr(upload, "cuda", gpu)


@pytest.mark.usefixtures("host_memory")
@pytest.mark.parametrize("of", ["rows", "columns"])
@pytest.mark.parametrize(("dtype", "width"), [("float16", 11), (">f4", 8), ("bool", 21), ("int8", 32)])
@pytest.mark.parametrize("codec", [None, "auto"])
def test_items_are_on_the_gpu_as_they_are_stored(
    of: Any, dtype: str, width: int, codec: Any, rng: np.random.Generator, tmp_path: Path
) -> None:
    """With zeros up to whole lines of 16 bytes, in whatever parts they are read."""
    items = rng.integers(0, 2 if dtype == "bool" else 100, (130, width)).astype(dtype)
    stored = zarr.create_array(
        tmp_path / "x.zarr",
        data=np.ascontiguousarray(items if of == "rows" else items.T),
        chunks=(37, 5),
        compressors=codec,
    )
    here, there = upload.items_read_and_sent(stored, of, 100, threads=3, check=lambda: None)
    assert_array_equal(here, items[:100])
    assert there.nbytes // 100 % 16 == 0
    assert there.shape[1] - width < 16
    assert_array_equal(there[:, :width], items[:100].astype(there.dtype))
    assert not there[:, width:].any()


@pytest.mark.usefixtures("host_memory")
@pytest.mark.parametrize("dtype", ["float16", "bool"])
@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize(
    ("hole", "shards"),
    [
        pytest.param(np.s_[37:74, :8], None, id="first"),
        pytest.param(np.s_[37:74, 8:16], None, id="between"),
        pytest.param(np.s_[74:111, 24:], None, id="last"),
        pytest.param(np.s_[20:40, :8], (40, 16), id="in a shard"),
    ],
)
def test_items_that_lie_plain_in_files_are_sent_by_loops(
    dtype: str,
    refused: bool,
    hole: tuple[slice, slice],
    shards: tuple[int, int] | None,
    rng: np.random.Generator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks that are not there, or that the loop could not send, in the ordinary way; wherever they lie in rows."""
    driver = Driver()
    driver.refuse |= {"cuMemcpyHtoDAsync_v2", "cuMemcpy2DAsync_v2"} if refused else set()
    made = list(lanes(3))  # whose memory is to stay
    left = [words for words, _ in made]
    upload_of = file_upload.Upload
    loops = SimpleNamespace(
        available=lambda: True,
        Upload=lambda all_, nbytes, threads: upload_of(all_, BLOCK, threads, driver.functions),
    )
    monkeypatch.setattr(upload, "file_upload", loops)
    monkeypatch.setattr(upload, "upload_stream", lambda: Stream("stream"))
    monkeypatch.setattr(HostLane, "to_gpu", property(lambda lane: left.pop()), raising=False)
    items = rng.integers(0, 2, (130, 32)).astype(dtype)
    items[hole] = 0
    layout: dict[str, Any] = {"chunks": (37, 8)} if shards is None else {"chunks": (20, 8), "shards": shards}
    stored = zarr.create_array(tmp_path / "x.zarr", data=items, compressors=None, **layout)
    if shards is None:
        there_are = sum(path.is_file() for path in (tmp_path / "x.zarr" / "c").rglob("*"))
        assert there_are == 15, "zarr leaves one out, of zeros"
    here, there = upload.items_read_and_sent(stored, "rows", 100, threads=3, check=lambda: None)
    assert here is None
    assert driver.copies > 0
    assert_array_equal(there, items[:100].astype(there.dtype))


@pytest.mark.usefixtures("host_memory")
@pytest.mark.parametrize("width", [64, 61])
def test_items_whose_cosines_would_leave_the_range_are_sent_scaled(
    width: int, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = rng.standard_normal((130, width)).astype(np.float32)
    items[3::7] *= np.float32(1e-30)
    stored = zarr.create_array(tmp_path / "x.zarr", data=items, chunks=(37, 16))
    work = SimpleNamespace(
        metric="cosine", a=stored, of="rows", threads=2, sums=np.dtype(np.float32), device="cuda"
    )
    monkeypatch.setattr(tasks, "_placed", lambda work, items: items.copy())
    here, there = tasks.sent_to_gpu(work, 100, lambda: None)  # type: ignore[arg-type]
    assert here is not None
    assert_array_equal(here, there)
    exponents = np.log2(np.abs(there).max(1))
    assert (np.abs(exponents) <= 41).all()
    whole = items[:100].astype(np.float64)
    directions = [
        each / np.linalg.norm(each, axis=1, keepdims=True) for each in (there.astype(np.float64), whole)
    ]
    np.testing.assert_allclose(directions[0], directions[1], rtol=1e-6)


@pytest.mark.usefixtures("host_memory")
def test_items_longer_than_a_lane_are_sent_in_parts(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = upload.block_rectangles
    monkeypatch.setattr(upload, "block_rectangles", lambda shape, itemsize: cut(shape, itemsize * 2**18))
    items = rng.random((9, 45), np.float32)
    stored = zarr.create_array(tmp_path / "x.zarr", data=items, chunks=(4, 45))
    _, there = upload.items_read_and_sent(stored, "rows", 9, threads=2, check=lambda: None)
    assert_array_equal(there, np.pad(items, ((0, 0), (0, 3))))


class ByNumPy:
    """The search of a GPU, `kernels.neighbours.mutual`, by the definition."""

    def __init__(self, could: Callable[[int], bool]) -> None:
        self._could = could
        self.with_all: list[int] = []

    def words_of_band(
        self,
        a: np.ndarray,
        first: int,
        k: int,
        *,
        metric: Any,
        exclude_self: bool,
        target: Any,
        meanwhile: Any,
        **options: Any,
    ) -> np.ndarray | None:
        meanwhile()
        memory = target()
        if not self._could(first):
            return None
        rows, kept = np.arange(len(a)), k + exclude_self
        keys, _ = naive.exact_keys(a, a, metric)
        found = orders(keys.astype(np.float32)).astype(np.uint64) << np.uint64(32)
        found = found | (np.uint64(0xFFFFFFFF) - rows.astype(np.uint64))
        found[np.isnan(keys) | (np.maximum(rows[:, None], rows) < first)] = 0
        if exclude_self:
            np.fill_diagonal(found, 0)
        best = np.sort(found, 1)[:, ::-1][:, :kept]
        if memory is None:
            return np.ascontiguousarray(best)
        memory[:] = best
        return memory  # type: ignore[no-any-return]

    def nearest_with_all(
        self, a: np.ndarray, k: int, *, metric: Any, exclude_self: bool, **options: Any
    ) -> Any:
        self.with_all.append(len(a))
        return naive.nearest(*naive.exact_keys(a, a, metric), k, exclude_self)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ByNumPy]:
    """Makes each of so many workers of this process one with a GPU."""

    def begin(count: int, could: Callable[[int], bool] = lambda first: True) -> ByNumPy:
        survey, found = job.survey, ByNumPy(could)

        def facts(client: Any, device: Any) -> Any:
            fact = survey(client, "cpu")[0]
            return [replace(fact, device="cuda", device_free_nbytes=2**33)] * count

        def sent(work: Any, stop: int, check: Any) -> Any:
            block = tasks.items_of(work.a, work.of, 0, stop, threads=2)
            return (None if count > 1 else block), block

        monkeypatch.setattr(job, "survey", facts)
        monkeypatch.setattr(job, "finds_on_gpu", lambda *asked: True)
        monkeypatch.setattr(job, "_mutual_nbytes", lambda *asked: 1)
        monkeypatch.setattr(plan, "LEAST_BAND", 100)
        monkeypatch.setattr(plan, "BAND_UNIT", 1)
        monkeypatch.setattr(plan, "ITEM_PAIRS", 30)
        monkeypatch.setattr(tasks, "mutual_for", lambda device: found)
        monkeypatch.setattr(tasks, "sent_to_gpu", sent)
        return found

    return begin


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize("metric", order.METRICS)
def test_bands_find_the_nearest_of_all_items(
    client: Client,
    gpus: Callable[..., ByNumPy],
    rng: np.random.Generator,
    tmp_path: Path,
    metric: Any,
    exclude_self: bool,
    count: int,
) -> None:
    """Verified while they search, and no block is written beside the output."""
    gpus(count)
    x = rng.integers(-3, 4, (ITEMS, WIDTH)).astype(np.float16)
    x[9] = x[40] = x[2]
    x[7, 3] = np.nan
    path, out = tmp_path / "x.zarr", tmp_path / "near.zarr"
    zarr.create_array(path, data=x, chunks=(64, WIDTH))
    run = tw.topk(path, out=out, k=K, metric=metric, exclude_self=exclude_self, cluster=client)
    assert (run.plan.tasks, run.nan_rows, run.incomplete_rows) == (count, 1, 1)
    assert run.verification.passed
    wanted = naive.nearest(*naive.exact_keys(x, x, metric), K, exclude_self)
    stored = zarr.open_group(out, mode="r")
    assert_array_equal(stored["indices"][...], wanted.indices)  # type: ignore[index]
    np.testing.assert_allclose(stored["values"][...], wanted.values, rtol=1e-6)  # type: ignore[index]
    assert tw.audit(out, cluster=client).passed


@pytest.mark.parametrize(("count", "no_room"), [(1, False), (2, False), (2, True)])
def test_items_of_which_too_many_are_equally_near_are_compared_with_all(
    client: Client,
    gpus: Callable[..., ByNumPy],
    rng: np.random.Generator,
    tmp_path: Path,
    count: int,
    no_room: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a worker that has all of them at once, by several anew; the words of bands are given back by then, and it is
    told where they are sent since nothing has room for them."""
    from tilewright.kernels.neighbours.host import Nearest

    open_files: list[str] = []

    def nearest(items: Any, k: int, *, precision: Any, **options: Any) -> Nearest:
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                open_files.append(str(descriptor.readlink()))
        return Nearest(items, k, **options)

    searched = gpus(count, lambda first: count > 1 and not first)
    monkeypatch.setattr(job, "HereClient", ())  # as workers of other processes: words are shared
    if no_room:
        monkeypatch.setattr(band_words, "free_nbytes", lambda: 1)
    monkeypatch.setattr(tasks, "nearest_for", lambda device: nearest)
    monkeypatch.setattr(tasks, "_placed", lambda work, items: items)
    x = rng.integers(-3, 4, (ITEMS, WIDTH)).astype(np.float16)
    zarr.create_array(tmp_path / "x.zarr", data=x, chunks=(64, WIDTH))
    told: list[Any] = []
    found = tw.topk(tmp_path / "x.zarr", k=K, cluster=client, listener=told.append)
    wanted = naive.nearest(*naive.exact_keys(x, x, "dot"), K, False)
    assert_array_equal(found.indices, wanted.indices)
    assert searched.with_all == ([ITEMS] if count == 1 else [])
    assert not [name for name in open_files if "tilewright-words" in name]
    texts = [event.message for event in told if isinstance(event, Notice)]
    assert ("too many items are equally near: each is compared with all" in texts) == (count > 1)
    sent = [
        text for text in texts if text.startswith("what blocks find is sent through the cluster, more slowly")
    ]
    assert len(sent) == int(no_room)


@pytest.mark.parametrize("quick", [True, False])
def test_what_bands_have_found_is_kept_where_the_output_cannot_be_written(
    client: Client,
    gpus: Callable[..., ByNumPy],
    rng: np.random.Generator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quick: bool,
) -> None:
    """What took long to find, before the output is begun: the process may be killed then."""
    gpus(2)
    monkeypatch.setattr(job, "QUICK_SECONDS", 60.0 if quick else 0.0)
    path, out = tmp_path / "x.zarr", tmp_path / "near.zarr"
    zarr.create_array(path, data=rng.integers(-3, 4, (ITEMS, WIDTH)).astype(np.float16), chunks=(64, WIDTH))

    def fails(growing: Any, request: Any, sides: Any, held: Any, finished: Any) -> None:
        held.settle()
        assert bool(list(held.folder.glob("*.npz"))) is not quick
        raise tw.StoreError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(job, "write_arrays", fails)
        with pytest.raises(tw.StoreError, match="no room"):
            tw.topk(path, out=out, k=K, cluster=client)
    run = tw.topk(path, out=out, k=K, cluster=client)
    assert (run.resumed, run.read_nbytes) == (1, 0)
    assert tw.audit(out, cluster=client).passed


def test_what_earlier_code_has_found_is_looked_for_anew_where_it_meant_something_else(
    client: Client,
    gpus: Callable[..., ByNumPy],
    rng: np.random.Generator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus(2)
    path, out = tmp_path / "x.zarr", tmp_path / "near.zarr"
    zarr.create_array(path, data=rng.integers(-3, 4, (ITEMS, WIDTH)).astype(np.float16), chunks=(64, WIDTH))

    def fails(*arguments: Any) -> None:
        raise tw.StoreError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(job, "write_arrays", fails)
        patch.setattr(pieces, "MEANING", pieces.MEANING - 1)
        with pytest.raises(tw.StoreError, match="no room"):
            tw.topk(path, out=out, k=K, cluster=client)
    assert tw.topk(path, out=out, k=K, cluster=client).resumed == 0
