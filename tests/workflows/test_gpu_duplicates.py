"""Duplicates found by the workers of a GPU, whole path, equal those that cores find, signatures included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import tilewright as tw
from tests.pipeline.duplicates.test_job import same

pytestmark = pytest.mark.gpu


def corpus(folder: Path, rng: np.random.Generator) -> Path:
    """Lines, some of them twice and some nearly; files of one document; compressed ones; and what is no UTF-8."""
    folder.mkdir()
    words = [f"Wörd{number:x}" for number in range(5_000)] + ["the", "of", "漢字", "e\u0301t", "हिन्दी"]
    lines = []
    for _ in range(3_000):
        lines.append([words[k] for k in rng.integers(0, len(words), int(rng.integers(1, 300))).tolist()])
    for line in lines[:200]:
        lines.append([*line[:-1], "other"])
    texts = [" ".join(line) for line in lines]
    (folder / "a.txt").write_text("\n".join(texts))
    (folder / "b.jsonl.zst").write_bytes(
        zstandard.compress("".join(json.dumps({"text": text}) + "\n" for text in texts[:1000]).encode())
    )
    (folder / "long.txt").write_text(" ".join(texts * 3))  # more than a block
    noise = bytes.fromhex("0a0d20417f808f909fa0bfc0c1c2dfe0e1ecedeeeff0f1f3f4f5ff")
    (folder / "noise.bin").write_bytes(bytes(rng.choice(np.frombuffer(noise, np.uint8), 300_000)))
    for number in range(50):
        (folder / f"small-{number}.txt").write_text(texts[number])
    return folder


@pytest.mark.parametrize("shingle", ["word", "character"])
def test_lines_of_large_files_are_signed_as_they_lie_there(
    shingle: str, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several chunks at a time, and files that are cut behind lines."""
    from tilewright.pipeline.duplicates import lines_on_gpu
    from tilewright.pipeline.text.gpu import chunks

    words = np.array([f"wörd{number:x}".encode() for number in range(5_000)])
    ends, taken = (b"\n", b"\r\n", b"\n\n"), []
    for number in range(3):
        lines = [b" ".join(rng.choice(words, n)) + ends[n % 3] for n in rng.integers(1, 300, 3_000).tolist()]
        (tmp_path / f"{number}.txt").write_bytes(b"".join(lines) + b"the last one\r"[: 6 * number])
    sign = lines_on_gpu.sign_lines

    def sign_lines(*given: Any, **named: Any) -> Any:
        found = sign(*given, **named)
        taken.append(found)
        return found

    monkeypatch.setattr(lines_on_gpu, "sign_lines", sign_lines)
    monkeypatch.setattr(chunks, "CHUNK_NBYTES", 300_000)
    options: dict[str, Any] = {"split_on": "line", "shingle": shingle, "ngram": 3, "signatures": True}
    found = tw.duplicates(tmp_path, device="cuda", **options)
    wanted = tw.duplicates(tmp_path, device="cpu", **options)
    assert taken
    assert all(each is not None for each in taken)
    assert same(found, wanted)
    np.testing.assert_array_equal(found.signatures, wanted.signatures)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"split_on": "line", "hash": "xxh32"},
        {"split_on": "line", "shingle": "character", "casefold": True, "scheme": "legacy"},
        {"field": "text", "casefold": True, "normalise": "NFC", "ngram": 2},
    ],
)
def test_duplicates_are_those_of_the_cores(
    options: dict[str, Any], tmp_path: Path, rng: np.random.Generator
) -> None:
    folder = corpus(tmp_path / "texts", rng)
    found = tw.duplicates(folder, device="cuda", signatures=True, **options)
    wanted = tw.duplicates(folder, device="cpu", signatures=True, **options)
    assert same(found, wanted)
    assert len(found.documents) > 50
    np.testing.assert_array_equal(found.signatures, wanted.signatures)
