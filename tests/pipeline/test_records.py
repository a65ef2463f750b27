"""Records of finished pieces: what they keep, whatever tears or damages them, and for whom."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.pipeline import records
from tilewright.pipeline.errors import OptionError, OutputExistsError, StoreError
from tilewright.pipeline.records import open_record, packed, place_of, remove_record, unpacked

HEAD = {"work": "test", "by": "byte"}


def keep(path: Path, *entries: int, resume: bool = True) -> list[int]:
    """Append entries, and return what stood there before."""
    with open_record(path, HEAD, resume=resume) as record:
        found = [entry["piece"] for _, entry in record.entries()]
        for entry in entries:
            record.append({"piece": entry})
    return found


def test_entries_come_back_in_order_and_by_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "r"
    assert keep(path, 1, 2) == []
    assert keep(path, 3) == [1, 2]
    with open_record(path, HEAD) as record:
        lines = [(line, entry) for line, entry in record.entries()]
        record.append({"piece": 4})
        assert [record.entry(line)["piece"] for line, _ in lines] == [1, 2, 3]
    assert keep(path, resume=False) == []
    assert keep(path) == []


def test_a_record_that_was_torn_anywhere_keeps_its_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "r"
    keep(path, 10, 20, 30)
    whole = path.read_bytes()
    ends = [at for at, byte in enumerate(whole) if byte == ord("\n")]
    for stop in range(len(whole) + 1):
        path.write_bytes(whole[:stop])
        if ends[0] < stop or b"\n" not in whole[:stop]:
            # A line is whole without its end.
            expected = [10, 20, 30][: max(0, sum(end <= stop for end in ends) - 1)]
            assert keep(path, 40) == expected, stop
            assert keep(path) == [*expected, 40], "what is appended behind a torn line counts"


def test_lines_of_another_record_count_where_they_are_of_the_same_work(tmp_path: Path) -> None:
    """As where somebody puts the records of several jobs one behind the other."""
    one, other = tmp_path / "one", tmp_path / "other"
    keep(one, 1, 2)
    keep(other, 3)
    both = one.read_bytes() + other.read_bytes()
    one.write_bytes(both)
    assert keep(one, 4) == [1, 2, 3]
    assert keep(one) == [1, 2, 3, 4]
    with open_record(other, HEAD | {"by": "word"}, resume=False) as record:
        record.append({"piece": 5})
    one.write_bytes(both + other.read_bytes())
    with pytest.raises(
        OptionError, match=r'one keeps pieces of other work: by is "word" there and "byte" here'
    ):
        keep(one)
    lines = both.splitlines(keepends=True)
    lines[3] = lines[3].replace(b"test", b"text")
    one.write_bytes(b"".join(lines))
    with pytest.raises(StoreError, match=r"another first line of .*one is damaged"):
        keep(one)


@given(at=st.integers(0), bit=st.integers(0, 7))
def test_a_flipped_bit_costs_one_line_at_most(
    at: int, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("flip") / "r"
    keep(path, 10, 20, 30)
    data = bytearray(path.read_bytes())
    head = data.index(b"\n") + 1
    data[head + at % (len(data) - head)] ^= 1 << bit
    path.write_bytes(data)
    found = keep(path)
    assert set(found) <= {10, 20, 30}, "a damaged line is never taken for another"
    assert len(found) >= 1  # a line's end that became another byte takes the next line with it


def test_a_damaged_first_line_is_told(tmp_path: Path) -> None:
    path = tmp_path / "r"
    keep(path, 10)
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"first line of .* is damaged.*--no-resume"):
        keep(path)
    assert keep(path, 20, resume=False) == []
    assert keep(path) == [20]


def test_other_work_is_refused_with_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "r"
    keep(path, 10)
    with (
        pytest.raises(
            OptionError, match=r'by is "byte" there and "bigram" here; start over with --no-resume'
        ),
        open_record(path, {**HEAD, "by": "bigram"}),
    ):
        pass
    assert keep(path) == [10]


@pytest.mark.parametrize("data", [b"mine", b"mine\nand mine\n", b"{}\n"])
@pytest.mark.parametrize("resume", [True, False])
def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path, data: bytes, resume: bool) -> None:
    path = tmp_path / "r"
    path.write_bytes(data)
    with pytest.raises(OptionError, match="holds something else than finished pieces"):
        keep(path, 1, resume=resume)
    assert path.read_bytes() == data


def test_one_run_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "r"
    with open_record(path, HEAD) as record:
        record.append({"piece": 1})
        with pytest.raises(OutputExistsError, match="another run has"), open_record(path, HEAD):
            pass
        remove_record(path)
        assert path.exists(), "it is in use"
    remove_record(path)
    assert not path.exists()
    remove_record(path)


def test_a_process_that_is_killed_has_lost_nothing_that_was_appended(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from tilewright.pipeline.records import open_record
with open_record(Path({str(tmp_path / "r")!r}), {HEAD!r}) as record:
    for piece in range(5):
        record.append({{"piece": piece}})
    os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert ended.returncode == -9, ended.stderr
    assert keep(tmp_path / "r") == list(range(5))


def test_lines_are_forced_to_disk_while_others_come_and_at_the_end(
    tmp_path: Path, forced_to_disk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, first, real = [], threading.Event(), os.fsync

    def sync(descriptor: int) -> None:
        real(descriptor)
        synced.append((threading.current_thread(), os.fstat(descriptor).st_size))
        first.set()

    monkeypatch.setattr(os, "fsync", sync)
    path = tmp_path / "r"
    with open_record(path, HEAD) as record:
        first.clear()  # of the first line
        record.append({"piece": 1})
        assert first.wait(60), "without anybody asking"
        assert synced[-1][0] is not threading.current_thread()
        for piece in range(100):
            record.append({"piece": piece})
    assert synced[-1][1] == path.stat().st_size
    assert len(synced) < 50, "many lines at once"


def test_a_disk_that_refuses_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r"
    keep(path, 1)

    def full(descriptor: int, data: bytes, offset: int) -> int:
        return real(descriptor, data[: len(data) // 2], offset)

    real = os.pwrite
    with open_record(path, HEAD) as record:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(StoreError, match=r"cannot write the record .*No space left"):
            record.append({"piece": 2})
        monkeypatch.setattr(os, "pwrite", real)
        record.append({"piece": 3})
    assert keep(path) == [1, 3]

    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(StoreError, match="Input/output error"):
        keep(path, 4)


@pytest.mark.parametrize("wrong", ["", b"bytes", 3, "a\0b", object()])
def test_what_is_no_path_is_refused(wrong: object) -> None:
    with pytest.raises(OptionError, match=r"^state=.* is no path"):
        place_of(wrong)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_packed_numbers_come_back(numbers: list[int]) -> None:
    given_ = np.array(numbers, np.int64)
    np.testing.assert_array_equal(unpacked(packed(given_)), given_)


def test_packed_numbers_are_small() -> None:
    dense = np.arange(65536)
    assert len(packed(np.diff(dense, prepend=0))) < 100
    assert len(packed(np.full(65536, 300))) < 1000
    assert records.unpacked(packed(np.array([255]))).dtype == np.uint8
