"""What lacks a field, or an identifier, is refused where all of a file does, and else told with how many do."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from click.testing import CliRunner
from distributed import Client

import tilewright as tw
from tilewright.pipeline.errors import MalformedDocumentError, OptionError
from tilewright.pipeline.events import Caution, Event, Notice
from tilewright.pipeline.text.formats.offered import fields_offered
from tilewright.workflows.cli import cli

Counted = tuple[tw.Histogram, list[str]]


def counted(client: Client, paths: Any, **given: Any) -> Counted:
    told: list[Event] = []
    how: dict[str, Any] = {"by": "letter", "per_document": True, "cluster": client, "device": "cpu"}
    found = tw.histogram(paths, listener=told.append, **{**how, **given})
    return found, [each.message for each in told if isinstance(each, Notice)]


def lines(path: Path, *records: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_records_are_counted_and_null_is_told_apart(client: Client, tmp_path: Path) -> None:
    one = lines(tmp_path / "a.jsonl", {"text": "a"}, {}, {"text": None}, {}, {"text": None}, {})
    found, told = counted(client, one, field="text")
    assert f"{one}: 3 records without a field 'text', counted as empty" in told
    assert f"{one}: 2 records whose field 'text' is null, counted as empty" in told
    assert found.totals.sum() == 1
    lines(tmp_path / "b.jsonl", {"text": "b"}, {"other": 1})
    _, told = counted(client, tmp_path, field="text", state=tmp_path / ".kept")
    assert f"{one} and 1 other: 4 records without a field 'text', counted as empty" in told
    _, again = counted(client, tmp_path, field="text", state=tmp_path / ".kept")
    assert f"{one} and 1 other: 4 records without a field 'text', counted as empty" in again


def test_each_of_several_fields_is_told_by_itself(client: Client, tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl", {"text": "a"}, {"text": "b", "title": "c"}, {"text": None, "title": None}
    )
    _, told = counted(client, path, field=["title", "text"])
    assert f"{path}: 1 record without a field 'title', counted as empty" in told
    assert f"{path}: 1 record whose field 'title' is null, counted as empty" in told
    assert f"{path}: 1 record whose field 'text' is null, counted as empty" in told
    assert not any("without a field 'text'" in each for each in told)


def test_a_field_that_is_null_everywhere_is_there(client: Client, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": None}, {"text": None})
    found, told = counted(client, path, field="text")
    assert found.document_count == 2
    assert f"{path}: 2 records whose field 'text' is null, counted as empty" in told


def test_rows_that_are_null_are_told(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "b", None]}), path)
    _, told = counted(client, path, field="text")
    assert f"{path}: 2 records whose field 'text' is null, counted as empty" in told


@pytest.mark.parametrize("per_document", [True, False])
def test_records_of_warc_files_without_text(client: Client, tmp_path: Path, per_document: bool) -> None:
    path = tmp_path / "a.warc"
    kinds = ["warcinfo", "request", "conversion"]
    path.write_bytes(b"".join(record(kind) for kind in kinds))
    _, told = counted(client, path, per_document=per_document)
    assert f"{path}: 2 records that hold no text (warcinfo, request, metadata, revisit)" in told


def record(kind: str, name: str = "WARC-Record-ID", value: str = "<urn:1>") -> bytes:
    return f"WARC/1.0\r\nWARC-Type: {kind}\r\n{name}: {value}\r\nContent-Length: 1\r\n\r\nx\r\n\r\n".encode()


def test_an_identifier_that_no_record_has(client: Client, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"id": "a", "text": "a"}, {"id": "b", "text": "b"})
    said = (
        r"a\.jsonl: none of its 2 records has a field 'Id', .* \(id_field\); its first has 'id', 'text'; did you mean"
        r" 'id'\?; name one"
    )
    with pytest.raises(MalformedDocumentError, match=said):
        counted(client, path, field="text", id_field="Id")
    with pytest.raises(MalformedDocumentError, match=said):
        tw.duplicates(path, field="text", id_field="Id", cluster=client)
    (tmp_path / "a.warc").write_bytes(record("conversion") * 2)
    with pytest.raises(
        MalformedDocumentError, match=r"none of its 2 records .* 'ID' in its header, .*'warc-record-id'"
    ):
        counted(client, tmp_path / "a.warc", id_field="ID")


def test_documents_without_an_identifier_are_told(client: Client, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *({"text": "a", **each} for each in ({"id": "a"}, {}, {"id": None})))
    note = f"2 of 3 documents have no id ('id'), {path}:2 first"
    found, told = counted(client, path, field="text", id_field="id")
    assert found.ids == ("a", None, None)
    assert note in told
    seen: list[Event] = []
    tw.duplicates(path, field="text", id_field="id", cluster=client, listener=seen.append)
    assert note in [each.message for each in seen if isinstance(each, Notice)]
    (tmp_path / "b.txt").write_text("b")
    _, told = counted(client, tmp_path / "b.txt", id_field="id")
    assert any(each.startswith("none of 1 document has an id: id_field='id'") for each in told)


def test_identifiers_of_several_documents_are_told(client: Client, tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl", *({"id": each, "text": "a", "title": "b"} for each in ["x", 7, "x", "y", 7])
    )
    _, told = counted(client, path, field="text", id_field="id")
    assert "2 ids ('id') are of more than one document, 'x' first" in told
    path = lines(tmp_path / "b.jsonl", *({"id": each, "text": "a", "title": "b"} for each in "xyz"))
    _, told = counted(client, path, field=["text", "title"], id_field="id")
    assert not any("ids" in each for each in told)


def test_identifiers_are_of_documents_alone(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"id": "a", "text": "a"})
    for count in (tw.histogram, tw.plan_histogram):
        with pytest.raises(OptionError, match=r"id_field='id' .* add per_document, or leave out id_field"):
            count(path, field="text", id_field="id")


PLAIN = "plain text, of which no field is read: a whole document (--exclude leaves it out)"


def archive_of(path: Path, **members: str) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, text in members.items():
            member = tarfile.TarInfo(f"{name}.txt")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def test_plain_texts_beside_a_field_are_whole_documents(client: Client, tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", {"id": "1", "text": "one", "title": "t"})
    archive_of(tmp_path / "b.tar", b="two", c="{{Infobox}} three", d="{\\rtf four")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"five"))
    (tmp_path / "d").write_bytes(b"\xff\xfe" + "six".encode("utf-16-le"))
    lines(tmp_path / "e.txt", {"text": "seven"})
    (tmp_path / "f.warc").write_bytes(record("conversion"))
    found, told = counted(client, tmp_path, field="text")
    assert [Path(each).name for each in found.documents] == [
        "a.jsonl:1", "b.tar:b.txt", "b.tar:c.txt", "b.tar:d.txt", "c.txt.gz", "d", "e.txt:1", "f.warc:1",
    ]  # fmt: skip
    texts = ["one", "two", "{{Infobox}} three", "{\\rtf four", "five", "six", "seven", "x"]
    assert found.counts.sum(axis=1).tolist() == [sum(map(str.isalpha, each)) for each in texts]
    assert f"{tmp_path}/b.tar:b.txt and 5 others: {PLAIN}" in told
    several, _ = counted(client, tmp_path, field=["title", "text"], exclude=["e.txt"], id_field="id")
    assert [Path(each).name for each in several.documents][:3] == [
        "a.jsonl:1:title",
        "a.jsonl:1:text",
        "b.tar:b.txt",
    ]
    without, told = counted(client, tmp_path, field="text", include="*.jsonl")
    assert without.document_count == 1
    assert not any(PLAIN in each for each in told)


def test_signals_and_duplicates_have_the_same_rule(client: Client, tmp_path: Path) -> None:
    text = "one two three four five six seven"
    lines(tmp_path / "a.jsonl", {"text": "other"}, {"text": text})
    archive_of(tmp_path / "b.tar", b=text)
    seen: list[Event] = []
    found = tw.duplicates(tmp_path, field="text", cluster=client, listener=seen.append)
    assert found.dropped == (f"{tmp_path}/b.tar:b.txt",)
    signals = tw.signals(tmp_path, field="text", cluster=client, listener=seen.append)
    assert signals["word_count"].tolist() == [1, 7, 7]
    told = [each.message for each in seen if isinstance(each, Notice)]
    assert told.count(f"{tmp_path}/b.tar:b.txt: {PLAIN}") == 2


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.json", b"[1]", "no JSON object, as each line is of what has such a name"),
        ("a.csv", b"id,text\n", "CSV by its name, of which no field is read"),
        ("a.avro", b"Obj\1more", "like an Avro file, of which no field is read"),
        ("a.parquet", b"text", "named like a Parquet file, and is no such thing"),
        ("a", b'{\n  "text": "over lines"}', "no JSON: "),
    ],
)
def test_what_has_fields_is_no_plain_text(
    client: Client, tmp_path: Path, name: str, data: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(MalformedDocumentError, match=said):
        counted(client, tmp_path, field="text")
    if not said.startswith("no JSON: "):
        plan = tw.plan_histogram(tmp_path, field="text", cluster=client, device="cpu")
        assert [Path(each).name for each, _ in plan.refused] == [name]


def test_what_a_record_has_is_told_however_long_it_is(client: Client, tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl",
        {"text": 'x"\\{' * 10**6, "more": {"inner": [1, "a:"]}, "id": "1"}, {"text": "b"},
    )  # fmt: skip
    with pytest.raises(
        MalformedDocumentError,
        match=r"none of its 2 records has a field 'texxt'; its first has 'text', 'more', 'id'; did you mean 'text'\?",
    ):
        counted(client, path, field="texxt")
    many = lines(tmp_path / "b.jsonl", {f"k{i:02}": "" for i in range(30)})
    with pytest.raises(MalformedDocumentError, match=r"'k09', and others; name one"):
        counted(client, many, field="text")
    table = tmp_path / "c.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": ["1"], "text": ["a"]}), table)
    with pytest.raises(MalformedDocumentError, match=r"it has 'id', 'text'; did you mean 'text'\?"):
        counted(client, table, field="texxt")


def test_what_has_no_record_is_told(client: Client, tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.ndjson", "d.parquet"):
        (tmp_path / name).write_bytes(b"\n" * (name == "b.ndjson"))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b""))
    pyarrow.parquet.write_table(
        pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "e.parquet"
    )
    lines(tmp_path / "f.jsonl", {"text": "a"})
    found, told = counted(client, tmp_path, field="text")
    assert found.document_count == 1
    assert f"{tmp_path}/a.jsonl and 3 others: no record in it" in told
    assert f"{tmp_path}/d.parquet: named like a Parquet file, and has no bytes: nothing of it counts" in told


def test_a_state_tells_texts_from_lines_by_their_new_names(client: Client, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    path = tmp_path / "c" / "a.jsonl"
    path.write_text('no object\n{"text": "b"}\n{"text": "c"}\n')
    kept = {"field": "text", "state": tmp_path / "s", "on_error": "report"}
    first, _ = counted(client, tmp_path / "c", **kept)
    path.rename(path.with_suffix(".txt"))
    second, _ = counted(client, tmp_path / "c", **kept)
    assert (first.document_count, second.document_count) == (2, 1)


def test_a_state_of_other_patterns_says_why(client: Client, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.txt").write_text("a")
    counted(client, tmp_path / "c", state=tmp_path / "s")
    for count in (counted, planned):
        with pytest.raises(
            OptionError, match=r"include was not given and is \*\.txt\. They also choose members of archives"
        ):
            count(client, tmp_path / "c", state=tmp_path / "s", include="*.txt")
    with pytest.raises(OptionError, match="keeps pieces of other work"):
        counted(client, tmp_path / "c", state=tmp_path / "s", include="*.txt", by="byte")
    (tmp_path / "c" / "b.txt").write_text("b")
    one, _ = counted(client, tmp_path / "c" / "b.txt", state=tmp_path / "s")
    both, _ = counted(client, tmp_path / "c", state=tmp_path / "s")
    assert (one.document_count, both.document_count) == (1, 2)


def planned(client: Client, paths: Path, **given: Any) -> None:
    told: list[Event] = []
    tw.plan_histogram(
        paths, by="letter", per_document=True, cluster=client, device="cpu", listener=told.append, **given
    )
    raise OptionError(" ".join(str(each) for each in told))


def test_the_most_frequent_are_printed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" ".join(f"w{k} " * (k + 1) for k in range(40)))
    command = ["histogram", str(tmp_path), "--by", "word", "--device", "cpu", "-q"]
    lines = CliRunner().invoke(cli, [*command, "--top", "30"]).stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:31]] == [[f"w{k}", str(k + 1)] for k in range(39, 9, -1)]
    assert lines[31:] == ["and 10 more bins"]
    refused = CliRunner().invoke(cli, [*command, "--top", "3", "--json"])
    assert refused.exit_code == 2


def test_without_a_field_a_caution_names_those_there_are(client: Client, tmp_path: Path) -> None:
    rows = [{"text": f"{k} {hash(str(k))}" * 20, "id": str(k)} for k in range(3000)]
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(data))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet", compression="none")
    seen: list[Event] = []
    options: dict[str, Any] = {"cluster": client, "listener": seen.append}
    tw.histogram(tmp_path, by="letter", device="cpu", **options)
    tw.signals(tmp_path, exclude="c.*", **options)
    told = [each.message for each in seen if isinstance(each, Caution)]
    lines_told = (
        f"{tmp_path}/a.jsonl.zst, {tmp_path}/b.jsonl.gz: JSON lines, counted with all that stands in them: name a field"
        " (--field) to count its texts; its first record has 'text', 'id'"
    )
    assert told.count(lines_told) == 2
    assert (
        f"{tmp_path}/c.parquet: like a Parquet file, counted as stored bytes: name a column (--field) to count its"
        " texts; it has 'text', 'id'"
    ) in told
    assert lines_told in tw.plan_histogram(tmp_path, by="letter", device="cpu", **options).notes
    (tmp_path / "a.jsonl.zst").write_bytes(b"no zstd")
    assert fields_offered(str(tmp_path / "a.jsonl.zst")) == ""
    assert fields_offered(str(tmp_path / "b.jsonl.gz")) == "; its first record has 'text', 'id'"
