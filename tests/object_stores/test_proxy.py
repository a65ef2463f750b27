"""The proxy leaves nothing behind that is warned of in another test."""

from __future__ import annotations

import asyncio
import gc
import http.server
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tests.object_stores.proxy import Proxy, proxied

ANSWER = bytes(2**23)
"""More than the buffers of connections take."""


class _Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(ANSWER)))
        self.end_headers()
        try:
            self.wfile.write(ANSWER)
        except ConnectionError:
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """A client that has gone is no news here."""


@contextmanager
def answering() -> Iterator[int]:
    """The port of a server."""
    with _Server(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_connections_whose_answers_nobody_reads_end_with_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda one: seen.append(repr(one.exc_value)))
    clients = []
    try:
        with answering() as port, warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            with proxied(port) as proxy:
                for number in range(6):
                    clients.append(socket.create_connection(("127.0.0.1", proxy.port)))
                    if number % 3:
                        clients[-1].sendall(b"GET /bucket/key HTTP/1.1\r\nHost: here\r\n\r\n")
                    if number % 3 == 2:
                        assert clients[-1].recv(12) == b"HTTP/1.1 200"
            gc.collect()
    finally:
        for client in clients:
            client.close()
    assert not seen


@pytest.mark.more
def test_connections_that_are_being_made_as_the_proxy_ends_end_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a client's are that has its answer before all its connections are there."""
    seen: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda one: seen.append(repr(one.exc_value)))
    with answering() as port, warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        for turn in range(100):
            clients = [socket.socket() for _ in range(12)]
            with proxied(port) as proxy:
                for client in clients:
                    client.setblocking(False)
                    client.connect_ex(("127.0.0.1", proxy.port))
                for client in clients[::2]:
                    with suppress(OSError):
                        client.sendall(b"GET /bucket/key HTTP/1.1\r\nHost: here\r\n\r\n")
                time.sleep(turn % 10 * 0.0003)
            for client in clients:
                client.close()
        gc.collect()
    assert not seen


def test_it_ends_where_a_wait_for_the_end_of_a_connection_was_cancelled() -> None:
    """As that of a task is, which waits for it as the proxy ends."""

    async def run() -> bool:
        served = asyncio.Event()

        async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            served.set()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(keep, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        await served.wait()
        proxy = Proxy(0)
        proxy._writers.add(writer)
        waiting = asyncio.ensure_future(writer.wait_closed())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await proxy.end()
        server.close()
        return waiting.cancelled()

    assert asyncio.run(run())
