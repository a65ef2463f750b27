"""The plain kernels become machine code, where no GPU is needed, and take their arguments where launches pack them."""

from __future__ import annotations

import pytest

from tilewright.kernels.gpu.compiled import argument_layout, compile_function
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.histograms.portable import KERNELS, SIGNATURE
from tilewright.workflows.kernels.making import checked

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
@pytest.mark.parametrize("name", KERNELS)
def test_they_become_machine_code(name: str, capability: tuple[int, int]) -> None:
    code = compile_function(KERNELS[name], SIGNATURE, capability, None)
    checked(name, code, argument_layout(SIGNATURE.args).format)
