"""What the record of a stopped run says, also when it was torn."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.ledger import FILE_NAME, Ledger, fingerprint, read_past
from tilewright.pipeline.plan import Limits, MatmulPlan, StoredMatrix, plan_matmul


@pytest.fixture
def plan() -> MatmulPlan:
    matrix = StoredMatrix(40, 40, np.dtype("f4"), (10, 10))
    return plan_matmul(matrix, matrix, np.dtype("f4"), (10, 10), Limits(1, 4000))


def test_what_was_recorded_is_read(plan: MatmulPlan, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "abc", plan)
    for index in (3, 0, 7):
        ledger.record(index)
    ledger.close()
    past = read_past(tmp_path, "abc")
    assert past is not None
    assert past.finished == {0, 3, 7}
    assert past.geometry == plan.geometry
    assert past.c_unit == (10, 10)
    assert read_past(tmp_path, "another product") is None
    ledger.remove(tmp_path)
    assert read_past(tmp_path, "abc") is None


@pytest.mark.parametrize("torn", range(1, 12))
def test_a_torn_last_line_loses_one_tile_and_no_later_one(
    torn: int, plan: MatmulPlan, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path, "abc", plan)
    for index in (1, 2, 3):
        ledger.record(index)
    ledger.close()
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-torn])
    past = read_past(tmp_path, "abc")
    assert past is not None
    assert past.finished == ({1, 2, 3} if torn == 1 else {1, 2})
    again = Ledger(
        tmp_path, "abc", plan, past.finished
    )  # going on behind a torn line must not lose what comes
    again.record(9)
    again.close()
    last = read_past(tmp_path, "abc")
    assert last is not None
    assert last.finished == past.finished | {9}


def test_the_fingerprint_sees_what_decides_the_bytes(tmp_path: Path) -> None:
    def array(name: str, **options: Any) -> zarr.Array[Any]:
        made = zarr.create_array(
            tmp_path / name, shape=(4, 4), chunks=(2, 2), dtype="f4", overwrite=True, **options
        )
        made[...] = 1
        return made

    a, b = array("a"), array("b")
    base = fingerprint(a, b, {"precision": "full"})
    assert fingerprint(a, b, {"precision": "full"}) == base
    assert fingerprint(a, b, {"precision": "tf32"}) != base
    assert fingerprint(b, a, {"precision": "full"}) != base
    a[0, 0] = 5
    assert fingerprint(a, b, {"precision": "full"}) != base
    odd = array("no UTF-8: \udcff")
    assert fingerprint(odd, b, {}) != fingerprint(array("no UTF-8: \udcfe"), b, {})


@pytest.mark.parametrize(
    "damage",
    [
        b"\xff\xfe",
        b"[1]\n",
        b"5\n",
        b"{}\n",
        b'HEAD{"til": 3}\n',
        b"HEAD5\n",
        b'HEAD{"tile": -1}\n',
        b'HEAD{"tile": "x"}\n',
    ],
)
def test_a_damaged_record_is_no_record(damage: bytes, plan: MatmulPlan, tmp_path: Path) -> None:
    Ledger(tmp_path, "abc", plan).close()
    path = tmp_path / FILE_NAME
    path.write_bytes(damage.replace(b"HEAD", path.read_bytes()))
    assert read_past(tmp_path, "abc") is None


@pytest.mark.parametrize(
    "line", [b'{"tile": ' + b"9" * 6000 + b"}", b"[" * 200_000], ids=["digits", "brackets"]
)
def test_a_line_past_what_python_reads_is_torn(line: bytes, plan: MatmulPlan, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "abc", plan)
    ledger.record(5)
    ledger.close()
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes() + line + b"\n")
    past = read_past(tmp_path, "abc")
    assert past is not None
    assert past.finished == {5}


def test_a_full_disk_is_named(plan: MatmulPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    ledger = Ledger(tmp_path, "abc", plan)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"record of finished tiles.*No space left"):
        ledger.record(3)
    ledger.close()
    monkeypatch.setattr(Path, "write_text", lambda *arguments, **options: full(0))
    with pytest.raises(StoreError, match=r"record of finished tiles.*No space left"):
        Ledger(tmp_path, "abc", plan)
