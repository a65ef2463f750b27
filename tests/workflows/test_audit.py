"""Every damage of a stored product is found and named, and nothing else is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from distributed import Client

import tilewright as tw
from tilewright.pipeline.product.audit import audit_by_checksums
from tilewright.pipeline.product.ledger import Group, read_record
from tilewright.pipeline.product.output import CHECKSUMS_NAME

SHAPE = (40, 70)


@pytest.fixture
def stored(
    client: Client, tmp_path: Path, small_chunks: None, rng: np.random.Generator
) -> tuple[Path, Path, Path]:
    """A, B and C of float32, C in small chunks, of which those at its edges are cut short."""
    paths = tmp_path / "a.zarr", tmp_path / "b.zarr", tmp_path / "c.zarr"
    for path, shape in zip(paths, ((SHAPE[0], 40), (40, SHAPE[1])), strict=False):
        array = zarr.create_array(path, shape=shape, chunks=(32, 32), dtype="f4", compressors=None)
        array[...] = rng.standard_normal(shape)
    tw.matmul(*paths, cluster=client, device="cpu", device_memory="28 KiB")
    return paths


def chunks_of(c: Path) -> list[Path]:
    return sorted(path for path in (c / "c").rglob("*") if path.is_file())


def test_an_untouched_product_passes_by_both_ways(stored: tuple[Path, Path, Path], client: Client) -> None:
    a, b, c = stored
    by_checksums = tw.audit(c)
    assert by_checksums.passed
    assert (by_checksums.by, by_checksums.bad) == ("checksums", ())
    assert by_checksums.objects == len(chunks_of(c))
    assert by_checksums.nbytes == sum(path.stat().st_size for path in chunks_of(c))
    by_products = tw.audit(c, a=a, b=b, cluster=client)
    assert by_products.passed
    assert (by_products.by, by_products.objects) == ("products", by_checksums.objects)


def flip(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def swap(path: Path, other: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(data)


def truncate(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def replace_by_a_folder(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, tuple[Callable[[Path, Path], None], str, int]] = {
    "flip": (flip, "its bytes are not those that were written", 1),
    "truncate": (truncate, "and had", 1),
    "remove": (lambda path, other: path.unlink(), "it is missing", 1),
    "swap": (swap, "they are those of c/", 2),
    "folder": (replace_by_a_folder, "a folder and no file", 1),
}
"""What is done, what is said, and of how many chunks."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("every", [pytest.param(True, marks=pytest.mark.slow, id="all"), False])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damage_of_any_chunk_is_named(
    how: str, every: bool, stored: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """Every chunk in every way; or each in one."""
    damage, reason, count = DAMAGES[how]
    share = slice(None) if every else slice([*DAMAGES].index(how), None, len(DAMAGES))
    *_, whole = stored
    for place, chunk in [*enumerate(chunks_of(whole))][share]:
        c = tmp_path / "damaged.zarr"
        shutil.copytree(whole, c)
        victim = c / chunk.relative_to(whole)
        damage(victim, chunks_of(c)[place - 1])
        found = tw.audit(c)
        assert not found.passed
        assert len(found.bad) == count
        names = [one.file for one in found.bad]
        assert chunk.relative_to(whole).as_posix() in names
        assert all(reason in one.reason for one in found.bad)
        shutil.rmtree(c)


def test_all_wrong_chunks_are_named_without_checksums(
    stored: tuple[Path, Path, Path], client: Client
) -> None:
    a, b, c = stored
    (c / CHECKSUMS_NAME).unlink()
    unit = zarr.open_array(c).chunks
    array = zarr.open_array(c, mode="r+")
    for row, column in ((3, 5), (SHAPE[0] - 1, SHAPE[1] - 1), (3, SHAPE[1] - 2)):
        array[row, column] += 100
    found = tw.audit(c, a=a, b=b, cluster=client)
    assert not found.passed
    last = [(side - 1) // step for side, step in zip(SHAPE, unit, strict=True)]
    assert {one.file for one in found.bad} == {"c/0/0", f"c/{last[0]}/{last[1]}", f"c/0/{last[1]}"}
    assert all(one.reason == "its numbers are not those of A times B" for one in found.bad)
    with pytest.raises(tw.StoreError, match=r"no record of checksums.*--a, --b"):
        tw.audit(c)
    with pytest.raises(tw.OptionError, match="a is given without b"):
        tw.audit(c, a=a)


def test_other_metadata_are_told(stored: tuple[Path, Path, Path]) -> None:
    c = stored[-1]
    zarr.open_array(c, mode="r+").attrs["title"] = "a user's own"
    assert tw.audit(c).passed
    metadata = c / "zarr.json"
    metadata.write_text(metadata.read_text().replace('"fill_value": 0.0', '"fill_value": 7.0'))
    found = tw.audit(c)
    assert not found.passed
    assert "fill_value is 7.0 and was 0.0" in str(found)


def test_pieces_of_a_tile_whose_others_have_no_line_do_not_count(
    stored: tuple[Path, Path, Path], client: Client
) -> None:
    """As after a plan for less memory, and a damaged record: a run that goes on computes them again in any case."""
    *_, c = stored
    array = zarr.open_array(c, mode="r")
    record = read_record(c / CHECKSUMS_NAME)
    assert record is not None
    first, second, *others = record.finished
    group = Group(first, 3)
    torn = {index: record.finished[index]._replace(group=group) for index in (first, second)}
    past = replace(record, finished=torn | {index: record.finished[index] for index in others})
    (c / array.metadata.encode_chunk_key(torn[second].objects[0].place)).write_bytes(b"torn")
    found = audit_by_checksums(array, past, lambda event: None, finished=False)
    assert found.passed
    assert found.objects == sum(len(record.finished[index].objects) for index in others)
