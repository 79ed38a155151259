"""Transport over core NATS, with nats-py.

The client library is used for the protocol only. Its reconnection keeps and resends messages, so that nobody
can say what was delivered, and some ways of dying leave it convinced that all is well (a read loop that
ended on an exception; a network that swallows packets: nats.py issue 671). Therefore:

* one client object lives for one connection, with the library's own reconnection off;
* ``confirm`` is the watchdog: a PING that overtakes nothing, and a PONG within the time given, or the object
  is dropped;
* dropping is bounded: an orderly close gets its time, then the socket is aborted.

A ``tls://`` URL means TLS or nothing. The library would go on in clear text, password included, when the
server does not ask for TLS; the check sits before anything is sent.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from .base import RequestHandler, TransportError

__all__ = ["NatsTransport"]

_log = logging.getLogger("fullhit_publisher")

_DEFAULT_PORT = 4222
# What the library may hold back before ``publish`` waits for the socket.
_PENDING_BYTES = 2 * 1024 * 1024


class NatsTransport:
    """NATS servers of one cluster, tried in turn.

    ``servers``: one URL or several separated by commas, ``nats://`` or ``tls://``, with ``user:password@``
    or ``token@`` if wanted (percent-encoded). ``credentials``: path of a ``.creds`` file (needs the package
    ``nkeys``). ``tls``: an SSL context, for a private authority or a client certificate.

    Raises ValueError for a URL of another kind and for a credentials file that is not there.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        credentials: str | Path | None = None,
        tls: ssl.SSLContext | None = None,
        client_name: str = "fullhit-publisher",
    ) -> None:
        texts = servers.split(",") if isinstance(servers, str) else list(servers)
        self._servers = [_parse(text.strip()) for text in texts if text.strip()]
        if not self._servers:
            raise ValueError("no NATS server given; an example is nats://127.0.0.1:4222")
        self._credentials = None if credentials is None else Path(credentials)
        if self._credentials is not None:
            _check_credentials(self._credentials)
        self._tls = tls
        self._client_name = client_name
        self._next = 0

    @property
    def name(self) -> str:
        return ",".join(_address(server) for server in self._servers)

    async def connect(self, request_subject: str, on_request: RequestHandler, timeout: float) -> _NatsConnection:
        server = self._servers[self._next % len(self._servers)]
        self._next += 1
        connection = _NatsConnection(_new_client(must_encrypt=server.scheme == "tls"), _address(server))
        # Not wait_for: the library swallows a cancellation in places, and wait_for would wait for it.
        opening = asyncio.ensure_future(
            connection.open(self._options(server, timeout), request_subject, on_request, timeout)
        )
        try:
            await asyncio.wait({opening}, timeout=timeout)
            if not opening.done():
                raise TransportError(f"no connection to {connection.address} within {timeout:g} s")
            opening.result()
        except BaseException:
            opening.cancel()
            await connection.close(min(timeout, 1.0))
            raise
        return connection

    def _options(self, server: SplitResult, timeout: float) -> dict[str, Any]:
        options: dict[str, Any] = {
            "servers": f"{server.scheme}://{_address(server)}",
            "name": self._client_name,
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": 0.05,
            "connect_timeout": timeout,
            "ping_interval": 3600,
            "pending_size": _PENDING_BYTES,
            "flush_timeout": timeout,
            "dont_randomize": True,
        }
        if server.username is not None and server.password is not None:
            options["user"] = unquote(server.username)
            options["password"] = unquote(server.password)
        elif server.username is not None:
            options["token"] = unquote(server.username)
        if self._credentials is not None:
            options["user_credentials"] = str(self._credentials)
        if self._tls is not None:
            options["tls"] = self._tls
        return options


class _NatsConnection:
    def __init__(self, client: Any, address: str) -> None:
        self.address = address
        self._client = client
        self._lost = asyncio.Event()
        self._last_error = ""
        self._complaints: set[str] = set()
        self._open = False

    @property
    def max_payload(self) -> int:
        return int(self._client.max_payload)

    @property
    def lost(self) -> asyncio.Event:
        return self._lost

    async def open(
        self, options: dict[str, Any], request_subject: str, on_request: RequestHandler, timeout: float
    ) -> None:
        async def deliver(message: Any) -> None:
            on_request(message.data, message.reply)

        try:
            await self._client.connect(
                error_cb=self._on_error, closed_cb=self._on_closed, disconnected_cb=self._on_closed, **options
            )
            await self._client.subscribe(
                request_subject, cb=deliver, pending_msgs_limit=1024, pending_bytes_limit=1024 * 1024
            )
        except Exception as error:
            detail = self._last_error or _text(error)
            raise TransportError(f"cannot connect to {self.address}: {detail}") from None
        self._open = True
        await self.confirm(timeout)

    async def publish(self, subject: str, data: bytes) -> None:
        self._check()
        try:
            await self._client.publish(subject, data)
        except Exception as error:
            raise TransportError(f"publishing to {self.address} failed: {_text(error)}") from None
        self._check()

    async def confirm(self, timeout: float) -> None:
        self._check()
        try:
            # The library writes a PING ahead of messages it holds back; the second one is behind them for
            # certain.
            for _ in range(2 if self._client.pending_data_size > 0 else 1):
                await self._client.flush(timeout)
        except Exception as error:
            self._lost.set()
            raise TransportError(f"{self.address} gives no answer within {timeout:g} s: {_text(error)}") from None
        self._check()

    async def close(self, timeout: float) -> None:
        self._open = False
        self._lost.set()
        closing = asyncio.ensure_future(self._client.close())
        await asyncio.wait({closing}, timeout=timeout)
        if not closing.done():
            closing.cancel()
        elif not closing.cancelled():
            closing.exception()  # of no interest to anybody
        # Private, hence guarded: a socket that is left open by a stuck close would stay so for ever.
        for name in ("_io_writer", "_bare_io_writer"):
            writer = getattr(getattr(self._client, "_transport", None), name, None)
            if isinstance(writer, asyncio.StreamWriter):
                writer.transport.abort()

    def _check(self) -> None:
        if self._lost.is_set() or not self._client.is_connected:
            self._lost.set()
            raise TransportError(f"connection to {self.address} is lost: {self._last_error or 'closed'}")

    async def _on_closed(self) -> None:
        self._lost.set()

    async def _on_error(self, error: Exception) -> None:
        self._last_error = _text(error)
        if not self._open:
            return
        if "permissions violation" in self._last_error.lower():
            # The server goes on; say it once, for it means that routers hear nothing.
            if self._last_error not in self._complaints and len(self._complaints) < 16:
                self._complaints.add(self._last_error)
                _log.error("NATS server %s refuses: %s", self.address, self._last_error)
            return
        self._lost.set()


def _new_client(*, must_encrypt: bool) -> Any:
    # Imported here so that a publisher with another transport needs no nats-py.
    try:
        from nats.aio.client import Client
    except ImportError:
        raise TransportError("publishing over NATS needs the package nats-py") from None

    if not must_encrypt:
        return Client()

    class EncryptedClient(Client):
        async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
            if initial_connection and not info.get("tls_required"):
                raise ConnectionError("the server does not offer TLS, which the URL demands")
            await super()._process_info(info, initial_connection)

    return EncryptedClient()


def _parse(text: str) -> SplitResult:
    """Checked URL of a server. Messages never repeat the text: it may hold a password."""
    if "://" not in text:
        text = f"nats://{text}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError("malformed NATS URL; an example is nats://127.0.0.1:4222") from None
    if parts.scheme not in ("nats", "tls"):
        raise ValueError(f"event plane URL scheme {parts.scheme!r} is not known; use nats:// or tls://")
    if not parts.hostname or port == 0:
        raise ValueError("NATS URL names no host; an example is nats://127.0.0.1:4222")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError("NATS URL must not have a path, query or fragment")
    return parts


def _address(server: SplitResult) -> str:
    host = server.hostname or ""
    return f"[{host}]:{server.port or _DEFAULT_PORT}" if ":" in host else f"{host}:{server.port or _DEFAULT_PORT}"


def _check_credentials(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"NATS credentials file {path} does not exist")
    try:
        import_module("nkeys")
    except ImportError:
        raise ValueError("NATS credentials files need the package nkeys (pip install 'nats-py[nkeys]')") from None


def _text(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:200]
