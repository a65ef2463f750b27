"""The numbers of pairs that C's elements are formed of, stored beside C in its shape and chunks, as int64.

Each tile stores its own with what it stores of C, and the record of finished tiles has both: a tile is finished once
both are there. They grow as C does, and get their name just before C gets its own. A run that was killed between the
two takes it from them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import zarr

from tilewright.pipeline.errors import OutputError, OutputExistsError, StoreError
from tilewright.pipeline.plan.band import Band
from tilewright.pipeline.plan.pairs import COUNT_DTYPE
from tilewright.pipeline.product.audit import audit_by_checksums, record_of
from tilewright.pipeline.product.banded import check_given_band
from tilewright.pipeline.product.in_place import check_given_output, growing_in_place
from tilewright.pipeline.product.ledger import Past, array_facts, journal_at, read_journal, read_record
from tilewright.pipeline.product.output import (
    CHECKSUMS_NAME,
    MARK_NAME,
    Output,
    check_growing_place,
    check_output_free,
    create_output,
    is_array_folder,
    open_growing,
    partial_path,
    resume_output,
    resume_output_in_place,
)
from tilewright.pipeline.store.arrays import Source, local_path, name_of, open_array, write_unit
from tilewright.pipeline.store.probe import check_shared_output
from tilewright.pipeline.store.region import StoredArray
from tilewright.pipeline.store.sessions import session_of
from tilewright.pipeline.transfer.files import with_remedy


@contextmanager
def named_counts() -> Iterator[None]:
    """Errors about an output in the block are about that of the numbers of pairs."""
    try:
        yield
    except (OutputError, OutputExistsError, StoreError) as error:
        text = str(error)
        if not text.startswith("output:"):
            raise
        raise type(error)(text.replace("output:", "counts:", 1)) from error


def check_counts(
    counts: Source, out: Source, shape: tuple[int, int], band: Band | None, *, overwrite: bool, accepted: bool
) -> None:
    """Refuse, before any work, a place for the numbers of pairs that cannot take them, or holds what is not to be
    replaced. accepted: whether a finished C, with these beside it, may stand there already."""
    if not accepted and not _is_early(counts, out):
        check_output_free(counts, overwrite=overwrite)
    if (path := local_path(counts)) is not None:
        check_growing_place(path)
        final = local_path(out)
        if final is not None and partial_path(final).resolve() in (path.resolve(), *path.resolve().parents):
            raise OutputError(
                f"output: {name_of(counts)} lies where C, {name_of(out)}, grows ({partial_path(final)}); the numbers of"
                " pairs need a place of their own"
            )
    if isinstance(counts, zarr.Array):
        if session_of(counts) is not None:
            raise OutputError(
                f"output: {name_of(counts)} is open in a session, which gets C alone; give a path or a URL"
            )
        if counts.dtype != COUNT_DTYPE:
            raise OutputError(
                f"output: {name_of(counts)} holds {counts.dtype}, and numbers of pairs are {COUNT_DTYPE}; give an array"
                " of that, or a path"
            )
        check_given_output(counts, shape, COUNT_DTYPE)
        if band is not None:
            check_given_band(counts, band)
        if isinstance(out, zarr.Array):
            check_unit(counts, write_unit(out))
    check_shared_output(counts)


def check_unit(counts: zarr.Array[Any], unit: tuple[int, ...]) -> None:
    """Raise OutputError unless open numbers of pairs are stored in pieces of C's sides."""
    if write_unit(counts) != tuple(unit):
        ours, its = (" × ".join(map(str, sides)) for sides in (write_unit(counts), unit))
        raise OutputError(
            f"output: {name_of(counts)} is stored in pieces of {ours}, and C in such of {its}; both must be alike: give"
            " an array that has C's, or a path"
        )


def _is_early(counts: Source, out: Source) -> bool:
    """Whether these have their name already, and the C that they are of has not: its run was killed between the two."""
    path = local_path(counts)
    if path is None or not is_array_folder(path):
        return False
    try:
        journal, _ = journal_at(out)
        growing = read_journal(journal) if journal is not None else None
        return growing is not None and _is_of(path, growing.digest)
    except (OSError, ValueError):  # names that nothing can have
        return False


def _is_of(path: Path, digest: str) -> bool:
    record = read_record(path / CHECKSUMS_NAME)
    return record is not None and record.digest == digest and not partial_path(path).exists()


def created_with_counts(
    output: Output, counts: Source | None, unit: tuple[int, int], *, overwrite: bool, **options: Any
) -> Output:
    """A new output, with a new one beside it for the numbers of pairs, if these are wanted. unit: C's stored pieces'
    sides. options: as for `create_output`. Raises as that; nothing is held then."""
    if counts is None:
        return output
    try:
        with named_counts():
            if isinstance(counts, zarr.Array):
                check_unit(counts, unit)
            shape = tuple(output.whole.shape)
            beside = create_output(counts, shape, COUNT_DTYPE, unit, overwrite=overwrite, **options)
    except BaseException:
        output.release()
        raise
    return replace(output, beside=beside)


def resumed_with_counts(
    output: Output, counts: Source | None, past: Past, *, overwrite: bool
) -> Output | None:
    """The output of a stopped run, with that of its numbers of pairs; None where these are gone, or not what they were,
    and nothing is held. Raises as `resume_output`."""
    if counts is None:
        return output
    try:
        with named_counts():
            path = local_path(counts)
            if path is not None:
                if is_array_folder(path) and _is_of(path, past.digest):
                    (path / MARK_NAME).touch()
                    path.rename(partial_path(path))
                beside = resume_output(path, overwrite)
            else:
                beside = resume_output_in_place(counts)
    except BaseException as error:
        output.release()
        if isinstance(error, OSError) and not isinstance(error, StoreError):
            raise StoreError(f"counts: cannot go on at {name_of(counts)}: {with_remedy(error)}") from error
        raise
    if beside is not None and array_facts(beside.array) == past.beside:
        return replace(output, beside=beside)
    output.release()
    if beside is not None:
        beside.release()
    return None


def growing_counts(counts: Source, past: Past) -> zarr.Array[Any] | None:
    """The array of a stopped run's numbers of pairs, to be looked at; None where there is none that it would go on
    with. Raises StoreError where that cannot be seen now."""
    path = local_path(counts)
    if path is None:
        found = growing_in_place(counts)
    elif is_array_folder(path) and _is_of(path, past.digest):
        found = open_array(path, ndim=2, role="counts")
    else:
        found = open_growing(path, mode="r")
    return found if found is not None and array_facts(found) == past.beside else None


def are_whole(counts: Source, digest: str, listener: Any) -> bool:
    """Whether the numbers of pairs that stand finished are those of a product, by its digest, byte by byte."""
    try:
        array = open_array(counts, ndim=2, role="counts")
    except StoreError:
        return False
    record, finished = record_of(array)
    if record is None or not finished or record.digest != digest:
        return False
    return audit_by_checksums(array, record, listener).passed


def names_of(factors: Mapping[str, StoredArray], output: Output) -> dict[str, str]:
    """What to call the factors, by their roles, and C once it is published."""
    names = {role: name_of(array) for role, array in factors.items()}
    return names | {"C": str(output.final or name_of(output.array))}


def finals_of(output: Output) -> list[Path]:
    """The path of a finished output on a local disk, and of what was written beside it; none of one elsewhere."""
    beside = None if output.beside is None else output.beside.final
    return [path for path in (output.final, beside) if path is not None] if output.final is not None else []


def arrays_of(output: Output) -> Mapping[str, zarr.Array[Any]]:
    """What tiles are written to."""
    found = {"C": output.array}
    return found if output.beside is None else {**found, "counts": output.beside.array}


def with_finals(output: Output) -> list[tuple[zarr.Array[Any], Path | None]]:
    """What tiles are written to, each with its path on a local disk once it is finished; None of one elsewhere."""
    found = [(output.array, output.final)]
    return found if output.beside is None else [*found, (output.beside.array, output.beside.final)]
