"""Documents in a GPU's memory go in, their signatures and the keys of their bands come out, as `shingles.py` and
`minhash.py` make them.

What documents take besides their text, a `DeviceSigner` keeps from one call to the next, and has it grow. Documents
that the kernels cannot fold (`folding.py`) are signed by the cores.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.kernels.deferred import cuda
from tilewright.kernels.duplicates.device_minhash import CHUNK, FORM_KEYS, KEY_THREADS, SIGN
from tilewright.kernels.duplicates.device_minhash import THREADS as SIGNERS
from tilewright.kernels.duplicates.device_rooms import Rooms
from tilewright.kernels.duplicates.device_units import GAPS, OF_TEXT, SCAN, SCANNERS, WALK
from tilewright.kernels.duplicates.folding import Folding, folding_of
from tilewright.kernels.duplicates.signing import Signing, Signs, sign_on_cores
from tilewright.kernels.duplicates.signing_memory import SLACK, THREADS, TILE, WORD_NBYTES
from tilewright.kernels.gpu.device_array import strided_view
from tilewright.kernels.gpu.transfer import download
from tilewright.kernels.histograms.select import clear
from tilewright.kernels.histograms.token_kinds import word_table
from tilewright.kernels.numbers import ceil_div

MOST_NBYTES = 2**30
"""Text that is signed at once: what becomes of it is below 4 GiB, and so are places in it."""


class DeviceSigner:
    """Signs documents on the current GPU; used by one thread at a time."""

    def __init__(self, signing: Signing) -> None:
        self._signing = signing
        kind, permutations = signing.kind, signing.permutations
        self._folds = bool(kind.casefold or kind.normalise)
        nothing = Folding(np.zeros(1, np.uint16), np.zeros(1, np.uint64))
        folding = folding_of(kind) if self._folds else nothing
        letters = word_table() if kind.unit == "word" else np.zeros(1, np.uint8)
        self._letters, self._numbers, self._folded, self._a, self._b = (
            cuda.to_device(array)
            for array in (letters, folding.numbers, folding.folded, permutations.a, permutations.b)
        )
        self._rooms = Rooms()

    @property
    def nbytes(self) -> int:
        """Memory of the device that it takes."""
        tables = (self._letters, self._numbers, self._folded, self._a, self._b)
        return sum(array.size * array.dtype.itemsize for array in tables) + self._rooms.nbytes

    def brought(self, data: np.ndarray, stream: Any) -> Any:
        """Documents that lie in no pinned memory, on the device until the next call."""
        return self._rooms.uploaded("text", data, stream)

    def sign(
        self,
        text: Any,
        data: np.ndarray | None,
        edges: np.ndarray,
        stream: Any,
        *,
        signatures: bool,
        ends: np.ndarray | None = None,
    ) -> Signs:
        """Sign documents, which begin at ``edges``, int64, the first at 0, and the last of which ends there.

        text: uint8, device memory, that the stream brings them to. data: the same, on the host, where it is there too.
        ends: int64, where each document ends, if not at the next one's edge.
        """
        documents, stop = len(edges) - 1, int(edges[-1])
        if stop > MOST_NBYTES:
            raise ValueError(f"documents of {stop} bytes are more than {MOST_NBYTES}")
        bands, num_perm = self._signing.bands, self._signing.num_perm
        if not documents:
            none = np.empty((0, num_perm), np.uint32) if signatures else None
            return Signs(np.empty(0, np.bool_), np.empty((bands, 0), np.uint64), none)
        places = self._rooms.uploaded("edges", edges.astype(np.int64, copy=False), stream)
        places_of_ends = places[1 : documents + 1]
        if ends is not None:
            places_of_ends = self._rooms.uploaded("ends", ends.astype(np.int64, copy=False), stream)
        others = self._rooms.of("others", documents, np.uint8)
        unit_edges = self._rooms.of("unit edges", documents + 1, np.int64)
        signed = self._rooms.of("signatures", documents * num_perm, np.uint32)
        keys = self._rooms.of("keys", documents * bands, np.uint64)
        clear(others, stream)
        clear(signed, stream, 0xFF)  # `minhash.EMPTY`
        self._sign(text, places, places_of_ends, documents, stop, others, unit_edges, signed, stream)
        grid = ceil_div(documents * bands, KEY_THREADS)
        FORM_KEYS.enqueue(
            (), grid, KEY_THREADS, stream, signed, documents, num_perm, bands, self._signing.rows, keys
        )
        begins = download(unit_edges[: documents + 1], stream)
        found_keys = download(keys[: bands * documents], stream)
        each = download(signed[: documents * num_perm], stream) if signatures else None
        unsettled = download(others[:documents], stream) if self._folds else np.zeros(1, np.uint8)
        found = Signs(
            np.diff(begins) > 0,
            found_keys.reshape(bands, documents),
            None if each is None else each.reshape(documents, num_perm),
        )
        if unsettled.any():
            ends = edges[1:] if ends is None else ends
            if data is None:
                data = download(text[:stop], stream)
            found = self._with_others(found, data, edges, ends, np.flatnonzero(unsettled))
        return found

    def _sign(
        self, text: Any, edges: Any, ends: Any, documents: int, stop: int,
        others: Any, unit_edges: Any, signatures: Any, stream: Any,
    ) -> None:  # fmt: skip
        kind, tiles = self._signing.kind, ceil_div(stop, TILE)
        sums = self._rooms.of("sums", tiles * THREADS, np.uint32)
        totals = self._rooms.of("totals", tiles + 1, np.uint64)
        of = (kind.unit, self._folds)

        def walk(writes: bool, out: Any, words: Any, places: Any) -> None:
            if tiles:
                WALK.enqueue(
                    (*of, writes), tiles, THREADS, stream,
                    *(text, edges, ends, documents, stop, self._letters, self._numbers, self._folded),
                    *(sums, totals, others, out, words, places, unit_edges),
                )  # fmt: skip

        # What nothing is written to may be anything of its type.
        walk(False, others, sums, sums)
        SCAN.enqueue((), 1, SCANNERS, stream, totals, tiles, edges, documents, stop, unit_edges)
        every = int(download(totals[tiles : tiles + 1], stream)[0])
        nbytes, units = every >> OF_TEXT, every & ((1 << OF_TEXT) - 1)
        if not units:
            clear(unit_edges, stream)
            return
        words = self._rooms.of("words", ceil_div(nbytes + SLACK, WORD_NBYTES), np.uint32)
        places = self._rooms.of("places", units + 1, np.uint32)
        walk(True, _as_bytes(words), words, places)
        gap = GAPS[kind.unit]
        SIGN.enqueue(
            (self._signing.hash, self._signing.scheme), ceil_div(units, CHUNK), SIGNERS, stream,
            *(words, places, unit_edges, documents, kind.n, gap, self._a, self._b),
            *(self._signing.num_perm, signatures),
        )  # fmt: skip

    def _with_others(
        self, found: Signs, data: np.ndarray, edges: np.ndarray, ends: np.ndarray, places: np.ndarray
    ) -> Signs:
        """What was found, with these documents signed by the cores."""
        parts = [data[edges[place] : ends[place]] for place in places.tolist()]
        lengths = np.cumsum([0, *map(len, parts)])
        wanted = found.signatures is not None
        theirs = sign_on_cores(np.concatenate(parts), lengths, self._signing, signatures=wanted)
        found.shingled[places], found.keys[:, places] = theirs.shingled, theirs.keys
        if found.signatures is not None:
            found.signatures[places] = theirs.signatures
        return Signs(found.shingled, found.keys, found.signatures, len(places))


def _as_bytes(words: Any) -> Any:
    """The bytes of device memory."""
    return strided_view(words, (words.size * WORD_NBYTES,), (1,), np.dtype(np.uint8))


def prepare(signing: Signing) -> None:
    """Compile and load the kernels of a way to sign."""
    kind = signing.kind
    for writes in (False, True):
        WALK.prepare(kind.unit, bool(kind.casefold or kind.normalise), writes)
    SCAN.prepare()
    SIGN.prepare(signing.hash, signing.scheme)
    FORM_KEYS.prepare()
