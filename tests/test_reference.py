"""docs/reference.md names what there is, and nothing else."""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from click.testing import CliRunner

import tilewright as tw
from tilewright import kernels
from tilewright.kernels.histograms.tokens import KINDS
from tilewright.pipeline import events
from tilewright.workflows.cli import cli

PAGE = (Path(__file__).resolve().parent.parent / "docs/reference.md").read_text(encoding="utf-8")
FUNCTIONS = (
    "matmul",
    "gram",
    "cov",
    "corr",
    "eofs",
    "eigh",
    "topk",
    "pairs",
    "plan_matmul",
    "verify",
    "audit",
    "histogram",
    "plan_histogram",
    "duplicates",
    "signals",
    "slice",
    "open_xarray",
    "dot",
    "devices",
    "open_cluster",
)
RESULTS = {
    "MatmulRun": "MatmulRun",
    "MatmulPlan": "MatmulPlan",
    "Verification": "Verification",
    "Audit": "Audit",
    "EofRun": "EofRun",
    "Eofs, the result": "Eofs",
    "Eigenpairs": "Eigenpairs",
    "NeighbourAudit": "NeighbourAudit",
    "NeighbourPlan": "NeighbourPlan",
    "NeighbourCheck": "NeighbourCheck",
    "TopkRun": "TopkRun",
    "PairsRun": "PairsRun",
    "CountPlan": "CountPlan",
    "Histogram, the result": "Histogram",
    "Duplicates, the result": "Duplicates",
    "Signals, the result": "Signals",
    "Device": "Device",
}


def section(title: str) -> str:
    """What stands under a heading, up to the next of its level or above."""
    level, rest = re.search(rf"^(#+) {re.escape(title)}$(.*)", PAGE, re.M | re.S).groups()  # type: ignore[union-attr]
    return re.split(rf"^#{{1,{len(level)}}} ", rest, maxsplit=1, flags=re.M)[0]


def named_in(text: str) -> set[str]:
    """The names in the first column of a section's tables."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def signature_in(text: str, name: str) -> list[tuple[str, str | None]]:
    """The parameters, with their defaults, of the call that the section shows."""
    call = re.search(rf"{name}\((.*?)\)(?:  #| as client|\n)", text, re.S).group(1)  # type: ignore[union-attr]
    parameters = [part.strip() for part in call.split(",") if part.strip() and part.strip() != "*"]
    return [(part.split("=")[0], part.split("=")[1] if "=" in part else None) for part in parameters]


def as_shown(parameter: inspect.Parameter) -> tuple[str, str | None]:
    if parameter.default is inspect.Parameter.empty:
        return parameter.name, None
    shown = "..." if callable(parameter.default) else repr(parameter.default).replace("'", '"')
    return parameter.name, shown


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_are_the_functions_own(name: str) -> None:
    own = [as_shown(each) for each in inspect.signature(getattr(tw, name)).parameters.values()]
    if name == "open_cluster":
        own = [each for each in own if each[0] != "loops"]  # which belongs to the commands
    assert signature_in(section(name), f"tw.{name}") == own


@pytest.mark.parametrize("name", ["matmul", "histogram", "dot"])
def test_signatures_of_kernels_are_their_own(name: str) -> None:
    own = [as_shown(each) for each in inspect.signature(getattr(kernels, name)).parameters.values()]
    assert signature_in(section("Kernels"), f"\n{name}") == own


def test_every_public_name_is_there() -> None:
    missing = [name for name in tw.__all__ if name != "__version__" and not re.search(rf"\b{name}\b", PAGE)]
    assert not missing


def test_kinds_of_histogram_are_those_of_the_kernels() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", section("histogram"), re.M)
    assert {name: int(bins.replace(",", "")) for name, bins in rows} == {
        kind.name: kind.bins for kind in KINDS.values()
    }


def test_help_of_the_package_lists_the_functions() -> None:
    listed = re.findall(r"^    (\w+)  ", tw.__doc__ or "", re.M)
    assert tuple(listed) == FUNCTIONS


@pytest.mark.parametrize("title", RESULTS)
def test_fields_are_those_of_the_result(title: str) -> None:
    result: Any = getattr(tw, RESULTS[title])
    fields = {field.name for field in dataclasses.fields(result)}
    named = named_in(section(title))
    assert fields <= named
    assert all(hasattr(result, name) for name in named - fields)


def test_json_of_the_commands_has_the_fields(tmp_path: Path) -> None:
    zarr.save_array(str(tmp_path / "a.zarr"), np.eye(4))
    zarr.save_array(str(tmp_path / "x.zarr"), np.ones(4))
    text = tmp_path / "a.txt"
    text.write_text("text")
    a, c = str(tmp_path / "a.zarr"), str(tmp_path / "c.zarr")
    x = str(tmp_path / "x.zarr")
    cpu = ["--device", "cpu", "--json", "-q"]
    titles = {
        "MatmulRun": ["matmul", a, a, c, *cpu],
        "MatmulPlan": ["plan", a, a, *cpu],
        "Verification": ["verify", a, a, c, "--json", "-q"],
        "Audit": ["audit", c, "--json", "-q"],
        "EofRun": ["eofs", a, str(tmp_path / "e.zarr"), "-k", "2", *cpu],
        "TopkRun": ["topk", a, str(tmp_path / "n.zarr"), "-k", "2", *cpu],
        "NeighbourAudit": ["audit", str(tmp_path / "n.zarr"), "--json", "-q"],
        "NeighbourPlan": ["topk", a, str(tmp_path / "m.zarr"), "-k", "2", "--plan-only", *cpu],
        "PairsRun": ["pairs", a, str(tmp_path / "p.zarr"), "--above", "1", *cpu],
        "Histogram, the result": ["histogram", str(text), *cpu],
        "CountPlan": ["histogram", str(text), "--plan-only", *cpu],
        "Duplicates, the result": ["duplicates", str(text), "--json", "-q"],
        "Signals, the result": ["signals", str(text), "--json", "-q"],
    }
    for title, arguments in titles.items():
        found = run(arguments)
        if title in ("MatmulPlan", "NeighbourPlan"):
            assert set(found.pop("forecast")) == named_in(section("Forecast"))
        assert set(found) == named_in(section(title)), title
    for title, arguments in {"dot": ["dot", x, x, *cpu], "settings": ["settings", "--json"]}.items():
        row = re.search(rf"^\| `{title}` \|(.*)\|$", section("Other commands"), re.M)
        assert row is not None
        found = run(arguments)
        assert set(found) <= set(re.findall(r"`(\w+)`", row[1])), title
        if title == "settings":
            assert set(found["settings"][0]) <= set(re.findall(r"`(\w+)`", row[1]))


def run(arguments: list[str]) -> Any:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_counts_go_on_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("corpus", "january", "february"):
        Path(folder).mkdir()
        Path(folder, "text").write_text(f"the text of {folder}")
    for name in "xy":
        zarr.save_array(f"{name}.zarr", np.arange(5.0))
    shown = section("Counts that go on")
    (commands,) = re.findall(r"^```bash\n(.*?)^```", shown, re.M | re.S)
    (code,) = re.findall(r"^```python\n(.*?)^```", shown, re.M | re.S)
    results = []
    for line in commands.splitlines():
        arguments = shlex.split(line.partition("  #")[0])
        results.append(CliRunner().invoke(cli, arguments[1:]))
        assert results[-1].exit_code == 0, results[-1].stderr
    assert "1 piece of earlier runs is not counted again" in results[1].stderr
    assert results[-1].stdout == "30.0\n"
    assert {path.name for path in Path("kept").iterdir()} == {"tilewright-counts.jsonl"}
    exec(code, {})


def test_errors_are_those_of_the_package() -> None:
    rows = [
        [cell.strip().strip("`") for cell in line.split("|")[1:4]]
        for line in section("Errors").splitlines()
        if line.startswith("| `")
    ]
    assert {row[0] for row in rows} == {name for name in tw.__all__ if name.endswith("Error")}
    for name, base, built_in in rows:
        error = getattr(tw, name)
        assert not base or getattr(tw, base) in error.__bases__
        assert issubclass(error, getattr(builtins, built_in))
        own = [
            each for each in error.__mro__ if each.__module__ == "builtins" and issubclass(each, Exception)
        ]
        assert own[0].__name__ == built_in


def test_events_are_those_of_the_pipeline() -> None:
    own = {
        each.__name__: {field.name for field in dataclasses.fields(each)}
        for each in vars(events).values()
        if inspect.isclass(each) and dataclasses.is_dataclass(each)
    }
    shown = {}
    for line in section("Events").splitlines():
        if line.startswith("| `"):
            cells = line.split("|")
            shown[cells[1].strip().strip("`")] = set(re.findall(r"`(\w+)`", cells[2]))
    assert shown == own
