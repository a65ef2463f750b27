"""A proxy before a server of HTTP/1.1, on this host: it counts requests, makes the way to the server long and narrow,
and does to some requests what networks and busy servers do."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import unquote

BLOCK_NBYTES = 2**16

SLOW_DOWN = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>SlowDown</Code>'
    b"<Message>Please reduce your request rate.</Message></Error>"
)


class Asked(NamedTuple):
    """A request, as the server gets it."""

    method: str
    key: str
    """Its path without the bucket, and without a query."""
    query: str
    byte_range: str | None
    """The header ``Range``."""
    conditional: bool
    """Whether it has a header ``If-Match`` or ``If-None-Match``."""


class Fault(NamedTuple):
    """What is done to a request. Nothing, by default."""

    status: int = 0
    """Answer with this in the server's place; 503 with S3's ``SlowDown``."""
    cut: int | None = None
    """Close the connection after so many bytes of the answer's body."""
    drop_answer: bool = False
    """The server gets the request, and nobody its answer."""
    refuse: bool = False
    """Close the connection before the server gets the request."""
    stall: bool = False
    """Keep the request, and the connection, until the proxy ends."""
    delay: float = 0.0
    """Seconds before the server gets it."""


NO_FAULT = Fault()

Faults = Callable[[Asked], Fault]


def seeded(seed: int, share: float, faults: tuple[Fault, ...]) -> Faults:
    """One of these faults for a share of all requests, by a seed. The same key is spared after its third, so that work
    ends."""
    chance, hit = random.Random(seed), dict[tuple[str, str], int]()

    def fault(asked: Asked) -> Fault:
        one, which = chance.random(), chance.choice(faults)
        place = asked.method, asked.key
        if one >= share or hit.get(place, 0) >= 3:
            return NO_FAULT
        hit[place] = hit.get(place, 0) + 1
        return which

    return fault


@dataclass
class Proxy:
    """Listens on a free port of 127.0.0.1, on a thread of its own; `proxied` starts and ends one."""

    port_of_server: int
    latency: float = 0.0
    """Seconds from a request's arrival to its being passed on, and as long for each new connection."""
    rate: float = 0.0
    """Bytes a second of all answers together; 0: as fast as it goes."""
    faults: Faults = lambda asked: NO_FAULT
    asked: list[Asked] = field(default_factory=list)
    """All requests so far."""
    sent_nbytes: int = 0
    """Bytes of all answers' bodies."""
    most_at_once: int = 0
    """The most requests that were under way at the same time."""
    port: int = 0
    _under_way: int = 0
    _free_at: float = 0.0
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    """Of connections that are open, to both sides."""
    _serving: set[asyncio.Future[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def forget(self) -> None:
        """Count from here on."""
        self.asked.clear()
        self.sent_nbytes = self.most_at_once = 0

    def count(self, method: str, key: str = "") -> int:
        """Requests of a method so far, of keys that have this in them; listings are of the bucket, whose key is
        empty."""
        return sum(one.method == method and key in one.key for one in self.asked)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Begin to serve a connection."""
        self._writers.add(writer)
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def end(self) -> None:
        """End all connections, whether or not what was written is read. One that was left to the loop, which closes
        next, would be warned of wherever it is collected."""
        for writer in self._writers:
            writer.transport.abort()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        # A task that was cancelled before it began has closed nothing, and one that was while it waited for a
        # connection's end has cancelled that, too.
        await asyncio.gather(*map(self._closed, list(self._writers)), return_exceptions=True)

    async def settle(self) -> None:
        """Wait for connections that are being accepted, or made to the server: they are nobody's yet, and cannot be
        ended."""
        while being_made := asyncio.all_tasks() - {asyncio.current_task()} - self._serving:
            await asyncio.wait(being_made)

    async def _server(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the server."""
        made = await asyncio.open_connection("127.0.0.1", self.port_of_server, limit=2**18)
        self._writers.add(made[1])
        return made

    async def _closed(self, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()
        self._writers.discard(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            await asyncio.sleep(self.latency)
            while head := await _head_of(reader):
                if b"100-continue" in head.lower():  # who asks for that sends no body before
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    head = b"".join(
                        line
                        for line in head.splitlines(keepends=True)
                        if not line.lower().startswith(b"expect:")
                    )
                body = await _body_of(reader, head)
                asked = _asked_of(head)
                self.asked.append(asked)
                self._under_way += 1
                self.most_at_once = max(self.most_at_once, self._under_way)
                try:
                    fault = self.faults(asked)
                    await asyncio.sleep(self.latency + fault.delay)
                    if fault.stall:
                        await asyncio.Event().wait()
                    if fault.refuse:
                        return
                    if fault.status:
                        await _answer(writer, fault.status)
                        continue
                    if server is None:
                        # Shielded: one that is cancelled while it is made would stay with the loop.
                        server = await asyncio.shield(asyncio.ensure_future(self._server()))
                    if not await self._passed_on(asked, fault, head, body, server, writer):
                        return
                finally:
                    self._under_way -= 1
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            for one in [writer, *([server[1]] if server else [])]:
                await self._closed(one)

    async def _passed_on(
        self,
        asked: Asked,
        fault: Fault,
        head: bytes,
        body: bytes,
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Pass a request on, and its answer back; returns whether the connections go on."""
        server[1].write(head + body)
        await server[1].drain()
        answer = await _head_of(server[0])
        while answer.split(b" ", 2)[1] == b"100":
            answer = await _head_of(server[0])
        headers = _headers_of(answer)
        status = int(answer.split(b" ", 2)[1])
        length: int | None = int(headers.get("content-length", -1))
        if asked.method == "HEAD" or status in (204, 304):
            length = 0
        elif length == -1:
            length = None
        if fault.drop_answer:
            return False
        writer.write(answer)
        left, body_nbytes = length, 0
        while left is None or left > 0:
            if left is None:
                block = await _chunk_of(server[0])
            else:
                block = await server[0].read(min(left, BLOCK_NBYTES))
                left -= len(block)
            if not block:
                return False
            body_nbytes += len(block)
            if fault.cut is not None and body_nbytes > fault.cut:
                writer.write(block[: len(block) - (body_nbytes - fault.cut)])
                await writer.drain()
                return False
            await self._pace(len(block))
            self.sent_nbytes += len(block)
            writer.write(block)
            await writer.drain()
            if left is None and block == b"0\r\n\r\n":
                break
        return headers.get("connection", "").lower() != "close"

    async def _pace(self, nbytes: int) -> None:
        """Wait until the link has carried so many bytes more."""
        if not self.rate:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + nbytes / self.rate
        if self._free_at > now + 0.001:
            await asyncio.sleep(self._free_at - now)


async def _head_of(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return b""


async def _chunk_of(reader: asyncio.StreamReader) -> bytes:
    """A chunk of a body of unknown length, with its length before it."""
    line = await reader.readuntil(b"\r\n")
    return line + await reader.readexactly(int(line.split(b";")[0], 16) + 2)


async def _body_of(reader: asyncio.StreamReader, head: bytes) -> bytes:
    headers = _headers_of(head)
    if headers.get("transfer-encoding", "").lower() == "chunked":
        parts = []
        while not parts or parts[-1] != b"0\r\n\r\n":
            parts.append(await _chunk_of(reader))
        return b"".join(parts)
    return await reader.readexactly(int(headers.get("content-length", 0)))


def _headers_of(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _asked_of(head: bytes) -> Asked:
    method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
    path, _, query = target.partition("?")
    headers = _headers_of(head)
    return Asked(
        method,
        unquote(path).lstrip("/").partition("/")[2],
        query,
        headers.get("range"),
        not headers.keys().isdisjoint(("if-match", "if-none-match")),
    )


async def _answer(writer: asyncio.StreamWriter, status: int) -> None:
    body = SLOW_DOWN if status == 503 else b""
    head = f"HTTP/1.1 {status} Told\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


@contextmanager
def proxied(port_of_server: int, **how: object) -> Iterator[Proxy]:
    """A proxy before a server on this host, for the length of a block. how: its fields."""
    proxy = Proxy(port_of_server, **how)  # type: ignore[arg-type]
    loop, ready = asyncio.new_event_loop(), threading.Event()
    ends: list[asyncio.Event] = []

    async def run() -> None:
        end = asyncio.Event()
        ends.append(end)
        server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0, limit=2**18)
        proxy.port = server.sockets[0].getsockname()[1]
        ready.set()
        await end.wait()
        # A server that is closed breaks off those that it is accepting: it hears of no more first.
        for listening in server.sockets:
            loop.remove_reader(listening.fileno())
        await proxy.settle()
        await proxy.end()
        server.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), name="proxy", daemon=True)
    thread.start()
    try:
        if not ready.wait(10):
            raise RuntimeError("the proxy did not start")
        yield proxy
    finally:
        loop.call_soon_threadsafe(ends[0].set)
        thread.join(10)
        loop.close()
