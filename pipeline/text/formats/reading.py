"""How the files of a corpus are read: what the user says of them, checked before anything is listed."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from tilewright.kernels.arguments import check_choice, check_flag, shown
from tilewright.kernels.choices import ON_ERROR, PASSAGES, ErrorPolicy, PassageName
from tilewright.pipeline import config
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.text.formats.encodings import check_decoder

UTF8 = "utf-8"


@dataclass(frozen=True)
class Reading:
    """What is read of a corpus's files. It travels with every task."""

    raw: bool = False
    """Whether files are counted as they are stored, whatever they are."""
    encoding: str | None = None
    """Of all texts, by Python's name; None for UTF-8, and for what a byte order mark says."""
    fields: tuple[str, ...] = ()
    """The fields, of JSON lines or columns, whose texts are the documents."""
    id_field: str | None = None
    """The field, or the header of a WARC's records, that identifies a document."""
    split_on: PassageName | None = None
    """A passage of `PASSAGES` that is a document, or None for whole texts."""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    """Patterns of names."""
    window_nbytes: int = 2**27
    """The largest window of Zstandard."""
    leaves_out: bool = False
    """Whether lines of JSON lines that cannot be read are left out, and listed."""
    threads: int = 1
    """How many decompress one large file, where that consists of parts."""
    buffer_nbytes: int = 2**20
    """Text in which lines, paragraphs and fields are looked for in one go."""

    @cached_property  # asked of every file
    def as_stored(self) -> bool:
        """Whether a text is a document as it is, so that it may be cut anywhere."""
        return not (self.fields or self.split_on or self.encoding)

    def takes(self, name: str, *, named: bool = False) -> bool:
        """Whether a file below a folder, or a member of an archive, is to be counted by its name there.

        named: whether the user named the file itself, so that ``include`` is not asked.
        """
        name = name.removeprefix("./")  # as find prints names, and tar stores those below a folder
        if self.include and not named and not _matches(self.include, name):
            return False
        return not _matches(self.exclude, name)

    def takes_none_of(self, folder: str) -> bool:
        """Whether ``exclude`` leaves out all that a folder below the one named holds, whatever that is called."""
        # These patterns go on with any characters, so that one that fits nothing more fits all.
        return _matches(tuple(each for each in self.exclude if each.endswith(("/", "**"))), folder + "/")

    def facts(self) -> dict[str, object]:
        """What decides what is counted of a file, as JSON; nothing for the usual reading."""
        facts = {
            "encoding": self.encoding,
            "fields": list(self.fields),
            "id_field": self.id_field,
            "split_on": self.split_on,
            "include": list(self.include),
            "exclude": list(self.exclude),
        }
        return {name: value for name, value in facts.items() if value}


def reading_of(
    *,
    raw: bool = False,
    encoding: str | None = None,
    field: str | Iterable[str] | None = None,
    id_field: str | None = None,
    split_on: PassageName | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    on_error: ErrorPolicy = "stop",
) -> Reading:
    """What a user says, checked.

    Raises
    ------
    OptionError
        A value that means nothing, or two that exclude each other.
    """
    raw = check_flag("raw", raw)
    check_choice("on_error", on_error, ON_ERROR, "way with bad files")
    fields = _texts("field", field)
    if len(set(fields)) < len(fields):
        raise OptionError(f"field={shown(field)} names a field twice; name each once")
    if split_on is not None:
        check_choice("split_on", split_on, PASSAGES, "passage of a text")
    if id_field is not None and (not isinstance(id_field, str) or not id_field):
        raise OptionError(f"id_field={shown(id_field)} is no name of a field")
    if id_field in fields:
        raise OptionError(f"id_field={id_field!r} is a field that is counted, too; name another")
    if fields and split_on is not None:
        raise OptionError(
            "field and split_on exclude each other: a field's text is a document; leave one of them out"
        )
    found = Reading(
        raw,
        _encoding(encoding),
        fields,
        id_field,
        split_on,
        _texts("include", include),
        _texts("exclude", exclude),
        config.get("window-nbytes"),
        leaves_out=on_error == "report",
    )
    if raw and not found.as_stored:
        given = [
            f"{name}={value!r}"
            for name, value in (("encoding", encoding), ("field", ", ".join(fields)), ("split_on", split_on))
            if value
        ]
        raise OptionError(
            f"raw=True takes files as they are stored, so that {' and '.join(given)} would say nothing; leave out raw,"
            " or that"
        )
    return found


def _texts(name: str, value: str | Iterable[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    try:
        found = (value,) if isinstance(value, str) else tuple(value)
    except TypeError as error:
        raise OptionError(f"{name}={shown(value)} is neither a text nor several") from error
    if not all(isinstance(each, str) and each for each in found):
        raise OptionError(f"{name}={shown(value)} holds something else than texts of at least one character")
    return found


def _encoding(encoding: str | None) -> str | None:
    """Python's own name of an encoding; None for UTF-8, whose bytes are counted as they are."""
    if encoding is None:
        return None
    try:
        found = codecs.lookup(encoding)
        check_decoder(found)
    except (LookupError, TypeError, ValueError, UnicodeError) as error:
        raise OptionError(
            f"encoding={shown(encoding)} is no encoding of texts that Python knows; give one of its names, such as"
            " latin-1, cp1252, utf-16, shift_jis or gb18030"
        ) from error
    return None if found.name == UTF8 else found.name


def is_hidden(name: str) -> bool:
    """Whether a name in a folder is one that tools keep for themselves: it begins with a dot, or marks what a job has
    finished."""
    return name[:1] == "." or name in _MARKS


_MARKS = frozenset(("_SUCCESS", "_STARTED", "_COMMITTED", "_metadata", "_common_metadata"))


def has_hidden(path: str) -> bool:
    """Whether any part of a member's path is hidden."""
    return any(is_hidden(part) for part in path.split("/") if part not in (".", ".."))


def _matches(patterns: tuple[str, ...], name: str) -> bool:
    return any(_pattern(pattern).fullmatch(name) is not None for pattern in patterns)


@lru_cache(maxsize=256)
def _pattern(pattern: str) -> re.Pattern[str]:
    """A pattern as regular expression: ``*``, ``?`` and ``[...]`` within a name, ``**`` over folders. Without a slash
    it is of the last part of a path, with one of all of it."""
    out, i = ["" if "/" in pattern.rstrip("/") else "(?:.*/)?"], 0
    pattern = pattern.removeprefix("./").lstrip("/")
    while i < len(pattern):
        if pattern.startswith("**/", i):
            out.append("(?:.*/)?")
            i += 3
        elif pattern.startswith("**", i):
            out.append(".*")
            i += 2
        elif pattern[i] == "*":
            out.append("[^/]*")
            i += 1
        elif pattern[i] == "?":
            out.append("[^/]")
            i += 1
        elif pattern[i] == "[" and (end := pattern.find("]", i + 2)) > 0:
            inner = pattern[i + 1 : end]
            inner = "^" + inner[1:] if inner.startswith(("!", "^")) else inner
            out.append("[" + inner.replace("\\", r"\\").replace("[", r"\[") + "]")
            i = end + 1
        else:
            out.append(re.escape(pattern[i]))
            i += 1
    if pattern.endswith("/"):
        out.append(".*")  # all of a folder
    try:
        return re.compile("".join(out), re.DOTALL)
    except re.error:
        return re.compile(re.escape(pattern))


def relative_name(path: str, folder: str) -> str:
    """The name of a file below a folder as patterns see it."""
    return os.path.relpath(path, folder).replace(os.sep, "/")
