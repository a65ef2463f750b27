"""Malformed Zarr stores and corpora: what reads one ends in a result or in an error of ours, and nothing is left."""

from __future__ import annotations

import bz2
import copy
import gzip
import json
import lzma
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import zarr
import zstandard
from distributed import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tilewright as tw
from tests.fuzzing import Left, check_tree, outcome, tree
from tests.sampling import examples

ARRAYS: dict[str, dict[str, Any]] = {
    "plain": {"compressors": None},
    "zstd": {},
    "fortran": {"filters": zarr.codecs.TransposeCodec(order=(1, 0)), "compressors": zarr.codecs.GzipCodec()},
    "shards": {"shards": (4, 4)},
    "blosc": {"compressors": zarr.codecs.BloscCodec(), "serializer": zarr.codecs.BytesCodec(endian="big")},
    "format 2": {"zarr_format": 2},
    "format 2, plain": {"zarr_format": 2, "compressors": None, "order": "F"},
}
"""How the arrays are stored whose files are spoiled."""

SIDES = 6
"""Of all arrays, so that each may stand for each."""

WORDS = (
    *(
        "",
        "array",
        "group",
        "bytes",
        "zstd",
        "gzip",
        "blosc",
        "float32",
        "int8",
        "<f4",
        "|b1",
        "O",
        "NaN",
        "regular",
    ),
    *(
        "default",
        "v2",
        "/",
        ".",
        "C",
        "F",
        "little",
        "start",
        "end",
        "0x7fc00000",
        "crc32c",
        "sharding_indexed",
    ),
)
"""Words that mean something in one place or another of an array's metadata."""

json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([0, 1, -1, 2, 5, 7, 2**31, 2**40, 2**62, 2**63, 2**64, 10**30, 0.5, 1e308]),
        st.floats(),
        st.sampled_from(WORDS),
        st.text(max_size=4),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["name", "configuration", "id", "a"]), inner, max_size=2),
    ),
    max_leaves=4,
)

ADDED = (
    "must_understand",
    "storage_transformers",
    "attributes",
    "dimension_names",
    "extra",
    "filters",
    "consolidated_metadata",
)


ATTRIBUTES = (
    *(
        "_FillValue",
        "missing_value",
        "scale_factor",
        "add_offset",
        "_Unsigned",
        "valid_range",
        "valid_min",
        "valid_max",
    ),
    *("flag_masks", "flag_values", "_ARRAY_DIMENSIONS", "encoding-type", "units"),
)
"""What readers of the data look for in an array's attributes."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value within a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A JSON value with another at some place in it; `...` takes away what is there."""
    if not path:
        return {} if new is ... else new
    value = copy.copy(value)
    if len(path) == 1 and new is ...:
        del value[path[0]]
    else:
        value[path[0]] = replaced(value[path[0]], path[1:], new)
    return value


@st.composite
def metadata(draw: st.DrawFn, document: dict[str, Any]) -> bytes:
    """The text of an array's metadata, with something wrong in it."""
    how = draw(
        st.sampled_from(["value", "value", "value", "value", "missing", "more", "text", "two", "attribute"])
    )
    if how == "text":
        text = json.dumps(document).encode()
        cut = draw(st.integers(0, len(text)))
        texts = [
            b"",
            b"null",
            b"[]",
            b"{}",
            b"\xff\xfe",
            b"[" * 2000,
            b'{"a":' * 2000,
            b"1" * 5000,
            b'"' + text,
        ]
        texts += [text[:cut], text[:cut] + b"\0" + text[cut:], text + b"}", text * 2, b"\xef\xbb\xbf" + text]
        return draw(st.sampled_from(texts))
    for _ in range(2 if how == "two" else 1):
        spots = list(places(document))
        if how == "more":
            document = document | {draw(st.sampled_from(ADDED)): draw(json_values)}
        elif how == "attribute":
            document = document | {
                "attributes": draw(st.dictionaries(st.sampled_from(ATTRIBUTES), json_values))
            }
        else:
            spot = draw(st.sampled_from(spots))
            document = replaced(document, spot, ... if how == "missing" else draw(json_values))
            if not isinstance(document, dict):
                break
    return json.dumps(document).encode()


FILES: dict[str, Callable[[Path, bytes], Any]] = {
    "folder": lambda path, content: path.mkdir(),
    "folder with files": lambda path, content: (path / "inner").mkdir(parents=True),
    "dangling link": lambda path, content: path.symlink_to("nowhere"),
    "loop": lambda path, content: path.symlink_to(path.name),
    "pipe": lambda path, content: os.mkfifo(path),
    "socket": lambda path, content: _socket(path),
    "device": lambda path, content: path.symlink_to("/dev/null"),
    "endless device": lambda path, content: path.symlink_to("/dev/zero"),
    "empty": lambda path, content: path.write_bytes(b""),
    "cut": lambda path, content: path.write_bytes(content[: len(content) // 2]),
    "cut by one": lambda path, content: path.write_bytes(content[:-1]),
    "longer": lambda path, content: path.write_bytes(content + b"\0"),
    "twice": lambda path, content: path.write_bytes(content * 2),
    "reversed": lambda path, content: path.write_bytes(content[::-1]),
    "zeros": lambda path, content: path.write_bytes(bytes(len(content))),
    "ones": lambda path, content: path.write_bytes(b"\xff" * len(content)),
    "flipped": lambda path, content: path.write_bytes(bytes(255 - byte for byte in content[:3]) + content[3:]),
    "missing": lambda path, content: None,
    "name": lambda path, content: (path.with_name(f"{path.name}.tmp")).write_bytes(content),
}  # fmt: skip
"""What may stand in the place of a file."""


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path may have 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("s")
        os.rename("s", path.name)
    finally:
        os.chdir(here)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    outer = tmp_path_factory.mktemp("stores")
    before = os.getcwd()
    os.chdir(outer)
    values = np.random.default_rng(0).random((SIDES, SIDES)) + np.eye(SIDES)
    for name, options in ARRAYS.items():
        for folder, array in ((name, values), (f"{name} vector", values[0])):
            chunks = (2, 4)[: array.ndim]
            chosen = dict(options)
            if array.ndim == 1:
                chosen.pop("filters", None)
            if "shards" in chosen:
                chosen["shards"] = (4, 4)[: array.ndim]
            stored = zarr.create_array(
                outer / "good" / folder, shape=array.shape, dtype=array.dtype, chunks=chunks, **chosen
            )
            stored[...] = array
    with dask.config.set({"tilewright.retries": 0}):
        yield outer
    os.chdir(before)


QUIET: dict[str, Any] = {"listener": lambda event: None}
READERS: dict[str, Callable[[Client, str, str], Any]] = {
    "matmul as A": lambda client, bad, good: tw.matmul(bad, good, "C.zarr", cluster=client, **QUIET),
    "matmul as B": lambda client, bad, good: tw.matmul(good, bad, "C.zarr", cluster=client, transpose_b=True, **QUIET),
    "plan_matmul": lambda client, bad, good: tw.plan_matmul(bad, good),
    "verify as A": lambda client, bad, good: tw.verify(bad, good, good, cluster=client, **QUIET),
    "verify as C": lambda client, bad, good: tw.verify(good, good, bad, cluster=client, **QUIET),
    "overwrite": lambda client, bad, good: tw.matmul(good, good, bad, cluster=client, overwrite=True, **QUIET),
}  # fmt: skip
VECTOR_READERS: dict[str, Callable[[Client, str, str], Any]] = {
    "dot": lambda client, bad, good: tw.dot(bad, good, cluster=client, **QUIET),
}
GOOD = "good/zstd"


def check_reading(place: Path, client: Client, reader: str, *, begins: bool) -> Any:
    """One case: what stands at ``bad`` is read. Returns the result, or the error.

    begins: whether a product may be begun before that shows; then it is kept for the next run.
    """
    before, left = tree(place), Left()
    call = (READERS | VECTOR_READERS)[reader]
    try:
        good = GOOD if reader in READERS else f"{GOOD} vector"
        found = outcome(lambda: call(client, "bad", good))
        results = []
        if reader.startswith("matmul") and not isinstance(found, tw.TilewrightError):
            results = ["C.zarr"]
        if reader == "overwrite" and not isinstance(found, tw.TilewrightError):
            results = ["bad"]
        late = isinstance(found, tw.DamagedError | tw.VerificationError | tw.TaskError)
        if late or (begins and isinstance(found, tw.StoreError)):
            results.append("C.zarr.partial")
        check_tree(before, place, *results)
        left.check()
        return found
    finally:
        for name in ("bad", "C.zarr", "C.zarr.partial", "bad.partial"):
            _remove(place / name)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def spoil_metadata(place: Path, name: str, text: bytes) -> None:
    bad = place / "bad"
    shutil.copytree(place / "good" / name, bad)
    (bad / metadata_file(bad)).write_bytes(text)
    if metadata_file(bad) == ".zarray":
        try:
            found = json.loads(text)["attributes"]
        except (ValueError, RecursionError, TypeError, KeyError):
            return
        (bad / ".zattrs").write_text(json.dumps(found))  # where format 2 has them


def metadata_file(array: Path) -> str:
    return "zarr.json" if (array / "zarr.json").exists() else ".zarray"


def spoil_file(place: Path, name: str, number: int, how: str) -> None:
    """Put something in the place of one of an array's files."""
    bad = place / "bad"
    shutil.copytree(place / "good" / name, bad)
    files = sorted(path for path in bad.rglob("*") if path.is_file())
    path = files[number % len(files)]
    content = path.read_bytes()
    path.unlink()
    FILES[how](path, content)


@st.composite
def spoilt(draw: st.DrawFn, place: Path) -> tuple[str, str, Any]:
    """How an array is stored, who reads it, and the text of its metadata, or one of its files and what becomes of
    it."""
    reader = draw(st.sampled_from([*READERS, *VECTOR_READERS]))
    name = draw(st.sampled_from(sorted(ARRAYS))) + (" vector" if reader in VECTOR_READERS else "")
    if draw(st.booleans()):
        file = place / "good" / name
        return reader, name, draw(metadata(json.loads((file / metadata_file(file)).read_text())))
    return reader, name, (draw(st.integers(0, 20)), draw(st.sampled_from(sorted(FILES))))


def check_spoilt(place: Path, client: Client, case: tuple[str, str, Any]) -> None:
    reader, name, what = case
    try:
        if isinstance(what, bytes):
            spoil_metadata(place, name, what)
        else:
            spoil_file(place, name, *what)
    except BaseException:
        _remove(place / "bad")
        raise
    check_reading(place, client, reader, begins=not isinstance(what, bytes))


def test_spoilt_arrays(place: Path, client: Client) -> None:
    @settings(max_examples=examples(60))
    @given(spoilt(place))
    def test(case: tuple[str, str, Any]) -> None:
        check_spoilt(place, client, case)

    test()


SUFFIXES = (".gz", ".bz2", ".xz", ".zst")


def _compressed(suffix: str) -> bytes:
    text = b"Some words, of which there are many. " * 200
    if suffix == ".zst":
        return bytes(zstandard.compress(text))
    return {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[suffix](text)


CONTENTS = {suffix: _compressed(suffix) for suffix in SUFFIXES} | {
    "": b"Plain words \xff\x80\xe2\x82.\n" * 100
}

entries = st.tuples(
    st.sampled_from(
        [
            b"a",
            b"b",
            b"c",
            b"\xff\xfe",
            b"deep/er/a",
            b"deep/b",
            b"new\nline",
            b"n" * 240,
            b" ",
            b"\xed\xa0\x80",
        ]
    ),
    st.sampled_from(["", *SUFFIXES, ".GZ", ".tar.gz", ".gz.gz"]),
    st.sampled_from(
        ["good", "good", *(how for how in FILES if how != "pipe")]
    ),  # a pipe is read, once somebody writes to it
    st.booleans(),
)
"""A file of a corpus: its name and suffix, what stands in its place, and whether its bytes are those that its suffix
says."""


@st.composite
def corpora(draw: st.DrawFn) -> tuple[list[Any], dict[str, Any]]:
    options = {
        "by": draw(st.sampled_from(["byte", "ascii", "letter", "bigram", "codepoint"])),
        "per_document": draw(st.booleans()),
        "raw": draw(st.sampled_from([False, False, True])),
    }
    return draw(st.lists(entries, min_size=1, max_size=4)), options


def check_corpus(place: Path, client: Client, case: tuple[list[Any], dict[str, Any]]) -> None:
    """One case: a folder of such files is counted, and each of them by its own name."""
    files, options = case
    folder = place / "corpus"
    folder.mkdir()
    try:
        named = []
        for name, suffix, how, fitting in files:
            path = folder / os.fsdecode(name + suffix.encode())
            if os.path.lexists(path):
                continue
            content = CONTENTS.get(suffix, CONTENTS[".gz"]) if fitting else CONTENTS[".xz"][::-1]
            path.parent.mkdir(parents=True, exist_ok=True)
            if how == "good":
                path.write_bytes(content)
            else:
                FILES[how](path, content)
            named.append(str(path))
        before, left = tree(place), Left()
        for paths in ("corpus", named):
            outcome(lambda paths=paths: tw.histogram(paths, cluster=client, **options, **QUIET))
        check_tree(before, place)
        left.check()
    finally:
        _remove(folder)


def test_spoilt_corpora(place: Path, client: Client) -> None:
    @given(corpora())
    def test(case: tuple[list[Any], dict[str, Any]]) -> None:
        check_corpus(place, client, case)

    test()


MORE = settings(max_examples=5000, derandomize=False, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
def test_more_spoilt_arrays(place: Path, client: Client) -> None:
    @MORE
    @given(spoilt(place))
    def test(case: tuple[str, str, Any]) -> None:
        check_spoilt(place, client, case)

    test()


@pytest.mark.slow
def test_more_spoilt_corpora(place: Path, client: Client) -> None:
    @MORE
    @given(corpora())
    def test(case: tuple[list[Any], dict[str, Any]]) -> None:
        check_corpus(place, client, case)

    test()
