"""Errors of every kind in products of every dtype: how many escape the check, and how often it is wrong about a right
product.

The check runs on arrays in memory and in this process: the same functions as on a cluster, thousands of times.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tests.sampling import with_others
from tilewright.kernels.tolerance import OPERAND_ROUNDOFF
from tilewright.pipeline.check.sides import Done, Work, as_summed
from tilewright.pipeline.check.vectors import Probe, draw_probe
from tilewright.pipeline.check.verify import Steps, Verification, check_sides

DTYPES = with_others(["f2", "f4", "f8", "c16", "i4", "i8", "u1", "u8"], ["c8", "i1", "i2", "u2", "u4"])
ROUNDS = 2
CHUNK = 12
"""Columns of a chunk of C, of which a group has a whole number, and the side of a tile."""


@dataclass(frozen=True)
class Held:
    """A matrix in memory, as the check reads it: in blocks that do not fit its sides."""

    array: np.ndarray
    block: tuple[int, int] = (17, CHUNK)

    @property
    def shape(self) -> tuple[int, int]:
        return self.array.shape[0], self.array.shape[1]

    @property
    def name(self) -> str:
        return "held"

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    @property
    def sent_nbytes(self) -> int:
        return 0

    @property
    def transposed(self) -> Held:
        return Held(self.array.T, self.block[::-1])

    def each_block(self, rows: slice, columns: slice, probe: Probe, work: Work[Done]) -> Iterator[Done]:
        region = self.array[rows, columns]
        for top in range(0, region.shape[0], self.block[0]):
            for left in range(0, region.shape[1], self.block[1]):
                place = slice(top, min(top + self.block[0], region.shape[0]))
                across = slice(left, min(left + self.block[1], region.shape[1]))
                # What is done with a block may change it.
                yield work(place, across, as_summed(region[place, across].copy(), probe.dtype, probe.compute))


class Here:
    """Runs tasks in this thread."""

    def run(
        self,
        function: Callable[..., Any],
        calls: Iterable[tuple[Any, ...]],
        values: tuple[Any, ...],
        nbytes: int,
        name: str,
    ) -> Generator[tuple[int, Any], None, None]:
        for place, call in enumerate(calls):
            yield place, function(*call, *values)

    def finished(self, index: int, side: Any, rows: slice) -> None:
        pass


@dataclass(frozen=True)
class Product:
    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    precision: str = "full"

    def check(self, c: np.ndarray) -> Verification:
        k, n = self.b.shape
        probe = draw_probe(n, k, c.dtype, ROUNDS, CHUNK)
        found = check_sides(
            Here(),
            Held(self.a),
            Held(self.b),
            Held(c),
            probe,
            c.dtype,
            self.precision,
            Steps(right=40, left=30, columns=50, narrowest=CHUNK),
            listener=lambda event: None,
        )
        return replace(found, rounds=ROUNDS)

    def limits(self, c: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
        """What the sums of each row and group of C may deviate by, from whole matrices, and where groups are cut."""
        k, n = self.b.shape
        cuts = draw_probe(n, k, c.dtype, ROUNDS, CHUNK).cuts
        u = np.finfo("f4" if c.dtype == np.float16 else c.dtype).eps / 2
        growth = 4 * u * max(k * (1 + (c.dtype.kind == "c")), 4) + 12 * OPERAND_ROUNDOFF[self.precision]
        wide = np.complex128 if c.dtype.kind == "c" else np.float64
        a, b = np.abs(self.a.astype(wide)), np.abs(self.b.astype(wide))
        columns = []
        for start, stop in itertools.pairwise(cuts):
            scale = np.sqrt((a**2 @ b[:, start:stop] ** 2).sum(axis=1))
            own = np.linalg.norm(c[:, start:stop].astype(wide), axis=1)
            elements = np.minimum(own, math.sqrt(k) * scale)
            limit = growth * np.maximum(scale, elements)
            if c.dtype == np.float16:
                limit += 6 * 2.0**-11 * elements
                limit += 6 * math.sqrt(stop - start) * 2.0**-24
            parts = -(-max(np.diff(cuts)) // CHUNK) + 2
            widest = max(np.diff(cuts))
            limit += (
                6
                * 2.0**-53
                * math.sqrt((min(widest, 512) + widest / 512 + 2 * parts) / 3)
                * (scale + elements)
            )
            columns.append(limit)
        return np.stack(columns, axis=1), cuts

    def size(self, wrong: np.ndarray) -> float:
        """Of the largest error of a row and group, in multiples of what it may deviate by."""
        with np.errstate(all="ignore"):
            limits, cuts = self.limits(wrong)
            wide = np.complex128 if wrong.dtype.kind == "c" else np.float64
            difference = wrong.astype(wide) - self.a.astype(wide) @ self.b.astype(wide)
            sizes = []
            for group, (start, stop) in enumerate(itertools.pairwise(cuts)):
                part = difference[:, start:stop]
                norms = np.maximum(np.linalg.norm(part.real, axis=1), np.linalg.norm(part.imag, axis=1))
                sizes.append(np.where(norms == 0, 0, norms / limits[:, group]).max())
        return float(max(sizes))


def multiplied(a: np.ndarray, b: np.ndarray, c_dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    """C, now as a library adds it up, now one term after another, the least accurate order."""
    compute = np.dtype("f4") if c_dtype == np.float16 else c_dtype
    a, b = a.astype(compute), b.astype(compute)
    with np.errstate(all="ignore"):
        if a.shape[1] <= 40 and rng.random() < 0.5:
            c = np.zeros((a.shape[0], b.shape[1]), compute)
            for inner in range(a.shape[1]):
                c += np.outer(a[:, inner], b[inner])
        else:
            c = a @ b
        return c.astype(c_dtype)


def numbers(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    kind = np.dtype(dtype)
    if kind.kind in "iu":
        info = np.iinfo(kind)
        low, high = (info.min, info.max) if rng.random() < 0.5 else (max(info.min, -9), 9)
        return rng.integers(low, high, shape, dtype=kind, endpoint=True)
    values = rng.standard_normal(shape)
    if kind.kind == "c":
        return (values + 1j * rng.standard_normal(shape)).astype(kind)
    return values.astype(kind)


def sides_of(rng: np.random.Generator) -> tuple[int, int, int]:
    m, n, k = (int(side) for side in rng.integers(2, 60, 3))
    return m, n, int(rng.integers(1, 400)) if rng.random() < 0.1 else k


def product(rng: np.random.Generator, dtype: str) -> Product:
    m, n, k = sides_of(rng)
    a, b = numbers(rng, (m, k), dtype), numbers(rng, (k, n), dtype)
    return Product(a, b, multiplied(a, b, np.dtype(dtype), rng))


def two(rng: np.random.Generator, count: int) -> tuple[int, int]:
    first, second = rng.choice(count, 2, replace=False)
    return int(first), int(second)


def tile(rng: np.random.Generator, c: np.ndarray) -> tuple[slice, slice]:
    places = []
    for length in c.shape:
        start = int(rng.integers(0, -(-length // CHUNK))) * CHUNK
        places.append(slice(start, min(start + CHUNK, length)))
    return places[0], places[1]


def swapped_columns(rng: np.random.Generator, p: Product, c: np.ndarray) -> None:
    i, j = two(rng, c.shape[1])
    c[:, [i, j]] = c[:, [j, i]]


def repeated_column(rng: np.random.Generator, p: Product, c: np.ndarray) -> None:
    i, j = two(rng, c.shape[1])
    c[:, i] = c[:, j]


def swapped_rows(rng: np.random.Generator, p: Product, c: np.ndarray) -> None:
    i, j = two(rng, c.shape[0])
    c[[i, j]] = c[[j, i]]


def repeated_row(rng: np.random.Generator, p: Product, c: np.ndarray) -> None:
    i, j = two(rng, c.shape[0])
    c[i] = c[j]


def swapped_tiles(rng: np.random.Generator, p: Product, c: np.ndarray) -> None:
    """Two blocks of whole height or of whole width, or pieces of two tiles, as large as the smaller one."""
    first, second = tile(rng, c), tile(rng, c)
    height, width = (
        min(one.stop - one.start, other.stop - other.start) for one, other in zip(first, second, strict=True)
    )
    i, j, s, t = first[0].start, first[1].start, second[0].start, second[1].start
    one = c[i : i + height, j : j + width].copy()
    c[i : i + height, j : j + width] = c[s : s + height, t : t + width]
    c[s : s + height, t : t + width] = one


def transposed_tile(rng: np.random.Generator, p: Product, c: np.ndarray) -> None:
    rows, columns = tile(rng, c)
    side = min(rows.stop - rows.start, columns.stop - columns.start)
    place = slice(rows.start, rows.start + side), slice(columns.start, columns.start + side)
    c[place] = c[place].T.copy()


def tile_of_another_product(rng: np.random.Generator, p: Product, c: np.ndarray) -> None:
    rows, columns = tile(rng, c)
    other = numbers(rng, p.b.shape, c.dtype.str)
    c[rows, columns] = multiplied(p.a, other, c.dtype, rng)[rows, columns]


def shifted_panel(rng: np.random.Generator, p: Product, c: np.ndarray) -> None:
    """A panel of B is read one row too late, for one tile."""
    rows, columns = tile(rng, c)
    k = p.b.shape[0]
    start = int(rng.integers(0, k))
    stop = int(rng.integers(start, k)) + 1
    b = p.b.copy()
    b[start:stop] = p.b[(np.arange(start, stop) + 1) % k]
    c[rows, columns] = multiplied(p.a, b, c.dtype, rng)[rows, columns]


def flipped_signs(rng: np.random.Generator, p: Product, c: np.ndarray) -> None:
    i, j = int(rng.integers(c.shape[0])), int(rng.integers(c.shape[1]))
    places: tuple[Any, ...] = ((i, j), (i, slice(None)), (slice(None), j), (slice(None), slice(None)))
    place = places[int(rng.integers(4))]
    with np.errstate(over="ignore"):
        c[place] = -c[place]


def plus_and_minus(rng: np.random.Generator, p: Product, c: np.ndarray) -> None:
    """d and -d in one row, in one column or in four corners; in floats about as small as is promised to be found."""
    (i, s), (j, t) = two(rng, c.shape[0]), two(rng, c.shape[1])
    if c.dtype.kind in "iu":
        bits = 8 * c.dtype.itemsize
        error = np.array(2 ** int(rng.integers(0, bits)), "u8").astype(c.dtype)
    else:
        limits, _ = p.limits(c)
        error = c.dtype.type(limits[i].max() * 10 ** rng.uniform(0.9, 2))
    form = int(rng.integers(3))
    with np.errstate(over="ignore"):
        c[i, j] += error
        if form != 1:
            c[i, t] -= error
        if form != 0:
            c[s, j] -= error
        if form == 2:
            c[s, t] += error


def scaled_tile(rng: np.random.Generator, p: Product, c: np.ndarray) -> None:
    place = tile(rng, c)
    with np.errstate(over="ignore", invalid="ignore"):
        if c.dtype.kind in "iu":
            c[place] *= c.dtype.type(rng.integers(2, 9))
        else:
            c[place] *= c.dtype.type(1 + 10 ** rng.uniform(-4, 1))


def zero_tile(rng: np.random.Generator, p: Product, c: np.ndarray) -> None:
    c[tile(rng, c)] = 0


def one_element(rng: np.random.Generator, p: Product, c: np.ndarray) -> None:
    i, j = int(rng.integers(c.shape[0])), int(rng.integers(c.shape[1]))
    if c.dtype.kind in "iu":
        with np.errstate(over="ignore"):
            c[i, j] += np.array(2 ** int(rng.integers(0, 8 * c.dtype.itemsize)), "u8").astype(c.dtype)
    else:
        c[i, j] += c.dtype.type(p.limits(c)[0][i].max() * 10 ** rng.uniform(0.9, 2))


KINDS = [
    swapped_columns,
    repeated_column,
    swapped_rows,
    repeated_row,
    swapped_tiles,
    transposed_tile,
    tile_of_another_product,
    shifted_panel,
    flipped_signs,
    plus_and_minus,
    scaled_tile,
    zero_tile,
    one_element,
]


def most(expected: float) -> float:
    """More than that many rare events, of which so many are expected at most, occur once in a thousand million runs."""
    # Chernoff: P(X >= t) <= exp(t - expected) (expected / t)^t for sums of independent events.
    count = math.ceil(expected) + 1
    while count - expected + count * math.log(max(expected, 1e-300) / count) > math.log(1e-9):
        count += 1
    return count


@dataclass
class Tally:
    injected: int = 0
    found: int = 0
    due: int = 0
    """Injected errors that are stated to be found: for floats those of at least ten times the tolerance."""
    escaped: int = 0
    """Of those."""
    expected: float = 0.0
    """An upper bound of how many of those escape."""


def tally(kind: Callable[..., None], dtypes: Iterable[str], count: int, seed: int) -> dict[str, Tally]:
    """How many errors of a kind were found, by dtype; products that the error leaves as they were do not count."""
    rng = np.random.default_rng(seed)
    found: dict[str, Tally] = {}
    for dtype in dtypes:
        mine = found[dtype] = Tally()
        attempts = 0
        while mine.due < count:
            attempts += 1
            assert attempts < 20 * count + 100, "most attempts change nothing"
            p = product(rng, dtype)
            wrong = p.c.copy()
            kind(rng, p, wrong)
            if np.array_equal(wrong, p.c) or not np.isfinite(p.c).all():
                continue
            outcome = p.check(wrong)
            assert outcome.conclusive
            mine.injected += 1
            mine.found += not outcome.passed
            size = 0.0 if outcome.modulus_bits is not None else p.size(wrong)
            if outcome.modulus_bits is None and size < 10:
                continue
            mine.due += 1
            mine.escaped += outcome.passed
            mine.expected += outcome.chance_to_escape(size)
    return found


def run_of(kind: Callable[..., None], count: int, seed: int) -> None:
    found = tally(kind, DTYPES, -(-count // len(DTYPES)), seed)
    total, escaped = sum(one.due for one in found.values()), sum(one.escaped for one in found.values())
    everything = sum(one.injected for one in found.values()), sum(one.found for one in found.values())
    print(
        f"\n{kind.__name__}: found {total - escaped} of {total} due; {everything[1]} of {everything[0]} in all"
    )
    assert total >= count
    for dtype, one in found.items():
        assert one.escaped < most(one.expected), f"{dtype}: {one}"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_escapes_no_more_often_than_is_stated(kind: Callable[..., None]) -> None:
    run_of(kind, 2 * len(DTYPES), seed=30)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_many_errors_escape_no_more_often_than_is_stated(kind: Callable[..., None]) -> None:
    run_of(kind, 10_000, seed=31)


def mixed(rng: np.random.Generator, dtype: str) -> Product:
    return product(rng, dtype)


def one_signed(rng: np.random.Generator, dtype: str) -> Product:
    m, n, k = sides_of(rng)
    a, b = (np.abs(numbers(rng, shape, dtype)).astype(dtype) for shape in ((m, k), (k, n)))
    return Product(a, b, multiplied(a, b, np.dtype(dtype), rng))


def alike(rng: np.random.Generator, dtype: str) -> Product:
    """All roundings of all sums go one way."""
    m, n, k = sides_of(rng)
    a, b = np.full((m, k), numbers(rng, (1, 1), dtype)), np.full((k, n), numbers(rng, (1, 1), dtype))
    return Product(a, b, multiplied(a, b, np.dtype(dtype), rng))


def cancelling(rng: np.random.Generator, dtype: str) -> Product:
    """Columns that are each other's negatives, or sums that end near zero."""
    m, n, k = sides_of(rng)
    a, b = numbers(rng, (m, k), dtype), numbers(rng, (k, n), dtype)
    with np.errstate(over="ignore"):
        if rng.random() < 0.5:
            b = np.concatenate([b, -b], axis=1)
        else:
            a, b = np.concatenate([a, a], axis=1), np.concatenate([b, -b], axis=0)
    return Product(a, b, multiplied(a, b, np.dtype(dtype), rng))


def graded(rng: np.random.Generator, dtype: str) -> Product:
    """Rows, columns or the inner side grow over many orders of magnitude."""
    m, n, k = sides_of(rng)
    a, b = numbers(rng, (m, k), dtype), numbers(rng, (k, n), dtype)
    if a.dtype.kind in "fc":
        decades = {"f2": 1.5, "f4": 15, "c8": 15}.get(dtype, 120)
        grades = [10 ** np.linspace(-decades, decades, length) for length in (m, k, n)]
        scale_a, scale_b = 1.0, 1.0
        which = int(rng.integers(4))
        if which == 0:
            a, b = (a * grades[0][:, None]).astype(dtype), (b * grades[2]).astype(dtype)
        else:
            inner = grades[1] if which == 1 else grades[1][::-1]
            scale_a, scale_b = inner, 1 / inner if which == 3 else np.ones(k)
            a, b = (a * scale_a).astype(dtype), (b * np.asarray(scale_b)[:, None]).astype(dtype)
    return Product(a, b, multiplied(a, b, np.dtype(dtype), rng))


def badly_scaled(rng: np.random.Generator, dtype: str) -> Product:
    """Every element has a size of its own, and many are zero; sums may overflow."""
    m, n, k = sides_of(rng)
    a, b = numbers(rng, (m, k), dtype), numbers(rng, (k, n), dtype)
    if a.dtype.kind in "fc":
        decades = {"f2": 3, "f4": 30, "c8": 30}.get(dtype, 30 if rng.random() < 0.5 else 300)
        a, b = (x * 10 ** rng.uniform(-decades, decades, x.shape) for x in (a, b))
    for x in (a, b):
        x[rng.random(x.shape) < 0.3] = 0
    with np.errstate(over="ignore"):
        a, b = a.astype(dtype), b.astype(dtype)
    return Product(a, b, multiplied(a, b, np.dtype(dtype), rng))


def subnormal(rng: np.random.Generator, dtype: str) -> Product:
    m, n, k = sides_of(rng)
    a, b = numbers(rng, (m, k), dtype), numbers(rng, (k, n), dtype)
    if a.dtype.kind in "fc":
        smallest = math.log10(np.finfo("f4" if dtype == "f2" else dtype).smallest_normal)
        exponent = smallest + rng.uniform(-8, 2)
        if dtype == "f2":
            exponent = rng.uniform(-9, -4)  # what float16 itself cannot hold
        a, b = (a * 10 ** (exponent / 2)).astype(dtype), (b * 10 ** (exponent / 2)).astype(dtype)
    return Product(a, b, multiplied(a, b, np.dtype(dtype), rng))


def narrowed(rng: np.random.Generator, dtype: str) -> Product:
    """Operands rounded to float16 before they are multiplied; all alike, or so small that float16 has few digits."""
    m, n, k = sides_of(rng)
    form = int(rng.integers(3))
    a, b = numbers(rng, (m, k), "f4"), numbers(rng, (k, n), "f4")
    if form == 1:
        a[...], b[...] = 1 + 2.0**-11 * rng.uniform(-1, 1), 1 + 2.0**-11 * rng.uniform(-1, 1)
    elif form == 2:
        a[...] = 2.0**-25 * rng.uniform(0, 2)
    c = multiplied(a.astype("f2").astype("f4"), b.astype("f2").astype("f4"), np.dtype("f4"), rng)
    return Product(a, b, c, "fp16")


def with_special(rng: np.random.Generator, dtype: str) -> Product:
    """NaN and infinity in some places of a factor."""
    m, n, k = sides_of(rng)
    a, b = numbers(rng, (m, k), dtype), numbers(rng, (k, n), dtype)
    for x in (a, b):
        if x.dtype.kind in "fc":
            for _ in range(int(rng.integers(3))):
                x[int(rng.integers(x.shape[0])), int(rng.integers(x.shape[1]))] = rng.choice(
                    [np.nan, np.inf, -np.inf]
                )
    return Product(a, b, multiplied(a, b, np.dtype(dtype), rng))


STYLES = [mixed, one_signed, alike, cancelling, graded, badly_scaled, subnormal, narrowed, with_special]


def run_clean(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    alarms: Counter[str] = Counter()
    done, compared = 0, 0
    while compared < count:
        for dtype in DTYPES:
            for style in STYLES:
                p = style(rng, dtype)
                outcome = p.check(p.c)
                done += 1
                compared += outcome.conclusive
                alarms[f"{style.__name__} {dtype}"] += outcome.conclusive and not outcome.passed
    print(
        f"\nfalse alarms: {alarms.total()} of {compared}; nothing could be compared in {done - compared} more"
    )
    assert compared > 0.95 * done
    assert not +alarms


def test_no_right_product_is_called_wrong() -> None:
    run_clean(500, seed=32)


@pytest.mark.slow
def test_no_right_product_of_many_is_called_wrong() -> None:
    run_clean(100_000, seed=33)
