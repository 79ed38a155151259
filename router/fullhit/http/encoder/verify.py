"""Asking an encoder whether it could read the media, before it is told where to push.

SGLang 0.5.23 with ``zmq_to_scheduler`` loses the whole language server over a part that failed. What fails in
practice is the picture: a URL that cannot be fetched, a file cut off in its pixels. The encoder then answers its
``/encode`` 400 at once, and pushes an error besides, but only to destinations that have registered. So as long as
the registrations are kept here, nobody but the router knows of the failure, and it can be mended (`remedy`).

How long to keep them, the encoder tells itself. ``/scheduler_receive_meta_data`` is meant for mooncake, but is
answered for every backend as soon as the sizes are known, that is when the media are decoded and before the
forward: an honest part has its registrations at the encoder long before its embedding is ready.

| answer                                | what it means                              | the registrations go     |
|---------------------------------------|--------------------------------------------|--------------------------|
| 200                                   | the media are fine                         | now                      |
| 500                                   | they are not, ``/encode`` fails just now   | if that does not, in 5 s |
| 404, 405, no such route               | an older encoder; not asked for 5 minutes  | now                      |
| 404 ``Unknown req_id``                | a ``--dp-size`` one without it after 5 s   | now                      |
| none in time, 504                     | the same as no route, unless it could once | now                      |
| connection lost, 503                  | ``/encode`` is likely to be lost as well   | if it is not, in 0.5 s   |

The question never decides over a part, it only delays; and not for long. What it cannot catch is a failure after
it was answered 200, in the forward itself.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from fullhit.http.wire import Origin, Timeouts, UpstreamClient, UpstreamError, UpstreamTimeout

from .parts import Part, PartState
from .settings import GatewaySettings

__all__ = ["MediaQuestions"]

_Value = TypeVar("_Value")

_UNPROVEN_SECONDS: Final = 10.0
"""Time for an encoder that has never answered such a question."""
_MUTE_SECONDS: Final = 300.0
_AFTER_REFUSAL: Final = 5.0
_AFTER_LOSS: Final = 0.5
_MAX_WORKERS: Final = 4_096
_TRIES: Final = 2
"""A kept-alive connection may have been closed in the moment of its use; asking twice does no harm."""
_HEADERS: Final = ((b"Content-Type", b"application/json"),)


class MediaQuestions:
    """One question per attempt of a part, shared by all its registrations. `withdraw` a part when it is over."""

    def __init__(self, client: UpstreamClient, settings: GatewaySettings, clock: Callable[[], float]) -> None:
        self._client = client
        self._settings = settings
        self._clock = clock
        self._open: dict[Part, tuple[int, asyncio.Task[None]]] = {}
        self._mute: OrderedDict[str, float] = OrderedDict()
        self._proven: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def needed(self, part: Part) -> bool:
        """Whether ``part`` has to wait for its encoder's word."""
        if not self._settings.verify_media or part.state is not PartState.SENT:
            return False
        muted = self._mute.get(part.worker)
        return muted is None or self._clock() - muted >= _MUTE_SECONDS

    async def settled(self, part: Part, attempt: int, origin: Origin) -> None:
        """Wait until the registrations of ``attempt`` may go out, or the attempt is over."""
        if attempt != part.attempt or not self.needed(part):
            return
        asked, task = self._open.get(part, (0, None))
        if task is None or asked != attempt:
            self.withdraw(part)
            task = asyncio.create_task(self._ask(part, origin))
            self._open[part] = attempt, task
        await asyncio.wait((task,))

    def withdraw(self, part: Part) -> None:
        """Nobody needs the answer about ``part`` any more; who waits goes on."""
        asked = self._open.pop(part, None)
        if asked is not None:
            asked[1].cancel()

    async def close(self) -> None:
        tasks = [task for _, task in self._open.values()]
        self._open.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- internals

    async def _ask(self, part: Part, origin: Origin) -> None:
        """Ends when the registrations may go out."""
        worker = part.worker
        proven = worker in self._proven
        limit = self._settings.verify_timeout
        if not proven:
            limit = min(limit, _UNPROVEN_SECONDS)
        body = msgspec.json.encode({"req_id": part.wire_id, "part_idx": part.part_idx})
        timeouts = Timeouts(connect=self._settings.connect_timeout, first_byte=limit, total=limit)
        for _ in range(_TRIES):
            try:
                response = await self._client.send(
                    origin, b"POST", b"/scheduler_receive_meta_data", _HEADERS, body, timeouts=timeouts
                )
                answer = await response.read(1 << 20)
            except UpstreamTimeout as error:
                if not proven and not error.not_processed:
                    _remember(self._mute, worker, self._clock())
                return
            except UpstreamError:
                continue
            self._mind(worker, response.status, answer, proven)
            if response.status == 500:
                await asyncio.sleep(_AFTER_REFUSAL)
            elif response.status == 503:
                await asyncio.sleep(_AFTER_LOSS)
            return
        await asyncio.sleep(_AFTER_LOSS)

    def _mind(self, worker: str, status: int, answer: bytes, proven: bool) -> None:
        """Learn from an answer whether the encoder can say such things."""
        if status in (200, 500):
            _remember(self._proven, worker, None)
        elif (status in (404, 405, 501) and not _is_unknown_id(answer)) or (status == 504 and not proven):
            self._proven.pop(worker, None)
            _remember(self._mute, worker, self._clock())


def _remember(memory: OrderedDict[str, _Value], worker: str, value: _Value) -> None:
    memory[worker] = value
    memory.move_to_end(worker)
    if len(memory) > _MAX_WORKERS:
        memory.popitem(last=False)


def _is_unknown_id(answer: bytes) -> bool:
    """The route is there, but the encoder does not know the part (yet)."""
    return b"Unknown req_id" in answer
