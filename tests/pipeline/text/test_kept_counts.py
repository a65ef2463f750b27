"""A count that was stopped goes on where it stood, and one of a corpus that changed counts what did: the counts are
always those of a count from nothing."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import dask
import numpy as np
import pytest
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.store.test_file_changes import COMPRESS
from tests.pipeline.text.test_counting import count, cpu_workers
from tests.sampling import examples
from tilewright.kernels.histograms.tokens import KINDS
from tilewright.pipeline.errors import DocumentError, OptionError, OutputExistsError, StoreError
from tilewright.pipeline.events import Event, Notice, UnitDone, WorkPlanned
from tilewright.pipeline.product.output import partial_path
from tilewright.pipeline.text.corpus import list_corpus
from tilewright.pipeline.text.counting import count_corpus
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.histogram import Histogram
from tilewright.pipeline.text.kept_counts import FILE_NAME, State, open_counts, state_of_output

PIECE_NBYTES = 1000


class StoppedError(Exception):
    pass


@dataclass
class Run:
    """A count with a state, and what it told."""

    client: Client
    state: Path
    by: str = "bigram"
    per_document: bool = False
    planned: WorkPlanned | None = None
    units: list[UnitDone] = field(default_factory=list)
    notices: str = ""

    def __call__(self, paths: list[Path], stop_after: int | None = None, **options: bool) -> Histogram:
        """Count; stop when so many pieces are counted, if it is said how many."""
        self.units, self.notices = [], ""

        def listener(event: Event) -> None:
            if isinstance(event, WorkPlanned):
                self.planned = event
            if isinstance(event, Notice):
                self.notices += f"{event.message}\n"
            if isinstance(event, UnitDone):
                self.units.append(event)
            if isinstance(event, WorkPlanned | UnitDone) and len(self.units) == stop_after:
                raise StoppedError

        kind = KINDS[self.by]
        state = State(self.state, **options)
        corpus = list_corpus(paths, apart=state.apart)
        with open_counts(
            state, kind, per_document=self.per_document, reading=Reading(), listener=listener
        ) as record:
            return count_corpus(
                self.client,
                corpus,
                kind,
                cpu_workers(self.client),
                per_document=self.per_document,
                listener=listener,
                record=record,
            )

    @property
    def total(self) -> int:
        assert self.planned is not None
        return self.planned.total

    @property
    def kept(self) -> int:
        assert self.planned is not None
        return self.planned.done

    @property
    def counted(self) -> int:
        """Pieces that were not only compared."""
        return sum(unit.stages["count"] > 0 for unit in self.units)

    def check(
        self, paths: list[Path], stop_after: int | None = None, expected: Histogram | None = None
    ) -> None:
        """Count, and compare with a count from nothing: that which is given, or else a new one."""
        found = self(paths, stop_after)
        if expected is None:
            expected = count(self.client, paths, self.by, per_document=self.per_document)
        np.testing.assert_array_equal(found.counts, expected.counts)
        assert (found.nbytes, found.skipped, found.documents) == (
            expected.nbytes,
            expected.skipped,
            expected.documents,
        )


@pytest.fixture(autouse=True)
def small_pieces() -> Iterator[None]:
    with dask.config.set({"tilewright.piece-nbytes": PIECE_NBYTES}):
        yield


@pytest.fixture
def run(without_dask: Client, tmp_path: Path) -> Run:
    return Run(without_dask, tmp_path / "state")


@pytest.fixture
def paths(tmp_path: Path, rng: np.random.Generator) -> list[Path]:
    """A large document, small ones that share pieces, an empty one, and compressed ones."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "large").write_bytes(rng.integers(0, 256, 5 * PIECE_NBYTES + 3, np.uint8).tobytes())
    for name, length in (("a", 300), ("b", 0), ("c", 350), ("d", 200), ("e", 900)):
        (folder / name).write_bytes("né".encode() * (length // 3))
    for suffix in (".gz", ".zst", ".bz2"):
        text = rng.integers(0, 64, 2 * PIECE_NBYTES, np.uint8).tobytes()
        (folder / f"packed{suffix}").write_bytes(COMPRESS[suffix](text))
    return sorted(folder.iterdir())


@pytest.mark.sample(1)
@pytest.mark.parametrize("by", ["byte", "bigram", "codepoint"])
@pytest.mark.parametrize("per_document", [False, True])
def test_a_count_stopped_behind_any_piece_goes_on(
    run: Run, paths: list[Path], by: str, per_document: bool
) -> None:
    run.by, run.per_document = by, per_document
    run(paths)
    total, expected = run.total, count(run.client, paths, by, per_document=per_document)
    assert total >= 9
    for stop_after in range(total + 1):
        with pytest.raises(StoppedError):
            run(paths, stop_after, resume=False)
        run.check(paths, expected=expected)
        assert run.kept == stop_after
        assert run.counted == len(run.units) == total - stop_after
        run.check(paths, expected=expected)
        assert (run.kept, run.units) == (total, []), "nothing is left, then"


def test_a_count_stopped_again_and_again_ends(run: Run, paths: list[Path]) -> None:
    kept = []
    while True:
        try:
            run.check(paths, stop_after=1)
            break
        except StoppedError:
            kept.append(run.kept)
    assert kept == list(range(run.total)), "each run kept the one piece that it was told of"


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def rewrite_with_its_time(path: Path) -> None:
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.sample(1)
@pytest.mark.parametrize("per_document", [False, True])
def test_documents_that_are_new_are_counted_and_no_others(
    run: Run, paths: list[Path], per_document: bool
) -> None:
    run.per_document = per_document
    run(paths)
    total = run.total
    for name in ("0", "between", "z"):
        write(paths[0].with_name(name), b"new text " * 20)
    run.check(sorted(paths[0].parent.iterdir()))
    assert (run.kept, run.counted) == (total, 1), "packed into a piece of their own"
    assert run.notices == f"{total} pieces of earlier runs are not counted again\n"


@pytest.mark.sample(1)
@pytest.mark.parametrize("per_document", [True, False])
def test_documents_that_are_gone_are_left_out(run: Run, paths: list[Path], per_document: bool) -> None:
    run.per_document = per_document
    run(paths)
    total = run.total
    rest = [path for path in paths if path.name not in ("large", "c")]
    run.check(rest)
    assert "/corpus/large left out, with what was counted: no more in the corpus" in run.notices
    assert "/corpus/c, " in run.notices
    assert run.counted == 1, "what was packed with c"
    assert run.kept == total - 7
    run.check(paths)
    assert run.counted == 1, "c itself: nothing is forgotten"


@pytest.mark.sample(3)
@pytest.mark.parametrize("per_document", [False, True])
@pytest.mark.parametrize(
    "touch", [os.utime, lambda path: os.chmod(path, 0o600), lambda path: write(path, path.read_bytes())]
)
def test_documents_that_were_only_touched_are_not_counted(
    run: Run, paths: list[Path], per_document: bool, touch: Callable[[Path], None]
) -> None:
    run.per_document = per_document
    run(paths)
    total = run.total
    for path in paths:
        touch(path)
    run.check(paths)
    assert (run.kept, run.counted, len(run.units)) == (0, 0, total)
    assert "got other times since: compared with what was counted" in run.notices
    run.check(paths)
    assert (run.kept, run.units) == (total, []), "their new times are known now"


@pytest.mark.parametrize(
    "name",
    [
        "large",
        "d",
        "packed.gz",
        *(pytest.param(f"packed{suffix}", marks=pytest.mark.slow) for suffix in (".zst", ".bz2")),
    ],
)
def test_a_change_that_keeps_size_and_time_is_found(run: Run, paths: list[Path], name: str) -> None:
    run(paths)
    total = run.total
    path = paths[0].with_name(name)
    if name.startswith("packed"):
        data, time = path.read_bytes(), path.stat()
        new = [COMPRESS[path.suffix](bytes(range(k, k + 64)) * 40) for k in range(64)]
        same = next((each for each in new if len(each) == len(data)), None)
        path.write_bytes(same or new[0])
        os.utime(path, ns=(time.st_atime_ns, time.st_mtime_ns))
    else:
        rewrite_with_its_time(path)
    run.check(paths)
    assert run.counted == 1
    assert run.kept >= total - 6
    assert f"{name}" in run.notices
    assert "counted anew" in run.notices


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "by",  # tokens that may reach over the old end; those of one byte cannot
    [by if by in ("bigram", "codepoint") else pytest.param(by, marks=pytest.mark.slow) for by in KINDS],
)
def test_of_a_document_that_grew_or_shrank_only_what_is_new_is_counted(
    run: Run, paths: list[Path], by: str
) -> None:
    run.by = by
    large = paths[0].with_name("large")
    run([large])
    for change, most in ((b"\xc3", 2), ("é".encode() * 400, 3), (b"", 2)):
        data = large.read_bytes() + change if change else large.read_bytes()[: 2 * PIECE_NBYTES + 77]
        write(large, data)
        run.check([large])
        assert run.counted <= most
    run.check([large])
    assert not run.units


@pytest.mark.parametrize("moved", [False, True])
def test_a_corpus_that_moved_is_known_by_its_names_and_contents(
    run: Run, paths: list[Path], moved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run([Path("corpus")])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "corpus").rename(elsewhere / "corpus")
    monkeypatch.chdir(elsewhere)
    run.check([Path("corpus")])
    assert run.counted == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("per_document", [True, False])
def test_documents_that_were_renamed_or_moved_are_not_counted(
    run: Run, paths: list[Path], per_document: bool, tmp_path: Path
) -> None:
    run.per_document = per_document
    run(paths)
    total = run.total
    elsewhere = tmp_path / "corpus" / "below"
    elsewhere.mkdir()
    for path in paths:
        path.rename(elsewhere / f"0{path.name}")
    run.check([tmp_path / "corpus"])
    assert (run.kept, run.counted, len(run.units)) == (0, 0, total)
    assert "moved since, or came in a piece with some that did: compared with what was counted" in run.notices
    run.check([tmp_path / "corpus"])
    assert (run.kept, run.units) == (total, []), "their new names are known now"


def test_documents_that_took_each_others_names_are_not_counted(
    run: Run, tmp_path: Path, rng: np.random.Generator
) -> None:
    """As logs do when they are rotated."""
    folder = tmp_path / "logs"
    folder.mkdir()
    logs = [folder / f"log.{number}" for number in range(4)]
    for number, log in enumerate(logs):
        log.write_bytes(rng.bytes(1500 + number))
    run([folder])
    for log, older in zip(reversed(logs[:-1]), reversed(logs[1:]), strict=True):
        log.rename(older)
    logs[0].write_bytes(b"new\n")
    run.check([folder])
    assert run.counted == 1


def test_another_file_of_the_same_length_is_counted(run: Run, paths: list[Path]) -> None:
    """Though it has the time of one that is gone, and all else by which that was known."""
    run(paths)
    large = paths[0].with_name("large")
    before = large.stat()
    data = bytearray(large.read_bytes())
    data[77] ^= 1
    large.unlink()
    other = large.with_name("larger")
    other.write_bytes(data)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    run.check(sorted(paths[0].parent.iterdir()))
    assert run.counted == 1


def test_other_pieces_keep_what_was_counted(run: Run, paths: list[Path]) -> None:
    with pytest.raises(StoppedError):
        run(paths, stop_after=4)
    with dask.config.set({"tilewright.piece-nbytes": 700}):
        run.check(paths)
    assert run.kept == 4
    with dask.config.set({"tilewright.piece-nbytes": 3000}):
        run.check(paths)
    assert not run.units


def test_a_changing_document_ends_the_run_and_is_counted_by_the_next(run: Run, paths: list[Path]) -> None:
    large = paths[0].with_name("large")

    class Changing(Run):
        @property
        def changed(self) -> None:
            return None

    def change(event: Event) -> None:
        if isinstance(event, UnitDone):
            rewrite_with_its_time(large)

    corpus, kind = list_corpus([large]), KINDS["bigram"]
    workers = cpu_workers(run.client)
    with (
        pytest.raises(DocumentError, match="after the corpus was listed"),
        open_counts(
            State(run.state), kind, per_document=False, reading=Reading(), listener=lambda _: None
        ) as record,
    ):
        count_corpus(run.client, corpus, kind, workers, per_document=False, listener=change, record=record)
    run.check([large])


def test_of_a_damaged_state_only_what_is_damaged_is_counted_again(run: Run, paths: list[Path]) -> None:
    run(paths)
    total = run.total
    record = run.state / FILE_NAME
    head, *lines = record.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"values": "', b'"values": "A')
    record.write_bytes(b"".join([head, *lines])[:-20])
    run.check(paths)
    assert (run.kept, run.counted) == (total - 2, 2)


def test_a_state_of_other_counts_is_refused_an_output_s_begun_anew(run: Run, paths: list[Path]) -> None:
    run(paths)
    total = run.total
    other = Run(run.client, run.state, by="byte")
    with pytest.raises(OptionError, match=r'by is "bigram" there and "byte" here'):
        other(paths)
    other.by, other.per_document = "bigram", True
    with pytest.raises(OptionError, match=r"per_document is false there and true here"):
        other(paths)
    run.check(paths)
    assert run.kept == total, "nothing was lost"
    other(paths, temporary=True)
    assert other.kept == 0
    with pytest.raises(OptionError, match=r"per_document is true there and false here"):
        run(paths)


def test_two_runs_do_not_share_a_state(run: Run, paths: list[Path]) -> None:
    kind = KINDS["bigram"]
    with (
        open_counts(State(run.state), kind, per_document=False, reading=Reading(), listener=lambda _: None),
        pytest.raises(OutputExistsError, match=r"another run has .*state.* open"),
    ):
        run(paths)
    run.check(paths)


def test_a_state_below_the_corpus_is_not_counted(
    without_dask: Client, paths: list[Path], tmp_path: Path
) -> None:
    folder = paths[0].parent
    run = Run(without_dask, folder / "state")
    with pytest.raises(StoppedError):
        run([folder], stop_after=3)
    found = run([folder])
    assert (run.kept, len(found.documents)) == (3, len(paths))
    os.symlink(folder, tmp_path / "link")
    assert len(run([tmp_path / "link"]).documents) == len(paths)


def test_places_that_cannot_hold_a_state_are_told(
    without_dask: Client, paths: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for place, error, message in (
        (tmp_path / "file", OptionError, "is no folder"),
        (paths[0].parent, OptionError, "holds other things, and no counts"),
        (tmp_path / "none" / "state", StoreError, r"there is no folder .*none; create it"),
        (tmp_path / ("x" * 300), StoreError, "cannot make the folder"),
    ):
        with pytest.raises(error, match=message):
            Run(without_dask, place)(paths)


def test_the_state_of_an_output_goes_away_where_it_keeps_nothing(
    without_dask: Client, paths: list[Path], tmp_path: Path
) -> None:
    state = state_of_output(tmp_path / "f.csv")
    run = Run(without_dask, state.folder)
    with pytest.raises(StoppedError):
        run(paths, stop_after=0, temporary=True)
    assert not state.folder.exists()
    with pytest.raises(StoppedError):
        run(paths, stop_after=2, temporary=True)
    assert f"what was counted is kept in {state.folder}; the same count goes on from there" in run.notices
    run(paths, temporary=True)
    assert run.kept == 2
    state.remove()
    assert not state.folder.exists()


EDITS = ("touch", "flip", "append", "cut", "remove", "add", "nothing")


def edit(folder: Path, what: str, number: int) -> None:
    files = sorted(folder.iterdir())
    path = files[number % len(files)] if files else folder / "first"
    if what == "add" or not files:
        (folder / f"{number}").write_bytes(bytes([number % 256, 0xC3, 0xA9]) * (number % 500))
    elif what == "touch":
        os.utime(path)
    elif what == "flip" and path.stat().st_size:
        rewrite_with_its_time(path)
    elif what == "append":
        with path.open("ab") as file:
            file.write(b"\xa9more" * (number % 300))
    elif what == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif what == "remove" and len(files) > 1:
        path.unlink()


def check_random(client: Client, by: str, per_document: bool, runs: list[tuple[int, int, str, int]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "corpus")
        folder.mkdir()
        for number in (100, 257, 400, 999):
            edit(folder, "add", number)
        run = Run(client, Path(name, "state"), by, per_document)
        for nbytes, stop_after, what, number in [*runs, (500, 10**6, "nothing", 0)]:
            with dask.config.set({"tilewright.piece-nbytes": nbytes}):
                try:
                    run.check([folder], stop_after)
                except StoppedError:
                    assert len(run.units) == stop_after
            edit(folder, what, number)


random_runs = st.lists(
    st.tuples(st.integers(50, 900), st.integers(0, 12), st.sampled_from(EDITS), st.integers(0, 10**4)),
    max_size=6,
)


@settings(max_examples=examples(6))
@given(by=st.sampled_from(["byte", "bigram", "codepoint"]), per_document=st.booleans(), runs=random_runs)
def test_whatever_is_cut_stopped_and_changed_the_counts_are_right(
    without_dask: Client, by: str, per_document: bool, runs: list[tuple[int, int, str, int]]
) -> None:
    check_random(without_dask, by, per_document, runs)


@pytest.mark.slow
@settings(max_examples=1000)
@given(by=st.sampled_from(["byte", "bigram", "codepoint"]), per_document=st.booleans(), runs=random_runs)
def test_a_thousand_random_cuts_and_stops(
    without_dask: Client, by: str, per_document: bool, runs: list[tuple[int, int, str, int]]
) -> None:
    check_random(without_dask, by, per_document, runs)


def test_names_kept_beside_an_output_are_no_longer_than_its_draft_s() -> None:
    """Or counts could be kept for no output whose name is as long as is accepted. Drafts have the number of their
    process, of one digit at least."""
    for out in (Path("f.csv"), Path("f.zarr")):
        kept = state_of_output(out).folder.name
        assert len(kept) <= min(len(f".{out.name}.1.partial"), len(partial_path(out).name))
