"""Arrays that are no Zarr read as NumPy has them, whatever part is asked for."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array
import h5py
import numpy as np
import pyarrow
import pytest
import xarray
import zarr
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

import tilewright as tw
from tilewright.pipeline.store import arrays as store
from tilewright.pipeline.store.arrays import name_of, open_array
from tilewright.pipeline.store.chunks import layout_of
from tilewright.pipeline.store.origin import is_same_array
from tilewright.pipeline.store.region import Flattened, Section, StoredArray
from tilewright.pipeline.store.region_read import read_region, read_targets, region_reads, region_uploads
from tilewright.pipeline.store.sources.dasks import computed_on
from tilewright.pipeline.store.sources.hdf5 import is_hdf5
from tilewright.pipeline.store.sources.mapped import Mapped, MappedStore
from tilewright.pipeline.store.sources.mapping import copy_box
from tilewright.pipeline.store.sources.memory import SharedMemory
from tilewright.pipeline.store.sources.parts import open_matrix
from tilewright.pipeline.transfer.file_rectangles import Rectangle

SHAPE = 37, 29


@pytest.fixture(autouse=True)
def few_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rectangles so small that these arrays have several."""
    monkeypatch.setattr("tilewright.pipeline.store.sources.mapped.UNIT_SIDE", 8)


def whole(array: StoredArray) -> np.ndarray:
    return read_region(array, tuple(slice(0, side) for side in array.shape))


def mapped_of(array: StoredArray) -> Mapped:
    assert isinstance(array.store, MappedStore)
    return array.store.mapped


def numbers(dtype: str, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    found = np.random.default_rng(0).integers(0, 2 if dtype == "?" else 100, shape).astype(dtype)
    return found * (1 + 2j) if found.dtype.kind == "c" else found


@pytest.mark.sample(6)
@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "?", "<u2", "<f2", "<c16"])
def test_npy_is_one_plain_chunk(dtype: str, order: Any, tmp_path: Path) -> None:
    a = np.asarray(numbers(dtype), order=order)
    np.save(tmp_path / "a.npy", a)
    opened = open_matrix(str(tmp_path / "a.npy"), "A")
    np.testing.assert_array_equal(whole(opened), a)
    assert opened.dtype.kind == ("u" if dtype == "?" else a.dtype.kind)
    assert store.is_local(opened)
    assert store.is_plain(opened) == (order == "C" and a.dtype.isnative)
    np.testing.assert_array_equal(zarr.open_array(opened.store, mode="r")[:], a)
    layout = layout_of(opened, "a")
    assert layout is not None
    assert layout.whole


@given(data=st.data(), order=st.sampled_from("CF"), native=st.booleans())
def test_any_region_of_a_file(data: st.DataObject, order: Any, native: bool, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("region")
    shape = tuple(data.draw(st.lists(st.integers(1, 23), min_size=2, max_size=2)))
    a = np.asarray(numbers("<i4" if native else ">i4", shape), order=order)
    np.save(folder / "a.npy", a)
    opened = open_matrix(folder / "a.npy", "A")
    ends = [sorted(data.draw(st.tuples(st.integers(0, side), st.integers(0, side)))) for side in shape]
    region = tuple(slice(*pair) for pair in ends)
    np.testing.assert_array_equal(read_region(opened, region), a[region])
    assert [part.target for part in region_reads(opened, region)] == read_targets(opened, region)


@given(
    axes=st.permutations(range(3)), cut=st.integers(1, 2), top=st.integers(0, 5), left=st.integers(0, 5),
    order=st.sampled_from("CF"),
)  # fmt: skip
def test_more_than_two_dimensions(
    axes: list[int], cut: int, top: int, left: int, order: Any, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("flattened")
    a = np.asarray(numbers("<i4", (5, 6, 7)), order=order)
    np.save(folder / "a.npy", a)
    view = Flattened(open_array(folder / "a.npy", ndim=3, role="X"), tuple(axes[:cut]), tuple(axes[cut:]))
    matrix = a.transpose(axes).reshape(view.shape)
    region = slice(min(top, view.shape[0]), view.shape[0]), slice(min(left, view.shape[1]), view.shape[1])
    np.testing.assert_array_equal(read_region(view, region), matrix[region])


def test_rectangles_for_a_gpu(tmp_path: Path) -> None:
    """What loops read from the file is described by its offset there, the header's length and more."""
    a = numbers("<f4")
    np.save(tmp_path / "a.npy", a)
    opened = open_matrix(tmp_path / "a.npy", "A")
    parts, others = region_uploads(opened, (slice(3, 20), slice(5, 25)), 0, 80)
    assert not others
    held = np.zeros((17, 20), "<f4")
    data = (tmp_path / "a.npy").read_bytes()
    for part in parts:
        assert isinstance(part.source, Rectangle)
        one = part.source
        for row in range(one.rows):
            start = one.offset + row * one.stride
            line = np.frombuffer(data[start : start + one.width], "<f4")
            top, place = divmod(one.target + row * one.pitch, 80)
            held[top, place // 4 : place // 4 + len(line)] = line
    np.testing.assert_array_equal(held, a[3:20, 5:25])


def test_memory_is_shared_and_copied_once() -> None:
    a = numbers("<f8")
    one, other = open_matrix(a, "A"), open_matrix(a.copy(), "B")
    assert is_same_array(one, other)
    assert mapped_of(one).path == mapped_of(other).path
    there = pickle.loads(pickle.dumps(one))
    before = a.copy()
    a[0, 0] += 1
    np.testing.assert_array_equal(whole(there), before)
    assert not is_same_array(one, open_matrix(a, "A"))
    np.testing.assert_array_equal(whole(open_matrix(a[::2, ::3], "A")), a[::2, ::3])


def test_memory_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    close = SharedMemory.close

    def closing(self: SharedMemory) -> None:
        closed.append(self.path)
        close(self)

    monkeypatch.setattr(SharedMemory, "close", closing)
    opened = open_matrix(numbers("<f8", (3, 5)), "A")
    path = mapped_of(opened).path
    del opened
    assert path in closed


def test_memory_of_another_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = pickle.dumps(open_matrix(numbers("<f8"), "A"))
    monkeypatch.setattr("tilewright.pipeline.store.sources.mapped.sight_of", lambda path: ("another", 1, 2))
    with pytest.raises(tw.StoreError, match=r"memory of a process on another host.*numpy\.save"):
        pickle.loads(pickled)


def test_mapped_files_of_numpy(tmp_path: Path) -> None:
    """They are read where they lie, also some of their rows; what is changed in memory alone is not in the file."""
    a = numbers("<f8")
    np.save(tmp_path / "a.npy", a)
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    for part in (mapped, mapped[5:20], mapped[5:], mapped.T):
        opened = open_matrix(part, "A")
        np.testing.assert_array_equal(whole(opened), part)
        assert mapped_of(opened).path == str(tmp_path / "a.npy")
    assert mapped_of(open_matrix(mapped[:, 3:], "A")).digest
    changed = np.load(tmp_path / "a.npy", mmap_mode="c")
    changed[0, 0] += 1
    np.testing.assert_array_equal(whole(open_matrix(changed, "A")), changed)


def test_bool_of_zarr(tmp_path: Path) -> None:
    a = numbers("?")
    for zarr_format in (2, 3):
        for shards in (None, (20, 16)) if zarr_format == 3 else (None,):
            array = zarr.create_array(
                tmp_path / f"{zarr_format}{shards}", data=a, chunks=(10, 8), shards=shards, zarr_format=zarr_format
            )  # fmt: skip
            opened = open_matrix(array, "A")
            assert opened.dtype == np.uint8
            np.testing.assert_array_equal(whole(opened), a)


HDF5 = {
    "plain": {},
    "chunks": {"chunks": (8, 10)},
    "deflate": {"chunks": (8, 10), "compression": "gzip"},
    "shuffle": {"chunks": (8, 10), "compression": "gzip", "shuffle": True},
    "all": {"chunks": (8, 10), "compression": "gzip", "shuffle": True, "fletcher32": True},
    "sums": {"chunks": (8, 10), "fletcher32": True},
    "bytes": {"chunks": (8, 10), "shuffle": True},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["<f4", ">i2", "?"])
@pytest.mark.parametrize("user", [0, 512])
def test_hdf5_is_read_where_it_lies(dtype: str, user: int, tmp_path: Path) -> None:
    a = numbers(dtype)
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=user) as file:
        for name, options in HDF5.items():
            file.create_dataset(f"group/{name}", data=a, **options)
    assert is_hdf5(tmp_path / "a.h5")
    for name in HDF5:
        opened = open_matrix(f"{tmp_path / 'a.h5'}::/group/{name}", "A")
        layout = layout_of(opened, name)
        assert layout is not None
        assert mapped_of(opened).path == str(tmp_path / "a.h5")
        assert layout.plain == (name in ("plain", "chunks") and a.dtype.isnative)
        np.testing.assert_array_equal(whole(opened), a)
        np.testing.assert_array_equal(read_region(opened, (slice(5, 30), slice(9, 21))), a[5:30, 9:21])
        np.testing.assert_array_equal(whole(pickle.loads(pickle.dumps(opened))), a)
        with h5py.File(tmp_path / "a.h5") as file:
            again = open_matrix(file[f"group/{name}"], "A")
        assert is_same_array(opened, again)


HDF5_CODECS: dict[str, Callable[[Any], Any]] = {
    "zstd": lambda plugin: plugin.Zstd(clevel=5),
    "blosc zstd": lambda plugin: plugin.Blosc(cname="zstd", clevel=3, shuffle=plugin.Blosc.SHUFFLE),
    "blosc lz4": lambda plugin: plugin.Blosc(cname="lz4", clevel=9, shuffle=plugin.Blosc.BITSHUFFLE),
}


@pytest.mark.parametrize("dtype", ["<f4", ">i2", "<c16"])
@pytest.mark.parametrize("codec", HDF5_CODECS)
def test_registered_filters_of_hdf5(codec: str, dtype: str, tmp_path: Path) -> None:
    """As hdf5plugin writes them, with the library's own codecs; ours are numcodecs'."""
    plugin = pytest.importorskip("hdf5plugin", reason="hdf5plugin, of the extra test, is not installed here")
    values = numbers(dtype)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        written = file.create_dataset("x", data=values, chunks=(16, 20), **HDF5_CODECS[codec](plugin))
        assert written.id.get_create_plist().get_filter(0)[0] in (32001, 32015)
    array = open_matrix(f"{tmp_path}/x.h5::/x", "A")
    assert mapped_of(array).filters[-1]["id"] == codec.split()[0]
    np.testing.assert_array_equal(whole(array), values)


def test_other_registered_filters_of_hdf5_are_refused(tmp_path: Path) -> None:
    plugin = pytest.importorskip("hdf5plugin", reason="hdf5plugin, of the extra test, is not installed here")
    for name, code, options in (
        ("blosc2", 32026, plugin.Blosc2()),
        ("bitshuffle", 32008, plugin.Bitshuffle()),
        ("lz4", 32004, plugin.LZ4()),
    ):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file.create_dataset("x", data=numbers("<f4"), chunks=(16, 20), **options)
        with pytest.raises(tw.StoreError, match=rf"HDF5's filter {code} \({name}\).*h5repack"):
            open_matrix(f"{tmp_path}/{name}.h5::/x", "A")


def test_long_maps_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = numbers("<f4")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("a", data=a, chunks=(2, 2))
    monkeypatch.setattr("tilewright.pipeline.store.sources.mapped.MOST_TABLE_NBYTES", 100)
    opened = open_matrix(tmp_path / "a.h5", "A")
    pickled = pickle.dumps(opened)
    assert len(pickled) < mapped_of(opened).table.nbytes  # type: ignore[union-attr]
    np.testing.assert_array_equal(whole(pickle.loads(pickled)), a)


def test_chunks_of_hdf5_that_were_never_written(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        part = file.create_dataset("part", SHAPE, "<f8", chunks=(8, 10), fillvalue=3.0)
        part[10:12] = 1
        file.create_dataset("never", SHAPE, "<f4", fillvalue=2.0)
        file.create_dataset("none", SHAPE, "<f4", chunks=(8, 10))
        for name in ("part", "never", "none"):
            np.testing.assert_array_equal(whole(open_matrix(file[name], "A")), file[name][...])


def test_netcdf_keeps_names_and_attributes(tmp_path: Path) -> None:
    a = numbers("<f4")
    given = xarray.Dataset({"t2m": (("time", "place"), a, {"units": "K"})}, {"place": np.arange(29)})
    given.to_netcdf(tmp_path / "a.nc", engine="h5netcdf", encoding={"t2m": {"zlib": True, "shuffle": True}})
    opened = open_matrix(f"{tmp_path / 'a.nc'}::t2m", "A")
    assert opened.attrs["units"] == "K"
    assert opened.attrs["_ARRAY_DIMENSIONS"] == ["time", "place"]
    np.testing.assert_array_equal(whole(opened), a)
    with xarray.open_dataset(tmp_path / "a.nc", engine="h5netcdf") as lazy:
        assert is_same_array(opened, open_matrix(lazy["t2m"], "A"))
        np.testing.assert_array_equal(whole(open_matrix(lazy["t2m"][3:9, 4:], "A")), a[3:9, 4:])


@pytest.mark.parametrize("chunks", [None, {}])
def test_xarray_by_its_store(chunks: Any, tmp_path: Path) -> None:
    """What is stored as it is, is read from there; what is decoded, as xarray decodes it."""
    a = numbers("<f8")
    given = xarray.Dataset({"a": (("t", "x"), a), "packed": (("t", "x"), a)})
    packed = {"dtype": "i2", "scale_factor": 0.5, "_FillValue": -1}
    given.to_zarr(tmp_path / "a.zarr", encoding={"packed": packed}, zarr_format=2)
    lazy = xarray.open_zarr(tmp_path / "a.zarr", chunks=chunks)
    opened = open_matrix(lazy["a"], "A")
    assert name_of(opened) == str(tmp_path / "a.zarr" / "a")
    np.testing.assert_array_equal(whole(opened), a)
    if chunks is None:
        part = open_matrix(lazy["a"][3:9, 4:], "A")
        assert isinstance(part, Section)
        np.testing.assert_array_equal(whole(part), a[3:9, 4:])
        for other in (lazy["packed"], lazy["a"][::2], lazy["a"].T, lazy["a"] + 1):
            np.testing.assert_array_equal(whole(open_matrix(other, "A")), other.values)
    held = open_matrix(given["a"], "A")
    assert held.attrs["_ARRAY_DIMENSIONS"] == ["t", "x"]
    np.testing.assert_array_equal(whole(held), a)


def test_dask_is_computed_once_by_its_graph(client: Client) -> None:
    a = numbers("<f8")
    array = dask.array.from_array(a, chunks=((10, 20, 7), (5, 24))) * 2 + 1
    opened, same = open_matrix(array, "A"), open_matrix(array, "B")
    assert is_same_array(opened, same)
    with pytest.raises(tw.StoreError, match=r"not computed yet; compute it"):
        whole(opened)
    computed_on(client, [opened, same])
    np.testing.assert_array_equal(whole(opened), 2 * a + 1)
    np.testing.assert_array_equal(whole(same), 2 * a + 1)


_noted: list[tuple[int, ...]] = []


def note(block: np.ndarray, block_info: Any = None) -> np.ndarray:
    _noted.append(block_info[0]["chunk-location"])
    return block


def test_what_blocks_of_dask_have_in_common_is_computed_once(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """As a mean is that is subtracted. Its tasks are the same for every block: the scheduler warns of those that are
    not, and may fail."""
    a = numbers("<f8")
    array = dask.array.from_array(a, chunks=(4, 9))
    noted = array.map_blocks(note, dtype=a.dtype, meta=np.empty((0, 0)))
    centred = noted - noted.mean(axis=0)
    chosen = centred[np.arange(len(a)) % 3 > 0]  # cut into other blocks than those of what it is of
    for one, expected in ((centred, a - a.mean(0)), (chosen, (a - a.mean(0))[np.arange(len(a)) % 3 > 0])):
        _noted.clear()
        opened = open_matrix(one, "X")
        with caplog.at_level(logging.WARNING, "distributed.scheduler"):
            computed_on(client, [opened])
        np.testing.assert_allclose(whole(opened), expected, rtol=1e-12)
        assert len(_noted) == math.prod(array.numblocks), "each block once"
    assert not caplog.messages


def test_dask_that_fails_names_the_block(client: Client) -> None:
    def fail(block: np.ndarray) -> np.ndarray:
        raise ValueError("no such number")

    array = dask.array.from_array(numbers("<f8"), chunks=20).map_blocks(
        fail, dtype="f8", meta=np.empty((0, 0))
    )
    with pytest.raises(
        tw.StoreError, match=r"A: .*block \(\d, \d\) cannot be computed \(ValueError: no such"
    ):
        computed_on(client, [open_matrix(array, "A")])


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["fixed", "list", "large"])
@pytest.mark.parametrize("dtype", ["<f4", "<i8", "?"])
def test_lists_of_parquet(kind: str, dtype: str, tmp_path: Path) -> None:
    a = numbers(dtype)
    item = pyarrow.from_numpy_dtype(a.dtype)
    kinds = {"fixed": pyarrow.list_(item, 29), "list": pyarrow.list_(item), "large": pyarrow.large_list(item)}
    table = pyarrow.table({"id": np.arange(37), "x": pyarrow.array(a.tolist(), kinds[kind])})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    for name in ("a.parquet", "a.parquet::x"):
        opened = open_matrix(f"{tmp_path}/{name}", "A")
        np.testing.assert_array_equal(whole(opened), a)
        assert is_same_array(opened, open_matrix(f"{tmp_path}/a.parquet::x", "B"))
    vector = open_array(f"{tmp_path}/a.parquet::id", ndim=1, role="X")
    np.testing.assert_array_equal(whole(vector), np.arange(37))


def test_a_folder_of_parquet_is_one_table(tmp_path: Path) -> None:
    """As pandas reads it: by the order of names, without what is hidden."""
    a = numbers("<f4")
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, (first, last) in enumerate([(0, 10), (10, 10), (10, 37)]):
        kind = pyarrow.list_(pyarrow.float32(), 29) if number else pyarrow.list_(pyarrow.float32())
        table = pyarrow.table(
            {"id": np.arange(first, last), "x": pyarrow.array(a[first:last].tolist(), kind)}
        )
        parquet.write_table(table, folder / f"part-{number}.parquet", row_group_size=4)
    (folder / "_SUCCESS").touch()
    for name in ("texts", "texts::x", "texts/"):
        np.testing.assert_array_equal(whole(open_matrix(f"{tmp_path}/{name}", "A")), a)
    np.testing.assert_array_equal(whole(open_array(f"{folder}::id", ndim=1, role="X")), np.arange(37))
    parquet.write_table(pyarrow.table({"x": [["a"]]}), folder / "part-3.parquet")
    with pytest.raises(
        tw.StoreError, match=r"^A: .*part-3\.parquet has list<.*string> for x, and part-0\.parquet has"
    ):
        open_matrix(folder, "A")
    parquet.write_table(pyarrow.table({"y": [[1]]}), folder / "part-3.parquet")
    with pytest.raises(tw.StoreError, match=r"part-3\.parquet has no such column for x"):
        open_matrix(folder, "A")
    (folder / "year=2024").mkdir()
    with pytest.raises(tw.StoreError, match=r"there is no Zarr array at .*texts"):
        open_matrix(folder, "A")


@given(data=st.data())
def test_slices(data: st.DataObject) -> None:
    a = numbers("<i4", (11, 7))
    spans = []
    for side in a.shape:
        first, last = sorted(data.draw(st.tuples(st.integers(0, side), st.integers(0, side))))
        spans.append((first - side if data.draw(st.booleans()) and first < side else first, last))
    (top, bottom), (left, right) = spans
    taken = tw.slice(a, rows=(top, bottom), columns=f"{left}:{right}")
    np.testing.assert_array_equal(whole(open_matrix(taken, "A")), a[top:bottom, left:right])


def test_slices_in_names(tmp_path: Path) -> None:
    a = numbers("<i4")
    zarr.save_array(tmp_path / "a.zarr", a, zarr_format=2)
    for name, expected in {"[3:9]": a[3:9], "[:,-5:]": a[:, -5:], "[1:2, 3:]": a[1:2, 3:]}.items():
        np.testing.assert_array_equal(whole(open_matrix(f"{tmp_path / 'a.zarr'}{name}", "A")), expected)
    zarr.save_array(tmp_path / "a.zarr[3:9]", a + 1, zarr_format=2)
    np.testing.assert_array_equal(whole(open_matrix(f"{tmp_path / 'a.zarr'}[3:9]", "A")), a + 1)


def saved(folder: Path, a: np.ndarray) -> Path:
    np.save(folder / "a.npy", a)
    return folder / "a.npy"


class Sparse:
    shape = SHAPE


def damaged(folder: Path) -> Path:
    np.save(folder / "cut.npy", numbers("<f8"))
    data = (folder / "cut.npy").read_bytes()
    (folder / "cut.npy").write_bytes(data[:-8])
    return folder / "cut.npy"


def objects(folder: Path) -> Path:
    np.save(folder / "objects.npy", np.array([[{}, 1]], object), allow_pickle=True)
    return folder / "objects.npy"


def lzf(folder: Path) -> str:
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("lzf", data=numbers("<f8"), compression="lzf")
        file.create_dataset("b", data=numbers("<f8"))
    return f"{folder / 'a.h5'}::/lzf"


def anndata(folder: Path) -> str:
    with h5py.File(folder / "a.h5ad", "w") as file:
        file.create_group("X").attrs["encoding-type"] = "csr_matrix"
    return f"{folder}/a.h5ad::/X"


def classic(folder: Path) -> Path:
    (folder / "a.nc").write_bytes(b"CDF\x02" + bytes(60))
    return folder / "a.nc"


class OfScipy:
    shape = SHAPE
    __module__ = "scipy.sparse._csr"


def lists(*rows: Any) -> Any:
    def write(folder: Path) -> str:
        parquet.write_table(pyarrow.table({"x": list(rows), "y": list(rows)}), folder / "a.parquet")
        return f"{folder}/a.parquet::x"

    return write


def table(**columns: Any) -> Any:
    def write(folder: Path) -> str:
        parquet.write_table(pyarrow.table(columns), folder / "a.parquet")
        return f"{folder}/a.parquet"

    return write


def objects_of(*rows: list[float]) -> np.ndarray:
    """As a column of vectors in a data frame of pandas is."""
    made = np.empty(len(rows), object)
    made[:] = [np.array(row) for row in rows]
    return made


def short(folder: Path) -> str:
    """A download that did not end."""
    path = folder / "short.nc"
    with h5py.File(path, "w") as file:
        file["b"] = np.zeros((30, 20))
    path.write_bytes(path.read_bytes()[:1500])
    return f"{path}::b"


CANNOT: dict[str, tuple[Any, type[Exception], str]] = {
    "cut": (damaged, tw.StoreError, r"cut\.npy has \d+ bytes, and an array of shape .* cut short; save it again"),
    "objects": (objects, tw.StoreError, r"holds objects of Python; save it as an array of numbers"),
    "text": (lambda _: np.array([["a"]]), tw.DTypeError, r"A: numpy array of shape \(1, 1\) holds <U1; only bool"),
    "cube": (lambda _: np.zeros((2, 2, 2)), tw.ShapeError, r"has shape \(2, 2, 2\); it must have 2 dimensions"),
    "masked": (lambda _: np.ma.masked_equal([[0.0, 1]], 0), tw.StoreError, r"is masked.*\.filled\(0\)"),
    "list": (lambda _: [[1.0]], tw.StoreError, r"found builtins\.list; .*numpy\.asarray"),
    "sparse": (lambda _: Sparse(), tw.StoreError, r"found .*Sparse; it must be"),
    "scipy": (lambda _: OfScipy(), tw.StoreError, r"sparse matrices are not supported: \.toarray\(\) makes it dense"),
    "anndata": (anndata, tw.StoreError, r"is a sparse matrix of anndata.*make it dense where it fits"),
    "classic": (classic, tw.StoreError, r"is a file of NetCDF 3.*nccopy -k nc4.*or open it with xarray"),
    "short": (short, tw.StoreError, r"truncated file.*; it has 1500 bytes, and says that it had more: .*get it anew"),
    "filter": (lzf, tw.StoreError, r"HDF5's filter 32000 \(lzf\), which is not read here; .*deflate.*h5repack"),
    "several": (lambda folder: lzf(folder).partition("::")[0], tw.StoreError, r"the arrays /b, /lzf; give one, as"),
    "missing": (lambda folder: lzf(folder) + "x", tw.StoreError, r"/lzfx is not in that file; it has the arrays /b"),
    "unknown": (lambda _: dask.array.from_array(np.arange(4.0), 2)[dask.array.from_array(np.arange(4), 2) > 1][:, None],
                tw.ShapeError, r"known only once it is computed; call its compute_chunk_sizes"),
    "ragged": (lists([1, 2], [1, 2, 3]), tw.ShapeError, r"list of 2 numbers in row 0 and one of 3 in row 1; a matrix"),
    "null": (lists([1, 2], [None, 3], [None, None]), tw.StoreError,
             r"has 3 missing numbers, the first in row 1, and int64 has no NaN; fill them"),
    "nulls": (lists([1.5], None, [2], None), tw.StoreError, r"has 2 missing lists, the first in row 1; leave such"),
    "no lists": (table(vector=["a"], id=[1]), tw.StoreError,
                 r"no column of lists, but vector \(string\), id \(int64\); give one, as"),
    "rows": (lambda _: objects_of([1.0, 2], [3.0, 4]), tw.DTypeError,
             r"holds 2 arrays of 2 numbers as objects.*np\.stack\(list\(x\)\)"),
    "ragged rows": (lambda _: objects_of([1.0, 2], [3.0]), tw.DTypeError, r"holds object; only bool"),
    "texts": (lists(["a"]), tw.DTypeError, r"holds list<.*string>; only numbers and lists of numbers can be used;"),
    "a text": (lambda folder: table(id=["a"], x=[[1]], y=[[2]])(folder) + "::id", tw.DTypeError,
             r"id holds string; only numbers and lists .*; it has the columns of lists x, y"),
    "wide": (table(**{f"f{number}": [1.5] for number in range(40)}), tw.StoreError,
             r"f5 \(double\) and 34 more; give one, .* pandas\.read_parquet\('.*'\)\[\[\.\.\.\]\]\.to_numpy"),
    "column": (lambda folder: lists([1])(folder) + "x", tw.StoreError, r"no column xx; it has x, y"),
    "columns": (lambda folder: lists([1])(folder)[:-3], tw.StoreError, r"the columns of lists x, y; give one, as"),
    "range": (lambda _: tw.slice(np.zeros((3, 3)), rows=(2, 5)), tw.OptionError, r"A: rows 2:5 are not among the 3"),
    "long": (lambda folder: f"{saved(folder, np.ones((3, 3)))}[1:2,1:2,1:2]", tw.OptionError,
             r"names 3 ranges of .*; rows and columns are two"),
    "line": (lambda folder: f"{saved(folder, np.ones((3, 3)))}[1]", tw.OptionError, r"rows=1 is no range; give it as"),
    "axes": (lambda folder: f"{saved(folder, np.ones((3, 3, 3)))}[1,2,3,4]", tw.OptionError, r"it has 3 axes"),
    "beyond": (lambda folder: f"{saved(folder, np.ones((3, 3, 3)))}[:,3]", tw.OptionError,
               r"places along axis 1 3:4 are not among the 3 places along axis 1 of"),
    "left": (lambda folder: f"{saved(folder, np.ones((3, 3, 3)))}[1,2]", tw.ShapeError, r"\(3,\); it must have 2 dim"),
    "rest": (lambda _: "a.npy[...,...]", tw.OptionError, r"has \.\.\. more than once"),
    "of three": (lambda _: tw.slice(np.ones((3, 3, 3)), rows=(0, 2)), tw.ShapeError,
                 r"of two dimensions only: give a range, or one place, for each axis in brackets"),
}  # fmt: skip


@pytest.mark.parametrize("case", CANNOT)
def test_what_cannot_be(case: str, tmp_path: Path) -> None:
    make, error, message = CANNOT[case]
    with pytest.raises(error, match=message):
        open_matrix(make(tmp_path), "A")


@pytest.mark.parametrize("kind", [pyarrow.list_(pyarrow.float32()), pyarrow.list_(pyarrow.float16(), 2)])
def test_missing_floats_of_parquet_are_nan(kind: Any, tmp_path: Path) -> None:
    """As pandas writes and reads NaN."""
    rows = [[1, None], [None, 2.5], [3, 4]]
    column = pyarrow.array([[np.float16(x) if x is not None else x for x in row] for row in rows], kind)
    parquet.write_table(pyarrow.table({"x": column}), tmp_path / "a.parquet", row_group_size=2)
    found = open_matrix(tmp_path / "a.parquet", "A")
    np.testing.assert_array_equal(found[:], np.array(rows, float))
    assert found.dtype.kind == "f"


@pytest.mark.parametrize("given", ["1-2", (1, 2, 3), slice(0, 4, 2), 1.5, (0.5, 2)])
def test_what_is_no_range(given: Any) -> None:
    with pytest.raises(tw.OptionError, match=r"is no range; give it as '1000:2000'"):
        tw.slice("a.zarr", rows=given)


def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.pipeline.store.sources.memory.free_nbytes", lambda: 100)
    with pytest.raises(tw.StoreError, match=r"A: .* has 8\.38 KiB, .* 100 B of memory are free; store it"):
        open_matrix(numbers("<f8"), "A")


@given(data=st.data(), order=st.permutations(range(3)), big=st.booleans())
def test_boxes_out_of_a_files_pages(
    data: st.DataObject, order: list[int], big: bool, tmp_path_factory: Any
) -> None:
    """In bands of any height, from any offset, into memory of any strides."""
    shape = 7, 5, 6
    a = numbers(">i4" if big else "<i4", shape)
    path = tmp_path_factory.mktemp("pages") / "a"
    offset = data.draw(st.integers(0, 5000))
    path.write_bytes(bytes(offset) + a.tobytes())
    ends = [sorted(data.draw(st.tuples(st.integers(0, side), st.integers(0, side)))) for side in shape]
    inside = [slice(*pair) for pair in ends]
    found = np.zeros([inside[axis].stop - inside[axis].start for axis in order], "<i4").transpose(
        np.argsort(order)
    )
    with path.open("rb") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilewright.pipeline.store.sources.mapping.BAND_NBYTES", data.draw(st.integers(1, 500)))
        copy_box(file.fileno(), offset, a.dtype, shape, inside, found)
    np.testing.assert_array_equal(found, a[tuple(inside)])
