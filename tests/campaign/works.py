"""What is computed in a campaign: small products of many tiles, and counts of many pieces."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zarr
import zstandard

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
    """A corpus, counted in pieces that a folder keeps."""

    name: str
    options: tuple[str, ...] = ()
    """Beside where the counts and the pieces go."""
    files: Callable[[np.random.Generator], dict[str, bytes]] = lambda rng: {
        "corpus.txt": rng.bytes(PIECES * PIECE_NBYTES)
    }
    """What the corpus's files hold, by their names."""

    def make_inputs(self, folder: Path) -> None:
        (folder / "corpus").mkdir()
        for name, data in self.files(np.random.default_rng(33)).items():
            (folder / "corpus" / name).write_bytes(data)

    def argv(self, folder: Path) -> list[str]:
        out, state = str(folder / "counts.json"), str(folder / "state")
        where = ["--out", out, "--state", state, "--json"]
        return ["histogram", str(folder / "corpus"), *self.options, *where]

    def record(self, folder: Path) -> Path:
        return folder / "state" / "tilewright-counts.jsonl"

    def result(self, folder: Path) -> dict[str, str]:
        out = folder / "counts.json"
        if not out.exists():
            return {}
        found = json.loads(out.read_text())
        del found["seconds"]  # how long it took, the last time
        return {out.name: hashlib.blake2b(json.dumps(found).encode(), digest_size=16).hexdigest()}

    def leftovers(self, folder: Path) -> list[str]:
        allowed = ("corpus", "counts.json", "state")
        # The draft of a table has its process's number in its name: one that is killed with it in hand leaves it.
        names = (path.name for path in folder.iterdir() if not path.match(".counts.json.*.partial"))
        return sorted(name for name in names if name not in allowed)

    def recorded(self, folder: Path) -> set[Any]:
        return set(self.pieces(folder))

    def pieces(self, folder: Path) -> list[tuple[str, int, int]]:
        """What the record holds: files, and first and last + 1 byte of each, again where they were counted again."""
        return pieces_in(entries_in(self.record(folder)))

    def kept(self, printed: dict[str, Any], before: set[Any], folder: Path) -> int:
        times = Counter(self.pieces(folder))
        return sum(times[piece] == 1 for piece in before)


def pieces_in(entries: Iterable[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """Files, and first and last + 1 byte of each, that entries of a count's record are of."""
    found = []
    for entry in entries:
        if "start" not in entry:
            continue
        names = zstandard.decompress(base64.b64decode(entry["names"])).decode().split("\0")
        width, _, data = entry["facts"].partition(" ")
        lengths = np.frombuffer(zstandard.decompress(base64.b64decode(data)), width)[: len(names)].tolist()
        if len(names) == 1:
            found.append((names[0], entry["start"], entry["stop"]))
        else:
            found += [(name, 0, length) for name, length in zip(names, lengths, strict=True)]
    return found


def _some_words(rng: np.random.Generator, count: int) -> list[str]:
    return [f"{'aeiouß'[word % 6]}{word}" for word in rng.zipf(1.5, count).tolist()]


def _mixed_files(rng: np.random.Generator) -> dict[str, bytes]:
    """A large text, small ones that share pieces, and compressed ones."""
    texts = {f"{number:02}.txt": _some_words(rng, 100 * number) for number in range(30)}
    files = {name: " ".join(words).encode() for name, words in texts.items()}
    files["large.txt"] = " ".join(_some_words(rng, 60_000)).encode()
    for number in range(4):
        files[f"{number}.txt.gz"] = gzip.compress(" ".join(_some_words(rng, 20_000)).encode())
    return files


def _shards(rng: np.random.Generator) -> dict[str, bytes]:
    """Lines of JSON, compressed: each a document with a name of its own."""
    files = {}
    for shard in range(16):
        lines = [
            json.dumps({"id": f"{shard}-{line}", "text": " ".join(_some_words(rng, 20))})
            for line in range(200)
        ]
        files[f"{shard:02}.jsonl.zst"] = zstandard.compress("\n".join(lines).encode())
    return files


WORKS: dict[str, Work] = {
    work.name: work
    for work in (
        Product("float32", "f4"),
        Product("int64", "i8"),
        Product("float32-zstd", "f4", compressed=True),
        Product("int32-sharded", "i4", compressed=True, sharded=True),
        Count("histogram"),
    )
}
COUNTS: dict[str, Count] = {
    work.name: work
    for work in (
        Count("bytes"),
        Count("words", ("--by", "word"), _mixed_files),
        Count("bigrams-of-each", ("--by", "bigram", "--per-document"), _mixed_files),
        Count(
            "fields",
            ("--by", "codepoint", "--per-document", "--field", "text", "--id-field", "id"),
            _shards,
        ),
    )
}
EVERY: dict[str, Work] = {**WORKS, **COUNTS}


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
        return parsed(record.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return []


def parsed(data: bytes) -> list[dict[str, Any]]:
    """The lines of a text that are JSON."""
    found = []
    for line in data.split(b"\n"):
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
