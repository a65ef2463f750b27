"""What errors of commands say to do is said in a command's words, and helps."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import click
import numpy as np
import pytest
import zarr
from click.testing import CliRunner

from tilewright.workflows.cli import cli
from tilewright.workflows.commands.spelling import as_options

PYTHONS = re.compile(
    r"(?<![\w./'\"-])(?!scale_factor)[a-z_]+=(?:True|False|None|['\"{\[\d])|\b(?:None|True|False)\b"
    r"|astype|Traceback|not foreseen|\btw\."
)
"""What is written so in Python alone."""


@pytest.fixture
def context() -> click.Context:
    command = click.Command(
        "made",
        params=[
            click.Argument(["x"]),
            click.Option(["--dtype"]),
            click.Option(["-k"]),
            click.Option(["--sum-over"]),
            click.Option(["--missing"]),
            click.Option(["--center"]),
            click.Option(["--window"]),
            click.Option(["--overwrite"], is_flag=True),
            click.Option(["--append"], is_flag=True),
            click.Option(["--no-resume"], is_flag=True),
        ],
    )
    context = click.Context(command)
    context.params = {"x": "sum_over=2/k=3.zarr"}
    return context


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("pass dtype='float64', or convert it", "pass --dtype float64, or convert it"),
        ("a wider dtype (dtype='float64', --dtype float64)", "a wider dtype (--dtype float64)"),
        ("; --dtype int64 (dtype='int64') is safe", "; --dtype int64 is safe"),
        ("ask for floats (dtype='float64', --dtype), or", "ask for floats (--dtype float64), or"),
        ("leave dtype out for int8", "leave --dtype out for int8"),
        ("the dtype of the sums", "the dtype of the sums"),
        ("start over with --no-resume (resume=False)", "start over with --no-resume"),
        ("start over (resume=False)", "start over (--no-resume)"),
        ("nothing is new with resume=True", "nothing is new with no --no-resume"),
        ("sum_over (--sum-over) must say", "--sum-over must say"),
        ("sum_over=['lat', 'lon'] names all", "--sum-over lat,lon names all"),
        ("ask for no more (k, -k)", "ask for no more (-k)"),
        ("name their model (--dtype, dtype)", "name their model (--dtype)"),
        ("nan; missing=math.inf, --missing inf, where", "nan; --missing inf, where"),
        ("k=0: it must be 1 or more", "-k 0: it must be 1 or more"),
        ("missing=-1 and sum_over=None: give both", "--missing -1 and no --sum-over: give both"),
        ("say center={'columns': values}", "say --center columns=values"),
        ("leave window (--window) out, and", "leave --window out, and"),
        ("compute it anew (overwrite=True without append)", "compute it anew (--overwrite without --append)"),
        ("it may be True, False, 'columns'", "it may be 'columns'"),
        ("window: 3 is no range", "--window: 3 is no range"),
        ("output: sum_over=2/k=3.zarr exists", "output: sum_over=2/k=3.zarr exists"),
        ("there is no array at a/k=4/dtype=f4", "there is no array at a/k=4/dtype=f4"),
        ("say precision='full' (--precision full) to matmul", "say --precision full to matmul"),
        ("precision='full' is of another command", "precision='full' is of another command"),
    ],
)
def test_a_functions_words_become_a_commands(context: click.Context, said: str, told: str) -> None:
    assert as_options(said, context) == told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    here, before = tmp_path_factory.mktemp("spelling"), os.getcwd()
    os.chdir(here)
    rng = np.random.default_rng(0)

    def put(name: str, data: np.ndarray, names: Sequence[str] | None = None, **attributes: float) -> None:
        array = zarr.create_array(name, data=data, chunks=data.shape, dimension_names=names)
        array.attrs.update(attributes)

    for dtype in ("int8", "uint8", "int64", "uint64", "float32", "float64", "complex64"):
        put(f"{dtype}.zarr", rng.integers(0, 9, (8, 6)).astype(dtype))
    gaps = rng.normal(size=(8, 6)).astype("f4")
    gaps[1, 2] = np.nan
    put("gaps.zarr", gaps)
    put("filled.zarr", np.nan_to_num(gaps, nan=-9999.0), _FillValue=-9999.0)
    put("dosages.zarr", rng.integers(-1, 3, (8, 6)).astype("i1"))
    put("packed.zarr", rng.integers(-9, 9, (8, 6)).astype("i2"), scale_factor=0.5, _FillValue=-9)
    put("cube.zarr", rng.normal(size=(5, 3, 4)).astype("f4"), ("time", "lat", "lon"))
    put("constant.zarr", np.ones((8, 6), "f4"))
    put("far.zarr", (rng.normal(size=(8, 6)) + 1e15))
    put("six.zarr", np.arange(6.0))
    put("complex.zarr", np.ones(6, "c16"))
    put("old8.zarr", np.zeros((8, 8), "i1"))
    put("oldu.zarr", np.zeros((8, 8), "u8"))
    yield here
    os.chdir(before)


Options: TypeAlias = dict[str, Sequence[str] | None]

MATRICES = (
    *("int8", "uint8", "int64", "uint64", "float32", "float64", "complex64", "gaps", "filled", "dosages", "packed"),
    *("cube", "constant", "far", "none"),
)  # fmt: skip
DTYPES = ("int8", "uint64", "float32", "float64", "complex64", "bfloat16", "M8", "nonsense")
COUNTS = ("1", "0", "-1", "50", "2.5")
NUMBERS = ("2", "0.5", "1j", "nan", "1e30")
VECTORS = ("six.zarr", "complex.zarr", "columns", "lat=cos", "cos")
SHARED: Options = {
    "--precision": ("full", "split", "tf32"),
    "--device": ("cpu", "cuda"),
    "--device-memory": ("1", "8MiB"),
    "--overwrite": None,
}
OF_GRAM: Options = SHARED | {
    "--dtype": DTYPES,
    "--missing": ("-1", "nan", "attributes", "inf", "mean"),
    "--missing-as": ("mean", "pairwise"),
    "--weights": VECTORS,
    "--sum-over": ("time", "lat,lon", "variants"),
    "--add-up": ("lat", "ploidy"),
    "--constant": ("nan", "zero", "error"),
    "--window": COUNTS,
    "--chunks": ("0", "3", "3x2"),
    "--append": None,
}
NEAR = SHARED | {"-k": COUNTS, "--metric": ("cosine", "l2"), "--above": NUMBERS, "--below": NUMBERS}
ODD: dict[str, tuple[tuple[str, ...], Options]] = {
    "matmul": (
        ("M", "M", "O"),
        SHARED
        | {"--dtype": DTYPES, "--alpha": NUMBERS, "--beta": NUMBERS, "--transpose-a": None}
        | {"--rows": ("0:3", "3:99", "a:b"), "--row-scale": VECTORS, "--column-offset": VECTORS},
    ),
    "gram": (("M", "O"), OF_GRAM | {"--center": VECTORS, "--scale": VECTORS, "--divide": ("0", "2pq", "pairs")}),
    "cov": (("M", "O"), OF_GRAM | {"--divide": ("0", "n", "pairs")}),
    "corr": (("M", "O"), OF_GRAM),
    "eofs": (
        ("M", "O"),
        {name: values for name, values in OF_GRAM.items() if name not in ("--append", "--window", "--chunks")}
        | {"-k": COUNTS, "--tol": NUMBERS[3:], "--sample-weights": VECTORS, "--scale": None, "--passes": COUNTS},
    ),
    "topk": (("M", "O"), NEAR | {"--exclude-self": None}),
    "pairs": (("M", "O"), NEAR),
    "verify": (("M", "M", "M"), {"--transpose-a": None, "--rounds": COUNTS}),
    "audit": (("M",), {"--a": [f"{name}.zarr" for name in MATRICES], "--precision": ("split",)}),
    "repair": (("M", "M", "M"), {"--transpose-a": None}),
    "histogram": (
        ("T",),
        dict[str, Sequence[str] | None]()
        | {"--by": ("word", "ngram:99", "letter"), "--casefold": None, "--id-field": ("id",), "--encoding": ("no",)}
        | {"--field": ("text", "id"), "--per-document": None, "--state": ("six.zarr/zarr.json",), "--top": COUNTS},
    ),
    "duplicates": (
        ("T",),
        {"--bands": ("3",), "--rows": ("3",), "--threshold": ("nan", "2"), "--id-field": ("id",), "--null": None},
    ),
}  # fmt: skip
"""Each command, its arguments and options, with what may follow them; None follows a switch."""


def lines(seed: int, count: int) -> Iterator[list[str]]:
    draw = random.Random(seed)
    for _ in range(count):
        command = draw.choice(sorted(ODD))
        arguments, options = ODD[command]
        kinds = {"M": [f"{name}.zarr" for name in MATRICES], "O": ["new.zarr", "old8.zarr", "oldu.zarr"]}
        kinds["T"] = ["six.zarr", "nowhere", "cube.zarr"]
        words = [command, *(draw.choice(kinds[kind]) for kind in arguments)]
        for name in draw.sample(sorted(options), min(len(options), draw.choice((0, 1, 1, 2, 2, 3)))):
            values = options[name]
            words += [name] if values is None else [name, draw.choice(values)]
        yield words


def run(line: Sequence[str]) -> tuple[int, str]:
    found = CliRunner().invoke(cli, list(line), prog_name="tilewright")
    for name in ("new.zarr", "s"):
        shutil.rmtree(name, ignore_errors=True)
    return found.exit_code, found.stderr


def remedies(command: str, error: str) -> Iterator[tuple[str, str | None, bool]]:
    """The options that an error says to give, with their value, or, with True, to leave out."""
    options = {name: each for each in cli.commands[command].params for name in each.opts if name[0] == "-"}
    for name, out, value in re.findall(
        r"(?:pass|use|give|leave|say|ask for|\() ?(--?[a-z-]+)( out\b)?(?: ([\w.]+))?",
        error.partition("; ")[2],
    ):
        option = options[name]  # which names one that there is
        assert isinstance(option, click.Option)
        if out:
            yield name, None, True
        elif option.is_flag:
            yield name, None, False
        elif isinstance(option.type, click.Choice) or value in (*DTYPES, "nan", "attributes"):
            yield name, value, False


def reason(error: str) -> str:
    """Why something is refused, whatever the numbers, names and types."""
    return re.sub(r"\d+|[\w.]+\.zarr|\bu?int\w*|float\w*|complex\w*", "_", error.split("; ")[0])


def changed(line: list[str], command: str, name: str, value: str | None, out: bool) -> list[str]:
    options = {opt: each for each in cli.commands[command].params for opt in each.opts}
    found = list(line)
    for gone in [
        name,
        *(["--append"] if name == "--overwrite" else []),
    ]:  # which are given in each other's place
        if gone in found:
            place = found.index(gone)
            option = options[gone]
            assert isinstance(option, click.Option)
            del found[place : place + (1 if option.is_flag else 2)]
    return found if out else [*found, name, *([] if value is None else [value])]


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_errors_are_in_a_commands_words_and_what_they_say_helps(folder: Path, seed: int) -> None:
    refused, followed = set(), 0
    for line in lines(seed, 250 if seed == 0 else 2000):
        status, error = run(line)
        assert status in (0, 1, 2, 3), line
        unsaid = error
        for word in line:
            unsaid = unsaid.replace(word, "")
        assert not PYTHONS.search(unsaid), (line, error)
        if status != 1:
            continue
        error = error.splitlines()[-1]  # behind notices
        refused.add(reason(error))
        for name, value, out in remedies(line[0], error):
            again, still = run(changed(line, line[0], name, value, out))
            followed += 1
            assert again == 0 or reason(still.splitlines()[-1]) != reason(error), (line, name, value, error)
    assert len(refused) > 30
    assert followed > 10
