"""Arguments of every wrong type and value for every public function: each call ends in a result or in an error of ours,
and leaves nothing behind."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tilewright as tw
from tests.fuzzing import Left, Made, check_tree, junk, made, outcome, tree
from tests.workflows.fuzz_folder import PROFILES, place
from tilewright import kernels

__all__ = ["place"]

PYTHON = (Made("closed client", lambda: _closed()), Made("no cluster", lambda: _Address()))


SHARED = Made("the shared client", lambda: None)


class _Address:
    scheduler_address = "tcp://127.0.0.1:1"
    asynchronous = False


@functools.cache
def _closed() -> Client:
    with tw.open_cluster() as client:
        pass
    return client


KEYS = (
    *(
        "kind",
        "n_workers",
        "threads_per_worker",
        "processes",
        "memory_limit",
        "env",
        "death_timeout",
        "host",
        "port",
    ),
    *(
        "dashboard_address",
        "scheduler_kwargs",
        "silence_logs",
        "protocol",
        "security",
        "interface",
        "worker_class",
    ),
    *("resources", "name", "nthreads", "lifetime", "address", "scheduler_file", "timeout", "words"),
    *(
        "scheduler_port",
        "worker_dashboard_address",
        "extensions",
        "preload",
        "asynchronous",
        "plugins",
        "data",
    ),
)
TEXTS = (
    *(
        "null",
        "true",
        "0",
        "-1",
        "1",
        "2.5",
        ".nan",
        "1e400",
        "word",
        "''",
        "[]",
        "[1]",
        "{}",
        "{a: 1}",
        "2001-01-01",
    ),
    *(
        "10000000000000000000000",
        "tcp://",
        "tcp://127.0.0.1:1",
        "://",
        "text.txt",
        "folder",
        "local",
        "existing",
    ),
    *("!!binary AAAA", "'\\0'"),
)


@st.composite
def profiles(draw: st.DrawFn) -> bytes:
    """The text of a file with one profile, of whose keys one or two are wrong."""
    kind = draw(st.sampled_from(["local", "existing"]))
    keys = draw(st.dictionaries(st.sampled_from(KEYS), st.sampled_from(TEXTS), min_size=1, max_size=2))
    said = ", ".join(f"{key}: {value}" for key, value in {"kind": kind, **keys}.items())
    return f"profiles: {{mine: {{{said}}}}}".encode()


def _opened(name: str, mode: Any = "r") -> Made:
    return Made(f"open {name}", lambda: zarr.open_array(Path(name), mode=mode))


def _new(shape: tuple[int, ...], dtype: Any, **options: Any) -> Made:
    """An open array, made for the case, at a path that `_clean` removes."""

    def make() -> Any:
        shutil.rmtree("given.zarr", ignore_errors=True)
        chunks = tuple(max(1, side) for side in shape)
        return zarr.create_array(Path("given.zarr"), shape=shape, dtype=dtype, chunks=chunks, **options)

    return Made(f"new {np.dtype(dtype)}{list(shape)}", make)


def _in_memory() -> Any:
    return zarr.create_array(zarr.storage.MemoryStore(), shape=(6, 4), dtype="f8", chunks=(6, 4))


OTHERS = st.sampled_from(
    (
        *(
            "C.zarr",
            "I.zarr",
            "big-endian.zarr",
            "x.zarr",
            "one.zarr",
            "scalar.zarr",
            "empty.zarr",
            "none.zarr",
        ),
        *(
            "bool.zarr",
            "date.zarr",
            "group.zarr",
            "group.zarr/inner",
            "text.txt",
            "junk.bin",
            "folder",
            "pipe",
        ),
        *("socket", "loop", "dangling", "link.zarr", "junk.gz", Path("x.zarr"), "file://A.zarr"),
        _opened("C.zarr"),
        _opened("x.zarr"),
        Made("group", lambda: zarr.open_group("group.zarr", mode="r")),
        Made("array in memory", _in_memory),
        Made("NumPy array", lambda: np.ones((6, 5))),
    )
)
"""Stored things that are no factor, or not of the right sides."""

flags = st.sampled_from([True, False, np.True_, np.False_])
clusters = st.one_of(
    st.sampled_from(
        [
            *(
                "",
                "nope",
                "local ",
                "mine",
                "cpu,",
                "://",
                "tcp://",
                "tcp://127.0.0.1:1",
                "tcp://x:y",
                "ucx://",
            ),
            *("inproc://1/2/3", "tls://127.0.0.1:1", *PYTHON),
        ]
    ),
    junk,
)
cluster_files = st.one_of(
    st.sampled_from([*PROFILES, "folder", "loop", "dangling", "socket", "A.zarr"]), junk
)
sizes = st.one_of(
    st.sampled_from(
        [
            *(
                "8 GiBB",
                "-1",
                "-8GiB",
                "0",
                "nan",
                "inf",
                "1e400",
                "1e-400",
                "²",
                "8 GiB ",
                "1.5",
                "1.5KiB",
                "GiB",
            ),
            *(
                "1,5GiB",
                "0x10",
                "9" * 400,
                -1,
                0,
                1,
                10**400,
                2**63,
                np.int64(2**20),
                np.float64(2**20),
                np.nan,
            ),
        ]
    ),
    junk,
)
dtypes = st.one_of(
    st.sampled_from(
        [
            *(
                "f4",
                "int64",
                "nonsense",
                "f99",
                ">f8",
                "O",
                "S4",
                "U",
                "M8[s]",
                "m8",
                "V8",
                "i4,f4",
                "bfloat16",
                "?",
            ),
            *(
                "(2,3)f8",
                "float128",
                "complex256",
                "a5",
                "Float64",
                np.float32,
                np.dtype("f8"),
                object,
                str,
                bool,
            ),
            *(float, np.dtype([("a", "f4")]), {"names": ["a"]}, [("a", "f4")]),
        ]
    ),
    junk,
)
words = st.one_of(st.sampled_from(["FULL", "full ", "cuda:0", "gpu", "GPU", "bytes", "words"]), junk)
listeners = junk.filter(lambda value: not callable(made(value)))
counts = st.one_of(st.sampled_from([np.int64(2), 2.0, True, "2", 0, -1, 65, 10**7, 10**400]), junk)
corpora = st.one_of(
    st.sampled_from(
        [
            *(
                "text.txt",
                "folder",
                "folder/bare",
                "junk.bin",
                "junk.gz",
                "junk.bz2",
                "junk.xz",
                "junk.zst",
                "pipe",
            ),
            *(
                "socket",
                "loop",
                "dangling",
                "A.zarr",
                "/dev/null",
                "/dev/zero",
                "/proc/self/mem",
                b"text.txt",
            ),
            *(
                ["text.txt", "folder"],
                ("text.txt", None),
                {"text.txt": 1},
                ["text.txt", "text.txt"],
                [["text.txt"]],
            ),
            np.array(["text.txt"]),
        ]
    ),
    junk,
)

NEW = "result.zarr"
outputs = st.one_of(
    st.sampled_from(
        [
            *(
                NEW,
                NEW,
                Path(NEW),
                "deep/er/result.zarr",
                "C.zarr",
                "A.zarr",
                "text.txt",
                "folder",
                "link.zarr",
            ),
            *(
                "group.zarr/new",
                _new((6, 4), "f8"),
                _new((6, 4), "f4"),
                _new((4, 6), "f8"),
                _new((6, 4), "i4"),
            ),
            *(_new((6,), "f8"), _new((6, 4), "f8", zarr_format=2), _opened("C.zarr")),
            Made("array in memory", _in_memory),
        ]
    ),
    junk,
)

LEFT, RIGHT, VECTOR = ("A.zarr", _opened("A.zarr")), ("B.zarr", Path("B.zarr")), ("x.zarr", _opened("x.zarr"))
sources = st.one_of(OTHERS, junk)
scalars = st.one_of(
    st.sampled_from([2, 0.5, -1.5, 1j, np.nan, np.inf, 10**400, np.float32(2), np.int8(3), True, "1", None]),
    junk,
)
vectors = st.one_of(
    st.sampled_from([
        "x.zarr", _opened("x.zarr"), "I.zarr", "A.zarr", Made("row", lambda: np.arange(6.0)), [1.0, 2.0],
        Made("column", lambda: np.arange(4)), Made("square", lambda: np.ones((6, 6))),
        Made("complex", lambda: np.ones(6, complex)), Made("texts", lambda: np.array(["a"] * 6)),
        Made("nothing", lambda: np.zeros(0)), Made("objects", lambda: np.full(6, None, object)),
        Made("masked", lambda: np.ma.masked_equal(np.arange(6.0), 3)),
    ]),
    junk,
)  # fmt: skip
"""Of alpha and beta, and of scales and offsets: C of A and B is 6 × 4."""
TRANSPOSED = {"transpose_a": (False, flags | junk), "transpose_b": (False, flags | junk)}
PLACED = {
    "cluster": (SHARED, clusters),
    "cluster_file": (None, cluster_files),
    "listener": (Made("listener", lambda: lambda event: None), listeners),
}
DEVICE = {"device": ("auto", st.sampled_from(["cuda", "cpu"]) | words)}
PRECISION = {"precision": ("full", st.sampled_from(["split", "tf32", "bf16", "fp16"]) | words)}
MEMORY = {"device_memory": (None, sizes)}
STORED = {
    "chunks": (
        st.sampled_from([None, 4, "3x2"]),
        st.sampled_from(["3y2", "0", (0, 1), (1,), 2.5, 10**400]) | junk,
    ),
    "shards": (None, st.sampled_from([4, "12x12", (1, 2, 3), "8", -1]) | junk),
    "codec": (None, st.sampled_from(["zstd:1", "gzip", "none", "zstd:99", "blosc", "lz4:0"]) | junk),
}
FACTORS = {"a": (st.sampled_from(LEFT), sources), "b": (st.sampled_from(RIGHT), sources)}
VALUES = st.sampled_from(
    [
        *(
            "x.zarr",
            [1.0] * 5,
            [1] * 6,
            np.ones(5),
            np.ones(6),
            np.zeros(6),
            np.full(6, np.nan),
            [1, "a"],
            [[1]],
        ),
        *(
            {"columns": "x.zarr"},
            {"rows": [1] * 6},
            {"lines": 1},
            {"columns": None},
            {},
            "both",
            "columns",
            "nan",
        ),
        *(_opened("x.zarr"), _opened("A.zarr"), np.ones((6, 5)), [1j] * 5, [10**400] * 5, "A.zarr", "folder"),
    ]
)
"""What may be given for one number a column or row, of an array of 6 × 5."""
GRAM = {
    "x": (st.sampled_from(LEFT), sources),
    "out": (NEW, outputs),
    "of": (st.sampled_from(["columns", "rows"]), words),
    "center": (st.sampled_from([False, True, "rows"]), VALUES | junk),
    "scale": (False, VALUES | junk),
    "missing": (None, VALUES | st.sampled_from(["NaN", -1, 0.5, 10**400, np.inf, np.nan]) | junk),
    "missing_as": ("mean", st.just("pairwise") | words),
    "divide": (
        st.sampled_from([None, "n", 3]),
        st.sampled_from(["n-1", "pairs", 0, -1.5, 1e-320, "3"]) | junk,
    ),
    "weights": (None, VALUES | junk),
    "window": (None, st.sampled_from([0, 3, (1, 2)]) | junk),
    "sum_over": (None, st.sampled_from([0, 1, 2, "0", "time", (0,), [0, 1], -1, np.int64(0)]) | junk),
    "align": ("labels", st.just("position") | words),
    "constant": ("zero", words),
    "dtype": (None, dtypes),
    "overwrite": (False, flags | junk),
}
NEIGHBOURS = {
    "a": (st.sampled_from(LEFT), sources),
    "b": (st.sampled_from([None, "I.zarr"]), sources),
    "out": (NEW, outputs),
    "metric": (st.sampled_from(["dot", "cosine", "l2"]), words),
    "align": ("labels", st.just("position") | words),
    "of": (st.sampled_from(["columns", "rows"]), words),
    "resume": (True, flags | junk),
    "verify": (True, flags | junk),
    "overwrite": (False, flags | junk),
}
FRACTIONS = st.sampled_from([0, 1, 2, -0.5, np.nan, np.inf, "0.8", np.float32(0.8), True, 10**400, 1j]) | junk
SEARCH = {
    "k": (3, counts),
    "tol": (
        st.sampled_from([1e-4, 0.1]),
        st.sampled_from([0, 1, -1e-4, np.nan, np.inf, "1e-4", 10**400]) | junk,
    ),
    "passes": (50, counts),
    "seed": (0, counts),
    "scratch": (None, st.sampled_from(["folder", "text.txt", "nowhere", "", "dangling"]) | junk),
    "dtype": (None, dtypes),
}
FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, tuple[Any, st.SearchStrategy[Any]]]]] = {
    "matmul": (
        lambda a, b, out, **options: tw.matmul(a, b, out, **options),
        FACTORS
        | {"out": (NEW, outputs), "dtype": (None, dtypes)}
        | {"resume": (True, flags | junk), "verify": (True, flags | junk), "overwrite": (False, flags | junk)}
        | {"alpha": (1, scalars), "beta": (0, scalars)}
        | {f"{side}_{what}": (None, vectors) for side in ("row", "column") for what in ("scale", "offset")}
        | TRANSPOSED | PRECISION | MEMORY | DEVICE | PLACED | STORED,
    ),
    "plan_matmul": (
        lambda a, b, **options: tw.plan_matmul(a, b, **options),
        FACTORS
        | {"workers": (1, counts), "host_memory": (None, sizes), "dtype": (None, dtypes)}
        | TRANSPOSED | PRECISION | MEMORY | DEVICE | STORED
        | {"cluster": (None, clusters), "cluster_file": (None, cluster_files)},
    ),
    "gram": (
        lambda x, out, **options: tw.gram(x, out, **options),
        GRAM | PRECISION | MEMORY | DEVICE | PLACED | STORED,
    ),
    "eofs": (
        lambda x, out, **options: tw.eofs(x, out, **options),
        {name: GRAM[name] for name in ("x", "out", "of", "missing", "sum_over", "constant", "overwrite")}
        | {"center": (st.booleans(), VALUES | junk), "scale": (st.booleans(), VALUES | junk)}
        | {"weights": (None, VALUES | junk), "sample_weights": (None, VALUES | junk)}
        | {"verify": (True, flags | junk), "method": (st.sampled_from(["auto", "krylov"]), words)}
        | SEARCH | PRECISION | MEMORY | DEVICE | PLACED,
    ),
    "topk": (
        lambda a, out, **options: tw.topk(a, options.pop("b"), out, **options),
        NEIGHBOURS | {"k": (3, counts), "exclude_self": (False, flags | junk)} | PRECISION | MEMORY | DEVICE | PLACED,
    ),
    "pairs": (
        lambda a, out, **options: tw.pairs(a, options.pop("b"), out, **options),
        NEIGHBOURS
        | {"above": (0.5, scalars), "below": (None, scalars), "count_only": (False, flags | junk)}
        | PRECISION | MEMORY | DEVICE | PLACED,
    ),
    "eigh": (
        lambda g, **options: tw.eigh(g, **options),
        {"g": (st.sampled_from(LEFT), sources)} | SEARCH | PRECISION | MEMORY | DEVICE | PLACED,
    ),
    "verify": (
        lambda a, b, c, **options: tw.verify(a, b, c, **options),
        FACTORS | {"c": ("C.zarr", sources), "rounds": (None, counts)} | TRANSPOSED | PRECISION | PLACED,
    ),
    "histogram": (
        lambda paths, **options: tw.histogram(paths, **options),
        {"paths": ("text.txt", corpora), "by": (st.sampled_from(["byte", "ascii", "letter"]), words)}
        | {"per_document": (False, flags | junk), "raw": (False, flags | junk)} | DEVICE | PLACED
        | {"casefold": (False, flags | junk), "normalise": (None, words | junk)},
    ),
    "plan_histogram": (
        lambda paths, **options: tw.plan_histogram(paths, **options),
        {"paths": ("text.txt", corpora), "by": (st.sampled_from(["byte", "ascii", "letter"]), words)}
        | {"per_document": (False, flags | junk), "raw": (False, flags | junk)} | DEVICE | PLACED
        | {"casefold": (False, flags | junk), "normalise": (None, words | junk)},
    ),
    "duplicates": (
        lambda paths, **options: tw.duplicates(paths, **options),
        {"paths": ("text.txt", corpora), "threshold": (0.5, FRACTIONS)}
        | {"shingle": ("word", words), "ngram": (3, counts), "num_perm": (8, counts)}
        | {"casefold": (False, flags | junk), "normalise": (None, words | junk)}
        | {"bands": (None, counts), "rows": (None, counts), "seed": (1, counts), "hash": ("sha1", words)}
        | DEVICE
        | {"scheme": ("legacy", words), "pairs": ("all", words), "signatures": (False, flags | junk)}
        | {"out": (None, st.sampled_from(["d.csv", "d", "folder", "nowhere/d.json", "text.txt"]) | junk)}
        | {"overwrite": (False, flags | junk), "raw": (False, flags | junk), "split_on": (None, words | junk)}
        | {"on_error": ("stop", words | junk)} | PLACED,
    ),
    "signals": (
        lambda paths, **options: tw.signals(paths, **options),
        {"paths": ("text.txt", corpora), "stop_words": (None, words | st.lists(words, max_size=2) | junk)}
        | {"rules": (None, st.sampled_from(["gopher", "c4", "no.yaml", {"rules": {"word_count": 5}}]) | words | junk)}
        | {"out": (None, st.sampled_from(["d.npz", "d", "folder", "nowhere/d.csv", "text.txt"]) | junk)}
        | {"overwrite": (False, flags | junk), "raw": (False, flags | junk), "split_on": (None, words | junk)}
        | {"on_error": ("stop", words | junk)} | PLACED,
    ),
    "dot": (
        lambda x, y, **options: tw.dot(x, y, **options),
        {name: (st.sampled_from(VECTOR), sources) for name in "xy"}
        | {"dtype": (None, dtypes)} | DEVICE | PLACED,
    ),
    "open_xarray": (
        lambda source, **options: tw.open_xarray(source, **options),
        {"source": (st.sampled_from(LEFT), sources), "unstack": (st.booleans(), flags | junk)},
    ),
    "open_cluster": (
        lambda cluster, config: _entered(cluster, config),
        {"cluster": (SHARED, clusters), "config": (None, cluster_files)},
    ),
}  # fmt: skip
"""Each function, and of each of its arguments what is right and what may be wrong."""


def _entered(cluster: Any, config: Any) -> None:
    with tw.open_cluster(cluster, config):
        pass


@st.composite
def calls(draw: st.DrawFn, arguments: dict[str, tuple[Any, st.SearchStrategy[Any]]]) -> dict[str, Any]:
    """The arguments of a call, of which one to three may be wrong."""
    wrong = draw(st.sets(st.sampled_from(sorted(arguments)), min_size=1, max_size=min(3, len(arguments))))
    chosen = {}
    for name, (right, bad) in arguments.items():
        right = right if isinstance(right, st.SearchStrategy) else st.just(right)
        chosen[name] = draw(bad if name in wrong else right)
    return chosen


def check_call(place: Path, client: Client, function: str, arguments: dict[str, Any]) -> None:
    """One case: a call with these arguments, and all that is asserted of it."""
    given = {name: client if value is SHARED else made(value) for name, value in arguments.items()}
    call = FUNCTIONS[function][0]
    before, left = tree(place), Left()
    found = outcome(lambda: call(**given))
    results = []
    if arguments.get("out") is not None:
        out = arguments["out"]
        if isinstance(out, Made):
            results = ["here/given.zarr"]
        elif not isinstance(found, tw.TilewrightError):
            results = [os.path.normpath(f"here/{os.fspath(out).removeprefix('file://')}")]
            results += new_parents(results[0], before)
    try:
        check_tree(before, place, *results)
        left.check()
    finally:
        for path in results:
            if path not in before:
                shutil.rmtree(place / path, ignore_errors=True)
        shutil.rmtree(place / "here" / "given.zarr", ignore_errors=True)


def check_profile(place: Path, text: bytes) -> None:
    """One case: a cluster by a profile of this text."""
    (place / "here" / "mine.yaml").write_bytes(text)
    before, left = tree(place), Left()
    outcome(lambda: _entered("mine", "mine.yaml"))
    check_tree(before, place)
    left.check()


def new_parents(result: str, before: dict[str, Any]) -> list[str]:
    """The folders that were made for a result."""
    return [str(parent) for parent in Path(result).parents if str(parent) not in (".", *before)]


MATRICES: dict[str, Callable[[], Any]] = {
    "float64": lambda: np.arange(30.0).reshape(6, 5),
    "int32": lambda: np.arange(30, dtype=np.int32).reshape(6, 5),
    "vector": lambda: np.arange(5.0),
    "text": lambda: np.frombuffer(b"some text", np.uint8).copy(),
    "offsets": lambda: np.array([0, 4, 9]),
    "scalar": lambda: np.array(1.0),
    "cube": lambda: np.ones((2, 2, 2)),
    "no rows": lambda: np.ones((0, 5)),
    "no columns": lambda: np.ones((6, 0)),
    "objects": lambda: np.full((6, 5), None, object),
    "words": lambda: np.full((6, 5), "a"),
    "truth values": lambda: np.ones((6, 5), bool),
    "dates": lambda: np.zeros((6, 5), "M8[s]"),
    "records": lambda: np.zeros((6, 5), [("a", "f4"), ("b", "i4")]),
    "a record's field": lambda: np.zeros((6, 5), [("a", "i1"), ("b", "f4")])["b"],
    "read-only": lambda: np.broadcast_to(1.0, (6, 5)),
    "much": lambda: np.broadcast_to(1.0, (10**6, 10**6)),
    "every other": lambda: np.arange(60.0).reshape(6, 10)[:, ::2],
    "backwards": lambda: np.arange(30.0).reshape(6, 5)[::-1, ::-1],
    "big-endian": lambda: np.arange(30.0).reshape(6, 5).astype(">f8"),
    "Fortran": lambda: np.asfortranarray(np.arange(30.0).reshape(6, 5)),
    "masked": lambda: np.ma.masked_equal(np.arange(30.0).reshape(6, 5), 3),
    "no mask": lambda: np.ma.array(np.arange(30.0).reshape(6, 5)),
    "masked bytes": lambda: np.ma.array(np.zeros(9, np.uint8), mask=[1] * 9),
    "matrix": lambda: np.arange(30.0).reshape(6, 5).view(np.matrix),
    "list": lambda: [[1.0, 2.0, 3.0, 4.0, 5.0]] * 6,
    "ragged list": lambda: [[1], [2, 3]],
    "bytes": lambda: b"some text",
    "longdouble": lambda: np.ones((6, 5), np.longdouble),
    "unsigned offsets": lambda: np.array([0, 2**63], np.uint64),
    "falling offsets": lambda: np.array([4, 0]),
    "stored": lambda: zarr.open_array("A.zarr", mode="r"),
    "counts": lambda: np.zeros(256, np.int64),
    "out": lambda: np.zeros((5, 5)),
}  # fmt: skip
arrays = st.sampled_from([Made(name, make) for name, make in MATRICES.items()]) | junk
streams = st.sampled_from(["0", -1, 0, 1, 2.5, True, object()]) | junk


def _array(name: str) -> Made:
    return Made(name, MATRICES[name])


KERNELS: dict[str, tuple[Callable[..., Any], dict[str, tuple[Any, st.SearchStrategy[Any]]]]] = {
    "matmul": (
        lambda a, b, out, **options: kernels.matmul(a, b, out, **options),
        {name: (_array("float64"), arrays) for name in "ab"}
        | {"out": (None, arrays), "accumulate": (False, flags | junk)}
        | {"dtype": (None, dtypes), "stream": (None, streams)}
        | {"transpose_a": (True, flags | junk), "transpose_b": (False, flags | junk)} | PRECISION | DEVICE,
    ),
    "histogram": (
        lambda data, **options: kernels.histogram(data, **options),
        {"data": (_array("text"), arrays), "by": (st.sampled_from(["byte", "bigram"]), words)}
        | {"offsets": (None, arrays), "out": (None, arrays), "stream": (None, streams)} | DEVICE,
    ),
    "dot": (
        lambda x, y, **options: kernels.dot(x, y, **options),
        {name: (_array("vector"), arrays) for name in "xy"}
        | {"conjugate": (True, flags | junk), "stream": (None, streams)} | DEVICE,
    ),
    "DocumentOffsets": (kernels.DocumentOffsets, {"offsets": (_array("offsets"), arrays)}),
}  # fmt: skip
"""As `FUNCTIONS`, of arrays in memory."""


def check_kernel(function: str, arguments: dict[str, Any]) -> None:
    """One case: a call with these arguments. Nothing but ``out`` is written to."""
    given = {name: made(value) for name, value in arguments.items()}
    copies = {
        name: value.copy()
        for name, value in given.items()
        if isinstance(value, np.ndarray) and value.size < 10**6
    }
    found = outcome(lambda: KERNELS[function][0](**given))
    for name, before in copies.items():
        if name != "out" or isinstance(found, tw.TilewrightError):
            np.testing.assert_array_equal(np.asarray(given[name]), np.asarray(before))


MORE = settings(max_examples=2500, derandomize=False, suppress_health_check=list(HealthCheck))
MORE_CLUSTERS = settings(max_examples=300, derandomize=False, suppress_health_check=list(HealthCheck))


@pytest.mark.sample(1)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_wrong_arguments(function: str, place: Path, client: Client) -> None:
    @given(calls(FUNCTIONS[function][1]))
    def test(arguments: dict[str, Any]) -> None:
        check_call(place, client, function, arguments)

    test()


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
def test_more_wrong_arguments(function: str, place: Path, client: Client) -> None:
    @MORE
    @given(calls(FUNCTIONS[function][1]))
    def test(arguments: dict[str, Any]) -> None:
        check_call(place, client, function, arguments)

    test()


@pytest.mark.sample(2)
@pytest.mark.parametrize("function", KERNELS)
def test_wrong_arguments_of_kernels(function: str, place: Path) -> None:
    @given(calls(KERNELS[function][1]))
    def test(arguments: dict[str, Any]) -> None:
        check_kernel(function, arguments)

    test()


@pytest.mark.slow
@pytest.mark.parametrize("function", KERNELS)
def test_more_wrong_arguments_of_kernels(function: str, place: Path) -> None:
    @MORE
    @given(calls(KERNELS[function][1]))
    def test(arguments: dict[str, Any]) -> None:
        check_kernel(function, arguments)

    test()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Dask's half-made clusters
def test_wrong_profiles(place: Path) -> None:
    @MORE_CLUSTERS
    @given(profiles())
    def test(text: bytes) -> None:
        check_profile(place, text)

    test()
