"""The proxy leaves nothing behind that is warned of in another test."""

from __future__ import annotations

import asyncio
import gc
import http.server
import socket
import sys
import threading
import warnings
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


def test_connections_whose_answers_nobody_reads_end_with_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda one: seen.append(repr(one.exc_value)))
    clients = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            with proxied(server.server_port) as proxy:
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
        server.shutdown()
        thread.join()
        server.server_close()
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
