"""The signals of corpora are those of their documents, wherever a corpus is cut and whoever finds them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client

from tests.kernels.signals import naive_signals as naive
from tests.kernels.signals.test_signals import prose
from tests.pipeline.text.test_counting import cpu_workers
from tilewright.kernels.signals.definitions import COUNTS, NAMES
from tilewright.pipeline.errors import CorpusError
from tilewright.pipeline.events import Event, Notice
from tilewright.pipeline.signals.job import find_signals, note_on
from tilewright.pipeline.signals.options import options_of
from tilewright.pipeline.signals.result import Signals
from tilewright.pipeline.signals.tasks import TOO_LONG
from tilewright.pipeline.text.corpus import list_corpus
from tilewright.pipeline.text.formats.reading import reading_of


def find(client: Client, paths: list[Path], reading: dict[str, Any] | None = None, **given: Any) -> Signals:
    return find_signals(
        client,
        list_corpus(paths, reading=reading_of(**(reading or {}))),
        options_of(given.pop("stop_words", None)),
        cpu_workers(client),
        listener=given.pop("listener", lambda _: None),
        **given,
    )


def check(found: Signals, texts: list[bytes], lost: list[int] | None = None) -> None:
    assert len(found) == len(texts)
    expected = [
        naive.signals(text, lost=count) for text, count in zip(texts, lost or [0] * len(texts), strict=True)
    ]
    for name in NAMES:
        values = found[name].tolist()
        assert values == pytest.approx([each[name] for each in expected], rel=1e-12, abs=1e-12), name
    assert found.nbytes == sum(map(len, texts))


def same(one: Signals, other: Signals) -> bool:
    return one.to_json() | {"seconds": 0} == other.to_json() | {"seconds": 0}


TEXTS = [
    b"",
    b" \r\n\t\n",
    b"The quick fox, the slow fox... and the end\xe2\x80\xa6\n- with that\n- with that\n",
    b"caf\xe9 \xff\xfe #tag\n",
    "好好学习，天天向上。\n\n好好学习，天天向上。\r\n".encode(),
    prose(7, 400),
    prose(8, 60),
]


def test_signals_of_files_are_those_of_plain_python(client: Client, tmp_path: Path) -> None:
    for place, text in enumerate(TEXTS):
        (tmp_path / f"{place}.txt").write_bytes(text)
    found = find(client, [tmp_path])
    check(found, TEXTS)
    assert tuple(found.documents) == tuple(str(tmp_path / f"{place}.txt") for place in range(len(TEXTS)))
    assert found.ids is None
    assert found.options["stop_words"] == list(naive.STOP_WORDS)
    assert str(found.options["compressor"]).startswith("zlib ")


def shards(folder: Path, texts: list[str]) -> tuple[list[Path], list[str], list[str]]:
    """Two files of JSON lines; the texts in the corpus's order, and the ids."""
    lines = [json.dumps({"id": f"n{k}", "text": text}) + "\n" for k, text in enumerate(texts)]
    half = len(lines) // 2
    with gzip.open(folder / "a.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(lines[:half])
    (folder / "b.jsonl").write_text("".join(lines[half:]))
    return [folder / "a.jsonl.gz", folder / "b.jsonl"], texts, [f"n{k}" for k in range(len(texts))]


def test_records_keep_their_names_and_ids(client: Client, tmp_path: Path) -> None:
    texts = [text.decode(errors="replace") for text in TEXTS]
    paths, texts, ids = shards(tmp_path, texts)
    found = find(client, paths, {"field": "text", "id_field": "id"})
    check(found, [text.encode() for text in texts])
    assert found.ids is not None
    assert list(found.ids) == ids
    assert found.documents[0] == f"{paths[0]}:1"
    assert found.documents[-1] == f"{paths[1]}:{len(texts) - len(texts) // 2}"


@pytest.mark.parametrize("piece_nbytes", [1, 300, 2**25])
def test_signals_are_the_same_wherever_a_corpus_is_cut(
    client: Client, tmp_path: Path, piece_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilewright.pipeline.text.whole.documents.LEAST_PIECE_NBYTES", 1)
    texts = [text for k in range(5) for text in (*TEXTS, prose(k, 30))]
    for place, text in enumerate(texts):
        (tmp_path / f"{place:02}.txt").write_bytes(text)
    with dask.config.set({"tilewright.piece-nbytes": piece_nbytes}):
        check(find(client, [tmp_path]), texts)


def test_passages_are_documents_of_their_own(client: Client, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one the\r\n\r\n# two\nto be\n")
    check(find(client, [tmp_path], {"split_on": "paragraph"}), [b"one the", b"# two\nto be"])
    check(find(client, [tmp_path], {"split_on": "line"}), [b"one the", b"", b"# two", b"to be"])


def test_what_a_decoder_replaces_is_undecodable(client: Client, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n{"text": "a\ufffdb"}\n')
    found = find(client, [tmp_path], {"field": "text"})
    check(found, ["a\ufffdb".encode()] * 2, [1, 0])
    (tmp_path / "b.txt").write_bytes(b"ab\x81\x8d")
    found = find(client, [tmp_path / "b.txt"], {"encoding": "cp1252"})
    check(found, ["ab\ufffd\ufffd".encode()], [2])


def test_a_document_that_is_too_long_has_its_length_alone(client: Client, tmp_path: Path) -> None:
    told: list[Event] = []
    texts = [b"a short one", b"long " * 100, b"", b"the last"]
    for place, text in enumerate(texts):
        (tmp_path / f"{place}.txt").write_bytes(text)
    found = find(client, [tmp_path], most_nbytes=100, listener=told.append)
    assert Notice(f"{tmp_path / '1.txt'}: {TOO_LONG}") not in told  # a block holds it
    assert found["word_count"].tolist() == [3, 100, 0, 2]
    (tmp_path / "1.txt").write_bytes(b"long " * 2**20)
    found = find(client, [tmp_path], most_nbytes=100, listener=told.append)
    assert Notice(f"{tmp_path / '1.txt'}: {TOO_LONG}") in told
    assert found["byte_count"].tolist() == [11, 5 * 2**20, 0, 8]
    for name in NAMES[1:]:
        value = found[name][1]
        assert value == -1 if name in COUNTS else np.isnan(value), name
    assert found["word_count"].tolist() == [3, -1, 0, 2]
    stored = found.to_json()["signals"]
    assert isinstance(stored, dict)
    assert stored["word_count"] == [3, None, 0, 2]
    assert stored["char_entropy"][1] is None
    assert "nan" not in str(found)


def test_bad_files_end_it_or_are_left_out(client: Client, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good")
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"bad")[:-4])
    (tmp_path / "c.txt").write_bytes(b"good too")
    with pytest.raises(CorpusError, match=r"b\.gz"):
        find(client, [tmp_path])
    found = find(client, [tmp_path], on_error="report")
    check(found, [b"good", b"good too"])
    assert [name for name, _ in found.bad] == [str(tmp_path / "b.gz")]


def test_workers_whose_compressors_differ_are_told_of() -> None:
    assert note_on([]) is None
    assert note_on(["zlib 1.3, level 1"]) is None
    note = note_on(["zlib 1.2.13, level 1", "zlib 1.3, level 1"])
    assert note is not None
    assert note.startswith("compression_ratio is by zlib 1.2.13, level 1 and zlib 1.3, level 1: ")
