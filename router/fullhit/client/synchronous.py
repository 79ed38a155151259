"""The synchronous client. `asynchronous` is its twin; what one does, the other does."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from fullhit.client.errors import ClientError, NoWorker, Unreachable
from fullhit.client.http_door import HttpDoor
from fullhit.client.types import (
    ClientOptions,
    Door,
    Explanation,
    Question,
    Selection,
    WorkerInfo,
    backoff,
    scheme_of,
)

__all__ = ["Choice", "Client"]

_PARTING_SECONDS = 1.0


class Choice:
    """A worker, and its slot until `release`; best used in a ``with`` block."""

    def __init__(self, client: Client, selection: Selection) -> None:
        self.selection = selection
        self.url = selection.url
        self.reason = selection.reason
        self._client = client
        self._over = not selection.lease_id

    def release(self) -> bool:
        """Give the slot back. True when it was still held; a second call does nothing. Raises `ClientError`."""
        if self._over:
            return False
        released = self._client.release(self.selection.lease_id)
        self._over = True
        return released

    def __enter__(self) -> Choice:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except ClientError:
            pass  # the lease ends by itself, and what happened inside matters more

    def __repr__(self) -> str:
        return f"<Choice {self.selection.worker} {self.reason}>"


class Client:
    """A router at ``url``: ``http(s)://`` its admin listener, ``grpc(s)://`` its gRPC listener. ``key``: its key.

    Usable from several threads. Raises ValueError for another kind of URL, ImportError for gRPC without the extra.
    """

    def __init__(self, url: str, key: str = "", options: ClientOptions | None = None) -> None:
        self._options = options or ClientOptions()
        self._door: Door
        if scheme_of(url).startswith("grpc"):
            from fullhit.client.grpc_door import GrpcDoor

            self._door = GrpcDoor(url, key, self._options)
        else:
            self._door = HttpDoor(url, key, self._options)

    def select(self, *, timeout: float | None = None, **question: Any) -> Choice:
        """Choose a worker for a request; the arguments are the fields of `Question`.

        Repeated while the router cannot be reached, which is safe: the request id sees to it that one request has one
        slot. Raises `ClientError`.
        """
        asked = Question(**question)
        deadline = time.monotonic() + (timeout or self._options.timeout)
        attempt = 0
        while True:
            try:
                return Choice(self, self._door.select(asked, _left(deadline)))
            except (Unreachable, NoWorker) as error:
                pause = backoff(attempt, self._options)
                attempt += 1
                if not self._again(error, attempt) or pause >= deadline - time.monotonic():
                    if isinstance(error, Unreachable) and not asked.dry_run:
                        self._abandon(asked)
                    raise
                time.sleep(pause)

    def release(self, lease_id: str = "", *, request_id: str = "", pool: str = "") -> bool:
        """Give a slot back by its lease or its request id; False when it is not held any more."""
        deadline = time.monotonic() + self._options.timeout
        attempt = 0
        while True:
            try:
                return self._door.release(lease_id, request_id, pool, _left(deadline))
            except Unreachable:
                pause = backoff(attempt, self._options)
                attempt += 1
                if attempt >= self._options.attempts or pause >= deadline - time.monotonic():
                    raise
                time.sleep(pause)

    def explain(self, decision_id: int = 0, *, request_id: str = "", pool: str = "") -> Explanation:
        """Why a decision was made."""
        return self._door.explain(decision_id, request_id, pool, self._options.timeout)

    def workers(self, pool: str = "") -> list[WorkerInfo]:
        """The workers, all or those of one pool."""
        return self._door.workers(pool, self._options.timeout)

    def close(self) -> None:
        """Close the connections. Slots that are held stay held."""
        self._door.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _again(self, error: ClientError, attempt: int) -> bool:
        if isinstance(error, NoWorker):
            return self._options.wait_for_worker and error.retryable
        return attempt < self._options.attempts

    def _abandon(self, asked: Question) -> None:
        """The answer may be on its way: whatever it holds is given back."""
        try:
            self._door.release("", asked.request_id, asked.pool, _PARTING_SECONDS)
        except ClientError:
            pass


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
