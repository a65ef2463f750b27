"""What README.md and docs/guide.md show works: their Python blocks, settings, and every command that needs no GPU."""

from __future__ import annotations

import bz2
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import dask
import numpy as np
import pytest
import yaml
import zarr
from click.testing import CliRunner

import tilewright
from tilewright.pipeline import config
from tilewright.workflows.cli import cli

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
PAGE = README + GUIDE
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
COMMANDS = [line.partition("  #")[0].strip() for line in re.findall(r"^tilewright .*", PAGE, re.M)]
NEEDS_MORE = re.compile("--profile cuda|--device cuda|tcp:")  # GPUs, or a cluster that runs


def block_with(text: str) -> str:
    """The Python block that has ``text``; where both pages have it, it is the same."""
    (found,) = {block for block in PYTHON if text in block}
    return found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> Path:
    """A working directory that holds the inputs which the page names."""
    monkeypatch.chdir(tmp_path)
    for name, shape in {"A": (30, 20), "B": (20, 40), "X": (30, 20), "x": (50,), "y": (50,)}.items():
        zarr.save_array(f"{name}.zarr", rng.random(shape))
    group = zarr.open_group("store.zarr", mode="w")
    group.create_array("X", data=rng.random((30, 20)))
    group.create_array("Y", data=rng.random((20, 30)))
    for folder in ("corpus", "logs", "shards"):
        Path(folder).mkdir()
        Path(folder, "text").write_text('{"text": "Zoë counts letters"}')
    Path("dump.xml.bz2").write_bytes(bz2.compress(b"<page/>"))
    with tarfile.open("texts.tar.gz", "w:gz") as archive:
        archive.add("dump.xml.bz2")
    # One worker, whatever this machine has cores.
    Path("cluster.yaml").write_text("profiles: {cpu: {kind: cpu, n_workers: 1}}")
    return tmp_path


def test_every_python_block_is_tried_here() -> None:
    tried = {block_with(text) for text in ("tw.plan_matmul(", "__main__", "tilewright.kernels", "def test_")}
    assert set(PYTHON) == tried


@pytest.mark.sample(2)
@pytest.mark.parametrize("command", [each for each in COMMANDS if not NEEDS_MORE.search(each)])
def test_command(here: Path, command: str) -> None:
    if command.startswith(("tilewright verify", "tilewright audit", "tilewright repair")):
        tilewright.matmul("A.zarr", "B.zarr", "C.zarr", device="cpu")
    result = CliRunner().invoke(cli, shlex.split(command)[1:])
    assert result.exit_code == 0, result.stderr


def test_library(here: Path) -> None:
    names: dict[str, object] = {}
    exec(block_with("tw.plan_matmul("), names)
    product = names["c"].compute()  # type: ignore[attr-defined]
    np.testing.assert_allclose(product, zarr.open_array("A.zarr")[...] @ zarr.open_array("B.zarr")[...])


@pytest.mark.slow
def test_script_with_worker_processes(here: Path) -> None:
    Path("script.py").write_text(block_with("__main__"))
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert zarr.open_array("D.zarr").shape == (30, 40)


def test_arrays_in_memory(rng: np.random.Generator) -> None:
    names: dict[str, object] = {
        "a": rng.random((5, 6), np.float32),
        "b": rng.random((6, 7), np.float32),
        "text": np.frombuffer(b"text", np.uint8),
    }
    exec(block_with("tilewright.kernels"), names)
    assert names["c"].shape == (5, 7)  # type: ignore[attr-defined]
    assert names["counts"].sum() == 4  # type: ignore[attr-defined]


def test_test(tmp_path: Path) -> None:
    names: dict[str, object] = {}
    exec(block_with("def test_"), names)
    names["test_gram_matrix"](tmp_path)  # type: ignore[operator]


def test_settings_are_valid() -> None:
    (block,) = re.findall(r"^```yaml\n(tilewright:\n.*?)^```", PAGE, re.M | re.S)
    (in_python,) = re.findall(r"`dask\.config\.set\((\{.*?\})\)`", PAGE)
    for given in (yaml.safe_load(block), yaml.safe_load(in_python)):
        with dask.config.set(given):
            config.check_all()
            assert config.get("device-memory") == 8 * 2**30


def test_make_has_the_targets_that_are_named() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"^make ([\w-]+)", PAGE, re.M))
    assert named
    assert named <= set(re.findall(r"^([\w-]+):", makefile, re.M))


def test_the_readme_is_short() -> None:
    """A screen a topic: what is longer stands in the pages."""
    for section in re.split(r"^## ", README, flags=re.M):
        assert len(section.splitlines()) <= 50, section.splitlines()[0]
