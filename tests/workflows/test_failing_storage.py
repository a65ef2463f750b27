"""Storage that fails at any call: a line that names the file and a remedy, the finished tiles kept, and the next run
right."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.workflows.failing_storage import CASES, SYNC

HERE = Path(__file__).parent
MOST_SECONDS = 30
"""That a run may take to end once its storage fails; half a second is usual."""


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of each case that is asked for, all in one process, which takes longer to start than they do."""
    asked = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in asked if isinstance(item, pytest.Function)]
    compiler = shutil.which("cc") or shutil.which("gcc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs a C compiler, and a system whose loader takes LD_PRELOAD")
    folder = tmp_path_factory.mktemp("storage")
    shim = folder / "failing_storage.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", shim, HERE / "failing_storage.c", "-ldl"], check=True
    )
    (folder / "scratch").mkdir()
    ran = subprocess.run(
        [sys.executable, "-m", "tests.workflows.failing_storage", folder / "scratch", *names],
        env=os.environ | {"LD_PRELOAD": str(shim)},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
    found = (json.loads(line) for line in ran.stdout.splitlines())
    return {outcome["case"]: outcome for outcome in found}


@pytest.mark.more
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "calls", "resumes", "what"),
    # Beside the name what it is about, one object for each, so that the sample has all of those.
    [(name, case.calls, case.resumes, sys.intern(name.partition(":")[0])) for name, case in CASES.items()],
    ids=CASES,
)
def test_a_failure_of_storage_costs_no_finished_tile(
    name: str, calls: int, resumes: bool, what: str, outcomes: dict[str, Any]
) -> None:
    case, outcome = CASES[name], outcomes[name]
    failed, again = outcome["failed"], outcome["again"]
    assert outcome["times"] > 0
    assert (failed["error"], again["error"]) == ("StoreError", None)
    assert failed["seconds"] < MOST_SECONDS
    told = failed["told"]
    assert "\n" not in told
    assert os.strerror(case.error) in told
    assert re.search(r"/scratch/\w", told)
    assert "run it again" in told
    stored = outcome["before"] + len(failed["done"])
    if case.calls == SYNC:
        assert again["kept"] > 0 or not stored
    else:
        assert again["kept"] >= stored
    if count := re.search(r"(\d+) of 8 tiles are finished and kept", told):
        assert int(count[1]) == again["kept"]
    else:
        assert failed["done"] == []
    assert again["kept"] + len(again["done"]) == 8
    assert outcome["right"]
    assert outcome["left"] == ["a", "b", "c"]
