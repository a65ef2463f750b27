"""One task of the step that ``srun`` starts: the workers of a node, or of a share of its cores.

Slurm sends SIGTERM to all processes of a step when it is about to end a job, as at preemption, often without a signal
to the job's script. Workers that obeyed it would be gone before the command has recorded what they have nearly done. So
this process leaves a note for the `keeper`, and the workers, below it, take no notice: they end with their scheduler,
with the step, or by SIGKILL once the time is over.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tilewright.workflows.batch.children import ending_with_parent
from tilewright.workflows.batch.folder import JobFolder

NANNIES = "tilewright.workflows.batch.nannies"


def main(path: str, attempt: int) -> int:
    folder = JobFolder(Path(path))

    def note(number: int, frame: Any) -> None:
        folder.stop_file(attempt).touch()

    signal.signal(signal.SIGTERM, note)
    command = [sys.executable, "-m", NANNIES, path, str(attempt)]
    with subprocess.Popen(ending_with_parent(command)) as nannies:
        status = nannies.wait()
    if status:
        how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
        print(f"the workers of task {os.environ.get('SLURM_PROCID', '?')} ended {how}", file=sys.stderr)
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
