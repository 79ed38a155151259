"""A TCP proxy that can be a bad network: it cuts, freezes and slows what passes, each way by itself.

*Cut*: every connection is reset and new ones are refused, as by a host that is gone. *Frozen*: connections stay, new
ones are taken, and not a byte passes until it thaws, as by a network that swallows packets; nothing is lost then, it
is late. *Slow*: so many bytes a second for each connection and direction.
"""

from __future__ import annotations

import asyncio
import socket
from types import TracebackType
from typing import Self

from fullhit.lab.processes import free_port

__all__ = ["Proxy"]

_CHUNK = 16 * 1024


class Proxy:
    """Listens on ``port`` of 127.0.0.1 and passes everything on to ``target``, a port there.

    ``receive_buffer``: bytes that the system may hold for us on the way from the target; a small one lets the target
    feel early that nobody reads.
    """

    def __init__(self, target: int, *, port: int = 0, receive_buffer: int = 0) -> None:
        self.port = port or free_port()
        self.connections = 0
        self.rate = 0.0
        """Bytes a second; 0 is as fast as it goes."""
        self._target = target
        self._receive_buffer = receive_buffer
        self._server: asyncio.Server | None = None
        self._up = asyncio.Event()
        self._down = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.thaw()

    async def __aenter__(self) -> Self:
        await self.mend()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cut()

    def freeze(self, *, up: bool = True, down: bool = True) -> None:
        """Hold back what goes to the target (``up``) and what comes from it (``down``)."""
        if up:
            self._up.clear()
        if down:
            self._down.clear()

    def thaw(self) -> None:
        self._up.set()
        self._down.set()

    async def cut(self) -> None:
        """Reset all connections and refuse new ones."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for writer in self._writers:
            _reset(writer)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if server is not None:
            await server.wait_closed()

    async def mend(self) -> None:
        """Take connections again, at the same port."""
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.connections += 1
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            await self._pass(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # either end is gone, or we were cut
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            _reset(writer)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._up.wait()  # a network that swallows packets does not bring the SYN to the target either
        outward = socket.socket()
        try:
            outward.setblocking(False)
            if self._receive_buffer:
                outward.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
            await asyncio.get_running_loop().sock_connect(outward, ("127.0.0.1", self._target))
        except BaseException:
            outward.close()
            raise
        there, back = await asyncio.open_connection(sock=outward, limit=self._receive_buffer or _CHUNK)
        self._writers.add(back)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, back, self._up))
                group.create_task(self._pump(there, writer, self._down))
        except* OSError:
            pass
        finally:
            self._writers.discard(back)
            _reset(back)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, gate: asyncio.Event) -> None:
        while True:
            await gate.wait()
            data = await source.read(_CHUNK)
            await gate.wait()  # what was read before it froze is held back, too
            if not data:
                break
            sink.write(data)
            await sink.drain()
            if self.rate:
                await asyncio.sleep(len(data) / self.rate)
        if sink.can_write_eof():
            sink.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
