"""How the CPU's loops are compiled, and when their machine code is taken from disk."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numba
import pytest

from tilewright.kernels import fingerprint, host_loops

LOOP = "def loop(value):\n    return add(value)\n"


def loaded(folder: Path, name: str) -> Any:
    found = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_machine_code_is_kept_until_any_module_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that the loop only calls: Numba's own cache would give the old code."""

    def fresh(helper: str, sources: str) -> Any:
        (tmp_path / "helper.py").write_text(helper)
        with monkeypatch.context() as patch:
            patch.setattr(fingerprint, "source_hash", lambda: sources)
            module = loaded(tmp_path, "loop")
            module.add = numba.njit(loaded(tmp_path, "helper").add)
            return host_loops.kept(numba.njit(module.loop), (numba.int64,))

    (tmp_path / "loop.py").write_text(LOOP)
    first = fresh("def add(value):\n    return value + 1\n", "one")
    assert (first(1), first.stats.cache_hits.total()) == (2, 0)
    again = fresh("def add(value):\n    return value + 1\n", "one")
    assert (again(1), again.stats.cache_hits.total()) == (2, 1)
    changed = fresh("def add(value):\n    return value + 20\n", "two")
    assert (changed(1), changed.stats.cache_hits.total()) == (21, 0)


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
