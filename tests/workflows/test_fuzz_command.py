"""Wrong words on the command line: each command ends with status 0, 1 or 2, says what is wrong in one line, and leaves
nothing behind."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from distributed import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzzing import TRACEBACK, Left, check_message, check_tree, names, tree
from tests.workflows.fuzz_folder import PROFILES, place
from tests.workflows.test_fuzz_api import new_parents
from tilewright.pipeline.errors import TilewrightError
from tilewright.workflows.cli import cli

__all__ = ["place"]

SHARED = "the shared scheduler"
"""Stands for the address of the tests' cluster: one of its own would take each command half a second."""

ARRAYS = (
    *("A.zarr", "B.zarr", "C.zarr", "I.zarr", "x.zarr", "one.zarr", "scalar.zarr", "empty.zarr", "none.zarr"),
    *(
        "bool.zarr",
        "date.zarr",
        "group.zarr",
        "group.zarr/inner",
        "text.txt",
        "junk.bin",
        "folder",
        "pipe",
        "socket",
    ),
    *("loop", "dangling", "link.zarr", "big-endian.zarr", "file://A.zarr"),
)
arrays = st.sampled_from(ARRAYS) | names
sizes = st.sampled_from(["8GiB", "1", "0", "-1", "8 GiBB", "nan", "1e400", "²", "1.5", "9" * 400, ""]) | names
counts = st.sampled_from(["1", "2", "0", "-1", "65", "2.5", "True", "1e3", "9" * 30, "", "１"]) | names
no_capabilities = st.sampled_from(["7.5", "9", "sm_90", "", "-1", "nan", "9.0.0"])
dtypes = (
    st.sampled_from(["f4", "int64", "nonsense", ">f8", "O", "S4", "i4,f4", "bfloat16", "(2,3)f8", "a5"])
    | names
)
scalars = st.sampled_from(["2", "-0.5", "1+2j", "nan", "inf", "1e400", "", "x", "9" * 400]) | names
codes = (
    st.sampled_from(
        ["-1", "nan", "NaN", "0", "1e400", "9" * 400, "mean", "zero", "n", "n-1", "pairs", "", "time", "1_0"]
    )
    | names
)
vectors = (
    st.sampled_from(["x.zarr", "columns", "both", "rows=x.zarr", "columns=", "=", "variables", ""]) | arrays
)
devices = st.sampled_from(["auto", "cpu", "cuda", "gpu", "CPU"]) | names
precisions = st.sampled_from(["full", "split", "tf32", "FULL"]) | names
profiles = st.sampled_from([SHARED, "nope", "", "://", "tcp://", "tcp://127.0.0.1:1", "mine"]) | names
files = st.sampled_from([*PROFILES, "folder", "loop", "socket", "A.zarr"]) | names
corpora = (
    st.sampled_from(["text.txt", "folder", "folder/bare", "junk.gz", "junk.zst", "pipe", "loop", "/dev/null"])
    | names
)
tables = (
    st.sampled_from(
        ["h.csv", "h.json", "h.zarr", "h.png", "h", "C.zarr", "text.txt", "nowhere/h.csv", "folder/h.csv"]
    )
    | st.builds("{}.csv".format, names)
    | st.builds("{}.zarr".format, names)
)
documents = (
    st.sampled_from(["d.json", "d.zarr", "d.parquet", "d.csv", "d", "C.zarr", "text.txt", "nowhere/d.json"])
    | st.builds("{}.json".format, names)
    | st.builds("{}.zarr".format, names)
)
reports = st.sampled_from(
    ["r.html", "r.json", "r", "C.zarr", "text.txt", "nowhere/r.html", "folder/r.json"]
) | st.builds("{}.html".format, names)
plots = st.sampled_from(["h.png", "h.csv", "nowhere/h.png", "folder"]) | st.builds("{}.png".format, names)

SWITCHES = {
    "--transpose-a",
    "--transpose-b",
    "--plan-only",
    "--no-verify",
    "--no-resume",
    "--overwrite",
    "--json",
}
FACTORS: dict[str, Any] = {"--transpose-a": None, "--transpose-b": None, "--precision": precisions}
ALIGNED: dict[str, Any] = {"--align": st.sampled_from(["labels", "position", "none"]) | names}
PLACED: dict[str, Any] = {"--profile": profiles, "--cluster-file": files, "--detach": None, "--dry-run": None}
COMMON: dict[str, Any] = {"--json": None, "--debug": None, "--nonsense": None, "--help": None}
RIGHT = {
    "A": "A.zarr",
    "B": "B.zarr",
    "C": "result.zarr",
    "X": "x.zarr",
    "CORPUS": "text.txt",
    "PRODUCT": "C.zarr",
    "NEAR": "near.zarr",
    "WHERE": SHARED,
}
ELSEWHERE: dict[str, Any] = {
    "--gpu": st.sampled_from(["h100", "a100", "h200", "l40s", "H100", "gpu", ""]) | names,
    "--rate": st.sampled_from(["50T", "1", "0", "-1", "1e400", "nan", "T", "5.5 g", ""]) | names,
    "--workers": counts,
}
NEIGHBOURS = (
    PLACED
    | ELSEWHERE
    | {
        "--metric": st.sampled_from(["dot", "cosine", "l2", "near"]),
        "--columns": None,
        **ALIGNED,
        "--precision": precisions,
        "--device": devices,
        "--device-memory": sizes,
        "--plan-only": None,
        "--no-verify": None,
        "--no-resume": None,
        "--overwrite": None,
        "--report": reports,
    }
)
STORED: dict[str, Any] = {
    "--chunks": st.sampled_from(["4", "3x2", "0x1", "x", "9999999999999"]) | counts,
    "--shards": st.sampled_from(["4", "12x12", "7x7"]) | counts,
    "--codec": st.sampled_from(["zstd:1", "none", "zstd:99", "lz4"]) | names,
}
COMMANDS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "matmul": (
        ("A", "B", "C"),
        FACTORS
        | PLACED
        | ALIGNED
        | {
            "--dtype": dtypes,
            "--device": devices,
            "--device-memory": sizes,
            "--plan-only": None,
            "--no-verify": None,
        }
        | ELSEWHERE
        | {"--no-resume": None, "--overwrite": None}
        | {"--alpha": scalars, "--beta": scalars, "--report": reports}
        | STORED
        | dict.fromkeys(("--row-scale", "--column-scale", "--row-offset", "--column-offset"), arrays),
    ),
    **{
        name: (
            ("A", "C"),
            PLACED
            | {
                "--of": st.sampled_from(["columns", "rows", "lines"]),
                "--missing": codes,
                "--missing-as": codes,
                **ALIGNED,
            }
            | {"--weights": vectors, "--sum-over": codes, "--window": counts, "--dtype": dtypes}
            | {"--device": devices, "--overwrite": None, "--precision": precisions, "--report": reports}
            | STORED
            | ELSEWHERE
            | {"--plan-only": None}
            | more,
        )
        for name, more in {
            "gram": {"--center": vectors, "--scale": vectors, "--divide": codes, "--constant": codes},
            "cov": {"--divide": codes, "--constant": codes},
            "corr": {"--constant": codes},
        }.items()
    },
    "eofs": (
        ("A", "C"),
        PLACED
        | {"-k": counts, "--tol": codes, "--passes": counts, "--seed": counts, "--dtype": dtypes}
        | {"--of": st.sampled_from(["columns", "rows", "lines"]), "--sum-over": codes, "--missing": codes}
        | ALIGNED
        | {
            "--no-center": None,
            "--scale": None,
            "--constant": codes,
            "--overwrite": None,
            "--no-verify": None,
        }
        | {"--weights": arrays, "--sample-weights": arrays, "--scratch": names, "--precision": precisions}
        | {"--device": devices, "--device-memory": sizes, "--method": codes, "--report": reports}
        | ELSEWHERE
        | {"--plan-only": None},
    ),
    "plan": (
        ("A", "B"),
        FACTORS
        | ALIGNED
        | {"--dtype": dtypes, "--device": devices, "--device-memory": sizes, "--workers": counts}
        | {"--host-memory": sizes, "--profile": profiles, "--cluster-file": files}
        | ELSEWHERE
        | STORED,
    ),
    "verify": (("A", "B", "PRODUCT"), FACTORS | PLACED | {"--rounds": counts}),
    "audit": (("NEAR", "A"), FACTORS | PLACED | {"--precision": precisions, "--a": arrays, "--b": arrays}),
    "histogram": (
        ("CORPUS",),
        PLACED
        | {
            "--by": st.sampled_from(["byte", "letter", "word", "ngram:3", "ngram:9", "BYTE"]) | names,
            "--casefold": None,
            "--normalise": st.sampled_from(["NFC", "nfc"]) | names,
            "--per-document": None,
            "--raw": None,
        }
        | {"--out": tables, "--plot": plots, "--device": devices, "--overwrite": None, "--plan-only": None}
        | {"--report": reports}
        | {"--bars": st.sampled_from(["percent", "counts", "rows"]) | names, "--top": counts},
    ),
    "duplicates": (
        ("CORPUS",),
        PLACED
        | {"--threshold": codes, "--ngram": counts, "--num-perm": counts, "--bands": counts, "--rows": counts}
        | {"--shingle": st.sampled_from(["word", "character", "byte"]) | names, "--seed": counts}
        | {"--hash": st.sampled_from(["sha1", "xxh32", "md5"]) | names, "--scheme": names, "--pairs": names}
        | {
            "--out": documents,
            "--device": devices,
            "--list": None,
            "--null": None,
            "--plan-only": None,
            "--signatures": None,
            "--overwrite": None,
            "--raw": None,
        }
        | {"--report": reports},
    ),
    "signals": (
        ("CORPUS",),
        PLACED
        | {"--stop-word": names, "--out": documents, "--overwrite": None, "--raw": None, "--report": reports}
        | {"--rules": st.sampled_from(["gopher", "gopher-quality", "c4", "rules.yaml"]) | names}
        | {"--list": None, "--list-kept": None, "--null": None, "--plan-only": None},
    ),
    "dot": (("X", "X"), PLACED | ALIGNED | {"--device": devices, "--dtype": dtypes}),
    "top": (("WHERE",), {"--cluster-file": files}),
    "topk": (
        ("A", "C"),
        NEIGHBOURS | {"-k": counts, "--exclude-self": None},
    ),
    "pairs": (
        ("A", "C"),
        NEIGHBOURS | {"--above": codes, "--below": codes, "--count-only": None},
    ),
    "devices": ((), {}),
    # Of no capability that a GPU has: compiling takes minutes.
    "kernels": (
        (),
        {"--into": files, "--capability": no_capabilities, "--job": names, "--processes": counts},
    ),
    "profiles": ((), {"--cluster-file": files}),
    "settings": ((), {}),
}
"""Each command, its arguments, and its options with what may follow them; None follows a switch."""


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command, of whose arguments and options some are wrong."""
    command = draw(st.sampled_from(sorted(COMMANDS)))
    arguments, options = COMMANDS[command]
    words = []
    for name in arguments:
        wrong = draw(st.integers(0, 3)) == 0
        values = {"CORPUS": corpora, "WHERE": profiles}.get(name, arrays)
        words.append(draw(values) if wrong else RIGHT[name])
    extent = draw(st.sampled_from([0, 0, 0, 0, 0, -1, 1]))
    words = words[:-1] if extent < 0 else words + ["A.zarr"] * extent
    options = options | COMMON
    for name in draw(st.lists(st.sampled_from(sorted(options)), max_size=3)):
        values = options[name]
        words += [name] if values is None or draw(st.integers(0, 15)) == 0 else [name, draw(values)]
    if "--profile" in options and "--profile" not in words:
        words += ["--profile", SHARED]
    # Else it goes on; behind an option without its value they would be that.
    ends = ["--once", "--interval", "0.1"] if command == "top" else []
    return [command, "--quiet", *ends, *words]


def check_command(place: Path, client: Client, line: list[str]) -> None:
    """One case: the command runs in this process."""
    line = [client.scheduler.address if word == SHARED else word for word in line]
    before, left = tree(place), Left()
    result = CliRunner().invoke(cli, line, prog_name="tilewright")
    debug = "--debug" in line  # which asks for tracebacks
    expected = (SystemExit, TilewrightError) if debug else SystemExit
    assert result.exception is None or isinstance(result.exception, expected), repr(result.exception)
    check_streams(result.exit_code, result.stdout, result.stderr, debug)
    results = [os.path.normpath(f"here/{word.removeprefix('file://')}") for word in written(line)]
    results = [result for result in results if result not in before or "--overwrite" in line]
    allowed = results if result.exit_code == 0 else []
    for name in list(allowed):
        allowed += new_parents(name, before)
    try:
        check_tree(before, place, *allowed)
        left.check()
    finally:
        for name in allowed:
            if name not in before and "\0" not in name:
                remove(place / name)


def written(line: list[str]) -> Iterator[str]:
    """What a command writes when all goes well."""
    if line[0] in ("matmul", "gram", "cov", "corr", "eofs", "topk", "pairs"):
        yield from line[2:]  # C is one of them
    for option in ("--out", "--plot", "--report"):
        if line[0] in ("histogram", "duplicates", "signals") and option in line:
            yield from line[line.index(option) + 1 :]


def remove(path: Path) -> None:
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        # Below a file, as behind --help, or no name that a file can have: nothing is there.
        if error.errno not in (errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
            raise


def test_what_cannot_be_there_need_not_be_removed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("nothing", "x" * 300, "file/below", "file"):
        remove(tmp_path / name)
    assert not list(tmp_path.iterdir())


def check_streams(status: int, out: str, errors: str, debug: bool = False) -> None:
    assert status in (0, 1, 2), (status, errors)
    if debug:
        return
    assert TRACEBACK not in out + errors
    assert "not foreseen" not in errors
    if status == 1 and not out:
        check_message(errors.removesuffix("\n"))
        assert errors.startswith("error: ")
    if status == 2:
        assert re.search(r"^Error: \S", errors, re.MULTILINE)


def test_wrong_command_lines(place: Path, client: Client) -> None:
    @settings(max_examples=40)
    @given(command_lines())
    def test(line: list[str]) -> None:
        check_command(place, client, line)

    test()


@pytest.mark.slow
def test_more_wrong_command_lines(place: Path, client: Client) -> None:
    @settings(max_examples=10_000, derandomize=False, suppress_health_check=list(HealthCheck))
    @given(command_lines())
    def test(line: list[str]) -> None:
        check_command(place, client, line)

    test()


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("line", "status"),
    [
        ([b"matmul", b"A.zarr", b"B.zarr", b"\xff\xfe/C.zarr", b"--device-memory", b"1"], 1),
        ([b"matmul", b"\xff", b"B.zarr", b"C\n.zarr"], 1),
        ([b"verify", b"A.zarr", b"B.zarr", b"C.zarr", b"--rounds", b"2.5"], 2),
    ],
)
def test_processes_end_as_well(line: list[bytes], status: int, place: Path) -> None:
    before = tree(place)
    command = [os.fsencode(sys.executable), b"-m", b"tilewright", *line]
    done = subprocess.run(command, cwd=place / "here", capture_output=True, timeout=120)
    assert done.returncode == status, done.stderr
    check_streams(done.returncode, done.stdout.decode(), done.stderr.decode(errors="surrogateescape"))
    check_tree(before, place)
