"""What a kernel decides to run: conditional parts of graphs, and graphs that kernels launch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import cuda
from numba.cuda import types

from tilewright.kernels.gpu.compiled import import_array_operations
from tilewright.kernels.gpu.device_choice import SIMULATOR

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator has neither intrinsics nor graphs")

PAGE = Path(__file__).resolve().parents[3] / "docs" / "device-launch.md"


def linked(capability: tuple[int, ...], output: str) -> bytes:
    """Machine code of a kernel that calls all of the runtime's functions."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    from tilewright.kernels.gpu import device_launch

    def kernel(condition: Any, graph: Any, status: Any) -> None:
        device_launch.set_condition(condition, status[0])
        status[1] = device_launch.launch_graph(graph, device_launch.FIRE_AND_FORGET)
        status[2] = device_launch.launch_graph(device_launch.current_graph(), device_launch.TAIL)

    import_array_operations()
    signature = types.void(types.uint64, types.uint64, types.Array(types.int32, 1, "C"))
    made, _ = cuda.compile_all(kernel, signature, device=False, abi="numba", cc=capability, output=output)
    codes = [
        ObjectCode.from_ltoir(code) if output == "ltoir" else ObjectCode.from_ptx(code.encode())
        for code in made
    ]
    runtime = ObjectCode.from_library(device_launch.device_runtime())
    options = LinkerOptions(
        arch="sm_" + "".join(map(str, capability)), link_time_optimization=output == "ltoir" or None
    )
    return bytes(Linker(*codes, runtime, options=options).link("cubin").code)


@pytest.mark.parametrize("output", ["ltoir", "ptx"])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0, "a"), (12, 0)])
def test_kernels_are_linked_with_the_runtime(capability: tuple[int, ...], output: str) -> None:
    code = linked(capability, output)
    assert b"cudaGraphLaunch" in code


def builder() -> tuple[Any, Any]:
    """One that has begun, and the device it is of."""
    from cuda.core import Device

    cuda.current_context()
    device = Device(cuda.get_current_device().id)
    device.set_current()
    return device.create_graph_builder().begin_building(), device


def run(graph: Any, device: Any, times: int = 1) -> None:
    ready = graph.end_building().complete()
    for _ in range(times):
        ready.launch(device.default_stream)
    device.default_stream.sync()


def kernels() -> tuple[Any, Any, Any]:
    """``choose(numbers, condition)``: the condition is the first number. ``mark(marks, i)``: one more at i.
    ``countdown(numbers, condition)``: one less, and that is the condition."""
    from tilewright.kernels.gpu.device_launch import device_runtime, set_condition

    @cuda.jit(link=[device_runtime()])
    def choose(numbers: Any, condition: Any) -> None:
        set_condition(condition, numbers[0])

    @cuda.jit
    def mark(marks: Any, i: Any) -> None:
        cuda.atomic.add(marks, i, 1)

    @cuda.jit(link=[device_runtime()])
    def countdown(numbers: Any, condition: Any) -> None:
        numbers[0] -= 1
        set_condition(condition, numbers[0])

    return choose, mark, countdown


@pytest.mark.gpu
@pytest.mark.parametrize("number", [0, 1, 7])
def test_a_part_runs_if_a_kernel_says_so(number: int) -> None:
    choose, mark, _ = kernels()
    numbers, marks = cuda.to_device(np.array([number])), cuda.to_device(np.zeros(3, np.int64))
    graph, device = builder()
    condition = graph.create_condition(default_value=0)
    choose[1, 1, graph](numbers, int(condition.handle))
    body = graph.if_then(condition).begin_building()
    mark[4, 32, body](marks, 0)
    mark[1, 32, body](marks, 1)
    body.end_building()
    mark[1, 1, graph](marks, 2)
    run(graph, device, times=3)
    expected = [3 * 128, 3 * 32, 3] if number else [0, 0, 3]
    assert marks.copy_to_host().tolist() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(6))
def test_one_of_several_parts_runs_or_none(number: int) -> None:
    choose, mark, _ = kernels()
    numbers, marks = cuda.to_device(np.array([number])), cuda.to_device(np.zeros(5, np.int64))
    graph, device = builder()
    condition = graph.create_condition()
    choose[1, 1, graph](numbers, int(condition.handle))
    for case, body in enumerate(graph.switch(condition, 5)):
        body.begin_building()
        mark[1, 1, body](marks, case)
        body.end_building()
    run(graph, device, times=2)
    assert marks.copy_to_host().tolist() == [2 * (case == number) for case in range(5)]


@pytest.mark.gpu
def test_a_part_runs_as_often_as_a_kernel_says() -> None:
    choose, mark, countdown = kernels()
    numbers, marks = cuda.to_device(np.array([1000])), cuda.to_device(np.zeros(1, np.int64))
    graph, device = builder()
    condition = graph.create_condition()
    choose[1, 1, graph](numbers, int(condition.handle))
    body = graph.while_loop(condition).begin_building()
    mark[1, 1, body](marks, 0)
    countdown[1, 1, body](numbers, int(condition.handle))
    body.end_building()
    run(graph, device)
    assert marks.copy_to_host().tolist() == [1000]
    assert numbers.copy_to_host().tolist() == [0]


@pytest.mark.gpu
def test_a_kernel_that_launches_graphs_is_refused_outside_of_one() -> None:
    from tilewright.kernels.gpu.device_launch import TAIL, current_graph, device_runtime, launch_graph

    @cuda.jit(link=[device_runtime()])
    def launch(status: Any) -> None:
        status[0] = launch_graph(current_graph(), TAIL)

    status = cuda.to_device(np.full(1, -1))
    with pytest.raises(Exception, match="CUDA_ERROR_NOT_SUPPORTED"):
        launch[1, 1](status)
    assert status.copy_to_host().tolist() == [-1]


@pytest.mark.gpu
def test_the_examples_of_the_page() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
