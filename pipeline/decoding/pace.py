"""Who decodes the next chunks, a GPU or a core, by what each has taken of late."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from tilewright.kernels.numbers import ceil_div
from tilewright.pipeline.decoding.coding import BLOSC, LZ4, RAW, ZSTD


class Rates(NamedTuple):
    """Bytes a second, decoded, before anything was measured."""

    core: float
    """Of one core."""
    chunk: float
    """Of a GPU, of one chunk or block by itself: no faster, however few there are."""
    gpu: float
    """Of a GPU, of many at once."""


RATES = {
    RAW: Rates(4e9, 1e11, 1e11),
    ZSTD: Rates(0.55e9, 0.5e9, 50e9),
    LZ4: Rates(1.5e9, 0.2e9, 40e9),
    BLOSC: Rates(1.2e9, 1e9, 40e9),
}
"""Of an H100 and its host's cores, about. What a run measures takes their place."""

WEIGHT = 0.3
"""Of the latest measurement."""


class Choice(Enum):
    GPU = "gpu"
    CORE = "core"
    WAIT = "wait"


class Pace:
    """What decoding has taken of late, of chunks of one form and size. Threads may change it at once: a figure that is
    lost does not matter."""

    def __init__(self, form: int, nbytes: int, batch: int) -> None:
        """nbytes: of a decoded chunk. batch: the most chunks of a slot."""
        rates = RATES[form]
        self.core_seconds = nbytes / rates.core
        """Of one chunk on one core."""
        self.batch_seconds = nbytes / rates.chunk + batch * nbytes / rates.gpu
        """Of a batch on the GPU, beside others there."""

    def took(self, *, core: float | None = None, batch: float | None = None) -> None:
        """Learn from seconds that were measured."""
        if core is not None:
            self.core_seconds += WEIGHT * (core - self.core_seconds)
        if batch is not None:
            self.batch_seconds += WEIGHT * (batch - self.batch_seconds)

    def choice(self, left: int, at_once: int, threads: int, *, room: bool) -> Choice:
        """Who takes next of ``left`` chunks: both sides so that all are done soonest.

        at_once: chunks that all slots hold together. threads: the cores that decode. room: whether a slot is free. If
        one is, the GPU takes a batch if it is expected to finish that before the cores could finish all that is left;
        else a core takes a chunk. If none is, a core takes a chunk if it is expected to finish that before the GPU
        could finish all that is left; else its thread waits.
        """
        if room:
            on_cores = ceil_div(left, max(1, threads)) * self.core_seconds
            return Choice.GPU if self.batch_seconds <= on_cores else Choice.CORE
        on_gpu = self.batch_seconds * (1 + left / max(1, at_once))
        return Choice.CORE if self.core_seconds <= on_gpu else Choice.WAIT
