"""What the command says of a word that it does not know, and what options are called over all commands."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import tilewright as tw
from tilewright.workflows.cli import cli
from tilewright.workflows.settings import settings


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("matmull", "No such command 'matmull'; did you mean 'matmul'?"),
        ("dublicates", "No such command 'dublicates'; did you mean 'duplicates'?"),
        ("xyz", "No such command 'xyz'"),
        ("bench gem", "No such command 'gem'; did you mean 'gemm'?"),
        ("matmul --transpos-a", "No such option '--transpos-a'; did you mean '--transpose-a'?"),
        ("matmul --zzz", "No such option '--zzz'"),
        ("matmul --cluster", "No such option '--cluster'; it is '--profile' here"),
        ("eofs --device-mem 1", "No such option '--device-mem'; did you mean '--device-memory'?"),
        ("matmul --precision ful", "'tf32', 'bf16', 'fp16'; did you mean 'full'?"),
        ("matmul --precision zzz", "'tf32', 'bf16', 'fp16'"),
        ("matmul --device gpu", "'auto', 'cuda', 'cpu'"),
        ("histogram --by letters", "'ngram:N:byte'; did you mean 'letter'?"),
        ("matmul --codec ztsd", "(--codec); did you mean 'zstd'?"),
    ],
)
def test_what_was_meant_is_told_where_it_is_near(line: str, said: str) -> None:
    result = CliRunner().invoke(cli, line.split())
    assert result.exit_code == 2
    assert result.stderr.rstrip("\n").endswith(said)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("histogram x --field", "NAME"),
        ("histogram x --field text --field", "NAME"),
        ("histogram x --exclude", "PATTERN"),
        ("gram x y --sum-over", "AXES"),
        ("gram x y --center", "[SIDE|ARRAY]"),
        ("eofs x y --weights", "[AXIS=]ARRAY"),
        ("matmul a b c --profile", "NAME"),
    ],
)
def test_an_empty_option_is_a_usage_error_that_says_what_to_give(line: str, wanted: str) -> None:
    result = CliRunner().invoke(cli, [*line.split(), ""])
    assert result.exit_code == 2
    option = line.split()[-1]
    said = f"Error: Invalid value for '{option}': it is empty: give {wanted}, or leave the option out"
    assert result.stderr.rstrip("\n").endswith(said)


def test_only_pairs_are_told_that_what_is_counted_has_no_output() -> None:
    for command, counted in (("topk", False), ("pairs", True)):
        result = CliRunner().invoke(cli, [command])
        assert result.exit_code == 2
        assert "give A.zarr [B.zarr] OUT.zarr" in result.stderr
        assert ("only counted" in result.stderr) is counted


def test_profiles_and_settings_are_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given, said in (
        ("cudaa", "'cudaa'; did you mean 'cuda'?; the profiles"),
        ("q", "no profile 'q'; the pro"),
    ):
        with pytest.raises(tw.ClusterError) as caught, tw.open_cluster(given):
            pass
        assert said in str(caught.value)
    for given, said in (
        ("tilse", "did you mean tilewright.tiles?"),
        ("zzz", "zzz: there is no such setting; tilewright settings"),
    ):
        with pytest.raises(tw.OptionError) as wrong:
            settings([given])
        assert said in str(wrong.value)
    with pytest.raises(tw.OptionError, match=r"unknown; it may be .* did you mean 'split'"):
        tw.matmul("a", "b", "c", precision="splt")  # type: ignore[arg-type]


def test_settings_are_shown_by_name() -> None:
    asked = ["panel_nbytes", "tilewright.tiles"]
    result = CliRunner().invoke(cli, ["settings", *asked])
    assert [line.split(" = ")[0] for line in result.stdout.splitlines() if not line.startswith(" ")] == [
        "tilewright.panel-nbytes",
        "tilewright.tiles",
    ]


APART = {
    "--columns": "of topk and pairs, whether items are columns; elsewhere those that are taken",
    "--rows": "of duplicates, those of a band; elsewhere those that are taken",
    "--scale": "of eofs, whether; of gram, by what",
    "--state": "of histogram a folder, of dot a file",
    "--out": "each has formats of its own",
}
"""Options that are not of one kind in all commands, and why."""
OWN_WORDS = {
    *APART, "-k", "--dtype", "--precision", "--no-verify", "--no-resume", "--of", "--sum-over", "--missing",
    "--weights", "--seed", "--casefold", "--normalise", "--profile", "--workers", "--list",
}  # fmt: skip
"""Options whose help says what they are of, in the terms of each command."""


def options() -> dict[str, list[tuple[str, click.Option]]]:
    """Every option of every command, by its name."""
    found: dict[str, list[tuple[str, click.Option]]] = defaultdict(list)
    for command in cli.commands.values():
        for one in command.params:
            if isinstance(one, click.Option):
                found[one.opts[0]].append((str(command.name), one))
    return found


def meaning(one: click.Option) -> tuple[object, ...]:
    return one.name, one.metavar, one.is_flag, type(one.type)


@pytest.mark.parametrize("name", sorted(set(options()) - set(APART)))
def test_an_option_means_the_same_wherever_it_is(name: str) -> None:
    commands = options()[name]
    assert len({meaning(one) for _, one in commands}) == 1, [(who, meaning(one)) for who, one in commands]
    helps = {one.help for _, one in commands}
    assert len(helps) == 1 or name in OWN_WORDS
    assert all(text and text.endswith(".") for text in helps), helps


def test_one_meaning_has_one_name() -> None:
    """By what the function of the command calls it, and by its help."""
    names, helps = defaultdict(set), defaultdict(set)
    for name, commands in options().items():
        for command, one in commands:
            names[one.name].add(name)
            helps[one.help].add(name)
            assert one.name is not None, command
    assert {name: seen for name, seen in names.items() if len(seen) > 1} == {}
    assert {text: seen for text, seen in helps.items() if len(seen) > 1} == {}
