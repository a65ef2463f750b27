"""What shells complete behind arguments and options, and which word was meant where one is misspelt.

click completes the names of commands, options and choices by itself, and nothing where it knows no more than that a
text follows, not even paths. So each `Command` gives its parameters, by `with_completions`, types that do: paths by the
shell's own completion, and names of profiles, settings, codecs and so on. What is looked up here is looked up while
somebody waits for it: errors complete nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import click
from click.shell_completion import CompletionItem

from tilewright.kernels.choices import CODECS
from tilewright.kernels.words import did_you_mean

FILES = ("FILE", "PATH", "ARRAY", "[AXIS=]ARRAY", "CODE", "COUNTS")
"""What may be a file, or a folder, behind an option."""
FOLDERS = ("DIR", "FOLDER")
SIDES = ("columns", "rows", "both")
DTYPES = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)

Words = Callable[[click.Context], Iterable[str]]


class Text(click.types.StringParamType):
    """A text, behind which shells complete words, paths, or both."""

    def __init__(self, *words: str, paths: str = "", found: Words | None = None) -> None:
        """paths: ``file`` or ``dir``, where it may be one. found: what gives more words."""
        self.words, self.paths, self.found = words, paths, found

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        words = list(self.words)
        with suppress(Exception):  # a file that is not there, or is none
            words += self.found(ctx) if self.found is not None else ()
        # Bash forgets the words that come before a path.
        paths = [CompletionItem(incomplete, type=self.paths)] if self.paths else []
        return paths + [CompletionItem(word) for word in words if word.startswith(incomplete)]


class Choice(click.Choice):
    """click's, which says what was meant."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            hint = did_you_mean(value, map(str, self.choices))
            raise click.BadParameter(error.message.rstrip(".") + hint, ctx, param) from None


def profiles(ctx: click.Context) -> Iterable[str]:
    """The names of all profiles, with those of the file that the command line names so far."""
    from tilewright.pipeline.cluster.profiles import load_profiles

    return load_profiles(ctx.params.get("cluster_file"))


def settings(ctx: click.Context) -> Iterable[str]:
    from tilewright.pipeline.config import SETTINGS

    return [setting.name for setting in SETTINGS]


def jobs(ctx: click.Context) -> Iterable[str]:
    """The numbers of batch jobs, the newest first."""
    from tilewright.workflows.batch.folder import job_folders

    numbers = []
    for folder in job_folders():
        with suppress(Exception):  # of another release, or just being written
            numbers.append(folder.submitted().job or "")
    return filter(None, reversed(numbers))


def usual_jobs(ctx: click.Context) -> Iterable[str]:
    """The jobs whose kernels can be compiled before they are used."""
    from tilewright.workflows.kernels.usual import usual_jobs as all_of_them

    return [job.name for job in all_of_them()]


def capabilities(ctx: click.Context) -> Iterable[str]:
    """Compute capabilities for which kernels can be compiled, and what stands for all of them."""
    from tilewright.workflows.kernels.making import named
    from tilewright.workflows.kernels.report import ALL
    from tilewright.workflows.kernels.usual import GPUS

    return [*map(named, GPUS), ALL]


PROFILE, SETTING, JOB = Text(found=profiles), Text(found=settings), Text(found=jobs)
CLUSTER = Text(paths="dir", found=lambda ctx: (*profiles(ctx), *jobs(ctx)))
"""One that runs: a profile, a batch job, or its folder."""


def with_completions(parameters: Iterable[click.Parameter]) -> list[click.Parameter]:
    """Parameters of a command, each of a type that shells complete; those that have one of their own keep it."""
    found = list(parameters)
    for parameter in found:
        if isinstance(parameter.type, click.Choice) and not isinstance(parameter.type, Choice):
            parameter.type = Choice(parameter.type.choices, parameter.type.case_sensitive)
        elif parameter.type is click.STRING:
            parameter.type = _type_of(parameter)
    return found


def _type_of(parameter: click.Parameter) -> click.ParamType:
    """The type of a parameter that is a text, by its name or by what its help calls it."""
    if isinstance(parameter, click.Argument):
        return Text(paths="file")
    if parameter.name in _NAMED:
        return _NAMED[str(parameter.name)]
    if parameter.metavar in FILES or parameter.metavar in FOLDERS:
        return Text(paths="dir" if parameter.metavar in FOLDERS else "file")
    return click.STRING


_NAMED = {
    "capability": Text(found=capabilities),
    "job": Text(found=usual_jobs),
    "a": Text(paths="file"),
    "b": Text(paths="file"),
    "cluster": PROFILE,
    "dtype": Text(*DTYPES),
    "codec": Text(*CODECS),
    "center": Text(*SIDES, paths="file"),
    "scale": Text(*SIDES[:2], paths="file"),
    "divide": Text("n", "n-1", "pairs"),
    "missing": Text("nan", paths="file"),
    "encoding": Text("utf-8", "utf-16", "utf-32", "latin-1", "cp1252", "ascii"),
}


def misspelt_option(command: click.Command, given: str, ctx: click.Context) -> click.NoSuchOption:
    """The error for an option that a command does not have. Options are also known by the names that their arguments
    have in Python."""
    by_name = {
        f"--{str(one.name).replace('_', '-')}": one.opts[0]
        for one in command.params
        if isinstance(one, click.Option)
    }
    if given in by_name:
        return click.NoSuchOption(given, f"No such option {given!r}; it is {by_name[given]!r} here", ctx=ctx)
    known = [name for one in command.params if isinstance(one, click.Option) for name in one.opts]
    return click.NoSuchOption(given, f"No such option {given!r}{did_you_mean(given, known)}", ctx=ctx)
