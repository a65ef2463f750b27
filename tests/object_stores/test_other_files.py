"""Files at URLs that are no arrays of Zarr, and names that are patterns: what to give in their place."""

from __future__ import annotations

from pathlib import Path

import pytest

import tilewright as tw
from tests.object_stores.proxy import Proxy
from tests.object_stores.refused import refusal
from tilewright.pipeline.errors import CorpusError
from tilewright.pipeline.store.objects import objects_at


@pytest.mark.parametrize(
    "name", ["a.npy", "a.h5", "a.nc", "a.parquet", "a.h5::x", "a.nc::/t2m", "a.parquet::column"]
)
def test_files_that_are_no_zarr_are_read_from_folders(name: str, url: str, proxy: Proxy, local: Path) -> None:
    told = refusal(f"{url}/{name}", local, local.parent / "c")
    assert told.startswith(f"A: {url}/{name} names a file, and files of NumPy, HDF5, NetCDF and Parquet are")
    assert "copy it to one, or open it in Python" in told


def test_a_zip_file_at_a_url_is_named_as_its_arrays_are(url: str, proxy: Proxy, local: Path) -> None:
    told = refusal(f"{url}/a.zip", local, local.parent / "c")
    assert (
        told == f"A: {url}/a.zip is a ZIP file, in which an array is named by a URL: give zip://::{url}/a.zip"
    )


def test_a_pattern_in_a_url_is_led_to_include(url: str, proxy: Proxy) -> None:
    objects_at(url).put("one.txt", b"text")
    with pytest.raises(CorpusError, match=r"no files in s3://.*/\*\.txt; .* the pattern by include"):
        tw.histogram(f"{url}/*.txt", device="cpu")
    assert tw.histogram(url, include=["*.txt"], device="cpu").counts.sum() == 4
