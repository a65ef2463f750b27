"""Markers that cannot pass by running nothing, the seeds every random test shares, and the clusters."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import logging
import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Client

# Before anything imports numba: the simulator is a mode of a whole process, chosen by the environment.
SIMULATOR = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
# Before anything imports Dask, and for the processes of tests too: clusters that tests start themselves must not hang
# either (see PROFILER_HANGS in tilewright/pipeline/cluster/profiler.py).
if (3, 11) <= sys.version_info < (3, 11, 9):
    os.environ["DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED"] = "False"
# Dask wakes fifty times a second in every scheduler, worker and nanny to look after itself, and clusters outlive the
# tests that share them: idle ones took a twelfth of a core from each process of the tests.
os.environ["DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL"] = "1s"
os.environ["DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL"] = "2s"
os.environ["DASK_DISTRIBUTED__WORKER__MEMORY__MONITOR_INTERVAL"] = "1s"


def begin_with_another_gpu() -> None:
    """Let the processes of a parallel run begin their numbering of the GPUs at different ones: each sees all of them,
    and tests that need one take the first."""
    found = sorted(int(path.name.removeprefix("nvidia")) for path in Path("/dev").glob("nvidia[0-9]*"))
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker and len(found) > 1:
        first = int(worker) % len(found)
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, found[first:] + found[:first])))


begin_with_another_gpu()  # before anything asks CUDA


def stay_on_one_core() -> None:
    """Of the threads of a simulated block one runs at a time: to wake each on another core than the last took as long
    again as what they do."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if SIMULATOR and worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker) % len(cores)]})


stay_on_one_core()

import numpy as np  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from tests.sampling import EXAMPLES, THOROUGH_EXAMPLES, sample  # noqa: E402
from tilewright.kernels.numbers import ceil_div  # noqa: E402

# Compilation makes the first example slow, so a deadline would measure the compiler.
settings.register_profile(
    "tilewright",
    deadline=None,
    max_examples=EXAMPLES,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
# make test-slow and make gpu-test: four times as many, of tests that do not say how many.
settings.register_profile("thorough", settings.get_profile("tilewright"), max_examples=THOROUGH_EXAMPLES)
settings.load_profile("tilewright")

NEEDS = {"gpu": 1, "multigpu": 2}

FEW_CASES = 4
"""So many cases of a test all run every time, unless it asks for fewer."""

ROOT = Path(__file__).resolve().parents[1]
FSYNC = os.fsync

OBJECTS_BETWEEN_COLLECTIONS = 10_000
"""New objects, less those that have gone, after which Python's collector of cycles looks at the new ones; else 700.
It took a fifteenth of the tests' time: compilers make many objects, and hardly any cycles."""

LIMIT_SECONDS = 300
"""A test that takes longer hangs: its process ends then, with the stack of every thread. ``--timeout`` sets another."""
SLOW_LIMIT_SECONDS = 1800
"""The same for tests that are marked as slow."""


def gpu_count() -> int:
    """CUDA GPUs that this process can use; the simulator's pretended one does not count."""
    if SIMULATOR:
        return 0
    from numba import cuda

    return len(cuda.gpus) if cuda.is_available() else 0


def asks_for_gpu(expression: str) -> bool:
    """Whether a marker expression names a GPU marker other than to leave its tests out.

    ``not (gpu or slow)`` seems to, but selects no GPU test, so no harm is done.
    """
    names = "|".join(NEEDS)
    left = re.sub(rf"\bnot\s+({names})\b", "", expression)
    return re.search(rf"\b({names})\b", left) is not None


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which need not be there
def pytest_xdist_auto_num_workers() -> int | None:
    """With ``-n auto``, a quarter more processes than cores: a fifth of the time no thread of a process has anything to
    do, since its test waits for another process, or for a time to pass.

    Those of the simulator wait for nothing, and have a core each.
    """
    if SIMULATOR or "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # as xdist has it
    from tilewright.kernels.cpu.loops import usable_cores

    return ceil_div(5 * usable_cores(), 4)


@pytest.hookimpl(tryfirst=True)  # before items are left out by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_cases_as_slow(items)
    # Asked for once: by name, marker after marker, it took a tenth of the collection.
    marked = [{marker.name for marker in item.iter_markers()} for item in items]
    # A run that asks for the GPU gets failures, not skips, where there is none.
    asked = asks_for_gpu(config.option.markexpr or "")
    wanted = any(not names.isdisjoint(NEEDS) for names in marked)
    count = gpu_count() if wanted and not asked else 0  # which imports Numba
    # Not in pyproject.toml: where the plugin is missing, an option that nobody knows is an error.
    limited = config.pluginmanager.hasplugin("timeout") and config.getoption("timeout") is None
    for item, names in zip(items, marked, strict=True):
        if limited and "timeout" not in names:
            seconds = SLOW_LIMIT_SECONDS if "slow" in names else LIMIT_SECONDS
            # By a thread, since a signal does not end what waits in C.
            item.add_marker(pytest.mark.timeout(seconds, method="thread"))
        for marker, needed in NEEDS.items():
            if not asked and marker in names and count < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPU(s), found {count}"))
        if "slurm" in names and not os.environ.get("TILEWRIGHT_SLURM_RIGS"):
            item.add_marker(pytest.mark.skip(reason="needs Slurm: make slurm brings one up"))
        if "simulator" in names and not SIMULATOR:
            item.add_marker(pytest.mark.skip(reason="runs under NUMBA_ENABLE_CUDASIM=1, in a run of its own"))


def mark_cases_as_slow(items: list[pytest.Item]) -> None:
    """Of a test's cases, all but as many as its marker ``sample`` says, or, without it and the marker ``every_case``,
    those of which each value of each parameter is one of other cases.

    Of cases that run elsewhere, on a GPU or in the simulator, ``sample`` means as many again, since what they cover is
    not covered here; without it they all run.
    """
    tests = defaultdict[tuple[str, ...], list[pytest.Function]](list)
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        names = {marker.name for marker in item.iter_markers()}
        elsewhere = names.intersection([*NEEDS, "simulator"])
        if "slow" not in names and ("sample" in names or names.isdisjoint([*elsewhere, "every_case"])):
            tests[item.nodeid.partition("[")[0], *sorted(elsewhere)].append(item)
    for cases in tests.values():
        marker = cases[0].get_closest_marker("sample")
        if marker is None and len(cases) <= FEW_CASES:
            continue
        # A parameter's value is one object in all cases.
        values = [{name: id(value) for name, value in case.callspec.params.items()} for case in cases]
        chosen = sample(values, marker.args[0] if marker is not None else None)
        for number, case in enumerate(cases):
            if number not in chosen:
                case.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, needed in NEEDS.items():
        if item.get_closest_marker(marker) and gpu_count() < needed:
            pytest.fail(f"this test needs {needed} CUDA GPU(s), found {gpu_count()}", pytrace=False)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Free what a GPU test's process would keep for the next product: dozens of processes may share the GPU."""
    if not any(item.get_closest_marker(marker) for marker in NEEDS) or not gpu_count():
        return
    from numba import cuda

    from tilewright.kernels.gemm import scratch

    scratch.release()
    cuda.current_context().memory_manager.deallocations.clear()
    if "cupy" in sys.modules:
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """All that is made here stays, and the collector of cycles went through it again and again: it took a quarter of
    the collection of tests."""
    gc.disable()
    try:
        import_in_turns(session.config)
        return (yield)
    finally:
        gc.enable()
        gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
        gc.freeze()  # hardly any of it is garbage, and to look for that takes a second


def import_in_turns(config: pytest.Config) -> None:
    """Let each process of a parallel run begin with other modules of tests, and find the bytecode of the rest: where
    there is none yet, each rewrote the assertions of all of them, at the same time as the others."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    whole = ROOT / "tests"
    if not worker or [Path(argument).resolve() for argument in config.args] != [whole]:
        return
    paths = sorted(whole.rglob("test_*.py"))
    first = len(paths) * int(worker) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    for path in paths[first:]:
        # What is wrong with a module is said when it is collected.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.hookimpl(trylast=True, specname="pytest_runtest_teardown")
def pytest_runtest_teardown_at_the_end_of_a_module(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path != item.path:
        keep_from_the_collector()


def keep_from_the_collector() -> None:
    """Let the collector of cycles pass over what lives now: modules, tests, and what compilers keep of their work.

    A run that fails or is stopped collects all there is, which took longer than the rest of the test that stopped it.
    Cycles that are garbage are freed before, and those of later tests are found as ever.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _loops_from_the_first_block() -> None:
    """A process does its first work without loops, to which no test would get otherwise: here only those are without
    them that are of that."""
    from tilewright.kernels.cpu import product as host_product
    from tilewright.kernels.cpu import thin
    from tilewright.kernels.cpu.loops import Allowance
    from tilewright.pipeline.check import fused
    from tilewright.pipeline.transfer import file_rectangles, zstd
    from tilewright.pipeline.worker import gpu_unit

    host_product._few = thin._allowance = fused._by_numpy = zstd.in_steps = gpu_unit._in_python = Allowance(0)
    file_rectangles.FEW_NBYTES = 0


@pytest.fixture(autouse=True)
def shares_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes of the tests share a GPU's memory, but for tests marked ``whole_gpu``, which take most of it: such a
    one waits for those that run, and others that are about to begin wait for it."""
    marked = {marker.name for marker in request.node.iter_markers()}
    if marked.isdisjoint(NEEDS) or not gpu_count():
        yield
        return
    alone = fcntl.LOCK_EX if "whole_gpu" in marked else fcntl.LOCK_SH
    folder = Path(tempfile.gettempdir())
    with (folder / "tilewright-gpu-gate").open("w") as gate, (folder / "tilewright-gpu-use").open("w") as use:
        fcntl.flock(gate, alone)
        fcntl.flock(use, alone)
        if alone == fcntl.LOCK_SH:
            fcntl.flock(gate, fcntl.LOCK_UN)
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261121)


@pytest.fixture(scope="session", autouse=True)
def disks_are_not_waited_for() -> Iterator[None]:
    """Files of a test need not outlast a power cut: the disk took half of the time of tests that store products.

    `forced_to_disk` is for tests of when files are forced there. Processes that tests start wait for the disk.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which refuses what is not open, too
        yield


@pytest.fixture(scope="session", autouse=True)
def simulated_threads_are_waited_for() -> Iterator[None]:
    """See `tests.simulated_blocks`."""
    with pytest.MonkeyPatch.context() as patch:
        if SIMULATOR:
            from tests import simulated_blocks

            simulated_blocks.install(patch)
        yield


@pytest.fixture
def forced_to_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are forced to disk in this process, as they are for users."""
    monkeypatch.setattr(os, "fsync", FSYNC)


@pytest.fixture(autouse=True)
def libraries_log_as_before() -> Iterator[None]:
    """A command silences the libraries for as long as its process lives, and that of the worker processes that it
    starts; tests that run one in their own process would silence all tests after them."""
    environment = {name: value for name, value in os.environ.items() if name.startswith("DASK_LOGGING__")}
    levels = {name: logger.level for name, logger in _loggers().items()}
    yield
    for name in [name for name in os.environ if name.startswith("DASK_LOGGING__")]:
        if name not in environment:
            del os.environ[name]
    for name, logger in _loggers().items():
        if logger.level == logging.CRITICAL and levels.get(name, logging.NOTSET) != logging.CRITICAL:
            logger.setLevel(levels.get(name, logging.NOTSET))
    dask = sys.modules.get("dask")
    if dask is not None:
        told = dask.config.get("logging", {})
        dask.config.set({"logging": {name: level for name, level in told.items() if level != "critical"}})


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    """One cluster in this process for all tests: to start one costs more than most of them."""
    from tilewright.pipeline.cluster.cluster import open_cluster

    with open_cluster("local") as client:
        yield client


@pytest.fixture(scope="session")
def without_dask() -> Iterator[Client]:
    """Threads of this process by themselves, which take two thirds of the time of Dask's cluster: for tests to which it
    does not matter who hands out the work."""
    from tilewright.pipeline.cluster.here.opening import open_executor

    with open_executor("local") as client:
        yield client


@pytest.fixture(scope="session")
def processes() -> Iterator[Client]:
    """A client whose two workers are processes, of a thread each. Who ends one waits for the next in its place."""
    from distributed import Client, LocalCluster

    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        yield client


def _loggers() -> dict[str, logging.Logger]:
    """The loggers of the libraries that commands silence."""
    console = sys.modules.get("tilewright.workflows.console")
    return {name: logging.getLogger(name) for name in console.NOISY_LOGGERS} if console else {}
