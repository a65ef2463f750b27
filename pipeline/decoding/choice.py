"""What decodes the chunks of A and B where GPUs multiply, decided before anything is read."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.kernels.numbers import format_nbytes
from tilewright.pipeline import config
from tilewright.pipeline.decoding.coding import BLOSC, LZ4, RAW, ZSTD, Coding
from tilewright.pipeline.plan.decoding import (
    CHECKED,
    EVERYWHERE,
    NOWHERE,
    CodedInput,
    DecodingRoom,
    room_for,
)
from tilewright.pipeline.plan.inputs import WorkerFacts
from tilewright.pipeline.store import arrays as store
from tilewright.pipeline.store.chunks import coding_of
from tilewright.pipeline.store.region import StoredArray

NAMES = {
    RAW: "bytes in another order",
    ZSTD: "Zstandard",
    LZ4: "LZ4",
    BLOSC: "Blosc",
}

NO_ROOM = "by the cores, as tiles need all of the GPU's memory"


def decoding_for(
    inputs: Sequence[StoredArray], facts: Sequence[WorkerFacts], device_nbytes: int
) -> tuple[DecodingRoom | None, str]:
    """The memory that each GPU sets aside for decoding, out of what a plan has; and what decodes, for people. Nothing
    is said where the CPU multiplies, or nothing is encoded."""
    if facts[0].device == "cpu":
        return None, ""
    encoded = [array for array in inputs if not store.is_plain(array)]
    if not encoded:
        return None, ""
    if not config.get("gpu-decoding"):
        return None, "by the cores (tilewright.gpu-decoding is false, its default)"
    coded = inputs_of(encoded)
    if not coded:
        return (
            None,
            "by the cores, as no GPU decodes what A and B are encoded by, or reads it from where they lie",
        )
    missing = next((fact.no_nvcomp for fact in facts if fact.no_nvcomp), "")
    may, who = _nvcomp(encoded, missing)
    room = room_for(coded, device_nbytes, may)
    names = " and ".join(dict.fromkeys(given.name for given in coded))
    if room is None:
        most = max(given.chunk_nbytes for given in coded)
        return None, (
            f"by the cores: of {names} chunks of {format_nbytes(most)} too few would fit into the part of"
            f" {format_nbytes(device_nbytes)} that a GPU may set aside"
        )
    return room, (
        f"{names} on the GPU, up to {room.slots * room.chunks} chunks at once in"
        f" {format_nbytes(room.nbytes)} of its memory, and on the cores; {who}"
    )


def _nvcomp(arrays: Sequence[StoredArray], missing: str) -> tuple[int, str]:
    """What nvCOMP may decode, and that for people. missing: why it cannot; empty: it can."""
    codings = [found[0] for array in arrays if (found := coding_of(array)) is not None]
    codings = [coding for coding in codings if coding.form != RAW]
    if not codings:
        return NOWHERE, "nothing is compressed that nvCOMP decodes"
    trusted = config.get("trust-chunks")
    if not trusted and not any(coding.suffix for coding in codings):
        return NOWHERE, "by nvCOMP none, as no CRC32C says which are sound (tilewright.trust-chunks is false)"
    if missing:
        return NOWHERE, f"without nvCOMP: {missing}"
    if trusted:
        return EVERYWHERE, "by nvCOMP, which is told to trust them (tilewright.trust-chunks)"
    return CHECKED, "by nvCOMP those whose CRC32C is right"


def inputs_of(arrays: Sequence[StoredArray]) -> list[CodedInput]:
    """Those of some arrays that a GPU may decode."""
    return [_coded(*found) for array in arrays if (found := coding_of(array)) is not None]


def _coded(coding: Coding, chunk_nbytes: int) -> CodedInput:
    form = coding.form
    return CodedInput(NAMES[form], chunk_nbytes, form == BLOSC, form in (ZSTD, BLOSC))
