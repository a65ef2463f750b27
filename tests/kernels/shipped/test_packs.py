"""Code that comes with an installation: found by what it was made from, and by nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.gpu.test_code_cache import FakeDriver, scaling
from tilewright.kernels.gpu import code_cache, compiled, fingerprint
from tilewright.kernels.gpu.code_cache import MachineCode
from tilewright.kernels.gpu.compiled import CompiledKernel, compile_kernel
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.histograms import documents
from tilewright.kernels.shipped import lacking, packs
from tilewright.workflows.terminal.compilations import tell_compilations

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")

HOPPER = (9, 0)
SHIPPED = MachineCode("_ZN7shippedE", bytes(range(256)) * 40)
LINKER = (13, 5)


def kernel(signature: Any = documents.CLEAR_SIGNATURE, bounds: Any = None) -> CompiledKernel:
    """A small kernel of this package, as if nobody had asked for it."""
    made = compile_kernel(documents.clear_large, signature, launch_bounds=bounds)
    assert isinstance(made, CompiledKernel)
    return made


def write(folder: Path, source: str = "", layout: str = "", linker: tuple[int, int] = LINKER) -> Path:
    folder.mkdir(exist_ok=True)
    one = kernel()
    key = one.shipped_key()
    assert key is not None
    path = folder / packs.file_name(HOPPER)
    kernels = {key: (SHIPPED, layout or one.layout.format), "other": (SHIPPED, "q")}
    packs.write(path, source or fingerprint.source_hash(), linker, kernels)
    packs.opened.cache_clear()
    return path


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled here, other tests of the process have not."""
    monkeypatch.setattr(lacking, "_compilations", [])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the environment names, with nothing in it; the user's cache is empty too."""
    monkeypatch.setenv(packs.ENVIRONMENT, str(tmp_path / "packs"))
    monkeypatch.setenv(code_cache.ENVIRONMENT, str(tmp_path / "code"))
    return tmp_path / "packs"


def test_what_is_shipped_is_neither_compiled_nor_kept(
    folder: Path, tmp_path: Path, compilations: list[Any]
) -> None:
    write(folder)
    assert kernel().machine_code(HOPPER) == SHIPPED
    assert not compilations
    assert not (tmp_path / "code").exists()
    assert kernel().machine_code((8, 0)) != SHIPPED, "it is of one capability"


def test_what_a_file_lacks_is_told(
    folder: Path, compilations: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(folder)
    kernel().machine_code(HOPPER)
    assert lacking.compilations() == ()
    tell_compilations()
    kernel(bounds=(64, 1)).machine_code(HOPPER)
    kernel().machine_code((8, 0))  # of which there is no file
    assert [(one.kernel, one.beyond) for one in lacking.compilations()] == [
        ("clear_large", path),
        ("clear_large", None),
    ]
    assert len(compilations) == 2
    assert capsys.readouterr().err == ""
    tell_compilations()
    told = capsys.readouterr().err
    assert re.fullmatch(rf"compiled 1 kernel in \d\.\d s, which {path} has not got: clear_large\n", told)


def test_nothing_shipped_is_no_error(
    folder: Path, compilations: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernel().machine_code(HOPPER) == MachineCode("entry1", b"code")
    write(folder)
    monkeypatch.setenv(packs.ENVIRONMENT, "off")
    assert kernel().machine_code(HOPPER) == MachineCode("entry1", b"code")
    assert len(compilations) == 1


@pytest.mark.parametrize("changed", ["constant", "signature", "bounds", "function"])
def test_another_kernel_is_compiled(
    changed: str, folder: Path, compilations: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder)
    one = kernel()
    if changed == "constant":
        monkeypatch.setattr(documents, "LARGE", documents.LARGE + 1)
    elif changed == "signature":
        one = kernel(signature=documents.CLEAR_SIGNATURE.replace(return_type=documents.types.int64))
    elif changed == "bounds":
        one = kernel(bounds=(64, 1))
    else:
        one = CompiledKernel(documents.source(), documents.CLEAR_SIGNATURE, None, 0)
    assert one.machine_code(HOPPER) != SHIPPED
    assert len(compilations) == 1


@pytest.mark.parametrize("changed", ["source", "layout", "linker", "debug", "opt"])
def test_code_that_may_not_fit_is_left_out(
    changed: str, folder: Path, compilations: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from numba.cuda.core import config

    more: dict[str, Any] = {"source": {"source": "0" * 64}, "layout": {"layout": "QQqqQqiQQqqQ"}}.get(
        changed, {}
    )
    write(folder, **more)
    if changed == "linker":
        monkeypatch.setattr(fingerprint, "driver_version", lambda: 12080)
    elif changed == "debug":
        monkeypatch.setattr(config, "CUDA_DEBUGINFO_DEFAULT", 1)
    elif changed == "opt":
        monkeypatch.setattr(config, "OPT", 0)
    assert kernel().machine_code(HOPPER) != SHIPPED
    assert len(compilations) == 1


@pytest.mark.parametrize("version", [13000, 13050, 14010])
def test_a_driver_of_the_same_major_version_or_a_later_one_will_do(
    version: int, folder: Path, compilations: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder)
    monkeypatch.setattr(fingerprint, "driver_version", lambda: version)
    assert kernel().machine_code(HOPPER) == SHIPPED
    assert not compilations


def test_it_is_said_why_a_file_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    head = packs.Head(fingerprint.source_hash(), LINKER, {})
    assert packs.why_not(head) is None
    monkeypatch.setattr(fingerprint, "driver_version", lambda: 12080)
    assert packs.why_not(head) == "it was made by CUDA 13.5, and the driver here is of CUDA 12.8"
    assert "another source" in str(packs.why_not(replace(head, source="0")))


def _without_the_end(content: bytes) -> bytes:
    return content[:-1]


def _flipped(content: bytes) -> bytes:
    return content[:-20] + bytes([content[-20] ^ 1]) + content[-19:]


def _in_the_head(content: bytes) -> bytes:
    return content[:200]


def _of_another_form(content: bytes) -> bytes:
    return content.replace(packs.MAGIC, b"tilewright kernels 1\n")


def _without_an_entry(content: bytes) -> bytes:
    return content.replace(b'"kernels"', b'"kernals"')


def _of_a_great_length(content: bytes) -> bytes:
    at = len(packs.MAGIC) + packs.LENGTH_NBYTES - 1
    return content[:at] + b"\xff" + content[at + 1 :]


def _with_another_offset(content: bytes) -> bytes:
    return content.replace(b"[0, ", b"[7, ", 1)


@pytest.mark.parametrize(
    "damage",
    [
        _of_a_great_length,
        _with_another_offset,
        _without_the_end,
        _flipped,
        _in_the_head,
        _of_another_form,
        _without_an_entry,
        lambda _: b"",
    ],
)
def test_a_damaged_file_counts_as_missing(
    damage: Callable[[bytes], bytes], folder: Path, compilations: list[Any]
) -> None:
    path = write(folder)
    # The kernel looked for is the last in the file, so that its end is damaged.
    key = kernel().shipped_key()
    assert key is not None
    packs.write(path, fingerprint.source_hash(), LINKER, {key: (SHIPPED, kernel().layout.format)})
    path.write_bytes(damage(path.read_bytes()))
    packs.opened.cache_clear()
    assert kernel().machine_code(HOPPER) != SHIPPED
    assert len(compilations) == 1


def test_what_the_driver_refuses_is_compiled_and_kept(
    folder: Path, compilations: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import cuda.bindings

    monkeypatch.setattr(compiled, "device_capability", lambda device: HOPPER)
    fingerprint.surroundings()  # which asks the driver for its version, once
    monkeypatch.setattr(fingerprint, "driver_version", lambda: 13050)
    write(folder)
    for _ in range(2):  # the second finds in the user's cache what the first has compiled
        driver = FakeDriver((SHIPPED.cubin,))
        monkeypatch.setattr(cuda.bindings, "driver", driver)
        assert kernel().function(0) == 1000 + 7 + len(b"entry1")
        assert driver.loaded == [SHIPPED.cubin, b"code"]
    assert len(compilations) == 1


def test_where_files_changed_since_the_process_began_nothing_is_used(
    folder: Path, compilations: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may run what was in them before, such as that of a package that was replaced under it."""
    write(folder)
    newest = max(path.stat().st_ctime for path in fingerprint.source_files())
    packs._source.cache_clear()
    monkeypatch.setattr(packs, "_begun", newest - 1)
    try:
        assert kernel().machine_code(HOPPER) != SHIPPED
        assert "newer than this process" in str(packs.why_not(packs.Head("", LINKER, {})))
    finally:
        packs._source.cache_clear()
    assert len(compilations) == 1


def test_the_home_of_a_user_who_is_not_there_is_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(packs.ENVIRONMENT, "~nobody-of-this-name/kernels")
    assert packs.directory() is None


def test_only_kernels_of_this_package_can_be_shipped() -> None:
    own = compile_kernel(scaling(2.0), documents.types.void(documents.types.int64))
    assert own.shipped_key() is None
    assert kernel().shipped_key() == kernel().shipped_key()


def test_the_head_is_json(folder: Path) -> None:
    content = write(folder).read_bytes()
    start = len(packs.MAGIC) + packs.LENGTH_NBYTES
    length = int.from_bytes(content[len(packs.MAGIC) : start], "little")
    start += packs.SUM_NBYTES
    assert set(json.loads(content[start : start + length])) == {"source", "linker", "kernels"}
