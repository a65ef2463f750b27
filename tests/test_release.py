"""What a release is made of says the same everywhere; `tests/test_distribution.py` builds it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import tilewright

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NOTES = sorted(path for path in (ROOT / "changes").glob("*.md") if path.name != "README.md")
KINDS = tuple(PROJECT["tool"]["towncrier"]["fragment"])


def test_the_version_is_one() -> None:
    assert PROJECT["project"]["version"] == tilewright.__version__


def test_the_pythons_named_are_those_allowed() -> None:
    allowed = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["project"]["requires-python"])
    assert allowed
    named = [text for text in PROJECT["project"]["classifiers"] if "Python :: 3." in text]
    assert named == [
        f"Programming Language :: Python :: 3.{minor}" for minor in range(*map(int, allowed.groups()))
    ]


def test_the_citation_is_of_this_release() -> None:
    """Its keys are those that version 1.2.0 of the Citation File Format asks for, and those that name this release."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"]
    assert citation["type"] == "software"
    assert citation["title"].startswith("Tilewright: ")
    assert all(author["name"] for author in citation["authors"])
    assert citation["version"] == tilewright.__version__
    assert citation["license"] == PROJECT["project"]["license"]


@pytest.mark.parametrize("path", NOTES, ids=lambda path: path.name)
def test_a_note_for_the_changelog_is_one_item(path: Path) -> None:
    assert re.fullmatch(rf"(\d+|\+[\w.-]+)\.({'|'.join(KINDS)})(\.\d+)?\.md", path.name)
    text = path.read_text(encoding="utf-8")
    assert re.match(r"[^\s#*-]", text), "the dash is put before it"
    assert "\n\n" not in text
    assert all(len(line) <= 118 for line in text.splitlines()), "lines are set in by two characters"


def test_the_notes_make_a_section_of_the_changelog() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "9.9", "--date", "2030-01-31"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("## 9.9 (2030-01-31)\n" if NOTES else "No significant changes")
    for path in NOTES:
        assert "- " + path.read_text(encoding="utf-8").splitlines()[0] + "\n" in ran.stdout
    started = PROJECT["tool"]["towncrier"]["start_string"]
    assert (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").count(started) == 1
