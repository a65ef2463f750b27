"""What every command shares: how it fails, how it is interrupted, and what reaches the terminal.

Results go to standard output and everything else to standard error. A failure is one line and exit status 1,
a usage error is click's and 2, Ctrl-C is 130 and SIGTERM 143. This lives in the command class, not in ``main``, so that
``dask tilewright ...`` behaves like ``tilewright ...``. Nothing here imports more than click before it must:
``tilewright --help`` is to answer at once. So the types of options that click does not have, at the end, import what
they need when a value is given; the help of a histogram, which lists the kinds, waits for NumPy.
"""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Any, NoReturn

import click

from tilewright.kernels.choices import (
    HASHES,
    KINDS_OF_HISTOGRAM,
    ON_ERROR,
    PAIRS,
    PASSAGES,
    SCHEMES,
)
from tilewright.kernels.words import did_you_mean, in_one_line
from tilewright.pipeline.cluster.endings import request_end
from tilewright.workflows.commands.completion import Text, misspelt_option, with_completions
from tilewright.workflows.commands.spelling import as_options, as_told, check_not_empty
from tilewright.workflows.terminal.compilations import tell_compilations

if TYPE_CHECKING:
    from tilewright.pipeline.events import Event, Listener

INTERRUPTED_STATUS, TERMINATED_STATUS = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""What shells report for a process that Ctrl-C ended, and for one that it was asked to end."""
NOISY_LOGGERS = (
    "distributed",
    "distributed.client",
    "bokeh",
    "tornado",
    "tornado.application",
    "asyncio",
    "matplotlib",
)
"""Those that Dask's own defaults give a level are named each: what is above them does not reach them."""
EXIT_SECONDS = 3
"""How long Python's own end may take behind a signal: it waits for every thread that reads or writes, and one whose
storage does not answer never ends."""
_DEBUG = "tilewright.debug"
_QUIET = "tilewright.quiet"
_KEPT = "tilewright.kept"


BENCHES = {
    "gemm": "the matrix product on one device, against the vendor's library",
    "histogram": "histograms on one device, against other libraries",
    "dot": "the dot product on one device, against the vendor's library",
    "io": "reading and writing Zarr arrays, against zarr-python",
    "e2e": "the whole product from Zarr to Zarr, against dask.array",
    "control": "handing out and recording tiles on hundreds of simulated workers",
    "corpus": "counting text files on a cluster, against dask.delayed with bincount",
    "neighbours": "nearest neighbours, against NumPy, faiss and PyTorch",
    "start": "a short product as a whole process, against a script of zarr and NumPy",
}
"""Each is ``workflows/bench/<name>.py`` with a click command called ``command``."""


class Failed(click.ClickException):
    """The work failed: one line on standard error, exit status 1."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error: {self.message}", file=file, err=file is None)


class Interrupted(click.ClickException):
    """Ctrl-C: one line that says what was kept, exit status 130."""

    exit_code = INTERRUPTED_STATUS
    word = "interrupted"

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"{self.word}: {self.message}", file=file, err=file is None)
        ending = threading.Event()
        exiting = threading.Thread(
            target=_exit, args=(self.exit_code, ending), name="end of Python", daemon=True
        )
        exiting.start()
        # Called before threads of pools are waited for, since pools use the same: `atexit` comes behind that.
        threading._register_atexit(ending.set)  # type: ignore[attr-defined]


def _exit(status: int, ending: threading.Event) -> None:
    """End this process if Python has not, in time, once it has begun to."""
    ending.wait()
    time.sleep(EXIT_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or its reader is gone
            stream.flush()
    os._exit(status)


class Terminated(Interrupted):
    """SIGTERM, by which a batch system ends a job: the same, exit status 143."""

    exit_code = TERMINATED_STATUS
    word = "terminated"


class Termination(KeyboardInterrupt):
    """What SIGTERM raises, for whatever cleans up behind Ctrl-C to do so behind it too."""


class Command(click.Command):
    """A command whose failures are told in one line; with ``--debug``, by a traceback."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.params = [  # a list of its own: a benchmark's is that of its module, which may be asked for again
            *with_completions(self.params),
            click.Option(["--quiet", "-q"], is_flag=True, expose_value=False, callback=_remember(_QUIET),
                         help="No progress and no notices, only the result."),
            click.Option(["--debug"], is_flag=True, expose_value=False, callback=_remember(_DEBUG),
                         help="Tracebacks, and what the libraries have to say."),
        ]  # fmt: skip

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            left = super().parse_args(ctx, args)
            if not ctx.resilient_parsing:  # of a line that is being completed
                check_not_empty(ctx)
            return left
        except click.NoSuchOption as error:
            raise misspelt_option(self, error.option_name, ctx) from None
        except click.BadParameter as error:
            if type(error) is not click.BadParameter:
                raise
            raise click.BadParameter(as_options(error.message, ctx), ctx, error.param) from None

    def invoke(self, ctx: click.Context) -> Any:
        debug = ctx.meta.get(_DEBUG, False)
        try:
            with interruptible():
                if debug:
                    import logging

                    # Dask tells of tasks that fail, too, where this is so.
                    logging.getLogger("tilewright").setLevel(logging.DEBUG)
                else:
                    silence_libraries()
                result = self.work(ctx)
            if not ctx.meta.get(_QUIET, False):
                tell_compilations()
            return result
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if debug or (isinstance(error, OSError) and error.errno == errno.EPIPE):
                raise
            _fail(error, ctx)

    def work(self, ctx: click.Context) -> Any:
        """What the command does."""
        return super().invoke(ctx)


class Group(click.Group):
    """Commands in the order in which they were added, each telling its failures in one line."""

    command_class = Command

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        with interruptible(), printing():  # of --help and --version
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        # A command's module is imported, and its --help printed, before it can report failures itself.
        with interruptible(), printing():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-") and not ctx.resilient_parsing:
            raise click.UsageError(
                f"No such command {name!r}{did_you_mean(name, self.list_commands(ctx))}", ctx
            )
        return super().resolve_command(ctx, args)


class Benches(Group):
    """Loads a benchmark's module when it is called, and lists those that are there.

    They are plain click commands; here they get the class that tells failures in one line.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        from importlib.util import find_spec

        if find_spec("tilewright.workflows.bench") is None:
            return []
        return [name for name in BENCHES if find_spec(f"tilewright.workflows.bench.{name}") is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        from importlib import import_module

        found: click.Command = import_module(f"tilewright.workflows.bench.{cmd_name}").command
        return Command(name=cmd_name, params=found.params, callback=found.callback, help=found.help)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, BENCHES[name]) for name in self.list_commands(ctx)]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C in this block is one line and its exit status, not click's ``Aborted!`` and 1, and so is SIGTERM.

    The line says what `on_interrupt` was given to say.
    """
    try:
        with _terminable():
            yield
    except KeyboardInterrupt as interrupt:
        raise _stopped(interrupt) from interrupt
    except RuntimeError as error:
        # What Python 3.11 makes of an interrupt in the middle of a class that is being defined.
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        raise _stopped(error.__cause__) from error


def _stopped(interrupt: KeyboardInterrupt) -> Interrupted:
    context = click.get_current_context(silent=True)
    kept = context.meta.get(_KEPT) if context is not None else None
    kind = Terminated if isinstance(interrupt, Termination) else Interrupted
    return kind(kept() if kept is not None else "nothing was written")


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM in this block raises `Termination`, unless somebody has other plans for it; the first one only once what
    is nearly done is finished, where work can be drained."""

    def terminate(number: int, frame: Any) -> None:
        ending = Termination()
        if not request_end(ending):
            raise ending

    free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not free or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def on_interrupt(kept: Callable[[], str]) -> None:
    """From now on Ctrl-C says what ``kept`` gives then: what of the running command's work is finished, and where."""
    click.get_current_context().meta[_KEPT] = kept


class Outputs:
    """What a command is to write at its end, in order, and how much of that has its name by now.

    A finished output is told from one that it replaces by being another file or folder: both were there at once.
    """

    def __init__(self, *paths: Path) -> None:
        self._before = {path: _identity(path) for path in paths}

    def finished(self) -> list[Path]:
        return [path for path, before in self._before.items() if _identity(path) not in (None, before)]

    def kept(self) -> str:
        """What Ctrl-C is to say of them."""
        finished = self.finished()
        missing = [path for path in self._before if path not in finished]
        if finished:
            said = f"{_listed(finished)} finished"
            said += f", {_listed(missing)} not written" if missing else "; only the report may be missing"
        else:
            said = "nothing was written"
        # A large array that was replaced takes a while to be removed, and nobody else will.
        replaced = [old for path in finished for old in _replaced_by(path)]
        return f"{said}; what was replaced is left in {_named(replaced)}: remove it" if replaced else said


def _replaced_by(path: Path) -> list[Path]:
    """What an output was to replace and what is still there; only an array, a folder, sets anything aside."""
    if not path.is_dir():
        return []
    from tilewright.pipeline.product.output import set_aside

    return set_aside(path)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _named(paths: list[Path]) -> str:
    return " and ".join(map(str, paths))


def _listed(paths: list[Path]) -> str:
    return f"{_named(paths)} {'is' if len(paths) == 1 else 'are'}"


@contextmanager
def printing() -> Iterator[None]:
    """An error of the system in this block, which only prints, is told as one of standard output.

    A reader that went away (``| head``) is none: click leaves quietly then.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        raise Failed(f"cannot write the result to standard output: {error.strerror or error}") from error
    except click.exceptions.Exit as ended:  # behind --help
        if ended.exit_code or sys.stdout is not None:
            raise
    if sys.stdout is None:  # what prints then does nothing
        raise Failed("cannot write the result to standard output: it is closed")


def _remember(key: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    def callback(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
        ctx.meta[key] = value

    return callback


def _fail(error: Exception, ctx: click.Context) -> NoReturn:
    from tilewright.kernels.errors import TilewrightError

    message = in_one_line(str(error))
    if isinstance(error, TilewrightError):
        message = as_options(message, ctx)
    else:
        message = f"{type(error).__name__}: {message} (not foreseen; --debug shows where)"
    raise Failed(message) from error


def is_quiet() -> bool:
    """Whether the running command was asked to be quiet."""
    return bool(click.get_current_context().meta.get(_QUIET, False))


@contextmanager
def listening(*, quiet: bool = False) -> Iterator[Listener]:
    """A listener that shows what happens on standard error for as long as the block runs: by a live display on a
    terminal, by a few plain lines anywhere else."""
    if quiet or sys.stderr is None:  # None: closed by whoever started this process
        yield _quiet
    elif sys.stderr.isatty():
        from tilewright.workflows.terminal.display import displaying

        with displaying() as listener:
            yield as_told(listener)
    else:
        from tilewright.workflows.terminal.progress import Lines

        yield as_told(Lines())


def _quiet(event: Event) -> None:
    """Ignores all events: `events.log_notices` would log some, and Python prints what is logged where no handler takes
    it."""


def import_dask() -> None:
    """Import Dask, which reads its configuration then. Raises Failed for one that it cannot read."""
    try:
        import dask  # noqa: F401
    except ValueError as error:  # which names the file
        raise Failed(in_one_line(str(error))) from error


def silence_libraries() -> None:
    """Keep the libraries' own logs off the terminal, here and in worker processes that are started from here.

    What a user has to know comes as an event or an error; a cluster that is shut down in the middle of work
    logs pages beyond that. Worker processes read the levels from the environment when they import Dask.
    """
    import logging

    import_dask()
    import dask

    # As one mapping, since a name's own dot would begin another level of it.
    levels = dask.config.get("logging", {}) | dict.fromkeys(NOISY_LOGGERS, "critical")
    dask.config.set({"logging": levels})
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
        if "." not in name:
            os.environ[f"DASK_LOGGING__{name.upper()}"] = "critical"
    warnings.simplefilter("ignore")


def print_result(result: Any, *, as_json: bool, words: str | None = None) -> None:
    """Print a result that has ``to_json()`` as text, or as one JSON object: piece by piece if it has
    ``json_pieces()``, as one that may be as large as memory does. words: the text, where it is not ``str(result)``."""
    with printing():  # what lays out tables writes there too, if only an empty text
        if as_json and hasattr(result, "json_pieces"):
            for piece in result.json_pieces():
                click.echo(piece, nl=False)
            click.echo()
            return
        text = to_json_text(result.to_json()) if as_json else str(result) if words is None else words
        try:
            click.echo(text)
        except UnicodeEncodeError as error:
            # Bars and multiplication signs, or a file's name, that this output has no bytes for: nothing is out yet.
            click.echo(text.encode(error.encoding, "replace").decode(error.encoding))


def print_plan(
    plan: Any,
    a: Any,
    out: Any,
    *,
    as_json: bool,
    precision: str,
    cluster: Any = None,
    workers: int = 1,
    named: Any = None,
    verify: bool = True,
    **others: Any,
) -> None:
    """Print a plan, behind what is expected of it in the user's words: how long, how much disk, what limits it, whether
    it fits. named: what the options say of its workers, as `elsewhere` has it. The others are what else was asked
    for."""
    from tilewright.pipeline.forecast.foresee import foresee

    if named is not None and named.cluster is not None:
        cluster = (
            named.cluster
        )  # a job's plan is made in this process, and its workers are not this machine's
    foreseen = foresee(
        plan,
        a,
        out,
        precision=precision,
        cluster=cluster,
        machines=workers,
        hardware=None if named is None else named.hardware,
        verify=verify,
    )
    print_result(foreseen, as_json=as_json)


def print_names(lines: Callable[[], Iterable[str]], *, null: bool) -> None:
    """Print what begins anew with each call, names of files or of what is in them, as the bytes that they are: one a
    line, or each ended by a NUL, which no name has. Raises Failed, with nothing printed, where one would be two lines:
    what reads them would take each for a name."""
    broken = None if null else next((line for line in lines() if "\n" in line or "\r" in line), None)
    if broken is not None:
        raise Failed(
            f"a name has a line break in it, {broken!r}, so that names cannot be printed one a line: give --null (-0),"
            " which ends each by a NUL, as xargs -0 reads them"
        )
    with printing():
        for line in lines():
            click.echo(os.fsencode(line) + (b"\0" if null else b"\n"), nl=False)


def to_json_text(value: dict[str, Any]) -> str:
    """The object as strict JSON: NaN and infinities, which JSON has no numbers for, become strings."""
    from tilewright.pipeline.strict_json import strict

    return json.dumps(strict(value), allow_nan=False)


class Size(click.ParamType):
    """Bytes, as a number or with a unit."""

    name = "size"

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        import_dask()
        from tilewright.pipeline.config import as_nbytes
        from tilewright.pipeline.errors import OptionError

        try:
            nbytes = as_nbytes(value, self.name)
        except OptionError as error:
            self.fail(str(error).removeprefix(f"{self.name}: "), param, ctx)
        if nbytes < self.least:
            self.fail(f"{value!r} is {nbytes} bytes; it must be {self.least} or more", param, ctx)
        return nbytes


class Number(click.ParamType):
    """A whole number, a fraction, or a complex number such as 1-2j."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        for kind in (int, float, complex):
            try:
                return kind(value)
            except (TypeError, ValueError):
                continue
        return self.fail(f"{value!r} is no number", param, ctx)


class Rate(click.ParamType):
    """Operations a second, as a number or with K, M, G, T or P behind it."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = str(value).strip().removesuffix("op/s").strip()
        unit = text[-1:].upper()
        times = 1000.0 ** (1 + "KMGTP".index(unit)) if unit and unit in "KMGTP" else 1.0
        try:
            rate = float(text[:-1] if times > 1 else text) * times
        except ValueError:
            return self.fail(f"{value!r} is no rate; give operations a second, such as 50T", param, ctx)
        if not 0 < rate < math.inf:
            self.fail(f"{value!r}: a worker does some operations a second, and finitely many", param, ctx)
        return rate


class FileName(Text):
    """The name of a file whose ending says its format."""

    name = "file"

    def __init__(self, *endings: str) -> None:
        super().__init__(paths="file")
        self.endings = endings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        suffix = PurePath(value).suffix
        if suffix not in self.endings:
            found = f"ends in {suffix!r}" if suffix else "has no ending"
            allowed = " or ".join(self.endings)
            self.fail(f"{value!r} {found}; the ending says the format and is {allowed}", param, ctx)
        return str(value)


BARS = ("counts", "percent", "probability")
MAPS = ("documents", "tokens")
PLOT_ENDINGS = (".png", ".svg", ".pdf")

plot_options = (
    click.option(
        "--plot",
        type=FileName(*PLOT_ENDINGS),
        metavar="FILE",
        help="Draw the counts into F.png, F.svg or F.pdf.",
    ),
    click.option(
        "--bars", type=click.Choice(BARS), default="counts", show_default=True, help="What the plot shows."
    ),
    click.option("--log", is_flag=True, help="Draw the plot by a logarithmic scale."),
    click.option(
        "--heat-map",
        type=click.Choice(MAPS),
        help="Plot how similar documents are to each other, or what tokens each has; with --per-document.",
    ),
)


def check_plot_options(plot: str | None, heat_map: str | None, *, per_document: bool) -> None:
    """Raise UsageError where something is said of a plot that is not drawn, or cannot be."""
    context = click.get_current_context()
    for name in ("bars", "log", "heat_map"):
        given = context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
        option = "--" + name.replace("_", "-")
        if given and plot is None:
            raise click.UsageError(
                f"{option} says what --plot shows: give --plot FILE too, or leave {option} out"
            )
        if given and name == "bars" and heat_map is not None:
            raise click.UsageError("--bars and --heat-map exclude each other: a heat map has no bars")
    if heat_map is not None and not per_document:
        raise click.UsageError("--heat-map shows documents: give --per-document too, or leave --heat-map out")


class Kinds(Text):
    """The kinds of histogram, as the kernels list them."""

    name = "kind"

    def __init__(self) -> None:
        super().__init__(*KINDS_OF_HISTOGRAM)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        from tilewright.kernels.histograms.tokens import KINDS

        return f"[{'|'.join(KINDS)}|word|line|ngram:N[:character|:byte]]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from tilewright.kernels.errors import OptionError
        from tilewright.kernels.histograms.token_kinds import any_kind_named

        try:
            return any_kind_named(value).name
        except OptionError as error:
            self.fail(str(error), param, ctx)


SIDES = ("columns", "rows")
VARIABLES = "variables"
"""What --center and --scale mean alone."""


def as_number(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    """The number that a text is, or the text."""
    for read in (int, float):
        try:
            return read(value) if value is not None else None
        except ValueError:
            continue
    return value


def as_sides(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    """What follows --center or --scale, as ``tilewright.gram`` has it."""
    if value is None or value == VARIABLES:
        return value is not None
    side, found, path = value.partition("=")
    return {side: path} if found and side in SIDES else value


def as_axes(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    """The axes that follow --sum-over or --add-up."""
    return value.split(",") if value is not None and "," in value else value


def as_weights(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    """What follows --weights, as ``tilewright.gram`` has it."""
    if value is None or os.path.exists(value):
        return value
    axis, found, path = value.partition("=")
    return {axis: path} if found and "/" not in axis else value


def as_window(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    """What follows --window, as ``tilewright.gram`` has it."""
    if value is None or "," not in value:
        return as_number(ctx, parameter, value)
    return tuple(as_number(ctx, parameter, part) for part in value.split(","))


def as_range(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    """What follows --rows or --columns, as ``tilewright.slice`` has it."""
    if value is None:
        return None
    from tilewright.pipeline.errors import OptionError
    from tilewright.pipeline.store.sources.slices import as_span

    try:
        return as_span(value, parameter.name or "")
    except OptionError as error:
        raise click.BadParameter(str(error), ctx, parameter) from None


def range_options(rows: str, columns: str) -> Callable[[Any], Any]:
    """--rows and --columns, with what they are of."""

    def decorate(function: Any) -> Any:
        for name, of in (("--columns", columns), ("--rows", rows)):
            told = f"Only these {of}: first:last+1, either of which may be left out, or counted from the end."
            function = click.option(name, metavar="A:B", callback=as_range, help=told)(function)
        return function

    return decorate


def taken(name: str, rows: Any = None, columns: Any = None) -> Any:
    """The rows and columns of a matrix that a command is asked for; its name, where that is all of it."""
    if rows is None and columns is None:
        return name
    from tilewright.pipeline.store.sources.slices import slice as rows_and_columns

    return rows_and_columns(name, rows, columns)


def taken_of_product(
    a: str, b: str, rows: Any, columns: Any, *, transpose_a: bool = False, transpose_b: bool = False
) -> tuple[Any, Any]:
    """A and B of a product of which only these rows and columns are computed."""
    left = taken(a, columns=rows) if transpose_a else taken(a, rows)
    right = taken(b, columns) if transpose_b else taken(b, columns=columns)
    return left, right


reading_options = (
    click.option(
        "--raw",
        is_flag=True,
        help="Take all files as they are stored, without decompressing or opening them.",
    ),
    click.option(
        "--encoding",
        metavar="NAME",
        help="Python's name for the encoding of all texts. Without it they are UTF-8, or what a byte order mark says.",
    ),
    click.option(
        "--field",
        multiple=True,
        metavar="NAME",
        help="Take the texts in this field of JSON lines, or column of Parquet and Arrow, each a document; may be"
        " given several times. Plain texts beside them are whole documents.",
    ),
    click.option(
        "--id-field",
        metavar="NAME",
        help="The field, column or WARC header that identifies a document, to be kept with its name; of counts, only"
        " with --per-document.",
    ),
    click.option(
        "--split-on", type=click.Choice(PASSAGES), help="Make a document of each line, or of each paragraph."
    ),
    click.option(
        "--include",
        multiple=True,
        metavar="PATTERN",
        help="Take only files below folders, and members of archives, with such names ('*.txt') or paths"
        " ('a/**/*.txt').",
    ),
    click.option(
        "--exclude",
        multiple=True,
        metavar="PATTERN",
        help="Leave out files and members with such names or paths, and folders ('logs/').",
    ),
    click.option(
        "--on-error",
        type=click.Choice(ON_ERROR),
        default="stop",
        show_default=True,
        help="End at the first file that cannot be read; or leave such files, and such lines of JSON lines, out,"
        " list them, and exit with 3.",
    ),
)
"""How the files of a corpus are read."""

minhash_options = (
    click.option("--num-perm", type=click.IntRange(1, 4096), default=128, show_default=True,
                 help="Numbers of a signature."),
    click.option("--bands", type=click.IntRange(1, 4096),
                 help="Bands that a signature is cut into, with --rows; default: by the threshold."),
    click.option("--rows", type=click.IntRange(1, 4096), help="Numbers of a band."),
    click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=1, show_default=True,
                 help="What permutations follow from, as in datasketch."),
    click.option("--hash", type=click.Choice(HASHES), default="sha1", show_default=True,
                 help="What shingles are hashed with."),
    click.option("--scheme", type=click.Choice(SCHEMES), default="affine32", show_default=True,
                 help="datasketch's scheme of permutations; legacy is that before its release 2.0."),
    click.option("--pairs", type=click.Choice(PAIRS), default="all", show_default=True,
                 help="Compare all pairs that agree in a band, or only those that clusters are known by."),
    click.option("--signatures", is_flag=True, help="Write signatures, too."),
)  # fmt: skip
"""How documents are compared by their signatures."""
