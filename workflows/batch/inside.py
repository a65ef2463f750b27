"""The command of a job, inside it: ``python -m tilewright.workflows.batch.inside FOLDER``.

Its words are read from the job's folder, so that no list of processes shows them. The `keeper` says by the environment
where the job's own cluster is, and `place` then submits nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tilewright.workflows.batch.folder import JobFolder
from tilewright.workflows.cli import main

if __name__ == "__main__":
    main("tilewright", list(JobFolder(Path(sys.argv[1])).submitted().words))
