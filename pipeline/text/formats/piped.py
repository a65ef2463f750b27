"""What comes through a pipe, kept in a file until it is counted: workers are other processes, and it comes once."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

import dask

from tilewright.pipeline.errors import CorpusError, StoreError

if TYPE_CHECKING:
    from tilewright.pipeline.text.corpus import Corpus

STANDARD_INPUT = "-"
STEP_NBYTES = 2**20


@contextmanager
def without_pipes(paths: Any, standard_input: BinaryIO | None = None) -> Iterator[tuple[Any, dict[str, str]]]:
    """The paths, with files in the place of ``-`` and of pipes, and by these files' paths what users call them.

    The files are in Dask's ``temporary-directory``, or the system's, and go away with the block. standard_input: what
    ``-`` stands for, ``sys.stdin`` without it.

    Raises
    ------
    CorpusError
        A pipe cannot be read, or stands there twice.
    StoreError
        There is no room for what comes through one.
    """
    names: dict[str, str] = {}
    try:
        given = list(paths)
    except TypeError:
        yield paths, names  # whoever lists the corpus says what is wrong with it
        return
    if not any(map(_is_pipe, given)):
        yield given, names
        return
    folder = tempfile.mkdtemp(prefix="tilewright-pipes-", dir=dask.config.get("temporary-directory"))
    try:
        for place, path in enumerate(given):
            if not _is_pipe(path):
                continue
            name = os.fsdecode(path)
            if name in names.values():
                raise CorpusError(f"{name} is a pipe, and can be read once; name it once")
            given[place] = os.path.join(folder, str(place))
            names[given[place]] = name
            _keep(name, given[place], standard_input)
        yield given, names
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def named(corpus: Corpus, names: Mapping[str, str]) -> Corpus:
    """The corpus, its files called as users call them."""
    if not names:
        return corpus
    documents = tuple(each._replace(name=names.get(each.name, each.name)) for each in corpus.documents)
    return replace(corpus, documents=documents)


def pipes_among(paths: Iterable[Any]) -> list[str]:
    """Those of the paths that can be read once, as users call them."""
    return [os.fsdecode(path) for path in paths if _is_pipe(path)]


def _is_pipe(path: Any) -> bool:
    if isinstance(path, str) and path == STANDARD_INPUT:
        return True
    if not isinstance(path, str | bytes | os.PathLike):  # a number would be an open file
        return False
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False  # whoever lists the corpus says what is wrong with it


def _keep(name: str, path: str, standard_input: BinaryIO | None) -> None:
    """Write all that comes through a pipe to a new file."""
    with ExitStack() as stack:
        file = stack.enter_context(open(path, "xb"))
        try:
            if name == STANDARD_INPUT:
                source = standard_input or _standard_input()
            else:
                source = stack.enter_context(open(name, "rb"))
            while data := source.read(STEP_NBYTES):
                _write(file, data, name)
        except (CorpusError, StoreError):
            raise
        except OSError as error:
            raise CorpusError(
                f"cannot read {name}: {error.strerror}; give another pipe, or a file"
            ) from error


def _standard_input() -> BinaryIO:
    """Raises CorpusError where a process has none: it was started without, as some services are, or is a notebook."""
    found: BinaryIO | None = getattr(sys.stdin, "buffer", None)
    if found is None:
        raise CorpusError(
            f"{STANDARD_INPUT} is the standard input, which this process has not; give it one (< FILE), or name a file"
        )
    return found


def _write(file: BinaryIO, data: bytes, name: str) -> None:
    try:
        file.write(data)
        file.flush()
    except OSError as error:
        raise StoreError(
            f"cannot keep what comes through {name} in {os.path.dirname(file.name)}: {error.strerror}; name another"
            " folder by Dask's setting temporary-directory"
        ) from error
