"""A file of YAML, with the lines of its keys; what is wrong with it is told by file and line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tilewright.kernels.arguments import shown

_FASTEST: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, where PyYAML was built with it; a file takes it a tenth of Python's 1.5 ms, at each call."""
MERGE_TAG = "tag:yaml.org,2002:merge"
"""Of the key ``<<``, which may stand several times in a mapping."""
DEPTH = 2
"""Mappings of mappings whose keys' lines are kept: below them nobody asks, and an alias may mean what it stands in."""


@dataclass(frozen=True)
class YamlFile:
    """What a file says."""

    path: Path
    content: Any
    lines: dict[tuple[str, ...], int]
    """Of its outer keys, by these as they are written."""

    def at(self, *keys: object) -> str:
        """The file, and the line of the last of these keys, each in the mapping of the one before, for messages."""
        line = self.lines.get(tuple(map(str, keys)))
        return str(self.path) if line is None else f"{self.path}, line {line}"


class YamlError(Exception):
    """A file is no YAML, or says a key twice: which file, where and what."""


def read_yaml(path: Path) -> YamlFile:
    """A file's one document. Raises YamlError and OSError."""
    data = path.read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _wrong(path, f"line {line}: it is no text in UTF-8 ({error.reason})") from error
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines = dict(_lines(node, ()))
        return YamlFile(path, None if node is None else loader.construct_document(node), lines)
    except _RepeatedKeyError as error:
        raise YamlError(f"{path}: {error}; keep one of them") from error
    except yaml.MarkedYAMLError as error:
        raise _wrong(path, _told(error, text)) from error
    except yaml.reader.ReaderError as error:  # the same of either loader's
        line = text.count("\n", 0, error.position) + 1
        raise _wrong(path, f"line {line}: {error.reason}") from error
    except Exception as error:  # what else its loader may meet, such as more brackets than it goes down into
        raise _wrong(path, f"{type(error).__name__}: {error}") from error


def _wrong(path: Path, why: str) -> YamlError:
    return YamlError(f"{path} is not valid YAML: {why}")


def _told(error: yaml.MarkedYAMLError, text: str) -> str:
    """Where it is, and what."""
    problem, mark = error.problem or str(error), error.problem_mark or error.context_mark
    if mark is None:
        return problem
    line = text.split("\n")[mark.line] if mark.line <= text.count("\n") else ""
    found = line[mark.column : mark.column + 1]
    if "cannot start any token" in problem and found:
        problem = (
            "a tab stands where YAML takes spaces alone; indent by these"
            if found == "\t"
            else f"{problem} ({found!r}); put it in quotes"
        )
    begun = error.context_mark
    if error.context and begun is not None and begun.line != mark.line:
        problem += f" ({error.context} that begins in line {begun.line + 1})"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _lines(node: Any, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            keys = (*above, key.value)
            yield keys, key.start_mark.line + 1
            if len(keys) <= DEPTH:
                yield from _lines(value, keys)


class _RepeatedKeyError(Exception):
    """A mapping says a key more than once."""

    def __init__(self, key: Any, lines: list[int]) -> None:
        where = (
            f"line {lines[0]} has"
            if len(set(lines)) == 1
            else f"lines {', '.join(map(str, lines[:-1]))} and {lines[-1]} have"
        )
        super().__init__(f"{where} the key {shown(key)} {len(lines)} times in one mapping")


class _Loader(_FASTEST):
    """YAML's, which by itself takes the last of several equal keys without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, list[int]] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE_TAG:
                lines.setdefault(self.construct_object(key), []).append(key.start_mark.line + 1)
        for key, found in lines.items():
            if len(found) > 1:
                raise _RepeatedKeyError(key, found)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, _RepeatedKeyError):
            raise
        except Exception as error:  # what its types have to say, such as of a date without day
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error
