"""What a plan is made from."""

from __future__ import annotations

from dataclasses import replace

from tilewright.pipeline.plan.inputs import WorkerFacts, most_neighbours, share_of_each


def test_neighbours_are_the_workers_of_the_fullest_host() -> None:
    assert most_neighbours([]) == 1
    assert most_neighbours(["tcp://10.0.0.1:1", "tcp://10.0.0.2:1", "tcp://10.0.0.1:7"]) == 2
    assert most_neighbours(["tls://node-1:1", "tls://node-2:1"]) == 1


def test_a_worker_has_its_share_of_its_hosts_cores_where_dask_says_one() -> None:
    here = WorkerFacts(
        "cuda", "GPU", 2**30, None, 1, usable_cores=64, host_cores=64, address="tcp://10.0.0.1:1"
    )
    beside = replace(here, address="tcp://10.0.0.1:2")
    elsewhere = replace(here, address="tcp://10.0.0.2:1")
    assert share_of_each([here]) == 64
    assert share_of_each([here, beside, elsewhere]) == 32
    assert share_of_each([here, replace(beside, usable_cores=8)]) == 8
    assert share_of_each([replace(here, address="")] * 2) == 64
