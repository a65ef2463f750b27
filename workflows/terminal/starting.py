"""The start of the command's process, which imports nothing that libraries only look for and the command never uses,
and looks for no cycles of references while little else than modules is made."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from tilewright.workflows.terminal.ending import is_the_command

UNUSED = {
    "cupy": ("zarr.core.buffer.gpu",),
    "scipy": ("numba", "numba.np.linalg"),
    "cffi": ("numba.core.typing.cffi_utils",),
    "jinja2": ("dask.widgets.widgets",),
}
"""Libraries, each with the modules that ask whether it is there, and work without it: Zarr's buffers on GPUs; linear
algebra, and foreign functions, within Numba's compiled loops; what notebooks show of Dask. On an H100's host they took
0.16, 0.33, 0.12 and 0.06 s."""

IMPORTING = ("importlib.", "_frozen_importlib")
"""How modules are called that import others on somebody's behalf."""

COLLECTED_FROM = 3.0
"""From how many seconds on behind its start a command's process collects cycles of references."""


def hide_what_is_unused() -> None:
    """Where this process is the command and nothing else, have those modules find that their library is not there.
    Whoever else imports one gets it."""
    if is_the_command():
        sys.meta_path.insert(0, Unused())


def put_off_collector(seconds: float = COLLECTED_FROM) -> None:
    """Where this process is the command and nothing else, have Python look for cycles of references only ``seconds``
    later. Until then it would find none, but go through the functions and classes of all modules time and again, which
    takes a tenth of a short command. What hold arrays are in no cycles, but for errors', which are collected by name.
    """
    if not is_the_command():
        return
    usual = gc.get_threshold()
    gc.set_threshold(0)  # and not gc.disable(), which others do and undo
    timer = threading.Timer(seconds, gc.set_threshold, usual)
    timer.name = "tilewright-collector"
    timer.daemon = True
    timer.start()


class Unused(MetaPathFinder):
    """Finds no module, and refuses a few to those that do not need them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        asking = UNUSED.get(name.partition(".")[0])
        if asking is not None and (who := _importer()) in asking:
            raise ModuleNotFoundError(f"{who} works without {name}, which is not used here", name=name)
        return None


def _importer() -> str | None:
    """The module whose import statement this thread is at."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith((__name__, *IMPORTING)):
        frame = frame.f_back
    return None if frame is None else frame.f_globals.get("__name__")
