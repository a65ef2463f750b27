"""What a kernel decides to run: functions of CUDA's device runtime, which Numba does not offer.

A kernel of Numba calls them like device functions, if it is linked with the runtime that comes with CUDA's wheels::

    @cuda.jit(link=[device_runtime()])
    def choose(found, condition):
        set_condition(condition, found[0])

What it decides about are CUDA graphs, made by ``cuda.core.graph.GraphBuilder``, on which kernels are launched as on a
stream: parts of a graph that run only if, as often as, or in the case that a kernel has said (`set_condition`), and
graphs that a kernel of a graph launches (`launch_graph`). ``docs/device-launch.md`` has examples. A GPU is needed, as
the simulator has no graphs, and for conditions with several cases a driver of CUDA 12.8.

Source: CUDA Programming Guide, "CUDA Graphs", sections on device graph launch and on conditional nodes.
"""

from __future__ import annotations

from tilewright.kernels.ptx.lowering import I32, U32, U64, external_function, scalar_instruction

TAIL, FIRE_AND_FORGET, SIBLING = 1 << 56, 2 << 56, 3 << 56
"""How `launch_graph` launches: after the launching graph and all that it launched; at once, beside it, and what follows
the launching graph waits for both; at once, and nothing waits for it but the work after both graphs' own."""

set_condition = external_function(
    "cudaGraphSetConditional",
    (U64, U32),
    description="""``set_condition(condition, value)``: that on which nodes of the running graph depend is ``value``.

    condition: ``int(condition.handle)`` of what ``GraphBuilder.create_condition`` made. Only one thread says so at a
    time.
    """,
)
launch_graph = external_function(
    "cudaGraphLaunch",
    (U64, U64),
    I32,
    description="""``launch_graph(graph, how)``: launch a graph from a kernel of a graph. 0, or CUDA's number of an
    error. A kernel that calls it is itself launched only in a graph; elsewhere CUDA refuses it as not supported.

    graph: ``int(graph.handle)`` of one that was completed for launches by kernels
    (``GraphCompleteOptions(device_launch=True)``) and uploaded. how: `TAIL`, `FIRE_AND_FORGET` or `SIBLING`. A graph
    launches itself by `TAIL` and `current_graph`.
    """,
)
current_graph = scalar_instruction(
    "mov.u64 $0, %current_graph_exec;",
    "=l",
    (),
    U64,
    description="``current_graph()``: the running graph, if it was launched as one that kernels may launch; else 0.",
)


def device_runtime() -> str:
    """The path of the library that these functions are in, ``libcudadevrt.a``, for ``numba.cuda.jit(link=[...])``.

    Raises ``cuda.pathfinder.StaticLibNotFoundError`` where CUDA's runtime is not installed.

    Examples
    --------
    >>> from tilewright.kernels.gpu.device_launch import device_runtime
    >>> device_runtime()  # doctest: +SKIP
    '.../site-packages/nvidia/cu13/lib/libcudadevrt.a'
    """
    from cuda.pathfinder import find_static_lib

    return find_static_lib("cudadevrt")
