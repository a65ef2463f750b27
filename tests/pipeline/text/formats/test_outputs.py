"""What Tilewright wrote below a folder is no document of it: a run that is repeated counts the same."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
from click.testing import CliRunner
from distributed import Client

import tilewright as tw
from tilewright.kernels.histograms.token_lists import Tokens
from tilewright.pipeline.text.corpus import list_corpus
from tilewright.pipeline.text.formats.listing import head_of
from tilewright.pipeline.text.formats.outputs import ENDINGS, ENDINGS_AT_URLS, is_our_file
from tilewright.pipeline.text.histogram import Histogram
from tilewright.pipeline.text.saved_counts import PLOT_ENDINGS, WRITERS, save_histogram
from tilewright.workflows.cli import cli
from tilewright.workflows.plots import plot_histogram
from tilewright.workflows.report import REPORT_ENDINGS


def histograms() -> list[Histogram]:
    words = Tokens.of([b"a", "é".encode()])
    return [
        Histogram("letter", np.arange(26), ("text",), 0, 325, "CPU", 1.0),
        Histogram("bigram", np.arange(2**16), ("text",), 0, 1, "CPU", 1.0),
        Histogram("byte", np.ones((2, 256), np.int64), ("a", "b\udcff"), 0, 512, "CPU", 1.0),
        Histogram("word", np.array([1, 2]), ("text",), 0, 3, "CPU", 1.0, words, {"casefold": True}),
        Histogram("word", np.zeros(0, np.int64), ("text",), 0, 3, "CPU", 1.0, Tokens.of([])),
    ]


def test_every_output_is_left_out(client: Client, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "text").write_text("text of a corpus")
    outputs = 0
    for number, histogram in enumerate(histograms()):
        for ending in WRITERS:
            save_histogram(histogram, tmp_path / f"c{number}{ending}")
            outputs += 1
    for ending in PLOT_ENDINGS:
        plot_histogram(histograms()[0], tmp_path / f"p{ending}")
        plot_histogram(histograms()[2], tmp_path / f"m{ending}", heat_map="documents", log=True)
        outputs += 2
    for ending in (".json", ".parquet", ".zarr"):
        tw.duplicates([tmp_path / "text"], cluster=client, out=tmp_path / f"d{ending}")
        tw.signals([tmp_path / "text"], cluster=client, out=tmp_path / f"s{ending}")
        outputs += 2
    for ending in REPORT_ENDINGS:
        given = ["signals", str(tmp_path / "text"), "--report", str(tmp_path / f"r{ending}")]
        run = CliRunner().invoke(cli, [*given, "--profile", client.scheduler.address])
        assert run.exit_code == 0, run.output
        outputs += 1
    listed = list_corpus([tmp_path])
    assert [Path(each.name).name for each in listed.documents] == ["text"]
    assert f"{outputs} earlier outputs of Tilewright not counted; name one to count it" in listed.notes
    assert [each.name for each in list_corpus([tmp_path / "p.png"]).documents] == [str(tmp_path / "p.png")]


def test_outputs_at_urls_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    for ending in (".npz", ".json", ".csv"):
        save_histogram(histograms()[0], tmp_path / f"c{ending}")
    for ending in (".png", ".svg"):
        plot_histogram(histograms()[0], tmp_path / f"p{ending}")
    fsspec.filesystem("memory").put(str(tmp_path), "/outputs", recursive=True)
    assert {path.suffix for path in tmp_path.iterdir()} == {"", *ENDINGS_AT_URLS}
    assert [each.name for each in list_corpus(["memory://outputs"]).documents] == ["memory://outputs/text"]


def test_what_others_wrote_is_counted(tmp_path: Path) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as members:
        members.writestr("facts.npy", "facts of another kind")
    np.savez_compressed(tmp_path / "facts.npz", facts=np.array("{}"), counts=np.ones(3))
    others = {
        "a.npz": archive.getvalue(),
        "b.npz": b"PK\3\4" + bytes(26) + b"facts.npy" + b"\xff" * 40,
        "c.npz": b"PK\3\4",
        "a.html": b'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Tilewright</title>',
        "a.svg": b'<?xml version="1.0"?><svg><dc:title>Matplotlib</dc:title></svg>',
        "a.png": b"\x89PNG\r\n\x1a\n" + bytes(25),
        "a.pdf": b"%PDF-1.4\n/Creator (Matplotlib)",
        "a.json": b'{"report": "Tilewright"}',
        "a.csv": b"bin,label\r\n",
        "a.parquet": b"PAR1",
    }
    for name, data in others.items():
        (tmp_path / name).write_bytes(data)
    assert {Path(name).suffix for name in others} == set(ENDINGS)
    for path in tmp_path.iterdir():
        assert not is_our_file(str(path), head_of, is_local=True), path.name
    assert len(list_corpus([tmp_path]).documents) == len(others) + 1
