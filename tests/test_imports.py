"""Imports run one way: workflows -> pipeline -> kernels, always under the name tilewright, and never in a circle."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

import tilewright
from tilewright.pipeline import errors

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("kernels", "pipeline", "workflows")
"""Each may import from itself and those before it."""
MOST_MODULES = 18
"""In one folder, besides its ``__init__``."""
MOST_LINES = 800
HEAVY = ("dask", "distributed", "numba", "zarr")

Graph = Mapping[str, Iterable[str]]


@functools.cache
def sources() -> dict[str, Path]:
    """The modules of all layers by their names; packages as the names of their folders."""
    found = {}
    for layer in LAYERS:
        # A link, or a folder in the source distribution, which has it there alone.
        for path in sorted((ROOT / "tilewright" / layer).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


@functools.cache
def texts() -> dict[str, str]:
    return {name: path.read_text(encoding="utf-8") for name, path in sources().items()}


@functools.cache
def parsed() -> dict[str, ast.Module]:
    return {name: ast.parse(text, str(sources()[name])) for name, text in texts().items()}


@functools.cache
def graph() -> dict[str, set[str]]:
    return import_graph(parsed())


@functools.cache
def imported_names(tree: ast.Module) -> list[tuple[int, str]]:
    """What is imported, with the line: at the top, inside functions, and for type checkers alone."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names += [
                (node.lineno, module),
                *((node.lineno, f"{module}.{alias.name}") for alias in node.names),
            ]
    return names


def import_graph(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Which of these modules each of them imports, and the packages that those lie in, which are imported first; but
    for the packages that it lies in itself: those are there before it."""
    return {
        name: {
            other
            for _, imported in imported_names(tree)
            for other in (imported, *packages_of(imported))
            if other in trees and other != name and not name.startswith(f"{other}.")
        }
        for name, tree in trees.items()
    }


def packages_of(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def reached_from(graph: Graph, start: str) -> set[str]:
    """All that a module imports, and what that imports, and so on; itself only where that leads back to it."""
    reached: set[str] = set()
    left = list(graph.get(start, ()))
    while left:
        if (name := left.pop()) not in reached:
            reached.add(name)
            left += graph.get(name, ())
    return reached


def in_circles(graph: Graph) -> list[str]:
    """The modules that import themselves by way of others, each with its neighbours on the way."""
    reached = {name: reached_from(graph, name) for name in graph}
    return [
        f"{name} imports {other}, which leads back to it"
        for name in graph
        if name in reached[name]
        for other in sorted(graph[name])
        if name in reached.get(other, ())
    ]


def arrows_up(graph: Graph) -> list[str]:
    def height(name: str) -> int:
        return LAYERS.index(name.split(".")[1])

    return [
        f"{name} imports {other}"
        for name in graph
        for other in sorted(graph[name])
        if height(other) > height(name)
    ]


def misspelt(tree: ast.Module) -> list[str]:
    """Imports of our own modules by another name than theirs: relative, or without ``tilewright``."""
    return [
        f"line {line} imports {name}"
        for line, name in imported_names(tree)
        if name.startswith(".") or name.split(".")[0] in LAYERS
    ]


def look_ups(text: str) -> list[int]:
    """The lines that look for modules in ``sys.modules``, unless it is one of others, named by a constant."""
    if "modules" not in text:
        return []
    tree = ast.parse(text)
    allowed = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and not str(node.slice.value).startswith("tilewright")
    }
    found = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "modules"
        and isinstance(node.value, ast.Name)
        and node.value.id == "sys"
        and id(node) not in allowed
    ]
    return found + [line for line, name in imported_names(tree) if name == "sys.modules"]


def crowded(names: Iterable[str], packages: set[str]) -> list[str]:
    """The folders that hold more than `MOST_MODULES` modules, besides folders."""
    count = Counter(name.rpartition(".")[0] for name in names if name not in packages)
    return [
        f"{folder} holds {modules} modules" for folder, modules in count.items() if modules > MOST_MODULES
    ]


def too_long(sources: Mapping[str, str]) -> list[str]:
    lines = {name: len(text.splitlines()) for name, text in sources.items()}
    return [f"{name} has {count} lines" for name, count in lines.items() if count > MOST_LINES]


def loaded_by(module: str, heavy: Iterable[str] = HEAVY) -> tuple[set[str], set[str]]:
    """The modules of ours that a process has loaded once it has imported one, and which of the heavy ones of others."""
    code = f"import sys, {module}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    names = set(run.stdout.split())
    return {name for name in names if name.split(".")[0] == "tilewright"}, names & set(heavy)


def graph_of(**texts: str) -> dict[str, set[str]]:
    """The graph of made-up modules, whose names have ``__`` for a dot."""
    return import_graph(
        {f"tilewright.{name.replace('__', '.')}": ast.parse(text) for name, text in texts.items()}
    )


def test_imports_run_one_way() -> None:
    assert len(sources()) > 100
    assert not arrows_up(graph())


def test_an_import_of_a_higher_layer_is_found() -> None:
    made_up = graph_of(
        kernels__a="def f():\n    from tilewright.pipeline import b\n",
        pipeline__b="import tilewright.kernels.a\n",
    )
    assert arrows_up(made_up) == ["tilewright.kernels.a imports tilewright.pipeline.b"]


def test_modules_are_imported_by_their_whole_names() -> None:
    wrong = {name: found for name, tree in parsed().items() if (found := misspelt(tree))}
    assert not wrong, "spell it from tilewright.<layer>"


@pytest.mark.parametrize(
    "line", ["from . import a", "from ..kernels import a", "import kernels.a", "from pipeline import b"]
)
def test_other_spellings_are_found(line: str) -> None:
    assert misspelt(ast.parse(line))
    assert not misspelt(
        ast.parse("from tilewright.kernels import a\nimport tilewright.pipeline.b, kernelspec")
    )


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert not in_circles(graph())


def test_a_circle_is_found_inside_functions_too() -> None:
    made_up = graph_of(
        kernels__a="from tilewright.kernels.b import c\n",
        kernels__b="if True:\n    import tilewright.kernels.c\n",
        kernels__c="def f():\n    from tilewright.kernels import a\n",
        kernels__d="from tilewright.kernels import a, b\n",
    )
    assert [line.split()[0] for line in in_circles(made_up)] == [
        f"tilewright.kernels.{name}" for name in "abc"
    ]


def test_a_circle_by_way_of_a_package_is_found() -> None:
    made_up = graph_of(
        kernels__a="import tilewright.kernels.a.b\n",
        kernels__a__b="from tilewright.kernels import c\n",
        kernels__a__d="",
        kernels__c="from tilewright.kernels.a import d\n",
    )
    assert [line.split()[0] for line in in_circles(made_up)] == [
        f"tilewright.kernels.{name}" for name in ("a", "a.b", "c")
    ]


def test_a_package_may_import_what_lies_in_it() -> None:
    made_up = graph_of(
        kernels__a="import tilewright.kernels.a.b\n",
        kernels__a__b="from tilewright.kernels.a import c\n",
        kernels__a__c="",
    )
    assert not in_circles(made_up)


def test_nothing_of_ours_is_looked_for_in_sys_modules() -> None:
    assert not {name: lines for name, text in texts().items() if (lines := look_ups(text))}


@pytest.mark.parametrize(
    "line",
    [
        "sys.modules['tilewright.kernels']",
        "sys.modules[name]",
        "sys.modules.get('tilewright.kernels')",
        "'tilewright.kernels' in sys.modules",
        "from sys import modules",
    ],
)
def test_looking_into_sys_modules_is_found(line: str) -> None:
    assert look_ups(f"import sys\n{line}") == [2]
    assert not look_ups("import sys\nsys.modules['__main__'].modules")


def test_folders_are_not_crowded() -> None:
    packages = {name for name, path in sources().items() if path.name == "__init__.py"}
    assert not crowded(sources(), packages)


def test_a_crowded_folder_is_found() -> None:
    names = [
        "tilewright.kernels",
        "tilewright.kernels.more",
        *(f"tilewright.kernels.a{i}" for i in range(MOST_MODULES)),
    ]
    packages = {"tilewright.kernels", "tilewright.kernels.more"}
    assert not crowded(names, packages)
    assert crowded([*names, "tilewright.kernels.b"], packages) == [
        f"tilewright.kernels holds {MOST_MODULES + 1} modules"
    ]


def test_modules_are_not_too_long() -> None:
    assert not too_long(texts())


def test_a_module_that_is_too_long_is_found() -> None:
    made_up = {"a": "x\n" * MOST_LINES, "b": "x\n" * MOST_LINES + "x"}
    assert too_long(made_up) == [f"b has {MOST_LINES + 1} lines"]


@pytest.mark.parametrize(
    ("module", "most"),
    [
        ("tilewright.pipeline.plan.product", 20),
        ("tilewright.pipeline.errors", 5),
        ("tilewright.kernels.errors", 3),
    ],
)
def test_what_is_pure_loads_little(module: str, most: int) -> None:
    ours, heavy = loaded_by(module)
    assert module in ours
    assert len(ours) <= most, sorted(ours)
    assert not heavy


def test_what_loads_much_is_found() -> None:
    ours, heavy = loaded_by("json.tool, tilewright.kernels.errors", ("json", "numba"))
    assert len(ours) == 3
    assert heavy == {"json"}


@pytest.mark.parametrize("start", ["worker.tasks", "worker.gpu_unit", "transfer.lane", "product.execute"])
def test_products_import_nothing_of_texts(start: str) -> None:
    reached = reached_from(graph(), f"tilewright.pipeline.{start}")
    assert len(reached) > 3
    assert not {name for name in reached if name.startswith("tilewright.pipeline.text")}


def test_what_is_imported_by_way_of_others_is_found() -> None:
    made_up = graph_of(
        kernels__a="import tilewright.kernels.b", kernels__b="import tilewright.kernels.c", kernels__c=""
    )
    assert reached_from(made_up, "tilewright.kernels.a") == {"tilewright.kernels.b", "tilewright.kernels.c"}


def test_every_error_can_be_caught_by_the_name_that_the_package_gives_it() -> None:
    for name in errors.__all__:
        assert getattr(tilewright, name) is getattr(errors, name)
        assert name in tilewright.__all__
