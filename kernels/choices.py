"""What public functions take and give, as types: words for a choice, so that a checker knows a misspelt one, and
arrays by where they lie. Loads nothing, so that the command line can ask it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

if TYPE_CHECKING:
    import numpy as np

HostArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class DeviceArray(Protocol):
    """An array on a GPU, as Numba's, CuPy's and PyTorch's are."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


DeviceName: TypeAlias = Literal["auto", "cuda", "cpu"]
DeviceKind: TypeAlias = Literal["cuda", "cpu"]
"""What ``auto`` comes to."""
DEVICES: tuple[DeviceName, ...] = get_args(DeviceName)

GpuName: TypeAlias = Literal["a100", "a100-40gb", "h100", "h100-pcie", "h200", "l40s"]
GPUS: tuple[GpuName, ...] = get_args(GpuName)
"""Models that a plan can be asked for where there is none; `pipeline/forecast/hardware.py` has their data sheets."""

PrecisionName: TypeAlias = Literal["full", "split", "tf32", "bf16", "fp16"]
PRECISIONS: tuple[PrecisionName, ...] = get_args(PrecisionName)

FormName: TypeAlias = Literal["NFC", "NFD", "NFKC", "NFKD"]
"""Unicode's normalisation forms."""
FORMS: tuple[FormName, ...] = get_args(FormName)

ShingleName: TypeAlias = Literal["word", "character"]
SHINGLES: tuple[ShingleName, ...] = get_args(ShingleName)
"""What shingles consist of."""

HashName: TypeAlias = Literal["sha1", "xxh32"]
HASHES: tuple[HashName, ...] = get_args(HashName)
"""Functions from shingles to 32 bits."""

SchemeName: TypeAlias = Literal["affine32", "legacy"]
SCHEMES: tuple[SchemeName, ...] = get_args(SchemeName)
"""Families of permutations of MinHash, as datasketch calls them."""

PairsName: TypeAlias = Literal["all", "links"]
PAIRS: tuple[PairsName, ...] = get_args(PairsName)
"""Which pairs of near-duplicates are verified: all, or those that show which documents are of one cluster."""

KindName: TypeAlias = Literal["byte", "ascii", "letter", "bigram", "codepoint"]
"""Kinds of histogram whose bins are known beforehand."""
TokenName: TypeAlias = Literal[
    "word", "line",
    "ngram:2", "ngram:3", "ngram:4", "ngram:5",
    "ngram:2:word", "ngram:3:word", "ngram:4:word", "ngram:5:word",
    "ngram:2:character", "ngram:3:character", "ngram:4:character", "ngram:5:character",
    "ngram:2:byte", "ngram:3:byte", "ngram:4:byte", "ngram:5:byte",
]  # fmt: skip
"""Kinds whose bins are those that occur."""
KINDS_OF_HISTOGRAM: tuple[str, ...] = (
    *get_args(KindName),
    *(name for name in get_args(TokenName) if not name.endswith(":word")),
)
"""Each by the one name that its counts have."""

ErrorPolicy: TypeAlias = Literal["stop", "report"]
ON_ERROR: tuple[ErrorPolicy, ...] = get_args(ErrorPolicy)
"""What becomes of a corpus with a file that cannot be read."""
PassageName: TypeAlias = Literal["line", "paragraph"]
PASSAGES: tuple[PassageName, ...] = get_args(PassageName)
"""What of a text may be a document."""

Divisor: TypeAlias = Literal["n", "n-1", "pairs", "2pq"]
DIVISORS: tuple[Divisor, ...] = get_args(Divisor)
"""What sums over variables may be divided by."""

CodecName: TypeAlias = Literal[
    "none", "zstd", "lz4", "gzip", "blosc-zstd", "blosc-lz4", "blosc-lz4hc", "blosc-zlib", "blosc-blosclz"
]
CODECS: tuple[CodecName, ...] = get_args(CodecName)
"""What chunks of a new array are compressed by."""
