"""What is damaged of stored EOFs is found, and named; what is right passes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from click.testing import CliRunner

import tilewright as tw
from tests.pipeline.gram.naive import put
from tilewright.pipeline.errors import OptionError, StoreError
from tilewright.pipeline.product.output import CHECKSUMS_NAME
from tilewright.workflows.cli import cli


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    x = np.random.default_rng(33).standard_normal((60, 9)).astype("f4")
    put(folder / "x.zarr", x)
    tw.eofs(folder / "x.zarr", folder / "e.zarr", k=3, device="cpu")
    return folder / "e.zarr"


@pytest.fixture
def group(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "e.zarr"))


def chunks(group: Path) -> list[Path]:
    return sorted(each for each in group.glob("*/c/**/*") if each.is_file())


@pytest.mark.filterwarnings("error")
def test_what_was_stored_passes(group: Path) -> None:
    found = tw.audit(group)
    assert found.passed
    assert found.by == "checksums"
    assert not found.bad
    assert found.nbytes == sum(each.stat().st_size for each in chunks(group))
    assert found.objects == len(chunks(group)) >= 11
    names = {name for name, _ in zarr.open_group(group, mode="r", use_consolidated=False).members()}
    assert {"mode", "components", "scores", "mean"} <= names


def test_each_flipped_byte_and_each_missing_chunk_is_named(group: Path) -> None:
    for chunk in chunks(group):
        name = str(chunk.relative_to(group))
        whole = chunk.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        chunk.write_bytes(flipped)
        found = tw.audit(group)
        assert not found.passed
        assert [(one.file, one.reason) for one in found.bad] == [
            (name, "its bytes are not those that were written")
        ]
        chunk.unlink()
        found = tw.audit(group)
        assert [(one.file, one.reason) for one in found.bad] == [(name, "it is missing")]
        assert name in str(found)
        chunk.write_bytes(whole)
    assert tw.audit(group).passed


def test_the_command_prints_the_damage_and_exits_with_1(group: Path) -> None:
    chunk = next(each for each in chunks(group) if each.parts[-4] == "components")
    right = CliRunner().invoke(cli, ["audit", str(group)])
    assert right.exit_code == 0
    assert "all are as they should be" in right.output
    chunk.unlink()
    wrong = CliRunner().invoke(cli, ["audit", str(group), "--json"])
    assert wrong.exit_code == 1
    (bad,) = json.loads(wrong.stdout)["bad"]
    assert bad["file"] == str(chunk.relative_to(group))
    assert bad["columns"] == [0, 9]


def test_changed_metadata_and_missing_arrays_are_told(group: Path) -> None:
    metadata = json.loads((group / "scores" / "zarr.json").read_text())
    metadata["fill_value"] = 5.0
    (group / "scores" / "zarr.json").write_text(json.dumps(metadata))
    shutil.rmtree(group / "mean")
    found = tw.audit(group)
    assert not found.passed
    assert "those of mean are missing" in found.metadata
    assert "of scores fill_value is 5.0 and was 0.0" in found.metadata


def test_arrays_that_somebody_added_are_left_alone(group: Path) -> None:
    zarr.open_group(group, mode="r+").create_array("mine", data=np.ones(3))
    assert tw.audit(group).passed


@pytest.mark.parametrize("text", [None, "", "{}", '{"version": 1, "check": "00"}'])
def test_records_that_say_nothing(group: Path, text: str | None) -> None:
    record = group / "eigenvalues" / CHECKSUMS_NAME
    record.unlink()
    if text is not None:
        record.write_text(text)
    what = "has no record of checksums" if text is None else "is damaged, or of another version"
    with pytest.raises(StoreError, match=rf"eigenvalues.*{what}.*store the EOFs again"):
        tw.audit(group)


@pytest.mark.parametrize(
    "options",
    [{"a": "x.zarr"}, {"b": "x.zarr"}, {"transpose_a": True}, {"transpose_b": True}, {"precision": "tf32"}],
)
def test_options_of_other_kinds_are_refused(group: Path, options: dict[str, Any]) -> None:
    (option,) = options
    with pytest.raises(OptionError, match=f"{option}: .* holds EOFs, .* leave {option} out"):
        tw.audit(group, **options)


def test_another_kind_of_group_is_refused(tmp_path: Path) -> None:
    zarr.create_group(tmp_path / "g.zarr").create_array("components", data=np.ones((2, 3)))
    with pytest.raises(StoreError, match=r"g\.zarr"):
        tw.audit(tmp_path / "g.zarr")
