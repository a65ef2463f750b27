"""Corpora at URLs that are no S3: of HTTP and of fsspec's other file systems; and what is read ahead of them."""

from __future__ import annotations

import gzip
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tests.sampling import examples
from tilewright.pipeline.errors import CorpusError, DocumentError
from tilewright.pipeline.store.remote import files
from tilewright.pipeline.store.remote.files import Expected, RemoteFile, UrlError, read_at, reading_ahead

OPTIONS: dict[str, Any] = {"device": "cpu", "per_document": True}


class Handler(SimpleHTTPRequestHandler):
    """Python's server of a folder, with what it lacks: ranges, and ETags where they are asked for."""

    protocol_version = "HTTP/1.1"
    ranges = True
    heads = True
    tag = ""
    asked: list[tuple[str, str, str | None]]

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        if self.heads:
            super().do_HEAD()
        else:
            self.asked.append(("HEAD", self.path, None))
            self.send_error(405)

    def end_headers(self) -> None:
        if self.tag:
            self.send_header("ETag", self.tag)
        super().end_headers()

    def send_head(self) -> Any:
        asked, path = self.headers.get("Range"), Path(self.translate_path(self.path))
        self.asked.append((self.command, self.path, asked))
        if not (asked and self.ranges and path.is_file()):
            return super().send_head()
        data = path.read_bytes()
        start, stop = (int(part) for part in asked.removeprefix("bytes=").split("-"))
        part = data[start : stop + 1]
        self.send_response(206 if part else 416)
        self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
        self.end_headers()
        return BytesIO(part)


@pytest.fixture(scope="module")
def files_of_corpus() -> dict[str, bytes]:
    """What the files of a corpus hold; compressing it takes longer than most tests of it."""
    rng = np.random.default_rng(20261121)
    text = bytes(rng.choice(np.frombuffer(b"abc \n", np.uint8), 2**18)) * 40
    archive = BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("x.txt", text[: 2**21])
        zipped.writestr("y.txt", b"end")
    return {
        "large.txt": text,
        "empty.txt": b"",
        "deep er/a.txt.gz": gzip.compress(text[: 2**20]),
        "deep er/b.zip": archive.getvalue(),
    }


@pytest.fixture
def folder(tmp_path: Path, files_of_corpus: dict[str, bytes]) -> Path:
    top = tmp_path / "corpus"
    (top / "deep er").mkdir(parents=True)
    for name, data in files_of_corpus.items():
        (top / name).write_bytes(data)
    return top


@pytest.fixture
def handler() -> type[Handler]:
    class Own(Handler):
        asked: list[tuple[str, str, str | None]] = []  # noqa: RUF012

    return Own


@pytest.fixture
def server(folder: Path, handler: type[Handler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder.parent))) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def assert_same(found: tw.Histogram, expected: tw.Histogram, url: str, folder: Path) -> None:
    assert [name.removeprefix(url).replace("%20", " ") for name in found.documents] == [
        name.removeprefix(str(folder)) for name in expected.documents
    ]
    np.testing.assert_array_equal(np.asarray(found.counts), np.asarray(expected.counts))


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize(("heads", "tag"), [(True, '"v1"'), (False, ""), (True, 'W/"weak"')])
def test_pages_of_links_are_folders(
    heads: bool, tag: str, folder: Path, server: str, handler: type[Handler]
) -> None:
    handler.heads, handler.tag = heads, tag
    expected = tw.histogram(folder, by="bigram", **OPTIONS)
    for url in (f"{server}/corpus", f"{server}/corpus/"):
        assert_same(tw.histogram(url, by="bigram", **OPTIONS), expected, url.rstrip("/"), folder)
    ranges = [part for method, path, part in handler.asked if method == "GET" and path.endswith("large.txt")]
    assert len(ranges) >= 6
    assert all(ranges)
    one = tw.histogram(f"{server}/corpus/large.txt", by="bigram", device="cpu")
    np.testing.assert_array_equal(
        one.counts, expected.counts[expected.documents.index(f"{folder}/large.txt")]
    )


def test_a_server_without_ranges_gives_small_files(folder: Path, server: str, handler: type[Handler]) -> None:
    handler.ranges = False
    found = tw.histogram(f"{server}/corpus", exclude="large.txt", **OPTIONS)
    assert_same(found, tw.histogram(folder, exclude="large.txt", **OPTIONS), f"{server}/corpus", folder)
    with pytest.raises(CorpusError, match=r"its server gives no ranges of it; copy it to another place"):
        tw.histogram(f"{server}/corpus/large.txt", **OPTIONS)


def test_a_file_of_http_that_changes_is_refused(folder: Path, server: str, handler: type[Handler]) -> None:
    class Changing(list[tuple[str, str, str | None]]):
        def append(self, asked: tuple[str, str, str | None]) -> None:
            super().append(asked)
            if len(self) == 4:
                handler.tag = '"other"'

    handler.asked, handler.tag = Changing(), '"v1"'
    with pytest.raises(DocumentError, match=r"large.txt was rewritten after the corpus was listed; count it"):
        tw.histogram(f"{server}/corpus/large.txt", **OPTIONS)


def test_errors_of_http(server: str) -> None:
    with pytest.raises(CorpusError, match=r"no files in http://.*/nothing; a corpus needs one"):
        tw.histogram(f"{server}/nothing", **OPTIONS)
    with pytest.raises(CorpusError, match=r"^cannot list nosuch://a: .*; install what reads such URLs"):
        tw.histogram("nosuch://a", **OPTIONS)
    with pytest.raises(CorpusError, match=r"give that of the archive, memory://a.zip, whose members are"):
        tw.histogram("zip://*::memory://a.zip", **OPTIONS)


def test_other_file_systems_of_fsspec(folder: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/test_remote_corpora", recursive=True)
    try:
        url = "memory://test_remote_corpora"
        assert_same(tw.histogram(url, **OPTIONS), tw.histogram(folder, **OPTIONS), url, folder)
        local = tw.histogram(f"file://{folder}", **OPTIONS)
        assert local.documents == tw.histogram(folder, **OPTIONS).documents
    finally:
        memory.rm("/test_remote_corpora", recursive=True)


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_whatever_is_read_in_whichever_order_is_right(data: st.DataObject) -> None:
    """With requests of a few bytes, so that small files cross many of them."""
    memory = fsspec.filesystem("memory")
    lengths = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=4))
    contents = [bytes((7 * place + i) % 251 for i in range(length)) for place, length in enumerate(lengths)]
    for place, content in enumerate(contents):
        memory.pipe(f"/windows/{place}", content)
    listed = [RemoteFile(url, facts) for url, facts in files.find("memory://windows")[1].items()]
    sizes = {"REQUEST_NBYTES": 16, "FIRST_NBYTES": 8, "LEAST_NBYTES": 4, "AHEAD_NBYTES": 64, "AHEAD_FILES": 2}
    before = {name: getattr(files, name) for name in sizes}
    try:
        for name, size in sizes.items():
            setattr(files, name, size)
        ahead = [
            Expected(
                file,
                data.draw(st.integers(0, file.facts.nbytes)),
                data.draw(st.one_of(st.none(), st.integers(0, 300))),
                data.draw(st.booleans()),
            )
            for file in listed
            if data.draw(st.booleans())
        ]
        with reading_ahead(ahead):
            for _ in range(data.draw(st.integers(1, 12))):
                place = data.draw(st.integers(0, len(listed) - 1))
                offset = data.draw(st.integers(0, lengths[place]))
                target = bytearray(data.draw(st.integers(0, 100)))
                got = read_at(listed[place], memoryview(target), offset)
                assert bytes(target[:got]) == contents[place][offset : offset + len(target)]
    finally:
        for name, size in before.items():
            setattr(files, name, size)
        memory.rm("/windows", recursive=True)


def test_a_file_that_is_gone_is_said() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/gone/a", b"x" * 100)
    ((url, facts),) = files.find("memory://gone/a")[1].items()
    memory.rm("/gone", recursive=True)
    with pytest.raises(UrlError, match="was removed"):
        read_at(RemoteFile(url, facts), memoryview(bytearray(10)), 0)
