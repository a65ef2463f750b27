"""How the documents of a share are signed on a GPU: a lane brings a block of them, a signer forms their signatures, and
the next block is read to the lane's other buffer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numba import cuda

from tilewright.kernels.duplicates import device_signing
from tilewright.kernels.duplicates.device_signing import DeviceSigner
from tilewright.kernels.duplicates.signing import Signing, Signs, sign_on_cores
from tilewright.kernels.gpu.memory import is_out_of_memory
from tilewright.pipeline.text.gpu.lanes import CountingLane, borrowed_lane
from tilewright.pipeline.text.whole.texts import LARGE_BLOCK_NBYTES
from tilewright.pipeline.transfer.lane import Spares

NO_ROOM = (
    "some of its documents, or of those that came in a piece with it, signed on the cores of the GPU's worker: the GPU"
    " has no room for what becomes of them (fewer tilewright.decompress-threads take less)"
)
"""What is told of the first file of a share of which the cores signed some, the same of all."""

_prepared: set[Signing] = set()
_preparing = threading.Lock()


def prepare(signing: Signing) -> None:
    """Compile and load the kernels of a way to sign, once in a process, before many threads launch them."""
    with _preparing:
        if signing not in _prepared:
            cuda.current_context()  # attaches the thread to the GPU
            device_signing.prepare(signing)
            _prepared.add(signing)


class LaneSigner:
    """Signs what lies in a lane's buffer; used by one thread at a time."""

    def __init__(
        self, lane: CountingLane, signer: DeviceSigner, signing: Signing, *, signatures: bool
    ) -> None:
        self._lane, self._signer, self._signing, self._signatures = lane, signer, signing, signatures
        self.by_cores = 0
        """Blocks for which the GPU had no room."""

    def buffer(self) -> np.ndarray:
        """Memory for the next block; the last one stays as it is."""
        return self._lane.buffer()

    def sign(self, data: np.ndarray, edges: np.ndarray, *, in_block: bool) -> Signs:
        """Sign documents. in_block: whether they lie in the last buffer. Where the GPU has no room for what becomes of
        them, the cores do it."""
        try:
            text = self._lane.bring(data) if in_block else self._signer.brought(data, self._lane.stream)
            return self._signer.sign(text, data, edges, self._lane.stream, signatures=self._signatures)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.by_cores += 1
            return sign_on_cores(data, edges, self._signing, signatures=self._signatures)


_spare_signers: Spares[DeviceSigner] = Spares(DeviceSigner, pinned=False)


@contextmanager
def borrowed_signer(signing: Signing, *, signatures: bool) -> Iterator[LaneSigner]:
    """A lane and a signer of this process for one thread. signatures: whether they are wanted themselves."""
    with borrowed_lane(LARGE_BLOCK_NBYTES) as lane:
        signer = _spare_signers.take(signing)
        try:
            yield LaneSigner(lane, signer, signing, signatures=signatures)
        finally:
            lane.stream.synchronize()  # after a failure, kernels may still be at work in its memory
            _spare_signers.put(signer, signing)
