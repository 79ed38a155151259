"""Mock encoder, second half: bringing an embedding to those who asked for it.

With ``zmq_to_scheduler`` the ``/encode`` says what to encode and ``/scheduler_receive_url`` says where to, and they
arrive in either order. The rule of SGLang 0.5.23, which ``Rendezvous`` keeps:

    registration before its /encode   held without an answer until the /encode starts, then accepted
    registration during its /encode   accepted at once; the same address twice is one address
    registration after all is over    held like an early one
    another receive_count             refused (400)

An ``/encode`` ends when its part has been pushed to ``receive_count`` addresses. The same part id posted twice is
encoded and delivered twice; nothing de-duplicates.

``Pusher`` does the pushing, as ZMQ does it by default: a push is done when the socket has taken the frames. At an
address where nobody listens that is at once too, and the frames wait for somebody until the socket is closed (two
seconds, or as long as a kept one has room). So a single ``/encode`` by hand gets its reply without a receiver.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from fullhit.lab.images import LabExtraMissing

try:
    import zmq
    import zmq.asyncio
except ImportError:
    raise LabExtraMissing("pyzmq") from None

__all__ = ["CountMismatch", "Destinations", "NoEncode", "PushFailed", "Pusher", "Rendezvous", "TooManyHeld"]

# Registrations held for an /encode that has not come; a client that floods gets refused.
MAX_HELD = 20_000
# Open sockets to scheduler ranks; a language server has one address per rank.
MAX_SOCKETS = 256
# Parts that wait in one socket for a receiver; the next one waits outside and fails in time.
HIGH_WATER = 256
# How long a closed socket may still deliver what was sent, milliseconds.
LINGER_MS = 2_000


class NoEncode(Exception):
    """No ``/encode`` of this id came while the registration was held."""


class TooManyHeld(Exception):
    """More registrations are held than a mock keeps."""


class CountMismatch(ValueError):
    """Two registrations of one part disagree about ``receive_count``. The caller's fault."""


class PushFailed(Exception):
    """The address is unusable, or too many parts wait there already."""


class Destinations:
    """Where one part goes; complete when ``receive_count`` different addresses are known."""

    def __init__(self, req_id: str) -> None:
        self.req_id = req_id
        self.encodes = 0
        self.count: int | None = None
        self.addresses: dict[str, None] = {}
        self._complete = asyncio.Event()

    def add(self, address: str, count: int) -> None:
        if self.count is not None and count != self.count:
            raise CountMismatch(f"receive_count {count} differs from {self.count} for {self.req_id}")
        self.count = count
        self.addresses[address] = None
        if len(self.addresses) >= count:
            self._complete.set()

    async def all(self, timeout: float) -> list[str]:
        """The addresses, once all are known; TimeoutError otherwise."""
        async with asyncio.timeout(timeout):
            await self._complete.wait()
        return list(self.addresses)


class Rendezvous:
    """Brings ``/encode`` and its registrations together, in whichever order they come."""

    def __init__(self, max_held: int = MAX_HELD) -> None:
        self._max_held = max_held
        self._active: dict[str, Destinations] = {}
        self._held: dict[str, list[asyncio.Future[Destinations]]] = {}
        self.held = 0

    def begin(self, req_id: str) -> Destinations:
        """An ``/encode`` starts; pair with ``end``."""
        state = self._active.setdefault(req_id, Destinations(req_id))
        state.encodes += 1
        for waiter in self._held.pop(req_id, ()):
            if not waiter.done():
                waiter.set_result(state)
        return state

    def end(self, state: Destinations) -> None:
        state.encodes -= 1
        if state.encodes == 0 and self._active.get(state.req_id) is state:
            del self._active[state.req_id]

    async def register(self, req_id: str, address: str, count: int, hold: float) -> None:
        """Take a registration; waits up to ``hold`` seconds for the ``/encode``. Raises NoEncode, CountMismatch."""
        state = self._active.get(req_id)
        if state is None:
            state = await self._wait(req_id, hold)
        state.add(address, count)

    async def _wait(self, req_id: str, hold: float) -> Destinations:
        if self.held >= self._max_held:
            raise TooManyHeld(f"{self.held} registrations are held already")
        waiter: asyncio.Future[Destinations] = asyncio.get_running_loop().create_future()
        self._held.setdefault(req_id, []).append(waiter)
        self.held += 1
        try:
            async with asyncio.timeout(hold):
                return await waiter
        except TimeoutError:
            raise NoEncode(req_id) from None
        finally:
            self.held -= 1
            waiters = self._held.get(req_id, [])
            if waiter in waiters:
                waiters.remove(waiter)
                if not waiters:
                    del self._held[req_id]


class Pusher:
    """ZMQ PUSH sockets, one per destination; at most ``max_sockets`` stay open, the least used is closed."""

    def __init__(self, max_sockets: int = MAX_SOCKETS) -> None:
        self._context = zmq.asyncio.Context()
        self._sockets: OrderedDict[str, zmq.asyncio.Socket] = OrderedDict()
        self._max_sockets = max_sockets

    async def push(self, address: str, frames: Sequence[bytes], timeout: float, *, keep: bool) -> None:
        """Send the frames to ``host:port``; ``keep`` the socket for the next part. Raises PushFailed."""
        socket = self._sockets.get(address)
        if socket is None:
            socket = self._connect(address)
            if keep:
                self._remember(address, socket)
        try:
            async with asyncio.timeout(timeout):
                await socket.send_multipart(frames, copy=len(frames[-1]) < 65536)
        except (TimeoutError, zmq.ZMQError) as problem:
            if self._sockets.get(address) is socket:
                del self._sockets[address]
            socket.close(linger=0)
            raise PushFailed(f"nobody took the embedding at {address} within {timeout:g} s ({problem})") from None
        if not keep:
            socket.close(linger=LINGER_MS)
        elif address in self._sockets:
            self._sockets.move_to_end(address)

    def close(self) -> None:
        """Close all; what is not delivered within a second is dropped."""
        for socket in self._sockets.values():
            socket.close(linger=1000)
        self._sockets.clear()
        self._context.destroy(linger=1000)

    def _remember(self, address: str, socket: zmq.asyncio.Socket) -> None:
        self._sockets[address] = socket
        while len(self._sockets) > self._max_sockets:
            self._sockets.popitem(last=False)[1].close(linger=LINGER_MS)

    def _connect(self, address: str) -> zmq.asyncio.Socket:
        port = address.rpartition(":")[2]
        if not port.isdecimal() or not 0 < int(port) < 65536:  # ZMQ would take it and never connect
            raise PushFailed(f"no usable address: {address}")
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        # Also for a socket that is dropped without being closed: by default it would hold up the exit for ever.
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        try:
            socket.connect(f"tcp://{address}")
        except zmq.ZMQError as problem:
            socket.close(linger=0)
            raise PushFailed(f"no usable address: {address} ({problem})") from None
        return socket
