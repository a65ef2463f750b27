"""What lacks a field, or an identifier, is refused where all of a file does, and else told with how many do."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from distributed import Client

import tilewright as tw
from tilewright.pipeline.errors import MalformedDocumentError, OptionError
from tilewright.pipeline.events import Event, Notice

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
    said = r"a\.jsonl: none of its 2 records has a field 'Id', .* \(id_field\); its first has 'id', 'text'; name one"
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


def test_a_text_in_an_archive_beside_a_field(client: Client, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        member = tarfile.TarInfo("b.txt")
        member.size = 5
        archive.addfile(member, io.BytesIO(b"plain"))
    with pytest.raises(
        MalformedDocumentError, match=r"b\.txt:1: .*by itself, without a field, and merge both counts"
    ):
        counted(client, tmp_path, field="text")
