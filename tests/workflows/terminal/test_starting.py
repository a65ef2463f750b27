"""Libraries that others only look for are hidden from those, and from nobody else."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from tilewright.workflows.terminal.starting import UNUSED, put_off_collector

LIBRARIES = {"cupy": "", "scipy": "linalg/cython_blas", "cffi": "", "jinja2": "exceptions"}


def modules(here: Path, script: str) -> str:
    """What a script prints that has libraries of these names, which are not to be imported for nothing."""
    for name, inner in LIBRARIES.items():
        places = [name, *(f"{name}/{part}" for part in [inner.rpartition("/")[0]] if part)]
        for place in places:
            (here / place).mkdir(exist_ok=True)
            (here / place / "__init__.py").write_text(
                "FFI = ndarray = Environment = FileSystemLoader = Template = object\n__version__ = '1.17.0'\n"
            )
    (here / "scipy/linalg/cython_blas.py").write_text("")
    (here / "jinja2/exceptions.py").write_text("TemplateNotFound = OSError\n")
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=here, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


ASK = """
import sys
from tilewright.workflows.terminal.starting import UNUSED, Unused
if {hidden}:
    sys.meta_path.insert(0, Unused())
import dask.widgets, zarr.core.buffer.gpu, numba.core.typing.cffi_utils, numba.np.linalg
try:
    numba.np.linalg.ensure_blas()
except ImportError:
    pass
found = sorted(set(UNUSED) & set(sys.modules))
import cffi, cupy, jinja2, scipy.linalg.cython_blas
print(*found, len(set(UNUSED) & set(sys.modules)))
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(("hidden", "printed"), [(True, "4\n"), (False, "cffi cupy jinja2 scipy 4\n")])
def test_those_that_only_look_do_not_find_them_and_others_do(
    tmp_path: Path, hidden: bool, printed: str
) -> None:
    """The other way round it shows that those modules still look for them."""
    assert set(LIBRARIES) == set(UNUSED)
    assert modules(tmp_path, ASK.format(hidden=hidden)) == printed


def test_only_the_command_hides_them() -> None:
    look = "import sys, tilewright.workflows.cli as cli, contextlib\n"
    look += "with contextlib.suppress(SystemExit): cli.main(words=['--version'])\n"
    look += "print(*(type(each).__name__ for each in sys.meta_path))"
    ran = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert "Unused" not in ran.stdout


COLLECTING = """
import gc, threading, weakref
from tilewright.workflows.terminal import starting

class Cycle:
    def __init__(self):
        self.itself = self

def collected():
    "Whether Python by itself finds a cycle that nobody holds, within as many objects as it needs for that."
    cycle = weakref.ref(Cycle())
    kept = [Cycle() for _ in range(10 * max(700, *gc.get_threshold()))]
    return cycle() is None

usual = gc.get_threshold()
print(collected())
starting.is_the_command = lambda: True
starting.put_off_collector(60)
print(collected())
gc.set_threshold(*usual)
starting.put_off_collector(0.05)
(timer,) = [each for each in threading.enumerate() if getattr(each, "interval", None) == 0.05]
timer.join(60)
print(collected(), timer.daemon, gc.get_threshold() == usual)
"""


def test_the_command_collects_no_cycles_until_later() -> None:
    """In a process of its own: libraries that other tests use set the collector up, or off, for their own ends."""
    ran = subprocess.run([sys.executable, "-c", COLLECTING], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", "False", "True", "True", "True"]


def test_only_the_command_puts_them_off() -> None:
    usual = gc.get_threshold()
    put_off_collector(60)
    assert gc.get_threshold() == usual
