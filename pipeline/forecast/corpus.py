"""What every plan for a corpus tells, whatever is made of its documents: which files are read and how, what is left
out, and how the work is shared out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from tilewright.kernels.numbers import counted, format_nbytes
from tilewright.pipeline.text.formats.ways import Way

MOST_LISTED = 20
"""Files that would be refused, in the text for people; the JSON has all of them."""


@dataclass(frozen=True, kw_only=True)
class CorpusPlan:
    """How a corpus would be gone through."""

    files: int
    nbytes: int
    """Of all files, as stored."""
    ways: tuple[Way, ...]
    """How they are read; those that would be refused are in none."""
    looked_at: int
    """Files whose first bytes were looked at for that; of the others, names decided."""
    pieces: int
    """That are left to do: a task each."""
    piece_nbytes: int
    """Stored bytes of the largest."""
    workers: int
    tasks: int
    """Of all workers at a time."""
    worker_nbytes: int
    """Memory of a worker for the texts that it holds at a time."""
    worker_limit_nbytes: int | None
    """What its process may take; None: no limit is set."""
    driver_limit_nbytes: int
    """What the process may take that collects."""
    reports: bool
    """Whether files that cannot be read are left out; else the first ends the run."""
    refused: tuple[tuple[str, str], ...]
    """Files that could not be read, and why, as far as their first bytes tell."""
    notes: tuple[str, ...]
    """What was passed over when the corpus was listed, what is read otherwise than it may be meant, and what is said of
    earlier runs."""
    outputs: dict[str, str] = field(default_factory=dict)
    """Where what comes of it would be written, by what it is."""

    def to_json(self) -> dict[str, object]:
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return own | {"ways": [asdict(way) for way in self.ways]}

    def _files(self) -> tuple[str, str]:
        return "files", f"{counted(self.files, 'file')}, {format_nbytes(self.nbytes)} as stored"

    def _reading(self) -> list[tuple[str, str]]:
        rows = [
            (
                "" if place else "reading",
                f"{counted(way.files, 'file')}, {format_nbytes(way.nbytes)}: {way.what}",
            )
            for place, way in enumerate(self.ways)
        ]
        if self.looked_at < self.files:
            rows.append(("", f"by the first bytes of {self.looked_at} of them, and the names of the others"))
        return rows

    def _written(self, words: dict[str, str]) -> tuple[str, str]:
        told = [f"{words[name]} {place}" for name, place in self.outputs.items()]
        return "written", ", ".join(told) or "nothing"

    def _notes(self) -> list[tuple[str, str]]:
        return [("note", note) for note in self.notes]

    def _refused(self) -> list[tuple[str, str]]:
        rows = [
            ("" if place else "refused", f"{name}: {why}")
            for place, (name, why) in enumerate(self.refused[:MOST_LISTED])
        ]
        more = len(self.refused) - MOST_LISTED
        return [*rows, ("", f"and {counted(more, 'other')}")] if more > 0 else rows

    def _verdict(self, fits: str, otherwise: str) -> tuple[str, str]:
        limit = self.worker_limit_nbytes
        said = fits if limit is None or self.worker_nbytes <= limit else otherwise
        if self.refused:
            said += f"; {counted(len(self.refused), 'file')} would"
            said += (
                " be left out"
                if self.reports
                else " end it: name them by --exclude, or say --on-error report"
            )
        return "verdict", said

    def _of_limit(self) -> str:
        limit = self.worker_limit_nbytes
        return f", of {format_nbytes(limit)}" if limit is not None else ""


def table(rows: Iterable[tuple[str, str]]) -> str:
    """A plan for people: what a row is about, and what is said of it."""
    return "\n".join(f"{name:<16}{text}" for name, text in rows)
