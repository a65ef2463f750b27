"""No argument of a public function is lost where it passes its own on by their names."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tilewright.kernels.arguments import taken_by
from tilewright.workflows import histogram as histograms
from tilewright.workflows.documents import duplicates, signals


def lost(module: ModuleType, function: Callable[..., Any]) -> set[str]:
    """Its parameters that its body names nowhere, nor any function does that takes some by `taken_by`."""
    body = ast.parse(textwrap.dedent(inspect.getsource(function)))
    named = {node.id for node in ast.walk(body) if isinstance(node, ast.Name)}
    takers = [
        node.args[0].id
        for node in ast.walk(body)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "taken_by"
        if isinstance(node.args[0], ast.Name)
    ]
    assert takers
    for taker in takers:
        named |= set(inspect.signature(getattr(module, taker)).parameters)
    return set(inspect.signature(function).parameters) - named


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (histograms, "histogram"),
        (histograms, "plan_histogram"),
        (duplicates, "duplicates"),
        (signals, "signals"),
    ],
)
def test_every_argument_goes_somewhere(module: ModuleType, name: str) -> None:
    assert lost(module, getattr(module, name)) == set()


def test_one_that_goes_nowhere_is_found() -> None:
    def histogram(paths: Any, by: str, forgotten: bool) -> None:
        print(paths, taken_by(_checked, locals()))

    def _checked(by: str) -> None: ...

    source = ModuleType("source")
    source._checked = _checked  # type: ignore[attr-defined]
    assert lost(source, histogram) == {"forgotten"}
