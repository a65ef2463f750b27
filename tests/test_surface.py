"""What type checkers are told of the public functions: what they return, and which words a choice has."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import click
import pytest

import tilewright as tw
from tilewright import kernels
from tilewright.kernels import choices
from tilewright.kernels.errors import OptionError
from tilewright.kernels.histograms.token_kinds import any_kind_named
from tilewright.kernels.histograms.tokens import KINDS
from tilewright.workflows.cli import cli


def public() -> dict[str, Any]:
    """All public functions and classes but errors, by name."""
    found = {name: getattr(tw, name) for name in tw.__all__ if name != "__version__"}
    found |= {f"kernels.{name}": getattr(kernels, name) for name in kernels.__all__}
    return {
        name: value
        for name, value in found.items()
        if not (inspect.isclass(value) and issubclass(value, Exception))
    }


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function, method and property."""
    for name, value in public().items():
        if not inspect.isclass(value):
            yield name, value
            continue
        for own, method in vars(value).items():
            if own.startswith("_") and own not in ("__add__", "__sub__", "__str__", "__len__"):
                continue
            method = getattr(method, "__func__", method)
            if isinstance(method, functools.cached_property):
                method = method.func
            elif isinstance(method, property):
                method = method.fget
            if inspect.isfunction(method):
                yield f"{name}.{own}", method


class Terms(NamedTuple):
    """What an annotation consists of, with all aliases followed."""

    names: frozenset[str] = frozenset()
    """Such as ``Any``, ``str`` or ``np.ndarray``."""
    words: frozenset[str] = frozenset()
    """Of its literals."""


def together(parts: Iterable[Terms]) -> Terms:
    found = list(parts)
    return Terms(
        frozenset(name for one in found for name in one.names),
        frozenset(word for one in found for word in one.words),
    )


@functools.cache
def aliases() -> dict[str, ast.expr]:
    """What every alias of types stands for that our modules have: they say so by ``TypeAlias``."""
    assert public(), "imported by now"
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("tilewright.") and module.__file__ is not None:
            for node in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body:
                if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
                    assert node.value is not None
                    found[ast.unparse(node.target)] = node.value
    return found


def terms(annotation: str | ast.expr) -> Terms:
    """What an annotation of ours consists of. NumPy's parameters, which stand for any precision and any shape, are left
    out."""
    node = ast.parse(annotation, mode="eval").body if isinstance(annotation, str) else annotation
    if isinstance(node, ast.Subscript):
        name = ast.unparse(node.value)
        if name == "Literal":
            listed = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return Terms(words=frozenset(str(ast.literal_eval(each)) for each in listed))
        own = terms(node.value)
        return own if name.startswith("np.") else together([own, terms(node.slice)])
    if isinstance(node, ast.Constant):
        return terms(node.value) if isinstance(node.value, str) else Terms(frozenset({str(node.value)}))
    if isinstance(node, ast.Name | ast.Attribute):
        name = ast.unparse(node)
        return terms(aliases()[name]) if name in aliases() else Terms(frozenset({name}))
    return together(terms(each) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr))


def annotations_of(value: Any) -> dict[str, str]:
    """The annotations of a function, a class or a TypedDict, as they are written; a class's with those above it."""
    found: dict[str, Any] = {}
    for one in reversed(value.__mro__) if inspect.isclass(value) else [inspect.unwrap(value)]:
        found |= inspect.get_annotations(one)
    return {name: getattr(written, "__forward_arg__", written) for name, written in found.items()}


def options_of(overload: Callable[..., Any]) -> dict[str, str]:
    """What an overload takes by name, of the TypedDict that it names."""
    named = annotations_of(overload)["options"].removeprefix("Unpack[").removesuffix("]")
    return annotations_of(vars(sys.modules[overload.__module__])[named])


@pytest.mark.parametrize(("name", "function"), list(functions()))
def test_no_public_function_returns_any(name: str, function: Callable[..., Any]) -> None:
    for one in typing.get_overloads(function) or [function]:
        assert "return" in annotations_of(one), f"{name} does not say what it returns"
        assert "Any" not in terms(annotations_of(one)["return"]).names


@pytest.mark.parametrize(
    "name", [name for name, value in public().items() if dataclasses.is_dataclass(value)]
)
def test_no_public_field_is_any(name: str) -> None:
    written = annotations_of(public()[name])
    fields = dataclasses.fields(public()[name])
    assert [one.name for one in fields if "Any" in terms(written[one.name]).names] == []


UNITS = ("", ":word", ":character", ":byte")
CHOICES = {
    "by": (*KINDS, "word", "line", *(f"ngram:{n}{unit}" for n in range(2, 6) for unit in UNITS)),
    "divide": choices.DIVISORS,
}
"""Choices that are no ``click.Choice`` of a command."""


def choices_of_commands() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """The command, the parameter and the words of every choice that a public function of the command's name has."""
    for command in cli.commands.values():
        function = public().get(str(command.name))
        for option in command.params if function is not None else []:
            name = str(option.name)
            if name in inspect.signature(function).parameters:
                words = CHOICES.get(name)
                if isinstance(option.type, click.Choice):
                    words = tuple(option.type.choices)
                if words is not None:
                    yield str(command.name), name, words


@pytest.mark.parametrize(("command", "parameter", "words"), list(choices_of_commands()))
def test_choices_of_a_command_are_the_functions_own(
    command: str, parameter: str, words: tuple[str, ...]
) -> None:
    found = terms(annotations_of(public()[command])[parameter])
    assert found.words == set(words)
    assert "str" not in found.names


def test_overloads_take_what_their_function_takes() -> None:
    """By the same names, and of the same types."""
    seen = 0
    for name, function in public().items():
        if inspect.isclass(function):
            continue
        own = annotations_of(function)
        for one in typing.get_overloads(function):
            options = options_of(one)
            assert set(own) - set(annotations_of(one)) - set(options) <= {"out"}, name
            assert set(options) <= set(own)
            if not name.startswith("kernels."):
                assert options == {each: own[each] for each in options}, name
            seen += 1
    assert seen > 10


def test_names_of_kinds_are_those_that_are_known() -> None:
    assert set(get_args(choices.KindName)) == set(KINDS)
    for name in get_args(choices.TokenName):
        assert any_kind_named(name).name == name.removesuffix(":word")
    for name in ("ngram:1", "ngram:6", "ngram:2:line"):
        with pytest.raises(OptionError):
            any_kind_named(name)


def test_the_walk_follows_aliases() -> None:
    assert terms("Cluster").names >= {"str", "Client"}
    assert terms("dict[str, list[Any]]").names == {"dict", "str", "list", "Any"}
    assert terms("np.number[Any] | None").names == {"np.number", "None"}
    assert terms("Literal['a', 'b'] | Divisor") == Terms(
        frozenset(), frozenset({"a", "b", *choices.DIVISORS})
    )
