"""A field of JSON lines that a GPU counts, whole path, equals what the cores count, errors and notices included."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tests.kernels.records.test_device_json import line_of
from tilewright.kernels.histograms.tokens import KINDS
from tilewright.pipeline.events import Notice

pytestmark = pytest.mark.gpu


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is counted by chunks, which are small."""
    from tilewright.pipeline.text.gpu import fields, room

    seen: list[Any] = []

    def seeing(count: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            seen.append(count(*given))
            return seen[-1]

        return counted

    for name in ("count_fields", "count_field_words"):
        monkeypatch.setattr(fields, name, seeing(getattr(fields, name)))
    monkeypatch.setattr(room, "CHUNK_NBYTES", 300_000)
    monkeypatch.setattr(room, "LEAST_NBYTES", 1)
    return seen


def corpus(folder: Path, seed: int, bad: float = 0.0) -> Path:
    rng = random.Random(seed)
    folder.mkdir()
    for number, lines in enumerate((1, 12_000, 300, 5_000)):
        ends = rng.choice((b"\n", b"\r\n"))
        data = ends.join(line_of(rng, "text", bad) for _ in range(lines))
        mark = b"\xef\xbb\xbf" if number % 2 else b""
        (folder / f"{number}.jsonl").write_bytes(mark + b'{"text": "first"}\n' + data + ends * (number % 3))
    return folder


def notices(path: Path, device: str, **options: Any) -> tuple[Any, list[str]]:
    told: list[str] = []

    def listener(event: Any) -> None:
        if isinstance(event, Notice):
            told.append(event.message)

    found = tw.histogram(path, device=device, field="text", listener=listener, **options)
    return found, [text for text in told if "text" in text or "record" in text]


@pytest.mark.parametrize("by", [*KINDS, "word"])
def test_good_lines_are_counted_as_by_the_cores(by: str, tmp_path: Path, taken: list[Any]) -> None:
    folder = corpus(tmp_path / "texts", len(by))
    # No GPU decides keys with escapes, of which there are too many here for one by one.
    for path in folder.iterdir():
        good = [line for line in path.read_bytes().split(b"\n") if is_good(line)]
        path.write_bytes(b"\n".join(good) + b"\n" * (len(good) % 2))
    found, told = notices(folder, "cuda", by=by)
    wanted, also_told = notices(folder, "cpu", by=by)
    assert taken
    assert all(each is not None for each in taken)
    np.testing.assert_array_equal(found.counts, wanted.counts)
    if by == "word":
        assert list(found.tokens) == list(wanted.tokens)
        assert found.undecodable == wanted.undecodable
    for name in ("nbytes", "skipped", "document_count", "documents"):
        assert getattr(found, name) == getattr(wanted, name), name
    # Which file is named first is a matter of which piece arrives first.
    told, also_told = (sorted(text.partition(": ")[2] for text in each) for each in (told, also_told))
    assert [text for text in told if "cores" not in text] == also_told


def is_good(line: bytes) -> bool:
    try:
        record = json.loads(line.decode("utf-8-sig", "replace") or "{}")
    except ValueError:
        return False
    return record.get("text") is None or isinstance(record["text"], str)


@pytest.mark.parametrize("by", ["byte", "word"])
def test_a_notice_says_what_is_left_to_the_cores_as_a_whole(
    by: str, tmp_path: Path, taken: list[Any]
) -> None:
    """Once, whatever pieces files are in."""
    from tilewright.pipeline.text.gpu.fields import UNUSUAL, left_to_cores

    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(2):
        (folder / f"{number}.jsonl").write_bytes(b'{"te\\u0078t": "a"}\n' * 10_000)
    found, told = notices(folder, "cuda", by=by)
    wanted, also_told = notices(folder, "cpu", by=by)
    assert taken
    assert all(each is None for each in taken)
    np.testing.assert_array_equal(found.counts, wanted.counts)
    (notice,) = (text for text in told if "left to the cores" in text)
    assert notice.endswith(left_to_cores(UNUSUAL))
    assert ".jsonl" in notice
    assert [text for text in told if "cores" not in text] == also_told


@pytest.mark.parametrize("seed", range(3))
def test_lines_with_faults_are_left_out_as_by_the_cores(seed: int, tmp_path: Path, taken: list[Any]) -> None:
    folder = corpus(tmp_path / "texts", seed, bad=0.001)
    found = tw.histogram(folder, device="cuda", field="text", by="bigram", on_error="report")
    wanted = tw.histogram(folder, device="cpu", field="text", by="bigram", on_error="report")
    assert taken
    np.testing.assert_array_equal(found.counts, wanted.counts)
    assert found.bad == wanted.bad
    assert found.document_count == wanted.document_count


@pytest.mark.parametrize(
    "line", [b'{"text": 1}', b'{"text": "a', b'{"text": "\\x"}', b"[]", b'{"text": "a"} b', b"\xff\xfe{"]
)
def test_errors_are_those_of_the_cores(line: bytes, tmp_path: Path, taken: list[Any]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' * 50_000 + line + b'\n{"text": "behind"}')
    with pytest.raises(tw.TilewrightError) as found:
        tw.histogram(path, device="cuda", field="text")
    with pytest.raises(tw.TilewrightError) as wanted:
        tw.histogram(path, device="cpu", field="text")
    assert str(found.value) == str(wanted.value)
    assert "a.jsonl:50001" in str(found.value)
    assert taken[0] is None
    (tmp_path / "b.jsonl").write_bytes(b'{"other": 1}\n' * 50_000)
    with pytest.raises(
        tw.TilewrightError, match="none of its 50000 records has a field 'text'; its first has 'other'"
    ):
        tw.histogram(tmp_path / "b.jsonl", device="cuda", field="text")
