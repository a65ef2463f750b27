"""Arrays that a server of pages has: read by HTTP, with queries, and not written."""

from __future__ import annotations

import http.server
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
import zarr

import tilewright as tw
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.store.arrays import open_array

VALUES = np.arange(256, dtype="f4").reshape(16, 16)
SIGNATURE = "a+b/c=ä &d"
SIGNED = "e=&sig=a%2Bb%2Fc%3D%C3%A4%20%26d"


class Pages(http.server.SimpleHTTPRequestHandler):
    """Files of a folder, but one; those of another only to requests with a signature."""

    def do_GET(self) -> None:
        self.answer(super().do_GET)

    def do_HEAD(self) -> None:
        self.answer(super().do_HEAD)

    def answer(self, give: Any) -> None:
        asked = urlsplit(self.path)
        signed = parse_qs(asked.query, keep_blank_values=True) == {"e": [""], "sig": [SIGNATURE]}
        if asked.path == "/a/c/1/1" or (asked.path.startswith("/signed/") and not signed):
            self.send_error(403)
        else:
            give()

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def local(tmp_path: Path) -> Path:
    for name in ("a", "signed/x", "signed/y"):
        zarr.create_array(tmp_path / name, data=VALUES, chunks=(8, 8))
    with warnings.catch_warnings(action="ignore"):  # that format 3 does not define consolidated metadata yet
        zarr.consolidate_metadata(zarr.create_group(tmp_path / "signed").store)
    return tmp_path / "a"


def refusal(*arguments: Any) -> str:
    with pytest.raises(StoreError) as raised:
        tw.matmul(*arguments, device="cpu")
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.fixture
def page(local: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Pages, directory=local.parent)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_query_goes_with_every_request_and_into_no_name(page: str, local: Path, tmp_path: Path) -> None:
    """As signatures of clouds for all that lies below a folder."""
    url = f"{page}/signed/x?{SIGNED}"
    np.testing.assert_array_equal(tw.matmul(url, local, device="cpu"), VALUES @ VALUES)
    run = tw.matmul(url, local, tmp_path / "c", device="cpu")
    assert run.verification is not None
    assert run.verification.passed
    assert zarr.open_array(tmp_path / "c", mode="r").attrs["tilewright"]["inputs"]["A"] == f"{page}/signed/x"
    with pytest.raises(StoreError, match=r"cannot open http://.*/signed/x: the storage forbids it"):
        open_array(f"{page}/signed/x", ndim=2, role="A")
    with pytest.raises(StoreError, match=r"there is no Zarr array at http://.*/signed/z\?e="):
        open_array(f"{page}/signed/z?{SIGNED}", ndim=2, role="A")
    with pytest.raises(
        StoreError, match=r"signed\?e=.* is a Zarr group, .*: http:.*/signed/x\?e=.* or http:.*/signed/y\?e="
    ):
        open_array(f"{page}/signed?{SIGNED}", ndim=2, role="A")


def test_a_server_of_pages_is_read_and_takes_no_output(page: str, local: Path) -> None:
    told = refusal(local, local, f"{page}/c")
    assert told.startswith(
        f"output: cannot write to {page}/c: the server takes no such requests (status 501); for"
    )
    told = refusal(f"{page}/a", local, local.parent / "c")
    assert (
        f"chunk (1, 1) of {page}/a cannot be read ({page}/a/c/1/1): the storage forbids it (status 403)"
        in told
    )
