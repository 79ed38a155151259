"""One connection to a NATS server, from the first byte to the last. It is never mended, only replaced.

nats-py is used for the protocol and nothing else. Its own reconnection would hide what was missed, waits for a dead
socket when the network swallows packets (nats.py issue 671), and the client can look connected when a subscription no
longer delivers (issue 667). So reconnection is off, a PING with a time limit is the proof of life, and ``close`` takes
a bounded time whatever state the client is in. Two more habits of the library are answered here: some of its methods
swallow a cancellation, so nothing is awaited under ``wait_for``; and a subscription's callbacks run back to back
without a turn for the event loop, so the callback itself gives one.

Exceptions of the library end here: they become ``PlaneError`` or a call of ``on_lost`` / ``on_trouble``.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from nats import errors as nats_errors
from nats.aio.client import Client

__all__ = ["Handlers", "NatsLink", "NatsSettings", "PlaneError", "Server", "parse_servers"]

DEFAULT_PORT = 4222
EVENTS = "fullhit.v1.*.*.events"
"""All events of all workers of all pools. No queue group: every router needs to hear everything (case A18)."""


class PlaneError(Exception):
    """The broker is out of reach, or refuses us. The text is fit for an operator and holds no secret."""


@dataclass(frozen=True, slots=True)
class NatsSettings:
    """How to reach NATS and when to give up on a connection. Times in seconds.

    >>> NatsSettings(watchdog_interval=1.0).io_timeout
    3.0
    """

    credentials: Path | None = None
    """A ``.creds`` file."""
    tls: ssl.SSLContext | None = None
    """For a private authority or a client certificate; ``tls://`` alone uses the system's authorities."""
    client_name: str = "fullhit-router"
    connect_timeout: float = 5.0
    watchdog_interval: float = 3.0
    """Pause between two proofs of life."""
    io_timeout: float = 3.0
    """What a proof of life may take. A network that swallows packets is noticed after both together."""
    close_timeout: float = 1.0
    backoff_min: float = 0.1
    backoff_max: float = 5.0
    pending_messages: int = 65_536
    pending_bytes: int = 64 * 1024 * 1024
    """What waits between socket and intake. Beyond either bound messages are dropped, and every stream becomes
    doubtful."""
    replies_missing: int = 2
    """Snapshot requests to living workers in a row without any answer after which the connection is replaced."""
    distrust_pause: float = 30.0
    """Least time between two replacements for that reason; doubles up to ten times."""


@dataclass(frozen=True, slots=True)
class Server:
    """One server; the address is all that may be shown."""

    scheme: str
    address: str
    user: str | None = None
    password: str | None = None


def parse_servers(text: str) -> list[Server]:
    """Read ``nats://host:port,tls://user:password@host``. Raises ValueError, never repeating the text."""
    servers = [_parse(part.strip()) for part in text.split(",") if part.strip()]
    if not servers:
        raise ValueError("no NATS server given; an example is nats://127.0.0.1:4222")
    return servers


def _parse(text: str) -> Server:
    try:
        parts = urlsplit(text if "://" in text else f"nats://{text}")
        port = parts.port
    except ValueError:
        raise ValueError("malformed NATS URL; an example is nats://127.0.0.1:4222") from None
    if parts.scheme not in ("nats", "tls"):
        raise ValueError(f"a NATS URL starts with nats:// or tls://, not {parts.scheme[:20]}://")
    if not parts.hostname or port == 0 or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError("a NATS URL is a scheme, a host and a port; an example is nats://127.0.0.1:4222")
    return Server(parts.scheme, _address(parts), _unquoted(parts.username), _unquoted(parts.password))


def _address(parts: SplitResult) -> str:
    host = parts.hostname or ""
    port = parts.port or DEFAULT_PORT
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _unquoted(text: str | None) -> str | None:
    return None if text is None else unquote(text)


@dataclass(frozen=True, slots=True)
class Handlers:
    """Who is told. ``on_event`` and ``on_snapshot`` may wait: that holds back the subscription, not the loop."""

    on_event: Callable[[str, bytes], Awaitable[None]]
    on_snapshot: Callable[[bytes], Awaitable[None]]
    on_dropped: Callable[[int], None]
    """Messages were dropped on our side; the argument is how many older ones still wait."""
    on_trouble: Callable[[str], None]
    """The server refuses something but goes on."""


class NatsLink:
    """See the module text. ``lost`` is set when the connection has ended."""

    def __init__(
        self, server: Server, settings: NatsSettings, handlers: Handlers, subjects: Sequence[str] = (EVENTS,)
    ) -> None:
        self.server = server
        self._subjects = subjects
        self.lost = asyncio.Event()
        self._settings = settings
        self._handlers = handlers
        self._client = _new_client(must_encrypt=server.scheme == "tls")
        self._inbox = ""
        self._open = False
        self._last_error = ""
        self._sending: set[asyncio.Future[Any]] = set()

    async def open(self) -> None:
        """Connect and subscribe; on return everything published from now on will arrive. Raises PlaneError."""
        opening = asyncio.ensure_future(self._open_client())
        try:
            await asyncio.wait({opening}, timeout=self._settings.connect_timeout)
        except BaseException:
            _abandon(opening)
            raise
        if not opening.done():
            _abandon(opening)
            raise PlaneError(f"no connection to {self.server.address} within {self._settings.connect_timeout:g} s")
        try:
            opening.result()
        except Exception as error:
            detail = self._last_error or _text(error)
            raise PlaneError(f"cannot connect to {self.server.address}: {detail}") from None
        self._open = True
        await self.prove()

    async def prove(self) -> None:
        """A PING and its PONG within ``io_timeout``. Raises PlaneError when the connection is not to be trusted."""
        if self.lost.is_set() or not self._client.is_connected:
            self.lost.set()
            raise PlaneError(f"connection to {self.server.address} lost: {self._last_error or 'closed'}")
        timeout = self._settings.io_timeout
        # Not under wait_for: with a full socket buffer this waits without looking at any limit.
        asking: asyncio.Future[Any] = asyncio.ensure_future(self._client.flush(timeout))
        losing: asyncio.Future[Any] = asyncio.ensure_future(self.lost.wait())
        try:
            await asyncio.wait({asking, losing}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if self.lost.is_set():
                raise PlaneError(f"connection to {self.server.address} lost: {self._last_error or 'closed'}")
            if not asking.done():
                raise PlaneError(f"{self.server.address} gave no answer within {timeout:g} s")
            try:
                asking.result()
            except Exception as error:
                raise PlaneError(f"{self.server.address} gave no answer: {_text(error)}") from None
        finally:
            losing.cancel()
            _abandon(asking)

    def request(self, subject: str, data: bytes) -> None:
        """Send a request whose answers come to ``on_snapshot``. What the connection does not take soon is dropped."""
        if self.lost.is_set() or len(self._sending) >= 64:
            return
        sending = asyncio.ensure_future(self._client.publish(subject, data, reply=self._inbox))
        self._sending.add(sending)
        sending.add_done_callback(self._sent)

    def _sent(self, sending: asyncio.Future[Any]) -> None:
        self._sending.discard(sending)
        if not sending.cancelled():
            sending.exception()  # the watchdog finds out what matters

    async def close(self) -> None:
        """Give the connection up, within ``close_timeout``. Never raises."""
        self._open = False
        self.lost.set()
        closing = asyncio.ensure_future(self._client.close())
        try:
            await asyncio.wait({closing}, timeout=self._settings.close_timeout)
        finally:
            _abandon(closing)
            for sending in list(self._sending):
                sending.cancel()
            # Private names, hence guarded: a stuck close would leave the socket open for ever.
            for name in ("_io_writer", "_bare_io_writer"):
                writer = getattr(getattr(self._client, "_transport", None), name, None)
                if isinstance(writer, asyncio.StreamWriter):
                    writer.transport.abort()

    async def _open_client(self) -> None:
        server, settings = self.server, self._settings
        options: dict[str, Any] = {}
        if server.user is not None and server.password is not None:
            options.update(user=server.user, password=server.password)
        elif server.user is not None:
            options.update(token=server.user)
        if settings.credentials is not None:
            options.update(user_credentials=str(settings.credentials))
        if settings.tls is not None:
            options.update(tls=settings.tls)
        await self._client.connect(
            servers=f"{server.scheme}://{server.address}",
            name=settings.client_name,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0.05,
            connect_timeout=settings.connect_timeout,
            ping_interval=3600,
            flush_timeout=settings.io_timeout,
            error_cb=self._on_error,
            closed_cb=self._on_closed,
            disconnected_cb=self._on_closed,
            **options,
        )
        limits = {
            "pending_msgs_limit": settings.pending_messages,
            "pending_bytes_limit": settings.pending_bytes,
        }
        self._inbox = self._client.new_inbox()
        await self._client.subscribe(self._inbox, cb=self._take_snapshot, **limits)
        for subject in self._subjects:
            await self._client.subscribe(subject, cb=self._take_event, **limits)

    async def _take_event(self, message: Any) -> None:
        if self._open:
            await self._handlers.on_event(message.subject, message.data)

    async def _take_snapshot(self, message: Any) -> None:
        if self._open and not _is_no_responders(message):
            await self._handlers.on_snapshot(message.data)

    async def _on_closed(self) -> None:
        self.lost.set()

    async def _on_error(self, error: Exception) -> None:
        self._last_error = _text(error)
        if not self._open:
            return
        if isinstance(error, nats_errors.SlowConsumerError):
            self._handlers.on_dropped(error.sub.pending_msgs if error.sub is not None else 0)
        elif "permissions violation" in self._last_error.lower():
            self._handlers.on_trouble(self._last_error)
        else:
            self.lost.set()


def _new_client(*, must_encrypt: bool) -> Any:
    if not must_encrypt:
        return Client()

    class EncryptedClient(Client):
        """Refuses to go on in clear text, password included, with a server that does not ask for TLS."""

        async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
            if initial_connection and not info.get("tls_required"):
                raise ConnectionError("the server does not offer TLS, which the URL demands")
            await super()._process_info(info, initial_connection)

    return EncryptedClient()


def _is_no_responders(message: Any) -> bool:
    """The server's own word that nobody listens where a request went: an encoder that publishes nothing, or not yet."""
    return not message.data and (message.headers or {}).get("Status") == "503"


def _abandon(future: asyncio.Future[Any]) -> None:
    """Let go of something that may never end, without a complaint about its fate."""
    if future.done():
        if not future.cancelled():
            future.exception()
    else:
        future.cancel()
        future.add_done_callback(lambda done: None if done.cancelled() else done.exception() and None)


def _text(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:200]
