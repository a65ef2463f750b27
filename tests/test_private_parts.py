"""What is used of other libraries that they do not promise to keep: each is as the code that uses it takes it to be."""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import importlib
import inspect
import multiprocessing
import multiprocessing.spawn
import re
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distributed
import numba
import numpy as np
import pytest
import zarr
from distributed import Client, Worker, utils
from distributed.threadpoolexecutor import ThreadPoolExecutor, secede, thread_state
from distributed.utils import LoopRunner
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from numba import cuda, types
from numba.core.caching import CacheImpl, FunctionCache
from numba.cuda.cudadrv.devicearray import DeviceNDArray
from numba.cuda.cudadrv.driver import device_memset
from numba.cuda.extending import intrinsic
from zarr.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, LoggingStore, MemoryStore, StorePath, ZipStore

from tests.test_imports import parsed
from tilewright.kernels.cpu.blas import LETTERS, blas_for
from tilewright.kernels.gpu.compiled import argument_layout, import_array_operations
from tilewright.kernels.numbers import ceil_div
from tilewright.pipeline.cluster import pool
from tilewright.pipeline.store import arrays, region_read

ROOT = Path(__file__).parents[1]


def pool_of_dask(folder: Path) -> bool:
    """A thread leaves it by being taken out of its set, and ends once it is not to proceed; one that cannot be started
    is in the set by then."""

    def look() -> bool:
        threads = thread_state.executor._threads
        return isinstance(threads, set) and len(threads) == 1 and thread_state.proceed is True

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(look).result(60)
    source = inspect.getsource(ThreadPoolExecutor._adjust_thread_count)
    leaving = inspect.getsource(secede)
    return (
        found
        and source.index("_threads.add(t)") < source.index("t.start()")
        and leaving.index("proceed = False") < leaving.index("_threads.remove(")
    )


def blas_of_numpy(folder: Path) -> bool:
    """The library that NumPy calls has the functions by one of the names that are looked for."""
    return all(blas_for(np.dtype(code)) is not None for code in LETTERS)


def array_of_zarr(folder: Path) -> bool:
    """An array is made of an asynchronous one, whose copy may be given another place."""
    array = zarr.create_array(MemoryStore(), name="a", shape=(3,), dtype="i4")
    other = LocalStore(folder)
    inner = copy.copy(array.async_array)
    object.__setattr__(inner, "store_path", StorePath(other, "b"))
    moved: zarr.Array[Any] = zarr.Array(inner)
    return (
        moved.store is other
        and moved.path == "b"
        and moved.shape == (3,)
        and isinstance(array.store, MemoryStore)
    )


def mended_metadata_of_zarr(folder: Path) -> bool:
    """From 3.4.1 on the array is opened with a side of 1 for one of 0; 3.2 to 3.4.0 open none."""
    zarr.create_array(folder, shape=(4, 4), chunks=(2, 2), dtype="i4")
    file = folder / "zarr.json"
    file.write_text(re.sub(r'("chunk_shape": \[\s*)2', r"\g<1>0", file.read_text()))
    with warnings.catch_warnings(action="ignore"), suppress(ValueError):
        return arrays._chunks_as_stored(zarr.open_array(folder, mode="r")) == (0, 2)
    return True


def loop_of_zarr(folder: Path) -> bool:
    return sync(MemoryStore().exists("a")) is False


def zip_of_zarr(folder: Path) -> bool:
    return [ZipStore(folder / "a.zip", mode=mode)._zmode for mode in ("w", "r", "a")] == ["w", "r", "a"]


def wrapper_of_zarr(folder: Path) -> bool:
    store = MemoryStore()
    return LoggingStore(store)._store is store


def folder_of_fsspec(folder: Path) -> bool:
    return DirFileSystem("/top", LocalFileSystem())._join("a/b") == "/top/a/b"


def files_of_fsspec(folder: Path) -> bool:
    """What a server's file system answers by coroutines, as fsspec's page on asynchronous use has them."""
    names = ("_info", "_find", "_cat_file")
    return all(inspect.iscoroutinefunction(getattr(AsyncFileSystem, name)) for name in names)


def selection_of_zarr(folder: Path) -> bool:
    """It decodes into memory that it is given."""
    array = zarr.create_array(MemoryStore(), name="a", shape=(6, 4), chunks=(3, 2), dtype="i4")
    array[:] = np.arange(24).reshape(6, 4)
    out = np.zeros((2, 3), np.int32)
    target = default_buffer_prototype().nd_buffer.from_ndarray_like(out)
    sync(region_read._selection(array, (slice(2, 4), slice(1, 4)), target))
    return out.tolist() == [[9, 10, 11], [13, 14, 15]]


def client_of_dask(folder: Path) -> bool:
    """A client that could not connect is left with a loop to stop."""
    return "self._loop_runner = LoopRunner(" in inspect.getsource(Client.__init__) and callable(
        LoopRunner.stop
    )


def offloading_of_dask(folder: Path) -> bool:
    utils._offload_executor.submit(int).result(60)
    return all(thread.is_alive() for thread in utils._offload_executor._threads)


def heartbeat_of_dask(folder: Path) -> bool:
    kept = 'self.periodic_callbacks["heartbeat"] = ' in inspect.getsource(Worker)
    return kept and inspect.iscoroutinefunction(Worker.heartbeat)


def libzstd_of_zstandard(folder: Path) -> bool:
    from zstandard import backend_cffi

    return (
        int(backend_cffi.ffi.cast("size_t", backend_cffi.ffi.addressof(backend_cffi.lib, "ZSTD_isError"))) > 0
    )


def end_of_threads(folder: Path) -> bool:
    """What is registered there is called before pools' threads are waited for, and so before `atexit`."""
    program = (
        "import atexit, threading, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "ending = threading.Event()\n"
        "ThreadPoolExecutor(1).submit(lambda: print(ending.wait(60)))\n"
        "threading._register_atexit(ending.set)\n"
        "atexit.register(print, 'end')\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return ran.stdout.split() == ["True", "end"]


def starting_of_multiprocessing(folder: Path) -> bool:
    kept = "current_process()._inheriting = True" in inspect.getsource(multiprocessing.spawn._main)
    return kept and isinstance(multiprocessing.process.ORIGINAL_DIR, str)  # type: ignore[attr-defined]


def cache_of_numba(folder: Path) -> bool:
    """A loop's cache is an attribute, and compares the stamp of its file with one that it wrote before."""
    loop = numba.njit(ceil_div)
    cache = FunctionCache(ceil_div)
    words = "no locator available" in inspect.getsource(CacheImpl.__init__)
    stamped = "self._source_stamp" in inspect.getsource(type(cache._cache_file))
    named = isinstance(cache._cache_file._index_path, str) and hasattr(cache._cache_file, "_source_stamp")
    return words and stamped and named and hasattr(loop, "_cache")


def arguments_of_kernels(folder: Path) -> bool:
    """As a launch packs them: their order and sizes, and that an array is read at its fifth word."""

    def kernel(x: Any, small: int, number: float, flag: bool) -> None:
        if flag:
            x[0, 0] = number + small

    signature = types.void(types.Array(types.float64, 2, "A"), types.int16, types.float64, types.boolean)
    import_array_operations()
    ptx, _ = cuda.compile(kernel, signature, device=False, abi="numba", cc=(8, 0))
    declared = re.findall(r"\.param \.(?:align \d+ )?[.]?([bfsu])(\d+) \S*_param_\d+", ptx)
    sizes = [int(bits) // 8 for _, bits in declared]
    expected = [
        struct.calcsize(code)
        for code in argument_layout(signature.args).format
        if code.isalpha() or code == "?"
    ]
    address = re.search(r"ld\.param\.[bu]64\s+(%rd\d+), \[\S*_param_4\]", ptx)
    return sizes == expected and address is not None and "to.global.u64 \t%rd" in ptx


def parts_of_numbas_functions(folder: Path) -> bool:
    @intrinsic
    def nothing(typingctx: Any) -> Any:
        return types.void(), lambda *asked: None

    made = cuda.jit(device=True, inline="always")(ceil_div)
    return inspect.isfunction(nothing._defn) and made.py_func is ceil_div and "inline" in made.targetoptions


def arrays_of_numba(folder: Path) -> bool:
    """What `ExportedArray` makes late, Numba's arrays make at once; those of the simulator hold a NumPy array."""
    made = inspect.getsource(DeviceNDArray.__mro__[1])
    simulated = Path(inspect.getfile(DeviceNDArray)).parents[1] / "simulator" / "cudadrv" / "devicearray.py"
    return "self._dummy = " in made and "self._ary = " in simulated.read_text()


def zeroing_of_numba(folder: Path) -> bool:
    return list(inspect.signature(device_memset).parameters) == ["dst", "val", "size", "stream"]


def questions_of_fsspec(folder: Path) -> bool:
    """What file systems of servers answer on zarr's event loop; the public names wait on another."""
    from fsspec.asyn import AsyncFileSystem

    both = AsyncFileSystem._info, AsyncFileSystem._find
    named = list(inspect.signature(AsyncFileSystem._find).parameters)
    return all(map(inspect.iscoroutinefunction, both)) and named[:2] == ["self", "path"]


def requests_of_s3fs(folder: Path) -> bool:
    """Requests that it has no function for: conditional ones, and a listing that tells an empty bucket from none."""
    from s3fs import S3FileSystem

    asked = inspect.signature(S3FileSystem._call_s3).parameters
    return inspect.iscoroutinefunction(S3FileSystem._call_s3) and list(asked)[:2] == ["self", "method"]


def target_of_numba(folder: Path) -> bool:
    """What a kernel calls is compiled for the GPU that a function of the dispatcher's module gives."""
    dispatcher = importlib.import_module("numba.cuda.dispatcher")
    asked = dispatcher.CUDADispatcher.compile_device.__code__.co_names
    return callable(dispatcher.get_current_device) and "get_current_device" in asked


def methods_of_dataclasses(folder: Path) -> bool:
    """Up to Python 3.12 each method is made by a call that has its name first; later there is no such function."""
    write = getattr(dataclasses, "_create_fn", None)
    if write is None:
        return sys.version_info >= (3, 13)
    made = write("__len__", ("self",), ["return 7"], globals={}, locals={}, return_type=int)
    return made(None) == 7 and list(inspect.signature(write).parameters)[:3] == ["name", "args", "body"]


PARTS: dict[Callable[[Path], bool], tuple[str, str, str]] = {
    methods_of_dataclasses: (
        "the standard library's dataclasses._create_fn",
        "workflows/terminal/methods.py",
        "write_methods_later",
    ),
    questions_of_fsspec: (
        "fsspec's AsyncFileSystem._info, AsyncFileSystem._find",
        "pipeline/store/appearance.py",
        "_tags_by_fsspec",
    ),
    requests_of_s3fs: ("s3fs's S3FileSystem._call_s3", "pipeline/store/remote/opening.py", "call_s3"),
    pool_of_dask: (
        "distributed's ThreadPoolExecutor._threads, thread_state.proceed",
        "pipeline/cluster/pool.py",
        "_stay",
    ),
    client_of_dask: ("distributed's Client._loop_runner", "pipeline/cluster/cluster.py", "_connected"),
    offloading_of_dask: (
        "distributed.utils._offload_executor",
        "pipeline/cluster/here/checks.py",
        "check_not_forked",
    ),
    heartbeat_of_dask: (
        "distributed's Worker.periodic_callbacks",
        "pipeline/cluster/local.py",
        "end_heartbeats",
    ),
    array_of_zarr: ("zarr.Array's store_path", "pipeline/store/arrays.py", "in_store"),
    selection_of_zarr: (
        "zarr's AsyncArray._get_selection and _chunk_grid, zarr.core.indexing.BasicIndexer",
        "pipeline/store/region_read.py",
        "_selection",
    ),
    mended_metadata_of_zarr: (
        "zarr's ArrayMetadata._stored_document",
        "pipeline/store/arrays.py",
        "_chunks_as_stored",
    ),
    loop_of_zarr: ("zarr.core.sync.sync", "pipeline/store/waiting.py", "answer_of"),
    zip_of_zarr: ("zarr's ZipStore._zmode", "pipeline/store/arrays.py", "zip_mode"),
    wrapper_of_zarr: ("zarr's WrapperStore._store", "pipeline/store/remote/patience.py", "unwrapped"),
    folder_of_fsspec: ("fsspec's DirFileSystem._join", "pipeline/store/arrays.py", "beneath"),
    files_of_fsspec: (
        "fsspec's AsyncFileSystem._info, _find and _cat_file",
        "pipeline/store/remote/file_servers.py",
        "_fsspec_server",
    ),
    libzstd_of_zstandard: ("zstandard.backend_cffi", "pipeline/transfer/zstd.py", "library"),
    end_of_threads: ("threading._register_atexit", "workflows/console.py", "show"),
    starting_of_multiprocessing: (
        "multiprocessing's _inheriting and ORIGINAL_DIR",
        "pipeline/cluster/cluster.py",
        "_check_script",
    ),
    cache_of_numba: (
        "numba's FunctionCache: _cache, _cache_file, _source_stamp, _index_path",
        "kernels/cpu/loops.py",
        "kept",
    ),
    arguments_of_kernels: (
        "how Numba's kernels take arguments",
        "kernels/gpu/compiled.py",
        "argument_layout",
    ),
    target_of_numba: (
        "numba-cuda's numba.cuda.dispatcher.get_current_device",
        "kernels/gpu/compiled.py",
        "_ask_for_target",
    ),
    parts_of_numbas_functions: ("numba-cuda's _defn of an intrinsic", "kernels/gpu/fingerprint.py", "_walk"),
    arrays_of_numba: (
        "numba-cuda's DeviceNDArray._dummy, and _ary of the simulator's",
        "kernels/gpu/device_array.py",
        "_exported_array",
    ),
    blas_of_numpy: (
        "NumPy's _core and _multiarray_umath, by whose file BLAS is found",
        "kernels/cpu/blas.py",
        "_extension",
    ),
    zeroing_of_numba: ("numba-cuda's device_memset", "kernels/histograms/select.py", "clear"),
}
"""Each with the file and the function that use it."""
DOCUMENTED = {"_exit", "_fields", "_replace", "_getvalue", "_handle", "_name"}
"""Of os, named tuples, Numba's struct proxies and ctypes."""
OF_PEERS = {"_core", "_routines_linalg", "_int_mm", "_scaled_mm"}
"""Of CuPy and PyTorch, which benchmarks compare with; a benchmark that cannot call them says so."""


@pytest.mark.parametrize("looks", PARTS, ids=lambda looks: looks.__name__)
def test_what_libraries_do_not_promise_is_still_there(looks: Callable[[Path], bool], tmp_path: Path) -> None:
    part, file, user = PARTS[looks]
    try:
        found: Any = looks(tmp_path)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    assert found is True, (
        f"{part}: not as before ({found}); look at {user} in {file} before this version of it is taken"
    )
    assert f"def {user}(" in (ROOT / file).read_text(), (
        f"{file} has no {user}: say here where {part} is used now"
    )


@dataclass
class NamesInUse:
    """What our modules name."""

    of_zarr_core: set[str] = field(default_factory=set)
    """What they import of it, with its module."""
    ours: set[str] = field(default_factory=set)
    """What they define, or set."""
    used: set[str] = field(default_factory=set)
    """What they read of objects, and import of others' modules."""


@functools.cache
def names_in_use() -> NamesInUse:
    """Of all modules at once: a walk through them takes a second."""
    found = NamesInUse()
    for tree in parsed().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.ours.add(node.name)
            elif isinstance(node, ast.Attribute):
                (found.ours if isinstance(node.ctx, ast.Store) else found.used).add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.ours.add(node.id)
            elif isinstance(node, ast.ImportFrom):
                names, module = [name.name for name in node.names], node.module or ""
                if not module.startswith("tilewright"):
                    found.used.update(names)
                if module.startswith("zarr.core"):
                    found.of_zarr_core.update(f"{module}.{name}" for name in names)
    return found


def test_of_zarr_s_inner_modules_no_others_are_imported() -> None:
    """All below zarr.core is private, as its documentation says."""
    named = " ".join(part for part, _, _ in PARTS.values())
    assert [name for name in names_in_use().of_zarr_core if name not in named] == []


def test_no_other_private_name_of_a_library_is_used() -> None:
    """A name with an underscore that none of our modules defines; one that they define too is not seen."""
    names = names_in_use()
    private = {name for name in names.used - names.ours if re.match("_[^_]", name)}
    named = set(re.findall(r"\b_\w+", " ".join(part for part, _, _ in PARTS.values())))
    assert private - named - DOCUMENTED - OF_PEERS == set(), (
        "name each in PARTS, with a look that it is as before"
    )


@pytest.mark.parametrize("state", [SimpleNamespace(), SimpleNamespace(executor=SimpleNamespace())])
def test_with_another_pool_of_dask_s_the_error_is_that_no_thread_is_there(
    state: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(distributed, "secede", refuse)
    monkeypatch.setattr(distributed.threadpoolexecutor, "thread_state", state)
    monkeypatch.setattr(pool, "current_worker", lambda: SimpleNamespace(state=SimpleNamespace(nthreads=1)))
    with pytest.raises(RuntimeError, match="can't start"):
        pool.make_room(4)
