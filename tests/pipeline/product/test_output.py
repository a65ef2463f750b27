"""A new array has its name when it is whole, one run writes to it, and what runs leave behind is found again."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import re
import shutil
import signal
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore

from tilewright.pipeline.errors import OutputError, OutputExistsError, RunEndedError, StoreError
from tilewright.pipeline.product import output as outputs
from tilewright.pipeline.product.in_place import check_given_output
from tilewright.pipeline.product.output_group import check_local_place
from tilewright.pipeline.store.arrays import name_of
from tilewright.pipeline.store.locks import in_turn, is_locked_by
from tilewright.pipeline.store.new import groups
from tilewright.pipeline.store.region_write import region_writes, write_region

LATE_SECONDS = 0.5
"""How long a thread waits for what only a fault would let come."""


def test_an_output_has_its_name_only_when_published(tmp_path: Path) -> None:
    final = tmp_path / "c.zarr"
    output = outputs.create_output(final, (4, 4), np.dtype("f4"), (2, 2), compressed=False, overwrite=False)
    write_region(output.array, (slice(0, 4), slice(0, 4)), np.ones((4, 4), "f4"))
    assert not final.exists()
    output.publish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.zarr"]
    with pytest.raises(OutputExistsError, match="exists"):
        outputs.check_output_free(final, overwrite=False)
    outputs.check_output_free(final, overwrite=True)
    again = outputs.create_output(final, (2, 2), np.dtype("f4"), (2, 2), compressed=True, overwrite=True)
    assert zarr.open_array(final).shape == (4, 4), "the old product stands until the new one is whole"
    again.publish()
    assert zarr.open_array(final).shape == (2, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.zarr"]


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_group_has_its_outputs_in_its_own_format_and_its_consolidated_metadata(
    zarr_format: Any, tmp_path: Path
) -> None:
    group = zarr.create_group(tmp_path / "store", zarr_format=zarr_format)
    group.create_group("inner").create_array("old", data=np.ones(3))
    with warnings.catch_warnings(action="ignore"):  # that no specification of format 3 knows of it
        zarr.consolidate_metadata(tmp_path / "store")
        for place in ("inner/c", "d", "new/e"):
            final = tmp_path / "store" / place
            begin(final, 1).publish()
            assert groups.renew_consolidated(final) == []
        seen = zarr.open_consolidated(tmp_path / "store")
        names = dict(seen.members(max_depth=None))
    assert sorted(names) == ["d", "inner", "inner/c", "inner/old", "new", "new/e"]
    assert names["d"].metadata.zarr_format == zarr_format
    assert (names["new/e"][...] == names["d"][...]).all()


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_runs_that_end_at_once_are_all_in_the_consolidated_metadata(zarr_format: Any, tmp_path: Path) -> None:
    store, names = tmp_path / "store", [f"c{number}" for number in range(8)]
    zarr.create_group(store, zarr_format=zarr_format)
    with warnings.catch_warnings(action="ignore"):
        zarr.consolidate_metadata(store)
    for name in names:
        begin(store / name, 1).publish()
    together = threading.Barrier(len(names))

    def renew(name: str) -> list[str]:
        together.wait()
        return groups.renew_consolidated(store / name)

    with ThreadPoolExecutor(len(names)) as pool:
        assert not any(pool.map(renew, names))
    with warnings.catch_warnings(action="ignore"):
        assert sorted(name for name, _ in zarr.open_consolidated(store).members()) == names


def test_a_group_that_another_process_keeps_is_told_of(tmp_path: Path) -> None:
    waited: list[float] = []
    told = pytest.raises(TimeoutError, match=r"has kept .* locked for 3 s")
    with in_turn(tmp_path), told, in_turn(tmp_path, 3, waited.append):
        raise AssertionError("it is not this one's turn")
    assert sum(waited) == pytest.approx(3)
    with in_turn(tmp_path, 3, waited.append):
        assert sum(waited) == pytest.approx(3)


def test_consolidated_metadata_that_cannot_be_renewed_are_told_of(tmp_path: Path) -> None:
    zarr.create_group(tmp_path / "store", zarr_format=2)
    (tmp_path / "store" / ".zmetadata").write_text("[1]")
    begin(tmp_path / "store" / "c", 1).publish()
    (told,) = groups.renew_consolidated(tmp_path / "store" / "c")
    assert f"renew them by zarr.consolidate_metadata('{tmp_path}/store')" in told


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_folders_between_a_group_and_an_output_become_groups(zarr_format: int, tmp_path: Path) -> None:
    store = tmp_path / "store"
    zarr.create_group(store, zarr_format=zarr_format)
    final = store / "a" / "b" / "c"
    output = begin(final, 1)
    (made,) = {".zgroup", "zarr.json"} & {path.name for path in store.iterdir()}
    assert not [path for path in (final.parent, final.parent.parent) if (path / made).exists()], "not before"
    assert output.publish() == []
    with warnings.catch_warnings(action="error" if zarr_format == 3 else "ignore"):
        members = dict(zarr.open_group(store, mode="r").members(max_depth=None))
    assert [type(members[name]) for name in ("a", "a/b")] == [zarr.Group] * 2
    assert {members[name].metadata.zarr_format for name in ("a", "a/b")} == {zarr_format}
    assert members["a/b/c"].metadata.zarr_format == zarr_format


def test_folders_around_an_output_that_no_group_holds_stay_folders(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "array", shape=(2, 2), dtype="f4")
    zarr.create_group(tmp_path / "group")
    for place in ("plain/c", "array/plain/c", "group/none/../../plain/c"):
        begin(tmp_path / place, 1, overwrite=True).publish()
    assert not list(tmp_path.rglob("plain/zarr.json"))


def test_a_folder_that_cannot_become_a_group_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zarr.create_group(tmp_path / "store")
    output = begin(tmp_path / "store" / "a" / "c", 1)

    def full(*given: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(zarr, "create_group", full)
    (told,) = output.publish()
    assert f"{tmp_path}/store/a cannot be made a group" in told
    assert zarr.open_array(tmp_path / "store" / "a" / "c", mode="r").shape == output.array.shape


@pytest.mark.parametrize("length", [213, 214, 230, 247])
@pytest.mark.parametrize("letter", ["x", "\N{GREEK SMALL LETTER ALPHA}"])
def test_a_product_of_any_name_that_fits_is_replaced(letter: str, length: int, tmp_path: Path) -> None:
    """The old one has a name of its own meanwhile, which must not be too long when all the work is done."""
    name = letter * (length // len(letter.encode()))
    final = tmp_path / (name + "x" * (length - len(name.encode())))
    for value in (1, 2):
        outputs.check_output_free(final, overwrite=True)
        output = begin(final, value, overwrite=True)
        output.publish()
        output.release()
    assert (zarr.open_array(final)[...] == 2).all()
    assert [path.name for path in tmp_path.iterdir()] == [final.name]


def begin(final: Path, value: float = 0, overwrite: bool = False) -> outputs.Output:
    """A run's output of 4 × 4, filled with a value."""
    output = outputs.create_output(
        final, (4, 4), np.dtype("f4"), (2, 2), compressed=False, overwrite=overwrite
    )
    output.array[...] = value
    return output


def replace_once_more(final: Path, value: float, *, overwrite: bool = True) -> list[str]:
    output = begin(final, value, overwrite=overwrite)
    try:
        return output.publish()
    finally:
        output.release()


@pytest.mark.parametrize(
    "name", ["same.csv", "same.parquet", "g.npy", "x.nc", "x.h5", "x.H5/", "s3://none/x.npz"]
)
def test_names_of_other_formats_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = rf"output: {name.rstrip('/')}.? ends as .* does, and what is written is a Zarr %s; name it [a-z]+\.zarr, "
    with pytest.raises(StoreError, match=told % "array"):
        outputs.check_output_free(name, overwrite=False)
    if "://" not in name:
        with pytest.raises(StoreError, match=told % "group"):
            check_local_place(name, {}, "kind", "pairs", overwrite=False)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("name", ["c.zarr", "c", "run.2026", "csv", ".npy"])
def test_any_other_name_is_taken(name: str, tmp_path: Path) -> None:
    outputs.check_output_free(tmp_path / name, overwrite=False)
    check_local_place(tmp_path / name, {}, "kind", "pairs", overwrite=False)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_cannot_be_removed_is_told_and_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final, order = tmp_path / "c.zarr", []
    replace_once_more(final, 1)
    output = begin(final, 2, overwrite=True)
    (outputs.partial_path(final) / "record").touch()

    def busy(folder: Path) -> None:
        order.append("old product")
        raise OSError(errno.EBUSY, "Device or resource busy", str(folder / "c"))

    def settle(folder: Path) -> None:
        order.append("record")
        (folder / "record").unlink()

    with monkeypatch.context() as patch:
        patch.setattr(outputs.shutil, "rmtree", busy)
        (told,) = output.publish(settle)
    output.release()
    assert order == ["record", "old product"]
    assert (zarr.open_array(final)[...] == 2).all()
    assert names(final) == ["c", "zarr.json"]
    (left,) = [name for name in names(tmp_path) if name != "c.zarr"]
    assert re.search(
        rf"c\.zarr is replaced, .* left at .*{re.escape(left)}: .*busy.*; once .*, remove it", told
    )
    (tmp_path / left / "zarr.json").unlink()  # half of it was removed
    theirs = ["c.zarr.replaced", f"c.zarr.{'0' * 32}.replaced", left.replace("c.zarr", "d.zarr")]
    for name in theirs:
        (tmp_path / name).mkdir()
    assert replace_once_more(final, 3) == []
    assert names(tmp_path) == sorted(["c.zarr", *theirs]), (
        "what is certainly ours is removed, and nothing else"
    )


@pytest.fixture
def two_renames(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that cannot exchange names."""
    monkeypatch.setattr(outputs, "exchange", lambda one, other: False)


KILLED_AT = {
    "before the exchange": (outputs, "exchange", False),
    "behind the exchange": (outputs, "exchange", True),
    "behind the renaming of the old": (Path, "rename", True),
    "while the old is removed": (shutil, "rmtree", False),
    "behind all": (shutil, "rmtree", True),
}
"""The function around which the process ends, and whether behind it."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("killed_at", KILLED_AT)
def test_a_product_that_is_replaced_stands_there_whole_at_every_moment(
    killed_at: str, tmp_path: Path
) -> None:
    """A process is killed there, as a power cut would; what stands under the name is the old C or the new one, whole,
    and the same command ends with the new one, and nothing beside it."""
    final = tmp_path / "c.zarr"
    replace_once_more(final, 1)
    owner, name, behind = KILLED_AT[killed_at]
    output = begin(final, 2, overwrite=True)
    child = os.fork()
    if child == 0:  # which ends without a word, and gives up no lock but by its end
        real = getattr(owner, name)

        def killed(*arguments: Any, **options: Any) -> None:
            if behind:
                real(*arguments, **options)
            os._exit(7)

        setattr(owner, name, killed)
        with suppress(BaseException):
            output.publish()
        os._exit(8)
    output.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    expected = 1 if killed_at == "before the exchange" else 2
    assert (zarr.open_array(final)[...] == expected).all()
    outputs.check_growing_place(final)
    assert replace_once_more(final, 3) == []
    assert (zarr.open_array(final)[...] == 3).all()
    assert names(tmp_path) == ["c.zarr"]
    assert names(final) == ["c", "zarr.json"]


def test_there_is_no_moment_without_a_product_under_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks at it at any call that changes names finds it."""
    final, looks = tmp_path / "c.zarr", 0
    replace_once_more(final, 1)
    output = begin(final, 2, overwrite=True)

    def looked_at(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal looks
            found = function(*arguments, **options)
            assert zarr.open_array(final, mode="r").shape == (4, 4)
            looks += 1
            return found

        return call

    monkeypatch.setattr(outputs, "exchange", looked_at(outputs.exchange))
    for name in ("rename", "unlink", "touch"):
        monkeypatch.setattr(Path, name, looked_at(getattr(Path, name)))
    output.publish()
    output.release()
    assert looks > 3


@pytest.mark.parametrize("overwrite", [True, False])
def test_what_a_run_that_was_killed_between_renames_set_aside(
    overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_renames: None
) -> None:
    final = tmp_path / "c.zarr"
    replace_once_more(final, 1)
    output = begin(final, 2, overwrite=True)
    rename = Path.rename

    class Killed(BaseException):
        """Nothing is renamed any more behind it."""

    def killed(path: Path, target: Path) -> Path:
        if path != final:
            raise Killed
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(Killed):
            output.publish()
    output.release()
    left, growing = names(tmp_path)
    assert growing == "c.zarr.partial"
    told = replace_once_more(final, 3, overwrite=overwrite)
    assert names(tmp_path) == (["c.zarr"] if overwrite else sorted([left, "c.zarr"]))
    assert (zarr.open_array(final)[...] == 3).all()
    if not overwrite:  # nobody asked this run to remove anything
        assert re.search(rf"{re.escape(left)} is an older product .* it is kept", *told)
        assert (zarr.open_array(tmp_path / left)[...] == 1).all()


@pytest.mark.parametrize("at", ["set aside", "named"])
@pytest.mark.parametrize("comes", ["before", "behind"])
def test_ctrl_c_at_any_rename_leaves_a_product_under_the_name(
    at: str, comes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_renames: None
) -> None:
    final = tmp_path / "c.zarr"
    replace_once_more(final, 1)
    output = begin(final, 2, overwrite=True)
    rename, renamed = Path.rename, []

    def interrupted(path: Path, target: Path) -> Path:
        renamed.append(path)
        now = len(renamed) == (1 if at == "set aside" else 2)
        if now and comes == "before":
            raise KeyboardInterrupt
        found = rename(path, target)
        if now:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            output.publish()
    output.release()
    finished = at == "named" and comes == "behind"
    assert (zarr.open_array(final)[...] == (2 if finished else 1)).all()
    if not finished:
        assert names(tmp_path) == ["c.zarr", "c.zarr.partial"]
    assert replace_once_more(final, 3) == []
    assert names(tmp_path) == ["c.zarr"]


@pytest.mark.parametrize("by", [OSError, KeyboardInterrupt])
def test_a_product_that_cannot_be_put_back_is_not_lost_sight_of(
    by: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_renames: None
) -> None:
    final = tmp_path / "c.zarr"
    replace_once_more(final, 1)
    output = begin(final, 2, overwrite=True)
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path == outputs.partial_path(final) and by is KeyboardInterrupt:
            raise KeyboardInterrupt
        if path != final:
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(StoreError if by is OSError else KeyboardInterrupt) as caught:
        output.publish()
    output.release()
    told = str(caught.value) if by is OSError else "\n".join(caught.value.__notes__)
    assert re.search(r"what stood there is at .*\.replaced, and cannot be", told)


def before(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, act: Callable[[], None]) -> None:
    """Have another run act just before the next call of a function."""
    real = getattr(module, name)

    def once(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(module, name, real)
        act()
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, once)


def test_of_two_runs_that_begin_at_once_one_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is locked before the array is in it; else another run took it for one that was left behind."""
    final, refused = tmp_path / "c.zarr", []

    def other() -> None:
        with pytest.raises(
            OutputExistsError, match=r"another run is writing .*c\.zarr\.partial; wait"
        ) as caught:
            begin(final)
        refused.append(caught.value)

    before(monkeypatch, zarr, "create_array", other)
    output = begin(final, 7)
    assert refused
    output.publish()
    output.release()
    np.testing.assert_array_equal(zarr.open_array(final)[...], np.full((4, 4), 7))
    assert [path.name for path in tmp_path.iterdir()] == ["c.zarr"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre has none where it is mounted without; "Function not implemented" told nobody what to do."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    said = r"cannot create .*no locks on folders.*Lustre: -o flock, or localflock.*or choose another place"
    with pytest.raises(StoreError, match=said):
        begin(tmp_path / "c", 1)


def test_a_child_that_was_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    output = begin(tmp_path / "c.zarr")
    assert output.lock is not None
    inherited = os.dup(output.lock)  # fork copies a descriptor in the same way
    try:
        output.release()
        begin(tmp_path / "c.zarr").release()
    finally:
        os.close(inherited)


@pytest.mark.parametrize("how", ["create", "resume"])
@pytest.mark.parametrize("became", ["published", "removed", "replaced", "written"])
def test_a_folder_that_goes_away_before_it_is_locked(
    became: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock would keep nobody out of the one that came in its place."""
    final = tmp_path / "c.zarr"
    left = begin(final, 1)  # holds the lock until the other run would ask for it
    others = []

    def other() -> None:
        if became == "published":
            left.publish()
        else:
            left.remove()
        left.release()
        if became in ("replaced", "written"):
            others.append(begin(final, 2))
        if became == "replaced":
            others.pop().release()

    def take() -> outputs.Output | None:
        if how == "resume":
            return outputs.resume_output(final, overwrite=False)
        return outputs.create_output(
            final, (4, 4), np.dtype("f4"), (2, 2), compressed=False, overwrite=False
        )  # fmt: skip

    before(monkeypatch, fcntl, "flock", other)
    if became == "written":
        with pytest.raises(OutputExistsError, match="another run is writing"):
            take()
        np.testing.assert_array_equal(others[0].array[...], np.full((4, 4), 2))
        others[0].release()
        return
    if became == "published" and how == "create":
        with pytest.raises(OutputExistsError, match=r"c\.zarr exists; choose another path"):
            take()
        assert [path.name for path in tmp_path.iterdir()] == ["c.zarr"], "nothing empty is left beside it"
        return
    output = take()
    if how == "resume" and became != "replaced":
        assert output is None
        return
    assert output is not None
    assert output.lock is not None
    np.testing.assert_array_equal(output.array[...], np.full((4, 4), 2 if how == "resume" else 0))
    assert is_locked_by(output.lock, outputs.partial_path(final))
    with pytest.raises(OutputExistsError, match="another run is writing"):
        begin(final)
    output.release()


@pytest.mark.parametrize("done", [False, True])
def test_a_product_that_is_being_replaced_is_still_one(
    done: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between setting the old one aside and renaming the new one nothing stands there."""
    final = tmp_path / "c.zarr"
    for value in (1, 2):
        output = begin(final, value, overwrite=True)
        if value == 1:
            output.publish()
            output.release()
    real = outputs.is_array_folder

    def in_between(path: Path) -> bool:
        monkeypatch.setattr(outputs, "is_array_folder", real)
        path.rename(tmp_path / "aside")
        try:
            return real(path)
        finally:
            if done:
                output.publish()

    monkeypatch.setattr(outputs, "is_array_folder", in_between)
    outputs.check_output_free(final, overwrite=True)
    assert final.exists() == done
    output.release()


@pytest.mark.parametrize("killed_at", ["chunks", "metadata", "halves"])
def test_a_run_killed_at_its_beginning_leaves_what_the_next_replaces(
    killed_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "c.zarr"
    begin(final, 1).release()
    growing = outputs.partial_path(final)
    (growing / "record").touch()

    def killed(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    if killed_at == "halves":
        for name in ("c", "record", "zarr.json"):
            path = growing / name
            path.rename(tmp_path / name)
        (growing / f"zarr.{'0' * 32}.partial").touch()
    else:
        with monkeypatch.context() as patch:
            patch.setattr(
                *((outputs.shutil, "rmtree") if killed_at == "chunks" else (zarr, "create_array")), killed
            )
            with pytest.raises(KeyboardInterrupt):
                begin(final)
        assert not (growing / "record").exists(), "it speaks of chunks that are not there"
        assert outputs.MARK_NAME in names(growing), "without it the folder is not known to be ours"
    output = begin(final, 2)
    assert output.drafts is not None
    assert names(growing) == sorted(["c", outputs.MARK_NAME, output.drafts, "zarr.json"])
    output.release()


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_amid_writing_metadata_leaves_what_the_next_run_replaces(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes to the thread that waits, and zarr's own go on."""
    final = tmp_path / "c.zarr"
    set_metadata, stopped, written = LocalStore.set, threading.Event(), threading.Event()

    async def slow(store: LocalStore, key: str, value: Any) -> None:
        for _ in range(times):
            signal.pthread_kill(main, signal.SIGINT)
            stopped.wait(LATE_SECONDS)  # for good where the run waits for this
        await set_metadata(store, key, value)
        written.set()

    main = threading.main_thread().ident
    assert main == threading.get_ident()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background commands begin deaf to it
    try:
        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, "set", slow)
            with pytest.raises(KeyboardInterrupt):
                begin(final)
            assert written.is_set() or times > 1, "nobody keeps other runs out any more"
            stopped.set()
            assert written.wait(60)
    finally:
        signal.signal(signal.SIGINT, before)
    outputs.check_growing_place(final)
    begin(final, 2).publish()
    assert (zarr.open_array(final)[...] == 2).all()


def test_a_growing_output_that_is_not_ours_stays(tmp_path: Path) -> None:
    final = tmp_path / "c.zarr"
    growing = outputs.partial_path(final)
    growing.write_text("a file")
    with pytest.raises(OutputExistsError, match="holds something else; move it away"):
        begin(final)
    growing.unlink()
    zarr.create_array(tmp_path / "theirs", shape=(2,), chunks=(2,), dtype="f4")
    growing.symlink_to(tmp_path / "theirs")
    with pytest.raises(OutputExistsError, match="holds something else; move it away"):
        begin(final)
    assert (tmp_path / "theirs" / "zarr.json").exists()
    growing.unlink()
    growing.symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputExistsError, match="holds something else; move it away"):
        begin(final)
    growing.unlink()
    zarr.create_group(growing)
    with pytest.raises(OutputExistsError, match="holds something else; move it away"):
        begin(final)
    assert (growing / "zarr.json").exists()
    shutil.rmtree(growing)
    own = zarr.create_array(growing, shape=(2,), chunks=(2,), dtype="f4")
    own[...] = 5
    with pytest.raises(OutputExistsError, match="holds something else; move it away"):
        begin(final)
    np.testing.assert_array_equal(zarr.open_array(growing)[...], [5, 5])
    with pytest.raises(OutputExistsError, match="holds something else; move it away"):
        outputs.check_growing_place(final)
    begun = begin(tmp_path / "new" / "folders" / "c.zarr", 3)
    begun.remove()
    begun.remove()
    begun.release()
    assert not list((tmp_path / "new" / "folders").iterdir())


def test_a_growing_output_that_became_a_link_is_not_resumed(tmp_path: Path) -> None:
    """It would be the link that gets the output's name."""
    final = tmp_path / "c.zarr"
    begin(final, 1).release()
    growing = outputs.partial_path(final)
    growing.symlink_to(growing.rename(tmp_path / "elsewhere"))
    with pytest.raises(OutputExistsError, match="holds something else; move it away"):
        outputs.resume_output(final, overwrite=False)
    assert (zarr.open_array(tmp_path / "elsewhere")[...] == 1).all()


def test_halves_of_chunks_are_looked_for_in_each_folder_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product may have a million chunks on storage that is slow to list them."""
    listed: list[str] = []
    scandir = os.scandir

    def counted(folder: Any = ".") -> Any:
        listed.append(os.fspath(folder))
        return scandir(folder)

    folders = [tmp_path, *(tmp_path / "c" / str(row) for row in range(3))]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("0", f"0.{'0a' * 16}.partial", "my.partial"):
            (folder / name).touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", counted)
        outputs.remove_drafts(tmp_path)
    assert sorted(listed) == sorted(str(folder) for folder in [*folders, tmp_path / "c"])
    for folder in folders:
        assert {path.name for path in folder.iterdir()} - {"c"} == {"0", "my.partial"}


ONES = np.ones((2, 2), "f4")
REGION = (slice(0, 4), slice(0, 4))


def taken_over(final: Path, how: str) -> outputs.Output:
    """Another run's output in the same place, with chunks of its own in it."""
    if how == "begun anew":
        output = begin(final)
    else:
        resumed = outputs.resume_output(final, overwrite=False)
        assert resumed is not None
        output = resumed
    for piece in region_writes(output.array, REGION, output.drafts):
        piece.write([7 * ONES])
    return output


@pytest.mark.parametrize("how", ["begun anew", "resumed"])
@pytest.mark.parametrize("when", ["before a chunk", "in a chunk", "behind a chunk's last byte"])
@pytest.mark.parametrize("by", ["bands", "a loop"])
def test_a_worker_that_a_dead_run_left_writes_nothing_into_the_next(
    how: str, when: str, by: str, tmp_path: Path
) -> None:
    """It was cut off, or stopped, when the next run took the output over, and goes on later."""
    final = tmp_path / "c.zarr"
    dead = begin(final)
    others: list[outputs.Output] = []

    def take_over() -> None:
        others.append(taken_over(final, how))

    def bands() -> Any:
        yield ONES[:1]
        if when == "in a chunk":
            take_over()
        yield ONES[1:]
        if when == "behind a chunk's last byte":
            take_over()

    def fill(descriptor: int, _: Any) -> tuple[bool, int | None]:
        os.pwrite(descriptor, b"".join(band.tobytes() for band in bands()), 0)
        return True, None

    piece = region_writes(dead.array, REGION, dead.drafts)[0]
    dead.release()
    if when == "before a chunk":
        take_over()
    with pytest.raises(
        RunEndedError, match=r"chunk \(0, 0\) of .*c\.zarr\.partial: another run has taken it over"
    ):
        piece.write(bands(), fill if by == "a loop" else None)
    (other,) = others
    assert (zarr.open_array(outputs.partial_path(final))[...] == 7).all()
    assert other.publish() == []
    other.release()
    assert (zarr.open_array(final)[...] == 7).all()
    assert names(final) == ["c", "zarr.json"]
    assert names(final / "c" / "0") == ["0", "1"]
    late = region_writes(dead.array, REGION, dead.drafts)[0]
    with pytest.raises(StoreError, match="there is no Zarr array at"):
        late.write([ONES])
    assert names(tmp_path) == ["c.zarr"]


def test_a_run_that_does_not_see_the_lock_of_another_ends_it(tmp_path: Path) -> None:
    """As NFS has it, for runs of two hosts: the first must not give the second's tiles its name."""
    final = tmp_path / "c.zarr"
    first = begin(final, 1)
    assert first.lock is not None
    fcntl.flock(first.lock, fcntl.LOCK_UN)
    second = taken_over(final, "begun anew")
    with pytest.raises(OutputExistsError, match=r"another run has taken .*c\.zarr\.partial over"):
        first.publish()
    first.release()
    assert second.publish() == []
    second.release()
    assert (zarr.open_array(final)[...] == 7).all()


def test_of_runs_without_shared_locks_that_begin_at_once_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test under Slurm met it: the other's array came between the emptying of the folder and the making of ours."""
    final = tmp_path / "c.zarr"
    growing = outputs.partial_path(final)

    def other(path: Path) -> None:
        empty(path)
        zarr.create_array(path, shape=(4, 4), chunks=(2, 2), dtype="f8")

    empty = outputs._empty
    monkeypatch.setattr(outputs, "_empty", other)
    with pytest.raises(OutputExistsError, match=r"another run has taken .*c\.zarr\.partial in this moment"):
        begin(final, 1)
    assert zarr.open_array(growing, mode="r").shape == (4, 4), "the other's is left alone"


def test_a_draft_of_a_version_without_folders_for_runs_is_gone_on_with(tmp_path: Path) -> None:
    final = tmp_path / "c.zarr"
    old = begin(final, 3)
    old.release()
    assert old.drafts is not None
    (outputs.partial_path(final) / old.drafts).rmdir()
    resumed = outputs.resume_output(final, overwrite=False)
    assert resumed is not None
    assert (resumed.array[...] == 3).all()
    resumed.publish()
    resumed.release()
    assert names(final) == ["c", "zarr.json"]


def test_finished_tiles_outlive_a_disk_that_has_no_room_for_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "c.zarr"
    begin(final, 3).release()

    mkdir = Path.mkdir

    def full(path: Path, *args: Any, **kwargs: Any) -> None:
        if not path.exists():
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        mkdir(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        with pytest.raises(StoreError, match=r"cannot go on at .*c\.zarr\.partial: .*No space left"):
            outputs.resume_output(final, overwrite=False)
    assert (zarr.open_array(outputs.partial_path(final))[...] == 3).all()
    begin(final).release()  # the lock was given up


def test_what_nfs_keeps_for_a_stopped_process_keeps_no_run_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It renames a file that is removed while a process of this host has it open."""
    final = tmp_path / "c.zarr"
    dead = begin(final)
    dead.release()
    assert dead.drafts is not None
    kept = outputs.partial_path(final) / dead.drafts / ".nfs0001"
    kept.touch()
    unlink = Path.unlink

    def busy(path: Path, missing_ok: bool = False) -> None:
        if path.name == kept.name:
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", busy)
    other = taken_over(final, "begun anew")
    (told,) = other.publish()
    other.release()
    left = f"{dead.drafts}.ended"
    assert (
        told
        == f"{final} is whole, but holds {left}, which no reader looks at: a process of this host has a file open there"
    )
    assert names(final) == sorted(["c", left, "zarr.json"])


def test_a_given_output_is_checked(tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path / "c.zarr", shape=(4, 4), chunks=(2, 2), dtype="f4")
    check_given_output(array, (4, 4), np.dtype("f4"))
    with pytest.raises(OutputError, match="shape"):
        check_given_output(array, (4, 5), np.dtype("f4"))
    with pytest.raises(OutputError, match=r"holds float32; .* float64: .*, or pass dtype='float32'$"):
        check_given_output(array, (4, 4), np.dtype("f8"))
    with pytest.raises(OutputError, match=r"give an array of complex128$"):  # which may not become float32
        check_given_output(array, (4, 4), np.dtype("c16"))
    with pytest.raises(OutputError, match="reading only"):
        check_given_output(zarr.open_array(tmp_path / "c.zarr", mode="r"), (4, 4), np.dtype("f4"))


@pytest.mark.parametrize("written", [False, True])
def test_an_open_array_that_takes_no_chunks_is_found_out_at_once(
    written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """zarr-python opens it for writing; the file system refuses."""
    array = zarr.create_array(tmp_path / "c.zarr", shape=(4, 4), chunks=(2, 2), dtype="f4")
    if written:
        array[...] = 1
    before = sorted((tmp_path / "c.zarr").rglob("*"))
    tried: list[Path] = []

    def refused(path: Path, *args: Any, **kwargs: Any) -> None:
        tried.append(path.parent)
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    def create() -> outputs.Output:
        return outputs.create_output(
            array, (4, 4), np.dtype("f4"), (2, 2), compressed=False, overwrite=False
        )  # fmt: skip

    with monkeypatch.context() as patch:
        patch.setattr(Path, "touch", refused)
        with pytest.raises(StoreError, match=r"cannot write to .*c\.zarr: .*Read-only file system"):
            create()
    assert tried == [tmp_path / "c.zarr" / "c" / "0" if written else tmp_path / "c.zarr"]
    create().release()
    assert sorted((tmp_path / "c.zarr").rglob("*")) == before


@pytest.mark.parametrize("form", ["path", "resumed", "open array"])
def test_an_output_at_a_relative_path_is_written_by_workers_elsewhere(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    target: Any = Path("c")
    if form == "open array":
        target = zarr.create_array("c", shape=(4, 4), chunks=(2, 2), dtype="f4")
    output = outputs.create_output(target, (4, 4), np.dtype("f4"), (2, 2), compressed=False, overwrite=False)
    if form == "resumed":
        output.release()
        resumed = outputs.resume_output(target, overwrite=False)
        assert resumed is not None
        output = resumed
    monkeypatch.chdir("elsewhere")
    array = pickle.loads(pickle.dumps(output.array))
    for piece in region_writes(array, (slice(0, 4), slice(0, 4))):
        piece.write([np.full((2, 2), 5, "f4")])
    monkeypatch.chdir(tmp_path)
    assert name_of(output.array) == ("c" if form == "open array" else "c.partial")
    output.publish()
    output.release()
    assert (zarr.open_array("c")[...] == 5).all()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_place_where_an_output_grows_is_looked_at_before_any_work(tmp_path: Path) -> None:
    final = tmp_path / "c.zarr"
    growing = outputs.partial_path(final)
    outputs.check_growing_place(final)
    growing.mkdir()
    outputs.check_growing_place(final)
    (growing / "mine").touch()
    with pytest.raises(OutputExistsError, match="holds something else"):
        outputs.check_growing_place(final)
    (growing / outputs.MARK_NAME).touch()
    outputs.check_growing_place(final)
    moved = growing.rename(tmp_path / "elsewhere")
    growing.symlink_to(moved)
    with pytest.raises(OutputExistsError, match="holds something else"):
        outputs.check_growing_place(final)
    shutil.rmtree(moved)
    with pytest.raises(OutputExistsError, match="holds something else"):
        outputs.check_growing_place(final)
    growing.unlink()
    growing.write_text("a file")
    with pytest.raises(OutputExistsError, match="holds something else"):
        outputs.check_growing_place(final)


def test_who_lists_a_folder_whose_run_just_ends_looks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listings = iter([["c", "zarr.json"], []])
    monkeypatch.setattr(outputs.os, "listdir", lambda path: next(listings))
    outputs.check_growing_place(tmp_path / "c.zarr")
    assert next(listings, None) is None


@pytest.mark.parametrize("below", ["c.zarr", "more/c.zarr"])
def test_an_output_in_a_folder_that_is_a_link_to_nowhere_is_refused(below: str, tmp_path: Path) -> None:
    (tmp_path / "results").symlink_to(tmp_path / "not mounted")
    final = tmp_path / "results" / below
    with pytest.raises(StoreError, match=r"results is a link to .*not mounted, and there is no such folder"):
        outputs.check_output_free(final, overwrite=False)
    with pytest.raises(StoreError, match="cannot create"):  # the link came later
        begin(final)
    (tmp_path / "not mounted").mkdir()
    begin(final).release()


@pytest.mark.parametrize("metadata", ["[]", "null", "{", "5"])
def test_a_growing_output_whose_metadata_are_none_is_begun_anew(metadata: str, tmp_path: Path) -> None:
    final = tmp_path / "c.zarr"
    begin(final).release()
    (outputs.partial_path(final) / "zarr.json").write_text(metadata)
    assert outputs.resume_output(final, overwrite=False) is None
    begin(final).release()


@pytest.mark.parametrize("name", [".", "./", "..", "there/..", "/", "file://."])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_output_without_a_name_of_its_own_is_refused(
    name: str, overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an array stands there, which would be set aside under a name like its own."""
    zarr.create_array(tmp_path, shape=(2,), chunks=(2,), dtype="f4")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match=r"^output: .* ends in no name of its own, .* as in \.\./C\.zarr$"):
        outputs.check_output_free(name, overwrite=overwrite)


@pytest.mark.parametrize("what", ["zarr.json", "folder"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EMFILE, errno.EACCES])
def test_a_growing_output_that_cannot_be_read_now_is_kept(
    number: int, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "c.zarr"
    begin(final, 3).release()
    growing = outputs.partial_path(final)
    before = sorted(growing.rglob("*"))

    def failing(*arguments: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(*((zarr, "open_array") if what == "zarr.json" else (outputs.os, "open")), failing)
        match = rf"c\.zarr\.partial: .*{os.strerror(number)}; its finished tiles are kept: .*--no-resume"
        with pytest.raises(StoreError, match=match):
            outputs.resume_output(final, overwrite=False)
    assert sorted(growing.rglob("*")) == before
    output = outputs.resume_output(final, overwrite=False)
    assert output is not None, "and its lock is free"
    output.release()


@pytest.mark.parametrize("name", ["~", "~/c"])
@pytest.mark.parametrize("form", [str, Path])
def test_what_the_refusal_of_a_tilde_advises_works(
    name: str, form: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(
        StoreError, match=r"os\.path\.expanduser\(path\), or os\.path\.abspath\(path\) for a folder"
    ):
        outputs.check_output_free(form(name), overwrite=False)
    for advised in (os.path.expanduser, os.path.abspath):
        outputs.check_output_free(f"{advised(form(name))}", overwrite=False)


def test_a_folder_that_may_not_be_made_beside_an_output_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *arguments: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with (
        pytest.raises(
            StoreError, match=r"cannot write to .*C\.zarr.*denied: .*; give this process that permission"
        ),
        outputs.growing_folder(tmp_path / "C.zarr", lambda growing: False),
    ):
        pytest.fail("the folder is not there")
