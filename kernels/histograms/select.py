"""Which kernel counts on a GPU: the fast ones, or in the simulator, which runs no PTX, the portable ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import cuda

from tilewright.kernels.gpu.device_array import Memory, address
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.gpu.streams import keep_until_passed
from tilewright.kernels.gpu.transfer import upload
from tilewright.kernels.histograms.offsets import DocumentOffsets
from tilewright.kernels.histograms.portable import launch_portable
from tilewright.kernels.histograms.tokens import BIGRAM, Kind

ALONE_NBYTES = 1 << 20
"""A document of this many bytes has its pairs or characters counted by a launch of its own, ..."""
ALONE_BYTES_NBYTES = 16 << 20
"""... and its bytes, ascii or letters from this many on: it takes the GPU longer than a launch does."""

MANY_WIDE = "global-atomic"
"""What counts pairs or characters of many documents in one launch. Rows this wide are sparse for small documents:
nothing is gained by counting elsewhere first."""


def count_on_device(
    data: Any, documents: DocumentOffsets, start: int, stop: int, kind: Kind, queue: Any, out: Any = None
) -> Any:
    """Counts, a device array int64[(documents, bins)], of the tokens that begin in ``data[start:stop]``.

    ``data`` lies on the current GPU; with several documents, ``start`` and ``stop`` are where the first
    begins and the last ends. ``out`` is such an array beside ``data``, whose contents are lost.
    """
    count = documents.documents
    narrow = kind.code < BIGRAM
    # The kernel for many documents writes whole rows of bytes; every other kernel adds.
    whole = narrow and count > 1 and not SIMULATOR
    if out is None:
        shape = (count, kind.bins)
        counts = cuda.device_array(shape, np.int64, stream=queue) if whole else zeros(shape, queue)
    else:
        counts = out
        if not whole:
            clear(counts, queue)
    offsets = documents.host
    if SIMULATOR:
        if count:
            name = "per-warp" if count == 1 and narrow else "global-atomic"
            launch_portable(name, data, cuda.to_device(offsets), start, stop, kind, counts, queue)
    elif count == 1:
        _count_alone(data, documents.start, documents.stop, start, stop, kind, counts, queue)
    else:
        for first, last, alone in _portions(documents, ALONE_BYTES_NBYTES if narrow else ALONE_NBYTES):
            rows = counts if last - first == count else counts[first:last]
            if alone:
                lo, hi = int(offsets[first]), int(offsets[last])
                if narrow:
                    clear(rows, queue)
                _count_alone(data, lo, hi, lo, hi, kind, rows, queue)
            else:
                _count_together(data, documents, first, last, kind, rows, queue)
    return counts


def _portions(documents: DocumentOffsets, large: int) -> Iterator[tuple[int, int, bool]]:
    """Runs of documents (first, last + 1, alone): each of ``large`` bytes or more alone, others together."""
    previous = 0
    for document in documents.at_least(large):
        if previous < document:
            yield previous, document, False
        yield document, document + 1, True
        previous = document + 1
    if previous < documents.documents:
        yield previous, documents.documents, False


def _count_alone(
    data: Any, lo: int, hi: int, start: int, stop: int, kind: Kind, row: Any, queue: Any
) -> None:
    """Add the tokens of the document ``data[lo:hi]`` that begin in ``data[start:stop]`` to ``row``, (1,
    bins)."""
    if SIMULATOR:
        counts = row.reshape(kind.bins)
    else:  # Numba takes as long to make an array of the row as a launch takes
        counts = Memory(address(row), (kind.bins,), (row.dtype.itemsize,), row.dtype, queue, False)
    add_counts(data, lo, hi, start, stop, kind, counts, queue)


def add_counts(
    data: Any, lo: int, hi: int, start: int, stop: int, kind: Kind, counts: Any, queue: Any
) -> None:
    """Add the tokens of the document ``data[lo:hi]`` that begin in ``data[start:stop]`` to ``counts``, int64[bins].

    Everything lies on the current GPU; one launch is enqueued on the stream ``queue``. Several streams may add to the
    same counts at a time: every addition to device memory is atomic.
    """
    if stop <= start:
        return
    if SIMULATOR:
        name = "per-warp" if kind.code < BIGRAM else "global-atomic"
        offsets = cuda.to_device(np.array([lo, hi]))
        launch_portable(name, data, offsets, start, stop, kind, counts.reshape(1, kind.bins), queue)
        return
    if kind.code < BIGRAM:
        from tilewright.kernels.histograms.bytes import launch_bytes

        launch_bytes(data, start, stop, kind, counts, queue)
    else:
        from tilewright.kernels.histograms.wide import launch_wide

        launch_wide(data, start, stop, lo, hi, kind, counts, queue)


def _count_together(
    data: Any, documents: DocumentOffsets, first: int, last: int, kind: Kind, rows: Any, queue: Any
) -> None:
    """Count the documents from ``first`` up to ``last`` in one launch; ``rows`` are theirs."""
    offsets = documents.host[first : last + 1]
    places = _places(documents, first, last, queue)
    start, stop = int(offsets[0]), int(offsets[-1])
    if kind.code < BIGRAM:
        from tilewright.kernels.histograms.documents import LARGE, launch_documents

        launch_documents(data, places, stop - start, documents.longest > LARGE, kind, rows, queue)
    else:
        launch_portable(MANY_WIDE, data, places, start, stop, kind, rows, queue)
    if not documents.stays:
        keep_until_passed(queue, places)


def _places(documents: DocumentOffsets, first: int, last: int, queue: Any) -> Any:
    """The offsets of the documents from ``first`` up to ``last`` on the current GPU, for what is enqueued."""
    if documents.stays:
        held: Any = documents.on_device()
        return held if last - first == documents.documents else held[first : last + 1]
    return upload(documents.host[first : last + 1], queue)


def zeros(shape: tuple[int, int], queue: Any) -> Any:
    """A device array of int64 zeros."""
    if SIMULATOR:
        return cuda.to_device(np.zeros(shape, np.int64))
    array = cuda.device_array(shape, np.int64, stream=queue)
    clear(array, queue)
    return array


def clear(array: Any, queue: Any, byte: int = 0) -> None:
    """Set every byte of a device array on a stream, to zero if nothing else is said."""
    if SIMULATOR:
        nbytes = array.size * array.dtype.itemsize
        array.copy_to_device(np.full(nbytes, byte, np.uint8).view(array.dtype).reshape(array.shape))
    elif array.size:
        from numba.cuda.cudadrv.driver import device_memset

        device_memset(array, byte, array.size * array.dtype.itemsize, queue)
