"""Strings of JSON lines, which are looked through 64 bytes at a time: whatever their length, and wherever in it
something stands that does not stand for itself, they are what Python's reader makes of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tilewright.kernels.records import json_lines

LANES = 64
MARK = 0xA5
"""What memory holds that is not written."""


def read(
    line: bytes, keys: list[str], room: int, behind: int = 0
) -> tuple[np.ndarray, int, list[bytes], int]:
    """What the loop writes of one line that has ``behind`` bytes behind it in memory, with ``room`` for the texts: the
    memory that it wrote to and what is behind that, how it ended, the texts, and how many characters were lost."""
    data = np.frombuffer(line + b'"' * behind, np.uint8)
    memory = np.full(room + LANES, MARK, np.uint8)
    fields = len(keys)
    packed, edges = json_lines.packed_keys(keys)
    ends, numbers, lost, id_ends = (np.zeros(fields, np.int64) for _ in range(4))
    state = np.zeros(json_lines.STATE_LENGTH, np.int64)
    json_lines.texts_of_lines(
        data, 0, len(line), True, packed, edges, fields, memory[:room], 0, 0, fields, ends, numbers, lost,
        np.empty(0, np.uint8), id_ends, np.empty((fields, json_lines.SPAN_NBYTES // 8), np.int64),
        np.empty(json_lines.DEEPEST, np.uint8), np.empty(1000, np.uint8), np.zeros((fields, 2), np.int64), state,
    )  # fmt: skip
    texts, begin = [], 0
    for end in ends[: state[json_lines.DOCUMENTS]].tolist():
        texts.append(memory[begin:end].tobytes())
        begin = end
    return memory[room:], int(state[json_lines.CODE]), texts, int(lost.sum())


@pytest.mark.parametrize(
    "piece", ["", '\\"', "\\\\", "\\n", "\\u00e4", "\\ud83d\\ude00", "ä", "\\\\\\\\\\n\\t"]
)
@pytest.mark.parametrize("behind", [0, 3 * LANES])
def test_strings_of_all_lengths(piece: str, behind: int) -> None:
    for length in (*range(2 * LANES + 3), 5 * LANES - 1):
        for place in range(0, length + 1, 1 if length < LANES + 3 else 17):
            text = "x" * place + piece + "y" * (length - place)
            line = f'{{"other": "{text}", "text": "{text}", "n": [1]}}'.encode()
            wanted = json.loads(line)["text"].encode()
            for keys in (["text"], ["text", "other"]):
                beyond, code, texts, lost = read(line, keys, len(line), behind)
                assert (code, texts, lost) == (json_lines.FINE, [wanted] * len(keys), 0), line
                assert (beyond == MARK).all()


@pytest.mark.parametrize(
    ("piece", "code"),
    [
        ("\\x", json_lines.NO_ESCAPE),
        ("\\u12g4", json_lines.NO_ESCAPE),
        ("\t", json_lines.CONTROL),
        ('"', json_lines.NO_COMMA),
        ("\\", None),  # it takes the quotation mark with it, or what is next
    ],
)
def test_faults_at_all_places(piece: str, code: int | None) -> None:
    for length in range(2 * LANES + 3):
        for place in range(0, length, 5):
            text = "x" * place + piece + "y" * (length - place)
            line = f'{{"text": "{text}"}}'.encode()
            with pytest.raises(json.JSONDecodeError):
                json.loads(line)
            for behind in (0, LANES):
                _, found, texts, _ = read(line, ["text"], len(line), behind)
                assert found in ((json_lines.NO_ESCAPE, json_lines.UNENDED) if code is None else (code,))
                assert texts == []


def test_halves_of_pairs_are_lost_wherever_they_stand() -> None:
    for place in range(2 * LANES):
        line = ('{"text": "' + "x" * place + '\\ud83dy\\ud83d\\u0041\\ude00"}').encode()
        _, code, texts, lost = read(line, ["text"], len(line), LANES)
        assert code == json_lines.FINE
        assert texts == [b"x" * place + "\ufffdy\ufffdA\ufffd".encode()]
        assert lost == 3


@pytest.mark.parametrize("last", ['"b\\n"', "null"])
def test_of_a_key_that_stands_twice_the_last_value_counts(last: str) -> None:
    line = f'{{"text": "{"a" * 200}", "text": {last}}}'.encode()
    _, code, texts, _ = read(line, ["text"], len(line))
    assert code == json_lines.FINE
    assert texts == [(json.loads(last) or "").encode()]
