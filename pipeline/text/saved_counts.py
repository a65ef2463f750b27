"""The files that a histogram is written to: checked before the corpus is counted, whole once they have their names."""

from __future__ import annotations

import csv
import errno
import fcntl
import json
import logging
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import dask
import numpy as np

from tilewright.kernels.histograms.token_lists import encoding_of
from tilewright.kernels.histograms.tokens import KINDS
from tilewright.pipeline.errors import OptionError, OutputError, OutputExistsError, StoreError
from tilewright.pipeline.product.in_place import is_unfinished
from tilewright.pipeline.product.output import (
    absolute,
    check_growing_place,
    check_no_link,
    check_place_free,
    create_output,
    exists_error,
    partial_path,
)
from tilewright.pipeline.product.output_group import check_group_at_url, check_group_free
from tilewright.pipeline.store.arrays import check_bucket, check_source
from tilewright.pipeline.store.chunks import METADATA_NAMES
from tilewright.pipeline.store.locks import is_locked_by
from tilewright.pipeline.store.new.names import check_folder_of
from tilewright.pipeline.store.objects import Objects, objects_at
from tilewright.pipeline.store.probe import KEY_START
from tilewright.pipeline.store.region_write import region_writes, write_region
from tilewright.pipeline.store.remote import files as remote_files
from tilewright.pipeline.store.remote.files import UrlError, is_url, without_local_protocol
from tilewright.pipeline.text.corpus import list_corpus
from tilewright.pipeline.text.counts_group import GROUP_KIND, as_unicode, store_group
from tilewright.pipeline.text.formats.outputs import NPZ_FACTS
from tilewright.pipeline.text.histogram import FEW_BINS, Histogram
from tilewright.pipeline.text.names import Texts
from tilewright.pipeline.text.sparse_counts import SparseCounts
from tilewright.pipeline.text.totals import MOST_BINS_OF_ARRAYS
from tilewright.pipeline.transfer.files import reason_with_remedy

logger = logging.getLogger(__name__)

CHUNK_NBYTES = 2**22
"""About the size of a chunk of a table of counts, in whole rows."""

ROW_GROUP = 2**16
"""Documents of a row group of Parquet."""

PLOT_ENDINGS = (".png", ".svg", ".pdf")

NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors by which file systems say that they have none, such as FAT and some network and user-space ones."""


def check_outputs(
    corpus: Collection[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None,
    plot: str | os.PathLike[str] | None,
    *,
    overwrite: bool,
    out_endings: Collection[str] | None = None,
    group_kind: str = GROUP_KIND,
    arrays: bool = False,
) -> None:
    """Fail before any work when an output could not be written at its end, or would replace what is counted.

    out_endings: those that ``out`` may have, without them those of counts. group_kind: the attribute of the groups of
    Zarr that it may replace. arrays: whether what is stored may be an array of Zarr, which may replace any other.

    Raises
    ------
    OutputError
        One of them is there and is a document of the corpus, or holds one.
    CorpusError
        One of them is there, and the corpus cannot be listed.
    OutputExistsError
        One of them exists and ``overwrite`` is false, or it may not be replaced.
    StoreError
        The folder that one is to stand in is not there, or cannot be written to; a name is too long for it.
    OptionError
        A name whose ending says no format.
    """
    for given, endings in ((out, tuple(out_endings or WRITERS)), (plot, PLOT_ENDINGS)):
        if given is None:
            continue
        place = place_of(given)
        check_ending(place, endings)
        if suffix_of(place) == ".parquet":
            parquet_module()
        if isinstance(place, str):
            _check_at_url(place, corpus, group_kind, overwrite=overwrite)
            continue
        path = place
        _check_length(path)
        check_source(given, "output")
        folder = absolute(path).parent
        if path.suffix == ".zarr":
            if arrays:
                check_place_free(path, overwrite=overwrite)
            else:
                check_group_free(path, group_kind, overwrite=overwrite)
        else:
            check_no_link(path)
            if path.is_dir():
                raise OutputExistsError(
                    f"output: {path} is a folder, so it is not replaced; choose another path"
                )
            if not overwrite:
                check_place_free(path, overwrite=False, replaces_files=True)
        if path.suffix == ".zarr":
            check_growing_place(path)
        _check_apart(path, corpus)
        if not folder.is_dir():
            raise StoreError(f"output: there is no folder {path.parent}; create it, or choose another path")
        check_folder_of(path)


def makes_array(by: str, *, per_document: bool) -> bool:
    """Whether counts of a kind are stored as an array of Zarr, not as a group."""
    return by in KINDS and not (per_document and KINDS[by].bins > MOST_BINS_OF_ARRAYS)


def place_of(given: str | os.PathLike[str]) -> Path | str:
    """Where an output is to stand: a local path, or a URL as text."""
    text = os.fspath(given)
    return text.rstrip("/") if is_url(text) else Path(without_local_protocol(text))


def _check_at_url(
    url: str, corpus: Collection[str | os.PathLike[str]], group_kind: str, *, overwrite: bool
) -> None:
    """As `check_outputs`, of an output at a URL: an object is written beside it, and removed again."""
    inside = [
        each
        for given in corpus
        if (each := os.fspath(given)) and f"{url}/".startswith(f"{each.rstrip('/')}/")
    ]
    check_bucket(url, "output")
    objects = _object_of(url)[0]
    if suffix_of(url) == ".zarr":
        if is_unfinished(objects_at(url)):
            there = False
        elif (there := objects_at(url).get(METADATA_NAMES[3]) is not None) or not overwrite:
            check_group_at_url(objects_at(url), group_kind, overwrite=overwrite)
    else:
        try:
            there = remote_files.facts_of([url])[0] is not None
        except UrlError as error:
            raise StoreError(f"output: cannot look at {url}: {error}") from error
        if there and not overwrite:
            raise exists_error(url)
    if there and inside:
        raise OutputError(
            f"output: {url} is there and belongs to the corpus, {inside[0]}, so it would be counted and then replaced;"
            " choose another path, or move it away"
        )
    probe = f"{KEY_START}{uuid.uuid4().hex}"
    objects.put(probe, b"")
    objects.delete(probe)


def _object_of(url: str) -> tuple[Objects, str]:
    """The object at a URL: the folder that it lies in, and its name there."""
    above, _, name = url.rpartition("/")
    return objects_at(above), name


def suffix_of(place: Path | str) -> str:
    """The ending of what `place_of` gives."""
    return PurePosixPath(place.rpartition("/")[2]).suffix if isinstance(place, str) else place.suffix


def _check_length(path: Path) -> None:
    """An output grows under a name that is longer than its own."""
    draft = partial_path(path) if path.suffix == ".zarr" else _draft_of(path)
    try:
        draft.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            over = len(os.fsencode(draft.name)) - len(os.fsencode(path.name))
            raise StoreError(
                f"output: the name of {path} is too long: while it is written it needs {over} bytes more, as"
                f" {draft.name}; choose a shorter one"
            ) from error
        raise StoreError(f"output: cannot look at {path}: {error}; choose another path") from error


def _check_apart(path: Path, corpus: Collection[str | os.PathLike[str]]) -> None:
    corpus = [each for each in corpus if not is_url(os.fspath(each))]
    if not corpus or not path.exists():
        return
    ours = path.resolve()
    # Files below a folder need no look, but a link there may lead out of it.
    links = [document.name for document in list_corpus(corpus).documents if os.path.islink(document.name)]
    for given in [*corpus, *links]:
        theirs = Path(given).resolve()
        if ours == theirs or theirs in ours.parents or ours in theirs.parents:
            raise OutputError(
                f"output: {path} is there and belongs to the corpus, {os.fspath(given)}, so it would be counted and"
                " then replaced; choose another path, or move it away"
            )


def check_ending(path: Path | str, endings: tuple[str, ...]) -> None:
    """Raise OptionError where the name of an output ends in none of these."""
    suffix = suffix_of(path)
    if suffix not in endings:
        found = f"ends in {suffix!r}" if suffix else "has no ending"
        raise OptionError(f"output: {path} {found}; the ending says the format and is {' or '.join(endings)}")


def save_histogram(histogram: Histogram, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a histogram as ``.csv``, ``.json``, ``.npz``, ``.parquet`` or ``.zarr``; it appears when it is whole, or
    not at all.

    ``overwrite`` replaces what stands there, also what came to stand there while the corpus was counted.

    CSV holds one row for each bin (per document, or of more than 256 bins: for each that occurs). Zarr and NumPy's npz
    hold ``counts`` as they are, with everything else; Parquet, per document, lists of bins and of counts.

    Raises
    ------
    OptionError
        The ending is none of these.
    OutputExistsError
        Something stands there and ``overwrite`` is false.
    StoreError
        The file cannot be written.
    """
    target = place_of(path)
    check_ending(target, tuple(WRITERS))
    WRITERS[suffix_of(target)](histogram, target, overwrite)


def _draft_of(path: Path) -> Path:
    """Where a file grows: hidden, and of this process alone."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def write_whole(path: Path | str, write: Callable[[Path], None], *, overwrite: bool) -> None:
    """Let ``write`` fill a file beside ``path`` and rename it there; a failure leaves nothing behind. Of a URL, that
    file is a temporary one, and becomes an object.

    Raises
    ------
    OutputExistsError
        Something stands there by then and ``overwrite`` is false.
    StoreError
        The file cannot be written.
    """
    if isinstance(path, str):
        _write_object(path, write, overwrite=overwrite)
        return
    try:
        _remove_left(path)
        with _locked_draft(path) as draft:
            write(draft)
            if overwrite:
                os.replace(draft, path)
            else:
                _rename_to_free(draft, path)
    except FileExistsError as error:
        raise exists_error(str(path)) from error
    except OSError as error:
        raise StoreError(f"output: cannot write {path}: {reason_with_remedy(error)}") from error


@contextmanager
def _locked_draft(path: Path) -> Iterator[Path]:
    """An empty file in which an output grows, locked where the file system has locks, so that others tell it from what
    a killed run has left; it goes away with the block, unless it got another name. Raises OSError."""
    draft = _draft_of(path)
    descriptor = _locked(draft, os.O_CREAT)
    try:
        yield draft
    finally:
        with suppress(OSError):
            draft.unlink()
        os.close(descriptor)


def _remove_left(path: Path) -> None:
    """Remove files in which runs that were killed had begun to write this output."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9]+\.partial")
    for left in os.listdir(path.parent):
        if name.fullmatch(left) is None:
            continue
        # One that is locked, or may not be opened or removed, is somebody else's.
        with suppress(OSError):
            descriptor = _locked(path.with_name(left), 0, only=True)
            try:
                path.with_name(left).unlink()
            finally:
                os.close(descriptor)


def _locked(path: Path, flags: int, *, only: bool = False) -> int:
    """Open a file that nobody else has locked, and lock it. Raises OSError.

    only: whether a file is none to be opened that cannot be locked, as on a file system without locks.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if only:
                os.close(descriptor)
                raise
            return descriptor
        if is_locked_by(descriptor, path):
            return descriptor
        os.close(descriptor)  # another run took it for one that was left, and removed it


def _write_object(url: str, write: Callable[[Path], None], *, overwrite: bool) -> None:
    objects, name = _object_of(url)
    with tempfile.TemporaryDirectory(
        prefix="tilewright-counts-", dir=dask.config.get("temporary-directory")
    ) as folder:
        draft = Path(folder) / name
        try:
            write(draft)
            data = draft.read_bytes()
        except OSError as error:
            raise StoreError(
                f"output: cannot make what is to be written to {url} in {folder}: {reason_with_remedy(error)}"
            ) from error
    if overwrite:
        objects.put(name, data)
    elif objects.put_if(name, data, None) is None:
        raise exists_error(url)


def _rename_to_free(draft: Path, path: Path) -> None:
    """Give a file a second name, which nothing has yet: a rename would replace what came to stand there meanwhile.

    Raises FileExistsError where something has it.
    """
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))  # from here on the name is ours
        try:
            os.replace(draft, path)
        except BaseException:
            path.unlink()
            raise


def _save_csv(histogram: Histogram, path: Path | str, overwrite: bool) -> None:
    def write(draft: Path) -> None:
        # File names may hold bytes that are no UTF-8; they go out as they came.
        with open(draft, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            writer = csv.writer(file)
            if isinstance(histogram.counts, SparseCounts):
                writer.writerow(["document", "bin", "label", "count"])
                for place, name in enumerate(histogram.documents):
                    found = (part.tolist() for part in histogram.counts.row(place))
                    writer.writerows(
                        (name, i, histogram.label(i), count) for i, count in zip(*found, strict=True)
                    )
                return
            if histogram.counts.ndim == 1:
                writer.writerow(["bin", "label", "count"])
                everything = histogram.tokens is not None or histogram.bins <= FEW_BINS
                bins = np.arange(histogram.bins) if everything else np.flatnonzero(histogram.counts)
                writer.writerows((i, histogram.label(i), int(histogram.counts[i])) for i in bins.tolist())
                return
            writer.writerow(["document", "bin", "label", "count"])
            for name, row in zip(histogram.documents, histogram.counts, strict=True):
                bins = np.flatnonzero(row)
                writer.writerows((name, i, histogram.label(i), int(row[i])) for i in bins.tolist())

    write_whole(path, write, overwrite=overwrite)


class InPieces(Protocol):
    def json_pieces(self) -> Iterable[str]:
        """The text of its JSON."""


def save_json(found: InPieces, path: Path | str, overwrite: bool) -> None:
    def write(draft: Path) -> None:
        with open(draft, "w", encoding="utf-8") as file:
            file.writelines(found.json_pieces())

    write_whole(path, write, overwrite=overwrite)


def _save_npz(histogram: Histogram, path: Path | str, overwrite: bool) -> None:
    counts, tokens = histogram.counts, histogram.tokens
    arrays: dict[str, Any] = {NPZ_FACTS: np.array(json.dumps(histogram.short_facts()))}
    for name, texts in (("document", histogram.documents), ("id", histogram.ids)):
        if texts is not None:
            packed = Texts.of(texts)
            arrays |= {f"{name}_bytes": packed.texts.data, f"{name}_offsets": packed.texts.offsets}
            arrays[f"{name}_absent"] = packed.absent
    if isinstance(counts, SparseCounts):
        # As scipy.sparse.load_npz reads them.
        arrays |= {
            "format": np.array(b"csr"),
            "shape": np.array(counts.shape),
            "indptr": counts.indptr,
            "indices": counts.indices,
            "data": counts.values,
        }
    else:
        arrays["counts"] = counts
    if tokens is not None:
        arrays |= {"token_bytes": tokens.data, "token_offsets": tokens.offsets}

    def write(draft: Path) -> None:
        with open(draft, "wb") as file:
            np.savez_compressed(file, **arrays)

    write_whole(path, write, overwrite=overwrite)


def parquet_module() -> Any:
    """The part of pyarrow that reads and writes Parquet. Raises OptionError where it is not installed."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise OptionError(
            "output: Parquet is written by pyarrow, which is not installed here; install it (pip install"
            " 'tilewright[text]'), or choose .json or .zarr"
        ) from error
    return parquet


def _save_parquet(histogram: Histogram, path: Path | str, overwrite: bool) -> None:
    """A row for each document with lists of its bins, or tokens, and their counts; or a row for each bin."""
    parquet = parquet_module()
    import pyarrow

    names, undecoded = as_unicode(histogram.documents)
    per_document = histogram.counts.ndim == 2
    listed = list(histogram.documents) if undecoded is not None or not per_document else None
    # The mark by which outputs are known stands behind what may be long (`listing.py`).
    metadata = {"documents": json.dumps(listed), GROUP_KIND: json.dumps(histogram.short_facts())}
    rows = _document_rows(histogram, names) if per_document else _bin_rows(histogram)

    def write(draft: Path) -> None:
        first = next(rows).replace_schema_metadata(metadata)
        with parquet.ParquetWriter(draft, first.schema) as writer:
            writer.write_table(first)
            for table in rows:
                writer.write_table(table.replace_schema_metadata(metadata))

    try:
        write_whole(path, write, overwrite=overwrite)
    except pyarrow.ArrowException as error:
        raise StoreError(f"output: cannot write {path}: {error}") from error


def _token_array(histogram: Histogram, places: np.ndarray) -> Any:
    """Bins as Arrow has them: tokens as text, or as bytes where they are no text; others as their numbers."""
    import pyarrow

    if histogram.tokens is None:
        return pyarrow.array(places.astype(np.uint32))
    tokens = histogram.tokens
    data = [tokens[place] for place in range(len(tokens))] if len(places) >= len(tokens) else None
    found = [tokens[place] if data is None else data[place] for place in places.tolist()]
    return pyarrow.array(found, pyarrow.binary()).cast(
        pyarrow.binary() if histogram.is_of_bytes else pyarrow.string()
    )


def document_columns(
    names: Sequence[str], ids: Sequence[str | None] | None, part: slice = slice(None)
) -> dict[str, Any]:
    """The columns of a table that say which document each row is of: its name, as `as_unicode` has it, and its id where
    there are any."""
    import pyarrow

    given = {"document": names} | ({} if ids is None else {"id": ids})
    return {name: pyarrow.array(texts[part], pyarrow.string()) for name, texts in given.items()}


def _document_rows(histogram: Histogram, names: Sequence[str]) -> Iterator[Any]:
    import pyarrow

    counts, ids = histogram.counts, histogram.ids
    for start in range(0, max(1, len(counts)), ROW_GROUP):
        stop = min(start + ROW_GROUP, len(counts))
        if isinstance(counts, SparseCounts):
            edges = counts.indptr[start : stop + 1]
            part = slice(edges[0], edges[-1])
            places, values = counts.indices[part], counts.values[part]
        else:
            rows, places = np.nonzero(counts[start:stop])
            values = counts[start:stop][rows, places]
            edges = np.searchsorted(rows, np.arange(stop - start + 1))
        offsets = pyarrow.array((edges - edges[0]).astype(np.int32))
        lists = {
            "bins" if histogram.tokens is None else "tokens": _token_array(histogram, places),
            "counts": pyarrow.array(values.astype(np.uint64)),
        }
        columns = document_columns(names, ids, slice(start, stop))
        columns |= {name: pyarrow.ListArray.from_arrays(offsets, values) for name, values in lists.items()}
        yield pyarrow.table(columns)


def _bin_rows(histogram: Histogram) -> Iterator[Any]:
    import pyarrow

    totals = histogram.totals
    shown = np.arange(histogram.bins) if histogram.bins <= FEW_BINS else np.flatnonzero(totals)
    for start in range(0, max(1, len(shown)), CHUNK_NBYTES):
        places = shown[start : start + CHUNK_NBYTES]
        columns = {"bin" if histogram.tokens is None else "token": _token_array(histogram, places)}
        if histogram.tokens is None:
            labels = [histogram.label(place) for place in places.tolist()]
            columns["label"] = pyarrow.array(labels, pyarrow.string())
        yield pyarrow.table(columns | {"count": pyarrow.array(totals[places].astype(np.uint64))})


def _save_zarr(histogram: Histogram, path: Path | str, overwrite: bool) -> None:
    if histogram.tokens is not None or isinstance(histogram.counts, SparseCounts):
        store_group(
            histogram.counts,
            histogram.tokens,
            histogram.short_facts(),
            path,
            documents=histogram.documents,
            ids=histogram.ids,
            encoding=encoding_of(histogram.by),
            overwrite=overwrite,
        )
        return
    store_counts(histogram.counts, path, histogram.facts(), overwrite=overwrite)


def store_counts(
    counts: np.ndarray, path: Path | str, attributes: dict[str, Any], *, overwrite: bool = False
) -> None:
    """Store counts, int64[bins] or int64[(documents, bins)], as a Zarr array that appears when it is whole.

    Raises
    ------
    OutputExistsError
        Something stands there and ``overwrite`` is false, or it is no array; or another run writes there.
    StoreError
        The place cannot be written.
    """
    rows = max(1, CHUNK_NBYTES // (counts.shape[-1] * counts.itemsize))
    chunks = counts.shape if counts.ndim == 1 else (max(1, min(rows, len(counts))), counts.shape[1])
    output = create_output(path, counts.shape, counts.dtype, chunks, compressed=True, overwrite=overwrite)
    try:
        # One chunk after the other: zarr-python would write many at once, and go on with the rest when one has failed.
        if counts.ndim == 1:
            write_region(output.array, (slice(0, len(counts)),), counts)
        else:
            whole = (slice(0, counts.shape[0]), slice(0, counts.shape[1]))
            for piece in region_writes(output.array, whole):
                piece.write([counts[piece.source]])
        output.array.attrs.update(attributes)
        for left in output.publish():
            logger.warning("%s", left)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"output: cannot write {path}: {reason_with_remedy(error)}") from error
    finally:
        try:
            output.remove()
        finally:
            output.release()


WRITERS: dict[str, Callable[[Histogram, Path | str, bool], None]] = {
    ".csv": _save_csv,
    ".json": save_json,
    ".npz": _save_npz,
    ".parquet": _save_parquet,
    ".zarr": _save_zarr,
}
