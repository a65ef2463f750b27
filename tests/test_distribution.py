"""The wheel and the source distribution: what is in them, and that they work where nothing else is installed.

``make test-dist`` runs it, and ``make test-versions`` with each Python: that which TILEWRIGHT_PYTHON names, or this
one. uv builds, and installs from PyPI. TILEWRIGHT_DIST names a folder of what is built already, by ``make dist``, to be
tried instead. TILEWRIGHT_OVERRIDES has requirements, with blanks between them, that are
installed whatever others ask for: releases that a library we need does not admit yet.
"""

from __future__ import annotations

import email
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
import zarr

import tilewright

ROOT = Path(__file__).resolve().parent.parent
PYTHON = os.environ.get("TILEWRIGHT_PYTHON") or sys.executable
COMPILERS = {"cu12": "nvidia-cuda-nvcc-cu12", "cu13": "nvidia-nvvm"}
"""The extras that bring CUDA for Python, and one of the packages that they bring; `make test` has the others."""

pytestmark = pytest.mark.slow


def uv(*words: str | Path) -> str:
    command = [sys.executable, "-m", "uv", *words]
    # An interpreter is one that is here, not one from elsewhere.
    ran = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"UV_PYTHON_DOWNLOADS": "never"}
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, which is built from the source distribution, and that. The wheel has a few compiled kernels; a release
    has those of all usual jobs."""
    made = os.environ.get("TILEWRIGHT_DIST")
    folder = ROOT / made if made else tmp_path_factory.mktemp("dist")
    if not made:
        words = [ROOT / ".ci" / "dist", folder, "--capability", "9.0", "--job", "hashes"]
        more = {"PYTHON": sys.executable, "BUILD_PYTHON": PYTHON}
        ran = subprocess.run(words, capture_output=True, text=True, env=os.environ | more)
        assert ran.returncode == 0, ran.stderr
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel and what it says it needs, and no more."""
    folder = tmp_path_factory.mktemp("environment") / "env"
    asked = os.environ.get("TILEWRIGHT_OVERRIDES", "").split()
    overrides = folder.with_name("overrides.txt")
    overrides.write_text("".join(f"{each}\n" for each in asked))
    uv("venv", "--quiet", "--python", PYTHON, folder)
    into = ("--quiet", "--python", folder / "bin" / "python")
    uv("pip", "install", *into, "--overrides", overrides, built[0])
    if not asked:
        uv("pip", "check", *into)
    return folder


def ran(installed: Path, words: Sequence[str | Path], folder: Path, **more: str) -> str:
    """The output of a command of the environment, in a folder without the checkout, with a home of its own."""
    program = shutil.which(words[0], path=installed / "bin")
    assert program, f"{words[0]} is not installed"
    environment = {
        "HOME": str(folder),
        "PATH": f"{installed / 'bin'}:{os.defpath}",
        "LANG": "C.UTF-8",
        "OPENBLAS_NUM_THREADS": "1",
    }
    # Where BLAS is told which processor to take.
    environment |= {name: value for name, value in os.environ.items() if name.startswith("OPENBLAS_")}
    done = subprocess.run(
        [program, *words[1:]], cwd=folder, env=environment | more, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def packaged() -> set[str]:
    """The files of the package in the checkout, as they are named in a wheel."""
    found = {
        str(path.relative_to(ROOT))
        for layer in ("", "kernels", "pipeline", "workflows")
        for path in (ROOT / "tilewright" / layer).rglob("*" if layer else "*.*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert len(found) > 400
    return found


def test_the_wheel_has_the_whole_package_and_no_more(built: tuple[Path, Path]) -> None:
    """Also what is no module: the mark of types, the profiles, the manual page and the licence. No tests."""
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
    told = f"tilewright-{tilewright.__version__}"
    shipped = {name for name in names if fnmatch(name, "tilewright/kernels/shipped/*.kernels")}
    assert {name for name in names if not name.startswith(told)} - shipped == packaged()
    if not os.environ.get("TILEWRIGHT_DIST"):
        assert shipped == {"tilewright/kernels/shipped/9.0.kernels"}
    assert {"tilewright/py.typed", "tilewright/pipeline/cluster.yaml"} <= names
    assert {name for name in names if name.startswith(f"{told}.data/")} == {
        f"{told}.data/data/share/man/man1/tilewright.1"
    }
    assert f"{told}.dist-info/licenses/LICENSE" in names


def test_the_wheel_says_its_licence_and_readme(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        text = wheel.read(f"tilewright-{tilewright.__version__}.dist-info/METADATA").decode()
    said = email.message_from_string(text)
    assert said["License-Expression"] == "BSD-3-Clause"  # as SPDX names it
    assert said["License-File"] == "LICENSE"
    assert said["Description-Content-Type"] == "text/markdown"
    assert "# Tilewright" in said.get_payload()
    assert {*COMPILERS, "hdf5", "s3", "text"} <= set(said.get_all("Provides-Extra", []))


def test_the_source_distribution_has_what_make_needs(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert packaged() <= names
    kept = (
        "Makefile",
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "LICENSE",
        "README.md",
        "cluster.yaml",
    )
    assert {*kept, ".ci/run", "changes/template.md.jinja", "docs/conf.py", "tests/conftest.py"} <= names
    assert not [
        name for name in names if "__pycache__" in name or name.startswith(("build/", "dist/", ".venv"))
    ]


def test_commands_start_and_explain_themselves(installed: Path, tmp_path: Path) -> None:
    assert "matmul" in ran(installed, ["tilewright", "--help"], tmp_path)
    assert "--device-memory" in ran(installed, ["tilewright", "matmul", "--help"], tmp_path)
    assert "matmul" in ran(installed, ["dask", "tilewright", "--help"], tmp_path)
    assert "matmul" in ran(installed, ["python", "-m", "tilewright", "--help"], tmp_path)
    assert (installed / "share" / "man" / "man1" / "tilewright.1").is_file()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_are_told_how_to_complete(installed: Path, tmp_path: Path, shell: str) -> None:
    text = ran(installed, ["tilewright"], tmp_path, _TILEWRIGHT_COMPLETE=f"{shell}_source")
    assert "_TILEWRIGHT_COMPLETE" in text


def test_a_product_and_a_count_are_right(installed: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    """By the command line, on a cluster of Dask's too, and checked."""
    a, b = rng.integers(-9, 9, (70, 50)).astype("int16"), rng.integers(-9, 9, (50, 60)).astype("int16")
    np.save(tmp_path / "a.npy", a)
    zarr.create_array(tmp_path / "b.zarr", data=b, chunks=(16, 16))
    ran(installed, ["tilewright", "matmul", "a.npy", "b.zarr", "c.zarr", "--profile", "cpu"], tmp_path)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "c.zarr", mode="r")[:], a.astype(int) @ b)
    ran(installed, ["tilewright", "verify", "a.npy", "b.zarr", "c.zarr"], tmp_path)
    (tmp_path / "text.txt").write_text("abca", encoding="utf-8")
    counted = ran(installed, ["tilewright", "histogram", "text.txt", "--by", "letter"], tmp_path)
    assert [line.split()[:2] for line in counted.splitlines() if line.startswith(("A", "B"))] == [
        ["A", "2"],
        ["B", "1"],
    ]


SHIPPED = """
from tilewright.kernels.gpu import compiled
from tilewright.kernels.passes.xxh3_device import KERNELS, UNITS

compilations = []
compiled.compile_function = lambda *asked: compilations.append(asked)
codes = [KERNELS.kernel(unit).machine_code((9, 0)) for unit in UNITS]
print(len(compilations), *(code.cubin[:4] == b"\x7fELF" for code in codes))
"""


@pytest.mark.skipif("TILEWRIGHT_DIST" in os.environ, reason="CI builds that wheel without kernels")
def test_kernels_that_came_with_it_are_not_compiled(installed: Path, tmp_path: Path) -> None:
    """By the newest libraries that it installs, whatever they were compiled by."""
    told = json.loads(ran(installed, ["tilewright", "kernels", "--json"], tmp_path))
    assert [(file["compute_capability"], file["useless"]) for file in told["files"]] == [([9, 0], None)]
    printed = ran(installed, ["python", "-c", SHIPPED], tmp_path)
    assert printed.split() == ["0", *["True"] * told["files"][0]["kernels"]]
    assert not (tmp_path / ".cache" / "tilewright" / "code").exists(), "nor kept"


@pytest.mark.parametrize("python", ["3.11", "3.14"])
@pytest.mark.parametrize("extra", COMPILERS)
def test_extras_can_be_met(extra: str, python: str) -> None:
    """Releases can be found that agree with each other; none is installed."""
    found = uv(
        *("pip", "compile", "--quiet", "--no-header", "--no-annotate", ROOT / "pyproject.toml"),
        *("--extra", extra, "--python-version", python, "--python-platform", "x86_64-manylinux_2_28"),
        *("--only-binary", ":all:"),
    )
    names = {line.partition("==")[0] for line in found.splitlines()}
    assert {"numba-cuda", "dask-cuda", COMPILERS[extra]} <= names
