"""What a plan is made from."""

from __future__ import annotations

from tilewright.pipeline.plan.inputs import most_neighbours


def test_neighbours_are_the_workers_of_the_fullest_host() -> None:
    assert most_neighbours([]) == 1
    assert most_neighbours(["tcp://10.0.0.1:1", "tcp://10.0.0.2:1", "tcp://10.0.0.1:7"]) == 2
    assert most_neighbours(["tls://node-1:1", "tls://node-2:1"]) == 1
