"""The examples of docstrings say what happens: those of the public functions, and of every module that has some."""

from __future__ import annotations

import doctest
import importlib
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tilewright as tw
from tilewright import kernels

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
ROOT = Path(tw.__file__).parent
WITHOUT = {"repair"}
"""Public functions without an example: it would have to damage a product first."""


def public_functions() -> Iterator[tuple[str, Any]]:
    for package in (tw, kernels):
        for name in package.__all__:
            value = getattr(package, name)
            if inspect.isfunction(value):
                yield f"{package.__name__}.{name}", value


def inner_modules() -> list[str]:
    """Modules with examples beside those of public functions, by the names of their files."""
    public = {inspect.getsourcefile(inspect.unwrap(value)) for _, value in public_functions()}
    found = []
    for layer in ("kernels", "pipeline", "workflows"):
        for path in sorted((ROOT / layer).rglob("*.py")):
            if ">>>" in path.read_text(encoding="utf-8") and str(path) not in public:
                found.append(".".join(("tilewright", *path.relative_to(ROOT).with_suffix("").parts)))
    return found


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder for what examples write; without the notices of runs."""
    monkeypatch.chdir(tmp_path)
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(("name", "function"), list(public_functions()))
def test_examples_of_public_functions(name: str, function: Any) -> None:
    inner = inspect.unwrap(function)
    (found,) = doctest.DocTestFinder(recurse=False).find(inner, name, globs={})
    assert found.examples or name.split(".")[-1] in WITHOUT
    assert not doctest.DocTestRunner(optionflags=FLAGS).run(found).failed


@pytest.mark.parametrize("name", inner_modules())
def test_examples_of_modules(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
    assert found.attempted
    assert not found.failed
