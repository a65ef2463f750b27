"""A large file that is not cut tells how far it has been read."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed import Client

import tilewright as tw
from tests.pipeline.store.test_file_changes import COMPRESS
from tilewright.pipeline.events import Event, UnitAdvanced, WorkPlanned


@pytest.mark.sample(2)
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".bz2"])
def test_a_large_file_tells_how_far_it_is_read(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr("tilewright.pipeline.advance.TELL_SECONDS", 0.0)
    monkeypatch.setattr("tilewright.pipeline.text.counting.TOLD_NBYTES", 2**16)
    path = tmp_path / f"large{suffix or '.jsonl'}"
    text = b"".join(b'{"text": "%d"}\n' % (number**3) for number in range(100_000))
    path.write_bytes(COMPRESS[suffix](text) if suffix else text)
    events: list[Event] = []
    tw.histogram(path, field="text", cluster=client, device="cpu", listener=events.append)
    (planned,) = (event for event in events if isinstance(event, WorkPlanned))
    told = [event for event in events if isinstance(event, UnitAdvanced)]
    assert planned.nbytes == path.stat().st_size
    assert told
    assert {event.index for event in told} == {0}
    assert [event.nbytes for event in told] == sorted(event.nbytes for event in told)
    assert 0 < told[0].nbytes <= told[-1].nbytes <= planned.nbytes
