"""Which word is taken to be meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels.choices import CODECS, DEVICES, PRECISIONS
from tilewright.kernels.words import did_you_mean, in_one_line, nearest
from tilewright.pipeline.config import SETTINGS
from tilewright.workflows.cli import cli

VOCABULARIES = [
    list(cli.commands),
    *([name for one in command.params for name in one.opts] for command in cli.commands.values()),
    [setting.name for setting in SETTINGS],
    list(PRECISIONS),
    list(DEVICES),
    list(CODECS),
]
LONG = 4
"""Letters from which on a word with one that is wrong is known."""


def is_long(word: str) -> bool:
    return len(word.lstrip("-")) >= LONG


@st.composite
def slips(draw: st.DrawFn) -> tuple[list[str], str, str]:
    """Known words, one of them, and that with one letter left out, doubled, wrong, or changed with the next."""
    known = draw(st.sampled_from([each for each in VOCABULARIES if any(map(is_long, each))]))
    meant = draw(st.sampled_from(list(filter(is_long, known))))
    dashes = len(meant) - len(meant.lstrip("-"))
    place = draw(st.integers(dashes, len(meant) - 1))
    before, letter, behind = meant[:place], meant[place], meant[place + 1 :]
    slip = draw(st.sampled_from(["", letter * 2, "q", behind[:1] + letter]))
    return known, meant, before + slip + (behind[1:] if slip == behind[:1] + letter and behind else behind)


@given(slips())
def test_one_slip_is_seen_through(slip: tuple[list[str], str, str]) -> None:
    known, meant, written = slip
    if written not in known:
        assert meant in nearest(written, known), written


@given(
    st.sampled_from(VOCABULARIES), st.text(st.characters(codec="ascii", categories=["Nd", "Po"]), max_size=12)
)
def test_what_is_like_nothing_is_nothing(known: list[str], written: str) -> None:
    if not any(set(written) & set(word) for word in known):
        assert nearest(written, known) == []
        assert did_you_mean(written, known) == ""


@pytest.mark.parametrize("written", ["gpu", "x", "", "zzz", "--q", "42"])
@pytest.mark.parametrize("known", [list(DEVICES), list(PRECISIONS), list(cli.commands), []])
def test_nothing_is_offered_where_nothing_is_near(written: str, known: list[str]) -> None:
    assert nearest(written, known) == []


def test_beginnings_are_completed() -> None:
    assert nearest("hist", ["gram", "histogram"]) == ["histogram"]
    assert nearest("--dev", ["--device-memory", "--device"]) == ["--device", "--device-memory"]
    assert nearest("FULL", ["full"]) == ["full"]
    assert nearest("panel_nbytes", ["panel-nbytes"]) == ["panel-nbytes"]


def test_what_is_said() -> None:
    assert did_you_mean("ful", PRECISIONS) == "; did you mean 'full'?"
    assert did_you_mean("transpose", ["transpose-a", "transpose-b"], name="--{}") == (
        "; did you mean --transpose-a or --transpose-b?"
    )
    assert did_you_mean(3, PRECISIONS) == ""


def test_a_text_in_one_line_keeps_the_white_space_of_names() -> None:
    assert in_one_line("a  b\tc") == "a  b\tc"
    assert in_one_line("\n a  b \r\n\n   c\u2028d\n") == "a  b c d"
    assert in_one_line(" \n") == in_one_line("") == ""
