"""The peers of the product's benchmark: cuBLAS is called as its headers say, and the fastest setting is the peer."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.workflows.fake_cublas import PROPOSALS, fake
from tilewright.kernels.errors import OptionError
from tilewright.workflows.bench import common, cublas, gemm, gemm_peers
from tilewright.workflows.bench.common import (
    BenchReport,
    CallsReport,
    Contestant,
    Row,
    Search,
    WrongAnswer,
    measure_calls,
    search,
)
from tilewright.workflows.bench.cublas import Arithmetic, Cublas, CublasError, Sides, Stored
from tilewright.workflows.cli import cli

# As cublas_api.h, cublasLt.h and library_types.h of CUDA 13.0 have them.
PUBLISHED = {
    "OP_N": 0,
    "OP_T": 1,
    "GEMM_DEFAULT": -1,
    "GEMM_DEFAULT_TENSOR_OP": 99,
    "GEMM_AUTOTUNE": 999,
    "COMPUTE_32F": 68,
    "COMPUTE_32F_PEDANTIC": 69,
    "COMPUTE_64F": 70,
    "COMPUTE_64F_PEDANTIC": 71,
    "COMPUTE_32I": 72,
    "COMPUTE_32F_FAST_16F": 74,
    "COMPUTE_32F_FAST_16BF": 75,
    "COMPUTE_32F_FAST_TF32": 77,
    "COMPUTE_32F_EMULATED_16BFX9": 78,
    "MATMUL_DESC_TRANSA": 3,
    "MATMUL_DESC_TRANSB": 4,
    "MATMUL_DESC_FAST_ACCUM": 25,
    "MATMUL_PREF_MAX_WORKSPACE_BYTES": 1,
}
PUBLISHED_TYPES = {
    "float32": 0,  # CUDA_R_32F
    "float64": 1,  # CUDA_R_64F
    "float16": 2,  # CUDA_R_16F
    "int8": 3,  # CUDA_R_8I
    "complex64": 4,  # CUDA_C_32F
    "complex128": 5,  # CUDA_C_64F
    "int32": 10,  # CUDA_R_32I
    "float8_e4m3fn": 28,  # CUDA_R_8F_E4M3
    "float8_e5m2": 29,  # CUDA_R_8F_E5M2
}


def test_numbers_and_structures_are_those_of_the_headers() -> None:
    assert {name: getattr(cublas, name) for name in PUBLISHED} == PUBLISHED
    assert {
        str(kind): number for kind, number in cublas.DATA_TYPES.items() if number != 14
    } == PUBLISHED_TYPES
    assert cublas.DATA_TYPES[gemm_peers.BFLOAT16] == 14  # CUDA_R_16BF
    assert ctypes.sizeof(cublas.MatmulAlgorithm) == 64
    heuristic = cublas.MatmulHeuristicResult
    assert ctypes.sizeof(heuristic) == 96
    assert [getattr(heuristic, name).offset for name, _ in heuristic._fields_] == [0, 64, 72, 76, 80]


@pytest.mark.parametrize(
    ("operands", "result", "compute", "scale"),
    [
        ("int8", "int32", cublas.COMPUTE_32I, "int32"),
        ("float16", "float16", cublas.COMPUTE_32F, "float32"),
        ("float32", "float32", cublas.COMPUTE_32F_FAST_TF32, "float32"),
        ("float64", "float64", cublas.COMPUTE_64F, "float64"),
        ("complex64", "complex64", cublas.COMPUTE_32F, "complex64"),
        ("complex128", "complex128", cublas.COMPUTE_64F_PEDANTIC, "complex128"),
    ],
)
def test_alpha_has_the_type_that_the_library_reads(
    operands: str, result: str, compute: int, scale: str
) -> None:
    assert Arithmetic(np.dtype(operands), np.dtype(result), compute).scale == scale


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that opens the fake library, and host memory in place of a device's."""
    with contextlib.ExitStack() as stack:

        def enter(library: Any) -> Cublas:
            workspace = np.empty(64, np.uint8)
            blas = Cublas(library, library, workspace.ctypes.data, cublas.WORKSPACE_NBYTES)
            stack.callback(blas.close)
            return blas

        monkeypatch.setattr(gemm_peers, "address", lambda array: array.ctypes.data)
        monkeypatch.setattr(gemm_peers, "turned", lambda array: np.ascontiguousarray(array.T))
        monkeypatch.setattr(gemm_peers, "to_device", np.ascontiguousarray)
        monkeypatch.setattr(gemm_peers, "library", lambda name: None)
        yield enter


def problem_of(
    dtype: str,
    result: str,
    m: int = 12,
    n: int = 20,
    k: int = 8,
    precision: str = "full",
    largest: int | None = None,
) -> gemm_peers.Problem:
    rng = np.random.default_rng(m)
    a, b = (rng.integers(-9, 9, shape).astype(dtype) for shape in ((m, k), (k, n)))
    if a.dtype.kind == "c":
        a, b = a + 1j * a[::-1], b - 2j * b[:, ::-1]
        a, b = a.astype(dtype), b.astype(dtype)
    out = np.empty((m, n), result)
    wanted = a.astype(result) @ b.astype(result)

    def check(run: Any) -> str | None:
        out.view(np.uint8)[...] = 0xFF
        run()
        return None if np.array_equal(out, wanted) else "something else"

    return gemm_peers.Problem(
        Sides(m, n, k), np.dtype(dtype), np.dtype(result), precision, largest, (a, b), a, b, out, check
    )


@pytest.mark.parametrize(
    ("dtype", "result", "precision"),
    [
        ("float32", "float32", "full"),
        ("float32", "float32", "tf32"),
        ("float32", "float32", "split"),
        ("float32", "float32", "fp16"),
        ("float16", "float16", "full"),
        ("float16", "float32", "full"),
        ("float64", "float64", "full"),
        ("int8", "int32", "full"),
        ("complex64", "complex64", "full"),
    ],
)
def test_every_layout_is_asked_for_as_the_headers_say(
    opened: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, result: str, precision: str
) -> None:
    """The fake computes what the arguments say, by columns: an operand too many or turned the wrong way shows."""
    monkeypatch.setattr(gemm_peers, "PIECE", 8)
    library, called = fake()
    problem = problem_of(dtype, result, precision=precision)
    found = gemm_peers._direct(problem, opened(library))
    right, refused = common.taken(found)
    assert all("CublasError" in reason for _, reason in refused), "a library may refuse, but nothing is wrong"
    names = {contestant.name.partition(", operands")[0] for contestant in right}
    layouts = {"TN"} if dtype == "int8" else set(cublas.LAYOUTS)
    for layout in layouts:
        label = " tf32" * (precision == "tf32")
        assert f"cublasGemmEx{label} {layout}" in names
    for layout in layouts & {"NN", "TN"}:
        for suffix in (", tensor op", ", n in pieces of 8", ", m in pieces of 8"):
            assert f"cublasGemmEx{label} {layout}{suffix}" in names
        proposals = [name for name in names if name.startswith(f"cublasLt{label} {layout}")]
        assert len(proposals) == PROPOSALS - 1, "the one that the heuristics call unsupported is left out"
    assert {"cublasSetWorkspace_v2", "cublasGemmEx", "cublasLtMatmul"} <= set(called)
    assert all(contestant.peer and contestant.caller == "cuBLAS" for contestant in found)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_half_of_a_symmetric_product_is_asked_of_syrk(opened: Any, dtype: str) -> None:
    library, called = fake()
    plain = problem_of(dtype, dtype, m=20)
    wanted = plain.b.T @ plain.b

    def check_half(run: Any) -> str | None:
        plain.out.view(np.uint8)[...] = 0xFF
        run()
        right = np.array_equal(np.tril(plain.out), np.tril(wanted))
        return None if right and (np.triu(plain.out, 1) != np.triu(wanted, 1)).any() else "something else"

    problem = dataclasses.replace(plain, a=np.ascontiguousarray(plain.b.T), check_half=check_half)
    found = list(gemm_peers._halves(problem, opened(library)))
    assert [contestant.name for contestant in found] == ["syrk by rows", "syrk by columns"]
    assert common.taken(found)[1] == []
    assert sum("syrk" in name for name in called) == 2


def test_a_complex_product_by_three_is_shown_and_is_no_peer(opened: Any) -> None:
    library, _ = fake()
    contestant = gemm_peers._by_three_products(problem_of("complex64", "complex64"), opened(library))
    assert contestant.check() is None
    assert not contestant.peer
    assert "weaker" in contestant.name


def test_float8_is_asked_of_cublaslt_alone(opened: Any) -> None:
    """With its fast sums, too, whose bound is weaker: no peer."""
    problem = problem_of("float8_e4m3fn", "float32")
    for fast in (False, True):
        library, called = fake()
        found = list(gemm_peers._float8(problem, opened(library), fast_sums=fast))
        assert common.taken(found)[1] == []
        assert len(found) == PROPOSALS - 1
        assert ("fast sums" in called) is fast
        assert "cublasGemmEx" not in called
        for contestant in found:
            assert contestant.name.startswith("cublasLt TN")
            assert contestant.peer is not fast
            assert ("weaker" in contestant.name) is fast
    assert gemm_peers._direct(problem, opened(fake()[0])) == []


def test_small_integers_have_cublas_on_converted_operands_for_a_peer(opened: Any) -> None:
    library, _ = fake()
    found = gemm_peers._direct(problem_of("int32", "int32", largest=9), opened(library))
    right, _ = common.taken(found)
    assert {"cublasGemmEx TN, operands known to be small, converted to int8 beforehand"} <= {
        contestant.name for contestant in right
    }
    deep = problem_of("int32", "int32", k=8, largest=1 << 14)
    assert not deep.exact_in(gemm_peers.INT32), "8 × 2**28 is 2**31"
    assert deep.exact_in(gemm_peers.FLOAT64)
    whole = problem_of("int32", "int32")
    assert not gemm_peers._direct(whole, opened(library)), (
        "full-range integers have no exact product in cuBLAS"
    )


def test_a_wrong_peer_is_refused_and_the_rest_compete(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library, _ = fake(wrong=(1, 0))
    found = gemm_peers._direct(problem_of("float32", "float32"), opened(library))
    monkeypatch.setattr(common, "SEARCH_SAMPLE_SECONDS", 1e-6)
    kept, searched = search("case", 1.0, found, on_gpu=False, seconds=1e-6)
    refused = dict(searched.refused)
    assert refused["cublasGemmEx TN"] == "wrong: something else"
    assert "cublasGemmEx TN" not in {row.contestant for row in searched.tried}
    assert "cublasGemmEx NN" in {row.contestant for row in searched.tried}
    assert not {contestant.name for contestant in kept} & set(refused)
    assert "not taken (wrong: something else): cublasGemmEx TN" in searched.describe("Tflop/s", 1e12)


class Wall:
    """Time that passes only while contestants run, and when they are waited for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.pending = 0.0
        patch.setattr(common, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def contestant(self, name: str, launch: float, device: float, **more: Any) -> Contestant:
        """A call that takes ``launch`` of the host, and leaves ``device`` to be waited for."""

        def run() -> None:
            self.now += launch
            self.pending = max(0.0, self.pending - launch) + device

        return Contestant(name, run, lambda: None, **more)

    def synchronize(self) -> None:
        self.now += self.pending
        self.pending = 0.0


def test_operands_live_as_long_as_the_calls_that_read_them(opened: Any) -> None:
    """Nothing but the contestants holds them here; memory that was given back is written over."""
    library, _ = fake()
    found = gemm_peers._direct(problem_of("float32", "float32", 96, 80, 64), opened(library))
    rubbish = [np.full(shape, np.nan, np.float32) for shape in ((96, 64), (64, 80)) for _ in range(8)]
    right, refused = common.taken(found)
    assert not [name for name, reason in refused if "wrong" in reason]
    assert len(right) > len(cublas.LAYOUTS)
    assert rubbish


def test_the_fastest_of_all_and_of_each_caller_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = Wall(monkeypatch)
    seconds = {"a1": 3, "a2": 1, "a3": 2, "b1": 9, "b2": 8, "c1": 4}
    candidates = [
        wall.contestant(name, float(value), 0.0, peer=True, caller=name[0]) for name, value in seconds.items()
    ]
    kept, searched = search("case", 1.0, candidates, on_gpu=False)
    assert [contestant.name for contestant in kept] == ["a2", "a3", "c1", "b2"]
    assert [row.contestant for row in searched.tried] == ["a2", "a3", "a1", "c1", "b2", "b1"]
    assert searched.describe("op/s", 1.0).startswith(
        "case: 6 settings of peers searched; op/s of the fastest: a2 1.00, a3 0.500, a1 0.333, c1 0.250"
    )
    assert search("case", 1.0, [], on_gpu=False) == ([], Search("case", (), ()))


def test_a_setting_that_a_library_does_not_take_is_named_with_the_reason() -> None:
    def refuse() -> None:
        raise CublasError("cublasGemmEx", 15)

    kept, searched = search("case", 1.0, [Contestant("setting", refuse, refuse, peer=True)], on_gpu=False)  # type: ignore[arg-type]
    assert not kept
    assert searched.to_json()["refused"] == {
        "setting": "CublasError: cublasGemmEx: CUBLAS_STATUS_NOT_SUPPORTED"
    }


def test_ratios_are_taken_against_the_strongest_peer() -> None:
    rows = tuple(
        Row("c", name, peer, 1e12, seconds, seconds, seconds, 5)
        for name, peer, seconds in (("slow", True, 4.0), ("fast", True, 1.0), ("ours", False, 2.0))
    )
    report = BenchReport("title", "Tflop/s", 1e12, {}, rows)
    assert [report.ratio(row) for row in rows] == [0.25, 1.0, 0.5]
    text = str(report)
    assert "slow (weaker peer)" in text
    assert "fast (peer)" in text


def test_single_calls_wait_and_queued_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of 16 of the host and 48 of the device takes 64 by itself; in a row the host's share shows once."""
    wall = Wall(monkeypatch)
    several = [wall.contestant("ours", 16e-6, 48e-6), wall.contestant("peer", 8e-6, 80e-6, peer=True)]
    rows = measure_calls("case", 1e9, several, synchronize=wall.synchronize, seconds=0.01)
    assert [row.single for row in rows] == pytest.approx([64e-6, 88e-6])
    assert [row.queued for row in rows] == pytest.approx(
        [(16 + 20 * 48) * 1e-6 / 20, (8 + 20 * 80) * 1e-6 / 20]
    )
    assert {row.in_a_row for row in rows} == {common.QUEUED}
    report = CallsReport("Tflop/s", 1e12, tuple(rows))
    assert report.ratio(rows[0], "single") == pytest.approx(88 / 64)
    found = json.loads(json.dumps(report.to_json()))[0]
    assert (found["single_rate"], found["queued_ratio"]) == pytest.approx((1e9 / 64e-6 / 1e12, 1608 / 976))
    text = common.shown(report.table())
    assert re.search(r"ours +│ +64\.0 │ +15\.6 │ +1\.38 │ +48\.8 │ +20\.5 │ +1\.65", text), text


def test_long_calls_are_queued_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = Wall(monkeypatch)
    (row,) = measure_calls("c", 1.0, [wall.contestant("slow", 0.0, 0.125)], synchronize=wall.synchronize)
    assert (row.single, row.queued, row.in_a_row) == (0.125, 0.125, 4)


class FakeTimer:
    """Stands for the device's events: the host's clock of `Wall`, device work included."""

    wall: Wall

    def __enter__(self) -> FakeTimer:
        self.seconds = -self.wall.now
        return self

    def __exit__(self, *error: object) -> None:
        self.wall.synchronize()
        self.seconds += self.wall.now


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Wall:
    """`bench gemm` as on a GPU, with fakes for the contestants of a case: two peers, ours, and another kernel."""
    wall = Wall(monkeypatch)
    FakeTimer.wall = wall
    monkeypatch.setattr(common, "CUDATimer", FakeTimer)
    monkeypatch.setattr(gemm, "resolve_device", lambda device: "cuda")
    monkeypatch.setattr(gemm, "machine", lambda on_gpu: {"gpu": "fake"})
    monkeypatch.setattr(gemm, "_cublas_version", lambda on_gpu: {"cublas": "13.0.2"})
    monkeypatch.setattr(gemm, "_synchronize", wall.synchronize)

    def field(case: gemm.Case, whole_ladder: bool, stack: contextlib.ExitStack) -> gemm._Field:
        candidates = [
            wall.contestant("cublasGemmEx TN", 4e-6, 1e-3, peer=True, caller="cuBLAS"),
            wall.contestant("PyTorch _int_mm", 8e-6, 2e-3, peer=True, caller="PyTorch"),
        ]
        kept, searched = search(str(case), case.operations, candidates, on_gpu=True)
        ours = [wall.contestant(gemm.CHOSEN + "kernel", 16e-6, 0.5e-3)]
        rest = [wall.contestant("other", 16e-6, 4e-3)] if whole_ladder else []
        return gemm._Field(kept, ours, rest, searched)

    monkeypatch.setattr(gemm, "_gpu", field)
    return wall


def test_a_report_has_rows_calls_and_what_was_searched(gpu: Wall) -> None:
    report = gemm.run_gemm([4096], ["int8->int32"], seconds=0.1)
    found = json.loads(json.dumps(report.to_json()))
    assert [row["contestant"] for row in found["rows"]] == [
        "cublasGemmEx TN",
        "PyTorch _int_mm",
        "tilewright: kernel",
        "other",
    ]
    assert [row["ratio"] for row in found["rows"]] == pytest.approx([1, 0.5, 2, 0.25], rel=0.01)
    assert [row["contestant"] for row in found["calls"]] == [
        "cublasGemmEx TN",
        "PyTorch _int_mm",
        "tilewright: kernel",
    ]
    assert found["calls"][2]["single"] == pytest.approx(0.516e-3)
    assert list(found["searches"][0]["tried"]) == ["cublasGemmEx TN", "PyTorch _int_mm"]
    text = str(report)
    assert (
        "int8->int32 4096: 2 settings of peers searched; Tflop/s of the fastest: cublasGemmEx TN 137" in text
    )
    assert "single, µs" in text


def test_the_bare_command_tells_single_calls_of_small_and_middle_sides(
    gpu: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm, "DTYPES", ("float32",))
    monkeypatch.setattr(gemm, "CALL_SECONDS", 0.01)
    for arguments, cases in (
        ([], 6 * 6),
        (["--size", "64"], 1),
        (["--dtype", "float16"], 1),
        (["--no-calls"], 1),
    ):
        ran = CliRunner().invoke(cli, ["bench", "gemm", "--json", "--seconds", "0.05", *arguments])
        assert ran.exit_code == 0, ran.output
        found = json.loads(ran.stdout)
        told = list(dict.fromkeys(row["case"] for row in found["calls"]))
        assert len(told) == cases
        assert len({row["case"] for row in found["rows"]}) == 1
        if not arguments:
            kinds = ("float32", "float16", "float32 tf32", "int8->int32", "int64 small", "float32 split")
            sides = (64, 256, 1024, 2048, 4096, 8192)
            assert set(told) == {f"{kind} {side}" for kind, side in itertools.product(kinds, sides)}


def test_calls_are_not_compared_on_a_cpu() -> None:
    with pytest.raises(OptionError, match="this runs on the CPU"):
        gemm.run_gemm([8], ["float32"], device="cpu", calls=True)


def test_tuning_remembers_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what is no peer, and not ours with B by columns, which is another problem."""
    monkeypatch.setattr(gemm, "ladder", lambda: (SimpleNamespace(name="one"), SimpleNamespace(name="two")))
    rows = [
        Row("c", name, peer, 1.0, seconds, seconds, seconds, 5)
        for name, peer, seconds in (
            ("cublasGemmEx TN", True, 0.1),
            ("cuBLAS gemm3m, weaker error bound", False, 0.2),
            ("tilewright: one, B by columns", False, 0.3),
            ("tilewright: one", False, 0.5),
            ("two", False, 0.4),
        )
    ]
    assert gemm._fastest_kernel(rows) == "two"


def test_a_wrong_kernel_of_ours_stops_the_run(gpu: Wall, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Contestant("tilewright: kernel", lambda: None, lambda: "element (0, 0) is 1, not 2")
    field = gemm._Field([], [wrong], [], Search("case", (), ()))
    monkeypatch.setattr(gemm, "_gpu", lambda *arguments: field)
    with pytest.raises(WrongAnswer, match="kernel is wrong"):
        gemm.run_gemm([64], ["float32"])


def test_the_library_in_the_process_is_the_one_that_is_called(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    line = "7f00-7f01 r-xp 00000000 fe:00 1234                 "
    paths = [
        "/a/libcublas.so.12.8.4.1",
        "/b c/libcublas.so.13",
        "/b c/libcublasLt.so.13",
        "/x/libnvblas.so.13",
        "[heap]",
    ]
    maps.write_text("".join(f"{line}{path}\n" for path in paths))
    assert cublas.library_path("cublas", maps) == "/b c/libcublas.so.13"
    assert cublas.library_path("cublasLt", maps) == "/b c/libcublasLt.so.13"


def test_a_missing_library_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = tmp_path / "maps"
    maps.write_text("")
    with pytest.raises(OSError, match=r"libno_such\.so is neither loaded nor found"):
        cublas.library_path("no_such", maps)

    def nowhere() -> Any:
        raise OSError("libcublas.so is neither loaded nor found")

    monkeypatch.setattr(gemm_peers.cublas, "opened", nowhere)
    monkeypatch.setattr(gemm_peers, "library", lambda name: None)
    with contextlib.ExitStack() as stack:
        peers = gemm_peers.gpu_peers(problem_of("float32", "float32"), stack)
    assert (peers.candidates, peers.refused) == (
        [],
        [("cublasGemmEx, cublasLtMatmul", "libcublas.so is neither loaded nor found")],
    )


def test_a_status_has_its_name(opened: Any) -> None:
    library, _ = fake()
    blas = opened(library)
    assert blas.version == "13.0.2"
    empty = Stored(0, 8, False)
    kind = Arithmetic(np.dtype(np.complex128), np.dtype(np.complex128), cublas.COMPUTE_64F)
    with pytest.raises(CublasError, match=r"^cublasGemmEx: CUBLAS_STATUS_NOT_SUPPORTED$"):
        blas.gemm_ex(kind, cublas.GEMM_DEFAULT, Sides(8, 8, 8), empty, empty, 0, 8)()
    assert str(CublasError("f", 99)) == "f: status 99"
