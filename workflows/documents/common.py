"""What all commands share that go through a corpus, those that count it too."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tilewright.kernels.choices import DeviceName
from tilewright.pipeline.cluster.here.opening import open_executor
from tilewright.pipeline.cluster.profiles import Cluster
from tilewright.pipeline.events import Caution, Listener, Notice, Teller
from tilewright.pipeline.plan.inputs import WorkerFacts
from tilewright.pipeline.text.corpus import Corpus
from tilewright.pipeline.worker.survey import survey
from tilewright.workflows.batch.planning import planned_job


def several(paths: Any) -> Any:
    """Paths as whoever lists a corpus takes them, also where it is a single one."""
    return [paths] if isinstance(paths, str | bytes | os.PathLike) else paths


def tell_of(corpus: Corpus, listener: Listener) -> None:
    """What was seen while a corpus was listed."""
    for note in corpus.notes:
        listener(Notice(note))
    for caution in corpus.cautions:
        listener(Caution(caution))


@contextmanager
def planned_workers(
    cluster: Cluster, cluster_file: str | None, device: DeviceName, listener: Listener
) -> Iterator[Sequence[WorkerFacts]]:
    """The workers that a plan is for: those that are there, or that a batch job would have. While the block runs the
    job's settings hold."""
    if (job := planned_job(cluster, cluster_file)) is not None:
        with job.settings():
            yield job.facts_of_texts(device, Teller(listener).warn)
        return
    with open_executor(cluster, cluster_file, loops=False) as client:
        yield survey(client, device, loops=())
