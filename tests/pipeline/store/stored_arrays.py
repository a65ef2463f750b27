"""Arrays stored in each of the ways that there are, for tests of how regions are read and written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec
from zarr.codecs.numcodecs import BZ2, CRC32, LZ4, Adler32, Fletcher32, JenkinsLookup3, Shuffle, Zlib
from zarr.storage import FsspecStore

KINDS: dict[str, dict[str, Any]] = {
    "v3-plain": {"zarr_format": 3, "compressors": None},
    "v3-sharded": {"zarr_format": 3, "compressors": None, "sharded": True},
    "v2-plain": {"zarr_format": 2, "compressors": None, "order": "C"},
    "v2-filtered": {"zarr_format": 2, "filters": [numcodecs.LZMA(preset=0)]},
}
"""What is read and written by ways of its own; v2-filtered is left to zarr. ``CODECS`` holds the rest."""

CODECS: dict[str, tuple[int, Callable[[], list[Any]]]] = {
    "3 none": (3, list),
    "3 zstd": (3, lambda: [ZstdCodec(level=3, checksum=True)]),
    "3 gzip": (3, lambda: [GzipCodec()]),
    "3 blosc": (3, lambda: [BloscCodec(cname="lz4", shuffle="bitshuffle")]),
    "3 lz4": (3, lambda: [LZ4()]),
    "3 zlib": (3, lambda: [Zlib()]),
    "3 crc32c": (3, lambda: [Crc32cCodec()]),
    "3 zstd, crc32c": (3, lambda: [ZstdCodec(level=1), Crc32cCodec()]),
    "3 lz4, crc32c": (3, lambda: [LZ4(), Crc32cCodec()]),
    "3 blosc, crc32c": (3, lambda: [BloscCodec(cname="zstd", shuffle="shuffle"), Crc32cCodec()]),
    "3 gzip, blosc, crc32c": (3, lambda: [GzipCodec(), BloscCodec(), Crc32cCodec()]),
    "3 bz2": (3, lambda: [BZ2(level=1)]),
    "3 shuffle, zlib": (3, lambda: [Shuffle(elementsize=4), Zlib(level=1)]),
    "3 shuffle, zlib, fletcher32": (3, lambda: [Shuffle(elementsize=2), Zlib(level=1), Fletcher32()]),
    "3 crc32": (3, lambda: [CRC32()]),
    "3 adler32, jenkins": (3, lambda: [Adler32(), JenkinsLookup3()]),
    "2 none": (2, list),
    "2 zstd": (2, lambda: [numcodecs.Zstd()]),
    "2 gzip": (2, lambda: [numcodecs.GZip()]),
    "2 blosc": (2, lambda: [numcodecs.Blosc()]),
    "2 lz4": (2, lambda: [numcodecs.LZ4()]),
    "2 zlib": (2, lambda: [numcodecs.Zlib()]),
    "2 bz2": (2, lambda: [numcodecs.BZ2(1)]),
}
"""Zarr's format and the bytes-to-bytes codecs of every chain that is decoded without zarr."""


def stored(kind: str, target: Any, data: np.ndarray, chunks: tuple[int, ...]) -> zarr.Array[Any]:
    options = dict(KINDS[kind])
    dtype = options.pop("dtype", data.dtype)
    if options.pop("sharded", False):
        options["shards"] = tuple(2 * side for side in chunks)
    array = zarr.create_array(target, shape=data.shape, chunks=chunks, dtype=dtype, fill_value=7, **options)
    array[...] = data
    return array


def encoded(
    target: Any,
    codecs: str,
    data: np.ndarray,
    chunks: tuple[int, ...],
    *,
    big: bool = False,
    by_columns: bool = False,
    shards: Any = None,
) -> zarr.Array[Any]:
    zarr_format, chain = CODECS[codecs]
    options: dict[str, Any] = {"compressors": chain() or None}
    if zarr_format == 3:
        options["serializer"] = BytesCodec(endian="big" if big else "little")
        options["filters"] = [TransposeCodec(order=(1, 0))] if by_columns else None
        options["shards"] = shards
    else:
        options["order"] = "F" if by_columns else "C"
    dtype = data.dtype.newbyteorder(">" if big and zarr_format == 2 else "<")
    array = zarr.create_array(
        target,
        shape=data.shape,
        chunks=chunks,
        dtype=dtype,
        fill_value=7,
        zarr_format=zarr_format,
        **options,
    )
    array[...] = data
    return array


OUT_OF_SIGHT = ["3 none", "3 zstd", "2 none", "2 zlib", "3 sharded", "2 filtered"]


def any_way(kind: str, target: Path, data: np.ndarray, chunks: tuple[int, ...]) -> zarr.Array[Any]:
    """An array that is read and written in one of the ways that there are."""
    if kind == "2 filtered":
        return stored("v2-filtered", target, data, chunks)
    if kind == "3 sharded":
        return stored("v3-sharded", target, data, chunks)
    return encoded(target, kind, data, chunks)


def as_remote(folder: Path) -> zarr.Array[Any]:
    """A stored array by way of fsspec, as at the URLs of servers."""
    return zarr.open_array(FsspecStore.from_url(f"file://{folder}"), mode="r")


def chunk_file(array: zarr.Array[Any], chunk: tuple[int, ...]) -> Path:
    root: Path = array.store.root
    return root / array.metadata.encode_chunk_key(chunk)
