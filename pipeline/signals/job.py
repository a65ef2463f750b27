"""The signals of a corpus: pieces of whole files, a task each, whose rows are put in the order of its documents."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tilewright.kernels.signals.definitions import NAMES
from tilewright.pipeline.events import Listener, Notice
from tilewright.pipeline.forecast.documents import kind_of_documents
from tilewright.pipeline.forecast.rates import remember_count
from tilewright.pipeline.plan.inputs import WorkerFacts
from tilewright.pipeline.signals.options import Options
from tilewright.pipeline.signals.result import Signals
from tilewright.pipeline.signals.rules import Rule
from tilewright.pipeline.signals.tasks import Measured, measure_piece, no_columns
from tilewright.pipeline.text.corpus import Corpus, check_unchanged
from tilewright.pipeline.text.names import notes_on_ids
from tilewright.pipeline.text.whole.documents import Arrival, whole_pieces
from tilewright.pipeline.text.whole.texts import MOST_NBYTES
from tilewright.pipeline.transfer.files import let_a_tick_pass

if TYPE_CHECKING:
    from distributed import Client


def find_signals(
    client: Client,
    corpus: Corpus,
    options: Options,
    workers: Sequence[WorkerFacts],
    *,
    listener: Listener,
    on_error: str = "stop",
    rules: tuple[Rule, ...] | None = None,
    most_nbytes: int = MOST_NBYTES,
) -> Signals:
    """The signals of the corpus's documents. most_nbytes: the longest document that has all of them.
    rules: by which documents are kept or dropped.

    Raises
    ------
    CorpusError
        A file cannot be read or decompressed, or is not what it was when the corpus was listed.
    """
    let_a_tick_pass(corpus.listed)
    start = time.perf_counter()
    pieces = whole_pieces(corpus, workers)
    arrival = Arrival[Measured](corpus, pieces, _kept)
    arguments = options, corpus.reading, on_error, most_nbytes
    arrival.gather(client, "signals", measure_piece, arguments, listener)
    ordered = arrival.in_order()
    names, ids = ordered.names, ordered.ids if corpus.reading.id_field else None
    for note in notes_on_ids(names, ids, corpus.reading):
        listener(Notice(note))
    compressors = sorted({part.compressor for part in arrival.parts})
    if (differ := note_on(compressors)) is not None:
        listener(Notice(differ))
    check_unchanged(corpus, set(arrival.bad))
    nbytes = sum(int(part.columns["byte_count"].sum()) for part in arrival.parts)
    if not arrival.bad:
        remember_count(
            kind_of_documents("signals", corpus, workers),
            corpus.nbytes,
            len(workers),
            time.perf_counter() - start,
        )
    return Signals(
        documents=names,
        ids=ids,
        signals=_in_order(arrival.parts, ordered.places),
        options=options.facts() | {"compressor": ", ".join(compressors) or None},
        nbytes=nbytes,
        seconds=time.perf_counter() - start,
        bad=arrival.all_bad,
        rules=rules,
    )


def _kept(part: Measured) -> Measured:
    """What is needed of a part until all are there. What came over a network lies in one piece of memory, of which no
    column could be freed before the others."""
    return replace(part, rows=None, columns={name: values.copy() for name, values in part.columns.items()})


def _in_order(parts: list[Measured], places: np.ndarray) -> dict[str, np.ndarray]:
    """The columns of all documents. Takes those of the parts away, one after the other: ten million documents have two
    gigabytes of them, which are not to be there twice."""
    columns = {}
    for name in NAMES:
        arrived = [part.columns.pop(name) for part in parts]
        columns[name] = np.concatenate([no_columns()[name], *arrived])[places]
    return columns


def note_on(compressors: Sequence[str]) -> str | None:
    """What is to be told where the workers' libraries differ."""
    if len(compressors) < 2:
        return None
    return (
        f"compression_ratio is by {' and '.join(compressors)}: workers have different libraries, whose ratios may"
        " differ a little; install the same Python on all of them"
    )
