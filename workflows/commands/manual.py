"""The manual page of the command, ``tilewright.1``, from what the commands say of themselves.

``make man`` writes it to docs/, whence it is installed below ``share/man`` of a virtual environment, where `man` looks
for it as soon as the environment's ``bin`` is on the path. The language is groff's, with the macros of man(7).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from tilewright.workflows.console import BENCHES

STATUSES = {
    "0": "Success.",
    "1": "The work failed; one line on standard error says why.",
    "2": "The command line is wrong.",
    "3": "With --on-error report: some files were left out.",
    "130, 143": "Ctrl-C, or SIGTERM, ended it; one line says what was kept.",
}
FILES = {
    "cluster.yaml": "Profiles, by which --profile says where to run: in the working directory, in"
    " ~/.config/tilewright, in etc/tilewright of the installation, in /etc/tilewright; tilewright profiles"
    " says which are read.",
    "~/.config/dask/*.yaml": "Settings, below tilewright:, beside Dask's own.",
}


def manual(group: click.Group, version: str) -> str:
    """The page of a group of commands."""
    lines = [
        f'.TH TILEWRIGHT 1 "" "tilewright {version}" "User Commands"',
        ".SH NAME",
        f"tilewright \\- {_text(_lowered(_first_line(group)))}",
        ".SH SYNOPSIS",
        ".B tilewright",
        ".I COMMAND",
        "[\\fIOPTIONS\\fR] [\\fIARGUMENTS\\fR]",
        ".SH DESCRIPTION",
        "Every command says what it reads and writes; what it writes gets its name once it is whole.",
        "Results go to standard output, all else to standard error.",
        "The pages of the documentation have more, and examples.",
        ".SH COMMANDS",
    ]
    for name, command in group.commands.items():
        lines += _bench(command) if name == "bench" else _command(command)
    lines += [".SH EXIT STATUS", *_listed(STATUSES), ".SH ENVIRONMENT"]
    lines += _listed(
        {
            "DASK_TILEWRIGHT__NAME": "Sets tilewright.name; tilewright settings lists all settings, with their values.",
            "_TILEWRIGHT_COMPLETE": "bash_source, zsh_source or fish_source: prints what completes the command in that"
            " shell.",
        }
    )
    return "\n".join([*lines, ".SH FILES", *_listed(FILES)]) + "\n"


def _command(command: click.Command) -> list[str]:
    arguments = " ".join(f"\\fI{_text(_argument(one))}\\fR" for one in command.params if _is_argument(one))
    lines = [f".SS {_text(str(command.name))} {arguments}".rstrip(), *_paragraphs(command.help or "")]
    for one in command.params:
        if isinstance(one, click.Option) and not one.hidden:
            lines += [".TP", _names(one), _text(_told(one))]
    return lines


def _bench(command: click.Command) -> list[str]:
    lines = [f".SS {_text(str(command.name))} \\fIBENCHMARK\\fR", *_paragraphs(command.help or "")]
    return [*lines, *_listed({name: f"{told}." for name, told in BENCHES.items()})]


def _is_argument(one: click.Parameter) -> bool:
    return isinstance(one, click.Argument)


def _argument(one: click.Parameter) -> str:
    if one.metavar:
        return one.metavar
    name = str(one.name).upper()
    name = f"{name}..." if one.nargs == -1 else name
    return name if one.required else f"[{name}]"


def _names(one: click.Option) -> str:
    """The names of an option, with what follows them."""
    names = ", ".join(f"\\fB{_text(name)}\\fR" for name in one.opts)
    return names if one.is_flag else f"{names} \\fI{_text(_value(one))}\\fR"


def _value(one: click.Option) -> str:
    if one.metavar:
        return one.metavar
    if isinstance(one.type, click.Choice):
        return "|".join(map(str, one.type.choices))
    return {"integer": "N", "integer range": "N", "float": "X", "float range": "X"}.get(
        one.type.name, one.type.name.upper()
    )


def _told(one: click.Option) -> str:
    more = []
    if isinstance(one.type, click.IntRange | click.FloatRange) and one.type.max is not None:
        more.append(f"up to {one.type.max}")
    if one.show_default and one.default not in (None, False, ()):
        default: Any = one.default
        several = isinstance(default, tuple | list)
        more.append(f"default: {' '.join(map(str, default)) if several else default}")
    if one.multiple:
        more.append("may be repeated")
    return f"{one.help} ({'; '.join(more)})" if more else str(one.help)


def _first_line(command: click.Command) -> str:
    return " ".join((command.help or "").split("\n\n")[0].split())


def _lowered(sentence: str) -> str:
    return (sentence[:1].lower() + sentence[1:]).rstrip(".")


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(text.strip().split("\n\n")):
        if number:
            yield ".PP"
        yield _text(" ".join(paragraph.split()))


def _listed(entries: dict[str, str]) -> Iterable[str]:
    for name, told in entries.items():
        yield from (".TP", f"\\fB{_text(name)}\\fR", _text(told))


def _text(text: str) -> str:
    """A text as groff prints it: hyphens that can be copied, and no line that begins as a request does."""
    text = re.sub(r"([\\-])", lambda found: {"\\": "\\e", "-": "\\-"}[found[1]], text)
    return f"\\&{text}" if text[:1] in (".", "'") else text


if __name__ == "__main__":
    from tilewright import __version__
    from tilewright.workflows.cli import cli

    Path(sys.argv[1]).write_text(manual(cli, __version__), encoding="utf-8")
