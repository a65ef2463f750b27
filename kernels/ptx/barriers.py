"""Hopper's barriers in shared memory, which count arrivals and bytes, and clusters of blocks."""

from __future__ import annotations

from tilewright.kernels.ptx.lowering import U32, scalar_instruction

barrier_init = scalar_instruction(
    "mbarrier.init.shared::cta.b64 [$0], $1;",
    "r,r",
    (U32, U32),
    description="``barrier_init(barrier, count)``: a phase completes after ``count`` arrivals and all expected bytes.",
)
barrier_init_fence = scalar_instruction(
    "fence.mbarrier_init.release.cluster;",
    "",
    (),
    description="Makes initialised barriers visible to the cluster and to the copy engine.",
)
barrier_expect = scalar_instruction(
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
    "r,r",
    (U32, U32),
    description="``barrier_expect(barrier, nbytes)``: arrive, and hold the phase open until that many bytes came.",
)
barrier_arrive = scalar_instruction(
    "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, $0, $1;"
    " mbarrier.arrive.shared::cluster.b64 _, [remote]; }",
    "r,r",
    (U32, U32),
    description="``barrier_arrive(barrier, rank)``: arrive at the same barrier of the cluster's block ``rank``.",
)
barrier_wait = scalar_instruction(
    "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;"
    " @done bra finished; bra again; finished: }",
    "r,r",
    (U32, U32),
    description="``barrier_wait(barrier, parity)``: sleep until the phase of that parity has completed.",
)
cluster_rank = scalar_instruction(
    "mov.u32 $0, %cluster_ctarank;", "=r", (), U32, description="This block's number in its cluster."
)
cluster_barrier = scalar_instruction(
    "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;",
    "",
    (),
    description="Every thread of every block of the cluster waits for all the others.",
)
