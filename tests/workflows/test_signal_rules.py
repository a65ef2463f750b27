"""Documents kept and dropped by rules: as plain Python has it, in all that is printed and written."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from distributed import Client

import tilewright as tw
from tests.kernels.signals import naive_signals as naive
from tests.kernels.signals.test_signals import prose
from tilewright.kernels.signals.definitions import NAMES
from tilewright.pipeline.signals.rules import MOST_BOUNDS, SETS, rules_of, verdicts
from tilewright.workflows.cli import cli
from tilewright.workflows.commands.texts import RULE_SETS

TEXTS = {
    "good": (
        "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of"
        " a wife. However little known the feelings or views of such a man may be on his first entering a"
        " neighbourhood, this truth is so well fixed in the minds of the surrounding families, that he is considered"
        " as the rightful property of some one or other of their daughters.\n"
    ),
    "short": "too short to be of use",
    "list": "".join(f"- item {k} of the menu that we have to offer and be with...\n" for k in range(12)),
    "tags": "#best #offer to #be with #you and #all of #that " * 8,
    "echo": "the same line of words again and again, to be sure that we have it\n" * 9,
    "paragraphs": "one of the paragraphs that we have to read\n\n" * 8,
    "digits": "1 2 3 4 the of " * 30,
    "letters": "a b c d e the of " * 20,
    "run": ("Donaudampfschiffahrtsgesellschaft" * 2 + " the of ") * 25,
    "empty": "",
    "prose": prose(3, 90).decode(errors="replace"),
}


def gopher(text: str) -> list[str]:
    """What Gopher's appendix says of a text, in the order of the signals; its numbers by plain Python."""
    found = naive.signals(text.encode())
    broken = {
        "word_count < 50": found["word_count"] < 50,
        "word_count > 100000": found["word_count"] > 100_000,
        "unique_stop_word_count < 2": found["unique_stop_word_count"] < 2,
        "mean_word_length < 3": found["mean_word_length"] < 3,
        "mean_word_length > 10": found["mean_word_length"] > 10,
        "hash_to_word_ratio > 0.1": found["hash_to_word_ratio"] > 0.1,
        "ellipsis_to_word_ratio > 0.1": found["ellipsis_to_word_ratio"] > 0.1,
        "frac_words_alphabetic < 0.8": found["frac_words_alphabetic"] < 0.8,
        "frac_lines_end_with_ellipsis > 0.3": found["frac_lines_end_with_ellipsis"] > 0.3,
        "frac_lines_start_with_bullet > 0.9": found["frac_lines_start_with_bullet"] > 0.9,
        "frac_lines_dupe > 0.3": found["frac_lines_dupe"] > 0.3,
        "frac_chars_dupe_lines > 0.2": found["frac_chars_dupe_lines"] > 0.2,
        "frac_paragraphs_dupe > 0.3": found["frac_paragraphs_dupe"] > 0.3,
        "frac_chars_dupe_paragraphs > 0.2": found["frac_chars_dupe_paragraphs"] > 0.2,
        **{
            f"frac_chars_top_{n}gram > {most}": found[f"frac_chars_top_{n}gram"] > most
            for n, most in ((2, 0.2), (3, 0.18), (4, 0.16))
        },
        **{
            f"frac_chars_dupe_{n}grams > {most}": found[f"frac_chars_dupe_{n}grams"] > most
            for n, most in ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.1))
        },
    }
    return [rule for rule, is_broken in broken.items() if is_broken]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in TEXTS.items()))
    return path


def signals(corpus: Path, client: Client, **given: Any) -> tw.Signals:
    return tw.signals(corpus, field="text", id_field="id", cluster=client, **given)


def test_gophers_rules_are_those_of_plain_python(corpus: Path, client: Client) -> None:
    found = signals(corpus, client, rules="gopher")
    expected = {name: gopher(text) for name, text in TEXTS.items()}
    assert found.ids is not None
    assert dict(zip(found.ids, found.reasons, strict=True)) == {
        name: "; ".join(each) for name, each in expected.items()
    }
    assert found.keep.tolist() == [not each for each in expected.values()]
    assert "good" in [name for name, keep in zip(found.ids, found.keep, strict=True) if keep]
    broken = {rule for each in expected.values() for rule in each}
    assert len(broken) >= 16  # the texts meet most rules
    table = str(found).splitlines()
    for rule in found.rules or ():
        times = sum(rule.broken in each for each in expected.values())
        alone = sum(each == [rule.broken] for each in expected.values())
        assert [line.split()[-2:] for line in table if line.startswith(f"{rule} ")] == [
            [str(times), str(alone)]
        ]
    dropped = sum(map(bool, expected.values()))
    assert (
        f"{len(TEXTS) - dropped} of {len(TEXTS)} documents are kept by the rules of gopher, and {dropped} dropped"
        in table
    )
    halves = [signals(corpus, client, rules=half) for half in ("gopher-quality", "gopher-repetition")]
    assert ((halves[0].keep & halves[1].keep) == found.keep).all()
    assert (signals(corpus, client, rules=["gopher-quality", "gopher-repetition"]).keep == found.keep).all()


def test_a_file_overrides_what_it_names(corpus: Path, client: Client, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "like: [gopher-quality]\nrules:\n  word_count: {least: 5}\n  mean_word_length: null\n"
        "  frac_words_alphabetic: {least: null, most: 2}\n  char_entropy: {most: 4.5}\n"
    )
    rules = {str(rule): rule.source for rule in rules_of(str(mine))}
    assert rules["word_count >= 5"] == rules["char_entropy <= 4.5"] == str(mine)
    assert rules["word_count <= 100000"] == "gopher-quality"
    assert "frac_words_alphabetic <= 2" in rules
    assert not any("mean_word" in rule or "alphabetic >=" in rule for rule in rules)
    as_json = tmp_path / "mine.json"
    as_json.write_text(json.dumps({"rules": {"word_count": {"least": 5}}}))
    found = signals(corpus, client, rules=[as_json])
    assert found.keep.tolist() == [len(text.split()) >= 5 for text in TEXTS.values()]
    assert (
        signals(corpus, client, rules={"rules": {"word_count": {"least": 5}}}).keep.tolist()
        == found.keep.tolist()
    )
    over = rules_of(["gopher", {"rules": {"word_count": {"most": 7, "least": 0}}}])
    assert [str(rule) for rule in over[:2]] == ["word_count >= 0", "word_count <= 7"]


def test_what_is_printed_and_written(corpus: Path, client: Client, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    xarray = pytest.importorskip("xarray")
    outs = {ending: tmp_path / f"s.{ending}" for ending in ("csv", "json", "zarr", "parquet")}
    for out in outs.values():
        found = signals(corpus, client, rules="gopher", out=out)
    keep, reasons = found.keep.tolist(), found.reasons.tolist()
    stored = json.loads(outs["json"].read_text())
    assert (stored["keep"], stored["reasons"]) == (keep, reasons)
    assert stored["rules"][0] == {"signal": "word_count", "least": 50, "source": "gopher"}
    with xarray.open_zarr(outs["zarr"], consolidated=False) as group:
        assert group["keep"].values.tolist() == keep
        assert group["reasons"].values.tolist() == reasons
    table = parquet.read_table(outs["parquet"])
    assert table.column_names == ["document", "id", *NAMES, "keep", "reasons"]
    assert (table["keep"].to_pylist(), table["reasons"].to_pylist()) == (keep, reasons)
    with open(outs["csv"], newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["keep"] for row in rows] == [str(each).lower() for each in keep]
    assert [row["reasons"] for row in rows] == reasons
    pytest.importorskip("pandas")
    assert found.to_pandas()["keep"].tolist() == keep
    command = ["signals", str(corpus), "--field", "text", "--id-field", "id", "--rules", "gopher", "-q"]
    command += ["--profile", client.scheduler.address]
    listed = CliRunner().invoke(cli, [*command, "--list"]).stdout.splitlines()
    assert found.ids is not None
    rows_of = zip(found.ids, found.documents, reasons, keep, strict=True)
    assert listed == [f"{one}\t{name}\t{why}" for one, name, why, kept in rows_of if not kept]
    assert len(listed) == len(found.dropped)
    kept = CliRunner().invoke(cli, [*command, "--list-kept"]).stdout.splitlines()
    assert [line.split("\t")[0] for line in kept] == [
        one for one, is_kept in zip(found.ids, keep, strict=True) if is_kept
    ]
    for option, lines in (("--list", listed), ("--list-kept", kept)):
        ended = CliRunner().invoke(cli, [*command, option, "--null"]).stdout
        assert ended == "".join(f"{line}\0" for line in lines)
    refused = CliRunner().invoke(cli, ["signals", str(corpus), "--rules", "gopher", "--null"])
    assert refused.exit_code == 2
    assert "add --list or --list-kept" in refused.output
    refused = CliRunner().invoke(cli, ["signals", str(corpus), "--list"])
    assert refused.exit_code == 2
    assert "add --rules gopher" in refused.output


def test_without_rules_there_is_no_verdict(corpus: Path, client: Client) -> None:
    found = signals(corpus, client)
    assert found.to_json()["keep"] is None
    for ask in (lambda: found.keep, lambda: found.reasons, lambda: found.dropped):
        with pytest.raises(tw.OptionError, match="no rules were asked for"):
            ask()


def test_what_has_no_signals_is_dropped_for_that() -> None:
    rules = rules_of("gopher")
    found = {name: np.array([1.0]) for name in NAMES} | {"char_count": np.array([-1])}
    assert verdicts(found, rules).tolist() == [1 << len(rules)]
    judged = tw.Signals(("a",), None, found, {}, 0, 0.0, rules=rules)
    assert judged.reasons.tolist() == ["too long to be measured"]
    assert "too long to be measured" in str(judged)


def test_a_bound_is_kept() -> None:
    (rule,) = rules_of({"rules": {"word_count": {"most": 3}}})
    assert rule.breaks(np.array([2, 3, 4])).tolist() == [False, False, True]
    assert all(signal in NAMES for bounds in SETS.values() for signal in bounds)
    assert len(rules_of("gopher")) < MOST_BOUNDS
    assert tuple(SETS) == RULE_SETS  # which completion knows without Numba


WRONG: tuple[tuple[Any, str], ...] = (
    ("c4", "asks for what no signal here says: sentences"),
    ("fineweb", "nothing is judged by a part of it"),
    ("gofer", "neither a set of rules .* did you mean 'gopher'"),
    ("no/such.yaml", "cannot read no/such.yaml: No such file"),
    (5, "rules=5 is neither"),
    ([], "leaves no rule"),
    ({}, "is no mapping|may have 'like'"),
    ({"like": "c4"}, "asks for what no signal here says"),
    ({"like": 5}, "is like 5, which is no set"),
    ({"rule": {}}, "has 'rule'; it may have 'like'"),
    ({"rules": [1]}, "give a mapping"),
    (
        {"rules": {"sentence_count": {"least": 3}}},
        "'sentence_count', which is no signal that is found here, and no rule",
    ),
    ({"rules": {"rps_doc_word_count": {"least": 3}}}, "RedPajama-V2's signal; here it is 'word_count'"),
    ({"rules": {"word_count": 5}}, "has word_count: 5; give its least"),
    ({"rules": {"word_count": {"min": 5}}}, "give its least, its most"),
    ({"rules": {"word_count": {"least": "5"}}}, "least: '5', which is no number"),
    ({"rules": {"word_count": {"least": float("nan")}}}, "is no number"),
    ({"rules": {"word_count": {"least": 6, "most": 5}}}, "no word_count is at least 6 .* and at most 5"),
    ({"like": "gopher", "rules": dict.fromkeys(SETS["gopher"])}, "leaves no rule"),
    (
        {"rules": {name: {"least": 0, "most": 1} for name in NAMES}},
        "66 bounds were given, and 63 are the most",
    ),
)


@pytest.mark.parametrize(("rules", "why"), WRONG)
def test_what_means_nothing_is_refused(rules: Any, why: str) -> None:
    with pytest.raises(tw.OptionError, match=why):
        rules_of(rules)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rules: {word_count: {least: 1}}\nrules: {word_count: {least: 2}}", "the key 'rules' 2 times"),
        ("rules: [", "is not valid YAML"),
        ("gopher", "is no mapping"),
    ],
)
def test_a_file_that_means_nothing_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    with pytest.raises(tw.OptionError, match=why):
        rules_of(path)
