"""What names an array, and what is told of a name that is none."""

from __future__ import annotations

import builtins
import errno
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import pytest
import zarr
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from zarr.experimental.cache_store import CacheStore
from zarr.storage import FsspecStore, LocalStore, LoggingStore, MemoryStore, WrapperStore, ZipStore

import tilewright as tw
from tests.pipeline.store.stored_arrays import any_way
from tilewright.pipeline.errors import DTypeError, ShapeError, StoreError
from tilewright.pipeline.product.output import check_output_free, create_output
from tilewright.pipeline.store.arrays import (
    check_shared,
    in_memory,
    local_path,
    location,
    name_of,
    open_array,
    place_of,
)
from tilewright.pipeline.store.region_read import read_region


@pytest.mark.filterwarnings("ignore:.*The stored chunk shape")
def test_open_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"A: there is no Zarr array at .*nope"):
        open_array(tmp_path / "nope", ndim=2, role="A")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "array"}')
    with pytest.raises(
        StoreError, match=r"of .*half cannot be used \(zarr\.json lacks 'data_type'\); mend them, or"
    ):
        open_array(tmp_path / "half", ndim=2, role="A")
    whole = zarr.create_array(tmp_path / "odd", shape=(4, 4), chunks=(2, 2), dtype="f4").metadata.to_dict()
    empty = {"name": "regular", "configuration": {"chunk_shape": (0, 2)}}
    for metadata, match in (
        (None, r"cannot be used \(zarr\.json holds None, and must hold a mapping"),
        ([1], r"cannot be used \(zarr\.json holds \[1\], and must hold a mapping"),
        (whole | {"shape": "ab"}, r"cannot be used \(zarr\.json: .*ab"),
        (whole | {"chunk_grid": empty}, r"has shape \(4, 4\) in chunks of \(0, 2\), which hold no element"),
    ):
        (tmp_path / "odd" / "zarr.json").write_text(json.dumps(metadata))
        with pytest.raises(StoreError, match=rf"A: .*odd {match}"):
            open_array(tmp_path / "odd", ndim=2, role="A")
    (tmp_path / "bare").mkdir()
    with pytest.raises(StoreError, match=r"A: there is no Zarr array at .*bare; give the path of an array"):
        open_array(tmp_path / "bare", ndim=2, role="A")
    zarr.open_group(tmp_path / "group", mode="w")
    with pytest.raises(StoreError, match=r"B: .*group is a Zarr group without arrays"):
        open_array(tmp_path / "group", ndim=2, role="B")
    (tmp_path / "file").write_text("no array")
    with pytest.raises(StoreError, match=r"file"):
        open_array(tmp_path / "file", ndim=2, role="A")
    zarr.create_array(tmp_path / "cube", shape=(2, 2, 2), chunks=(1, 1, 1), dtype="f4")
    with pytest.raises(ShapeError, match=r"shape \(2, 2, 2\).*2 dimensions"):
        open_array(tmp_path / "cube", ndim=2, role="A")
    zarr.create_array(tmp_path / "dates", shape=(2, 2), chunks=(1, 1), dtype="M8[s]", zarr_format=2)
    with pytest.raises(DTypeError, match=r"datetime64"):
        open_array(tmp_path / "dates", ndim=2, role="A")


@pytest.mark.parametrize("at_url", [False, True])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_damaged_metadata_are_told_from_no_array(
    zarr_format: Literal[2, 3], at_url: bool, tmp_path: Path
) -> None:
    name = {2: ".zarray", 3: "zarr.json"}[zarr_format]
    file = tmp_path / "x" / name
    zarr.create_array(tmp_path / "x", shape=(4, 4), chunks=(2, 2), dtype="f4", zarr_format=zarr_format)
    whole = file.read_text()
    source: Any = tmp_path / "x"
    if at_url:
        file_system = MemoryFileSystem()
        source = f"memory://damaged-{zarr_format}-{tmp_path.name}"
    for text, why in (
        (whole[:40], "is no JSON: "),
        ("", "is empty"),
        ("[[1]]", r"holds \[\[1\]\], and must hold a mapping"),
        ("[" * 100_000, "nests its brackets too deeply"),
        (json.dumps(json.loads(whole) | {"shape": [-1, 4]}), r": .*\[-1, 4\]"),
        (json.dumps({key: value for key, value in json.loads(whole).items() if key != "shape"}), ".*shape"),
    ):
        if at_url:
            file_system.pipe(f"{source}/{name}", text.encode())
        else:
            file.write_text(text)
        match = rf"A: the metadata of .* cannot be used \({re.escape(name)}:? ?{why}.*\); mend them, or write the array"
        with pytest.raises(StoreError, match=match):
            open_array(source, ndim=2, role="A")


@pytest.mark.parametrize("name", ["x.npy", "x.h5", "x.zarr"])
def test_what_may_not_be_read_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """And is not taken for a damaged file, or for no array: nothing is known of what is in it."""
    (tmp_path / name).write_bytes(b"\x93NUMPY")
    opened = builtins.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path).endswith(name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return opened(path, *arguments, **options)

    if name == "x.zarr":
        (tmp_path / name).unlink()
        zarr.create_array(tmp_path / name, shape=(4, 4), dtype="f4")
        monkeypatch.setattr(Path, "read_bytes", refuse)
        monkeypatch.setattr(Path, "open", refuse)
        name = "zarr.json"
    monkeypatch.setattr(builtins, "open", refuse)
    with pytest.raises(
        StoreError, match=r"cannot (be read|open).*Permission denied.*; give this process that permission, or"
    ):
        open_array(tmp_path / ("x.zarr" if name == "zarr.json" else name), ndim=2, role="A")


@pytest.mark.filterwarnings("ignore:.*The stored chunk shape")
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_chunks_without_an_element_are_neither_read_nor_written(
    zarr_format: Literal[2, 3], tmp_path: Path
) -> None:
    """Of an array without elements they are; such were written by zarr-python 2."""
    file = tmp_path / "x" / {2: ".zarray", 3: "zarr.json"}[zarr_format]

    def opened(rows: int, mode: Any = "r") -> zarr.Array[Any]:
        zarr.create_array(
            tmp_path / "x",
            shape=(rows, 4),
            chunks=(2, 2),
            dtype="f4",
            zarr_format=zarr_format,
            overwrite=True,
        )
        # The side of chunks, and no other.
        file.write_text(re.sub(r'("chunk\w+": \[\s*)2', r"\g<1>0", file.read_text()))
        return zarr.open_array(tmp_path / "x", mode=mode)

    match = (
        r"x has shape \(4, 4\) in chunks of \(0, 2\), which hold no element; write it again in chunks of one"
    )
    with pytest.raises(StoreError, match=f"A: .*{match}"):
        open_array(opened(4), ndim=2, role="A")
    with pytest.raises(StoreError, match=f"output: .*{match}"):
        tw.matmul(np.ones((4, 3), "f4"), np.ones((3, 4), "f4"), opened(4, "r+"), device="cpu")
    assert open_array(opened(0), ndim=2, role="A").shape == (0, 4)


@pytest.mark.skipif(
    "rectilinear_chunks" not in zarr.config.get("array"), reason="zarr-python has such chunks from 3.2 on"
)
@pytest.mark.parametrize("sharded", [False, True])
def test_chunks_of_several_lengths_are_neither_read_nor_written(sharded: bool, tmp_path: Path) -> None:
    lengths: Any = [[1, 2, 3], [4]]
    options = {"chunks": (1, 2), "shards": lengths} if sharded else {"chunks": lengths}
    match = (
        r"the chunks of .*x have several lengths along a side \(chunk grid 'rectilinear'\); write it again in"
    )
    with zarr.config.set({"array.rectilinear_chunks": True}):
        array = zarr.create_array(tmp_path / "x", shape=(6, 4), dtype="f4", **options)
        for source in (array, tmp_path / "x"):
            with pytest.raises(StoreError, match=f"A: {match}"):
                open_array(source, ndim=2, role="A")
        with pytest.raises(StoreError, match=f"output: {match}"):
            tw.matmul(np.ones((6, 3), "f4"), np.ones((3, 4), "f4"), array, device="cpu")
    with pytest.raises(StoreError, match="Rectilinear chunk grids"):
        open_array(tmp_path / "x", ndim=2, role="A")


def refusal(source: Any, ndim: int = 2) -> str:
    with pytest.raises(StoreError) as caught:
        open_array(source, ndim=ndim, role="A")
    return str(caught.value)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_of_a_group_the_arrays_are_named_that_would_do(zarr_format: Literal[2, 3], tmp_path: Path) -> None:
    place = tmp_path / "g.zarr"
    group = zarr.create_group(place, zarr_format=zarr_format)
    assert refusal(place) == f"A: {place} is a Zarr group without arrays; give the path of an array"
    inner = group.create_group("layers")
    assert "without arrays, it holds the groups layers; give" in refusal(place)
    inner.create_array("counts", shape=(2, 2), dtype="f4")
    which = "give one of its arrays of numbers of 2 dimensions"
    one = f"A: {place} is a Zarr group, not an array; {which}: {place}/layers/counts"
    assert refusal(place) == one
    group.create_array("x", shape=(2,), dtype="f4")
    assert refusal(str(place)) == one
    assert refusal(place, 1).endswith(f"arrays of numbers of 1 dimension: {place}/x")
    has = "x (float32, 2) and layers/counts (float32, 2 × 2)"
    assert refusal(place, 3).endswith(f"group without an array of numbers of 3 dimensions; it has {has}")
    group.create_array("names", shape=(2, 2), dtype="S3" if zarr_format == 2 else "str")
    assert refusal(place) == one, "texts are no numbers"
    with pytest.raises(
        StoreError, match=r"arrays of numbers of 1 dimension or more: .*/x or .*/layers/counts$"
    ):
        open_array(place, ndim=1, role="A", or_more=True)
    for number in range(6):
        group.create_array(f"m{number}", shape=(2, 2), dtype="f4")
    named = ", ".join(f"{place}/m{number}" for number in range(5))
    assert refusal(place).endswith(f"arrays of numbers of 2 dimensions: {named} or 2 more")
    assert refusal(f"file://{place}/layers/").endswith(f": file://{place}/layers/counts")


@pytest.mark.parametrize("kind", ["csr_matrix", "csc_matrix"])
def test_a_sparse_matrix_of_anndata_is_called_one(kind: str, tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "X", attributes={"encoding-type": kind})
    group.create_array("data", shape=(2,), dtype="f4")
    assert f"is a sparse matrix (encoding-type {kind}), and sparse matrices are not supported" in refusal(
        tmp_path / "X"
    )


def test_of_files_of_hdf5_what_is_in_them_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.nc").write_bytes(b"\x89HDF\r\n\x1a\n")
    assert "A: cannot open" in refusal(tmp_path / "x.nc")
    (tmp_path / "x.h5").write_bytes(b"")
    assert "is an HDF5 file, not a Zarr array" in refusal(tmp_path / "x.h5")


def test_of_a_zip_file_the_urls_of_its_arrays_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = np.arange(4.0).reshape(2, 2)
    with ZipStore("one.zarr.zip", mode="w") as store:
        zarr.create_array(store, data=values)
    with ZipStore("group.zip", mode="w") as store:
        group = zarr.create_group(store, zarr_format=2)
        group.create_array("x", data=values)
        group.create_array("y", data=values)
    zarr.create_array("folder.zarr", data=values)
    shutil.make_archive("folder", "zip", ".", "folder.zarr")
    (tmp_path / "empty.zip").write_bytes(b"")
    for name, told in {
        "one.zarr.zip": "is a ZIP file, in which an array is named by a URL: give zip://::one.zarr.zip",
        "group.zip": "is a ZIP file, in which an array is named by a URL: give zip://x::group.zip or zip://y::group.zip",
        "group.zip/y": "lies in a ZIP file, group.zip, in which an array is named by a URL: give zip://y::group.zip",
        "folder.zip": "is a ZIP file, in which an array is named by a URL: give zip://folder.zarr::folder.zip",
        "zip://::group.zip": "is a Zarr group, not an array; give one of its arrays of numbers of 2 dimensions:"
        " zip://x::group.zip or zip://y::group.zip",
        "empty.zip": "is a ZIP file, and there is no Zarr array in it; give the path of an array",
    }.items():
        assert refusal(name) == f"A: {name} {told}"
        if "zip://" in told:
            np.testing.assert_array_equal(open_array(told.split()[-1], ndim=2, role="A")[...], values)


def test_a_local_path_may_have_two_colons_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What there is, is taken for a path; else they chain URLs."""
    monkeypatch.chdir(tmp_path)
    values = np.arange(4.0).reshape(2, 2)
    zarr.save_array(tmp_path / "a::b.zarr", values)
    zarr.create_group(tmp_path / "g::h").create_array("x", data=values)
    for given in ("a::b.zarr", "./a::b.zarr", f"{tmp_path}/a::b.zarr", Path("a::b.zarr"), "g::h/x"):
        np.testing.assert_array_equal(open_array(given, ndim=2, role="A")[...], values)
    assert (
        refusal("g::h")
        == "A: g::h is a Zarr group, not an array; give one of its arrays of numbers of 2 dimensions: g::h/x"
    )
    zarr.create_group(tmp_path / "a")  # where the chain leads
    assert refusal("./a::c.zarr") == (
        "A: there is no Zarr array at ./a::c.zarr: nothing local has that name, so `::` in it is read as a chain of"
        " URLs; give the path of an array"
    )
    with pytest.raises(StoreError, match=r"a::b\.zarr exists"):
        check_output_free("a::b.zarr", overwrite=False)
    check_output_free("a::b.zarr", overwrite=True)
    with pytest.raises(StoreError, match=r"output: \./a::c\.zarr has `::`, which is read as a chain of URLs"):
        check_output_free("./a::c.zarr", overwrite=False)


def test_a_file_that_is_not_there_or_is_no_array_is_said_to_be_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal("x.npy") == (
        "A: there is no Zarr array at x.npy, where no file or folder is; give the path of an array"
    )
    Path("x.npy").write_bytes(b"no numbers")
    assert "x.npy does not begin as a NumPy file does: it is damaged, or none; write it anew" in refusal(
        "x.npy"
    )
    assert "there is no file sst.nc, and nothing local has the whole name" in refusal("sst.nc::sst")
    Path("sst.nc").write_bytes(b"CDF\x01")
    for name in ("sst.nc", "sst.nc::sst"):
        assert (
            "sst.nc is a file of NetCDF 3, which is not read here: store it as NetCDF 4 (nccopy -k"
            in refusal(name)
        )
    Path("sst.nc").write_bytes(b"text")
    for name in ("sst.nc", "sst.nc::sst"):
        assert refusal(name) == (
            "A: sst.nc is a file of no kind that is read, which are Zarr, .npy, HDF5, NetCDF 4 and Parquet; store it as"
            " one of these, and give that"
        )


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "x.csv",
            "numpy.save('x.npy', pandas.read_csv('x.csv').select_dtypes('number').to_numpy()), and give that",
        ),
        ("x.tsv", r"pandas.read_csv('x.tsv', sep='\t').select_dtypes('number')"),
        ("x.jsonl", "pandas.read_json('x.jsonl', lines=True).to_parquet('x.parquet'), and give that"),
        ("x.bed", "plink2zarr convert x x.zarr, and give that"),
        ("x.vcf.gz", "vcf2zarr convert x.vcf.gz x.zarr, and give that"),
        ("x.grib2", "xarray.open_dataset('x.grib2', engine='cfgrib').to_zarr('x.zarr'), and give that"),
    ],
)
def test_files_of_other_kinds_are_said_to_be_so(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(b"numbers")
    found = refusal(name)
    assert found.startswith(
        f"A: {name} is a file of another kind than Zarr, .npy, HDF5, NetCDF 4 and Parquet, which"
    )
    assert told in found


def test_archives_of_numpy_and_names_beside_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("x.npz", a=np.ones(3), b=np.ones((2, 2)))
    for name in ("x.npz", "x.npz::b"):
        assert refusal(name) == (
            "A: x.npz is an archive of NumPy (a and b), of which no array is read in place; keep the one that is meant:"
            " numpy.save('a.npy', numpy.load('x.npz')['a'])"
        )
    zarr.create_group("calls.zarr").create_array("call_genotype", data=np.ones((2, 2)))
    for name in ("calls.zarr/call_genotypes", "calls.zarr/sub/x"):
        assert refusal(name) == (
            f"A: there is no Zarr array at {name}, where no file or folder is; calls.zarr is a Zarr group, not an"
            " array; give one of its arrays of numbers of 2 dimensions: calls.zarr/call_genotype"
        )


ASYNCHRONOUS = partial(AsyncFileSystemWrapper, asynchronous=True)


def in_folder(fs: Any) -> Any:
    return DirFileSystem("/folder", ASYNCHRONOUS(fs), asynchronous=True)


@pytest.mark.parametrize("wrap", [lambda store: store, WrapperStore, LoggingStore])
@pytest.mark.parametrize(
    "make",
    [
        MemoryStore,
        lambda: FsspecStore(ASYNCHRONOUS(MemoryFileSystem()), path="/x"),
        lambda: FsspecStore(ASYNCHRONOUS(MemoryFileSystem(global_store=False)), path="/x"),
        lambda: FsspecStore(in_folder(MemoryFileSystem()), path="x"),
    ],
)
def test_stores_in_memory_are_known(make: Callable[[], Any], wrap: Callable[[Any], Any]) -> None:
    array = zarr.create_array(wrap(make()), shape=(2, 2), chunks=(1, 1), dtype="f4", overwrite=True)
    assert in_memory(array)
    with pytest.raises(StoreError, match=r"C: .*this process's memory, which tasks do not share"):
        check_shared(array, "C")


def test_files_are_not_in_memory_however_they_are_wrapped(tmp_path: Path) -> None:
    for store in (
        tmp_path / "a",
        LoggingStore(LocalStore(tmp_path / "b")),
        FsspecStore(ASYNCHRONOUS(LocalFileSystem(auto_mkdir=True)), path=str(tmp_path / "c")),
        CacheStore(LocalStore(tmp_path / "d"), cache_store=MemoryStore()),
    ):
        assert not in_memory(zarr.create_array(store, shape=(2, 2), chunks=(1, 1), dtype="f4"))


@pytest.mark.parametrize(
    ("name", "found"),
    [("memory://x", True), ("simplecache::memory://x", True), ("s3://memory/x", False), ("memory", False)],
)
def test_urls_in_memory_are_known(name: str, found: bool) -> None:
    assert in_memory(name) is found


def test_what_lies_in_one_place_is_known_however_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    zarr.create_array(tmp_path / "a", shape=(2, 2), chunks=(1, 1), dtype="f4")
    local = LocalFileSystem()
    stores: list[Any] = [
        LocalStore(tmp_path / "link" / "a"),
        LoggingStore(LocalStore(tmp_path / "a")),
        FsspecStore(ASYNCHRONOUS(local), path=str(tmp_path / "a")),
        FsspecStore(DirFileSystem(str(tmp_path), ASYNCHRONOUS(local), asynchronous=True), path="a"),
    ]
    names = [
        tmp_path / "a",
        f"file://{tmp_path}/a",
        f"local://{tmp_path}/link/a",
        f"simplecache::file://{tmp_path}/a",
    ]
    arrays = [zarr.open_array(store, mode="r") for store in stores]
    assert {location(source) for source in [*names, *arrays]} == {("", (tmp_path / "a").resolve())}
    assert location("memory://x/a") == ("memory", PurePosixPath("/x/a")) != location("/x/a")
    assert name_of(arrays[2]) == f"file://{tmp_path}/a"
    assert location("nobody-knows-this://x")[1] != location("nobody-knows-this://y")[1]


@pytest.mark.parametrize("inner", ["", "x"])
def test_an_array_in_an_archive_has_a_name_by_which_it_opens(inner: str, tmp_path: Path) -> None:
    with ZipStore(tmp_path / "a.zip", mode="w") as file:
        zarr.create_array(file, name=inner or None, data=np.ones((2, 2)))
    name = name_of(open_array(f"zip://{inner}::{tmp_path}/a.zip", ndim=2, role="A"))
    assert name == f"zip://{inner}::file://{tmp_path}/a.zip"
    assert name_of(open_array(name, ndim=2, role="A")) == name


def test_a_url_that_lost_a_slash_is_no_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``Path("s3://bucket/c.zarr")`` does, by which C was stored in a folder ``s3:``."""
    monkeypatch.chdir(tmp_path)
    zarr.create_array(tmp_path / "a", data=np.ones((2, 2)))
    array = tmp_path / "a"
    for name in (Path("s3://bucket/c.zarr"), "gs:/bucket/c.zarr", "file:/c.zarr"):
        text = str(name)
        told = rf": {text} would be a local path, .* give it as a text, {text.partition(':')[0]}://"
        with pytest.raises(StoreError, match=f"^output{told}"):
            tw.matmul(array, array, name, device="cpu")
        with pytest.raises(StoreError, match=f"^A{told}"):
            open_array(name, ndim=2, role="A")
    assert {each.name for each in tmp_path.iterdir()} == {"a"}
    zarr.create_array(tmp_path / "s3:" / "b", data=np.ones((2, 2)))
    assert open_array("s3:/b", ndim=2, role="A").shape == (2, 2)


@pytest.mark.parametrize("protocol", ["file", "local"])
def test_a_url_of_a_local_path_opens_as_that_path(protocol: str, tmp_path: Path) -> None:
    """By fsspec nobody would see its files, and with them that they change."""
    zarr.create_array(tmp_path / "a::b", shape=(2, 2), chunks=(1, 1), dtype="f4")
    array = open_array(f"{protocol}://{tmp_path}/a::b", ndim=2, role="A")
    assert isinstance(array.store, LocalStore)
    assert place_of(array) == str(tmp_path / "a::b")
    assert name_of(array) == f"{protocol}://{tmp_path}/a::b"
    with pytest.raises(StoreError, match=r"begins with a tilde"):
        open_array(f"{protocol}://~/a", ndim=2, role="A")


@pytest.mark.parametrize("form", ["path", "text", "open array"])
def test_a_relative_path_means_the_same_to_workers_that_run_elsewhere(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is named as it was given; links in it are left for each host to follow."""
    home = tmp_path / "a::b"  # which in a text would be a URL
    (home / "here").mkdir(parents=True)
    (home / "link").symlink_to("here")
    full = np.arange(64, dtype="f4").reshape(8, 8)
    any_way("3 none", home / "here" / "x.zarr", full, (4, 4))
    monkeypatch.chdir(home)
    given: Any = {"path": Path("link/x.zarr"), "text": "link/x.zarr"}.get(form)
    given = given or zarr.open_array("link/x.zarr", mode="r")
    array = open_array(given, ndim=2, role="A")
    monkeypatch.chdir(tmp_path)
    for one in (array, pickle.loads(pickle.dumps(array))):
        np.testing.assert_array_equal(read_region(one, (slice(0, 8), slice(0, 8))), full)
        assert name_of(one) == "link/x.zarr"
        assert place_of(one) == str(home / "link" / "x.zarr")
    if form == "open array":
        assert str(given.store.root) == "link/x.zarr", "the caller's array is the caller's"


def test_folders_that_a_path_only_passes_are_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/away")
    for given, meant in {
        "./new/../c.zarr": "c.zarr",
        "new/one/../../c.zarr": "c.zarr",
        "new/../../c.zarr": "../c.zarr",
        "file://new/../c.zarr": "c.zarr",
        "there/../c.zarr": "there/../c.zarr",
        "link/../c.zarr": "link/../c.zarr",
        "link/new/../../c.zarr": "link/../c.zarr",
        f"{tmp_path}/new/../c.zarr": f"{tmp_path}/c.zarr",
        "/..": "/..",
    }.items():
        assert local_path(given) == Path(meant), given
    output = create_output("new/../c.zarr", (2,), np.dtype("f4"), (2,), compressed=False, overwrite=False)
    output.publish()
    output.release()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.zarr", "far", "link", "there"]
