"""What the command that lists profiles says of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tilewright.pipeline.cluster import profiles as profiles_module
from tilewright.pipeline.cluster.profiles import INSTALLED_PROFILES
from tilewright.workflows.cli import cli


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A site's file, and one in the working directory."""
    site, own = tmp_path / "etc" / "cluster.yaml", tmp_path / "work" / "cluster.yaml"
    for path in (site, own):
        path.parent.mkdir()
    site.write_text("profiles: {site: {kind: slurm, account: secret}, debug: {kind: slurm}}")
    own.write_text("profiles: {site: {kind: cpu}}")
    monkeypatch.setattr(profiles_module, "MACHINE_FOLDER", site.parent)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(own.parent)
    return [site, Path(own.name)]


def test_profiles_are_listed_with_their_files(files: list[Path], tmp_path: Path) -> None:
    listed = CliRunner().invoke(cli, ["profiles"])
    assert listed.exit_code == 0, listed.output
    assert listed.output.splitlines()[5:] == [
        f"site      cpu       cluster.yaml, in place of that of {files[0]}",
        f"debug     slurm     {files[0]}",
        "",
        f"read, the nearest last: built-in, {files[0]}, cluster.yaml",
        f"not there: {tmp_path}/prefix/etc/tilewright/cluster.yaml, {tmp_path}/home/tilewright/cluster.yaml",
    ]
    assert "secret" not in listed.output


def test_profiles_are_listed_as_json(files: list[Path]) -> None:
    found = json.loads(CliRunner().invoke(cli, ["profiles", "--json"]).output)
    by_name = {profile.pop("name"): profile for profile in found["profiles"]}
    assert by_name["site"] == {
        "kind": "cpu", "file": "cluster.yaml", "replaces": [str(files[0])], "extends": [],
    }  # fmt: skip
    assert found["read"] == [str(INSTALLED_PROFILES), str(files[0]), "cluster.yaml"]


def test_a_file_that_is_named_is_listed_as_the_only_one(files: list[Path]) -> None:
    listed = CliRunner().invoke(cli, ["profiles", "--cluster-file", str(files[0])])
    assert listed.output.splitlines()[-2:] == [
        f"read, the nearest last: built-in, {files[0]}",
        "no other place was looked at, since a file was named",
    ]
    missing = CliRunner().invoke(cli, ["profiles", "--cluster-file", "none.yaml"])
    assert missing.exit_code == 1
    assert "cannot read the profiles file none.yaml" in missing.stderr


def test_what_a_profile_extends_is_listed(files: list[Path]) -> None:
    files[1].write_text("profiles: {site: {extends: site, nodes: 2}, own: {extends: slurm}}")
    listed = CliRunner().invoke(cli, ["profiles"])
    assert listed.output.splitlines()[5:8] == [
        f"site      slurm     cluster.yaml, extends that of {files[0]}",
        f"debug     slurm     {files[0]}",
        "own       slurm     cluster.yaml, extends slurm (built-in)",
    ]
    found = json.loads(CliRunner().invoke(cli, ["profiles", "--json"]).output)
    by_name = {profile.pop("name"): profile for profile in found["profiles"]}
    assert by_name["site"]["extends"] == [{"name": "site", "file": str(files[0])}]
    assert by_name["site"]["replaces"] == []


@pytest.mark.parametrize("command", [["dot", "x.zarr", "y.zarr"], ["plan", "x.zarr", "y.zarr"]])
def test_commands_say_what_is_lost_of_a_hidden_profile(files: list[Path], command: list[str]) -> None:
    said = f"profile 'site' of cluster.yaml takes the place of that of {files[0]}, whose account it does not have; ext"
    assert CliRunner().invoke(cli, [*command, "--profile", "site"]).stderr.startswith(said)
    assert said not in CliRunner().invoke(cli, [*command, "--profile", "site", "--quiet"]).stderr
    assert "takes the place" not in CliRunner().invoke(cli, [*command, "--profile", "debug"]).stderr
