"""Records that a loop reads are those that are taken apart one by one, however the file is cut, whole or damaged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.sampling import examples
from tilewright.kernels.records import warc as loop
from tilewright.pipeline.text.formats import warc
from tilewright.pipeline.text.formats.sources import ContentError, Found, Remark

Answer = tuple[list[tuple[int, str | None, bytes]], dict[str, Remark], str]
"""Numbers, identifiers and texts; what is told; and what is wrong."""


def filling(data: bytes, step: int) -> Callable[[np.ndarray], int]:
    """A file that gives so many bytes at a time, at most."""
    at = 0

    def fill(target: np.ndarray) -> int:
        nonlocal at
        part = np.frombuffer(data[at : at + min(step, len(target))], np.uint8)
        target[: len(part)] = part
        at += len(part)
        return len(part)

    return fill


def one_by_one(data: bytes, id_field: str | None) -> Answer:
    found, texts = Found(True), []
    try:
        for number, identifier, fill in warc.records(filling(data, 1000), found, "x", id_field):
            text, memory = b"", np.empty(7, np.uint8)
            while got := fill(memory):
                text += memory[:got].tobytes()
            texts.append((number, identifier, text))
    except ContentError as error:
        return texts, found.remarks, f"{error.where}: {error.what}; {error.remedy}"
    return texts, found.remarks, ""


def by_the_loop(
    data: bytes, id_field: str | None, *, step: int, buffer: int, room: int, gap: int, most: int
) -> Answer:
    found = Found(True)
    source = warc.Records(filling(data, step), found, "x", id_field, buffer)
    texts, text, wrong = [], b"", ""
    try:
        while True:
            target = np.full(room + gap, 0xEE, np.uint8)
            filled, ends = source.fill(target, gap, most)
            if not filled and not len(ends):
                break
            assert len(ends) <= most
            start = 0
            for end in ends.tolist():
                assert not target[end - gap : end].any()
                texts.append(text + target[start : end - gap].tobytes())
                text, start = b"", end
            text += target[start:filled].tobytes()
            assert (target[filled:] == 0xEE).all()
    except ContentError as error:
        wrong = f"{error.where}: {error.what}; {error.remedy}"
    numbers: list[int] = []
    ids: list[str | None] = []
    for row in found.rows:
        assert row.numbers is not None
        numbers += row.numbers.tolist()
        assert (row.ids is None) == (id_field is None)
        ids += row.ids if row.ids is not None else [None] * len(row.numbers)
    assert found.documents == len(texts)
    return list(zip(numbers, ids, texts, strict=True)), found.remarks, wrong


ENDS = st.sampled_from([b"\r\n", b"\n"])
NAMES = [
    "WARC-Type",
    "warc-type",
    "Content-Length",
    "CONTENT-LENGTH",
    "Content-Type",
    "X-Id",
    " x-id\t",
    "Other",
]
VALUES = ["response", " Conversion ", "resource", "warcinfo", "7", "3 ", "application/http; a=b"]
VALUES += ["Appli cation/HTTP", "text/plain", "<urn:1>", "", "é", "a: b"]
lines = st.builds(
    lambda name, value, end: f"{name}:{value}".encode() + end,
    st.sampled_from(NAMES),
    st.sampled_from(VALUES),
    ENDS,
)
odd_lines = st.sampled_from(
    [b" goes on\r\n", b"\tand on\n", "Größe: 5\r\n".encode(), b"no colon\n", b": x\n", b"\xff: \xff\n"]
)
bodies = st.sampled_from(
    [
        b"",
        b"text",
        b"\r\n\r\n",
        b"HTTP/1.1 200\r\nA: b\r\n\r\n<p>",
        b"HTTP/1.0\n\nx\r\n\r\ny",
        b"HTTP/1.1 200",
        b"http/1.1\n\nx",
        b"WARC/1.0\r\n",
        b"\n" * 9,
        b"long " * 50,
        b"HTTP/1.1\r\n\r\r\n\n\n...",
    ]
)


def as_record(
    before: list[bytes], kind: bytes, over_http: bool, body: bytes, end: bytes, behind: list[bytes]
) -> bytes:
    header = [b"WARC/1.0" + end, *before, b"WARC-Type: " + kind + end]
    header += [b"Content-Type:  application/http;msgtype=response" + end] if over_http else []
    header += [b"Content-Length: %d" % len(body) + end, *behind, end]
    return b"".join(header) + body + end + end


records_of = st.builds(
    as_record,
    st.lists(lines | odd_lines, max_size=2),
    st.sampled_from([b"response", b"conversion", b"CONTINUATION", b"warcinfo", b"request"]),
    st.booleans(),
    bodies,
    ENDS,
    st.lists(st.sampled_from([b"X-Id: <a>\r\n", b"x-ID:b\n", b"Other: \xc3\xa9\n", b"X-Id:\n"]), max_size=2),
)
plain_records = st.builds(
    as_record,
    st.just([]),
    st.sampled_from([b"response", b"conversion", b"warcinfo"]),
    st.booleans(),
    bodies,
    ENDS,
    st.lists(st.sampled_from([b"X-Id: <a>\r\n", b"x-ID:b\n"]), max_size=1),
)


@settings(max_examples=examples(1000))
@given(
    records=st.lists(plain_records, max_size=6) | st.lists(records_of, max_size=4),
    damage=st.none() | st.tuples(st.floats(0, 1), st.sampled_from([b"", b"x", b"\n", b"\r", b":", b"9"])),
    stop=st.just(1.0) | st.floats(0, 1),
    id_field=st.sampled_from([None, "x-id", "X-ID", "content-length", "größe"]),
    step=st.sampled_from([1, 3, 10, 10**6]),
    buffer=st.sampled_from([1, 5, 64, 2**16]),
    room=st.sampled_from([1, 2, 50, 10**4]),
    gap=st.integers(0, 1),
    most=st.integers(1, 4),
)
@example([b"WARC/1.0\nWARC-Type: response\nContent-Length: 999\n\nabc"], None, 1.0, None, 3, 5, 50, 0, 4)
def test_a_loop_reads_what_is_read_one_by_one(
    records: list[bytes],
    damage: tuple[float, bytes] | None,
    stop: float,
    id_field: str | None,
    step: int,
    buffer: int,
    room: int,
    gap: int,
    most: int,
) -> None:
    data = b"".join(records)
    if damage is not None:
        at = int(damage[0] * len(data))
        data = data[:at] + damage[1] + data[at + 1 :]
    data = data[: int(stop * len(data))]
    texts, remarks, wrong = one_by_one(data, id_field)
    found, told, fault = by_the_loop(data, id_field, step=step, buffer=buffer, room=room, gap=gap, most=most)
    assert (found, told, fault) == (texts, remarks, wrong)


@pytest.mark.parametrize(
    "line",
    [
        b"Content-Length : 2\r\n", b"Content-Length: 1234567890123456789\n", b"Content-Length: 123456789012345678\n",
        b"Content-Length: 1x\n", b"Content-Length:\n", b"Content-Length: \xd9\xa3\n",
        b"\x0bX-Id\t:\x0c \xff\xc3\xa9 \n",
        b"X-\xe2\x84\xaaey: a\n", b"no colon\n", b" on\n", b"X-Id:\x1cb\x85\n", b"WARC-Type: re\xc5\xbfource\n",
        b"\r\r\n",
        b"Content-Type: a p p lication/HTTP\n", b"x: " + b"y" * 2**20 + b"\n", b"x: " + b"y" * (2**20 - 60) + b"\n",
    ],
)  # fmt: skip
@pytest.mark.parametrize("id_field", ["x-id", "X-Key", "x-\u212aey"])
def test_a_line_of_a_header_is_read_alike(line: bytes, id_field: str) -> None:
    first = as_record([], b"response", False, b"x", b"\n", [b"X-Id: 1\n", b"X-Key: 2\n"])
    data = first + as_record([], b"response", False, b"HTTP/1.1\n\ntext", b"\n", [line]) + first
    found = by_the_loop(data, id_field, step=10**6, buffer=2**16, room=100, gap=0, most=9)
    assert found == one_by_one(data, id_field)


def test_the_loop_reads_all_headers_but_the_first_and_odd_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long headers and texts of many windows, and HTTP's header across their edges, among them."""
    headers: list[int] = []
    read = warc.Records._read_header

    def counted(self: warc.Records) -> bool:
        headers.append(int(self._state[loop.RECORDS]) + 1)
        return read(self)

    monkeypatch.setattr(warc.Records, "_read_header", counted)
    http = b"HTTP/1.1 200 OK\r\nLong: " + b"x" * 5000 + b"\r\n\r\nbody"
    stored = [
        as_record([], b"warcinfo", False, b"i" * 900, b"\r\n", []),
        *[as_record([], b"conversion", False, b"t" * 700, b"\r\n", [b"X-Id: 1\r\n"])] * 5,
        as_record([b"Long: " + b"y" * 3000 + b"\n"], b"response", True, http, b"\n", []),
        as_record([b"Other: 1\n", b" on\n"], b"response", False, http, b"\n", [b"X-Id: 2\r\n"]),
        as_record([], b"resource", False, b"", b"\n", [b"X-Id: 3\r\n"]),
    ]
    data = b"".join(stored)
    found = by_the_loop(data, "x-id", step=999, buffer=64, room=300, gap=1, most=9)
    assert headers == [1, 2, 8, 10]
    assert found == one_by_one(data, "x-id")
    assert [(number, identifier, len(text)) for number, identifier, text in found[0]] == [
        *[(number, "1", 700) for number in range(2, 7)], (7, None, 4), (8, "2", len(http)), (9, "3", 0),
    ]  # fmt: skip
