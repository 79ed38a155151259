"""Dynamo's etcd discovery, over etcd's JSON gateway.

The gateway is part of every etcd 3.4 and later, on the client port, and speaks HTTP, for which the router has a client
already; a gRPC client would bring two heavy packages for two calls. Those are: a range over each prefix, which gives
all records and the store's revision, then a watch on both from the revision after it, so that nothing between the two
is missed. When the stream ends, for whatever reason, both begin anew.

While etcd is out of reach nothing is known, so nothing changes: workers stay, and requests to dead ones fail until a
breaker holds them back.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import aiohttp

from .discovery import CHANNELS, INSTANCES, MAX_RECORDS

__all__ = ["EtcdBackend", "EtcdError"]

_PREFIXES: Final = (INSTANCES, CHANNELS)
_MAX_LINE: Final = 64 * 1024 * 1024
"""One message of a watch holds the events of one revision; of a range, the whole store."""
_CALL_TIMEOUT: Final = 10.0
_SILENCE: Final = 1800.0
"""A watch is asked for signs of life, which etcd gives every ten minutes; longer silence means a dead connection."""
_BACKOFF: Final = (0.2, 10.0)


class EtcdError(Exception):
    """etcd is out of reach, refuses us, or said what we do not understand."""


class EtcdBackend:
    """``urls``: one ``http://[user:password@]host:port`` or several with commas between; each is tried in turn.

    Raises ValueError for a malformed one, never repeating it.
    """

    def __init__(self, urls: str, *, rng: random.Random | None = None) -> None:
        self.error = "not started"
        self.connects = 0
        self._servers = [_parse(url.strip()) for url in urls.split(",") if url.strip()]
        if not self._servers:
            raise ValueError("no etcd server given; an example is etcd:http://127.0.0.1:2379")
        self._rng = rng or random.Random()
        self._store: dict[str, bytes] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self, on_store: Callable[[Mapping[str, bytes]], None]) -> None:
        """Begin to follow; returns at once."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(on_store), name="fullhit-discovery")

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        self.error = "closed"

    async def _run(self, on_store: Callable[[Mapping[str, bytes]], None]) -> None:
        attempt = 0
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CALL_TIMEOUT)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                before = self.connects
                address = ""
                try:
                    base, name, password = self._servers[attempt % len(self._servers)]
                    address = base
                    await self._follow(_Server(session, base, name, password), on_store)
                    self.error = f"{base}: the watch ended"
                except EtcdError as error:
                    self.error = f"{address}: {error}"
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    self.error = f"{address}: {str(error) or type(error).__name__}"[:300]
                attempt = attempt + 1 if self.connects == before else 0
                low, high = _BACKOFF
                await asyncio.sleep(self._rng.uniform(low / 2, min(high, low * 2.0 ** min(attempt, 16))))

    async def _follow(self, server: _Server, on_store: Callable[[Mapping[str, bytes]], None]) -> None:
        await server.log_in()
        store: dict[str, bytes] = {}
        revision = 0
        for prefix in _PREFIXES:
            # Both as of one revision: the first answer's.
            found, at = await server.range(prefix, revision)
            revision = revision or at
            store.update(found)
        self._store = store
        self.connects += 1
        self.error = ""
        on_store(dict(store))
        async for key, value in server.watch(_PREFIXES, revision + 1):
            if value is None:
                self._store.pop(key, None)
            elif key in self._store or len(self._store) < MAX_RECORDS:
                self._store[key] = value
            on_store(dict(self._store))


class _Server:
    """One etcd server's gateway."""

    def __init__(self, session: aiohttp.ClientSession, base: str, name: str, password: str) -> None:
        self._session = session
        self._base = base
        self._name = name
        self._password = password
        self._headers: dict[str, str] = {}

    async def log_in(self) -> None:
        if self._name:
            answer = await self._call("/v3/auth/authenticate", {"name": self._name, "password": self._password})
            self._headers = {"Authorization": str(answer.get("token", ""))}

    async def range(self, prefix: str, revision: int) -> tuple[dict[str, bytes], int]:
        """All records under the prefix, as of ``revision`` (0 = now), and the revision of the answer."""
        call: dict[str, Any] = {"key": _text(prefix), "range_end": _text(_end(prefix)), "limit": str(MAX_RECORDS)}
        if revision:
            call["revision"] = str(revision)
        answer = await self._call("/v3/kv/range", call)
        try:
            found = {_key(kv): _value(kv) for kv in answer.get("kvs", [])}
            return found, int(answer["header"]["revision"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EtcdError(f"not an answer to a range: {type(error).__name__}") from None

    async def watch(self, prefixes: tuple[str, ...], revision: int) -> AsyncIterator[tuple[str, bytes | None]]:
        """Changes from ``revision`` on: (key, value), value None for a deletion. Ends when the stream does."""
        creates = [
            {
                "create_request": {
                    "key": _text(prefix),
                    "range_end": _text(_end(prefix)),
                    "start_revision": str(revision),
                    "progress_notify": True,
                }
            }
            for prefix in prefixes
        ]
        body = "".join(json.dumps(create) + "\n" for create in creates).encode()
        async with self._session.post(self._base + "/v3/watch", data=body, headers=self._headers) as response:
            if response.status != 200:
                raise EtcdError(f"watch refused: {response.status} {(await response.content.read(200))!r}")
            async for message in _lines(response):
                result = message.get("result")
                if not isinstance(result, dict):
                    raise EtcdError(f"watch failed: {str(message.get('error', message))[:200]}")
                if result.get("canceled"):
                    raise EtcdError(f"watch cancelled: {str(result.get('cancel_reason', ''))[:200]}")
                try:
                    events = [
                        (_key(event["kv"]), None if event.get("type") == "DELETE" else _value(event["kv"]))
                        for event in result.get("events", [])
                    ]
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    raise EtcdError(f"not an event: {type(error).__name__}") from None
                for event in events:
                    yield event

    async def _call(self, path: str, call: Mapping[str, Any]) -> dict[str, Any]:
        async with asyncio.timeout(_CALL_TIMEOUT):
            async with self._session.post(self._base + path, json=call, headers=self._headers) as response:
                raw = bytearray()
                async for chunk in response.content.iter_any():
                    raw += chunk
                    if len(raw) > _MAX_LINE:
                        raise EtcdError(f"{path} answered more than {_MAX_LINE} bytes")
                if response.status != 200:
                    raise EtcdError(f"{path} answered {response.status}: {bytes(raw[:200])!r}")
        try:
            answer = json.loads(raw)
        except ValueError:
            raise EtcdError(f"{path} answered no JSON; is the gateway switched on?") from None
        if not isinstance(answer, dict):
            raise EtcdError(f"{path} answered no object")
        return answer


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The stream's JSON objects: one a line."""
    rest = b""
    while True:
        async with asyncio.timeout(_SILENCE):
            chunk = await response.content.readany()
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _MAX_LINE:
            raise EtcdError("a message without end")
        for line in lines:
            if line.strip():
                try:
                    message = json.loads(line)
                except ValueError:
                    raise EtcdError("the watch is no JSON") from None
                if not isinstance(message, dict):
                    raise EtcdError("the watch holds no objects")
                yield message


def _parse(url: str) -> tuple[str, str, str]:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or 2379
    except ValueError:
        raise ValueError("malformed etcd URL; an example is etcd:http://127.0.0.1:2379") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise ValueError("an etcd URL is a scheme, a host and a port; an example is etcd:http://127.0.0.1:2379")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}", unquote(parts.username or ""), unquote(parts.password or "")


def _text(key: str) -> str:
    return base64.b64encode(key.encode()).decode()


def _end(prefix: str) -> str:
    """The first key after all that begin with the prefix."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _key(kv: Mapping[str, Any]) -> str:
    return base64.b64decode(kv["key"]).decode("utf-8", "replace")


def _value(kv: Mapping[str, Any]) -> bytes:
    return base64.b64decode(kv.get("value", ""))
