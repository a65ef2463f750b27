"""The command that counts a corpus: checks its arguments, lists the files, opens a cluster and has it count them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from tilewright.kernels.arguments import check_callable, check_choice, check_flag, taken_by
from tilewright.kernels.choices import (
    DEVICES,
    DeviceName,
    ErrorPolicy,
    FormName,
    KindName,
    PassageName,
    TokenName,
)
from tilewright.kernels.histograms.token_kinds import TokenKind, any_kind_named
from tilewright.kernels.histograms.tokens import Kind
from tilewright.kernels.numbers import counted
from tilewright.pipeline import config
from tilewright.pipeline.cluster.here.opening import open_executor
from tilewright.pipeline.cluster.profiles import Cluster
from tilewright.pipeline.cluster.watch import workers_held
from tilewright.pipeline.errors import CorpusError, OptionError, OutputError, StoreError
from tilewright.pipeline.events import Listener, Notice, Teller, log_notices, on_waiting
from tilewright.pipeline.forecast.counts import CountPlan, plan_count
from tilewright.pipeline.records import place_of
from tilewright.pipeline.text.corpus import Corpus, list_corpus
from tilewright.pipeline.text.counting import count_corpus
from tilewright.pipeline.text.formats.piped import named, pipes_among, without_pipes
from tilewright.pipeline.text.formats.reading import Reading, reading_of
from tilewright.pipeline.text.histogram import Histogram
from tilewright.pipeline.text.kept_counts import State, kept_counts, open_counts
from tilewright.pipeline.transfer.file_rectangles import FEW_NBYTES
from tilewright.pipeline.worker.survey import KINDS, survey
from tilewright.workflows.documents.common import planned_workers, several, tell_of


def histogram(
    paths: str | bytes | os.PathLike[str] | Iterable[str | bytes | os.PathLike[str]],
    *,
    by: KindName | TokenName = "byte",
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    device: DeviceName = "auto",
    per_document: bool = False,
    raw: bool = False,
    encoding: str | None = None,
    field: str | Iterable[str] | None = None,
    id_field: str | None = None,
    split_on: PassageName | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    on_error: ErrorPolicy = "stop",
    casefold: bool = False,
    normalise: FormName | None = None,
    state: str | os.PathLike[str] | State | None = None,
    resume: bool = True,
    listener: Listener = log_notices,
) -> Histogram:
    """Count the bytes, letters, pairs, characters, words, lines or n-grams of a corpus: every file named, and every
    file below a folder that is neither hidden nor an earlier output.

    What a file is, its first bytes say, and where they do not tell, its name. What is compressed (gzip, bzip2, xz,
    LZMA, Zstandard, LZ4) is decompressed while it is read, by ``tilewright.decompress-threads`` of each worker: a file
    each, or all of them a large one of several parts, in memory that does not depend on its length. The members of tar
    and zip archives and the records of WARC files are documents; so are, where they are asked for, texts in fields of
    JSON lines and columns of Parquet and Arrow, lines, and paragraphs.

    Parameters
    ----------
    paths
        A file, a folder, or several of them; also by URLs, of S3, HTTP or what fsspec opens. ``-`` is the standard
        input: what comes through it, or through a pipe that is named, is kept in a temporary file meanwhile.
    by
        ``byte`` (256 bins), ``ascii`` (128; bytes above 127 are skipped), ``letter`` (A to Z, case folded;
        all else is skipped), ``bigram`` (65,536 pairs of adjacent bytes of a document, bin = first × 256 +
        second), ``codepoint`` (0x110000 Unicode characters, as ``bytes.decode("utf-8", errors="replace")``
        gives them), ``word`` (longest runs of Unicode's word characters, UTS #18's ``\\w``), ``line`` (as
        ``bytes.splitlines`` has them), or ``ngram:N``, ``ngram:N:character`` or ``ngram:N:byte`` (2 to 5 adjacent
        words, characters or bytes of a document). The last three have a bin for each that occurs.
    cluster
        A profile of ``cluster_file``, a scheduler's address, a ``distributed.Client``, or a cluster of Dask's,
        such as a ``distributed.LocalCluster``, which is left open. Its workers must see the files under the same
        paths and URLs.
    device
        ``auto`` (the GPU if there is one), ``cuda`` or ``cpu``.
    per_document
        One row of counts for each document instead of one for all.
    raw
        Count the bytes of all files as they are stored, whatever they are.
    encoding
        Python's name for the encoding of all texts, which are counted as UTF-8; without it they are UTF-8, or what
        a byte order mark says (UTF-16, UTF-32).
    field
        The field of JSON lines, or the column of Parquet and Arrow, whose texts are the documents; of several, each
        text is a document of its own. Plain texts beside them, and those in archives and WARC files, have no
        fields: each is a document as a whole, and a notice says how many are.
    id_field
        The field, column or header of a WARC's records that identifies a document, for ``Histogram.ids``; with
        ``per_document`` alone. Files of which no record has it cannot be counted; notices say how many documents have
        no id, and which ids are of several.
    split_on
        ``line`` or ``paragraph``: what of a text is a document.
    include, exclude
        Patterns of the files below folders, and of the members of archives, that are counted, or are not: ``*.txt`` is
        of names, ``2024/**/*.txt`` of paths. Files that are named are counted unless ``exclude`` says otherwise.
    on_error
        ``stop`` ends the count with an error at the first file that cannot be counted; ``report`` leaves such files
        out, whole, and such lines of JSON lines, and lists them in ``Histogram.bad``.
    casefold, normalise
        How words count, alone and in n-grams: by ``str.casefold``, and in one of Unicode's forms, ``NFC``, ``NFD``,
        ``NFKC`` or ``NFKD``. They are found as they stand, then normalised, folded, and normalised again.
    state
        A folder, made if it is not there, in which finished pieces are kept: a count that was stopped goes on from
        there, and one of a corpus that has grown since counts what is new. Files whose size and times are as they were
        are not read again; those of which only times changed are compared, by fingerprints of their contents; counts
        of files that are not in the corpus any more are left out. The counts are those of a count without it.
    resume
        Whether to go on from what ``state`` keeps; if not, that is forgotten.
    listener
        Is called with every event (``tilewright.pipeline.events``).

    Raises
    ------
    TilewrightError
        One of its subclasses: CorpusError for paths that are not there, hold no files, or cannot be read,
        decompressed or split, and for files that were written to, replaced or removed before all were counted;
        OptionError, PlanError, ClusterError and DeviceUnavailableError as their names say; OptionError also for a
        ``state`` of other counts, OutputExistsError for one that another run has open, StoreError for one that cannot
        be written.

    Examples
    --------
    >>> from pathlib import Path
    >>> import tilewright as tw
    >>> written = Path("hamlet.txt").write_text("To be, or not to be")
    >>> tw.histogram("hamlet.txt", by="letter").top(3)
    [('O', 4), ('T', 3), ('B', 2)]
    """
    asked = _checked(reading_of(**taken_by(reading_of, locals())), **taken_by(_checked, locals()))
    kind, keeping = asked.kind, asked.keeping
    with without_pipes(several(paths)) as (files, names):
        if names and keeping is not None and not keeping.temporary:
            raise OptionError(
                f"state: what comes through {', '.join(names.values())} is not there any more for the next run; give a"
                " file, or leave state out"
            )
        corpus = named(_listed(files, asked), names)
        tell_of(corpus, listener)
        with (
            open_counts(
                keeping, kind, per_document=asked.per_document, reading=asked.reading, listener=listener
            ) as record,
            open_executor(cluster, cluster_file, loops=device == "cpu") as client,
            workers_held(client, waiting=on_waiting(listener, "histogram", "ends it")),
        ):
            facts = survey(client, device, loops=("cpu",) if corpus.nbytes < FEW_NBYTES else KINDS)
            count, workers = counted(len(corpus.documents), "file"), counted(len(facts), "worker")
            listener(Notice(f"counting {count} by {kind.name} on {facts[0].name} with {workers}"))
            return count_corpus(
                client,
                corpus,
                kind,
                facts,
                per_document=asked.per_document,
                listener=listener,
                record=record,
                on_error=on_error,
            )


def plan_histogram(
    paths: str | bytes | os.PathLike[str] | Iterable[str | bytes | os.PathLike[str]],
    *,
    by: KindName | TokenName = "byte",
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    device: DeviceName = "auto",
    per_document: bool = False,
    raw: bool = False,
    encoding: str | None = None,
    field: str | Iterable[str] | None = None,
    id_field: str | None = None,
    split_on: PassageName | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    on_error: ErrorPolicy = "stop",
    casefold: bool = False,
    normalise: FormName | None = None,
    state: str | os.PathLike[str] | State | None = None,
    resume: bool = True,
    listener: Listener = log_notices,
) -> CountPlan:
    """How `histogram` would count a corpus: its files and how each is read, the pieces and the memory of workers and of
    this process, what earlier runs leave, and which files would be refused.

    Nothing is written, and of the files only first bytes are read, of at most 10,000 local ones: of the others, names
    decide, and what listing found. What a file holds behind its first bytes may still be refused. All arguments are as
    for `histogram`; a profile's own cluster is started, for what its workers have, but of kind slurm no job is
    submitted, and the plan is for the workers that it would have. The listener gets what the count would be refused for
    beside its files, such as a ``state`` of other counts.

    Raises
    ------
    TilewrightError
        As `histogram` does for paths, options and clusters, and PlanError for counts that would not fit this process's
        memory; OptionError for ``-`` and pipes, which can be read once.

    Examples
    --------
    >>> from pathlib import Path
    >>> import tilewright as tw
    >>> written = Path("hamlet.txt").write_text("To be, or not to be")
    >>> plan = tw.plan_histogram("hamlet.txt", by="word")
    >>> plan.files, plan.pieces, [way.what for way in plan.ways]
    (1, 1, ['as stored'])
    """
    asked = _checked(reading_of(**taken_by(reading_of, locals())), **taken_by(_checked, locals()))
    files = several(paths)
    try:
        files = list(files)
    except TypeError:
        pass  # whoever lists the corpus says what is wrong with it
    else:
        if pipes := pipes_among(files):
            raise OptionError(
                f"{', '.join(pipes)} can be read once, and a plan would leave nothing to count: plan for files"
            )
    corpus = _listed(files, asked)
    tell = Teller(listener)
    with ExitStack() as stack:
        record = None
        try:
            kept = kept_counts(
                asked.keeping, asked.kind, per_document=asked.per_document, reading=asked.reading
            )
            record = stack.enter_context(kept)
        except (OptionError, StoreError) as error:
            tell.warn(f"without --plan-only this would be refused: {error}")
        facts = stack.enter_context(planned_workers(cluster, cluster_file, device, listener))
        return plan_count(
            corpus,
            asked.kind,
            facts,
            per_document=asked.per_document,
            record=record,
            on_error=on_error,
        )


def plan_only(
    corpus: Sequence[str],
    *,
    out: str | None,
    plot: str | None,
    state: State | None,
    overwrite: bool,
    listener: Listener,
    **options: Any,
) -> CountPlan:
    """`plan_histogram`, with what the command would write; the listener gets what it would refuse of that. Raises as
    that."""
    from tilewright.pipeline.text.saved_counts import check_outputs, makes_array

    tell = Teller(listener)
    try:
        arrays = makes_array(options["by"], per_document=options["per_document"])
        check_outputs(corpus, out, plot, overwrite=overwrite, arrays=arrays)
    except (OptionError, StoreError, OutputError, CorpusError) as error:
        tell.warn(f"without --plan-only this would be refused: {error}")
    planned = plan_histogram(corpus, state=state, listener=listener, **options)
    named = {"counts": out, "plot": plot, "pieces": None if state is None else str(state.folder)}
    return planned.written_to({name: place for name, place in named.items() if place is not None})


class _Asked(NamedTuple):
    """What a count is asked for, found good."""

    kind: Kind | TokenKind
    reading: Reading
    keeping: State | None
    per_document: bool


def _checked(
    reading: Reading,
    *,
    by: str,
    cluster_file: str | None,
    device: str,
    per_document: bool,
    casefold: bool,
    normalise: FormName | None,
    state: str | os.PathLike[str] | State | None,
    resume: bool,
    listener: Listener,
) -> _Asked:
    """A wrong word is refused before a corpus of a million files is listed."""
    config.check_all(cluster_file=cluster_file)
    check_choice("device", device, DEVICES)
    check_callable("listener", listener)
    per_document = check_flag("per_document", per_document)
    if reading.id_field and not per_document:
        raise OptionError(
            f"id_field={reading.id_field!r} says what identifies each document, and without per_document all of them"
            " have one count: add per_document, or leave out id_field"
        )
    keeping = _state_of(state, check_flag("resume", resume))
    kind = any_kind_named(by, casefold=casefold, normalise=normalise)
    return _Asked(kind, reading, keeping, per_document)


def _listed(files: Any, asked: _Asked) -> Corpus:
    apart = None if asked.keeping is None else asked.keeping.apart
    return list_corpus(files, reading=asked.reading, apart=apart)


def _state_of(state: str | os.PathLike[str] | State | None, resume: bool) -> State | None:
    if state is None or isinstance(state, State):
        return state
    return State(place_of(state), resume)
