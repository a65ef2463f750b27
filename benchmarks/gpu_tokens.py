"""How fast a GPU counts words, lines and n-grams of plain text, beside all cores of its host.

    python benchmarks/gpu_tokens.py [FILE ...] [--by KIND ...] [--nbytes N] [--text-nbytes N] [--rounds R] [--json F]

Without FILE it makes a text: words of a vocabulary of a million, as frequent as in natural text, that is repeated from
128 MiB on, with one letter in a hundred outside ASCII. ``--nbytes`` of it are counted, through hard links to one file,
so that it stays in the page cache.

For each kind: the rate of the kernels alone, over ``--text-nbytes`` in device memory, with the milliseconds of draining
the table and of putting its tokens in order; the rate of the whole path, files to one list in order, on the GPU
(profile ``local``) and on all cores (profile ``cpu``, of a quarter of the text); and the share of the floor, which is
the text's bytes at the rate of the bus. Rates are the best of the rounds. Counts of the two devices are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import tilewright as tw
from tilewright.kernels.histograms.token_kinds import TokenKind, any_kind_named

BUS_NBYTES = 54e9
"""Bytes a second from pinned memory to an H100: the floor of what lies in the page cache."""
FILE_NBYTES = 1 << 30
UNIT_NBYTES = 1 << 27
VOCABULARY = 1_000_000
KINDS = (
    *("word", "ngram:3:byte", "ngram:3:character", "ngram:5:character", "ngram:5:byte", "line"),
    *("ngram:2", "ngram:3"),
)
LETTERS = "etaoinshrdlcumwfgypbvkjxqz"


def make_text(nbytes: int) -> bytes:
    """Natural in how often words occur and how long they are, and in how many are new."""
    rng = np.random.default_rng(20261127)
    lengths = np.clip(np.log2(np.arange(VOCABULARY) + 2) * 0.45 + rng.normal(1.0, 1.2, VOCABULARY), 1, 15)
    weights = 1 / np.arange(1, len(LETTERS) + 1) ** 0.7
    letters = rng.choice(len(LETTERS), (VOCABULARY, 15), p=weights / weights.sum())
    words = [
        "".join(LETTERS[k] for k in row[:length])
        for row, length in zip(letters.tolist(), lengths.astype(int).tolist(), strict=True)
    ]
    for place in range(7, VOCABULARY, 31):
        words[place] = words[place].replace("e", "é").replace("o", "ö")
    share = 1 / (np.arange(VOCABULARY) + 2.7) ** 1.12
    bounds = np.cumsum(share / share.sum())
    parts, have = [], 0
    while have < nbytes:
        ranks = np.searchsorted(bounds, rng.random(1 << 18)).tolist()
        breaks = rng.integers(5, 80, 1 << 14).cumsum().tolist()
        chosen = [words[min(rank, VOCABULARY - 1)] for rank in ranks]
        for place in breaks:
            if place < len(chosen):
                chosen[place] += ".\n"
        parts.append(" ".join(chosen).encode())
        have += len(parts[-1])
    return b"".join(parts)[:nbytes]


def files_of(folder: Path, nbytes: int) -> list[Path]:
    unit = make_text(min(UNIT_NBYTES, nbytes))
    size = min(FILE_NBYTES, nbytes)
    first = folder / "000.txt"
    with first.open("wb") as file:
        for start in range(0, size, len(unit)):
            file.write(unit[: size - start])
    paths = [first]
    for number in range(1, nbytes // size):
        os.link(first, folder / f"{number:03}.txt")
        paths.append(folder / f"{number:03}.txt")
    return paths


def kernels(data: np.ndarray, kind: TokenKind, rounds: int) -> dict[str, Any]:
    """Rates and times of counting a text that lies in device memory."""
    from numba import cuda

    from tilewright.kernels.histograms.device_token_counting import DeviceCounter

    text = cuda.to_device(np.append(data, np.uint8(0)))
    counter = DeviceCounter(kind)
    edges = np.array([0, len(data)])

    def reader(place: int) -> Any:
        rest = [data[place:]]

        def more(nbytes: int) -> np.ndarray:
            first, rest[0] = rest[0][:nbytes], rest[0][nbytes:]
            return first

        return more

    best: dict[str, float] = {}
    found = None
    for turn in range(rounds + 1):  # the first compiles
        counter.begin()
        counter.count(text, edges, 0, len(data), reader)
        if turn:
            best = {name: min(best.get(name, seconds), seconds) for name, seconds in counter.seconds.items()}
        found = counter.take()
    assert found is not None
    return {
        "tokens": int(found.counts.sum()),
        "different": len(found.counts),
        "kernel_gb_s": len(data) / best["kernels"] / 1e9,
        **{f"{name}_ms": 1e3 * seconds for name, seconds in best.items()},
    }


def whole(paths: list[Path], by: str, rounds: int, **where: Any) -> tuple[float, Any]:
    """The best rate of counting files, in GB/s, and the counts. By the clock: of a process's start, none."""
    best, found = 0.0, None
    for _ in range(rounds):
        start = time.perf_counter()
        found = tw.histogram(paths, by=by, **where)
        best = max(best, found.nbytes / found.seconds / 1e9)
        print(
            f"    {by} {where['device']}: {found.seconds:.3f} s of {time.perf_counter() - start:.3f} s",
            flush=True,
        )
    return best, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--by", nargs="*", default=KINDS)
    parser.add_argument("--nbytes", type=int, default=8 << 30)
    parser.add_argument("--text-nbytes", type=int, default=1 << 29)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-cpu", action="store_true", help="leave the cores out")
    parser.add_argument("--json", type=Path, help="where the figures go, too")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gpu-tokens-"))
    rows = []
    try:
        paths = options.files or files_of(folder, options.nbytes)
        data = np.concatenate([np.fromfile(path, np.uint8, options.text_nbytes) for path in paths[:1]])
        for by in options.by:
            kind = any_kind_named(by)
            assert isinstance(kind, TokenKind)
            row: dict[str, Any] = {"by": by, **kernels(data, kind, options.rounds)}
            row["gpu_gb_s"], found = whole(paths, by, options.rounds, device="cuda", cluster="local")
            row["of_floor"] = row["gpu_gb_s"] * 1e9 / BUS_NBYTES
            if not options.no_cpu:
                some = paths[: max(1, len(paths) // 4)]
                row["cpu_gb_s"], wanted = whole(some, by, 2, device="cpu", cluster="cpu")
                if len(some) < len(paths):
                    _, found = whole(some, by, 1, device="cuda", cluster="local")
                assert list(found.tokens) == list(wanted.tokens), by
                assert (found.counts == wanted.counts).all(), by
                assert found.undecodable == wanted.undecodable, by
            print({name: round(v, 3) if isinstance(v, float) else v for name, v in row.items()}, flush=True)
            rows.append(row)
    finally:
        shutil.rmtree(folder)
    print(
        f"\n{'by':18}{'kernels':>9}{'GPU':>8}{'cores':>8}  GB/s{'floor':>8}{'drain':>9}{'order':>9}  ms    different"
    )
    for row in rows:
        print(
            f"{row['by']:18}{row['kernel_gb_s']:9.1f}{row['gpu_gb_s']:8.2f}{row.get('cpu_gb_s', 0):8.2f}"
            f"      {row['of_floor']:8.1%}{row['drain_ms']:9.1f}{row['order_ms']:9.1f}    {row['different']:>11}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
