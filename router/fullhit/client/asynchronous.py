"""The asynchronous client, for one event loop. `synchronous` is its twin; what one does, the other does."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any

from fullhit.client.errors import ClientError, NoWorker, Unreachable
from fullhit.client.http_door import AsyncHttpDoor
from fullhit.client.types import (
    AsyncDoor,
    ClientOptions,
    Explanation,
    Question,
    Selection,
    WorkerInfo,
    backoff,
    scheme_of,
)

__all__ = ["AsyncChoice", "AsyncClient"]

_PARTING_SECONDS = 1.0


class AsyncChoice:
    """A worker, and its slot until `release`; best used in a ``async with`` block."""

    def __init__(self, client: AsyncClient, selection: Selection) -> None:
        self.selection = selection
        self.url = selection.url
        self.reason = selection.reason
        self._client = client
        self._over = not selection.lease_id

    async def release(self) -> bool:
        """Give the slot back. True when it was still held; a second call does nothing. Raises `ClientError`."""
        if self._over:
            return False
        released = await self._client.release(self.selection.lease_id)
        self._over = True
        return released

    async def __aenter__(self) -> AsyncChoice:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.release()
        except ClientError:
            pass  # the lease ends by itself, and what happened inside matters more

    def __repr__(self) -> str:
        return f"<AsyncChoice {self.selection.worker} {self.reason}>"


class AsyncClient:
    """A router at ``url``: ``http(s)://`` its admin listener, ``grpc(s)://`` its gRPC listener. ``key``: its key.

    Create it inside the running loop. Raises ValueError for another kind of URL, ImportError for gRPC without the
    extra.
    """

    def __init__(self, url: str, key: str = "", options: ClientOptions | None = None) -> None:
        self._options = options or ClientOptions()
        self._parting: set[asyncio.Task[None]] = set()
        self._door: AsyncDoor
        if scheme_of(url).startswith("grpc"):
            from fullhit.client.grpc_door import AsyncGrpcDoor

            self._door = AsyncGrpcDoor(url, key, self._options)
        else:
            self._door = AsyncHttpDoor(url, key, self._options)

    async def select(self, *, timeout: float | None = None, **question: Any) -> AsyncChoice:
        """Choose a worker for a request; the arguments are the fields of `Question`.

        Repeated while the router cannot be reached, which is safe: the request id sees to it that one request has one
        slot. A caller that is cancelled holds nothing. Raises `ClientError`.
        """
        asked = Question(**question)
        deadline = time.monotonic() + (timeout or self._options.timeout)
        attempt = 0
        while True:
            try:
                return AsyncChoice(self, await self._door.select(asked, _left(deadline)))
            except asyncio.CancelledError:
                if not asked.dry_run:
                    task = asyncio.create_task(self._abandon(asked))
                    self._parting.add(task)
                    task.add_done_callback(self._parting.discard)
                raise
            except (Unreachable, NoWorker) as error:
                pause = backoff(attempt, self._options)
                attempt += 1
                if not self._again(error, attempt) or pause >= deadline - time.monotonic():
                    if isinstance(error, Unreachable) and not asked.dry_run:
                        await self._abandon(asked)
                    raise
                await asyncio.sleep(pause)

    async def release(self, lease_id: str = "", *, request_id: str = "", pool: str = "") -> bool:
        """Give a slot back by its lease or its request id; False when it is not held any more."""
        deadline = time.monotonic() + self._options.timeout
        attempt = 0
        while True:
            try:
                return await self._door.release(lease_id, request_id, pool, _left(deadline))
            except Unreachable:
                pause = backoff(attempt, self._options)
                attempt += 1
                if attempt >= self._options.attempts or pause >= deadline - time.monotonic():
                    raise
                await asyncio.sleep(pause)

    async def explain(self, decision_id: int = 0, *, request_id: str = "", pool: str = "") -> Explanation:
        """Why a decision was made."""
        return await self._door.explain(decision_id, request_id, pool, self._options.timeout)

    async def workers(self, pool: str = "") -> list[WorkerInfo]:
        """The workers, all or those of one pool."""
        return await self._door.workers(pool, self._options.timeout)

    async def close(self) -> None:
        """Close the connections. Slots that are held stay held."""
        await asyncio.gather(*self._parting, return_exceptions=True)
        await self._door.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _again(self, error: ClientError, attempt: int) -> bool:
        if isinstance(error, NoWorker):
            return self._options.wait_for_worker and error.retryable
        return attempt < self._options.attempts

    async def _abandon(self, asked: Question) -> None:
        """The answer may be on its way: whatever it holds is given back."""
        try:
            await self._door.release("", asked.request_id, asked.pool, _PARTING_SECONDS)
        except ClientError:
            pass


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
