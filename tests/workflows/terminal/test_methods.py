"""Dataclasses whose methods are written when they are called are as all others."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tilewright.workflows.terminal import methods
from tilewright.workflows.terminal.methods import write_methods_later

pytestmark = pytest.mark.skipif(sys.version_info >= (3, 13), reason="methods of a class are one text")


KINDS: list[dict[str, bool]] = [
    {},
    {"frozen": True},
    {"frozen": True, "slots": True},
    {"order": True},
    {"unsafe_hash": True},
    {"eq": False},
    {"kw_only": True, "frozen": True},
]


def made(kind: dict[str, bool]) -> type:
    """A dataclass behind another one, each of this kind."""
    bare = {"__annotations__": {"x": "int", "y": "Any"}, "y": 2, "__module__": __name__}
    point = dataclasses.dataclass(**kind)(type("Point", (), dict(bare)))
    further = type("Further", (point,), {"__annotations__": {"z": "int"}, "z": 3, "__module__": __name__})
    return dataclasses.dataclass(**kind)(further)


def does(kind: type) -> list[Any]:
    """What instances do, twice: when methods are first called, and then."""
    found = [str(inspect.signature(kind)), kind.__doc__]
    for _ in range(2):
        found += done(kind(x=1), kind(x=1), kind(x=1, z=4))
        found += [kind.__repr__.__qualname__, kind.__eq__.__qualname__, kind.__setattr__.__qualname__]
    return found


def done(one: Any, same: Any, other: Any) -> list[Any]:
    acts: list[Callable[[], Any]] = [
        lambda: repr(one).partition(" at 0x")[0],
        lambda: one == same,
        lambda: one == other,
        lambda: one == 1,
        lambda: hash(one) == hash(same),
        lambda: one < other,
        lambda: one >= other,
        lambda: setattr(one, "x", 5),
        lambda: setattr(one, "unknown", 5),
        lambda: delattr(one, "z"),
        lambda: dataclasses.replace(same, x=7).x,
        lambda: setattr(same, "y", same),
        lambda: "..." in repr(same),
    ]
    found = []
    for act in acts:
        try:
            found.append(act())
        except Exception as error:
            found.append((type(error), str(error)))
    return found


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_they_do_the_same(kind: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = does(made(kind))
    monkeypatch.setattr(methods, "is_the_command", lambda: True)
    monkeypatch.setattr(dataclasses, "_create_fn", dataclasses._create_fn)  # type: ignore[attr-defined]
    write_methods_later()
    assert does(made(kind)) == expected


def test_what_was_written_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def write(name: str, *rest: Any, **names: Any) -> Any:
        written.append(name)
        return original(name, *rest, **names)

    original = dataclasses._create_fn  # type: ignore[attr-defined]
    monkeypatch.setattr(dataclasses, "_create_fn", methods.written_later(write))
    kind = made({"frozen": True})
    assert written == ["__init__"] * 2
    first = kind.__eq__
    assert kind(1) == kind(1)
    assert written == ["__init__"] * 2 + ["__eq__"]
    assert kind.__eq__ is not first
    assert kind(1) != kind(2)
    assert len(written) == 3


def test_only_the_command_writes_them_later() -> None:
    look = (
        "import dataclasses, contextlib, tilewright.workflows.cli as cli\nbefore = dataclasses._create_fn\n"
    )
    look += "with contextlib.suppress(SystemExit): cli.main(words=['--version'])\n"
    look += "print(dataclasses._create_fn is before)"
    ran = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "True"
