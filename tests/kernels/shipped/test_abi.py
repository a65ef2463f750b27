"""Machine code takes its arguments where launches pack them: known of each kernel that is shipped."""

from __future__ import annotations

import pytest
from numba import cuda, types

from tilewright.kernels.gpu.compiled import argument_layout, compile_function
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.shipped.abi import argument_places, packed_places
from tilewright.workflows.kernels.making import checked

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")

SIGNATURE = types.void(
    types.Array(types.float32, 1, "C"),
    types.int8,
    types.Array(types.complex128, 2, "A"),
    types.boolean,
    types.float32,
    types.uint16,
    types.float64,
    types.int32,
    types.uint64,
)
"""Every kind of argument, with gaps between some."""


def mixed(x, n, z, flag, factor, narrow, wide, number, address):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    if i < n and flag:
        x[i] = z[i, 0].real * factor + narrow + wide + number + address


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_arguments_lie_where_they_are_packed(capability: tuple[int, int]) -> None:
    code = compile_function(mixed, SIGNATURE, capability, None)
    layout = argument_layout(SIGNATURE.args).format
    places = argument_places(code.cubin, code.entry)
    assert places == packed_places(layout)
    assert places[:8] == [(0, 8), (8, 8), (16, 8), (24, 8), (32, 8), (40, 8), (48, 8), (56, 1)]
    assert len(places) == 7 + 1 + 9 + 6
    checked("mixed", code, layout)
    with pytest.raises(ValueError, match=r"mixed takes arguments .* numba-cuda passes them in another way"):
        checked("mixed", code, layout.replace("f", "d"))
    with pytest.raises(ValueError, match=r"has no section \.nv\.info\.other"):
        argument_places(code.cubin, "other")
