"""The command that finds duplicates in a corpus: checks its arguments, lists the files, opens a cluster and looks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from tilewright.kernels.arguments import check_callable, check_choice, check_flag, taken_by
from tilewright.kernels.choices import (
    DEVICES,
    DeviceName,
    ErrorPolicy,
    FormName,
    HashName,
    PairsName,
    PassageName,
    SchemeName,
    ShingleName,
)
from tilewright.pipeline import config
from tilewright.pipeline.cluster.profiles import Cluster
from tilewright.pipeline.duplicates.job import find_duplicates
from tilewright.pipeline.duplicates.options import options_of
from tilewright.pipeline.duplicates.result import Duplicates
from tilewright.pipeline.duplicates.saved import OUTPUTS
from tilewright.pipeline.events import Listener, log_notices
from tilewright.pipeline.forecast.documents import DocumentsPlan
from tilewright.pipeline.text.formats.reading import reading_of
from tilewright.workflows.documents.opening import corpus_and_workers, output_place, plan_of_documents


def duplicates(
    paths: str | bytes | os.PathLike[str] | Iterable[str | bytes | os.PathLike[str]],
    *,
    threshold: float = 0.8,
    shingle: ShingleName = "word",
    ngram: int = 5,
    casefold: bool = False,
    normalise: FormName | None = None,
    num_perm: int = 128,
    bands: int | None = None,
    rows: int | None = None,
    seed: int = 1,
    hash: HashName = "sha1",
    scheme: SchemeName = "affine32",
    pairs: PairsName = "all",
    signatures: bool = False,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    device: DeviceName = "auto",
    raw: bool = False,
    encoding: str | None = None,
    field: str | Iterable[str] | None = None,
    id_field: str | None = None,
    split_on: PassageName | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    on_error: ErrorPolicy = "stop",
    listener: Listener = log_notices,
) -> Duplicates:
    """Find the documents of a corpus that are there more than once: the same texts, and those whose sets of shingles
    are nearly the same.

    One pass over the corpus forms a digest and a MinHash signature of each document. Documents whose signatures agree
    in one of several bands are read once more, and those pairs are near-duplicates whose Jaccard index, of their
    shingles as they are, reaches the threshold. The answer depends neither on the number of workers nor on how the
    corpus is cut, nor on the device.

    Parameters
    ----------
    paths
        A file, a folder, or several of them; what is a document of them, `tilewright.histogram` says, and its options
        ``raw``, ``encoding``, ``field``, ``id_field``, ``split_on``, ``include``, ``exclude`` and ``on_error`` mean the
        same here.
    threshold
        The least Jaccard index of near-duplicates, above 0 and up to 1: the shingles that both have, of those that
        either has.
    shingle, ngram
        What shingles consist of, ``word`` or ``character``, and of how many. Words are those of ``by="word"``, joined
        by one blank; characters those of the decoded text. A document with fewer than ``ngram`` is one shingle; one
        with none, such as an empty one, has no near-duplicates.
    casefold, normalise
        How words and characters are compared: by ``str.casefold``, and in one of Unicode's forms, ``NFC``, ``NFD``,
        ``NFKC`` or ``NFKD``.
    num_perm, seed, hash, scheme
        Of the signatures, which are those of datasketch's ``MinHash`` for the same ones. ``hash``: ``sha1``, its
        ``sha1_hash32``, or ``xxh32``. ``scheme``: ``affine32``, or ``legacy``, the one before its release 2.0.
    bands, rows
        How a signature is cut; together they take at most ``num_perm`` numbers. Without them they are chosen so that 99
        of 100 pairs just at the threshold are compared. More bands of fewer rows miss fewer pairs, and compare more.
    pairs
        ``all``: every pair that agrees in a band is compared. ``links``: only as many as show which documents are of
        one cluster, where a text is there thousands of times with small changes.
    signatures
        Whether the result has them.
    out, overwrite
        A .json, .zarr or .parquet to write the result to, and whether to replace one.
    cluster, cluster_file
        As of `tilewright.histogram`.
    device
        What forms signatures: ``auto`` (the GPU if there is one), ``cuda`` or ``cpu``. All else is done on the workers'
        cores.
    listener
        Is called with every event (``tilewright.pipeline.events``).

    Raises
    ------
    TilewrightError
        One of its subclasses: OptionError for an argument that means nothing; CorpusError for paths that are not there,
        hold no files, or cannot be read, decompressed or split, and for files that change meanwhile; PlanError where
        more pairs would have to be compared than this process has memory for; OutputExistsError, OutputError and
        StoreError for an ``out`` that cannot be written; ClusterError as its name says.

    Examples
    --------
    >>> from pathlib import Path
    >>> import tilewright as tw
    >>> for name in ("first.txt", "second.txt"):
    ...     written = Path(name).write_text("the same text in both of them")
    >>> tw.duplicates(["first.txt", "second.txt"]).dropped
    ('second.txt',)
    """
    given = dict(locals())
    config.check_all(cluster_file=cluster_file)
    check_choice("device", device, DEVICES)
    check_callable("listener", listener)
    overwrite = check_flag("overwrite", overwrite)
    options, reading = options_of(**taken_by(options_of, given)), reading_of(**taken_by(reading_of, given))
    place = output_place(out, OUTPUTS.writers)
    with corpus_and_workers(
        paths,
        reading,
        "duplicates",
        "looking for duplicates in",
        check_output=OUTPUTS.check_of(place, overwrite=overwrite),
        cluster=cluster,
        cluster_file=cluster_file,
        listener=listener,
        device=device,
    ) as (corpus, client, facts):
        found = find_duplicates(client, corpus, options, facts, listener=listener, on_error=on_error)
    if place is not None:
        OUTPUTS.save(found, place, overwrite=overwrite)
    return found


DIGEST_NBYTES = 16
PLACES_NBYTES = 48
"""Of a document: where it is, how long, which document it is the same as, and which cluster it is of."""


def plan_only(
    paths: Sequence[str],
    *,
    out: str | None,
    overwrite: bool,
    cluster: Cluster,
    cluster_file: str | None,
    device: DeviceName,
    on_error: ErrorPolicy,
    listener: Listener,
    **asked: Any,
) -> DocumentsPlan:
    """How `duplicates` would go through a corpus, but for what is compared, which nobody knows before; the listener
    gets what it would refuse beside files. Raises as that."""
    of_reading = taken_by(reading_of, asked)
    reading = reading_of(on_error=on_error, **of_reading)
    options = options_of(**{name: value for name, value in asked.items() if name not in of_reading})
    kept = 4 * options.num_perm if options.signatures else 0
    return plan_of_documents(
        paths,
        reading,
        "duplicates",
        document_nbytes=DIGEST_NBYTES + PLACES_NBYTES + 8 * options.bands + kept,
        out=out,
        check_output=OUTPUTS.check_of(out, overwrite=overwrite),
        cluster=cluster,
        cluster_file=cluster_file,
        on_error=on_error,
        listener=listener,
        device=device,
        options=options,
    )
