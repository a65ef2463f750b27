"""The command that finds quality signals of documents: checks its arguments, lists the files, opens a cluster and has
them measured."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tilewright.kernels.arguments import check_callable, check_flag, taken_by
from tilewright.kernels.choices import ErrorPolicy, PassageName
from tilewright.kernels.signals.definitions import NAMES
from tilewright.pipeline import config
from tilewright.pipeline.cluster.profiles import Cluster
from tilewright.pipeline.events import Listener, log_notices
from tilewright.pipeline.forecast.documents import DocumentsPlan
from tilewright.pipeline.signals.job import find_signals
from tilewright.pipeline.signals.options import options_of
from tilewright.pipeline.signals.result import Signals
from tilewright.pipeline.signals.rules import rules_of
from tilewright.pipeline.signals.saved import OUTPUTS
from tilewright.pipeline.text.formats.reading import reading_of
from tilewright.workflows.documents.opening import corpus_and_workers, output_place, plan_of_documents

RulesName = str | os.PathLike[str] | Mapping[str, Any]
"""A set of rules, a file, or what a file has."""


def signals(
    paths: str | bytes | os.PathLike[str] | Iterable[str | bytes | os.PathLike[str]],
    *,
    stop_words: str | Iterable[str] | None = None,
    rules: RulesName | Iterable[RulesName] | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    raw: bool = False,
    encoding: str | None = None,
    field: str | Iterable[str] | None = None,
    id_field: str | None = None,
    split_on: PassageName | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    on_error: ErrorPolicy = "stop",
    listener: Listener = log_notices,
) -> Signals:
    """Find quality signals of each document of a corpus: its length, how its characters and words are, what of it is
    repeated. Filters such as Gopher's are conditions on them.

    One pass over the corpus. Each document's signals depend on it alone, so neither on the number of workers nor on how
    the corpus is cut. All is done on the workers' cores, also where they have GPUs.

    Parameters
    ----------
    paths
        A file, a folder, or several of them; what is a document of them, `tilewright.histogram` says, and its options
        ``raw``, ``encoding``, ``field``, ``id_field``, ``split_on``, ``include``, ``exclude`` and ``on_error`` mean the
        same here.
    stop_words
        The words of which ``stop_word_count`` and ``unique_stop_word_count`` speak, as they stand in texts; without
        them Gopher's eight English ones.
    rules
        By which documents are kept: ``gopher``, ``gopher-quality``, ``gopher-repetition``, a .yaml or .json file of
        bounds, a mapping such as a file has, or several of these, of which a later one overrides what it names. The
        result has ``keep`` and ``reasons`` then.
    out, overwrite
        A .csv, .json, .parquet or .zarr to write the result to, and whether to replace one.
    cluster, cluster_file
        As of `tilewright.histogram`.
    listener
        Is called with every event (``tilewright.pipeline.events``).

    Raises
    ------
    TilewrightError
        One of its subclasses: OptionError for an argument that means nothing; CorpusError for paths that are not there,
        hold no files, or cannot be read, decompressed or split, and for files that change meanwhile; OutputExistsError,
        OutputError and StoreError for an ``out`` that cannot be written; ClusterError as its name says.

    Examples
    --------
    >>> from pathlib import Path
    >>> import tilewright as tw
    >>> written = Path("hamlet.txt").write_text("To be, or not to be")
    >>> found = tw.signals("hamlet.txt")
    >>> found["word_count"].tolist(), found["stop_word_count"].tolist()
    ([6], [2])
    """
    given = dict(locals())
    config.check_all(cluster_file=cluster_file)
    check_callable("listener", listener)
    overwrite = check_flag("overwrite", overwrite)
    options = options_of(stop_words)
    judges = None if rules is None else rules_of(rules)
    reading = reading_of(**taken_by(reading_of, given))
    place = output_place(out, OUTPUTS.writers)
    with corpus_and_workers(
        paths,
        reading,
        "signals",
        "finding signals of the documents in",
        check_output=OUTPUTS.check_of(place, overwrite=overwrite),
        cluster=cluster,
        cluster_file=cluster_file,
        listener=listener,
    ) as (corpus, client, facts):
        found = find_signals(
            client, corpus, options, facts, listener=listener, on_error=on_error, rules=judges
        )
    if place is not None:
        OUTPUTS.save(found, place, overwrite=overwrite)
    return found


def plan_only(
    paths: Sequence[str],
    *,
    stop_words: Sequence[str] | None,
    rules: Sequence[str] | None,
    out: str | None,
    overwrite: bool,
    cluster: Cluster,
    cluster_file: str | None,
    on_error: ErrorPolicy,
    listener: Listener,
    **reading: Any,
) -> DocumentsPlan:
    """How `signals` would go through a corpus; the listener gets what it would refuse beside files. Raises as that."""
    options_of(stop_words)
    judges = () if rules is None else rules_of(rules)
    return plan_of_documents(
        paths,
        reading_of(on_error=on_error, **reading),
        "signals",
        document_nbytes=8 * (len(NAMES) + bool(judges)),
        out=out,
        check_output=OUTPUTS.check_of(out, overwrite=overwrite),
        cluster=cluster,
        cluster_file=cluster_file,
        on_error=on_error,
        listener=listener,
    )
