"""Lines of JSON lines that cannot be read: left out and listed where that is asked for, and their file is not."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import dask
import pytest
from click.testing import CliRunner
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tests.pipeline.text.formats.test_bad_files import counted
from tests.pipeline.text.formats.test_layers import tarred
from tilewright.pipeline.errors import MalformedDocumentError
from tilewright.pipeline.text.formats import json_lines, sources
from tilewright.workflows.cli import cli

BAD = [
    b'{"text": "cut of',
    b"no JSON",
    b'{"text": 5}',
    b'{"text": "bad \\x escape"}',
    b'{"text": "behind"} it',
    b"[1, 2]",
    b'{"text" "no colon"}',
]


def line(text: str) -> bytes:
    return json.dumps({"id": f"i-{text}", "text": text, "more": "m" + text}).encode()


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.one_of(st.sampled_from(BAD), st.text(max_size=40).map(line), st.just(b"")), max_size=40),
    st.integers(16, 300),
    st.booleans(),
)
def test_good_lines_count_as_if_the_others_were_not_there(
    without_dask: Client,
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    window: int,
    ended: bool,
) -> None:
    good = [(i + 1, json.loads(each)) for i, each in enumerate(lines) if each and each not in BAD]
    folder = tmp_path_factory.mktemp("corpus")
    # One good line, without which the file were no JSON lines.
    good.insert(0, (0, json.loads(line("first"))))
    (folder / "a.jsonl").write_bytes(b"\n".join([line("first"), *lines]) + (b"\n" if ended else b""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "Window", lambda fill, nbytes: sources.Window(fill, window))
        found = counted(
            without_dask, folder, "byte", per_document=True, field=["text", "more"], id_field="id"
        )
    name = f"{folder}/a.jsonl"
    assert list(found.documents) == [
        f"{name}:{number + 1}:{field}" for number, _ in good for field in ("text", "more")
    ]
    assert list(found.ids or ()) == [each["id"] for _, each in good for _ in range(2)]
    texts = "".join(each[field] for _, each in good for field in ("text", "more")).encode(
        "utf-8", "surrogatepass"
    )
    assert Counter({byte: times for byte, times in enumerate(found.totals.tolist()) if times}) == Counter(
        texts
    )
    assert [each for each, _ in found.bad] == [
        f"{name}:{i + 2}" for i, each in enumerate(lines) if each in BAD
    ]
    assert all(why.startswith(f"{each}: ") for each, why in found.bad)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_without_a_word_the_first_ends_the_count(without_dask: Client, tmp_path: Path, suffix: str) -> None:
    data = line("a") + b"\n" + BAD[0] + b"\n"
    (tmp_path / f"a.jsonl{suffix}").write_bytes(gzip.compress(data) if suffix else data)
    with pytest.raises(
        MalformedDocumentError,
        match=r"a\.jsonl.*:2: no JSON: the line ends within its value.*\(--on-error report\)",
    ):
        counted(without_dask, tmp_path, "byte", on_error="stop", field="text")


def test_a_file_without_a_good_line_is_left_out_whole(without_dask: Client, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(line("a") + b"\n" + BAD[1])
    (tmp_path / "b.jsonl").write_bytes(b"plain text\n" * 3)
    (tmp_path / "c.tar").write_bytes(tarred([("x.jsonl", line("c") + b"\n" + BAD[0])]))
    found = counted(without_dask, tmp_path, "byte", field="text")
    assert found.document_count == 2
    assert [(name[len(str(tmp_path)) + 1 :], why[len(str(tmp_path)) + 1 :]) for name, why in found.bad] == [
        ("a.jsonl:2", "a.jsonl:2: no JSON: the line is no JSON object (column 1)"),
        (
            "b.jsonl",
            (
                "b.jsonl:1: the line is no JSON object, as each line is of what has such a name, where a field is asked"
                " for; 3 of its first 3 lines cannot be read; put one object on each line, leave the file out"
                " (--exclude, --on-error report), or name it otherwise if it is a plain text, which is a document as a"
                " whole"
            ),
        ),
        ("c.tar:x.jsonl:2", "c.tar:x.jsonl:2: no JSON: the line ends within its value (column 17)"),
    ]


def test_a_file_of_mostly_bad_lines_is_left_out_before_all_of_it_is_read(
    without_dask: Client, tmp_path: Path
) -> None:
    good, bad = line("g") + b"\n", b"log: no JSON\n"
    (tmp_path / "half.jsonl").write_bytes(good * 300 + bad * 299)
    (tmp_path / "log.jsonl").write_bytes(good * 50 + bad * 1000)
    found = counted(without_dask, tmp_path, "byte", field="text")
    assert found.document_count == 300
    *named, others, log = found.bad
    assert [name for name, _ in named] == [
        f"{tmp_path}/half.jsonl:{301 + i}" for i in range(sources.MOST_LISTED)
    ]
    assert others == (f"{tmp_path}/half.jsonl", f"{tmp_path}/half.jsonl: 199 lines more")
    assert log[0] == f"{tmp_path}/log.jsonl"
    assert f"{json_lines.MOST_BAD} of its first {json_lines.MOST_BAD + 50} lines" in log[1]


@pytest.mark.parametrize("per_document", [False, True])
@pytest.mark.parametrize("nbytes", [60, 2**25])
def test_a_state_keeps_what_was_counted_and_what_was_not(
    without_dask: Client, tmp_path: Path, per_document: bool, nbytes: int
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(4):
        rest = BAD[:i] if i < 3 else []
        (folder / f"{i}.jsonl").write_bytes(b"\n".join([line(f"t{i}"), *rest, line("end")]))
    options = {"per_document": per_document, "field": "text", "state": tmp_path / "s"}
    with dask.config.set({"tilewright.piece-nbytes": nbytes}):
        first = counted(without_dask, folder, "byte", **options)  # type: ignore[arg-type]
        read_again = counted(without_dask, folder, "byte", **options)  # type: ignore[arg-type]
        with pytest.raises(MalformedDocumentError, match=r"[12]\.jsonl:2: no JSON"):
            counted(without_dask, folder, "byte", on_error="stop", **options)  # type: ignore[arg-type]
        for i in (1, 2):
            (folder / f"{i}.jsonl").write_bytes(line(f"t{i}") + b"\n" + line("end"))
        mended = counted(without_dask, folder, "byte", **options)  # type: ignore[arg-type]
    assert [name[len(str(folder)) + 1 :] for name, _ in first.bad] == ["1.jsonl:2", "2.jsonl:2", "2.jsonl:3"]
    assert read_again.bad == first.bad
    assert (read_again.counts == first.counts).all()
    assert not mended.bad
    assert mended.document_count == first.document_count == 8
    assert (mended.totals == first.totals).all()


def test_duplicates_leave_them_out_too(tmp_path: Path) -> None:
    text = "one two three four five six seven"
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([line(text), BAD[0], line("other")]))
    (tmp_path / "b.jsonl").write_bytes(b"\n".join([BAD[2], BAD[1], line(text)]))
    found = tw.duplicates(tmp_path, field="text", on_error="report")
    assert found.dropped == (f"{tmp_path}/b.jsonl:3",)
    assert [Path(name).name for name, _ in found.bad] == ["a.jsonl:2", "b.jsonl:1", "b.jsonl:2"]


def test_signals_leave_them_out_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([line("one two"), BAD[0], line("three")]))
    found = tw.signals(tmp_path, field="text", on_error="report")
    assert found["word_count"].tolist() == [2, 1]
    assert [Path(name).name for name, _ in found.bad] == ["a.jsonl:2"]


def test_the_command_lists_them_and_exits_with_three(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([line("a"), BAD[0], line("b"), BAD[5]]))
    command = ["histogram", str(tmp_path), "--device", "cpu", "--field", "text", "--by", "letter"]
    result = CliRunner().invoke(cli, [*command, "--on-error", "report"])
    assert result.exit_code == 3
    left = [each for each in result.stderr.splitlines() if each.startswith("left out: ")]
    assert left == [
        f"left out: {tmp_path}/a.jsonl:2: no JSON: the line ends within its value (column 17)",
        f"left out: {tmp_path}/a.jsonl:4: no JSON: the line is no JSON object (column 1)",
    ]
