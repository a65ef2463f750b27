"""Histograms of text on one device: what is checked, which kernel counts, and how a piece is counted.

`histogram` counts whole documents. `piece_counts` counts a piece of one, such that the counts of a document's
pieces add up to the document's, wherever it was cut (`tilewright.kernels.histograms.tokens` says why). Both
return counts alone; how many tokens a kind leaves out is `Kind.skipped`.
"""

from __future__ import annotations

import contextlib
from typing import Any, TypedDict, TypeVar, Unpack, overload

import numpy as np

from tilewright.kernels.arguments import check_host_out, host_array
from tilewright.kernels.choices import DeviceArray, DeviceName, HostArray, KindName
from tilewright.kernels.errors import DTypeError, OptionError, OutputError, ShapeError
from tilewright.kernels.gpu.device_array import (
    address,
    as_device_array,
    device_index,
    is_device_array,
    strided_view,
)
from tilewright.kernels.gpu.device_choice import current_device, resolve_device
from tilewright.kernels.gpu.streams import as_stream, check_stream, launch_stream
from tilewright.kernels.histograms.offsets import DocumentOffsets, checked
from tilewright.kernels.histograms.tokens import KINDS, Kind, kind_named

__all__ = [
    "KINDS",
    "DocumentOffsets",
    "Kind",
    "histogram",
    "kind_named",
    "piece_counts",
]

Out = TypeVar("Out", bound=DeviceArray)

OUT_ALIGNMENT = 16
"""Kernels store counts two at a time."""


class HistogramOptions(TypedDict, total=False):
    """The keywords of `histogram`, without ``out``."""

    by: KindName
    offsets: HostArray | DeviceArray | DocumentOffsets | None
    device: DeviceName
    stream: Any


@overload
def histogram(
    data: HostArray, *, out: HostArray | None = None, **options: Unpack[HistogramOptions]
) -> HostArray: ...
@overload
def histogram(data: DeviceArray, *, out: Out, **options: Unpack[HistogramOptions]) -> Out: ...
@overload
def histogram(data: DeviceArray, *, out: None = None, **options: Unpack[HistogramOptions]) -> DeviceArray: ...
def histogram(
    data: Any,
    *,
    by: KindName = "byte",
    offsets: Any = None,
    out: Any = None,
    device: DeviceName = "auto",
    stream: Any = None,
) -> Any:
    """Counts of every byte, letter, pair or character of a text, int64[bins] or int64[(documents, bins)].

    Parameters
    ----------
    data
        uint8[n], a NumPy array or a device array (anything with ``__cuda_array_interface__``), contiguous on a device;
        any length and alignment.
    by
        ``byte`` (256 bins), ``ascii`` (128; bytes above are left out), ``letter`` (26, case folded; all else is left
        out), ``bigram`` (65,536 pairs of adjacent bytes of a document, bin = first * 256 + second) or ``codepoint``
        (0x110000, as ``bytes.decode("utf-8", errors="replace")`` gives them).
    offsets
        Where documents begin and end, int64[documents + 1], ascending within 0 .. n: document d is
        ``data[offsets[d]:offsets[d + 1]]``. Given, even for one document, it makes the result two-dimensional with one
        row a document. No pair and no character reaches over a document's edge. An array is checked and copied to the
        GPU in each call, a `DocumentOffsets` only once.
    out
        Where the counts go, whatever was there before, instead of a new array: int64 of the result's shape,
        C-contiguous, a NumPy array for a NumPy array, else a device array beside ``data`` that begins at a multiple of
        16 bytes. It is returned.
    device
        ``auto`` (the GPU if there is one), ``cuda`` or ``cpu``. Device arrays are counted where they lie.
    stream
        The stream to launch on. The default is the one that ``data`` was exported with, else the default stream. For a
        device array the function returns before the counts are there.

    Notes
    -----
    Returns a NumPy array for a NumPy array and a Numba device array for a device array. Raises DTypeError,
    ShapeError, OptionError, OutputError or DeviceUnavailableError before anything is launched.

    Examples
    --------
    >>> import numpy as np
    >>> from tilewright.kernels import histogram
    >>> histogram(np.frombuffer(b"abracadabra", np.uint8), by="letter", device="cpu")[:4]
    array([5, 2, 1, 1])
    """
    kind = kind_named(by)
    check_stream(stream)
    data = _checked_data(data)
    documents = _checked_offsets(offsets, len(data))
    shape = (kind.bins,) if offsets is None else (documents.documents, kind.bins)
    target = None if out is None else _checked_out(out, shape, data)
    counts = _count(data, kind, documents, documents.start, documents.stop, target, device, stream)
    if out is not None:
        return out
    return counts if offsets is not None else _only_row(counts)


def piece_counts(
    data: Any,
    *,
    by: str = "byte",
    start: int = 0,
    stop: int | None = None,
    device: DeviceName = "auto",
    stream: Any = None,
) -> Any:
    """Counts, int64[bins], of the tokens of one document that begin in ``data[start:stop]``.

    ``data`` is a part of the document with its margins: it reaches ``KINDS[by].before`` bytes further to the
    front than ``start`` and ``KINDS[by].after`` bytes further to the back than ``stop``, or as far as the
    document does. What lies in the margins is looked at but not counted, so pieces with neighbouring ranges
    add up to the counts of the document. The other arguments, the result's kind and the errors are
    `histogram`'s.
    """
    kind = kind_named(by)
    data = _checked_data(data)
    stop = len(data) if stop is None else stop
    if not 0 <= start <= stop <= len(data):
        raise OptionError(f"start={start}, stop={stop} is no range within the {len(data)} bytes of data")
    return _only_row(_count(data, kind, _one_document(len(data)), start, stop, None, device, stream))


def _checked_data(data: Any) -> Any:
    on_device = is_device_array(data)
    array = as_device_array(data) if on_device else host_array("data", data)
    if array.dtype != np.uint8:
        raise DTypeError(
            f"data is {array.dtype}; a text is counted as uint8 "
            "(for bytes: numpy.frombuffer(text, numpy.uint8))"
        )
    if array.ndim != 1:
        raise ShapeError(f"data has {array.ndim} dimensions; a text has one (reshape(-1) flattens it)")
    if not on_device:
        return np.ascontiguousarray(array)
    if array.size > 1 and array.strides[0] != 1:
        raise ShapeError(
            f"data has a stride of {array.strides[0]} bytes; a device array must be contiguous: copy it first"
        )
    return array


def _one_document(nbytes: int) -> DocumentOffsets:
    return DocumentOffsets.once(np.array([0, nbytes]))


def _checked_offsets(offsets: Any, nbytes: int) -> DocumentOffsets:
    """Offsets within ``nbytes``; without any, the whole of ``data`` is one document."""
    if offsets is None:
        return _one_document(nbytes)
    documents = offsets if isinstance(offsets, DocumentOffsets) else DocumentOffsets.once(checked(offsets))
    if documents.stop > nbytes:
        raise ShapeError(
            f"offsets reach from {documents.start} to {documents.stop}, but data has bytes 0 to {nbytes}"
        )
    return documents


def _checked_out(out: Any, shape: tuple[int, ...], data: Any) -> Any:
    """``out`` as an array with a row for each document, int64[(documents, bins)]."""
    on_device = is_device_array(data)
    if not on_device:
        check_host_out(out, "data is")
    elif not is_device_array(out):
        raise OutputError(f"out is {type(out).__name__}; it must be a device array, as data is")
    array = as_device_array(out) if on_device else out
    if tuple(array.shape) != shape or array.dtype != np.int64:
        raise OutputError(f"out is {array.dtype}{list(array.shape)}; it must be int64{list(shape)}")
    size = 8
    strides: list[int] = []
    for side in reversed(shape):
        strides.insert(0, size)
        size *= side
    if array.size and tuple(array.strides) != tuple(strides):
        raise OutputError(f"out has strides of {tuple(array.strides)} bytes; it must be C-contiguous")
    rows = (1, *shape)[-2:]
    if not on_device:
        if not array.flags.writeable:
            raise OutputError("out is read-only; pass an array that can be written")
        if np.may_share_memory(array, data):
            raise OutputError("out overlaps data in memory; pass an out of its own")
        return array.reshape(rows)
    if getattr(array, "read_only", False):
        raise OutputError("out is read-only; pass an array that can be written")
    if array.size:  # also for empty data: every count is written, as zero
        begin, text = address(array), address(data)
        if begin % OUT_ALIGNMENT:
            raise OutputError(
                f"out begins at address {begin:#x}, which is no multiple of {OUT_ALIGNMENT}; pass a whole array"
            )
        if data.size and begin < text + data.size and text < begin + array.size * 8:
            raise OutputError("out overlaps data in memory; pass an out of its own")
        if device_index(array) != device_index(data):
            counted = "data on" if data.size else "data is empty, so that it is counted on"
            raise OutputError(f"out lies on GPU {device_index(array)} and {counted} GPU {device_index(data)}")
    return array if len(shape) == 2 else strided_view(array, rows, (size, 8))


def _only_row(counts: Any) -> Any:
    return counts[0] if isinstance(counts, np.ndarray) else counts.reshape(counts.shape[1])


def _count(
    data: Any,
    kind: Kind,
    documents: DocumentOffsets,
    start: int,
    stop: int,
    out: Any,
    device: str,
    stream: Any,
) -> Any:
    """Counts of the tokens that begin in ``data[start:stop]``, int64[(documents, bins)], checked
    arguments."""
    on_device = is_device_array(data)
    if resolve_device(device, device_arrays=on_device) == "cpu":
        from tilewright.kernels.histograms.host import count_host

        return _filled(out, count_host(data, kind, documents.host, start, stop))
    if on_device:
        arrays = [data] if out is None else [data, out]
        return _on_device(data, kind, documents, start, stop, out, launch_stream(stream, arrays))
    from numba import cuda

    if start == stop:
        return _filled(out, np.zeros((documents.documents, kind.bins), np.int64))
    queue = as_stream(stream)
    text = cuda.to_device(data, stream=queue)  # kept until the counts have come
    counts = _on_device(text, kind, documents, start, stop, None, queue)
    result = counts.copy_to_host(stream=queue) if out is None else counts.copy_to_host(out, stream=queue)
    if queue:
        queue.synchronize()
    return result


def _filled(out: Any, counts: np.ndarray) -> Any:
    if out is None:
        return counts
    out[...] = counts
    return out


def _on_device(
    data: Any, kind: Kind, documents: DocumentOffsets, start: int, stop: int, out: Any, queue: Any
) -> Any:
    from numba import cuda

    from tilewright.kernels.histograms.select import count_on_device

    home = device_index(data)
    with contextlib.nullcontext() if home == current_device() else cuda.gpus[home]:
        return count_on_device(data, documents, start, stop, kind, queue, out)
