"""The dot product of stored vectors against NumPy, and its independence of how they are stored."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import dask
import numpy as np
import pytest
import zarr
from distributed import Client

from tilewright.kernels.dots import host as dot_host
from tilewright.kernels.passes.masked import Masks
from tilewright.pipeline import dot as dotting
from tilewright.pipeline.cluster.answers import WorkersKilledError
from tilewright.pipeline.dot import DotSum, dot_stored, multiply_vectors, open_parts, open_vectors
from tilewright.pipeline.errors import OptionError, ShapeError, TaskError
from tilewright.pipeline.events import Caution, Event, Listener, Notice, UnitDone, WorkPlanned
from tilewright.pipeline.store.arrays import open_array


def ignore(event: object) -> None:
    pass


def store(path: Path, values: np.ndarray, chunk: int, **options: object) -> zarr.Array:
    array = zarr.create_array(str(path), shape=values.shape, chunks=(chunk,), dtype=values.dtype, **options)
    array[:] = values
    return array


def draw(rng: np.random.Generator, n: int, dtype: str) -> np.ndarray:
    kind = np.dtype(dtype)
    if kind.kind in "iu":
        bounds = np.iinfo(kind)
        return rng.integers(bounds.min, bounds.max, n, kind, endpoint=True)
    values = rng.standard_normal(n)
    return (values + 1j * rng.standard_normal(n)).astype(kind) if kind.kind == "c" else values.astype(kind)


def product(
    client: Client,
    x: zarr.Array,
    y: zarr.Array,
    dtype: str | None = None,
    listener: Listener = ignore,
    masks: Sequence[Masks | None] = (None, None),
) -> DotSum:
    """On the CPU, in NumPy's type unless another is asked for."""
    wanted = np.dtype(dtype or np.result_type(x.dtype, y.dtype)).newbyteorder("=")
    return dot_stored(client, x, y, wanted, device="cpu", listener=listener, masks=masks)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and pieces so small that a thousand elements make many of both."""
    monkeypatch.setattr(dotting, "BLOCK", 64)
    with dask.config.set({"tilewright.piece-nbytes": 1}):
        yield


@pytest.mark.sample(2)
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", ["int8", "int16", "int64", "uint8", "uint32", "uint64"])
def test_integers_wrap_as_numpy_does(
    without_dask: Client, tmp_path: Path, rng: np.random.Generator, dtype: str
) -> None:
    x, y = draw(rng, 1003, dtype), draw(rng, 1003, dtype)
    result = product(without_dask, store(tmp_path / "x", x, 100), store(tmp_path / "y", y, 77)).value
    assert result == np.vdot(x, y)
    assert result.dtype == np.dtype(dtype)


@pytest.mark.sample(2)
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint8", "uint16", "uint32"])
def test_partial_products_wrap_in_the_type_asked_for_alone(
    without_dask: Client, tmp_path: Path, rng: np.random.Generator, dtype: str
) -> None:
    x, y = draw(rng, 1003, dtype), draw(rng, 1003, dtype)
    a, b = store(tmp_path / "x", x, 100), store(tmp_path / "y", y, 77)
    exact = sum(left * right for left, right in zip(x.tolist(), y.tolist(), strict=True))
    for result in ("int64", "int32") if dtype.startswith("i") else ("uint64", "uint32"):
        found = product(without_dask, a, b, result).value
        assert found.dtype == result
        assert (int(found) - exact) % 2 ** (8 * found.dtype.itemsize) == 0


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("least", [True, False])
def test_the_true_ranges_decide_whether_a_sum_may_have_wrapped(
    without_dask: Client, tmp_path: Path, least: bool
) -> None:
    """Each vector's largest element lies in a block of its own, and the bound is what both together allow."""
    n, limit = 1000, 2**63 - 1
    told: list[Event] = []
    ones = np.ones(n, "i8")
    ones[990] = 2
    x = np.zeros(n, "i8")
    x[130] = -(limit // (2 * n)) if least else limit // (2 * n)
    stored = [store(tmp_path / name, data, 100) for name, data in (("x", x), ("ones", ones))]
    found = product(without_dask, *stored, listener=told.append)
    assert (found.value, found.wraps) == (x[130], "no")
    assert not [event for event in told if isinstance(event, Caution)]

    x[130] += -1 if least else 1
    stored[0] = store(tmp_path / "larger", x, 100)
    found = product(without_dask, *stored, listener=told.append)
    assert (found.value, found.wraps) == (x[130], "possible")
    (caution,) = (event for event in told if isinstance(event, Caution))
    assert caution.message.startswith("the sum may have wrapped modulo 2^64")
    assert f"{abs(int(x[130]))} and 2, 1000 products can reach {abs(int(x[130])) * 2000}" in caution.message


@pytest.mark.usefixtures("small_blocks")
def test_a_narrow_type_that_was_asked_for_is_looked_into_no_wide_one(
    without_dask: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = store(tmp_path / "x", np.full(300, 2, "i1"), 100)
    told: list[Event] = []
    assert product(without_dask, x, x, "int8", told.append).wraps == "possible"
    (caution,) = (event for event in told if isinstance(event, Caution))
    assert caution.message.endswith("; --dtype int32 (dtype='int32') is safe")
    assert product(without_dask, x, x, "int16").wraps == "no", "by the elements' true size"

    def unwanted(vector: np.ndarray) -> int:
        raise AssertionError("no value of int8 makes a sum of 300 products wrap in int32")

    monkeypatch.setattr(dot_host, "largest_of", unwanted)
    assert product(without_dask, x, x, "int32") == DotSum(np.int32(1200), "no", (0, 0))
    assert product(without_dask, x, x, "float64") == DotSum(np.float64(1200), "no", (0, 0))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("dtype", "result"), [("float32", "float64"), ("float16", "float32"), ("float64", "float16")]
)
def test_floats_are_added_up_in_the_type_asked_for(
    without_dask: Client, tmp_path: Path, rng: np.random.Generator, dtype: str, result: str
) -> None:
    x, y = draw(rng, 1003, dtype), draw(rng, 1003, dtype)
    found = product(without_dask, store(tmp_path / "x", x, 100), store(tmp_path / "y", y, 77), result).value
    exact = math.fsum((x.astype("f8") * y.astype("f8")).tolist())
    scale = float(np.linalg.norm(x.astype("f8") * y.astype("f8")))
    work = np.finfo("f4" if result == "float16" else result)
    assert found.dtype == result
    assert abs(float(found) - exact) <= 4 * float(work.eps) * scale + 0.51 * float(
        np.finfo(result).eps
    ) * abs(exact)


@pytest.mark.sample(3)
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_floats_are_close_to_the_exact_sum(
    without_dask: Client, tmp_path: Path, rng: np.random.Generator, dtype: str
) -> None:
    x, y = draw(rng, 1003, dtype), draw(rng, 1003, dtype)
    result = product(without_dask, store(tmp_path / "x", x, 100), store(tmp_path / "y", y, 77)).value
    exact = np.vdot(x.astype(np.complex128), y.astype(np.complex128))
    scale = math.sqrt(float(np.sum(np.abs(x.astype(np.complex128) * y.astype(np.complex128)) ** 2)))
    assert result.dtype == np.dtype(dtype)
    assert abs(result - exact) <= 8 * np.finfo(dtype).eps * max(scale, abs(exact))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_blocks_are_added_exactly(without_dask: Client, tmp_path: Path, dtype: str) -> None:
    """One by one they make 0, and so they do with one correction carried along, as Python's own sum has it."""
    x = np.zeros(5 * dotting.BLOCK, dtype)
    x[:: dotting.BLOCK] = 1e32, 1e16, 1, -1e32, -1e16
    ones = np.full_like(x, 1j if dtype == "complex128" else 1)
    result = product(without_dask, store(tmp_path / "x", x, 100), store(tmp_path / "y", ones, 77)).value
    assert result == ones[0]


def test_the_result_is_the_same_however_the_vectors_are_stored(
    without_dask: Client, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dotting, "BLOCK", 64)
    x, y = draw(rng, 5000, "float32"), draw(rng, 5000, "float32")
    results = set()
    for i, (chunk, piece) in enumerate([(5000, 10**6), (100, 1), (64, 2000), (777, 1)]):
        with dask.config.set({"tilewright.piece-nbytes": piece}):
            a = store(tmp_path / f"x{i}", x, chunk, compressors=None if i % 2 else "auto")
            b = store(tmp_path / f"y{i}", y, 1 + chunk // 2)
            results.add(product(without_dask, a, b).value.tobytes())
    assert len(results) == 1


def test_a_task_takes_whole_chunks_only_where_they_are_decoded_whole(tmp_path: Path) -> None:
    """The smallest tasks are a block of both vectors."""
    block, options = dotting.BLOCK, {"shape": (2**24,), "dtype": "f8"}
    plain = zarr.create_array(tmp_path / "plain", chunks=(2**24,), compressors=None, **options)
    remote = open_array(f"file://{tmp_path}/plain", ndim=1, role="X")
    packed = zarr.create_array(tmp_path / "packed", chunks=(4 * block,), **options)
    small = zarr.create_array(tmp_path / "small", chunks=(block,), **options)
    fewer_threads = r"run fewer of them at once \(threads_per_worker, in a profile\)$"
    for x, y in ((plain, plain), (plain, remote), (plain, small), (small, remote)):
        with dask.config.set({"tilewright.piece-nbytes": 64 * block}):
            elements, lighter = dotting._piece_elements(x, y)
        assert elements == 4 * block
        assert re.match(
            rf"let them take smaller pieces \(tilewright\.piece-nbytes\), or {fewer_threads}", lighter
        )
        with dask.config.set({"tilewright.piece-nbytes": 2**15}):
            elements, lighter = dotting._piece_elements(x, y)
        assert elements == block, "the setting makes them smaller"
        assert re.match(fewer_threads, lighter), "and now would not"
    for x, y in ((packed, plain), (small, packed)):
        for nbytes in (2**15, 2**25):
            with dask.config.set({"tilewright.piece-nbytes": nbytes}):
                elements, lighter = dotting._piece_elements(x, y)
            assert elements == 4 * block
            assert re.match(
                rf"store \S*packed in smaller chunks, now of {4 * block} elements, or {fewer_threads}",
                lighter,
            )


def test_what_is_said_of_tasks_that_take_too_much_memory_is_what_helps(
    without_dask: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*arguments: object, **options: object) -> Iterator[None]:
        yield from ()
        raise WorkersKilledError("task dot-0 took down every worker that tried it")

    monkeypatch.setattr("tilewright.pipeline.reduce.run_bounded", lost)
    x = zarr.create_array(tmp_path / "x", shape=(2**23,), chunks=(2**23,), dtype="f8")
    with pytest.raises(
        TaskError, match=r"tried it, or store \S*x in smaller chunks, now of 8388608 elements"
    ):
        product(without_dask, x, x)


def test_mixed_dtypes_give_numpys_result_type(
    without_dask: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    x, y = draw(rng, 100, "int16"), draw(rng, 100, "float32")
    result = product(without_dask, store(tmp_path / "x", x, 100), store(tmp_path / "y", y, 77)).value
    assert result.dtype == np.result_type(x, y)
    np.testing.assert_allclose(result, np.vdot(x.astype(float), y.astype(float)), rtol=1e-5)


@pytest.mark.usefixtures("small_blocks")
def test_infinities_and_nan_are_answers(without_dask: Client, tmp_path: Path) -> None:
    ones = store(tmp_path / "ones", np.ones(200), 50)
    for i, (special, expected) in enumerate(
        [([np.inf], np.inf), ([np.inf, -np.inf], np.nan), ([np.nan], np.nan), ([1e308, 1e308], np.inf)]
    ):
        values = np.zeros(200)
        values[[0, 150][: len(special)]] = special  # in blocks of their own
        x = store(tmp_path / f"x{i}", values, 50)
        np.testing.assert_equal(product(without_dask, x, ones).value, expected)


@pytest.mark.usefixtures("small_blocks")
def test_half_precision_partial_products_do_not_overflow(without_dask: Client, tmp_path: Path) -> None:
    values = np.full(128, 60000, np.float16)
    values[64:] *= -1
    x, ones = store(tmp_path / "x", values, 50), store(tmp_path / "ones", np.ones(128, np.float16), 50)
    assert product(without_dask, x, ones).value == 0


def test_empty_vectors_give_zero(without_dask: Client, tmp_path: Path) -> None:
    x = zarr.create_array(str(tmp_path / "x"), shape=(0,), chunks=(10,), dtype="f4")
    result = product(without_dask, x, x).value
    assert result == 0
    assert result.dtype == np.float32


def test_lengths_must_agree(without_dask: Client, tmp_path: Path) -> None:
    x, y = store(tmp_path / "x", np.ones(3), 3), store(tmp_path / "y", np.ones(4), 4)
    with pytest.raises(ShapeError, match=r"x has 3 elements and .*y has 4"):
        product(without_dask, x, y)


@pytest.mark.sample(2)
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", ["int8", "uint16", "float16", ">f4", "float64", "complex64"])
def test_missing_elements_are_counted_over_all_pieces(
    without_dask: Client, tmp_path: Path, dtype: str
) -> None:
    places = np.arange(1003)
    x, y = (places % 10 + 1).astype(dtype), (places % 3).astype(dtype)
    a, b = store(tmp_path / "x", x, 100), store(tmp_path / "y", y, 77)
    in_x, in_y = int((x == 4).sum()), int((y == 0).sum())
    seen = []
    total = product(without_dask, a, b, listener=seen.append, masks=(Masks((4,)), Masks((0,))))
    assert total.masked == (in_x, in_y) == (100, 335)
    assert sum(isinstance(event, UnitDone) for event in seen) > 5, "several pieces"
    for masks, expected in (((None, Masks((0,))), (0, in_y)), ((Masks((4,)), None), (in_x, 0))):
        assert product(without_dask, a, b, masks=masks).masked == expected
    plain = product(without_dask, a, b)
    assert plain.masked == (0, 0)
    assert plain.value.tobytes() == total.value.tobytes()


class StoppedError(Exception):
    pass


def stopped_after(pieces: int | None, told: list[Event]) -> Listener:
    def listener(event: Event) -> None:
        told.append(event)
        if sum(isinstance(each, UnitDone) for each in told) == pieces and isinstance(
            event, WorkPlanned | UnitDone
        ):
            raise StoppedError

    return listener


def kept_product(
    client: Client, paths: list[Path], state: Path, listener: Listener, dtype: str | None = None
) -> DotSum:
    vectors = open_vectors(*map(str, paths), dtype)
    with open_parts(state, vectors, "cpu") as kept:
        return multiply_vectors(client, vectors, device="cpu", listener=listener, kept=kept)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("special", "dtype"),
    [
        (True, "float64"),
        (False, "int64"),
        *(
            pytest.param(special, dtype, marks=pytest.mark.slow)
            for special, dtype in (
                (False, "float64"),
                (False, "float16"),
                (True, "float16"),
                (False, "complex64"),
                (True, "complex64"),
            )
        ),
    ],
)
@pytest.mark.usefixtures("small_blocks")
def test_a_sum_that_was_stopped_behind_any_piece_goes_on_to_the_same_bits(
    without_dask: Client, tmp_path: Path, rng: np.random.Generator, dtype: str, special: bool
) -> None:
    x, y = draw(rng, 1003, dtype), draw(rng, 1003, dtype)
    if special and np.dtype(dtype).kind != "i":
        x[[130, 700]] = np.inf, np.nan
    paths = [tmp_path / "x", tmp_path / "y"]
    for path, values in zip(paths, (x, y), strict=True):
        store(path, values, 100, attributes={"_FillValue": values[5].item()} if dtype == "int64" else None)
    state, whole = tmp_path / "state", tmp_path / "whole"
    told: list[Event] = []
    expected = kept_product(without_dask, paths, whole, told.append)
    units = [event for event in told if isinstance(event, UnitDone)]
    assert len(units) >= 8
    for pieces in range(len(units) + 1):
        stopped: list[Event] = []
        with pytest.raises(StoppedError):
            kept_product(without_dask, paths, state, stopped_after(pieces, stopped))
        told.clear()
        # Other settings: pieces of three blocks.
        with dask.config.set({"tilewright.piece-nbytes": 3 * 64 * 2 * x.itemsize}):
            found = kept_product(without_dask, paths, state, told.append)
        assert found.value.tobytes() == expected.value.tobytes()
        assert (found.wraps, found.masked) == (expected.wraps, expected.masked)
        (planned,) = (event for event in told if isinstance(event, WorkPlanned))
        assert planned.done == pieces
        again, before = (
            sum(event.nbytes for event in run if isinstance(event, UnitDone)) for run in (told, stopped)
        )
        assert again == planned.nbytes == 2 * x.nbytes - before
        told.clear()
        kept_product(without_dask, paths, state, told.append)
        assert not [event for event in told if isinstance(event, UnitDone)], "nothing is left, then"
        state.unlink()


@pytest.mark.usefixtures("small_blocks")
def test_pieces_of_vectors_that_were_written_to_are_multiplied_anew(
    without_dask: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    paths, state = [tmp_path / "x", tmp_path / "y"], tmp_path / "state"
    arrays = [store(path, draw(rng, 500, "float64"), 100) for path in paths]
    kept_product(without_dask, paths, state, ignore)
    time = next((tmp_path / "x").rglob("0")).stat().st_mtime_ns
    arrays[0][3] = 5.0
    os.utime(next((tmp_path / "x").rglob("0")), ns=(time, time))
    told: list[Event] = []
    found = kept_product(without_dask, paths, state, told.append)
    assert found.value == product(without_dask, *arrays).value
    assert Notice("what earlier runs kept is of other vectors, or of these before they changed") in told
    with pytest.raises(OptionError, match=r'dtype is "float64" there and "complex128" here'):
        kept_product(without_dask, paths, state, ignore, "complex128")


@pytest.mark.usefixtures("small_blocks")
def test_pieces_hold_for_the_numbers_that_were_missing_then(without_dask: Client, tmp_path: Path) -> None:
    """Attributes change neither a stored number nor how the files look, and what is counted all the same."""
    paths, state = [tmp_path / "x", tmp_path / "y"], tmp_path / "state"
    arrays = [store(path, np.arange(500) % 5, 100, attributes={"_FillValue": 2}) for path in paths]
    assert kept_product(without_dask, paths, state, ignore).masked == (100, 100)
    arrays[0].update_attributes({"_FillValue": 7})
    assert kept_product(without_dask, paths, state, ignore).masked == (0, 100)
    told: list[Event] = []
    arrays[0].update_attributes({"units": "m"})
    assert kept_product(without_dask, paths, state, told.append).masked == (0, 100)
    assert not [event for event in told if isinstance(event, UnitDone)], "that says nothing of any number"


@pytest.mark.usefixtures("small_blocks")
def test_a_piece_that_is_kept_twice_counts_once(without_dask: Client, tmp_path: Path) -> None:
    """Of two runs at once, where a file system has shown them no lock."""
    paths, state = [tmp_path / "x", tmp_path / "y"], tmp_path / "state"
    for path in paths:
        store(path, np.arange(500), 100)
    expected = kept_product(without_dask, paths, state, ignore).value
    head, *lines = state.read_bytes().splitlines(keepends=True)
    state.write_bytes(b"".join([head, *lines, *lines]))
    assert kept_product(without_dask, paths, state, ignore).value == expected


def test_vectors_that_may_have_changed_unnoticed_keep_no_pieces(without_dask: Client, tmp_path: Path) -> None:
    vector = zarr.array(np.ones(5))
    vectors = open_vectors(vector, vector, None)
    with (
        pytest.raises(OptionError, match=r"state: X, .* does not lie in local files"),
        open_parts(tmp_path / "state", vectors, "cpu"),
    ):
        pass
