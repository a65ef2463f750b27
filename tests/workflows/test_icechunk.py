"""Products in sessions of icechunk: written to forks, checked, merged into the caller's session, never committed."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import pytest
import zarr
from distributed import Client
from zarr.storage import LoggingStore

import tilewright as tw
from tests.pipeline.store.odd_stores import OddStore
from tilewright.pipeline.check import sides, verify
from tilewright.pipeline.cluster.answers import ask_all
from tilewright.pipeline.errors import OutputError, StoreError, TaskError, VerificationError
from tilewright.pipeline.events import Event, Notice, UnitDone
from tilewright.pipeline.product import job
from tilewright.pipeline.product.request import Request
from tilewright.pipeline.store import probe as store_probe
from tilewright.pipeline.store import sessions
from tilewright.pipeline.store.origin import THIS_PROCESS, origin_of
from tilewright.pipeline.worker import write_stage

FORKS_CHANGES = int(icechunk.__version__.partition(".")[0]) >= 2
"""Whether a session with uncommitted changes can be forked; before, whoever gives one is told."""

M, K, N = 70, 50, 90
SMALL = {"device": "cpu", "device_memory": 40_000}
"""Several tiles."""


@pytest.fixture(params=["this process", "worker processes"])
def cluster(request: pytest.FixtureRequest) -> Client:
    name = {"this process": "client", "worker processes": "processes"}[request.param]
    found: Client = request.getfixturevalue(name)
    return found


@pytest.fixture
def factors(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return rng.standard_normal((M, K)), rng.standard_normal((K, N))


@pytest.fixture
def repository(factors: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> icechunk.Repository:
    """With A and B, and for C an array of sevens."""
    found = icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path / "repository")))
    session = found.writable_session("main")
    group = zarr.create_group(session.store)
    for name, values in zip("AB", factors, strict=True):
        group.create_array(name, data=values, chunks=(32, 32))
    group.create_array("C", data=np.full((M, N), 7.0), chunks=(32, 32))
    session.commit("the factors")
    return found


def opened(session: Any, *names: str) -> list[zarr.Array[Any]]:
    group = zarr.open_group(session.store, mode="r" if session.read_only else "r+")
    arrays = [group[name] for name in names]
    assert all(isinstance(array, zarr.Array) for array in arrays)
    return arrays  # type: ignore[return-value]


def of_branch(repository: icechunk.Repository) -> np.ndarray:
    (c,) = opened(repository.readonly_session("main"), "C")
    found: np.ndarray = c[...]
    return found


def files(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.sample(1)
def test_a_product_goes_into_the_session_that_its_array_is_open_in(
    repository: icechunk.Repository,
    factors: tuple[np.ndarray, np.ndarray],
    cluster: Client,
) -> None:
    """A, B and C of one writable session; the caller commits."""
    session, events = repository.writable_session("main"), list[Event]()
    a, b, c = opened(session, "A", "B", "C")
    run = tw.matmul(a, b, c, cluster=cluster, listener=events.append, **SMALL)
    assert run.plan.tile_count > 1
    assert run.verification is not None
    assert run.verification.passed
    np.testing.assert_allclose(c[...], factors[0] @ factors[1])
    assert session.has_uncommitted_changes
    assert (of_branch(repository) == 7).all(), "nobody else commits it"
    told = [event.message for event in events if isinstance(event, Notice)]
    assert (
        "C is in the session of branch 'main' that it was given in, and is not committed yet: session.commit(message)"
        " does that"
    ) in told
    session.commit("the product")
    np.testing.assert_allclose(of_branch(repository), factors[0] @ factors[1])


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["f4", "i4"])
def test_parts_of_k_are_added_up_into_a_session(
    dtype: str, cluster: Client, tmp_path: Path, rng: np.random.Generator, split_k: None
) -> None:
    repository = icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path / "repository")))
    session = repository.writable_session("main")
    x = rng.integers(-9, 9, (20, 3000)).astype(dtype)
    group = zarr.create_group(session.store)
    group.create_array("A", data=x, chunks=(20, 50))
    group.create_array("C", shape=(20, 20), chunks=(20, 20), dtype=dtype)
    session.commit("the factor")
    session = repository.writable_session("main")
    a, c = opened(session, "A", "C")
    options: dict[str, Any] = SMALL | {"device_memory": 400_000}
    run = tw.matmul(a, a, c, transpose_b=True, dtype=dtype, cluster=cluster, **options)
    assert run.plan.k_parts > 1
    np.testing.assert_array_equal(c[...], x @ x.T)


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["one array", "opened twice"])
def test_an_array_by_its_own_transpose_is_symmetric_in_a_session(
    kind: str, repository: icechunk.Repository, factors: tuple[np.ndarray, np.ndarray], cluster: Client
) -> None:
    """Known as one array however it is opened, and each tile is stored twice in one fork."""
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="G", shape=(M, M), chunks=(16, 16), dtype="f8")
    session.commit("a place for it")
    session = repository.writable_session("main")
    a, g = opened(session, "A", "G")
    again = a if kind == "one array" else opened(session, "A")[0]
    options: dict[str, Any] = SMALL | {"device_memory": 20_000}
    run = tw.matmul(a, again, g, transpose_b=True, cluster=cluster, **options)
    assert run.plan.symmetric
    assert run.plan.tile_count > 1
    found = g[...]
    np.testing.assert_array_equal(found, found.T)
    np.testing.assert_allclose(found, factors[0] @ factors[0].T)


@pytest.mark.sample(1)
def test_what_a_read_only_session_has_is_read(
    repository: icechunk.Repository, factors: tuple[np.ndarray, np.ndarray], cluster: Client, tmp_path: Path
) -> None:
    a, b = opened(repository.readonly_session("main"), "A", "B")
    tw.matmul(a, b, tmp_path / "c", cluster=cluster, **SMALL)
    np.testing.assert_allclose(zarr.open_array(tmp_path / "c")[...], factors[0] @ factors[1])
    session = repository.writable_session("main")
    (c,) = opened(session, "C")
    c[...] = factors[0] @ factors[1]
    session.commit("by hand")
    (c,) = opened(repository.readonly_session("main"), "C")
    assert tw.verify(a, b, c, cluster=cluster).passed
    (older,) = opened(repository.readonly_session(snapshot_id=a.store.session.snapshot_id), "C")  # type: ignore[attr-defined]
    assert not tw.verify(a, b, older, cluster=cluster).passed


REFUSED = (
    r"a session that cannot be forked for the workers \(ValueError: .*uncommitted changes.*\); commit that"
)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        *([] if FORKS_CHANGES else [("changed", REFUSED)]),
        ("committed", "a session that only reads, or that was committed; open the array in a new one"),
        ("forked", "a fork of a session, .*; give the array as the session itself has it"),
    ],
)
def test_sessions_that_would_lose_a_product_are_refused(
    given: str, match: str, repository: icechunk.Repository, cluster: Client, tmp_path: Path
) -> None:
    session = repository.writable_session("main")
    c: Any
    a, b, c = opened(session, "A", "B", "C")
    if given == "changed":
        c[0, 0] = 8
    elif given == "committed":
        c[0, 0] = 8
        session.commit("no longer written to")
    else:
        (c,) = opened(session.fork(), "C")
    a, b = opened(repository.readonly_session("main"), "A", "B")
    before, values = files(tmp_path), c[...]
    with pytest.raises(
        StoreError, match=f"^output: /C in icechunk.store.IcechunkStore is open in {match}"
    ) as raised:
        tw.matmul(a, b, c, cluster=cluster, **SMALL)
    assert "\n" not in str(raised.value)
    assert files(tmp_path) == before
    np.testing.assert_array_equal(c[...], values)


def test_a_session_with_changes_gives_and_takes_them_or_is_refused_by_its_role(
    repository: icechunk.Repository,
    factors: tuple[np.ndarray, np.ndarray],
    cluster: Client,
    tmp_path: Path,
) -> None:
    """All of C was written to before, and so was A: no tile is put back to that by another one's fork."""
    session = repository.writable_session("main")
    a, b, c = opened(session, "A", "B", "C")
    a[...] = 2 * factors[0]
    c[...] = 8.0
    if FORKS_CHANGES:
        assert tw.matmul(a, b, c, cluster=cluster, **SMALL).plan.tile_count > 1
        assert tw.verify(a, b, c, cluster=cluster).passed
        np.testing.assert_allclose(c[...], 2 * factors[0] @ factors[1])
        assert (of_branch(repository) == 7).all(), "nobody else commits it"
        session.commit("all of it")
        np.testing.assert_allclose(of_branch(repository), 2 * factors[0] @ factors[1])
        (a,) = opened(repository.readonly_session("main"), "A")
        np.testing.assert_array_equal(a[...], 2 * factors[0])
        return
    (committed,) = opened(repository.readonly_session("main"), "A")
    match = ": /. in icechunk.store.IcechunkStore is open in a session that cannot be forked for the workers"
    for role, (one, other) in {"A": (a, b), "B": (committed, b)}.items():
        with pytest.raises(StoreError, match=f"^{role}{match}"):
            tw.matmul(one, other, tmp_path / "c", cluster=cluster, **SMALL)
        with pytest.raises(StoreError, match=f"^{role}{match}"):
            tw.verify(one, other, c, cluster=cluster)
    assert not (tmp_path / "c").exists()


def test_an_output_that_is_also_a_factor_is_refused_however_it_was_opened(
    repository: icechunk.Repository, client: Client
) -> None:
    """A session gives another store, of another name, each time it is asked for one."""
    session = repository.writable_session("main")
    group = zarr.open_group(session.store, mode="r+")
    group.create_array("X", data=np.eye(16), chunks=(16, 16))
    session.commit("a square")
    session = repository.writable_session("main")
    (x,), (again,) = opened(session, "X"), opened(session, "X")
    with pytest.raises(OutputError, match="is also A"):
        tw.matmul(x, x, again, cluster=client, device="cpu", listener=lambda event: None)


def test_a_plan_refuses_the_factors_that_the_product_would_refuse(repository: icechunk.Repository) -> None:
    session = repository.writable_session("main")
    b, c = opened(session, "B", "C")
    a = zarr.open_array(LoggingStore(session.store, log_level="ERROR"), path="A", mode="r+")
    options: dict[str, Any] = {"device": "cpu", "listener": lambda event: None}
    with pytest.raises(StoreError, match="cannot be pickled for the workers"):
        tw.matmul(a, b, c, **options)
    with pytest.raises(StoreError, match="cannot be pickled for the workers"):
        job.plan_only(Request(a, b, c, **options))


@pytest.mark.sample(1)
def test_a_fork_is_read_as_it_is(
    repository: icechunk.Repository, factors: tuple[np.ndarray, np.ndarray], cluster: Client, tmp_path: Path
) -> None:
    """With what was written to it: its pickled copies carry that."""
    fork = repository.writable_session("main").fork()
    a, b = opened(fork, "A", "B")
    a[...] = 2 * factors[0]
    tw.matmul(a, b, tmp_path / "c", cluster=cluster, **SMALL)
    np.testing.assert_allclose(zarr.open_array(tmp_path / "c")[...], 2 * factors[0] @ factors[1])


def test_a_wrapped_session_is_refused(repository: icechunk.Repository, client: Client) -> None:
    session = repository.writable_session("main")
    a, b = opened(repository.readonly_session("main"), "A", "B")
    for kind, match in {
        "session": "cannot be pickled for the workers .ValueError: You must opt-in",
        "fork": "is lost: worker .* wrote to its copy, and this process still has what was there before",
    }.items():
        inner = session.store if kind == "session" else session.fork().store
        c = zarr.open_array(LoggingStore(inner, log_level="ERROR"), path="C", mode="r+")
        with pytest.raises(StoreError, match=f"^output: .*{match}"):
            tw.matmul(a, b, c, cluster=client, **SMALL)
        assert (c[...] == 7).all()
    assert not session.has_uncommitted_changes


def test_trying_a_session_leaves_nothing(cluster: Client, tmp_path: Path) -> None:
    """Nor where icechunk would store even the smallest chunk as an object."""
    for limit in (None, 0):
        folder = tmp_path / f"{limit}"
        config = icechunk.RepositoryConfig(inline_chunk_threshold_bytes=limit)
        repository = icechunk.Repository.create(icechunk.local_filesystem_storage(str(folder)), config=config)
        session = repository.writable_session("main")
        zarr.create_array(session.store, name="C", shape=(4, 4), chunks=(2, 2), dtype="f8")
        session.commit("empty")
        session = repository.writable_session("main")
        c = zarr.open_array(session.store, path="C", mode="r+")
        before = files(folder)
        store_probe.check_shared_output(c)
        assert store_probe.check_written_alike(partial(ask_all, cluster), c) == []
        assert files(folder) == before
        assert not session.has_uncommitted_changes


def test_writes_that_a_worker_loses_are_found_before_the_first_tile(
    repository: icechunk.Repository, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, events = repository.writable_session("main"), list[Event]()
    a, b, c = opened(session, "A", "B", "C")
    empty = pickle.dumps(session.fork())
    monkeypatch.setattr(store_probe, "changes_in", lambda array: empty)
    with pytest.raises(
        StoreError, match=r"^output: what worker .* writes to /C .* is not in the changes that come back"
    ):
        tw.matmul(a, b, c, cluster=client, listener=events.append, **SMALL)
    assert not any(isinstance(event, UnitDone) for event in events)
    assert not session.has_uncommitted_changes


def test_a_product_that_fails_its_check_does_not_get_into_the_session(
    repository: icechunk.Repository, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here since what the workers wrote is lost, so that C is what it was."""
    session = repository.writable_session("main")
    a, b, c = opened(session, "A", "B", "C")
    monkeypatch.setattr(write_stage, "changes_in", lambda array: None)
    with pytest.raises(
        VerificationError, match="the product is not merged into the session of /C in icechunk"
    ):
        tw.matmul(a, b, c, cluster=client, **SMALL)
    assert not session.has_uncommitted_changes
    assert (c[...] == 7).all()


def test_a_run_that_fails_leaves_the_session_as_it_was(
    repository: icechunk.Repository, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, written = repository.writable_session("main"), []
    a, b, c = opened(session, "A", "B", "C")
    changes_in = sessions.changes_in

    def failing(array: zarr.Array[Any]) -> bytes | None:
        written.append(array)
        if len(written) > 2:
            raise ValueError("injected")
        return changes_in(array)

    monkeypatch.setattr(write_stage, "changes_in", failing)
    with pytest.raises(TaskError, match="injected"):
        tw.matmul(a, b, c, cluster=client, **SMALL)
    assert not session.has_uncommitted_changes
    assert (c[...] == 7).all()


@pytest.mark.more
def test_a_tile_that_is_computed_again_is_the_same(
    repository: icechunk.Repository,
    factors: tuple[np.ndarray, np.ndarray],
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some are written twice, the first fork being lost with its task, and merged several times."""
    session, tries, reported = repository.writable_session("main"), list[str](), list[bytes]()
    a, b, c = opened(session, "A", "B", "C")
    changes_in, keep = sessions.changes_in, sessions.Gathered.keep

    def failing(array: zarr.Array[Any]) -> bytes | None:
        changes = changes_in(array)
        assert changes is not None
        tries.append(array.path)
        if len(tries) <= 3:
            raise ValueError("injected")
        reported.append(changes)
        return changes

    def kept_again(gathered: sessions.Gathered, changes: bytes) -> None:
        for one in (*reported, changes):  # as of workers that were lost after they had reported
            keep(gathered, one)

    monkeypatch.setattr(write_stage, "changes_in", failing)
    monkeypatch.setattr(sessions.Gathered, "keep", kept_again)
    run = tw.matmul(a, b, c, cluster=client, **SMALL)
    assert len(tries) == run.plan.tile_count + 3
    assert run.plan.tile_count > 1
    np.testing.assert_allclose(c[...], factors[0] @ factors[1])


@pytest.mark.slow
def test_a_lost_worker_loses_only_what_is_computed_again(
    repository: icechunk.Repository, factors: tuple[np.ndarray, np.ndarray], processes: Client
) -> None:
    session, ended = repository.writable_session("main"), list[str]()
    a, b, c = opened(session, "A", "B", "C")

    def end_a_worker(event: Event) -> None:
        if isinstance(event, UnitDone) and event.name == "matmul" and not ended:
            ended.append(event.worker)
            with suppress(OSError):  # nobody answers
                processes.run(os._exit, 1, workers=[event.worker], on_error="ignore")

    run = tw.matmul(a, b, c, cluster=processes, listener=end_a_worker, **SMALL)
    assert ended
    assert run.workers_lost == 1
    assert run.verification is not None
    assert run.verification.passed
    np.testing.assert_allclose(c[...], factors[0] @ factors[1])
    processes.wait_for_workers(2)


def test_a_session_that_is_committed_meanwhile_gets_no_product(
    repository: icechunk.Repository, client: Client
) -> None:
    session = repository.writable_session("main")
    a, b, c = opened(session, "A", "B", "C")

    def commit(event: Event) -> None:
        if isinstance(event, UnitDone) and not session.read_only:
            a[0, 0] = 1.0
            session.commit("too early")

    with pytest.raises(StoreError, match=r"cannot be merged into its session .*; leave that session alone"):
        tw.matmul(a, b, c, cluster=client, listener=commit, **SMALL)
    assert (of_branch(repository) == 7).all()


@pytest.mark.sample(1)
def test_many_chunks_are_sent_to_the_check_once(
    repository: icechunk.Repository,
    factors: tuple[np.ndarray, np.ndarray],
    cluster: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fork carries all that was written to it, whichever array of it is read: so B comes once to each worker too."""
    sent, run_sent = list[str](), verify.run_sent

    def watched(client: Client, function: Any, *arguments: Any, **options: Any) -> Any:
        sent.append(function.__name__)
        return run_sent(client, function, *arguments, **options)

    monkeypatch.setattr(verify, "run_sent", watched)
    monkeypatch.setattr(sides, "changes_nbytes", lambda array: sessions.changes_nbytes(array) * 2**16)
    session = repository.writable_session("main")
    a, b, c = opened(session, "A", "B", "C")
    run = tw.matmul(a, b, c, cluster=cluster, **SMALL)
    assert sent == ["_project", "_compare"]
    assert run.verification is not None
    assert run.verification.passed
    np.testing.assert_allclose(c[...], factors[0] @ factors[1])


def test_a_snapshot_is_what_tells_an_input_apart(repository: icechunk.Repository, tmp_path: Path) -> None:
    """Not the address of a store in memory, which another process may give another one."""
    first, again = (origin_of(opened(repository.readonly_session("main"), "A")[0]).place for _ in range(2))
    assert first == again
    session = repository.writable_session("main")
    (a,) = opened(session, "A")
    assert origin_of(a).place == first
    a[0, 0] = 1.0
    changed = origin_of(a).place
    session.commit("changed")
    later = origin_of(opened(repository.readonly_session("main"), "A")[0]).place
    assert first not in (changed, later)
    assert changed != later
    odd = zarr.create_array(OddStore(tmp_path / "odd"), shape=(2,), chunks=(2,), dtype="f8")
    assert THIS_PROCESS in origin_of(odd).place
