"""The prober: sends the probes that the fleet asks for, and lets its time pass.

One task, the supervisor, owns everything: it calls `Fleet.tick`, starts the probes of that turn, cancels those of
removed workers, and sleeps until the next turn is due or something woke it. However often workers come, go and come
back, there is one supervisor and at most one probe per worker, ``max_probes`` in all.

A probe may run a real forward at the encoder and be serialised with its work, so it is patient (30 s); only opening
the connection is not (a few seconds), so that addresses that swallow packets do not fill the probe slots. The client
is aiohttp: this is far off the request path. Each probe uses a fresh connection, because the question is whether a
new connection is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable

import aiohttp

from fullhit.fleet.registry import Fleet
from fullhit.fleet.types import Probe, ProbeResult

__all__ = ["HealthSupervisor", "HttpProber"]

CONNECT_SECONDS = 5.0
MAX_PROBES = 64


class HttpProber:
    """Answers `Probe` with `ProbeResult` over HTTP. Create it inside the running loop; ``await close()`` at the end."""

    def __init__(self, *, connect_timeout: float = CONNECT_SECONDS, ssl_context: ssl.SSLContext | None = None) -> None:
        self._connect_timeout = connect_timeout
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, limit=0, ssl=ssl_context or True),
            headers={"User-Agent": "fullhit-probe"},
            auto_decompress=False,
            trust_env=False,
        )

    async def __call__(self, probe: Probe) -> ProbeResult:
        """Send one probe; never raises but for cancellation."""
        timeout = aiohttp.ClientTimeout(total=probe.timeout, sock_connect=self._connect_timeout)
        try:
            async with self._session.get(probe.url, timeout=timeout, allow_redirects=False) as reply:
                if 200 <= reply.status < 300:
                    return ProbeResult("ok")
                hint = ": is the probe path right?" if reply.status == 404 else ""
                return ProbeResult("status", f"HTTP {reply.status}{hint}")
        except aiohttp.ConnectionTimeoutError:
            return ProbeResult("refused", f"no connection within {self._connect_timeout:g} s")
        except TimeoutError:
            return ProbeResult("timeout", f"no answer within {probe.timeout:g} s")
        except aiohttp.ClientConnectorError as error:
            return ProbeResult("refused", str(error.os_error or error))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return ProbeResult("error", f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """Close the client."""
        await self._session.close()


class HealthSupervisor:
    """Drives a `Fleet` in real time.

    Usage::

        supervisor = HealthSupervisor(fleet)
        await supervisor.start()
        ...
        await supervisor.stop()

    ``clock`` must be the clock of the fleet. ``prober`` defaults to `HttpProber`.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        clock: Callable[[], float],
        prober: Callable[[Probe], Awaitable[ProbeResult]] | None = None,
        max_probes: int = MAX_PROBES,
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._prober = prober
        self._own: HttpProber | None = None
        self._max_probes = max_probes
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._probes: dict[asyncio.Task[None], Probe] = {}
        self.failures = 0
        """Turns that raised: a bug of ours, survived."""

    @property
    def outstanding(self) -> int:
        """Probes under way."""
        return len(self._probes)

    async def start(self) -> None:
        """Start the supervisor task; a second call does nothing."""
        if self._task is not None:
            return
        if self._prober is None:
            self._own = HttpProber()
            self._prober = self._own
        self._fleet.wake = self._wake.set
        self._task = asyncio.create_task(self._run(), name="fullhit-health")

    async def stop(self) -> None:
        """Cancel the supervisor and all probes, and wait for them."""
        self._fleet.wake = lambda: None
        tasks = [task for task in (self._task, *self._probes) if task is not None]
        self._task = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._own is not None:
            await self._own.close()
            self._own = self._prober = None

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            pause = 1.0
            try:
                self._cancel_orphans()
                turn = self._fleet.tick(self._max_probes - len(self._probes))
                for probe in turn.probes:
                    task = asyncio.create_task(self._send(probe), name=f"fullhit-probe {probe.id}")
                    self._probes[task] = probe
                    task.add_done_callback(self._finished)
                pause = max(0.0, turn.wake_at - self._clock())
            except Exception:
                self.failures += 1  # the supervisor of all workers must outlive any single mistake
            # Not wait_for: that of Python 3.11 loses a cancellation which meets a wake-up, and `stop` waits for ever.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()

    def _cancel_orphans(self) -> None:
        for task, probe in self._probes.items():
            if not self._fleet.probing(probe):
                task.cancel()

    def _finished(self, task: asyncio.Task[None]) -> None:
        del self._probes[task]
        if not task.cancelled():
            task.exception()  # `_send` hands every result in itself; this keeps the loop from complaining
        self._wake.set()

    async def _send(self, probe: Probe) -> None:
        prober = self._prober
        assert prober is not None
        try:
            result = await prober(probe)
        except asyncio.CancelledError:
            self._fleet.probe_cancelled(probe)
            raise
        except Exception as error:
            result = ProbeResult("error", f"{type(error).__name__}: {error}")
        self._fleet.probe_done(probe, result)
