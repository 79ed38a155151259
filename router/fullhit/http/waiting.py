"""The room in which requests wait for a worker.

Waiting is better than refusing: a worker that restarts, or has a free slot again, is usually there within seconds, and
not every client survives a refusal (the language server behind a refused ``/encode`` of SGLang 0.5.23 may not). So a
call waits, first come first served, bounded in number, bytes and time.

One rule decides, `_pump`: walk the queue from its head and let the pool select for each, until the pool has
nobody left. The choice is made for the waiting call and handed over with the slot already taken, so a woken task
cannot find the slot gone. A call that excludes workers (they turned it away) or pauses must not hold up those
behind it and is passed over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fullhit.core.decision import Decision
from fullhit.core.pool import Pool
from fullhit.core.types import NoEligibleWorker, SelectRequest

__all__ = ["WaitedTooLong", "WaitingRoom", "WaitingRoomFull"]

_TICK: Final = 1.0
"""While somebody waits the pool is asked at least this often (seconds)."""


class WaitingRoomFull(Exception):
    """Too many calls, or too many bytes, wait already; answer 503."""


class WaitedTooLong(Exception):
    """No worker took the call in time; answer 503. ``kind`` is that of the pool's last NoEligibleWorker, empty when
    workers are there but all of them are excluded."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True, eq=False)
class _Call:
    request: SelectRequest
    size: int
    not_before: float
    chosen: asyncio.Future[Decision]


class WaitingRoom:
    """`admit` selects a worker of ``pool``, now or later; `at_once` now or not at all.

    Create it inside the loop; `close` it.
    """

    def __init__(
        self,
        pool: Pool,
        max_calls: int,
        max_bytes: int,
        on_select: Callable[[str, float], None] | None = None,
    ) -> None:
        self._pool = pool
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self._on_select = on_select
        self._loop = asyncio.get_running_loop()
        self._queue: dict[_Call, None] = {}
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._soon = False
        self._capacity = self._wake
        pool.on_capacity.append(self._capacity)

    def __repr__(self) -> str:
        return f"<WaitingRoom {len(self._queue)} calls, {self._bytes} bytes>"

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def bytes(self) -> int:
        """Bytes of the bodies that wait."""
        return self._bytes

    def close(self) -> None:
        """Forget the pool. Calls that still wait run into their time limit."""
        if self._capacity in self._pool.on_capacity:
            self._pool.on_capacity.remove(self._capacity)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def at_once(self, request: SelectRequest, not_before: float = 0.0) -> Decision | NoEligibleWorker | None:
        """A decision with its ticket taken if one can be had without waiting, else why not (None: not its turn yet)."""
        if not_before or self._queue:
            now = self._loop.time()
            if not_before > now or self._somebody_first(now):
                return None
        try:
            return self._select(request)
        except NoEligibleWorker as error:
            return error

    async def admit(self, request: SelectRequest, size: int, deadline: float, not_before: float = 0.0) -> Decision:
        """A decision with its ticket taken, now or until ``deadline`` (the loop's clock).

        ``not_before``: wait at least until then. Raises WaitingRoomFull, WaitedTooLong.
        """
        found = self.at_once(request, not_before)
        if isinstance(found, Decision):
            return found
        reason = found
        if len(self._queue) >= self._max_calls or (self._queue and self._bytes + size > self._max_bytes):
            raise WaitingRoomFull(
                f"{len(self._queue)} requests ({self._bytes >> 20} MiB) are waiting for a worker already"
            ) from reason
        call = _Call(request, size, not_before, self._loop.create_future())
        self._queue[call] = None
        self._bytes += size
        self._arm()
        try:
            async with asyncio.timeout_at(deadline):
                return await call.chosen
        except TimeoutError:
            if call.chosen.done() and not call.chosen.cancelled():
                return call.chosen.result()  # Chosen in the very moment of the time limit.
            raise self._too_long(request) from reason
        except asyncio.CancelledError:
            self._give_back(call)
            raise
        finally:
            if self._queue.pop(call, 0) is None:
                self._bytes -= size

    # --- internals

    def _somebody_first(self, now: float) -> bool:
        return any(call.not_before <= now and not call.request.exclude for call in self._queue)

    def _select(self, request: SelectRequest) -> Decision:
        started = time.perf_counter()
        decision = self._pool.select(request)
        if self._on_select is not None:
            self._on_select(self._pool.name, time.perf_counter() - started)
        return decision

    def _too_long(self, request: SelectRequest) -> WaitedTooLong:
        probe = SelectRequest(keys=request.keys, items=request.items, dry_run=True)
        try:
            self._pool.select(probe)
        except NoEligibleWorker as error:
            return WaitedTooLong(str(error), error.kind)
        return WaitedTooLong("workers are ready but turned this request away")

    def _give_back(self, call: _Call) -> None:
        """The caller left in the very moment in which a worker was chosen for it."""
        if call.chosen.done() and not call.chosen.cancelled():
            ticket = call.chosen.result().ticket
            if ticket is not None:
                ticket.release()

    def _wake(self) -> None:
        """The pool may have room again. Called from inside the pool, so select later."""
        if self._queue and not self._soon:
            self._soon = True
            self._loop.call_soon(self._pump)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._queue:
            now = self._loop.time()
            pauses = [call.not_before - now for call in self._queue if call.not_before > now]
            self._timer = self._loop.call_later(min([_TICK, *pauses]), self._pump)

    def _pump(self) -> None:
        self._soon = False
        now = self._loop.time() + 0.001
        for call in list(self._queue):
            if call.not_before > now or call.chosen.done():
                continue
            try:
                decision = self._select(call.request)
            except NoEligibleWorker:
                if call.request.exclude:
                    continue
                break
            del self._queue[call]
            self._bytes -= call.size
            call.chosen.set_result(decision)
        self._arm()
