"""Corpora in object stores count as the same files do on a disk, whatever the network does; and counts are written
there."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pyarrow as pa
import pytest
import zarr
import zstandard
from click.testing import CliRunner
from pyarrow import parquet

import tilewright as tw
from tests.object_stores import servers
from tests.object_stores.proxy import NO_FAULT, Asked, Fault, Proxy, seeded
from tilewright.pipeline.errors import CorpusError, DocumentError, OptionError, OutputExistsError, StoreError
from tilewright.pipeline.events import Event, Notice
from tilewright.pipeline.store.objects import objects_at
from tilewright.pipeline.store.remote.opening import store_at
from tilewright.pipeline.text.saved_counts import check_outputs, save_histogram
from tilewright.workflows.cli import cli

FAULTS = (Fault(status=503), Fault(refuse=True), Fault(drop_answer=True), Fault(cut=10), Fault(status=500))
ROWS = [{"text": "Grüße", "id": "a"}, {"text": "zwei\nZeilen", "id": "b"}, {"text": "", "id": "c"}]


@pytest.fixture
def folder(tmp_path: Path, rng: np.random.Generator) -> Path:
    """A corpus of texts of every form."""
    top = tmp_path / "corpus"
    (top / "deep" / "er").mkdir(parents=True)
    text = bytes(rng.choice(np.frombuffer(b"abc \n\xc3\xa4", np.uint8), 400_000))
    short = text[:100_000]
    members = {"one.txt": text[:70_000], "two.txt.gz": gzip.compress(text[:5000]), ".hidden": b"no"}
    packed, archive = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, data in members.items():
            zipped.writestr(name, data)
    with tarfile.open(fileobj=archive, mode="w:gz") as tarred:
        for name, data in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tarred.addfile(header, io.BytesIO(data))
    record = "WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: 5\r\n\r\nhello\r\n\r\n"
    files = {
        "plain.txt": text,
        "empty.txt": b"",
        "a.txt.gz": gzip.compress(short) + gzip.compress(b"more"),
        "b.bz2": bz2.compress(short),
        "c.xz": lzma.compress(short),
        "d.zst": zstandard.compress(short),
        "deep/e.zip": packed.getvalue(),
        "deep/er/f.tar.gz": archive.getvalue(),
        "deep/er/g.warc": record.encode() * 3,
        "deep/utf16.txt": "\ufeffwide ä".encode("utf-16-le"),
        "deep/h.json": b'{"by": "letter", "bins": 26}',
        "_SUCCESS": b"",
    }
    for name, data in files.items():
        (top / name).write_bytes(data)
    for number in range(12):
        (top / "deep" / f"small-{number}.txt").write_bytes(b"small %d" % number)
    return top


def put(folder: Path, url: str, server: int) -> None:
    """Copy the files of a folder there."""
    client = servers.client(server)
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            key = f"{prefix}/{path.relative_to(folder)}"
            client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())


def assert_same(found: tw.Histogram, expected: tw.Histogram, url: str, folder: Path) -> None:
    assert [name.removeprefix(url) for name in found.documents] == [
        name.removeprefix(str(folder)) for name in expected.documents
    ]
    np.testing.assert_array_equal(np.asarray(found.counts), np.asarray(expected.counts))
    assert (found.nbytes, found.skipped, found.ids) == (expected.nbytes, expected.skipped, expected.ids)


OPTIONS: dict[str, Any] = {"device": "cpu", "per_document": True}


@pytest.mark.sample(1)
@pytest.mark.parametrize("by", ["bigram", "word"])
def test_files_count_as_they_do_on_a_disk(
    by: str, folder: Path, url: str, server: int, library: str, proxy: Proxy
) -> None:
    put(folder, url, server)
    told: list[Event] = []
    with dask.config.set({"tilewright.piece-nbytes": 2**16}):
        found = tw.histogram(url, by=by, listener=told.append, **OPTIONS)
        expected = tw.histogram(folder, by=by, **OPTIONS)
    assert_same(found, expected, url, folder)
    notes = {event.message for event in told if isinstance(event, Notice)}
    assert any("1 earlier output of Tilewright not counted" in note for note in notes)
    assert any("1 hidden file or folder not counted" in note for note in notes)
    given = [f"{url}/plain.txt", f"{url}/deep", f"{url}/deep/e.zip"]
    one = tw.histogram(given, exclude="*.txt", listener=told.append, **OPTIONS)
    assert any("1 file named more than once, counted once" in str(event) for event in told)
    chosen = tw.histogram([folder / "plain.txt", folder / "deep"], exclude="*.txt", **OPTIONS)
    assert_same(one, chosen, url, folder)


@pytest.mark.more
def test_fields_of_records_and_tables(tmp_path: Path, url: str, server: int, proxy: Proxy) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(lines * 2000))
    parquet.write_table(pa.Table.from_pylist(ROWS * 3000), folder / "b.parquet", row_group_size=1000)
    put(folder, url, server)
    how: dict[str, Any] = {"field": "text", "id_field": "id", "by": "letter", **OPTIONS}
    assert_same(tw.histogram(url, **how), tw.histogram(folder, **how), url, folder)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_answers_that_break_off_or_fail_are_asked_for_again(
    seed: int, folder: Path, url: str, server: int, library: str, proxy: Proxy
) -> None:
    put(folder, url, server)
    proxy.faults = seeded(seed, 0.3, FAULTS)
    with dask.config.set({"tilewright.piece-nbytes": 2**17}):
        found = tw.histogram(url, **OPTIONS)
    assert_same(found, tw.histogram(folder, **OPTIONS), url, folder)


@pytest.mark.more
def test_small_files_take_a_request_each_many_at_once(
    tmp_path: Path, url: str, server: int, proxy: Proxy
) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:03}.txt").write_bytes(b"%d" % number * 50)
        (folder / f"{number:03}.json.gz").write_bytes(gzip.compress(b"{}"))
    put(folder, url, server)
    proxy.forget()
    proxy.latency = 0.01
    found = tw.histogram(url, **OPTIONS)
    assert_same(found, tw.histogram(folder, **OPTIONS), url, folder)
    assert proxy.count("GET", ".txt") == proxy.count("GET", ".json.gz") == 40
    assert proxy.count("HEAD") == 1
    assert proxy.most_at_once >= 16


def test_a_large_file_is_read_in_ranges_once(tmp_path: Path, url: str, server: int, proxy: Proxy) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    data = np.random.default_rng(1).integers(0, 256, 9 * 2**20, np.uint8).tobytes()
    (folder / "plain.bin").write_bytes(data)
    (folder / "packed.zst").write_bytes(zstandard.compress(data))
    put(folder, url, server)
    proxy.forget()
    found = tw.histogram(url, by="bigram", **OPTIONS)
    assert_same(found, tw.histogram(folder, by="bigram", **OPTIONS), url, folder)
    read = [one for one in proxy.asked if one.method == "GET" and one.key.endswith((".bin", ".zst"))]
    assert all(one.byte_range for one in read)
    assert len(read) >= 6
    assert proxy.sent_nbytes < 1.05 * 2 * len(data)


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["plain.txt", "a.txt.gz"])
def test_a_file_that_changes_meanwhile_is_refused(
    name: str, folder: Path, url: str, server: int, library: str, proxy: Proxy
) -> None:
    put(folder, url, server)
    waited = [name] * (name == "plain.txt")  # whose first bytes are looked at when it is listed

    def change(asked: Asked) -> Fault:
        if asked.method == "GET" and asked.key.endswith(name):
            if waited:
                waited.clear()
                return NO_FAULT
            bucket, _, prefix = url.removeprefix("s3://").partition("/")
            servers.client(server).put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=b"else")
        return NO_FAULT

    proxy.faults = change
    with pytest.raises(
        DocumentError, match=rf"{name} shrank from \d+ to 4 bytes after the corpus was listed"
    ):
        tw.histogram(url, **OPTIONS)


def test_an_empty_place_is_said(proxy: Proxy) -> None:
    with pytest.raises(CorpusError, match="no files in s3://tests/nothing; a corpus needs one"):
        tw.histogram("s3://tests/nothing", **OPTIONS)


@pytest.mark.more
def test_a_state_counts_only_what_is_new(
    folder: Path, url: str, server: int, tmp_path: Path, proxy: Proxy
) -> None:
    put(folder, url, server)
    with dask.config.set({"tilewright.piece-nbytes": 2**16}):
        first = tw.histogram(url, state=tmp_path / "state", **OPTIONS)
        proxy.forget()
        again = tw.histogram(url, state=tmp_path / "state", **OPTIONS)
        assert not proxy.count("GET", ".gz")
        assert not proxy.count("GET", "small-1.txt")
        (folder / "a.txt.gz").write_bytes(gzip.compress(b"other"))
        put(folder, url, server)
        proxy.forget()
        third = tw.histogram(url, state=tmp_path / "state", **OPTIONS)
    np.testing.assert_array_equal(again.counts, first.counts)
    assert_same(third, tw.histogram(folder, **OPTIONS), url, folder)
    with pytest.raises(OptionError, match=r"^state='s3://.*' is a URL; .* give a folder of this machine"):
        tw.histogram(url, state=f"{url}/state", **OPTIONS)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("by", "ending"),
    [
        ("letter", "json"),
        ("word", "npz"),
        ("word", "zarr"),
        *(
            pytest.param(by, ending, marks=pytest.mark.slow)
            for by, ending in (("word", "json"), ("letter", "npz"), ("letter", "zarr"))
        ),
    ],
)
def test_counts_are_written_and_loaded_there(
    by: str, ending: str, folder: Path, url: str, library: str, proxy: Proxy
) -> None:
    found = tw.histogram(folder, by=by, **OPTIONS)
    out = f"{url}/counts.{ending}"
    check_outputs([folder], out, None, overwrite=False)
    save_histogram(found, out)
    loaded = tw.Histogram.load(out)
    assert loaded.documents == found.documents
    assert loaded.labels == found.labels
    np.testing.assert_array_equal(np.asarray(loaded.totals), np.asarray(found.totals))
    other = replace(found, seconds=1.0)
    for write in (lambda: check_outputs([], out, None, overwrite=False), lambda: save_histogram(other, out)):
        with pytest.raises(OutputExistsError, match="counts"):
            write()
    check_outputs([], out, None, overwrite=True)
    save_histogram(other, out, overwrite=True)
    objects = objects_at(out)
    assert not any(objects.get(name) for name in objects.names("") if name.startswith("tilewright"))


@pytest.mark.more
def test_the_command_writes_there(folder: Path, url: str, server: int, proxy: Proxy) -> None:
    put(folder, url, server)
    outputs = ["--out", f"{url}/counts.csv"]
    run = ["histogram", f"{url}/plain.txt", *outputs, "--plot", f"{url}/plot.png"]
    out = CliRunner().invoke(cli, run)
    assert out.exit_code == 0, out.output
    objects = objects_at(url)
    assert (objects.get("counts.csv") or b"").startswith(b"bin,label,count")
    assert (objects.get("plot.png") or b"").startswith(b"\x89PNG")
    again = CliRunner().invoke(cli, ["histogram", url, *outputs, "--overwrite"])
    assert "belongs to the corpus" in again.output


NOWHERE = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
NO_KEYS = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}


@pytest.mark.parametrize(
    ("place", "environment", "fault", "text"),
    [
        ("tests/x", NO_KEYS, NO_FAULT, "there are no credentials .*; set AWS_ACCESS_KEY_ID"),
        ("other/x", {}, NO_FAULT, "there is no such bucket .*; create it, or correct the URL"),
        ("tests/x", {}, Fault(status=403), "the storage forbids it .*; see that these credentials"),
        ("tests/x", NOWHERE, NO_FAULT, "the storage cannot be reached .*AWS_ENDPOINT_URL"),
        ("tests/x", {}, Fault(status=503), "asks for fewer requests .*; lower tilewright.read-threads"),
    ],
)  # fmt: skip
def test_an_error_names_its_cause_and_what_to_do(
    place: str,
    environment: dict[str, str],
    fault: Fault,
    text: str,
    library: str,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name)
    proxy.faults = lambda asked: fault
    deadline = {"tilewright.storage-deadline": 1}
    with dask.config.set(deadline), pytest.raises(CorpusError, match=text) as raised:
        tw.histogram(f"s3://{place}", **OPTIONS)
    assert "\n" not in str(raised.value)
    with dask.config.set(deadline), pytest.raises(StoreError, match=r"^output: ") as raised:
        check_outputs([], f"s3://{place}/o.csv", None, overwrite=False)
    assert "\n" not in str(raised.value)


@pytest.mark.sample(1)
@pytest.mark.parametrize("ending", [".json", ".zarr", ".parquet"])
def test_duplicates_are_found_and_written_there(
    tmp_path: Path, url: str, server: int, proxy: Proxy, ending: str
) -> None:
    words = [f"word{number}" for number in range(60)]
    texts = [words, [*words[:-1], "other"], words, list(reversed(words))]
    (tmp_path / "corpus").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "corpus" / f"{number}.txt").write_text(" ".join(text))
        objects_at(url).put(f"{number}.txt", " ".join(text).encode())
    here = tw.duplicates(tmp_path / "corpus")
    found = tw.duplicates(url, out=f"{url}-found{ending}")
    np.testing.assert_array_equal(found.pairs, here.pairs)
    np.testing.assert_array_equal(found.exact, here.exact)
    assert found.documents == tuple(f"{url}/{number}.txt" for number in range(4))
    with pytest.raises(OutputExistsError, match="exists"):
        tw.duplicates(url, out=f"{url}-found{ending}")
    if ending == ".zarr":
        group = zarr.open_group(store_at(f"{url}-found.zarr"), mode="r")
        np.testing.assert_array_equal(group["cluster"][...], here.cluster)
    else:
        written = objects_at(f"{url}-found{ending}".rpartition("/")[0]).get(
            f"{url}-found{ending}".rpartition("/")[2]
        )
        assert written is not None
        if ending == ".json":
            assert json.loads(written)["pairs"]
        else:
            assert parquet.read_table(io.BytesIO(written))["cluster"].to_pylist() == here.cluster.tolist()
