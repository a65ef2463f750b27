"""Arguments of wrong types and values of the public functions, each by the error that it gets."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client

import tilewright as tw
from tests.fuzzing import tree
from tilewright.pipeline.cluster import cluster as cluster_module
from tilewright.pipeline.product import job
from tilewright.pipeline.product.request import Request

QUIET: dict[str, Any] = {"listener": lambda event: None}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, array in (("a.zarr", np.eye(4)), ("x.zarr", np.ones(4))):
        zarr.create_array(tmp_path / name, shape=array.shape, dtype=array.dtype, chunks=array.shape)[...] = (
            array
        )
    (tmp_path / "text.txt").write_text("words")
    return tmp_path


class BytesPath:
    def __fspath__(self) -> bytes:
        return b"a.zarr"


class BadPath:
    def __fspath__(self) -> str:
        raise RuntimeError("no path")


A = ("a.zarr", "a.zarr")
WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (
        "matmul",
        (*A, "c.zarr"),
        {"transpose_a": "yes"},
        tw.OptionError,
        "transpose_a='yes' is neither true nor",
    ),
    ("matmul", (*A, "c.zarr"), {"transpose_b": 1}, tw.OptionError, "transpose_b=1 is neither"),
    ("matmul", (*A, "c.zarr"), {"overwrite": None}, tw.OptionError, "overwrite=None is neither"),
    ("matmul", (*A, "c.zarr"), {"resume": "no"}, tw.OptionError, "resume='no' is neither"),
    ("matmul", (*A, "c.zarr"), {"verify": np.array([1, 2])}, tw.OptionError, r"verify=array\(\[1, 2\]\) is"),
    (
        "matmul",
        (*A, "c.zarr"),
        {"listener": 5},
        tw.OptionError,
        "listener=5 cannot be called; pass a function",
    ),
    ("matmul", (*A, "c.zarr"), {"precision": ["full"]}, tw.OptionError, r"precision=\['full'\] is unknown"),
    ("matmul", (*A, "c.zarr"), {"precision": np.array([1, 2])}, tw.OptionError, "precision=array"),
    ("matmul", (*A, "c.zarr"), {"device": np.array([1, 2])}, tw.OptionError, "device=array"),
    ("matmul", (*A, "c.zarr"), {"dtype": {"names": ["a"]}}, tw.DTypeError, "is not an element type"),
    ("matmul", (*A, "c.zarr"), {"device_memory": 10**400}, tw.OptionError, "is more than any machine has"),
    ("matmul", (*A, "c.zarr"), {"device_memory": float("nan")}, tw.OptionError, "nan is no size in bytes"),
    ("matmul", (*A, "c.zarr"), {"device_memory": "8 GiBB"}, tw.OptionError, "'8 GiBB' is no size in bytes"),
    ("matmul", (*A, "c.zarr"), {"cluster_file": 5}, tw.OptionError, r"cluster_file .*: 5 is not a path"),
    (
        "matmul",
        (*A, "c.zarr"),
        {"cluster_file": b"x"},
        tw.OptionError,
        r"cluster_file .*: b'x' is not a path",
    ),
    ("matmul", (*A, "c.zarr"), {"cluster_file": "a\0"}, tw.OptionError, r"cluster_file .* is not a path"),
    ("matmul", (*A, 5), {}, tw.StoreError, r"output: found builtins\.int; it must be a path"),
    ("matmul", (*A, "c\0"), {}, tw.StoreError, r"output: 'c\\x00' is no path: it has a null byte"),
    ("matmul", (*A, "\ud800"), {}, tw.StoreError, r"output: '\\ud800' is no path: .* a lone surrogate"),
    ("matmul", (*A, BytesPath()), {}, tw.StoreError, "output: .* is no path"),
    ("matmul", (BadPath(), "a.zarr", "c.zarr"), {}, tw.StoreError, "A: .* is no path"),
    (
        "matmul",
        (b"a.zarr", "a.zarr", "c.zarr"),
        {},
        tw.StoreError,
        r"A: found builtins\.bytes.* os\.fsdecode",
    ),
    (
        "verify",
        ("a.zarr", "a.zarr", "a.zarr"),
        {"rounds": 2.5},
        tw.OptionError,
        "2.5 is not a number of rounds",
    ),
    (
        "verify",
        ("a.zarr", "a.zarr", "a.zarr"),
        {"rounds": True},
        tw.OptionError,
        "True is not a number of rounds",
    ),
    (
        "verify",
        ("a.zarr", "a.zarr", "a.zarr"),
        {"transpose_a": "yes"},
        tw.OptionError,
        "transpose_a='yes' is",
    ),
    ("plan_matmul", A, {"workers": "4"}, tw.OptionError, "workers='4': a product needs a whole number"),
    ("plan_matmul", A, {"workers": 10**400}, tw.OptionError, "a plan is for 1000000 workers at most"),
    (
        "plan_matmul",
        A,
        {"host_memory": 10**40},
        tw.OptionError,
        "host_memory .* is more than any machine has",
    ),
    ("dot", ("x.zarr", "x.zarr"), {"device": 3}, tw.OptionError, "device=3 is unknown"),
    ("dot", ("x.zarr", "x.zarr"), {"listener": "print"}, tw.OptionError, "listener='print' cannot be called"),
    (
        "histogram",
        ("text.txt",),
        {"raw": True, "encoding": "latin-1", "field": ["a", "b"]},
        tw.OptionError,
        "raw=True takes .* so that encoding='latin-1' and field='a, b' would say nothing; leave out raw",
    ),
    ("histogram", (5,), {}, tw.CorpusError, "5 is neither"),
    ("histogram", (["text.txt", 5],), {}, tw.CorpusError, r"\['text.txt', 5\] is neither"),
    ("histogram", ("text.txt",), {"per_document": "yes"}, tw.OptionError, "per_document='yes' is neither"),
    ("histogram", ("text.txt",), {"raw": 1}, tw.OptionError, "raw=1 is neither"),
    ("histogram", ("text.txt",), {"by": np.array([1, 2])}, tw.OptionError, "by=array"),
]


@pytest.mark.parametrize(("function", "arguments", "options", "error", "says"), WRONG)
def test_wrong_arguments_are_named_before_anything_is_done(
    function: str,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    error: type[Exception],
    says: str,
    here: Path,
    client: Client,
) -> None:
    before = tree(here)
    with pytest.raises(error, match=says) as caught:
        getattr(tw, function)(
            *arguments, **{"cluster": client, **options} if function != "plan_matmul" else options
        )
    assert len(str(caught.value).splitlines()) == 1
    assert isinstance(caught.value, ValueError | TypeError | OSError)
    assert tree(here) == before


def test_numbers_and_truth_values_of_numpy_are_taken(here: Path, client: Client) -> None:
    run = tw.matmul(
        "a.zarr",
        "a.zarr",
        "c.zarr",
        transpose_a=np.True_,
        device_memory=np.int64(2**24),
        cluster=client,
        **QUIET,
    )
    assert json.loads(json.dumps(run.to_json()))["plan"]["transpose_a"] is True
    assert tw.verify("a.zarr", "a.zarr", "c.zarr", rounds=np.int64(3), cluster=client, **QUIET).rounds == 3
    assert tw.plan_matmul("a.zarr", "a.zarr", workers=np.int32(2)).workers == 2


def test_a_plan_of_an_output_that_is_none_is_refused(here: Path, client: Client) -> None:
    with pytest.raises(tw.StoreError, match=r"^output: found builtins\.int"):
        job.plan_only(Request("a.zarr", "a.zarr", 5, cluster=client, **QUIET))  # type: ignore[arg-type]


PROFILES = {
    b"profiles: {mine: {kind: 2001-99-99}}": "is not valid YAML: line 1, column 25: month must be in 1..12",
    b"[" * 400: "is not valid YAML",
    b"\xff\xfe\x00": "is not valid YAML",
    b"profiles: {mine: {kind: existing, address: 5}}": "address: 5 is no scheduler's address",
    b"profiles: {mine: {kind: existing, address: '', scheduler_file: ''}}": "says neither address nor",
    b"profiles: {mine: {kind: existing, address: 'tcp://', scheduler_file: ''}}": "cannot reach the scheduler",
    b"profiles: {mine: {kind: local, processes: 0}}": "processes: 0 is neither true nor false",
    b"profiles: {mine: {kind: local, scheduler_file: here}}": "scheduler_file",
}


@pytest.mark.parametrize("text", PROFILES)
def test_wrong_profiles_are_refused_at_once(text: bytes, here: Path) -> None:
    """Dask waits for good for a scheduler's file without a name, and a worker for one that is not there."""
    Path("mine.yaml").write_bytes(text)
    with pytest.raises(tw.ClusterError, match=PROFILES[text]) as caught, tw.open_cluster("mine", "mine.yaml"):
        pass
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", [".nan", "same"])
def test_clusters_of_one_name_end_one_by_one(name: str, here: Path) -> None:
    """Dask takes them for equal, and one that is named by what equals nothing not even for itself."""
    Path("mine.yaml").write_text(f"profiles: {{mine: {{kind: local, name: {name}}}}}")
    with tw.open_cluster("mine", "mine.yaml"), tw.open_cluster("mine", "mine.yaml") as client:
        assert client.submit(sum, [1, 2]).result() == 3


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "://", "nope://a", "tcp://"])
def test_of_a_scheduler_that_is_not_there_no_thread_is_left(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "CONNECT_SECONDS", 0.2)
    before = {thread for thread in threading.enumerate() if thread.name == "IO loop"}
    with pytest.raises(tw.ClusterError, match="cannot reach the scheduler"), tw.open_cluster(address):
        pass
    assert {thread for thread in threading.enumerate() if thread.name == "IO loop"} <= before


@pytest.mark.parametrize("wrong", [np.array([1, 2]), [], {}], ids=["array", "list", "dict"])
def test_what_is_no_cluster_is_refused_by_plans_too(wrong: Any, tmp_path: Path) -> None:
    a = zarr.create_array(tmp_path / "a.zarr", shape=(4, 4), dtype="f4")
    with pytest.raises(tw.ClusterError, match="it must be a profile's name"):
        tw.plan_matmul(a, a, cluster=wrong)
    with pytest.raises(tw.ClusterError, match="it must be a profile's name"):
        tw.plan_histogram(__file__, cluster=wrong)


def test_a_cluster_that_lacks_what_dask_asks_of_one_is_refused() -> None:
    class Bare:
        scheduler_address = "tcp://127.0.0.1:1"
        asynchronous = False

    with pytest.raises(tw.ClusterError, match="cannot connect to the Bare"), tw.open_cluster(Bare()):  # type: ignore[arg-type]
        pass


METADATA: dict[str, tuple[dict[str, Any], str]] = {
    "attributes": ({"attributes": "word"}, "the attributes of bad.zarr are 'word'"),
    "sides": ({"shape": [2**40, 2**40]}, "say shape"),
    "chunks": (
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2**62, 4]}}},
        "say chunks",
    ),
    "negative": ({"shape": [-1, 4]}, "bad.zarr"),
    "format": ({"zarr_format": 4}, "bad.zarr"),
    "nothing": ({"codecs": None}, "bad.zarr"),
}


@pytest.mark.parametrize("case", METADATA)
def test_malformed_metadata_are_told_when_an_array_is_opened(case: str, here: Path, client: Client) -> None:
    changes, says = METADATA[case]
    _copy(here, "bad.zarr", lambda text: json.dumps(json.loads(text) | changes))
    with pytest.raises(tw.StoreError, match=says):
        tw.matmul("bad.zarr", "a.zarr", "c.zarr", cluster=client, **QUIET)
    assert not list(here.glob("c.zarr*"))


@pytest.mark.parametrize("url", ["zip://a::text.txt", "reference://", "zip://::"])
def test_what_a_file_system_says_of_a_url_becomes_an_error_of_ours(
    url: str, here: Path, client: Client
) -> None:
    """fsspec's raise a BadZipFile, or the TypeError of a class that was given too few arguments."""
    with pytest.raises(tw.StoreError, match=r"^A: "):
        tw.matmul(url, "a.zarr", "c.zarr", cluster=client, **QUIET)
    for overwrite in (False, True):
        with pytest.raises(tw.StoreError, match=r"^output: "):
            tw.matmul("a.zarr", "a.zarr", url, overwrite=overwrite, cluster=client, **QUIET)
    assert sorted(path.name for path in here.iterdir()) == ["a.zarr", "text.txt", "x.zarr"]


def test_brackets_without_end_are_no_metadata(here: Path, client: Client) -> None:
    _copy(here, "bad.zarr", lambda text: "[" * 5000)
    with pytest.raises(
        tw.StoreError, match=r"A: the metadata of bad\.zarr cannot be used \(zarr\.json nests"
    ):
        tw.matmul("bad.zarr", "a.zarr", "c.zarr", cluster=client, **QUIET)
    with pytest.raises(tw.OutputExistsError, match=r"bad\.zarr is not a Zarr array, so it is not replaced"):
        tw.matmul("a.zarr", "a.zarr", "bad.zarr", overwrite=True, cluster=client, **QUIET)


def test_a_codec_of_wrong_settings_is_told_when_an_array_is_opened(here: Path, client: Client) -> None:
    stored = zarr.create_array(here / "bad.zarr", shape=(4, 4), dtype="f8", chunks=(4, 4), zarr_format=2)
    stored[...] = 1
    path = here / "bad.zarr" / ".zarray"
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | {"compressor": {"id": "zstd", "level": {"a": 1}}}))
    with pytest.raises(tw.StoreError, match=r"A: the metadata of bad\.zarr name codecs that cannot be used"):
        tw.matmul("bad.zarr", "a.zarr", "c.zarr", cluster=client, **QUIET)
    assert not list(here.glob("c.zarr*"))


def test_a_pipe_in_the_place_of_metadata_is_not_waited_for(here: Path, client: Client) -> None:
    _copy(here, "bad.zarr", lambda text: text)
    (here / "bad.zarr" / "zarr.json").unlink()
    os.mkfifo(here / "bad.zarr" / "zarr.json")
    with pytest.raises(
        tw.StoreError, match=r"A: cannot open bad\.zarr: of zarr\.json in it, it is a pipe and no file"
    ):
        tw.matmul("bad.zarr", "a.zarr", "c.zarr", cluster=client, **QUIET)
    with pytest.raises(tw.OutputExistsError, match=r"bad\.zarr is not a Zarr array, so it is not replaced"):
        tw.matmul("a.zarr", "a.zarr", "bad.zarr", overwrite=True, cluster=client, **QUIET)
    with pytest.raises(tw.OutputExistsError, match=r"bad\.zarr exists"):
        tw.matmul("a.zarr", "a.zarr", "bad.zarr", cluster=client, **QUIET)


def _copy(here: Path, name: str, change: Any) -> None:
    """A copy of the array with other metadata."""
    (here / name).mkdir()
    (here / name / "zarr.json").write_text(change((here / "a.zarr" / "zarr.json").read_text()))
