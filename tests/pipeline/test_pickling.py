"""Calls are pickled without Dask's ``distributed``, unless they hold what only it can pickle."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from tilewright.pipeline import pickling

class Mine:
    value = 7

what = {what}
pickled = pickling.dumps(what)
again = pickling.loads(pickled)
assert {expected}, again
print("distributed" in sys.modules)
"""


@pytest.mark.parametrize(
    ("what", "expected", "by_dask"),
    [
        ("['lib/__main__.py', '__main__.pyc']", "again == what", False),  # of any corpus of Python's files
        ("Mine", "b'value' in pickled and again.value == 7", True),
        ("Mine()", "b'value' in pickled and again.value == 7", True),
        ("lambda: 3", "again() == 3", True),
    ],
)
def test_only_what_another_process_cannot_import_goes_through_dask(
    what: str, expected: str, by_dask: bool
) -> None:
    script = SCRIPT.format(what=what, expected=expected)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == str(by_dask)
