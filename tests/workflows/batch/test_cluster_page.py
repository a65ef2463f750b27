"""What docs/cluster.md shows of profiles that extend others is what comes of them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import zarr
from click.testing import CliRunner

from tilewright.pipeline.cluster import profiles as profiles_module
from tilewright.workflows.cli import cli
from tilewright.workflows.commands.job import JobCommand

PAGE = (Path(__file__).parents[3] / "docs" / "cluster.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n### Some keys of another profile\n")[2].partition("\n## ")[0]
SITE, OWN, LISTED = re.findall(r"^```(?:yaml)?\n(.*?)^```", SECTION, re.M | re.S)


@pytest.fixture
def ann(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with the page's two files, and the certificates that they name."""
    monkeypatch.setattr(profiles_module, "MACHINE_FOLDER", tmp_path / "etc" / "tilewright")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "opt" / "tilewright"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home" / "ann" / ".config"))
    for folder, text in (("etc/tilewright", SITE), ("work", OWN)):
        path = tmp_path / folder / "cluster.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path / "work")
    zarr.create_array("A.zarr", shape=(4, 4), dtype="float32")
    return tmp_path


def test_the_profiles_are_listed_as_on_the_page(ann: Path) -> None:
    listed = CliRunner().invoke(cli, ["profiles"])
    assert listed.exit_code == 0, listed.output
    assert listed.stdout.replace(str(ann), "") == LISTED


@pytest.mark.usefixtures("ann")
def test_the_merged_profiles_are_as_the_page_says() -> None:
    found = profiles_module.load_profiles()
    gpu, debug = found["gpu"].options, found["debug"].options
    assert gpu["security"] == {
        "tls_ca_file": "ca.pem", "tls_client_cert": "ann.pem", "tls_client_key": "ann-key.pem",
    }  # fmt: skip
    assert gpu["extra"] == ["--exclusive"]
    assert debug == gpu | {"nodes": 1, "time": "0:10:00"}


def asked(name: str) -> set[str]:
    shown = CliRunner().invoke(cli, ["matmul", "A.zarr", "A.zarr", "C.zarr", "--profile", name, "--dry-run"])
    assert shown.exit_code == 0, shown.output
    return {line.removeprefix("#SBATCH --") for line in shown.stdout.splitlines()}


def test_a_job_asks_for_what_the_page_says(ann: Path) -> None:
    for file in (
        ann / "etc" / "tilewright" / "cluster.yaml",
        Path("cluster.yaml"),
    ):  # there are no such certificates here
        file.write_text("".join(line for line in file.read_text().splitlines(True) if "security" not in line))
    both = {"gpus-per-node=h100:4", "account=physics", "exclusive"}
    gpu, debug = asked("gpu"), asked("debug")
    assert gpu >= both | {"nodes=4", "time=1:00:00"}
    assert debug >= both | {"nodes=1", "time=0:10:00"}
    assert not any("partition" in line or "mail" in line for line in gpu | debug)


@pytest.mark.parametrize(
    ("page", "ending"), [("cluster.md", "do the same"), ("slurm.md", "take the same profile")]
)
def test_all_commands_that_can_be_jobs_are_on_the_page(page: str, ending: str) -> None:
    text = (Path(__file__).parents[3] / "docs" / page).read_text(encoding="utf-8")
    [listed] = re.findall(rf"((?:`\w+`(?:,|\s+and)?\s+)+){ending}", text)
    jobs = {name for name, command in cli.commands.items() if isinstance(command, JobCommand)}
    assert set(re.findall(r"\w+", listed)) - {"and"} == jobs - {"matmul"}
