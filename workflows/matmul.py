"""The matrix product of two stored matrices, and its plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack, overload

import numpy as np

from tilewright.kernels.arguments import shown
from tilewright.kernels.choices import DeviceName, GpuName, PrecisionName
from tilewright.pipeline import config
from tilewright.pipeline.cluster.profiles import Cluster
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.events import Listener, log_notices
from tilewright.pipeline.forecast.hardware import Hardware
from tilewright.pipeline.in_memory import array_of
from tilewright.pipeline.options import Durability, StorageOptions
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.product.execute import MatmulRun
from tilewright.pipeline.product.fusing import Vector
from tilewright.pipeline.product.job import plan_unplaced
from tilewright.pipeline.product.repair import multiply_or_accept
from tilewright.pipeline.product.request import Request, open_factors
from tilewright.pipeline.store.arrays import Input, Source
from tilewright.pipeline.store.labels.alignment import Align
from tilewright.pipeline.store.new.storage import Sides, as_storage
from tilewright.workflows.batch.elsewhere import elsewhere

EPILOGUE = ("alpha", "beta", "row_scale", "column_scale", "row_offset", "column_offset")
STORAGE = ("chunks", "shards", "codec")
"""Parameters of `matmul` that make one part of its request."""


class ProductOptions(StorageOptions, total=False):
    """What `matmul` takes by name."""

    transpose_a: bool
    transpose_b: bool
    dtype: str | np.dtype | None
    alpha: complex
    beta: complex
    row_scale: Vector | None
    column_scale: Vector | None
    row_offset: Vector | None
    column_offset: Vector | None


@overload
def matmul(a: Input, b: Input, out: Source, **options: Unpack[ProductOptions]) -> MatmulRun: ...


@overload
def matmul(a: Input, b: Input, out: None = None, **options: Unpack[ProductOptions]) -> np.ndarray: ...


def matmul(
    a: Input,
    b: Input,
    out: Source | None = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    align: Align = "labels",
    dtype: str | np.dtype | None = None,
    precision: PrecisionName = "full",
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    device: DeviceName = "auto",
    device_memory: int | str | None = None,
    resume: bool = True,
    verify: bool = True,
    overwrite: bool = False,
    durability: Durability = "full",
    same_bits: bool = False,
    chunks: Sides | None = None,
    shards: Sides | None = None,
    codec: str | None = None,
    alpha: complex = 1,
    beta: complex = 0,
    row_scale: Vector | None = None,
    column_scale: Vector | None = None,
    row_offset: Vector | None = None,
    column_offset: Vector | None = None,
    listener: Listener = log_notices,
) -> MatmulRun | np.ndarray:
    """Store C = op(A) op(B), with A, B and C in Zarr and op the identity or the transpose; or what becomes of that::

        C[i, j] <- alpha * row_scale[i] * column_scale[j] * (op(A) op(B))[i, j] + row_offset[i] + column_offset[j]
            + beta * C[i, j]

    Parameters
    ----------
    a, b
        Two-dimensional arrays of numbers: paths or URLs of Zarr, or open arrays of zarr-python; arrays of NumPy,
        xarray, dask or h5py, paths of ``.npy`` files, ``file.h5::/name``; or some rows and columns
        (`tilewright.slice`). op(A) is m × k, op(B) is k × n.
    out
        Where C (m × n) goes; None: nowhere, and C is returned, as an array of NumPy, if this host's memory holds it
        twice. A path gets its array only when C is whole (it grows under ``<out>.partial``);
        a URL or an open array is written in place, and what an open array holds is replaced. One that is open in a
        writable session of icechunk gets C by its session once C is verified; committing that is up to the caller.
    transpose_a, transpose_b
        Take the transpose of A or B; nothing is stored transposed. One array by its own transpose gives a C that is
        symmetric to the bit: its tiles on and below the diagonal are computed, and each is stored twice.
    align
        What pairs the columns of op(A) with the rows of op(B). ``labels``: where they lie, and where both have
        coordinates these have to be the same; other ones are refused. ``position``: where they lie alone.
    dtype
        C's dtype. Without it, that of ``numpy.matmul``, but for integers the smallest of int32, uint32, int64 and
        uint64 that holds k times the largest product of the two dtypes, and is no narrower than NumPy's; where none
        does, NumPy's type widened to 64 bits. It follows from the dtypes and k alone: int32 for int8 factors up to
        k = 131071. A and B are cast to it as NumPy casts ``same_kind``, also to fewer bits, where integers wrap and
        floats are rounded or overflow (for float16 to float32, which its sums are formed in). Unsigned integers may
        become any type, signed ones any but unsigned, floats any floats or complex numbers, complex numbers complex
        ones. Not bfloat16, which zarr-python does not store; `tilewright.kernels.matmul` multiplies arrays of it.
    precision
        ``full`` multiplies every dtype as itself; ``split``, for float32, float64 and complex numbers of their
        sizes, ``tf32``, ``bf16`` and ``fp16``, for float32, use tensor cores, where ``fp16`` takes operands of at most
        65504, and rounds those below 6.1e-5 to multiples of 6e-8. On a CPU all of them mean ``full``.
    cluster
        A profile of ``cluster_file``, a scheduler's address, a ``distributed.Client``, or a cluster of Dask's,
        such as a ``distributed.LocalCluster``, which is left open.
    device
        ``auto`` (the GPU if there is one), ``cuda`` or ``cpu``.
    device_memory
        The most that tiles and panels may take on each worker, in bytes or as ``"8GiB"``.
    resume
        Keep the finished tiles of an earlier run of the same product that was stopped, also of one with other memory or
        on another kind of device: then the rest of C may be rounded otherwise.
    verify
        Check C against A and B before it gets its name (see ``tilewright.verify``).
    overwrite
        Replace what stands at ``out``, once the new C is whole.
    durability
        ``full`` forces C to disk before it gets its name, and each tile before the record says so: a power cut loses
        no more than what was under way. ``none`` leaves that to the system, which may take minutes: what a power cut
        takes of a stopped run is noticed and computed again, what it takes of a finished C only ``audit`` notices.
    same_bits
        Refuse to go on where finished tiles of floats are kept that another plan, or another kind of device, computed.
    chunks, shards
        Sides of C's chunks, and of the shards that hold several of them in one file or object: rows and columns, as a
        pair or as ``"1024x1024"``, or one number for both. A shard's are multiples of its chunks'; Zarr's format 2,
        which an ``out`` in a group of that format gets, has none. Tiles are made of whole shards, or chunks, so that
        their sides decide how small a tile can be. Without them, chunks suit A and B, and there are no shards.
    codec
        What C's chunks are compressed by: ``none``, ``zstd``, ``lz4``, ``gzip``, or ``blosc-`` and one of ``zstd``,
        ``lz4``, ``lz4hc``, ``zlib``, ``blosclz``, which shuffle bytes before; with a level behind a colon, such as
        ``"zstd:3"``. Without it, Zarr's default where A is compressed, else none. A run that was stopped is gone on
        with only if it had the same ``chunks``, ``shards`` and ``codec``. An open array has its own: none may be given.
    alpha, row_scale, column_scale, row_offset, column_offset
        What the product is multiplied by, and what is added to it: numbers, and for each row or column of C one, as an
        array of one dimension, a list, or the path of a Zarr array of that. It is formed of the sums before they are
        stored, in C's dtype, in one pass. Sums of integers stay exact before it; where not all of it are integers, C is
        float64 unless ``dtype`` says otherwise, and where all are, an integer type that holds whatever becomes of the
        sums.
    beta
        What C held is multiplied by this and added. ``out`` is a local path then, of an array of C's shape and of a
        dtype that casts to that of the sums within its kind, which C keeps where they cast to it. It is replaced in one
        step once the new C is whole, and stands as it was until then; a run that was stopped and goes on adds nothing
        twice. 0: what C held does not matter.
    listener
        Is called with every event (``tilewright.pipeline.events``).

    Raises
    ------
    TilewrightError
        One of its subclasses, for everything a caller can cause; at a path ``out`` nothing half-written stands then.
    DeviceMemoryError
        A worker ran out of memory under the plan, and under a smaller one that went on in its place, or no smaller one
        could. Finished tiles are kept.

    Examples
    --------
    >>> import numpy as np
    >>> import tilewright as tw
    >>> import zarr
    >>> a = np.arange(6.0).reshape(2, 3)
    >>> tw.matmul(a, a, transpose_b=True)
    array([[ 5., 14.],
           [14., 50.]])
    >>> zarr.save_array("a.zarr", a)
    >>> run = tw.matmul("a.zarr", "a.zarr", "c.zarr", transpose_b=True)
    >>> run.verification.passed, zarr.open_array("c.zarr").shape
    (True, (2, 2))
    """
    request = request_of(**locals())
    if out is not None:
        return multiply_or_accept(request)
    factors = open_factors(request.checked())
    opened = replace(request, a=factors.a, b=factors.b)
    return array_of(factors.shape, factors.dtype, lambda path: multiply_or_accept(replace(opened, out=path)))


def request_of(**given: Any) -> Request:
    """What these arguments of `matmul` ask for, and others of a request, such as ``hardware``. Raises as
    `Request.with_epilogue` and `as_storage`."""
    epilogue, stored = ({name: given.pop(name) for name in names} for names in (EPILOGUE, STORAGE))
    return Request(**given, storage=as_storage(**stored)).with_epilogue(**epilogue)


def plan_matmul(
    a: Input,
    b: Input,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    align: Align = "labels",
    dtype: str | np.dtype | None = None,
    precision: PrecisionName = "full",
    alpha: complex = 1,
    row_scale: Source | np.ndarray | None = None,
    column_scale: Source | np.ndarray | None = None,
    row_offset: Source | np.ndarray | None = None,
    column_offset: Source | np.ndarray | None = None,
    workers: int = 1,
    device: DeviceName = "auto",
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    cluster: Cluster | None = None,
    cluster_file: str | None = None,
    chunks: Sides | None = None,
    shards: Sides | None = None,
    codec: str | None = None,
    gpu: GpuName | None = None,
    listener: Listener = log_notices,
) -> MatmulPlan:
    """The plan that ``matmul`` would follow, from nothing but metadata. The listener gets the cautions that ``matmul``
    would have for the factors and the workers, and is told where sums of integers could wrap in C's dtype.

    It is for ``workers`` workers, each with all the memory and cores of this machine (or a GPU like its first), whose
    processes may hold ``host_memory`` each; or, where a ``cluster`` is named, for the workers found there and what they
    have (a profile's own cluster is started for that; of kind slurm no job is, and the plan is what the job would
    follow). With ``device="cuda"`` and ``device_memory`` no GPU need be here: a plan for GPUs with so much memory free
    can be made anywhere; with ``gpu`` (one of ``a100``, ``a100-40gb``, ``h100``, ``h100-pcie``, ``h200``, ``l40s``)
    each worker has such a GPU, with its memory, those of a job too. Without it a job's are what its profile calls them,
    where that is one of these (``gpus_per_node: h100:4``, ``constraint: h100``), which the listener is told. ``alpha``,
    scales and offsets are as for ``matmul``: by them sums of integers become floats, which a tile needs room for; and
    so are ``chunks``, ``shards`` and ``codec``, by which tiles are cut and encoded.

    Raises as ``matmul`` does for factors that cannot be multiplied, PlanError where no tile fits or there would be too
    many, and OptionError for fewer workers than one, more than a million, workers or their memory given beside a
    cluster, a GPU beside one without any, an unknown GPU, a file of profiles without one, or a wrong setting.

    Examples
    --------
    >>> import tilewright as tw
    >>> import zarr
    >>> big = zarr.create_array("big.zarr", shape=(10**6, 10**5), chunks=(1000, 1000), dtype="float32")
    >>> plan = tw.plan_matmul(big, big, transpose_b=True, device="cpu", device_memory="4GiB", host_memory="16GiB")
    >>> plan.symmetric, plan.device_peak_nbytes <= 4 * 2**30
    (True, True)
    """
    request = Request(
        a,
        b,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        align=align,
        dtype=dtype,
        precision=precision,
        cluster_file=cluster_file,
        device=device,
        device_memory=device_memory,
        listener=listener,
    ).checked()
    request = request.with_epilogue(
        alpha=alpha,
        row_scale=row_scale,
        column_scale=column_scale,
        row_offset=row_offset,
        column_offset=column_offset,
    )
    request = replace(request, storage=as_storage(chunks, shards, codec))  # of a C that is stored somewhere
    named = elsewhere(cluster, cluster_file, device, _count(workers), gpu)
    if cluster is not None and host_memory is not None:
        raise OptionError(
            f"host_memory={shown(host_memory)} beside a cluster ({shown(cluster)}): a plan is for the workers that are"
            " found there, and what they have; leave one of the two away (--profile, --host-memory)"
        )
    if cluster is None and cluster_file is not None:
        raise OptionError(
            f"cluster_file={shown(cluster_file)} without a cluster: the plan would be for this machine; name one of its"
            " profiles (cluster), or leave it away"
        )
    if host_memory is not None:
        host_memory = config.as_nbytes(host_memory, "host_memory (--host-memory)")
    if named is None:
        return plan_unplaced(request, Hardware(), host_memory, cluster)
    taken: dict[str, Any] = {"device": device, "device_memory": device_memory}
    with named.planning(taken, listener) as hardware:
        if hardware is None:
            return plan_unplaced(request, Hardware(), None, cluster)
        return plan_unplaced(request, hardware, host_memory, None)


def _count(workers: int) -> int | None:
    """How many workers a plan is for; None: nobody said, so that it is one. Raises OptionError."""
    named = Hardware.named(workers) or Hardware()
    return None if named.workers == 1 else named.workers
