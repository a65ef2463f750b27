"""How the CPU's loops are compiled, and when their machine code is taken from disk."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import pytest

from tilewright.kernels.cpu import loops as host_loops
from tilewright.kernels.gpu import fingerprint

LOOP = "def loop(value):\n    return add(value)\n"


def loaded(folder: Path, name: str) -> Any:
    found = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@contextlib.contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """To this process the disk is full as soon as a file has so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``fresh(addend, sources)``: a loop as a process has it that finds these sources. It adds ``addend``, which
    another module says. ``room``: how long a file on the disk may be, in bytes."""
    (tmp_path / "loop.py").write_text(LOOP)

    def fresh(addend: int, sources: str, room: int | None = None) -> Any:
        (tmp_path / "helper.py").write_text(f"def add(value):\n    return value + {addend}\n")
        with monkeypatch.context() as patch:
            patch.setattr(fingerprint, "source_hash", lambda _: sources)
            module = loaded(tmp_path, "loop")
            module.add = numba.njit(loaded(tmp_path, "helper").add)
            with contextlib.nullcontext() if room is None else files_of_at_most(room):
                return host_loops.kept(numba.njit(module.loop), (numba.int64,))

    return fresh


def result(loop: Any) -> tuple[int, int]:
    """Of the loop for 1, and how often its code was found on disk."""
    return loop(1), loop.stats.cache_hits.total()


def test_machine_code_is_kept_until_any_module_changes(fresh: Callable[..., Any]) -> None:
    """Also one that the loop only calls: Numba's own cache would give the old code."""
    assert result(fresh(1, "one")) == (2, 0)
    assert result(fresh(1, "one")) == (2, 1)
    assert result(fresh(20, "two")) == (21, 0)


def test_a_full_disk_costs_the_time_of_compiling(tmp_path: Path, fresh: Callable[..., Any]) -> None:
    """Also one with room for the index that says what is current, but not for the code."""
    assert result(fresh(1, "one", room=0)) == (2, 0)
    assert result(fresh(1, "one")) == (2, 0)
    (index,) = tmp_path.rglob("*.nbi")
    (code,) = tmp_path.rglob("*.nbc")
    between = 2 * index.stat().st_size
    assert between < code.stat().st_size
    assert result(fresh(20, "two", room=between)) == (21, 0)
    assert result(fresh(20, "two")) == (21, 0), "not the code of before"
    assert result(fresh(20, "two")) == (21, 1)


NOWHERE = """
import sys
import numpy as np
import tilewright
from tilewright.kernels import dot, histogram, matmul
from tilewright.kernels.cpu import thin
from tilewright.pipeline.transfer import zstd_loop
assert tilewright.__file__.startswith(sys.argv[1]), tilewright.__file__
a = np.arange(12).reshape(3, 4) << 20
assert (matmul(a, a.T, device="cpu") == a @ a.T).all()
assert dot(a[0], a[0], device="cpu") == a[0] @ a[0]
assert histogram(np.arange(9, dtype=np.uint8), by="codepoint", device="cpu").sum() == 9
assert thin._compiled_loop(thin._add_thin_product)
assert zstd_loop._loop()
print("whole")
"""


@pytest.mark.slow
def test_where_nothing_can_be_written_loops_are_compiled_anew(tmp_path: Path) -> None:
    """A read-only installation and a user without a home. Files stand where folders would be made, since nothing else
    stops root."""
    package = Path(__file__).parents[3] / "tilewright"
    shutil.copytree(package, tmp_path / "tilewright", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [path for path in tmp_path.rglob("*") if path.is_dir()]:
        (folder / "__pycache__").touch()
    here = tmp_path / "here"
    here.mkdir()
    (here / "~").touch()  # where a user lives whom nothing gives a home
    places = ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "PYTHONPYCACHEPREFIX")
    environment = {name: value for name, value in os.environ.items() if name not in places}
    done = subprocess.run(
        [sys.executable, "-c", NOWHERE, str(tmp_path)],
        cwd=here,
        env=environment | {"HOME": "~", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr
    assert sorted(path.name for path in here.iterdir()) == ["~"]
    assert not list(tmp_path.rglob("*.nbi"))


def test_a_loop_takes_only_the_types_it_was_compiled_for() -> None:
    loop = host_loops.compiled(_twice, numba.int64)
    assert loop(4) == 8
    assert len(loop.signatures) == 1
    with pytest.raises(TypeError, match="No matching definition"):
        loop("text")


def _twice(value: int) -> int:
    return 2 * value


def test_without_numbas_compiler_loops_are_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.core.config, "DISABLE_JIT", 1)
    assert host_loops.kept(_twice, (numba.int64,))(4) == 8
