"""Methods of dataclasses, written where they are first called: a short command makes hundreds of such classes, and
calls hardly any of what Python writes for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tilewright.workflows.terminal.ending import is_the_command

Method = Callable[..., Any]


def write_methods_later() -> None:
    """Where this process is the command and nothing else, have ``dataclass`` write no method but ``__init__`` until it
    is called: the others, five of a frozen class, are text that Python compiles, for a tenth of a short command.

    From Python 3.13 on all methods of a class are one text, and stay as they are.
    """
    write: Callable[..., Method] | None = getattr(dataclasses, "_create_fn", None)
    if write is not None and is_the_command():
        setattr(dataclasses, "_create_fn", written_later(write))  # noqa: B010  a name that its stubs have not


def written_later(write: Callable[..., Method]) -> Callable[..., Method]:
    """What makes a method by calling ``write`` once it is called itself, and puts what that makes in its place.

    ``__init__`` is written at once, since a class's documentation shows its parameters.
    """

    def make(name: str, parameters: Sequence[str], body: Sequence[str], **names: Any) -> Method:
        if name == "__init__":
            return write(name, parameters, body, **names)
        written: Method | None = None

        def method(self: Any, *arguments: Any) -> Any:
            nonlocal written
            if written is None:  # two threads at once write the same
                made = write(name, parameters, body, **names)
                made.__qualname__ = method.__qualname__
                for owner in type(self).__mro__:
                    if owner.__dict__.get(name) is method:
                        setattr(owner, name, made)
                written = made
            return written(self, *arguments)

        method.__name__ = name
        return method

    return make
