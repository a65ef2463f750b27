"""Functions that kernels call are compiled for what their kernel is compiled for, be there a GPU or not."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import numba
import pytest
from numba import cuda

from tilewright.kernels.gpu.compiled import compile_function, compiling_for, device_function
from tilewright.kernels.gpu.device_choice import SIMULATOR

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")


def kernel() -> Any:
    @device_function
    def above(value: Any) -> Any:
        return value + 1

    @device_function
    def far_above(value: Any) -> Any:
        return above(above(value))

    def add(values: Any) -> None:
        values[cuda.grid(1)] = far_above(values[cuda.grid(1)])

    return add


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_are_part_of_their_kernels_machine_code(capability: tuple[int, int]) -> None:
    code = compile_function(kernel(), numba.void(numba.int64[::1]), capability, None)
    assert code.entry.count("add") == 1
    assert b"above" not in code.cubin


def test_are_in_the_place_of_their_calls() -> None:
    with compiling_for((8, 0)):
        text, _ = cuda.compile_ptx(kernel(), (numba.int64[::1],), cc=(8, 0))
    assert "call" not in text
    assert ".func" not in text


def test_other_threads_ask_for_the_current_gpu_meanwhile() -> None:
    dispatcher = importlib.import_module("numba.cuda.dispatcher")
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(dispatcher.get_current_device().compute_capability)
        except Exception as error:
            found.append(error)

    with compiling_for((8, 6)):
        ask()
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    ask()
    mine, others, after = found
    assert mine == (8, 6)
    assert str(others) == str(after)
    assert others != mine
