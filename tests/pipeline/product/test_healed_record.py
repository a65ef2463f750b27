"""Damaged lines of a record are taken from its copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.pipeline.product.test_ledger import PRODUCT, tile_of
from tilewright.pipeline.plan.inputs import Limits, StoredMatrix
from tilewright.pipeline.plan.product import MatmulPlan, plan_tiles
from tilewright.pipeline.product.ledger import FILE_NAME, Ledger, read_record
from tilewright.pipeline.store.journal import twin_of


@pytest.fixture
def plan() -> MatmulPlan:
    matrix = StoredMatrix(40, 40, np.dtype("f4"), (10, 10))
    return plan_tiles(matrix, matrix, np.dtype("f4"), (10, 10), Limits(1, 4000))


TILES = {**{index: tile_of(100 + index) for index in range(0, 8, 2)}, 3: tile_of(50)}


@pytest.fixture
def record(plan: MatmulPlan, tmp_path: Path) -> bytes:
    """A record of `TILES`, some others of which were withdrawn."""
    ledger = Ledger(tmp_path, PRODUCT, plan)
    for index in range(8):
        ledger.record(index, tile_of(100 + index))
        if index % 2:
            ledger.withdraw(index)
    ledger.record(3, tile_of(50))
    ledger.close()
    return (tmp_path / FILE_NAME).read_bytes()


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    places=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=4),
    flipped=st.integers(0, 7),
    behind=st.integers(0, 3),
)
def test_flipped_bits_cost_nothing_where_the_copy_has_the_lines(
    places: list[float], flipped: int, behind: int, record: bytes, tmp_path: Path
) -> None:
    """Least of all they bring back a tile that was withdrawn. A copy that is ``behind`` may lack the last lines."""
    path, data = tmp_path / FILE_NAME, bytearray(record)
    lines = record.split(b"\n")[:-1]
    copied = lines[: len(lines) - behind]
    twin_of(path).write_bytes(b"".join(line + b"\n" for line in copied))
    head = len(lines[0]) + 1
    # Up to a line that both have, or the end of both.
    stop = len(b"\n".join(copied[:-1] if behind else copied))
    for place in places:
        data[head + int(place * (stop - head))] ^= 1 << flipped
    path.write_bytes(data)
    past = read_record(tmp_path / FILE_NAME)
    assert past is not None
    assert (past.finished, past.bad_lines) == (TILES, 0)
    assert (data != record) is ("damaged; what its copy has there is used" in past.fault)


def test_the_end_of_a_record_is_found_in_its_copy(record: bytes, tmp_path: Path) -> None:
    path, line = tmp_path / FILE_NAME, b'{"tile": 3'
    path.write_bytes(record[: record.rindex(line)] + b"torn\n")
    past = read_record(tmp_path / FILE_NAME)
    assert past is not None
    assert past.finished == TILES


def test_a_copy_of_other_lines_is_not_mixed_in(plan: MatmulPlan, tmp_path: Path) -> None:
    """What nobody can place is left out, as where there is no copy."""
    path = tmp_path / FILE_NAME
    ledger = Ledger(tmp_path, PRODUCT, plan)
    for index in (1, 2):
        ledger.record(index, tile_of(10))
    ledger.close()
    other = path.read_bytes()
    ledger = Ledger(tmp_path, PRODUCT, plan)
    for index in (5, 6, 7):
        ledger.record(index, tile_of(10))
    ledger.withdraw(6)
    ledger.close()
    data = bytearray(path.read_bytes())
    data[data.index(b'{"tile": 5')] ^= 1
    path.write_bytes(data)
    twin_of(path).write_bytes(other)
    past = read_record(tmp_path / FILE_NAME)
    assert past is not None
    assert (past.finished.keys(), past.bad_lines) == ({7}, 1)
