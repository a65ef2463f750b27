"""What errors and notices call options: functions' parameters, which on the command line are options of a command.

Messages are made where the fault is found, which knows no command line: ``dtype='float64'`` is what to pass to a
function, and becomes ``--dtype float64`` here, ``center=False`` ``--no-center``. Where a message has both, one stays.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from tilewright.pipeline.events import Event, Listener

NEGATIVE = "no_"
"""How a switch begins that takes back what a function does by default."""
SAID_OF_OPTIONS = re.compile(
    r"(?P<before>\b(?:leave|pass|add|without|beside)\s+(?:out\s+)?|\(|^)(?P<name>[a-z]+)"
    r"(?:(?P<behind>\s+out)\b|(?=\)|[,;:]|$| is | and | or | where ))"
)
"""Where a plain word may be an option's name: ``leave dtype out``, ``(overwrite)``, or at the beginning."""
PYTHONS = re.compile(r"\bTrue, False, |, or None(?=,)")
"""Values that no option takes: where a switch says so, or a value that a command has by default."""
VALUE = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\{[^{}]*\}|\[[^\[\]]*\]|\([^()]*\)|[^\s,;:()]*[^\s,;:().]"

BOTH = re.compile(rf"(?<![\w./='\"-])(?P<name>[a-z_]+)=(?:{VALUE}) \((?P<said>--[a-z-]+(?: [^\s()]+)?)\)")
"""What a function takes, and behind it the option: of this command, or of another that a message speaks of."""
OPTION = r"--?[a-z][\w-]*(?: (?!or\b|and\b)[^\s,;:()-][^\s,;:()]*)?"
"""An option in a message, and its value, if a word stands behind it."""


def as_options(message: str, ctx: click.Context) -> str:
    """The message with a function's parameters as the options of the running command."""
    spelt = _Spelling(ctx)
    parts = re.split(spelt.given, message) if spelt.given else [message]
    # What the user has typed, as a path, is left as it is: every other part is such a word.
    return "".join(part if place % 2 else spelt.of(part) for place, part in enumerate(parts))


def as_told(listener: Listener) -> Listener:
    """A listener that tells this one notices in the words of the running command."""
    from dataclasses import replace

    from tilewright.pipeline.events import Notice

    running = click.get_current_context(silent=True)

    def told(event: Event) -> None:
        if isinstance(event, Notice) and running is not None:
            event = replace(event, message=as_options(event.message, running))
        listener(event)

    return told


def check_not_empty(ctx: click.Context) -> None:
    """Raise BadParameter for an option with an empty text, as of a shell's variable that is not set: no option has a
    use for one."""
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name or "")
        if isinstance(parameter, click.Option) and (
            value == "" or (isinstance(value, tuple) and "" in value)
        ):
            wanted = parameter.make_metavar(ctx)
            raise click.BadParameter(f"it is empty: give {wanted}, or leave the option out", ctx, parameter)


class _Spelling:
    """The options of one command, by what a function calls them."""

    def __init__(self, ctx: click.Context) -> None:
        self.options: dict[str, str] = {}
        self.negatives: dict[str, str] = {}
        self.switches: set[str] = set()
        for parameter in ctx.command.params:
            if not isinstance(parameter, click.Option) or parameter.name is None:
                continue
            name, spelt = parameter.name, max(parameter.opts, key=len)
            if name.startswith(NEGATIVE):
                self.negatives[name.removeprefix(NEGATIVE)] = spelt
            else:
                self.options[name] = spelt
                if parameter.is_flag:
                    self.switches.add(name)
        names = sorted({*self.options, *self.negatives}, key=len, reverse=True)
        self.assigned = re.compile(rf"(?<![\w./='\"-])({'|'.join(names)})=(?!=)({VALUE})")
        long = "|".join(name for name in names if "_" in name) or r"(?!)"
        self.named = re.compile(rf"(?<![\w./='\"-])({long})(?![\w/='\"-]|\.\w)")
        given = {word for value in ctx.params.values() for word in _words(value) if self._is_said(word)}
        self.given = f"({'|'.join(map(re.escape, sorted(given, key=len, reverse=True)))})" if given else ""

    def _is_said(self, word: str) -> bool:
        return bool(self.assigned.search(word) or self.named.search(word))

    def of(self, message: str) -> str:
        message = BOTH.sub(_of_others, message)
        message = self.assigned.sub(self._assigned, message)
        message = self.named.sub(lambda found: self._name(found[1]), message)
        message = re.sub(r"\b(?P<name>[a-z]+) \((?P<said>--?[a-z-]+)\)", self._explained, message)
        message = re.sub(r"(?<=\()(?P<said>--?[a-z-]+), (?P<name>[a-z]+)(?=\))", self._explained, message)
        message = re.sub(r"\{'(\w+)': '?(\w+)'?\}", r"\1=\2", message)
        message = SAID_OF_OPTIONS.sub(self._plain, PYTHONS.sub("", message))
        message = re.sub(r"\b([a-z]+)(?= (?:and|or) --)", lambda found: self._option(found[1]), message)
        return _once(message)

    def _name(self, name: str) -> str:
        return self.options.get(name) or self.negatives[name]

    def _option(self, word: str) -> str:
        return self.options.get(word, word)

    def _plain(self, found: re.Match[str]) -> str:
        return found["before"] + self._option(found["name"]) + (found["behind"] or "")

    def _explained(self, found: re.Match[str]) -> str:
        return found["said"] if self.options.get(found["name"]) == found["said"] else found[0]

    def _assigned(self, found: re.Match[str]) -> str:
        name, value = found[1], found[2]
        if "/" in value and value[0] not in "'\"":
            return found[0]  # a path
        if value == "None":
            return f"no {self._name(name)}"
        if value in ("True", "False"):
            wanted = value == "True"
            if name in self.negatives:
                return f"no {self.negatives[name]}" if wanted else self.negatives[name]
            if wanted or name in self.switches:
                return self.options[name] if wanted else f"no {self.options[name]}"
        return f"{self._name(name)} {_as_word(value)}"


def _of_others(found: re.Match[str]) -> str:
    same = found["said"].split()[0] == f"--{found['name'].replace('_', '-')}"
    return found["said"] if same else found[0]


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [word for part in value for word in _words(part)]


def _as_word(value: str) -> str:
    """A value as Python shows it, as one word of a command line."""
    if value in ("math.inf", "math.nan"):
        return value.removeprefix("math.")
    if value[0] in "'\"":
        return shlex.quote(value[1:-1]) if value[1:-1] else "''"
    if value[0] == "{":  # {'columns': values}
        return re.sub(r"'?(\w+)'?: ", r"\1=", value[1:-1]).replace("'", "")
    if value[0] == "[":
        return re.sub(r"[\s']", "", value[1:-1])
    if value[0] == "(":
        return re.sub(r"[\s']", "", value[1:-1])
    return value


def _once(message: str) -> str:
    """The message without what it says twice: the function's word and the command's beside each other."""
    message = re.sub(rf"({OPTION}) \(({OPTION})\)", _longer, message)
    return re.sub(rf"({OPTION}), ({OPTION})(?=[,);])", _longer, message)


def _longer(found: re.Match[str]) -> str:
    """Of two that begin alike the one that says more."""
    one, other = sorted((found[1], found[2]), key=len)
    return other if f"{other} ".startswith(f"{one} ") else found[0]
