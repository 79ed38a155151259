"""What an encoder holds to tell routers which embeddings it has.

The encoder's threads touch only a lock and some dictionaries; everything that can wait, fail or be slow
happens on one daemon thread with an event loop of its own. No trouble of the event plane reaches the
encoder: the worst that can happen is that routers know less for a while, and they are told so.

Threads do not survive a fork. Make the publisher in the process that uses it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .cache import EmbeddingCache
from .dynamo import DynamoTarget
from .identity import device_name, normalize_url, worker_id_for
from .sender import Counters, PublisherOptions, Sender
from .state import CacheStats, PublisherState
from .transports.base import Transport
from .transports.nats import NatsTransport

__all__ = ["EmbeddingCachePublisher"]

_log = logging.getLogger("fullhit_publisher")


class EmbeddingCachePublisher:
    """Publishes the changes of one worker's embedding cache.

    In a program with an event loop::

        async with EmbeddingCachePublisher("http://10.0.0.7:30002").attach(cache):
            ...

    From plain threads::

        publisher = EmbeddingCachePublisher("http://10.0.0.7:30002", event_plane="nats://10.0.0.2:4222")
        publisher.start()
        publisher.publish_delta(["00112233445566778899aabbccddeeff"], [])
        publisher.close()

    ``url`` is the address at which routers reach this encoder; it is the worker's identity, so spell it as
    routers do. ``pool`` names the encoders with the same model and processor. ``event_plane`` is one NATS
    URL or several separated by commas; ``credentials`` a ``.creds`` file, ``tls`` an SSL context, both for
    NATS; ``transport`` replaces all three. ``wrap`` gets the transport and gives the one to use in its place: a
    place for tests to lose messages. ``device`` is ``cuda``, ``cpu`` and the like, or a
    ``torch.device``. ``heartbeat_interval`` in seconds.

    ``dynamo`` instead of ``url``: the encoder is this worker of a Dynamo deployment; Dynamo's own front ends are told
    as well, over the same NATS servers, and ``pool`` is the router's pool of that deployment.

    Raises ValueError for a malformed URL, device, pool or option, never because a server is away.
    """

    def __init__(
        self,
        url: str = "",
        *,
        dynamo: DynamoTarget | None = None,
        pool: str = "default",
        event_plane: str = "nats://127.0.0.1:4222",
        device: object = "cuda",
        heartbeat_interval: float = 1.0,
        credentials: str | Path | None = None,
        tls: ssl.SSLContext | None = None,
        options: PublisherOptions | None = None,
        transport: Transport | None = None,
        wrap: Callable[[Transport], Transport] | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
        rng: random.Random | None = None,
    ) -> None:
        if not 0.01 <= heartbeat_interval <= 3600:
            raise ValueError("heartbeat_interval must be between 0.01 and 3600 seconds")
        if not pool or len(pool) > 128:
            raise ValueError("pool must have a name of at most 128 characters")
        if bool(url) is (dynamo is not None):
            raise ValueError("a worker is known by its url, or by what it is in a Dynamo deployment: give one of both")
        self._options = options or PublisherOptions()
        self._dynamo = dynamo
        self._url = normalize_url(url) if dynamo is None else dynamo.name
        transport = transport or NatsTransport(event_plane, credentials=credentials, tls=tls)
        self._transport = transport if wrap is None else wrap(transport)
        self._interval = heartbeat_interval
        self._rng = rng
        self._lock = threading.Lock()
        self._state = PublisherState(
            worker_id_for(self._url),
            clock_ns=clock_ns,
            pool=pool,
            url=self._url,
            device=device_name(device),
            interval_ms=max(int(heartbeat_interval * 1000), 1),
            max_pending_keys=self._options.max_pending_keys,
            max_message_bytes=self._options.max_message_bytes,
        )
        self._cache: EmbeddingCache[Any] | None = None
        self._stats = CacheStats()
        self._counters = Counters()
        # Guarded by the lock, as the state is.
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sender: Sender | None = None
        self._wake_posted = False
        self._closed = False

    def __repr__(self) -> str:
        with self._lock:
            state = "closed" if self._closed else "running" if self._thread else "not started"
            return f"<EmbeddingCachePublisher {self._url} over {self._transport.name}: {state}, {self._state!r}>"

    @property
    def url(self) -> str:
        """The worker's name: its normalised URL, or ``dynamo:INSTANCE``."""
        return self._url

    @property
    def worker_id(self) -> int:
        return self._state.worker_id

    @property
    def pool(self) -> str:
        return self._state.pool

    @property
    def counters(self) -> Counters:
        """A copy of the counters."""
        with self._lock:
            return replace(self._counters, lost_marks=self._state.lost_marks, overflows=self._state.overflows)

    def keys(self) -> list[str]:
        """The keys that routers are, or are about to be, told of."""
        with self._lock:
            return self._state.keys()

    def publish_delta(self, added_keys: Iterable[str], removed_keys: Iterable[str]) -> None:
        """Tell routers of a change; a key in both lists ends as removed.

        Thread-safe, takes time proportional to the number of keys, waits for nothing, and works before
        ``start``, while no server is reachable and (to no effect) after ``close``. Calls from several
        threads take effect in some order; who needs a certain one calls under a lock of its own, as
        ``EmbeddingCache`` does.

        Raises TypeError or ValueError, and takes nothing, if a key is not text, has over 1024 characters, or
        cannot be written as UTF-8.
        """
        added, removed = _listed(added_keys), _listed(removed_keys)
        with self._lock:
            if not self._closed and self._state.apply(added, removed):
                self._post_wake()

    def attach(self, cache: EmbeddingCache[Any]) -> EmbeddingCachePublisher:
        """Publish every change of ``cache``, beginning with what it holds, and its figures in heartbeats.

        Returns self. Raises ValueError when another cache is attached.
        """
        if self._cache is cache:
            return self
        if self._cache is not None:
            raise ValueError("a publisher speaks for one cache; make another publisher for the other one")
        self._cache = cache
        cache.add_listener(self.publish_delta)
        return self

    def set_stats(
        self,
        *,
        capacity_bytes: int | None = None,
        used_bytes: int | None = None,
        inflight: int | None = None,
        hits: int | None = None,
        misses: int | None = None,
    ) -> None:
        """Figures for the next heartbeat; what is not given stays. An attached cache sets all but
        ``inflight``.
        """
        given = {
            "capacity_bytes": capacity_bytes,
            "used_bytes": used_bytes,
            "inflight": inflight,
            "hits": hits,
            "misses": misses,
        }
        changed = {name: max(int(value), 0) for name, value in given.items() if value is not None}
        with self._lock:
            self._stats = replace(self._stats, **changed)

    def reset(self) -> None:
        """The cache was emptied by a restart of whatever holds it: forget all keys and begin a new epoch."""
        with self._lock:
            self._state.reset()
            if self._loop is not None and self._sender is not None:
                self._call_loop(self._sender.beat_now)

    def start(self) -> EmbeddingCachePublisher:
        """Start the thread; returns at once, whether a server is there or not. Idempotent.

        Raises RuntimeError after ``close``.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("this publisher is closed; make a new one")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fullhit-publisher", daemon=True)
                self._thread.start()
        return self

    def close(self) -> None:
        """Send what is left and a last heartbeat if there is a connection, and stop the thread. Idempotent.

        Takes at most about three times ``close_timeout``, and far less when the server answers.
        """
        with self._lock:
            first, self._closed = not self._closed, True
            thread = self._thread
            if first and self._loop is not None and self._sender is not None:
                self._call_loop(self._sender.stop)
        if first and self._cache is not None:
            self._cache.remove_listener(self.publish_delta)
        if thread is None or thread is threading.current_thread():
            return
        thread.join(4 * self._options.close_timeout)
        if thread.is_alive() and first:
            _log.warning("the publisher's thread did not end in time and is left behind")

    async def __aenter__(self) -> EmbeddingCachePublisher:
        return self.start()

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                loop = runner.get_loop()
                loop.set_exception_handler(_on_loop_exception)
                runner.run(self._main())
        except Exception:
            _log.exception("the publisher's thread failed; routers are told nothing more")
        finally:
            with self._lock:
                self._loop = self._sender = None

    async def _main(self) -> None:
        sender = Sender(
            self._state,
            self._lock,
            self._transport,
            self._options,
            heartbeat_interval=self._interval,
            collect_stats=self._collect_stats,
            rng=self._rng,
            dynamo=self._dynamo,
        )
        with self._lock:
            self._loop = asyncio.get_running_loop()
            self._sender = sender
            self._counters = sender.counters
            if self._closed:
                sender.stop()
        await sender.run()

    def _collect_stats(self) -> CacheStats:
        """Called with the lock held; the cache's figures are plain attributes and need none of its locks."""
        if self._cache is None:
            return self._stats
        return replace(
            self._stats,
            capacity_bytes=self._cache.capacity_bytes,
            used_bytes=self._cache.used_bytes,
            hits=self._cache.hits,
            misses=self._cache.misses,
        )

    def _post_wake(self) -> None:
        """Called with the lock held. One wake-up is under way at a time, however many changes come."""
        if not self._wake_posted and self._loop is not None:
            self._wake_posted = True
            self._call_loop(self._on_wake)

    def _on_wake(self) -> None:
        with self._lock:
            self._wake_posted = False
            sender = self._sender
        if sender is not None:
            sender.wake()

    def _call_loop(self, callback: Callable[[], None]) -> None:
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(callback)
            except RuntimeError:  # the loop has just ended
                pass


def _listed(keys: Iterable[str]) -> Iterable[str]:
    # A generator must not run under the lock: it is the caller's code. A single text is refused further down.
    return keys if isinstance(keys, list | tuple | str | bytes) else list(keys)


def _on_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What abandoned client objects still have to say. Nothing waits for them, so it is only for the
    curious.
    """
    _log.debug("event loop: %s", context.get("message"), exc_info=context.get("exception"))
