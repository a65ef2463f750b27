"""What is alike in all that is found of whole documents: a corpus is listed, and a cluster opened."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tilewright.kernels.arguments import shown
from tilewright.kernels.choices import DeviceName
from tilewright.kernels.numbers import counted
from tilewright.pipeline import config
from tilewright.pipeline.cluster.here.opening import open_executor
from tilewright.pipeline.cluster.profiles import Cluster
from tilewright.pipeline.cluster.watch import workers_held
from tilewright.pipeline.duplicates.options import Options
from tilewright.pipeline.errors import CorpusError, OptionError, OutputError, StoreError
from tilewright.pipeline.events import Listener, Notice, Teller, on_waiting
from tilewright.pipeline.forecast.documents import DocumentsPlan, plan_documents
from tilewright.pipeline.plan.inputs import WorkerFacts
from tilewright.pipeline.text.corpus import Corpus, list_corpus
from tilewright.pipeline.text.formats.piped import named, pipes_among, without_pipes
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.worker.survey import survey
from tilewright.workflows.documents.common import planned_workers, several, tell_of

if TYPE_CHECKING:
    from distributed import Client


def output_place(out: Any, endings: Iterable[str]) -> str | None:
    """The path or URL that a result is written to. Raises OptionError for what is none."""
    if out is None or (text := config.path_text(out)):
        return None if out is None else text
    raise OptionError(f"out={shown(out)} is no path; give one that ends in {' or '.join(endings)}, or None")


@contextmanager
def corpus_and_workers(
    paths: str | bytes | os.PathLike[str] | Iterable[str | bytes | os.PathLike[str]],
    reading: Reading,
    work: str,
    begun: str,
    *,
    check_output: Callable[[Collection[str]], None] | None,
    cluster: Cluster,
    cluster_file: str | None,
    listener: Listener,
    device: str = "cpu",
) -> Iterator[tuple[Corpus, Client, Sequence[WorkerFacts]]]:
    """A corpus, and the workers that look at it, for as long as the block runs.

    work: what it is called while workers are waited for. begun: what is said as it begins, before the number of files.
    check_output: is given the files, but for what comes through pipes, before any of them is read.
    device: one of `choices.DEVICES`, for the workers.
    """
    with without_pipes(several(paths)) as (files, names):
        corpus = named(list_corpus(files, reading=reading), names)
        if check_output is not None:
            check_output([os.fsdecode(each) for each in files if os.fsdecode(each) not in names])
        tell_of(corpus, listener)
        with (
            open_executor(cluster, cluster_file) as client,
            workers_held(client, waiting=on_waiting(listener, work, "ends it")),
        ):
            facts = survey(client, device)
            count, workers = counted(len(corpus.documents), "file"), counted(len(facts), "worker")
            where = f" on {facts[0].name}" if facts[0].device == "cuda" else ""
            listener(Notice(f"{begun} {count}{where} with {workers}"))
            yield corpus, client, facts


def plan_of_documents(
    paths: str | bytes | os.PathLike[str] | Iterable[str | bytes | os.PathLike[str]],
    reading: Reading,
    work: str,
    *,
    document_nbytes: int,
    out: str | None,
    check_output: Callable[[Collection[str]], None] | None,
    cluster: Cluster,
    cluster_file: str | None,
    on_error: str,
    listener: Listener,
    device: DeviceName = "cpu",
    options: Options | None = None,
) -> DocumentsPlan:
    """How `work` would go through a corpus: nothing is written, and of the files only first bytes are read. The
    listener gets what the run would be refused for beside its files. The arguments are as of `corpus_and_workers` and
    `plan_documents`."""
    given = list(several(paths))
    if pipes := pipes_among(given):
        raise OptionError(
            f"{', '.join(pipes)} can be read once, and a plan would leave nothing to read: plan for files"
        )
    corpus = list_corpus(given, reading=reading)
    if check_output is not None:
        try:
            check_output([os.fsdecode(each) for each in given])
        except (OptionError, StoreError, OutputError, CorpusError) as error:
            Teller(listener).warn(f"without --plan-only this would be refused: {error}")
    with planned_workers(cluster, cluster_file, device, listener) as facts:
        planned = plan_documents(
            work, corpus, facts, document_nbytes=document_nbytes, options=options, on_error=on_error
        )
    return planned if out is None else replace(planned, outputs={"result": out})
