"""Texts that a GPU finds in JSON lines equal those of the loop on the cores, and what it leaves to that loop is what it
may leave: in the simulator, on a GPU, and as machine code where there is neither."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.kernels.gemm.machine_code import assemble, assert_no_spills
from tilewright.kernels.gpu.compiled import compiling_for
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.records import json_lines

pytest_device = pytest.mark.parametrize(
    "device",
    [pytest.param("simulator", marks=pytest.mark.simulator), pytest.param("gpu", marks=pytest.mark.gpu)],
)
MOST_LINES = 2**20


class Read(NamedTuple):
    """What the loop on the cores makes of a line."""

    code: int
    record: bool
    text: bytes | None
    """None where there is none."""
    lost: int
    without: int
    null: int


def by_loop(line: bytes, field: str) -> Read:
    data = np.frombuffer(line, np.uint8)
    packed, edges = json_lines.packed_keys([field])
    memory = np.empty(len(line) + 64, np.uint8)
    ends, numbers, lost, id_ends = (np.zeros(1, np.int64) for _ in range(4))
    without, state = np.zeros((1, 2), np.int64), np.zeros(json_lines.STATE_LENGTH, np.int64)
    json_lines.texts_of_lines(
        data, 0, len(line), True, packed, edges, 1, memory, 0, 0, 1, ends, numbers, lost,
        np.empty(0, np.uint8), id_ends, np.empty((1, json_lines.SPAN_NBYTES // 8), np.int64),
        np.empty(json_lines.DEEPEST, np.uint8), np.empty(1000, np.uint8), without, state,
    )  # fmt: skip
    record = bool(state[json_lines.RECORDS])
    lacks = bool(without.any())
    text = memory[: ends[0]].tobytes() if record and not lacks else None
    return Read(int(state[json_lines.CODE]), record, text, int(lost[0]), *without[0].tolist())


def by_device(
    spans: Sequence[bytes], field: str, *, pairs: bool = True, most_lines: int = MOST_LINES
) -> tuple[Any, np.ndarray]:
    """What `TextFinder` finds of spans, and the bytes in use of the memory that it wrote to."""
    from numba import cuda

    from tilewright.kernels.records.device_json import ALIGNMENT, LEAD, SLACK, TextFinder

    data, places = b"", []
    for span in spans:
        data += b'"' * (-len(data) % ALIGNMENT)  # what stands between spans is of neither
        places.append((len(data), len(span)))
        data += span
    text = cuda.to_device(np.frombuffer(data + b'\\"{' * SLACK, np.uint8))
    out = cuda.to_device(np.full(LEAD + len(data), 0xA5, np.uint8))
    found = TextFinder(field).find(text, places, out, most_lines, pairs=pairs)
    return found, out.copy_to_host()[: found.filled]


def assert_as_by_loop(spans: Sequence[Sequence[bytes]], field: str, newline_at_end: bool = True) -> int:
    """Compare what becomes of lines; returns how many are left to the loop though it finds no fault in them."""
    from tilewright.kernels.records import device_json
    from tilewright.kernels.records.device_json import LEAD
    from tilewright.kernels.records.span_numbers import MOST_UNDECIDED

    ended = [b"\n".join(lines) + (b"\n" if newline_at_end and lines else b"") for lines in spans]
    told, out = by_device(ended, field)
    texts: list[bytes] = []
    left = 0
    for place, (lines, data) in enumerate(zip(spans, ended, strict=True)):
        listed = {(int(a), int(b)) for a, b in told.undecided[place]}
        count = int(told.rows[place, device_json.UNDECIDED])
        assert len(listed) == min(count, MOST_UNDECIDED)
        reads = [by_loop(line, field) for line in lines]
        begin, decided = 0, []
        for line, read in zip(lines, reads, strict=True):
            span = (begin, begin + len(line))
            begin = span[1] + 1
            if span in listed:
                assert read.record or read.code, (line, "a blank line is none that is left to the loop")
                left += read.code == json_lines.FINE
                assert read.code != json_lines.FINE or may_be_left(line), line
            else:
                assert count > len(listed) or read.code == json_lines.FINE, line
                decided.append(read)
        if count > len(listed):
            continue
        assert data[-1:] in (b"\n", b"") or not newline_at_end
        row = told.rows[place]
        assert row[device_json.RECORDS] == sum(read.record for read in decided)
        assert row[device_json.LOST] == sum(read.lost for read in decided)
        assert row[device_json.WITHOUT] == sum(read.without for read in decided)
        assert row[device_json.NULL] == sum(read.null for read in decided)
        mine = [read.text for read in decided if read.text is not None]
        assert row[device_json.DECODED] == sum(map(len, mine))
        texts += mine
    if all(row[device_json.UNDECIDED] <= MOST_UNDECIDED for row in told.rows):
        assert (out[:LEAD] == 0).all()
        assert out[-1] == 0
        whole = out.tobytes()
        assert int((out == 0).sum()) == told.filled - sum(len(text) - text.count(0) for text in texts)
        wanted = Counter(part for text in texts for part in text.split(b"\0") if part)
        assert Counter(part for part in whole.split(b"\0") if part) == wanted
        for place, ends in enumerate(told.ends):
            assert ends.tolist() == [
                sum(text[-place] == byte for text in texts if text) for byte in range(256)
            ]
    return left


def may_be_left(line: bytes) -> bool:
    """Whether a good line has a key with an escape at the top, or is nested more deeply than the kernel follows."""
    from tilewright.kernels.records.device_json import DEEPEST

    depth = deepest = 0
    place, escaped = 0, False
    while place < len(line):
        byte = line[place : place + 1]
        if byte in b"{[":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
        elif byte == b'"':
            begin = place = place + 1
            while line[place : place + 1] != b'"':
                place += 1 + (line[place : place + 1] == b"\\")
            is_key = line[place + 1 :].lstrip(b" \t\r").startswith(b":")
            escaped = escaped or (is_key and depth == 1 and b"\\" in line[begin:place])
        place += 1
    return escaped or deepest > DEEPEST


PIECES = (
    *("a", "text", "x" * 7, "y" * 40, "ä", "漢字", "😀", "\\n", "\\t", "\\r", "\\b", "\\f", "\\/", "\\\\", '\\"', " "),
    *("\\u0041", "\\u00e4", "\\u00E4", "\\u6f22", "\\ud83d\\ude00", "\\uD83D\\uDE00", "\\u0000", "\\u007f", "\\u0080"),
    *("\\u07ff", "\\u0800", "\\uffff", "\\ud83d", "\\ude00", "\\ud83d\\ud83d\\ude00"),
    *("\\ud83d\\n", "\\ude00\\ude00", "\\ud83d\\u0041", "{", "}", "[", ":"),
    *("\\u2028", ","),
)  # fmt: skip
RAW = (b"\xff", b"\xe4\xbd", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\x80")
BAD_PIECES = ("\\x", "\\u12g4", "\\u12", "\\", "\x1f", "\x00", '"', "\\U0041")
SCALARS = (
    *("0", "-0", "12", "-3.25", "1e5", "1E+5", "2.5e-3", "true", "false", "null", "NaN", "Infinity", "-Infinity"),
)  # fmt: skip
BAD_SCALARS = (
    "01",
    "-",
    "1.",
    ".5",
    "1e",
    "+1",
    "tru",
    "nulL",
    "nan",
    "Infinit",
    "-Infinit",
    "'a'",
    "",
    "\x80",
)


def text_of(rng: random.Random, bad: float = 0.0) -> str:
    parts = [rng.choice(PIECES) for _ in range(rng.choice((0, 1, 2, 3, 5, 12)))]
    if rng.random() < bad:
        parts.insert(rng.randint(0, len(parts)), rng.choice(BAD_PIECES))
    return '"' + "".join(parts) + '"'


def blanks(rng: random.Random) -> str:
    return rng.choice(("", "", "", " ", "\t", "\r", "  "))


def value_of(rng: random.Random, field: str, depth: int, bad: float) -> str:
    kind = rng.random()
    if kind < 0.45 or depth > 4:
        return text_of(rng, bad)
    if kind < 0.75:
        return rng.choice(BAD_SCALARS) if rng.random() < bad else rng.choice(SCALARS)
    items = range(rng.randint(0, 3))
    between = f"{blanks(rng)},{blanks(rng)}" if rng.random() >= bad else rng.choice((",,", " ", ";"))
    if kind < 0.87:
        inside = between.join(value_of(rng, field, depth + 1, bad) for _ in items)
        return f"[{blanks(rng)}{inside}{blanks(rng)}]"
    return object_of(rng, field, depth + 1, bad, {field: value_of} if rng.random() < 0.5 else {})


def object_of(
    rng: random.Random, field: str, depth: int, bad: float, wanted: dict[str, Any] | None = None
) -> str:
    keys = [rng.choice((text_of(rng, bad), f'"{field}x"', f'"{field[1:]}"', '"id"')) for _ in range(3)]
    keys = keys[: rng.randint(0, 3)]
    members = [f"{key}{blanks(rng)}:{blanks(rng)}{value_of(rng, field, depth, bad)}" for key in keys]
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2)) if wanted is None else len(wanted)):
        key = f'"{field}"' if rng.random() < 0.95 else f'"\\u{ord(field[0]):04x}{field[1:]}"'
        value = text_of(rng, bad) if rng.random() < 0.85 else rng.choice(("null", "1", "{}", "[[]]"))
        members.insert(rng.randint(0, len(members)), f"{key}:{blanks(rng)}{value}")
    return "{" + blanks(rng) + f"{blanks(rng)},{blanks(rng)}".join(members) + blanks(rng) + "}"


def line_of(rng: random.Random, field: str, bad: float) -> bytes:
    if rng.random() < 0.05:
        return blanks(rng).encode()
    line = (blanks(rng) + object_of(rng, field, 1, bad) + blanks(rng)).encode()
    if rng.random() < 0.05:
        line = line.replace(b"x", rng.choice(RAW), 1)
    if rng.random() < bad:
        place = rng.randint(0, len(line))
        line = (
            line[:place]
            + rng.choice((b"", b"}", b"{", b"]", b",", b":", b'"', b"\\", b"\xc3"))
            + line[place + 1 :]
        )
    return line.replace(b"\n", b" ")


def test_lines_for_the_comparison_are_of_all_kinds() -> None:
    rng = random.Random(35)
    reads = [by_loop(line_of(rng, "text", 0.1), "text") for _ in range(4000)]
    codes = Counter(read.code for read in reads)
    assert set(codes) >= {json_lines.FINE, *json_lines.FAULTS} - {json_lines.TOO_DEEP, json_lines.ENCODED}
    assert codes[json_lines.FINE] > 1000
    for has in (lambda r: r.lost, lambda r: r.without, lambda r: r.null, lambda r: not (r.record or r.code)):
        assert sum(bool(has(read)) for read in reads) > 10


@pytest_device
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bad", [0.0, 0.1])
def test_random_lines(device: str, seed: int, bad: float) -> None:
    rng = random.Random(f"{seed} {bad}")
    field = rng.choice(("text", "t", "ä", "a longer name of a field, of more bytes than a warp has lanes"))
    count, most = (3, 12) if device == "simulator" else (6, 3_000)
    spans = [[line_of(rng, field, bad) for _ in range(rng.choice((1, most)))] for _ in range(count)]
    assert_as_by_loop([*spans, []], field, newline_at_end=rng.random() < 0.5)


@pytest_device
def test_strings_of_all_lengths_and_places(device: str) -> None:
    """What does not stand for itself, at every place of what a warp looks at together."""
    lengths = range(4, 20, 5) if device == "simulator" else (*range(140), *range(250, 262))
    for piece in ("", '\\"', "\\\\", "\\n", "\\u00e4", "\\ud83d\\ude00", "\\ud83d", "ä", "\\x", "\x01"):
        lines = []
        for length in lengths:
            for place in range(0, length + 1, 7 if device == "simulator" else 13):
                text = "x" * place + piece + "y" * (length - place)
                lines.append(f'{{"o": "{text}", "text": "{text}"}}'.encode())
        if device == "simulator":
            lines = lines[::2]
        assert_as_by_loop([lines], "text")


@pytest_device
@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "a", "text": "b"}', b'{"text": "a", "text": null}', b'{"text": {"text": "a"}}',
        b'{"text": {"text": "a"}, "text": "b"}', b'{"a": {"text": "a"}}', b'{"a": [{"text": "a"}], "text": "b"}',
        b'["text", "a"]', b'{"text"}', b'{"text" "a"}', b'{"text": "a",}', b'{"text": "a"} x', b'{"text": "a"}}',
        b'{"text": "a"', b'{"text": "a', b'{"text": "a\\', b'{"text": "a\\u00', b"{}", b"[]", b"1", b'"text"', b"",
        b"\xef\xbb\xbf{}", b"\xff\xfe", b'{"text": ""}', b'{"text": [1, 2}', b'{"text": "a" "b"}', b"{,}", b"{1: 2}",
        b'{"te\\u0078t": "a"}', b'{"\\n": 1, "text": "a"}', b'{"a": {"\\n": 1}, "text": "a"}',
        b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}", b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}",
        b'{"a": ' + b'{"a": ' * 62 + b"1" + b"}" * 62 + b', "text": "a"}',
    ],
)  # fmt: skip
def test_single_lines(device: str, line: bytes) -> None:
    assert_as_by_loop([[line]], "text", newline_at_end=False)
    assert_as_by_loop([[b'{"text": "before"}\r', line, b"", b'{"text": "behind"}']], "text")


@pytest_device
@pytest.mark.parametrize("piece", PIECES)
def test_each_escape_twice(device: str, piece: str) -> None:
    assert_as_by_loop([[f'{{"text": "{piece}{piece}", "{piece}": 1}}'.encode()]], "text")
    assert_as_by_loop([[f'{{"text": "{piece * 40}"}}'.encode()]], "text")


@pytest_device
def test_few_good_lines_are_left_to_the_loop(device: str) -> None:
    assert assert_as_by_loop([[b'{"te\\u0078t": "a"}', b'{"text": "b"}']], "text") == 1
    deep = b'{"text": "a", "a": ' + b"[" * 64 + b"]" * 64 + b"}"
    assert assert_as_by_loop([[deep]], "text") == 1
    assert assert_as_by_loop([[deep.replace(b"[]", b"")]], "text") == 0


@pytest_device
def test_more_lines_left_than_are_listed_are_counted(device: str) -> None:
    from tilewright.kernels.records.device_json import RECORDS, UNDECIDED
    from tilewright.kernels.records.span_numbers import MOST_UNDECIDED

    lines = MOST_UNDECIDED + 3
    found, _ = by_device([b"{}\n" + b"[]\n" * lines, b"[]\n{}\n"], "text")
    assert (found.rows[0, UNDECIDED], len(found.undecided[0])) == (lines, MOST_UNDECIDED)
    assert found.rows[0, RECORDS] == 1
    assert found.undecided[1].tolist() == [[0, 2]]


@pytest_device
def test_too_many_lines(device: str) -> None:
    from tilewright.kernels.records.device_json import RECORDS, TooManyLinesError

    spans = [b"{}\n{}\n", b"{}\n{}\n{}\n"]
    with pytest.raises(TooManyLinesError) as raised:
        by_device(spans, "text", most_lines=2)
    assert raised.value.args == (1,)
    found, _ = by_device(spans, "text", most_lines=3)
    assert found.rows[:, RECORDS].tolist() == [2, 3]


@pytest_device
def test_ends_are_counted_only_where_pairs_are(device: str) -> None:
    found, _ = by_device([b'{"text": "abc"}\n'], "text", pairs=False)
    assert not found.ends.any()


@pytest.mark.gpu
def test_long_lines_and_many_escapes() -> None:
    rng = random.Random(7)
    texts = ["".join(rng.choice(PIECES) for _ in range(200_000)) for _ in range(3)]
    lines = [f'{{"id": "{number}", "text": "{text}"}}'.encode() for number, text in enumerate(texts)]
    lines += [json.dumps({"text": "漢字" * 100_000}).encode()]
    assert assert_as_by_loop([lines], "text") == 0


@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
def test_becomes_machine_code(tmp_path: Path) -> None:
    from numba import cuda

    from tilewright.kernels.records.device_json import variants

    for variant in variants():
        with compiling_for((9, 0)):
            text, _ = cuda.compile_ptx(variant.function, variant.signature, cc=(9, 0))
        report = assemble(text, "sm_90", tmp_path)
        assert_no_spills(report)
        assert " 0 bytes stack frame" in report
        assert ".f64" not in text, "words and numbers with a sign become floats together"
