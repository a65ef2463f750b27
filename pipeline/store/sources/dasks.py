"""Arrays of dask: computed by their own graphs, on the cluster that multiplies them, into memory that all its workers
read.

Nothing can be read before there is a cluster. So such an array is opened as its shape and dtype say, and its numbers
are computed when the cluster is there (`computed_on`), some blocks at a time: two for each thread of the cluster are
under way or on their way here at once. Blocks that use common results, such as a mean, are all asked for at once, as
dask itself does, so that these are computed once.
"""

from __future__ import annotations

import itertools
import math
import uuid
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import zarr

from tilewright.pipeline.errors import ShapeError, StoreError, TilewrightError
from tilewright.pipeline.store.region import StoredArray, parts_of
from tilewright.pipeline.store.sources.beside import Coordinates, with_coordinates
from tilewright.pipeline.store.sources.mapped import MappedStore, mapped_array, named, stored_dtype
from tilewright.pipeline.store.sources.memory import SharedMemory

if TYPE_CHECKING:
    from distributed import Client

BLOCKS_A_THREAD = 2

_opened: WeakValueDictionary[str, Pending] = WeakValueDictionary()
"""By dask's names, which say what is computed: an array that is given twice is computed once."""


@dataclass(frozen=True)
class Remarked:
    """What a graph's function may return in place of a block: that, and what it found in it."""

    block: np.ndarray
    found: Any


class Pending:
    """Memory for an array that is still to be computed."""

    def __init__(
        self, array: Any, memory: SharedMemory, called: str, remark: Callable[[list[Any]], str] | None = None
    ) -> None:
        """remark: what `compute` tells of what was found in blocks (`Remarked`)."""
        self._array, self.memory, self._called, self._remark = array, memory, called, remark
        # What it holds is not known, so that a later run compares it with what was read.
        self.digest = f"dask {uuid.uuid4().hex}"
        self.is_computed = False

    @property
    def graph(self) -> Any:
        """The array of dask; None once it is computed."""
        return self._array

    def compute(self, client: Client) -> str | None:
        """Have the cluster compute all blocks. Returns a sentence about what was found in them, if it was now and there
        is something to tell. Raises StoreError where it cannot, and an error of ours that a task
        returned in place of numbers: raised there, it would be a failure that Dask's workers log."""
        if self.is_computed:
            return None
        import dask
        from dask.core import flatten
        from dask.optimization import cull
        from distributed import as_completed

        # Once for all blocks: each by itself, tasks that several use would be fused in other ways for each of them.
        (array,) = dask.optimize(self._array)
        edges = [np.cumsum([0, *sides]) for sides in array.chunks]
        keys = list(flatten(array.__dask_keys__()))
        graph, needs = cull(dict(array.__dask_graph__()), keys)
        threads = sum(client.nthreads().values())
        left = iter(keys)
        under_way: set[Any] = set()
        found: list[Any] = []

        def submit(count: int) -> list[Any]:
            some = list(itertools.islice(left, count))
            futures = client.get(cull(graph, some)[0], some, sync=False) if some else []
            under_way.update(futures)
            return list(futures)

        if array.size:
            first = len(keys) if _share_work(keys, needs) else max(1, BLOCKS_A_THREAD * threads)
            done = as_completed(submit(first))
            for future in done:
                under_way.discard(future)
                place = future.key[1:]
                region = tuple(
                    slice(edge[one], edge[one + 1]) for edge, one in zip(edges, place, strict=True)
                )
                try:
                    block = future.result()
                    if isinstance(block, Remarked):
                        found.append(block.found)
                        block = block.block
                    if not isinstance(block, TilewrightError):
                        self.memory.write(region, np.asarray(block))
                except Exception as error:  # whatever the graph's functions raise
                    client.cancel(list(under_way))
                    raise StoreError(
                        f"{self._called}: block {place} cannot be computed ({type(error).__name__}: {error}); compute"
                        " it by itself to see why, or store it (to_zarr), and give the path"
                    ) from error
                if isinstance(block, TilewrightError):
                    client.cancel(list(under_way))
                    raise block
                for other in submit(1):
                    done.add(other)
        self.is_computed = True
        self._array = None
        return self._remark(found) if found and self._remark is not None else None


def _share_work(keys: Sequence[Hashable], needs: Mapping[Hashable, Collection[Hashable]]) -> bool:
    """Whether any of these results use a common one that is computed from others; needs: what each task uses."""
    first_of: dict[Hashable, Hashable] = {}
    for key in keys:
        reached = [key]
        while reached:
            task = reached.pop()
            first = first_of.get(task)
            if first is None:
                first_of[task] = key
                reached += needs[task]
            elif first != key and needs[task]:
                return True
    return False


def is_dask(source: Any) -> bool:
    kind = type(source)
    return kind.__module__.startswith("dask.array.") and kind.__name__ == "Array"


def open_dask(
    array: Any,
    role: str,
    name: str,
    dimensions: Any = None,
    attributes: Mapping[str, Any] | None = None,
    coordinates: Mapping[str, Coordinates] | None = None,
    remark: Callable[[list[Any]], str] | None = None,
    anew: bool = False,
) -> zarr.Array[Any]:
    """An array of dask as an array of Zarr, whose numbers are there after `computed_on`. It takes its size in memory,
    which processes of this host share.

    remark: as in `Pending`. anew: what is computed already is not taken again: dask's name of a graph over a stored
    array stays the same where somebody writes to that.

    Raises ShapeError for one whose shape is not known yet, DTypeError for one that holds no numbers, StoreError where
    there is not so much free memory.
    """
    if any(math.isnan(side) for side in array.shape):
        raise ShapeError(
            f"{role}: {name} has a shape that is known only once it is computed; call its compute_chunk_sizes() first"
        )
    pending = _opened.get(array.name)
    if pending is None or (anew and pending.is_computed):
        shape = tuple(int(side) for side in array.shape)
        dtype = stored_dtype(array.dtype.newbyteorder("="), role, name)
        pending = Pending(array, SharedMemory(shape, dtype, role, name), f"{role}: {name}", remark)
        _opened[array.name] = pending
    mapped = pending.memory.mapped(name, pending.digest, named(dimensions, attributes, array.dtype))
    return with_coordinates(mapped_array(mapped, pending), coordinates)


def lazy_of(array: zarr.Array[Any]) -> Any:
    """An array of Zarr as one of dask's: what is still to be computed as its own graph, since its memory holds zeros
    until then."""
    import dask.array

    pending = pending_of(array)
    return dask.array.from_zarr(array) if pending is None or pending.is_computed else pending.graph


def computed_on(client: Client, arrays: Iterable[StoredArray]) -> list[str]:
    """Have the arrays of dask among these, and among their masks, computed. Returns what is to be told of them, in
    sentences. Raises StoreError."""
    return [told for pending in _pending(arrays) if (told := pending.compute(client)) is not None]


def any_pending(arrays: Iterable[StoredArray]) -> bool:
    """Whether there are arrays of dask among these, and among their masks, that are still to be computed."""
    return any(not pending.is_computed for pending in _pending(arrays))


def _pending(arrays: Iterable[StoredArray]) -> Iterator[Pending]:
    if not _opened:
        return  # as where nobody uses dask's arrays
    for array in arrays:
        yield from filter(None, map(pending_of, parts_of(array)))


def check_computed(array: StoredArray) -> None:
    """Raise StoreError for an array of dask that nobody has had computed: its memory holds zeros."""
    pending = pending_of(array)
    if pending is not None and not pending.is_computed:
        raise StoreError(
            f"{array.store} is not computed yet; compute it (.compute()), and give the array of NumPy"
        )


def pending_of(array: StoredArray) -> Pending | None:
    """What is still to be computed of an array; None for any but one of dask."""
    kept = array.store.keeps if isinstance(array.store, MappedStore) else None
    return kept if isinstance(kept, Pending) else None
