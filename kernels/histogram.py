"""Histograms of text on one device: what is checked, which kernel counts, and how a piece is counted.

`histogram` counts whole documents. `piece_counts` counts a piece of one, such that the counts of a document's
pieces add up to the document's, wherever it was cut (`tilewright.kernels.histogram_tokens` says why). Both
return counts alone; the tokens that a kind leaves out are `skipped_count`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from tilewright.kernels import launch
from tilewright.kernels.errors import DTypeError, OptionError, ShapeError
from tilewright.kernels.histogram_tokens import KINDS, Kind, kind_named

__all__ = ["KINDS", "Kind", "histogram", "kind_named", "piece_counts", "skipped_count"]


def histogram(
    data: Any, *, by: str = "byte", offsets: Any = None, device: str = "auto", stream: Any = None
) -> Any:
    """Counts of every byte, letter, pair or character of a text, int64[bins] or int64[(documents, bins)].

    data: uint8[n], a NumPy array or a device array (anything with ``__cuda_array_interface__``), contiguous
    on a
        device; any length and alignment.
    by: ``byte`` (256 bins), ``ascii`` (128; bytes above are left out), ``letter`` (26, case folded; all else
    is
        left out), ``bigram`` (65,536 pairs of adjacent bytes of a document, bin = first * 256 + second) or
        ``codepoint`` (0x110000, as ``bytes.decode("utf-8", errors="replace")`` gives them).
    offsets: where documents begin and end, int64[documents + 1], ascending within 0 .. n: document d is
        ``data[offsets[d]:offsets[d + 1]]``. Given, even for one document, it makes the result two-dimensional
        with one row a document. No pair and no character reaches over a document's edge.
    device: ``auto`` (the GPU if there is one), ``cuda`` or ``cpu``. Device arrays are counted where they lie.
    stream: the stream to launch on. The default is the one that ``data`` was exported with, else the default
        stream. For a device array the function returns before the counts are there.

    Returns a NumPy array for a NumPy array and a Numba device array for a device array. Raises DTypeError,
    ShapeError, OptionError or DeviceUnavailableError before anything is launched.
    """
    kind = kind_named(by)
    data = _checked_data(data)
    bounds = _checked_offsets(offsets, len(data))
    counts = _count(data, kind, bounds, int(bounds[0]), int(bounds[-1]), device, stream)
    return counts if offsets is not None else _only_row(counts)


def piece_counts(
    data: Any,
    *,
    by: str = "byte",
    start: int = 0,
    stop: int | None = None,
    device: str = "auto",
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
    return _only_row(_count(data, kind, np.array([0, len(data)]), start, stop, device, stream))


def skipped_count(counts: Any, by: str, nbytes: int, documents: int = 1) -> int:
    """How many bytes a host array of counts left out: those above 127 for ascii, all but letters for letter.

    ``nbytes`` is the number of bytes counted, in ``documents`` documents. Kinds that leave nothing out give
    0.
    """
    if kind_named(by).name not in ("ascii", "letter"):
        return 0
    return nbytes - int(np.asarray(counts).sum())


def _checked_data(data: Any) -> Any:
    on_device = launch.is_device_array(data)
    array = launch.as_device_array(data) if on_device else np.asarray(data)
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


def _checked_offsets(offsets: Any, nbytes: int) -> np.ndarray:
    """Offsets on the host as int64; without any, the whole of ``data`` is one document."""
    if offsets is None:
        return np.array([0, nbytes])
    if launch.is_device_array(offsets):
        offsets = launch.as_device_array(offsets).copy_to_host()
    array = np.asarray(offsets)
    if array.ndim != 1 or len(array) == 0:
        raise ShapeError(
            f"offsets has shape {array.shape}; it must be one-dimensional with documents + 1 entries"
        )
    if not np.issubdtype(array.dtype, np.integer):
        raise DTypeError(f"offsets holds {array.dtype}; it must hold integers (int64)")
    array = np.ascontiguousarray(array, np.int64)  # the kernels read it as one piece
    if array[0] < 0 or array[-1] > nbytes:
        raise ShapeError(f"offsets reach from {array[0]} to {array[-1]}, but data has bytes 0 to {nbytes}")
    lengths = np.diff(array)
    if lengths.min(initial=0) < 0:
        at = int(np.argmax(lengths < 0))
        raise ShapeError(
            f"offsets must ascend, but entry {at + 1} ({array[at + 1]}) is below entry {at} ({array[at]})"
        )
    return array


def _only_row(counts: Any) -> Any:
    return counts[0] if isinstance(counts, np.ndarray) else counts.reshape(counts.shape[1])


def _count(
    data: Any, kind: Kind, offsets: np.ndarray, start: int, stop: int, device: str, stream: Any
) -> Any:
    """Counts of the tokens that begin in ``data[start:stop]``, int64[(documents, bins)], checked
    arguments."""
    on_device = launch.is_device_array(data)
    if launch.resolve_device(device, device_arrays=on_device) == "cpu":
        from tilewright.kernels.histogram_host import count_host

        return count_host(data, kind, offsets, start, stop)
    if on_device:
        return _on_device(data, kind, offsets, start, stop, launch.launch_stream(stream, [data]))
    from numba import cuda

    if start == stop:
        return np.zeros((len(offsets) - 1, kind.bins), np.int64)
    queue = launch.as_stream(stream)
    counts = _on_device(cuda.to_device(data, stream=queue), kind, offsets, start, stop, queue)
    result = counts.copy_to_host(stream=queue)
    if queue:
        queue.synchronize()
    return result


def _on_device(data: Any, kind: Kind, offsets: np.ndarray, start: int, stop: int, queue: Any) -> Any:
    from numba import cuda

    from tilewright.kernels.histogram_select import count_on_device

    home = launch.device_index(data)
    with contextlib.nullcontext() if home == launch.current_device() else cuda.gpus[home]:
        return count_on_device(data, offsets, start, stop, kind, queue)
