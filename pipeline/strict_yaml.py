"""YAML of which no key is overridden without a word."""

from __future__ import annotations

from typing import Any

import yaml

from tilewright.kernels.arguments import shown

MERGE_TAG = "tag:yaml.org,2002:merge"
"""Of the key ``<<``, which may stand several times in a mapping."""
_FASTEST: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, where PyYAML was built with it; a file takes it a tenth of Python's 1.5 ms, at each call."""


class RepeatedKeyError(Exception):
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
                raise RepeatedKeyError(key, found)
        return super().construct_mapping(node, deep)


def load(text: str) -> Any:
    """What a text says. Raises RepeatedKeyError, and what YAML's own types have to say of a text."""
    return yaml.load(text, _Loader)
