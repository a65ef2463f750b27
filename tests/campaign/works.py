"""What is computed in a campaign: small products of many tiles, and a count of many pieces."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zarr

from tilewright.pipeline.product.output import partial_path

TILES = 32
PIECES = 24
PIECE_NBYTES = 2**16
OURS = "tilewright-"
"""How the names of the files begin that Tilewright keeps beside chunks."""


class Work(Protocol):
    """Something to compute in a folder of its own."""

    name: str

    def make_inputs(self, folder: Path) -> None: ...

    def argv(self, folder: Path) -> list[str]:
        """What the command is called with, but for where it runs."""

    def result(self, folder: Path) -> dict[str, str]:
        """A digest of each file of the finished output, by its name; empty where there is none."""

    def leftovers(self, folder: Path) -> list[str]:
        """What is in the folder, and should not be there once the output is."""

    def recorded(self, folder: Path) -> set[Any]:
        """Pieces that the record names as finished, read by no code of Tilewright's."""

    def kept(self, printed: dict[str, Any], before: set[Any], folder: Path) -> int:
        """Of how many pieces a run that went on has made use."""


@dataclass(frozen=True)
class Product:
    """C = A B, 1024 × 64 by 64 × 512."""

    name: str
    dtype: str
    compressed: bool = False
    sharded: bool = False

    def make_inputs(self, folder: Path) -> None:
        rng = np.random.default_rng(32)
        for name, shape, chunks in (("A", (1024, 64), (128, 32)), ("B", (64, 512), (32, 64))):
            if np.dtype(self.dtype).kind == "i":
                values = rng.integers(-99, 99, shape).astype(self.dtype)
            else:
                values = rng.standard_normal(shape).astype(self.dtype)
            zarr.create_array(
                folder / f"{name}.zarr",
                data=values,
                chunks=(chunks[0] // 2, chunks[1] // 2) if self.sharded else chunks,
                shards=chunks if self.sharded else None,
                compressors="auto" if self.compressed else None,
            )

    def argv(self, folder: Path) -> list[str]:
        paths = [str(folder / name) for name in ("A.zarr", "B.zarr", "C.zarr")]
        return ["matmul", *paths, "--device-memory", "256KiB", "--json"]

    def output(self, folder: Path) -> Path:
        return folder / "C.zarr"

    def partial(self, folder: Path) -> Path:
        return partial_path(self.output(folder))

    def result(self, folder: Path) -> dict[str, str]:
        return digests(self.output(folder))

    def leftovers(self, folder: Path) -> list[str]:
        return sorted(
            path.name for path in folder.iterdir() if path.name not in ("A.zarr", "B.zarr", "C.zarr")
        )

    def recorded(self, folder: Path) -> set[Any]:
        return recorded_tiles(self.partial(folder))

    def kept(self, printed: dict[str, Any], before: set[Any], folder: Path) -> int:
        return int(printed["resumed"])


@dataclass(frozen=True)
class Count:
    """The bytes of one file, counted in pieces that a folder keeps."""

    name: str = "histogram"

    def make_inputs(self, folder: Path) -> None:
        text = np.random.default_rng(33).integers(0, 256, PIECES * PIECE_NBYTES, np.uint8)
        (folder / "corpus.txt").write_bytes(text.tobytes())

    def argv(self, folder: Path) -> list[str]:
        out, state = str(folder / "counts.json"), str(folder / "state")
        return ["histogram", str(folder / "corpus.txt"), "--out", out, "--state", state, "--json"]

    def result(self, folder: Path) -> dict[str, str]:
        out = folder / "counts.json"
        if not out.exists():
            return {}
        counts = json.loads(out.read_text())["counts"]  # beside them is how long it took
        return {out.name: hashlib.blake2b(json.dumps(counts).encode(), digest_size=16).hexdigest()}

    def leftovers(self, folder: Path) -> list[str]:
        allowed = ("corpus.txt", "counts.json", "state")
        # The draft of a table has its process's number in its name: one that is killed with it in hand leaves it.
        names = (path.name for path in folder.iterdir() if not path.match(".counts.json.*.partial"))
        return sorted(name for name in names if name not in allowed)

    def recorded(self, folder: Path) -> set[Any]:
        return set(self.pieces(folder))

    def pieces(self, folder: Path) -> list[tuple[int, int]]:
        """First and last + 1 byte of each that the record holds, again where it was counted again."""
        lines = entries_in(folder / "state" / "tilewright-counts.jsonl")
        return [(line["start"], line["stop"]) for line in lines if "start" in line]

    def kept(self, printed: dict[str, Any], before: set[Any], folder: Path) -> int:
        times = Counter(self.pieces(folder))
        return sum(times[piece] == 1 for piece in before)


WORKS: dict[str, Work] = {
    work.name: work
    for work in (
        Product("float32", "f4"),
        Product("int64", "i8"),
        Product("float32-zstd", "f4", compressed=True),
        Product("int32-sharded", "i4", compressed=True, sharded=True),
        Count(),
    )
}


def digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def digests(array: Path) -> dict[str, str]:
    """A digest of each file of a stored array, by its name, but for those of Tilewright's own, which say how it was
    computed."""
    return {
        str(path.relative_to(array)): digest(path)
        for path in sorted(array.rglob("*"))
        if path.is_file() and not path.name.startswith(OURS)
    }


def differences(found: dict[str, str], wanted: dict[str, str]) -> list[str]:
    return [
        f"{name} {'differs' if name in found and name in wanted else 'is missing' if name in wanted else 'is extra'}"
        for name in sorted({*found, *wanted})
        if found.get(name) != wanted.get(name)
    ]


def entries_in(record: Path) -> list[dict[str, Any]]:
    """The whole lines of a record."""
    try:
        lines = record.read_bytes().split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:  # torn
            continue
    return found


def recorded_tiles(folder: Path, *, synced: bool = False) -> set[int]:
    """Tiles that the record in an output's folder names as finished; synced: those alone that it says are on disk."""
    found: set[int] = set()
    for entry in entries_in(folder / "tilewright-ledger.jsonl"):
        if "tile" in entry and "objects" in entry:
            found.add(entry["tile"])
        elif "stored" in entry:
            if synced:
                found.discard(entry["stored"])
            else:
                found.add(entry["stored"])
        elif "withdrawn" in entry:
            found.discard(entry["withdrawn"])
    return found


def tiles_of_chunks(array: Path) -> dict[str, int]:
    """The tile that each chunk of a finished C belongs to, by the chunk's name."""
    return {
        "/".join(map(str, ("c", *place))): entry["tile"]
        for entry in entries_in(array / "tilewright-checksums.jsonl")
        if "tile" in entry and "objects" in entry
        for *place, _, _ in entry["objects"]
    }
