"""Mistakes in what is asked for, each with one clear error before anything is written."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import dask
import dask.array
import numpy as np
import pytest
import zarr
from distributed import Client
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.zip import ZipFileSystem
from zarr.storage import FsspecStore, LoggingStore, MemoryStore, ZipStore

import tilewright as tw
from tests.workflows.products import (
    put,
)
from tilewright.pipeline.errors import (
    CorpusError,
    DTypeError,
    OptionError,
    OutputError,
    OutputExistsError,
    PlanError,
    ShapeError,
    StoreError,
)
from tilewright.pipeline.events import Event
from tilewright.pipeline.product import output as outputs


@pytest.mark.parametrize(
    ("name", "value"), [("retries", "nonsense"), ("share-panels", "nonsense"), ("tiles", None)]
)
def test_a_wrong_setting_is_found_before_anything_is_made(
    name: str,
    value: Any,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    events: list[Event],
) -> None:
    _, _, a_path, b_path = factors
    with (
        dask.config.set({f"tilewright.{name}": value}),
        pytest.raises(OptionError, match=f"tilewright.{name}"),
    ):
        tw.matmul(
            a_path, b_path, tmp_path / "out" / "c", cluster=client, device="cpu", listener=events.append
        )
    assert not (tmp_path / "out").exists()
    assert events == []


class TestBadInput:
    """Each mistake gets one clear error, before anything is written."""

    def check(self, tmp_path: Path, error: type[Exception], match: str, *args: Any, **options: Any) -> None:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(error, match=match) as caught:
            tw.matmul(*args, **options)
        assert isinstance(caught.value, tw.TilewrightError)
        assert sorted(tmp_path.rglob("*")) == before, "something was written"

    def test_missing(self, client: Client, tmp_path: Path) -> None:
        a = put(tmp_path / "a", np.ones((2, 2)))
        self.check(tmp_path, StoreError, "B: there is no", a, tmp_path / "b", tmp_path / "c", cluster=client)

    def test_inner_sides_with_a_hint(self, client: Client, tmp_path: Path) -> None:
        a, b = put(tmp_path / "a", np.ones((2, 3))), put(tmp_path / "b", np.ones((4, 3)))
        self.check(
            tmp_path, ShapeError, r"3 columns.*4 rows.*transposing B", a, b, tmp_path / "c", cluster=client
        )

    def test_output_exists(self, client: Client, tmp_path: Path) -> None:
        a = put(tmp_path / "a", np.ones((2, 2)))
        put(tmp_path / "c", np.ones((3, 3)))
        self.check(tmp_path, OutputExistsError, "overwrite", a, a, tmp_path / "c", cluster=client)

    def test_output_is_an_input(self, client: Client, tmp_path: Path) -> None:
        a, b = put(tmp_path / "a", np.ones((2, 2))), put(tmp_path / "b", np.ones((2, 2)))
        self.check(tmp_path, OutputError, "also A", a, b, a, cluster=client, overwrite=True)
        self.check(
            tmp_path, OutputError, "also B", a, b, tmp_path / "." / "b", cluster=client, overwrite=True
        )

    def test_output_is_a_vector_that_is_read(self, tmp_path: Path) -> None:
        square = put(tmp_path / "a", np.ones((2, 2)))
        vector = put(tmp_path / "v", np.ones(2), chunks=(2,))
        asked: list[tuple[Any, str, dict[str, Any]]] = [
            *(
                (tw.matmul, name, {"b": square, name: vector})
                for name in ("row_scale", "column_scale", "row_offset", "column_offset")
            ),
            (tw.gram, "weights", {"weights": vector}),
            (tw.cov, "weights", {"weights": zarr.open_array(vector)}),
            (tw.gram, "center['rows']", {"center": {"rows": vector}}),
            (tw.gram, "scale['columns']", {"scale": {"columns": vector}}),
        ]
        for function, name, options in asked:
            with pytest.raises(OutputError, match=re.escape(f"is also {name}; ")):
                function(square, out=vector, overwrite=True, **options)
            assert zarr.open_array(vector)[...].tolist() == [1, 1], name

    def test_a_group_is_not_replaced(self, client: Client, tmp_path: Path) -> None:
        put(tmp_path / "group" / "a", np.ones((2, 2)))
        zarr.open_group(tmp_path / "group", mode="a")
        a = put(tmp_path / "a", np.ones((2, 2)))
        self.check(
            tmp_path,
            OutputExistsError,
            "not a Zarr array",
            a,
            a,
            tmp_path / "group",
            cluster=client,
            overwrite=True,
        )

    def test_output_and_input_one_inside_the_other(self, client: Client, tmp_path: Path) -> None:
        a = put(tmp_path / "a", np.ones((2, 2)))
        self.check(tmp_path, OutputError, "inside the other", a, a, a / "inner", cluster=client)

    def test_the_output_would_grow_where_an_input_lies(self, client: Client, tmp_path: Path) -> None:
        a = put(tmp_path / "a", np.ones((2, 2)))
        b = put(tmp_path / "c.partial", np.ones((2, 2)))
        inner = put(tmp_path / "d.partial" / "inner", np.ones((2, 2)))
        self.check(
            tmp_path, OutputError, "would grow at .*where B lies", a, b, tmp_path / "c", cluster=client
        )
        self.check(tmp_path, OutputError, "where A lies", inner, a, tmp_path / "d", cluster=client)
        assert (zarr.open_array(b)[...] == 1).all()

    def test_an_open_output_is_an_input(
        self, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        put(tmp_path / "a", np.ones((2, 2)))
        out = zarr.open_array(tmp_path / "a", mode="r+")
        self.check(tmp_path, OutputError, "also A", "a", "a", out, cluster=client)

    @pytest.mark.parametrize("named", ["path", "file", "local", "open"])
    @pytest.mark.parametrize("inside", ["", "/within"])
    def test_an_output_by_url_is_an_input(
        self, client: Client, tmp_path: Path, named: str, inside: str
    ) -> None:
        """Replacing what is there would remove the factor before it is read."""
        b = put(tmp_path / "b", np.ones((2, 2)))
        put(tmp_path / "a", np.ones((2, 2)))
        a: Any = {"path": tmp_path / "a", "open": zarr.open_array(f"local://{tmp_path}/a", mode="r")}.get(
            named
        )
        a = f"{named}://{tmp_path}/a" if a is None else a
        out = f"simplecache::file://{tmp_path}/a{inside}"
        match = "one inside the other" if inside else "also A"
        self.check(tmp_path, OutputError, match, a, b, out, cluster=client, overwrite=True)
        assert (zarr.open_array(tmp_path / "a")[...] == 1).all()

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_a_link_is_no_place_for_an_output(self, client: Client, tmp_path: Path, overwrite: bool) -> None:
        a = put(tmp_path / "a", np.ones((2, 2)))
        put(tmp_path / "old", np.zeros((2, 2)))
        for name, target in (("link", "old"), ("broken", "nowhere")):
            (tmp_path / name).symlink_to(target)
            self.check(
                tmp_path, OutputExistsError, f"is a link to {target}; name what it leads to", a, a, tmp_path / name,
                cluster=client, overwrite=overwrite,
            )  # fmt: skip

    @pytest.mark.parametrize(
        ("name", "match"),
        [
            ("", "empty name"),
            ("~/c", "begins with a tilde"),
            ("x" * 300, "cannot look at x+: .*too long"),
            ("x" * 250, "cannot look at x+: .*too long.*partial"),  # it grows under a longer one
            ("a\0b", "is no path: it has a null byte"),
            ("file/c", "cannot look at file/c: .*Not a directory"),
        ],
    )
    def test_names_that_no_output_can_have(
        self, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, match: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        a = put(tmp_path / "a", np.ones((2, 2)))
        (tmp_path / "file").write_text("no folder")
        for overwrite in (False, True):
            self.check(
                tmp_path, StoreError, f"output: .*{match}", a, a, name, cluster=client, overwrite=overwrite
            )

    def test_a_growing_output_of_another_run_or_of_somebody_else(
        self, client: Client, tmp_path: Path
    ) -> None:
        a = put(tmp_path / "a", np.ones((2, 2)))
        growing = put(tmp_path / "c.partial", np.ones((2, 2)))
        self.check(tmp_path, OutputExistsError, "holds something else", a, a, tmp_path / "c", cluster=client)
        (growing / outputs.MARK_NAME).touch()  # as runs of ours do
        lock = outputs.lock_folder(growing)
        self.check(
            tmp_path, OutputExistsError, "another run is writing", a, a, tmp_path / "c", cluster=client
        )
        os.close(lock)
        tw.matmul(a, a, tmp_path / "c", cluster=client, device="cpu")
        (tmp_path / "d.partial").mkdir()
        (tmp_path / "d.partial" / "thesis.txt").write_text("ten years of work")
        self.check(tmp_path, OutputExistsError, "holds something else", a, a, tmp_path / "d", cluster=client)

    def test_a_result_that_zarr_cannot_store(self, client: Client, tmp_path: Path) -> None:
        a = put(tmp_path / "a", np.ones((2, 2), "f4"))
        self.check(
            tmp_path, DTypeError, "zarr-python has no such type", a, a, tmp_path / "c", cluster=client, dtype="bfloat16"
        )  # fmt: skip

    def test_types_that_a_message_allows_are_taken(self, client: Client, tmp_path: Path) -> None:
        a = put(tmp_path / "a", np.ones((2, 2), "u1"))
        with pytest.raises(DTypeError) as raised:
            tw.matmul(a, a, tmp_path / "c", cluster=client, dtype="quad")
        for dtype in str(raised.value).partition("allowed are ")[2].split(", "):
            assert tw.plan_matmul(a, a, dtype=dtype, device="cpu").m == 2

    def test_memory_too_small(self, client: Client, tmp_path: Path) -> None:
        a = put(tmp_path / "a", np.ones((20, 20)))
        self.check(
            tmp_path, PlanError, "no tile fits into 64 B.*needs", a, a, tmp_path / "c", cluster=client, device="cpu",
            device_memory=64,
        )  # fmt: skip

    @pytest.mark.parametrize("kind", ["zarr's", "fsspec's", "wrapped"])
    def test_arrays_that_tasks_do_not_share(self, client: Client, tmp_path: Path, kind: str) -> None:
        """As A, B, C or output, of a product; of its check and of dot, what would not be there in another process."""

        def put_in_memory(name: str, values: np.ndarray) -> zarr.Array[Any]:
            place = {"zarr's": MemoryStore(), "fsspec's": f"memory://{name}"}.get(
                kind, LoggingStore(MemoryStore(), log_level="ERROR")
            )
            array = zarr.create_array(place, data=values, overwrite=True)
            assert isinstance(array, zarr.Array)
            return array

        a, match = put(tmp_path / "a", np.ones((3, 3))), "this process's memory"
        hidden = put_in_memory("hidden", np.zeros((3, 3)))
        out = tmp_path / "c"
        self.check(tmp_path, StoreError, f"A: .*{match}", hidden, a, out, cluster=client)
        self.check(tmp_path, StoreError, f"B: .*{match}", a, hidden, out, cluster=client)
        self.check(tmp_path, StoreError, f"output: .*{match}", a, a, hidden, cluster=client)
        self.check(tmp_path, StoreError, f"output: .*{match}", a, a, "memory://c.zarr", cluster=client)
        product = put_in_memory("product", np.full((3, 3), 3.0))
        x, y = put(tmp_path / "x", np.ones(3), (3,)), put_in_memory("y", np.ones(3))
        if kind != "fsspec's":  # is pickled along with every task, which is enough for those who only read
            assert tw.verify(a, a, product, cluster=client).passed
            assert tw.dot(x, y, cluster=client, device="cpu") == 3
            return
        for role, factors in {"A": (hidden, a, a), "B": (a, hidden, a), "C": (a, a, product)}.items():
            with pytest.raises(StoreError, match=f"{role}: .*{match}"):
                tw.verify(*factors, cluster=client)
        for role, vectors in {"X": (y, x), "Y": (x, y)}.items():
            with pytest.raises(StoreError, match=f"{role}: .*{match}"):
                tw.dot(*vectors, cluster=client, device="cpu")

    @pytest.mark.parametrize("mode", ["w", "a"])
    def test_zip_files_that_tasks_would_write_to(self, client: Client, tmp_path: Path, mode: Any) -> None:
        """Nor those that they would open in a mode for writing: what is in them stays as it is."""
        a, file = put(tmp_path / "a", np.ones((3, 3))), tmp_path / "file.zip"
        store = ZipStore(file, mode=mode)
        inside = zarr.create_array(store, name="inside", data=np.ones((3, 3)))
        x = zarr.create_array(store, name="x", data=np.ones(3))
        out = tmp_path / "c"
        wrapped = zarr.open_array(LoggingStore(store, log_level="ERROR"), path="inside")
        for array in (inside, wrapped):
            match = "output: .*ZIP file.* one writer alone"
            self.check(tmp_path, StoreError, match, a, a, array, cluster=client)
            self.check(tmp_path, StoreError, match, a, a, array, cluster=client, verify=False)
            # A new one is whole once it is open, so that from 3.4.2 on zarr opens it in mode 'a' from then on.
            match = f"ZIP file that is open in mode '[a{mode}]'"
            self.check(tmp_path, StoreError, f"A: .*{match}", array, a, out, cluster=client)
            self.check(tmp_path, StoreError, f"B: .*{match}", a, array, out, cluster=client)
            with pytest.raises(StoreError, match=f"C: .*{match}"):
                tw.verify(a, a, array, cluster=client)
        with pytest.raises(StoreError, match=f"X: .*{match}"):
            tw.dot(x, x, cluster=client, device="cpu")
        store.close()
        with ZipStore(file, mode="r") as stored:
            for name in ("inside", "x"):
                assert (zarr.open_array(stored, path=name)[...] == 1).all()

    @pytest.mark.parametrize(
        "name", ["c.zip", "c.zarr.zip", "{}/c.zip/", "file://{}/c.zip", "memory://c.zip"]
    )
    def test_a_name_of_a_zip_file_is_no_output(
        self, client: Client, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It would be a folder of that name."""
        monkeypatch.chdir(tmp_path)
        a, match = (
            put(tmp_path / "a", np.ones((3, 3))),
            r"output: .*zip/? names a ZIP file, which one writer alone",
        )
        self.check(tmp_path, StoreError, match, a, a, name.format(tmp_path), cluster=client)

    def test_a_zip_file_by_its_url_is_no_output(self, client: Client, tmp_path: Path) -> None:
        a = put(tmp_path / "a", np.ones((3, 3)))
        name = f"zip://c::{tmp_path / 'file.zip'}"
        self.check(tmp_path, StoreError, r"output: zip://c.*one writer alone", a, a, name, cluster=client)
        file = ZipFileSystem(tmp_path / "file.zip", mode="a")
        out = zarr.create_array(
            FsspecStore(AsyncFileSystemWrapper(file, asynchronous=True)), data=np.ones((3, 3))
        )
        assert isinstance(out, zarr.Array)
        self.check(tmp_path, StoreError, r"output: .*one writer alone", a, a, out, cluster=client)
        self.check(tmp_path, StoreError, r"A: .*open in mode 'a'", out, a, tmp_path / "c", cluster=client)


@pytest.mark.parametrize("wrong", [5, None, [[1.0]], b"path"])
def test_what_is_no_array_is_named(wrong: Any, tmp_path: Path) -> None:
    path = put(tmp_path / "a", np.ones((3, 3)))
    kind = type(wrong).__name__
    with pytest.raises(StoreError, match=rf"A: found .*{kind}; it must be a path, a URL or an array"):
        tw.matmul(wrong, path, tmp_path / "c")


@pytest.mark.parametrize("wrong", [5, np.ones((3, 3)), b"path"])
def test_what_is_no_place_for_an_output_is_named(wrong: Any, tmp_path: Path) -> None:
    path = put(tmp_path / "a", np.ones((3, 3)))
    kind = type(wrong).__name__
    with pytest.raises(StoreError, match=rf"output: found .*{kind}; it must be a path, a URL or a zarr"):
        tw.matmul(path, path, wrong)
    with pytest.raises(CorpusError, match=r"named by one path or several"):
        tw.histogram([5])  # type: ignore[list-item]
