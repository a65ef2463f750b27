"""Machine code that is kept: found again by what it depends on, whole or not at all, and never in the way."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numba import cuda, types

from tilewright.kernels.gemm.select import ladder
from tilewright.kernels.gpu import code_cache, compiled, fingerprint
from tilewright.kernels.gpu.code_cache import MachineCode
from tilewright.kernels.gpu.compiled import CompiledKernel, compile_kernel, compile_together
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.gpu.driver_error import DriverError
from tilewright.pipeline.transfer import file_upload

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")

SIGNATURE = types.void(types.Array(types.float32, 1, "C"), types.int64)
HOPPER = (9, 0)
CODE = MachineCode("_ZN5entryE", bytes(range(256)) * 40 + b"\n\0\n")
STEP = 3


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "code"
    monkeypatch.setenv(code_cache.ENVIRONMENT, str(place))
    return place


def scaling(factor: float) -> Callable[..., Any]:
    def scale(x: Any, n: int) -> None:
        i = cuda.grid(1)
        if i < n:
            x[i] = x[i] * factor + STEP

    return scale


def kernel(factor: float = 2.0, signature: Any = SIGNATURE, bounds: Any = (64, 1)) -> CompiledKernel:
    made = compile_kernel(scaling(factor), signature, launch_bounds=bounds)
    assert isinstance(made, CompiledKernel)
    return made


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*" + code_cache.SUFFIX))


def test_what_is_stored_is_loaded(folder: Path) -> None:
    assert code_cache.load("key") is None
    code_cache.store("key", CODE)
    assert code_cache.load("key") == CODE
    assert [path.name for path in folder.iterdir()] == ["key" + code_cache.SUFFIX]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other"])
def test_a_damaged_file_is_compiled_anew(damage: str, folder: Path, compilations: list[Any]) -> None:
    first = kernel().machine_code(HOPPER)
    (path,) = kept(folder)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    path.write_bytes({"cut": whole[:-1], "flipped": bytes(flipped), "empty": b"", "other": b"ELF"}[damage])
    second = kernel().machine_code(HOPPER)
    assert len(compilations) == 2
    assert second != first
    assert kernel().machine_code(HOPPER) == second
    assert len(compilations) == 2, "the file was replaced"


def test_a_hit_compiles_nothing(folder: Path, compilations: list[Any]) -> None:
    first = kernel()
    assert first.machine_code(HOPPER) == first.machine_code(HOPPER) == kernel().machine_code(HOPPER)
    assert len(compilations) == 1
    assert len(kept(folder)) == 1


def test_whatever_shapes_the_code_is_in_the_key(
    folder: Path, compilations: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel().machine_code(HOPPER)
    kernel(3.0).machine_code(HOPPER)
    kernel(bounds=(128, 1)).machine_code(HOPPER)
    kernel(signature=types.void(types.Array(types.float64, 1, "C"), types.int64)).machine_code(HOPPER)
    kernel().machine_code((8, 0))
    monkeypatch.setattr(sys.modules[__name__], "STEP", 4)
    kernel().machine_code(HOPPER)
    monkeypatch.setattr(fingerprint, "surroundings", lambda: ("another version",))
    kernel().machine_code(HOPPER)
    assert len(compilations) == 7
    assert len(kept(folder)) == 7


def test_the_fingerprint_looks_through_device_functions_and_tables() -> None:
    def made(offset: int, table: np.ndarray, inline: str = "always") -> Callable[..., Any]:
        @cuda.jit(device=True, inline=inline)
        def shifted(value: Any) -> Any:
            return value + offset

        def function(x: Any) -> None:
            x[0] = shifted(x[0]) + table[1]

        return function

    table = np.arange(4)
    changed = table.copy()
    changed[3] = 9
    functions = [made(1, table), made(2, table), made(1, changed), made(1, table, "never")]
    assert len({fingerprint.fingerprint(function) for function in functions}) == 4
    assert fingerprint.fingerprint(made(1, table.copy())) == fingerprint.fingerprint(functions[0])


def test_what_cannot_be_told_is_not_kept(folder: Path, compilations: list[Any]) -> None:
    class Opaque:
        pass

    secret = Opaque()

    def function(x: Any, n: int) -> None:
        x[0] = secret

    with pytest.raises(fingerprint.Unknown, match="Opaque"):
        fingerprint.fingerprint(function)
    compile_kernel(function, SIGNATURE).machine_code(HOPPER)
    assert len(compilations) == 1
    assert not folder.exists()


@pytest.mark.parametrize(("most", "least"), [(8, 70), pytest.param(None, 300, marks=pytest.mark.slow)])
def test_every_kernel_of_the_ladder_has_a_fingerprint(most: int | None, least: int) -> None:
    """Of many variants, which take three seconds, the first of each rung in every run."""
    variants = [variant for rung in ladder() for variant in itertools.islice(rung.variants(), most)]
    found = {
        (variant.name, fingerprint.fingerprint(variant.function, str(variant.signature), variant.options))
        for variant in variants
    }
    names = {name for name, _ in found}
    assert len(names) > least
    assert len({key for _, key in found}) == len(found), "two variants share a fingerprint"


@dataclass(frozen=True)
class Told:
    """What a process says of kernels."""

    fingerprints: list[str]
    code: str
    bytecode: list[Path]
    """What Python compiled of the first of our modules, by the time that it ended."""
    kept: list[Path]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    """Python compiles our modules in the first process, and reads what it compiled in the second, with other hashes.

    The first compiles a kernel for sm_90a, the second cannot. From 2.5 on NumPy has no ``row_stack``, which numba-cuda
    0.30 looks up; no process is left with one.
    """
    bytecode, folder = tmp_path_factory.mktemp("bytecode"), tmp_path_factory.mktemp("code")
    text = (
        "import itertools, sys, zlib; sys.path.insert(0, {path!r})\n"
        "import numpy; vars(numpy).pop('row_stack', None)\n"
        "import numba.cuda\n"  # which would take longest to compile
        f"sys.pycache_prefix, sys.dont_write_bytecode = {str(bytecode)!r}, False\n"
        "from tilewright.kernels.gemm.select import ladder\n"
        "from tilewright.kernels.gpu.fingerprint import fingerprint, surroundings\n"
        "for rung in ladder():\n"
        "    for variant in itertools.islice(rung.variants(), 0, 10, 9):\n"  # to make all of them takes long
        "        print(fingerprint(variant.function, surroundings()))\n"
        "sys.pycache_prefix, sys.dont_write_bytecode = None, True\n"  # the tests' modules are none of ours
        "from tests.kernels.gpu.test_code_cache import HOPPER, kernel\n"
        "from tilewright.kernels.gpu import compiled\n"
        "if {forbidden}:\n"
        "    compiled.compile_function = None\n"
        "code = kernel().machine_code(HOPPER)\n"
        "print(code.entry, len(code.cubin), zlib.crc32(code.cubin), hasattr(numpy, 'row_stack'))\n"
    )
    told = []
    for forbidden in (False, True):
        path = str(Path(__file__).parents[3])
        done = subprocess.run(
            [sys.executable, "-c", text.format(path=path, forbidden=forbidden)],
            env=os.environ | {"PYTHONHASHSEED": str(1 + forbidden), code_cache.ENVIRONMENT: str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        *fingerprints, code = done.stdout.splitlines()
        told.append(Told(fingerprints, code, list(bytecode.rglob("select.*.pyc")), kept(folder)))
    return told


@pytest.mark.more
def test_fingerprints_are_the_same_in_every_process(two_processes: list[Told]) -> None:
    first, second = two_processes
    assert first.bytecode
    assert first.fingerprints == second.fingerprints
    assert len(first.fingerprints) > 20


@pytest.mark.parametrize("word", ["off", "OFF", "0"])
def test_it_can_be_turned_off(
    word: str, tmp_path: Path, compilations: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(code_cache.ENVIRONMENT, word)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        kernel().machine_code(HOPPER)
    assert len(compilations) == 2
    assert not list(tmp_path.iterdir())


def test_it_lies_in_the_user_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(code_cache.ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert code_cache.directory() == tmp_path / "tilewright" / "code"


@pytest.mark.parametrize("wanted", ["", "~/code"])
def test_a_user_without_a_home_compiles_anew(
    wanted: str, compilations: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(code_cache.ENVIRONMENT, wanted)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "~")  # what Python takes for the home of a user whom nothing gives one
    assert code_cache.directory() is None
    for _ in range(2):
        kernel().machine_code(HOPPER)
    assert len(compilations) == 2


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, compilations: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")  # even root cannot make a folder in a file
    monkeypatch.setenv(code_cache.ENVIRONMENT, str(tmp_path / "file" / "code"))
    for _ in range(2):
        kernel().machine_code(HOPPER)
    assert len(compilations) == 2


def test_a_full_disk_leaves_no_draft(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(code_cache.os, "replace", full)
    code_cache.store("key", CODE)
    assert list(folder.iterdir()) == []


def test_the_folder_does_not_grow_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        code_cache.store(f"key{number}", CODE)
        os.utime(folder / f"key{number}{code_cache.SUFFIX}", (1000 + number, 1000 + number))
    abandoned, young = folder / "old.draft", folder / "new.draft"
    abandoned.write_text("")
    os.utime(abandoned, (1000, 1000))
    young.write_text("")
    assert code_cache.load("key0") == CODE, "used today: it is kept, and key1 is the oldest"
    monkeypatch.setattr(
        code_cache, "CAPACITY_NBYTES", 3 * (folder / f"key1{code_cache.SUFFIX}").stat().st_size
    )
    code_cache.tidy(folder)
    assert [path.name for path in kept(folder)] == [f"key{n}{code_cache.SUFFIX}" for n in (0, 4, 5)]
    assert not abandoned.exists()
    assert young.exists()


RACE = """
import sys, time
from tilewright.kernels.gpu import code_cache
from tilewright.kernels.gpu.code_cache import MachineCode
seed = int(sys.argv[1])
until = time.monotonic() + 1.5
rounds = 0
while time.monotonic() < until:
    code_cache.store("key", MachineCode(f"entry{seed}", bytes([seed]) * 200_000))
    found = code_cache.load("key")
    assert found is not None and len(found.cubin) == 200_000, "half a file was seen"
    assert set(found.cubin) == {int(found.entry.removeprefix("entry"))}, "two files were mixed"
    rounds += 1
print(rounds)
"""


def test_processes_race(folder: Path) -> None:
    running = [
        subprocess.Popen([sys.executable, "-c", RACE, str(seed)], stdout=subprocess.PIPE, text=True)
        for seed in (1, 2, 3)
    ]
    told = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert all(int(rounds) > 5 for rounds in told)
    assert len(list(folder.iterdir())) == 1, "no drafts are left"


def test_threads_compile_a_kernel_once(folder: Path, compilations: list[Any]) -> None:
    shared = kernel()
    with ThreadPoolExecutor(8) as pool:
        codes = set(pool.map(lambda _: shared.machine_code(HOPPER), range(64)))
    assert len(codes) == len(compilations) == 1


def test_compiling_together_makes_what_is_missing(folder: Path, compilations: list[Any]) -> None:
    kernels = [kernel(float(factor)) for factor in range(6)]
    kernels[2].machine_code(HOPPER)
    compile_together(kernels, HOPPER)
    assert len(compilations) == 6
    compile_together(kernels, HOPPER)
    assert len(compilations) == 6


@pytest.mark.more
def test_real_machine_code_is_found_by_another_process(two_processes: list[Told]) -> None:
    """The same code in a process in which compiling fails."""
    first, second = two_processes
    assert first.code == second.code
    assert first.code.startswith("_Z")
    assert first.code.endswith(" False")
    assert first.kept == second.kept
    (path,) = first.kept
    assert b"\x7fELF" in path.read_bytes()


class FakeDriver(SimpleNamespace):
    """As much of the driver as loads machine code; it refuses all of ``bad``."""

    def __init__(self, bad: tuple[bytes, ...]) -> None:
        attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
        super().__init__(CUfunction_attribute=attribute, asked=[], loaded=[])
        self.CUfunction = self.CUkernel = self.CUdevice = int
        self.refusal = 209  # CUDA_ERROR_NO_BINARY_FOR_GPU
        self._bad = bad

    def cuLibraryLoadData(self, code: bytes, *_: Any) -> tuple[Any, int]:
        self.loaded.append(code)
        return (self.refusal, 0) if code in self._bad else (0, 7)

    def cuLibraryGetKernel(self, library: int, name: bytes) -> tuple[int, int]:
        return 0, 1000 + library + len(name)

    def cuKernelSetAttribute(self, *asked: Any) -> tuple[int]:
        self.asked.append(asked)
        return (0,)


def test_code_that_the_driver_refuses_is_compiled_anew(
    folder: Path, compilations: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import cuda.bindings

    monkeypatch.setattr(compiled, "device_capability", lambda device: HOPPER)
    bad = kernel().machine_code(HOPPER).cubin
    driver = FakeDriver((bad,))
    monkeypatch.setattr(cuda.bindings, "driver", driver)
    loaded = compile_kernel(scaling(2.0), SIGNATURE, launch_bounds=(64, 1), shared_nbytes=100_000)
    assert loaded.function(0) == loaded.function(0) == 1000 + 7 + len(b"entry2")
    assert driver.loaded == [bad, b"codecode"]
    assert driver.asked == [(8, 100_000, 1013, 0)], "once, for the device"
    assert loaded.function(1) == 1013
    assert len(driver.asked) == 2, "each device is asked"
    assert len(driver.loaded) == 2, "one library serves both"
    assert len(compilations) == 2
    always = FakeDriver((b"code" * 3, b"code" * 4, b"code" * 5))
    monkeypatch.setattr(cuda.bindings, "driver", always)
    with pytest.raises(DriverError, match="CUDA_ERROR_NO_BINARY_FOR_GPU"):
        kernel(5.0).function(0)
    assert len(always.loaded) == 1, "what was compiled here is not compiled again"
    always.refusal = 2
    with pytest.raises(DriverError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        kernel(6.0).function(0)
    assert len(always.loaded) == 2, "without memory, other code would be refused too"


def test_whatever_code_is_made_of_counts_among_its_sources() -> None:
    """All of the layer, and beside a loop of another layer what that calls there."""
    kernels = Path(fingerprint.__file__).resolve().parents[1]
    found = set(fingerprint.source_files())
    assert found == set(kernels.rglob("*.py"))
    assert {kernels / "numbers.py", kernels / "ptx/memory.py", kernels / "cpu/loops.py"} <= found
    assert set(fingerprint.source_files(kernels / "cpu")) == found
    transfer = Path(file_upload.__file__).resolve().parent
    assert set(fingerprint.source_files(transfer)) - found == set(transfer.glob("*.py"))
    assert fingerprint.source_hash(transfer) != fingerprint.source_hash()
