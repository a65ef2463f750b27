"""Counts that were written to a file, read back: what `saved_counts.py` writes and ``--json`` prints, but for CSV."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from tilewright.kernels.arguments import shown
from tilewright.kernels.histograms.token_kinds import TokenKind, any_kind_named
from tilewright.kernels.histograms.token_lists import Tokens, encoding_of, in_ascending_order
from tilewright.kernels.histograms.tokens import KINDS, Kind
from tilewright.pipeline.config import path_text
from tilewright.pipeline.errors import OptionError, ShapeError, StoreError
from tilewright.pipeline.product.output_group import has_group_of, is_group_of
from tilewright.pipeline.store.arrays import open_array
from tilewright.pipeline.store.objects import objects_at
from tilewright.pipeline.store.region_read import region_reads
from tilewright.pipeline.store.remote.files import is_url, without_local_protocol
from tilewright.pipeline.text.counts_group import GROUP_KIND, load_group
from tilewright.pipeline.text.formats.outputs import NPZ_FACTS
from tilewright.pipeline.text.names import Texts
from tilewright.pipeline.text.sparse_counts import SparseCounts
from tilewright.pipeline.text.totals import MOST_BINS_OF_ARRAYS
from tilewright.pipeline.transfer.files import read_file

AGAIN = "count the corpus again, or give a file that tilewright histogram wrote"


Counts = np.ndarray | SparseCounts
Read = tuple[dict[str, Any], Counts, Tokens | None]


def read_counts(source: str | os.PathLike[str]) -> Read:
    """The fields of a histogram beside its counts, these, int64[bins] or int64[(documents, bins)], and its tokens where
    those are not known beforehand.

    Raises
    ------
    OptionError
        The name's ending says no format that can be read, or ``source`` is no path.
    StoreError
        The file is not there or cannot be read, or holds something else than a histogram.
    """
    text = path_text(source)
    if not text:
        raise OptionError(f"{shown(source)} is no path; give that of a file that tilewright histogram wrote")
    path = text if is_url(text) else Path(without_local_protocol(text))
    suffix = PurePosixPath(text).suffix
    if suffix == ".csv":
        raise OptionError(
            f"{path}: a .csv says neither all documents nor what was skipped, so that nothing could be added to it;"
            " write the counts as .json or .zarr too"
        )
    if suffix not in READERS:
        found = f"ends in {suffix!r}" if suffix else "has no ending"
        raise OptionError(f"{path} {found}; counts are read from {ENDINGS}")
    facts, counts, tokens = READERS[suffix](path)
    _check(path, facts, counts, tokens)
    return facts, counts, tokens


def _contents(path: Path | str) -> bytes:
    """Raises OSError."""
    if not isinstance(path, str):
        return read_file(path)
    above, _, name = path.rpartition("/")
    found = objects_at(above, "counts").get(name)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return found


def _read_json(path: Path | str) -> Read:
    try:
        found = json.loads(_contents(path))
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}; give a file of counts") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is no whole JSON: {error}; {AGAIN}") from error
    if not isinstance(found, dict) or "counts" not in found:
        raise StoreError(f"{path} holds no histogram: it has no counts; {AGAIN}")
    listed, texts = found.pop("counts"), found.pop("tokens", None)
    try:
        tokens = None if texts is None else _tokens(texts, str(found.get("by")))
        if listed == []:
            return found, _of_nothing(found, tokens), tokens
        if _is_sparse(found, listed):
            return found, _sparse(listed, int(found["bins"])), tokens
        return found, np.array(listed), tokens
    except (ValueError, OverflowError, TypeError, KeyError) as error:
        raise StoreError(f"{path} holds no histogram: its counts are no table ({error}); {AGAIN}") from error


def _tokens(texts: list[str], by: str) -> Tokens:
    return Tokens.of([text.encode(encoding_of(by)) for text in texts])


def _of_nothing(facts: Mapping[str, Any], tokens: Tokens | None) -> Counts:
    """Counts without a number, which as a list say neither of what type they are nor how many bins there would be: of a
    corpus without tokens, or one row for each of no documents."""
    # An earlier release did not say it, but listed the files of counts that are not per document.
    if tokens is not None and not facts.get("per_document", not facts.get("documents")):
        return np.zeros(0, np.int64)
    bins = len(tokens) if tokens is not None else int(facts["bins"])
    if tokens is None and bins <= MOST_BINS_OF_ARRAYS:
        return np.zeros((0, bins), np.int64)
    return _sparse([], bins)


def _is_sparse(facts: Mapping[str, Any], listed: Any) -> bool:
    """Whether each document's counts are a pair of lists, or a row of many bins."""
    if not isinstance(listed, list) or not listed or not isinstance(listed[0], list):
        return False
    return facts.get("by") not in KINDS or KINDS[facts["by"]].bins > MOST_BINS_OF_ARRAYS


def _sparse(rows: list[Any], bins: int) -> SparseCounts:
    """Rows of a JSON: pairs of places and counts, or all counts."""
    parts = []
    for row in rows:
        if len(row) == 2 and isinstance(row[0], list):
            places, values = (np.array(part, np.int64).reshape(-1) for part in row)
        else:
            whole = np.array(row, np.int64)
            if whole.shape != (bins,):
                raise ValueError(f"a row has {whole.size} counts, and not {bins}")
            places = np.flatnonzero(whole)
            values = whole[places]
        if len(places) != len(values) or (values <= 0).any():
            raise ValueError("a row's counts are no whole numbers of more than 0, one for each place")
        parts.append((places, values))
    indptr = np.cumsum([0, *(len(places) for places, _ in parts)])
    indices = np.concatenate([np.empty(0, np.int64), *(places for places, _ in parts)])
    values = np.concatenate([np.empty(0, np.int64), *(values for _, values in parts)])
    return SparseCounts(indptr, indices, values, bins)


def _read_npz(path: Path | str) -> Read:
    try:
        with np.load(io.BytesIO(_contents(path)), allow_pickle=False) as found:
            facts = json.loads(str(found[NPZ_FACTS]))
            for name, key in (("document", "documents"), ("id", "ids")):
                if f"{name}_bytes" in found:
                    texts = Tokens(found[f"{name}_bytes"], found[f"{name}_offsets"])
                    facts[key] = Texts(texts, found[f"{name}_absent"]).all()
            tokens = Tokens(found["token_bytes"], found["token_offsets"]) if "token_bytes" in found else None
            counts: Counts = (
                SparseCounts(found["indptr"], found["indices"], found["data"], int(found["shape"][1]))
                if "indptr" in found
                else found["counts"]
            )
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}; give a file of counts") from error
    except (ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise StoreError(f"{path} holds no histogram: {error}; {AGAIN}") from error
    return facts, counts, tokens


def _read_parquet(path: Path | str) -> Read:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise OptionError(
            f"{path} is read by pyarrow, which is not installed here; install it (pip install 'tilewright[text]')"
        ) from error
    try:
        source = pyarrow.BufferReader(_contents(path))
        # Without documents of their own, their names are in the footer.
        found = parquet.read_table(source, thrift_string_size_limit=2**31 - 1)
        metadata = found.schema.metadata or {}
        facts, documents = json.loads(metadata[GROUP_KIND.encode()]), json.loads(metadata[b"documents"])
        if "document" not in found.column_names:
            facts["documents"] = documents
            tokens = _parquet_tokens(found["token"])[0] if "token" in found.column_names else None
            values = found["count"].to_numpy().astype(np.int64)
            if tokens is not None:
                return facts, values, tokens
            counts = np.zeros(int(facts["bins"]), np.int64)
            counts[found["bin"].to_numpy()] = values
            return facts, counts, None
        facts["documents"] = documents or found["document"].to_pylist()
        if "id" in found.column_names:
            facts["ids"] = found["id"].to_pylist()
        lists = found["counts"].combine_chunks()
        values = lists.flatten().to_numpy()
        indptr = np.concatenate([[0], np.cumsum(lists.value_lengths().to_numpy())]).astype(np.int64)
        if "tokens" in found.column_names:
            tokens, columns = _parquet_tokens(found["tokens"].combine_chunks().flatten())
            return facts, SparseCounts(indptr, columns, values, len(tokens)), tokens
        sparse = SparseCounts(
            indptr, found["bins"].combine_chunks().flatten().to_numpy(), values, int(facts["bins"])
        )
        return facts, sparse if sparse.bins > MOST_BINS_OF_ARRAYS else np.asarray(sparse), None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}; give a file of counts") from error
    except (ValueError, KeyError, IndexError, TypeError, pyarrow.ArrowException) as error:
        raise StoreError(f"{path} holds no histogram: {error}; {AGAIN}") from error


def _parquet_tokens(column: Any) -> tuple[Tokens, np.ndarray]:
    """The different tokens of a column, in the order of their bytes, and the place there, uint32, of each entry."""
    import pyarrow

    whole = column.combine_chunks() if isinstance(column, pyarrow.ChunkedArray) else column
    coded = whole.cast(pyarrow.binary()).dictionary_encode()
    texts = coded.dictionary.to_pylist()
    order = sorted(range(len(texts)), key=texts.__getitem__)
    rank = np.empty(len(texts), np.uint32)
    rank[order] = np.arange(len(texts))
    return Tokens.of([texts[place] for place in order]), rank[coded.indices.to_numpy()]


def _read_zarr(path: Path | str) -> Read:
    if is_group_of(path, GROUP_KIND) if isinstance(path, Path) else has_group_of(path, GROUP_KIND):
        return load_group(path)
    try:
        array = open_array(path, ndim=1, role="counts")
    except ShapeError:
        array = open_array(path, ndim=2, role="counts")
    counts = np.empty(array.shape, array.dtype.newbyteorder("="))
    for part in region_reads(array, tuple(slice(0, side) for side in array.shape)):
        part.read(counts[part.target])
    return dict(array.attrs), counts, None


ENDINGS = ".json, .npz, .parquet and .zarr"
READERS = {".json": _read_json, ".npz": _read_npz, ".parquet": _read_parquet, ".zarr": _read_zarr}


def _check(path: Path | str, facts: Mapping[str, Any], counts: Counts, tokens: Tokens | None) -> None:
    """Raise StoreError for what is no histogram of ours."""

    def fail(what: str) -> None:
        raise StoreError(f"{path} holds no histogram: {what}; {AGAIN}")

    by, documents = facts.get("by"), facts.get("documents")
    try:
        kind = any_kind_named(by)  # type: ignore[arg-type]
    except OptionError:
        if by is None:
            fail("it does not say what it counts")
        fail(f"it says that it counts by {shown(by)}, and not by {', '.join(KINDS)}, word, line or ngram:N")
    if isinstance(kind, TokenKind) != (tokens is not None):
        fail(f"counts by {by} {'lack' if tokens is None else 'have'} tokens")
    bins = kind.bins if isinstance(kind, Kind) else len(tokens or ())
    if tokens is not None:
        _check_tokens(tokens, fail)
    if not isinstance(documents, list) or not all(isinstance(name, str) and name for name in documents):
        fail(f"its documents are {shown(documents)}, no list of names")
    elif counts.shape not in ((bins,), (len(documents), bins)):
        fail(
            f"{len(documents)} documents by {by} have no counts of shape {counts.shape}, but ({bins},) or that many for"
            " each"
        )
    if isinstance(counts, SparseCounts):
        _check_rows(counts, fail)
    elif counts.dtype.kind not in "iu" or (counts.size and counts.min() < 0):
        fail("its counts are no whole numbers of 0 or more")
    elif tokens is not None and counts.size and counts.min() == 0:
        fail("it has tokens that do not occur: chunks of its counts are missing")
    for name in ("skipped", "nbytes"):
        if not isinstance(facts.get(name), int) or isinstance(facts[name], bool) or facts[name] < 0:
            fail(f"its {name} is {shown(facts.get(name))}, no number of bytes")
    seconds = facts.get("seconds")
    is_time = isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds < math.inf
    if not isinstance(facts.get("device"), str) or not is_time:
        fail("it does not say where and how long it was counted")
    _check_later_facts(facts, counts, fail)


def _check_later_facts(facts: Mapping[str, Any], counts: Counts, fail: Callable[[str], None]) -> None:
    """Check those that files of the first releases did not have."""
    if facts.get("per_document", counts.ndim == 2) != (counts.ndim == 2):
        fail(f"its counts are {'not ' * (counts.ndim == 1)}per document, against what it says")
    for name in ("document_count", "undecodable"):
        number = facts.get(name)
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
            fail(f"its {name} is {shown(number)}, no whole number of 0 or more")
    if not isinstance(facts.get("options", {}), dict):
        fail(f"its options are {shown(facts['options'])}, no names with what each is")
    bad = facts.get("bad", [])
    pairs = isinstance(bad, list) and all(isinstance(each, list) and len(each) == 2 for each in bad)
    if not pairs or not all(isinstance(text, str) for each in bad for text in each):
        fail(f"what it left out is {shown(bad)}, no pairs of names and reasons")
    ids = facts.get("ids")
    if ids is None:
        return
    if not isinstance(ids, list) or not all(each is None or isinstance(each, str) for each in ids):
        fail(f"its ids are {shown(ids)}, no list of texts")
    elif counts.ndim == 1 or len(ids) != len(counts):
        fail(f"it has {len(ids)} ids, and not one for each row of counts")


def _check_tokens(tokens: Tokens, fail: Callable[[str], None]) -> None:
    offsets = tokens.offsets
    if offsets[0] != 0 or offsets[-1] != len(tokens.data) or (np.diff(offsets) < 0).any():
        fail("its tokens are not one behind the other")
    if not in_ascending_order(tokens):
        fail("its tokens are not in the order of their bytes, each once")


def _check_rows(counts: SparseCounts, fail: Callable[[str], None]) -> None:
    indptr, indices = counts.indptr, counts.indices
    if (
        indptr[0] != 0
        or indptr[-1] != len(indices)
        or len(indices) != len(counts.values)
        or (np.diff(indptr) < 0).any()
        or any(each.dtype.kind not in "iu" for each in (indices, counts.values))
        or (len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < counts.bins)
        or (len(indices) and int(counts.values.min()) < 1)
    ):
        fail("its rows are no rows of bins and of whole numbers of more than 0")
    begins = np.zeros(len(indices) + 1, np.bool_)
    begins[indptr] = True
    if not begins[1:-1][indices[1:] <= indices[:-1]].all():
        fail("a row of it does not have its bins in ascending order, each once")
