"""HTTP by hand, for tests and fault rigs: what a well-behaved library would never send.

`RawClient` writes the bytes it is told to and reads one answer at a time with a small strict reader of its own, so that
the code under test is not checked by itself. `RawServer` runs a script, a coroutine with a reader and a writer, for
each connection.
"""

from __future__ import annotations

import asyncio
import socket
import ssl as ssl_module
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType

__all__ = ["RawClient", "RawReply", "RawRequest", "RawServer", "read_request", "reset"]

LIMIT = 1 << 20


@dataclass(slots=True)
class RawReply:
    """An answer: status, headers in order (names in lower case), body, and the chunk sizes as they came."""

    status: int
    version: str
    headers: list[tuple[str, str]]
    body: bytes
    chunks: list[int] = field(default_factory=list)

    def get(self, name: str) -> str | None:
        return next((value for found, value in self.headers if found == name), None)


@dataclass(slots=True)
class RawRequest:
    """A request as a server received it; `head` is the untouched head."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    head: bytes

    def get(self, name: str) -> str | None:
        return next((value for found, value in self.headers if found == name), None)


def _split(head: bytes) -> tuple[str, list[tuple[str, str]]]:
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    headers = []
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise ValueError(f"malformed header line {line!r}")
        headers.append((name.lower(), value.strip()))
    return first, headers


async def _chunked(reader: asyncio.StreamReader) -> tuple[bytes, list[int]]:
    body, sizes = bytearray(), []
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line[:-2].partition(b";")[0], 16)
        if size:
            sizes.append(size)
            body += await reader.readexactly(size)
            if await reader.readexactly(2) != b"\r\n":
                raise ValueError("chunk without CRLF")
        else:
            while await reader.readuntil(b"\r\n") != b"\r\n":
                pass
            return bytes(body), sizes


async def read_request(reader: asyncio.StreamReader) -> RawRequest:
    """One request from a connection. Raises IncompleteReadError at its end."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, headers = _split(head)
    method, target, _ = first.split(" ")
    names = dict(headers)
    if "transfer-encoding" in names:
        body, _ = await _chunked(reader)
    else:
        body = await reader.readexactly(int(names.get("content-length", "0")))
    return RawRequest(method, target, headers, body, head)


class RawClient:
    """One connection to a server.

    >>> async with await RawClient.open(host, port) as client:
    ...     client.send(b"GET / HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")
    ...     reply = await client.reply()
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        *,
        ssl: ssl_module.SSLContext | None = None,
        receive_buffer: int | None = None,
    ) -> RawClient:
        """Connect; a small `receive_buffer` makes a reader that is soon full."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await asyncio.get_running_loop().sock_connect(sock, (host, port))
        except BaseException:
            sock.close()
            raise
        limit = LIMIT if receive_buffer is None else receive_buffer
        name = host if ssl is not None else None
        reader, writer = await asyncio.open_connection(sock=sock, limit=limit, ssl=ssl, server_hostname=name)
        return cls(reader, writer)

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def reply(self, method: str = "GET", timeout: float = 30.0) -> RawReply:
        """The next answer. Raises IncompleteReadError when the connection ends before or inside it."""
        async with asyncio.timeout(timeout):
            head = await self.reader.readuntil(b"\r\n\r\n")
            first, headers = _split(head)
            version, status = first.split(" ")[:2]
            names = dict(headers)
            code = int(status)
            chunks: list[int] = []
            if method == "HEAD" or code in (204, 304) or code < 200:
                body = b""
            elif "transfer-encoding" in names:
                body, chunks = await _chunked(self.reader)
            elif "content-length" in names:
                body = await self.reader.readexactly(int(names["content-length"]))
            else:
                body = await self.reader.read(-1)
            return RawReply(code, version, headers, body, chunks)

    async def rest(self, timeout: float = 30.0) -> bytes:
        """Everything up to the end of the connection; a reset counts as its end."""
        data = bytearray()
        async with asyncio.timeout(timeout):
            try:
                while piece := await self.reader.read(65536):
                    data += piece
            except ConnectionError:
                pass
        return bytes(data)

    def reset(self) -> None:
        """Vanish: the peer sees a connection reset."""
        reset(self.writer)

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except (OSError, ssl_module.SSLError):
            pass

    async def __aenter__(self) -> RawClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a RST instead of a FIN."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class RawServer:
    """Runs `script(reader, writer)` for every connection; the connection is closed when it returns.

    `accepted` counts connections, `live` is how many are open, `lost` how many scripts ended because the peer went.
    """

    def __init__(self, script: Script, *, receive_buffer: int | None = None) -> None:
        self._script = script
        self._receive_buffer = receive_buffer
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.accepted = 0
        self.live = 0
        self.lost = 0
        self.host = "127.0.0.1"
        self.port = 0

    async def start(self) -> RawServer:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self._receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
        sock.bind((self.host, 0))
        self.port = sock.getsockname()[1]
        self._server = await asyncio.start_server(self._connected, sock=sock, limit=LIMIT, backlog=1024)
        return self

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.accepted += 1
        self.live += 1
        try:
            await self._script(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.lost += 1
        except asyncio.CancelledError:
            pass
        finally:
            self.live -= 1
            self._tasks.discard(task)
            writer.close()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> RawServer:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
