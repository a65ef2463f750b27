"""Where the documents of a text begin and end: checked once, and kept on the GPU for the calls that follow."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np

from tilewright.kernels.arguments import host_array
from tilewright.kernels.choices import DeviceArray
from tilewright.kernels.errors import DTypeError, ShapeError
from tilewright.kernels.gpu.device_array import as_device_array, is_device_array
from tilewright.kernels.gpu.device_choice import current_device


class DocumentOffsets:
    """Offsets of documents, int64[documents + 1], ready for `tilewright.kernels.histogram`.

    Given an array, `histogram` looks at every entry and copies all of them to the GPU, in each call; for
    100,000 documents that takes longer than counting 400 MB. Given one of these it does neither::

        offsets = DocumentOffsets(offsets)
        for text in texts:
            histogram(text, offsets=offsets, out=counts)

    offsets: integers, one-dimensional, ascending from 0 or above; a NumPy array, a sequence, or a device
        array. They are copied. Raises ShapeError or DTypeError.
    """

    def __init__(self, offsets: Any) -> None:
        if isinstance(offsets, DocumentOffsets):
            offsets = offsets.host
        self._keep(checked(offsets).copy(), stays=True)

    @classmethod
    def once(cls, offsets: np.ndarray) -> DocumentOffsets:
        """Of checked offsets, for the length of one call: without a copy, and not kept on the device."""
        self = cls.__new__(cls)
        self._keep(offsets, stays=False)
        return self

    def _keep(self, offsets: np.ndarray, *, stays: bool) -> None:
        self.host = offsets
        """int64[documents + 1], contiguous; read-only."""
        self.host.flags.writeable = False
        self.stays = stays
        """Whether `on_device` keeps its copies."""
        self.documents = len(offsets) - 1
        self.start, self.stop = int(offsets[0]), int(offsets[-1])
        self._lock = threading.Lock()
        self._held: dict[int, Any] = {}

    def __len__(self) -> int:
        return self.documents

    @functools.cached_property
    def longest(self) -> int:
        """Bytes of the longest document; 0 where there is none."""
        return int(np.diff(self.host).max(initial=0))

    def at_least(self, nbytes: int) -> list[int]:
        """The documents of at least ``nbytes``, ascending."""
        if self.longest < nbytes:
            return []
        return [int(document) for document in np.flatnonzero(np.diff(self.host) >= nbytes)]

    def on_device(self) -> DeviceArray:
        """A copy on the current GPU, ready for every stream; made by the first call there."""
        from numba import cuda

        home = current_device()
        with self._lock:
            if home not in self._held:
                self._held[home] = cuda.to_device(self.host)
                cuda.synchronize()  # so that it is complete for streams that wait for no other
            return self._held[home]


def checked(offsets: Any) -> np.ndarray:
    """Offsets on the host, int64 and contiguous, ascending from 0 or above; ShapeError or DTypeError."""
    if is_device_array(offsets):
        offsets = as_device_array(offsets).copy_to_host()
    array = host_array("offsets", offsets)
    if array.ndim != 1 or len(array) == 0:
        raise ShapeError(
            f"offsets has shape {array.shape}; it must be one-dimensional with documents + 1 entries"
        )
    if not np.issubdtype(array.dtype, np.integer):
        raise DTypeError(f"offsets holds {array.dtype}; it must hold integers (int64)")
    if array.max() > np.iinfo(np.int64).max:  # of uint64, which would wrap
        raise ShapeError(f"offsets reach to {array.max()}; they must fit int64")
    array = np.ascontiguousarray(array, np.int64).view()  # the kernels read it as one piece
    if array[0] < 0:
        raise ShapeError(f"offsets begin at {array[0]}; the first byte of data is 0")
    if not (array[1:] >= array[:-1]).all():
        at = int(np.argmax(array[1:] < array[:-1]))
        raise ShapeError(
            f"offsets must ascend, but entry {at + 1} ({array[at + 1]}) is below entry {at} ({array[at]})"
        )
    return array
