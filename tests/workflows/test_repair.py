"""A damaged product is made whole by computing its damaged tiles again, and nothing else is touched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from distributed import Client

import tilewright as tw
from tests.workflows.test_audit import chunks_of, flip, replace_by_a_folder, swap, truncate
from tilewright.pipeline.errors import PlanError
from tilewright.pipeline.events import Event, UnitDone
from tilewright.pipeline.product.output import CHECKSUMS_NAME, partial_path
from tilewright.workflows.cli import cli

SHAPE = (40, 70)
MEMORY = "20 KiB"
"""For the columns of C's chunks, of which each is a tile."""
NOWHERE = "tcp://127.0.0.1:9"
"""An address at which nobody answers."""


def matrix(path: Path, shape: tuple[int, int], rng: np.random.Generator, dtype: str = "f4") -> Path:
    array = zarr.create_array(path, shape=shape, chunks=(32, 32), dtype=dtype, compressors=None)
    values = rng.standard_normal(shape) if dtype.startswith("f") else rng.integers(-50, 50, shape)
    array[...] = values.astype(dtype)
    return path


@pytest.fixture
def stored(
    client: Client, tmp_path: Path, small_chunks: None, rng: np.random.Generator
) -> tuple[Path, Path, Path]:
    """A, B and C of float32, C in tiles of several chunks."""
    a, b = (
        matrix(tmp_path / f"{name}.zarr", shape, rng)
        for name, shape in (("a", (SHAPE[0], 40)), ("b", (40, SHAPE[1])))
    )
    c = tmp_path / "c.zarr"
    assert tw.matmul(a, b, c, cluster=client, device="cpu", device_memory=MEMORY).plan.tile_count > 3
    return a, b, c


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != CHECKSUMS_NAME
    }


def repaired(client: Client, paths: tuple[Path, Path, Path], **options: Any) -> tw.Audit:
    return tw.repair(*paths, cluster=client, device="cpu", **options)


def replace_by_a_full_folder(path: Path, other: Path) -> None:
    replace_by_a_folder(path, other)
    (path / "0").write_text("what another program put there")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "damage",
    [flip, truncate, lambda path, other: path.unlink(), swap, replace_by_a_folder, replace_by_a_full_folder],
    ids=["flip", "truncate", "remove", "swap", "folder", "full folder"],
)
def test_every_damage_is_undone_bit_by_bit(
    damage: Callable[[Path, Path], None], stored: tuple[Path, Path, Path], client: Client, tmp_path: Path
) -> None:
    *_, c = stored
    before, chunks = contents(c), chunks_of(c)
    damage(chunks[1], chunks[-1])
    tiles = {one.tile for one in tw.audit(c).bad}
    done = repaired(client, stored)
    assert done.passed
    assert done.as_written
    assert done.repaired == len(tiles)
    assert contents(c) == before
    assert tw.audit(c).passed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zarr", "b.zarr", "c.zarr"]


@pytest.mark.more
def test_a_product_of_damaged_tiles_alone_is_repaired_with_less_memory(
    stored: tuple[Path, Path, Path], client: Client
) -> None:
    *_, c = stored
    for chunk in chunks_of(c):
        flip(chunk, c)
    with pytest.raises(PlanError, match="the C that is repaired is stored in such pieces"):
        repaired(client, stored, device_memory="1 KiB")
    assert repaired(client, stored, device_memory="6 KiB").passed
    assert tw.verify(*stored, cluster=client).passed
    assert tw.audit(c).passed


def test_undamaged_chunks_are_the_same_files(stored: tuple[Path, Path, Path], client: Client) -> None:
    *_, c = stored
    before = {path.relative_to(c): path.stat() for path in chunks_of(c)}
    flip(chunks_of(c)[0], c)
    assert repaired(client, stored).repaired == 1
    same = [(c / path).stat().st_ino == found.st_ino for path, found in before.items()]
    assert 0 < same.count(False) < len(same)


def test_where_there_are_no_links_chunks_are_copied(
    stored: tuple[Path, Path, Path], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, c = stored
    before = contents(c)
    flip(chunks_of(c)[0], c)

    def no_links(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    assert repaired(client, stored).repaired == 1
    assert contents(c) == before


def test_a_whole_product_is_left_alone_and_needs_no_cluster(stored: tuple[Path, Path, Path]) -> None:
    *_, c = stored
    before = {path: (path.stat().st_ino, path.stat().st_ctime_ns) for path in c.rglob("*")}
    done = tw.repair(*stored, cluster=NOWHERE)
    assert done.passed
    assert done.repaired is None
    assert {path: (path.stat().st_ino, path.stat().st_ctime_ns) for path in c.rglob("*")} == before


@pytest.mark.more
@pytest.mark.parametrize("dtype", ["i4", pytest.param("f8", marks=pytest.mark.slow)])
def test_transposes_come_from_the_record(
    dtype: str, client: Client, tmp_path: Path, small_chunks: None, rng: np.random.Generator
) -> None:
    """And both places of a tile of a symmetric product are put right."""
    x, c = matrix(tmp_path / "x.zarr", (80, 80), rng, dtype), tmp_path / "c.zarr"
    tw.matmul(x, x, c, transpose_a=True, cluster=client, device="cpu", device_memory="28 KiB")
    before, chunks = contents(c), chunks_of(c)
    flip(chunks[1], c)
    chunks[-2].unlink()
    done = tw.repair(x, x, c, cluster=client, device="cpu")
    assert done.passed
    assert len(done.bad) == 2
    assert contents(c) == before
    with pytest.raises(tw.OptionError, match="was computed with other transposes"):
        tw.repair(x, x, c, transpose_a=False, transpose_b=True, cluster=client)


def test_a_product_without_a_record_is_repaired_by_its_numbers(
    stored: tuple[Path, Path, Path], client: Client
) -> None:
    a, b, c = stored
    (c / CHECKSUMS_NAME).unlink()
    array = zarr.open_array(c, mode="r+")
    array[3, 5] += 1
    expected = zarr.open_array(a)[...].astype("f8") @ zarr.open_array(b)[...].astype("f8")
    done = repaired(client, stored)
    assert done.passed
    assert (done.by, done.as_written) == ("products", False)
    assert done.repaired == 1
    np.testing.assert_allclose(zarr.open_array(c)[...], expected, rtol=1e-4, atol=1e-4)
    assert tw.audit(c).by == "checksums"
    assert tw.audit(c).passed


def test_an_array_of_others_is_repaired(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    a, b = matrix(tmp_path / "a.zarr", (64, 40), rng, "i4"), matrix(tmp_path / "b.zarr", (40, 96), rng, "i4")
    c = tmp_path / "c.zarr"
    right = zarr.open_array(a)[...].astype("i8") @ zarr.open_array(b)[...].astype("i8")
    array = zarr.create_array(c, shape=(64, 96), chunks=(16, 48), dtype="i8", zarr_format=2)
    array[...] = right
    array.attrs["units"] = "counts"
    array[20, 50] = -1
    done = tw.repair(a, b, c, cluster=client, device="cpu")
    assert [one.file for one in done.bad] == ["1.1"]
    np.testing.assert_array_equal(zarr.open_array(c)[...], right)
    assert dict(zarr.open_array(c).attrs) == {"units": "counts"}


def test_what_users_have_put_there_stays(stored: tuple[Path, Path, Path], client: Client) -> None:
    *_, c = stored
    zarr.open_array(c, mode="r+").attrs["title"] = "distances"
    (c / "notes").mkdir()
    (c / "notes" / "readme.txt").write_text("mine")
    before = contents(c)
    flip(chunks_of(c)[0], c)
    assert repaired(client, stored).passed
    assert contents(c) == before


def test_other_factors_are_refused(
    stored: tuple[Path, Path, Path], client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    _, b, c = stored
    flip(chunks_of(c)[0], c)
    damaged = contents(c)
    other = matrix(tmp_path / "other.zarr", (SHAPE[0], 40), rng)
    with pytest.raises(tw.VerificationError, match="A holds other numbers in chunk"):
        tw.repair(other, b, c, cluster=client, device="cpu")
    short = matrix(tmp_path / "short.zarr", (60, 40), rng)
    with pytest.raises(tw.OptionError, match="is 40 × 70, and op"):
        tw.repair(short, b, c, cluster=client, device="cpu")
    (c / CHECKSUMS_NAME).unlink()
    with pytest.raises(tw.VerificationError, match="no part of C"):
        tw.repair(other, b, c, cluster=client, device="cpu")
    assert contents(c) == damaged
    assert not partial_path(c).exists()


def test_a_changed_factor_that_only_the_check_sees_is_refused(
    stored: tuple[Path, Path, Path], client: Client
) -> None:
    """The record knows nothing of what was read, as after a run on a GPU."""
    a, _, c = stored
    record = c / CHECKSUMS_NAME
    lines = record.read_text().splitlines(keepends=True)
    record.write_text("".join(line for line in lines if '"read"' not in line))
    flip(chunks_of(c)[0], c)
    damaged = contents(c)
    array = zarr.open_array(a, mode="r+")
    array[0, 0] += 100
    with pytest.raises(tw.VerificationError, match="is left as it is: give the A and B"):
        repaired(client, stored)
    assert contents(c) == damaged
    assert not partial_path(c).exists()


def test_a_copy_of_a_factor_will_do(stored: tuple[Path, Path, Path], client: Client, tmp_path: Path) -> None:
    a, b, c = stored
    before = contents(c)
    shutil.copytree(a, tmp_path / "copy.zarr")
    shutil.rmtree(a)
    flip(chunks_of(c)[0], c)
    assert repaired(client, (tmp_path / "copy.zarr", b, c)).as_written
    assert contents(c) == before


def test_a_stopped_repair_goes_on(stored: tuple[Path, Path, Path], client: Client) -> None:
    *_, c = stored
    before = contents(c)
    for chunk in chunks_of(c):
        flip(chunk, c)
    damaged = contents(c)
    tiles = {one.tile for one in tw.audit(c).bad}
    done: list[int] = []

    def stop(event: Event) -> None:
        if isinstance(event, UnitDone) and event.name == "matmul":
            done.append(event.index)
            if len(done) == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repaired(client, stored, listener=stop)
    assert contents(c) == damaged, "until it is whole, C stands as it was"
    again = repaired(client, stored)
    assert again.repaired is not None
    assert again.repaired <= len(tiles) - 2
    assert contents(c) == before


def test_damage_between_a_stopped_repair_and_the_next_is_repaired_too(
    stored: tuple[Path, Path, Path], client: Client
) -> None:
    """It has a second name, in the growing folder, by which the stopped repair has called it finished."""
    *_, c = stored
    before = contents(c)
    bands = sorted({chunk.name for chunk in chunks_of(c)}, key=int)

    def damage(band: str) -> None:
        for chunk in chunks_of(c):
            if chunk.name == band:
                flip(chunk, c)

    def stop(event: Event) -> None:
        if isinstance(event, UnitDone) and event.name == "matmul":
            raise KeyboardInterrupt

    damage(bands[0])
    with pytest.raises(KeyboardInterrupt):
        repaired(client, stored, listener=stop)
    damage(bands[-1])
    assert repaired(client, stored).passed
    assert contents(c) == before
    assert tw.audit(c).passed


def stopped_repair(client: Client, paths: tuple[Path, Path, Path]) -> None:
    """A repair that ends by Ctrl-C as its first tile is stored."""

    def stop(event: Event) -> None:
        if isinstance(event, UnitDone) and event.name == "matmul":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repaired(client, paths, listener=stop)


def test_what_a_stopped_repair_has_lost_since_is_taken_from_c_again(
    stored: tuple[Path, Path, Path], client: Client
) -> None:
    *_, c = stored
    before = contents(c)
    columns = sorted({chunk.name for chunk in chunks_of(c)}, key=int)  # each a tile
    for chunk in chunks_of(c):
        if chunk.name in columns[:-1]:
            flip(chunk, c)
    stopped_repair(client, stored)
    lost = [chunk for chunk in chunks_of(partial_path(c)) if chunk.name == columns[-1]]
    assert len(lost) == len(chunks_of(c)) // len(columns)
    lost[0].unlink()
    done = repaired(client, stored)
    assert done.repaired is not None
    assert done.repaired <= len(columns) - 2, "the stopped one has computed a tile or more"
    assert contents(c) == before


@pytest.mark.sample(1)
@pytest.mark.parametrize("stopped", [False, True])
def test_a_repair_with_less_memory_refuses_other_factors_before_its_first_tile(
    stopped: bool, stored: tuple[Path, Path, Path], client: Client
) -> None:
    """It reads them in other parts than those of which the record says what they held."""
    _, b, c = stored
    for chunk in chunks_of(c):
        if chunk.name != "0":
            flip(chunk, c)
    if stopped:
        stopped_repair(client, stored)
    damaged = contents(c)
    zarr.open_array(b, mode="r+")[0, -1] += 100
    events: list[Event] = []
    with pytest.raises(
        tw.VerificationError, match=r"B holds other numbers in .* no part of C can be repaired"
    ):
        repaired(client, stored, device_memory="6 KiB", listener=events.append)
    assert not any(isinstance(event, UnitDone) and event.name == "matmul" for event in events)
    assert contents(c) == damaged
    assert not partial_path(c).exists()


def test_a_product_of_other_inputs_takes_no_tile_of_a_stopped_repair(
    stored: tuple[Path, Path, Path], client: Client
) -> None:
    """Whose undamaged tiles are of the inputs as they were when C was made."""
    a, b, c = stored
    array = zarr.open_array(b, mode="r+")
    array[0, SHAPE[1] - 1] += 100
    for chunk in chunks_of(c):
        if chunk.name == "0":  # of columns that do not depend on that
            flip(chunk, c)

    def stop(event: Event) -> None:
        if isinstance(event, UnitDone) and event.name == "matmul":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repaired(client, stored, listener=stop)
    assert partial_path(c).exists()
    run = tw.matmul(a, b, c, overwrite=True, verify=False, cluster=client, device="cpu")
    assert 0 < run.resumed < run.plan.tile_count
    assert tw.verify(a, b, c, cluster=client).passed


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_another_stopped_run_is_not_mixed_with_it(
    dtype: str, stored: tuple[Path, Path, Path], client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Of other numbers of the same dtype too, whose record has the same fingerprint."""
    a, _, c = stored
    other = matrix(tmp_path / "other.zarr", (40, SHAPE[1]), rng, dtype)

    def stop(event: Event) -> None:
        if isinstance(event, UnitDone):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tw.matmul(
            a, other, c, overwrite=True, cluster=client, device="cpu", device_memory=MEMORY, listener=stop
        )
    growing = contents(partial_path(c))
    flip(chunks_of(c)[0], c)
    with pytest.raises(tw.OutputExistsError, match="finish that run"):
        repaired(client, stored)
    assert contents(partial_path(c)) == growing


def test_what_cannot_be_repaired_says_so(
    stored: tuple[Path, Path, Path], client: Client, tmp_path: Path
) -> None:
    a, b, c = stored
    flip(chunks_of(c)[0], c)
    metadata = c / "zarr.json"
    text = metadata.read_text()
    metadata.write_text(text.replace('"fill_value": 0.0', '"fill_value": 1.0'))
    with pytest.raises(tw.StoreError, match="fill_value is 1"):
        repaired(client, stored)
    metadata.write_text(text)
    memory = zarr.create_array({}, shape=SHAPE, chunks=(32, 32), dtype="f4")
    with pytest.raises(tw.OptionError, match="not in a local folder"):
        tw.repair(a, b, memory, cluster=client)


def test_the_command(stored: tuple[Path, Path, Path], client: Client) -> None:
    *_, c = stored
    before = contents(c)
    flip(chunks_of(c)[0], c)
    paths = [str(path) for path in stored]
    result = CliRunner().invoke(
        cli, ["repair", *paths, "--profile", client.scheduler.address, "--device", "cpu"]
    )
    assert result.exit_code == 0, result.output
    assert "1 of" in result.output
    assert "all bytes are those that were written" in result.output
    assert contents(c) == before
