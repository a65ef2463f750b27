"""Hopper's copy engine (TMA): boxes of a tensor between global and shared memory, as a tensor map describes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.cuda import types

from tilewright.kernels.ptx.lowering import I32, U32, U64, scalar_instruction

tensor_map_acquire = scalar_instruction(
    "fence.proxy.tensormap::generic.acquire.gpu [$0], 128;",
    "l",
    (U64,),
    description="Lets the copy engine see a tensor map that was written to global memory.",
)

_BULK = "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
tensor_load = scalar_instruction(
    f"{_BULK} [$0], [$1, {{$3, $4, $5}}], [$2];",
    "r,l,r,r,r,r",
    (U32, U64, U32, I32, I32, I32),
    description="``tensor_load(shared, map, barrier, x, y, z)``: the box of a tensor map that begins at (x, y, z), "
    "zeros outside the tensor; its bytes count at the barrier. One thread calls it.",
)
tensor_load_multicast = scalar_instruction(
    f"{_BULK}.multicast::cluster [$0], [$1, {{$3, $4, $5}}], [$2], $6;",
    "r,l,r,r,r,r,h",
    (U32, U64, U32, I32, I32, I32, types.uint16),
    description="The same into every block of the cluster whose bit in the last argument is set, at the same place.",
)
tensor_store = scalar_instruction(
    "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [$0, {$2, $3, $4}], [$1];",
    "l,r,r,r,r",
    (U64, U32, I32, I32, I32),
    description="``tensor_store(map, shared, x, y, z)``: a box in shared memory to the tensor at (x, y, z); what lies "
    "outside the tensor is not written. It belongs to the calling thread's open group of bulk stores.",
)
bulk_commit = scalar_instruction(
    "cp.async.bulk.commit_group;", "", (), description="The bulk stores issued so far become one group."
)


def bulk_wait(pending: int, *, read: bool) -> Callable[..., Any]:
    """Wait until at most ``pending`` of the thread's groups of bulk stores are under way, or still read shared
    memory."""
    return scalar_instruction(f"cp.async.bulk.wait_group{'.read' if read else ''} {pending};", "", ())


copy_engine_fence = scalar_instruction(
    "fence.proxy.async.shared::cta;",
    "",
    (),
    description="Lets the copy engine see what this thread wrote to shared memory.",
)
