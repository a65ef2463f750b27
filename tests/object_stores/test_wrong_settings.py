"""A setting by which a server is reached that cannot be meant so is named, with what to change."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import tilewright as tw
from tests.object_stores.proxy import Proxy
from tests.object_stores.refused import refusal
from tilewright.pipeline.errors import CorpusError, StoreError

SETTINGS = [
    ("AWS_ENDPOINT_URL", "127.0.0.1:9", "the server of S3 is given as 127.0.0.1:9, without http:// or https:// .*"),
    ("FSSPEC_S3", '{"anon": true', r"FSSPEC_S3 in the environment is no JSON \(.*mend it, such as FSSPEC_S3=.*"),
    ("FSSPEC_S3", "[1]", r"FSSPEC_S3 in the environment is \[1\], and says nothing so; it must be a mapping .*"),
    ("AWS_PROFILE", "nobody", r"there are no credentials \(ProfileNotFound: The config profile \(nobody\) .*"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "text"), SETTINGS)
def test_a_setting_that_cannot_be_meant_so_is_named(
    name: str,
    value: str,
    text: str,
    url: str,
    library: str,
    proxy: Proxy,
    local: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """obstore would panic at an address without a protocol, and fsspec only warns of what it cannot read."""
    monkeypatch.setenv(name, value)
    if name == "AWS_PROFILE":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    for role, call in (
        ("A", partial(tw.matmul, f"{url}/a", local, local.parent / "c")),
        ("output", partial(tw.matmul, local, local, f"{url}/c")),
    ):
        with pytest.raises(StoreError, match=rf"^{role}: cannot open {url}/[ac]: {text}") as raised:
            call(device="cpu")
        assert "\n" not in str(raised.value)
    if name == "AWS_ENDPOINT_URL":
        with pytest.raises(CorpusError, match=f"^cannot list {url}: {text}"):
            tw.histogram(url, device="cpu")
    assert proxy.asked == []


def test_an_option_that_no_library_knows_is_no_fault_of_the_array(
    url: str, proxy: Proxy, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.config import conf

    monkeypatch.setitem(conf, "s3", {"endpoint": "x"})
    told = refusal(f"{url}/a", local, local.parent / "c")
    assert told.startswith(f"A: cannot open {url}/a: an option is not known (TypeError: ")
    assert told.endswith("take it out of fsspec's configuration: FSSPEC_... in the environment, or the files in"
                         " ~/.config/fsspec")  # fmt: skip
