"""The rig of the wire tests: everything real, on 127.0.0.1, over both event loops.

`@on_both_loops` turns `async def test_...(rig)` into a test that runs once on the standard loop and once on uvloop. It
does not use pytest-asyncio, whose way of choosing a loop has changed with every other release.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from fullhit.http.wire import (
    Handler,
    HttpListener,
    ListenerLimits,
    Origin,
    Request,
    Responder,
    Timeouts,
    UpstreamClient,
    UpstreamLimits,
)
from fullhit.lab.raw_http import RawClient, RawServer

TIMEOUTS = Timeouts(connect=5, send=10, first_byte=20, idle=20)


def open_sockets() -> int:
    count = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
        except OSError:
            pass
    return count


class Rig:
    """Starts listeners, relays, raw servers and clients; tears all of them down in order and takes a census:
    no task and no socket may be left."""

    def __init__(self) -> None:
        self.listeners: list[HttpListener] = []
        self.clients: list[UpstreamClient] = []
        self.raw_clients: list[RawClient] = []
        self.raw_servers: list[RawServer] = []

    @staticmethod
    async def until(condition: Callable[[], object], timeout: float = 20.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, "condition not reached"
            await asyncio.sleep(0.005)

    async def listen(self, handler: Handler, limits: ListenerLimits | None = None, **options: object) -> HttpListener:
        listener = HttpListener(handler, limits, **options)  # type: ignore[arg-type]
        self.listeners.append(listener)
        self.host, self.port = await listener.start("127.0.0.1", 0)
        return listener

    def upstream(self, limits: UpstreamLimits | None = None) -> UpstreamClient:
        client = UpstreamClient(limits)
        self.clients.append(client)
        return client

    async def server(
        self,
        script: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
        receive_buffer: int | None = None,
    ) -> RawServer:
        server = await RawServer(script, receive_buffer=receive_buffer).start()
        self.raw_servers.append(server)
        return server

    @staticmethod
    def origin(server: RawServer) -> Origin:
        return Origin(server.host, server.port)

    async def relay(
        self,
        server: RawServer,
        limits: ListenerLimits | None = None,
        timeouts: Timeouts = TIMEOUTS,
        upstream_limits: UpstreamLimits | None = None,
        errors: list[BaseException] | None = None,
    ) -> HttpListener:
        """A listener that hands everything to `server`. What a handler raises is kept in `errors`."""
        client = self.upstream(upstream_limits)
        origin = self.origin(server)

        async def handler(request: Request, responder: Responder) -> None:
            try:
                response = await client.send(
                    origin, request.method, request.target, request.forwarded(), request.body, timeouts=timeouts
                )
                await response.relay(responder)
            except BaseException as error:
                if errors is not None:
                    errors.append(error)
                raise

        return await self.listen(handler, limits)

    async def connect(self, **options: int) -> RawClient:
        client = await RawClient.open(self.host, self.port, **options)  # type: ignore[arg-type]
        self.raw_clients.append(client)
        return client

    async def close(self) -> None:
        for raw in self.raw_clients:
            await raw.close()
        for listener in self.listeners:
            await listener.close()
        for client in self.clients:
            await client.close()
        for server in self.raw_servers:
            await server.close()


async def _run(test: Callable[..., Awaitable[None]], arguments: dict[str, Any]) -> None:
    before = open_sockets()
    rig = Rig()
    try:
        async with asyncio.timeout(60):
            await test(rig, **arguments)
    finally:
        await rig.close()
    current = asyncio.current_task()
    await rig.until(lambda: asyncio.all_tasks() == {current})
    await rig.until(lambda: open_sockets() <= before)
    for listener in rig.listeners:
        assert listener.budget.used == 0, listener
        assert not listener.connections
    for client in rig.clients:
        assert client.open_connections == 0


LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def on_both_loops(test: Callable[..., Awaitable[None]]) -> Any:
    """Run `async def test(rig, ...)` with a fresh rig on each loop."""

    def run(loop_name: str, **arguments: Any) -> None:
        with asyncio.Runner(loop_factory=LOOPS[loop_name]) as runner:
            runner.run(_run(test, arguments))

    parameters = list(inspect.signature(test).parameters.values())[1:]
    loop_name = inspect.Parameter("loop_name", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__name__ = run.__qualname__ = test.__name__  # type: ignore[attr-defined]
    run.__module__ = test.__module__
    run.__signature__ = inspect.Signature([loop_name, *parameters])  # type: ignore[attr-defined]
    run.pytestmark = getattr(test, "pytestmark", [])  # type: ignore[attr-defined]
    return pytest.mark.parametrize("loop_name", list(LOOPS))(run)
