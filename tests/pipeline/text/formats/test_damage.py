"""Damaged files end with one line that names the file, never with anything else, and never with counts of what is not
there."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.text.formats.test_layers import counted_piece, table, tarred, warc, zipped
from tests.sampling import examples
from tilewright.pipeline.errors import DocumentError, MalformedDocumentError
from tilewright.pipeline.text.formats.sources import null_field

TEXTS = [
    ("a/one.txt", b"one" * 50),
    ("b/two.jsonl", b'{"text": "zwei"}\n' * 20),
    ("c.gz", gzip.compress(b"three")),
]


def parquet() -> bytes:
    memory = io.BytesIO()
    pyarrow.parquet.write_table(table([f"text {i}" for i in range(300)]), memory)
    return memory.getvalue()


def arrow(stream: bool = False) -> bytes:
    memory = io.BytesIO()
    rows = table([f"text {i}" for i in range(300)])
    with (pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file)(memory, rows.schema) as writer:
        writer.write_table(rows)
    return memory.getvalue()


def json_lines() -> bytes:
    return b"".join(
        json.dumps({"id": i, "text": f"é\n{i}", "more": [1, {"a": None}]}).encode() + b"\n" for i in range(30)
    )


FILES: dict[str, tuple[Callable[[], bytes], dict[str, object]]] = {
    "f.tar": (lambda: tarred(TEXTS), {}),
    "f.tar.gz": (lambda: gzip.compress(tarred(TEXTS)), {}),
    "f.zip": (lambda: zipped(TEXTS), {}),
    "lzma.zip": (lambda: zipped(TEXTS, zipfile.ZIP_LZMA), {}),
    "f.warc": (lambda: warc([("warcinfo", b"x"), ("conversion", b"text" * 9), ("response", b"b" * 70)]), {}),
    "f.jsonl": (json_lines, {"field": "text", "id_field": "id"}),
    "f.parquet": (parquet, {"field": "text", "id_field": "n"}),
    "f.arrow": (arrow, {"field": "text"}),
    "stream.arrow": (lambda: arrow(stream=True), {"field": "text"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


def damaged(data: bytes, draw: Callable[[st.SearchStrategy[int]], int], many: int) -> bytes:
    out = bytearray(data)
    for _ in range(draw(st.integers(1, many))):
        place = draw(st.integers(0, len(out) - 1))
        kind = draw(st.integers(0, 3))
        if kind == 0:
            out[place] = draw(st.integers(0, 255))
        elif kind == 1:
            out[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == 2:
            del out[place : place + draw(st.integers(1, 600))]
        else:
            out[place:place] = bytes([draw(st.integers(0, 255))]) * draw(st.integers(1, 40))
        if not out:
            break
    return bytes(out)


def attempt(path: Path, data: bytes, reading: dict[str, object]) -> None:
    path.write_bytes(data)
    try:
        counted_piece([path], "byte", per_document=True, nbytes=2**16, **reading)
    except DocumentError as error:
        text = str(error)
        assert path.name in text
        assert "\n" not in text
        assert ";" in text, "what to do"


@pytest.mark.parametrize("name", list(FILES))
@settings(max_examples=examples(16))
@given(data=st.data())
def test_damage_is_told_in_one_line(folder: Path, name: str, data: st.DataObject) -> None:
    make, reading = FILES[name]
    attempt(folder / name, damaged(make(), data.draw, 3), reading)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FILES))
@settings(max_examples=1200)
@given(data=st.data())
def test_ten_thousand_damages(folder: Path, name: str, data: st.DataObject) -> None:
    make, reading = FILES[name]
    attempt(folder / name, damaged(make(), data.draw, 6), reading)


@pytest.mark.parametrize("name", ["f.tar", "f.tar.gz", "f.zip", "f.parquet", "f.arrow"])
def test_no_end_is_taken_for_the_whole(folder: Path, name: str) -> None:
    """But between two members of a tar, where the format allows it."""
    make, reading = FILES[name]
    data = make()
    for length in range(len(data) // 3, len(data) - (10240 if name == "f.tar" else 1), 97):
        (folder / name).write_bytes(data[:length])
        if name == "f.tar" and length % 512 == 0:
            continue
        if name in ("f.zip", "f.parquet", "f.arrow", "f.tar.gz", "f.tar"):
            with pytest.raises(DocumentError, match=name):
                counted_piece([folder / name], "byte", per_document=False, nbytes=2**16, **reading)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "a"', "no JSON: the line ends within its value"),
        (b'{"text": 7}', "field 'text' holds a number, and no text"),
        (b'{"text": "a\x01"}', "no JSON: a text holds a control character that is not escaped .column 12"),
        (b'["a"]', "no JSON: the line is no JSON object"),
        (b'{"text": "a"} x', "no JSON: other bytes stand behind the object"),
        (b'{"text": "\\x"}', "no JSON: a text holds a malformed escape"),
        (b"{'text': 1}", "no JSON: no key in quotation marks"),
        (b'{"text": ' + b"[" * 1100 + b"}", "nested more than 1000 deep"),
        (
            b'\xef\xbb\xbf{"text": "a"}',
            "no JSON, but it begins with a byte order mark .column 1.*join files without",
        ),
        (b' \xef\xbb\xbf{"text": "a"}', "no JSON, but it begins with a byte order mark .column 2"),
        (b'\xef\xbb{"text": "a"}', "no JSON, but it begins with bytes of another encoding than UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, says: str) -> None:
    (tmp_path / "s.jsonl.gz").write_bytes(
        gzip.compress(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
    )
    with pytest.raises(MalformedDocumentError, match=rf"s\.jsonl\.gz:3: .*{says}"):
        counted_piece([tmp_path], "byte", per_document=False, nbytes=100, field="text")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            b'{\n "text": "a"\n}\n',
            r":1: no JSON: the line ends within its value .column 2., which may go on.*jq -c",
        ),
        (b'{"text": "a"', r":1: no JSON: the line ends within its value .column 13.; restore the file"),
        (b'{"text": "a"}\n{\n', r":2: no JSON: the line ends within its value .column 2.; restore the file"),
    ],
)
def test_a_value_over_several_lines_is_told_from_one_that_was_cut_off(
    tmp_path: Path, data: bytes, says: str
) -> None:
    (tmp_path / "s.json").write_bytes(data)
    with pytest.raises(MalformedDocumentError, match=rf"s\.json{says}"):
        counted_piece([tmp_path], "byte", per_document=False, nbytes=100, field="text")


def test_members_that_are_bad_are_named(tmp_path: Path) -> None:
    short = tarred([("ok", b"x"), ("in/bad.gz", gzip.compress(b"a" * 99)[:-3])])
    cases: list[tuple[str, bytes, str]] = [
        ("gz.tar", short, r"gz\.tar:in/bad\.gz: it cannot be decompressed: it was cut short"),
        ("short.tar", tarred([("a", b"x" * 2000)])[:1500], r"short\.tar:a: the archive was cut short"),
        ("sum.tar", tarred([("a", b"x")]).replace(b"a\0", b"b\0", 1), "its checksum is another"),
    ]
    archive = bytearray(zipped([("a", b"x" * 500), ("b", b"y" * 500)], zipfile.ZIP_STORED))
    archive[archive.index(b"y" * 500) + 7] ^= 1
    cases.append(("sum.zip", bytes(archive), r"sum\.zip:b: its checksum is"))
    for name, data, says in cases:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(MalformedDocumentError, match=says):
            counted_piece([tmp_path / name], "byte", per_document=False, nbytes=100)


def test_members_over_one_another_are_refused(tmp_path: Path) -> None:
    """As in archives that unpack to far more than they have: one member's bytes, which many entries name."""
    archive = bytearray(zipped([("a", bytes(10**6)), ("b", bytes(10**6))]))
    second = archive.rindex(b"PK\1\2")
    archive[second + 42 : second + 46] = (10).to_bytes(4, "little")
    (tmp_path / "bomb.zip").write_bytes(archive)
    with pytest.raises(MalformedDocumentError, match=r"bomb\.zip:\w: members lie over one another"):
        counted_piece([tmp_path], "byte", per_document=False, nbytes=100)


def test_what_unpacks_to_more_than_it_says_ends_there(tmp_path: Path) -> None:
    archive = bytearray(zipped([("a", bytes(10**6))]))
    entry = archive.index(b"PK\1\2")
    archive[entry + 24 : entry + 28] = (1000).to_bytes(4, "little")
    (tmp_path / "more.zip").write_bytes(archive)
    with pytest.raises(MalformedDocumentError, match=r"more\.zip:a: it has more bytes than the 1000"):
        counted_piece([tmp_path], "byte", per_document=False, nbytes=2**20)


def test_names_in_archives_are_only_names(tmp_path: Path) -> None:
    names = ["../../escape", "/absolute", "a/../../b", "nul\0l"]
    folder = tmp_path / "deep" / "corpus"
    folder.mkdir(parents=True)
    (folder / "n.tar").write_bytes(tarred([(name.replace("\0", "?"), b"x") for name in names]))
    (folder / "n.zip").write_bytes(zipped([(name, b"x") for name in names]))
    _, found, _ = counted_piece([tmp_path], "byte", per_document=True, nbytes=100)
    assert len(found) == 8
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["n.tar", "n.zip"]


def test_wrong_columns_are_named(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(table(["a"]), tmp_path / "t.parquet")
    for field, says in (
        ("txt", "no column 'txt'; it has 'n', 'text', 'title'"),
        ("n", "column 'n' holds int64"),
    ):
        with pytest.raises(MalformedDocumentError, match=rf"t\.parquet: .*{says}"):
            counted_piece([tmp_path], "byte", per_document=False, nbytes=100, field=field)


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow", "t.arrows"])
@pytest.mark.parametrize("rows", [0, 3])
def test_a_column_of_which_nobody_knew_the_type_holds_empty_texts(
    name: str, rows: int, tmp_path: Path
) -> None:
    """All are null: so is what pandas writes of a shard without a single text."""
    columns = pyarrow.table({"text": pyarrow.nulls(rows), "n": pyarrow.array(range(rows), pyarrow.int64())})
    if name == "t.parquet":
        pyarrow.parquet.write_table(columns, tmp_path / name)
    else:
        make = pyarrow.ipc.new_file if name == "t.arrow" else pyarrow.ipc.new_stream
        with make(tmp_path / name, columns.schema) as writer:
            writer.write_table(columns)
    every: tuple[dict[str, object], ...] = ({"field": "text"}, {"field": ["text"], "id_field": "n"})
    for options in every:
        _, _, found = counted_piece([tmp_path / name], "byte", per_document=True, nbytes=100, **options)
        assert found.documents == rows
        told = {null_field("text"): (1, str(tmp_path / name), rows)} if rows else {}
        told |= {} if rows else {"no record in it": (1, str(tmp_path / name), 0)}
        assert found.remarks == told


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_tar_without_members_has_no_documents(tmp_path: Path, suffix: str) -> None:
    """It is nothing but zeros; by another name these are a text."""
    data = gzip.compress(bytes(10240)) if suffix else bytes(10240)
    for name, documents in ((f"a.tar{suffix}", 0), (f"a.txt{suffix}", 1)):
        (tmp_path / name).write_bytes(data)
        _, _, found = counted_piece([tmp_path / name], "byte", per_document=False, nbytes=100)
        assert found.documents == documents
        assert found.nbytes == 10240 * documents
        assert not found.remarks


def test_checksums_of_tars_may_be_signed(tmp_path: Path) -> None:
    info = tarfile.TarInfo("é")
    info.size = 1
    header = bytearray(info.tobuf(tarfile.USTAR_FORMAT, "latin-1"))
    signed = sum(np.frombuffer(header[:148] + header[156:512], np.int8).astype(int)) + 8 * 0x20
    header[148:156] = b"%06o\0 " % signed
    (tmp_path / "s.tar").write_bytes(bytes(header) + b"x".ljust(512, b"\0") + bytes(1024))
    counts, _, _ = counted_piece([tmp_path], "byte", per_document=False, nbytes=100)
    assert counts.sum() == 1
