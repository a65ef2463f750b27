"""From what is asked for, and the workers there are, to the plan of a matrix product."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import zarr

from tilewright.kernels.arguments import check_choice, check_flag
from tilewright.kernels.bfloat16 import is_bfloat16
from tilewright.kernels.choices import PRECISIONS, DeviceKind, PrecisionName
from tilewright.kernels.cpu.product import FEW_MULTIPLICATIONS
from tilewright.kernels.cpu.thin import NUMPY_ELEMENTS
from tilewright.kernels.gemm import check
from tilewright.kernels.gemm.workspace import Parent, workspace_nbytes
from tilewright.kernels.numbers import counted
from tilewright.pipeline import config
from tilewright.pipeline.check.band import check_band_nbytes
from tilewright.pipeline.check.fused import FUSED_NBYTES, inner_terms
from tilewright.pipeline.check.pairs import check_pairs_nbytes
from tilewright.pipeline.check.sides import check_nbytes
from tilewright.pipeline.check.vectors import vector_count
from tilewright.pipeline.decoding.choice import NO_ROOM, decoding_for
from tilewright.pipeline.errors import DTypeError, OptionError, OutputError, PlanError, ShapeError
from tilewright.pipeline.forecast.published import least_rate
from tilewright.pipeline.forecast.workload import arithmetic_of
from tilewright.pipeline.options import DURABILITIES, MatrixRequest
from tilewright.pipeline.plan.band import Band
from tilewright.pipeline.plan.band_tiling import band_chunks
from tilewright.pipeline.plan.called import AS_FACTORS, Names
from tilewright.pipeline.plan.centred import multiplies_bytes
from tilewright.pipeline.plan.decoding import DecodingRoom
from tilewright.pipeline.plan.inputs import (
    TILE_BUFFERS,
    FusedDtypes,
    Geometry,
    Limits,
    StoredMatrix,
    WorkerFacts,
    accumulator_dtype,
    share_of_each,
)
from tilewright.pipeline.plan.memory import LINE_NBYTES
from tilewright.pipeline.plan.pairs import COUNT_DTYPE, Pairwise
from tilewright.pipeline.plan.product import CODER_NBYTES, MatmulPlan, plan_tiles
from tilewright.pipeline.plan.tiling import output_chunks
from tilewright.pipeline.plan.told import IN_LOOPS_NBYTES
from tilewright.pipeline.plan.transform import NOT_FUSED, Epilogue, Fused, Transform
from tilewright.pipeline.product.banded import check_given_band, checked_band
from tilewright.pipeline.product.beside import check_counts, check_unit, named_counts
from tilewright.pipeline.product.fusing import (
    AskedOfSums,
    checked_pairwise,
    checked_sums,
    checked_transform,
    epilogue_of,
    mirrored,
    opened_before,
    stored_vectors,
)
from tilewright.pipeline.product.in_place import check_given_output, is_unfinished
from tilewright.pipeline.product.ledger import REPAIR, Past
from tilewright.pipeline.product.output import (
    CHECKSUMS_NAME,
    check_growing_place,
    check_output_free,
    partial_path,
)
from tilewright.pipeline.store import arrays as store
from tilewright.pipeline.store.arrays import Found, Given, Source
from tilewright.pipeline.store.labels.alignment import ALIGNS, Align, Along, check_same_labels, ends_told
from tilewright.pipeline.store.new.storage import AS_IT_COMES, Storage
from tilewright.pipeline.store.objects import objects_at
from tilewright.pipeline.store.origin import is_same_array
from tilewright.pipeline.store.probe import check_shared_output
from tilewright.pipeline.store.region import StoredArray, stored_masks
from tilewright.pipeline.store.region_write import encoders_nbytes
from tilewright.pipeline.store.sources.memory import copies_nbytes
from tilewright.pipeline.store.sources.parts import open_matrix
from tilewright.pipeline.transfer.lane_blocks import LANE_NBYTES

CODING_SHARE = 1 / 8
"""The share of a worker's memory that decoding threads may hold, and encoding ones as much; to keep to it they are
fewer than the cores."""

MOST_REMOTE_READS = 32
"""Threads that read from stores that are not local where nobody says how many: fewer where chunks are large."""
REMOTE_NBYTES = 64 * 2**20
"""The bytes that these ask for together: what a link of 1.3 GB/s carries in 50 ms."""


@dataclass(frozen=True)
class Request(MatrixRequest):
    """A product as it is asked for, by the parameters of ``tilewright.matmul``, which says what each may be.
    ``tilewright.plan_matmul`` has no ``out``, nor what goes with that."""

    a: Given
    b: Given
    out: Source | None = None
    """None: nobody said, for a plan."""
    transpose_a: bool = False
    transpose_b: bool = False
    transforms: tuple[Transform | None, Transform | None] = (None, None)
    """Of A and of B, as these are stored. Of one array by its own transpose both are of that, and alike but for
    ``conjugate`` where C is to be symmetric, or Hermitian."""
    epilogue: Epilogue | None = None
    before: Source | None = None
    """What C held, for the epilogue's ``beta``."""
    pairwise: Pairwise | None = None
    """What is formed of the pairs of numbers that are both there, in place of an epilogue; both factors of real numbers
    have transforms then."""
    window: tuple[int, int] | None = None
    """How many columns of C before its diagonal are wanted, and behind it; None: all of C."""
    even: bool = False
    """Whether what C held is known to be its own mirror image, or that of its conjugate."""
    recorded: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """What the record of C says besides of what was asked for, for `json`; part of its fingerprint."""
    counts: Source | None = None
    """Where the numbers of pairs of C's elements are stored, of a ``pairwise`` product; None: nowhere."""
    storage: Storage = AS_IT_COMES
    """How C is stored, and ``counts`` too."""
    said: dict[str, Any] = field(default_factory=dict)
    """What C says of itself besides what it is a product of, for `json`: the options of a Gram matrix."""
    names: Names = AS_FACTORS
    align: Align = "position"
    """Whether the labels along the inner side have to be the same; ``matmul`` asks for that, unless told otherwise."""
    vectors: Mapping[str, Source] = field(default_factory=lambda: MappingProxyType({}))
    """The stored vectors that were read for transforms and epilogue, by what callers know them by: C is not to take
    the place of one."""

    def with_epilogue(self, **asked: Any) -> Request:
        """The same with the epilogue that a caller asks for by ``matmul``'s parameters ``alpha`` to ``column_offset``.
        What C holds is replaced where it is added to. Raises as `fusing.epilogue_of`."""
        epilogue = epilogue_of(self.out, **asked)
        asks = replace(self, epilogue=epilogue, vectors=stored_vectors(asked))
        if epilogue is None or not epilogue.beta:
            return asks
        return replace(asks, before=self.out, overwrite=True)

    def checked(self) -> Request:
        """The same, once its options are found good, but for the cluster and what only `open_factors` can tell."""
        self.check_place()
        check_choice("durability", self.durability, DURABILITIES)
        if self.storage and (self.out is None or isinstance(self.out, zarr.Array)):
            why = (
                "C is returned, and not stored"
                if self.out is None
                else "C is an open array, which has its own"
            )
            raise OptionError(
                f"{', '.join(self.storage.facts())} given, and {why}: leave what says how C is stored away, or give the"
                " path or URL of a new C (out)"
            )
        return replace(
            self,
            resume=check_flag("resume", self.resume),
            verify=check_flag("verify", self.verify),
            overwrite=check_flag("overwrite", self.overwrite),
            same_bits=check_flag("same_bits", self.same_bits),
        )


@dataclass(frozen=True)
class Factors:
    """The factors of a product, opened and found fit to be multiplied, and how they are multiplied."""

    a: StoredArray
    b: StoredArray
    dtype: np.dtype
    """Of C."""
    k: int
    transposed: tuple[bool, bool] = (False, False)
    """Whether A, and B, is multiplied by its transpose."""
    symmetric: bool = False
    """Whether B is A, by its transpose, and C its own mirror image."""
    precision: PrecisionName = "full"
    device_memory: int | str | None = None
    """The most that tiles and panels may take on each worker; None: what the configuration says."""
    fused: Fused = NOT_FUSED
    sum_dtype: np.dtype | None = None
    """As `sums`; None: what follows from C's dtype alone."""
    hermitian: bool = False
    """Of a symmetric product: whether C's mirror image is its conjugate."""
    before: zarr.Array[Any] | None = None
    """What C held, where that is added to it."""
    band: Band | None = None
    """What of C is wanted; None: all."""
    recorded: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """As in `Request`."""
    counts: Source | None = None
    """As in `Request`."""
    storage: Storage = AS_IT_COMES
    """As in `Request`."""
    said: dict[str, Any] = field(default_factory=dict)
    """As in `Request`."""
    names: Names = AS_FACTORS
    vectors: Mapping[str, Source] = field(default_factory=lambda: MappingProxyType({}))
    """As in `Request`."""

    def made(self, precision: PrecisionName, device: str) -> dict[str, Any]:
        """What C says of how it was made."""
        return {"dtype": self.dtype, "precision": precision, "device": device, **self.said}

    @property
    def sums(self) -> np.dtype:
        """Of what a tile is summed in."""
        return accumulator_dtype(self.dtype) if self.sum_dtype is None else self.sum_dtype

    @property
    def operands(self) -> tuple[np.dtype, np.dtype]:
        """Of A and of B, as they are multiplied."""
        stored, (one, other) = self.dtypes, self.fused.transforms
        return stored[0] if one is None else one.dtype, stored[1] if other is None else other.dtype

    @property
    def fused_dtypes(self) -> FusedDtypes | None:
        """What a plan has to know of transforms and epilogue; None where there are none."""
        if not self.fused:
            return None
        one, other = self.fused.transforms
        return FusedDtypes(
            self.sums,
            (None if one is None else one.dtype, None if other is None else other.dtype),
            None if self.before is None else self.before.dtype.newbyteorder("="),
            self.fused.epilogue is not None or self.fused.pairwise is not None,
            self.hermitian,
            self.fused.nbytes,
            len(self.fused.forms),
            0 if self.counts is None else COUNT_DTYPE.itemsize,
        )

    @property
    def multiplies_bytes(self) -> bool:
        """Whether a CPU multiplies A by its own transpose as bytes."""
        if not self.symmetric or self.hermitian or self.precision != "full":
            return False
        rows, columns = self.a.shape
        summed = 0 if self.transposed[0] else 1
        return multiplies_bytes(self.fused, self.dtypes[0], summed, int(rows) * int(columns), self.sums)

    @property
    def roles(self) -> dict[str, StoredArray]:
        return {"A": self.a, "B": self.b}

    @property
    def dtypes(self) -> tuple[np.dtype, np.dtype]:
        """Of A and of B."""
        return self.a.dtype.newbyteorder("="), self.b.dtype.newbyteorder("=")

    @property
    def shape(self) -> tuple[int, int]:
        """Of C."""
        return self.a.shape[int(self.transposed[0])], self.b.shape[int(not self.transposed[1])]


def open_factors(request: Request) -> Factors:
    """Open the factors, and check that they can be multiplied so. Raises as ``matmul`` does."""
    transpose_a = check_flag("transpose_a", request.transpose_a)
    transpose_b = check_flag("transpose_b", request.transpose_b)
    check_choice("precision", request.precision, PRECISIONS)
    check_choice("align", request.align, ALIGNS)
    called = request.names
    left = open_matrix(request.a, called.a)
    right = open_matrix(request.b, called.b)
    inner = Along(called.a, left, int(not transpose_a)), Along(called.b, right, int(transpose_b))
    inner_left, inner_right = (each.array.shape[each.side] for each in inner)
    if inner_left != inner_right:
        hint = ""
        if left.shape[0 if not transpose_a else 1] == inner_right:
            hint = f"; transposing {called.a} would make them agree"
        elif right.shape[1 if not transpose_b else 0] == inner_left:
            hint = f"; transposing {called.b} would make them agree"
        raise ShapeError(
            f"inner sides differ: op({called.a}) from {store.name_of(left)} has {inner_left} columns and op({called.b})"
            f" from {store.name_of(right)} has {inner_right} rows; they must be equal{hint or ends_told(*inner)}"
        )
    if request.align == "labels":
        check_same_labels(*inner, "the inner side, which is summed over")
    names = f"{called.a}: {store.name_of(left)}", f"{called.b}: {store.name_of(right)}"
    if is_bfloat16(request.dtype):
        raise DTypeError("dtype=bfloat16 cannot be stored: zarr-python has no such type; use dtype='float32'")
    own_transpose = transpose_a != transpose_b and is_same_array(left, right)
    of_a = checked_transform(request.transforms[0], left, called.a)
    of_b = of_a if own_transpose and request.transforms[0] is request.transforms[1] else None
    of_b = of_b or checked_transform(request.transforms[1], right, called.b)
    before = opened_before(request.before, request.epilogue)
    operands = [
        stored.dtype.newbyteorder("=") if transform is None else transform.dtype
        for stored, transform in ((left, of_a), (right, of_b))
    ]
    shape = left.shape[int(transpose_a)], right.shape[int(not transpose_b)]
    asked = AskedOfSums((operands[0], operands[1]), names, inner_left, shape, request.epilogue, before)
    dtypes, epilogue = checked_sums(asked, request.dtype)
    check.precision(request.precision, dtypes.sums if dtypes.sums.kind in "iu" else dtypes.result)
    fused = Fused((of_a, of_b), epilogue, checked_pairwise(request.pairwise, (of_a, of_b), epilogue))
    band = None if request.window is None else checked_band(request.window, shape)
    even = band is None or band.before == band.after
    mirror = ""
    if own_transpose and even:
        mirror = mirrored(fused, complex_sums=dtypes.sums.kind == "c", even=request.even)
    return Factors(
        left,
        right,
        dtypes.result,
        inner_left,
        (transpose_a, transpose_b),
        bool(mirror),
        request.precision,
        request.device_memory,
        fused if fused else NOT_FUSED,
        dtypes.sums,
        mirror == "hermitian",
        before,
        band,
        request.recorded,
        request.counts,
        request.storage.within(shape),
        request.said,
        called,
        request.vectors,
    )


PAIRS = "the numbers of pairs"


def check_output(out: Source, factors: Factors, *, overwrite: bool) -> None:
    """Refuse, before any work, an output that could not be written or would replace what is not to be replaced."""
    if not may_be_accepted(out, overwrite=overwrite):
        check_output_free(out, overwrite=overwrite)
    _check_distinct(out, _inputs(factors), factors.names.c)
    factors.storage.check(out, factors.dtype)
    if (path := store.local_path(out)) is not None:
        check_growing_place(path)
    if isinstance(out, zarr.Array):
        check_given_output(out, factors.shape, factors.dtype)
        if factors.band is not None:
            check_given_band(out, factors.band)
    check_shared_output(out)
    if factors.counts is not None:
        with named_counts():
            store.check_source(factors.counts, "output")
            accepted = may_be_accepted(out, overwrite=overwrite)
            _check_distinct(factors.counts, {**_inputs(factors), factors.names.c: out}, PAIRS)
            check_counts(
                factors.counts, out, factors.shape, factors.band, overwrite=overwrite, accepted=accepted
            )
            if isinstance(factors.counts, zarr.Array) and factors.storage.unit is not None:
                check_unit(factors.counts, factors.storage.unit)


def may_be_accepted(out: Source, *, overwrite: bool) -> bool:
    """Whether a finished product stands in an output's place, with its record, that may turn out to be the one that is
    asked for; never where ``tilewright.accept-finished`` is not set. Raises StoreError where that cannot be seen."""
    if overwrite or not config.get("accept-finished"):
        return False
    store.check_source(out, "output")
    if isinstance(out, zarr.Array):
        return False
    path = store.local_path(out)
    if path is not None:
        return (path / CHECKSUMS_NAME).is_file()
    objects = objects_at(os.fspath(out))
    return objects.get(CHECKSUMS_NAME) is not None and not is_unfinished(objects)


def _inputs(factors: Factors) -> dict[str, Found]:
    """The factors, and their masks and vectors that are stored, by what they are called."""
    named = {factors.names.of(role): each for role, each in factors.roles.items()}
    return {**named, **stored_masks(named), **factors.vectors}


def _check_distinct(out: Source, others: Mapping[str, Found], what: str) -> None:
    """Refuse an output in the place of a factor: it replaces or fills what stands there. what: it is, in words."""
    path, name = store.local_path(out), store.name_of(out)
    kind, ours = store.location(out)
    growing = None if path is None else partial_path(path)
    needs = "need a place of their own" if what == PAIRS else "needs a place of its own"
    for role, factor in others.items():
        if (
            isinstance(out, zarr.Array)
            and not isinstance(factor, str | os.PathLike)
            and is_same_array(out, factor)
        ):
            raise OutputError(f"output: {name} is also {role}; {what} {needs}")
        factor_kind, theirs = store.location(factor)
        if kind != factor_kind:
            continue
        if ours == theirs:
            raise OutputError(f"output: {name} is also {role}; {what} {needs}")
        if ours in theirs.parents or theirs in ours.parents:
            raise OutputError(
                f"output: {name} and {role}, {store.name_of(factor)}, lie one inside the other; {what} {needs}"
            )
        if growing is not None and (growing.resolve() == theirs or growing.resolve() in theirs.parents):
            raise OutputError(
                f"output: {name} would grow at {growing}, where {role} lies; give it another name"
            )


def plan_for(
    factors: Factors,
    out: Source | None,
    facts: list[WorkerFacts],
    past: Past | None = None,
    most_nbytes: int | None = None,
    *,
    verify: bool = True,
) -> MatmulPlan:
    """The plan of a product for workers such as these.

    ``out`` is where C goes, None where nobody said. ``past`` is what an earlier run left: its geometry is kept where
    it fits, else its tiles are cut into smaller ones if some are finished, or a damaged C is repaired by it.
    ``most_nbytes`` bounds the memory of tiles and panels whatever the workers and the caller allow. ``verify`` is
    whether C is checked.

    Raises
    ------
    PlanError
        No tile fits, or there would be too many, or the host's memory does not hold what a worker needs; also where
        that is so only of the stored pieces that C was begun with, and some tiles of it are finished or it is repaired.
    OutputError
        ``out`` is an open array that cannot take C.
    """
    left, right, c_dtype = factors.a, factors.b, factors.dtype
    transpose_a, transpose_b = factors.transposed
    a = store.as_stored_matrix(left, transpose=transpose_a)
    b = store.as_stored_matrix(right, transpose=transpose_b)
    parent = Parent(a.rows, b.columns, a.columns, transpose_a, transpose_b)
    limits = _limits(facts, factors, parent)
    if most_nbytes is not None:
        limits = replace(limits, device_nbytes=min(limits.device_nbytes, most_nbytes))
    decoding, decoded_by = decoding_for((left, right), facts, limits.device_nbytes)
    if isinstance(out, zarr.Array):
        check_given_output(out, (a.rows, b.columns), c_dtype)
        unit = store.write_unit(out)
        c_unit = (unit[0], unit[1])
    elif factors.storage.unit is not None:
        c_unit = factors.storage.unit
    elif isinstance(factors.counts, zarr.Array):  # whose pieces C's are to be like
        unit = store.write_unit(factors.counts)
        c_unit = (unit[0], unit[1])
    else:
        share = limits.device_nbytes // len(factors.fused.forms)  # for each of a tile's sums
        square = factors.symmetric or factors.band is not None
        c_unit = output_chunks(a, b, c_dtype.itemsize, share, square=square)
        if factors.band is not None:
            c_unit = band_chunks(c_unit, factors.band)
    fused = factors.fused_dtypes
    if fused is not None and limits.on_host and factors.multiplies_bytes:
        fused = replace(fused, as_bytes=True)
    given = out if isinstance(out, zarr.Array) else None
    if given is None and factors.storage:
        given = factors.storage.model(
            out, factors.shape, c_dtype, unit=c_unit, compressed=store.is_compressed(left)
        )
    stored = None if given is None else store.as_stored_matrix(given)
    coded = store.is_compressed(left) if stored is None else not stored.plain
    limits = replace(
        limits,
        read_threads=_threads(
            "read-threads",
            facts,
            all(store.is_local(array) for array in (left, right)),
            [op.part_nbytes for op in (a, b) if not op.plain],
        ),
        tile_buffers=_tile_buffers(facts, out),
        lanes=_lanes(facts),
    )

    def make(c_unit: tuple[int, int], keep: Geometry | None = None) -> MatmulPlan:
        """With room for decoding where a tile fits beside it, and where the tiles of an earlier run do."""
        if decoding is None:
            return replace(make_with(None, c_unit, keep), decoded_by=decoded_by)
        try:
            plan = make_with(decoding, c_unit, keep)
        except PlanError:
            plan = None
        if plan is None or (keep is not None and plan.geometry != keep):
            without = replace(make_with(None, c_unit, keep), decoded_by=NO_ROOM)
            if plan is None or without.geometry == keep:
                return without
        return replace(plan, decoded_by=decoded_by)

    def make_with(
        decoding: DecodingRoom | None, c_unit: tuple[int, int], keep: Geometry | None
    ) -> MatmulPlan:
        beside = 0 if factors.counts is None else COUNT_DTYPE.itemsize
        piece = c_unit[0] * c_unit[1] * max(c_dtype.itemsize, beside)
        encoders = partial(encoders_nbytes, given, piece) if coded or given is not None else _no_encoders
        if isinstance(factors.counts, zarr.Array):
            of_c, of_counts = encoders, partial(encoders_nbytes, factors.counts, piece)
            encoders = lambda threads: max(of_c(threads), of_counts(threads))  # noqa: E731
        threads = _threads("write-threads", facts, _is_local(out), [piece] if coded else [], encoders)
        c = stored or StoredMatrix(a.rows, b.columns, c_dtype, c_unit, not coded)
        plan = plan_tiles(
            a,
            b,
            c_dtype,
            c_unit,
            limits=replace(
                limits,
                write_threads=threads,
                encoders_nbytes=encoders(threads),
                check_nbytes=_check_nbytes(facts, factors, out, (a, b, c)) if verify else 0,
                decoding=decoding,
            ),
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            symmetric=factors.symmetric,
            keep=keep,
            fused=fused,
            band=factors.band,
        )
        return replace(plan, copies_nbytes=copies_nbytes([left, right]))

    if past is not None:
        # C stays chunked as it was begun, under another memory limit too.
        try:
            kept = make(past.c_unit, past.geometry)
        except PlanError as error:
            if REPAIR in past.request:
                raise PlanError(f"{error}; the C that is repaired is stored in such pieces") from error
            if past.finished:
                raise PlanError(
                    f"{error}; an earlier run finished {counted(len(past.finished), 'tile')} of C in such pieces, which"
                    " --no-resume (resume=False) gives up"
                ) from error
        else:
            if kept.geometry == past.geometry or past.finished or REPAIR in past.request:
                return kept
    return make(c_unit)


def _limits(facts: list[WorkerFacts], factors: Factors, parent: Parent) -> Limits:
    """What every worker can hold: the smallest of them sets it, since any tile may come to any worker."""
    on_host = facts[0].device == "cpu"
    host = _least(fact.host_limit_nbytes for fact in facts)
    asked = config.get("device-memory", factors.device_memory)
    if on_host:
        cap = config.get("host-core-nbytes") * min(fact.cores for fact in facts)
        nbytes = asked or (cap if host is None else min(cap, int(host * config.get("host-share"))))
    else:
        free = min(fact.device_free_nbytes for fact in facts if fact.device_free_nbytes is not None)
        nbytes = min(asked, free) if asked else int(free * config.get("device-memory-share"))
    workspace = (
        None
        if on_host
        else partial(
            workspace_nbytes,
            dtype=factors.sums,
            precision=factors.precision,
            parent=parent,
            operands=factors.operands,
        )
    )
    return Limits(
        workers=len(facts),
        device_nbytes=nbytes,
        host_nbytes=host,
        pause_nbytes=_least(fact.pause_nbytes for fact in facts),
        on_host=on_host,
        panel_nbytes=config.get("panel-nbytes"),
        tiles=max(config.get("tiles"), _tiles_in_time(facts, factors)),
        workspace_nbytes=workspace,
        line_nbytes=1 if on_host else LINE_NBYTES,
    )


LEAST_RATES = {("cpu", False): 2**33, ("cpu", True): 2**31, ("cuda", False): 2**42, ("cuda", True): 2**40}
"""Operations that a core of a CPU, or a GPU of which nothing is known, does a second in most products, of floats and,
exactly, of integers. What is faster gets tiles that it computes sooner."""


def _tiles_in_time(facts: list[WorkerFacts], factors: Factors) -> int:
    """How many tiles C has at least, if each is to take ``tilewright.tile-seconds`` at most; 1 where that is unset."""
    seconds = config.get("tile-seconds")
    if seconds is None:
        return 1
    m, n = factors.shape
    operations = (1 if factors.symmetric else 2) * m * n * factors.k
    device = facts[0].device
    rate: float = LEAST_RATES[device, factors.sums.kind in "iub"]
    if device == "cpu":
        rate *= min(fact.cores for fact in facts)
    else:
        arithmetic = arithmetic_of(factors.operands, factors.sums, factors.precision)
        known = [least_rate(arithmetic, name) for name in {fact.name for fact in facts}]
        rate = max(rate, min(each or 0 for each in known))
    return max(1, math.ceil(operations / (seconds * rate)))


def _least(limits: Iterable[int | None]) -> int | None:
    """The smallest of some workers' limits, in bytes; None where none has one."""
    return min((limit for limit in limits if limit is not None), default=None)


def _check_nbytes(
    facts: list[WorkerFacts],
    factors: Factors,
    out: Source | None,
    stored: tuple[StoredMatrix, StoredMatrix, StoredMatrix],
) -> int:
    """What the check of C takes of a worker's process. stored: op(A), op(B) and C."""
    a, b, c = stored
    threads = config.threads("read-threads")
    if _is_local(out) and all(store.is_local(array) for array in (factors.a, factors.b)):
        threads = min(threads, max(fact.usable_cores for fact in facts))
    host = _least(fact.host_limit_nbytes for fact in facts)
    tasks = max(fact.threads for fact in facts)
    fused = factors.fused
    if factors.band is not None and fused.pairwise is None:
        vectors = vector_count(config.get("verify-rounds"), factors.dtype)
        return check_band_nbytes(a, b, c, vectors, fused.nbytes, tasks)
    if fused.pairwise is not None:
        return check_pairs_nbytes(a, b, c, fused, tasks)
    return check_nbytes(
        a,
        b,
        c,
        config.get("verify-rounds"),
        threads,
        host,
        tasks,
        inner_terms(fused, b.columns, a.columns),
        FUSED_NBYTES if fused else 0,
        2 * fused.nbytes,
    )


def _no_encoders(threads: int) -> int:
    """Memory of encoders where nothing is encoded."""
    return 0


def _threads(
    name: str,
    facts: list[WorkerFacts],
    local: bool,
    coded: Sequence[int],
    encoders: Callable[[int], int] = _no_encoders,
) -> int:
    """Threads of each worker that read chunks (``read-threads``), or write them (``write-threads``).

    local: whether these are in local files. coded: bytes of a chunk of each array that has to be decoded, or encoded.
    encoders: from a number of writing threads to the bytes that their encoders take up.

    Where chunks come from a server, each thread waits for one answer at a time. Where the CPU multiplies and the chunks
    are in local files, more threads than cores only hold more memory; elsewhere
    threads wait for the bus, or for another host. With a GPU, decoding and encoding are all that the cores have to do;
    but what the threads hold meanwhile (lanes, coders, pieces as stored and as in memory) may take only `CODING_SHARE`
    of the worker's memory.
    """
    count = config.threads(name)
    if name == "read-threads" and config.get(name) is None and not local:
        # Each has a request under way: of small chunks it takes more of them to fill a link.
        count = max(count, min(MOST_REMOTE_READS, REMOTE_NBYTES // max([1, *coded])))
    if facts[0].device == "cpu":
        return min(count, min(fact.cores for fact in facts)) if local else count
    if config.get(name) is not None or not (coded and local):
        return count
    share = share_of_each(facts)
    host = _least(fact.host_limit_nbytes for fact in facts)
    if host is not None:
        coder_nbytes = max(CODER_NBYTES, encoders(share) // share)
        held_nbytes = LANE_NBYTES + coder_nbytes + 2 * max(coded)
        share = min(share, int(host * CODING_SHARE) // held_nbytes)
    return max(count, share)


def _lanes(facts: list[WorkerFacts]) -> int | None:
    """How many of a worker's threads read or write at once, or None for all of them.

    As many as read and write plain chunks, which wait for the bus, or as many as it has cores, if that is more. If more
    threads decoded and encoded, the one that holds the interpreter's lock might have to wait for a core, and all others
    with it, even those that start the GPU's work.
    """
    if facts[0].device == "cpu":
        return None
    return max(sum(config.threads(name) for name in config.THREAD_COUNTS), share_of_each(facts))


def _tile_buffers(facts: list[WorkerFacts], out: Source | None) -> int:
    """Tiles that a worker holds at most: a single core has no time to multiply while it writes to files."""
    single = facts[0].device == "cpu" and min(fact.cores for fact in facts) == 1
    return 1 if single and _is_local(out) else TILE_BUFFERS


def _is_local(out: Source | None) -> bool:
    """Whether an output goes to files of this host; where none is named, it does."""
    if isinstance(out, zarr.Array):
        return store.is_local(out)
    return out is None or store.local_path(out) is not None


SMALL_PRODUCTS = 2**36
"""Multiplications that two cores do in a second: in a product of fewer, time counts and not memory."""


def need_loops_soon(factors: Factors, *, verify: bool) -> tuple[DeviceKind, ...]:
    """On which devices that multiply Numba had better set itself up while the product is planned.

    On a CPU BLAS multiplies floats, and NumPy a few integers. Numba, which the check needs, is started after the
    product, unless that is over so soon that the check would wait for it; or so small that NumPy does for the check,
    too. A GPU is sooner done, and
    loops move its bytes where there are many (`gpu_unit.in_loops`)."""
    (m, n), k = factors.shape, factors.k
    elements = m * k + k * n + m * n
    checked = verify and elements > NUMPY_ELEMENTS
    many = factors.sums.kind in "iu" and m * n * k > FEW_MULTIPLICATIONS
    on_cpu = many or bool(factors.fused) or (checked and m * n * k < SMALL_PRODUCTS)
    moved = (
        m * k * factors.a.dtype.itemsize + k * n * factors.b.dtype.itemsize + m * n * factors.sums.itemsize
    )
    on_gpu = checked or moved >= IN_LOOPS_NBYTES or config.get("gpu-decoding")
    needing: dict[DeviceKind, bool] = {"cpu": on_cpu, "cuda": on_gpu}
    return tuple(kind for kind, needs in needing.items() if needs)
