"""Questions to workers on the front's own behalf: what they serve, how they are set up. Names have changed over the
releases of SGLang, so a route that is not there (404) is asked for under its older name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from fullhit.core.worker import Worker
from fullhit.http.common import Origins
from fullhit.http.wire import Timeouts, UpstreamClient, UpstreamError

from .catalog import Facts

__all__ = ["Asking", "Said", "facts_of"]

_MAX_ANSWER: Final = 4 << 20
_AT_ONCE: Final = 16
_MAX_MODELS: Final = 256
_FAULTS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Said(NamedTuple):
    """What a worker answered: status 0 when it did not, ``body`` then says why."""

    worker: Worker
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        """The body, None where it is no JSON or no success."""
        if self.status != 200:
            return None
        try:
            return msgspec.json.decode(self.body)
        except _FAULTS:
            return None


class Asking:
    """Asks workers, a few at a time, each for ``seconds`` at most."""

    def __init__(self, client: UpstreamClient, origins: Origins, seconds: float = 5.0) -> None:
        self._client = client
        self._origins = origins
        self._timeouts = Timeouts(connect=seconds, send=seconds, first_byte=seconds, idle=seconds, total=seconds)
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def one(self, worker: Worker, method: bytes, *targets: bytes, timeouts: Timeouts | None = None) -> Said:
        """Ask one worker, under the first of the ``targets`` that it knows."""
        said = Said(worker, 0, b"nothing asked")
        async with self._slots:
            for target in targets:
                try:
                    answer = await self._client.send(
                        self._origins.of(worker.url), method, target, (), timeouts=timeouts or self._timeouts
                    )
                    said = Said(worker, answer.status, await answer.read(_MAX_ANSWER))
                except UpstreamError as error:
                    return Said(worker, 0, str(error).encode())
                if said.status != 404:
                    break
        return said

    async def all(
        self, workers: Iterable[Worker], method: bytes, *targets: bytes, timeouts: Timeouts | None = None
    ) -> list[Said]:
        """Ask all of them at once; their answers in order."""
        return await asyncio.gather(*(self.one(worker, method, *targets, timeouts=timeouts) for worker in workers))


def facts_of(models: Said, info: Said | None) -> Facts | None:
    """What a worker's answers say; None when it has not answered at all."""
    if models.status == 0:
        return None
    data = models.json.get("data") if isinstance(models.json, dict) else None
    cards = [card for card in _rows(data) if isinstance(card.get("id"), str)][:_MAX_MODELS]
    port = info.json.get("disaggregation_bootstrap_port") if info is not None and isinstance(info.json, dict) else None
    return Facts(tuple(cards), port if type(port) is int and 0 < port < 65_536 else None)


def _rows(data: object) -> Sequence[dict[str, Any]]:
    return [row for row in data if isinstance(row, dict)] if isinstance(data, list) else []
