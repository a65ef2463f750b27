"""The slow, obvious matrix product that every variant is compared with, and matrices to try it on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tests.sampling import with_others
from tilewright.kernels.tolerance import tolerance

INTEGERS = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
FLOATS = ("bfloat16", "f2", "f4", "f8")
COMPLEX = ("c8", "c16")
DTYPES = INTEGERS + FLOATS + COMPLEX
DRAWN_INTEGERS = with_others(("i1", "i4", "i8", "u8"), ("i2", "u1", "u2", "u4"))
DRAWN = [*DRAWN_INTEGERS, *FLOATS, *COMPLEX]
"""What tests draw that go to loops of the CPU, which are compiled for each dtype of integers."""
FILLER = 77
"""What lies between and around the elements of a matrix that is part of a larger array."""


def matmul(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
    """Python's exact integers, wrapped; or sums in the widest floating-point type there is."""
    result = np.result_type(a, b) if dtype is None else np.dtype(dtype)
    if not a.shape[1]:
        return np.zeros((a.shape[0], b.shape[1]), result)
    if result.kind in "iu":
        return wrap(a.astype(object) @ b.astype(object), result)
    wide = np.clongdouble if result.kind == "c" else np.longdouble
    with np.errstate(all="ignore"):
        return a.astype(wide) @ b.astype(wide)


def stored_dtype(a: Any, b: Any, k: int) -> np.dtype:
    """The dtype of a stored product of k × the product of two elements, as README has it."""
    a, b, numpys = np.dtype(a), np.dtype(b), np.result_type(a, b)
    if numpys.kind not in "iu" or "f" in (a.kind, b.kind):
        return numpys
    corners = [
        k * int(x) * int(y)
        for x in (np.iinfo(a).min, np.iinfo(a).max)
        for y in (np.iinfo(b).min, np.iinfo(b).max)
    ]
    for name in ("int32", "uint32", "int64", "uint64"):
        holds = np.iinfo(name)
        if np.can_cast(numpys, name, "safe") and holds.min <= min(corners) and max(corners) <= holds.max:
            return np.dtype(name)
    return np.dtype({"i": "int64", "u": "uint64"}[numpys.kind])


def wrap(exact: np.ndarray, dtype: Any) -> np.ndarray:
    """Python integers modulo 2**bits, in an integer type."""
    bits = 8 * np.dtype(dtype).itemsize
    unsigned = np.array([[int(value) % (1 << bits) for value in row] for row in exact], f"u{bits // 8}")
    return unsigned.reshape(exact.shape).view(dtype)


def sizes(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What `tolerance` calls so, of every element of a product."""
    return np.add.outer(np.abs(a).astype("f8").sum(axis=1), np.abs(b).astype("f8").sum(axis=0))


def assert_product(
    found: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    added_to: np.ndarray | None = None,
    precision: str = "full",
) -> None:
    """``found`` is the product of finite matrices (added to another), exactly or within the one tolerance."""
    dtype = found.dtype
    exact = matmul(a, b, dtype)
    k = a.shape[1]
    if dtype.kind in "iu":
        if added_to is not None:
            exact = wrap(exact.astype(object) + added_to.astype(object), dtype)
        np.testing.assert_array_equal(found, exact)
        return
    scale = matmul(np.abs(a).astype("f8"), np.abs(b).astype("f8"), "f8").astype("f8")
    if added_to is not None:
        exact, scale, k = exact + added_to, scale + np.abs(added_to).astype("f8"), k + 1
    allowed = tolerance(k, dtype, scale, precision, sizes(a, b))
    error = np.abs(found.astype(exact.dtype) - exact).astype("f8")
    worst = np.unravel_index(np.argmax(error - allowed), error.shape) if error.size else None
    assert (error <= allowed).all(), (
        f"element {worst}: found {found[worst]}, exact {exact[worst]}, error {error[worst]:.3g}, "
        f"allowed {allowed[worst]:.3g}"
    )


def numbers(rng: np.random.Generator, shape: tuple[int, int], dtype: Any) -> np.ndarray:
    """Random elements: integers over the type's whole range, floats around 1 with both signs."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    values = rng.standard_normal(shape)
    if dtype.kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype)


def _within(values: np.ndarray, base: tuple[int, int], region: tuple[slice, slice]) -> np.ndarray:
    """The values as a region of a larger array whose other elements are the filler."""
    whole = np.full(base, FILLER, values.dtype)
    view = whole[region]
    view[...] = values
    return view


def _beyond(length: int) -> int:
    """The next multiple of 64 elements."""
    return (length // 64 + 1) * 64


def _unaligned(values: np.ndarray) -> np.ndarray:
    """At an address that is no multiple of the element's size."""
    raw = np.full(values.nbytes + 1, FILLER, np.uint8)
    view = raw[1:].view(values.dtype).reshape(values.shape)
    view[...] = values
    return view


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rows": lambda x: np.array(x, order="C"),
    "columns": lambda x: np.array(x, order="F"),
    "padded rows": lambda x: _within(x, (x.shape[0], x.shape[1] + 3), np.s_[:, : x.shape[1]]),
    "padded columns": lambda x: _within(x.T, (x.shape[1], x.shape[0] + 8), np.s_[:, : x.shape[0]]).T,
    # Lines that begin at multiples of 16 bytes, as copy engines want it, and need not end at one.
    "aligned rows": lambda x: _within(x, (x.shape[0], _beyond(x.shape[1])), np.s_[:, : x.shape[1]]),
    "aligned columns": lambda x: _within(x.T, (x.shape[1], _beyond(x.shape[0])), np.s_[:, : x.shape[0]]).T,
    "offset": lambda x: _within(x, (x.shape[0] + 1, x.shape[1] + 1), np.s_[1:, 1:]),
    "strided": lambda x: _within(x, (2 * x.shape[0], 3 * x.shape[1]), np.s_[::2, ::3]),
    "backward": lambda x: np.array(x[::-1, ::-1], order="C")[::-1, ::-1],
}
"""Layouts of a matrix in memory, each a function from values to an equal new array in that layout."""
HOST_LAYOUTS = {**LAYOUTS, "unaligned": _unaligned}
"""On a GPU an element's address must be a multiple of its size."""


def base_of(view: np.ndarray) -> np.ndarray:
    """The array that owns a view's memory."""
    while isinstance(view.base, np.ndarray):
        view = view.base
    return view


def assert_surroundings_kept(view: np.ndarray) -> None:
    """Nothing was written between or around the elements of a view: the filler is still there."""
    base = base_of(view)
    offset = view.ctypes.data - base.ctypes.data
    whole = np.array(base.ravel(order="K")).view(np.uint8)
    np.ndarray(view.shape, view.dtype, whole, offset, view.strides)[...] = FILLER
    start = offset % view.itemsize  # not zero where the view is unaligned: what is before it are single bytes
    whole_elements = (whole.size - start) // view.itemsize * view.itemsize
    assert (whole[:start] == FILLER).all()
    assert (whole[start : start + whole_elements].view(view.dtype) == FILLER).all()


def device_twin(view: np.ndarray) -> tuple[Any, Callable[[], np.ndarray]]:
    """A device array that lies in its allocation exactly as ``view`` does, and a function that fetches it.

    What is fetched is a view of a copy of the whole allocation, so that its surroundings can be checked too.
    """
    from numba import cuda

    from tilewright.kernels.gpu.device_array import to_device
    from tilewright.kernels.gpu.device_choice import SIMULATOR

    whole = base_of(view)
    flat = np.array(whole.ravel(order="K"))
    offset = view.ctypes.data - whole.ctypes.data

    def placed(buffer: np.ndarray) -> np.ndarray:
        return np.ndarray(view.shape, view.dtype, buffer, offset, view.strides)

    if SIMULATOR or not view.size:
        device = cuda.to_device(placed(flat)) if not view.size else type(cuda.to_device(flat))(placed(flat))
        return device, lambda: device._ary if SIMULATOR else placed(flat)
    memory = to_device(flat)
    device = type(memory)(
        shape=view.shape, strides=view.strides, dtype=view.dtype, gpu_data=memory.gpu_data.view(offset)
    )
    return device, lambda: placed(memory.copy_to_host())


def at_once(work: Callable[[Any], Any], cases: Sequence[Any]) -> list[Any]:
    """What ``work`` gives for each case, in order, a thread for each; all begin at the same moment."""
    together = threading.Barrier(len(cases), timeout=60)

    def begin(case: Any) -> Any:
        together.wait()
        return work(case)

    with ThreadPoolExecutor(len(cases)) as pool:
        return list(pool.map(begin, cases))
