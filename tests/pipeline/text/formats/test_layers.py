"""Every combination of compressor, container, encoding and records equals ``Counter`` over what Python's own gzip,
tarfile, zipfile and json make of it, wherever blocks end."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import dask
import lz4.frame
import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard
from distributed import Client
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.pipeline.text.test_counting import KNOWN, cpu_workers, dense, documents, fragments, naive_counts
from tests.sampling import examples
from tilewright.kernels.histograms.tokens import KINDS
from tilewright.pipeline.errors import DocumentError, OptionError
from tilewright.pipeline.events import Event, Notice
from tilewright.pipeline.text.corpus import Piece, list_corpus
from tilewright.pipeline.text.counting import count_corpus
from tilewright.pipeline.text.documents import Counts
from tilewright.pipeline.text.formats.reading import reading_of
from tilewright.pipeline.text.formats.recognition import ENCODINGS, recognised
from tilewright.pipeline.text.formats.sources import Found
from tilewright.pipeline.text.histogram import Histogram
from tilewright.pipeline.text.names import Names, part_of
from tilewright.pipeline.text.pieces import count_piece

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
    ".lz4": lz4.frame.compress,
    ".lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
}
WAYS = [("byte", True), ("bigram", False), ("bigram", True), ("codepoint", False)]
"""Kinds whose tokens reach over none, one and three bytes, and documents together and one by one."""


def tarred(members: list[tuple[str, bytes]], kind: int = tarfile.PAX_FORMAT) -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w", format=kind) as archive:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return memory.getvalue()


def zipped(members: list[tuple[str, bytes]], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", method) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return memory.getvalue()


def warc(records: list[tuple[str, bytes]]) -> bytes:
    return b"".join(
        b"WARC/1.0\r\nWARC-Type: %s\r\nWARC-Record-ID: <urn:%d>\r\nContent-Length: %d\r\n\r\n%s\r\n\r\n"
        % (kind.encode(), number, len(data), data)
        for number, (kind, data) in enumerate(records)
    )


def counted_piece(
    paths: list[Path], by: str, *, per_document: bool, nbytes: int, **reading: object
) -> tuple[np.ndarray, list[str], Counts]:
    """What one task counts, in blocks of so many bytes: the counts, and the documents' names without their folders."""
    corpus = list_corpus(paths, reading=reading_of(**reading))  # type: ignore[arg-type]
    piece = Piece(0, corpus.documents, 0, corpus.nbytes)
    part, _ = count_piece(
        piece, KINDS[by], "cpu", per_document, nbytes, 2, reading=corpus.reading, fingerprints=True
    )
    names = [Path(document.name).name for document in corpus.documents]
    if part.rows is not None:
        rows = part.rows
        found = part_of(rows.places, rows.members, rows.numbers, rows.fields, rows.ids)
        names = list(Names(names, [found], None))
    counts = np.zeros((len(names) if per_document else 1, KINDS[by].bins), np.int64)
    counts.reshape(-1)[part.cells] = part.values
    return counts, names, part


def counted(
    client: Client, paths: list[Path], by: str = "byte", **reading: object
) -> tuple[Histogram, list[str]]:
    """The histogram per document, and what was told."""
    told: list[Event] = []
    corpus = list_corpus(paths, reading=reading_of(**reading))  # type: ignore[arg-type]
    found = count_corpus(
        client, corpus, KINDS[by], cpu_workers(client), per_document=True, listener=told.append
    )
    notes = [*corpus.notes, *(event.message for event in told if isinstance(event, Notice))]
    return found, notes


def check(counts: np.ndarray, texts: list[bytes], by: str, per_document: bool) -> None:
    expected = [naive_counts(text, by) for text in texts]
    if not per_document:
        expected = [sum(expected, Counter())]
    assert len(counts) == len(expected)
    for row, counter in zip(counts, expected, strict=True):
        np.testing.assert_array_equal(row, dense(counter, KINDS[by].bins))


@st.composite
def archives(draw: st.DrawFn) -> tuple[str, bytes, list[tuple[str, bytes]]]:
    """The name and bytes of a file, and the names and texts of its documents."""
    texts = draw(st.lists(st.tuples(documents, st.sampled_from(list(COMPRESS))), max_size=4))
    outer = draw(st.sampled_from(list(COMPRESS)))
    container = draw(st.sampled_from(["", ".tar", ".zip"]))
    if not container:
        text = texts[0][0] if texts else b""
        return f"f.txt{outer}", COMPRESS[outer](text), [("", text)]
    members = [(f"d/{i}.txt{suffix}", COMPRESS[suffix](text)) for i, (text, suffix) in enumerate(texts)]
    named = [(f":{name}", text) for (name, _), (text, _) in zip(members, texts, strict=True)]
    if container == ".zip":
        method = draw(
            st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
        )
        return "f.zip", zipped(members, method), named
    kind = draw(st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
    return f"f.tar{outer}", COMPRESS[outer](tarred(members, kind)), named


@pytest.mark.sample(2)
@pytest.mark.parametrize(("by", "per_document"), WAYS)
@settings(max_examples=8)
@given(files=st.lists(archives(), min_size=1, max_size=3), nbytes=st.integers(1, 40))
def test_compressors_and_containers(
    by: str, per_document: bool, files: list[tuple[str, bytes, list[tuple[str, bytes]]]], nbytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{i}{name}") for i, (name, _, _) in enumerate(files)]
        for path, (_, data, _) in zip(paths, files, strict=True):
            path.write_bytes(data)
        counts, names, part = counted_piece(paths, by, per_document=per_document, nbytes=nbytes)
    texts = [text for _, _, inner in files for _, text in inner]
    check(counts, texts, by, per_document)
    assert part.nbytes == sum(map(len, texts))
    assert part.documents == len(texts)
    if per_document:
        assert names == [
            f"{i}{name}{inner}" for i, (name, _, found) in enumerate(files) for inner, _ in found
        ]


values = st.one_of(
    st.text(max_size=12), st.integers(), st.floats(), st.booleans(), st.none(), st.lists(st.text(max_size=3))
)
records = st.dictionaries(st.sampled_from(["id", "a", 'te"xt', "é"]), values, max_size=4)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("by", "per_document"), WAYS)
@settings(max_examples=8)
@given(
    lines=st.lists(
        st.tuples(records, st.text(max_size=20), st.text(max_size=20), st.booleans(), st.booleans()),
        max_size=6,
    ),
    suffix=st.sampled_from(list(COMPRESS)),
    several=st.booleans(),
    nbytes=st.integers(1, 40),
)
def test_json_lines(
    by: str,
    per_document: bool,
    lines: list[tuple[dict[str, object], str, str, bool, bool]],
    suffix: str,
    several: bool,
    nbytes: int,
) -> None:
    fields = ["text", "title"] if several else ["text"]
    if lines:  # a file without any identifier is refused
        lines[0] = ({"id": "first", **lines[0][0]}, *lines[0][1:])
    stored = b"".join(
        json.dumps({**record, "text": text, "title": title}, ensure_ascii=escaped).encode()
        + (b"\r\n\n" if blank else b"\n")
        for record, text, title, escaped, blank in lines
    )
    expected, names, number = [], [], 0
    for _, text, title, _, blank in lines:
        number += 1
        for field, value in (("text", text), ("title", title))[: len(fields)]:
            expected.append(value.encode())
            names.append(f"s.jsonl{suffix}:{number}" + (f":{field}" if several else ""))
        number += blank
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"s.jsonl{suffix}")
        path.write_bytes(COMPRESS[suffix](stored))
        counts, found, part = counted_piece(
            [path], by, per_document=per_document, nbytes=nbytes, field=fields, id_field="id"
        )
    check(counts, expected, by, per_document)
    assert part.documents == len(expected)
    if per_document:
        assert found == names
        ids = [record.get("id") for record, *_ in lines for _ in fields]
        texts = [each if isinstance(each, str) or each is None else json.dumps(each) for each in ids]
        same = (
            [
                (a or None) == (b or None) or (isinstance(want, float | list))
                for a, b, want in zip(part.rows.ids or [None] * len(texts), texts, ids, strict=True)
            ]
            if part.rows is not None
            else []
        )
        assert all(same)


def passages(text: bytes, split_on: str) -> list[tuple[int, bytes]]:
    """The line in which each begins, and what it is."""
    lines = text.split(b"\n")
    ended = [True] * (len(lines) - 1) + [False]
    if not lines[-1]:
        lines.pop()
    if split_on == "line":
        return [
            (i + 1, line[:-1] if ended[i] and line.endswith(b"\r") else line) for i, line in enumerate(lines)
        ]
    found: list[tuple[int, list[bytes], int]] = []
    open_one = False
    for i, line in enumerate(lines):
        if not line.strip(b" \t\r"):
            open_one = False
        elif open_one:
            found[-1][1].append(line)
        else:
            found.append((i + 1, [line], i))
            open_one = True
    return [
        (begin, text[:-1] if text.endswith(b"\r") and ended[first + len(parts) - 1] else text)
        for begin, parts, first in found
        for text in [b"\n".join(parts)]
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize("by", ["byte", "bigram", "codepoint"])
@pytest.mark.parametrize("split_on", ["line", "paragraph"])
@settings(max_examples=examples(12))
@given(
    text=st.lists(
        st.one_of(fragments, st.sampled_from([b"\n", b"\r\n", b"\n\n", b" \n", b"\r"])), max_size=14
    )
    .map(b"".join)
    .filter(lambda data: not data.startswith(KNOWN)),
    suffix=st.sampled_from(list(COMPRESS)),
    per_document=st.booleans(),
    nbytes=st.integers(1, 40),
)
def test_passages(by: str, split_on: str, text: bytes, suffix: str, per_document: bool, nbytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"f{suffix}")
        path.write_bytes(COMPRESS[suffix](text))
        counts, names, _ = counted_piece(
            [path], by, per_document=per_document, nbytes=nbytes, split_on=split_on
        )
    expected = passages(text, split_on)
    check(counts, [each for _, each in expected], by, per_document)
    if per_document:
        assert names == [f"f{suffix}:{line}" for line, _ in expected]


@pytest.mark.sample(3)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1", "shift_jis", "gb18030"])
@settings(max_examples=examples(15))
@given(data=st.binary(max_size=40), text=st.text(max_size=20), nbytes=st.integers(1, 40))
def test_encodings(encoding: str, data: bytes, text: str, nbytes: int) -> None:
    stored = text.encode(encoding, "ignore") + data
    assume(recognised(stored) in (None, *ENCODINGS))  # what begins as a compressed file is read as one
    expected = stored.decode(encoding, "replace")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "f")
        path.write_bytes(stored)
        counts, _, part = counted_piece(
            [path], "codepoint", per_document=True, nbytes=nbytes, encoding=encoding
        )
        check(counts, [expected.encode("utf-8", "surrogatepass")], "codepoint", True)
    written = [each for each in stored.decode(encoding, "ignore") if each == "\ufffd"]
    assert part.lost == expected.count("\ufffd") - len(written)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_a_text_whose_order_of_bytes_nothing_says_is_named(
    client: Client, tmp_path: Path, encoding: str
) -> None:
    (tmp_path / "f").write_bytes(b"no mark at all..")
    with pytest.raises(
        DocumentError, match=rf"f: no {encoding}: .*; say which .*, {encoding}-le or {encoding}-be"
    ):
        counted(client, [tmp_path / "f"], encoding=encoding)


@pytest.mark.parametrize("encoding", ["idna", "punycode", "base64", "rot13", "undefined", "no-such"])
def test_what_decodes_no_texts_is_refused(encoding: str) -> None:
    with pytest.raises(OptionError, match="is no encoding of texts that Python knows"):
        reading_of(encoding=encoding)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_a_byte_order_mark_says_the_encoding(client: Client, tmp_path: Path, encoding: str) -> None:
    text = "Grüße, \U0001f4a9"
    (tmp_path / "f").write_bytes(text.encode(encoding))
    found, _ = counted(client, [tmp_path / "f"])
    np.testing.assert_array_equal(found.counts, [dense(naive_counts(text.encode(), "byte"), 256)])
    stored, _ = counted(client, [tmp_path / "f"], raw=True)
    assert stored.nbytes == len(text.encode(encoding))


@settings(max_examples=8)
@given(
    text=st.lists(st.one_of(fragments, st.just("\ufffd".encode())), max_size=9).map(b"".join),
    nbytes=st.integers(1, 40),
)
def test_what_cannot_be_decoded_is_told_from_what_was_written(text: bytes, nbytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "f")
        path.write_bytes(text)
        raw = text.startswith(KNOWN)
        _, _, part = counted_piece([path], "codepoint", per_document=False, nbytes=nbytes, raw=raw)
    replaced = text.decode("utf-8", "replace").count("\ufffd")
    assert part.lost == replaced - text.count("\ufffd".encode())


def table(texts: list[str | None]) -> pyarrow.Table:
    return pyarrow.table(
        {"n": list(range(len(texts))), "text": texts, "title": [f"T{i}" for i in range(len(texts))]}
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("form", ["parquet", "arrow", "stream", "stream.gz"])
@pytest.mark.parametrize("fields", [["text"], ["title", "text"]])
@pytest.mark.parametrize("nbytes", [3, 2**20])
def test_tables(tmp_path: Path, form: str, fields: list[str], nbytes: int) -> None:
    texts = ["a", None, "", "Grüße", "x" * 50] * 210
    path = (
        tmp_path / f"t.{'arrow' if form.startswith('stream') else form}{'.gz' if form.endswith('gz') else ''}"
    )
    if form == "parquet":
        pyarrow.parquet.write_table(table(texts), path, row_group_size=500)
    else:
        memory = io.BytesIO()
        new = pyarrow.ipc.new_file if form == "arrow" else pyarrow.ipc.new_stream
        with new(memory, table(texts).schema) as writer:
            writer.write_table(table(texts), max_chunksize=1030)
        data = memory.getvalue()
        path.write_bytes(gzip.compress(data) if form.endswith("gz") else data)
    counts, names, part = counted_piece(
        [path], "bigram", per_document=False, nbytes=nbytes, field=fields, id_field="n"
    )
    expected = [
        {"text": (text or "").encode(), "title": f"T{i}".encode()}[field]
        for i, text in enumerate(texts)
        for field in fields
    ]
    check(counts, expected, "bigram", False)
    counts, names, part = counted_piece(
        [path], "byte", per_document=True, nbytes=nbytes, field=fields, id_field="n"
    )
    check(counts, expected, "byte", True)
    assert part.rows is not None
    assert part.rows.ids == [str(i) for i in range(len(texts)) for _ in fields]
    assert names[-1] == f"{path.name}:{len(texts)}" + (":text" if len(fields) > 1 else "")


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("nbytes", [2, 7, 2**20])
def test_records_of_warc_files(tmp_path: Path, suffix: str, nbytes: int) -> None:
    http = b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n<p>body</p>"
    stored = [
        warc([("warcinfo", b"software: x")]),
        warc([("conversion", "Grüße\r\n\r\nmore".encode())]),
        warc([("response", http)]).replace(b"Content-L", b"Content-Type: application/http; x=y\r\nContent-L"),
        warc([("conversion", b"")]),
    ]  # fmt: skip
    path = tmp_path / f"x.warc{suffix}"
    path.write_bytes(b"".join(map(COMPRESS[suffix], stored)))  # a member for each record, as WARC files have
    counts, names, part = counted_piece(
        [path], "codepoint", per_document=True, nbytes=nbytes, id_field="warc-record-id"
    )
    check(counts, ["Grüße\r\n\r\nmore".encode(), b"<p>body</p>", b""], "codepoint", True)
    assert names == [f"x.warc{suffix}:{number}" for number in (2, 3, 4)]
    assert part.rows is not None
    assert part.rows.ids == ["<urn:0>"] * 3
    assert [each.records for each in part.remarks.values()] == [1]


def test_json_lines_in_members(client: Client, tmp_path: Path) -> None:
    lines = b"".join(json.dumps({"text": f"t{i}"}).encode() + b"\n" for i in range(3))
    archive = tarred([("a.jsonl.gz", gzip.compress(lines)), ("b.jsonl", lines)])
    (tmp_path / "all.tar.zst").write_bytes(zstandard.compress(archive))
    found, _ = counted(client, [tmp_path], field="text")
    assert [name.rsplit("/", 1)[1] for name in found.documents] == [
        f"all.tar.zst:{member}:{line}" for member in ("a.jsonl.gz", "b.jsonl") for line in (1, 2, 3)
    ]
    np.testing.assert_array_equal(
        found.counts, [dense(naive_counts(f"t{i}".encode(), "byte"), 256) for i in (0, 1, 2, 0, 1, 2)]
    )
    assert found.document_count == 6


def test_files_and_documents_within_them_stand_in_order(client: Client, tmp_path: Path) -> None:
    """Also where small files turn out to be archives only when they are read, in different pieces."""
    for place in range(4):
        (tmp_path / f"{place}a").write_bytes(b"plain%d" % place)
        (tmp_path / f"{place}b").write_bytes(
            tarred([(f"m{i}", b"x" * i + b"%d" % place) for i in range(place)])
        )
    with dask.config.set({"tilewright.piece-nbytes": 15_000}):
        found, _ = counted(client, [tmp_path])
    expected = [
        (f"{place}a", b"plain%d" % place) if i < 0 else (f"{place}b:m{i}", b"x" * i + b"%d" % place)
        for place in range(4)
        for i in range(-1, place)
    ]
    assert [name.rsplit("/", 1)[1] for name in found.documents] == [name for name, _ in expected]
    np.testing.assert_array_equal(
        found.counts, [dense(naive_counts(text, "byte"), 256) for _, text in expected]
    )


def test_what_is_counted_as_stored_is_told(client: Client, tmp_path: Path) -> None:
    inner = zipped([("a", b"x")])
    pyarrow.parquet.write_table(table(["a"]), tmp_path / "t.parquet")
    (tmp_path / "a.tar").write_bytes(tarred([("in.zip", inner), (".hidden", b"x"), ("b.txt", b"y")]))
    (tmp_path / "b.zip").write_bytes(b"no such thing")
    (tmp_path / "c.7z").write_bytes(b"7z\xbc\xaf\x27\x1c\0\0")
    found, told = counted(client, [tmp_path])
    assert [name.rsplit("/", 1)[1] for name in found.documents] == [
        "a.tar:in.zip", "a.tar:b.txt", "b.zip", "c.7z", "t.parquet",
    ]  # fmt: skip
    words = "\n".join(told)
    for expected in (
        "a.tar:in.zip: like a zip archive within a tar archive, counted as stored bytes",
        "a.tar:.hidden: hidden members of archives not counted",
        "b.zip: named like a zip archive, but no such thing: counted as stored bytes",
        "c.7z: like a 7z archive, counted as stored bytes",
        "t.parquet: like a Parquet file, counted as stored bytes: name a column (--field)",
    ):
        assert expected in words
    np.testing.assert_array_equal(found.counts[0], dense(naive_counts(inner, "byte"), 256))


def test_a_member_of_a_zip_archive_without_a_name(client: Client, tmp_path: Path) -> None:
    """As damage makes one."""
    (tmp_path / "a.zip").write_bytes(zipped([("a", b"xyz")], zipfile.ZIP_STORED).replace(b"a", b"\0"))
    found, _ = counted(client, [tmp_path])
    assert found.totals.sum() == 3


@pytest.mark.parametrize("dot", ["", "./"])
@pytest.mark.parametrize(
    ("pattern", "taken"), [("a/*.txt", {"a/x.txt"}), ("a/**", {"a/x.txt", "a/b/y.txt"}), ("z.txt", {"z.txt"})]
)
def test_patterns_fit_names_that_begin_with_a_dot(
    without_dask: Client, tmp_path: Path, dot: str, pattern: str, taken: set[str]
) -> None:
    """As those of ``tar c .``, and as ``find`` prints them."""
    members = ("a/x.txt", "a/b/y.txt", "z.txt")
    (tmp_path / "a.tar").write_bytes(tarred([(f"./{name}", b"text") for name in members]))
    (tmp_path / "b.tar").write_bytes(tarred([(name, b"text") for name in members]))
    reading = {"include": f"{dot}{pattern}"}, {"exclude": f"{dot}{pattern}"}
    for asked, wanted in zip(reading, (taken, set(members) - taken), strict=True):
        for archive, stored in (("a.tar", "./"), ("b.tar", "")):
            found, _ = counted(without_dask, [tmp_path / archive], **asked)
            assert set(found.documents) == {f"{tmp_path / archive}:{stored}{name}" for name in wanted}


def test_found_keeps_no_rows_unless_asked() -> None:
    found = Found()
    found.ended("", 1000)
    assert found.documents == 1000
    assert not found.rows
