"""Products that are read from and written to object stores, whatever the network does, are right, and are never taken
for finished before they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import zarr

import tilewright as tw
from tests.object_stores import servers
from tests.object_stores.proxy import NO_FAULT, Asked, Fault, Proxy, seeded
from tests.workflows.products import numbers, put, stop_at
from tilewright.pipeline.errors import OptionError, OutputExistsError, StoreError
from tilewright.pipeline.events import Event, Notice, UnitDone
from tilewright.pipeline.plan import tiling
from tilewright.pipeline.product.output import CHECKSUMS_NAME
from tilewright.pipeline.store import locks
from tilewright.pipeline.store.arrays import UNFINISHED, UNFINISHED_NAME
from tilewright.pipeline.store.journal import SEGMENTS_NAME
from tilewright.pipeline.store.objects import objects_at
from tilewright.pipeline.store.remote.opening import store_at

OPTIONS: dict[str, Any] = {"device": "cpu", "device_memory": 32_000}
"""Six tiles of two panels each: what a test takes is its requests, which moto answers in several milliseconds each."""
FAULTS = (Fault(status=503), Fault(refuse=True), Fault(drop_answer=True), Fault(cut=10), Fault(status=500))

Factors = tuple[np.ndarray, str, str]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs in pieces of at most 4 KiB, so that a small product has several tiles."""
    monkeypatch.setattr(tiling, "LEAST_CHUNK_NBYTES", 1)
    monkeypatch.setattr(tiling, "SMALL_CHUNK_NBYTES", 1)
    monkeypatch.setattr(tiling, "MOST_CHUNK_NBYTES", 4096)


@pytest.fixture
def factors(rng: np.random.Generator, url: str, proxy: Proxy, small_chunks: None) -> Factors:
    """The product, and the factors' URLs: one sharded, one compressed."""
    a, b = numbers(rng, (96, 80), "i4"), numbers(rng, (80, 64), "i4")
    for name, data, how in (
        ("a", a, {"chunks": (8, 8), "shards": (48, 40), "compressors": None}),
        ("b", b, {"chunks": (40, 64)}),
    ):
        zarr.create_array(store_at(f"{url}/{name}"), shape=data.shape, dtype=data.dtype, **how)[...] = data
    return a.astype("i8") @ b.astype("i8"), f"{url}/a", f"{url}/b"


def stored(c: str) -> np.ndarray:
    return np.asarray(zarr.open_array(store_at(c), mode="r")[...])


@pytest.mark.more
def test_a_product_is_read_written_and_checked_there(
    factors: Factors, url: str, library: str, proxy: Proxy
) -> None:
    expected, a, b = factors
    run = tw.matmul(a, b, f"{url}/c", dtype="i8", **OPTIONS)
    assert run.verification is not None
    assert run.verification.passed
    np.testing.assert_array_equal(stored(f"{url}/c"), expected)
    objects = objects_at(f"{url}/c")
    left = set(objects.names("")) - {"c", "zarr.json", CHECKSUMS_NAME}
    assert not any(objects.names(name) or objects.get(name) for name in left), "nothing of the run is left"
    assert tw.verify(a, b, f"{url}/c").passed
    assert tw.audit(f"{url}/c").passed
    with pytest.raises(OutputExistsError, match="exists; choose another path, or ask to overwrite it"):
        tw.matmul(a, b, f"{url}/c", dtype="i8", **OPTIONS)
    with pytest.raises(
        OptionError, match=r"^C: s3://.*/c is not in a local folder, .*: copy it to one, or compute it"
    ):
        tw.repair(a, b, f"{url}/c", device="cpu")


@pytest.mark.more
def test_a_product_is_stored_there_as_asked_and_goes_on(factors: Factors, url: str, proxy: Proxy) -> None:
    expected, a, b = factors
    c, layout = f"{url}/c", {"chunks": 8, "shards": 32, "codec": "gzip:2"}
    stop_at(1, a, b, c, dtype="i8", **layout, **OPTIONS)  # type: ignore[arg-type]
    run = tw.matmul(a, b, c, dtype="i8", **layout, **OPTIONS)
    assert run.resumed == 1
    np.testing.assert_array_equal(stored(c), expected)
    found = zarr.open_array(store_at(c), mode="r")
    assert (found.chunks, found.shards) == ((8, 8), (32, 32))
    assert tw.audit(c).passed


def test_a_stopped_product_goes_on_and_is_no_input_before(factors: Factors, url: str, proxy: Proxy) -> None:
    expected, a, b = factors
    c = f"{url}/c"
    stop_at(3, a, b, c, dtype="i8", **OPTIONS)  # type: ignore[arg-type]
    for use in (
        lambda: tw.matmul(c, b, f"{url}/d", **OPTIONS),
        lambda: tw.verify(a, b, c),
        lambda: tw.gram(c, f"{url}/d", **OPTIONS),
        lambda: tw.plan_matmul(c, b),
    ):
        with pytest.raises(
            StoreError, match=r"s3://.*/c is an unfinished product: .* finish it by the same command"
        ):
            use()
    assert objects_at(f"{url}/d").names("") == [], "refused before the first byte"
    done: list[Event] = []
    run = tw.matmul(a, b, c, dtype="i8", listener=done.append, **OPTIONS)
    assert run.resumed == 3
    assert sum(isinstance(one, UnitDone) and one.name == "matmul" for one in done) == run.plan.tile_count - 3
    np.testing.assert_array_equal(stored(c), expected)


@pytest.mark.more
def test_a_finished_product_is_accepted_where_that_is_asked_for(
    factors: Factors, url: str, proxy: Proxy, rng: np.random.Generator
) -> None:
    """As a later try of a batch job meets it, whose node failed just after C had lost its mark."""
    expected, a, b = factors
    c = f"{url}/c"
    tw.matmul(a, b, c, dtype="i8", **OPTIONS)
    objects = objects_at(c)
    before = {name: objects.get(name) for name in ("zarr.json", CHECKSUMS_NAME, "c/0/0")}
    assert None not in before.values()
    with dask.config.set({"tilewright.accept-finished": True}):
        done: list[Event] = []
        run = tw.matmul(a, b, c, dtype="i8", listener=done.append, **OPTIONS)
        assert run.resumed == run.plan.tile_count
        assert not [one for one in done if isinstance(one, UnitDone) and one.name == "matmul"]
        assert run.verification is not None
        assert run.verification.passed
        assert [one for one in done if isinstance(one, Notice) and "this very product" in one.message]
        with pytest.raises(OutputExistsError, match="exists"):
            tw.matmul(a, b, c, dtype="f8", **OPTIONS)
    assert not objects.names(SEGMENTS_NAME)
    assert objects.get(UNFINISHED_NAME) is None
    assert {name: objects.get(name) for name in before} == before
    np.testing.assert_array_equal(stored(c), expected)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_a_product_is_right_whatever_the_network_does(
    seed: int, factors: Factors, url: str, library: str, proxy: Proxy
) -> None:
    expected, a, b = factors
    proxy.faults = seeded(seed, 0.15, FAULTS)
    done: list[Event] = []
    run = tw.matmul(a, b, f"{url}/c", dtype="i8", listener=done.append, **OPTIONS)
    proxy.faults = lambda asked: NO_FAULT
    assert run.verification is not None
    assert run.verification.passed
    assert sum(isinstance(one, UnitDone) and one.name == "matmul" for one in done) == run.plan.tile_count
    np.testing.assert_array_equal(stored(f"{url}/c"), expected)
    assert tw.audit(f"{url}/c").passed


@pytest.mark.slow
def test_an_older_product_is_marked_before_it_goes(
    factors: Factors, url: str, server: int, proxy: Proxy
) -> None:
    """A run that is killed at any moment leaves no array that is not whole, and not marked."""
    _, a, b = factors
    c = f"{url}/c"
    tw.matmul(a, b, c, dtype="i8", verify=False, **OPTIONS)
    asks = servers.client(server)
    start = c.removeprefix("s3://tests/") + "/"
    seen: list[set[str]] = []

    def noted(asked: Asked) -> Fault:
        if asked.method != "GET":
            found = asks.list_objects_v2(Bucket="tests", Prefix=start).get("Contents", [])
            seen.append({one["Key"].removeprefix(start) for one in found})
        return NO_FAULT

    proxy.faults = noted
    tw.matmul(a, b, c, dtype="i8", verify=False, overwrite=True, **OPTIONS)
    chunks = {name for name in seen[0] if name.startswith("c/")}
    assert len(chunks) > 4
    assert any(UNFINISHED_NAME in names and "zarr.json" in names and not chunks & names for names in seen)
    for names in seen:
        assert UNFINISHED_NAME in names or "zarr.json" not in names or chunks <= names


def test_what_is_no_array_is_not_replaced(factors: Factors, url: str) -> None:
    _, a, b = factors
    objects_at(f"{url}/papers").put("notes/today", b"dear")
    with pytest.raises(
        OutputExistsError, match=r"is not a Zarr array, and holds notes, so it is not replaced"
    ):
        tw.matmul(a, b, f"{url}/papers", overwrite=True, **OPTIONS)
    assert objects_at(f"{url}/papers").names("") == ["notes"]


@pytest.mark.parametrize("drops", [False, True])
def test_of_runs_that_begin_at_once_one_gets_in(drops: bool, url: str, library: str, proxy: Proxy) -> None:
    """Also where the answers to their requests are lost, so that each is sent twice."""
    if drops:
        lost: set[tuple[str, ...]] = set()

        def faults(asked: Asked) -> Fault:
            first = asked.method == "PUT" and len(lost) < 4
            if first:
                lost.add((asked.key, str(len(lost))))
            return Fault(drop_answer=True) if first else NO_FAULT

        proxy.faults = faults

    def take(_: int) -> locks.Lease | OutputExistsError:
        try:
            return locks.take_lease(objects_at(url))
        except OutputExistsError as error:
            return error

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(take, range(6)))
    winners = [one for one in found if isinstance(one, locks.Lease)]
    assert len(winners) == 1
    for one in found:
        if isinstance(one, OutputExistsError):
            assert "another run is writing s3://" in str(one)
            assert f"(process {os.getpid()} on " in str(one)
    winners[0].check()
    winners[0].release()
    assert objects_at(url).names("") == []


def test_a_run_that_was_taken_for_dead_is_told(url: str, library: str, proxy: Proxy) -> None:
    lease = locks.take_lease(objects_at(url))
    objects = objects_at(url)
    objects.put(locks.LEASE_NAME, b'{"token": "another", "pid": 7, "host": "elsewhere"}')
    with pytest.raises(OutputExistsError, match="process 7 on elsewhere"):
        lease.renew()
    with pytest.raises(OutputExistsError, match="process 7 on elsewhere"):
        lease.check()
    lease.release()
    assert objects.get(locks.LEASE_NAME) is not None, "it is the other's"


def command(url: str, environment: dict[str, str], *more: str) -> subprocess.Popen[str]:
    names = [f"{url}/{name}" for name in "abc"]
    options = ["--device", "cpu", "--device-memory", "200KB", *more]
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from tilewright.workflows.cli import main; main()",
            "matmul",
            *names,
            *options,
        ],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def larger(rng: np.random.Generator, url: str, proxy: Proxy) -> np.ndarray:
    """The product of two matrices at ``url``/a and /b that takes seconds."""
    a, b = numbers(rng, (600, 400), "i4"), numbers(rng, (400, 600), "i4")
    for name, data in (("a", a), ("b", b)):
        how: dict[str, Any] = {"chunks": (100, 100), "shards": (200, 200)}
        zarr.create_array(store_at(f"{url}/{name}"), shape=data.shape, dtype=data.dtype, **how)[...] = data
    return a.astype("i8") @ b.astype("i8")


@pytest.mark.slow
def test_of_two_commands_at_once_one_writes_and_the_other_is_told(
    larger: np.ndarray, url: str, proxy: Proxy
) -> None:
    proxy.latency = 0.02
    both = [command(url, servers.settings(proxy.url)) for _ in range(2)]
    told = [one.communicate(timeout=300)[1] for one in both]
    assert sorted(one.returncode for one in both) == [0, 1], told
    loser = next(text for one, text in zip(both, told, strict=True) if one.returncode)
    assert "another run is writing s3://" in loser or "exists; choose another path" in loser
    assert sum(line.startswith("error: ") for line in loser.splitlines()) == 1, loser
    assert loser.splitlines()[-1].startswith("error: ")
    np.testing.assert_array_equal(stored(f"{url}/c"), larger)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_product_that_is_killed_again_and_again_under_cuts_comes_out_right(
    seed: int, larger: np.ndarray, url: str, proxy: Proxy
) -> None:
    """Each kill loses at most what was under way, and what was recorded in the last five seconds."""
    rng = np.random.default_rng(seed)
    proxy.latency, proxy.faults = 0.01, seeded(seed, 0.1, FAULTS)
    for _ in range(4):
        run = command(url, servers.settings(proxy.url))
        time.sleep(float(rng.uniform(2, 8)))
        if run.poll() is None:
            run.send_signal([signal.SIGKILL, signal.SIGTERM][int(rng.integers(2))])
        run.communicate(timeout=120)
        there = objects_at(f"{url}/c")
        is_whole = there.get("zarr.json") is not None and there.get(UNFINISHED_NAME) is None
        if run.returncode == 0 or is_whole:
            break  # whole, too, where the signal came after the mark was gone: no run would go on with it
        if there.get("zarr.json") is not None:
            assert there.get(UNFINISHED_NAME) == UNFINISHED
    else:
        last = command(url, servers.settings(proxy.url))
        told = last.communicate(timeout=300)
        assert last.returncode == 0, told
    proxy.faults = lambda asked: NO_FAULT
    np.testing.assert_array_equal(stored(f"{url}/c"), larger)
    assert tw.verify(f"{url}/a", f"{url}/b", f"{url}/c").passed


@pytest.fixture
def local(tmp_path: Path) -> tuple[Path, Path]:
    ones = np.ones((16, 16), "f4")
    return put(tmp_path / "a", ones), put(tmp_path / "b", ones)


NOWHERE = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
NO_KEYS = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}


@pytest.mark.parametrize(
    ("role", "bucket", "environment", "fault", "text"),
    [
        ("A", "tests", NO_KEYS, NO_FAULT, "there are no credentials .*; set AWS_ACCESS_KEY_ID"),
        ("output", "tests", NO_KEYS, NO_FAULT, "there are no credentials .*; set AWS_ACCESS_KEY_ID"),
        ("A", "other", {}, NO_FAULT, "there is no such bucket .*; create it, or correct the URL"),
        ("output", "other", {}, NO_FAULT, "there is no such bucket .*; create it, or correct the URL"),
        ("A", "tests", {}, Fault(status=403), "the storage forbids it .*; see that these credentials"),
        ("output", "tests", {}, Fault(status=403), "the storage forbids it .*; see that these credentials"),
        ("A", "tests", {}, NO_FAULT, "there is no Zarr array at s3://tests/nothing"),
        ("A", "tests", NOWHERE, NO_FAULT, "the storage cannot be reached .*AWS_ENDPOINT_URL"),
        ("A", "tests", {}, Fault(status=503), "asks for fewer requests .*; lower tilewright.read-threads"),
    ],
)  # fmt: skip
def test_an_error_names_its_cause_and_what_to_do(
    role: str,
    bucket: str,
    environment: dict[str, str],
    fault: Fault,
    text: str,
    library: str,
    proxy: Proxy,
    local: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = local
    for name, value in environment.items():
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name)
    proxy.faults = lambda asked: fault
    asked = (f"s3://{bucket}/nothing", b, a.parent / "c") if role == "A" else (a, b, f"s3://{bucket}/c")
    deadline = dask.config.set({"tilewright.storage-deadline": 1})
    with deadline, pytest.raises(StoreError, match=f"^{role}: .*{text}") as raised:
        tw.matmul(*asked, device="cpu")
    assert "\n" not in str(raised.value)
