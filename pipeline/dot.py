"""The dot product of two stored vectors: what is found out before a cluster is there, and the reduction over stretches.

`open_vectors` comes first, then `multiply_vectors`, whose tasks call `multiply_piece`.

The vectors are cut into blocks of a fixed number of elements, with one partial product each. A task takes many blocks,
the more the larger the chunks are that have to be decoded whole, but the partial products and the order of their sum
depend on the length alone: the same numbers give the same bits however they are stored and distributed.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr

from tilewright import __version__
from tilewright.kernels import dot
from tilewright.kernels.arguments import check_choice
from tilewright.kernels.choices import DeviceName
from tilewright.kernels.gemm import check
from tilewright.kernels.gemm.base import NUMPY_ELEMENTS
from tilewright.kernels.numbers import ceil_div, counted
from tilewright.kernels.passes.masked import Masks, count_masked
from tilewright.pipeline import config
from tilewright.pipeline.cluster.answers import ask_all
from tilewright.pipeline.cluster.here.client import HereClient
from tilewright.pipeline.errors import DamagedError, OptionError, ShapeError, StoreError
from tilewright.pipeline.events import Caution, Listener, Notice
from tilewright.pipeline.plan.sums import can_wrap_by_dtype, dtype_reason, found_wrap
from tilewright.pipeline.records import Record, open_record, packed_bytes, unpacked_bytes
from tilewright.pipeline.reduce import Reduction, end_if_given_up, reduce_pieces
from tilewright.pipeline.store.appearance import Appearance, appearance_of
from tilewright.pipeline.store.arrays import Input, name_of, open_array, read_unit
from tilewright.pipeline.store.attributes import codecs_notice, masked_caution, masks_of, packing_notice
from tilewright.pipeline.store.labels.alignment import ALIGNS, Align, Along, check_same_labels, ends_told
from tilewright.pipeline.store.origin import origin_of
from tilewright.pipeline.store.probe import check_read_alike, shared_inputs
from tilewright.pipeline.store.region_read import reads_parts, region_reads
from tilewright.pipeline.store.sources.dasks import computed_on
from tilewright.pipeline.store.waiting import reading_while
from tilewright.pipeline.threads import thread_buffer
from tilewright.pipeline.transfer.files import let_a_tick_pass

if TYPE_CHECKING:
    from distributed import Client

BLOCK = 2**20
"""Elements in one partial product."""

MOST_CHUNK_NBYTES = 256 * 2**20
"""A task takes whole chunks up to this size, unless parts can be read alone, and parts of larger ones, which are then
decoded more than once."""


@dataclass(frozen=True)
class Vectors:
    """Two stored vectors of equal length that can be multiplied, as they were when they were opened."""

    arrays: dict[str, zarr.Array[Any]]
    """``X`` and ``Y``, as tasks can read them."""
    dtype: np.dtype
    """The product's."""
    dtype_reason: str
    """One line: why it is that; empty where a vector holds floats."""
    masks: dict[str, Masks]
    """Of the vectors whose attributes have numbers stand for missing ones."""
    notes: tuple[str, ...]
    """What is to be said of them before they are multiplied, as text for people."""
    looks: dict[str, Appearance]
    """What tells that one was written to."""
    looked: float
    """When they were looked at, by `time.monotonic`."""


def open_vectors(x: Input, y: Input, dtype: str | np.dtype | None, align: Align = "labels") -> Vectors:
    """Open two vectors and find out what their product is.

    Raises
    ------
    StoreError, DTypeError
        One is not there, holds no numbers, or cannot be shared with workers; or does not cast to ``dtype``.
    ShapeError
        One has several dimensions, or the lengths differ.
    OptionError
        Their labels differ, and nobody said that they are paired by position.
    """
    check_choice("align", align, ALIGNS)
    opened = {"X": open_array(x, ndim=1, role="X"), "Y": open_array(y, ndim=1, role="Y")}
    sides = Along("X", opened["X"], 0), Along("Y", opened["Y"], 0)
    n = _common_length(*sides)
    if align == "labels":
        check_same_labels(*sides, "by which their elements are paired")
    arrays = shared_inputs(opened, copied=True)
    left, right = arrays.values()
    of_x, of_y = (np.dtype(vector.dtype).newbyteorder("=") for vector in (left, right))
    names = f"X: {name_of(left)}", f"Y: {name_of(right)}"
    result = check.result_dtype(of_x, of_y, dtype, names, NUMPY_ELEMENTS, k=n)
    return Vectors(
        arrays,
        result,
        dtype_reason(result, of_x, of_y, n, "numpy.vdot"),
        {role: found for role, vector in arrays.items() if (found := masks_of(vector)) is not None},
        tuple(
            note
            for role, vector in arrays.items()
            for note in (packing_notice(role, vector), codecs_notice(role, vector))
            if note
        ),
        {role: appearance_of(vector, status=True) for role, vector in arrays.items()},
        time.monotonic(),
    )


def _common_length(x: Along, y: Along) -> int:
    (n,), (n_y,) = x.shape, y.shape
    if n != n_y:
        raise ShapeError(
            f"{name_of(x.array)} has {n} elements and {name_of(y.array)} has {n_y}; they must have equally"
            f" many{ends_told(x, y)}"
        )
    return int(n)


def _check_unchanged(vectors: Vectors) -> None:
    """Raise StoreError if one is not what it was when it was opened."""
    changed = [
        role
        for role, vector in vectors.arrays.items()
        if appearance_of(vector, status=True) != vectors.looks[role]
    ]
    if changed:
        names = " and ".join(f"{role}, {name_of(vectors.arrays[role])}," for role in changed)
        raise StoreError(
            f"{names} changed while X and Y were multiplied, so that the result may be of neither the old nor the"
            " new; let nobody write to them until it is done"
        )


@dataclass(frozen=True)
class DotSum:
    """The dot product of two stored vectors."""

    value: Any
    """A NumPy scalar."""
    wraps: str
    """``possible`` where it may have wrapped, by its dtype, the length and the largest elements; else ``no``."""
    masked: tuple[int, int]
    """How many elements of x and of y are missing by their masks; 0 where a vector has none."""


@dataclass(frozen=True)
class KeptParts:
    """The record of the sum's finished pieces, and what decides whether one is of these vectors."""

    record: Record
    vectors: str
    """How both look, and which of their numbers are taken for missing ones, which are counted on the way."""


@contextmanager
def open_parts(
    path: Path | None, vectors: Vectors, device: DeviceName, *, resume: bool = True
) -> Iterator[KeptParts | None]:
    """The record of a sum's finished pieces in the file ``path``, for as long as the block runs; None without one.

    device: the kind of it; sums on another may have other bits.

    Raises
    ------
    OptionError
        The file is of sums of another dtype or on another kind of device, or a vector does not lie in local files, so
        that nothing says whether it is what it was.
    OutputExistsError, StoreError
        As `open_record`.
    """
    if path is None:
        yield None
        return
    for role, vector in vectors.arrays.items():
        origin = origin_of(vector)
        if origin.folder is None and origin.file is None:
            raise OptionError(
                f"state: {role}, {name_of(vector)}, does not lie in local files, so that nothing would say whether it"
                " is still what it was; copy it to a disk, or leave --state (state=) out"
            )
    head = {
        "work": "dot",
        "dtype": vectors.dtype.name,
        "device": device,
        "block": BLOCK,
        "tilewright": __version__,  # releases may sum in other orders
    }
    with open_record(path, head, resume=resume) as record:
        # By their values: attributes, which name them, are no part of how an array looks.
        masks = {role: repr((found.values, found.least, found.most)) for role, found in vectors.masks.items()}
        yield KeptParts(record, json.dumps([vectors.looks, masks]))


def multiply_vectors(
    client: Client, vectors: Vectors, *, device: DeviceName, listener: Listener, kept: KeptParts | None = None
) -> DotSum:
    """`dot_stored` of vectors that nothing writes to meanwhile; the listener is told of missing numbers in them.

    Raises
    ------
    StoreError
        A vector has changed since it was opened; that comes in place of an error about a damaged chunk. Or a worker
        does not find the same vectors, or cannot read them.
    """
    check_read_alike(partial(ask_all, client), vectors.arrays, here=isinstance(client, HereClient))
    for told in computed_on(client, vectors.arrays.values()):
        listener(Caution(told))
    let_a_tick_pass(vectors.looked)
    x, y = vectors.arrays.values()
    masks = [vectors.masks.get(role) for role in vectors.arrays]
    try:
        total = dot_stored(
            client, x, y, vectors.dtype, device=device, listener=listener, masks=masks, kept=kept
        )
    except DamagedError as error:
        try:
            _check_unchanged(vectors)
        except StoreError as change:
            raise change from error
        raise
    _check_unchanged(vectors)
    found = {role: count for role, count in zip(vectors.arrays, total.masked, strict=True) if count}
    if note := masked_caution(found, vectors.masks, "the product"):
        listener(Caution(note))
    return total


def dot_stored(
    client: Client,
    x: zarr.Array[Any],
    y: zarr.Array[Any],
    dtype: np.dtype,
    *,
    device: DeviceName,
    listener: Listener,
    masks: Sequence[Masks | None] = (None, None),
    kept: KeptParts | None = None,
) -> DotSum:
    """Sum of conj(x[i]) y[i] over two vectors of n elements, as a NumPy scalar of ``dtype``, to which both cast
    ``same_kind``; and how many elements of x and of y are missing by ``masks``.

    Integers wrap modulo 2^bits of ``dtype`` and of nothing narrower. Where its bits leave that open, the vectors'
    largest elements are found on the way, and the listener is told if the sum may have wrapped. Partial products of
    floating point are rounded to ``dtype`` (float16: float32) and then added exactly, with a single rounding at the end
    (``math.fsum``).

    ``kept`` gets the partial products of each finished piece; those that it holds are not computed again.

    Raises
    ------
    ShapeError
        The lengths differ.
    StoreError
        A chunk cannot be read.
    """
    n = _common_length(Along("X", x, 0), Along("Y", y, 0))
    step, lighter = _piece_elements(x, y)
    ranges, known = _ranges(n, step, kept, listener)
    itemsize = x.dtype.itemsize + y.dtype.itemsize
    factors = x.dtype.newbyteorder("="), y.dtype.newbyteorder("=")
    ranged = can_wrap_by_dtype(dtype, *factors, n)
    total = reduce_pieces(
        client,
        _reduction(lighter),
        [(x, y, start, stop, dtype, device, ranged, tuple(masks)) for start, stop in ranges],
        [(stop - start) * itemsize for start, stop in ranges],
        listener,
        known=known,
        arrived=lambda place, part: _keep(kept, ranges[place], part),
        kept=kept is not None,
    )
    note = found_wrap("the sum", dtype, *factors, n, total.most_x, total.most_y) if ranged else None
    if note is not None:
        listener(Caution(note))
    return DotSum(_sum_of(total.partials, dtype), "no" if note is None else "possible", total.masked)


def _piece_elements(x: zarr.Array[Any], y: zarr.Array[Any]) -> tuple[int, str]:
    """Elements of a task: about the configured size, at least a chunk that has to be decoded whole, in whole blocks;
    and how a user makes that less."""
    itemsize = x.dtype.itemsize + y.dtype.itemsize
    blocks, lighter = max(1, ceil_div(config.get("piece-nbytes") // itemsize, BLOCK)), ""
    if blocks > 1:
        lighter = "let them take smaller pieces (tilewright.piece-nbytes), or "
    for array in (x, y):
        if reads_parts(array):
            continue
        chunk = read_unit(array)[0]
        needed = ceil_div(min(chunk, MOST_CHUNK_NBYTES // array.dtype.itemsize), BLOCK)
        if needed > blocks:
            blocks = needed
            lighter = f"store {name_of(array)} in smaller chunks, now of {chunk} elements, or "
    return BLOCK * blocks, f"{lighter}run fewer of them at once (threads_per_worker, in a profile)"


@dataclass(frozen=True)
class _Partials:
    """The partial products of consecutive blocks, and what was found out about the vectors there."""

    partials: list[Any] = field(default_factory=list)
    most_x: int = 0
    """The largest absolute value in x, where it was looked for."""
    most_y: int = 0
    masked: tuple[int, int] = (0, 0)
    """How many elements of x and of y are missing."""

    def followed_by(self, others: _Partials) -> _Partials:
        """Those of these blocks and of the ones behind them; ``partials`` is written into."""
        self.partials.extend(others.partials)
        return _Partials(
            self.partials,
            max(self.most_x, others.most_x),
            max(self.most_y, others.most_y),
            (self.masked[0] + others.masked[0], self.masked[1] + others.masked[1]),
        )


def _ranges(
    n: int, step: int, kept: KeptParts | None, listener: Listener
) -> tuple[list[tuple[int, int]], dict[int, _Partials]]:
    """The stretches of vectors of length n, in order, with the parts of those that an earlier run finished, by place.

    Whatever the sizes of its stretches were, all begin with a block: what it did not finish is cut into others.
    """
    ranges: list[tuple[int, int]] = []
    known: dict[int, _Partials] = {}
    entries = [] if kept is None else [entry for _, entry in kept.record.entries()]
    ours = [entry for entry in entries if kept is not None and entry["vectors"] == kept.vectors]
    done = 0
    for entry in sorted(ours, key=itemgetter("start")):
        start, stop = entry["start"], entry["stop"]
        if start < done:
            continue  # of two runs at once, where a file system has shown them no lock
        ranges += _cut(done, start, step)
        known[len(ranges)] = _part_of(entry)
        ranges.append((start, stop))
        done = stop
    ranges += _cut(done, n, step)
    if known:
        listener(Notice(f"{counted(len(known), 'piece')} of earlier runs not multiplied again"))
    elif entries:
        listener(Notice("what earlier runs kept is of other vectors, or of these before they changed"))
    return ranges, known


def _cut(start: int, stop: int, step: int) -> list[tuple[int, int]]:
    return [(here, min(here + step, stop)) for here in range(start, stop, step)]


def _keep(kept: KeptParts | None, stretch: tuple[int, int], part: _Partials) -> _Partials:
    if kept is not None:
        values = np.array(part.partials)
        entry = {
            "vectors": kept.vectors,
            "start": stretch[0],
            "stop": stretch[1],
            "dtype": values.dtype.str,
            "partials": packed_bytes(values.tobytes()),  # to the bit, NaN too
            "most": [int(part.most_x), int(part.most_y)],
            "masked": [int(count) for count in part.masked],
        }
        kept.record.append(entry)
    return part


def _part_of(entry: dict[str, Any]) -> _Partials:
    values = np.frombuffer(unpacked_bytes(entry["partials"]), entry["dtype"])
    (most_x, most_y), (in_x, in_y) = entry["most"], entry["masked"]
    return _Partials(list(values), most_x, most_y, (in_x, in_y))


def _reduction(lighter: str) -> Reduction[_Partials, _Partials]:
    return Reduction(
        name="dot",
        chunk=multiply_piece,
        identity=_Partials,
        combine=_Partials.followed_by,
        commutative=False,  # sums that are not finite are added in order
        lighter=lighter,
    )


def _sum_of(partials: list[Any], dtype: np.dtype) -> Any:
    """The sum of all partial products, rounded once to ``dtype``."""
    if dtype.kind in "iu":
        whole = sum(map(int, partials)) % 2 ** (8 * dtype.itemsize)
        return np.array(whole, np.uint64).astype(dtype)[()]
    if dtype.kind == "c":
        real = _exact_sum([float(value.real) for value in partials])
        imaginary = _exact_sum([float(value.imag) for value in partials])
        value: Any = complex(real, imaginary)
    else:
        value = _exact_sum([float(value) for value in partials])
    with np.errstate(over="ignore"):
        return np.array(value).astype(dtype)[()]


def _exact_sum(values: list[float]) -> float:
    """The correctly rounded sum; infinity and NaN as adding one by one gives them."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        with np.errstate(all="ignore"):
            return float(np.add.reduce(np.array(values)))


def multiply_piece(
    x: zarr.Array[Any],
    y: zarr.Array[Any],
    start: int,
    stop: int,
    dtype: np.dtype,
    device: DeviceName,
    ranged: bool,
    masks: Sequence[Masks | None] = (None, None),
) -> tuple[_Partials, dict[str, float]]:
    """What a task does: compute the partial products of the blocks of x[start:stop] and y[start:stop], and count the
    elements of both that are missing by ``masks``.

    dtype: of the whole product. ranged: whether to find the largest elements too, of integers.
    """
    begin = time.perf_counter()
    with reading_while(end_if_given_up()):
        left, right = (_read(array, start, stop, device, role) for array, role in ((x, "x"), (y, "y")))
    read = time.perf_counter()
    # A float16 partial product could overflow although the whole product does not.
    partial_dtype = np.dtype(np.float32) if dtype == np.float16 else dtype
    partials, most = [], [0, 0]
    if ranged:
        from tilewright.kernels.dots.host import largest_of  # needs Numba, which a client has no use for
    for block in range(0, stop - start, BLOCK):
        parts = [array[block : block + BLOCK] for array in (left, right)]
        if ranged:
            most = [max(found, largest_of(part)) for found, part in zip(most, parts, strict=True)]
        partials.append(dot(*parts, dtype=partial_dtype, device=device))
    in_x, in_y = (_missing(*each) for each in zip((left, right), masks, strict=True))
    stages = {"read": read - begin, "multiply": time.perf_counter() - read}
    return _Partials(partials, most[0], most[1], (in_x, in_y)), stages


def _missing(data: np.ndarray, masks: Masks | None) -> int:
    return count_masked(data, masks) if masks is not None else 0


def _read(array: zarr.Array[Any], start: int, stop: int, device: DeviceName, role: str) -> np.ndarray:
    dtype = array.dtype.newbyteorder("=")
    data = thread_buffer(role, (stop - start) * dtype.itemsize, pinned=device == "cuda").view(dtype)
    for part in region_reads(array, (slice(start, stop),)):
        part.read(data[part.target])
    return data
