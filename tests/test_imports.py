"""Imports run one way: workflows -> pipeline -> kernels, always under the name tilewright."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tilewright
from tilewright.pipeline import errors

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {
    "kernels": {"kernels"},
    "pipeline": {"kernels", "pipeline"},
    "workflows": {"kernels", "pipeline", "workflows"},
}


def imported_names(path: Path) -> list[tuple[int, str]]:
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            names += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append((node.lineno, "." * node.level + (node.module or "")))
    return names


@pytest.mark.parametrize("layer", sorted(ALLOWED))
def test_imports_run_one_way(layer: str) -> None:
    # A link, or a folder in the source distribution, which has it there alone.
    files = sorted((ROOT / "tilewright" / layer).rglob("*.py"))
    assert files, f"no source found under {layer}"
    wrong = []
    for path in files:
        for line, name in imported_names(path):
            where = f"{path.relative_to(ROOT)}:{line} imports {name}"
            if name.startswith("."):
                wrong.append(f"{where}; spell it from tilewright.{layer}")
            elif name.split(".")[0] in ALLOWED:
                wrong.append(f"{where}; spell it tilewright.{name}")
            elif name.startswith("tilewright."):
                other = name.split(".")[1]
                if other in ALLOWED and other not in ALLOWED[layer]:
                    wrong.append(f"{where}; {layer} may import only {', '.join(sorted(ALLOWED[layer]))}")
    assert not wrong, "\n".join(wrong)


def test_every_error_can_be_caught_by_the_name_that_the_package_gives_it() -> None:
    for name in errors.__all__:
        assert getattr(tilewright, name) is getattr(errors, name)
        assert name in tilewright.__all__
