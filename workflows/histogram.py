"""Histograms of text corpora, and the files that they are written to."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from tilewright.kernels.histogram import kind_named
from tilewright.pipeline import store
from tilewright.pipeline.cluster import Cluster, open_cluster
from tilewright.pipeline.corpus import list_corpus
from tilewright.pipeline.errors import OptionError, OutputExistsError, StoreError
from tilewright.pipeline.events import Listener, Notice, ignore
from tilewright.pipeline.histogram import FEW_BINS, Histogram, count_corpus, label
from tilewright.pipeline.submit import survey


def histogram(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    by: str = "byte",
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    device: str = "auto",
    per_document: bool = False,
    listener: Listener = ignore,
) -> Histogram:
    """Count the bytes, letters, pairs or characters of a corpus: every file named, and every file below a
    folder.

    Parameters
    ----------
    paths
        A file, a folder, or several of them.
    by
        ``byte`` (256 bins), ``ascii`` (128; bytes above 127 are skipped), ``letter`` (A to Z, case folded;
        all else is skipped), ``bigram`` (65,536 pairs of adjacent bytes of a document, bin = first × 256 +
        second) or ``codepoint`` (0x110000 Unicode characters, as ``bytes.decode("utf-8", errors="replace")``
        gives them).
    cluster
        A profile of ``cluster_file``, a scheduler's address, or a ``distributed.Client``. Its workers must
        see the files under the same paths.
    device
        ``auto`` (the GPU if there is one), ``cuda`` or ``cpu``.
    per_document
        One row of counts for each document instead of one for all.
    listener
        Is called with every event (``tilewright.pipeline.events``).

    Raises
    ------
    TilewrightError
        One of its subclasses: CorpusError for paths that are not there, hold no files, or cannot be read;
        OptionError, PlanError, ClusterError and DeviceUnavailableError as their names say.
    """
    kind_named(by)  # a wrong word is told before a corpus of a million files is listed
    corpus = list_corpus([paths] if isinstance(paths, str | os.PathLike) else paths)
    for note in corpus.notes:
        listener(Notice(note))
    with open_cluster(cluster, cluster_file) as client:
        facts = survey(client, device)
        workers = f"{len(facts)} worker{'s' if len(facts) != 1 else ''}"
        listener(Notice(f"counting {len(corpus.documents)} documents on {facts[0].name} with {workers}"))
        return count_corpus(
            client,
            corpus,
            by=by,
            device=facts[0].device,
            device_name=facts[0].name,
            per_document=per_document,
            listener=listener,
        )


def check_outputs(*paths: str | os.PathLike[str] | None, overwrite: bool) -> None:
    """Fail before any work when an output could not be written at its end.

    Raises
    ------
    OutputExistsError
        One of them exists and ``overwrite`` is false.
    StoreError
        The folder that one is to stand in is not there.
    OptionError
        A name without an ending that says a format, or one given twice.
    """
    given = [Path(path) for path in paths if path is not None]
    for path in given:
        if path.suffix not in (*WRITERS, ".png"):
            known = ", ".join([*WRITERS, ".png"])
            raise OptionError(f"{path} ends in {path.suffix or 'nothing'!r}; the endings are {known}")
        if path.exists() and not overwrite:
            raise OutputExistsError(f"output: {path} exists; choose another path, or ask to overwrite it")
        if not path.absolute().parent.is_dir():
            raise StoreError(
                f"output: the folder {path.parent} does not exist; create it, or choose another path"
            )


def save_histogram(histogram: Histogram, path: str | os.PathLike[str]) -> None:
    """Write a histogram as ``.csv``, ``.json`` or ``.zarr``; the file appears when it is whole, or not at
    all.

    CSV holds one row for each bin (per document: for each that occurs). Zarr holds ``counts`` as it is, with
    everything else as attributes.

    Raises
    ------
    OptionError
        The ending is none of these.
    StoreError
        The file cannot be written.
    """
    target = Path(path)
    if target.suffix not in WRITERS:
        raise OptionError(
            f"{target} ends in {target.suffix or 'nothing'!r}; the endings are {', '.join(WRITERS)}"
        )
    WRITERS[target.suffix](histogram, target)


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a file beside ``path`` and rename it there; a failure leaves nothing behind."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(draft)
        os.replace(draft, path)
    except OSError as error:
        raise StoreError(f"output: cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            draft.unlink()


def _save_csv(histogram: Histogram, path: Path) -> None:
    def write(draft: Path) -> None:
        # File names may hold bytes that are no UTF-8; they go out as they came.
        with open(draft, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            writer = csv.writer(file)
            if histogram.counts.ndim == 1:
                writer.writerow(["bin", "label", "count"])
                everything = histogram.bins <= FEW_BINS
                bins = np.arange(histogram.bins) if everything else np.flatnonzero(histogram.counts)
                writer.writerows((i, label(histogram.by, i), int(histogram.counts[i])) for i in bins.tolist())
                return
            writer.writerow(["document", "bin", "label", "count"])
            for name, row in zip(histogram.documents, histogram.counts, strict=True):
                bins = np.flatnonzero(row)
                writer.writerows((name, i, label(histogram.by, i), int(row[i])) for i in bins.tolist())

    write_whole(path, write)


def _save_json(histogram: Histogram, path: Path) -> None:
    def write(draft: Path) -> None:
        with open(draft, "w", encoding="utf-8") as file:
            json.dump(histogram.to_json(), file)

    write_whole(path, write)


def _save_zarr(histogram: Histogram, path: Path) -> None:
    counts = histogram.counts
    row_nbytes = histogram.bins * counts.itemsize
    rows = max(1, store.MOST_CHUNK_NBYTES // row_nbytes)
    chunks = (histogram.bins,) if counts.ndim == 1 else (min(rows, len(counts)), histogram.bins)
    output = store.create_output(path, counts.shape, counts.dtype, chunks, compressed=True, overwrite=True)
    try:
        store.write_region(output.array, tuple(slice(0, side) for side in counts.shape), counts)
        output.array.attrs.update({k: v for k, v in histogram.to_json().items() if k != "counts"})
        output.publish()
    except BaseException:
        if output.partial is not None:
            store.remove_tree(output.partial)
        raise


WRITERS: dict[str, Callable[[Histogram, Path], None]] = {
    ".csv": _save_csv,
    ".json": _save_json,
    ".zarr": _save_zarr,
}
