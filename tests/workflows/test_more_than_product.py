"""What `verify` and `audit` say of a C that is more than the product of A and B, or only a band of that."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from distributed import Client

import tilewright as tw
from tests.pipeline.gram import naive
from tilewright.pipeline.events import Caution, Event
from tilewright.pipeline.product.ledger import FILE_NAME
from tilewright.pipeline.product.output import CHECKSUMS_NAME
from tilewright.workflows.cli import cli

MORE = r"c\.zarr, is more than the product of A and B: .*(tilewright audit|by its checksums)"


@pytest.fixture
def path(tmp_path: Path, rng: np.random.Generator) -> Path:
    return naive.put(tmp_path / "x.zarr", rng.integers(-9, 9, (30, 40)).astype("f4"), (10, 16))


@pytest.mark.parametrize(
    "options", [{"center": True, "divide": "n-1"}, {"center": True, "missing": 3, "missing_as": "pairwise"}]
)
def test_no_right_result_is_called_wrong(
    options: dict[str, Any], path: Path, tmp_path: Path, client: Client
) -> None:
    tw.gram(path, tmp_path / "c.zarr", cluster=client, device="cpu", **options)
    for work in (
        lambda: tw.verify(path, path, tmp_path / "c.zarr", transpose_a=True, cluster=client),
        lambda: tw.audit(tmp_path / "c.zarr", path, path, transpose_a=True, cluster=client),
    ):
        with pytest.raises(tw.OptionError, match=MORE):
            work()
    words = ["verify", str(path), str(path), str(tmp_path / "c.zarr"), "--transpose-a"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 1
    assert "means, weights, scales, offsets or other transforms" in result.stderr
    assert tw.audit(tmp_path / "c.zarr").passed


def test_a_product_that_lines_were_added_to_is_one(path: Path, tmp_path: Path, client: Client) -> None:
    here: dict[str, Any] = {"append": True, "cluster": client, "device": "cpu"}
    tw.gram(path, tmp_path / "c.zarr", **here)
    zarr.open_array(path, mode="r+").append(np.ones((7, 40), "f4"))
    assert tw.gram(path, tmp_path / "c.zarr", **here).plan.k == 7
    asked: dict[str, Any] = {"transpose_a": True, "cluster": client}
    assert tw.verify(path, path, tmp_path / "c.zarr", **asked).passed
    assert tw.audit(tmp_path / "c.zarr", path, path, **asked).passed
    c = zarr.open_array(tmp_path / "c.zarr", mode="r+")
    c[3, 4] += 100
    found = tw.verify(path, path, tmp_path / "c.zarr", **asked)
    assert not found.passed
    assert found.worst is not None
    assert found.worst[0] == 3
    bad = tw.audit(tmp_path / "c.zarr", path, path, **asked).bad
    assert [one.reason for one in bad] == ["its numbers are not those of A times B"]


@pytest.mark.parametrize("divide", [None, 2])
def test_only_plain_sums_with_lines_added_are_a_product(
    divide: float | None, path: Path, tmp_path: Path, client: Client
) -> None:
    here: dict[str, Any] = {"cluster": client, "device": "cpu"}
    if divide is None:  # A times B, twice
        for beta in (0, 1):
            tw.matmul(path, path, tmp_path / "c.zarr", transpose_a=True, beta=beta, **here)
    else:
        tw.gram(path, tmp_path / "c.zarr", append=True, divide=divide, **here)
        zarr.open_array(path, mode="r+").append(np.ones((7, 40), "f4"))
        tw.gram(path, tmp_path / "c.zarr", append=True, divide=divide, **here)
    with pytest.raises(tw.OptionError, match=MORE):
        tw.verify(path, path, tmp_path / "c.zarr", transpose_a=True, cluster=client)


def test_a_chunk_that_cannot_be_decoded_is_named_whatever_c_is(
    path: Path, tmp_path: Path, client: Client
) -> None:
    c = tmp_path / "c.zarr"
    tw.matmul(path, path, c, transpose_a=True, alpha=2, cluster=client, device="cpu")
    (c / "c" / "0" / "0").write_bytes(b"no chunk")
    found = tw.audit(c, path, path, transpose_a=True, cluster=client)
    assert not found.passed
    assert [(one.file, one.reason) for one in found.bad] == [("c/0/0", "it cannot be decoded")]
    with pytest.raises(tw.StoreError, match="c/0/0"):
        tw.verify(path, path, c, transpose_a=True, cluster=client)


def test_a_band_is_checked_as_one(path: Path, tmp_path: Path, client: Client) -> None:
    tw.gram(path, tmp_path / "c.zarr", window=(2, 5), chunks=8, cluster=client, device="cpu")
    asked: dict[str, Any] = {"transpose_a": True, "cluster": client}
    assert tw.verify(path, path, tmp_path / "c.zarr", **asked).passed
    with pytest.raises(tw.OptionError, match="is a band of the product of A and B, by its record"):
        tw.audit(tmp_path / "c.zarr", path, path, **asked)
    with pytest.raises(tw.ShapeError, match="can only give 30 × 30"):
        tw.verify(path, path, tmp_path / "c.zarr", transpose_b=True, cluster=client)
    c = zarr.open_array(tmp_path / "c.zarr", mode="r+")
    c[20, 22] += 50
    found = tw.verify(path, path, tmp_path / "c.zarr", **asked)
    assert not found.passed
    assert found.worst is not None
    assert found.worst[0] == 20


@pytest.mark.parametrize("dtype", ["f4", "i4"])
def test_numbers_beside_a_band_are_found(
    dtype: str, tmp_path: Path, client: Client, rng: np.random.Generator
) -> None:
    numbers = rng.integers(-9, 9, (30, 40)).astype(dtype)
    x, c = naive.put(tmp_path / "x.zarr", numbers, (10, 16)), tmp_path / "c.zarr"
    tw.gram(x, c, window=(2, 2), chunks=8, cluster=client, device="cpu")
    held = zarr.open_array(c, mode="r+")
    checked = partial(tw.verify, x, x, c, transpose_a=True, cluster=client)
    with zarr.config.set({"array.write_empty_chunks": True}):
        zarr.open_array(c, mode="r+")[24:32, :8] = 0
    assert (c / "c" / "3" / "0").is_file()
    assert checked().passed
    values = [50] if dtype == "i4" else [50, np.nan]
    for value in values:
        held[3, 39] = value
        found = checked()
        assert not found.passed
        assert found.cause == "c/0/4, outside the band, is not all 0"
        assert found.worst == (3, 32, 40)
        assert "verification failed" in str(found)
    held[8:16, 32:] = 1
    assert checked().cause == "c/0/4, outside the band, is not all 0; c/1/4, outside the band, is not all 0"
    held[0:16, 24:32] = 1
    assert checked().cause.endswith("; c/1/3, outside the band, is not all 0; and so it is with 1 more")
    held[0:16, 24:] = 0
    assert checked().passed
    (c / "c" / "4" / "0").write_bytes(b"no chunk")
    found = checked()
    assert not found.passed
    assert found.cause == "c/4/0, outside the band, cannot be decoded"
    assert found.worst == (32, 0, 8)
    held[36, 36] += 1
    assert checked().worst == (36, 34, 39)


@pytest.mark.parametrize("name", [CHECKSUMS_NAME, FILE_NAME])
def test_a_record_that_cannot_be_read_is_told_of(
    name: str, path: Path, tmp_path: Path, client: Client, events: list[Event]
) -> None:
    c = tmp_path / "c.zarr"
    tw.matmul(path, path, c, transpose_a=True, cluster=client, device="cpu")
    (c / name).unlink(missing_ok=True)
    (c / name).mkdir()
    asked: dict[str, Any] = {"transpose_a": True, "cluster": client, "listener": events.append}
    for passed in (True, False):
        assert tw.verify(path, path, c, **asked).passed is passed
        assert tw.audit(c, path, path, **asked).passed is passed
        told = [event.message for event in events if isinstance(event, Caution)]
        assert len(told) == 2
        for each in told:
            assert re.match(
                r"the record beside C, .*c\.zarr, cannot be read \(Is a directory\): C is compared", each
            )
        events.clear()
        zarr.open_array(c, mode="r+")[5, 6] += 100
