"""What comes through pipes is counted as a file is."""

from __future__ import annotations

import io
import os
import sys
import threading
from pathlib import Path

import dask
import pytest

import tilewright as tw
from tilewright.pipeline.errors import CorpusError, OptionError
from tilewright.pipeline.text.formats.piped import without_pipes


def test_the_standard_input_is_kept_for_as_long_as_it_is_needed(tmp_path: Path) -> None:
    with dask.config.set({"temporary-directory": str(tmp_path)}):
        with without_pipes(["a", "-"], io.BytesIO(b"text" * 10**6)) as (paths, names):
            assert paths[0] == "a"
            assert Path(paths[1]).read_bytes() == b"text" * 10**6
            assert names == {paths[1]: "-"}
        assert not list(tmp_path.iterdir())
        with (
            pytest.raises(CorpusError, match=r"- is a pipe, and can be read once"),
            without_pipes(["-", "-"], io.BytesIO()),
        ):
            pass
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", [None, io.StringIO("text")])
def test_a_process_without_a_standard_input_is_told(given: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a service, and in a notebook."""
    monkeypatch.setattr(sys, "stdin", given)
    with pytest.raises(
        CorpusError, match=r"^- is the standard input, which this process has not; .* or name a file"
    ):
        tw.histogram("-", device="cpu")


def test_a_named_pipe_is_counted_under_its_name(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(b"abc" * 1000))
    writer.start()
    found = tw.histogram(pipe, device="cpu")
    writer.join()
    assert found.documents == (str(pipe),)
    assert found.nbytes == 3000


def test_a_state_of_a_pipe_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(b"abc"))
    writer.start()
    with pytest.raises(OptionError, match="is not there any more for the next run"):
        tw.histogram(pipe, device="cpu", state=tmp_path / "state")
    writer.join()


def test_the_number_of_an_open_pipe_is_no_name() -> None:
    reading, writing = os.pipe()
    try:
        with without_pipes(["a", reading]) as (paths, names):
            assert paths == ["a", reading]
            assert not names
    finally:
        os.close(reading)
        os.close(writing)
