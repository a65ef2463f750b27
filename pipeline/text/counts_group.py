"""Counts as a group of Zarr: of tokens that are not known beforehand, and sparse rows of documents.

The group's arrays have xarray's names of dimensions: ``token`` and ``document`` are coordinates, ``counts`` lie along
``token``. Per document they lie along ``entry``: ``indices`` are places in ``token``, or bins, and the entries of
document d are those from ``indptr[d]`` to ``indptr[d + 1]``. ``id`` says what identifies each document, where asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.errors import BaseZarrError

from tilewright.kernels.histograms.token_lists import Tokens, encoding_of, joined
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.product.output_group import group_at_url, output_group
from tilewright.pipeline.store.new.groups import ended, writing
from tilewright.pipeline.store.remote.opening import store_at
from tilewright.pipeline.text.formats.outputs import GROUP_KIND
from tilewright.pipeline.text.sparse_counts import SparseCounts

CHUNK = 2**18
"""Numbers of a chunk, and texts of one."""


def store_group(
    counts: np.ndarray | SparseCounts,
    tokens: Tokens | None,
    facts: dict[str, Any],
    path: Path | str,
    *,
    documents: Sequence[str],
    ids: Sequence[str | None] | None = None,
    encoding: str,
    overwrite: bool,
) -> None:
    """Store a histogram as a group, which appears when it is whole.

    facts: `Histogram.short_facts`. documents, ids: what these leave out. encoding: that of the tokens.

    Raises
    ------
    OutputExistsError
        Something stands there and ``overwrite`` is false, or it is no group of counts.
    StoreError
        The place cannot be written.
    """
    facts = {name: fact for name, fact in facts.items() if name != "documents"}
    if ids is not None:
        facts["without_id"] = [place for place, each in enumerate(ids) if each is None]

    def write(group: zarr.Group) -> None:
        if tokens is not None:
            write_texts(
                group,
                "token",
                len(tokens),
                lambda start, stop: [tokens[place].decode(encoding) for place in range(start, stop)],
            )
        if isinstance(counts, SparseCounts):
            write_numbers(group, "indptr", counts.indptr, "document_edge")
            write_numbers(group, "indices", counts.indices, "entry")
            write_numbers(group, "counts", counts.values, "entry")
        else:
            write_numbers(group, "counts", counts, "token")

    write_group(path, GROUP_KIND, facts, write, documents=documents, ids=ids, overwrite=overwrite)


def write_group(
    path: Path | str,
    kind: str,
    facts: dict[str, Any],
    write: Callable[[zarr.Group], None],
    *,
    documents: Sequence[str],
    ids: Sequence[str | None] | None,
    overwrite: bool,
) -> None:
    """Store a group with the names of documents, and what identifies each, if anything does; ``write`` adds the rest.
    It appears when it is whole. path: a URL where it is a text. kind: the attribute that says what the group is.
    facts: its other attributes.

    Raises
    ------
    OutputExistsError
        Something stands there and ``overwrite`` is false, or it is no such group.
    StoreError
        The place cannot be written.
    """

    names, undecoded = as_unicode(documents)
    attributes = {kind: 1} | facts
    if undecoded is not None:
        attributes["documents"] = undecoded

    def create(growing: Path) -> zarr.Group:
        group = zarr.create_group(growing, zarr_format=3, attributes=attributes)
        _write_documents(group, names, ids)
        write(group)
        return group

    place = (
        group_at_url(path, kind, overwrite=overwrite)
        if isinstance(path, str)
        else output_group(path, kind, overwrite=overwrite)
    )
    with place as growing, writing(path):
        ended(lambda: create(growing))


def write_numbers(group: zarr.Group, name: str, values: np.ndarray, *dimensions: str) -> None:
    """Add an array whose dimensions have these names."""
    array = group.create_array(
        name,
        shape=values.shape,
        dtype=values.dtype,
        chunks=(max(1, min(CHUNK, len(values))), *values.shape[1:]),
        dimension_names=dimensions,
    )
    for start in range(0, len(values), CHUNK):
        array[start : start + CHUNK] = values[start : start + CHUNK]


def _write_documents(group: zarr.Group, names: Sequence[str], ids: Sequence[str | None] | None) -> None:
    write_texts(group, "document", len(names), lambda start, stop: names[start:stop])
    if ids is not None:
        write_texts(
            group,
            "id",
            len(ids),
            lambda start, stop: ["" if each is None else each for each in ids[start:stop]],
            "document",
        )


def write_texts(
    group: zarr.Group,
    name: str,
    length: int,
    some: Callable[[int, int], Sequence[str]],
    dimension: str | None = None,
) -> None:
    """Add an array of so many texts, along the dimension of its own name if no other is given. some: those from one
    place up to another."""
    array = group.create_array(
        name,
        shape=(length,),
        dtype=str,
        chunks=(max(1, min(CHUNK, length)),),
        dimension_names=(dimension or name,),
    )
    for start in range(0, length, CHUNK):
        array[start : start + CHUNK] = np.array(some(start, min(start + CHUNK, length)), dtype=object)


def as_unicode(names: Sequence[str]) -> tuple[Sequence[str], list[str] | None]:
    """Names of files as Unicode has them; and as they are where those are not the same, since bytes that are no UTF-8
    are held by JSON's escapes only."""
    if _are_unicode(names):
        return names, None
    return [name.encode("utf-8", "surrogateescape").decode(errors="replace") for name in names], list(names)


def _are_unicode(names: Sequence[str]) -> bool:
    try:
        for name in names:
            name.encode()
    except UnicodeEncodeError:
        return False
    return True


def load_group(path: Path | str) -> tuple[dict[str, Any], np.ndarray | SparseCounts, Tokens | None]:
    """The fields of a histogram, its counts and its tokens, as `store_group` wrote them.

    Raises StoreError where the group cannot be read, or lacks an array.
    """

    def read() -> tuple[dict[str, Any], np.ndarray | SparseCounts, Tokens | None]:
        group = zarr.open_group(store_at(path) if isinstance(path, str) else path, mode="r")
        facts: dict[str, Any] = dict(group.attrs)

        def array(name: str) -> Any:
            found = group[name]
            if not isinstance(found, zarr.Array):
                raise KeyError(f"{name} is no array")
            return found

        if "documents" not in facts:
            facts["documents"] = [str(name) for name in array("document")[...].tolist()]
        if "id" in group:
            without = set(facts.pop("without_id"))
            facts["ids"] = [
                None if place in without else str(each)
                for place, each in enumerate(array("id")[...].tolist())
            ]
        tokens = None
        if "token" in group:
            stored = array("token")
            encoding = encoding_of(str(facts.get("by")))
            tokens = joined(
                [
                    Tokens.of([str(text).encode(encoding) for text in stored[start : start + CHUNK].tolist()])
                    for start in range(0, stored.shape[0], CHUNK)
                ]
            )
        counts = np.asarray(array("counts")[...])
        if "indptr" not in group:
            return facts, counts, tokens
        bins = len(tokens) if tokens is not None else int(facts["bins"])
        return (
            facts,
            SparseCounts(
                np.asarray(array("indptr")[...]).astype(np.int64),
                np.asarray(array("indices")[...]),
                counts,
                bins,
            ),
            tokens,
        )

    try:
        return read()
    except (OSError, BaseZarrError, ValueError, KeyError, TypeError, RuntimeError) as error:
        # The last is what codecs raise of chunks that are damaged.
        raise StoreError(
            f"cannot read the counts in {path}: {error}; count the corpus again, or give another file"
        ) from error
